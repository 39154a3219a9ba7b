"""Schedule + kernel addresses -> the instructions of `magneto._C.Plan` (csrc/plan.c describes them).

Registers: graph inputs, constants, the arena, then one per buffer or view. What lies in the arena, and views of it, is made at the first call and
kept; what leaves the graph is allocated in each call; views of parameters are remembered as long as the same parameter comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from magneto.base.dataclass import dataclass, field, replace
from magneto.graph.rules_recurrent import LAYER, WORKSPACE
from magneto.inductor import convolve
from magneto.inductor.codegen.cpp import parameters
from magneto.inductor.codegen.cpp_table import work_of
from magneto.inductor.loops.ir import Buffer, LibraryCall, ViewOf, iter_views
from magneto.inductor.lower import linear
from magneto.inductor.runtime.calls import fast_callable
from magneto.inductor.runtime.invalid import FORGET, LOOK
from magneto.inductor.runtime.plan_code import PlanCode, carve, laid_out, restrided, view_at
from magneto.inductor.schedule.kernel import FusedKernel, OrderedKernel, TableKernel
from magneto.inductor.schedule.memory import Memory
from magneto.inductor.schedule.schedule import Schedule

RELEASE_GIL = 1 << 18  # bytes a kernel moves: from here on other Python threads may run meanwhile


OPAQUE = linear.OPAQUE | convolve.OPAQUE
"""Operations whose result has a layout that only the library knows."""


WITH_WORKSPACE = frozenset({LAYER.default} if LAYER is not None else ())
"""Operations one of whose results is as large as the library likes."""


@dataclass(slots=True)
class Builder:
    plan: Schedule
    memory: Memory
    n_inputs: int
    address_of: Callable[[Any], Any]
    instructions: list[tuple[Any, ...]] = field(default_factory=list)
    prologue: list[tuple[Any, ...]] = field(default_factory=list)
    registers: dict[str, int] = field(default_factory=dict)
    views: dict[ViewOf, int] = field(default_factory=dict)
    constants: dict[Any, int] = field(default_factory=dict)
    constant_registers: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    temporaries: dict[int, list[int]] = field(default_factory=dict)  # step -> registers that die there
    count: int = 0

    def fresh(self) -> int:
        self.count += 1
        return self.count - 1

    def constant(self, value: Any) -> int:
        """The register of a constant; equal hashable constants share one."""
        key = _constant_key(value)
        register = self.constants.get(key)
        if register is None:
            register = self.constants[key] = self.fresh()
            self.constant_registers.add(register)
            self.prologue.append(("CONST", register, value))
        return register

    def buffer(self, name: str) -> int:
        """The register of a buffer that lives in the arena, is fresh, or was defined before."""
        register = self.registers.get(name)
        if register is not None:
            return register
        register = self.registers[name] = self.fresh()
        buffer = self.plan.buffers[name]
        if name in self.plan.kept:
            self.prologue.append(("ALLOC", register, torch.empty_strided, (buffer.shape, buffer.strides), {"dtype": buffer.dtype}, True))
            self.kept.add(register)
        elif name in self.memory.arena:
            where = self.memory.arena[name], int(buffer.nbytes), buffer.dtype, buffer.shape, buffer.strides  # type: ignore[arg-type]
            self.prologue.append(("VIEW", register, self.registers["<arena>"], carve, where, True))
            self.kept.add(register)
        elif name in self.memory.in_place:
            register = self.registers[name] = self.taken_over(self.memory.in_place[name], buffer, register)
            self._dies(name, register)
        else:
            device = {} if buffer.device.type == "cpu" else {"device": buffer.device}
            self.instructions.append(
                ("ALLOC", register, torch.empty_strided, (buffer.shape, buffer.strides), {"dtype": buffer.dtype, **device}, False)
            )
            self._dies(name, register)
        return register

    def taken_over(self, source: str, buffer: Buffer, register: int) -> int:
        """The register of a buffer in memory that has been another's: the same tensor, or a view of it."""
        other = self.plan.buffers[source]
        if other.shape == buffer.shape and other.strides == buffer.strides:
            shared = self.registers[source]
            self.temporaries[self.memory.last_use[source]].remove(shared)
            return shared
        self.instructions.append(("VIEW", register, self.registers[source], torch.as_strided, (buffer.shape, buffer.strides), False))
        return register

    def _dies(self, name: str, register: int) -> None:
        self.temporaries.setdefault(self.memory.last_use.get(name, -1), []).append(register)

    def view(self, view: ViewOf) -> int:
        """The register of a strided view; the buffer's own where they are equal."""
        base = self.buffer(view.buffer)
        if same_tensor(view, self.plan.buffers[view.buffer]):
            return base
        register = self.views.get(view)
        if register is not None:
            return register
        register = self.views[view] = self.fresh()
        keep = base in self.kept or base in self.constant_registers or (base < self.n_inputs and not self.preparing)
        if view.offset == 0:
            instruction: tuple[Any, ...] = ("VIEW", register, base, torch.as_strided, (view.shape, view.strides), keep)
        else:
            instruction = ("VIEW", register, base, view_at, (view.shape, view.strides, view.offset), keep)
        self.instructions.append(instruction)
        if keep:
            self.kept.add(register)
        else:
            self._dies(view.buffer, register)
        return register

    def output(self, view: ViewOf) -> int:
        """The register of what leaves, with exactly these strides where a library call has made it."""
        register, buffer = self.view(view), self.plan.buffers[view.buffer]
        fresh = (step for step in self.plan.steps if isinstance(step, LibraryCall) and not step.may_alias)
        if register == self.registers[view.buffer] and view.strides != buffer.strides and any(buffer in step.buffers for step in fresh):
            self.instructions.append(("CALL", -1, restrided, (register, self.constant(view.strides)), ()))
        return register

    def argument(self, value: Any) -> int:
        """The register of an argument of a library call."""
        if isinstance(value, ViewOf):
            return self.view(value)
        if isinstance(value, tuple) and any(True for _ in iter_views(value)):
            registers = tuple(self.argument(v) for v in value)
            result = self.fresh()
            self.instructions.append(("LIST", result, registers))
            self.temporaries.setdefault(self.position, []).append(result)
            return result
        return self.constant(list(value) if isinstance(value, tuple) else value)

    position: int = 0
    tail: int = 0
    preparing: bool = False
    results: list[int] = field(default_factory=list)  # registers of library calls whose results are kept

    def prepare(self) -> None:
        """The instructions so far become the part that runs when weights have changed. Views made there are not there in other calls."""
        watched = tuple(self.registers[name] for name in self.plan.watched)
        sizes = tuple(int(self.plan.buffers[name].nbytes) for name in self.plan.watched)  # type: ignore[arg-type]
        self.instructions.append(("KEPT",))
        self.instructions.insert(0, ("KEEP", len(self.instructions), watched, sizes, tuple(self.results)))
        self.views = {view: register for view, register in self.views.items() if register in self.kept}
        self.preparing = False

    def kernel(self, step: FusedKernel | OrderedKernel, address: Any) -> None:
        registers = tuple(self.buffer(name) for name in parameters(step))
        moved = sum(int(self.plan.buffers[name].nbytes) for name in parameters(step))  # type: ignore[arg-type,misc]
        self.instructions.append(("KERNEL", address, registers, moved >= RELEASE_GIL))

    def table(self, step: TableKernel, address: int | str) -> None:
        registers = tuple(self.buffer(name) for row in step.rows for name in row)
        moved = sum(int(self.plan.buffers[name].nbytes) for row in step.rows for name in row)  # type: ignore[arg-type,misc]
        self.instructions.append(("TABLE", address, registers, work_of(step.sizes), moved >= RELEASE_GIL))

    def allocate_rest(self) -> None:
        """Memory for all that follows: from here on inputs are written, and nothing may raise any more."""
        for step in self.plan.steps[self.position :]:
            for name in step.writes if not isinstance(step, LibraryCall) else ():
                self.buffer(name)

    def call(self, step: LibraryCall) -> None:
        args = [self.argument(a) for a in step.args]
        kwargs = [(name, self.argument(v)) for name, v in step.kwargs]
        function = fast_callable(step)
        if step.out_op is not None:
            kwargs += [(n, self.buffer(b.name)) for n, b in zip(step.out_names, step.buffers, strict=True)]
            self.instructions.append(("CALL", -1, function, (*args, *(r for _, r in kwargs)), tuple(n for n, _ in kwargs)))
            return
        result = self.fresh() if any(b is not None for b in step.outputs) else -1
        looks = [("KERNEL", self.address_of(text), (), False) for text in (FORGET, LOOK) if convolve.hides_nan(step.op, step.args)]
        call = "CALL", result, function, (*args, *(r for _, r in kwargs)), tuple(n for n, _ in kwargs)
        self.instructions += [*looks[:1], call, *looks[1:]]
        if result < 0:
            return
        if step.single:
            buffer = step.outputs[0]
            assert buffer is not None
            self.registers[buffer.name] = result
            if buffer.name in self.plan.kept:
                self.results.append(result)
            else:
                self._dies(buffer.name, result)
            if step.op not in OPAQUE:
                self._check_layout(buffer, result)
            return
        self.temporaries.setdefault(self.position, []).append(result)
        destinations = []
        outputs = [None if b is None or self.memory.last_use.get(b.name) == self.position else b for b in step.outputs]
        for b in outputs:  # what nobody reads may be missing: the logarithms of attention without gradients
            destinations.append(-1 if b is None else self.fresh())
            if b is not None:
                self.registers[b.name] = destinations[-1]
                self._dies(b.name, destinations[-1])
        self._unpack(result, destinations, step.lists)
        for position, b in enumerate(outputs):
            if b is not None and not (position == WORKSPACE and step.op in WITH_WORKSPACE):
                self._check_layout(b, self.registers[b.name])

    def _unpack(self, result: int, destinations: list[int], lists: tuple[int, ...]) -> None:
        """The results of a call into registers; lists among them are unpacked on their own."""
        inner: list[tuple[int, list[int]]] = []
        if lists:
            rest, outer = iter(destinations), []
            for n in lists:
                outer.append(next(rest) if n < 0 else self.fresh())
                if n >= 0:
                    self.temporaries.setdefault(self.position, []).append(outer[-1])
                    inner.append((outer[-1], [next(rest) for _ in range(n)]))
            destinations = outer
        while destinations and destinations[-1] < 0:
            destinations.pop()
        self.instructions.append(("UNPACK", result, tuple(destinations)))
        for register, entries in inner:
            self._unpack(register, entries, ())

    def _check_layout(self, buffer: Buffer, register: int) -> None:
        self.instructions.append(("LAYOUT", register, laid_out, buffer.shape, buffer.strides))

    def free(self, position: int, outputs: frozenset[int] = frozenset()) -> None:
        """Drop what dies after a step."""
        dead = tuple(r for r in self.temporaries.pop(position, ()) if r not in outputs)
        if dead:
            self.instructions.append(("FREE", dead))


def same_tensor(view: ViewOf, buffer: Buffer) -> bool:
    """Is the view the whole buffer as it is?"""
    if view.offset != 0 or view.shape != buffer.shape or view.dtype is not buffer.dtype:
        return False
    return all(n == 1 or s == t for n, s, t in zip(view.shape, view.strides, buffer.strides, strict=True))


def _constant_key(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return ("object", repr(value)) if isinstance(value, list) else ("id", id(value))
    return type(value), repr(value) if isinstance(value, float) else value


def plan_code(plan: Schedule, memory: Memory, address_of: Callable[[Any], Any], builder: type[Builder] | None = None) -> PlanCode:
    """The instructions of a schedule. `address_of`: the function of each kernel, or of a text (runtime/invalid.py), or its name. `builder`: what writes them."""
    program = plan.program
    build = (builder or Builder)(plan, memory, len(program.inputs), address_of, count=len(program.inputs))
    for i, buffer in enumerate(program.inputs):
        if buffer is not None:
            build.registers[buffer.name] = i
    for constant in program.constants:
        build.registers[constant.buffer.name] = build.constant(constant.value)
    if memory.arena_bytes:
        register = build.registers["<arena>"] = build.fresh()
        build.prologue.append(("ALLOC", register, torch.empty, (memory.arena_bytes,), {"dtype": torch.uint8}, True))
    build.registers.update({name: build.registers[target] for name, target in plan.into.items()})
    build.plan = plan = _as_it_leaves(plan, frozenset(build.registers))
    build.preparing = plan.prepared > 0
    for position, step in enumerate(plan.steps):
        build.position = position
        if position == plan.prepared and plan.prepared:
            build.prepare()
        if position == plan.last:
            build.allocate_rest()
        if position == plan.tail:
            build.tail = len(build.instructions)
        if isinstance(step, FusedKernel | OrderedKernel):
            build.kernel(step, address_of(step))
        elif isinstance(step, TableKernel):
            build.table(step, address_of(step))
        else:
            build.call(step)
        build.free(position)
    kept = sum(int(plan.buffers[name].nbytes) for name in plan.kept)  # type: ignore[arg-type, misc]
    outputs = tuple(build.output(o) if isinstance(o, ViewOf) else build.constant(o) for o in program.outputs)
    tail = build.tail and build.tail + len(build.prologue)
    return PlanCode(tuple(build.prologue + build.instructions), build.count, build.n_inputs, outputs, memory.arena_bytes, kept, tail)


def _as_it_leaves(plan: Schedule, given: frozenset[str]) -> Schedule:
    """What kernels make and the graph returns is allocated with exactly the strides with which it leaves, in dimensions of size 1 too."""
    others = given.union(*({b.name for b in step.buffers} for step in plan.steps if isinstance(step, LibraryCall)))
    views = [o for o in plan.program.outputs if isinstance(o, ViewOf) and o.buffer not in others and same_tensor(o, plan.buffers[o.buffer])]
    exact = {o.buffer: replace(plan.buffers[o.buffer], strides=o.strides) for o in views}
    return replace(plan, buffers={**plan.buffers, **exact}) if exact else plan
