"""Triton kernels compiled in processes beside this one (`triton_compile.serve`): its compiler is Python for a third of its time, so that threads would wait for each other.

The processes start when a graph for a GPU is not found on disk, and end when nothing has been asked for a while or this process ends, however it ends. Where they cannot be had, and for what they
refuse or do not live to answer, this process compiles.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection

from magneto.base.errors import warn_once
from magneto.base.flags import config
from magneto.inductor.runtime.triton_compile import CRASHED, DIED, MADE, NUMBER, Job, Made, compiled

MOST = 16  # workers
LEAVING = 2.0  # seconds that the processes have to end

_SERVER = "import sys; sys.path[:] = {path}; from magneto.inductor.runtime.triton_compile import serve; serve({fd}, {count})"


class Workers:
    """One server and its workers, seen from here. `ended`: takes no jobs any more. `hurt`: one has died at its work."""

    def __init__(self, count: int) -> None:
        self.socket, theirs = socket.socketpair()
        command = [sys.executable, "-c", _SERVER.format(path=[str(p) for p in sys.path], fd=theirs.fileno(), count=count)]
        nothing = subprocess.DEVNULL
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=nothing, stdout=nothing, stderr=nothing)
        self.pipe = Connection(os.dup(self.socket.fileno()))
        self.asked: dict[int, tuple[Future[Made], Job]] = {}
        self.number, self.ended, self.closing, self.hurt = 0, False, False, False
        self.lock = threading.Lock()
        threading.Thread(target=self._read, name="magneto-triton-workers", daemon=True).start()

    def submit(self, job: Job) -> Future[Made]:
        future: Future[Made] = Future()
        with self.lock:
            if self.ended:
                return here(job)
            self.number += 1
            self.asked[self.number] = future, job
            try:
                self.pipe.send_bytes(self.number.to_bytes(NUMBER, "little") + pickle.dumps(job))
            except OSError:
                pass  # the reader sees the end too, and answers everything
        return future

    def _read(self) -> None:
        idle = False
        try:
            while reply := self.pipe.recv_bytes():
                future, job = self.asked.pop(int.from_bytes(reply[:NUMBER], "little"))
                verdict = reply[NUMBER : NUMBER + 1]
                if verdict == MADE:
                    future.set_result(pickle.loads(reply[NUMBER + 1 :]))
                elif verdict == CRASHED:
                    future.set_exception(RuntimeError("Triton's compiler crashed"))
                else:
                    self.hurt |= verdict == DIED
                    _again(job, future)
            idle = True
        except (EOFError, OSError):
            pass
        with self.lock:
            self.ended = True
            self.pipe.close()
            self.socket.close()
        self.process.wait()
        self.hurt |= bool(self.asked) and not idle and not self.closing
        while self.asked:
            future, job = self.asked.popitem()[1]
            future.cancel() if self.closing else _again(job, future)

    def end(self) -> None:
        """Ask the processes to end, and see that they do."""
        with self.lock:
            self.closing = True
            if not self.ended:
                self.socket.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(LEAVING)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _again(job: Job, future: Future[Made]) -> None:
    """Compile here what is asked of others."""

    def settle(done: Future[Made]) -> None:
        error = done.exception()
        future.set_exception(error) if error is not None else future.set_result(done.result())

    try:
        here(job).add_done_callback(settle)
    except RuntimeError:  # this process is about to end
        future.cancel()


# ---- of this process -------------------------------------------------------------------------------------------------------

_threads: list[ThreadPoolExecutor] = []
_workers: list[Workers] = []
_lock = threading.Lock()


def here(job: Job) -> Future[Made]:
    """Compile in a thread of this process."""
    if not _threads:
        _threads.append(ThreadPoolExecutor(min(MOST, os.cpu_count() or 1), "magneto-triton"))
    return _threads[0].submit(compiled, job)


def submit(job: Job) -> Future[Made]:
    """Compile a kernel, beside this process if that can be."""
    workers = start()
    return here(job) if workers is None else workers.submit(job)


def warn() -> None:
    """Say that workers have died, if some have. Not where it is seen: a warning may be an error."""
    for workers in _workers:
        if workers.hurt:
            workers.hurt = False
            warn_once("W006")


def start() -> Workers | None:
    """The workers, started if there are none; None where there cannot be any."""
    if not hasattr(os, "sched_getaffinity") or not os.path.basename(sys.executable or "").startswith("python") or hasattr(sys, "frozen"):
        return None
    count = config.compile_workers or len(os.sched_getaffinity(0))
    if count < 2:
        return None
    with _lock:
        if _workers and _workers[0].ended:
            _workers.clear()
        if not _workers:
            try:
                _workers.append(Workers(min(count, MOST)))
            except OSError:
                return None
        return _workers[0]


def end() -> None:
    """End the workers."""
    with _lock:
        for workers in _workers:
            workers.end()
        _workers.clear()


def _forget() -> None:
    """In a forked process: workers, their socket and threads are the parent's."""
    global _lock
    _lock = threading.Lock()
    _threads.clear()
    for workers in _workers:
        workers.process.returncode = 0  # not ours to wait for
        workers.socket.close()
        workers.pipe.close()
    _workers.clear()


atexit.register(end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
