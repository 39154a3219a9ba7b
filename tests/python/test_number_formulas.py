"""Numbers that change from call to call as options of activations, losses, dropout, batch norm and random numbers: captured twice at most, with eager's results, gradients, errors and random numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import magneto
from tests.compare import Capturing, assert_equal

X = torch.linspace(-3, 3, 24).reshape(4, 6)
X[1, 2], X[2, 0] = 0.0, 0.5
Y = X.flip(0).sin() * 2
TARGET = torch.tensor([0, 5, -100, 2])
SIGNS = torch.where(torch.arange(24).reshape(4, 6) % 3 > 0, 1.0, -1.0)
FLOATS = tuple(0.125 * n + 0.15 for n in range(8))
SHARES = (0.1, 0.5, 0.75, 0.9, 0.3)
INTS = (2, 3, 5, -1, 7, 4, 0, 11)

CASES: list[tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]] = []


def case(values: Sequence[Any], special: Sequence[Any] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`special`: values with decisions or errors of their own."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append((fn, values, special))
        return fn

    return register


ODD = (0.0, -0.0, -0.5, math.inf, -math.inf, math.nan, 1.0, 2, 0)


@case(FLOATS, ODD)
def slopes(x, y, s):
    return F.leaky_relu(x, s), F.leaky_relu(y, negative_slope=s, inplace=False)


@case(FLOATS, ODD)
def slopes_in_place(x, y, s):
    return F.leaky_relu(x * 1, s, inplace=True), F.elu(y * 1, s, inplace=True)


@case(FLOATS, ODD)
def exponential_units(x, y, a):
    return F.elu(x, a), F.elu(y, a) * 2


@case(FLOATS, ODD)
def continuous_units(x, y, a):
    return F.celu(x, a), torch.celu(y, alpha=a), torch.celu_(x * 2, a)


@case(FLOATS, ODD)
def soft(x, y, b):
    return F.softplus(x, b), F.softplus(x * 30, beta=1 + b, threshold=10 * b), F.softplus(y, threshold=b)


@case(FLOATS, ODD[:-4] + (1.0, 2))
def bounds(x, y, c):
    return F.hardtanh(x, -c, c), F.hardtanh(y, max_val=c), F.hardtanh(x * 1, -c, c, inplace=True)


@case(FLOATS, ODD)
def thresholds(x, y, t):
    return F.threshold(x, t, 0.25), F.threshold(y, 0.5, t), F.threshold(x * 1, t, t, inplace=True), F.hardshrink(y, t)


@case(FLOATS, ODD)
def shrunk(x, y, t):
    return F.softshrink(x, t), F.softshrink(y * y, t)


@case(FLOATS, ODD)
def robust_losses(x, y, d):
    return (
        F.huber_loss(x, y, delta=d),
        F.huber_loss(x, y, "none", d),
        F.huber_loss(x, y, reduction="sum", delta=d),
        F.smooth_l1_loss(x, y, beta=d),
        F.smooth_l1_loss(x, y, reduction="none", beta=d),
        F.smooth_l1_loss(x, y, reduction="sum", beta=d),
    )


@case(SHARES, (0.0, 1.0, -0.5, 1.5, math.nan))
def smoothing(x, y, s):
    weight = torch.arange(6.0) + 1
    shares = y.softmax(1)
    return (
        F.cross_entropy(x, TARGET, label_smoothing=s),
        F.cross_entropy(x, TARGET, weight, label_smoothing=s),
        F.cross_entropy(x, TARGET, weight, reduction="none", label_smoothing=s),
        F.cross_entropy(x, TARGET, reduction="sum", ignore_index=2, label_smoothing=s),
        F.cross_entropy(x, shares, label_smoothing=s),
        F.cross_entropy(x.reshape(2, 6, 2), TARGET.reshape(2, 2), label_smoothing=s),
    )


@case(FLOATS, ODD)
def margins(x, y, m):
    return (
        F.margin_ranking_loss(x, y, SIGNS, margin=m),
        F.margin_ranking_loss(x, y, SIGNS, m, reduction="none"),
        F.hinge_embedding_loss(x, SIGNS, margin=m),
        F.hinge_embedding_loss(y, SIGNS, m, reduction="none"),
    )


@case(FLOATS, ODD)
def margins_of_distances(x, y, m):
    return (
        F.cosine_embedding_loss(x, y, SIGNS[:, 0], margin=m),
        F.cosine_embedding_loss(x, y, SIGNS[:, 0], m, reduction="none"),
        F.triplet_margin_loss(x, y, x.flip(0), margin=m),
        F.triplet_margin_loss(x, y, x.flip(1), m, swap=True, reduction="none"),
    )


@case(SHARES, (0.0, 1.0, -0.5, 1.5, math.nan, 0, 1))
def dropped(x, y, p):
    return (
        F.dropout(x, p),
        F.dropout(y.t(), p, training=True),
        F.dropout(x, p) * 2,
        F.dropout(x, p, training=False),
        F.dropout(x * 1, p, inplace=True),
        F.dropout2d(x[:, :, None, None].expand(4, 6, 2, 2), p),
    )


@case(FLOATS, (0.0, -1.0, math.inf))
def widths(x, y, s):
    e = torch.empty
    return (
        e(4, 5).normal_(0, s),
        torch.normal(0.0, s, (3, 2)),
        torch.normal(x.detach(), s),
        e(40).normal_(s, 2 * s),
        x + e(2, 1).normal_(std=s),
    )


@case(FLOATS, (0.0, -1.0, math.inf))
def ranges(x, y, s):
    e = torch.empty
    return e(4, 5).uniform_(-s, s), e(3).uniform_(s, 3.0), (x * 2).uniform_(0, s), e(3, dtype=torch.float64).uniform_(to=s)


@case(SHARES, (0.0, 1.0, -0.5, 1.5))
def coins(x, y, p):
    return torch.empty(4, 5).bernoulli_(p), torch.bernoulli(x.detach(), p), x * torch.empty(6).bernoulli_(1 - p).div_(1 - p + 1e-3)


@case(FLOATS, (0.0, -1.0))
def rates(x, y, r):
    e = torch.empty
    return e(9).exponential_(r), e(9).log_normal_(0, r), e(9).cauchy_(0, sigma=r)


@case(SHARES, (0.0, 1.0, -1.0))
def first_successes(x, y, p):
    return torch.empty(9).geometric_(p)


@case((*range(5, 13),), (0, 1, -3, 2**40))
def whole_numbers(x, y, n):
    return (
        torch.randint(0, n, (5,)),
        torch.randint(n, (2, 3)),
        torch.randint(-n, n + 2, (20,)),
        torch.empty(9, dtype=torch.long).random_(2, n),
    )


@case(INTS)
def shifted(x, y, n):
    return x.roll(n, 1), torch.roll(y, (n, 1), (0, -1)), x.roll(-n), torch.roll(x, shifts=(n, n + 1), dims=(1, 0)), TARGET.roll(n, 0)


@case(FLOATS)
def reversed_difference(x, y, s):
    return torch.rsub(x, s), torch.where(x > 0, s, y), torch.where(x > 0, s, -s), torch.where(x > 0, 0.0, s)


@case(FLOATS, ODD)
def momentum(x, y, m):
    mean, var = torch.linspace(0, 1, 6), torch.linspace(1, 2, 6)
    result = F.batch_norm(x, mean, var, y[0], y[1], training=True, momentum=m)
    return result, mean, var, F.batch_norm(y, mean, var, training=False, momentum=m)


EXPONENTIALS = (slopes_in_place, exponential_units, continuous_units, soft)
"""Their kernels' exponentials differ in the last bit from those of `exp`."""


def run(fn, value):
    """Results, gradients and the state of the random stream; or the error."""
    torch.manual_seed(3)
    x, y = (t.clone().requires_grad_() for t in (X, Y))
    try:
        results = fn(x, y, value)
        results = results if isinstance(results, tuple) else (results,)
        total = sum(((r * (1 + k)).sum() for k, r in enumerate(results) if r.requires_grad), torch.zeros(()))
        grads = torch.autograd.grad(total, (x, y), allow_unused=True) if total.requires_grad else ()
    except Exception as error:
        return type(error), str(error)
    return [r.detach() for r in results], list(grads), torch.get_rng_state()


def compare(found, expected, tolerance, loose):
    if isinstance(expected[0], type):
        assert found == expected
        return
    assert_equal(found[0], expected[0], tolerance)
    assert_equal(found[1], expected[1], loose)
    assert torch.equal(found[2], expected[2]), "random numbers"


@pytest.mark.parametrize(("fn", "values", "special"), CASES, ids=[fn.__name__ for fn, _, _ in CASES])
def test_few_graphs(fn, values, special):
    backend = Capturing()
    compiled = magneto.optimize(backend)(fn)
    for value in values:
        compare(run(compiled, value), run(fn, value), 0, 0)
    assert len(backend.graphs) == 2, len(backend.graphs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(("fn", "values", "special"), CASES, ids=[fn.__name__ for fn, _, _ in CASES])
def test_compiled(fn, values, special, backend):
    compiled = magneto.optimize(backend)(fn)
    exact = 1e-6 if fn in EXPONENTIALS else 0
    tolerances = {"eager": (0, 0), "aot_eager": (exact, 3e-6), "inductor": (3e-6, 3e-6)}[backend]
    for value in values[:4]:
        compare(run(compiled, value), run(fn, value), *tolerances)
    assert magneto.stats()["graphs"] == 2 and magneto.stats()["fallbacks"] == 0
    magneto.config.recompile_limit = 64  # put back by the fixture
    for value in special:
        compare(run(compiled, value), run(fn, value), *tolerances)


MODULES: list[tuple[Callable[[], nn.Module], str, Sequence[Any]]] = [
    (lambda: nn.Dropout(0.5), "p", SHARES),
    (lambda: nn.LeakyReLU(), "negative_slope", FLOATS),
    (lambda: nn.Hardtanh(-0.1, 0.1), "max_val", FLOATS),
    (lambda: nn.Softplus(), "beta", FLOATS),
    (lambda: nn.BatchNorm1d(6), "momentum", SHARES),
    (lambda: nn.BatchNorm1d(6, momentum=None), "unused", SHARES),
    (lambda: nn.BatchNorm1d(6).eval(), "momentum", SHARES),
    (lambda: nn.Dropout(0.5).eval(), "p", SHARES),
]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(("make", "name", "values"), MODULES, ids=[f"{make().__class__.__name__}.{name}" for make, name, _ in MODULES])
def test_attributes_of_modules(make, name, values, backend):
    plain, ours = make(), make()
    compiled = magneto.optimize(backend)(lambda module, x: module(x).sin())
    for value in values:
        for module in (plain, ours):
            setattr(module, name, value)
        (a, b) = (X.clone().requires_grad_() for _ in range(2))
        torch.manual_seed(5)
        expected = plain(a).sin()
        torch.manual_seed(5)
        found = compiled(ours, b)
        assert_equal(found, expected, 0 if backend != "inductor" and name != "beta" else 2e-6)
        found.sum().backward()
        expected.sum().backward()
        assert_equal(b.grad, a.grad, 2e-6)
        assert_equal(dict(ours.state_dict()), dict(plain.state_dict()), 0 if backend != "inductor" else 1e-6)
    stats = magneto.stats()
    assert stats["graphs"] <= 2 and not stats["breaks"] and not stats["fallbacks"], stats


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types(dtype, backend):
    def fn(x, y, s):
        a = F.leaky_relu(x, s), F.hardtanh(x, -s, s), F.threshold(x, s, s), F.hardshrink(y, s), F.softshrink(x, s)
        return *a, F.dropout(x, s / 2), x * torch.where(y > 0, s, 1.0).to(x.dtype)

    compiled = magneto.optimize(backend)(fn)
    x, y = X.to(dtype), Y.to(dtype)
    for s in FLOATS[:4]:
        torch.manual_seed(1)
        expected = fn(x, y, s)
        torch.manual_seed(1)
        assert_equal(compiled(x, y, s), expected, 1e-6 if dtype is torch.float64 else 1e-2 if backend == "inductor" else 0)
    assert magneto.stats()["graphs"] == 2 and magneto.stats()["fallbacks"] == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_under_autocast(backend):
    """Half precision comes from layers, and goes into a loss that is computed in single precision."""

    def step(x, s):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = F.dropout(F.leaky_relu(x @ Y.t(), s), s)
            return (
                F.cross_entropy(hidden @ Y, TARGET, label_smoothing=s),
                F.softplus(hidden, s),
                F.huber_loss(hidden.float(), X[:, :4], delta=s),
            )

    compiled = magneto.optimize(backend)(step)
    for s in FLOATS[:5]:
        rows = []
        for call in (step, compiled):
            torch.manual_seed(2)
            x = X.clone().requires_grad_()
            results = call(x, s)
            (gradient,) = torch.autograd.grad(sum(r.sum() for r in results), x)
            rows.append(([r.detach() for r in results], gradient))
        assert_equal(rows[1][0], rows[0][0], 0 if backend != "inductor" else 2e-2)
        assert_equal(rows[1][1], rows[0][1], 0 if backend == "eager" else 3e-2)
    assert magneto.stats()["fallbacks"] == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_whole_step(backend):
    """With a batch norm that averages over all batches, and an update of the parameters behind it: no break."""

    def run(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, momentum=None), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(8, 6)
        )
        optimiser = torch.optim.AdamW(model.parameters(), 0.01, foreach=True)

        def step(x, s):
            optimiser.zero_grad()
            loss = F.cross_entropy(model(x), TARGET, label_smoothing=s)
            loss.backward()
            optimiser.step()
            return loss.detach()

        call, rows = wrap(step), []
        for k in range(1, 8):
            model[2].negative_slope, model[3].p, optimiser.param_groups[0]["lr"] = 0.1 * k, 0.1 * k, 0.01 / k
            torch.manual_seed(k)
            rows.append(call(X + k, 0.1 * k))
        return [*rows, *[t.detach() for t in model.state_dict().values()]]

    expected, found = run(lambda fn: fn), run(magneto.optimize(backend, nopython=True))
    assert_equal(found, expected, 0 if backend != "inductor" else 1e-5)
    assert magneto.stats()["graphs"] <= 3 and magneto.stats()["fallbacks"] == 0


def test_layouts_of_dropout():
    """Random numbers are drawn in the order of memory."""

    def fn(x, p):
        return F.dropout(x, p), F.dropout(x.permute(0, 2, 3, 1), p), F.dropout(x[:, :, ::2], p), F.dropout(x[:, :1].expand(2, 4, 6, 5), p)

    compiled = magneto.optimize("aot_eager")(fn)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.rand(2, 3, 6, 5)[:, :1].expand(2, 3, 6, 5).contiguous(memory_format=memory_format)
        for p in SHARES:
            torch.manual_seed(1)
            expected = fn(x, p)
            torch.manual_seed(1)
            found = compiled(x, p)
            assert_equal(found, expected, 0)
            assert [t.stride() for t in found] == [t.stride() for t in expected]


def test_a_constant_stays_one():
    """A first value, and one that never changes, is in the graph as it is."""
    backend = Capturing()
    compiled = magneto.optimize(backend)(lambda x: F.leaky_relu(F.dropout(x, 0.25), 0.2) + F.huber_loss(x, x * 2, delta=0.5))
    for _ in range(3):
        compiled(X)
    assert backend.operations() == [["dropout", "leaky_relu", "mul", "huber_loss", "add"]]


def test_errors_are_torchs():
    """Of arguments that do not fit, where the number changes."""

    def fn(x, y, s):
        return F.huber_loss(x, y, delta=s), F.cosine_embedding_loss(x, y, torch.ones(3), margin=s)

    compiled = magneto.optimize("aot_eager")(fn)
    for s in FLOATS[:4]:
        for other in (Y, Y[:, :5], Y.double()):
            outcomes = []
            for call in (fn, compiled):
                with pytest.raises((RuntimeError, ValueError)) as found, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call(X, other, s)
                outcomes.append(str(found.value))
            assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "fn",
    [lambda x, y, s: F.smooth_l1_loss(x, y, beta=s), lambda x, y, s: F.huber_loss(x, y, delta=s)],
    ids=["smooth_l1", "huber"],
)
def test_what_is_no_option(fn, backend):
    """Constants that eager refuses."""
    for s in (-0.5, math.nan):
        texts = []
        for call in (lambda x, y, s=s: fn(x, y, s), magneto.optimize(backend)(lambda x, y, s=s: fn(x, y, s))):
            with pytest.raises(RuntimeError) as found:
                call(X, Y)
            texts.append(str(found.value))
        assert texts[0] == texts[1]
