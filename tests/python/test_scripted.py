"""Functions compiled by TorchScript: captured as the Python that they were compiled from, unless that might mean something else."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import magneto
from tests.compare import assert_equal

with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def gated(x, y, scale: float = 0.5, inner: torch.Tensor | None = None):
        z = x.sigmoid() * y * scale
        if inner is not None:
            z = z + inner
        return z, z.sum(0)

    @torch.jit.script
    def written(x):
        x.add_(1.0)
        return x.chunk(2, 0)

    @torch.jit.script
    def doubled(x, n: int):
        for _ in range(n):
            x = x * 2
        return x

    @torch.jit.script
    def branches(x):
        return x * 2 if torch.jit.is_scripting() else x * 3

    @torch.jit.script
    def draws(x):
        return torch.nn.functional.dropout(x, 0.5, True)

    @torch.jit.script
    def raises(x, n: int):
        if n > 1:
            raise ValueError("too many")
        return x * n

    @torch.jit.script
    def of_list(xs: list[torch.Tensor]):
        xs.append(xs[0])
        return xs[0] * len(xs)

    traced = torch.jit.trace(lambda x: x.sin() * 2, torch.ones(4, 3))  # type: ignore[no-untyped-call]


def several(x):
    a, b = gated(x, x.cos(), inner=x)
    c, d = written(x * 2)
    return a * 2 + b, c - d, doubled(x, 3), gated(x, 2 * x, 0.25)[1]


CASES: dict[str, tuple[Any, bool]] = {
    "several": (several, True),
    "a number for a float": (lambda x: gated(x.int(), x.int(), 2)[0], False),  # 2.0: the result is one of floats
    "is_scripting": (lambda x: branches(x) + 1, False),
    "random": (lambda x: draws(x) + 1, False),
    "list": (lambda x: (lambda xs: (of_list(xs) * 1, len(xs)))([x]), False),
    "traced": (lambda x: traced(x) + 1, False),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", list(CASES))
def test_scripted(name: str, backend: str) -> None:
    fn, whole = CASES[name]

    def run(f: Any) -> Any:
        torch.manual_seed(3)
        x = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_()
        found = f(x)
        tensors = [one for one in (found if isinstance(found, tuple) else (found,)) if isinstance(one, torch.Tensor)]
        sum(one.sum() for one in tensors).backward() if tensors[0].requires_grad else None
        return found, x.grad

    compiled = magneto.optimize(backend)(fn)
    for _ in range(2):
        assert_equal(run(compiled), run(fn), 1e-6)
    assert (magneto.stats()["breaks"] == 0) == whole, magneto.stats()["break_reasons"]


def test_errors_are_those_of_torchscript() -> None:
    compiled = magneto.optimize("eager")(lambda x, n: raises(x, n) + 1)
    assert_equal(compiled(torch.ones(2), 1), torch.full((2,), 2.0))
    for f in (compiled, lambda x, n: raises(x, n) + 1):
        with pytest.raises(torch.jit.Error, match="too many"):  # type: ignore[attr-defined]
            f(torch.ones(2), 2)
    for f in (lambda x: gated(x, x[:1, :1].expand(5, 5)), magneto.optimize("eager")(lambda x: gated(x, x[:1, :1].expand(5, 5)))):
        with pytest.raises(RuntimeError, match="TorchScript interpreter"):
            f(torch.ones(3, 2))


def helper(x):
    return x * 2


with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def helped(x):
        return helper(x) + 1


def test_names_mean_what_they_meant_when_it_was_compiled(monkeypatch):
    monkeypatch.setitem(globals(), "helper", lambda x: x * 5)
    x = torch.ones(3)
    assert_equal(magneto.optimize("eager")(lambda x: helped(x))(x), helped(x))
