"""The control functions from a user's seat: as decorators with and without parentheses, on functions, methods, classes, generators and modules, as
context managers, nested, from several threads, with exceptions inside; what other libraries leave on functions; what wrong use says."""

from __future__ import annotations

import asyncio
import copy
import functools
import io
import sys
import threading
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from magneto import _C
from magneto.dynamo import marks
from tests.compare import Capturing, assert_equal

X = torch.linspace(-1, 1, 6)


class Seen:
    """Which functions were part of a graph: each program function adds another operation."""

    def __init__(self) -> None:
        self.backend = Capturing()
        self.optimize = magneto.optimize(self.backend)

    def captured(self, name: str) -> bool:
        return any(name in names for names in self.backend.operations())


def inner(x):
    return torch.tanh(x)


# ---- disable: on what ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decorate", [magneto.disable, magneto.disable(), magneto.disable(reason="talks to a database")], ids=["plain", "()", "reason"]
)
def test_disabled_functions_and_what_they_call_are_not_captured(decorate: Any) -> None:
    seen = Seen()

    @decorate
    def g(x):
        assert not magneto.is_compiling()
        return inner(x).exp()

    fast = seen.optimize(lambda x: g(x.sin()).cos())
    for _ in range(2):
        assert_equal(fast(X), g(X.sin()).cos())
    assert seen.backend.operations() == [["sin"], ["cos"]]


def test_without_recursion_the_function_itself_is_left_out() -> None:
    seen = Seen()

    @magneto.disable(recursive=False)
    def g(x):
        return inner(x).exp()

    fast = seen.optimize(lambda x: g(x.sin()).cos())
    assert_equal(fast(X), inner(X.sin()).exp().cos())
    assert seen.captured("tanh") and not seen.captured("exp")


class Methods:
    factor = 3

    @magneto.disable
    def method(self, x):
        return x * self.factor

    @staticmethod
    @magneto.disable
    def static(x):
        return x.exp()

    @classmethod
    @magneto.disable
    def of_class(cls, x):
        return x * cls.factor

    @property
    @magneto.disable
    def prop(self):
        return 7

    @magneto.disable
    @staticmethod
    def outermost(x):
        return x.exp()


def test_disabled_methods() -> None:
    one = Methods()

    def f(x):
        return one.method(x) + one.static(x) + Methods.static(x) + one.of_class(x) + Methods.of_class(x) + one.prop + Methods.method(one, x)

    seen = Seen()
    fast = seen.optimize(f)
    for _ in range(2):
        assert_equal(fast(X), f(X))
    assert not seen.captured("exp")
    assert_equal(one.outermost(X), X.exp())


def test_a_disabled_class_is_the_class() -> None:
    @magneto.disable
    class Thing:
        def __init__(self, k):
            self.k = k

        def scale(self, x):
            return inner(x) * self.k

        @staticmethod
        def static(x):
            return x.exp()

    seen = Seen()
    fast = seen.optimize(lambda x: Thing(2).scale(x) + Thing.static(x))
    assert_equal(fast(X), inner(X) * 2 + X.exp())
    assert isinstance(Thing, type) and isinstance(Thing(1), Thing)
    assert not seen.captured("tanh") and not seen.captured("exp")


def test_disabled_generators() -> None:
    @magneto.disable
    def parts(x):
        for k in range(3):
            got = yield inner(x) * k
            assert got is None

    def f(x):
        return sum(parts(x))

    seen = Seen()
    assert_equal(seen.optimize(f)(X), f(X))
    assert not seen.captured("tanh")


def test_a_disabled_module_is_a_module() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    off = magneto.disable(model)
    whole = nn.Sequential(off, nn.Sigmoid())
    assert isinstance(off, nn.Sequential) and off[0] is model[0] and len(list(whole.parameters())) == 2
    seen = Seen()
    fast = seen.optimize(whole)
    assert_equal(fast(X), whole(X))
    assert seen.captured("sigmoid") and not seen.captured("tanh")
    twin = copy.deepcopy(off)
    assert twin[0] is not off[0]
    assert_equal(twin(X), off(X))


def test_disable_as_a_block() -> None:
    seen = Seen()

    def f(x):
        y = x.sin()
        with magneto.disable():
            y = inner(y)
        return y + 1

    fast = seen.optimize(f)
    for _ in range(2):
        assert_equal(fast(X), f(X))
    assert not seen.captured("tanh")
    outside = seen.optimize(inner)
    with magneto.disable(), magneto.disable():
        seen.optimize(lambda x: x)  # making is not calling
    assert _C.active_policy() is None
    outside(X)
    assert seen.captured("tanh")


def test_an_exception_leaves_a_disabled_block() -> None:
    def f(x):
        try:
            with magneto.disable():
                raise KeyError("inside")
        except KeyError:
            return inner(x)

    seen = Seen()
    assert_equal(seen.optimize(f)(X), f(X))
    assert _C.active_policy() is None

    @magneto.disable
    def fails(x):
        raise ValueError("of the program")

    def g(x):
        try:
            fails(x)
        except ValueError as error:
            return x.sin(), str(error)

    assert_equal(magneto.optimize("eager")(g)(X), g(X))


def test_optimised_inside_disabled_inside_optimised() -> None:
    seen = Seen()
    innermost = seen.optimize(lambda x: x.exp())
    middle = magneto.disable(lambda x: inner(innermost(x)))
    outer = seen.optimize(lambda x: middle(x.sin()).cos())
    assert_equal(outer(X), inner(X.sin().exp()).cos())
    assert seen.backend.operations() == [["sin"], ["exp"], ["cos"]]


def test_disabling_an_optimised_callable() -> None:
    seen = Seen()
    off = magneto.disable(seen.optimize(inner))
    assert_equal(off(X), inner(X))


# ---- marks ----------------------------------------------------------------------------------------------------------------


def test_allow_in_graph_makes_one_node() -> None:
    @magneto.allow_in_graph
    def opaque(x):
        return x.sin().cos()

    class Owner:
        @staticmethod
        @magneto.allow_in_graph
        def static(x):
            return x.exp()

    seen = Seen()
    fast = magneto.optimize(seen.backend, nopython=True)(lambda x: opaque(x) + Owner.static(x))
    assert_equal(fast(X), X.sin().cos() + X.exp())
    assert seen.backend.operations() == [["opaque", "static", "add"]]


def test_marks_of_several_and_marks_do_not_reach_wrappers() -> None:
    def one(x):
        return x.sin()

    def two(x):
        return x.cos()

    assert magneto.disallow_in_graph([one, two])[0] is one

    @functools.wraps(one)
    def wrapper(x):
        return x.exp()

    seen = Seen()
    fast = seen.optimize(lambda x: one(x) + two(x) + wrapper(x))
    assert_equal(fast(X), X.sin() + X.cos() + X.exp())
    assert seen.captured("exp")
    assert marks.mark_of(wrapper) is None


def test_a_torch_function_that_is_not_wanted_in_graphs() -> None:
    magneto.disallow_in_graph(torch.sub)
    try:
        seen = Seen()
        fast = seen.optimize(lambda x: torch.sub(x.sin(), 1).cos())
        assert_equal(fast(X), (X.sin() - 1).cos())
        assert seen.backend.operations() == [["sin"], ["cos"]]
    finally:
        marks.forget()


def test_constant_results() -> None:
    calls = []

    @magneto.assume_constant_result
    def settings(k=2):
        calls.append(k)
        return {"a": k, "rest": [1, 2]}

    fast = magneto.optimize("eager", nopython=True)(lambda x: x * settings()["a"] + settings(k=3)["rest"][1])
    for _ in range(3):
        assert_equal(fast(X), X * 2 + 2)
    assert calls == [2, 3]


def test_graph_breaks_have_reasons() -> None:
    def f(x):
        y = x.sin()
        magneto.graph_break("look here")
        return y.cos()

    assert_equal(magneto.optimize("eager")(f)(X), f(X))
    assert magneto.stats()["break_reasons"] == ["graph_break() was called: look here"]
    with pytest.raises(magneto.Unsupported, match="look here"):
        magneto.optimize("eager", nopython=True)(f)(X)
    assert "look here" in str(magneto.explain(f, X))


@pytest.mark.parametrize("question", [magneto.is_compiling, torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling])
def test_is_compiling(question: Any) -> None:
    def f(x):
        return x + 1 if question() else x - 1

    assert_equal(magneto.optimize("eager")(f)(X), X + 1)
    assert_equal(f(X), X - 1)


# ---- run, reset -------------------------------------------------------------------------------------------------------------


def test_run_uses_what_is_compiled_and_leaves_the_function_as_it_is() -> None:
    fast = magneto.optimize("eager")(lambda x: x.sin())
    frozen = magneto.run(fast)
    frozen(X)
    assert magneto.stats()["graphs"] == 0
    fast(X)
    frozen(X)
    (entry,) = magneto.inspect(frozen)
    assert entry.hits == 2
    frozen(X.double())
    assert magneto.stats()["graphs"] == 1
    fast(X.double())
    assert magneto.stats()["graphs"] == 2
    assert magneto.run(frozen)(X) is not None


def test_run_on_modules_and_plain_functions() -> None:
    model = magneto.optimize("eager")(nn.Linear(6, 2))
    frozen = magneto.run(model)
    assert isinstance(frozen, nn.Linear) and frozen.weight is model.weight
    frozen(X)
    assert magneto.stats()["graphs"] == 0
    model(X)
    assert_equal(frozen(X), model(X))

    @magneto.run
    def plain(x):
        return x.sin()

    assert_equal(plain(X), X.sin())
    assert magneto.stats()["graphs"] == 1


def test_reset_inside_and_between_calls() -> None:
    def f(x):
        y = x.sin()
        magneto.reset()
        return y.cos()

    fast = magneto.optimize("eager")(f)
    for _ in range(2):
        assert_equal(fast(X), f(X))


def test_threads() -> None:
    fast = magneto.optimize("eager")(lambda x: x.sin() + magneto.is_compiling())
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(30):
            if not torch.equal(fast(X), X.sin() + 1):
                wrong.append("captured")

    def off() -> None:
        for _ in range(30):
            with magneto.disable():
                wrong.extend([] if _C.active_policy() is None else ["active"])

    threads = [threading.Thread(target=target) for target in (work, off, work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- what is optimised ------------------------------------------------------------------------------------------------------


def test_generators_and_coroutines_capture_what_they_call() -> None:
    seen = Seen()

    @seen.optimize
    def parts(x):
        total = 0
        for k in range(3):
            sent = yield inner(x) * k
            total += sent or 0
        return total

    def drive(generator):
        found = [next(generator), generator.send(2)]
        generator.close()
        return found

    assert_equal(drive(parts(X)), drive(parts.__wrapped__(X)))
    assert seen.captured("tanh")

    @seen.optimize
    async def later(x):
        await asyncio.sleep(0)
        return inner(x)

    assert_equal(asyncio.run(later(X)), inner(X))


def test_optimised_callables_join_a_region_of_the_same_kind() -> None:
    seen = Seen()
    model = seen.optimize(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    helper = seen.optimize(lambda x: x.exp())
    fast = magneto.optimize(seen.backend)(lambda x: helper(model(x)) + 1)
    assert_equal(fast(X), helper(model(X)) + 1)
    assert len(seen.backend.graphs[0].graph.find_nodes(op="call_method", target="exp")) == 1
    assert magneto.stats()["breaks"] == 0
    other = magneto.optimize("eager")(lambda x: helper(x) + 1)  # another backend: a region of its own
    assert_equal(other(X), X.exp() + 1)
    assert magneto.stats()["breaks"] == 1


# ---- other compilers' marks and callables -----------------------------------------------------------------------------------


def test_marks_of_torchs_compiler_are_honoured() -> None:
    @torch.compiler.disable
    def whole(x):
        return inner(x)

    @torch.compiler.disable(recursive=False)
    def itself(x):
        return inner(x).exp()

    @torch.compiler.allow_in_graph
    def node(x):
        return x.sin()

    @torch.compiler.assume_constant_result
    def constant():
        return 3

    seen = Seen()
    assert_equal(seen.optimize(lambda x: whole(x) + 1)(X), inner(X) + 1)
    assert not seen.captured("tanh")
    assert_equal(seen.optimize(lambda x: itself(x) + 1)(X), inner(X).exp() + 1)
    assert seen.captured("tanh") and not seen.captured("exp")
    assert_equal(magneto.optimize(seen.backend, nopython=True)(lambda x: node(x) * constant())(X), X.sin() * 3)
    assert seen.captured("node")


def silently(fn: Any, *args: Any) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="Guards may run slower on Python 3.13.0")
        return fn(*args)


def test_our_callables_inside_what_torch_compiles() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    seen = Seen()
    helper, fast = seen.optimize(lambda x: inner(x).exp()), seen.optimize(model)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = fast

        def forward(self, x):
            return helper(self.part(x)) + 1

    theirs = torch.compile(Whole(), backend="eager")
    for _ in range(2):
        assert_equal(silently(theirs, X), inner(model(X)).detach().exp() + 1)


def test_what_torch_compiled_inside_our_callables() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    theirs, function = torch.compile(model, backend="eager"), torch.compile(lambda x: x.exp(), backend="eager")
    seen = Seen()
    fast = seen.optimize(lambda x: function(theirs(x.sin())).cos())
    for _ in range(2):
        assert_equal(silently(fast, X), model(X.sin()).detach().exp().cos())
    assert not seen.captured("exp") and not seen.captured("tanh") and seen.captured("cos")


# ---- wrong use ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: magneto.disable(3), "disable.. expects a callable, got int"),
        (lambda: magneto.run(3), "run.. expects a callable, got int"),
        (lambda: magneto.allow_in_graph(3), "allow_in_graph.. expects a function, got int"),
        (lambda: magneto.allow_in_graph(nn.Linear), "got the class Linear"),
        (lambda: magneto.disallow_in_graph("x"), "expects a function, got str"),
        (lambda: magneto.assume_constant_result(None), "expects a function, got NoneType"),
        (lambda: magneto.graph_break(3), "expects a text, got int"),
        (lambda: magneto.mark_dynamic(3, 0), "expects a tensor, got int"),
        (lambda: magneto.mark_dynamic(X, 1), "dimension 1 of a tensor with 1 dimensions"),
        (lambda: magneto.mark_static(X, "a"), "expects a dimension"),
        (lambda: magneto.optimize(nn.Linear(2, 2)), "compile.module."),
        (lambda: magneto.optimize("eager", nopython=1), "nopython=True or False"),
        (lambda: magneto.optimize("eager", options=3), "options="),
        (lambda: magneto.compile("eager"), "expects a callable, got str"),
        (lambda: magneto.optimize("eager")(nn.Linear), "got the class Linear"),
    ],
)
def test_wrong_use_says_what_is_expected(call: Any, text: str) -> None:
    with pytest.raises(magneto.UserError, match=text):
        call()


def test_an_optimised_module_looks_like_the_module() -> None:
    model = nn.Sequential(nn.Linear(6, 2), nn.ReLU())
    fast = magneto.optimize("eager")(model)
    assert dir(fast) == dir(model) and repr(fast) == repr(model) and len(fast) == 2 and list(fast) == list(model)
    assert fast[0] is model[0] and isinstance(fast, nn.Sequential) and fast.__dict__ is model.__dict__
    for kind in (torch.float64, torch.float32):
        assert fast.to(kind) is fast and model[0].weight.dtype is kind
    stored = io.BytesIO()
    torch.save(fast, stored)
    stored.seek(0)
    assert type(torch.load(stored, weights_only=False)) is nn.Sequential
    assert isinstance(types.MethodType(fast, 1), types.MethodType) and "torch" in sys.modules
