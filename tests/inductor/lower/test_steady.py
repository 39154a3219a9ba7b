"""What does not change between calls (constants, weights) is put into memory once; torch.roll reads its input in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from magneto import _C
from magneto.inductor.runtime.plan_code import PlanCode


def plans_of(fn: Callable[..., Any], *inputs: Any) -> list[PlanCode]:
    import magneto.inductor.recall as compiler

    made: list[PlanCode] = []
    original = compiler._remember

    def remember(plan: _C.Plan, code: PlanCode) -> None:
        made.append(code)
        original(plan, code)

    compiler._remember = remember
    try:
        with torch.no_grad():
            fn(*inputs)
    finally:
        compiler._remember = original
    return made


class Windowed(nn.Module):
    """Scores with a bias looked up in a table of weights, and a mask made of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 3))
        self.register_buffer("place", torch.randint(20, (36,)))

    def mask(self) -> torch.Tensor:
        regions = torch.zeros(4, 9)
        for k, cut in enumerate((slice(0, 3), slice(3, 7), slice(7, 9))):
            regions[:, cut] = k
        regions[2:] += 3
        flat = regions.view(6, 6)
        return (flat.unsqueeze(1) - flat.unsqueeze(2)).masked_fill(flat.unsqueeze(1) != flat.unsqueeze(2), -5.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.table[self.place].view(6, 6, 3).permute(2, 0, 1).contiguous()  # type: ignore[index]
        scores = x.view(-1, 6, 3, 6, 6) + bias.unsqueeze(0) + self.mask().to(x.dtype).unsqueeze(1).unsqueeze(0)
        return scores.softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_of_constants_and_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Windowed().to(dtype).eval(), torch.randn(60, 3, 36).to(dtype)
    compiled = magneto.compile(model)
    (code,) = plans_of(compiled, x)
    names = [instruction[0] for instruction in code.instructions]
    assert code.kept_bytes >= 216 * 2  # the mask and the bias
    assert names.count("KERNEL") - names[: names.index("KEPT")].count("KERNEL") == 1
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
            model.table.data.mul_(-0.5)
            torch.testing.assert_close(compiled(x), model(x))
            model.table = nn.Parameter(model.table + 1)
            model.place.add_(1).remainder_(20)  # type: ignore[operator, union-attr]


class Bucketed(nn.Module):
    """T5's bias: a weight looked up by the logarithm of a distance, for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[-1])
        far = (place[None] - place[:, None]).abs()
        bucket = (torch.log(far.float() + 1) * 3).long().clamp(max=15)
        return (x + self.table(bucket).permute(2, 0, 1)).softmax(-1)


def test_a_table_of_logarithms_is_made_once() -> None:
    torch.manual_seed(0)
    model, x = Bucketed().eval(), torch.randn(2, 8, 40, 40)
    compiled = magneto.compile(model)
    (code,) = plans_of(compiled, x)
    names = [instruction[0] for instruction in code.instructions]
    assert code.kept_bytes >= 40 * 40 * 8  # the buckets
    assert "KERNEL" in names[: names.index("KEPT")]
    (early,) = [text for text in magneto.inspect(compiled).kernels if "mg_log_f32(" in text]
    assert early.count("mg_log_f32(") == 1 and "exp" not in early[early.index("{") :]
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
            model.table.weight.mul_(2)
    got, want = (torch.autograd.grad(fn(x).square().sum(), model.table.weight)[0] for fn in (compiled, model))
    torch.testing.assert_close(got, want)


def test_gradients_are_eagers() -> None:
    torch.manual_seed(0)
    model, x = Windowed(), torch.randn(60, 3, 36)
    twin = copy.deepcopy(model)
    magneto.compile(model)(x).square().sum().backward()
    twin(x).square().sum().backward()
    assert model.table.grad is not None and twin.table.grad is not None
    torch.testing.assert_close(model.table.grad, twin.table.grad, rtol=1e-4, atol=1e-5)


ROLLS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "one": ((3, 5, 4), lambda x: x.roll(2, 1)),
    "back": ((3, 5, 4), lambda x: x.roll(-1, 0)),
    "two dimensions": ((2, 6, 7, 3), lambda x: x.roll((-2, 3), (1, 2))),
    "far": ((2, 6, 7, 3), lambda x: x.roll((13, -20), (1, 2))),
    "innermost": ((3, 5, 4), lambda x: x.roll(1, 2)),
    "flat": ((3, 4), lambda x: x.roll(5)),
    "of a reshaped tensor": ((6, 8), lambda x: x.view(2, 3, 8).roll(1, 1)),
    "of a cut": ((6, 8), lambda x: x[1:5].roll(1, 0)),
    "of a computed tensor": ((6, 8), lambda x: (x.exp() + 1).roll(2, 0)),
    "of a transposed tensor": ((6, 8), lambda x: x.t().roll(3, 0)),
    "of every second row": ((6, 8), lambda x: x[::2].roll(1, 0)),
    "no roll, parts in another order": ((6, 8), lambda x: torch.cat([x[3:], x[:2]])),
    "overlapping parts": ((6, 8), lambda x: torch.cat([x[2:], x[:4]])),
    "parts of two": ((6, 8), lambda x: torch.cat([x[2:], x.exp()[:2]])),
    "not the beginning": ((6, 8), lambda x: torch.cat([x[3:], x[1:3]])),
}


@pytest.mark.parametrize("case", list(ROLLS))
def test_rolls(case: str) -> None:
    torch.manual_seed(0)
    shape, fn = ROLLS[case]
    x = torch.randn(shape)
    compiled = magneto.compile(lambda x: fn(x) * 2 + 1, backend="inductor")
    torch.testing.assert_close(compiled(x), fn(x) * 2 + 1, rtol=1e-6, atol=1e-6)


LINEAR: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "read by loops": lambda x, w, b: torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b)),
    "read by the library": lambda x, w, b: torch.nn.functional.linear(torch.nn.functional.linear(x, w, b), w, b),
    "result": lambda x, w, b: torch.nn.functional.linear(x, w, b),
    "weight as a matrix": lambda x, w, b: torch.addmm(b, x, w),
    "bias for rows": lambda x, w, b: torch.addmm(b.view(-1, 1).expand(24, 24), x[:24], w),
    "scaled": lambda x, w, b: torch.addmm(b, x, w.t(), beta=0.5, alpha=2.0),
    "cut weight": lambda x, w, b: torch.nn.functional.linear(x[:, 4:], w[:, 4:], b),
    "strided input": lambda x, w, b: torch.nn.functional.linear(x.t().contiguous().t(), w, b),
}


@pytest.mark.parametrize("case", list(LINEAR))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_linear_layers_round_as_little_as_eager(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fn = LINEAR[case]
    inputs = [torch.randn(shape).to(dtype) for shape in ((40, 24), (24, 24), (24,))]
    exact = fn(*[x.double() for x in inputs])
    with torch.no_grad():
        ours, eager = magneto.compile(fn)(*inputs), fn(*inputs)
    assert (ours.dtype, ours.stride()) == (eager.dtype, eager.stride())
    assert (ours.double() - exact).abs().max() <= 2 * (eager.double() - exact).abs().max() + 1e-6
