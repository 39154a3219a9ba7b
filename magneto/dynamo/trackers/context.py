"""Context managers. torch's grad-mode managers have rules; everything else runs its own __enter__ and __exit__."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held
from magneto.dynamo.trackers import twins
from magneto.dynamo.trackers.attributes import find_special
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.function import FunctionTracker
from magneto.dynamo.trackers.klass import ClassTracker, held
from magneto.dynamo.trackers.object import ObjectTracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magneto.dynamo.machine.protocol import Emitter, Machine


class ModeTracker(Tracker):
    """A context manager of torch whose effect the machine follows. One that is still entered at the region's end is entered again for real."""

    __slots__ = ("cls",)

    def __init__(self, cls: type) -> None:
        super().__init__()
        self.cls = cls

    def python_type(self) -> type:
        return self.cls

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        return ModeSwitch(self, name == "__enter__") if name in ("__enter__", "__exit__") else None

    def enter(self, m: Machine) -> None:
        raise NotImplementedError

    def exit(self, m: Machine) -> None:
        raise NotImplementedError

    def show(self) -> str:
        return f"{self.cls.__name__}()"


class AutocastTracker(ModeTracker):
    """torch.autocast with its arguments resolved. `of`: the object outside whose block this is."""

    __slots__ = ("of", "state")

    def __init__(self, state: tuple[str, torch.dtype, bool, bool], of: Tracker | None = None) -> None:
        super().__init__(torch.autocast)
        self.state = state
        self.of = of

    def enter(self, m: Machine) -> None:
        m.contexts.append(self)  # type: ignore[attr-defined]
        m.enter_autocast(*self.state)  # type: ignore[attr-defined]

    def exit(self, m: Machine) -> None:
        if not m.contexts or m.contexts[-1] is not self:  # type: ignore[attr-defined]
            m.graph_break("B111", value=self.show())
        m.contexts.pop()  # type: ignore[attr-defined]
        m.exit_autocast()  # type: ignore[attr-defined]

    def emit(self, em: Emitter) -> str:
        if self.of is not None:
            return em.value(self.of)
        device, dtype, enabled, cache = self.state
        return em.assign("mode", f"{em.const(torch.autocast, 'autocast')}({device!r}, {em.const(dtype)}, {enabled}, {cache})", self)


_GENERATOR = 0x20 | 0x80 | 0x200  # and coroutines


class GradModeTracker(ModeTracker):
    """torch.no_grad(), torch.enable_grad(), torch.set_grad_enabled(flag)."""

    __slots__ = ("flag", "previous")

    def __init__(self, cls: type, flag: bool) -> None:
        super().__init__(cls)
        self.flag = flag
        self.previous: bool | None = None

    def enter(self, m: Machine) -> None:
        if self.cls is not torch.set_grad_enabled:  # whose constructor has switched already
            self.previous = m.grad_enabled()  # type: ignore[attr-defined]
        m.contexts.append(self)  # type: ignore[attr-defined]
        m.set_grad_enabled(self.flag)  # type: ignore[attr-defined]

    def exit(self, m: Machine) -> None:
        assert self.previous is not None
        m.contexts.remove(self)  # type: ignore[attr-defined]
        m.set_grad_enabled(self.previous)  # type: ignore[attr-defined]

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        return _decorate(m, self.cls, args)

    def emit(self, em: Emitter) -> str:
        flag = repr(self.flag) if self.cls is torch.set_grad_enabled else ""
        if self.cls is torch.set_grad_enabled:
            # its constructor switches the mode at once: the machine enters what is still entered at the region's end
            made = f"{em.const(torch.no_grad if not self.flag else torch.enable_grad, 'grad_mode')}()"
        else:
            made = f"{em.const(self.cls, self.cls.__name__)}({flag})"
        return em.assign("mode", made, self)


def _enter(m: Machine, v: ModeTracker) -> Tracker:
    v.enter(m)
    return m.const(None) if isinstance(v, (GradModeTracker, InferenceModeTracker)) else v


def _exit(m: Machine, v: ModeTracker, *args: Tracker) -> Tracker:
    if v not in m.contexts:  # type: ignore[attr-defined]
        m.graph_break("B111", value=v.show())
    v.exit(m)
    return m.const(None)


def _as_functions(cls: Any) -> None:
    """An ExitStack calls the class's functions; one that exists outside runs their code."""
    for fn, body in ((cls.__enter__, _enter), (cls.__exit__, _exit)):
        rule(fn, ModeTracker)(body)
        if not issubclass(cls, (torch.autocast, torch.inference_mode)):
            rule(fn, ObjectTracker)(lambda m, *args, fn=fn: m.call(FunctionTracker.existing(m, fn, Held(fn.__qualname__, fn)), args, {}))


for _mode in (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode, torch.autocast):
    _as_functions(_mode)


class ModeSwitch(Tracker):
    """Bound __enter__ or __exit__ of a mode."""

    __slots__ = ("entering", "mode")
    exact_type = types.MethodType

    def __init__(self, mode: ModeTracker, entering: bool) -> None:
        super().__init__()
        self.mode = mode
        self.entering = entering

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        return (_enter if self.entering else _exit)(m, self.mode)

    def emit(self, em: Emitter) -> str:
        return em.assign("switch", f"{em.value(self.mode)}.{'__enter__' if self.entering else '__exit__'}")


@rule(torch.no_grad)
def no_grad(m: Machine, *args: Tracker) -> Tracker:
    return _decorate(m, torch.no_grad, args) if args else GradModeTracker(torch.no_grad, False)


@rule(torch.enable_grad)
def enable_grad(m: Machine, *args: Tracker) -> Tracker:
    return _decorate(m, torch.enable_grad, args) if args else GradModeTracker(torch.enable_grad, True)


def _flag(m: Machine, mode: Tracker) -> bool:
    """torch takes True and False only."""
    if mode.python_type() is not bool:
        m.graph_break("B101", callee="set_grad_enabled", reason=f"argument {mode.show()}")
    return m.truth(mode)


@rule(torch.set_grad_enabled, Tracker)
def set_grad_enabled(m: Machine, mode: Tracker) -> Tracker:
    """As a context manager; as a statement it switches for good, which the machine replays."""
    made = GradModeTracker(torch.set_grad_enabled, _flag(m, mode))
    made.previous = m.grad_enabled()  # type: ignore[attr-defined]
    m.set_grad_enabled(made.flag)  # type: ignore[attr-defined]
    return made


@rule(torch._C._set_grad_enabled, Tracker)
def raw_set_grad_enabled(m: Machine, mode: Tracker) -> None:
    m.set_grad_enabled(_flag(m, mode))  # type: ignore[attr-defined]


@rule(torch.is_grad_enabled)
def is_grad_enabled(m: Machine) -> Tracker:
    return m.const(m.grad_enabled())  # type: ignore[attr-defined]


# -- autocast


def tracked_autocast(m: Machine, device_type: str | None) -> tuple[str, torch.dtype, bool, bool] | None:
    """The innermost autocast entered in this region (for a device, or any)."""
    for _, state in reversed(m.recorder.autocasts):  # type: ignore[attr-defined]
        if device_type is None or state[0] == device_type:
            return state  # type: ignore[no-any-return]
    return None


def _constant(m: Machine, v: Tracker) -> Any:
    const = v.try_const()
    if const is None:
        m.graph_break("B111", value="autocast with arguments that are not constant")
    return const.value


def autocast(
    m: Machine, device_type: Tracker, dtype: Tracker | None = None, enabled: Tracker | None = None, cache_enabled: Tracker | None = None
) -> Tracker:
    """The constructor: defaults are read from torch's state, which the region may have changed."""
    device = _constant(m, device_type)
    wanted = _constant(m, dtype) if dtype is not None else None
    if wanted is None:
        wanted = _constant(m, m.apply(torch.get_autocast_dtype, m.const(device)))
    cache = _constant(m, cache_enabled) if cache_enabled is not None else None
    if cache is None:
        cache = _constant(m, m.apply(torch.is_autocast_cache_enabled))
    on = True if enabled is None else _flag(m, enabled)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            real = torch.autocast(device, wanted, on, cache)
        except Exception as error:
            m.raise_exception(error)
    if said:
        m.graph_break("B111", value=f"autocast({device!r}): {said[0].message}")
    return AutocastTracker((device, wanted, real._enabled, cache))


rule(torch.autocast, Tracker)(autocast)


@rule(torch.autocast)
def autocast_by_keywords(m: Machine, /, **kwargs: Tracker) -> Any:
    return autocast(m, **kwargs) if "device_type" in kwargs else NotImplemented


def _old_autocast(device: str, cls: Any) -> Callable[..., Any]:
    def body(m: Machine, enabled: Tracker | None = None, dtype: Tracker | None = None, cache_enabled: Tracker | None = None) -> Tracker:
        if (said := getattr(cls, "__deprecated__", None)) is not None:
            m.apply(warnings.warn, m.const(said), ClassTracker(FutureWarning))
        default = torch.bfloat16 if device == "cpu" else torch.float16
        return autocast(m, m.const(device), dtype or m.const(default), enabled, cache_enabled or m.const(True))

    return body


_OLD: tuple[Any, ...] = (torch.cpu.amp.autocast, torch.cuda.amp.autocast)  # type: ignore[attr-defined]
for _device, _cls in zip(("cpu", "cuda"), _OLD, strict=True):
    rule(_cls)(_old_autocast(_device, _cls))


@rule((torch.autocast.__enter__, *(cls.__enter__ for cls in _OLD)), ObjectTracker)
def enter_existing_autocast(m: Machine, v: ObjectTracker) -> Tracker:
    """An object that exists outside (a decorator's, an attribute): what it was made with is read from it."""
    contexts: list[Any] = m.contexts  # type: ignore[attr-defined]
    if (
        v.cls not in (torch.autocast, *_OLD)
        or v.source is None
        or any(context.of is v for context in contexts if isinstance(context, AutocastTracker))
    ):
        m.graph_break("B111", value=v.show())
    device, dtype, enabled, cache = (
        _constant(m, m.apply(getattr, v, m.const(name))) for name in ("device", "fast_dtype", "_enabled", "_cache_enabled")
    )
    AutocastTracker((device, dtype, enabled, cache), v).enter(m)
    return v


@rule((torch.autocast.__exit__, *(cls.__exit__ for cls in _OLD)), ObjectTracker)
def exit_existing_autocast(m: Machine, v: ObjectTracker, *args: Tracker) -> Any:
    """One entered before this region holds what it restores: CPython leaves it."""
    contexts: list[Any] = m.contexts  # type: ignore[attr-defined]
    if not contexts or not isinstance(contexts[-1], AutocastTracker) or contexts[-1].of is not v:
        m.graph_break("B111", value=v.show())
    contexts[-1].exit(m)
    return m.const(None)


@rule(tuple(method for cls in _OLD for method in (cls.__enter__, cls.__exit__)), Tracker)
def real_autocast(m: Machine, v: Tracker, *args: Tracker) -> Any:
    m.graph_break("B111", value=v.show())


class RangeTracker(ModeTracker):
    """torch.profiler.record_function while nobody profiles: it has no effect."""

    __slots__ = ("args", "kwargs")

    def __init__(self, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> None:
        super().__init__(torch.autograd.profiler.record_function)
        self.args = tuple(args)
        self.kwargs = dict(kwargs)

    def enter(self, m: Machine) -> None:
        m.contexts.append(self)  # type: ignore[attr-defined]

    def exit(self, m: Machine) -> None:
        m.contexts.remove(self)  # type: ignore[attr-defined]

    def emit(self, em: Emitter) -> str:
        parts = [em.value(arg) for arg in self.args] + [f"{name}={em.value(arg)}" for name, arg in self.kwargs.items()]
        return em.assign("range", f"{em.const(self.cls, 'record_function')}({', '.join(parts)})", self)


@rule(torch.autograd.profiler.record_function)
def record_function(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Tracker:
    profiling = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    if profiling:
        m.graph_break("B111", value="torch.profiler.record_function, which a profiler sees")
    m.guard(Kind.STATE, None, ("profiler", torch.autograd._profiler_enabled, (), profiling))  # type: ignore[attr-defined]
    return RangeTracker(args, kwargs)


@rule(
    (
        torch.set_default_device,
        torch.set_default_dtype,
        torch.set_default_tensor_type,
        torch.use_deterministic_algorithms,
        torch.set_deterministic_debug_mode,
    )
)
def default(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Any:
    m.graph_break("B101", callee="a function of torch", reason="it changes what operations mean from here on")


@rule(torch.set_anomaly_enabled, ConstTracker)
def set_anomaly(m: Machine, mode: ConstTracker, check_nan: Tracker | None = None) -> Any:
    """Nothing to do where anomaly mode is already so (guarded); else the program switches it, between two graphs."""
    wanted = check_nan.try_const() if check_nan is not None else None
    now = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    if (mode.read(), True if wanted is None else wanted.value) != now:
        m.graph_break("B101", callee="set_anomaly_enabled", reason="it changes torch's state")
    for fn, value in zip((torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled), now, strict=True):
        m.guard(Kind.STATE, None, (fn.__name__, fn, (), value))
    return None


class InferenceModeTracker(ModeTracker):
    """torch.inference_mode(flag): entering it decides on gradients too."""

    __slots__ = ("flag",)

    def __init__(self, flag: bool) -> None:
        super().__init__(torch.inference_mode)
        self.flag = flag

    def enter(self, m: Machine) -> None:
        m.contexts.append(self)  # type: ignore[attr-defined]
        m.recorder.enter_inference(self.flag)  # type: ignore[attr-defined]

    def exit(self, m: Machine) -> None:
        if not m.contexts or m.contexts[-1] is not self:  # type: ignore[attr-defined]
            m.graph_break("B111", value=self.show())
        m.contexts.pop()  # type: ignore[attr-defined]
        m.recorder.exit_inference()  # type: ignore[attr-defined]

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        return _decorate(m, self.cls, args)

    def emit(self, em: Emitter) -> str:
        return em.assign("mode", f"{em.const(torch.inference_mode, 'inference_mode')}({self.flag})", self)


@rule(torch.inference_mode)
def inference_mode(m: Machine, mode: Tracker | None = None) -> Tracker:
    const = mode.try_const() if mode is not None else None
    if mode is not None and (const is None or type(const.value) is not bool):
        return _decorate(m, torch.inference_mode, (mode,))
    return InferenceModeTracker(const is None or const.value)


@rule((torch.inference_mode.__enter__, torch.inference_mode.__exit__), Tracker)
def existing_inference_mode(m: Machine, v: Tracker, *args: Tracker) -> Any:
    """What an object that exists outside goes back to is known to itself only."""
    m.graph_break("B111", value=v.show())


@rule(torch.is_inference_mode_enabled)
def is_inference_mode_enabled(m: Machine) -> Tracker:
    m.grad_enabled()  # type: ignore[attr-defined]
    return m.const(m.recorder.inference_mode)  # type: ignore[attr-defined]


def _decorate(m: Machine, cls: type, args: Sequence[Tracker]) -> Tracker:
    """A function that runs in the mode; what is wrapped in another way (generators, classes), and modes with an argument, break."""
    if (
        cls in (torch.no_grad, torch.enable_grad)
        and len(args) == 1
        and isinstance(args[0], FunctionTracker)
        and not args[0].code.co_flags & _GENERATOR
    ):
        return m.call(held(m, twins.in_mode, "in_mode"), [held(m, cls, cls.__name__), args[0]], {})  # type: ignore[no-any-return]
    m.graph_break("B101", callee=cls.__name__, reason="a grad mode used as a decorator inside the function")


def context_methods(m: Machine, manager: Tracker) -> tuple[Tracker, Tracker]:
    """Bound (__enter__, __exit__), looked up on the type."""
    found = []
    for name in ("__enter__", "__exit__"):
        method = manager.special_attr(m, name) if isinstance(manager, ModeTracker) else find_special(m, manager, name)
        if method is None:
            cls = manager.python_type().__name__
            missed = " (missed __exit__ method)" if name == "__exit__" else ""
            m.raise_exception(TypeError(f"'{cls}' object does not support the context manager protocol{missed}"))
        found.append(method)
    return found[0], found[1]
