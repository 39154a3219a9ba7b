"""Kernels compiled beside the process: the same binaries, whatever becomes of those who compile. No device is needed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from magneto.base.errors import MagnetoWarning
from magneto.base.events import counters
from magneto.base.flags import config
from magneto.inductor.runtime import triton_launch, triton_workers
from magneto.inductor.runtime.triton_compile import HEAD, Job, compiled
from magneto.inductor.runtime.triton_workers import Workers, start, submit

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed"),
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="workers need Linux"),
    pytest.mark.timeout(120),
]
ROOT = Path(__file__).parents[3]
BODY = "def kernel(p0, p1, XBLOCK: tl.constexpr):\n    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)\n    tl.store(p1 + x, {})\n"


def job(expression: str, aligned: bool = True) -> Job:
    return Job(HEAD + BODY.format(expression), ("*fp32", "*fp32"), (("XBLOCK", 256),), 4, 0, (), False, (9, 0), aligned)


JOBS = [job(f"lib.maximum(tl.load(p0 + x), {k}.0)", k != 2) for k in range(4)]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Workers]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton_workers.end()
    with config.patch(compile_workers=2):
        found = start()
        assert found is not None
        yield found
        triton_workers.end()
    assert found.process.returncode is not None


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) == pid and state != "Z":
                found.append(int(entry.name))
    return found


def ended(pid: int, seconds: float = 20) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_the_same_binaries(workers: Workers) -> None:
    beside = [future.result() for future in [submit(one) for one in JOBS]]
    assert 1 <= len(children(workers.process.pid)) <= 2
    assert beside == [compiled(one) for one in JOBS]
    assert len({image for image, *_ in beside}) == len(JOBS)
    assert start() is workers


def test_what_is_refused_is_an_error_here(workers: Workers) -> None:
    refused, served = submit(job("no_such_function(x)")), submit(JOBS[0])
    with pytest.raises(Exception, match="no_such_function"):
        refused.result()
    assert served.result() == compiled(JOBS[0])


def test_a_killed_worker_and_a_killed_server(workers: Workers) -> None:
    submit(JOBS[0]).result()
    (worker,) = children(workers.process.pid)
    os.kill(worker, signal.SIGKILL)
    assert submit(JOBS[1]).result() == compiled(JOBS[1])  # by another one
    os.kill(workers.process.pid, signal.SIGSTOP)
    asked = [submit(one) for one in JOBS]
    os.kill(workers.process.pid, signal.SIGKILL)
    assert [future.result() for future in asked] == [compiled(one) for one in JOBS]
    with pytest.warns(MagnetoWarning, match="W006"):
        triton_workers.warn()
    assert workers.ended
    again = start()
    assert again is not workers and again is not None
    assert submit(JOBS[2]).result() == compiled(JOBS[2])


def test_a_worker_that_dies_at_its_job(workers: Workers, tmp_path: Path) -> None:
    def deadly(signal: str) -> Job:
        """Kills whoever reads it, except this process."""
        source = JOBS[0].source + f"import os, signal\nif os.getpid() != {os.getpid()}:\n    os.kill(os.getpid(), signal.{signal})\n"
        return replace(JOBS[0], source=source)

    crashed = submit(deadly("SIGSEGV"))
    with pytest.raises(RuntimeError, match="crashed"):
        crashed.result()
    with config.patch(cache_dir=str(tmp_path / "cache")), pytest.warns(MagnetoWarning, match="W006"):
        found = triton_launch.finished(triton_launch.begun(deadly("SIGKILL")))
    assert found.shared == compiled(JOBS[0])[2]
    assert submit(JOBS[3]).result() == compiled(JOBS[3])


def test_a_forked_process_has_its_own(workers: Workers) -> None:
    submit(JOBS[0]).result()
    pid = os.fork()
    if not pid:
        os._exit(0 if not triton_workers._workers and not triton_workers._threads else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert submit(JOBS[1]).result() == compiled(JOBS[1])


def test_idle_servers_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton_workers.end()
    monkeypatch.setattr(
        triton_workers,
        "_SERVER",
        triton_workers._SERVER.replace("import serve;", "import serve; import magneto.inductor.runtime.triton_compile as t; t.IDLE = 0.2;"),
    )
    with config.patch(compile_workers=2):
        first = start()
        assert first is not None
        assert submit(JOBS[0]).result() == compiled(JOBS[0])
        assert ended(first.process.pid)
        assert submit(JOBS[1]).result() == compiled(JOBS[1])
    triton_workers.end()


def test_one_worker_is_this_process() -> None:
    triton_workers.end()
    with config.patch(compile_workers=1):
        assert start() is None
        assert submit(JOBS[0]).result() == compiled(JOBS[0])


PROGRAM = """
import os, sys, time
sys.path.insert(0, {root!r})
from magneto.base.flags import config
from magneto.inductor.runtime import triton_workers
from magneto.inductor.runtime.triton_compile import Job
config.compile_workers = 2
asked = [triton_workers.submit(job) for job in {jobs!r}]
asked[0].result()
assert "torch" not in sys.modules
print(triton_workers._workers[0].process.pid, flush=True)
sys.stdin.readline()
{end}
"""


@pytest.mark.parametrize("end", ["", "os._exit(3)", "os.kill(os.getpid(), 9)", "raise KeyboardInterrupt", "os.fork() or time.sleep(1)"])
def test_nothing_stays_behind(end: str) -> None:
    """However the program ends, with jobs under way."""
    text = PROGRAM.format(root=str(ROOT), jobs=JOBS, end=end)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", text], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as program:
        assert program.stdout is not None
        server = int(program.stdout.readline())
        pids = [server, *children(server)]
        said = program.communicate("\n", 100)[1]
    assert len(pids) >= 2
    assert all(ended(pid) for pid in pids)
    assert ("Traceback" in said) == end.startswith("raise"), said
    assert "W006" not in said


def test_binaries_are_asked_for_once_and_kept(workers: Workers, tmp_path: Path) -> None:
    with config.patch(cache_dir=str(tmp_path / "cache")):
        before = counters().get("kernels_compiled", 0)
        one, two = triton_launch.begun(JOBS[0]), triton_launch.begun(JOBS[0])
        assert isinstance(one, tuple) and one == two
        assert triton_launch.finished(one) == triton_launch.finished(two) == triton_launch.begun(JOBS[0])
        assert counters()["kernels_compiled"] == before + 1 and not triton_launch._asked
