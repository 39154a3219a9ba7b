"""What the schema of an ATen overload says about aliasing and mutation, worked out once per overload."""

from __future__ import annotations

from typing import Any

import torch

from magneto.base.dataclass import dataclass
from magneto.graph.rules import Rule, rule_for

# Arguments written although the schema does not say so: overload -> (positions, position of the flag that must be true).
HIDDEN_WRITES: dict[str, tuple[tuple[int, ...], int]] = {
    "aten.native_batch_norm.default": ((3, 4), 5),
    "aten.cudnn_batch_norm.default": ((3, 4), 5),
    "aten.miopen_batch_norm.default": ((3, 4), 5),
}


@dataclass(frozen=True, slots=True)
class OpInfo:
    """`returns[i]` is None for a fresh tensor, ("self", arg) when the argument itself comes back, ("view", arg) for a view of it."""

    name: str
    rule: Rule | None
    writes: tuple[int | str, ...]  # position, or name of a keyword-only argument
    returns: tuple[tuple[str, int | str] | None, ...]
    hidden: tuple[tuple[int, ...], int] | None
    inplace_view: bool
    random: bool

    @property
    def functional(self) -> bool:
        return not self.writes and not self.hidden and not any(self.returns)


_INFO: dict[Any, OpInfo] = {}


def op_info(op: Any) -> OpInfo:
    found = _INFO.get(op)
    if found is None:
        found = _INFO[op] = _build(op)
    return found


def _build(op: Any) -> OpInfo:
    schema = op._schema
    writes: list[int | str] = []
    owners: dict[str, int | str] = {}
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is None:
            continue
        place: int | str = argument.name if argument.kwarg_only else position
        for label in alias.before_set:
            owners.setdefault(label, place)
        if alias.is_write:
            writes.append(place)
    returns: list[tuple[str, int | str] | None] = []
    for item in schema.returns:
        alias = item.alias_info
        labels = list(alias.before_set) if alias is not None else []
        owner = next((owners[label] for label in labels if label in owners), None)
        if owner is None and not writes and owners and str(item.type) == "List[Tensor]":
            owner = next(iter(owners.values()))  # split, unbind: the schema marks the list's elements only
            returns.append(("view", owner))
            continue
        if owner is None:
            returns.append(None)
        else:
            returns.append(("self" if alias.is_write else "view", owner))
    name = str(op)
    inplace_view = torch.Tag.inplace_view in op.tags
    random = torch.Tag.nondeterministic_seeded in op.tags
    return OpInfo(name, rule_for(op), tuple(writes), tuple(returns), HIDDEN_WRITES.get(name), inplace_view, random)


def stays(op: Any) -> bool:
    """Does it run although nobody reads its result? It draws random numbers, or has no result: it is there to raise (`_linalg_check_errors`)."""
    return isinstance(op, torch._ops.OpOverload) and (torch.Tag.nondeterministic_seeded in op.tags or not op._schema.returns)
