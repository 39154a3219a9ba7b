"""Many inputs of a graph come to the region as one tuple that the guards have filled: they are the program's objects of this very call."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from magneto import _C
from magneto.dynamo.region.build import MANY


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(MANY)])


def eager(fn: Any) -> Any:
    return magneto.optimize("eager", nopython=True)(fn)


def packed() -> list[int]:
    return sorted(len(region.info["packed"]) for region in _C.regions() if region.info["packed"])


@pytest.fixture(autouse=True)
def fresh():
    _C.clear()
    yield
    _C.clear()


X = torch.ones(2, 3)


def test_a_deep_module():
    model = deep()
    compiled = eager(model)
    assert torch.equal(compiled(X), model(X)) and packed() == [2 * MANY + 1]
    compiled(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_few_inputs_have_names():
    eager(nn.Linear(3, 3))(X)
    assert packed() == []


def test_what_is_replaced_is_used():
    model = deep()
    compiled = eager(model)
    for _ in range(3):
        compiled(X)
    model[3].weight = nn.Parameter(torch.zeros(3, 3))
    assert torch.equal(compiled(X), model(X))
    model[4].bias.data = torch.full((3,), 5.0)
    assert torch.equal(compiled(X), model(X))
    model[5].weight, model[6].weight = model[6].weight, model[5].weight
    assert torch.equal(compiled(X), model(X))
    assert torch.equal(compiled(2 * X), model(2 * X))


def test_nothing_is_kept():
    model = deep()
    compiled = eager(model)
    for _ in range(3):
        compiled(X)
    old, x = weakref.ref(model[3].weight), X.clone()
    argument = weakref.ref(x)
    compiled(x)
    model[3].weight = nn.Parameter(torch.zeros(3, 3))
    del x
    gc.collect()
    assert old() is None and argument() is None


def test_made_inputs_and_classes_of_the_program_between_them():
    class Mine(torch.Tensor):
        pass

    weights = [torch.full((3,), float(i)) for i in range(3 * MANY)]
    weights[MANY] = torch.ones(3).as_subclass(Mine)

    def run(scale, x):
        for weight in weights[: MANY + 2]:
            x = x + weight
        x = x * scale
        for weight in weights[MANY + 2 :]:
            x = x - weight
        return x.as_subclass(torch.Tensor)

    compiled = eager(run)
    for scale in (1.5, 2.5, 3.5):
        assert torch.equal(compiled(scale, X), run(scale, X))
    assert packed() and packed()[-1] >= MANY


def test_written_and_returned_inputs():
    state = [torch.zeros(3) for _ in range(2 * MANY)]

    def run(x):
        for i, tensor in enumerate(state):
            tensor.add_(x, alpha=i)
        return state[1], state[-1] * 2

    compiled = eager(run)
    for _ in range(3):
        first, last = compiled(torch.ones(3))
    assert first is state[1] and torch.equal(last, 2 * state[-1])
    assert [float(tensor[0]) for tensor in state] == [3.0 * i for i in range(2 * MANY)]
    assert packed() == [2 * MANY + 1]


def test_a_missing_one_is_a_miss():
    model = deep()
    compiled = magneto.optimize("eager")(model)
    for _ in range(3):
        compiled(X)
    del model[2]._parameters["bias"]
    with pytest.raises(AttributeError):
        compiled(X)
    model[2]._parameters["bias"] = None
    assert torch.equal(compiled(X), model(X))
