"""Schedule -> the instructions of a plan on a CUDA device.

Every buffer is allocated when it is first written and freed after its last use: torch's allocator serves that from blocks that it keeps, by streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from magneto.inductor.codegen.cpp import parameters
from magneto.inductor.codegen.plan import Builder, PlanCode, plan_code
from magneto.inductor.codegen.triton_table import columns_of
from magneto.inductor.loops.ir import Buffer
from magneto.inductor.runtime.claim import claim
from magneto.inductor.schedule.kernel import FusedKernel, Kernel, OrderedKernel, TableKernel
from magneto.inductor.schedule.memory import Memory
from magneto.inductor.schedule.schedule import Schedule


class CudaBuilder(Builder):
    """A kernel is a LAUNCH until its launcher is known: ("LAUNCH", number of the kernel, registers)."""

    def kernel(self, step: FusedKernel | OrderedKernel, address: Any) -> None:
        self.instructions.append(("LAUNCH", address, tuple(self.buffer(name) for name in parameters(step))))

    def table(self, step: TableKernel, address: Any) -> None:
        own = sorted(set(columns_of(step, self.plan.into)))
        self.instructions.append(("LAUNCH", address, tuple(self.buffer(row[c]) for row in step.rows for c in own)))

    def taken_over(self, source: str, buffer: Buffer, register: int) -> int:
        """An input's memory is another's only if nobody else holds it."""
        other = self.plan.buffers[source]
        if self.registers[source] >= self.n_inputs:
            return super().taken_over(source, buffer, register)
        if (other.shape, other.strides) == (buffer.shape, buffer.strides):
            self.instructions.append(("CALL", register, claim, (self.registers[source],), ()))
        else:
            layout = {"dtype": buffer.dtype, "device": buffer.device}
            self.instructions.append(("ALLOC", register, torch.empty_strided, (buffer.shape, buffer.strides), layout, False))
        return register


def cuda_plan(plan: Schedule, memory: Memory, number_of: Callable[[Kernel], int]) -> PlanCode:
    """The instructions of a schedule."""
    return plan_code(plan, memory, number_of, CudaBuilder)


def with_launchers(code: PlanCode, launchers: Sequence[Callable[..., None]]) -> PlanCode:
    """With calls of launchers in place of LAUNCH."""
    found = tuple([("CALL", -1, launchers[i[1]], i[2], ()) if i[0] == "LAUNCH" else i for i in code.instructions])
    return replace(code, instructions=found)
