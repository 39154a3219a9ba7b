"""Every public operator of ATen, with arguments made from its schema, decomposed and called in eager: the same values, dtypes, strides, exceptions.

Each operator meets float32 in one layout and one other dtype here; `MAGNETO_WHOLE_PRIMS=1` runs all dtypes and layouts, and all gradients.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from docs.operators import Operator, public_operators
from magneto.backends import pipeline
from tests.prims.exactness import bound_of, check, comparable, describe, kinds, numpy_terms, special_for
from tests.prims.operator_samples import DTYPES, FLOATS, KINDS, Kind, calls_of

OLD = torch.__version__ < "2.13"
OPERATORS = [row for row in public_operators() if comparable(row)]
CHUNKS = 16
OTHER_DTYPES = [dtype for dtype in DTYPES if dtype is not torch.float32]
CALLS = 6


def wrong_of(row: Operator, chosen: list[Kind], limit: int, grad: bool = False, interpreted: bool = False) -> Iterator[str]:
    """What differs in at most `limit` calls of each kind."""
    for kind in chosen:
        one_by_one = (interpreted or OLD) and row.packet in ("std_mean", "var_mean")  # eager's mean of infinite numbers goes by their order
        calls = list(calls_of(row.op, special_for(row, replace(kind, special=False) if one_by_one else kind, grad)))
        step = max(len(calls) // limit, 1)
        for call in calls[::step][:limit]:
            terms = numpy_terms(row) if interpreted else (bound_of(row), pipeline.CALL_HALF_DECOMPOSED)
            outcome = check(row.op, call, *terms, grad=grad)
            if outcome.problem and not (
                OLD and '"nansum_cpu" not implemented' in outcome.problem
            ):  # sums of integers, for which 2.11 has no kernel
                yield f"{row.name} {kind} {describe(call)}: {outcome.problem[:300]}"


def chosen_for(number: int) -> list[Kind]:
    """One layout of float32, one size of another dtype."""
    layout, shape = KINDS[number % len(KINDS)]
    size = KINDS[6 + number % 4][1]
    return [Kind(torch.float32, layout, shape), Kind(OTHER_DTYPES[number % len(OTHER_DTYPES)], shape=size)]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operators_are_exact(chunk: int) -> None:
    wrong = [text for number in range(chunk, len(OPERATORS), CHUNKS) for text in wrong_of(OPERATORS[number], chosen_for(number), CALLS)]
    assert not wrong, "\n".join(wrong)


def test_every_library_call_has_a_reason() -> None:
    without = [row.name for row in public_operators() if row.kind == "library" and not row.why]
    assert not [name for name in without if not (OLD and name.endswith(".names"))]  # made of no other operators in 2.11


def test_what_the_page_calls_decomposed_is() -> None:
    """No operator that the table calls decomposed without exception stays in the graph."""
    stays = []
    for row in OPERATORS:
        if row.kind == "decomposed" and not row.why:
            for dtype in (torch.float32, torch.int64, torch.bfloat16):
                for call in list(calls_of(row.op, Kind(dtype)))[:2]:
                    outcome = check(row.op, call, bound_of(row))
                    stays += [f"{row.name} {describe(call)}"] if outcome.kept and not outcome.refused else []
    assert not stays


@pytest.mark.parametrize("chunk", range(4))
def test_the_interpreter_agrees(chunk: int) -> None:
    """numpy in place of torch's kernels, for all that is decomposed."""
    rows = [row for row in OPERATORS if row.kind == "decomposed"]
    wrong = [text for number in range(chunk, len(rows), 4) for text in wrong_of(rows[number], chosen_for(number), 4, interpreted=True)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("chunk", range(4))
def test_gradients_are_exact(chunk: int) -> None:
    """Forward and backward as one graph, decomposed: float32 in one layout."""
    rows = [row for row in OPERATORS if row.kind in ("decomposed", "view")]
    wrong = [text for number in range(chunk, len(rows), 4) for text in wrong_of(rows[number], chosen_for(number)[:1], 2, grad=True)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.skipif("MAGNETO_WHOLE_PRIMS" not in os.environ, reason="a quarter of an hour; MAGNETO_WHOLE_PRIMS=1 runs it")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_whole_table(dtype: torch.dtype) -> None:
    wrong = [text for row in OPERATORS for text in wrong_of(row, list(kinds((dtype,))), 10_000)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.skipif("MAGNETO_WHOLE_PRIMS" not in os.environ, reason="minutes; MAGNETO_WHOLE_PRIMS=1 runs it")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_gradients(dtype: torch.dtype) -> None:
    wrong = [text for row in OPERATORS for text in wrong_of(row, list(kinds((dtype,), few=True)), 8, grad=True)]
    assert not wrong, "\n".join(wrong)
