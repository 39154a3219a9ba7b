"""Rows of torch's random generators: torch.Generator objects, `generator=` of torch's functions, and the seed and state of the default generator.

The region calls generators itself before its graph runs, in the program's order (`draw.py`). The default generator is also that of the graph's own random
operations: it is seeded or asked before the first of them; what sets it behind the last of them is an effect, and further random operations are left to the next region.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held, Source
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.build import FUNCTION_BUILDERS
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.dispatch import FALLBACKS, apply, rule
from magneto.dynamo.trackers.draw import HostCall, host_calls_allowed
from magneto.dynamo.trackers.function import BuiltinTracker
from magneto.dynamo.trackers.host import HostNumber
from magneto.dynamo.trackers.object import OpaqueTracker
from magneto.dynamo.trackers.plain import plain
from magneto.dynamo.trackers.tensor import MadeInput, TensorTracker
from magneto.dynamo.trackers.torch_calls import is_graph_callable, tensor_method

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

DEFAULT = torch.default_generator
_FACTORIES = frozenset("rand randn randint randperm normal".split())
_FILLS = frozenset("uniform_ normal_ random_ exponential_ geometric_ cauchy_ log_normal_ bernoulli_".split())


class HostTensor(MadeInput):
    """A tensor that a host call gives."""

    __slots__ = ("call_",)

    def __init__(self, call: HostCall) -> None:
        super().__init__(call.example, "drawn")
        self.call_ = call

    def graph_input(self, em: Emitter) -> str:
        return em.value(self.call_)


class NewGenerator(OpaqueTracker):
    """A generator that the region makes."""

    __slots__ = ("made",)

    def __init__(self, made: HostCall, m: Machine) -> None:
        super().__init__(made.example, None, m)  # type: ignore[arg-type]
        self.made = made

    def pin(self, m: Machine) -> Any:
        m.graph_break("B104", operation="a graph operation", value=self.show())

    def emit(self, em: Emitter) -> str:
        return em.value(self.made)


@rule(torch.Generator)
def new_generator(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Any:
    consts = [plain(m, arg) for arg in (*args, *kwargs.values())]
    if any(const is None or torch.device(const.value).type != "cpu" for const in consts) or not host_calls_allowed(m):
        return NotImplemented
    made = HostCall("{}('cpu')", [_held(torch.Generator)], torch.Generator())
    m.draws.append(made)  # type: ignore[attr-defined]
    return NewGenerator(made, m)


def _held(obj: Any) -> Tracker:
    return ConstTracker(obj)


def _is_generator(v: Tracker) -> bool:
    return isinstance(v, OpaqueTracker) and isinstance(v.obj, torch.Generator)


def _host(m: Machine, v: OpaqueTracker, template: str, operands: Sequence[Tracker], example: Any) -> HostCall:
    """A call at run time that changes or asks the generator `v`."""
    if v.obj is not DEFAULT and not isinstance(v, NewGenerator):
        default = Held("torch.default_generator", DEFAULT)
        assert v.source is not None
        if not isinstance(v.source, Held):
            m.guard(Kind.DISTINCT, v.source, (default,))
    call = HostCall(template, operands, example, () if isinstance(v, NewGenerator) else (v,))
    m.draws.append(call)  # type: ignore[attr-defined]
    return call


def _before_the_graph(m: Machine, v: OpaqueTracker) -> bool:
    """Whether the region may call the generator before its graph."""
    if v.obj is DEFAULT or (v.source is not None and v.pin(m) is DEFAULT):
        return not m.recorder.random_nodes and not m.random_closed  # type: ignore[attr-defined]
    return True


@rule(torch.Generator.manual_seed, OpaqueTracker, ConstTracker)
def manual_seed(m: Machine, v: OpaqueTracker, seed: ConstTracker) -> Any:
    return v if _set(m, v, "{0}.manual_seed({1})", seed) else NotImplemented


@rule(torch.Generator.set_state, OpaqueTracker, TensorTracker)
def set_state(m: Machine, v: OpaqueTracker, state: TensorTracker) -> Any:
    if m.has_written(state) or not (isinstance(state, HostTensor) or (state.source is not None and state.node is None)):
        return NotImplemented
    return None if _set(m, v, "{0}.set_state({1})", state) else NotImplemented


def _set(m: Machine, v: OpaqueTracker, template: str, value: Tracker) -> bool:
    """Seed the generator or set its state, before the graph or, for the default generator, behind it."""
    if not host_calls_allowed(m) or v.obj.device.type != "cpu":
        return False
    if isinstance(value, ConstTracker):
        try:
            torch.Generator().manual_seed(value.read())
        except Exception as error:
            m.raise_exception(error)
    if _before_the_graph(m, v):
        _host(m, v, template, [v, value], None)
    else:
        m.effect(template, v, value)
        m.random_closed = True  # type: ignore[attr-defined]
    return True


@rule(torch.Generator.get_state, OpaqueTracker)
def get_state(m: Machine, v: OpaqueTracker) -> Any:
    if not host_calls_allowed(m) or not _before_the_graph(m, v):
        return NotImplemented
    return HostTensor(_host(m, v, "{}.get_state()", [v], v.obj.get_state()))


@rule(torch.Generator.initial_seed, OpaqueTracker)
def initial_seed(m: Machine, v: OpaqueTracker) -> Any:
    if not host_calls_allowed(m) or m.random_closed:  # type: ignore[attr-defined]
        return NotImplemented
    return HostNumber(1, "{}", [_host(m, v, "{}.initial_seed()", [v], 1)])


_SEED = torch.random.manual_seed


def _wrap_manual_seed(m: Machine, obj: types.FunctionType, source: Source) -> Tracker | None:
    """torch.manual_seed, which is a wrapper of torch.random's own once torch's compiler has been imported."""
    if obj is not _SEED and not (obj.__name__ == "manual_seed" and getattr(obj, "__wrapped__", None) is _SEED):
        return None
    if not isinstance(source, Held):
        m.guard(Kind.ID_IS, source, obj)
    return BuiltinTracker(_SEED, source)


FUNCTION_BUILDERS.append(_wrap_manual_seed)


@rule(_SEED, ConstTracker)
def default_seed(m: Machine, seed: ConstTracker) -> Any:
    """On a machine with CPUs alone: all other devices have nothing to seed."""
    if torch.accelerator.is_available() or type(seed.read()) not in (int, bool, float):
        return NotImplemented
    default = m.const(DEFAULT)
    assert isinstance(default, OpaqueTracker)
    return default if _set(m, default, "seed_torch({1})", seed) else NotImplemented


def call_with_generator(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Fallback of dispatch: an operation of torch with a generator of its own."""
    generator = kwargs.get("generator")
    if generator is None or not is_graph_callable(fn):
        return NotImplemented
    rest = {name: value for name, value in kwargs.items() if name != "generator"}
    if isinstance(generator, ConstTracker) and generator.read() is None:
        return apply(m, fn, args, rest)
    if not isinstance(generator, OpaqueTracker) or not _is_generator(generator) or not host_calls_allowed(m):
        return NotImplemented
    if generator.obj is DEFAULT:
        generator.pin(m)
        return apply(m, fn, args, rest)
    if generator.obj.device.type != "cpu":
        return NotImplemented
    method = tensor_method(fn)
    target = args[0] if method in _FILLS and args and isinstance(args[0], TensorTracker) else None
    if target is None and (method is not None or fn.__name__ not in _FACTORIES):
        return NotImplemented
    consts = [plain(m, arg) for arg in (args if target is None else args[1:])]
    named = {name: plain(m, value) for name, value in rest.items()}
    if any(const is None for const in (*consts, *named.values())) or named.keys() & {"out", "requires_grad"}:
        return NotImplemented
    meta = None if target is None else target.meta
    if meta is not None and (meta.requires_grad or meta.device.type != "cpu"):
        return NotImplemented
    operands: list[Tracker] = [ConstTracker(fn), generator]
    operands += [ConstTracker(const.value) for const in (*consts, *named.values()) if const is not None]
    if meta is not None:
        operands += [ConstTracker(torch.empty_strided), ConstTracker((meta.shape, meta.strides)), ConstTracker(meta.dtype)]
    places = [f"{{{2 + i}}}" for i in range(len(consts))]
    places += [f"{name}={{{2 + len(consts) + i}}}" for i, name in enumerate(named)]
    if meta is not None:
        last = len(operands) - 3
        places.insert(0, f"{{{last}}}(*{{{last + 1}}}, dtype={{{last + 2}}})")
    template = f"{{0}}({', '.join([*places, 'generator={1}'])})"
    trial = [const.value for const in consts if const is not None]
    if meta is not None:
        trial.insert(0, torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype))
    try:
        example = fn(*trial, generator=torch.Generator(), **{name: const.value for name, const in named.items() if const is not None})
    except Exception as error:
        m.raise_exception(error)
    drawn = HostTensor(_host(m, generator, template, operands, example))
    return drawn if target is None else m.apply(torch.Tensor.copy_, target, drawn)


FALLBACKS.insert(0, call_with_generator)
