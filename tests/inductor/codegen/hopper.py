"""Triton's kernels compiled for compute capability 9.0; no device is needed."""

from __future__ import annotations

import re
from math import prod
from typing import Any

from magneto.inductor.runtime.plan_code import TritonKernel

MEMORY = re.compile(r"^\s*(?:@\S+ )?((?:ld|st|atom|red|cp|bra|prefetch)\b(?!\.param)\S*)", re.MULTILINE)


def for_hopper(kernel: TritonKernel, aligned: bool = True) -> Any:
    """Before all else each of its programs waits for the kernels ahead of it, where they are few."""
    from magneto.inductor.runtime.triton_compile import binary_of
    from magneto.inductor.runtime.triton_launch import FEW, job_of

    made = binary_of(job_of(kernel, (9, 0), aligned))
    if prod(kernel.grid) > FEW:
        assert "griddepcontrol" not in made.asm["ptx"]
    else:
        before, behind = made.asm["ptx"].split("griddepcontrol.wait;")
        assert not MEMORY.findall(before) and MEMORY.findall(behind) and "griddepcontrol.launch_dependents;" in behind
    assert len(made.asm["cubin"]) > 1000
    return made
