"""ProductKernel -> Triton text: a block of the product is summed in float32 on the matrix units, rounded as the library rounds it, and goes through the loops behind it in registers.

Blocks are taken in groups of rows, so that what the running ones read is in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping

from magneto.inductor.codegen.cpp import parameters
from magneto.inductor.codegen.cpp_emit import indent
from magneto.inductor.codegen.triton import TritonKernel, Writer
from magneto.inductor.codegen.triton_emit import Name
from magneto.inductor.codegen.triton_nest import Axis, Blocks
from magneto.inductor.codegen.triton_types import MEMORY, POINTERS
from magneto.inductor.loops.ir import Buffer, Load, Value, ViewOf
from magneto.inductor.schedule.product import ProductKernel

GROUP = 8  # rows of blocks


def triton_product(step: ProductKernel, buffers: Mapping[str, Buffer]) -> TritonKernel:
    """The kernel's text. CannotEmit for what Triton has no type or operation for."""
    return _Product(step, buffers).run()


class _Product(Writer):
    def __init__(self, step: ProductKernel, buffers: Mapping[str, Buffer]) -> None:
        tiles = step.tiles
        self.step, self.tall, self.wide_axis = (
            step,
            Axis("y", step.rows[: step.tall], tiles.rows),
            Axis("x", step.rows[step.tall :], tiles.columns),
        )
        super().__init__(Blocks(step, (self.tall, self.wide_axis), False, tiles.warps), parameters(step), buffers)
        self.dtypes.update({view.buffer: view.dtype for view in step.operands})

    def _resolve(self, load: Load) -> Name | Value | None:
        return Name("product", self.every) if load.buffer == self.step.result.name else super()._resolve(load)

    def run(self) -> TritonKernel:
        for axis in self.blocks.axes:
            self._name_symbols(axis)
        self._once()
        tiles = self.step.tiles
        constants = (("YBLOCK", tiles.rows), ("XBLOCK", tiles.columns), ("KBLOCK", tiles.terms))
        arguments = [*self.pointers.values(), *(f"{name}: tl.constexpr" for name, _ in constants)]
        lines = [
            *self._place(),
            *self._sum(),
            *self._parts("y", self.tall.dims),
            *self._parts("x", self.wide_axis.dims),
            *self.emitter.scopes[0].lines,
        ]
        text = "\n".join([f"def kernel({', '.join(arguments)}):", *indent(lines)]) + "\n"
        pointers = tuple(POINTERS[self.dtypes[name]] for name in self.names)
        return TritonKernel(text, pointers, constants, (self.tall.blocks * self.wide_axis.blocks,), tiles.warps, False, tiles.stages)

    def _place(self) -> list[str]:
        """Which block this is."""
        rows, columns = self.tall.blocks, self.wide_axis.blocks
        wide = ".to(tl.int64)" if self.wide else ""
        lines = [
            "block = tl.program_id(0)",
            f"first = block // {GROUP * columns} * {GROUP}",
            f"height = tl.minimum({rows} - first, {GROUP})",
            f"y = ((first + block % {GROUP * columns} % height) * YBLOCK){wide} + tl.arange(0, YBLOCK)[:, None]",
            f"x = ((block % {GROUP * columns} // height) * XBLOCK){wide} + tl.arange(0, XBLOCK)[None, :]",
        ]
        return lines + [f"{a.name}mask = {a.name} < {a.size}" for a in self.blocks.axes if a.masked]

    def _sum(self) -> list[str]:
        step, inner = self.step, int(self.step.a.shape[1])  # type: ignore[arg-type]
        even = inner % step.tiles.terms == 0
        row = "y" if not self.tall.masked else f"(y % {self.tall.size})"  # rows that do not exist read others
        column = "x" if not self.wide_axis.masked else f"(x % {self.wide_axis.size})"
        kinds = (
            ("", "")
            if even
            else (f", mask=k[None, :] < {inner} - step * KBLOCK, other=0", f", mask=k[:, None] < {inner} - step * KBLOCK, other=0")
        )
        lines = [
            "k = tl.arange(0, KBLOCK)",
            f"left = {self._start(step.a)} + {row} * {step.a.strides[0]} + k[None, :] * {step.a.strides[1]}",
            f"right = {self._start(step.b)} + k[:, None] * {step.b.strides[0]} + {column} * {step.b.strides[1]}",
            "sums = tl.zeros((YBLOCK, XBLOCK), tl.float32)",
            f"for step in range(0, {-(-inner // step.tiles.terms)}):",
            f"    sums = tl.dot(tl.load(left{kinds[0]}), tl.load(right{kinds[1]}), sums)",
            f"    left += KBLOCK * {step.a.strides[1]}",
            f"    right += KBLOCK * {step.b.strides[0]}",
        ]
        if step.bias is not None:
            lines.append(f"sums = sums + tl.load({self._start(step.bias)} + {column} * {step.bias.strides[-1]}).to(tl.float32)")
        return [*lines, f"product = sums.to({MEMORY[step.result.dtype]}).to(tl.float32)"]

    def _start(self, view: ViewOf) -> str:
        return f"{self.pointers[view.buffer]} + {view.offset}" if view.offset else self.pointers[view.buffer]
