"""Attention that a program writes out becomes one call that keeps no matrix of weights: `fuse_attention(graph)`.

    softmax(q @ k.t() * scale + bias) @ v      becomes      magneto.attention(q, k, v, bias, causal, scale), on a GPU the kernel that scaled_dot_product_attention would take there

Only where nobody else reads scores or weights. Factors may stand at the scores, queries or keys, masks be added or filled in, in any order. What a mask is made of constants alone is computed here: one that is
causal, or hides nothing, is no argument. Rows that see no key give NaN, as the formula does: the kernels of GPUs answer zeros there, so masks that may have such rows are made NaN in them.
Products and copies of queries, keys and values that only bring them into the shape of a batched product fall away with it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import inf, nan, prod
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import fx

from magneto.aot_autograd.call import without_autocast
from magneto.aot_autograd.mode import hollow
from magneto.aot_autograd.trace import drop_dead, trace
from magneto.base.dataclass import dataclass, replace
from magneto.base.varying import any_size, sizes_vary
from magneto.graph.append import append_copy
from magneto.graph.attention import ATTENTION
from magneto.graph.layout import view_strides
from magneto.graph.meta import TensorMeta
from magneto.graph.narrow import narrow_types
from magneto.inductor.attention_rows import Rows, rows_of
from magneto.inductor.rewrite import Adding, copied
from magneto.inductor.scores import Known, Scores, Term, order_of, same_order, scores_behind

aten = torch.ops.aten
HIDES = {torch.float16: -6e4}  # what is added to a score to hide it, at most
HIDES_ELSE = -1e8
SWALLOWS = (
    torch.finfo(torch.bfloat16).min / 2
)  # every score, so that those of a row without keys are all the same; float16 has no such number
LOW = -100.0  # at least that is added to a score that is surely seen
LARGE, MANY = 1 << 17, 1 << 22  # scores of a head and of all, from which on the kernel is faster in any case
MUCH = 1 << 30  # bytes of weights
FUSED = ("_flash_attention", "_efficient_attention", "_cudnn_attention")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mask:
    """What is added to scores. `causal`: instead, a query sees the keys up to its own place. `rows`: in training, where a query is not known to see a key."""

    bias: fx.Node | None = None
    causal: bool = False
    rows: Rows | None = None


Masks = dict[Any, Mask | None]


def fuse_attention(graph: fx.Graph) -> fx.Graph:
    """A graph with attention as one call; `graph` itself where there is none."""
    known = Known()
    if not any((found := scores_behind(node, known)) is not None and _pays(node.meta["val"], found) for node in graph.nodes):
        return graph
    made, known, masks, done = copied(graph), Known(), Masks(), False
    for node in list(made.nodes):
        scores = scores_behind(node, known)
        if scores is None:
            continue
        with made.inserting_before(node):
            result = _attend(Adding(made, node), node, scores, known, masks)
        if result is not None:
            node.replace_all_uses_with(result)
            made.erase_node(node)
            done = True
    if done:
        drop_dead(made)
    return made if done else graph


def _attend(add: Adding, node: fx.Node, scores: Scores, known: Known, masks: Masks) -> fx.Node | None:
    """What stands for `node`, which multiplies values."""
    given = operands(add, node, scores, known, masks, False) if _pays(node.meta["val"], scores) else None
    if given is None:
        return None
    made = _on_cpu(add, given) if node.meta["val"].device.type == "cpu" else _on_device(add, given)
    return None if made is None else shown(add, made, node.meta["val"].shape)


def shown(add: Adding, made: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """In the shape of a batched product, and laid out as one."""
    if not made.meta["val"].is_contiguous():
        made = add(aten.clone.default, made, memory_format=torch.contiguous_format)
    return add(aten.view.default, made, list(shape))


@dataclass(frozen=True, slots=True)
class Operands:
    """What kernels of attention take."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: Mask
    scale: float

    @property
    def tensors(self) -> list[fx.Node]:
        return [self.query, self.key, self.value, *([] if self.mask.bias is None else [self.mask.bias])]

    @property
    def fits(self) -> bool:
        """On a GPU, weights that are no burden: with a mask products and a softmax are faster there than kernels but cuDNN's forward (8 x 16 heads of 512 x 512 in bfloat16 on an H200:
        in inference 87 us against 120, and 52 of cuDNN's; in training 450 to 530 against 670 to 785)."""
        query, key = self.query.meta["val"], self.key.meta["val"]
        known = query.device.type != "cpu" and not any_size() and not sizes_vary()
        return known and prod(query.shape[:-1]) * key.shape[-2] * query.dtype.itemsize < MUCH  # type: ignore[no-any-return]


def operands(add: Adding, node: fx.Node, scores: Scores, known: Known, masks: Masks, alike: bool) -> Operands | None:
    """Of the attention whose weights `node` multiplies by values. `masks`: those that have been made. `alike`: queries and keys are those of the product, no factor is taken from them, and each head has its own."""
    meta, values = node.meta["val"], node.args[1]
    assert isinstance(values, fx.Node)
    (rows, inner), columns = scores.first.meta["val"].shape[-2:], scores.second.meta["val"].shape[-1]
    factors = None if alike else known
    sides = _ways(scores.first, factors), _ways(scores.second, factors, True), _ways(values, None)
    lead = _lead(scores, sides[0], (rows, inner))
    if prod(lead) * rows * columns != prod(scores.shape):
        return None
    kind = scores.terms, scores.shape, meta.dtype
    mask = masks[kind] = masks[kind] if kind in masks else _mask(add, scores, known, meta, alike)
    if mask is None:
        return None
    if not alike and (mask.bias is None or mask.bias.meta["val"].shape[:2] == (1, 1)):
        lead = _grouped(sides, lead, ((rows, inner), (columns, inner), (columns, inner)))
    query, one = _shaped(add, sides[0], (*lead, rows, inner))
    key, two = _shaped(add, sides[1], (*lead, columns, inner))
    value, _ = _shaped(add, sides[2], (*lead, columns, inner))
    scale = scores.scale * one * two
    return Operands(query, key, value, mask, scale) if 0 < scale < inf else None


FEW_KEYS = 32  # of fewer a GPU's kernels fill little of their tiles: 16 by 16 took 450 us instead of 100


def _pays(meta: TensorMeta, scores: Scores) -> bool:
    """Measured on a CPU with one thread: scores that stay in a cache are better off as products of a library, but for bfloat16, and float16 has no fast kernel.
    Where sizes vary the kernel serves more of them at once: there is no softmax of rows whose length is in the text."""
    if any_size() or sizes_vary():
        return True
    rows, columns, own = (
        meta.shape[-2],
        scores.shape[-1],
        None if meta.dtype in narrow_types() else meta.dtype,
    )  # (None: computed in float32)
    half = own is torch.float16
    if meta.device.type != "cpu":
        return columns >= FEW_KEYS
    if rows * columns >= LARGE << half or prod(scores.shape) >= MANY << 2 * half:
        return True
    return own is torch.bfloat16 and columns >= 32 and (meta.shape[-1] <= 64 or rows < 16)


@dataclass(frozen=True, slots=True)
class Way:
    """A node with the elements that are wanted, divided by `factor`, in their order, or that of their transpose (`turned`)."""

    node: fx.Node
    turned: bool = False
    factor: float = 1.0

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Those with which it is seen in this shape."""
        meta = self.node.meta["val"]
        found = view_strides(meta.shape, meta.strides, _turned(shape) if self.turned else shape)
        return None if found is None else _turned(found) if self.turned else found


def _turned(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (*sizes[:-2], sizes[-1], sizes[-2])


def _ways(node: fx.Node, known: Known | None, turned: bool = False) -> list[Way]:
    """`node`, and what it is made of. Without `known`: by no factor."""
    found = [Way(node, turned)]
    while True:
        way = found[-1]
        node, source = way.node, way.node.args[0] if way.node.args else None
        if not isinstance(source, fx.Node):
            return found
        if same_order(node):
            found.append(replace(way, node=source))
        elif order_of(node) == [*range(node.meta["val"].ndim - 2), node.meta["val"].ndim - 1, node.meta["val"].ndim - 2]:
            found.append(replace(way, node=source, turned=not way.turned))
        elif known is not None and node.target in (aten.mul.Tensor, aten.div.Tensor) and _kind(source) == _kind(node):
            by = known.number(node.args[1])
            if by is None or not by > 0:
                return found
            found.append(replace(way, node=source, factor=way.factor * (by if node.target is aten.mul.Tensor else 1 / by)))
        else:
            return found


def _kind(node: fx.Node) -> tuple[Any, ...]:
    meta = node.meta["val"]
    return meta.shape, meta.dtype, meta.device


def _lead(scores: Scores, queries: list[Way], matrix: tuple[int, int]) -> tuple[int, int]:
    """Batch and heads: as masks see them, or as the queries lie."""
    shape = scores.shape
    if not scores.terms:
        seen = [way.node.meta["val"].shape for way in reversed(queries) if not way.turned]
        shape = next((s for s in seen if len(s) == 4 and s[2:] == matrix), shape)
    return (1, 1, *shape[:-2])[-2:] if len(shape) < 5 else (shape[0], prod(shape[1:-2]))  # type: ignore[return-value]


def _grouped(sides: tuple[list[Way], ...], lead: tuple[int, int], matrices: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Groups of heads, and the heads of one, where these have keys and values in common that need no copy then."""
    for way in sides[1]:
        meta = way.node.meta["val"]
        if meta.ndim == 5 and meta.strides[2] == 0 and (meta.shape[0], meta.shape[1] * meta.shape[2]) == lead:
            groups = meta.shape[0] * meta.shape[1], meta.shape[2]
            return groups if all(_dense(ways, (*groups, *matrix)) for ways, matrix in zip(sides, matrices, strict=True)) else lead
    return lead


def _dense(ways: list[Way], shape: tuple[int, ...]) -> Way | None:
    """What is furthest from the product and can be seen in this shape, the last dimension dense."""
    return next((way for way in reversed(ways) if (way.strides(shape) or (0,))[-1] == 1), None)


def _shaped(add: Adding, ways: list[Way], shape: tuple[int, ...]) -> tuple[fx.Node, float]:
    """Queries, keys or values in this shape, the last dimension dense, and the factor that is left out."""
    way = _dense(ways, shape) or ways[0]
    node, seen = way.node, _turned(shape) if way.turned else shape
    if way.strides(shape) is None:
        node = add(aten.clone.default, node, memory_format=torch.contiguous_format)
    if node.meta["val"].shape != seen:
        node = add(aten.view.default, node, list(seen))
    node = add(aten.transpose.int, node, 2, 3) if way.turned else node
    dense_now = node.meta["val"].strides[-1] == 1
    return (node if dense_now else add(aten.clone.default, node, memory_format=torch.contiguous_format)), way.factor


def _mask(add: Adding, scores: Scores, known: Known, meta: TensorMeta, training: bool) -> Mask | None:
    """None where no kernel computes that."""
    limit, half = HIDES.get(meta.dtype, HIDES_ELSE), meta.dtype is torch.float16
    fills = [t for t in scores.terms if t.fill is not None]
    exact = len(fills) == len(scores.terms)
    finite = any(term.fill != -inf for term in fills)
    if finite and (len(scores.terms) > 1 or not fills[0].fill <= limit):  # type: ignore[operator]
        return None
    bias = _sum(add, scores.terms, SWALLOWS if finite and not half and not training else -inf, meta)
    if bias is None:
        return Mask()
    value = known(bias)
    seen = None if value is None else _seen(value, scores.shape, limit)
    if seen is not None:
        return Mask(causal=seen)
    sees = value is not None and bool((value.amax(-1) > LOW).all())
    if finite and half and not sees and not training:
        return None
    fitted = _fitted(add, bias, scores.shape, meta, exact)
    if fitted is None or sees:
        return None if fitted is None else Mask(fitted)
    if training:
        only = fitted if exact else _sum(add, tuple(fills), -inf, meta)
        filled = only if exact or only is None else _fitted(add, only, scores.shape, meta, True)
        if (filled is None) != (only is None):
            return None
        fitted, rows = rows_of(add, fitted, filled, finite)
        return Mask(fitted, rows=rows)
    if not finite and meta.device.type != "cpu":
        hides = add(aten.eq.Scalar, fitted, -inf)
        # kernels of GPUs count in powers of two: nearly the least number overflows there
        if not exact and fitted.meta["val"].dtype is not torch.float16:
            fitted = add(aten.where.self, hides, fitted, add(aten.clamp_min.default, fitted, SWALLOWS))
        fitted = add(aten.where.ScalarSelf, add(aten.all.dim, hides, -1, True), nan, fitted)
    return Mask(fitted)


def _sum(add: Adding, terms: tuple[Term, ...], low: float, meta: TensorMeta) -> fx.Node | None:
    bias: fx.Node | None = None
    for term in terms:
        if term.fill is not None:
            hidden, other = (add(aten.full.default, [], x, dtype=meta.dtype, device=meta.device) for x in (low, 0.0))
            other = other if bias is None else bias
            bias = add(aten.where.self, term.node, *((hidden, other) if term.where else (other, hidden)))
        else:
            node = term.node if term.factor == 1 else add(aten.mul.Tensor, term.node, term.factor)
            bias = node if bias is None else add(aten.add.Tensor, bias, node)
    return bias


def _seen(value: torch.Tensor, shape: tuple[int, ...], limit: float) -> bool | None:
    """Does this constant mask hide what lies ahead (True), or nothing (False)?"""
    if bool((value == 0).all()):
        return False
    if tuple(value.shape[-2:]) != shape[-2:]:
        return None
    behind = torch.ones(shape[-2:], dtype=torch.bool, device="cpu").tril_()
    return True if bool(((value == 0) & behind | (value <= limit) & ~behind).all()) else None


def _fitted(add: Adding, bias: fx.Node, shape: tuple[int, ...], meta: TensorMeta, exact: bool) -> fx.Node | None:
    """The bias in four dimensions and of a type that the kernel takes. `exact`: it has no numbers but those that hide, and 0."""
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
    dense = bias.meta["val"].strides[-1] == 1
    return bias if dense else add(aten.clone.default, bias, memory_format=torch.contiguous_format)


def _on_cpu(add: Adding, given: Operands) -> fx.Node:
    call = add(ATTENTION, given.query, given.key, given.value, given.mask.bias, given.mask.causal, given.scale)
    return add(operator.getitem, call, 0)


def _on_device(add: Adding, given: Operands) -> fx.Node | None:
    """The call that `scaled_dot_product_attention` makes for such tensors; None where it computes weights."""
    found = traced(lambda plain, tensors: trace(plain, tensors).graph, given)
    if not is_fused(found) or (given.mask.bias is not None and given.fits and not is_fused(found, FUSED[2:])):
        return None
    env = dict(zip(found.find_nodes(op="placeholder"), given.tensors, strict=True))
    for node in found.nodes:
        if node.op == "call_function":
            env[node] = append_copy(add.graph, node, env.__getitem__)
            env[node].meta.update(add.meta)
    (result,) = found.output_node().args[0]  # type: ignore[misc, str-unpack]
    return env[result]  # type: ignore[index]


def traced(trace: Callable[[fx.GraphModule, list[torch.Tensor]], T], given: Operands) -> T:
    """What `trace` makes of `scaled_dot_product_attention` of such tensors."""
    plain = fx.Graph()
    places = [plain.placeholder(f"x{k}") for k in range(len(given.tensors))]
    options: dict[str, Any] = {"is_causal": given.mask.causal, "scale": given.scale}
    if given.mask.bias is not None:
        options["attn_mask"] = places[3]
    plain.output(plain.call_function(F.scaled_dot_product_attention, tuple(places[:3]), options))
    kinds = tuple(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
    tensors = [hollow(node.meta["val"]) for node in given.tensors]
    return without_autocast(lambda: trace(fx.GraphModule({}, plain), tensors), kinds)()  # type: ignore[no-any-return]


def is_fused(graph: fx.Graph, kinds: Sequence[str] = FUSED) -> bool:
    return any(kind in str(node.target) for node in graph.nodes for kind in kinds)
