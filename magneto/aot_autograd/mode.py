"""The dispatch mode that records a functional graph while ordinary torch code runs on tensors without data.

Tensors inside are *hollow*: real strided tensors of the true device whose memory is never touched (on the CPU it is never mapped; elsewhere there is none). So every choice that ATen makes above
the dispatcher (attention flavour, autocast, `.to` of what is already there) is eager's own, and autograd works as ever. View operations run natively (they touch no
data and give eager's geometry and `_base`); all others are answered here: the node is recorded, the result is described by `graph.rules.propagate`, and
a new hollow tensor is returned. In-place operations become functional ones plus a change of the storage's value (`storage.py`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from magneto.aot_autograd.overloads import COMPOSITE, METADATA, PURE, REFUSED, VIEW, WRITE, Facts, aten, facts_of, functional_of, has_kernel
from magneto.aot_autograd.refusal import Refusal
from magneto.aot_autograd.special import SPECIAL
from magneto.aot_autograd.storage import Storages, View, geometry_of, memory_order, overlap_in_part
from magneto.aot_autograd.views import ViewStep, normalised, strided, write_through
from magneto.graph.append import append_call
from magneto.graph.higher import checkpoint
from magneto.graph.layout import overlaps
from magneto.graph.meta import TensorMeta
from magneto.graph.rules import propagate


def hollow(meta: TensorMeta) -> torch.Tensor:
    """A tensor of this description whose contents mean nothing."""
    with suppress(RuntimeError):  # a torch that makes no such storage: it has memory then
        if meta.device.type == "cuda":
            return without_memory(meta)
    return torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=meta.device)


def without_memory(meta: TensorMeta) -> torch.Tensor:
    """A tensor at an address that no memory has, beyond what processors and GPUs can address, another for each: reading it is a fault."""
    reach = 1 + sum((n - 1) * s for n, s in zip(meta.shape, meta.strides, strict=True)) if meta.numel else 0
    made = torch.empty(0, dtype=meta.dtype, device=meta.device)
    memory = torch._C._construct_storage_from_data_pointer(next(_nowhere), made.device, reach * meta.dtype.itemsize)  # type: ignore[attr-defined]
    return made.set_(memory, 0, meta.shape, meta.strides)


_nowhere = itertools.count(1 << 48, 1 << 36)


def _shares_evenly(args: tuple[Any, ...]) -> bool:
    """Whether `mask * (gradient / mask.sum())` is meant, as the formula of `max()` reads under a mode; in eager it writes the quotient into zeros,
    which keeps infinities and nan where the mask is."""
    mask, share = args
    if torch._C._current_graph_task_id() < 0 or not isinstance(share, fx.Node) or share.target is not aten.div.Tensor:
        return False
    count = share.args[1]
    return (
        isinstance(mask, fx.Node)
        and mask.meta["val"].dtype is torch.bool
        and isinstance(count, fx.Node)
        and count.target is aten.sum.default
        and count.args[0] is mask
    )


class FunctionalMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records into `graph`. `stack` and `stage` are attached to every node recorded from now on."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph
        self.storages = Storages()
        self.stack: Any = ()
        self.stage = "forward"
        self.literals: list[torch.Tensor] = []
        self.literal_nodes: list[fx.Node] = []
        self.new_literal: Callable[[int], fx.Node] = lambda i: graph.placeholder(f"literal_{i}")
        self._seen: dict[Any, fx.Node] = {}
        self.read_late: set[int] = set()  # inputs whose memory formulas of autograd read
        # Complex gradients of what the caller sees the parts of, summed in parts: a complex sum multiplies by one, and infinity by zero.
        self.in_parts: set[fx.Node] = set()

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def emit(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A node for `op` on nodes and constants; an equal one already there is used again where that makes no difference."""
        kwargs = kwargs or {}
        if op is aten.mul.Tensor and _shares_evenly(args):
            op, args = aten.where.ScalarOther, (*args, 0)
        if self.in_parts and op is aten.add.Tensor and args[0] in self.in_parts:
            parts = tuple(self.emit(aten.view_as_real.default, (one,)) for one in args)
            return self.emit(aten.view_as_complex.default, (self.emit(op, parts),))
        facts = facts_of(op)
        key = None
        if facts.shareable:
            key = (op, _key(args), _key(kwargs)) if kwargs else (op, _key(args))
            found = self._seen.get(key)
            if found is not None:
                return found
        value = propagate(op, _metas(args), {name: _metas(v) for name, v in kwargs.items()} if kwargs else {})
        node = self._node(op, args, kwargs, value)
        if key is not None:
            self._seen[key] = node
        return node

    def forget(self, nodes: Sequence[fx.Node]) -> None:
        """From here on operations equal to these are recorded again."""
        gone = {node for node in nodes if node.op == "call_function" and node.target is not operator.getitem}
        self._seen = {key: node for key, node in self._seen.items() if node not in gone}

    def _node(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
        node = append_call(self.graph, "call_function", op, args, kwargs)
        node.meta["val"] = value
        node.meta["stack"] = self.stack
        node.meta["stage"] = self.stage
        if torch._C._current_graph_task_id() >= 0:
            node.meta["in_backward"] = True
        if checkpoint.region:
            node.meta["checkpoint"] = checkpoint.region
        return node

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """Result `index` of a node with several results."""
        key = (operator.getitem, node, index)
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = self._node(operator.getitem, (node, index), {}, node.meta["val"][index])
            found.meta["stage"] = node.meta["stage"]  # backward may be the first to ask for a result of a forward operation
        return found

    def reshape(self, value: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """`value` in another shape, copied first where its strides ask for it."""
        meta: TensorMeta = value.meta["val"]
        if meta.shape == tuple(shape):
            return value
        if not meta.is_contiguous():
            try:
                hollow(meta).view(shape)
            except RuntimeError:
                value = self.emit(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
        return self.emit(aten.view.default, (value, list(shape)))

    def flatten(self, value: fx.Node) -> fx.Node:
        """A dense value's elements in the order of its memory, as one dimension."""
        meta: TensorMeta = value.meta["val"]
        if not meta.is_contiguous():
            if not meta.is_dense():
                raise Refusal("as_strided of a tensor with gaps")
            value = self.emit(aten.permute.default, (value, memory_order(meta)))
        return self.reshape(value, (meta.numel,))

    def unflatten(self, flat: fx.Node, meta: TensorMeta) -> fx.Node:
        """The inverse of `flatten` for a tensor described by `meta`."""
        order = memory_order(meta)
        value = self.reshape(flat, tuple(meta.shape[d] for d in order))
        if order != list(range(len(order))):
            value = self.emit(aten.permute.default, (value, [order.index(d) for d in range(len(order))]))
        return value

    def with_strides(self, node: fx.Node, wanted: TensorMeta) -> fx.Node:
        """`node` laid out with the strides of `wanted`, or, where those leave gaps, as a copy of such a tensor is laid out."""
        meta: TensorMeta = node.meta["val"]
        if meta.strides == wanted.strides:
            return node
        if not wanted.is_dense():
            wanted = TensorMeta.of(torch.empty_like(hollow(wanted)))
            if meta.strides == wanted.strides:
                return node
        order = memory_order(wanted)
        if order == list(range(len(order))):
            return self.emit(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        moved = self.emit(aten.permute.default, (node, order))
        copied = self.emit(aten.clone.default, (moved,), {"memory_format": torch.contiguous_format})
        return self.emit(aten.permute.default, (copied, [order.index(d) for d in range(len(order))]))

    # ---- values ------------------------------------------------------------------------------------------------------

    def view_for(self, tensor: torch.Tensor) -> View:
        """The record of a tensor met as an argument."""
        storage = self.storages.find(tensor)
        if storage is None:
            return self._literal(tensor)
        view = storage.views.get(geometry_of(tensor))
        if view is not None:
            return view
        root = storage.root
        if root is None or tensor.dtype != root.meta.dtype:
            raise Refusal("a view made out of sight")
        step = self._strided_step(root, tensor)
        return self._add_view(tensor, root, step)

    def _strided_step(self, root: View, tensor: torch.Tensor) -> ViewStep:
        offset = tensor.storage_offset() - root.meta.storage_offset
        if TensorMeta.of(tensor).storage_size() > root.meta.storage_size() or offset < 0:
            raise Refusal("a view that reaches beyond the tensor it was made from")
        if root.input_index >= 0 and offset != 0:
            raise Refusal("as_strided with an offset into an input")
        return ViewStep(aten.as_strided.default, (list(tensor.shape), list(tensor.stride()), offset))

    def _add_view(self, tensor: torch.Tensor, parent: View, step: ViewStep) -> View:
        view = View(parent.storage, TensorMeta.of(tensor), parent, step, version=-1)
        parent.storage.views[geometry_of(tensor)] = view
        return view

    def _literal(self, tensor: torch.Tensor) -> View:
        """A real tensor met inside the graph (torch.tensor([1, 2]), an index list). Its numbers are constants of the graph."""
        meta = TensorMeta.of(tensor)
        if tensor.numel() == 1 and not tensor.is_complex() and tensor.device.type == "cpu":
            node = self.emit(aten.full.default, (list(tensor.shape), tensor.item()), {"dtype": tensor.dtype, "device": tensor.device})
        else:
            node = self.new_literal(len(self.literals))
            node.meta.update(val=meta, stack=(), stage="forward")
            self.literals.append(tensor.detach())
            self.literal_nodes.append(node)
        view = self.storages.add_root(tensor, meta, node)
        view.storage.literal = True
        return view

    def read(self, view: View) -> fx.Node:
        """The node that holds the present value of `view`."""
        storage = view.storage
        if view.node is not None and view.version == storage.version:
            return view.node
        step = view.step
        assert view.parent is not None and step is not None
        value = self.read(view.parent)
        if step.op is aten.as_strided.default and (view.parent.input_index < 0 or value.op != "placeholder"):
            if not view.parent.meta.is_dense():  # its value is kept without them
                raise Refusal("as_strided of a tensor with gaps")
            view.node = strided(self, self.flatten(value), step)
        elif step.op is aten.as_strided.default:
            view.node = self.emit(step.op, (value, *step.args[:2]))  # from where the input begins in its storage
        else:
            view.node = self.emit(step.op, (value, *step.args))
        view.version = storage.version
        return view.node

    def write(self, tensor: torch.Tensor, value: fx.Node) -> None:
        """Give `tensor` the numbers of `value`, converted to its dtype and layout."""
        view = self.view_for(tensor)
        meta = view.meta
        new: TensorMeta = value.meta["val"]
        if new.shape != meta.shape:
            raise Refusal(f"an in-place result of shape {new.shape} for a tensor of shape {meta.shape}")
        if new.device != meta.device:
            value = self.emit(aten._to_copy.default, (value,), {"dtype": meta.dtype, "device": meta.device})
        elif new.dtype != meta.dtype:
            value = self.emit(aten._to_copy.default, (value,), {"dtype": meta.dtype})
        self._write(view, value)

    def _write(self, view: View, value: fx.Node) -> None:
        storage = view.storage
        parent = view.parent
        if parent is None:
            if overlaps(view.meta.shape, view.meta.strides, repeated=view.input_index >= 0):
                raise Refusal("a write to a tensor that overlaps itself")
            value = self.with_strides(value, view.meta)
            storage.version += 1
        else:
            assert view.step is not None
            present = lambda: self.read(parent)  # noqa: E731 - reads before the root's version moves
            self._write(parent, write_through(self, view.step, present, parent.meta, value))
            if value.meta["val"].strides != view.meta.strides:
                return  # read again through its parent, so that every node has the strides of the tensor it stands for
        view.node = value
        view.version = storage.version

    # ---- dispatch ----------------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        facts = facts_of(func)
        return _HANDLERS[facts.kind](self, func, facts, args, kwargs)

    def nodes(self, value: Any) -> Any:
        """Arguments with nodes in place of tensors."""
        if isinstance(value, torch.Tensor):
            view = self.view_for(value)
            if self.stage == "backward" and view.storage.root is not None and view.storage.root.input_index >= 0:
                self.read_late.add(view.storage.root.input_index)
            return self.read(view)
        kind = type(value)
        if kind is list or kind is tuple or kind is torch.Size:
            return [self.nodes(item) for item in value]
        if isinstance(value, torch.Generator):
            raise Refusal("a random generator as argument")
        return value

    def results(self, node: fx.Node, value: Any) -> Any:
        """New hollow tensors for the results of `node`."""
        if isinstance(value, TensorMeta):
            if value.device.type == "meta":
                raise Refusal("a tensor on the meta device")
            made = hollow(value)
            self.storages.add_root(made, value, node)
            return made
        if isinstance(value, (tuple, list)):
            return type(value)(self.results(self.item(node, i), item) if item is not None else None for i, item in enumerate(value))
        return value

    def pure(self, func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        special = SPECIAL.get(facts.name)
        if special is not None:
            return special(self, func, args, kwargs)
        node = self.emit(func, tuple(self.nodes(a) for a in args), {name: self.nodes(v) for name, v in kwargs.items()})
        return self.results(node, node.meta["val"])

    def composite(self, func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = next((a.device.type for a in args if isinstance(a, torch.Tensor)), "cpu")
        if has_kernel(func.name(), device.upper()):  # eager takes it, with its own formula of autograd (rms norm on CUDA)
            return self.pure(func, facts, args, kwargs)
        with self:
            return func.decompose(*args, **kwargs)

    def view(self, func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        parent = self.view_for(source)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._record_view(func, args, kwargs, parent, None, result)
        else:
            for index, item in enumerate(result):
                self._record_view(func, args, kwargs, parent, index, item)
        return result

    def _record_view(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parent: View, index: int | None, result: torch.Tensor
    ) -> None:
        storage = parent.storage
        if self.storages.find(result) is not storage:
            raise Refusal(f"{func} gave new memory for a view")
        known = storage.views.get(geometry_of(result))
        if known is not None:
            if index is not None and known.step is not None and known.parent is parent:  # `x[0]` before `x.unbind(0)[0]`
                known.step = replace(known.step, among=(func, args[1:], index))
            return
        if func is aten.as_strided.default:
            root = parent.chain()[0]
            if result.dtype != root.meta.dtype:
                raise Refusal("as_strided of a view in another type")
            self._add_view(result, root, self._strided_step(root, result)).taken_of = parent, storage.version
            return
        if kwargs and func is not aten.expand.default:
            raise Refusal(f"{func} with {sorted(kwargs)}")
        self._add_view(result, parent, normalised(func, args[1:], index, parent.meta, result))

    def metadata(self, func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0]
        parent = self.view_for(target)
        functional = _view_form(facts)
        result = func(*args, **kwargs)
        self._record_view(functional, args, kwargs, parent, None, target)
        return result

    def written(self, func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        targets = [args[place] if isinstance(place, int) else kwargs[place] for place in facts.writes]
        _refuse_overlap(targets, (*args, *kwargs.values()))
        special = SPECIAL.get(facts.name)
        if special is not None:
            return special(self, func, args, kwargs)
        functional = functional_of(func, facts)
        if functional.namespace == "magneto":
            _refuse_twice(targets, (*args, *kwargs.values()))
        if facts.random and not targets[0].is_contiguous():
            raise Refusal("random numbers in a layout that is not contiguous")
        if isinstance(targets[0], (list, tuple)):
            _refuse_order_dependence(self, args, targets)
            if facts.packet.startswith("_foreach_"):  # the dispatcher counts writes of single tensors before it asks this mode, these after
                torch._C._increment_version(targets[0])
        inputs = {name: self.nodes(v) for name, v in kwargs.items() if not (facts.out_variant and name in facts.writes)}
        if facts.factory:
            inputs.update(dtype=targets[0].dtype, device=targets[0].device)
        args += facts.defaults[len(args) :]
        node = self.emit(functional, tuple(self.nodes(a) for a in args), inputs)
        value = node.meta["val"]
        if isinstance(value, TensorMeta):
            self._write_target(targets[0], node)
            return targets[0] if func._schema.returns else None
        values = [self.item(node, i) for i in range(len(value))]
        if len(targets) == 1 and isinstance(targets[0], (list, tuple)):
            self._write_target(targets[0], values)
            return None
        fresh = facts.fresh_results
        for target, new in zip(targets, values[fresh:], strict=True):
            self._write_target(target, new)
        results = tuple(self.results(v, v.meta["val"]) for v in values[:fresh])
        if not fresh:
            return tuple(targets) if facts.out_variant else (targets[0] if func._schema.returns else None)
        return results[0] if fresh == 1 else results

    def _write_target(self, target: Any, value: Any) -> None:
        if isinstance(target, (list, tuple)):
            items = value if isinstance(value, list) else [self.item(value, i) for i in range(len(target))]
            for one, item in zip(target, items, strict=True):
                self.write(one, item)
        else:
            dtype = value.meta["val"].dtype
            if not torch.can_cast(dtype, target.dtype):
                raise Refusal(f"a result of {dtype} in place of {target.dtype}")  # eager raises
            self.write(target, value)


def _view_form(facts: Facts) -> Any:
    form = facts.functional
    if form is None or facts_of(form).kind not in (VIEW, COMPOSITE):
        raise Refusal(f"{facts.name} changes what its argument is")
    return form


def _refuse_overlap(targets: list[Any], operands: tuple[Any, ...]) -> None:
    """A write whose target overlaps an operand in part: eager raises, or what it computes depends on its order."""
    for target in targets:
        for other in operands:
            if (
                isinstance(target, torch.Tensor)
                and isinstance(other, torch.Tensor)
                and other is not target
                and overlap_in_part(target, other)
            ):
                raise Refusal("a write whose target overlaps what it reads")


def _refuse_twice(targets: list[Any], operands: tuple[Any, ...]) -> None:
    """An operation of the program may read through one argument what it has written through another."""
    given = [
        one for value in operands for one in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(one, torch.Tensor)
    ]
    for target in targets:
        place = target.untyped_storage().data_ptr(), geometry_of(target)
        same = sum((one.untyped_storage().data_ptr(), geometry_of(one)) == place for one in given)
        if same > 1 or any(overlap_in_part(target, one) for one in given):
            raise Refusal("an operation that writes memory of two of its arguments")


def _refuse_order_dependence(mode: FunctionalMode, args: tuple[Any, ...], targets: list[Any]) -> None:
    """A list operation works element by element; one that reads what an earlier element wrote is not the functional operation."""
    for written in targets:
        if not isinstance(written, (list, tuple)):
            continue
        places: dict[Any, int] = {}
        for position, tensor in enumerate(written):
            if places.setdefault(mode.view_for(tensor).storage, position) != position:
                raise Refusal("a list operation that writes the same memory twice")
        for other in args:
            if isinstance(other, (list, tuple)):
                for position, tensor in enumerate(other):
                    if isinstance(tensor, torch.Tensor) and places.get(mode.view_for(tensor).storage, position) != position:
                        raise Refusal("a list operation that reads what it writes")


# ---- handlers that are no methods ------------------------------------------------------------------------------------


def _lift_fresh(mode: FunctionalMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    mode.view_for(args[0])
    return args[0]  # type: ignore[no-any-return]


def _lift_fresh_view(mode: FunctionalMode, func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if facts.name == "aten.lift_fresh.default":
        return _lift_fresh(mode, func, args, kwargs)
    if isinstance(args[0], complex) and facts.name == "aten._conj.default":  # formulas of autograd conjugate the program's complex numbers
        full = torch.ops.aten.full.default
        return mode.pure(full, facts_of(full), ([], args[0].conjugate()), {"dtype": torch.complex128, "device": torch.device("cpu")})
    return mode.view(func, facts, args, kwargs)


def _refused(mode: FunctionalMode, func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise Refusal(f"{facts.name} needs the numbers in a tensor, or changes its memory")


_HANDLERS: dict[str, Callable[..., Any]] = {
    PURE: FunctionalMode.pure,
    VIEW: _lift_fresh_view,
    WRITE: FunctionalMode.written,
    METADATA: FunctionalMode.metadata,
    COMPOSITE: FunctionalMode.composite,
    REFUSED: _refused,
}

# Set after the class exists: a __torch_dispatch__ in the class body makes torch wrap it and import torch._dynamo (architecture, section 4).
FunctionalMode.__torch_dispatch__ = FunctionalMode.dispatch  # type: ignore[assignment,method-assign]


# ---- keys and descriptions -------------------------------------------------------------------------------------------


def _key(value: Any) -> Any:
    """A hashable stand-in that tells 1, 1.0, True, 0.0 and -0.0 apart."""
    kind = type(value)
    if kind is fx.Node or kind is str or value is None or kind is torch.dtype:
        return value
    if kind is tuple or kind is list:
        return tuple([_key(item) for item in value])
    if kind is float:
        return ("f", value.hex())
    if kind is dict:
        return tuple((name, _key(item)) for name, item in value.items())
    return (kind, value)


def _metas(value: Any) -> Any:
    kind = type(value)
    if kind is fx.Node:
        return value.meta["val"]
    if kind is tuple or kind is list:
        return kind(_metas(item) for item in value)
    return value
