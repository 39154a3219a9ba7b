"""Triton kernels in this process: text -> compiled kernel -> launcher. Triton is imported here alone, when the first kernel is built.

A launcher is called with the tensors of a kernel's parameters. Kernels are compiled for pointers that are multiples of 16 bytes, as allocations are; where a tensor
comes otherwise (a view given by the user), a second form without that assumption is compiled. Triton keeps binaries on disk by content.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from typing import Any

import torch

from magneto.base.text import compile_source
from magneto.inductor.codegen.triton import TritonKernel

HEAD = "import triton\nimport triton.language as tl\nfrom magneto.inductor.codegen import triton_library as lib\n\n\n@triton.jit\n"
ALIGNMENT = 16
OLDEST = (7, 0)  # compute capability that Triton takes

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
    try:
        importlib.import_module("magneto.inductor.codegen.triton_library")
    except Exception as error:  # a Triton that is too old, or does not fit this torch
        return f"triton cannot be imported: {type(error).__name__}: {error}"
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
    n = len(kernel.pointers)
    signature = {f"p{i}": pointer for i, pointer in enumerate(kernel.pointers)} | dict.fromkeys(constants, "constexpr")
    attributes = {(i,): [["tt.divisibility", ALIGNMENT]] for i in range(n)} if aligned else {}
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": kernel.warps, "enable_fp_fusion": False, "enable_reflect_ftz": False}
    if kernel.asserts:
        options |= {"debug": True, "sanitize_overflow": False}
    return triton.compile(source, target=target, options=options)


class _Form:
    """One compiled form of a kernel, loaded when it is first launched."""

    def __init__(self, kernel: TritonKernel, device: torch.device, aligned: bool) -> None:
        from triton.backends.compiler import GPUTarget

        major, minor = torch.cuda.get_device_capability(device)
        self.binary = binary_of(kernel, GPUTarget("cuda", 10 * major + minor, 32), aligned)


def launcher(kernel: TritonKernel, device: torch.device) -> Launcher:
    """What launches a kernel on a device's current stream."""
    aligned = _Form(kernel, device, True)
    index = device.index or 0
    grid = (*kernel.grid, 1, 1)[:3]
    other: list[Callable[..., None]] = []
    lock = threading.Lock()
    constants = tuple(value for _, value in kernel.constants)
    loaded: list[Callable[..., None]] = []

    def load(form: _Form) -> Callable[..., None]:
        """The launch as a function of (stream, pointers): Triton's C function without the Python round it, where it is what we know."""
        with torch.cuda.device(index):
            run, function, metadata = form.binary.run, form.binary.function, form.binary.packed_metadata
        found = form.binary.metadata
        direct = getattr(run, "launch", None)
        simple = all(getattr(run, name, 1) == 0 for name in ("global_scratch_size", "profile_scratch_size"))
        if direct is not None and simple and hasattr(run, "launch_cooperative_grid") and hasattr(run, "launch_pdl"):
            fixed = (function, found.launch_cooperative_grid, found.launch_pdl, None, None, metadata, None, None, None)
            return lambda stream, pointers: direct(*grid, stream, *fixed, *pointers, *constants)
        return lambda stream, pointers: run(*grid, stream, function, metadata, None, None, None, *pointers, *constants)

    def unaligned(stream: int, pointers: tuple[int, ...]) -> None:
        with lock:
            if not other:
                other.append(load(_Form(kernel, device, False)))
        other[0](stream, pointers)

    def launch(*tensors: torch.Tensor) -> None:
        pointers = tuple([t.data_ptr() for t in tensors])
        bits = 0
        for p in pointers:
            bits |= p
        stream = torch._C._cuda_getCurrentRawStream(index)  # type: ignore[attr-defined]
        if bits & (ALIGNMENT - 1):
            unaligned(stream, pointers)
            return
        if not loaded:
            loaded.append(load(aligned))
        loaded[0](stream, pointers)

    return launch


_launchers: dict[tuple[TritonKernel, torch.device], Launcher] = {}
_pool: list[ThreadPoolExecutor] = []


def launchers(kernels: Iterable[TritonKernel], device: torch.device) -> dict[TritonKernel, Launcher]:
    """Launchers of kernels; those that this process has not built yet are compiled side by side."""
    wanted = list(dict.fromkeys(kernels))
    new = [k for k in wanted if (k, device) not in _launchers]
    if new:
        importlib.import_module("magneto.inductor.codegen.triton_library")
        if not _pool:
            _pool.append(ThreadPoolExecutor(min(16, os.cpu_count() or 1), "magneto-triton"))
        for kernel, made in zip(new, _pool[0].map(lambda k: launcher(k, device), new), strict=True):
            _launchers[kernel, device] = made
    return {k: _launchers[k, device] for k in wanted}


def interpreted(kernels: Iterable[TritonKernel]) -> dict[TritonKernel, Launcher]:
    """Kernels run by Triton's interpreter on CPU tensors (for tests; the environment has TRITON_INTERPRET=1)."""

    def of(kernel: TritonKernel) -> Launcher:
        function = function_of(source_of(kernel))
        return lambda *tensors: function[(*kernel.grid, 1, 1)[:3]](*tensors, **dict(kernel.constants))

    return {k: of(k) for k in kernels}
