"""Tensors that begin to require gradients inside a region, and tensors that are given other memory; steps of GradScaler. Programs as in test_training_programs.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from tests.python.test_training_programs import _compare, _facts, _flat, net

Body = Callable[[Any, torch.Tensor, torch.Tensor], Any]
PROGRAMS: dict[str, tuple[Body, int]] = {}


def program(breaks: int = 0) -> Callable[[Body], Body]:
    def register(body: Body) -> Body:
        PROGRAMS[body.__name__] = body, breaks
        return body

    return register


@program()
def fast_gradient_sign(n, x, y):
    x.requires_grad = True
    loss = n(x).pow(2).mean()
    n.zero_grad()
    loss.backward()
    return (x + 0.1 * x.grad.sign()).clamp(-1, 1).detach(), loss


@program(-1)
def gradients_are_wanted_later(n, x, y):
    x.requires_grad_()
    return n(x).sum()


@program(-1)
def part_of_them_is_wanted_later(n, x, y):
    x.requires_grad_()
    n(x).sum().backward()
    return (x * y).sum()


@program()
def no_leaf_again(n, x, y):
    x.requires_grad_()
    n(x).sum().backward()
    g = x.grad.clone()
    x.requires_grad_(False)
    x.grad = None
    return g, x * 2


@program()
def written_without_gradients(n, x, y):
    x.requires_grad_()
    n(x).pow(2).sum().backward()
    with torch.no_grad():
        x.sub_(0.1 * x.grad)
        x.grad.zero_()
    x.data.add_(1)
    return x.grad


@program()
def computed_and_written_before(n, x, y):
    h = x * 2
    if not x.requires_grad:
        x.add_(1)
        x.requires_grad_()
    loss = (h * n(x).sum() * x).sum()
    loss.backward()
    return h, loss, x.grad


@program()
def two_backwards(n, x, y):
    x.requires_grad_()
    n(x).sum().backward()
    n(x * 2).sum().backward()
    return x.grad, x.is_leaf, x.requires_grad, x.grad_fn


@program()
def an_optimised_input(n, x, y):
    x.requires_grad_()
    o = torch.optim.Adam([x], 0.1)
    for _ in range(2):
        o.zero_grad()
        loss = n(x).pow(2).sum()
        loss.backward()
        o.step()
    return loss


@program()
def two_leaves(n, x, y):
    x.requires_grad_()
    y.requires_grad_()
    (n(x) * y[:, :3]).sum().backward()
    return x, x.detach(), y.grad


@program(-1)
def a_view_before(n, x, y):
    v = x[:2]
    x.requires_grad_()
    n(x).sum().backward()
    return v, v.requires_grad, x.grad


@program(1)
def an_item_that_is_wanted_later(n, x, y):
    x.requires_grad_()
    out = torch.zeros(5)
    out[1:] = x[1:].sum(1)
    return out


@program()
def data_of_its_own_data(n, x, y):
    out = []
    with torch.no_grad():
        for p in n.parameters():
            old = p.data
            p.data = p.data * 0.5 + p.detach()
            old.add_(1)
            out += [old, p.sum()]
    return out


@program(-1)
def data_used_with_gradients(n, x, y):
    for p in n.parameters():
        p.data = p.data.clone() * 0.5 + p.data
    loss = n(x).sum()
    loss.backward()
    return loss


@program()
def frozen_and_thawed(n, x, y):
    """What was computed before, between and behind meets in one backward."""
    before = n(x)
    n.requires_grad_(False)
    between = n(x + 1)
    n[2].requires_grad_()
    with torch.no_grad():
        n[0].bias.add_(1)
    n[0].requires_grad_()
    (before + 2 * between + n(y)).sum().backward()
    return between


@program()
def frozen_at_the_backward(n, x, y):
    out = n(x)
    n[0].requires_grad_(False)
    out.sum().backward()
    n[0].requires_grad_()


@program()
def gradients_asked_of_a_thawed_leaf(n, x, y):
    x.requires_grad_()
    before = n(x)
    x.requires_grad_(False)
    x.requires_grad_()
    found = torch.autograd.grad((before + n(x)).sum(), [x, n[0].weight])
    x.requires_grad_(False)
    return found


@program(-1)
def given_other_memory_while_frozen(n, x, y):
    before = n(x)
    w = n[0].weight
    w.requires_grad_(False)
    w.data = w.data * 2
    w.requires_grad_()
    (before + n(x)).sum().backward()


@program()
def a_discriminator_that_is_thawed(n, x, y):
    for p in n[0].parameters():
        p.requires_grad = True
    o = torch.optim.SGD(n[0].parameters(), 0.1)
    fake = n[2](torch.tanh(x.repeat(1, 2)))[:, [0, 1, 2, 0]]
    o.zero_grad()
    d = n[0](fake.detach()).mean() - n[0](y).pow(2).mean()
    d.backward()
    o.step()
    n[0].requires_grad_(False)
    n[2].zero_grad()
    g = n[0](fake).mean()
    g.backward()
    return d.detach(), g.detach()


@program()
def a_discriminator_that_is_frozen(n, x, y):
    fake = n[2](torch.tanh(x.repeat(1, 2)))[:, [0, 1, 2, 0]]
    n[0].requires_grad_(False)
    n.zero_grad()
    g = n[0](fake).mean()
    g.backward()
    n[0].requires_grad_(True)
    d = n[0](fake.detach()).mean() - n[0](y).pow(2).mean()
    d.backward()
    return d.detach(), g.detach()


@program(1)
def hooks_of_a_leaf_that_was_frozen(n, x, y):
    w = n[0].weight
    w.requires_grad_()
    if not hasattr(n, "hooked"):
        n.hooked = True
        w.register_hook(lambda gradient: gradient * 2)
    n(x).sum().backward()
    n[0].requires_grad_(False)


def run(body: Body, backend: str | None, again: bool) -> list[list[Any]]:
    n = net()
    fn = magneto.optimize(backend)(body) if backend else body
    rows = []
    for number in range(3):
        if not (again and number):
            torch.manual_seed(number)
            x, y = torch.randn(5, 4), torch.randn(5, 4)
        memory = x.data_ptr()
        value = fn(n, x, y)
        if isinstance(value, torch.Tensor) and value.requires_grad and body.__name__.endswith("wanted_later"):
            value.sum().backward()
        rows.append([_facts(item) for item in _flat([value, x, x.grad, y, y.grad, x.data_ptr() == memory, n])])
    return rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("again", [False, True], ids=["new inputs", "the same input"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_leaves(name: str, backend: str, again: bool) -> None:
    body, breaks = PROGRAMS[name]
    for one, two in zip(run(body, None, again), run(body, backend, again), strict=True):
        _compare(one, two, 1e-5 if backend == "inductor" else 0)
    if breaks >= 0:
        stats = magneto.stats()
        assert (stats["breaks"], stats["fallbacks"]) == (breaks, 0), stats["break_reasons"]


# -- GradScaler: whatever the gradients are, the state is eager's; one break, where it decides whether to step


def scaled(make: Any, unscale: bool, **options: Any) -> tuple[Any, list[Any]]:
    n = net()
    o = make(n.parameters())
    s = torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 2, **options})

    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        o.zero_grad()
        loss = n(x).pow(2).mean() * factor
        s.scale(loss).backward()
        norm = None
        if unscale:
            s.unscale_(o)
            norm = nn.utils.clip_grad_norm_(n.parameters(), 1.0)
        s.step(o)
        s.update()
        return loss, norm

    return step, [n, o, s.state_dict]


SCALED: dict[str, Any] = {
    "sgd": lambda: scaled(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), True),
    "adam": lambda: scaled(lambda p: torch.optim.Adam(p, 0.01), False),
    "adamw": lambda: scaled(
        lambda p: torch.optim.AdamW(p, 0.01, foreach=True), True, growth_factor=1.5, backoff_factor=0.25, growth_interval=1
    ),
    "overflow": lambda: scaled(lambda p: torch.optim.Adam(p, 0.01), True, init_scale=2.0**127),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", list(SCALED))
def test_scaled_steps(name: str, backend: str) -> None:
    rows: list[list[Any]] = []
    for chosen in (None, backend):
        step, watched = SCALED[name]()
        call = magneto.optimize(chosen)(step) if chosen else step
        for number, factor in enumerate([1.0, 1.0, float("inf"), float("nan"), 1.0, 1.0, 1.0, float("inf"), 1.0]):
            torch.manual_seed(number)
            value = call(torch.randn(5, 4), torch.tensor(factor))
            rows.append([_facts(item) for item in _flat([value, watched])])
    for one, two in zip(rows[:9], rows[9:], strict=True):
        _compare(one, two, 1e-5 if backend == "inductor" else 0)
    stats = magneto.stats()
    assert stats["breaks"] == 2 and stats["fallbacks"] == 0, stats[
        "break_reasons"
    ]  # of the first call, which makes the scale, and of all others


@pytest.mark.filterwarnings("ignore:.*a result requires grad though no input does")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_what_only_a_leaf_inside_makes_differentiable_requires_grad(backend):
    def scaled(x):
        weight = torch.ones(3, requires_grad=True)
        return (x * weight).sum(), x * 2

    loss, plain = magneto.optimize(backend)(scaled)(torch.arange(3.0))
    assert loss.requires_grad and not plain.requires_grad
    loss.backward()
