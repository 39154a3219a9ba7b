"""The names a user can give as ``backend=``. A backend is a callable `(GraphModule, example_inputs) -> callable(*inputs) -> tuple`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, overload

from torch import fx

from magneto.base.dataclass import dataclass
from magneto.base.errors import UserError
from magneto.base.text import did_you_mean

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One row. `fixed_sizes`: it must know all sizes in a graph, so that an operation whose result's size depends on data stands between two graphs. `slow`: a compile costs more than a call in eager, so that a graph which is not expected again is not given to it. `needs`: a package without which the backend is listed but cannot be used. `aliases`: further names."""

    name: str
    fn: Backend
    help: str = ""
    needs: str = ""
    aliases: tuple[str, ...] = ()
    fixed_sizes: bool = False
    slow: bool = False

    @property
    def available(self) -> bool:
        return not self.needs or importlib.util.find_spec(self.needs) is not None


_entries: dict[str, BackendEntry] = {}


@overload
def register_backend(name: Backend, /) -> Backend: ...
@overload
def register_backend(
    name: str | None = None,
    fn: None = None,
    *,
    help: str = "",
    needs: str = "",
    aliases: Sequence[str] = (),
    fixed_sizes: bool = False,
    slow: bool = False,
) -> Callable[[Backend], Backend]: ...
@overload
def register_backend(
    name: str, fn: Backend, *, help: str = "", needs: str = "", aliases: Sequence[str] = (), fixed_sizes: bool = False, slow: bool = False
) -> Backend: ...
def register_backend(
    name: str | Backend | None = None, fn: Backend | None = None, *, help: str = "", needs: str = "", aliases: Sequence[str] = (),
    fixed_sizes: bool = False, slow: bool = False,
) -> Any:  # fmt: skip
    """Make `fn` known as `name`; a later registration replaces an earlier one.

    ``register_backend("mine", fn)``, or as decorator: ``@register_backend`` (the function's own name), ``@register_backend("mine")``. `fixed_sizes`, `slow`: see BackendEntry.
    """
    if callable(name):
        return register_backend(
            str(getattr(name, "__name__", "")), name, help=help, needs=needs, aliases=aliases, fixed_sizes=fixed_sizes, slow=slow
        )
    if fn is None:
        return lambda found: register_backend(
            name or found.__name__, found, help=help, needs=needs, aliases=aliases, fixed_sizes=fixed_sizes, slow=slow
        )
    if not isinstance(name, str) or not name:
        raise UserError("U001", function="register_backend", expected="a name", got=repr(name))
    if not callable(fn):
        raise UserError("U001", function="register_backend", expected="a callable", got=repr(fn))
    doc = (getattr(fn, "__doc__", None) or "").strip().split("\n")[0]
    _entries[name] = BackendEntry(name, fn, help or doc, needs, tuple(aliases), fixed_sizes, slow)
    return fn


def list_backends(exclude_unavailable: bool = True) -> list[str]:
    """Names that `backend=` accepts, sorted; with ``False`` also those whose package is not installed."""
    return sorted(entry.name for entry in _entries.values() if entry.available or not exclude_unavailable)


def backend_entries() -> list[BackendEntry]:
    """All rows, sorted by name."""
    return [_entries[name] for name in sorted(_entries)]


def lookup_backend(backend: str | Backend) -> Backend:
    """The callable for a name; a callable is its own backend. Unknown and unavailable names raise UserError."""
    if not isinstance(backend, str):
        if callable(backend):
            return backend
        raise UserError("U001", function="lookup_backend", expected="a backend name or a callable", got=repr(backend))
    entry = _entries.get(backend) or next((e for e in _entries.values() if backend in e.aliases), None)
    if entry is None:
        known = [*_entries, *(alias for e in _entries.values() for alias in e.aliases)]
        raise UserError("U002", name=backend, suggestion=did_you_mean(backend, known))
    if not entry.available:
        raise UserError("U201", name=backend, reason=f"the package {entry.needs} is not installed")
    return entry.fn


def takes_unknown_sizes(backend: Backend) -> bool:
    """Whether graphs for the backend may hold tensors whose sizes depend on data: unless its row says otherwise, it may (it can run any node)."""
    return not any(entry.fixed_sizes for entry in _rows_of(backend))


def takes_varying_sizes(backend: Backend) -> bool:
    """Whether a graph's inputs may have sizes that vary from call to call. Of the rows that must know sizes, ours make a callable for each (`backends/sized.py`)."""
    return not any(entry.fixed_sizes and entry.fn.__module__ != "magneto.backends.standard" for entry in _rows_of(backend))


def is_slow(backend: Backend) -> bool:
    """Whether a graph that is not expected again is better run as it is. Backends of the user's are called for every graph."""
    return any(entry.slow for entry in _rows_of(backend))


def _rows_of(backend: Backend) -> list[BackendEntry]:
    return [entry for entry in _entries.values() if entry.fn in (backend, getattr(backend, "__wrapped__", backend))]
