"""Programs whose sizes vary, compiled: values, aliases and exceptions as in eager at every size, with one capture and few families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import magneto
from magneto.backends.sized import OFTEN, STAY
from magneto.base.events import counters, recording
from magneto.base.flags import config
from magneto.graph.resize import Resizer
from tests.compare import assert_equal, outcome


def same_at(fn: Callable[..., Any], compiled: Any, *inputs: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Results, which of them share memory with an input, what is written; or the exception."""
    ours, plain = [x.clone() for x in inputs], [x.clone() for x in inputs]
    (found, error), (wanted, eager) = outcome(compiled, (tuple(ours), {})), outcome(fn, (tuple(plain), {}))
    assert (type(error), str(error)) == (type(eager), str(eager))
    assert_equal((found, ours), (wanted, plain), tolerance)
    if error is None:
        for a, b in zip(found, wanted, strict=True):
            if isinstance(a, torch.Tensor):
                assert a.stride() == b.stride()
                memory = [
                    [x.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for x in of] for t, of in ((a, ours), (b, plain))
                ]
                assert memory[0] == memory[1]


def counted(name: str) -> float:
    return counters().get(name, 0)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = torch.nn.LayerNorm(32), torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, 32))
        return x + self.down(F.gelu(self.up(x))), x.mean(1)


class Conv(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 8, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (F.relu(self.b(F.relu(self.n(self.a(x))))).mean((2, 3)),)


@pytest.mark.parametrize("checked", [False, True])
def test_a_block_at_many_sizes(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "verify", checked)
    block = Block().eval()
    compiled = magneto.optimize("inductor")(block)
    before = counted("sizes_compiled")
    with torch.no_grad(), recording("graph") as graphs:
        for b, n in ((2, 9), (3, 10), (2, 12), (4, 17), (2, 31), (2, 32), (5, 33), (3, 64), (7, 100), (2, 40), (6, 31), (1, 20), (2, 1)):
            same_at(block, compiled, torch.randn(b, n, 32))
    assert len(graphs) <= 7 and counted("sizes_compiled") - before <= 2


def test_images_of_many_resolutions() -> None:
    net = Conv().eval()
    compiled = magneto.optimize("inductor")(net)
    with torch.no_grad():
        for b, h, w in ((2, 16, 16), (3, 18, 20), (4, 21, 25), (5, 33, 17), (1, 16, 16)):
            same_at(net, compiled, torch.randn(b, 3, h, w))


def test_a_slice_that_is_everything_at_one_size() -> None:
    def cut(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:, :45].contiguous(), x * 2

    compiled = magneto.optimize("inductor", dynamic=True)(cut)
    with torch.no_grad():
        for n in (60, 61, 46, 45, 47, 44, 90, 45):
            same_at(cut, compiled, torch.randn(3, n))


def test_decisions_of_the_program() -> None:
    def decides(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = x.shape[0]
        y = x * n if n > 50 else x / n
        return (y + 1 if n % 7 == 3 else y, y.sum(0))

    compiled = magneto.optimize("inductor", dynamic=True)(decides)
    with torch.no_grad():
        for n in (10, 11, 17, 24, 50, 51, 52, 59, 66, 10, 64, 2):
            same_at(decides, compiled, torch.randn(n, 5))


def test_a_new_size_of_a_family_asks_no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed again is what the program decides by, sizes of intermediate tensors that the graph has no use for among it."""

    def masked(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.cat((x, x.new_ones(3, 4)))
        if y.shape[0] > 12 and y.shape[0] % 5 != 4:
            y = y.softmax(0)
        return (y.relu() + 1, x.sum(0))

    asked: list[tuple[int, ...]] = []
    run = Resizer.run
    monkeypatch.setattr(Resizer, "run", lambda self, sizes: (asked.append(sizes), run(self, sizes))[1])
    monkeypatch.setattr(config, "verify", False)
    compiled = magneto.optimize("inductor", dynamic=True)(masked)
    with torch.no_grad():
        for n in (20, 23):
            same_at(masked, compiled, torch.randn(n, 4))
        families, known = counted("families"), len(asked)
        for n in (22, 25, 24, 17, 19):
            same_at(masked, compiled, torch.randn(n, 4))
        assert families == 1 and len(asked) == known
        for n in (21, 26, 9, 5):  # 24 and 29 leave 4 behind, 12 and 8 are too few
            same_at(masked, compiled, torch.randn(n, 4))
        assert len(asked) > known


def test_two_dimensions_of_one_size() -> None:
    def squares(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x @ x.mT).relu() + x.sum(0), x.tril()

    compiled = magneto.optimize("inductor")(squares)
    with torch.no_grad(), recording("graph") as graphs:
        for n in (12, 14, 17, 20, 23, 31, 30, 9):
            same_at(squares, compiled, torch.randn(n, n))
    assert len(graphs) == 3


def test_what_is_the_same_at_even_sizes_or_at_odd_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a decision of the program, and by what the compiler makes of it: a family for each."""
    monkeypatch.setattr(config, "size_seconds", 1000.0)

    def decides(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.view(x.shape[0] // 2, 2, 6).sum(1) + x.shape[0] // 2,) if x.shape[0] % 2 == 0 else (x * x.shape[0],)

    def pools(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (F.max_pool2d(x, 2) * 2,)

    for fn, shape in ((decides, lambda n: (n, 6)), (pools, lambda n: (2, 3, n, n))):
        compiled = magneto.optimize("inductor")(fn)
        before = {name: counted(name) for name in ("sizes_compiled", "sizes_in_eager", "families_refused", "families")}
        with torch.no_grad():
            for n in (40, 41, 42, 47, 64, 93):
                same_at(fn, compiled, torch.randn(shape(n)))
        assert {name: counted(name) - was for name, was in before.items()} == dict.fromkeys(before, 0) | {"families": 2}


def test_a_size_that_stays_is_compiled_for_itself() -> None:
    block = Block().eval()
    compiled = magneto.optimize("inductor", dynamic=True)(block)
    with torch.no_grad():
        for n in (10, 11, 13):
            same_at(block, compiled, torch.randn(2, n, 32))
        before = counted("sizes_compiled")
        for n in (13, 14, 15, 16, 17, 18):
            x = torch.randn(2, n, 32)
            for _ in range(OFTEN + 3):
                compiled(x)
            same_at(block, compiled, x)
    assert counted("sizes_compiled") - before == STAY and counted("graphs_in_eager") == 0


def test_sizes_at_which_the_program_fails() -> None:
    def fails(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.narrow(0, 8, 4) * x.shape[0], x + 1)

    compiled = magneto.optimize("inductor", dynamic=True)(fails)
    with torch.no_grad():
        for n in (20, 21, 12, 11, 22, 7, 11, 64):
            same_at(fails, compiled, torch.randn(n, 5))


def test_training_on_batches_of_any_size() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    compiled = magneto.optimize("inductor")(lambda x: net(x).square().mean())
    for n in (4, 5, 6, 7, 8, 7, 8, 20, 21, 4, 20, 33):
        x = torch.randn(n, 6)
        losses, grads = [], []
        for fn in (lambda x: net(x).square().mean(), compiled):
            net.zero_grad()
            loss = fn(x)
            loss.backward()
            losses.append(loss.detach())
            grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        torch.testing.assert_close(losses[0], losses[1])
        torch.testing.assert_close(grads[0], grads[1])


@torch.no_grad()
def _without_gradients(x: torch.Tensor) -> torch.Tensor:
    y = x @ x.new_ones(4, 4)
    return y + 1 if y.sum() > 0 else y - 1


def _autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.new_ones(4, 4)
        return y.float() + 1 if y.sum() > 0 else y * 2


def _one_attention(x: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(x[None], x[None], x[None])
        return y + 1 if y.sum() > 0 else y - 1


@torch.inference_mode()
def _inference(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = (x + x.shape[0]).relu() + x.mean(0)
    return x


@torch.inference_mode()
def _inference_decides(x: torch.Tensor) -> torch.Tensor:
    y = x.view(-1, x.shape[0]) * x.shape[0]
    return y + 1 if y.sum() > 0 else y - 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "program", [_without_gradients, _autocast, _one_attention, _inference, _inference_decides], ids=lambda p: p.__name__
)
def test_modes_around_varying_sizes_are_compiled(program: Callable[[torch.Tensor], torch.Tensor], backend: str) -> None:
    """Where a region ends within a block that switches a mode, its graph puts the mode back; a block of inference mode is compiled without its switches."""
    magneto.reset()
    compiled = magneto.compile(program, dynamic=True, backend=backend)
    for size in (3, 4, 5, 12, 33):
        x = torch.randn(size, 4)
        plain, ours = program(x), compiled(x)
        assert_equal(ours, plain, 1e-2 if program is _autocast else 1e-5)
        assert ours.is_inference() == plain.is_inference()
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert magneto.stats()["fallbacks"] == 0


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_scaled_updates_by_tensors_whose_sizes_could_vary(backend: str) -> None:
    """Moments behind a break are tensors of any size to capture, until they meet the parameter."""
    weight = torch.nn.Parameter(torch.ones(3, 2))

    @torch.no_grad()
    def program(m: torch.Tensor, v: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        weight.addcdiv_(m, v.sqrt() + 1, value=-1 / step.item())
        return weight.add_(m, alpha=step.item()) + 1

    results = []
    for fn in (program, magneto.compile(program, dynamic=True, backend=backend)):
        magneto.reset()
        torch.nn.init.ones_(weight)
        torch.manual_seed(0)
        results.append([fn(torch.randn(3, 2), torch.rand(3, 2), torch.tensor(float(k))) for k in (1, 2, 3)])
    assert_equal(results[1], results[0], 1e-5)
    assert not any("meta kernel" in reason for reason in magneto.stats()["break_reasons"])


def test_shapes_broadcast_where_sizes_vary() -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shape = torch.broadcast_shapes(a.shape, 1, b.shape[:-1] + (1,))
        return a.expand(shape) + torch.zeros(shape)

    magneto.reset()
    compiled = magneto.compile(program, dynamic=True, backend="eager")
    for one, other in (((3,), (2, 4)), ((5,), (6, 4)), ((1,), (1, 4)), ((2, 3), (2, 4)), ((2, 3), (4, 4)), ((1, 3), (4, 4))):
        same_at(program, compiled, torch.randn(one), torch.randn(other))
    assert magneto.stats()["breaks"] == 0


def test_transforms_of_sizes_that_could_vary_are_captured() -> None:
    """For each size; a transform is captured as a whole, over known sizes."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return vmap(lambda row: row.sin().sum() / x.shape[0])(x), grad(lambda y: (y * y).sum())(x), jacrev(lambda y: y.sum(1))(x)

    magneto.reset()
    compiled = magneto.compile(program, dynamic=True, backend="aot_eager")
    for size in (3, 4, 7, 3):
        same_at(program, compiled, torch.randn(size, 2))
    assert (magneto.stats()["breaks"], magneto.stats()["graphs"]) == (0, 3)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: int) -> torch.Tensor:
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.by, None


def test_a_custom_function_of_a_size_is_captured() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return _Scaled.apply(x, x.shape[0] + 1).sin()  # type: ignore[no-untyped-call, no-any-return]

    magneto.reset()
    compiled = magneto.compile(program, dynamic=True, backend="aot_eager")
    for size in (3, 4, 7, 3):
        grads = []
        for fn in (program, compiled):
            x = torch.ones(size, 2, requires_grad=True)
            fn(x).sum().backward()
            grads.append(x.grad)
        assert_equal(grads[1], grads[0])
    assert magneto.stats()["breaks"] == 0
