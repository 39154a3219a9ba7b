"""Where a GPU row's time and memory go: `python -m benchmarks.gpu_profile [--contenders ...] [--out folder] rows...`.

Per row and contender: what the device did in three calls, by kernel (microseconds a call), and the memory that is allocated and held; of magneto also the stages of the first call,
what fell back, and where the main thread was while it compiled (samples of its stack).
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import CONTENDERS, maker

CALLS = 3
KERNELS = 45  # rows of a table


@contextmanager
def sampled(seconds: float = 0.02) -> Iterator[Counter[str]]:
    """Samples of this thread's stack: how often which functions of ours, and which of others below them, were under way."""
    found: Counter[str] = Counter()
    ended, thread = threading.Event(), threading.get_ident()

    def look() -> None:
        while not ended.wait(seconds):
            frame, seen = sys._current_frames().get(thread), set()
            innermost = True
            while frame is not None:
                file = frame.f_code.co_filename
                place = f"{'/'.join(file.split('/')[-2:])}:{frame.f_code.co_name}"
                if innermost:
                    found[f"innermost {place}:{frame.f_lineno}"] += 1
                    innermost = False
                if "magneto" in file and place not in seen:
                    seen.add(place)
                    found[place] += 1
                frame = frame.f_back

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


def kernels_of(call: Any) -> list[tuple[str, float, float]]:
    """(kernel, microseconds a call, launches a call), the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in prof.events():
        if str(event.device_type).endswith("CUDA"):
            times[event.name] += event.time_range.elapsed_us()
            counts[event.name] += 1
    return [(name, us / CALLS, counts[name] / CALLS) for name, us in times.most_common()]


def pools() -> dict[str, float]:
    """MiB of segments by pool: held, and in use."""
    found: Counter[str] = Counter()
    for segment in torch.cuda.memory_snapshot():
        pool = str(segment.get("segment_pool_id", "?"))
        found[f"{pool} held"] += segment["total_size"] / 2**20
        found[f"{pool} used"] += segment["allocated_size"] / 2**20
    return {name: round(mib, 1) for name, mib in sorted(found.items())}


def look_at(name: str, who: str) -> list[str]:
    """The report's lines."""
    import magneto
    from magneto.base import events

    magneto.reset()
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    make, _, _ = maker(name)
    call = make(CONTENDERS[who])
    lines = [f"======== {name}: {who}"]
    start = time.perf_counter()
    with sampled() as samples:
        call()
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        for _ in range(4):
            call()
        torch.cuda.synchronize()
    lines.append(f"first call {first:.2f} s; pools {pools()}")
    if who.startswith("magneto"):
        lines += [f"  stage {stage}: {t.calls} calls, {t.own:.2f} s" for stage, t in events.timings().items() if t.own > 0.02]
        lines.append(f"  counters {events.counters()}")
        for kind in ("break", "fallback", "warning"):
            lines += [f"  {kind}: {str(e.fields)[:400]}" for e in events.events(kind)]
        lines += [f"  refused: {e.fields}" for e in events.events("artifact") if "refused" in e.fields]
        if first > 3:
            lines += [f"  {n:5} samples in {place}" for place, n in samples.most_common(60)]
    table = kernels_of(call)
    lines.append(f"device: {sum(us for _, us, _ in table):.0f} us in {sum(n for _, _, n in table):.0f} launches a call")
    lines += [f"  {us:9.1f} us {n:6.1f}x  {kernel[:150]}" for kernel, us, n in table[:KERNELS]]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contenders", default="magneto,torch.compile")
    parser.add_argument("--out", type=Path, default=Path("profiles"))
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        for who in options.contenders.split(","):
            try:
                lines = look_at(name, who)
            except Exception as error:
                lines = [f"======== {name}: {who}: {type(error).__name__}: {str(error)[:300]}"]
            with open(options.out / "profile.txt", "a") as file:
                print(*lines, sep="\n", file=file)
            print(*lines[:2], sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
