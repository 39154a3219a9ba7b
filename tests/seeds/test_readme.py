"""The programs of TorchDynamo's README and getting-started page, and of "What's behind PyTorch 2.0?"."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import magneto
import magneto as dynamo
from benchmarks import models
from tests.compare import Capturing, same

TOLERANCE = 1e-5


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1 = nn.Linear(10, 10)
        self.lin2 = nn.Linear(10, 10)

    def forward(self, x):
        x = self.lin1(x)
        x = self.lin2(x)
        return x


def trig(x, y):
    a = torch.cos(x)
    b = torch.sin(y)
    return a + b


def test_as_a_decorator():
    @dynamo.optimize("inductor")
    def fn(x, y):
        a = torch.cos(x)
        b = torch.sin(y)
        return a + b

    same(trig, fn, torch.randn(100), torch.randn(100), tolerance=TOLERANCE)


def test_as_a_function_in_two_steps():
    inductor_compiler = dynamo.optimize("inductor")
    fn = inductor_compiler(trig)
    again = inductor_compiler(trig)
    same(trig, fn, torch.randn(100), torch.randn(100), tolerance=TOLERANCE)
    same(trig, again, torch.randn(7), torch.randn(7), tolerance=TOLERANCE)


def test_sin_of_sin_is_one_kernel(capsys):
    """The documents' point about fusion: two operations, one kernel, and a switch that prints it."""

    def fn(x):
        return torch.sin(torch.sin(x))

    with magneto.config.patch(trace=True):
        optimized = magneto.optimize("inductor")(fn)
        same(fn, optimized, torch.randn(10000), tolerance=TOLERANCE)
    printed = capsys.readouterr()
    assert len(re.findall(r"sin(_f32)?\(", printed.out + printed.err)) >= 2
    assert len(magneto.inspect(optimized).kernels) == 1


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_toy_model(backend):
    mod = ToyModel()
    x = torch.randn(4, 10)
    torch.testing.assert_close(dynamo.optimize(backend)(mod)(x), mod(x), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_whole_training_loop():
    """The README's "you don't need to instrument your PyTorch specific code"."""

    def training_loop(model, batch, optimizer):
        losses = []
        for x, y in batch:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def run(loop):
        torch.manual_seed(1)
        model = ToyModel()
        batch = [(torch.randn(4, 10), torch.randn(4, 10)) for _ in range(4)]
        return loop(model, batch, torch.optim.SGD(model.parameters(), lr=0.1)), [p.detach().clone() for p in model.parameters()]

    losses, weights = run(training_loop)
    our_losses, our_weights = run(dynamo.optimize("inductor")(training_loop))
    torch.testing.assert_close(our_losses, losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(our_weights, weights, rtol=1e-4, atol=1e-5)


def test_adam_outside_of_the_compiled_model():
    """run_model of "What's behind PyTorch 2.0?", small."""

    def run_model(model, forward, inputs, steps=3):
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            forward(inputs).sum().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def weights(compiled):
        torch.manual_seed(2)
        model = ToyModel()
        return run_model(model, dynamo.optimize("inductor")(model) if compiled else model, torch.randn(4, 10))

    torch.testing.assert_close(weights(True), weights(False), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_constant_results_of_a_data_dependent_branch(backend):
    def f1(x):
        if x.sum() < 0:
            return torch.tensor(0)
        return torch.tensor(1)

    dynamo_f1 = dynamo.optimize(backend)(f1)
    x = torch.randn(5, 5)
    for _ in range(2):
        same(f1, dynamo_f1, x)
        same(f1, dynamo_f1, -x)


def test_explain_of_a_function_with_two_graphs(capsys):
    pytest.importorskip("tabulate")

    def f1(x, y):
        z = torch.nn.functional.sigmoid(y)
        if x.sum() < 0:
            x = x * -1
        return z * x

    dynamo.reset()
    x, y = torch.randn(10), torch.randn(10)
    explanation, out_guards, graphs, ops_per_graph, break_reasons, explanation_verbose = dynamo.explain(f1, x, y)
    assert len(graphs) == 2 and len(break_reasons) == 1
    print(explanation_verbose)
    for graph in graphs:
        graph.graph.print_tabular()
    assert "sigmoid" in capsys.readouterr().out


def test_list_backends():
    names = dynamo.list_backends()
    assert {"eager", "aot_eager", "inductor"} <= set(names)
    for name in ("eager", "aot_eager", "inductor"):
        assert callable(dynamo.lookup_backend(name))


def test_unknown_backend_suggests_a_name():
    with pytest.raises(Exception, match="inductor"):
        dynamo.optimize("inducter")(trig)(torch.randn(2), torch.randn(2))


def test_registered_backend():
    seen = []

    @magneto.register_backend
    def my_printing_backend(gm, example_inputs):
        seen.append(gm)
        return gm.forward

    assert "my_printing_backend" in magneto.list_backends()
    same(trig, magneto.optimize("my_printing_backend")(trig), torch.randn(3), torch.randn(3))
    assert len(seen) == 1


def test_reset_compiles_again():
    backend = Capturing()
    opt = magneto.optimize(backend)(trig)
    opt(torch.randn(3), torch.randn(3))
    opt(torch.randn(3), torch.randn(3))
    assert len(backend.graphs) == 1
    magneto.reset()
    opt(torch.randn(3), torch.randn(3))
    assert len(backend.graphs) == 2


def test_disable_and_run():
    backend = Capturing()

    @magneto.disable
    def untouched(x):
        return x.cos() + 1

    def fn(x):
        return untouched(x.sin()) * 2

    same(fn, magneto.optimize(backend)(fn), torch.randn(3))
    assert "cos" not in [name for names in backend.operations() for name in names]

    before = len(backend.graphs)
    same(trig, magneto.run(magneto.optimize(backend)(trig)), torch.randn(3), torch.randn(3))
    assert len(backend.graphs) == before, "run() uses what is compiled and compiles nothing"


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        return x.sin() * self.factor


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_bound_methods(backend):
    half, double = Scaled(0.5), Scaled(2.0)
    x = torch.randn(6)
    for scaled in (half, double):
        apply = magneto.optimize(backend)(scaled.apply)
        torch.testing.assert_close(apply(x), scaled.apply(x), rtol=TOLERANCE, atol=TOLERANCE)
        scaled.factor *= 3
        torch.testing.assert_close(apply(x), scaled.apply(x), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_decorated_methods(backend):
    class Model:
        def __init__(self, bias):
            self.bias = bias

        @magneto.optimize(backend)
        def forward(self, x):
            return torch.relu(x) + self.bias

    for bias in (1.0, 2.0, 1.0):
        x = torch.randn(6)
        torch.testing.assert_close(Model(bias).forward(x), torch.relu(x) + bias)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_nested_functions(backend):
    def outer(x, n):
        total = x * 0

        def add(value):
            nonlocal total
            total = total + value

        def twice(f, value):
            f(value)
            f(value)

        for i in range(n):
            twice(add, x + i)
        return total

    compiled = magneto.optimize(backend)(outer)
    for n in (0, 1, 3):
        same(outer, compiled, torch.randn(4), n, tolerance=TOLERANCE)


def test_numpy_in_the_middle():
    import numpy

    def fn(x):
        y = x * 3
        z = numpy.cumsum(y.numpy(), axis=0)
        return torch.from_numpy(z).sin() + y

    compiled = magneto.optimize("inductor")(fn)
    for _ in range(2):
        same(fn, compiled, torch.randn(4, 3), tolerance=TOLERANCE)


def test_an_exception_is_eagers():
    def fn(x, y):
        z = x.sin()
        return z @ y

    compiled = magneto.optimize("inductor")(fn)
    same(fn, compiled, torch.randn(3, 4), torch.randn(3, 4))
    same(fn, compiled, torch.randn(3, 4), torch.randn(4, 2), tolerance=TOLERANCE)


def test_effects_before_an_exception_are_kept():
    def fn(log, x):
        log.append("before")
        y = x + 1
        log.append(y.shape[0])
        raise ValueError("in the middle")

    compiled = magneto.optimize("inductor")(fn)
    for _ in range(2):
        same(fn, compiled, [], torch.randn(3))


def test_a_backend_that_raises():
    from magneto.base.errors import MagnetoWarning

    def broken(gm, example_inputs):
        raise RuntimeError("no such hardware")

    with pytest.warns(MagnetoWarning, match="no such hardware"):
        same(trig, magneto.optimize(broken)(trig), torch.randn(3), torch.randn(3))
    magneto.reset()
    with pytest.raises(RuntimeError, match="no such hardware"):
        magneto.optimize(broken, nopython=True)(trig)(torch.randn(3), torch.randn(3))


def test_a_non_callable():
    from magneto.base.errors import UserError

    with pytest.raises((UserError, TypeError)):
        magneto.optimize("eager")(3)


@pytest.mark.models
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_bert(backend):
    pytest.importorskip("transformers")
    transformers = models.transformers()
    config = transformers.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=100)
    model = transformers.BertModel(config).eval()
    encoded_input = {"input_ids": torch.randint(100, (2, 12)), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    compiled = magneto.optimize(backend)(model)
    with torch.no_grad():
        for _ in range(2):
            ours, plain = compiled(**encoded_input), model(**encoded_input)
            torch.testing.assert_close(ours.last_hidden_state, plain.last_hidden_state, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours.pooler_output, plain.pooler_output, rtol=1e-4, atol=1e-4)


@pytest.mark.models
@pytest.mark.slow
def test_a_timm_resnext():
    from benchmarks.models import torchvision

    torchvision()
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnext26ts", pretrained=False, num_classes=2).eval()
    opt_model = magneto.optimize("inductor")(model)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(opt_model(x), model(x), rtol=1e-4, atol=1e-4)
