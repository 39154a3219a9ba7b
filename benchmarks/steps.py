"""Where a model's steady time goes: every step of its plans with the time it takes.

    python -m benchmarks.steps diffusion.bfloat16 [--rounds 9] [--rows 25] [--mode inference] [--threads 1] [--clock wall] [--eager]

The instructions of each plan (`Plan.instructions`, see csrc/plan.c) run one by one from Python, so what is timed is the steps, not the executor; what is computed of weights only runs
once. Each step comes with its minor faults: pages of memory that is mapped anew in every call. `--eager` times the operations that eager runs instead, calls with equal shapes together.
With several threads processor time counts those that wait too: then `--clock wall`, on a quiet machine.
"""

from __future__ import annotations

import argparse
import ctypes
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import magneto
from benchmarks.models import build, tensors_of
from benchmarks.worker import prepare, step_of
from magneto.inductor import compile as compiler
from magneto.inductor import recall
from magneto.inductor.codegen.cpp_preamble import preamble
from magneto.inductor.runtime.build import KernelText
from magneto.inductor.runtime.compiler import vector_math_level

Instruction = tuple[Any, ...]
CLOCKS = {"processor": time.process_time, "wall": time.perf_counter}


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Watch:
    """Times and faults of what happens again in each call, by name and order."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.times: dict[Any, list[float]] = {}
        self.pages: dict[Any, int] = {}

    def run(self, key: Any, call: Callable[[], Any]) -> Any:
        touched, start = faults(), self.clock()
        result = call()
        self.times.setdefault(key, []).append(self.clock() - start)
        self.pages[key] = faults() - touched
        return result

    def report(self, names: Callable[[Any], str], rows: int) -> None:
        medians = {key: statistics.median(times[1:]) for key, times in self.times.items() if len(times) > 1}
        print(f"{sum(medians.values()) * 1e3:.3f} ms and {sum(self.pages[key] for key in medians)} faults in {len(medians)} steps")
        for key, seconds in sorted(medians.items(), key=lambda item: -item[1])[:rows]:
            print(f"{seconds * 1e3:9.3f} ms {self.pages[key]:6d}  {names(key)[:200]}")


class Run(Watch):
    """One plan, called through Python."""

    def __init__(self, code: Any, kernels: dict[int, str], clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.code, self.kernels = code, kernels
        self.registers: list[Any] = [None] * code.n_registers
        self.names: dict[int, str] = {}
        self.prepared = False

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        r, instructions = self.registers, self.code.instructions
        r[: len(inputs)] = inputs
        position = 0
        while position < len(instructions):
            instruction = instructions[position]
            if instruction[0] == "KEEP" and self.prepared:
                position += instruction[1]
            self.prepared |= instruction[0] == "KEPT"
            self.run(position, lambda step=instruction: self.step(step))  # type: ignore[misc]
            if position not in self.names:
                self.names[position] = f"{position:4d}  {self.name(instruction)}"
            position += 1
        results = tuple(r[o] for o in self.code.outputs)
        for output in self.code.outputs:
            r[output] = None
        return results

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
        elif op == "FREE":
            for register in rest[0]:
                r[register] = None
        elif op not in ("KEEP", "KEPT"):
            raise ValueError(op)

    def name(self, instruction: Instruction) -> str:
        op, *rest = instruction
        if op in ("KERNEL", "TABLE"):
            shape = max((tuple(self.registers[i].shape) for i in rest[1]), key=lambda sizes: (len(sizes), sizes))
            return f"{op} {shape} {self.kernels.get(rest[0], '')}"
        if op == "CALL":
            shapes = [tuple(x.shape) for i in rest[2] if isinstance(x := self.registers[i], torch.Tensor)]
            return f"CALL {getattr(rest[1], '__name__', rest[1])} {shapes}"
        return str(op)


class Operations(TorchDispatchMode, Watch):
    """Eager's operations, one by one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        TorchDispatchMode.__init__(self)
        Watch.__init__(self, clock)
        self.position = 0
        self.names: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        key, self.position = self.position, self.position + 1
        self.names[key] = f"{func} {[tuple(t.shape) for t in tensors_of(args)]}"
        return self.run(key, lambda: func(*args, **(kwargs or {})))

    def __call__(self, step: Callable[[], Any]) -> None:
        self.position = 0
        with self:
            step()

    def report_grouped(self, rows: int) -> None:
        """Calls of one operation with equal shapes as one row."""
        groups: dict[str, list[int]] = {}
        for key, name in self.names.items():
            groups.setdefault(name, []).append(key)
        whole = Watch(self.clock)
        for name, keys in groups.items():
            title = f"{len(keys):4d} x {name}"
            whole.times[title] = [sum(times) for times in zip(*(self.times[key] for key in keys), strict=True)]
            whole.pages[title] = sum(self.pages[key] for key in keys)
        whole.report(str, rows)


def recorded(call: Callable[[], Any], clock: Callable[[], float]) -> list[Run]:
    """The plans that a first call makes; later calls run them step by step."""
    runs: list[Run] = []
    original = recall.loaded

    def loaded(finished: Any, name: str) -> Any:
        text = preamble(vector_math_level())
        kernels = [KernelText.of(body, text) for _, body in finished.kernels]
        addresses = recall._built(kernels)
        names = {
            addresses[k.hash]: comment.splitlines()[0].removeprefix("/* ")
            for k, (comment, _) in zip(kernels, finished.kernels, strict=True)
        }
        runs.append(Run(finished.code.with_addresses(addresses), names, clock))
        return runs[-1]

    compiler.loaded = recall.loaded = loaded
    try:
        call()
    finally:
        compiler.loaded = recall.loaded = original
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--mode", default="inference")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=CLOCKS, default="processor")
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    clock = CLOCKS[options.clock]
    model, args, kwargs = build(options.case)
    prepare(model, options.mode)
    plain = step_of(model, model, args, kwargs, options.mode)
    step = step_of(model, magneto.compile(model), args, kwargs, options.mode)
    runs = recorded(lambda: [step() for _ in range(3)], clock)  # a model that changes itself in its first call is compiled in the second
    operations = Operations(clock)
    for _ in range(options.rounds):
        step()
        if options.eager:
            operations(plain)
    for run in runs:
        run.report(run.names.__getitem__, options.rows)
    if options.eager:
        print("eager:")
        operations.report_grouped(options.rows)


if __name__ == "__main__":
    main()
