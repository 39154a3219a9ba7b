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
from magneto.inductor.codegen.cpp_preamble import preamble
from magneto.inductor.runtime.build import KernelText
from magneto.inductor.runtime.compiler import vector_math_level

Instruction = tuple[Any, ...]


class Run:
    """One plan, called through Python."""

    def __init__(self, code: Any, names: dict[int, str]) -> None:
        self.code, self.names = code, names
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
            shape = max((tuple(self.registers[i].shape) for i in rest[1]), key=lambda sizes: (len(sizes), sizes))
            return f"{op} {shape} {self.names.get(rest[0], '')}"
        if op == "CALL":
            shapes = [tuple(x.shape) for i in rest[2] if isinstance(x := self.registers[i], torch.Tensor)]
            return f"CALL {getattr(rest[1], '__name__', rest[1])} {shapes}"
        return str(op)


def recorded(call: Callable[[], Any]) -> list[Run]:
    """The plans that a first call makes; later calls run them step by step."""
    runs: list[Run] = []
    original = compiler._loaded

    def loaded(finished: Any, name: str) -> Any:
        text = preamble(vector_math_level())
        kernels = [KernelText.of(body, text) for _, body in finished.kernels]
        addresses = compiler._built(kernels)
        names = {
            addresses[k.hash]: comment.splitlines()[0].removeprefix("/* ")
            for k, (comment, _) in zip(kernels, finished.kernels, strict=True)
        }
        runs.append(Run(finished.code.with_addresses(addresses), names))
        return runs[-1]

    compiler._loaded = loaded
    try:
        call()
    finally:
        compiler._loaded = original
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
