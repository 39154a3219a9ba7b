"""Triton kernels in this process: text -> binary -> launcher. Triton compiles what is not found on disk (`triton_workers.py`).

A launcher is called with the tensors of a kernel's parameters. Kernels are compiled for pointers that are multiples of 16 bytes, as allocations are; where a tensor
comes otherwise (a view given by the user), a second form without that assumption is compiled.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from magneto import _C
from magneto.base.dataclass import replace
from magneto.base.events import counter
from magneto.base.flags import config
from magneto.inductor.runtime import driver
from magneto.inductor.runtime.driver import Binary
from magneto.inductor.runtime.plan_code import Described, Launched, TritonKernel, TritonTable, work_of
from magneto.inductor.runtime.store import key_of, store
from magneto.inductor.runtime.triton_compile import ALIGNMENT, HEAD, Job, Made, box_of
from magneto.inductor.runtime.triton_workers import submit, warn

REMEMBERED = 64  # calls of a kernel with descriptors, by addresses
OLDEST = (7, 0)  # compute capability that Triton takes
HOPPER = (9, 0)  # from which on kernels may begin while those before them end
FEW = 1 << 14  # programs of a kernel of which each waits: the wait is part of each one's life, what it saves is a part of the kernel's
WAIT = "    tl.extra.cuda.gdc_wait()\n    tl.extra.cuda.gdc_launch_dependents()\n"

Launcher = Callable[..., None]


@cache
def why_not(device: torch.device) -> str:
    """The reason for which Triton cannot serve a device; empty: it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.version.hip is not None:
        return "kernels are written for NVIDIA's devices only"
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        return f"compute capability {found[0]}.{found[1]} is older than {OLDEST[0]}.{OLDEST[1]}"
    return ""


def source_of(kernel: TritonKernel, waits: bool = False) -> str:
    """The whole text of a kernel, as Triton reads it. `waits`: each program waits for what was launched before, first of all (it may read or write any of that memory), and then lets the next kernel's begin."""
    head, rest = kernel.body.split("\n", 1)
    return f"{HEAD}{head}\n{WAIT if waits else ''}{rest}"


@cache
def _triton_waits() -> bool:
    """Does this Triton know of launches that overlap?"""
    spec = importlib.util.find_spec("triton")
    return spec is not None and spec.origin is not None and Path(spec.origin).with_name("language").joinpath("extra/cuda/gdc.py").is_file()


def waits(kernel: TritonKernel, capability: tuple[int, int]) -> bool:
    """Do a kernel's programs wait for the kernels before it, so that its launch need not?"""
    return config.dependent_launches and capability >= HOPPER and prod(kernel.grid) <= FEW and _triton_waits()


def job_of(kernel: TritonKernel, capability: tuple[int, int], aligned: bool = True) -> Job:
    """What Triton is asked."""
    described = tuple([(kernel.pointers[pointer][1:], block) for pointer, *_, block in kernel.described])
    rest = kernel.pointers, kernel.constants, kernel.warps, kernel.stages, described, kernel.asserts
    return Job(source_of(kernel, waits(kernel, capability)), *rest, capability, aligned)


# ---- binaries ------------------------------------------------------------------------------------------------------------


@cache
def _toolchain() -> str:
    """What else than a kernel's text decides its binary; found without importing Triton."""
    spec = importlib.util.find_spec("triton")
    found = "" if spec is None or spec.origin is None else f"{spec.origin} {os.stat(spec.origin).st_mtime_ns}"
    try:
        found += importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        pass  # where it lies, and since when, says it too
    library = Path(__file__).parents[1] / "codegen/triton_library.py"
    return key_of(found, torch.__version__, HEAD, library.read_bytes())


_asked: dict[str, Future[Made]] = {}
"""Binaries that are being compiled, by key."""


def begin(wanted: Launched, device: torch.device) -> None:
    """Have a kernel compiled whose launcher will be wanted, unless it is there: beside what this process does next."""
    kernel = wanted.kernel if isinstance(wanted, TritonTable) else wanted
    if (kernel, device) not in _forms:
        begun(job_of(kernel, torch.cuda.get_device_capability(device)))


def begun(job: Job) -> Binary | tuple[str, Future[Made]]:
    """The binary, or its key and what will be it."""
    key = key_of(repr(job), _toolchain())
    future = _asked.get(key)
    if future is None:
        payload = store().get("cubin", key)
        if payload is not None:
            return Binary.read(payload)
        future = _asked[key] = submit(job)
    return key, future


def finished(found: Binary | tuple[str, Future[Made]]) -> Binary:
    """The binary, which is on disk from now on."""
    if isinstance(found, Binary):
        return found
    key, future = found
    try:
        binary = Binary(*future.result())
    finally:
        first = future.done() and _asked.pop(key, None) is not None
    if first:
        counter("kernels_compiled")
        store().put("cubin", key, binary.written())
        warn()
    return binary


class _Forms:
    """One kernel on one device: its aligned form, and the other one once it is needed."""

    def __init__(self, kernel: TritonKernel, device: torch.device, job: Job, aligned: Binary) -> None:
        self.kernel, self.device, self.job = kernel, device, job
        self.index = device.index or 0
        self.grid = (*kernel.grid, 1, 1)[:3]
        self.binaries = {True: aligned}
        self.functions = {True: driver.load(aligned, device)}
        self.parameters: dict[Any, driver.Parameters] = {}  # of calls with descriptors
        self.lock = threading.Lock()

    def function(self, aligned: bool) -> int:
        with self.lock:
            if aligned not in self.functions:
                self.binaries[aligned] = finished(begun(replace(self.job, aligned=aligned)))
                self.functions[aligned] = driver.load(self.binaries[aligned], self.device)
            return self.functions[aligned]

    def launch(
        self, aligned: bool, grid: tuple[int, ...], stream: int, addresses: tuple[int, ...], readable: tuple[int, ...] | None = None
    ) -> None:
        """`readable`: addresses for descriptors, where those of the pointers do not serve."""
        function = self.function(aligned)
        key = addresses, readable
        parameters = self.parameters.get(key)
        if parameters is None:
            maps = [_map(d, (readable or addresses)[d[0]]) for d in self.kernel.described]
            parameters = driver.parameters(addresses, maps)
            if maps:
                if len(self.parameters) >= REMEMBERED:
                    self.parameters.clear()
                self.parameters[key] = parameters
        driver.launch(function, self.binaries[aligned], grid, self.device, stream, parameters)  # type: ignore[arg-type]

    def plainly(self, *tensors: torch.Tensor) -> None:
        """What the C launcher leaves: pointers that are not aligned, threads that have not met the device, errors, descriptors."""
        addresses = tuple([t.data_ptr() for t in tensors])
        aligned = not any(a % ALIGNMENT for a in addresses)
        if self.kernel.described and not aligned:  # the copy engine cannot read what lies so
            given = tensors[-1]  # which the engine may write, and of descriptors' memory it alone
            for pointer, *_ in self.kernel.described:
                if addresses[pointer] % ALIGNMENT:
                    memory = torch.as_strided(tensors[pointer], (_reach(tensors[pointer]),), (1,)).clone()
                    tensors = (*tensors[:pointer], memory, *tensors[pointer + 1 :])
            self.launch(False, self.grid, _stream(self.index), addresses, tuple([t.data_ptr() for t in tensors]))
            if tensors[-1] is not given:
                given.copy_(torch.as_strided(tensors[-1], given.shape, given.stride()))
            return
        self.launch(aligned, self.grid, _stream(self.index), addresses)

    def launcher(self, other: Launcher, count: int, grid: tuple[int, ...], table: bool = False) -> Any:
        binary = self.binaries[True]
        if self.kernel.described:
            return other
        return _C.Launch(
            self.functions[True], grid, binary.threads, binary.shared, self.index, count, other, table, WAIT in self.job.source
        )


def _map(described: Described, address: int) -> driver.Map:
    _, offset, shape, stride, block = described
    return driver.described(address + 2 * offset, shape, stride, *box_of(block))


def _reach(tensor: torch.Tensor) -> int:
    """Elements of the memory that a tensor covers."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0


def _stream(index: int) -> int:
    return torch._C._cuda_getCurrentRawStream(index)  # type: ignore[attr-defined,no-any-return]


# ---- tables --------------------------------------------------------------------------------------------------------------


def work_and_grid(table: TritonTable) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """What a table's kernel reads besides addresses, and its grid."""
    if table.offsets:
        x, y, z = (*table.kernel.grid, len(table.sizes), 1, 1)[:3]
        return torch.zeros(1, dtype=torch.int64), (x, y, z)
    work = work_of(table.sizes, table.block)
    return work, (work.shape[0], 1, 1)


def begins(addresses: array[int], offsets: Sequence[int]) -> array[int]:
    """Where the rows of a table begin in memory."""
    return array("q", [a + offset for a, offset in zip(addresses, offsets, strict=True)]) if any(offsets) else addresses


class _Table:
    """A table of one plan. Its addresses lie in device memory, written anew when they change: in memory of its own each time, since what has been launched may not have read
    it yet, and since what a capture has seen is read by every replay (that copy is a part of the recording; its source is kept)."""

    def __init__(self, table: TritonTable, forms: _Forms) -> None:
        self.forms, self.full, self.offsets = forms, table.full, table.offsets
        work, self.grid = work_and_grid(table)
        self.work = work.to(forms.device)
        self.lock = threading.Lock()
        self.spare: torch.Tensor | None = None
        self.captured: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.rows: torch.Tensor | None = None
        self.launch = forms.launcher(self.plainly, len(table.sizes) * len(table.full), self.grid, True)

    def plainly(self, *tensors: torch.Tensor) -> None:
        given = array("q", [t.data_ptr() for t in tensors])
        addresses = begins(given, self.offsets)
        width = len(self.full)
        aligned = not any(a % ALIGNMENT for column, whole in enumerate(self.full) if whole for a in addresses[column::width])
        stream = _stream(self.forms.index)
        if torch.cuda.is_current_stream_capturing():
            rows = self._in_capture(addresses)
            self.forms.launch(aligned, self.grid, stream, (rows.data_ptr(), self.work.data_ptr()))
            return
        if self.spare is None:
            self.spare = torch.empty(len(addresses), dtype=torch.int64, pin_memory=True)
        rows = torch.frombuffer(addresses, dtype=torch.int64).to(
            self.forms.device, non_blocking=True
        )  # the driver copies pageable memory at once
        self.forms.launch(aligned, self.grid, stream, (rows.data_ptr(), self.work.data_ptr()))
        with self.lock:
            self.rows = rows
            self.launch.remember(given.tobytes(), self.forms.function(aligned), stream, rows.data_ptr(), self.work.data_ptr())

    def _in_capture(self, addresses: array[int]) -> torch.Tensor:
        spare, self.spare = self.spare, None
        if spare is None:
            spare = torch.empty(len(addresses), dtype=torch.int64, pin_memory=True)
        spare.copy_(torch.frombuffer(addresses, dtype=torch.int64))
        rows = torch.empty(len(addresses), dtype=torch.int64, device=self.forms.device)
        rows.copy_(spare, non_blocking=True)
        self.captured.append((spare, rows))
        return rows


# ---- launchers -----------------------------------------------------------------------------------------------------------

_forms: dict[tuple[TritonKernel, torch.device], _Forms] = {}


def launchers(wanted: Iterable[Launched], device: torch.device, leniently: bool = False) -> dict[Launched, Launcher]:
    """Launchers of kernels; binaries that are not on disk, and have not begun, are compiled side by side. A table has a launcher for each who asks. `leniently`: without those that Triton or the device refuse."""
    things = list(dict.fromkeys(wanted))
    kernels = list(dict.fromkeys(k.kernel if isinstance(k, TritonTable) else k for k in things))
    new = [k for k in kernels if (k, device) not in _forms]
    capability = torch.cuda.get_device_capability(device) if new else (0, 0)
    jobs = [job_of(kernel, capability) for kernel in new]
    for kernel, job, found in [(kernel, job, begun(job)) for kernel, job in zip(new, jobs, strict=True)]:
        try:
            _forms[kernel, device] = _Forms(kernel, device, job, finished(found))
        except Exception:
            if not leniently:
                raise

    def of(thing: Launched) -> Launcher:
        if isinstance(thing, TritonTable):
            found: Launcher = _Table(thing, _forms[thing.kernel, device]).launch
            return found
        forms = _forms[thing, device]
        made: Launcher = forms.launcher(forms.plainly, len(thing.pointers), forms.grid)
        return made

    known = (thing for thing in things if ((thing.kernel if isinstance(thing, TritonTable) else thing), device) in _forms)
    return {thing: of(thing) for thing in known}
