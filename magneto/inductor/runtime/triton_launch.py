"""Triton kernels in this process: text -> binary -> launcher. Triton is imported here alone, and only when a binary is not found on disk.

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
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import torch

from magneto import _C
from magneto.base.events import counter
from magneto.base.text import compile_source
from magneto.inductor.codegen.triton import TritonKernel
from magneto.inductor.codegen.triton_table import TritonTable, work_of
from magneto.inductor.runtime import driver
from magneto.inductor.runtime.driver import Binary
from magneto.inductor.runtime.store import Store, key_of, store

HEAD = "import triton\nimport triton.language as tl\nfrom magneto.inductor.codegen import triton_library as lib\n\n\n@triton.jit\n"
ALIGNMENT = 16
OLDEST = (7, 0)  # compute capability that Triton takes

Launcher = Callable[..., None]
Launched: TypeAlias = "TritonKernel | TritonTable"


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


def source_of(kernel: TritonKernel) -> str:
    """The whole text of a kernel, as Triton reads it."""
    return HEAD + kernel.body


@cache
def function_of(source: str) -> Any:
    """The jitted function of a text."""
    name = f"magneto_kernel_{sha256(source.encode()).hexdigest()[:12]}"
    source = source.replace("def kernel(", f"def {name}(")
    return compile_source(f"<{name}>", source, {"__name__": "magneto.kernels"})[name]


def binary_of(kernel: TritonKernel, target: Any, aligned: bool = True) -> Any:
    """Triton's compiled kernel for a target; loads nothing."""
    import triton
    from triton.compiler import ASTSource

    function = function_of(source_of(kernel))
    constants = dict(kernel.constants)
    if "ALIGNED" in constants:
        constants["ALIGNED"] = int(aligned)
    n = len(kernel.pointers)
    signature = {f"p{i}": pointer for i, pointer in enumerate(kernel.pointers)} | dict.fromkeys(constants, "constexpr")
    attributes = {(i,): [["tt.divisibility", ALIGNMENT]] for i in range(n)} if aligned or "ALIGNED" in constants else {}
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": kernel.warps, "enable_fp_fusion": False, "enable_reflect_ftz": False}
    if kernel.stages:
        options["num_stages"] = kernel.stages
    if kernel.asserts:
        options |= {"debug": True, "sanitize_overflow": False}
    return triton.compile(source, target=target, options=options)


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


def kept_binary(kernel: TritonKernel, capability: tuple[int, int], aligned: bool, where: Store) -> Binary:
    """The binary for a kind of device, from disk or from Triton."""
    rest = (kernel.pointers, kernel.constants, kernel.warps, kernel.stages, kernel.asserts, capability, aligned)
    key = key_of(kernel.body, repr(rest), _toolchain())
    payload = where.get("cubin", key)
    if payload is not None:
        return Binary.read(payload)
    from triton.backends.compiler import GPUTarget

    made = binary_of(kernel, GPUTarget("cuda", 10 * capability[0] + capability[1], 32), aligned)
    found = made.metadata
    if any(getattr(found, name, 0) for name in ("global_scratch_size", "profile_scratch_size")):
        raise RuntimeError("a kernel asks for scratch memory")
    counter("kernels_compiled")
    binary = Binary(made.asm["cubin"], found.name, found.shared, 32 * found.num_warps)
    where.put("cubin", key, binary.written())
    return binary


class _Forms:
    """One kernel on one device: its aligned form, and the other one once it is needed."""

    def __init__(self, kernel: TritonKernel, device: torch.device, aligned: Binary) -> None:
        self.kernel, self.device = kernel, device
        self.index = device.index or 0
        self.grid = (*kernel.grid, 1, 1)[:3]
        self.binaries = {True: aligned}
        self.functions = {True: driver.load(aligned, device)}
        self.lock = threading.Lock()

    def function(self, aligned: bool) -> int:
        with self.lock:
            if aligned not in self.functions:
                self.binaries[aligned] = kept_binary(self.kernel, torch.cuda.get_device_capability(self.device), aligned, store())
                self.functions[aligned] = driver.load(self.binaries[aligned], self.device)
            return self.functions[aligned]

    def launch(self, aligned: bool, grid: tuple[int, ...], stream: int, addresses: tuple[int, ...]) -> None:
        function = self.function(aligned)
        driver.launch(function, self.binaries[aligned], grid, self.device, stream, addresses)  # type: ignore[arg-type]

    def plainly(self, *tensors: torch.Tensor) -> None:
        """What the C launcher leaves: pointers that are not aligned, threads that have not met the device, errors."""
        addresses = tuple([t.data_ptr() for t in tensors])
        self.launch(not any(a % ALIGNMENT for a in addresses), self.grid, _stream(self.index), addresses)

    def launcher(self, other: Launcher, count: int, grid: tuple[int, ...], table: bool = False) -> Any:
        binary = self.binaries[True]
        return _C.Launch(self.functions[True], grid, binary.threads, binary.shared, self.index, count, other, table)


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
_pool: list[ThreadPoolExecutor] = []


def launchers(wanted: Iterable[Launched], device: torch.device, leniently: bool = False) -> dict[Launched, Launcher]:
    """Launchers of kernels; binaries that are not on disk are compiled side by side. A table has a launcher for each who asks. `leniently`: without those that Triton or the device refuse."""
    things = list(dict.fromkeys(wanted))
    kernels = list(dict.fromkeys(k.kernel if isinstance(k, TritonTable) else k for k in things))
    new = [k for k in kernels if (k, device) not in _forms]
    if new:
        capability, where = torch.cuda.get_device_capability(device), store()
        if not _pool:
            _pool.append(ThreadPoolExecutor(min(16, os.cpu_count() or 1), "magneto-triton"))
        started = [(kernel, _pool[0].submit(kept_binary, kernel, capability, True, where)) for kernel in new]
        for kernel, made in started:
            try:
                _forms[kernel, device] = _Forms(kernel, device, made.result())
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


def interpreted(wanted: Iterable[Launched]) -> dict[Launched, Launcher]:
    """Kernels run by Triton's interpreter on CPU tensors (for tests; the environment has TRITON_INTERPRET=1)."""

    def of(thing: Launched) -> Launcher:
        if isinstance(thing, TritonTable):
            function, (work, grid) = function_of(source_of(thing.kernel)), work_and_grid(thing)

            def launch(*tensors: torch.Tensor) -> None:
                addresses = torch.tensor(begins(array("q", [t.data_ptr() for t in tensors]), thing.offsets))
                function[grid](addresses, work, **dict(thing.kernel.constants))

            return launch
        function = function_of(source_of(thing))
        return lambda *tensors: function[(*thing.grid, 1, 1)[:3]](*tensors, **dict(thing.constants))

    return {k: of(k) for k in wanted}
