"""Rows that inline a Python twin of a callable written in C."""

from __future__ import annotations

import _collections
import _functools
import bisect
import functools
import heapq
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers import twins
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.klass import held
from magneto.dynamo.trackers.object import ObjectTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


def twin(fn: Any, find: Callable[[], Any]) -> None:
    """Calls of `fn` mean calls of `find()`."""

    @rule(fn)
    def body(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Tracker:
        made = m.call(held(m, find(), fn.__name__), args, kwargs)
        if isinstance(made, ObjectTracker) and made.cls.__module__ == twins.__name__:
            made.born = m.count  # type: ignore[attr-defined]  # it must not leave: the program expects an object of C
        return made


def _from_library(module: Any, accelerator: str, names: tuple[str, ...]) -> None:
    for name in names:
        found = getattr(module, name, None)
        if found is not None:
            twin(found, functools.partial(_find, module.__name__, accelerator, name))


def _find(module: str, accelerator: str, name: str) -> Any:
    return getattr(twins.pure_module(module, accelerator), name)


_HEAP = ("heapify", "heappush", "heappop", "heapreplace", "heappushpop", "_heapify_max", "_heappop_max", "_heapreplace_max")
_from_library(heapq, "_heapq", _HEAP)
_from_library(bisect, "_bisect", ("bisect_left", "bisect_right", "insort_left", "insort_right"))
_from_library(operator, "_operator", ("concat", "iconcat", "countOf", "indexOf", "call"))
twin(_collections._count_elements, lambda: twins.count_elements)  # type: ignore[attr-defined]
twin(_functools.cmp_to_key, lambda: twins.KeyMaker)
twin(object.__reduce_ex__, lambda: twins.reduce_ex)
twin(object.__getstate__, lambda: twins.get_state)
twin(_functools._lru_cache_wrapper, lambda: twins.Cached)
