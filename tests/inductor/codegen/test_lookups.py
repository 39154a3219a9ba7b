"""Lookups on the CPU are loops of ours: their values, negative places, the errors of others; what cannot be out of range is not checked."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import magneto

X = torch.arange(3 * 40 * 6, dtype=torch.float32).reshape(3, 40, 6)
ROWS = X.reshape(120, 6)
I, J = torch.tensor([5, 0, 39, -1, -40, 7]), torch.tensor([0, 2, -1, 1, 0, -3])

LOOKUPS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "rows": (lambda x, i: x[i], (ROWS, I)),
    "columns": (lambda x, i: x[:, i], (X, I)),
    "of 32 bits": (lambda x, i: x[:, i], (X, I.int())),
    "pairs": (lambda x, j, i: x[j, i], (X, J, I)),
    "pairs apart": (lambda x, j, i: x[j, :, i % 6], (X, J, I)),
    "one for each row": (lambda x, i: x[torch.arange(6), i % 6], (ROWS, I)),
    "matrix of places": (lambda x, i: x[i.view(2, 3)], (ROWS, I)),
    "column of halves": (lambda x, i: x[i], (ROWS[:, 2].to(torch.bfloat16), I)),
    "selected": (lambda x, i: x.index_select(1, i), (X, I.abs() % 40)),
    "embedded": (lambda x, i: F.embedding(i, x), (ROWS, I.abs().view(3, 2))),
    "gathered": (lambda x, i: x.gather(1, i), (ROWS, I[:, None].abs() % 6)),
    "gathered rows": (lambda x, i: x.gather(1, i[None, :, None].expand(3, 6, 6)), (X, I.abs() % 40)),
    "bytes": (lambda x, i: x[i.long()], (torch.randn(256, 4), torch.arange(90, dtype=torch.uint8).view(2, 45) * 2)),
    "few bytes": (lambda x, i: x[i.long()], (ROWS, torch.arange(90, dtype=torch.uint8))),
    "by truth": (lambda x, i: x[(i % 3 > 1).long()], (ROWS[:, 2].contiguous(), torch.arange(90))),
    "by masks": (lambda x, m: x[1:][m.long()], (ROWS[:, 2].contiguous(), torch.arange(90) % 7 > 2)),
    "by what is not in masks": (lambda x, m: x[(~m).int() * 2], (ROWS[:, 2].contiguous(), torch.arange(90) % 7 > 2)),
    "by two choices": (lambda x, m: x[torch.where(m, 7, 3)], (ROWS[:, 2].bfloat16(), torch.arange(90) % 7 > 2)),
    "by signs of bytes": (lambda x, i: x[i.sign().long()], (ROWS[:, 2].contiguous(), torch.arange(90).to(torch.uint8) % 3)),
    "by two comparisons": (lambda x, i: x[(i < i).int() + (i != i[0]).int()], (ROWS[:, 2].contiguous(), torch.arange(90) % 2)),
    "by what is limited": (lambda x, i: x[i.clamp(max=1).long()], (ROWS[:, 2].contiguous(), torch.arange(90).to(torch.uint8) % 3)),
    "by one boundary": (lambda x, i: x[torch.bucketize(i, i[3:4])], (ROWS[:, 2].contiguous(), torch.arange(90) % 7)),
    "transposed": (lambda x, i: x.t()[i], (X[0], I % 6)),
    "of what was looked up": (lambda x, i: x[:, i][i[:4] % 3], (X, I)),
    "rows of rows": (lambda x, i: x.index_select(1, i % 40).index_select(0, i[:3] % 3) * 2, (X, I)),
    "of all samples": (lambda x, i: X.new_ones(9, 6, 6) + x[i % 40].t(), (X[0], I)),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_values(name: str) -> None:
    function, inputs = LOOKUPS[name]
    call = magneto.optimize("inductor", nopython=True)(function)
    eager = function(*inputs)
    for _ in range(2):
        ours = call(*inputs)
        assert torch.equal(ours, eager) and ours.stride() == eager.stride() and ours.dtype is eager.dtype
    text = "".join(magneto.inspect(call).kernels)
    assert "p0[" in text, "no kernel of ours"
    if name == "bytes":
        assert "status |=" not in text


@pytest.mark.parametrize(
    ("name", "wrong"), [("rows", 120), ("rows", -121), ("pairs", 3), ("selected", -1), ("embedded", 120), ("gathered", 6)]
)
def test_places_out_of_range_raise_eagers_error(name: str, wrong: int) -> None:
    function, (x, *rest) = LOOKUPS[name]
    call = magneto.optimize("inductor", nopython=True)(function)
    call(x, *rest)
    bad = [i.clone() for i in rest]
    bad[0].view(-1)[1] = wrong
    with pytest.raises((IndexError, RuntimeError)) as eager:
        function(x, *bad)
    with pytest.raises(eager.type) as ours:
        call(x, *bad)
    assert str(ours.value).splitlines()[0] == str(eager.value).splitlines()[0]
    assert torch.equal(call(x, *rest), function(x, *rest))


def test_few_elements_of_several_lookups_are_written_out() -> None:
    """Their conditions are decided then."""
    x, i, j = torch.randn(9, 2), torch.randint(9, (500,)), torch.randint(9, (500,))
    call = magneto.optimize("inductor", nopython=True)(lambda x, i, j: torch.cat([x[i], x[j], x[i] - x[j]], -1))
    assert torch.equal(call(x, i, j), torch.cat([x[i], x[j], x[i] - x[j]], -1))
    assert " < 6; j" not in "".join(magneto.inspect(call).kernels)


def test_what_many_samples_share_is_looked_up_once() -> None:
    def bias(a: torch.Tensor, t: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return (a + t[i].permute(2, 0, 1)).softmax(-1)

    a, t, i = torch.randn(8, 4, 20, 20), torch.randn(30, 4), torch.randint(-30, 30, (20, 20))
    call = magneto.optimize("inductor", nopython=True)(bias)
    torch.testing.assert_close(call(a, t, i), bias(a, t, i))
    assert "".join(magneto.inspect(call).kernels).count("status |=") == 1
    i[3, 4] = 30
    with pytest.raises(IndexError):
        call(a, t, i)


@pytest.mark.parametrize(
    "function", [lambda t, i: t[i], lambda t, i: t[i] * 2, lambda t, i: t.index_select(0, i), lambda t, i: torch.zeros(5)[i] + 1]
)
@pytest.mark.parametrize("wrong", [5, -6])
def test_places_that_decide_nothing_are_checked(function: Callable[..., torch.Tensor], wrong: int) -> None:
    """Of a tensor all of whose elements are one."""
    call = magneto.optimize("inductor", nopython=True)(function)
    table = torch.arange(1, 2).expand(5)
    assert torch.equal(call(table, torch.tensor([0, 4])), function(table, torch.tensor([0, 4])))
    with pytest.raises(IndexError):
        call(table, torch.tensor([0, wrong]))


def test_a_place_in_an_empty_row_raises_eagers_error() -> None:
    function, inputs = lambda x, i: x[:, :0].scatter_add(1, i, x[:, :1].clone()), (ROWS, torch.zeros(120, 1, dtype=torch.int64))
    with pytest.raises(RuntimeError) as eager:
        function(*inputs)
    with pytest.raises(RuntimeError) as ours:
        magneto.optimize("inductor")(function)(*inputs)
    assert str(ours.value) == str(eager.value)


@pytest.mark.parametrize("seed", range(6))
def test_lookups_by_pairs_of_tensors_side_by_side(seed: int) -> None:
    """Kernels alike but for which of two index tensors comes first by name."""
    names = list("pqrstuvw")
    random.Random(seed).shuffle(names)
    pairs = list(zip(names[::2], names[1::2], strict=True))
    source = (
        f"def f(xs, {', '.join(sorted(names))}):\n    return {', '.join(f'xs[{k}][{a}, {b}].sum()' for k, (a, b) in enumerate(pairs))}\n"
    )
    scope: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {}
    exec(source, scope)
    torch.manual_seed(seed)
    n = 33 + seed
    inputs = [torch.randn(n, n, dtype=torch.float64) for _ in pairs], *(torch.randint(0, n, (5000,)) for _ in names)
    torch.testing.assert_close(magneto.compile(scope["f"])(*inputs), scope["f"](*inputs))
