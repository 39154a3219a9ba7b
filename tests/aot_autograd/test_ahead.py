"""Gradients that the forward makes: values and gradients are eager's for every factor, and what is kept is given away once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto
from magneto.aot_autograd import ahead
from magneto.backends import pipeline
from magneto.base.events import counters
from magneto.base.flags import config

N, C = 24, 300


@pytest.fixture(autouse=True)
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "WORTH", 1024)
    magneto.reset()
    torch.manual_seed(0)


def logits(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(*shape or (N, C))).to(dtype).requires_grad_()


def targets(*shape: int) -> torch.Tensor:
    return torch.randint(0, C, shape or (N,)).index_fill_(0, torch.tensor([2, 5]), -100)


def of_words(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((h @ w)[:-1].float(), t[1:])


def of_two(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return F.cross_entropy(y, t) + 0.3 * F.mse_loss(y, w)


W = torch.rand(C, generator=torch.Generator().manual_seed(0))
LOSSES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "cross entropy": (F.cross_entropy, lambda: (logits(), targets())),
    "in bfloat16": (lambda x, t: F.cross_entropy(x.float(), t), lambda: (logits(dtype=torch.bfloat16), targets())),
    "all in bfloat16": (F.cross_entropy, lambda: (logits(dtype=torch.bfloat16), targets())),
    "in float64": (F.cross_entropy, lambda: (logits(dtype=torch.float64), targets())),
    "smoothed": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), lambda: (logits(), targets())),
    "weights": (lambda x, t: F.cross_entropy(x, t, W, label_smoothing=0.2), lambda: (logits(), targets())),
    "a sum": (lambda x, t: F.cross_entropy(x, t, reduction="sum", ignore_index=7), lambda: (logits(), targets().clamp(0))),
    "rows": (lambda x, t: (F.cross_entropy(x, t, reduction="none") * t.clamp(0, 1)).mean(), lambda: (logits(), targets())),
    "probabilities": (F.cross_entropy, lambda: (logits(), torch.rand(N, C).softmax(1))),
    "words": (of_words, lambda: (logits(N, 8), logits(8, C), targets())),
    "words in bfloat16": (of_words, lambda: (logits(N, 8, dtype=torch.bfloat16), logits(8, C, dtype=torch.bfloat16), targets())),
    "squares": (lambda h, w, y: F.mse_loss(torch.tanh(h @ w), y), lambda: (logits(N, 8), logits(8, C), torch.randn(N, C))),
    "bernoulli": (lambda h, w, y: F.binary_cross_entropy_with_logits(h @ w, y), lambda: (logits(N, 8), logits(8, C), torch.rand(N, C))),
    "huber": (lambda h, w, y: F.smooth_l1_loss(h @ w, y), lambda: (logits(N, 8), logits(8, C), torch.randn(N, C))),
    "norm": (lambda h, w: F.layer_norm(h @ w, (C,)).pow(3).mean(), lambda: (logits(N, 8), logits(8, C))),
    "two": (of_two, lambda: (logits(), torch.randn(N, C), targets())),
}  # fmt: skip


def copies(args: tuple[torch.Tensor, ...], dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
    return tuple(x.detach().clone().to(dtype if x.is_floating_point() else None).requires_grad_(x.requires_grad) for x in args)


def gradients(args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [x.grad for x in args if x.requires_grad]  # type: ignore[misc]


def exactly(fn: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...], factor: float) -> list[torch.Tensor]:
    global W
    args, before = copies(args, torch.float64), W
    W = W.double()
    float_ = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double  # type: ignore[assignment,method-assign]
    try:
        (fn(*args) * factor).backward()
    finally:
        torch.Tensor.float, W = float_, before  # type: ignore[method-assign]
    return gradients(args)


def near(ours: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    for a, b, c in zip(ours, eager, exact, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        unit = torch.finfo(a.dtype).eps * c.abs().max()
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + unit * (16 if a.dtype is torch.float64 else 0.5)


@pytest.mark.parametrize("factor", [1.0, 3.3, 65536.0])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, factor: float) -> None:
    fn, make = LOSSES[name]
    args = make()
    exact = exactly(fn, args, factor)
    run = magneto.optimize()(lambda *args: fn(*args))
    eager = copies(args)
    (fn(*eager) * factor).backward()
    for _ in range(2):
        mine = copies(args)
        loss = run(*mine)
        torch.testing.assert_close(loss, fn(*args))
        (loss * factor).backward()
        near(gradients(mine), gradients(eager), exact)
    assert counters()["gradients_ahead"] == 1


Made = tuple[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor]


@pytest.fixture
def made() -> Made:
    """A compiled loss, what it is given, and its gradient in eager."""
    x, t = logits(), targets()
    y = x.detach().clone().requires_grad_()
    F.cross_entropy(y, t).backward()
    assert y.grad is not None
    return magneto.optimize()(lambda x: F.cross_entropy(x, t)), x, y.grad


def close(ours: torch.Tensor | None, wanted: torch.Tensor) -> None:
    assert ours is not None
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-9)


def test_a_graph_that_is_kept(made: Made) -> None:
    fn, x, wanted = made
    loss = fn(x)
    for factor in (1.0, 3.0, 1.0):
        (found,) = torch.autograd.grad(loss * factor, x, retain_graph=True)
        close(found, wanted * factor)
        found.zero_()
    loss.backward()
    close(x.grad, wanted)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_add_up_and_are_the_users(made: Made) -> None:
    fn, x, wanted = made
    first, second = fn(x), fn(x)
    first.backward()
    grad = x.grad
    assert grad is not None
    (second * 2).backward()
    assert x.grad is grad
    close(grad, 3 * wanted)
    x.grad = None
    fn(x).backward()
    close(grad, 3 * wanted)
    close(x.grad, wanted)


def test_autograd_takes_what_the_forward_has_made(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy, and backward computes nothing but the product."""
    fn, x, wanted = made
    addresses: list[int] = []
    original = pipeline.plan_training

    def plan_training(joint: Any, cut: Any, forward: Callable[..., Any], compile_backward: Any, *rest: Any, **named: Any) -> Any:
        def noted(*inputs: Any) -> Any:
            out = forward(*inputs)
            addresses.append(out[-1].data_ptr())
            return out

        return original(joint, cut, noted, None, *rest, **named)

    monkeypatch.setattr(pipeline, "plan_training", plan_training)
    for factor in (1.0, 3.0):
        x.grad = None
        (factor * fn(x)).backward()
        assert x.grad is not None and x.grad.data_ptr() == addresses[-1]
        close(x.grad, factor * wanted)


def test_a_result_beside_it_has_memory_of_its_own() -> None:
    """Though it is the same number."""

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x.detach().exp()
        return (h * x).sum(), h * 1.0

    x = logits()
    loss, h = magneto.optimize()(model)(x)
    (3 * loss).backward()
    torch.testing.assert_close(h, x.detach().exp())
    close(x.grad, 3 * x.detach().exp())
    assert counters()["gradients_ahead"] == 1


def test_hooks_for_saved_tensors(made: Made) -> None:
    fn, x, wanted = made
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        loss = fn(x)
    before = [t.clone() for t in packed]
    (3 * loss).backward()
    close(x.grad, 3 * wanted)
    assert all(map(torch.equal, packed, before))


def test_second_derivatives() -> None:
    t = targets()
    x = logits()
    y = x.detach().clone().requires_grad_()
    for fn, leaf in ((magneto.optimize()(lambda x: F.cross_entropy(x, t)), x), (lambda x: F.cross_entropy(x, t), y)):
        (found,) = torch.autograd.grad(3 * fn(leaf), leaf, create_graph=True)
        (found * 100).pow(2).sum().backward()
    assert y.grad is not None
    torch.testing.assert_close(x.grad, y.grad)


def test_many_gradients_at_once(made: Made) -> None:
    fn, x, wanted = made
    (found,) = torch.autograd.grad(fn(x), x, torch.tensor([1.0, 2.0, 0.0]), is_grads_batched=True)
    close(found, torch.stack([wanted, 2 * wanted, 0 * wanted]))


def test_inputs_written_since(made: Made) -> None:
    fn, x, wanted = made
    loss = fn(x)
    with torch.no_grad():
        x.zero_()
    loss.backward()
    close(x.grad, wanted)


def test_results_beside_the_loss() -> None:
    """Logits with a gradient of their own, before the loss's and after it, or with none."""
    t = targets()

    def model(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = h @ w
        return F.cross_entropy(y, t), y

    run = magneto.optimize()(model)
    for order in ("l", "ly", "yl", "both", "ll"):
        args = logits(N, 8), logits(8, C)
        grads = []
        for fn, (h, w) in ((model, copies(args)), (run, copies(args))):
            loss, y = fn(h, w)
            parts = {"l": lambda loss=loss: 2 * loss, "y": lambda y=y: y.sin().sum()}
            if order == "both":
                (parts["l"]() + parts["y"]()).backward()
            else:
                for one in order:
                    parts[one]().backward(retain_graph=True)
            grads.append(gradients((h, w)))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_one_gradient_for_two() -> None:
    t = targets()
    run = magneto.optimize()(lambda x, y: F.cross_entropy(x + y, t))
    x, y = logits(), logits()
    run(x, y).backward()
    assert x.grad is not None and y.grad is not None
    torch.testing.assert_close(x.grad, y.grad)
    assert x.grad.data_ptr() != y.grad.data_ptr()


def test_float16_keeps_its_scale() -> None:
    """What float16 holds of a gradient depends on the factor: it is made in backward."""
    t = targets()
    x = (torch.randn(N, C) * 8).half().requires_grad_()
    y = x.detach().clone().requires_grad_()
    run = magneto.optimize()(lambda x: F.cross_entropy(x.float(), t) / 4096)
    (run(x) * 65536.0).backward()
    (F.cross_entropy(y.float(), t) / 4096 * 65536.0).backward()
    assert counters()["gradients_ahead"] == 0 and x.grad is not None
    torch.testing.assert_close(x.grad, y.grad)


def test_eagers_numerics_stay() -> None:
    t = targets()
    with config.patch(numerics="eager"):
        x = logits()
        magneto.optimize()(lambda x: F.cross_entropy(x, t))(x).backward()
    assert counters()["gradients_ahead"] == 0


def test_what_is_kept_anyway_stays() -> None:
    """An input costs nothing; a gradient beside it would."""
    x, y = logits(), torch.randn(N, C)
    magneto.optimize()(lambda x: F.mse_loss(x, y))(x).backward()
    assert counters()["gradients_ahead"] == 0


def test_autocast_and_sizes_that_vary() -> None:
    w = logits(8, C)

    def model(h: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(h @ w, t)

    run = magneto.optimize(dynamic=None)(model)
    for n in (24, 30, 36, 42, 24, 48):
        h, t = logits(n, 8), targets(n)
        got, want = [], []
        for fn, out in ((model, want), (run, got)):
            w.grad, k = None, h.detach().clone().requires_grad_()
            (2 * fn(k, t)).backward()
            out += [k.grad, w.grad]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3 * float(b.abs().max()))
