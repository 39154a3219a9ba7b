"""Guard rows: what must hold for a region to be used again. A GuardSet is an ordered, deduplicated list of rows."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

from magneto.base.dataclass import dataclass, field, replace
from magneto.dynamo.guards.source import Held, Source, may_die

if TYPE_CHECKING:  # rows are read without torch
    from magneto.graph.resize import Form


class Kind(Enum):
    """Each kind: what the payload is, and what is compared."""

    __hash__ = object.__hash__

    TYPE_IS = "payload: type; type(value) is payload"
    ID_IS = "payload: object held strongly; value is payload"
    EQUALS = "payload: constant; same type and equal, nested tuples/frozensets compared element by element, floats by bit pattern"
    TENSOR = "payload: TensorRow; exact type, dtype, device, shape, strides, requires_grad, plain (strided, conj/neg bits as then...), inference or not"
    LENGTH = "payload: int; len of an exact list, tuple, dict, set, deque"
    KEYS = "payload: tuple of keys in order; keys of an exact dict (or OrderedDict), or elements of a set, are these"
    KEY_ABSENT = "payload: key; the dict does not hold it"
    ABSENT = "payload: None; the slot or cell is unbound, or the attribute (payload: name) is not set"
    PRESENT = "payload: None; there is a value, whatever it is"
    SAME = "payload: Source; both sources give the identical object"
    DISTINCT = (
        "payload: tuple[Source, ...]; source and all of these give pairwise different objects (tensors: also not overlapping in memory)"
    )
    MEMBER = "payload: Source; the object there is an element of the set, by identity"
    NOT_MEMBER = "payload: Source; the object there is no element of the set"
    TYPE_VERSION = "payload: type; the class (and its bases) has not been modified since capture; source is Held(type)"
    STATE = "payload: (name, callable, args, expected); callable(*args) == expected: grad mode, autocast, default dtype...; source None"
    RELATION = "payload: text of a condition on a number that decides something (or on the bytes of an array, the text of a derived str), {} for the value: it is True"
    TOGETHER = "payload: (condition, sources); a condition on several numbers that decide something together, {0} for the value, {1} and so on for those of the sources: it is True"
    DECIDES = "payload: machine.decided.Decision; what the program decides by the number in a small tensor comes out as it did"
    SIZES = "payload: SizesRow; sizes and strides of these tensors are some that the graph was captured for"
    INT_RANGE = "payload: (low, high); value is an exact int within the closed range (None = open): dynamic sizes and ints"


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Expected metadata; a None entry in shape or strides is dynamic; requires_grad None is not looked at; `inference`: made under inference mode; `lazy`: conj and neg bits."""

    cls: type
    dtype: Any
    device: Any
    shape: tuple[int | None, ...]
    strides: tuple[int | None, ...] | None
    requires_grad: bool | None
    inference: bool = False
    lazy: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SizesRow:
    """Sizes that vary together. The row's source is the first tensor, `others` are the rest; `forms`: of all of them; `bounds`: of each symbol; `fits`: whether the graph takes these sizes, of the
    `used` symbols."""

    others: tuple[Source, ...]
    forms: tuple[Form, ...]
    bounds: tuple[tuple[int, int | None], ...]
    used: tuple[int, ...]
    fits: Callable[[tuple[int, ...]], bool]

    def sizes(self, numbers: tuple[int, ...]) -> tuple[int, ...] | None:
        """The sizes of the symbols, where `numbers` (of each tensor the sizes, then the strides) have these forms."""
        found: dict[int, int] = {}
        at = 0
        for form in self.forms:
            for dim, symbol, plus in form.symbols:
                found.setdefault(symbol, numbers[at + dim] - plus)
            at += 2 * len(form.shape)
        sizes = tuple(found[symbol] for symbol in range(len(self.bounds)))
        if tuple(number for form in self.forms for part in form.at(sizes) for number in part) != numbers:
            return None
        within = all(low <= size and (high is None or size <= high) for size, (low, high) in zip(sizes, self.bounds, strict=True))
        return sizes if within else None

    def holds(self, numbers: tuple[int, ...]) -> bool:
        sizes = self.sizes(numbers)
        return sizes is not None and self.fits(tuple(sizes[symbol] for symbol in self.used))

    def holds_for(self, *tensors: Any) -> bool:
        facts = [
            ((one,), (0,)) if type(one) is int else (tuple(one.shape), one.stride())
            for one in tensors
            if type(one) is int or hasattr(one, "stride")
        ]
        if [len(shape) for shape, _ in facts] != [len(form.shape) for form in self.forms]:
            return False
        return self.holds(tuple(number for fact in facts for part in fact for number in part))


class Weak:
    """Payload of a row after its program has been built: an object that the rows must not keep alive. Printing shows what it was."""

    __slots__ = ("ref", "text")

    def __init__(self, obj: Any) -> None:
        self.ref = weakref.ref(obj)
        self.text = show_value(obj)

    def known(self) -> Any:
        """The object; when it is gone, a class that nothing is."""
        obj = self.ref()
        return type("gone", (), {}) if obj is None else obj

    def __repr__(self) -> str:
        return self.text


def show_value(obj: Any) -> str:
    """A short description that runs no user code and makes no long text (of tensors, models)."""
    if type(obj) in _SHOWN or (type(obj).__module__ == "torch" and type(obj).__name__ in ("dtype", "device", "layout", "memory_format")):
        text = repr(obj)
        return text if len(text) <= 80 else text[:77] + "..."
    name = obj.__qualname__ if isinstance(obj, (type, types.FunctionType)) else obj.__name__ if isinstance(obj, _NAMED) else None
    return name if name is not None else f"<{type(obj).__qualname__} at 0x{id(obj):x}>"


_SHOWN = frozenset({int, float, complex, bool, str, bytes, type(None), type(...), range, slice, tuple, frozenset})
_NAMED = (types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType)


@dataclass(frozen=True, slots=True)
class Row:
    """One guard. `user_line` ("file:line") says which line of the program made it necessary, `inside` which line of torch that it called."""

    kind: Kind
    source: Source | None
    payload: Any
    user_line: str = ""
    inside: str = ""


def row_key(kind: Kind, source: Source | None, payload: Any) -> tuple[Any, ...]:
    """Identity of a row (payloads that are unhashable or mutable count by identity)."""
    known = payload if kind is not Kind.ID_IS else id(payload)
    try:
        hash(known)
    except TypeError:
        known = id(payload)
    return (kind, source, type(payload), repr(known) if isinstance(known, float) else known)


@dataclass(slots=True)
class GuardSet:
    """Rows in the order of capture: a row's source is only evaluated after the rows of its base have held."""

    rows: list[Row] = field(default_factory=list)
    seen: set[Any] = field(default_factory=set)

    def add(self, row: Row) -> None:
        self.require(row.kind, row.source, row.payload, lambda: (row.user_line, row.inside))

    def require(self, kind: Kind, source: Source | None, payload: Any, read_at: Callable[[], tuple[str, str]]) -> None:
        """A row, unless an equal one is there; `read_at`: what made it necessary (`user_line`, `inside`)."""
        key = row_key(kind, source, payload)
        if key not in self.seen:
            self.seen.add(key)
            self.rows.append(Row(kind, source, payload, *read_at()))

    def weaken(self) -> None:
        """Hold objects whose identity is checked, and what may die, weakly from now on: guards that are kept for reports keep no model alive."""
        done: set[int] = set()  # by id: sources whose paths have been walked; most rows share all but the last step
        self.rows = [_weakened(row, done) for row in self.rows]
        self.seen.clear()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def _weakened(row: Row, done: set[int]) -> Row:
    path, obj = row.source, row.payload
    while path is not None and id(path) not in done:
        done.add(id(path))
        if isinstance(path, Held):
            path.weaken()
        path = path.base()
    if isinstance(obj, (Weak, types.ModuleType)) or (row.kind is not Kind.ID_IS and not may_die(obj)):
        return row
    try:
        return replace(row, payload=Weak(obj))
    except TypeError:
        return row
