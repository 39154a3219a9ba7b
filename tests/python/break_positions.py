"""Where a program can be interrupted: one small function per position. `stop(x)` is replaced by each kind of break (test_break_positions.py).

Every tensor operation has a number of its own: those on lines that were executed must all stand in captured graphs.
"""

# ruff: noqa

from __future__ import annotations

import contextlib
import functools
import itertools

import torch

POSITIONS = []


def position(fn):
    POSITIONS.append(fn)
    return fn


def stop(x):
    raise NotImplementedError("replaced in the text")


# -- statements


@position
def straight(x, log):
    x = x + 1.5
    stop(x)
    x = x * 2.5
    return x


@position
def for_loop(x, log):
    for n in range(3):
        x = x + 1.5
        stop(x)
        x = x * 2.5
    else:
        x = x - 3.5
    return x - 4.5


@position
def while_loop_with_else(x, log):
    n = 0
    while n < 3:
        x = x + 1.5
        n += 1
        if n == 2:
            stop(x)
            continue
        x = x * 2.5
    else:
        x = x - 3.5
    return x - 4.5


@position
def loop_break_out(x, log):
    for n in itertools.count():
        x = x + 1.5
        stop(x)
        if n == 2:
            x = x * 2.5
            break
    return x - 4.5


@position
def nested_loops(x, log):
    for a in [1, 2]:
        for b in (x, x + 1.5):
            x = x + b
            stop(x)
            x = x * 2.5
        x = x - 3.5
    return x


@position
def condition(x, log):
    y = x + 1.5 if not stop(x) else x - 2
    return y * 3.5


@position
def operand(x, log):
    return (x + 1.5) * (2 if stop(x) is None else 3) + [x - 4.5][0]


@position
def argument(x, log):
    def f(a, b, *, c):
        return a + c * 2.5

    return f(x + 1.5, stop(x), c=x * 3.5)


@position
def match_statement(x, log):
    match [stop(x), x + 1.5]:
        case [_, torch.Tensor() as t]:
            return t * 2.5
    return x


@position
def walrus_and_fstring(x, log):
    if (y := x + 1.5) is not None:
        log.append(f"{stop(x)}{len(log)}")
    return y * 2.5


@position
def starred(x, log):
    def f(*args, **kwargs):
        return sum(args) + kwargs["k"]

    y = x + 1.5
    return f(*[y, y * 2.5], **{"k": y - 3.5 if stop(x) is None else y - 4}) * 5.5


# -- exceptions


@position
def try_body(x, log):
    try:
        x = x + 1.5
        stop(x)
        x = x * 2.5
    except Exception as e:
        x = x - 3.5
        log.append(type(e).__name__)
    else:
        x = x - 4.5
    return x + 5.5


@position
def handler(x, log):
    x = x + 1.5
    try:
        x = x * 2.5
        raise ValueError("v")
    except ValueError as e:
        x = x - 3.5
        stop(x)
        x = x - 4.5
        log.append(str(e))
    return x + 5.5


@position
def handler_in_loop(x, log):
    for n in range(3):
        try:
            x = x + 1.5
            if n % 2 == 0:
                raise KeyError(n)
        except KeyError as e:
            x = x * 2.5
            stop(x)
            x = x - 3.5
            log.append(e.args)
            continue
        x = x + 4.5
    return x * 5.5


@position
def handler_that_raises(x, log):
    try:
        try:
            x = x + 1.5
            raise ValueError("v")
        except ValueError as e:
            x = x * 2.5
            log.append(x)
            stop(x)
            raise TypeError("t") from e
    except Exception as e:
        x = x - 3.5
        log.append((type(e).__name__, repr(e.__cause__), repr(e.__context__), e.__suppress_context__))
        stop(x)
        x = x - 4.5
    return x + 5.5


@position
def handler_of_a_callee(x, log):
    def fail(y):
        y = y + 1.5
        log.append(y)
        raise LookupError("deep")

    def middle(y):
        try:
            return fail(y)
        finally:
            log.append(y * 2.5)

    try:
        middle(x)
    except LookupError as e:
        x = x - 3.5
        stop(x)
        log.append(str(e))
        x = x * 4.5
    return x + 5.5


@position
def finally_after_normal(x, log):
    try:
        x = x + 1.5
    finally:
        x = x * 2.5
        stop(x)
        x = x - 3.5
    return x + 5.5


@position
def finally_after_return(x, log):
    def f(y):
        try:
            return y + 1.5
        finally:
            log.append(y * 2.5)
            stop(y)
            log.append(y - 3.5)

    return f(x) + 5.5


@position
def finally_after_raise(x, log):
    try:
        try:
            x = x + 1.5
            raise ValueError("v")
        finally:
            x = x * 2.5
            stop(x)
            x = x - 3.5
    except Exception as e:
        log.append(type(e).__name__)
        x = x - 4.5
    return x + 5.5


@position
def finally_that_lets_it_out(x, log):
    try:
        x = x + 1.5
        raise ValueError("v")
    finally:
        log.append(x * 2.5)
        stop(x)
        log.append(x - 3.5)


@position
def finally_with_loop_control(x, log):
    for n in range(3):
        try:
            x = x + 1.5
            if n == 1:
                continue
            if n == 2:
                break
        finally:
            x = x * 2.5
            stop(x)
        x = x - 3.5
    return x + 5.5


@position
def bare_reraise(x, log):
    try:
        try:
            x = x + 1.5
            {}["k"]
        except KeyError:
            x = x * 2.5
            stop(x)
            raise
    except Exception as e:
        x = x - 3.5
        log.append(repr(e))
    return x + 5.5


@position
def except_star(x, log):
    try:
        x = x + 1.5
        raise ExceptionGroup("g", [ValueError(1), TypeError(2)])
    except* ValueError as g:
        x = x * 2.5
        stop(x)
        log.append(repr(g))
        x = x - 3.5
    except* TypeError as g:
        x = x - 4.5
        log.append(repr(g))
    return x + 5.5


# -- with


class Manager:
    def __init__(self, log, swallow=False):
        self.log = log
        self.swallow = swallow

    def __enter__(self):
        self.log.append("enter")
        return self

    def __exit__(self, kind, value, traceback):
        self.log.append((kind, repr(value), traceback is None))
        return self.swallow


@position
def with_class(x, log):
    with Manager(log) as m:
        x = x + 1.5
        stop(x)
        x = x * 2.5
    return x - 3.5


@position
def with_class_that_swallows(x, log):
    with Manager(log, swallow=True):
        x = x + 1.5
        stop(x)
        x = x * 2.5
        raise ValueError("in")
    return x - 3.5


@position
def with_no_grad(x, log):
    x = x + 1.5
    with torch.no_grad():
        y = x * 2.5
        stop(x)
        y = y - 3.5
        log.append(y.requires_grad)
    return x * 4.5 + y


@position
def with_autocast(x, log):
    w = x[:, None] + 1.5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = w @ w.mT
        stop(x)
        z = (w * 2.5) @ w.mT
    return y.float() + z.float() - 3.5


@position
def with_set_grad(x, log):
    with torch.set_grad_enabled(False), torch.enable_grad():
        x = x + 1.5
        stop(x)
        x = x * 2.5
    log.append(torch.is_grad_enabled())
    return x - 3.5


@position
def with_contextmanager(x, log):
    @contextlib.contextmanager
    def around(t):
        log.append(t + 1.5)
        try:
            yield t * 2.5
        finally:
            log.append(t - 3.5)

    with around(x) as y:
        y = y + 4.5
        stop(x)
        y = y * 5.5
    return y - 6.5


@position
def inside_a_contextmanager(x, log):
    @contextlib.contextmanager
    def around(t):
        log.append(t + 1.5)
        stop(t)
        yield t * 2.5
        stop(t)
        log.append(t - 3.5)

    with around(x) as y:
        y = y + 4.5
    return y - 6.5


@position
def with_exit_stack(x, log):
    with contextlib.ExitStack() as stack:
        m = stack.enter_context(Manager(log))
        stack.callback(log.append, "callback")
        x = x + 1.5
        stop(x)
        x = x * 2.5
    return x - 3.5


@position
def with_suppress(x, log):
    with contextlib.suppress(Exception), contextlib.nullcontext(x + 1.5) as y:
        x = y * 2.5
        stop(x)
        x = x - 3.5
    return x - 4.5


@position
def manager_enter(x, log):
    class M:
        def __enter__(self):
            self.y = x + 1.5
            stop(x)
            return self.y * 2.5

        def __exit__(self, *exc):
            log.append(self.y - 3.5)

    with M() as y:
        y = y + 4.5
    return y * 5.5


@position
def manager_exit(x, log):
    with Leaving(x, log) as y:
        y = y + 4.5
    return y * 5.5


class Leaving:
    def __init__(self, x, log):
        self.x, self.log = x, log

    def __enter__(self):
        return self.x + 1.5

    def __exit__(self, *exc):
        self.log.append(self.x * 2.5)
        stop(self.x)
        self.log.append(self.x - 3.5)


@position
def manager_exit_with_exception(x, log):
    try:
        with Leaving(x, log) as y:
            y = y + 4.5
            raise ValueError("v")
    except ValueError:
        y = y * 5.5
    return y


# -- generators and comprehensions


@position
def generator_in_for(x, log):
    def items(t):
        for n in range(3):
            t = t + 1.5
            stop(t)
            yield t * 2.5
        yield t - 3.5

    for y in items(x):
        x = x + y * 4.5
    return x - 5.5


@position
def generator_with_finally(x, log):
    def items(t):
        try:
            yield t + 1.5
            stop(t)
            yield t * 2.5
        finally:
            log.append(t - 3.5)

    return sum(list(items(x))) * 4.5


@position
def generator_consumed_by_sum(x, log):
    def items(t):
        yield t + 1.5
        stop(t)
        yield t * 2.5

    return sum(items(x)) * 4.5


@position
def loop_over_a_generator(x, log):
    def items(t):
        for n in range(3):
            yield t + 1.5 + n

    for y in items(x):
        x = x + y * 2.5
        stop(x)
        x = x - 3.5
    return x * 4.5


@position
def yield_from(x, log):
    def inner(t):
        yield t + 1.5
        stop(t)
        yield t * 2.5
        return t - 3.5

    def outer(t):
        r = yield from inner(t)
        yield r * 4.5

    return [y + 5.5 for y in outer(x)]


@position
def list_comprehension(x, log):
    y = x + 1.5
    found = [(stop(x), y * 2.5 + n)[1] for n in range(3) if n != 1]
    return found[0] + found[1] - 3.5


@position
def dict_and_set_comprehension(x, log):
    y = x + 1.5
    found = {n: (stop(x), y * 2.5) for n in range(2)}
    chosen = {n for n in range(3) if stop(x) is None}
    return found[1][1] - 3.5, sorted(chosen)


@position
def nested_comprehension(x, log):
    return [[(stop(x), x + 1.5)[1] for b in range(2)][1] * 2.5 for a in range(2)][1] - 3.5


@position
def generator_expression(x, log):
    return sum((stop(x), x + 1.5)[1] for n in range(3)) * 2.5


@position
def any_of_a_generator_expression(x, log):
    y = x + 1.5
    log.append(any(stop(x) is not None for n in range(2)))
    return y * 2.5


# -- callees


@position
def nested_function(x, log):
    def f(y):
        y = y + 1.5
        stop(y)
        return y * 2.5

    x = f(x) - 3.5
    return f(x) - 4.5


@position
def three_deep_in_try_with_for(x, log):
    def f(y):
        for n in range(2):
            y = y + 1.5
            stop(y)
            y = y * 2.5
        return y

    def g(y):
        with Manager(log):
            y = f(y) - 3.5
            return y * 4.5

    def h(y):
        try:
            y = g(y) + 5.5
        except Exception as e:
            log.append(type(e).__name__)
            y = y + 6.5
        finally:
            y = y * 7.5
        return y

    for n in range(2):
        x = h(x) + 8.5
    return x


@position
def callee_used_twice_in_an_expression(x, log):
    def f(y):
        stop(y)
        return y * 2.5

    return f(x + 1.5) + f(x - 3.5) * 4.5


class Thing:
    def __init__(self, x, log):
        self.x = x + 1.5
        self.log = log

    def method(self, y):
        y = y + 2.5
        stop(y)
        return y * self.x

    @property
    def prop(self):
        y = self.x * 3.5
        stop(y)
        return y - 4.5

    @classmethod
    def cls_method(cls, y):
        y = y * 3.5
        stop(y)
        return y - 4.5

    @staticmethod
    def static(y):
        y = y * 3.5
        stop(y)
        return y - 4.5

    def __call__(self, y):
        y = y * 3.5
        stop(y)
        return y - 4.5

    def __getattr__(self, name):
        if name != "computed":
            raise AttributeError(name)
        y = self.x * 3.5
        stop(y)
        return y - 4.5

    def __getitem__(self, n):
        if n > 1:
            raise IndexError(n)
        y = self.x * 3.5
        stop(y)
        return y - 4.5 + n

    def __add__(self, y):
        y = y * 3.5
        stop(y)
        return y - 4.5

    def __radd__(self, y):
        y = y * 3.5
        stop(y)
        return y - 4.5

    def __len__(self):
        stop(self.x)
        return 2

    def __bool__(self):
        stop(self.x)
        return True

    def __eq__(self, other):
        stop(self.x)
        return True

    def __lt__(self, other):
        stop(self.x)
        return self is not other

    def __contains__(self, item):
        stop(self.x)
        return item == 1

    def __setattr__(self, name, value):
        if name == "watched":
            stop(value)
            value = value + 9.5
        object.__setattr__(self, name, value)

    def __format__(self, spec):
        stop(self.x)
        return "thing" + spec


@position
def method(x, log):
    return Thing(x, log).method(x) - 5.5


@position
def property_(x, log):
    return Thing(x, log).prop - 5.5


@position
def classmethod_and_static(x, log):
    return Thing.cls_method(x) - 5.5 + Thing.static(x)


@position
def call_method(x, log):
    return Thing(x, log)(x) - 5.5


@position
def getattr_hook(x, log):
    return Thing(x, log).computed - 5.5


@position
def getattr_builtin(x, log):
    t = Thing(x, log)
    return getattr(t, "computed", x) - 5.5 + getattr(t, "missing", x + 6.5)


@position
def setattr_hook(x, log):
    t = Thing(x, log)
    t.watched = x * 2.5
    return t.watched - 5.5


@position
def getitem(x, log):
    return Thing(x, log)[1] - 5.5


@position
def iteration_by_getitem(x, log):
    found = 0
    for y in Thing(x, log):
        found = found + y * 5.5
    return found


@position
def binary_operator(x, log):
    t = Thing(x, log)
    return (t + x) - 5.5


@position
def reflected_operator(x, log):
    t = Thing(x, log)
    return ([] and x) or sum([x, t], start=0) - 5.5


@position
def len_bool_eq_contains(x, log):
    t = Thing(x, log)
    x = x + 2.5
    log.append(len(t))
    x = x * 3.5
    if t:
        x = x - 4.5
    if t == 5:
        x = x - 5.5
    if 1 in t:
        x = x - 6.5
    if not t:
        x = x - 7.5
    return x * 8.5


@position
def format_hook(x, log):
    t = Thing(x, log)
    log.append(f"{t:abc}")
    return t.x * 2.5


@position
def sort_key(x, log):
    def key(n):
        log.append(x + 1.5)
        stop(x)
        return -n

    return x * 2.5, sorted([1, 3, 2], key=key)


@position
def sort_by_lt(x, log):
    a, b = Thing(x, log), Thing(x, log)
    return sorted([a, b])[0].x * 2.5


@position
def max_key(x, log):
    return x * 2.5, max([1, 3, 2], key=lambda n: (stop(x), n)[1])


@position
def map_function(x, log):
    def f(y):
        y = y + 1.5
        stop(y)
        return y * 2.5

    return [y - 3.5 for y in map(f, [x, x - 4.5])]


@position
def filter_function(x, log):
    return [n for n in filter(lambda n: stop(x) is None and n > 1, [1, 2, 3])], x * 2.5


@position
def reduce_function(x, log):
    def f(a, b):
        stop(a)
        return a + b * 1.5

    return functools.reduce(f, [x, x, x]) - 2.5


@position
def partial_(x, log):
    def f(a, b):
        stop(a)
        return a + b * 1.5

    return functools.partial(f, x + 2.5)(b=x) - 3.5


@position
def decorated(x, log):
    def twice(fn):
        @functools.wraps(fn)
        def wrapper(*args):
            y = fn(*args) + 1.5
            return fn(y) * 2.5

        return wrapper

    @twice
    def f(y):
        stop(y)
        return y - 3.5

    return f(x) + 4.5


@position
def recursion(x, log):
    def f(y, n):
        if n == 0:
            stop(y)
            return y + 1.5
        return f(y * 2.5, n - 1) - 3.5

    return f(x, 3) + 4.5


class Counting:
    def __init__(self, x):
        self.x, self.n = x, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == 3:
            raise StopIteration
        self.n += 1
        self.x = self.x + 1.5
        stop(self.x)
        return self.x * 2.5


@position
def iterator_next(x, log):
    for y in Counting(x):
        x = x + y * 3.5
    return x - 4.5


@position
def iterator_next_in_list(x, log):
    return [y + 3.5 for y in list(Counting(x))]


@position
def iterator_iter(x, log):
    class C:
        def __iter__(self):
            stop(x)
            return iter([x + 1.5, x * 2.5])

    a, b = C()
    return a + b * 3.5


class Descriptor:
    def __get__(self, obj, owner):
        y = obj.value + 1.5
        stop(y)
        return y * 2.5

    def __set__(self, obj, value):
        stop(value)
        obj.value = value - 3.5


class Described:
    field = Descriptor()


@position
def descriptor(x, log):
    d = Described()
    d.field = x
    return d.field + 4.5


@position
def constructor(x, log):
    class C:
        def __new__(cls, y):
            stop(y)
            return object.__new__(cls)

        def __init__(self, y):
            self.y = y + 1.5
            stop(y)
            self.z = self.y * 2.5

    return C(x).z - 3.5


class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        x = x * self.scale + 1.5
        stop(x)
        return x * 2.5


MODULE = torch.nn.Sequential(Half(), torch.nn.ReLU(), Half())


@position
def modules(x, log):
    return MODULE(x + 3.5) * 4.5


class Functional:
    def __init__(self, x):
        self.x = x

    @classmethod
    def __torch_function__(cls, fn, types, args=(), kwargs=None):
        a, b = (getattr(v, "x", v) for v in args)
        stop(a)
        return fn(a + 1.5, b) * 2.5


@position
def torch_function(x, log):
    return torch.add(Functional(x), x) - 3.5


@position
def closure_and_global_writes(x, log):
    n = 0

    def f(y):
        nonlocal n
        n += 1
        stop(y)
        n += 1
        return y + 1.5

    x = f(x) * 2.5
    x = f(x) * 3.5
    return x, n


@position
def import_inside(x, log):
    x = x + 1.5
    import math
    from os import path as p

    stop(x)
    return x * math.pi - 2.5, p.sep
