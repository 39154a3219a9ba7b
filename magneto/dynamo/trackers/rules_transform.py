"""torch.func and its kin: the transform of a captured function is one node that calls PyTorch's own transform over the function's graph.

What the function sees of its arguments (per-example shapes under vmap, requires_grad under grad) is found by running the transform over a probe. The function is captured
on tensors like these, apart from the region's graph; then the transform runs over the captured body on metadata, which says what the node gives. Whatever does not work out
is a break at the call: eager then does what it does.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.functional as functional

from magneto.dynamo.guards.source import Source
from magneto.dynamo.trackers.base import MISSING, CannotEmit, Tracker
from magneto.dynamo.trackers.build import FUNCTION_BUILDERS
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.function import FunctionTracker
from magneto.dynamo.trackers.tensor import PLAIN_CLASSES, TensorTracker
from magneto.dynamo.trackers.torch_calls import lower
from magneto.graph import fake_call
from magneto.graph.higher import Invoke, Slot, Transformed, fill
from magneto.graph.meta import TensorMeta
from magneto.graph.unknown import SizeUnknown, UnknownMeta

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


class _Probed(Exception):
    """Ends a transform as soon as it has called the probe."""


class TransformTracker(Tracker):
    """`transform(fn, **options)`: what `torch.func.grad(fn)` gives."""

    __slots__ = ("fn", "obj", "options", "transform")

    def __init__(
        self, transform: Callable[..., Any], fn: Tracker, options: Mapping[str, Tracker], source: Source | None = None, obj: Any = MISSING
    ) -> None:
        super().__init__(source)
        self.transform = transform
        self.fn = fn
        self.options = dict(options)
        self.obj = obj

    def python_type(self) -> type:
        return type(torch.func.grad(len))

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        transform = self.transform

        def invoke(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any) -> Any:
            return transform(function, **options)(*args, **kwargs)

        return transformed(m, _name(transform), invoke, self.fn, args, kwargs, self.options)

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        m.graph_break("B103", attribute=name, value=self.show())

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        options = "".join(f", {name}={em.value(value)}" for name, value in self.options.items())
        return em.assign("transformed", f"{em.const(self.transform, self.transform.__name__)}({em.value(self.fn)}{options})", self)

    def show(self) -> str:
        return f"{self.transform.__name__}({self.fn.show()})"


def _name(transform: Callable[..., Any]) -> str:
    return f"torch.func.{transform.__name__}"


def transformed(
    m: Machine, name: str, invoke: Callable[..., Any], fn: Tracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker],
    options: Mapping[str, Tracker],
) -> Tracker:  # fmt: skip
    """The node of `invoke(fn, args, kwargs, **options)`."""
    settings = {key: _setting(m, name, value) for key, value in options.items()}

    def run(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return invoke(function, args, kwargs, **settings)

    target, given, lifted, _ = _captured(m, name, run, fn, args, kwargs)
    return m.node(target, [*given, tuple(lifted)], {})


def _captured(
    m: Machine, name: str, run: Invoke, fn: Tracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]
) -> tuple[Transformed, tuple[Any, Any], list[TensorTracker], bool]:
    """(target of the node, lowered arguments, tensors read from outside, whether the function draws random numbers)."""
    given = (tuple(lower(m, arg) for arg in args), {key: lower(m, value) for key, value in kwargs.items()})
    if varying := [tensor.meta for tensor in _tensors([*given]) if isinstance(tensor.meta, UnknownMeta)]:
        problem = SizeUnknown(f"{name} of a tensor whose sizes vary")
        problem.what = varying
        raise problem
    with m.speculate(name, grad_mode=m.grad_enabled(), transformed=True) as body:  # type: ignore[attr-defined]
        seen = _probe(body, run, given)
        leaves: list[TensorTracker] = []
        takes = _template(body, seen, leaves)
        inner_args, inner_kwargs = fill(takes, leaves)
        value = body.call(fn, [m.const(arg) for arg in inner_args], {key: m.const(arg) for key, arg in inner_kwargs.items()})
        captured, lifted = body.finish(takes, value)
        for tensor in _tensors([*given, lifted]):
            if tensor.cls not in PLAIN_CLASSES:
                m.graph_break("B101", callee=name, reason=f"{tensor.cls.__name__}.__torch_function__ hears of what the transform does")
        target = Transformed(f"{name.rpartition('.')[2]}_of_body", run, captured)
        _rehearse(body, target, given, lifted)
    return target, given, lifted, bool(body.recorder.random_nodes)


def _setting(m: Machine, name: str, value: Tracker) -> Any:
    const = value.try_const()
    if const is not None:
        return const.value
    found = lower(m, value)
    if _holds_tensor(found):
        m.graph_break("B101", callee=name, reason=f"option {value.show()}")
    return found


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_holds_tensor(item) for item in value)
    if isinstance(value, dict):
        return any(_holds_tensor(item) for item in value.values())
    return isinstance(value, TensorTracker)


def _metas(value: Any) -> Any:
    """Metadata in place of trackers."""
    if isinstance(value, TensorTracker):
        return value.meta
    if isinstance(value, dict):
        return {key: _metas(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_metas(item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_metas(item) for item in value)
    return value


def _probe(body: Any, run: Invoke, given: tuple[Any, Any]) -> Any:
    """(args, kwargs) that the transform calls its function with, TensorMeta in place of tensors."""
    seen: list[Any] = []

    def probe(*args: Any, **kwargs: Any) -> Any:
        seen.append(_described((args, kwargs)))
        raise _Probed

    try:
        with body.recorder.autocast_now():
            fake_call(
                lambda args, kwargs: run(probe, args, kwargs), [_metas(given[0]), _metas(given[1])], grad_enabled=body.recorder.grad_mode
            )
    except _Probed:
        return seen[0]
    except Exception as error:
        body.refuse(f"{type(error).__name__}: {error}")
    body.refuse("it does not call its function")


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorMeta.of(value)
    if isinstance(value, dict):
        return {key: _described(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_described(item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_described(item) for item in value)
    return value


def _template(body: Any, value: Any, leaves: list[TensorTracker]) -> Any:
    """Slots in place of metadata, and a tensor of the body for each."""
    if isinstance(value, TensorMeta):
        leaves.append(body.recorder.leaf(value, torch.Tensor))
        return Slot(len(leaves) - 1)
    if isinstance(value, dict):
        return {key: _template(body, item, leaves) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_template(body, item, leaves) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_template(body, item, leaves) for item in value)
    return value


def _rehearse(body: Any, target: Transformed, given: tuple[Any, Any], lifted: Sequence[TensorTracker]) -> None:
    """Run the transform over the body on metadata: eager's errors are left to eager, and so are writes to tensors outside."""
    recorder = body.recorder.around
    metas = [_metas(given[0]), _metas(given[1]), tuple(tensor.meta for tensor in lifted)]
    try:
        with recorder.autocast_now():
            found = fake_call(target, metas, grad_enabled=recorder.grad_mode)
    except Exception as error:
        body.refuse(f"{type(error).__name__}: {error}")
    if found.mutated:
        body.refuse("it writes to a tensor made outside of it")
    if found.same is not None or found.aliases:
        body.refuse("it returns one of its arguments, or a view of one")


# -- transforms that give a function


_BY_NAME: dict[str, Callable[..., Any]] = {}


def _curried(transform: Callable[..., Any], names: Sequence[str]) -> None:
    _BY_NAME[transform.__name__] = transform

    @rule(transform, Tracker)
    def body(m: Machine, fn: Tracker, /, *args: Tracker, **options: Tracker) -> Any:
        if len(args) > len(names):
            return NotImplemented
        return TransformTracker(transform, fn, {**dict(zip(names, args, strict=False)), **options})

    @rule(transform)
    def by_keyword(m: Machine, /, **options: Tracker) -> Any:
        return body(m, options.pop("func"), **options) if "func" in options else NotImplemented


_curried(torch.func.grad, ("argnums", "has_aux"))
_curried(torch.func.grad_and_value, ("argnums", "has_aux"))
_curried(torch.func.vmap, ("in_dims", "out_dims", "randomness"))
_curried(torch.func.jacrev, ("argnums",))
_curried(torch.func.jacfwd, ("argnums", "has_aux"))
_curried(torch.func.hessian, ("argnums",))


# -- transforms that are called on a function and its arguments


def _direct(transform: Callable[..., Any], n: int, label: str) -> None:
    """`transform(fn, *args, **options)` with at most `n` arguments; the options decide nothing of the function's own arguments."""

    def invoke(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any) -> Any:
        return transform(function, *args, **options)

    @rule(transform, Tracker)
    def body(m: Machine, fn: Tracker, /, *args: Tracker, **options: Tracker) -> Any:
        return transformed(m, label, invoke, fn, args[:n], {}, options) if len(args) <= n else NotImplemented


_direct(torch.func.jvp, 2, "torch.func.jvp")
for _fn, _n in (
    (functional.jacobian, 1),
    (functional.hessian, 1),
    (functional.vjp, 2),
    (functional.jvp, 2),
    (functional.vhp, 2),
    (functional.hvp, 2),
):
    _direct(_fn, _n, f"torch.autograd.functional.{_fn.__name__}")


# -- vjp: the result holds what backward needs


class PullbackTracker(Tracker):
    """The function that `torch.func.vjp` gives. A call of it runs forward and backward in one node; a compiler finds forward's operations again and shares them."""

    __slots__ = ("born", "has_aux", "inputs", "obj", "run", "target")

    def __init__(self, m: Machine, name: str, target: Transformed, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.obj = MISSING
        self.target = target
        self.inputs = list(inputs)
        self.run = name
        self.born = m.count  # type: ignore[attr-defined]

    def python_type(self) -> type:
        return type(torch.func.grad(len))

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        for tensor in _tensors(self.inputs):
            if any(view in m.recorder.mutated for view in tensor.views or [tensor]):  # type: ignore[attr-defined]
                m.graph_break("B101", callee=self.show(), reason="a tensor that it holds may have been written since")
        primals, _, lifted = self.inputs
        n = len(primals)

        def pull(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return self.target.invoke(function, args[:n], {})[1](*args[n:], **kwargs)

        given = ((*primals, *(lower(m, arg) for arg in args)), {key: lower(m, value) for key, value in kwargs.items()})
        target = Transformed("pull_back_of_body", pull, self.target.body)
        with m.speculate(self.run, grad_mode=m.grad_enabled(), transformed=True) as body:  # type: ignore[attr-defined]
            _rehearse(body, target, given, lifted)
        return m.node(target, [*given, tuple(lifted)], {})

    def show(self) -> str:
        return f"the function that {self.run} gives"

    def emit(self, em: Emitter) -> str:
        raise CannotEmit(self)


def _tensors(value: Any) -> list[TensorTracker]:
    if isinstance(value, TensorTracker):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


@rule(torch.func.vjp, Tracker)
def vjp(m: Machine, fn: Tracker, /, *primals: Tracker, has_aux: Tracker | None = None) -> Tracker:
    aux = has_aux is not None and m.truth(has_aux)

    def run(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return torch.func.vjp(function, *args, has_aux=aux)

    return _in_two_steps(m, "torch.func.vjp", run, fn, primals)


def _in_two_steps(m: Machine, name: str, run: Invoke, fn: Tracker, primals: Sequence[Tracker]) -> Tracker:
    """(result, function[, aux]): the result now, the function a tracker that captures a node when it is called."""

    def first(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        found = run(function, args, kwargs)
        return found[0], found[2:]

    target, given, lifted, random = _captured(m, name, first, fn, primals, {})
    if random:
        m.restart_before(name, "random numbers, which are drawn once and used twice")  # type: ignore[attr-defined]
    result = m.node(target, [*given, tuple(lifted)], {})
    value, rest = m.iterate(result)
    pull = PullbackTracker(m, name, Transformed(name, run, target.body), (given[0], {}, lifted))
    return TupleTracker([value, pull, *m.iterate(rest)])


# -- functions that were transformed outside of the region


def existing(m: Machine, obj: types.FunctionType, source: Source) -> Tracker | None:
    """What `torch.func.grad(f)` gave earlier: a Python function whose cells hold the options."""
    code = obj.__code__
    if "_functorch" not in code.co_filename or "func" not in code.co_freevars:
        return None
    transform = _BY_NAME.get(code.co_qualname.split(".")[0])
    if transform is None:
        return None
    function = FunctionTracker.existing(m, obj, source)
    cells = dict(zip(code.co_freevars, function.closure, strict=True))
    options = {}
    for name, parameter in inspect.signature(transform).parameters.items():
        value = cells[name].load(m) if name in cells and name != "func" else None
        const = value.try_const() if value is not None else None
        if value is not None and (const is None or const.value != parameter.default):
            options[name] = value
    fn = cells["func"].load(m)
    assert fn is not None
    return TransformTracker(transform, fn, options, source, obj)


FUNCTION_BUILDERS.append(existing)
