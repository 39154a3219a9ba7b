"""Memory of large results that serves later results (csrc/blocks.c)."""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magneto
from magneto import _C
from magneto.base.flags import config

N = 3 << 20  # numbers: 12 MiB in float32


@pytest.fixture(autouse=True)
def nothing_idle() -> None:
    gc.collect()
    _C.release_blocks()


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    magneto.reset()
    return magneto.optimize("inductor", dynamic=False)(fn)


def taken() -> tuple[int, int]:
    """How often memory was asked for, and how often it was there."""
    return _C.blocks()[2:]


def test_memory_of_a_result_that_is_gone_serves_the_next() -> None:
    x = torch.randn(N)
    fn = compiled(lambda x: x * 2)
    fn(x)
    before = taken()
    addresses = set()
    for _ in range(5):
        y = fn(x)
        assert torch.equal(y, x * 2)
        addresses.add(y.data_ptr())
        del y
    assert len(addresses) == 1 and taken() == (before[0] + 5, before[1] + 4)
    assert _C.blocks()[0] == 1 and _C.blocks()[1] >= 4 * N
    magneto.reset()
    assert _C.blocks()[:2] == (0, 0)


def test_memory_serves_somewhat_smaller_results_too() -> None:
    """Logits, and the gradient of their weights: up to half as much again; not where a block of their own size is idle."""
    fn, large, small, tiny = compiled(lambda x: x * 2), torch.ones(2 * N), torch.ones(4 * N // 3), torch.ones(N)
    for x in (large, small, large, small):
        fn(x)
    assert _C.blocks()[:2] == (1, 24 << 20)
    kept = fn(large)
    fn(small)
    del kept
    before = _C.blocks()[:2]
    assert before == (2, 40 << 20)
    fn(small), fn(large), fn(tiny)
    assert _C.blocks()[:2] == before
    kept = fn(small)
    fn(tiny)
    assert _C.blocks()[:2] == (2, 36 << 20), "half of a block is not wasted"


def test_what_is_held_is_not_written() -> None:
    fn = compiled(lambda x: x * 2)
    given = [torch.full((N,), float(k)) for k in range(6)]
    held: list[Any] = []
    for k, x in enumerate(given):
        y = fn(x)
        held.append((y, y[5:], y.numpy(), y.untyped_storage(), y.view(torch.int32))[k % 5])
        del y
        fn(x + 100)  # whose result goes at once
    for k, kept in enumerate(held):
        if isinstance(kept, torch.UntypedStorage):
            kept = torch.empty(0).set_(kept)  # type: ignore[call-overload]
        found = torch.as_tensor(kept)
        assert (found.view(torch.float32) == 2.0 * k).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.int64])
def test_type_and_layout_are_those_of_other_results(dtype: torch.dtype) -> None:
    n = (16 << 20) // dtype.itemsize
    x = torch.randint(0, 2, (2, n // 128, 4, 16)).to(dtype)
    for given in (x, x.transpose(1, 3), x.contiguous(memory_format=torch.channels_last)):
        fn = compiled(lambda x: (torch.where(x == 1, x, ~x if x.dtype is torch.bool else x + 1), x != 0))
        fn(given)
        before = taken()[0]
        for found, wanted in zip(
            fn(given), (torch.where(given == 1, given, ~given if dtype is torch.bool else given + 1), given != 0), strict=True
        ):
            assert torch.equal(found, wanted) and found.stride() == wanted.stride() and found.dtype == wanted.dtype
            assert found.is_leaf and not found.requires_grad and found._version == wanted._version and found.storage_offset() == 0
            assert found.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
        assert taken()[0] > before


def test_results_of_inference_mode_are() -> None:
    fn = compiled(lambda x: x * 2)
    with torch.inference_mode():
        x = torch.randn(N)
        assert fn(x).is_inference() and fn(x).is_inference()


def test_what_one_does_with_tensors() -> None:
    x = torch.randn(N)
    fn = compiled(lambda x: x * 2)
    fn(x)
    y, wanted = fn(x), x * 2
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    assert torch.equal(torch.load(file), wanted) and torch.equal(copy.deepcopy(y), wanted)
    assert torch.equal(y.add_(1).sub_(1), wanted + 1 - 1)
    assert torch.equal(torch.from_dlpack(y), y) and torch.equal(y.clone().share_memory_(), y)
    z = fn(x)
    assert torch.equal(z.share_memory_(), wanted) and z.is_shared()
    z.data = torch.ones(3)
    y.resize_(4)
    assert y.tolist() == (wanted + 1 - 1)[:4].tolist()
    with pytest.raises(RuntimeError, match="not resizable"):
        y.resize_(2 * N)


def test_gradients_and_what_backward_keeps() -> None:
    torch.manual_seed(0)
    w = torch.randn(4096, 1024, requires_grad=True)
    fn = compiled(lambda w, x: (w.sin() * x).exp().sum())
    xs = [torch.randn(1024) / 8 for _ in range(5)]
    before = taken()[0]
    for x in xs:
        w.grad = None
        fn(w, x).backward()
        found, w.grad = w.grad, None
        (w.sin() * x).exp().sum().backward()
        torch.testing.assert_close(found, w.grad)
        del found
    assert taken()[0] > before


def test_threads() -> None:
    fn = compiled(lambda x: x * 2 + 1)
    fn(torch.zeros(N))
    wrong: list[int] = []

    def work(k: int) -> None:
        for n in range(6):
            x = torch.full((N,), float(10 * k + n))
            y = fn(x)
            if not (y == 2.0 * (10 * k + n) + 1).all():
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_forked_child_has_blocks_of_its_own() -> None:
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a child has no OpenMP threads
    x = torch.ones(N)
    fn = compiled(lambda x: x * 2)
    kept = [fn(x), fn(x)]
    del kept[1]
    child = os.fork()
    if child == 0:
        os._exit(0 if _C.blocks()[:2] == (0, 0) and bool((fn(x) == 2).all()) and bool((kept[0] == 2).all()) else 1)
    torch.set_num_threads(torch_threads)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _C.blocks()[0] == 1


def test_idle_memory_is_bounded() -> None:
    """Results of growing sizes: what is idle goes back once there is more of it than stays."""
    fn = compiled(lambda x: x * 2)
    most = 0
    for n in range(12, 40, 4):
        x = torch.ones(n << 18)
        for _ in range(2):
            ys = [fn(x) for _ in range(6)]
            most = max(most, _C.blocks()[1])
            del ys
    assert _C.blocks()[0] <= 64 and most <= (256 << 20) + 6 * (36 << 20)
    fn, x = compiled(lambda x: x * 2), torch.ones(N)
    fn(x)
    before = _C.keep_blocks(30 << 20)
    try:
        ys = [fn(x) for _ in range(6)]
        del ys
        assert _C.blocks()[:2] == (2, 24 << 20)
        fn(torch.ones(4 * N)), fn(torch.ones(4 * N))  # more than may wait
        assert _C.blocks()[1] == 0
    finally:
        assert _C.keep_blocks(before) == 30 << 20


def test_the_flag() -> None:
    with config.patch(recycle_results=False):
        fn = compiled(lambda x: x * 3)
        before = taken()
        for _ in range(3):
            fn(torch.ones(N)).resize_(2 * N)
        assert taken() == before
