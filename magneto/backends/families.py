"""Plans of a graph for further sizes, which follow from what it is compiled to at some (inductor/family.py), and the evidence that they are those of the graph.

At some sizes the graph goes through the compiler as data: nothing is built for them. What the compiler makes of it is a family, and so is what the graph's nodes are: shapes, strides, offsets and numbers are
expressions of the sizes, true of all samples. At a size of the family's domain at which none of these numbers coincide the family answers; at
others what the nodes are is computed by torch's rules and compared with these expressions, and it answers where all are true.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx

from magneto.aot_autograd.call import without_autocast
from magneto.aot_autograd.mode import hollow
from magneto.aot_autograd.refusal import Refusal
from magneto.aot_autograd.signature import Signature
from magneto.aot_autograd.wrap import wrap
from magneto.base.errors import MagnetoError
from magneto.base.events import counter, emit, timer
from magneto.base.flags import config
from magneto.base.heard import taken
from magneto.base.logs import LOOPS, log
from magneto.graph.meta import TensorMeta
from magneto.graph.specialise import specialised

if TYPE_CHECKING:
    from magneto.inductor.family import Family
    from magneto.inductor.runtime.kept import Finished

Compiled = Callable[..., Any]
Key = tuple[int, ...]
Values = Mapping[fx.Node, Any]

MOST = 12  # families of one graph
REFUSALS = 2  # attempts that end without a family, until there are no more


@dataclass(frozen=True, slots=True)
class Rest:
    """What is made of a graph at some sizes, besides its plan. `doubted`: calls may find NaN where the plan relies on there being none (inductor/runtime/invalid.py)."""

    signature: Signature
    constants: tuple[torch.Tensor, ...]
    autocast: tuple[str, ...]
    doubted: bool


class Sampler(Protocol):
    """The compiler, as data."""

    def sample(self, gm: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Any]) -> tuple[Finished, Rest]:
        """What it makes of a graph for inputs that may be hollow. `given`: inputs like them of a call. Raises whatever speaks against it."""

    def exactly(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """The functional graph compiled without doubts."""


class Families:
    """Of one graph, of an inference on the CPU."""

    def __init__(self, gm: fx.GraphModule, name: str, sampler: Sampler, eager: Compiled) -> None:
        self.gm, self.name, self.sampler, self.eager = gm, name, sampler, eager
        self.resizer: Any = gm.meta["magneto"]["resizer"]
        self.values: Callable[[Key], Values | None] = self.resizer.at
        self.varies = {index for index, _, _ in gm.meta["magneto"]["varying"]}
        self.made: list[tuple[Family, Evidence]] = []
        self.refused = 0

    def may_grow(self, key: Key) -> bool:
        """May there be one more, for sizes that none takes?"""
        return self.refused < REFUSALS and len(self.made) < MOST and not any(family.holds(key) for family, _ in self.made)

    def at(self, key: Key, inputs: Sequence[Any]) -> Compiled | None:
        """The callable for these sizes."""
        for family, evidence in self.made:
            if not family.holds(key):
                continue
            if config.verify or not self.resizer.trusts(key):
                values = self.values(key)
                if values is None or not evidence.holds(key, values):
                    counter("sizes_of_no_family")
                    return None
            found = family.at(key, self.name)
            if found is None:
                return None
            counter("sizes_of_families")
            plan, rest = found
            return self._callable(plan, rest, key, inputs)
        return None

    def _callable(self, plan: Compiled, rest: Rest, key: Key, inputs: Sequence[Any]) -> Compiled:
        if rest.doubted:
            from magneto.inductor.runtime.invalid import answering

            plan = answering(plan, lambda: self.sampler.exactly(*self._example(key, inputs)[1:]))
        return wrap(without_autocast(plan, rest.autocast), rest.signature, rest.constants, self.eager, self.name)

    def _example(self, key: Key, inputs: Sequence[Any]) -> tuple[Values, fx.GraphModule, list[Any]]:
        """What the nodes are at some sizes, the graph for them, and inputs; those that vary are hollow."""
        values = self.values(key)
        if values is None:
            raise LookupError(f"the graph is another one at the sizes {key}")
        metas = [values[node] for node in self.gm.graph.nodes if node.op == "placeholder"]
        return (
            values,
            specialised(self.gm, values),
            [_hollow(meta) if k in self.varies else x for k, (meta, x) in enumerate(zip(metas, inputs, strict=True))],
        )

    def add(self, key: Key, inputs: Sequence[Any]) -> bool:
        """Make the family round these sizes, if there is one."""
        with timer("backend"), taken([]):
            found = self._unified(key, inputs)
        if isinstance(found, str):
            self.refused += 1
            counter("families_refused")
            emit("artifact", artifact="family", graph=self.name, refused=found)
            log(LOOPS, lambda: f"{self.name} has no family at {key}: {found}")
            return False
        self.made.append(found)
        family, evidence = found
        self.resizer.trust(lambda sizes: evidence.trusted(sizes) if family.holds(sizes) else None)
        emit("artifact", artifact="family", graph=self.name, domain=found[0].domain)
        return True

    def _unified(self, key: Key, inputs: Sequence[Any]) -> tuple[Family, Evidence] | str:
        from magneto.base.varying import sampling
        from magneto.inductor.family import Family, probes

        samples: list[Any] = []
        nodes: dict[Key, Values] = {}
        found: Family | str = ""
        for narrow in (False, True)[: 2 if len(key) < 3 else 1]:  # with many sizes samples and attempts are many
            for sizes in probes(key, narrow):
                if sizes in nodes:
                    continue
                try:
                    values, gm, example = self._example(sizes, inputs)
                    with sampling():
                        sample = self.sampler.sample(gm, example, inputs)
                except Exception as error:
                    if sizes == key:
                        return error.reason if isinstance(error, MagnetoError) else f"{type(error).__name__}: {error}"
                    continue
                nodes[sizes] = values
                samples.append((sizes, *sample))
            found = Family.of(samples)
            if not isinstance(found, str):
                break
        if isinstance(found, str):
            return found
        try:
            return found, Evidence(self.gm, {sizes: values for sizes, values in nodes.items() if found.holds(sizes)})
        except Refusal as refusal:
            return refusal.reason


def facts_of(nodes: Sequence[fx.Node], values: Values) -> list[Any]:
    """All numbers that describe what the nodes are."""
    found: list[Any] = []
    for node in nodes:
        _add_numbers(values[node], found)
    return found


def _add_numbers(value: Any, found: list[Any]) -> None:
    if isinstance(value, TensorMeta):
        found += value.shape
        found += value.strides
        found.append(value.storage_offset)
    elif isinstance(value, (int, float)):
        found.append(value)
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _add_numbers(item, found)


def _kinds(value: Any) -> list[str]:
    """Of these numbers."""
    if isinstance(value, TensorMeta):
        return ["size"] * value.ndim + ["layout"] * (value.ndim + 1)
    if isinstance(value, (tuple, list, dict)):
        return [kind for item in (value.values() if isinstance(value, dict) else value) for kind in _kinds(item)]
    return ["number"] * isinstance(value, (int, float))


class Evidence:
    """What samples say of all sizes: the numbers that describe what the graph's nodes are, as expressions of the sizes. `samples`: what the nodes are there. Refusal where a number that matters is none."""

    def __init__(self, gm: fx.GraphModule, samples: Mapping[Key, Values]) -> None:
        from magneto.inductor.fit import Fit

        first, graph = next(iter(samples.values())), set(gm.graph.nodes)
        # with numbers that the program has decided by and nothing else reads: the graph has lost them
        self.nodes = [node for node in first if node.op != "output" and (node in graph or isinstance(first[node], (int, float)))]
        owners = [(node, kind) for node in self.nodes for kind in _kinds(first[node])]
        facts = [facts_of(self.nodes, values) for values in samples.values()]
        self.many = len(owners)
        if any(
            [kind for node in self.nodes for kind in _kinds(values[node])] != [kind for _, kind in owners] for values in samples.values()
        ):
            raise Refusal("what the graph computes depends on sizes")
        fit = Fit(list(samples))
        numbers = {node for node, kind in owners if kind == "number"}
        known: dict[tuple[Any, ...], int | None] = {}
        texts: list[str] = []
        places, which, plural = (
            [],
            [],
            set(),
        )  # of the numbers that are expressions, of their expressions, and of those for sizes that are no less than 2
        for place, ((node, kind), *column) in enumerate(zip(owners, *facts, strict=True)):
            key = (*map(type, column), *column)
            if key not in known:
                text = _expression(fit, tuple(column))
                known[key] = None if text is None else len(texts)
                texts += [] if text is None else [text]
            found = known[key]
            if found is None and (kind != "number" or any(user.op != "output" and user not in numbers for user in node.users)):
                raise Refusal(f"{node.name} is {column} at {list(samples)}: no expression")
            if found is not None:
                places.append(place)
                which.append(found)
                plural |= {found} if kind == "size" and min(column) > 1 else set()
        names = ", ".join(f"n{k}" for k in range(len(fit.samples[0])))
        self._expected = eval(f"lambda {names}: ({''.join(text + ', ' for text in texts)})", {"sqrt": math.sqrt})
        self._numbers = [
            (node, known[(*map(type, column), *column)]) for (node, kind), *column in zip(owners, *facts, strict=True) if kind == "number"
        ]
        self._distinct = max(len(set(self._expected(*sizes))) for sizes in samples)
        self._read, self._wanted, self._plural = operator.itemgetter(*places), operator.itemgetter(*which), tuple(plural)

    def trusted(self, key: Key) -> dict[fx.Node, Any] | None:
        """The numbers of nodes at sizes of the domain at which nothing coincides: no size, stride or number is equal to one that is another expression. (At such sizes a slice may be all there is, a
        tensor contiguous that is not elsewhere.)"""
        expected = self._expected(*key)
        if len(set(expected)) != self._distinct or any(expected[k] < 2 for k in self._plural):
            return None
        return {node: expected[which] for node, which in self._numbers if which is not None}

    def holds(self, key: Key, values: Values) -> bool:
        """Are all of them true?"""
        found, expected = facts_of(self.nodes, values), self._expected(*key)
        return len(found) == self.many and bool(self._read(found) == self._wanted(expected)) and all(expected[k] > 1 for k in self._plural)


def _expression(fit: Any, column: tuple[Any, ...]) -> str | None:
    if all(type(value) is type(column[0]) and value == column[0] for value in column):
        return repr(column[0])
    if all(type(value) is int for value in column):
        found = fit.integer(column)
        return None if found is None else str(found.text)
    return fit.real(column, False) if all(type(value) is float for value in column) else None


def _hollow(meta: TensorMeta) -> torch.Tensor:
    made = hollow(meta)
    return made.requires_grad_() if meta.requires_grad else made
