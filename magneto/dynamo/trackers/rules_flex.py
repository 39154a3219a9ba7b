"""Rows of torch.nn.attention.flex_attention: captured as its mathematics.

PyTorch's own function checks its arguments and ends at an operator, in place of which stands `attention`. Eager calls the program's functions of a score, or of a place in the
mask, through four nested vmaps; here they are called once, with places that broadcast. That computes the same as long as they treat each score by itself: what else they do
is a break, and eager's own path.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.nn.attention import flex_attention as flex

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held, Source
from magneto.dynamo.trackers.base import Raised, Tracker
from magneto.dynamo.trackers.build import FUNCTION_BUILDERS
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.function import CODE_RULES, STAND_INS, BuiltinTracker, FunctionTracker
from magneto.dynamo.trackers.klass import held
from magneto.dynamo.trackers.pymodule import ATTRIBUTES
from magneto.dynamo.trackers.tensor import TensorTracker

if TYPE_CHECKING:
    import types

    from magneto.dynamo.machine.protocol import Machine


_HOP: Any = torch.ops.higher_order.flex_attention


def by_scores(fn: Any, *args: Any) -> Any:
    """Stands for a call of the program's function with a score or with places."""
    raise NotImplementedError


def places(sizes: Any, device: Any) -> Any:
    """Batch, head, query and key, each along its own dimension."""
    return [torch.arange(size, device=device).reshape([-1 if k == dim else 1 for k in range(4)]) for dim, size in enumerate(sizes)]


def attention(query: Any, key: Any, value: Any, score_mod: Any, mask_mod: Any, scale: Any) -> Any:
    """Eager's formula; a row that sees nothing is 0, and nothing flows back through it. The second result is a binary logarithm."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups = query.size(1) // key.size(1)
    key, value = (x.expand(query.size(0), -1, -1, -1) for x in (key, value))
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(-2, -1)).to(wide) * scale
    sizes = scores.shape
    at = places(sizes, query.device)
    if score_mod is not flex._identity:
        scores = by_scores(score_mod, scores, *at).expand(sizes)
    if mask_mod is not flex.noop_mask:
        scores = torch.where(by_scores(mask_mod, *at), scores, torch.full((), -math.inf, dtype=wide, device=query.device))
    sees = (scores != -math.inf).any(-1, keepdim=True)
    scores = torch.where(sees, scores, 0.0)
    weights = torch.where(sees, scores.softmax(-1), 0.0)
    sums = torch.where(sees.squeeze(-1), scores.logsumexp(-1), -math.inf) / math.log(2)
    largest = torch.where(sees.squeeze(-1), scores.detach().amax(-1), -math.inf) / math.log(2)
    out = weights.to(query.dtype) @ value
    order = sorted(range(4), key=query.stride, reverse=True)  # as the query lies in memory
    if order != [0, 1, 2, 3]:
        out = out.permute(order).contiguous().permute([order.index(k) for k in range(4)])
    return out, sums, largest


def mask_of(mod_fn: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any = None) -> Any:
    """`create_mask`."""
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    sizes = (B or 1, H or 1, Q_LEN, KV_LEN)
    at = places(sizes, device)
    if flex._get_mod_type(mod_fn) == flex._ModificationType.SCORE_MOD:
        out = by_scores(mod_fn, torch.zeros(sizes, device=device), *at).expand(sizes)
        return torch.where(torch.isneginf(out), False, True)
    return by_scores(mod_fn, *at).expand(sizes)


def _as_a_whole(m: Machine, f: FunctionTracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """A break inside is one at the call."""
    return m.inline(f, args, kwargs)


def _operator(self: Any, *args: Any) -> Any:
    raise NotImplementedError


@rule(_operator, Tracker, TensorTracker, TensorTracker, TensorTracker)
def operator(m: Machine, own: Tracker, /, *args: Tracker) -> Any:
    """Query, key, value, score_mod, block mask (its last part is the function), scale."""
    metas = [v.meta for v in args[:3]]  # type: ignore[attr-defined]
    if len({(meta.dtype, meta.device) for meta in metas}) > 1 or not metas[0].dtype.is_floating_point or metas[0].dtype.itemsize < 2:
        _refuse(m, "tensors of several types, or of one byte")
    return m.call(held(m, attention, "attention"), [*args[:4], m.iterate(args[4])[-1], args[5]], {})


def _refuse(m: Machine, reason: str) -> Any:
    m.graph_break("B101", callee="flex_attention", reason=reason)


@rule(by_scores, Tracker)
def called_once(m: Machine, fn: Tracker, /, *args: Tracker) -> Any:
    graph: fx.Graph = m.recorder.graph  # type: ignore[attr-defined]
    last = next(iter(reversed(graph.nodes)))
    try:
        result: Any = m.call(fn, args, {})
    except Raised:
        _refuse(m, "the function raises")
    if not isinstance(result, TensorTracker) or (len(args) == 4 and result.meta.dtype is not torch.bool):
        _refuse(m, f"the function returns {result.show()}")
    varies = {arg.node for arg in args}  # type: ignore[attr-defined]
    node = last.next
    while node.op != "root":
        drawn = node in m.recorder.random_nodes  # type: ignore[attr-defined]
        if (name := node.name if drawn else _otherwise(node, varies)) is not None:
            _refuse(m, f"its function calls {name}")
        node = node.next
    if result.node not in varies and result.meta.ndim:
        _refuse(m, "its function returns a tensor from outside")
    return result


def _otherwise(node: fx.Node, varies: set[Any]) -> str | None:
    """The name of an operation that does not treat each score by itself."""
    name = node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))
    name = name.strip("_") if name.startswith("__") else name
    if not any(one in varies for one in node.all_input_nodes):
        return name if name in _IN_PLACE or name == "setitem" or (name.endswith("_") and name not in _ELEMENTWISE) else None
    varies.add(node)
    if name == "getitem":
        base, key = node.args
        key = key if isinstance(key, tuple) else (key,)
        whole = all(type(one) is int or (isinstance(one, fx.Node) and _is_place(one)) for one in key)
        return None if base not in varies and whole and len(key) == base.meta["val"].ndim else name  # type: ignore[union-attr]
    if name.rstrip("_") in _ELEMENTWISE or name in _ELEMENTWISE:
        changes = name.endswith("_") and name not in _ELEMENTWISE or name in _IN_PLACE
        return name if changes and node.args[0] not in varies else None
    return name


def _is_place(node: fx.Node) -> bool:
    return node.meta["val"].dtype in (torch.int64, torch.int32)


_ARITHMETIC = "add sub mul truediv floordiv mod pow and_ or_ xor lshift rshift"
_IN_PLACE = frozenset(f"i{name.strip('_')}" for name in _ARITHMETIC.split())
_ELEMENTWISE = _IN_PLACE | frozenset(
    f"{_ARITHMETIC} neg pos abs invert eq ne lt le gt ge and or rsub rtruediv rdiv rpow div true_divide floor_divide remainder fmod negative exp exp2 expm1 log log1p log2 log10 sqrt "
    "rsqrt reciprocal square sin cos tan tanh sinh cosh asin acos atan atan2 sigmoid relu relu6 gelu silu softplus erf floor ceil round trunc frac sign clamp clamp_min "
    "clamp_max clip minimum maximum where masked_fill logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor isinf isneginf isnan isfinite "
    "lerp nan_to_num to float double half bfloat16 long int bool type_as clone detach new_ones new_zeros new_full new_tensor zeros_like ones_like full_like hypot logaddexp".split()
)


class Marks:
    """In place of `torch._dynamo`, which is not imported for this: sizes are what they are."""

    @staticmethod
    def mark_static(x: Any, dim: int) -> None:
        pass


def _built(m: Machine, obj: types.FunctionType, source: Source) -> Tracker | None:
    """The operator's own `__call__`, and a context that names nodes of graphs."""
    names = (obj.__name__, obj.__module__) == ("annotate", "torch.fx.traceback")
    if not names and obj is not type(_HOP).__call__:
        return None
    if not isinstance(source, Held):
        m.guard(Kind.ID_IS, source, obj)
    return held(m, contextlib.nullcontext, "annotate") if names else BuiltinTracker(_operator, source)


FUNCTION_BUILDERS.append(_built)
ATTRIBUTES["_dynamo"] = (flex.flex_attention.__code__, Marks)
CODE_RULES[flex.flex_attention.__code__] = _as_a_whole
CODE_RULES[flex.create_block_mask.__code__] = _as_a_whole
CODE_RULES[flex.create_mask.__code__] = _as_a_whole
STAND_INS[flex.create_mask.__code__] = lambda m, fn, args, kwargs: held(m, mask_of, "create_mask")  # type: ignore[assignment, return-value]
