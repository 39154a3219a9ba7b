"""Sizes that only a run knows: what `nonzero`, a boolean mask or `nms` return.

Such a size has no symbol. A tensor that has one is described by several *probes*: its metadata, had the size been this number or that one. Every operation
on it is propagated once for each probe. What all probes agree on is known (a dimension, contiguity, a shared memory); asking for anything else raises
SizeUnknown, which ends the graph at that place of the program. So no made-up number ever leaves a probe.

Two probes are large and hardly divisible, different for each unknown size: sizes that broadcast against each other, or divide, only by chance do not fit. One is of medium size.
The others are small: 1 and 0 are those at which operations change what they do (`squeeze`, `split`), and from which `x[:100]` is told from a hundred elements. Of
two sizes each is 0 in some probe where the other is not, so that what depends on their difference (`x[n:m]`) does not agree in all of them. An
operation that fails for one of the small numbers would fail in the program: the graph raises then, and the interpreter runs the frame. One that fails for
the large ones (an unknown size added to a known one) is a graph break.

The sizes of inputs that vary from call to call are described likewise. What the probes agree on is then no more than likely: every size that comes is tried out before
the graph is used with it (`resize.py`). Their probes are like the size at hand, which is one of them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from magneto.graph.meta import TensorMeta

_CODES = tuple(itertools.combinations(range(5), 2))
N_PROBES = 3 + 5
EXAMPLE = 2  # the probe with sizes as programs have them
LARGE_PROBES = 2  # the first ones: these must not fail
LARGE = 1 << 26
LIMIT = 1 << 25  # no size or number of the program is larger: what is cut off there would look as if it were not cut


FAILED: Any = type("Failed", (), {"__repr__": lambda self: "<failed>"})()


class SizeUnknown(Exception):
    """Something depends on a size that only a run knows (of `what`, where that can be told)."""

    what: Any = None


def _hardly_divisible(start: int, step: int) -> Iterator[int]:
    """Every `step`-th number from `start` on that is prime, or has large factors only."""
    candidates = (n for n in itertools.count(start | 1, 2) if all(n % d for d in range(3, min(int(n**0.5), 100) + 1, 2)))
    return itertools.islice(candidates, 0, None, step)


class Sizes:
    """The unknown sizes of one region. `of` remembers the counts that are known to be equal: those of one mask, until it is written. `found`: how often such
    a size was asked for; `counted`: whether it may be."""

    def __init__(self, counted: bool = True) -> None:
        self.counted, self.found = counted, 0
        self._taken: set[int] = set()
        self._series = (_hardly_divisible(LARGE, 1), _hardly_divisible(LARGE + LARGE // 2, 2), _hardly_divisible(53, 1))
        self._count = 0
        self.of: dict[Any, tuple[int, ...]] = {}

    def fresh(self) -> tuple[int, ...]:
        """What a size that nothing is known about is in each probe."""
        small = [0] * 5
        one, other = _CODES[self._count % len(_CODES)]
        small[one], small[other] = 1, 2 + self._count % 7
        self._count += 1
        return (*[next(series) for series in self._series], *small)

    def varying(self, example: int, step: int = 1) -> tuple[int, ...]:
        """The probes of an input's size that varies in steps: below the one at hand, as what it is a part of may be no larger (a table of positions)."""
        below = (
            n for n in range(example // step - 1, 10, -1) if n * step not in self._taken and all(n % d for d in range(2, int(n**0.5) + 1))
        )
        above = (n for n in _hardly_divisible(11, 1) if n * step not in self._taken and n * step != example)
        found = []
        for _ in range(LARGE_PROBES):
            found.append(step * next(below, 0) or step * next(above))
            self._taken.add(found[-1])
        n = len(self._taken)
        return (*found, example, *(step * (3 + (n + k * (n + 3)) % 11) for k in range(3)), step * (2 + n % 3), step * (4001 + 10 * n))

    def beyond(self, end: int) -> int:
        """One probe of a stride of an input that varies: there is a gap behind what ends there."""
        found = next(n for n in _hardly_divisible(end + 8, 1) if n not in self._taken)
        self._taken.add(found)
        return found


def _agreed(read: Callable[[TensorMeta], Any], what: str) -> Callable[[UnknownMeta], Any]:
    def get(self: UnknownMeta, *args: Any) -> Any:
        found = [read(meta, *args) for meta in self.probes if meta is not None]
        if any(value != found[0] for value in found):
            unknown = SizeUnknown(f"the {what} of a tensor whose size depends on data")
            unknown.what = self
            raise unknown
        return found[0]

    return get


class UnknownMeta(TensorMeta):
    """Metadata of a tensor of which some size, stride or offset is unknown. `probes[i]` is None where what made it fails for that probe."""

    __slots__ = ("probes",)
    probes: tuple[TensorMeta | None, ...]

    def __init__(self, probes: tuple[TensorMeta | None, ...]) -> None:
        first = next(meta for meta in probes if meta is not None)
        for name in ("dtype", "device", "requires_grad", "is_leaf"):
            object.__setattr__(self, name, getattr(first, name))
        object.__setattr__(self, "probes", probes)

    shape = property(_agreed(lambda meta: meta.shape, "shape"))  # type: ignore[assignment]
    strides = property(_agreed(lambda meta: meta.strides, "strides"))  # type: ignore[assignment]
    storage_offset = property(_agreed(lambda meta: meta.storage_offset, "offset"))  # type: ignore[assignment]
    lazy = property(_agreed(lambda meta: meta.lazy, "lazy conjugation"))  # type: ignore[assignment]
    numel = property(_agreed(lambda meta: meta.numel, "number of elements"))  # type: ignore[assignment]
    nbytes = property(_agreed(lambda meta: meta.nbytes, "number of elements"))  # type: ignore[assignment]
    is_contiguous = _agreed(TensorMeta.is_contiguous, "layout")  # type: ignore[assignment]
    is_channels_last = _agreed(TensorMeta.is_channels_last, "layout")  # type: ignore[assignment]
    is_dense = _agreed(TensorMeta.is_dense, "layout")  # type: ignore[assignment]
    storage_size = _agreed(TensorMeta.storage_size, "memory")  # type: ignore[assignment]

    @property
    def ndim(self) -> int:
        return next(len(meta.shape) for meta in self.probes if meta is not None)

    def sizes(self) -> tuple[int | None, ...]:
        shapes = [meta.shape for meta in self.probes if meta is not None]
        return tuple(column[0] if len(set(column)) == 1 else None for column in zip(*shapes, strict=True))

    def with_(self, **changes: Any) -> TensorMeta:
        return UnknownMeta(tuple(None if meta is None else meta.with_(**changes) for meta in self.probes))

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.") + self.shown_sizes() + (" grad" if self.requires_grad else "")

    __repr__ = __str__
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class UnknownNumber:
    """A Python number that the graph computes: such a size, or what arithmetic makes of it. `example`: a value that it may well have (None: not known)."""

    __slots__ = ("example", "probes")

    def __init__(self, probes: tuple[Any, ...], example: Any) -> None:
        self.probes = probes
        self.example = example

    @property
    def type(self) -> type:
        return type(self.probes[0])

    def __repr__(self) -> str:
        return f"{self.type.__name__} that depends on data"


def arithmetic(fn: Callable[..., Any], args: Sequence[Any], sizes: Sizes, exact: bool) -> UnknownNumber:
    """`fn` of numbers, some unknown. Not `exact`: a number that nothing is known about but its type."""
    exact = exact or not sizes.found
    if sizes.found and too_large(args):
        raise SizeUnknown("beside a number of many millions")
    results: list[Any] = []
    for index in range(N_PROBES):
        try:
            results.append(fn(*probe(tuple(args), index)))
        except Exception as error:
            if index < LARGE_PROBES:
                raise SizeUnknown(f"{fn.__name__}: {error}") from error
            results.append(None)
    kinds = {type(result) for result in results if result is not None}
    if len(kinds) > 1 or not kinds <= {int, float, bool}:
        raise SizeUnknown(f"what {fn.__name__} gives depends on data")
    kind = kinds.pop()
    try:
        example = fn(*[arg.example if isinstance(arg, UnknownNumber) else arg for arg in args])
    except Exception:
        example = None
    if kind is bool and sizes.found:
        results = [size % 2 == 1 for size in sizes.fresh()]
    elif not exact:
        results = [kind(size) for size in sizes.fresh()]
    return UnknownNumber(tuple(results), example)


def too_large(value: Any) -> bool:
    """Whether there is a size or number among nested arguments that reaches the order of the probes."""
    if type(value) is int:
        return abs(value) > LIMIT and value not in (sys.maxsize, -sys.maxsize - 1)
    if isinstance(value, UnknownMeta):
        return any(size is not None and size > LIMIT for size in value.sizes())
    if isinstance(value, TensorMeta):
        return any(size > LIMIT for size in value.shape)
    if isinstance(value, dict):
        return any(map(too_large, value.values()))
    if isinstance(value, slice):
        return too_large((value.start, value.stop, value.step))
    return isinstance(value, (tuple, list)) and any(map(too_large, value))


def probe(value: Any, index: int) -> Any:
    """Nested arguments as one probe has them. LookupError where there is nothing for this probe."""
    if isinstance(value, (UnknownMeta, UnknownNumber)):
        found = value.probes[index]
        if found is None:
            raise LookupError(index)
        return found
    if isinstance(value, tuple):
        items = [probe(item, index) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [probe(item, index) for item in value]
    if isinstance(value, dict):
        return {key: probe(item, index) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(probe(value.start, index), probe(value.stop, index), probe(value.step, index))
    return value


def merge(values: Sequence[Any]) -> Any:
    """One description of what an operation returned for each probe (or FAILED): what they agree on, or what is unknown of it."""
    present = [value for value in values if value is not FAILED]
    if not present:
        return FAILED
    first = present[0]
    if any(type(value) is not type(first) for value in present):
        raise SizeUnknown("what it returns depends on data")
    if isinstance(first, TensorMeta):
        return _merge_metas(values, present, first)
    if isinstance(first, dict):
        if any(list(value) != list(first) for value in present):
            raise SizeUnknown("what it returns depends on data")
        return {key: merge([FAILED if value is FAILED else value[key] for value in values]) for key in first}
    if isinstance(first, (tuple, list)):
        if any(len(value) != len(first) for value in present):
            raise SizeUnknown("the number of its results depends on data")
        items = [merge([FAILED if value is FAILED else value[index] for value in values]) for index in range(len(first))]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if any(value != first for value in present):
        raise SizeUnknown("the number it returns depends on data")
    return first


def _merge_metas(values: Sequence[Any], present: Sequence[TensorMeta], first: TensorMeta) -> TensorMeta:
    kind = (len(first.shape), first.dtype, first.device, first.requires_grad, first.is_leaf)
    if any((len(meta.shape), meta.dtype, meta.device, meta.requires_grad, meta.is_leaf) != kind for meta in present):
        raise SizeUnknown("the number of dimensions depends on data")
    if all(meta == first for meta in present):
        return first
    return UnknownMeta(tuple(None if value is FAILED else value for value in values))
