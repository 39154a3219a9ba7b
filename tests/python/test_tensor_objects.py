"""Tensors as objects: attributes that the program sets, gradients, requires_grad, views in place, parameters, constants made in the region."""

# ruff: noqa

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import magneto
from tests.compare import Capturing, assert_equal
from tests.python.programs import Program, Programs, X, Y, check

programs = Programs()


def leaf():
    return X.clone().requires_grad_()


@programs.add()
def user_attributes(x):
    y = x + 1
    y.scale = [2]
    x.seen = True
    z = x * 2
    z.gone = 1
    del z.gone
    return y, y.scale, x.seen, hasattr(z, "gone"), hasattr(z, "other"), z


@programs.add(X.clone(), leaf())
def gradients_that_flow_into_data_are_not_the_tensors(x, w):
    x.data += w
    z = x * w
    y = x.detach()
    y.mul_(w)
    k = x.view(-1).data
    k.add_(w.view(-1))
    return x.requires_grad, x.is_leaf, x.grad_fn is None, y.requires_grad, k.requires_grad, z, x


@programs.add(leaf())
def what_gives_back_its_argument_keeps_its_history(x):
    y = x.sum(0) * 2
    z = y.flatten(), torch.nn.functional.dropout(y, 0.5, False), +y, y.resolve_conj(), torch.atleast_1d(y), torch.as_tensor(y), y.type_as(y)
    return y.is_leaf, y.grad_fn is None, y.requires_grad, all(one is y for one in z)


@programs.add(leaf(), graphs=None)
def requires_grad_is_set_where_autograd_has_computed(x):
    y, said = x * 2, []
    for flag in (True, False):
        try:
            y.requires_grad = flag
        except RuntimeError as error:
            said.append(str(error))
    return said, y.requires_grad_().is_leaf


@programs.add(X.clone(), leaf(), graphs=None)
def other_memory_is_written_with_a_history(x, w):
    x.data = x.data * 2
    x[0] = w.sum(0)
    return x.requires_grad, x.is_leaf, x


@programs.add(X.clone(), leaf(), graphs=None)
def other_memory_is_added_to_with_a_history(x, w):
    x.data = x.data * 2
    x += w.sum(0)
    return x.requires_grad, x.is_leaf, x


@programs.add(X.clone(), leaf(), graphs=None)
def views_from_before_a_break_get_the_history_of_a_write(x, w):
    y, z = x * 1, x * 2
    v, u, k = y[:1], z[:1], x.view(torch.int32)
    magneto.graph_break()
    y[0] = w.sum(0)
    z += w.sum(0)
    x[0] = w.sum(0)
    return v.requires_grad, v.is_leaf, u.requires_grad, u * 2, v, k.requires_grad


@programs.add(X.clone(), graphs=None)
def views_require_gradients_with_their_base(x):
    y = x * 1
    v = y[0]
    y.requires_grad = True
    return v.requires_grad, v.is_leaf, (v * 2).requires_grad


@programs.add(X.clone(), leaf(), graphs=None)
def shapes_change_before_a_write_with_a_history(x, w):
    x.unsqueeze_(0)
    x[0, 0] = w.sum(0)
    return x.requires_grad, x.is_leaf, x


@programs.add(leaf())
def gradient_is_set(x):
    x.grad = torch.ones_like(x)
    first = x.grad + 1
    x.grad = None
    return first, x.grad is None, x * 2


@programs.add()
def data_is_set(x):
    before = x + 0
    x.data = torch.zeros(2)
    x.add_(1)
    return before, x + 1


@programs.add()
def data_is_written(x):
    x.data.add_(1)
    return x + 1


@programs.add(leaf())
def detached_in_place(x):
    y = x * 2
    z = y.exp()
    y.detach_()
    return y, y.requires_grad, z, y * 3


@programs.add(leaf())
def graph_functions(x):
    return x.grad_fn is None, (x * 2).grad_fn is None, x.detach().grad_fn, x.is_leaf, (x * 2).is_leaf


@programs.add()
def views_in_place(x):
    y = x.clone()
    w = y.view(-1)
    y.t_()
    y.unsqueeze_(0).mul_(2)
    y.squeeze_()
    y.transpose_(0, 1)
    v = x.view(-1)[2:6].reshape(2, 2)
    v.t_()
    v.mul_(3)
    return y, w, v, x


@programs.add()
def view_in_place_of_an_argument(x):
    x.t_()
    x.add_(1)
    return x + 1, x.shape


@programs.add()
def conversions(x):
    return (
        x.type(torch.float64),
        x.type("torch.DoubleTensor"),
        x.type(torch.LongTensor),
        x.new([1.0, 2.0]),
        x.new_tensor([1, 2]),
        x.new_tensor(3.0),
        torch.Tensor([1, 2]),
        torch.Tensor(2, 3).shape,
        torch.FloatTensor([1, 2.5]),
        torch.LongTensor([1]),
        x.float(memory_format=torch.contiguous_format),
    )


@programs.add()
def of_nested_tensors(x):
    return torch.tensor([[x[0, 0], 3.0], [x[0, 1], 1]]), torch.tensor([x[0, 0].long(), 2]), torch.tensor([x[0, 0] > 0, True])


@programs.add()
def parameter_without_gradients(x):
    with torch.no_grad():
        w = nn.Parameter(torch.ones(4))
        w.mul_(2)
        y = x * w
    buffer = nn.Buffer(x * 2)
    return y, w, type(w), isinstance(w, nn.Parameter), w.requires_grad, isinstance(buffer, nn.Buffer), buffer.persistent, buffer + 1


@programs.add()
def sizes(x):
    s = x.shape
    return s + (1,), s[1:], s.numel(), s * 2, (1,) + s, s == (3, 4), s.count(3), hash(s) == hash((3, 4)), str(s), torch.Size([x.size(0), 5])


@programs.add()
def identity_and_hash(x):
    y = x + 1
    return hash(x) == hash(x), hash(x) == hash(y), y in {y}, {x: 1, y: 2}[y], x in [x, y], [y].index(y)


@programs.add()
def constants_made_here(x):
    total = 0
    for i in torch.arange(3).tolist():
        total = total + i
    table = torch.zeros(3)
    table[1] = 4
    table.view(-1)[2:].add_(2)
    if table.sum() == 6:
        x = x + torch.full((2,), 7)[0].item()
    size = torch.tensor(x.shape)
    return x, total, int(torch.tensor(4)), bool(torch.tensor(True)), size.prod().item(), x.view(size.tolist()), table.tolist(), table


@programs.add()
def known_indices(x):
    mask = torch.tensor([True, False, True])
    return x[torch.tensor(1)], x[mask], [1, 2, 3][torch.tensor(2)], x[:, torch.tensor([True, False, True, False])], x[range(2)]


@programs.add()
def sizes_as_tensors(x):
    """Sizes that torch computed from numbers, as Longformer does."""
    rows = torch.div(x.size(0) * 4, 2, rounding_mode="trunc")
    return x.view(rows, 2), x.new_zeros((rows + 1, 2)), x.reshape(1, rows, 2), x.as_strided((rows - 4, torch.tensor(2)), (1, 2)), x * rows


@programs.add()
def results_into(x):
    v, i = torch.empty(3), torch.empty(3, dtype=torch.long)
    found = torch.max(x, 1, out=(v, i))
    o = torch.empty(0)
    torch.add(x, x, out=o)
    k = torch.zeros(9, 16)
    torch.kron(x, x, out=k)
    return found.values is v, v, i, o + 1, k


@programs.add()
def geometry(x):
    return x.dim_order(), x.t().dim_order(), torch._check(x.shape[0] == 3), x + 1


@programs.add()
def checks_that_fail(x):
    found = []
    for check, message in ((torch._check, None), (torch._check_value, lambda: f"shape {x.shape}"), (torch._check_index, lambda: x.ndim)):
        try:
            check(x.shape[0] == 77, message)
        except (RuntimeError, ValueError, IndexError) as error:
            found.append((type(error).__name__, str(error)))
    return found, x + 1


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program):
    check(program)


def as_arrays_become_tensors(x):
    y = x * 2
    kept, cut, same = torch.asarray(y), torch.asarray(y, requires_grad=False), torch.asarray(y, requires_grad=True)
    other = torch.asarray(y, dtype=torch.float64)
    return kept * 3, cut * 3, same * 3, other, cut.is_leaf, kept.requires_grad, cut.data_ptr() == y.data_ptr()


@pytest.mark.parametrize("backend", [Capturing(), "aot_eager", "inductor"])
def test_asarray_of_tensors_with_history(backend):
    results = []
    for call in (as_arrays_become_tensors, magneto.optimize(backend)(as_arrays_become_tensors)):
        x = leaf()
        *values, is_leaf, requires_grad, shares = call(x)
        sum(value.sum() for value in values).backward()
        results.append(([value.requires_grad for value in values], is_leaf, requires_grad, shares, values, x.grad))
    assert_equal(results[1], results[0])


def new_leaf(x):
    y = torch.zeros(3).requires_grad_()
    z = x.detach().requires_grad_()
    return (y * 2).sum() + (z * 3).sum(), y, z


def new_parameter(x):
    w = nn.Parameter(torch.ones(4))
    return (x * w).sum(), w


def data_of_a_parameter(x):
    x.data = x.data * 2
    return (x * x).sum(), x


@pytest.mark.parametrize("backend", [Capturing(), "aot_eager"])
@pytest.mark.parametrize("fn", [new_leaf, new_parameter, data_of_a_parameter])
def test_gradients_of_new_leaves(fn, backend):
    """Operations on a leaf made in the region stand in the next one, so that the leaf gets its gradient."""
    results = []
    for call in (fn, magneto.optimize(backend)(fn)):
        x = leaf()
        loss, *leaves = call(x)
        loss.backward()
        results.append(([value.grad for value in leaves], [value.is_leaf for value in leaves], x.grad))
    assert_equal(results[1], results[0])


@pytest.mark.parametrize("backend", [Capturing(), "aot_eager"])
def test_gradients_after_no_grad(backend):
    """A graph that begins where gradients are off, and switches them on."""

    def fn(layer, x):
        with torch.no_grad():
            layer.weight.mul_(0.5)
            magneto.graph_break()
        return layer(x).sum()

    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    ours, plain = copy.deepcopy(layer), layer
    fn(plain, X).backward()
    magneto.optimize(backend)(fn)(ours, X).backward()
    assert_equal(ours.weight.grad, plain.weight.grad)


def test_one_statement_with_two_values():
    def fn(x):
        return int(x.sum()) + int((x + 1).sum()), x + 1

    backend = Capturing()
    assert_equal(magneto.optimize(backend)(fn)(X), fn(X))
    assert len(backend.graphs) == 3


def test_leaves_are_told_apart():
    def fn(x):
        return x * 2, x.is_leaf, x.grad_fn is None

    compiled = magneto.optimize(Capturing())(fn)
    x = leaf()
    for value in (x, x * 1, x):
        assert_equal(compiled(value), fn(value))


def test_what_only_the_finished_graph_knows():
    """Whether a tensor is a view, and the class of the step of autograd that made it."""

    def views(x):
        y = x * 2
        z = y.view(-1)
        return x._is_view(), y._is_view(), z._is_view(), y.detach()._is_view(), z

    def steps(x):
        step = (x * 2).grad_fn
        return (
            type(step).__name__,
            step.__class__ is type(step),
            isinstance(step, torch.autograd.graph.Node),
            isinstance(step, int),
            callable(step),
        )

    for fn in (views, steps):
        compiled = magneto.optimize("eager")(fn)
        for x in (leaf(), leaf()[0], leaf().view(-1)):
            assert_equal(compiled(x), fn(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_gradients_beside_inputs_whose_shape_changes_in_place(backend):
    def masked(x, m, w):
        m.t_()
        m.unsqueeze_(0)
        return (m * w * x).sum(-1), m.shape

    found = []
    for fn in (masked, magneto.optimize(backend)(masked)):
        for n in (3, 3, 4):
            x, m, w = (torch.arange(1.0, n * n + 1).view(n, n) * k for k in (1, 2, 3))
            w.requires_grad_()
            y, shape = fn(x, m, w)
            y.sum().backward()
            found.append((y.detach(), shape, m, m.stride(), w.grad))
    assert_equal(found[3:], found[:3], 1e-6)


def test_shapes_of_leaves_do_not_change_in_place():
    def program(x):
        weight = torch.nn.Parameter(x.detach())
        try:
            weight.t_()
        except RuntimeError as error:
            return weight, str(error)

    magneto.reset()
    assert str(magneto.optimize("eager")(program)(X)) == str(program(X))
