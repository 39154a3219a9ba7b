"""Weights of linear layers in the library's own layout: results as close to float64 as eager's, and every way of changing a weight is noticed."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import signal
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from magneto import _C
from magneto.base.events import recording
from magneto.graph.narrow import narrow_types
from magneto.inductor.lower import linear
from magneto.inductor.lower.linear import packs

WATCHED = _C.pages_watched() >= 0


class Net(nn.Module):
    """Weights as linear layers and as GPT-2 have them, with and without a bias, read by loops and by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 512), nn.Linear(512, 256, bias=False)
        self.matrix, self.bias = nn.Parameter(torch.randn(256, 384) / 16), nn.Parameter(torch.randn(384))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.second(torch.relu(self.first(x)))
        return torch.addmm(self.bias, x.flatten(0, 1), self.matrix), x @ self.matrix, self.first(x)


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().eval().to(dtype)


def close(model: nn.Module, ours: Any, x: torch.Tensor) -> None:
    """At most twice eager's error."""
    exact, plain = copy.deepcopy(model).double()(x.double()), model(x)
    for e, p, o in zip(exact, plain, ours, strict=True):
        assert (o - e).abs().max() <= 2 * (p - e).abs().max() + 1e-6
        assert (o.shape, o.stride(), o.dtype) == (p.shape, p.stride(), p.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_as_close_to_float64_as_eager(dtype: torch.dtype) -> None:
    model, x = net(dtype), torch.randn(2, 16, 256, dtype=dtype)
    with recording("artifact") as found:
        compiled = magneto.compile(model)
        first = compiled(x)
    kept = [event.kept_bytes for event in found if event.artifact == "plan"]
    assert (sum(kept) > 0) == (packs(dtype) or dtype in narrow_types())  # (those: weights in float32)
    close(model, first, x)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(compiled(x), first, strict=True))


def double_in_place(model: Net) -> None:
    model.first.weight.mul_(2)


def double_behind_versions(model: Net) -> None:
    model.first.weight.data.mul_(2)


def write_through_numpy(model: Net) -> None:
    model.matrix.detach().numpy()[200, 100] = 7.0


def write_an_edge(model: Net) -> None:
    model.second.weight.data[0, 0] = 9.0
    model.second.weight.data[-1, -1] = 9.0


def write_by_system_call(model: Net) -> None:
    end, start = os.pipe()
    os.write(start, struct.pack("f", 5.0))
    address = model.first.weight.data_ptr() + 4 * 60_000
    assert ctypes.CDLL(None).read(end, ctypes.c_void_p(address), 4) == 4
    os.close(end)
    os.close(start)


def move_to_other_storage(model: Net) -> None:
    model.first.weight.data = torch.full_like(model.first.weight, 0.25)


def replace_the_parameter(model: Net) -> None:
    model.first.weight = nn.Parameter(torch.full((512, 256), -0.5))


def load_other_weights(model: Net) -> None:
    torch.manual_seed(7)
    model.load_state_dict(Net().state_dict())


def take_a_step(model: Net) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with torch.enable_grad():
        sum(y.square().mean() for y in model(torch.ones(1, 8, 256))).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def tie_two_weights(model: Net) -> None:
    model.second.weight = nn.Parameter(model.first.weight.data.view(256, 512))
    model.first.weight.data.mul_(0.5)


CHANGES: list[Callable[[Net], None]] = [
    double_in_place,
    double_behind_versions,
    write_through_numpy,
    write_an_edge,
    write_by_system_call,
    move_to_other_storage,
    replace_the_parameter,
    load_other_weights,
    take_a_step,
    tie_two_weights,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@torch.no_grad()
def test_a_changed_weight_is_noticed(change: Callable[[Net], None]) -> None:
    model, x = net(), torch.randn(1, 32, 256)
    compiled = magneto.compile(model)
    for _ in range(5):  # the weights are watched by their pages from the third call on
        before = compiled(x)
    assert not WATCHED or _C.pages_watched() >= 3
    for _ in range(2):
        change(model)
        for _ in range(8):
            after = compiled(x)
            close(model, after, x)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@torch.no_grad()
def test_two_models_watch_one_weight() -> None:
    model = net()
    other = copy.copy(model)
    one, two = magneto.compile(model), magneto.compile(lambda x: other.second(torch.relu(other.first(x))))
    x = torch.randn(1, 32, 256)
    for _ in range(3):
        for _ in range(6):
            close(model, one(x), x)
            torch.testing.assert_close(two(x), other.second(torch.relu(other.first(x))))
        model.first.weight.data.mul_(1.5)
        close(model, one(x), x)
        torch.testing.assert_close(two(x), other.second(torch.relu(other.first(x))))


@torch.no_grad()
def test_a_forked_child_looks_for_itself() -> None:
    model, x = net(), torch.randn(1, 8, 256)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    compiled = magneto.compile(model)
    for _ in range(5):
        compiled(x)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            close(model, compiled(x), x)
            model.first.weight.data.mul_(2)
            close(model, compiled(x), x)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    close(model, compiled(x), x)
    torch.set_num_threads(threads)


@torch.no_grad()
def test_the_module_is_left_as_it_is() -> None:
    model, x = net(), torch.randn(1, 32, 256)
    state = copy.deepcopy(model.state_dict())
    compiled = magneto.compile(model)
    for _ in range(5):
        compiled(x)
    assert {k: v.data_ptr() for k, v in model.state_dict().items()} == {k: v.data_ptr() for k, v in model.named_parameters()}
    twin = copy.deepcopy(model)
    assert all(torch.equal(v, state[k]) for k, v in twin.state_dict().items())
    twin.first.weight.data.mul_(2)
    close(model, compiled(x), x)


@pytest.mark.skipif(not WATCHED, reason="this system does not tell which pages have been written")
@torch.no_grad()
def test_freed_models_are_not_watched() -> None:
    def life() -> None:
        model, x = net(), torch.randn(1, 32, 256)
        compiled = magneto.compile(model)
        for _ in range(5):
            compiled(x)

    gc.collect()
    before = _C.pages_watched()
    life()
    magneto.reset()
    gc.collect()
    assert _C.pages_watched() <= before


@torch.no_grad()
def test_only_so_much_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the budget of a graph, and for many rows, weights stay as they are."""
    model, x = net(), torch.randn(2, 16, 256)

    def kept(x: torch.Tensor) -> int:
        with recording("artifact") as found:
            compiled = magneto.compile(copy.deepcopy(model))
            close(model, compiled(x), x)
        return sum(event.kept_bytes for event in found if event.artifact == "plan")

    whole = kept(x)
    monkeypatch.setattr(linear, "BUDGET", 256 * 512 * 4)
    assert kept(x) < whole or not packs(torch.float32)
    assert kept(torch.randn(2, 200, 256)) == 0
