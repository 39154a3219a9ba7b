"""The executor (csrc/plan.c) and the instructions written for it."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch

from magneto import _C
from magneto.graph.attention import ATTENTION
from magneto.inductor.codegen.plan import plan_code, same_tensor
from magneto.inductor.compile import compile_graph, compile_program
from magneto.inductor.loops.ir import Buffer, ViewOf
from magneto.inductor.lower import lower_graph
from magneto.inductor.runtime.calls import FAST
from magneto.inductor.runtime.plan_code import laid_out, show_plan
from magneto.inductor.schedule.memory import plan_memory
from magneto.inductor.schedule.schedule import schedule
from tests.inductor.lower.prim_graphs import Graph

aten = torch.ops.aten


def test_call_with_keywords_list_and_unpack() -> None:
    code = (
        ("CONST", 2, 1),
        ("LIST", 3, (0, 1)),
        ("CALL", 4, torch.cat, (3, 2), ("dim",)),
        ("CALL", 5, torch.max, (4, 2), ()),
        ("UNPACK", 5, (6, -1)),
        ("FREE", (3, 5)),
    )
    plan = _C.Plan(code, 7, 2, (6, 4))
    a, b = torch.randn(3, 2), torch.randn(3, 4)
    for _ in range(3):
        top, joined = plan(a, b)
        assert torch.equal(joined, torch.cat([a, b], 1)) and torch.equal(top, joined.max(1).values)
    assert plan.calls == 3 and plan.instructions == code


@pytest.mark.parametrize(
    "code, n, inputs, outputs",
    [
        ((("FREE", (1,)),), 2, 1, ()),
        ((("CALL", 0, torch.sin, (0,), ()),), 1, 1, ()),
        ((("CALL", 5, torch.sin, (0,), ()),), 2, 1, ()),
        ((("NOPE", 1, 2),), 2, 1, ()),
        ((("KERNEL", 0, (0,), False),), 1, 1, ()),
        ((("CALL", 1, torch.sin, (0,), ("a", "b")),), 2, 1, ()),
        ((), 2, 1, (1,)),
        ((("CALL", 1, torch.sin, (2,), ()), ("CALL", 2, torch.sin, (0,), ())), 3, 1, ()),
    ],
)
def test_wrong_programs_are_refused(code: Any, n: int, inputs: int, outputs: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        _C.Plan(code, n, inputs, outputs)


def test_consumed_inputs_are_dropped_after_their_last_use() -> None:
    seen: list[list[bool]] = []
    refs: list[weakref.ref[torch.Tensor]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append([ref() is not None for ref in refs])
        return x

    code = (
        ("VIEW", 3, 1, torch.as_strided, ((2,), (1,)), True),
        ("CALL", 4, torch.sin, (0,), ()),
        ("CALL", 5, look, (4,), ()),
        ("CALL", 6, torch.mul, (3, 5), ()),
        ("CALL", 7, look, (6,), ()),
        ("CALL", 8, torch.add, (7, 2), ()),
        ("CALL", 9, look, (8,), ()),
    )
    plan = _C.Plan(code, 10, 3, (9,))
    parameter = torch.ones(2)
    for _ in range(3):
        values = [torch.ones(2), torch.ones(2), torch.ones(2)]
        refs[:] = [weakref.ref(value) for value in values]
        expected = values[0].sin() * values[1] + values[2]
        assert torch.equal(plan.consume(values)[0], expected) and values == []
        assert [ref() for ref in refs] == [None, None, None]
        refs.clear()
        refs.append(weakref.ref(parameter))
        for _ in range(2):
            plan.consume([parameter, parameter, parameter])
        refs.clear()
    assert seen[:3] == [[False, True, True], [False, False, True], [False, False, False]]
    assert all(all(found) for found in seen[3:9])
    with pytest.raises(TypeError, match="3 positional inputs, got 1"):
        plan.consume([parameter])
    with pytest.raises(TypeError, match="list"):
        plan.consume((parameter,) * 3)  # type: ignore[arg-type]


def test_consumed_inputs_are_dropped_when_a_step_fails() -> None:
    plan = _C.Plan((("CALL", 2, torch.mm, (0, 1), ()),), 3, 2, (2,))
    values = [torch.ones(2, 3), torch.ones(2, 3)]
    refs = [weakref.ref(value) for value in values]
    with pytest.raises(RuntimeError):
        plan.consume(values)
    assert values == [] and [ref() for ref in refs] == [None, None]


def test_wrong_number_of_inputs() -> None:
    plan = _C.Plan((), 2, 2, (0,))
    with pytest.raises(TypeError, match="2 positional inputs, got 1"):
        plan(torch.ones(1))
    with pytest.raises(TypeError):
        plan(torch.ones(1), x=2)


def test_errors_leave_the_plan_usable() -> None:
    plan = _C.Plan((("CALL", 2, torch.mm, (0, 1), ()), ("CALL", 3, torch.sin, (2,), ())), 4, 2, (3,))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        plan(torch.ones(2, 3), torch.ones(2, 3))
    assert torch.equal(plan(torch.eye(2), torch.zeros(2, 2))[0], torch.zeros(2, 2))


def test_grad_mode_is_off_inside_and_restored() -> None:
    seen: list[bool] = []
    plan = _C.Plan((("CALL", -1, lambda x: seen.append(torch.is_grad_enabled()), (0,), ()), ("CALL", 1, torch.mul, (0, 0), ())), 2, 1, (1,))
    x = torch.ones(2, requires_grad=True)
    assert not plan(x)[0].requires_grad and torch.is_grad_enabled()
    with torch.no_grad():
        plan(x)
        assert not torch.is_grad_enabled()
    failing = _C.Plan((("CALL", 1, torch.mm, (0, 0), ()),), 2, 1, (1,))
    with pytest.raises(RuntimeError):
        failing(x)
    assert torch.is_grad_enabled() and seen == [False, False]


def test_references_are_balanced() -> None:
    plan = _C.Plan((("CALL", 1, torch.sin, (0,), ()), ("CALL", 2, torch.cos, (1,), ()), ("FREE", (1,))), 3, 1, (2,))
    x = torch.ones(3)
    before = sys.getrefcount(x)
    for _ in range(1000):
        plan(x)
    assert sys.getrefcount(x) == before
    dead = weakref.ref(plan)
    del plan
    gc.collect()
    assert dead() is None


def test_views_of_parameters_are_kept_and_of_activations_are_not() -> None:
    made: list[int] = []

    def view(x: torch.Tensor) -> torch.Tensor:
        made.append(1)
        return x.t()

    plan = _C.Plan((("VIEW", 1, 0, view, (), True), ("CALL", 2, torch.clone, (1,), ())), 3, 1, (2,))
    weight = torch.randn(2, 3)
    for _ in range(5):
        assert torch.equal(plan(weight)[0], weight.t())
    assert len(made) == 2  # seen once, remembered the second time
    weight.data = torch.randn(2, 3)  # other storage behind the same object
    assert torch.equal(plan(weight)[0], weight.t()) and len(made) == 3
    activation = torch.randn(2, 3)
    dead = weakref.ref(activation)
    plan(activation)
    del activation
    assert dead() is None


def test_one_tensor_output_written_by_a_kernel_that_drops_the_gil() -> None:
    g = Graph()
    g.output(g.exp(g.input(torch.randn(1 << 17))))
    plan = compile_program(lower_graph(g.fx))
    assert any(i[0] == "KERNEL" and i[3] for i in plan.instructions)
    results: list[bool] = []

    def work(seed: int) -> None:
        x = torch.full((1 << 17,), float(seed))
        results.extend(bool(torch.allclose(plan(x)[0], x.exp())) for _ in range(20))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [True] * 80


def deep(width: int = 64) -> Graph:
    """Library calls in a row with pointwise work in between: buffers that can share memory."""
    g = Graph()
    x, w = g.input(torch.randn(width, width) / 8), g.input(torch.randn(width, width) / 8)
    for _ in range(6):
        x = g.tanh(g.call(aten.mm.default, x, w))
    g.output(x)
    return g


def test_arena_is_reused_and_activations_are_written_in_place() -> None:
    g = deep()
    plan = schedule(lower_graph(g.fx))
    memory = plan_memory(plan)
    assert memory.arena_bytes <= 2 * 64 * 64 * 4 and memory.in_place
    compiled = compile_graph(g.fx)
    first = compiled(*g.inputs)[0]
    kept = first.clone()
    torch.testing.assert_close(first, g.expected[0])
    compiled(torch.randn(64, 64), g.inputs[1])
    assert torch.equal(first, kept), "an output shares memory with a later call"


def test_concurrent_calls_have_workspaces_of_their_own() -> None:
    g = deep(192)
    compiled = compile_graph(g.fx)
    failures: list[float] = []

    def work(seed: int) -> None:
        x, w = torch.randn(192, 192, generator=torch.Generator().manual_seed(seed)) / 8, g.inputs[1]
        expected = x
        for _ in range(6):
            expected = torch.tanh(expected @ w)
        for _ in range(20):
            failures.append((compiled(x, w)[0] - expected).abs().max().item())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert max(failures) < 1e-4


def test_show_plan_names_every_instruction() -> None:
    g = deep()
    plan = schedule(lower_graph(g.fx))
    code = plan_code(plan, plan_memory(plan), lambda step: 1234)
    text = show_plan(code)
    assert text.count("\n") == len(code.instructions) and "KERNEL" in text and "mm" in text


def test_same_tensor_ignores_strides_of_single_elements() -> None:
    buffer = Buffer("b", (2, 1, 3), (3, 3, 1), torch.float32, torch.device("cpu"))
    assert same_tensor(ViewOf("b", (2, 1, 3), (3, 7, 1), 0, torch.float32), buffer)
    assert not same_tensor(ViewOf("b", (2, 1, 3), (1, 3, 2), 0, torch.float32), buffer)
    assert not same_tensor(ViewOf("b", (2, 1, 3), (3, 3, 1), 1, torch.float32), buffer)


SAMPLES: dict[Any, tuple[Any, ...]] = {
    aten.mm.default: (torch.randn(2, 3), torch.randn(3, 4)),
    aten.addmm.default: (torch.randn(4), torch.randn(2, 3), torch.randn(3, 4)),
    aten.bmm.default: (torch.randn(2, 2, 3), torch.randn(2, 3, 4)),
    aten.baddbmm.default: (torch.randn(2, 2, 4), torch.randn(2, 2, 3), torch.randn(2, 3, 4)),
    aten.mv.default: (torch.randn(2, 3), torch.randn(3)),
    aten.dot.default: (torch.randn(3), torch.randn(3)),
    aten.cat.default: ([torch.randn(2), torch.randn(3)], 0),
    aten.convolution.default: (torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    aten.index_select.default: (torch.randn(4, 3), 0, torch.tensor([1, 2])),
    aten.gather.default: (torch.randn(4, 3), 0, torch.tensor([[1, 2, 0]])),
    aten.native_layer_norm.default: (torch.randn(2, 3), [3], None, None, 1e-5),
    aten.max_pool2d_with_indices.default: (torch.randn(1, 1, 4, 4), [2, 2]),
    aten.avg_pool2d.default: (torch.randn(1, 1, 4, 4), [2, 2]),
    aten._adaptive_avg_pool2d.default: (torch.randn(1, 1, 4, 4), [2, 2]),
    aten.scaled_dot_product_attention.default: tuple(torch.randn(1, 2, 3, 4) for _ in range(3)),
    aten._scaled_dot_product_flash_attention_for_cpu.default: tuple(torch.randn(1, 2, 3, 4) for _ in range(3)),
    ATTENTION: (*(torch.randn(1, 2, 3, 4) for _ in range(3)), None, True, 0.5),
}


@pytest.mark.parametrize("op", FAST, ids=str)
def test_fast_callables_mean_the_same(op: Any) -> None:
    expected, found = op(*SAMPLES[op]), FAST[op](*SAMPLES[op])
    for a, b in zip(expected if isinstance(expected, tuple) else (expected,), found if isinstance(found, tuple) else (found,), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


def test_addresses_are_called_with_the_tensors_pointers() -> None:
    seen: list[int] = []
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
    callback = prototype(lambda data: seen.extend(data[i] for i in range(3)) or 0)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    x, y, z = torch.ones(3), torch.ones(4, requires_grad=True), torch.ones(6)[2:]
    _C.Plan((("KERNEL", address, (0, 1, 2), False),), 3, 3, ())(x, y, z)
    assert seen == [x.data_ptr(), y.data_ptr(), z.data_ptr()]


@pytest.mark.parametrize("status, error", [(1, IndexError), (2, RuntimeError), (3, IndexError)])
def test_status_of_a_kernel_becomes_an_exception(status: int, error: type[Exception]) -> None:
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: status)
    plan = _C.Plan((("KERNEL", ctypes.cast(callback, ctypes.c_void_p).value, (0,), False),), 1, 1, (0,))
    with pytest.raises(error):
        plan(torch.ones(1))


def test_results_in_another_layout_are_copied() -> None:
    code = (("CALL", 1, torch.t, (0,), ()), ("LAYOUT", 1, laid_out, (3, 2), (2, 1)))
    plan = _C.Plan(code, 2, 1, (1,))
    x = torch.randn(2, 3)
    (found,) = plan(x)
    assert torch.equal(found, x.t()) and found.stride() == (2, 1)
    kept = torch.randn(3, 2).t()
    assert plan(kept)[0].data_ptr() == kept.data_ptr()
    with pytest.raises(RuntimeError, match="compiled for"):
        plan(torch.randn(2, 4))


def test_results_of_calls_are_checked() -> None:
    g = Graph()
    x = g.input(torch.randn(4, 5))
    g.output(g.exp(g.call(aten.cumsum.default, x, 1)), g.call(aten.cumprod.default, x, 1))
    plan = compile_program(lower_graph(g.fx))
    assert any(i[0] == "LAYOUT" for i in plan.instructions)


def test_outputs_of_a_call_that_nobody_reads_may_be_missing() -> None:
    g = Graph()
    both = g.call(aten._scaled_dot_product_flash_attention_for_cpu.default, *(g.input(torch.randn(2, 2, 8, 16)) for _ in range(3)))
    g.output(g.add(g.item(both, 0), 1))
    code = plan_code(plan := schedule(lower_graph(g.fx)), plan_memory(plan), lambda step: 0)
    (unpack,) = [i for i in code.instructions if i[0] == "UNPACK"]
    assert len(unpack[2]) == 1
    assert sum(i[0] == "LAYOUT" for i in code.instructions) == 1
