"""Tensors of other devices never reach CPU kernels."""

from __future__ import annotations

import torch
from torch import fx

from magneto.base import events
from magneto.graph import TensorMeta
from magneto.inductor.compile import compile_graph
from magneto.prims import prims


def test_a_graph_of_another_device_runs_operation_by_operation() -> None:
    """The meta device stands for any that is not the CPU."""
    x = torch.empty(4, device="meta")
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = TensorMeta.of(x)
    result = graph.call_function(prims.neg if hasattr(prims, "neg") else torch.neg, (node,))
    result.meta["val"] = TensorMeta.of(x)
    graph.output((result,))
    (out,) = compile_graph(graph)(x)
    assert out.device.type == "meta" and out.shape == (4,)
    assert [event.fields["reason"] for event in events.events("fallback")] == ["no kernels for meta yet"]
