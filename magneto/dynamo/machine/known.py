"""Values of tensors that the region makes out of constants: `torch.arange(3).tolist()` needs no break.

Nothing is computed while the program is traced. When the program asks for numbers, the part of the graph that they come from is cut out and, if
nothing in it depends on an input's numbers or on random ones, run for real.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from magneto.dynamo import trackers
from magneto.dynamo.trackers.base import Tracker
from magneto.graph import TensorMeta, UnknownMeta, UnknownNumber

if TYPE_CHECKING:
    from magneto.dynamo.machine.recorder import Recorder

MAX_NODES = 200
MAX_ELEMENTS = 1 << 14
METADATA_ONLY = frozenset("zeros_like ones_like full_like new_zeros new_ones new_full size_of".split())
"""Operations that look at their tensor's metadata alone."""
UNDEFINED = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize_".split())

OF_NUMBERS = frozenset("nonzero argwhere bincount combinations masked_select repeat_interleave unique_consecutive _unique2".split())
"""Operations whose results have sizes that depend on numbers."""


def known_value(node: fx.Node, kept: set[fx.Node], random: set[fx.Node]) -> tuple[torch.Tensor | None, AbstractSet[fx.Node]]:
    """The tensor that `node` stands for at this point of the program, and what it comes from; None when it depends on data. `kept`: nodes that write,
    draw or switch modes."""
    needed: set[fx.Node] = set()
    complete = _complete([node], kept, needed, lambda one: False)
    value = None if not complete else _whatever_is_drawn(node, needed) if needed & random else _run(needed, node)
    return value, needed


def _whatever_is_drawn(node: fx.Node, needed: set[fx.Node]) -> torch.Tensor | None:
    """`torch.rand([]) < 0.0`: what the comparison gives for all numbers of [0, 1), where that is one thing."""
    decided = node.target in (operator.lt, operator.le, operator.gt, operator.ge) and len(needed) == len(node.args) == 2
    drawn, bound = node.args if decided else (None, None)
    one = isinstance(drawn, fx.Node) and drawn.target is torch.rand and drawn.args in (([],), ((),))
    if not one or type(bound) not in (int, float):
        return None
    least, most = (node.target(end, bound) for end in (0.0, math.nextafter(1.0, 0.0)))  # type: ignore[operator]
    return torch.tensor(least) if least == most else None


def needed_for(nodes: Sequence[fx.Node], kept: set[fx.Node], leaf: Callable[[fx.Node], bool]) -> set[fx.Node] | None:
    """What the tensors of `nodes` come from, at this point of the program; None where anything but constants and `leaf`s is among it."""
    needed: set[fx.Node] = set()
    return needed if _complete(nodes, kept, needed, leaf) else None


def _complete(nodes: Sequence[fx.Node], kept: set[fx.Node], needed: set[fx.Node], leaf: Callable[[fx.Node], bool]) -> bool:
    """Add to `needed` what `nodes` come from, writes among it; False when that depends on data."""
    if not all(_gather(node, needed, leaf) for node in nodes):
        return False
    reached: set[fx.Node] = set()
    todo = list(needed)
    while todo:  # a write to something that shares an origin with the value belongs to it: it may be the same memory
        one = todo.pop()
        if one in reached:
            continue
        reached.add(one)
        if one in kept and one not in needed:
            if not _gather(one, needed, leaf):
                return False
            todo.extend(needed - reached)
        todo.extend(user for user in one.users if user in kept or _passes_on(user))
    return True


def _passes_on(node: fx.Node) -> bool:
    """Whether what `node` gives may be memory of its arguments whose numbers we could know."""
    return (
        node.op in ("call_function", "call_method") and _name(node) not in METADATA_ONLY and _name(node) not in UNDEFINED and _small(node)
    )


def _gather(node: fx.Node, needed: set[fx.Node], leaf: Callable[[fx.Node], bool]) -> bool:
    """Add what `node` is computed from; False when an input's numbers are among it."""
    todo, complete = [node], True
    while todo:
        one = todo.pop()
        if one in needed:
            continue
        needed.add(one)
        name = _name(one)
        if "constant" in one.meta or leaf(one):
            continue
        if one.op not in ("call_function", "call_method") or name in UNDEFINED or len(needed) > MAX_NODES or not _small(one):
            complete = False
        elif name not in METADATA_ONLY:
            todo.extend(one.all_input_nodes)
    return complete


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def _small(node: fx.Node) -> bool:
    value = node.meta.get("val")
    metas = value if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(meta, UnknownMeta | UnknownNumber) for meta in metas):
        return False
    return all(not isinstance(meta, TensorMeta) or (meta.numel <= MAX_ELEMENTS and meta.device.type == "cpu") for meta in metas)


def _run(needed: set[fx.Node], wanted: fx.Node) -> torch.Tensor | None:
    values: dict[fx.Node, Any] = {}

    def load(node: fx.Node) -> Any:
        if node not in values and "constant" in node.meta:
            values[node] = node.meta["constant"].clone()
        elif node not in values:  # only its metadata are looked at
            meta: TensorMeta = node.meta["val"]
            values[node] = torch.empty(1, dtype=meta.dtype).as_strided(meta.shape, (0,) * len(meta.shape))
            if meta.is_dense() and meta.numel <= MAX_ELEMENTS:
                values[node] = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype)
        return values[node]

    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")  # a warning is the program's to see
            for node in sorted(needed):  # in the graph's order
                if node.op != "placeholder":
                    args, kwargs = fx.map_arg(node.args, load), fx.map_arg(node.kwargs, load)
                    if node.op == "call_method":
                        values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                    else:
                        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return None
    found = load(wanted)
    return found if isinstance(found, torch.Tensor) else None


def known_result(recorder: Recorder, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tracker | None:
    """What an operation of OF_NUMBERS gives for tensors that the region makes out of constants, as constants."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name not in OF_NUMBERS or recorder.transformed or hasattr(recorder, "around"):
        return None
    found_args = [(key, _number_or_tensor(recorder, arg)) for key, arg in (*enumerate(args), *kwargs.items())]
    given = {key: value[0] for key, value in found_args if value is not None}
    if len(given) < len(found_args) or "out" in kwargs:
        return None
    call = getattr(torch.Tensor, target) if isinstance(target, str) else target
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = call(*(given[i] for i in range(len(args))), **{key: given[key] for key in kwargs})
    except Exception:
        return None
    results = found if type(found) is tuple else (found,)
    if not all(isinstance(one, torch.Tensor) and one.numel() <= MAX_ELEMENTS for one in results):
        return None
    if not all(bool(one.isfinite().all()) and not one.is_complex() for one in results):
        return None
    made = [_constant(recorder, one) for one in results]
    return trackers.TupleTracker(made) if type(found) is tuple else made[0]


def _number_or_tensor(recorder: Recorder, arg: Any) -> tuple[Any] | None:
    """The value of an argument in a tuple, None where it is not known."""
    if isinstance(arg, trackers.TensorTracker):
        value = recorder.known(arg) if arg.cls is torch.Tensor and not arg.meta.requires_grad else None
        return None if value is None else (value,)
    const = arg.try_const() if isinstance(arg, Tracker) else None
    if isinstance(arg, Tracker):
        return None if const is None else (const.value,)
    return (arg,) if arg is None or type(arg) in (int, bool, float) else None


def _constant(recorder: Recorder, value: torch.Tensor) -> Tracker:
    """A tensor of these numbers and this layout."""
    if value.ndim == 2 and not value.is_contiguous() and value.t().is_contiguous():
        return recorder.node("t", [_constant(recorder, value.t())], {}, True)
    made = recorder.node(torch.tensor, [value.tolist()], {"dtype": value.dtype, "device": value.device}, False)
    return recorder.node("reshape", [made, tuple(value.shape)], {}, True) if not value.numel() and value.ndim > 1 else made
