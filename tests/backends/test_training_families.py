"""Training with sizes that vary: forward and backward from families, gradients as in eager at sizes that were no samples, nothing captured or compiled again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import magneto
from magneto.aot_autograd.training import TrainingPlan
from magneto.backends.families import Backwards
from magneto.backends.pipeline import Training
from magneto.backends.sized import Sized
from magneto.base.events import counters, recording
from magneto.base.flags import config
from magneto.dynamo.region.sizes import Budget
from magneto.inductor.family import probes

COUNTS = ("families", "sizes_of_families", "sizes_compiled", "sizes_in_eager", "families_refused", "sizes_of_no_family", "graphs_in_eager")


class Since:
    """Counters from here on."""

    def __init__(self) -> None:
        self.before = {name: counters().get(name, 0) for name in COUNTS}

    def __getattr__(self, name: str) -> float:
        return counters().get(name, 0) - self.before[name]


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(50, 24), nn.Embedding(300, 24), nn.Linear(24, 11)
        self.norm, self.qkv, self.out = nn.LayerNorm(24), nn.Linear(24, 72), nn.Linear(24, 24)
        self.mlp, self.drop = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)), nn.Dropout(drop)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        b, n = ids.shape
        x = self.tokens(ids) + self.places(torch.arange(n))
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, 3, 8).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, 24)))
        return self.head(x + self.drop(self.mlp(x)))


def language(drop: float = 0.0) -> tuple[nn.Module, Callable[..., Any], Callable[..., tuple[Any, ...]]]:
    """A module, its loss, and what that is given at some sizes."""
    net = Block(drop)

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(ids).flatten(0, 1), labels.flatten(), ignore_index=0)

    return net, loss, lambda b, n: (torch.randint(0, 50, (b, n)), torch.randint(0, 11, (b, n)))


def step(net: nn.Module, fn: Callable[..., Any], inputs: Sequence[Any], seed: int = 0) -> list[Any]:
    """Results, gradients of parameters and of inputs, and buffers."""
    torch.manual_seed(seed)
    net.zero_grad()
    mine = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    found = fn(*mine)
    results = found if isinstance(found, tuple) else (found,)
    results[0].sum().backward()
    grads = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    asked = [x.grad for x in mine if isinstance(x, torch.Tensor) and x.requires_grad]
    return [*(r.detach() if isinstance(r, torch.Tensor) else r for r in results), grads, asked, torch.get_rng_state()]


def same(net: nn.Module, plain: Callable[..., Any], compiled: Callable[..., Any], inputs: Sequence[Any], tolerance: float = 1e-4) -> None:
    buffers = [b.clone() for b in net.buffers()]
    wanted = step(net, plain, inputs)
    after = [b.clone() for b in net.buffers()]
    with torch.no_grad():
        for b, old in zip(net.buffers(), buffers, strict=True):
            b.copy_(old)
    found = step(net, compiled, inputs)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close([b.clone() for b in net.buffers()], after)
    strides = [[g.stride() for g in grads if g is not None] for grads in (found[-3], wanted[-3], found[-2], wanted[-2])]
    assert strides[0] == strides[1] and strides[2] == strides[3]


@pytest.fixture(autouse=True)
def _time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "size_seconds", 1000.0)


def test_twenty_lengths_are_captured_and_compiled_once() -> None:
    net, plain, make = language()
    compiled = magneto.optimize("inductor")(plain)
    since = Since()
    for n in (40, 41, 42):
        same(net, plain, compiled, make(3, n))
    with recording("graph") as graphs:
        for n in (43, 44, 47, 48, 53, 56, 59, 61, 64, 72, 73, 96, 100, 127, 128, 200, 251, 255, 33, 32, 43, 251):
            same(net, plain, compiled, make(3, n))
    assert not graphs and since.families == 2 and since.families_refused == 0
    assert since.sizes_of_families == 21 and since.sizes_compiled == since.sizes_in_eager == since.graphs_in_eager == 0


def test_batches_and_lengths_of_any_size() -> None:
    net, plain, make = language()
    compiled = magneto.optimize("inductor", dynamic=True)(plain)
    same(net, plain, compiled, make(5, 40))
    since = Since()
    for b, n in ((5, 41), (7, 53), (24, 48), (8, 64), (31, 31), (13, 32), (9, 72), (3, 100), (11, 24), (2, 33), (8, 8)):
        same(net, plain, compiled, make(b, n))
    assert since.sizes_compiled == since.sizes_in_eager == since.graphs_in_eager == 0


def test_draws_are_eagers() -> None:
    net, plain, make = language(0.3)
    compiled = magneto.optimize("inductor", dynamic=True)(plain)
    same(net, plain, compiled, make(3, 40))
    since = Since()
    for n in (41, 44, 53, 72, 97):
        same(net, plain, compiled, make(3, n))
    assert since.sizes_of_families == 5 and since.sizes_compiled == 0


def test_inputs_that_require_gradients_and_buffers_that_are_written() -> None:
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def plain(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = net(x * scale[:, None])
        return y.square().mean(), y.sum(1), y.shape[0]  # type: ignore[return-value]

    compiled = magneto.optimize("inductor", dynamic=True)(plain)
    make = lambda n: (torch.randn(n, 6, requires_grad=True), torch.randn(n, requires_grad=True))  # noqa: E731
    same(net, plain, compiled, make(40))
    since = Since()
    for n in (41, 44, 48, 53, 64, 96, 97, 255, 32):
        same(net, plain, compiled, make(n))
    assert since.sizes_of_families == 9 and since.sizes_compiled == 0


def test_what_is_computed_before_the_region() -> None:
    """Inputs that are no leaves, hooks, accumulation, and a part of the gradients."""
    net, table = nn.Linear(8, 8), nn.Linear(4, 8)

    def plain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = net(x.relu())
        return y.square().mean(), y * 2

    compiled = magneto.optimize("inductor", dynamic=True)(plain)
    since = Since()
    for n in (40, 41, 53, 72):
        found = []
        x = torch.randn(n, 4)
        for fn in (plain, compiled):
            net.zero_grad()
            table.zero_grad()
            seen: list[torch.Tensor] = []
            h = table(x)
            h.register_hook(lambda g, seen=seen: seen.append(g.clone()))
            loss, y = fn(h)
            loss.backward(retain_graph=True)
            (loss + y.sum()).backward()  # accumulates
            found.append([seen, [p.grad.clone() for m in (net, table) for p in m.parameters() if p.grad is not None]])
            loss, y = fn(table(x))
            found[-1].append([g.clone() for g in torch.autograd.grad(y.sum(), [net.weight, table.bias])])
            with pytest.raises(RuntimeError, match="second time"):
                torch.autograd.grad(y.sum(), [net.weight])
            loss, y = fn(table(x))
            (g,) = torch.autograd.grad(loss, [net.weight], create_graph=True)
            found[-1].append(torch.autograd.grad(g.square().sum(), [table.weight]))
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert since.families and since.sizes_compiled == since.families_refused == 0


def test_losses_that_are_means() -> None:
    net = nn.Linear(6, 3)
    plain = lambda x: F.mse_loss(net(x), torch.ones(x.shape[0], 3)) + F.l1_loss(net(x).tanh(), x[:, :3])  # noqa: E731
    compiled = magneto.optimize("inductor", dynamic=True)(plain)
    same(net, plain, compiled, (torch.randn(40, 6),))
    since = Since()
    for n in (41, 48, 53, 255, 32):
        same(net, plain, compiled, (torch.randn(n, 6),))
    assert since.sizes_of_families == 5 and since.sizes_compiled == since.families_refused == 0


def test_whole_steps() -> None:
    """Backward inside, the parameters' update, and a mask: gradients of parameters follow these, whatever the sizes of a batch."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())

    def stepping(net: nn.Module) -> Callable[..., Any]:
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def run(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            optimiser.zero_grad()
            loss = (net(x).square().mean(-1) * mask).sum() / mask.sum()
            loss.backward()
            optimiser.step()
            return loss.detach()

        return run

    plain, compiled = stepping(nets[0]), magneto.optimize("inductor")(stepping(nets[1]))
    with recording("graph") as graphs:
        for n in (9, 10, 11, 12, 16, 23, 30):
            since = since if n > 12 else Since()  # noqa: F821
            batch = torch.randn(n, 6), torch.arange(n) < n - 2
            torch.testing.assert_close(compiled(*batch), plain(*batch), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(list(nets[1].parameters()), list(nets[0].parameters()), rtol=1e-4, atol=1e-5)
    assert len(graphs) <= 5 and since.sizes_of_families == 4
    assert since.families == since.sizes_compiled == since.sizes_in_eager == since.graphs_in_eager == 0


def test_autocast() -> None:
    net, plain, make = language()

    def cast(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(ids, labels)

    compiled = magneto.optimize("inductor", dynamic=True)(cast)
    same(net, cast, compiled, make(3, 40), 5e-2)
    since = Since()
    for n in (41, 53, 64):
        same(net, cast, compiled, make(3, n), 5e-2)
    assert since.sizes_compiled == since.sizes_in_eager == 0


@pytest.mark.parametrize("allowed", [False, True])
def test_a_backward_without_a_family(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is traced for its sizes in the middle of a backward, and compiled or called operation by operation; further sizes have no family."""
    net, plain, make = language()
    compiled = magneto.optimize("inductor", dynamic=True)(plain)
    monkeypatch.setattr(Budget, "allows", lambda self: allowed)
    monkeypatch.setattr(Backwards, "_family", lambda self, choice: "none today")
    since = Since()
    batch = make(3, 40)
    torch.manual_seed(0)
    loss = compiled(*batch)
    assert since.sizes_of_families == since.families == 1
    loss.backward()
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    plain(*batch).backward()
    torch.testing.assert_close(found, [p.grad for p in net.parameters() if p.grad is not None], rtol=1e-4, atol=1e-5)
    assert (since.families_refused, since.sizes_compiled, since.sizes_in_eager) == (1, allowed, not allowed)
    same(net, plain, compiled, make(3, 41))
    assert since.sizes_of_families == (2 if allowed else 1)  # one attempt more


def test_fewer_samples_do_where_all_are_of_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    sample = Training.sample
    monkeypatch.setattr(Training, "sample", lambda self, *args: (taken.append(1), sample(self, *args))[1])
    net, plain, make = language()
    compiled = magneto.optimize("inductor", dynamic=True)(plain)
    same(net, plain, compiled, make(3, 40))
    same(net, plain, compiled, make(3, 41))
    assert len(taken) == len(probes((3, 40), few=True)) == 8 and len(probes((3, 40))) == 11


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_compiled_later_has_the_options_of_the_call(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards, and what other sizes need, were compiled with the flags of the moment; of a graph that is another one without the option, gradients raised."""
    found: list[tuple[str, str]] = []
    for cls, name in ((TrainingPlan, "_built"), (Sized, "_compiled"), (Backwards, "_cut_at")):
        method = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda *args, m=method, n=name: (found.append((n, config.numerics)), m(*args))[1])

    def attention(x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        n, (source, to) = x.shape[0], edges
        score = (x[source] * x[to]).sum(1)
        score = (score - torch.full((n,), -1e9).scatter_reduce(0, to, score, "amax")[to]).exp()
        share = score / (torch.zeros(n).scatter_add(0, to, score)[to] + 1e-9)
        return torch.zeros(n, 3).index_add(0, to, share[:, None] * x[source])

    compiled = magneto.compile(attention, dynamic=dynamic, options={"numerics": "eager"})
    for n, e in ((4, 6), (5, 8), (6, 9), (7, 10), (8, 12), (3, 4), (3, 3)):
        x, edges = torch.randn(n, 3, requires_grad=True), torch.randint(0, n, (2, e))
        gradients = [torch.autograd.grad(fn(x, edges).square().sum(), x) for fn in (attention, compiled)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    assert "_built" in {name for name, _ in found} and {numerics for _, numerics in found} == {"eager"}
