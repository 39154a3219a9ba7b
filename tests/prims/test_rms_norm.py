"""Rms norm on devices that have a kernel for it. (On the CPU it is made of other operations, which other tests cover.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from magneto.aot_autograd.mode import FunctionalMode
from magneto.graph.meta import TensorMeta
from magneto.graph.rules import propagate

needs_kernel = pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm_backward"), reason="this torch has no such kernel")
ROOT = Path(__file__).parents[2]


@needs_kernel
def test_as_where_there_is_a_kernel() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.prims.rms_norm_kernel"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_kernel
def test_the_scale_of_a_row_is_as_precise_as_what_computes_it() -> None:
    x, w = TensorMeta.contiguous((2, 3, 8), torch.bfloat16), TensorMeta.contiguous((8,), torch.bfloat16)
    y, scale = propagate(torch.ops.aten._fused_rms_norm.default, (x, [8], w, None), {})
    assert (y.dtype, y.shape, scale.dtype, scale.shape) == (torch.bfloat16, (2, 3, 8), torch.float32, (2, 3, 1))
    dx, dw = propagate(torch.ops.aten._fused_rms_norm_backward.default, (y, x, [8], scale, w, [True, True]), {})
    assert (dx.shape, dx.dtype, dw.shape, dw.dtype) == (x.shape, x.dtype, w.shape, w.dtype)
    assert propagate(torch.ops.aten._fused_rms_norm_backward.default, (y, x, [8], scale, None, [True, True]), {})[1] is None


def test_composites_that_may_copy_are_no_views() -> None:
    """They reach the mode where autograd is switched off."""
    from torch import fx

    graph = fx.Graph()
    mode = FunctionalMode(graph)
    x = torch.randn(4, 6)
    node = graph.placeholder("x")
    node.meta["val"] = TensorMeta.of(x)
    mode.storages.add_root(x, TensorMeta.of(x), node)
    with torch._C._AutoDispatchBelowAutograd(), mode:
        y = torch.ops.aten.to.dtype(x, torch.bfloat16)
        z = torch.ops.aten.reshape.default(torch.ops.aten.t.default(x), [24])
        same = torch.ops.aten.to.dtype(x, torch.float32)
    assert y.dtype is torch.bfloat16 and z.shape == (24,) and same is x
    assert [str(n.target) for n in graph.nodes if n.op == "call_function"][0] == "aten._to_copy.default"
