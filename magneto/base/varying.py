"""Whether what is compiled now is one of several sizes of a program. Kernels that take sizes as arguments then serve the next ones too; for a single size they are made for it.

`any_size`: whether it is a sample of a family (inductor/family.py). Choices that go by sizes are then made alike for as many sizes as can be, and what is written serves all of them: loops have rests
whether or not a size needs them, and threads are asked for where the loop runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_vary: ContextVar[bool] = ContextVar("sizes_vary", default=False)
_any: ContextVar[bool] = ContextVar("any_size", default=False)


def sizes_vary() -> bool:
    return _vary.get()


@contextmanager
def varying(sizes: bool) -> Iterator[None]:
    token = _vary.set(sizes)
    try:
        yield
    finally:
        _vary.reset(token)


def any_size() -> bool:
    return _any.get()


@contextmanager
def sampling() -> Iterator[None]:
    """What is compiled is a sample of a family."""
    token = _any.set(True)
    try:
        yield
    finally:
        _any.reset(token)
