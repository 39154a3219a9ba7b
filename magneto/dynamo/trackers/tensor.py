"""TensorTracker: a tensor of which capture knows the metadata, and its attributes. What methods mean is in rules_tensor.py and torch_calls.py."""

from __future__ import annotations

import copy
import keyword
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Attr, InstanceDict, Item, Source
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.function import BoundMethodTracker, BuiltinTracker
from magneto.dynamo.trackers.klass import ClassTracker, guard_class, held
from magneto.dynamo.trackers.size import numel_of, sizes_of
from magneto.graph.higher import Applied
from magneto.graph.meta import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import fx

    from magneto.dynamo.machine.protocol import Emitter, Machine


PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Classes on which torch's operations mean what they mean."""


DISABLED = torch._C._disabled_torch_function_impl


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, and the same place in autograd, as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


class TensorTracker(Tracker):
    """`meta` follows in-place changes; `node` is the FX node (None: an outside tensor not used as input yet); `cls` is Tensor or Parameter.

    `attrs`: attributes that the region has set (None: deleted), `grad` among them. `new_leaf`: it begins to require gradients here, where
    the graph cannot say so: operations that autograd would record are left to the next region. `memory`: the tensors known to share its memory.
    """

    subclass_attr: Callable[[Any, TensorTracker, str], Tracker | None]  # in torch_function, which stands above
    set_subclass_attr: Callable[[Any, TensorTracker, str, Tracker | None], None]

    __slots__ = ("attrs", "cls", "memory", "meta", "new_leaf", "node", "obj", "views")

    def __init__(
        self, meta: TensorMeta, cls: type = torch.Tensor, node: fx.Node | None = None, source: Source | None = None, obj: Any = MISSING
    ) -> None:
        super().__init__(source)
        self.meta = meta
        self.cls = cls
        self.node = node
        self.obj = obj
        self.views: list[TensorTracker] | None = None  # all tensors that are views of one base, this one included
        self.memory: list[TensorTracker] | None = None
        self.attrs: dict[str, Tracker | None] = {}
        self.new_leaf = False

    def python_type(self) -> type:
        return self.cls

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        return tensor_attr(m, self, name) if self.cls in PLAIN_CLASSES else self.subclass_attr(m, self, name)

    def special_set(self, m: Machine, name: str, value: Tracker | None) -> bool:
        (set_tensor_attr if self.cls in PLAIN_CLASSES else self.set_subclass_attr)(m, self, name, value)
        return True

    def plain(self) -> torch.Tensor:
        """The existing tensor, without the class a program gave it."""
        if self.cls in PLAIN_CLASSES:
            return self.obj  # type: ignore[no-any-return]
        return plain_tensor(self.obj)

    def given(self) -> Source | None:
        """Where the tensor is found that the graph is given as it is; None when the region makes the graph's argument of something (`graph_input`)."""
        return self.source if self.cls in PLAIN_CLASSES else None

    def graph_input(self, em: Emitter) -> str:
        """Text of the graph's argument."""
        assert self.source is not None
        text = em.source(self.source)
        return text if self.cls in PLAIN_CLASSES else f"{em.const(plain_tensor, 'plain_tensor')}({text})"

    def emit_made(self, em: Emitter, text: str) -> str:
        """What the graph gives for a tensor made in the region, as an instance of its class."""
        if self.cls is torch.Tensor:
            return text
        cls = em.const(self.cls, self.cls.__name__)
        if not issubclass(self.cls, torch.nn.Parameter) and not self.new_leaf:
            return em.assign(self.cls.__name__.lower(), f"{text}.as_subclass({cls})", self)
        made = em.const(torch.Tensor._make_subclass, "make_subclass")  # type: ignore[attr-defined]
        return em.assign(self.cls.__name__.lower(), f"{made}({cls}, {text})", self)

    def show(self) -> str:
        where = self.source.text() if self.source else (self.node.name if self.node is not None else "")
        dtype = str(self.meta.dtype).removeprefix("torch.")
        return f"{self.cls.__name__} {where} {dtype}{self.meta.shown_sizes()}"


def overrides_operations(m: Machine, v: TensorTracker) -> bool:
    """Whether torch asks the tensor's class what an operation on it means."""
    return v.cls not in PLAIN_CLASSES and not m.functions_off and v.cls.__torch_function__ is not DISABLED  # type: ignore[attr-defined]


class MadeInput(TensorTracker):
    """A tensor that the region makes at each call before the graph runs: an input of the graph without a source. `hint`: its name there;
    `constant`: its numbers, where they are the same at each call."""

    __slots__ = ("constant", "hint")

    def __init__(self, example: torch.Tensor, hint: str, constant: torch.Tensor | None = None) -> None:
        super().__init__(TensorMeta.of(example), obj=example)
        self.hint = hint
        self.constant = constant

    def graph_input(self, em: Emitter) -> str:
        raise NotImplementedError(type(self).__name__)


def join_memory(argument: TensorTracker, result: TensorTracker) -> None:
    """`result` shares memory with `argument`."""
    group = argument.memory if argument.memory is not None else [argument]
    argument.memory = result.memory = group
    group.append(result)


def rebind(v: TensorTracker, result: Tracker) -> TensorTracker:
    """From here on `v` is what the node of `result` gives (same values, other metadata); where `v` exists outside, an effect says so too."""
    assert isinstance(result, TensorTracker)
    v.node, v.meta = result.node, result.meta
    if result is not v:
        join_memory(result, v)
    return v


def join_views(argument: TensorTracker, result: TensorTracker) -> None:
    """`result` is a view of `argument` (not a detached one): what autograd learns of one by a write in place holds for both."""
    group = argument.views if argument.views is not None else [argument]
    argument.views = result.views = group
    group.append(result)


def of_one_base(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether what autograd learns of one existing tensor holds for the other."""
    return (one._base if one._base is not None else one) is (other._base if other._base is not None else other)


def written(tensor: TensorTracker) -> None:
    """After a write in place, `tensor.meta` being up to date: a gradient that flows into one view flows into its base and the other views."""
    if tensor.meta.requires_grad:
        for view in tensor.views or ():
            if not view.meta.requires_grad and (view.meta.dtype.is_floating_point or view.meta.dtype.is_complex):
                view.meta = view.meta.with_(requires_grad=True, is_leaf=False)


META_ATTRS: dict[str, Callable[[TensorMeta], Any]] = {
    "ndim": lambda t: t.ndim,
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "requires_grad": lambda t: t.requires_grad,
    "is_leaf": lambda t: t.is_leaf,
    "layout": lambda t: torch.strided,
    "itemsize": lambda t: t.dtype.itemsize,
    "is_sparse": lambda t: False,
    "is_sparse_csr": lambda t: False,
    "is_quantized": lambda t: False,
    "is_nested": lambda t: False,
    "is_mkldnn": lambda t: False,
    **({"names": lambda t: (None,) * t.ndim} if hasattr(torch.Tensor, "names") else {}),
    **{
        f"is_{kind}": (lambda t, kind=kind: t.device.type == kind)  # type: ignore[misc]
        for kind in ("cpu", "cuda", "meta", "mps", "xla", "xpu", "ipu", "maia", "mtia", "vulkan")
    },
}
"""Attributes that are constants of the metadata."""


_OF_AUTOGRAD = frozenset({"is_leaf", "grad", "grad_fn"})
_HISTORY = _OF_AUTOGRAD | {"requires_grad"}


def size_of(m: Machine, shape: tuple[int, ...]) -> TupleTracker:
    """A torch.Size."""
    return TupleTracker([m.const(n) for n in shape], torch.Size)


def tensor_attr(m: Machine, v: TensorTracker, name: str) -> Tracker | None:
    """`v.name`, None for what the tensor does not have."""
    if name == "shape":
        return sizes_of(m, v)
    if name in v.attrs:
        return v.attrs[name]
    if name == "nbytes":
        return m.apply(operator.mul, numel_of(m, v), m.const(v.meta.dtype.itemsize))
    if name in _OF_AUTOGRAD and v.source is not None and v.cls not in PLAIN_CLASSES and v.cls.__torch_function__ is not DISABLED:  # type: ignore[attr-defined]
        m.graph_break("B103", attribute=name, value=v.show())  # a guard that reads it would call the class
    if name in ("is_leaf", "grad_fn"):
        guard_leaf(m, v)
    computed = META_ATTRS.get(name)
    if name in _HISTORY and m.recorder.transformed:  # type: ignore[attr-defined]
        m.graph_break("B103", attribute=name, value=f"{v.show()} under a transform")
    if computed is not None:
        return m.const(computed(v.meta))
    graph = _GRAPH_ATTRS.get(name)
    if graph is not None:
        return graph(m, v)
    if name == "__class__":
        return ClassTracker(v.cls)
    if name == "grad":
        return _grad(m, v)
    if name == "grad_fn" and v.meta.is_leaf:
        return m.const(None)
    if name == "grad_fn":
        return GradFnTracker(v)
    guard_class(m, v.cls)
    raw = getattr(v.cls, name, MISSING)
    if isinstance(raw, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        return BoundMethodTracker(BuiltinTracker(raw), v)
    if isinstance(raw, types.FunctionType):
        return BoundMethodTracker(held(m, raw, f"Tensor.{name}"), v)
    if raw is MISSING:
        return own_attr(m, v, name)
    m.graph_break("B103", attribute=name, value=v.show())


def own_attr(m: Machine, v: TensorTracker, name: str) -> Tracker | None:
    """An attribute that the program set on an existing tensor."""
    if v.obj is MISSING or v.source is None:
        return None
    namespace = v.obj.__dict__
    if name in namespace:
        return m.wrap(namespace[name], Item(InstanceDict(v.source), name))
    m.guard(Kind.KEY_ABSENT, InstanceDict(v.source), name)
    return None


def guard_leaf(m: Machine, v: TensorTracker) -> None:
    """Somebody asks whether autograd computed the tensor: other guards do not tell."""
    if v.source is not None and v.obj is not MISSING and v.obj.requires_grad:
        m.wrap(v.obj.is_leaf, Attr(v.source, "is_leaf")).try_const()


class GradFnTracker(Tracker):
    """The grad_fn of a tensor that autograd computed: some object. Which one, only the finished region knows. `applied`: the call of a custom function that gives `of`."""

    __slots__ = ("applied", "of")

    def __init__(self, of: TensorTracker) -> None:
        super().__init__()
        self.of = of
        node = of.node if of.source is None else None
        if node is not None and node.target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]
        self.applied = node if node is not None and isinstance(node.target, Applied) else None

    def python_type(self) -> type:
        return torch.autograd.graph.Node

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        m.graph_break("B101", callee=self.show(), reason="it runs a step of autograd")

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name in ("name", "register_hook") and self.applied is not None and not m.has_written(self.of):
            return BoundMethodTracker(BuiltinTracker(getattr(torch._C._FunctionBase, name)), self)  # type: ignore[attr-defined]
        m.graph_break("B103", attribute=name, value=self.show())

    def emit(self, em: Emitter) -> str:
        if self.of.node is not None and self.of.source is None:
            em.shows_history = True
        return em.assign("grad_fn", f"{em.value(self.of)}.grad_fn", self)

    def show(self) -> str:
        return f"grad_fn of {self.of.show()}"


def set_tensor_attr(m: Machine, v: TensorTracker, name: str, value: Tracker | None) -> None:
    """`v.name = value`, or `del v.name` for None."""
    setter = ATTR_SETTERS.get(name)
    raw = getattr(v.cls, name, MISSING)
    if setter is not None and value is not None:
        setter(m, v, value)
        return
    if value is None and (raw is not MISSING or tensor_attr(m, v, name) is None):
        m.graph_break("B107", value=v.show(), reason=f"attribute {name!r} is deleted")
    if raw is not MISSING and hasattr(type(raw), "__set__") or not name.isidentifier() or keyword.iskeyword(name):
        m.graph_break("B107", value=v.show(), reason=f"attribute {name!r} is set")
    v.attrs[name] = value
    if value is not None:
        m.effect(f"{{0}}.{name} = {{1}}", v, value)
    else:
        m.effect(f"del {{0}}.{name}", v)


ATTR_SETTERS: dict[str, Callable[[Any, TensorTracker, Tracker], None]] = {}
"""Attributes whose assignment means something to torch (filled by rules_tensor_state)."""


def _grad(m: Machine, v: TensorTracker) -> Tracker | None:
    guard_leaf(m, v)
    retained = v.obj is not MISSING and v.source is not None and v.obj.retains_grad
    if not v.meta.is_leaf and v.meta.requires_grad and not retained:
        m.graph_break("B103", attribute="grad", value=f"{v.show()}, which is no leaf: torch warns")
    if retained:
        m.wrap(True, Attr(v.source, "retains_grad")).try_const()  # type: ignore[arg-type]
    if v.obj is MISSING or v.source is None:
        return m.const(None)
    return m.wrap(v.obj.grad, Attr(v.source, "grad"))


def _read(name: str) -> Callable[[Machine, TensorTracker], Tracker]:
    return lambda m, v: m.node(getattr, [v, name], {})


def _data(m: Machine, v: TensorTracker) -> Tracker:
    """Unlike `detach`, with a version counter of its own."""
    if v.new_leaf:  # what autograd would record of it is no concern here
        m.recorder.input_node(v)  # type: ignore[attr-defined]
        bare = copy.copy(v)
        bare.meta, bare.new_leaf = v.meta.with_(requires_grad=False, is_leaf=True), False
        join_memory(v, bare)
        v = bare
    return m.node(getattr, [v, "data"], {})


def _by_torch(fn: Callable[..., Any]) -> Callable[[Machine, TensorTracker], Tracker]:
    return lambda m, v: m.node(fn, [v], {})


_GRAPH_ATTRS: dict[str, Callable[[Any, TensorTracker], Tracker]] = {
    "T": lambda m, v: (
        m.node("permute", [v, 1, 0], {}, method=True) if v.meta.ndim == 2 else _read("T")(m, v)
    ),  # others are deprecated: torch warns
    "mT": lambda m, v: m.node("transpose", [v, -2, -1], {}, method=True),
    "H": _read("H"),
    "mH": lambda m, v: m.node("adjoint", [v], {}, method=True),
    "real": lambda m, v: m.node(torch.real, [v], {}) if v.meta.dtype.is_complex else v,
    "imag": _by_torch(torch.imag),
    "data": _data,
}
