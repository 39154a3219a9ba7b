"""Answers from torch itself, where we have no rule or a rule refused.

The operation runs for real, on CPU tensors of zeros (or of ones) with the given shapes, below autograd and outside our mode. That gives eager's
answer, or eager's exception with its type and message. Large inputs go to torch's meta kernels first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._library.fake_impl import set_ctx_getter
from torch._library.simple_registry import singleton

from magneto.base.events import counter
from magneto.graph.layout import numel
from magneto.graph.meta import CPU, TensorMeta

LARGE = 1 << 24  # elements
HUGE = 1 << 26
META = torch.device("meta")

# The result, or its shape, depends on values that tracing does not have.
DATA_DEPENDENT = frozenset(
    f"aten.{name}" + ("" if "." in name else ".default")
    for name in (
        "_local_scalar_dense item equal is_nonzero nonzero nonzero_numpy argwhere masked_select _unique _unique2 unique_dim unique_consecutive "
        "unique_dim_consecutive bincount repeat_interleave.Tensor allclose"
    ).split()
)

# Namespaces of PyTorch itself, where DATA_DEPENDENT and tags are complete.
OWN_NAMESPACES = frozenset(
    "aten prims prim mkl mkldnn onednn quantized _quantized quantized_decomposed sparse xnnpack prepacked profiler rngprims".split()
)

_VALUE_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


class DataDependent(RuntimeError):
    """The operation needs values (`item`, `bool(tensor)`, `nonzero`, ...)."""

    def __init__(self, op: str) -> None:
        super().__init__(f"{op} depends on the values of its tensors")
        self.op = op


class UnsupportedFake(RuntimeError):
    """The operation cannot be described by metadata (it resizes its argument, returns an exotic layout, ...)."""

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(f"{op}: {reason}")
        self.op = op
        self.reason = reason


def answer_by_torch(op: Any, metas: Sequence[Any], kwargs: dict[str, Any], reason: str | None, counts: Any = None) -> Any:
    """TensorMeta (or nested) results of the real operation; raises what torch raises. `reason` is None when there is no rule; `counts`: whom
    a custom operation asks for sizes that depend on data (`torch.library.get_ctx`)."""
    name = str(op)
    if name in DATA_DEPENDENT or (reason is None and not _VALUE_TAGS.isdisjoint(op.tags)):
        raise DataDependent(name)
    counter("fake_fallback")
    device = _device(metas, kwargs)
    if op.namespace not in OWN_NAMESPACES:
        return _answer_of_extension(op, metas, kwargs, device, counts)
    size = sum(m.storage_size() for m in _metas((metas, kwargs)))
    on_cpu = [(CPU, 0), (CPU, 1)]  # an error that ones do not have was about the values
    on_meta = [(META, 0)]
    attempts = on_cpu if reason is not None and size <= LARGE else on_meta + on_cpu if size > LARGE else on_cpu + on_meta
    if size > HUGE:  # not a size of the program: see unknown.py
        attempts = on_meta
    first_error: BaseException | None = None
    for where, fill in attempts:
        try:
            with torch.no_grad():
                return _describe(name, _run(op, metas, kwargs, where, fill), device)
        except UnsupportedFake:
            raise
        except Exception as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _answer_of_extension(op: Any, metas: Sequence[Any], kwargs: dict[str, Any], device: torch.device, counts: Any) -> Any:
    """An operation that is not PyTorch's own: only its meta kernel (`register_fake`) says what its result is, whatever the values; a trial on made-up
    values would say something about those (`torchvision::nms` of equal boxes keeps one)."""
    name = str(op)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta"):
        raise UnsupportedFake(name, "it has no meta kernel (torch.library.register_fake)")
    try:
        kernel = _registered(op) if counts is not None else op
        with torch.no_grad(), set_ctx_getter(lambda: counts) if kernel is not op else contextlib.nullcontext():
            return _describe(name, _run(op, metas, kwargs, META, 0, kernel), device)
    except UnsupportedFake:
        raise
    except Exception as error:
        if "data-dependent" in str(error):
            raise DataDependent(name) from None
        raise UnsupportedFake(name, f"its meta kernel fails: {(str(error).splitlines() or [''])[0][:120]}") from None


def _registered(op: Any) -> Any:
    """The function given to `register_fake`: the operation's own kernel for meta tensors forbids it to ask for sizes."""
    return getattr(getattr(singleton.find(op.name()), "fake_impl", None), "kernel", None) or op


def _metas(value: Any) -> list[TensorMeta]:
    if type(value) is TensorMeta:
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [meta for item in value for meta in _metas(item)]


def _device(metas: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    devices = [m.device for m in _metas((metas, kwargs))]
    return next((d for d in devices if d != CPU), CPU)


def _run(op: Any, metas: Sequence[Any], kwargs: dict[str, Any], device: torch.device, fill: int, kernel: Any = None) -> Any:
    def real(value: Any, fill: int = fill) -> Any:
        if type(value) is TensorMeta:
            made = torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=device)
            if device is CPU and numel(value.shape) <= LARGE:
                made.fill_(fill)
            return made
        if isinstance(value, torch.device):
            return device
        if isinstance(value, (list, tuple)):
            return [real(item) for item in value]
        return value

    call = kernel or op
    counted = [
        1 if "pivots" in argument.name else fill for argument in op._schema.arguments
    ]  # LAPACK counts rows from 1, and looks at nothing
    args = [real(value, first) for value, first in zip(metas, counted, strict=False)]
    named = {key: real(value, 1 if "pivots" in key else fill) for key, value in kwargs.items()}
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return call(*args, **named)
    before = torch.get_rng_state()  # the program's random stream does not see the trial
    try:
        return call(*args, **named)
    finally:
        torch.set_rng_state(before)


def _describe(name: str, result: Any, device: torch.device) -> Any:
    if isinstance(result, torch.Tensor):
        if result.layout is not torch.strided:
            raise UnsupportedFake(name, f"its result has layout {result.layout}")
        meta = TensorMeta.of(result)
        return meta if meta.device == device else meta.with_(device=device)
    if isinstance(result, (list, tuple)):
        items = [_describe(name, item, device) for item in result]
        return tuple(items) if isinstance(result, tuple) else items
    return result
