"""The native parts of launching: addresses compared, small values packed, and what a launcher does where it cannot launch. No device is needed."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from magneto import _C
from magneto.inductor.runtime import driver, triton_launch
from magneto.inductor.runtime.plan_code import TritonKernel


def addresses(tensors: list[torch.Tensor]) -> bytes:
    return array("q", [t.data_ptr() for t in tensors]).tobytes()


def test_the_first_input_that_moved_is_found() -> None:
    inputs = tuple(torch.randn(4) for _ in range(5))
    positions = [4, 0, 2]
    lie = array("i", positions).tobytes(), addresses([inputs[p] for p in positions])
    assert _C.moved(inputs, *lie) == -1
    assert _C.moved((*inputs[:2], inputs[2][1:], *inputs[3:]), *lie) == 2
    assert _C.moved((torch.randn(4), torch.randn(4), *inputs[2:]), *lie) == 0  # 1 is not asked about
    assert _C.moved((), b"", b"") == -1
    with pytest.raises(IndexError):
        _C.moved(inputs[:3], *lie)


def test_what_lay_where_it_lies_is_known() -> None:
    """And is looked at all the same: its memory may be another's, or it begins elsewhere in it."""
    from magneto.dynamo.guards.tensors import tensor_api

    tensor_api()
    a, b = torch.randn(4), torch.randn(6)[1:5]
    other, emptied = torch.randn(4), torch.zeros(4)
    emptied.untyped_storage().resize_(0)
    known = bytearray(32)
    lie = array("i", [0, 1]).tobytes(), addresses([a, b]), known
    assert _C.moved((a, b), *lie) == -1 and (any(known) or not tensor_api().keys)
    assert _C.moved((a, b), *lie) == -1
    assert _C.moved((a, b.detach()), *lie) == -1
    assert _C.moved((other, b), *lie) == 0 and _C.moved((a, torch.as_strided(b, (4,), (1,), 0)), *lie) == 1
    assert _C.moved((emptied, b), *lie) == 0 and _C.moved((a, b), *lie) == -1
    here, a.data = a.data, other
    assert _C.moved((a, b), *lie) == 0
    a.set_(here.untyped_storage())
    assert _C.moved((a, b), *lie) == -1
    b.set_(b.untyped_storage(), 2, (4,))
    assert _C.moved([a, b], *lie) == 1


def test_users_are_counted_as_torch_counts_them() -> None:
    from magneto.dynamo.guards.tensors import tensor_api
    from magneto.inductor.runtime.cuda_graphs import _by_torch, _counting

    assert tensor_api().keys and _counting() is _C.users
    tensors = [torch.randn(3, requires_grad=True) for _ in range(4)]
    storages = array("q", [t.untyped_storage()._cdata for t in tensors]).tobytes()
    before = array("I", _C.users(storages, tensors))
    held = [tensors[0].detach(), tensors[1], tensors[2] * 2, tensors[3] * tensors[3], tensors[3].view(3, 1)]
    now = array("I", _C.users(storages, tensors))
    torches = array("I", _by_torch(storages, tensors))
    assert now[:4] == torches[:4] and now[8:] == torches[8:]
    more = [a - b for a, b in zip(now, before, strict=True)]
    assert more[:4] == [1, 0, 0, 1] and more[4:6] == [0, 1] and more[8:10] == [0, 0] and more[11] >= 2
    held.clear()
    assert array("I", _C.users(storages, tensors)) == before and _C.users(b"", []) == b""
    with pytest.raises(TypeError):
        _C.users(b"", [3])


def test_hooks_are_seen() -> None:
    from magneto.aot_autograd.arrivals import _hooks_word
    from magneto.dynamo.guards.tensors import tensor_api

    word, all_three = _hooks_word(), array("i", range(3)).tobytes()
    assert tensor_api().keys and word > 0
    values = torch.randn(2), torch.nn.Parameter(torch.randn(2)), torch.randn(2, requires_grad=True)
    assert not _C.has_hooks(values, all_three, word) and _C.has_hooks(values, all_three, -1)
    for k, hook in (1, values[1].register_hook), (2, values[2].register_post_accumulate_grad_hook):
        hook(print)
        chosen = (*values[:k], values[k])
        assert _C.has_hooks(chosen, array("i", [0, k]).tobytes(), word) and not _C.has_hooks(chosen, all_three[:4], word)
    assert _C.has_hooks((3, *values), all_three, word) and _C.has_hooks((), all_three, word)


def test_values_are_packed() -> None:
    values = (torch.tensor(2.5, dtype=torch.float64), torch.tensor([1, 2, 3], dtype=torch.int16), torch.tensor(True))
    memory = torch.zeros(40, dtype=torch.uint8)
    places = array("q", [0, 16, 8, 1, 0, 6, 2, 32, 1]).tobytes()
    _C.pack(values, memory.data_ptr(), places)
    assert (
        memory[16:24].view(torch.float64).item() == 2.5
        and memory[:6].view(torch.int16).tolist() == [1, 2, 3]
        and memory[32:].tolist() == [1] + [0] * 7
    )
    with pytest.raises(IndexError, match="no tensor 2"):
        _C.pack(values[:2], memory.data_ptr(), places)
    others = (torch.zeros((), dtype=torch.float64), torch.zeros(3, dtype=torch.int16), torch.tensor(False))
    _C.pack(others, memory.data_ptr(), places, True)
    assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


def test_addresses() -> None:
    tensors = (torch.randn(3), torch.randn(4)[1:], torch.nn.Parameter(torch.randn(2)))
    assert _C.addresses(tensors) == addresses(list(tensors)) and _C.addresses(()) == b""
    with pytest.raises(TypeError):
        _C.addresses(list(tensors))


@pytest.mark.parametrize("table", [False, True])
def test_what_cannot_be_launched_goes_to_the_other(table: bool) -> None:
    calls: list[Any] = []
    launch = _C.Launch(0, (1, 1, 1), 32, 0, 0, 2, lambda *args: calls.append(args), table)
    x, y = torch.randn(3), torch.randn(3)
    assert launch(x, y) is None
    assert len(calls) == 1 and calls[0][0] is x and calls[0][1] is y
    launch(x)
    assert len(calls) == 2


def test_kernels_of_many_parameters() -> None:
    calls: list[Any] = []
    tensors = [torch.randn(4) for _ in range(480)]
    _C.Launch(0, (1, 1, 1), 32, 0, 0, 480, lambda *args: calls.append(args))(*tensors)
    assert len(calls) == 1 and len(calls[0]) == 480
    with pytest.raises(ValueError, match="481 parameters"):
        _C.Launch(0, (1, 1, 1), 32, 0, 0, 481, print)


def test_a_table_remembers_as_many_addresses_as_it_has_tensors() -> None:
    launch = _C.Launch(0, (1, 1, 1), 32, 0, 0, 2, lambda *args: None, True)
    launch.remember(addresses([torch.randn(1), torch.randn(1)]), 1, 0, 2, 3)
    with pytest.raises(ValueError, match="addresses"):
        launch.remember(b"", 1, 0, 2, 3)


def test_what_the_other_raises_is_raised() -> None:
    def other(*args: Any) -> None:
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        _C.Launch(0, (1, 1, 1), 32, 0, 0, 1, other)(torch.randn(2))


@pytest.mark.parametrize("refused", [0, 1, 801])
def test_kernels_that_wait_are_launched_ahead(refused: int) -> None:
    """Those alone; where the driver refuses, it is not asked again."""
    seen: list[tuple[Any, ...]] = []
    pointer, number = ctypes.c_void_p, ctypes.c_uint

    def ahead(config: int, function: int, *_: Any) -> int:
        grid, threads, shared = (words := (ctypes.c_uint * 7).from_address(config))[:3], words[3], words[6]
        attributes, count = pointer.from_address(config + 40).value or 0, number.from_address(config + 48).value
        seen.append(("ahead", function, *grid, threads, shared, count, *(ctypes.c_int * 3).from_address(attributes)))
        return refused

    plain = ctypes.CFUNCTYPE(number, pointer, *[number] * 7, pointer, pointer, pointer)(
        lambda *args: seen.append(("plain", *args[:5], args[7])) or 0
    )
    other = ctypes.CFUNCTYPE(number, pointer, pointer)(lambda *args: 0)
    overlapping = ctypes.CFUNCTYPE(number, pointer, pointer, pointer, pointer)(ahead)
    waiting, usual = [_C.Launch(5, (1, 2, 3), 64, 9, 0, 1, pytest.fail, False, waits) for waits in (True, False)]
    try:
        _C.bind_driver(*[ctypes.cast(f, pointer).value for f in (plain, other, overlapping)])
        for launch in (usual, waiting, waiting):
            launch(torch.zeros(64))
    finally:
        _C.bind_driver(0, 0)
    first, then = ("plain", 5, 1, 2, 3, 64, 9), ("ahead", 5, 1, 2, 3, 64, 9, 1, 6, 0, 1)
    assert seen == [first, then, *([first] * 2 if refused else [then])]


def test_parameters_with_descriptors() -> None:
    """Pointers, then each matrix as its descriptor, its shape and its strides, then two empty scratch memories."""
    first, second = driver.Map(None, 4096, (8, 16), 32), driver.Map(None, 8192, (5, 7), 9)
    given = driver.parameters((11, 12), (first, second))
    places = list(given.places)
    assert (places[2], places[7]) == (4096, 8192) and len(places) == 14
    numbers = [ctypes.c_uint64.from_address(place).value for n, place in enumerate(places) if n not in (2, 7)]
    assert numbers == [11, 12, 8, 16, 32, 1, 5, 7, 9, 1, 0, 0]


def test_operands_that_the_copy_engine_cannot_read_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    kernel = TritonKernel("", ("*fp16", "*fp16"), (), (3,), 4, False, described=((0, 8, (4, 16), 24, (64, 32)),))

    def read(address: int) -> list[float]:
        found: list[float] = torch.frombuffer((ctypes.c_char * 176).from_address(address), dtype=torch.float16).tolist()
        return found

    forms = object.__new__(triton_launch._Forms)
    forms.kernel, forms.device, forms.index, forms.grid, forms.parameters = kernel, torch.device("cuda", 0), 0, (3, 1, 1), {}
    forms.binaries = {True: driver.Binary(b"", "aligned", 0, 128), False: driver.Binary(b"", "not", 0, 128)}
    monkeypatch.setattr(forms.__class__, "function", lambda self, aligned: int(aligned))
    monkeypatch.setattr(triton_launch, "_stream", lambda index: 7)
    monkeypatch.setattr(
        driver, "described", lambda address, *rest: seen.append((address, read(address), rest)) or driver.Map(None, 64, (4, 16), 24)
    )
    monkeypatch.setattr(driver, "launch", lambda *args: seen.append(args))
    memory = torch.randn(128).half()
    start = -(memory.data_ptr() // 2) % 8
    operand, other = torch.as_strided(memory, (4, 24), (24, 1), start), torch.zeros(1024)
    for _ in range(2):
        forms.plainly(operand, other)
    matrix, launch, again = seen
    assert matrix == (operand.data_ptr() + 16, read(operand.data_ptr() + 16), ((4, 16), 24, [64, 32], 2))
    assert launch[0] == 1 and launch[-1] is again[-1] and launch[2:5] == ((3, 1, 1), forms.device, 7)
    seen.clear()
    crooked = torch.as_strided(memory, (4, 24), (24, 1), start + 1)
    forms.plainly(crooked, other)
    (address, values, rest), launch = seen
    assert address % 16 == 0 and address != crooked.data_ptr() + 16 and launch[0] == 0
    assert values == read(crooked.data_ptr() + 16)  # 8 elements from the beginning on
    assert ctypes.c_uint64.from_address(launch[-1].places[0]).value == crooked.data_ptr()  # the pointer is the tensor's own


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
@pytest.mark.parametrize("target", [75, 90])
def test_the_kernel_that_carries_numbers_is_assembled(target: int, tmp_path: Path) -> None:
    import triton

    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    (tmp_path / "put.ptx").write_text(driver._PUT.format(driver.carried(40)))
    done = subprocess.run([assembler, "-arch", f"sm_{target}", "put.ptx", "-o", "put.cubin"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
