"""Loops with a break in them: the iterator lies on the stack of the resumed frame, or in a variable, and the region looks into it.

The programs run with breaks after each statement in test_with_breaks.py; here the numbers of graphs and breaks are asserted.
"""

# ruff: noqa

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magneto
from tests.compare import Capturing, same
from tests.python.programs import Program, Programs, check

programs = Programs()
XS = [torch.tensor([float(v), 1.0]) for v in (1, -2, 3, -4, 5, -6)]


@pytest.fixture(autouse=True)
def fresh() -> Any:
    magneto.reset()
    with magneto.config.patch(suppress_errors=False):
        yield
    magneto.reset()


@programs.add(XS)
def over_a_list(xs):
    total = torch.zeros(2)
    for x in xs:
        total = total * 2
        total = total + x
    return total


@programs.add(XS)
def over_a_tuple(xs):
    total = torch.zeros(2)
    for x in tuple(xs):
        total = total * 2
        total = total + x
    return total


@programs.add(XS)
def enumerated(xs):
    total = torch.zeros(2)
    for i, x in enumerate(xs, 3):
        total = total * i
        total = total + x
    return total


@programs.add(XS)
def zipped(xs):
    total = torch.zeros(2)
    for a, b, c in zip(xs, xs[1:], (1, 2, 3)):
        total = total * a
        total = total + b * c
    return total


@programs.add(XS)
def zip_takes_from_the_first_before_the_second_ends(xs):
    first, second = iter(xs), iter(xs[:2])
    total = torch.zeros(2)
    for a, b in zip(first, second):
        total = total * a
        total = total + b
    return total, next(first), list(first), list(second)


@programs.add(XS)
def zip_strict(xs):
    total = torch.zeros(2)
    try:
        for a, b in zip(xs, xs[:3], strict=True):
            total = total * a
            total = total + b
    except ValueError as error:
        return total, str(error)


@programs.add(XS)
def ranges(xs):
    total = torch.zeros(2)
    for i in range(1, 20, 3):
        total = total + i
        total = total * 0.5
    for i in range(5, -5, -2):
        total = total - i
        total = total * 2
    return total


@programs.add(XS)
def nested_loops_over_dictionaries(xs):
    table = {f"k{i}": x for i, x in enumerate(xs)}
    total, names = torch.zeros(2), ""
    for name, x in table.items():
        total = total + x
        names += name
        for value in table.values():
            total = total * 0.9
            total = total + value
        for key in table:
            names += key[1]
            total = total + 1
    return total, names


@programs.add(XS)
def mapped_and_filtered(xs):
    total, seen = torch.zeros(2), []

    def doubled(x):
        seen.append(len(seen))
        return x * 2

    for x in map(doubled, xs):
        total = total * 0.5
        total = total + x
    for n in filter(lambda n: n % 2, range(9)):
        total = total + n
        total = total * 0.5
    for n in filter(None, [0, 1, None, 2, ""]):
        total = total + n
        total = total * 0.5
    return total, seen


@programs.add(XS)
def reversed_containers(xs):
    total = torch.zeros(2)
    for x in reversed(xs):
        total = total * 0.5
        total = total + x
    for x in reversed(tuple(xs)):
        total = total * 0.5
        total = total - x
    for i in reversed(range(4)):
        total = total * 0.5
        total = total - i
    for key in reversed({1: 2, 3: 4}):
        total = total * 0.5
        total = total - key
    return total


@programs.add(XS)
def texts_and_sets(xs):
    total, found = torch.zeros(2), ""
    for letter in "abc\u0130":
        total = total + ord(letter)
        found += letter
    for number in {3, 1, 2}:
        total = total * number
        found += str(number)
    return total, found


@programs.add(XS)
def a_shared_iterator(xs):
    it = iter(xs)
    total = torch.zeros(2)
    for x in it:
        total = total + x
        other = next(it, None)
        if other is not None:
            total = total * other
    return total, list(it)


@programs.add(XS)
def an_iterator_zipped_with_itself(xs):
    it = iter(xs)
    total = torch.zeros(2)
    for a, b in zip(it, it):
        total = total * a
        total = total + b
    return total


@programs.add(XS)
def a_list_that_grows(xs):
    queue, total = xs[:2], torch.zeros(2)
    for x in queue:
        total = total + x
        if len(queue) < 7:
            queue.append(x * 2)
        total = total * 2
    return total, queue


@programs.add(XS)
def a_list_that_shrinks(xs):
    total, rest = torch.zeros(2), list(xs)
    for x in rest:
        total = total + x
        rest.pop()
        total = total * 2
    return total, rest


@programs.add(XS)
def a_dictionary_that_grows(xs):
    table = {"a": 1, "b": 2}
    total = xs[0]
    try:
        for key in table:
            total = total * table[key]
            table[key] = 5
            total = total + 1
            table[key + "x"] = 3
    except RuntimeError as error:
        return total, table, str(error)


@programs.add(XS)
def left_and_continued(xs):
    total = torch.zeros(2)
    for i, x in enumerate(xs):
        if i == 1:
            continue
        total = total + x
        if i == 4:
            break
        total = total * 2
    else:
        total = total * 100
    for i, x in enumerate(xs):
        total = total + i
    else:
        total = total * 100
    return total, i


@programs.add(XS)
def the_rest_of_an_iterator(xs):
    it = enumerate(xs)
    i, x = next(it)
    total = x * i
    rest = list(it)
    total = total + rest[0][1]
    again = zip(xs, range(9))
    next(again)
    total = total + next(again)[0]
    return total, rest, [n for _, n in again]


class Countdown:
    """An iterator of the program's own."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == 0:
            raise StopIteration
        self.n -= 1
        return self.n


@programs.add(XS)
def the_programs_own_iterator(xs):
    total, count = torch.zeros(2), Countdown(5)
    for n in count:
        total = total + n
        total = total * 0.5
    for n, x in zip(Countdown(3), xs):
        total = total + n
        total = total * x
    return total, count.n


@programs.add(XS)
def iterators_are_taken_from_as_far_as_needed(xs):
    numbers, letters = iter(range(10)), iter("abcdef")
    found = 3 in numbers, "z" in letters, next(numbers), next(letters, None)
    some = map(lambda n: n * 2, range(5))
    try:
        a, b = some
    except ValueError as error:
        return xs[0] * next(some), found, str(error), list(some), any(numbers), next(numbers), all(iter([1, 0, 1]))


@programs.add(XS)
def bytes_and_keys_that_are_tuples(xs):
    total = torch.zeros(2)
    for byte in b"abc":
        total = total + byte
        total = total * 0.5
    for (name, n), x in {("a", 1): xs[0], ("b", 2): xs[1]}.items():
        total = total * n
        total = total + x
    return total, name


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)


# -- what a break in a loop costs


def counted(fn: Callable[..., Any], *calls: tuple[Any, ...]) -> list[tuple[int, int]]:
    """(breaks, graphs) that each of the calls adds; the results are eager's."""
    backend = Capturing()
    compiled = magneto.optimize(backend)(fn)
    found = []
    for args in calls:
        breaks, graphs = magneto.stats()["breaks"], len(backend.graphs)
        same(fn, compiled, *args)
        found.append((magneto.stats()["breaks"] - breaks, len(backend.graphs) - graphs))
    return found


OTHER = [x * 3 for x in XS]
LONGER = XS + [-x for x in XS]
LOOPS: list[tuple[Callable[..., Any], list[tuple[int, int]]]] = []
"""Functions called with XS, OTHER, LONGER: what each call adds. A data-dependent branch has two entry points: the start and the branch's ways each get a region with
a break; a second variant of one of them goes on to the loop's end. What looks at the whole container first (slices, dictionaries) is captured again for another length."""


def loop(*costs: tuple[int, int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        LOOPS.append((fn, list(costs)))
        return fn

    return register


@loop((3, 4), (0, 0), (0, 1))
def branch_over_a_list(xs):
    total = torch.zeros(2)
    for x in xs:
        if x.sum() > 0:
            total = total + x
        else:
            total = total - 2 * x
    return total


@loop((3, 4), (0, 0), (1, 2))
def branch_over_a_reversed_tuple(xs):
    total = torch.zeros(2)
    for x in reversed((*xs, XS[0])[-7:]):
        if x.sum() > 0:
            total = total + x
        else:
            total = total - 2 * x
    return total


@loop((3, 4), (0, 0), (0, 1))
def branch_over_a_zip(xs):
    total = torch.zeros(2)
    for a, b in zip(xs, xs):
        if a.sum() > 0:
            total = total + b
        else:
            total = total * b
    return total


@loop((3, 4), (0, 0), (0, 1))
def branch_in_a_comprehension(xs):
    return [x + 1 if x.sum() > 0 else x - 1 for x in xs]


@loop((3, 4), (0, 0), (0, 1))
def branch_over_a_map(xs):
    total = torch.zeros(2)
    for x in map(lambda x: x * 2, xs):
        if x.sum() > 0:
            total = total + x
        else:
            total = total - 2 * x
    return total


@loop((3, 4), (0, 0), (1, 1))
def numbers_that_are_not_read(xs):
    total, last = torch.zeros(2), None
    for i, x in enumerate(xs[:6]):
        if x.sum() > 0:
            total = total + x
        else:
            total = total - 2 * x
        last = i
    return total, last


@loop((3, 4), (0, 0), (1, 2))
def values_of_a_dictionary(xs):
    table = {i: x for i, x in enumerate(xs)}
    total = torch.zeros(2)
    for x in table.values():
        if x.sum() > 0:
            total = total + x
        else:
            total = total - 2 * x
    return total


def inlined(xs):
    total = torch.zeros(2)
    for x in xs:
        if x.sum() > 0:
            total = total + x
        else:
            total = total - 2 * x
    return total


@loop((3, 5), (0, 0), (0, 1))
def loop_in_a_callee(xs):
    return inlined(xs) * 2


@pytest.mark.parametrize(("fn", "costs"), LOOPS, ids=[fn.__name__ for fn, _ in LOOPS])
def test_one_break_for_each_decision(fn: Callable[..., Any], costs: list[tuple[int, int]]) -> None:
    assert counted(fn, (XS,), (OTHER,), (LONGER,)) == costs


class Layers(torch.nn.Module):
    """Layers that are dropped by chance, as LayerDrop does."""

    def __init__(self, n):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()) for _ in range(n)])

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if x.sum() > 1e9:
                continue
            x = layer(x)
        return x


def test_layers_that_are_alike_share_a_region() -> None:
    model = Layers(20)
    assert counted(model, (XS[0],)) == [(3, 4)]
    with torch.no_grad():
        model.layers[7][0].weight.mul_(2)
    assert counted(model, (XS[0],), (XS[1],))[1] == (0, 0)


def test_modules_made_for_each_call_share_a_region() -> None:
    """The one before is gone when its successor comes (the losses of detection transformers)."""

    class Scaled(torch.nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def forward(self, x):
            magneto.graph_break()
            return x * self.by

    compiled = magneto.optimize(backend := Capturing())(lambda x, by: Scaled(by)(x + 1) + 1)
    for _ in range(6):
        assert torch.equal(compiled(XS[0], 2), (XS[0] + 1) * 2 + 1)
    count = len(backend.graphs)
    for _ in range(6):
        assert torch.equal(compiled(XS[0], 2), (XS[0] + 1) * 2 + 1)
        assert torch.equal(compiled(XS[0], 3), (XS[0] + 1) * 3 + 1)
    assert count <= 5 and len(backend.graphs) <= count + 3


def test_a_layer_that_differs_is_seen() -> None:
    model = Layers(6)
    compiled = magneto.optimize("eager")(model)
    same(model, compiled, XS[0])
    model.layers[3] = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    assert torch.equal(compiled(XS[0]), model(XS[0]))
    model.layers[4][0].register_forward_hook(lambda module, args, result: result + 1)
    assert torch.equal(compiled(XS[0]), model(XS[0]))
    model.layers[2][0].forward = lambda x: x * 3
    assert torch.equal(compiled(XS[0]), model(XS[0]))


def test_other_modules_of_the_class_and_their_identity() -> None:
    modules = [torch.nn.Linear(2, 2) for _ in range(12)]
    names = {module: n for n, module in enumerate(modules)}

    def f(module, other, x):
        return module(x), names[module], module is other, hash(module) == hash(modules[3]), id(module) == id(modules[3])

    compiled = magneto.optimize("eager")(f)
    with magneto.config.patch(recompile_limit=50):
        for module in modules:
            assert compiled(module, modules[2], XS[0])[1:] == f(module, modules[2], XS[0])[1:]

    def g(module, x):
        return module(x) * 2

    backend = Capturing()
    compiled = magneto.optimize(backend)(g)
    for module in modules:
        assert torch.equal(compiled(module, XS[0]), g(module, XS[0]))
    assert len(backend.graphs) == 2


def test_an_iterator_given_as_an_argument() -> None:
    backend = Capturing()

    @magneto.optimize(backend)
    def step(it, x):
        a = next(it)
        b = next(it, None)
        return x * a if b is None else x * a + b

    for make in (iter, enumerate):
        it = make(LONGER + XS[:1])
        if make is enumerate:
            it = map(lambda pair: pair[1] * pair[0], it)
        seen = []
        while True:
            try:
                seen.append(step(it, XS[0]))
            except StopIteration:
                break
        assert len(seen) == 7
    assert len(backend.graphs) <= 6


def test_an_exception_in_the_middle_leaves_the_iterator_where_eager_does() -> None:
    def f(it, x):
        total = x
        for y in it:
            total = total + y
            magneto.graph_break()
            total = total @ y[:1]
        return total

    compiled = magneto.optimize("eager")(f)
    plain, ours = iter(XS), iter(XS)
    with pytest.raises(RuntimeError):
        f(plain, XS[0])
    with pytest.raises(RuntimeError):
        compiled(ours, XS[0])
    assert [id(x) for x in plain] == [id(x) for x in ours]


def test_an_iterator_that_is_another_ones() -> None:
    """What were two iterators, or two lists, are one in a later call."""

    def f(a, b, x):
        return x * next(a), next(b), x + next(a)

    def g(it, ys, x):
        ys.append(x * 2)
        for y in it:
            x = x + y
        return x

    compiled_f, compiled_g = magneto.optimize("eager")(f), magneto.optimize("eager")(g)
    for shared in (False, True, False):
        a, c = iter(XS), iter(XS)
        same_items = f(a, a if shared else iter(XS), XS[0]), compiled_f(c, c if shared else iter(XS), XS[0])
        assert str(same_items[0]) == str(same_items[1])
        xs, zs = list(XS), list(XS)
        ours, plain = compiled_g(iter(xs), xs if shared else [], XS[0]), g(iter(zs), zs if shared else [], XS[0])
        assert torch.equal(ours, plain)


def test_generators_and_unknown_iterators_break_once_an_iteration() -> None:
    def f(it):
        total = torch.zeros(2)
        for x in it:
            total = total * 2
            total = total + x
        return total

    for make in (lambda: (x for x in XS), lambda: itertools.chain(XS, XS), lambda: iter(collections.deque(XS))):
        compiled = magneto.optimize("eager")(f)
        breaks = magneto.stats()["breaks"]
        assert torch.equal(compiled(make()), f(make()))
        assert magneto.stats()["breaks"] - breaks <= 3


def test_unread_variables_are_not_guarded() -> None:
    backend = Capturing()

    @magneto.optimize(backend)
    def f(x, unused):
        return x + 1

    for unused in (1, "a", XS[0], torch.nn.Linear(1, 1)):
        f(XS[0], unused)
    assert len(backend.graphs) == 1
