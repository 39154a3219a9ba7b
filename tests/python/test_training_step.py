"""Whole training steps in one region: backward, the optimiser, zero_grad. Compared with eager after several steps, bit by bit where nothing is decomposed."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import magneto
from tests.compare import assert_equal

OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "sgd_foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1, foreach=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adam_decay": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "adam_foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01, lr_decay=0.1),
    "adagrad_foreach": lambda p: torch.optim.Adagrad(p, 0.01, lr_decay=0.1, foreach=True),
    "sgd_lr_tensor": lambda p: torch.optim.SGD(p, torch.tensor(0.1), momentum=0.9),
    "adam_lr_tensor": lambda p: torch.optim.Adam(p, torch.tensor(0.01)),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    net.unused = nn.Parameter(torch.ones(3))
    net.scale = nn.Parameter(torch.tensor(0.5))
    net.register_forward_hook(lambda module, args, output: output * module.scale)
    return net


def step(net: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimiser.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimiser.step()
    return loss


def same_state(one: Any, two: Any, close: bool) -> None:
    assert one.keys() == two.keys()
    for key in one:
        assert one[key].keys() == two[key].keys()
        for name, value in one[key].items():
            other = two[key][name]
            assert type(value) is type(other), name
            if isinstance(value, torch.Tensor):
                same(value, other, close)
            else:
                assert value == other


def same(value: torch.Tensor | None, other: torch.Tensor | None, close: bool = False) -> None:
    assert (value is None) == (other is None)
    if value is not None and other is not None:
        assert value.stride() == other.stride() and value.dtype == other.dtype
        torch.testing.assert_close(value, other, rtol=1e-4 if close else 0, atol=1e-6 if close else 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimiser(name: str, backend: str) -> None:
    close = backend == "inductor"
    plain = network()
    ours = copy.deepcopy(plain)
    optimisers = [OPTIMISERS[name](net.parameters()) for net in (plain, ours)]
    fn = magneto.optimize(backend, nopython=True)(step)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x, y = torch.randn(5, 4, generator=generator), torch.randint(0, 3, (5,), generator=generator)
        expected, loss = step(plain, optimisers[0], x, y), fn(ours, optimisers[1], x, y)
        same(expected.detach(), loss.detach(), close)
        assert loss.requires_grad and not loss.is_leaf
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
            same(a.detach(), b.detach(), close)
            same(a.grad, b.grad, close)
    assert ours.unused.grad is None
    same_state(optimisers[0].state_dict()["state"], optimisers[1].state_dict()["state"], close)
    assert magneto.stats()["graphs"] <= 2  # state is made in the first step


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_checkpoints_are_interchangeable(backend: str) -> None:
    """State made by the optimised step is loaded by a plain run, and the other way round."""
    plain = network()
    ours = copy.deepcopy(plain)
    first, second = torch.optim.Adam(plain.parameters(), 0.01), torch.optim.Adam(ours.parameters(), 0.01)
    fn = magneto.optimize(backend)(step)
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    for _ in range(3):
        step(plain, first, x, y)
        fn(ours, second, x, y)
    saved, theirs = copy.deepcopy(second.state_dict()), copy.deepcopy(first.state_dict())
    first.load_state_dict(saved)
    second.load_state_dict(theirs)
    for _ in range(2):
        step(plain, first, x, y)
        fn(ours, second, x, y)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        same(a.detach(), b.detach())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_learning_rate_schedule(backend: str) -> None:
    """A learning rate that changes with each step costs no capture per step."""

    def scheduled(net: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor) -> float:
        optimiser.zero_grad()
        loss = net(x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimiser.step()
        return loss.item()

    nets = [nn.Linear(4, 3) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimisers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in nets]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.9) for optimiser in optimisers]
    fn = magneto.optimize(backend)(scheduled)
    for _ in range(12):
        x = torch.randn(6, 4)
        assert scheduled(nets[0], optimisers[0], x) == fn(nets[1], optimisers[1], x)
        for schedule in schedules:
            schedule.step()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert magneto.stats()["graphs"] <= 4


# -- backward alone


def both(fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]], backend: str, calls: int = 3, breaks: int = 0) -> tuple[Any, Any]:
    """Run plain and optimised on inputs made alike; leaves' gradients and results are compared after each call."""
    ours, plain = make(), make()
    optimised = magneto.optimize(backend)(fn)
    results: list[Any] = []
    for number in range(calls):
        outcome = []
        for call, args in ((fn, plain), (optimised, ours)):
            torch.manual_seed(number)
            outcome.append(call(*args))
        results = outcome
        for a, b in zip(plain, ours, strict=True):
            if isinstance(a, torch.Tensor):
                same(a.detach(), b.detach())
                if a.is_leaf:
                    same(a.grad, b.grad)
        if isinstance(outcome[0], torch.Tensor):
            same(outcome[0].detach(), outcome[1].detach())
            assert outcome[0].requires_grad == outcome[1].requires_grad
    assert magneto.stats()["breaks"] == breaks, magneto.stats()["break_reasons"]
    return results[0], results[1]


def leaf(*shape: int) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape).requires_grad_()


BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@BACKENDS
def test_gradients_accumulate(backend: str) -> None:
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        loss = (w * x).sin().sum()
        loss.backward()
        return loss

    both(fn, lambda: (leaf(3, 4), leaf(3, 1).detach()), backend, calls=4)


@BACKENDS
def test_gradients_do_not_share_memory(backend: str) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        (a + b).sum().backward()
        assert a.grad is not None and b.grad is not None
        a.grad.add_(1)
        return b.grad * 1

    plain, ours = both(fn, lambda: (leaf(3), leaf(3)), backend, calls=2)
    assert ours.tolist() == [2.0, 2.0, 2.0]


@BACKENDS
def test_gradient_of_a_transposed_leaf_keeps_its_layout(backend: str) -> None:
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        loss = F.conv2d(x, w).relu().mean()
        loss.backward()
        return loss

    def make() -> tuple[Any, ...]:
        torch.manual_seed(0)
        weight = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
        return weight, torch.randn(2, 3, 8, 8)

    both(fn, make, backend)


@BACKENDS
def test_seed_and_retained_graph(backend: str) -> None:
    def fn(w: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        y = w.exp()
        y.backward(seed, retain_graph=True)
        y.sum().backward()
        return w.grad * 2  # type: ignore[operator]

    both(fn, lambda: (leaf(3), torch.arange(3.0)), backend)


@BACKENDS
def test_second_backward_outside_raises_what_torch_raises(backend: str) -> None:
    def fn(w: torch.Tensor) -> torch.Tensor:
        loss = w.exp().sum()
        loss.backward()
        return loss

    plain, ours = both(fn, lambda: (leaf(3),), backend)
    errors = []
    for loss in (plain, ours):
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


TAILS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda y: y.view(-1),
    "transposed": lambda y: y.t(),
    "beside": lambda y: (y, y[0]),
    "chunk": lambda y: y.chunk(2)[1],
    "detached": lambda y: (y[1:], y.detach()),
    "expanded": lambda y: y[:, :1].expand(4, 4),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", [*TAILS, "rnn", "gru"])
def test_views_returned_behind_a_whole_step(name: str, backend: str) -> None:
    """Their history was refused when the parameters had been written; eager ran the step once more, and parameters were updated twice."""
    torch.manual_seed(0)
    kinds: dict[str, Callable[..., nn.Module]] = {"rnn": nn.RNN, "gru": nn.GRU}
    made = kinds[name](4, 4, batch_first=True) if name in kinds else nn.Linear(4, 4)

    def step(net: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor) -> Any:
        optimiser.zero_grad()
        y, state = net(x[None]) if name in kinds else (net(x).tanh(), None)
        loss = y.square().mean()
        loss.backward()
        optimiser.step()
        return loss.detach(), TAILS[name](y) if state is None else state

    optimised, before = magneto.optimize(backend)(step), magneto.stats()["hook"]["reruns"]
    nets = [made, copy.deepcopy(made)]
    optimisers = [torch.optim.SGD(net.parameters(), 0.5) for net in nets]
    for _ in range(3):
        x = torch.randn(4, 4)
        plain, ours = (fn(net, o, x) for fn, net, o in zip((step, optimised), nets, optimisers, strict=True))
        assert_equal(ours, plain, 1e-5)
        assert_equal(list(nets[1].parameters()), list(nets[0].parameters()), 1e-5)
    assert (magneto.stats()["hook"]["reruns"], magneto.stats()["breaks"]) == (before, 0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_fails_behind_a_write_does_not_write_twice(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from magneto.aot_autograd import wrap

    def refused(result: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("refused")

    monkeypatch.setattr(wrap, "spent", refused)
    w = torch.ones(3, requires_grad=True)
    optimiser = torch.optim.SGD([w], 0.5)
    w.grad = torch.zeros(3)

    @magneto.optimize(backend)
    def step() -> torch.Tensor:
        optimiser.zero_grad(set_to_none=False)
        y = w * 2
        y.sum().backward()
        optimiser.step()
        return y

    with pytest.raises(RuntimeError, match="refused"):
        for _ in range(2):
            step()
    assert w.tolist() in ([0.0] * 3, [-1.0] * 3)


@BACKENDS
def test_gradient_penalty(backend: str) -> None:
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ w).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        loss = y + (gradient.norm(2, dim=1) - 1).pow(2).mean()
        loss.backward()
        return loss

    both(fn, lambda: (leaf(4, 2), leaf(3, 4)), backend)


@BACKENDS
def test_grad_of_intermediates_and_unused(backend: str) -> None:
    def fn(w: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        hidden = w * 2
        first, second = torch.autograd.grad(hidden.pow(2).sum(), [hidden, other], allow_unused=True)
        assert second is None
        return first

    both(fn, lambda: (leaf(3), leaf(3)), backend)


@BACKENDS
def test_dropout_and_running_statistics(backend: str) -> None:
    def fn(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = net(x).pow(2).mean()
        loss.backward()
        return loss

    nets: list[nn.Module] = []

    def make() -> tuple[Any, ...]:
        torch.manual_seed(0)
        nets.append(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)))
        return nets[-1], torch.randn(6, 4)

    both(fn, make, backend)
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        same(a.grad, b.grad)
    for a, b in zip(nets[0].buffers(), nets[1].buffers(), strict=True):
        same(a, b)


@BACKENDS
def test_hooks_are_called_and_earlier_history_breaks(backend: str) -> None:
    seen: list[torch.Tensor] = []

    def hooked(w: torch.Tensor) -> torch.Tensor:
        loss = (w * 3).sum()
        loss.backward()
        return loss

    def make() -> tuple[Any, ...]:
        w = leaf(3)
        w.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
        return (w,)

    both(hooked, make, backend, calls=2)
    assert len(seen) == 4
    magneto.reset()

    def continued(x: torch.Tensor) -> torch.Tensor:
        loss = x.sin().sum()
        loss.backward(retain_graph=True)
        return loss

    leaves = [leaf(3), leaf(3)]
    both(continued, lambda: (leaves.pop() * 2,), backend, calls=2, breaks=1)


def test_hook_registered_later_is_honoured() -> None:
    def fn(w: torch.Tensor) -> torch.Tensor:
        loss = (w * 3).sum()
        loss.backward()
        return loss

    w = leaf(3)
    optimised = magneto.optimize("eager")(fn)
    optimised(w)
    w.grad = None
    w.register_hook(lambda gradient: gradient * 10)
    optimised(w)
    assert w.grad is not None and w.grad.tolist() == [30.0, 30.0, 30.0]


@BACKENDS
def test_hooks_come_and_go(backend: str) -> None:
    """A table of hooks that is empty at capture is filled later; `torch.autograd.grad` calls hooks too."""

    def fn(w: torch.Tensor) -> torch.Tensor:
        loss = (w * 3).sum()
        loss.backward()
        return torch.autograd.grad((w * 2).sum(), w)[0]

    found = []
    for call in (fn, magneto.optimize(backend)(fn)):
        w = leaf(3)
        w.register_hook(lambda gradient: gradient * 7).remove()
        results = [call(w)]
        handle = w.register_hook(lambda gradient: gradient * 10)
        results.append(call(w))
        handle.remove()
        results.append(call(w))
        found.append([*results, w.grad])
    for one, two in zip(*found, strict=True):
        same(one, two)


@BACKENDS
def test_gradient_that_a_hook_holds_is_not_the_leafs(backend: str) -> None:
    def fn(w: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        loss = (w * 3).sum()
        loss.backward()
        w.grad.add_(1)  # type: ignore[union-attr]
        return loss

    found = []
    for call in (fn, magneto.optimize(backend)(fn)):
        w, seen = leaf(3), []  # type: ignore[var-annotated]
        w.register_hook(seen.append)
        for _ in range(2):
            call(w, seen)
        found.append((seen, w.grad))
    assert len(found[0][0]) == len(found[1][0])
    for one, two in zip((*found[0][0], found[0][1]), (*found[1][0], found[1][1]), strict=True):
        same(one, two)


def test_no_gradient_raises_what_torch_raises() -> None:
    def fn(x: torch.Tensor) -> None:
        (x * 2).sum().backward()

    errors = []
    for call in (fn, magneto.optimize("eager")(fn)):
        with pytest.raises(RuntimeError) as caught:
            call(torch.ones(3))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@BACKENDS
def test_mean_teacher(backend: str) -> None:
    """An average of the parameters, gradient accumulation over micro-batches, a loop with several backward passes."""

    def fn(net: nn.Module, average: nn.Module, optimiser: torch.optim.Optimizer, batches: list[torch.Tensor]) -> float:
        optimiser.zero_grad(set_to_none=False)
        total = 0.0
        for batch in batches:
            loss = net(batch).pow(2).mean() / len(batches)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_value_(net.parameters(), 0.1)
        optimiser.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return total

    torch.manual_seed(0)
    nets = [nn.Linear(4, 3)]
    nets += [copy.deepcopy(nets[0]) for _ in range(3)]
    optimisers = [torch.optim.AdamW(nets[k].parameters(), 0.01) for k in (0, 2)]
    optimised = magneto.optimize(backend)(fn)
    for _ in range(4):
        batches = [torch.randn(5, 4) for _ in range(3)]
        assert fn(nets[0], nets[1], optimisers[0], batches) == optimised(nets[2], nets[3], optimisers[1], batches)
    for one, two in ((0, 2), (1, 3)):
        for a, b in zip(nets[one].parameters(), nets[two].parameters(), strict=True):
            same(a.detach(), b.detach())
    assert magneto.stats()["breaks"] == 0, magneto.stats()["break_reasons"]


@BACKENDS
def test_two_optimisers(backend: str) -> None:
    """A generator and a discriminator: two backward passes and two steps in one region."""

    def fn(g: nn.Module, d: nn.Module, og: torch.optim.Optimizer, od: torch.optim.Optimizer, x: torch.Tensor) -> tuple[float, float]:
        fake = g(x)
        od.zero_grad()
        real = F.softplus(d(fake.detach())).mean() + F.softplus(-d(x[:, :3])).mean()
        real.backward()
        od.step()
        og.zero_grad()
        made = F.softplus(-d(fake)).mean()
        made.backward()
        og.step()
        return real.item(), made.item()

    torch.manual_seed(0)
    sides = []
    nets = (nn.Linear(4, 3), nn.Linear(3, 1))
    for _ in range(2):
        g, d = copy.deepcopy(nets)
        sides.append((g, d, torch.optim.Adam(g.parameters(), 0.01), torch.optim.RMSprop(d.parameters(), 0.01)))
    optimised = magneto.optimize(backend, nopython=True)(fn)
    for _ in range(4):
        x = torch.randn(5, 4)
        assert fn(*sides[0], x) == optimised(*sides[1], x)
    for one, two in zip(sides[0][:2], sides[1][:2], strict=True):
        for a, b in zip(one.parameters(), two.parameters(), strict=True):
            same(a.detach(), b.detach())


class Gates(nn.Module):
    """Views with gaps are what backward needs: of the input, and of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c = self.cell(x[:, 0], (x.new_zeros(len(x), 6), x.new_zeros(len(x), 6)))
        a, b = self.mix(h).split([2, 4], 1)
        return torch.cat([a.sin() * b[:, ::2].sigmoid(), c], 1)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_views_with_gaps_are_not_kept(backend: str) -> None:
    nets = [Gates() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimised = magneto.optimize(backend)(nets[1])
    for _ in range(2):
        x = torch.randn(3, 5, 4)
        nets[0](x).sum().backward()
        optimised(x).sum().backward()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        same(a.grad, b.grad, backend == "inductor")
    assert magneto.stats()["fallbacks"] == 0


def test_an_optimiser_in_a_closure() -> None:
    """A wrapper's own variable loses the optimiser, which the closure holds on to: no reason to end the region."""
    net = nn.Linear(3, 2)
    optimiser = torch.optim.Adam(net.parameters(), 0.001)
    schedulers = [weakref.ref(optimiser, print)]  # as a learning rate schedule does

    def step(x: torch.Tensor) -> torch.Tensor:
        optimiser.zero_grad()
        loss = net(x).pow(2).sum()
        loss.backward()
        optimiser.step()
        return loss

    optimised = magneto.optimize("eager", nopython=True)(step)
    losses = [float(optimised(torch.ones(1, 3))) for _ in range(3)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[2] and schedulers


def _errors(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    value, apart = (x @ w).tanh(), (x @ w).sin()
    loss = value.square().mean()
    loss.backward()
    return loss, (value - 1).abs(), value + apart, apart, (value * w.sum()).sum()


def _views(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows, (first, last) = w.split(1), (x @ w).chunk(2)
    (rows[0] * first * w.unbind(1)[0]).sum().backward()
    return *rows, first, last, w[:2]


def _sums(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    both = w[:2] + x
    loss = both.sum()
    loss.backward()
    return loss, both, both.exp()


@pytest.mark.parametrize("program", [_errors, _views, _sums])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_is_computed_of_a_graph_that_backward_has_freed(program: Callable[..., Any], backend: str) -> None:
    """The errors of Q-learning, returned without `detach()`: such a step ran in eager. Views of parameters, and sums, keep nothing that is freed."""
    compiled = magneto.optimize(backend)(program)
    for seed in range(2):
        torch.manual_seed(seed)
        w, x = torch.randn(3, 3), torch.randn(2, 3)
        found = []
        for fn in (program, compiled):
            leaf = w.clone().requires_grad_()
            results, told = fn(leaf, x), []
            for result in results:
                try:
                    result.sum().backward(retain_graph=True)
                    told.append("")
                except RuntimeError as error:
                    told.append(str(error))
            found.append(([(r.detach(), r.requires_grad, r.is_leaf) for r in results], told, leaf.grad))
        assert_equal(found[1], found[0], 1e-5)
    assert magneto.stats()["fallbacks"] == 0
