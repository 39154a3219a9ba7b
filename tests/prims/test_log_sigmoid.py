"""The logarithm of a sigmoid and the loss made of it are formulas: eager's values and gradients, one kernel and no library call forwards."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import magneto

EDGES = (math.inf, -math.inf, math.nan, 0.0, -0.0, 100.0, -100.0, 1e-8, -1e30)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def compare(function, *inputs: torch.Tensor, dtype: torch.dtype) -> str:  # type: ignore[no-untyped-def]
    """Values and gradients of the first input; the text of the kernels in inference."""
    tolerance = {8: 1e-12, 4: 2e-6, 2: 1e-2}[dtype.itemsize]
    call, found = magneto.optimize("inductor", nopython=True)(function), []
    for run in (call, function):
        x = inputs[0].clone().requires_grad_()
        result = run(x, *inputs[1:])
        (result.float() * torch.arange(result.numel()).reshape(result.shape)).sum().backward()
        found.append((result.detach(), x.grad))
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert ours.stride() == eager.stride()
    plain = magneto.optimize("inductor", nopython=True)(function)
    with torch.no_grad():
        torch.testing.assert_close(plain(*inputs), function(*inputs), rtol=tolerance, atol=tolerance, equal_nan=True)
    return "".join(magneto.inspect(plain).kernels)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_sigmoid(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for x in (torch.randn(6, 40) * 9, torch.randn(40, 6).t(), torch.tensor(EDGES)):
        assert "log1p" in compare(F.logsigmoid, x.clamp(-6e4, 6e4).to(dtype) if x.ndim == 2 else x.to(dtype), dtype=dtype)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weights", ["", "weight", "pos_weight", "weight pos_weight"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_of_logits(dtype: torch.dtype, weights: str, reduction: str) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(7, 33) * 5).to(dtype), torch.rand(7, 33).to(dtype)
    given = {name: torch.rand(33).to(dtype) for name in weights.split()}

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(x, y, reduction=reduction, **given)

    assert "log1p" in compare(loss, x, y, dtype=dtype)


def test_loss_of_logits_at_the_edges() -> None:
    x, y = torch.tensor(EDGES), torch.linspace(0, 1, len(EDGES))
    compare(lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"), x, y, dtype=torch.float32)
    with pytest.raises(ValueError, match="must be the same as input size"):
        magneto.optimize("inductor")(F.binary_cross_entropy_with_logits)(x, y[:3])


@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3, 4), (2, 5, 7), (5,)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy_of_images_and_weights(shape: tuple[int, ...], reduction: str) -> None:
    torch.manual_seed(0)
    target = torch.tensor(3) if len(shape) == 1 else torch.randint(5, (shape[0], *shape[2:]))
    given: Any
    for given in ({}, {"weight": torch.rand(5) + 0.5}, {"ignore_index": 2}, {"weight": torch.rand(5), "ignore_index": 2}):

        def loss(x: torch.Tensor) -> torch.Tensor:
            found = F.cross_entropy(x, target, reduction=reduction, **given)  # noqa: B023
            return found if found.ndim else found * torch.ones(2)

        compare(loss, torch.randn(shape), dtype=torch.float32)
    target.fill_(7)
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        magneto.optimize("inductor")(loss)(torch.randn(shape))


def test_weights_that_do_not_fit() -> None:
    x, target = torch.randn(2, 5, 3, 3), torch.randint(4, (2, 3, 3))
    for images, labels in ((x, target), (x[..., 0, 0], target[..., 0, 0])):
        for run in (F.cross_entropy, magneto.optimize("inductor")(lambda *args: F.cross_entropy(*args))):
            with pytest.raises(RuntimeError, match="weight tensor should be defined either for all"):
                run(images, labels, torch.ones(4))
