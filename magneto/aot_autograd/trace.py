"""From a captured graph to a functional graph of ATen operations and its signature.

`trace` runs the captured torch-level graph once on hollow tensors under `FunctionalMode`, so that composite functions, autocast, in-place
operations and views mean exactly what they mean in eager.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from magneto.aot_autograd.looking import LOOKING
from magneto.aot_autograd.mode import FunctionalMode, hollow
from magneto.aot_autograd.own_backward import with_own_backward
from magneto.aot_autograd.refusal import Refusal
from magneto.aot_autograd.results import Collector
from magneto.aot_autograd.signature import Apart, Mutation, Signature
from magneto.aot_autograd.storage import View
from magneto.base.dataclass import dataclass, field, replace
from magneto.graph.meta import TensorMeta
from magneto.graph.modes import modes_kept, without_cudnn
from magneto.graph.opinfo import stays


@dataclass(slots=True)
class AtenGraph:
    """`graph`: placeholders for the caller's inputs, then for `constants`; its output is a tuple of nodes."""

    graph: fx.Graph
    signature: Signature
    constants: tuple[torch.Tensor, ...] = ()
    name: str = "graph"


@dataclass(slots=True)
class Tracing:
    """A trace under way: the mode and what came in."""

    mode: FunctionalMode
    inputs: list[Any]
    roots: list[View | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    histories: list[Any] = field(default_factory=list)  # the inputs' grad_fn before anything is traced
    attributes: list[torch.Tensor] = field(default_factory=list)  # tensors the captured graph holds itself
    names: list[str] = field(default_factory=list)
    whole_formulas: bool = False  # custom operators' own backward is one call each


def trace(gm: fx.GraphModule, inputs: Sequence[Any], grad_enabled: bool = False, name: str = "graph") -> AtenGraph:
    """The functional graph of `gm` for inputs like these. Nothing is computed and nothing is written.

    Raises Refusal (see its `reason`), or what torch raises for a call that is wrong.
    """
    with steady_state(grad_enabled):
        tracing, tensors = begin(gm, inputs)
        with tracing.mode:
            value = run_captured(gm, tracing, tensors)
        return finish(gm, tracing, tensors, value, name)


@contextmanager
def steady_state(grad_enabled: bool) -> Iterator[None]:
    """Tracing leaves no traces: grad mode, autocast and its cache, and the random stream are as before. What cuDNN would do as one call is seen in its parts."""
    random = torch.get_rng_state()
    try:
        with without_cudnn(), modes_kept(grad_enabled), torch.inference_mode(False), torch.set_grad_enabled(grad_enabled):
            yield
    finally:
        torch.set_rng_state(random)


def begin(
    gm: fx.GraphModule, inputs: Sequence[Any], prepare: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> tuple[Tracing, list[Any]]:
    """A mode with one placeholder per input (and per tensor that `gm` holds), and the tensors to run `gm` on."""
    mode = FunctionalMode(fx.Graph())
    tracing = Tracing(mode, list(inputs))
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(inputs):
        raise Refusal(f"{len(placeholders)} placeholders for {len(inputs)} inputs")
    tensors = []
    for index, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        tensors.append(_add_input(tracing, str(node.target), index, value, prepare))
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            held = operator.attrgetter(str(node.target))(gm)
            if isinstance(held, torch.Tensor) and not any(held is known for known in tracing.attributes):
                tracing.attributes.append(held)
                tensors.append(_add_input(tracing, "held_" + str(node.target).replace(".", "_"), len(tensors), held, prepare))
    last = list(mode.graph.nodes)[-1] if tensors else None
    mode.new_literal = _literal_maker(mode.graph, last)
    return tracing, tensors


def _literal_maker(graph: fx.Graph, last: fx.Node | None) -> Callable[[int], fx.Node]:
    """Placeholders for literals go behind the last one there is, whenever they are met."""
    place = [last if last is not None else graph._root]

    def make(index: int) -> fx.Node:
        with graph.inserting_after(place[0]):
            place[0] = graph.placeholder(f"literal_{index}")
        return place[0]

    return make


def _add_input(tracing: Tracing, name: str, index: int, value: Any, prepare: Callable[[torch.Tensor], torch.Tensor] | None) -> Any:
    graph = tracing.mode.graph
    if not isinstance(value, torch.Tensor):
        node = graph.placeholder(name)
        node.meta.update(val=value, stack=(), stage="forward")
        tracing.roots.append(None)
        tracing.versions.append(0)
        tracing.histories.append(None)
        return value
    check_plain(value)
    node = graph.placeholder(name)
    data = value.data  # the same memory and geometry, a version counter of its own; never read or written while tracing
    if value.is_inference() or tracing.mode.storages.find(data) is not None:
        data = hollow(TensorMeta.of(data))  # the latter shares memory with another input today: nothing may depend on that
    meta = TensorMeta.of(data)
    tensor = data if prepare is None else prepare(data)
    node.meta.update(val=meta, stack=(), stage="forward")
    view = tracing.mode.storages.add_root(tensor, meta, node, index)
    tracing.roots.append(view)
    tracing.versions.append(tensor._version)
    tracing.histories.append(None)
    return tensor


def check_plain(value: torch.Tensor) -> None:
    """Refuse what the compiled code could not handle as plain strided memory."""
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter and type(value) is not torch.nn.Buffer:
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise Refusal(f"an input of type {type(value).__name__}")
    if value.layout is not torch.strided or value.is_quantized:
        raise Refusal(f"an input of layout {value.layout}")
    if value.is_conj() or value.is_neg():
        raise Refusal("an input with a lazy conjugation or negation")
    if value.device.type == "meta":
        raise Refusal("an input on the meta device")


def run_captured(gm: fx.GraphModule, tracing: Tracing, tensors: list[Any]) -> Any:
    """The captured graph's output value, its operations executed in order."""
    env: dict[fx.Node, Any] = {}
    arguments = iter(tensors)
    mode = tracing.mode
    held = {id(t): tensors[len(tracing.inputs) + i] for i, t in enumerate(tracing.attributes)}
    lookup = env.__getitem__
    for node in gm.graph.nodes:
        op = node.op
        if op == "placeholder":
            env[node] = next(arguments)
            continue
        if op == "get_attr":
            value = operator.attrgetter(str(node.target))(gm)
            env[node] = held.get(id(value), value)
            continue
        args = fx.map_arg(node.args, lookup)
        if op == "output":
            return args[0]
        kwargs = fx.map_arg(node.kwargs, lookup) if node.kwargs else {}
        mode.stack = node.meta.get("stack", ())
        if op == "call_function":
            call = (with_own_backward(node.target) if tracing.whole_formulas else None) or LOOKING.get(node.target, node.target)
            env[node] = call(*args, **kwargs)
        elif op == "call_method" and node.target in LOOKING and isinstance(args[0], torch.Tensor):
            env[node] = LOOKING[node.target](*args, **kwargs)
        elif op == "call_method":
            env[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            raise Refusal(f"a captured node of kind {op}")
    raise Refusal("a captured graph without an output")


def describe(gm: fx.GraphModule, tracing: Tracing, tensors: list[Any], value: Any) -> tuple[Collector, Signature]:
    """Decide what the functional graph returns."""
    single = not isinstance(value, (tuple, list))
    values = (value,) if single else tuple(value)
    collector = Collector(tracing, tensors, values)
    outputs = tuple(collector.output(v) for v in values)
    mutations = tuple(collector.mutations())
    collector.check_geometry()
    parameters = set(getattr(gm, "meta", {}).get("magneto", {}).get("parameter_inputs", ()))
    return collector, Signature(
        len(tracing.inputs), len(tracing.attributes) + len(tracing.mode.literals), len(collector.results), outputs, mutations, single,
        apart=_apart(tracing, mutations, parameters), gaps=tuple(collector.gaps.items()),
    )  # fmt: skip


def finish(gm: fx.GraphModule, tracing: Tracing, tensors: list[Any], value: Any, name: str) -> AtenGraph:
    """The graph with its output, and its signature."""
    collector, signature = describe(gm, tracing, tensors, value)
    if collector.carriers:
        raise Refusal("a result requires grad though no input does")
    graph = tracing.mode.graph
    graph.output(tuple(collector.results))
    drop_dead(graph)
    signature = replace(signature, effects=any(node.op == "call_function" for node in graph.nodes))
    return AtenGraph(graph, signature, (*tracing.attributes, *tracing.mode.literals), name)


def drop_dead(graph: fx.Graph) -> None:
    """Remove what no result needs. Random operations stay, because eager advances the random stream for them too, and so do checks."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not stays(node.target):
            graph.erase_node(node)


def _apart(tracing: Tracing, mutations: tuple[Mutation, ...], parameters: set[int]) -> Apart | None:
    """What must not share memory: a written input with another. Checked now for this call's inputs, and at run time for those that are not parameters."""
    tensors = {i: t for i, t in enumerate((*tracing.inputs, *tracing.attributes)) if isinstance(t, torch.Tensor)}
    spans = {i: _span(t) for i, t in tensors.items()}
    written = {mutation.index for mutation in mutations}
    everything = Apart(tuple(spans), tuple(end - start for start, end in spans.values()), frozenset(written))
    if not everything.holds(tuple(start for start, _ in spans.values())):
        raise Refusal("inputs that share memory are written")
    n = len(tracing.inputs)
    inside = [i for i in spans if i < n]
    free = frozenset(i for i in written if i < n)
    if not free or len(inside) < 2:
        return None
    return Apart(tuple(inside), tuple(spans[i][1] - spans[i][0] for i in inside), free - parameters, free & parameters)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte of a tensor's elements."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return start, start + reach * tensor.element_size()
