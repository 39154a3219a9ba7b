"""FakeMode: running torch code on metadata only.

A FakeTensor is a tensor without data that claims its true shape, strides, dtype and device, so that PyTorch's composite kernels choose what
they would choose for the real tensor (attention kernel, batch-norm flavour, contiguous or not), and so that the autograd engine works
above it. Inside FakeMode every ATen operation is answered by our meta rules; outside, a FakeTensor refuses to compute.

Neither class statement may define `__torch_dispatch__`: that is assigned to the class afterwards, because PyTorch wraps the attribute of a
class statement in a decorator whose first use imports torch._dynamo (more than a second).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from magneto.graph.fallback import DataDependent, UnsupportedFake, answer_by_torch
from magneto.graph.kernel_types import check_types
from magneto.graph.layout import RuleError, Untried
from magneto.graph.meta import CONJ, NEG, TensorMeta
from magneto.graph.opinfo import OpInfo, op_info
from magneto.graph.promotion import can_cast
from magneto.graph.rules_dynamic import RULES as DYNAMIC_RULES
from magneto.graph.unknown import Sizes

_make_wrapper = torch.Tensor._make_wrapper_subclass


class FakeTensor(torch.Tensor):
    """A tensor without data. `meta` is its TensorMeta; `_root` stands for its storage, shared by its views: not one of the tensors, as autograd keeps a detached
    view of a result in that result's own history, and nobody would find that cycle."""

    meta: TensorMeta
    _root: object

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"FakeTensor({TensorMeta.of(self)})"


def _refuse(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    raise RuntimeError(f"a fake tensor was used outside FakeMode, in {func}")


FakeTensor.__torch_dispatch__ = classmethod(_refuse)  # type: ignore[assignment]


def make_fake(meta: TensorMeta, root: object = None) -> FakeTensor:
    """A FakeTensor of this metadata that does not require grad."""
    fake: FakeTensor = _make_wrapper(
        FakeTensor, meta.shape, strides=meta.strides, storage_offset=meta.storage_offset, dtype=meta.dtype, device=meta.device
    )
    fake.meta = meta
    fake._root = object() if root is None else root
    if meta.lazy:
        torch._C._set_conj(fake, bool(meta.lazy & CONJ))  # type: ignore[attr-defined]
        torch._C._set_neg(fake, bool(meta.lazy & NEG))  # type: ignore[attr-defined]
    return fake


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Metadata of a fake or real tensor, requires_grad included as it stands now."""
    return TensorMeta.of(tensor)


def root_of(tensor: torch.Tensor) -> object:
    """What stands for the storage: views and their base have the same root."""
    root = tensor.__dict__.get("_root") if type(tensor) is FakeTensor else None
    return tensor if root is None else root


def _meta(tensor: torch.Tensor) -> TensorMeta:
    if type(tensor) is FakeTensor:
        found: TensorMeta | None = tensor.__dict__.get("meta")
        if found is None:
            found = tensor.meta = TensorMeta.of(tensor)
        return found
    return TensorMeta.of(tensor)


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _meta(value)
    if type(value) in (list, tuple):
        return [_to_meta(item) for item in value]
    return value


class Counts:
    """The sizes that depend on data in one call, which is propagated once for each probe. `keys`: what each tensor argument is remembered by in `sizes.of`
    (None: not at all). Custom operations (`torch.library.register_fake`) ask it for their dynamic sizes."""

    def __init__(self, sizes: Sizes, keys: Sequence[Any]) -> None:
        self.sizes = sizes
        self.keys = keys
        self.made: list[tuple[int, ...]] = []
        self.probe = self.asked = 0
        self.fakes: list[torch.Tensor] = []
        self.written: dict[int, object] = {}

    def begin(self, probe: int) -> None:
        self.probe, self.asked = probe, 0

    def of(self, tensor: torch.Tensor | None = None) -> int:
        """How many elements of `tensor` are not zero; without one: a size that nothing is known about."""
        if not self.sizes.counted:
            raise DataDependent("a size")
        self.sizes.found += 1
        place = next((n for n, fake in enumerate(self.fakes) if fake is tensor), None)
        key = self.keys[place] if place is not None and id(root_of(self.fakes[place])) not in self.written else None
        if key is None:
            if self.asked == len(self.made):
                self.made.append(self.sizes.fresh())
            self.asked += 1
            return self.made[self.asked - 1][self.probe]
        if key not in self.sizes.of:
            self.sizes.of[key] = self.sizes.fresh()
        return self.sizes.of[key][self.probe]

    def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> int:
        return self.of()

    create_unbacked_symint = new_dynamic_size


class FakeMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers ATen operations by metadata.

    `on_op(func, args, kwargs, out)` is called after every operation, with the tensors as torch passed them.
    `random` is set by operations that draw random numbers, `raises` by those that have no result (`_linalg_check_errors`).
    `written` maps id -> root of every storage written so far (in-place, out=, running statistics).
    """

    def __init__(self, on_op: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_op = on_op
        self.written: dict[int, object] = {}
        self.random = self.raises = False
        self.counts: Counts | None = None  # None: a size that depends on data raises DataDependent

    def fake(self, meta: TensorMeta) -> FakeTensor:
        """A FakeTensor for an input: `requires_grad` is taken over (the result is a leaf)."""
        fake = make_fake(meta)
        if meta.requires_grad:
            fake.requires_grad_(True)
        return fake

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        info = op_info(func)
        if info.name == "aten._conj.default" and isinstance(args[0], complex):  # in formulas of autograd
            return make_fake(TensorMeta((), (), torch.complex128, torch.device("cpu")))
        metas = [_to_meta(value) for value in args]
        meta_kwargs = {key: _to_meta(value) for key, value in kwargs.items()} if kwargs else kwargs
        known = False
        counting = DYNAMIC_RULES.get(info.name) if self.counts is not None and self.counts.sizes.counted else None
        try:
            if counting is not None:
                answer = counting(self._counter(args), *metas, **meta_kwargs)
            elif info.inplace_view:
                answer = _answer_inplace_view(func, info, args, kwargs)
            elif info.rule is None:
                if func._can_decompose():
                    with self:
                        return func.decompose(*args, **kwargs)
                answer = answer_by_torch(func, metas, meta_kwargs, None, self.counts)
            elif info.writes:
                answer = _answer_write(info, metas, meta_kwargs)
            else:
                answer = info.rule(*metas, **meta_kwargs)
            known = True
        except (DataDependent, UnsupportedFake, Untried):
            raise
        except Exception as problem:  # RuleError, or arguments the rule never expected: torch knows
            if info.rule is None or info.inplace_view or counting is not None:
                raise
            answer, known = answer_by_torch(func, metas, meta_kwargs, str(problem)), False
        if info.writes:
            _refuse_resized(info, args, kwargs, answer)
        if known and not info.random:
            check_types(func, info.name, metas, meta_kwargs)
        out = self._wrap(info, args, kwargs, answer)
        if info.writes or info.hidden:
            self._note_writes(info, args, kwargs)
        if draws_numbers(func, args):
            self.random = True
        if not (info.returns or info.writes):
            self.raises = True
        if self.on_op is not None:
            self.on_op(func, args, kwargs, out)
        return out

    def _counter(self, args: tuple[Any, ...]) -> Callable[..., int]:
        counts = self.counts
        assert counts is not None

        def count(*place: int) -> int:
            found: Any = args if place else None
            for step in place:
                found = found[step]
            return counts.of(found)

        return count

    def _wrap(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> Any:
        if type(answer) is TensorMeta:
            relation = info.returns[0]
            if relation is None:
                return make_fake(answer)
            owner = _argument(args, kwargs, relation[1])
            return owner if relation[0] == "self" else make_fake(_lazy(info, owner, answer), root_of(owner))
        if len(info.returns) == 1:
            relation = info.returns[0]
            if relation is not None and relation[0] == "self":
                return _argument(args, kwargs, relation[1])
            root = None if relation is None else root_of(_argument(args, kwargs, relation[1]))
            if isinstance(answer, (list, tuple)):
                if relation is not None:
                    owner = _argument(args, kwargs, relation[1])
                    answer = [_lazy(info, owner, item) for item in answer]
                return [make_fake(item, root) for item in answer]
            return answer
        if not info.returns:
            return None
        return tuple(self._wrap_one(relation, args, kwargs, item) for relation, item in zip(info.returns, answer, strict=True))

    def _wrap_one(self, relation: tuple[str, int | str] | None, args: tuple[Any, ...], kwargs: dict[str, Any], item: Any) -> Any:
        if relation is not None and relation[0] == "self":
            return _argument(args, kwargs, relation[1])
        root = None if relation is None else root_of(_argument(args, kwargs, relation[1]))
        if type(item) is TensorMeta:
            return make_fake(item, root)
        if isinstance(item, list):
            return [make_fake(one, root) for one in item]
        return item

    def _note_writes(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        targets = [_argument(args, kwargs, place) for place in info.writes]
        if info.hidden is not None and len(args) > info.hidden[1] and args[info.hidden[1]]:
            targets += [args[place] for place in info.hidden[0]]
        for target in targets:
            for tensor in target if isinstance(target, (list, tuple)) else (target,):
                if isinstance(tensor, torch.Tensor):
                    root = root_of(tensor)
                    self.written[id(root)] = root


FakeMode.__torch_dispatch__ = FakeMode.dispatch  # type: ignore[assignment,method-assign]


_LAZY = {"aten._conj.default": CONJ, "aten._neg_view.default": NEG}


def _lazy(info: OpInfo, owner: torch.Tensor, meta: TensorMeta) -> TensorMeta:
    """The view's metadata: it is put off what is put off for the tensor that it is a view of."""
    lazy = _meta(owner).lazy ^ _LAZY.get(info.name, 0)
    return meta.with_(lazy=lazy) if lazy != meta.lazy else meta


_ATTENTION = "aten._scaled_dot_product"


def draws_numbers(op: Any, args: tuple[Any, ...]) -> bool:
    """Does a call take numbers from a random generator? (All attention kernels say that they might.)"""
    random = isinstance(op, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in op.tags
    return random and not (str(op).startswith(_ATTENTION) and not _dropout(args))


def _dropout(args: tuple[Any, ...]) -> bool:
    """Whether an attention kernel gets a non-zero dropout probability (argument 3 or 4; flags count as none)."""
    return any(type(value) is float and value > 0.0 for value in args[3:6])


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str) -> Any:
    return kwargs[place] if isinstance(place, str) else args[place]


def _answer_inplace_view(func: Any, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TensorMeta:
    """`t_`, `squeeze_` and the like: torch's own kernel changes the metadata of the fake tensor."""
    target = args[0]
    if type(target) is not FakeTensor or target.__dict__.get("is_argument") or info.name.startswith(_RESIZES):
        raise UnsupportedFake(info.name, "it changes the metadata of its argument")
    with torch._C._DisableTorchDispatch():
        func(*args, **kwargs)
    target.meta = TensorMeta.of(target).with_(requires_grad=False, is_leaf=True)
    return target.meta


_RESIZES = ("aten.resize", "aten.set_", "aten._resize")


def _answer_write(info: OpInfo, metas: list[Any], kwargs: dict[str, Any]) -> Any:
    """Check an in-place or out variant with the functional rule; the result is the written argument itself."""
    targets = [kwargs[place] if isinstance(place, str) else metas[place] for place in info.writes]
    inputs = {key: value for key, value in kwargs.items() if key not in info.writes} if kwargs else kwargs
    assert info.rule is not None
    answer = info.rule(*metas, **inputs)
    if len(targets) == 1 and type(targets[0]) is TensorMeta and type(answer) is TensorMeta:
        _check_target(targets[0], answer)
    elif len(targets) > 1 and isinstance(answer, tuple):
        for target, item in zip(targets, answer, strict=False):
            _check_target(target, item)
    return targets[0] if len(info.returns) == 1 else tuple(targets)


def _refuse_resized(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> None:
    """torch has resized what `out=` names."""
    for relation, item in zip(info.returns, [answer] if len(info.returns) == 1 else answer or (), strict=False):
        if relation is not None and relation[0] == "self" and type(item) is TensorMeta:
            owner = _argument(args, kwargs, relation[1])
            if isinstance(owner, torch.Tensor) and _meta(owner).shape != item.shape:
                raise UnsupportedFake(info.name, "it resizes its argument")


def _check_target(target: TensorMeta, answer: TensorMeta) -> None:
    if target.shape != answer.shape:
        raise RuleError("the result does not fit the tensor that is written")
    if target.dtype is not answer.dtype and not can_cast(answer.dtype, target.dtype):
        raise RuleError("the result's dtype cannot be cast")
