"""One small program per graph break: the break is reported under its id, and the result is eager's."""

from __future__ import annotations

import copy
import itertools
import sys
import time
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import magneto
from magneto.base import events
from magneto.base.catalogue import CATALOGUE
from tests.compare import same

X = torch.arange(4.0) + 1


@dataclass(frozen=True)
class Program:
    """A function, its arguments, and the ids it must break under."""

    id: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = (X,)

    @property
    def name(self) -> str:
        return f"{self.id}-{self.fn.__name__}"


PROGRAMS: list[Program] = []


def breaks_with(id: str, *args: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.append(Program(id, fn, args or (X,)))
        return fn

    return register


@magneto.disable
def raise_a_group():
    raise ExceptionGroup("several", [ValueError(1), TypeError(2)])


@breaks_with("B002")
def a_group_raised_outside(x):
    y = x.sin()
    try:
        raise_a_group()
    except* ValueError:
        y = y + 1
    except* TypeError:
        y = y * 2
    return y


@breaks_with("B004")
def an_import_of_what_is_not_loaded(x):
    y = x.sin()
    import colorsys

    return y * colorsys.ONE_THIRD


@breaks_with("B011")
def a_number_that_torch_asks_for(x):
    return torch.full((2,), x.sum()) + 1


@breaks_with("B012")
def a_branch(x):
    y = x.sin()
    if y.sum() > 0:
        y = y + 1
    return y * 2


@breaks_with("B012")
def a_while_loop(x):
    while x.sum() < 100:
        x = x * 2
    return x


@breaks_with("B020")
def deep_recursion(x):
    def go(x, n):
        return go(x + 1, n - 1) if n else x

    return go(x, 150)


@breaks_with("B022")
def a_half_consumed_iterator_of_itertools(x):
    numbers = itertools.accumulate([x, x, x])
    y = next(numbers)
    time.sleep(0)
    return y + next(numbers)


@breaks_with("B101")
def a_call_into_c(x):
    y = x.sin()
    n = zlib.crc32(b"abc") % 5
    return y * n


@breaks_with("B102")
def a_list_out_of_a_tensor(x):
    return sum(x.cos().tolist()) + x


@breaks_with("B103", X, array("i", [1, 2]))
def an_attribute_of_a_c_object(x, numbers):
    return x * numbers.itemsize


@breaks_with("B105")
def a_mask_of_bytes(x):
    return x[(x > 2).to(torch.uint8)] * 2


class Documented:
    pass


@breaks_with("B107")
def documentation_of_a_class(x):
    Documented.__doc__ = "changed"
    return x * 2


@breaks_with("B112")
def a_leaf_made_here(x):
    weight = torch.ones(4).requires_grad_()
    return (weight * x).sum()


@breaks_with("B113")
def a_break_that_the_program_asks_for(x):
    y = x * 2
    magneto.graph_break("here")
    return y + 1


@breaks_with("B114")
def a_size_beside_one_that_depends_on_data(x):
    return x[x > 2] + x[x < 3][:2]


@breaks_with("B109", X, torch.eye(4).to_sparse())
def a_sparse_tensor(x, s):
    return x.sin() + torch.sparse.mm(s, x[:, None])[:, 0]


@breaks_with("B110", X, array("i", [1, 2]))
def iteration_over_a_c_object(x, numbers):
    y = x.sin()
    for n in numbers:
        y = y * n
    return y


@breaks_with("B111")
def a_with_block_that_is_not_modelled(x):
    y = x.sin()
    with torch.autocast("cpu", dtype=torch.float32):
        z = y + 1
    return z.clone() * 2


async def _coroutine(x):
    return x


@breaks_with("B023")
def a_coroutine(x):
    y = x.sin()
    coroutine = _coroutine(y)
    coroutine.close()
    return y + 1


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_break_is_reported_and_the_result_is_eagers(program):
    sys.modules.pop("colorsys", None)
    compiled = magneto.optimize("eager")(program.fn)
    compiled(*copy.deepcopy(program.args))
    seen = [event.fields["id"] for event in events.events("break")]
    assert program.id in seen, seen
    (event, *_) = [event for event in events.events("break") if event.fields["id"] == program.id]
    assert event.fields["stack"][-1][0] == __file__
    assert "<" not in event.fields["reason"].split(" at ")[0] or CATALOGUE[program.id].template.startswith("{"), event.fields["reason"]
    same(program.fn, compiled, *program.args)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_fullgraph_raises_with_the_users_line(program):
    sys.modules.pop("colorsys", None)
    compiled = magneto.compile(program.fn, backend="eager", fullgraph=True)
    with pytest.raises(magneto.Unsupported) as caught:
        compiled(*program.args)
    assert caught.value.id in CATALOGUE
    assert __file__ in str(caught.value)


def test_a_loop_that_never_ends(monkeypatch):
    from magneto.dynamo.machine import machine

    monkeypatch.setattr(machine, "MAX_INSTRUCTIONS", 300)

    def fn(x):
        for _ in range(200):
            x = x + 1
        return x

    same(fn, magneto.optimize("eager")(fn), X)
    assert "B021" in [event.fields["id"] for event in events.events("break")]


def test_an_explicit_break():
    def fn(x):
        y = x.sin()
        magneto.graph_break()
        return y.cos()

    same(fn, magneto.optimize("eager")(fn), X)
    assert magneto.stats()["graphs"] == 2 and magneto.stats()["breaks"] == 1


def test_a_function_that_must_not_be_captured():
    @magneto.disable
    def outside(x):
        return x.sin()

    def fn(x):
        return outside(x.cos()) + 1

    same(fn, magneto.optimize("eager")(fn), X)
    assert magneto.stats()["graphs"] == 2 and magneto.stats()["breaks"] == 1
