"""What a boolean mask selects, computed with and written back: no break, and eager's numbers, gradients and errors. Other uses of it break where the mask is the index."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import magneto
from tests.compare import same

BACKENDS = ("aot_eager", "inductor")
CAPTURED: list[Any] = []
BREAKING: list[Any] = []


def _x(seed: int = 0, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))


@CAPTURED.append
def augmented(x, s):
    y = x * 1
    m = y > 0
    y[m] *= s
    y[~m] /= -3
    y[m] **= 2
    y[m & (y > 1)] -= 0.5
    return y


@CAPTURED.append
def gradients_that_are_infinite_elsewhere(x, s):
    y = x * 1
    m = y > 0
    y[m] = y[m].log() * s
    y[m].mul_(2)  # of a copy
    z = torch.zeros_like(y)
    z[m] = x[m].sqrt().clamp(max=s).neg_()
    return y, z


@CAPTURED.append
def masks_made_twice(x, s):
    y = x * 1
    y[y > 0] = y[y > 0] * s
    y[(x > 0) & (x < 1)] = x[(x > 0) & (x < 1)] ** 2
    y[y < 0] += 3 * x[y < 0] / 0.0
    return y


@CAPTURED.append
def rows_and_views(x, s):
    y = x * 1
    y[y[:, 0] > 0] *= s
    y.t()[y.t() > 1] = 1
    y[:, 1][y[:, 2] < 0] -= torch.tensor(2.0)
    chosen = y[y > 0]
    chosen *= 2
    y[y > 0] = chosen
    return y


@CAPTURED.append
def what_learns(x, s):
    y = x * 1
    w, v = x[0, 0] * 2, x[1] + 1
    m, r = y > 0, y[:, 1] > 0
    y[m] *= w
    y[y < -1] = w
    y[r] *= v
    y[~r] = v * s
    y[r, 0] = w
    y[r, 1:] = y[r, 1:].exp() * s - v[1:]
    y[m.t().t(),] += 1 - w
    y[m] *= x[1, :1]
    y[r] += x[:1] * y[r]
    return y, y[r, 2].sum()


@CAPTURED.append
def whole_numbers(x, s):
    i = (x * 9).long()
    i[i > 3] %= 4
    i[i < 0] = i[i < 0] // 2 + i[i < 0] ** 2
    return i, x[i > 0].sum()


@BREAKING.append
def used_otherwise(x, k):
    m = x > 0
    t = x[m]
    t *= 2
    x[m] = t
    if k == 0:
        return t
    if k == 1:
        return len(t), t.sum(), t.dtype, t.dim()
    if k == 2:
        return t[0] > 0, (t == 5).any(), t is None, isinstance(t, torch.Tensor)
    if k == 3:
        m.logical_not_()
        x[m] = t[: int(m.sum())]
    if k == 4:
        a = x[x > 0]
        x[0] = 5
        x[x > 0] = a  # another number of elements
    if k == 5:
        x[x > 0] *= torch.ones(int((x > 0).sum()))
    return {"t": [t]}, x


@BREAKING.append
def errors_of_eager(x, k):
    i = x.mul(3).int()
    if k == 0:
        i[i > 0] *= 1.5
    if k == 1:
        i[i > 0] //= 0
    if k == 2:
        i[i > 1000] //= 0  # there are none
    if k == 3:
        x[x > 0] = x[x > 0].double()
    if k == 4:
        x[x[:, :2] > 0] *= 2
    if k == 5:
        rows = x[:1].expand(4, 3)
        rows[rows > 0] *= 2
    return i, x


@BREAKING.append
def places_that_are_written(x, k):
    m, i = x > 0, torch.tensor([0, 2, 1])
    if k == 0:
        m[m] = ~m[m]
    if k == 1:
        m[m[0].repeat(2)[:4]] = True  # another memory
    if k == 2:
        m[m[:, 0]] = True
    if k == 3:
        i[i] = i * 2
    if k == 4:
        i[i[:2]] = 5
    if k == 5:
        m[m] = False
    return m, i


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fn", [*CAPTURED, *BREAKING], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_same(fn: Any, backend: str) -> None:
    compiled = magneto.optimize(backend, nopython=fn in CAPTURED)(fn)
    for number in range(6):
        x = _x(number, 4 + number % 2 * (fn in CAPTURED))
        same(fn, compiled, x, number * 0.5 + 1 if fn in CAPTURED else number, tolerance=1e-6)
    if fn in CAPTURED:
        assert magneto.stats()["breaks"] == 0


@pytest.mark.parametrize("fn", CAPTURED, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(fn: Any, backend: str) -> None:
    found = []
    for form in (fn, magneto.optimize(backend, nopython=True)(fn)):
        x = _x().requires_grad_()
        result = form(x.clamp(min=-0.5), 1.5)
        sum(part.nan_to_num(0, 0, 0).sum() for part in (result if isinstance(result, tuple) else (result,))).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], equal_nan=True)
    assert magneto.stats()["fallbacks"] == 0


WRITTEN: dict[str, Any] = {
    "read": lambda a: (a.sin(), a.mul_(2)),
    "result": lambda a: (b := a.exp(), b.mul_(2)),
    "itself": lambda a: (a.mul_(a), a),
    "in place": lambda a: (a.sigmoid_(), a.mul_(2)),
    "in place, not read": lambda a: (a.mul_(3).add_(1), a.sub_(2)),
    "softmax": lambda a: (b := a.unsqueeze(1).softmax(1), b.mul_(2)),
    "sum": lambda a: (s := a.sum(), a.div_(s)),
    "sums are not kept": lambda a: (a + 1, a.mul_(2)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", WRITTEN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_formula_keeps_is_not_written(use: str, backend: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return sum(one.sum() for one in WRITTEN[use]((x * 1)[x > 0]))

    found = []
    for call in (fn, magneto.optimize(backend)(fn)):
        x = _x().requires_grad_()
        try:
            call(x).backward()
            found.append(x.grad)
        except RuntimeError as error:
            found.append(str(error).split(":")[0])
    assert type(found[0]) is type(found[1])
    torch.testing.assert_close(found[1], found[0]) if isinstance(found[0], torch.Tensor) else None
    assert isinstance(found[0], torch.Tensor) or found[0] == found[1]
