"""Instruments: processor time with children, peak memory, interleaved timing, what machine this is."""

from __future__ import annotations

import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds() -> float:
    """User and system seconds of this process, its finished children, and its living descendants (compile workers stay alive)."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total + sum(_seconds_of_living(os.getpid()))


def _seconds_of_living(root: int) -> list[float]:
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue  # it has just ended
        fields = stat.rpartition(")")[2].split()
        parents[int(entry)] = int(fields[1])
        seconds[int(entry)] = sum(map(int, fields[11:15])) / _TICKS  # own and finished children's, user and system

    def descends(pid: int) -> bool:
        while pid := parents.get(pid, 0):
            if pid == root:
                return True
        return False

    return [value for pid, value in seconds.items() if pid != root and descends(pid)]


@dataclass
class Cost:
    """Seconds of one call: on the clock, and of all processors."""

    wall: float
    cpu: float


def cost_of(call: Callable[[], Any]) -> tuple[Any, Cost]:
    """(result, cost) of one call."""
    cpu, wall = processor_seconds(), time.perf_counter()
    result = call()
    wall = time.perf_counter() - wall
    return result, Cost(wall, processor_seconds() - cpu)


def _status_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    return 0.0


def memory_peak_mb(call: Callable[[], Any]) -> float:
    """Largest resident memory of this process while `call` runs, in MB; NaN where the kernel does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the present size
    except OSError:
        return float("nan")
    call()
    return _status_mb("VmHWM")


def interleaved(
    calls: Mapping[str, Callable[[], Any]], seconds: float, least: int = 5, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds per call of each variant, measured in turns until `seconds` have passed and every variant ran `least` times.

    The order turns round from round to round, so that no variant always runs after the same other one.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    start = time.perf_counter()
    turn = 0
    while turn < least or time.perf_counter() - start < seconds:
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = clock()
            calls[name]()
            times[name].append(clock() - begin)
        turn += 1
    return times


def geometric_mean(values: list[float]) -> float:
    """NaN for none."""
    return statistics.geometric_mean(values) if values else float("nan")


def environment() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    import torch

    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "cpu": cpu,
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit + ("+changes" if dirty else ""),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def run_worker(module: str, arguments: list[str], env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments` in a fresh process at the root of the repository."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=timeout
    )
