"""TableKernel -> one Triton kernel for the rows of a table, whatever their number and sizes.

Parameters are two memories on the device: the addresses of all tensors, row after row, and for each block (row, first element, elements of the row). Blocks that lie inside their
row, which are almost all, are computed without masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from magneto.inductor.codegen.cpp import parameters
from magneto.inductor.codegen.cpp_emit import indent
from magneto.inductor.codegen.triton import Writer
from magneto.inductor.codegen.triton_emit import NARROW, Emitter
from magneto.inductor.codegen.triton_nest import Axis, Blocks, blocks_of
from magneto.inductor.codegen.triton_types import MEMORY, POINTERS
from magneto.inductor.runtime.plan_code import TritonKernel, TritonTable
from magneto.inductor.schedule.kernel import TableKernel, member_loads
from magneto.symbolic import Const

BLOCK, WARPS = 1024, 4
ALIGNMENT = 16  # bytes


class _Block(Writer):
    """The statements of one block."""

    def __init__(self, step: TableKernel, wide: bool, masked: bool) -> None:
        body = step.body
        axes = (Axis("x", body.rows, BLOCK),) if body.rows else ()
        super().__init__(Blocks(body, axes, False, WARPS), parameters(body), {})
        self.wide = wide
        emitter = Emitter(self.pointers, [a.name for a in axes], {"x": "xmask"} if masked else {}, wide, self._resolve)
        emitter.blocks, emitter.divisors = self.emitter.blocks, self.emitter.divisors
        self.emitter = emitter

    def lines(self) -> list[str]:
        for axis in self.blocks.axes:
            self._name_symbols(axis)
        self._once()
        return self.emitter.scopes[0].lines


def columns_of(step: TableKernel, into: Mapping[str, str]) -> tuple[int, ...]:
    """Per column the first one that is the same memory in every row: outputs may be written `into` inputs."""
    if step.offsets:
        return tuple(range(len(step.rows[0])))
    memories = [tuple(into.get(row[c], row[c]) for row in step.rows) for c in range(len(step.rows[0]))]
    return tuple(memories.index(memory) for memory in memories)


def triton_table(step: TableKernel, into: Mapping[str, str]) -> TritonTable:
    """The kernel of a table. `into`: outputs in the memory of inputs. CannotEmit for what Triton has no type or operation for."""
    if step.offsets:
        return _repeated(step)
    wide = max(step.sizes) + BLOCK >= NARROW
    names = parameters(step.body)
    columns = columns_of(step, into)
    own = sorted(set(columns))
    inside = _Block(step, wide, False)
    full = _full(step, names)
    rows = [f"row = table + tl.load(item) * {len(own)}"]
    for i, (name, column) in enumerate(zip(names, columns, strict=True)):
        place = f"tl.load(row + {own.index(column)}).to(tl.pointer_type({MEMORY[inside.dtypes[name]]}))" if column == i else f"p{column}"
        rows.append(f"p{i} = {place}")
    if step.body.rows:
        kind = "tl.int64" if wide else "tl.int32"
        rows += ["if ALIGNED:", *indent([f"p{i} = tl.multiple_of(p{i}, 16)" for i, whole in enumerate(full) if whole])]
        rows += [
            "start = tl.multiple_of(tl.load(item + 1), XBLOCK)",
            "size = tl.load(item + 2)",
            f"x = start.to({kind}) + tl.arange(0, XBLOCK)",
            "if start + XBLOCK <= size:",
            *indent(inside.lines()),
            "else:",
            *indent([f"xmask = x < size.to({kind})", *_Block(step, wide, True).lines()]),
        ]
    else:
        rows += inside.lines()
    head = "def kernel(p0, p1, XBLOCK: tl.constexpr, ALIGNED: tl.constexpr):"
    text = "\n".join([head, *indent(["table = p0", "item = p1 + tl.program_id(0).to(tl.int64) * 3", *rows])]) + "\n"
    pointer = POINTERS[torch.int64]
    block = BLOCK if step.body.rows else 0
    kernel = TritonKernel(text, (pointer, pointer), (("XBLOCK", max(block, 1)), ("ALIGNED", 1)), (1,), WARPS if block else 1, False)
    return TritonTable(kernel, tuple(full[i] for i in own), step.sizes, block)


def _repeated(step: TableKernel) -> TritonTable:
    """The kernel of one row, which takes its addresses from the table. The grid's last axis counts rows."""
    names, blocks = parameters(step.body), blocks_of(step.body)
    writer = Writer(blocks, names, {}, step.wide)
    lines = writer.statements()
    sizes = [writer.dtypes[name].itemsize for name in names]
    offsets = [tuple(offset * size for offset, size in zip(row, sizes, strict=True)) for row in step.offsets]
    aligned = tuple(all(offset % ALIGNMENT == 0 for offset in column) for column in zip(*offsets, strict=True))
    rows = [f"row = p0 + tl.program_id({len(blocks.grid)}).to(tl.int64) * {len(names)}"]
    rows += [f"p{i} = tl.load(row + {i}).to(tl.pointer_type({MEMORY[writer.dtypes[name]]}))" for i, name in enumerate(names)]
    rows += ["if ALIGNED:", *indent([f"p{i} = tl.multiple_of(p{i}, {ALIGNMENT})" for i, whole in enumerate(aligned) if whole] or ["pass"])]
    constants = [(f"{a.name.upper()}BLOCK", a.block) for a in blocks.axes]
    head = f"def kernel(p0, p1, {', '.join(f'{name}: tl.constexpr' for name, _ in constants)}, ALIGNED: tl.constexpr):"
    text = "\n".join([head, *indent([*rows, *lines])]) + "\n"
    pointer = POINTERS[torch.int64]
    asserts = "tl.device_assert(" in text
    kernel = TritonKernel(text, (pointer, pointer), (*constants, ("ALIGNED", 1)), blocks.grid, blocks.warps, asserts)
    return TritonTable(kernel, aligned, step.sizes, 0, tuple(offset for row in offsets for offset in row))


def _full(step: TableKernel, names: Sequence[str]) -> tuple[bool, ...]:
    """Which columns are read or written at every element."""
    found = {m.name for m in step.body.members if m.full and not isinstance(m.store, Const)}
    found |= {load.buffer for m in step.body.members for load in member_loads(m.body) if not isinstance(load.index, Const)}
    return tuple(name in found for name in names)
