"""Scores of an attention that a program writes out: `scores_behind(node)`, with what is known of masks made of constants (`Known`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from math import nan
from typing import Any, TypeGuard

import torch
from torch import fx

from magneto.aot_autograd.overloads import COMPOSITE, PURE, VIEW, facts_of
from magneto.base.dataclass import dataclass, replace
from magneto.graph.meta import TensorMeta

aten = torch.ops.aten
PRODUCTS = frozenset({aten.bmm.default, aten.mm.default, aten.baddbmm.default})
RESHAPES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.clone.default, aten.alias.default,
})  # fmt: skip
TYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = 1 << 24  # elements of a mask that is computed here


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
        return None if term is None else replace(self, terms=(*self.terms, term))


class Known:
    """Values of nodes that depend on no input. `apart`: nodes that do not count as readers of scores and weights."""

    def __init__(self) -> None:
        self.apart: frozenset[fx.Node] = frozenset()
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

    def alone(self, node: Any) -> TypeGuard[fx.Node]:
        """Has this node one reader?"""
        return isinstance(node, fx.Node) and sum(user not in self.apart for user in node.users) == 1

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


def scores_behind(node: fx.Node, known: Known) -> Scores | None:
    """The scores of which `node` is the softmax times values."""
    if node.target not in (aten.bmm.default, aten.mm.default):
        return None
    meta, at = node.meta["val"], node.args[0]
    if meta.dtype not in TYPES or 0 in meta.shape or not meta.is_contiguous():
        return None
    while known.alone(at) and only_brings(at):
        at = at.args[0]  # type: ignore[union-attr]
    if not known.alone(at) or at.target is not aten._softmax.default:  # type: ignore[union-attr]
        return None
    shape, values = at.meta["val"].shape, node.args[1]
    scores = _scores(at.args[0], known) if at.args[1] in (-1, len(shape) - 1) else None
    if scores is None or shape[-1] != values.meta["val"].shape[-2] or shape[-1] < 2:  # type: ignore[union-attr]
        return None
    metas = [n.meta["val"] for n in (scores.first, scores.second, values)]  # type: ignore[union-attr]
    alike = all((m.dtype, m.device, m.ndim) == (meta.dtype, meta.device, meta.ndim) for m in metas)
    inner = (metas[0].shape[-2], metas[1].shape[-1])
    fits = (
        inner == (meta.shape[-2], shape[-1]) and metas[0].shape[-1] == meta.shape[-1] and (not scores.terms or scores.shape[-2:] == inner)
    )
    return scores if alike and fits and metas[0].numel else None


def only_brings(node: Any) -> TypeGuard[fx.Node]:
    """Is this the same numbers in the same order, in another shape, layout or type?"""
    return isinstance(node, fx.Node) and (same_order(node) or _converts(node))


def _converts(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default and node.meta["val"].dtype in TYPES and node.args[0].meta["val"].dtype in TYPES  # type: ignore[union-attr]


def order_of(node: fx.Node) -> list[int] | None:
    """The dimensions of the argument as they come here, where they are only moved."""
    if node.target not in (aten.permute.default, aten.transpose.int):
        return None
    dims = list(range(node.meta["val"].ndim))
    if node.target is aten.permute.default:
        return [dims[d] for d in node.args[1]]  # type: ignore[index, union-attr]
    a, b = node.args[1:]
    dims[a], dims[b] = dims[b], dims[a]  # type: ignore[index]
    return dims


def same_order(node: fx.Node) -> bool:
    """Are the elements those of the argument, in the same order?"""
    order = order_of(node)
    if order is None:
        return node.target in RESHAPES
    moved = [d for d in order if node.args[0].meta["val"].shape[d] != 1]  # type: ignore[union-attr]
    return moved == sorted(moved)


def _scores(node: Any, known: Known) -> Scores | None:
    """What `node` is as scores of which nobody else knows."""
    if not known.alone(node):
        return None
    meta, args = node.meta["val"], node.args
    if node.target in PRODUCTS:
        if node.target is not aten.baddbmm.default:
            return Scores(args[0], args[1], 1.0, meta.shape)  # type: ignore[arg-type]
        beta, alpha = (float(node.kwargs.get(name, 1)) for name in ("beta", "alpha"))  # type: ignore[arg-type]
        product = Scores(args[1], args[2], 1.0, meta.shape).times(alpha)  # type: ignore[arg-type]
        return product.plus(Term(args[0], beta)) if product is not None and beta else product  # type: ignore[arg-type]
    if only_brings(node):
        inner = _scores(args[0], known)
        return None if inner is None or (inner.terms and inner.shape != meta.shape) else replace(inner, shape=meta.shape)
    for x, make in _steps(node, known):
        inner = _scores(x, known)
        if inner is not None and inner.shape == meta.shape:
            return make(inner)
    return None


def _steps(node: fx.Node, known: Known) -> list[tuple[Any, Callable[[Scores], Scores | None]]]:
    """Which arguments may be the scores, and what becomes of them."""
    name, args = str(node.target).removeprefix("aten."), node.args
    both = list(itertools.permutations(args[-2:]))
    if name == "mul.Tensor":
        return [(x, partial(Scores.times, factor=known.number(y))) for x, y in both]
    if name == "div.Tensor":
        return [(args[0], partial(Scores.times, factor=1 / (known.number(args[1]) or nan)))]
    if name == "add.Tensor" and not node.kwargs:
        return [(x, partial(Scores.plus, term=Term(y, 1.0))) for x, y in both if isinstance(y, fx.Node)]
    if name == "sub.Tensor" and not node.kwargs and isinstance(args[1], fx.Node):
        return [(args[0], partial(Scores.plus, term=Term(args[1], -1.0)))]
    if name in ("masked_fill.Scalar", "masked_fill.Tensor"):
        return [(args[0], partial(Scores.plus, term=_fill(args[1], args[2], True, known)))]
    if name in ("where.self", "where.ScalarOther", "where.ScalarSelf"):
        return [(x, partial(Scores.plus, term=_fill(args[0], y, y is args[1], known))) for x, y in both]
    return []


def _fill(node: Any, value: Any, where: bool, known: Known) -> Term | None:
    number = known.number(value)
    return None if number is None else Term(node, 1.0, number, where)
