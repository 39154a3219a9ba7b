"""Operations whose functional form needs more than the schema says."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from magneto.aot_autograd.overloads import VIEW, aten, facts_of
from magneto.aot_autograd.refusal import Refusal
from magneto.aot_autograd.storage import memory_order
from magneto.graph.layout import format_strides, is_contiguous, is_dense, overlaps

if TYPE_CHECKING:
    from magneto.aot_autograd.mode import FunctionalMode
    from magneto.graph.meta import TensorMeta


def _copy_(mode: FunctionalMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    target, source = args[0], args[1]
    value = mode.nodes(source)
    if value.meta["val"].shape != tuple(target.shape):
        value = mode.emit(aten.expand.default, (value, list(target.shape)))
    mode.write(target, value)
    return target  # type: ignore[no-any-return]


def _fill_(mode: FunctionalMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    target = args[0]
    number = args[1] if len(args) > 1 else 0
    if isinstance(number, torch.Tensor):
        scalar = mode.nodes(number)
        if scalar.target is aten.full.default and scalar.meta["val"].dtype == target.dtype:
            number = scalar.args[1]
    if isinstance(number, torch.Tensor):
        value = mode.emit(aten.expand.default, (mode.nodes(number), list(target.shape)))
    else:
        value = mode.emit(aten.full.default, (list(target.shape), number), {"dtype": target.dtype, "device": target.device})
    mode.write(target, value)
    return target  # type: ignore[no-any-return]


def _bernoulli_(mode: FunctionalMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """In place the numbers are drawn in the order of memory; `bernoulli.p` draws and lays out in logical order."""
    target = args[0]
    probability = args[1] if len(args) > 1 else 0.5
    if kwargs.get("generator") is not None:
        raise Refusal("a random generator as argument")
    value = mode.nodes(target)
    meta: TensorMeta = value.meta["val"]
    order = memory_order(meta)
    if meta.is_contiguous():
        mode.write(target, mode.emit(aten.bernoulli.p, (value, probability)))
    elif meta.is_dense():
        drawn = mode.emit(aten.bernoulli.p, (mode.emit(aten.permute.default, (value, order)), probability))
        mode.write(target, mode.emit(aten.permute.default, (drawn, [order.index(d) for d in range(len(order))])))
    else:
        raise Refusal("random numbers into a view with gaps")
    return target  # type: ignore[no-any-return]


def _random_like(mode: FunctionalMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """rand_like and randn_like with a contiguous result are rand and randn: nothing of the tensor but its shape is needed. In other layouts the numbers depend on the layout."""
    source = args[0]
    if not is_contiguous(source.shape, format_strides(source.shape, source.stride(), kwargs.get("memory_format"))):
        raise Refusal("random numbers in a layout that is not contiguous")
    form = aten.rand.default if func is aten.rand_like.default else aten.randn.default
    options = {"dtype": kwargs.get("dtype") or source.dtype, "device": kwargs.get("device") or source.device}
    node = mode.emit(form, (list(source.shape),), options)
    return mode.results(node, node.meta["val"])  # type: ignore[no-any-return]


def _batch_norm(mode: FunctionalMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """native_batch_norm writes its running statistics in training, which its schema does not say; nor does it count as a version."""
    nodes = tuple(mode.nodes(a) for a in args)
    training, mean, var = args[5], args[3], args[4]
    if not training or mean is None:
        node = mode.emit(aten.native_batch_norm.default, nodes)
        return mode.results(node, node.meta["val"])
    node = mode.emit(aten._native_batch_norm_legit_functional.default, nodes)
    for target, index in ((mean, 3), (var, 4)):
        mode.write(target, mode.item(node, index))
    return tuple(mode.results(mode.item(node, i), node.meta["val"][i]) for i in range(3))


def _batch_norm_backward(mode: FunctionalMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In training the running statistics do not matter; without them nothing holds on to their old values."""
    if args[7]:
        args = (*args[:3], None, None, *args[5:])
    node = mode.emit(func, tuple(mode.nodes(a) for a in args))
    return mode.results(node, node.meta["val"])


def _index(mode: FunctionalMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        raise Refusal("indexing with a mask: how many elements it selects depends on data")
    node = mode.emit(func, tuple(mode.nodes(a) for a in args))
    return mode.results(node, node.meta["val"])


def _rrelu_with_noise(mode: FunctionalMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Its result is contiguous; the functional form keeps the input's layout."""
    if len(args) > 5 and args[5] is not None:
        raise Refusal("a random generator as argument")
    node = mode.emit(aten.rrelu_with_noise_functional.default, tuple(mode.nodes(a) for a in args))
    mode.write(args[1], mode.item(node, 1))
    meta: TensorMeta = node.meta["val"][0]
    value = mode.with_strides(mode.item(node, 0), type(meta).contiguous(meta.shape, meta.dtype, meta.device))
    return mode.results(value, value.meta["val"])  # type: ignore[no-any-return]


def _native_dropout(mode: FunctionalMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Which numbers it draws on a GPU depends on where its argument begins, counted in what a thread reads at once: 16 bytes, or less where those do not divide it. `train` is given by place
    where eager's argument begins at a multiple of that; by keyword where it does if the input does of which it is a view. What holds the numbers here may be part of something else, and is copied then."""
    x, p, train = (*args, *kwargs.values())
    storage, step, value = mode.view_for(x).storage, gcd(x.numel() * x.itemsize, 16), mode.nodes(x)
    given = storage.literal or storage.root is None or storage.root.input_index >= 0
    if _on_gpu(x) and train and step > x.itemsize and is_dense(x.shape, x.stride()):  # otherwise one element at a time
        begins = int(x.storage_offset()) - (storage.root.meta.storage_offset if given and storage.root is not None else 0)
        if begins * x.itemsize % step or storage.literal or storage.root is None or (given and storage.version):
            raise Refusal("dropout of memory that may begin between multiples of 16 bytes")
        if given:
            node = mode.emit(func, (value, p), {"train": train})
            return mode.results(node, node.meta["val"])
        if (place := _begins(value)) is None or place * x.itemsize % step:
            value = mode.emit(aten.clone.default, (value,))
    node = mode.emit(func, (value, p, train))
    return mode.results(node, node.meta["val"])


def _on_gpu(x: torch.Tensor) -> bool:
    return bool(x.is_cuda)


def _begins(node: fx.Node) -> int | None:
    """Where the node's memory begins in a memory of its own, in elements, when operations are called one after another. None: in an input's. (Operations that scatter keep that of their argument.)"""
    made: Any = node.args[0] if node.target is getitem else node
    facts = facts_of(made.target) if made.op == "call_function" else None
    if facts is None or (facts.kind != VIEW and not facts.packet.endswith("_scatter")):
        return None if facts is None else 0
    begins, meta, source = _begins(made.args[0]), node.meta["val"], made.args[0].meta["val"]
    if begins is None or meta.dtype != source.dtype:
        return None
    return begins + (meta.storage_offset - source.storage_offset if facts.kind == VIEW else 0)


def _scatter_into_view(mode: FunctionalMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The result has its argument's strides: where elements share memory there, one that is written changes others."""
    if overlaps(args[0].shape, args[0].stride(), repeated=False):
        raise Refusal(f"{func} of a tensor that overlaps itself")
    node = mode.emit(func, tuple(mode.nodes(a) for a in args), kwargs)
    return mode.results(node, node.meta["val"])  # type: ignore[no-any-return]


SPECIAL: dict[str, Callable[[FunctionalMode, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    "aten.copy_.default": _copy_, "aten.fill_.Scalar": _fill_, "aten.fill_.Tensor": _fill_, "aten.zero_.default": _fill_,
    "aten.bernoulli_.float": _bernoulli_, "aten.native_dropout.default": _native_dropout, "aten.rand_like.default": _random_like,
    "aten.randn_like.default": _random_like, "aten.native_batch_norm.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward, "aten.index.Tensor": _index,
    "aten.rrelu_with_noise.default": _rrelu_with_noise,
    **dict.fromkeys([f"aten.{view}_scatter.default" for view in ("select", "slice", "diagonal", "as_strided")], _scatter_into_view),
}  # fmt: skip
