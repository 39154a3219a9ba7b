"""Decompositions of pooling over small windows (a maximum or a sum of strided slices) and of nearest-neighbour enlargement by whole factors; on a GPU of their gradients too:
per element of the input, what comes back from the few windows that it lies in. There a maximum's place in its window is one byte, which is what its gradient reads."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from magneto.graph.promotion import compute_type
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.rows import LIBRARY
from magneto.prims.decompositions.rows import on_gpu as on_gpu
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()

MOST_TAPS = 16  # elements of a window: longer chains than this do not fit one loop
DIRECT = 9  # elements of windows that meet, on a CPU: of more, maxima are taken along one dimension after the other


def _each(values: Sequence[int], n: int) -> tuple[int, ...]:
    return tuple(values) if len(values) == n else (values[0],) * n


@functools.cache
def _in_two(size: int) -> tuple[int, int, int]:
    """(near, far, apart): `far` rows of `near` elements, which begin `apart` of each other, cover a row of so many elements with the fewest elements in sum."""
    ways = [(size, 1, 1)] if size <= MOST_TAPS else []
    ways += [
        (a, b, (size - a) // (b - 1))
        for a in range(2, size)
        for b in range(2, size)
        if (size - a) % (b - 1) == 0 and (size - a) // (b - 1) <= a
    ]
    return min(ways, key=lambda way: way[0] + way[1] + 4 * (way[1] > 1)) if size < 256 else (size, 1, 1)


class _Windows:
    """The windows of one pooling over the last `n` dimensions: `count` of them per dimension; padding where one reaches beyond the input."""

    def __init__(
        self, x: Value, size: Sequence[int], step: Sequence[int], pad: Sequence[int], ceil_mode: bool, dilation: Sequence[int] = (1,),
        n: int = 2,
    ) -> None:  # fmt: skip
        self.x, self.size, self.step, self.pad, self.dilation = x, *(_each(v, n) for v in (size, step or size, pad, dilation))
        self.axes = tuple(range(x.ndim - n, x.ndim))
        self.inputs = x.shape[-n:]
        self.count = tuple(self._count(d, ceil_mode) for d in range(n))
        self.beyond = any(self._reach(d) > self.inputs[d] + 2 * self.pad[d] for d in range(n))
        self.spread = any(d != 1 for d in self.dilation)

    @property
    def meet(self) -> bool:
        """Do windows have elements in common?"""
        return any(k > s for k, s in zip(self.size, self.step, strict=True))

    @property
    def apart(self) -> bool:
        """Rows that lie in memory as they are, of windows that neither meet nor reach beyond: a CPU's loops do better than the library then."""
        return not (self.meet or self.beyond or any(self.pad) or self.spread) and self.x.meta.strides[-1] == 1

    def _count(self, d: int, ceil_mode: bool) -> int:
        rest = self.inputs[d] + 2 * self.pad[d] - self.dilation[d] * (self.size[d] - 1) - 1
        count = (rest + (self.step[d] - 1 if ceil_mode else 0)) // self.step[d] + 1
        return count - 1 if ceil_mode and (count - 1) * self.step[d] >= self.inputs[d] + self.pad[d] else count

    def _reach(self, d: int) -> int:
        """Where the last window ends, counted from the first padded element."""
        return (self.count[d] - 1) * self.step[d] + self.size[d]

    def fit(self) -> bool:
        return math.prod(self.size) <= MOST_TAPS and min(self.count) > 0 and self.x.numel() > 0

    def taps(self) -> list[Value]:
        """Per element of a window, in order of rows, the values of all windows there; zeros beyond the edges."""
        lo, hi = [0] * self.x.ndim, [0] * self.x.ndim
        for d, axis in enumerate(self.axes):
            lo[axis], hi[axis] = self.pad[d], max(0, self._reach(d) - self.inputs[d] - self.pad[d])
        x = self.x
        if any(lo) or any(hi):
            x = x.b.emit("pad", x, tuple(lo), tuple(hi), 0.0)
        return [functools.reduce(lambda y, at: self._along(y, *at), enumerate(tap), x) for tap in itertools.product(*map(range, self.size))]

    def cut(self) -> Value | None:
        """Windows of many elements that lie side by side, as a reduction: x with two dimensions for each of its last, the second of them a window's; None for others (and on a CPU)."""
        fits = self.step == self.size and not any(self.pad) and not self.spread and not self.beyond and min(self.count) > 0
        if not on_gpu(self.x) or not fits or math.prod(self.size) <= MOST_TAPS or not self.x.numel():
            return None
        x = self.x
        for d, axis in enumerate(self.axes):
            x = x.narrow(axis, 0, self.count[d] * self.size[d])
        return x.reshape((*x.shape[: self.axes[0]], *itertools.chain(*zip(self.count, self.size, strict=True))))

    def passes(self) -> list[tuple[tuple[int, ...], ...]]:
        """Maxima of large windows as maxima along one dimension after the other, and of long windows as maxima of maxima of neighbours: arguments of `window_max`. Of equal elements the first one stays, row by row,
        as it does in the window. Empty where that is no gain."""
        near_and_far = [_in_two(k) for k in self.size]
        if (
            math.prod(self.size) <= (DIRECT if self.meet and not on_gpu(self.x) else MOST_TAPS)
            or min(self.count) < 1
            or not self.x.numel()
            or max(map(max, near_and_far)) > MOST_TAPS
        ):
            return []
        found, now = [], list(self.inputs)
        for d in reversed(range(len(self.size))):
            (near, far, apart), step, pad, spread, count = near_and_far[d], self.step[d], self.pad[d], self.dilation[d], self.count[d]
            each = math.gcd(step, apart * spread) if far > 1 else step
            begun = count if far == 1 else ((count - 1) * step + (far - 1) * apart * spread) // each + 1
            for one in ((near, each, pad, spread, begun), (far, step // each, 0, apart * spread // each, count)):
                args = [[other] * len(now) for other in (1, 1, 0, 1)] + [now]
                for every, own in zip(args, one, strict=True):
                    every[d] = own
                if one[0] > 1 or one[1] > 1:
                    found.append(tuple(map(tuple, args)))
        return found

    def folded(self) -> tuple[int, ...]:
        """The dimensions of such an x that are windows'."""
        return tuple(axis + d + 1 for d, axis in enumerate(self.axes))

    def nearest(self) -> list[Value]:
        """As `taps`, with the nearest element of the input (which every window has) in place of those beyond its edges: no mask is needed."""
        x = self.x
        return [self._nearest(self._nearest(x, 0, i), 1, j) for i in range(self.size[0]) for j in range(self.size[1])]

    def _nearest(self, x: Value, d: int, start: int) -> Value:
        first, last = start - self.pad[d], start - self.pad[d] + (self.count[d] - 1) * self.step[d]
        if first >= 0 and last < self.inputs[d]:
            return x.narrow(self.axes[d], first, last + 1, self.step[d])
        index = x.b.iota(self.count[d]) * self.step[d] + first
        index = index.maximum(0) if first < 0 else index
        index = index.minimum(self.inputs[d] - 1) if last >= self.inputs[d] else index
        return x.b.emit("index_select", x, self.axes[d], index)

    def _along(self, x: Value, d: int, start: int) -> Value:
        return x.narrow(self.axes[d], start, start + (self.count[d] - 1) * self.step[d] + 1, self.step[d])

    def around(self, d: int, device: torch.device) -> Iterator[tuple[Value, Value | None, Value]]:
        """Along a dimension, for each element of the input the windows around it, the nearest first: which window, whether it is one (None: it always is), and which element of it this is."""
        inputs, size, step, pad, count = self.inputs[d], self.size[d], self.step[d], self.pad[d], self.count[d]
        steps = -(-(inputs + pad) // step)

        def viewed(length: int, at: int) -> Value:
            return (
                self.x.b.iota(length, torch.int64, device).along((steps, step), (at,)).reshape((steps * step,)).narrow(0, pad, pad + inputs)
            )

        nearest, first = viewed(steps, 0), viewed(step, 1)  # of a place counted from the padding's first: place // step and place % step
        for k in range(-(-size // step)):
            window, tap = nearest - k, first + k * step
            known = [(i // step - k, i % step + k * step) for i in range(pad, inputs + pad)]
            conditions = []
            if any(w < 0 and t < size for w, t in known):
                conditions.append(window >= 0)
            if any(w >= count and t < size for w, t in known):
                conditions.append(window < count)
            if any(t >= size for _, t in known):
                conditions.append(tap < size)
            inside = functools.reduce(operator.and_, conditions) if conditions else None
            yield window.maximum(0).minimum(count - 1), inside, tap

    def inside(self, d: int) -> Value:
        """How many elements of each window along a dimension are of the input."""
        first = self.x.b.iota(self.count[d]) * self.step[d] - self.pad[d]
        return (first + self.size[d]).minimum(self.inputs[d]) - first.maximum(0)


def _max_pool(dims: int) -> tuple[Any, Any]:
    """Of equal values the first one stays. (2 * padding <= size: every window has elements of the input.) With indices, or of three dimensions, only on a GPU."""

    def forward(
        b: Builder, x: Value, size: Sequence[int], step: Sequence[int] = (), pad: Sequence[int] = (0,), dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> Any:  # fmt: skip
        return _maxima(b, _Windows(x, size, step, pad, ceil_mode, dilation, dims)) if dims == 2 or on_gpu(x) else LIBRARY

    def backward(b: Builder, grad: Value, x: Value, *windows: Any) -> Any:
        size, step, pad, dilation, ceil_mode, indices = windows
        return _maximum_returned(b, grad, _Windows(x, size, step, pad, ceil_mode, dilation, dims), indices)

    return forward, backward


for _dims in (2, 3):
    ROWS[f"aten.max_pool{_dims}d_with_indices.default"], ROWS[f"aten.max_pool{_dims}d_with_indices_backward.default"] = _max_pool(_dims)


def _maxima(b: Builder, windows: _Windows) -> Any:
    x = windows.x
    if b.wanted == {0} and x.dtype is not torch.bool and (cut := windows.cut()) is not None:
        return cut.reduce("amax", windows.folded()), None
    if b.wanted == {0} and x.dtype is not torch.bool and (passes := windows.passes()):
        return functools.reduce(lambda y, args: b.emit("window_max", y, *args), passes, x), None
    if not windows.fit() or x.dtype is torch.bool:
        return LIBRARY
    if (on_gpu(x) or windows.apart) and x.dtype.is_floating_point and (b.wanted != {0} or windows.spread or len(windows.size) != 2):
        return _places(b, windows)
    if b.wanted != {0} or windows.spread:
        return LIBRARY
    first, *rest = windows.nearest()
    for value in rest:
        first = value.maximum(first)
    return first, None


def _places(b: Builder, windows: _Windows) -> tuple[Value, Value]:
    """Maxima and their indices in the input, which are computed of their places in the windows: those are what a gradient reads."""
    x = windows.x
    args = (x, windows.size, windows.step, windows.pad, windows.dilation, windows.count)
    values, place = b.emit("window_max", *args), b.emit("window_argmax", *args)
    rest, index, below = place.to(torch.int64), None, math.prod(windows.size)
    for d, axis in enumerate(windows.axes):
        below //= windows.size[d]
        tap = b.emit("floordiv", rest, below) if below > 1 else rest
        rest = rest - tap * below
        first = b.iota(windows.count[d], torch.int64, x.device) * windows.step[d] - windows.pad[d]
        where = first.along(values.shape, (axis,)) + tap * windows.dilation[d]
        index = where if index is None else index * windows.inputs[d] + where
    assert index is not None
    b.places[index.node] = place
    return values, index


def _avg_pool(dims: int) -> Any:
    def pool(
        b: Builder, x: Value, size: Sequence[int], step: Sequence[int] = (), pad: Sequence[int] = (0,), ceil_mode: bool = False,
        count_include_pad: bool = True, divisor: int | None = None,
    ) -> Any:  # fmt: skip
        """Of three dimensions (local response norms) only on a GPU."""
        windows = _Windows(x, size, step, pad, ceil_mode, n=dims)
        if (dims == 3 and not on_gpu(x)) or not x.dtype.is_floating_point or divisor == 0:
            return LIBRARY
        dtype, number = compute_type(x.dtype), float(divisor or math.prod(windows.size))
        if (cut := windows.cut()) is not None:
            return (cut.to(dtype).reduce("sum", windows.folded()) / number).to(x.dtype)
        if not windows.fit() or (windows.beyond and count_include_pad and divisor is None):
            return LIBRARY
        total, *rest = (tap.to(dtype) for tap in windows.taps())
        for value in rest:
            total = total + value
        if divisor is not None or count_include_pad or not (any(windows.pad) or windows.beyond):
            return (total / number).to(x.dtype)
        inside = functools.reduce(operator.mul, (windows.inside(d).along(windows.count, (d,)) for d in range(dims)))
        return (total / inside.to(dtype).broadcast(total.shape)).to(x.dtype)

    return pool


for _dims in (2, 3):
    ROWS[f"aten.avg_pool{_dims}d.default"] = _avg_pool(_dims)


@row("affine_grid_generator.default")
def _affine_grid(b: Builder, theta: Value, size: Sequence[int], align_corners: bool) -> Any:
    """Of images, on a GPU: the places of a grid by each matrix."""
    if len(size) != 4 or not on_gpu(theta) or theta.dtype is not torch.float32 or 0 in size:
        return LIBRARY

    def places(n: int) -> Value:
        """`n` numbers from -1 to 1 (centres of so many intervals, unless corners are aligned)."""
        at, step = b.iota(n, torch.int64, theta.device), 2 / max(n - 1, 1)
        ends = (at < n // 2).where(at.to(theta.dtype) * step - 1.0, 1.0 - (n - 1 - at).to(theta.dtype) * step)
        ends = ends if n > 1 else ends * 0.0
        return ends if align_corners else ends * float(n - 1) / float(n)

    n, _, rows, columns = size
    shape = (n, rows, columns, 2)
    first, second, third = (theta.narrow(2, k, k + 1).reshape((n, 2)).along(shape, (0, 3)) for k in range(3))
    return places(columns).along(shape, (2,)) * first + places(rows).along(shape, (1,)) * second + third


def _parts(x: Value, counts: Sequence[int]) -> list[int] | None:
    """The last dimensions of x, each cut into so many equal parts; None where they cannot be."""
    whole = x.numel() and x.dtype.is_floating_point and all(c > 0 and s % c == 0 for s, c in zip(x.shape[-2:], counts, strict=True))
    return [n for s, c in zip(x.shape[-2:], counts, strict=True) for n in (c, s // c)] if whole else None


@row("_adaptive_avg_pool2d.default")
def _adaptive(b: Builder, x: Value, size: Sequence[int]) -> Any:
    parts, lead = _parts(x, size), x.ndim - 2
    if parts is None:
        return LIBRARY
    total = x.to(compute_type(x.dtype)).reshape((*x.shape[:-2], *parts))
    if on_gpu(x) or parts[2] == 1 or x.meta.strides[-1] != 1:
        total = total.reduce("sum", (lead + 1, lead + 3))
    else:  # rows are added up as they lie
        total = total.reduce("sum", (lead + 1,)).reduce("sum", (lead + 2,))
    return (total / float(parts[1] * parts[3])).to(x.dtype)


@row("_adaptive_avg_pool2d_backward.default")
def _adaptive_backward(b: Builder, grad: Value, x: Value) -> Any:
    parts, lead = _parts(x, grad.shape[-2:]), x.ndim - 2
    if parts is None:
        return LIBRARY
    share = grad.to(compute_type(grad.dtype)) / float(parts[1] * parts[3])
    dims = (*range(lead), lead, lead + 2)
    return share.along((*x.shape[:-2], *parts), dims).reshape(x.shape).to(x.dtype)


@row("adaptive_max_pool2d.default")
def _adaptive_max(b: Builder, x: Value, size: Sequence[int]) -> Any:
    """Of several NaN the last is the maximum's place, of equal numbers the first."""
    parts, lead = _parts(x, size), x.ndim - 2
    if parts is None or (1 in b.wanted and not on_gpu(x) and (parts[0], parts[2]) != (1, 1)):
        return LIBRARY
    rows, height, columns, width = parts
    order = (*range(lead), lead, lead + 2, lead + 1, lead + 3)
    windows = x.reshape((*x.shape[:-2], *parts)).transpose(order).reshape((*x.shape[:-2], rows, columns, height * width))
    place = b.iota(height * width, torch.int64, x.device).along(windows.shape, (lead + 2,))
    last = b.emit("ne", windows, windows).where(place, -1).reduce("amax", (lead + 2,))
    tap = (last >= 0).where(last, b.emit("argmax", windows, lead + 2))
    row_, column = b.emit("floordiv", tap, width), b.emit("remainder", tap, width)
    first = [b.iota(n, torch.int64, x.device).along(tap.shape, (lead + d,)) for d, n in enumerate((rows, columns))]
    index = (first[0] * height + row_) * x.shape[-1] + first[1] * width + column
    return windows.reduce("amax", (lead + 2,)), index


def _sources(inputs: int, outputs: int, scale: float | None) -> list[int]:
    """Which element each result is taken from, as the library computes it in single precision."""
    ratio = torch.tensor(1.0 / scale if scale else inputs / outputs, dtype=torch.float32)
    found = (torch.arange(outputs, dtype=torch.float32) * ratio).floor().clamp(max=inputs - 1)
    return found.int().tolist()


def _enlarged(x: Value, size: Sequence[int], scales: Sequence[float | None]) -> Any:
    lead = x.ndim - len(size)
    shape: list[int] = list(x.shape[:lead])
    dims = list(range(lead))
    for inputs, outputs, scale in zip(x.shape[lead:], size, scales, strict=True):
        if outputs % inputs or _sources(inputs, outputs, scale) != [k // (outputs // inputs) for k in range(outputs)]:
            return LIBRARY
        dims.append(len(shape))
        shape += [inputs, outputs // inputs]
    return x.along(shape, dims).reshape((*x.shape[:lead], *size))


def _nearest(dims: int) -> Any:
    def with_size(b: Builder, x: Value, size: Sequence[int], *scales: float | None) -> Any:
        return _enlarged(x, size, [*scales, *[None] * (dims - len(scales))]) if x.numel() else LIBRARY

    def with_factors(b: Builder, x: Value, size: Sequence[int] | None, factors: Sequence[float] | None) -> Any:
        if not x.numel():
            return LIBRARY
        if size is None:
            assert factors is not None
            return _enlarged(x, [int(s * f) for s, f in zip(x.shape[-dims:], factors, strict=True)], factors)
        return _enlarged(x, size, [None] * dims)

    return with_size, with_factors


for _dims in (1, 2, 3):
    ROWS[f"aten.upsample_nearest{_dims}d.default"], ROWS[f"aten.upsample_nearest{_dims}d.vec"] = _nearest(_dims)


# ---- gradients -----------------------------------------------------------------------------------------------------------


def _returned(b: Builder, grad: Value, windows: _Windows, chosen: Any = None) -> Value:
    """Per element of the input the sum of what its windows give back. `chosen(how its windows are looked up, which elements of them it is)`: the condition under which they give it."""
    x, axes = windows.x, windows.axes
    dtype = compute_type(grad.dtype)
    total: Value | None = None
    for around in itertools.product(*(windows.around(d, x.device) for d in range(len(axes)))):

        def looked_up(v: Value, around: Any = around) -> Value:
            return functools.reduce(lambda v, at: b.emit("index_select", v, at[0], at[1][0]), zip(axes, around, strict=True), v)

        value, condition = looked_up(grad).to(dtype), None
        if chosen is not None:
            condition = chosen(looked_up, [tap for _, _, tap in around])
        for (_, inside, _), axis in zip(around, axes, strict=True):
            if inside is not None:
                spread = inside.along(x.shape, (axis,))
                condition = spread if condition is None else condition & spread
        value = value if condition is None else condition.where(value, 0.0)
        total = value if total is None else total + value
    assert total is not None
    return total.to(grad.dtype)


def _maximum_returned(b: Builder, grad: Value, windows: _Windows, indices: Value) -> Any:
    x, place = windows.x, b.places.get(indices.node)
    if not (on_gpu(x) or windows.apart) or not windows.fit() or windows.spread:
        return LIBRARY

    def flat(parts: Sequence[Value], sizes: Sequence[int]) -> Value:
        spread = (part.along(windows.inputs, (d,)) for d, part in enumerate(parts))
        first, *rest = spread
        for part, size in zip(rest, sizes[1:], strict=True):
            first = first * size + part
        return first.along(x.shape, windows.axes)

    if place is not None:
        return _returned(
            b, grad, windows, lambda looked_up, taps: looked_up(place).to(torch.int32).eq(flat(taps, windows.size).to(torch.int32))
        )
    here = flat([b.iota(size, torch.int64, x.device) for size in windows.inputs], windows.inputs)
    return _returned(b, grad, windows, lambda looked_up, taps: looked_up(indices).eq(here))


@row("avg_pool2d_backward.default")
def _avg_pool_backward(
    b: Builder, grad: Value, x: Value, size: Sequence[int], step: Sequence[int], pad: Sequence[int], ceil_mode: bool, count_include_pad: bool,
    divisor: int | None,
) -> Any:  # fmt: skip
    windows = _Windows(x, size, step, pad, ceil_mode)
    if (
        not windows.fit()
        or not x.dtype.is_floating_point
        or divisor == 0
        or (windows.meet and not on_gpu(x) and grad.meta.strides[-1] != 1)
    ):
        return LIBRARY
    if divisor is None and (windows.beyond or (any(windows.pad) and not count_include_pad)):
        return LIBRARY
    count = float(divisor or windows.size[0] * windows.size[1])
    return _returned(b, grad.to(compute_type(grad.dtype)) / count, windows).to(grad.dtype)


def _nearest_backward(dims: int) -> Any:
    def row(b: Builder, grad: Value, size: Sequence[int], inputs: Sequence[int], *scales: float | None) -> Any:
        lead = grad.ndim - dims
        if not grad.numel():
            return LIBRARY
        factors = [large // small for large, small in zip(size, inputs[lead:], strict=True)]
        given = [*scales, *[None] * (dims - len(scales))]
        for small, large, factor, scale in zip(inputs[lead:], size, factors, given, strict=True):
            if not factor or large % small or _sources(small, large, scale) != [k // factor for k in range(large)]:
                return LIBRARY
        if math.prod(factors) > MOST_TAPS:
            return LIBRARY
        total: Value | None = None
        for starts in itertools.product(*map(range, factors)):
            value = grad
            for d, (start, factor, large) in enumerate(zip(starts, factors, size, strict=True), lead):
                value = value.narrow(d, start, large, factor)
            value = value.to(compute_type(grad.dtype))
            total = value if total is None else total + value
        assert total is not None
        return total.to(grad.dtype)

    return row


for _dims in (1, 2, 3):
    ROWS[f"aten.upsample_nearest{_dims}d_backward.default"] = _nearest_backward(_dims)
