"""Attention that a program writes out becomes one call that keeps no matrix of weights: `fuse_attention(graph)`.

    softmax(q @ k.t() * scale + bias) @ v      becomes      magneto.attention(q, k, v, bias, causal, scale), on a GPU the kernel that scaled_dot_product_attention would take there

Only where nobody else reads scores or weights. Factors may stand at the scores, queries or keys, masks be added or filled in, in any order. What a mask is made of constants alone is computed here: one that is
causal, or hides nothing, is no argument. Rows that see no key give NaN, as the formula does: the kernels of GPUs answer zeros there, so masks that may have such rows are made NaN in them.
Products and copies of queries, keys and values that only bring them into the shape of a batched product fall away with it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from magneto.aot_autograd.call import without_autocast
from magneto.aot_autograd.mode import hollow
from magneto.aot_autograd.overloads import COMPOSITE, PURE, VIEW, facts_of
from magneto.aot_autograd.trace import drop_dead, trace
from magneto.base.dataclass import dataclass, replace
from magneto.base.varying import any_size
from magneto.graph.append import append_copy
from magneto.graph.attention import ATTENTION
from magneto.graph.layout import view_strides
from magneto.graph.meta import TensorMeta
from magneto.inductor.rewrite import Adding, copied

aten = torch.ops.aten
PRODUCTS = frozenset({aten.bmm.default, aten.mm.default, aten.baddbmm.default})
RESHAPES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.clone.default, aten.alias.default,
})  # fmt: skip
TYPES = (torch.float32, torch.bfloat16, torch.float16)
HIDES = {torch.float16: -6e4}  # what is added to a score to hide it, at most
HIDES_ELSE = -1e8
LARGEST = 1 << 24  # elements of a mask that is computed here
FUSED = ("_flash_attention", "_efficient_attention", "_cudnn_attention")


@dataclass(frozen=True, slots=True)
class Term:
    """What is added to the scores, times `factor`. With `fill`: the number that stands where `node` is true (`where`: false) instead of a score."""

    node: fx.Node
    factor: float
    fill: float | None = None
    where: bool = True


@dataclass(frozen=True, slots=True)
class Scores:
    """`first @ second * scale`, and the terms in their order. `shape`: where they come in."""

    first: fx.Node
    second: fx.Node
    scale: float
    shape: tuple[int, ...]
    terms: tuple[Term, ...] = ()

    def times(self, factor: float | None) -> Scores | None:
        if factor is None or not factor > 0:
            return None
        terms = tuple(replace(t, factor=t.factor * factor, fill=None if t.fill is None else t.fill * factor) for t in self.terms)
        return replace(self, scale=self.scale * factor, terms=terms)

    def plus(self, term: Term | None) -> Scores | None:
        return None if term is None or not isinstance(term.node, fx.Node) else replace(self, terms=(*self.terms, term))


def fuse_attention(graph: fx.Graph) -> fx.Graph:
    """A graph with attention as one call; `graph` itself where there is none."""
    if not any(node.target is aten._softmax.default for node in graph.nodes):
        return graph
    made = copied(graph)
    known, done = Constants(), False
    for node in list(made.nodes):
        scores = _scores_behind(node, known)
        if scores is None:
            continue
        with made.inserting_before(node):
            result = _attend(Adding(made, node), node, scores, known)
        if result is not None:
            node.replace_all_uses_with(result)
            made.erase_node(node)
            done = True
    if done:
        drop_dead(made)
    return made if done else graph


class Constants:
    """Values of nodes that depend on no input."""

    def __init__(self) -> None:
        self.values: dict[fx.Node, torch.Tensor | None] = {}

    def __call__(self, node: Any) -> torch.Tensor | None:
        if node not in self.values:
            self.values[node] = self._value(node)
        return self.values[node]

    def _value(self, node: fx.Node) -> torch.Tensor | None:
        meta = node.meta.get("val")
        if node.op != "call_function" or not isinstance(meta, TensorMeta) or meta.numel > LARGEST or not _computable(node.target):
            return None
        if any(self(source) is None for source in node.all_input_nodes):
            return None
        args, options = fx.node.map_arg((node.args, dict(node.kwargs)), self)
        return node.target(*args, **({**options, "device": "cpu"} if options.get("device") is not None else options))  # type: ignore[no-any-return, operator]

    def number(self, value: Any) -> float | None:
        if isinstance(value, fx.Node):
            found = self(value) if value.meta["val"].numel == 1 else None
            value = None if found is None else found.item()
        return float(value) if isinstance(value, int | float) else None


def _computable(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    facts = facts_of(target)
    return facts.kind in (PURE, VIEW, COMPOSITE) and facts.shareable


# ---- what is written ---------------------------------------------------------------------------------------------------


def _scores_behind(node: fx.Node, known: Constants) -> Scores | None:
    """The scores of which `node` is the softmax times values."""
    if node.target not in (aten.bmm.default, aten.mm.default):
        return None
    meta, at = node.meta["val"], node.args[0]
    if meta.dtype not in TYPES or 0 in meta.shape or not meta.is_contiguous():
        return None
    while _only_brings(at):
        at = at.args[0]  # type: ignore[union-attr]
    if not isinstance(at, fx.Node) or at.target is not aten._softmax.default or len(at.users) != 1:
        return None
    shape, values = at.meta["val"].shape, node.args[1]
    scores = _scores(at.args[0], known) if at.args[1] in (-1, len(shape) - 1) else None
    if scores is None or shape[-1] != values.meta["val"].shape[-2] or shape[-1] < 2:  # type: ignore[union-attr]
        return None
    metas = [n.meta["val"] for n in (scores.first, scores.second, values)]  # type: ignore[union-attr]
    alike = all((m.dtype, m.device, m.ndim) == (meta.dtype, meta.device, meta.ndim) for m in metas)
    inner = (metas[0].shape[-2], metas[1].shape[-1])
    fits = inner == (meta.shape[-2], shape[-1]) and metas[0].shape[-1] == meta.shape[-1] and (not scores.terms or scores.shape[-2:] == inner)
    return scores if alike and fits and metas[0].numel else None


def _only_brings(node: Any) -> bool:
    """Is this the same numbers in the same order, in another shape, layout or type, that one reader has?"""
    return isinstance(node, fx.Node) and len(node.users) == 1 and (_same_order(node) or _converts(node))


def _converts(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default and node.meta["val"].dtype in TYPES and node.args[0].meta["val"].dtype in TYPES  # type: ignore[union-attr]


def _same_order(node: fx.Node) -> bool:
    """Are the elements those of the argument, in the same order?"""
    if node.target is aten.permute.default or node.target is aten.transpose.int:
        shape: tuple[int, ...] = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        order = list(range(len(shape)))
        if node.target is aten.permute.default:
            order = [d % len(shape) for d in node.args[1]]  # type: ignore[union-attr, operator]
        else:
            a, b = node.args[1:]
            order[a], order[b] = order[b], order[a]  # type: ignore[index]
        moved = [d for d in order if shape[d] != 1]
        return moved == sorted(moved)
    return node.target in RESHAPES


def _scores(node: Any, known: Constants) -> Scores | None:
    """What `node` is as scores of which nobody else knows."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None
    meta, args = node.meta["val"], node.args
    if node.target in PRODUCTS:
        if node.target is not aten.baddbmm.default:
            return Scores(args[0], args[1], 1.0, meta.shape)  # type: ignore[arg-type]
        beta, alpha = (float(node.kwargs.get(name, 1)) for name in ("beta", "alpha"))  # type: ignore[arg-type]
        product = Scores(args[1], args[2], 1.0, meta.shape).times(alpha)  # type: ignore[arg-type]
        return product.plus(Term(args[0], beta)) if product is not None and beta else product  # type: ignore[arg-type]
    if _only_brings(node):
        inner = _scores(args[0], known)
        return None if inner is None or (inner.terms and inner.shape != meta.shape) else replace(inner, shape=meta.shape)
    for x, make in _steps(node, known):
        inner = _scores(x, known)
        if inner is not None and inner.shape == meta.shape:
            return make(inner)
    return None


Make = Callable[[Scores], Scores | None]


def _steps(node: fx.Node, known: Constants) -> list[tuple[Any, Make]]:
    """Which arguments may be the scores, and what becomes of them."""
    name, args = str(node.target).removeprefix("aten."), node.args
    if name in ("mul.Tensor", "mul.Scalar") and not node.kwargs:
        return [(x, lambda s, y=y: s.times(known.number(y))) for x, y in ((args[0], args[1]), (args[1], args[0]))]
    if name in ("div.Tensor", "div.Scalar") and not node.kwargs:
        return [(args[0], lambda s: s.times(1 / (known.number(args[1]) or nan)))]
    if name in ("add.Tensor", "sub.Tensor") and not node.kwargs:
        sign = 1.0 if name == "add.Tensor" else -1.0
        pairs = [(args[0], args[1]), *([(args[1], args[0])] if sign > 0 else [])]
        return [(x, lambda s, y=y: s.plus(Term(y, sign))) for x, y in pairs]
    if name in ("masked_fill.Scalar", "masked_fill.Tensor"):
        return [(args[0], lambda s: s.plus(_fill(args[1], args[2], True, known)))]
    if name in ("where.self", "where.ScalarOther", "where.ScalarSelf"):
        pairs = [(args[1], args[2]), (args[2], args[1])]
        return [(x, lambda s, y=y, at=at: s.plus(_fill(args[0], y, at, known))) for (x, y), at in zip(pairs, (False, True), strict=True)]
    return []


def _fill(node: Any, value: Any, where: bool, known: Constants) -> Term | None:
    number = known.number(value)
    return None if number is None else Term(node, 1.0, number, where)


# ---- what is put in its place --------------------------------------------------------------------------------------------


def _attend(add: Adding, node: fx.Node, scores: Scores, known: Constants) -> fx.Node | None:
    meta, values = node.meta["val"], node.args[1]
    assert isinstance(values, fx.Node)
    (rows, inner), columns = scores.first.meta["val"].shape[-2:], scores.second.meta["val"].shape[-1]
    sides = [_ways(n, known) for n in (scores.first, scores.second)]
    lead = _lead(scores, sides[0], (rows, inner))
    if prod(lead) * rows * columns != prod(scores.shape) or not _pays(meta, prod(lead), rows, columns):
        return None
    masked = _bias(add, scores, known, meta)
    if masked is None:
        return None
    bias, causal = masked
    query, first = _shaped(add, sides[0], (*lead, rows, inner), False)
    key, second = _shaped(add, sides[1], (*lead, inner, columns), True)
    value, _ = _shaped(add, _ways(values, None), (*lead, columns, inner), False)
    scale = scores.scale * first * second
    call = _on_cpu if meta.device.type == "cpu" else _on_device
    made = call(add, query, key, value, bias, causal, scale) if scale > 0 else None
    if made is None:
        return None
    if not made.meta["val"].is_contiguous():
        made = add(aten.clone.default, made, memory_format=torch.contiguous_format)
    return add(aten.view.default, made, list(meta.shape))


def _pays(meta: TensorMeta, count: int, rows: int, columns: int) -> bool:
    """Measured on a CPU with one thread: small scores stay in a cache, where products of a library are faster."""
    if meta.device.type != "cpu" or any_size():
        return True
    return rows * columns >= 1 << 16 if meta.dtype is torch.float32 else True


Ways = list[tuple[fx.Node, float]]


def _ways(node: fx.Node, known: Constants | None) -> Ways:
    """Nodes with the same elements in the same order, up to a factor: `node` first. Without `known`: and no factor."""
    found = [(node, 1.0)]
    while True:
        node, factor = found[-1]
        if _same_order(node):
            found.append((node.args[0], factor))  # type: ignore[arg-type]
            continue
        by = None
        if known is not None and str(node.target) in ("aten.mul.Tensor", "aten.div.Tensor") and not node.kwargs:
            by, source = known.number(node.args[1]), node.args[0]
        if by is None or not by > 0 or not isinstance(source, fx.Node) or _kind(source) != _kind(node):
            return found
        found.append((source, factor * (by if node.target is aten.mul.Tensor else 1 / by)))


def _kind(node: fx.Node) -> tuple[Any, ...]:
    meta = node.meta["val"]
    return meta.shape, meta.dtype, meta.device


def _lead(scores: Scores, queries: Ways, matrix: tuple[int, int]) -> tuple[int, int]:
    """Batch and heads: as masks see them, or as the queries lie."""
    shape = scores.shape
    if not scores.terms:
        shape = next((s for n, _ in reversed(queries) if len(s := n.meta["val"].shape) == 4 and s[2:] == matrix), shape)
    return ((1, 1, *shape[:-2])[-2:] if len(shape) < 5 else (shape[0], prod(shape[1:-2])))  # type: ignore[return-value]


def _shaped(add: Adding, ways: Ways, shape: tuple[int, ...], turned: bool) -> tuple[fx.Node, float]:
    """Queries, keys or values (`turned`: from what is their transpose) of four dimensions, of which the last is dense, and the factor that is left out. Those furthest from the product that can be seen so."""
    for node, factor in reversed(ways):
        strides = view_strides(node.meta["val"].shape, node.meta["val"].strides, shape)
        if strides is not None and strides[-2 if turned else -1] == 1:
            break
    else:
        node, factor = ways[0]
    if view_strides(node.meta["val"].shape, node.meta["val"].strides, shape) is None:
        node = add(aten.clone.default, node, memory_format=torch.contiguous_format)
    if node.meta["val"].shape != shape:
        node = add(aten.view.default, node, list(shape))
    node = add(aten.transpose.int, node, 2, 3) if turned else node
    return (node if node.meta["val"].strides[-1] == 1 else add(aten.clone.default, node, memory_format=torch.contiguous_format)), factor


def _bias(add: Adding, scores: Scores, known: Constants, meta: TensorMeta) -> tuple[fx.Node | None, bool] | None:
    """What is added to the scores, and whether they are causal; None where no kernel computes that."""
    limit, low = HIDES.get(meta.dtype, HIDES_ELSE), -inf
    fills = [t for t in scores.terms if t.fill is not None]
    if any(t.fill > -inf for t in fills):  # type: ignore[operator]
        if len(scores.terms) > 1 or fills[0].fill > limit:  # type: ignore[operator]
            return None
        low = torch.finfo(torch.bfloat16).min / 2  # swallows every score, so that those of a row without keys are all the same
    bias = _sum(add, scores.terms, low)
    if bias is None:
        return None, False
    value = known(bias)
    if value is not None and value.ndim >= 1:
        seen = _seen(value, scores.shape, limit)
        if seen is not None:
            return None, seen
        if not bool((value > -inf).any(-1).all()):
            value = None
    exact = len(fills) == len(scores.terms)
    if low > -inf and meta.dtype is torch.float16:
        return None
    return _fitted(add, bias, scores.shape, meta, exact, value is not None or low > -inf)


def _sum(add: Adding, terms: tuple[Term, ...], low: float) -> fx.Node | None:
    bias: fx.Node | None = None
    for term in terms:
        if term.fill is not None:
            one, other = (low, 0.0 if bias is None else bias) if term.where else (0.0 if bias is None else bias, low)
            op = aten.where.Scalar if bias is None else aten.where.ScalarSelf if term.where else aten.where.ScalarOther
            bias = add(op, term.node, one, other)
        else:
            node = term.node if term.factor == 1 else add(aten.mul.Tensor, term.node, term.factor)
            bias = node if bias is None else add(aten.add.Tensor, bias, node)
    return bias


def _seen(value: torch.Tensor, shape: tuple[int, ...], limit: float) -> bool | None:
    """Does this constant mask hide what lies ahead (True), or nothing (False)?"""
    if bool((value == 0).all()):
        return False
    square = value[(0,) * (value.ndim - 2)] if value.ndim >= 2 and value.numel() == prod(shape[-2:]) else None
    if square is None or square.shape != shape[-2:]:
        return None
    behind = torch.ones(square.shape, dtype=torch.bool, device="cpu").tril_()
    return True if bool(((square == 0) & behind | (square <= limit) & ~behind).all()) else None


def _fitted(
    add: Adding, bias: fx.Node, shape: tuple[int, ...], meta: TensorMeta, exact: bool, sees: bool
) -> tuple[fx.Node, bool] | None:
    """The bias in four dimensions and of a type that the kernel takes. `sees`: every row has a key."""
    given = bias.meta["val"]
    if given.ndim < 1 or given.shape[-1] != shape[-1] or given.device != meta.device:
        return None
    rest = (1,) * (len(shape) - given.ndim) + tuple(given.shape)
    four = (1,) * (4 - len(rest)) + rest
    if len(rest) > 4:
        middle = rest[1:-2]
        if prod(middle) != 1 and middle != tuple(shape[1:-2]):
            return None
        four = (rest[0], prod(middle), *rest[-2:])
    if given.dtype is not meta.dtype:
        if not exact and meta.device.type != "cpu" and meta.dtype is not torch.float32:
            return None
        bias = add(aten._to_copy.default, bias, dtype=meta.dtype if exact else torch.float32)
    if view_strides(given.shape, bias.meta["val"].strides, four) is None:
        bias = add(aten.clone.default, bias, memory_format=torch.contiguous_format)
    if given.shape != four:
        bias = add(aten.view.default, bias, list(four))
    if not sees and meta.device.type != "cpu":
        hidden = add(aten.all.dim, add(aten.eq.Scalar, bias, -inf), -1, True)
        bias = add(aten.where.ScalarSelf, hidden, nan, bias)
    dense = bias.meta["val"].strides[-1] == 1
    return (bias if dense else add(aten.clone.default, bias, memory_format=torch.contiguous_format)), False


def _on_cpu(add: Adding, *args: Any) -> fx.Node:
    return add(ATTENTION, *args)


def _on_device(
    add: Adding, query: fx.Node, key: fx.Node, value: fx.Node, bias: fx.Node | None, causal: bool, scale: float
) -> fx.Node | None:
    """The call that `scaled_dot_product_attention` makes for such tensors; None where it computes weights."""
    sources = [query, key, value, *([] if bias is None else [bias])]
    plain = fx.Graph()
    given = [plain.placeholder(f"x{k}") for k in range(len(sources))]
    options = {"attn_mask": given[3]} if bias is not None else {}
    plain.output(plain.call_function(F.scaled_dot_product_attention, tuple(given[:3]), {**options, "is_causal": causal, "scale": scale}))
    kinds = tuple(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
    tensors = [hollow(n.meta["val"]) for n in sources]
    found = without_autocast(lambda: trace(fx.GraphModule({}, plain), tensors).graph, kinds)()
    if not any(str(n.target).endswith(f"{kind}.default") for n in found.nodes for kind in FUSED):
        return None
    env: dict[fx.Node, fx.Node] = dict(zip(found.find_nodes(op="placeholder"), sources, strict=True))
    for node in found.nodes:
        if node.op == "call_function":
            env[node] = append_copy(add.graph, node, env.__getitem__)
            env[node].meta.update(add.meta)
    (result,) = found.output_node().args[0]  # type: ignore[misc]
    return env[result]  # type: ignore[index]
