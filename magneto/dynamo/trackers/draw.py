"""Random numbers of Python and numpy: `random`, `numpy.random`, and their generator objects. Eager's streams are kept.

A generator that the region has seeded or made is known: a copy of it draws while the program is traced, the numbers are constants, and the region leaves the
generator in the state that it then has. From any other generator the region draws at each call, in the program's order and before its graph runs
(`Machine.draws`); if the graph fails, the generators are put back and CPython runs the frame.
"""

from __future__ import annotations

import copy
import operator
import random
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held, Source
from magneto.dynamo.trackers.array import ArrayTracker, numpy_module, numpy_random, track
from magneto.dynamo.trackers.base import MISSING, Const, Tracker
from magneto.dynamo.trackers.build import FUNCTION_BUILDERS
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import ListTracker, SequenceTracker
from magneto.dynamo.trackers.dispatch import FALLBACKS
from magneto.dynamo.trackers.function import BuiltinTracker, FunctionTracker
from magneto.dynamo.trackers.host import HostNumber, is_numpy
from magneto.dynamo.trackers.object import OpaqueTracker
from magneto.dynamo.trackers.plain import plain
from magneto.dynamo.trackers.tensor import MadeInput

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

_STATE = frozenset("seed getstate setstate get_state set_state spawn bit_generator".split())
_BY_POSITION = frozenset("choice shuffle sample choices".split())
_PYTHON = {name: fn for base in reversed(random.Random.__mro__[:-1]) for name, fn in vars(base).items() if not name.startswith("_")}
PYTHON_METHODS = {fn: name for name, fn in _PYTHON.items() if isinstance(fn, (types.FunctionType, types.MethodDescriptorType))}
"""Methods of random.Random, those written in Python included."""


def generator_kinds() -> tuple[type, ...]:
    of_numpy = numpy_random()
    return (random.Random,) if of_numpy is None else (random.Random, of_numpy.RandomState, of_numpy.Generator)


class RandomTracker(OpaqueTracker):
    """A generator made in the region with a seed."""

    __slots__ = ()

    def __init__(self, obj: Any, m: Machine) -> None:
        super().__init__(obj, None, m)  # type: ignore[arg-type]

    def emit(self, em: Emitter) -> str:
        return em.assign("generator", f"{em.const(copy.deepcopy, 'deepcopy')}({em.const(self.obj, 'generator')})", self)

    def instance_attr(self, m: Machine, name: str) -> Tracker | None:
        return None


class StateTracker(Tracker):
    """The state that a seeded generator has at the region's end."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.of = of

    def emit(self, em: Emitter) -> str:
        return em.const(state_of(self.of), "state")


def state_of(generator: Any) -> Any:
    """What `put_back` takes."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state(legacy=False)


def put_back(generator: Any, state: Any) -> None:
    """Region code calls this."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


class HostCall(Tracker):
    """One call at run time, before the graph: `template` over `operands`. `example`: what it might give; `owners`: generators whose state it changes."""

    __slots__ = ("example", "operands", "owners", "template")

    def __init__(self, template: str, operands: Sequence[Tracker], example: Any, owners: Sequence[Tracker] = ()) -> None:
        super().__init__()
        self.template, self.operands, self.example, self.owners = template, tuple(operands), example, tuple(owners)

    def emit(self, em: Emitter) -> str:
        return em.early(self.template.format(*[em.value(operand) for operand in self.operands]), "drawn")

    def show(self) -> str:
        return self.template.format(*[operand.show() for operand in self.operands])


def host_calls_allowed(m: Machine) -> bool:
    """Not in a body that may run several times."""
    return not hasattr(m.recorder, "around")  # type: ignore[attr-defined]


class Draw(HostCall):
    """One call of a generator's method. `example`: what a copy of the generator gives."""

    __slots__ = ("args", "kwargs", "method", "owner")

    def __init__(self, owner: Tracker, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], example: Any) -> None:
        super().__init__("", (), example, (owner,))
        self.owner, self.method, self.args, self.kwargs = owner, method, tuple(args), dict(kwargs)

    def emit(self, em: Emitter) -> str:
        texts = [em.const(arg.value, "argument") if isinstance(arg, Const) else em.value(arg) for arg in self.args]
        texts += [f"{name}={em.const(arg.value) if isinstance(arg, Const) else em.value(arg)}" for name, arg in self.kwargs.items()]
        text = f"{em.value(self.owner)}.{self.method}({', '.join(texts)})"
        numpy = numpy_module()
        if numpy is not None and type(self.example) is numpy.ndarray:
            layout = (self.example.dtype, self.example.shape, self.example.strides)
            text = f"{em.const(laid_out, 'laid_out')}({text}, {em.const(layout, 'layout')})"
        return em.early(text, "drawn")

    def show(self) -> str:
        return f"a draw by {self.method}"


def laid_out(array: Any, layout: Any) -> Any:
    """An array that has been drawn, if it is laid out as the one at capture."""
    if (array.dtype, array.shape, array.strides) != layout:
        raise TypeError("random numbers of another shape")
    return array


class DrawnInput(MadeInput):
    """The memory of an array that the region has drawn."""

    __slots__ = ("draw",)

    def __init__(self, draw: Draw) -> None:
        super().__init__(torch.from_numpy(draw.example), "drawn")
        self.draw = draw

    def graph_input(self, em: Emitter) -> str:
        return f"{em.const(torch.from_numpy, 'from_numpy')}({em.value(self.draw)})"


class DrawnArray(ArrayTracker):
    """An array that the region has drawn: until the graph writes it, its numbers can be asked before the graph runs."""

    __slots__ = ()

    def emit(self, em: Emitter) -> str:
        assert isinstance(self._tensor, DrawnInput)
        return em.value(self._tensor.draw)

    def picks_one(self, key: Tracker) -> TypeGuard[ConstTracker]:
        """Whether indexing with the key gives a number."""
        if not isinstance(key, ConstTracker) or type(key.read()) not in (int, tuple):
            return False
        places = key.value if type(key.value) is tuple else (key.value,)
        return len(places) == len(self.shape()) and all(type(place) is int for place in places)

    def asked(self, m: Machine, compute: Callable[[Any], Any], template: str) -> Any:
        """`.item()`, `.tolist()` ... as host numbers."""
        tensor = self._tensor
        assert isinstance(tensor, DrawnInput)
        if m.has_written(tensor):
            return NotImplemented
        try:
            return _host(m, compute(tensor.draw.example), template, tensor.draw)
        except Exception as error:
            m.raise_exception(error)


def _host(m: Machine, example: Any, template: str, of: Tracker) -> Any:
    """Host numbers, in lists as the example has them."""
    if type(example) is list:
        return ListTracker([_host(m, item, f"{template}[{index}]", of) for index, item in enumerate(example)])
    return HostNumber(example, template, [of])


# -- calls


class _Unplain(Exception):
    """An argument that is no constant."""


def _argument(m: Machine, v: Tracker) -> Any:
    """Const with a copy of the value; or the host number, or the existing array, itself."""
    if isinstance(v, HostNumber):
        return v
    if isinstance(v, ArrayTracker) and v.real is not None:
        return Const(v.real.copy())
    if isinstance(v, ArrayTracker) and v.source is not None and v.obj is not MISSING and not m.recorder.mutated:  # type: ignore[attr-defined]
        return v
    const = plain(m, v)
    if const is None:
        raise _Unplain
    return const


def call_generator(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Fallback of dispatch: methods of generators, and numpy.random.seed."""
    of_numpy = numpy_random()
    if of_numpy is not None and fn is of_numpy.seed:
        owner = of_numpy.mtrand._rand
        return call_generator(m, type(owner).seed, [m.const(owner), *args], kwargs)
    if of_numpy is not None and fn is of_numpy.default_rng:
        return made(m, fn, args, kwargs)
    if not args or not isinstance(args[0], OpaqueTracker) or type(args[0].obj) not in generator_kinds():
        if isinstance(fn, types.FunctionType) and fn in PYTHON_METHODS:  # of a subclass
            return m.inline(FunctionTracker.existing(m, fn, Held(fn.__name__, fn)), args, kwargs)
        return NotImplemented
    owner, cls = args[0], type(args[0].obj)
    name = PYTHON_METHODS.get(fn) if cls is random.Random else getattr(fn, "__name__", "")
    if name is None or getattr(cls, name, None) is not fn or name.startswith("_"):
        return NotImplemented
    if not host_calls_allowed(m):
        return NotImplemented
    if name == "seed":
        return _seed(m, owner, args[1:], kwargs)
    if name in _STATE:
        return NotImplemented
    known = _known(m, owner)
    if known is not None and name in _BY_POSITION and cls is random.Random:
        return _by_position(m, known, name, args[1:], kwargs)
    try:
        given = [_argument(m, arg) for arg in args[1:]]
        named = {key: _argument(m, value) for key, value in kwargs.items()}
    except _Unplain:
        return NotImplemented
    if known is not None:
        return _draw_now(m, known, name, args[1:], given, named)
    return _draw_later(m, owner, name, given, named)


FALLBACKS.insert(0, call_generator)


def _known(m: Machine, owner: OpaqueTracker) -> Any:
    """The copy of a generator whose state is known."""
    return owner.obj if isinstance(owner, RandomTracker) else m.streams.get(id(owner.obj))  # type: ignore[attr-defined]


def _seed(m: Machine, owner: OpaqueTracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    consts = [plain(m, arg) for arg in args]
    if kwargs or not consts or any(const is None or const.value is None for const in consts):
        return NotImplemented  # a seed from the operating system
    known = _known(m, owner)
    if known is None:
        known = copy.deepcopy(owner.obj)
    try:
        known.seed(*[const.value for const in consts if const is not None])
    except Exception as error:
        m.raise_exception(error)
    if not isinstance(owner, RandomTracker) and m.streams.get(id(owner.obj)) is None:  # type: ignore[attr-defined]
        m.streams[id(owner.obj)] = known  # type: ignore[attr-defined]
        m.effect("put_back({0}, {1})", owner, StateTracker(known))
    return None


def _draw_now(m: Machine, known: Any, name: str, args: Sequence[Tracker], given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Numbers of a generator whose state is known."""
    if not all(isinstance(arg, Const) for arg in (*given, *named.values())):
        return NotImplemented
    values = [arg.value for arg in given]
    if name == "shuffle":
        target = args[0] if args else None
        if not isinstance(target, ArrayTracker) or target.source is not None or target.real is None:
            return NotImplemented
        values[0] = target.real
    before = state_of(known)
    try:
        value = getattr(known, name)(*values, **{key: arg.value for key, arg in named.items()})
    except Exception as error:
        m.raise_exception(error)
    found = None if value is None else track(m, value)
    if found is NotImplemented:
        put_back(known, before)
    return found


def _by_position(m: Machine, known: random.Random, name: str, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Choices among any objects: the positions are drawn."""
    if not args or plain(m, args[0]) is None and not isinstance(args[0], SequenceTracker):
        return NotImplemented
    items, rest = m.iterate(args[0]), [plain(m, arg) for arg in args[1:]]
    named = {key: plain(m, value) for key, value in kwargs.items()}
    if any(const is None for const in (*rest, *named.values())):
        return NotImplemented
    plain_rest = [const.value for const in rest if const is not None]
    plain_named = {key: const.value for key, const in named.items() if const is not None}
    positions: Any = list(range(len(items)))
    try:
        found = getattr(known, name)(positions, *plain_rest, **plain_named)
    except Exception as error:
        m.raise_exception(error)
    if name == "shuffle":
        for to, position in enumerate(positions):
            m.apply(operator.setitem, args[0], m.const(to), items[position])
        return None
    return items[found] if name == "choice" else ListTracker([items[position] for position in found])


def _draw_later(m: Machine, owner: OpaqueTracker, name: str, given: list[Any], named: dict[str, Any]) -> Any:
    """Numbers that the region draws at each call."""
    if name == "shuffle":
        return NotImplemented
    trial = copy.deepcopy(owner.obj)
    hosted = any(isinstance(arg, HostNumber) for arg in (*given, *named.values()))

    def example(arg: Any) -> Any:
        return arg.example if isinstance(arg, HostNumber) else copy.deepcopy(arg.value if isinstance(arg, Const) else arg.obj)

    try:
        value = getattr(trial, name)(*map(example, given), **{key: example(arg) for key, arg in named.items()})
    except Exception as error:
        if hosted:
            return NotImplemented
        m.raise_exception(error)
    numpy = numpy_module()
    draw = Draw(owner, name, given, named, value)
    result: Any = NotImplemented
    if type(value) in (int, float, bool) or is_numpy(value):
        result = HostNumber(value, "{}", [draw])
    elif type(value) is list and value and not hosted and all(type(item) in (int, float) for item in value):
        result = ListTracker([HostNumber(item, f"{{}}[{index}]", [draw]) for index, item in enumerate(value)])
    elif numpy is not None and type(value) is numpy.ndarray and not hosted:
        try:
            result = DrawnArray(DrawnInput(draw))
        except TypeError:
            return NotImplemented
    if result is not NotImplemented:
        m.draws.append(draw)  # type: ignore[attr-defined]
    return result


def wrap_method_of_random(m: Machine, obj: types.FunctionType, source: Source) -> Tracker | None:
    """Methods of random.Random that are written in Python are not followed: they look at the bits they draw."""
    if obj not in PYTHON_METHODS:
        return None
    if not isinstance(source, Held):
        m.guard(Kind.ID_IS, source, obj)
    return BuiltinTracker(obj, source)


FUNCTION_BUILDERS.append(wrap_method_of_random)


def made(m: Machine, cls: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """A new generator with a seed."""
    consts = [plain(m, arg) for arg in args]
    named = {name: plain(m, arg) for name, arg in kwargs.items()}
    if any(const is None or const.value is None for const in (*consts, *named.values())) or not (consts or named):
        return NotImplemented
    try:
        generator = cls(*[const.value for const in consts if const is not None], **{k: c.value for k, c in named.items() if c is not None})
    except Exception as error:
        m.raise_exception(error)
    return RandomTracker(generator, m)
