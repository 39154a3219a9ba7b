"""How Triton folds a reduction: a block at once, or elementwise into accumulators that are folded behind the loop.

Elements outside the row take the neutral element. Maxima and minima let NaN through; argmax and argmin carry (value, index) pairs, the first extremum wins.
Squared deviations (m2) are exact in one walk: each lane of the block carries the mean of what it has met, by which Welford's formula corrects the sum; the lanes' means are joined last.
"""

from __future__ import annotations

import torch

from magneto.inductor.codegen.triton_emit import Emitter, Name
from magneto.inductor.codegen.triton_types import compute_type, convert, number
from magneto.inductor.schedule.kernel import Member

SEARCHES = ("argmax", "argmin")


class Fold:
    """One reduction of one kernel whose rows have `length` elements."""

    def __init__(self, member: Member, emitter: Emitter, every: frozenset[str], length: int) -> None:
        self.member, self.emitter, self.every, self.length = member, emitter, every, length
        self.kind = member.kind
        dtype = member.acc_dtype
        self.logical = self.kind in ("any", "all") or (dtype is torch.bool and self.kind in ("max", "min"))
        self.type = "tl.int32" if self.logical else compute_type(dtype)
        self.accumulator = emitter.fresh("a")

    @property
    def neutral(self) -> str:
        if self.logical:
            return "0" if self.kind in ("any", "max") else "1"
        if self.kind in ("sum", "m2", "prod"):
            return "1" if self.kind == "prod" else "0"
        dtype, low = self.member.acc_dtype, self.kind in ("max", "argmax")
        if dtype.is_floating_point:
            return number(-float("inf") if low else float("inf"), dtype)
        if dtype is torch.bool:
            return "False" if low else "True"
        limits = torch.iinfo(dtype)
        return str(limits.min if low else limits.max)

    @property
    def _behind(self) -> str:
        """The index that makes rows of a block of results."""
        return ":, " * (len(self.emitter.axes) - 1) + "None"

    def _element(self, value: Name) -> str:
        """The value over the whole block, the neutral element outside the row."""
        text = f"{value.text}.to(tl.int32)" if self.logical else value.text
        if not value.axes:
            text = f"tl.full({self.emitter.shape(self.every)}, {text}, {self.type})"
        elif value.axes != self.every:
            text = f"tl.broadcast_to({text}, {self.emitter.shape(self.every)})"
        mask = self.emitter.mask(self.every)
        return text if mask is None else f"tl.where({mask}, {text}, {self._typed(self.neutral)})"

    def _typed(self, text: str) -> str:
        return f"tl.full([], {text}, {self.type})"

    def _place(self, flat: Name | None) -> str:
        assert flat is not None
        kind = "tl.int64" if self.emitter.wide else "tl.int32"
        text = self.emitter.spread(flat, self.every, kind)
        mask = self.emitter.mask(self.every)
        return text if mask is None else f"tl.where({mask}, {text}, {(1 << (63 if self.emitter.wide else 31)) - 1})"

    def _reduced(self, text: str, index: str = "") -> str:
        axis = len(self.emitter.axes) - 1
        kind = {"any": "max", "all": "min"}.get(self.kind, self.kind)
        if kind in SEARCHES:
            return f"tl.reduce(({text}, {index}), {axis}, lib.{kind.replace('arg', 'arg_')})"
        if kind in ("sum", "m2"):
            return f"tl.sum({text}, {axis})"
        if kind == "prod":
            return f"tl.reduce({text}, {axis}, lib.product)"
        if self.member.acc_dtype.is_floating_point and not self.logical:
            return f"tl.reduce({text}, {axis}, lib.{kind}imum)"
        return f"tl.{kind}({text}, {axis})"

    def _result(self, text: str, index: str = "") -> Name:
        """The row's result in the buffer's dtype."""
        rows = self.every - {"r"}
        goal = self.member.buffer.dtype
        if self.kind in SEARCHES:
            pair = self.emitter.fresh("a")
            self.emitter.line(f"{pair}, {pair}i = {self._reduced(text, index)}", rows)
            return self.emitter.name(f"{pair}i[{self._behind}].to({compute_type(goal)})", rows)
        whole = f"{self._reduced(text)}[{self._behind}]"
        if self.logical:
            return self.emitter.name(convert(f"({whole} != 0)", torch.bool, goal), rows)
        return self.emitter.name(convert(f"{whole}.to({self.type})", self.member.acc_dtype, goal), rows)

    # ---- one block -------------------------------------------------------------------------------------------------------

    def whole(self, value: Name, flat: Name | None) -> Name:
        """Of a block that holds the whole row."""
        text = self._away(value) if self.kind == "m2" else self._element(value)
        return self._result(text, self._place(flat) if self.kind in SEARCHES else "")

    # ---- a loop ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        shape, rows = self.emitter.shape(self.every), self.every - {"r"}
        self.emitter.line(f"{self.accumulator} = tl.full({shape}, {self.neutral}, {self.type})", rows)
        if self.kind == "m2":
            self.emitter.line(f"{self.accumulator}m = {self.accumulator}", rows)
        if self.kind in SEARCHES:
            kind, last = ("tl.int64", 63) if self.emitter.wide else ("tl.int32", 31)
            self.emitter.line(f"{self.accumulator}i = tl.full({shape}, {(1 << last) - 1}, {kind})", rows)

    def step(self, value: Name, flat: Name | None) -> None:
        if self.kind == "m2":
            self._correct(value)
            return
        a, v = self.accumulator, self._element(value)
        kind = {"any": "max", "all": "min"}.get(self.kind, self.kind)
        if kind in SEARCHES:
            text = f"{a}, {a}i = lib.{kind.replace('arg', 'arg_')}({a}, {a}i, {v}, {self._place(flat)})"
        elif kind in ("sum", "prod"):
            text = f"{a} = {a} {'+' if kind == 'sum' else '*'} {v}"
        else:
            of_floats = self.member.acc_dtype.is_floating_point and not self.logical
            text = f"{a} = {'lib' if of_floats else 'tl'}.{kind}imum({a}, {v})"
        self.emitter.line(text, self.every)

    def end(self) -> Name:
        return self._result(self._joined()) if self.kind == "m2" else self._result(self.accumulator, f"{self.accumulator}i")

    # ---- squared deviations ----------------------------------------------------------------------------------------------

    def _away(self, value: Name) -> str:
        """Of a block that holds the row: from its mean."""
        a, axis, mask = self.accumulator, len(self.emitter.axes) - 1, self.emitter.mask(self.every)
        self.emitter.line(f"{a}m = tl.sum({self._element(value)}, {axis})[:, None] / {float(self.length)!r}", self.every - {"r"})
        away = f"{self.emitter.spread(value, self.every, self.type)} - {a}m"
        self.emitter.line(f"{a}d = {away if mask is None else f'tl.where({mask}, {away}, {self._typed(str(0))})'}", self.every)
        return f"({a}d * {a}d)"

    def _correct(self, value: Name) -> None:
        """One more element for each lane: all have met as many."""
        a, v, mask = self.accumulator, self.emitter.spread(value, self.every, self.type), self.emitter.mask(self.every)
        self.emitter.line(f"{a}d = {v} - {a}m", self.every)
        new = {f"{a}n": f"{a}m + {a}d * (1.0 / tl.full([], offset // RBLOCK + 1, {self.type}))", f"{a}s": f"{a} + {a}d * ({v} - {a}n)"}
        for (name, text), old in zip(new.items(), (f"{a}m", a), strict=True):
            self.emitter.line(f"{name} = {text}", self.every)
            self.emitter.line(f"{old} = {name}" if mask is None else f"{old} = tl.where({mask}, {name}, {old})", self.every)

    def _joined(self) -> str:
        """Behind the loop: the lanes' own deviations, and those of their means, by how many elements each has met."""
        a, rows, axis = self.accumulator, self.every - {"r"}, len(self.emitter.axes) - 1
        self.emitter.line(f"{a}w = (({self.length - 1} + RBLOCK - tl.arange(0, RBLOCK)[None, :]) // RBLOCK).to({self.type})", rows)
        self.emitter.line(f"{a}d = {a}m - tl.sum({a}m * {a}w, {axis})[:, None] / {float(self.length)!r}", rows)
        return f"({a} + {a}d * {a}d * {a}w)"
