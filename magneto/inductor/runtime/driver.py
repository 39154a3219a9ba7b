"""CUDA's driver through ctypes: binaries become functions of a device's context, and are launched where the C launcher (csrc/launch.c) does not serve."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from magneto import _C

STATIC_SHARED = 48 << 10  # bytes of shared memory that a kernel has without asking
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has not met the device yet


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel for one kind of device."""

    image: bytes
    name: str
    shared: int
    threads: int

    def written(self) -> bytes:
        return f"{self.name}\n{self.shared}\n{self.threads}\n".encode() + self.image

    @staticmethod
    def read(payload: bytes) -> Binary:
        name, shared, threads, image = payload.split(b"\n", 3)
        return Binary(image, name.decode(), int(shared), int(threads))


@cache
def library() -> Any:
    """libcuda. The C launcher is told where its functions are. OSError where there is none."""
    lib = ctypes.CDLL("libcuda.so.1")
    lib.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    lib.cuModuleLoadData.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    lib.cuModuleGetFunction.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p]
    lib.cuFuncSetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    lib.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.c_void_p]
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (lib.cuLaunchKernel, lib.cuStreamIsCapturing)]
    _C.bind_driver(*addresses)
    return lib


def _done(function: Any, device: torch.device, *args: Any) -> None:
    """Call a function of the driver in the device's context. RuntimeError with the driver's words."""
    with torch.cuda.device(device):
        status = function(*args)
        if status == NO_CONTEXT:
            torch.cuda.mem_get_info(device)  # torch's runtime makes the context this thread's
            status = function(*args)
    if status:
        text = ctypes.c_char_p()
        library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA error: {(text.value or b'unknown error').decode()}")


def load(binary: Binary, device: torch.device) -> int:
    """The function of a binary in the device's context. It stays loaded."""
    lib = library()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _done(lib.cuModuleLoadData, device, ctypes.byref(module), binary.image)
    _done(lib.cuModuleGetFunction, device, ctypes.byref(function), module, binary.name.encode())
    if binary.shared > STATIC_SHARED:
        _done(lib.cuFuncSetAttribute, device, function, MAX_DYNAMIC_SHARED, binary.shared)
    assert function.value is not None
    return function.value


def launch(function: int, binary: Binary, grid: tuple[int, int, int], device: torch.device, stream: int, addresses: Sequence[int]) -> None:
    """Launch a function whose parameters are addresses."""
    many = len(addresses) + 2  # two scratch memories, which some versions of Triton pass
    values = (ctypes.c_void_p * many)(*addresses, None, None)
    places = (ctypes.c_void_p * many)(*[ctypes.addressof(values) + 8 * i for i in range(many)])
    _done(library().cuLaunchKernel, device, function, *grid, binary.threads, 1, 1, binary.shared, stream, places, None)
