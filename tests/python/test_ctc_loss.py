"""ctc_loss of a batch on the CPU, with lengths in tensors, is part of the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import magneto
from tests.compare import outcome

BACKENDS = ("eager", "aot_eager", "inductor")
LENGTHS = {"shorter": [4, 2, 3], "one is empty": [7, 1, 0], "as wide as memory": [7, 7, 7], "all empty": [0, 0, 0]}


def given(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 10, 6, generator=generator, dtype=dtype).requires_grad_()
    return logits, torch.randint(1, 6, (3, 7), generator=generator), torch.tensor([10, 9, 5])


def tried(call: Any, x: torch.Tensor, *rest: Any) -> Any:
    loss, error = outcome(call, ((x, *rest), {}))
    if error is not None:
        return type(error), str(error)
    loss.sum().backward()
    return loss.detach(), loss.stride(), x.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_losses_and_gradients(backend: str, lengths: str, reduction: str, zero_infinity: bool) -> None:
    def program(x: torch.Tensor, targets: torch.Tensor, steps: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        x = x.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(x, targets, steps, sizes, reduction=reduction, zero_infinity=zero_infinity) * 2

    compiled = magneto.optimize(backend)(program)
    for dtype in (torch.float32, torch.float64):
        for whole in (torch.int64, torch.int32):
            found = []
            for call in (program, compiled, compiled):
                x, targets, steps = given(dtype)
                found.append(tried(call, x, targets.to(whole), steps, torch.tensor(LENGTHS[lengths], dtype=whole)))
            for one in found[1:]:
                torch.testing.assert_close(one, found[0], equal_nan=True)
    assert (magneto.stats()["breaks"], magneto.stats()["fallbacks"]) == (0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_of_training(backend: str) -> None:
    found = []
    for optimize in (lambda fn: fn, magneto.optimize(backend)):
        torch.manual_seed(0)
        net, loss = nn.Linear(6, 6), nn.CTCLoss(blank=5)
        optimiser = torch.optim.SGD(net.parameters(), 0.1)

        @optimize
        def step(x: torch.Tensor, targets: torch.Tensor, steps: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
            optimiser.zero_grad()
            value = loss(net(x).log_softmax(-1).transpose(0, 1), targets - 1, steps, sizes)
            value.backward()
            optimiser.step()
            return value.detach()

        x, targets, steps = given()
        found.append([*(step(x.detach(), targets, steps, torch.tensor([4, 2, k])) for k in range(4)), *net.parameters()])
    torch.testing.assert_close(found[1], found[0])
    assert magneto.stats()["breaks"] == 0


WRONG = {  # (of a target that is no class eager reads memory that is nobody's: what comes is not defined)
    "a target is longer than its row": lambda x, t, s, n: (x, t, s, n + 5),
    "more steps than there are": lambda x, t, s, n: (x, t, s + 5, n),
    "negative": lambda x, t, s, n: (x, t, s, n - 9),
    "another batch": lambda x, t, s, n: (x, t[:2], s, n),
    "another number of lengths": lambda x, t, s, n: (x, t, s[:2], n),
    "targets are no whole numbers": lambda x, t, s, n: (x, t.float(), s, n),
    "targets one after another": lambda x, t, s, n: (x, t.flatten()[: int(n.sum())], s, n),
    "lengths are tuples": lambda x, t, s, n: (x, t, (10, 9, 8), tuple(n.tolist())),
    "one alone": lambda x, t, s, n: (x[0], t[0], s[0], n[0]),
    "halves": lambda x, t, s, n: (x.bfloat16(), t, s, n),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_or_otherwise_given(wrong: str, backend: str) -> None:
    def program(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return F.ctc_loss(x.transpose(0, -2).log_softmax(-1), *rest)

    compiled, found = magneto.optimize(backend)(program), []
    for call in (program, compiled, compiled):
        x, targets, steps = given()
        x, *rest = WRONG[wrong](x.detach(), targets, steps, torch.tensor([4, 2, 3]))
        found.append(tried(call, x.requires_grad_(), *rest))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0]) if isinstance(found[0][0], torch.Tensor) else None
        assert isinstance(found[0][0], torch.Tensor) or one == found[0]


def test_its_gradient_has_none() -> None:
    def program(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(-1).transpose(0, 1), *rest)

    texts = []
    for call in (program, magneto.optimize("inductor")(program)):
        x, targets, steps = given()
        (grad,) = torch.autograd.grad(call(x, targets, steps, torch.tensor([4, 2, 3])), x, create_graph=True)
        texts.append(str(outcome(lambda g=grad: g.square().sum().backward(), ((), {}))[1]))
    assert texts[0] == texts[1] and "derivative" in texts[0]


@pytest.mark.filterwarnings("ignore::magneto.MagnetoWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_its_gradient_has_none_inside(backend: str) -> None:
    def penalty(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(F.ctc_loss(x.log_softmax(-1).transpose(0, 1), *rest), x, create_graph=True)
        return grad.square().sum()

    texts = []
    for call in (penalty, magneto.optimize(backend)(penalty)):
        x, targets, steps = given()
        texts.append(str(outcome(lambda c=call, a=(x, targets, steps): c(*a, torch.tensor([4, 2, 3])).backward(), ((), {}))[1]))
    assert texts[0] == texts[1] and "derivative" in texts[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [list, tuple])
def test_lengths_that_are_no_tensors(backend: str, kind: type) -> None:
    """They change from call to call, and compile once more for that."""

    def program(x: torch.Tensor, targets: torch.Tensor, steps: Any, sizes: Any) -> Any:
        x = x.log_softmax(-1).transpose(0, 1)
        whole = F.ctc_loss(x, targets, [x.size(0)] * x.size(1), kind([2, 2, 1]), zero_infinity=True)
        by_name = F.ctc_loss(x, targets, blank=5, target_lengths=sizes, input_lengths=steps)
        return F.ctc_loss(x, targets, steps, sizes), nn.CTCLoss(0, "sum")(x, targets, steps, sizes), by_name, whole

    compiled = magneto.optimize(backend)(program)
    for steps, sizes in [([10, 9, 8], [4, 2, 3]), ([10, 9, 8], [4, 2, 3]), ([9, 10, 7], [1, 0, 5]), ([10, 10, 10], [3, 3, 3])] * 2:
        found = []
        for call in (program, compiled):
            x, targets, _ = given()
            losses = call(x, targets, kind(steps), kind(sizes))
            sum(losses).backward()
            found.append(([loss.detach() for loss in losses], x.grad))
        torch.testing.assert_close(found[1], found[0])
    stats = magneto.stats()
    assert (stats["breaks"], stats["fallbacks"]) == (0, 0) and stats["graphs"] <= 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [[4, 2], [4, 9, 3], [-1, 2, 3], [1.5, 2, 3], torch.tensor([4, 2, 3])])
def test_eagers_errors_of_lengths_in_lists(backend: str, sizes: Any) -> None:
    def program(x: torch.Tensor, targets: torch.Tensor) -> Any:
        return F.ctc_loss(x.log_softmax(-1).transpose(0, 1), targets, [10, 9, 8], sizes)

    x, targets, _ = given()
    texts = [tried(call, x, targets) for call in (program, magneto.optimize(backend)(program))]
    assert texts[0] == texts[1] and issubclass(texts[0][0], Exception)
