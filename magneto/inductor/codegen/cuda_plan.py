"""Schedule + launchers of kernels -> the instructions of a plan on a CUDA device.

Every buffer is allocated when it is first written and freed after its last use: torch's allocator serves that from blocks that it keeps, by streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from magneto.inductor.codegen.cpp import parameters
from magneto.inductor.codegen.plan import Builder, PlanCode, plan_code
from magneto.inductor.schedule.kernel import FusedKernel, Kernel
from magneto.inductor.schedule.memory import Memory
from magneto.inductor.schedule.schedule import Schedule


class CudaBuilder(Builder):
    """A kernel is a call of its launcher."""

    def kernel(self, step: FusedKernel, address: Any) -> None:
        registers = tuple(self.buffer(name) for name in parameters(step))
        self.instructions.append(("CALL", -1, address, registers, ()))


def cuda_plan(plan: Schedule, memory: Memory, launcher_of: Callable[[Kernel], Any]) -> PlanCode:
    """The instructions of a schedule."""
    return plan_code(plan, memory, launcher_of, CudaBuilder)
