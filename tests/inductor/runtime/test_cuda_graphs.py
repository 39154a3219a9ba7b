"""The logic of recordings, on tapes: numbers are eager's in every order of calls, and a call in a loop is a replay."""

from __future__ import annotations

import _thread
import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from magneto.inductor.runtime import cuda_graphs, record
from magneto.inductor.runtime.cuda_graphs import Graphed
from tests.inductor.runtime.tape import CPU, Deck, deck

__all__ = ["deck"]

Loop = Callable[[nn.Module, Callable[..., Any]], list[Any]]
LOOPS: dict[str, Loop] = {}


def loop(fn: Loop) -> Loop:
    LOOPS[fn.__name__] = fn
    return fn


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batches(n: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 8, generator=generator) for _ in range(n)]


def gradients(m: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in m.parameters() if p.grad is not None]


@loop
def results_are_kept(m: nn.Module, run: Callable[..., Any]) -> list[Any]:
    with torch.no_grad():
        return [run(x) for x in batches(9)]


@loop
def a_step_with_an_optimiser(m: nn.Module, run: Callable[..., Any]) -> list[Any]:
    optimiser = torch.optim.SGD(m.parameters(), lr=1e-1)
    losses = []
    for x in batches(12):
        loss = run(x).square().mean()
        optimiser.zero_grad()  # the last gradients are alive during the forward
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in m.parameters())]


@loop
def gradients_add_up(m: nn.Module, run: Callable[..., Any]) -> list[Any]:
    found = []
    for n, x in enumerate(batches(16)):
        run(x).square().mean().backward()
        if n % 4 == 3:
            found += gradients(m)
            m.zero_grad()
    return found


@loop
def gradients_add_up_in_pairs(m: nn.Module, run: Callable[..., Any]) -> list[Any]:
    found = []
    for n, x in enumerate(batches(40)):
        run(x).square().mean().backward()
        if n % 2:
            found += gradients(m)
            m.zero_grad()
    return found


@loop
def gradients_are_zeroed_in_place(m: nn.Module, run: Callable[..., Any]) -> list[Any]:
    found = []
    for x in batches(14):
        run(x).square().mean().backward()
        found += gradients(m)
        m.zero_grad(set_to_none=False)
    return found


@loop
def gradients_are_kept(m: nn.Module, run: Callable[..., Any]) -> list[Any]:
    found = []
    for x in batches(12):
        run(x).square().mean().backward()
        found += [p.grad for p in m.parameters()]
        m.zero_grad()
    return found


@loop
def two_forwards_before_a_backward(m: nn.Module, run: Callable[..., Any]) -> list[Any]:
    found = []
    xs = batches(24)
    for x, y in zip(xs[::2], xs[1::2], strict=True):
        a, b = run(x), run(y)
        (a * b.detach()).mean().backward()
        b.square().sum().backward()
        found += gradients(m)
        m.zero_grad()
    return found


@loop
def backwards_in_reverse(m: nn.Module, run: Callable[..., Any]) -> list[Any]:
    found: list[Any] = []
    for _ in range(4):
        for out in reversed([run(x) for x in batches(3)]):
            out.square().sum().backward()
            found += gradients(m)
        m.zero_grad()
    return found


@loop
def the_graph_is_retained(m: nn.Module, run: Callable[..., Any]) -> list[Any]:
    found = []
    for x in batches(10):
        out = run(x).sum()
        out.backward(retain_graph=True)
        found += gradients(m)
        out.backward()
        found += gradients(m)
        m.zero_grad()
    return found


@loop
def a_retained_graph_is_kept(m: nn.Module, run: Callable[..., Any]) -> list[Any]:
    found, outs = [], []
    for x in batches(10):
        outs.append(run(x).sum())
        outs[-1].backward(retain_graph=True)
        m.zero_grad()
    for out in outs:
        out.backward()
        found += gradients(m)
        m.zero_grad()
    return found


@loop
def evaluated_in_between(m: nn.Module, run: Callable[..., Any]) -> list[Any]:
    found: list[Any] = []
    for n, x in enumerate(batches(16)):
        if n % 3 == 2:
            with torch.no_grad():
                found.append(run(x))
        else:
            run(x).square().mean().backward()
            found += gradients(m)
            m.zero_grad()
    return found


@loop
def parameters_move(m: nn.Module, run: Callable[..., Any]) -> list[Any]:
    found: list[Any] = []
    for n, x in enumerate(batches(20)):
        if n in (6, 13):
            for p in m.parameters():
                p.data = p.data * 1.5
        run(x).square().mean().backward()
        found += gradients(m)
        m.zero_grad()
    return found


@loop
def one_of_several_results_is_used(m: nn.Module, run: Callable[..., Any]) -> list[Any]:
    found: list[Any] = []
    for x in batches(10):
        x.requires_grad_()
        first = torch.autograd.grad(run(x).sum(), x)[0]
        run(x).mean().backward()
        found += [first, x.grad, *gradients(m)]
        m.zero_grad()
    return found


@pytest.mark.parametrize("way", ["copied", "in two", "large"])
@pytest.mark.parametrize("name", LOOPS)
def test_numbers_are_eagers(name: str, way: str, deck: Deck, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two: results are made behind the replays. Large: what a backward is given is read where it lies, if it stays."""
    deck.parted = in_two = way == "in two"
    monkeypatch.setattr(cuda_graphs, "LARGE", 1 if way == "large" else cuda_graphs.LARGE)
    plain, ours = model(), model()
    expected = LOOPS[name](plain, plain)
    found = LOOPS[name](ours, magneto.optimize("cudagraphs")(ours))
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a, b, msg=lambda m, n=n: f"tensor {n}: {m}")
    assert deck.replays > 0
    forward = next(g for g in deck.made if not g.of_backward)
    assert (forward.parts is not None) == in_two


def step(m: nn.Module, run: Callable[..., Any], x: torch.Tensor) -> None:
    run(x).square().mean().backward()
    for p in m.parameters():
        p.grad = None


def test_what_a_forward_lends_is_read_where_it_lies(deck: Deck) -> None:
    """It lay elsewhere in the call before the forward was recorded."""
    m, x = model(), batches(1)[0]
    run = magneto.optimize("cudagraphs")(m)
    for _ in range(8):
        step(m, run, x)
    forward, backward = deck.of(False).recording, deck.of(True).recording
    assert forward is not None and backward is not None
    assert len(deck.tapes) == 2
    assert forward.copied == []
    large = [buffer for buffer in backward.buffers if buffer.numel() > 20]
    assert large == []  # what the results become may be copied
    assert [tape.replays for tape in deck.tapes] == [7, 7]
    assert forward.shows and not backward.shows


@pytest.mark.parametrize("large", [80, 81])
def test_a_large_gradient_of_a_result_that_stays_is_read_where_it_lies(large: int, deck: Deck, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not, it costs two recordings more, and is copied from then on."""
    monkeypatch.setattr(cuda_graphs, "LARGE", large)
    m, x, plain = model(), batches(1)[0], model()
    run = magneto.optimize("cudagraphs")(m)

    def back(given: torch.Tensor) -> int:
        for net, f in ((m, run), (plain, plain)):
            net.zero_grad()
            f(x).backward(given)
        torch.testing.assert_close(gradients(m), gradients(plain))
        made = deck.of(True).recording
        return len(made.copied) if made is not None else -1

    seed = torch.randn(5, 4)
    assert [back(seed) for _ in range(6)][-1] == (large > seed.nbytes)
    assert deck.tapes[1].replays == 5
    moving = [torch.randn(5, 4) for _ in range(24)]
    assert [back(given) for given in moving][-1] == 1
    assert len(deck.tapes) == (2 if large > seed.nbytes else 3)
    replays = deck.replays
    back(seed)
    assert deck.replays == replays + 2


def test_a_gradient_at_the_address_of_what_a_live_recording_has_read_is_another_tensor(deck: Deck, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, x, kept = bytearray(80), batches(1)[0], []
    for large in (80, 81):
        monkeypatch.setattr(cuda_graphs, "LARGE", large)
        kept.append(magneto.optimize("cudagraphs")(model()))
        seed = torch.frombuffer(memory, dtype=torch.float32).view(5, 4)
        for _ in range(6):
            kept[-1](x).backward(seed)
        del seed
    first, second = (g.recording for g in deck.made if g.of_backward)
    assert first is not None and second is not None
    assert [len(first.copied), len(second.copied)] == [0, 1]


def test_a_large_gradient_at_the_same_place_may_be_laid_out_otherwise(deck: Deck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "LARGE", 1)
    m, plain, x, seed = model(), model(), batches(1)[0][:4], torch.randn(4, 4)
    run = magneto.optimize("cudagraphs")(m)
    rest = [(seed, seed.t(), seed[:1].expand(4, 4), seed.view(16)[0].expand(4, 4))[k % 4] for k in range(24)]
    for given in [seed] * 6 + rest:
        for net, f in ((m, run), (plain, plain)):
            net.zero_grad()
            f(x).backward(given)
        torch.testing.assert_close(gradients(m), gradients(plain))
    assert deck.tapes[1].replays > 5


def test_inputs_that_will_not_be_copied_take_no_memory(deck: Deck, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known from their sizes that they are too large for a recording."""
    m, made = model(), list[Any]()
    monkeypatch.setattr(cuda_graphs, "BUFFERS", 5 * 8 * 4 - 1)
    run = magneto.optimize("cudagraphs")(m)
    fresh = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **kwargs: made.append(args) or fresh(*args, **kwargs))
    with torch.no_grad():
        kept = [run(x) for x in batches(8)]
    assert kept and all(args[0] != (5, 8) for args in made) and not deck.tapes and "160 bytes" in deck.made[0].why_off


def test_a_moving_input_is_copied_and_costs_one_call_more(deck: Deck) -> None:
    m = model()
    run = magneto.optimize("cudagraphs")(m)
    kept = batches(8)
    for x in kept:
        step(m, run, x)
    forward, backward = deck.of(False).recording, deck.of(True).recording
    assert forward is not None and backward is not None
    assert [buffer.shape for buffer in forward.buffers] == [(5, 8)]
    assert len(backward.copied) <= 2  # the input, and the gradient of the result
    assert [tape.replays for tape in deck.tapes] == [6, 6]


def test_accumulating_copies_gradients_only(deck: Deck) -> None:
    m = model()
    run = magneto.optimize("cudagraphs")(m)
    for n, x in enumerate(batches(24)):
        run(x).square().mean().backward()
        if n == 6:
            m.zero_grad()  # the next gradients are those of a recording, and stay
    forward, backward = deck.of(False), deck.of(True)
    assert forward.recording is not None and forward.recording.lent and not forward.kept
    assert backward.recording is not None and backward.kept
    assert deck.tapes[-1].replays > 8


def test_one_odd_phase_is_forgotten(deck: Deck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magneto.inductor.runtime.cuda_graphs.TRIAL", 8)
    m, x = model(), batches(1)[0]
    run = magneto.optimize("cudagraphs")(m)
    for _ in range(5):
        step(m, run, x)
    graphs = [run(x) for _ in range(6)]
    assert deck.of(False).kept
    del graphs
    for _ in range(14):
        step(m, run, x)
    forward = deck.of(False)
    assert not forward.kept and forward.recording is not None and forward.recording.lent
    before = deck.replays
    step(m, run, x)
    assert deck.replays == before + 2


def test_odd_calls_now_and_then_change_nothing(deck: Deck) -> None:
    m, x = model(), batches(1)[0]
    run = magneto.optimize("cudagraphs")(m)
    for _ in range(10):
        for _ in range(4):
            step(m, run, x)
        first, second = run(x), run(x)
        (first + second).sum().backward()
        m.zero_grad()
        del first, second
    assert not deck.of(False).kept and len(deck.tapes) == 2


def test_another_thread_that_replays_costs_nothing(deck: Deck) -> None:
    m, x = model(), batches(1)[0]
    run = magneto.optimize("cudagraphs")(m)
    for _ in range(5):
        step(m, run, x)
    forward = deck.of(False)
    with forward.lock:
        for _ in range(8):
            step(m, run, x)
    assert forward.debt == 0 and len(deck.tapes) == 2


def test_another_stream_and_captures_run_plainly(deck: Deck) -> None:
    m, x = model(), batches(1)[0]
    run = magneto.optimize("cudagraphs")(m)
    for _ in range(5):
        step(m, run, x)
    before = deck.replays
    deck.stream = 7
    step(m, run, x)
    deck.stream = 0
    deck.capturing = True
    step(m, run, x)
    deck.capturing = False
    assert deck.replays == before
    step(m, run, x)
    assert deck.replays == before + 2


def test_what_was_kept_for_backward_dies_in_a_plain_backward(deck: Deck) -> None:
    """Without a recording too, a list gives up what it holds."""
    from magneto.inductor.runtime.cuda_graphs import Graphed

    alive: list[bool] = []

    class Run:
        def consume(self, values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            found = weakref.ref(values[0])
            first = values.pop(0)
            result = first * 2
            del first
            alive.append(found() is not None)
            return (result,)

        def __call__(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (values[0] * 2,)

    graphed = Graphed(Run(), CPU, "graph", 9, 0)
    graphed.why_off = "of the test"
    graphed.consume([torch.ones(3)])
    assert alive == [False]


def test_recordings_go_with_the_model(deck: Deck) -> None:
    m, x = model(), batches(1)[0]
    run = magneto.optimize("cudagraphs")(m)
    for _ in range(6):
        step(m, run, x)
    found = [weakref.ref(tape) for tape in deck.tapes]
    deck.tapes.clear()
    deck.made.clear()
    del m, run
    magneto.reset()
    gc.collect()
    assert [ref() for ref in found] == [None, None]


def test_copies_of_a_model_have_recordings_of_their_own(deck: Deck) -> None:
    m, x = model(), batches(1)[0]
    other = copy.deepcopy(m)
    run, beside = magneto.optimize("cudagraphs")(m), magneto.optimize("cudagraphs")(other)
    for _ in range(8):
        a, b = run(x), beside(x)
        (a * b).sum().backward()
        for p, q in zip(m.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
            p.grad = q.grad = None


@pytest.mark.parametrize("keep", ["hooks", "asked", "storage"])
def test_what_others_have_of_a_forward_stays_as_it_is(keep: str, deck: Deck) -> None:
    """Saved tensors that somebody holds: through hooks, of the node, or only their memory."""
    m, x = model(), batches(1)[0]
    run = magneto.optimize("cudagraphs")(m)
    for _ in range(5):
        step(m, run, x)
    kept: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t) if keep == "hooks" else contextlib.nullcontext():
        out = run(x)
    if keep != "hooks":
        saved = (*out.grad_fn.saved_tensors, *out.grad_fn.extras)  # type: ignore[union-attr]
        kept += saved if keep == "asked" else [t.detach() for t in saved]
        del saved
    out.sum().backward()
    m.zero_grad()
    del out
    before = [t.detach().clone() for t in kept]
    for other in batches(4)[1:]:
        step(m, run, other)
    for a, b in zip(kept, before, strict=True):
        torch.testing.assert_close(a, b)
    kept.clear()
    replays = deck.tapes[0].replays
    step(m, run, x)
    assert deck.replays > replays


def test_a_recording_has_the_room_of_what_calls_before_have_left(deck: Deck, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that is given back before there are buffers for inputs that move, which would hold what they lie in."""
    log: list[str] = []
    fresh, recorded = torch.empty_strided, Graphed._record
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("room"))
    monkeypatch.setattr(Graphed, "_record", lambda *args: log.append("begun") or recorded(*args))
    m = model()
    run = magneto.optimize("cudagraphs")(m)
    first, *rest = batches(6)  # all at once: they lie apart
    with torch.no_grad():
        kept = [run(first)]
        monkeypatch.setattr(torch, "empty_strided", lambda *args, **kwargs: log.append("buffer") or fresh(*args, **kwargs))
        for x in rest:
            kept.append(run(x))  # inputs move
    (made,) = [g.recording for g in deck.made]
    assert made is not None and made.copied and log[log.index("begun") :][:3] == ["begun", "room", "buffer"] and log.count("room") == 1


def test_who_else_may_launch() -> None:
    end, found = threading.Event(), list[bool]()
    alone = record._alone()
    ours = threading.Thread(target=end.wait, name="magneto-triton_0")
    ours.start()
    found.append(record._alone() == alone)
    _thread.start_new_thread(
        lambda: (found.append(record._alone() == alone), end.set()), ()
    )  # as autograd's thread, which is none of Python's
    ours.join(10)
    end.clear()
    another = threading.Thread(target=end.wait, name="another")
    another.start()
    found.append(not record._alone())
    end.set()
    another.join()
    assert found == [True, True, True]
