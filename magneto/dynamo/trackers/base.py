"""Tracker: what capture knows of one Python value. One subclass per kind of value, one file per kind.

Rules for all trackers:
- `source` is set when the value exists outside the region (frame slot, attribute of such a value ...); values made inside the region have none.
- A tracker is shared by identity: one Python object is one tracker (the machine's `wrap` memoises by id), so aliasing is kept.
- Trackers of mutable containers are mutable; a change to a value with a source is also logged as an Effect and replayed by the generated code, in order.
- A tracker reads the real object only under guards: what was read is guarded (`machine.guard(row)`), what nobody read is not.
- `emit` gives the expression by which generated region code rebuilds the value; the emitter memoises, so identity and cycles are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from magneto.base.dataclass import dataclass
from magneto.dynamo.guards.source import Source
from magneto.dynamo.guards.source import namespace_of as namespace_of

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


@dataclass(frozen=True, slots=True)
class Const:
    """A constant that capture knows completely (`try_const` returns it, or None)."""

    value: Any


class Missing:
    """Type of MISSING: "there is no such object", where None is a possible value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "MISSING"

    def __bool__(self) -> bool:
        return False


MISSING = Missing()


class Signal(Exception):
    """What capture says to itself: it passes through everything that a rule runs."""


class Raised(Signal):
    """The traced program raises `value` (a tracker); `exc` is the real exception where there is one. Only `Machine.raise_exception` raises it."""

    def __init__(self, value: Tracker, exc: BaseException | None = None) -> None:
        super().__init__(value)
        self.value = value
        self.exc = exc

    def matches(self, cls: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
        return issubclass(self.value.python_type(), cls)


class CannotEmit(Signal):
    """A value that cannot be rebuilt outside the region; capture starts again and breaks at the instruction that made it (`tracker.born`)."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(tracker.show())
        self.tracker = tracker


class Tracker:
    """Base class. `obj` is the real object for values that exist outside, else MISSING."""

    __slots__ = ("source",)
    source: Source | None
    shared = True  # False: the machine must not memoise this tracker by the identity of its object (scalars)
    unknown = False  # True: what it is equal to is known only at run time
    obj: Any = MISSING
    exact_type: type | None = None  # where all values of this kind have the same

    def __init__(self, source: Source | None = None) -> None:
        self.source = source

    def python_type(self) -> type:
        """The exact type of the value (the machine has guarded it)."""
        if self.exact_type is None:
            raise NotImplementedError
        return self.exact_type

    def try_const(self) -> Const | None:
        """The value, when it is an immutable constant known completely."""
        return None

    # -- what one kind of value answers by itself; the rows of dispatch ask these

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        """An attribute that this kind of value computes (`Tensor.shape`); None: the ordinary protocol of object.__getattribute__ applies."""
        return None

    def instance_attr(self, m: Machine, name: str) -> Tracker | None:
        """The entry of the instance dictionary, read under guards; None: not there."""
        return None

    def hooked_attr(self, m: Machine, hook: Any, name: str) -> Any:
        """What the class's own __getattr__ `hook` gives, for kinds that know without running it; NotImplemented: run it."""
        return NotImplemented

    def hooked_set(self, m: Machine, hook: Any, name: str, value: Tracker | None) -> bool:
        """Set (None: delete) an attribute in place of the class's own __setattr__ or __delattr__ `hook`; False: run it."""
        return False

    def special_set(self, m: Machine, name: str, value: Tracker | None) -> bool:
        """Set (None: delete) an attribute that this kind of value keeps by itself; False: the ordinary protocol applies."""
        return False

    def rows(self, m: Machine) -> list[Tracker] | None:
        """The items that iterating gives, for kinds that know them; None: its iterator decides."""
        return None

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        """The result of calling the value; None: this kind is not called by itself (its type's __call__ decides)."""
        return None

    def emit(self, em: Emitter) -> str:
        """Expression text in region code. Called through `em.value(tracker)`, which memoises."""
        if self.source is not None:
            return em.source(self.source)
        raise NotImplementedError(type(self).__name__)

    def show(self) -> str:
        """Short text for break reasons and logs."""
        return f"{type(self).__name__}({self.source.text() if self.source else ''})"

    def __repr__(self) -> str:
        return self.show()


class Awaited(Tracker):
    """An existing object that an effect of the region will change in a way that capture does not know: who reaches it waits for that."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def show(self) -> str:
        return self.name


class Later:
    """An item of an existing container that nobody has read yet: wrapped, and so guarded, on the first read."""

    __slots__ = ("obj", "source")

    def __init__(self, obj: Any, source: Source) -> None:
        self.obj = obj
        self.source = source

    def read(self, m: Machine) -> Tracker:
        return m.wrap(self.obj, self.source)


Entry = Tracker | Later
"""What containers hold."""


def read(m: Machine, entry: Entry) -> Tracker:
    """The tracker of a container's entry."""
    return entry.read(m) if type(entry) is Later else entry  # type: ignore[return-value]
