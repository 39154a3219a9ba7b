"""Attention that programs write out trains fused whatever its mask hides, and answers as the formula does: values, gradients, and where these are NaN."""

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
from magneto.graph.rules import propagate
from magneto.inductor import attention, attention_joint
from magneto.inductor.rewrite import copied
from tests.inductor.test_attention import INF, KEPT, T, calls, check_training, filled, filled_low, fused_in_training, operands

aten = torch.ops.aten
FORWARD, BACKWARD = aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_efficient_attention_backward.default
KEYS = torch.rand(2, 1, 1, 20, generator=torch.Generator().manual_seed(4)) > 0.4
KEYS[1] = False


@pytest.fixture(autouse=True)
def always() -> Iterator[None]:
    """Whatever it pays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_pays", lambda *_: True)
        patch.setattr(attention_joint, "_pays", lambda *_: True)
        yield


def chosen(q: T, k: T, v: T, kept: T) -> T:
    return torch.where(kept, q @ k.mT * 0.25, -INF).softmax(-1) @ v


def filled_least(q: T, k: T, v: T, kept: T) -> T:
    return (q @ k.mT * 0.25).masked_fill(~kept, torch.finfo(q.dtype).min).softmax(-1) @ v


def plus(q: T, k: T, v: T, mask: T) -> T:
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


def plus_in_float32(q: T, k: T, v: T, mask: T) -> T:
    return ((q @ k.mT * 0.25).float() + mask).softmax(-1).to(v.dtype) @ v


def part(mask: T) -> T:
    """Not all of what a row hides."""
    return (mask == -INF) & (torch.arange(20) < 10)


def filled_after(q: T, k: T, v: T, mask: T) -> T:
    return (q @ k.mT * 0.25 + mask).masked_fill(part(mask), -INF).softmax(-1) @ v


def filled_before(q: T, k: T, v: T, mask: T) -> T:
    return (torch.where(part(mask), -INF, q @ k.mT) + mask).softmax(-1) @ v


def three(q: T, k: T, v: T, kept: T) -> T:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).div(4).masked_fill(kept == 0, -INF).softmax(-1), v)


def hiding(number: float, kept: T = KEPT) -> T:
    return torch.zeros(kept.shape).masked_fill_(~kept, number)


LIFTED = hiding(-INF) + torch.tensor([0.0, -100, 1e4, 1e6, -3e4]).repeat(4)[:, None]
HALF = hiding(-3e38)
HALF[..., 2] = -INF  # rows of which some keys are lowered, the others hidden
TWO = hiding(-1e9)
TWO[..., ::3] *= 1.2  # what is lowered more is hidden
FORMS: list[tuple[str, Callable[..., T], T]] = [
    ("filled", filled, KEPT),
    ("a matrix", filled, KEPT[0, 0]),
    ("keys", filled, KEYS),
    ("keys of one", filled, KEYS[1, 0, 0]),
    ("heads", filled, KEPT.transpose(0, 1).repeat(1, 2, 1, 1)),
    ("all", filled, KEPT.repeat(1, 4, 1, 1).roll(5, 2)),
    ("chosen", chosen, KEPT),
    ("three dimensions", three, KEPT[0, 0]),
    ("low", filled_low, KEPT),
    ("low keys", filled_low, KEYS),
    ("least", filled_least, KEPT),
    ("added", plus, hiding(-INF)),
    ("added keys", plus, hiding(-INF, KEYS)),
    ("added nothing", plus, torch.zeros(20, 20)),
    ("added least", plus, hiding(-3e38)),
    ("added least and -inf", plus, HALF),
    ("added two", plus, TWO),
    ("added low", plus, hiding(-1e5)),
    ("added numbers", plus, LIFTED),
    ("added infinity", plus, hiding(-INF).index_fill_(3, torch.tensor(2), INF)),
    ("in float32", plus_in_float32, hiding(-INF)),
    ("filled after", filled_after, hiding(-INF)),
    ("filled before", filled_before, hiding(-INF)),
]
NAMED = pytest.mark.parametrize(("fn", "mask"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS])
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def given(fn: Callable[..., T], mask: T, dtype: torch.dtype) -> tuple[T, ...]:
    if fn is filled_low and dtype is torch.float16:
        pytest.skip("float16 has no such number")
    return *operands(dtype), mask.to(dtype) if mask.is_floating_point() and fn is not plus_in_float32 else mask


@TYPES
@NAMED
def test_forms(fn: Callable[..., T], mask: T, dtype: torch.dtype) -> None:
    args = given(fn, mask, dtype)
    assert fused_in_training(fn, *(t.requires_grad_() for t in args[:3]), *args[3:])
    check_training(fn, *args)


@pytest.mark.parametrize("mask", [hiding(-1e9), hiding(-3e38), HALF, TWO])
def test_what_swallows_scores(mask: T) -> None:
    """As in eager, though in more digits -1e9 would not."""
    args, flowing = [t.requires_grad_() for t in operands()], torch.randn(2, 4, 20, 16)
    magneto.reset()
    results = [fn(*args, mask) for fn in (plus, magneto.compile(plus))]
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(*(torch.autograd.grad(result, args, flowing) for result in reversed(results)))


class Block(torch.nn.Module):
    """nanoGPT's: the mask is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(64, 192)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x: T) -> T:
        n = x.shape[1]
        q, k, v = (t.view(x.shape[0], n, 4, 16).transpose(1, 2) for t in self.project(x).split(64, dim=2))
        scores = (q @ k.transpose(-2, -1)) * 0.25
        scores = scores.masked_fill(self.bias[:, :, :n, :n] == 0, -INF)  # type: ignore[index]
        return (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(x.shape)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_buffer_and_lengths_that_vary(dynamic: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, fuse = list[int](), attention_joint.fuse_joint_attention

    def noting(graph: fx.Graph) -> fx.Graph:
        made = fuse(graph)
        fused.append(len(calls(made)))
        return made

    monkeypatch.setattr(attention_joint, "fuse_joint_attention", noting)
    magneto.reset()
    block = Block()
    compiled = magneto.compile(block, dynamic=dynamic)
    for n in (20, 31, 9, 20):
        x = torch.randn(2, n, 64, generator=torch.Generator().manual_seed(n)).requires_grad_()
        leaves, flowing = [x, *block.parameters()], torch.randn(x.shape)
        wanted, got = ((out := fn(x), *torch.autograd.grad(out, leaves, flowing)) for fn in (block, compiled))
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    assert fused and set(fused) == {1}


# ---- a device ----------------------------------------------------------------------------------------------------------


def calls_of_a_device(gm: fx.GraphModule, metas: Any) -> Any:
    """What `scaled_dot_product_attention` is on a GPU, with its gradients."""
    made = fx.Graph()
    places = [made.placeholder(f"x{k}") for k in range(len(metas))]
    for node, meta in zip(places, metas, strict=True):
        node.meta = {"val": meta, "stage": "forward"}

    def add(stage: str, target: Any, *args: Any, **options: Any) -> fx.Node:
        node = made.call_function(target, args, options)
        seen = fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta = {"stage": stage, "val": seen[0][args[1]] if target is operator.getitem else propagate(target, seen, options)}  # type: ignore[call-overload]
        return node

    scale = next(n for n in gm.graph.nodes if n.op == "call_function").kwargs["scale"]
    call = add("forward", FORWARD, *places, True, scale=scale)
    out, *state = (add("forward", operator.getitem, call, k) for k in range(4))
    tangent = made.placeholder("tangent")
    tangent.meta = {"val": out.meta["val"], "stage": "backward"}
    back = add("backward", BACKWARD, tangent, *places, out, *state, 0.0, [True, True, True, False], scale=scale)
    gradients = tuple(add("backward", operator.getitem, back, k) for k in range(3))
    return SimpleNamespace(graph=made, results=(out,), tangents=(tangent,), gradients=gradients)


class Device(fx.Interpreter):
    """Computes those calls as kernels may: in powers of two (`unit` is the logarithm of e) or not, sums of rows with room behind them."""

    unit = torch.tensor(1.0)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not FORWARD and target is not BACKWARD:
            return super().call_function(target, args, {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs)
        tensors, scale, power = args if target is FORWARD else args[1:], kwargs["scale"], self.unit.exp()
        q, k, v, bias = (t.float() for t in tensors[:4])
        assert bias.isfinite().any(-1).all()  # whatever a kernel makes of rows without keys
        assert ((bias >= -(2.0**29)) | (bias == -(2.0**100)) | (bias == -INF)).all()  # and of nearly the least number
        scores = ((q @ k.mT) * scale + bias) * self.unit
        if target is FORWARD:
            most = scores.amax(-1, keepdim=True)
            weights = ((scores - most) / self.unit).exp()
            total = weights.sum(-1, keepdim=True)
            sums = most / self.unit + total.log()
            sums = torch.where(sums.abs() > 1e9, sums * (1 + 2.0**-20), sums)  # its last digits are not those of the mask
            return (weights / total @ v).to(args[0].dtype), F.pad(sums[..., 0], (0, 12), value=INF), power, power
        gradient, out, sums = (args[k].float() for k in (0, 5, 6))
        weights = ((scores - sums[..., : q.shape[2], None] * self.unit) / self.unit).exp()
        flow = weights * (gradient @ v.mT - (gradient * out).sum(-1, keepdim=True)) * scale
        return *(x.to(args[1].dtype) for x in (flow @ k, flow.mT @ q, weights.mT @ gradient)), None


@pytest.mark.parametrize("unit", [1.0, 1.4426950408889634])
@TYPES
@NAMED
def test_a_device(fn: Callable[..., T], mask: T, dtype: torch.dtype, unit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are given no row without a key, and no sum that tells little."""
    args = given(fn, mask, dtype)
    gm = fx.GraphModule({}, fx.Graph())
    gm.graph.output((gm.graph.call_function(fn, tuple(gm.graph.placeholder(f"x{i}") for i in range(4))),))
    joint = trace_joint(gm, [*(t.requires_grad_() for t in args[:3]), args[3]])
    joint.graph.output((*joint.results, *(node for node in joint.gradients if node is not None)))
    graph, device = copied(joint.graph), torch.device("cuda", 0)
    for node in graph.nodes:
        node.meta["val"] = node.meta["val"].with_(device=device) if hasattr(node.meta.get("val"), "with_") else node.meta.get("val")
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": device}
    monkeypatch.setattr(attention_joint, "trace_joint", calls_of_a_device)
    monkeypatch.setattr(attention_joint, "_needing_gradients", lambda tensors: tensors)
    monkeypatch.setattr(attention, "hollow", lambda meta: meta)
    assert attention_joint.fuse_joint_attention(graph) is graph  # products and a softmax of weights that are no burden are faster
    monkeypatch.setattr(attention, "MUCH", 0)
    made = attention_joint.fuse_joint_attention(graph)
    made.lint()
    if fn is plus_in_float32 and dtype is not torch.float32:
        assert made is graph  # kernels take masks of their own type
        return
    assert [sum(n.target is target for n in made.nodes) for target in (FORWARD, BACKWARD)] == [1, 1]
    flowing = torch.randn(joint.results[0].meta["val"].shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    run = Device(fx.GraphModule({}, made))
    run.unit = torch.tensor(unit)
    with torch.no_grad():
        found = run.run(*(a.detach() for a in args), flowing)
    for dtypes in (None, torch.float64):
        leaves = [a.detach().to(dtypes or a.dtype).requires_grad_() for a in args[:3]]
        result = fn(*leaves, mask.to(dtypes or dtype) if mask.is_floating_point() else mask)
        wanted = result.detach(), *torch.autograd.grad(result, leaves, flowing.to(result.dtype))
        if dtypes is None:
            theirs = wanted
    for got, eager, exact in zip(found, theirs, wanted, strict=True):
        assert torch.equal(got.isnan(), eager.isnan())
        ours, other = ((y.double() - exact).nan_to_num().abs().max() for y in (got, eager))
        assert ours <= 2 * other + 2e-6
