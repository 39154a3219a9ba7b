"""What a hooked call costs: `python -m tests.frame.overhead`. Nanoseconds, the best of several rounds (machines are shared)."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

from tests.frame.harness import C, line


def f(a: int, b: int) -> int:
    c = a
    return c


def generated(a: int, b: int) -> int:
    return a


def skipped(a: int, b: int) -> int:
    return a


REST = line(f.__code__, 2)
LOOPS = 200_000


def best(run: Callable[[Any], None], fn: Any, rounds: int = 9) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run(fn)
        times.append(time.perf_counter() - start)
    return min(times) / LOOPS * 1e9


def many(fn: Any) -> None:
    for _ in range(LOOPS):
        fn(1, 2)


def empty(fn: Any) -> None:
    for _ in range(LOOPS):
        pass


def with_region(region: Callable[..., Any]) -> Any:
    policy = C.Policy()

    def compiler(policy: Any, state: Any, missed: Any) -> Any:
        if state.code is not f.__code__ or state.offset:
            return C.SKIP_CODE if state.offset == 0 else C.SKIP_ENTRY
        return C.Region(region, (0, 1))

    C.set_compiler(compiler)
    C.Optimized(f, policy)(1, 2)
    C.Optimized(skipped, policy)(1, 2)
    C.Optimized(many, policy)(lambda a, b: a)
    return policy


def main() -> None:
    loop = best(empty, None)
    plain = best(many, f) - loop
    direct = best(many, generated) - loop
    policy = with_region(generated)
    optimized = best(many, C.Optimized(f, policy)) - loop
    active = C.Optimized(many, policy)
    inner = best(active, f) - loop
    inner_skipped = best(active, skipped) - loop
    resuming = with_region(lambda a, b: C.Resume(REST, (a, b, a)))
    resumed = best(many, C.Optimized(f, resuming)) - loop
    disabled = best(many, C.Disabled(f)) - loop
    print(f"Python {platform.python_version()}: a plain call {plain:.1f} ns, the generated function called directly {direct:.1f} ns")
    print(f"  Optimized call that hits a region  {optimized:6.1f}   (+{optimized - direct:.1f} over calling the generated function)")
    print(f"  hooked call inside an active call  {inner:6.1f}   (+{inner - direct:.1f})")
    print(f"  skipped call inside an active call {inner_skipped:6.1f}   (+{inner_skipped - plain:.1f} over a plain call)")
    print(f"  Optimized call that makes a Resume {resumed:6.1f}   (+{resumed - direct - plain:.1f} over both functions)")
    print(f"  Disabled call                      {disabled:6.1f}   (+{disabled - plain:.1f} over a plain call)")


if __name__ == "__main__":
    main()
