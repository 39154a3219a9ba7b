"""Meta rules: what each ATen operation returns, from metadata alone.

`META_RULES` maps "aten.packet.overload" (or "aten.packet" for all overloads) to a rule: a function of the operation's arguments with
TensorMeta in place of tensors that returns TensorMeta, a tuple or list of them, or a constant. A rule that does not want to answer (wrong
shapes, exotic arguments) raises RuleError. Rules serve in-place and out variants too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto.graph import (
    rules_attention,
    rules_conv,
    rules_factory,
    rules_fft,
    rules_index,
    rules_linalg,
    rules_matmul,
    rules_norm,
    rules_pointwise,
    rules_pool,
    rules_random,
    rules_recurrent,
    rules_reduce,
    rules_view,
)
from magneto.graph.fallback import DataDependent, UnsupportedFake, answer_by_torch
from magneto.graph.layout import Untried

Rule = Callable[..., Any]

_FAMILIES = (
    *(rules_pointwise, rules_view, rules_factory, rules_reduce, rules_matmul, rules_conv, rules_pool, rules_norm),
    *(rules_attention, rules_index, rules_random, rules_recurrent, rules_fft, rules_linalg),
)

META_RULES: dict[str, Rule] = {name: rule for family in _FAMILIES for name, rule in family.RULES.items()}

_RULE_OF: dict[Any, Rule | None] = {}


def propagate(op: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
    """Metadata of `op(*args, **kwargs)` for a functional overload; raises torch's own exception when torch would raise."""
    kwargs = kwargs or {}
    try:
        rule = _RULE_OF[op]
    except KeyError:
        rule = _RULE_OF[op] = rule_for(op)
    if rule is None:
        return answer_by_torch(op, args, kwargs, None)
    try:
        return rule(*args, **kwargs)
    except (DataDependent, UnsupportedFake, Untried):
        raise
    except Exception as problem:  # RuleError, or arguments the rule never expected: torch knows
        return answer_by_torch(op, args, kwargs, str(problem))


def rule_for(op: Any) -> Rule | None:
    """The rule of this overload, of its packet, or of its functional form (for in-place and out variants)."""
    namespace, packet, overload = str(op).split(".")
    found = META_RULES.get(f"{namespace}.{packet}.{overload}") or META_RULES.get(f"{namespace}.{packet}")
    if found is not None:
        return found
    if packet.endswith("_") and not packet.endswith("__"):
        base = f"{namespace}.{packet[:-1]}"
        return META_RULES.get(f"{base}.{overload}") or META_RULES.get(base)
    if overload == "out" or overload.endswith("_out"):
        return _rule_of_functional(op, namespace, packet)
    return None


def _rule_of_functional(op: Any, namespace: str, packet_name: str) -> Rule | None:
    def inputs(overload: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]

    wanted = inputs(op)
    packet = getattr(getattr(torch.ops, namespace), packet_name)
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if candidate is not op and not any(a.is_out for a in candidate._schema.arguments) and inputs(candidate) == wanted:
            return META_RULES.get(str(candidate))
    return None
