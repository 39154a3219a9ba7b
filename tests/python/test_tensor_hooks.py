"""Hooks on what autograd computes, `retain_grad`, and `inputs=` of backward: programs run plain and optimised side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from tests.compare import assert_equal

Step = Callable[[nn.Module, torch.Tensor, list[Any]], Any]
PROGRAMS: list[tuple[Step, int]] = []


def program(fn: Step) -> Step:
    """Captured without a break."""
    PROGRAMS.append((fn, 0))
    return fn


def broken(fn: Step) -> Step:
    """Captured with breaks: what is hooked lives on."""
    PROGRAMS.append((fn, 1))
    return fn


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def note(seen: list[Any], name: str) -> Callable[[torch.Tensor], None]:
    def hook(gradient: torch.Tensor) -> None:
        seen.append((name, gradient.clone(), gradient.stride(), gradient.requires_grad, torch.is_grad_enabled()))

    return hook


@program
def observed(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x)
    h.register_hook(note(seen, "h"))
    n[2](h.tanh()).sum().backward()
    return x.sum()


@program
def several_in_the_order_of_the_engine(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    a = n[0](x)
    b = a.tanh()
    c = a * b
    for name, t in (("c", c), ("a", a), ("b", b), ("a again", a)):
        t.register_hook(note(seen, name))
    n[2](c).pow(2).sum().backward()
    return len(seen)


@program
def scaled(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x)
    h.register_hook(lambda g: g * 0.5)
    loss = n[2](h.tanh()).pow(2).sum()
    loss.backward()
    return loss.detach()


@program
def clipped_then_seen(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x)
    h.register_hook(lambda g: g.clamp(-0.1, 0.1))
    h.register_hook(note(seen, "behind the clip"))
    h.retain_grad()
    y = h.tanh()
    y.register_hook(lambda g: g + 1)
    (n[2](y).sum() + h.sum()).backward()
    return h.grad


@program
def leaf_hooks_in_between(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x).tanh()
    h.register_hook(note(seen, "h"))
    h.register_hook(lambda g: g * 2)
    n[2](h).sum().backward()
    return [p.grad.sum() for p in n.parameters()]


@program
def retained(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x)
    h.retain_grad()
    h.retain_grad()
    before = h.grad
    n[2](h.t().tanh().t()).sum().backward()
    return before, h.grad, h.grad.stride()


@program
def retained_twice(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x)
    h.retain_grad()
    loss = h.pow(2).sum()
    loss.backward(retain_graph=True)
    first = h.grad
    loss.backward()
    return first, h.grad, first is h.grad


@program
def removed(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x)
    kept = h.register_hook(note(seen, "kept"))
    handle = h.register_hook(note(seen, "removed"))
    handle.remove()
    n[2](h.tanh()).sum().backward()
    del kept
    return x


@program
def the_scale_is_read_when_it_is_called(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    factor = [1.0]
    h = n[0](x)
    h.register_hook(lambda g: g * factor[0])
    factor[0] = 3.0
    n[2](h.tanh()).sum().backward()
    return x


@program
def unreached(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x)
    n[2](h.tanh()).sum().backward()
    return n[1](x)


@program
def chosen_inputs(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    y = n(x)
    y.backward(torch.ones_like(y), inputs=[n[0].weight, n[2].bias])
    return y.detach(), [p.grad is None for p in n.parameters()]


@program
def a_chosen_input(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    torch.autograd.backward([n(x).sum()], inputs=n[0].bias)
    return [p.grad is None for p in n.parameters()]


@program
def a_chosen_input_that_is_not_reached(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    n[2](x.repeat(1, 2)).sum().backward(inputs=[n[0].weight, n[2].weight])
    return [p.grad is None for p in n.parameters()]


@broken
def hooked_and_returned(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x)
    h.register_hook(note(seen, "h"))
    n[2](h.tanh()).sum().backward()
    return h._backward_hooks is not None and len(h._backward_hooks), h.detach() * 2


@broken
def retained_and_returned(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x)
    h.retain_grad()
    n[2](h.tanh()).sum().backward()
    seen.append(h)
    return h.retains_grad, h.grad


def reached_by_a_later_backward(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0].bias + x.sum()
    h.register_hook(note(seen, "h"))
    other = h + 1
    h.sum().backward()
    return other


@broken
def hook_that_writes_the_gradient(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x)
    h.register_hook(lambda g: g.mul_(2))
    (h * h).sum().backward()
    return x


@broken
def written_behind_the_hook(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x)
    h.register_hook(note(seen, "before the write"))
    h.mul_(3)
    n[2](h).sum().backward()
    return x


@broken
def no_backward(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x)
    h.register_hook(note(seen, "h"))
    return n[2](h.tanh())


@broken
def under_autograd_grad(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x)
    h.register_hook(note(seen, "h"))
    return torch.autograd.grad(n[2](h).sum(), [n[0].weight])


@broken
def chosen_inputs_past_a_hook(n: nn.Module, x: torch.Tensor, seen: list[Any]) -> Any:
    h = n[0](x)
    h.register_hook(note(seen, "not called"))
    n[2](h).sum().backward(inputs=[n[2].weight])
    return x


def run(step: Step, backend: str | None) -> list[Any]:
    n = net()
    for name in ("0.weight", "2.bias"):
        n.get_parameter(name).register_hook(lambda g, name=name: seen.append((name, g.clone())))
    call = magneto.optimize(backend)(step) if backend else step
    seen: list[Any] = []
    rows: list[Any] = []
    for number in range(2):
        torch.manual_seed(number)
        value = call(n, torch.randn(5, 4), seen)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value.sum().backward()
        rows.append((value, list(seen), [p.grad if p.grad is None else p.grad.clone() for p in n.parameters()]))
    return rows


@pytest.mark.filterwarnings("ignore::magneto.base.errors.MagnetoWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("step", "breaks"), PROGRAMS, ids=[step.__name__ for step, _ in PROGRAMS])
def test_program(step: Step, breaks: int, backend: str) -> None:
    expected = run(step, None)
    found = run(step, backend)
    assert_equal(found, expected)
    stats = magneto.stats()
    assert (stats["breaks"] > 0) == (breaks > 0), stats["break_reasons"]
    assert stats["fallbacks"] == 0


def test_reached_by_a_later_backward() -> None:
    """Nothing is saved on the way, so that eager can go it twice."""
    assert_equal(run(reached_by_a_later_backward, "eager"), run(reached_by_a_later_backward, None))
    assert magneto.stats()["breaks"]


@pytest.mark.parametrize("step", [clipped_then_seen, leaf_hooks_in_between, retained, chosen_inputs])
def test_compiled(step: Step) -> None:
    assert_equal(run(step, "inductor"), run(step, None), 1e-5)
    assert magneto.stats()["breaks"] == 0


def _retained_late(x):
    h = x * 2
    y = h.square().sum()
    h.retain_grad()
    return y, h


def _hooked_late(x):
    h = x * 2
    y = h.square().sum()
    h.register_hook(lambda gradient: gradient * 3)
    return y, h


def _materialised(x):
    h = {"a": x * 2, "b": x + 1}
    y = h["a"].square().sum()
    first, second = torch.autograd.grad(y, h.values(), allow_unused=True, materialize_grads=True)
    return first + second, h["a"]


def _into(x):
    h = x * 2
    h.square().sum().backward(inputs=[h])
    return h.grad, h


@pytest.mark.filterwarnings("ignore:.*gradients of what is computed on the way")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("program", [_retained_late, _hooked_late, _materialised, _into])
def test_gradients_of_what_another_result_is_computed_from(program, backend):
    """Behind a break there autograd knows how the results depend on each other."""

    def seen(call):
        x = torch.arange(3.0).requires_grad_()
        y, h = call(x)
        if y.requires_grad:
            y.backward()
        retained = h.grad.tolist() if h.retains_grad else None
        return y.tolist(), retained, None if x.grad is None else x.grad.tolist()

    assert seen(magneto.optimize(backend)(program)) == seen(program)


def test_gradients_of_whatever_can_be_iterated_over():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))

    def adapted(x):
        weights = {name: weight.clone() for name, weight in net.named_parameters()}
        for _ in range(2):
            loss = torch.func.functional_call(net, weights, (x,)).square().sum()
            gradients = torch.autograd.grad([loss], weights.values(), create_graph=True)
            weights = {name: weight - 0.1 * gradient for (name, weight), gradient in zip(weights.items(), gradients, strict=True)}
        return torch.func.functional_call(net, weights, (x,)).square().sum()

    def plain(x):
        return torch.autograd.grad({1: net(x).sum()}.values(), net.parameters(), iter([torch.tensor(2.0)]))

    x = torch.linspace(-1, 1, 6).view(2, 3)
    for fn in (adapted, plain):
        got, want = magneto.optimize("aot_eager", nopython=True)(fn)(x), fn(x)
        torch.testing.assert_close(got, want)


def _features(x, w):
    h = torch.tanh(x @ w)
    z = h * 2
    return (z * h).sum(), h, z.sin(), x + 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("used", [(0,), (0, 1), (2,), (0, 2), (1,), (3,), (0, 1, 2, 3)])
def test_a_result_that_others_are_computed_from_retains_its_gradient(used: tuple[int, ...], backend: str) -> None:
    """Outside, behind the call: what flows back inside the compiled graph counts."""

    def seen(call: Any) -> list[Any]:
        torch.manual_seed(0)
        x, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)
        found: list[Any] = []
        for _ in range(2):
            results = call(x, w)
            for result in results:
                result.retain_grad()
            torch.stack([results[k].square().sum() for k in used]).sum().backward()
            found += [*(r.grad for r in results), x.grad.clone(), None if w.grad is None else w.grad.clone()]
        return found

    torch.testing.assert_close(seen(magneto.optimize(backend)(_features)), seen(_features), rtol=1e-4, atol=1e-4)


def _views(x, w):
    h = torch.tanh(x @ w)
    v = h.view(-1)
    u = v[2:]
    return u.square().sum(), v, u, h.cos().sum(), x.t(), x.t()[0]


def _chain(x, w):
    h, found = x @ w, []
    for _ in range(3):
        h = torch.tanh(h) * 1.5
        found.append(h)
    return (*found, h.sum(), (found[0] * found[2]).sum())


def _written(x, w):
    x.mul_(2)
    y = x * w.sum()
    return y, y[0], y[0] * 3


def _gradients(results, loss, x, w):
    return [
        torch.autograd.grad(loss, [*some, *more], retain_graph=True, allow_unused=True)
        for some in ([r] for r in results)
        for more in ((), (x, w))
    ]


def _retained(results, loss, x, w):
    for result in results:
        result.retain_grad()
    loss.backward()
    return [result.grad for result in results]


def _hooked(results, loss, x, w):
    """The results themselves are gone when the hooks are called."""
    seen: list[Any] = []
    for k, result in enumerate(results):
        result.register_hook(lambda gradient, k=k: seen.append((k, gradient.clone())))
    results.clear()
    loss.backward()
    return sorted(seen, key=lambda pair: pair[0])


def _changed(results, loss, x, w):
    for result in results:
        result.register_hook(lambda gradient: gradient * 2)
    loss.backward(retain_graph=True)
    loss.backward()


def _asked_for(results, loss, x, w):
    loss.backward(inputs=results[1:2], retain_graph=True)
    loss.backward()
    return results[1].grad


def _second(results, loss, x, w):
    first = torch.autograd.grad(loss, [*results[1:], x, w], create_graph=True, allow_unused=True)
    return torch.autograd.grad(sum((g.square().sum() for g in first if g is not None), w.sum()), (x, w), allow_unused=True)


@pytest.mark.parametrize("query", [_gradients, _retained, _hooked, _changed, _asked_for, _second])
@pytest.mark.parametrize("program", [_features, _views, _chain])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_gradient_of_a_result_that_others_are_computed_from(program: Any, query: Any, backend: str) -> None:
    """What flows back inside the compiled graph counts, however the gradient is asked for."""

    def seen(call: Any, used: tuple[int, ...]) -> list[Any]:
        torch.manual_seed(0)
        leaf, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)
        x = leaf * 1.0
        results = list(call(x, w))
        loss = torch.stack([results[k].square().sum() for k in used]).sum()
        return [query(results, loss, x, w), leaf.grad, w.grad]

    compiled = magneto.optimize(backend)(program)
    for used in ((0,), (1,), (2,), (0, 1), (0, 1, 2)):
        torch.testing.assert_close(seen(compiled, used), seen(program, used), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_gradient_of_a_result_from_what_has_been_written_since(backend: str) -> None:
    x, w = torch.randn(4, 3), torch.randn(3, 5, requires_grad=True)
    k = torch.randn(5, 2, requires_grad=True)

    def program(x, w, k):
        h = x @ w
        return h, h @ k

    for call in (program, magneto.optimize(backend)(program)):
        h, y = call(x, w, k)
        torch.autograd.grad(y.sum(), h, retain_graph=True)
        with torch.no_grad():
            k.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), h)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("create", [False, True])
def test_a_gradient_of_a_result_of_autocast(create: bool, backend: str) -> None:
    torch.manual_seed(0)
    x, w, k = torch.randn(4, 3), torch.randn(3, 5, requires_grad=True), torch.randn(5, 2, requires_grad=True)

    def program(x, w, k):
        h = x @ w
        return h, (h @ k).tanh()

    found = []
    for call in (program, magneto.optimize(backend)(program)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h, y = call(x, w, k)
        g, gk = torch.autograd.grad(y.float().sum(), (h, k), create_graph=create)
        found.append([g, gk, *(torch.autograd.grad(gk.square().sum(), (w, k)) if create else ())])
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)


def test_the_gradient_of_a_written_input_that_results_are_computed_from() -> None:
    """The graph cannot run again: an error, before anything wrong is answered."""
    leaf, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    x = leaf * 1.0
    y, _, late = magneto.optimize("aot_eager")(_written)(x, w)
    late.sum().backward(retain_graph=True)
    x.retain_grad()
    with pytest.raises(magneto.UserError, match="(?s)U006.*others are computed from"):
        late.sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_error_names_the_hook(backend: str) -> None:
    texts = []
    for fn in (torch.sin, magneto.optimize(backend)(lambda x: x.sin())):
        y = fn(torch.randn(3, requires_grad=True))

        def of_another_size(gradient: torch.Tensor) -> torch.Tensor:
            return torch.ones(7)

        y.register_hook(of_another_size)
        with pytest.raises(RuntimeError) as found:
            y.sum().backward()
        texts.append(str(found.value))
    assert texts[0] == texts[1]
    assert "of_another_size" in texts[0]
