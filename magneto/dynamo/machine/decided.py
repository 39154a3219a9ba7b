"""What the program decides by a number in a small tensor that it is given: `if self.n_averaged == 0`, an optimiser that compares the number of its step.

Such a branch needs no break. The part of the graph that the number comes from is cut out and run when the region is captured, and that it decides the same way is a guard
(DECIDES), which runs that part again, on a copy, before each call. What decides differently time and again is left to a break (`Context.flips`).
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from magneto.base.dataclass import dataclass, field
from magneto.base.text import compile_source
from magneto.dynamo import trackers
from magneto.dynamo.guards.source import Source
from magneto.dynamo.machine.known import needed_for
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.lazy_number import changing
from magneto.dynamo.trackers.tensor import PLAIN_CLASSES
from magneto.graph import TensorMeta

if TYPE_CHECKING:
    from magneto.dynamo.machine.recorder import Recorder

MAX_STEPS = 16  # operations that a guard may run
_NAMES = {"math": math, **{name: getattr(builtins, name) for name in "abs float int bool sum min max".split()}, "__builtins__": {}}


@dataclass(frozen=True, slots=True)
class Decision:
    """`decide(tensor)` is `expected`; `text`: the condition, with the names of the graph; `key`: what it computes."""

    decide: Callable[[torch.Tensor], bool] = field(compare=False)
    expected: bool
    text: str = field(compare=False)
    key: tuple[Any, ...]

    def holds(self, value: Any) -> bool:
        try:
            return isinstance(value, torch.Tensor) and value.numel() == 1 and self.decide(value) is self.expected
        except Exception:
            return False


def decision_of(recorder: Recorder, condition: Tracker) -> tuple[Source, Decision] | None:
    """The tensor from outside whose number alone makes `condition` true or false; None where there is more to it."""
    if hasattr(recorder, "around") or recorder.autocasts or torch.is_autocast_enabled("cpu"):
        return None
    nodes: list[fx.Node] = []
    numbers: list[trackers.ConstTracker] = []
    text = _text(condition, nodes, numbers)
    if text is None or not nodes or any(changing(recorder.machine, number) for number in numbers):
        return None
    needed = needed_for(nodes, recorder.keep, _is_number)
    if needed is None or needed & recorder.random_nodes or len(needed) > MAX_STEPS:
        return None
    given = [node for node in needed if node.op == "placeholder"]
    tracker = next((tracker for node, tracker in recorder.inputs if node is given[0]), None) if len(given) == 1 else None
    if tracker is None or tracker.source is None or tracker.cls not in PLAIN_CLASSES or _shared(tracker):
        return None
    compiled = _compiled(sorted(needed), nodes, text)
    if compiled is None:
        return None
    decide, key = compiled
    try:
        expected = decide(tracker.plain())
    except Exception:
        return None
    for number in numbers:
        number.read()
    return tracker.source, Decision(decide, expected, text.format(*[node.name for node in nodes]), key)


def _shared(tracker: trackers.TensorTracker) -> bool:
    return any(other is not tracker and other.source is not None for other in tracker.memory or ())


def _is_number(node: fx.Node) -> bool:
    meta = node.meta.get("val")
    return (
        node.op == "placeholder" and type(meta) is TensorMeta and meta.numel == 1 and meta.device.type == "cpu" and not meta.requires_grad
    )


def _text(value: Tracker, nodes: list[fx.Node], numbers: list[trackers.ConstTracker]) -> str | None:
    """A Python expression with `{}` for each of `nodes`, which are added in its order; `numbers` are what it reads besides."""
    if isinstance(value, trackers.ItemTracker):
        operands = [_text(operand, nodes, numbers) for operand in value.operands]
        return None if None in operands else value.template.format(*operands)
    if isinstance(value, trackers.TensorTracker):
        if value.node is None or value.meta.numel != 1 or value.cls not in PLAIN_CLASSES:
            return None
        nodes.append(value.node)
        return "{}"
    number = value.value if isinstance(value, trackers.ConstTracker) else None
    if not isinstance(number, (int, float)) or type(number) not in (int, float, bool) or not math.isfinite(number):
        return None
    assert isinstance(value, trackers.ConstTracker)
    numbers.append(value)
    return repr(number)


def _compiled(
    needed: Sequence[fx.Node], wanted: Sequence[fx.Node], condition: str
) -> tuple[Callable[[torch.Tensor], bool], tuple[Any, ...]] | None:
    namespace: dict[str, Any] = dict(_NAMES)
    names: dict[fx.Node, str] = {}
    lines = ["def decide(number):"]

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            inner = "".join(text(item) + ", " for item in value)
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        if value is None or type(value) in (int, bool, str) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, (slice, dict)):  # there may be tensors in it
            raise KeyError(value)
        name = f"k{len(namespace)}"
        namespace[name] = value
        return name

    for node in needed:
        name = f"n{len(names)}"
        if node.op == "placeholder":
            lines.append(f"    {name} = number.detach().clone()")
        else:
            try:
                args = [text(arg) for arg in node.args] + [f"{key}={text(value)}" for key, value in node.kwargs.items()]
            except KeyError:  # something of which only the metadata matter
                return None
            if node.op == "call_method":
                lines.append(f"    {name} = {args[0]}.{node.target}({', '.join(args[1:])})")
            else:
                namespace[f"f{name}"] = node.target
                lines.append(f"    {name} = f{name}({', '.join(args)})")
        names[node] = name
    lines.append(f"    return bool({condition.format(*[names[node] for node in wanted])})")
    source = "\n".join(lines) + "\n"
    key = (source, tuple(id(value) for name, value in namespace.items() if name not in _NAMES))
    return compile_source("a decision", source, namespace)["decide"], key
