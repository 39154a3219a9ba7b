"""Numbers that tensors give, which nobody needs at capture; checks of data that raise: `assert`, `if bad: raise`.

PYTEST_DONT_REWRITE: the programs' own assertions are what is tested.
"""

# ruff: noqa

from __future__ import annotations

import math
import traceback

import pytest
import torch

import magneto
from tests.compare import Capturing, same
from tests.python.programs import Program, Programs, X, check

programs = Programs()
IDS = torch.tensor([[1, 2, 0], [3, 0, 0]])


class Log:
    def __init__(self):
        self.losses, self.total, self.most = [], 0.0, None


@programs.add(X, Log())
def logged(x, log):
    loss = (x * x).mean()
    log.losses.append(loss.item())
    log.total += loss.item()
    log.most = {"max": float(x.max()), "shape": (x.argmax().item(), x.shape[0])}
    return loss * 2, loss.item()


@programs.add(X, IDS)
def arithmetic(x, ids):
    a, b = x.sum().item(), ids.sum().item()
    return x + 1, a + 1, 2 - a, a * b, -b, abs(a), a > 0.5, b == 6, not b, a <= b, (a, [b, {"k": b + 1}]), ids[0, 0].bool().item()


@programs.add(X, IDS)
def conversions(x, ids):
    y = x * 2
    return (
        y,
        float(y.sum()),
        float(ids.max()),
        int(ids.max()),
        float(ids.max().item()),
        int(ids.sum().item()),
        isinstance(x.sum().item(), float),
    )


@programs.add(X, IDS)
def divided_and_rounded(x, ids):
    total, count = x.sum().item(), ids.ne(0).sum().item()
    mean = total / count
    return (
        x + 1,
        mean,
        total // count,
        count // 4,
        total % 3,
        count % 5,
        round(mean, 2),
        round(count),
        100.0 * count / ids.numel(),
        total / len(x),
        max(total, 0.5),
        min(mean, 1.0, total),
    )


@programs.add(X, IDS)
def functions_of_a_number(x, ids):
    loss = (x * x).mean().item()
    return (
        math.exp(loss),
        math.sqrt(loss),
        math.log(loss + 1),
        math.isnan(loss),
        math.isfinite(loss),
        math.tanh(loss),
        math.exp(min(loss, 20.0)),
    )


@programs.add(X, IDS)
def texts(x, ids):
    loss, hits = x.mean().item(), ids.sum().item()
    line = f"loss {loss:.4f} hits {hits:>5d} {loss!r:>25}|{hits}|{x.shape[0]:03}"
    other = "%.3f of %s, %d%%" % (loss, hits, hits) + " {:8.2e} {n:,}".format(loss, n=hits) + str(loss) + repr(hits)
    return x * 2, line, other, ", ".join([str(loss), "x", f"{hits}"]), len(line), line == other, line != "loss", {"text": line + "!"}


class Meter:
    def __init__(self):
        self.sum, self.n = 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.n += n

    def __str__(self):
        return f"{self.sum / self.n:.4f} ({self.n})"

    def __format__(self, spec):
        return format(self.sum / self.n, spec or ".2f")


@programs.add(X, Meter())
def meters(x, meter):
    meter.update(x.mean().item(), x.shape[0])
    meter.update((x * 2).sum().item())
    return x + 1, str(meter), f"{meter!s:>20} {meter} {meter:.1f}", "%s" % (str(meter),)


@programs.add(X, graphs=None)
def texts_that_are_needed(x):
    name = f"{x.abs().sum().item():.3f}"
    return {name: x}, name.upper(), name[:3], name * 2, name < "a", "." in name, not name, sorted([name, "3"])


@programs.add()
def written_after_it_was_asked(x):
    y = x.sum()
    before = y.item()
    y += 1
    y.mul_(2)
    return before, y.item(), y


@programs.add(X, IDS)
def asserted(x, ids):
    lengths = (ids != 0).sum(1)
    assert lengths.max().item() <= ids.shape[1], f"too long: {lengths.tolist()}"
    assert torch.all(ids >= 0).item()
    assert not x.isnan().any(), "NaN"
    return x * 2 + lengths.sum()


@programs.add()
def checked(x):
    if (x > 100).any():
        worst = x.max().item()
        raise ValueError(f"too large: {worst}")
    if x.shape[0] > 2 and x.isnan().any():
        raise ValueError("NaN" if x.dim() == 2 else "?")
    return x.sqrt().nan_to_num()


@programs.add()
def checked_in_a_loop(x):
    for k in range(3):
        row = x[k]
        if torch.isinf(row).any():
            torch._assert(False, f"row {k}")
        x = x + row
    return x


@programs.add()
def checked_in_a_handler(x):
    try:
        assert x.sum() < 1000
        y = x + 1
    except AssertionError:
        y = x - 1
    return y


@programs.add(X, graphs=None)
def needed_after_all(x):
    n = x.abs().sum().item()
    y = x * n
    if n > 1:
        y = y + 1
    return y, [1, 2, 3][int(n) % 3], range(int(n)), f"{n:.2f}", n is True, {round(n, 3): 1}, n // 2, max(n, 2)


@programs.add(IDS, graphs=None)
def integers_needed(ids):
    n = ids.max().item()
    return (
        torch.zeros(n),
        ids[:, :n],
        list(range(n)),
        [4, 5, 6, 7][n],
        {n: 1}[3],
        n in (3, 4),
        hash(n),
        n << 2,
        "a" * n,
        n is None,
        n.bit_length(),
    )


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)


def shouts(x, said):
    said.append("before")
    y = x.sin() + torch.rand(4)
    assert y.sum() < 100, "large"
    assert (x > -50).all()
    said.append("after")
    return y * 2


def calls(x, said):
    try:
        return shouts(x, said)
    finally:
        said.append("left")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_is_assumed_fails(backend):
    """The program's own exception at its own line, once; nothing is done twice, no random number is lost, and there is a break from then on."""
    fn, compiled = calls, magneto.optimize(backend)(calls)

    def run(fn, x):
        torch.manual_seed(3)
        said: list[str] = []
        try:
            got = fn(x, said)
        except AssertionError as error:
            lines = [(entry.name, entry.line) for entry in traceback.extract_tb(error.__traceback__) if entry.filename == __file__]
            got = str(error), lines[1:]
        return got, said, torch.get_rng_state()

    good, bad, worse = torch.ones(4), torch.full((4,), -60.0), torch.full((4,), torch.inf)
    for x in (good, bad, good, worse, bad, good):
        wanted, found = run(fn, x), run(compiled, x)
        if backend == "eager" or x is not good:
            assert str(wanted) == str(found)
        else:
            torch.testing.assert_close(found[0], wanted[0])
            assert found[1] == wanted[1]
    assert magneto.stats()["breaks"] >= 1


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_the_graph_has_written_is_put_back(backend):
    def fn(x, norm):
        x.add_(1)
        assert x.sum() < 100
        return norm(x) * 2

    def later(x, norm):
        assert x.sum() < 100
        y = norm(x * 1)
        x.add_(1)
        assert x.sum() < 200
        return y

    for program in (fn, later):
        magneto.reset()
        compiled = magneto.optimize(backend)(program)
        norms = [torch.nn.BatchNorm1d(4) for _ in range(2)]
        for start, good in ((0.0, True), (1000.0, False), (0.0, True), (7.0, True)):
            one, other = X.clone() + start, X.clone() + start
            for f, x, norm in ((program, one, norms[0]), (compiled, other, norms[1])):
                try:
                    assert f(x, norm) is not None and good
                except AssertionError:
                    assert not good
            torch.testing.assert_close(one, other)
            for name, buffer in norms[0].named_buffers():
                torch.testing.assert_close(dict(norms[1].named_buffers())[name], buffer)
        assert magneto.stats()["breaks"] >= 1  # since it failed


def test_nothing_is_assumed_where_a_write_cannot_be_taken_back():
    def fn(x, w):
        y = x * 2
        y.mul_(w)
        assert y.sum() < 100
        return y * 2

    def recorded(y, w):
        y.mul_(w)
        assert y.sum() < 1e9
        return y * 2

    w = torch.ones(4, requires_grad=True)
    for program, breaks in ((fn, 0), (recorded, 1)):
        magneto.reset()
        compiled = magneto.optimize("eager")(program)
        assert torch.equal(compiled(X * 1, w), program(X * 1, w))
        assert magneto.stats()["breaks"] == breaks


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_whole_step_that_fails_a_check_leaves_parameters_and_statistics(backend):
    def trained(compiled):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 3))
        optimiser = torch.optim.Adam(net.parameters(), 0.1)

        @compiled
        def step(x, action):
            chosen = torch.distributions.Categorical(logits=net(x))
            loss = -chosen.log_prob(action).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            return loss.detach()

        breaks = []
        for bad in (0, 0, 0, 1, 0, 2, 0):
            x, action = torch.randn(5, 4), torch.randint(0, 3, (5,))
            x[0, 0] = float("nan") if bad == 1 else x[0, 0]
            action[1] = 7 if bad == 2 else action[1]
            try:
                yield step(x, action)
            except ValueError as error:
                yield list(str(error)[:40].encode())
            breaks.append(magneto.stats()["breaks"])
            yield [t.clone() for t in net.state_dict().values()], [p.grad.clone() for p in net.parameters()], torch.get_rng_state()
            yield [{k: t.clone() for k, t in state.items()} for state in optimiser.state.values()]
            if bad:
                net[1].reset_running_stats()
        yield breaks[2]

    *expected, _ = trained(lambda fn: fn)
    *found, breaks = trained(magneto.optimize(backend))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert not breaks


def test_what_may_raise_is_assumed_not_to():
    """Quotients, exponentials and logarithms are in the region until a number does not allow them; then the program's own error comes from its line."""

    def ratio(x):
        return 1 / x.sum().item(), x + 1

    def perplexity(x):
        return math.exp(x.sum().item()), x + 1

    def logarithm(x):
        try:
            return math.log(x.sum().item())
        except ValueError as error:
            return str(error), x + 1

    for program, good, bad in ((ratio, X, X * 0), (perplexity, X, X * 0 + 1000), (logarithm, X.abs(), -X.abs())):
        magneto.reset()
        compiled = magneto.optimize("eager")(program)
        same(program, compiled, good)
        assert magneto.stats()["breaks"] == 0
        for x in (bad, good, bad):
            outcomes = []
            for fn in (program, compiled):
                try:
                    outcomes.append(repr(fn(x)))
                except ArithmeticError as error:
                    outcomes.append(f"{error!r} {traceback.extract_tb(error.__traceback__)[-1].lineno}")
            assert outcomes[0] == outcomes[1]


def test_a_number_that_is_needed_breaks_where_it_is_asked():
    def fn(x):
        n = x.sum().item()
        y = x.sin()
        if n > 0:
            return y + 1
        return y - 1

    backend = Capturing()
    compiled = magneto.optimize(backend)(fn)
    same(fn, compiled, X)
    assert ["Tensor.item" in str(reason) for reason in magneto.stats()["break_reasons"]] == [True]
    same(fn, compiled, X - 5)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_checks_of_torch_are_assumed(backend):
    """`torch._check` and its like on what depends on data (transformers asks whether numbers of tokens agree)."""

    def fn(x):
        y = x * 2
        torch._check_tensor_all_with(ValueError, y > 0, lambda: "not positive")
        torch._check_tensor_all(y < 100)
        torch._check((y.sum() < 50).item(), lambda: f"large {x[0].item()}")
        torch._check_index(x.dim() == 1)
        return y + 1

    compiled = magneto.optimize(backend)(fn)
    good = torch.full((4,), 3.0)
    assert torch.equal(compiled(good), fn(good)) and torch.equal(compiled(good), fn(good))
    assert (magneto.stats()["graphs"], magneto.stats()["breaks"]) == (1, 0)
    for x in (torch.full((4,), -1.0), good, torch.full((4,), 70.0), torch.full((4,), 20.0), torch.full((4, 4), 0.1), good):
        found = []
        for f in (fn, compiled):
            try:
                found.append(str(f(x)))
            except Exception as error:
                found.append(f"{type(error).__name__} {error}")
        assert found[0] == found[1]


def test_sizes_are_checked_without_a_break():
    def fn(x, n):
        torch._check_is_size(n, max=5)
        return x * n

    compiled = magneto.optimize("eager")(fn)
    for n in (1, 2, 0, -1, 6):
        same(fn, compiled, X, n)
    assert not any("_advise" in str(reason) for reason in magneto.stats()["break_reasons"])
