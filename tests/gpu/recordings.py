"""What CUDA graphs must not change: each check runs a loop in eager and compiled, and compares every number."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import magneto
from magneto.base import events
from magneto.inductor.runtime import cuda_graphs, record
from magneto.inductor.runtime.cuda_graphs import Graphed

DEVICE = "cuda"
CHECKS: dict[str, Callable[[], None]] = {}


def check(fn: Callable[[], None]) -> Callable[[], None]:
    CHECKS[fn.__name__] = fn
    return fn


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE)


def batches(n: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 32, generator=generator).to(DEVICE) for _ in range(n)]


def both(loop: Callable[[nn.Module, Callable[..., Any]], list[torch.Tensor]], recorded: bool = True) -> None:
    """The loop with a model, and with an equal one optimised; and whether anything was recorded."""
    plain = model()
    expected = loop(plain, plain)
    magneto.reset()
    events.reset()
    ours = model()
    found = loop(ours, magneto.optimize("inductor")(ours))
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m: f"tensor {n}: {m}")  # noqa: B023
    if recorded:
        assert events.counters().get("cuda_graphs", 0) > 0, [e.fields for e in events.events("fallback")]


@check
def results_are_kept() -> None:
    def loop(m: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [run(x) for x in batches(7)]

    both(loop)


@check
def training_with_adam() -> None:
    def loop(m: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        optimiser = torch.optim.Adam(m.parameters(), lr=1e-2)
        losses = []
        for x in batches(10):
            out = run(x)  # the last one is alive while the next is made
            loss = out.square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss)
        return [*losses, *m.parameters()]

    both(loop)


@check
def gradients_add_up() -> None:
    def loop(m: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        found = []
        for n, x in enumerate(batches(12)):
            run(x).square().mean().backward()
            if n % 3 == 2:
                found += [p.grad.clone() for p in m.parameters()]  # type: ignore[union-attr]
                m.zero_grad()
        return found

    both(loop)


@check
def gradients_are_zeroed_in_place() -> None:
    def loop(m: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        found = []
        for x in batches(12):
            run(x).square().mean().backward()
            found += [p.grad.clone() for p in m.parameters()]  # type: ignore[union-attr]
            m.zero_grad(set_to_none=False)
        return found

    both(loop)


@check
def gradients_are_kept() -> None:
    def loop(m: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        found = []
        for x in batches(8):
            run(x).square().mean().backward()
            found += [p.grad for p in m.parameters()]
            m.zero_grad()
        return found  # type: ignore[return-value]

    both(loop)


@check
def gradients_that_a_forward_makes() -> None:
    """They stay what they were, whatever is called later, and are multiplied by the loss's own gradient."""
    given, t = [x.to(DEVICE, torch.bfloat16) for x in torch.randn(3, 256, 4099)], torch.randint(0, 4099, (256,)).to(DEVICE)

    def loop(loss: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for turn, factor in enumerate([1.0, 1.0, 1.0, 3.3, 0.25, 1.0, 0.0, 1.0]):
            x, y = (given[(turn + k) % 3].clone().requires_grad_() for k in range(2))
            one, other = loss(x), loss(y)
            (factor * other).backward(retain_graph=turn % 2 == 1)
            if turn % 2:
                other.backward()
            (one / 2 + loss(x)).backward()
            found += [one.detach().clone(), x.grad, y.grad]  # type: ignore[list-item]
        return found

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.float(), t)

    expected = loop(loss)
    magneto.reset()
    events.reset()
    for n, (a, b) in enumerate(zip(loop(magneto.optimize("inductor")(loss)), expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=0.03, atol=1e-6, msg=lambda m: f"tensor {n}: {m}")  # noqa: B023
    assert events.counters().get("gradients_ahead") == 1


@check
def two_forwards_before_a_backward() -> None:
    def loop(m: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        found = []
        xs = batches(12)
        for x, y in zip(xs[::2], xs[1::2], strict=True):
            a, b = run(x), run(y)
            (a * b.detach()).mean().backward()
            b.square().sum().backward()
            found += [p.grad.clone() for p in m.parameters()]  # type: ignore[union-attr]
            m.zero_grad()
        return found

    both(loop, recorded=False)


@check
def parameters_move() -> None:
    def loop(m: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        found = []
        with torch.no_grad():
            for n, x in enumerate(batches(14)):
                if n in (4, 9):
                    for p in m.parameters():
                        p.data = p.data * 1.5
                found.append(run(x))
        return found

    both(loop)


@check
def parameters_are_written() -> None:
    def loop(m: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        found = []
        with torch.no_grad():
            for x in batches(6):
                for p in m.parameters():
                    p.mul_(0.9)
                found.append(run(x))
        return found

    both(loop)


@check
def statistics_are_updated_once_a_call() -> None:
    def loop(_: nn.Module, __: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(32).to(DEVICE)
        run = norm if __ is _ else magneto.optimize("inductor")(norm)
        with torch.no_grad():
            found = [run(x) for x in batches(6)]
        return [*found, norm.running_mean, norm.running_var, norm.num_batches_tracked.float()]  # type: ignore[union-attr,list-item,operator]

    both(loop)


@check
def launches_that_overlap() -> None:
    """Each kernel reads what all programs of the one before have written, and writes what others have read; the library's products stand between. Other numbers in each call, so that old ones are seen."""

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for n in range(12):
            x = x - x.mean(0)
            x = (x / (x.square().mean(1, keepdim=True) + 0.1).sqrt()).t().contiguous()
            if n % 4 == 3:
                x = torch.tanh(x @ w)
        return x

    for size in (64, 1024):
        inputs = [torch.randn(size, size, device=DEVICE) for _ in range(5)]
        w = torch.randn(size, size, device=DEVICE) / size**0.5
        with torch.no_grad():
            expected = [chain(x, w) for x in inputs]
            for mode in (None, "no-cudagraphs"):
                run = magneto.optimize("inductor", mode=mode)(chain)
                for turn in range(20):
                    found = [run(x, w) for x in inputs]
                    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
                        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=lambda m: f"{size}, {mode}, {turn}, {n}: {m}")  # noqa: B023


@check
def another_stream() -> None:
    def loop(m: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        found = []
        stream = torch.cuda.Stream()
        with torch.no_grad():
            for n, x in enumerate(batches(8)):
                if n % 2 and n > 3:
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        found.append(run(x))
                    torch.cuda.current_stream().wait_stream(stream)
                else:
                    found.append(run(x))
        return found

    both(loop)


@check
def recorded_by_the_program() -> None:
    """The program's own graph takes in what the compiled function launches."""
    m = model()
    run = magneto.optimize("inductor")(m)
    (x, y) = batches(2)
    with torch.no_grad():
        for _ in range(4):
            run(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        given = x.clone()
        with torch.cuda.graph(graph):
            out = run(given)
        given.copy_(y)
        graph.replay()
        torch.testing.assert_close(out, m(y), rtol=1e-4, atol=1e-5)


@check
def random_numbers() -> None:
    def loop(m: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        def draw(x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = F.dropout(x.cumsum(0), 0.4) * 2
            return x + torch.rand_like(x)

        fn = draw if run is m else magneto.optimize("inductor")(draw)
        torch.manual_seed(3)
        return [fn(x) for x in batches(6)]

    both(loop)


@check
def threads() -> None:
    m = model()
    run = magneto.optimize("inductor")(m)
    xs = batches(40)
    found: dict[int, torch.Tensor] = {}

    def work(k: int) -> None:
        with torch.no_grad():
            for n in range(k, 40, 2):
                found[n] = run(xs[n])

    pair = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for t in pair:
        t.start()
    for t in pair:
        t.join()
    with torch.no_grad():
        for n, x in enumerate(xs):
            torch.testing.assert_close(found[n], m(x), rtol=1e-4, atol=1e-5)


@check
def memory_goes_with_the_model() -> None:
    def use() -> None:
        m = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(DEVICE)
        run = magneto.optimize("inductor")(m)
        x = torch.randn(512, 1024, device=DEVICE)
        with torch.no_grad():
            for _ in range(5):
                run(x)

    use()
    magneto.reset()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        use()
        magneto.reset()
        gc.collect()
    grown = torch.cuda.memory_allocated() - before
    assert grown < 4 << 20, f"{grown} bytes more"


@check
def the_backend_cudagraphs() -> None:
    m, fresh = model(), model()
    run = magneto.optimize("cudagraphs")(fresh)
    for x in batches(6):
        for net, fn in ((m, m), (fresh, run)):
            net.zero_grad()
            fn(x).square().mean().backward()
        for p, q in zip(m.parameters(), fresh.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)


@check
def without_graphs() -> None:
    magneto.reset()
    events.reset()
    m = model()
    run = magneto.optimize(mode="no-cudagraphs")(copy.deepcopy(m))
    with torch.no_grad():
        for x in batches(4):
            torch.testing.assert_close(run(x), m(x), rtol=1e-4, atol=1e-5)
    assert not events.counters().get("cuda_graphs", 0)


@check
def gradients_are_dropped_behind_the_forward() -> None:
    def loop(m: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        found = []
        for x in batches(16):
            loss = run(x).square().mean()
            m.zero_grad()
            loss.backward()
            found += [p.grad.clone() for p in m.parameters()]  # type: ignore[union-attr]
        return found

    both(loop)


@check
def graphs_are_retained() -> None:
    def loop(m: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        found = []
        for x in batches(12):
            out = run(x).square().mean()
            for again in (True, False):
                out.backward(retain_graph=again)
                found += [p.grad.clone() for p in m.parameters()]  # type: ignore[union-attr]
            m.zero_grad()
        return found

    both(loop)


@check
def an_odd_phase() -> None:
    """Graphs that are alive at the same time, and then again one after another."""

    def loop(m: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        found = []
        for n in (1, 1, 1, 1, 1, 5, 5, 1, 1, 1, 1, 1):
            for out in [run(x) for x in batches(n)]:
                out.square().mean().backward()
                found += [p.grad.clone() for p in m.parameters()]  # type: ignore[union-attr]
            m.zero_grad()
        return found

    both(loop)


@check
def what_a_forward_lends_is_not_copied() -> None:
    magneto.reset()
    gc.collect()
    m = nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8)).to(DEVICE)
    run = magneto.optimize("inductor")(m)
    for n in range(10):
        run(torch.randn(4096, 256, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(n))).square().mean().backward()
        m.zero_grad()
    made = [g.recording for g in gc.get_objects() if isinstance(g, Graphed) and g.recording is not None]
    assert len(made) == 2, len(made)
    copied = [sorted(buffer.nbytes for buffer in r.buffers) for r in made]
    assert all(sum(sizes) < 5 << 20 for sizes in copied), copied  # the input, and the gradient of the result


@check
def large_results_are_made_behind_the_replay() -> None:
    magneto.reset()
    gc.collect()
    m = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)], nn.GELU(), nn.Linear(512, 200_000)).to(DEVICE)
    run = magneto.optimize("inductor")(m)
    with torch.no_grad():
        found = [(x, run(x)) for x in [torch.randn(64, 512, device=DEVICE) for _ in range(6)]]
        for x, y in found:
            torch.testing.assert_close(y, m(x), rtol=1e-4, atol=1e-4)
    (made,) = [g for g in gc.get_objects() if isinstance(g, Graphed) and g.recording is not None]
    assert made.parts is not None and made.recording is not None and not made.recording.held and len({y.data_ptr() for _, y in found}) == 6


@check
def plain_calls_leave_their_memory_to_recordings() -> None:
    magneto.reset()
    gc.collect()
    torch.cuda.empty_cache()
    m = nn.Sequential(nn.Linear(64, 16384), nn.GELU(), nn.Linear(16384, 64), nn.GELU(), nn.Linear(64, 64)).to(DEVICE)
    run, x = magneto.optimize("inductor")(m), torch.randn(2048, 64, device=DEVICE)  # 128 MiB between
    with torch.no_grad():
        for _ in range(4):
            run(x)
    shared = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == (0, 0)]
    unused = sum(s["total_size"] - s["allocated_size"] for s in shared)
    assert any(tuple(s["segment_pool_id"]) != (0, 0) for s in torch.cuda.memory_snapshot()), "nothing was recorded"
    assert unused < 100 << 20, f"{unused >> 20} MiB are held that nobody uses"


@check
def the_workspace_goes_with_the_last_recording() -> None:
    run, x = (
        magneto.optimize("inductor")(nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).to(DEVICE)),
        torch.randn(64, 512, device=DEVICE),
    )
    with torch.no_grad():
        for _ in range(4):
            run(x)
    assert record._workspaces
    del run
    magneto.reset()
    gc.collect()
    assert bool(record._workspaces) == bool(cuda_graphs._alive)


@check
def the_workspaces_are_cleared() -> None:
    """As torch.compile does: recordings keep the one that they use."""
    m = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).to(DEVICE)
    run, x = magneto.optimize("inductor")(m), torch.randn(64, 512, device=DEVICE)
    with torch.no_grad():
        expected = m(x)
        for _ in range(4):
            run(x)
        torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
        torch.cuda.empty_cache()
        taken = [torch.full((1 << 22,), float("nan"), device=DEVICE) for _ in range(16)]
        for _ in range(3):
            torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-5)
        assert all(bool(t.isnan().all()) for t in taken), "memory of others was written"


@check
def recorded_once_more_with_other_blocks() -> None:
    """What is taken while recording is known, and numbers are the same behind a second recording."""
    taken: list[int] = []
    blocks = record.blocks
    record.blocks = lambda changes, first, worth: (taken.append(len(changes)), (96 << 20, 64 << 20))[1]
    try:
        torch.manual_seed(0)
        layers = [
            nn.Conv2d(3, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 8, 5),
        ]
        plain = nn.Sequential(*layers).to(DEVICE)
        ours, x = copy.deepcopy(plain), torch.randn(8, 3, 64, 64, device=DEVICE)
        magneto.reset()
        events.reset()
        run = magneto.optimize("inductor")(ours)
        for _ in range(6):
            for m, f in ((plain, plain), (ours, run)):
                m.zero_grad()
                f(x).square().mean().backward()
            for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
                torch.testing.assert_close(q.grad, p.grad, rtol=2e-2, atol=2e-4, msg=lambda text: f"{name}: {text}")  # noqa: B023
    finally:
        record.blocks = blocks
    counted = events.counters()
    assert counted.get("cuda_graphs", 0) == counted.get("recorded_anew", 0) == len(taken) >= 2 and all(taken), (counted, taken)
