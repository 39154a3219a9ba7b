"""Results whose size depends on data stay in the graph: masks, nonzero, unique, and what programs do with them."""

# ruff: noqa: B018

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import magneto
from tests.compare import Capturing, assert_equal, outcome, same
from tests.python.programs import Program, Programs, X, Y, check

programs = Programs()


@programs.add()
def a_mask(x):
    return x[x > 0] * 2


@programs.add()
def a_mask_over_rows(x):
    return x[x[:, 0] > 0] + 1


@programs.add()
def a_mask_of_the_last_dimension(x):
    return x[:, x[0] > 0].sum(1)


@programs.add()
def the_same_mask_twice(x):
    mask = x > 0
    return x[mask] * x.sin()[mask] + torch.masked_select(x, mask)


@programs.add()
def where_with_one_argument(x):
    rows, columns = torch.where(x > 0)
    return rows * 4 + columns, x[rows, columns]


@programs.add()
def where_and_mask_agree(x):
    mask = x[:, 0] > 0
    return x[torch.where(mask)[0]] + x[mask]


@programs.add()
def nonzero(x):
    places = (x > 0).nonzero()
    return places, places.float().mean(0), places.t().contiguous() + 1 if False else places[:, 0]


@programs.add()
def argwhere(x):
    return torch.argwhere(x > 0.3) * 2


@programs.add()
def masked_select_broadcasts(x):
    return torch.masked_select(x, x[0] > 0).exp()


@programs.add()
def unique(x):
    values, places, counts = torch.unique(x.round(), return_inverse=True, return_counts=True)
    return values * counts, values[places]


@programs.add()
def unique_rows(x):
    return torch.unique(x.round(), dim=0), torch.unique_consecutive(x.round().flatten()) * 2


@programs.add()
def repeat_interleave(x):
    return torch.repeat_interleave(x, torch.arange(3), dim=0) + 1


@programs.add(torch.tensor([1, 4, 4, 2]))
def bincount(x):
    return torch.bincount(x).cumsum(0), torch.bincount(x, minlength=8)


@programs.add(torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([6, 5]), torch.tensor([2, 3]))
def ctc_loss(x, inputs, targets):
    return F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2, 0], [1, 3, 2]]), inputs, targets)


@programs.add()
def arithmetic_with_sizes(x):
    y = x[x[:, 0] > 0]
    n, m = y.shape
    return y.sum() / max(n, 1), n * m, n // 2 + m, min(n, 2), -n + 1, n / 4, n % 2, y.numel(), len(y), y.size(0), y.nbytes


@programs.add()
def sizes_make_tensors(x):
    y = x[x[:, 0] > 0]
    n = len(y)
    return torch.zeros(n, 3) + y[:, :1], torch.arange(n), y.new_full((n,), 2.0), torch.full((n, 2), 7), torch.ones(n - 1 + 1) * y[:, 0]


@programs.add()
def views_with_sizes(x):
    y = x[x[:, 0] > 0]
    return y.view(y.shape[0], 2, 2), y.reshape(-1), y.flatten(1), y[None].expand(3, -1, -1), y.view(-1, 2), y.unsqueeze(1), y.t()


@programs.add()
def slices_of_it(x):
    y = x[x > 0]
    return y[:2], y[1:], y[:-1], y[: y.numel() // 2], y[None, :3], y[..., ::2]


@programs.add()
def a_slice_up_to_it(x):
    n = x[x > 0].numel()
    return torch.arange(20)[:n], torch.arange(20)[n:], torch.arange(n)[:2]


@programs.add()
def between_two_sizes(x):
    n, m = len(x[x[:, 0] > 0]), x[x > 0].numel()
    y, z = torch.arange(2)[n:m], torch.cat([torch.arange(3)[:n], torch.arange(3)[m:]])
    return y, z, y.shape, z.shape, torch.arange(4)[:n][m:].numel(), torch.arange(4)[:m][n:].sum()


@programs.add()
def bounds_that_are_tensors(x):
    first, last = (x > 0).sum(), (x > -1).sum()
    y = torch.arange(12)
    y[first:] = 0
    return y[:last] + 1, y[first:last], torch.zeros(first), F.one_hot((x > 0).long()[0])


@programs.add()
def an_empty_dimension_and_statistics(x):
    rows = torch.where(x[:, 0] > 5)[0]
    return (
        torch.zeros(0, 4)[rows],
        F.instance_norm(x[None, :, torch.where(x[0] > -9)[0]]),
        F.batch_norm(x[x[:, 0] > -9], torch.zeros(4), torch.ones(4), training=True),
    )


@programs.add()
def reductions(x):
    y = x[x[:, 0] > 0]
    return y.sum(), y.mean(1), y.sum(0), y.softmax(0), y.norm(dim=1), (y > 0).any(), y.std(1)


@programs.add()
def sorted_and_gathered(x):
    y = x[x > 0]
    values, order = y.sort(descending=True)
    return values, y[order] + y.argsort(), y.cumsum(0), torch.gather(y, 0, order)


@programs.add()
def joined(x):
    y = x[x[:, 0] > 0]
    return torch.cat([y, x]), torch.cat([y, y * 2], 1), torch.stack([y, y]), torch.cat([y[:, 0], x[x > 0]])


@programs.add()
def products(x):
    y = x[x[:, 0] > 0]
    return y @ y.t(), F.linear(y, x), y[:, None] - y[None], torch.cdist(y, x), torch.einsum("ni,mi->nm", y, x)


@programs.add()
def a_layer(x):
    return F.layer_norm(F.gelu(x[x[:, 0] > 0]), (4,)), F.one_hot(torch.where(x[:, 0] > 0)[0], 3), F.softmax(x[x > 0], 0)


@programs.add()
def writing_with_indices(x):
    result = torch.zeros(3, 4)
    rows = torch.where(x[:, 0] > 0)[0]
    result[rows] = x[rows] * 2
    result[x < 0] = x[x < 0]
    result[:, 0][rows] += 1
    return result, result.index_add(0, rows, x[rows])


@programs.add()
def a_write_to_the_mask_changes_the_count(x):
    mask = x > 0
    before = x[mask]
    mask[0] = True
    return before, x[mask]


@programs.add()
def writes_into_it(x):
    y = x[x[:, 0] > 0]
    y[:, 1] = 0
    y.mul_(2)
    y[:, 2] += y[:, 0]
    z = y[:, 3:]
    z.add_(1)
    return y, z


@programs.add()
def what_is_known_of_it(x):
    y = x[x[:, 0] > 0]
    return y.dim(), y.shape[1], y.dtype, y.is_contiguous(), y.shape[-1:], isinstance(y.shape[0], int), y.ndim, y.requires_grad


@programs.add()
def the_shape_itself(x):
    return x[x > 0].shape, tuple((x > 0).nonzero().size()), [*x[x[:, 0] > 0].shape]


@programs.add()
def for_each_class(x):
    found = []
    for c in range(3):
        rows = torch.where(x[:, c] > 0)[0]
        found.append(x[rows] * c)
    return torch.cat(found), [len(part) for part in found]


def random_numbers_beside_it(x):
    y = x[x[:, 0] > 0]
    return torch.rand_like(y) + y, torch.rand(2), torch.randn(len(y), 2), F.dropout(y, 0.5)


@programs.add()
def without_gradients(x):
    with torch.no_grad():
        y = x[x > 0] * 2
    return y + 1


@programs.add(graphs=None, again=False)
def a_branch_on_a_size(x):
    y = x[x[:, 0] > 0]
    if len(y) > 1:
        y = y * 2
    return y + 1


@programs.add(graphs=None, again=False)
def sizes_that_fit_by_chance(x):
    return x[x[:, 0] > 0] + x[x[:, 1] > 0]


@programs.add(graphs=None, again=False)
def pieces_of_it(x):
    y = x[x[:, 0] > 0]
    a = y.split(1)
    return [row.squeeze() for row in y], a, y.chunk(2), y.squeeze(0), y.unbind()


@programs.add(graphs=None, again=False)
def text_and_keys(x):
    y = x[x > 0]
    return f"{y.numel()} found, {tuple(y.shape)}", {len(y): 1}, str(len(y)), range(len(y)), [0] * len(y), (1, 2)[: len(y)]


@programs.add(graphs=None, again=False)
def numbers_beside_other_things(x):
    n = len(x[x > 0])
    return (
        n == "a",
        n is None,
        n == 5,
        n in (1, 2, 5),
        n << 1,
        n & 1,
        divmod(n, 2),
        float(n),
        bool(n),
        not n,
        round(n / 3, 1),
        n**2,
        abs(-n),
        "ab" * n,
    )


@programs.add(X, Y, graphs=None, again=False)
def an_error_is_eagers(x, y):
    return x[x[:, 0] > 0] @ x


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)


DATA = {"nothing": -X.abs() - 1, "one": torch.cat([X[:1].abs() + 1, -X[1:].abs() - 1]), "some": X, "all": X.abs() + 1}
ONE_GRAPH = [program for program in programs if program.graphs == 1 and len(program.args) == 1 and program.args[0].is_floating_point()]


@pytest.mark.parametrize("program", ONE_GRAPH, ids=[program.fn.__name__ for program in ONE_GRAPH])
@pytest.mark.parametrize("first", ["nothing", "one", "some"])
def test_other_counts_take_the_same_region(program: Program, first: str) -> None:
    backend = Capturing()
    compiled = magneto.optimize(backend)(program.fn)
    same(program.fn, compiled, DATA[first])
    n = len(backend.graphs)
    for data in DATA.values():
        same(program.fn, compiled, data)
    assert len(backend.graphs) == n <= 1


@pytest.mark.parametrize("data", list(DATA))
def test_gradients(data: str) -> None:
    def loss(x, w):
        y = x[x[:, 0] > 0]
        picked = F.linear(y, w)
        total = torch.zeros(3, 4)
        rows, columns = torch.where(x > 0)
        total[rows, columns] = (x * 3)[rows, columns]
        return picked.sum() / max(len(y), 1) + total.pow(2).sum()

    backend = Capturing()
    compiled = magneto.optimize(backend, nopython=True)(loss)
    found = []
    for fn in (loss, compiled):
        x, w = DATA[data].clone().requires_grad_(), torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
        value = fn(x, w)
        value.backward()
        found.append((value, x.grad, w.grad))
    assert_equal(found[1], found[0])
    assert len(backend.graphs) == 1


def test_a_view_of_an_input_is_written_through_unknown_indices() -> None:
    def fill(x, out):
        rows = torch.where(x[:, 0] > 0)[0]
        part = out[1:]
        part[rows] = x[rows]
        return part.sum()

    backend = Capturing()
    compiled = magneto.optimize(backend, nopython=True)(fill)
    for data in DATA.values():
        same(fill, compiled, data, torch.ones(4, 4))
    assert len(backend.graphs) == 1


def test_random_numbers() -> None:
    backend = Capturing()
    compiled = magneto.optimize(backend, nopython=True)(random_numbers_beside_it)
    for data in DATA.values():
        found = []
        for fn in (random_numbers_beside_it, compiled):
            torch.manual_seed(3)
            found.append((fn(data), torch.rand(2)))
        assert_equal(found[1], found[0])
    assert len(backend.graphs) == 1


def test_an_error_in_the_graph_leaves_no_trace() -> None:
    def fails(x, out):
        out.add_(1)
        noise = torch.rand(1)
        return x[x > 0][2] + noise

    compiled = magneto.optimize("eager")(fails)
    for data in (X, DATA["nothing"], X):
        found = []
        for fn in (fails, compiled):
            torch.manual_seed(1)
            out = torch.ones(2)
            value, error = outcome(fn, ((data, out), {}))
            found.append((value, repr(error), out, torch.rand(1)))
        assert_equal(found[1], found[0])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_backends_that_need_sizes(backend: str) -> None:
    def f(x):
        y = x.sin()
        y = y[y[:, 0] > 0] * 2
        return y.cos() + 1, y.shape[0]

    compiled = magneto.optimize(backend)(f)
    for data in DATA.values():
        same(f, compiled, data, tolerance=1e-5)


def test_explained() -> None:
    def f(x):
        return x[x > 0].split(2)

    plain, ours = outcome(f, ((copy.copy(X),), {})), outcome(magneto.optimize("eager")(f), ((X,), {}))
    assert_equal(ours, plain)
    (reason,) = [reason for reason in magneto.stats()["break_reasons"] if "depends on data" in str(reason)]
    assert "split" in str(reason)


def test_branches_on_sizes_are_assumed_until_refuted() -> None:
    def f(x):
        y = x[x[:, 0] > 0]
        if y.numel() == 0:
            return x - 1
        if len(y) > 4000:
            y = y / 2
        return y.max(0).values + torch.rand(4)

    backend = Capturing()
    compiled = magneto.optimize(backend)(f)

    def agree(data):
        found = []
        for fn in (f, compiled):
            torch.manual_seed(5)
            found.append((fn(data), torch.rand(1)))
        assert_equal(found[1], found[0])

    for name in ("one", "some", "all", "some"):
        agree(DATA[name])
    assert len(backend.graphs) == 1  # both branches go as assumed
    for name in ("nothing", "some", "nothing", "all", "nothing"):
        agree(DATA[name])
    ours = len(backend.graphs)
    assert ours > 1  # the branch is a break from now on
    agree(DATA["nothing"])
    assert len(backend.graphs) == ours


def test_a_graph_that_fails_behind_an_assumed_branch() -> None:
    def f(x):
        y = x[x > 0]
        z = y + 1 if len(y) else torch.zeros(3)
        return y.max() + z if len(y) else z

    compiled = magneto.optimize("eager")(f)
    for data in ("some", "nothing", "nothing", "all", "nothing"):
        same(f, compiled, DATA[data])
    assert magneto.stats()["hook"]["reruns"] <= 1 or magneto.stats()["recompiles"] < 4


def test_fullgraph_assumes_nothing_for_good() -> None:
    def f(x):
        y = x[x[:, 0] > 0]
        return y * 2 if len(y) else x

    compiled = magneto.optimize("eager", nopython=True)(f)
    for data in DATA.values():
        same(f, compiled, data)


def test_custom_operations_with_dynamic_sizes() -> None:
    with torch.library._scoped_library("magneto_test", "FRAGMENT") as library:
        library.define("positive(Tensor x) -> Tensor")
        library.impl("positive", lambda x: (x > 0).nonzero(), "CPU")

        def fake(x):
            return x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.ndim, dtype=torch.int64)

        torch.library.register_fake("magneto_test::positive", fake, lib=library)

        def f(x):
            places = torch.ops.magneto_test.positive(x * 2)
            return places + 1, places.shape

        backend = Capturing()
        compiled = magneto.optimize(backend, nopython=True)(f)
        for data in DATA.values():
            same(f, compiled, data)
        assert len(backend.graphs) == 1
