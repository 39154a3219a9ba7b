"""Functionalisation: mutation, views, aliases, random operations, modes; each small program against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto
from magneto.base.errors import MagnetoWarning
from tests.aot_autograd.differential import check

PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {}


def program(*shapes: tuple[int, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a program that takes random tensors of these shapes."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[fn.__name__] = (fn, lambda: tuple(torch.randn(s) for s in shapes))
        return fn

    return add


@program((3, 4), (3, 4))
def pointwise(x, y):
    return torch.sin(x) + y.cos() * 2, x.sum(), (x > y)


@program((3, 4), (3, 4))
def input_written(x, y):
    x.add_(y)
    return x * 2


@program((3, 4), (3, 4))
def input_written_and_returned(x, y):
    return x.mul_(2), y.exp(), x


@program((3, 4))
def input_written_through_view(x):
    x[1:].mul_(3)
    x.t()[0].zero_()
    x.view(-1)[5] = 7.0
    return x.sum()


@program((4, 6))
def input_written_through_deep_views(x):
    v = x.view(2, 2, 6).permute(2, 0, 1)[1:5:2]
    v += 1
    v.select(2, 0).fill_(4)
    return v * 2, x


@program((4, 5))
def view_of_input_returned(x):
    return x.view(20), x[1], x[:, 2:4], x.t(), x.unsqueeze(0), x.expand(2, 4, 5), x.detach(), x


@program((4, 5))
def view_of_result_returned(x):
    y = x.exp()
    return y.t(), y[0], y


@program((4, 5))
def lone_views_of_results(x):
    a, b, c = x.exp(), x.sin(), x.cos()
    return a.t(), b[1:3, ::2], c.sum(0).expand(3, 5), x.tan().view(2, 10)


@program((4, 5))
def same_object_twice(x):
    y = x + 1
    return y, y, x, x


@program((4, 5))
def equal_but_distinct(x):
    return x + 1, x + 1, x.clone(), x.clone()


@program((4, 5))
def views_written_after_use(x):
    y = x.clone()
    v = y[0]
    a = v + 1
    y.mul_(2)
    b = v + 1
    v.add_(10)
    return a, b, y, v


@program((3, 3), (3, 3))
def swap(a, b):
    t = a.clone()
    a.copy_(b)
    b.copy_(t)
    return t


@program((3, 3), (3, 3))
def copy_one_into_other(a, b):
    a.copy_(b)
    return a + 1


@program((3, 3))
def written_and_restored(a):
    keep = a.clone()
    a.zero_()
    a.copy_(keep)
    return keep


@program((4, 4), (4,))
def copy_between_types(x, y):
    h = torch.zeros(4, 4, dtype=torch.float64)
    h.copy_(x)
    i = torch.empty(4, 4, dtype=torch.int64)
    i.copy_(x * 10)
    h[2].copy_(y)
    return h, i


@program((4, 4))
def set_items(x):
    y = x.clone()
    y[y > 0] = 1.0
    y[[0, 2]] = torch.zeros(2, 4)
    y[torch.tensor([1]), torch.tensor([2])] = 9.0
    y[..., 1] = y[..., 0]
    y[1:, None, 2:] += 1
    return y


@program((4, 4))
def out_variants(x):
    o = torch.empty(4, 4)
    torch.add(x, 1, out=o)
    torch.mul(o, 2, out=x)
    v, i = torch.max(x, 0)
    return o, v, i


@program((2, 3))
def metadata_in_place_of_fresh(x):
    y = x + 1
    y.t_()
    y.unsqueeze_(0)
    y.squeeze_(0)
    y.transpose_(0, 1)
    y.add_(1)
    return y, y.sum(1)


@program((4, 6))
def splits(x):
    a, b = x.split(3, 1)
    c, d, e, f = x.unbind(0)
    g = torch.chunk(x + 1, 2, dim=0)
    b.mul_(2)
    c.add_(1)
    return a + 1, g[1], d * 2, (x.sum(),)[0], g[0]


@program((4, 6))
def data_and_detach(x):
    x.data.add_(1)
    y = x.detach()
    y.mul_(2)
    return x * 1


@program((4, 6))
def dropouts(x):
    y = F.dropout(x, 0.5, training=True)
    z = torch.rand(3)
    torch.randn(2)
    w = torch.rand_like(x)
    return y + F.dropout(x, 0.5, training=True), z, w, torch.bernoulli(torch.full((3,), 0.5)), torch.empty(3).normal_().uniform_(0, 2)


@program((4, 6, 5))
def random_numbers_in_other_layouts(x):
    y = x.permute(2, 0, 1)
    return F.dropout(y, 0.5, training=True), torch.bernoulli(y.sigmoid())


@program((4, 6))
def factories(x):
    y = torch.arange(6) + torch.tensor(3)
    z = torch.tensor([1.0, 2.0, 3.0])
    z[0] = 5
    return (
        x * y,
        z,
        torch.zeros(2, 3),
        torch.ones_like(x),
        torch.full((2,), 3),
        torch.eye(3),
        torch.linspace(0, 1, 5),
        torch.tensor(2.5),
        torch.tensor([1, 2]),
    )


@program((2, 3, 8, 8))
def channels_last(x):
    y = x.contiguous(memory_format=torch.channels_last)
    return y, y + 1, F.relu(y, inplace=False), F.max_pool2d(y, 2)


@program((4, 6))
def grad_mode_regions(x):
    with torch.no_grad():
        y = x * 2
    with torch.enable_grad():
        z = y + 1
    return z


@program((4, 6), (6, 5))
def autocast_region(x, w):
    context = torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, True)
    y = x @ w
    z = y.softmax(-1) + F.layer_norm(y, (5,))
    torch.amp.autocast_mode._exit_autocast(context)
    return y, z, x @ w


@program((4, 6))
def constants_and_none(x):
    return x + 1, None, 3, "name", 2.5, True, torch.float32


@program((2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16))
def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True)


@program((5, 4))
def dtype_views(x):
    i = x.view(torch.int32)
    y = x.clone()
    y.view(torch.int32).add_(1)
    return i, y, i.clone()


@program((5, 4))
def strided_views(x):
    y = x + 1
    v = y.as_strided((2, 3), (8, 2), 1)
    v.mul_(2)
    return y, v, x.diagonal()


@program((5, 4))
def in_place_keeps_strides(x):
    y = x.t().contiguous().t()
    y.add_(torch.ones(5, 4))
    y.copy_(x)
    return y


@program((5, 4))
def diagonals(x):
    y = x.clone()
    y.diagonal().fill_(1)
    torch.diagonal(y, 1).add_(2)
    return y


@program((6, 4))
def sorting_and_indices(x):
    v, i = x.sort(0)
    t = x.topk(2, dim=0)
    return v, i, t[0], t[1], x.argmax(), x.gather(0, i), torch.cat([x, v]), torch.stack([x, v], 1), torch.where(x > 0, x, v)


@program((3, 3))
def foreach(x):
    a, b = x.clone(), x + 1
    torch._foreach_add_([a, b], [x, x])
    torch._foreach_mul_([a, b], 2.0)
    return a, b


@program((3, 3))
def nothing_but_inputs(x):
    return x, None


@program((0, 3))
def empty_tensors(x):
    return x + 1, x.sum(0), x.view(3, 0)


@program((3, 4))
def operators_in_place(x):
    y = x * 1
    y += 1
    y -= x
    y *= 2
    y /= 3
    y **= 2
    y //= 2
    return y


@program((3, 4))
def fill_and_zero(x):
    y = torch.empty_like(x).fill_(3)
    x.fill_(2)
    y[0].zero_()
    z = torch.empty(3, dtype=torch.int32).fill_(True)
    return y, z


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    fn, make = PROGRAMS[name]
    torch.manual_seed(1)
    check(fn, *make())


def test_batch_norm_training_writes_its_statistics() -> None:
    check(torch.nn.BatchNorm2d(3).requires_grad_(False), torch.randn(2, 3, 4, 4))
    check(torch.nn.BatchNorm2d(3).requires_grad_(False).eval(), torch.randn(2, 3, 4, 4))


def test_non_contiguous_inputs() -> None:
    x = torch.randn(6, 8)

    def f(a, b):
        a.add_(1)
        return a.t(), a * b, b.view(-1)

    check(f, x.t()[:4].t(), torch.randn(24)[::1].view(6, 4))


def test_inputs_that_share_memory() -> None:
    x = torch.randn(8)

    def f(a, b):
        a.add_(1)
        return a + b

    check(f, x[:5], x[3:], falls_back=True)

    def g(a, b):
        return a + b, a[1:]

    check(g, x[:5], x[3:])


def test_sharing_at_run_time_is_noticed() -> None:
    from magneto.backends import lookup_backend
    from tests.aot_autograd.capture import capture

    def f(a, b):
        a.add_(1)
        return a + b

    gm, _ = capture(f, torch.randn(5), torch.randn(5))
    compiled = lookup_backend("aot_eager")(gm, [torch.randn(5), torch.randn(5)])
    x = torch.randn(8)
    y = x.clone()
    assert torch.equal(compiled(x[:5], x[3:])[0], f(y[:5], y[3:]))
    assert torch.equal(x, y)


def test_metadata_change_of_an_input_falls_back() -> None:
    def f(a):
        a.t_()
        return a + 1

    check(f, torch.randn(2, 3), falls_back=True)


def test_random_numbers_that_depend_on_layout_fall_back() -> None:
    check(lambda x: (torch.rand_like(x.t()), x + 1), torch.randn(5, 6), falls_back=True)
    check(lambda x: (torch.empty_like(x.t()).normal_(), x + 1), torch.randn(5, 6), falls_back=True)


def test_order_dependent_list_operation_falls_back() -> None:
    def f(x):
        a, b = x.clone(), x + 1
        torch._foreach_add_([a, b], [b, a])
        return a, b

    check(f, torch.randn(5), falls_back=True)


def test_write_through_overlapping_view_falls_back() -> None:
    def f(x):
        y = x.clone()
        y.as_strided((3, 3), (2, 1)).copy_(torch.ones(3, 3))
        return y

    check(f, torch.randn(10), falls_back=True)


def test_value_dependence_falls_back() -> None:
    def f(a):
        return a.nonzero(), a[0]

    def g(a):
        return a[a > 0]

    def h(a):
        return a.repeat_interleave(torch.tensor([1, 2, 3, 4, 5])), a + 1

    for fn in (f, g, h):
        check(fn, torch.randn(5), falls_back=True)


def test_wrong_program_raises_as_in_eager() -> None:
    from magneto.backends import lookup_backend
    from tests.aot_autograd.capture import capture

    gm, _ = capture(lambda a, b: a @ b, torch.randn(2, 3), torch.randn(3, 2))
    with pytest.warns(MagnetoWarning, match="mat1 and mat2"):
        compiled = lookup_backend("aot_eager")(gm, [torch.randn(2, 3), torch.randn(2, 3)])
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        compiled(torch.randn(2, 3), torch.randn(2, 3))


def test_equal_work_is_done_once() -> None:
    from magneto.aot_autograd.trace import trace
    from tests.aot_autograd.capture import capture

    gm, _ = capture(lambda x: x.exp() + x.exp() + 0 * x.sin() + torch.rand(()) * 0 + torch.rand(()) * 0, torch.randn(3))
    graph = trace(gm, [torch.randn(3)]).graph
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert names.count("aten.exp.default") == 1
    assert names.count("aten.rand.default") == 2


def test_under_ambient_autocast() -> None:
    def f(x, w):
        context = torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, False, True)
        y = x @ w
        torch.amp.autocast_mode._exit_autocast(context)
        return y, x @ w

    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(f, torch.randn(4, 5), torch.randn(5, 6))
        assert torch.is_autocast_enabled("cpu")


def test_under_inference_mode() -> None:
    def f(x, y):
        x.add_(1)
        return x[1:], x * y

    with torch.inference_mode():
        check(f, torch.randn(4, 5), torch.randn(4, 5))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_gradients_switched_on_under_inference_mode(backend: str) -> None:
    """Nothing is recorded there."""

    def f(x):
        with torch.enable_grad():
            y = x.exp()
            on = torch.is_grad_enabled()
        return y, x * 2, on

    x = torch.randn(4, 5, requires_grad=True)
    with torch.inference_mode():
        for plain, ours in zip(f(x), magneto.optimize(backend)(f)(x), strict=True):
            if isinstance(plain, torch.Tensor):
                assert (ours.requires_grad, ours.is_inference(), ours.is_leaf) == (plain.requires_grad, plain.is_inference(), plain.is_leaf)
                torch.testing.assert_close(ours, plain)
            else:
                assert ours == plain


def test_many_written_inputs() -> None:
    def f(*xs):
        for x in xs:
            x.mul_(2)
        return xs[0] + xs[1]

    check(f, *(torch.randn(3) for _ in range(5)))


@pytest.mark.parametrize("make", [lambda: torch.randn(6, 8).t()[:3, :4], lambda: torch.randn(2, 8, 4, 6)[:, :3].permute(0, 2, 3, 1)])
def test_copies_of_a_written_input_with_gaps_are_laid_out_as_copies_of_it(make):
    def fn(x):
        x.masked_fill_(x > 0.5, 0.25)
        return x.clone()

    check(fn, make())
