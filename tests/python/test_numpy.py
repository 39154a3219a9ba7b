"""numpy on arrays that come from tensors: recorded as calls of numpy itself, in one graph, with numpy's dtypes and sharing of memory."""

# ruff: noqa

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import magneto
from tests.compare import Capturing, assert_equal, same
from tests.python.programs import Program, Programs, X, check

programs = Programs()
A = np.arange(12, dtype=np.float32).reshape(3, 4) / 7
HELD = np.arange(4, dtype=np.float32)
SIZES = np.array([1, 2, 3])
SCALES = np.array([[0.5, 0.25], [1.0, 2.0]])


@programs.add()
def there_and_back(x):
    a = x.numpy()
    return torch.from_numpy(a * 2 + 1), torch.as_tensor(np.sin(a)) + x, torch.tensor(a[0]), torch.tensor(a[0, 0]), x


@programs.add()
def results(x):
    a = (x + 1).numpy()
    return a, a.sum(axis=0), a.sum(), a.mean() * 2, a.max() + np.float64(1), a[0, 0], a.T, a.dtype == np.float32, a.shape, a.size, len(a)


@programs.add()
def functions(x):
    a = x.numpy()
    return (
        np.add(a, 2.5),
        np.maximum(a, 0),
        np.where(a > 0, a, 0),
        np.exp(a).astype(np.float64),
        a.astype("int32"),
        np.clip(a, 0, 1),
        np.concatenate([a, a]),
        np.stack([a, a], axis=1),
        np.dot(a, a.T),
        a @ a.T,
        np.einsum("ij,kj->ik", a, a),
        np.split(a, 2, axis=1),
        np.linalg.norm(a),
        np.linalg.inv(a @ a.T + np.eye(3)),
        np.cumsum(a),
        np.argmax(a),
        np.sort(a, axis=None),
        np.fft.fft(a),
        np.linalg.qr(a),
    )


@programs.add()
def promotion(x):
    a = x.numpy()
    i = a.astype(np.int32)
    return a + np.arange(4), a * np.float64(2), i / 2, i // 2, i**2, -i, ~i, i << 1, (i > 0) & (i < 3), a * 2, np.float32(3) + 1, a.std()


@programs.add()
def indexing(x):
    a = x.numpy()
    return a[0], a[:, 1:3], a[..., 0], a[[0, 2]], a[None], a[1, 2], a[::2, ::2], a[np.array([0, 1])], [row.sum() for row in a], sum(a)


@programs.add()
def memory_is_shared(x):
    a = x.numpy()
    b, c, d = a.reshape(4, 3), a.T.ravel(), a[1:].reshape(-1)
    x.add_(1)
    e = torch.from_numpy(a)
    e.mul_(2)
    return a, b, c, d, e, x, a.swapaxes(0, 1), np.squeeze(a[None]), np.moveaxis(a, 0, 1)


@programs.add()
def in_place(x):
    y = x + 0
    a = y.numpy()
    a += 1
    a[0] = 5
    a[:, 1] *= 2
    a.T[2] = 7
    a.sort()
    np.clip(a, 0, 4, out=a)
    np.fill_diagonal(a, 9)
    b = x.numpy()
    b *= 3
    return y, a, x + 1


@programs.add(A, X)
def arrays_as_arguments(a, x):
    return a + 1, torch.from_numpy(a) * 2, a.T, a, torch.as_tensor(a) + x, x.numpy() * HELD


@programs.add(A, X)
def arguments_are_written(a, x):
    a += 1
    a[0] = x.numpy()[1]
    np.put_along_axis(a, np.array([[1], [2], [0]]), 7, -1)
    return torch.from_numpy(a) * 2, a.T, a


@programs.add()
def read_only_and_empty(x):
    n = x.numpy()
    wide = np.broadcast_to(n[0], (2, 4))
    empty = np.zeros((0, 3))
    nothing = np.ones(0, dtype=np.int32)
    return (
        wide,
        wide + 1,
        torch.tensor(wide),
        wide.reshape(8),
        empty,
        empty + 1,
        nothing * 2,
        np.concatenate([empty, np.ones((1, 3))]),
        len(nothing),
    )


@programs.add(np.int16(3), np.float16(2), np.uint8(1), np.complex64(2), X)
def kinds_of_numbers(a, b, c, d, x):
    return x * a, x + b, c + 1, d, a + b, x[c]


@programs.add(np.float64(2.5), np.int64(2), X)
def numbers_as_arguments(s, i, x):
    return x * s, s + 1, x[i], x.sum(i - 2)


@programs.add()
def constants(x):
    return int(np.prod(x.shape)), np.sqrt(2.0), np.pi * x, x * np.sqrt(x.shape[1]), x.view(np.prod(x.shape)), x * np.float32(2)


@programs.add()
def what_is_known_of_arrays(x):
    a = x.numpy()
    return (
        a.dtype != np.float64,
        a.dtype == np.dtype("float32"),
        np.float32 == a.dtype,
        a.dtype.name,
        isinstance(a, np.ndarray),
        np.ndim(a),
        np.shape(a),
        np.issubdtype(a.dtype, np.floating),
        np.asarray(x) is not None,
        np.array(x),
        np.asarray(x, dtype=np.float64),
    )


@programs.add(X.clone().requires_grad_())
def of_a_detached_tensor(x):
    return x.detach().numpy() + 1, x.detach().cpu().numpy().sum(), x * 2


@programs.add()
def arrays_of_constants(x):
    c = np.array([[1, 2], [3, 4]])
    a = np.arange(3)
    return (
        (x + 1, np.arange(90), np.zeros((2, 3)), c, np.ones(3), np.broadcast_to(c[:, None], (2, 3, 2)), c // 2, c > 1, len(c), c.max()),
        (int(c[0, 1]), c.tolist(), c.astype(np.float32), c.shape, c[1, 1].item(), np.int64(3).item(), -a, abs(a), a.copy(), a.dtype),
        (isinstance(a, np.ndarray), a.ndim, bool(a[0]), float(a[1]), np.allclose(a, a), np.linspace(0, 1, 3), np.tile(a, 2), np.pad(a, 1)),
        (a[::-1], a[::-1].copy(), x + a[::-1].sum(), f"{a[1]} {a.shape}", np.divmod(7, 2), np.isnan(1.0)),
    )


@programs.add()
def arrays_that_share_memory(x):
    a = np.arange(6)
    b = a.reshape(2, 3)
    b[0] = 9
    a += 1
    c = np.zeros((3, 2)).T
    c[1] = 2
    both = [a, a]
    return x * 1, a, b, both, a is both[0], np.asarray(a) is a, c


@programs.add()
def a_mask_is_filled(x):
    mask = np.zeros((2, 4), dtype=bool)
    places = np.array([[1, 2], [3, 0]])
    np.put_along_axis(mask, places, 1, -1)
    places[places > 2] = 2
    return torch.tensor(mask), mask, x[torch.from_numpy(places[0])]


@programs.add()
def a_tensor_begins_to_share_memory(x):
    a = np.arange(4, dtype=np.float32)
    t = torch.from_numpy(a)
    t.add_(x[0])
    b = a[1:]
    c = np.zeros((3, 4), dtype=np.float32)
    row = c[1]
    u = torch.as_tensor(c)
    u.add_(x)
    row += 1
    d = np.zeros(4, dtype=np.float32)
    d[:] = x.numpy()[0]
    return a, t, b, b.sum(), c, row, u, d, d + 1


@programs.add()
def known_numbers_decide(x):
    total = 0
    for i in np.arange(3):
        x = x + i
    for row in np.array([[1, 2], [3, 4]]):
        for value in row:
            total += value
    names = [1, 2, 3]
    if (np.arange(3) > 1).any() and np.int64(2) in names and 2 in np.arange(3) and np.array([True]):
        x = x * 2
    plan = np.array([11, 12, 13]) // 2
    parts = [np.zeros((4, np.sum(plan[:2]) - 8), dtype=np.int32) for _ in range(2)]
    for part in parts:
        for k in range(plan[0] - 3, plan[1] - 3):
            part[k, 0:3] = k
    stacked = torch.tensor(np.stack(parts), dtype=torch.long)
    return x, total, x[np.int64(1)], x[:, : np.int64(2)], list(np.arange(3)), range(np.int64(3)), names[np.int64(1)], stacked


@programs.add()
def known_beside_data(x):
    a = np.arange(4)
    n = x.numpy()
    return n * a, (n + a) @ a, a, np.where(n > 0, a, 0), np.stack([n[0], a]), a * 2


@programs.add()
def errors_of_known_arrays(x):
    try:
        np.arange(3).reshape(2, 2)
    except ValueError as error:
        text = str(error)
    try:
        bool(np.arange(3))
    except ValueError as error:
        return x + 1, text, str(error)


@programs.add()
def numbers_of_existing_arrays(x):
    total = 0
    for i in SIZES:
        if i > 1:
            total += i
            x = x + float(i)
    names = {1: "a", 2: "b"}
    return (
        (x[SIZES[0]], x[: SIZES[1]], range(SIZES[2]), [1, 2, 3, 4][SIZES[0]], x * SCALES[0, 1], x.reshape(SIZES[2], -1)),
        (total, SIZES.tolist(), SIZES.sum().item(), int(SIZES.max()), SIZES[0] == 1, names[int(SIZES[1])], 2 in SIZES, (SIZES > 0).all()),
        (torch.zeros(tuple(SIZES)), np.zeros(SIZES[0]), x.sum(dim=int(SIZES[0] - 1)), torch.tensor(SIZES), torch.full((2,), SCALES[0, 0])),
        (torch.arange(SIZES[2]), x.repeat(*SIZES[:2]), x * SCALES[0, 0]),
    )


@programs.add()
def numbers_of_data(x):
    a = x.numpy()
    return x * a.max(), x + a[0, 0], x > a.mean(), x / np.float64(3)


@programs.add()
def numbers_of_data_in_python(x):
    a = (x + 1).numpy()
    first, narrow, whole = a[0, 0], a.astype(np.float16).max(), a.astype(np.int64)
    a[0, 0] = 7
    asked = x * float(a.mean()), x + a.max().item(), x * int(a.argmax()), x - whole.sum().item(), x * float(np.sqrt(a[1, 1]))
    return *asked, float(first), first.item(), narrow.item(), {"n": int(whole.max())}, float(a[0, 0]) * 2


@programs.add(X, SCALES)
def numbers_ahead_of_data(x, a):
    k, whole, single = a.mean(), a.astype(np.int64).max() + 3, a.astype(np.float32)[0, 0]
    return k + x, k - x, k * x, k / x, k < x, whole - x, whole / x, single - x, k - x.double(), torch.add(x, k), x.mul(whole), x.lt(k)


@programs.add(X, np.bool_(True))
def numpys_bool_is_a_float(x, flag):
    i = torch.arange(3)
    return flag * x, i * flag, flag + i, i == flag, ~flag - i


@programs.add(X, np.bool_(True), graphs=None)
def numpys_bool_is_a_float_for_functions_too(x, flag):
    i = torch.arange(3)
    return torch.mul(i, flag), torch.where(i > 0, flag, i), torch.full((2,), flag), i.add(flag)


@programs.add(X, np.bool_(True), graphs=None)
def numpys_bool_is_no_bool(x, flag):
    return torch.sum(x, 0, keepdim=flag)


@programs.add()
def results_that_depend_on_known_numbers(x):
    a = np.arange(3)
    return (
        (
            np.nonzero(SIZES),
            np.unique(SIZES),
            np.where(SIZES > 1),
            np.bincount(SIZES),
            np.array_equal(SIZES, a),
            SIZES.tobytes(),
            SIZES.item(1),
        ),
        (
            np.nonzero(a),
            np.unique(a),
            np.add.reduce(a),
            np.maximum.accumulate(SIZES),
            np.multiply.outer(a, SIZES),
            np.add.reduce(x.numpy()),
        ),
        (str(a), repr(a), copy.copy(a), copy.deepcopy(a), copy.deepcopy(x.numpy()), sorted(SIZES), min(SIZES), list(map(int, SIZES))),
        (x[a], x[:, a], x[a, 0], x[a[:2], a[1:]], x[np.array([True, False, True])].sum(0), x[SIZES[:2]]),
    )


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program):
    check(program)


def selected(x):
    a = x.numpy()
    return a[a > 0] + 1, x + 1


def branch(x):
    a = (x + 1).numpy()
    return (a * 2 if a.sum() > 0 else a), x + 1


def positions(x):
    return np.nonzero(x.numpy() > 0), x + 1


@pytest.mark.parametrize("fn", [selected, branch, positions])
def test_what_depends_on_data_breaks(fn):
    backend = Capturing()
    same(fn, magneto.optimize(backend)(fn), X)
    assert magneto.stats()["breaks"] >= 1


@pytest.mark.parametrize("fn", [there_and_back, memory_is_shared, in_place, functions])
def test_compiled(fn):
    same(fn, magneto.optimize("aot_eager")(fn), X)


def test_other_geometry_is_another_region():
    def fn(a):
        return torch.from_numpy(a) + 1

    compiled = magneto.optimize(Capturing(), nopython=True)(fn)
    for array in (A, A.T, A.astype(np.float64), A[:2], A):
        assert_equal(compiled(array), fn(array))


def test_random_numbers_of_numpy_are_its_own():
    def fn(x):
        return x.numpy() + np.random.rand(4), np.random.randn(2)

    np.random.seed(1)
    expected = fn(X)
    np.random.seed(1)
    assert_equal(magneto.optimize(Capturing())(fn)(X), expected)


def test_errors_are_numpys():
    def fn(x):
        return x.numpy().reshape(5, 5)

    same(fn, magneto.optimize(Capturing())(fn), X)
    same(lambda x: x.numpy(), magneto.optimize(Capturing())(lambda x: x.numpy()), X.clone().requires_grad_())


def test_a_write_into_memory_that_an_array_shows():
    def fn(x, a):
        x.add_(1)
        return torch.from_numpy(a) * 2

    compiled = magneto.optimize(Capturing())(fn)
    same(fn, compiled, X, A)
    x = X.clone()
    assert_equal(compiled(x, x.numpy()), (X + 1) * 2)
    assert_equal(x, X + 1)


def test_arrays_are_made_anew_at_each_call():
    def fn(x):
        a = np.arange(4, dtype=np.float32)
        b = np.arange(3)
        return a, torch.from_numpy(a), b, b[1:], np.broadcast_to(b, (2, 3)), x + 1

    compiled = magneto.optimize(Capturing(), nopython=True)(fn)
    for _ in range(3):
        first, tensor, b, tail, wide, _ = compiled(X)
        assert_equal((first, tensor, b, tail, wide), fn(X)[:-1])
        tensor += 1
        b += 1
        assert first[0] == 1 and tail[0] == 2 and wide[1, 0] == 1 and not wide.flags.writeable and b.flags.owndata


def test_a_warning_is_the_programs():
    def fn(x):
        return np.array([1.0]) / np.array([0.0]), x + 1

    compiled = magneto.optimize(Capturing())(fn)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="divide by zero"):
            assert_equal(compiled(X), fn(X))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("fn", [a_tensor_begins_to_share_memory, known_beside_data, a_mask_is_filled])
def test_known_arrays_compiled(fn, backend):
    compiled = magneto.optimize(backend)(fn)
    for _ in range(2):
        same(fn, compiled, X, tolerance=1e-6)


def test_arguments_that_share_memory_are_written():
    def fn(a, b):
        a += 1
        return torch.from_numpy(a) * 2, b + 1

    compiled = magneto.optimize(Capturing())(fn)
    for make in (lambda a: a.copy(), lambda a: a, lambda a: a.T, lambda a: a[:1]):
        ours, plain = A.copy(), A.copy()
        assert_equal(compiled(ours, make(ours)), fn(plain, make(plain)))
        assert_equal(ours, plain)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_arguments_are_written_by_compiled_graphs(backend):
    compiled = magneto.optimize(backend)(arguments_are_written)
    for _ in range(2):
        same(arguments_are_written, compiled, A, X)


def test_contents_of_existing_arrays_are_guarded_where_they_are_asked():
    table = np.array([1, 2, 3])

    def fn(x, start):
        return x[: table[1]] * 2, x + torch.from_numpy(table)[0], x[:, int(start[0]) :]

    backend = Capturing()
    compiled = magneto.optimize(backend)(fn)
    for first, second, start in ((1, 2, 0), (1, 2, 0), (1, 1, 0), (5, 2, 1), (1, 3, 2)):
        table[:2] = first, second
        assert_equal(compiled(X, np.array([start])), fn(X, np.array([start])))
    before = len(backend.graphs)
    for first, second, start in ((7, 2, 1), (8, 3, 2), (9, 2, 1)):  # they change: nobody guards them any more
        table[:2] = first, second
        assert_equal(compiled(X, np.array([start])), fn(X, np.array([start])))
    assert len(backend.graphs) == before


def test_numbers_of_an_array_that_is_written():
    def fn(x, a):
        before = x[: a[0]]
        x.add_(1)
        a += 1
        return before, x[: a[0]], a

    compiled = magneto.optimize(Capturing())(fn)
    for _ in range(2):
        same(fn, compiled, X, np.array([1, 2]))
    x = torch.tensor([1, 2, 0])
    y = torch.tensor([1, 2, 0])
    assert_equal(compiled(x, x.numpy()), fn(y, y.numpy()))


def test_the_text_of_an_array_follows_the_print_options():
    def fn(x):
        return str(np.array([1.23456789])), x + 1

    compiled = magneto.optimize(Capturing(), nopython=True)(fn)
    for precision in (8, 2, 8):
        with np.printoptions(precision=precision):
            assert_equal(compiled(X), fn(X))


def test_views_know_whose_memory_they_show():
    def fn(x):
        a = np.arange(6)
        b = a.reshape(2, 3)
        return a, b, b.base is a, a.base is None, x + 1

    compiled = magneto.optimize(Capturing(), nopython=True)(fn)
    for _ in range(2):
        a, b, *answers, _ = compiled(X)
        assert b.base is a and a.base is None and answers == [True, True]
