"""What autograd's engine does while a backward is traced: which results each gradient comes from, and in which order the leaves get theirs.

A gradient is None where nothing arrives, and zeros where something arrives that a formula does not read (of `round`, `angle`): the operations
that were recorded do not tell the two apart.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils.hooks import RemovableHandle

from magneto import _C

if TYPE_CHECKING:
    from magneto.aot_autograd.mode import FunctionalMode


class Arrivals:
    """`order`: the leaves' indices as their gradients came. `bits[node][slot]`: the results from which something reaches `slot` of autograd's `node`, as a number with a bit for each."""

    def __init__(self, mode: FunctionalMode, outputs: Sequence[torch.Tensor]) -> None:
        self.mode = mode
        self.outputs = outputs
        self.order: list[int] = []
        self.bits: dict[Any, dict[int, int]] = {}
        self.leaf_nodes: dict[int, Any] = {}

    def origins(self, leaf: torch.Tensor) -> frozenset[int]:
        """The results whose gradients make the leaf's."""
        bits = _union(self.bits.get(self.leaf_nodes.get(id(leaf)), {}))
        return frozenset(k for k in range(len(self.outputs)) if bits >> k & 1 or not bits)

    def follow(self) -> Iterator[Any]:
        """Hooks on all of autograd's nodes behind the outputs."""
        for k, output in enumerate(self.outputs):
            slots = self.bits.setdefault(output.grad_fn, {})
            slots[output.output_nr] = slots.get(output.output_nr, 0) | 1 << k
        todo = list(self.bits)
        seen = set(todo)
        while todo:
            node = todo.pop()
            variable = getattr(node, "variable", None)
            if variable is not None:
                self.leaf_nodes[id(variable)] = node
                continue
            yield node.register_hook(functools.partial(self._ran, node))
            found = {following for following, _ in node.next_functions if following is not None} - seen
            seen |= found
            todo.extend(found)

    def _ran(self, node: Any, given: Sequence[Any], taken: Sequence[Any]) -> None:
        """`node` has made the gradients `given` of what arrived, `taken`."""
        arrived = self.bits.get(node, {})
        everything = _union(arrived)
        # A custom function gets zeros in place of what is missing.
        whole = isinstance(node, torch.autograd.function.BackwardCFunction) or all(bits == everything for bits in arrived.values())
        for (following, slot), gradient in zip(node.next_functions, given, strict=False):
            if following is not None and gradient is not None:
                bits = everything if whole else self._read(gradient, taken, arrived) or everything
                slots = self.bits.setdefault(following, {})
                slots[slot] = slots.get(slot, 0) | bits

    def _read(self, gradient: torch.Tensor, taken: Sequence[Any], arrived: Mapping[int, int]) -> int:
        """From which results the gradients come that `gradient` is computed of."""
        sources: dict[fx.Node, int] = {}
        for slot, one in enumerate(taken):
            source = self._value(one)
            if source is not None:
                sources[source] = sources.get(source, 0) | arrived.get(slot, 0)
        value = self._value(gradient)
        todo = [] if value is None else [value]
        seen, bits = set(todo), 0
        while todo:
            found = todo.pop()
            if found in sources:
                bits |= sources[found]
                continue
            before = {source for source in found.all_input_nodes if source.meta["stage"] == "backward"} - seen
            seen |= before
            todo.extend(before)
        return bits

    def _value(self, tensor: torch.Tensor | None) -> fx.Node | None:
        view = None if tensor is None else self.mode.storages.view_of(tensor)
        return None if view is None else self.mode.read(view)


def _union(slots: Mapping[int, int]) -> int:
    bits = 0
    for one in slots.values():
        bits |= one
    return bits


@contextmanager
def watched(mode: FunctionalMode, outputs: Sequence[torch.Tensor], leaves: Mapping[int, torch.Tensor]) -> Iterator[Arrivals]:
    """While the engine runs from `outputs` to `leaves`."""
    found = Arrivals(mode, outputs)
    number = RemovableHandle.next_id
    handles: list[Any] = [
        leaf.register_hook(functools.partial(_came, found.order, index))  # type: ignore[no-untyped-call]
        for index, leaf in leaves.items()
    ]
    try:
        if len(outputs) > 1:
            handles.extend(found.follow())
        yield found
    finally:
        for handle in handles:  # a hook holds its node, which holds the hook
            handle.remove()
        if RemovableHandle.next_id == number + len(handles):  # the program's next hook has the number that it has in eager
            RemovableHandle.next_id = number


def _came(order: list[int], index: int, gradient: torch.Tensor) -> None:
    order.append(index)


@functools.cache
def _hooks_word() -> int:
    """The first of two words in which a tensor's object has its hooks, -1: they are not found."""
    first: Any = {}
    second: Any = {}
    with torch.enable_grad(), torch.inference_mode(False):
        bare, hooked, late = (torch.zeros(1, device="cpu", requires_grad=True) for _ in range(3))
        hooked._backward_hooks, late._post_accumulate_grad_hooks = first, second  # type: ignore[attr-defined]
    n, empty = torch.Tensor.__basicsize__ // 8, {0, id(None)}
    none, some, other = (_C.read_words(id(x), n) for x in (bare, hooked, late))
    found = [
        k
        for k in range(2, n - 1)
        if (some[k], other[k + 1]) == (id(first), id(second)) and {*none[k : k + 2], some[k + 1], other[k]} <= empty
    ]
    return found[0] if len(found) == 1 else -1


def in_order(run: Callable[..., Any], order: Sequence[int]) -> Callable[..., Any]:
    """`run`, for which hooks on its inputs are called in this order. Leaves whose gradients come out of one node get them in no particular order;
    behind nodes of their own, in the order in which these were made, latest first."""
    hooked = eval(f"lambda v: {' or '.join(f'v[{i}]._backward_hooks or v[{i}]._post_accumulate_grad_hooks' for i in order)}")
    places, word = array("i", order).tobytes(), _hooks_word()

    def ordered(*inputs: Any) -> Any:
        if not _C.has_hooks(inputs, places, word) or not hooked(inputs):
            return run(*inputs)
        passed = list(inputs)
        for i in reversed(order):
            if passed[i].is_leaf:
                passed[i] = passed[i].view_as(passed[i])
        return run(*passed)

    return ordered
