"""Results behind everything else: which steps are moved, and that their memory is their own."""

from __future__ import annotations

import torch

from magneto.inductor import cuda
from magneto.inductor.made import DevicePlan
from magneto.inductor.runtime.parted import parted
from magneto.inductor.runtime.plan_code import PlanCode
from magneto.inductor.schedule.results import COPIED
from tests.inductor.lower.prim_graphs import Graph

aten = torch.ops.aten


def chain(g: Graph, n: int) -> tuple[object, object]:
    """A product of a chain of products, and one that many of them read."""
    x = g.input(torch.randn(8, 8))
    first = h = g.call(aten.mm.default, x, x)
    for _ in range(n):
        h = g.call(aten.mm.default, h, first)
    return h, first


def planned(g: Graph, results: int) -> DevicePlan:
    return cuda._planned(g.fx, "case", {}, torch.device("cpu"), results)


def launches(instructions: tuple[tuple[object, ...], ...]) -> list[str]:
    return [getattr(i[2], "__name__", "kernel") for i in instructions if i[0] in ("LAUNCH", "CALL")]


WIDE = COPIED // (4 * 8)  # columns of float32


def with_logits(columns: int) -> DevicePlan:
    g = Graph()
    h, _ = chain(g, 5)
    g.output(g.call(aten.mm.default, h, g.input(torch.randn(8, columns))), h)
    return planned(g, 1)


def test_a_large_product_is_made_behind_the_replay() -> None:
    code = with_logits(WIDE).code
    two = parted(code)
    assert two.places == (0, -1)
    assert launches(two.tail.instructions) == ["mm"]
    assert len(launches(two.head.instructions)) == 6
    assert two.head.outputs == (code.outputs[1], code.outputs[1])  # what is kept, and what the tail reads


def test_a_small_product_is_copied_out() -> None:
    """Behind the replay it would need a workspace of its own, which takes more memory than the result."""
    assert not with_logits(WIDE - 1).code.tail


def test_a_result_takes_over_no_memory_of_the_recording() -> None:
    """In one plan the kernel writes over what the product has made."""
    g = Graph()
    h, _ = chain(g, 5)
    g.output(g.tanh(h))
    assert [i[0] for i in planned(g, 0).code.instructions].count("ALLOC") == 6
    code = planned(g, 1).code
    assert [i[0] for i in code.instructions[code.tail :]] == ["ALLOC", "LAUNCH", "FREE"]


def test_what_is_kept_too_or_read_again_stays() -> None:
    g = Graph()
    h, first = chain(g, 5)
    h, first = g.tanh(h), g.tanh(first)
    h = g.call(aten.mm.default, h, first)
    h = g.tanh(h)
    g.output(h, first, h)
    assert not planned(g, 1).code.tail  # backward reads it
    assert not planned(g, 2).code.tail  # `first` is read by others, `h` is kept
    assert planned(g, 3).code.tail


def test_more_launches_than_copies_stay_unless_they_spare_much() -> None:
    for rows in (8, 1 << 21):
        g = Graph()
        h, _ = chain(g, 5)
        wide = g.call(aten.mm.default, g.input(torch.randn(rows, 8)), h)
        g.output(g.tanh(wide))
        two = parted(planned(g, 1).code)
        assert launches(two.tail.instructions) == (["mm", "kernel"] if rows > 8 else ["kernel"])


def test_few_launches_before_it_are_no_recording() -> None:
    g = Graph()
    h, _ = chain(g, 2)
    g.output(g.tanh(h))
    assert not planned(g, 1).code.tail


def test_memory_of_views_that_are_made_again_lives_to_the_end() -> None:
    """The whole plan frees a buffer as soon as only its view is read."""
    shape = torch.empty_strided, ((4,), (1,)), {}, False
    code = PlanCode((("ALLOC", 1, *shape), ("LAUNCH", 0, (0, 1)), ("VIEW", 2, 1, (2,), (1,), 0), ("FREE", (1,)), ("LAUNCH", 0, (0, 0)),
                     ("ALLOC", 3, *shape), ("LAUNCH", 1, (2, 3)), ("FREE", (2,))), 4, 1, (3,), 0, tail=5)  # fmt: skip
    two = parted(code)
    assert two.head.outputs == (1,)
    assert ("FREE", (1,)) not in two.head.instructions
    assert two.tail.instructions[0][:3] == ("VIEW", 2, 1)
