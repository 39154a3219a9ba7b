"""Random numbers of Python and numpy: captured without changing eager's streams. Values, the generators' states after each call, graphs and breaks are compared."""

# ruff: noqa

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import magneto
from magneto.aot_autograd import ahead
from magneto import _C
from tests.compare import Capturing, assert_equal
from tests.python.programs import X

T = torch.Generator()
R, G, S = random.Random(5), np.random.default_rng(7), np.random.RandomState(8)
CASES: list[Any] = []


def states() -> list[str]:
    found = [random.getstate(), R.getstate(), torch.get_rng_state().tolist(), T.get_state().tolist(), G.bit_generator.state]
    return [repr(state) for state in (*found, *[s.get_state(legacy=False)["state"] for s in (S, np.random.mtrand._rand)])]


def seed_all(n: int) -> None:
    np.random.seed(n)
    random.seed(n)
    torch.manual_seed(n)
    T.manual_seed(n + 1)
    R.seed(n)
    G.bit_generator.state = np.random.default_rng(n).bit_generator.state
    S.seed(n)


def add(graphs: int = 1, breaks: int = 0) -> Callable[[Any], Any]:
    """How many graphs and breaks four calls give."""

    def register(fn: Any) -> Any:
        CASES.append(pytest.param(fn, graphs, breaks, id=fn.__name__))
        return fn

    return register


@add()
def pythons_numbers(x):
    return (
        x * random.random(),
        random.uniform(1, 2),
        x + random.randint(1, 5),
        torch.tensor(random.random()),
        random.gauss(0, 1),
        random.getrandbits(9),
    )


@add()
def numpys_numbers(x):
    drawn = torch.from_numpy(np.random.rand(3)).float(), np.random.randn(2), np.random.permutation(5), x * np.random.uniform()
    return drawn, np.random.choice(5), np.random.randint(3), np.random.random(), np.random.normal(size=(2, 2)), np.random.choice([3, 4], 2)


@add()
def generator_objects(x):
    return (
        x * R.random(),
        G.random(3),
        torch.as_tensor(S.rand(2)) + G.normal(),
        R.sample(range(10), 3),
        G.integers(4),
        R.choice([0.5, 1.5]) * x,
    )


@add(graphs=2, breaks=1)
def a_number_decides(x):
    if random.random() < 0.5:
        x = x + 1
    return x * 2


@add()
def arithmetic(x):
    e = np.random.rand(1).item()
    n = int(0.5 * 10 / 2 + e)
    return (
        x * e,
        n,
        max(n, 2),
        -e,
        round(e, 2) if False else e**2,
        1 / (e + 1),
        x * np.random.rand(2).tolist()[0],
        float(np.random.rand(2)[1]),
        e > 2,
    )


@add()
def kinds_of_tensors(x):
    whole, r, i = x.long(), random.random(), random.randint(1, 9)
    return (
        x.sum() * r,
        x.sum() / i,
        whole.sum() + i,
        whole * i,
        x.double() - r,
        r - x,
        i / x.sum(),
        torch.where(x > 0, x, r),
        x.masked_fill(x > 0, r),
    )


@add(graphs=1, breaks=1)
def a_number_as_a_size(x):
    k = random.randint(1, 3)
    return x[:k].sum(), x * k


@add(breaks=1)
def a_number_as_a_key(x):
    names = {1: "a", 2: "b", 3: "c"}
    return names[random.randint(1, 3)], x + 1


@add()
def order_among_the_streams(x):
    a = random.random()
    y = torch.rand(3)
    b = np.random.rand()
    z = torch.rand(3)
    return a, b, random.random(), y, z, x + a, np.random.rand(2)


@add()
def arrays_in_the_graph(x):
    a = np.random.rand(3, 4)
    b = np.random.rand(4)
    b[0] = 5
    t = torch.from_numpy(b)
    t.mul_(2)
    return x.numpy() * a, a + 1, np.random.rand(2) * random.random(), a.T, b, t, np.sort(a[0])


@add()
def a_number_of_a_number(x):
    return random.uniform(0, random.random()), x + np.random.normal(np.random.rand(), 0.5)


@add()
def seeded_generators_are_known(x):
    np.random.seed(3)
    random.seed(4)
    order = np.random.permutation(6)
    chosen = [order[i] for i in range(6) if order[i] not in [1, 2]]
    if random.random() < 0.5:
        x = x * 2
    mixed = [x, 1, "a", 2]
    random.shuffle(mixed)
    numbers = np.arange(5)
    np.random.shuffle(numbers)
    return (
        np.array(chosen, dtype=np.int32),
        x,
        random.choice(chosen),
        np.random.rand(2),
        mixed,
        numbers,
        random.sample(range(9), 2),
        random.choices("ab", k=3),
    )


@add()
def new_generators(x):
    r, g, q = np.random.RandomState(0), np.random.default_rng(1), random.Random(2)
    return x * r.rand(), g.random(2), q.random(), q.randint(1, 5), x[: g.integers(1, 3)], r.permutation(4)


@add()
def draws_before_a_seed(x):
    a, b = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    return x * a + b, random.random(), np.random.rand()


@add(breaks=1)
def a_seed_before_a_break(x):
    random.seed(1)
    a = random.random()
    magneto.graph_break()
    return x + 1, a, random.random()


@add()
def an_error_is_eagers(x):
    try:
        np.random.choice(3, 5, replace=False)
    except ValueError as error:
        return str(error), x + 1, np.random.rand()


@add()
def torch_is_seeded(x):
    torch.manual_seed(3)
    return torch.rand(3) + x[0, 0], torch.nn.functional.dropout(x), torch.initial_seed()


@add(graphs=2, breaks=1)
def torch_is_seeded_in_between(x):
    a = torch.rand(2)
    torch.manual_seed(3)
    return a, torch.rand(3), x + 1


@add()
def torch_is_seeded_at_the_end(x):
    a = torch.rand(2)
    torch.manual_seed(3)
    return a, x + 1


@add()
def generators_of_torch(x):
    y = x.clone()
    y.uniform_(0, 1, generator=T)
    device = torch.device(T.device)
    return (
        torch.rand(3, generator=T),
        torch.randint(5, (2,), generator=T),
        torch.normal(0.0, 1.0, (2,), generator=T),
        y,
        x + 1,
        device,
        torch.rand(2, generator=None),
    )


@add()
def new_generators_of_torch(x):
    g = torch.Generator().manual_seed(5)
    return torch.rand(3, generator=g), torch.randperm(4, generator=g), x.clone().normal_(generator=g), x + 1


@add()
def a_generator_of_torch_is_seeded(x):
    T.manual_seed(7)
    return torch.rand(3, generator=T) + x[0, 0], T.initial_seed()


@add()
def the_default_generator_by_name(x):
    return torch.rand(3), torch.rand(3, generator=torch.default_generator), x + 1


@add(graphs=2, breaks=1)
def a_forked_stream(x):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        a = torch.rand(3)
    return a, torch.rand(2), x + 1


@add()
def a_forked_stream_at_the_end(x):
    with torch.random.fork_rng():
        a = torch.rand(3)
    return a, x + 1


@add(graphs=0)
def a_state_of_torch(x):
    state = T.get_state()
    a = torch.rand(2, generator=T)
    T.set_state(state)
    return a, torch.rand(2, generator=T), state


@add(breaks=1)
def numbers_that_depend_on_data(x):
    return x + 1, torch.bernoulli(x.abs() / 2, generator=T)


class Own(random.Random):
    def random(self):
        return 0.25


OWN = Own()


@add()
def a_subclass_is_followed(x):
    return x * OWN.uniform(0, 1), OWN.random()


@pytest.mark.parametrize("fn, graphs, breaks", CASES)
def test_streams(fn, graphs, breaks):
    backend = Capturing()
    compiled = magneto.optimize(backend)(fn)
    for seed in (1, 2, 3, 4):
        seed_all(seed)
        expected, after = fn(X.clone()), states()
        seed_all(seed)
        assert_equal(compiled(X.clone()), expected)
        assert states() == after
    assert (len(backend.graphs), magneto.stats()["breaks"]) == (graphs, breaks), magneto.stats()["break_reasons"]


def test_a_region_that_fails_puts_the_generators_back():
    def fn(x):
        a, b, c, d = random.random(), np.random.rand(2), G.random(), torch.rand(1)
        try:
            return x[torch.tensor([7]) + (x.sum() * 0).long()]
        except IndexError:
            return a, b, c, d, random.random(), np.random.rand(), G.random()

    compiled = magneto.optimize(Capturing())(fn)
    for seed in (1, 2):
        seed_all(seed)
        expected, after = fn(X), states()
        seed_all(seed)
        assert_equal(compiled(X), expected)
        assert states() == after
    assert _C.counters()["reruns"] > 0


def test_new_generators_are_not_shared():
    def fn(x):
        generator = np.random.RandomState(3)
        return generator, generator.rand(), x + 1

    compiled = magneto.optimize(Capturing(), nopython=True)(fn)
    generators = []
    for _ in range(2):
        generator, number, _ = compiled(X)
        same_numbers = np.random.RandomState(3)
        assert number == same_numbers.rand() and generator.rand() == same_numbers.rand()
        generators.append(generator)
    assert generators[0] is not generators[1]


def test_a_generator_as_argument():
    def fn(x, generator):
        return x * generator.random(), generator.normal(size=2)

    compiled = magneto.optimize(Capturing(), nopython=True)(fn)
    for seed in (1, 2):
        mine, other = np.random.default_rng(seed), np.random.default_rng(seed)
        for _ in range(2):
            assert_equal(compiled(X, mine), fn(X, other))


def test_the_global_generator_as_argument_is_known_by_its_seed():
    def fn(x, generator):
        generator.seed(1)
        return x + generator.random()

    compiled = magneto.optimize(Capturing(), nopython=True)(fn)
    generators = random.Random(), random.Random()
    assert_equal(compiled(X, generators[0]), fn(X, generators[1]))
    assert_equal(compiled(X, generators[0]), fn(X, generators[1]))
    assert generators[0].getstate() == generators[1].getstate()


def test_the_default_generator_as_argument():
    def fn(x, generator):
        a = torch.rand(2)
        b = torch.rand(2, generator=generator)
        return a, b, torch.rand(2), x + 1

    compiled = magneto.optimize(Capturing())(fn)
    for generator in (T, torch.default_generator, torch.Generator().manual_seed(3), None):
        seed_all(1)
        state = generator.get_state() if generator is not None else None
        expected = fn(X, generator)
        seed_all(1)
        if generator is not None and generator is not torch.default_generator:
            generator.set_state(state)
        assert_equal(compiled(X, generator), expected)


def test_a_seeded_region_that_fails():
    def fn(x):
        torch.manual_seed(5)
        a = torch.rand(2)
        T.manual_seed(6)
        b = torch.rand(2, generator=T)
        return a, b, x[torch.tensor([7]) + (x.sum() * 0).long()]

    compiled = magneto.optimize(Capturing())(fn)
    for _ in range(2):
        seed_all(1)
        with pytest.raises(IndexError):
            fn(X)
        expected = states()
        seed_all(1)
        with pytest.raises(IndexError):
            compiled(X)
        assert states() == expected


def test_known_arrays_are_exported_and_draws_are_not():
    def fn(x):
        a = np.arange(4, dtype=np.float32)
        t = torch.from_numpy(a)
        t.add_(x[0])
        return t * 2

    exported, _ = magneto.export(fn, X)
    for _ in range(2):
        assert_equal(exported(X), fn(X))
    with pytest.raises(magneto.UserError, match="rand"):
        magneto.export(lambda x: x * np.random.rand(), X)


def test_a_changed_function_is_another_program(monkeypatch):
    def fn(x):
        return x * random.random()

    compiled = magneto.optimize(Capturing(), nopython=True)(fn)
    compiled(X)
    monkeypatch.setattr(random, "random", lambda: 3.0)
    assert_equal(compiled(X), X * 3.0)


def parts_of_a_result(x):
    """As autoencoders draw: the half of a result lies with gaps, what is drawn for it does not; torch.distributions calls `new` with a size."""
    mean, scale = (x * 2).chunk(2, 1)
    drawn = torch.randn_like(mean), torch.rand_like(scale.double())
    return mean + drawn[0] * scale.exp(), drawn, torch.Tensor(x.shape).shape, x.double().new(x.size()).exponential_()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend, recwarn):
    for fn in (parts_of_a_result, numpys_numbers, kinds_of_tensors, arrays_in_the_graph):
        compiled = magneto.optimize(backend)(fn)
        for seed in (1, 2):
            seed_all(seed)
            expected = fn(X.clone())
            seed_all(seed)
            assert_equal(compiled(X.clone()), expected, 1e-6)
    assert not recwarn.list


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_draws_ahead_of_a_loss_keep_their_order(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of a loss makes a gradient too: what that reads is computed where it stood, or other numbers would be drawn."""

    monkeypatch.setattr(ahead, "WORTH", 16)

    def fn(x, y, w, target):
        encoded = torch.nn.functional.dropout(x, 0.5)
        decoded = torch.nn.functional.dropout(y, 0.5) @ w
        hidden = (decoded + 1) * (encoded @ w)
        return torch.nn.functional.cross_entropy(hidden @ w.t() @ torch.ones(7, 40), target), hidden

    compiled = magneto.optimize(backend)(fn)
    x, y, target = torch.ones(5, 7, requires_grad=True), torch.ones(5, 7), torch.tensor([0, 1, 2, 1, 0])
    w = torch.linspace(-1, 1, 21).view(7, 3).requires_grad_()
    for seed in range(3):
        found = []
        for f in (fn, compiled):
            torch.manual_seed(seed)
            loss, a = f(x, y, w, target)
            found.append((loss, a, *torch.autograd.grad(loss + a.sum(), (x, w))))
        for ours, plain in zip(*found, strict=True):
            torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("bound", [0.0, 1.0, 0, -0.5, 0.3])
def test_a_drawn_number_against_a_bound(bound: float) -> None:
    """LayerDrop by no probability: what is drawn decides nothing, and is drawn."""

    class Layers(torch.nn.Module):
        drop = bound

        def forward(self, x):
            for _ in range(3):
                drawn = torch.rand([])
                if drawn < self.drop or not (torch.rand(()) >= self.drop):
                    continue
                x = x * 2 + torch.rand(2)
            return x

    def scaled(x):
        drawn = torch.rand([])
        drawn.mul_(3.0)
        return x + 1 if drawn < 1.0 else x - 1

    for fn, n in ((Layers(), 1 if bound != 0.3 else None), (scaled, None)):
        magneto.reset()
        compiled = magneto.optimize("eager")(fn)
        for seed in range(4):
            torch.manual_seed(seed)
            expected, state = fn(torch.ones(2)), torch.get_rng_state()
            torch.manual_seed(seed)
            assert_equal(compiled(torch.ones(2)), expected)
            assert torch.equal(torch.get_rng_state(), state)
        assert n is None or (magneto.stats()["graphs"], magneto.stats()["breaks"]) == (n, 0)
