"""Equal kernels of different tensors become one kernel over a table, where none waits for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import magneto
from magneto.base import events
from magneto.inductor.codegen.cpp_table import PORTION, work_of


def kernels_of(fn: Any, *inputs: Any) -> int:
    """Kernels of the optimised `fn`, whose results are eager's."""
    plain = [list(x) if isinstance(x, list) else x.clone() for x in inputs]
    plain = [[t.clone() for t in x] if isinstance(x, list) else x for x in plain]
    before = len(events.events("artifact"))
    found, expected = magneto.optimize("inductor", nopython=True)(fn)(*inputs), fn(*plain)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(list(inputs), plain)
    return sum(event.kernels for event in events.events("artifact")[before:] if event.artifact == "plan")


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes]


SHAPES = ((3, 4), (5,), (2, 3, 4), (100, 300), (7,), (1,))


def test_one_kernel_for_all() -> None:
    def fn(ps: list[torch.Tensor], gs: list[torch.Tensor]) -> None:
        for p, g in zip(ps, gs, strict=True):
            p.add_(g * g, alpha=-0.5)

    assert kernels_of(fn, tensors(*SHAPES), tensors(*SHAPES)) == 2  # one element is no loop


def test_a_number_for_each() -> None:
    def fn(ps: list[torch.Tensor], steps: list[torch.Tensor]) -> None:
        for p, step in zip(ps, steps, strict=True):
            step.add_(1)
            p.mul_(step.sqrt())

    assert kernels_of(fn, tensors(*SHAPES[:5]), [torch.tensor(float(k)) for k in range(5)]) == 2


def test_those_that_wait_for_each_other_are_apart() -> None:
    def fn(ps: list[torch.Tensor], x: torch.Tensor) -> None:
        for p in ps:
            x = (x @ p).relu()
            p.add_(1)
            p.mul_(x)

    assert kernels_of(fn, [torch.randn(4, 4) for _ in range(4)], torch.randn(4, 4)) >= 2


def test_chain_of_updates() -> None:
    """Each reads what the one before it writes: in place, in this order."""

    def fn(ps: list[torch.Tensor]) -> None:
        for p, q in zip(ps, ps[1:], strict=False):
            q.copy_(p.cumsum(0) * 2)
            p.add_(1)

    kernels_of(fn, [torch.randn(4) for _ in range(4)])


def test_averages_of_updated_parameters() -> None:
    def fn(ps: list[torch.Tensor], averages: list[torch.Tensor], gs: list[torch.Tensor]) -> None:
        torch._foreach_sub_(ps, gs)
        torch._foreach_lerp_(averages, ps, 0.1)

    assert kernels_of(fn, *(tensors(*SHAPES[:5]) for _ in range(3))) == 1


def test_layouts_of_their_own() -> None:
    def fn(ps: list[torch.Tensor], gs: list[torch.Tensor]) -> None:
        torch._foreach_sub_(ps, gs)

    last = [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last) for _ in range(2)]
    rows = [*tensors((3, 4), (5,)), last[0], torch.randn(4, 3).t(), torch.randn(4, 3).t()]
    gs = [*tensors((3, 4), (5,)), last[1], torch.randn(4, 3).t(), torch.randn(3, 4)]
    assert kernels_of(fn, rows, gs) == 2  # the last gradient is laid out otherwise


def test_work() -> None:
    assert work_of((3, 0, 4)) == (1, 0, 2, 0, 0, 3, 2, 0, 4)
    work = work_of((2 * PORTION + 10, PORTION - 10, 5))
    portions, bounds = work[0], work[1 : work[0] + 2]
    items = [work[i : i + 3] for i in range(portions + 2, len(work), 3)]
    assert portions == 4 and bounds[-1] == len(items)
    assert sum(stop - start for _, start, stop in items) == 3 * PORTION + 5
    for low, high in zip(bounds, bounds[1:], strict=False):
        assert sum(stop - start for _, start, stop in items[low:high]) <= PORTION


def test_threads() -> None:
    def fn(ps: list[torch.Tensor], gs: list[torch.Tensor]) -> None:
        torch._foreach_addcmul_(ps, gs, gs, 0.5)

    shapes = ((300, 200), (7,), (100, 50), (4, 3), (1000,))
    assert kernels_of(fn, tensors(*shapes), tensors(*shapes)) == 1


def test_norms() -> None:
    """Reductions of whole tensors are rows of one table, too."""

    def fn(ps: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        norms = torch._foreach_norm(ps)
        total = torch.linalg.vector_norm(torch.stack(norms))
        torch._foreach_mul_(ps, (1.0 / (total + 1e-6)).clamp(max=1.0))
        return (total, *norms)

    assert kernels_of(fn, tensors(*SHAPES[:5])) <= 4
    magneto.reset()
    assert kernels_of(fn, [t.t() if t.ndim == 2 else t for t in tensors(*SHAPES[:5])]) <= 4


def test_reductions_of_other_kinds() -> None:
    def fn(ps: list[torch.Tensor]) -> list[torch.Tensor]:
        found = []
        for p in ps:
            found += [p.abs().max(), p.isnan().any(), p.sum() / 2]
        return found

    shapes = (*SHAPES[:5], (200, 300), (9,))
    assert kernels_of(fn, tensors(*shapes)) <= 3
    bad = tensors(*shapes)
    bad[3][0, 0] = float("nan")
    torch.testing.assert_close(magneto.optimize("inductor")(fn)(bad), fn(bad), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_rows_of_any_length_are_walked_to_their_end(dtype: torch.dtype) -> None:
    """Elements behind the last whole vector, in types that are converted in vectors too."""

    def step(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(torch._foreach_add(torch._foreach_mul(tensors, 3), 1))

    given = [(torch.randn(n, generator=torch.Generator().manual_seed(n)) * 9).to(dtype) for n in (1, 7, 15, 16, 17, 33, 100, 1023, 9000)]
    joined = [t.view(-1, 1)[: len(t)] for t in given[:6]]
    for found, wanted in zip(magneto.optimize("inductor", nopython=True)(step)(given), step(given), strict=True):
        assert torch.equal(found, wanted)

    def pieces(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat([t * 2 if k else t for k, t in enumerate(tensors * 2)])

    assert torch.equal(magneto.optimize("inductor", nopython=True)(pieces)(*joined), pieces(*joined))
