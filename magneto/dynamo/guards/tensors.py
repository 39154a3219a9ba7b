"""What guards know of torch's tensors: where their dispatch key set lies in memory, DLPack codes of dtypes and devices, plainness.

DLPack does not tell apart conj and neg views, inference tensors, zero tensors and so on; the dispatch key set does, in one 64-bit word. torch
reports it (slowly), and its place in memory is found here by comparing: the word of the Python object that is the address torch gives as
`_cdata`, and the word there that is the key set, for tensors whose key sets differ. Nothing is assumed: if no word fits, the facts are checked
in Python. torch is imported when the first tensor row is met: guards without tensors work without it.
"""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING, Any

from magneto import _C
from magneto.base.dataclass import dataclass

if TYPE_CHECKING:
    import torch

MAX_OBJECT_WORDS = 16
IMPL_WORDS = 22  # 176 bytes: the size of a c10::TensorImpl, nothing beyond it is read
OLDER_IMPL_WORDS = 23  # before torch 2.12
META_WORDS = 15  # MG_META_WORDS in csrc/guards.h
INLINE_SIZES = 5  # more dimensions than these lie elsewhere
SIZES = (3, 7, 5, 11, 2)
STORAGE_WORDS = 8
AMBIGUOUS_BITS = 8  # torch.int1 ... int7 and uint1 ... uint7 have the codes of int8 and uint8
REQUIRES_GRAD_SYMBOL = "_ZNK3c1010TensorImpl13requires_gradEv"  # c10::TensorImpl::requires_grad() const
MODE_SYMBOL = "_ZN2at4impl27torch_function_mode_enabledEv"  # at::impl::torch_function_mode_enabled()


@dataclass(frozen=True, slots=True)
class TensorApi:
    """`native`: the DLPack exchange API is there. `keys`: the place of the dispatch key set is known."""

    native: bool
    keys: bool


@functools.cache
def tensor_api() -> TensorApi:
    """Find out once what this torch offers and tell the C side."""
    import torch

    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    impl_word, keys_word = _calibrate()
    _C.set_tensor_words(*_metadata_words(keys_word))
    requires_grad, mode_enabled = symbol("c10", REQUIRES_GRAD_SYMBOL) or 0, symbol("torch_cpu", MODE_SYMBOL) or 0
    native = _C.set_tensor_api(capsule, torch._C.TensorBase, plain_types(), impl_word, keys_word, requires_grad, mode_enabled)
    return TensorApi(native, keys_word >= 0)


def plain_types() -> tuple[type, ...]:
    """Classes whose C attributes (`grad`, `is_leaf` ...) are read without __torch_function__, unless a mode is active."""
    import torch

    return torch.Tensor, torch.nn.Parameter


@functools.cache
def _library(name: str) -> Any:
    """One of torch's shared libraries, which is loaded already; None where it has another name."""
    import ctypes

    import torch

    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    for suffix in ("so", "dylib"):
        path = os.path.join(folder, f"lib{name}.{suffix}")
        if os.path.exists(path):
            try:
                return ctypes.CDLL(path)
            except OSError:
                return None
    return None


def symbol(library: str, name: str) -> int | None:
    """Address of a function that torch exports."""
    import ctypes

    loaded = _library(library)
    try:
        return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value
    except (AttributeError, TypeError, ValueError):
        return None


def _samples() -> list[torch.Tensor]:
    import torch

    with torch.inference_mode(False), torch.no_grad():
        plain = torch.zeros(2, dtype=torch.complex64, device="cpu")
        samples = [plain, plain.real, plain.conj(), plain.conj().imag, torch.nn.Parameter(plain.real)]
    with torch.inference_mode():
        samples.append(torch.zeros(2, device="cpu"))
    return samples


@functools.cache
def _impl_words() -> int:
    import torch

    release = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return OLDER_IMPL_WORDS if release is not None and (int(release[1]), int(release[2])) < (2, 12) else IMPL_WORDS


def _calibrate() -> tuple[int, int]:
    """(word of the Python object that points to the tensor, word of the tensor that is its key set), -1 where unknown."""
    import torch

    key_set = getattr(torch._C, "_dispatch_keys", None)
    if key_set is None or type(torch.empty(0, device="cpu")) is not torch.Tensor:
        return -1, -1
    samples = _samples()
    n_object = min(torch.Tensor.__basicsize__ // 8, MAX_OBJECT_WORDS)
    impl_words = set(range(2, n_object))
    words_there = _impl_words()
    keys_words = set(range(1, words_there))
    keys = [key_set(tensor).raw_repr() for tensor in samples]
    for tensor, expected in zip(samples, keys, strict=True):
        words = _C.read_words(id(tensor), n_object)
        impl_words &= {i for i, word in enumerate(words) if word == tensor._cdata}
        words = _C.read_words(tensor._cdata, words_there)
        keys_words &= {i for i, word in enumerate(words) if word == expected}
    if len(impl_words) != 1:
        return -1, -1
    known = len(keys_words) == 1 and len(set(keys)) >= 4
    return impl_words.pop(), keys_words.pop() if known else -1


def _metadata_words(keys_word: int) -> tuple[int, int, int]:
    """(first word of the metadata, word that points to the storage, word of the storage that points to its memory); first -1 where unknown.

    Expected: number of dimensions, five sizes, five strides, offset, elements, dtype and device, dispatch keys. Each is compared with what torch reports.
    """
    import torch

    first = keys_word + 1 - META_WORDS
    if first < 1:
        return -1, 0, 0
    storage_words, data_words = set(range(1, first)), set(range(1, STORAGE_WORDS))
    emptied = torch.zeros(4, device="cpu")
    emptied.untyped_storage().resize_(0)
    shapes: list[torch.Tensor] = [torch.zeros(SIZES[:n], device="cpu").permute(tuple(reversed(range(n)))) for n in range(INLINE_SIZES + 1)]
    for tensor in (*shapes, torch.frombuffer(bytearray(8), dtype=torch.uint8)[1:], emptied):
        words, n = _C.read_words(tensor._cdata, _impl_words()), tensor.dim()
        facts = words[first], words[first + 1 : first + 1 + n], words[first + 6 : first + 6 + n], words[first + 11 : first + 13]
        if facts != (n, tuple(tensor.shape), tensor.stride(), (tensor.storage_offset(), tensor.numel())):
            return -1, 0, 0
        storage = tensor.untyped_storage()
        storage_words &= {i for i, word in enumerate(words) if word == storage._cdata}
        if storage_words:
            inside = _C.read_words(storage._cdata, STORAGE_WORDS)
            data_words &= {i for i, word in enumerate(inside) if word == storage.data_ptr()}
    if len(storage_words) != 1 or len(data_words) != 1 or not _words_tell_dtypes(first, keys_word):
        return -1, 0, 0
    return first, storage_words.pop(), data_words.pop()


def _words_tell_dtypes(first: int, keys_word: int) -> bool:
    """Whether tensors that differ in dtype or kind of device only differ in these words."""
    import torch

    dtypes = [
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits", "torch.complex32"))
    ]
    kinds = [(dtype, device) for dtype in set(dtypes) for device in ("cpu", "meta")]
    seen = {_C.read_words(torch.empty(2, dtype=dtype, device=device)._cdata, _impl_words())[first:keys_word] for dtype, device in kinds}
    return len(seen) == len(kinds)


@functools.cache
def told_by_words(device: torch.device) -> bool:
    """Whether the metadata words tell this device from all others: its kind has been seen to count, its index has not."""
    import torch

    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.device_count() == 1)


@functools.cache
def plain_keys(device: torch.device, inference: bool, lazy: int = 0) -> int:
    """Dispatch key set of an ordinary dense tensor on that device (`lazy`: TensorMeta.lazy)."""
    import torch

    with torch.inference_mode(inference):
        sample = torch.empty(0, device=device, dtype=torch.complex64 if lazy else torch.float32)
        sample = sample.conj() if lazy & 1 else sample
        sample = torch._neg_view(sample) if lazy & 2 else sample
        return int(torch._C._dispatch_keys(sample).raw_repr())


@functools.cache
def dlpack_code(dtype: torch.dtype, device: torch.device) -> tuple[int, tuple[int, int], bool] | None:
    """(dtype key, (device type, index), whether other dtypes have that key too); None: DLPack does not know the dtype or the device."""
    import torch

    if device.type == "meta" or not tensor_api().native:
        return None
    try:
        _, _, key, place, _ = _C.tensor_meta(torch.empty(0, dtype=dtype, device=device))
    except (RuntimeError, BufferError, TypeError, NotImplementedError):
        return None
    code, bits = key & 0xFF, key >> 8 & 0xFF
    return key, place, code in (0, 1) and bits == AMBIGUOUS_BITS


def is_plain(tensor: Any, inference: bool, lazy: int = 0) -> bool:
    """An ordinary dense tensor: what a captured graph was made for. Asked in Python; natively it is one comparison of key sets."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    if tensor.is_conj() + 2 * tensor.is_neg() != lazy or tensor.is_inference() is not inference or tensor._is_zerotensor():
        return False
    keys = torch._C._dispatch_keys(tensor)
    return not any(keys.has(key) for key in _strange_keys())


@functools.cache
def _strange_keys() -> tuple[Any, ...]:
    """Keys of tensors that are answered by somebody else: subclasses with dispatch, function transforms."""
    import torch

    names = ("Python", "Functionalize", "FuncTorchBatched", "FuncTorchGradWrapper", "BatchedNestedTensor", "Batched")
    return tuple(getattr(torch._C.DispatchKey, name) for name in names if hasattr(torch._C.DispatchKey, name))


def tensor_holds(row: Any, value: Any) -> bool:
    """The meaning of a TENSOR row, in Python."""
    import torch

    if type(value) is not row.cls:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return _fits(row, value)


def _fits(row: Any, value: Any) -> bool:
    if not is_plain(value, row.inference, row.lazy):
        return False
    if value.dtype is not row.dtype or value.device != row.device or not _sizes_hold(row.shape, value.shape):
        return False
    if row.strides is not None and not _sizes_hold(row.strides, value.stride()):
        return False
    if row.requires_grad is not None and value.requires_grad is not row.requires_grad:
        return False
    return value.device.type == "meta" or value.numel() == 0 or value.data_ptr() != 0


def _sizes_hold(expected: tuple[int | None, ...], actual: tuple[int, ...]) -> bool:
    return len(expected) == len(actual) and all(e is None or e == a for e, a in zip(expected, actual, strict=True))
