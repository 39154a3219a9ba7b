"""Where a model's steady time goes: every step of its plans with the processor time it takes.

    python -m benchmarks.steps diffusion.bfloat16 [--rounds 9] [--rows 25] [--mode inference]

The instructions of each plan (`Plan.instructions`, see csrc/plan.c) run one by one from Python, so what is timed is the steps, not the executor.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import magneto
from benchmarks.models import build
from benchmarks.worker import prepare, step_of
from magneto.inductor import compile as compiler
from magneto.inductor.loops.ir import LibraryCall

Instruction = tuple[Any, ...]


class Run:
    """One plan, called through Python."""

    def __init__(self, plan: Any, code: Any, names: dict[int, str]) -> None:
        self.plan, self.code, self.names = plan, code, names
        self.registers: list[Any] = [None] * code.n_registers
        self.times: dict[int, list[float]] = {}

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        r = self.registers
        r[: len(inputs)] = inputs
        for position, instruction in enumerate(self.code.instructions):
            start = time.process_time()
            self.step(instruction)
            self.times.setdefault(position, []).append(time.process_time() - start)
        return tuple(r[o] for o in self.code.outputs)

    def step(self, instruction: Instruction) -> None:
        r, (op, *rest) = self.registers, instruction
        if op == "CONST":
            r[rest[0]] = rest[1]
        elif op == "ALLOC":
            dst, fn, args, kwargs, keep = rest
            r[dst] = r[dst] if keep and r[dst] is not None else fn(*args, **kwargs)
        elif op == "VIEW":
            dst, src, fn, args, _ = rest
            r[dst] = fn(r[src], *args)
        elif op in ("KERNEL", "TABLE"):
            address, registers, *more = rest
            pointers = (ctypes.c_void_p * len(registers))(*[r[i].data_ptr() for i in registers])
            work = [(ctypes.c_int64 * len(more[0]))(*more[0])] if op == "TABLE" else []
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_void_p] * len(work))(address)(pointers, *work)
        elif op == "CALL":
            dst, fn, registers, names = rest
            values = [r[i] for i in registers]
            cut = len(values) - len(names)
            result = fn(*values[:cut], **dict(zip(names, values[cut:], strict=True)))
            if dst >= 0:
                r[dst] = result
        elif op == "LIST":
            r[rest[0]] = [r[i] for i in rest[1]]
        elif op == "UNPACK":
            for dst, item in zip(rest[1], r[rest[0]], strict=False):
                if dst >= 0:
                    r[dst] = item
        elif op == "LAYOUT":
            r[rest[0]] = rest[1](r[rest[0]], rest[2], rest[3])
        elif op == "KEEP":
            for register in rest[1]:
                r[register].view(-1)[:1]
        elif op not in ("KEPT", "FREE"):
            raise ValueError(op)

    def name(self, instruction: Instruction) -> str:
        op, *rest = instruction
        if op in ("KERNEL", "TABLE"):
            return f"{op} {self.names.get(rest[0], '')}"
        if op == "CALL":
            shapes = [tuple(x.shape) for i in rest[2] if isinstance(x := self.registers[i], torch.Tensor)]
            return f"CALL {getattr(rest[1], '__name__', rest[1])} {shapes}"
        return str(op)


def recorded(call: Callable[[], Any]) -> list[Run]:
    """The plans that a first call makes; later calls run them step by step."""
    runs: list[Run] = []
    plan_code, make = compiler.plan_code, compiler._C.Plan
    names: dict[int, str] = {}

    def with_names(plan: Any, memory: Any, address_of: Callable[[Any], int]) -> Any:
        for step in plan.steps:
            if not isinstance(step, LibraryCall):
                sizes = "x".join(str(d.size) for d in (*step.rows, *step.cols)) if hasattr(step, "rows") and hasattr(step, "cols") else ""
                names[address_of(step)] = f"{sizes} {' '.join(dict.fromkeys(o.target for o in step.origins))}"
        return plan_code(plan, memory, address_of)

    class Stand:
        def Plan(self, *args: Any) -> Any:
            made = make(*args)
            code = compiler.PlanCode(args[0], args[1], args[2], args[3], 0)
            runs.append(Run(made, code, names))
            return runs[-1]

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    real = compiler._C
    compiler.plan_code, compiler._C = with_names, Stand()  # type: ignore[assignment]
    try:
        call()
    finally:
        compiler.plan_code, compiler._C = plan_code, real
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--mode", default="inference")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=25)
    options = parser.parse_args()
    model, args, kwargs = build(options.case)
    prepare(model, options.mode)
    step = step_of(model, magneto.compile(model), args, kwargs, options.mode)
    runs = recorded(step)
    for _ in range(options.rounds):
        step()
    for run in runs:
        medians = {position: statistics.median(times[1:]) for position, times in run.times.items() if len(times) > 1}
        print(f"{sum(medians.values()) * 1e3:.3f} ms in {len(medians)} steps")
        for position, seconds in sorted(medians.items(), key=lambda item: -item[1])[: options.rows]:
            print(f"{seconds * 1e3:9.3f} ms  {position:4d}  {run.name(run.code.instructions[position])[:200]}")


if __name__ == "__main__":
    main()
