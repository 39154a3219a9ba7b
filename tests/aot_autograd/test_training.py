"""Gradients against eager: values, which are None, what requires grad, mutation, aliases, random operations, double backward."""

from __future__ import annotations

import copy
import functools
import gc
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto
from magneto.backends import lookup_backend
from magneto.base import events
from magneto.base.errors import MagnetoWarning, UserError
from tests.aot_autograd.capture import capture
from tests.aot_autograd.differential import aliasing, same
from tests.compare import assert_equal

T = torch.Tensor
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}


def program(*specs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Inputs by shape: (3, 4) requires grad, ("fixed", 3, 4) does not, ("inner", 3, 4) is computed from a leaf, ("ids", n, 3, 4) are integers below n."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[fn.__name__] = (fn, specs)
        return fn

    return add


def build(specs: tuple[Any, ...], seed: int) -> tuple[list[T], list[T]]:
    """(inputs, leaves)."""
    generator = torch.Generator().manual_seed(seed)
    inputs, leaves = [], []
    for spec in specs:
        kind = spec[0] if spec and isinstance(spec[0], str) else "leaf"
        if kind == "ids":
            inputs.append(torch.randint(0, spec[1], spec[2:], generator=generator))
            continue
        value = torch.randn(spec[1:] if kind != "leaf" else spec, generator=generator)
        if kind == "fixed":
            inputs.append(value)
            continue
        leaf = value.requires_grad_()
        leaves.append(leaf)
        inputs.append(leaf * 1.0 if kind == "inner" else leaf)
    return inputs, leaves


def run(fn: Callable[..., Any], specs: tuple[Any, ...], parameters: list[T], state: T, subset: int) -> list[Any]:
    """Outputs, inputs and gradients of one training step. `subset`: only every subset-th differentiable output gets a gradient."""
    inputs, leaves = build(specs, 3)
    torch.set_rng_state(state)
    for p in parameters:
        p.grad = None
    out = fn(*inputs)
    out = list(out) if isinstance(out, (tuple, list)) else [out]
    pattern = aliasing([*inputs, *out])
    values = [t.detach().clone() if isinstance(t, T) else t for t in [*out, *inputs]]
    facts = [(t.requires_grad, t.is_leaf, t.stride()) if isinstance(t, T) else None for t in [*out, *inputs]]
    facts += [t._version > 0 for t in inputs]
    generator = torch.Generator().manual_seed(5)
    roots = [t for t in dict.fromkeys([*out, *inputs]) if isinstance(t, T) and t.grad_fn is not None][::subset]
    loss = [(t * torch.randn(t.shape, generator=generator, dtype=torch.float32)).sum() for t in roots]
    if loss:
        sum(loss).backward()
    random_after = torch.get_rng_state()
    grads = [leaf.grad for leaf in leaves] + [p.grad for p in parameters]
    return [values, facts, pattern, grads, random_after]


def check(
    fn: Callable[..., Any],
    specs: tuple[Any, ...],
    backend: str = os.environ.get("TEST_BACKEND", "aot_eager"),
    tolerance: float = 1e-5,
    falls_back: bool | None = False,
) -> None:
    inputs, _ = build(specs, 3)
    state = torch.get_rng_state()
    module_state = copy.deepcopy(fn.state_dict()) if isinstance(fn, torch.nn.Module) else {}
    gm, lifted = capture(fn, *inputs)
    inputs, _ = build(specs, 3)
    torch.set_rng_state(state)
    before = events.count("fallback")
    if module_state:
        fn.load_state_dict(module_state)  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if falls_back or falls_back is None else "error", MagnetoWarning)
        compiled = lookup_backend(backend)(gm, [*inputs, *lifted])
    assert torch.equal(torch.get_rng_state(), state), "compiling moved the random stream"
    for subset in (1, 2):
        results = []
        for call in (fn, lambda *args: compiled(*args, *lifted)):
            if module_state:
                fn.load_state_dict(module_state)  # type: ignore[attr-defined]
            results.append(run(call, specs, lifted, state, subset))
            results[-1].append({k: v.clone() for k, v in fn.state_dict().items()} if module_state else {})
        (v0, f0, a0, g0, r0, s0), (v1, f1, a1, g1, r1, s1) = results
        for i, (x, y) in enumerate(zip(v1, v0, strict=True)):
            same(x, y, tolerance, f"value {i}")
        assert f1 == f0
        assert a1 == a0
        assert [g is None for g in g1] == [g is None for g in g0], "which gradients are None"
        for i, (x, y) in enumerate(zip(g1, g0, strict=True)):
            if y is not None:
                torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda text, i=i: f"gradient {i}: {text}")
        assert torch.equal(r0, r1), "random stream"
        for key in s0:
            same(s1[key], s0[key], tolerance, key)
    assert falls_back is None or (events.count("fallback") > before) == falls_back, [e.fields for e in events.events("fallback")]


@program((3, 4), (4, 5))
def matmul_tanh(x, w):
    return torch.tanh(x @ w), (x * 2).sum()


@program((3, 4), ("fixed", 3, 4), (3, 4))
def unused_and_fixed(x, y, z):
    return x * y, y + 1, y.exp(), None, 3


@program((3, 4), (3, 4))
def separate_outputs(x, y):
    return x.exp(), y.sin(), x + y


@program((3, 4))
def detached_output(x):
    y = x.sin()
    return y, y.detach(), x.detach(), y.detach() * 2


@program((3, 4))
def only_detached(x):
    return x.sin().detach(), x * 2


@program((3, 4))
def no_grad_region(x):
    with torch.no_grad():
        torch._C._set_grad_enabled(False)
        y = x * 2
        torch._C._set_grad_enabled(True)
    return y * x, y


@program((3, 4))
def views_of_results(x):
    y = x.exp()
    return y, y[0], y.t()


@program((3, 4))
def views_of_inputs(x):
    return x[1:], x.t(), x.view(-1) * 2, x


@program((3, 4))
def lone_view_of_result(x):
    return x.exp().t(), x.sin()[1], x.cos().sum(0).expand(2, 4), x.tan().view(12)


@program((4, 5), (5,))
def in_place_on_fresh(x, b):
    y = x * 2
    y.add_(b)
    y[0] = 1.0
    y[:, 1].mul_(b[:4])
    y.t()[2].zero_()
    return y.relu_()


@program(("inner", 3, 4), (3, 4))
def input_written(x, y):
    x.mul_(y)
    return x.sin()


@program(("inner", 3, 4), (3, 4))
def input_written_through_view(x, y):
    x[0].add_(y[1])
    return x * y, x[1:]


@program(("fixed", 3, 4), (3, 4))
def buffer_gets_gradient(b, x):
    b.copy_(x * 2)
    return b * 3, b


@program(("fixed", 3, 4), (3, 4))
def buffer_written_without_gradient(b, x):
    b.add_(1)
    with torch.no_grad():
        torch._C._set_grad_enabled(False)
        b.add_(x)
        torch._C._set_grad_enabled(True)
    return x * b.clone()


@program((3, 4))
def parameter_updated_under_no_grad(p):
    torch._C._set_grad_enabled(False)
    p.sub_(0.1)
    torch._C._set_grad_enabled(True)
    return p.exp()


@program((4, 6))
def dropout(x):
    return F.dropout(x, 0.5, training=True) * 2, F.dropout(x, 0.3, training=True)


@program((2, 8, 16), (16,), (16,))
def layer_norm(x, w, b):
    return F.layer_norm(x, (16,), w, b), F.gelu(x)


@program(("ids", 10, 3, 4), (10, 5))
def embedding(i, w):
    return F.embedding(i, w), F.embedding(i, w, padding_idx=0)


@program((6, 5), ("ids", 5, 6))
def cross_entropy(x, y):
    return F.cross_entropy(x, y), F.cross_entropy(x, y, label_smoothing=0.1), F.mse_loss(x, x.detach() * 2)


@program((2, 3, 8, 8), (4, 3, 3, 3), (4,))
def convolution(x, w, b):
    y = F.conv2d(x, w, b, padding=1)
    return F.max_pool2d(F.relu(y), 2), F.avg_pool2d(y, 2), F.adaptive_avg_pool2d(y, 1)


@program((2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16))
def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True)


@program((3, 4), ("ids", 3, 2))
def indexing(x, i):
    return x[i], x.index_select(0, i), x.gather(0, i[:, None]), torch.cat([x, x]), torch.stack([x[0], x[1]]), x.cumsum(0)


@program((4, 5))
def reductions(x):
    return x.mean(), x.std(0), x.var(1), x.amax(1), x.max(1)[0], x.softmax(1), x.log_softmax(0), x.norm(), x.logsumexp(1), x.prod()


@program((4, 4), (4, 4))
def autocast(x, w):
    context = torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, True)
    y = (x @ w).float()
    torch.amp.autocast_mode._exit_autocast(context)
    return y.exp()


@program((4, 4))
def same_tensor_twice(x):
    y = x.sin()
    return y, y, x


@program((3, 4), (3, 4))
def gradient_is_the_tangent(x, y):
    return x + y, x - y


@program((6, 4))
def splits(x):
    a, b = x.split(3)
    c, d = (x * 2).chunk(2, 1)
    return a * b, c + 1, d


@program((3, 4))
def literals(x):
    y = x.clone()
    y[[0, 2]] = torch.zeros(2, 4)
    return y * torch.tensor([1.0, 2.0, 3.0, 4.0]), x[[1, 1]] + torch.tensor(2.0)


@program((3, 4), (3, 4))
def in_place_chain(x, y):
    z = x.clone()
    for _ in range(3):
        z = z.mul_(y).add_(x)
    z.copy_(z.t().reshape(3, 4))
    return z


@program(("fixed", 3, 4))
def nothing_requires_grad(x):
    return x * 2


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    fn, specs = PROGRAMS[name]
    check(fn, specs)


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 8)

    def forward(self, x: T) -> tuple[T, T]:
        y, (h, _) = self.lstm(x)
        return y, h


def test_modules() -> None:
    torch.manual_seed(0)
    check(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)), ((3, 4),))
    check(
        torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(inplace=True)),
        (("fixed", 2, 3, 8, 8),),
        tolerance=1e-4,
    )
    check(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (("fixed", 2, 5, 16),), tolerance=1e-4)
    check(Recurrent(), ((3, 2, 4),), tolerance=1e-4)
    check(torch.nn.GroupNorm(2, 4), ((2, 4, 5),))


def compile_training(fn: Callable[..., Any], *inputs: T) -> Callable[..., Any]:
    gm, lifted = capture(fn, *inputs)
    compiled = lookup_backend("aot_eager")(gm, [*inputs, *lifted])
    return lambda *args: compiled(*args, *lifted)


def test_double_backward_is_eagers() -> None:
    def f(x, w):
        return torch.tanh(x @ w).pow(2)

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    results = []
    for fn in (f, compile_training(f, x, w)):
        out = fn(x, w)
        out = out[0] if isinstance(out, tuple) else out
        (gx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        results.append(torch.autograd.grad((gx**2).sum(), (x, w)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("late", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("computed", [False, True], ids=["leaf", "computed"])
def test_hooks_of_inputs_run_once_in_double_backward(computed: bool, late: bool) -> None:
    """A gradient penalty with a hook on a weight: the graph that runs again called it, and so did the engine."""

    def f(x, w):
        return torch.tanh(x @ w).pow(2)

    x, leaf = torch.randn(3, 4), torch.randn(4, 5, requires_grad=True)
    compiled = compile_training(f, x, leaf)
    results = []
    for fn in (f, compiled):
        leaf.grad = None
        w = leaf * 1 if computed else leaf
        hook = functools.partial(torch.mul, 3)
        handle = None if late else w.register_hook(hook)
        out = fn(x, w)
        out = out[0] if isinstance(out, tuple) else out
        handle = handle or w.register_hook(hook)
        (gradient,) = torch.autograd.grad(out.sum(), w, create_graph=True)
        (out.sum() + gradient.pow(2).sum()).backward()
        handle.remove()
        results.append((gradient.detach(), leaf.grad))
    assert_equal(results[1], results[0], 1e-5)


@pytest.mark.parametrize("written", ["result", "input"])
def test_double_backward_behind_a_write_to_what_it_does_not_need(written: str) -> None:
    def f(x, w, c):
        u = torch.tanh(x @ w)
        return u.pow(2).sum() + (c + u).sum(), (u * c * c).exp()

    x, w, c = torch.randn(3, 4), torch.randn(4, 5, requires_grad=True), torch.randn(5)
    compiled = compile_training(f, x, w, c)
    results = []
    for fn in (f, compiled):
        w.grad = None
        out, other = fn(x, w, c)
        with torch.no_grad():
            (other if written == "result" else c).mul_(2)
        try:
            (gradient,) = torch.autograd.grad(out, w, create_graph=True)
            gradient.pow(2).sum().backward()
            results.append((gradient.detach(), w.grad))
        except (RuntimeError, UserError) as error:
            assert written == "input" and fn is compiled, error  # a graph that runs again needs all its inputs
            return
    assert_equal(results[1], results[0], 1e-5)


def test_double_backward_draws_the_same_numbers() -> None:
    x = torch.ones(30, 4, requires_grad=True)
    out = compile_training(lambda x: F.dropout(x, 0.5, True), x)(x)[0]
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, out)


def test_backward_twice_and_freed_memory() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    fn = compile_training(lambda x: x.sin().exp(), x)
    out = fn(x)[0]
    out.sum().backward(retain_graph=True)
    first = x.grad.clone()
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_tensor_changed_in_place_before_backward_is_an_error_as_in_eager() -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def f(x):
        return x.exp()

    for fn in (f, compile_training(f, x)):
        out = fn(x)
        out = out[0] if isinstance(out, tuple) else out
        with torch.no_grad():
            out.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_leaf_written_in_grad_mode_raises_as_in_eager() -> None:
    x = torch.randn(3, requires_grad=True)
    gm, _ = capture(lambda x: x.mul_(2), torch.randn(3))
    with pytest.warns(MagnetoWarning, match="W104"):
        compiled = lookup_backend("aot_eager")(gm, [x])
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        compiled(x)


def test_strided_and_expanded_gradients() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    fn = compile_training(lambda x: x * x, x)
    fn(x)[0].t().contiguous().t().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "use",
    [
        lambda conv, x: conv(conv(x) + 1),
        lambda conv, x: conv(conv(conv(x))),
        lambda conv, x: conv(x).sum() + conv(x.contiguous()).exp(),
        lambda conv, x: conv(x.contiguous()).exp() + conv(x).sum(),
        lambda conv, x: conv(x) + conv.weight.square().sum(),
        lambda conv, x: conv(x + conv.weight.transpose(0, 1).square().sum() + conv.weight.transpose(0, 1).sum()),
    ],
)
def test_strides_of_gradients_that_are_sums(use: Callable[..., T], backend: str) -> None:
    """A module used twice: the engine adds in place, and strides of dimensions of size 1 stay."""
    x = torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    for conv in (torch.nn.Conv2d(8, 8, 3, padding=1, groups=8), torch.nn.Conv2d(8, 8, 1)):
        found = []
        for fn in (use, magneto.compile(use, backend=backend, fullgraph=True)):
            conv.zero_grad()
            fn(conv, x).square().sum().backward()
            found.append(conv.weight.grad)
        assert found[1].stride() == found[0].stride()
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "last", [lambda: torch.nn.BatchNorm2d(8), lambda: torch.nn.GroupNorm(2, 8), torch.nn.Flatten, lambda: torch.nn.LayerNorm(11)]
)
def test_expanded_gradients_give_the_bits_of_eager(last) -> None:
    """Sums over an expanded gradient run in another order than over a dense one; group norm's kernel wants it dense."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), last())
    x = torch.randn(5, 3, 11, 13)
    found = []
    for call in (net, magneto.optimize("aot_eager")(lambda x: net(x))):
        net.zero_grad()
        call(x).sum().backward()
        found.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_less_is_kept_than_eager_keeps() -> None:
    from magneto.aot_autograd.joint import trace_joint
    from magneto.aot_autograd.partition import partition

    def f(x, w):
        return F.gelu((x @ w).sigmoid() * 2 + 1).sum()

    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    gm, _ = capture(f, x, w)
    cut = partition(trace_joint(gm, [x, w]))
    assert [kept.kind for kept in cut.kept].count("extra") == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_two_forwards_then_two_backwards(backend: str) -> None:
    """What a call keeps for its backward survives the next call."""

    def f(x, w):
        return torch.tanh(x @ w).exp().sum(1)

    w = torch.randn(4, 5, requires_grad=True)
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    gm, _ = capture(f, first, w)
    compiled = lookup_backend(backend)(gm, [first, w])
    for call in (lambda x: f(x, w), lambda x: compiled(x, w)[0]):
        one, two = call(first), call(second)
        one.sum().backward()
        two.sum().backward()
    grad = w.grad / 2
    w.grad = None
    f(first, w).sum().backward()
    f(second, w).sum().backward()
    torch.testing.assert_close(grad, w.grad)


def test_views_of_a_leaf_whose_rows_share_memory() -> None:
    """Rows that lie in one place are different rows to autograd."""

    def rows(x):
        return x.split(1)

    weights = [torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])]
    optimised = magneto.optimize("aot_eager")(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MagnetoWarning)
        optimised(torch.ones(1, 2, requires_grad=True).expand(2, 2))  # with a history: may not be compiled for the leaf
    grads = []
    for run in (rows, optimised):
        leaf = torch.ones(1, 2).expand(2, 2).detach().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MagnetoWarning)
            grads += torch.autograd.grad(run(leaf), [leaf], weights)
    assert grads[0].tolist() == grads[1].tolist() == [[1.0, 2.0], [10.0, 20.0]]


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_inputs_whose_elements_share_memory_are_trained(leaf, backend) -> None:
    def fn(x):
        return x[0] * 2 + x[1] * x[2].exp(), (x @ x.t()).sin(), x.reshape(-1) * 3

    made = [torch.linspace(0, 1, 4)[None], torch.linspace(0, 1, 3)[:, None]]
    found: list[Any] = [[], []]
    optimised = magneto.optimize(backend, nopython=True)(fn)
    for run, grads in zip((fn, optimised), found, strict=True):
        for base in (*made, *made):
            x = base.expand(3, 4).detach() if leaf else base.clone().requires_grad_().expand(3, 4)
            results = run(x.requires_grad_())
            grads += [results, torch.autograd.grad([one.square().sum() for one in results], x)]
    assert_equal(found[1], found[0], 0.0 if backend == "aot_eager" else 1e-5)
    assert magneto.stats()["fallbacks"] == 0


@pytest.mark.filterwarnings("ignore:.W104")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_results_of_inputs_whose_elements_share_memory_lie_as_in_eager(backend) -> None:
    def fn(x):
        y = x + torch.ones(4, 3).t()
        return y, x.exp(), y

    def views(x):
        y = x + torch.ones(4, 3).t()
        return y, y[0], (y * 2).t().view(-1)

    for program, fallbacks in ((fn, 0), (views, 1)):
        x = torch.linspace(0, 1, 4, requires_grad=True)
        plain, ours = program(x.expand(3, 4)), magneto.optimize(backend, nopython=True)(program)(x.expand(3, 4))
        assert [y.stride() for y in ours] == [y.stride() for y in plain] and (ours[2] is ours[0]) == (plain[2] is plain[0])
        found = [torch.autograd.grad([y.square().sum() for y in results], x)[0] for results in (plain, ours)]
        assert_equal([ours, found[1]], [plain, found[0]], 1e-6)
        assert magneto.stats()["fallbacks"] == fallbacks


def _detached(x):
    x.detach()[0].add_(1)


def _data(x):
    x.data.mul_(2)


def _off(x):
    with torch.no_grad():
        x.mul_(3)


def _recorded(x):
    x.mul_(3)


@pytest.mark.parametrize("write", [_detached, _data, _off, _recorded])
@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_history_of_a_written_input(write, leaf: bool, backend: str) -> None:
    """A write that autograd does not see leaves the input's history alone, whatever the grad mode is."""

    def fn(x):
        write(x)
        return x * x

    def results(call):
        start = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        x = start if leaf else start * 1.5
        try:
            y = call(x)
        except RuntimeError as error:
            return [type(error)]
        (y.sum() + (x * torch.arange(3.0)).sum()).backward()
        return [y.detach(), x.detach(), start.grad, x.requires_grad, x.is_leaf, x._version]

    optimised = magneto.optimize(backend)(fn)
    for _ in range(2):
        for a, b in zip(results(fn), results(optimised), strict=True):
            torch.testing.assert_close(a, b) if isinstance(a, torch.Tensor) else None
            assert isinstance(a, torch.Tensor) or a == b
    assert leaf and write is _recorded or magneto.stats()["fallbacks"] == 0


ACTIVATIONS = """relu gelu silu mish elu selu celu softplus leaky_relu hardswish hardsigmoid hardtanh logsigmoid tanhshrink softsign softshrink hardshrink relu6
glu sigmoid tanh""".split()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_activations_are_eagers_bit_for_bit(name: str) -> None:
    """The kernels that eager takes: a backward written as other operations rounds otherwise."""
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randn(4, 34, generator=generator) for _ in range(2))

    def loss(x: T) -> T:
        y = getattr(F, name)(x * 1.1)
        return (y * weight[:, : y.shape[1]]).sum()

    gradients = []
    for fn in (loss, magneto.optimize("aot_eager")(loss)):
        leaf = x.clone().requires_grad_()
        fn(leaf).backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_result_without_any_gradient_requires_grad(backend: str, inside: bool) -> None:
    """How many elements differ from zero: eager records it, and gives no gradient."""

    def count(x: torch.Tensor) -> torch.Tensor:
        y = torch.linalg.vector_norm(x * 2, 0) if inside else torch.norm(x, 0)
        if inside:
            y.backward()
        return y

    x, other = (torch.tensor([1.0, 0.0, 2.0], requires_grad=True) for _ in range(2))
    optimised = magneto.optimize(backend)(count)
    for _ in range(2):
        expected, found = count(x), optimised(other)
        assert (found.requires_grad, found.item()) == (expected.requires_grad, expected.item()) == (True, 2.0)
        if not inside:
            expected.backward()
            found.backward()
        assert (x.grad is None) == (other.grad is None)
        if x.grad is not None and other.grad is not None:
            torch.testing.assert_close(x.grad, other.grad)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_gradient_that_is_the_input(backend: str) -> None:
    """Of nothing: autograd's formula gives the input back."""
    x = torch.zeros(0, 3, requires_grad=True)
    magneto.optimize(backend)(lambda z: torch.cummax(z, 0).values)(x).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 3) and x.grad.data_ptr() == 0


@pytest.mark.filterwarnings("ignore:.W104")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_refused_by_their_values(backend: str) -> None:
    """Of complex eigenvectors, which have a phase: eager raises, and so do we; real ones are compiled."""
    torch.manual_seed(0)
    x = torch.randn(3, 3, dtype=torch.complex64)
    for matrix, refused in ((x + x.mH, True), ((x + x.mH).real.contiguous(), False)):
        matrix.requires_grad_()
        values, vectors = magneto.optimize(backend)(lambda a: torch.linalg.eigh(a))(matrix)
        if refused:
            with pytest.raises(RuntimeError, match="e\\^{i phi}"):
                vectors.real.sum().backward()
        else:
            (vectors * vectors).sum().backward()
            assert matrix.grad is not None


def test_no_collection_while_a_backward_is_compiled(monkeypatch):
    """The collector would walk the program's whole heap, and free nothing."""
    from magneto.backends import pipeline

    seen: list[bool] = []
    compiled = pipeline.compile_half
    monkeypatch.setattr(pipeline, "compile_half", lambda *args: (seen.append(gc.isenabled()), compiled(*args))[1])
    x = torch.randn(4, requires_grad=True)
    magneto.optimize("inductor")(lambda x: x.sin().sum())(x).backward()
    assert seen == [False] and gc.isenabled()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_complex_numbers_of_the_program_train(backend):
    """Autograd's formulas conjugate them: an operation on a number, not on a tensor."""

    def fn(z):
        return (torch.exp(1j * z) + z / (1 + 2j) - (2j / z)).abs().sum()

    def step(w, x):
        loss = ((w * x * 1j).sum() - 1).abs() ** 2
        loss.backward()
        return loss.detach()

    torch.manual_seed(0)
    x = torch.view_as_complex(torch.randn(4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", MagnetoWarning)
        for of in (x, x[1], x.real.clone()):
            ours, plain = (of.clone().requires_grad_() for _ in range(2))
            a, b = magneto.optimize(backend, nopython=True)(fn)(ours), fn(plain)
            a.backward()
            b.backward()
            torch.testing.assert_close((a, ours.grad), (b, plain.grad))
        ours, plain = (x.clone().requires_grad_() for _ in range(2))
        compiled = magneto.optimize(backend, nopython=True)(step)
        for n in range(3):
            torch.testing.assert_close(compiled(ours, x + n), step(plain, x + n))
            torch.testing.assert_close(ours.grad, plain.grad)
