"""A torch.autograd.Function round a compiled forward and a compiled backward graph.

Its inputs are the functional graph's inputs, its outputs the functional graph's results; views and write-backs happen outside of it, by ordinary differentiable operations
(`wrap.py`). Exactly eager's: which outputs require grad, which inputs get None, errors on tensors changed in place since.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from magneto import _C
from magneto.aot_autograd.arrivals import in_order
from magneto.aot_autograd.call import as_function, without_grad
from magneto.aot_autograd.handed import Handed, Scale, handed
from magneto.aot_autograd.histories import Group, Share, groups_of, linked_results
from magneto.aot_autograd.joint import JointGraph
from magneto.aot_autograd.partition import Gradient, Partition
from magneto.aot_autograd.reached import Reached, left_over, reached
from magneto.aot_autograd.refusal import Refusal
from magneto.aot_autograd.replay import Replay, replay_of
from magneto.aot_autograd.result_hooks import with_result_hooks
from magneto.aot_autograd.signature import Result
from magneto.aot_autograd.tangents import given_up, laid_out
from magneto.base.dataclass import dataclass, field
from magneto.base.errors import UserError
from magneto.base.flags import config
from magneto.graph.meta import TensorMeta

Compiled = Callable[..., Any]
Ends = tuple[tuple[int, ...], tuple[Gradient, ...]]  # numbers of the values kept that a backward graph takes, and what it gives
Choice = tuple[frozenset[int], frozenset[int]]  # which tangents are missing, which inputs' gradients nobody asks for

BACKWARDS = 8  # for so many choices of results with gradients a backward is compiled; further ones are called operation by operation
_saved_hooks: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)
_executes: Callable[[Any], bool] = getattr(torch._C, "_will_engine_execute_node", lambda node: True)
_has_memory: Callable[[torch.Tensor], bool] = torch._C._has_storage
_NOTHING: frozenset[int] = frozenset()
_EVERYTHING: Choice = (_NOTHING, _NOTHING)
_WRITTEN = "one of the variables needed for gradient computation has been modified by an inplace operation"
_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


@dataclass(frozen=True, slots=True)
class Backward:
    """The compiled backward for one choice of results that have gradients. `run` takes its inputs out of a list: the values `kept`, then the `tangents`;
    `answer(found, tangents, given)` gives one gradient per input. `any_layout`: it takes the tangents as they come. `scaled`: (place among the values kept, result) of those that are multiplied by
    a result's gradient; those at `given` are gradients then, which `run` does not take."""

    run: Compiled
    kept: tuple[int, ...]
    tangents: tuple[tuple[int, TensorMeta], ...]
    passes_tangents: bool
    answer: Compiled
    any_layout: bool
    scaled: tuple[tuple[int, int], ...] = ()
    given: tuple[int, ...] = ()


@dataclass(slots=True)
class TrainingPlan:
    """What the autograd function needs to know. `compile_backward` compiles a backward graph when it is first needed; `backwards` are those that have been, by the
    tangents that are missing. `family`: has backwards for all sizes; there `part` gives a backward graph for these."""

    name: str
    forward: Compiled
    compile_backward: Callable[[fx.Graph], Compiled]
    n_results: int
    cut: Partition
    silent: tuple[int, ...]  # results that do not require grad
    differentiable: tuple[int, ...]
    tangent_metas: tuple[TensorMeta, ...]
    captured: Compiled
    replay: Replay | None
    n_captured: int  # inputs of the captured graph; constants follow
    unchecked: tuple[int, ...]  # tensors among the inputs of whose version autograd takes no note, as the backward does not read them
    holds: (
        Callable[[bool], bool] | None
    )  # whether what the program's own backward functions read, and are given (are all gradients there?), is what was traced
    cut_off: tuple[int, ...]  # inputs that require grad and to which nothing flows back
    frees: bool  # whether a second backward is refused
    flows: tuple[tuple[int, int], ...]  # (place among the tensors, input) of the inputs to which gradients flow
    order: tuple[int, ...]  # inputs that are leaves, in the order in which eager's gradients come
    watched: tuple[
        tuple[int, int], ...
    ]  # (place among the values kept, input) of the new numbers of written inputs that autograd's formulas read there
    backwards: dict[Choice, Backward] = field(default_factory=dict)
    shown: Compiled | None = None  # what autograd is given of the results, when some are inputs that the kernels have written
    views: tuple[int, ...] | None = None  # results that the forward makes as views of what nobody else sees, known after its first run
    family: Callable[[Choice], tuple[Compiled, Ends] | None] | None = None
    part: Callable[[Choice], Reached] | None = None
    scale: Scale | None = None  # what multiplies gradients that the forward has made; None: the backward graphs do
    leftovers: dict[frozenset[int], dict[int, tuple[int, ...]]] = field(default_factory=dict)
    linked: tuple[frozenset[int], ...] = ()  # results that are made from one another behind the node
    flags: dict[str, Any] = field(default_factory=config.patched)  # under which backwards are compiled
    written: bool = False  # whether any call was let go on although a tensor kept for another part was written
    keep: Compiled = field(init=False)
    keep_all: Compiled = field(init=False)
    joined: Compiled = field(init=False)
    checked: tuple[int, ...] = field(init=False)  # places among the values kept of those that somebody else may write

    def __post_init__(self) -> None:
        """The selections made in every call, as flat code: what autograd keeps of (inputs + outputs), without extras and with them, and what was kept of (what autograd has kept, extras)."""
        n = len(self.cut.gradients)
        places = {"input": 0, "result": n, "extra": n + self.n_results}
        kept = [f"v[{places[k.kind] + k.index}], " for k in self.cut.kept]
        self.checked = tuple(i for i, k in enumerate(self.cut.kept) if k.kind != "extra")
        self.keep = eval(f"lambda v: ({''.join(kept[i] for i in self.checked)})")
        self.keep_all = eval(f"lambda v: ({''.join(kept)})")
        found = (f"e[{k.index}], " if k.kind == "extra" else f"v[{self.checked.index(i)}], " for i, k in enumerate(self.cut.kept))
        self.joined = eval(f"lambda v, e: ({''.join(found)})")

    def hide(self, direct: frozenset[int]) -> None:
        """The results `direct` are inputs that the compiled forward has written itself; they are no outputs of the autograd function."""
        if direct:
            self.shown = eval(f"lambda v: ({''.join('None, ' if i in direct else f'v[{i}], ' for i in range(self.n_results))})")
            self.silent = tuple(i for i in self.silent if i not in direct)

    def answers(self, asks_whole: bool) -> None:
        """Refuses a custom backward that asks which gradients are missing, where the graph cannot run again to tell it."""
        if asks_whole and self.replay is None:
            raise Refusal("a custom backward is told which gradients are missing, and the graph cannot run a second time")

    def choice(self, ctx: Any, gradients: Sequence[Any]) -> Choice:
        missing = [k for k, index in enumerate(self.differentiable) if gradients[index] is None]
        unwanted = self.unwanted(ctx)
        return (frozenset(missing), frozenset(unwanted)) if missing or unwanted else _EVERYTHING

    def unwanted(self, ctx: Any) -> list[int]:
        """The inputs whose gradients this run of autograd's engine asks nobody for (`autograd.grad`, `backward(inputs=...)`)."""
        functions = ctx.next_functions
        try:
            if all(map(_executes, [found for place, _ in self.flows if (found := functions[place][0]) is not None])):  # the rule
                return []
        except RuntimeError:  # of a leaf whose gradient is asked for, and outside of a backward
            pass
        return [i for place, i in self.flows if functions[place][0] is not None and not _runs(functions[place][0])]

    def backward_for(self, choice: Choice) -> Backward:
        found = self.backwards.get(choice)
        if found is None:  # a frame hook may be active: our own code is not to be captured
            with config.patch(**self.flags):
                found = self.backwards[choice] = _C.call_inactive(functools.partial(self._built, choice))
        return found

    def batched(self, choice: Choice) -> Backward:
        """The backward for gradients that are many at once (vmap, `is_grads_batched`), which only PyTorch's operations take."""

        def called() -> Backward:
            with config.patch(**self.flags):
                part = self.reach(choice)
            return self._backward(choice, as_function(part.graph, self.name, any_layout=True, own=False), part.kept, part.gradients, True)

        return _C.call_inactive(called)  # type: ignore[no-any-return]

    def leftover(self, ctx: Any, missing: frozenset[int]) -> dict[int, tuple[int, ...]]:
        """By gradient that has not been there yet and may come in a backward of its own: the values kept that it will read."""
        rest = missing - getattr(ctx, "done", _NOTHING)
        if rest not in self.leftovers:
            first = frozenset(range(len(self.differentiable))) - rest
            places = {k: _C.call_inactive(functools.partial(left_over, self.cut.backward, len(self.cut.kept), first, k)) for k in rest}
            self.leftovers[rest] = {k: found for k, found in places.items() if found is not None}
        return self.leftovers[rest]

    def reach(self, choice: Choice) -> Reached:
        """The backward graph for one choice."""
        if self.part is not None:
            return self.part(choice)
        return reach(self.cut, choice)

    def _built(self, choice: Choice) -> Backward:
        found = None if self.family is None else self.family(choice)
        if found is not None:
            compiled, (kept, gradients) = found
            return self._backward(choice, compiled, kept, gradients)
        whole = Handed(self.reach(choice)) if self.scale is None else handed(self.reach(choice))
        part, few = whole.part, len(self.backwards) < BACKWARDS
        if not part.graph.output_node().args[0] and whole.given:
            compiled = _nothing
        else:
            compiled = self.compile_backward(part.graph) if few else without_grad(as_function(part.graph, self.name))
        return self._backward(choice, compiled, part.kept, part.gradients, scaled=whole.scaled, given=whole.given)

    def _backward(
        self, choice: Choice, compiled: Compiled, kept: tuple[int, ...], gradients: Sequence[Gradient], any_layout: bool = False,
        scaled: Sequence[tuple[int, int]] = (), given: tuple[int, ...] = (),
    ) -> Backward:  # fmt: skip
        there = [k for k in range(len(self.differentiable)) if k not in choice[0]]
        names = {"tangent": lambda k: f"t[{there.index(k)}]", "given": lambda k: f"g[{k}]"}
        answers = (None if g is None else names[g[0]](g[1]) if isinstance(g, tuple) else f"f[{g}]" for g in gradients)
        return Backward(
            getattr(compiled, "consume", None) or (lambda values: compiled(*values)), kept,
            tuple((self.differentiable[k], self.tangent_metas[k]) for k in there),
            any(isinstance(g, tuple) and g[0] == "tangent" for g in gradients),
            eval(f"lambda f, t, g: (None, {''.join(f'{g}, ' for g in answers)})"), any_layout or getattr(compiled, "any_layout", False),
            tuple((place, self.differentiable[there[k]]) for place, k in scaled), given,
        )  # fmt: skip


def reach(cut: Partition, choice: Choice) -> Reached:
    """The part of a backward graph that runs for one choice."""
    return reached(cut.backward, len(cut.kept), cut.gradients, cut.origins, *choice)


def plan_training(
    joint: JointGraph, cut: Partition, forward: Compiled, compile_backward: Callable[[fx.Graph], Compiled], captured: Compiled,
    replay: bool = True, holds: Callable[[bool], bool] | None = None, differentiable: Sequence[int] = (), scale: Scale | None = None,
) -> TrainingPlan:  # fmt: skip
    """`differentiable`: inputs that require grad. `captured` runs the captured graph in eager; `replay`: whether a run of `captured` during backward would be the
    same computation."""
    n = len(joint.results)
    kept = {k.index for k in cut.kept if k.kind == "input"}
    inputs = [node for node in joint.graph.nodes if node.op == "placeholder" and node.meta["stage"] == "forward"]
    cut_off = tuple(i for i in differentiable if cut.gradients[i] is None)
    again = replay_of(joint) if replay else None
    tensors = [i for i, node in enumerate(inputs) if isinstance(node.meta["val"], TensorMeta)]
    counted = (m for m in joint.signature.mutations if m.counted and m.index in joint.read_late)
    written = {m.source.index: m.index for m in counted if isinstance(m.source, Result)}
    return TrainingPlan(
        joint.name, forward, compile_backward, n, cut, tuple(i for i in range(n) if i not in joint.differentiable), joint.differentiable,
        tuple(joint.results[i].meta["val"] for i in joint.differentiable), captured, again, joint.signature.n_inputs,
        tuple(i for i in tensors if i not in kept and (again is None or i not in again.written)), holds, cut_off,
        joint.frees or bool(cut.kept), tuple((place, i) for place, i in enumerate(tensors) if cut.gradients[i] is not None), joint.order,
        tuple((place, written[k.index]) for place, k in enumerate(cut.kept) if k.kind == "result" and k.index in written), scale=scale,
        linked=linked_results(joint.signature),
    )  # fmt: skip


def training_function(plan: TrainingPlan) -> Compiled:
    """`(*inputs) -> results`, recorded by autograd."""
    if not plan.differentiable:
        return plan.forward
    # Past torch.autograd.Function.apply, whose Python part serves functorch only.
    apply = super(torch.autograd.Function, CompiledGraph).apply
    run: Compiled = functools.partial(apply, plan)
    if len(plan.order) > 1:
        run = in_order(run, plan.order)
    run = apart(plan, run, apply)
    if not plan.cut_off:
        return run

    # Without any gradient, as of `norm(x, 0)`, the result still requires grad, as in eager.
    alone = all(gradient is None for gradient in plan.cut.gradients)

    def cut_off(*inputs: Any) -> Any:
        passed = list(inputs)
        for index in plan.cut_off:  # the engine would go on into a history that eager's backward does not reach
            passed[index] = passed[index].detach().requires_grad_(alone)
        return run(*passed)

    return cut_off


def apart(plan: TrainingPlan, run: Compiled, apply: Callable[..., Any]) -> Compiled:
    """`run`, or a node for each group of results where their inputs' histories differ."""
    everything = frozenset(range(len(plan.differentiable)))
    flows = [i for _, i in plan.flows]
    if all(plan.cut.origins[i] == everything for i in flows):
        return run
    ordered = in_order(apply, [i + 1 for i in plan.order]) if len(plan.order) > 1 else apply
    known: dict[tuple[int, ...], list[Group]] = {}

    def parted(*inputs: Any) -> Any:
        histories = tuple([i for i in flows if not inputs[i].is_leaf])
        if not histories:
            return run(*inputs)
        if histories not in known:
            known[histories] = _C.call_inactive(functools.partial(groups_of, plan, histories))
        if not known[histories]:
            return run(*inputs)
        state = SimpleNamespace()
        with torch.no_grad():
            out = _computed(state, plan, inputs)
        results = list(out[: plan.n_results])
        for group in known[histories]:
            passed = [x.detach() if i in group.hidden else x for i, x in enumerate(inputs)]
            made = ordered(Share(plan, group, out, vars(state)), *passed)
            for i in group.results:
                results[i] = made[i]
        return tuple(results)

    return parted


def _computed(ctx: Any, plan: TrainingPlan, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the compiled forward makes. What another run of the graph needs is noted in `ctx`."""
    if plan.replay is not None and plan.replay.draws:
        ctx.random = torch.get_rng_state()
    if plan.replay is not None and plan.replay.before:
        ctx.before = {i: inputs[i].detach().clone() for i in plan.replay.before}
    if plan.watched:  # the wrapper writes them once
        ctx.watched = {place: (weakref.ref(inputs[i]), inputs[i]._version + 1) for place, i in plan.watched}
    out = tuple(plan.forward(*inputs))
    if plan.views is None:
        shown = out[: plan.n_results] if plan.shown is None else plan.shown(out)
        plan.views = tuple(i for i, value in enumerate(shown) if isinstance(value, torch.Tensor) and value._is_view())
    if plan.views:  # autograd forbids writing a view that a custom function returns; each result is in memory of its own
        out = tuple(value.data if i in plan.views else value for i, value in enumerate(out))
    return out


@with_result_hooks
class CompiledGraph(torch.autograd.Function):
    """First argument: the plan, or one group's share of it."""

    @staticmethod
    def forward(ctx: Any, plan: TrainingPlan | Share, *inputs: Any) -> Any:
        share: Share | None = None
        if isinstance(plan, Share):
            share, plan = plan, plan.plan
            out = share.values()
            vars(ctx).update(share.state, done=share.group.others, share=share.group)
        else:
            out = _computed(ctx, plan, inputs)
        if _saved_hooks(True) is None:  # what the graph makes for its backward is nobody's to write: autograd need not look after it
            ctx.to_save, ctx.extras = plan.keep(inputs + out), out[plan.n_results :]
        else:
            ctx.to_save, ctx.extras = plan.keep_all(inputs + out), None
        if share is not None:
            ctx.to_save = share.needed(ctx.to_save, range(len(plan.cut.kept)) if ctx.extras is None else plan.checked)
            needed = {k.index for place, k in enumerate(plan.cut.kept) if k.kind == "extra" and place in share.group.kept}
            ctx.extras = ctx.extras and tuple(value if i in needed else None for i, value in enumerate(ctx.extras))
        ctx.plan = plan
        ctx.again = None
        ctx.written = _NOTHING
        if plan.replay is not None:
            ctx.inputs, ctx.versions = inputs, _versions(inputs, plan.unchecked)
        results = out[: plan.n_results] if plan.shown is None else plan.shown(out)
        if share is not None:
            results = share.shown(results)
        elif plan.silent:
            ctx.mark_non_differentiable(*[results[i] for i in plan.silent])
        ctx.materialize_grads = False
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        plan: TrainingPlan = ctx.plan
        group: Group | None = getattr(ctx, "share", None)
        whole = all(gradients[i] is not None for i in (plan.differentiable if group is None else group.results))
        if torch.is_grad_enabled() or cuts(ctx) or (plan.holds is not None and not plan.holds(whole)):
            _C.call_inactive(functools.partial(_check, ctx, plan, plan.choice(ctx, gradients)))
            found = _C.call_inactive(functools.partial(_replay, ctx, plan, gradients))
            if not _keeps_graph() and whole:
                ctx.maybe_clear_saved_tensors()
                ctx.inputs = ctx.extras = None
            return (None, *found)
        choice = plan.choice(ctx, gradients)
        backward = plan.backward_for(choice)
        if plan.watched and _written_since(ctx, backward.kept):
            raise RuntimeError(_WRITTEN)
        if not all(_has_memory(gradients[index]) for index, _ in backward.tangents):
            backward = plan.batched(choice)
        values = _left(ctx, plan, choice[0], backward.kept) if plan.frees else []
        if values is None:
            values = _saved(ctx, plan, backward.kept)
        alone = ctx.extras is not None and group is None and not _keeps_graph()
        if not _keeps_graph():  # the list alone holds what was saved from here on
            if choice[0]:
                _leave(ctx, plan, choice[0])
            ctx.maybe_clear_saved_tensors()
            ctx.inputs = ctx.extras = None
        given = _scaled(ctx, plan, backward, values, gradients, alone) if backward.scaled else ()
        if backward.passes_tangents:
            tangents = [laid_out(gradients[index], meta, backward.any_layout) for index, meta in backward.tangents]
            values += tangents
        else:  # the list alone holds them too
            gradients, tangents = given_up(gradients), []  # type: ignore[assignment]
            values += [laid_out(gradients[index], meta, backward.any_layout) for index, meta in backward.tangents]
            gradients = ()
        return backward.answer(backward.run(values), tangents, given)


def _nothing(*_: Any) -> tuple[()]:
    return ()


def _scaled(
    ctx: Any, plan: TrainingPlan, backward: Backward, values: list[Any], gradients: Sequence[Any], alone: bool
) -> list[torch.Tensor]:
    """Gradients that the forward has made, multiplied by their factor, among the `values`; those that are given are taken out. `alone`: nobody will ask for what was kept again."""
    left = getattr(ctx, "left", _NOTHING)
    for place, index in backward.scaled:
        if not alone or backward.kept[place] in left:
            values[place] = values[place].clone()
        plan.scale(values[place], gradients[index])  # type: ignore[misc]
    # Autograd keeps a gradient that nobody else has; a recording has its own tensors.
    given = [values[place].data for place in backward.given]
    for place in sorted(backward.given, reverse=True):
        del values[place]
    return given


def _runs(node: Any) -> bool:
    """Whether the engine goes on from here to `node`."""
    try:
        return _executes(node)
    except RuntimeError:
        return True


def _leave(ctx: Any, plan: TrainingPlan, missing: frozenset[int]) -> None:
    """Set aside what a backward of the gradients that were `missing` will read, as eager's engine frees only what it has gone through."""
    ctx.allowed = plan.leftover(ctx, missing)
    places = {i for found in ctx.allowed.values() for i in found}
    before = getattr(ctx, "left", None)
    if before is None:
        before = {}
        if places:
            try:
                saved = _kept(ctx, plan)
            except RuntimeError:  # written since
                ctx.allowed = {k: found for k, found in ctx.allowed.items() if not found}
            else:  # not the results themselves, which hold this node
                before = {i: (saved[i].detach(), saved[i]._version) for i in places}
    ctx.left = {i: before[i] for i in places if i in before}
    ctx.done = frozenset(range(len(plan.differentiable))) - missing | getattr(ctx, "done", _NOTHING)


def _left(ctx: Any, plan: TrainingPlan, missing: frozenset[int], wanted: tuple[int, ...]) -> list[Any] | None:
    """What an earlier backward has set aside for the gradients that are there now."""
    left = getattr(ctx, "left", None)
    if left is None:
        return None
    there = [k for k in range(len(plan.differentiable)) if k not in missing]
    if any(k not in ctx.allowed for k in there) or any(i not in left for i in wanted):
        return None
    if any(left[i][0]._version != left[i][1] for i in wanted):
        raise RuntimeError(_WRITTEN)
    return [left[i][0] for i in wanted]


def _kept(ctx: Any, plan: TrainingPlan) -> Any:
    """All values kept, of which autograd has checked and unpacked its own."""
    saved = ctx.saved_tensors
    return saved if ctx.extras is None else plan.joined(saved, ctx.extras)


def _saved(ctx: Any, plan: TrainingPlan, wanted: tuple[int, ...]) -> list[Any]:
    """The tensors kept, of which those `wanted` must be as they were."""
    if plan.written and not ctx.written.isdisjoint(wanted):
        raise RuntimeError(_WRITTEN)
    try:
        saved = _kept(ctx, plan)
    except RuntimeError as error:
        there = range(len(plan.cut.kept)) if ctx.extras is None else plan.checked
        group: Group | None = getattr(ctx, "share", None)
        rest = [i for i in there if i not in wanted and (group is None or i in group.kept)]
        if not rest or _WRITTEN not in str(error):
            raise
        saved = _unchecked(ctx, plan, rest)
    return list(saved) if len(wanted) == len(saved) else [saved[i] for i in wanted]


def _unchecked(ctx: Any, plan: TrainingPlan, rest: Sequence[int]) -> Any:
    """The tensors kept, whatever has been written of `rest`: a saved tensor with hooks is not checked by autograd."""
    kept = plan.cut.kept
    raw = dict(zip(range(len(kept)) if ctx.extras is None else plan.checked, ctx._raw_saved_tensors, strict=True))
    results: dict[int, int] = {}
    restored, unknown = [], []
    for i in rest:
        if kept[i].kind == "result":
            results[kept[i].index] = i
        elif not hasattr(raw[i], "unpack"):  # torch 2.11 does not say which one has been written but by its version
            unknown.append(i)
        else:
            try:
                raw[i].unpack()
            except RuntimeError as error:
                try:
                    _let_go(ctx, plan, i, raw[i])
                except RuntimeError:  # a leaf when it was kept, with a history since: it takes no hooks
                    tensor = raw[i].data
                    restored.append((tensor, tensor._version))
                    _set_version(tensor, int(re.search(r"expected version (\d+)", str(error))[1]))  # type: ignore[index]
    try:
        while True:
            try:
                return _kept(ctx, plan)
            except RuntimeError as error:  # only the message tells which result it is
                named = re.search(r"output (\d+) of CompiledGraph", str(error))
                found = results.pop(int(named[1]), None) if named is not None else None
                versions = re.search(r"version (\d+); expected version (\d+)", str(error))
                if found is None and versions is not None:
                    found = next((i for i in unknown if raw[i].data._version == int(versions[1])), None)
                if found is None or versions is None:
                    raise
                unknown = [i for i in unknown if i != found]
                try:
                    _let_go(ctx, plan, found, raw[found])
                except RuntimeError:
                    restored.append((raw[found].data, int(versions[1])))
                    _set_version(raw[found].data, int(versions[2]))
    finally:
        for tensor, version in restored:
            _set_version(tensor, version)


def _set_version(tensor: torch.Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def _let_go(ctx: Any, plan: TrainingPlan, i: int, raw: Any) -> None:
    raw.register_hooks(_same, _same)
    plan.written = True
    ctx.written = ctx.written | {i}


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _written_since(ctx: Any, wanted: Sequence[int] | None = None) -> bool:
    """Whether an input that the graph has written, and whose new numbers a formula reads, has been written again."""
    found = (seen for place, seen in ctx.watched.items() if wanted is None or place in wanted)
    return any((tensor := reference()) is not None and tensor._version != version for reference, version in found)


def _versions(inputs: Sequence[Any], places: Sequence[int]) -> list[int]:
    try:
        return [inputs[i]._version for i in places]
    except RuntimeError:  # tensors of inference mode count no versions
        return [0 if inputs[i].is_inference() else inputs[i]._version for i in places]


def again(
    ctx: Any, plan: TrainingPlan, what: str, asked: Sequence[tuple[Any, int]] = (), checked: bool = False
) -> tuple[Sequence[Any], dict[int, torch.Tensor]]:
    """The captured graph run again in eager, once for a run of autograd's engine: its outputs, and its differentiable results by their numbers. `asked`: outputs that must be among them, by their places."""
    task = torch._C._current_graph_task_id()
    if ctx.again is None or ctx.again[0] != task:
        if not checked:
            _check(ctx, plan, _EVERYTHING)
        if plan.replay is None or any(place < 0 for _, place in asked):
            raise _cannot_replay(plan, what, "which writes inputs that it reads, or draws random numbers elsewhere than on the CPU")
        inputs = ctx.inputs
        if inputs is None:
            raise _cannot_replay(plan, what, "whose backward has run already")
        if ctx.versions != _versions(inputs, plan.unchecked):
            raise _cannot_replay(plan, what, "an input of which has been written since")
        present = torch.get_rng_state() if plan.replay.draws else None
        try:
            if present is not None:
                torch.set_rng_state(ctx.random)
            with torch.enable_grad():
                given = plan.replay.inputs(inputs[: plan.n_captured], getattr(ctx, "before", {}))
                given = [_without_hooks(x) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in given]
                outputs = plan.captured(*given)
        finally:
            if present is not None:
                torch.set_rng_state(present)
        ctx.again = task, outputs, dict(zip(plan.differentiable, plan.replay.results(outputs), strict=True)), [], given
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(setattr, ctx, "again", None))
    return ctx.again[1], ctx.again[2]


def _without_hooks(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a view of it where it has hooks: the engine calls them behind the node."""
    hooked = tensor._backward_hooks or (tensor.retains_grad and not tensor.is_leaf)
    return tensor.view_as(tensor) if hooked else tensor


def _check(ctx: Any, plan: TrainingPlan, choice: Choice) -> None:
    """Raises what eager raises when something saved that this choice needs has been written, or freed. The graph runs again: it needs all its inputs."""
    needed: tuple[int, ...] | None = None
    if choice != _EVERYTHING:
        inputs = (i for i, k in enumerate(plan.cut.kept) if k.kind == "input")
        needed = tuple(sorted({*plan.reach(choice).kept, *inputs}))
    if (ctx.written and needed is None) or (plan.watched and _written_since(ctx, needed)):
        raise RuntimeError(_WRITTEN)
    if needed is None:
        ctx.saved_tensors  # noqa: B018
    else:
        _saved(ctx, plan, needed)


def cuts(ctx: Any) -> Any:
    """Tensors of the second run in this run of autograd's engine: what flows back to them comes from outside, by way of the engine."""
    return ctx.again is not None and ctx.again[0] == torch._C._current_graph_task_id() and ctx.again[3]


def goes_on(ctx: Any) -> bool:
    """Whether the engine goes on from here to any input."""
    return any(following is not None and _runs(following) for following, _ in ctx.next_functions)


def _outside(seed: Any, gradient: Any) -> Any:
    return torch.zeros_like(gradient) if seed is None else seed


def _replay(ctx: Any, plan: TrainingPlan, gradients: Sequence[Any]) -> list[Any]:
    """Backward with create_graph=True, or of functions that read other values by now, or of which a part has run so already: the captured graph runs again in eager."""
    create = torch.is_grad_enabled()
    what = (
        "create_graph=True"
        if create
        else "a custom backward reads a value changed since the forward, or is told which gradients are missing"
    )
    _, results = again(ctx, plan, what, checked=True)
    pairs = [(result, gradients[i]) for i, result in results.items() if gradients[i] is not None]
    if any(result is None or result.shape != gradient.shape for result, gradient in pairs):
        raise _cannot_replay(plan, what, "which returns views of what it does not show")
    unwanted, inputs = plan.unwanted(ctx), [*ctx.again[4], *ctx.inputs[plan.n_captured :]]
    wanted = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad and i not in unwanted}
    if not wanted:
        return [None] * len(inputs)
    seeds = {id(result): gradient for result, gradient in pairs}
    cut = {id(tensor): tensor for tensor in ctx.again[3]}
    handles = [tensor.register_hook(functools.partial(_outside, seeds.get(i))) for i, tensor in cut.items()]  # type: ignore[no-untyped-call]
    try:
        found = torch.autograd.grad(
            [o for o, _ in pairs], list(wanted.values()), [g for _, g in pairs], create_graph=create, allow_unused=True
        )
    finally:
        for handle in handles:  # a higher derivative goes this way again
            handle.remove()
    by_input = dict(zip(wanted, found, strict=True))
    return [by_input.get(i) for i in range(len(inputs))]


def _cannot_replay(plan: TrainingPlan, what: str, why: str) -> UserError:
    return UserError("U006", function="backward", reason=f"{what}: graph {plan.name}, {why}")
