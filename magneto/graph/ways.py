"""Functions that take another way under a dispatch mode than in eager: with the result of eager's way, and its layout.

`max_pool1d` without a gradient has a kernel of its own, which answers contiguously; under a mode it is `max_pool2d_with_indices` of one row more.
`one_hot` on the CPU looks at the classes to raise: that is an operation without a result, which stays (`opinfo.stays`); the rest is arithmetic. On a GPU it is an operation of ours:
eager's is a scatter into zeros.
`bincount` of a known number of bins is an operation of ours, which counts in these alone.
`istft` asks whether its windows add up to nothing anywhere, to raise: that is an operation without a result too.
A circular pad is written in parts into empty memory: ours is a concatenation, whose gradient is a sum of slices.
`ctc_loss` keeps for its gradient what is as wide as the longest target, a number in a tensor: ours is as wide as the targets' memory.
`channel_shuffle` on a GPU is views and a copy where one is needed: otherwise its result lies in its argument's memory.
`embedding_bag` of bags of one size on a GPU is a lookup and a sum: loops, which compute sums and gradients in one walk each (its own kernels reach 40% of what memory gives).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from magneto.base.errors import InternalError
from magneto.base.flags import config
from magneto.graph.layout import contiguous_strides
from magneto.graph.modes import without_cudnn

_LIBRARY = torch.library.Library("magneto", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("check_classes(Tensor classes, int count) -> ()")  # type: ignore[no-untyped-call]


def _check_classes(classes: torch.Tensor, count: int) -> None:
    if classes.numel():
        low, high = torch.aminmax(classes)
        if low >= 0 and high < count:
            return
    torch.nn.functional.one_hot(classes, count)


_LIBRARY.impl("check_classes", _check_classes, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("check_classes", lambda classes, count: None, "Meta")  # type: ignore[no-untyped-call]

_LIBRARY.define("one_hot(Tensor classes, int count) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.impl("one_hot", lambda classes, count: torch.nn.functional.one_hot(classes, count), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("one_hot", lambda classes, count: classes.new_empty((*classes.shape, count)), "Meta")  # type: ignore[no-untyped-call]


def _one_hot(*args: Any, **kwargs: Any) -> Any:
    count = args[1] if len(args) == 2 else kwargs.get("num_classes", -1)
    x = args[0] if args and len(args) + len(kwargs) == 2 else None
    if (
        not isinstance(x, torch.Tensor)
        or type(count) is not int
        or count == -1
        or x.dtype is not torch.int64
        or x.device.type not in ("cpu", "cuda")
        or torch._C._functorch.is_functorch_wrapped_tensor(x)
    ):
        return torch.nn.functional.one_hot(*args, **kwargs)
    if x.device.type == "cuda":
        return torch.ops.magneto.one_hot(x, count) if count > 1 and x.numel() else torch.nn.functional.one_hot(x, count)
    if x.numel() == 0:
        if count <= 0:
            raise RuntimeError("Can not infer total number of classes from empty tensor.")
        return torch.zeros((*x.shape, count), dtype=torch.int64)
    torch.ops.magneto.check_classes(x, count)
    if x.stride() != contiguous_strides(x.shape):
        x = x.clone(memory_format=torch.contiguous_format)
    return (x.unsqueeze(-1) == torch.arange(max(count, 0), device=x.device)).long()


_LIBRARY.define("bincount(Tensor x, Tensor? weights, int count) -> Tensor")  # type: ignore[no-untyped-call]


def _bincount(x: torch.Tensor, weights: torch.Tensor | None, count: int) -> torch.Tensor:
    found = torch.bincount(x, weights, count)
    return found if found.numel() == count else found[:count].clone()


def _bincount_meta(x: torch.Tensor, weights: torch.Tensor | None, count: int) -> torch.Tensor:
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return x.new_empty((count,), dtype=dtype)


_LIBRARY.impl("bincount", _bincount, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("bincount", _bincount_meta, "Meta")  # type: ignore[no-untyped-call]

_CTC = "Tensor log_probs, Tensor targets, Tensor steps, Tensor sizes"
_LIBRARY.define(f"ctc_loss({_CTC}, int blank, bool zero) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"ctc_backward(Tensor grad, {_CTC}, Tensor loss, Tensor alpha, int blank, bool zero) -> Tensor")  # type: ignore[no-untyped-call]


def _ctc(x: torch.Tensor, targets: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    loss, alpha = torch.ops.aten._ctc_loss.Tensor(x, targets, *rest)
    return loss, torch.nn.functional.pad(alpha, (0, 2 * targets.shape[1] + 1 - alpha.shape[2])).contiguous()


def _ctc_meta(x: torch.Tensor, targets: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[1:2]), x.new_empty((x.shape[1], x.shape[0], 2 * targets.shape[1] + 1))


def _ctc_backward(*args: Any) -> torch.Tensor:
    longest = int(args[4].max())
    return torch.ops.aten._ctc_loss_backward.Tensor(*args[:6], args[6][:, :, : 2 * longest + 1], *args[7:])  # type: ignore[no-any-return]


for _name, _cpu, _meta in ("ctc_loss", _ctc, _ctc_meta), ("ctc_backward", _ctc_backward, lambda *args: args[1].new_empty(args[1].shape)):
    _LIBRARY.impl(_name, _cpu, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _meta, "Meta")  # type: ignore[no-untyped-call]


def first_derivative(of: str) -> None:
    """Called by formulas that are one operation of ours, which has no derivative: a graph that asks for it is left to eager."""
    if torch.is_grad_enabled():
        raise InternalError("I202", reason=f"a second derivative of {of}")


class _Ctc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        loss, alpha = torch.ops.magneto.ctc_loss(*args)
        ctx.save_for_backward(*args[:4], loss, alpha)
        ctx.options = args[4:]
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        first_derivative("ctc_loss")
        return torch.ops.magneto.ctc_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


def ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: Any = 0, reduction: Any = "mean",
    zero_infinity: Any = False,
) -> Any:  # fmt: skip
    given = (log_probs, targets, input_lengths, target_lengths)
    if not _is_batch(*given) or type(blank) is not int or reduction not in ("none", "mean", "sum") or type(zero_infinity) is not bool:
        return torch.nn.functional.ctc_loss(*given, blank, reduction, zero_infinity)
    loss = _Ctc.apply(log_probs, targets.long(), input_lengths, target_lengths, blank, zero_infinity)  # type: ignore[no-untyped-call]
    if zero_infinity:
        loss = torch.where(loss == float("inf"), torch.zeros((), dtype=loss.dtype), loss)
    return (loss / target_lengths.clamp_min(1)).mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _is_batch(*given: Any) -> bool:
    """Is it a batch on the CPU, with targets side by side and lengths in tensors?"""
    if not all(
        isinstance(t, torch.Tensor) and t.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(t) for t in given
    ):
        return False
    (x, targets, *lengths), batch = given, given[0].shape[1:2]
    whole = x.dtype in (torch.float32, torch.float64) and all(t.dtype in (torch.int64, torch.int32) for t in given[1:])
    shaped = (x.ndim, targets.ndim) == (3, 2) and targets.shape[:1] == batch and all(t.shape == batch for t in lengths)
    return whole and shaped and 0 not in x.shape


_LIBRARY.define("check_differs(Tensor x, Tensor y) -> ()")  # type: ignore[no-untyped-call]


def _check_differs(x: torch.Tensor, y: torch.Tensor) -> None:
    if torch.equal(x, y):
        raise RuntimeError("istft: the windows do not cover the signal")


_LIBRARY.impl("check_differs", _check_differs, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("check_differs", lambda x, y: None, "Meta")  # type: ignore[no-untyped-call]


class _Differs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is asked to be equal is not: that is checked by an operation."""

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default:
            torch.ops.magneto.check_differs(*args)
            return False
        return func(*args, **(kwargs or {}))


_Differs.__torch_dispatch__ = _Differs.dispatch  # type: ignore[assignment,method-assign]  # see FakeMode


def _istft(*args: Any, **kwargs: Any) -> Any:
    """It raises where the windows add up to nothing."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if any(torch._C._functorch.is_functorch_wrapped_tensor(value) for value in given):
        return torch.istft(*args, **kwargs)
    with _Differs():  # type: ignore[no-untyped-call]
        return torch.istft(*args, **kwargs)


class _Positive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`cov` asks whether the number of degrees of freedom is none, to warn."""

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return False if func is torch.ops.aten.equal.default else func(*args, **(kwargs or {}))


_Positive.__torch_dispatch__ = _Positive.dispatch  # type: ignore[assignment,method-assign]  # see FakeMode


def _known_degrees(call: Callable[..., Any]) -> Callable[..., Any]:
    """`cov` or `corrcoef` without weights: how many observations there are is in the shape."""

    def called(*args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if args else kwargs.get("input", kwargs.get("self"))
        correction = kwargs.get("correction", 1)
        weights = kwargs.get("fweights"), kwargs.get("aweights")
        plain = isinstance(x, torch.Tensor) and x.ndim in (1, 2) and type(correction) is int and weights == (None, None)
        if not plain or x.shape[-1] <= max(correction, 0) or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return call(*args, **kwargs)
        with _Positive():  # type: ignore[no-untyped-call]
            return call(*args, **kwargs)

    return called


def _pad(*args: Any, **kwargs: Any) -> Any:
    """A circular pad is a concatenation per dimension, of parts of the same memory: the lowering makes it a lookup."""
    given: dict[str, Any] = {**dict(zip(("input", "pad", "mode"), args, strict=False)), **kwargs}
    found: list[Any] = [given.get(name) for name in ("input", "pad")]
    x, pad = found
    if given.get("mode") != "circular" or len(args) > 3 or not _is_wrapped_once(x, pad):
        return torch.nn.functional.pad(*args, **kwargs)
    for k in range(0, len(pad), 2):
        dim, (before, after) = x.ndim - 1 - k // 2, pad[k : k + 2]
        parts = [x.narrow(dim, x.shape[dim] - before, before)] * bool(before) + [x] + [x.narrow(dim, 0, after)] * bool(after)
        x = torch.cat(parts, dim) if len(parts) > 1 else x
    return _dense(x)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """`contiguous`, which keeps odd strides of dimensions of one element, without those."""
    return x if x.stride() == contiguous_strides(tuple(x.shape)) else x.clone(memory_format=torch.contiguous_format)


def _is_wrapped_once(x: Any, pad: Any) -> bool:
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or not isinstance(pad, (list, tuple)) or not pad:
        return False
    if len(pad) % 2 or x.ndim != len(pad) // 2 + 2 or not all(type(p) is int for p in pad) or not any(pad) or 0 in x.shape:
        return False
    return all(0 <= p <= x.shape[-1 - k // 2] for k, p in enumerate(pad))


BAGS_ON = "cuda"  # where bags are taken apart


def _embedding_bag(*args: Any, **kwargs: Any) -> Any:
    names = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights")
    given: dict[str, Any] = {"mode": "mean", **dict(zip(names, args, strict=False)), **kwargs}
    found: list[Any] = [given.get(name) for name in ("input", "weight", "mode", "per_sample_weights")]
    indices, weight, mode, samples = found
    others = ("offsets", "max_norm", "scale_grad_by_freq", "sparse", "include_last_offset", "padding_idx")
    if (
        len(args) > len(names)
        or any(given.get(name) is not None and given[name] is not False for name in others)
        or (samples is not None and (mode != "sum" or not isinstance(samples, torch.Tensor)))
        or not _takes_apart(indices, weight, samples)
        or mode not in ("sum", "mean")
    ):
        return torch.nn.functional.embedding_bag(*args, **kwargs)
    rows = torch.nn.functional.embedding(indices, weight)
    if samples is not None:
        rows = rows * samples.unsqueeze(-1)
    return rows.sum(1) if mode == "sum" else rows.mean(1)


def _takes_apart(indices: Any, weight: Any, samples: Any) -> bool:
    """Bags of one size in float32 or float64: sums of halves would round products, and the gradient's rows would be written out."""
    if not isinstance(indices, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return False
    if weight.device.type != BAGS_ON or indices.device != weight.device or torch.are_deterministic_algorithms_enabled():
        return False
    if samples is not None and (samples.shape != indices.shape or samples.dtype is not weight.dtype or samples.device != weight.device):
        return False
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in (indices, weight, samples) if t is not None):
        return False
    whole = indices.dtype in (torch.int32, torch.int64) and weight.dtype in (torch.float32, torch.float64)
    return whole and indices.ndim == 2 and weight.ndim == 2 and indices.numel() > 0 and config.numerics == "fast"


def _channel_shuffle(*args: Any, **kwargs: Any) -> Any:
    x, groups = args if len(args) == 2 and not kwargs else (None, 0)
    if not isinstance(x, torch.Tensor) or x.device.type != "cuda" or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return torch.nn.functional.channel_shuffle(*args, **kwargs)
    if x.ndim < 3 or type(groups) is not int or groups < 1 or x.shape[1] % groups or 0 in x.shape:
        return torch.nn.functional.channel_shuffle(*args, **kwargs)
    apart = x.view(x.shape[0], groups, x.shape[1] // groups, -1).permute(0, 2, 1, 3)
    return (apart if apart.is_contiguous() else apart.clone(memory_format=torch.contiguous_format)).view(x.shape)


def _contiguous_unless_recorded(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        x = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if not isinstance(result, torch.Tensor) or not isinstance(x, torch.Tensor) or x.device.type != "cpu":
            return result
        if (x.requires_grad and torch.is_grad_enabled()) or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return result
        if not x.is_floating_point():
            raise InternalError("I202", reason="max_pool1d of whole numbers, which eager refuses")
        return _dense(result)

    return called


WAYS: dict[Callable[..., Any], Callable[..., Any]] = {
    call: _contiguous_unless_recorded(call)
    for call in (torch.max_pool1d, torch.nn.functional.max_pool1d, torch.ops.aten.max_pool1d.default)
}
WAYS.update((call, _known_degrees(call)) for call in (torch.cov, torch.corrcoef, torch.Tensor.cov, torch.Tensor.corrcoef))
WAYS.update(dict.fromkeys((torch.istft, torch.ops.aten.istft.default), _istft))
WAYS.update(dict.fromkeys((torch.nn.functional.one_hot, torch.ops.aten.one_hot.default), _one_hot))
WAYS.update(dict.fromkeys((torch.nn.functional.pad, torch._C._nn.pad), _pad))
WAYS[torch.nn.functional.embedding_bag] = _embedding_bag
WAYS[torch.nn.functional.ctc_loss] = ctc_loss
WAYS.update(dict.fromkeys((torch.channel_shuffle, torch.nn.functional.channel_shuffle), _channel_shuffle))
WAYS.update({call: without_cudnn()(call) for call in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)})
BY_ID = {id(call): way for call, way in WAYS.items()}
