"""Compiled graphs on disk: found by equal graphs only, and never trusted further than they can be read."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import magneto
from magneto.base import events
from magneto.base.flags import config
from magneto.graph import TensorMeta
from magneto.inductor.runtime import build, kept
from magneto.inductor.runtime.calls import FAST, call_named, name_of_call
from magneto.inductor.runtime.store import store

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _store(tmp_path: Path) -> Iterator[None]:
    with config.patch(cache_dir=str(tmp_path / "store"), verify=False, log=0):
        yield


def _network() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, bias=False), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 3)
    )
    return net, torch.optim.Adam(net.parameters(), 0.01)


def _step(net: torch.nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimiser.zero_grad()
    loss = torch.log_softmax(net(x), 1)[:, 0].sum()
    loss.backward()
    optimiser.step()
    return loss.detach()


def _train(step: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    net, optimiser = _network()
    generator = torch.Generator().manual_seed(1)
    losses = [step(net, optimiser, torch.randn(2, 2, 6, 6, generator=generator)) for _ in range(3)]
    return [*losses, *net.state_dict().values()]


def _counted(name: str) -> int:
    return int(events.counters().get(name, 0))


def _lowered() -> int:
    return events.timings()["lower"].calls if "lower" in events.timings() else 0


def _again(run: Callable[[], Any]) -> Any:
    """`run` as a process would that finds what this one has left."""
    magneto.reset()
    events.reset()
    return run()


def test_a_step_is_lowered_once() -> None:
    first = _train(magneto.optimize("inductor", nopython=True)(_step))
    assert _lowered() == 1 and _counted("graphs_from_store") == 0
    again = magneto.optimize("inductor", nopython=True)(_step)
    second = _again(lambda: _train(again))
    assert _lowered() == 0 and _counted("graphs_from_store") == 1 and _counted("kernels") > 0
    assert any("int k_" in text for text in magneto.inspect(again).kernels)
    plain = _train(_step)
    for one, two, three in zip(first, second, plain, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three, rtol=1e-4, atol=1e-5)


def _loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.cumsum(x @ w, 1)).sum()


def _gradient(fn: Callable[..., torch.Tensor]) -> torch.Tensor:
    w = torch.full((3, 4), 0.25, requires_grad=True)
    fn(torch.arange(6.0).reshape(2, 3), w).backward()
    assert w.grad is not None
    return w.grad


def test_both_halves_are_found() -> None:
    first = _gradient(magneto.optimize("inductor", nopython=True)(_loss))
    assert _lowered() == 2
    second = _again(lambda: _gradient(magneto.optimize("inductor", nopython=True)(_loss)))
    assert _lowered() == 0 and _counted("graphs_from_store") == 2
    assert torch.equal(first, second)
    torch.testing.assert_close(first, _gradient(_loss))


def _sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2 + 1


def _compiled_sine() -> torch.Tensor:
    return magneto.optimize("inductor", nopython=True)(_sine)(torch.arange(5.0))  # type: ignore[no-any-return]


def _entries() -> list[Path]:
    return [path for path in (Path(store().root) / "graph").rglob("*") if path.is_file()]


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/magneto-must-not-exist",)


@pytest.mark.parametrize(
    "payload",
    [b"", b"garbage", zlib.compress(b"garbage"), zlib.compress(pickle.dumps((1, 2))), zlib.compress(pickle.dumps(_Evil()))],
    ids=["empty", "garbage", "no_pickle", "other", "evil"],
)
def test_entries_that_cannot_be_read(payload: bytes) -> None:
    _compiled_sine()
    (entry,) = _entries()
    store().put("graph", entry.name, payload)
    found = _again(_compiled_sine)
    torch.testing.assert_close(found, _sine(torch.arange(5.0)))
    assert _counted("graphs_unreadable") == 1 and _lowered() == 1
    assert not os.path.exists("/tmp/magneto-must-not-exist")
    _again(_compiled_sine)
    assert _counted("graphs_from_store") == 1


@pytest.mark.filterwarnings("ignore::magneto.MagnetoWarning")
def test_a_damaged_entry() -> None:
    _compiled_sine()
    (entry,) = _entries()
    entry.write_bytes(entry.read_bytes()[:-3])
    torch.testing.assert_close(_again(_compiled_sine), _sine(torch.arange(5.0)))
    assert _lowered() == 1


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_addresses", "_seen", "_generals"):
        monkeypatch.setattr(build, name, {})


def test_an_entry_serves_without_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    _forget(monkeypatch)
    _compiled_sine()
    shutil.rmtree(Path(store().root) / "kernel")
    _forget(monkeypatch)
    torch.testing.assert_close(_again(_compiled_sine), _sine(torch.arange(5.0)))
    assert _counted("graphs_from_store") == 1 and _counted("kernels_compiled") == 1 and _lowered() == 0


@pytest.mark.parametrize(
    "flag", [{"fusion": False}, {"compiler_flags": "-fno-inline"}, {"fallback_ops": "aten.sin.default"}, {"max_fusion": 3}]
)
def test_other_flags(flag: dict[str, Any]) -> None:
    _compiled_sine()
    with config.patch(**flag):
        torch.testing.assert_close(_again(_compiled_sine), _sine(torch.arange(5.0)))
        assert _lowered() == 1 and _counted("graphs_from_store") == 0


def test_whoever_looks_sees_the_passes() -> None:
    _compiled_sine()
    with config.patch(verify=True):
        _again(_compiled_sine)
        assert _lowered() == 1


def _graph(
    scale: Any = 2, shape: tuple[int, ...] = (4,), dtype: torch.dtype = torch.float32, target: Any = aten.mul.Tensor, name: str = "x"
) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder(name)
    y = graph.call_function(target, (x, scale))
    x.meta["val"] = y.meta["val"] = TensorMeta.contiguous(shape, dtype)
    graph.output((y,)).meta["val"] = None
    return graph


def test_keys_tell_graphs_apart() -> None:
    graphs = [
        _graph(),
        _graph(True),
        _graph(2.0),
        _graph(0.0),
        _graph(-0.0),
        _graph(float("nan")),
        _graph(shape=(4, 1)),
        _graph(dtype=torch.float64),
        _graph(target=aten.add.Tensor),
    ]
    keys = [kept.key_of_graph(graph, {}) for graph in graphs]
    assert None not in keys and len(set(keys)) == len(keys)
    assert kept.key_of_graph(_graph(), {0: 0}) not in keys
    assert kept.key_of_graph(_graph(), {}, frozenset({0})) not in keys
    assert kept.key_of_graph(_graph(name="other"), {}) == keys[0]
    torch.set_default_dtype(torch.float64)
    try:
        assert kept.key_of_graph(_graph(), {}) not in keys
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_has_no_name_is_not_kept() -> None:
    assert kept.key_of_graph(_graph(object()), {}) is None
    assert kept.key_of_graph(_graph(target=lambda x, y: x), {}) is None
    with config.patch(cache=False):
        assert kept.key_of_graph(_graph(), {}) is None


def test_names_of_calls() -> None:
    for op, function in FAST.items():
        assert call_named(f"fast {op}") is function and name_of_call(function) == f"fast {op}"
    out = call_named("direct aten.mm.out")
    assert name_of_call(out) == "direct aten.mm.out"
    assert torch.equal(out(torch.eye(2), torch.eye(2), out=torch.empty(2, 2)), torch.eye(2))
    with pytest.raises(Exception):
        call_named("direct os.system")
    assert name_of_call(print) is None


PROGRAM = """
import torch, magneto
from magneto.base.events import counters
fn = magneto.optimize("inductor", nopython=True)(lambda x, w: torch.relu(x @ w).sum(1))
print(fn(torch.ones(2, 3), torch.full((3, 2), 0.5)).tolist(), int(counters().get("graphs_from_store", 0)), int(counters().get("kernels_compiled", 0)))
"""


def test_a_second_process(tmp_path: Path) -> None:
    env = {**os.environ, "MAGNETO_CACHE_DIR": str(tmp_path / "cache"), "MAGNETO_VERIFY": "0", "OMP_NUM_THREADS": "1"}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env["PYTHONPATH"] = str(Path(__file__).resolve().parents[3])
    printed = [subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=300) for _ in range(2)]
    assert [run.stdout for run in printed] == ["[3.0, 3.0] 0 1\n", "[3.0, 3.0] 1 0\n"], printed[0].stderr


def test_how_the_program_lets_cudnn_compute_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts are chosen behind the key, by these settings."""
    monkeypatch.setattr(kept, "capturing", lambda: False)
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    keys = [kept.key_of_graph(graph, {}, foreign="cuda")]
    for name in ("allow_tf32", "enabled", "deterministic", "benchmark"):
        with torch.backends.cudnn.flags(**{name: not getattr(torch.backends.cudnn, name)}):  # type: ignore[arg-type]
            keys.append(kept.key_of_graph(graph, {}, foreign="cuda"))
    monkeypatch.setattr(kept, "capturing", lambda: True)
    keys.append(kept.key_of_graph(graph, {}, foreign="cuda"))
    assert None not in keys and len(set(keys)) == 6
    assert kept.key_of_graph(graph, {}) not in keys
