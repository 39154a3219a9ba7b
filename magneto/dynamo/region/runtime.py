"""What generated region code calls besides the compiled graph."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import torch

from magneto import _C
from magneto.dynamo.machine.assume import Drawn
from magneto.dynamo.trackers.draw import put_back, state_of
from magneto.dynamo.trackers.rules_exception import NO_EXCEPTION, NO_GROUP

END = type("End", (), {"__repr__": lambda self: "<end of iteration>"})()
"""Default of `next` in generated loops: the iterator is exhausted."""


def clean(error: BaseException) -> BaseException:
    """Remove the generated function's own entry from the front of a traceback, so that the user sees the program's frames only."""
    traceback = error.__traceback__
    if traceback is not None:
        traceback = traceback.tb_next
        while traceback is not None and traceback.tb_frame.f_globals is _HERE:
            traceback = traceback.tb_next
        error.__traceback__ = traceback
    return error


_HERE = globals()


def put(generator: Any, state: tuple[Any, bool] | None) -> None:
    """A generator that the region has looked into, where the program has got with it. None: it has returned."""
    if state is None:
        _C.finish(generator)
    else:
        _C.suspend(generator, *state)


def delegate(value: Any) -> Any:
    """What `yield from value` iterates."""
    return value if type(value) is types.GeneratorType else iter(value)


def spread(items: list[Any], value: Any) -> None:
    """`[*value]` behind what the list has."""
    if not hasattr(type(value), "__iter__") and not hasattr(type(value), "__getitem__"):
        raise TypeError(f"Value after * must be an iterable, not {_C.type_name(type(value))}")
    items.extend(value)


def merge(table: dict[Any, Any], value: Any) -> None:
    """`{**value}` behind what the dictionary has: pairs, which `dict.update` takes, are no mapping."""
    if not hasattr(value, "keys"):
        raise TypeError(f"'{_C.type_name(type(value))}' object is not a mapping")
    table.update(value)


def enter(manager: Any) -> tuple[Any, Any]:
    """(bound `__exit__`, result of `__enter__`), looked up as a with-statement does."""
    cls = type(manager)
    found = []
    for name in ("__enter__", "__exit__"):
        method = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
        if method is None:
            text = f"'{_C.type_name(cls)}' object does not support the context manager protocol"
            raise TypeError(text + (" (missed __exit__ method)" if name == "__exit__" else ""))
        found.append(method.__get__(manager, cls) if hasattr(type(method), "__get__") else method)
    return found[1], found[0]()


def _matches(exc: BaseException, kinds: Any) -> bool:
    """As a handler matches: no metaclass is asked."""
    return any(_matches(exc, kind) for kind in kinds) if isinstance(kinds, tuple) else kinds in type(exc).__mro__


def match_group(exc: BaseException, kinds: Any) -> tuple[BaseException | None, BaseException | None]:
    """(rest, match) of `except* kinds`."""
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        if not isinstance(kind, type) or BaseException not in kind.__mro__:
            raise TypeError(NO_EXCEPTION)
        if BaseExceptionGroup in kind.__mro__:
            raise TypeError(NO_GROUP)
    if _matches(exc, kinds):
        return None, exc if isinstance(exc, BaseExceptionGroup) else BaseExceptionGroup("", [exc])
    if isinstance(exc, BaseExceptionGroup):
        match, rest = exc.split(kinds)
        return rest, match
    return exc, None


def keeps_random_stream(graph: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph that draws random numbers: when it fails, the interpreter runs the frame again, and draws the same ones."""

    def run(*inputs: Any) -> Any:
        before = Drawn()
        try:
            return graph(*inputs)
        except Exception:
            before.put_back()
            raise

    return run


class Streams:
    """The states of random generators before a region draws from them."""

    __slots__ = ("states",)

    def __init__(self, *generators: Any) -> None:
        self.states = [(generator, state_of(generator)) for generator in generators]

    def put_back(self) -> None:
        for generator, state in self.states:
            put_back(generator, state)


def apart(*tensors: torch.Tensor) -> None:
    """For a graph that writes, and reads arrays of numpy, whose memory no guard looks at: refuses inputs that share memory (the frame then runs in eager)."""
    spans = sorted((tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors)
    for (start, size), (following, _) in itertools.pairwise(spans):
        if start + size > following:
            raise RuntimeError("inputs that share memory")
