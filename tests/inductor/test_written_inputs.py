"""Kernels write inputs themselves where that cannot be told from eager: values, versions, aliases, errors, order of reads and writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch

import magneto
import magneto.inductor.compile as compiling
from magneto.base import events
from magneto.inductor.schedule import inplace
from magneto.inductor.schedule.kernel import FusedKernel


def run(fn: Callable[..., Any], *inputs: Any, written: int | None, calls: int = 2, backend: str = "inductor") -> None:
    """`fn` optimised behaves as in eager, `written` of its inputs (in all graphs) being written by kernels."""
    plain, ours = copy.deepcopy(list(inputs)), copy.deepcopy(list(inputs))
    optimised = magneto.optimize(backend)(fn)
    before = len(events.events("artifact"))
    for _ in range(calls):
        results = []
        for call, args in ((fn, plain), (optimised, ours)):
            try:
                results.append(call(*args))
            except Exception as error:  # noqa: BLE001  (compared)
                results.append((type(error), str(error)))
        same(*results)
        for a, b in zip(plain, ours, strict=True):
            same(a, b)
            if isinstance(a, torch.Tensor):
                assert bool(a._version) == bool(b._version) and a.requires_grad == b.requires_grad
    if written is not None:
        assert sum(event.inputs_written for event in events.events("artifact")[before:] if event.artifact == "plan") == written


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.stride() == b.stride() and a.dtype is b.dtype
        torch.testing.assert_close(a, b)
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


def test_update() -> None:
    def fn(p: torch.Tensor, g: torch.Tensor) -> None:
        p.add_(g, alpha=-0.1)

    run(fn, torch.randn(3, 4), torch.randn(3, 4), written=1)


def test_address_stays() -> None:
    def fn(p: torch.Tensor) -> torch.Tensor:
        return p.mul_(2)

    p = torch.ones(3)
    address = p.data_ptr()
    assert magneto.optimize("inductor")(fn)(p) is p
    assert p.data_ptr() == address and p.tolist() == [2.0, 2.0, 2.0] and p._version == 1


def test_result_that_is_also_returned_is_copied() -> None:
    """A caller gets memory of its own where eager gives it that."""

    def fn(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        new = p + g
        p.copy_(new)
        return new

    run(fn, torch.randn(3), torch.randn(3), written=1)


def test_old_numbers_are_read_first() -> None:
    def fn(p: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = p @ w
        before = p.sum()
        p.add_(1)
        return product, before

    run(fn, torch.randn(4, 4), torch.randn(4, 4), written=1)


def test_read_at_other_places_is_copied() -> None:
    def fn(p: torch.Tensor) -> None:
        p.add_(p.t().clone())

    run(fn, torch.randn(4, 4), written=0)


def test_swap() -> None:
    """Each is read after the other is written: at most one of them may be written in place."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> None:
        old = a * 1.0
        a.copy_(b.sin())
        b.copy_(old.exp())

    run(fn, torch.randn(5), torch.randn(5), written=None, calls=4)


def test_rotation_with_reductions() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        total = a.sum()
        a.copy_(b + total)
        b.copy_(c + a.mean())
        c.copy_(c * total - b.max())

    run(fn, torch.randn(5), torch.randn(5), torch.randn(5), written=None, calls=4)


@pytest.mark.parametrize("late", [True, False])
def test_error_leaves_inputs_alone(late: bool) -> None:
    """The region runs again in eager from its start: what it wrote must not be written twice."""

    def fn(p: torch.Tensor, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if late:
            p.add_(1)
        rows = torch.nn.functional.embedding(index, table)
        if not late:
            p.add_(1)
        return rows * 2

    run(fn, torch.zeros(3), torch.randn(4, 2), torch.tensor([1, 9]), written=1)
    run(fn, torch.zeros(3), torch.randn(4, 2), torch.tensor([1, 2]), written=1)


def test_integer_division_that_fails() -> None:
    def fn(p: torch.Tensor, q: torch.Tensor, n: torch.Tensor) -> None:
        p.add_(1)
        q.floor_divide_(n)

    run(fn, torch.zeros(3), torch.arange(3), torch.tensor([1, 0, 2]), written=1)


def test_error_that_depends_on_what_was_written() -> None:
    def fn(p: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        p.add_(1)
        return torch.nn.functional.embedding(p, table)

    run(fn, torch.tensor([0, 1]), torch.randn(4, 2), written=0, calls=4)


def test_layouts() -> None:
    def fn(p: torch.Tensor, g: torch.Tensor) -> None:
        p.sub_(g * 0.5)

    channels = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    run(fn, channels, torch.randn(2, 3, 4, 4), written=1)
    run(fn, torch.randn(3, 4).t(), torch.randn(4, 3), written=1)
    run(fn, torch.randn(3, 8)[:, ::2], torch.randn(3, 4), written=0)  # gaps
    run(fn, torch.tensor(1.5), torch.tensor(0.5), written=1)
    run(fn, torch.randn(0, 3), torch.randn(0, 3), written=0)


def test_dtypes() -> None:
    def fn(p: torch.Tensor, g: torch.Tensor) -> None:
        p.add_(g)

    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        run(fn, torch.ones(5).to(dtype), torch.ones(5).to(dtype) * 2, written=1)
    run(fn, torch.ones(5), torch.arange(5), written=1)


@pytest.mark.filterwarnings("ignore:.*overlaps itself")
def test_expanded_input_raises_as_in_eager() -> None:
    def fn(p: torch.Tensor) -> None:
        p.add_(1)

    run(fn, torch.zeros(1).expand(4), written=None)


@pytest.mark.filterwarnings("ignore:.*share memory")
def test_inputs_that_come_to_share_memory() -> None:
    def fn(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        p.add_(1)
        q.mul_(p)
        return p + q

    optimised = magneto.optimize("inductor")(fn)
    for plain, ours in ((torch.arange(8.0), torch.arange(8.0)) for _ in range(2)):
        for start in (4, 4, 0, 4):
            expected = fn(plain[:4], plain[start : start + 4])
            torch.testing.assert_close(optimised(ours[:4], ours[start : start + 4]), expected)
            torch.testing.assert_close(plain, ours)


@pytest.mark.filterwarnings("ignore:.*share memory")
def test_parameter_that_comes_to_share_memory() -> None:
    def fn(p: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        y = x.cumsum(0) * 2
        with torch.no_grad():
            p.add_(1)
        return y

    optimised = magneto.optimize("inductor")(fn)
    p, q = torch.nn.Parameter(torch.arange(4.0)), torch.nn.Parameter(torch.arange(4.0))
    for x, y in ((torch.ones(4), torch.ones(4)), (p.detach(), q.detach())):
        for _ in range(2):
            torch.testing.assert_close(optimised(p, x), fn(q, y))
            torch.testing.assert_close(p, q)


def test_saved_tensor_changed_in_place_is_noticed() -> None:
    def update(p: torch.Tensor) -> None:
        with torch.no_grad():
            p.mul_(2)

    p = torch.ones(3, requires_grad=True)
    y = (p * p).sum()
    magneto.optimize("inductor")(update)(p)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_views_of_a_written_input() -> None:
    def fn(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = p[0]
        p.add_(1)
        return first, p.view(-1)

    run(fn, torch.randn(3, 4), written=1)


def test_writes_through_views() -> None:
    def fn(p: torch.Tensor) -> None:
        p[0].add_(1)
        p[:, 1].mul_(p[:, 0])

    run(fn, torch.randn(3, 4), written=None)


def test_history_is_kept() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.mul_(w)
        return x.sum()

    def program(w: torch.Tensor) -> torch.Tensor:
        x = w * 1.0
        optimised(x, w)
        x.sum().backward()
        return w.grad  # type: ignore[return-value]

    optimised: Callable[..., Any] = fn
    expected = program(torch.tensor([1.0, 2.0], requires_grad=True))
    optimised = magneto.optimize("inductor")(fn)
    same(expected, program(torch.tensor([1.0, 2.0], requires_grad=True)))


def test_inference_tensor() -> None:
    def fn(p: torch.Tensor) -> None:
        p.add_(1)

    with torch.inference_mode():
        p = torch.zeros(2)
    errors = []
    for call in (fn, magneto.optimize("inductor")(fn)):
        try:
            call(p)
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    assert errors[0] == errors[1]


CACHE = (4, 6, 5)
UPDATES: dict[str, tuple[Callable[..., Any], int | None]] = {
    # what is done with a cache c, new elements k (4, 1, 5) and a place n; how many elements kernels walk for it (None: a library call writes them)
    "a place": (lambda c, k, n: c.__setitem__((slice(None), n), k[:, 0]), 20),
    "a slice": (lambda c, k, n: c.__setitem__((slice(0, 2), slice(n, n + 1)), k[:2]), 30),
    "two slices": (lambda c, k, n: (c[:, 1:2].copy_(k), c[:, 3].copy_(k[:, 0] * 2))[0].sum(), 60),
    "every other one": (lambda c, k, n: c[1, 2:5:2].zero_(), 15),
    "added to": (lambda c, k, n: (c.select(1, n).add_(k[:, 0]), c[:, :2] * 2)[1], 20),
    "one element": (lambda c, k, n: c[0, -1, 2].add_(1), 1),
    "index_copy_": (lambda c, k, n: (c.index_copy_(1, torch.tensor([n]), k), c[:, 1:3])[1], None),
    "index_put_": (lambda c, k, n: c.__setitem__((slice(None), torch.tensor([n])), k * 2), None),
    "scatter_": (lambda c, k, n: c.scatter_(1, torch.full((4, 1, 5), n), k), None),
}


@pytest.mark.parametrize("name", UPDATES)
def test_few_elements_of_an_input(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cache takes is written alone, wherever it is; places that are not there raise as in eager and change nothing."""
    fn, walked = UPDATES[name]
    plans: list[Any] = []
    write = inplace.write_inputs
    monkeypatch.setattr(compiling, "write_inputs", lambda plan, wanted: plans.append(write(plan, wanted)) or plans[-1])
    for make in (lambda: torch.randn(CACHE), lambda: torch.randn(6, 4, 5).transpose(0, 1), lambda: torch.randint(-9, 9, CACHE)):
        magneto.reset()
        base = make()
        caches, optimised = [base.clone(), base.clone()], magneto.optimize("inductor")(fn)
        for n in (0, 2, 3, 5, -1, -6, 6, 9, -7, 1):
            k = torch.randint(-9, 9, (4, 1, 5)).to(base.dtype)
            found: list[Any] = []
            for call, cache in zip((fn, optimised), caches, strict=True):
                try:
                    found.append(call(cache, k.clone(), n))
                except (IndexError, RuntimeError) as error:
                    found.append((type(error), str(error)))
            same(*found)
            same(*caches)
    written = [m for plan in plans for step in plan.steps if isinstance(step, FusedKernel) for m in step.members if m.name in plan.into]
    assert magneto.stats()["fallbacks"] == 0 and (walked is None or any(plan.into for plan in plans))
    sizes = [
        prod(d.size for d in (*step.rows, *step.cols))
        for plan in plans
        for step in plan.steps
        if isinstance(step, FusedKernel)
        for m in step.members
        if m in written
    ]
    assert max(sizes, default=0) <= (walked or 120)


def test_old_numbers_that_are_read_elsewhere_are_kept() -> None:
    def fn(c: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        total = c.sum()
        c.index_copy_(1, torch.tensor([2]), k)
        c[:, 3] = c[:, 4] + c[:, 2]
        return total

    run(fn, torch.randint(-9, 9, CACHE), torch.randint(-9, 9, (4, 1, 5)), written=None, calls=4)


def test_a_region_that_fails_behind_a_written_cache() -> None:
    """It runs again: the same elements are written again."""

    def fn(c: torch.Tensor, k: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        c.index_copy_(1, torch.tensor([2]), k)
        return torch.nn.functional.embedding(n, c[0])

    run(fn, torch.randn(CACHE), torch.randn(4, 1, 5), torch.tensor([1, 9]), written=1)
    run(fn, torch.randn(CACHE), torch.randn(4, 1, 5), torch.tensor([1, 2]), written=1)


def test_weights_stay_packed_beside_written_inputs() -> None:
    """A decoder's step writes its cache: what is made of its weights is made once."""
    layer = torch.nn.Linear(512, 512)

    def fn(x: torch.Tensor, c: torch.Tensor, n: int) -> torch.Tensor:
        c[:, n] = 1.0
        return layer(x)

    optimised = magneto.optimize("inductor")(fn)
    x, caches = torch.randn(4, 512), [torch.zeros(4, 8, 3) for _ in range(2)]
    with torch.no_grad():
        for n in range(6):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                found = optimised(x, caches[0], n)
            torch.testing.assert_close(found, fn(x, caches[1], n))
            same(*caches)
        assert not any("reorder" in event.key for event in seen.key_averages())
        layer.weight.data.mul_(2)
        torch.testing.assert_close(optimised(x, caches[0], 7), fn(x, caches[1], 7))
