"""Entry points: chains of regions in one frame, guards in order, what the compiler may answer, removal. (torchfree)"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from tests.frame.harness import C, Frames, at, line, slots


def looped(n: int, log: list[Any]) -> int:
    total = 0
    for i in range(n):
        log.append(i)
        total += i
    return total


HEAD = at(looped.__code__, "FOR_ITER")
TAIL = line(looped.__code__, 4)


def chain(frames: Frames) -> None:
    """start -> head of the loop -> (append executed by the region) -> tail -> head ..."""

    @frames.region(looped)
    def start(n: int, log: Any, total: Any, i: Any) -> Any:
        return C.Resume(HEAD, (n, log, 0, i), (iter(range(n)),))

    @frames.region(looped, HEAD)
    def head(n: int, log: Any, total: int, i: Any, iterator: Any) -> Any:
        for item in iterator:
            log.append(("compiled", item))
            return C.Resume(TAIL, (n, log, total, item), (iterator,))
        return total

    @frames.region(looped, TAIL)
    def tail(n: int, log: Any, total: int, i: int, iterator: Any) -> Any:
        return C.Resume(HEAD, (n, log, total + i, i), (iterator,))


def test_chain_of_regions_inside_a_loop(frames: Frames) -> None:
    chain(frames)
    g = frames.optimized(looped)
    before = C.counters()
    log: list[Any] = []
    assert g(4, log) == 6
    assert log == [("compiled", i) for i in range(4)]
    assert frames.seen == [("looped", 0), ("looped", HEAD), ("looped", TAIL)]
    now = C.counters()
    assert now["interpreted"] == before["interpreted"] and now["hooked"] == before["hooked"] + 1
    assert now["hits"] - before["hits"] == 1 + 5 + 4 and now["misses"] - before["misses"] == 3
    for region in C.regions(looped.__code__, frames.policy):
        assert region.valid and region.code is looped.__code__ and region.policy is frames.policy
    hits = {region.offset: region.hits for region in C.regions(looped.__code__)}
    assert hits == {0: 1, HEAD: 5, TAIL: 4}


def test_chain_ends_in_the_interpreter(frames: Frames) -> None:
    chain(frames)
    del frames.table[looped.__code__, TAIL]
    log: list[Any] = []
    assert frames.optimized(looped)(3, log) == 3
    assert log == [("compiled", 0), 1, 2]


def test_resume_that_asks_for_the_interpreter(frames: Frames) -> None:
    chain(frames)
    frames.region(looped)(lambda n, log, *_: C.Resume(HEAD, (n, log, 100, C.UNBOUND), (iter(range(n)),), interpret=True))
    log: list[Any] = []
    assert frames.optimized(looped)(3, log) == 103
    assert log == [0, 1, 2] and frames.seen == [("looped", 0)]


def test_guards_are_tried_in_order_and_hits_move_to_the_front() -> None:
    def f(x: Any) -> Any:
        return "interpreted", x

    calls: list[str] = []

    def region(kind: type) -> Any:
        def guard(x: Any) -> bool:
            calls.append(kind.__name__)
            return type(x) is kind

        return C.Region(lambda x: (kind.__name__, x), (0,), guard, info=kind)

    missed_kinds: list[Any] = []

    def compiler(policy: Any, state: Any, missed: list[Any]) -> Any:
        missed_kinds.append([r.info for r in missed])
        kind = type(state.locals[0])
        return region(kind) if kind in (int, str, list) else None

    C.set_compiler(compiler)
    policy = C.Policy()
    g = C.Optimized(f, policy)
    assert [g(1), g("a"), g([])] == [("int", 1), ("str", "a"), ("list", [])]
    assert missed_kinds == [[], [int], [str, int]]
    calls.clear()
    assert g(1) == ("int", 1) and calls == ["list", "str", "int"]
    calls.clear()
    assert g(2) == ("int", 2) and calls == ["int"]
    assert g(1.5) == ("interpreted", 1.5)
    assert [r.info for r in C.regions(f.__code__, policy)] == [int, list, str]


def test_a_guard_that_fails_or_raises_is_a_miss() -> None:
    def f(x: Any) -> Any:
        return x

    C.set_compiler(lambda policy, state, missed: C.Region(lambda x: "compiled", (0,), lambda x: 1 / x > 0))
    g = C.Optimized(f, C.Policy())
    assert g(1) == "compiled"
    assert g(0) == 0  # raises: a miss; the new region's guards do not hold either: interpreted
    assert g(-1) == -1


def test_answers_of_the_compiler() -> None:
    def f(x: int) -> int:
        return inner(x) + 1

    def inner(x: int) -> int:
        return x * 2

    answers: dict[str, Any] = {"f": None, "inner": None}
    asked: list[str] = []

    def compiler(policy: Any, state: Any, missed: Any) -> Any:
        asked.append(state.code.co_name)
        return answers[state.code.co_name]

    C.set_compiler(compiler)
    policy = C.Policy()
    g = C.Optimized(f, policy)
    assert g(1) == 3 and g(2) == 5 and asked == ["f", "inner"] * 2
    answers["f"] = C.SKIP_CODE
    asked.clear()
    assert g(1) == 3 and g(2) == 5 and asked == ["f", "inner", "inner"]  # its callees still are asked for
    answers["inner"] = C.SKIP_ENTRY
    asked.clear()
    assert g(1) == 3 and g(2) == 5 and asked == ["inner"]
    C.clear(policy)
    answers["f"] = answers["inner"] = None
    asked.clear()
    assert g(1) == 3 and asked == ["f", "inner"]
    answers["f"] = "nonsense"
    with pytest.raises(TypeError, match="the compiler returned str"):
        g(1)
    answers["f"] = None
    policy.compile = False
    asked.clear()
    assert g(1) == 3 and asked == []


def test_skip_entry_keeps_the_regions_it_has() -> None:
    def f(x: Any) -> Any:
        return "interpreted"

    answers = [C.Region(lambda x: "compiled", (0,), lambda x: x == 1), C.SKIP_ENTRY]
    C.set_compiler(lambda policy, state, missed: answers.pop(0))
    g = C.Optimized(f, C.Policy())
    assert [g(1), g(2), g(1), g(3)] == ["compiled", "interpreted", "compiled", "interpreted"]
    assert answers == []


def test_policies_do_not_share_regions() -> None:
    def f(x: Any) -> Any:
        return "interpreted"

    C.set_compiler(lambda policy, state, missed: C.Region(lambda x: policy.payload, (0,)))
    policies = [C.Policy(i) for i in range(40)]  # makes the table of entry points grow
    callables = [C.Optimized(f, p) for p in policies]
    for _ in range(2):
        assert [g(0) for g in callables] == list(range(40))
    assert len(C.regions(f.__code__)) == 40
    for k in range(0, 40, 3):
        policies[k] = callables[k] = None
    gc.collect()
    assert [g(0) for g in callables if g] == [p.payload for p in policies if p]
    assert len(C.regions(f.__code__)) == 40 - 14


def test_regions_die_with_their_policy_and_with_their_code() -> None:
    class Marker:
        pass

    def make() -> tuple[Any, Any]:
        scope: dict[str, Any] = {}
        exec("def f(x):\n    return x", scope)
        return scope["f"], Marker()

    refs: list[Any] = []

    def compiler(policy: Any, state: Any, missed: Any) -> Any:
        marker = Marker()
        refs.append(weakref.ref(marker))
        return C.Region(lambda x: (x, marker)[0], (0,), None, info=policy)  # a cycle through the policy

    C.set_compiler(compiler)
    f, _ = make()
    policy = C.Policy()
    policy_ref = weakref.ref(policy)
    assert C.Optimized(f, policy)(1) == 1
    del policy
    gc.collect()
    assert policy_ref() is None and refs[-1]() is None and C.regions() == []
    assert f(2) == 2
    policy = C.Policy()
    code_ref = weakref.ref(f.__code__)
    assert C.Optimized(f, policy)(1) == 1
    del f
    gc.collect()
    assert code_ref() is None and refs[-1]() is None and C.regions(policy=policy) == []


def test_removing_and_invalidating() -> None:
    def f(x: Any) -> Any:
        return "interpreted"

    made: list[Any] = []

    def compiler(policy: Any, state: Any, missed: Any) -> Any:
        made.append(C.Region(lambda x: ("compiled", len(made)), (0,)))
        return made[-1]

    C.set_compiler(compiler)
    policy = C.Policy()
    g = C.Optimized(f, policy)
    assert g(0) == ("compiled", 1)
    made[0].valid = False
    assert not made[0].valid and made[0].code is None and made[0].offset == -1
    with pytest.raises(ValueError):
        made[0].valid = True
    assert g(0) == ("compiled", 2)
    made[1].invalidate()
    assert made[1].fn is None and not made[1].valid
    assert g(0) == ("compiled", 3)
    C.clear(C.Policy())
    assert made[2].valid
    C.clear()
    assert not made[2].valid and C.regions() == []


def test_a_region_stands_at_one_entry_point_only() -> None:
    def f(x: Any) -> Any:
        return x

    region = C.Region(lambda x: "compiled", (0,))
    C.set_compiler(lambda policy, state, missed: region)
    assert C.Optimized(f, C.Policy(1))(0) == "compiled" or True
    keep = C.Policy(2)
    assert C.Optimized(f, keep)(0) == "compiled"
    with pytest.raises(ValueError, match="already stands"):
        C.Optimized(f, C.Policy(3))(0)


def test_region_replaced_while_it_runs() -> None:
    def f(x: int) -> Any:
        y = x
        return y

    offset = line(f.__code__, 2)
    made: list[Any] = []

    def first(x: int, *_: Any) -> Any:
        made[0].invalidate()
        C.clear()
        gc.collect()
        return C.Resume(offset, (x, 10))

    def compiler(policy: Any, state: Any, missed: Any) -> Any:
        if state.offset:
            made.append(C.Region(lambda x, y: (x, y, "second"), (0, 1)))
        else:
            made.append(C.Region(first, (0,)))
        return made[-1]

    C.set_compiler(compiler)
    policy = C.Policy()
    assert C.Optimized(f, policy)(5) == (5, 10, "second")
    assert [r.offset for r in C.regions(f.__code__)] == [offset]


def test_policy_dropped_while_its_region_runs() -> None:
    def f(x: int) -> Any:
        y = x
        return y

    holder: list[Any] = []

    def region(x: int, *_: Any) -> Any:
        holder.clear()
        gc.collect()
        return C.Resume(line(f.__code__, 2), (x, 10))

    C.set_compiler(lambda policy, state, missed: None if state.offset else C.Region(region, (0,)))
    holder.append(C.Optimized(f, C.Policy()))
    assert holder[0](5) == 10
    gc.collect()
    assert C.regions() == []


def test_compiler_that_calls_optimised_code_itself() -> None:
    def f(x: int) -> int:
        return x + 1

    depth: list[int] = []

    def compiler(policy: Any, state: Any, missed: Any) -> Any:
        depth.append(1)
        if len(depth) < 3:
            assert g(10) in (11, "compiled")  # compiles the same entry point first
        return C.Region(lambda x: "compiled", (0,))

    C.set_compiler(compiler)
    policy = C.Policy()
    g = C.Optimized(f, policy)
    assert g(1) == "compiled"
    assert len(C.regions(f.__code__, policy)) == 3


def test_many_slots_and_arguments(frames: Frames) -> None:
    names = [f"v{i}" for i in range(90)]
    scope: dict[str, Any] = {}
    body = "\n".join(f"    {n} = {i}" for i, n in enumerate(names))
    exec(f"def f(a):\n{body}\n    return a, {', '.join(names)}", scope)
    f = scope["f"]
    offset = line(f.__code__, 91)
    frames.region(f)(lambda a, *rest: C.Resume(offset, (a, *range(100, 190))))
    assert frames.optimized(f)(7) == (7, *range(100, 190))
    frames.region(f, offset)(lambda *args: args)
    C.clear()
    assert frames.optimized(f)(7) == (7, *range(100, 190))
    assert len(slots(f.__code__)) == 91


def test_bad_arguments() -> None:
    with pytest.raises(TypeError):
        C.Region(1, (0,))
    with pytest.raises(ValueError):
        C.Region(len, (-1,))
    with pytest.raises(TypeError):
        C.Region(len, (0,), guards=5)
    with pytest.raises(TypeError):
        C.set_compiler(5)
    with pytest.raises(TypeError):
        C.Optimized(5, C.Policy())
    with pytest.raises(TypeError):
        C.Optimized(len, None)
