"""Backward inside a captured graph: one node that runs autograd's engine from tensors of the graph to its inputs.

The node's target is `Gradients`. In eager it calls PyTorch's engine; under a dispatch mode the engine's operations are traced like any others. What it gives is
fit to become `.grad` of the leaves: memory of its own, laid out as the engine itself would lay it out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from magneto.graph.fake_tensor import FakeMode, make_fake, meta_of
from magneto.graph.layout import is_dense
from magneto.graph.meta import TensorMeta
from magneto.graph.modes import modes_kept
from magneto.graph.unknown import EXAMPLE, probe
from magneto.graph.ways import BY_ID

_use_count = torch._C._storage_Use_Count  # type: ignore[attr-defined]


class Gradients:
    """Target of a call node: gradients of `outputs` with respect to `inputs`, None where they do not depend on one.

    Arguments: outputs, their gradients (None: ones), inputs; then tensors on the way whose hooks gave other gradients, and those (a tuple: those that the
    function behind the tensor gives). `accumulated`: the results
    are to become `.grad` of leaves, but for the last `seen` ones, which hooks see as they are.
    """

    def __init__(self, accumulated: bool, retain: bool, create: bool, unused: bool = True, seen: int = 0) -> None:
        self.__name__ = self.__qualname__ = "backward" if accumulated else "gradients"
        self.__module__ = __name__
        self.accumulated = accumulated
        self.retain = retain
        self.create = create
        self.unused = unused
        self.seen = seen

    def __call__(
        self, outputs: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor],
        hooked: Sequence[torch.Tensor] = (), given: Sequence[torch.Tensor | tuple[torch.Tensor | None, ...]] = (),
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        with _without_hooks(inputs if self.accumulated else ()), _replaced(hooked, given):
            found: list[torch.Tensor | None] = list(
                torch.autograd.grad(outputs, inputs, seeds, retain_graph=self.retain, create_graph=self.create, allow_unused=self.unused)
            )
        if self.accumulated:
            for index, leaf in enumerate(inputs[: len(inputs) - self.seen]):
                gradient = found[index]
                if gradient is not None:
                    found[index] = None
                    found[index] = _own(gradient, leaf, found)
        return tuple(found)


@contextmanager
def _without_hooks(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """The hooks of leaves are in the graph, behind the node. (Those of fake tensors are propagate_gradients' own.)"""
    traced = torch._C._len_torch_dispatch_stack() > 0
    hooked = [(leaf, leaf._backward_hooks) for leaf in leaves if not traced and leaf._backward_hooks]
    for leaf, _ in hooked:
        leaf._backward_hooks = None
    try:
        yield
    finally:
        for leaf, hooks in hooked:
            leaf._backward_hooks = hooks


@contextmanager
def _replaced(hooked: Sequence[torch.Tensor], given: Sequence[torch.Tensor | tuple[torch.Tensor | None, ...]]) -> Iterator[None]:
    """The engine goes on with `given` where it reaches `hooked`; a tuple is what the function gives that computed it."""
    handles: list[Any] = []
    for tensor, other in zip(hooked, given, strict=True):
        if isinstance(other, tuple):
            handles.append(tensor.grad_fn.register_hook(functools.partial(lambda other, own, gradients: other, other)))  # type: ignore[union-attr]
        else:
            handles.append(tensor.register_hook(functools.partial(lambda other, gradient: other, other)))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _own(gradient: torch.Tensor, leaf: torch.Tensor, others: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The gradient as autograd's engine would keep it: a copy when somebody else has the memory, or when the layout is not the leaf's."""
    strides = leaf.stride() if is_dense(tuple(leaf.shape), leaf.stride()) else TensorMeta.contiguous_strides(tuple(leaf.shape))
    if _same_strides(gradient, strides) and not _shared(gradient, others):
        return gradient
    with torch.no_grad():
        if tuple(strides) == TensorMeta.contiguous_strides(tuple(leaf.shape)):
            return gradient.clone(memory_format=torch.contiguous_format)  # its version is 0, as the engine's
        return torch.empty_strided(leaf.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _same_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    return all(size == 1 or one == two for size, one, two in zip(tensor.shape, tensor.stride(), strides, strict=True))


def _shared(gradient: torch.Tensor, others: Sequence[torch.Tensor | None]) -> bool:
    if any(other is gradient for other in others):
        return True
    if type(gradient) is not torch.Tensor:
        return False  # without memory, while propagating
    storage = gradient.untyped_storage()
    return bool(_use_count(storage._cdata) > 2)  # the tensor's, and the one just asked for


def kept(gradient: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """A copy that may become `.grad` of the leaf: hooks have seen the gradient and may hold it."""
    dense = is_dense(tuple(leaf.shape), leaf.stride())
    strides = leaf.stride() if dense else TensorMeta.contiguous_strides(tuple(leaf.shape))
    with torch.no_grad():
        return torch.empty_strided(leaf.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def propagate_gradients(
    graph: fx.Graph, grad_enabled: bool, target: Gradients, arguments: tuple[Any, ...], order: list[int] | None = None
) -> tuple[TensorMeta | None, ...]:
    """Metadata of what `target(*arguments)` gives behind the recorded nodes; `arguments` hold nodes. `order` is told the order in which the engine reaches the inputs.

    The graph runs once more on fake tensors that are linked by autograd. Errors are torch's.
    """
    env: dict[fx.Node, Any] = {}
    mode = FakeMode()
    with modes_kept(grad_enabled), mode:
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = _placeholder(probe(node.meta["val"], EXAMPLE))
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                plain: Any = getattr(type(args[0]), node.target) if isinstance(node.target, str) else node.target
                env[node] = BY_ID.get(id(plain), plain)(*args, **kwargs)
        outputs, seeds, inputs, *replaced = fx.map_arg(arguments, env.__getitem__)
        if order is not None:
            for index, leaf in enumerate(inputs):
                leaf.register_hook(functools.partial(_note, order, index))
        found = target(outputs, seeds, inputs, *replaced)
    return tuple(None if gradient is None else meta_of(gradient) for gradient in found)


def _note(order: list[int], index: int, gradient: torch.Tensor) -> None:
    order.append(index)


def _placeholder(meta: TensorMeta) -> torch.Tensor:
    fake: torch.Tensor = make_fake(meta)
    if meta.requires_grad:
        fake.requires_grad_(True)
        if not meta.is_leaf:
            with torch.enable_grad():
                fake = torch.ops.aten.clone.default(fake)
    return fake
