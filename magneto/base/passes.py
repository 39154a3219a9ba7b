"""The pass runner: a pipeline is a list of named pure functions IR -> IR, read like a recipe.

Each pass is timed (`timer(name)`), logged as changed or unchanged (level 6), dumped when it changed something, and its result verified
when the flag `verify` is set. A pass that changes nothing returns the object it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from magneto.base.dataclass import dataclass
from magneto.base.errors import InternalError, MagnetoError
from magneto.base.events import timer
from magneto.base.flags import config
from magneto.base.logs import PASSES, dump, dumping, log, logging

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pass:
    """`fn(ir)`, or `fn(ir, context)` in a run with a context, returns the next IR. The name is a verb."""

    name: str
    fn: Callable[..., Any]


def run_passes(
    passes: Sequence[Pass], ir: T, verify: Callable[[Any], None] | None = None, show: Callable[[Any], str] = str, context: Any = None,
    label: str = "",
) -> T:  # fmt: skip
    """`ir` after all `passes`, in order.

    verify: raises when an IR is malformed; runs after every pass under the flag `verify`, and its error becomes InternalError I002.
    show: the IR as text, for logs and dumps only. context: second argument of every pass, when it is not None.
    label: what is being compiled, for logs and file names.
    """
    watching = logging(PASSES) or dumping()
    before = show(ir) if watching else ""
    for step in passes:
        with timer(step.name):
            result = step.fn(ir) if context is None else step.fn(ir, context)
        if verify is not None and config.verify:
            _verified(step, result, verify, show)
        if watching:
            before = _report(step, label, before, show(result))
        ir = result
    return ir


def _verified(step: Pass, result: Any, verify: Callable[[Any], None], show: Callable[[Any], str]) -> None:
    try:
        verify(result)
    except Exception as error:
        reason = error.reason if isinstance(error, MagnetoError) else str(error)
        raise InternalError("I002", name=step.name, error=f"{reason}\n{show(result)}") from error


def _report(step: Pass, label: str, before: str, after: str) -> str:
    changed = before != after
    log(PASSES, f"{label or 'pass'}: {step.name}: " + (f"changed\n{after}" if changed else "unchanged"))
    if changed:
        dump(f"{label}_{step.name}" if label else step.name, ".txt", after)
    return after
