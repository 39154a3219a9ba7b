"""Loads the extension by its file (no torch, not even the package) and helps to write regions by hand.

MAGNETO_EXTENSION names another build of it (another Python, a sanitizer).
"""

from __future__ import annotations

import dis
import glob
import importlib.util
import os
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def load_extension() -> ModuleType:
    loaded = sys.modules.get("magneto._C")
    if loaded is not None:
        return loaded
    pattern = os.environ.get("MAGNETO_EXTENSION") or os.path.join(ROOT, "magneto", "_C.*.so")
    tag = f"cpython-{sys.version_info[0]}{sys.version_info[1]}"
    files = [f for f in glob.glob(pattern) if tag in os.path.basename(f)]
    if not files:
        pytest.skip("magneto._C is not built for this Python", allow_module_level=True)
    spec = importlib.util.spec_from_file_location("magneto._C", files[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["magneto._C"] = module
    spec.loader.exec_module(module)
    return module


C = load_extension()


# ---- offsets and slots ----


def slots(code: CodeType) -> tuple[str, ...]:
    """Names of the localsplus slots, in order."""
    cells = tuple(name for name in code.co_cellvars if name not in code.co_varnames)
    return code.co_varnames + cells + code.co_freevars


def instructions(code: CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


def at(code: CodeType, opname: str, nth: int = 0, arg: str | None = None) -> int:
    """Offset of the nth instruction of that name (a prefix will do), optionally of that argument."""
    found = [i.offset for i in instructions(code) if i.opname.startswith(opname) and (arg is None or arg in i.argrepr)]
    return found[nth]


def after(code: CodeType, opname: str, nth: int = 0, arg: str | None = None) -> int:
    """Offset of the instruction that follows it."""
    offset = at(code, opname, nth, arg)
    return next(i.offset for i in instructions(code) if i.offset > offset)


def line(code: CodeType, text_line: int) -> int:
    """Offset of the first instruction of the nth line of the function (0 = def), prefixes included."""
    want = code.co_firstlineno + text_line
    positions = list(code.co_positions())
    first = next(i.offset for i in instructions(code) if i.opname == "RESUME")
    return next(2 * unit for unit, where in enumerate(positions) if where[0] == want and 2 * unit > first)


class Frames:
    """One policy whose regions are written by hand: `frames.region(function, offset)(fn)`."""

    def __init__(self) -> None:
        self.policy = C.Policy("test")
        self.table: dict[tuple[CodeType, int], Callable[..., Any]] = {}
        self.seen: list[tuple[str, int]] = []
        self.states: list[Any] = []
        C.set_compiler(self.compile)

    def compile(self, policy: Any, state: Any, missed: list[Any]) -> Any:
        if policy is not self.policy:
            return None
        self.seen.append((state.code.co_name, state.offset))
        self.states.append(state)
        fn = self.table.get((state.code, state.offset))
        if fn is None:
            return None
        n = len(state.locals) + len(state.stack)
        return C.Region(fn, tuple(range(n)))

    def region(self, function: Any, offset: int = 0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers a region; it gets every slot, then the whole stack."""
        code = function if isinstance(function, CodeType) else function.__code__

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            self.table[code, offset] = fn
            return fn

        return register

    def resume_at(self, function: Any, offset: int, stack: tuple[Any, ...] = (), **values: Any) -> None:
        """The region at the function's start: sets some slots, keeps the others, goes on at `offset`."""
        names = slots(function.__code__)
        unknown = set(values) - set(names)
        assert not unknown, unknown

        @self.region(function)
        def start(*args: Any) -> Any:
            made = tuple(v() if callable(v) and getattr(v, "fresh", False) else v for v in stack)
            return C.Resume(offset, tuple(values.get(name, C.KEEP) for name in names), made)

    def optimized(self, fn: Callable[..., Any]) -> Any:
        return C.Optimized(fn, self.policy)


def fresh(make: Callable[[], Any]) -> Callable[[], Any]:
    """Marks a stack value of `resume_at` that is made anew for each call (an iterator)."""

    def build() -> Any:
        return make()

    build.fresh = True  # type: ignore[attr-defined]
    return build
