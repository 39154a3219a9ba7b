"""Channels-last layout of convolutional networks: same values, eager's strides, and only where it pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn

import magneto
from magneto.aot_autograd.call import as_function
from magneto.aot_autograd.trace import trace
from magneto.inductor import layout

aten = torch.ops.aten


@pytest.fixture
def free_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wish is granted, however small the network."""
    monkeypatch.setattr(layout, "COSTS", dataclasses.replace(layout.COSTS, copy=0.0))


def traced(fn: Callable[..., Any], *inputs: torch.Tensor) -> fx.Graph:
    gm = fx.symbolic_trace(fn)
    with torch.no_grad():
        return trace(gm, inputs).graph


def copies(graph: fx.Graph) -> int:
    return sum(node.target is aten.clone.default for node in graph.nodes)


def formats(graph: fx.Graph) -> list[bool]:
    """For each convolution: is its result channels-last?"""
    return [node.meta["val"].is_channels_last() for node in graph.nodes if node.target is aten.convolution.default]


def same_as_before(graph: fx.Graph, *inputs: torch.Tensor) -> fx.Graph:
    """The graph laid out; checks every node's strides by running it, and the results against the original's."""
    made = layout.lay_out(graph)
    made.lint()
    expected, found = as_function(graph)(*inputs), as_function(made)(*inputs)
    for want, got, node in zip(expected, found, made.output_node().args[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert got.stride() == want.stride() == node.meta["val"].strides
    env: dict[fx.Node, Any] = dict(zip([n for n in made.nodes if n.op == "placeholder"], inputs, strict=True))
    for node in made.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
            if isinstance(env[node], torch.Tensor):
                assert env[node].stride() == node.meta["val"].strides, node.format_node()
    return made


W1, W2, STEM = (0.1 * torch.randn(shape) for shape in ((32, 16, 3, 3), (32, 32, 3, 3), (16, 3, 3, 3)))


@pytest.mark.usefixtures("free_copies")
def test_one_copy_at_the_entry_and_one_at_the_exit() -> None:
    def net(x: torch.Tensor, stem: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(F.relu(F.conv2d(x, stem, padding=1)), w1, padding=1)
        return F.relu(F.conv2d(F.max_pool2d(x, 2), w2, padding=1)) + F.avg_pool2d(x, 2)

    inputs = (torch.randn(2, 3, 32, 32), STEM, W1, W2)
    made = same_as_before(traced(net, *inputs), *inputs)
    assert formats(made) == [True, True, True]
    assert copies(made) == 2


@pytest.mark.usefixtures("free_copies")
def test_a_view_that_needs_memory_order_gets_it_back() -> None:
    def net(x: torch.Tensor, stem: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.conv2d(x, stem)
        return y.flatten(1) * 2, y.permute(0, 2, 3, 1).mean(-1)

    inputs = (torch.randn(2, 3, 32, 32), STEM)
    assert formats(same_as_before(traced(net, *inputs), *inputs)) == [True]


@pytest.mark.usefixtures("free_copies")
def test_operations_that_see_memory_get_eagers_strides() -> None:
    def net(x: torch.Tensor, stem: torch.Tensor) -> torch.Tensor:
        y = F.relu(F.conv2d(x, stem))
        return y.as_strided((4, 5), (7, 2), 3) + 1

    inputs = (torch.randn(2, 3, 32, 32), STEM)
    same_as_before(traced(net, *inputs), *inputs)


@pytest.mark.usefixtures("free_copies")
def test_random_numbers_are_drawn_in_eagers_order() -> None:
    def net(x: torch.Tensor, stem: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.relu(F.conv2d(x, stem)), 0.5, True)

    inputs = (torch.randn(2, 3, 32, 32), STEM)
    graph = traced(net, *inputs)
    torch.manual_seed(1)
    (want,) = as_function(graph)(*inputs)
    torch.manual_seed(1)
    (got,) = as_function(layout.lay_out(graph))(*inputs)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("conv", "shape"), [(F.conv1d, (2, 3, 40)), (F.conv3d, (1, 3, 12, 12, 12))])
def test_other_ranks_are_not_touched_for_little(conv: Any, shape: tuple[int, ...]) -> None:
    weight = torch.randn(16, 3, *(3,) * (len(shape) - 2))
    graph = traced(lambda x, w: F.relu(conv(x, w)), torch.randn(shape), weight)
    assert layout.lay_out(graph) is graph


@pytest.mark.usefixtures("free_copies")
def test_lines_are_images_of_height_1() -> None:
    """What follows point by point, norms too, stays an image; a pool reads it without its height, and products with each position take what lies as an image."""

    def net(
        x: torch.Tensor, stem: torch.Tensor, w: torch.Tensor, one: torch.Tensor, m: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        x = F.silu(F.batch_norm(F.conv1d(x, stem, padding=1), m, v))
        y = F.conv1d(x, w, m, padding=4, dilation=4) * 0.5 + x
        z = F.conv1d(y, one)
        return y, F.max_pool1d(y, 2), z.transpose(1, 2) * v, F.relu(z) + m[:, None], y.flatten(1).sum(1)

    inputs = (torch.randn(2, 3, 40), STEM[..., 0], W1[:16, :, 0], W1[:16, :, :1, 0], torch.randn(16), torch.rand(16) + 0.5)
    made = same_as_before(traced(net, *inputs), *inputs)
    assert formats(made) == [True, True, True]
    pointwise = (aten.silu.default, aten.mul.Tensor)
    assert [node.meta["val"].ndim for node in made.nodes if node.target in pointwise] == [4, 4, 3]


def test_long_windows_of_lines_pay_for_copies() -> None:
    def net(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, w, padding=15, groups=32)

    for window, images in ((31, [True]), (3, [False])):
        inputs = (torch.randn(2, 32, 50), torch.randn(32, 1, window))
        assert formats(layout.lay_out(traced(net, *inputs))) == images


def test_volumes_are_channels_last_under_kept_weights() -> None:
    def net(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.relu(F.conv3d(x, w, padding=1))

    graph = traced(net, torch.randn(2, 16, 8, 8, 8), torch.randn(16, 16, 3, 3, 3))  # of one image ATen computes so small a product itself
    assert layout.lay_out(graph) is graph
    assert formats(layout.lay_out(graph, frozenset({1}))) == [True]


def test_small_gains_are_not_bought_with_copies() -> None:
    graph = traced(lambda x, w: F.conv2d(x, w), torch.randn(1, 32, 8, 8), W2)
    assert layout.lay_out(graph) is graph


def test_heavy_weights_ask_for_contiguous_inputs() -> None:
    def net(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.max_pool2d(F.conv2d(x, w1, padding=1), 8), w2)

    inputs = (torch.randn(4, 16, 32, 32), W1.repeat(4, 1, 1, 1)[:128], torch.randn(256, 128, 3, 3))
    heavy = [layout.wish(node)[0] for node in traced(net, *inputs).nodes if node.target is aten.convolution.default]
    assert heavy == [True, False]
    graph = traced(net, *inputs)
    weights = set(graph.find_nodes(op="placeholder")[1:])
    assert [layout.wish(node, weights)[0] for node in graph.nodes if node.target is aten.convolution.default] == [True, True], (
        "kept weights are reordered once"
    )


def test_the_users_own_layout_stays() -> None:
    def net(x: torch.Tensor, stem: torch.Tensor) -> torch.Tensor:
        return F.relu(F.conv2d(x, stem))

    inputs = (torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last), STEM)
    graph = traced(net, *inputs)
    assert copies(layout.lay_out(graph)) == 0


class SmallUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.join = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 16, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.norm(self.down(x)))
        b = torch.relu(self.deep(F.max_pool2d(a, 2)))
        wide = F.interpolate(b, scale_factor=2.0, mode="bilinear")
        return self.head(torch.relu(self.join(torch.cat([self.up(b), a], 1) + wide)))


class Separable(nn.Module):
    """Depthwise convolutions, batch norm, squeeze and excitation, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.depth = nn.Conv2d(16, 16, 3, 1, 1, groups=16)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.hardswish(self.norm(self.stem(x)))
        y = self.depth(x)
        y = y * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1))))) + x
        return y, self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


@pytest.mark.usefixtures("free_copies")
@pytest.mark.parametrize("make", [SmallUNet, Separable])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_compiled_networks(make: Callable[[], nn.Module], memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = make().eval()
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=memory_format)
    with torch.no_grad():
        want = model(x)
        got = magneto.compile(model)(x)
    for w, g in zip(*((t,) if isinstance(t, torch.Tensor) else t for t in (want, got)), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
        assert g.stride() == w.stride()


def test_patches_are_laid_out_for_their_readers() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(32, 3, 4, 4), torch.randn(2, 3, 16, 16)

    def patches(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, weight, stride=4).flatten(2).transpose(1, 2)
        return F.layer_norm(torch.cat([y[:, :1] * 0, y], 1), (32,))

    with torch.no_grad():
        graph = trace(torch.fx.symbolic_trace(patches), [x, weight], False, "patches").graph
        made = layout.lay_out(graph)
        assert [n.meta["val"].is_channels_last() for n in made.nodes if n.target is torch.ops.aten.convolution.default] == [True]
        torch.testing.assert_close(magneto.compile(patches)(x, weight), patches(x, weight), rtol=1e-4, atol=1e-4)
