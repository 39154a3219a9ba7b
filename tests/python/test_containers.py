"""Lists, tuples, dictionaries, sets, deques: reading, building, changing, and changes to what the caller owns."""

# ruff: noqa

from __future__ import annotations

import builtins
import collections
import sys
from typing import NamedTuple

import pytest
import torch

import magneto
from tests.compare import Capturing, same
from tests.python.programs import Program, Programs, X, Y, check

programs = Programs()


@programs.add()
def list_methods(x):
    items = [x]
    items.append(x + 1)
    items.extend([x + 2, x + 3])
    items.insert(1, x * 5)
    last = items.pop()
    second = items.pop(1)
    items.reverse()
    items += [last]
    items[0] = items[0] * 2
    del items[1]
    return items, second, len(items), items.copy(), items[::-1], items * 2


@programs.add()
def list_searching(x):
    items = [3, 1, 2, 3]
    items.sort()
    items.remove(2)
    return x * items.index(3), items.count(3), sorted(items, reverse=True), 1 in items, 5 not in items


@programs.add()
def slices(x):
    items = [x, x + 1, x + 2, x + 3]
    items[1:3] = [x * 9]
    del items[::2]
    return items, (1, 2, 3, 4)[1:-1], "hello"[::-1], list(range(10))[2:8:2]


@programs.add()
def comprehensions(x):
    return (
        [v * i for i, v in enumerate(x)],
        {i: x * i for i in range(3)},
        {i % 2 for i in range(5)},
        [a + b for a in range(2) for b in range(2) if a != b],
    )


@programs.add()
def tuples(x):
    a = (x, 1)
    b = a + (2, 3)
    return b, b[1:].index(2), b[1:].count(1), len(b), b[1:] == (1, 2, 3), (1, 2) < (1, 3), a * 2


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    label: str = "none"

    def shifted(self, by):
        return self._replace(x=self.x + by)


Pair = collections.namedtuple("Pair", ["left", "right"])


@programs.add()
def named_tuples_and_other_kinds(x):
    point = Point(x, x + 1)
    return x * 2, point == "label", point != "label", point in ("a", 3), point == 3, [point] == ["a"], point == [x], point == None  # noqa: E711


@programs.add()
def named_tuples(x):
    p = Point(x, y=x + 1)
    q = p.shifted(2)
    left, right = Pair(1, x)
    return p, q.x, q.label, p[1], len(p), p._fields, right * left, Pair(left=x, right=2)._asdict()


@programs.add()
def dict_methods(x):
    d = {"a": x, "b": x + 1}
    d["c"] = x * 2
    d.update(e=1, f=2)
    d.update({"g": 3})
    d.setdefault("a", 5)
    d.setdefault("h", 6)
    popped = d.pop("b")
    missing = d.pop("zz", None)
    del d["e"]
    last = d.popitem()
    return (
        d,
        popped,
        missing,
        last,
        list(d),
        list(d.keys()),
        list(d.values()),
        list(d.items()),
        d.get("q"),
        d.get("q", 7),
        "a" in d,
        len(d),
        d.copy(),
    )


@programs.add()
def dict_merging(x):
    a, b = {"k": 1, "l": 2}, {"l": 3}
    a |= {"m": 4}
    return {**a, **b}, a | b, dict(a, z=x), dict([("p", x), ("q", 1)]), dict(zip("ab", (x, x + 1))), dict.fromkeys("xy", 0)


@programs.add()
def dict_order(x):
    d = {"a": 1, "b": 2}
    del d["a"]
    d["a"] = 3
    d["b"] = x
    return d, list(reversed(list(d)))


@programs.add()
def dict_with_other_keys(x):
    d = {1: x, (1, 2): x + 1, None: 2, True: 5, torch.float32: 4, "s": 6, Point: 7, torch.relu: 8}
    return d[1], d[(1, 2)], d[None], d[torch.float32], len(d), d[Point], d[torch.relu]


@programs.add()
def ordered_and_default_dicts(x):
    o = collections.OrderedDict(a=1, b=x)
    o.move_to_end("a")
    d = collections.defaultdict(list)
    d["k"].append(x)
    d["k"].append(2)
    n = collections.defaultdict(int)
    n["z"] += 3
    return o, list(o), d, n, o.popitem(last=False)


@programs.add()
def sets(x):
    s = {1, 2}
    s.add(3)
    s.discard(9)
    s.update([4, 5])
    s.remove(1)
    f = frozenset([2, 7])
    return (
        x * len(s),
        sorted(s | f),
        sorted(s & f),
        sorted(s - f),
        sorted(s ^ f),
        3 in s,
        s.isdisjoint({9}),
        s >= {2},
        s.issubset({2, 3, 4, 5, 6}),
        f == {2, 7},
    )


@programs.add()
def deques(x):
    q = collections.deque([1, 2])
    q.append(x)
    q.appendleft(0)
    a = q.popleft()
    b = q.pop()
    return a, b * 2, list(q), len(q), q[0]


@programs.add()
def nested_containers(x):
    tree = {"a": [x, {"b": (x + 1, [x + 2])}]}
    tree["a"][1]["b"][1].append(x * 3)
    return tree


@programs.add()
def aliasing_is_kept(x):
    a = [x]
    b = [a, a]
    b[0].append(x + 1)
    return b, b[0] is b[1]


@programs.add()
def cycles(x):
    a = [1]
    a.append(a)
    return x + len(a) + len(a[1][1])


@programs.add()
def sorting_with_keys(x):
    rows = [("b", 2), ("a", 3), ("c", 1)]
    return x, sorted(rows), sorted(rows, key=lambda row: row[1]), max(rows), min(rows, key=lambda row: row[1]), sorted("hello")


@programs.add()
def unpacking_errors(x):
    try:
        a, b = [1, 2, 3]
    except ValueError as error:
        first = str(error)
    try:
        a, b, c = (1, 2)
    except ValueError as error:
        second = str(error)
    return x, first, second


@programs.add()
def errors_of_containers(x):
    texts = []
    for attempt in (
        lambda: [1][3],
        lambda: {}["k"],
        lambda: (1,)[2],
        lambda: [].pop(),
        lambda: {}.pop("z"),
        lambda: [1].index(2),
        lambda: {[]: 1},
    ):
        try:
            attempt()
        except Exception as error:
            texts.append((type(error).__name__, str(error)))
    return x, texts


# -- what the caller owns


@programs.add([X, 1])
def argument_list_changes(items):
    items.append(items[0] * 2)
    items[1] = 5
    items.insert(0, "first")
    return items[1] + 1


@programs.add({"a": X, "n": 3})
def argument_dict_changes(d):
    d["b"] = d["a"] + d["n"]
    d["n"] += 1
    del d["a"]
    d.setdefault("z", []).append(1)
    return d["b"] * 2


@programs.add([1, 2, 3], X)
def argument_list_is_iterated_while_it_grows(items, x):
    for item in items:
        if len(items) < 6:
            items.append(item * 10)
    return x * sum(items)


@programs.add([X, Y], X)
def old_item_after_replacement(items, x):
    old = items[0]
    items[0] = x * 3
    return old, items[0] + 1


@programs.add({1, 2}, X)
def argument_set_changes(s, x):
    s.add(7)
    s.discard(1)
    return x * len(s)


@programs.add({"a": {"b": [X]}}, X)
def nested_argument_changes(d, x):
    d["a"]["b"].append(x)
    d["a"]["c"] = len(d["a"]["b"])
    return x + d["a"]["c"]


@programs.add(collections.OrderedDict(a=1, b=2), X)
def ordered_argument_changes(o, x):
    o["c"] = 3
    o.move_to_end("a")
    return x * len(o), list(o)


@programs.add(collections.defaultdict(list, k=[1]), X)
def default_argument_changes(d, x):
    d["new"].append(2)
    d["k"].append(3)
    return x + len(d["k"])


@programs.add((X, (Y, 2)), {"k": [1, {"z": X}]})
def reading_nested_arguments(pair, d):
    x, (y, n) = pair
    return x + y * n, d["k"][1]["z"] + d["k"][0]


@programs.add([3, 1, 2], X)
def sorting_an_argument(items, x):
    items.sort()
    items.reverse()
    items.extend(i for i in range(2))
    return x * items[0]


@programs.add({(list, 1): 5.0, (len, (dict, 2)): 3.0}, X)
def keys_that_hold_classes_and_functions(table, x):
    return (
        x * table[(list, 1)] + table.get((len, (dict, 2)), 7.0) + table.get((len, (dict, 3)), 11.0),
        (list, 1) in table,
        (dict, 1) in table,
    )


def test_presence_is_guarded_key_by_key():
    """A dictionary that grows elsewhere is no reason to compile again; one that loses the key is."""

    def fn(x, table):
        return x + 1 if list in table and "a" in table else x - 1

    backend = Capturing()
    compiled = magneto.optimize(backend, nopython=True)(fn)
    table = {list: 1, "a": 2}
    same(fn, compiled, X, table)
    same(fn, compiled, X, table | {dict: 1, "b": 3})
    assert len(backend.graphs) == 1
    same(fn, compiled, X, {list: 1, "b": 2})
    same(fn, compiled, X, {"a": 1, dict: 2})
    same(fn, compiled, X, {"a": 5, list: None})
    assert len(backend.graphs) == 2 + 1


class Key:
    pass


ONE, TWO = Key(), Key()
TABLE = {ONE: 1.0, TWO: 2.0, (ONE, TWO): 3.0}
IDS, KNOWN = {id(ONE): 0.25, id(TWO): 0.125}, {id(TWO)}


@programs.add(graphs=None, again=False)
def items_that_change_their_container_when_compared(x):
    class Clears:
        def __init__(self, which):
            self.which = which

        def __hash__(self):
            return 0

        def __eq__(self, other):
            self.which.clear()
            return NotImplemented

    one, two = [], []
    one.append(Clears(two))
    two.append(Clears(one))
    said = [one == two]
    for action in (list.__contains__, list.index, list.count, list.remove):
        clearing = []
        clearing += [Clears(clearing), Clears(clearing), 3]
        try:
            said.append(action(clearing, 3))
        except ValueError as error:
            said.append(str(error))
    other = {i: 0 for i in range(1, 20)}
    other[Clears(other)] = 0
    try:
        {Clears([]): 0, 1: 1}.update(other)
    except RuntimeError as error:
        said.append(str(error))
    return x + 1, said


@programs.add()
def dictionaries_that_answer_for_their_keys(x):
    class Backwards(dict):
        def keys(self):
            return reversed(list(dict.keys(self)))

        __iter__ = keys

    class Hiding(dict):
        def keys(self):
            return ["b"]

    d = Backwards([("a", 1), ("b", 2)])
    return x + 1, list(dict(d)), list({**d}), list({"z": 1} | d), dict(Hiding(a=1, b=2)), {"a": 3} | Hiding(a=1, b=2)


@programs.add()
def the_mapping_of_a_view(x):
    d = {}
    views = [d.keys().mapping, d.values().mapping, d.items().mapping]
    d["k"] = 1
    return x + 1, [view == d for view in views], [type(view).__name__ for view in views]


def test_look_up_of_other_objects():
    """What an object is found under in an existing dictionary depends on which object it is."""

    def fn(x, key):
        return x * TABLE.get(key, 5.0) + (key in TABLE) + TABLE.get((key, TWO), 7.0) + IDS.get(id(key), 0.5) + (id(key) in KNOWN)

    compiled = magneto.optimize("eager", nopython=True)(fn)
    for key in (ONE, TWO, Key(), ONE):
        assert torch.equal(compiled(X, key), fn(X, key))


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)


def test_popitem_is_popitem_outside() -> None:
    """An instance dictionary that has lost its last key by popitem is laid out anew; `del` would not do that."""

    class Shared:
        def __init__(self):
            self.x, self.y, self.z = 1, 2, 3

    def pop(x):
        return x + 1, d.popitem()

    sizes = []
    for fn in (pop, magneto.optimize("eager", nopython=True)(pop)):
        first, d = Shared(), vars(Shared())
        sizes.append((fn(X)[1], sys.getsizeof(d)))
    assert sizes[0] == sizes[1]


def test_builtins_replaced_while_a_region_is_kept() -> None:
    """The generated text means Python's own functions, whatever the program has put in their place since."""
    own = iter

    def step(x):
        return x + 1, own((1, 2))

    def fail(*args):
        raise AssertionError("the program's function has been called")

    compiled = magneto.optimize("eager", nopython=True)(step)
    compiled(X)
    before = magneto.stats()["hook"]["reruns"]
    builtins.iter = fail  # type: ignore[assignment]
    try:
        assert compiled(X)[1].__length_hint__() == 2
    finally:
        builtins.iter = own
    assert magneto.stats()["hook"]["reruns"] == before
