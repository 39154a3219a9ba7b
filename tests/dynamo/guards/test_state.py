"""The table of modes: each row notices its mode, natively and in Python."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.state import FORWARD_LEVEL, STATE_TABLE, _probes, state_payload
from tests.dynamo.guards.oracle import Both


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


CHANGES = {
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "forward gradients": lambda: forward_ad._set_fwd_grad_enabled(False),
    "autocast cpu": lambda: torch.autocast("cpu"),
    "default dtype": lambda: default_dtype(torch.float64),
    "torch function modes": Mode,
    "torch function enabled": torch._C.DisableTorchFunctionSubclass,
    "deterministic algorithms": deterministic,
    FORWARD_LEVEL: forward_ad.dual_level,
}


def rows(*names):
    return [(Kind.STATE, None, payload) for payload in state_payload() if not names or payload[0] in names]


@pytest.mark.parametrize("name", CHANGES)
def test_each_mode_is_noticed(name):
    one, all_ = Both(*rows(name)), Both(*rows())
    assert one.holds() and all_.holds()
    with CHANGES[name]():
        assert not one.holds()
        assert not all_.holds()
        inside = Both(*rows())
        assert inside.holds()
    assert one.holds() and all_.holds()
    assert not inside.holds()


def test_function_transforms():
    both, seen = Both(*rows("function transforms")), []

    def inside(x):
        seen.append(both.holds())
        return x.sum()

    torch.func.vmap(inside)(torch.ones(2, 3))
    torch.func.grad(inside)(torch.ones(3))
    assert seen == [False, False]
    assert both.holds()


def test_dispatch_modes():
    from torch.utils._python_dispatch import TorchDispatchMode

    both = Both(*rows("dispatch modes"))
    mode = TorchDispatchMode.__new__(TorchDispatchMode)
    assert both.holds()
    torch._C._push_on_torch_dispatch_stack(mode)
    try:
        hit = both.program.check((), ())
    finally:
        torch._C._pop_torch_dispatch_stack(None)
    assert not hit
    assert both.holds()


def test_autocast_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        both = Both(*rows())
        assert both.holds()
        with torch.autocast("cpu", enabled=False):
            assert not both.holds()
    with torch.autocast("cpu", dtype=torch.float16):
        assert not both.holds()
    assert not both.holds()


def test_default_device():
    with torch.device("cpu"):
        both = Both(*rows())
        assert both.holds()
    assert not both.holds()
    with torch.device("meta"):
        assert not both.holds()


def test_all_modes_have_a_native_probe():
    """With the torch that we test against; elsewhere the callables serve."""
    without = {row.name for row in STATE_TABLE} - set(_probes()) - {"default device"}
    assert without == {"saved tensor hooks"}  # no exported function gives it as a number; read only while grad mode is on
    with torch.no_grad():
        both = Both(*rows())
        both.holds()
        assert set(both.fast()) - {"ENTRIES"} == {"PROBE"}  # from 3.12 on a watcher's flag stands for the entries
