"""Plans of a graph for further sizes, which follow from what it is compiled to at some (inductor/family.py), and the evidence that they are those of the graph.

At some sizes the graph goes through the compiler as data: nothing is built for them. What the compiler makes of it is a family, and so is what the graph's nodes are: shapes, strides, offsets and numbers are
expressions of the sizes, true of all samples. At a size of the family's domain at which none of these numbers coincide the family answers; at
others what the nodes are is computed by torch's rules and compared with these expressions, and it answers where all are true.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import fx

from magneto import _C
from magneto.aot_autograd.call import as_function, under_autocast, without_autocast, without_grad
from magneto.aot_autograd.joint import Identity
from magneto.aot_autograd.mode import hollow
from magneto.aot_autograd.partition import Partition
from magneto.aot_autograd.refusal import OtherGraph, Refusal
from magneto.aot_autograd.signature import Signature
from magneto.aot_autograd.training import BACKWARDS, Choice, Ends, TrainingPlan, reach, training_function
from magneto.aot_autograd.wrap import wrap
from magneto.base.collection import no_collection
from magneto.base.dataclass import dataclass, replace
from magneto.base.errors import MagnetoError
from magneto.base.events import counter, emit, timer
from magneto.base.flags import config
from magneto.base.heard import taken
from magneto.base.logs import LOOPS, log
from magneto.base.varying import Choices, sampling, varying
from magneto.graph.meta import TensorMeta
from magneto.graph.specialise import specialised

if TYPE_CHECKING:
    from magneto.inductor.family import Family
    from magneto.inductor.runtime.kept import Finished

Compiled = Callable[..., Any]
Key = tuple[int, ...]
Values = Mapping[fx.Node, Any]
T = TypeVar("T")

MOST = 12  # families of one graph
ATTEMPTS = (False, True), (False, False), (True, False)  # in a smaller domain? with few samples?
REFUSALS = 2  # attempts that end without a family, until there are no more


@dataclass(frozen=True, slots=True)
class Rest:
    """What is made of a graph at some sizes, besides its plan. `doubted`: calls may find NaN where the plan relies on there being none (inductor/runtime/invalid.py). `training`: of the forward of a training."""

    signature: Signature
    constants: tuple[torch.Tensor, ...]
    autocast: tuple[str, ...]
    doubted: bool
    training: TrainingPlan | None = None


class Cut(Protocol):
    """Where the graph of a training is cut."""

    @property
    def cut(self) -> Partition: ...

    def backward(self, choice: Choice, name: str) -> tuple[Finished, Ends]:
        """A sample of the backward for one choice of gradients."""

    def alone(self, graph: fx.Graph, name: str) -> Compiled:
        """A backward compiled for its sizes."""


class Sampler(Protocol):
    """The compiler, as data."""

    def sample(self, gm: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Any]) -> tuple[Finished, Rest, Cut | None]:
        """What it makes of a graph for inputs that may be hollow. `given`: inputs like them of a call. Raises whatever speaks against it."""

    def cut(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Cut:
        """The last part of a sample alone."""

    def exactly(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """The functional graph compiled without doubts."""


class Families:
    """Of one graph on the CPU. `allows`: whether there is time to compile for single sizes."""

    def __init__(self, gm: fx.GraphModule, name: str, sampler: Sampler, eager: Compiled, allows: Callable[[], bool]) -> None:
        self.gm, self.name, self.sampler, self.eager, self.allows = gm, name, sampler, eager, allows
        self.resizer: Any = gm.meta["magneto"]["resizer"]
        self.values: Callable[[Key], Values | None] = self.resizer.at
        self.varies = {index for index, *_ in gm.meta["magneto"]["varying"]}
        self.made: list[tuple[Family, Evidence, Backwards | None]] = []
        self.refused = 0

    def may_grow(self, key: Key) -> bool:
        """May there be one more, for sizes that none takes?"""
        return self.refused < REFUSALS and len(self.made) < MOST and not any(family.holds(key) for family, *_ in self.made)

    def at(self, key: Key, inputs: Sequence[Any]) -> Compiled | None:
        """The callable for these sizes."""
        for family, evidence, backwards in self.made:
            if not family.holds(key):
                continue
            if config.verify or not self.resizer.trusts(key):
                values = self.values(key)
                if values is None or not evidence.holds(key, values) or not (backwards is None or backwards.agree(key, inputs)):
                    counter("sizes_of_no_family")
                    return None
            found = family.at(key, self.name)
            if found is None:
                return None
            counter("sizes_of_families")
            plan, rest = found
            return self._callable(plan, rest, key, inputs, backwards)
        return None

    def _callable(self, plan: Compiled, rest: Rest, key: Key, inputs: Sequence[Any], backwards: Backwards | None) -> Compiled:
        if rest.doubted:
            from magneto.inductor.runtime.invalid import answering

            plan = answering(plan, lambda: self.sampler.exactly(*self.example(key, inputs)[1:]))
        plan = without_autocast(plan, rest.autocast)
        if rest.training is not None and backwards is not None:
            plan = training_function(backwards.joined(rest, plan, key, inputs))
        return wrap(plan, rest.signature, rest.constants, self.eager, self.name)

    def example(self, key: Key, inputs: Sequence[Any]) -> tuple[Values, fx.GraphModule, list[Any]]:
        """What the nodes are at some sizes, the graph for them, and inputs; those that vary are hollow."""
        values = self.values(key)
        if values is None:
            raise LookupError(f"the graph is another one at the sizes {key}")
        metas = [values[node] for node in self.gm.graph.nodes if node.op == "placeholder"]
        return (
            values,
            specialised(self.gm, values),
            [
                _hollow(meta.with_(is_leaf=x.is_leaf)) if k in self.varies else x
                for k, (meta, x) in enumerate(zip(metas, inputs, strict=True))
            ],
        )

    def narrow(self, of: Backwards, to: Family | None) -> None:
        """What flows back has a smaller domain: other sizes may have another family. Or it has none: then neither has the forward."""
        if to is None:
            self.refused += 1
            self.made = [one for one in self.made if one[2] is not of]
            return
        for place, (family, evidence, backwards) in enumerate(self.made):
            if backwards is of:
                both = zip(family.domain, to.domain, strict=True)
                domain = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in both)
                self.made[place] = replace(family, domain=domain), evidence, backwards

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
        family, evidence, _ = found
        self.resizer.trust(lambda sizes: evidence.trusted(sizes) if family.holds(sizes) else None)
        emit("artifact", artifact="family", graph=self.name, domain=family.domain)
        return True

    def _unified(self, key: Key, inputs: Sequence[Any]) -> tuple[Family, Evidence, Backwards | None] | str:
        from magneto.inductor.family import Family, probes

        samples: list[Any] = []
        nodes: dict[Key, Values] = {}
        lengths: dict[Key, int] = {}
        cuts: dict[Key, Cut] = {}
        choices: Choices | None = None
        reason = ""
        attempts: list[tuple[bool, bool, Key]] = [
            (*one, ()) for one in ATTEMPTS[: 3 if len(key) < 3 else 2]
        ]  # with many sizes samples and attempts are many
        while attempts:
            narrow, few, by = attempts.pop(0)
            wanted = probes(key, narrow, few, by)
            for sizes in sorted(wanted, key=lambda sizes: (sizes != key, sum(sizes))):
                if sizes in nodes:
                    continue
                try:
                    values, gm, example = self.example(sizes, inputs)
                    with sampling(choices) as made:
                        *sample, cut = self.sampler.sample(gm, example, inputs)
                except Exception as error:
                    if sizes == key:
                        return error.reason if isinstance(error, MagnetoError) else f"{type(error).__name__}: {error}"
                    if isinstance(error, OtherGraph):
                        lengths[key], lengths[sizes] = error.lengths
                        if _unrolled(lengths):
                            break
                    continue
                choices = choices or made
                nodes[sizes] = values
                if cut is not None:
                    cuts[sizes] = cut
                samples.append((sizes, *sample))
                lengths[sizes] = len(samples[-1][1].code.instructions)
                if _unrolled(lengths):
                    break
            if _unrolled(lengths):
                self.refused = REFUSALS
                return "the graph repeats something as often as a size says"
            found: Family | str
            if few and not nodes.keys() >= set(wanted):
                found = reason or "the graph is another one at other sizes"
            else:
                found = Family.of(samples, few, by)
            if isinstance(found, str):
                reason = found
                if not by and max(divisors := _divisors(key, samples, wanted)) > 1:
                    attempts = [(*one, divisors) for one in ATTEMPTS[:2]]
                continue
            try:
                evidence = Evidence(self.gm, {sizes: values for sizes, values in nodes.items() if found.holds(sizes)}, by)
            except Refusal as refusal:
                reason = refusal.reason
                continue
            inside = {sizes: cut for sizes, cut in cuts.items() if found.holds(sizes)}
            rest = [sizes for sizes in probes(key, narrow, by=by) if few and sizes not in nodes]
            return found, evidence, Backwards(self, inside, rest, choices, inputs, samples[0][2].autocast, by) if cuts else None
        return reason


class Backwards:
    """Of a family of forwards: for each choice of gradients a family of backwards from the same samples, where there is one. `rest`: sizes for more samples, if need be; `choices`: of the forward's first one."""

    def __init__(
        self, owner: Families, cuts: dict[Key, Cut], rest: list[Key], choices: Choices | None, inputs: Sequence[Any],
        autocast: tuple[str, ...], by: Key,
    ) -> None:  # fmt: skip
        self.owner, self.cuts, self.rest, self.choices, self.by = owner, cuts, rest, choices, by
        self.cut_at = under_autocast(self._cut_at, autocast)
        self.metas = list(map(_meta_of, inputs))  # not they themselves: that would be memory
        self.name = f"{owner.name}_backward"
        self.made: dict[Choice, Family | None] = {}
        self.lock = threading.RLock()

    def joined(self, rest: Rest, forward: Compiled, key: Key, inputs: Sequence[Any]) -> TrainingPlan:
        """The plan of a training for some sizes."""
        owner, first = self.owner, next(iter(self.cuts.values()))
        metas = [_meta_of(x) if k in owner.varies else meta for k, (meta, x) in enumerate(zip(self.metas, inputs, strict=True))]

        def cut() -> Cut:
            return self.cut_at(key, list(map(_stand_in, metas)))  # type: ignore[no-any-return]

        assert rest.training is not None
        plan = replace(
            rest.training,
            forward=forward,
            compile_backward=self._alone,
            cut=first.cut,
            captured=under_autocast(owner.eager, rest.autocast),
            holds=owner.gm.meta["magneto"].get("backward_holds"),
            family=lambda choice: self._at(key, choice),
            part=lambda choice: reach(_elsewhere(cut).cut, choice),
            backwards={},
            leftovers={},
        )
        plan.answers(owner.gm.meta["magneto"].get("asks_whole", False))
        plan.hide(rest.signature.direct)
        return plan

    def _cut_at(self, key: Key, inputs: Sequence[Any]) -> Cut:
        """Forward and backward for some sizes. Refusal where they are not those of the family."""
        with timer("backend"), no_collection(), taken([]), sampling(self.choices), torch.enable_grad():
            return self.owner.sampler.cut(*self.owner.example(key, inputs)[1:])

    def agree(self, key: Key, inputs: Sequence[Any]) -> bool:
        """Whether they are: asked where numbers coincide."""
        try:
            self.cut_at(key, inputs)
        except Exception:
            return False
        return True

    def _at(self, key: Key, choice: Choice) -> tuple[Compiled, Ends] | None:
        """The backward for some sizes, of a family."""
        with self.lock:
            if choice not in self.made:
                with timer("compile"), timer("backend"), no_collection(), varying(True), taken([]):
                    family = self.made[choice] = self._unified(choice) if len(self.made) < BACKWARDS else None
                if family is not None or not any(self.made.values()):
                    self.owner.narrow(self, family)
            family = self.made[choice]
        return None if family is None else family.at(key, self.name)

    def _unified(self, choice: Choice) -> Family | None:
        found = self._family(choice)
        if isinstance(found, str) and self.rest:
            while self.rest:
                sizes = self.rest.pop()
                with suppress(Exception):
                    self.cuts[sizes] = _elsewhere(partial(self.cut_at, sizes, list(map(_stand_in, self.metas))))
            found = self._family(choice)
        if isinstance(found, str):
            counter("families_refused")
            emit("artifact", artifact="family", graph=self.name, refused=found)
            return None
        emit("artifact", artifact="family", graph=self.name, domain=found.domain)
        return found

    def _family(self, choice: Choice) -> Family | str:
        from magneto.inductor.family import Family

        samples: list[Any] = []
        choices: Choices | None = None
        for sizes, cut in self.cuts.items():
            try:
                with sampling(choices) as made:
                    samples.append((sizes, *cut.backward(choice, self.name)))
                choices = choices or made
            except Exception as error:
                if choices is None:
                    return f"{type(error).__name__}: {error}"
        return Family.of(samples, bool(self.rest), self.by)

    def _alone(self, graph: fx.Graph) -> Compiled:
        """A backward of no family."""
        if not self.owner.allows():
            counter("sizes_in_eager")
            return without_grad(as_function(graph, self.name))
        counter("sizes_compiled")
        with timer("compile"), timer("backend"), no_collection(), varying(True), taken([]):
            return next(iter(self.cuts.values())).alone(graph, self.name)


def _unrolled(lengths: Mapping[Key, int]) -> bool:
    """Do graphs grow evenly with a size, and by much? That is a loop over time, of which a few short samples tell enough."""
    if len(lengths) < 3 or max(lengths.values()) < 2 * min(lengths.values()):
        return False
    for column in zip(*lengths, strict=True):
        points = sorted(zip(column, lengths.values(), strict=True))
        if len(set(column)) == len(points):
            slopes = [(more - fewer) / (large - small) for (small, fewer), (large, more) in itertools.pairwise(points)]
            if 1 <= min(slopes) and max(slopes) <= 2 * min(slopes):
                return True
    return False


def _divisors(key: Key, samples: Sequence[Any], wanted: Sequence[Key]) -> Key:
    """Where there is no family of all sizes, there may be one of those that leave the same as these, divided by these numbers: where the graph is the same at no others."""
    from magneto.inductor.family import differ

    if len(samples) == 1:
        return tuple(min(n & -n, 8) for n in key)
    fits = [sample[0] for sample in samples if not differ(samples[0], sample)]
    same = [sample[0] for sample in samples if not any((n - m) % 2 for n, m in zip(sample[0], key, strict=True))]
    if len(fits) == 1 and len(same) > 2:  # (with several sizes there may have been none but these and an end)
        return (1,) * len(key)
    columns = zip(zip(*fits, strict=True), zip(*wanted, strict=True), strict=True)
    return tuple(2 if len({n % 2 for n in fit}) == 1 < len({n % 2 for n in every}) else 1 for fit, every in columns)


def _elsewhere(fn: Callable[[], T]) -> T:
    """`fn()` in a thread of its own: what is traced inside of a backward would be taken for a part of it."""
    run = partial(copy_context().run, fn)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: _C.call_inactive(run)).result()


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

    def __init__(self, gm: fx.GraphModule, samples: Mapping[Key, Values], by: Key = ()) -> None:
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
        fit = Fit(list(samples), by)
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


def _meta_of(x: Any) -> Any:
    return TensorMeta.of(x) if isinstance(x, torch.Tensor) else x


def _stand_in(x: Any) -> Any:
    return _hollow(x) if isinstance(x, TensorMeta) else x


def _hollow(meta: TensorMeta) -> torch.Tensor:
    made = hollow(meta)
    if not meta.requires_grad:
        return made
    with torch.enable_grad():
        return made.requires_grad_() if meta.is_leaf else Identity.apply(hollow(meta).requires_grad_(), [made])  # type: ignore[no-any-return, no-untyped-call]
