"""Graphs whose inputs' sizes vary, for backends that must know them: an instance for each size, eager where there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from magneto.backends import lookup_backend
from magneto.backends.sized import Sized
from magneto.base.events import counters, recording
from magneto.base.flags import config
from magneto.graph.meta import TensorMeta
from magneto.graph.specialise import Propagation
from tests.compare import assert_equal, outcome

BACKENDS = ("aot_eager", "inductor")


class Allows:
    """A budget that a test decides about."""

    def __init__(self, answer: bool = True) -> None:
        self.answer = answer

    def allows(self) -> bool:
        return self.answer


def captured(fn: Callable[..., Any], *varying: tuple[int, int, int], **meta: Any) -> fx.GraphModule:
    """The graph of `fn` with nodes for the sizes that it reads."""
    gm = fx.symbolic_trace(fn)
    gm.meta["magneto"] = {"name": fn.__name__, "varying": varying, "budget": Allows(), **meta}
    return gm


def counted(name: str) -> float:
    return counters().get(name, 0)


def check(fn: Callable[..., Any], compiled: Callable[..., Any], make: Callable[[], tuple[Any, ...]], tolerance: float = 1e-5) -> None:
    """Values, strides, what is written, which results are views of inputs, or the exception."""
    ours, plain = make(), make()
    for a, b in zip(ours, plain, strict=True):
        if isinstance(a, torch.Tensor):
            with torch.no_grad():
                b.copy_(a)
    (found, error), (wanted, eager) = outcome(compiled, (ours, {})), outcome(fn, (plain, {}))
    assert (type(error), str(error)) == (type(eager), str(eager))
    assert_equal(found, wanted, tolerance)
    assert_equal(ours, plain, tolerance)
    if error is None:
        for a, b in zip(found, wanted, strict=True):
            if isinstance(a, torch.Tensor):
                assert a.stride() == b.stride() and a._is_view() == b._is_view()
                shares = [a.untyped_storage()._cdata == x.untyped_storage()._cdata for x in ours if isinstance(x, torch.Tensor)]
                assert shares == [b.untyped_storage()._cdata == x.untyped_storage()._cdata for x in plain if isinstance(x, torch.Tensor)]


def attention(x: Any, w: Any, g: Any) -> Any:
    b, n, d = x.size(0), x.size(1), x.size(2)
    for _ in range(3):
        h = F.layer_norm(x, (32,), g)
        q, k, v = F.linear(h, w).view(b, n, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a.transpose(1, 2).reshape(b, n, d)
    return x, x.mean(1) / n, n * b


def views(x: Any, y: Any) -> Any:
    n = x.size(0)
    x.mul_(2)
    y.narrow(0, n // 2, n - n // 2).add_(1)
    return x.t(), x[: n - 1], y, x.view(-1) + n, torch.arange(n) % 3


def convolution(x: Any, w: Any) -> Any:
    y = F.relu(F.conv2d(x, w, padding=1))
    return (F.max_pool2d(y, 2).flatten(1).sum(1), F.interpolate(y, scale_factor=2.0).mean((2, 3)), F.adaptive_avg_pool2d(y, 1).flatten(1))


def cell(x: Any, h: Any, w: Any, u: Any) -> Any:
    z = torch.tanh(x @ w + h @ u)
    return z, torch.softmax(z, 0), z.sum() / z.size(0)


SIZES = (2, 3, 5, 8, 16, 17, 31, 64, 100)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_size_gives_what_eager_gives(backend: str) -> None:
    gm = captured(attention, (0, 0, 0), (0, 1, 1))
    w, g = torch.randn(96, 32) / 8, torch.randn(32)
    compiled = None
    with torch.no_grad():
        for b, n in ((2, 7), (3, 7), (2, 16), (2, 7), (5, 33), (2, 64)):
            compiled = compiled or lookup_backend(backend)(gm, [torch.randn(b, n, 32), w, g])
            for _ in range(2):
                check(attention, compiled, lambda: (torch.randn(b, n, 32), w.clone(), g.clone()), 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_and_writes(backend: str) -> None:
    gm = captured(views, (0, 0, 0), (1, 0, 0), mutated_inputs=(0, 1))
    with torch.no_grad():
        compiled = lookup_backend(backend)(gm, [torch.randn(4, 3), torch.randn(4)])
        for n in SIZES:
            for _ in range(2):
                check(views, compiled, lambda: (torch.randn(n, 3), torch.randn(n)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_resolutions(backend: str) -> None:
    gm = captured(convolution, (0, 0, 0), (0, 2, 1), (0, 3, 2))
    w = torch.randn(8, 3, 3, 3)
    with torch.no_grad():
        compiled = lookup_backend(backend)(gm, [torch.randn(2, 3, 16, 16), w])
        for b, h, v in ((2, 16, 16), (3, 16, 17), (2, 31, 8), (4, 9, 33)):
            for _ in range(2):
                check(convolution, compiled, lambda: (torch.randn(b, 3, h, v), w.clone()), 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend: str) -> None:
    gm = captured(cell, (0, 0, 0), (1, 0, 0), grad_enabled=True)
    w, u = (torch.randn(6, 5, requires_grad=True), torch.randn(5, 5, requires_grad=True))
    compiled = lookup_backend(backend)(gm, [torch.randn(4, 6), torch.randn(4, 5, requires_grad=True), w, u])
    for n in (4, 7, 7, 2, 4, 19, 19):
        x, h = torch.randn(n, 6), torch.randn(n, 5, requires_grad=True)
        grads = []
        for fn in (cell, compiled):
            a, b, c = fn(x, h, w, u)
            grads.append((a.detach(), *torch.autograd.grad((a * a).sum() + b[0].sum() + c, (w, u, h))))
        for ours, plain in zip(*grads, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_counts_of_instances() -> None:
    gm = captured(cell, (0, 0, 0), (1, 0, 0))
    rest = [torch.randn(6, 5), torch.randn(5, 5)]
    before = {name: counted(name) for name in ("sizes_compiled", "sizes_in_eager")}

    def since(name: str) -> float:
        return counted(name) - before[name]

    with torch.no_grad():
        compiled = lookup_backend("inductor")(gm, [torch.randn(4, 6), torch.randn(4, 5), *rest])
        assert (since("sizes_compiled"), since("sizes_in_eager")) == (1, 0)  # the size at hand
        for n in range(5, 15):
            compiled(torch.randn(n, 6), torch.randn(n, 5), *rest)
        assert (since("sizes_compiled"), since("sizes_in_eager")) == (1, 10)  # sizes that come once are not compiled
        for n in (7, 8, 7, 8, 4):
            compiled(torch.randn(n, 6), torch.randn(n, 5), *rest)
        assert (since("sizes_compiled"), since("sizes_in_eager")) == (3, 10)


def test_the_budget_is_kept() -> None:
    budget = Allows(False)
    gm = captured(cell, (0, 0, 0), (1, 0, 0), budget=budget)
    rest = [torch.randn(6, 5), torch.randn(5, 5)]
    before = counted("sizes_compiled")
    with torch.no_grad(), recording("fallback") as told:
        compiled = lookup_backend("inductor")(gm, [torch.randn(4, 6), torch.randn(4, 5), *rest])
        for n in (4, 4, 5, 5, 6):
            check(cell, compiled, lambda: (torch.randn(n, 6), torch.randn(n, 5), *rest))
        assert counted("sizes_compiled") == before
        assert [event.reason.split(":")[0] for event in told] == ["sizes change more often than compiling for them pays"]
        budget.answer = True
        compiled(torch.randn(4, 6), torch.randn(4, 5), *rest)
        assert counted("sizes_compiled") == before + 1


def test_bounded_number_of_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "size_variants", 4)
    gm = captured(cell, (0, 0, 0), (1, 0, 0))
    rest = [torch.randn(6, 5), torch.randn(5, 5)]
    with torch.no_grad():
        made = Sized(gm, lambda one, inputs: lookup_backend("aot_eager")(one, inputs), False)
        for n in (2, 3, 4, 5, 2, 6, 2, 7, 2, 8):
            check(cell, made.run, lambda: (torch.randn(n, 6), torch.randn(n, 5), *rest))
            assert len(made.known) <= 4
    assert (2,) in made.known and (8,) in made.known and (3,) not in made.known  # that which is called stays


def test_errors_are_those_of_eager() -> None:
    def fails(x: Any, y: Any) -> Any:
        n = x.size(0)
        return (x + 1).view(n // 2, 2) + y, x.narrow(0, 3, 2)

    gm = captured(fails, (0, 0, 0))
    with torch.no_grad():
        compiled = lookup_backend("inductor")(gm, [torch.randn(8), torch.randn(2)])
        for n in (8, 7, 6, 4, 2, 7, 7, 6, 6, 9, 8):
            check(fails, compiled, lambda: (torch.randn(n), torch.randn(2)))


def test_threads() -> None:
    gm = captured(cell, (0, 0, 0), (1, 0, 0))
    rest = [torch.randn(6, 5), torch.randn(5, 5)]
    errors: list[BaseException] = []
    before = counted("sizes_compiled")
    with torch.no_grad():
        compiled = lookup_backend("aot_eager")(gm, [torch.randn(4, 6), torch.randn(4, 5), *rest])

    def work(seed: int) -> None:
        try:
            with torch.no_grad():
                for n in range(40):
                    k = 2 + (n * seed) % 9
                    check(cell, compiled, lambda: (torch.randn(k, 6), torch.randn(k, 5), *rest))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert counted("sizes_compiled") - before == 9  # once for each size


def test_equal_layers_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from magneto.graph import specialise

    asked: list[Any] = []
    plain = specialise.fake_call
    monkeypatch.setattr(specialise, "fake_call", lambda fn, *rest, **named: asked.append(fn) or plain(fn, *rest, **named))
    rest = [TensorMeta.contiguous((96, 32), torch.float32), TensorMeta.contiguous((32,), torch.float32)]
    found = Propagation(captured(attention), [TensorMeta.contiguous((2, 7, 32), torch.float32), *rest], False)
    assert asked.count(F.layer_norm) == asked.count(F.linear) == 1
    asked.clear()
    values = found.at([TensorMeta.contiguous((5, 9, 32), torch.float32), *rest])
    assert asked.count(F.layer_norm) == 1
    assert [v.shape for v in values if isinstance(v, TensorMeta)][-1] == (5, 32)
