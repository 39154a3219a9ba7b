"""Context managers. torch's grad-mode managers have rules; everything else runs its own __enter__ and __exit__."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

import torch

from magneto.dynamo.trackers.attributes import find_special
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.dispatch import rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magneto.dynamo.machine.protocol import Emitter, Machine


class GradModeTracker(Tracker):
    """torch.no_grad(), torch.enable_grad(), torch.set_grad_enabled(flag), torch.inference_mode(False)."""

    __slots__ = ("cls", "flag", "previous")

    def __init__(self, cls: type, flag: bool) -> None:
        super().__init__()
        self.cls = cls
        self.flag = flag
        self.previous: bool | None = None

    def python_type(self) -> type:
        return self.cls

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name in ("__enter__", "__exit__"):
            return ModeSwitch(self, name == "__enter__")
        if name == "prev" and self.previous is not None:
            return m.const(self.previous)
        return None

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
        m.graph_break("B101", callee=self.show(), reason="a grad mode used as a decorator inside the function")

    def emit(self, em: Emitter) -> str:
        flag = repr(self.flag) if self.cls is torch.set_grad_enabled else ""
        if self.cls is torch.set_grad_enabled:
            # its constructor switches the mode at once: the machine enters what is still entered at the region's end
            made = f"{em.const(torch.no_grad if not self.flag else torch.enable_grad, 'grad_mode')}()"
        else:
            made = f"{em.const(self.cls, self.cls.__name__)}({flag})"
        return em.assign("mode", made, self)

    def show(self) -> str:
        return f"{self.cls.__name__}()"


class ModeSwitch(Tracker):
    """Bound __enter__ or __exit__ of a grad mode."""

    __slots__ = ("entering", "mode")

    def __init__(self, mode: GradModeTracker, entering: bool) -> None:
        super().__init__()
        self.mode = mode
        self.entering = entering

    def python_type(self) -> type:
        return types.MethodType

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        if self.entering:
            self.mode.enter(m)
        else:
            self.mode.exit(m)
        return m.const(None)

    def emit(self, em: Emitter) -> str:
        return em.assign("switch", f"{em.value(self.mode)}.{'__enter__' if self.entering else '__exit__'}")


@rule(torch.no_grad)
def no_grad(m: Machine, *args: Tracker) -> Tracker:
    return _decorate(m, torch.no_grad, args) if args else GradModeTracker(torch.no_grad, False)


@rule(torch.enable_grad)
def enable_grad(m: Machine, *args: Tracker) -> Tracker:
    return _decorate(m, torch.enable_grad, args) if args else GradModeTracker(torch.enable_grad, True)


@rule(torch.set_grad_enabled, Tracker)
def set_grad_enabled(m: Machine, mode: Tracker) -> Tracker:
    """As a context manager; as a statement it switches for good, which the machine replays."""
    made = GradModeTracker(torch.set_grad_enabled, m.truth(mode))
    made.previous = m.grad_enabled()  # type: ignore[attr-defined]
    m.set_grad_enabled(made.flag)  # type: ignore[attr-defined]
    return made


@rule(torch._C._set_grad_enabled, Tracker)
def raw_set_grad_enabled(m: Machine, mode: Tracker) -> None:
    m.set_grad_enabled(m.truth(mode))  # type: ignore[attr-defined]


@rule(torch.is_grad_enabled)
def is_grad_enabled(m: Machine) -> Tracker:
    return m.const(m.grad_enabled())  # type: ignore[attr-defined]


def _decorate(m: Machine, cls: type, args: Sequence[Tracker]) -> Tracker:
    m.graph_break("B101", callee=cls.__name__, reason="a grad mode used as a decorator inside the function")


def context_methods(m: Machine, manager: Tracker) -> tuple[Tracker, Tracker]:
    """Bound (__enter__, __exit__), looked up on the type."""
    found = []
    for name in ("__enter__", "__exit__"):
        method = manager.special_attr(m, name) if isinstance(manager, GradModeTracker) else find_special(m, manager, name)
        if method is None:
            cls = manager.python_type().__name__
            missed = " (missed __exit__ method)" if name == "__exit__" else ""
            m.raise_exception(TypeError(f"'{cls}' object does not support the context manager protocol{missed}"))
        found.append(method)
    return found[0], found[1]
