"""Graphs whose inputs' sizes vary, for backends that must know them: an instance for each size, eager where there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from magneto.backends import families, lookup_backend
from magneto.backends.sized import Sized
from magneto.base.events import counters, recording
from magneto.base.flags import config
from magneto.graph.fake import fake_call
from magneto.graph.meta import TensorMeta
from tests.compare import assert_equal, outcome

BACKENDS = ("aot_eager", "inductor")


class Allows:
    """A budget that a test decides about."""

    def __init__(self, answer: bool = True) -> None:
        self.answer = answer

    def allows(self) -> bool:
        return self.answer


class Again:
    """What `graph/resize.py` does for graphs that are captured: the graph propagated for some sizes."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], varying: Sequence[tuple[int, int, int]]) -> None:
        self.gm, self.metas, self.varying = gm, [TensorMeta.of(x) for x in inputs], varying

    def at(self, sizes: tuple[int, ...]) -> dict[fx.Node, Any] | None:
        metas = list(self.metas)
        for index, dim, symbol in self.varying:
            shape = list(metas[index].shape)
            shape[dim] = sizes[symbol]
            metas[index] = TensorMeta.contiguous(shape, metas[index].dtype).with_(requires_grad=metas[index].requires_grad)
        given, values = iter(metas), dict[fx.Node, Any]()
        try:
            for node in self.gm.graph.nodes:
                if node.op != "output":
                    values[node] = next(given) if node.op == "placeholder" else self.value(node, values)
        except RuntimeError:
            return None
        return values

    def trust(self, expected: Any) -> None:
        """It propagates at all sizes."""

    def trusts(self, sizes: tuple[int, ...]) -> bool:
        return False

    def value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if (
            node.op == "call_function"
            and not any(isinstance(value, TensorMeta) for value in args)
            and node.target.__module__ == "_operator"
        ):
            return node.target(*args)
        return fake_call(node.target, args, dict(kwargs), grad_enabled=torch.is_grad_enabled()).value


def captured(fn: Callable[..., Any], inputs: Sequence[Any], *varying: tuple[int, int, int], **meta: Any) -> fx.GraphModule:
    """The graph of `fn` with nodes for the sizes that it reads."""
    gm = fx.symbolic_trace(fn)
    gm.meta["magneto"] = {
        "name": fn.__name__,
        "varying": tuple((*row, 0) for row in varying),
        "budget": Allows(),
        "resizer": Again(gm, inputs, varying),
        **meta,
    }
    return gm


def compiled(fn: Callable[..., Any], inputs: Sequence[Any], *varying: tuple[int, int, int], backend: str = "inductor", **meta: Any) -> Any:
    """The callable of that graph."""
    return lookup_backend(backend)(captured(fn, inputs, *varying, **meta), list(inputs))


def counted(name: str) -> float:
    return counters().get(name, 0)


def check(fn: Callable[..., Any], ours_fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]], tolerance: float = 1e-5) -> None:
    """Values, strides, what is written, which results are views of inputs, or the exception."""
    ours, plain = make(), make()
    for a, b in zip(ours, plain, strict=True):
        if isinstance(a, torch.Tensor):
            with torch.no_grad():
                b.copy_(a)
    (found, error), (wanted, eager) = outcome(ours_fn, (ours, {})), outcome(fn, (plain, {}))
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


CELL = ((0, 0, 0), (1, 0, 0))
SIZES = (2, 3, 5, 8, 16, 17, 31, 64, 100)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_size_gives_what_eager_gives(backend: str) -> None:
    w, g = torch.randn(96, 32) / 8, torch.randn(32)
    with torch.no_grad():
        ours = compiled(attention, [torch.randn(2, 7, 32), w, g], (0, 0, 0), (0, 1, 1), backend=backend)
        for b, n in ((2, 7), (3, 7), (2, 16), (2, 7), (5, 33), (2, 64)):
            for _ in range(2):
                check(attention, ours, lambda: (torch.randn(b, n, 32), w.clone(), g.clone()), 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_and_writes(backend: str) -> None:
    with torch.no_grad():
        ours = compiled(views, [torch.randn(4, 3), torch.randn(4)], (0, 0, 0), (1, 0, 0), backend=backend, mutated_inputs=(0, 1))
        for n in SIZES:
            for _ in range(2):
                check(views, ours, lambda: (torch.randn(n, 3), torch.randn(n)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_resolutions(backend: str) -> None:
    w = torch.randn(8, 3, 3, 3)
    with torch.no_grad():
        ours = compiled(convolution, [torch.randn(2, 3, 16, 16), w], (0, 0, 0), (0, 2, 1), (0, 3, 2), backend=backend)
        for b, h, v in ((2, 16, 16), (3, 16, 17), (2, 31, 8), (4, 9, 33)):
            for _ in range(2):
                check(convolution, ours, lambda: (torch.randn(b, 3, h, v), w.clone()), 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend: str) -> None:
    w, u = (torch.randn(6, 5, requires_grad=True), torch.randn(5, 5, requires_grad=True))
    ours = compiled(cell, [torch.randn(4, 6), torch.randn(4, 5, requires_grad=True), w, u], *CELL, backend=backend, grad_enabled=True)
    for n in (4, 7, 7, 2, 4, 19, 19):
        x, h = torch.randn(n, 6), torch.randn(n, 5, requires_grad=True)
        grads = []
        for fn in (cell, ours):
            a, b, c = fn(x, h, w, u)
            grads.append((a.detach(), *torch.autograd.grad((a * a).sum() + b[0].sum() + c, (w, u, h))))
        for found, plain in zip(*grads, strict=True):
            torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph has a family."""
    monkeypatch.setattr(families, "REFUSALS", 0)


def test_counts_of_instances(alone: None) -> None:
    rest = [torch.randn(6, 5), torch.randn(5, 5)]
    before = {name: counted(name) for name in ("sizes_compiled", "sizes_in_eager")}

    def since(name: str) -> float:
        return counted(name) - before[name]

    with torch.no_grad():
        ours = compiled(cell, [torch.randn(4, 6), torch.randn(4, 5), *rest], *CELL)
        assert (since("sizes_compiled"), since("sizes_in_eager")) == (1, 0)  # the size at hand
        for n in range(5, 15):
            ours(torch.randn(n, 6), torch.randn(n, 5), *rest)
        assert (since("sizes_compiled"), since("sizes_in_eager")) == (1, 10)  # sizes that come once are not compiled
        for n in (7, 8, 7, 8, 4):
            ours(torch.randn(n, 6), torch.randn(n, 5), *rest)
        assert (since("sizes_compiled"), since("sizes_in_eager")) == (3, 10)


def test_the_budget_is_kept(alone: None) -> None:
    budget = Allows(False)
    rest = [torch.randn(6, 5), torch.randn(5, 5)]
    before = counted("sizes_compiled")
    with torch.no_grad(), recording("fallback") as told:
        ours = compiled(cell, [torch.randn(4, 6), torch.randn(4, 5), *rest], *CELL, budget=budget)
        for n in (4, 4, 5, 5, 6):
            check(cell, ours, lambda: (torch.randn(n, 6), torch.randn(n, 5), *rest))
        assert counted("sizes_compiled") == before
        assert [event.reason.split(":")[0] for event in told] == ["sizes change more often than compiling for them pays"]
        budget.answer = True
        ours(torch.randn(4, 6), torch.randn(4, 5), *rest)
        assert counted("sizes_compiled") == before + 1


def test_bounded_number_of_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "size_variants", 4)
    rest = [torch.randn(6, 5), torch.randn(5, 5)]
    with torch.no_grad():
        gm = captured(cell, [torch.randn(4, 6), torch.randn(4, 5), *rest], *CELL)
        made = Sized(gm, lambda one, inputs: lookup_backend("aot_eager")(one, inputs), False, None)
        for n in (2, 3, 4, 5, 2, 6, 2, 7, 2, 8):
            check(cell, made.run, lambda: (torch.randn(n, 6), torch.randn(n, 5), *rest))
            assert len(made.known) <= 4
    assert (2,) in made.known and (8,) in made.known and (3,) not in made.known  # that which is called stays


def test_errors_are_those_of_eager() -> None:
    def fails(x: Any, y: Any) -> Any:
        n = x.size(0)
        return (x + 1).view(n // 2, 2) + y, x.narrow(0, 3, 2)

    with torch.no_grad():
        ours = compiled(fails, [torch.randn(8), torch.randn(2)], (0, 0, 0))
        for n in (8, 7, 6, 4, 2, 7, 7, 6, 6, 9, 8):
            check(fails, ours, lambda: (torch.randn(n), torch.randn(2)))


def test_threads() -> None:
    rest = [torch.randn(6, 5), torch.randn(5, 5)]
    errors: list[BaseException] = []
    before = counted("sizes_compiled")
    with torch.no_grad():
        ours = compiled(cell, [torch.randn(4, 6), torch.randn(4, 5), *rest], *CELL, backend="aot_eager")

    def work(seed: int) -> None:
        try:
            with torch.no_grad():
                for n in range(40):
                    k = 2 + (n * seed) % 9
                    check(cell, ours, lambda: (torch.randn(k, 6), torch.randn(k, 5), *rest))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert counted("sizes_compiled") - before == 9  # once for each size
