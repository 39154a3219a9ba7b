"""Sets that hold objects and exist before the region: asked for elements, changed, met in the middle of a generator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto


class Thing:
    pass


def both(program: Callable[..., Any], calls: Callable[[], list[tuple[Any, ...]]]) -> tuple[int, int]:
    """Runs the program's calls plain and optimised, each on arguments of its own; (breaks, graphs)."""
    results = []
    magneto.reset()
    for fn in (program, magneto.optimize("eager")(program)):
        outcome = []
        for args in calls():
            try:
                outcome.append(fn(*args))
            except Exception as error:
                outcome.append((type(error), str(error).partition(" at 0x")[0]))
        results.append(outcome)
    assert repr(results[0]) == repr(results[1])
    stats = magneto.stats()
    return stats["breaks"], stats["graphs"]


def count(x: torch.Tensor, seen: set[Any], objects: list[Any]) -> tuple[Any, ...]:
    answers = []
    for obj in objects:
        answers.append(obj in seen)
        seen.add(obj)
    return x * sum(answers), answers, len(objects)


def test_the_same_objects_may_come_or_not() -> None:
    def calls() -> list[tuple[Any, ...]]:
        a, b, c = Thing(), nn.Linear(1, 1), torch.ones(2)
        seen = {a, "text", 3}
        rows = [[b, c, Thing()], [a, b, a], [Thing(), c, b], [Thing(), Thing(), Thing()], [b, b, b]]
        return [(torch.ones(1), seen, row) for row in rows]

    assert both(count, calls)[0] == 0


def test_two_objects_that_become_one() -> None:
    """A region that adds one and asks for the other holds only while they are two."""

    def ask(x: torch.Tensor, seen: set[Any], a: Any, b: Any) -> tuple[Any, ...]:
        seen.add(a)
        found = b in seen
        seen.discard(a)
        return x + 1, found

    def calls() -> list[tuple[Any, ...]]:
        a, b, x = Thing(), Thing(), torch.ones(1)
        return [(x, {x}, a, b), (x, {x}, a, a), (x, {x, b}, a, b), (x, {x}, b, a)]

    assert both(ask, calls)[0] == 0


def test_removing() -> None:
    def remove(x: torch.Tensor, seen: set[Any], obj: Any, made: bool) -> Any:
        seen.remove(obj)
        obj = Thing() if made else obj
        return x * 2, obj in seen

    def calls() -> list[tuple[Any, ...]]:
        a, x = Thing(), torch.ones(1)
        seen: set[Any] = {a, x}
        return [(x, seen, a, False), (x, seen, a, False), (x, seen, x, True), (x, {a}, a, True)]

    both(remove, calls)


def test_what_does_not_hash_by_its_address_breaks() -> None:
    def ask(x: torch.Tensor, seen: set[Any], obj: Any) -> Any:
        return x * 2, obj in seen, obj

    def calls() -> list[tuple[Any, ...]]:
        a, x = Thing(), torch.ones(1)
        return [(x, {a, (1, 2)}, (1, 2)), (x, {a, (1, 2)}, (2, 1)), (x, {a, 5}, 5), (x, {a, 5}, 6)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert both(ask, calls)[0] > 0


def test_a_set_equals_a_frozenset() -> None:
    def compare(x: torch.Tensor, a: Any, b: Any) -> Any:
        return x + 1, a == b, b == a, a != b

    def calls() -> list[tuple[Any, ...]]:
        a, x = Thing(), torch.ones(1)
        return [(x, frozenset({a}), {a}), (x, {a}, frozenset({a, x})), (x, {a}, [a]), (x, {1}, frozenset({a})), (x, {a}, {a})]

    both(compare, calls)


def test_elements_are_seen_by_the_program() -> None:
    """What the region adds is there for a function that nobody can capture, and what that changes is seen by the region after it."""

    def run(x: torch.Tensor, seen: set[Any], obj: Any) -> Any:
        seen.add(obj)
        x = x + len(sorted(map(id, seen)))
        magneto.graph_break()
        seen.discard(obj)
        return x * (obj in seen), len(seen)

    def calls() -> list[tuple[Any, ...]]:
        a = Thing()
        return [(torch.ones(1), {a}, Thing()), (torch.ones(1), {a}, a)]

    both(run, calls)


@pytest.mark.parametrize("walk", ["named_parameters", "named_modules", "named_buffers"])
def test_a_break_in_a_loop_over_a_module(walk: str) -> None:
    """Each iteration goes on in the middle of torch's generator, with its set of what it has seen."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))
            self.tied = self.layers[0]

    def loop(net: nn.Module, x: torch.Tensor) -> Any:
        names = []
        for name, _ in getattr(net, walk)():
            x = x * 2
            magneto.graph_break()
            names.append(name)
        return x, names

    net = Net()
    net.eval()
    breaks, graphs = both(loop, lambda: [(net, torch.ones(1))] * 2)
    n = len(list(getattr(net, walk)()))
    assert breaks <= n, "only where the program breaks"
    assert graphs <= n + 1
