"""Generators and coroutines: their frames suspend, so the hook is switched for each step that they make, not for the call that creates them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Switch = Callable[..., Any]
"""`switch(fn, *args)` calls fn with the hook on, or off."""


class Steps:
    """A generator or coroutine each step of which runs under a switch."""

    def __init__(self, inner: Any, switch: Switch) -> None:
        self.inner = inner
        self.switch = switch

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Any:
        return self.switch(self.inner.send, None)

    def send(self, value: Any) -> Any:
        return self.switch(self.inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self.switch(self.inner.throw, *error)

    def close(self) -> None:
        self.switch(self.inner.close)

    __await__ = __iter__


def suspends(fn: Any) -> bool:
    """Whether calls of `fn` give a generator or a coroutine."""
    return inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn)


def stepping(fn: Any, switch: Switch) -> Any:
    """`fn`, whose generators or coroutines make each step under the switch."""
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await Steps(fn(*args, **kwargs), switch)

        return coroutine

    @functools.wraps(fn)
    def generator(*args: Any, **kwargs: Any) -> Any:
        return (yield from Steps(fn(*args, **kwargs), switch))

    return generator
