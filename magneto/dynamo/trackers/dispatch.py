"""THE table: (Python callable, kinds of arguments) -> rule. What an operation means for tracked values is written once, in a row of this table.

A row is added by `@rule(operator.add, TensorTracker, Tracker)`: it applies when the leading positional arguments are of these tracker classes; rows are tried in the
order of their definition. A rule gets (machine, *trackers, **trackers) and returns a tracker, None for Python's None, or NotImplemented to let the next row
try. Without a fitting row: constants fold through pure callables, torch's operations become graph nodes, everything else is a graph break.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.base import Raised, Tracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

Rule = Callable[..., Any]
TABLE: dict[Any, list[tuple[tuple[type[Tracker], ...], Rule]]] = {}
_FITTING: dict[Any, list[Rule]] = {}
"""The rows for a callable and the classes of its arguments, of what has been asked for."""
PURE: set[Any] = set()
"""Callables without side effects whose result depends on constant arguments alone."""

FALLBACKS: list[Callable[[Machine, Any, Sequence[Tracker], Mapping[str, Tracker]], Any]] = []
"""Tried in order when no row fits; each returns a tracker or NotImplemented."""


OVERRIDES: list[Callable[[Machine, Any, Sequence[Tracker], Mapping[str, Tracker]], Any]] = []
"""Asked first, in regions that have met a class with `__torch_function__`."""


SEEN: dict[Any, Callable[..., Any]] = {}
"""Operators and the like: asked next, whether the program has put its own on torch.Tensor."""
_HASHED = (types.BuiltinFunctionType, type)


def rule(fn: Any, *kinds: type[Tracker]) -> Callable[[Rule], Rule]:
    """Add a row for one callable, or the same row for several (a tuple of callables)."""
    fns = fn if isinstance(fn, tuple) else (fn,)

    def add(body: Rule) -> Rule:
        _FITTING.clear()
        for target in fns:
            TABLE.setdefault(target, []).append((kinds, body))
        return body

    return add


def prefer(fn: Any, *kinds: type[Tracker]) -> Callable[[Rule], Rule]:
    """Add a row before those that are there."""

    def add(body: Rule) -> Rule:
        _FITTING.clear()
        TABLE.setdefault(fn, []).insert(0, (kinds, body))
        return body

    return add


def pure(fns: Iterable[Any]) -> None:
    """Declare callables as foldable."""
    PURE.update(fns)


def has_rows(fn: Any) -> bool:
    """Whether the table knows the callable (unhashable objects are in no table)."""
    try:
        return fn in TABLE or fn in PURE
    except TypeError:
        return False


def apply(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
    """Meaning of the real callable on trackers."""
    if m.overriding:  # type: ignore[attr-defined]
        for body in OVERRIDES:
            result = body(m, fn, args, kwargs)
            if result is not NotImplemented:
                return m.const(None) if result is None else result  # type: ignore[no-any-return]
    if isinstance(fn, _HASHED) and (seen := SEEN.get(fn)) is not None:
        result = seen(m, *args)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
    return meaning(m, fn, args, kwargs)


def meaning(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
    """`apply` where the classes of the arguments are not asked."""
    for body in fitting(fn, args):
        result = run_rule(m, fn, body, args, kwargs)
        if result is not NotImplemented:
            return m.const(None) if result is None else result
    for fallback in FALLBACKS:
        result = fallback(m, fn, args, kwargs)
        if result is not NotImplemented:
            return m.const(None) if result is None else result
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or repr(fn)
    m.graph_break("B101", callee=name, reason=f"no rule for ({', '.join(arg.show() for arg in args)})")


def fitting(fn: Any, args: Sequence[Tracker]) -> Sequence[Rule]:
    """The rows for these arguments, in their order."""
    try:
        rows = TABLE.get(fn)
    except TypeError:
        return ()
    if rows is None:
        return ()
    key = (fn, *map(type, args))
    found = _FITTING.get(key)
    if found is None:
        count = len(args)
        found = _FITTING[key] = [body for kinds, body in rows if len(kinds) <= count and all(map(isinstance, args, kinds))]
    return found


def run_rule(m: Machine, fn: Any, body: Rule, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Call a rule; arguments that it does not take are a break (CPython will say what is wrong with them, or take them)."""
    try:
        return body(m, *args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise
    except Raised:
        for arg in (*args, *kwargs.values()):
            if hasattr(arg, "needed"):  # a rule may have taken a number of the run for something that is no number
                arg.needed(m)
            elif not arg.shared:
                arg.python_type()  # nor may an error stand for arguments of other types: the type of a scalar is guarded when it is asked for
        raise
    name = getattr(fn, "__qualname__", None) or repr(fn)
    m.graph_break("B101", callee=name, reason="arguments that its rule does not describe")


def fold(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Compute a pure callable on constants; its exception is the program's. NotImplemented when an argument is no constant."""
    values = []
    for arg in args:
        const = arg.try_const()
        if const is None:
            return NotImplemented
        values.append(const.value)
    named = {}
    for name, arg in kwargs.items():
        const = arg.try_const()
        if const is None:
            return NotImplemented
        named[name] = const.value
    try:
        result = fn(*values, **named)
    except Exception as error:
        m.raise_exception(error)
    return m.const(result)


def fold_pure(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Fallback: a pure callable on constants."""
    try:
        known = fn in PURE
    except TypeError:
        return NotImplemented
    return fold(m, fn, args, kwargs) if known else NotImplemented


FALLBACKS.append(fold_pure)
