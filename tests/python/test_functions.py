"""Functions: arguments of every kind, closures, lambdas, recursion, decorators, partials, generators."""

# ruff: noqa

from __future__ import annotations

import contextlib
import functools
import operator
import types
from typing import Any

import pytest
import torch

from tests.python.programs import Program, Programs, X, Y, check

programs = Programs()


def helper(a, b=2, /, c=3, *rest, d=4, **extra):
    return a * b + c + sum(rest) + d + sum(extra.values())


@programs.add()
def positional_and_keyword_arguments(x):
    return helper(x), helper(x, 5), helper(x, 5, 6, 7, 8, d=9), helper(x, c=1, e=10, f=11), helper(*[x, 1], **{"c": 2, "d": 3})


@programs.add()
def bound_by_hand_and_in_an_exit_stack(x):
    class Scope:
        def __enter__(self):
            return 2

        def __exit__(self, *error):
            log.append(error[0])

    log, scope = [], Scope()
    bound = types.MethodType(lambda owner, k: (owner, k * x), scope)
    with contextlib.ExitStack() as stack:
        y = x * stack.enter_context(scope) + stack.enter_context(Scope())
    return y, bound(3)[1], bound(1)[0] is scope, bound.__self__ is scope, log


@programs.add(X.clone().requires_grad_())
def modes_in_an_exit_stack(x):
    found = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        found += [x * 2, stack.enter_context(torch.enable_grad()), x * 3, stack.enter_context(torch.set_grad_enabled(False)), x * 4]
        rest = stack.pop_all()
    found.append(x * 5)
    rest.close()
    with contextlib.ExitStack() as stack:
        found.append(type(stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))) is torch.autocast)
        found.append(x.view(1, -1) @ x.view(-1, 1))
    with torch.no_grad() as nothing:
        found.append(nothing)
    return found, x * 6


@programs.add()
def keyword_only_defaults(x):
    def f(a, *, scale=2.0, shift):
        return a * scale + shift

    return f(x, shift=1), f(x, shift=2, scale=3)


@programs.add()
def closure_reads(x):
    k = 3.0

    def f(y):
        return y * k

    k = 4.0
    return f(x)


@programs.add()
def closure_writes(x):
    total = 0

    def add(v):
        nonlocal total
        total = total + v
        return total

    add(x)
    add(x * 2)
    return total


@programs.add()
def nested_closures(x):
    def outer(a):
        def middle(b):
            def inner(c):
                return a + b * c

            return inner

        return middle

    return outer(x)(2)(3)


@programs.add()
def late_binding_in_loops(x):
    fns = [lambda v: v * i for i in range(3)]
    bound = [lambda v, i=i: v * i for i in range(3)]
    return [f(x) for f in fns], [f(x) for f in bound]


@programs.add()
def recursion(x):
    def power(v, n):
        return v if n == 0 else v * power(v, n - 1)

    return power(x, 4)


@programs.add()
def mutual_recursion(x):
    def even(n):
        return True if n == 0 else odd(n - 1)

    def odd(n):
        return False if n == 0 else even(n - 1)

    return x + 1 if even(6) else x - 1


def scaled(factor):
    def decorate(fn):
        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            return fn(*args, **kwargs) * factor

        return wrapper

    return decorate


@scaled(3)
def decorated(x, y=1):
    return x + y


@programs.add()
def decorators(x):
    return decorated(x), decorated(x, y=2)


@programs.add()
def decorator_inside(x):
    @scaled(2)
    def local(v):
        return v - 1

    return local(x)


@programs.add()
def partials(x):
    f = functools.partial(helper, x, d=7)
    g = functools.partial(f, 3)
    return f(), g(c=1), functools.partial(torch.add, alpha=2)(x, x)


@programs.add()
def higher_order(x):
    def compose(*fns):
        return functools.reduce(lambda f, g: lambda v: g(f(v)), fns)

    return compose(torch.sin, lambda v: v + 1, torch.cos)(x)


@programs.add()
def returned_lambda_is_called(x):
    return (lambda a, *b, **c: a + len(b) + len(c))(x, 1, 2, k=3)


@programs.add()
def generator_function(x):
    def gen(n):
        for i in range(n):
            yield x * i

    return sum(gen(4))


@programs.add()
def generator_with_return_and_yield_from(x):
    def inner():
        yield x
        return 5

    def outer():
        got = yield from inner()
        yield x * got

    return list(outer())


@programs.add()
def generator_send(x):
    def gen():
        received = 0
        while True:
            received = yield x * received

    g = gen()
    next(g)
    return g.send(2), g.send(3)


@programs.add()
def generator_expressions(x):
    return sum(v * 2 for v in x), tuple(i * x for i in range(3) if i != 1), any(i > 5 for i in range(10)), all(i > 5 for i in range(10))


@programs.add()
def attributes_of_functions(x):
    def f(v):
        "doc"
        return v

    f.tag = 3
    return f(x) * f.tag, f.__name__, f.__doc__, helper.__name__, helper.__code__.co_argcount


@programs.add()
def methodcaller_and_getters(x):
    pair = (x, x + 1)
    return operator.itemgetter(1)(pair), operator.attrgetter("shape")(x), operator.methodcaller("sum")(x)


@programs.add()
def global_is_read(x):
    return x * GLOBAL_FACTOR + len(GLOBAL_LIST) + GLOBAL_DICT["a"]


GLOBAL_FACTOR = 2.5
GLOBAL_LIST = [1, 2, 3]
GLOBAL_DICT = {"a": 1}


@programs.add()
def walrus_and_conditional_expressions(x):
    if (n := x.shape[0]) > 2:
        return x * n if n % 2 else x
    return x


@programs.add()
def star_unpacking(x):
    first, *middle, last = [x, x + 1, x + 2, x + 3]
    (a, b), c = (first, last), middle
    return a + b, [*c, *middle], {**{"k": x}, "l": last}


@programs.add(X, Y)
def function_as_argument(x, y):
    def apply(f, *args):
        return f(*args)

    return apply(torch.mul, x, y), apply(lambda v: v + 1, y)


@programs.add(graphs=None)
def lru_cache(x):
    return x * cached(3)


@functools.lru_cache
def cached(n: int) -> int:
    return n * 2


@programs.add()
def returns_a_closure_result_and_function(x):
    def inner(v, k=2):
        return v * k + x.shape[0]

    return inner(x)


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)


def wrong_calls() -> list[Any]:
    def f(a, b, *, c=1):
        return a

    def g(a=1, b=2):
        return a

    def h(a, /, b):
        return a

    return [
        lambda: f(1),
        lambda: f(1, 2, 3),
        lambda: f(1, 2, d=3),
        lambda: f(1, 2, b=3),
        lambda: f(),
        lambda: g(1, 2, 3),
        lambda: h(a=1, b=2),
        lambda: h(1, 2, 3, 4),
        lambda: f(1, 2, 3, c=4),
        lambda: f(1, **{"c": 2}, **{"c": 3}),
    ]


@pytest.mark.parametrize("number", range(len(wrong_calls())))
def test_argument_errors_read_as_cpythons(number: int) -> None:
    def program(x):
        try:
            wrong_calls()[number]()
        except TypeError as error:
            return x + 1, str(error)
        return x

    check(Program(program, (X,), 1))
