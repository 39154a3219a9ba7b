"""torch's modes of the thread: grad mode and autocast, read and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes before something that switches them, and may fail half-way."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    nesting: int

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


def modes() -> Modes:
    """The modes now."""
    autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS)
    return Modes(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled(), _nesting())


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


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
