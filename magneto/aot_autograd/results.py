"""Deciding what a functional graph returns: user outputs, aliases, and the new numbers of written inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from magneto.aot_autograd.overloads import aten
from magneto.aot_autograd.refusal import Refusal
from magneto.aot_autograd.signature import Alias, Input, Mutation, Output, Result, Value
from magneto.aot_autograd.storage import View
from magneto.aot_autograd.views import ViewStep
from magneto.graph.layout import overlaps
from magneto.graph.meta import TensorMeta

if TYPE_CHECKING:
    from magneto.aot_autograd.trace import Tracing


class Collector:
    """Gathers the results of the functional graph; each is memory of its own, never an input's and never another result's."""

    def __init__(self, tracing: Tracing, tensors: Sequence[Any], values: Sequence[Any]) -> None:
        mode, roots = tracing.mode, tracing.roots
        self.mode = mode
        self.tensors = tensors
        self.roots = roots
        self.versions = tracing.versions
        self.histories = tracing.histories
        self.results: list[fx.Node] = []
        self._input_of = {id(tensor): index for index, tensor in enumerate(tensors) if isinstance(tensor, torch.Tensor)}
        placeholders = (node for node in mode.graph.nodes if node.op == "placeholder")
        self._place = {node: index for index, node in enumerate(placeholders)}
        self._index_of: dict[View, int] = {}
        self.carriers: dict[int, torch.Tensor] = {}
        self.gaps: dict[int, tuple[int, ...]] = {}
        self._by_object: dict[int, Output] = {}
        self._sharing: dict[int, set[int]] = {}
        self._values = [value for value in values if isinstance(value, torch.Tensor)]
        for value in self._values:
            self._sharing.setdefault(value.untyped_storage()._cdata, set()).add(id(value))
        self.written = {i for i, root in enumerate(roots) if root is not None and root.storage.version}
        self._saves = any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)

    def output(self, value: Any) -> Output:
        """How one user output is made."""
        if not isinstance(value, torch.Tensor):
            if _holds_tensor(value):
                raise Refusal("nested outputs")
            return Value(value)
        known = self._by_object.get(id(value))
        if known is None:
            known = self._by_object[id(value)] = self._tensor_output(value)
        return known

    def _tensor_output(self, value: torch.Tensor) -> Output:
        index = self._input_of.get(id(value))
        if index is not None:
            return Input(index)
        view = self.mode.view_for(value)
        root, steps = view.chain()
        number = len(self._by_object)
        if root.input_index >= 0:
            if value.requires_grad and value._base is not self.tensors[root.input_index]:
                raise Refusal("an output on an input's memory with a history of its own")
            _check_history(value)
            return self._alias(Input(root.input_index), steps, value, number)
        address = value.untyped_storage()._cdata
        alone = len(self._sharing[address]) == 1
        whole = view is root or (view.meta.is_dense() and view.meta.numel == root.meta.numel)
        if alone and whole and view.meta.dtype == root.meta.dtype and _made(value, view) not in ("among", "silent"):
            return Result(self._result(view, value))
        base = self._base_on(address)
        if base is not None and self.mode.view_for(base) is not root:
            root = self.mode.view_for(base)  # all of the memory in another shape, which autograd knows as no view
            steps = _steps_from(root, view) or ()
        if view is root and (value is base or (base is None and root not in self._index_of)):
            return Result(self._result(root, base))
        _check_history(value)
        return self._alias(Result(self._result(root, base)), steps, value, number, root.storage.keep if root.parent is None else base)

    def _alias(
        self, base: Result | Input, steps: tuple[ViewStep, ...], value: torch.Tensor, number: int, of: torch.Tensor | None = None
    ) -> Alias:
        its_view = isinstance(base, Input) and value._base is self.tensors[base.index]  # requires grad as it does, in no_grad too
        return Alias(base, steps, not value.requires_grad and not its_view, _made(value, self.mode.view_for(value), of), number)

    def _base_on(self, address: int) -> torch.Tensor | None:
        """The tensor on this memory through which gradients of all outputs on it flow; None when none of them requires grad."""
        bases = {}
        for value in self._values:
            if value.requires_grad and value.untyped_storage()._cdata == address:
                base = value if value._base is None else value._base
                bases[id(base)] = base
        if len(bases) > 1:
            raise Refusal("outputs that share memory but not their history")
        for base in bases.values():
            above = self.mode.view_for(base)
            if above.parent is not None:
                of = [self.mode.view_for(value) for value in self._values if value.untyped_storage()._cdata == address]
                whole = (
                    above.meta.is_dense()
                    and above.meta.numel == above.chain()[0].meta.numel
                    and above.meta.dtype == above.chain()[0].meta.dtype
                )
                if not whole or any(_steps_from(above, view) is None for view in of):
                    raise Refusal("outputs that share memory in a way autograd does not know")
            return base
        return None

    def _result(self, view: View, carrier: torch.Tensor | None) -> int:
        """The index of the result for `view`; `carrier` is the traced tensor whose gradient is the result's."""
        found = self._index_of.get(view)
        if found is None:
            node = self.mode.read(view)
            if self._saves and self.mode.storages.owners.get(node, view.storage) is not view.storage:
                node = self._copied(node)  # backward may read the other tensor, of which this one is a copy that the caller may write
            found = self._index_of[view] = self.add_result(node, view.meta)
            if not view.meta.is_dense() and not overlaps(view.meta.shape, view.meta.strides):
                self.gaps[found] = view.meta.strides
            if carrier is not None and carrier.requires_grad:
                if carrier.is_leaf:
                    raise Refusal("a tensor that requires grad is made in the graph")
                self.carriers[found] = carrier
        return found

    def in_parts(self, index: int) -> bool:
        """Whether the caller gets real views of this complex result only."""
        outputs = ((value, self._by_object[id(value)]) for value in self._values)
        return not any(value.is_complex() for value, output in outputs if getattr(output, "base", output) == Result(index))

    def add_result(self, node: fx.Node, meta: TensorMeta) -> int:
        """The index of a result that holds `node`, in memory of its own."""
        node = self.mode.with_strides(node, meta)
        if node.op == "placeholder" or any(node is other for other in self.results):
            node = self._copied(node)
        self.results.append(node)
        return len(self.results) - 1

    def _copied(self, node: fx.Node) -> fx.Node:
        meta: TensorMeta = node.meta["val"]
        copy = self.mode.graph.call_function(aten.clone.default, (node,))
        copy.meta.update(val=meta.with_(storage_offset=0), stack=(), stage=self.mode.stage)
        return copy

    def mutations(self) -> Iterator[Mutation]:
        """Inputs whose numbers changed. A written input is never the source of another's new numbers."""
        for index in sorted(self.written):
            root = self.roots[index]
            assert root is not None
            node = self.mode.read(root)
            place = self._place.get(node, -1) if node.op == "placeholder" else -1
            if place == index:
                continue  # written, and back to what it was
            tensor = self.tensors[index]
            recorded = tensor.grad_fn is not self.histories[index]  # not what is written under no_grad, to `.data` or to a detached alias
            source: Result | Input
            if 0 <= place < len(self.roots) and place not in self.written and not tensor.requires_grad:
                source = Input(place)
            else:
                source = Result(self.add_result(node, node.meta["val"]))
                if recorded:
                    if tensor.is_leaf:
                        raise Refusal("an input that requires grad is written out of autograd's sight")
                    self.carriers[source.index] = tensor
            counted = tensor._version != self.versions[index]
            yield Mutation(index, source, counted, not recorded)

    def check_geometry(self) -> None:
        """Inputs must still be the views of memory that they were."""
        for tensor, root in zip(self.tensors, self.roots, strict=True):
            if root is not None and self.mode.storages.view_of(tensor) is not root:
                raise Refusal("an input whose shape, strides or memory change in place")


def _steps_from(base: View, view: View) -> tuple[ViewStep, ...] | None:
    """The steps from `base`, all of its memory in another shape, to `view`; None where there are none."""
    start, steps = view.chain(base)
    if start is base:
        return steps
    if start is not base.chain()[0] or not (start.meta.is_contiguous() and base.meta.is_contiguous()):
        return None
    return ViewStep(aten.view.default, (list(start.meta.shape),)), *steps


def _made(value: torch.Tensor, view: View, base: torch.Tensor | None = None) -> str:
    """`Alias.made`. Whether two tensors have one version counter shows when one is written."""
    autograd: Any = torch._C._autograd
    base = view.storage.keep if base is None else base
    if value.is_inference() or base.is_inference():
        return ""
    if value._is_view():
        creation = autograd._get_creation_meta(value)
        if creation == autograd.CreationMeta.MULTI_OUTPUT_NODE:
            return "among"
        return "silent" if creation == autograd.CreationMeta.NO_GRAD_MODE and base.requires_grad and _history(value) is None else ""
    before, version = value._version, base._version
    torch._C._increment_version([base])
    alone = value is not base and value._version == before
    autograd._unsafe_set_version_counter((base,), (version,))
    return "apart" if alone and not value.requires_grad else ""


def _history(value: torch.Tensor) -> Any:
    try:
        return value.grad_fn
    except RuntimeError:  # its base has been written in a way that autograd forbids
        raise Refusal("a view whose history is lost") from None


def _check_history(value: torch.Tensor) -> None:
    """An output that is made again as a view of its base has the view's gradient; one that a custom autograd function returned has another."""
    base = value._base
    fn = None if base is None else _history(value)
    while fn is not None and fn is not base.grad_fn:  # type: ignore[union-attr]
        if isinstance(fn, torch.autograd.function.BackwardCFunction):
            raise Refusal("an output that a custom autograd function gives on memory of another tensor")
        fn = fn.next_functions[0][0] if fn.next_functions else None


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        return any(_holds_tensor(item) for item in value.values())
    return isinstance(value, (tuple, list)) and any(_holds_tensor(item) for item in value)
