"""TensorTracker: a tensor of which capture knows the metadata, and its attributes. What methods mean is in rules_tensor.py and torch_calls.py."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Attr, InstanceDict, Item, Source
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.function import BoundMethodTracker, BuiltinTracker
from magneto.dynamo.trackers.klass import ClassTracker, held
from magneto.graph.meta import TensorMeta

if TYPE_CHECKING:
    from torch import fx

    from magneto.dynamo.machine.protocol import Machine


class TensorTracker(Tracker):
    """`meta` follows in-place changes; `node` is the FX node (None: an outside tensor not used as input yet); `cls` is Tensor or Parameter."""

    __slots__ = ("cls", "meta", "node", "obj", "views")

    def __init__(
        self,
        meta: TensorMeta,
        cls: type = torch.Tensor,
        node: fx.Node | None = None,
        source: Source | None = None,
        obj: Any = MISSING,
    ) -> None:
        super().__init__(source)
        self.meta = meta
        self.cls = cls
        self.node = node
        self.obj = obj
        self.views: list[TensorTracker] | None = None  # all tensors that are views of one base, this one included

    def python_type(self) -> type:
        return self.cls

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        return tensor_attr(m, self, name)

    def show(self) -> str:
        where = self.source.text() if self.source else (self.node.name if self.node is not None else "")
        dtype = str(self.meta.dtype).removeprefix("torch.")
        return f"{self.cls.__name__} {where} {dtype}{list(self.meta.shape)}"


def join_views(argument: TensorTracker, result: TensorTracker) -> None:
    """`result` is a view of `argument` (not a detached one): what autograd learns of one by a write in place holds for both."""
    group = argument.views if argument.views is not None else [argument]
    argument.views = result.views = group
    group.append(result)


def written(tensor: TensorTracker) -> None:
    """After a write in place, `tensor.meta` being up to date: a gradient that flows into one view flows into its base and the other views."""
    if tensor.meta.requires_grad:
        for view in tensor.views or ():
            if not view.meta.requires_grad:
                view.meta = view.meta.with_(requires_grad=True, is_leaf=False)


META_ATTRS: dict[str, Callable[[TensorMeta], Any]] = {
    "ndim": lambda t: len(t.shape),
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "requires_grad": lambda t: t.requires_grad,
    "is_leaf": lambda t: t.is_leaf,
    "layout": lambda t: torch.strided,
    "itemsize": lambda t: t.dtype.itemsize,
    "nbytes": lambda t: t.nbytes,
    "is_sparse": lambda t: False,
    "is_sparse_csr": lambda t: False,
    "is_quantized": lambda t: False,
    "is_nested": lambda t: False,
    "is_mkldnn": lambda t: False,
    "names": lambda t: (None,) * len(t.shape),
    **{
        f"is_{kind}": (lambda t, kind=kind: t.device.type == kind)  # type: ignore[misc]
        for kind in ("cpu", "cuda", "meta", "mps", "xla", "xpu", "ipu", "maia", "mtia", "vulkan")
    },
}
"""Attributes that are constants of the metadata."""


def size_of(m: Machine, shape: tuple[int, ...]) -> TupleTracker:
    """A torch.Size."""
    return TupleTracker([m.const(n) for n in shape], torch.Size)


def tensor_attr(m: Machine, v: TensorTracker, name: str) -> Tracker | None:
    """`v.name`, None for what the tensor does not have."""
    if name == "shape":
        return size_of(m, v.meta.shape)
    computed = META_ATTRS.get(name)
    if computed is not None:
        return m.const(computed(v.meta))
    graph = _GRAPH_ATTRS.get(name)
    if graph is not None:
        return graph(m, v)
    if name == "__class__":
        return ClassTracker(v.cls)
    if name == "grad":
        return _grad(m, v)
    raw = getattr(v.cls, name, MISSING)
    if isinstance(raw, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        return BoundMethodTracker(BuiltinTracker(raw), v)
    if isinstance(raw, types.FunctionType):
        return BoundMethodTracker(held(m, raw, f"Tensor.{name}"), v)
    if raw is MISSING:
        return _own_attr(m, v, name)
    m.graph_break("B103", attribute=name, value=v.show())


def _own_attr(m: Machine, v: TensorTracker, name: str) -> Tracker | None:
    """An attribute that the program set on an existing tensor."""
    if v.obj is MISSING or v.source is None:
        return None
    namespace = v.obj.__dict__
    if name in namespace:
        return m.wrap(namespace[name], Item(InstanceDict(v.source), name))
    m.guard(Kind.KEY_ABSENT, InstanceDict(v.source), name)
    return None


def _grad(m: Machine, v: TensorTracker) -> Tracker | None:
    if v.obj is MISSING or v.source is None:
        return m.const(None)
    return m.wrap(v.obj.grad, Attr(v.source, "grad"))


def _transposed(m: Machine, v: TensorTracker) -> Tracker:
    n = len(v.meta.shape)
    if n == 2:
        return m.node("t", [v], {}, method=True)
    return m.node("permute", [v, *range(n - 1, -1, -1)], {}, method=True) if n else v


def _by_torch(fn: Callable[..., Any]) -> Callable[[Machine, TensorTracker], Tracker]:
    return lambda m, v: m.node(fn, [v], {})


_GRAPH_ATTRS: dict[str, Callable[[Any, TensorTracker], Tracker]] = {
    "T": _transposed,
    "mT": lambda m, v: m.node("transpose", [v, -2, -1], {}, method=True),
    "H": lambda m, v: m.node("adjoint", [v], {}, method=True),
    "mH": lambda m, v: m.node("adjoint", [v], {}, method=True),
    "real": lambda m, v: m.node(torch.real, [v], {}) if v.meta.dtype.is_complex else v,
    "imag": _by_torch(torch.imag),
    "data": lambda m, v: m.node("detach", [v], {}, method=True),
}
