"""Memory of arrays that the region makes out of constants: numpy itself works on it while the program is traced, so that its numbers are known.

When a tensor begins to share the memory, it becomes an input of the graph (`input`) that the region makes anew at each call, with the numbers it had at that
point. Operations that only look are given a constant with the present numbers (`snapshot`), and the memory stays known.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.tensor import MadeInput, TensorTracker
from magneto.graph.meta import TensorMeta
from magneto.graph.numpy_call import Part

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine
    from magneto.dynamo.trackers.array import ArrayTracker

MAX_BYTES = 1 << 20
"""Larger arrays are made by the graph."""


class KnownMemory(Tracker):
    """`owner`: the real array that owns the memory; `arrays`: the program's arrays in it. Its name in region code is that of a fresh copy of `owner`."""

    __slots__ = ("arrays", "input", "machine", "owner")

    def __init__(self, machine: Machine, owner: Any) -> None:
        super().__init__()
        self.machine = machine
        self.owner = owner
        self.arrays: list[ArrayTracker] = []
        self.input: OwnerInput | None = None

    def share(self, real: Any) -> TensorTracker:
        """The tensor over an array's memory. From here on the graph has it."""
        machine = self.machine
        geometry = self._geometry(real)
        if geometry is None:
            machine.graph_break("B104", operation="a tensor over the memory", value=f"an array of numpy {real.dtype}{list(real.shape)}")
        if self.input is None:
            self.input = OwnerInput(self, torch.from_numpy(self.owner.copy("K")))
        if real is self.owner:
            return self.input
        shape, strides, offset = geometry
        return view_of(machine, self.input, Part(shape, strides, False, 0, offset))

    def _geometry(self, real: Any) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
        """Sizes, strides and offset of an array in elements of its memory; None where torch knows no such tensor."""
        owner, size = self.owner, self.owner.itemsize
        offset = address(real) - address(owner)
        try:
            torch.from_numpy(owner[:0] if owner.ndim else owner)
        except TypeError:
            return None
        if real.dtype != owner.dtype or not real.flags.writeable or offset % size or any(step < 0 or step % size for step in real.strides):
            return None
        return real.shape, tuple(step // size for step in real.strides), offset // size

    def emit(self, em: Emitter) -> str:
        start = self.owner.copy("K") if self.input is None else self.input.obj.numpy()
        return em.early(f"{em.const(start, 'numbers')}.copy('K')", "array")

    def emit_array(self, em: Emitter, real: Any) -> str:
        """An array in it, as the region gives it to the program."""
        name = em.value(self)
        if real is self.owner:
            return name
        layout = (real.shape, real.dtype, address(real) - address(self.owner), real.strides, real.flags.writeable)
        return f"{em.const(show_again, 'show_again')}({name}, *{em.const(layout, 'layout')})"


class OwnerInput(MadeInput):
    """The whole of a known memory as a tensor."""

    __slots__ = ("of",)

    def __init__(self, of: KnownMemory, example: torch.Tensor) -> None:
        super().__init__(example, "array", example)
        self.of = of

    def graph_input(self, em: Emitter) -> str:
        return f"{em.const(torch.from_numpy, 'from_numpy')}({em.value(self.of)})"


class Snapshot(MadeInput):
    """Numbers that the graph only looks at."""

    __slots__ = ()

    def graph_input(self, em: Emitter) -> str:
        return em.const(self.obj, "constant")


def snapshot(real: Any) -> Snapshot | None:
    """The numbers of a real array, laid out as they are; None where torch knows no such tensor."""
    size = real.itemsize
    if any(step < 0 or step % size for step in real.strides):
        return None
    try:
        numbers = torch.from_numpy(real.copy("K"))
    except TypeError:
        return None
    strides = [step // size for step in real.strides]
    if list(numbers.stride()) != strides:
        spread = sum((n - 1) * step for n, step in zip(real.shape, strides, strict=True)) + 1 if numbers.numel() else 0
        laid = torch.zeros(spread, dtype=numbers.dtype).as_strided(real.shape, strides)
        if numbers.numel():
            laid.numpy()[...] = real
        numbers = laid
    return Snapshot(numbers, "array", numbers)


def address(array: Any) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def show_again(owner: Any, shape: tuple[int, ...], dtype: Any, offset: int, strides: tuple[int, ...], writeable: bool) -> Any:
    """An array over the memory of another (region code calls this)."""
    numpy_array = type(owner)
    flat = owner if owner.flags.c_contiguous else owner.T
    made = numpy_array(shape, dtype, flat, offset, strides)
    if not writeable:
        made.flags.writeable = False
    return made


def owner_of(real: Any) -> Any:
    """The array whose memory a real array shows; None where that is no array."""
    while real.base is not None:
        if type(real.base) is not type(real):
            return None
        real = real.base
    return real if real.flags.owndata and (real.flags.c_contiguous or real.flags.f_contiguous) else None


def view_of(m: Machine, base: TensorTracker, part: Part) -> TensorTracker:
    """The view of numpy as a view of torch: a permutation, another shape, or any."""
    meta = base.meta
    found: Tracker | None = None
    if not part.offset and sorted(zip(part.shape, part.strides, strict=True)) == sorted(zip(meta.shape, meta.strides, strict=True)):
        places = list(zip(meta.shape, meta.strides, strict=True))
        if len(set(places)) == len(places):
            found = m.node(
                "permute", [base, [places.index(place) for place in zip(part.shape, part.strides, strict=True)]], {}, method=True
            )
    elif not part.offset and meta.is_contiguous() and meta.numel == math.prod(part.shape):
        found = m.node("view", [base, list(part.shape)], {}, method=True)
        if isinstance(found, TensorTracker) and found.meta.strides != part.strides:
            found = None
    else:
        key = _slices(meta, part)
        if key is not None:
            found = m.node(operator.getitem, [base, key], {})
            assert isinstance(found, TensorTracker)
            if (found.meta.shape, found.meta.strides, found.meta.storage_offset) != (
                part.shape,
                part.strides,
                meta.storage_offset + part.offset,
            ):
                found = None
    if found is None:
        begins = m.apply(torch.Tensor.storage_offset, base).try_const() if part.offset else None
        begin = [] if begins is None else [begins.value + part.offset]
        found = m.node(torch.as_strided, [base, list(part.shape), list(part.strides), *begin], {})
    assert isinstance(found, TensorTracker)
    return found


def _slices(meta: TensorMeta, part: Part) -> tuple[Any, ...] | None:
    """The index of numbers and slices that gives the view, where there is one."""
    starts, rest = {}, part.offset
    for dim in sorted(range(len(meta.shape)), key=lambda d: -meta.strides[d]):
        stride = meta.strides[dim]
        starts[dim], rest = divmod(rest, stride) if stride else (0, rest)
    key: list[Any] = []
    wanted = list(zip(part.shape, part.strides, strict=True))
    for dim, (size, stride) in enumerate(zip(meta.shape, meta.strides, strict=True)):
        start = starts[dim]
        step = wanted[0][1] // stride if wanted and stride and wanted[0][1] % stride == 0 else 0
        if step and start + (wanted[0][0] - 1) * step < size:
            key.append(slice(start, start + (wanted[0][0] - 1) * step + 1, step))
            del wanted[0]
        elif start < size:
            key.append(start)
        else:
            return None
    return None if wanted or rest else tuple(key)
