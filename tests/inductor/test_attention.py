"""Attention that programs write out becomes one call, and answers as the formula does."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import magneto
from magneto.aot_autograd.joint import trace_joint
from magneto.aot_autograd.trace import trace
from magneto.base.events import counters
from magneto.graph.attention import ATTENTION
from magneto.graph.rules import propagate
from magneto.inductor import attention, attention_joint
from magneto.inductor.rewrite import copied

T = torch.Tensor
INF = float("inf")
KEPT = torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(2)) > 0.4
KEPT[..., 0], KEPT[0, :, 3] = True, False  # one row sees no key


@pytest.fixture(autouse=True)
def always() -> Iterator[None]:
    """Whatever it pays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_pays", lambda *_: True)
        patch.setattr(attention_joint, "_pays", lambda *_: True)
        yield


def operands(dtype: torch.dtype = torch.float32, queries: int = 20, keys: int = 20) -> tuple[T, T, T]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 4, n, 16, generator=generator).to(dtype) for n in (queries, keys, keys))
    return q, k, v


def ahead(q: T, k: T) -> T:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril() == 0


def plain(q: T, k: T, v: T) -> T:
    return F.softmax(q @ k.transpose(-2, -1) * 0.25, dim=-1) @ v


def divided_in_float32(q: T, k: T, v: T) -> T:
    scores = torch.matmul(q, k.transpose(2, 3)) / 16**0.5
    scores = scores + torch.full(scores.shape[-2:], torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v).transpose(1, 2).contiguous()


def one_projection(q: T, k: T, v: T) -> T:
    x = torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k, v)], -1)
    q, k, v = (t.view(2, 20, 4, 16).transpose(1, 2) for t in x.split(64, 2))
    scores = (q @ k.transpose(-2, -1)).masked_fill(ahead(q, k).repeat(2, 1, 1, 1), -INF) * 0.25
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 20, 64)


def einsums(q: T, k: T, v: T) -> T:
    q, k, v = (t.transpose(1, 2) for t in (q * 0.5, k * 0.5, v))
    return torch.einsum("bhij,bjhd->bihd", torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1), v)


def three_dimensions(q: T, k: T, v: T) -> T:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    slopes = torch.arange(8)[:, None, None] * torch.arange(20) * 0.125
    return torch.bmm(torch.baddbmm(slopes.to(q.dtype), q, k.mT, beta=0.5, alpha=0.25).softmax(-1), v)


def matrices(q: T, k: T, v: T) -> T:
    return (q[0, 0] @ k[0, 0].t() / torch.full([], 4.0)).softmax(-1) @ v[0, 0]


def groups(q: T, k: T, v: T) -> T:
    q, (k, v) = q.view(2, 2, 2, 20, 16), (t[:, ::2, None] for t in (k, v))
    return ((q * 0.25) @ k.mT).masked_fill(ahead(q, k), -INF).softmax(-1) @ v


def repeated_heads(q: T, k: T, v: T) -> T:
    k, v = (t[:, ::2, None].expand(2, 2, 2, 20, 16).reshape(2, 4, 20, 16) for t in (k, v))
    return (torch.where(ahead(q, k), torch.finfo(q.dtype).min, q @ k.mT * 0.25)).softmax(-1) @ v


def autocast(q: T, k: T, v: T) -> T:
    with torch.autocast("cpu", torch.bfloat16):
        return plain(q, k, v)


def two_products(q: T, k: T, v: T) -> T:
    return ((q @ k.mT + q @ v.mT) * 0.125).softmax(-1) @ v


FORMS = [plain, divided_in_float32, one_projection, einsums, three_dimensions, matrices, groups, repeated_heads, autocast, two_products]


def graph_of(fn: Callable[..., Any], *args: T) -> fx.Graph:
    gm = fx.GraphModule({}, fx.Graph())
    gm.graph.output(gm.graph.call_function(fn, tuple(gm.graph.placeholder(f"x{i}") for i in range(len(args)))))
    return trace(gm, args, False).graph


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is ATTENTION]


def check(fn: Callable[..., Any], *args: T) -> None:
    """As eager answers, with its strides, and no further from float64 than twice its distance."""
    magneto.reset()
    with torch.no_grad():
        wanted, got = fn(*args), magneto.optimize("inductor", nopython=True)(fn)(*args)
        exact = fn(*(a.double() if a.is_floating_point() else a for a in args))
    assert got.stride() == wanted.stride() and got.dtype is wanted.dtype
    assert torch.equal(got.isnan(), wanted.isnan())
    ours, theirs = ((y.double() - exact).nan_to_num().abs().max() for y in (got, wanted))
    assert ours <= 2 * theirs + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: Callable[..., T], dtype: torch.dtype) -> None:
    if form is autocast and dtype is torch.bfloat16:
        pytest.skip("nothing is cast")
    graph = attention.fuse_attention(graph_of(form, *operands(dtype)))
    graph.lint()
    assert len(calls(graph)) == 1 and not any(n.target is torch.ops.aten._softmax.default for n in graph.nodes)
    check(form, *operands(dtype))


def test_groups_of_heads() -> None:
    """Keys and values that several heads have in common are not repeated."""
    graph = attention.fuse_attention(graph_of(repeated_heads, *operands()))
    assert not any(node.target is torch.ops.aten.clone.default for node in graph.nodes)


def filled(q: T, k: T, v: T, kept: T) -> T:
    return (q @ k.mT * 0.25).masked_fill(~kept, -INF).softmax(-1) @ v


def filled_low(q: T, k: T, v: T, kept: T) -> T:
    return (q @ k.mT * 0.25).masked_fill(kept == 0, -1e9).softmax(-1) @ v


def added(q: T, k: T, v: T, mask: T) -> T:
    return ((q @ k.mT + mask) * 0.25).softmax(-1) @ v


def added_in_float32(q: T, k: T, v: T, mask: T) -> T:
    return ((q @ k.mT * 0.25).float() + mask).softmax(-1).to(v.dtype) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_keys(dtype: torch.dtype) -> None:
    """NaN where -inf was filled in or added, the mean of all values where a number was."""
    q, k, v = operands(dtype)
    mask = torch.zeros(2, 1, 20, 20).masked_fill_(~KEPT, -INF)
    for fn, given in ((filled, KEPT), (filled_low, KEPT), (added, mask.to(dtype)), (added_in_float32, mask)):
        assert len(calls(attention.fuse_attention(graph_of(fn, q, k, v, given)))) == 1
        check(fn, q, k, v, given)
    assert not calls(attention.fuse_attention(graph_of(filled_low, *operands(torch.float16), KEPT)))  # scores would show


@pytest.mark.parametrize("what", [0, 1, 2])
@pytest.mark.parametrize("number", [torch.nan, INF, 0.0])
def test_what_is_no_number(what: int, number: float) -> None:
    """The kernel makes zeros of rows of nothing but NaN; zeros of zeros stay."""
    args = operands(keys=7)
    args[what][0, 0] = number
    args[what][1, 2, :2] = number
    if number == 0:
        args[2][..., 0] = 0
    check(plain, *args)
    check(lambda q, k, v: (q @ k.mT).masked_fill(ahead(q, k), -INF).softmax(-1) @ v, *args[:2], args[2].nan_to_num())


def windowed(q: T, k: T, v: T) -> T:
    scores = q @ k.mT
    rows, columns = torch.arange(scores.shape[-2])[:, None], torch.arange(scores.shape[-1])
    return scores.masked_fill((columns > rows) | (columns < rows - 4), -INF).softmax(-1) @ v


def from_the_end(q: T, k: T, v: T) -> T:
    kept = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
    return torch.where(kept, q @ k.mT, -INF).softmax(-1) @ v


def test_masks_of_constants() -> None:
    """A causal one is an argument of the kernel, one that hides nothing is none; whatever the lengths."""
    for fn, queries, causal in (
        (one_projection, 20, True),
        (from_the_end, 20, True),
        (from_the_end, 7, None),
        (from_the_end, 1, False),
        (windowed, 20, None),
    ):
        args = operands(queries=queries)
        (call,) = calls(attention.fuse_attention(graph_of(fn, *args)))
        assert (call.args[3] is None, call.args[4]) == (causal is not None, bool(causal))
        check(fn, *args)
    check(lambda q, k, v: (q @ k.mT).masked_fill(ahead(q, k), -INF).softmax(-1) @ v, *operands(queries=30, keys=20))


LEFT: list[Callable[[T, T, T], Any]] = [
    lambda q, k, v: ((weights := (q @ k.mT).softmax(-1)) @ v, weights),
    lambda q, k, v: ((scores := q @ k.mT * 0.25).softmax(-1) @ v, scores),
    lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5) @ v,
    lambda q, k, v: (q @ k.mT * -0.25).softmax(-1) @ v,
    lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    lambda q, k, v: (q @ k.mT).softmax(-1) @ v[..., :8],
    lambda q, k, v: (q @ k.mT).masked_fill(ahead(q, k), -100.0).softmax(-1) @ v,
    lambda q, k, v: (q @ k.mT * q.amax(-1, keepdim=True)).softmax(-1) @ v,
    lambda q, k, v: (q @ k[:, :, :1].mT).softmax(-1) @ v[:, :, :1],
    lambda q, k, v: (q.double() @ k.mT.double()).softmax(-1) @ v.double(),
]  # fmt: skip


@pytest.mark.parametrize("fn", LEFT)
def test_what_stays(fn: Callable[[T, T, T], Any]) -> None:
    graph = graph_of(fn, *operands())
    assert attention.fuse_attention(graph) is graph


def test_one_mask_for_two() -> None:
    q, k, v = operands()
    graph = attention.fuse_attention(graph_of(lambda q, k, v, kept: filled(filled(q, k, v, kept), k, v, kept), q, k, v, KEPT))
    assert len({call.args[3] for call in calls(graph)}) == 1 and len(calls(graph)) == 2


def test_numerics_of_eager() -> None:
    args = operands(torch.bfloat16)
    magneto.reset()
    with torch.no_grad(), magneto.config.patch(numerics="eager"):
        assert torch.equal(magneto.compile(plain)(*args), plain(*args))


def test_sizes_of_one_family() -> None:
    """No size has kernels of its own."""

    def causal(q: T, k: T, v: T) -> T:
        return (q @ k.mT * 0.25).masked_fill(ahead(q, k), -INF).softmax(-1) @ v

    magneto.reset()
    before, compiled = counters().get("sizes_of_families", 0), magneto.compile(causal)
    with torch.no_grad():
        for n in (20, 33, 70, 41):
            args = operands(queries=n, keys=n)
            torch.testing.assert_close(compiled(*args), causal(*args))
    assert counters()["sizes_of_families"] - before >= 2 and not counters().get("sizes_compiled", 0)


def test_masks_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels answer zeros for a row of -inf alone: such rows become NaN. Not where no row can be one."""

    def chosen(gm: fx.GraphModule, metas: Any) -> Any:
        plan = fx.Graph()
        given = [plan.placeholder(f"x{i}") for i in range(len(metas))]
        call = plan.call_function(torch.ops.aten._scaled_dot_product_efficient_attention.default, (*given, None, False)[:5])
        first = plan.call_function(operator.getitem, (call, 0))
        call.meta["val"] = propagate(call.target, [*metas, None, False][:5])
        first.meta["val"] = call.meta["val"][0]
        plan.output((first,))
        return SimpleNamespace(graph=plan)

    monkeypatch.setattr(attention, "trace", chosen)
    monkeypatch.setattr(attention, "hollow", lambda meta: meta)
    for fn, mended in ((filled, True), (filled_low, False)):
        graph = copied(graph_of(fn, *operands(), KEPT))
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = node.meta["val"].with_(device=torch.device("cuda", 0))
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        monkeypatch.setattr(attention, "MUCH", 1 << 30)
        assert attention.fuse_attention(graph) is graph  # products and a softmax of weights that are no burden are faster
        monkeypatch.setattr(attention, "MUCH", 0)
        made = attention.fuse_attention(graph)
        assert any(n.target is torch.ops.aten._scaled_dot_product_efficient_attention.default for n in made.nodes)
        assert any(n.target is torch.ops.aten.all.dim for n in made.nodes) == mended


def fused_in_training(fn: Callable[..., T], *args: T) -> bool:
    gm = fx.GraphModule({}, fx.Graph())
    gm.graph.output((gm.graph.call_function(fn, tuple(gm.graph.placeholder(f"x{i}") for i in range(len(args)))),))
    joint = trace_joint(gm, args)
    joint.graph.output((*joint.results, *(node for node in joint.gradients if node is not None)))
    made = attention_joint.fuse_joint_attention(joint.graph)
    made.lint()
    return len(calls(made)) == 1 and not any(n.target is torch.ops.aten._softmax_backward_data.default for n in made.nodes)


def trained(fn: Callable[..., T], args: tuple[T, ...], dtype: torch.dtype | None = None) -> list[T]:
    """The result, and the gradients of queries, keys and values."""
    given = [(a.to(dtype or a.dtype) if a.is_floating_point() else a).clone().requires_grad_(k < 3) for k, a in enumerate(args)]
    result = fn(*given)
    shown = result.detach().clone()
    flowing = torch.randn(result.shape, generator=torch.Generator().manual_seed(3)).to(result.dtype)
    result.detach().zero_()  # it is the program's
    return [shown, *torch.autograd.grad(result, [a for a in given if a.requires_grad], flowing)]


def check_training(fn: Callable[..., T], *args: T) -> None:
    magneto.reset()
    found = (trained(fn, args), trained(magneto.optimize("inductor", nopython=True)(fn), args), trained(fn, args, torch.float64))
    for wanted, got, exact in zip(*found, strict=True):
        assert torch.equal(got.isnan(), wanted.isnan()) and got.dtype is wanted.dtype
        ours, theirs = ((y.double() - exact).nan_to_num().abs().max() for y in (got, wanted))
        assert ours <= 2 * theirs + 2e-6


@pytest.mark.parametrize("form", [plain, divided_in_float32, one_projection, einsums, groups, repeated_heads, autocast])
def test_training(form: Callable[..., T]) -> None:
    args = tuple(t.requires_grad_() for t in operands())
    assert fused_in_training(form, *args)
    check_training(form, *operands())


def test_training_in_three_dimensions() -> None:
    def fn(q: T, k: T, v: T) -> T:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        return torch.bmm(torch.bmm(q, k.mT).div(4).masked_fill(torch.ones(20, 20).tril(3) == 0, -INF).softmax(-1), v)

    assert fused_in_training(fn, *(t.requires_grad_() for t in operands()))
    check_training(fn, *operands())


def test_training_that_stays() -> None:
    """A bias that learns, weights that are shown, a gradient that is changed on its way."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T) -> T:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: T) -> T:
            return gradient.clamp(-0.1, 0.1)

    args = tuple(t.requires_grad_() for t in operands())
    assert not fused_in_training(two_products, *args)
    assert not fused_in_training(lambda q, k, v, bias: added(q, k, v, bias), *args, torch.zeros(20, 20, requires_grad=True))
    assert not fused_in_training(lambda q, k, v: Changed.apply(q @ k.mT).softmax(-1) @ v, *args)
    assert not fused_in_training(lambda q, k, v: (weights := (q @ k.mT).softmax(-1)) @ v + weights.sum(), *args)
    assert not fused_in_training(lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5) @ v, *args)
