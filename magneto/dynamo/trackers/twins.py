"""Python twins of functions and types written in C: capture inlines them where the original would be called.

The standard library's own Python versions are used where there are any. The others are written here, for capture alone: nothing runs them at run time.
"""

from __future__ import annotations

import builtins
import copyreg
import functools
import importlib.util
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any


@functools.cache
def pure_module(name: str, accelerator: str) -> types.SimpleNamespace:
    """A module of the standard library run without its C accelerator."""

    def importing(wanted: str, *args: Any) -> Any:
        if wanted == accelerator:
            raise ImportError(wanted)
        return builtins.__import__(wanted, *args)

    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None and spec.origin is not None
    source = spec.loader.get_source(name)  # type: ignore[attr-defined]
    namespace: dict[str, Any] = {"__name__": name, "__builtins__": {**vars(builtins), "__import__": importing}}
    exec(compile(source, spec.origin, "exec"), namespace)
    return types.SimpleNamespace(**namespace)


def count_elements(mapping: Any, iterable: Iterable[Any]) -> None:
    """collections._count_elements."""
    get = mapping.get
    for item in iterable:
        mapping[item] = get(item, 0) + 1


class ComparedKey:
    """functools.cmp_to_key: what the function it gives returns."""

    __slots__ = ("compare", "obj")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, compare: Callable[[Any, Any], int], obj: Any) -> None:
        self.compare = compare
        self.obj = obj

    def __lt__(self, other: ComparedKey) -> bool:
        return self.compare(self.obj, other.obj) < 0

    def __gt__(self, other: ComparedKey) -> bool:
        return self.compare(self.obj, other.obj) > 0

    def __eq__(self, other: object) -> bool:
        return self.compare(self.obj, other.obj) == 0  # type: ignore[attr-defined]

    def __le__(self, other: ComparedKey) -> bool:
        return self.compare(self.obj, other.obj) <= 0

    def __ge__(self, other: ComparedKey) -> bool:
        return self.compare(self.obj, other.obj) >= 0


class KeyMaker:
    """functools.cmp_to_key."""

    def __init__(self, mycmp: Callable[[Any, Any], int]) -> None:
        self.mycmp = mycmp

    def __call__(self, obj: Any) -> ComparedKey:
        return ComparedKey(self.mycmp, obj)


_MARK = object()


class Cached:
    """functools.lru_cache: a function with its table of results, the least recently used first."""

    def __init__(self, fn: Callable[..., Any], maxsize: int | None, typed: bool, info: Callable[..., Any]) -> None:
        self._fn, self._maxsize, self._typed, self._info = fn, maxsize, typed, info
        self._table: dict[Any, Any] = {}
        self._hits = self._misses = 0

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        key: tuple[Any, ...] = args
        if kwargs:
            key += (_MARK,)
            for item in kwargs.items():
                key += item
        if self._typed:
            key += tuple([type(value) for value in args])
            key += tuple([type(value) for value in kwargs.values()])
        elif len(key) == 1 and type(key[0]) in (int, str):
            return key[0]
        return key

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._maxsize == 0:
            self._misses += 1
            return self._fn(*args, **kwargs)
        key = self._key(args, kwargs)
        if key in self._table:
            self._hits += 1
            result = self._table[key]
            if self._maxsize is not None:
                del self._table[key]
                self._table[key] = result
            return result
        self._misses += 1
        result = self._fn(*args, **kwargs)
        if self._maxsize is not None and key not in self._table and len(self._table) >= self._maxsize:
            del self._table[next(iter(self._table))]
        self._table[key] = result
        return result

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self if obj is None else types.MethodType(self, obj)

    def cache_info(self) -> Any:
        return self._info(self._hits, self._misses, self._maxsize, len(self._table))

    def cache_clear(self) -> None:
        self._hits = self._misses = 0
        self._table.clear()


def get_state(self: Any) -> Any:
    """object.__getstate__."""
    state = getattr(self, "__dict__", None) or None
    slots = {}
    for name in copyreg._slotnames(type(self)):  # type: ignore[attr-defined]
        value = getattr(self, name, _MARK)
        if value is not _MARK:
            slots[name] = value
    return (state, slots) if slots else state


def reduce_ex(self: Any, protocol: int) -> Any:
    """object.__reduce_ex__."""
    cls = type(self)
    if cls.__reduce__ is not object.__reduce__:  # type: ignore[comparison-overlap]
        return self.__reduce__()
    if operator.index(protocol) < 2:
        return copyreg._reduce_ex(self, protocol)  # type: ignore[attr-defined]
    new, given = copyreg.__newobj__, (cls,)  # type: ignore[attr-defined]
    if hasattr(cls, "__getnewargs_ex__"):
        args, kwargs = _checked_arguments(self.__getnewargs_ex__())
        new, given = (copyreg.__newobj_ex__, (cls, args, kwargs)) if kwargs else (new, (cls, *args))  # type: ignore[attr-defined]
    elif hasattr(cls, "__getnewargs__"):
        args = self.__getnewargs__()
        if not isinstance(args, tuple):
            raise TypeError(f"__getnewargs__ should return a tuple, not '{type(args).__name__}'")
        given = (cls, *args)
    state = self.__getstate__()
    listed = iter(self) if isinstance(self, list) else None
    paired = iter(self.items()) if isinstance(self, dict) else None
    return new, given, state, listed, paired


def _checked_arguments(given: Any) -> Any:
    name = "__getnewargs_ex__"
    if not isinstance(given, tuple):
        raise TypeError(f"{name} should return a tuple, not '{type(given).__name__}'")
    if len(given) != 2:
        raise ValueError(f"{name} should return a tuple of length 2, not {len(given)}")
    args, kwargs = given
    if not isinstance(args, tuple):
        raise TypeError(f"first item of the tuple returned by {name} must be a tuple, not '{type(args).__name__}'")
    if not isinstance(kwargs, dict):
        raise TypeError(f"second item of the tuple returned by {name} must be a dict, not '{type(kwargs).__name__}'")
    return given


def in_mode(mode: Callable[[], Any], func: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.no_grad()(func)`, which torch makes with a clone of the object that is called."""

    @functools.wraps(func)
    def decorate_context(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return func(*args, **kwargs)

    return decorate_context
