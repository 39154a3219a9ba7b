"""The programs of the TorchDynamo and TorchInductor tutorial; only the import differs."""

from __future__ import annotations

import pytest
import torch

import magneto as dynamo
from magneto.base.errors import Unsupported
from tests.compare import Capturing, same

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
TOLERANCE = 1e-5


def foo(x, y):
    a = torch.sin(x)
    b = torch.cos(x)
    return a + b


class MyModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(100, 10)

    def forward(self, x):
        return torch.nn.functional.relu(self.lin(x))


def f1(x, y):
    if x.sum() < 0:
        return -y
    return y


def f2(x, y):
    return x + y


def bar(a, b):
    x = a / (torch.abs(a) + 1)
    if b.sum() < 0:
        b = b * -1
    return x * b


LINE_OF_BREAK = bar.__code__.co_firstlineno + 2


@BACKENDS
def test_function_form(backend):
    opt_foo1 = dynamo.optimize(backend)(foo)
    same(foo, opt_foo1, torch.randn(10, 10), torch.randn(10, 10), tolerance=TOLERANCE)
    assert dynamo.stats()["graphs"] == 1


@BACKENDS
def test_decorator_form(backend):
    @dynamo.optimize(backend)
    def opt_foo2(x, y):
        a = torch.sin(x)
        b = torch.cos(x)
        return a + b

    assert opt_foo2.__name__ == "opt_foo2"
    same(foo, opt_foo2, torch.randn(10, 10), torch.randn(10, 10), tolerance=TOLERANCE)


@BACKENDS
def test_module(backend):
    mod = MyModule()
    opt_mod = dynamo.optimize(backend)(mod)
    x = torch.randn(10, 100)
    torch.testing.assert_close(opt_mod(x), mod(x), rtol=TOLERANCE, atol=TOLERANCE)
    assert dynamo.stats()["graphs"] == 1


@BACKENDS
def test_module_gradients(backend):
    mod = MyModule()
    x = torch.randn(10, 100)
    mod(x).sum().backward()
    expected = [p.grad.clone() for p in mod.parameters()]
    mod.zero_grad()
    dynamo.optimize(backend)(mod)(x).sum().backward()
    for p, grad in zip(mod.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-4)


@BACKENDS
def test_data_dependent_control_flow(backend):
    dynamo_f1 = dynamo.optimize(backend)(f1)
    inp1, inp2 = torch.randn(5, 5), torch.randn(5, 5)
    for _ in range(2):
        same(f1, dynamo_f1, inp1, inp2)
        same(f1, dynamo_f1, -inp1, inp2)


@BACKENDS
def test_an_int_argument(backend):
    dynamo_f2 = dynamo.optimize(backend)(f2)
    inp1 = torch.randn(5, 5)
    for number in (3, 3, 4, -7):
        same(f2, dynamo_f2, inp1, number)
    same(f2, dynamo_f2, 3, 4)


@BACKENDS
def test_scipy_in_the_middle(backend):
    scipy_fft = pytest.importorskip("scipy.fft")

    def f3(x):
        x = x * 2
        x = scipy_fft.dct(x.numpy())
        x = torch.from_numpy(x)
        x = x * 2
        return x

    dynamo_f3 = dynamo.optimize(backend)(f3)
    for _ in range(2):
        same(f3, dynamo_f3, torch.randn(5, 5), tolerance=TOLERANCE)
    assert dynamo.stats()["graphs"] >= 2


def test_custom_backend_sees_both_branches_as_three_graphs():
    backend = Capturing()
    opt_bar = dynamo.optimize(backend)(bar)
    inp1, inp2 = torch.randn(10), torch.rand(10)
    same(bar, opt_bar, inp1, inp2)
    same(bar, opt_bar, inp1, -inp2)
    assert len(backend.graphs) == 3
    first, positive, negative = backend.operations()
    assert first[:3] == ["abs", "add", "truediv"] and "sum" in first
    assert positive == ["mul"] and negative == ["mul", "mul"]
    same(bar, opt_bar, inp1, inp2)
    same(bar, opt_bar, inp1, -inp2)
    assert len(backend.graphs) == 3, "nothing is compiled again"


def test_custom_backend_prints_the_graph(capsys):
    pytest.importorskip("tabulate")

    def custom_backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
        print("custom backend called with FX graph:")
        gm.graph.print_tabular()
        return gm.forward

    dynamo.reset()
    opt_bar = dynamo.optimize(custom_backend)(bar)
    opt_bar(torch.randn(10), torch.rand(10))
    printed = capsys.readouterr().out
    assert printed.count("custom backend called with FX graph:") == 2
    assert "placeholder" in printed and "call_function" in printed and "output" in printed


def test_explain_unpacks_as_six_values():
    explanation, out_guards, graphs, ops_per_graph, break_reasons, explanation_verbose = dynamo.explain(
        bar, torch.randn(10), torch.rand(10)
    )
    assert len(graphs) == 2 and len(ops_per_graph) == 2 and len(break_reasons) == 1
    assert out_guards
    assert sum(map(len, ops_per_graph)) >= 5
    assert "2 graphs" in str(explanation) and "1 graph break" in str(explanation)
    assert f"{__file__}" in str(explanation_verbose) and str(LINE_OF_BREAK) in str(explanation_verbose)
    assert all(isinstance(gm, torch.fx.GraphModule) for gm in graphs)


def test_explain_prints_a_readable_summary():
    text = str(dynamo.explain(bar, torch.randn(10), torch.rand(10)))
    assert "B012" in text and f":{LINE_OF_BREAK}" in text
    assert len(text.splitlines()) > 3


def test_explain_does_not_change_what_was_compiled():
    backend = Capturing()
    opt_bar = dynamo.optimize(backend)(bar)
    opt_bar(torch.randn(10), torch.rand(10))
    dynamo.explain(bar, torch.randn(10), torch.rand(10))
    opt_bar(torch.randn(10), torch.rand(10))
    assert len(backend.graphs) == 2


def test_nopython_raises_at_the_first_break_with_the_users_line():
    opt_bar = dynamo.optimize("eager", nopython=True)(bar)
    with pytest.raises(Unsupported) as caught:
        opt_bar(torch.randn(10), torch.randn(10))
    assert caught.value.id == "B012"
    file, line, function = caught.value.user_stack[-1]
    assert (file, line, function) == (__file__, LINE_OF_BREAK, "bar")
    assert f'File "{__file__}", line {LINE_OF_BREAK}, in bar' in str(caught.value)
    assert "if b.sum() < 0:" in str(caught.value)


def test_nopython_keeps_raising():
    opt_bar = dynamo.optimize("eager", nopython=True)(bar)
    for _ in range(3):
        with pytest.raises(Unsupported):
            opt_bar(torch.randn(10), torch.randn(10))


def test_nopython_accepts_one_graph():
    opt_foo = dynamo.optimize("eager", nopython=True)(foo)
    same(foo, opt_foo, torch.randn(3), torch.randn(3))


def test_export_raises_at_a_break():
    with pytest.raises(Exception) as caught:
        dynamo.export(bar, torch.randn(10), torch.randn(10))
    assert "b.sum()" in str(caught.value) or str(LINE_OF_BREAK) in str(caught.value)


def test_export_gives_a_module_with_the_same_signature():
    mod = MyModule()
    x = torch.randn(10, 100)
    exported, guards = dynamo.export(mod, x)
    assert isinstance(exported, torch.fx.GraphModule)
    torch.testing.assert_close(exported(x), mod(x))
    assert guards is not None
    torch.testing.assert_close(dynamo.export(mod, x)[0](x * 2), mod(x * 2))


def test_export_of_aten_operations():
    mod = MyModule().eval()
    x = torch.randn(10, 100)
    exported, _ = dynamo.export(mod, x, aten_graph=True)
    torch.testing.assert_close(exported(x), mod(x))
    calls = [n.target for n in exported.graph.nodes if n.op == "call_function"]
    assert calls and all(str(target).startswith(("aten.", "prims.")) for target in calls)


@pytest.mark.models
@BACKENDS
def test_resnet18_inference(backend):
    from benchmarks.models import torchvision

    model = torchvision().models.resnet18().eval()

    def evaluate(mod, inp):
        return mod(inp)

    eval_opt = dynamo.optimize(backend)(evaluate)
    with torch.no_grad():
        for _ in range(2):
            inp = torch.randn(2, 3, 64, 64)
            torch.testing.assert_close(eval_opt(model, inp), evaluate(model, inp), rtol=1e-4, atol=1e-4)
    assert dynamo.stats()["graphs"] == 1 and dynamo.stats()["breaks"] == 0


@pytest.mark.models
@pytest.mark.slow
def test_resnet18_training_step():
    import copy

    from benchmarks.models import torchvision

    def train(mod, data):
        pred = mod(data[0])
        loss = torch.nn.CrossEntropyLoss()(pred, data[1])
        loss.backward()

    data = torch.randn(2, 3, 64, 64), torch.randint(1000, (2,))
    model = torchvision().models.resnet18()
    twin = copy.deepcopy(model)
    train_opt = dynamo.optimize("inductor")(train)
    for _ in range(2):
        model.zero_grad(True)
        twin.zero_grad(True)
        train(twin, data)
        train_opt(model, data)
        for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-2, atol=1e-3)
    for ours, plain in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.models
def test_resnet18_is_one_graph():
    from benchmarks.models import torchvision

    model = torchvision().models.resnet18()
    x = torch.randn(2, 3, 64, 64)
    dynamo.optimize("eager", nopython=True)(model)(x)
    assert dynamo.stats()["graphs"] == 1
    exported = dynamo.export(model.eval(), x)
    torch.testing.assert_close(exported[0](x), model(x))
