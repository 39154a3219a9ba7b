"""torch's modes of the thread, grad mode and autocast, and its switches of attention: read and put back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from magneto.base.dataclass import dataclass

_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Switch:
    """One of those that choose the kernel of attention (`torch.nn.attention.sdpa_kernel`); they are the process's. `many`: a list of numbers, kept as a tuple."""

    getter: Callable[[], Any]
    setter: Callable[[Any], None]
    many: bool

    def read(self) -> Any:
        return tuple(self.getter()) if self.many else self.getter()

    def argument(self, value: Any) -> Any:
        """What the setter takes."""
        return list(value) if self.many else value


def _switches() -> Iterator[Switch]:
    names = [
        (f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")
    ]
    order = ("_get_sdp_priority_order", "_set_sdp_priority_order")
    for getter, setter in (*names, ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"), order):
        if hasattr(torch._C, getter) and hasattr(torch._C, setter):
            yield Switch(getattr(torch._C, getter), getattr(torch._C, setter), getter == order[0])


ATTENTION = tuple(_switches())


_settled = False


def settle_attention() -> None:
    """On some GPUs the first attention changes the order in which kernels are tried, for good (torch prefers cuDNN's there). Asking which kernel it would take does so too: behind it the switches are what
    they are in the calls to come, and a graph that is guarded by them is captured once."""
    global _settled
    if not _settled and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _settled = True
        with suppress(RuntimeError, AttributeError), torch.no_grad():
            x = torch.empty(1, 1, 8, 8, dtype=torch.float16, device=torch.device("cuda", torch.cuda.current_device()))
            torch._fused_sdp_choice(x, x, x)


@contextmanager
def attention_switched(values: Mapping[Switch, Any]) -> Iterator[None]:
    before = [(switch, switch.read()) for switch in values]
    try:
        for switch, value in values.items():
            switch.setter(switch.argument(value))
        yield
    finally:
        for switch, value in before:
            switch.setter(switch.argument(value))


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes before something that switches them, and may fail half-way."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    nesting: int
    attention: tuple[Any, ...]

    def restore(self) -> None:
        """An autocast that was entered and not left is left here: while one stays open, torch keeps casted weights, and a later step would compute with old ones."""
        torch._C._set_grad_enabled(self.grad)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache)
        nesting = _nesting()
        if nesting > self.nesting == 0:
            torch.clear_autocast_cache()
        for _ in range(nesting - self.nesting):
            torch.autocast_decrement_nesting()
        for _ in range(self.nesting - nesting):
            torch.autocast_increment_nesting()
        for switch, value in zip(ATTENTION, self.attention, strict=True):
            if switch.read() != value:
                switch.setter(switch.argument(value))


def modes() -> Modes:
    """The modes now."""
    autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS)
    attention = tuple(switch.read() for switch in ATTENTION)
    return Modes(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled(), _nesting(), attention)


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


_switching = threading.Lock()
_switched: list[bool] = []  # what it was before, once for each that has switched it off


@contextmanager
def without_cudnn() -> Iterator[None]:
    """What cuDNN would do as one call (a recurrent network) is done in parts. It is one switch for all threads: the last to leave puts it back."""
    with _switching:
        _switched.append(_switched[0] if _switched else torch._C._get_cudnn_enabled())
        torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        with _switching:
            before = _switched.pop()
            if not _switched:
                torch._C._set_cudnn_enabled(before)


@contextmanager
def modes_kept(grad_enabled: bool) -> Iterator[None]:
    """A graph that is only traced inside: its mode switches take no effect outside, no casted weight of its tensors is kept."""
    before = modes()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.set_grad_enabled(grad_enabled):
            yield
    finally:
        before.restore()
