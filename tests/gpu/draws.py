"""Random numbers of our own kernels: every one is eager's, and so is the generator behind each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import magneto
from magneto.base import events
from magneto.base.flags import config
from magneto.inductor import halves
from magneto.inductor.loops import philox
from magneto.inductor.lower import dropout

DEVICE = "cuda"
DRAWS: dict[str, Callable[[], None]] = {}
STATE = torch.cuda.get_rng_state


def check(fn: Callable[[], None]) -> Callable[[], None]:
    DRAWS[f"draws: {fn.__name__}"] = config.patch(draw_in_kernels=True)(fn)
    return fn


def run_both(
    make: Callable[[], Callable[..., list[torch.Tensor]]], given: list[torch.Tensor], calls: int = 7, refused: str | None = None
) -> list[str]:
    """Bits and generator after each call, of a function whose other operations are exact; the text of the kernels. `refused`: why the graph runs in eager."""
    found: list[list[torch.Tensor]] = [[], []]
    for ours, kept in enumerate(found):
        magneto.reset()
        events.reset()
        fn = make()
        fn = magneto.optimize("inductor")(fn) if ours else fn
        torch.manual_seed(12)
        for n in range(calls):
            if n == 4:
                torch.cuda.manual_seed((1 << 63) + 5)
            kept += [t.detach().clone() for t in fn(*given)]
            kept += [STATE(), torch.rand(3, device=DEVICE)]
    for n, (a, b) in enumerate(zip(*found, strict=True)):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"tensor {n}: {a.dtype} {tuple(a.shape)}, {(a != b).sum()} differ"
    warnings = [e.fields for e in events.events("warning")]
    assert [w["fields"]["reason"] for w in warnings] == ([refused] if refused else []), warnings
    return [str(e.fields["source"]) for e in events.events("kernel")]


def several(dtype: torch.dtype, n: int) -> Callable[..., list[torch.Tensor]]:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        a = F.dropout((x * 2).view(-1, n // 4) if n % 4 == 0 else x * 2, 0.1)
        b = F.dropout(a.relu(), 0.5) * 2
        return [a, b, F.dropout(b.reshape(-1).abs(), 0.37).neg(), b.max()]

    return fn


@check
def bits() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for n in (1, 7, 1002, 4096, 300_000, 5_000_004, 5_000_001):
            texts = run_both(lambda: several(dtype, n), [torch.randn(n, device=DEVICE).to(dtype)])  # noqa: B023
            assert any("lib.uniform" in text for text in texts), (dtype, n, texts)


@check
def a_residual_and_its_norm_are_one_kernel() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.dropout(F.gelu(x), 0.1) + y, (768,))

    for dtype in (torch.float32, torch.bfloat16):
        x, y = (torch.randn(512, 768, device=DEVICE, dtype=dtype) for _ in range(2))
        run = magneto.optimize("inductor")(fn)
        events.reset()
        for n in range(6):
            torch.manual_seed(n)
            wanted, after = fn(x, y), STATE()
            torch.manual_seed(n)
            torch.testing.assert_close(
                run(x, y), wanted, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=2e-2 if dtype is torch.bfloat16 else 1e-5
            )
            assert torch.equal(STATE(), after)
        texts = [str(e.fields["source"]) for e in events.events("kernel")]
        assert len(texts) == 1 and "lib.uniforms" in texts[0], texts


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(64, 128), nn.Linear(128, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + F.dropout(self.two(F.dropout(F.gelu(self.one(x)), 0.2)), 0.1))


def trained(wrap: Callable[[Any], Any], keep: bool, steps: int = 10) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(*[Block() for _ in range(3)]).to(DEVICE)

    def kept(x: torch.Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=False)

    step, found = wrap(kept if keep else model), []
    optimiser = torch.optim.SGD(model.parameters(), 0.05)
    for n in range(steps):
        x = torch.randn(32, 64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(n))
        step(x).square().mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None] + [STATE()]
        optimiser.step()
        optimiser.zero_grad()
    return found


def trains(keep: bool) -> None:
    wanted = trained(lambda m: m, keep)
    magneto.reset()
    events.reset()
    for n, (a, b) in enumerate(zip(trained(magneto.optimize("inductor"), keep), wanted, strict=True)):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4, msg=lambda m: f"tensor {n}: {m}")  # noqa: B023
    assert any("lib.uniform" in str(e.fields["source"]) for e in events.events("kernel"))


@check
def training() -> None:
    trains(False)
    assert events.counters().get("cuda_graphs", 0) >= 2, events.counters()


@check
def checkpoints() -> None:
    trains(True)


@check
def programs_that_capture_themselves() -> None:
    """A replay draws anew, as eager's does."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * 2, 0.5) + 1

    x, found = torch.randn(1000, device=DEVICE), []
    for run in (fn, magneto.optimize("inductor")(fn)):
        for _ in range(3):
            run(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(x)
        torch.manual_seed(8)
        for _ in range(3):
            graph.replay()
            found.append(out.clone())
        found += [STATE(), run(x)]
    assert all(torch.equal(a, b) for a, b in zip(found[:5], found[5:], strict=True))
    assert not torch.equal(found[0], found[1])


@check
def memory_that_begins_anywhere() -> None:
    """Which numbers an element gets depends on it; beside draws of another kind the library makes all, of memory that begins as eager's does."""

    def fn(x: torch.Tensor, other: bool) -> list[torch.Tensor]:
        y = x * 2
        y[1:].relu_()
        found = [
            F.dropout(x, 0.3),
            F.dropout(y[1:].relu_(), 0.3),
            F.dropout(y[4:8], 0.3),
            F.dropout(x[:8].clone(), 0.3),
            F.dropout(x[4:12], 0.3),
        ]
        return [*found, torch.rand_like(y)] if other else found

    memory = torch.linspace(1, 2, 1028, device=DEVICE)  # nothing is zero, so that a number too many or too few is seen
    for other in (False, True):
        for x in (memory[1:1025], memory[4:], memory[:1024]):
            texts = run_both(lambda: lambda x: fn(x, other), [x])  # noqa: B023
            assert any("lib.uniform" in text for text in texts) is not other

    def between(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        return [F.dropout(y[1:9], 0.3), F.dropout(x[2:10], 0.3), F.dropout(y[1:].neg_()[:12], 0.3)]

    run_both(lambda: between, [memory], refused="dropout of memory that may begin between multiples of 16 bytes")


@check
def inputs_are_looked_at_in_each_call() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [F.dropout(x, 0.3) + y, F.dropout(y, 0.2)]

    for dtype in (torch.float32, torch.bfloat16):
        memory = torch.randn(4104, device=DEVICE, dtype=dtype)
        for x, y in ((memory[:4096], memory[8:]), (memory[1:4097], memory[8:]), (memory[8:], memory[2:4098])):
            run_both(lambda: fn, [x, y])


@check
def other_draws_keep_their_turn() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = F.dropout(x * 2, 0.3)
        return [y, torch.rand_like(y), F.dropout(y * 2, 0.4)]

    run_both(lambda: fn, [torch.randn(3000, device=DEVICE)])


@check
def another_order_is_noticed() -> None:
    """All forms are compared: a difference in any is seen, and the generator is where it was."""
    device, before = torch.device("cuda", 0), STATE()
    assert halves._compared(device)
    for name, wrong in {
        "vector_of": [lambda n, size: 4 if n % 4 == 0 else 1, lambda n, size: 1],
        "threads_of": [lambda n, *kind: 256 * min(-(-n // 256), 1024)],
        "advance_of": [lambda n, threads: 4],
        "dropped": [lambda x, words, p: (x, words < 0)],
    }.items():
        where = dropout if name == "dropped" else philox
        right = getattr(where, name)
        for other in wrong:
            setattr(where, name, other)
            try:
                assert not halves._compared(device), name
            finally:
                setattr(where, name, right)
    assert torch.equal(STATE(), before)
