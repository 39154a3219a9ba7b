"""What a boolean mask selects, where the program only computes with its elements and writes them back (`x[mask] *= 2`, `x[mask] = y[mask].exp()`) or reduces them
(rules_masked.py).

How many elements there are depends on data; so the graph computes with all of them, and what is written is chosen by the mask. The elements that are not selected are ones: no
gradient that is infinite there reaches the tensor. Whoever asks for anything else makes capture start again, with a break where the mask is the index.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn.functional as F
from torch import fx

from magneto.base.errors import GraphBreak
from magneto.dynamo.machine.signals import Restart
from magneto.dynamo.trackers.base import CannotEmit, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.dispatch import prefer
from magneto.dynamo.trackers.function import BoundMethodTracker, BuiltinTracker
from magneto.dynamo.trackers.item import ItemTracker
from magneto.dynamo.trackers.klass import guard_class
from magneto.dynamo.trackers.tensor import PLAIN_CLASSES, TensorTracker
from magneto.graph.layout import overlaps

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


class MaskedTracker(Tracker):
    """The elements of `whole` that `mask` selects. `born`, `reason`: the break instead; `written`: what the graph had written by then; `aliased`: eager's has views; `saved`: a
    formula of eager's may read it, which refuses what has been written since."""

    __slots__ = ("aliased", "born", "mask", "reason", "saved", "whole", "written")
    unknown = True
    exact_type = torch.Tensor

    def __init__(self, m: Machine, whole: TensorTracker, mask: TensorTracker, of: MaskedTracker | None = None) -> None:
        super().__init__()
        self.whole, self.mask, self.aliased, self.saved = whole, mask, False, False
        self.born: int = of.born if of is not None else m.frames[-1].count  # type: ignore[attr-defined]
        self.reason: GraphBreak = (
            of.reason if of is not None else GraphBreak("B105", m.user_stack(), operation="indexing with a boolean mask")
        )
        self.written: tuple[Any, int] = of.written if of is not None else _written(m, mask)

    def needed(self, m: Machine) -> NoReturn:
        raise Restart(self.born, self.reason, False)

    @property
    def rest(self) -> int:
        """Dimensions of one selected element."""
        return self.whole.meta.ndim - self.mask.meta.ndim

    def selects_alike(self, m: Machine, other: MaskedTracker) -> bool:
        """Whether elements of both are the same in number."""
        return other.written[1] == self.written[1] and _same(m, other.mask, self.mask)

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        guard_class(m, torch.Tensor)
        if name == "shape":
            return m.apply(torch.Tensor.size, self)
        if name == "ndim":
            return m.const(self.rest + 1)
        if name in ("dtype", "device", "requires_grad"):
            return m.const(getattr(self.whole.meta, name))
        found = getattr(torch.Tensor, name, None)
        return BoundMethodTracker(BuiltinTracker(found), self) if found is not None and found in METHODS else self.needed(m)

    def special_set(self, m: Machine, name: str, value: Tracker | None) -> bool:
        self.needed(m)

    def emit(self, em: Emitter) -> str:
        raise CannotEmit(self)

    def show(self) -> str:
        return f"elements of {self.whole.show()}"


def select(m: Machine, v: TensorTracker, key: Tracker) -> MaskedTracker | None:
    """`v[key]`; None where a break says better what it is."""
    if m.unknown_sizes or not m.selects():
        return None
    v, mask = _place(m, v, key)
    if not isinstance(mask, TensorTracker) or not _selects(m, v, mask):
        return None
    return MaskedTracker(m, m.node(torch.where, [over(m, mask, v), v, True], {}), mask)  # type: ignore[arg-type]


def _selects(m: Machine, v: TensorTracker, mask: TensorTracker) -> bool:
    n, placed = mask.meta.ndim, mask.meta.device == v.meta.device and mask.meta.dtype is torch.bool
    return bool(n and placed and _plain(v) and _plain(mask) and _alike(v, mask, n)) and m.known(mask) is None


def _place(m: Machine, v: TensorTracker, key: Tracker) -> tuple[TensorTracker, Tracker]:
    """`x[mask, 0]` is `x[:, 0][mask]`."""
    parts = list(key.items(m)) if isinstance(key, TupleTracker) and key.cls is tuple else [key]
    mask = parts[0] if parts else key
    if not isinstance(mask, TensorTracker) or mask.meta.dtype is not torch.bool or not mask.meta.ndim:
        return v, key
    rest = [const.value for part in parts[1:] if (const := part.try_const()) is not None and type(const.value) in (int, slice)]
    if len(rest) < len(parts) - 1 or mask.meta.ndim + len(rest) > v.meta.ndim or not _plain(v):
        return v, key
    places = (*[slice(None)] * mask.meta.ndim, *rest)
    return (m.node(operator.getitem, [v, places], {}) if rest else v), mask  # type: ignore[return-value]


def fill(m: Machine, v: TensorTracker, key: Tracker, value: TensorTracker) -> bool:
    """`v[key] = value` of a value that learns, the same for each element; False where the operation itself stays in the graph."""
    if m.unknown_sizes or not m.selects() or value.meta.dtype is not v.meta.dtype or not _plain(value):
        return False
    v, mask = _place(m, v, key)
    if not isinstance(mask, TensorTracker) or not _selects(m, v, mask) or value in (v.memory or ()) or _may_share(v, mask):
        return False
    n = value.meta.ndim
    sizes = v.meta.sizes()[v.meta.ndim - n :] if n <= v.meta.ndim - mask.meta.ndim else (None,)
    if sizes != value.meta.sizes() or any(overlaps(one.shape, one.strides) for one in _probes(v)):
        return False
    m.node("copy_", [v, m.node(torch.where, [over(m, mask, v), value, v], {})], {}, method=True)
    return True


def put(m: Machine, v: TensorTracker, key: Tracker, value: MaskedTracker) -> None:
    """`v[key] = value`."""
    whole = value.whole
    v, key = _place(m, v, key)
    fits = _plain(v) and v.meta.dtype is whole.meta.dtype and v.meta.ndim == whole.meta.ndim and _alike(v, whole, v.meta.ndim)
    if not fits or not _same(m, key, value.mask) or _written(m, value.mask) != value.written:
        value.needed(m)
    if any(overlaps(one.shape, one.strides) for one in _probes(v)) or _may_share(v, value.mask):
        value.needed(m)
    m.node("copy_", [v, m.node(torch.where, [over(m, value.mask, v), whole, v], {})], {}, method=True)


def _written(m: Machine, mask: TensorTracker) -> tuple[Any, int]:
    """Another one behind a write to the mask."""
    return mask.node, len(m.recorder.keep)  # type: ignore[attr-defined]


def _plain(v: TensorTracker) -> bool:
    return v.cls in PLAIN_CLASSES and not any(one.lazy for one in _probes(v))


def _probes(v: TensorTracker) -> list[Any]:
    return [one for one in getattr(v.meta, "probes", (v.meta,)) if one is not None]


def _alike(v: TensorTracker, other: TensorTracker, n: int) -> bool:
    """Whether the first `n` dimensions are the same."""
    ours, theirs = _probes(v), _probes(other)
    return len(ours) == len(theirs) and all(a.shape[:n] == b.shape[:n] and a.ndim >= n for a, b in zip(ours, theirs, strict=True))


def _may_share(v: TensorTracker, mask: TensorTracker) -> bool:
    """Whether the mask may lie in what is written, which eager refuses."""
    return v is mask or mask in (v.memory or ()) or (v.meta.dtype is torch.bool and v.source is not None and mask.source is not None)


def _same(m: Machine, one: Tracker, other: TensorTracker) -> bool:
    """Whether two masks have the same numbers: the graph computes them of the same, and writes nothing in between."""
    if one is other:
        return True
    if not isinstance(one, TensorTracker) or one.node is None or other.node is None:
        return False
    recorder: Any = m.recorder  # type: ignore[attr-defined]
    met: list[fx.Node] = []
    if not _computed_alike(one.node, other.node, met):
        return False
    places = [i for i, node in enumerate(recorder.graph.nodes) if node in met]
    return not any(node in recorder.keep for node in [*recorder.graph.nodes][places[0] : places[-1]])


def _computed_alike(one: Any, other: Any, met: list[fx.Node]) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, fx.Node):
        met += (one, other)
        alike = one.op.startswith("call_") and (one.op, one.target) == (other.op, other.target)
        return alike and _computed_alike([one.args, one.kwargs], [other.args, other.kwargs], met)
    if isinstance(one, (tuple, list, dict)):
        rows = zip(*(value.items() if isinstance(value, dict) else value for value in (one, other)), strict=True)
        return len(one) == len(other) and all(_computed_alike(a, b, met) for a, b in rows)
    return bool(one == other)


def over(m: Machine, mask: Tracker, v: TensorTracker) -> Tracker:
    """The mask with the dimensions of `v`."""
    for _ in range(v.meta.ndim - mask.meta.ndim):  # type: ignore[attr-defined]
        mask = m.node("unsqueeze", [mask, -1], {}, method=True)
    return mask


def check(m: Machine, of: MaskedTracker, saves: bool = True) -> None:
    """The mask is what it was when it selected. `saves`: a formula may keep the elements."""
    if _written(m, of.mask) != of.written:
        of.needed(m)
    of.saved |= saves and of.whole.meta.requires_grad


def operand(m: Machine, of: MaskedTracker, v: Tracker) -> Tracker:
    """What is computed with in the stead of `v`. What learns is one where nothing is selected, so that no NaN flows back from there."""
    if isinstance(v, MaskedTracker):
        return v.whole if v.rest == of.rest and of.selects_alike(m, v) else of.needed(m)
    if not isinstance(v, TensorTracker):
        return v if isinstance(v, (ConstTracker, ItemTracker)) else of.needed(m)
    n = v.meta.ndim
    if n == of.rest + 1 and _plain(v) and v.meta.sizes()[0] == 1 and v.meta.dtype is of.whole.meta.dtype:
        return operand(m, of, m.node("select", [v, 0, 0], {}, method=True))  # the same for each element
    if not _plain(v) or n > of.rest or not v.meta.requires_grad:
        return v if n <= of.rest and _plain(v) else of.needed(m)
    if not n and v.meta.dtype is not of.whole.meta.dtype:
        of.needed(m)  # of no dimensions it would not decide the type of the result
    return m.node(torch.where, [over(m, of.mask, of.whole), v, True], {})


def over_elements(m: Machine, of: MaskedTracker, fill: Any) -> Tracker:
    """The whole with another number where nothing is selected."""
    return m.node(torch.where, [over(m, of.mask, of.whole), of.whole, fill], {})


def _elementwise(fn: Any, apply: Any, floats: bool, in_place: bool) -> None:
    """Rows for a function of elements, computed by `apply`. `floats`: of integers it may raise by what they are."""

    def body(m: Machine, *args: Tracker, **kwargs: Tracker) -> Tracker:
        given = [arg for arg in args if isinstance(arg, MaskedTracker)]
        of = given[0]
        check(m, of, False)
        if "out" in kwargs or (in_place and (of is not args[0] or of.aliased)):
            of.needed(m)
        operands = [operand(m, of, arg) for arg in args]
        result = m.apply(apply, *operands, **{name: operand(m, of, arg) for name, arg in kwargs.items()})
        if result is of.whole:
            return of
        known = args[1].try_const() if len(args) == 2 and floats else None
        harmless = not floats or (known is not None and type(known.value) is int and known.value > 0)
        if not isinstance(result, TensorTracker) or not (harmless or result.meta.dtype.is_floating_point):
            of.needed(m)
        if result.meta.device != of.whole.meta.device or result.meta.ndim != of.whole.meta.ndim:
            of.needed(m)
        learns = result.meta.requires_grad
        if in_place and learns and (of.saved or of in given[1:]):
            of.needed(m)
        for one in given[in_place:]:
            one.saved |= learns and apply.__name__ not in _UNSAVED
        if not in_place:
            of = MaskedTracker(m, of.whole, of.mask, of)
        elif result.meta.dtype is not of.whole.meta.dtype or result.meta.sizes() != of.whole.meta.sizes():
            of.needed(m)
        of.whole, of.saved = result, learns and apply.__name__ in _SAVED
        return of

    prefer(fn, MaskedTracker)(body)
    prefer(fn, Tracker, MaskedTracker)(body)


METHODS: set[Any] = set()
_OPERATORS = "add sub mul truediv pow floordiv mod and_ or_ xor eq ne lt le gt ge neg pos invert"
_NAMES = (
    "abs neg exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal square sin cos tan tanh sinh cosh asinh atan atan2 sigmoid relu erf floor ceil round trunc frac "
    "sign where masked_fill clamp clamp_min clamp_max nan_to_num add sub mul div true_divide pow logical_not logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor "
    "bitwise_not maximum minimum hypot xlogy lerp logaddexp isnan isinf isfinite eq ne lt le gt ge sinc logit"
)
_METHODS_ONLY = "float double half bfloat16 long int bool to clone"
_FUNCTIONS = "relu relu6 gelu silu mish elu selu celu softplus softsign logsigmoid leaky_relu hardtanh hardsigmoid hardswish sigmoid tanh tanhshrink softshrink"
_UNSAVED = frozenset("add sub neg".split())  # their formulas keep no operand
_SAVED = frozenset("exp exp2 expm1 reciprocal rsqrt sigmoid sqrt tan tanh relu hypot pow".split())  # theirs keep the result
_OF_FLOATS = frozenset(("floordiv", "mod", "pow", "div", "reciprocal"))

for _name in _OPERATORS.split():
    _elementwise(getattr(operator, _name), getattr(operator, _name), _name in _OF_FLOATS, False)
    if (_in_place := getattr(operator, f"i{_name.strip('_')}", None)) is not None:
        _elementwise(_in_place, getattr(operator, _name), _name in _OF_FLOATS, True)
for _name in _NAMES.split():
    _fn = getattr(torch, _name)
    for _form, _writes in ((_fn, False), (getattr(torch.Tensor, _name, None), False), (getattr(torch.Tensor, f"{_name}_", None), True)):
        if _form is not None:
            _elementwise(_form, _fn, _name in _OF_FLOATS, _writes)
            METHODS.add(_form)
for _name in _METHODS_ONLY.split():
    _fn = getattr(torch.Tensor, _name)
    _elementwise(_fn, _fn, False, False)
    METHODS.add(_fn)
for _fn in (torch.clone, torch.zeros_like, torch.ones_like, *(getattr(F, _name) for _name in _FUNCTIONS.split())):
    _elementwise(_fn, _fn, False, False)
