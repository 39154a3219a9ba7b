"""STATE rows: the modes of torch on which the meaning of a tensor operation depends. One table; each row has a Python callable and, where
torch exports one, a native probe (a few nanoseconds without Python)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from magneto import _C
from magneto.base.dataclass import dataclass
from magneto.dynamo.guards.tensors import symbol

# Signatures of probes, as csrc/guard_tensor.c numbers them.
BOOL_VOID, INT8_VOID, INT64_VOID, BOOL_INT8, BOOL_UINT64, BYTE_MASK = range(6)

Payload = tuple[str, Callable[..., Any], tuple[Any, ...], Any]


@dataclass(frozen=True, slots=True)
class Probe:
    """A function exported by one of torch's libraries that answers the same question as the row's callable."""

    library: str
    symbol: str
    signature: int
    argument: int = 0


@dataclass(frozen=True, slots=True)
class StateRow:
    """`read` names an attribute path below torch. `when`: only guarded if that row's value is true."""

    name: str
    read: str
    args: tuple[Any, ...] = ()
    probe: Probe | None = None
    when: str | None = None


AUTOGRAD_STATE = "_ZN3c1013AutogradState13get_tls_stateEv"  # c10::AutogradState::get_tls_state()
AUTOGRAD_BYTES = 28  # of c10::AutogradState that are looked at
AUTOCAST = "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE"
AUTOCAST_DTYPE = "_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE"
TORCH_FUNCTION = "_ZN2at4impl22PythonTorchFunctionTLS"

STATE_TABLE: tuple[StateRow, ...] = (
    StateRow("grad mode", "is_grad_enabled", (), Probe("c10", "_ZN3c108GradMode10is_enabledEv", BOOL_VOID)),
    StateRow("inference mode", "is_inference_mode_enabled"),
    StateRow("forward gradients", "_C._is_fwd_grad_enabled"),
    StateRow("autocast cpu", "is_autocast_enabled", ("cpu",), Probe("torch_cpu", AUTOCAST, BOOL_INT8, 0)),
    StateRow("autocast cuda", "is_autocast_enabled", ("cuda",), Probe("torch_cpu", AUTOCAST, BOOL_INT8, 1)),
    StateRow("autocast dtype cpu", "get_autocast_dtype", ("cpu",), Probe("torch_cpu", AUTOCAST_DTYPE, BOOL_INT8, 0), when="autocast cpu"),
    StateRow(
        "autocast dtype cuda", "get_autocast_dtype", ("cuda",), Probe("torch_cpu", AUTOCAST_DTYPE, BOOL_INT8, 1), when="autocast cuda"
    ),
    StateRow("default dtype", "get_default_dtype", (), Probe("c10", "_ZN3c1031get_default_dtype_as_scalartypeEv", INT8_VOID)),
    StateRow("torch function modes", "_C._len_torch_function_stack", (), Probe("torch_cpu", TORCH_FUNCTION + "9stack_lenEv", INT64_VOID)),
    StateRow(
        "torch function enabled",
        "_C._is_torch_function_enabled",
        (),
        Probe("torch_cpu", TORCH_FUNCTION + "18get_disabled_stateEv", INT8_VOID),
    ),
    StateRow("default device", "get_default_device", when="torch function modes"),
    StateRow(
        "dispatch modes", "_C._len_torch_dispatch_stack", (), Probe("c10", "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", INT64_VOID)
    ),
    StateRow("saved tensor hooks", "_C._autograd._top_saved_tensors_default_hooks", (True,), when="grad mode"),
    StateRow("function transforms", "_C._functorch.maybe_current_level"),
    StateRow("deterministic algorithms", "_C._get_deterministic_algorithms"),
    StateRow("jit.trace", "jit.is_tracing"),
)
FORWARD_LEVEL = "forward gradient level"

ATTENTION_PROBES = {
    "_get_flash_sdp_enabled": "_ZNK2at7Context19userEnabledFlashSDPEv",
    "_get_mem_efficient_sdp_enabled": "_ZNK2at7Context26userEnabledMemEfficientSDPEv",
    "_get_math_sdp_enabled": "_ZNK2at7Context18userEnabledMathSDPEv",
    "_get_cudnn_sdp_enabled": "_ZNK2at7Context19userEnabledCuDNNSDPEv",
    "_get_overrideable_sdp_enabled": "_ZNK2at7Context26userEnabledOverrideableSDPEv",
    "_get_fa3_sdp_enabled": "_ZNK2at7Context17userEnabledFA3SDPEv",
    "_get_math_sdp_allow_fp16_bf16_reduction": "_ZNK2at7Context29allowFP16BF16ReductionMathSDPEv",
}
"""Getter of a switch of attention -> the method of at::Context that it calls."""


@functools.cache
def _callable(path: str) -> Callable[..., Any] | None:
    import torch

    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found  # type: ignore[no-any-return]


def state_payload() -> list[Payload]:
    """Payloads of STATE rows (name, callable, args, expected) that describe the present modes."""
    from torch.autograd import forward_ad

    values: dict[str, Any] = {}
    payloads: list[Payload] = []
    for row in STATE_TABLE:
        read = _callable(row.read)
        if read is None or (row.when is not None and not values.get(row.when)):
            continue
        values[row.name] = read(*row.args)
        payloads.append((row.name, read, row.args, values[row.name]))
    level = vars(forward_ad).get
    payloads.append((FORWARD_LEVEL, level, ("_current_level",), level("_current_level")))
    return payloads


@functools.cache
def _probes() -> dict[str, tuple[int, int, int]]:
    """name -> (signature, address, argument), for the rows whose function is exported and answers as Python does."""
    found: dict[str, tuple[int, int, int]] = {}
    for row in STATE_TABLE:
        address = symbol(row.probe.library, row.probe.symbol) if row.probe is not None else None
        if row.probe is not None and address is not None:
            found[row.name] = (row.probe.signature, address, row.probe.argument)
    found.update(_key_probe("function transforms", "FuncTorchDynamicLayerFrontMode"))
    found.update(_key_probe("jit.trace", "Tracer"))
    found.update(_context_probe("deterministic algorithms", "_ZNK2at7Context23deterministicAlgorithmsEv"))
    for name, method in ATTENTION_PROBES.items():
        found.update(_context_probe(name, method))
    found.update(_autograd_probes())
    return found


def _key_probe(name: str, dispatch_key: str) -> dict[str, tuple[int, int, int]]:
    """Inside vmap, grad, functionalize ... the thread's key set includes the front mode of the transforms, inside torch.jit.trace the tracer's."""
    import torch

    address = symbol("c10", "_ZN3c104impl31tls_is_dispatch_keyset_includedENS_14DispatchKeySetE")
    key = torch._C._parse_dispatch_key(dispatch_key)
    if address is None or key is None:
        return {}
    return {name: (BOOL_UINT64, address, torch._C.DispatchKeySet(key).raw_repr())}


def _context_probe(name: str, method_name: str) -> dict[str, tuple[int, int, int]]:
    """A method of at::globalContext() that answers yes or no: called with the address of the context."""
    context = symbol("torch_cpu", "_ZN2at13globalContextEv")
    method = symbol("torch_cpu", method_name)
    if context is None or method is None:
        return {}
    return {name: (BOOL_UINT64, method, _C.probe(INT64_VOID, context, 0))}


def _autograd_probes() -> dict[str, tuple[int, int, int]]:
    """Inference and forward mode are bits of c10::AutogradState whose places are not exported: they are found by comparing with what Python
    sees in several modes. A bit that is not unique is not used."""
    import torch
    from torch.autograd.forward_ad import _set_fwd_grad_enabled

    address = symbol("c10", AUTOGRAD_STATE)
    if address is None:
        return {}
    names: dict[str, Callable[[], bool]] = {
        "inference mode": torch.is_inference_mode_enabled,
        "forward gradients": torch._C._is_fwd_grad_enabled,
    }
    candidates = {name: [offset << 8 | 1 << bit for offset in range(AUTOGRAD_BYTES) for bit in range(8)] for name in names}
    modes = (
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.inference_mode(False),
        lambda: _set_fwd_grad_enabled(False),
    )
    for mode in modes:
        with mode():
            for name, read in names.items():
                now = read()
                candidates[name] = [place for place in candidates[name] if bool(_C.probe(BYTE_MASK, address, place)) is now]
    return {name: (BYTE_MASK, address, places[0]) for name, places in candidates.items() if len(places) == 1}


def native_probe(payload: Payload) -> tuple[int, int, int, int] | None:
    """Payload of a PROBE instruction (signature, address, argument, expected answer), None where only the callable can tell.

    The expected answer is taken from the present state, which must be the expected one."""
    name, read, args, expected = payload
    known = any(row.name == name and _callable(row.read) is read for row in STATE_TABLE)
    probe = _probes().get(name) if known or (name in ATTENTION_PROBES and read is _callable("_C." + name)) else None
    if probe is None or read(*args) != expected:
        return None
    return (*probe, _C.probe(*probe))
