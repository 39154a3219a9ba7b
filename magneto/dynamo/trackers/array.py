"""ArrayTracker: a numpy array (or number). What is done with memory of tensors is recorded as calls of numpy in the graph; arrays made of constants
are computed by numpy while the program is traced (`array_memory.py`)."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import torch

from magneto import _C
from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Attr, Held, Local, Source, Stack
from magneto.dynamo.trackers.array_memory import MAX_BYTES, KnownMemory, owner_of, snapshot
from magneto.dynamo.trackers.base import MISSING, Const, Tracker
from magneto.dynamo.trackers.constant import is_constant, is_numpy_scalar
from magneto.dynamo.trackers.container import ListTracker, TupleTracker
from magneto.dynamo.trackers.function import BoundMethodTracker, BuiltinTracker
from magneto.dynamo.trackers.object import OpaqueTracker
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.graph.meta import TensorMeta

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


MAX_GUARDED = 1 << 10
"""Bytes of an array whose contents may be guarded."""


def numpy_module() -> Any:
    """numpy, if the program has imported it."""
    return sys.modules.get("numpy")


def numpy_random() -> Any:
    """numpy.random, if it is there: new numpys import it when it is first used."""
    return sys.modules.get("numpy.random")


def numpy_dtype(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype


NOT_RECORDED = frozenset(
    "save savez savez_compressed savetxt load loadtxt tofile dump dumps seterr setbufsize getbuffer resize setflags".split()
)


def function_text(fn: Any) -> str | None:
    """`numpy.linalg.norm` for numpy's own functions."""
    numpy = numpy_module()
    name = getattr(fn, "__name__", None)
    if name is None or name in NOT_RECORDED:
        return None
    for module in (numpy, numpy.linalg, numpy.fft):
        if getattr(module, name, None) is fn:
            return f"{module.__name__}.{name}"
    return None


class ArrayTracker(Tracker):
    """`number`: a numpy scalar such as np.float32(1), whose value is data. `memory`: of an array that the region has made; its numbers are known
    (`real`) until a tensor shares them."""

    __slots__ = ("_real", "_tensor", "machine", "memory", "number", "obj", "read_only")
    unknown = True

    def __init__(
        self, tensor: TensorTracker | None, number: bool = False, source: Source | None = None, obj: Any = ..., read_only: bool = False
    ) -> None:
        super().__init__(source)
        self.read_only = read_only
        self.machine: Machine | None = None
        self._tensor = tensor
        self.number = number
        self.obj = MISSING if obj is ... else obj
        self.memory: KnownMemory | None = None
        self._real: Any = None

    @classmethod
    def known(cls, memory: KnownMemory, real: Any) -> ArrayTracker:
        """The array `real` in a memory whose numbers are known."""
        made = cls(None)
        made.memory, made._real = memory, real
        memory.arrays.append(made)
        return made

    @property
    def real(self) -> Any:
        """The array itself, computed while the program is traced; None where its numbers are data."""
        return self._real if self.memory is not None and self.memory.input is None else None

    @property
    def tensor(self) -> TensorTracker:
        """The tensor that shares the array's memory."""
        if self._tensor is None:
            assert self.memory is not None
            self._tensor = self.memory.share(self._real)
        return self._tensor

    def to_read(self) -> TensorTracker | None:
        """A tensor with the array's numbers, for operations that neither write them nor give memory of theirs; None where torch knows no such tensor."""
        return self.tensor if self.real is None else snapshot(self.real)

    @property
    def meta(self) -> TensorMeta | None:
        """Layout and type; None where torch knows no such tensor."""
        if self.real is None:
            return self.tensor.meta
        found = snapshot(self.real)
        return None if found is None else found.meta

    def same(self, other: ArrayTracker) -> bool:
        """Whether both stand for the same array of numbers."""
        return self is other or (self._tensor is not None and self._tensor is other._tensor and self.number is other.number)

    def try_const(self) -> Const | None:
        """A number that comes from constants, or from small arrays whose contents are then guarded."""
        if not self.number or self.source is not None or self.tensor.node is None or self.machine is None:
            return None
        value = self.machine.known(self.tensor)
        return None if value is None else Const(value.numpy()[()])

    def python_type(self) -> type:
        numpy = numpy_module()
        found: type = numpy_dtype(self.tensor.meta.dtype).type if self.number else numpy.ndarray
        return found

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name in ("shape", "strides", "ndim", "size", "itemsize", "nbytes", "dtype"):
            return m.const(getattr(self._layout(), name))
        raw = getattr(self.python_type(), name, None)
        if isinstance(raw, (types.MethodDescriptorType, types.WrapperDescriptorType)):
            return BoundMethodTracker(BuiltinTracker(raw), self)
        if name in ("T", "mT", "real", "imag"):
            return attribute(m, self, name)
        if name == "base" and self.real is not None:
            return m.const(None) if self.real.base is None else _track_array(m, self.real.base)
        if raw is None:
            return None
        m.graph_break("B103", attribute=name, value=self.show())

    def _layout(self) -> Any:
        """A real array of the same type and layout."""
        if self.real is not None:
            return self.real
        meta = self.tensor.meta
        dtype = numpy_dtype(meta.dtype)
        numpy = numpy_module()
        return numpy.ndarray((), dtype) if self.number else _LaidOut(meta, dtype)

    def shape(self) -> tuple[int, ...]:
        found: tuple[int, ...] = self.real.shape if self.real is not None else self.tensor.meta.shape
        return found

    def rows(self, m: Machine) -> list[Tracker] | None:
        import operator

        shape = self.shape()
        if not shape:
            name = _C.type_name(self.python_type())
            m.raise_exception(TypeError(f"'{name}' object is not iterable" if self.number else "iteration over a 0-d array"))
        return [m.apply(operator.getitem, self, m.const(i)) for i in range(shape[0])]

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        if self.memory is not None:
            return em.assign("array", self.memory.emit_array(em, self._real), self)
        text = f"{em.value(self.tensor)}.numpy()"
        if self.read_only:
            name = em.assign("array", text, self)
            em.line(f"{name}.flags.writeable = False")
            return name
        return em.assign("number" if self.number else "array", f"{text}[()]" if self.number else text, self)

    def show(self) -> str:
        layout = self._layout()
        return f"numpy {'number' if self.number else 'array'} {layout.dtype}{list(layout.shape)}"


class _LaidOut:
    """What numpy says of an array's layout."""

    def __init__(self, meta: TensorMeta, dtype: Any) -> None:
        self.shape, self.dtype, self.itemsize = tuple(meta.shape), dtype, meta.itemsize
        self.strides = tuple(step * meta.itemsize for step in meta.strides)
        self.ndim, self.size, self.nbytes = len(meta.shape), meta.numel, meta.nbytes


def track(m: Machine, value: Any) -> Any:
    """Tracker of what numpy has computed from known values: arrays (the tracker that there is, for an array that there is), numbers, tuples and lists of such.
    NotImplemented where capture cannot follow it."""
    numpy = numpy_module()
    if type(value) is numpy.ndarray:
        return _track_array(m, value)
    if isinstance(value, numpy.ndarray) or value is NotImplemented:
        return NotImplemented
    if type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        items = [track(m, item) for item in value]
        if any(item is NotImplemented for item in items):
            return NotImplemented
        return ListTracker(items) if type(value) is list else TupleTracker(items, type(value))
    return m.const(value) if is_constant(value) or is_numpy_scalar(value) else NotImplemented


def _track_array(m: Machine, value: Any) -> Any:
    owner = owner_of(value)
    if owner is None or owner.dtype.hasobject or owner.nbytes > MAX_BYTES:
        return NotImplemented
    memories: dict[int, KnownMemory] = m.memories  # type: ignore[attr-defined]
    memory = memories.get(id(owner))
    if memory is None:
        memory = memories[id(owner)] = KnownMemory(m, owner)
    for known in memory.arrays:
        if known._real is value:
            return known
    return ArrayTracker.known(memory, value)


class ArrayMemory(TensorTracker):
    """An existing array's memory as a tensor: `torch.from_numpy(array)`."""

    __slots__ = ()

    def contents(self, m: Machine) -> torch.Tensor | None:
        """The numbers of a small array that the region finds at its start, where a guard on them is likely to hold again: not for what the frame has
        computed itself, nor for arrays that have changed before."""
        assert self.source is not None
        root: Source = self.source
        while (base := root.base()) is not None:
            root = base
        computed = isinstance(root, (Local, Stack)) and m.state.offset != 0  # type: ignore[attr-defined]
        return None if computed or self.obj.nbytes > MAX_GUARDED or self.source in m.changing else self.obj

    def guard_contents(self, m: Machine) -> None:
        data = repr(self.obj.numpy().tobytes()).replace("{", "{{").replace("}", "}}")
        m.guard(Kind.RELATION, self.source, f"{{}}.tobytes() == {data}")

    def given(self) -> None:
        return None

    def graph_input(self, em: Emitter) -> str:
        assert self.source is not None
        return f"{em.const(torch.from_numpy, 'from_numpy')}({em.source(self.source)})"

    def emit(self, em: Emitter) -> str:
        return em.assign("tensor", self.graph_input(em), self)


def attribute(m: Machine, v: ArrayTracker, name: str) -> Tracker | None:
    """An attribute that is an array."""
    from magneto.dynamo.trackers.rules_numpy import record_expression

    return record_expression(m, "{}." + name, [v])


def wrap_array(m: Machine, obj: Any, source: Source) -> Tracker:
    """An existing array: its memory becomes a graph input, guarded by dtype and geometry."""
    numpy = numpy_module()
    try:
        tensor = torch.from_numpy(obj)
        usable = obj.flags.writeable and obj.dtype is numpy.dtype(obj.dtype.type)
    except (TypeError, ValueError):
        usable = False
    if not isinstance(source, Held):
        m.guard(Kind.TYPE_IS, source, type(obj))
    if not usable:
        return OpaqueTracker(obj, source, m)
    if not isinstance(source, Held):
        m.guard(Kind.ID_IS, Attr(source, "dtype"), obj.dtype)
        m.guard(Kind.EQUALS, Attr(source, "shape"), obj.shape)
        m.guard(Kind.EQUALS, Attr(source, "strides"), obj.strides)
        m.guard(Kind.ID_IS, Attr(Attr(source, "flags"), "writeable"), True)
    return ArrayTracker(ArrayMemory(TensorMeta.of(tensor), torch.Tensor, None, source, tensor), False, source, obj)
