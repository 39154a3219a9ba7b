"""`dataclass` as in the standard library, for our own classes: methods are made when they are first called.

The standard library compiles up to six functions for each class while its module is imported, which is a third of what importing the compiler
costs; most of them are never called in a process. Fields, slots and `__match_args__` are the standard library's, and so are `field`, `fields` and
`replace`. The ways to say `dataclass` are those that we use: `frozen`, `slots`, `eq`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, field, fields, replace
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass", "field", "fields", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True):
        """A class of fields, or a decorator that makes one."""

        def decorate(plain):
            return _finished(dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(plain), frozen, slots, eq)

        return decorate if cls is None else decorate(cls)


def _finished(cls: Any, frozen: bool, slots: bool, eq: bool) -> Any:
    own = vars(cls)
    _later(cls, "__init__", lambda: _init(cls, frozen, slots))
    if "__repr__" not in own:
        cls.__repr__ = _repr
    if eq:
        given = "__eq__" in own
        explicit = "__hash__" in own and not (given and own["__hash__"] is None)
        if not given:
            _later(cls, "__eq__", lambda: _eq(cls))
        if frozen and not explicit:
            _later(cls, "__hash__", lambda: _function(cls, "__hash__", f"(self): return hash({_parts(cls, 'self')})", {}))
        elif not explicit:
            cls.__hash__ = None
    if frozen:
        cls.__setattr__ = cls.__delattr__ = _refuse
        if slots:
            cls.__getstate__, cls.__setstate__ = _state, _set_state
    return cls


def _later(cls: Any, name: str, make: Callable[[], Any]) -> None:
    """A method that takes the place of this one in the class when it is first called."""
    made: Any = None

    def method(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        if made is None:
            made = make()
            if vars(cls)[name] is method:
                setattr(cls, name, made)
        return made(*args, **kwargs)

    setattr(cls, name, method)


def _function(cls: Any, name: str, text: str, names: dict[str, Any]) -> Any:
    exec(f"def {name}{text}", names)
    made = names[name]
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.{name}", cls.__module__
    return made


def _init(cls: Any, frozen: bool, slots: bool) -> Any:
    names: dict[str, Any] = {"MISSING": MISSING, "assign": object.__setattr__}
    plain, keyword, lines = ["self"], list[str](), list[str]()
    for f in cls.__dataclass_fields__.values():
        n = f.name
        names |= {f"default_{n}": f.default, f"make_{n}": f.default_factory, f"set_{n}": getattr(getattr(cls, n, None), "__set__", None)}
        made, given = f.default_factory is not MISSING, f.default is not MISSING
        value = (f"make_{n}() if {n} is MISSING else {n}" if made else n) if f.init else f"make_{n}()" if made else f"default_{n}"
        if f.init:
            (keyword if f.kw_only else plain).append(n + ("=MISSING" if made else f"=default_{n}" if given else ""))
        elif not (made or given):
            continue
        lines.append(f" self.{n} = {value}" if not frozen else f" set_{n}(self, {value})" if slots else f" assign(self, {n!r}, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append(" self.__post_init__()")
    parameters = ", ".join([*plain, *(["*", *keyword] if keyword else [])])
    return _function(cls, "__init__", "\n".join([f"({parameters}):", *lines, " return None"]), names)


def _parts(cls: Any, of: str) -> str:
    return "(" + "".join(f"{of}.{f.name}," for f in cls.__dataclass_fields__.values() if f.compare) + ")"


def _eq(cls: Any) -> Any:
    text = f"return {_parts(cls, 'self')} == {_parts(cls, 'other')} if other.__class__ is self.__class__ else NotImplemented"
    return _function(cls, "__eq__", f"(self, other): {text}", {})


@recursive_repr()
def _repr(self: Any) -> str:
    return f"{type(self).__qualname__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(self) if f.repr)})"


def _refuse(self: Any, name: str, *value: Any) -> None:
    raise FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for f, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, f.name, value)
