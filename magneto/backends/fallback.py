"""The captured graph run as it was captured, when the compiler does not take it: named, counted, said once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from magneto.base.errors import MagnetoError, warn_once
from magneto.base.events import counter, emit
from magneto.base.flags import config
from magneto.graph.atomic import atomic


def name_of(gm: fx.GraphModule) -> str:
    return str(getattr(gm, "meta", {}).get("magneto", {}).get("name", "graph"))


def run_captured_graph(gm: fx.GraphModule, reason: str, quiet: bool = False) -> Callable[..., Any]:
    """`gm` itself as the compiled callable. `quiet`: recorded, but no warning (the reason is no defect)."""
    name = name_of(gm)
    emit("fallback", graph=name, reason=reason)
    counter("graphs_in_eager")
    if not quiet:
        warn_once("W104", graph=name, reason=reason)
    return atomic(gm)


def recover(gm: fx.GraphModule, error: Exception) -> Callable[..., Any]:
    """The answer to an error inside the compiler: eager with one warning, or the error itself under ``suppress_errors=False``."""
    if not config.suppress_errors:
        raise error
    reason = error.reason if isinstance(error, MagnetoError) else f"{type(error).__name__}: {error}"
    return run_captured_graph(gm, reason.strip().split("\n")[0][:300])


def recover_backward(name: str, error: Exception) -> None:
    """As `recover`, for a backward graph: said once, and its operations are called one by one."""
    if not config.suppress_errors:
        raise error
    reason = error.reason if isinstance(error, MagnetoError) else f"{type(error).__name__}: {error}"
    reason = reason.strip().split("\n")[0][:300]
    emit("fallback", graph=name, reason=reason)
    counter("graphs_in_eager")
    warn_once("W105", graph=name, reason=reason)
