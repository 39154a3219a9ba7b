"""Relus behind residual sums are the library's, which makes 0 of NaN: calls that meet NaN are answered as eager answers them all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import magneto
from magneto.base.events import counters
from magneto.base.flags import config
from magneto.inductor.runtime import invalid

pytestmark = pytest.mark.skipif(not invalid.possible(), reason="no flag of invalid operations here")

TYPES = [torch.float32, *([torch.bfloat16] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]


class Net(nn.Module):
    """Two blocks: one with a convolution on either side of its sum, one whose input is its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 1, bias=False)
        self.a, self.b, self.c, self.d = (
            nn.Conv2d(16, 32, 3, padding=1),
            nn.Conv2d(32, 32, 1),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.Conv2d(32, 32, 1),
        )
        self.norm = nn.BatchNorm2d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        y = (self.b(self.a(x).relu()) + self.down(x)).relu()
        z = (self.norm(self.d(self.c(y).relu())) + y).relu()
        return z * 2


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    model = Net().eval().to(dtype)
    model.norm.running_mean.normal_(0, 0.5)  # type: ignore[union-attr]
    return model


def image(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 3, 12, 12).to(dtype).contiguous(memory_format=torch.channels_last)


def put(where: tuple[int, ...]) -> Callable[[Net, torch.Tensor], None]:
    return lambda m, x: x.__setitem__(where, torch.nan)


def in_weight(m: Net, x: torch.Tensor) -> None:
    m.d.weight[3, 4] = torch.nan


def in_variance(m: Net, x: torch.Tensor) -> None:
    m.norm.running_var[5] = -1  # type: ignore[index]


def overflow(m: Net, x: torch.Tensor) -> None:
    for conv in (m.b, m.down):
        conv.weight.mul_(1e38)
    x.mul_(1e10)


WAYS = {
    "first": put((0, 0, 0, 0)),
    "last": put((-1, -1, -1, -1)),
    "all": put(()),
    "weight": in_weight,
    "variance": in_variance,
    "overflow": overflow,
}


def agree(model: Net, compiled: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """How many NaN both have."""
    want, got = model(x), compiled(x)
    close = 1e-4 if x.dtype is torch.float32 else 0.1
    torch.testing.assert_close(got, want, equal_nan=True, rtol=close, atol=close)
    assert got.stride() == want.stride()
    return int(want.isnan().sum())


def vain() -> int:
    return counters().get("calls_with_nan", 0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("way", WAYS)
def test_nan_is_eagers(way: str, dtype: torch.dtype, threads: None) -> None:
    model, x = net(dtype), image(dtype)
    compiled = magneto.compile(model)
    with torch.no_grad():
        assert not agree(model, compiled, x)
        before = vain()
        ill = x.clone(memory_format=torch.channels_last)
        WAYS[way](model, ill)
        kept = ill.clone()
        assert agree(model, compiled, ill)
        assert vain() == before + 1
        torch.testing.assert_close(ill, kept, equal_nan=True, rtol=0, atol=0)


def test_calls_without_nan_are_the_librarys() -> None:
    model, x = net(), image()
    compiled = magneto.compile(model)
    before = vain()
    torch.log(torch.tensor(-1.0))  # raises the flag ahead of the call
    with torch.no_grad():
        for _ in range(3):
            assert not agree(model, compiled, x)
        with torch.profiler.profile() as seen:
            compiled(x)
    names = [event.name for event in seen.events() or ()]
    assert sum(name.startswith("mkldnn::_convolution_pointwise") for name in names) == 6
    assert vain() == before


def test_as_close_to_float64_as_eager() -> None:
    model, x = net(), image()
    with torch.no_grad():
        exact, plain, ours = copy.deepcopy(model).double()(x.double()), model(x), magneto.compile(model)(x)
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6
    assert torch.equal(ours == 0, plain == 0)


def test_calls_in_vain_end() -> None:
    model, x = net(), image()
    ill = x.clone(memory_format=torch.channels_last)
    ill[1, 1, 1, 1] = torch.nan
    compiled = magneto.compile(model)
    before = vain()
    with torch.no_grad():
        for _ in range(2):  # a call without NaN begins the count anew
            assert agree(model, compiled, ill) and agree(model, compiled, ill) and not agree(model, compiled, x)
        assert vain() == before + 4
        for _ in range(invalid.PATIENCE + 2):
            assert agree(model, compiled, ill)
        assert vain() == before + 4 + invalid.PATIENCE
        assert not agree(model, compiled, x)


def test_a_plan_from_the_store_speculates_too() -> None:
    model, x = net(), image()
    ill = x.clone(memory_format=torch.channels_last)
    ill[0, 0, 5, 5] = torch.nan
    with torch.no_grad(), config.patch(verify=False):
        for _ in range(2):
            magneto.reset()
            compiled = magneto.compile(model)
            assert not agree(model, compiled, x)
            stored = counters().get("graphs_from_store", 0)
            assert agree(model, compiled, ill) and vain() == 1
        assert stored == 1


def test_where_the_library_does_not_tell_nothing_is_speculated_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invalid, "told", lambda look: False)
    model, x = net(), image()
    ill = x.clone(memory_format=torch.channels_last)
    ill[0, 0, 5, 5] = torch.nan
    compiled = magneto.compile(model)
    before = vain()
    with torch.no_grad():
        assert not agree(model, compiled, x) and agree(model, compiled, ill)
    assert vain() == before


class Draws(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(super().forward(x), 0.5, True)


class Writes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Draws, Writes])
def test_what_cannot_run_twice_runs_once(kind: type[Net], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(invalid, "answering", lambda *args: made.append(args))
    torch.manual_seed(0)
    model, x = kind().eval(), image()
    x[0, 0, 0, 0] = torch.nan
    twin = copy.deepcopy(model)
    compiled = magneto.compile(twin)
    with torch.no_grad():
        torch.manual_seed(1)
        want = [model(x), torch.rand(3)]
        torch.manual_seed(1)
        got = [compiled(x), torch.rand(3)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-4, atol=1e-4)
    for (name, a), b in zip(twin.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    assert not made
