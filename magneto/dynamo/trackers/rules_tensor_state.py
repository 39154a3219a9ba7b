"""Rows of what changes a tensor object rather than its numbers: attributes, requires_grad, detach_, in-place views, construction from a class.

The graph computes values; the change of an existing object is an effect behind it. Inside the region the tensor goes on as the node that has the new
metadata (`rebind`). What autograd would record for a leaf made here is left to the next region (`new_leaf`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Attr
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import SequenceTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.function import BuiltinTracker
from magneto.dynamo.trackers.klass import ClassTracker
from magneto.dynamo.trackers.tensor import (
    ATTR_SETTERS,
    PLAIN_CLASSES,
    MadeInput,
    TensorTracker,
    guard_leaf,
    join_memory,
    of_one_base,
    rebind,
)
from magneto.dynamo.trackers.torch_function import follows

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


GRADIENT_FREED = "{0}.grad = None"
"""An effect in front of the graph. Should the graph fail, the frame runs again from the region's start, and comes to the same assignment."""


def _refuse(m: Machine, v: TensorTracker, reason: str) -> Any:
    m.graph_break("B107", value=v.show(), reason=reason)


def _replayed(m: Machine, text: str, v: TensorTracker, *operands: Tracker) -> None:
    """The effect `text` on a tensor. A subclass's `__torch_function__` has been called when the rule is reached: it is not called again."""
    if v.cls not in PLAIN_CLASSES:
        text = f"with {{{len(operands) + 1}}}(): {text}"
        operands = (*operands, ClassTracker(torch._C.DisableTorchFunctionSubclass))  # type: ignore[arg-type]
    m.effect(text, v, *operands)


def _is_view(v: TensorTracker) -> bool:
    return v.views is not None and v.views[0] is not v


# -- requires_grad


def require_grad(m: Machine, v: TensorTracker, flag: bool) -> TensorTracker:
    """`v.requires_grad_(flag)`."""
    guard_leaf(m, v)
    if v.meta.requires_grad == flag:
        return v
    if flag:
        if not (v.meta.dtype.is_floating_point or v.meta.dtype.is_complex):
            _refuse(m, v, "only floating-point tensors can require gradients")
        if len(v.views or ()) > 1:
            _refuse(m, v, "its views require gradients with it")
        recorder: Any = m.recorder  # type: ignore[attr-defined]
        if v in recorder.frozen:  # gradients flow where they flowed before
            alias, leaf = recorder.frozen[v]
            if alias is not v.node:
                _refuse(m, v, "it was frozen, and has other memory now")
            del recorder.frozen[v]
            v.node = leaf
        else:
            outside = v.source is not None and v.cls in PLAIN_CLASSES and v.views is None and recorder.turns_leaves()
            if outside:  # in the graph a detached alias of it becomes the leaf; gradients reach the tensor itself as effects
                rebind(v, m.node("detach", [v], {}, method=True))
            v.new_leaf = not recorder.leaf_node(v, outside)
        v.meta = v.meta.with_(requires_grad=True, is_leaf=True)
    elif not v.meta.is_leaf:
        _refuse(m, v, "requires_grad of a tensor that autograd computed")
    elif v.new_leaf:
        v.meta = v.meta.with_(requires_grad=False)
    else:
        leaf = m.recorder.input_node(v)  # type: ignore[attr-defined]
        rebind(v, m.node("detach", [v], {}, method=True))
        m.recorder.frozen[v] = v.node, leaf  # type: ignore[attr-defined]
    _replayed(m, f"{{0}}.requires_grad_({flag})", v)
    return v


@rule(torch.Tensor.requires_grad_, TensorTracker)
def requires_grad_(m: Machine, v: TensorTracker, requires_grad: Tracker | None = None) -> Any:
    if requires_grad is not None and requires_grad.python_type() is not bool:
        _refuse(m, v, "requires_grad is set to what is no bool")
    return require_grad(m, v, requires_grad is None or m.truth(requires_grad))


def _set_requires_grad(m: Machine, v: TensorTracker, value: Tracker) -> None:
    const = value.try_const()
    if const is None or type(const.value) is not bool:
        _refuse(m, v, "requires_grad is set to what is no bool")
    guard_leaf(m, v)
    if v.meta.requires_grad and not v.meta.is_leaf:
        _refuse(m, v, "requires_grad of a tensor that autograd computed")
    require_grad(m, v, const.value)  # type: ignore[union-attr]


def set_grad(m: Machine, v: TensorTracker, value: Tracker) -> None:
    """Torch checks the gradient's geometry; one that fits is taken as it is."""
    if isinstance(value, TensorTracker):
        one, two = v.meta, value.meta
        if (one.shape, one.dtype, one.device) != (two.shape, two.dtype, two.device) or value is v:
            _refuse(m, v, "a gradient of another shape, dtype or device")
    elif not (isinstance(value, ConstTracker) and value.read() is None):
        _refuse(m, v, "a gradient that is no tensor")
    guard_leaf(m, v)
    if v.meta.requires_grad and not v.meta.is_leaf:
        _refuse(m, v, "the gradient of a tensor that is no leaf")
    v.attrs["grad"] = value
    if value.python_type() is type(None) and _freed_first(m, v):
        m.effect(GRADIENT_FREED, v)
        return
    _replayed(m, "{0}.grad = {1}", v, value)


def _freed_first(m: Machine, v: TensorTracker) -> bool:
    """Whether dropping the old gradient is among the first things that the region does, so that its memory can be free before the graph runs."""
    if v.cls not in PLAIN_CLASSES or v.source is None or v.obj is MISSING or not v.obj.is_leaf or v.obj.grad is None:
        return False
    return m.recorder.n_calls == 0 and all(text is GRADIENT_FREED for text, _ in m.effects)  # type: ignore[attr-defined]


def take_memory(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """`tensor.data = data`, where `data` is `.data` of what was assigned and has since been written in the tensor's stead."""
    tensor.data = data
    if not tensor.is_inference() and not data.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + data._version,))  # type: ignore[attr-defined]


_TAKE_MEMORY = BuiltinTracker(take_memory)


def _set_data(m: Machine, v: TensorTracker, value: Tracker) -> None:
    """`v.data = value`: from here on `v` is memory of `value`. As a leaf that requires grad it enters a graph again in the next region."""
    if value is v:  # module.to(where it is)
        return
    if not isinstance(value, TensorTracker) or value.cls is not torch.Tensor or v.cls not in (torch.Tensor, torch.nn.Parameter):
        _refuse(m, v, "its data becomes what is no plain tensor")
        return
    guard_leaf(m, v)
    if _is_data(value, v):
        return  # `v.data += 1`
    if not v.meta.is_leaf or v.views is not None or (value.meta.dtype, value.meta.device) != (v.meta.dtype, v.meta.device):
        _refuse(m, v, "its data becomes a tensor of another dtype, or autograd has seen it")
    held = m.node(getattr, [value, "data"], {})
    if v.source is not None:
        m.effect("{0}({1}, {2})", _TAKE_MEMORY, v, held)
    requires_grad = v.meta.requires_grad
    _leave_memory(m, v)
    rebind(v, held)
    v.meta = v.meta.with_(requires_grad=requires_grad, is_leaf=True)
    v.new_leaf = requires_grad


def _is_data(value: TensorTracker, v: TensorTracker) -> bool:
    """Whether it is `v.data`, with or without a history of its own."""
    node, meta = value.node, value.meta.with_(requires_grad=v.meta.requires_grad, is_leaf=True)
    return node is not None and node.target is getattr and node.args == (v.node, "data") and meta == v.meta


def refuse_taken(m: Machine, written: Sequence[Any]) -> None:
    """Writes with a history: what was given to an existing tensor as its data has none behind the region, nor has an alias; and other views from outside get one."""
    for v in written:
        if not isinstance(v, TensorTracker) or v.meta.requires_grad or not (v.meta.dtype.is_floating_point or v.meta.dtype.is_complex):
            continue
        if any(isinstance(one, UnchangedInput) for one in v.memory or ()):
            m.restart_before("a write", "the shape of the tensor has changed in place")
        group = v.views or [v]
        begun = [one for one in group if one.source is not None and one.obj is not MISSING]
        if any(one.node is not None and one.node.target is getattr and one.node.args[1] == "data" for one in begun):
            m.restart_before("a write", "the tensor has been given other memory")
        others = [one for one in m.wrapped.values() if isinstance(one, TensorTracker) and one not in group and one.obj is not MISSING]
        if any(of_one_base(one.obj, other.obj) for one in begun for other in others):
            m.restart_before("a write", "another tensor from outside is a view of the same")
        m.begun += [one.obj for one in begun]


def _leave_memory(m: Machine, v: TensorTracker) -> None:
    """`v` is given other memory: another tracker stands for what it was, for those that lie there, and among the graph's inputs."""
    if v.memory is not None:
        before = copy.copy(v)
        v.memory[:] = [before if one is v else one for one in v.memory]
        recorder: Any = m.recorder  # type: ignore[attr-defined]
        recorder.inputs = [(node, before if one is v else one) for node, one in recorder.inputs]
        if v in recorder.mutated:
            recorder.mutated.add(before)
    v.memory = None


ATTR_SETTERS.update(requires_grad=_set_requires_grad, grad=set_grad, data=_set_data)


# -- detach_ and views in place


@rule((torch.Tensor.detach_, torch.detach_), TensorTracker)
def detach_(m: Machine, v: TensorTracker) -> Any:
    if v.obj is not MISSING and v.source is not None:
        if v.obj._is_view():  # eager raises
            _refuse(m, v, "detach_ of a view")
        m.guard(Kind.ID_IS, Attr(v.source, "_base"), None)
    if _is_view(v) or v.new_leaf:
        _refuse(m, v, "detach_ of a view or a new leaf")
    if not v.meta.requires_grad:
        return v
    rebind(v, m.node("detach", [v], {}, method=True))
    v.views = None
    if v.source is not None:
        _replayed(m, "{0}.detach_()", v)
    return v


def unchanged(tensor: torch.Tensor, changes: int) -> torch.Tensor:
    """Another tensor on its memory, which counts as written as often as views in place will change the tensor: what is kept for backward is from behind that."""
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + changes,))  # type: ignore[attr-defined]
    return tensor.detach()


class UnchangedInput(MadeInput):
    """Stands for an input of which the graph reads nothing before views in place have changed it, behind the graph."""

    __slots__ = ("base", "changes")

    def __init__(self, base: TensorTracker) -> None:
        super().__init__(base.obj.detach(), "unchanged")
        self.base, self.changes = base, 0
        join_memory(base, self)

    def graph_input(self, em: Emitter) -> str:
        assert self.base.source is not None
        return f"{em.const(unchanged, 'unchanged')}({em.source(self.base.source)}, {self.changes})"


def change_view(tensor: torch.Tensor, other: torch.Tensor, name: str, *args: Any, **kwargs: Any) -> None:
    """A view in place, which has been counted when `other` was made."""
    version = 0 if tensor.is_inference() else tensor._version
    getattr(tensor, name)(*args, **kwargs)
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # type: ignore[attr-defined]


_CHANGE_VIEW = BuiltinTracker(change_view)
IN_PLACE_VIEWS = ("as_strided", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze")


def _view_in_place(name: str) -> None:
    @rule(tuple(getattr(owner, f"{name}_") for owner in (torch.Tensor, torch) if hasattr(owner, f"{name}_")), TensorTracker)
    def body(m: Machine, v: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        if v.meta.requires_grad and (v.source is not None or v.meta.is_leaf or _is_view(v)):
            _refuse(m, v, f"{name}_ of a leaf or view that requires gradients")
        consts = [arg.try_const() for arg in (*args, *kwargs.values())]
        if any(const is None for const in consts):
            _refuse(m, v, f"{name}_ with arguments that are not constant")
        shared, unread = v.views, v.source is not None and v.cls in PLAIN_CLASSES and (v.node is None or not v.node.users)
        of = UnchangedInput(v) if unread and (v.node is None or v.node.op == "placeholder") else v
        rebind(v, m.node(name, [of, *(c.value for c in consts[: len(args)] if c)], _named(kwargs), method=True))
        v.views = shared
        if v.source is not None:
            slots = [f"{{{i}}}" for i in range(1, len(args) + 1)] + [f"{key}={{{i}}}" for i, key in enumerate(kwargs, len(args) + 1)]
            operands = [*args, *kwargs.values()]
            other = next((one for one in v.memory or () if unread and isinstance(one, UnchangedInput)), None)
            if other is not None:
                other.changes += 1
                n = len(operands)
                text = f"{{{n + 1}}}({', '.join(['{0}', f'{{{n + 2}}}', repr(f'{name}_'), *slots])})"
                _replayed(m, text, v, *operands, _CHANGE_VIEW, other)
            else:
                _replayed(m, f"{{0}}.{name}_({', '.join(slots)})", v, *operands)
        return v


def _named(kwargs: dict[str, Tracker]) -> dict[str, Any]:
    return {key: const.value for key, value in kwargs.items() if (const := value.try_const()) is not None}


for _name in IN_PLACE_VIEWS:
    _view_in_place(_name)


# -- construction


@rule(torch.Tensor._make_subclass, ClassTracker, TensorTracker)  # type: ignore[attr-defined]
def make_subclass(m: Machine, cls: ClassTracker, data: TensorTracker, require_grad: Tracker | None = None, **kwargs: Tracker) -> Any:
    """A new object of the class over the memory of `data`."""
    if kwargs or not follows(cls.obj):
        return NotImplemented
    m.overriding |= cls.obj not in PLAIN_CLASSES  # type: ignore[attr-defined]
    held = m.node("detach", [data], {}, method=True)
    assert isinstance(held, TensorTracker)
    made = TensorTracker(held.meta, cls.obj, held.node)
    join_memory(data, made)
    return require_grad_if(m, made, require_grad)


def require_grad_if(m: Machine, made: TensorTracker, flag: Tracker | None) -> TensorTracker:
    return require_grad(m, made, True) if flag is not None and m.truth(flag) else made


LEGACY = {
    **{
        getattr(torch, f"{name}Tensor"): dtype
        for name, dtype in (("Float", torch.float32), ("Double", torch.float64), ("Half", torch.float16))
    },
    **{
        getattr(torch, f"{name}Tensor"): dtype
        for name, dtype in (("BFloat16", torch.bfloat16), ("Bool", torch.bool), ("Byte", torch.uint8))
    },
    **{getattr(torch, f"{name}Tensor"): dtype for name, dtype in (("Char", torch.int8), ("Short", torch.int16), ("Int", torch.int32))},
    torch.LongTensor: torch.int64,
}


def _legacy(m: Machine, dtype: torch.dtype, device: Any, args: tuple[Tracker, ...]) -> Any:
    """torch.Tensor(...) and its like: numbers of dimensions (torch.Size too), or a list of numbers."""
    consts = [arg.try_const() for arg in args]
    if all(const is not None and type(const.value) is int for const in consts):
        return m.node(torch.empty, [*(const.value for const in consts if const)] or [0], {"dtype": dtype, "device": device})
    if len(args) != 1:
        return NotImplemented
    data = args[0]
    if isinstance(data, SequenceTracker) and data.cls is torch.Size:
        return m.apply(torch.empty, data, dtype=m.const(dtype), device=m.const(device))
    if isinstance(data, SequenceTracker) and data.cls in (list, tuple):
        return m.apply(torch.tensor, data, dtype=m.const(dtype), device=m.const(device))
    return NotImplemented


for _cls, _dtype in LEGACY.items():

    def _constructor(dtype: torch.dtype) -> Any:
        return lambda m, *args: _legacy(m, dtype, torch.device("cpu"), args)

    rule(_cls)(_constructor(_dtype))


@rule(torch.Tensor)
def plain_tensor(m: Machine, *args: Tracker) -> Any:
    const = m.apply(torch.get_default_dtype).try_const()
    assert const is not None
    return _legacy(m, const.value, torch.device("cpu"), args)


@rule(torch.Tensor.new, TensorTracker)
def new(m: Machine, v: TensorTracker, *args: Tracker) -> Any:
    return _legacy(m, v.meta.dtype, v.meta.device, args)


@rule(torch.Tensor.new_tensor, TensorTracker, Tracker)
def new_tensor(m: Machine, v: TensorTracker, data: Tracker, /, **kwargs: Tracker) -> Any:
    if isinstance(data, TensorTracker):
        m.graph_break("B102", operation="Tensor.new_tensor of a tensor, which warns")
    if "dtype" not in kwargs:
        kwargs["dtype"] = m.const(v.meta.dtype)
    if "device" not in kwargs:
        kwargs["device"] = m.const(v.meta.device)
    return m.apply(torch.tensor, data, **kwargs)
