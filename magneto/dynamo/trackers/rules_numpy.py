"""Rows of numpy: its functions, methods and operators on arrays that come from tensors, and the ways between arrays and tensors."""

from __future__ import annotations

import math
import operator
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto import _C
from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.trackers.array import NOT_RECORDED, ArrayTracker, function_text, numpy_module, track
from magneto.dynamo.trackers.array_memory import view_of
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker, is_numpy_scalar
from magneto.dynamo.trackers.container import ListTracker, SequenceTracker, SliceTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import FALLBACKS, prefer, rule
from magneto.dynamo.trackers.draw import DrawnArray
from magneto.dynamo.trackers.host import HostNumber, is_numpy
from magneto.dynamo.trackers.klass import ClassTracker
from magneto.dynamo.trackers.rules_operator import ARITHMETIC, COMPARISONS
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.graph.fallback import DataDependent, UnsupportedFake
from magneto.graph.numpy_call import Outcome, Part, compiled, foresee, numpy_operator

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

FROM_METADATA = frozenset(
    "ndim shape size iscomplexobj isrealobj result_type can_cast issubdtype promote_types min_scalar_type may_share_memory isscalar".split()
)
"""Functions whose plain results follow from dtypes and shapes."""


class _CannotShow(Exception):
    """An argument that has no place in an expression."""


# -- expressions


def _text(m: Machine, v: Tracker, arrays: list[ArrayTracker]) -> str:
    """The value as text of an expression over `a`."""
    if isinstance(v, ArrayTracker):
        index = next((i for i, known in enumerate(arrays) if known.same(v)), len(arrays))
        if index == len(arrays):
            arrays.append(v)
        return f"a[{index}][()]" if v.number else f"a[{index}]"
    if isinstance(v, HostNumber) and (type(v.example) in (int, float) or is_numpy(v.example)):
        arrays.append(ArrayTracker(m.number_input(v), True))
        return f"a[{len(arrays) - 1}]{'[()]' if is_numpy(v.example) else '.item()'}"
    if isinstance(v, SequenceTracker) and v.cls in (list, tuple, torch.Size):
        items = [_text(m, item, arrays) for item in v.items(m)]
        return f"[{', '.join(items)}]" if v.cls is list else f"({''.join(item + ', ' for item in items)})"
    if isinstance(v, SliceTracker):
        return f"slice({', '.join(_text(m, part, arrays) for part in v.parts())})"
    if isinstance(v, ClassTracker):
        return _class_text(v.obj)
    const = v.try_const()
    if const is None:
        raise _CannotShow
    return _const_text(const.value)


def _class_text(cls: type) -> str:
    numpy = numpy_module()
    if cls in (int, float, bool, complex):
        return cls.__name__
    if issubclass(cls, numpy.generic) and getattr(numpy, cls.__name__, None) is cls:
        return f"numpy.{cls.__name__}"
    raise _CannotShow


def _const_text(value: Any) -> str:
    numpy = numpy_module()
    if isinstance(value, numpy.generic):
        return f"numpy.{type(value).__name__}({_const_text(value.item())})"
    if isinstance(value, numpy.dtype):
        return f"numpy.dtype({value.str!r})"
    if type(value) is float and not math.isfinite(value):
        return f"float('{value}')"
    if type(value) is tuple:
        return f"({''.join(_const_text(item) + ', ' for item in value)})"
    if type(value) in (int, float, bool, str, type(None), complex, type(...), slice, range) and value == value:
        return repr(value)
    raise _CannotShow


def record_expression(
    m: Machine, template: str, args: Sequence[Tracker], kwargs: Mapping[str, Tracker] | None = None, key: Any = None
) -> Any:
    """`template` with the arguments' texts in its places (keywords last), as a call of numpy in the graph. NotImplemented: it has no such form."""
    arrays: list[ArrayTracker] = []
    try:
        texts = [_text(m, arg, arrays) for arg in args]
        texts += [f"{name}={_text(m, value, arrays)}" for name, value in (kwargs or {}).items()]
    except _CannotShow:
        return NotImplemented
    expression = template.replace("{*}", ", ".join(texts)) if "{*}" in template else template.format(*texts)
    if all(array.real is not None for array in arrays):
        found = _compute(m, expression, arrays)
        if found is not NotImplemented:
            return found
    metas = [array.meta for array in arrays]
    if any(meta is None or meta.requires_grad for meta in metas):
        return NotImplemented
    try:
        outcome = foresee(expression, [(meta, array.number) for meta, array in zip(metas, arrays, strict=True) if meta is not None])
    except DataDependent as problem:
        settled = [
            m.const(const.value) if isinstance(arg, ArrayTracker) and (const := arg.try_const()) is not None else arg for arg in args
        ]
        if any(new is not old for new, old in zip(settled, args, strict=True)):
            return record_expression(m, template, settled, kwargs, key)
        known = _settle(m, expression, arrays)
        if known is not NotImplemented:
            return known
        m.graph_break("B011", name=expression, reason=str(problem))
    except UnsupportedFake as problem:
        m.graph_break("B013", name=expression, reason=problem.reason)
    return _results(m, expression, arrays, outcome, key)


def _compute(m: Machine, expression: str, arrays: list[ArrayTracker]) -> Any:
    """What numpy gives for known arrays; a write is one to their memory. NotImplemented: capture cannot follow the result."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            value = compiled(expression)([array.real for array in arrays])
    except Warning as warned:  # the program is to see it
        m.restart_before(expression, f"it warns: {warned}")
    except Exception as error:
        m.raise_exception(error)
    return track(m, value)


def _settle(m: Machine, expression: str, arrays: list[ArrayTracker]) -> Any:
    """What numpy gives where the numbers of all arrays can be known, for results that are no memory of theirs."""
    numpy = numpy_module()
    reals = []
    for array in arrays:
        value = array.real if array.real is not None else m.known(array.tensor)
        if value is None:
            return NotImplemented
        real = value.numpy() if isinstance(value, torch.Tensor) else value.copy("K")
        real.flags.writeable = False
        reals.append(real)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            value = compiled(expression)(reals)
    except Exception:
        return NotImplemented
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(part, numpy.ndarray) and numpy.may_share_memory(part, real) for part in parts for real in reals):
        return NotImplemented
    return track(m, value)


def _results(m: Machine, expression: str, arrays: list[ArrayTracker], outcome: Outcome, key: Any) -> Any:
    if outcome.writes is not None:
        return _write(m, expression, arrays, outcome)
    if outcome.kind == "plain":
        return m.const(outcome.plain) if key in FROM_METADATA or not arrays else _settle(m, expression, arrays)
    if outcome.kind == "none":
        return None
    fresh: SequenceTracker | None = None
    if any(part.view_of < 0 for part in outcome.parts):
        found = _node(m, expression, outcome.expected, arrays)
        fresh = found
    items = [_item(m, arrays, part, fresh, index) for index, part in enumerate(outcome.parts)]
    if outcome.kind == "one":
        return items[0]
    if outcome.kind == "list":
        return ListTracker(items)
    return TupleTracker(items, outcome.cls or tuple)


def _node(m: Machine, expression: str, expected: str, arrays: list[ArrayTracker]) -> SequenceTracker:
    found = m.node(numpy_operator(), [expression, expected, [array.to_read() for array in arrays]], {})
    assert isinstance(found, SequenceTracker)
    return found


def _item(m: Machine, arrays: list[ArrayTracker], part: Part, fresh: SequenceTracker | None, index: int) -> Tracker:
    if part.view_of < 0:
        assert fresh is not None
        tensor = fresh.item(m, index)
        assert isinstance(tensor, TensorTracker)
        made = ArrayTracker(tensor, part.number)
        made.machine = m
        return made
    owner = arrays[part.view_of]
    return owner if part.same else ArrayTracker(view_of(m, owner.tensor, part), read_only=part.read_only or owner.read_only)


def _write(m: Machine, expression: str, arrays: list[ArrayTracker], outcome: Outcome) -> Any:
    """A call that writes an array: numpy writes a copy, whose numbers the graph then gives to the array's memory."""
    target = arrays[outcome.writes or 0]
    if target.read_only or (target.real is not None and not target.real.flags.writeable):
        m.graph_break("B107", value=target.show(), reason="it is read-only")
    aliases = target.tensor.memory or [target.tensor]
    if target.number or any(alias.new_leaf for alias in aliases):
        m.graph_break("B107", value=target.show(), reason="a tensor that becomes a leaf of autograd in this region")
    returned = outcome.parts[0] if outcome.kind == "one" else None
    if outcome.kind not in ("none", "one") or (returned is not None and not (returned.same and returned.view_of == outcome.writes)):
        m.graph_break("B107", value=target.show(), reason="a call that writes it and returns something else")
    meta = target.tensor.meta
    numpy = numpy_module()
    dtype = torch.empty(0, dtype=meta.dtype).numpy().dtype
    probe = numpy.copy(torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype).numpy(), order="K")
    expected = f"{dtype}{probe.shape}{probe.strides if probe.size else ()}"
    written = _node(m, f"{outcome.writes} writes: {expression}", expected, arrays).item(m, 0)
    m.node("copy_", [target.tensor, written], {}, method=True)
    return target if returned is not None else None


# -- calls


def _holds_tensor(m: Machine, v: Tracker) -> bool:
    return isinstance(v, TensorTracker) or (isinstance(v, SequenceTracker) and any(_holds_tensor(m, item) for item in v.items(m)))


_VALUES = ("item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__")


def call_numpy(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Fallback of dispatch: numpy's functions, methods of arrays, conversions of numbers."""
    numpy = numpy_module()
    if numpy is None:
        return NotImplemented
    if isinstance(fn, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        if args and isinstance(args[0], ConstTracker) and isinstance(fn, types.MethodDescriptorType) and is_numpy_scalar(args[0].value):
            return _of_number(m, fn, args, kwargs)
        if fn.__objclass__ is numpy.ufunc and fn.__name__ in ("reduce", "accumulate", "outer", "reduceat") and args:
            text = function_text(args[0].obj)
            return NotImplemented if text is None else record_expression(m, f"{text}.{fn.__name__}({{*}})", args[1:], kwargs)
        if fn.__name__ in ("__copy__", "__deepcopy__") and args and isinstance(args[0], ArrayTracker):
            return record_expression(m, "{}.copy('K')", args[:1])
        if not (args and isinstance(args[0], ArrayTracker)) or fn.__name__ in NOT_RECORDED:
            return NotImplemented
        if fn.__name__ in _VALUES and not kwargs and all(isinstance(arg, ConstTracker) for arg in args[1:]):
            plain = [arg.read() for arg in args[1:] if isinstance(arg, ConstTracker)]
            return _known(m, args[0], operator.methodcaller(fn.__name__, *plain), f"{{}}.{fn.__name__}({', '.join(map(repr, plain))})")
        names = {f"__{name}__": one for name, (one, _, _) in ARITHMETIC.items()} | {
            "__getitem__": operator.getitem,
            "__setitem__": operator.setitem,
        }
        if fn.__name__ in names:
            return m.apply(names[fn.__name__], *args)
        return record_expression(m, f"{{}}.{fn.__name__}({', '.join('{}' for _ in range(len(args) + len(kwargs) - 1))})", args, kwargs)
    if fn in (int, float, bool, complex) and len(args) == 1 and isinstance(args[0], ArrayTracker):
        return _known(m, args[0], fn, f"{fn.__name__}({{}})")
    module = getattr(fn, "__module__", None)
    known = type(fn) is numpy.ufunc or (isinstance(module, str) and module.partition(".")[0] == "numpy")
    text = function_text(fn) if known else None
    if text is None:
        return NotImplemented
    if any(_holds_tensor(m, arg) for arg in (*args, *kwargs.values())):
        return _of_tensor(m, fn, args, kwargs)
    return record_expression(m, f"{text}({{*}})", args, kwargs, fn.__name__)


def _of_number(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """A method of a known number."""
    try:
        texts = [_text(m, arg, []) for arg in args]
        texts += [f"{name}={_text(m, value, [])}" for name, value in kwargs.items()]
    except _CannotShow:
        return NotImplemented
    return _compute(m, f"({texts[0]}).{fn.__name__}({', '.join(texts[1:])})", [])


_OF_TENSORS: dict[str, Any] = {"{}.item()": torch.Tensor.item, "float({})": float, "int({})": int}
"""Conversions of one number that give what they give for a tensor that holds it."""


def _known(m: Machine, v: ArrayTracker, compute: Callable[[Any], Any], template: str) -> Any:
    real = v.real
    if isinstance(v, DrawnArray) and (found := v.asked(m, compute, template)) is not NotImplemented:
        return found
    if real is None:
        value = m.known(v.tensor)
        if value is None:
            return m.apply(_OF_TENSORS[template], v.tensor) if template in _OF_TENSORS and not v.shape() else NotImplemented
        real = value.numpy()[()] if v.number else value.numpy()
    try:
        return m.const(compute(real))
    except Exception as error:
        m.raise_exception(error)


def _of_tensor(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """np.asarray(tensor), np.array(tensor): what other functions do with a tensor is theirs."""
    numpy = numpy_module()
    if fn not in (numpy.asarray, numpy.array, numpy.ascontiguousarray) or not isinstance(args[0], TensorTracker):
        return NotImplemented
    array = as_array(m, args[0])
    return array if array is NotImplemented else m.apply(fn, array, *args[1:], **kwargs)


FALLBACKS.append(call_numpy)


def construct_number(m: Machine, cls: type, args: Sequence[Tracker]) -> Any:
    """np.float32(value)."""
    return record_expression(m, f"numpy.{cls.__name__}({{*}})", args)


# -- operators


def _operand(v: Tracker) -> bool:
    return not isinstance(v, TensorTracker)


def _number_beside(m: Machine, fn: Any, tensor: TensorTracker, number: ArrayTracker, ahead: bool) -> Any:
    """A tensor and a number of numpy (`ahead` of it), which torch takes for the number it holds: a constant, or a tensor without dimensions where that means the same."""
    const = number.try_const()
    if const is not None:
        value = m.const(const.value.item())
        return m.apply(fn, value, tensor) if ahead else m.apply(fn, tensor, value)
    dtype, own = tensor.meta.dtype, number.tensor.meta.dtype
    wide = dtype.is_floating_point or (own in (torch.int64, torch.int32) and not dtype.is_complex and dtype is not torch.bool)
    if not tensor.meta.ndim or not wide or own not in (torch.int64, torch.int32, torch.float64, torch.float32):
        return NotImplemented
    if fn not in _BESIDE:
        return NotImplemented
    if ahead and fn is operator.truediv:  # as Tensor.__rtruediv__ computes it
        fn, tensor = operator.mul, m.apply(torch.Tensor.reciprocal, tensor)  # type: ignore[assignment]
    return m.apply(fn, number.tensor, tensor) if ahead else m.apply(fn, tensor, number.tensor)


_BESIDE = {operator.add, operator.sub, operator.mul, operator.truediv, *(fn for fn, _, _ in COMPARISONS.values())}
_FORMS = [getattr(place, name) for name in ("add", "sub", "mul", "div", *COMPARISONS) for place in (torch, torch.Tensor)]
_BESIDE.update(_FORMS)
for _form in _FORMS:

    @rule(_form, TensorTracker, ArrayTracker)
    def _beside(m: Machine, tensor: TensorTracker, number: ArrayTracker, form: Any = _form) -> Any:
        return _number_beside(m, form, tensor, number, False) if number.number else NotImplemented


def _operator(fn: Any, symbol: str) -> None:
    def body(m: Machine, a: Tracker, b: Tracker) -> Any:
        for tensor, number in ((a, b), (b, a)):
            if isinstance(tensor, TensorTracker) and isinstance(number, ArrayTracker) and number.number:
                found = _number_beside(m, fn, tensor, number, number is a)
                if found is not NotImplemented:
                    return found
        if not (_operand(a) and _operand(b)):
            m.graph_break("B104", operation=symbol, value=f"a tensor and a {(a if isinstance(a, ArrayTracker) else b).show()}")
        found = record_expression(m, f"({{}}) {symbol} ({{}})", [a, b])
        if found is NotImplemented:
            m.graph_break("B104", operation=symbol, value=(a if isinstance(a, ArrayTracker) else b).show())
        return found

    prefer(fn, ArrayTracker, Tracker)(body)
    prefer(fn, Tracker, ArrayTracker)(body)


def _inplace_operator(fn: Any, ifn: Any) -> None:
    @prefer(ifn, ArrayTracker, Tracker)
    def body(m: Machine, a: ArrayTracker, b: Tracker) -> Any:
        if a.number or not _operand(b):
            return m.apply(fn, a, b)
        found = record_expression(m, f"inplace({ifn.__name__!r}, {{}}, {{}})", [a, b])
        if found is NotImplemented:
            m.graph_break("B104", operation=ifn.__name__, value=a.show())
        return found


for _fn, _ifn, _symbol in ARITHMETIC.values():
    _operator(_fn, _symbol.split()[0])
    _inplace_operator(_fn, _ifn)
for _fn, _, _symbol in COMPARISONS.values():
    _operator(_fn, _symbol)
for _fn, _symbol in ((operator.neg, "-"), (operator.pos, "+"), (operator.invert, "~")):
    prefer(_fn, ArrayTracker)(lambda m, v, symbol=_symbol: record_expression(m, f"{symbol}({{}})", [v]))
for _fn in (abs, operator.abs):
    prefer(_fn, ArrayTracker)(lambda m, v: record_expression(m, "numpy.abs({})", [v]))


@prefer(operator.getitem, ArrayTracker, Tracker)
def getitem(m: Machine, v: ArrayTracker, key: Tracker) -> Any:
    if isinstance(v, DrawnArray) and v.picks_one(key):
        found = v.asked(m, operator.itemgetter(key.value), f"{{}}[{key.value!r}]")
        if found is not NotImplemented:
            return found
    found = record_expression(m, "{}[{}]", [v, key])
    if found is NotImplemented:
        m.graph_break("B104", operation="indexing", value=v.show())
    return found


@rule(operator.setitem, ArrayTracker, Tracker, Tracker)
def setitem(m: Machine, v: ArrayTracker, key: Tracker, value: Tracker) -> Any:
    found = record_expression(m, "setitem({}, {}, {})", [v, key, value])
    if found is NotImplemented:
        m.graph_break("B104", operation="assignment to an item", value=v.show())
    return found


@prefer(len, ArrayTracker)
def length(m: Machine, v: ArrayTracker) -> Any:
    shape = v.shape()
    if not shape:
        m.raise_exception(
            TypeError(f"object of type '{_C.type_name(v.python_type())}' has no len()" if v.number else "len() of unsized object")
        )
    return m.const(shape[0])


def print_options() -> str:
    """On what the text of an array depends besides the array."""
    return repr(numpy_module().get_printoptions())


def _shown(fn: Any) -> None:
    @prefer(fn, ArrayTracker)
    def body(m: Machine, v: ArrayTracker) -> Any:
        if v.real is None:
            return NotImplemented
        m.guard(Kind.STATE, None, ("numpy.get_printoptions()", print_options, (), print_options()))
        return m.const(fn(v.real))


_shown(str)
_shown(repr)


def _as_index(v: Tracker) -> Tracker | None:
    """An array as an index of a tensor: a tensor of its numbers."""
    if not isinstance(v, ArrayTracker) or v.number or not v.shape():
        return None
    found = v.to_read()
    return found if found is not None and found.meta.dtype in (torch.int64, torch.bool) else None


@prefer(operator.getitem, TensorTracker, ArrayTracker)
def indexed_by_array(m: Machine, v: TensorTracker, key: ArrayTracker) -> Any:
    index = _as_index(key)
    return NotImplemented if index is None else m.apply(operator.getitem, v, index)


@prefer(operator.getitem, TensorTracker, TupleTracker)
def indexed_by_arrays(m: Machine, v: TensorTracker, key: TupleTracker) -> Any:
    if key.cls is not tuple or not any(isinstance(item, ArrayTracker) for item in key.items(m)):
        return NotImplemented
    return m.apply(operator.getitem, v, TupleTracker([_as_index(item) or item for item in key.items(m)]))


def _dtype_comparison(fn: Any) -> None:
    def body(m: Machine, a: Tracker, b: Tracker) -> Any:
        numpy = numpy_module()
        values = [v.obj if isinstance(v, ClassTracker) else v.read() for v in (a, b) if isinstance(v, (ClassTracker, ConstTracker))]
        if numpy is None or not any(isinstance(value, numpy.dtype) for value in values):
            return NotImplemented
        return m.const(bool(fn(*values)))

    prefer(fn, ConstTracker, ClassTracker)(body)
    prefer(fn, ClassTracker, ConstTracker)(body)


_dtype_comparison(operator.eq)
_dtype_comparison(operator.ne)


# -- between arrays and tensors


def as_array(m: Machine, v: TensorTracker) -> Any:
    """The tensor's memory as an array; eager says what is wrong with a tensor that requires grad or lives elsewhere."""
    if numpy_module() is None or v.cls is not torch.Tensor or v.meta.requires_grad or v.meta.device.type != "cpu":
        return NotImplemented
    try:
        torch.empty(0, dtype=v.meta.dtype).numpy()
    except (TypeError, RuntimeError):
        return NotImplemented
    return ArrayTracker(m.node("detach", [v], {}, method=True))  # type: ignore[arg-type]  # the tensor may take another shape


@rule((torch.Tensor.numpy, torch.Tensor.__array__), TensorTracker)
def tensor_numpy(m: Machine, v: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    return NotImplemented if args or kwargs else as_array(m, v)


@rule(torch.from_numpy, ArrayTracker)
def from_numpy(m: Machine, v: ArrayTracker) -> Any:
    return NotImplemented if v.number or v.read_only else m.node("detach", [v.tensor], {}, method=True)


@prefer(torch.as_tensor, ArrayTracker)
def as_tensor(m: Machine, v: ArrayTracker, /, **kwargs: Tracker) -> Any:
    if v.number or v.read_only:
        return NotImplemented
    shared = m.node("detach", [v.tensor], {}, method=True)
    return m.apply(torch.Tensor.to, shared, **kwargs) if kwargs else shared


@prefer(torch.tensor, ArrayTracker)
def copied(m: Machine, v: ArrayTracker, /, **kwargs: Tracker) -> Any:
    """A copy. (Numbers: as an array without dimensions; torch.tensor(np.float64(1)) is float64.)"""
    if not set(kwargs) <= {"dtype", "device"}:
        return NotImplemented
    read = v.to_read()
    if read is None:
        return NotImplemented
    made = m.node("clone", [read], {}, method=True)
    return m.apply(torch.Tensor.to, made, **kwargs) if kwargs else made
