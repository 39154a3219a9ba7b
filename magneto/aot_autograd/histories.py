"""Results of which autograd must not go from one into the history of another.

A backward of a node goes on into all that the node's inputs were computed by, with no gradients where none flow: it runs backward functions of the program's, frees what they have saved, and raises
where that has been freed or written. Where results of a graph come from inputs with different histories, each such group of results has a node of its own, as eager's have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from magneto.aot_autograd.reached import left_over
from magneto.aot_autograd.signature import Signature
from magneto.base.dataclass import dataclass

if TYPE_CHECKING:
    from magneto.aot_autograd.training import TrainingPlan


@dataclass(frozen=True, slots=True)
class Group:
    """The results numbered `results`; the tangents `others` are those of other groups, whose inputs with histories are `hidden`. `kept`: places among the values kept that the group's backward reads,
    `foreign` those results of other groups that are among these."""

    results: tuple[int, ...]
    others: frozenset[int]
    hidden: tuple[int, ...]
    kept: frozenset[int]
    foreign: tuple[int, ...]


@dataclass(slots=True)
class Share:
    """What one group's node is made of: the values that one run of the compiled forward has made for all groups, and what it has noted (`state`)."""

    plan: TrainingPlan
    group: Group
    out: tuple[Any, ...]
    state: dict[str, Any]

    def values(self) -> tuple[Any, ...]:
        """The values made; other groups' results without their history."""
        out = list(self.out)
        for i in self.group.foreign:
            out[i] = out[i].detach()
        return tuple(out)

    def shown(self, results: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([value if i in self.group.results else None for i, value in enumerate(results)])

    def needed(self, found: Iterable[Any], places: Iterable[int]) -> tuple[Any, ...]:
        """Of the values found at these places among those kept."""
        return tuple([value if place in self.group.kept else None for place, value in zip(places, found, strict=True)])


def linked_results(signature: Signature) -> tuple[frozenset[int], ...]:
    """Results behind which one link lies: it leads to one node."""
    return tuple(frozenset(link.results) for link in signature.links)


def groups_of(plan: TrainingPlan, histories: Sequence[int]) -> list[Group]:
    """The groups for a call whose inputs `histories` were computed by autograd: those results are together that come from the same of them, that share a formula which reads what has been kept
    (eager refuses to go through that twice), or are linked."""
    numbers = {index: k for k, index in enumerate(plan.differentiable)}
    ties = shared_formulas(plan.cut.backward, len(plan.cut.kept))
    ties += [frozenset(numbers[i] for i in linked if i in numbers) for linked in plan.linked]
    sets = [frozenset((k,)) for k in numbers.values()]
    for tie in ties:
        sets = [one for one in sets if not one & tie] + [frozenset[int]().union(*(one for one in sets if one & tie))]
    together: dict[tuple[int, ...], frozenset[int]] = {}
    for one in filter(None, sets):
        come_from = tuple(i for i in histories if plan.cut.origins[i] & one)
        together[come_from] = together.get(come_from, frozenset()) | one
    return [_group(plan, one, histories) for one in sorted(together.values(), key=min)] if len(together) > 1 else []


def _group(plan: TrainingPlan, own: frozenset[int], histories: Sequence[int]) -> Group:
    others = frozenset(range(len(plan.differentiable))) - own
    needed = set(plan.reach((others, frozenset())).kept)
    for k in own:
        needed.update(left_over(plan.cut.backward, len(plan.cut.kept), frozenset(), k) or ())
    kept = frozenset(needed)
    foreign = {one.index for place, one in enumerate(plan.cut.kept) if one.kind == "result" and place in kept}
    foreign &= {plan.differentiable[k] for k in others}
    hidden = tuple(i for i in histories if not plan.cut.origins[i] & own)
    return Group(tuple(plan.differentiable[k] for k in sorted(own)), others, hidden, kept, tuple(sorted(foreign)))


def shared_formulas(backward: fx.Graph, n_kept: int) -> list[frozenset[int]]:
    """The tangents that go through one formula which reads a value kept."""
    places = [node for node in backward.nodes if node.op == "placeholder"]
    tangents = {node: frozenset((k,)) for k, node in enumerate(places[n_kept:])}
    reads, found = set(places[:n_kept]), set()
    for node in backward.nodes:
        if node.op != "call_function":
            continue
        sources = node.all_input_nodes
        through = frozenset[int]().union(*(tangents.get(source, ()) for source in sources))
        if through:
            tangents[node] = through
        if not reads.isdisjoint(sources):
            if not through:
                reads.add(node)
            elif len(through) > 1:
                found.add(through)
    return list(found)
