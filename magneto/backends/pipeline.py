"""THE ordered list of passes: from a captured graph to the callable that runs it. Read this first.

    captured graph (torch level)  --trace-->  functional ATen graph  --decompose-->  prims and library calls
        --compile-->  kernels and plan  --wrap-->  callable with eager's mutation and aliasing

Every pass is a function of a `Unit`. The runner times, logs and verifies each. Whatever fails becomes a named fallback: the captured graph runs in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from magneto.aot_autograd.call import (
    as_function,
    own_memory,
    result_strides,
    takes_any_layout,
    under_autocast,
    without_autocast,
    without_grad,
)
from magneto.aot_autograd.decomposed import decomposable, decompose_joint, lay_out_joint
from magneto.aot_autograd.handed import scale_here
from magneto.aot_autograd.joint import JointGraph, trace_joint
from magneto.aot_autograd.partition import Partition, partition
from magneto.aot_autograd.recompute import recompute
from magneto.aot_autograd.refusal import Refusal
from magneto.aot_autograd.signature import Signature, written_results
from magneto.aot_autograd.trace import AtenGraph, drop_dead, trace
from magneto.aot_autograd.training import Choice, Ends, TrainingPlan, plan_training, reach, training_function
from magneto.aot_autograd.wrap import wrap
from magneto.backends.dense import laid_dense
from magneto.backends.fallback import name_of, recover, recover_backward
from magneto.backends.families import Cut, Rest
from magneto.backends.sized import sized, varying_sizes
from magneto.base.collection import no_collection
from magneto.base.dataclass import dataclass, replace
from magneto.base.events import timer
from magneto.base.flags import config
from magneto.base.heard import taken
from magneto.base.passes import Pass, run_passes
from magneto.base.varying import sizes_vary, varying
from magneto.graph.atomic import atomic
from magneto.inductor.replay import Replay

if TYPE_CHECKING:
    from magneto.inductor.runtime.kept import Finished

Compiled = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Unit:
    """What is being compiled, at any stage. `aten` is set by trace, `compiled` by compile (the functional graph) and by wrap (the whole).

    In training `joint` is traced first, `cut` splits it, and `aten` is the forward graph.
    """

    gm: fx.GraphModule
    inputs: tuple[Any, ...]
    name: str
    grad_enabled: bool
    autocast: tuple[str, ...] = ()  # device types for which autocast is on round the graph
    aten: AtenGraph | None = None
    compiled: Compiled | None = None
    joint: JointGraph | None = None
    cut: Partition | None = None
    key: str | None = None  # under which the compiled functional graph is kept on disk
    training: bool = False
    graphs: bool = False  # launches on a GPU may be recorded and replayed
    doubted: fx.Graph | None = None  # as traced, where another plan answers calls that its plan cannot (inductor/runtime/invalid.py)

    @property
    def traced(self) -> AtenGraph:
        assert self.aten is not None, "the trace pass comes first"
        return self.aten

    def with_graph(self, graph: fx.Graph) -> Unit:
        return replace(self, aten=replace(self.traced, graph=graph))


# ---- the passes ------------------------------------------------------------------------------------------------------


def trace_captured(unit: Unit) -> Unit:
    """Torch-level calls become functional ATen operations; mutation and aliasing move into the signature."""
    return replace(unit, aten=trace(unit.gm, unit.inputs, unit.grad_enabled, unit.name))


def trace_joint_graph(unit: Unit) -> Unit:
    """As trace, and on through autograd's engine: forward and backward in one graph."""
    return replace(unit, joint=trace_joint(unit.gm, unit.inputs, unit.grad_enabled, unit.name), training=True)


def state_of(unit: Unit) -> frozenset[int]:
    """Inputs that are weights or buffers of modules which this graph, of an inference, does not write: what is computed of them alone may be kept."""
    if unit.joint is not None:
        return frozenset()
    return frozenset(unit.gm.meta.get("magneto", {}).get("state_inputs", ()))


def choose_layout(unit: Unit) -> Unit:
    """In inference transformer layers come apart, and attention that is written out becomes one call. Products with one matrix become one product, and take an activation along. Convolutional networks go channels-last where that pays; what follows a channels-last convolution
    becomes part of it. What the machine cannot multiply in its type is widened."""
    if unit.compiled is not None or config.numerics == "eager":
        return unit
    from magneto.inductor.widened import widen

    if unit.training:
        graph = widen(unit.traced.graph, True)
        return unit if graph is unit.traced.graph else unit.with_graph(graph)
    from magneto.inductor.attention import fuse_attention
    from magneto.inductor.convolve import available, fold
    from magneto.inductor.convolve_cudnn import fold_cudnn
    from magneto.inductor.layout import lay_out
    from magneto.inductor.matmul import flatten
    from magneto.inductor.post_ops import fuse_activations
    from magneto.inductor.transformer import take_apart

    graph = fuse_activations(flatten(widen(flatten(fuse_attention(take_apart(unit.traced.graph))))))
    state = state_of(unit)
    if config.channels_last:
        laid_out = lay_out(graph, state if available() else frozenset())
        graph = fold_cudnn(fold(laid_out, state, unit.doubted is not None, laid_out is not graph))
    return unit if graph is unit.traced.graph else unit.with_graph(graph)


def choose_joint_layout(unit: Unit) -> Unit:
    """Attention that is written out becomes calls. On a GPU convolutional networks are trained channels-last too."""
    from magneto.inductor.attention_joint import fuse_joint_attention
    from magneto.inductor.recall import foreign_device
    from magneto.inductor.widened import widen

    joint = unit.joint
    assert joint is not None
    if not joint.tangents or not decomposable(joint):
        return unit
    if config.numerics != "eager":
        joint = lay_out_joint(lay_out_joint(joint, fuse_joint_attention), lambda graph: widen(graph, True))
    if config.channels_last and foreign_device(joint.graph) == "cuda":
        from magneto.inductor.layout import lay_out

        joint = lay_out_joint(joint, lay_out)
    return replace(unit, joint=joint)


def decompose_joint_graph(unit: Unit) -> Unit:
    """Both halves become primitives before they are cut."""
    joint = unit.joint
    assert joint is not None
    if not joint.tangents or not decomposable(joint):
        return unit
    return replace(unit, joint=decompose_joint(joint))


def cut_joint_graph(unit: Unit) -> Unit:
    """Forward and backward apart, with the least memory kept between them."""
    joint = unit.joint
    assert joint is not None
    if not joint.tangents:  # nothing flows back into the region: what there was to differentiate, it has differentiated itself
        joint.graph.output(joint.results)
        return replace(unit, aten=AtenGraph(joint.graph, joint.signature, joint.constants, unit.name))
    cut = partition(joint)
    return replace(unit, cut=cut, aten=AtenGraph(cut.forward, joint.signature, joint.constants, unit.name))


def recall_compiled(unit: Unit) -> Unit:
    """An equal graph may have been compiled before, by another process; then the passes up to compile_kernels have nothing to do."""
    from magneto.inductor.recall import kept_graph
    from magneto.inductor.runtime.invalid import may_run_twice

    graph, written = unit.traced.graph, _written(unit)
    unit = replace(unit, doubted=None if unit.training or written or not may_run_twice(graph) else graph)
    key, found = kept_graph(graph, unit.name, written, state_of(unit), unit.training, replay_of(unit))
    return replace(unit, key=key) if found is None else _with_kernels(unit, *found)


def decompose_to_prims(unit: Unit) -> Unit:
    """ATen operations become primitives; what has no decomposition stays a library call."""
    if unit.compiled is not None or (unit.joint is not None and unit.joint.checked is not None):
        return unit
    from magneto.prims.decompose import decompose

    return unit.with_graph(decompose(unit.traced.graph))


def recompute_in_backward(unit: Unit) -> Unit:
    """A backward inside the graph computes again what is cheap, rather than keeping it in memory from the forward on."""
    if unit.compiled is not None:
        return unit
    return unit.with_graph(recompute(unit.traced.graph))


def drop_unused(unit: Unit) -> Unit:
    if unit.compiled is not None:
        return unit
    drop_dead(unit.traced.graph)
    return unit


def compile_kernels(unit: Unit) -> Unit:
    """Lower, schedule, generate code, build, plan."""
    if unit.compiled is not None:
        return unit
    from magneto.inductor.compile import compile_writing

    graph, written = unit.traced.graph, _written(unit)
    return _with_kernels(unit, *compile_writing(graph, unit.name, written, unit.key, state_of(unit), unit.training, replay_of(unit)))


def replay_of(unit: Unit) -> Replay | None:
    """How a GPU may replay the graph: a forward gives its user the results only, a backward nothing that lives on by itself."""
    if not unit.graphs:
        return None
    if unit.joint is None:
        return Replay(0 if unit.training else None)
    return Replay(len(unit.joint.results) if unit.cut is not None else None)


def _written(unit: Unit) -> dict[int, int]:
    """Results that kernels may write into inputs themselves. What backward reads is not among them: autograd would see it written."""
    kept = {k.index for k in unit.cut.kept if k.kind == "result"} if unit.cut is not None else ()
    return {k: place for k, place in written_results(unit.traced.signature, unit.inputs).items() if k not in kept}


def _with_kernels(unit: Unit, compiled: Compiled, done: frozenset[int]) -> Unit:
    """`done`: the results that the kernels write into inputs."""
    if done:
        unit = replace(unit, aten=replace(unit.traced, signature=unit.traced.signature.written_directly(done)))
    if unit.doubted is not None:
        from magneto.inductor.runtime.invalid import answering

        parts, sizes = (unit.doubted, f"{unit.name}_exactly", COMPILE_HALF[1:], False, state_of(unit)), sizes_vary()

        def exactly() -> Compiled:
            with timer("backend"), no_collection(), varying(sizes), taken([]):
                return compile_half(*parts)

        compiled = answering(compiled, exactly)
    return replace(unit, compiled=without_autocast(compiled, unit.autocast))


def call_eagerly(unit: Unit) -> Unit:
    """The functional graph as a Python function that calls its operations one by one (aot_eager)."""
    graph = unit.traced.graph
    any_layout = (
        unit.training and unit.joint is None and takes_any_layout(graph)
    )  # a backward: eager's formulas see the gradient as it comes
    compiled = without_autocast(without_grad(as_function(graph, unit.name, any_layout)), unit.autocast)
    compiled.any_layout = any_layout  # type: ignore[attr-defined]
    return replace(unit, compiled=compiled)


def replay_calls(unit: Unit) -> Unit:
    """On a GPU, what the operations launch is recorded and replayed (cudagraphs)."""
    from magneto.inductor.cuda import replayed

    replay = replay_of(replace(unit, graphs=True))
    assert unit.compiled is not None and replay is not None
    return replace(unit, compiled=replayed(unit.compiled, unit.traced.graph, unit.name, replay))


def call_numpy(unit: Unit) -> Unit:
    """The decomposed graph executed by numpy (the oracle); each result in memory of its own."""
    from magneto.prims.interpret import interpret

    run, strides = interpret(unit.traced.graph), result_strides(unit.traced.graph)

    def compiled(*inputs: Any) -> tuple[Any, ...]:
        return own_memory(run(*inputs), strides, inputs)

    return replace(unit, compiled=without_autocast(without_grad(compiled), unit.autocast))


def wrap_compiled(unit: Unit) -> Unit:
    """Write-backs, aliases, constants."""
    assert unit.compiled is not None
    aten = unit.traced
    return replace(unit, compiled=wrap(unit.compiled, aten.signature, aten.constants, atomic(unit.gm), unit.name))


def join_halves(unit: Unit, half: tuple[Pass, ...]) -> Unit:
    """One autograd function round the compiled forward and a backward that is compiled when it is first called."""
    assert unit.compiled is not None and unit.joint is not None
    if unit.cut is None:
        return unit
    name = f"{unit.name}_backward"
    passes = backward_passes(unit.joint, half)
    sizes, graphs = sizes_vary(), unit.graphs  # (`unit` has the inputs of this call)

    def build_backward(graph: fx.Graph) -> Compiled:
        with timer("backend"), no_collection(), varying(sizes), taken([]):
            return compile_half(graph, name, passes, graphs)

    meta = unit.gm.meta.get("magneto", {})
    holds = meta.get("backward_holds")
    inputs = [i for i, x in enumerate(unit.inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    captured = under_autocast(atomic(unit.gm), unit.autocast)
    plan = plan_training(unit.joint, unit.cut, unit.compiled, build_backward, captured, True, holds, inputs, scale)
    plan.answers(meta.get("asks_whole", False))
    plan.hide(unit.traced.signature.direct)
    return replace(unit, compiled=training_function(plan))


def scale(made: torch.Tensor, factor: torch.Tensor) -> None:
    """A gradient that the forward has made times the loss's own, in place."""
    if not made.is_cuda:
        scale_here(made, factor)
        return
    from magneto.inductor.runtime.scaled import scale_on_device

    scale_on_device(made, factor)


def backward_passes(joint: JointGraph, half: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """Where the operations are primitives already, they are not decomposed again."""
    return half if joint.checked is None else tuple(one for one in half if one.name != "decompose")


def compile_half(
    graph: fx.Graph, name: str, passes: tuple[Pass, ...], graphs: bool = False, state: frozenset[int] | None = None
) -> Compiled:
    """A backward graph compiled, or with `state` (see state_of) an inference's; called operation by operation when the compiler does not take it."""
    try:
        unit = run_passes(passes, _half(graph, name, state, graphs), verify=verify_unit, show=show_unit, label=name)
    except Exception as error:
        recover_backward(name, error)
        return without_grad(as_function(graph, name))
    assert unit.compiled is not None
    return unit.compiled


def _half(graph: fx.Graph, name: str, state: frozenset[int] | None, graphs: bool = False) -> Unit:
    n = sum(1 for node in graph.nodes if node.op == "placeholder")
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, tuple)
    half = AtenGraph(graph, Signature(n, 0, len(outputs), ()), (), name)
    unit = Unit(fx.GraphModule({}, fx.Graph()), (), name, False, aten=half, training=state is None, graphs=graphs)
    unit.gm.meta["magneto"] = {"state_inputs": state or ()}
    return unit


COMPILE_HALF: tuple[Pass, ...] = (
    Pass("recall", recall_compiled),
    Pass("choose_layout", choose_layout),
    Pass("decompose", decompose_to_prims),
    Pass("recompute", recompute_in_backward),
    Pass("drop_unused", drop_unused),
    Pass("compile_kernels", compile_kernels),
)

CALL_HALF: tuple[Pass, ...] = (Pass("call_eagerly", call_eagerly),)

REPLAY_HALF: tuple[Pass, ...] = (*CALL_HALF, Pass("replay_calls", replay_calls))

CALL_HALF_DECOMPOSED: tuple[Pass, ...] = (
    Pass("decompose", decompose_to_prims),
    Pass("drop_unused", drop_unused),
    Pass("call_eagerly", call_eagerly),
)

NUMPY_HALF: tuple[Pass, ...] = (Pass("decompose", decompose_to_prims), Pass("drop_unused", drop_unused), Pass("call_numpy", call_numpy))


def inference(half: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """The recipe without gradients."""
    return (Pass("trace", trace_captured), *half, Pass("wrap", wrap_compiled))


def training(half: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """The recipe with gradients; the backward half goes through `half` too, when it is first called."""
    decomposed = (Pass("decompose_joint", decompose_joint_graph),) if half not in (CALL_HALF, REPLAY_HALF) else ()
    layout = (Pass("choose_joint_layout", choose_joint_layout),) if half is COMPILE_HALF else ()
    return (
        Pass("trace_joint", trace_joint_graph),
        *layout,
        *decomposed,
        Pass("partition", cut_joint_graph),
        *half,
        Pass("join_halves", lambda unit: join_halves(unit, half)),
        Pass("wrap", wrap_compiled),
    )


# ---- running them ----------------------------------------------------------------------------------------------------


def compile_captured(gm: fx.GraphModule, example_inputs: Sequence[Any], half: tuple[Pass, ...]) -> Compiled:
    """The callable for `gm`: a functional graph goes through the passes `half`. Where the compiler does not apply, `gm` itself."""
    with timer("backend"), taken([]):  # capture has heard what torch warns of these calls
        try:
            if any(node.target in _INFERENCE for node in gm.graph.nodes):
                return _in_inference_mode(gm, example_inputs, half)
            if varying_sizes(gm):
                compile = partial(compile_captured, half=half)
                grad = needs_grad(gm, example_inputs)
                exact = half is not COMPILE_HALF or config.numerics == "eager"
                if not grad and (laid := laid_dense(gm, example_inputs, exact)) is not None:
                    return laid.ahead_of(compile(laid.gm, laid.given(example_inputs)))
                sampler = None if half is not COMPILE_HALF or (grad and not torch.is_grad_enabled()) else Training() if grad else Sampling()
                return sized(gm, example_inputs, compile, half is COMPILE_HALF, sampler)
            if torch.is_inference_mode_enabled():
                gm = _without(
                    gm, [n for n in gm.graph.nodes if n.target in _GRAD_SWITCHES and not n.users]
                )  # nothing is recorded there, whatever they say
            autocast = tuple(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
            recipe = training(half) if needs_grad(gm, example_inputs) else inference(half)
            unit = Unit(gm, tuple(example_inputs), name_of(gm), torch.is_grad_enabled(), autocast, graphs=config.cuda_graphs)
            unit = run_passes(recipe, unit, verify=verify_unit, show=show_unit, label=unit.name)
        except Exception as error:
            return recover(gm, error)
    assert unit.compiled is not None
    return unit.compiled if unit.joint is None or unit.grad_enabled else _in_grad_mode(unit.compiled)


class Sampling:
    """The passes of an inference, up to what is built."""

    def sample(self, gm: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Any]) -> tuple[Finished, Rest, Cut | None]:
        """See `Sampler`."""
        from magneto.inductor.runtime.invalid import may_run_twice

        unit = self.traced(gm, inputs)
        graph, written = unit.traced.graph, _written(replace(unit, inputs=tuple(given)))
        doubted = not (written or unit.training) and may_run_twice(graph)
        finished = _as_data(replace(unit, doubted=graph if doubted else None), written, COMPILE_HALF)
        signature = unit.traced.signature.written_directly(finished.written) if finished.written else unit.traced.signature
        plan, cut = self.halves(unit, given)
        return finished, Rest(signature, unit.traced.constants, unit.autocast, doubted, plan), cut

    first: tuple[Pass, ...] = (Pass("trace", trace_captured),)

    def traced(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Unit:
        """The functional graph, of a training the forward's."""
        from magneto.inductor.recall import foreign_device

        autocast = tuple(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
        unit = Unit(gm, tuple(inputs), name_of(gm), torch.is_grad_enabled(), autocast)
        for step in self.first:
            unit = step.fn(unit)
        if foreign_device(unit.traced.graph) is not None:
            raise Refusal("a graph for a GPU")
        return unit

    def halves(self, unit: Unit, given: Sequence[Any]) -> tuple[TrainingPlan | None, Cut | None]:
        """How forward and backward hang together, and where they are cut."""
        return None, None

    def cut(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Cut:
        """See `Sampler`."""
        raise NotImplementedError

    def exactly(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """See `Sampler`."""
        name = f"{name_of(gm)}_exactly"
        with timer("backend"), no_collection(), taken([]):
            graph = trace(gm, inputs, torch.is_grad_enabled(), name).graph
            return compile_half(graph, name, COMPILE_HALF[1:], False, frozenset())


class Training(Sampling):
    """The same of a training: its forward, and, choice by choice, what flows back."""

    first = training(COMPILE_HALF)[: -len(COMPILE_HALF) - 2]

    def halves(self, unit: Unit, given: Sequence[Any]) -> tuple[TrainingPlan | None, Cut | None]:
        joint, cut = unit.joint, unit.cut
        assert joint is not None
        if cut is None:
            return None, None
        inputs = [i for i, x in enumerate(given) if isinstance(x, torch.Tensor) and x.requires_grad]
        bare = replace(cut, forward=_NONE, backward=_NONE)
        return plan_training(joint, bare, _later, _later, _later, True, None, inputs), _Halves.of(joint, cut)

    def cut(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Cut:
        """See `Sampler`."""
        unit = self.traced(gm, inputs)
        assert unit.joint is not None and unit.cut is not None
        return _Halves.of(unit.joint, unit.cut)


_NONE = fx.Graph()


def _later(*_: Any) -> Any:
    """In the place of what samples do not have."""
    raise AssertionError


@dataclass(frozen=True, slots=True)
class _Halves:
    """See `Cut`. `passes`: of backwards."""

    cut: Partition
    passes: tuple[Pass, ...]

    @staticmethod
    def of(joint: JointGraph, cut: Partition) -> _Halves:
        return _Halves(replace(cut, forward=_NONE), backward_passes(joint, COMPILE_HALF))

    def backward(self, choice: Choice, name: str) -> tuple[Finished, Ends]:
        part = reach(self.cut, choice)
        return _as_data(_half(part.graph, name, None), {}, self.passes), (part.kept, part.gradients)

    def alone(self, graph: fx.Graph, name: str) -> Compiled:
        return compile_half(graph, name, self.passes)


def _as_data(unit: Unit, written: dict[int, int], passes: tuple[Pass, ...]) -> Finished:
    """The graph as compiled, up to what is built."""
    from magneto.inductor.compile import finish

    for step in passes[1:-1]:
        unit = step.fn(unit)
    return finish(unit.traced.graph, unit.name, written, frozenset() if unit.training else state_of(unit), unit.training)


_INFERENCE = (torch.autograd.grad_mode._enter_inference_mode, torch.autograd.grad_mode._exit_inference_mode)


def _in_inference_mode(gm: fx.GraphModule, example_inputs: Sequence[Any], half: tuple[Pass, ...]) -> Compiled:
    """A graph that is one block of inference mode is compiled without it, and called in it."""
    calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    first, *body, last = calls
    if (first.target, last.target) != _INFERENCE or first.args[0] is not True or any(node.target in _INFERENCE for node in body):
        raise Refusal("it enters inference mode for a part of its operations")
    inner = _without(gm, (first, last))
    with torch.inference_mode():
        compiled = compile_captured(inner, example_inputs, half)

    def run(*inputs: Any) -> Any:
        with torch.inference_mode():
            return compiled(*inputs)

    return run


def _without(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """A copy of the module without nodes that others read at most to undo them; the module itself where there are none."""
    if not nodes:
        return gm
    made = fx.GraphModule(gm, fx.Graph())
    copies: dict[fx.Node, fx.Node] = {}
    made.graph.output(made.graph.graph_copy(gm.graph, copies))
    for node in sorted(nodes, reverse=True):
        made.graph.erase_node(copies[node])
    made.recompile()
    made.meta.update(gm.meta)
    if varying_sizes(gm):
        told = gm.meta["magneto"]
        made.meta["magneto"] = {**told, "resizer": told["resizer"].copied({node: copies[node] for node in copies if node not in nodes})}
    return made


def _in_grad_mode(compiled: Compiled) -> Compiled:
    """For a graph that begins without gradients and switches them on: what it records depends on its own switches, not on where it begins."""

    def run(*inputs: Any) -> Any:
        with torch.enable_grad():
            return compiled(*inputs)

    return run


def needs_grad(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether eager would record a backward graph while running `gm`."""
    if not (torch.is_grad_enabled() or any(node.target in _GRAD_SWITCHES for node in gm.graph.nodes)):
        return False
    if any(node.target == "requires_grad_" or node.kwargs.get("requires_grad") is True for node in gm.graph.nodes):
        return True
    held = (getattr(gm, str(node.target), None) for node in gm.graph.nodes if node.op == "get_attr")
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*inputs, *held))


_GRAD_SWITCHES = (torch._C._set_grad_enabled, torch.set_grad_enabled, torch.enable_grad)


def verify_unit(unit: Unit) -> None:
    if unit.aten is not None:
        unit.aten.graph.lint()


def show_unit(unit: Unit) -> str:
    if unit.aten is None:
        return str(unit.joint.graph if unit.joint is not None else unit.gm.graph)
    return f"{unit.aten.graph}\n{unit.aten.signature}"
