"""torch.nn.attention.sdpa_kernel and the switches behind it: nodes of the graph, guarded, propagated and put back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import magneto
from magneto.graph import modes as module
from magneto.graph.modes import modes
from tests.compare import Capturing, same
from tests.python.programs import Programs, check

torch.manual_seed(0)
Q = torch.randn(1, 2, 8, 16)
programs = Programs()


@pytest.fixture(autouse=True)
def put_back():
    before = modes()
    yield
    before.restore()


def attend(q):
    return F.scaled_dot_product_attention(q, q, q)


def layout(x):
    return x.stride(), x.is_contiguous()


@programs.add(Q)
def one_kernel(q):
    with sdpa_kernel(SDPBackend.MATH):
        y = attend(q)
    return y + 1, layout(y)


@programs.add(Q)
def several_kernels(q):
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        y = attend(q)
    return y, layout(y)


@programs.add(Q)
def an_order(q):
    before = torch._C._get_sdp_priority_order()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        inside = torch._C._get_sdp_priority_order()
        y = attend(q)
    return y, inside, before == torch._C._get_sdp_priority_order()


@programs.add(Q)
def nested(q):
    with sdpa_kernel(SDPBackend.MATH):
        a = attend(q)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            b = attend(a)
            inner = torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
        outer = torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    return a, b, layout(a), layout(b), inner, outer, torch.backends.cuda.flash_sdp_enabled()


@programs.add(Q)
def an_exception_inside(q):
    try:
        with sdpa_kernel(SDPBackend.MATH):
            y = attend(q)
            raise KeyError("out")
    except KeyError:
        pass
    return y, torch.backends.cuda.flash_sdp_enabled()


@programs.add(Q)
def chosen_by_name(q):
    chosen = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}["math"]
    with sdpa_kernel(chosen):
        y = attend(q)
    return y, chosen == SDPBackend.MATH, chosen is SDPBackend.MATH, int(chosen), hash(chosen) == hash(SDPBackend.MATH)


@sdpa_kernel(SDPBackend.MATH)
def decorated(q):
    return attend(q)


@programs.add(Q)
def a_decorated_function(q):
    y = decorated(q)
    return y, layout(y)


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program):
    check(program)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_the_kernel_is_the_one_asked_for(backend):
    q = torch.randn(1, 2, 8, 16, requires_grad=True)

    def step(q):
        with sdpa_kernel(SDPBackend.MATH):
            loss = attend(q).square().sum()
        return loss

    compiled = magneto.optimize(backend, nopython=True)(step)
    before = modes()
    with torch.profiler.profile() as found:
        loss = compiled(q)
    names = {event.name for event in found.events()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" not in names
    loss.backward()
    other = q.detach().clone().requires_grad_()
    step(other).backward()
    assert modes() == before
    torch.testing.assert_close(q.grad, other.grad)


def test_a_switch_stays_as_the_program_leaves_it():
    def run(q):
        torch.backends.cuda.enable_flash_sdp(False)
        y = attend(q)
        return y, layout(y)

    backend = Capturing()
    compiled = magneto.optimize(backend, nopython=True)(run)
    for _ in range(3):
        torch.backends.cuda.enable_flash_sdp(True)
        compiled(Q)
        assert not torch.backends.cuda.flash_sdp_enabled()
    compiled(Q)  # off at the start: another region
    assert len(backend.graphs) == 2


def test_switches_outside_are_guarded():
    backend = Capturing()
    compiled = magneto.optimize(backend, nopython=True)(lambda q: (attend(q), layout(attend(q))))
    plain = lambda q: (attend(q), layout(attend(q)))  # noqa: E731
    same(plain, compiled, Q)
    with sdpa_kernel(SDPBackend.MATH):
        same(plain, compiled, Q)
    same(plain, compiled, Q)
    assert len(backend.graphs) == 2


def test_a_break_inside():
    def run(q):
        with sdpa_kernel(SDPBackend.MATH):
            y = attend(q)
            magneto.graph_break()
            enabled = torch.backends.cuda.flash_sdp_enabled()
            z = attend(y)
        return y, z, layout(z), enabled, torch.backends.cuda.flash_sdp_enabled()

    compiled = magneto.optimize("eager")(run)
    for _ in range(2):
        same(run, compiled, Q)


def test_a_graph_that_fails_puts_them_back():
    def run(q):
        with sdpa_kernel(SDPBackend.MATH):
            return attend(q)

    def failing(gm, inputs):
        def call(*args):
            gm(*args)
            torch._C._set_sdp_use_flash(False)
            raise RuntimeError("no")

        return call

    before = modes()
    compiled = magneto.optimize(failing)(run)
    assert torch.equal(compiled(Q), run(Q)) and modes() == before


def test_an_order_that_the_first_attention_changes_costs_no_second_capture(monkeypatch):
    """As on GPUs where torch prefers cuDNN's kernel."""
    order = [*reversed(torch._C._get_sdp_priority_order())]

    def choose(*args):
        torch._C._set_sdp_priority_order(order)
        return 1

    empty = torch.empty
    monkeypatch.setattr(module, "_settled", False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "empty", lambda *args, device=None, **kwargs: empty(*args, **kwargs))
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    backend = Capturing()
    compiled = magneto.optimize(backend)(attend)
    for _ in range(2):
        assert torch.equal(compiled(Q), attend(Q))
        choose()  # as the attention itself does
    assert len(backend.graphs) == 1 and module._settled
