"""Rows of torch's predicates, state queries and factories that are no plain graph nodes."""

from __future__ import annotations

import operator
import threading
import types
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held, Source
from magneto.dynamo.trackers.attributes import no_attribute
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.build import FUNCTION_BUILDERS
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.context import tracked_autocast
from magneto.dynamo.trackers.dispatch import PURE, TABLE, rule
from magneto.dynamo.trackers.function import BuiltinTracker
from magneto.dynamo.trackers.iterator import iterate
from magneto.dynamo.trackers.klass import held
from magneto.dynamo.trackers.module import ModuleTracker
from magneto.dynamo.trackers.rules_tensor import METHODS
from magneto.dynamo.trackers.size import SizeTracker
from magneto.dynamo.trackers.tensor import TensorTracker, size_of
from magneto.dynamo.trackers.torch_calls import lower

if TYPE_CHECKING:
    from collections.abc import Callable

    from magneto.dynamo.machine.protocol import Machine


@rule(torch.is_tensor, Tracker)
def is_tensor(m: Machine, v: Tracker) -> Tracker:
    return m.const(isinstance(v, TensorTracker) or issubclass(v.python_type(), torch.Tensor))


def _meta_function(name: str) -> None:
    fn = getattr(torch, name, None)
    if fn is not None:

        @rule(fn, TensorTracker)
        def body(m: Machine, v: TensorTracker) -> Tracker:
            return m.const(METHODS[name](v.meta))


for _name in ("is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg"):
    _meta_function(_name)


@rule((torch.is_inference, torch.Tensor.is_inference), TensorTracker)
def is_inference(m: Machine, v: TensorTracker) -> Tracker:
    """A tensor made here is one where inference mode was on, unless it is a view of one that is none."""
    if v.obj is not MISSING:
        return m.const(v.obj.is_inference())
    m.grad_enabled()  # type: ignore[attr-defined]
    if m.recorder.inference_tensors:  # type: ignore[attr-defined]
        m.graph_break("B102", operation="Tensor.is_inference")
    return m.const(False)


@rule(torch.is_same_size, TensorTracker, TensorTracker)
def is_same_size(m: Machine, a: TensorTracker, b: TensorTracker) -> Tracker:
    return m.const(a.meta.shape == b.meta.shape)


@rule(torch.result_type, Tracker, Tracker)
def result_type(m: Machine, a: Tracker, b: Tracker) -> Tracker:
    values = [
        torch.empty((1,) * v.meta.ndim, dtype=v.meta.dtype)
        if isinstance(v, TensorTracker)
        else v.number.probes[0]
        if isinstance(v, SizeTracker)
        else lower(m, v)
        for v in (a, b)
    ]
    return m.const(torch.result_type(*values))


@rule((torch.random.manual_seed, torch.seed))
def random_state(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Any:
    """The random stream is eager's; what reads or sets its state stands between two graphs."""
    m.graph_break("B101", callee="a function of torch.random", reason="it reads or sets the state of the random stream")


def _checked(fn: Any, error: type[Exception]) -> None:
    @rule(fn)
    def check(m: Machine, condition: Tracker, message: Tracker | None = None) -> Any:
        const = condition.try_const()
        if const is not None and const.value is True:
            return None
        return m.call(
            held(m, torch._check_with, "torch._check_with"), (held(m, error, error.__name__), condition, message or m.const(None)), {}
        )


for _ask, _error in (
    (torch._check, RuntimeError),
    (torch._check_value, ValueError),
    (torch._check_index, IndexError),
    (torch._check_type, TypeError),
    (torch._check_not_implemented, NotImplementedError),
):
    _checked(_ask, _error)


def _expected(value: bool) -> bool:
    return value


def _advised(*args: Any) -> None:
    pass


_OF_CHECKS: dict[str, Callable[..., Any]] = {"expect_true": _expected, "_advise_is_size": _advised, "_advise_is_bounded": _advised}


def expecting(m: Machine, obj: types.FunctionType, source: Source) -> Tracker | None:
    """What torch's checks ask for their condition, found without importing its module: for a bool, the bool. Advice says nothing about real numbers."""
    if obj.__name__ not in _OF_CHECKS or obj.__module__ != "torch.fx.experimental.symbolic_shapes":
        return None
    if not isinstance(source, Held):
        m.guard(Kind.ID_IS, source, obj)
    return BuiltinTracker(_OF_CHECKS[obj.__name__], source)


@rule(_expected)
def expected(m: Machine, value: Tracker) -> Any:
    return value if value.python_type() is bool else NotImplemented


@rule(_advised)
def advised(m: Machine, *values: Tracker) -> None:
    return None


FUNCTION_BUILDERS.append(expecting)


def _always(value: Any, *fns: Any) -> None:
    for fn in fns:
        if fn is not None:
            rule(fn)(lambda m, *args, **kwargs: m.const(value))


_always(True, torch.compiler.is_dynamo_compiling)


@rule(torch.compiler.is_compiling)
def is_compiling(m: Machine) -> Tracker:
    """A module's call asks only in order to leave out the hooks that an exception must not pass by (`always_call`)."""
    return m.const(m.frames[-1].code is not torch.nn.Module._call_impl.__code__)  # type: ignore[attr-defined]


def compiling_by_another_name(m: Machine, obj: types.FunctionType, source: Source) -> Tracker | None:
    """torch._dynamo.is_compiling and its like, and torch.onnx.is_in_onnx_export, found without importing their modules."""
    exporting = obj.__name__ == "is_in_onnx_export" and str(obj.__module__).startswith("torch.onnx")
    if not exporting and (
        obj.__name__ not in ("is_compiling", "is_dynamo_compiling") or not str(obj.__module__).startswith("torch._dynamo")
    ):
        return None
    if not isinstance(source, Held):
        m.guard(Kind.ID_IS, source, obj)
    return BuiltinTracker(torch.compiler.is_exporting if exporting else torch.compiler.is_compiling, source)


FUNCTION_BUILDERS.append(compiling_by_another_name)
_always(
    False,
    torch.jit.is_scripting,  # type: ignore[attr-defined]
    torch.jit.is_tracing,  # type: ignore[attr-defined]
    torch._C._get_tracing_state,
    getattr(torch._C, "_is_tracing", None),  # torch 2.15
    torch.compiler.is_exporting,
    torch._C._is_torch_function_mode_enabled if hasattr(torch._C, "_is_torch_function_mode_enabled") else None,
    torch._C._functorch.is_functorch_wrapped_tensor,
)
_always(None, torch._C._log_api_usage_once, torch._assert_async)
TABLE[torch._C._get_tracing_state] = [((), lambda m: m.const(None))]
del TABLE[torch._assert_async]


_AUTOCAST_QUERIES: dict[Any, tuple[Callable[[tuple[Any, ...]], str | None], Callable[[tuple[str, torch.dtype, bool, bool]], Any]]] = {
    torch.is_autocast_enabled: (lambda args: args[0] if args else "cuda", lambda state: state[2]),
    torch.is_autocast_cpu_enabled: (lambda args: "cpu", lambda state: state[2]),
    torch.get_autocast_dtype: (lambda args: args[0], lambda state: state[1]),
    torch.get_autocast_gpu_dtype: (lambda args: "cuda", lambda state: state[1]),
    torch.get_autocast_cpu_dtype: (lambda args: "cpu", lambda state: state[1]),
    torch.is_autocast_cache_enabled: (lambda args: None, lambda state: state[3]),
}
"""Queries of autocast's state inside an autocast of the region: (device asked about, answer from its arguments)."""


def _state(fn: Callable[..., Any]) -> None:
    """A query of torch's global state: answered now, guarded by a STATE row."""

    @rule(fn)
    def body(m: Machine, *args: Tracker) -> Any:
        values = [arg.try_const() for arg in args]
        if any(value is None for value in values):
            return NotImplemented
        plain = tuple(value.value for value in values if value is not None)
        inside = _AUTOCAST_QUERIES.get(fn)
        state = tracked_autocast(m, inside[0](plain)) if inside is not None else None
        if inside is not None and state is not None:
            return m.const(inside[1](state))
        answer = fn(*plain)
        m.guard(Kind.STATE, None, (fn.__name__, fn, plain, answer))
        return m.const(answer)


_ASKED = (
    "get_default_dtype is_autocast_enabled is_autocast_cache_enabled get_autocast_dtype is_autocast_cpu_enabled get_autocast_gpu_dtype get_autocast_cpu_dtype "
    "are_deterministic_algorithms_enabled get_float32_matmul_precision cuda.is_available cuda.device_count backends.mps.is_available distributed.is_available "
    "get_num_threads is_anomaly_enabled xpu.is_available accelerator.current_accelerator accelerator.is_available _C._get_privateuse1_backend_name "
    "_C._len_torch_dispatch_stack _C._len_torch_function_stack"
)
for _fn in (*operator.attrgetter(*_ASKED.split())(torch), threading.get_ident):
    _state(_fn)
if torch.distributed.is_available():
    _state(torch.distributed.is_initialized)


@rule((torch.where, torch.Tensor.where), TensorTracker)
def where(m: Machine, condition: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    if not args and not kwargs and not m.unknown_sizes:
        if m.known(condition) is not None:
            return m.node("nonzero", [condition], {"as_tuple": True}, method=True)
        m.graph_break("B105", operation="torch.where(condition)")
    return NotImplemented


@rule((torch.repeat_interleave, torch.Tensor.repeat_interleave), TensorTracker, TensorTracker)
def repeat_interleave(m: Machine, v: Tracker, repeats: Tracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    if "output_size" not in kwargs and not m.unknown_sizes:
        if isinstance(repeats, TensorTracker) and repeats.meta.ndim == 1 and (known := m.known(repeats)) is not None:
            return m.apply(torch.repeat_interleave, v, repeats, *args, output_size=m.const(int(known.sum())), **kwargs)
        m.graph_break("B105", operation="torch.repeat_interleave with a tensor of counts")
    return NotImplemented


@rule((torch.Tensor.to,), TensorTracker)
def to(m: Machine, v: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    """A conversion that changes nothing gives the tensor itself."""
    dtype, device, rest = v.meta.dtype, v.meta.device, []
    named = {name: arg for name, arg in kwargs.items() if name in ("dtype", "device")}
    for arg in (*args, *named.values()):
        if isinstance(arg, TensorTracker):
            dtype, device = arg.meta.dtype, arg.meta.device
            continue
        const = arg.try_const()
        value = const.value if const is not None else MISSING
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, (torch.device, str)):
            try:
                device = torch.device(value)
            except RuntimeError:
                return NotImplemented
        elif value is not None:
            rest.append(value)
    if device.index is None and device.type != "cpu":
        return NotImplemented
    same_device = device == v.meta.device or (device.type == "cpu" and v.meta.device.type == "cpu")
    copies = kwargs.get("copy")
    plain = set(kwargs) <= {"dtype", "device", "non_blocking", "copy"} and all(isinstance(value, bool) for value in rest)
    if plain and dtype is v.meta.dtype and same_device and (copies is None or not m.truth(copies)) and rest != [False, True]:
        if True not in rest[1:]:
            return v
    return NotImplemented


@rule(torch.Tensor.contiguous, TensorTracker)
def contiguous(m: Machine, v: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    if not args and not kwargs and v.meta.is_contiguous():
        return v
    return NotImplemented


def _identity_if(names: str, dtype: torch.dtype) -> None:
    @rule(getattr(torch.Tensor, names), TensorTracker)
    def body(m: Machine, v: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        return v if v.meta.dtype is dtype and not args and not kwargs else NotImplemented


for _method, _dtype in (
    ("float", torch.float32),
    ("double", torch.float64),
    ("half", torch.float16),
    ("bfloat16", torch.bfloat16),
    ("long", torch.int64),
    ("int", torch.int32),
    ("bool", torch.bool),
):
    _identity_if(_method, _dtype)


@rule(torch.Tensor.cpu, TensorTracker)
def cpu(m: Machine, v: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    return v if v.meta.device.type == "cpu" and not args and not kwargs else NotImplemented


@rule((torch.broadcast_shapes,))
def broadcast_shapes(m: Machine, *shapes: Tracker) -> Any:
    rows = [[shape] if shape.python_type() is int else iterate(m, shape) for shape in shapes]
    if any(item.unknown for row in rows for item in row):
        return _broadcast(m, rows)
    values = [tuple(item.read() for item in row) for row in rows]  # type: ignore[attr-defined]
    try:
        return size_of(m, tuple(torch.broadcast_shapes(*values)))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        m.raise_exception(error)


def _broadcast(m: Machine, rows: list[list[Tracker]]) -> Any:
    """As above where some sizes vary: what is equal to what, the program decides."""

    def equal(one: Tracker, other: Tracker) -> bool:
        return one is other or m.truth(m.apply(operator.eq, one, other))

    one = m.const(1)
    found: list[Tracker] = [one] * max(map(len, rows))
    for row in rows:
        for place in range(-len(row), 0):
            size, wide = row[place], found[place]
            if wide is one:
                found[place] = size
            elif not (equal(size, wide) or equal(size, one)):
                if not equal(wide, one):
                    return NotImplemented  # eager says so
                found[place] = size
    return TupleTracker(found, torch.Size)


@rule(torch.device)
def device(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Any:
    return NotImplemented


PURE.add(torch.device)


@rule(torch.nn.Module.__getattr__, Tracker, ConstTracker)
def module_getattr(m: Machine, v: Tracker, name: ConstTracker) -> Any:
    if not isinstance(v, ModuleTracker):
        return NotImplemented
    found = v.registered(m, name.read())
    if found is None:
        m.raise_exception(no_attribute(m, v, name.read()))
    return found


@rule(torch.nn.Module.__call__, Tracker)
def module_call(m: Machine, v: Tracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    """super().__call__(...) in a subclass with its own __call__."""
    if not isinstance(v, ModuleTracker):
        return NotImplemented
    resolved = v.resolve_forward(m)
    if resolved is None:
        return NotImplemented
    function, prefix = resolved
    return m.inline(function, [*prefix, *args], kwargs)


@rule(torch.nn.RNNBase.flatten_parameters, Tracker)
def flatten_parameters(m: Machine, v: Tracker) -> Any:
    """It moves the weights next to each other, for cuDNN: where they lie so, or on the CPU, nothing is left to do."""
    weights = [w for w in getattr(v.obj, "_flat_weights", ()) if isinstance(w, torch.Tensor) and w.is_cuda]
    if len({w.untyped_storage().data_ptr() for w in weights}) > 1:
        m.graph_break("B101", callee="flatten_parameters", reason="it moves weights of a GPU")
    return None
