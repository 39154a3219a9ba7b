"""Programs that once gave another result than eager."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

import magneto
from tests.compare import same

BACKENDS = ("eager", "inductor")


@pytest.fixture(autouse=True)
def fresh() -> None:
    magneto.reset()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_slot_is_guarded(backend: str) -> None:
    def program(a: torch.Tensor, drop: bool) -> object:
        b = a * 2
        magneto.graph_break()
        if drop:
            del b
        magneto.graph_break()
        try:
            return b + a
        except NameError as error:
            return str(error)

    optimized = magneto.optimize(backend)(program)
    x = torch.ones(2)
    for drop in (True, False, True):
        expected, actual = program(x, drop), optimized(x, drop)
        assert type(expected) is type(actual)
        assert torch.equal(expected, actual) if isinstance(expected, torch.Tensor) else expected == actual


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failing_graph_leaves_no_trace(backend: str) -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        noise = torch.nn.functional.dropout(a, 0.5)
        return torch.nn.functional.embedding(torch.tensor([50]), noise)

    results = []
    for fn in (program, magneto.optimize(backend)(program)):
        torch.manual_seed(3)
        a = torch.zeros(3, 4)
        with pytest.raises(IndexError, match="index out of range in self"):
            fn(a)
        results.append((a, torch.rand(2)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_capture_draws_no_random_numbers(backend: str) -> None:
    def program(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.bernoulli(a), torch.multinomial(a, 2), torch.randn(2, generator=torch.Generator().manual_seed(1)), torch.rand(2)

    torch.manual_seed(1)
    expected = program(torch.full((3, 4), 0.5))
    torch.manual_seed(1)
    actual = magneto.optimize(backend)(program)(torch.full((3, 4), 0.5))
    assert all(torch.equal(p, q) for p, q in zip(expected, actual, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_lazily_negated_views(backend: str) -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(torch.stack([a, a], -1)).conj().imag * 2

    x = torch.arange(4.0)
    assert torch.equal(magneto.optimize(backend)(program)(x), program(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_generator_left_half_way_is_closed(backend: str) -> None:
    log: list[str] = []

    def items(a: torch.Tensor) -> object:
        try:
            yield a
            yield a + 1
        finally:
            log.append("closed")

    def program(a: torch.Tensor) -> torch.Tensor:
        for item in items(a):  # type: ignore[attr-defined]
            return item * 2
        return a

    assert torch.equal(magneto.optimize(backend)(program)(torch.ones(2)), torch.full((2,), 2.0))
    gc.collect()
    assert log == ["closed"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_break_keeps_no_tensor(backend: str) -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        b = a * 2
        magneto.graph_break()
        return b + 1

    optimized = magneto.optimize(backend)(program)
    a = torch.ones(3)
    optimized(a)
    kept = weakref.ref(a)
    del a
    gc.collect()
    assert kept() is None


@pytest.fixture(scope="module")
def extension() -> Iterator[object]:
    library = torch.library.Library("magneto_tests", "FRAGMENT")
    for name in ("known", "unknown", "counted"):
        library.define(f"{name}(Tensor x) -> Tensor")
    library.impl("known", lambda x: x[:1] * 2, "CPU")
    library.impl("unknown", lambda x: x[x > 0], "CPU")
    library.impl("counted", lambda x: x[x > 0], "CPU")
    torch.library.register_fake("magneto_tests::known", lambda x: x.new_empty((1,)), lib=library)
    torch.library.register_fake("magneto_tests::counted", lambda x: x.new_empty((torch.library.get_ctx().new_dynamic_size(),)), lib=library)
    yield torch.ops.magneto_tests
    library._destroy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "breaks"), [("known", 0), ("unknown", 1), ("counted", 1)])
def test_shapes_of_extension_operators_are_not_guessed(extension: object, name: str, breaks: int, backend: str) -> None:
    """`torchvision::nms` ran on zeros while the program was traced, and its length came from there."""
    operator = getattr(extension, name)

    def program(x: torch.Tensor) -> tuple[object, ...]:
        found = operator(x + 1)
        return len(found), found.shape[0] * 2, found * 3

    optimized = magneto.optimize(backend)(program)
    for x in (torch.arange(-3.0, 3), torch.ones(6)):
        length, double, values = optimized(x)
        assert (length, double) == program(x)[:2] and torch.equal(values, program(x)[2])
    if backend == "eager" and name == "counted":
        breaks = 0  # its graphs need no sizes
    assert magneto.stats()["breaks"] >= breaks and (breaks > 0 or magneto.stats()["breaks"] == 0)


def test_handles_of_hooks_made_inside() -> None:
    def program(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, object]:
        handle = model.register_forward_hook(lambda module, args, out: out * 2)
        return model(x), handle

    model, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    y, handle = magneto.optimize("eager")(program)(model, x)
    handle.remove()
    assert torch.equal(y, model(x) * 2) and not model._forward_hooks
    assert not any("laid out by C code" in reason for reason in magneto.stats()["break_reasons"])


def test_functions_given_other_code_and_defaults():
    """Found by the fuzzer: identity of a function says nothing of its code."""

    def source(n):
        return n + 1

    def scaled(n, k=2):
        return n * k

    class Holder:
        def method(self, x):
            return x + 1

    namespace = {"holder": Holder(), "source": source, "scaled": scaled}
    exec("def f(x):\n    return source(x), scaled(x), holder.method(x)", namespace)
    f = namespace["f"]
    compiled = magneto.optimize("eager")(f)
    same(f, compiled, torch.ones(2))
    source.__code__ = (lambda n: n * 3).__code__
    same(f, compiled, torch.ones(2))
    scaled.__defaults__ = (5,)
    same(f, compiled, torch.ones(2))
    Holder.method.__code__ = (lambda self, x: x * 7).__code__
    same(f, compiled, torch.ones(2))
    same(f, compiled, torch.ones(2))


def test_constructors_of_existing_exceptions():
    """Found by the fuzzer: `super().__init__(text)`, when only the constructor is captured, sets the arguments of the real exception."""

    class Oops(Exception):
        def __init__(self, text, code=0):
            super().__init__(text)
            self.code = code

    error = Exception.__new__(Oops, "a", 3)
    magneto.optimize("eager")(Oops.__init__)(error, "a", 3)
    assert (error.args, error.code) == (("a",), 3)


def test_lookup_in_a_single_number_and_wrong_devices(recwarn):
    """`index_select` of a tensor without dimensions ran in eager; a wrong name of a device was called an error of magneto's own."""
    f, place = magneto.optimize("inductor")(lambda x, i: x.index_select(0, i) * 2), torch.tensor([0])
    assert f(torch.tensor(2.0), place) == 4 and f(torch.tensor(3.0), torch.tensor(0)) == 6
    for device in ("nodevice", "float32"):
        same(lambda x, name=device: x.to(name), magneto.optimize("eager")(lambda x, name=device: x.to(name)), torch.ones(2))
    assert not recwarn.list


def test_rows_selected_by_a_single_number_are_compiled():
    def program(x, i):
        return torch.index_select(x, 1, i) + 1, torch.index_select(x, 0, torch.tensor(2)) * x

    same(program, magneto.optimize("inductor")(program), torch.randn(3, 4), torch.tensor(1))
    assert magneto.stats()["fallbacks"] == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace_records_what_is_compiled():
    """A compiled region ran inside `torch.jit.trace`, which recorded its result as a constant."""
    for backend in ("aot_eager", "inductor"):
        f = magneto.optimize(backend)(lambda x: (x * 2).sin() + 1)
        f(torch.ones(3))
        traced, other = torch.jit.trace(f, torch.ones(3)), torch.rand(3)
        torch.testing.assert_close(traced(other), f(other))


def test_the_first_call_of_training_is_not_held():
    """The plan of the backward half held the tensors that the first call was compiled with."""
    for backend in ("aot_eager", "inductor"):
        f, x = magneto.optimize(backend)(lambda x: (x.exp() * 2).sum()), torch.ones(3, requires_grad=True)
        f(x).backward()
        held = weakref.ref(x)
        del x
        assert held() is None, backend


def test_optimised_functions_have_the_attributes_of_functions():
    import typing

    def f(x: torch.Tensor, n: int = 2) -> torch.Tensor:
        return x * n

    f.tag = "kept"
    compiled = magneto.optimize("eager")(f)
    assert typing.get_type_hints(compiled) == typing.get_type_hints(f)
    assert compiled.tag == "kept" and compiled.__wrapped__ is f


X = torch.arange(48.0).reshape(4, 3, 4)
EMPTY, PLACES = torch.ones(0, 4), torch.zeros(3, dtype=torch.int64)
REFUSED = {
    "a mask that is shorter than its dimension": lambda: X[:, torch.tensor([True, False])],
    "a mask that is longer than its dimension": lambda: X[..., torch.tensor([True, False, True, False, False])],
    "a mask with one dimension too many": lambda: X[0, 0, 0, torch.tensor([True])],
    "masks that fit": lambda: (X[:, torch.tensor([True, False, True])], X[None, ..., torch.tensor([True, False, True, False]), None]),
    "a row that is not there": lambda: X.select_scatter(X[0], 0, 7) + 1,
    "a dimension that a number does not have": lambda: X[0, 0, 1].argmax(1) + 1,
    "dimensions that a number has": lambda: (X[0, 0, 1].argmax(-1) + 1, X[0, 0, 1].prod(0) + 1, (X[0, 0, 1] > 0).all(0)),
    "ends of two types": lambda: torch.lerp(X, X.double(), 0.5) + 1,
    "weights of another type": lambda: torch.lerp(X, X + 1, X.double()) + 1,
    "a weight of another type that is a number": lambda: torch.lerp(X, X + 1, X.double()[0, 0, 0]) + 1,
    "rows of an empty table": lambda: torch.nn.functional.embedding(PLACES, EMPTY) + 1,
    "elements of an empty dimension": lambda: EMPTY.index_select(0, PLACES) + 1,
    "gathered from an empty dimension": lambda: EMPTY.gather(0, PLACES[:, None].expand(-1, 4)) + 1,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused(name: str, backend: str) -> None:
    same(REFUSED[name], magneto.optimize(backend)(REFUSED[name]))
