"""ArrayTracker: a numpy array (or number) that is memory of a tracked tensor. What is done with it is recorded as calls of numpy in the graph."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Attr, Held, Source
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.function import BoundMethodTracker, BuiltinTracker
from magneto.dynamo.trackers.object import OpaqueTracker
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.graph.meta import TensorMeta

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


def numpy_module() -> Any:
    """numpy, if the program has imported it."""
    return sys.modules.get("numpy")


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
    """`number`: a numpy scalar such as np.float32(1), whose value is data."""

    __slots__ = ("number", "obj", "tensor")

    def __init__(self, tensor: TensorTracker, number: bool = False, source: Source | None = None, obj: Any = ...) -> None:
        super().__init__(source)
        self.tensor = tensor
        self.number = number
        self.obj = MISSING if obj is ... else obj

    def python_type(self) -> type:
        numpy = numpy_module()
        found: type = numpy_dtype(self.tensor.meta.dtype).type if self.number else numpy.ndarray
        return found

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        meta = self.tensor.meta
        if name == "shape":
            return TupleTracker([m.const(n) for n in meta.shape])
        if name == "strides":
            return TupleTracker([m.const(n * meta.itemsize) for n in meta.strides])
        plain = {"ndim": len(meta.shape), "size": meta.numel, "itemsize": meta.itemsize, "nbytes": meta.nbytes}
        if name in plain:
            return m.const(plain[name])
        if name == "dtype":
            return ConstTracker(numpy_dtype(meta.dtype))
        raw = getattr(self.python_type(), name, None)
        if isinstance(raw, (types.MethodDescriptorType, types.WrapperDescriptorType)):
            return BoundMethodTracker(BuiltinTracker(raw), self)
        if name in ("T", "mT", "real", "imag"):
            return attribute(m, self, name)
        if raw is None:
            return None
        m.graph_break("B103", attribute=name, value=self.show())

    def rows(self, m: Machine) -> list[Tracker] | None:
        import operator

        shape = self.tensor.meta.shape
        if not shape:
            m.raise_exception(TypeError("iteration over a 0-d array"))
        return [m.apply(operator.getitem, self, m.const(i)) for i in range(shape[0])]

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        text = f"{em.value(self.tensor)}.numpy()"
        return em.assign("number" if self.number else "array", f"{text}[()]" if self.number else text, self)

    def show(self) -> str:
        kind = "number" if self.number else "array"
        return f"numpy {kind} {numpy_dtype(self.tensor.meta.dtype)}{list(self.tensor.meta.shape)}"


class ArrayMemory(TensorTracker):
    """An existing array's memory as a tensor: `torch.from_numpy(array)`."""

    __slots__ = ()

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
        usable = obj.flags.writeable and obj.dtype is numpy.dtype(obj.dtype.type) and 0 not in obj.shape
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
