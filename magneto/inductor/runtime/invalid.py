"""Speculation that no NaN meets oneDNN's relu, which makes 0 of it: the processor tells, and then another plan answers.

A maximum of NaN and 0 raises the processor's flag of invalid operations (x86: MXCSR, one per thread; comparisons do too), and the flag stays. A plan with such a call clears
the flag in all threads ahead of it (FORGET) and looks behind it (LOOK, a FloatingPointError), in the threads that computed; another plan, in which the relu is a loop, begins anew then.
"""

from __future__ import annotations

import itertools
import operator
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from magneto import _C
from magneto.base.events import counter
from magneto.base.flags import config
from magneto.graph.opinfo import stays

Compiled = Callable[..., Any]
aten, _CPU = torch.ops.aten, torch.device("cpu")
POINTWISE_INTO: Any = getattr(getattr(torch.ops.mkldnn, "_convolution_pointwise_", None), "binary", None)

PATIENCE = 3  # calls in a row that end in vain; from then on the other plan is taken at once

LOOK = """int SYMBOL(void *const *p) { /* was an operation invalid in any thread? */
    unsigned found = 0;
#pragma omp parallel reduction(|:found)
    {
        const unsigned flags = __builtin_ia32_stmxcsr();
        found |= flags & 1u;
        if (flags & 1u) __builtin_ia32_ldmxcsr(flags & ~1u);
    }
    return (int)(4u * found);
}
"""
FORGET = LOOK.replace("was an operation invalid in any thread?", "whatever was invalid before").replace("4u", "0u")


def may_run_twice(graph: fx.Graph) -> bool:
    """A graph on the CPU alone, with convolutions, whose calls nobody can tell from two?"""
    ops = {node.target for node in graph.nodes if node.op == "call_function"} - {operator.getitem}
    known = {aten.convolution.default, aten.relu.default} <= ops and all(
        getattr(op, "namespace", "") == "aten" and not stays(op) for op in ops
    )
    return known and all(getattr(node.meta.get("val"), "device", _CPU) == _CPU for node in graph.nodes) and possible()


@cache
def possible() -> bool:
    """Is there such a flag, in threads that kernels of ours share with the library?"""
    maps = Path("/proc/self/maps")
    mapped = maps.read_bytes() if platform.machine() == "x86_64" and POINTWISE_INTO is not None and maps.exists() else b""
    return b"libgomp" in mapped and b"libiomp5" not in mapped and b"libomp." not in mapped


@cache
def told(look: int) -> bool:
    """Has the library's relu been seen to tell of NaN here? In products and windows, in the first place and in the last."""
    plan = _C.Plan((("KERNEL", look, (), False),), 0, 0, ())

    def flagged() -> bool:
        try:
            return bool(plan())
        except FloatingPointError:
            return True

    types = [(torch.float32, torch.int32), *([(torch.bfloat16, torch.int16)] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]
    found = []
    for (dtype, bits), window, place, value in itertools.product(types, (1, 3), (0, -1), (1, -1)):
        shapes = (4, 8, 8, 32), (64, window, window, 32), (4, 8, 8, 64)
        x, w, y = (torch.ones(shape, dtype=dtype, device="cpu").permute(0, 3, 1, 2) for shape in shapes)
        y[(place,) * 4] = torch.tensor(value, dtype=bits, device="cpu").view(dtype)  # all bits: NaN with a sign, as the processor makes it
        flagged()
        POINTWISE_INTO(y, x, w, None, [window // 2] * 2, [1, 1], [1, 1], 1, "add", 1.0, "relu", [], None)
        found.append(flagged() or bool(y.isnan().any()))
    return found == [False, True] * (len(found) // 2)


def answering(plan: Compiled, exactly: Callable[[], Compiled]) -> Compiled:
    """`plan`, and where a call of it is told of NaN the callable that `exactly` makes, given the same inputs."""
    looks = [i[1] for i in plan.instructions if i[0] == "KERNEL" and not i[2]] if isinstance(plan, _C.Plan) else []
    if not looks or not (possible() and told(looks[-1])):
        return exactly() if looks else plan
    flags, vain = config.patched(), 0

    @cache
    def other() -> Compiled:
        with config.patch(**flags):
            return exactly()

    def run(*inputs: Any) -> Any:
        nonlocal vain
        if vain < PATIENCE:
            try:
                found, vain = plan(*inputs), 0
                return found
            except FloatingPointError:
                vain += 1
                counter("calls_with_nan")
                plan.release_workspace()  # type: ignore[attr-defined]
        return other()(*inputs)

    return run
