"""Convolutional networks on a GPU, as far as that shows without one: layouts, what becomes part of a convolution, who adds a bias. The rewritten graphs run on the CPU."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from magneto.aot_autograd.decomposed import lay_out_joint
from magneto.aot_autograd.joint import JointGraph, trace_joint
from magneto.aot_autograd.trace import trace
from magneto.inductor import layout
from magneto.inductor.convolve_cudnn import ADD_RELU, RELU, fold_cudnn
from magneto.inductor.layout import lay_out
from magneto.inductor.loops.ir import LibraryCall, Pointwise
from magneto.inductor.lower import lower_graph
from magneto.prims.decompose import decompose

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
Net = Callable[..., Any]


@pytest.fixture(autouse=True)
def free_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the network. TF32 as torch has it by default."""
    monkeypatch.setattr(layout, "GPU", dataclasses.replace(layout.GPU, launch=0.0))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def sent(graph: fx.Graph, device: torch.device = CUDA) -> fx.Graph:
    """The graph as it would be for tensors on a GPU."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, tuple | list):
            node.meta["val"] = tuple(v if v is None else v.with_(device=device) for v in value)
        elif hasattr(value, "with_"):
            node.meta["val"] = value.with_(device=device)
    return graph


def traced(net: Net, *inputs: torch.Tensor) -> fx.Graph:
    with torch.no_grad():
        return sent(trace(fx.symbolic_trace(net), inputs).graph)


def fused(x: torch.Tensor, w: torch.Tensor, *rest: Any) -> torch.Tensor:
    """What cuDNN's fused operations compute."""
    z, alpha, (bias, stride, padding, dilation, groups) = (rest[0], rest[1], rest[2:]) if len(rest) == 7 else (0.0, 0.0, rest)
    return torch.relu(F.conv2d(x, w, bias, stride, padding, dilation, groups) + alpha * z)


def values(graph: fx.Graph, inputs: tuple[torch.Tensor, ...]) -> dict[fx.Node, Any]:
    """What every node computes; its strides must be what its metadata says."""
    env: dict[fx.Node, Any] = dict(zip([n for n in graph.nodes if n.op == "placeholder"], inputs, strict=True))
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = (fused if node.target in (RELU, ADD_RELU) else node.target)(*args, **kwargs)
            if isinstance(env[node], torch.Tensor):
                assert env[node].stride() == node.meta["val"].strides, node.format_node()
    return env


def counted(graph: fx.Graph, target: Any) -> int:
    return sum(node.target is target for node in graph.nodes)


W = [0.1 * torch.randn(shape) for shape in ((16, 8, 3, 3), (16, 16, 3, 3), (16, 8, 1, 1))]
STATISTICS = (torch.randn(16) * 0.3, torch.rand(16) + 0.5, torch.randn(16), torch.randn(16))


def norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, mean, var, gamma, beta)


def block(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, m: Any, v: Any, g: Any, h: Any) -> torch.Tensor:
    """As in a residual network: two convolutions, and one on the shortcut."""
    y = torch.relu(norm(F.conv2d(x, a, padding=1), m, v, g, h))
    return torch.relu(norm(F.conv2d(y, b, padding=1), m, v, g, h) + norm(F.conv2d(x, c), m, v, g, h))


def test_a_block_becomes_three_calls() -> None:
    inputs = (torch.randn(4, 8, 24, 24), *W, *STATISTICS)
    plain = traced(block, *inputs)
    laid = lay_out(plain)
    assert [n.meta["val"].is_channels_last() for n in laid.nodes if n.target is aten.convolution.default] == [True] * 3
    graph = fold_cudnn(laid)
    graph.lint()
    assert [counted(graph, t) for t in (RELU, ADD_RELU, aten.convolution.default, aten.native_batch_norm.default)] == [1, 1, 1, 0]
    assert counted(graph, aten.rsqrt.default) == 1  # of all norms
    found, wanted, exact = (
        values(g, i)[g.output_node().args[0][0]] for g, i in ((graph, inputs), (plain, inputs), (plain, tuple(t.double() for t in inputs)))
    )
    assert found.stride() == wanted.stride()
    assert (found - exact).abs().max() <= 2 * (wanted - exact).abs().max() + 1e-6


def test_a_chain_of_blocks() -> None:
    """The residual of one block is the end of the one before."""
    square = 0.1 * torch.randn(16, 16, 3, 3)

    def net(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, m: Any, v: Any, g: Any, h: Any) -> torch.Tensor:
        for _ in range(3):
            x = torch.relu(norm(F.conv2d(x, w, bias, padding=1), m, v, g, h) + x)
        return x

    inputs = (torch.randn(2, 16, 24, 24).contiguous(memory_format=torch.channels_last), square, torch.randn(16), *STATISTICS)
    plain = traced(net, *inputs)
    graph = fold_cudnn(lay_out(plain))
    graph.lint()
    assert counted(graph, ADD_RELU) == 3
    torch.testing.assert_close(values(graph, inputs)[graph.output_node().args[0][0]], net(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("why", ["training", "depthwise", "no TF32", "heavy weights"])
def test_what_is_not_folded(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no TF32":
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    size, groups = (3 if why == "heavy weights" else 24), (16 if why == "depthwise" else 1)

    def net(x: torch.Tensor, w: torch.Tensor, m: Any, v: Any, g: Any, h: Any) -> torch.Tensor:
        return torch.relu(F.batch_norm(F.conv2d(x, w, padding=1, groups=groups), m, v, g, h, training=why == "training"))

    x = torch.randn(1, 16, size, size).contiguous(memory_format=torch.channels_last)
    graph = lay_out(traced(net, x, torch.randn(16, 16 // groups, 3, 3), *STATISTICS))
    assert fold_cudnn(graph) is graph


def test_layout_stays_without_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = (torch.randn(4, 8, 24, 24), *W, *STATISTICS)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    graph = traced(block, *inputs)
    assert lay_out(graph) is graph


# ---- training --------------------------------------------------------------------------------------------------------------


def joint_of(net: Net, *inputs: torch.Tensor) -> JointGraph:
    joint = trace_joint(fx.symbolic_trace(net), inputs)
    sent(joint.graph)
    return joint


def test_training_goes_channels_last_in_both_directions() -> None:
    def net(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x = torch.relu(F.batch_norm(F.conv2d(x, a, padding=1), None, None, training=True))
        return F.conv2d(F.max_pool2d(x, 2), b, padding=1).mean((2, 3))

    inputs = (torch.randn(4, 8, 24, 24), W[0].clone().requires_grad_(), W[1].clone().requires_grad_())
    joint = joint_of(net, *inputs)
    made = lay_out_joint(joint, lay_out)
    assert made is not joint
    for node in made.graph.nodes:
        if node.target is aten.convolution.default:
            assert node.meta["val"].is_channels_last()
        if node.target is aten.convolution_backward.default:
            assert node.args[1].meta["val"].is_channels_last()
    given = (*(t.detach() for t in inputs), torch.randn(4, 16))
    before, after = values(joint.graph, given), values(made.graph, given)
    pairs = [*zip(joint.results, made.results, strict=True), *zip(joint.gradients, made.gradients, strict=True)]
    for old, new in pairs:
        assert (old is None) is (new is None)
        if old is not None and new is not None:
            torch.testing.assert_close(after[new], before[old], rtol=1e-4, atol=1e-5)
            assert after[new].stride() == before[old].stride()
            assert old.meta["stage"] == new.meta["stage"]


def test_a_result_that_backward_reads_keeps_its_layout() -> None:
    """Autograd checks that nobody writes it: it must be the very tensor that is kept."""
    joint = joint_of(lambda x, w: torch.relu(F.conv2d(x, w, padding=1)), torch.randn(4, 8, 24, 24), W[0].clone().requires_grad_())
    assert lay_out_joint(joint, lay_out) is joint


# ---- biases ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("follows", [True, False])
def test_who_adds_the_bias(follows: bool) -> None:
    """What follows, where loops follow; the library, where its result leaves."""

    def net(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, w, b)
        return torch.sigmoid(y) if follows else y

    program = lower_graph(decompose(traced(net, torch.randn(2, 8, 9, 9), W[0], torch.randn(16))))
    (call,) = [node for node in program.nodes if isinstance(node, LibraryCall)]
    assert (call.args[2] is None) is follows
    assert sum(isinstance(node, Pointwise) for node in program.nodes) == follows
    assert operator.truth(call.buffers)


def test_strides_of_single_channels_are_eagers() -> None:
    """What a library call returns channels-last leaves with the strides of a contiguous tensor, where these differ in name only."""
    from magneto.inductor.compile import compile_graph

    def net(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w).clone(memory_format=torch.contiguous_format)

    inputs = (torch.randn(2, 8, 9, 9).contiguous(memory_format=torch.channels_last), torch.randn(1, 8, 3, 3))
    with torch.no_grad():
        graph = trace(fx.symbolic_trace(net), inputs).graph
    (found,) = compile_graph(decompose(graph))(*inputs)
    assert found.stride() == net(*inputs).stride() == (49, 49, 7, 1)
    assert not found._is_view()
    torch.testing.assert_close(found, net(*inputs))
