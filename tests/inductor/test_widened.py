"""Products of narrow types are computed in float32 where the machine has no instructions for them: as close to float64 as eager, in its types and strides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import magneto
from magneto.aot_autograd.trace import trace
from magneto.inductor import attention, attention_joint, transformer, widened
from magneto.inductor.runtime import kept
from magneto.inductor.widened import widen

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.convolution.default,
    aten.addr.default,
    aten.erfinv.default,
}


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that multiplies neither."""
    for module in (kept, widened, attention, attention_joint, transformer):
        monkeypatch.setattr(module, "narrow_types", lambda: frozenset(HALVES))


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def products(fn: Callable[..., Any], *args: torch.Tensor, training: bool = False) -> list[torch.dtype]:
    """The types in which a program multiplies."""
    with torch.no_grad():
        graph = widen(trace(fx.symbolic_trace(fn), args).graph, training)
    graph.lint()
    return [
        node.args[-1 if node.target is not aten.convolution.default else 1].meta["val"].dtype
        for node in graph.nodes
        if node.target in PRODUCTS
    ]


OPERATIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (lambda a, b: a @ b, ((12, 24), (24, 20))),
    "transposed": (lambda a, b: a.t() @ b, ((24, 12), (24, 20))),
    "linear": (F.linear, ((2, 9, 24), (20, 24), (20,))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, alpha=0.5, beta=2.0), ((20,), (12, 24), (24, 20))),
    "one_row": (lambda a, b: a @ b, ((1, 24), (24, 20))),
    "bmm": (torch.bmm, ((5, 12, 24), (5, 24, 20))),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.5), ((5, 12, 20), (5, 12, 24), (5, 24, 20))),
    "vector": (lambda a, v: a.t() @ v, ((24, 12), (24,))),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), ((2, 6, 30), (8, 6, 3), (8,))),
    "conv2d": (lambda x, w, b: F.relu(F.conv2d(x, w, b, stride=2, padding=1)), ((2, 6, 14, 13), (8, 6, 3, 3), (8,))),
    "depthwise": (lambda x, w: F.silu(F.conv2d(x, w, padding=1, groups=6)), ((2, 6, 14, 13), (6, 1, 3, 3))),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1), ((2, 4, 6, 7, 8), (5, 4, 3, 3, 3))),
    "deconv": (lambda x, w: F.conv_transpose2d(x, w, stride=2), ((2, 6, 7, 7), (6, 4, 3, 3))),
    "residual": (lambda x, w: F.relu(F.conv2d(x, w, padding=1) + x), ((2, 6, 9, 9), (6, 6, 3, 3))),
    "volume": (lambda x, w: F.conv3d(x.contiguous(memory_format=torch.channels_last_3d), w), ((2, 4, 6, 7, 8), (5, 4, 3, 3, 3))),
    "grouped": (lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w, groups=2), ((2, 4, 6, 7), (8, 2, 1, 1))),
    "attention": (F.scaled_dot_product_attention, ((2, 3, 20, 16), (2, 3, 24, 16), (2, 3, 24, 16))),
    "masked": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), ((2, 3, 20, 16), (2, 3, 24, 16), (2, 3, 24, 16), (20, 24))),
    "written_out": (lambda q, k, v: F.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v, ((2, 3, 20, 16), (2, 3, 24, 16), (2, 3, 24, 16))),
    "trilinear": (F.bilinear, ((9, 12), (9, 16), (5, 12, 16))),
    "addr": (torch.addr, ((12, 20), (12,), (20,))),
    "conv_tbc": (torch.conv_tbc, ((9, 2, 6), (3, 6, 8), (8,))),
    "places": (lambda t: F.affine_grid(t, [2, 3, 7, 5], align_corners=False), ((2, 2, 3),)),
    "erfinv": (lambda x: torch.erfinv(x.tanh()), ((9, 12),)),
    "vector_and_columns": (lambda a, v, c: torch.addmv(c, a.t(), v), ((24, 12), (24,), (12,))),
    "repeated": (lambda a, b: a.transpose(0, 1) @ b, ((6, 5, 24), (24, 20))),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), ((3, 12, 24), (3, 9, 24))),
}  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("training", [False, True])
def test_as_close_to_float64_as_eager(name: str, dtype: torch.dtype, training: bool) -> None:
    fn, shapes = OPERATIONS[name]
    given = [(made(*shape, seed=k) / 3).to(dtype) for k, shape in enumerate(shapes)]
    gradient = made(*fn(*given).shape, seed=9).to(dtype)

    def run(fn: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        args = [x.to(dtype).requires_grad_(training) for x in given]
        result = fn(*args)
        return [result.detach(), *(torch.autograd.grad(result, args, gradient.to(dtype)) if training else ())]

    ours = run(magneto.compile(fn, fullgraph=True), dtype)
    for exact, plain, value in zip(run(fn, torch.float64), run(fn, dtype), ours, strict=True):
        assert (value.shape, value.stride(), value.dtype) == (plain.shape, plain.stride(), plain.dtype)
        assert (value - exact).norm() <= 1.5 * (plain - exact).norm() + 1e-12
        assert (value - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-12


class Residual(nn.Module):
    """What a convolutional network is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.one, self.two = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.one(self.first(x)))
        y = F.relu(self.two(self.second(y)) + x)
        return self.head(self.pool(y).mean((2, 3)))


def network(dtype: torch.dtype, memory: torch.memory_format = torch.contiguous_format) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Residual()
    with torch.no_grad():
        model.one.running_mean.uniform_(-1, 1), model.two.running_var.uniform_(0.5, 2)
    return model.to(dtype).to(memory_format=memory), made(9, 8, 12, 12).to(dtype).to(memory_format=memory)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@torch.no_grad()
def test_networks_in_inference(dtype: torch.dtype, memory: torch.memory_format) -> None:
    model, x = network(dtype, memory)
    compiled = magneto.compile(model.eval())
    exact = copy.deepcopy(model).double()(x.double())
    for _ in range(2):
        assert (compiled(x) - exact).abs().max() <= 2 * (model(x) - exact).abs().max()
    for p in model.parameters():
        p.data.mul_(0.5)  # kept conversions of weights are noticed to be old
    exact = copy.deepcopy(model).double()(x.double())
    assert (compiled(x) - exact).abs().max() <= 2 * (model(x) - exact).abs().max()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_whole_step_of_training(dtype: torch.dtype) -> None:
    """Losses are eager's but for what rounding makes of them, and fall."""
    losses = []
    for wrap in (lambda f: f, magneto.compile):
        model, x = network(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer, x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).float(), torch.arange(9))
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = wrap(step)
        losses.append(torch.stack([call() for _ in range(6)]))
    torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-2)
    assert losses[1][-1] < losses[1][0]


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_widened(dtype: torch.dtype) -> None:
    def given(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=dtype) for shape in shapes]

    wide = torch.float32
    assert products(lambda a, b: (a @ b) @ b, *given((16, 24), (24, 24))) == [wide, wide]
    assert products(lambda a, b: a @ b.t(), *given((2, 24), (24, 24))) == [dtype]  # limited by memory
    assert products(lambda a, b: a @ b, *given((2, 24), (24, 24))) == [wide]
    assert products(lambda a, b: a.t() @ b, *given((24, 24), (24,))) == [
        dtype if dtype is torch.bfloat16 else wide
    ]  # (bfloat16: a fast loop)
    assert products(lambda c, a, b: torch.erfinv(torch.addr(c, a, b)), *given((16, 24), (16,), (24,))) == [wide, wide]
    assert products(lambda x, w: F.conv2d(x, w), *given((2, 8, 9, 9), (8, 8, 3, 3))) == [wide]
    assert products(lambda a, b: a.float() @ b.float(), *given((16, 24), (24, 24))) == [wide]
    assert products(lambda a, b: a.double() @ b.double(), *given((16, 24), (24, 24))) == [torch.float64]


def test_what_is_repeated_or_turned_is_converted_once() -> None:
    """A matrix for a whole batch before it is repeated, and a weight for both its uses."""

    def conversions(fn: Callable[..., Any], *args: torch.Tensor) -> list[tuple[int, ...]]:
        with torch.no_grad():
            graph = widen(trace(fx.symbolic_trace(fn), args).graph, True)
        graph.lint()
        wide = [n.meta["val"] for n in graph.nodes if n.target is aten._to_copy.default]
        return [tuple(val.shape) for val in wide if val.dtype is torch.float32]

    a, b = torch.zeros(5, 16, 24, dtype=torch.bfloat16), torch.zeros(24, 24, dtype=torch.bfloat16)
    assert conversions(lambda a, b: torch.bmm(a, b.expand(5, 24, 24)), a, b) == [(24, 24), (5, 16, 24)][::-1]
    assert conversions(lambda a, b: (a[0] @ b) @ b.t(), a, b).count((24, 24)) == 1
    assert (24, 24) not in conversions(lambda a, b: a[0] @ b[:, :20], a, b)  # a part is not read as a whole


@torch.no_grad()
def test_a_conversion_stands_before_all_its_readers() -> None:
    """A residual behind a convolution may be read by a product in between."""
    x, y, w, m = (made(*shape, seed=k).to(torch.bfloat16) for k, shape in enumerate([(2, 6, 9, 9), (2, 6, 9, 9), (6, 6, 3, 3), (486, 12)]))

    def fn(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, between = F.conv2d(x, w, padding=1), (F.conv2d(y, w, padding=1), y.flatten(1) @ m)
        return F.relu(first + y), *between

    assert products(fn, x, y, w, m) == [torch.float32] * 3
    for value, plain in zip(magneto.compile(fn, fullgraph=True)(x, y, w, m), fn(x, y, w, m), strict=True):
        torch.testing.assert_close(value, plain, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("dtype", HALVES)
@torch.no_grad()
def test_factors_times_zero(dtype: torch.dtype) -> None:
    """`alpha=0` leaves what is not finite, as eager does with these types."""
    c, a, b = (made(*shape, seed=k).to(dtype) for k, shape in enumerate([(12, 20), (12, 24), (24, 20)]))
    a[3] = torch.nan

    def fn(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.addmm(c, a, b, alpha=0)

    torch.testing.assert_close(magneto.compile(fn)(c, a, b), fn(c, a, b), equal_nan=True)


def test_sums_beyond_float16_are_infinite() -> None:
    a, b = torch.full((16, 64), 100.0, dtype=torch.float16), torch.full((64, 16), 100.0, dtype=torch.float16)
    model, x = network(torch.float16)
    with torch.no_grad():
        assert magneto.compile(lambda a, b: (a @ b) * 0.01)(a, b).isinf().all()
        model.first.weight.fill_(100.0)
        torch.testing.assert_close(magneto.compile(model.eval())(x * 100), model(x * 100), equal_nan=True)


def test_eager_numerics_and_machines_that_multiply_them(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (made(16, 24, seed=k).to(torch.bfloat16) for k in range(2))
    with torch.no_grad(), magneto.config.patch(numerics="eager"):
        assert torch.equal(magneto.compile(F.linear)(a, b), F.linear(a, b))
    monkeypatch.setattr(widened, "narrow_types", frozenset)
    assert products(lambda a, b: F.linear(a, b), a, b) == [torch.bfloat16]


@torch.no_grad()
def test_what_is_kept_of_weights_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions of weights beyond the bound run in each call, with the same result."""
    from magneto.inductor.schedule import prepared

    a = made(16, 64).to(torch.bfloat16)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(torch.bfloat16)
    expected = magneto.compile(model)(a)
    seen = []
    real = prepared.keep_results

    def looked_at(plan: Any, state: frozenset[str]) -> Any:
        made = real(plan, state)
        seen.append(made.prepared)
        return made

    monkeypatch.setattr("magneto.inductor.compile.keep_results", looked_at)
    results = []
    for bound in (1 << 40, 64 * 64 * 4, 0):
        monkeypatch.setattr(prepared, "most", lambda bound=bound: bound)
        with magneto.config.patch(cache=False):
            results.append(magneto.compile(lambda x: model(x))(a))
    assert seen[0] >= 2
    assert seen[1:] == [1, 0]
    assert all(torch.equal(result, expected) for result in results)
