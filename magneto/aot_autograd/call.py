"""A functional graph as a plain Python function, its operations called one after another. For `aot_eager` and for tests."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from magneto.base.text import compile_source
from magneto.graph.layout import laid_out
from magneto.graph.rules_recurrent import call_of


def as_function(graph: fx.Graph, name: str = "graph", any_layout: bool = False, own: bool = True) -> Callable[..., tuple[Any, ...]]:
    """`graph` as generated source; a value is dropped after its last use. `any_layout`: its inputs may be laid out otherwise than it says. `own`: results are in memory of their own."""
    text, namespace = source_of(graph, _RESHAPES if any_layout else {})
    if not own:
        namespace["own"] = _as_they_are
    function: Callable[..., tuple[Any, ...]] = compile_source(f"{name} in eager", text, namespace)["run"]
    return function


def own_memory(results: tuple[torch.Tensor, ...], strides: Sequence[tuple[int, ...]], inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Results as the graph promises them: each in memory of its own (operations called in eager give views), with the strides of its meta
    (decomposed operations may come out in another layout)."""
    taken = {x.untyped_storage()._cdata for x in inputs if isinstance(x, torch.Tensor)}
    out = []
    for result, wanted in zip(results, strides, strict=True):
        address = result.untyped_storage()._cdata
        if address in taken or result.stride() != wanted:
            result = laid_out(result, wanted)
        taken.add(address)
        out.append(result)
    return tuple(out)


def _as_they_are(results: tuple[torch.Tensor, ...], *_: Any) -> tuple[torch.Tensor, ...]:
    return results


def result_strides(graph: fx.Graph) -> tuple[tuple[int, ...], ...]:
    """The strides that the graph promises of each result."""
    return tuple(result.meta["val"].strides for result in graph.output_node().args[0])  # type: ignore[union-attr]


_RESHAPES = dict.fromkeys((torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default), torch.ops.aten.reshape.default)
"""What PyTorch's formulas call: for the layouts at hand it became one of these while it was traced."""


_ANY_LAYOUT = frozenset(
    """view _unsafe_view t transpose permute expand squeeze unsqueeze select clone alias detach add sub mul div neg pow exp sum mean mm bmm addmm where full zeros zeros_like
    full_like ones_like convolution_backward native_batch_norm_backward native_layer_norm_backward _softmax_backward_data _log_softmax_backward_data tanh_backward sigmoid_backward
    gelu_backward silu_backward threshold_backward embedding_dense_backward getitem""".split()
)
"""Operations whose kernels look at strides. Others may rely on a `contiguous()` in PyTorch's formula that the layout traced made nothing of (group norm reads past the memory)."""


def takes_any_layout(graph: fx.Graph) -> bool:
    """Whether the operations that PyTorch's formulas recorded for one layout of the gradients are right for every other."""
    names = (
        getattr(node.target, "_schema", None) for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem
    )
    return all(schema is not None and schema.name.removeprefix("aten::") in _ANY_LAYOUT for schema in names)


def source_of(graph: fx.Graph, replaced: Mapping[Any, Any] = MappingProxyType({})) -> tuple[str, dict[str, Any]]:
    namespace: dict[str, Any] = {}
    nodes = list(graph.nodes)
    last_use = {used: node for node in nodes for used in node.all_input_nodes}
    dying: dict[fx.Node, list[str]] = {}
    for used, user in last_use.items():
        if user.op != "output" and used.op != "placeholder":
            dying.setdefault(user, []).append(used.name)
    parameters = [node.name for node in nodes if node.op == "placeholder"]
    lines = [f"def run({', '.join(parameters)}):"]
    names: dict[Any, str] = {}

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if value is None or type(value) in (int, bool, str):
            return repr(value)
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            inner = "".join(text(item) + ", " for item in value)
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        name = f"k{len(namespace)}"
        namespace[name] = value
        return name

    for node in nodes:
        if node.op == "output":
            namespace.update(own=own_memory, strides=result_strides(graph))
            lines.append(f"    return own({text(tuple(node.args[0]))}, strides, ({''.join(name + ', ' for name in parameters)}))")
        elif node.op == "call_function":
            if node.target is operator.getitem:
                expression = f"{text(node.args[0])}[{node.args[1]}]"
            else:
                target = call_of(replaced.get(node.target, node.target), node.meta.get("val"))
                if target not in names:
                    names[target] = f"f{len(names)}_{getattr(target, '__name__', 'op').replace('.', '_')}"
                    namespace[names[target]] = target
                arguments = [text(a) for a in node.args] + [f"{key}={text(value)}" for key, value in node.kwargs.items()]
                expression = f"{names[target]}({', '.join(arguments)})"
            freed = "; " + "".join(f"{dead} = " for dead in dying[node]) + "None" if node in dying else ""
            lines.append(f"    {node.name} = {expression}{freed}")
    return "\n".join(lines) + "\n", namespace


def without_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with grad mode off while it runs."""

    def run(*args: Any) -> Any:
        with torch.no_grad():
            return function(*args)

    return run


def under_autocast(function: Callable[..., Any], kinds: tuple[str, ...]) -> Callable[..., Any]:
    """`function` with autocast on for the device types `kinds`, with the types that they have now."""
    settings = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]

    def run(*args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for kind, dtype in settings:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            return function(*args)

    return run if kinds else function


def without_autocast(function: Callable[..., Any], kinds: tuple[str, ...]) -> Callable[..., Any]:
    """`function` with autocast off for the device types `kinds`, where it is on: the casts stand in the graph already."""
    if not kinds:
        return function

    def run(*args: Any) -> Any:
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)
        try:
            return function(*args)
        finally:
            for kind in kinds:
                torch.set_autocast_enabled(kind, True)

    return run
