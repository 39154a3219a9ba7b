"""Random numbers of our own kernels, without a device: what an H200 drew (drawn.json), and how the states of draws reach the device's half."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from math import gcd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from magneto.aot_autograd import special
from magneto.aot_autograd.call import as_function
from magneto.aot_autograd.refusal import Refusal
from magneto.aot_autograd.trace import trace
from magneto.dynamo.machine.assume import Drawn, Place, Refuted, assume
from magneto.dynamo.region.runtime import keeps_random_stream
from magneto.graph.layout import is_dense
from magneto.graph.rules_attention import seeded
from magneto.graph.rules_recurrent import call_of
from magneto.inductor import draws
from magneto.inductor import halves as joining
from magneto.inductor.devices import split
from magneto.inductor.halves import Joined
from magneto.inductor.loops.philox import advance_of, limit_of, threads_of, vector_of, word_of
from magneto.inductor.lower import lower_graph
from magneto.inductor.lower.context import CannotLower
from magneto.inductor.lower.dropout import DROPOUT
from magneto.inductor.recall import plainly
from magneto.inductor.runtime.calls import call_named, name_of_call
from magneto.prims import prims
from magneto.prims.decompose import decompose
from tests.aot_autograd.capture import capture
from tests.inductor.codegen.triton_draws import DRAWS
from tests.inductor.loops.interp import run_program
from tests.inductor.lower.prim_graphs import Graph, check
from tests.inductor.test_device_halves import CPU, CUDA, Building, meta, one_stream, scaled  # noqa: F401

aten = torch.ops.aten
DRAWN = json.loads((Path(__file__).parent / "drawn.json").read_text())


@pytest.mark.parametrize("row", DRAWN["rows"], ids=str)
def test_what_a_device_drew(row: list[Any]) -> None:
    """Elements, bytes of each, whether memory was aligned, the generator's offset before and after, the mask around where turns of all threads meet."""
    n, size, aligned, before, after, bits = row
    threads, turn = threads_of(n, DRAWN["processors"], DRAWN["threads"]), DRAWN["processors"] * DRAWN["threads"]
    places = np.array(sorted({i for k in (0, n, *(j * turn for j in range(1, 10))) for i in range(k - 24, k + 24) if 0 <= i < n}))
    words = word_of(DRAWN["seed"], before, places, threads, vector_of(n, size) if aligned else 1)
    mask = words.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33) < (np.float64 if size == 8 else np.float32)(1 - DRAWN["p"])
    assert "".join("01"[int(m)] for m in mask) == f"{int(bits, 16):b}"[1:]
    assert advance_of(n, threads) == after - before


@pytest.mark.parametrize("keep", [0.9, 0.7, 0.5, 1e-3, 1 - 2**-25, 2**-32, 1 - 1e-9, 0.0, 1.5])
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_words_of_numbers_below_one(keep: float, wide: Any) -> None:
    """A word is less than the limit where its number is less than that which it is compared with: around the limit, and anywhere."""
    keep = float(wide(keep))
    limit = limit_of(keep)
    near = np.arange(max(limit - 2000, 0), min(limit + 2000, 1 << 32))
    words = np.concatenate([near, np.linspace(0, (1 << 32) - 1, 4001).astype(np.int64)]).astype(np.uint32)
    numbers = words.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    assert ((numbers < wide(keep)) == (words.astype(np.int64) < limit)).all()
    assert 0 < limit < 1 << 32 or keep in (0.0, 1.5) or (keep, wide) == (1.0, np.float32)


@pytest.mark.parametrize("name", DRAWS)
def test_loops_draw_what_the_operation_says(name: str) -> None:
    torch.manual_seed(0)
    g = Graph()
    DRAWS[name][0](g)
    check(g, DRAWS[name][1])


def targets(graph: fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch, one_stream: None) -> list[int]:  # noqa: F811
    """A device with four multiprocessors of 512 threads; [seed, offset] of its generator."""
    now = [(1 << 64) - 7, 40]

    class Generator:
        get_offset = staticmethod(lambda: now[1])
        set_offset = staticmethod(lambda value: now.__setitem__(1, value))
        initial_seed = staticmethod(lambda: now[0])

    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(),), raising=False)
    monkeypatch.setattr(joining, "capturing", lambda: False)
    monkeypatch.setattr(draws, "multiprocessors", lambda device: (4, 512))
    monkeypatch.setattr(draws, "agrees", lambda device: True)
    return now


def dropped(b: Building, x: fx.Node, known: bool = True, p: float = 0.25) -> fx.Node:
    val = x.meta["val"]
    both = b.call(aten.native_dropout.default, (val, val.with_(dtype=torch.bool)), x, p, *[True] * known)
    both.kwargs = {} if known else {"train": True}
    return b.call(operator.getitem, val, both, 0)


def test_states_are_sent_before_each_run(generator: list[int]) -> None:
    b = Building()
    x, s = b.input("x", meta(50, 1000)), b.input("s", meta(device=CPU))
    wide = b.call(prims.broadcast_in_dim, meta(50, 1000, device=CPU, strides=(0, 0)), s, (50, 1000), ())
    y = dropped(b, b.call(prims.mul, meta(50, 1000), x, wide))
    dropped(b, y)  # nobody reads it: it draws all the same
    z = dropped(b, b.call(prims.add, meta(50, 1000), y, 1.0))
    b.graph.output((z, s))
    graph = draws.drawn_by_loops(b.graph, CUDA)
    assert targets(b.graph).count("aten.native_dropout.default") == 3
    device, host, rest, _, halves = split(graph)
    threads = 2048
    assert halves.draws == (advance_of(50_000, threads),) * 3 == (28,) * 3
    assert host is not None and targets(host) == []
    assert targets(rest).count("magneto.dropout.default") == 2 and "draw_state" not in " ".join(targets(rest))
    assert [n.args[2:] for n in rest.nodes if n.target is DROPOUT] == [(0.25, threads, 4)] * 2
    assert [n.op for n in rest.nodes][:6] == ["placeholder"] * 6  # both inputs, the number that is sent, three states
    seen: list[list[Any]] = []

    def run(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        seen.append([t.tolist() for t in given[2:]])
        return (given[0],)

    joined = Joined(lambda x, s: (s, s), run, halves, CPU, False, lambda *inputs: ["plain"])
    for _ in range(2):
        joined(torch.zeros(50, 1000), torch.tensor(2.5))
    assert (
        seen[0] == [2.5, [-7, 40], [-7, 68], [-7, 96]] and seen[1][1:] == [[-7, 124], [-7, 152], [-7, 180]] and generator[1] == 40 + 6 * 28
    )


def test_a_program_that_captures_runs_operation_by_operation(generator: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    b = Building()
    b.graph.output((dropped(b, b.call(prims.mul, meta(8), b.input("x", meta(8)), 2.0)),))
    halves = split(draws.drawn_by_loops(b.graph, CUDA))[-1]
    joined = Joined(None, lambda *given: (given[0],), halves, CPU, False, lambda *inputs: ["plain"])
    assert joined(torch.ones(8))[0].tolist() == [1.0] * 8 and generator[1] == 44
    monkeypatch.setattr(joining, "capturing", lambda: True)
    assert joined(torch.ones(8)) == ["plain"] and generator[1] == 44


def test_an_input_that_begins_elsewhere_is_the_librarys(generator: list[int]) -> None:
    b = Building()
    b.input("s", meta(8))
    b.graph.output((dropped(b, b.input("x", meta(8)), False),))
    halves = split(draws.drawn_by_loops(b.graph, CUDA))[-1]
    assert halves.aligned == (1,) and halves.draws == (4,)
    joined = Joined(None, lambda *given: (given[0],), halves, CPU, False, lambda *inputs: ["plain"])
    memory = torch.ones(12)
    assert memory.data_ptr() % 16 == 0
    assert joined(memory[1:9], memory[4:])[0].tolist() == [1.0] * 8 and generator[1] == 44
    assert joined(memory[4:], memory[1:9]) == ["plain"] and generator[1] == 44


def among(b: Building, other: str) -> fx.Node:
    """Something beside a dropout for which the library keeps all draws."""
    x = b.input("x", meta(64))
    match other:
        case "a draw of another kind":
            return b.call(aten.rand.default, meta(64), [64])
        case "nothing stays":
            return dropped(b, x, True, 1.0)
        case "attention with dropout":
            return b.call(aten._scaled_dot_product_attention_math.default, meta(64), x, x, x, None, 0.5)
        case "an operation of others":
            return b.call(torch.ops.magneto.scaled_add.default, meta(64), x, x, x)
        case _:
            return b.call(torch.add, meta(64), x, x)


KINDS = ("a draw of another kind", "nothing stays", "attention with dropout", "an operation of others", "a function")


@pytest.mark.parametrize("other", KINDS)
def test_all_draws_of_a_graph_are_ours_or_the_librarys(generator: list[int], other: str) -> None:
    import magneto.graph.scaled  # noqa: F401 - defines the operation

    b = Building()
    b.graph.output((among(b, other), dropped(b, b.input("y", meta(64)))))
    assert draws.drawn_by_loops(b.graph, CUDA) is b.graph


def test_draws_of_the_cpu_are_another_generators(generator: list[int]) -> None:
    b = Building()
    b.graph.output((b.call(aten.rand.default, meta(64, device=CPU), [64]), dropped(b, b.input("y", meta(64)))))
    assert "magneto.dropout.default" in targets(draws.drawn_by_loops(b.graph, CUDA))


def test_another_order_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_checked", {})
    monkeypatch.setattr(joining, "capturing", lambda: False)
    asked: list[torch.device] = []
    monkeypatch.setattr(joining, "_compared", lambda device: asked.append(device) or False)
    with pytest.warns(UserWarning, match="another order than expected"):
        assert not joining.agrees(CUDA)
    assert not joining.agrees(CUDA) and asked == [CUDA]
    monkeypatch.setattr(joining, "_checked", {})
    monkeypatch.setattr(joining, "capturing", lambda: True)
    assert not joining.agrees(CUDA) and asked == [CUDA] and not joining._checked  # looked at another time


class Begins(TorchDispatchMode):
    """Where the memory of each dropout's argument begins, counted in what a thread would read at once; -1 where it has gaps and none reads more than one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.native_dropout.default:
            x = args[0]
            self.seen.append(x.data_ptr() % gcd(x.numel() * x.itemsize, 16) if is_dense(x.shape, x.stride()) else -1)
        return func(*args, **kwargs or {})


def draw(x: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(x, 0.5, True)[0]


def written_in_part(x: torch.Tensor) -> Any:
    y = x * 2
    y[1:].relu_()
    return draw(y[4:8]), draw(y[1:].relu_()), y.sum()


def written_through_a_view(x: torch.Tensor) -> Any:
    y = x * 2
    y[1:].exp_()
    return [draw(y), draw(y[4:].view(-1, 4)), draw(y[8:12]) + draw(y[1:].relu_()[3:7])]


def written(x: torch.Tensor) -> torch.Tensor:
    x[1:].relu_()
    return x


PLACES: dict[str, Any] = {
    "written in part": written_in_part,
    "written through a view": written_through_a_view,
    "a part of what was written twice": lambda x: (y := x * 2, y[1:].relu_(), draw(y[1:].relu_()), draw(y[4:8]), draw(x[:8].clone()))[2:],
    "a copy of an input": lambda x: draw(x.clone()) + draw(torch.empty_like(x).copy_(x)),
    "a copy of a part": lambda x: (draw(x[1:9].clone()), draw((x * 2)[2:10].clone())),
    "a copy of what was written in part": lambda x: draw(torch.empty_like(part := (x * 2)[1:9]).copy_(written(part))),
    "a copy of an input written in part": lambda x: draw(torch.empty_like(part := x.split(16)[0]).copy_(written(part))),
    "a part of what is computed": lambda x: [draw(part) for part in (x * 2).split([8, 4, 20])],
    "memory with gaps": lambda x: (draw(x[:32].to(torch.complex64).real), draw((x * 2)[:32:2]), draw(x[:32].view(4, 8)[:, 2:])),
    "a view of an input": lambda x: (draw(x.view(4, 8)), draw(x[4:12]), draw(x), draw(x[3:4]), draw(x.view(4, 8).t())),
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("shift", [0, 1])
def test_the_library_draws_for_memory_that_begins_as_in_eager(name: str, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(special, "_on_gpu", lambda x: True)
    monkeypatch.setattr(draws, "_on_cpu", lambda node: False)
    x = torch.randn(32 + shift)[shift:]
    gm, _ = capture(PLACES[name], x.clone())
    functional = trace(gm, [x.clone()]).graph  # where an input begins may differ from call to call
    graph = decompose(functional)
    program = lower_graph(graph, on_gpu=True)
    runs = [
        lambda: PLACES[name](x),
        lambda: as_function(functional)(x),
        lambda: plainly(graph, "g", {})(frozenset())(x),
        lambda: run_program(program, x),
    ]
    found = []
    for run in runs:
        with Begins() as begins:
            run()
        found.append(begins.seen)
    assert found[0] and found[1] == found[2] == found[0]
    if shift == 0 or not draws.aligned(graph):
        assert found[3] == found[0]
    assert draws.aligned(graph) == (0,) * ("view of an input" in name)
    if shift == 0:
        assert all(draws._is_ours(n) == n.args[0].meta["val"].is_contiguous() for n in graph.nodes if n.target is draws.DRAWN)


def written_input(x: torch.Tensor) -> torch.Tensor:
    x[:8].relu_()
    return draw(x)


@pytest.mark.parametrize("fn", [lambda x: draw((x * 2)[1:9]), lambda x: draw(x[2:10]), written_input], ids=["computed", "input", "written"])
def test_memory_that_begins_between_is_eagers(fn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(special, "_on_gpu", lambda x: True)
    gm, _ = capture(fn, torch.randn(32))
    with pytest.raises(Refusal, match="between multiples of 16 bytes"):
        trace(gm, [torch.randn(32)])


def test_dropout_of_gaps_that_are_folded_away_is_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(special, "_on_gpu", lambda x: True)
    graph = trace(capture(lambda x: draw(torch.cat([x.sin(), x], 1)[:, :8]), torch.randn(4, 8))[0], [torch.randn(4, 8)]).graph
    with pytest.raises(CannotLower, match="without the gaps"):
        lower_graph(decompose(graph), on_gpu=True)


def test_librarys_draws_of_an_input_that_begins_elsewhere_are_made_operation_by_operation(generator: list[int]) -> None:
    """A recording would have copied it to the beginning of a memory."""
    b = Building()
    x, y = (b.input(name, meta(64)) for name in "xy")
    b.input("written", meta(64))
    view = b.call(prims.reshape, meta(8, 8), x, (8, 8))
    b.graph.output((b.call(aten.rand.default, meta(64), [64]), dropped(b, view, False), dropped(b, b.call(prims.mul, meta(64), y, 2.0))))
    assert draws.drawn_by_loops(b.graph, CUDA) is b.graph
    assert split(b.graph)[-1].aligned == (0,) and split(b.graph, {1: 2})[-1].aligned == (0, 2)
    joined = Joined(None, lambda *given: ["recorded"] * 3, split(b.graph)[-1], CPU, False, lambda *inputs: ["plain"])
    memory = torch.ones(68)
    assert joined(memory[1:65], memory, memory) == ["plain"] and joined(memory[4:], memory[1:], memory[1:])[0] == "recorded"


@pytest.mark.parametrize("name, first", [("_scaled_dot_product_efficient_attention_backward", 7), ("_efficient_attention_backward", 12)])
def test_a_backward_of_attention_finds_the_seed_where_it_looks(name: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, or on the device while it is captured: ATen reads the address in any case."""
    places = [a.name for a in getattr(aten, name).default._schema.arguments]
    assert places[first : first + 2] == ["philox_seed", "philox_offset"]

    class Backward:
        overloadpacket = getattr(aten, name)

        def __call__(self, *args: Any, **options: Any) -> Any:
            return args[first : first + 2], options

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    run = seeded(op := Backward())
    assert run is not None and call_of(op, None) is run and seeded(aten.mm.default) is None

    def called(on_device: bool, p: float) -> Any:
        args: list[Any] = [None] * 16
        args[first : first + 2] = [SimpleNamespace(is_cuda=on_device, cpu=lambda n=n: n) for n in range(2)]
        args[places.index("dropout_p")] = p
        found, options = run(*args, scale=2.0)
        assert options == {"scale": 2.0}
        return list(found) if found != tuple(args[first : first + 2]) else "as given"

    assert called(False, 0.1) == "as given" and called(True, 0.1) == [0, 1] and called(True, 0.0) == "as given"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert called(True, 0.1) == "as given" and called(False, 0.0) == "as given"
    with pytest.raises(RuntimeError, match="is captured"):
        called(False, 0.1)


def test_plans_call_it_so_in_every_process() -> None:
    op = aten._scaled_dot_product_efficient_attention_backward.default
    function = call_named(f"seeded {op}")
    assert function is seeded(op) and name_of_call(function) == f"seeded {op}"


def test_a_graph_that_fails_has_drawn_nothing_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    seen: list[torch.Tensor] = []

    def graph() -> None:
        seen.append(torch.rand(3, generator=generator) + torch.rand(3))
        raise RuntimeError("no memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            keeps_random_stream(graph)()
    assert torch.equal(*seen)
    place = Place(test_plans_call_it_so_in_every_process.__code__, 0, True)
    before = Drawn()
    first = torch.rand(3, generator=generator)
    with pytest.raises(Refuted):
        assume(False, True, place, before)
    assert torch.equal(torch.rand(3, generator=generator), first)
