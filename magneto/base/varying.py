"""Whether what is compiled now is one of several sizes of a program. Kernels that take sizes as arguments then serve the next ones too; for a single size they are made for it.

`any_size`: whether it is a sample of a family (inductor/family.py). Choices that go by sizes are then made alike for as many sizes as can be, and what is written serves all of them: loops have rests
whether or not a size needs them, and threads are asked for where the loop runs. `chosen`: choices that are right whichever way they go are made once, at the first sample of a family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

_vary: ContextVar[bool] = ContextVar("sizes_vary", default=False)


class Choices:
    """Of one sample, in order. `before`: of the first one."""

    def __init__(self, before: Choices | None = None) -> None:
        self.before = iter(() if before is None else before.made)
        self.made: list[object] = []


_any: ContextVar[Choices | None] = ContextVar("any_size", default=None)
T = TypeVar("T")


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
    return _any.get() is not None


def chosen(choose: Callable[[], T]) -> T:
    """What `choose` gives, or what it gave for the first sample in its place. (Behind a difference that may be the answer to another question: such samples are of no family.)"""
    choices = _any.get()
    if choices is None:
        return choose()
    found: Any = next(choices.before, choices)
    found = choose() if found is choices else found
    choices.made.append(found)
    return found  # type: ignore[no-any-return]


@contextmanager
def sampling(first: Choices | None = None) -> Iterator[Choices]:
    """What is compiled is a sample of a family. `first`: the choices of its first one."""
    choices = Choices(first)
    token = _any.set(choices)
    try:
        yield choices
    finally:
        _any.reset(token)
