"""Steps of optimisers on a device: one kernel for all parameters, whatever their sizes, types and places. And what a second process finds on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import magneto
from magneto.base import events

DEVICE = "cuda"
CHECKS: dict[str, Callable[[], None]] = {}


def check(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(fn: Callable[[], None]) -> Callable[[], None]:
        CHECKS[f"optimisers: {name}"] = fn
        return fn

    return add


def parameters(dtype: torch.dtype, apart: bool = False) -> list[torch.nn.Parameter]:
    """Fifty, of one to some thousand elements. `apart`: one behind the other in one memory, so that most addresses are no multiples of 16."""
    torch.manual_seed(0)
    shapes = [(n % 5 + 1, 17 * n + 1) for n in range(48)] + [(1024,), (2048,)]
    flat = torch.randn(sum(a * b for a, *rest in shapes for b in (rest or [1])) + 1, device=DEVICE).to(dtype)
    found, at = [], 1
    for shape in shapes:
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        found.append(torch.nn.Parameter(flat[at : at + n].view(shape) if apart else flat[at : at + n].view(shape).clone()))
        at += n
    return found


def gradients(ps: list[torch.nn.Parameter], generator: torch.Generator, moving: bool) -> None:
    for p in ps:
        fresh = torch.randn(p.shape, generator=generator).to(DEVICE, p.dtype) * 0.1
        if p.grad is None or moving:
            p.grad = fresh
        else:
            p.grad.copy_(fresh)


def compare(kind: str, dtype: torch.dtype, apart: bool = False, moving: bool = True, **options: Any) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        ps = parameters(dtype, apart)
        optimiser = getattr(torch.optim, kind)(ps, lr=1e-2, **options)
        generator = torch.Generator().manual_seed(1)

        def update() -> None:
            optimiser.step()

        call = wrap(update)
        for _ in range(6):
            gradients(ps, generator, moving)
            call()
        return ps

    expected = run(lambda fn: fn)
    magneto.reset()
    events.reset()
    found = run(magneto.optimize("inductor", nopython=True))
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m: f"parameter {n}: {m}")  # noqa: B023
    plans = [
        e.fields
        for e in events.events("artifact")
        if e.fields.get("artifact") == "plan" and not str(e.fields.get("graph")).endswith("_host")
    ]
    assert (plans and plans[-1]["kernels"] <= 6) or events.counters().get("graphs_from_store", 0), plans
    assert not events.events("fallback"), [e.fields for e in events.events("fallback")]


for _kind, _options in {"Adam": {}, "AdamW": {"weight_decay": 0.1}, "SGD": {"momentum": 0.9}}.items():
    for _dtype in (torch.float32, torch.bfloat16):
        for _apart in (False, True):
            _name = f"{_kind} {str(_dtype)[6:]}{' anywhere' if _apart else ''}"
            check(_name)(lambda k=_kind, d=_dtype, a=_apart, o=_options: compare(k, d, a, **o))  # type: ignore[misc]

check("Adam, gradients that stay")(lambda: compare("Adam", torch.float32, moving=False))
check("Adam, capturable")(lambda: compare("Adam", torch.float32, capturable=True))


@check("a step in a capture of the program's own")
def captured() -> None:
    def run(wrap: Callable[[Any], Any], capture: bool) -> list[torch.Tensor]:
        ps = parameters(torch.float32)
        optimiser = torch.optim.Adam(ps, lr=1e-2, capturable=True)
        gradients(ps, torch.Generator().manual_seed(1), True)

        def update() -> None:
            optimiser.step()

        call = wrap(update)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
            if capture:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=side):
                    call()
            for _ in range(3):
                graph.replay() if capture else call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        return ps

    expected = run(lambda fn: fn, False)
    magneto.reset()
    found = run(magneto.optimize("inductor", nopython=True), True)
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda m: f"parameter {n}: {m}")  # noqa: B023


@check("numbers that change with each step")
def schedules() -> None:
    """Rates, slopes, momentum, smoothing: of three graphs, and eager's numbers."""

    def run(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [
            torch.nn.Linear(16, 32, bias=False),
            torch.nn.BatchNorm1d(32),
            torch.nn.LeakyReLU(),
            torch.nn.Linear(32, 8, bias=False),
        ]
        model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(8), torch.nn.Hardtanh(-3, 3)).to(DEVICE)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

        def step(x: torch.Tensor, target: torch.Tensor, s: float, n: int) -> torch.Tensor:
            optimiser.zero_grad()
            out = model(x).roll(n, 0)
            loss = torch.nn.functional.cross_entropy(out, target, label_smoothing=s) + torch.nn.functional.huber_loss(out, out * 0, delta=s)
            loss.backward()
            optimiser.step()
            return loss.detach()

        call, rows = wrap(step), []
        for n in range(2, 10):
            generator = torch.Generator().manual_seed(n)
            model[2].negative_slope, model[4].momentum, optimiser.param_groups[0]["lr"] = 0.01 * n, 0.5 / n, 1e-2 / n
            x, target = torch.randn(12, 16, generator=generator), torch.randint(0, 8, (12,), generator=generator)
            rows.append(call(x.to(DEVICE), target.to(DEVICE), 0.05 * n, n))
        return [*rows, *model.state_dict().values()]

    expected = run(lambda fn: fn)
    magneto.reset()
    events.reset()
    found = run(magneto.optimize("inductor", nopython=True))
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3, msg=lambda m: f"result {n}: {m}")  # noqa: B023
    assert magneto.stats()["graphs"] <= 3 and not events.events("fallback"), magneto.stats()


SECOND = """
import sys, torch, magneto
from magneto.base import events
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)).cuda()
x = torch.randn(8, 32, device="cuda")
scale = torch.tensor(2.0)
run = magneto.optimize("inductor")(lambda x: model(x) * (scale + 1))
for _ in range(4):
    out = run(x)
    out.sum().backward()
print(events.counters().get("kernels_compiled", 0), events.counters().get("graphs_from_store", 0), "triton" in sys.modules, out.double().sum().item())
"""


@check("a second process compiles nothing and does not import Triton")
def second_process() -> None:
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "MAGNETO_CACHE_DIR": directory}
        said = []
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", SECOND], env=environment, capture_output=True, text=True, timeout=200, check=False
            )
            assert done.returncode == 0, done.stderr[-1000:]
            said.append(done.stdout.split())
    first, second = said
    assert int(first[0]) > 0 and first[1] == "0", said
    assert second[0] == "0" and int(second[1]) >= 2 and second[2] == "False" and first[3] == second[3], said
