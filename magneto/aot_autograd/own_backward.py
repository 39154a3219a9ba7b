"""Custom operators whose backward is Python that reads numbers (`tolist()` of offsets): a traced graph calls the program's backward as one operator, made here for it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from magneto.aot_autograd.overloads import has_kernel
from magneto.graph.ways import first_derivative

_LIBRARY = torch.library.Library("magneto", "FRAGMENT")  # type: ignore[no-untyped-call]
_made: set[str] = set()


class _Context:
    """What `setup_context` and `backward` see of autograd."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: tuple[Any, ...] = ()
        self.apart: tuple[Any, ...] = ()
        self.save_for_backward = lambda *tensors: setattr(self, "saved_tensors", tensors)
        self.mark_non_differentiable = lambda *tensors: setattr(self, "apart", tensors)
        self.set_materialize_grads = bool  # those that are not there always arrive as zeros


class _Apart(torch.autograd.Function):
    """`op(*args)`, with its backward as one operator."""

    @staticmethod
    def forward(ctx: Any, op: Any, *args: Any) -> Any:
        made = op(*args)
        ctx.mark_non_differentiable(*_prepared(op._schema.name, ctx.needs_input_grad[1:], args, made).apart)
        outputs = list(made if isinstance(made, tuple) else (made,)) if _reads_output(op._schema.name, args) else []
        ctx.op, ctx.args = op, [torch.Tensor if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.save_for_backward(*(arg for arg in args if isinstance(arg, torch.Tensor)), *outputs)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        first_derivative(str(ctx.op))
        tensors, needs = list(ctx.saved_tensors), ctx.needs_input_grad[1:]
        args = [tensors.pop(0) if arg is torch.Tensor else arg for arg in ctx.args]
        found = iter(_operator(ctx.op)(list(needs), list(gradients), tensors, *args))
        return None, *(next(found) if need else None for need in needs)


def _prepared(name: str, needs: Sequence[bool], args: Sequence[Any], output: Any) -> _Context:
    context, prepare = _Context(needs), OPDEFS[name]._setup_context_fn
    if prepare is not None:
        prepare(ctx=context, inputs=tuple(args), output=output)
    return context


def _reads_output(name: str, args: Sequence[Any]) -> bool:
    """Whether the operator's results are part of what its backward keeps: what is not kept may be written before backward."""
    nothing = object()
    try:
        context = _prepared(name, (True,) * len(args), args, nothing)
    except Exception:
        return True
    return any(value is nothing for value in (*context.saved_tensors, *vars(context).values()))


def _described(needs: Sequence[bool], gradients: Any, results: Any, *args: Any) -> list[torch.Tensor]:
    return [torch.empty_like(arg, memory_format=torch.contiguous_format) for need, arg in zip(needs, args, strict=False) if need]


def _operator(op: Any) -> Any:
    """`(which inputs need a gradient, gradients, results or nothing, *inputs) -> gradients of those inputs`, dense ones."""
    schema, text = op._schema, str(op._schema)
    name = f"backward_of_{op._namespace}_{op._opname}_{zlib.crc32(text.encode()):08x}"

    def run(needs: Sequence[bool], gradients: Sequence[torch.Tensor], results: Sequence[torch.Tensor], *args: Any) -> list[torch.Tensor]:
        args += tuple(a.default_value for a in schema.arguments[len(args) :])  # the dispatcher leaves those out
        output = None if not results else results[0] if len(schema.returns) == 1 else tuple(results)
        found = OPDEFS[schema.name]._backward_fn(_prepared(schema.name, needs, args, output), *gradients)
        made = _described(needs, gradients, results, *args)
        wanted = [g for need, g in zip(needs, found if isinstance(found, tuple) else (found,), strict=True) if need]
        for own, gradient in zip(made, wanted, strict=True):
            own.zero_() if gradient is None else own.copy_(gradient)
        return made

    if name not in _made:
        _made.add(name)
        inputs = text.partition("(")[2].rpartition(") ->")[0]
        _LIBRARY.define(f"{name}(bool[] own_needs, Tensor[] own_gradients, Tensor[] own_results, {inputs}) -> Tensor[]")  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, _described, "Meta")  # type: ignore[no-untyped-call]
    return getattr(torch.ops.magneto, name).default


def with_own_backward(target: Any) -> Callable[..., Any] | None:
    """The operator `target` with one operator as its backward, where it is a custom one with a formula in Python of plain tensors."""
    op = getattr(target, "_opoverload", None) or getattr(target, "default", target)
    schema: Any = getattr(op, "_schema", None)
    definition = OPDEFS.get(schema.name) if schema is not None else None
    if definition is None or definition._backward_fn is None or any(str(r.type) != "Tensor" for r in schema.returns):
        return None
    if any(a.kwarg_only or "List[Tensor]" in str(a.type) for a in schema.arguments):
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *(kwargs.get(a.name, a.default_value) for a in schema.arguments[len(args) :])]
        device = next((arg.device.type for arg in given if isinstance(arg, torch.Tensor)), "cpu")
        converts = torch.is_autocast_enabled(device) and has_kernel(op.name(), f"Autocast{device.upper()}")
        if converts or not torch.is_grad_enabled() or not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in given):
            return op(*args, **kwargs)
        return _Apart.apply(op, *given)  # type: ignore[no-untyped-call]

    return call
