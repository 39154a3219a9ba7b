"""Graphs written as programs run alone."""

from __future__ import annotations

import operator
import subprocess
import sys

import torch
from torch import fx

from magneto.graph.meta import TensorMeta
from magneto.graph.program import standalone


def run(text, tmp_path):
    path = tmp_path / "graph.py"
    path.write_text(text)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr + text
    return done.stdout


def graph_of(build, *metas):
    graph = fx.Graph()
    nodes = []
    for i, meta in enumerate(metas):
        node = graph.placeholder(f"x{i}")
        node.meta["val"] = meta
        nodes.append(node)
    graph.output(build(graph, *nodes))
    return graph


def test_functions_methods_and_operators(tmp_path):
    def build(g, x, y, n):
        z = g.call_function(torch.nn.functional.gelu, (x,))
        z = g.call_method("add", (z, y))
        z = g.call_function(operator.mul, (z, n))
        z = g.call_function(torch.ops.aten.sum.dim_IntList, (z, [1]))
        z = g.call_function(torch.clamp, (z,), {"max": float("inf")})
        return (g.call_method("to", (z,), {"dtype": torch.float64, "device": torch.device("cpu")}),)

    meta = TensorMeta.of(torch.ones(2, 3))
    out = run(standalone(graph_of(build, meta, meta, 3)), tmp_path)
    assert "dtype=torch.float64" in out


def test_layout_dtypes_and_gradients(tmp_path):
    def build(g, *xs):
        return tuple(g.call_method("stride", (x,)) for x in xs)

    metas = [
        TensorMeta.of(t)
        for t in (torch.ones(2, 3).t(), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool), torch.ones(1).expand(3))
    ]
    metas.append(torch.ones(2, requires_grad=True))
    text = standalone(graph_of(build, *metas))
    assert run(text, tmp_path).strip() == "((1, 3), (1,), (1,), (0,), (1,))"
    assert text.count("requires_grad=True)") == 1


def test_constants(tmp_path):
    root = torch.nn.Module()
    root.small = torch.tensor([1.0, 2.0])
    root.inner = torch.nn.Module()
    root.inner.large = torch.ones(200)
    graph = fx.Graph()
    graph.output((graph.get_attr("small"), graph.call_method("numel", (graph.get_attr("inner.large"),))))
    out = run(standalone(fx.GraphModule(root, graph)), tmp_path)
    assert out.strip() == "(tensor([1., 2.]), 200)"


def test_no_inputs(tmp_path):
    graph = fx.Graph()
    graph.output((graph.call_function(torch.zeros, (2,)),))
    assert run(standalone(graph, 'with """ in the title'), tmp_path).strip() == "(tensor([0., 0.]),)"
