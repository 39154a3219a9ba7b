"""ProductKernel -> Triton text: a block of the product is summed in float32 on the matrix units, rounded as the library rounds it, and goes through the loops behind it in registers.

Blocks are taken in groups of rows, so that what the running ones read is in the cache. Operands are read through pointers or, as `Tiles.described` has it, by descriptors, whose blocks have zeros where
the matrix ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from magneto.inductor.codegen.cpp import parameters
from magneto.inductor.codegen.cpp_emit import indent
from magneto.inductor.codegen.cpp_types import CannotEmit
from magneto.inductor.codegen.triton import Writer
from magneto.inductor.codegen.triton_emit import Name
from magneto.inductor.codegen.triton_nest import VECTOR, Axis, Blocks
from magneto.inductor.codegen.triton_types import MEMORY, POINTERS
from magneto.inductor.loops.ir import Buffer, Load, Value, ViewOf
from magneto.inductor.runtime.plan_code import Described, TritonKernel
from magneto.inductor.schedule.product import ProductKernel

GROUP = 8  # rows of blocks


def triton_product(step: ProductKernel, buffers: Mapping[str, Buffer]) -> TritonKernel:
    """The kernel's text. CannotEmit for what Triton has no type or operation for, and where operands cannot be described."""
    return _Product(step, buffers).run()


class _Product(Writer):
    def __init__(self, step: ProductKernel, buffers: Mapping[str, Buffer]) -> None:
        tiles, first = step.tiles, step.batch + step.tall
        self.step = step
        self.tall, self.wide_axis = Axis("y", step.rows[step.batch : first], tiles.rows), Axis("x", step.rows[first:], tiles.columns)
        super().__init__(Blocks(step, (self.tall, self.wide_axis), False, tiles.warps, step.rows[: step.batch]), parameters(step), buffers)
        self.dtypes.update({view.buffer: view.dtype for view in step.operands})
        self.inner = int(step.a.shape[-1])  # type: ignore[arg-type]
        self.described: tuple[Described, ...] = ()

    def _resolve(self, load: Load) -> Name | Value | None:
        return Name("product", self.every) if load.buffer == self.step.result.name else super()._resolve(load)

    def run(self) -> TritonKernel:
        self._name_all()
        self._once()
        tiles = self.step.tiles
        constants = [("YBLOCK", tiles.rows), ("XBLOCK", tiles.columns), ("KBLOCK", tiles.terms)]
        sums = self._described_sum() if tiles.described else self._sum()
        lines = [*self._place(), *sums, *self._rounded(), *self._parts("y", self.tall.dims), *self._parts("x", self.wide_axis.dims)]
        lines += self.emitter.scopes[0].lines
        blocks = self.tall.blocks * self.wide_axis.blocks * prod(d.size for d in self.blocks.outer)
        grid = min(tiles.programs, blocks) or blocks
        if grid < blocks:
            lines = [f"for block in tl.range(lib.program(), {blocks}, {grid}, flatten=True):", *indent(lines)]
        else:
            lines = ["block = tl.program_id(0)", *lines]
        arguments = [
            *self.pointers.values(),
            *(f"d{n}" for n in range(len(self.described))),
            *(f"{name}: tl.constexpr" for name, _ in constants),
        ]
        text = "\n".join([f"def kernel({', '.join(arguments)}):", *indent(lines)]) + "\n"
        pointers = tuple(POINTERS[self.dtypes[name]] for name in self.names)
        return TritonKernel(text, pointers, tuple(constants), (grid,), tiles.warps, False, tiles.stages, self.described)

    def _place(self) -> list[str]:
        """Which block this is."""
        rows, columns = self.tall.blocks, self.wide_axis.blocks
        wide = ".to(tl.int64)" if self.wide else ""
        lines, block = [], "block"
        if self.blocks.outer:
            block = "part"
            lines = [f"z = (block // {rows * columns}){wide}", *self._parts("z", self.blocks.outer), f"part = block % {rows * columns}"]
        height = str(GROUP) if rows % GROUP == 0 else "height"
        lines.append(f"first = {block} // {GROUP * columns} * {GROUP}")
        if height == "height":
            lines.append(f"height = tl.minimum({rows} - first, {GROUP})")
        return [
            *lines,
            f"top = (first + {block} % {GROUP * columns} % {height}) * YBLOCK",
            f"side = {block} % {GROUP * columns} // {height} * XBLOCK",
            f"y = top{wide} + tl.arange(0, YBLOCK)[:, None]",
            f"x = side{wide} + tl.arange(0, XBLOCK)[None, :]",
            *(f"{a.name}mask = {a.name} < {a.size}" for a in self.blocks.axes if a.masked),
        ]

    def _row(self) -> str:
        return "y" if not self.tall.masked else f"(y % {self.tall.size})"  # rows that do not exist read others

    def _column(self) -> str:
        return "x" if not self.wide_axis.masked else f"(x % {self.wide_axis.size})"

    def _sum(self) -> list[str]:
        step, inner = self.step, self.inner
        masks = ["", ""]
        if inner % step.tiles.terms:
            masks = [f", mask={k} < {inner} - step * KBLOCK, other=0" for k in ("k[None, :]", "k[:, None]")]
        return [
            "k = tl.arange(0, KBLOCK)",
            f"left = {self._start(step.a)} + {self._row()} * {step.a.strides[-2]} + k[None, :] * {step.a.strides[-1]}",
            f"right = {self._start(step.b)} + k[:, None] * {step.b.strides[-2]} + {self._column()} * {step.b.strides[-1]}",
            "sums = tl.zeros((YBLOCK, XBLOCK), tl.float32)",
            f"for step in range(0, {-(-inner // step.tiles.terms)}):",
            f"    sums = tl.dot(tl.load(left{masks[0]}), tl.load(right{masks[1]}), sums)",
            f"    left += KBLOCK * {step.a.strides[-1]}",
            f"    right += KBLOCK * {step.b.strides[-2]}",
        ]

    def _described_sum(self) -> list[str]:
        step, tiles = self.step, self.step.tiles
        left = self._described(step.a, tiles.rows, tiles.terms, "top")
        right = self._described(step.b, tiles.terms, tiles.columns, "side", True)
        return [
            "sums = tl.zeros((YBLOCK, XBLOCK), tl.float32)",
            f"for step in range(0, {-(-self.inner // tiles.terms)}):",
            f"    sums = tl.dot({left}, {right}, sums)",
        ]

    def _described(self, view: ViewOf, rows: int, columns: int, place: str, second: bool = False) -> str:
        """A block of an operand, whose memory is contiguous along its rows or along its columns."""
        (height, width), (down, along) = view.shape[-2:], view.strides[-2:]
        turned = along != 1
        at, shape, block = [place, "step * KBLOCK"][:: -1 if second else 1], (height, width), (rows, columns)
        if turned:
            at, shape, block, down, along = at[::-1], shape[::-1], block[::-1], along, down
        size = view.dtype.itemsize
        if self.blocks.outer or along != 1 or down < shape[1] or down * size % VECTOR or view.offset * size % VECTOR:  # type: ignore[operator]
            raise CannotEmit("an operand that has no descriptor")
        number = len(self.described)
        self.described += ((self.names.index(view.buffer), view.offset, shape, down, block),)  # type: ignore[operator]
        return f"d{number}.load([{', '.join(at)}])" + ".T" * turned

    def _rounded(self) -> list[str]:
        step, lines = self.step, []
        if (bias := step.bias) is not None:
            pairs = list(zip(bias.shape, bias.strides, strict=True))
            steps = [0] * (3 - len(pairs)) + [0 if size == 1 else stride for size, stride in pairs]
            parts = [f" + {place} * {n}" for place, n in zip((self._row(), self._column()), steps[1:], strict=True) if n]
            lines.append(f"sums = sums + tl.load({self._start(bias)}{''.join(parts)}).to(tl.float32)")
        return [*lines, f"product = sums.to({MEMORY[step.result.dtype]}).to(tl.float32)"]

    def _start(self, view: ViewOf) -> str:
        """Where a matrix of the batch begins."""
        text = self.pointers[view.buffer] + (f" + {view.offset}" if view.offset else "")
        step = view.strides[0] if len(view.shape) == 3 and view.shape[0] != 1 else 0
        return text + (f" + z * {step}" if step else "")
