"""Batch norms, residuals and activations as part of the convolution: as close to float64 as eager, and parameters may change."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn

import magneto
from magneto.aot_autograd.trace import drop_dead, trace
from magneto.inductor import convolve, layout
from magneto.inductor.convolve import fold

pytestmark = pytest.mark.skipif(not convolve.available(), reason="this torch has no oneDNN")


class Block(nn.Module):
    """convolution, norm, relu; convolution with a bias, norm, residual, relu; a norm nothing follows."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.a, self.an = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.b, self.bn = nn.Conv2d(16, 16, 3, padding=1, groups=groups), nn.BatchNorm2d(16)
        self.c, self.cn = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16, affine=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.relu(self.an(self.a(x)))
        y = torch.relu(self.bn(self.b(x)) + x)
        return y, self.cn(self.c(y))


def block(groups: int = 1) -> Block:
    torch.manual_seed(0)
    model = Block(groups).eval()
    for norm in (model.an, model.bn, model.cn):
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.normal_(0, 0.5)
        norm.running_var.uniform_(0.3, 3)
        if norm.affine:
            nn.init.uniform_(norm.weight, -2, 2)
            nn.init.normal_(norm.bias)
    return model


def nhwc(*shape: int) -> torch.Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def fused(graph: fx.Graph) -> int:
    return sum("mkldnn" in str(node.target) for node in graph.nodes)


@pytest.mark.parametrize("groups", [1, 16])
def test_as_close_to_float64_as_eager(groups: int) -> None:
    model, x = block(groups), nhwc(4, 8, 24, 24)
    with torch.no_grad():
        exact, plain, ours = copy.deepcopy(model).double()(x.double()), model(x), magneto.compile(model)(x)
    for e, p, o in zip(exact, plain, ours, strict=True):
        assert (o - e).abs().max() <= 2 * (p - e).abs().max() + 1e-6
        assert o.stride() == p.stride()


def test_what_is_folded() -> None:
    def net(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        x = torch.relu(F.batch_norm(F.conv2d(x, w, padding=1), m, v))
        return torch.relu(F.batch_norm(F.conv2d(x, w, padding=1), m, v) + x) + F.conv2d(x, w)[..., :1, :1]

    with torch.no_grad():
        inputs = (nhwc(4, 16, 24, 24), torch.randn(16, 16, 3, 3), torch.ones(16), torch.zeros(16))
        graph = fold(trace(fx.symbolic_trace(net), inputs).graph)
    graph.lint()
    assert fused(graph) == 2
    assert sum(node.target is torch.ops.aten.convolution.default for node in graph.nodes) == 1


def test_changed_parameters_are_seen() -> None:
    model, x = block(), nhwc(4, 8, 24, 24)
    compiled = magneto.compile(model)
    with torch.no_grad():
        compiled(x)
        model.b.weight.mul_(1.5)
        model.bn.running_mean.add_(1)
        model.an.weight.neg_()
        for want, got in zip(model(x), compiled(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [lambda m: m.train(), lambda m: m.double()])
def test_what_is_left_alone(change: Callable[[Block], Block]) -> None:
    model = change(block())
    x = nhwc(4, 8, 24, 24).to(model.a.weight.dtype)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for want, got in zip(other(x), magneto.compile(model)(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


class Ranks(nn.Module):
    """The same chain for lines, images and volumes; the last convolution answers one pixel, whose strides say nothing."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        conv, norm = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1], (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[rank - 1]
        self.a, self.an, self.b = conv(16, 32, 3, padding=1, bias=False), norm(32), conv(32, 32, 3, padding=1, groups=4)
        self.c, self.cn, self.d = conv(32, 64, 4), norm(64), conv(64, 64, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = F.silu(self.an(self.a(x)))
        y = self.b(x) + x
        z = torch.relu(self.cn(self.c(y)))
        return y, z, torch.relu(self.d(z)), self.d(z) + z


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_lines_images_and_volumes_are_folded_and_packed(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folded: list[fx.Graph] = []
    monkeypatch.setattr(convolve, "drop_dead", lambda graph: (folded.append(graph), drop_dead(graph)))
    monkeypatch.setattr(layout, "COSTS", dataclasses.replace(layout.COSTS, copy=0.0))
    torch.manual_seed(0)
    model, x = Ranks(rank).eval(), torch.randn(2, 16, *(4,) * rank)
    model.an.running_mean.normal_()  # type: ignore[operator, union-attr]
    compiled = magneto.compile(model)
    with torch.no_grad():
        exact, plain = copy.deepcopy(model).double()(x.double()), model(x)
        for ours in (compiled(x), compiled(x)):
            for e, p, o in zip(exact, plain, ours, strict=True):
                assert (o - e).abs().max() <= 2 * (p - e).abs().max() + 1e-6
                assert o.stride() == p.stride()
        model.d.weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    targets = [str(node.target) for node in folded[0].nodes]
    assert sum("_reorder_convolution_weight" in target for target in targets) == 4
    assert not any("batch_norm" in target or "convolution.default" in target for target in targets)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.25),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "steep": lambda x: F.leaky_relu(x, 0.0),
    "clamped": lambda x: x.clamp(-1, 1),
}


class Activated(nn.Module):
    """Activations behind norms, behind a plain convolution, and behind a residual; a residual with nothing behind it; one-pixel convolutions; transposed ones."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.act = ACTIVATIONS[name]
        self.a, self.an = nn.Conv2d(8, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.b, self.bn = nn.Conv2d(32, 32, 5, padding=2, groups=32), nn.BatchNorm2d(32)
        self.c, self.cn = nn.Conv2d(32, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.down, self.up = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.d = nn.Conv2d(32, 16, 3, stride=2)
        self.t, self.tn = nn.ConvTranspose2d(16, 24, 4, 2, 1, bias=False), nn.BatchNorm2d(24)
        self.last = nn.ConvTranspose2d(24, 3, 4, 2, 1, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.act(self.an(self.a(x)))
        y = self.act(self.bn(self.b(x)))
        y = y * torch.sigmoid(self.up(self.act(self.down(y.mean((-1, -2), keepdim=True)))))
        y = self.cn(self.c(y)) + x
        z = self.act(self.d(y))
        return y, z, torch.tanh(self.last(self.act(self.tn(self.t(z)))))


def activated(name: str, dtype: torch.dtype = torch.float32) -> Activated:
    torch.manual_seed(1)
    model = Activated(name).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_(0, 0.5)
            module.running_var.uniform_(0.3, 3)
            nn.init.uniform_(module.weight, -2, 2)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, dtype: torch.dtype) -> None:
    model, x = activated(name, dtype), nhwc(4, 8, 24, 24).to(dtype)
    with torch.no_grad():
        exact, plain = copy.deepcopy(model).double()(x.double()), model(x)
        compiled = magneto.compile(model)
        for ours in (compiled(x), compiled(x)):
            for e, p, o in zip(exact, plain, ours, strict=True):
                assert (o - e).abs().max() <= 2 * (p - e).abs().max() + 2e-6
                assert (o.stride(), o.dtype) == (p.stride(), p.dtype)
        model.t.weight.mul_(1.5)
        model.tn.running_mean.add_(1)
        model.cn.bias.add_(1)
        for want, got in zip(model(x), compiled(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4) if dtype is torch.float32 else None


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_and_infinities_go_through(name: str) -> None:
    model, x = activated(name), nhwc(4, 8, 24, 24)
    x[0, 0, 3, 3], x[1, 2, 5, 5], x[2, 1, 9, 9] = float("nan"), float("inf"), float("-inf")
    with torch.no_grad():
        wanted, got = model(x), magneto.compile(model)(x)
    for want, ours in zip(wanted, got, strict=True):
        assert torch.equal(want.isnan(), ours.isnan())


def test_what_follows_is_taken_along() -> None:
    def net(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = F.silu(F.batch_norm(F.conv2d(x, w, padding=1), m, v)) + x
        y = F.batch_norm(F.conv2d(y, w, padding=1), m, v) + y
        return torch.tanh(F.conv_transpose2d(F.leaky_relu(F.conv2d(y, w)), t, stride=2))

    inputs = (nhwc(4, 16, 24, 24), torch.randn(16, 16, 3, 3), torch.randn(16, 8, 4, 4), torch.zeros(16), torch.ones(16))
    with torch.no_grad():
        graph = fold(trace(fx.symbolic_trace(net), inputs).graph, frozenset({1, 2, 3, 4}))
    graph.lint()
    calls = [node for node in graph.nodes if "pointwise" in str(node.target)]
    assert [arg for node in calls for arg in node.args if isinstance(arg, str) and arg] == ["swish", "add", "leaky_relu", "tanh"]
    rest = {str(node.target) for node in graph.nodes if node.op == "call_function"} & {
        "aten.silu.default",
        "aten.tanh.default",
        "aten.leaky_relu.default",
    }
    assert not rest


class Tail(nn.Module):
    """Two convolutions, with or without a norm, and an activation between them; then a sum."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], norm: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Conv2d(8, 32, 3, padding=1), nn.Conv2d(32, 32, 1)
        self.norm = nn.BatchNorm2d(32) if norm else nn.Identity()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.activation(self.norm(self.a(x)))
        z = self.b(y)
        return z, self.activation(z), z.relu() + F.max_pool2d(self.norm(self.b(z)), 1)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_and_infinity_stay_behind_any_tail(name: str, norm: bool) -> None:
    """oneDNN's own relu, hardtanh and hardsigmoid make a number of NaN, its gelu NaN of infinity."""
    model, x = Tail(ACTIVATIONS[name], norm).eval(), nhwc(2, 8, 12, 12)
    x[0, 3, 2, 2], x[0, 1, 9, 9], x[1, 2, 6, 6] = float("nan"), float("inf"), -1e30
    compiled = magneto.compile(model)
    with torch.no_grad():
        for _ in range(2):
            for want, got in zip(model(x), compiled(x), strict=True):
                torch.testing.assert_close(got.isnan(), want.isnan())
                torch.testing.assert_close(got[1:], want[1:], rtol=1e-4, atol=1e-4 * float(want[1:].abs().max()))
            x = nhwc(2, 8, 12, 12)


def test_a_result_of_relu_is_zero() -> None:
    """-1e-22 instead of 0 is for sums only: what could tell the difference gets relu itself."""
    model, x = Block().eval(), nhwc(4, 8, 24, 24)
    net = magneto.compile(lambda x: (y := torch.relu(model.an(model.a(x))), torch.sqrt(torch.relu(model.bn(model.b(y))))))
    with torch.no_grad():
        for value in net(x):
            assert not value.isnan().any()
            assert (value == 0).any()
            assert value.min() == 0


def test_bfloat16_norms_are_folded() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no bfloat16 convolutions")
    model, x = block(), nhwc(4, 8, 24, 24)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        half, narrow = model.bfloat16(), x.bfloat16()
        for e, p, o in zip(exact, half(narrow), magneto.compile(half)(narrow), strict=True):
            assert o.dtype is torch.bfloat16
            assert (o - e).abs().mean() <= 2 * (p - e).abs().mean()


def test_readers_that_only_sum() -> None:
    def net(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.relu(F.conv2d(x, w, padding=1))  # read by a convolution, and by a pool that a convolution reads
        b = torch.relu(F.conv2d(F.max_pool2d(a, 2), w, padding=1))  # read by a root
        c = torch.relu(F.conv2d(a, w, padding=1))  # a result
        return F.conv2d(a, w), b.sqrt(), c

    with torch.no_grad():
        graph = fold(trace(fx.symbolic_trace(net), (nhwc(4, 16, 24, 24), torch.randn(16, 16, 3, 3))).graph)
    graph.lint()
    assert [node.args[7] for node in graph.nodes if "mkldnn" in str(node.target)] == ["leaky_relu"]
    assert sum(node.target is torch.ops.aten.relu.default for node in graph.nodes) == 2


@pytest.mark.parametrize("tells", ["sqrt", "sign", "log", "reciprocal", "bool", "argmax", "gt", "pool"])
def test_sums_of_zeros_are_zero(tells: str) -> None:
    """Where nothing passes the relu, a convolution behind it gives 0, and neither -1e-21 nor the root of it."""
    x, w, v = nhwc(2, 16, 8, 8), torch.rand(16, 16, 3, 3), -torch.full((16,), 100.0)

    def net(x: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(torch.relu(F.conv2d(x, w, v)), w, stride=2)
        if tells == "pool":
            return F.max_pool2d(y, 2, return_indices=True)[1]
        return y > 0 if tells == "gt" else y.argmax(1) if tells == "argmax" else getattr(y, tells)()

    with torch.no_grad():
        assert torch.equal(magneto.compile(net)(x), net(x))


def test_a_norm_hands_zeros_on() -> None:
    def net(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.sign(F.batch_norm(torch.relu(F.conv2d(x, w)), m, v))

    inputs = nhwc(2, 16, 8, 8), torch.randn(16, 16, 3, 3), torch.zeros(16), torch.ones(16)
    with torch.no_grad():
        assert torch.equal(magneto.compile(net)(*inputs), net(*inputs))


class Residuals(nn.Module):
    """Residuals that nobody reads afterwards, that are read again, that leave, that are views, and that are the convolution's own input."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = self.convs
        a = c[0](x)
        b = c[1](torch.relu(a)) + a  # last use of a
        d = (c[2](b) + b) * 2  # the convolution's own input
        e = c[3](d.sigmoid()) + d  # read again below
        f = c[4](e) + x  # an input of the graph
        g = c[5](f)
        h = c[6](f) + g.view(g.shape)  # a view
        k = c[7](h)
        return e * 2 + d, f, g, torch.relu(c[0](h) + k), k.flatten(1)


def test_residuals_are_written_where_nobody_reads_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[fx.Graph] = []
    write = convolve._write_residuals
    monkeypatch.setattr(convolve, "_write_residuals", lambda graph: (write(graph), made.append(graph)))
    torch.manual_seed(0)
    model, x = Residuals().eval(), nhwc(2, 16, 12, 12)
    before = x.clone()
    with torch.no_grad():
        exact, plain, compiled = copy.deepcopy(model).double()(x.double()), model(x), magneto.compile(model)
        first = compiled(x)
        for ours in (first, compiled(x)):
            for e, p, o in zip(exact, plain, ours, strict=True):
                assert (o - e).abs().max() <= 2 * (p - e).abs().max() + 1e-6
                assert o.stride() == p.stride()
    assert torch.equal(x, before)
    assert sum(node.target is convolve.POINTWISE_INTO for graph in made for node in graph.nodes) == 1
