"""What becomes one kernel and what does not, and why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import magneto
from magneto.base import events
from magneto.base.flags import config
from magneto.inductor.loops.ir import LibraryCall
from magneto.inductor.lower import lower_graph
from magneto.inductor.schedule.dependence import predecessors
from magneto.inductor.schedule.fuse import No, Yes, may_fuse
from magneto.inductor.schedule.group import CannotSchedule, group_of
from magneto.inductor.schedule.kernel import FusedKernel
from magneto.inductor.schedule.schedule import schedule
from tests.inductor.lower.prim_graphs import Graph

aten = torch.ops.aten


def steps(g: Graph) -> str:
    """One letter per step: k kernel, l library call."""
    return "".join("l" if isinstance(s, LibraryCall) else "k" for s in schedule(lower_graph(g.fx)).steps)


def softmax(g: Graph, x, dim: int = -1):
    shape = tuple(g.values[x].shape)
    dim %= len(shape)
    others = tuple(d for d in range(len(shape)) if d != dim)
    e = g.exp(g.sub(x, g.broadcast_in_dim(g.amax(x, (dim,)), shape, others)))
    return g.div(e, g.broadcast_in_dim(g.sum(e, (dim,)), shape, others))


def layer_norm(g: Graph, x):
    shape = tuple(g.values[x].shape)
    others = tuple(range(len(shape) - 1))
    v = g.var(x, (len(shape) - 1,), 0.0)
    scale = g.rsqrt(g.add(g.item(v, 0), 1e-5))
    return g.mul(g.sub(x, g.broadcast_in_dim(g.item(v, 1), shape, others)), g.broadcast_in_dim(scale, shape, others))


def test_softmax_is_one_kernel_and_keeps_nothing_in_memory() -> None:
    g = Graph()
    g.output(softmax(g, g.input(torch.randn(8, 4, 30, 30))))
    plan = schedule(lower_graph(g.fx))
    (kernel,) = plan.steps
    assert isinstance(kernel, FusedKernel) and len(kernel.stored) == 1


def test_layer_norm_of_a_residual_is_one_kernel() -> None:
    g = Graph()
    x, y = g.input(torch.randn(4, 10, 64)), g.input(torch.randn(4, 10, 64))
    total = g.add(g.erf(x), y)
    g.output(layer_norm(g, total), total)
    assert steps(g) == "k"


def test_reshapes_between_are_no_obstacle() -> None:
    g = Graph()
    x, w = g.input(torch.randn(40, 64)), g.input(torch.randn(64, 64))
    y = g.reshape(g.call(aten.mm.default, x, w), (4, 10, 64))
    g.output(g.call(aten.mm.default, g.reshape(layer_norm(g, g.tanh(y)), (40, 64)), w))
    assert steps(g) == "lkl"


def test_softmax_over_the_slow_dimension() -> None:
    g = Graph()
    g.output(softmax(g, g.input(torch.randn(30, 40)), 0))
    assert steps(g) == "k"


def test_kernels_do_not_wait_for_each_other() -> None:
    """x -> exp -> mm -> add(exp): the sum must not join the exponential, the product lies between."""
    g = Graph()
    x = g.input(torch.randn(16, 16))
    e = g.exp(x)
    g.output(g.add(g.call(aten.mm.default, e, e), e))
    assert steps(g) == "klk"


def test_horizontal_fusion_reads_the_input_once() -> None:
    g = Graph()
    x = g.input(torch.randn(64, 256))
    g.output(g.exp(x), g.sin(x), g.sum(x, (1,)), g.amax(x, (1,)))
    assert steps(g) == "k"


def test_long_rows_are_not_walked_twice_by_few_threads() -> None:
    g = Graph()
    x = g.input(torch.randn(2, 200_000))
    g.output(softmax(g, x))
    assert len(steps(g)) > 1


def test_fusion_can_be_switched_off_and_bounded() -> None:
    def build() -> Graph:
        g = Graph()
        g.output(softmax(g, g.input(torch.randn(20, 30))))
        return g

    with config.patch(fusion=False):
        assert steps(build()) == "kkkk"
    with config.patch(max_fusion=2):
        assert len(steps(build())) >= 2


def groups(g: Graph):
    program = lower_graph(g.fx)
    return [group_of(n, i) for i, n in enumerate(program.nodes)], program.buffer_table()


def test_reasons_have_words() -> None:
    g = Graph()
    x = g.input(torch.randn(12, 20))
    g.output(g.exp(x), g.flip(g.exp(x), (0,)), g.sum(x, (0,)), g.sum(x, (1,)), g.exp(g.input(torch.randn(12, 20))))
    found, buffers = groups(g)
    apart = next(x for x in found if "x1" in x.reads)
    first = next(x for x in found if not x.cols and x is not apart)
    over_rows, over_cols = (x for x in found if x.cols)
    assert isinstance(may_fuse(over_rows, over_cols, buffers), Yes)  # along and across in one walk
    for a, b, words in [(first, apart, "nothing in common")]:
        verdict = may_fuse(a, b, buffers)
        assert isinstance(verdict, No)
        assert any(w in verdict.reason for w in words.split("|")), verdict.reason
    assert isinstance(may_fuse(first, over_cols, buffers), Yes)
    full = may_fuse(first, over_cols, buffers, limit=1)
    assert isinstance(full, No) and "too many" in full.reason


def test_scores_count_bytes() -> None:
    g = Graph()
    x = g.input(torch.randn(64, 64))
    e = g.exp(x)
    g.output(e, g.sum(e, (1,)))
    (a, b), buffers = groups(g)
    verdict = may_fuse(a, b, buffers)
    assert isinstance(verdict, Yes) and verdict.score == 2 * 64 * 64 * 4


def test_dependencies_of_mutation_and_random_numbers() -> None:
    g = Graph()
    x = g.input(torch.randn(4, 4))
    y = g.call(aten.clone.default, x)
    first = g.call(aten.bernoulli.p, y, 0.5)
    second = g.call(aten.bernoulli.p, y, 0.5)
    g.output(second, first)
    program = lower_graph(g.fx)
    random = [i for i, n in enumerate(program.nodes) if isinstance(n, LibraryCall) and "bernoulli" in str(n.op)]
    before = predecessors(program.nodes)
    assert random[0] in before[random[1]]


def test_symbolic_sizes_are_refused_by_name() -> None:
    from magneto.inductor.loops.ir import Buffer, Load, Pointwise, Program, ViewOf
    from magneto.symbolic import Sym

    n = Sym("n", 2, None)
    a, b = (Buffer(name, (n,), (1,), torch.float32, torch.device("cpu")) for name in "ab")
    program = Program((a,), (), (Pointwise(b, Load("a", 0, torch.float32)),), (ViewOf("b", (n,), (1,), 0, torch.float32),))
    with pytest.raises(CannotSchedule, match="symbolic size"):
        schedule(program)


def test_empty_results_need_no_kernel() -> None:
    g = Graph()
    x = g.input(torch.randn(0, 3))
    g.output(g.exp(x), g.sum(x, (0,)))
    assert steps(g) == "k"


def test_mutual_alignment_of_split_dimensions() -> None:
    from magneto.inductor.schedule.domain import align, row_major
    from magneto.inductor.schedule.kernel import Dim
    from magneto.symbolic import Sym, evaluate

    a = [Dim(Sym("a0", 0, 11), 12), Dim(Sym("a1", 0, 4), 5)]
    b = [Dim(Sym("b0", 0, 2), 3), Dim(Sym("b1", 0, 19), 20)]
    found = align(row_major(a), row_major(b))
    assert found is not None
    names = {d.sym for d, _, _ in found.pieces}
    for point in range(60):
        values, rest = {}, point
        for d, _, _ in found.pieces:
            values[d.sym] = rest % d.size
            rest //= d.size
        ours = [evaluate(found.host.get(d.sym, d.sym), values) for d in a]
        theirs = [evaluate(found.guest.get(d.sym, d.sym), values) for d in b]
        assert ours == [point // 5, point % 5] and theirs == [point // 20, point % 20]
    assert len(names) == 3 and align(row_major(a), row_major([Dim(Sym("c", 0, 6), 7)])) is None


def test_units_of_early_and_late_nodes_make_no_cycle() -> None:
    """Three losses and their backward: a way from one unit to another leads through one that ends before the first begins. Found in a list of losses."""
    x, t = torch.randn(4, 3), torch.randn(4, 3)

    def losses(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.clone().requires_grad_()
        each = [
            F.cosine_embedding_loss(x, t, torch.ones(4)),
            F.triplet_margin_loss(x, t, t.flip(0)),
            F.soft_margin_loss(x, torch.where(t > 0, 1.0, -1.0)),
        ]
        sum(each).backward()
        assert x.grad is not None
        return *[loss.detach() for loss in each], x.grad

    before = events.count("fallback")
    found = magneto.optimize("inductor")(losses)(x)
    assert events.count("fallback") == before
    for got, expected in zip(found, losses(x), strict=True):
        torch.testing.assert_close(got, expected)
