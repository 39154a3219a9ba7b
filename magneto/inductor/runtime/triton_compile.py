"""From a Triton kernel's text to its binary; loads nothing, meets no device. `serve` is a process that does nothing else: it imports Triton once and forks a worker for each job that finds none idle.

Imports no torch: a worker starts in the time that Triton's own import takes.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from magneto.base.dataclass import dataclass
from magneto.base.text import compile_source

HEAD = "import triton\nimport triton.language as tl\nfrom magneto.inductor.codegen import triton_library as lib\n\n\n# no pairs of small integers\n@triton.jit\n"
ALIGNMENT = 16
IDLE = 30.0  # seconds without a job after which a server ends
MADE, REFUSED, DIED, CRASHED = (
    b"m",
    b"r",
    b"d",
    b"c",
)  # what became of a job; CRASHED: the kernel brought the compiler down, and would do so again
NUMBER = 8  # bytes before every job and reply
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)

Made = tuple[bytes, str, int, int]  # image, name, bytes of shared memory, threads


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel's whole text and all else that its binary depends on, besides Triton. `described`: element and block of matrices that are parameters behind the pointers."""

    source: str
    pointers: tuple[str, ...]
    constants: tuple[tuple[str, int], ...]
    warps: int
    stages: int
    described: tuple[tuple[str, tuple[int, int]], ...]
    asserts: bool
    capability: tuple[int, int]
    aligned: bool


@cache
def function_of(source: str) -> Any:
    """The jitted function of a text."""
    name = f"magneto_kernel_{sha256(source.encode()).hexdigest()[:12]}"
    source = source.replace("def kernel(", f"def {name}(")
    return compile_source(f"<{name}>", source, {"__name__": "magneto.kernels"})[name]


def binary_of(job: Job) -> Any:
    """Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(job.constants)
    if "ALIGNED" in constants:
        constants["ALIGNED"] = int(job.aligned)
    n = len(job.pointers)
    signature = {f"p{i}": pointer for i, pointer in enumerate(job.pointers)}
    signature |= {f"d{i}": f"tensordesc<{element}{list(block)}>" for i, (element, block) in enumerate(job.described)}
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {(i,): [["tt.divisibility", ALIGNMENT]] for i in range(n)} if job.aligned or "ALIGNED" in constants else {}
    source = ASTSource(function_of(job.source), signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": job.warps, "enable_fp_fusion": False, "enable_reflect_ftz": False}
    if job.stages:
        options["num_stages"] = job.stages
    if job.asserts:
        options |= {"debug": True, "sanitize_overflow": False}
    major, minor = job.capability
    target = GPUTarget("cuda", 10 * major + minor, 32)
    with _looking() as seen:
        made = triton.compile(source, target=target, options=options)
    if PAIRS.search(seen[0] if seen else made.asm.get("llir", "")):  # ptxas has its own optimisations
        with _llvm_off():
            made = triton.compile(source, target=target, options=options)
    return made


PAIRS = re.compile(r"= (?:add|sub|mul|[su]div|[su]rem|shl|[al]shr)\b[^\n]*<\d+ x i(?:8|16)>")
"""What LLVM makes of places in an image such as (y + 1) // 2 and (x + 1) // 2: one computation with small integers side by side. ptxas 12.8 miscompiles such pairs (it forgets a constant of one half
where it computes an `add.s16x2` twice): gradients of pools were those of other elements."""

_environment = threading.RLock()
_OFF = "DISABLE_LLVM_OPT"


@contextmanager
def _looking() -> Iterator[list[str]]:
    """LLVM's text of what Triton compiles meanwhile, if it lets us look at its stages, and has not compiled it before."""
    import triton

    seen: list[str] = []
    runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
    if not hasattr(runtime, "add_stages_inspection_hook"):
        yield seen
        return
    with _environment:
        before = runtime.add_stages_inspection_hook

        def hook(backend: Any, stages: dict[str, Any], *rest: Any) -> Any:
            make = stages.get("llir")
            if make is not None:

                def noted(source: Any, metadata: Any) -> Any:
                    made = make(source, metadata)
                    seen.append(str(made))
                    return made

                stages["llir"] = noted
            return before(backend, stages, *rest) if before is not None else None

        runtime.add_stages_inspection_hook = hook
        try:
            yield seen
        finally:
            runtime.add_stages_inspection_hook = before


@contextmanager
def _llvm_off() -> Iterator[None]:
    """Compilations by Triton without LLVM's optimisations."""
    with _environment:
        before = os.environ.get(_OFF)
        os.environ[_OFF] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_OFF]
            else:
                os.environ[_OFF] = before


def compiled(job: Job) -> Made:
    """What is loaded of a compiled kernel."""
    made = binary_of(job)
    found = made.metadata
    if any(getattr(found, name, 0) for name in ("global_scratch_size", "profile_scratch_size")):
        raise RuntimeError("a kernel asks for scratch memory")
    boxes = [(meta["block_size"], meta["swizzle"]) for meta in getattr(found, "tensordesc_meta", None) or ()]
    if boxes != [box_of(block) for _, block in job.described]:
        raise RuntimeError("blocks that descriptors do not describe so")
    return made.asm["cubin"], found.name, found.shared, 32 * found.num_warps


def box_of(block: tuple[int, int]) -> tuple[list[int], int]:
    """What the copy engine reads at once of a block of 16-bit elements, and how it turns rows in shared memory: they have 128 bytes there at most."""
    width = min(block[1], 64)
    return [block[0], width], {16: 1, 32: 2, 64: 3}[width]


# ---- the process that compiles ---------------------------------------------------------------------------------------------


def serve(fd: int, count: int) -> None:
    """Answer jobs that come through the socket `fd` by at most `count` workers, until its other end is closed or nothing comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asking = Connection(fd)
    files = tempfile.mkdtemp(prefix="magneto-triton-")
    os.environ |= {"TRITON_CACHE_DIR": files, "TRITON_STORE_BINARY_ONLY": "1"}  # the store keeps binaries: Triton need not
    workers: dict[Connection, int] = {}
    try:
        _import_triton()
        _dispatch(asking, workers, count)
    finally:
        for pid in workers.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(files, ignore_errors=True)


def _import_triton() -> None:
    """All that the first job of every worker would import."""
    import triton.compiler.code_generator
    import triton.runtime.cache

    from magneto.inductor.codegen import triton_library

    assert triton_library.__doc__
    for module in (triton.runtime.cache, triton.compiler.compiler):
        if hasattr(
            module, "triton_key"
        ):  # a digest of Triton's own files, half a second; it names files in a directory that nobody else sees
            module.triton_key = lambda: ""


def _dispatch(asking: Connection, workers: dict[Connection, int], count: int) -> None:
    waiting: deque[bytes] = deque()
    busy: dict[Connection, bytes] = {}
    while True:
        ready = wait([asking, *workers], None if busy else IDLE)
        if not ready:
            asking.send_bytes(b"")
            return
        for one in ready:
            if one is asking:
                try:
                    waiting.append(asking.recv_bytes())
                except (EOFError, OSError):
                    return
            elif isinstance(one, Connection):
                _answered(one, asking, workers, busy)
        while waiting and (worker := _idle(asking, workers, busy, count)) is not None:
            busy[worker] = waiting[0][:NUMBER]
            try:
                worker.send_bytes(waiting[0][NUMBER:])
                waiting.popleft()
            except OSError:  # it has died meanwhile
                _gone(worker, workers, busy)


def _answered(worker: Connection, asking: Connection, workers: dict[Connection, int], busy: dict[Connection, bytes]) -> None:
    number = busy.get(worker)
    try:
        reply = worker.recv_bytes()
        del busy[worker]
    except (EOFError, OSError):
        reply = CRASHED if os.WIFSIGNALED(status := _gone(worker, workers, busy)) and os.WTERMSIG(status) in _CRASHES else DIED
    if number is not None:
        asking.send_bytes(number + reply)


def _gone(worker: Connection, workers: dict[Connection, int], busy: dict[Connection, bytes]) -> int:
    """Forget a worker that has ended; how it did."""
    busy.pop(worker, None)
    worker.close()
    return os.waitpid(workers.pop(worker), 0)[1]


def _idle(asking: Connection, workers: dict[Connection, int], busy: dict[Connection, bytes], count: int) -> Connection | None:
    found = next((worker for worker in workers if worker not in busy), None)
    if found is not None or len(workers) >= count:
        return found
    ours, theirs = Pipe()
    pid = os.fork()
    if not pid:
        try:
            _work(theirs, (asking, ours, *workers))
        finally:
            os._exit(0)
    theirs.close()
    workers[ours] = pid
    return ours


def _work(jobs: Connection, others: Iterable[Connection]) -> None:
    """A worker: ends with its server."""
    for connection in others:
        connection.close()
    while True:
        job = jobs.recv_bytes()
        try:
            reply = MADE + pickle.dumps(compiled(pickle.loads(job)))
        except Exception:  # this process's user compiles it again, and sees the error
            reply = REFUSED
        jobs.send_bytes(reply)
