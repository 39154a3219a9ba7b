"""Hooks of modules and tensors: scenarios that register, call and remove them, run plain and optimised, must leave the same trace (values, gradients, order)."""

# ruff: noqa

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

import magneto
from tests.compare import assert_equal

X = torch.linspace(-1, 1, 12).reshape(3, 4)
SCENARIOS = {}


def scenario(fn):
    SCENARIOS[fn.__name__] = fn
    return fn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def train_step(model, x, log):
    """Forward, backward; what came out goes into the log."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.sum().backward()
    log.append([out.detach(), x.grad, *(None if p.grad is None else p.grad.clone() for p in model.parameters())])
    model.zero_grad()


@scenario
def forward_hooks_added_and_removed(wrap, log):
    model = net()
    fast = wrap(model)
    fast(X)

    def hook(module, args, output):
        log.append((type(module).__name__, len(args)))
        return output * 2

    handle = model[0].register_forward_hook(hook)
    for _ in range(2):
        train_step(fast, X, log)
    second = model[0].register_forward_hook(lambda m, a, o: o + 1, prepend=True)
    for _ in range(2):
        train_step(fast, X, log)
    handle.remove()
    train_step(fast, X, log)
    second.remove()
    train_step(fast, X, log)


@scenario
def hooks_on_the_root(wrap, log):
    model = net()
    fast = wrap(model)
    handles = [
        fast.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
        fast.register_forward_pre_hook(lambda m, args: args[0] + 1),
        fast.register_forward_hook(lambda m, args, out: None),
        fast.register_forward_hook(lambda m, args, out: {"value": out}),
    ]
    log.append(fast(X))
    log.append(fast(X))
    for handle in handles:
        handle.remove()
        log.append(fast(X))


@scenario
def hooks_with_keywords(wrap, log):
    class Scaled(nn.Module):
        def forward(self, x, *, scale=1.0, shift=0.0):
            return x * scale + shift

    model = Scaled()
    fast = wrap(model)

    def pre(module, args, kwargs):
        log.append(sorted(kwargs))
        return args, {**kwargs, "shift": 3.0}

    model.register_forward_pre_hook(pre, with_kwargs=True)
    model.register_forward_hook(lambda m, args, kwargs, out: (out, kwargs["scale"]), with_kwargs=True)
    for scale in (2.0, 2.0, 4.0):
        log.append(fast(X, scale=scale))


@scenario
def always_called_hooks(wrap, log):
    class Failing(nn.Module):
        fail = True

        def forward(self, x):
            if self.fail:
                raise ValueError("in forward")
            return x + 1

    model = Failing()
    fast = wrap(model)
    model.register_forward_hook(lambda m, a, o: log.append(("always", o is None)), always_call=True)
    model.register_forward_hook(lambda m, a, o: log.append("not when it raises"))
    for fail in (False, True, True, False):
        model.fail = fail
        try:
            log.append(fast(X))
        except ValueError as error:
            log.append(str(error))


@scenario
def global_hooks(wrap, log):
    from torch.nn.modules import module as M

    model = net()
    fast = wrap(model)
    fast(X)
    handles = [
        M.register_module_forward_pre_hook(lambda m, args: log.append(("pre", type(m).__name__))),
        M.register_module_forward_hook(lambda m, args, out: log.append(("post", type(m).__name__))),
    ]
    try:
        log.append(fast(X))
        handles.append(M.register_module_full_backward_hook(lambda m, gi, go: log.append(("backward", type(m).__name__))))
        handles.append(M.register_module_full_backward_pre_hook(lambda m, go: log.append(("backward pre", type(m).__name__))))
        train_step(fast, X, log)
        train_step(fast, X, log)
    finally:
        for handle in handles:
            handle.remove()
    log.append(fast(X))


@scenario
def registration_hooks(wrap, log):
    from torch.nn.modules import module as M

    class Registers(nn.Module):
        def forward(self, x):
            self.register_buffer("last", x.detach())
            return x + self.last

    fast = wrap(Registers())
    log.append(fast(X))
    handle = M.register_module_buffer_registration_hook(lambda m, name, b: log.append(name))
    try:
        log.append(fast(X))
        log.append(fast(X))
    finally:
        handle.remove()
    log.append(fast(X))


@scenario
def full_backward_hooks(wrap, log):
    model = net()
    fast = wrap(model)
    train_step(fast, X, log)

    def backward(module, grad_input, grad_output):
        log.append(("backward", type(module).__name__, [g is None for g in grad_input], grad_output[0].clone()))
        return tuple(None if g is None else g * 2 for g in grad_input)

    def before(module, grad_output):
        log.append(("before", type(module).__name__))
        return (grad_output[0] * 3,)

    handles = [model[2].register_full_backward_hook(backward), model[0].register_full_backward_hook(backward)]
    for _ in range(2):
        train_step(fast, X, log)
    handles.append(model[2].register_full_backward_pre_hook(before))
    for _ in range(2):
        train_step(fast, X, log)
    for handle in handles:
        handle.remove()
    train_step(fast, X, log)


@scenario
def full_backward_hooks_on_the_root(wrap, log):
    model = net()
    fast = wrap(model)
    model.register_full_backward_hook(lambda m, gi, go: log.append((gi[0].clone(), go[0].clone())))
    model.register_full_backward_pre_hook(lambda m, go: log.append(go[0].clone()))
    for _ in range(2):
        train_step(fast, X, log)
    with torch.no_grad():
        log.append(fast(X))


@scenario
def old_backward_hooks(wrap, log):
    model = net()
    fast = wrap(model)
    with torch.no_grad():
        fast(X)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model[0].register_backward_hook(lambda m, gi, go: log.append(go[0].clone()))
        for _ in range(2):
            train_step(fast, X, log)


@scenario
def tensor_hooks(wrap, log):
    model = net()

    def f(x):
        y = model[0](x)
        y.register_hook(lambda grad: grad * 2)
        z = y * 3
        z.register_hook(lambda grad: log.append(grad.clone()))
        return model[2](z)

    fast = wrap(f)
    for _ in range(2):
        x = X.clone().requires_grad_()
        fast(x).sum().backward()
        log.append((x.grad, model[0].weight.grad.clone()))
        model.zero_grad()


@scenario
def tensor_hooks_inside_and_removed(wrap, log):
    def f(x, w):
        y = x * w
        handle = y.register_hook(lambda grad: log.append("never"))
        handle.remove()
        y.retain_grad()
        return y, (y * 2).sum()

    fast = wrap(f)
    for _ in range(2):
        w = torch.full((4,), 2.0, requires_grad=True)
        y, loss = fast(X, w)
        loss.backward()
        log.append((w.grad, y.grad))


@scenario
def hooks_on_parameters(wrap, log):
    model = net()
    fast = wrap(model)
    train_step(fast, X, log)
    handle = model[0].weight.register_hook(lambda grad: grad * 10)
    accumulated = model[2].weight.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.clone()))
    for _ in range(2):
        train_step(fast, X, log)
    handle.remove()
    accumulated.remove()
    train_step(fast, X, log)


@scenario
def hooks_added_and_removed_inside_forward(wrap, log):
    class Watches(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            seen = []
            handle = self.inner[1].register_forward_hook(lambda m, a, out: seen.append(out))
            try:
                y = self.inner(x)
            finally:
                handle.remove()
            return y, seen

    model = Watches()
    fast = wrap(model)
    for _ in range(3):
        log.append(fast(X))
        log.append(len(model.inner[1]._forward_hooks))


@scenario
def a_hook_that_removes_itself(wrap, log):
    model = net()
    fast = wrap(model)

    def once(m, args, out):
        log.append("once")
        handle.remove()

    handle = model[1].register_forward_hook(once)
    for _ in range(3):
        log.append(fast(X))


@scenario
def a_hook_with_state(wrap, log):
    class Collect:
        def __init__(self):
            self.outputs = []
            self.calls = 0

        def __call__(self, module, args, output):
            self.calls += 1
            self.outputs.append(output.detach())

    model, collect = net(), Collect()
    for layer in model:
        layer.register_forward_hook(collect)
    fast = wrap(model)
    for _ in range(3):
        train_step(fast, X, log)
    log.append((collect.calls, collect.outputs))


@scenario
def hooks_of_state_dictionaries(wrap, log):
    model = net()
    fast = wrap(model)
    fast(X)
    model.register_state_dict_pre_hook(lambda m, prefix, keep: log.append("pre"))
    model._register_state_dict_hook(lambda m, state, prefix, meta: state.update(extra=torch.ones(1)))
    model.register_load_state_dict_pre_hook(lambda m, state, prefix, *rest: state.pop("extra", None))
    model.register_load_state_dict_post_hook(lambda m, keys: log.append(keys.missing_keys))
    state = fast.state_dict()
    log.append(list(state))
    fast.load_state_dict({key: value * 2 for key, value in state.items()})
    log.append(fast(X))


@scenario
def a_hook_that_replaces_the_module_in_its_parent(wrap, log):
    model = net()
    fast = wrap(model)
    model[0].register_forward_hook(lambda m, a, o: model.__setitem__(1, nn.Tanh()))
    for _ in range(2):
        log.append(fast(X))


@scenario
def forward_replaced_on_the_instance(wrap, log):
    model = net()
    fast = wrap(model)
    log.append(fast(X))
    old = model[1].forward
    model[1].forward = lambda x: old(x) * 5
    log.append(fast(X))
    log.append(fast(X))
    del model[1].forward
    log.append(fast(X))


@scenario
def hooks_given_by_ordered_dictionary(wrap, log):
    model = net()
    fast = wrap(model)
    fast(X)
    model[0]._forward_hooks = collections.OrderedDict({0: lambda m, a, o: o - 1})
    log.append(fast(X))
    log.append(fast(X))


@scenario
def saved_tensor_hooks(wrap, log):
    model = net()
    fast = wrap(model)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: log.append("pack") or t, lambda t: t):
            train_step(fast, X, log)
        train_step(fast, X, log)


@pytest.mark.filterwarnings("ignore:.W104. graph .* a custom autograd function gives on memory")  # hooks on full backwards: views of inputs
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, backend: str) -> None:
    plain: list = []
    SCENARIOS[name](lambda fn: fn, plain)
    ours: list = []
    magneto.reset()
    SCENARIOS[name](magneto.optimize(backend), ours)
    assert_equal(ours, plain, None if backend == "eager" else 1e-5)
    assert magneto.stats()["graphs"] >= 1


@pytest.mark.parametrize("where", ["class", "instance", "instance, later"])
def test_a_call_impl_of_its_own(where: str) -> None:
    class Doubled(nn.Linear):
        if where == "class":

            def _call_impl(self, *args, **kwargs):
                return super()._call_impl(*args, **kwargs) * 2

    model, x = nn.Sequential(nn.Linear(4, 4), Doubled(4, 4), nn.ReLU()), torch.randn(2, 4)
    compiled = magneto.optimize("eager")(model)
    if where == "instance, later":
        assert_equal(compiled(x), model(x))
    if where != "class":
        model[1]._call_impl = lambda x: x * 3
    assert_equal(compiled(x), model(x))


def test_a_submodule_gets_another_class() -> None:
    class Twice(nn.ReLU):
        def forward(self, x):
            return super().forward(x) * 2

    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU()), torch.randn(2, 4)
    compiled = magneto.optimize("eager")(model)
    for k, cls in enumerate((nn.ReLU, nn.ReLU, Twice, nn.Sigmoid, Twice)):  # (the second call records the guards' fast form)
        model[1].__class__ = cls
        assert_equal(compiled(x), model(x))
        assert magneto.stats()["recompiles"] == max(0, min(k - 1, 2)) and magneto.stats()["breaks"] == 0


def test_hooks_that_are_always_called_see_an_exception_that_the_region_handles() -> None:
    class Picky(nn.Module):
        def forward(self, x, bad):
            if bad:
                raise ValueError(f"no {tuple(x.shape)}")
            return x * 2

    def run(x, bad):
        try:
            return model(x, bad) + 1
        except ValueError as error:
            return x - 1, str(error), list(seen)

    model, x, seen = Picky(), torch.ones(2), []
    model.register_forward_hook(lambda module, args, out: seen.append(("always", out is None)), always_call=True)
    model.register_forward_hook(lambda module, args, out: seen.append("returned"))
    compiled = magneto.optimize("eager", nopython=True)(run)
    for bad in (False, True, True, False):
        seen.clear()
        plain, expected = run(x, bad), list(seen)
        seen.clear()
        assert_equal(compiled(x, bad), plain)
        assert seen == expected
