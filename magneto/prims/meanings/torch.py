"""Torch meanings of the prims that are not simply a torch function."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto.graph.promotion import fits

Tensor = torch.Tensor


def _in_range(value: Any, dtype: torch.dtype) -> Any:
    """An integer as it is in `dtype`, which may have no room for it: it wraps round."""
    return value if fits(value, dtype) else torch.tensor(value).to(dtype).item()


def _tensor(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.full((), _in_range(value, like.dtype), dtype=like.dtype, device=like.device)


def number_first(fn: Callable[..., Tensor]) -> Callable[[Any, Any], Tensor]:
    """A binary function that also takes a Python number on the left, in the tensor's dtype."""

    def binary(a: Any, b: Any) -> Tensor:
        if isinstance(a, torch.Tensor):
            return fn(a, b)
        return fn(torch.full_like(b, _in_range(a, b.dtype)), b)

    return binary


def maximum(a: Tensor, b: Any) -> Tensor:
    """Of equal operands (zeros of either sign) the second, as in the kernels; nan wins."""
    b = _tensor(b, a)
    return torch.where((a > b) | (a != a), a, b) if a.is_floating_point() else torch.maximum(a, b)


def atan2(a: Tensor, b: Any) -> Tensor:
    return torch.atan2(a, _tensor(b, a))


def minimum(a: Tensor, b: Any) -> Tensor:
    """Of equal operands (zeros of either sign) the second, as in the kernels; nan wins."""
    b = _tensor(b, a)
    return torch.where((a < b) | (a != a), a, b) if a.is_floating_point() else torch.minimum(a, b)


def power(a: Tensor, b: Any) -> Tensor:
    """A number is spread out first: torch.pow has special cases for numbers that differ at infinities."""
    return torch.pow(a, b if isinstance(b, torch.Tensor) else torch.full_like(a, _in_range(b, a.dtype)))


def where(condition: Tensor, a: Any, b: Any) -> Tensor:
    like = a if isinstance(a, torch.Tensor) else b
    return torch.where(condition, _tensor(a, like), _tensor(b, like))


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def _over(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduce(x: Tensor, dims: Sequence[int]) -> Tensor:
        return fn(x, tuple(dims)) if len(dims) else fn(x.unsqueeze(0), (0,))

    return reduce


def _prod(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    for dim in builtins.sorted((d % max(x.ndim, 1) for d in dims), reverse=True):
        x = torch.prod(x, dim)
    return x


def _any(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return torch.any(x, dims) if x.dtype is not torch.uint8 else torch.any(x != 0, dims)


def _all(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return torch.all(x, dims) if x.dtype is not torch.uint8 else torch.all(x != 0, dims)


REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": _over(torch.sum), "prod": _over(_prod), "amax": _over(torch.amax), "amin": _over(torch.amin), "any": _over(_any),
    "all": _over(_all), "argmax": lambda x, dim: torch.argmax(x, dim), "argmin": lambda x, dim: torch.argmin(x, dim),
}  # fmt: skip


def var(x: Tensor, dims: Sequence[int], correction: float = 1) -> tuple[Tensor, Tensor]:
    result = torch.var_mean(x, tuple(dims), correction=correction) if len(dims) else torch.var_mean(x[None], (0,), correction=correction)
    return result[0], result[1]


def broadcast_in_dim(x: Tensor, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    if list(dims) != builtins.sorted(dims):
        order = builtins.sorted(range(len(dims)), key=lambda i: dims[i])
        x, dims = x.permute(order), [dims[i] for i in order]
    sizes = [1] * len(shape)
    for dim, size in zip(dims, x.shape, strict=True):
        sizes[dim] = size
    return x.reshape(sizes).expand(tuple(shape))


def slice_(x: Tensor, starts: Sequence[int], limits: Sequence[int], steps: Sequence[int]) -> Tensor:
    return x[tuple(builtins.slice(start, limit, step) for start, limit, step in zip(starts, limits, steps, strict=True))]


def cat(xs: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(xs), dim)


def pad(x: Tensor, lo: Sequence[int], hi: Sequence[int], value: Any) -> Tensor:
    amounts = [amount for below, above in zip(reversed(lo), reversed(hi), strict=True) for amount in (below, above)]
    return torch.constant_pad_nd(x, amounts, value)


def iota(n: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(n, dtype=torch.int64, device=device).to(dtype)


def full(shape: Sequence[int], value: Any, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    if index.ndim == 1:
        return torch.index_select(x, dim, index)
    if dim == 0 and x.ndim == 2:
        return torch.embedding(x, index)
    picked = torch.index_select(x, dim, index.reshape(-1))
    return picked.reshape(x.shape[:dim] + index.shape + x.shape[dim + 1 :])


def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return torch.gather(x, dim, index.long())


def _windows(x: Tensor, size: Sequence[int], step: Sequence[int], pad_: Any, dilation: Any, count: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of each window over the last dimensions the maximum, and which element it is: of equal ones the first, of several nan the last. What lies outside of x never is."""
    n, each = len(size), [*zip(size, step, pad_, dilation, count, strict=True)]
    beyond = [max(0, (c - 1) * s + (k - 1) * d + 1 - p - have) for (k, s, p, d, c), have in zip(each, x.shape[-n:], strict=True)]
    lead = [0] * (x.ndim - n)
    inside = pad(torch.ones_like(x, dtype=torch.bool), [*lead, *pad_], [*lead, *beyond], False)
    x = pad(x, [*lead, *pad_], [*lead, *beyond], 0)
    best, place = None, None
    for number, at in enumerate(itertools.product(*map(range, size))):
        where_: tuple[Any, ...] = (
            ...,
            *(builtins.slice(i * d, i * d + (c - 1) * s + 1, s) for i, (_, s, _, d, c) in zip(at, each, strict=True)),
        )
        tap, known = x[where_], inside[where_]
        if best is None or place is None:
            best, place = tap, torch.where(known, 0, -1).to(torch.int8)
            continue
        taken = known & ((tap > best) | (tap != tap) | (place < 0))
        best, place = torch.where(taken, tap, best), torch.where(taken, number, place)
    assert best is not None and place is not None
    return best, place


def window_max(*args: Any) -> Tensor:
    return _windows(*args)[0]


def window_argmax(*args: Any) -> Tensor:
    return _windows(*args)[1]
