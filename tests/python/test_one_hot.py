"""`one_hot` with a number of classes is part of its graph: laid out as in eager, with eager's errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import magneto
from tests.compare import same
from tests.python.programs import Program, Programs, check

programs = Programs()
CLASSES = torch.tensor([[0, 3, 1], [2, 0, 3]])


@programs.add(CLASSES)
def by_number(x: torch.Tensor) -> Any:
    return F.one_hot(x, 4), F.one_hot(x[0], num_classes=5).float() @ torch.ones(5, 2), F.one_hot(x[1, 1], 4)


@programs.add(CLASSES)
def asked(x: torch.Tensor) -> Any:
    try:
        F.one_hot(x, 3)
    except RuntimeError as error:
        return str(error)
    return x


@programs.add(CLASSES)
def asked_and_fitting(x: torch.Tensor) -> Any:
    try:
        F.one_hot(x, 4)
    except RuntimeError as error:
        return str(error)
    return x + 1


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_programs(program: Program) -> None:
    check(program)


LAYOUTS = {
    "rows": CLASSES,
    "columns": CLASSES.t(),
    "stepped": CLASSES[:, ::2],
    "a number": CLASSES[0, 1],
    "alike": CLASSES[:1].expand(5, 3),
    "one": CLASSES[:1].as_strided((1, 3), (1, 1)),
    "empty": CLASSES[:0],
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_in_a_compiled_graph(name: str, backend: str) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        hot = F.one_hot(x, 4)
        return hot, (hot.float() * w).sum(-1)

    with magneto.config.patch(suppress_errors=False):
        compiled = magneto.optimize(backend, nopython=True)(fn)
        hot, _ = same(fn, compiled, LAYOUTS[name], torch.arange(4.0).requires_grad_())
        assert hot.stride() == F.one_hot(LAYOUTS[name], 4).stride() and hot._base is None
        if LAYOUTS[name].numel():
            same(fn, compiled, LAYOUTS[name] + 1, torch.arange(4.0).requires_grad_())
            same(fn, compiled, LAYOUTS[name] - 1, torch.arange(4.0).requires_grad_())


@pytest.mark.parametrize("shape", [(0,), (2, 0), (3, 0, 2)])
@pytest.mark.parametrize("classes", [1, 2])
def test_of_nothing(shape: tuple[int, ...], classes: int) -> None:
    x = torch.empty(shape, dtype=torch.int64)
    assert magneto.compile(lambda x: F.one_hot(x, classes))(x).stride() == F.one_hot(x, classes).stride()


WRONG = {
    "too large": lambda x: F.one_hot(x, 3),
    "negative": lambda x: F.one_hot(x - 1, 4),
    "both": lambda x: F.one_hot(x - 1, 2),
    "no classes": lambda x: F.one_hot(x, 0),
    "fewer": lambda x: F.one_hot(x, num_classes=-3),
    "none of none": lambda x: F.one_hot(x[:0], 0),
    "of none": lambda x: F.one_hot(x[:0]),
    "floats": lambda x: F.one_hot(x.float(), 4),
    "integers": lambda x: F.one_hot(x.int(), 4),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.filterwarnings("ignore:.W104")
def test_eagers_errors(name: str, backend: str, read: bool) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        hot = WRONG[name](x)
        y.mul_(2)
        return hot + 1 if read else y * 3

    same(fn, magneto.optimize(backend)(fn), CLASSES, torch.ones(3))


def test_the_operation_of_gpus_is_eagers_where_it_is_called() -> None:
    for x in (CLASSES, CLASSES.t(), CLASSES + 1, CLASSES[:0]):
        same(lambda x: F.one_hot(x, 4), lambda x: torch.ops.magneto.one_hot(x, 4), x)
    assert torch.ops.magneto.one_hot(CLASSES.to("meta"), 4).shape == (2, 3, 4)
