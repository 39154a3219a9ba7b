"""Modes of torch round and inside captured functions: what changes the meaning of operations is followed, guarded, or left to eager by name."""

# ruff: noqa

from __future__ import annotations

import contextlib
import os
import sys

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import magneto
from tests.compare import assert_equal, same
from magneto.graph.modes import modes
from magneto.base import events
from tests.python.gradients import P, compare

SAID: list[str] = []


@torch.no_grad()
def _without(x):
    return x * 2


@torch.enable_grad()
def _with(x):
    return x * 3


@torch.set_grad_enabled(False)
def _set(x):
    return x * 4


@torch.no_grad()
def _generator(x):
    for i in range(3):
        yield x * i, torch.is_grad_enabled()


@torch.autocast("cpu", torch.bfloat16)
def _autocast(x):
    return x @ x.t()


class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cast = torch.autocast("cpu", torch.bfloat16)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        with self.cast:
            y = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                z = self.linear(x)
        return y.float() + z


def decorators(x):
    return _without(x) + _with(x) + _set(x)


def decorated_generator(x):
    out = []
    for y, enabled in _generator(x):
        out.append((y, enabled, torch.is_grad_enabled()))
    return out


def statement(x):
    torch.set_grad_enabled(False)
    y = x * 2
    torch.set_grad_enabled(True)
    return y + x


def blocks(x):
    with torch.set_grad_enabled(False):
        y = x * 2
        with torch.enable_grad():
            z = x * 3
    return y + z, torch.is_grad_enabled()


def autocast_decorator(x):
    return _autocast(x), x @ x.t()


def autocast_nested(x):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.t()
        with torch.autocast("cpu", enabled=False):
            z = x @ x.t()
        inside = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return y, z, inside, torch.is_autocast_enabled("cpu")


def ranges(x):
    with torch.profiler.record_function("a"):
        y = x.sin()
        with torch.autograd.profiler.record_function("b", "args"):
            y = y.cos()
    return y


def anomaly(x):
    with torch.autograd.set_detect_anomaly(False):
        return x.sin()


def stateless(x):
    with contextlib.nullcontext(), contextlib.suppress(KeyError):
        return x * 2


def trees(x):
    nested = {"a": x, "b": [x * 2, (x, 3)]}
    leaves, spec = pytree.tree_flatten(nested)
    return pytree.tree_map(lambda v: v * 2, nested), len(leaves), pytree.tree_unflatten(leaves, spec)


@pytest.mark.parametrize(
    "fn", [decorators, decorated_generator, statement, blocks, autocast_decorator, autocast_nested, ranges, anomaly, stateless, trees]
)
def test_captured(fn):
    compare(fn, P(3, 4), graphs=1)


def test_autocast_object_of_a_module():
    torch.manual_seed(0)
    compare(lambda x, model: model(x), P(3, 4), Half(), graphs=1)


def test_autocast_object_with_a_break_inside():
    cast = torch.autocast("cpu", torch.bfloat16)

    def fn(x):
        with cast:
            y = x @ x.t()
            magneto.graph_break()
            z = x @ x.t()
        return y, z, x @ x.t(), torch.is_autocast_enabled("cpu")

    compare(fn, P(3, 4), graphs=None)


def test_range_with_a_break_inside():
    def fn(x):
        with torch.profiler.record_function("a"):
            y = x.sin()
            magneto.graph_break()
            return y.cos()

    compare(fn, P(3, 4), graphs=None)


def test_profiler_sees_ranges():
    def fn(x):
        with torch.profiler.record_function("mine"):
            return x.sin()

    compiled = magneto.optimize("eager")(fn)
    compiled(P(3))
    with torch.autograd.profiler.profile() as profile:
        compiled(P(3))
    assert "mine" in [event.name for event in profile.function_events]


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        SAID.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        SAID.append(func.__name__)
        result = func(*args, **(kwargs or {}))
        return result * 2 if func.__name__ == "sin" else result


def inner(x):
    return (x.sin() + 1) * 2


@pytest.mark.parametrize("mode", [Dispatch, Function])
@pytest.mark.parametrize("before", [False, True])
def test_a_mode_sees_every_operation(mode, before):
    compiled = magneto.optimize("aot_eager")(inner)
    x = torch.ones(3)
    if before:
        compiled(x)
    SAID.clear()
    with mode():
        plain = inner(x)
    said = list(SAID)
    SAID.clear()
    with mode():
        ours = compiled(x)
    assert said == SAID and torch.equal(plain, ours)
    assert any("Mode is active" in event.fields["reason"] for event in events.events("fallback"))
    assert torch.equal(compiled(x), inner(x))


@pytest.mark.parametrize("mode", [Dispatch, Function])
def test_a_mode_entered_inside(mode):
    def fn(x):
        with mode():
            y = inner(x)
        return y * 3

    compare(fn, torch.ones(3), graphs=None, said=SAID, fallback="Mode is active", backends=("aot_eager",))


def _inference(x):
    with torch.inference_mode():
        y = x * 2
    return y.is_inference(), x * 3


def _default_dtype(x):
    torch.set_default_dtype(torch.float64)
    try:
        y = torch.ones(3) / 3
    finally:
        torch.set_default_dtype(torch.float32)
    return y, x * 2, torch.ones(2)


def _default_device(x):
    with torch.device("cpu"):
        y = torch.ones(3, 4)
    return x * y


def _deterministic(x):
    torch.use_deterministic_algorithms(True)
    try:
        return x.sin(), torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def _fork(x):
    with torch.random.fork_rng():
        y = x + torch.rand(3, 4)
    return y, torch.rand(2)


def _flags(x):
    with torch.backends.mkldnn.flags(enabled=False):
        return x @ x.t()


def _attention(x):
    q = x.view(1, 1, 3, 4)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q)


def _stack(x):
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        y = x * 2
    return y + x


def _gradient(x):
    y = (x.sin() * x).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    return g * 2


def _backward(x):
    y = x.detach().clone().requires_grad_()
    (y * y).sum().backward()
    return y.grad * x


def _forward_mode(x):
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(dual.sin()).tangent


@pytest.mark.parametrize(
    "fn",
    [_inference, _default_dtype, _default_device, _deterministic, _fork, _flags, _attention, _stack, _gradient, _backward, _forward_mode],
)
def test_as_in_eager(fn):
    compare(fn, P(3, 4), graphs=None)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("warm", [False, True])
def test_tangents_go_through_what_is_optimised(backend, warm):
    import torch.autograd.forward_ad as forward_ad

    def inner(x):
        return x.sin() * x, x.exp()[1:]

    def within(x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x * 2)
            return [forward_ad.unpack_dual(y).tangent for y in inner(dual)]

    compiled, x = magneto.optimize(backend)(inner), torch.linspace(-1, 1, 5)
    if warm:
        compiled(x)
    found = []
    for call in (inner, compiled):
        with forward_ad.dual_level():
            found.append([forward_ad.unpack_dual(y) for y in call(forward_ad.make_dual(x, x * 2))])
    assert_equal([tuple(y) for y in found[1]], [tuple(y) for y in found[0]], 1e-6)
    assert_equal(magneto.optimize(backend)(within)(x), within(x), 1e-6)
    assert_equal(compiled(x), inner(x), 1e-6)


def _saved(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return x.sin() * x


def test_hooks_on_saved_tensors():
    compare(_saved, P(3, 4), graphs=None, backends=("aot_eager",), fallback="hooks on saved tensors")


@torch.library.custom_op("magneto_test::scale", mutates_args=())
def scale(x: torch.Tensor, k: float) -> torch.Tensor:
    return x.detach().clone() * k


@scale.register_fake
def _(x, k):
    return torch.empty_like(x)


def _remember(ctx, inputs, output):
    ctx.k = inputs[1]


scale.register_autograd(lambda ctx, g: (g * ctx.k * 3, None), setup_context=_remember)


@torch.library.custom_op("magneto_test::no_fake", mutates_args=())
def no_fake(x: torch.Tensor) -> torch.Tensor:
    SAID.append("run")
    return x + 1


@torch.library.custom_op("magneto_test::stored", mutates_args=("cache", "count"))
def stored(cache: torch.Tensor, x: torch.Tensor, k: float, count: torch.Tensor) -> torch.Tensor:
    count.add_(1)
    return cache.mul_(k).add_(x).sum(0)


@stored.register_fake
def _(cache, x, k, count):
    return torch.empty_like(x[0])


@torch.library.custom_op("magneto_test::doubled", mutates_args=("x",))
def doubled(x: torch.Tensor) -> None:
    x.mul_(2)


def custom(x):
    return scale(x * 2, 3.0) + torch.ops.magneto_test.scale(x, 2.0) + torch.ops.magneto_test.scale.default(x, 0.5)


def custom_without_fake(x):
    return no_fake(x.detach() * 2) + 1


def test_custom_operations():
    compare(custom, P(3, 4), graphs=1)


@torch.library.custom_op("magneto_test::grouped", mutates_args=())
def grouped(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return x * counts.sum()


grouped.register_fake(lambda x, counts: torch.empty_like(x))
grouped.register_autograd(
    lambda ctx, g: (g * float(sum(READ[0](ctx.counts))), None), setup_context=lambda ctx, inputs, output: setattr(ctx, "counts", inputs[1])
)
READ = [torch.Tensor.tolist]


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.numpy, numpy.asarray])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("error::magneto.MagnetoWarning")
def test_custom_operations_whose_backward_reads_numbers(monkeypatch, read, backend):
    """It is one operator of the backward."""
    monkeypatch.setattr(sys.modules[__name__], "READ", [read])
    for made in (True, False):
        compiled = magneto.optimize(backend)(lambda x, counts: grouped(x * 3, counts=counts + 1 if made else counts) * 2)  # noqa: B023
        for counts in (torch.tensor([1, 2]), torch.tensor([3, 4])):
            x = torch.ones(3, requires_grad=True)
            compiled(x, counts).sum().backward()
            assert_equal(x.grad, torch.full((3,), 6.0 * (counts + made).sum().item()))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore::magneto.MagnetoWarning")
def test_second_derivative_of_a_backward_that_reads_numbers(backend):
    def penalty(x, counts):
        return torch.autograd.grad(grouped(x * x, counts).sum(), x, create_graph=True)[0].square().sum()

    x, counts = torch.ones(3, requires_grad=True), torch.tensor([1, 2])
    magneto.optimize(backend)(penalty)(x, counts).backward()
    assert_equal(x.grad, torch.full((3,), 72.0))


@torch.library.custom_op("magneto_test::largest_and_place", mutates_args=())
def largest_and_place(x: torch.Tensor, w: torch.Tensor, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    value, place = (x * w * scale).max(0)
    return value.clone(), place.clone()


def largest_prepare(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.scale = inputs[2]
    ctx.mark_non_differentiable(output[1])


def largest_backward(ctx, gradient, _):
    x, w, place = ctx.saved_tensors
    assert ctx.needs_input_grad[0]
    gx = torch.zeros_like(x).t().contiguous().t()
    for column, row in enumerate(place.tolist()):
        gx[row, column] = gradient[column] * ctx.scale
    return gx * w, (gx * x).double() if ctx.needs_input_grad[1] else None, None


largest_and_place.register_fake(lambda x, w, scale=2.0: (x.new_empty(x.shape[1]), x.new_empty(x.shape[1], dtype=torch.int64)))
largest_and_place.register_autograd(largest_backward, setup_context=largest_prepare)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("error::magneto.MagnetoWarning")
def test_custom_operations_whose_backward_reads_results(backend):
    def fn(x, w):
        value, place = largest_and_place(x.sin(), w, scale=3.0)
        return value * 2, place, torch.ops.magneto_test.largest_and_place(x, w.detach())[0].exp()

    def run(f, frozen):
        args = torch.arange(12.0).view(3, 4).requires_grad_(), torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(not frozen)
        found = f(*args)
        assert [one.requires_grad for one in found] == [True, False, True]
        with torch.no_grad():
            found[1].add_(1) if frozen is None else found[0].add_(1)  # not kept
        (found[0].sum() + found[2].sum()).backward()
        return found, [arg.grad for arg in args], [arg.grad is not None and arg.grad.stride() for arg in args]

    for frozen in (False, True):
        assert_equal(run(magneto.optimize(backend)(fn), frozen), run(fn, frozen))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_custom_operations_that_write_their_arguments(backend):
    def fn(caches, x, w, count):
        y = x.clone() * w
        doubled(y[:, ::2])
        first = stored(caches[0], y.detach(), 2.5, count)
        second = stored(caches[1], y.detach() + first, 0.5, count)  # its neighbour in the same memory
        doubled(x)
        return y * w, first, second, caches.sum()

    def run(f):
        args = torch.ones(2, 3, 4), torch.arange(12.0).view(3, 4), torch.ones(3, 4, requires_grad=True), torch.zeros(())
        results = [f(*args) for _ in range(2)]
        results[1][0].sum().backward()
        return results, args, args[2].grad

    assert_equal(run(magneto.optimize(backend, nopython=True)(fn)), run(fn), 1e-6)
    assert magneto.stats()["fallbacks"] == 0


def test_custom_operations_that_write_memory_of_two_arguments_run_in_eager():
    def fn(cache, count):
        return stored(cache, cache, 3.0, count) + 1

    compiled = magneto.optimize("aot_eager")(fn)
    with pytest.warns(match="W104.*memory of two of its arguments"):
        same(fn, compiled, torch.ones(3, 4), torch.zeros(()))


def test_a_custom_operation_without_a_fake_kernel_is_not_run_by_capture():
    compare(custom_without_fake, P(3, 4), graphs=None, breaks="meta kernel", said=SAID)


@pytest.mark.filterwarnings("ignore::magneto.base.errors.MagnetoWarning")  # eager's own torch.cond imports a compiler, frame by frame
def test_higher_order_operations():
    def fn(x):
        return torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x.detach(),))

    x = torch.ones(3)
    assert torch.equal(magneto.optimize("aot_eager")(fn)(x), x.sin())
    assert torch.equal(magneto.optimize("aot_eager")(fn)(-x), (-x).cos())


def test_modes_outside_are_guarded():
    def fn(x):
        return x @ x.t(), torch.ones(2)

    compiled = magneto.optimize("aot_eager", nopython=True)(fn)
    x = P(3, 4)
    assert compiled(x)[0].dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x)[0].dtype is torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert compiled(x)[0].dtype is torch.float16
    with torch.no_grad():
        assert not compiled(x)[0].requires_grad
    with torch.inference_mode():
        assert compiled(x)[0].is_inference()
    torch.set_default_dtype(torch.float64)
    try:
        assert compiled(x)[1].dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert compiled(x)[0].requires_grad and compiled(x)[1].dtype is torch.float32


def an_error_in_autocast(x, i):
    with torch.autocast("cpu", torch.bfloat16):
        return F.embedding(i, x).mm(x.t())


def an_error_in_blocks_of_each_kind(x, i):
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16, cache_enabled=False),
        torch.no_grad(),
        torch.device("cpu"),
    ):
        return F.embedding(i, x).mm(x.t())


def an_error_found_by_capture(x, i):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ torch.ones(7, 9)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("fn", [an_error_in_autocast, an_error_in_blocks_of_each_kind, an_error_found_by_capture])
def test_an_error_leaves_no_mode_behind(fn, backend: str) -> None:
    """An autocast that stays open keeps casted weights: steps after it would compute with old ones."""
    x = torch.randn(3, 4, requires_grad=True)
    optimised = magneto.optimize(backend)(fn)
    before = modes()
    assert before.nesting == 0
    with contextlib.suppress(RuntimeError):
        optimised(x, torch.tensor([0, 1]))
    for _ in range(2):
        with pytest.raises((IndexError, RuntimeError)):
            optimised(x, torch.tensor([0, 9]))
        assert modes() == before
    with torch.autocast("cpu", torch.bfloat16):
        product = x @ x.t()
    with torch.no_grad():
        x.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        assert product.any() and not (x @ x.t()).any()


def devices(x):
    with torch.device("meta"), torch.no_grad():
        with torch.device("cpu") as entered:
            inner = torch.arange(3), torch.tensor([1, 2]), torch.tensor([x[0].detach() * 0, 1.0]), torch.get_default_device(), entered
        outer = (
            torch.full((2,), 1.0),
            torch.zeros(2, device="cpu"),
            torch.zeros(2, device=None),
            torch.zeros_like(x),
            torch.get_default_device(),
        )
    return [getattr(value, "device", value) for value in (*inner, *outer, torch.ones(2))]


def a_device_and_an_error(x):
    try:
        with torch.device("meta"):
            y = torch.ones(3)
            raise ValueError
    except ValueError:
        return y.device, torch.ones(2).device


def a_device_and_a_break(x):
    with torch.device("meta"):
        y = torch.ones(3)
        os.getloadavg()
        z = torch.ones(3)
    return y.device, z.device, torch.ones(2).device


def a_device_and_a_missing_name(x):
    with torch.device("meta"):
        return missing(x)  # noqa: F821


@pytest.mark.parametrize("fn", [devices, a_device_and_an_error, a_device_and_a_break, a_device_and_a_missing_name])
def test_device_blocks(fn) -> None:
    """Entered at each call for the calls inside, left on every way out; without a break where nothing inside breaks."""
    x = torch.ones(3, requires_grad=True)
    for nopython in {False, fn in (devices, a_device_and_an_error)}:
        optimised = magneto.optimize("eager", nopython=nopython)(fn)
        for _ in range(3):
            if fn is a_device_and_a_missing_name:
                with pytest.raises(NameError):
                    optimised(x)
            else:
                assert optimised(x) == fn(x)
            assert torch._C._len_torch_function_stack() == 0
        assert magneto.stats()["recompiles"] == 0, "entered while capturing, not at the call"


def decorated(x):
    """A grad mode round a function that is made, or given, inside."""

    @torch.no_grad()
    def f(y, k=2):
        """Doubles."""
        return y * k, torch.is_grad_enabled()

    g = torch.enable_grad()(lambda y: (y.sin(), torch.is_grad_enabled()))
    with torch.no_grad():
        inner = g(x)
    return f(x), f(x, k=3), inner, torch.is_grad_enabled(), f.__name__, f.__doc__, torch.no_grad(g)(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_grad_modes_round_functions(backend) -> None:
    x = torch.linspace(0, 1, 4, requires_grad=True)
    expected, found = decorated(x), magneto.optimize(backend, nopython=True)(decorated)(x)
    assert_equal(found, expected)
