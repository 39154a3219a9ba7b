"""The public functions, on top of dynamo and the backends."""

from __future__ import annotations

from magneto.api.control import (
    allow_in_graph,
    assume_constant_result,
    disable,
    disallow_in_graph,
    graph_break,
    is_compiling,
    mark_dynamic,
    mark_static,
    reset,
    run,
)
from magneto.api.export import export
from magneto.api.inspect import inspect, stats
from magneto.api.optimize import compile, optimize

__all__ = [
    *(
        "allow_in_graph",
        "assume_constant_result",
        "compile",
        "disable",
        "disallow_in_graph",
        "export",
        "graph_break",
        "inspect",
        "is_compiling",
        "mark_dynamic",
    ),
    *("mark_static", "optimize", "reset", "run", "stats"),
]
