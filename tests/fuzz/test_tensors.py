"""The fuzzer of tensor programs in CI: a bounded set of seeds, and whether it can fail."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import tensors
from tests.fuzz.tensor_grammar import LARGE, UNORDERED, WIDE, Builder, Program, on_device, program_of
from tests.fuzz.tensors import VARIANTS, check, check_sizes, difference, outcome

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("backend, first, count, size", [("aot_eager", 0, 40, 8), ("aot_eager", 100, 10, 16), ("inductor", 0, 12, 8)])
def test_programs(backend: str, first: int, count: int, size: int) -> None:
    for seed in range(first, first + count):
        program = program_of(seed, size)
        found = check(program, backend, bits=False, variants=list(VARIANTS))
        assert found is None, f"seed {seed}: {program.specs}\n{program.source()}{found}"


@pytest.mark.parametrize("backend, seeds", [("aot_eager", range(730000, 730006)), ("inductor", [720023, 720031, *range(720000, 720003)])])
def test_sizes_that_vary(backend: str, seeds: range) -> None:
    for seed in seeds:
        program = program_of(seed, 6)
        found = check_sizes(program, backend)
        assert found is None, f"seed {seed}: {program.specs}\n{program.source()}{found}"


def test_programs_are_the_same_each_time_and_not_trivial() -> None:
    programs = [program_of(seed) for seed in range(40)]
    assert [program.source() for program in programs] == [program_of(seed).source() for seed in range(40)]
    text = "".join(program.source() for program in programs)
    assert all(word in text for word in ("_(", "] = ".replace(" ", ""), ".sum(", "@", "torch.cat", ".transpose("))
    assert sum(bool(outcome(program.function(), program)["gradients"]) for program in programs) > 00


def test_wide_and_large_programs() -> None:
    words = {"x": "a0", "y": "a1", "d": 0, "f": 1, "n": 3, "k": 1, "c": 2, "rank": 2, "order": [1, 0]}
    for template in WIDE.split():
        compile(template.format(**words), template, "eval")
    programs = [program_of(seed, 4, wide=True, large=True) for seed in range(5)]
    new = {template.split("{x}")[-1] for template in WIDE.split()}
    assert sum(any(word in program.source() for word in new if len(word) > 8) for program in programs) > 0
    assert all(shape in LARGE[len(shape)] for program in programs for shape, *_ in program.specs if 1 not in shape)
    assert check(program_of(900_001, 4, wide=True), "aot_eager") is None


def test_programs_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_device("with torch.autocast('cpu', torch.half): v = torch.tensor(2) + x", "cuda") == (
        "with torch.autocast('cuda', torch.half): v = torch.tensor(2, device='cuda') + x"
    )
    programs = [program_of(seed, 6, wide=True, device="cpu") for seed in range(960_000, 960_004)]
    assert not any(one.startswith(UNORDERED) for table in Builder(0, device="cpu").expressions for one in table)
    tried: list[str] = []
    program = Program(1, [((4,), "float32", "", False)], ["v = a0[3:][0]"], ["v"], "cpu")
    monkeypatch.setattr(tensors, "outcome", lambda fn, program, *rest: tried.append(program.device) or outcome(fn, program, *rest))
    assert check_sizes(program, "aot_eager") is None and tried.index("cpu") == tried.count("") == 7
    assert any("device='cpu'" in program.source() for program in programs)
    for program in programs:
        assert check(program, "aot_eager", False, ["", "no_grad"], (0, 2, 4)) is None


def test_results_that_a_later_call_changes_are_found() -> None:
    memory = torch.zeros(3)
    program = Program(1, [((3,), "float32", "", False)], ["v = a0 * 2"], ["v"])
    found = check(program, lambda graph, _: lambda *inputs: [memory.copy_(graph(*inputs)[0])], others=(0, 2))  # type: ignore[arg-type]
    assert found is not None and "when they were returned" in found


@pytest.mark.parametrize(
    "other",
    [
        "    a0.add_(1)\n    v = a0 * 2\n    return v,",
        "    v = a0 * 2.001\n    return v,",
        "    v = (a0 * 2).t().contiguous().t()\n    return v,",
        "    v = a0.detach() * 2\n    return v,",
        "    v = a0 * 2 + torch.rand(()) * 0\n    return v,",
        "    a0.sin_()\n    return a0 * 2,",
    ],
)
def test_differences_are_found(other: str) -> None:
    program = Program(0, [((3, 4), "float32", "", True)], ["v = a0 * 2"], ["v"])
    expected = outcome(program.function(), program)
    assert difference(expected, outcome(program.function(), program), 0) is None
    namespace = {"torch": torch}
    exec("def fn(a0):\n" + other, namespace)
    assert difference(expected, outcome(namespace["fn"], program), 1e-6) is not None  # type: ignore[arg-type]
