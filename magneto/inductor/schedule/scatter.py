"""On a GPU: additions and stores at computed places, in any order. `with_scatters(schedule)`.

What the CPU does one after the other (`Ordered`) becomes two kernels: one that writes what the memory begins as, and one that adds to it (atomic additions) or writes some of it, each thread by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from magneto.inductor.loops.ir import Const, Op, Ordered, Pointwise, Value, index_symbols
from magneto.inductor.schedule.group import dims_of, group_of, static_sizes
from magneto.inductor.schedule.kernel import SCATTER, FusedKernel, Member, OrderedKernel, Step
from magneto.inductor.schedule.schedule import Schedule
from magneto.symbolic import ZERO


def with_scatters(plan: Schedule) -> Schedule:
    """The schedule with a pair of kernels in place of each scatter."""
    if not any(isinstance(step, OrderedKernel) for step in plan.steps):
        return plan
    steps: list[Step] = []
    for step in plan.steps:
        steps.extend(_pair(step.node, step.why) if isinstance(step, OrderedKernel) else (step,))
    return replace(plan, steps=tuple(steps))


def _pair(node: Ordered, why: str) -> Iterator[FusedKernel]:
    assert node.kind in ("scatter_add", "scatter_put") and node.init is not None and node.place is not None, (
        "the lowering makes no others for a GPU"
    )
    adds = node.kind == "scatter_add"
    first = group_of(Pointwise(node.buffer, node.init, node.origins), 0)
    yield FusedKernel(
        first.rows, first.cols, tuple(first.members), (node.name,), node.origins, "what is added to" if adds else "what is written into"
    )
    dtype = node.buffer.dtype
    body = Op("scatter", (node.place, *_added(node)), dtype) if adds else Op("put", (node.place, node.body), dtype)
    member = Member(SCATTER, node.buffer, body, ZERO, True, dtype)
    rows = dims_of(index_symbols(node.ranges), static_sizes(node.ranges))
    yield FusedKernel(rows, (), (member,), (), node.origins, why)


def _added(node: Ordered) -> tuple[Value, ...]:
    """What is added, and where it is only added under a condition, the condition: adding zeros to zeros is left out."""
    body, zero = node.body, Const(0, node.buffer.dtype)
    if isinstance(body, Op) and body.name == "where" and node.init is zero and body.args[2] is zero:
        return body.args[1], body.args[0]
    return (body,)
