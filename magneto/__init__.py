"""magneto: a JIT compiler that makes unmodified PyTorch programs faster with one line.

    import magneto
    model = magneto.compile(model)

Names follow TorchDynamo's documents: optimize, explain, export, reset, run, disable, list_backends ... See docs/design/architecture.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from magneto.base.errors import GraphBreak, InternalError, MagnetoError, MagnetoWarning, Unsupported, UserError
from magneto.base.flags import config

if TYPE_CHECKING:
    from magneto.api.control import allow_in_graph as allow_in_graph
    from magneto.api.control import assume_constant_result as assume_constant_result
    from magneto.api.control import disable as disable
    from magneto.api.control import disallow_in_graph as disallow_in_graph
    from magneto.api.control import graph_break as graph_break
    from magneto.api.control import is_compiling as is_compiling
    from magneto.api.control import mark_dynamic as mark_dynamic
    from magneto.api.control import mark_static as mark_static
    from magneto.api.control import reset as reset
    from magneto.api.control import run as run
    from magneto.api.export import export as export
    from magneto.api.inspect import inspect as inspect
    from magneto.api.inspect import stats as stats
    from magneto.api.optimize import compile as compile
    from magneto.api.optimize import optimize as optimize
    from magneto.backends.registry import list_backends as list_backends
    from magneto.backends.registry import lookup_backend as lookup_backend
    from magneto.backends.registry import register_backend as register_backend
    from magneto.debug.explain import explain as explain

__version__ = "0.1.0"

_LAZY = {
    **dict.fromkeys(("optimize", "compile"), "magneto.api.optimize"),
    **dict.fromkeys(
        "reset run disable allow_in_graph disallow_in_graph assume_constant_result graph_break is_compiling mark_dynamic mark_static".split(),
        "magneto.api.control",
    ),
    **dict.fromkeys(("stats", "inspect"), "magneto.api.inspect"),
    "export": "magneto.api.export",
    "explain": "magneto.debug.explain",
    **dict.fromkeys(("list_backends", "lookup_backend", "register_backend"), "magneto.backends.registry"),
}

__all__ = [
    *("GraphBreak", "InternalError", "MagnetoError", "MagnetoWarning", "Unsupported", "UserError", "config", "__version__"),
    *(
        "optimize",
        "compile",
        "reset",
        "run",
        "disable",
        "allow_in_graph",
        "disallow_in_graph",
        "assume_constant_result",
        "graph_break",
        "is_compiling",
    ),
    *("mark_dynamic", "mark_static", "stats", "inspect", "export", "explain", "list_backends", "lookup_backend", "register_backend"),
]


def __getattr__(name: str) -> Any:
    """Public names are imported at first use, so that `import magneto` costs nothing."""
    home = _LAZY.get(name)
    if home is None:
        raise AttributeError(f"module 'magneto' has no attribute {name!r}")
    import importlib

    from magneto.base.collection import no_collection

    with no_collection(lasting=True):
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
