"""torch.func: transforms of captured functions, nested and over closures, in graphs."""

# ruff: noqa

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.associative_scan import associative_scan
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import magneto
from magneto.dynamo.trackers import marked
from tests.compare import assert_equal
from tests.compare import assert_equal
from tests.python.gradients import P, compare

SAID: list[str] = []


def cost(x):
    return (x.sin() * x).sum()


def grad_of(x):
    return grad(cost)(x) * 2


def grad_with_options(x, w):
    def loss(a, b, scale):
        y = F.linear(a, b) * scale
        return y.pow(2).mean(), (y, {"n": y * 2})

    (ga, gb), (y, d) = grad(loss, argnums=(0, 1), has_aux=True)(x, w, 3.0)
    return ga, gb, y, d["n"]


def grad_and_value_of(x):
    g, v = grad_and_value(cost)(x)
    return g, v


def nested_grad(x):
    return grad(lambda y: (grad(cost)(y) * y).sum())(x)


def closure(x, w):
    bias = x * 2

    def loss(y):
        return (F.linear(y, w) + bias.sum()).pow(2).sum()

    return grad(loss)(x)


def captured_state(x):
    factor, table = 3, {"a": 2.0}
    return grad(lambda y: (y * factor * table["a"]).sum() + cost(y))(x)


def vmapped(x):
    return vmap(lambda row: row.dot(row) + row.shape[0] + row.dim())(x)


def vmap_dims(x, y):
    return vmap(lambda a, b: (a * b, a.sum()), in_dims=(1, None), out_dims=(1, 0))(x, y)


def vmap_nested(x, y):
    return vmap(vmap(lambda a, b: a * b + 1, in_dims=(None, 0)), in_dims=(0, None))(x, y)


def vmap_tree(x):
    def f(d, scale):
        return {"s": d["x"] * scale, "t": (d["x"].sum(),)}

    return vmap(f, in_dims=({"x": 0}, None))({"x": x}, 2.0)


def per_sample(x, w):
    def loss(w, row):
        return torch.tanh(row @ w).sum()

    return vmap(grad(loss), in_dims=(None, 0))(w, x)


def vmap_random(x):
    a = vmap(lambda row: row + torch.rand(2), randomness="different")(x[:, :2])
    b = vmap(lambda row: row + torch.randn(2), randomness="same")(x[:, :2])
    return a, b, torch.rand(3)


def vmap_inplace(x):
    def f(row):
        out = torch.zeros_like(row)
        out.copy_(row.sin())
        out += 1
        return out

    return vmap(f)(x)


def vmap_chunked(x):
    return vmap(lambda row: row.exp(), chunk_size=2)(x)


def jacobians(x):
    f = lambda y: y.sin() * y.sum()
    return jacrev(f)(x[0]), jacfwd(f)(x[0]), hessian(cost)(x[0])


def jacobian_of_one_result(x, w):
    return jacrev(lambda row: F.linear(F.linear(row, w).tanh(), w[:1, :3]))(x[0])


def jvp_of(x):
    out, tangent = jvp(lambda a: a.sin() * 2, (x,), (torch.ones_like(x),))
    return out, tangent


def jvp_of_several(x, y):
    return jvp(lambda a, b: a * b.exp(), (x, y), (y, x))


def vjp_of(x):
    out, pull = vjp(lambda a: (a.sin(), a.sum()), x)
    return out, pull((torch.ones_like(x), x.sum()))


def vjp_twice(x, y):
    out, pull, aux = vjp(lambda a, b: (a * b, a + 1), x, y, has_aux=True)
    first = pull(out)
    second = pull(aux)
    return first, second


def vjp_of_what_was_then(x):
    scale = [2.0]
    out, pull = vjp(lambda a: a * scale[0] * a, x)
    scale[0] = 100.0
    return pull(torch.ones_like(x))


def linearized(x):
    out, push = linearize(lambda a: a.sin() * a, x)
    return out, push(torch.ones_like(x)), push(x)


outside = grad(cost)
outside_hessian = hessian(cost)
outside_vmap = vmap(cost, in_dims=1)


def made_outside(x):
    return outside(x), outside_hessian(x[0]), outside_vmap(x)


def passed_around(x):
    fns = [grad(cost), vmap(cost), lambda v: v + 1]
    return [fn(x) for fn in fns]


@grad
def decorated(x):
    return cost(x) * 3


def calls_decorated(x):
    return decorated(x)


def meta_learning(w, x):
    def inner(w):
        for _ in range(2):
            w = w - 0.1 * grad(lambda v: F.mse_loss(x @ v, x.sum(1, keepdim=True)))(w)
        return F.mse_loss(x @ w, x.mean(1, keepdim=True))

    return grad_and_value(inner)(w)


def old_functional(x):
    from torch.autograd import functional

    f = lambda y: y.sin() * y
    return (
        functional.jacobian(f, x[0]),
        functional.hessian(cost, x[0]),
        functional.vjp(f, x, torch.ones_like(x)),
        functional.hvp(cost, x, x),
    )


def attention_mask(x):
    n = x.shape[0]

    def mask(b, q, kv):
        return (q >= kv) & (b >= 0)

    for dims in [(None, None, 0), (None, 0, None), (0, None, None)]:
        mask = vmap(mask, in_dims=dims, out_dims=0)
    return mask(torch.arange(2), torch.arange(n), torch.arange(n)).float() * x.sum()


def autocast_inside(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return grad(lambda a: (a @ w).float().sum())(x)


def no_grad_around(x):
    with torch.no_grad():
        return grad(cost)(x)


def no_grad_inside(x):
    def f(y):
        with torch.no_grad():
            z = y.exp()
        return (y * z).sum()

    return grad(f)(x)


CASES = [
    (grad_of, [(3, 4)]),
    (grad_with_options, [(3, 4), (2, 4)]),
    (grad_and_value_of, [(3, 4)]),
    (nested_grad, [(3, 4)]),
    (closure, [(3, 4), (2, 4)]),
    (captured_state, [(3, 4)]),
    (vmapped, [(3, 4)]),
    (vmap_dims, [(3, 4), (3,)]),
    (vmap_nested, [(3,), (4,)]),
    (vmap_tree, [(3, 4)]),
    (per_sample, [(3, 4), (4, 2)]),
    (vmap_random, [(3, 4)]),
    (vmap_inplace, [(3, 4)]),
    (vmap_chunked, [(3, 4)]),
    (jacobians, [(3, 4)]),
    (jacobian_of_one_result, [(2, 4), (3, 4)]),
    (jvp_of, [(3, 4)]),
    (jvp_of_several, [(3, 4), (3, 4)]),
    (vjp_of, [(3, 4)]),
    (vjp_twice, [(3, 4), (3, 4)]),
    (vjp_of_what_was_then, [(3,)]),
    (made_outside, [(3, 4)]),
    (passed_around, [(3, 4)]),
    (calls_decorated, [(3, 4)]),
    (meta_learning, [(4, 1), (3, 4)]),
    (old_functional, [(3, 4)]),
    (attention_mask, [(3, 4)]),
    (autocast_inside, [(3, 4), (4, 2)]),
    (no_grad_around, [(3, 4)]),
    (no_grad_inside, [(3, 4)]),
]


@pytest.mark.parametrize("fn, shapes", CASES, ids=lambda value: getattr(value, "__name__", None))
def test_captured(fn, shapes):
    compare(fn, *[P(*shape) for shape in shapes], graphs=1)


def says(x):
    def f(y):
        SAID.append("inside")
        return cost(y)

    return grad(f)(x)


def fills_a_list(x):
    seen = []

    def f(y):
        seen.append(2)
        return cost(y) * len(seen)

    return grad(f)(x), len(seen)


def rebinds(x):
    n = 0

    def f(y):
        nonlocal n
        n += 1
        return cost(y)

    g = grad(f)(x)
    return g, n


def leaks(x):
    kept = {}

    def f(y):
        kept["y"] = 1
        return cost(y)

    return vmap(f)(x), kept


def reads_number(x):
    return grad(lambda y: y.sum() * (y.sum().item() > 0))(x)


def branches(x):
    def f(y):
        if y.sum() > 0:
            return y.sum()
        return -y.sum()

    return grad(f)(x)


def writes_outside(x):
    total = torch.zeros(4)

    def f(y):
        total.add_(1)
        return y.sum()

    return grad(f)(x), total


def writes_argument(x):
    y = x.detach().clone()

    def f(z):
        z.mul_(2)
        return z.sum()

    return grad(f)(y), y


def reads_layout(x):
    return vmap(lambda row: row * row.stride(0), in_dims=1)(x)


def reads_requires_grad(x):
    return grad(lambda y: cost(y) if y.requires_grad else y.sum())(x)


def not_scalar(x):
    return grad(lambda y: y * 2)(x)


def bad_dims(x):
    return vmap(lambda y: y * 2, in_dims=5)(x)


def random_refused(x):
    return vmap(lambda y: y + torch.rand(4))(x)


def identity(x):
    return vmap(lambda y: y)(x)


def raises(x):
    def f(y):
        raise KeyError("inside")

    try:
        return grad(f)(x)
    except KeyError as error:
        return x * 2, str(error)


def vjp_random(x):
    out, pull = vjp(lambda y: torch.dropout(y, 0.5, True), x)
    return pull(torch.ones_like(x)), out


def vjp_written_since(x):
    y = x * 1
    out, pull = vjp(lambda a: a * 3, y)
    y.add_(1)
    return pull(torch.ones_like(x))


BREAKS = [
    (says, "side effect"),
    (fills_a_list, "changes a value made outside"),
    (rebinds, "changes a value made outside"),
    (leaks, "changes a value made outside"),
    (reads_number, "item"),
    (branches, "data-dependent"),
    (writes_outside, "mutate a captured Tensor"),
    (writes_argument, "torch.func.grad"),
    (reads_layout, "under a transform"),
    (reads_requires_grad, "under a transform"),
    (not_scalar, "RuntimeError"),
    (bad_dims, "ValueError"),
    (random_refused, "RuntimeError"),
    (identity, "returns one of its arguments"),
    (raises, "it raises KeyError"),
    (vjp_random, "random numbers"),
    (vjp_written_since, "cannot be rebuilt"),
]


@pytest.mark.parametrize("fn, reason", BREAKS, ids=lambda value: getattr(value, "__name__", None))
def test_breaks(fn, reason):
    compare(fn, P(3, 4), graphs=None, breaks=reason, said=SAID)


def test_transforms_leave_the_region():
    def fn(x):
        f = grad(lambda y: cost(y) * 2)
        magneto.graph_break()
        return f(x)

    compare(fn, P(3, 4), graphs=None)


def test_result_of_vjp_leaves_the_region():
    def fn(x):
        out, pull = vjp(cost, x)
        magneto.graph_break()
        return out, pull(out)

    compare(fn, P(3, 4), graphs=None)


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x, extra=0.0):
        return self.second(self.first(x).tanh()) * self.scale + extra


def make_small():
    torch.manual_seed(0)
    return Small()


def test_module_under_a_transform():
    compare(lambda x, model: vmap(model)(x), P(3, 4), make_small(), graphs=1)


def replaced(x, model):
    mine = {"first.weight": x[:4] * 2, "scale": x.sum()}
    y = functional_call(model, mine, (x,), {"extra": 1.0})
    return y + model(x), functional_call(model, (mine, {"first.bias": x[0]}), x)


def gradient_of_parameters(x, model):
    parameters = dict(model.named_parameters())

    def loss(parameters, row):
        return functional_call(model, parameters, (row,)).pow(2).sum()

    return vmap(grad(loss), in_dims=(None, 0))(parameters, x)


@pytest.mark.parametrize("fn", [replaced, gradient_of_parameters])
def test_functional_call(fn):
    compare(fn, P(4, 4), make_small(), graphs=1)


def test_ensemble():
    models = [make_small() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = models[0]

    def fn(x, parameters):
        return vmap(lambda p, b, v: functional_call(base, (p, b), (v,)), in_dims=(0, 0, None))(parameters, buffers, x)

    compare(fn, P(2, 4), {k: v.detach().clone().requires_grad_() for k, v in parameters.items()}, graphs=1)


def test_inductor():
    compare(per_sample, P(3, 4), P(4, 2), graphs=1, backends=("inductor",))
    compare(nested_grad, P(3, 4), graphs=1, backends=("inductor",))


def recurrence(a, b):
    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    _, states = associative_scan(combine, (a, b * 2), dim=1, combine_mode="generic")
    return states[:, -1] + a.sum()


def running(tree):
    def combine(left, right):
        return {"sum": left["sum"] + right["sum"], "most": torch.maximum(left["most"], right["most"])}

    return associative_scan(combine, tree, dim=0, reverse=True, combine_mode="generic")


@pytest.mark.parametrize("fn, args", [(recurrence, (P(2, 7, 3), P(2, 7, 3))), (running, ({"sum": P(5, 2), "most": P(5, 2)},))])
def test_associative_scan(fn, args):
    compare(fn, *args, graphs=1, backends=("eager", "aot_eager", "inductor"))


def test_associative_scan_by_one_kernel(monkeypatch):
    """What the CPU refuses, a GPU can do when it is compiled: it is followed in the other form."""

    def fn(a, b):
        return associative_scan(lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1]), (a, b * 2), dim=1)[1][:, -1]

    a, b = P(2, 7, 3), P(2, 7, 3)
    with pytest.raises(ValueError, match="pointwise"):
        magneto.optimize("eager")(fn)(a, b)
    magneto.reset()
    monkeypatch.setattr(marked, "SCANS_ON", "cpu")
    state = torch.zeros(2, 3)
    for i in range(7):
        state = a[:, i] * state + b[:, i] * 2
    assert_equal(magneto.optimize("aot_eager", nopython=True)(fn)(a, b), state, 1e-6)


def test_associative_scan_of_a_function_that_breaks():
    def fn(x):
        def combine(left, right):
            SAID.append("combine")
            return left + right

        return associative_scan(combine, (x,), dim=0, combine_mode="generic")[0] * 2

    compare(fn, torch.ones(4), graphs=None, breaks="a side effect")


def test_numbers_beside_mapped_sums_are_compiled():
    """torch converts a number beside a mapped tensor of no dimensions as the tensor it is to it."""

    def program(x):
        return vmap(lambda row, k: (row.sum() + k, row.amax() - 2.5, 3 * (row > 0).sum(), row.sum() > True), in_dims=(0, None))(x, 2)

    magneto.reset()
    x = torch.randn(3, 4)
    assert_equal(magneto.optimize("inductor")(program)(x), program(x), 1e-6)
    assert magneto.stats()["fallbacks"] == 0


def test_what_fails_under_a_transform_prints_nothing(capfd):
    net = torch.nn.BatchNorm1d(3)
    values, buffers = dict(net.named_parameters()), dict(net.named_buffers())

    def program(x):
        return grad(lambda p: functional_call(net, (p, buffers), (x,)).sum())(values)

    with pytest.raises(RuntimeError, match="would mutate a captured Tensor"):
        magneto.optimize("eager")(program)(torch.randn(4, 3))
    assert "Traceback" not in capfd.readouterr().err
