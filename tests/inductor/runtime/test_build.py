"""Building kernels: equal texts once, second processes not at all, machines without a compiler in eager."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

import magneto
from magneto.base.events import counters, events
from magneto.base.flags import config
from magneto.inductor.codegen.cpp_preamble import preamble
from magneto.inductor.compile import compile_graph
from magneto.inductor.runtime import build as building
from magneto.inductor.runtime.build import KernelText, build
from magneto.inductor.runtime.compiler import CompileError, Compiler, NoCompiler, find_compiler, vector_math_level
from tests.inductor.lower.prim_graphs import Graph


def kernel(number: int) -> KernelText:
    return KernelText.of(f"int SYMBOL(void *const *p) {{ return {number}; }}\n", preamble(vector_math_level()))


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known to this process, and the store is empty."""
    for name in ("_addresses", "_seen", "_generals"):
        monkeypatch.setattr(building, name, {})
    config.cache_dir = str(tmp_path)


def call(address: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address)(None))


def test_equal_kernels_are_compiled_once() -> None:
    found = build([kernel(7), kernel(8), kernel(7)], preamble(vector_math_level()))
    assert isinstance(found, dict) and {call(a) for a in found.values()} == {7, 8}
    assert counters()["kernels_compiled"] == 2
    build([kernel(7)], preamble(vector_math_level()))
    assert counters()["kernels_reused"] == 1


def test_the_store_serves_a_later_process(monkeypatch: pytest.MonkeyPatch) -> None:
    build([kernel(n) for n in range(9)], preamble(vector_math_level()))
    monkeypatch.setattr(building, "_addresses", {})  # what a new process knows
    monkeypatch.setattr(building, "compile_units", None)
    found = build([kernel(n) for n in range(9)], preamble(vector_math_level()))
    assert isinstance(found, dict) and sorted(call(a) for a in found.values()) == list(range(9))
    assert counters()["kernels_from_store"] == 9


def test_a_damaged_library_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build([kernel(100)], preamble(vector_math_level()))
    units = [p for p in (tmp_path / "unit").rglob("*") if p.is_file()]
    units[0].unlink()  # a new file in its place: the library is loaded here, and writing into it would end this process with SIGBUS
    units[0].write_bytes(b"garbage")
    monkeypatch.setattr(building, "_addresses", {})
    with pytest.warns(UserWarning, match="damaged"):
        found = build([kernel(100)], preamble(vector_math_level()))
    assert isinstance(found, dict)


def test_flags_enter_the_key() -> None:
    compiler = find_compiler()
    assert isinstance(compiler, Compiler)
    first = compiler.key()
    with config.patch(compiler_flags="-DX=1"):
        assert compiler.key() != first
    with config.patch(march=""):
        assert compiler.key() != first and "-march=" not in " ".join(compiler.flags())
    assert "-ffast-math" not in compiler.flags()


def test_a_refused_text_is_a_value() -> None:
    result = build([KernelText.of("int SYMBOL( {", "")], "")
    assert isinstance(result, CompileError) and "error" in result.output


def graph() -> Graph:
    g = Graph()
    g.output(g.tanh(g.add(g.input(torch.randn(5)), 1.0)))
    return g


def test_without_a_compiler_graphs_run_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert isinstance(find_compiler(), NoCompiler)
    g = graph()
    with pytest.warns(UserWarning, match="no C"):
        compiled = compile_graph(g.fx, "first")
    assert torch.equal(compiled(*g.inputs)[0], g.expected[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_graph(graph().fx, "second")
    assert [e.graph for e in events("fallback")] == ["first", "second"]


def test_a_missing_compiler_is_named() -> None:
    with config.patch(compiler="no-such-compiler"):
        found = find_compiler()
    assert isinstance(found, NoCompiler) and "no-such-compiler" in found.reason


PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from tests.inductor.lower.prim_graphs import Graph
from magneto.inductor.compile import compile_graph
torch.manual_seed(0)
g = Graph()
x = g.input(torch.randn(30, 40))
g.output(g.sum(g.exp(x), (1,)), g.tanh(x))
found = compile_graph(g.fx)(*g.inputs)
torch.testing.assert_close(found[0], g.expected[0])
from magneto.base.events import counters
print(int(counters().get("kernels_compiled", 0)), int(counters().get("kernels_from_store", 0)))
"""


def test_two_processes_at_once_and_one_later(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    env = {**os.environ, "MAGNETO_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", PROGRAM, root]
    running = [subprocess.Popen(command, cwd=root, env=env) for _ in range(2)]
    assert [p.wait(timeout=100) for p in running] == [0, 0]
    later = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True, timeout=100)
    compiled, stored = map(int, later.stdout.split())
    assert compiled == 0 and stored >= 1


def test_threads_compile_at_the_same_time() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            g = graph()
            assert torch.allclose(compile_graph(g.fx)(*g.inputs)[0], g.expected[0])
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and counters()["kernels_compiled"] == 1


def test_kernels_that_turn_squares_stand_together() -> None:
    """The function that they call is compiled in one unit, not in each."""
    bodies = [
        "int SYMBOL(void *const *p) {{ {} {} return {}; }}".format("g(p);" * (1000 + 10 * k), "mg_tile_u32(p);" * (k % 4 == 0), k)
        for k in range(12)
    ]
    with config.patch(compile_workers=4):
        units = building._units([KernelText.of(body, "") for body in bodies], {})
    assert len(units) == 4 and [source.count("SYMBOL") for _, source in units] == [0] * 4
    assert [source.count("mg_tile_u32") for _, source in units] == [3, 0, 0, 0]
    assert max(len(source) for _, source in units) < 2 * min(len(source) for _, source in units)
    assert sorted(kernel.body for unit, _ in units for kernel in unit) == sorted(bodies)


def test_units_that_round_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's rounding to float16 is compiled where it is called, and there it is the machine's."""
    sources: list[str] = []
    compile_units = building.compile_units
    monkeypatch.setattr(building, "compile_units", lambda compiler, texts: sources.extend(texts) or compile_units(compiler, texts))
    body = 'int SYMBOL(void *const *p) {{ f32 *x = p[0]; _Pragma("omp simd") for (i64 i = 0; i < 40; i++) x[i] = {}(x[i]); return 0; }}\n'
    texts = [KernelText.of(body.format(name), preamble(vector_math_level())) for name in ("mg_machine_f16", "mg_round_f16")]
    x = torch.linspace(-70000, 70000, 40)
    results = []
    for text in texts:
        made = build([text], preamble(vector_math_level()))
        assert isinstance(made, dict)
        results.append(x.clone())
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))(made[text.hash])((ctypes.c_void_p * 1)(results[-1].data_ptr()))
    assert [source.startswith("#define MG_ROUNDS") for source in sources] == [True, False]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], x.half().float())


def merged(x: torch.Tensor) -> torch.Tensor:
    """Four neighbours as one row, normalised: guarded loads in every loop."""
    rows = torch.cat([x[:, i::2, k::2] for i in range(2) for k in range(2)], -1)
    return torch.nn.functional.layer_norm(rows, rows.shape[-1:])


def test_loops_over_what_was_concatenated_are_vectorised(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = find_compiler()
    if not isinstance(compiler, Compiler) or compiler.kind != "gcc":
        pytest.skip("asks gcc what it vectorised")
    sources: list[str] = []
    compiling = building.compile_units

    def kept(compiler: Compiler, texts: list[str]) -> list[bytes | CompileError]:
        sources.extend(texts)
        return compiling(compiler, texts)

    monkeypatch.setattr(building, "compile_units", kept)
    inputs = torch.randn(2, 16, 16, 96), torch.randn(2, 8, 8, 192)
    with torch.no_grad():
        results = magneto.compile(lambda a, b: (merged(a), merged(b)))(*inputs)
        torch.testing.assert_close(results, tuple(map(merged, inputs)))
    loops, vectorised = 0, set()
    for i, source in enumerate(sources):
        path = Path(config.cache_dir, f"{i}.c")
        path.write_text(source)
        command = [compiler.path, *compiler.flags(), "-fopt-info-vec-optimized", "-S", str(path), "-o", os.devnull]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        vectorised |= {(i, int(line.split(":")[1])) for line in told.splitlines() if "loop vectorized" in line}
        heads = [k + 2 for k, line in enumerate(source.split("\n")) if line.startswith("#pragma omp simd")]
        loops += len(heads)
        assert all((i, head) in vectorised or (i, head + 1) in vectorised for head in heads)
    assert loops >= 3
