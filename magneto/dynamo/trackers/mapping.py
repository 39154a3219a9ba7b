"""Dictionaries and sets as values. Keys are found by tokens that hash and compare as the keys themselves do."""

from __future__ import annotations

import collections
import operator
import types
import weakref
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

from magneto import _C
from magneto.dynamo.bytecode.decode import decode
from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held, InstanceDict, Item, KeyAt, Source
from magneto.dynamo.trackers.base import MISSING, Const, Entry, Later, Tracker, read
from magneto.dynamo.trackers.constant import ConstTracker, is_constant
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.keys import Identity, Referent, hashes_by_identity, hashes_by_value, object_token, real_key

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


def _writes(method: Any) -> bool:
    """Whether the method changes something: it must run as often as CPython runs it, and a dictionary that leaves the region hashes its keys again."""
    return isinstance(method, types.FunctionType) and any(instruction.op in _WRITES for instruction in decode(method.__code__).instructions)


_WRITES = frozenset(["STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_SUBSCR"])


def equal_keys(m: Machine, a: Tracker, b: Tracker) -> bool:
    """`a == b`, asked by an operation on a container. Where the program changes one while it answers, CPython must do the whole operation."""
    changes = m.changes
    answer = m.truth(m.apply(operator.eq, a, b))
    if m.changes != changes:
        m.restart_before("==", "it changes a container while another operation compares its items")
    return answer


class ByProgram:
    """Token of a key that hashes and compares by methods of the program."""

    __slots__ = ("hash", "m", "of")

    def __init__(self, m: Machine, of: Tracker) -> None:
        self.m, self.of = m, of
        cls = of.python_type()
        if any(_writes(getattr(cls, name)) for name in ("__hash__", "__eq__")):
            m.graph_break("B104", operation="use as a dictionary key, by methods that write,", value=of.show())
        hashes = m.hashed_now()  # type: ignore[attr-defined]
        const = hashes.get(of)
        if const is None:
            const = hashes[of] = m.apply(hash, of).try_const()
        if const is None:
            m.graph_break("B104", operation="use as a dictionary key", value=of.show())
        self.hash: int = const.value

    def __eq__(self, other: object) -> bool:
        if type(other) is ByProgram:
            return other.of is self.of or equal_keys(self.m, self.of, other.of)
        if is_constant(other):
            return equal_keys(self.m, self.of, ConstTracker(other))
        self.m.graph_break("B104", operation="use as a dictionary key", value=self.of.show())

    def __hash__(self) -> int:
        return self.hash


def by_program(token: Hashable) -> bool:
    """Whether a look-up of the token may run code of the program."""
    if type(token) is Referent:
        return by_program(token.of)
    return type(token) is ByProgram or (type(token) is tuple and any(map(by_program, token)))


def key_token(m: Machine, key: Tracker) -> Hashable:
    """Token of a tracked key; unhashable keys raise the program's TypeError, keys with hash functions in Python break."""
    const = key.try_const()
    if const is not None:
        try:
            hash(const.value)
        except TypeError as error:
            m.raise_exception(error)
        token: Hashable = const.value
        return token
    cls = key.python_type()
    if key.unknown and cls.__hash__ is not None:
        m.graph_break("B104", operation="hash()", value=key.show())
    if cls is int:  # id() of a tracked value
        return ("id", Identity(key.of))  # type: ignore[attr-defined]
    if isinstance(key, TupleTracker):
        return tuple(key_token(m, item) for item in key.items(m))
    if cls.__hash__ is None:
        m.raise_exception(TypeError(f"unhashable type: '{_C.type_name(cls)}'"))
    if isinstance(cls.__hash__, types.FunctionType) and not hasattr(cls, "__torch_function__") and not issubclass(type(key.obj), type):
        return ByProgram(m, key)
    payload = getattr(key, "payload", None)
    if payload is not None:
        return key_token(m, payload)
    if isinstance(key, SetTracker):
        return ByProgram(m, key)
    referent = getattr(key, "referent", None)
    if referent is not None:  # weak references compare as what they refer to
        return Referent(key_token(m, referent))
    if type(key.obj) is weakref.ReferenceType:
        return object_token(key.obj)
    if hashes_by_identity(cls) or issubclass(type(key.obj), type):
        m.particulars += not isinstance(key.obj, (type, types.FunctionType, types.BuiltinFunctionType))
        return Identity(key.obj if key.obj is not MISSING else key)
    if key.obj is not MISSING and hashes_by_value(type(key.obj)):
        return object_token(key.obj)
    m.graph_break("B104", operation="use as a dictionary key", value=key.show())


def pinned(m: Machine, key: Tracker) -> Tracker:
    """A key for a look-up among existing keys, which relies on which object it is: a row for each part that exists outside and hashes by identity."""
    if isinstance(key, TupleTracker):
        return TupleTracker([pinned(m, item) for item in key.items(m)], key.cls) if key.cls is tuple else key
    referent = getattr(key, "referent", None)
    if isinstance(referent, Tracker):
        pinned(m, referent)
        return key
    of = getattr(key, "of", None) if not key.unknown and key.python_type() is int else None
    if isinstance(of, Tracker):  # id() of a tracked value
        return ConstTracker(id(pinned(m, of).obj)) if of.obj is not MISSING else key
    if key.source is not None and not isinstance(key, ConstTracker) and not isinstance(key.source, Held) and key.obj is not MISSING:
        m.guard(Kind.ID_IS, key.source, key.obj)
    return key


def told_apart(m: Machine, key: Tracker) -> Tracker:
    """A key of what is made in the region: existing objects that hash by identity must go on to be different ones."""
    if isinstance(key, TupleTracker):
        for item in key.items(m):
            told_apart(m, item)
        return key
    numbered = getattr(key, "of", None) if not key.unknown and key.python_type() is int else None  # what id() was asked of
    found = numbered if isinstance(numbered, Tracker) else getattr(key, "referent", None) or key
    if found.source is not None and not isinstance(found, ConstTracker):
        if found is numbered or (found.obj is not MISSING and hashes_by_identity(found.python_type())):
            m.keys_by_identity[found] = None  # type: ignore[attr-defined]
    return key


def raw_items(obj: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The items in iteration order, past overrides of a subclass."""
    if isinstance(obj, collections.OrderedDict):
        return list(collections.OrderedDict.items(obj))
    return list(dict.items(obj))


class Contents(Tracker):
    """A container, or what is `inside` an instance of a derived class. (No reference to itself: what it holds shall not wait for a collection of garbage.)"""

    __slots__ = ("inside",)
    inside: Tracker | None

    @property
    def owner(self) -> Tracker:
        """What the program knows it by."""
        return self if self.inside is None else self.inside

    @owner.setter
    def owner(self, instance: Tracker) -> None:
        self.inside = instance


class DictTracker(Contents):
    """dict, OrderedDict, defaultdict, and the dictionary inside an instance of a subclass (`owner`: the instance, operand of its effects)."""

    __slots__ = ("_asks", "_listed", "_machine", "_whole", "attrs", "cls", "default_factory", "entries", "obj", "removals")

    def __init__(
        self, entries: dict[Hashable, tuple[Entry, Entry]] | None = None, cls: type = dict, source: Source | None = None, obj: Any = MISSING,
        machine: Machine | None = None,
    ) -> None:  # fmt: skip
        super().__init__(source)
        self.inside = None
        self.entries: dict[Hashable, tuple[Entry, Entry]] = entries if entries is not None else {}
        self.cls = cls
        self.obj = obj
        self.default_factory: Tracker | None = None
        self.attrs: DictTracker | None = None  # attributes of an OrderedDict
        self.removals = 0  # how often keys were removed or moved
        self._machine = machine
        self._asks: bool | None = None
        self._listed = machine is None  # whether the row for the whole key list is there
        self._whole = True  # False: `entries` holds only what was read of `obj`

    @classmethod
    def existing(cls, obj: dict[Any, Any], source: Source, m: Machine, kind: type) -> DictTracker:
        """Tracker of a real dictionary, nothing read yet: entries are made when the dictionary is listed or changed."""
        built = cls(None, kind, source, obj, m)
        built._whole = False
        return built

    def materialise(self) -> None:
        """Make entries for all keys (no guard by itself)."""
        if self._whole:
            return
        self._whole = True
        source = self.source
        assert source is not None
        read_before, self.entries = self.entries, {}
        for index, (key, value) in enumerate(self._real_items()):
            token = object_token(key)
            if token in read_before:
                self.entries[token] = read_before[token]
            elif is_constant(key):
                self.entries[token] = (ConstTracker(key), Later(value, Item(source, key)))
            else:
                self.entries[token] = (Later(key, KeyAt(source, index)), Later(value, Item(source, key)))

    def _real_items(self) -> list[tuple[Any, Any]]:
        try:
            return raw_items(self.obj)
        except KeyError:
            assert self._machine is not None
            self._machine.graph_break(
                "B104", operation="a look", value=f"{self.show()}, an OrderedDict which methods of dict have changed,"
            )

    @classmethod
    def of(cls, m: Machine, pairs: Iterable[tuple[Any, Tracker]], kind: type = dict) -> DictTracker:
        """A dictionary made inside the region; keys are constants or trackers."""
        built = cls(None, kind)
        for key, value in pairs:
            v_key = key if isinstance(key, Tracker) else ConstTracker(key)
            built.entries[built.token(m, v_key)] = (v_key, value)
        return built

    def python_type(self) -> type:
        return self.cls

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name == "__dict__" and self.cls is collections.OrderedDict:
            return self.namespace()
        return self.default_factory if name == "default_factory" else None

    def namespace(self) -> DictTracker | None:
        """Attributes: an OrderedDict has some (`state_dict()._metadata`)."""
        if self.attrs is None and self.cls is collections.OrderedDict and self.owner is self:
            known = self._machine is not None and self.source is not None
            self.attrs = DictTracker.existing(vars(self.obj), InstanceDict(self.source), self._machine, dict) if known else DictTracker()  # type: ignore[arg-type]
        return self.attrs

    def instance_attr(self, m: Machine, name: str) -> Tracker | None:
        namespace = self.namespace()
        return None if namespace is None else namespace.get_token(m, name)

    def special_set(self, m: Machine, name: str, value: Tracker | None) -> bool:
        namespace = self.namespace()
        if namespace is None or value is None or hasattr(self.cls, name) or not name.isidentifier():
            return False
        namespace.put_silently(m, ConstTracker(name), value)
        if self.source is not None:
            m.effect(f"{{0}}.{name} = {{1}}", self, value)
        return True

    def listed(self) -> None:
        """Somebody learnt all keys (or how many, or their order)."""
        self.materialise()
        if self._listed:
            return
        self._listed = True
        m, source = self._machine, self.source or self.owner.source
        assert m is not None
        keys = [key for key, _ in self._real_items()]
        if all(is_constant(key) for key in keys):
            m.guard(Kind.KEYS, source, tuple(keys))
            return
        m.guard(Kind.LENGTH, source, len(keys))
        for index, key in enumerate(keys):
            assert source is not None
            if is_constant(key):
                m.guard(Kind.EQUALS, KeyAt(source, index), key)
            else:
                m.guard(Kind.ID_IS, KeyAt(source, index), key)

    def length(self) -> int:
        self.listed()
        return len(self.entries)

    def get(self, m: Machine, key: Tracker) -> Tracker | None:
        """The value of a key, None when it is absent (guarded)."""
        return self.get_token(m, self.token(m, key), key)

    def get_token(self, m: Machine, token: Hashable, key: Tracker | None = None) -> Tracker | None:
        self._searchable(m, token)
        found = self.entries.get(token)
        if found is None and not self._whole:
            real = real_key(token)
            if dict.__contains__(self.obj, real):
                assert self.source is not None
                value = m.wrap(dict.__getitem__(self.obj, real), Item(self.source, real))
                self.entries[token] = (key if key is not None else ConstTracker(real), value)
                return value
        if found is None:
            self._absent(m, token, key)
            return None
        key_entry, entry = found
        if type(entry) is Later:
            entry = entry.read(m)
            self.entries[token] = (key_entry, entry)
        return entry  # type: ignore[return-value]

    def _searchable(self, m: Machine, token: Hashable) -> None:
        """A key with methods of the program is found in dictionaries made inside the region only; and so is what it may be equal to."""
        if self.obj is MISSING:
            return
        if by_program(token) or (type(token) is not Identity and self.asks_program()):
            m.graph_break("B104", operation="look-up by methods of the program", value=self.show())

    def asks_program(self) -> bool:
        """Whether an existing dictionary has keys whose `==` is a function of the program."""
        if self._asks is None:
            kinds = {type(key) for key, _ in raw_items(self.obj)} if isinstance(self.obj, dict) else set()  # (a class has names)
            self._asks = any(isinstance(kind.__eq__, types.FunctionType) and not hasattr(kind, "__torch_function__") for kind in kinds)
        return self._asks

    def token(self, m: Machine, key: Tracker) -> Hashable:
        """The key's token, for a look-up here."""
        return key_token(m, told_apart(m, key) if self.obj is MISSING else pinned(m, key))

    def _absent(self, m: Machine, token: Hashable, key: Tracker | None) -> None:
        if self._listed or self.obj is MISSING:
            return
        real = real_key(token)
        if real is MISSING:
            self.listed()
            return
        if dict.__contains__(self.obj, real):
            return  # present at the start, removed inside the region
        m.guard(Kind.KEY_ABSENT, self.source or self.owner.source, real)

    def has(self, m: Machine, key: Tracker) -> bool:
        """Whether a key is there; its value is not read."""
        token = self.token(m, key)
        self._searchable(m, token)
        if token in self.entries:
            entry = self.entries[token][1]
            if type(entry) is Later and not self._listed:
                m.guard(Kind.PRESENT, entry.source, None)
            return True
        if not self._whole and dict.__contains__(self.obj, real := real_key(token)):
            assert self.source is not None
            m.guard(Kind.PRESENT, Item(self.source, real), None)
            return True
        self._absent(m, token, key)
        return False

    def keys(self, m: Machine) -> list[Tracker]:
        self.listed()
        return [read(m, key) for key, _ in self.entries.values()]

    def values(self, m: Machine) -> list[Tracker]:
        self.listed()
        for token in list(self.entries):
            self.get_token(m, token)
        return [entry for _, entry in self.entries.values()]  # type: ignore[misc]

    def pairs(self, m: Machine) -> list[tuple[Tracker, Tracker]]:
        return list(zip(self.keys(m), self.values(m), strict=True))

    # -- changes (with effects)

    def logged(self) -> bool:
        """Whether changes must be replayed: the dictionary exists outside."""
        return self.source is not None or self.owner.source is not None

    def put(self, m: Machine, key: Tracker, value: Tracker) -> None:
        self._keep_order_of_finalisers(m, key)
        m.changes += 1
        self.put_silently(m, key, value)
        if self.logged():
            self._effect(m, "{0}[{1}] = {2}", "{3}.__setitem__({0}, {1}, {2})", key, value)

    def _keep_order_of_finalisers(self, m: Machine, key: Tracker) -> None:
        """A value that may die here with a finaliser of its own must die now, not when the effects are replayed."""
        found = self.entries.get(self.token(m, key))
        if found is not None and isinstance(found[1], ConstTracker):
            return
        old = found[1].obj if found is not None else MISSING if self._whole else dict.get(self.obj, real_key(self.token(m, key)), MISSING)
        if old is not MISSING and hasattr(type(old), "__del__"):
            m.graph_break("B107", value=self.show(), reason="it drops an object that has a finaliser")

    def put_silently(self, m: Machine, key: Tracker, value: Tracker) -> None:
        """Set an entry whose effect the caller logs."""
        self.materialise()
        token = self.token(m, key)
        self._searchable(m, token)
        old = self.entries.get(token)
        self.entries[token] = (old[0] if old is not None else key, value)

    def remove(self, m: Machine, key: Tracker) -> None:
        """Remove a key that is present."""
        self._remove_silently(m, key)
        if self.logged():
            self._effect(m, "del {0}[{1}]", "{2}.__delitem__({0}, {1})", key)

    def _remove_silently(self, m: Machine, key: Tracker) -> None:
        self._keep_order_of_finalisers(m, key)
        self.materialise()
        del self.entries[self.token(m, key)]
        self.removals += 1
        m.changes += 1

    def remove_end(self, m: Machine, key: Tracker, last: bool) -> None:
        """popitem, of the last key or the first."""
        self._remove_silently(m, key)
        if self.logged():
            arguments = "" if last else "last=False"
            self._effect(m, f"{{0}}.popitem({arguments})", f"{{1}}.popitem({{0}}{arguments and ', ' + arguments})")

    def clear(self, m: Machine) -> None:
        self.listed()
        self.entries.clear()
        self.removals += 1
        m.changes += 1
        if self.logged():
            self._effect(m, "{0}.clear()", "{1}.clear({0})")

    def reorder(self, m: Machine, key: Tracker, last: bool) -> None:
        """OrderedDict.move_to_end."""
        self.listed()
        token = self.token(m, key)
        pair = self.entries.pop(token)
        self.removals += 1
        if last:
            self.entries[token] = pair
        else:
            rest = list(self.entries.items())
            self.entries.clear()
            self.entries.update([(token, pair), *rest])
        if self.logged():
            self._effect(m, f"{{0}}.move_to_end({{1}}, {last})", f"{{2}}.move_to_end({{0}}, {{1}}, {last})", key)

    def _effect(self, m: Machine, plain: str, unbound: str, *operands: Tracker) -> None:
        if self.owner is self:
            m.effect(plain, self, *operands)
        else:
            m.effect(unbound, self.owner, *operands, m.wrap(self.cls, Held(self.cls.__name__, self.cls)))

    # -- leaving

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        if self.cls is dict:
            name = em.assign("d", "{}", self)
        elif self.cls is collections.defaultdict:
            factory = em.value(self.default_factory) if self.default_factory is not None else "None"
            name = em.assign("d", f"{em.const(self.cls, 'defaultdict')}({factory})", self)
        else:
            name = em.assign("d", f"{em.const(self.cls, self.cls.__name__)}()", self)
        self.fill(em, name)
        if self.attrs is not None:
            self.attrs.fill(em, f"vars({name})")
        return name

    def fill(self, em: Emitter, name: str, setitem: str | None = None) -> None:
        """Statements that put the entries into the empty dictionary `name` (through the unbound method `setitem` for subclasses)."""
        for key, value in self.entries.values():
            k = em.source(key.source) if isinstance(key, Later) else em.value(key)
            v = em.source(value.source) if isinstance(value, Later) else em.value(value)
            em.line(f"{name}[{k}] = {v}" if setitem is None else f"{setitem}({name}, {k}, {v})")

    def show(self) -> str:
        return f"{self.cls.__name__}[{len(self.entries)}]({self.source.text() if self.source else ''})"


class DictViewTracker(Tracker):
    """dict.keys(), .values(), .items(): alive views."""

    __slots__ = ("kind", "of")

    def __init__(self, of: DictTracker, kind: str) -> None:
        super().__init__()
        self.of = of
        self.kind = kind

    def python_type(self) -> type:
        real: dict[Any, Any] = collections.OrderedDict() if issubclass(self.of.owner.python_type(), collections.OrderedDict) else {}
        return type(getattr(real, self.kind)())

    def items(self, m: Machine) -> list[Tracker]:
        if self.kind == "keys":
            return self.of.keys(m)
        if self.kind == "values":
            return self.of.values(m)
        return [TupleTracker(pair) for pair in self.of.pairs(m)]

    def emit(self, em: Emitter) -> str:
        return em.assign("view", f"{em.value(self.of.owner)}.{self.kind}()")


class SetTracker(Contents):
    """set or frozenset (`cls`) of hashable values. An existing set is guarded as a whole, in its order of iteration.

    `real` is a set with the same hash table, made by the same operations in the same order: only it knows the order of iteration. None where an element hashes by its address.
    """

    __slots__ = ("_machine", "cls", "entries", "obj", "real")

    def __init__(
        self, entries: dict[Hashable, Tracker] | None = None, cls: type = set, source: Source | None = None, obj: Any = MISSING,
        machine: Machine | None = None,
    ) -> None:  # fmt: skip
        super().__init__(source)
        self.inside = None
        self.entries: dict[Hashable, Tracker] = entries if entries is not None else {}
        self.cls = cls
        self.obj = obj
        self.real: set[Any] | frozenset[Any] | None = obj if obj is not MISSING else cls() if not self.entries else None
        self._machine = machine

    @classmethod
    def of(cls, m: Machine, items: Iterable[Tracker], kind: type = set) -> SetTracker:
        """A set made by adding the items one by one."""
        built = cls(None, set)
        for item in items:
            built.insert(m, item)
        built.cls = kind
        if built.real is not None and kind is frozenset:
            values = [const.value for item in built.entries.values() if (const := item.try_const()) is not None]
            built.real = frozenset(values)
        return built

    def python_type(self) -> type:
        return self.cls

    def token(self, m: Machine, item: Tracker) -> Hashable:
        """The element's token, for a look-up here."""
        return key_token(m, told_apart(m, item) if self.obj is MISSING else pinned(m, item))

    def known(self) -> None:
        """Somebody looked inside."""
        if self._machine is not None:
            m, self._machine = self._machine, None
            m.guard(Kind.KEYS, self.source or self.owner.source, tuple(self.cls.__iter__(self.obj)))  # type: ignore[attr-defined]

    def items(self, m: Machine) -> list[Tracker]:
        """The elements in their order of iteration."""
        self.known()
        if len(self.entries) < 2:
            return list(self.entries.values())
        if self.real is None:
            m.graph_break("B104", operation="iteration in the order of addresses", value=self.show())
        return [self.entries[object_token(value)] for value in self.cls.__iter__(self.real)]  # type: ignore[attr-defined]

    def insert(self, m: Machine, item: Tracker) -> None:
        """set.add, not logged."""
        self.known()
        token = self.token(m, item)
        self.entries.setdefault(token, item)
        real = self.own()
        if real is not None:
            const = item.try_const()
            if const is None:
                self.real = None
            else:
                real.add(const.value)

    def drop(self, m: Machine, item: Tracker) -> None:
        """Remove an element that is there, not logged."""
        del self.entries[self.token(m, item)]
        real, const = self.own(), item.try_const()
        if real is not None and const is not None:
            real.discard(const.value)

    def own(self) -> set[Any] | None:
        """The set that changes are made to; a copy of an existing one may have another order."""
        if self.obj is not MISSING and self.real is self.obj:
            self.real = None
        return self.real  # type: ignore[return-value]

    def length(self) -> int:
        self.known()
        return len(self.entries)

    def has(self, m: Machine, item: Tracker) -> bool:
        self.known()
        return self.token(m, item) in self.entries

    def logged(self) -> bool:
        """Whether changes must be replayed: the set exists outside."""
        return self.source is not None or self.owner.source is not None

    def effect(self, m: Machine, method: str, *operands: Tracker) -> None:
        """Log the call of a method of set."""
        m.changes += 1
        if self.logged():
            places = "".join(f", {{{i}}}" for i in range(1, len(operands) + 1))
            m.effect(f"set.{method}({{0}}{places})", self.owner, *operands)

    def try_const(self) -> Const | None:
        if self.cls is not frozenset:
            return None
        consts = [item.try_const() for item in self.entries.values()]
        if any(const is None for const in consts):
            return None
        self.known()
        return Const(self.real if self.real is not None else frozenset(const.value for const in consts if const is not None))

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        if self.cls is frozenset:
            items = ", ".join(em.value(item) for item in self.entries.values())
            return em.assign("s", f"frozenset(({items}{',' if items else ''}))")
        name = em.assign("s", "set()", self)
        self.fill(em, name)
        return name

    def fill(self, em: Emitter, name: str) -> None:
        """Statements that put the elements into the empty set `name`."""
        if self.real is not None and len(self.entries) > 1:
            em.line(f"set.update({name}, {em.const(self.real, 'elements')})")  # a merge into an empty set keeps the order
        elif self.entries:
            em.line(f"set.update({name}, ({', '.join(em.value(item) for item in self.entries.values())},))")

    def show(self) -> str:
        return f"{self.cls.__name__}[{len(self.entries)}]({self.source.text() if self.source else ''})"
