"""Inputs whose strides vary, and that a graph only reads: it computes the same of dense ones in their stead, laid out in the same order of dimensions, whatever the strides were.

That is tried out, with the sizes and strides that capture has propagated the graph with: what leaves it must be laid out as it was, and no write may reach what shares memory with such an input or, for the first time, with another tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from magneto.base.dataclass import dataclass, replace
from magneto.graph.layout import ordered_strides
from magneto.graph.meta import TensorMeta
from magneto.graph.resize import UNKNOWN, Form, Resizer, Step, form_of, inside_out
from magneto.graph.unknown import EXAMPLE, FAILED, LARGE_PROBES, N_PROBES, SizeUnknown, UnknownMeta, merge

LEAST = 5  # of the probes: for so many there must be an answer


@dataclass(frozen=True, slots=True)
class Dense:
    """A graph with dense inputs. `symbols`: those of the sizes that still vary, by their new numbers; `orders`: dimensions of these inputs from inside out."""

    resizer: Resizer
    symbols: tuple[int, ...]
    orders: Mapping[fx.Node, tuple[int, ...]]


def dense(resizer: Resizer, inputs: Collection[fx.Node], outputs: Collection[fx.Node]) -> Dense | None:
    """None where the program could tell."""
    steps = resizer.steps
    if any(step.kind in ("gradients", "leaf") or (step.kind == "number" and step.target == "stride") for step in steps):
        return None
    orders: dict[fx.Node, tuple[int, ...]] = {}
    loose: list[Step] = []
    for step in steps:
        target, val = step.target, step.val
        if step.node in inputs:
            if any(stride == 0 for meta in val.probes for stride in meta.strides):
                return None
            target, orders[step.node] = _dense(target, val.probes[EXAMPLE])
            val = val.with_(storage_offset=0)
        loose.append(replace(step, target=target, val=val, effects=None, facts=None))
    tried = Resizer(loose, (), resizer.grad_enabled)
    tried.loose = True
    found: list[Any] = []
    for sizes in _columns(steps):
        try:
            found.append(tried.run(sizes))
        except Exception:
            found.append(FAILED)
    given = [k for k, values in enumerate(found) if values is not FAILED]
    if len(given) < LEAST or not {*range(LARGE_PROBES), EXAMPLE} <= set(given):
        return None
    if not all(_agree(step, found, given) for step in steps if step.node in outputs) or _shared(steps, loose, inputs, outputs):
        return None
    with suppress(SizeUnknown):
        return _numbered(resizer, [_known(step, found) for step in loose], orders)
    return None


def _dense(form: Form, meta: TensorMeta) -> tuple[Form, tuple[int, ...]]:
    order = inside_out(meta.shape, meta.strides)
    sizes = {dim: term[1][0] for dim, term in enumerate(form.shape) if term[1]}
    return form_of(meta.shape, ordered_strides(meta.shape, order), sizes), tuple(order)


def _columns(steps: Sequence[Step]) -> list[tuple[int, ...]]:
    """The symbols in each probe."""
    columns: list[dict[int, int]] = [{} for _ in range(N_PROBES)]
    for step in steps:
        if step.kind == "input" and step.target is not None:
            for meta, column in zip(step.val.probes, columns, strict=True):
                column.update({symbol: (*meta.shape, *meta.strides)[dim] - plus for dim, symbol, plus in step.target.symbols})
    return [tuple(column[symbol] for symbol in sorted(column)) for column in columns]


def _agree(step: Step, found: Sequence[Any], given: Sequence[int]) -> bool:
    """Whether what leaves the graph is what it was."""
    if step.kind == "number":
        return True
    for k in given:
        wanted, now = step.val.probes[k] if isinstance(step.val, UnknownMeta) else step.val, found[k][step.node]
        if not isinstance(wanted, TensorMeta) or not isinstance(now, TensorMeta):
            return False
        if now.with_(requires_grad=wanted.requires_grad, is_leaf=wanted.is_leaf) != wanted:
            return False
    return True


def _shared(steps: Sequence[Step], loose: Sequence[Step], inputs: Collection[fx.Node], outputs: Collection[fx.Node]) -> bool:
    """Whether memory of these inputs is written or leaves the graph, or other tensors share memory otherwise than before."""
    held = set(inputs)
    for old, new in zip(steps, loose, strict=True):
        if new.kind == "none" and held.intersection(new.node.all_input_nodes):
            return True
        if new.kind != "call":
            continue
        if new.effects is None or old.effects is None:  # an item of several results
            held |= {new.node} if held.intersection(new.read) else set()
            continue
        owners = {_owner(new, path) for _, path in new.effects[1]}
        differs = new.effects[1:] != old.effects[1:]
        both = owners | {_owner(old, path) for _, path in old.effects[1]}
        if (
            new.effects[0] != old.effects[0]
            or held.intersection(_owner(new, path) for path in new.effects[0])
            or (differs and not both <= held)
        ):
            return True
        if held.intersection(new.read) and _reads_memory(new):
            return True
        held |= {new.node} if held.intersection(owners) else set()
    return bool(held.intersection(outputs))


def _reads_memory(step: Step) -> bool:
    """Whether a call may see more of memory than the tensor's elements, or where it begins."""
    name = getattr(step.target, "__name__", "")
    return "as_strided" in name or name == "view_as_complex" or (name == "view" and any(isinstance(arg, torch.dtype) for arg in step.args))


def _owner(step: Step, path: tuple[Any, ...]) -> Any:
    value: Any = step.kwargs[path[0]] if isinstance(path[0], str) else step.args[path[0]]
    for part in path[1:]:
        value = getattr(value, part) if isinstance(value, slice) else value[part]
    return value


def _known(step: Step, found: Sequence[Any]) -> Step:
    """With what is known of it now."""
    if step.kind not in ("input", "call"):
        return step
    values = [column if column is FAILED else column[step.node] for column in found]
    if any(value is UNKNOWN for value in values):
        raise SizeUnknown("it depends on data")
    val = merge(values)
    if isinstance(val, TensorMeta):
        val = val.with_(requires_grad=step.val.requires_grad, is_leaf=step.val.is_leaf)
    form = step.target if step.kind != "input" or step.target is None or step.target.symbols else None
    return replace(step, target=form, val=val).learnt()


def _numbered(resizer: Resizer, steps: Sequence[Step], orders: Mapping[fx.Node, tuple[int, ...]]) -> Dense:
    forms = {step.node: step.target for step in steps if step.kind == "input" and step.target is not None}
    left = tuple(sorted({symbol for form in forms.values() for _, symbol, _ in form.symbols}))
    names = {symbol: k for k, symbol in enumerate(left)}
    made = Resizer(
        [replace(step, target=forms[step.node].renamed(names)) if step.node in forms else step for step in steps],
        resizer.decisions,
        resizer.grad_enabled,
    )
    resizer.trust(lambda sizes: made.expected(tuple(sizes[symbol] for symbol in left)))
    return Dense(made, left, orders)
