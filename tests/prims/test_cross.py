"""Cross products are one loop with what is around them."""

from __future__ import annotations

import pytest
import torch

import magneto
from magneto.prims.decompose import decompose
from magneto.prims.exact import gives_eagers_bits
from tests.ops.checking import run_graph
from tests.prims.test_decompose import Recorder, targets

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shapes", "dim"), [(((5, 3), (5, 3)), -1), (((3, 4), (3, 1)), 0), (((2, 1, 3), (1, 6, 3)), 2), (((3,), (3,)), -1)]
)
def test_as_loops(shapes: tuple[tuple[int, ...], ...], dim: int, dtype: torch.dtype) -> None:
    given = [torch.randn(s, generator=torch.Generator().manual_seed(k)).to(dtype) for k, s in enumerate(shapes)]
    given[0].view(-1)[0] = torch.inf
    for x, y in (given, given[::-1], [t.flip(-1) for t in given]):
        r = Recorder(x, y)
        node = r(aten.linalg_cross.default, *r.nodes, dim=dim)
        graph = decompose(r.output(node))
        assert not [name for name in targets(graph) if name.startswith("aten.")]
        (found,) = run_graph(graph, r.inputs)
        torch.testing.assert_close(
            found, r.values[node], equal_nan=True, **({"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {})
        )
        assert graph.output_node().args[0][0].meta["val"].strides == r.values[node].stride()  # type: ignore[index, union-attr]


def test_other_types() -> None:
    x = torch.randint(9, (4, 3))
    r = Recorder(x, x.flip(0))
    assert targets(decompose(r.output(r(aten.linalg_cross.default, *r.nodes)))) == ["aten.linalg_cross.default"]


def test_eagers_bits_are_its_own_kernels() -> None:
    x = torch.randn(4, 3)
    r = Recorder(x, x.flip(0))
    assert not gives_eagers_bits(r(aten.linalg_cross.default, *r.nodes))


def test_kernel_has_no_tables() -> None:
    call = magneto.optimize("inductor", nopython=True)(lambda x, y: torch.linalg.cross(x, y) * 2)
    x, y = torch.randn(100, 3), torch.randn(100, 3)
    torch.testing.assert_close(call(x, y), torch.linalg.cross(x, y) * 2)
    assert len(magneto.inspect(call).kernels) == 1
