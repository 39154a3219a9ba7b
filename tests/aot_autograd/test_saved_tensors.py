"""What a separate backward keeps, for how long, and what it says of tensors that are written or freed in between."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import magneto
from magneto.aot_autograd.decomposed import decompose_joint
from magneto.aot_autograd.joint import trace_joint
from magneto.aot_autograd.partition import partition
from magneto.base.errors import UserError
from magneto.base.events import events
from tests.aot_autograd.capture import capture

BACKENDS = ["aot_eager", "inductor"]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


def test_normalised_activations_are_computed_again() -> None:
    net = network()
    x = torch.randn(2, 3, 9, 9)
    names, tensors = zip(*[*net.named_parameters(), *net.named_buffers()], strict=True)

    def f(x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, dict(zip(names, tensors, strict=True)), (x,))

    gm, lifted = capture(f, x, *tensors)
    joint = trace_joint(gm, [x, *tensors, *lifted])
    sizes = []
    for one in (joint, decompose_joint(joint)):
        cut = partition(one)
        outputs = cut.forward.output_node().args[0]
        assert isinstance(outputs, tuple)
        large = [node for node in outputs[len(one.results) :] if node.meta["val"].nbytes > 500]  # type: ignore[union-attr]
        sizes.append(len(large))
    assert sizes == [3, 2]  # two convolutions and the first relu; the convolutions alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_and_statistics_are_eagers(backend: str) -> None:
    plain, net = network(), network()
    ours = magneto.optimize(backend)(net)
    for k in range(3):
        torch.manual_seed(k)
        x = torch.randn(2, 3, 9, 9)
        for one in (plain, ours):
            one(x).square().sum().backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), net.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, atol=1e-3, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    for a, b in zip(plain.buffers(), net.buffers(), strict=True):
        torch.testing.assert_close(b, a)


def loss(x: torch.Tensor) -> torch.Tensor:
    return (x.sin().exp() * x).sum()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("retain", [(), (0,), (0, 1)])
def test_a_graph_serves_as_often_as_it_is_retained(backend: str, retain: tuple[int, ...]) -> None:
    told = []
    for f in (loss, magneto.optimize(backend)(loss)):
        x = torch.linspace(-1, 1, 5).requires_grad_()
        out = f(x)
        log: list[object] = []
        for k in range(3):
            try:
                out.backward(retain_graph=k in retain)
                log.append(x.grad.clone())  # type: ignore[union-attr]
            except RuntimeError as error:
                log.append(str(error))
        told.append(log)
    for a, b in zip(*told, strict=True):
        torch.testing.assert_close(b, a) if isinstance(a, torch.Tensor) else (a == b or pytest.fail(f"{a} != {b}"))  # type: ignore[func-returns-value]


def test_an_input_is_free_once_it_is_not_needed() -> None:
    """The region's input was computed outside; eager frees it with the graph, though the result lives on."""

    def last(x: torch.Tensor) -> torch.Tensor:
        return x.square().exp()

    def alive(f: Callable[[torch.Tensor], torch.Tensor], retain: bool) -> bool:
        x = torch.ones(3, requires_grad=True)
        middle = x * 2
        watched = weakref.ref(middle.untyped_storage())
        del watched
        ref = weakref.ref(middle)
        out = f(middle)
        del middle
        out.sum().backward(retain_graph=retain)
        gc.collect()
        return ref() is not None

    ours = magneto.optimize("inductor")(last)
    alive(ours, False)
    assert not alive(ours, False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_double_backward_needs_no_saved_tensors_of_the_first(backend: str) -> None:
    grads = []
    for f in (loss, magneto.optimize(backend)(loss)):
        x = torch.linspace(-1, 1, 5).requires_grad_()
        (first,) = torch.autograd.grad(f(x), x, create_graph=True)
        grads.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("f", [torch.tanh, lambda x: x.relu().exp() * 2, lambda x: (x / 3).sigmoid().log()])
def test_double_backward_of_inputs_that_nobody_else_holds(f: Callable[[torch.Tensor], torch.Tensor], backend: str) -> None:
    """Behind a graph break a graph's input is computed by autograd, and its formulas may read something else."""
    grads = []
    for call in (f, magneto.optimize(backend)(lambda x: f(x))):
        x = torch.linspace(-1, 1, 5).requires_grad_()
        (first,) = torch.autograd.grad(call(x * 2).sum(), x, create_graph=True)
        gc.collect()
        (first.square().sum() + call(x.sin()).sum()).backward()
        grads.append((first.detach(), x.grad))
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_double_backward_of_an_input_written_since_is_a_named_error(backend: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.relu().exp()

    x = torch.linspace(-1, 1, 5).requires_grad_()
    out = magneto.optimize(backend)(f)(x)
    with torch.no_grad():
        x.neg_()
    with pytest.raises(UserError, match="written since"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_become_grad_without_a_copy(backend: str) -> None:
    net = copy.deepcopy(network())
    ours = magneto.optimize(backend)(net)
    x = torch.randn(2, 3, 9, 9)
    for _ in range(2):
        net.zero_grad()
        seen: list[int] = []
        handle = net[0].weight.register_hook(lambda g, seen=seen: seen.append(g.data_ptr()))
        ours(x).sum().backward()
        handle.remove()
        assert net[0].weight.grad is not None and [net[0].weight.grad.data_ptr()] == seen


def three(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.exp(), (x * w).log(), torch.tanh(w)


def halves(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (x * 2).chunk(2)
    return a.sqrt() * w[:2], (b + a).sin()


def stacked(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = torch.stack([x, w]).softmax(0).unbind()
    return a.log(), b.sqrt()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("f", [three, halves, stacked])
@pytest.mark.parametrize("chosen", [(0,), (1,), (0, 1), (-1,), (0, -1)])
def test_only_what_is_reached_flows(f: Callable[..., tuple[torch.Tensor, ...]], chosen: tuple[int, ...], backend: str) -> None:
    """Eager does not divide by the zero in `x` where the logarithm is not reached, and gives None where nothing flows."""
    found = []
    for call in (f, magneto.optimize(backend)(f)):
        for _ in range(2):
            x = torch.tensor([0.0, 1.0, 2.0, 3.0], requires_grad=True)
            w = torch.tensor([0.5, 0.0, 1.0, -1.0], requires_grad=True)
            outputs = call(x, w)
            sum(outputs[k].sum() for k in dict.fromkeys(k % len(outputs) for k in chosen)).backward()  # type: ignore[union-attr]
        found.append((x.grad, w.grad))
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(b, a, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_written_result_matters_where_it_is_read(backend: str) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp(), x.sin()

    told = []
    for call in (f, magneto.optimize(backend)(f)):
        log: list[object] = []
        for order in ((1, 0), (0, 1), (1, 1, 0), (1, 1)):
            x = torch.linspace(0, 1, 4).requires_grad_()
            outputs = call(x)
            with torch.no_grad():
                outputs[0].add_(1)
            for position, k in enumerate(order):
                try:
                    outputs[k].sum().backward(retain_graph=position + 1 < len(order))
                    log.append(x.grad.clone())  # type: ignore[union-attr]
                except RuntimeError as error:
                    log.append(str(error)[:80])
        told.append(log)
    for a, b in zip(*told, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b, a)
        else:
            assert a == b


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_copy_of_what_is_saved_may_be_written(recorded: bool, backend: str) -> None:
    """`copy_` gives another tensor the numbers of the one that backward reads: the same value in the graph, not the same memory."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        saved = x.exp()
        copied = torch.zeros(saved.shape)
        with torch.set_grad_enabled(recorded):
            copied[:] = saved
        return saved.sum(), copied

    def gradient(call: Callable[..., tuple[torch.Tensor, ...]]) -> torch.Tensor:
        x = torch.linspace(0, 1, 6).requires_grad_()
        total, copied = call(x)
        with torch.no_grad():
            copied.add_(1)
        return torch.autograd.grad(total + copied.sum(), x)[0]

    torch.testing.assert_close(gradient(magneto.optimize(backend)(f)), gradient(f))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_written_input_is_still_an_error(backend: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * y, x + 1

    ours = magneto.optimize(backend)(f)
    for call in (f, ours, ours):
        x, y = torch.ones(3, requires_grad=True), torch.ones(3)
        product, other = call(x, y)
        y.add_(1)
        other.sum().backward(retain_graph=True)
        assert x.grad is not None and x.grad.tolist() == [1, 1, 1]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_many_choices_of_results() -> None:
    """Beyond a number of choices nothing more is compiled."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple((x * k).sin() for k in range(5))

    ours = magneto.optimize("inductor")(f)
    for bits in range(1, 32, 2):
        grads = []
        for call in (f, ours):
            x = torch.linspace(0, 1, 3).requires_grad_()
            sum(out.sum() for k, out in enumerate(call(x)) if bits >> k & 1).backward()  # type: ignore[union-attr]
            grads.append(x.grad)
        torch.testing.assert_close(grads[1], grads[0])


def test_running_statistics_are_written_by_the_kernels() -> None:
    net = network()
    ours = magneto.optimize("inductor")(net)
    x = torch.randn(2, 3, 9, 9)
    first = len(events("artifact"))
    for _ in range(2):
        ours(x).sum().backward()
    mean = net[1].running_mean  # type: ignore[index]
    assert isinstance(mean, torch.Tensor)
    before, version = mean.clone(), mean._version
    net(x)
    expected, count = mean.clone(), mean._version - version
    mean.data.copy_(before)
    version = mean._version
    ours(x).sum().backward()
    torch.testing.assert_close(mean, expected)
    assert mean._version - version == count
    assert sum(event.inputs_written for event in events("artifact")[first:] if event.artifact == "plan") == 6
