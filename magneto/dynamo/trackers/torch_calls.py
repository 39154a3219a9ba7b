"""Torch's callables: which ones become graph nodes as they are, and the rule that records them."""

from __future__ import annotations

import enum
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto.base.errors import GraphBreak
from magneto.dynamo.guards.source import Held
from magneto.dynamo.trackers.base import Raised, Tracker
from magneto.dynamo.trackers.constant import ConstTracker, is_numpy_bool, is_numpy_scalar
from magneto.dynamo.trackers.container import SequenceTracker, SliceTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import FALLBACKS
from magneto.dynamo.trackers.function import FunctionTracker
from magneto.dynamo.trackers.klass import ClassTracker
from magneto.dynamo.trackers.mapping import DictTracker
from magneto.dynamo.trackers.number_size import size_of
from magneto.dynamo.trackers.object import OpaqueTracker, payload_of
from magneto.dynamo.trackers.size import SizeTracker
from magneto.dynamo.trackers.tensor import TensorTracker, rebind

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_OP_TYPES = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_LEAF_MODULES = frozenset({"torch.nn.functional", "torch.functional"})
_OPERATION_MODULES = frozenset({"torch", *(f"torch._C.{name}" for name in ("_nn", "_linalg", "_fft", "_special", "_sparse", "_nested"))})
TENSOR_BASE = torch._C.TensorBase

PYTHON_METHODS = frozenset(
    "norm stft lu split unflatten __rsub__ __rdiv__ __rtruediv__ __pow__ __ipow__ __rmod__ __rpow__ __floordiv__ __rfloordiv__ "
    "__rlshift__ __rrshift__ __rmatmul__".split()
)
"""Tensor methods written in Python that are recorded as one node."""

DATA_DEPENDENT = frozenset(
    "equal allclose is_nonzero item tolist numpy "
    "__bool__ __int__ __float__ __index__ __complex__ __contains__ is_set_to isin_ data_ptr const_data_ptr storage untyped_storage numpy_T __array__ __dlpack__ "
    "__dlpack_device__ __reduce_ex__ __deepcopy__ register_hook register_post_accumulate_grad_hook retain_grad cpu_ share_memory_ is_shared _is_view "
    "set_ resize_ resize_as_ apply_ map_ map2_ pin_memory is_pinned to_sparse to_dense _values _indices coalesce tensor_split_ "
    "record_stream to_mkldnn as_subclass __setstate__ module_load".split()
)
"""Names of operations (functions and methods) that cannot be nodes: their result, or its shape, is known only at run time, or they are not tensor operations."""

NOT_OPERATIONS = frozenset(
    "manual_seed seed initial_seed get_rng_state fork_rng set_rng_state save load compile set_num_threads set_num_interop_threads set_default_dtype set_default_device "
    "set_flush_denormal from_file from_numpy frombuffer _assert_async get_num_threads get_num_interop_threads init_num_threads clear_autocast_cache autocast_increment_nesting autocast_decrement_nesting".split()
)
_SETTERS = ("set_", "_set_")

_PYTHON_TENSOR_METHODS = {fn: name for name, fn in torch.Tensor.__dict__.items() if isinstance(fn, types.FunctionType)}


def tensor_method(fn: Any) -> str | None:
    """The name under which `fn` is a method of torch.Tensor."""
    if isinstance(fn, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        return fn.__name__ if fn.__objclass__ in (TENSOR_BASE, torch.Tensor) else None
    if isinstance(fn, types.FunctionType):
        name = _PYTHON_TENSOR_METHODS.get(fn)
        return name if name in PYTHON_METHODS or name in DATA_DEPENDENT else None
    return None


def is_graph_callable(fn: Any) -> bool:
    """Whether a call of `fn` is recorded as one node (or breaks by name), instead of being inlined."""
    if isinstance(fn, types.BuiltinFunctionType):
        module = fn.__module__
        if module is None:
            owner = fn.__self__
            return isinstance(owner, type) and owner.__name__ == "_VariableFunctionsClass"
        return module in _OPERATION_MODULES
    if isinstance(fn, types.FunctionType):
        if fn.__module__ in _LEAF_MODULES:
            return not fn.__name__.startswith("_")
        return tensor_method(fn) is not None
    if isinstance(fn, _OP_TYPES):
        return True
    return tensor_method(fn) is not None


def lower(m: Machine, v: Tracker) -> Any:
    """The graph argument of a tracker: nested Python values whose only tracker leaves are TensorTrackers and SizeTrackers."""
    if isinstance(v, (TensorTracker, SizeTracker)):
        return v
    if isinstance(v, ConstTracker):
        if is_numpy_bool(v.read()):
            m.graph_break("B104", operation="a tensor operation", value=v.show())
        return plain_number(v.value)
    if isinstance(v, SequenceTracker):
        items = [lower(m, item) for item in v.items(m)]
        if isinstance(v, TupleTracker):
            return tuple(items) if v.cls in (tuple, torch.Size) else v.cls(*items)
        return items
    if isinstance(v, SliceTracker):
        return slice(lower(m, v.start), lower(m, v.stop), lower(m, v.step))
    if isinstance(v, DictTracker):
        return {lower(m, key): lower(m, value) for key, value in v.pairs(m)}
    const = v.try_const()
    if const is not None:
        return plain_number(const.value)
    if isinstance(v, ClassTracker):
        return v.obj
    if payload_of(v) is not v:
        return lower(m, payload_of(v))
    if isinstance(v, OpaqueTracker) and isinstance(v.obj, (torch.Generator, torch.Stream)):
        return v.pin(m)
    if hasattr(v, "needed"):
        v.needed(m)
    if isinstance(v.obj, torch.Tensor):
        m.graph_break("B109", value=v.show())
    m.graph_break("B104", operation="a tensor operation", value=v.show())


def plain_number(value: Any) -> Any:
    """Members of IntEnum and its like as the numbers they are."""
    if isinstance(value, enum.Enum):
        for cls in (int, float, str):
            if isinstance(value, cls):
                return cls(value.value)
    return value.item() if is_numpy_scalar(value) and hasattr(value, "item") else value


_OF_SIZES = frozenset(
    "arange zeros ones full empty rand randn randint randperm eye linspace new_zeros new_ones new_full new_empty expand view reshape unflatten narrow split "
    "split_with_sizes tensor_split repeat repeat_interleave pad constant_pad_nd interpolate upsample_nearest1d upsample_nearest2d upsample_linear1d "
    "upsample_bilinear2d upsample_bicubic2d topk kthvalue one_hot tril triu".split()
)


def record(m: Machine, target: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker], *, method: bool = False) -> Tracker:
    """Record a call as a node. In-place forms return the tensor they changed."""
    if m.changing and _name(target) in _OF_SIZES:
        args, kwargs = [size_of(m, arg) for arg in args], {name: size_of(m, arg) for name, arg in kwargs.items()}
    lowered = [lower(m, arg) for arg in args]
    named = {name: lower(m, arg) for name, arg in kwargs.items()}
    out = named.get("out")
    if isinstance(out, TensorTracker):
        return _into(m, target, lowered, named, out, method)
    if isinstance(out, (tuple, list)):
        return _into_several(m, target, lowered, named, out, method)
    result = m.node(target, lowered, named, method=method)
    if named.get("inplace") is True and lowered and isinstance(lowered[0], TensorTracker) and isinstance(result, TensorTracker):
        return _updated(lowered[0], result)
    name = _name(target)
    if (
        name.endswith("_")
        and not name.endswith("__")
        and lowered
        and isinstance(lowered[0], TensorTracker)
        and isinstance(result, TensorTracker)
    ):
        return _updated(lowered[0], result)
    if _changes_list(target, name) and args and isinstance(args[0], SequenceTracker):
        if isinstance(result, SequenceTracker):
            for one, new in zip(args[0].items(m), result.items(m), strict=True):
                if isinstance(one, TensorTracker) and isinstance(new, TensorTracker):
                    _updated(one, new)
        return args[0]
    return result


def _into(m: Machine, target: Any, args: list[Any], named: dict[str, Any], out: TensorTracker, method: bool) -> Tracker:
    """With `out=`. An empty tensor made in the region, which torch would resize, becomes the result instead."""
    if out.source is None and out.meta.numel == 0 and out.views is None and not out.meta.requires_grad:
        result = m.node(target, args, {name: value for name, value in named.items() if name != "out"}, method=method)
        if isinstance(result, TensorTracker) and result.meta.dtype is out.meta.dtype:
            return rebind(out, result)
        m.graph_break("B104", operation=f"{_name(target)}(out=...)", value="a tensor of another type")
    before = out.meta
    result = m.node(target, args, named, method=method)
    if not isinstance(result, TensorTracker) or (result.meta.shape, result.meta.dtype) != (before.shape, before.dtype):
        m.graph_break("B104", operation=f"{_name(target)}(out=...)", value="a tensor of another shape or type")
    return _updated(out, result)


def _into_several(m: Machine, target: Any, args: list[Any], named: dict[str, Any], out: Sequence[Any], method: bool) -> Tracker:
    """With a tuple of tensors as `out=`: the results are these tensors."""
    before = [item.meta if isinstance(item, TensorTracker) else None for item in out]
    result = m.node(target, args, named, method=method)
    if not isinstance(result, SequenceTracker):  # unbind_copy, split_copy: None
        return result
    after = result.items(m)
    fits = len(after) == len(before) and all(
        isinstance(a, TensorTracker) and b is not None and (a.meta.shape, a.meta.dtype) == (b.shape, b.dtype)
        for a, b in zip(after, before, strict=True)
    )
    if not fits:
        m.graph_break("B104", operation=f"{_name(target)}(out=...)", value="tensors of other shapes or types")
    result.entries[:] = [_updated(old, new) for old, new in zip(out, after, strict=True)]  # type: ignore[arg-type]
    return result


def _updated(tensor: TensorTracker, result: TensorTracker) -> TensorTracker:
    if result is not tensor:
        tensor.meta = result.meta
    return tensor


def _changes_list(target: Any, name: str) -> bool:
    """`torch._foreach_add_` gives back the list itself; `torch.ops.aten._foreach_add_` nothing."""
    return isinstance(target, types.BuiltinFunctionType) and name.startswith("_foreach_") and name.endswith("_")


def _name(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def call_torch(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Fallback of dispatch: torch's callables without a row of their own."""
    name = tensor_method(fn)
    if name is not None:
        if name in DATA_DEPENDENT:
            m.graph_break("B102", operation=f"Tensor.{name}")
        return record(m, name, args, kwargs, method=True)
    if not is_graph_callable(fn):
        return NotImplemented
    name = _name(fn)
    if name in DATA_DEPENDENT:
        m.graph_break("B102", operation=f"torch.{name}")
    if name in NOT_OPERATIONS or (name.startswith(_SETTERS) and isinstance(fn, types.BuiltinFunctionType)):
        m.graph_break("B101", callee=name, reason="it changes torch's state")
    if not isinstance(fn, types.FunctionType):
        return record(m, fn, args, kwargs)
    try:
        return record(m, fn, args, kwargs)
    except GraphBreak as reason:
        if reason.id not in ("B011", "B104"):  # B104: an argument that no node can hold (a distance function)
            raise
    return m.inline(FunctionTracker.existing(m, fn, Held(name, fn)), args, kwargs)  # it asks for numbers somewhere inside: break there


_SCALARS: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}


def call_scripted(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """A function compiled by TorchScript, as the Python that it was compiled from: of tensors and numbers, as long as it neither raises nor draws random numbers."""
    origin = getattr(fn, "_torchdynamo_inline", None) if type(fn) is torch.jit.ScriptFunction else None
    if type(origin) is not types.FunctionType or "is_scripting" in origin.__code__.co_names or origin.__closure__:
        return NotImplemented
    if any(type(origin.__globals__.get(name, types)) is not types.ModuleType for name in origin.__code__.co_names):
        return NotImplemented  # TorchScript keeps what the name meant when the function was compiled
    compiled = torch.jit._state._try_get_jit_cached_function(origin)  # type: ignore[attr-defined, no-untyped-call]
    if compiled is None or compiled.qualified_name != fn.qualified_name:  # traced: it is what one run of the Python did
        return NotImplemented
    kinds = {argument.name: str(argument.type) for argument in fn.schema.arguments}
    given = [*zip(kinds, args, strict=False), *kwargs.items()]
    if len(args) > len(kinds) or not all(name in kinds and _is_of(kinds[name], value) for name, value in given):
        return NotImplemented
    drawn = len(m.recorder.random_nodes)  # type: ignore[attr-defined]
    try:
        result = m.inline(FunctionTracker.existing(m, origin, Held(origin.__name__, origin)), args, kwargs)
    except Raised:
        m.restart_before(origin.__name__, "TorchScript's errors are others")  # type: ignore[attr-defined]
    if len(m.recorder.random_nodes) != drawn:  # type: ignore[attr-defined]
        m.restart_before(origin.__name__, "TorchScript draws random numbers in its own way")  # type: ignore[attr-defined]
    return result


def _is_of(kind: str, v: Tracker) -> bool:
    """Whether TorchScript takes a value as it is (it makes floats of integers)."""
    if kind.startswith("Optional["):
        const = v.try_const()
        return (const is not None and const.value is None) or _is_of(kind[9:-1], v)
    if kind == "Tensor":
        return isinstance(v, TensorTracker)
    return kind in _SCALARS and isinstance(v, ConstTracker) and type(v.value) is _SCALARS[kind]


FALLBACKS += [call_torch, call_scripted]
