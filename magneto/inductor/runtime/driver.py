"""CUDA's driver through ctypes: binaries become functions of a device's context, and are launched where the C launcher (csrc/launch.c) does not serve."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from magneto import _C
from magneto.base.dataclass import dataclass

STATIC_SHARED = 48 << 10  # bytes of shared memory that a kernel has without asking
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
UINT16, PROMOTED = 1, 2  # CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_L2_PROMOTION_L2_128B
CARRIED = 2048  # bytes that the arguments of a launch carry, at most
DEPENDENT = 12030  # version of the driver from which on launches that overlap may be recorded
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
    if hasattr(lib, "cuTensorMapEncodeTiled"):  # drivers from 12.0 on
        pointer, number = ctypes.c_void_p, ctypes.c_int
        lib.cuTensorMapEncodeTiled.argtypes = [pointer, number, ctypes.c_uint, *[pointer] * 5, *[number] * 4]
    lib.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.c_void_p]
    version = ctypes.c_int()
    recent = lib.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value >= DEPENDENT
    functions = (lib.cuLaunchKernel, lib.cuStreamIsCapturing, *([lib.cuLaunchKernelEx] if recent else []))
    _C.bind_driver(*[ctypes.cast(function, ctypes.c_void_p).value for function in functions])
    return lib


def _done(function: Any, device: torch.device, *args: Any) -> None:
    """Call a function of the driver in the device's context. RuntimeError with the driver's words."""
    with torch.cuda.device(device):
        status = function(*args)
        if status == NO_CONTEXT:
            torch.cuda.mem_get_info(device)  # torch's runtime makes the context this thread's
            status = function(*args)
    if status:
        raise RuntimeError(_words(status))


def _words(status: int) -> str:
    text = ctypes.c_char_p()
    library().cuGetErrorString(status, ctypes.byref(text))
    return f"CUDA error: {(text.value or b'unknown error').decode()}"


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


@dataclass(frozen=True, slots=True)
class Map:
    """A matrix as the copy engine is told of it: 128 bytes, and its shape and strides."""

    memory: Any
    address: int
    shape: tuple[int, int]
    stride: int


def described(address: int, shape: tuple[int, int], stride: int, box: Sequence[int], swizzle: int) -> Map:
    """The descriptor of a matrix of 16-bit elements. RuntimeError with the driver's words."""
    memory = ctypes.create_string_buffer(192)
    place = -(-ctypes.addressof(memory) // 64) * 64
    sizes, steps = (ctypes.c_uint64 * 2)(*shape[::-1]), (ctypes.c_uint64 * 1)(2 * stride)
    status = library().cuTensorMapEncodeTiled(
        place, UINT16, 2, address, sizes, steps, (ctypes.c_uint32 * 2)(*box[::-1]), (ctypes.c_uint32 * 2)(1, 1), 0, swizzle, PROMOTED, 0
    )
    if status:
        raise RuntimeError(_words(status))
    return Map(memory, place, shape, stride)


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a kernel is given, as the driver takes it; holds the memory."""

    places: Any
    values: Any
    maps: Sequence[Map]


def parameters(addresses: Sequence[int], maps: Sequence[Map] = ()) -> Parameters:
    """Pointers, then matrices as Triton passes them (descriptor, shape, strides), then two scratch memories, which some versions of Triton pass."""
    numbers = [*addresses, *(n for m in maps for n in (*m.shape, m.stride, 1)), 0, 0]
    values = (ctypes.c_uint64 * len(numbers))(*numbers)
    at, first = iter([ctypes.addressof(values) + 8 * i for i in range(len(numbers))]), len(addresses)
    places = [next(at) for _ in range(first)]
    for m in maps:
        places += [m.address, *(next(at) for _ in range(4))]
    places += at
    return Parameters((ctypes.c_void_p * len(places))(*places), values, maps)


def launch(function: int, binary: Binary, grid: tuple[int, int, int], device: torch.device, stream: int, given: Parameters) -> None:
    """Launch a function."""
    _done(library().cuLaunchKernel, device, function, *grid, binary.threads, 1, 1, binary.shared, stream, given.places, None)


# ---- numbers of the host, as arguments of a launch -----------------------------------------------------------------------

_PUT = """.version 7.0
.target sm_70
.address_size 64
.visible .entry put(.param .u64 to, .param .align 16 .b8 words[{0}])
{{
.reg .b32 %t; .reg .b64 %a, %i, %w;
mov.u32 %t, %tid.x;
mul.wide.u32 %i, %t, 8;
mov.b64 %a, words;
add.s64 %a, %a, %i;
ld.param.b64 %w, [%a];
ld.param.b64 %a, [to];
cvta.to.global.u64 %a, %a;
add.s64 %a, %a, %i;
st.global.b64 [%a], %w;
ret;
}}
"""


def carried(size: int) -> int:
    """How many bytes a launch takes where `size` are meant: a power of two, so that there are few such kernels."""
    return max(64, 1 << (size - 1).bit_length())


@cache
def _put(device: torch.device, size: int) -> int:
    return load(Binary(_PUT.format(size).encode(), "put", 0, 0), device)


def put(to: int, source: int, size: int, device: torch.device, stream: int) -> None:
    """Write numbers of the host to the device's memory, in the stream's order: the driver has read them (`carried(size)` bytes from `source` on) when this returns. A copy would change to the copy engine
    and back, some ten microseconds behind a kernel and ahead of one. `size`: a multiple of 8. RuntimeError with the driver's words."""
    address = ctypes.c_uint64(to)
    places = (ctypes.c_void_p * 2)(ctypes.addressof(address), source)
    _done(library().cuLaunchKernel, device, _put(device, carried(size)), 1, 1, 1, size // 8, 1, 1, 0, stream, places, None)
