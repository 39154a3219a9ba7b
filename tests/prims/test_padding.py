"""Pads that repeat, mirror or wrap elements of the edge are loops: eager's numbers and layouts, gradients, and eager's errors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto
from magneto.prims.decompose import decompose
from tests.compare import same
from tests.prims.test_decompose import Recorder, targets

aten = torch.ops.aten
MODES = ["reflect", "replicate", "circular"]
SHAPES: dict[int, tuple[int, ...]] = {1: (2, 3, 7), 2: (2, 3, 7, 5), 3: (1, 2, 5, 4, 6)}
PADS = [(1, 2), (3, 0), (0, 0), (0, 1), (2, 2), (1, -1)]


def inputs(dims: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """In rows, channels-last, transposed, with gaps, and without a batch."""
    x = (torch.randn(SHAPES[dims], generator=torch.Generator().manual_seed(dims)) * 4).to(dtype)
    lasts = [x.to(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)] if dims > 1 else []
    return [x, *lasts, x.transpose(0, 1), torch.stack([x, x], -1)[..., 0], x[0]]


@pytest.mark.parametrize(("mode", "dims"), itertools.product(MODES, SHAPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
@pytest.mark.filterwarnings("ignore:.W104")
def test_against_eager(mode: str, dims: int, dtype: torch.dtype) -> None:
    """Numbers, strides, errors (of what eager refuses)."""
    for pads in (PADS[k : k + dims] for k in range(0, len(PADS) - dims + 1, dims)):
        pad = tuple(itertools.chain(*pads))

        def fn(x: torch.Tensor) -> Any:
            return F.pad(x, pad, mode=mode), F.pad(x * 2, pad, mode=mode) + 1  # noqa: B023

        for x in inputs(dims, dtype):
            magneto.reset()
            same(fn, magneto.compile(fn), x)
    assert magneto.stats()["fallbacks"] == 0


@pytest.mark.parametrize(("mode", "dims"), itertools.product(MODES, SHAPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients(mode: str, dims: int, dtype: torch.dtype) -> None:
    for pad, x in itertools.product(((1, 2, 1, 0, 0, 1)[: 2 * dims], (1,) * 2 * dims, (3,) * 2 * dims), inputs(dims, dtype)[:3]):

        def fn(x: torch.Tensor) -> torch.Tensor:
            y = F.pad(x * 2, pad, mode=mode)  # noqa: B023
            return (y * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape).to(y.dtype)).relu()

        given = [x.detach().clone().requires_grad_() for _ in range(2)]
        exact = x.detach().double().requires_grad_()
        magneto.reset()
        for f, one in zip((fn, magneto.compile(fn), fn), (*given, exact), strict=True):
            f(one).sum().backward()
        plain, ours, known = (t.grad for t in (*given, exact))
        assert ours is not None and plain is not None and known is not None and ours.stride() == plain.stride()
        error, eagers = ((t.double() - known).abs().max().item() for t in (ours, plain))
        assert error <= 2 * eagers + 1e-6, (pad, error, eagers)


@pytest.mark.parametrize("name", ["reflection", "replication"])
def test_on_a_gpu_no_library_is_called(name: str) -> None:
    for dims, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16)):
        x, pad = inputs(dims, torch.float32)[0].to(dtype), [1] * 2 * dims
        forward, backward = (getattr(aten, f"{name}_pad{dims}d{end}").default for end in ("", "_backward"))
        r = Recorder(torch.randn(forward(x, pad).shape, generator=torch.Generator().manual_seed(1)).to(dtype), x)
        r.graph.output((r(backward, *r.nodes, pad), r(forward, r.nodes[1], pad)))
        for node in r.graph.nodes:
            if node.op != "output":
                node.meta["val"] = node.meta["val"].with_(device=torch.device("cuda", 0))
        graph = decompose(r.graph)
        assert not [target for target in targets(graph) if target.startswith("aten.")]
        for node in graph.nodes:
            node.args = torch.fx.node.map_aggregate(node.args, lambda arg: torch.device("cpu") if isinstance(arg, torch.device) else arg)
        found, padded = torch.fx.Interpreter(torch.fx.GraphModule({}, graph)).run(*r.inputs)
        torch.testing.assert_close(found, backward(r.inputs[0].float(), x.float(), pad).to(dtype))
        assert torch.equal(padded, forward(x, pad))


def test_many_copies_of_an_edge_stay_the_librarys() -> None:
    x = torch.randn(1, 1, 4, 4)
    r = Recorder(torch.randn(1, 1, 10, 10), x)
    assert targets(decompose(r.output(r(aten.replication_pad2d_backward.default, *r.nodes, [3, 3, 3, 3])))) == [
        "aten.replication_pad2d_backward.default"
    ]


WRONG = {
    "of truth values": lambda x: F.pad((x > 0)[..., None].to(memory_format=torch.channels_last), (0, 0, 1, 1), mode="reflect"),
    "of unsigned numbers": lambda x: F.pad(x.to(torch.uint16), (1, 1), mode="replicate"),
    "wider than the input": lambda x: F.pad(x, (6, 0), mode="reflect"),
    "wrapped twice": lambda x: F.pad(x, (6, 0), mode="circular"),
    "nothing left": lambda x: F.pad(x, (-3, -3), mode="circular"),
    "of other dimensions": lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="circular"),
    "with a value": lambda x: F.pad(x, (1, 1), "circular", 3.0),
    "of odd length": lambda x: F.pad(x, (1, 1, 1), mode="circular"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore:.W104")
def test_eagers_errors(name: str) -> None:
    same(WRONG[name], magneto.compile(WRONG[name]), torch.randn(2, 3, 5))


def test_sizes_that_change() -> None:
    compiled = magneto.compile(fn := lambda x: F.pad(x, (1, 2, 2, 1), mode="circular") + F.pad(x, (1, 2, 2, 1), mode="reflect"))
    for n in (5, 6, 9):
        same(fn, compiled, torch.randn(2, 3, n, n + 1))


def test_one_channel_that_lies_last_has_eagers_strides() -> None:
    x = torch.randn(8, 1, 9, 16).to(memory_format=torch.channels_last)
    for mode in MODES:
        same(fn := lambda x: F.pad(x, (1, 5, 1, 4), mode=mode), magneto.compile(fn), x)  # noqa: B023
