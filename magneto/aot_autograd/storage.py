"""The value of every tensor while a graph is traced: storages, and the views of them.

A traced tensor is identified by its storage and its geometry (offset, shape, strides, dtype), not by its Python object: two tensors with the same geometry on
one storage always hold the same numbers, and autograd makes new objects for views at will. A storage's `root` is the tensor it was made as.
"""

from __future__ import annotations

import torch
from torch import fx

from magneto.aot_autograd.views import ViewStep
from magneto.base.dataclass import dataclass, field
from magneto.graph.meta import TensorMeta

Geometry = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, bool]


def geometry_of(tensor: torch.Tensor) -> Geometry:
    return (int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj() or tensor.is_neg())


@dataclass(slots=True, eq=False)
class View:
    """One geometry on a storage. `node` holds its value as of the storage's `version`; the root's `parent` is None. `taken_of`: what an `as_strided` was called
    on, by whose elements autograd's formula goes until the storage is written, and the version then."""

    storage: Storage
    meta: TensorMeta
    parent: View | None = None
    step: ViewStep | None = None
    node: fx.Node | None = None
    version: int = 0
    input_index: int = -1
    taken_of: tuple[View | None, int] = (None, -1)

    def chain(self, above: View | None = None) -> tuple[View, tuple[ViewStep, ...]]:
        """The root, or `above` where that lies on the way, and the steps from it to this view."""
        steps: list[ViewStep] = []
        view = self
        while view.parent is not None and view is not above:
            assert view.step is not None
            steps.append(view.step)
            called, version = view.taken_of
            view = called if called is not None and version == view.storage.version else view.parent
        return view, tuple(reversed(steps))


@dataclass(slots=True, eq=False)
class Storage:
    """`keep` holds a tensor, so that the storage's address is not used again while tracing."""

    keep: torch.Tensor
    version: int = 0
    views: dict[Geometry, View] = field(default_factory=dict)
    root: View | None = None
    literal: bool = False


class Storages:
    """All storages seen in one trace. `owners`: the one that was made to hold a node's value, where others have been given the same."""

    def __init__(self) -> None:
        self.by_address: dict[int, Storage] = {}
        self.owners: dict[fx.Node, Storage] = {}

    def find(self, tensor: torch.Tensor) -> Storage | None:
        return self.by_address.get(tensor.untyped_storage()._cdata)

    def add_root(self, tensor: torch.Tensor, meta: TensorMeta, node: fx.Node | None, input_index: int = -1) -> View:
        """Register `tensor`, on memory not known so far, as it was made."""
        storage = self.by_address[tensor.untyped_storage()._cdata] = Storage(tensor)
        view = storage.root = View(storage, meta, node=node, input_index=input_index)
        storage.views[geometry_of(tensor)] = view
        if node is not None:
            self.owners.setdefault(node, storage)
        return view

    def view_of(self, tensor: torch.Tensor) -> View | None:
        storage = self.by_address.get(tensor.untyped_storage()._cdata)
        return None if storage is None else storage.views.get(geometry_of(tensor))


def memory_order(meta: TensorMeta) -> list[int]:
    """Dimensions from the outermost in memory to the innermost."""
    return sorted(range(len(meta.shape)), key=lambda d: (-meta.strides[d], -meta.shape[d] if meta.strides[d] else 0, d))


def overlap_in_part(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two views of one storage share elements without being the same view. Exact for equal strides that nest; otherwise by range."""
    if not a.numel() or not b.numel() or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    if geometry_of(a) == geometry_of(b):
        return False
    size = a.element_size()
    low_a, low_b = a.storage_offset() * size, b.storage_offset() * b.element_size()
    if low_a + _extent(a) <= low_b or low_b + _extent(b) <= low_a:
        return False
    if a.dtype != b.dtype or a.stride() != b.stride() or a.dim() != b.dim():
        return True
    reach = [max(n, m) - 1 for n, m in zip(a.shape, b.shape, strict=True)]
    dims = sorted(((step, far) for step, far in zip(a.stride(), reach, strict=True) if far and step), reverse=True)
    return _reaches(int(a.storage_offset()) - int(b.storage_offset()), dims)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element."""
    return (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.element_size()


def _reaches(distance: int, dims: list[tuple[int, int]]) -> bool:
    """Whether `distance` is a sum of k * step with |k| <= far, one k for each (step, far), largest step first."""
    if not dims:
        return distance == 0
    (step, far), rest = dims[0], dims[1:]
    return any(abs(k) <= far and _reaches(distance - k * step, rest) for k in (distance // step, -(-distance // step)))
