"""TensorMeta: what tracing knows of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto.base.dataclass import dataclass
from magneto.graph import layout

CPU = torch.device("cpu")
CONJ, NEG = 1, 2


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Metadata of a strided tensor. Shapes, strides and the storage offset count elements.

    `is_leaf` is False for a tensor that autograd computed: it may be written in place where a leaf that requires grad may not.
    `lazy`: CONJ and NEG, operations that torch has put off and whoever reads the memory does.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = CPU
    requires_grad: bool = False
    storage_offset: int = 0
    is_leaf: bool = True
    lazy: int = 0

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorMeta:
        """Metadata of a real or fake tensor. Raises for layouts without strides (sparse and the like)."""
        return TensorMeta(
            tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, int(tensor.storage_offset()),
            tensor.grad_fn is None, CONJ * tensor.is_conj() + NEG * tensor.is_neg(),
        )  # fmt: skip

    @staticmethod
    def contiguous(shape: Sequence[int], dtype: torch.dtype, device: torch.device = CPU) -> TensorMeta:
        shape = tuple(shape)
        return TensorMeta(shape, layout.contiguous_strides(shape), dtype, device)

    contiguous_strides = staticmethod(layout.contiguous_strides)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return layout.numel(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the elements (not of the storage)."""
        return layout.numel(self.shape) * self.dtype.itemsize

    def is_contiguous(self) -> bool:
        return layout.is_contiguous(self.shape, self.strides)

    def is_channels_last(self) -> bool:
        """Whether ATen would suggest a channels-last format for results computed from this tensor."""
        return layout.has_channels_last_strides(self.shape, self.strides)

    def is_dense(self) -> bool:
        return layout.is_dense(self.shape, self.strides)

    def with_(self, **changes: Any) -> TensorMeta:
        """A copy with some fields replaced (cheaper than dataclasses.replace)."""
        get = changes.get
        return TensorMeta(
            get("shape", self.shape), get("strides", self.strides), get("dtype", self.dtype), get("device", self.device),
            get("requires_grad", self.requires_grad), get("storage_offset", self.storage_offset), get("is_leaf", self.is_leaf),
            get("lazy", self.lazy),
        )  # fmt: skip

    def storage_size(self) -> int:
        """Elements from the start of the storage up to the last one this tensor reaches."""
        if 0 in self.shape:
            return self.storage_offset
        return self.storage_offset + 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def sizes(self) -> tuple[int | None, ...]:
        """The shape, with None for a dimension that only a run knows (`graph/unknown.py`)."""
        return self.shape

    def shown_sizes(self) -> str:
        return f"[{', '.join('?' if size is None else str(size) for size in self.sizes())}]"

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        text = f"{name}{self.shown_sizes()}"
        if not self.is_contiguous():
            text += f" strides ({', '.join(map(str, self.strides))})"
        if self.device.type != "cpu":
            text += f" {self.device}"
        return text + (" grad" if self.requires_grad else "")


def map_metas(fn: Callable[[TensorMeta], Any], value: Any) -> Any:
    """Apply `fn` to every TensorMeta in nested tuples, lists and dicts; everything else stays."""
    if isinstance(value, TensorMeta):
        return fn(value)
    if type(value) in (tuple, list):
        return type(value)(map_metas(fn, item) for item in value)
    if isinstance(value, tuple):  # named tuples and torch.return_types
        items = [map_metas(fn, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: map_metas(fn, item) for key, item in value.items()}
    return value
