"""Sources: where a tracked value is found again on the next call.

A source is a path from the frame's real state (a local slot, the value stack, the globals) or from an object that the region holds
(`Held`) to a value. Evaluating a source never runs user code: attributes are read from instance dictionaries or slots, items from
exact built-in containers. `text()` is Python that a person can read; `emit` is what generated region code uses.

    source ::= Local(slot, name) | Stack(index) | Global(name) | Held(name, obj)
             | Cell(source)                 contents of a cell object
             | InstanceDict(source)         obj.__dict__
             | Attr(source, name)           slot / C member / function attribute read without user code
             | Item(source, key)            exact list, tuple, dict (constant key)
             | KeyAt(source, index)         the index-th key of a dict (non-constant keys)
             | Part(source, index)          what a built-in iterator is made of: the list, the iterators inside a zip ...
             | Peek(source, ahead, part)    what a built-in iterator would give after `ahead` more steps; it is not stepped
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Mapping
from typing import Any, TypeVar, dataclass_transform

from magneto.base.dataclass import dataclass

S = TypeVar("S")


class Source:
    """Base of all sources; frozen and hashable. The hash is computed once: paths are deep and are looked up often."""

    __slots__ = ("_hash",)
    _hash: int

    def text(self) -> str:
        raise NotImplementedError

    def base(self) -> Source | None:
        """The source this one is read from, None for a root."""
        return getattr(self, "of", None)


@dataclass_transform(frozen_default=True)
def source(cls: type[S]) -> type[S]:
    """A frozen dataclass with slots whose hash is kept."""
    made = dataclass(frozen=True, slots=True)(cls)
    compute = made.__hash__

    def __hash__(self: Any) -> int:
        try:
            found: int = self._hash
        except AttributeError:
            found = compute(self)
            object.__setattr__(self, "_hash", found)
        return found

    made.__hash__ = __hash__  # type: ignore[assignment]
    return made


@source
class Local(Source):
    """Slot of localsplus (argument, local, cell or free variable; a cell slot yields the cell object, see `Cell`)."""

    slot: int
    name: str

    def text(self) -> str:
        return f"L[{self.name!r}]"


@source
class Stack(Source):
    """Entry of the frame's value stack, counted from the bottom."""

    index: int

    def text(self) -> str:
        return f"S[{self.index}]"


@source
class Global(Source):
    """A name in the frame's globals dictionary (not its builtins: those are `Held` after a KEY_ABSENT row)."""

    name: str

    def text(self) -> str:
        return f"G[{self.name!r}]"


class Held(Source):
    """An object that the region holds: a class, a module's globals, a function. Strongly, but for what may die. Compared by identity."""

    __slots__ = ("_id", "_obj", "_weak", "name")

    def __init__(self, name: str, obj: Any) -> None:
        self.name = name
        self._obj = obj
        self._id = id(obj)
        self._weak = False

    @property
    def obj(self) -> Any:
        """The object; when it is gone, None."""
        return self._obj() if self._weak else self._obj

    def weaken(self) -> None:
        """From now on, keep alive nothing that may die."""
        if not self._weak and may_die(self._obj):
            self._obj, self._weak = weakref.ref(self._obj), True

    def text(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Held({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and other._id == self._id and other.obj is self.obj

    def __hash__(self) -> int:
        return hash((Held, self._id))


def may_die(obj: Any) -> bool:
    """Whether the program may let go of it while the region is there: a class or function made in a function, or a class that its module does not name."""
    cls = type(obj)
    if cls is types.FunctionType or cls is functools._lru_cache_wrapper:
        return "<locals>" in getattr(obj, "__qualname__", "")
    if not issubclass(cls, type) or not obj.__flags__ & _HEAP_TYPE:
        return False
    found: Any = sys.modules.get(namespace_of(obj).get("__module__"))  # type: ignore[arg-type]
    for name in type.__getattribute__(obj, "__qualname__").split("."):
        found = namespace_of(found).get(name) if isinstance(found, type) else getattr(found, "__dict__", _NOTHING).get(name)
    return found is not obj


def namespace_of(cls: type) -> Mapping[str, Any]:
    """`vars(cls)`, past a metaclass that has a `__dict__` of its own."""
    return _NAMESPACE(cls)  # type: ignore[no-any-return]


_NAMESPACE: Any = vars(type)["__dict__"].__get__
_HEAP_TYPE = 1 << 9
_NOTHING: Mapping[str, Any] = {}


@source
class Cell(Source):
    of: Source

    def text(self) -> str:
        return f"{self.of.text()}.cell_contents"


@source
class InstanceDict(Source):
    of: Source

    def text(self) -> str:
        return f"{self.of.text()}.__dict__"


@source
class Attr(Source):
    of: Source
    name: str

    def text(self) -> str:
        return f"{self.of.text()}.{self.name}"


@source
class Item(Source):
    of: Source
    key: Any

    def __eq__(self, other: object) -> bool:
        if type(other) is not Item or other.of != self.of:
            return False
        one, two = self.key, other.key
        if one is two:
            return True
        return not any(hasattr(type(key), "__torch_function__") for key in (one, two)) and bool(one == two)  # tensors compare item by item

    def text(self) -> str:
        key = self.key
        plain = isinstance(key, (str, bytes, int, float, complex, tuple, frozenset, type(None)))
        return f"{self.of.text()}[{repr(key) if plain else f'<{type(key).__name__} at {id(key):#x}>'}]"


@source
class KeyAt(Source):
    of: Source
    index: int

    def text(self) -> str:
        return f"list({self.of.text()})[{self.index}]"


@source
class Part(Source):
    """`_C.iterator_part`: what a built-in iterator, or a mappingproxy, is made of."""

    of: Source
    index: int

    def text(self) -> str:
        return f"part({self.of.text()}, {self.index})"


@source
class Peek(Source):
    """`_C.iterator_peek`: an item that a built-in iterator is about to give. `part` 1, 2: the key or the value alone of a dictionary's item."""

    of: Source
    ahead: int
    part: int = 0

    def text(self) -> str:
        return f"peek({self.of.text()}, {self.ahead}{f', {self.part}' if self.part else ''})"


def root_of(source: Source | None) -> Source | None:
    """Where a path starts."""
    while source is not None and source.base() is not None:
        source = source.base()
    return source


def of_module(path: Source | None) -> bool:
    """Does it lead to a parameter or a buffer of a module?"""
    table = path.base() if path is not None else None
    return isinstance(table, Item) and table.key in ("_parameters", "_buffers")
