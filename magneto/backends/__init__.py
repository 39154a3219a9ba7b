"""Backends by name."""

from __future__ import annotations

from magneto.backends import foreign as foreign
from magneto.backends import standard as standard
from magneto.backends.registry import Backend, BackendEntry, backend_entries, list_backends, lookup_backend, register_backend

__all__ = ["Backend", "BackendEntry", "backend_entries", "list_backends", "lookup_backend", "register_backend"]
