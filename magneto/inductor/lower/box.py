"""What the lowering knows of one tensor: a `Box`, a function from an index to a value, evaluated when asked.

- `Stored`: the tensor lies in a buffer; the value is a Load.
- `Computed`: not in memory; `fn(index)` builds the value. It may be realised later and then behaves as the Stored it became.
- `View`: an index map over a Stored or Computed root. Views compose maps; they never copy.

Boxes live only while one graph is lowered; what leaves is the frozen loops IR.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from magneto.inductor.loops.ir import Buffer, Load, Origin, Size, Value
from magneto.symbolic import Expr

Index: TypeAlias = "tuple[Expr, ...]"


class Box:
    """shape, dtype, device of a tensor, and the strides that eager gives it (`strides`), in elements."""

    __slots__ = ("device", "dtype", "shape", "strides")
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device

    def load(self, index: Index) -> Value:
        """The element at an index (one Expr per dimension)."""
        raise NotImplementedError

    @property
    def root(self) -> Root:
        raise NotImplementedError

    @property
    def reads(self) -> frozenset[str]:
        """Names of the buffers an element is computed from."""
        raise NotImplementedError

    def root_index(self, index: Index) -> Index:
        """The index into the root that an index of this box means."""
        return index


class Stored(Box):
    __slots__ = ("buffer",)
    buffer: Buffer

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.shape, self.strides, self.dtype, self.device = buffer.shape, buffer.strides, buffer.dtype, buffer.device

    def load(self, index: Index) -> Value:
        return Load(self.buffer.name, self.buffer.offset(index), self.dtype)

    @property
    def root(self) -> Root:
        return self

    @property
    def reads(self) -> frozenset[str]:
        return frozenset((self.buffer.name,))


class Computed(Box):
    """`ops`: operations per element, counted with repetition; `heavy`: those among them that are worth keeping the result of.
    `stored` is set when the tensor has been realised."""

    __slots__ = ("_memo", "_reads", "fn", "heavy", "ops", "origins", "stored")

    def __init__(
        self, fn: Callable[[Index], Value], shape: tuple[Size, ...], strides: tuple[Size, ...], dtype: torch.dtype, device: torch.device,
        reads: frozenset[str], origins: tuple[Origin, ...] = (), ops: int = 0, heavy: int = 0,
    ) -> None:  # fmt: skip
        self.fn = fn
        self.shape, self.strides, self.dtype, self.device = shape, strides, dtype, device
        self._reads, self.origins, self.ops, self.heavy = reads, origins, ops, heavy
        self.stored: Stored | None = None
        self._memo: dict[Index, Value] = {}

    def load(self, index: Index) -> Value:
        if self.stored is not None:
            return self.stored.load(index)
        value = self._memo.get(index)
        if value is None:
            value = self._memo[index] = self.fn(index)
        return value

    def become(self, stored: Stored) -> None:
        """From now on the tensor is in memory."""
        self.stored = stored
        self._memo.clear()
        self.ops = self.heavy = 0

    @property
    def root(self) -> Root:
        return self if self.stored is None else self.stored

    @property
    def reads(self) -> frozenset[str]:
        return self._reads if self.stored is None else self.stored.reads


Root: TypeAlias = "Stored | Computed"


class View(Box):
    __slots__ = ("base", "index_map")

    def __init__(self, base: Box, index_map: Callable[[Index], Index], shape: tuple[Size, ...], strides: tuple[Size, ...]) -> None:
        if isinstance(base, View):
            inner = base.index_map
            outer = index_map
            self.base: Root = base.base
            self.index_map: Callable[[Index], Index] = lambda index: inner(outer(index))
        else:
            assert isinstance(base, Stored | Computed)
            self.base, self.index_map = base, index_map
        self.shape, self.strides, self.dtype, self.device = shape, strides, base.dtype, base.device

    def load(self, index: Index) -> Value:
        return self.base.load(self.index_map(index))

    @property
    def root(self) -> Root:
        return self.base.root

    @property
    def reads(self) -> frozenset[str]:
        return self.base.reads

    def root_index(self, index: Index) -> Index:
        return self.index_map(index)


def cost_of(box: Box) -> tuple[int, int, tuple[Origin, ...]]:
    """(ops, heavy ops, origins) that inlining a box brings along; nothing for what is in memory."""
    root = box.root
    if isinstance(root, Computed):
        return root.ops, root.heavy, root.origins
    return 0, 0, ()
