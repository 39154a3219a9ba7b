"""Who computes products and convolutions with `max_autotune`, by times that the test makes up: no device is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from magneto.base.errors import MagnetoWarning
from magneto.base.flags import config
from magneto.inductor import cuda
from magneto.inductor.halves import Halves
from magneto.inductor.loops.ir import LibraryCall
from magneto.inductor.lower import lower_graph
from magneto.inductor.made import Made, whole
from magneto.inductor.runtime import tuning
from magneto.inductor.schedule.memory import plan_memory
from magneto.inductor.schedule.product import TiledKernel, Tiles, joined, matches
from magneto.inductor.schedule.schedule import Schedule, schedule
from tests.inductor.codegen.triton_cases import CASES, PRODUCTS, joining
from tests.inductor.codegen.triton_convolutions import convolved, last
from tests.inductor.lower.prim_graphs import Graph

CPU = torch.device("cpu")
NAMES = ("a product with bias and residual", "a convolution of single places", "a convolution of three colours", "a convolution of float32", "products of float32", "a depthwise convolution", "convolutions with what cuDNN does behind them")  # fmt: skip


def planned(build: Callable[[Graph], Any]) -> Schedule:
    g = Graph()
    build(g)
    return schedule(lower_graph(g.fx, on_gpu=True), training=True)


class Timer:
    """In place of the device. `ours`, `library`: milliseconds; what is not the library's call has been launched here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.ours, self.library, self.asked = 1.0, 2.0, 0
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "made up")
        monkeypatch.setattr(tuning, "launchers", lambda texts, device, leniently=False: {text: self.launch for text in texts})
        monkeypatch.setattr(tuning, "begin", lambda text, device: None)
        monkeypatch.setattr(tuning, "_milliseconds", self.time)
        monkeypatch.setattr(config, "cache_dir", str(tmp_path))

    def launch(self, *tensors: torch.Tensor) -> None:
        self.launched += 1

    def time(self, runs: Sequence[Callable[[], Any]], device: torch.device) -> float:
        self.asked += 1
        self.launched = 0
        for run in runs[:1]:
            run()
        return self.ours if self.launched and len(runs) == 1 else self.library


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Timer:
    return Timer(monkeypatch, tmp_path)


def of_ours(plan: Schedule) -> list[TiledKernel]:
    return [step for step in plan.steps if isinstance(step, TiledKernel)]


@pytest.mark.parametrize("name", NAMES)
def test_the_faster_one_computes_and_is_remembered(name: str, timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(CASES[name][0])
    monkeypatch.setattr(tuning, "_library", lambda call, memory: lambda: None)  # the CPU has no cuDNN
    timer.ours = 1.99  # not worth another rounding order
    assert tuning.tuned(plan, CPU) is plan
    asked, timer.ours = timer.asked, 0.5
    assert asked and tuning.tuned(plan, CPU) is plan and timer.asked == asked, "what was found is on disk"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "another")
    ours = of_ours(tuning.tuned(plan, CPU))
    assert len(ours) == len(matches(plan)) and timer.asked > asked
    assert {step.tiles for step in ours} <= {tiles for match in matches(plan) for tiles in tuning.candidates(CPU, match)}


def test_the_library_runs_as_the_plan_would_run_it(timer: Timer) -> None:
    """Its convolution makes memory of its own, which the kernel behind it reads."""
    plan = planned(CASES["a convolution of three colours"][0])
    (match,) = matches(plan)
    times = tuning.times_of(plan, match, CPU)
    assert times.pop(None) == timer.library and 1 < len(times) < len(tuning.candidates(CPU, match))  # not those of 256 columns


def test_what_the_device_refuses_is_no_candidate(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    def time(runs: Sequence[Callable[[], Any]], device: torch.device) -> float:
        if len(runs) == 1:
            raise RuntimeError("too many resources requested for launch")
        return 1.0

    plan = planned(CASES["a convolution of three colours"][0])
    monkeypatch.setattr(tuning, "_milliseconds", time)
    assert tuning.times_of(plan, matches(plan)[0], CPU) == {None: 1.0} and tuning.tuned(plan, CPU) is plan


def test_without_memory_or_time_the_library_serves(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    plan = planned(CASES["a convolution of three colours"][0])
    monkeypatch.setattr(tuning, "SECONDS", -1.0)
    assert tuning.tuned(plan, CPU) is plan and not timer.asked
    monkeypatch.setattr(tuning, "SECONDS", 60.0)
    monkeypatch.setattr(tuning, "_filled", full)
    with pytest.warns(MagnetoWarning, match="W005"):
        assert tuning.tuned(plan, CPU) is plan


def test_which_convolutions_are_found() -> None:
    """Channels-last, one group, large enough; single places are a product of matrices where all are walked as they lie."""

    def found(x: torch.Tensor, w: torch.Tensor, **sizes: Any) -> Any:
        g = Graph()
        g.output(convolved(g, g.input(x), g.input(w), **sizes))
        return matches(planned_of(g))

    def planned_of(g: Graph) -> Schedule:
        return schedule(lower_graph(g.fx, on_gpu=True), training=True)

    x, w = last(2, 32, 9, 9), last(32, 32, 3, 3)
    (match,) = found(x, w)
    assert match.of.window is not None and match.of.a.shape == (2, 9, 9, 32) and match.result.shape == (98, 32) and not match.of.precision
    (match,) = found(x, last(48, 32, 1, 1))
    assert match.of.window is None and (match.of.a.shape, match.of.b.shape) == ((162, 32), (32, 48))
    for sizes in ({"stride": (2, 1)}, {"padding": (0, 1)}):
        (match,) = found(x, last(48, 32, 1, 1), **sizes)
        assert match.of.window is not None
    (match,) = found(x[:, :, 1:], last(48, 32, 1, 1))
    assert match.of.window is not None, "rows of an image that is part of another do not follow each other"
    assert not found(x.contiguous(), w.contiguous()) and not found(x.double(), w.double()) and not found(x, last(8, 32, 3, 3))
    assert not found(x[:, :, :5, :5], w)


@pytest.mark.parametrize("allowed", [True, False])
def test_float32_is_multiplied_as_torch_is_told(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    plan = planned(CASES["a convolution of float32"][0])
    (match,) = matches(plan)
    assert match.of.precision == ("tf32" if allowed else "ieee")
    assert tuning.candidates(CPU, match) == tuple(Tiles(*numbers) for numbers in (tuning.FLOATS if allowed else tuning.EXACT))


@pytest.mark.parametrize("allowed", [True, False])
def test_products_of_float32_lose_nothing(allowed: bool, request: pytest.FixtureRequest) -> None:
    """Each number is two of TF32; where the library may round them to one, and where eager's own numbers are wanted, it computes."""
    request.addfinalizer(lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False))
    torch.backends.cuda.matmul.allow_tf32 = allowed
    found = matches(planned(CASES["products of float32"][0]))
    assert [match.of.precision for match in found] == [] if allowed else ["tf32x3"] * 2
    assert all(tuning.candidates(CPU, match) == tuple(Tiles(*numbers) for numbers in tuning.IN_PARTS) for match in found)
    with config.patch(numerics="eager"):
        assert not matches(planned(CASES["products of float32"][0]))


@pytest.mark.parametrize("wanted", [True, False])
def test_weights_are_laid_out_for_kernels_of_ours(wanted: bool) -> None:
    g = Graph()
    x, w = g.input(last(2, 32, 9, 9)), g.input(torch.randn(32, 32, 3, 3).half())
    bias = g.input(torch.randn(32).half())
    g.output(convolved(g, x, w, bias=bias), g.call(torch.ops.aten.convolution.default, x, w, bias, (1, 1), (0, 0), (1, 1), True, (0, 0), 1))
    with config.patch(max_autotune=wanted):
        one, turned = [node for node in lower_graph(g.fx, on_gpu=True).nodes if isinstance(node, LibraryCall)]
    assert one.args[1].strides == ((288, 1, 96, 32) if wanted else (288, 9, 3, 1)) and turned.args[1].strides == (288, 9, 3, 1)
    assert one.args[2] is not None and one.buffers[0].strides == (1568, 1, 224, 32)


@pytest.mark.parametrize("name", ["a convolution of float32", "a convolution of three colours"])
def test_what_is_tf32_runs_only_while_torch_allows_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(cuda, "gather", joining(*PRODUCTS[name]))
    g = Graph()
    CASES[name][0](g)
    made = Made(CPU, cuda._planned(g.fx, "graph", {}, CPU), Halves((), ((False, 0),), (None,), (), (), ()), {}, True, None)
    ours = lambda *inputs: "ours"  # noqa: E731
    run = whole(made, (ours, None), (None, None), "graph", None, lambda done: lambda *inputs: "plain")
    assert (run is ours) == ("float32" not in name)
    assert run() == "ours"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert run() == ("plain" if "float32" in name else "ours")


@pytest.mark.parametrize("groups", [1, 64])
def test_no_convolution_is_written_over_its_own_image(groups: int) -> None:
    """Other blocks still read it. The library has read it when the loops behind it write."""

    def build(g: Graph) -> None:
        h, w = g.tanh(g.input(last(2, 64, 8, 8))), g.input(last(64, 64 // groups, 3, 3))
        y = g.call(torch.ops.aten.convolution.default, h, w, None, (1, 1), (1, 1), (1, 1), False, (0, 0), groups)
        g.output(g.add(y, h))

    plan = planned(build)
    (match,) = matches(plan)
    assert match.kernel != match.call and plan_memory(plan, True, 0).in_place
    tiles = Tiles(16, 64, 1, 4, 0) if groups > 1 else Tiles(64, 64, 64, 4, 3)
    assert not plan_memory(joined(plan, {match: tiles}), True, 0).in_place
