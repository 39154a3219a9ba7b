"""Lookups and scatters for a GPU, without one: which kernels a graph becomes, and that they compile to sm_90. (`test_triton.py` executes them.)"""

from __future__ import annotations

import importlib.util
import operator
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from magneto.inductor import cuda
from magneto.inductor.loops.ir import LibraryCall
from magneto.inductor.runtime import triton_compile
from magneto.inductor.runtime.plan_code import TritonKernel, TritonTable
from magneto.inductor.runtime.record import recordable
from magneto.inductor.schedule.kernel import SCATTER, FusedKernel, TableKernel
from magneto.inductor.schedule.schedule import Schedule
from magneto.prims.decompose import decompose
from tests.inductor.codegen.hopper import for_hopper
from tests.inductor.codegen.triton_gathers import GATHERS, aten, by_offsets, column, wide
from tests.inductor.lower.prim_graphs import Graph
from tests.prims.test_decompose import Recorder

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")


def planned(g: Graph, monkeypatch: pytest.MonkeyPatch, written: dict[int, int] | None = None) -> tuple[Schedule, list[Any]]:
    """The schedule and the kernels of a graph whose tensors are taken to be on a GPU. `written`: outputs that are inputs' new numbers."""
    device = torch.device("cuda", 0)
    for node in g.fx.nodes:
        if node.op != "output":
            found = node.meta["val"]
            node.meta["val"] = tuple(v.with_(device=device) for v in found) if isinstance(found, tuple) else found.with_(device=device)
    seen: list[tuple[Schedule, list[Any]]] = []
    monkeypatch.setattr(cuda, "_report", lambda name, plan, texts, code: seen.append((plan, list(dict.fromkeys(texts.values())))))
    cuda._planned(g.fx, "graph", written or {}, device)
    return seen[0]


def of_case(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Schedule, list[Any]]:
    torch.manual_seed(0)
    g = Graph()
    GATHERS[name][0](g)
    return planned(g, monkeypatch)


def calls(plan: Schedule) -> list[str]:
    return [str(step.op) for step in plan.steps if isinstance(step, LibraryCall)]


def scatters(plan: Schedule) -> int:
    return sum(isinstance(step, FusedKernel) and step.members[0].kind == SCATTER for step in plan.steps)


def test_bags_of_many_tables_are_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of looked up vectors, zeros, and additions; each thread adds up the vectors of one element."""
    plan, kernels = of_case("sums of looked up vectors, and their gradients", monkeypatch)
    assert [(type(step), len(step.rows)) for step in plan.steps] == [(TableKernel, 20)] * 3
    bodies = [kernel.kernel.body for kernel in kernels]
    assert sum("tl.atomic_add(" in body for body in bodies) == 1
    (bags,) = (body for body in bodies if "index out of range" in body and "atomic" not in body)
    assert bags.count("tl.load(") == 3 + 8 and "tl.sum(" not in bags
    offsets = [kernel.offsets for kernel in kernels if kernel.offsets]
    assert all(32 * k in row for row in offsets for k in range(20))  # a column begins four numbers behind the one before


def test_large_memory_is_added_to_while_the_cache_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured on 26 tables of 26 MB: 7.7 microseconds an addition when all zeros are written first."""
    g, found = Graph(), []
    for _ in range(20):
        index = g.input(torch.randint(0, 20_000, (12,)))
        found.append(g.call(aten.embedding_dense_backward.default, g.input(torch.randn(12, 64)), index, 20_000, -1, False))
    g.output(*found)
    plan, _ = planned(g, monkeypatch)
    kinds = [step.members[0].kind for step in plan.steps if isinstance(step, FusedKernel)]
    assert kinds == ["point", SCATTER] * 20


@needs_triton
@pytest.mark.parametrize("name", [n for n in GATHERS if "bfloat16" not in n])
def test_compiled_for_hopper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    plan, kernels = of_case(name, monkeypatch)
    found: list[TritonKernel] = [kernel.kernel if isinstance(kernel, TritonTable) else kernel for kernel in kernels]
    tables = [kernel.kernel for kernel in kernels if isinstance(kernel, TritonTable)]
    for kernel in tables or [max(found, key=lambda k: ("atomic" in k.body, len(k.body)))]:
        for aligned in (True, False) if tables else (True,):
            for_hopper(kernel, aligned)


def gradient(padding: int = -1, rows: int = 50, count: int = 100, dtype: torch.dtype = torch.float32) -> Graph:
    g = Graph()
    index = g.input(torch.randint(0, rows, (count,)))
    g.output(g.call(aten.embedding_dense_backward.default, g.input(torch.randn(count, 16).to(dtype)), index, rows, padding, False))
    return g


def test_padding_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, kernels = planned(gradient(3), monkeypatch)
    (text,) = (kernel.body for kernel in kernels if "atomic_add" in kernel.body)
    assert "tl.where(c" in text and ", mask=" in text.split("atomic_add")[1] and not calls(plan)


def test_what_the_library_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half types, crowds of additions to few elements, and programs that want the same digits in every run."""
    assert scatters(planned(gradient(), monkeypatch)[0]) == 1
    assert calls(planned(gradient(dtype=torch.bfloat16), monkeypatch)[0])
    assert calls(planned(gradient(rows=1, count=20_000), monkeypatch)[0])
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        assert calls(planned(gradient(), monkeypatch)[0])
    finally:
        torch.use_deterministic_algorithms(before)


def test_memory_that_is_added_to_may_be_an_input_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added comes after what is written first, and before what reads the sums."""
    g = Graph()
    x, index, source = (g.input(t) for t in (torch.randn(7, 9), torch.randint(0, 7, (5,)), torch.randn(5, 9)))
    y = g.call(aten.index_add.default, g.exp(x), 0, index, source)
    g.output(g.sum(y, (0,)), g.mul(y, 2.0))
    plan, _ = planned(g, monkeypatch)
    writes = [step.writes for step in plan.steps if isinstance(step, FusedKernel)]
    target = next(step.writes[0] for step in plan.steps if isinstance(step, FusedKernel) and step.members[0].kind == SCATTER)
    places = [n for n, names in enumerate(writes) if target in names]
    readers = [n for n, step in enumerate(plan.steps) if isinstance(step, FusedKernel) and target in step.reads() and n not in places]
    assert len(places) == 2 and readers and max(places) < min(readers)


def test_an_input_is_not_added_to_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """x.index_add_(0, arange(6, -1, -1), x): nothing can raise, but other threads read what one has added to."""
    g = Graph()
    x = g.input(torch.randn(7, 9))
    backwards = g.add(g.mul(g.iota(7, torch.int64, torch.device("cpu")), -1), 6)
    g.output(g.call(aten.index_add.default, x, 0, backwards, g.mul(x, 2.0)))
    plan, _ = planned(g, monkeypatch, {0: 0})
    assert scatters(plan) == 1 and not plan.into


def cache_and_tokens(g: Graph) -> tuple[Any, Any, Any]:
    return g.input(torch.randn(4, 64, 8)), g.input(torch.tensor([5])), g.input(torch.randn(4, 1, 8))


def test_a_cache_takes_tokens_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel computes the token and stores it in the input's memory; nothing is copied."""
    g = Graph()
    cache, place, token = cache_and_tokens(g)
    put = g.call(aten.index_copy.default, cache, 1, place, g.mul(token, 2.0))
    g.output(put, g.sum(put, (1,)))
    plan, kernels = planned(g, monkeypatch, {0: 0})
    assert not calls(plan) and scatters(plan) == 1 and plan.into == {plan.steps[0].writes[0]: cache.name}
    assert len(plan.steps) == 2 and "tl.store(" in kernels[0].body and "tl.atomic" not in kernels[0].body


def test_a_cache_that_the_tokens_are_computed_from_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads would read what one has stored."""
    g = Graph()
    cache, place, _ = cache_and_tokens(g)
    g.output(g.call(aten.index_copy.default, cache, 1, place, g.slice(cache, (0, 6, 0), (4, 7, 8), (1, 1, 1))))
    plan, _ = planned(g, monkeypatch, {0: 0})
    assert not calls(plan) and scatters(plan) == 1 and not plan.into and len(plan.steps) == 2


def test_the_library_stores_in_order_where_the_program_asks_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        g = Graph()
        cache, place, token = cache_and_tokens(g)
        g.output(g.call(aten.index_copy.default, cache, 1, place, token))
        assert calls(planned(g, monkeypatch)[0]) == ["aten.index_copy_.default"]
    finally:
        torch.use_deterministic_algorithms(before)


def test_the_library_writes_again_where_it_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of what nobody else reads: of two stores behind a call of the library only that one has its own memory."""
    g = Graph()
    cache, place, token = cache_and_tokens(g)
    mask = g.input(torch.rand(4, 64, 8) > 0.5)
    first = g.call(aten.masked_scatter.default, cache, mask, g.input(torch.randn(4, 64, 8)))
    g.output(g.call(aten.index_copy.default, first, 1, place, token))
    plan, _ = planned(g, monkeypatch)
    assert calls(plan) == ["aten.masked_scatter_.default", "aten.index_copy_.default"] and scatters(plan) == 0


@pytest.mark.parametrize("dim", [1, 2])
def test_few_elements_are_written_out_along_memory_only(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    g = Graph()
    g.output(g.sum(g.input(torch.randn(64, 4, 64) if dim == 1 else torch.randn(64, 64, 4)), (dim,)))
    _, (kernel,) = planned(g, monkeypatch)
    assert ("tl.sum(" in kernel.body) == (dim == 2)


def test_memory_behind_a_condition_is_read_everywhere_where_there_is_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels that are alike but for how long the index is: the second may not read the last rows' places."""
    monkeypatch.setattr(cuda, "gather", lambda plan, *args: plan)
    monkeypatch.setattr(cuda, "repeated", lambda plan, *args: plan)
    g, joined = Graph(), []
    for length in (2000, 1200):
        index = g.slice(g.input(torch.randint(0, 30, (length,))), (0,), (1200,), (1,))
        rows = g.index_select(g.input(torch.randn(30, 64)), 0, index)
        joined.append(g.cat([g.cat([rows, g.input(torch.randn(1200, 128))], 1), g.input(torch.randn(800, 192))], 0))
    g.output(*joined)
    _, kernels = planned(g, monkeypatch)
    loads = [next(line for line in k.body.splitlines() if "tl.load(p" in line) for k in kernels]
    assert [("mask=" in line.split("tl.load(")[1]) for line in loads] == [False, True]


def test_few_elements_that_are_computed_at_computed_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index itself is computed by the kernel, and leaves nothing in memory."""
    g = Graph()
    index = g.remainder(g.add(g.input(torch.randint(0, 50, (12, 4))), 7), 50)
    g.output(g.sum(g.call(aten.embedding.default, g.input(torch.randn(50, 16)), index), (1,)))
    plan, kernels = planned(g, monkeypatch)
    assert len(kernels) == 1 and kernels[0].body.count("tl.load(") == 8


@pytest.mark.parametrize("reduced", [1, 2])
def test_looked_up_vectors_are_read_along_their_elements(reduced: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not along the indices, which are contiguous as well, but fewer."""
    g = Graph()
    index = g.input(torch.randint(0, 50, (300, 64)))
    g.output(g.sum(g.call(aten.embedding.default, g.input(torch.randn(50, 128)), index), (reduced,)))
    _, (kernel,) = planned(g, monkeypatch)
    assert re.search(rf"tl\.load\(p1 \+ \(i\d+ \* 128 \+ {'x' if reduced == 1 else 'r'}\)", kernel.body), kernel.body
    blocks = dict(kernel.constants)
    if reduced == 1:  # a bag for each program, whose indices are read once for a block of elements
        assert kernel.grid == (1, 300) and blocks == {"XBLOCK": 128, "RBLOCK": 32} and "(z * 64 + r)" in kernel.body
        assert kernel.warps == 2 and kernel.body.index("device_assert") > kernel.body.index(
            "tl.load(p1"
        )  # no turn waits for what another has found
    else:
        assert blocks["RBLOCK"] == 128


def test_the_cache_need_not_keep_rows_of_large_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, wanted in ((1 << 15, 0), (1 << 16, 1)):
        g = Graph()
        g.output(
            g.sum(g.call(aten.embedding.default, g.input(torch.empty(rows, 128)), g.input(torch.zeros(300, 64, dtype=torch.int64))), (1,))
        )
        _, (kernel,) = planned(g, monkeypatch)
        assert kernel.body.count("evict_first") == wanted and kernel.warps == (2, 4)[wanted], kernel


def test_looked_up_columns_are_read_along_the_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    g = Graph()
    index = g.input(torch.randint(0, 50, (300, 64)))
    found = g.call(aten.index.Tensor, g.input(torch.randn(128, 50)), [None, index])
    g.output(g.sum(found, (0,)))
    _, (kernel,) = planned(g, monkeypatch)
    assert re.search(r"tl\.load\(p\d \+ x\b", kernel.body) and re.search(r"\(i\d+ \+ r \* 50\)|\(r \* 50 \+ i\d+\)", kernel.body), (
        kernel.body
    )


def test_vectors_are_added_along_their_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of bags, which is one vector for all that a bag has looked up."""
    g = Graph()
    grad = wide(g, g.input(torch.randn(300, 36)), (300, 64, 36))
    g.output(g.call(aten.embedding_dense_backward.default, grad, g.input(torch.randint(0, 2000, (300, 64))), 2000, -1, False))
    _, kernels = planned(g, monkeypatch)
    (body,) = (k.body for k in kernels if "atomic_add" in k.body)
    place = re.search(r"atomic_add\(p\d \+ \(i\d+ \* 36 \+ (\w+)\)", body)
    assert place and (place[1] == "x" or f"{place[1]} = x % 36\n" in body), body


# ---- recordings ----------------------------------------------------------------------------------------------------------


def node(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            made = graph.placeholder("x")
            made.meta["val"] = value
            return made
        return [of(v) for v in value] if isinstance(value, list) else value

    return graph.call_function(op, tuple(map(of, args)), {name: of(v) for name, v in kwargs.items()})


def test_what_may_be_recorded() -> None:
    x, places, mask = torch.randn(3, 3), torch.tensor([0, 1]), torch.tensor([True, False, True])
    assert recordable(node(aten.index.Tensor, x, [None, places]))
    assert recordable(node(aten._unsafe_index.Tensor, x, [places]))
    assert not recordable(node(aten.index.Tensor, x, [mask]))
    assert not recordable(node(aten.index.Tensor, x, [None, mask.byte()]))
    assert recordable(node(aten.index_put.default, x, [places], x, True))
    assert not recordable(node(aten.index_put.default, x, [mask], x))
    assert recordable(node(aten.index_add.default, x, 0, places, x))
    assert recordable(node(aten.repeat_interleave.Tensor, places, output_size=1))
    assert not recordable(node(aten.repeat_interleave.Tensor, places))
    assert recordable(node(aten.repeat_interleave.self_int, x, 2))
    assert not recordable(node(aten.repeat_interleave.self_Tensor, x, places))
    assert not recordable(node(aten.masked_scatter.default, x, mask, x)) and not recordable(node(aten.isin.Tensor_Tensor, places, places))
    assert not recordable(node(aten.normal.Tensor_Tensor, x, x)) and not recordable(node(aten.normal.float_Tensor, 0.0, x))
    assert recordable(node(aten.normal.Tensor_float, x, 1.0)) and recordable(node(aten.isinf.default, x))
    assert not recordable(node(aten.nonzero.default, x))
    assert recordable(node(aten.mm.default, x, x))


@pytest.mark.parametrize(
    ("count", "dtype", "held"), [(64 * 200, torch.float32, 4096), (63 * 200, torch.float32, 2048), (64 * 200, torch.float64, 2048)]
)
def test_long_bags_are_walked_in_larger_blocks(count: int, dtype: torch.dtype, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as registers suffice."""
    g = Graph()
    offsets = g.input(torch.arange(200) * (count // 200))
    g.output(by_offsets(g, g.input(torch.randn(50, 128, dtype=dtype)), g.input(torch.randint(0, 50, (count,))), offsets))
    (bags,) = planned(g, monkeypatch)[1]
    assert dict(bags.constants) == {"XBLOCK": 128, "RBLOCK": held // 128}


def test_bags_share_what_they_read_at_different_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than make a table stay kernels of their own."""
    g = Graph()
    lists, found = g.input(torch.randint(0, 50, (12, 5, 4))), []
    for k in range(5):
        index = column(g, lists, k, (12, 5, 4))
        grad = wide(g, g.input(torch.randn(12, 16)), (12, 4, 16))
        found.append(g.call(aten.embedding_dense_backward.default, grad, index, 50, -1, False))
    g.output(*found)
    assert scatters(planned(g, monkeypatch)[0]) == 5


@pytest.mark.parametrize("mode", [0, 1])
def test_bags_by_offsets_are_walked_between_offsets(mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel for sums, means and what reads them; of the gradient only additions are written, no rows; which bag an index belongs to is a search of the library's."""
    monkeypatch.setattr("magneto.prims.decompositions.bags.on_gpu", lambda x: True)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, 3000, (199,)).sort().values])
    r = Recorder(torch.randn(50, 128).double(), torch.randint(0, 50, (3000,)), offsets, torch.randn(200, 128).double())
    w, i, o, grad = r.nodes
    made = r(aten._embedding_bag.default, w, i, o, False, mode, False, None, False, -1)
    out, places, sizes = (r(operator.getitem, made, n) for n in range(3))
    back = r(aten._embedding_bag_dense_backward.default, grad, i, places, sizes, sizes, 50, False, mode, None, -1)
    g = Graph()
    g.fx = decompose(r.output(r(aten.mul.Tensor, out, 2.0), back))
    plan, kernels = planned(g, monkeypatch)
    assert calls(plan) == ["aten.searchsorted.Tensor"] and scatters(plan) == 1
    (bags,) = (k for k in kernels if "while offset < end" in k.body)
    turn = bags.body.split("while offset")[1].split("offset += RBLOCK")[0]
    assert (
        "device_assert" not in turn and turn.count("tl.load(") == 2 and turn.index("_next = tl.load(") < turn.index("evict_first")
    )  # indices of the next turn
    assert "tl.load(" not in bags.body.split("offset += RBLOCK")[1]  # a mean waits for no more than a sum
    assert bags.grid == (200, 1) and bags.body.count("tl.store(") == 1 and dict(bags.constants)["XBLOCK"] == 128
    assert max(plan.buffers[name].nbytes for step in plan.steps if isinstance(step, FusedKernel) for name in step.writes) == 8 * 200 * 128


def test_searches_are_kernels_without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, kernels = of_case("searches", monkeypatch)
    assert not calls(plan) and sum("device_assert" in k.body for k in kernels) <= 2  # of what is gathered behind them
    assert all(len(k.body) < 4000 for k in kernels if k.body.count("tl.store(") == 1)


PAIRED = """def kernel(p0, p1, p2, XBLOCK: tl.constexpr):
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    y, x = (x // 64) % 8, (x // 8) % 8
    lower, upper = tl.maximum((y + 1) // 2 - 1, 0) * 32 + tl.maximum((x + 1) // 2 - 1, 0) * 8, tl.minimum((y + 1) // 2, 3) * 32 + tl.minimum((x + 1) // 2, 3) * 8
    place = ((y + 1) % 2) * 3 + ((x + 1) % 2)
    both = tl.load(p0 + lower) * (tl.load(p1 + lower) == place + 8) + tl.load(p0 + upper) * (tl.load(p1 + upper) == place)
    tl.store(p2 + tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK), both)
"""


@needs_triton
def test_pairs_of_small_integers_do_not_reach_ptxas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets the constant of one half (gradients of pools beside a convolution were those of other elements)."""
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled: list[str] = []
    compile = triton.compile
    monkeypatch.setattr(triton, "compile", lambda *args, **named: compiled.append((made := compile(*args, **named)).asm["llir"]) or made)
    before = triton.knobs.runtime.add_stages_inspection_hook, os.environ.get("DISABLE_LLVM_OPT")
    kernel = TritonKernel(PAIRED, ("*fp32", "*i8", "*fp32"), (("XBLOCK", 256),), (4,), 4, False)
    for _ in range(2):  # the second time Triton has it on disk
        made = for_hopper(kernel)
        assert "16x2" not in made.asm["ptx"] and not triton_compile.PAIRS.search(made.asm["llir"])
        first, last = compiled
        assert triton_compile.PAIRS.search(first), "LLVM makes no pairs of this kernel any more"
        compiled.clear()
    assert before == (triton.knobs.runtime.add_stages_inspection_hook, os.environ.get("DISABLE_LLVM_OPT"))


@pytest.mark.parametrize("summed", [False, True])
def test_classes_are_compared_and_checked_in_the_loop(summed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`one_hot` reads classes and nothing else."""
    r = Recorder(torch.randint(0, 30, (50, 3)))
    hot = r(torch.ops.magneto.one_hot.default, r.nodes[0], 30)
    r.output(r(aten.sum.dim_IntList, hot, [0]) if summed else hot)
    for node in r.graph.nodes:
        if node.op != "output":
            node.meta["val"] = node.meta["val"].with_(device=torch.device("cuda", 0))
    g = Graph()
    g.fx = decompose(r.graph)
    plan, (kernel,) = planned(g, monkeypatch)
    assert not calls(plan) and len(kernel.pointers) == 2 and "device_assert" in kernel.body
