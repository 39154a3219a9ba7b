"""Results that are views, `as_strided` into shared storages, and what the caller writes between forward and backward."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto

COMPILERS = ("aot_eager", "inductor")
WEIGHT = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()


def with_offset(t: torch.Tensor) -> torch.Tensor:
    base = torch.zeros(t.numel() + 3)
    base[3:] = t.reshape(-1)
    return base[3:].view(t.shape)


def diagonal_of_a_slice(a: torch.Tensor) -> Any:
    a[..., ::2].fill_diagonal_(0.5)
    return a + 0


def strided_write(a: torch.Tensor) -> Any:
    a.as_strided((4,), (9,)).mul_(2)
    return a + 0


def strided_with_offset(a: torch.Tensor) -> Any:
    v = torch.empty(3, 4)
    v.copy_(a.view(-1)[5:17].view(3, 4))
    w = v.as_strided((2,), (3,), 1)
    w.mul_(3)
    return v, v.as_strided((3,), (2,), 4) * 1


def strided_of_a_copy(a: torch.Tensor) -> Any:
    v = a.view(-1)[5:17].view(3, 4).clone()
    w = v.t().as_strided((2, 2), (3, 1), 2)
    w.add_(3)
    return v, w * 2


def diagonal_of_a_copy(a: torch.Tensor) -> Any:
    v = torch.zeros(12).view(3, 4)
    v[:] = a.view(-1)[5:17].view(3, 4)
    v.fill_diagonal_(3)
    return v.as_strided((2, 3), (1, 1), 3) + 1


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("fn", [diagonal_of_a_slice, strided_write, strided_with_offset, strided_of_a_copy, diagonal_of_a_copy])
@pytest.mark.parametrize("place", ["front", "offset", "slice"])
def test_strided_memory(fn: Callable[..., Any], backend: str, place: str) -> None:
    def sample() -> torch.Tensor:
        values = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0))
        return {"front": values[:4].clone(), "offset": with_offset(values[:4]), "slice": values[1:5]}[place]

    expected_input, found_input = sample(), sample()
    expected = fn(expected_input)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # compiled, not left to eager
        found = magneto.optimize(backend)(fn)(found_input)
    for one, other in zip(*(value if isinstance(value, tuple) else (value,) for value in (expected, found)), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(expected_input, found_input)


def turned(x: torch.Tensor) -> Any:
    return (x @ WEIGHT).T


def linear_of_three_dimensions(x: torch.Tensor) -> Any:
    return F.linear(x.view(1, 3, 4), WEIGHT)


def squeezed(x: torch.Tensor) -> Any:
    return F.conv1d(x.view(1, 3, 4), torch.ones(2, 3, 2)).squeeze(0)


def turned_and_read(x: torch.Tensor) -> Any:
    y = x @ WEIGHT
    return y.T, torch.relu(y)


def divided(x: torch.Tensor) -> Any:
    return x / (x * x + 1)


def divided_and_turned(x: torch.Tensor) -> Any:
    y = x / (x * x + 1)
    return y.T, y.relu()


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("fn", [turned, linear_of_three_dimensions, squeezed, turned_and_read, divided, divided_and_turned])
@pytest.mark.parametrize("write", ["mul_", "t_", "unsqueeze_"])
def test_results_may_be_written(fn: Callable[..., Any], backend: str, write: str) -> None:
    """As eager allows, and with eager's gradients: a result that is a view inside the graph is none to autograd, and a formula that computes the
    result again has not saved it."""

    def run(call: Callable[..., Any]) -> Any:
        WEIGHT.grad = None
        x = torch.arange(12.0).view(3, 4).requires_grad_()
        results = call(x)
        results = list(results) if isinstance(results, tuple) else [results]
        if write == "mul_":
            results[0].mul_(3)
        elif write == "unsqueeze_":
            results[0].unsqueeze_(0)
        elif results[0].dim() == 2:
            results[0].t_()
        sum((result * result).sum() for result in results).backward()
        return [*(result.detach() for result in results), x.grad, WEIGHT.grad]

    expected = run(fn)
    optimised = magneto.optimize(backend)(fn)
    for _ in range(2):
        for one, other in zip(expected, run(optimised), strict=True):
            assert one is other is None or torch.allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", COMPILERS)
def test_a_leaf_that_was_kept_may_get_a_history(backend: str) -> None:
    """What the missing part of backward would read has been written since, by another region, and is no leaf any more."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> Any:
        largest = b.max()
        loss = F.binary_cross_entropy_with_logits(a, b.sigmoid())
        magneto.graph_break()
        a.select(0, 5).div_(largest.abs() + 1)
        return largest, torch.where(largest > b, largest, b), loss

    def run(call: Callable[..., Any]) -> Any:
        a, b = torch.arange(8.0), torch.linspace(-1, 1, 8).requires_grad_()
        largest, chosen, loss = call(a, b)
        (largest + chosen.sum()).backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return b.grad, a.detach()

    for one, other in zip(run(fn), run(magneto.optimize(backend)(fn)), strict=True):
        assert torch.allclose(one, other)


def test_a_divisor_under_a_mask() -> None:
    """A divisor that is known outside of the loop, used where memory is read under a condition."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> Any:
        largest = b.max()
        a.select(0, 5).div_(largest.abs() + 1)
        return largest, torch.where(largest > b, largest, b)

    a, b = torch.arange(8.0), torch.linspace(-1, 1, 8)
    expected_a = a.clone()
    expected = fn(expected_a, b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = magneto.optimize("inductor")(fn)(a, b)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert torch.equal(a, expected_a)


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 2.0])
def test_gradients_of_a_largest_element(backend: str, weight: float) -> None:
    """Infinities and nan stay where the largest elements are."""

    def fn(x: torch.Tensor) -> Any:
        return x.max(), x.min(), x.median(), x.amax(), x.max(1)[0].sum(), x.norm(float("inf"))

    def run(call: Callable[..., Any], k: int) -> torch.Tensor:
        x = torch.tensor([[1.0, 2, 3], [3, 0, 3]]).requires_grad_()
        (call(x)[k] * weight).backward()
        assert x.grad is not None
        return x.grad

    optimised = magneto.optimize(backend)(fn)
    for k in range(6):
        assert torch.allclose(run(fn, k), run(optimised, k), equal_nan=True)


@pytest.mark.parametrize("backend", COMPILERS)
def test_memory_with_gaps_gets_a_history(backend: str) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b.unsqueeze(0).mul_(a)
        return b * 2

    def run(call: Callable[..., Any]) -> Any:
        a = torch.linspace(-1, 1, 24).view(8, 1, 3).requires_grad_()
        memory = torch.arange(768.0).view(16, 8, 6)
        result = call(a, memory[::2, ::2, ::2])
        result.sum().backward()
        return result.detach(), a.grad, memory.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", magneto.MagnetoWarning)  # W104: left to eager
        found = run(magneto.optimize(backend)(fn))
    for one, other in zip(run(fn), found, strict=True):
        assert torch.allclose(one, other)


def test_results_go_backward_one_after_another() -> None:
    """Without `retain_graph`, where their formulas share no saved value; in any order; nothing is held when the results are gone."""
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def apart(x: torch.Tensor) -> Any:
        return (one(x).tanh() ** 2).sum(), (other(x).sigmoid() ** 2).sum(), one(x).cos().sum()

    def sums(x: torch.Tensor) -> Any:
        return x.sum(), x.mean(), x.sum(0)

    def shared(x: torch.Tensor) -> Any:
        hidden = one(x).tanh()
        return (hidden**2).sum(), other(hidden).exp().sum(), x.sum()

    def run(call: Callable[..., Any], order: tuple[int, ...], write: bool = False) -> list[Any]:
        one.zero_grad()
        other.zero_grad()
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        results = call(x)
        seen: list[Any] = []
        for k in order:
            try:
                results[k].sum().backward()
                seen += [None if p.grad is None else p.grad.clone() for p in (x, one.weight, other.weight)]
            except RuntimeError as error:
                seen.append(str(error)[:60])
                break
            if write:
                with torch.no_grad():
                    other.weight.mul_(1.0)
        references = [weakref.ref(result) for result in results]
        del results
        assert all(reference() is None for reference in references)
        return seen

    for backend in COMPILERS:
        for fn in (apart, sums, shared):
            optimised = magneto.optimize(backend)(fn)
            for order in ((0, 1, 2), (2, 0, 1), (1, 1), (0, 1, 0), (1, 2)):
                expected, found = run(fn, order), run(optimised, order)
                assert len(expected) == len(found), (fn, order, expected, found)
                for a, b in zip(expected, found, strict=True):
                    assert a == b if a is None or isinstance(a, str) else torch.allclose(a, b, atol=1e-6), (fn, order)

    def late(x: torch.Tensor) -> Any:
        return x.sin().sum(), (x @ other.weight).sum()

    for call in (late, magneto.optimize("aot_eager")(late)):  # what is set aside for later must not be written either
        assert run(call, (0, 1), True)[-1] == run(late, (0, 1), True)[-1]


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("name", ["view_as", "squeeze", "transpose", "slice", "expand", "detach", "reshape", "turned", "turned apart"])
def test_views_of_a_leaf_without_grad_mode(backend: str, name: str) -> None:
    """Such a view requires grad although nothing is recorded, of the same shape too; what is detached does not."""
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "view_as": lambda x: x.view_as(x),
        "squeeze": lambda x: x.squeeze(),
        "transpose": lambda x: x.transpose(0, 0),
        "slice": lambda x: x[:],
        "expand": lambda x: x.expand(3, 4),
        "detach": lambda x: x.detach(),
        "reshape": lambda x: x.reshape(3, 4),
        "turned": lambda x: x.T,
        "turned apart": lambda x: x.T.detach(),
    }

    def seen(call: Callable[..., Any]) -> Any:
        x = torch.ones(3, 4).requires_grad_()
        with torch.no_grad():
            result = call(x)
        return result.requires_grad, result._is_view(), result._base is x, result is x

    assert seen(magneto.optimize(backend)(views[name])) == seen(views[name])
    assert not seen(magneto.optimize(backend)(lambda x: views[name](x.detach())))[0]


def test_equal_results_are_apart() -> None:
    """Results that happen to be the same computation lie in memory of their own."""

    def constants(x: torch.Tensor) -> Any:
        ones = torch.ones_like(x)
        return ones * 1, ones**2, ones.clone(), torch.where(x > 0, 1.0, 1.0), ones.clone().as_strided((2, 2), (1, 1), 1)

    def computed(x: torch.Tensor) -> Any:
        return (x * 2).clone(), x * 2, x + x, x.view(4, 4).amax(1), x.view(4, 4).amax(-1)

    for backend in COMPILERS:
        for fn in (constants, computed):
            x = torch.linspace(-1, 1, 16)
            found = magneto.optimize(backend)(fn)(x)
            for one, other in zip(found, fn(x), strict=True):
                assert torch.equal(one, other)
            assert len({result.untyped_storage().data_ptr() for result in found}) == len(found)


def _pieces(x: torch.Tensor) -> Any:
    first, second = x.unsafe_chunk(2, 1)
    whole = x * 3
    low, high = whole.unsafe_split_with_sizes((1, 3), 1)
    first.add_(1)
    second.reshape(-1)[:1].mul_(high[0, 0])
    low.sigmoid_()
    return first, second, whole, x.sum()


@pytest.mark.parametrize("backend", COMPILERS)
def test_pieces_that_are_no_views_for_autograd_share_memory(backend: str) -> None:
    """`unsafe_chunk`: the schema says nothing of the memory that its results share."""

    def seen(call: Callable[..., Any]) -> Any:
        x = torch.arange(12.0).view(3, 4)
        results = call(x)
        shared = [r.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for r in results]
        return [t.tolist() for t in (x, *results)], shared

    def trained(call: Callable[..., Any]) -> Any:
        x = torch.arange(12.0).view(3, 4).requires_grad_()
        total = sum(torch.unsafe_chunk(call(x), 2)).sum()
        total.backward()
        return x.grad

    def gates(x: torch.Tensor) -> Any:
        one, other = (x * 0.1).unsafe_split(2, 1)
        return one.sigmoid_() * other.tanh_()

    assert seen(magneto.optimize(backend)(_pieces)) == seen(_pieces)
    torch.testing.assert_close(trained(magneto.optimize(backend)(gates)), trained(gates))


def _of_a_product(x: torch.Tensor, w: torch.Tensor) -> list[Any]:
    """A linear layer without bias answers with its product's memory in another shape, which autograd does not know as a view."""
    y = torch.nn.functional.linear(x, w)
    z = torch.nn.functional.linear(x + 1, w)
    return [[y, y[:, 0]], [z[:, -2:], z.transpose(0, 1), z.detach()]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_product_in_another_shape_and_views_of_it(backend: str, order: tuple[int, int]) -> None:
    def fn(x, w):
        groups = _of_a_product(x, w)
        return tuple(group[i % len(group)] for group in groups for i in (*order, 2))

    compiled = magneto.optimize(backend)(fn)
    torch.manual_seed(0)
    for _ in range(3):
        x, w = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
        plain, ours = fn(x, w), compiled(x, w)
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b)
            assert (a.stride(), a.requires_grad, a._is_view()) == (b.stride(), b.requires_grad, b._is_view())
        assert [[a.data_ptr() == b.data_ptr() for b in ours] for a in ours] == [
            [a.data_ptr() == b.data_ptr() for b in plain] for a in plain
        ]
        losses = [sum((t.sin() * (n + 1)).sum() for n, t in enumerate(got)) for got in (ours, plain)]
        for a, b in zip(*(torch.autograd.grad(loss, (x, w)) for loss in losses), strict=True):
            torch.testing.assert_close(a, b)
        for got in (ours, plain):
            with torch.no_grad():
                got[0].mul_(2)
            got[3].add_(1)
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b)
            assert a._version == b._version
    assert magneto.stats()["fallbacks"] == 0


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("write", ["unsqueeze_(0)", "squeeze_()", "t_()", "transpose_(0, 1)", "swapaxes_(0, 1)", "as_strided_((2,), (1,))"])
def test_the_shape_of_a_view_changes_and_its_twin_keeps_its_own(backend: str, write: str) -> None:
    """Two views of one memory and one shape, one made of the other, are tensors of their own."""
    for twin in ("v.squeeze(0)", "v.view_as(v)", "v[:]", "v.expand(3, 4)", "v.detach()"):
        lines = f"def fn(a):\n    v = (a * 2).expand(3, 4)\n    w = {twin}\n    w.{write}\n    return v, w\n"
        namespace: dict[str, Any] = {}
        exec(lines, namespace)
        fn = namespace["fn"]

        def seen(call: Callable[..., Any]) -> Any:
            a = torch.arange(4.0).requires_grad_()
            v, w = call(a)
            (v.sin().sum() + w.cos().sum()).backward()
            return [(t.shape, t.stride(), t.tolist(), t.requires_grad, t._base is not None) for t in (v, w)], a.grad.tolist()

        assert seen(magneto.optimize(backend)(fn)) == seen(fn), lines


@pytest.mark.parametrize("backend", COMPILERS)
def test_elements_beyond_what_as_strided_was_called_on_get_no_gradient(backend: str) -> None:
    """Autograd's formula goes by the memory of the tensor it was called on, until the base is written: then the view is one of the base."""

    def beyond(a: torch.Tensor, write: bool) -> Any:
        y = a * 2
        v = y[0:1].as_strided((2, 2), (1, 3))
        if write:
            v.mul_(3)
        return v, y

    for write in (False, True):
        gradients = []
        for call in (beyond, magneto.optimize(backend)(beyond)):
            a = torch.arange(9.0).view(3, 3).requires_grad_()
            v, y = call(a, write)
            (v.sum() + y.sin().sum()).backward()
            gradients.append(a.grad)
        torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("backend", COMPILERS)
def test_an_infinite_gradient_of_a_part_of_a_complex_result(backend: str) -> None:
    """The part is returned and read: both gradients are real ones in eager, and no zero is multiplied by the infinity."""

    def part(x: torch.Tensor) -> Any:
        y = torch.fft.fft(x).imag
        return y, y.log(), y.sqrt()

    gradients = []
    for call in (part, magneto.optimize(backend)(part)):
        x = torch.ones(4, 3, 1).requires_grad_()
        sum(value.sum() for value in call(x)).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    assert torch.equal(gradients[0], torch.zeros(4, 3, 1))
