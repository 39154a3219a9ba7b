"""Calls that are alike are propagated once; what differs in a kind, a number's type or a mode is not alike."""

from __future__ import annotations

import gc
import weakref

import torch

import magneto
from magneto.graph import TensorMeta, remember
from magneto.graph.remember import Remembered, is_torchs


def _counted(monkeypatch):
    asked = []
    plain = remember.fake_call
    monkeypatch.setattr(remember, "fake_call", lambda fn, *rest, **named: (asked.append(fn), plain(fn, *rest, **named))[1])
    return asked


def test_equal_calls_are_propagated_once(monkeypatch):
    asked = _counted(monkeypatch)
    x = TensorMeta.contiguous((2, 3), torch.float32)
    known = Remembered()
    one = known.call(torch.add, [x, 1], {}, True)
    assert known.call(torch.add, [TensorMeta.contiguous((2, 3), torch.float32), 1], {}, True) is one
    assert len(asked) == 1


def test_types_and_signs_of_numbers_tell_calls_apart():
    whole = TensorMeta.contiguous((2,), torch.int64)
    known = Remembered()
    dtypes = [known.call(torch.add, [whole, number], {}, True).value.dtype for number in (1, 1.0, True, 1)]
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.int64]
    assert remember.key_of(0.0) != remember.key_of(-0.0)


def test_gradients_and_writes_tell_calls_apart():
    x = TensorMeta.contiguous((2,), torch.float32)
    w = x.with_(requires_grad=True)
    known = Remembered()
    assert not known.call(torch.mul, [x, x], {}, True).value.requires_grad
    assert known.call(torch.mul, [x, w], {}, True).value.requires_grad
    assert not known.call(torch.mul, [x, w], {}, False).value.requires_grad
    for _ in range(2):
        assert known.call(torch.Tensor.add_, [x, x], {}, True).mutated == ((0,),)


def test_functions_of_a_program_are_not_remembered(monkeypatch):
    asked = _counted(monkeypatch)

    def double(x):
        return x * 2

    assert not is_torchs(double) and is_torchs(torch.add) and is_torchs(torch.nn.functional.layer_norm)
    known = Remembered()
    for _ in range(2):
        known.call(double, [TensorMeta.contiguous((2,), torch.float32)], {}, True)
    assert len(asked) == 2


def test_a_mode_that_changes_forgets():
    def fn(x):
        a = x @ x
        with torch.autocast("cpu", torch.bfloat16):
            b = x @ x
        with torch.no_grad():
            c = x * x
        return a, b, c, x * x, x @ x

    x = torch.randn(4, 4, requires_grad=True)
    for got, want in zip(magneto.optimize("eager", nopython=True)(fn)(x), fn(x), strict=True):
        assert (got.dtype, got.requires_grad) == (want.dtype, want.requires_grad)
        assert torch.equal(got, want)


def test_layers_of_a_model_share_their_calls(monkeypatch):
    asked = _counted(monkeypatch)
    counts = []
    for layers in (2, 6):
        model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(layers)))
        x = torch.randn(1, 4, 8)
        got = magneto.optimize("eager", nopython=True)(model)(x)
        assert got.requires_grad
        counts.append(len(asked))
        asked.clear()
        magneto.reset()
    assert 0 < counts[1] <= counts[0] + 4  # the first layer's input needs no gradient


def test_what_a_program_makes_is_not_held():
    class Held:
        pass

    def compiled():
        held = Held()

        @torch.compiler.allow_in_graph
        def inner(x):
            return (held, x + 1)[1]

        magneto.optimize("eager", nopython=True)(lambda x: inner(x) * 2)(torch.ones(3))
        return weakref.ref(held)

    held = compiled()
    magneto.reset()
    gc.collect()
    assert held() is None
