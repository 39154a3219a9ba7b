"""torch.inference_mode: entered, nested, left with tensors of its own kind, and wrong uses of these. Programs run plain and traced (see programs.py)."""

# ruff: noqa

from __future__ import annotations

from typing import Any

import pytest
import torch

import magneto
from tests.compare import assert_equal, same
from tests.python.programs import X, Y, Programs, check

programs = Programs()


@torch.inference_mode()
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@programs.add()
def block(x):
    with torch.inference_mode():
        y = x * 2
        inside = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    return y, y + 1, inside, torch.is_inference_mode_enabled(), torch.is_grad_enabled()


@programs.add()
def whole_body(x):
    with torch.inference_mode():
        return torch.relu(x) + 1


@programs.add()
def decorated(x):
    return doubled(x) + 1


@programs.add()
def nested_in_other_modes(x):
    with torch.no_grad():
        with torch.inference_mode():
            with torch.enable_grad():
                a = torch.is_grad_enabled()
                y = x * 2
            with torch.inference_mode(False):
                b = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
                z = x * 3
        c = torch.is_grad_enabled()
    return y, z, a, b, c, torch.is_grad_enabled()


@programs.add()
def an_error_inside(x):
    with torch.inference_mode():
        y = x * 2
        try:
            y @ torch.ones(7, 7)
        except RuntimeError:
            return y, torch.is_inference_mode_enabled()


@programs.add(X, Y)
def writes_to_outside(x, y):
    with torch.inference_mode():
        y.add_(x.sum(0))
        return x * y, x[0], y[1:]


@programs.add(X.clone().requires_grad_())
def parameters_inside(x):
    with torch.inference_mode():
        y = x @ x.t()
    return y.sum(), y.requires_grad


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Any) -> None:
    check(program)


def kinds(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        y, view = x * 2, x[0]
        z = y.view(-1)
    return y, z, view, x + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_kind_of_the_results_is_eagers(backend: str) -> None:
    compiled = magneto.optimize(backend, nopython=True)(kinds)
    with pytest.warns(magneto.base.errors.MagnetoWarning) if backend != "eager" else magneto.config.patch():
        ours = compiled(X)
    assert [t.is_inference() for t in ours] == [t.is_inference() for t in kinds(X)] == [True, True, False, False]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_whole_block_is_compiled(backend: str) -> None:
    compiled = magneto.optimize(backend, nopython=True)(whole_body)
    assert compiled(X).is_inference()
    same(whole_body, compiled, X, tolerance=1e-6)
    assert magneto.stats()["graphs"] == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_tensors_of_the_mode_go_through_a_break(backend: str) -> None:
    """What a break leaves in a block of inference mode are ordinary inputs of the next graph."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            hidden = model[0](x)
            magneto.graph_break()
            hidden = model[1](hidden).add_(1)
            return model[2](hidden)

    compiled = magneto.optimize(backend)(forward)
    same(forward, compiled, X, tolerance=1e-6)
    assert compiled(X).is_inference()
    assert magneto.stats()["graphs"] == 2


def saved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = x * 2
    return y * w


def written(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = x * 2
    return y.add_(1)


def test_wrong_uses_raise_as_in_eager() -> None:
    for fn, args in ((saved, (X, Y.clone().requires_grad_())), (written, (X,))):
        same(fn, magneto.optimize("eager")(fn), *args)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_tensor_of_the_mode_is_written_once_outside(backend: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        x[1:].add_(1)
        x.mul_(2)
        return y

    compiled = magneto.optimize(backend)(fn)
    with torch.inference_mode():
        made = [torch.ones(3) for _ in range(6)]
        assert_equal(compiled(made[4]), fn(made[5]))
        assert_equal(made[4], made[5])
    for _ in range(2):
        for x, f in zip(made, (fn, compiled), strict=False):
            with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                f(x)
        assert made[0].tolist() == made[1].tolist() == [1, 2, 2]
        made = made[2:]


def test_asking_for_the_kind_breaks_where_views_decide() -> None:
    def asks(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        with torch.inference_mode():
            y = x * 2
            return y, y.is_inference()

    same(asks, magneto.optimize("eager")(asks), X)
    assert magneto.stats()["breaks"] >= 1
    same(lambda x: (x, x.is_inference()), magneto.optimize("eager", nopython=True)(lambda x: (x, x.is_inference())), X)
