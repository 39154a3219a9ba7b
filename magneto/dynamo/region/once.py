"""Regions whose own effects break their guards: the first step of a training loop, in which the optimiser makes its state and gradients appear.

Such a region is not expected again, so its graph is run as captured, in eager, and compiled only if it is called once more. What follows from a wrong guess is one
call in eager, never another result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType
from typing import Any

from torch import fx

from magneto.dynamo.guards.rows import GuardSet, Kind
from magneto.dynamo.guards.source import Attr, Cell, InstanceDict, Item, Local, Source
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.graph.atomic import atomic

Effect = tuple[str, tuple[Tracker, ...]]


def breaks_its_guards(code: CodeType, guards: GuardSet, effects: Iterable[Effect]) -> bool:
    """Whether the effects put a value where the guards want none: a new key of a dictionary, a value in place of None. (Each call of `code` has a dictionary of its own for `**kwargs`.)"""
    slot = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS) if code.co_flags & CO_VARKEYWORDS else -1
    filled: dict[Source, bool] = {}
    for text, operands in effects:
        for written in _written(text, operands):
            of = written.of if isinstance(written, Item) else None
            of = of.of if isinstance(of, Cell) else of
            if isinstance(of, Local) and of.slot == slot:
                continue
            filled[written] = not (isinstance(operands[-1], ConstTracker) and operands[-1].value is None)
    if not any(filled.values()):
        return False
    for row in guards:
        wanted = row.source
        if row.kind is Kind.KEY_ABSENT and wanted is not None:
            wanted = Item(wanted, row.payload)
        elif row.kind is not Kind.ID_IS or row.payload is not None:
            continue
        if wanted is not None and filled.get(wanted):
            return True
    return False


def _written(text: str, operands: tuple[Tracker, ...]) -> list[Source]:
    """The places that an assignment to an attribute or item of something from outside writes."""
    of = operands[0].source if operands else None
    if of is None:
        return []
    if text == "{0}[{1}] = {2}":
        key = operands[1]
        outside = getattr(key, "obj", None) if key.source is not None else None
        return [Item(of, key.value if isinstance(key, ConstTracker) else outside)]
    name = text.removeprefix("{0}.").removesuffix(" = {1}")
    return [Attr(of, name), Item(InstanceDict(of), name)] if name.isidentifier() and len(operands) == 2 else []


class CompiledWhenCalledAgain:
    """The callable of a graph that is not expected again. `compile` makes the real one from the arguments of the second call, or of a later one that `allowed` lets it."""

    def __init__(
        self, gm: fx.GraphModule, compile: Callable[[list[Any]], Callable[..., Any]], allowed: Callable[[], bool] | None = None
    ) -> None:
        self._compile: Callable[[list[Any]], Callable[..., Any]] | None = compile
        self._run = atomic(gm)
        self._allowed = allowed
        self._called = False

    def __call__(self, *inputs: Any) -> Any:
        if self._called and self._compile is not None and (self._allowed is None or self._allowed()):
            self._run, self._compile = self._compile(list(inputs)), None
        self._called = True
        return self._run(*inputs)
