"""The registry of the small programs: one per language feature. Each is run plain and traced, twice, and must be captured without a break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import magneto
from tests.compare import Capturing, same

X = torch.arange(12.0).reshape(3, 4) / 7 - 0.5
Y = torch.linspace(-1, 1, 4)


@dataclass(frozen=True)
class Program:
    """A function and its arguments; `graphs`: how many graphs capture may give at most (None: breaks are expected); `again`: the second call compiles nothing."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    graphs: int | None
    again: bool = True


class Programs(list[Program]):
    """The programs of one file."""

    def add(self, *args: Any, graphs: int | None = 1, again: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: the program's arguments (X by default)."""

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            self.append(Program(fn, args or (X,), graphs, again))
            return fn

        return register

    def ids(self) -> list[str]:
        return [program.fn.__name__ for program in self]


def check(program: Program) -> None:
    """Plain against traced; a second call takes the region compiled by the first."""
    backend = Capturing()
    compiled = magneto.optimize(backend, nopython=program.graphs is not None)(program.fn)
    same(program.fn, compiled, *program.args)
    first = len(backend.graphs)
    same(program.fn, compiled, *program.args)
    if program.again and not any(isinstance(arg, torch.nn.Module) for arg in program.args):  # a copy of a module is another module
        assert len(backend.graphs) == first, "the second call compiled again"
    if program.graphs is not None:
        assert first <= program.graphs  # none for a program without tensor operations
