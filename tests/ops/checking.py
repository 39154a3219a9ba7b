"""CheckingMode: runs torch code for real and checks, for every ATen operation it meets, our meta rule and our decomposition."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from magneto.graph.fake_tensor import _answer_write
from magneto.graph.layout import RuleError
from magneto.graph.meta import TensorMeta
from magneto.graph.opinfo import op_info
from magneto.prims import Prim
from magneto.prims.decompose import decompose, row_of

# Results that the operation leaves uninitialised, or that are random.
UNDEFINED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
# ulps of slack for float32/float64, relative to the largest magnitude of the result.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class CheckingMode(TorchDispatchMode):
    """`problems` lists what differs; `seen`, `ruled` and `decomposed` count operations."""

    def __init__(self, numpy_too: bool = False) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.seen: set[str] = set()
        self.unruled: set[str] = set()
        self.library: set[str] = set()
        self.decomposed: set[str] = set()
        self.numpy_too = numpy_too

    def handle(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        info = op_info(func)
        self.seen.add(info.name)
        metas = [as_meta(a) for a in args]
        meta_kwargs = {k: as_meta(v) for k, v in kwargs.items()}
        kept = [a.clone() if isinstance(a, torch.Tensor) else a for a in args] if info.hidden or info.writes else args
        out = func(*args, **kwargs)
        try:
            self.check_rule(info, metas, meta_kwargs, out)
            if not info.writes and row_of(func) is not None:
                self.check_decomposition(func, kept, kwargs, out)
        except Exception as error:
            self.problems.append(f"{info.name}{describe(metas)}: {type(error).__name__}: {error}")
        return out

    def check_rule(self, info: Any, metas: list[Any], kwargs: dict[str, Any], out: Any) -> None:
        if info.inplace_view:
            return
        if info.rule is None:
            self.unruled.add(info.name)
            return
        try:
            answer = _answer_write(info, metas, kwargs) if info.writes else info.rule(*metas, **kwargs)
        except RuleError as refusal:
            self.unruled.add(f"{info.name} ({refusal})")
            return
        difference = differ(answer, as_meta(out))
        if difference:
            self.problems.append(f"rule {info.name}{describe(metas)} {kwargs or ''}: {difference}")

    def check_decomposition(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = str(func)
        graph, inputs = one_call(func, args, kwargs, out)
        result = decompose(graph)
        if any(node.target is func for node in result.nodes) and name != "aten.clone.default":
            self.library.add(name)
            return
        self.decomposed.add(name)
        for node in result.nodes:
            if node.op == "call_function" and node.meta.get("val") is None:
                self.problems.append(f"{name}: {node.format_node()} has no metadata")
        got = run_graph(result, inputs)
        expected = [o for o in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(o, torch.Tensor)]
        if name.split(".")[1] in UNDEFINED:
            return
        for position, (a, e) in enumerate(zip(got, expected, strict=True)):
            problem = compare(a, e)
            if problem:
                self.problems.append(f"decomposition {name}{describe([as_meta(x) for x in args])} result {position}: {problem}")
        if self.numpy_too and all(t.dtype is not torch.bfloat16 for t in (*inputs, *expected)):
            self.check_numpy(name, result, inputs, expected)

    def check_numpy(self, name: str, graph: fx.Graph, inputs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        if any(node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) for node in graph.nodes):
            return
        arrays = [t.detach().resolve_conj().resolve_neg().numpy().copy() for t in inputs]
        if any(t.dtype is torch.float16 or t.is_complex() for t in inputs):
            return
        got = run_graph(graph, arrays, lambda prim: prim.numpy_meaning)
        for a, e in zip(got, expected, strict=True):
            problem = compare(torch.from_numpy(np.array(a)), e)
            if problem:
                self.problems.append(f"numpy {name}: {problem}")


CheckingMode.__torch_dispatch__ = CheckingMode.handle  # type: ignore[assignment]


def as_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorMeta.of(value.detach())
    if isinstance(value, (list, tuple)):
        return [as_meta(v) for v in value]
    return value


def describe(metas: list[Any]) -> str:
    return "(" + ", ".join("[" + ", ".join(map(str, m)) + "]" if isinstance(m, list) else str(m) for m in metas) + ")"


def differ(answer: Any, actual: Any) -> str:
    if isinstance(actual, list):
        if not isinstance(answer, (list, tuple)) or len(answer) != len(actual):
            return f"{len(actual)} results, rule says {answer}"
        return "; ".join(filter(None, (differ(a, b) for a, b in zip(answer, actual, strict=True))))
    if isinstance(actual, TensorMeta):
        if not isinstance(answer, TensorMeta):
            return f"{actual}, rule says {answer}"
        same_strides = answer.strides == actual.strides or actual.numel == 0
        if answer.shape == actual.shape and same_strides and answer.dtype == actual.dtype and answer.device == actual.device:
            return "" if answer.storage_offset == actual.storage_offset else f"offset {actual.storage_offset}, rule {answer.storage_offset}"
        return f"{actual} strides {actual.strides}, rule says {answer} strides {answer.strides}"
    return "" if answer == actual or actual is None else f"{actual}, rule says {answer}"


def one_call(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[fx.Graph, list[torch.Tensor]]:
    graph = fx.Graph()
    inputs: list[torch.Tensor] = []

    def build(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"x{len(inputs)}")
            node.meta["val"] = as_meta(value)
            inputs.append(value.detach())
            return node
        if isinstance(value, (list, tuple)):
            return [build(v) for v in value]
        return value

    node_args = tuple(build(a) for a in args)
    node_kwargs = {k: build(v) for k, v in kwargs.items()}
    call = graph.call_function(func, node_args, node_kwargs)
    metas = as_meta(out)
    call.meta["val"] = tuple(metas) if isinstance(metas, list) else metas
    if isinstance(out, (list, tuple)):
        import operator

        items = []
        for position, item in enumerate(out):
            if isinstance(item, torch.Tensor):
                node = graph.call_function(operator.getitem, (call, position))
                node.meta["val"] = metas[position]
                items.append(node)
        graph.output(tuple(items))
    else:
        graph.output((call,))
    return graph, inputs


def run_graph(graph: fx.Graph, inputs: list[Any], meaning: Any = lambda prim: prim.torch_meaning) -> list[Any]:
    env: dict[fx.Node, Any] = {}
    feed = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(feed)
        elif node.op == "output":
            return list(fx.node.map_arg(node.args[0], lambda n: env[n]))
        else:
            fn = meaning(node.target) if isinstance(node.target, Prim) else node.target
            env[node] = fn(*fx.node.map_arg(node.args, lambda n: env[n]), **fx.node.map_arg(node.kwargs, lambda n: env[n]))
            check_result(node, env[node])
    raise AssertionError("no output")


def check_result(node: fx.Node, value: Any) -> None:
    """What a node's metadata promises is what comes out (shape and dtype)."""
    meta = node.meta["val"]
    if isinstance(value, torch.Tensor) and (tuple(value.shape) != meta.shape or value.dtype is not meta.dtype):
        raise AssertionError(f"{node.format_node()} gives {value.dtype}{tuple(value.shape)}, metadata {meta}")


def compare(got: torch.Tensor, expected: torch.Tensor) -> str:
    if got.shape != expected.shape or got.dtype is not expected.dtype:
        return f"{got.dtype}{tuple(got.shape)} for {expected.dtype}{tuple(expected.shape)}"
    if not expected.dtype.is_floating_point:
        return "" if torch.equal(got, expected) else f"values differ at {(got != expected).nonzero()[:3].tolist()}"
    a, e = got.double(), expected.double()
    if not torch.equal(a.isnan(), e.isnan()):
        return "nan in different places"
    a, e = a.nan_to_num(0.0), e.nan_to_num(0.0)
    finite = e.isfinite() & (e.abs() < 1e300)
    if not torch.equal(a[~finite], e[~finite]):
        return "infinities differ"
    if not finite.any():
        return ""
    scale = e[finite].abs().clamp(min=1e-2)
    error = ((a[finite] - e[finite]).abs() / (scale + 0.1 * e[finite].abs().max())).max().item()
    return "" if error <= TOLERANCE[expected.dtype] else f"error {error:.2e}"
