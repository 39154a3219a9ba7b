"""The public functions: what they accept, what they refuse and how, and that optimised objects are still the user's objects."""

from __future__ import annotations

import abc
import copy
import pickle
from typing import Any, ClassVar

import pytest
import torch

import magneto
from tests.compare import same

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def add_one(x):
    return x + 1


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x):
        return self.linear(x).relu()


# ---- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [3, None, "text", X], ids=lambda v: type(v).__name__)
def test_a_non_callable_is_refused(value: Any) -> None:
    if value is None:
        value = object()
    with pytest.raises(magneto.UserError, match="expects a callable"):
        magneto.optimize("eager")(value)


def test_a_class_is_refused() -> None:
    with pytest.raises(magneto.UserError, match="the class Net"):
        magneto.compile(Net)


def test_unknown_backend_suggests() -> None:
    with pytest.raises(magneto.UserError, match="did you mean 'inductor'"):
        magneto.optimize("inducter")


def test_unknown_flag_suggests() -> None:
    with pytest.raises(magneto.UserError, match="did you mean 'recompile_limit'"):
        magneto.config.recompile_limt = 3
    with pytest.raises(magneto.UserError):
        magneto.optimize("eager", options={"recompile_limt": 3})


def test_unknown_mode() -> None:
    with pytest.raises(magneto.UserError, match="unknown mode 'fast'"):
        magneto.compile(add_one, mode="fast")


def broken(gm, example_inputs):
    raise ValueError("my backend broke")


def test_a_backend_that_raises_runs_in_eager_with_a_warning() -> None:
    with pytest.warns(magneto.MagnetoWarning, match="my backend broke"):
        result = magneto.optimize(broken)(add_one)(X)
    assert torch.equal(result, X + 1)


def test_a_backend_that_raises_raises_under_nopython_with_its_own_traceback() -> None:
    with pytest.raises(ValueError, match="my backend broke") as raised:
        magneto.optimize(broken, nopython=True)(add_one)(X)
    assert any(entry.name == "broken" for entry in raised.traceback)


def test_a_backend_that_returns_no_callable_is_told_so() -> None:
    with pytest.raises(magneto.UserError, match="returned int"):
        magneto.optimize(lambda gm, inputs: 3)(add_one)(X)


def test_a_function_that_raises_in_the_middle() -> None:
    def f(x, log):
        log.append("before")
        y = x + 1
        if x.shape[0] == 2:
            raise RuntimeError("in the middle")
        return y

    for backend in ("eager", "inductor"):
        log: list[str] = []
        with pytest.raises(RuntimeError, match="in the middle") as raised:
            magneto.optimize(backend)(f)(X, log)
        assert raised.traceback[-1].lineno == f.__code__.co_firstlineno + 3
        assert log == ["before"]


# ---- what is returned ------------------------------------------------------------------------------------------------------


def test_an_optimised_function_keeps_its_identity() -> None:
    fast = magneto.optimize("eager")(add_one)
    assert (fast.__name__, fast.__module__, fast.__wrapped__) == ("add_one", __name__, add_one)


def test_methods_builtins_partials_and_callable_objects() -> None:
    import functools

    class Scale:
        def __init__(self, k):
            self.k = k

        def __call__(self, x):
            return x * self.k

        def method(self, x):
            return x - self.k

    scale = Scale(3)
    for target in (scale, scale.method, torch.relu, functools.partial(torch.add, alpha=2, other=X)):
        same(target, magneto.optimize("eager")(target), X)


def test_a_function_of_torch_itself_is_captured() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    fn = magneto.optimize(backend, nopython=True)(torch.nn.functional.cross_entropy)
    assert fn.__name__ == "cross_entropy"
    x, target = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([0, 1])
    assert torch.equal(fn(x, target, reduction="sum"), torch.nn.functional.cross_entropy(x, target, reduction="sum"))
    assert len(graphs) == 1


def test_a_decorated_method() -> None:
    class Thing:
        k = 2

        @magneto.optimize("eager")
        def scaled(self, x):
            return x * self.k

    assert torch.equal(Thing().scaled(X), X * 2)


def test_an_optimised_module_is_the_module() -> None:
    net = Net()
    fast = magneto.compile(net, backend="eager")
    assert isinstance(fast, Net) and fast.linear is net.linear
    assert list(fast.state_dict()) == list(net.state_dict())
    fast.eval()
    assert not net.training
    fast.extra = 1
    assert net.extra == 1
    same(net, fast, X)
    fast.to(torch.float64)
    same(net, fast, X.double())


def test_registries_of_classes_do_not_hear_of_the_optimised_module() -> None:
    class Meta(abc.ABCMeta):
        made: ClassVar[list[str]] = []

        def __new__(meta, name: str, bases: Any, namespace: Any, **kwargs: Any) -> Any:
            meta.made.append(name)
            return super().__new__(meta, name, bases, namespace, **kwargs)

    class Base(torch.nn.Module, metaclass=Meta):
        known: ClassVar[dict[str, type]] = {}

        def __init_subclass__(cls, *, tag: str, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            cls.known[tag] = cls

        @abc.abstractmethod
        def forward(self, x: Any) -> Any: ...

    class Twice(Base, tag="twice"):
        def forward(self, x: Any) -> Any:
            return x * 2

    fast = magneto.compile(Twice(), backend="eager")
    same(Twice(), fast, X)
    assert Base.known == {"twice": Twice} and Meta.made == ["Base", "Twice"]
    assert isinstance(fast, Twice) and isinstance(fast, Base) and not isinstance(Twice(), type(fast)) and isinstance(Twice(), Base)

    class Derived(type(fast), tag="derived"):  # type: ignore[misc]
        pass

    assert Base.known["derived"] is Derived


def test_copies_and_pickles() -> None:
    fast = magneto.compile(Net(), backend="eager")
    twin = copy.deepcopy(fast)
    assert twin.linear.weight is not fast.linear.weight
    same(fast, twin, X)
    plain = pickle.loads(pickle.dumps(fast))
    assert type(plain) is Net
    same(plain, fast, X)


def test_optimising_twice_uses_the_last_backend() -> None:
    seen: list[str] = []

    def backend(name):
        def run(gm, inputs):
            seen.append(name)
            return gm.forward

        return run

    once = magneto.optimize(backend("first"))(add_one)
    magneto.optimize(backend("second"))(once)(X)
    assert seen == ["second"]


# ---- control --------------------------------------------------------------------------------------------------------------


def test_disable_as_argument_decorator_and_context() -> None:
    assert magneto.optimize("eager", disable=True)(add_one) is add_one
    fast = magneto.optimize("eager")(magneto.disable(add_one))
    assert torch.equal(fast(X), X + 1)
    fast = magneto.optimize("eager")(add_one)
    with magneto.config.patch(disable=True):
        fast(X)
    assert magneto.stats()["graphs"] == 0


def test_run_compiles_nothing_new() -> None:
    fast = magneto.optimize("eager")(add_one)
    fast(X)
    frozen = magneto.run(fast)
    assert torch.equal(frozen(X), X + 1) and torch.equal(frozen(X[0]), X[0] + 1)
    assert magneto.stats()["graphs"] == 1


def test_reset_forgets() -> None:
    fast = magneto.optimize("eager")(add_one)
    fast(X)
    magneto.reset()
    assert magneto.stats()["graphs"] == 0
    fast(X)
    assert magneto.stats()["graphs"] == 1


def test_is_compiling() -> None:
    def f(x):
        return x + (1 if magneto.is_compiling() else 0)

    assert torch.equal(magneto.optimize("eager")(f)(X), X + 1)
    assert torch.equal(f(X), X)


def test_allow_in_graph_and_constants() -> None:
    @magneto.allow_in_graph
    def opaque_node(x):
        return x * 2

    @magneto.assume_constant_result
    def setting():
        return 5

    def f(x):
        return opaque_node(x) + setting()

    fast = magneto.optimize("eager", nopython=True)(f)
    assert torch.equal(fast(X), X * 2 + 5)
    assert any(node.target is opaque_node for node in magneto.inspect(fast)[0].graph.graph.nodes)


# ---- inspection and export -------------------------------------------------------------------------------------------------


def test_inspect_shows_everything() -> None:
    fast = magneto.optimize("inductor")(add_one)
    fast(X)
    (entry,) = magneto.inspect(fast)
    assert entry.function == "add_one" and entry.offset == 0 and entry.breaks == ()
    assert "L['x']: Tensor float32[2, 3]" in str(entry.guards)
    assert "def add_one_at_0(x):" in entry.source
    assert len(entry.kernels) == 1
    assert len(magneto.inspect(add_one)) == 1
    with pytest.raises(magneto.UserError):
        magneto.inspect(3)


def test_export_keeps_structure_and_parameters() -> None:
    net = Net()

    def f(x, other):
        return {"sum": net(x) + other[0], "rest": [other[1], 3]}

    gm, guards = magneto.export(f, X, (X, X * 2))
    assert len(list(gm.parameters())) == 2 and len(guards) > 0
    same(f, gm, X * 3, (X, X - 1))


def test_export_tells_equal_arguments_apart() -> None:
    gm, _ = magneto.export(lambda x, y: x - y, X, X)
    assert torch.equal(gm(X, X * 3), X - X * 3)


def test_export_refuses_a_break() -> None:
    def f(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(magneto.Unsupported):
        magneto.export(f, X)


def test_export_of_aten_operations_with_views_mutation_and_parameters() -> None:
    net = Net()

    def f(x):
        x[0] = 0
        y = net(x) * 2
        return y, y.view(-1)[2:], x

    gm, _ = magneto.export(f, X.clone(), aten_graph=True)
    assert all(isinstance(node.target, torch._ops.OpOverload) for node in gm.graph.nodes if node.op == "call_function")
    same(f, gm, X * 3)


def test_generated_code_is_the_programs() -> None:
    """Graph modules of torch.fx and functions from `exec` are captured whole, whatever their file is called."""
    namespace: dict[str, Any] = {}
    exec(compile("def made(x):\n    return x.sin() * 2\n", "<made by a template>", "exec"), namespace)
    module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    x = torch.ones(2, 4)
    for target in (namespace["made"], module, module.forward):
        magneto.reset()
        report = magneto.explain(target, x)
        assert len(report.graphs) == 1
        assert torch.equal(magneto.optimize("eager", nopython=True)(target)(x), target(x))


def test_state_of_an_optimised_submodule_is_one() -> None:
    """What its forward assigns is seen by the optimised module around it, and the other way, within one call and between calls."""

    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.seen = 1, None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.factor += 1
            self.seen = x if self.seen is None else torch.cat([self.seen, x])
            return x * self.factor

        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return self(x) + self.factor

    class Outer(torch.nn.Module):
        def __init__(self, wrap: Any) -> None:
            super().__init__()
            self.inner = wrap(Inner())

        def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
            first, count = self.inner(x) + self.inner.factor, len(self.inner.seen)
            self.inner.factor = 5
            self.inner.extra = first.detach()
            return first, count, self.inner.twice(x), self.inner.extra, self.inner.factor, len(self.inner.seen)

    def calls(wrap: Any) -> list[Any]:
        outer = Outer(wrap)
        called, log = wrap(outer), []
        for k in range(4):
            log.append([*map(str, called(torch.full((1, 2), float(k)))), outer.inner.factor, str(outer.inner.seen)])
            outer.inner.factor = 10 * k
        return log

    def counting(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.count = getattr(module, "count", 0) + 1
        return module(x) * module.count

    assert calls(magneto.compile) == calls(lambda module: module)
    twin, count = magneto.compile(torch.nn.ReLU()), magneto.compile(counting)
    for k in range(3):
        assert torch.equal(count(twin, torch.ones(2)), torch.full((2,), k + 1.0))
        assert twin.count == k + 1
