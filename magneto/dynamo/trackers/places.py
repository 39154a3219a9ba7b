"""Whole numbers that change from call to call as places in tensors: `table[step]`, `cache[:, pos : pos + 1] = k`.

Guards say that a place stays in range. Of an input, eager's view is made by the region ahead of the graph (`PlacedInput`), where the graph uses the input in no other way between a write
and a read. Elsewhere the place is data: what lies there is gathered, a copy that stands for the view (`Machine.select`), and what is written is chosen by a mask, or scattered. Where the
program could tell, capture starts again and takes the number as a constant.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from magneto.base.dataclass import dataclass
from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import SliceTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.lazy_number import ComputedNumber, changing, guard_types, is_unread, leaves, text_of
from magneto.dynamo.trackers.lifted import lift
from magneto.dynamo.trackers.tensor import MadeInput, TensorTracker, join_memory
from magneto.dynamo.trackers.torch_calls import lower
from magneto.graph import TensorMeta, UnknownMeta, fake_call
from magneto.graph.layout import overlaps

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

LEFT = -(1 << 27)  # among the forced breaks, less a number: what is a constant after all
_BASES = 1 << 20  # codes of instructions, and behind them of inputs
_MOST_LEFT = 24
Row = tuple[int, ConstTracker, int | None, tuple[int, int]]
"""A place: the dimension behind whole ones, the number, how many elements (None: the dimension goes), between which ends the number is."""


@dataclass(eq=False, slots=True)
class Places:
    """A key with places in it. `known`: with whole dimensions in their stead; `now`: as it is in this call; `view`: what is known of eager's view."""

    parts: list[Tracker]
    known: tuple[Any, ...]
    now: tuple[Any, ...]
    rows: list[Row]
    view: TensorMeta

    def guard(self, m: Machine) -> None:
        for _, number, _, (low, high) in self.rows:
            guard_types(m, number)
            core, plus = _split(number)
            if core.source is not None:
                m.guard(Kind.INT_RANGE, core.source, (low - plus, high - plus))
            else:
                m.guard(Kind.RELATION, leaves(number)[0].source, f"{low} <= {text_of(number, '{}')} <= {high}")

    def indices(self, m: Machine, whole: TensorTracker) -> list[Tracker | None]:
        """The places as data."""
        found: list[Tracker | None] = [None] * whole.meta.ndim
        for dim, number, length, _ in self.rows:
            index: Tracker = m.number_input(number)
            index = index if length is None else m.node(operator.add, [m.node(torch.arange, [length], {}), index], {})
            found[dim] = m.node("to", [index, whole.meta.device], {}, method=True)
        return found

    def whole(self, m: Machine, v: TensorTracker) -> Any:
        """All that may be at the places."""
        return v if all(part == slice(None) for part in self.known) else m.node(operator.getitem, [v, self.known], {})

    def beside(self) -> bool:
        """Whether indexing by data puts the dimensions where slicing leaves them."""
        dims, cut = [row[0] for row in self.rows], sum(row[2] is not None for row in self.rows)
        return cut == 0 or (cut == 1 and dims[-1] - dims[0] == len(dims) - 1)

    def put(self, m: Machine, whole: TensorTracker, value: Any) -> None:
        """Writes a tensor there. For a compiler, what loops compute in passing is cheaper than the library's scatter, which writes to a copy."""
        gradient = m.grad_enabled() and (whole.meta.requires_grad or value.meta.requires_grad)
        if gradient or m.unknown_sizes or any(row[2] not in (None, 1) for row in self.rows) or value.meta.ndim > self.view.ndim:
            m.node(torch.ops.aten.index_put_.default, [whole, self.indices(m, whole), value], {})
            return
        hit, shape = None, whole.meta.shape
        value = m.node("expand", [value, self.view.shape], {}, method=True)
        for dim, number, length, _ in self.rows:
            at = m.node(torch.arange, [shape[dim]], {"device": whole.meta.device})
            gone = m.node(operator.sub, [at, m.number_input(number)], {})  # from the place to here
            found = m.node(operator.eq, [gone, shape[dim] * (number.value < 0)], {})
            found = m.node("reshape", [found, [-1] + [1] * (len(shape) - dim - 1)], {}, method=True)
            hit = found if hit is None else m.node(operator.and_, [hit, found], {})
            value = m.node("unsqueeze", [value, dim], {}, method=True) if length is None else value
        m.node("copy_", [whole, m.node(torch.where, [hit, value, whole], {})], {}, method=True)


class PlacedInput(MadeInput):
    """The view of an input at the places, which the region makes."""

    __slots__ = ("base", "places")

    def __init__(self, base: TensorTracker, places: Places) -> None:
        super().__init__(base.obj[places.now], "placed")
        self.base, self.places = base, places
        join_memory(base, self)

    def graph_input(self, em: Emitter) -> str:
        assert self.base.source is not None
        return f"{em.source(self.base.source)}[{', '.join(_shown(em, part) for part in self.places.parts)}]"


def _shown(em: Emitter, part: Any) -> str:
    if isinstance(part, SliceTracker):
        return f"slice({', '.join(em.value(one) for one in part.parts())})"
    return em.value(part) if type(part.value) is int else repr(part.value)


def _split(number: ConstTracker) -> tuple[ConstTracker, int]:
    """What a number is computed from, and the constant that is added to it."""
    plus = 0
    while isinstance(number, ComputedNumber) and not number.settled and number.template in ("({} + {})", "({} - {})"):
        left, right = number.operands
        if not is_unread(right) and type(right.value) is int:
            plus, number = plus + (right.value if "+" in number.template else -right.value), left
        elif not is_unread(left) and type(left.value) is int and "+" in number.template:
            plus, number = plus + left.value, right
        else:
            break
    return number, plus


def _varies(m: Machine, v: Tracker) -> bool:
    """Whether it is a whole number that changes with one number from outside."""
    return isinstance(v, ConstTracker) and type(v.value) is int and changing(m, v) and len({leaf.source for leaf in leaves(v)}) == 1


def _ends(m: Machine, part: Tracker, size: int) -> tuple[ConstTracker, int | None, tuple[int, int]] | None:
    """The number of a place in a dimension of this size, how many elements, and the ends."""
    length, number = None, part
    if isinstance(part, SliceTracker):
        number, stop, step = part.parts()
        if not (_varies(m, number) and _varies(m, stop)) or (isinstance(step, ConstTracker) and step.read() not in (None, 1)):
            return None
        (one, low), (other, high) = _split(number), _split(stop)  # type: ignore[arg-type]
        if leaves(one)[0].source != leaves(other)[0].source or text_of(one, "{}") != text_of(other, "{}") or high <= low:
            return None
        length = high - low
    elif not _varies(m, part):
        return None
    assert isinstance(number, ConstTracker)
    low, high = (0, size - (length or 1)) if number.value >= 0 or length else (-size, -1)
    return (number, length, (low, high)) if low <= number.value <= high else None


def places_of(m: Machine, v: TensorTracker, parts: list[Tracker]) -> Places | None:
    """None where there are none."""
    fits = all(isinstance(part, (ConstTracker, SliceTracker)) for part in parts) and any(
        _varies(m, one) for part in parts for one in (part.parts()[:1] if isinstance(part, SliceTracker) else (part,))
    )
    if not m.changing or not m.selects() or isinstance(v.meta, UnknownMeta) or not fits:
        return None
    known: list[Any] = []
    now, rows, dim, out = [], [], 0, 0  # type: ignore[var-annotated]
    rest = v.meta.ndim - sum(isinstance(part, SliceTracker) or part.value not in (None, ...) for part in parts)  # type: ignore[attr-defined]
    for part in parts:
        found = _ends(m, part, v.meta.shape[dim]) if 0 <= dim < v.meta.ndim else None
        if found is not None:
            number, length, _ = found
            rows.append((out, *found))
            known.append(slice(None))
            now.append(number.value if length is None else slice(number.value, number.value + length))
        elif isinstance(part, SliceTracker) and any(_varies(m, one) for one in part.parts()):
            return None
        else:
            fixed = lower(m, part)
            if type(fixed) not in (int, slice, type(None), type(...)):
                return None
            known.append(fixed)
            now.append(fixed)
        out += rest if known[-1] is ... else type(known[-1]) is not int
        dim += rest if known[-1] is ... else known[-1] is not None
    try:
        view = fake_call(operator.getitem, (v.meta, tuple(now)), grad_enabled=False).value
    except Exception:  # the usual way raises it in the program
        return None
    return Places(parts, tuple(known), tuple(now), rows, view) if rows else None


def _left(m: Machine, code: int) -> bool:
    """Whether an earlier attempt has found out that the program could tell."""
    codes = [one for one in m.forced if LEFT - 2 * _BASES < one <= LEFT]  # type: ignore[attr-defined]
    return code in codes or len(codes) > _MOST_LEFT


def _code_of(m: Machine, v: TensorTracker) -> int | None:
    """For all views of an input that the region could make. None: it is no tensor as the region finds it, or autograd would record its views."""
    recorder: Any = m.recorder  # type: ignore[attr-defined]
    free = not v.meta.requires_grad or not (recorder.initial_grad_mode or recorder.mode_changed)
    as_found = (
        type(v) is TensorTracker and v.given() is not None and v.obj is not MISSING and (v.node is None or v.node.op == "placeholder")
    )
    code = LEFT - _BASES - hash(v.source) % _BASES
    return code if free and as_found and not v.new_leaf and not m.has_written(v) and not _left(m, code) else None


def read(m: Machine, v: TensorTracker, parts: list[Tracker]) -> Tracker | None:
    """`v[parts]` where numbers that change are places in it."""
    places = places_of(m, v, parts)
    return None if places is None else _read(m, v, places)


def _read(m: Machine, v: TensorTracker, places: Places) -> Tracker | None:
    if (code := _code_of(m, v)) is not None:
        places.guard(m)
        made = PlacedInput(v, places)
        m.select(made, v, code, places.parts)
        return made
    code, view = LEFT - m.frames[-1].count, places.view  # type: ignore[attr-defined]
    if not places.beside() or _left(m, code) or overlaps(view.shape, view.strides):
        return None
    places.guard(m)
    whole = places.whole(m, v)
    copy: Any = m.node(torch.ops.aten.index.Tensor, [whole, places.indices(m, whole)], {})
    if copy.meta.strides != view.strides and not view.is_contiguous():  # the program can tell
        laid = m.node(torch.empty_strided, [view.shape, view.strides], {"dtype": view.dtype, "device": view.device})
        copy = m.node("copy_", [laid, copy], {}, method=True)
    m.select(copy, v, code, places.parts, lambda: places.put(m, whole, copy))
    return copy  # type: ignore[no-any-return]


def write(m: Machine, v: TensorTracker, parts: list[Tracker], value: Tracker) -> bool:
    """`v[parts] = value` where numbers that change are places in it, or the value is one."""
    if m.selected(value, v, parts):  # `v[i] += 1`: it is there already
        return True
    places = places_of(m, v, parts)
    made = _number(m, v, value) if isinstance(value, ConstTracker) else value if isinstance(value, TensorTracker) else None
    if places is None:
        if made is not None and made is not value:
            m.node(operator.setitem, [v, tuple(lower(m, part) for part in parts), made], {})
        return made is not None and made is not value
    given = made.meta if made is not None else value.value if isinstance(value, ConstTracker) else None
    try:
        fake_call(operator.setitem, (v.meta, places.now, given), grad_enabled=False)
    except Exception:  # as above
        return False
    gradient = made is not None and made.meta.requires_grad and m.grad_enabled()
    if not gradient and _code_of(m, v) is not None:
        m.node(operator.setitem, [_read(m, v, places), ..., made or lower(m, value)], {})
        return True
    if not places.beside():
        return False
    places.guard(m)
    options = {"dtype": v.meta.dtype, "device": v.meta.device}
    if made is not None:
        copied = m.node("to", [made], options | {"copy": True}, method=True)
    else:
        copied = m.node("fill_", [m.node(torch.empty, [()], options), lower(m, value)], {}, method=True)
    places.put(m, places.whole(m, v), copied)
    return True


def _number(m: Machine, v: TensorTracker, value: ConstTracker) -> TensorTracker | None:
    """A number that changes, as data that becomes elements of a tensor; a larger one raises in eager."""
    numbers, dtype = leaves(value), v.meta.dtype
    if not v.meta.ndim or dtype.is_complex or dtype is torch.bool or len({leaf.source for leaf in numbers}) != 1:
        return None
    if (made := lift(m, v, value)) is not None and dtype is not torch.float64:
        text = text_of(value, "{}")
        bounds = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        within = f"not {bounds.max} < abs({text}) < math.inf" if dtype.is_floating_point else f"{bounds.min} <= {text} <= {bounds.max}"
        m.guard(Kind.RELATION, numbers[0].source, within)
    return made


@rule((torch.Tensor.select, torch.select), TensorTracker, Tracker, Tracker)
def select(m: Machine, v: TensorTracker, dim: Tracker, index: Tracker) -> Any:
    parts = _behind(m, v, dim)
    return NotImplemented if parts is None else read(m, v, [*parts, index]) or NotImplemented


@rule((torch.Tensor.narrow, torch.narrow), TensorTracker, Tracker, Tracker, Tracker)
def narrow(m: Machine, v: TensorTracker, dim: Tracker, start: Tracker, length: Tracker) -> Any:
    parts = _behind(m, v, dim)
    if parts is None or not _varies(m, start):
        return NotImplemented
    return read(m, v, [*parts, SliceTracker(start, m.apply(operator.add, start, length), m.const(None))]) or NotImplemented


def _behind(m: Machine, v: TensorTracker, dim: Tracker) -> list[Tracker] | None:
    """Parts of a key for all dimensions ahead of `dim`."""
    if not isinstance(dim, ConstTracker) or type(dim.read()) is not int or not -v.meta.ndim <= dim.value < v.meta.ndim:
        return None
    return [m.const(slice(None)) for _ in range(dim.value % v.meta.ndim)]
