"""What an ATen overload does to its arguments, and its functional counterpart. Worked out once per overload from the schema."""

from __future__ import annotations

from typing import Any

import torch

from magneto.aot_autograd.extension import written_apart
from magneto.aot_autograd.refusal import Refusal
from magneto.base.dataclass import dataclass

aten = torch.ops.aten
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

PURE, VIEW, WRITE, METADATA, COMPOSITE, REFUSED = "pure", "view", "write", "metadata", "composite", "refused"

# Aliasing in fact, though the schema does not say so.
UNDECLARED_VIEWS = frozenset({"aten._unsafe_view.default", "aten.unsafe_split.Tensor", "aten.unsafe_split_with_sizes.default"})

# Tags of operations for which tracing cannot stand in: the result, or its shape, needs numbers.
NEEDS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

# Operations of that kind without the tag, and those that make memory what it was not.
REFUSED_NAMES = frozenset(
    {"aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default", "aten.resize_.default", "aten.resize_as_.default"}
)

# Not refused though tagged: the shape is known unless an index is a mask, which the mode looks at itself, or no output size is given (its rule).
BY_ARGUMENTS = frozenset(
    {"aten.index.Tensor", "aten._unsafe_index.Tensor", "aten.index_put.default", "aten.index_put_.default", "aten.repeat_interleave.Tensor"}
)

# Fresh memory without defined contents: two of them must stay two.
UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})


@dataclass(frozen=True, slots=True)
class Facts:
    """One overload. `writes`: positions or keyword names of written arguments. `functional`: what computes the written values:
    its results are the overload's own fresh results, then one new value for each written argument. `defaults`: values of all positional
    parameters that the functional form asks for and this overload does not.
    `factory`: it fills what `out=` names, and the functional form asks for its dtype and device."""

    name: str
    packet: str
    kind: str
    random: bool
    writes: tuple[int | str, ...] = ()
    fresh_results: int = 0
    functional: Any = None
    out_variant: bool = False
    factory: bool = False
    defaults: tuple[Any, ...] = ()

    @property
    def shareable(self) -> bool:
        """Whether two calls with equal arguments may be computed once."""
        return not self.random and self.packet not in UNINITIALISED


_facts: dict[Any, Facts] = {}


def facts_of(op: Any) -> Facts:
    found = _facts.get(op)
    if found is None:
        found = _facts[op] = _build(op)
    return found


def _build(op: Any) -> Facts:
    schema = op._schema
    name = str(op)
    packet = name.split(".")[1]
    if name in REFUSED_NAMES or (any(tag in op.tags for tag in NEEDS_VALUES) and name not in BY_ARGUMENTS):
        return Facts(name, packet, REFUSED, False)
    random = torch.Tag.nondeterministic_seeded in op.tags
    arguments = schema.arguments
    writes = tuple(a.name if a.kwarg_only else i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    if torch.Tag.inplace_view in op.tags:
        return Facts(name, packet, METADATA, random, writes, functional=_functional_of(op, packet))
    if writes:
        fresh = sum(1 for r in schema.returns if r.alias_info is None)
        out_variant = any(a.is_out for a in arguments)
        functional = _functional_of(op, packet) or written_apart(op, writes, fresh)
        factory = functional is None and out_variant and packet not in UNINITIALISED and _takes_no_tensor(op)
        if factory:
            functional = _functional_of(op, packet, _OPTIONS)
        return Facts(name, packet, WRITE, random, writes, fresh, functional, out_variant, factory, _missing_defaults(op, functional))
    # Before views: where autograd is switched off, `to`, `reshape` and their like arrive here as they are, and may copy.
    if has_kernel(op.name(), "CompositeImplicitAutograd") and not has_kernel(op.name(), "CPU"):  # eager takes silu_backward's own kernel
        return Facts(name, packet, COMPOSITE, random)
    if name in UNDECLARED_VIEWS or any(r.alias_info is not None for r in schema.returns):
        return Facts(name, packet, VIEW, random)
    return Facts(name, packet, PURE, random)


def _functional_of(op: Any, packet_name: str, but: frozenset[str] = frozenset()) -> Any:
    """The overload with the same inputs (`but` those) that writes nothing, or None. `op` may be in-place, an out variant, or both."""
    namespace = getattr(torch.ops, op.namespace)
    base = packet_name.removesuffix("_") if not packet_name.endswith("__") else "__" + packet_name.strip("_").removeprefix("i") + "__"
    wanted = _inputs(op)
    for candidate_name in (base, packet_name, base + "_functional"):
        candidates = getattr(namespace, candidate_name, None)
        if candidates is None:
            continue
        overloads = [getattr(candidates, o) for o in candidates.overloads()]
        for candidate in overloads:
            if _writes_nothing(candidate) and _inputs(candidate, but) == wanted:
                return candidate
    return None


def _missing_defaults(op: Any, functional: Any) -> tuple[Any, ...]:
    """Defaults of `op` by position, up to the last one that `functional` requires; empty when it requires none of them."""
    if functional is None:
        return ()
    ours = [a for a in op._schema.arguments if not a.kwarg_only]
    theirs = [a for a in functional._schema.arguments if not a.kwarg_only]
    required = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a.has_default_value() and not b.has_default_value()]
    return tuple(a.default_value if a.has_default_value() else None for a in ours[: required[-1] + 1]) if required else ()


def _inputs(op: Any, but: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out and a.name not in but]


_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


def _takes_no_tensor(op: Any) -> bool:
    return not any("Tensor" in kind for _, kind in _inputs(op))


def _writes_nothing(op: Any) -> bool:
    return not any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)


def functional_of(op: Any, facts: Facts) -> Any:
    if facts.functional is None:
        raise Refusal(f"{facts.name} has no form that leaves its arguments alone")
    return facts.functional
