"""The programs of the talk "TorchDynamo and (maybe) PEP 523"."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn as nn

import magneto
from benchmarks import models
from tests.compare import Capturing, same


def foo(a: torch.Tensor, b: torch.Tensor):
    return torch.add(a, b)


class MyModule(nn.Module):
    def __init__(self):
        super().__init__()
        self._linear = nn.Linear(100, 3)
        self._dropout = nn.Dropout(p=0.3)

    def forward(self, x: torch.Tensor):
        out = self._linear(x)
        out = self._dropout(out)
        return out


class DynamicModule(nn.Module):
    def forward(self, x: torch.Tensor):
        if x.sum() > 0:
            return x * x
        return 3 * x


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_toy_example(backend):
    foo_ = magneto.compile(foo, backend=backend)
    for _ in range(3):
        same(foo, foo_, torch.randn(3, 4), torch.randn(3, 4))
    assert magneto.stats()["graphs"] == 1


def test_opening_up_an_entry():
    """What the talk reads off `cache_entry.check_fn` and `cache_entry.code`: guards and generated source, as text."""
    foo_ = magneto.compile(foo, backend="eager")
    assert len(magneto.inspect(foo_)) == 0
    foo_(torch.randn(3, 4), torch.randn(3, 4))
    (entry,) = magneto.inspect(foo_)
    assert "def " in entry.source and "return" in entry.source
    assert "3" in str(entry.guards) and "4" in str(entry.guards)
    compile(entry.source, "entry", "exec")
    assert [n.op for n in entry.graph.graph.nodes] == ["placeholder", "placeholder", "call_function", "output"]


def test_kernels_of_an_entry():
    foo_ = magneto.compile(lambda a, b: torch.sin(a) + b, backend="inductor")
    foo_(torch.randn(3, 4), torch.randn(3, 4))
    assert any("sin" in kernel for kernel in magneto.inspect(foo_).kernels)


def test_dropout_removed_in_place():
    seen = []

    def my_backend(gm: torch.fx.GraphModule, sample_inputs: list[torch.Tensor]):
        for node in gm.graph.nodes:
            if node.target == torch.nn.functional.dropout:
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
        gm.recompile()
        seen.append(gm.graph)
        return gm.forward

    _without_dropout(my_backend, seen)


def test_dropout_removed_in_a_copy():
    seen = []

    def my_backend(gm: torch.fx.GraphModule, sample_inputs: list[torch.Tensor]):
        new_graph = deepcopy(gm.graph)
        for node in new_graph.nodes:
            if node.target == torch.nn.functional.dropout:
                node.replace_all_uses_with(node.args[0])
                new_graph.erase_node(node)
        new_graph.lint()
        new_gm = torch.fx.GraphModule(root=gm, graph=new_graph)
        seen.append(new_graph)
        return new_gm.forward

    _without_dropout(my_backend, seen)


def _without_dropout(my_backend, seen):
    my_model = MyModule()  # in training mode: dropout would zero about a third
    my_model_ = magneto.compile(my_model, backend=my_backend)
    x = torch.randn(10, 100, dtype=torch.float32)
    out = my_model_(x)
    torch.testing.assert_close(out, my_model._linear(x))
    assert out.grad_fn is not None
    out.sum().backward()
    assert my_model._linear.weight.grad is not None
    (graph,) = seen
    assert not any(n.target == torch.nn.functional.dropout for n in graph.nodes)
    assert sum(n.op == "placeholder" for n in graph.nodes) == 3


def test_names_of_placeholders(capsys):
    pytest.importorskip("tabulate")
    backend = Capturing()
    magneto.compile(MyModule(), backend=backend)(torch.randn(10, 100))
    (gm,) = backend.graphs
    names = {n.name for n in gm.graph.nodes if n.op == "placeholder"}
    assert "l_x_" in names
    assert any("linear" in name and "weight" in name for name in names)
    gm.graph.print_tabular()
    printed = capsys.readouterr().out
    assert "placeholder" in printed and "dropout" in printed


def test_three_graphs_of_a_dynamic_module():
    graphs = []

    def collect_graphs(gm, samples):
        graphs.append(gm.graph)
        return gm.forward

    module = DynamicModule()
    model = magneto.compile(module, backend=collect_graphs)
    x = torch.rand(10)
    torch.testing.assert_close(model(x), module(x))
    torch.testing.assert_close(model(-x), module(-x))
    assert len(graphs) == 3
    sources = [graph.python_code("self").src.strip() for graph in graphs]
    assert "sum" in sources[0] and ">" in sources[0]
    assert sources[1].count("*") == 1 and sources[2].count("*") == 1
    assert "3" in sources[2]


def test_pattern_replacement_by_a_backend():
    """The talk's "even pattern match on a subgraph is possible": torch.fx's subgraph rewriter works on captured graphs."""

    def pattern(a, b):
        return torch.relu(torch.add(a, b))

    def replacement(a, b):
        return torch.add(a, b).clamp(min=0)

    def rewriting(gm, sample_inputs):
        assert len(torch.fx.replace_pattern(gm, pattern, replacement)) == 1
        return gm.forward

    def fn(a, b):
        return torch.relu(torch.add(a, b)) * 2

    same(fn, magneto.compile(fn, backend=rewriting), torch.randn(5), torch.randn(5))


@pytest.mark.models
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_vit_model(backend):
    pytest.importorskip("transformers")
    transformers = models.transformers()
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8
    )
    model = transformers.ViTModel(config).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    model_ = magneto.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model_(**inputs).last_hidden_state, model(**inputs).last_hidden_state, rtol=1e-4, atol=1e-4)
