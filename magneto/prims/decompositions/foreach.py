"""Operations on lists of tensors (`_foreach_add`, ...): on the CPU eager runs the operation on one tensor after the other, and so do their rows."""

from __future__ import annotations

from typing import Any

import torch

from magneto.prims.decompositions import activations, factories, norms, pointwise, reductions
from magneto.prims.decompositions.rows import LIBRARY, Row
from magneto.prims.value import Builder, Value

ROWS: dict[str, Row] = {}

_SINGLE: dict[str, Row] = {
    name: fn for family in (pointwise, activations, reductions, norms, factories) for name, fn in family.ROWS.items()
}

_NAMES = {"maximum": "clamp_min", "minimum": "clamp_max", "norm": "linalg_vector_norm"}
"""Whose operation on one tensor has another name."""

_OVERLOADS = {
    "List": ("Tensor", "Tensor_Tensor"),
    "Scalar": ("Tensor_Scalar", "Scalar", "default"),
    "ScalarList": ("Tensor_Scalar", "Scalar", "default"),
    "ScalarAndTensor": ("Scalar",),
}

_LEFT_OUT = ("addcmul.Tensor", "addcdiv.Tensor")
"""The numbers of all tensors in one tensor: eager reads them as numbers of Python."""

_KEYWORDS = {"addcmul": (2, ("value",)), "addcdiv": (2, ("value",)), "norm": (1, ("dtype",))}
"""How many arguments besides the tensor the operation on one tensor takes by position, and the names of the others."""


def _with_keywords(single: Row, form: tuple[int, tuple[str, ...]]) -> Row:
    count, names = form[0] + 1, form[1]

    def row(b: Builder, *args: Any, **kwargs: Any) -> Any:
        named = {key: value for key, value in zip(names, args[count:], strict=False) if value is not None}
        return single(b, *args[:count], **named, **kwargs)

    return row


def _single_row(name: str, overload: str) -> Row | None:
    """The row of the operation on one tensor."""
    packet = f"aten.{_NAMES.get(name, name)}"
    for choice in _OVERLOADS.get(overload, (overload,)):
        if (found := _SINGLE.get(f"{packet}.{choice}")) is not None:
            return found
    return _SINGLE.get(packet)


def _each(single: Row, listed: frozenset[str], names: tuple[str, ...], subtracts: bool) -> Row:
    """`listed`: arguments with an entry for each tensor."""

    def row(b: Builder, *args: Any, **kwargs: Any) -> Any:
        positional = dict(zip(names, args, strict=False))
        count = next(len(value) for key, value in (positional | kwargs).items() if key in listed)
        results = []
        for i in range(count):
            one = [value[i] if key in listed else value for key, value in positional.items()]
            named = {key: value[i] if key in listed else value for key, value in kwargs.items()}
            if type(named.get("alpha")) is bool or (subtracts and any(type(value) is bool for value in one)):
                return LIBRARY  # which raises
            results.append(single(b, *one, **named))
            if not isinstance(results[-1], Value):
                return LIBRARY
        return tuple(results)

    return row


def _declare(name: str, overload: str) -> None:
    single = _single_row(name, overload)
    if single is None or f"{name}.{overload}" in _LEFT_OUT:
        return
    schema = getattr(getattr(torch.ops.aten, f"_foreach_{name}"), overload)._schema
    listed = frozenset(a.name for a in schema.arguments if str(a.type).startswith("List["))
    if name in _KEYWORDS:
        single = _with_keywords(single, _KEYWORDS[name])
    ROWS[f"aten._foreach_{name}.{overload}"] = _each(single, listed, tuple(a.name for a in schema.arguments), name == "sub")


for _packet in (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp expm1 floor frac lerp lgamma log log10 log1p log2 "
    "maximum minimum mul neg norm pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc"
).split():
    for _overload in getattr(torch.ops.aten, f"_foreach_{_packet}").overloads():
        if not _overload.endswith("out"):
            _declare(_packet, _overload)


def _unscale(b: Builder, gradients: Any, found: Value, inverse: Value) -> Any:
    """GradScaler's: every gradient times `inverse`, and 1.0 instead of `found` when one of them is not finite."""
    if not gradients or any(g.dtype not in (torch.float32, torch.float16, torch.bfloat16) or g.numel() == 0 for g in gradients):
        return LIBRARY
    scaled, bad = [], []
    for gradient in gradients:
        wide = gradient.to(torch.float32)
        scaled.append((wide * inverse.reshape(()).broadcast(gradient.shape)).to(gradient.dtype))
        finite = (wide - wide).eq(0.0)
        bad.append(finite.unary("logical_not").reduce("any", tuple(range(wide.ndim))).reshape((1,)))
    any_bad = b.cat(bad, 0).reduce("any", (0,)).broadcast(found.shape)
    return tuple(scaled), any_bad.where(1.0, found)


ROWS["aten._amp_foreach_non_finite_check_and_unscale.default"] = _unscale
