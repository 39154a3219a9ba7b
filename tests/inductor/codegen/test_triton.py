"""Triton's kernels without a GPU: executed by its interpreter against eager, compiled to sm_90, and their text."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from magneto.base.flags import config
from magneto.inductor.codegen.cpp_types import CannotEmit
from magneto.inductor.codegen.triton import triton_kernel
from magneto.inductor.codegen.triton_product import triton_product
from magneto.inductor.codegen.triton_table import triton_table
from magneto.inductor.loops.ir import LibraryCall
from magneto.inductor.loops.philox import limit_of
from magneto.inductor.lower import lower_graph
from magneto.inductor.runtime.plan_code import TritonKernel, TritonTable, work_of
from magneto.inductor.runtime.scaled import kernel_of
from magneto.inductor.schedule.columns import join_columns
from magneto.inductor.schedule.kernel import FusedKernel, TableKernel
from magneto.inductor.schedule.memory import plan_memory
from magneto.inductor.schedule.online import online_sums
from magneto.inductor.schedule.product import CHEAP, TiledKernel, Tiles, joined, matches
from magneto.inductor.schedule.schedule import schedule
from magneto.inductor.schedule.split import split_reductions
from magneto.inductor.schedule.table import gather
from tests.inductor.codegen.hopper import for_hopper
from tests.inductor.codegen.triton_cases import CASES, FLOATS_OF_A_BYTE, PRODUCTS, as_on_a_gpu, heads, sizes_for
from tests.inductor.codegen.triton_draws import dropout
from tests.inductor.codegen.triton_pairs import neighbours, patches, rolled, windows
from tests.inductor.codegen.triton_scans import SCANS
from tests.inductor.lower.prim_graphs import Graph

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/triton"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    """One process executes all cases: the interpreter's switch is read when Triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.inductor.codegen.triton_cases"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@needs_triton
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str, verdicts: dict[str, str]) -> None:
    assert not verdicts[name], verdicts[name]


def kernels(build: Callable[[Graph], Any], rewritten: bool = False) -> list[TritonKernel]:
    """`rewritten`: long reductions are cut first, as they are for a GPU."""
    torch.manual_seed(0)
    g = Graph()
    build(g)
    program = lower_graph(g.fx)
    with as_on_a_gpu():
        plan = schedule(split_reductions(online_sums(program)) if rewritten else program, training=True)
    plan = join_columns(plan) if rewritten else plan
    return [triton_kernel(step, plan.buffers) for step in plan.steps if isinstance(step, FusedKernel)]


COMPILED = (
    "pointwise torch.bfloat16 (3, 70)", "unary functions torch.float32", "binary functions torch.float32", "integers torch.int8", "bools",
    "searches torch.float32", "softmax and layer norm", "transposed operands", "looked up", "rows too long for one block",
    "variances in parts of torch.float32", "variances in parts of torch.float64", "sums over rows of three tensors by heads, in parts",
    "drawn: residual and layer norm", "drawn: 9000 of torch.bfloat16", "drawn: 1003 of torch.float64",
    "maxima of windows of torch.float32", "maxima of windows of torch.bfloat16",
)  # fmt: skip


@needs_triton
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_for_hopper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    with sizes_for(name):
        kernel = max(kernels(CASES[name][0], "in parts" in name), key=lambda k: len(k.body))
    for_hopper(kernel)


@needs_triton
def test_the_scaling_of_gradients_compiles_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    for made, factor in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        for_hopper(kernel_of(10_000_001, made, factor))


@needs_triton
@pytest.mark.parametrize("small", FLOATS_OF_A_BYTE)
def test_floats_of_a_byte_compile_for_hopper(small: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions are parts of kernels; the library is asked for nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    g = Graph()
    CASES[f"from and to {small}"][0](g)
    plan = schedule(lower_graph(g.fx, on_gpu=True), training=True)
    found = [triton_kernel(step, plan.buffers) for step in plan.steps if isinstance(step, FusedKernel)]
    assert len(found) == len(plan.steps)
    kernel = max(found, key=lambda k: len(k.body))
    assert "*u8" in kernel.pointers and for_hopper(kernel)


def scans(build: Callable[[Graph], Any], name: str = "") -> list[Any]:
    """Kernels, and calls of the library."""
    torch.manual_seed(0)
    g = Graph()
    build(g)
    with as_on_a_gpu(), sizes_for(name):
        plan = schedule(split_reductions(lower_graph(g.fx, on_gpu=True)), training=True)
        return [triton_kernel(step, plan.buffers) if isinstance(step, FusedKernel) else step for step in plan.steps]


@needs_triton
@pytest.mark.parametrize("name", SCANS)
def test_sums_in_order_compile_for_hopper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind. Pieces are kernels of ours too, but for the one row of the library."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = scans(SCANS[name][0], name)
    kinds = {
        (len(k.grid), "for offset" in k.body, "lib.sum_before" in k.body): k
        for k in found
        if isinstance(k, TritonKernel) and "tl.cum" in k.body
    }
    assert sum(isinstance(k, LibraryCall) for k in found) == (name == "sums in order, in pieces")
    for kernel in kinds.values():
        for_hopper(kernel)


def test_sums_in_order_fuse() -> None:
    """With a softmax in front and a mask behind; their gradient with both flips; down long columns the next turns are read ahead."""

    def top_p(g: Graph) -> None:
        x = g.input(torch.randn(40, 512))
        wide = lambda v: g.broadcast_in_dim(v, (40, 512), (0,))  # noqa: E731
        e = g.exp(g.sub(x, wide(g.amax(x, (1,)))))
        p = g.div(e, wide(g.sum(e, (1,))))
        g.output(g.gt(g.sub(g.call(torch.ops.aten.cumsum.default, p, 1), p), 0.9))

    def backward(g: Graph) -> None:
        x = g.input(torch.randn(500, 48))
        g.output(g.mul(g.flip(g.call(torch.ops.aten.cumsum.default, g.flip(g.exp(x), (0,)), 0), (0,)), x))

    for build in (top_p, backward):
        (kernel,) = scans(build)
        assert kernel.body.count("tl.load(") == kernel.body.count("tl.store(") == kernel.body.count("tl.cumsum(") == 1
    assert "in tl.range(0, 500, RBLOCK, num_stages=3)" in kernel.body and "r = 499 - (offset + " in kernel.body and kernel.warps == 8


@pytest.mark.parametrize("way", ["deterministic", "numerics", "ours"])
def test_who_asks_for_the_librarys_digits_gets_them(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(g: Graph) -> None:
        g.output(g.call(torch.ops.aten.cumsum.default, g.input(torch.randn(9, 30)), 1))

    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: way == "deterministic")
    with config.patch(numerics="eager" if way == "numerics" else "fast"):
        (step,) = scans(build)
    assert isinstance(step, LibraryCall) == (way != "ours")


def softmax(g: Graph, shape: tuple[int, int] = (40, 512)) -> None:
    x = g.input(torch.randn(shape))
    wide = lambda v: g.broadcast_in_dim(v, shape, (0,))  # noqa: E731
    e = g.exp(g.sub(x, wide(g.amax(x, (1,)))))
    g.output(g.div(e, wide(g.sum(e, (1,)))))


TEXTS: dict[str, Callable[[Graph], Any]] = {
    "pointwise": lambda g: g.output(g.tanh(g.add(g.input(torch.randn(5, 7)), 1.0))),
    "blocks_that_divide": lambda g: g.output(g.exp(g.input(torch.randn(1024, 300)))),
    "softmax": softmax,
    "transpose": lambda g: g.output(g.add(g.transpose(g.input(torch.randn(70, 90)), (1, 0)), g.input(torch.randn(90, 70)))),
    "sum_of_rows": lambda g: g.output(g.sum(g.input(torch.randn(300, 70)), (0,))),
    "looped": lambda g: g.output(g.amax(g.mul(g.input(torch.randn(3, 50_000).bfloat16()), 0.5), (1,))),
    "search": lambda g: g.output(g.argmax(g.input(torch.randn(50, 300)), 1)),
    "embedding": lambda g: g.output(g.mul(g.index_select(g.input(torch.randn(10, 64)), 0, g.input(torch.tensor([1, 2, 3]))), 2.0)),
}


def written(kernel: TritonKernel) -> str:
    return f"{kernel.body}# grid {kernel.grid}, {dict(kernel.constants)}, {kernel.warps} warps, {', '.join(kernel.pointers)}\n"


@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str) -> None:
    """MAGNETO_UPDATE_GOLDEN=1 writes them anew: read the diff before committing."""
    text, path = "\n".join(map(written, kernels(TEXTS[name]))), GOLDEN / f"{name}.py.txt"
    if os.environ.get("MAGNETO_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"the text of {name} changed; MAGNETO_UPDATE_GOLDEN=1 keeps the new one"


def test_neighbours_are_drawn_together_in_one_kernel_with_what_follows() -> None:
    """One call of Philox gives four numbers, where rows are groups of four."""
    (kernel,) = kernels(CASES["drawn: residual and layer norm"][0])
    assert f", (x * 24) + rfrom4, rof4, 256, 1, 1, False, {limit_of(0.699999988079071)})" in kernel.body
    assert "rof4 = tl.arange(0, RBLOCK // 4)[None, :]" in kernel.body
    assert all("lib.uniform(" in k.body for k in kernels(CASES["drawn: rows that are no groups of four"][0]))


def test_a_norm_that_draws_has_few_warps_and_counts_turns_from_the_row_on() -> None:
    """What the threads of a row share of Philox is computed once for each; the mean over 4096 is no division."""
    shape = (600, 4096)

    def build(g: Graph, draws: bool) -> None:
        x, y = (g.input(torch.empty(shape, dtype=torch.bfloat16)) for _ in range(2))
        z = g.add(x, dropout(g, y, 132 * 2048, 0.1)[0] if draws else y)
        v = g.var(g.convert_element_type(z, torch.float32), (1,), 0.0)
        g.output(g.mul(z, g.convert_element_type(g.broadcast_in_dim(g.item(v, 0), shape, (0,)), torch.bfloat16)))

    (kernel,), (other,) = kernels(partial(build, draws=True)), kernels(partial(build, draws=False))
    assert (kernel.warps, other.warps) == (4, 8) and ", (x * 512) + rfrom8, rof8, 270336, 2, 2, True, " in kernel.body
    assert "* 0.000244140625" in kernel.body


@pytest.mark.parametrize("shape", [(16, 20_011), (160, 20_480)])
def test_long_rows_are_read_twice(shape: tuple[int, int]) -> None:
    """Once for the maximum and the sum of each chunk, once to write the result; what lies between reads no row."""
    parts, combine, result = kernels(lambda g: softmax(g, shape), True)
    (x, chunk), (_, many) = ([n for _, n in k.constants] for k in (parts, combine))
    assert x == 1 and chunk >= many and "RBLOCK" not in dict(result.constants)
    assert [k.body.count("tl.load(") for k in (parts, combine, result)] == [1, 2, 3]
    assert [k.body.count("tl.store(") for k in (parts, combine, result)] == [2, 2, 1]
    assert not any("for offset" in k.body for k in (parts, combine, result))


def test_rows_of_several_tensors_are_contiguous_memory() -> None:
    """No index of a head's channels is divided for, and few programs share the rows."""
    sums, *_ = kernels(lambda g: g.output(g.sum(heads(g, 10, 197, 12, 64), (0, 1))), True)
    assert "// 64" not in sums.body and "% 64" not in sums.body and dict(sums.constants)["XBLOCK"] >= 32 and sums.grid[1] >= 128


def test_a_variance_is_one_walk() -> None:
    def build(g: Graph) -> None:
        v = g.var(g.input(torch.randn(64, 28, 28, 32)), (0, 1, 2), 0.0)
        g.output(g.item(v, 0), g.item(v, 1))

    walk, combine = kernels(build, True)
    assert walk.body.count("tl.load(") == 1 and walk.body.count("for offset") == 1 and walk.grid[-1] >= 128
    assert combine.body.count("tl.load(") == 2


def test_blocks_of_many_operands_are_small() -> None:
    (kernel,) = kernels(CASES["sums of many operands"][0])
    constants = dict(kernel.constants)
    assert constants["XBLOCK"] * constants["RBLOCK"] * 14 <= 96 * 32 * kernel.warps


def columns() -> list[TritonKernel]:
    with sizes_for("in parts"):
        return kernels(CASES["sums of columns beside sums of rows"][0], True)


def test_sums_of_columns_join_the_walk_over_rows() -> None:
    """Everything is read once; what remains is to add up one partial sum per program."""
    walk, *combine = columns()
    assert walk.grid == (4,) and "for offset in tl.range(0, 8, XBLOCK" in walk.body
    assert walk.body.count("tl.load(") == 5 and walk.body.count("tl.store(") == 3
    assert [k.body.count("tl.load(") for k in combine] == [1, 1]


@needs_triton
def test_columns_compile_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    for kernel in (*columns(), *kernels(CASES["functions of torch.bfloat16"][0]), *kernels(CASES["rows and columns told apart"][0])):
        for_hopper(kernel)


@needs_triton
def test_chunks_compile_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    for kernel in kernels(lambda g: softmax(g, (16, 20_011)), True):
        for_hopper(kernel)


def tables(name: str) -> list[TritonTable]:
    torch.manual_seed(0)
    g = Graph()
    CASES[name][0](g)
    plan = gather(schedule(lower_graph(g.fx), training=True), 16, False)
    return [triton_table(step, plan.into) for step in plan.steps if isinstance(step, TableKernel)]


def test_many_kernels_become_one() -> None:
    (table,) = tables("a table of torch.bfloat16")
    assert len(table.sizes) == 16 and table.full == (True, False, True, True)  # the tensor of one element is another computation
    path = GOLDEN / "table.py.txt"
    if os.environ.get("MAGNETO_UPDATE_GOLDEN"):
        path.write_text(written(table.kernel))
    assert written(table.kernel) == path.read_text()
    (quotients,) = tables("a table of quotients by a number")
    assert "lib.divide(" in quotients.kernel.body
    (numbers,) = tables("a table of single numbers")
    assert numbers.block == 0 and len(numbers.sizes) == 20


def test_blocks_of_a_table() -> None:
    assert work_of((1, 1024, 1025), 1024).tolist() == [[0, 0, 1], [1, 0, 1024], [2, 0, 1025], [2, 1024, 1025]]
    assert work_of((1, 1), 0).tolist() == [[0, 0, 1], [1, 0, 1]]


@needs_triton
@pytest.mark.parametrize("aligned", [True, False])
def test_tables_compile_for_hopper(aligned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    for name in ("a table of torch.bfloat16", "a table of single numbers"):
        (table,) = tables(name)
        made = for_hopper(table.kernel, aligned)
        wide = ".v4.b32" in made.asm["ptx"] or ".v2.b64" in made.asm["ptx"] or ".v2.b32" in made.asm["ptx"]
        assert wide == (aligned and table.block > 0)


def products(name: str, tiles: Tiles | None = None) -> list[TritonKernel]:
    tiles = tiles or Tiles(128, 128, 64, 4, 3, *PRODUCTS[name][5:])
    torch.manual_seed(0)
    g = Graph()
    CASES[name][0](g)
    plan = schedule(lower_graph(g.fx, on_gpu=True), training=True)
    plan = joined(plan, {match: tiles for match in matches(plan)})
    assert not any(isinstance(step, LibraryCall) for step in plan.steps)
    return [triton_product(step, plan.buffers) for step in plan.steps if isinstance(step, TiledKernel)]


@pytest.mark.parametrize("name", [name for name in PRODUCTS if "depthwise" not in name])
def test_products_and_what_follows_are_one_kernel(name: str) -> None:
    for kernel in products(name):
        _, _, _, _, _, described, _, parts, ahead = (*PRODUCTS[name], *(0, 0, 1, 0)[len(PRODUCTS[name]) - 5 :])
        turned = "stored turned" in name
        assert kernel.body.count("tl.dot(") == 1 and kernel.body.count("tl.store(") == (parts == 1 or 2 * turned)
        assert kernel.body.count(".load([") == (2 - ahead.bit_count()) * described and kernel.body.count(".store([") == 2 * (parts > 1)


@pytest.mark.parametrize("name", ["floordiv", "remainder", "fmod"])
def test_a_division_of_integers_by_zero_is_eagers(name: str) -> None:
    def build(g: Graph, number: int = 0) -> None:
        g.output(divided := getattr(g, name)(g.input(torch.arange(100, dtype=torch.int32)), 5))
        divided.args = (divided.args[0], number)

    assert kernels(partial(build, number=5))
    with pytest.raises(CannotEmit, match="division by 0"):
        kernels(build)
    with pytest.raises(CannotEmit, match="division by 0"):
        kernels(partial(build, number=2**33))


def test_what_descriptors_cannot_say_is_refused() -> None:
    with pytest.raises(CannotEmit):  # rows of 200 bytes
        products("a product with bias and residual", Tiles(128, 128, 64, 4, 3, 1))
    with pytest.raises(CannotEmit):
        products("batched products", Tiles(128, 128, 64, 4, 3, 1))


def test_few_programs_walk_all_blocks() -> None:
    (kernel,) = products("batched products", Tiles(32, 64, 16, 4, 3, 0, 4))
    assert kernel.grid == (4,) and "in tl.range(lib.program(), 36, 4, flatten=True):" in kernel.body
    (kernel,) = products("batched products", Tiles(32, 64, 16, 4, 3, 0, 100))
    assert kernel.grid == (36,) and "tl.range" not in kernel.body


def _almost_gelu(g: Graph) -> Any:
    """Another number is multiplied than erf is computed of."""
    v, w = (g.convert_element_type(g.input(torch.randn(64).bfloat16()), torch.float32) for _ in range(2))
    return g.convert_element_type(g.mul(g.mul(w, 0.5), g.add(g.erf(g.mul(v, 0.7071067811865476)), 1.0)), torch.bfloat16)


def test_gelu_of_halves_is_short() -> None:
    (kernel,) = kernels(CASES["gelu of torch.bfloat16"][0])
    assert "lib.one_plus_erf_of_half(" in kernel.body and kernel.body.count("lib.gelu_of_bfloat16(") == 1 and "lib.erf" not in kernel.body
    (kernel,) = kernels(CASES["gelu of torch.float16"][0])
    assert kernel.body.count("lib.gelu_of_half(") == 1 and "gelu_of_bfloat16" not in kernel.body
    (kernel,) = kernels(lambda g: g.output(_almost_gelu(g)))
    assert "lib.gelu_of" not in kernel.body and kernel.body.count("lib.one_plus_erf_of_half(") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_of_every_half(dtype: torch.dtype) -> None:
    """At most twice the error that eager's own formula is allowed: half a unit, and what 1 + erf costs. The power of two is the device's, wrong by two units or not."""
    tree = ast.parse((ROOT / "magneto/inductor/codegen/triton_library.py").read_text())
    name = "gelu_of_bfloat16" if dtype is torch.bfloat16 else "gelu_of_half"
    (function,) = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == name]
    function.decorator_list.clear()
    wide, dense = torch.float64, torch.cat([torch.linspace(-14, 14, 200_001), torch.logspace(-38, 2, 4001), -torch.logspace(-38, 2, 4001)])
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).float()
    tl = SimpleNamespace(abs=torch.abs, minimum=lambda a, b: torch.where(a < b, a, b), fma=lambda a, b, c: (a.to(wide) * b + c).float())
    unit, least = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for off, x in itertools.product((-(2.0**-22), 0.0, 2.0**-22), (every, dense)):
        namespace: dict[str, Any] = {"tl": tl, "exp2_of_half": lambda v, off=off: (torch.exp2(v.to(wide)) * (1 + off * (v != -1))).float()}
        exec(compile(ast.Module([function], []), name, "exec"), namespace)
        ours = namespace[name](x).to(dtype)
        exact = -x.to(wide) * -0.5 * torch.special.erfc(-x.to(wide) * 0.5**0.5)
        half = torch.maximum(torch.exp2(exact.abs().log2().floor()) * unit / 2, torch.tensor(least / 2, dtype=wide))
        plain = exact.isfinite() & (exact.abs() <= torch.finfo(dtype).max)
        assert ((ours.to(wide) - exact).abs() <= 2 * (half + x.abs() * 2.0**-25))[plain].all()
        assert torch.equal(ours.isnan(), exact.isnan())
        assert torch.equal(ours[~plain].to(wide).nan_to_num(), exact[~plain].to(dtype).to(wide).nan_to_num())
        assert torch.equal(ours[x == 0].signbit(), x[x == 0].signbit())


TEXTS_OF_PRODUCTS = {
    "product": "a product with bias and residual", "product_of_integers": "a product with integers as weights, turned",
    "convolution": "a convolution whose channels end within a block", "convolution_of_colours": "a convolution of three colours", "depthwise": "a depthwise convolution",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS_OF_PRODUCTS)
def test_text_of_a_product(name: str) -> None:
    (kernel,) = products(TEXTS_OF_PRODUCTS[name])
    path = GOLDEN / f"{name}.py.txt"
    if os.environ.get("MAGNETO_UPDATE_GOLDEN"):
        path.write_text(written(kernel))
    assert written(kernel) == path.read_text()


@needs_triton
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_compile_for_hopper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    from magneto.inductor.runtime.triton_compile import box_of

    made = for_hopper(products(name)[0])
    assert ("wgmma.mma_async" in made.asm["ptx"]) == ("depthwise" not in name) and ("cp.async.bulk.tensor" in made.asm["ptx"]) == bool(
        made.metadata.tensordesc_meta
    )
    assert [(meta["block_size"], meta["swizzle"]) for meta in made.metadata.tensordesc_meta] == [
        box_of(d[-1]) for d in products(name)[0].described
    ]
    assert not getattr(made.metadata, "global_scratch_size", 0)


def test_products_that_others_read_stay_apart() -> None:
    def build(g: Graph, way: str) -> None:
        x, w = g.input(torch.randn(64, 64).half()), g.input(torch.randn(64, 64).half())
        y = g.call(torch.ops.aten.mm.default, x, w)
        z = g.tanh(g.add(y, g.transpose(y, (1, 0))) if way == "both ways" else y)
        g.output(*{"it leaves": (y, z), "summed": (g.sum(z, (1,)),)}.get(way, (z,)))

    for way in ("it leaves", "summed", "both ways"):
        g = Graph()
        build(g, way)
        assert not matches(schedule(lower_graph(g.fx), training=True)), way


def test_no_product_is_written_over_its_own_factors() -> None:
    """Blocks read whole rows of a factor, while others are stored: only what the loops behind the product read alone may be taken over."""
    g = Graph()
    x, y = g.tanh(g.input(torch.randn(64, 64).half())), g.exp(g.input(torch.randn(64, 64).half()))
    g.output(
        g.add(g.tanh(g.call(torch.ops.aten.mm.default, x, g.add(y, 1.0))), x), g.mul(g.tanh(g.call(torch.ops.aten.mm.default, x, y)), y)
    )
    plan = schedule(lower_graph(g.fx), training=True)
    found = matches(plan)
    assert len(found) == 2 and plan_memory(plan, True, 0).in_place
    assert not plan_memory(joined(plan, {match: Tiles(64, 64, 64, 4, 3) for match in found}), True, 0).in_place


def test_operands_are_computed_where_that_is_the_same_and_cheap() -> None:
    """Ahead of the product, in: what may not wait for it, or is no kernel of the operand alone."""

    def build(g: Graph, way: str) -> None:
        mm, w = torch.ops.aten.mm.default, g.input(torch.randn(64, 64).half())
        h = g.tanh(g.input(torch.randn(64, 80 if way == "a part" else 64).half()))
        for k in range(CHEAP if way == "long" else 0):
            h = g.tanh(g.mul(h, k + 2.0))
        if way == "summed":
            h = g.mul(h, g.broadcast_in_dim(g.sum(h, (1,)), (64, 64), (0,)))
        found = [g.call(mm, g.slice(h, (0, 0), (64, 64), (1, 1)) if way == "a part" else h, h if way == "twice" else w)]
        if way == "read again":
            found.append(g.call(mm, h, w))
        g.output(*found, *([h] * (way == "it leaves")))

    for way in ("", "long", "summed", "a part", "twice", "it leaves", "read again"):
        g = Graph()
        build(g, way)
        found = matches(schedule(lower_graph(g.fx), training=True))
        assert [match.ahead for match in found] == ([(0, None)] if not way else []), way


def test_large_memory_is_indexed_in_64_bits() -> None:
    from magneto.graph.meta import TensorMeta

    g = Graph()
    g.output(g.add(g.input(torch.randn(8)), 1.0))
    for node in g.fx.nodes:
        if node.op != "output":
            node.meta["val"] = TensorMeta.contiguous((3 << 30,), torch.float32)
    plan = schedule(lower_graph(g.fx))
    (kernel,) = [triton_kernel(step, plan.buffers) for step in plan.steps if isinstance(step, FusedKernel)]
    assert "tl.program_id(0).to(tl.int64)" in kernel.body


@pytest.mark.parametrize("shape", [(1 << 20, 8192), (8192, 1 << 20), (16, 1 << 28)])
def test_what_loops_walk_of_large_memory_is_indexed_in_64_bits(shape: tuple[int, int]) -> None:
    from magneto.graph.meta import TensorMeta

    g = Graph()
    x = g.input(torch.randn(2, 2))
    g.output(g.call(torch.ops.aten.cumsum.default, x, 0), g.sum(x, (0,)), g.amax(x, (1,)))
    for node in g.fx.nodes:
        if node.op != "output":
            kept = {"amax": shape[:1], "sum": shape[1:]}.get(getattr(node.target, "name", ""), shape)
            node.meta["val"] = TensorMeta.contiguous(kept, torch.float32)
    plan = schedule(lower_graph(g.fx, on_gpu=True), training=True)
    found = [triton_kernel(step, plan.buffers) for step in plan.steps if isinstance(step, FusedKernel)]
    assert len(found) == 2  # sums in order and sums walk the same columns
    for kernel in found:
        for line in kernel.body.split("\n"):
            assert "int64" in line or not line.strip().startswith(("r =", "x =", "y =")), line


def test_equal_computations_have_equal_text() -> None:
    def build(g: Graph) -> None:
        x, found = g.input(torch.randn(12, 16)), []
        for _ in range(3):
            x = g.exp(g.call(torch.ops.aten.mm.default, x, g.input(torch.randn(16, 16))))
            found.append(g.sum(x, (1,)))
        g.output(*found, x)

    assert len(set(kernels(build))) == 1


def test_a_matrix_is_not_walked_both_ways_at_once() -> None:
    """Sums of rows and of columns have as many elements, but no element in common at the same time."""
    g = Graph()
    x = g.input(torch.randn(256, 256))
    g.output(g.sum(x, (1,)), g.sum(x, (0,)), g.amax(x, (0,)))
    for node in g.fx.nodes:
        if node.op != "output":
            node.meta["val"] = node.meta["val"].with_(device=torch.device("cuda", 0))
    steps = schedule(lower_graph(g.fx), training=True).steps
    assert [len(step.stored) for step in steps if isinstance(step, FusedKernel)] == [1, 2]


def on_a_gpu(build: Callable[[Graph], Any]) -> list[TritonKernel]:
    g = Graph()
    build(g)
    with as_on_a_gpu():
        plan = schedule(lower_graph(g.fx, on_gpu=True), training=True)
    return [triton_kernel(step, plan.buffers) for step in plan.steps if isinstance(step, FusedKernel)]


def test_threads_hold_few_elements_where_operands_are_read_element_by_element() -> None:
    """Stencils and the elements of windows; one addition of rolled rows reads whole vectors."""
    for build in (lambda g, x: neighbours(g, x), lambda g, x: windows(g, x, 4)):
        (kernel,) = on_a_gpu(lambda g, build=build: g.output(build(g, g.input(torch.empty(2048, 4096)))))  # type: ignore[misc]
        assert (kernel.constants, kernel.warps) == ((("XBLOCK", 512),), 8)
    (kernel,) = on_a_gpu(lambda g: g.output(g.add(x := g.input(torch.empty(2048, 4096)), rolled(g, x, 1, 0))))
    assert (kernel.constants, kernel.warps) == ((("XBLOCK", 1024),), 4)


def test_rolled_rows_are_read_without_conditions() -> None:
    (kernel,) = on_a_gpu(lambda g: g.output(neighbours(g, g.input(torch.empty(64, 128)))))
    assert kernel.body.count("tl.load(") == 9 and "mask=" not in kernel.body and "%" not in kernel.body.split("x_1 = ")[1].split("\n", 1)[1]


def test_patches_are_turned_in_tiles() -> None:
    (kernel,) = on_a_gpu(lambda g: g.output(patches(g, g.input(torch.empty(64, 224, 224)), 16)))
    assert kernel.grid == (7, 64 * 256 // 32) and dict(kernel.constants) == {"YBLOCK": 32, "XBLOCK": 32}


def test_a_looked_up_row_is_checked_once() -> None:
    """Not once for each element, nor for each piece that reads it."""

    def build(g: Graph) -> None:
        x, i, j = (
            g.input(torch.empty(500, 64)),
            g.input(torch.zeros(4096, dtype=torch.int64)),
            g.input(torch.zeros(4096, dtype=torch.int64)),
        )
        a, b = g.index_select(x, 0, i), g.index_select(x, 0, j)
        g.output(g.cat([a, b, g.sub(a, b)], 1))

    (kernel,) = on_a_gpu(build)
    assert kernel.body.count("tl.device_assert(") == 2 and "| ~(" not in kernel.body


def test_a_lookup_under_a_condition_on_data_is_checked_under_it() -> None:
    """Elsewhere its place may be none."""

    def build(g: Graph) -> None:
        x, i = g.input(torch.empty(50)), g.input(torch.zeros(4096, dtype=torch.int64))
        g.output(g.pad(g.index_select(x, 0, i), (3,), (0,), 0.0))

    (kernel,) = on_a_gpu(build)
    assert kernel.body.count("| ~(") == 1  # the place is read under the condition itself


@pytest.mark.parametrize(("length", "numerics", "shared"), [(1024, "fast", True), (49, "fast", False), (1024, "eager", False)])
def test_quotients_of_long_rows(length: int, numerics: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of a divisor that a thread's elements share is computed once; not where quotients are to have eager's bits down to the smallest."""
    monkeypatch.setattr(config, "numerics", numerics)

    def build(g: Graph) -> None:
        x = g.input(torch.empty(4096, length))
        g.output(g.div(x, g.broadcast_in_dim(g.sum(x, (1,)), (4096, length), (0,))), g.div(x, g.input(torch.empty(4096, length))))

    text = "\n".join(k.body for k in on_a_gpu(build))
    assert text.count("lib.divide(") == shared and text.count("tl.div_rn(") == 2 - shared


def test_threads_of_narrow_elements() -> None:
    """Bytes: as many threads as for wider elements; halves: larger blocks. Mirrored elements, and fields of records, one by one."""

    def block(build: Callable[[Graph], Any]) -> tuple[int, int]:
        (kernel,) = on_a_gpu(lambda g: g.output(build(g)))
        return dict(kernel.constants)["XBLOCK"], kernel.warps

    assert block(lambda g: g.bitwise_and(g.input(torch.empty(1 << 22, dtype=torch.uint8)), 15)) == (1024, 4)
    assert block(lambda g: g.mul(g.input(torch.empty(1 << 22, dtype=torch.bfloat16)), 2.0)) == (2048, 8)
    assert block(lambda g: g.mul(g.input(torch.empty(1 << 22)), 2.0)) == (1024, 4)

    def mirrored(g: Graph) -> Any:
        x, place = g.input(torch.empty(1 << 10, 1 << 12)), g.iota(1 << 12, torch.int64, torch.device("cpu"))
        moved = [g.index_select(x, 1, g.abs(g.sub(place, k))) for k in (1, 2, 3, 4)]
        return g.add(g.add(*moved[:2]), g.add(*moved[2:]))

    assert block(mirrored) == (512, 8)


def test_rows_of_coordinates_are_written_out() -> None:
    from magneto.inductor.schedule.unroll import unrolled

    def plan(rows: int, dtype: torch.dtype) -> list[TritonKernel]:
        g = Graph()
        x = g.input(torch.empty(rows, 3, dtype=dtype))
        g.output(g.sqrt(g.sum(g.mul(x, x), (1,))))
        with as_on_a_gpu():
            made = unrolled(schedule(lower_graph(g.fx, on_gpu=True), training=True))
        return [triton_kernel(step, made.buffers) for step in made.steps if isinstance(step, FusedKernel)]

    (kernel,) = plan(1 << 20, torch.float32)
    assert "RBLOCK" not in dict(kernel.constants) and (dict(kernel.constants)["XBLOCK"], kernel.warps) == (512, 8)
    assert all("RBLOCK" in dict(plan(*other)[0].constants) for other in ((1 << 10, torch.float32), (1 << 20, torch.bfloat16)))


def test_joined_tensors_do_not_compute_each_other() -> None:
    """What many functions compute lies in memory before it is joined; what takes few of them is computed where it is joined."""

    def build(g: Graph, pieces: int) -> None:
        x = g.input(torch.empty(4096))
        g.output(g.cat([g.reshape(g.mul(g.sin(g.mul(x, float(k))), g.cos(x)), (4096, 1)) for k in range(1, pieces + 1)], 1))

    few, many = on_a_gpu(partial(build, pieces=2)), on_a_gpu(partial(build, pieces=8))
    assert len(few) == 1 and len(many) == 2
    assert [k.body.count("lib.sin(") for k in many] == [8, 0]


def test_one_quotient_for_several_conditions() -> None:
    """What is read anyway is computed once, wherever it is used; quotients of short rows by one number share its inverse where there are several."""

    def build(g: Graph) -> None:
        q, c = g.input(torch.empty(4096, 64)), g.input(torch.empty(4096, 32))
        n = g.div(q, g.broadcast_in_dim(g.sqrt(g.sum(g.mul(q, q), (1,))), (4096, 64), (0,)))
        first, second = g.slice(n, (0, 0), (4096, 32), (1, 1)), g.slice(n, (0, 32), (4096, 64), (1, 1))
        g.output(g.cat([g.sub(g.mul(first, c), second), g.add(g.mul(second, c), first)], 1))

    (kernel,) = on_a_gpu(build)
    assert kernel.body.count("lib.divide(") == 3 and "div_rn" not in kernel.body
