"""Numbers that change from call to call as options of activations, losses, dropout, random numbers and the like: `F.dropout(x, p)`, `F.huber_loss(x, y, delta=d)`.

Each is an operation of ours that takes them in tensors (`graph/numbered.py`). What eager asks of such a number, and what decides between two formulas, is a guard; a number that is not
so is a constant.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import SequenceTracker
from magneto.dynamo.trackers.context import tracked_autocast
from magneto.dynamo.trackers.dispatch import prefer
from magneto.dynamo.trackers.item import ItemTracker
from magneto.dynamo.trackers.item_graph import graph_number
from magneto.dynamo.trackers.lazy_number import guard_types, leaves, text_of
from magneto.dynamo.trackers.lifted import lift
from magneto.dynamo.trackers.number_options import arguments, moves
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.dynamo.trackers.torch_calls import lower
from magneto.graph import UnknownMeta, numbered

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_HALVES = (torch.float16, torch.bfloat16)
_MOST = 2**53
_NN = torch._C._nn


def _holds(m: Machine, condition: str, numbers: Mapping[str, Tracker]) -> bool:
    """Whether the condition is true of these numbers, and those that change are finite; guarded where it is, and can be."""
    known = {name: number for name, number in numbers.items() if isinstance(number, ConstTracker)}
    if not all(math.isfinite(number.value) for number in known.values() if moves(m, number)):
        return False
    asked = {name: number for name, number in known.items() if f"{{{name}}}" in condition}
    if asked and not eval(
        condition.format(**{name: repr(number.value) for name, number in asked.items()}), {"inf": math.inf, "nan": math.nan}
    ):
        return False
    moving = [number for number in known.values() if moves(m, number)]
    together = {leaf.source for number in moving if number in asked.values() for leaf in leaves(number)}
    if len(together) > 1 or any(len({leaf.source for leaf in leaves(number)}) != 1 for number in moving):
        return False
    guard_types(m, *moving)
    for number in moving:
        m.guard(Kind.RELATION, leaves(number)[0].source, f"abs({text_of(number, '{}')}) < math.inf")
    for source in together:
        m.guard(Kind.RELATION, source, condition.format(**{name: text_of(number, "{}") for name, number in asked.items()}))
    return True


def _held(m: Machine, number: Tracker) -> Any:
    """The number as an argument of a node; None where it has to be a constant."""
    if isinstance(number, ItemTracker):
        return graph_number(m, number)
    if (
        not isinstance(number, ConstTracker)
        or type(number.value) not in (int, float)
        or (type(number.value) is int and abs(number.value) >= _MOST)
    ):
        return None
    if not moves(m, number):
        return number.read()
    guard_types(m, number)
    return m.number_input(number)


def _on_another(number: Tracker, first: Tracker) -> bool:
    """A number that the graph computes is on the CPU: kernels of a GPU would wait for it."""
    return isinstance(number, ItemTracker) and isinstance(first, TensorTracker) and first.meta.device.type != "cpu"


def _fits(m: Machine, tensors: list[TensorTracker], halves: str) -> bool:
    """Are they floats of one type, of which the formulas speak? `halves`: see `_options`."""
    floats = [one for one in tensors if one.meta.dtype.is_floating_point]
    first = tensors[0].meta
    if len({one.meta.dtype for one in floats}) != 1 or not first.dtype.is_floating_point or len({one.meta.device for one in tensors}) != 1:
        return False
    if first.dtype not in _HALVES:
        return first.dtype in (torch.float32, torch.float64)
    state = tracked_autocast(m, first.device.type)
    casts = state[2] if state is not None else torch.is_autocast_enabled(first.device.type)
    return halves == "any" or (halves == "cast" and casts and len(floats) == 1) or (halves == "plain" and not casts)


def _numbers(m: Machine, given: Mapping[str, Tracker], names: tuple[str, ...], condition: str) -> dict[str, Any] | None:
    """The numbers by name, those that change in tensors; None where none does, or they are to be constants."""
    numbers = {name: given[name] for name in names}
    if not any(moves(m, number) or isinstance(number, ItemTracker) for number in numbers.values()) or not _holds(m, condition, numbers):
        return None
    held = {name: _held(m, number) for name, number in numbers.items()}
    return None if None in held.values() else held


def _options(fn: Any, operation: Any, signature: str, condition: str = "", *, place: str = "", halves: str = "none") -> None:
    """Rows for `fn`. `signature`: its arguments, and those of `operation`; numbers have a default behind `=`, other options behind `:`. `condition`: what eager asks of the numbers;
    `place`: the only type of device; `halves`: of half precision too ("any"), where autocast is off ("plain"), or where it makes single precision of them ("cast")."""
    words = [word.replace(":", "=").partition("=") for word in signature.split()]
    numbers = tuple(word.partition("=")[0] for word in signature.split() if "=" in word)
    defaults = {name: ast.literal_eval(default) for name, _, default in words if default}

    def result(m: Machine, args: tuple[Tracker, ...], kwargs: Mapping[str, Tracker]) -> Any:
        found = arguments([name for name, _, _ in words], args, kwargs)
        if found is None or not all(name in found or name in defaults for name, _, _ in words):
            return NotImplemented
        given = {name: found[name] if name in found else m.const(defaults[name]) for name, _, _ in words}
        first, tensors = args[0], [one for one in given.values() if isinstance(one, TensorTracker)]
        if not isinstance(first, TensorTracker) or (place and first.meta.device.type != place) or not _fits(m, tensors, halves):
            return NotImplemented
        if any(_on_another(given[name], first) for name in numbers):
            return NotImplemented
        held = _numbers(m, given, numbers, condition)
        if held is None:
            return NotImplemented
        return m.node(operation, [held[name] if name in held else lower(m, one) for name, one in given.items()], {})

    prefer(fn, TensorTracker)(lambda m, /, *args, **kwargs: result(m, args, kwargs))


_options(_NN.leaky_relu, numbered.leaky_relu, "x slope=0.01", halves="any")
_options(_NN.leaky_relu_, numbered.leaky_relu_, "x slope=0.01", "{slope} >= 0", halves="any")
_options(_NN.elu, numbered.elu, "x alpha=1.0", halves="any")
_options(_NN.elu_, numbered.elu_, "x alpha=1.0", "{alpha} >= 0", halves="any")
_options(torch.celu, numbered.celu, "x alpha=1.0", "{alpha} != 0", halves="any")
_options(torch.celu_, numbered.celu_, "x alpha=1.0", "{alpha} > 0", halves="any")
_options(_NN.softplus, numbered.softplus, "x beta=1.0 threshold=20.0", "{beta} != 0", halves="plain")
_options(_NN.hardtanh, numbered.hardtanh, "x low=-1.0 high=1.0", halves="any")
_options(_NN.hardtanh_, numbered.hardtanh_, "x low=-1.0 high=1.0", halves="any")
_options(torch.threshold, numbered.threshold, "x bound=0 value=0", halves="any")
_options(torch.threshold_, numbered.threshold_, "x bound=0 value=0", halves="any")
_options(torch.hardshrink, numbered.hardshrink, "x bound=0.5", halves="any")
_options(_NN.softshrink, numbered.softshrink, "x bound=0.5", "{bound} >= 0", halves="any")

_options(_NN.huber_loss, numbered.huber_loss, "x y reduction:1 delta=1.0", "{delta} > 0")
_options(_NN.smooth_l1_loss, numbered.smooth_l1_loss, "x y reduction:1 beta=1.0", "{beta} > 0")
_options(
    _NN.cross_entropy_loss,
    numbered.cross_entropy_loss,
    "x target weight:None reduction:1 ignored:-100 smoothing=0.0",
    "0 < {smoothing} <= 1",
    halves="cast",
)
_options(torch.margin_ranking_loss, numbered.margin_ranking_loss, "x y target margin=0.0 reduction:1")
_options(torch.hinge_embedding_loss, numbered.hinge_embedding_loss, "x target margin=1.0 reduction:1")
_options(torch.cosine_embedding_loss, numbered.cosine_embedding_loss, "x y target margin=0.0 reduction:1")
_options(
    torch.triplet_margin_loss,
    numbered.triplet_margin_loss,
    "anchor positive negative margin=1.0 p:2.0 eps:1e-06 swap:False reduction:1",
)


# -- random numbers: on a GPU a recording would hold them


def _dropouts(fn: Any, operation: Any) -> None:
    """Where it is off, nothing asks for the probability but a check."""
    _options(fn, operation, "x p=0.5 train:True", "0 < {p} < 1", place="cpu", halves="any")

    @prefer(fn, TensorTracker, ConstTracker, ConstTracker)
    def off(m: Machine, v: TensorTracker, p: ConstTracker, train: ConstTracker) -> Any:
        if not moves(m, p) or train.value is not False or not _holds(m, "0 <= {p} <= 1", {"p": p}):
            return NotImplemented
        return m.apply(fn, v, m.const(0.5), train)


for _name in ("dropout", "dropout_", "feature_dropout", "feature_dropout_"):
    _dropouts(getattr(torch, _name), getattr(numbered, _name))


def _fills(name: str, signature: str, condition: str) -> None:
    """`x.normal_(mean, std)`: of contiguous tensors, since what is drawn goes by the layout."""
    words = [word.partition("=") for word in signature.split()]

    @prefer(getattr(torch.Tensor, name), TensorTracker)
    def body(m: Machine, v: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        found = arguments([name for name, _, _ in words], args, kwargs)
        if found is None or isinstance(v.meta, UnknownMeta) or not v.meta.is_contiguous() or v.meta.device.type != "cpu":
            return NotImplemented
        if v.meta.dtype is not torch.int64 if name == "random_" else not v.meta.dtype.is_floating_point:
            return NotImplemented
        given = {
            name: found[name] if name in found else m.const(ast.literal_eval(default))
            for name, _, default in words
            if name in found or default
        }
        held = _numbers(m, given, tuple(given), condition) if len(given) == len(words) else None
        if held is None:
            return NotImplemented
        made = m.node(numbered.fills[name], [m.apply(torch.Tensor.detach, v), *held.values()], {})
        return m.apply(torch.Tensor.copy_, v, made)


_fills("random_", "from to", "{from} < {to}")
_fills("normal_", "mean=0.0 std=1.0", "0 <= {std}")
_fills("uniform_", "from=0.0 to=1.0", "{from} <= {to}")
_fills("bernoulli_", "p=0.5", "0 <= {p} <= 1")
_fills("exponential_", "lambd=1.0", "0 < {lambd}")
_fills("log_normal_", "mean=1.0 std=2.0", "0 < {std}")
_fills("cauchy_", "median=0.0 sigma=1.0", "0 < {sigma}")
_fills("geometric_", "p", "0 < {p} < 1")


@prefer(torch.randint, ConstTracker, Tracker)
def randint(m: Machine, first: ConstTracker, /, *args: Tracker, **options: Tracker) -> Any:
    """`torch.randint(0, len(memory), (n,))`."""
    bounds = (m.const(0), first) if len(args) == 1 else (first, *args[:-1])
    if not options.keys() <= {"device"} or len(bounds) != 2 or not any(moves(m, bound) for bound in bounds):
        return NotImplemented
    made = m.apply(torch.empty, args[-1], dtype=m.const(torch.int64), **options)
    return m.apply(torch.Tensor.random_, made, *bounds)


@prefer(torch.normal, ConstTracker, ConstTracker, Tracker)
def normal(m: Machine, mean: ConstTracker, std: ConstTracker, size: Tracker, /, **options: Tracker) -> Any:
    if not options.keys() <= {"dtype", "device"} or not (moves(m, mean) or moves(m, std)):
        return NotImplemented
    return m.apply(torch.Tensor.normal_, m.apply(torch.empty, size, **options), mean, std)


@prefer(torch.normal, TensorTracker, ConstTracker)
def normal_round(m: Machine, mean: TensorTracker, std: ConstTracker) -> Any:
    """Its gradient is zero."""
    if mean.meta.requires_grad or not moves(m, std):
        return NotImplemented
    made = m.apply(torch.empty_like, mean, memory_format=m.const(torch.contiguous_format))
    return m.apply(torch.Tensor.add_, m.apply(torch.Tensor.normal_, made, m.const(0.0), std), mean)


@prefer(torch.bernoulli, TensorTracker, ConstTracker)
def bernoulli(m: Machine, v: TensorTracker, p: ConstTracker) -> Any:
    if not moves(m, p) or v.meta.requires_grad:
        return NotImplemented
    return m.apply(torch.Tensor.bernoulli_, m.apply(torch.empty_like, v), p)


# -- others


@prefer(torch.batch_norm, TensorTracker)
def batch_norm(m: Machine, /, *args: Tracker) -> Any:
    if len(args) != 9 or not (moves(m, args[6]) or isinstance(args[6], ItemTracker)):
        return NotImplemented
    *_, mean, var, training, momentum, _, _ = args
    if not isinstance(training, ConstTracker) or not all(isinstance(one, TensorTracker) for one in (mean, var)):
        return NotImplemented
    held = None if _on_another(momentum, args[0]) else _held(m, momentum)
    if held is None:
        return NotImplemented
    if not training.read():
        return m.apply(torch.batch_norm, *args[:6], m.const(0.0), *args[7:])
    return m.node(numbered.batch_norm, [held if arg is momentum else lower(m, arg) for arg in args], {})


def _rolls(fn: Any) -> None:
    @prefer(fn, TensorTracker)
    def roll(m: Machine, v: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        given = arguments(("shifts", "dims"), args, kwargs)
        if given is None or "shifts" not in given:
            return NotImplemented
        shifts, dims = (
            one.items(m) if isinstance(one, SequenceTracker) else [] if one is None else [one]
            for one in (given["shifts"], given.get("dims"))
        )
        if len(shifts) != (len(dims) or 1) or len(shifts) > numbered.MOST_SHIFTS or not any(moves(m, shift) for shift in shifts):
            return NotImplemented
        held = [_held(m, shift) for shift in shifts]
        places = tuple(lower(m, dim) for dim in dims)
        if (
            None in held
            or any(shift.python_type() is not int for shift in shifts)
            or len({dim % max(v.meta.ndim, 1) for dim in places}) < len(places)
        ):
            return NotImplemented
        return m.node(numbered.roll, [v, places or None, *held], {})


_rolls(torch.roll)
_rolls(torch.Tensor.roll)


@prefer(torch.rsub, TensorTracker, ConstTracker)
def rsub(m: Machine, v: TensorTracker, number: ConstTracker) -> Any:
    return m.apply(operator.sub, number, v) if moves(m, number) else NotImplemented


@prefer(torch.where, TensorTracker, ConstTracker, TensorTracker)
def chosen_number(m: Machine, condition: TensorTracker, number: ConstTracker, other: TensorTracker) -> Any:
    held = lift(m, other, number) if moves(m, number) else None
    return NotImplemented if held is None else m.apply(torch.where, condition, held, other)


@prefer(torch.where, TensorTracker, ConstTracker, ConstTracker)
def chosen_of_two(m: Machine, condition: TensorTracker, one: ConstTracker, other: ConstTracker) -> Any:
    """Floats are of the default type."""
    if not (moves(m, one) or moves(m, other)) or type(one.value) is not float or type(other.value) is not float:
        return NotImplemented
    dtype = torch.get_default_dtype()
    made = [_held(m, number) for number in (one, other)]
    held = [m.node("to", [number, dtype], {}, method=True) if isinstance(number, TensorTracker) else m.const(number) for number in made]
    device = condition.meta.device
    return (
        m.apply(torch.where, condition, *held)
        if device.type == "cpu" and isinstance(held[0], TensorTracker) | isinstance(held[1], TensorTracker)
        else NotImplemented
    )
