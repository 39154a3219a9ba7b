"""numpy inside captured graphs: one operator, `magneto::numpy`, which calls numpy itself on the arrays of its tensors.

The call is an expression over `a`, the list of arrays: "numpy.add(a[0], 2.0)". The operator is functional: results share no memory with arguments (views become
view operations of torch, `region_of_view`), and a call that writes its array i is made on a copy, which becomes the first result ("1 writes: a[1].sort()").
What a call gives is found out by making it on arrays of zeros, of ones and of other numbers; where they differ, it depends on data.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto.base.dataclass import dataclass
from magneto.graph.fallback import DataDependent, UnsupportedFake
from magneto.graph.meta import TensorMeta

_WRITES = re.compile(r"(\d+) writes: ")
MAX_ELEMENTS = 1 << 22


@functools.cache
def numpy_operator() -> Any:
    """`torch.ops.magneto.numpy.default`, registered when it is first asked for."""
    library = torch.library.Library("magneto", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("numpy(str expression, str expected, Tensor[] arrays) -> Tensor[]")  # type: ignore[no-untyped-call]
    library.impl("numpy", _operator, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    library.impl("numpy", _promised, "Meta")  # type: ignore[no-untyped-call]
    _kept.append(library)
    return torch.ops.magneto.numpy.default


_kept: list[Any] = []


@functools.lru_cache(maxsize=4096)
def _function(expression: str) -> tuple[int | None, Callable[[list[Any]], Any]]:
    """(which array it writes, the expression as a function of the list of arrays)."""
    import numpy

    match = _WRITES.match(expression)
    text = expression[match.end() :] if match else expression
    code = eval(f"lambda a: {text}", {"numpy": numpy, "setitem": _setitem, "inplace": _inplace})
    return (int(match.group(1)) if match else None), code


def compiled(expression: str) -> Callable[[list[Any]], Any]:
    """The expression as a function of the list of arrays."""
    return _function(expression)[1]


def _setitem(array: Any, key: Any, value: Any) -> None:
    array[key] = value


def _inplace(name: str, left: Any, right: Any) -> Any:
    import operator

    return getattr(operator, name)(left, right)


def _call(expression: str, arrays: list[Any]) -> list[Any]:
    """Results as a flat list of arrays (numbers as arrays without dimensions)."""
    import numpy

    written, function = _function(expression)
    given = list(arrays)
    if written is not None:
        given[written] = numpy.copy(given[written], order="K")
    value = function(given)
    if written is not None:
        return [given[written]]
    return [numpy.asarray(item) for item in (value if isinstance(value, (tuple, list)) else (value,))]


def _show(array: Any) -> str:
    return f"{array.dtype}{array.shape}{array.strides if array.size else ()}"


def _operator(expression: str, expected: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    import numpy

    arrays = [tensor.detach().numpy() for tensor in tensors]
    found = _call(expression, arrays)
    if ";".join(map(_show, found)) != expected:
        raise DataDependent(expression)
    return [torch.from_numpy(item.copy("K") if any(numpy.may_share_memory(item, a) for a in arrays) else item) for item in found]


def _promised(expression: str, expected: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results' metadata, which the call carries with it."""
    import numpy

    found = []
    for part in expected.split(";") if expected else ():
        name, shape, strides = re.fullmatch(r"(\w+)\((.*)\)\((.*)\)", part).groups()  # type: ignore[union-attr]
        dtype = torch.from_numpy(numpy.empty(0, name)).dtype
        sizes = [int(n) for n in shape.split(",") if n.strip()]
        steps = [int(n) // dtype.itemsize for n in strides.split(",") if n.strip()]
        if len(steps) == len(sizes):
            found.append(torch.empty_strided(sizes, steps, dtype=dtype, device="meta"))
        else:
            found.append(torch.empty(sizes, dtype=dtype, device="meta"))
    return found


# -- what a call will give


@dataclass(frozen=True, slots=True)
class Part:
    """One array of the result. `view_of`: it is memory of that argument, `offset` elements behind its start; `same`: it is that argument."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    number: bool
    view_of: int = -1
    offset: int = 0
    same: bool = False
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """`kind`: the result is an array ("one"), a "tuple" or "list" of arrays, "none", or a "plain" Python value."""

    kind: str
    parts: tuple[Part, ...]
    expected: str
    writes: int | None
    plain: Any = None
    cls: type | None = None


def foresee(expression: str, metas: Sequence[tuple[TensorMeta, bool]]) -> Outcome:
    """What the call gives for arrays like these (the flag: a number). Raises DataDependent, UnsupportedFake."""
    import numpy

    outcomes: list[Outcome] = []
    error: Exception | None = None
    for fill in (0, 1, 2):
        arrays = [_sample(meta, fill) for meta, _ in metas]
        try:
            with warnings.catch_warnings(), numpy.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                outcomes.append(_try(expression, arrays, [number for _, number in metas]))
        except (DataDependent, UnsupportedFake):
            raise
        except Exception as problem:
            error = problem
    if not outcomes:
        raise UnsupportedFake("numpy", f"{type(error).__name__}: {error}")
    if any(outcome != outcomes[0] for outcome in outcomes):
        raise DataDependent(expression)
    return outcomes[0]


def _sample(meta: TensorMeta, fill: int) -> Any:
    if meta.storage_size() > MAX_ELEMENTS:
        raise UnsupportedFake("numpy", "an array too large to try the call on")
    import numpy

    dtype = numpy.dtype(str(meta.dtype).removeprefix("torch."))
    memory = numpy.full(max(meta.storage_size() - meta.storage_offset, 1), min(fill, 1), dtype)
    strides = [stride * dtype.itemsize for stride in meta.strides]
    array: Any = numpy.ndarray(meta.shape, dtype, memory, strides=strides)
    if fill == 2 and dtype.kind in "fciu" and array.size:
        array[...] = (((3 * _counted(array.shape)) ** 2) % 7 + 1).astype(dtype)
    return array


def _counted(shape: tuple[int, ...]) -> Any:
    import numpy

    return numpy.arange(int(numpy.prod(shape)), dtype=numpy.int64).reshape(shape) + 1


def _try(expression: str, arrays: list[Any], numbers: list[bool]) -> Outcome:
    _, function = _function(expression)
    for array in arrays:
        array.flags.writeable = False
    writes = None
    try:
        function(arrays)
    except ValueError as refused:
        if "read-only" not in str(refused):
            raise
        writes = _written(function, arrays)
    for array in arrays:
        array.flags.writeable = True
    value = function(arrays)
    return _describe(value, arrays, writes)


def _written(function: Callable[[list[Any]], Any], arrays: list[Any]) -> int:
    """The one array that the call writes."""
    for index, array in enumerate(arrays):
        array.flags.writeable = True
        try:
            function(arrays)
        except ValueError:
            array.flags.writeable = False
            continue
        return index
    raise UnsupportedFake("numpy", "it writes several arrays")


def _describe(value: Any, arrays: list[Any], writes: int | None) -> Outcome:
    import numpy

    if value is None:
        return Outcome("none", (), "", writes)
    cls = type(value)
    items = value if cls in (tuple, list) or hasattr(value, "_fields") else (value,)
    if not items or not all(isinstance(item, (numpy.ndarray, numpy.generic)) for item in items):
        return Outcome("plain", (), "", writes, value)
    parts = tuple(_part(item, arrays) for item in items)
    kind = "one" if items is not value else "list" if cls is list else "tuple"
    return Outcome(kind, parts, ";".join(_show(numpy.asarray(item)) for item in items), writes, None, cls if kind == "tuple" else None)


def _part(item: Any, arrays: list[Any]) -> Part:
    import numpy

    if isinstance(item, numpy.generic):
        torch.from_numpy(numpy.asarray(item))  # raises for kinds that torch does not know
        return Part((), (), True)
    if type(item) is not numpy.ndarray:
        raise UnsupportedFake("numpy", f"its result is a {type(item).__name__}")
    size = item.dtype.itemsize
    if any(stride < 0 or stride % size for stride in item.strides):
        raise UnsupportedFake("numpy", "its result runs backwards")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(item)  # raises for kinds that torch does not know
    read_only = not item.flags.writeable
    strides = tuple(stride // size for stride in item.strides)
    for index, array in enumerate(arrays):
        if item is array:
            return Part(item.shape, strides, False, index, 0, True)
        if numpy.may_share_memory(item, array):
            distance = item.__array_interface__["data"][0] - array.__array_interface__["data"][0]
            if item.dtype != array.dtype or distance % size:
                raise UnsupportedFake("numpy", "its result shows memory as another type")
            return Part(item.shape, strides, False, index, distance // size, read_only=read_only)
    if read_only:
        raise UnsupportedFake("numpy", "its result is read-only")
    return Part(item.shape, strides, False)
