"""Operations whose options are numbers that change from call to call: `F.leaky_relu(x, slope)`, `F.dropout(x, p)`. The graph is given the numbers as tensors of no dimensions.

Called for real, PyTorch's own operation runs with the numbers: its results, errors and random numbers. Under a dispatch mode a formula of ordinary operations is seen, which computes
what the operation's kernel does for finite numbers: to the last bit, where the kernel's exponentials are those of `exp` and the like. They keep unselected branches finite, as autograd multiplies
their gradients by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

Operation = Callable[..., Any]
_HALVES = (torch.float16, torch.bfloat16)
_LIBRARY = torch.library.Library("magneto", "FRAGMENT")  # type: ignore[no-untyped-call]
_AN_EXAMPLE = 0.5
_NN: Any = torch._C._nn


def _numbered(plain: Operation, numbers: tuple[int, ...], formula: Operation, in_place: bool = False) -> Operation:
    """`plain`, whose arguments at the places `numbers` may be numbers in tensors. `in_place`: it writes its first argument."""

    def given(args: tuple[Any, ...], number_of: Callable[[torch.Tensor], Any]) -> list[Any]:
        return [number_of(arg) if k in numbers and isinstance(arg, torch.Tensor) else arg for k, arg in enumerate(args)]

    def call(*args: Any) -> Any:
        if torch._C._len_torch_dispatch_stack() == 0:
            return plain(*given(args, torch.Tensor.item))
        try:
            if in_place:
                return args[0].copy_(formula(args[0].clone(), *given(args, lambda number: number.to(torch.float64))[1:]))
            return formula(*given(args, lambda number: number.to(torch.float64)))
        except (RuntimeError, TypeError, IndexError, ValueError):
            plain(*given(args, lambda number: _AN_EXAMPLE))  # the error is PyTorch's own
            raise

    call.__name__ = call.__qualname__ = formula.__name__.strip("_") + "_" * in_place
    call.__module__ = __name__
    return call


def _as(number: Any, x: torch.Tensor) -> Any:
    """The number in the precision in which the kernel for x computes with it."""
    return number.to(x.dtype) if isinstance(number, torch.Tensor) and x.dtype in (torch.float32, torch.float64) else number


def _pointwise(formula: Operation) -> Operation:
    """Kernels compute with halves in single precision, and round once."""

    def body(*args: Any) -> Any:
        like = args[0].dtype
        wide = [arg.float() if isinstance(arg, torch.Tensor) and arg.dtype in _HALVES else arg for arg in args]
        return formula(*[_as(arg, wide[0]) if isinstance(arg, torch.Tensor) and not arg.ndim else arg for arg in wide]).to(like)

    body.__name__ = formula.__name__
    return body


# ---- activations ---------------------------------------------------------------------------------------------------------


@_pointwise
def _leaky_relu(x: torch.Tensor, slope: Any) -> torch.Tensor:
    return x * torch.where(x > 0, 1.0, slope)


@_pointwise
def _elu(x: torch.Tensor, alpha: Any) -> torch.Tensor:
    return torch.where(x <= 0, torch.expm1(x.clamp(max=0)) * alpha, x)


@_pointwise
def _scaled_elu(x: torch.Tensor, alpha: Any, inner: Any) -> torch.Tensor:
    return torch.where(x <= 0, torch.expm1(x.clamp(max=0) * inner) * alpha, x)


def _celu(x: torch.Tensor, alpha: Any) -> torch.Tensor:
    return _scaled_elu(x, alpha, 1.0 / alpha)  # type: ignore[no-any-return]


@_pointwise
def _softplus(x: torch.Tensor, beta: Any, threshold: Any) -> torch.Tensor:
    scaled = x * beta
    above = scaled > threshold
    return torch.where(above, x, torch.where(above, 0.0, scaled).exp().log1p() / beta)


@_pointwise
def _hardtanh(x: torch.Tensor, low: Any, high: Any) -> torch.Tensor:
    """Gradients are zero at the bounds too."""
    at = x.detach()
    bounded = torch.where(at < low, low, at)
    return torch.where((at <= low) | (at >= high), torch.where(bounded > high, high, bounded), x)


@_pointwise
def _threshold(x: torch.Tensor, threshold: Any, value: Any) -> torch.Tensor:
    return torch.where(x <= threshold, value, x)


@_pointwise
def _hardshrink(x: torch.Tensor, bound: Any) -> torch.Tensor:
    return torch.where((x >= -bound) & (x <= bound), 0.0, x)


@_pointwise
def _softshrink(x: torch.Tensor, bound: Any) -> torch.Tensor:
    return torch.where(x > bound, x - bound, torch.where(x < -bound, x + bound, x * 0))


leaky_relu = _numbered(F.leaky_relu, (1,), _leaky_relu)
leaky_relu_ = _numbered(_NN.leaky_relu_, (1,), _leaky_relu, True)
elu = _numbered(F.elu, (1,), _elu)
celu = _numbered(F.celu, (1,), _celu)
elu_ = _numbered(_NN.elu_, (1,), _elu, True)
celu_ = _numbered(torch.celu_, (1,), _celu, True)
softplus = _numbered(F.softplus, (1, 2), _softplus)
hardtanh = _numbered(F.hardtanh, (1, 2), _hardtanh)
hardtanh_ = _numbered(_NN.hardtanh_, (1, 2), _hardtanh, True)
threshold = _numbered(F.threshold, (1, 2), _threshold)
threshold_ = _numbered(torch.threshold_, (1, 2), _threshold, True)
hardshrink = _numbered(F.hardshrink, (1,), _hardshrink)
softshrink = _numbered(F.softshrink, (1,), _softshrink)


# ---- losses --------------------------------------------------------------------------------------------------------------


def _reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    return (loss, loss.mean(), loss.sum())[reduction] if reduction != 0 else loss


@_pointwise
def _huber(x: torch.Tensor, y: torch.Tensor, delta: Any) -> torch.Tensor:
    distance = (x - y).abs()
    near = distance <= delta
    inside = torch.where(near, distance, 0.0)
    return torch.where(near, 0.5 * inside * inside, delta * (distance - 0.5 * delta))


@_pointwise
def _smooth_l1(x: torch.Tensor, y: torch.Tensor, beta: Any) -> torch.Tensor:
    distance = (x - y).abs()
    near = distance < beta
    inside = torch.where(near, distance, 0.0)
    return torch.where(near, 0.5 * inside * inside / beta, distance - 0.5 * beta)


def _huber_loss(x: torch.Tensor, y: torch.Tensor, reduction: int, delta: Any) -> torch.Tensor:
    return _reduced(_huber(x, y, delta), reduction)


def _smooth_l1_loss(x: torch.Tensor, y: torch.Tensor, reduction: int, beta: Any) -> torch.Tensor:
    return _reduced(_smooth_l1(x, y, beta), reduction)


def _margin_ranking_loss(x: torch.Tensor, y: torch.Tensor, target: torch.Tensor, margin: Any, reduction: int) -> torch.Tensor:
    return _reduced((-target * (x - y) + _as(margin, x)).clamp_min(0), reduction)


def _hinge_embedding_loss(x: torch.Tensor, target: torch.Tensor, margin: Any, reduction: int) -> torch.Tensor:
    beyond = torch.where(target != 1, (_as(margin, x) - x).clamp_min(0), 0.0)
    return _reduced(beyond + torch.where(target != -1, x, 0.0), reduction)


def _cosine_embedding_loss(x: torch.Tensor, y: torch.Tensor, target: torch.Tensor, margin: Any, reduction: int) -> torch.Tensor:
    if target.ndim > 1 or x.ndim != target.ndim + 1 or y.ndim != x.ndim:
        raise ValueError("no such shapes")
    dim = target.ndim
    squares = ((x * x).sum(dim) + 1e-12) * ((y * y).sum(dim) + 1e-12)
    cosine = (x * y).sum(dim) / squares.sqrt()
    apart = torch.where(target == -1, (cosine - _as(margin, x)).clamp_min(0), 0.0)
    return _reduced(torch.where(target == 1, 1 - cosine, 0.0) + apart, reduction)


def _triplet_margin_loss(
    anchor: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor, margin: Any, p: float, eps: float, swap: bool, reduction: int
) -> torch.Tensor:
    near, far = F.pairwise_distance(anchor, positive, p, eps), F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return _reduced((_as(margin, near) + near - far).clamp_min(0), reduction)


def _cross_entropy_loss(x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignored: int, smoothing: Any) -> torch.Tensor:
    """Of a smoothing that is positive."""
    dim = 0 if x.ndim == 1 else 1
    x = x.float() if x.dtype in _HALVES else x  # as autocast does
    share, rest = _as(smoothing / x.shape[dim], x), _as(1 - smoothing, x)
    if x.shape == target.shape:
        return _NN.cross_entropy_loss(x, target * rest + share, weight, reduction, ignored, 0.0)  # type: ignore[no-any-return]
    logs = torch.log_softmax(x, dim)
    chosen = _NN.nll_loss_nd(logs, target, weight, reduction, ignored)
    gone = target == ignored
    each = logs if weight is None else logs * weight.view([-1 if d == dim else 1 for d in range(x.ndim)])
    others = (-each.sum(dim)).masked_fill(gone, 0.0)
    if reduction == 1:
        kept = ~gone if weight is None else weight[target.masked_fill(gone, 0)].masked_fill(gone, 0.0)
        others = others.sum() / kept.sum()
    elif reduction == 2:
        others = others.sum()
    return chosen * rest + others * share


huber_loss = _numbered(_NN.huber_loss, (3,), _huber_loss)
smooth_l1_loss = _numbered(_NN.smooth_l1_loss, (3,), _smooth_l1_loss)
cross_entropy_loss = _numbered(_NN.cross_entropy_loss, (5,), _cross_entropy_loss)
margin_ranking_loss = _numbered(torch.margin_ranking_loss, (3,), _margin_ranking_loss)
hinge_embedding_loss = _numbered(torch.hinge_embedding_loss, (2,), _hinge_embedding_loss)
cosine_embedding_loss = _numbered(torch.cosine_embedding_loss, (3,), _cosine_embedding_loss)
triplet_margin_loss = _numbered(torch.triplet_margin_loss, (3,), _triplet_margin_loss)


# ---- random numbers ------------------------------------------------------------------------------------------------------

_LIBRARY.define(  # type: ignore[no-untyped-call]
    "drawn(str name, SymInt[] size, Tensor[] numbers, *, ScalarType dtype) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)


def _drawn(name: str, size: list[int], numbers: list[torch.Tensor], *, dtype: torch.dtype) -> torch.Tensor:
    given = [int(number.item()) if name == "random_" else number.item() for number in numbers]
    return getattr(torch.empty(size, dtype=dtype), name)(*given)  # type: ignore[no-any-return]


_LIBRARY.impl("drawn", _drawn, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _random(name: str, like: torch.Tensor, *numbers: Any) -> torch.Tensor:
    """What `torch.empty_like(like).name(*numbers)` gives on the CPU, which draws in the order of memory."""
    strides = torch.empty_like(like).stride()
    order = sorted(range(like.ndim), key=lambda d: (-strides[d], d))
    held = [number if isinstance(number, torch.Tensor) else torch.scalar_tensor(number, dtype=torch.float64) for number in numbers]
    made = torch.ops.magneto.drawn(name, [like.shape[d] for d in order], held, dtype=like.dtype)
    return made.permute([order.index(d) for d in range(like.ndim)])  # type: ignore[no-any-return]


def _dropout(x: torch.Tensor, p: Any, train: bool) -> torch.Tensor:
    """Of a probability between 0 and 1."""
    kept = 1 - p
    return x * (_random("bernoulli_", x, kept) / _as(kept, x))


def _feature_dropout(x: torch.Tensor, p: Any, train: bool) -> torch.Tensor:
    if x.ndim < 2:
        raise RuntimeError("no features")
    kept = 1 - p
    noise = _random("bernoulli_", x.new_empty([*x.shape[:2], *[1] * (x.ndim - 2)]), kept)
    return x * (noise / _as(kept, x))


dropout = _numbered(torch.dropout, (1,), _dropout)
dropout_ = _numbered(torch.dropout_, (1,), _dropout, True)
feature_dropout = _numbered(torch.feature_dropout, (1,), _feature_dropout)
feature_dropout_ = _numbered(torch.feature_dropout_, (1,), _feature_dropout, True)


def _filled(name: str) -> Operation:
    def plain(x: torch.Tensor, *numbers: float) -> torch.Tensor:
        return getattr(torch.empty_like(x), name)(*numbers)  # type: ignore[no-any-return]

    def formula(x: torch.Tensor, *numbers: Any) -> torch.Tensor:
        return _random(name, x.detach(), *numbers)

    formula.__name__ = name
    return _numbered(plain, (1, 2), formula)


fills = {name: _filled(name) for name in "random_ normal_ uniform_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_".split()}
"""A contiguous tensor like another one, full of random numbers."""


# ---- others --------------------------------------------------------------------------------------------------------------

_LIBRARY.define("statistics(Tensor x, Tensor mean, Tensor var, Tensor momentum) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]


def _statistics(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, momentum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean, var = mean.clone(), var.clone()
    torch.batch_norm(x, None, None, mean, var, True, momentum.item(), 1e-5, True)
    return mean, var


_LIBRARY.impl("statistics", _statistics, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: Any, eps: float, cudnn: bool
) -> torch.Tensor:
    """In training, with statistics."""
    result = torch.batch_norm(x, weight, bias, None, None, True, 0.0, eps, cudnn)
    with torch.no_grad():
        for old, new in zip((mean, var), torch.ops.magneto.statistics(x.detach(), mean, var, momentum), strict=True):
            old.copy_(new)
    return result


batch_norm = _numbered(torch.batch_norm, (6,), _batch_norm)


def _roll(x: torch.Tensor, dims: Any, *shifts: Any) -> torch.Tensor:
    if dims is None:
        return _roll(x.flatten(), (0,), *shifts).view(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        x = x.index_select(dim, (torch.arange(size, device=x.device) - _whole(shift)) % max(size, 1))
    return x


def _whole(number: Any) -> Any:
    return number.to(torch.int64) if isinstance(number, torch.Tensor) else number


def _rolled(x: torch.Tensor, dims: Any, *shifts: int) -> torch.Tensor:
    return x.roll(list(shifts), () if dims is None else dims)


MOST_SHIFTS = 3
roll = _numbered(_rolled, tuple(range(2, 2 + MOST_SHIFTS)), _roll)
