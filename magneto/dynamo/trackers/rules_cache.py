"""functools.lru_cache: its cache is state of the program. A value that it holds is known under a guard, and the call, a hit, is counted when the region's
effects are replayed; a miss is called for real, at a break."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import sysconfig
from typing import TYPE_CHECKING, Any

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.dispatch import FALLBACKS
from magneto.dynamo.trackers.function import BuiltinTracker
from magneto.dynamo.trackers.keys import hashes_by_identity
from magneto.dynamo.trackers.klass import held

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magneto.dynamo.machine.protocol import Machine

_LIBRARY = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<frozen")


def peek(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the cache holds for a call, without being one; MISSING where it holds nothing. The C object tells its parts to the garbage collector only:
    its type, (key, result, kind of link) for each entry of a bounded cache, the dictionary, the function, the mark before keywords ..."""
    parts = gc.get_referents(fn)
    place = next(i for i in range(len(parts) - 2, 0, -1) if parts[i] is fn.__wrapped__ and type(parts[i - 1]) is dict)
    cache, mark = parts[place - 1], parts[place + 1]
    typed = fn.cache_parameters()["typed"]
    key: Any = args
    if not kwargs and not typed:
        key = args[0] if len(args) == 1 and type(args[0]) in (int, str) else args
    else:
        for name, value in kwargs.items():
            key += (*((mark,) if key is args else ()), name, value)
        if typed:
            key += (*map(type, args), *map(type, kwargs.values()))
    if key not in cache:
        return MISSING
    if fn.cache_parameters()["maxsize"] is None:
        return cache[key]
    stored = next(known for known in cache if known == key)
    return next((parts[i + 1] for i in range(1, place - 1, 3) if parts[i] is stored), MISSING)


def holds(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> bool:
    return peek(fn, args, kwargs) is value


def _works() -> bool:
    """Whether the parts lie as expected in this Python."""
    value = object()
    try:
        for size in (None, 2):
            probe: Any = functools.lru_cache(size)(lambda *args, **kwargs: value)
            for args, kwargs in (((1,), {}), ((1, "a"), {"k": 2}), ((2.5,), {})):
                if not holds(probe, args, kwargs, MISSING) or probe(*args, **kwargs) is not value or not holds(probe, args, kwargs, value):
                    return False
    except Exception:
        return False
    return True


_WORKS = _works()


def _of_library(fn: Any) -> bool:
    """Whether a function stands in the standard library or in an installed package."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return code is None or code.co_filename.startswith(_LIBRARY) or "site-packages" in code.co_filename


def _real(m: Machine, v: Tracker) -> Any:
    """The real argument: a constant, or an existing object that is guarded by identity."""
    const = v.try_const()
    if const is not None:
        return const.value
    if v.obj is MISSING or v.unknown or not hashes_by_identity(type(v.obj)):
        return MISSING
    if v.source is not None and not isinstance(v.source, Held):
        m.guard(Kind.ID_IS, v.source, v.obj)
    return v.obj


def _of_the_program(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
    values = tuple(_real(m, arg) for arg in args)
    named = {name: _real(m, arg) for name, arg in kwargs.items()}
    name = getattr(fn, "__qualname__", "lru_cache")
    known = MISSING
    if _WORKS and all(value is not MISSING for value in (*values, *named.values())) and all(map(str.isidentifier, named)):
        try:
            known = peek(fn, values, named)
        except Exception as error:  # of a key that cannot be hashed, or compared
            m.graph_break("B101", callee=name, reason=f"its key: {type(error).__name__}")
        m.guard(Kind.STATE, None, (f"cache of {name}", holds, (fn, values, named, known), True))
    if known is MISSING:
        m.graph_break("B101", callee=name, reason="its cache would change")
    slots = [f"{{{i}}}" for i in range(1, len(args) + 1)] + [f"{key}={{{i}}}" for i, key in enumerate(kwargs, len(args) + 1)]
    m.effect(f"{{0}}({', '.join(slots)})", BuiltinTracker(fn), *args, *kwargs.values())
    return held(m, known, name)


def call_cached(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Fallback. What a library caches is asked on constants and inlined otherwise: nobody counts its hits."""
    if not isinstance(fn, functools._lru_cache_wrapper):
        return NotImplemented
    if not _of_library(fn.__wrapped__):
        return _of_the_program(m, fn, args, kwargs)
    consts = [arg.try_const() for arg in args]
    named = {name: arg.try_const() for name, arg in kwargs.items()}
    if all(const is not None for const in (*consts, *named.values())):
        try:
            value = fn(*(c.value for c in consts if c is not None), **{k: c.value for k, c in named.items() if c is not None})
        except Exception as error:
            m.raise_exception(error)
        return held(m, value, getattr(fn, "__name__", "cached"))
    if isinstance(args[0].obj if args else None, logging.Logger) and not kwargs and all(const is not None for const in consts[1:]):
        # logger.warning_once(text): the message is said, or not, when the effects are replayed
        m.effect(f"{{0}}({', '.join(f'{{{i}}}' for i in range(1, len(args) + 1))})", BuiltinTracker(fn), *args)
        return None
    return m.call(held(m, fn.__wrapped__, getattr(fn.__wrapped__, "__name__", "cached")), args, kwargs)


FALLBACKS.append(call_cached)
