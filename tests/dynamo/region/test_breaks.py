"""Graph breaks anywhere: what runs before, at and after a break is eager's, and the graphs around it are as few as they can be."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magneto

LOG: list[Any] = []


@magneto.disable
def opaque(x: Any) -> Any:
    """Never captured: every call is a graph break."""
    LOG.append(float(x.sum()) if isinstance(x, torch.Tensor) else x)
    return x


@magneto.disable
def refuse(x: Any) -> Any:
    raise ValueError(f"refused {tuple(x.shape)}")


def run(fn: Callable[..., Any], *args: Any) -> tuple[Any, list[Any]]:
    LOG.clear()
    try:
        result = fn(*args)
    except Exception as error:
        frames = [(f.name, f.lineno) for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__ and f.name != "run"]
        result = (type(error), str(error), frames)
    return result, list(LOG)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and bool(a == b)


def check(fn: Callable[..., Any], *args: Any, calls: int = 3) -> Any:
    """Run plain and optimised, several times; returns the optimised function."""
    optimised = magneto.optimize("eager")(fn)
    for _ in range(calls):
        plain, plain_log = run(fn, *args)
        fast, fast_log = run(optimised, *args)
        assert same(plain, fast), (plain, fast)
        assert plain_log == fast_log
    return optimised


@pytest.fixture(autouse=True)
def fresh() -> Any:
    magneto.reset()
    with magneto.config.patch(suppress_errors=False):
        yield
    magneto.reset()


X = torch.arange(6.0).reshape(2, 3)


def test_call_in_the_middle() -> None:
    def f(x):
        y = x + 1
        z = opaque(y) * 2
        return z - x

    check(f, X)
    stats = magneto.stats()
    assert (stats["graphs"], stats["breaks"]) == (2, 1)


def test_data_dependent_branch_has_three_graphs() -> None:
    def bar(a, b):
        x = a / (torch.abs(a) + 1)
        if b.sum() < 0:
            b = b * -1
        return x * b

    y = X.clone()
    optimised = check(bar, X, y)
    run(optimised, X, -y)
    assert same(optimised(X, -y), bar(X, -y))
    assert magneto.stats()["graphs"] == 3


def test_loop() -> None:
    def f(x):
        for i in range(4):
            x = x * 2
            x = opaque(x)
            x = x + 1
        return x

    check(f, X)


def test_loop_regions_are_reused_in_each_iteration() -> None:
    def f(x):
        for _ in range(20):
            x = opaque(x * 0.5) + 1
        return x

    check(f, X)
    assert magneto.stats()["graphs"] <= 5
    assert magneto.stats()["recompiles"] == 1  # the last iteration leaves the loop


def test_while_with_data_dependent_end() -> None:
    def f(x):
        n = 0
        while x.sum() < 100:
            x = x * 2 + 1
            n += 1
        return x, n

    check(f, X)


def test_with_block() -> None:
    def f(x):
        with torch.no_grad():
            y = x * 2
            y = opaque(y)
            z = y + torch.is_grad_enabled()
        return z + torch.is_grad_enabled()

    check(f, X)
    assert torch.is_grad_enabled()


def test_user_context_manager() -> None:
    @contextlib.contextmanager
    def managed(name):
        LOG.append(f"enter {name}")
        try:
            yield name
        finally:
            LOG.append(f"leave {name}")

    def f(x):
        with managed("a") as name:
            x = x + 1
            opaque(name)
            x = x * 2
        return x

    check(f, X)


def test_try_block_without_exception() -> None:
    def f(x):
        try:
            y = opaque(x + 1)
            y = y * 2
        except ValueError:
            y = x
        finally:
            LOG.append("finally")
        return y

    check(f, X)


def test_exception_caught_by_the_frame() -> None:
    def f(x):
        y = x + 1
        try:
            refuse(y)
            y = y * 100
        except ValueError as error:
            LOG.append(str(error))
            y = y * 2
        return y + 1

    check(f, X)


def test_exception_out_of_the_frame() -> None:
    def f(x):
        y = x + 1
        refuse(y)
        return y

    check(f, X)


def test_raise_of_the_program_keeps_effects_before_it() -> None:
    def f(x, items):
        items.append(x + 1)
        if x.shape[0] == 2:
            raise KeyError("two")
        return x

    plain: list[Any] = []
    fast: list[Any] = []
    optimised = magneto.optimize("eager")(f)
    for fn, items in ((f, plain), (optimised, fast)):
        with pytest.raises(KeyError, match="two") as raised:
            fn(X, items)
        assert raised.traceback[-1].lineno == f.__code__.co_firstlineno + 2
    assert same(plain, fast)


def test_break_inside_an_inlined_callee() -> None:
    def inner(x, k):
        y = x * k
        y = opaque(y)
        return y + 1

    def f(x):
        a = inner(x, 2)
        b = inner(a, 3)
        return a * b

    check(f, X)


def test_break_inside_two_inlined_callees_with_loops_and_cells() -> None:
    def innermost(x, add):
        total = x
        for i in range(3):
            total = add(opaque(total))
        return total

    def inner(x):
        bias = x.sum()

        def add(value):
            nonlocal bias
            bias = bias + 1
            return value + bias

        return innermost(x, add), bias

    def f(x):
        y, bias = inner(x * 2)
        return y * bias

    check(f, X)


def test_exception_inside_an_inlined_callee_reaches_the_callers_handler() -> None:
    def inner(x):
        y = x + 1
        refuse(y)
        return y

    def f(x):
        try:
            return inner(x * 2)
        except ValueError as error:
            LOG.append(str(error))
        return x * 3

    check(f, X)


def test_traceback_names_the_programs_lines() -> None:
    def inner(x):
        y = x + 1
        return refuse(y)

    def f(x):
        z = x * 2
        return inner(z)

    check(f, X)


def test_captured_try_except_needs_no_break() -> None:
    def f(x, d):
        try:
            k = d["missing"]
        except KeyError:
            k = 3
        return x * k

    check(f, X, {"a": 1})
    assert magneto.stats()["breaks"] == 0


def test_print_order(capsys: pytest.CaptureFixture[str]) -> None:
    def f(x):
        print("before")
        y = x + 1
        print("after", 3)
        return y

    check(f, X, calls=1)
    assert capsys.readouterr().out == "before\nafter 3\n" * 2


def test_item_and_python_numbers() -> None:
    def f(x):
        n = int(x.sum().item())
        return x + n

    check(f, X)


def test_nopython_raises_at_the_first_break_with_the_users_line() -> None:
    def f(x):
        y = x + 1
        if y.sum() > 0:
            return y
        return x

    with pytest.raises(magneto.Unsupported) as raised:
        magneto.optimize("eager", nopython=True)(f)(X)
    assert "if y.sum() > 0:" in str(raised.value)
    assert raised.value.user_stack[-1][1] == f.__code__.co_firstlineno + 2


def test_recursion() -> None:
    def f(x, n):
        if n == 0:
            return x
        return f(opaque(x + 1), n - 1)

    check(f, X, 3)


def test_mutation_of_outside_state_across_a_break() -> None:
    class Box:
        def __init__(self):
            self.count = 0
            self.last = None

    def f(x, box, items):
        box.count += 1
        items.append(box.count)
        y = opaque(x + box.count)
        box.last = y * 2
        items.append(box.last)
        return y

    box_a, box_b = Box(), Box()
    items_a: list[Any] = []
    items_b: list[Any] = []
    optimised = magneto.optimize("eager")(f)
    for _ in range(3):
        a, b = f(X, box_a, items_a), optimised(X, box_b, items_b)
        assert same(a, b)
        assert same(items_a, items_b)
        assert box_a.count == box_b.count and same(box_a.last, box_b.last)
        assert items_b[-1] is box_b.last


@magneto.disable
def who_calls(x):
    import sys

    frame = sys._getframe(1)
    while frame.f_code.co_name in ("__call__", "inner"):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, frame.f_globals["__name__"]


def test_what_is_called_at_a_break_sees_the_program_as_its_caller() -> None:
    def f(x):
        y = x + 1
        seen = who_calls(y)
        return y * 2, seen

    check(f, X)


def test_counters_and_averages_cost_no_recompile() -> None:
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.average = 0, 1.0

        def forward(self, x):
            self.calls += 1
            self.average = self.average * 0.9 + 0.5
            return x * 2

    plain, ours = Counter(), Counter()
    fast = magneto.optimize("eager")(ours)
    for _ in range(12):
        assert same(plain(X), fast(X))
        assert (plain.calls, plain.average) == (ours.calls, ours.average)
    assert magneto.stats()["recompiles"] == 0


def test_a_computed_number_that_decides_something_is_guarded() -> None:
    def f(x, n):
        n = n + 1
        if n % 3 == 0:
            return x * n, n
        return x - 1, n

    optimised = magneto.optimize("eager")(f)
    for n in (1, 2, 3, 2, 1, True, 2.0):
        assert same(optimised(X, n), f(X, n))


def test_a_generator_left_by_break_closes_where_the_program_leaves_it() -> None:
    def numbers(x):
        with torch.no_grad():
            try:
                for i in range(4):
                    yield x * i
            finally:
                LOG.append("closed")

    def f(x):
        total = x
        for value in numbers(x):
            total = total + value
            break
        LOG.append("after")
        return total * 2, torch.is_grad_enabled()

    check(f, X)
    assert torch.is_grad_enabled()
