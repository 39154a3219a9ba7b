"""Results written past the caches: the same values at every alignment, length and dtype, and where a result takes an input's memory."""

from __future__ import annotations

import pytest
import torch

from magneto.inductor.codegen import cpp, cpp_fill, cpp_lookup
from magneto.inductor.codegen.cpp import kernel_text
from magneto.inductor.lower import lower_graph
from magneto.inductor.schedule.kernel import FusedKernel
from magneto.inductor.schedule.schedule import schedule
from tests.inductor.codegen.compiled import check_compiled
from tests.inductor.lower.prim_graphs import Graph
from tests.inductor.schedule.test_fuse import layer_norm, softmax


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is written past the caches."""
    for module in (cpp, cpp_fill):
        monkeypatch.setattr(module, "STREAM_FROM", 1)


def texts(g: Graph) -> str:
    return "\n".join(kernel_text(s) for s in schedule(lower_graph(g.fx)).steps if isinstance(s, FusedKernel))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64])
@pytest.mark.parametrize("shape", [(16384,), (20001,), (17, 1031), (8, 3, 1201)])
def test_pointwise(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    g = Graph()
    base = torch.randint(-50, 50, shape).to(dtype)
    x, wide = g.input(base), g.input(torch.randint(-50, 50, (*shape[:-1], shape[-1] + 3)).to(dtype)[..., 3:])
    g.output(g.add(x, wide), g.mul(x, x))
    assert "mg_stream(" in texts(g)
    check_compiled(g, 0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("width", [700, 1024, 3001])
def test_rows(width: int) -> None:
    g = Graph()
    x = g.input(torch.randn(40, width))
    g.output(softmax(g, x), layer_norm(g, g.add(x, 1.0)), g.sum(g.mul(x, x), (1,)))
    assert texts(g).count("mg_stream(") >= 2
    check_compiled(g, 1e-5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("width", "dtype"), [(1024, torch.float32), (1031, torch.float32), (1040, torch.float16), (1041, torch.bfloat16)])
def test_pieces_of_rows_end_with_lines_of_memory(width: int, dtype: torch.dtype) -> None:
    g = Graph()
    x, y = (g.input(torch.randn(40, width).to(dtype)) for _ in range(2))
    g.output(g.mul(x, g.call(torch.ops.prims.broadcast_in_dim.default, g.amax(y, (1,)), (40, width), (0,))))
    text = texts(g)
    assert ("b = e)" in text) == (f") % 64 / {dtype.itemsize})" in text) == (width != 1024)
    check_compiled(g, 0)


@pytest.mark.usefixtures("small")
def test_stored_while_folded() -> None:
    g = Graph()
    x = g.exp(g.input(torch.randn(40, 1500)))
    g.output(x, g.sum(x, (1,)), g.argmax(x, 1))
    assert "mg_stream(" in texts(g)
    check_compiled(g, 1e-6)


@pytest.mark.usefixtures("small")
def test_in_the_memory_of_an_input() -> None:
    import magneto

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0).add_(y)
        z = (y @ y.t()).exp()
        return z * 2.0 + 1.0

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(200, 200, generator=generator) * 0.1 for _ in range(2))
    kept = x.clone()
    wanted = step(kept, y)
    magneto.reset()
    found = magneto.optimize("inductor", nopython=True)(step)(x, y)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(x, kept)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(600, 70), (601, 131), (64, 256), (70, 3, 131)])
def test_squares(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Strips of squares, tails in both dimensions, rows at every alignment."""
    g = Graph()
    x, y = (torch.randint(-50, 50, s, generator=torch.Generator().manual_seed(3)).to(dtype) for s in (shape, shape[::-1]))
    g.output(g.add(g.input(y), g.transpose(g.input(x), tuple(range(len(shape)))[::-1])))
    text = texts(g)
    assert "mg_tile_" in text and ("mg_stream(" in text) == (dtype is not torch.bfloat16)
    check_compiled(g, 0)


def test_small_results_stay_in_the_caches() -> None:
    g = Graph()
    g.output(g.exp(g.input(torch.randn(1000, 300))))
    assert "mg_stream" not in texts(g)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("width", [40, 300, 3001])
def test_the_next_row_is_fetched_while_one_is_walked_again(width: int) -> None:
    g = Graph()
    x = g.input(torch.randn(400, width))
    g.output(layer_norm(g, x))
    assert texts(g).count("mg_ahead(") == 1
    assert f" + {width * -(-4096 // (4 * width))}, " in texts(g)  # 4,096 bytes ahead at least
    check_compiled(g, 1e-5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("width", [200, 1000])
def test_the_next_row_is_fetched_while_one_is_gathered_from(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(cpp_lookup, "LARGE", 1)
    generator = torch.Generator().manual_seed(1)
    g = Graph()
    x, columns = g.input(torch.randn(300, width, generator=generator)), g.input(torch.randint(width, (300, width), generator=generator))
    g.output(g.mul(g.gather(x, 1, columns), 2.0))
    assert "mg_min(i0 + 1, 299)" in texts(g)
    check_compiled(g, 0)


@pytest.mark.usefixtures("small")
def test_small_memory_is_not_fetched() -> None:
    generator = torch.Generator().manual_seed(1)
    g = Graph()
    g.output(g.mul(g.gather(g.input(torch.randn(30, 1000)), 1, g.input(torch.randint(1000, (30, 1000), generator=generator))), 2.0))
    assert "mg_min(i0" not in texts(g)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64])
@pytest.mark.parametrize("colours", [2, 3, 5, 7])
def test_few_elements_side_by_side(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, colours: int, streamed: bool) -> None:
    """Images with their colours side by side, made of such and of planes, and planes made of them: one vector loop over the places."""
    if streamed:
        for module in (cpp, cpp_fill):
            monkeypatch.setattr(module, "STREAM_FROM", 1)
    planes = torch.randint(0, 12, (5, colours, 61, 59)).to(dtype)
    beside, padded = planes.to(memory_format=torch.channels_last), torch.randint(0, 12, (5, 61, 59, colours + 1)).to(dtype)[..., :colours]
    each = torch.randint(0, 12, (colours,)).to(dtype)
    g = Graph()
    x, y, b, wide = g.input(beside), g.input(planes), g.input(each), g.input(padded.permute(0, 3, 1, 2))
    shifted = g.add(g.mul(x, g.broadcast_in_dim(b, tuple(planes.shape), (1,))), y)
    g.output(shifted, g.add(y, wide), g.flip(x, (1,)), g.sub(g.permute(x, (0, 2, 3, 1)), g.input(padded)))
    text = texts(g)
    assert "for (i64 j1 = 0; j1 < " + str(colours) not in text and "for (i64 j2" not in text
    if dtype.itemsize == 2 and dtype.is_floating_point:
        assert f"- b) * {colours})" in text  # whole pieces are rounded, of all colours at once
    assert ("mg_stream(" in text) is streamed
    check_compiled(g, 0)
