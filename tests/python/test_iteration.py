"""Loops and iterators."""

# ruff: noqa

from __future__ import annotations

import collections
import collections.abc
import itertools
from typing import Any

import pytest
import torch

import magneto
from tests.compare import assert_equal
from tests.python.programs import Program, Programs, X, Y, check

programs = Programs()


@programs.add()
def for_else_break_continue(x):
    for i in range(10):
        if i == 1:
            continue
        if i == 4:
            break
        x = x + i
    else:
        x = x * 100
    for _ in range(2):
        x = x - 1
    else:
        x = x * 2
    return x


@programs.add()
def while_loops(x):
    n = 0
    while n < 5:
        n += 1
        if n == 3:
            continue
        x = x + n
    while True:
        n -= 1
        if n < 0:
            break
    return x * n


@programs.add(X, Y)
def over_tensors(x, y):
    total = 0
    for row in x:
        total = total + row * y
    a, b, c = x
    return total, a + b * c, list(y.unbind()), [len(x), *x.shape]


@programs.add()
def zip_enumerate_map_filter(x):
    a = [u * v for u, v in zip(x, range(3))]
    b = {i: v for i, v in enumerate("abc", 1)}
    c = list(map(lambda u, v: u + v, [1, 2], [3, 4]))
    d = list(filter(None, [0, 1, 2])) + list(filter(lambda v: v > 1, [0, 1, 2]))
    return a, b, c, d, list(zip([1, 2], "ab", (x, x))), list(reversed([1, 2, 3])), list(zip())


@programs.add()
def zip_strict(x):
    try:
        list(zip([1, 2], [1], strict=True))
    except ValueError as error:
        return x, str(error)
    return x


@programs.add()
def the_itertools(x):
    return (
        list(itertools.chain([1], (2, 3), [x])),
        list(itertools.chain.from_iterable([[1, 2], [3]])),
        list(itertools.islice(itertools.count(3, 2), 4)),
        list(itertools.repeat(x, 2)),
        list(itertools.product([1, 2], "ab")),
        list(itertools.combinations(range(4), 2)),
        list(itertools.permutations([1, 2, 3], 2)),
        list(itertools.accumulate([1, 2, 3, 4])),
        list(itertools.pairwise([1, 2, 3])),
        list(itertools.zip_longest([1, 2], [3], fillvalue=0)),
        [a for a, _ in zip(itertools.cycle([1, 2]), range(5))],
        list(itertools.starmap(lambda a, b: a * b, [(1, 2), (3, 4)])),
        list(itertools.takewhile(lambda v: v < 3, [1, 2, 3, 1])),
        list(itertools.dropwhile(lambda v: v < 3, [1, 2, 3, 1])),
    )


@programs.add()
def next_with_default(x):
    it = iter([1, 2])
    a = next(it)
    b = next(it, 9)
    c = next(it, 9)
    try:
        next(it)
    except StopIteration:
        d = "stopped"
    return x, a, b, c, d


@programs.add()
def iter_with_sentinel(x):
    state = [3]

    def step():
        state[0] -= 1
        return state[0]

    return x, list(iter(step, 0))


class Countdown:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == 0:
            raise StopIteration
        self.n -= 1
        return self.n


class Indexed:
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]

    def __iter__(self):
        return iter(self.items)


@programs.add()
def user_iterators(x):
    return [x * i for i in Countdown(3)], list(Indexed([1, x])), sum(Countdown(4)), 2 in Countdown(5)


@programs.add()
def min_max_sum_any_all(x):
    values = [3, 1, 2]
    return (
        x * max(values),
        min(values),
        sum(values),
        sum(values, 10),
        any(v > 2 for v in values),
        all(values),
        max(1, 5, 3),
        min("b", "a"),
        max([], default=4),
    )


@programs.add()
def nested_loops_with_tensors(x):
    out = []
    for i in range(2):
        for j in range(3):
            if (i + j) % 2:
                continue
            out.append(x[i, j])
    return torch.stack(out)


@programs.add({"a": X, "b": Y})
def over_dictionaries(d):
    out = {}
    for name, value in d.items():
        out[name + "2"] = value * 2
    for name in d:
        out[name] = len(name)
    return out, [v.sum() for v in d.values()], list(d.keys() & {"a"})


@programs.add()
def iterator_is_shared(x):
    it = iter(range(6))
    return x, list(zip(it, it)), list(it)


class Numbers(collections.abc.Sequence):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        if i >= 5:
            raise IndexError(i)
        return i + 1


@programs.add()
def a_generator_left_inside_a_try(x):
    return [x * a * b for a, b in zip([1, 2], Numbers())], 3 in Numbers(), Numbers().index(2), list(reversed(Numbers()))


@programs.add({"a": 1, "b": 2, "c": 3}, X)
def dictionaries_change_while_they_are_iterated(d, x):
    seen = []
    for key in d:
        d["c"] = 30
        seen.append(d[key])
    for key, value in d.items():
        d["b"] = 20
        seen.append(value)
    values = iter(d.values())
    first = next(values)
    d["b"] = 7
    errors = []
    try:
        for key in d:
            d[key + "x"] = 1
    except RuntimeError as error:
        errors.append(str(error))
    return x, seen, first, errors


@programs.add({"a": 1, "b": 2, "c": 3}, X)
def a_view_left_half_used(d, x):
    it = iter(d.values())
    return x + next(it), [x * v for v in it]


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)


class Plain(dict):
    pass


class Ordered(collections.OrderedDict):
    pass


@pytest.mark.parametrize("backend_break", [False, True])
@pytest.mark.parametrize("view", ["", "keys", "values", "items"])
@pytest.mark.parametrize("cls", [dict, Plain, collections.Counter, collections.OrderedDict, Ordered])
def test_derived_dictionaries_notice_changes(cls: type, view: str, backend_break: bool) -> None:
    """Iterators and views of classes derived from dict and OrderedDict are alive, in the region and where they leave it."""

    def walk(x: torch.Tensor, how: int) -> Any:
        table = cls()
        table["a"], table["b"] = 1, 2
        over = table if view == "" else getattr(table, view)()
        iterator, seen = iter(over), []
        try:
            for item in iterator:
                seen.append(item)
                if backend_break:
                    magneto.graph_break()
                if how == 1:
                    table["z"] = 3
                if how == 2:
                    table.pop("a", None)
                if len(seen) > 4:
                    break
        except RuntimeError as error:
            seen.append(str(error))
        return x + 1, seen, list(table), list(over), type(iterator).__name__, type(over).__name__

    for how in range(3):
        magneto.reset()
        x = torch.ones(2)
        assert repr(magneto.optimize("eager")(walk)(x, how)) == repr(walk(x, how))


CHANGING = {
    "deque": (
        lambda: collections.deque([1, 2, 3]),
        [lambda d: d.append(1), lambda d: d.rotate(1), lambda d: d.reverse(), lambda d: d.clear()],
    ),
    "dict": (lambda: {"a": 1, "b": 2}, [lambda d: d.update(c=1), lambda d: d.update(a=3)]),
    "items": (lambda: {"a": 1, "b": 2}, [lambda d: d.update(c=1)]),
    "set": (lambda: {1, 2, 3}, [lambda d: d.add(7), lambda d: d.add(1), lambda d: d.clear()]),
}


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("start", [iter, reversed])
@pytest.mark.parametrize("kind", CHANGING)
def test_iterators_of_what_changed_leave_the_region(kind: str, start: Any, taken: int) -> None:
    """An iterator that is stepped outside notices changes made inside before, and makes none of them twice."""
    make, changes = CHANGING[kind]
    if kind == "set" and start is reversed:
        pytest.skip("sets have no order")

    def walk(x: torch.Tensor, values: Any, change: Any) -> Any:
        it = start(values.items() if kind == "items" else values)
        for _ in range(taken):
            next(it, None)
        change(values)
        return x + 1, next(it, "end"), next(it, "end")

    def leave(x: torch.Tensor, values: Any, change: Any) -> Any:
        it = start(values.items() if kind == "items" else values)
        for _ in range(taken):
            next(it, None)
        change(values)
        return it

    def outcome(fn: Any, change: Any) -> Any:
        values = make()
        seen: list[Any] = []
        try:
            result = fn(torch.ones(2), values, change)
            seen.append(result if isinstance(result, tuple) else [*map(str, result)])
        except RuntimeError as error:
            seen.append(str(error))
        return repr((seen, list(values)))

    for change in changes:
        for fn in (walk, leave):
            magneto.reset()
            assert outcome(magneto.optimize("eager")(fn), change) == outcome(fn, change)


@pytest.mark.parametrize("base", [list, tuple])
def test_an_iterator_that_leaves_the_region_is_made_once(base: type) -> None:
    """A break inside a loop over a list whose class has an `__iter__` asked that again, and took its answer."""

    class Counted(base):
        asked = 0

        def __iter__(self):
            Counted.asked += 1
            return super().__iter__() if Counted.asked == 1 else iter("no")

    class Place(int):
        def __index__(self):
            return 1

    def walk(x: torch.Tensor, values: Any) -> Any:
        seen = []
        for value in values:
            x = x + value
            magneto.graph_break()
            seen.append(value)
        return x, seen, Counted.asked, "abc"[Place(2)]

    found = []
    for fn in (walk, magneto.optimize("eager")(walk)):
        Counted.asked = 0
        found.append(fn(X, Counted([1, 2, 3])))
    assert_equal(*found)
