"""functools, operator and itertools as programs use them."""

# ruff: noqa

from __future__ import annotations

import bisect
import functools
import sys
import heapq
import itertools
import operator

import pytest
import torch

import magneto
from tests.python.programs import Program, Programs, X, Y, check

programs = Programs()


def scale(x, factor=2.0, *, bias=0.0):
    return x * factor + bias


class Layer:
    def __init__(self, size):
        self.size = size
        self.calls = 0

    def apply(self, x, factor, bias=0.0):
        self.calls += 1
        return x * factor + bias + self.size

    double = functools.partialmethod(apply, 2.0)
    shifted = functools.partialmethod(apply, bias=5.0)

    @functools.cached_property
    def weight(self):
        self.calls += 1
        return torch.full((4,), float(self.size))

    @functools.singledispatchmethod
    def describe(self, arg):
        return "other"

    @describe.register
    def _(self, arg: int):
        return f"int {arg}"

    @describe.register(list)
    def _(self, arg):
        return f"list of {len(arg)}"


@programs.add()
def partials(x):
    f = functools.partial(scale, factor=3.0)
    g = functools.partial(f, bias=1.0)
    h = functools.partial(torch.add, x)
    return f(x), g(x), g(x, bias=2.0), h(x, alpha=2), g.func is scale, g.keywords, g.args, isinstance(g, functools.partial)


@programs.add()
def returned_partial(x):
    f = functools.partial(scale, x, bias=x.sum())
    f.note = "kept"
    return f.func.__name__, f.args, f.keywords, f(), f.note


@programs.add(X, functools.partial(scale, factor=4.0))
def partial_argument(x, f):
    return f(x) + f.keywords["factor"], f.func(x), repr(f.args)


@programs.add()
def partial_methods(x):
    layer = Layer(3)
    return layer.double(x), layer.shifted(x, 1.5), layer.calls


@programs.add()
def wrapped(x):
    def traced(fn):
        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            """wrapper's own"""
            return fn(*args, **kwargs) + 1

        return wrapper

    @traced
    def inner(a, b: int = 2) -> int:
        """inner's"""
        return a * b

    inner.extra = 5
    return (
        inner(x),
        inner.__name__,
        inner.__doc__,
        inner.__wrapped__(x),
        inner.__qualname__,
        inner.extra,
        inner.__module__,
        inner.__annotations__,
    )


@programs.add(graphs=None, again=False)
def updated_wrapper(x):
    def source(a):
        "text"
        return a

    source.mark = 7

    class Callable_:
        def __init__(self, fn):
            functools.update_wrapper(self, fn)
            self.fn = fn

        def __call__(self, a):
            return self.fn(a) * self.mark

    made = Callable_(source)
    return made(x), made.__name__, made.__doc__, made.__wrapped__ is source


@programs.add()
def reductions(x):
    total = functools.reduce(lambda a, b: a + b, [x, x * 2, x * 3])
    seeded = functools.reduce(operator.mul, (x, x), x + 1)
    only = functools.reduce(operator.add, [], x)
    try:
        functools.reduce(operator.add, [])
    except TypeError as error:
        text = str(error)
    return total, seeded, only, text


@programs.add()
def lru_cache_inside(x):
    calls = []

    @functools.lru_cache(maxsize=None)
    def fib(n):
        calls.append(n)
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    return x * fib(12), len(calls)


@programs.add()
def lru_cache_inside_info(x):
    @functools.lru_cache(maxsize=2)
    def square(n):
        return n * n

    values = [square(1), square(2), square(1), square(3), square(2)]
    info = square.cache_info()
    square.cache_clear()
    return x * sum(values), tuple(info), tuple(square.cache_info()), square.__wrapped__(5)


@programs.add()
def cache_inside_on_tensor_arguments(x):
    @functools.cache
    def size(n, *, scale=1):
        return n * scale

    return x + size(3) + size(3, scale=2) + size(4)


@programs.add()
def cached_properties(x):
    layer = Layer(3)
    first = layer.weight
    return x + layer.weight, first is layer.weight, layer.calls, "weight" in layer.__dict__


@functools.singledispatch
def visit(arg, x):
    return x


@visit.register
def _(arg: int, x):
    return x + arg


@visit.register(list)
def _visit_list(arg, x):
    for item in arg:
        x = visit(item, x)
    return x


@visit.register(str)
@visit.register(tuple)
def _visit_text(arg, x):
    return x * len(arg)


@programs.add()
def single_dispatch(x):
    return visit([1, 2, "abc", (1, 2), None, [True]], x), visit.dispatch(bool)(3, x), visit.registry[int](1, x)


@programs.add(graphs=None, again=False)
def single_dispatch_inside(x):
    @functools.singledispatch
    def go(arg):
        return "default"

    @go.register
    def _(arg: float):
        return "float"

    @go.register(torch.Tensor)
    def _(arg):
        return arg + 1

    return go(1), go(1.0), go(x)


@programs.add(again=False, graphs=1 if sys.version_info < (3, 13) else None)  # 3.13 keeps them in a dictionary of weak references
def single_dispatch_methods(x):
    layer = Layer(2)
    return layer.describe(3), layer.describe([1, 2]), layer.describe("s"), x + 1


@programs.add()
def comparison_keys(x):
    words = ["pear", "fig", "banana", "kiwi"]
    by = functools.cmp_to_key(lambda a, b: len(a) - len(b) or (a > b) - (a < b))
    low, high = by("fig"), by("pear")
    return sorted(words, key=by), max(words, key=by), low < high, low == by("fig"), x + 1


@functools.total_ordering
class Version:
    def __init__(self, major, minor):
        self.key = (major, minor)

    def __eq__(self, other):
        return self.key == other.key

    def __lt__(self, other):
        return self.key < other.key


@programs.add()
def total_ordering(x):
    a, b = Version(1, 2), Version(1, 10)
    return a <= b, a > b, a >= b, a != b, max(a, b).key, [v.key for v in sorted([b, a])], x + 1


@programs.add()
def operator_functions(x):
    get, first = operator.itemgetter(1), operator.itemgetter(0, 2)
    attr, deep = operator.attrgetter("shape"), operator.attrgetter("real", "dtype")
    call = operator.methodcaller("add", 1, alpha=2)
    data = [3, 1, 2]
    operator.setitem(data, 0, 9)
    operator.delitem(data, 1)
    return (
        get([1, x]) * 2,
        first("abc"),
        attr(x),
        deep(x)[1],
        call(x),
        data,
        operator.concat([1], [2]),
        operator.countOf([1, 2, 1], 1),
        operator.indexOf([5, 6], 6),
        operator.length_hint([1, 2]),
        operator.truth([]),
        operator.contains("abc", "b"),
        operator.iadd([1], [2]),
        operator.index(True),
        operator.call(torch.neg, x),
    )


PICK = operator.itemgetter("a", "b")


@programs.add()
def getter_of_the_module(x):
    a, b = PICK({"a": x, "b": 2})
    return a * b


@programs.add()
def itertools_infinite(x):
    counter = itertools.count(3, 2)
    ring = itertools.cycle("ab")
    picked = [next(counter) for _ in range(3)]
    letters = [next(ring) for _ in range(5)]
    repeats = list(itertools.repeat(x, 2))
    return picked, letters, torch.stack(repeats), list(itertools.islice(itertools.count(), 2, 10, 3))


@programs.add()
def itertools_finite(x):
    rows = [x, x + 1, x * 2]
    sums = list(itertools.accumulate(rows))
    return (
        sums,
        list(itertools.accumulate([1, 2, 3], operator.mul, initial=10)),
        list(itertools.chain([1], (2,), "a")),
        list(itertools.chain.from_iterable([[1], [2, 3]])),
        list(itertools.compress("abcd", [1, 0, 1, 0])),
        list(itertools.dropwhile(lambda v: v < 2, [1, 2, 1])),
        list(itertools.takewhile(lambda v: v < 2, [1, 2, 1])),
        list(itertools.filterfalse(lambda v: v % 2, range(5))),
        list(itertools.filterfalse(None, [0, 1, "", "a"])),
        list(itertools.pairwise([1, 2, 3])),
        list(itertools.starmap(pow, [(2, 3), (3, 2)])),
        list(itertools.zip_longest("ab", "c", fillvalue="-")),
        [(k, list(g)) for k, g in itertools.groupby([1, 1, 2, 1])],
        [(k, list(g)) for k, g in itertools.groupby(["aa", "b", "cc"], key=len)],
        list(itertools.islice([1, 2, 3, 4], 1, None, 2)),
    )


@programs.add()
def itertools_combinatorial(x):
    return (
        list(itertools.product("ab", [1, 2])),
        list(itertools.product([0, 1], repeat=2)),
        list(itertools.permutations([1, 2, 3], 2)),
        list(itertools.combinations([x, x + 1, x + 2], 2))[0][1],
        list(itertools.combinations_with_replacement("ab", 2)),
    )


@programs.add()
def itertools_tee(x):
    a, b = itertools.tee(iter([1, 2, 3]))
    next(a)
    c, d, e = itertools.tee((x * i for i in range(2)), 3)
    return list(a), list(b), list(c), list(e), list(d)


@programs.add()
def lazy_islice(x):
    it = iter([1, 2, 3, 4, 5])
    first = list(itertools.islice(it, 2))
    lazy = itertools.islice(it, 2)
    return first, next(lazy), list(it), x + 1


@programs.add()
def lazy_accumulate_and_groupby(x):
    seen = []

    def source():
        for i in range(4):
            seen.append(i)
            yield i

    acc = itertools.accumulate(source())
    first = next(acc)
    after_one = list(seen)
    groups = itertools.groupby("aab")
    key, group = next(groups)
    next(groups)
    return first, after_one, key, list(group), x + 1


@programs.add()
def lazy_tee_and_cycle(x):
    seen = []

    def source():
        for i in range(3):
            seen.append(i)
            yield i

    a, b = itertools.tee(source())
    one = next(a), list(seen)
    ring = itertools.cycle(source())
    two = next(ring), list(seen)
    longest = itertools.zip_longest(source(), [1])
    three = next(longest), list(seen)
    return one, two, three, x + 1


@programs.add()
def itertools_escape(x):
    it = itertools.chain([1, 2], [3])
    next(it)
    rep = itertools.repeat(x, 3)
    next(rep)
    return list(it), len(list(rep))


@programs.add()
def heaps(x):
    heap = [5, 1, 4]
    heapq.heapify(heap)
    heapq.heappush(heap, 0)
    low = heapq.heappop(heap)
    swapped = heapq.heapreplace(heap, 9)
    both = heapq.heappushpop(heap, 2)
    best = heapq.nsmallest(2, [3, 1, 2]), heapq.nlargest(2, ["a", "ccc", "bb"], key=len)
    return heap, low, swapped, both, best, list(heapq.merge([1, 4], [2, 3])), x + 1


@programs.add()
def heaps_of_pairs(x):
    heap = []
    for priority, item in ((2, x), (1, x + 1), (3, x + 2)):
        heapq.heappush(heap, (priority, item))
    return [heapq.heappop(heap)[1] for _ in range(2)], len(heap)


@programs.add([5, 1, 4], X)
def heap_argument(heap, x):
    heapq.heapify(heap)
    heapq.heappush(heap, 3)
    return x * heapq.heappop(heap)


@programs.add([1, 3, 5], X)
def bisection(items, x):
    bisect.insort(items, 4)
    bisect.insort_left(items, 0)
    return (
        items,
        bisect.bisect([1, 2, 2, 3], 2),
        bisect.bisect_left([1, 2, 2, 3], 2),
        bisect.bisect_right([(1, "a")], 1, key=operator.itemgetter(0)),
        x + 1,
    )


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)


@functools.lru_cache(maxsize=None)
def doubled(n):
    CALLS.append(n)
    return n * 2


CALLS: list[int] = []


def test_a_cache_of_the_program_counts_as_in_eager() -> None:
    compiled = magneto.optimize("eager")(lambda x: x * doubled(3) + doubled(4) + doubled(3))
    for number in range(1, 4):
        assert torch.equal(compiled(Y), Y * 6 + 8 + 6)
        info = doubled.cache_info()
        assert (info.hits, info.misses, CALLS) == (3 * number - 2, 2, [3, 4])


def test_attributes_of_functions_made_anew() -> None:
    """One code, two functions: what was read of the first is not taken for the second."""

    def make(tag):
        def fn(x):
            return x + 1

        fn.tag = tag
        fn.__name__ = f"fn_{tag}"
        return fn

    compiled = magneto.optimize("eager")(lambda x: (lambda fn: (fn(x), fn.tag, fn.__name__, hasattr(fn, "other")))(x_fn[0]))
    x_fn = [make(1)]

    def asks(fn, x):
        return fn(x), fn.tag, fn.__name__, hasattr(fn, "other")

    asking = magneto.optimize("eager")(asks)
    for tag in (1, 2):
        x_fn[0] = make(tag)
        assert compiled(Y)[1:] == (tag, f"fn_{tag}", False)
        assert asking(make(tag), Y)[1:] == (tag, f"fn_{tag}", False)
    other = make(3)
    other.other = True
    assert asking(other, Y)[1:] == (3, "fn_3", True)


class Parent:
    def go(self, x):
        return x + 1


class Broken(Parent):
    def go(self, x):
        magneto.graph_break()
        return super().go(x) * 2


def test_super_behind_a_break_in_an_inlined_method() -> None:
    assert torch.equal(magneto.optimize("eager")(lambda x: Broken().go(x))(Y), (Y + 1) * 2)
