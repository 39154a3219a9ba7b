"""One compiled graph for all sizes of a domain: the values of eager and of the plan for that size alone, at sizes that were no samples."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import magneto
from magneto.backends.pipeline import Unit, choose_layout, decompose_to_prims, drop_unused, recompute_in_backward, trace_captured
from magneto.base.events import counters
from magneto.base.flags import config
from magneto.base.varying import sampling
from magneto.inductor.compile import _finished
from magneto.inductor.family import Family, probes
from magneto.inductor.fit import Fit
from magneto.inductor.lower.graph import lower_graph
from magneto.inductor.recall import loaded
from magneto.inductor.runtime.kept import Finished

Case = Callable[..., tuple[Any, ...]]
"""Given sizes: the function and its inputs."""


def finished_of(fn: Any, inputs: tuple[Any, ...]) -> tuple[Finished, list[Any]]:
    """A function as compiled, as far as data go; and what its plan is called with."""
    captured: list[tuple[Any, list[Any]]] = []
    magneto.reset()
    with torch.no_grad():
        magneto.compile(fn, backend=lambda gm, examples: captured.append((gm, list(examples))) or gm.forward)(*inputs)
        ((gm, examples),) = captured
        unit = trace_captured(Unit(gm, tuple(examples), "g", False))
        for step in (choose_layout, decompose_to_prims, recompute_in_backward, drop_unused):
            unit = step(unit)
        return _finished(lower_graph(unit.traced.graph), "g", {}), [*unit.inputs, *unit.traced.constants]


def samples_of(case: Case, sizes: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], Finished, Any]]:
    found, choices = [], None
    for one in sizes:
        fn, *inputs = case(*one)
        with sampling(choices) as made:
            found.append((one, finished_of(fn, tuple(inputs))[0], {"sizes": one, "sum": sum(one)}))
        choices = choices or made
    return found


def check(family: Family, case: Case, sizes: tuple[int, ...], tolerance: float = 2e-5) -> None:
    fn, *inputs = case(*sizes)
    finished, called = finished_of(fn, tuple(inputs))
    compiled = counters().get("kernels_compiled", 0)
    made = family.at(sizes, "g")
    assert counters().get("kernels_compiled", 0) == compiled
    assert made is not None and made[1] == {"sizes": sizes, "sum": sum(sizes)}
    with torch.no_grad():
        exact = fn(*inputs)
        exact = [exact] if isinstance(exact, torch.Tensor) else list(exact)
        alone = loaded(finished, "g")(*called)
        for _ in range(2):  # the second call finds the workspace of the first
            for got, one, wanted in zip(made[0](*called), alone, exact, strict=True):
                assert got.shape == wanted.shape and got.stride() == one.stride() and got.dtype is wanted.dtype
                for other in (one, wanted):
                    torch.testing.assert_close(got, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return F.softmax(scores + torch.triu(torch.full(scores.shape[-2:], float("-inf")), 1), -1) @ v


class Block(nn.Module):
    def __init__(self, width: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.before, self.between, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.between(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(700, 48), nn.Embedding(300, 48), nn.Linear(48, 70)
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(48)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])))))


R = torch.randn
torch.manual_seed(3)
norm, mlp, table, decoder = (
    nn.LayerNorm(96),
    nn.Sequential(nn.Linear(96, 50), nn.GELU(), nn.Linear(50, 33)),
    nn.Embedding(50, 96),
    Decoder(),
)
images = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.Conv2d(8, 12, 3, stride=2, padding=1),
    nn.BatchNorm2d(12),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(12, 10),
).eval()
ONE: dict[str, Case] = {
    "gelu": lambda n: (lambda x: F.gelu(x) * 2, R(n, 96)),
    "norm": lambda n: (norm, R(n, 96)),
    "softmax": lambda n: (lambda x: F.softmax(x * 0.3, -1), R(40, n)),
    "rows": lambda n: (lambda x: x.sum(0), R(n, 96)),
    "all": lambda n: (lambda x: x.exp().sum(), R(n, 96)),
    "mean": lambda n: (lambda x: (x.mean(-1), x.amax(-1)), R(40, n)),
    "middle": lambda n: (lambda x: x.sum(1), R(12, n, 48)),
    "variance": lambda n: (lambda x: x.var(-1), R(40, n)),
    "argmax": lambda n: (lambda x: x.argmax(-1), R(40, n)),
    "turned": lambda n: (lambda x: (x.t() * 2).contiguous(), R(40, n)),
    "places": lambda n: (lambda x: (torch.arange(x.shape[1]) / x.shape[1] + x, torch.arange(x.shape[1])), R(4, n)),
    "sums": lambda n: (lambda x: (x.cumsum(-1), x.cumsum(0)), R(n, n)),
    "mlp": lambda n: (mlp, R(n, 96)),
    "lookup": lambda n: (lambda i: table(i) * 2, torch.randint(0, 50, (3, n))),
    "attention": lambda n: (attention, R(2, 3, n, 24), R(2, 3, n, 24), R(2, 3, n, 24)),
    "growing": lambda n: (lambda k, x: (torch.cat([k, x], 2), torch.cat([k, x], 2).sum(-1)), R(2, 3, n, 24), R(2, 3, 1, 24)),
    "entropy": lambda n: (F.cross_entropy, R(n, 51), torch.randint(0, 51, (n,))),
    "rolled": lambda n: (lambda x: torch.roll(x, 1, -1)[:, 1:] + x.flip(-1)[:, 1:], R(12, n)),
    "halves": lambda n: (lambda x: (F.gelu(x) + x.sum(-1, keepdim=True)).bfloat16().float().round(decimals=1), R(9, n).bfloat16().float()),
    "half": lambda n: (lambda x: x[:, : x.shape[1] // 2].sum(-1, keepdim=True) * 2 + x[:, x.shape[1] // 2 : x.shape[1] // 2 * 2], R(12, n)),
    "images": lambda n: (images, R(2, 3, n, 19)),
    "batches": lambda n: (images, R(n, 3, 9, 11)),
    "decoder": lambda n: (decoder, torch.randint(0, 70, (2, n))),
}
TWO: dict[str, Case] = {
    "norm": lambda b, n: (norm, R(b, n, 96)),
    "softmax": lambda b, n: (lambda x: F.softmax(x * 0.3, -1), R(b, 9, n)),
    "attention": lambda b, n: (attention, R(b, 3, n, 24), R(b, 3, n, 24), R(b, 3, n, 24)),
    "decoder": lambda b, n: (decoder, torch.randint(0, 70, (b, n))),
}


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path) -> None:
    config.cache_dir = str(tmp_path)


@pytest.mark.parametrize("name", ONE)
def test_one_size(name: str) -> None:
    torch.manual_seed(0)
    family = Family.of(samples_of(ONE[name], probes((67,))))
    assert isinstance(family, Family), family
    low, high = family.domain[0]
    assert low <= 40 and high >= 200
    for n in (low, 48, 67, 96, 100, 128, 199, high):
        check(family, ONE[name], (n,), 1e-4 if name in ("sums", "all") else 2e-5)
    assert family.at((low - 1,), "g") is None and family.at((high + 1,), "g") is None


@pytest.mark.parametrize("name", TWO)
def test_two_sizes(name: str) -> None:
    torch.manual_seed(0)
    made = [Family.of(samples_of(TWO[name], probes((5, 67), narrow))) for narrow in (False, True)]
    assert isinstance(made[1], Family), made
    for family in made:
        if isinstance(family, Family):
            (least, most), (low, high) = family.domain
            assert least <= 5 <= most and low <= 67 <= high and least < most and low < high
            for sizes in ((least, high), (most, low), (4, 64), ((least + most) // 2, (low + high) // 2)):
                check(family, TWO[name], sizes)


def test_functions_are_compiled_once() -> None:
    family = Family.of(samples_of(ONE["decoder"], probes((67,))))
    assert isinstance(family, Family)
    made = counters()["kernels_of_families"]
    assert made <= 8, "two equal blocks have the same kernels"
    compiled = counters().get("kernels_compiled", 0)
    for n in range(50, 60):
        assert family.at((n,), "g") is not None
    assert (
        counters()["kernels_of_families"] == made
        and counters().get("kernels_compiled", 0) == compiled
        and counters()["plans_of_families"] == 10
    )


def test_plans_share_their_arena() -> None:
    case = ONE["decoder"]
    family = Family.of(samples_of(case, probes((67,))))
    assert isinstance(family, Family) and family.code.arena_bytes
    cases = {n: case(n) for n in (40, 50, 60, 70, 80, 90)}
    called = {n: finished_of(fn, tuple(inputs))[1] for n, (fn, *inputs) in cases.items()}
    plans = {n: made[0] for n in cases if (made := family.at((n,), "g")) is not None}
    for n in (40, 50, 60, 70, 80, 90, 40, 90, 50, 50):
        with torch.no_grad():
            torch.testing.assert_close(plans[n](*called[n])[0], cases[n][0](*cases[n][1:]), rtol=2e-5, atol=2e-5)
        assert len(family.arenas.blocks) <= 3
    del plans, made
    gc.collect()
    assert all(user() is None for _, user in family.arenas.blocks)


def test_a_plan_without_instructions() -> None:
    views: Case = lambda n: (lambda x: x.t(), R(12, n))  # noqa: E731
    family = Family.of(samples_of(views, probes((67,))))
    assert isinstance(family, Family) and family.at((118,), "g") is not None


def test_refusals() -> None:
    assert "too few samples" in str(Family.of(samples_of(ONE["gelu"], [(67,), (40,), (90,)])))
    uneven: Case = lambda n: (lambda x: x[:, : math.isqrt(n)] * 2, R(12, n))  # noqa: E731
    assert "no polynomial" in str(Family.of(samples_of(uneven, probes((67,)))))
    other: Case = lambda n: (lambda x: x * 2 if n % 2 else x.sum(0), R(12, n))  # noqa: E731
    assert "at (" in str(Family.of(samples_of(other, probes((67,)))))
    primes = [(67,), (43,), (59,), (79,), (101,), (251,)]
    assert "the same divisors" in str(Family.of(samples_of(other, primes)))


def test_a_structure_that_changes_ends_the_domain() -> None:
    longer: Case = lambda n: (lambda x: x * 2 if n < 120 else x.sum(0), R(12, n))  # noqa: E731
    family = Family.of(samples_of(longer, [(67,), (33,), (251,), (40,), (53,), (100,), (131,), (119,)]))
    assert isinstance(family, Family) and family.domain == ((33, 119),)
    check(family, longer, (118,))


def test_expressions() -> None:
    fit = Fit([(5,), (7,), (12,), (31,), (64,), (101,)])

    def found(fn: Callable[[int], int]) -> Any:
        return fit.integer(tuple(fn(n) for (n,) in fit.samples))

    assert (
        found(lambda n: 768 * n).text == "768 * n0"
        and found(lambda n: 16 * n).divisible(16)
        and not found(lambda n: 16 * n + 1).divisible(16)
    )
    assert eval(found(lambda n: n * (n + 1) // 2).text, {"n0": 9}) == 45
    assert eval(found(lambda n: 3 * n * n - 2 * n + 7).text, {"n0": 9}) == 232
    assert eval(found(lambda n: (n - 1) // 2 + 1).text, {"n0": 10}) == 5 and found(lambda n: n // 16) is None
    assert [eval(found(lambda n: 12 * (n // 2) ** 2 - n // 2).text, {"n0": n}) for n in (8, 9)] == [188, 188]
    assert found(lambda n: n**4) is None and found(lambda n: n % 16) is None
    assert fit.real(tuple(1 / n for (n,) in fit.samples), False) == "1.0 / (n0)"
    assert fit.real(tuple(math.sqrt(3 * n) for (n,) in fit.samples), False) == "sqrt(3 * n0)"
    assert fit.real(tuple(math.exp(-n) for (n,) in fit.samples), False) is None
    assert Fit([(2,), (4,), (8,), (16,)]).integer((1, 2, 4, 8)) is None, "half of an odd size is no size"


def test_probes() -> None:
    assert {(67,), (32,), (255,)} <= set(probes((67,))) and len(probes((67,))) == 9
    assert {(3, 300), (2, 256), (31, 2047), (2, 2047), (31, 256)} <= set(probes((3, 300)))
    assert all(50 <= n <= 89 for (n,) in probes((67,), narrow=True))
