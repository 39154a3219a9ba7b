"""Whether what is compiled now is one of several sizes of a program. Kernels that take sizes as arguments then serve the next ones too; for a single size they are made for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_vary: ContextVar[bool] = ContextVar("sizes_vary", default=False)


def sizes_vary() -> bool:
    return _vary.get()


@contextmanager
def varying(sizes: bool) -> Iterator[None]:
    token = _vary.set(sizes)
    try:
        yield
    finally:
        _vary.reset(token)
