"""Sizes of inputs that vary from call to call: captured once, and exact for each size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import magneto
from tests.compare import Capturing, assert_equal, outcome

SIZES = (5, 7, 4, 12, 33, 2, 64, 3)
TABLE = torch.linspace(-1, 1, 80 * 6).reshape(80, 6)

CASES: list[tuple[Callable[..., Any], int, int]] = []


def case(graphs: int = 1, width: int = 6) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds fn(x), x of n rows and `width` columns for each n of SIZES; so many graphs are captured."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append((fn, graphs, width))
        return fn

    return register


def rows(n: int, width: int = 6) -> torch.Tensor:
    return torch.linspace(-2, 3, n * width).reshape(n, width)


def marked(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
    for dim in dims or (0,):
        magneto.mark_dynamic(tensor, dim)
    return tensor


@case()
def pointwise(x):
    return x.sin() * 2 + 1


@case()
def reduction(x):
    return x.sum(), x.mean(0), x.softmax(0)


@case()
def size_as_an_operand(x):
    return x * x.shape[0] / len(x), x.numel() + x


@case()
def shapes(x):
    b, n = x.shape
    return x.view(b * n), x.reshape(b, 2, n // 2).transpose(1, 2), x.new_zeros(b, 3) + x[:, :3], x.reshape(-1, 3, 2)


@case(graphs=2)  # of two rows, every second one is contiguous
def slices(x):
    return x[1:], x[:-1] * 2, x[: x.shape[0] // 2], x[-2:], x[::2] + 1


@case()
def joined(x):
    return torch.cat([x, x[:2]]), torch.stack([x, x]), F.pad(x, (1, 2, 3, 0))


@case()
def a_table_of_positions(x):
    return x + TABLE[: x.shape[0]]


@case()
def arange_and_mask(x):
    places = torch.arange(x.shape[0])
    return (places[None] <= places[:, None]).float() @ x


@case()
def attention(x):
    q = x.view(1, x.shape[0], 2, 3).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


@case()
def padded_to_a_multiple(x):
    return F.pad(x, (0, 0, 0, -x.shape[0] % 8)).view(-1, 8, 6).sum(1)


@case()
def numbers_leave(x):
    n = x.shape[0]
    return x + 1, n, n * 2 - 1, n / 4, x.shape, x[1:].size(0), (-n // 3, n % 5, min(n, 9), max(3, n))


@case(graphs=0)
def nothing_but_numbers(x):
    return x.shape[0] * 3, x.dim(), x.size(-1)


@case(graphs=2)
def a_branch(x):
    return x * 2 if x.shape[0] > 10 else x - 1


@case(graphs=2)
def a_branch_on_a_remainder(x):
    return x.view(-1, 2, 6).sum(1) if x.shape[0] % 2 == 0 else x[1:]


@case(graphs=2)
def a_branch_on_an_inner_size(x):
    y = x[3:]
    if y.shape[0] == 0:
        return x
    return y.max(0).values if len(y) < 20 else y.min(0).values


@case(graphs=3)
def truth_of_a_size(x):
    return (x if x[4:].shape[0] else x * 2) + bool(x.shape[0])


@case(graphs=4)
def a_loop_in_steps(x):
    found, start = [], 0
    while start < x.shape[0]:
        found.append(x[start : start + 8].sum())
        start += 8
    return found


@case(graphs=8)
def a_loop_over_a_size(x):
    y = x[0] * 0
    for i in range(x.shape[0]):
        y = y + x[i] * i
    return y


@case(graphs=8)
def rows_one_by_one(x):
    return [row * 2 for row in x], torch.unbind(x), x.split(1)


@case(graphs=8)
def a_text(x):
    return x + 1, f"{x.shape[0]} rows", {x.shape[0]: "n"}, hash(x.shape[0])


@case()
def shapes_are_compared(x):
    y = x.t().t()
    assert y.shape == x.shape
    assert y.shape != (1, 2)
    return x + y if x.size(0) == y.size(0) else None


@case()
def an_assertion(x):
    assert x.shape[0] < 40, "too long"
    return x * 2


@case()
def not_contiguous_inside(x):
    y = x.t()
    return y.contiguous(), y.is_contiguous(), y.stride(), x.stride(0), y.reshape(6, -1)


@case()
def in_place(x):
    y = x.clone()
    y[:, 0] = 0
    y[1:] += y[:-1].clone()
    y.mul_(2)
    return y, y.shape[0]


@case()
def switched_modes(x):
    with torch.no_grad():
        y = x * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = y @ y.t()
    return y, z.float().sum(1)


@case()
def print_between(x):
    y = x + 1
    print(end="")
    return y * x.shape[0]


@pytest.mark.parametrize("how", ["marked", "dynamic"])
@pytest.mark.parametrize("fn, graphs, width", CASES, ids=[fn.__name__ for fn, _, _ in CASES])
def test_one_capture_serves_all_sizes(fn: Callable[..., Any], graphs: int, width: int, how: str) -> None:
    backend = Capturing()
    compiled = magneto.compile(fn, backend=backend, dynamic=True if how == "dynamic" else None)
    for _ in range(2):
        for n in SIZES:
            x = rows(n, width)
            agree(fn, compiled, marked(x) if how == "marked" else x)
    if how == "marked":
        assert len(backend.graphs) == graphs
    else:
        assert len(backend.graphs) <= 2 * graphs


def agree(fn: Callable[..., Any], compiled: Callable[..., Any], *args: Any) -> None:
    """The same results and arguments, or the same exception."""
    plain = copy.deepcopy(args)
    (wanted, error), (got, other) = outcome(fn, (plain, {})), outcome(compiled, (args, {}))
    assert (type(error), str(error)) == (type(other), str(other))
    assert_equal((got, args), (wanted, plain))


def count_of(fn: Any, calls: Sequence[Sequence[Any]], **options: Any) -> int:
    """Graphs captured in these calls, whose results are eager's."""
    backend = Capturing()
    compiled = magneto.compile(copy.deepcopy(fn), backend=backend, **options)
    for args in calls:
        agree(fn, compiled, *args)
    return len(backend.graphs)


def test_one_and_nothing_are_sizes_of_their_own():
    assert count_of(lambda x: x * 2 + x.shape[0], [(marked(rows(n)),) for n in (4, 1, 9, 0, 1, 5, 0)]) == 3


def test_equal_dimensions_are_one_symbol_until_they_differ():
    def f(x, y):
        return x + y, x.shape[0] + y.shape[0]

    calls = [(marked(rows(n)), marked(rows(n))) for n in (4, 9, 7)]
    assert count_of(f, calls) == 1
    assert count_of(lambda x, y: (x * 2, y * 2), [*calls, (marked(rows(3)), marked(rows(5))), (marked(rows(8)), marked(rows(2)))]) == 2


@pytest.mark.parametrize(
    "layout",
    [
        lambda n: rows(n),
        lambda n: rows(6, n).t(),
        lambda n: rows(2 * n)[::2],
        lambda n: rows(n, 10)[:, 2:8],
        lambda n: rows(6)[:1].expand(n, 6),
        lambda n: rows(40).narrow(0, 3, n),
        lambda n: torch.linspace(0, 1, n * 96).view(n, 4, 6, 4).to(memory_format=torch.channels_last),
        lambda n: torch.linspace(0, 1, 8 * 50 * 3).view(2, 4, 50, 3)[:, :, :n],
    ],
)
def test_strides(layout: Callable[[int], torch.Tensor]) -> None:
    def f(x):
        return x * 2, x.contiguous().flatten(), x.transpose(0, 1).reshape(-1), x.is_contiguous(), x.clone().stride()[-1]

    places = [d for d, (a, b) in enumerate(zip(layout(4).shape, layout(5).shape, strict=True)) if a != b]
    assert count_of(f, [(marked(layout(n), *places),) for n in (4, 9, 7, 13, 2)]) == 1
    assert count_of(f, [(marked(layout(n), *places),) for n in (4, 9)] + [(rows(n),) for n in (4, 9)]) <= 3


def test_another_layout_gets_another_variant():
    def f(x):
        return x.reshape(-1), x.is_contiguous()

    assert count_of(f, [(marked(rows(n)),) for n in (4, 9)] + [(marked(rows(6, n).t()),) for n in (4, 9, 11)]) == 2


def test_bounds():
    def f(x):
        return x * x.shape[0]

    def within(n):
        x = rows(n)
        magneto.mark_dynamic(x, 0, min=4, max=16)
        return (x,)

    assert count_of(f, [within(n) for n in (5, 4, 16, 9, 12)]) == 1
    assert count_of(f, [within(n) for n in (5, 17, 3, 9, 12)]) == 3


def test_marked_static_and_dynamic_false():
    def f(x):
        return x * 2

    def static(n):
        x = marked(rows(n), 0, 1)
        magneto.mark_static(x, 0)
        return (x,)

    assert count_of(f, [static(n) for n in (5, 6, 7)]) == 3
    assert count_of(f, [(rows(5, n),) for n in (5, 6, 7)], dynamic=False) == 3
    assert count_of(f, [(marked(rows(n)),) for n in (5, 6, 7)], dynamic=False) == 3


def test_the_graph_says_what_varies():
    backend = Capturing()
    compiled = magneto.compile(lambda x, y: (x.view(x.shape[0] * 6) * 2, y @ x), backend=backend)
    for n in (5, 8):
        compiled(marked(rows(n)), marked(rows(3, n), 1))
    (gm,) = backend.graphs
    told = gm.meta["magneto"]
    assert told["varying"] == ((0, 0, 0, 0), (1, 1, 0, 0))
    values = told["resizer"].at((9,))
    shapes = [values[node].shape for node in gm.graph.nodes if node.op != "output" and hasattr(values[node], "shape")]
    assert shapes == [(9, 6), (3, 9), (54,), (54,), (3, 6)]
    assert 9 in values.values() and 54 in values.values()
    assert told["resizer"].at((9,)) is values
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    assert [node.meta["form"].at((9,)) for node in inputs] == [((9, 6), (6, 1)), ((3, 9), (9, 1))]


def test_sizes_that_the_program_refuses():
    def f(x, y):
        return x[:, :4] @ y

    calls = [(marked(rows(n)), rows(4)) for n in (5, 6)] + [(marked(rows(4, n), 1), rows(4)) for n in (8, 2, 3, 9)]
    count_of(f, calls)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 8)
        self.places = nn.Parameter(torch.randn(40, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 5)

    def forward(self, tokens):
        n = tokens.shape[1]
        return self.last(self.layer(self.table(tokens) + self.places[:n]))


def test_a_module_of_any_batch_and_length():
    calls = [(torch.arange(b * n).view(b, n) % 50,) for b, n in ((2, 5), (3, 7), (4, 32), (9, 12), (7, 2))]
    assert count_of(Net().eval(), calls, dynamic=True) == 1
    assert count_of(Net(), calls, dynamic=True) == 1


def test_a_growing_cache():
    def step(x, cache):
        k = torch.cat([cache["k"], x], 1)
        v = torch.cat([cache["v"], x * 2], 1)
        out = F.scaled_dot_product_attention(x[:, None], k[:, None], v[:, None])
        return out, {"k": k, "v": v}

    backend = Capturing()
    compiled = magneto.compile(step, backend=backend, dynamic=True)
    want = got = {"k": torch.ones(2, 3, 4), "v": torch.ones(2, 3, 4)}
    for n in range(20):
        x = torch.full((2, 1, 4), float(n))
        (one, want), (two, got) = step(x, want), compiled(x, got)
        assert_equal((two, got), (one, want))
    assert len(backend.graphs) == 1


def test_gradients_flow():
    def f(x, w):
        return (x @ w).relu().sum(0) * x.shape[0]

    def step(fn, n):
        x, w = rows(n).requires_grad_(), rows(6, 3).requires_grad_()
        fn(marked(x), w).sum().backward()
        return x.grad, w.grad

    backend = Capturing()
    compiled = magneto.compile(f, backend=backend)
    for n in (4, 9, 7):
        assert_equal(step(compiled, n), step(f, n))
    assert len(backend.graphs) == 1


def test_the_third_size_makes_a_dimension_vary():
    def f(x, cache):
        keys = torch.cat([cache[0], x])
        return (x @ keys.t()).softmax(-1) @ torch.cat([cache[1], x]), [keys, cache[1] * 2]

    assert count_of(f, [(rows(3), [rows(n), rows(n) + 1]) for n in (4, 9, 7, 5, 12, 30, 2, 3, 8)]) == 3
    assert count_of(f, [(rows(3), [rows(n), rows(n) + 1]) for n in (4, 9, 4, 9, 4, 9)]) == 2
    assert count_of(f, [(rows(3), [rows(n), rows(n) + 1]) for n in (4, 9, 7, 5)], dynamic=False) == 4


def test_a_dimension_that_has_to_be_a_constant():
    def f(x):
        return [x[i] * 2 for i in range(x.shape[0])], x + 1

    assert count_of(f, [(rows(n),) for n in (4, 9, 7, 5, 12)]) == 5


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_backends_that_must_know_sizes(backend: str) -> None:
    def f(x, w):
        y = x.view(x.shape[0] * 2, -1)
        return (x @ w).relu().sum(0) * x.shape[0], y.softmax(0), x.shape[0] // 2, y.shape

    compiled = magneto.compile(f, backend=backend, dynamic=True)
    before = magneto.stats()
    for n in (4, 9, 7, 4, 9, 30, 2):
        assert_equal(compiled(rows(n), rows(6, 3)), f(rows(n), rows(6, 3)), tolerance=1e-5)
    assert magneto.stats()["graphs"] - before["graphs"] == 1


def test_a_break_that_constants_do_not_need():
    def f(x):
        return x * torch.arange(x.shape[0]).tolist()[-1]

    assert count_of(f, [(rows(n),) for n in (4, 9, 7, 5)]) == 4
    assert count_of(f, [(rows(n),) for n in (4, 9, 7)], dynamic=True, fullgraph=True) == 3


class Loud(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Loud.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_the_programs_own_functions_are_not_run_to_find_sizes():
    def f(x):
        return Loud.apply(x + 1)

    compiled, sizes = magneto.compile(f, backend="eager", dynamic=True), (4, 9, 7, 4)
    before = Loud.calls
    for n in sizes:
        assert_equal(compiled(rows(n).requires_grad_()), f(rows(n).requires_grad_()))
    assert Loud.calls - before == 2 * len(sizes)


def test_sizes_that_depend_on_data_beside_sizes_that_vary():
    def f(x):
        y = x[x[:, 0] > 0]
        z = y * 2 if y.shape[0] > 1 else y
        return z.sum(0), x.view(x.shape[0] * 6), (x > 0).nonzero().shape[0] + x.shape[0], y[: x.shape[0] - 1]

    assert count_of(f, [(marked(rows(n)),) for n in (4, 9, 7, 5, 2, 20)]) <= 2


def test_another_layout_with_the_same_strides():
    def f(x, y):
        return (x * 2 if x.is_contiguous() else x - 1), y.shape if y.is_contiguous() else 0

    calls = [(rows(10, 8)[:, :4], rows(12, 8)[:, :3]), (rows(6, 8), rows(9, 8)), (rows(5, 8)[:, :7], rows(6, 8)[:, :2])]
    assert count_of(f, calls, dynamic=True) == 2


def test_a_mask_that_is_longer_than_the_cache():
    """Sizes that operations want to be other ones plus a constant, whichever comes first; another such constant is another graph."""

    def f(mask, keys, x):
        full = torch.cat([keys, x])
        return (full @ x.t() + mask[:, None]).softmax(0), full[1:] * 2

    def calls(more, sizes):
        return [(marked(torch.linspace(0, 1, n + more)), marked(rows(n)), rows(more)) for n in sizes]

    assert count_of(f, calls(1, (5, 6, 7, 9, 12, 40)) + calls(2, (7, 9, 20, 30, 3))) == 2
    compiled = magneto.compile(f, backend="eager")
    for args in calls(1, (5, 6)):
        assert_equal(compiled(*args), f(*args))
    with pytest.raises(RuntimeError, match="size of tensor"):
        compiled(rows(12)[:, 0], rows(8), rows(1))


def test_a_mask_that_varies_before_the_cache_does():
    """What had to be a constant beside a constant is asked again once that varies."""

    def f(mask, keys, x):
        return (x if keys is None else torch.cat([keys, x])) @ x.t() + mask[:, None]

    calls = [(torch.linspace(0, 1, n), rows(n - 1), rows(1)) for n in range(8, 16)]
    assert count_of(f, [(torch.linspace(0, 1, 7), None, rows(7)), *calls]) == 4


def test_a_step_of_adam_at_any_size():
    """The step size is a number of the graph, by which an update of ours scales."""

    def program():
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    backend, plain = Capturing(), program()
    compiled = magneto.compile(program(), backend=backend)
    for n in (4, 4, 9, 7, 5, 2, 20):
        assert_equal(compiled(marked(rows(n))), plain(rows(n)))
    assert len(backend.graphs) == 2  # the first one makes the optimizer's state
