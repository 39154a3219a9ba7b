"""The minimum cut, and the text of wrappers."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import magneto
from magneto.aot_autograd import partition, recompute
from magneto.aot_autograd.mincut import min_cut
from magneto.aot_autograd.signature import Apart
from magneto.aot_autograd.trace import trace
from magneto.aot_autograd.wrap import Writer
from tests.aot_autograd.capture import capture


def had(nodes: list[fx.Node], kept: set[fx.Node], recomputable: set[fx.Node]) -> set[fx.Node]:
    result = set(kept)
    for node in nodes:
        if node in recomputable and all(source in result for source in node.all_input_nodes):
            result.add(node)
    return result


def test_cut_is_the_cheapest() -> None:
    """Against all subsets, on small random graphs."""
    for seed in range(150):
        r = random.Random(seed)
        graph = fx.Graph()
        nodes: list[fx.Node] = []
        for i in range(r.randrange(2, 9)):
            sources = tuple(r.sample(nodes, min(len(nodes), r.randrange(1, 3)))) if i else ()
            nodes.append(graph.call_function(max, sources))
        price = {node: r.randrange(1, 20) for node in nodes}
        recomputable = {node for node in nodes if node.all_input_nodes and r.random() < 0.7}
        read = r.sample(nodes, r.randrange(1, len(nodes) + 1))
        cut = min_cut(read, price.__getitem__, recomputable.__contains__)
        assert set(read) <= had(nodes, set(cut), recomputable)
        subsets = itertools.chain.from_iterable(itertools.combinations(nodes, k) for k in range(len(nodes) + 1))
        best = min(sum(map(price.__getitem__, s)) for s in subsets if set(read) <= had(nodes, set(s), recomputable))
        assert sum(map(price.__getitem__, cut)) == best


def test_wrapper_reads_well() -> None:
    def f(x, y):
        x.add_(1)
        z = y.exp()
        return z, z[0], x.t(), None

    gm, _ = capture(f, torch.randn(2, 3), torch.randn(2, 3))
    signature = trace(gm, [torch.randn(2, 3), torch.randn(2, 3)]).signature
    assert Writer(signature).text()[0] == (
        "def wrapper(a0, a1):\n"
        "    where = addresses((a0, a1, ))\n"
        "    if where != seen[0]:\n"
        "        if not apart(where):\n"
        "            return fallback(a0, a1)\n"
        "        seen[0] = where\n"
        "    r0, r1, = graph(a0, a1)\n"
        "    a0.copy_(r1)\n"
        "    try:\n"
        "        v0 = r0.select(0, 0)\n"
        "        v1 = a0.t()\n"
        "        return (r0, v0, v1, None, )\n"
        "    except Exception as error:\n"
        "        error.magneto_applied = True\n"
        "        raise\n"
    )


def test_memory_that_is_shared() -> None:
    """Against every pair of inputs of which one is written."""
    r = random.Random(0)
    for _ in range(300):
        n = r.randrange(2, 6)
        starts, spans = tuple(r.randrange(12) for _ in range(n)), tuple(r.randrange(5) for _ in range(n))
        written = frozenset(i for i in range(n) if r.random() < 0.4)
        taken = [set(range(start, start + span)) for start, span in zip(starts, spans, strict=True)]
        shares = any(i in written and taken[i] & taken[j] for i in range(n) for j in range(n) if i != j)
        assert Apart(tuple(range(n)), spans, written).holds(starts) is not shares


def test_nothing_to_do_is_no_wrapper() -> None:
    gm, _ = capture(lambda x: (x + 1, x * 2), torch.randn(3))
    assert trace(gm, [torch.randn(3)]).signature.trivial


def _programs() -> dict[str, Any]:
    def clone_of_a_buffer(x, w, b):
        return x * w.sum() * b.detach().clone()

    def result_of_relu(x, w, b):
        return torch.relu(x @ w + b)

    def buffer_in_a_product(x, w, b):
        return torch.tanh(x + b) * b

    def weight_and_view(x, w, b):
        return F.gelu(x @ w.t() + b) * w[0]

    def results_again(x, w, b):
        y = x * 2
        return y, torch.sin(y) * b

    return {fn.__name__: fn for fn in (clone_of_a_buffer, result_of_relu, buffer_in_a_product, weight_and_view, results_again)}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("written", ["nothing", "x", "w", "b", "result"])
@pytest.mark.parametrize("name", list(_programs()))
def test_what_the_caller_writes_before_backward(name: str, written: str, backend: str) -> None:
    """The gradients, or the error, of eager: what is kept for backward is checked for writes only where eager keeps that very tensor."""
    outcomes = []
    for fn in (_programs()[name], magneto.optimize(backend)(_programs()[name])):
        generator = torch.Generator().manual_seed(1)
        x, w, b = (torch.randn(*shape, generator=generator) for shape in ((3, 3), (3, 3), (3,)))
        x.requires_grad_()
        w.requires_grad_()
        results = fn(x, w, b)
        results = results if isinstance(results, tuple) else (results,)
        loss = sum(result.sum() for result in results)
        with torch.no_grad():
            if written != "nothing":
                {"x": x, "w": w, "b": b, "result": results[0]}[written].add_(1)
        try:
            loss.backward()
            outcomes.append([x.grad, w.grad])
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            outcomes.append(RuntimeError)
    if RuntimeError in outcomes:
        assert outcomes[0] is outcomes[1]
        return
    for got, expected in zip(outcomes[1], outcomes[0], strict=True):
        assert (got is None) == (expected is None)
        assert got is None or torch.allclose(got, expected, atol=1e-6)


class Residual(torch.nn.Module):
    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.convolutions = torch.nn.ModuleList([torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)])
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm2d(8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = norm(convolution(x))
            x = torch.relu(y + x if self.residual else y)
        return x.mean((1, 2, 3))


def step(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("whole", [False, True])
def test_sums_at_the_ends_of_blocks_are_kept_on_a_gpu(monkeypatch: pytest.MonkeyPatch, whole: bool, residual: bool) -> None:
    """What a convolution reads in both directions is not computed from all blocks before it."""
    found: list[int] = []
    for place in (partition, recompute):
        chosen = place.dear
        monkeypatch.setattr(place, "dear", lambda *args, chosen=chosen: found.append(len(chosen(*args))) or chosen(*args))
    outcomes = []
    for on_gpu in (None, False, True):
        magneto.reset()
        monkeypatch.setattr(recompute, "_on_gpu", lambda meta, on_gpu=on_gpu: on_gpu)
        torch.manual_seed(3)
        model, x = Residual(residual), torch.randn(2, 8, 9, 9)

        for _ in range(2):  # the first of them makes the gradients
            if on_gpu is None:
                loss = step(model, x)
            elif whole:
                loss = magneto.optimize("inductor")(step)(model, x)
            else:
                loss = magneto.optimize("inductor")(model)(x).square().sum()
                loss.backward()
        outcomes.append([loss, *(p.grad for p in model.parameters())])
    assert found[0] == 0 and found[-1] == 3, found
    for outcome in outcomes[1:]:
        torch.testing.assert_close(outcome, outcomes[0], rtol=1e-4, atol=1e-5)


def relu_behind_a_norm(size: int) -> tuple[partition.Partition, list[torch.Tensor], list[torch.Tensor]]:
    """Cut as for a GPU; what the backward is called with, and the gradients that eager gives."""
    from magneto.aot_autograd.decomposed import decompose_joint
    from magneto.aot_autograd.joint import trace_joint
    from tests.ops.checking import run_graph

    def net(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.conv2d(torch.relu(F.batch_norm(F.conv2d(x, w, padding=1), None, None, scale, bias, training=True)), v, padding=1)

    torch.manual_seed(0)
    inputs = [torch.randn(4, 3, size, size), *(torch.randn(s).requires_grad_() for s in ((16, 3, 3, 3), (16,), (16,), (8, 16, 3, 3)))]
    with mock.patch.object(recompute, "_on_gpu", lambda meta: True):
        cut = partition.partition(decompose_joint(trace_joint(fx.symbolic_trace(net), inputs)))
    tangent = torch.randn(4, 8, size, size)
    wanted = torch.autograd.grad(net(*inputs), inputs[1:], tangent)
    plain = [t.detach() for t in inputs]
    results = run_graph(cut.forward, plain)
    n = len(results) - sum(k.kind == "extra" for k in cut.kept)
    sources = {"input": plain, "result": results[:n], "extra": results[n:]}
    return cut, [*(sources[k.kind][k.index] for k in cut.kept), tangent], [*wanted]


def test_a_relus_sign_is_that_of_what_was_normalised() -> None:
    """The convolution alone reads the relu's result, which is kept for it; the gradient behind the relu is written by no kernel: one writes that behind the norm."""
    from magneto.inductor.loops.ir import LibraryCall
    from magneto.inductor.lower import lower_graph
    from magneto.inductor.schedule.kernel import FusedKernel
    from magneto.inductor.schedule.schedule import schedule
    from magneto.inductor.schedule.split import split_reductions

    cut, given, wanted = relu_behind_a_norm(96)
    readers = {
        str(u.target) for n in cut.backward.nodes if n.op == "placeholder" and n.meta["val"].shape == (4, 16, 96, 96) for u in n.users
    }
    assert readers == {"aten.convolution_backward.default", "prims.mul", "prims.sub"}
    relus = [
        n
        for n in cut.backward.nodes
        if n.op == "placeholder" and {u.target for u in n.users} == {torch.ops.aten.convolution_backward.default}
    ]
    assert [n.meta["val"].shape for n in relus].count((4, 16, 96, 96)) == 1
    plan = schedule(split_reductions(lower_graph(cut.backward, on_gpu=True)), training=True)
    kernels = [step for step in plan.steps if isinstance(step, FusedKernel)]
    assert sum(isinstance(step, LibraryCall) for step in plan.steps) == 2
    assert [shape for k in kernels for n in k.stored if len(shape := plan.buffers[n].shape) == 4] == [(4, 16, 96, 96)]
    found = torch.fx.Interpreter(fx.GraphModule({}, cut.backward)).run(*given)
    for g, expected in zip(cut.gradients[1:], wanted, strict=True):
        torch.testing.assert_close(found[g], expected, rtol=1e-3, atol=1e-3)  # type: ignore[index]


def test_what_is_read_at_places_by_formula_is_read_again() -> None:
    """A cross product keeps its factors for backward, as eager does, and no rolled copies of them; what is looked up by indices that are data is kept."""
    from magneto.aot_autograd.decomposed import decompose_joint
    from magneto.aot_autograd.joint import trace_joint

    def kept(net: Any, *inputs: torch.Tensor) -> list[tuple[str, tuple[int, ...]]]:
        joint = trace_joint(fx.symbolic_trace(net), list(inputs))
        cut = partition.partition(decompose_joint(joint))
        metas = [node.meta["val"] for node in cut.backward.nodes if node.op == "placeholder"]
        return [(k.kind, tuple(meta.shape)) for k, meta in zip(cut.kept, metas, strict=False)]

    a, b = (torch.randn(50, 3).requires_grad_() for _ in range(2))
    assert kept(lambda a, b: torch.linalg.cross(a, b), a, b) == [("input", (50, 3))] * 2
    index = torch.randint(50, (2000,))
    found = kept(lambda a, i: (a.index_select(0, i) * 2).sin(), a, index)
    assert ("extra", (2000, 3)) in found
