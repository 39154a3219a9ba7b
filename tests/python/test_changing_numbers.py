"""Numbers that differ from call to call: the second value makes them inputs of the graph, and further values compile nothing."""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import magneto
from tests.compare import Capturing, assert_equal, same

X = torch.linspace(0.1, 2, 12).reshape(3, 4)
INTS = tuple(range(2, 16))
FLOATS = tuple(0.25 * n + 0.1 for n in range(14))

CASES: list[tuple[Callable[..., Any], Sequence[Any], int]] = []


def case(values: Sequence[Any], graphs: int = 2) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds fn(X, value) for all values; at most so many graphs."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append((fn, values, graphs))
        return fn

    return register


@case(INTS)
def int_operand(x, n):
    return x * n + 1 - n


@case(FLOATS)
def float_operand(x, lr):
    return x - lr * x.sin() / lr


@case(FLOATS)
def half_precision(x, s):
    return x.to(torch.bfloat16) * s, x.half() + s, x.double() / s


@case(INTS)
def integer_tensors(x, n):
    return x.long() * n, (x > 1) + n, x.int() // n if False else x.int() - n, x.long() / n


@case(FLOATS, graphs=8)
def float_with_integer_tensor(x, s):  # the type of the result depends on torch's treatment of Python numbers: by value
    return x.long() * s


@case(FLOATS, graphs=8)
def no_dimensions(x, s):
    return x.sum() * s


@case(FLOATS)
def in_place(x, s):
    y = x.clone()
    y += s
    y.mul_(s).add_(s)
    y /= s
    return y


@case(FLOATS)
def comparisons(x, s):
    return x > s, s <= x, torch.where(x > s, x, s), x.masked_fill(x < s, s)


@case(FLOATS)
def as_a_tensor(x, s):
    t = torch.tensor(s)
    t += 1
    return t, torch.tensor(s), x * t


@case(INTS)
def computed(x, step):
    lr = 0.1 * (1 - 0.9**step) / math.sqrt(1 + step // 3)
    return x * lr, step / 2, -step, lr


@case(range(2, 40), graphs=3)
def every_tenth(x, step):
    if step % 10 == 0:
        return x * 2
    return x + step


@case(range(2, 40), graphs=3)
def from_then_on(x, step):
    return x * 2 if step > 20 else x + step


@case((*INTS, 0, -1, -2), graphs=4)
def sign(x, n):
    if n:
        return x * n if n > 0 else x - n
    return x


@case([n / 10 for n in range(30)], graphs=3)
def float_threshold(x, s):
    return x * s if s < 1.5 else x + s


@case(INTS)
def warm_up(x, step):
    return x * min(step / 10, 1.0)


@case(INTS)
def bits_and_rests(x, n):
    return x * (n & 3) + (n | 8) - (n ^ 5), x * (1 << n % 4) + (n >> 1) + ~n, x * round(n / 3, 2)


@case((*FLOATS, 0.5, -1.5))
def quotients_and_rests(x, s):
    y = x * 10
    return y // s, y % s, torch.fmod(y, s), s // x, s % x, torch.floor_divide(y, s), y.to(torch.bfloat16) % s, y.clone().remainder_(s)


@case((*INTS, -3))
def quotients_of_integers(x, n):
    y = (x * 10).long()
    return y // n, y % n, y.int() // n, torch.fmod(y, n), y.clone().floor_divide_(n)


@case(FLOATS)
def between(x, s):
    first = x[0, 0], x[0, 0].clone().lerp_(x[1, 1], 1 - s), x[0, 0].double().lerp(x[1, 1].double(), s)
    return *first, torch.lerp(x, x + 1, s), x.lerp(x.exp(), s), x.clone().lerp_(x.sin(), 1 - s), x.half().lerp(x.half() + 1, 0.5)


@case((3, 4, 5.5, 6.5, True, 2**40, -7, 2, 3.0), graphs=7)
def types_change(x, n):
    return x * n


@case((1.5, 2.5, math.inf, -math.inf, 3.5, 0.0, -0.0), graphs=7)
def special_values(x, s):
    return x * s, s, 1 / x * s


@case((2, 3, 0, 4, 0, 5), graphs=3)
def may_raise(x, n):
    return x * (1 / n)


@case((2, 3, -2, 4, -3), graphs=3)
def type_of_a_power(x, n):
    return x * 2**n, 2**n


@case(INTS)
def power_of_a_negative_number(x, n):
    return x + (-2) ** n, (-1.5) ** x[0].round(), (-1) ** n


@case(INTS)
def in_a_callee(x, n):
    def scale(y, by):
        return y * by

    return scale(scale(x, n), n + 1)


@case((2**62, 2**63, 2**64, 3, 4))
def beyond_64_bits(x, n):
    return x + n


@case(INTS)
def with_a_break_between(x, n):
    y = x * n
    magneto.graph_break()
    return y + n


@pytest.mark.parametrize(("fn", "values", "graphs"), CASES, ids=[fn.__name__ for fn, _, _ in CASES])
def test_few_graphs(fn, values, graphs):
    backend = Capturing()
    compiled = magneto.optimize(backend)(fn)
    breaks = fn.__name__ == "with_a_break_between"
    magneto.config.recompile_limit, before = 64, magneto.config.recompile_limit
    try:
        for value in values:
            same(fn, compiled, X, value)
    finally:
        magneto.config.recompile_limit = before
    if graphs < 8:
        assert len(backend.graphs) <= graphs * (1 + breaks)


_OF_WHOLE_NUMBERS = (int_operand, integer_tensors, computed, bits_and_rests, quotients_of_integers)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "fn",
    [
        *(
            int_operand,
            float_operand,
            half_precision,
            integer_tensors,
            in_place,
            comparisons,
            as_a_tensor,
            computed,
            power_of_a_negative_number,
        ),
        *(bits_and_rests, quotients_of_integers, between),
    ],
)
def test_compiled(fn, backend):
    compiled = magneto.optimize(backend)(fn)
    for value in (2, 3, 7) if fn in _OF_WHOLE_NUMBERS else (0.5, 1.25, 0.3):
        same(fn, compiled, X, value, tolerance=1e-6 if backend == "inductor" and fn is not half_precision else 4e-3)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_gradients(backend):
    def loss(x, s):
        return (x * s).sin().sum() / x.numel() + (x / s).sum()

    compiled = magneto.optimize(backend)(loss)
    for s in (0.5, 0.75, 2.5):
        plain, ours = X.clone().requires_grad_(), X.clone().requires_grad_()
        loss(plain, s).backward()
        compiled(ours, s).backward()
        assert_equal(ours.grad, plain.grad, 1e-6)


class Stepping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.step = 0
        self.rate = 0.5
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        self.step += 1
        if self.step % 7 == 0:
            self.rate = self.rate / 2
            x = x + 1
        return self.linear(x) * (1 + self.step / 100) * self.rate


def test_counters_of_a_module():
    plain = Stepping()
    backend = Capturing()
    compiled = magneto.optimize(backend)(copy.deepcopy(plain))
    for _ in range(40):
        assert_equal(compiled(X), plain(X))
        assert (compiled.step, compiled.rate) == (plain.step, plain.rate)
    assert len(backend.graphs) <= 5


def test_a_loop_with_a_break_compiles_few_regions():
    def steps(x, n):
        seen = []
        for i in range(n):
            x = x * i + 1
            seen.append(float(x.sum()))
        return x, seen

    backend = Capturing()
    compiled = magneto.optimize(backend)(steps)
    same(steps, compiled, X, 12)
    assert len(backend.graphs) <= 6


def test_dynamic_says_how():
    never, always = Capturing(), Capturing()
    for n in (2, 3, 4):
        magneto.optimize(never, dynamic=False)(int_operand)(X, n)
    compiled = magneto.optimize(always, dynamic=True)(int_operand)
    for n in (2, 3, 4):
        same(int_operand, compiled, X, n)
    assert len(always.graphs) == 1
    by_value = magneto.optimize(never, dynamic=False)(int_operand)
    before = len(never.graphs)
    for n in (2, 3, 4):
        same(int_operand, by_value, X, n)
    assert len(never.graphs) - before == 3


def test_the_condition_is_in_the_guards_and_in_the_explanation():
    compiled = magneto.optimize("eager")(every_tenth)
    for n in (2, 3, 10):
        compiled(X, n)
    shown = str(magneto.inspect(compiled))
    assert "(L['step'] % (10)) == 0) is True" in shown
    assert "(L['step'] % (10)) == 0) is False" in shown


def test_a_whole_number_of_a_changing_one_is_guarded_by_itself():
    def fn(x, share):
        n = int(share * 4)
        return x[:n] * 2, n

    backend = Capturing()
    compiled = magneto.optimize(backend, nopython=True)(fn)
    for share in (0.5, 0.6, 0.55, 0.74, 0.5, 0.51):
        assert_equal(compiled(X, share), fn(X, share))
    assert len(backend.graphs) == 2  # the first constant, then all that give 2
    assert_equal(compiled(X, 0.8), fn(X, 0.8))
    assert len(backend.graphs) == 3


_LOGGER = logging.getLogger("magneto.tests")


class Meter:
    """The average that training scripts print."""

    def __init__(self) -> None:
        self.total, self.count, self.name, self.shown = 0.0, 0, "loss", list[Any]()

    def update(self, value, n=1):
        self.total += value * n
        self.count += n

    @property
    def average(self):
        return self.total / max(self.count, 1)

    def __str__(self):
        return f"{self.name} {self.average:.4f} of {self.count}"


def averages(x, meter):
    meter.update(x.mean().item(), len(x))
    meter.shown.append((meter.average, meter.total / meter.count, x.sum().item() // meter.count, x.sum().item() % meter.count))
    meter.shown.append(meter.total / (1 - 0.9**meter.count))
    return x * 2


def texts(x, meter):
    n = meter.count = meter.count + 1
    print("step", n, "rate", 0.1 / n, str(meter), flush=True)
    print(f"[{n:>3}/{12}] {x.sum().item():.3f} {n!r}", "%d of %s" % (n, 12), "at %05d" % n, "{:.2e} {k}".format(n / 7, k=n))
    _LOGGER.info("step %d rate %.3f", n, 0.1 / n)
    meter.shown.append(", ".join(f"{k}={v}" for k, v in {"n": n, "m": 2 * n}.items()))
    return x * 2, f"step_{n}.pt"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fn", [averages, texts])
def test_averages_and_texts_of_steps_compile_twice(fn, backend, capsys, caplog):
    """What a training loop shows of its counters: they are divided by and formatted, not guarded."""
    compiled = magneto.optimize(backend, nopython=True)(fn)
    ours, plain = Meter(), Meter()
    heard = []
    with caplog.at_level("INFO", "magneto.tests"):
        for x in torch.linspace(-2, 3, 36).reshape(12, 3):
            for call, meter in ((compiled, ours), (fn, plain)):
                caplog.clear()
                heard.append((call(x, meter), capsys.readouterr().out, caplog.messages[:]))
    assert_equal(heard[::2], heard[1::2])
    assert_equal(vars(ours), vars(plain))
    assert magneto.stats()["recompiles"] <= 1


def test_a_counter_that_becomes_zero_is_divided_by_in_eager():
    def fn(x, meter):
        meter.count -= 1
        return x.sum().item() / meter.count

    compiled, meter = magneto.optimize("eager")(fn), Meter()
    meter.count = 4
    for n in (3, 2, 1):
        assert compiled(X, meter) == X.sum().item() / n
    with pytest.raises(ZeroDivisionError, match="float division by zero"):
        compiled(X, meter)
    assert meter.count == 0


def test_texts_that_decide_are_read():
    """A text of a changing number that names something is guarded, without a break."""

    def fn(x, table, n):
        return x * table[f"w{n}"], getattr(x, f"{'sum' if n else n}")()

    table = {f"w{n}": n + 1 for n in range(4)}
    compiled = magneto.optimize("eager", nopython=True)(fn)
    for n in (1, 2, 3, 1, 2):
        assert_equal(compiled(X, table, n), fn(X, table, n))
    assert magneto.stats()["recompiles"] == 2


def test_whole_numbers_of_what_the_run_gives():
    def fn(x):
        return x * 2, int(x.sum().item() * 100)

    compiled = magneto.optimize("eager", nopython=True)(fn)
    same(fn, compiled, X)
    same(fn, compiled, X * 7)
    with pytest.raises(ValueError, match="cannot convert float NaN to integer"):
        magneto.optimize("eager")(fn)(X * math.nan)
    with pytest.raises(OverflowError, match="cannot convert float infinity to integer"):
        magneto.optimize("eager")(fn)(X + math.inf)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_whole_numbers_are_not_divided_by_zero(backend):
    def fn(x, n):
        return (x * 10).long() // n

    compiled = magneto.optimize(backend)(fn)
    for n in (2, 3, 0, 4, 0):
        same(fn, compiled, X, n)


def converging(state, x, n):
    """Power iteration: how far the last number is from the one before decides."""
    a, v, last, steps = x @ x.T + n, torch.ones(3), 0.0, 0
    while True:
        w = a @ v
        found, v, steps = (v @ w).item(), w / w.norm(), steps + 1
        if abs(found - last) < 1e-5 * found or steps > 20:
            return found, v, steps
        last = found


def adaptive(state, x, n):
    """A solver of differential equations that chooses its steps."""
    t, h, end = 0.0, 0.1, 1.0 + n / 8
    while t < end:
        h = min(h, end - t)
        slope = (x + h * x.sin()).sin()
        error = (h / 2 * (slope - x.sin())).abs().max().item()
        if error <= 1e-2:
            x, t = x + h / 2 * (x.sin() + slope), t + h
        h *= min(2.0, max(0.3, 0.9 * (1e-2 / (error + 1e-12)) ** 0.5))
    return x, t


def best(state, x, n):
    """The best of all losses so far; patience."""
    loss = (x - 5.0 / n).square().mean().item()
    if loss < state["best"]:
        state["best"], state["since"] = loss, 0
    else:
        state["since"] += 1
    return x * 2, state["since"] > 3


def exploring(state, x, n):
    """Chances that shrink: a drawn number decides, beside one that changes."""
    state["chance"] = max(0.05, state["chance"] * 0.9)
    return x * 2 if random.random() < state["chance"] else x + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("fn", "recompiles"), [(converging, 3), (adaptive, 5), (best, 5), (exploring, 2)])
def test_numbers_that_decide_together_are_compared_in_the_guards(fn, recompiles, backend):
    """Of two that change, both were constants of the region; so was each on the value stack behind a break, which a look at what may die there read."""
    states = [{"best": 100.0, "since": 0, "chance": 1.0} for _ in range(2)]
    compiled = magneto.optimize(backend)(fn)
    for n in range(1, 15):
        results = []
        for run, state in zip((fn, compiled), states, strict=True):
            random.seed(n)
            results.append(run(state, X, n))
        assert_equal(results[1], results[0], 1e-4)
        assert_equal(states[1], states[0], 1e-4)
    assert magneto.stats()["recompiles"] <= recompiles


def test_numbers_used_twice_again_and_again_are_not_written_out():
    """Each step doubles the text of what was computed from one number: capture took seconds for 26 steps."""

    def fn(x, s):
        for _ in range(16):
            s = s * 0.5 + s * 0.4
        return x * s if s > 3.0 else x + s

    compiled = magneto.optimize("eager")(fn)
    for s in (1.0, 2.0, 3.0):
        same(fn, compiled, X, s)
    assert sum(len(str(entry.guards)) + len(entry.source) for entry in magneto.inspect(compiled)) < 40_000
