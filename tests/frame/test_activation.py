"""Who is active where: nesting, Disabled, threads, generators, recursion, descriptors, other evaluation functions. (torchfree)"""

from __future__ import annotations

import _thread
import asyncio
import copy
import gc
import inspect
import sys
import threading
import time
from typing import Any

import pytest

from tests.frame.harness import C, Frames, at, line


def test_nesting_of_policies() -> None:
    names: list[Any] = []

    def compiler(policy: Any, state: Any, missed: Any) -> Any:
        assert C.active_policy() is None
        names.append((policy.payload, state.code.co_name))
        return None

    C.set_compiler(compiler)
    first, second = C.Policy(1), C.Policy(2)

    def inner() -> Any:
        return C.active_policy()

    def outer() -> Any:
        return C.active_policy(), in_second(), C.active_policy(), off(), C.active_policy(), inner()

    in_second, off = C.Optimized(inner, second), C.Disabled(inner)
    g = C.Optimized(outer, first)
    assert g() == (first, second, first, None, first, first)
    assert names == [(1, "outer"), (2, "inner"), (1, "inner")]
    assert C.active_policy() is None and not C.eval_frame_installed()


def test_installed_only_while_needed() -> None:
    g = C.Optimized(C.eval_frame_installed, C.Policy())
    assert g() is True and not C.eval_frame_installed()

    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        C.Optimized(fails, C.Policy())()
    assert not C.eval_frame_installed() and C.active_policy() is None


def test_call_active_and_inactive(frames: Frames) -> None:
    def f(x: int) -> Any:
        return x

    def helper(x: int) -> Any:
        return C.active_policy(), x

    frames.region(helper)(lambda x: ("compiled", C.active_policy(), x))

    @frames.region(f)
    def region(x: int) -> Any:
        inactive = helper(x)
        active = C.call_active(helper, x=x)
        both = C.call_active(lambda: (C.active_policy(), C.call_inactive(helper, x), C.call_active(C.active_policy)))
        return inactive, active, both

    g = frames.optimized(f)
    p = frames.policy
    assert g(1) == ((None, 1), ("compiled", None, 1), (p, (None, 1), p))
    with pytest.raises(TypeError):
        C.call_active()
    assert C.call_active(helper, 2) == (None, 2)


def test_set_active_policy() -> None:
    def f() -> Any:
        before = C.set_active_policy(None)
        inside = C.active_policy()
        C.set_active_policy(before)
        return before, inside, C.active_policy()

    policy = C.Policy()
    assert C.Optimized(f, policy)() == (policy, None, policy)

    def forgets() -> None:
        C.set_active_policy(None)

    def calls() -> Any:
        C.call_active(forgets)
        return C.active_policy()

    assert C.Optimized(calls, policy)() is policy
    with pytest.raises(TypeError):
        C.set_active_policy(5)


def test_generators_are_entered_where_they_go_on_and_coroutines_are_left_alone(frames: Frames) -> None:
    def numbers(n: int) -> Any:
        for i in range(n):
            yield helper(i)

    def helper(i: int) -> int:
        return i * 10

    async def coroutine(n: int) -> Any:
        return helper(n)

    def f(n: int) -> Any:
        gen = numbers(n)
        total = sum(gen)
        thrown = numbers(2)
        next(thrown)
        try:
            thrown.throw(KeyError("x"))
        except KeyError:
            total += 1000
        co = coroutine(7)
        try:
            co.send(None)
        except StopIteration as stop:
            total += stop.value
        return total, [x for x in (i for i in range(3))]

    assert frames.optimized(f)(3) == (0 + 10 + 20 + 1000 + 70, [0, 1, 2])
    names = {name for name, _ in frames.seen}
    assert "coroutine" not in names
    assert {"f", "helper", "numbers", "<genexpr>"} <= names  # a generator is an entry point wherever it goes on
    assert all(offset > 0 for name, offset in frames.seen if name == "numbers")

    async def main() -> Any:
        return [await coroutine(1), f(2)[0]]

    assert frames.optimized(asyncio.run)(main()) == [10, 1080]
    made = C.Optimized(numbers, frames.policy)(3)
    assert list(made) == [0, 10, 20]


def test_class_bodies_and_modules_are_left_alone(frames: Frames) -> None:
    def f() -> Any:
        class Made:
            x = 1

            def get(self) -> int:
                return self.x

        scope: dict[str, Any] = {}
        exec("y = 1 + 1", scope)
        return Made().get(), scope["y"]

    assert frames.optimized(f)() == (1, 2)
    assert {name for name, _ in frames.seen} == {"f", "get"}


def test_recursion(frames: Frames) -> None:
    def fact(n: int) -> int:
        if n < 2:
            return 1
        m = n - 1
        return n * fact(m)

    frames.region(fact)(lambda n, m, *free: C.Resume(line(fact.__code__, 3), (n, m, *(C.KEEP for _ in free))) if n > 1 else 1)
    end = line(fact.__code__, 4)
    frames.region(fact, line(fact.__code__, 3))(lambda n, m, *free: C.Resume(end, (n, n - 1, *(C.KEEP for _ in free))))
    assert frames.optimized(fact)(20) == 2432902008176640000


def test_recursion_limit_is_eager_s() -> None:
    def depth(n: int) -> int:
        return 0 if n == 0 else 1 + depth(n - 1)

    C.set_compiler(lambda policy, state, missed: None)
    g = C.Optimized(depth, C.Policy())
    with pytest.raises(RecursionError):
        g(10**6)
    margin = sys.getrecursionlimit() - len(inspect.stack()) - 60
    assert depth(margin) == margin and g(margin) == margin


def test_deep_recursion_does_not_overflow_the_c_stack() -> None:
    """With a raised limit eager recurses without C stack. So do we: near its end the hook steps aside."""

    def depth(n: int) -> int:
        return 0 if n == 0 else 1 + depth(n - 1)

    C.set_compiler(lambda policy, state, missed: None)
    g = C.Optimized(depth, C.Policy())
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(200_000)
    try:
        assert g(100_000) == 100_000
        results: list[int] = []
        size = threading.stack_size(1 << 20)
        thread = threading.Thread(target=lambda: results.append(g(50_000)))
        thread.start()
        thread.join()
        threading.stack_size(size)
        assert results == [50_000]
    finally:
        sys.setrecursionlimit(limit)


def test_threads() -> None:
    def f(n: int) -> Any:
        time.sleep(0.0005)
        return helper(n), C.active_policy()

    def helper(n: int) -> int:
        return n

    def compiler(policy: Any, state: Any, missed: Any) -> Any:
        if state.code is helper.__code__:
            return C.Region(lambda n: (policy.payload, n), (0,))
        return None

    C.set_compiler(compiler)
    errors: list[BaseException] = []
    stop = threading.Event()

    def worker(number: int) -> None:
        try:
            policy = C.Policy(number)
            g = C.Optimized(f, policy)
            for k in range(60):
                assert g(k) == ((number, k), policy)
                assert C.active_policy() is None
                assert helper(k) == k
                if k % 20 == 0:
                    C.clear(policy)
        except BaseException as error:
            errors.append(error)

    def bystander() -> None:
        try:
            while not stop.is_set():
                assert helper(3) == 3 and f(4) == (4, None)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=worker, args=(i,)) for i in range(6)]
    other = threading.Thread(target=bystander)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        other.start()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        stop.set()
        other.join()
        sys.setswitchinterval(interval)
    assert not errors and not C.eval_frame_installed()
    gc.collect()
    assert C.regions() == []


def test_a_thread_started_inside_is_not_active(frames: Frames) -> None:
    def f() -> Any:
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(C.active_policy()))
        thread.start()
        thread.join()
        return seen

    assert frames.optimized(f)() == [None]


class Methods:
    def method(self, x: int) -> Any:
        return self, x, C.active_policy()


POLICY = C.Policy("methods")


def test_descriptors_and_attributes() -> None:
    def f(a: int = 1) -> Any:
        """Says what f does."""
        return a

    g = C.Optimized(f, POLICY)
    assert g.__wrapped__ is f and g.__name__ == "f" and g.__doc__ == "Says what f does." and g.__module__ == __name__
    assert g.__qualname__ == f.__qualname__ and g.fn is f and g.policy is POLICY
    g.extra = 5
    assert g.__dict__["extra"] == 5 and g.extra == 5
    assert str(inspect.signature(g)) == "(a: 'int' = 1) -> 'Any'"
    assert repr(g).startswith("<Optimized <function") and repr(C.Disabled(f)).startswith("<Disabled")

    class Holder:
        bound = C.Optimized(Methods.method, POLICY)
        unbound = C.Optimized(staticmethod(f), POLICY)
        builtin = C.Optimized(len, POLICY)
        off = C.Disabled(Methods.method)

    h = Holder()
    assert h.bound(3) == (h, 3, POLICY)
    assert Holder.bound(h, 3) == (h, 3, POLICY)
    assert h.unbound(7) == 7 and h.builtin([1]) == 1
    assert h.off(1) == (h, 1, None)
    assert C.Optimized(h.bound, POLICY)(2) == (h, 2, POLICY)
    assert copy.copy(g).fn is f and copy.deepcopy(g) is g
    import weakref

    assert weakref.ref(g)() is g


def test_copies_of_sentinels() -> None:
    for sentinel in (C.UNBOUND, C.NULL_, C.KEEP, C.SKIP_ENTRY, C.SKIP_CODE):
        assert copy.deepcopy([sentinel])[0] is sentinel


def test_callables_that_are_no_functions() -> None:
    class Callable:
        def __call__(self, x: int) -> Any:
            return x, C.active_policy()

    assert C.Optimized(Callable(), POLICY)(1) == (1, POLICY)
    assert C.Optimized(Callable, POLICY)().__class__ is Callable
    assert C.Optimized(C.Disabled(Callable()), POLICY)(1) == (1, None)
    with pytest.raises(TypeError, match="positional"):
        C.Optimized(lambda: None, POLICY)(1)


def test_a_chosen_policy_stays_alive_while_it_may_come_back() -> None:
    def forgets() -> None:
        C.set_active_policy(None)
        gc.collect()

    assert C.set_active_policy(C.Policy("chosen")) is None
    C.Optimized(forgets, C.Policy("other"))()
    gc.collect()
    policy = C.set_active_policy(None)
    assert policy.payload == "chosen"
    assert C.set_active_policy(None) is None


def test_deep_recursion_through_regions() -> None:
    def depth(n: int) -> int:
        return 0 if n == 0 else 1 + depth(n - 1)

    def compiler(policy: Any, state: Any, missed: Any) -> Any:
        return C.Region(region, (0,)) if state.code is depth.__code__ else C.SKIP_CODE

    def region(n: int) -> Any:
        if n == 0:
            return 0
        try:
            return 1 + C.call_active(depth, n - 1)
        except BaseException as error:  # what the program's own call raised is never re-run
            return C.Resume(call, (n, *(C.KEEP for _ in depth.__code__.co_freevars)), (1,), error)

    call = at(depth.__code__, "CALL")

    C.set_compiler(compiler)
    g = C.Optimized(depth, C.Policy())
    limit = sys.getrecursionlimit()
    with pytest.raises(RecursionError):
        g(10**6)
    sys.setrecursionlimit(100_000)
    try:
        assert g(40_000) == 40_000
    finally:
        sys.setrecursionlimit(limit)


def test_interrupts(frames: Frames) -> None:
    def f(log: list[Any]) -> Any:
        try:
            log.append("body")
        finally:
            log.append("finally")
        return log

    body = line(f.__code__, 2)

    def region(log: Any) -> Any:
        _thread.interrupt_main()
        return C.Resume(body, (log,), (), KeyError("not reached")) if sum(range(10)) else None

    frames.region(f)(lambda log: C.Resume(body, (log,)))
    frames.region(f, body)(region)
    log: list[Any] = []
    with pytest.raises((KeyboardInterrupt, KeyError)):
        frames.optimized(f)(log)
        raise AssertionError
    assert log == ["finally"]
