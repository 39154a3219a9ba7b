"""ProductKernel -> Triton text: a block of the product is summed in float32 on the matrix units, rounded as the library rounds it, and goes through the loops behind it in registers.

Blocks are taken in groups of rows, so that what the running ones read is in the cache. Operands are read through pointers or, as `Tiles.described` has it, by descriptors, whose blocks have zeros where
the matrix ends; or they are computed by loops (`Ahead`) and rounded to the type that they have in the graph. Windows of convolutions: triton_convolution.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from magneto.inductor.codegen.cpp import parameters
from magneto.inductor.codegen.cpp_emit import indent
from magneto.inductor.codegen.cpp_types import HALVES, CannotEmit
from magneto.inductor.codegen.triton import Writer
from magneto.inductor.codegen.triton_convolution import window_sums
from magneto.inductor.codegen.triton_emit import Name, Scope
from magneto.inductor.codegen.triton_nest import VECTOR, Axis, Blocks
from magneto.inductor.codegen.triton_types import MEMORY, POINTERS, compute_type
from magneto.inductor.loops.ir import Buffer, Load, Value, ViewOf
from magneto.inductor.runtime.plan_code import Described, TritonKernel
from magneto.inductor.schedule.kernel import Member, member_loads
from magneto.inductor.schedule.product import Ahead, ProductKernel, TiledKernel
from magneto.symbolic import add, mul

GROUP = 8  # rows of blocks


def triton_product(step: TiledKernel, buffers: Mapping[str, Buffer]) -> TritonKernel:
    """The kernel's text. CannotEmit for what Triton has no type or operation for, and where operands cannot be described."""
    if isinstance(step, ProductKernel):
        return _Product(step, buffers).run()
    tall, wide = Axis("y", step.rows[: step.tall], step.tiles.rows), Axis("x", step.rows[step.tall :], step.tiles.columns)
    return Writer(Blocks(step, (tall, wide), False, step.tiles.warps, tall=True), parameters(step), buffers).run()


class _Product(Writer):
    def __init__(self, step: ProductKernel, buffers: Mapping[str, Buffer]) -> None:
        tiles, first = step.tiles, step.batch + step.tall
        self.step, self.inner = step, int(step.a.shape[-1])  # type: ignore[arg-type]
        self.tall, self.wide_axis = Axis("y", step.rows[step.batch : first], tiles.rows), Axis("x", step.rows[first:], tiles.columns)
        super().__init__(Blocks(step, (self.tall, self.wide_axis), False, tiles.warps, step.rows[: step.batch]), parameters(step), buffers)
        self.dtypes.update({view.buffer: view.dtype for view in step.operands})
        self.described: tuple[Described, ...] = ()

    def _resolve(self, load: Load) -> Name | Value | None:
        return Name("product", self.every) if load.buffer == self.step.result.name else super()._resolve(load)

    def run(self) -> TritonKernel:
        self._name_all()
        self._once()
        tiles = self.step.tiles
        constants = [("YBLOCK", tiles.rows), ("XBLOCK", tiles.columns // tiles.parts), ("KBLOCK", tiles.terms)]
        constants += [("RBLOCK", tiles.terms)] * (self.step.ahead != (None, None))
        places = [*self._parts("z", self.blocks.outer), *self._parts("y", self.tall.dims), *self._parts("x", self.wide_axis.dims)]
        behind = [*self._rounded(), *places, *self.emitter.scopes[0].lines]
        if tiles.parts > 1:  # one half of the block after the other
            halves = "sums, rest = tl.split(tl.permute(tl.reshape(sums, (YBLOCK, 2, XBLOCK)), (0, 2, 1)))"
            behind = [halves, *behind, "sums = rest", "side += XBLOCK", "x += XBLOCK", f"xmask = x < {self.wide_axis.size}", *behind]
        lines = [*self._place(), *self._sum(), *behind]
        blocks = self.tall.blocks * self.wide_axis.blocks * prod(d.size for d in self.blocks.outer)
        grid = min(tiles.programs, blocks) or blocks
        walk = f"for block in tl.range(lib.program(), {blocks}, {grid}, flatten=True):"
        lines = [walk, *indent(lines)] if grid < blocks else ["block = tl.program_id(0)", *lines]
        named = [*(f"d{n}" for n in range(len(self.described))), *(f"{name}: tl.constexpr" for name, _ in constants)]
        text = "\n".join([f"def kernel({', '.join([*self.pointers.values(), *named])}):", *indent(lines)]) + "\n"
        pointers = tuple(POINTERS[self.dtypes[name]] for name in self.names)
        return TritonKernel(text, pointers, tuple(constants), (grid,), tiles.warps, False, tiles.stages, self.described)

    def _place(self) -> list[str]:
        """Which block this is."""
        rows, columns = self.tall.blocks, self.wide_axis.blocks
        wide = ".to(tl.int64)" if self.wide else ""
        lines, block = [], "block"
        if self.blocks.outer:
            block = "part"
            lines = [f"z = (block // {rows * columns}){wide}", f"part = block % {rows * columns}"]
        height = str(GROUP) if rows % GROUP == 0 else "height"
        lines.append(f"first = {block} // {GROUP * columns} * {GROUP}")
        return [
            *lines,
            *[f"height = tl.minimum({rows} - first, {GROUP})"] * (height == "height"),
            f"top = (first + {block} % {GROUP * columns} % {height}) * YBLOCK",
            f"side = {block} % {GROUP * columns} // {height} * {self.step.tiles.columns}",
            f"y = top{wide} + tl.arange(0, YBLOCK)[:, None]",
            f"x = side{wide} + tl.arange(0, XBLOCK)[None, :]",
            *(f"{a.name}mask = {a.name} < {a.size}" for a in self.blocks.axes if a.masked),
        ]

    def _store(self, member: Member, value: Name) -> None:
        """Blocks in parts leave by the copy engine, where the result lies as it does in the product."""
        tiles, size = self.step.tiles, self.wide_axis.size
        plain = add(0, 0, mul(self.tall.walk, size), self.wide_axis.walk) is member.store and not self.blocks.outer
        if tiles.parts == 1 or not plain or self.names[-1] != member.name or member.buffer.dtype not in HALVES or size * 2 % VECTOR:
            return super()._store(member, value)
        text = self.emitter.spread(value, self.every, "tl.float32")
        self.stores.append((f"d{len(self.described)}.store([top, side], {text}.to({MEMORY[member.buffer.dtype]}))", self.every))
        self.described += ((len(self.names) - 1, 0, (self.tall.size, size), size, (tiles.rows, tiles.columns // tiles.parts)),)

    def _row(self) -> str:
        return "y" if not self.tall.masked else f"(y % {self.tall.size})"  # rows that do not exist read others

    def _column(self) -> str:
        return "x" if not self.wide_axis.masked else f"(x % {self.wide_axis.size})"

    def _sum(self) -> list[str]:
        """The loop over terms, and what stands before it."""
        step, tiles = self.step, self.step.tiles
        precision = f', input_precision="{step.precision}"' if step.precision else ""
        if step.window is not None:
            if tiles.described:
                raise CannotEmit("windows have no descriptor")
            return window_sums(step, self._start(step.a), self._start(step.b), self._row(), self._column(), precision)
        before, within, after, texts = ["k = tl.arange(0, KBLOCK)"] * (not tiles.described and None in step.ahead), [], [], []
        if tiles.described and None not in step.ahead:
            raise CannotEmit("no operand is read by descriptors")
        for name, view, ahead in (("left", step.a, step.ahead[0]), ("right", step.b, step.ahead[1])):
            second = name == "right"
            if ahead is not None:
                computed = _Operand(self, ahead, second)
                before += computed.before
                within += [*computed.within, f"{name} = {computed.text}"]
                texts.append(name)
            elif tiles.described:
                rows, columns, place = (tiles.terms, tiles.columns, "side") if second else (tiles.rows, tiles.terms, "top")
                texts.append(self._described(view, rows, columns, place, second))
            else:
                k, mask = "k[:, None]" if second else "k[None, :]", ""
                if self.inner % tiles.terms:
                    mask = f", mask={k} < {self.inner} - step * KBLOCK, other=0"
                down, across = (k, self._column()) if second else (self._row(), k)
                before.append(f"{name} = {self._start(view)} + {down} * {view.strides[-2]} + {across} * {view.strides[-1]}")
                texts.append(f"tl.load({name}{mask})")
                after.append(f"{name} += KBLOCK * {view.strides[-2 if second else -1]}")
        turn = [*within, f"sums = tl.dot({', '.join(texts)}, sums{precision})", *after]
        loop = f"for step in range(0, {-(-self.inner // tiles.terms)}):"
        return [*before, f"sums = tl.zeros(({tiles.rows}, {tiles.columns}), tl.float32)", loop, *indent(turn)]

    def _described(self, view: ViewOf, rows: int, columns: int, place: str, second: bool = False) -> str:
        """A block of an operand, whose memory is contiguous along its rows or along its columns."""
        (height, width), (down, along) = view.shape[-2:], view.strides[-2:]
        turned = along != 1
        at, shape, block = [place, "step * KBLOCK"][:: -1 if second else 1], (height, width), (rows, columns)
        if turned:
            at, shape, block, down, along = at[::-1], shape[::-1], block[::-1], along, down
        size = view.dtype.itemsize
        if size != 2 or self.blocks.outer or along != 1 or down < shape[1] or down * size % VECTOR or view.offset * size % VECTOR:  # type: ignore[operator]
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


class _Operand(Writer):
    """A block of an operand that loops compute: `text`, behind `within` in the loop over terms `r` and `before` ahead of it. Beyond the last term there are zeros."""

    def __init__(self, product: _Product, ahead: Ahead, second: bool) -> None:
        tiles, rows, first = product.step.tiles, ahead.kernel.rows, ahead.batch + ahead.tall
        sizes = (("r", tiles.terms), ("x", tiles.columns)) if second else (("y", tiles.rows), ("r", tiles.terms))
        axes = tuple(Axis(name, dims, size) for (name, size), dims in zip(sizes, (rows[ahead.batch : first], rows[first:]), strict=True))
        super().__init__(Blocks(ahead.kernel, axes, False, tiles.warps, rows[: ahead.batch]), product.names, {}, product.wide)
        product.dtypes.update({load.buffer: load.dtype for m in ahead.kernel.members for load in member_loads(m.body)})
        self._name_all()
        emitter, (terms, other) = self.emitter, axes if second else axes[::-1]
        emitter.count = product.emitter.count
        emitter.scopes.append(Scope())
        (name,) = ahead.kernel.stored
        member = self.members[name]
        value = emitter.spread(self._value(member), self.every, compute_type(member.buffer.dtype))
        product.emitter.count = emitter.count
        self.text = f"{f'tl.where(rmask, {value}, 0)' if terms.masked else value}.to({MEMORY[member.buffer.dtype]})"
        place = f"(step * RBLOCK + tl.arange(0, RBLOCK)){'.to(tl.int64)' if self.wide else ''}[{':, None' if second else 'None, :'}]"
        mask = [f"rmask = r < {terms.size}"] if terms.masked else []
        self.within = [f"r = {place}", *mask, *self._parts("r", terms.dims), *emitter.scopes.pop().lines]
        self.before = [*self._parts("z", self.blocks.outer), *self._parts(other.name, other.dims), *emitter.scopes[0].lines]
