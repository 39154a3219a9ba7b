"""Rows of few elements: the vector runs over rows. Reductions of as many elements as gcc sorts are written out, others are walked by squares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import magneto

Function = Callable[..., torch.Tensor]


def wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


ROWS: dict[str, Function] = {
    "amax": lambda x: x.amax(-1) + 1,
    "amin": lambda x: x.amin(-1),
    "argmax": lambda x: x.argmax(-1),
    "squares": lambda x: (wide(x) * x).sum(-1),
    "product": lambda x: (wide(x) / 4 + 1).prod(-1),
    "any": lambda x: (x > 1).any(-1),
    "all": lambda x: (x < 1).all(-1),
    "integers": lambda x: (x * 4).nan_to_num().to(torch.int64).sum(-1),
    "normalised": lambda x: x / (wide(x).norm(dim=-1, keepdim=True) + 1),
    "softmax": lambda x: wide(x).softmax(-1),
    "log of sums": lambda x: wide(x).logsumexp(-1),
    "layer norm": lambda x: F.layer_norm(wide(x), x.shape[-1:]),
    "down a column too": lambda x: wide(x).softmax(-1).sum(0),
    "of a part": lambda x: x[:, 1:].amax(-1),
    "of two": lambda x: torch.stack([x.amax(-1), x.amin(-1)], -1),
}


def compiled(function: Function, *inputs: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The result, which has eager's strides and dtype, and the kernels' text."""
    call = magneto.optimize("inductor", nopython=True)(function)
    with torch.no_grad():
        ours, eager = call(*inputs), function(*inputs)
    assert ours.stride() == eager.stride() and ours.dtype is eager.dtype
    return ours, "".join(magneto.inspect(call).kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 5, 7, 8, 9, 13, 16, 31, 33, 64, 65])
@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x = torch.randn(131, size).to(dtype)
    if name in ("amax", "amin", "argmax", "integers", "of a part"):
        x[5, size // 2], x[7], x[130, 1] = torch.nan, torch.nan, -torch.inf
    function = ROWS[name]
    ours, text = compiled(function, x)
    eager, exact = function(x), function(x.double())
    if ours.is_floating_point():
        allowed = 2 * (eager.double() - exact).abs().nan_to_num().max() + 1e-13
        allowed = allowed if dtype is torch.float64 else allowed + 2e-6
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=allowed.item(), equal_nan=True)
    else:
        assert torch.equal(ours, eager)
    if size < 32 and name not in ("of a part", "of two", "down a column too"):
        assert f"j0 < {size};" not in text or "mg_tile_" in text, "a vector over the few elements of a row"


PAIRS: dict[str, Function] = {
    "kernel": lambda x, y: torch.exp(-((x[:, None] - y) ** 2).sum(-1)),
    "nearest": lambda x, y: ((x[:, None] - y) ** 2).sum(-1).amin(1),
    "overlap": lambda x, y: (torch.minimum(x[:, None], y) - torch.maximum(x[:, None], y / 2)).clamp(min=0).prod(-1),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 16])
def test_pairs(name: str, size: int) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(70, size), torch.rand(83, size)
    ours, text = compiled(PAIRS[name], x, y)
    torch.testing.assert_close(ours, PAIRS[name](x, y), rtol=1e-5, atol=1e-6)
    if size != 5:
        assert f" < {size}; j" not in text, "a loop over what is written out"


@pytest.mark.parametrize("size", [5, 9, 20])
def test_rows_that_lie_apart(size: int) -> None:
    """Columns of a wider matrix: what lies between them is not looked at."""
    x = torch.randn(200, 3 * size)
    x[:, :size] = torch.nan
    x[:, 2 * size :] = torch.nan
    part = x[:, size : 2 * size]
    ours, text = compiled(lambda v: v.softmax(-1).amax(-1), part)
    torch.testing.assert_close(ours, part.softmax(-1).amax(-1))
    assert "mg_tile_" in text


def test_reductions_in_two_directions_walk_memory_as_it_lies() -> None:
    x = torch.randn(2, 130, 130)
    call = magneto.optimize("inductor", nopython=True)(lambda v: (v.amin(1), v.amin(2)))
    for ours, eager in zip(call(x), (x.amin(1), x.amin(2)), strict=True):
        assert torch.equal(ours, eager)
    assert len(magneto.inspect(call).kernels) == 2, "in one loop one of them would jump"


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 16, 40])
def test_gradients_of_products(size: int) -> None:
    """Rows of a few factors and what each lacks are written out side by side; for more PyTorch looks for a zero first."""
    torch.manual_seed(size)
    for zeros in range(3):
        x, scale = torch.randn(300, size), torch.randn(300)
        x[5, :zeros] = 0
        x[6, -1] = 0 if zeros else 1
        call = magneto.optimize("inductor", nopython=True)(lambda x, s: torch.autograd.grad((x.prod(-1) * s).sum(), x)[0])
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        torch.testing.assert_close(call(leaves[0], scale), torch.autograd.grad((leaves[1].prod(-1) * scale).sum(), leaves[1])[0])
        text = "".join(magneto.inspect(call).kernels)
        assert ("mg_tile_" not in text and f"reductions of {size} elements are written out" in text) or size > 4


RECORDS: dict[str, Function] = {
    "length one": lambda x: F.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "log of it": lambda x: x.log_softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]) * 2,
    "largest": lambda x: (x == x.amax(-1, keepdim=True)) * x,
    "of several": lambda x: x.view(20, 35, -1) - x.view(20, 35, -1).mean(-1, keepdim=True),
    "joined": lambda x: F.normalize(torch.cat([x[:, 1:] * 2, x[:, :1]], -1), dim=-1),
}


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("name", RECORDS)
def test_rows_that_give_rows(name: str, size: int) -> None:
    """Vectors of length one and the like: the vector runs over rows, all elements of which are in one turn; gradients too."""
    torch.manual_seed(size)
    given, function = torch.randn(700, size), RECORDS[name]
    given[3], given[4, 1], given[5, 0] = 0, torch.nan, torch.inf
    ours, text = compiled(function, given)
    torch.testing.assert_close(ours, function(given), equal_nan=True)
    assert (size > 4 or name == "joined") or ("mg_tile_" not in text and "are written out" in text and f"j0 < {size};" not in text)
    seed = torch.randn(ours.shape)
    leaves = [given.to(dtype).requires_grad_() for dtype in (torch.float32, torch.float32, torch.float64)]
    mine, eager, exact = (
        torch.autograd.grad(run(x), x, seed.to(x.dtype))[0] for run, x in zip((magneto.compile(function), function, function), leaves)
    )
    allowed = 2 * (eager - exact).abs().nan_to_num().max() + 1e-6
    torch.testing.assert_close(mine.double(), exact, equal_nan=True, rtol=1e-5, atol=allowed.item())


def elements(m: torch.Tensor) -> list[torch.Tensor]:
    return (
        list(m.flatten(1).unbind(1))
        if m.shape[1] == m.shape[2] == 1
        else [m[:, i, j] for i in range(m.shape[1]) for j in range(m.shape[2])]
    )


MATRICES: dict[str, Function] = {
    "products of neighbours": lambda m: sum(a * b for a, b in zip(elements(m), elements(m)[1:], strict=False)),
    "some twice": lambda m: elements(m)[0] * elements(m)[-1] + elements(m)[0].exp() - elements(m)[1] * 3,
    "made of elements": lambda m: torch.stack([e * k for k, e in enumerate(elements(m))], -1).view(m.shape).sin(),
    "with zeros and infinities": lambda m: elements(m)[0] / elements(m)[1] + elements(m)[-1].sqrt(),
}


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 3), (4, 2), (1, 9), (4, 4)])
@pytest.mark.parametrize("name", MATRICES)
def test_gradients_of_elements_of_small_matrices(name: str, shape: tuple[int, int]) -> None:
    """Conditions tell their elements apart: all are written out in one turn of a loop over matrices, each without the others' work."""
    torch.manual_seed(0)
    given, seeds = torch.randn(2, 150, *shape), None
    given[0, 3], given[0, 4], given[0, 5] = 0, -0.0, torch.inf
    gradients = []
    for run in (magneto.optimize("inductor", nopython=True)(lambda m, s: torch.autograd.grad(MATRICES[name](m), m, s)[0]), None):
        m = given[0].clone().requires_grad_()
        result = MATRICES[name](m)
        seeds = torch.randn_like(result) if seeds is None else seeds
        gradients.append(torch.autograd.grad(result, m, seeds)[0] if run is None else run(m, seeds))
        text = text if run is None else "".join(magneto.inspect(run).kernels)
    torch.testing.assert_close(*gradients, equal_nan=True)
    assert torch.equal(*[(g == 0) & g.signbit() for g in gradients])
    assert "#pragma omp simd" in text
    if shape != (4, 4) and name != "made of elements":
        assert f"< {shape[1]}; j" not in text and f"< {shape[0]}; j" not in text, "a loop over few elements"
