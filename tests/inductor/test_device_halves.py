"""Graphs with tensors of the CPU and of a CUDA device are cut in two. No device is needed: metadata says where tensors are."""

from __future__ import annotations

import ctypes
import operator
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from magneto.aot_autograd.call import as_function
from magneto.graph import TensorMeta
from magneto.inductor.compile import _host_half
from magneto.inductor.devices import split, untouched
from magneto.inductor.halves import Back, Halves, Joined, Sent
from magneto.inductor.lower.context import CannotLower
from magneto.inductor.runtime import driver
from magneto.prims import prims
from tests.inductor.lower.prim_graphs import Graph

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
aten = torch.ops.aten


def meta(
    *shape: int, device: torch.device = CUDA, strides: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32
) -> TensorMeta:
    return TensorMeta(shape, strides or TensorMeta.contiguous_strides(shape), dtype, device)


class Building:
    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name: str, val: TensorMeta) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = val
        return node

    def call(self, target: Any, val: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = val
        return node


def targets(graph: fx.Graph) -> list[str]:
    return [getattr(n.target, "name", str(n.target)) for n in graph.nodes if n.op == "call_function"]


def scaled() -> tuple[fx.Graph, Building]:
    """x * (s + 1): s is a number of the CPU, x a tensor of the device; s + 1 is also returned."""
    b = Building()
    x, s = b.input("x", meta(4)), b.input("s", meta(device=CPU))
    more = b.call(prims.add, meta(device=CPU), s, 1.0)
    wide = b.call(prims.broadcast_in_dim, meta(4, device=CPU, strides=(0,)), more, (4,), ())
    b.graph.output((b.call(prims.mul, meta(4), x, wide), None, more))
    return b.graph, b


def test_single_numbers_are_sent_and_spread_on_the_device() -> None:
    device, host, rest, _, halves = split(scaled()[0])
    assert device == CUDA and halves.places == ((False, 0), None, (True, 1)) and [s.dense for s in halves.sent] == [True]
    assert host is not None
    assert targets(host) == ["add"] and targets(rest) == ["broadcast_in_dim", "mul"]
    assert [n.meta["val"].device for n in rest.nodes if n.name == "sent_0"] == [CUDA]


def test_written_outputs_are_counted_in_the_half_that_runs_last() -> None:
    halves = split(scaled()[0])[-1]
    assert halves.written({0: 0, 2: 1}) == {0: 0}
    assert halves.whole(frozenset([0])) == frozenset([0])


@pytest.fixture
def one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch without CUDA has no streams."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)


def test_both_halves_are_one_callable(one_stream: None) -> None:
    halves = split(scaled()[0])[-1]

    def host(x: torch.Tensor, s: torch.Tensor) -> Sequence[torch.Tensor]:
        return s + 1, s + 1

    def device(x: torch.Tensor, s: torch.Tensor, sent: torch.Tensor) -> Sequence[torch.Tensor]:
        return (x * sent,)

    for lasting in (False, True):
        found = Joined(host, device, halves, CPU, lasting)(torch.ones(4), torch.tensor(2.0))
        assert found[0].tolist() == [3.0] * 4 and found[1] is None and found[2].item() == 3.0


@pytest.mark.parametrize("lasting", [False, True])
def test_small_values_are_sent_together(one_stream: None, lasting: bool) -> None:
    values = [
        torch.tensor(2.5, dtype=torch.float64),
        torch.arange(6).reshape(2, 3).t(),
        torch.zeros(0),
        torch.tensor([True, False, True]),
        torch.randn(3000),
    ]
    values.insert(2, torch.arange(20.0)[::3])
    kinds = tuple(Sent(tuple(v.shape), v.stride() if v.is_contiguous() or n == 1 else (1,), v.dtype, n != 2) for n, v in enumerate(values))
    calls: list[Sequence[torch.Tensor]] = []
    run = Joined(lambda: values, lambda *sent: calls.append(sent) or (), Halves(kinds, (), ()), CPU, lasting)
    run()
    for found, wanted in zip(calls[0], values, strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape) and torch.equal(found, wanted)
    assert all(found.data_ptr() % 16 == 0 for found in calls[0] if found.numel())
    values[0] = torch.tensor(-1.0, dtype=torch.float64)
    run()
    assert calls[1][0].item() == -1.0 and calls[0][0].item() == (2.5 if lasting else -1.0)


@pytest.mark.parametrize("refused", [False, True])
def test_few_values_are_arguments_of_a_launch(one_stream: None, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """The fake driver reads as many bytes as the kernel takes, and writes as many as there are threads; one that refuses it is not asked again."""
    kind, launches, loaded = Sent((3,), (1,), torch.int64, True), [], []

    def launch(function: Any, gx: int, gy: int, gz: int, threads: int, *rest: Any) -> int:
        places = rest[-2]
        (to,), size = (ctypes.c_uint64 * 1).from_address(places[0]), driver.carried(32)
        words = ctypes.string_at(places[1], size)
        launches.append((function, gx * gy * gz, threads, words[:24]))
        ctypes.memmove(to, words, 8 * threads)
        return 0

    def load(binary: driver.Binary, device: torch.device) -> int:
        loaded.append(binary)
        if refused:
            raise RuntimeError("no such target")
        return 7

    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuLaunchKernel=launch))
    monkeypatch.setattr(driver, "load", load)
    monkeypatch.setattr(driver, "_done", lambda function, device, *args: function(*args))
    monkeypatch.setattr("magneto.inductor.halves.capturing", lambda: capturing[0])
    driver._put.cache_clear()
    values, capturing, calls = torch.tensor([1, -2, 3]), [False], []
    run = Joined(lambda: [values], lambda *sent: calls.append(sent[0].tolist()) or (), Halves((kind,), (), ()), CPU, False)
    run.carried = True
    for _ in range(2):
        run()
        values += 1
    capturing[0] = True  # a replay reads what lies in the host's memory then
    run()
    assert calls == [[1, -2, 3], [2, -1, 4], [3, 0, 5]]
    assert len(loaded) == 1 and b"words[64]" in loaded[0].image and run.carried is not refused
    assert [n[:3] for n in launches] == [(7, 1, 4)] * (0 if refused else 2)
    driver._put.cache_clear()


def test_numbers_of_the_host_are_written_behind_what_may_raise(one_stream: None) -> None:
    """The host's new number of an input goes there when the device has done its part, whatever becomes of the memory that it was computed in."""
    halves = split(scaled()[0], {2: 1})[-1]
    assert halves.back == (Back(2, 1, 1, 4),) and halves.lent == {0, 1} and halves.whole(frozenset()) == {2}
    arena = torch.zeros(())

    def host(x: torch.Tensor, s: torch.Tensor) -> Sequence[torch.Tensor]:
        return arena.copy_(s + 1), arena

    def device(x: torch.Tensor, s: torch.Tensor, sent: torch.Tensor) -> Sequence[torch.Tensor]:
        arena.fill_(-1.0)
        if x[0] < 0:
            raise RuntimeError("no memory")
        return (x * sent,)

    run, s = Joined(host, device, halves, CPU, False), torch.tensor(2.0)
    found = run(torch.ones(4), s)
    assert found[0].tolist() == [3.0] * 4 and found[2] is s and s.item() == 3.0
    with pytest.raises(RuntimeError, match="no memory"):
        run(-torch.ones(4), s)
    assert s.item() == 3.0


def test_only_what_is_laid_out_alike_goes_back() -> None:
    assert not split(scaled()[0], {2: 0})[-1].back


def test_results_of_the_host_that_only_pass_through_lie_in_its_arena() -> None:
    g = Graph()
    x = g.input(torch.randn(5))
    sent, result = g.add(x, 1.0), g.mul(x, 2.0)
    g.output(sent, result, g.call(aten.relu.default, sent))
    run, _ = _host_half(g.fx, "host", frozenset([0]))
    first, kept, _ = run(torch.ones(5))
    second, other, _ = run(torch.zeros(5))
    assert first.data_ptr() == second.data_ptr() and kept.data_ptr() != other.data_ptr() and kept.tolist() == [2.0] * 5


def test_indices_made_of_no_input_belong_to_their_reader() -> None:
    b = Building()
    x = b.input("x", meta(4))
    index = b.call(prims.iota, meta(4, device=CPU, dtype=torch.int64), 4, torch.int64, CPU)
    b.graph.output((b.call(prims.index_select, meta(4), x, 0, index),))
    _, host, rest, *_ = split(b.graph)
    assert host is None and targets(rest) == ["iota", "index_select"]


def test_what_the_cpu_draws_is_sent_dense() -> None:
    b = Building()
    x, y = b.input("x", meta(3, 4)), b.input("y", meta(3, 4, device=CPU, strides=(8, 2)))
    there = b.call(aten._to_copy.default, meta(3, 4), y)
    b.graph.output((b.call(prims.mul, meta(3, 4), x, there),))
    _, _, rest, _, halves = split(b.graph)
    assert [s.dense for s in halves.sent] == [False]
    assert [n.meta["val"].strides for n in rest.nodes if n.name == "sent_0"] == [(4, 1)]


def sent_back() -> Building:
    """x * 2 of the device; on the CPU that + s * 3 + an index, and s * 3 and the indices; s * 3 is also returned."""
    b = Building()
    x, s = b.input("x", meta(4)), b.input("s", meta(4, device=CPU))
    y, more = b.call(prims.mul, meta(4), x, 2.0), b.call(prims.mul, meta(4, device=CPU), s, 3.0)
    there = b.call(aten._to_copy.default, meta(4, device=CPU), y)
    places = b.call(prims.iota, meta(4, device=CPU), 4, torch.float32, CPU)
    total = b.call(prims.add, meta(4, device=CPU), b.call(prims.add, meta(4, device=CPU), there, more), places)
    b.graph.output((y, total, None, more))
    return b


def test_what_the_cpu_makes_of_results_runs_behind(one_stream: None) -> None:
    device, host, part, behind, halves = split(sent_back().graph)
    assert host is not None and behind is not None
    assert (targets(host), targets(part), targets(behind)[1:]) == (["mul"], ["mul"], ["iota", "add", "add"])
    assert halves.places == ((0, 0), (2, 0), None, (1, 0)) and sorted(halves.reads) == [(0, 0), (1, 1)] and not halves.sent
    (first, _), (last, finished) = _host_half(host, "h"), _host_half(behind, "b")
    assert finished is not None and (finished.n_calls, finished.n_kernels) == (1, 1)
    run = Joined(first, as_function(part, "d"), halves, CPU, False, None, last)
    y, total, nothing, more = run(torch.ones(4), torch.full((4,), 5.0))
    assert y.tolist() == [2.0] * 4 and total.tolist() == [17.0, 18.0, 19.0, 20.0] and nothing is None and more.tolist() == [15.0] * 4
    assert more.data_ptr() != total.data_ptr()


def test_the_device_writes_no_input_that_is_read_behind_it_and_none_where_that_may_raise() -> None:
    b = Building()
    x, y = b.input("x", meta(4)), b.input("y", meta(4))
    old = b.call(aten._to_copy.default, meta(4, device=CPU), x)
    b.graph.output((old, b.call(prims.neg, meta(4), x), b.call(prims.neg, meta(4), y)))
    *_, behind, halves = split(b.graph, {1: 0, 2: 1})
    assert halves.written({1: 0, 2: 1}) == {0: 0, 1: 1} and untouched(behind, {0: 0, 1: 1}) == {1: 1} and untouched(None, {0: 0}) == {0: 0}
    *_, behind, halves = split(sent_back().graph, {0: 0})
    assert halves.written({0: 0}) == {0: 0} and untouched(behind, {0: 0}) == {}


def test_the_hosts_inputs_are_written_behind_it_all(one_stream: None) -> None:
    halves = split(scaled()[0], {2: 1})[-1]
    s = torch.tensor(2.0)

    def behind(*values: Any) -> Sequence[torch.Tensor]:
        assert s.item() == 2.0
        raise RuntimeError("no memory")

    run = Joined(lambda x, s: (s + 1, s + 1), lambda x, s, sent: (x * sent,), halves, CPU, False, None, behind)
    with pytest.raises(RuntimeError, match="no memory"):
        run(torch.ones(4), s)
    assert s.item() == 2.0 and halves.back


@pytest.mark.parametrize("seed", range(40))
def test_parts_give_what_the_whole_gives(seed: int, one_stream: None) -> None:
    """Programs that go from one device to the other at random: cut, or refused only where something has come back and goes over again."""
    draw, b = random.Random(seed), Building()
    nodes = [b.input(name, meta(4, device=where)) for name, where in (("a", CUDA), ("b", CPU), ("c", CUDA), ("d", CPU))]
    returned, again = set[fx.Node](), False  # what has come back
    for _ in range(draw.randrange(3, 14)):
        x = draw.choice(nodes)
        where = x.meta["val"].device
        way = draw.random()
        if way < 0.35:
            there = CPU if where == CUDA else CUDA
            made = b.call(aten._to_copy.default, meta(4, device=there), x)
            made.kwargs = {"device": CPU}  # there is no other here
            again = again or x in returned
        else:
            y = draw.choice([n for n in nodes if n.meta["val"].device == where])
            made = b.call(draw.choice([prims.add, prims.sub, prims.mul]), meta(4, device=where), x, y)
        if made.meta["val"].device == CPU and (where == CUDA or not returned.isdisjoint(made.all_input_nodes)):
            returned.add(made)
        nodes.append(made)
    b.graph.output((*draw.sample(nodes[4:], min(3, len(nodes) - 4)), nodes[-1]))
    values = [torch.randn(4) for _ in range(4)]
    wanted = as_function(b.graph, "whole")(*values)
    try:
        _, host, part, behind, halves = split(b.graph)
    except CannotLower:
        assert again
        return
    halves_run = [None if g is None else as_function(g, "part") for g in (host, behind)]
    found = Joined(halves_run[0], as_function(part, "d"), halves, CPU, False, None, halves_run[1])(*values)
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("way", ["back", "piece", "drawn", "two", "constant"])
def test_refused(way: str) -> None:
    b = Building()
    x = b.input("x", meta(4))
    if way == "back":
        y = b.call(aten._to_copy.default, meta(4, device=CPU), x)
        b.graph.output((b.call(prims.mul, meta(4), x, b.call(aten._to_copy.default, meta(4), y)),))
    elif way == "piece":
        both = b.call(aten.sort.default, (meta(4), meta(4, device=CPU, dtype=torch.int64)), x)
        b.graph.output((b.call(operator.getitem, meta(4, device=CPU, dtype=torch.int64), both, 1),))
    elif way == "drawn":
        y = b.call(aten._to_copy.default, meta(4, device=CPU), x)
        b.graph.output((b.call(aten.bernoulli.default, meta(4, device=CPU), y), b.call(aten.rand.default, meta(4, device=CPU), [4])))
    elif way == "two":
        y = b.input("y", meta(4, device=torch.device("cuda", 1)))
        b.graph.output((x, y))
    else:
        b.graph.output((b.call(prims.neg, meta(4), x), b.call(prims.iota, meta(4, device=CPU, dtype=torch.int64), 4, torch.int64, CPU)))
    with pytest.raises(CannotLower):
        split(b.graph)


def test_checks_of_the_host_stay_though_nobody_reads_them() -> None:
    b = Building()
    x, s = b.input("x", meta(4)), b.input("s", meta(3, 3, device=CPU))
    b.call(aten._linalg_check_errors.default, None, s, "name", True)
    b.graph.output((b.call(prims.neg, meta(4), x),))
    _, host, rest, *_ = split(b.graph)
    assert (
        host is not None
        and [n.target for n in host.nodes if n.op == "call_function"] == [aten._linalg_check_errors.default]
        and targets(rest) == ["neg"]
    )


def test_what_the_device_draws_stays_though_nobody_reads_it() -> None:
    b = Building()
    x = b.input("x", meta(4))
    b.call(aten.rand_like.default, meta(4), x)
    b.call(aten._linalg_check_errors.default, None, b.call(prims.neg, meta(4), x), "name", True)
    b.graph.output((b.call(prims.mul, meta(4), x, 2.0),))
    _, host, rest, *_ = split(b.graph)
    assert host is None
    found = [n.target for n in rest.nodes if n.op == "call_function"]
    assert aten._linalg_check_errors.default in found and aten.rand_like.default in found
