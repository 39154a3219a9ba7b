"""Compiled graphs on disk: a later process (or a later compile) that meets an equal graph neither decomposes nor lowers, schedules or writes kernels.

The key is the functional graph itself, as text, with everything else that decides what is made of it: torch, our sources, the flags, the C compiler and the processor. An
entry is data: the plan with names in place of functions and addresses, and the text of its kernels, so that it serves without the libraries too.
"""

from __future__ import annotations

import functools
import io
import operator
import os
import pickle
import platform
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from magneto import _C
from magneto.base.dataclass import dataclass
from magneto.base.events import counter
from magneto.base.flags import config
from magneto.base.logs import LOOPS, dumping, logging
from magneto.graph import TensorMeta
from magneto.graph.narrow import narrow_types
from magneto.inductor.runtime import claim, plan_code
from magneto.inductor.runtime.calls import call_named, name_of_call
from magneto.inductor.runtime.compiler import NoCompiler, find_compiler, vector_math_level
from magneto.inductor.runtime.plan_code import PlanCode
from magneto.inductor.runtime.record import capturing
from magneto.inductor.runtime.store import key_of, store
from magneto.prims import Prim


@dataclass(frozen=True, slots=True)
class Finished:
    """A compiled graph as data. In `code`, kernels have the hashes of their texts in place of addresses.

    kernels: (what it computes as a C comment, text of the function) of each distinct kernel. n_kernels: launches. written: see compile_writing. peak_bytes: the most that a call holds, besides its inputs.
    """

    code: PlanCode
    kernels: tuple[tuple[str, str], ...]
    n_kernels: int
    n_calls: int
    inputs_written: int
    written: frozenset[int]
    peak_bytes: int = 0


class _NotKept(Exception):
    """Something in the graph or its plan has no name that means the same in another process."""


# ---- the key ----------------------------------------------------------------------------------------------------------------


def key_of_graph(
    graph: fx.Graph, written: Mapping[int, int], state: frozenset[int] = frozenset(), training: bool = False, foreign: str = ""
) -> str | None:
    """The key of a functional graph, before layouts are chosen, whose outputs `written` are copied into inputs, and whose inputs `state` are weights. None: it is not kept, or somebody wants to
    see how it is compiled. `foreign`: the kind of device, where it is not the CPU."""
    if not config.cache or config.verify or config.trace or logging(LOOPS) or dumping():
        return None
    compiler = find_compiler()
    if isinstance(compiler, NoCompiler) and not foreign:
        return None
    try:
        text = graph_text(graph)
    except _NotKept:
        counter("graphs_not_kept")
        return None
    flags = [f"{name}={value!r}" for name, value in config.cache_key()]
    machine = ("", "") if isinstance(compiler, NoCompiler) else (compiler.key(), str(vector_math_level()))
    where = foreign and foreign + _cudnn(), f"{torch.get_default_dtype()} {torch.are_deterministic_algorithms_enabled()}"
    rest = sorted(written.items()), sorted(state), training, _C.pages_watched() < 0, sorted(map(str, narrow_types()))
    return key_of(_version(), *flags, *machine, *where, text, repr(rest))


def tensor_cores(dtype: torch.dtype) -> bool:
    """Are convolutions of that type computed by tensor cores? float32 where torch's settings let it be TF32."""
    if dtype is not torch.float32:
        return True
    return not (torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)) and tf32_allowed()


def tf32_allowed() -> bool:
    """Does torch let cuDNN compute float32 as TF32?"""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # the program uses the newer setting
        return getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", "") == "tf32"


def library_rounds() -> bool:
    """Does torch let cuBLAS compute products of float32 as TF32?"""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        return getattr(torch.backends.cuda.matmul, "fp32_precision", "") == "tf32"


def _cudnn() -> str:
    """How the program lets cuDNN compute, by which convolutions are laid out and folded; while a stream is captured nothing can be tried."""
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    switches = torch._C._get_cudnn_enabled(), torch._C._get_cudnn_benchmark(), torch._C._get_cudnn_deterministic()
    return repr((version, switches, tensor_cores(torch.float32), capturing()))


@functools.cache
def _version() -> str:
    """Torch, Python, and our sources with their sizes and times of change."""
    root = Path(_C.__file__).parent
    files = [
        path
        for room in ("base", "symbolic", "graph", "prims", "aot_autograd", "inductor", "backends")
        for path in sorted((root / room).rglob("*.py"))
    ]
    stamps = [(path.name, (status := os.stat(path)).st_size, status.st_mtime_ns) for path in (*files, Path(_C.__file__))]
    return key_of(torch.__version__, str(torch.version.git_version), platform.python_version(), repr(stamps))


def graph_text(graph: fx.Graph) -> str:
    """A graph without the names and places that do not matter. Raises _NotKept."""
    numbers: dict[fx.Node, int] = {}
    lines = []
    for number, node in enumerate(graph.nodes):
        lines.append(
            f"{_target(node)}{_text(node.args, numbers)}{_text(node.kwargs, numbers)}:{_value(node.meta.get('val'))}{' late' * ('in_backward' in node.meta)}"
        )
        numbers[node] = number
    return "\n".join(lines)


def _target(node: fx.Node) -> str:
    target: Any = node.target
    if node.op in ("placeholder", "output"):
        return node.op
    if node.op != "call_function":
        raise _NotKept
    if isinstance(target, torch._ops.OpOverload):
        return str(target) if target.namespace in ("aten", "prims") else f"{target} {target._schema}"
    if isinstance(target, Prim):
        return f"prim {target.name}"
    if target is operator.getitem:
        return "getitem"
    raise _NotKept


_PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _text(value: Any, numbers: Mapping[fx.Node, int]) -> str:
    kind = type(value)
    if kind is fx.Node:
        return f"%{numbers[value]}"
    if kind in _PLAIN:
        return repr(value)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return f"{'[' if isinstance(value, list) else '('}{','.join([_text(item, numbers) for item in value])})"
    if isinstance(value, dict):
        return f"{{{','.join([f'{name}={_text(item, numbers)}' for name, item in value.items()])}}}"
    if kind is slice:
        return f"slice{_text((value.start, value.stop, value.step), numbers)}"
    raise _NotKept


def _value(value: Any) -> str:
    if type(value) is TensorMeta:
        m = value
        return f"{m.shape}{m.strides}{m.dtype}{m.device}{m.storage_offset}{m.requires_grad}{m.is_leaf}{m.lazy}"
    if isinstance(value, (tuple, list)):
        return f"({';'.join(map(_value, value))})"
    return _text(value, {})


# ---- entries ----------------------------------------------------------------------------------------------------------------


def keep(key: str, finished: Finished) -> None:
    """Put a compiled graph on disk, if all that it is made of can be named."""
    keep_data(key, tuple(getattr(finished, name) for name in Finished.__slots__))


def keep_data(key: str, data: tuple[Any, ...]) -> None:
    """As keep, for plain data: plans, functions that have names, and what Python pickles by itself."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, 5).dump(data)
    except _NotKept:
        counter("graphs_not_kept")
        return
    store().put("graph", key, zlib.compress(stream.getvalue(), 1))


def recall_data(key: str, many: int) -> tuple[Any, ...] | None:
    """What `keep_data` has kept under that key, of so many parts."""
    payload = store().get("graph", key)
    if payload is None:
        return None
    try:
        found: tuple[Any, ...] = _Unpickler(io.BytesIO(zlib.decompress(payload))).load()
        if len(found) != many:
            raise ValueError
    except Exception:  # written by something else: it is made again, and replaced
        counter("graphs_unreadable")
        return None
    return found


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "carve": plan_code.carve,
    "view_at": plan_code.view_at,
    "laid_out": plan_code.laid_out,
    "claim": claim.claim,
    "restrided": plan_code.restrided,
    "as_strided": torch.as_strided,
    "empty": torch.empty,
    "empty_strided": torch.empty_strided,
}
_NAMES = {id(function): name for name, function in _FUNCTIONS.items()}
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class _Pickler(pickle.Pickler):
    """Names for functions and for torch's constants; nothing else but plain data."""

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _DATA:
            return None
        if kind is torch.device:
            return "device", str(obj)
        if kind in _CONSTANTS:
            return "torch", str(obj).removeprefix("torch.")
        if kind is PlanCode:
            return "plan", tuple(getattr(obj, name) for name in PlanCode.__slots__)
        if id(obj) in _NAMES:
            return "function", _NAMES[id(obj)]
        name = name_of_call(obj)
        if name is None:
            raise _NotKept
        return "call", name


_DATA = frozenset((int, float, complex, bool, str, bytes, type(None), tuple, list, dict, frozenset))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("builtins", "frozenset"), ("builtins", "complex")):
            return getattr(__import__(module), name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a compiled graph")

    def persistent_load(self, pid: Any) -> Any:
        kind, value = pid
        if kind == "device":
            return torch.device(value)
        if kind == "torch":
            found = getattr(torch, value)
            if not isinstance(found, _CONSTANTS):
                raise pickle.UnpicklingError(value)
            return found
        if kind == "plan":
            return PlanCode(*value)
        return _FUNCTIONS[value] if kind == "function" else call_named(value)
