"""What a region read is guarded: after each change that the program could see, the result is eager's again."""

# ruff: noqa

from __future__ import annotations

import collections
import math
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import magneto
from tests.compare import assert_equal

X = torch.arange(4.0)


@dataclass(frozen=True)
class Scenario:
    """`make()` gives (function, arguments, list of changes); after each change both ways of calling must agree."""

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], list[Callable[[], Any]]]]


SCENARIOS: list[Scenario] = []


def scenario(make):
    SCENARIOS.append(Scenario(make))
    return make


class Box:
    factor = 2

    def __init__(self, v):
        self.v = v

    def get(self):
        return self.v

    @property
    def prop(self):
        return self.v + 1


@scenario
def attributes_of_an_object():
    box = Box(3)
    return (
        lambda b, x: x * b.v + b.prop,
        (box, X),
        [lambda: setattr(box, "v", 4), lambda: setattr(box, "v", 2.5), lambda: setattr(box, "v", X + 1), lambda: setattr(box, "v", True)],
    )


@scenario
def methods_of_an_object():
    box = Box(3)
    return lambda b, x: x * b.get(), (box, X), [lambda: setattr(box, "get", lambda: 7), lambda: delattr(box, "get")]


@scenario
def attributes_of_a_class():
    class Local(Box):
        pass

    box = Local(1)
    return (
        lambda b, x: x * b.factor + b.get(),
        (box, X),
        [
            lambda: setattr(Local, "factor", 5),
            lambda: setattr(Local, "get", lambda self: 9),
            lambda: setattr(box, "factor", 6),
            lambda: delattr(Local, "get"),
        ],
    )


@scenario
def attribute_appears_and_vanishes():
    box = Box(1)
    return (
        lambda b, x: x * getattr(b, "extra", 10) + hasattr(b, "more"),
        (box, X),
        [lambda: setattr(box, "extra", 3), lambda: setattr(box, "more", 1), lambda: delattr(box, "extra")],
    )


@scenario
def the_class_of_an_object():
    class Other:
        factor = 8

        def __init__(self):
            self.v = 1

    box = Box(1)
    return lambda b, x: x * b.factor + isinstance(b, Other), (box, X), [lambda: setattr(box, "__class__", Other)]


@scenario
def items_of_a_list():
    items = [1, X, "s"]
    return (
        lambda a, x: (x * a[0] + a[1], a[-1], len(a), "s" in a),
        (items, X),
        [
            lambda: items.append(4),
            lambda: items.__setitem__(0, 7),
            lambda: items.__setitem__(1, X * 3),
            lambda: items.insert(0, 2),
            lambda: items.reverse(),
        ][:4],
    )


@scenario
def items_of_a_dictionary():
    d = {"a": 1, "b": 2}
    return (
        lambda d, x: (x * d["a"], d.get("z"), list(d), "q" in d, sum(d.values())),
        (d, X),
        [
            lambda: d.__setitem__("a", 5),
            lambda: d.__setitem__("z", 6),
            lambda: d.pop("b"),
            lambda: d.update(b=2),
            lambda: d.__setitem__("q", 1),
        ],
    )


@scenario
def one_key_of_a_dictionary():
    d = {"a": 1}
    return (
        lambda d, x: x * d["a"] + (0 if d.get("b") is None else d["b"]),
        (d, X),
        [lambda: d.__setitem__("c", 5), lambda: d.__setitem__("b", 3), lambda: d.__setitem__("b", X)],
    )


@scenario
def a_set():
    s = {1, 2}
    return lambda s, x: x * len(s) + (3 in s), (s, X), [lambda: s.add(3), lambda: s.discard(1)]


@scenario
def nested_containers():
    d = {"k": [{"z": (1, [X])}]}
    return (
        lambda d, x: x + d["k"][0]["z"][0] + d["k"][0]["z"][1][0],
        (d, X),
        [lambda: d["k"][0].__setitem__("z", (2, [X * 2])), lambda: d["k"][0]["z"][1].__setitem__(0, X * 7)],
    )


@scenario
def aliasing_of_arguments():
    a, b = [1], [2]
    pair = [a, b]

    def fn(pair, x):
        return x * len(pair[1]) + (pair[0] is pair[1])

    return fn, (pair, X), [lambda: pair.__setitem__(1, a), lambda: pair.__setitem__(1, [3])]


@scenario
def a_closure():
    k = 2

    def setter(v):
        nonlocal k
        k = v

    def fn(x):
        return x * k

    return fn, (X,), [lambda: setter(3), lambda: setter(X + 1), lambda: setter(2)]


SPACE = types.ModuleType("space")
exec("K = 2\nD = {'a': 1}\ndef helper(x): return x + K\ndef main(x): return helper(x) * D['a'] + len(D)", SPACE.__dict__)


@scenario
def globals_of_a_module():
    SPACE.__dict__.update(K=2, D={"a": 1})
    return (
        SPACE.main,
        (X,),
        [
            lambda: setattr(SPACE, "K", 5),
            lambda: SPACE.D.update(a=7),
            lambda: setattr(SPACE, "helper", lambda x: x - 1),
            lambda: setattr(SPACE, "D", {"a": 2, "b": 3}),
            lambda: setattr(SPACE, "len", lambda d: 100),
        ],
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.seq = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.register_buffer("b", torch.ones(4))
        self.flag = True
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        y = self.seq(self.a(x)) * self.b
        return y if self.flag else -y


@scenario
def a_module_tree():
    torch.manual_seed(0)
    net = Net()
    return (
        net,
        (X,),
        [
            lambda: setattr(net, "flag", False),
            lambda: setattr(net, "b", torch.ones(4) * 3),
            lambda: setattr(net.a, "weight", nn.Parameter(torch.ones(4, 4))),
            lambda: setattr(net, "a", nn.Linear(4, 4)),
            lambda: net.seq.append(nn.Tanh()),
            lambda: setattr(net.a, "bias", None),
            lambda: net.seq.__setitem__(1, nn.Sigmoid()),
            lambda: net.eval(),
            lambda: net.a.weight.data.mul_(2),
            lambda: setattr(net.a, "forward", lambda x: x * 11),
        ],
    )


@scenario
def hooks_added_later():
    torch.manual_seed(0)
    net = Net()
    return (
        net,
        (X,),
        [
            lambda: net.a.register_forward_hook(lambda m, args, out: out + 100),
            lambda: net.seq.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
            lambda: net.register_forward_hook(lambda m, args, out: out - 1),
            lambda: net.a._forward_hooks.clear(),
        ],
    )


@scenario
def forward_of_a_class_is_replaced():
    class Small(nn.Module):
        def forward(self, x):
            return x + 1

    net = Small()
    return (
        lambda n, x: n(x) * 2,
        (net, X),
        [lambda: setattr(Small, "forward", lambda self, x: x - 1), lambda: setattr(Small, "__call__", lambda self, x: x * 50)],
    )


@scenario
def default_arguments_and_function_attributes():
    def inner(x, k=2):
        return x * k

    box = Box(inner)
    return (
        lambda b, x: b.v(x),
        (box, X),
        [
            lambda: setattr(box, "v", lambda x, k=3: x - k),
            lambda: setattr(box, "v", torch.sin),
            lambda: setattr(box, "v", functools_partial(torch.add, 3)),
        ],
    )


def functools_partial(*args):
    import functools

    return functools.partial(*args)


@scenario
def types_of_numbers():
    box = Box(1)
    return (
        lambda b, x: x * b.v if isinstance(b.v, int) else x - b.v,
        (box, X),
        [lambda: setattr(box, "v", 1.0), lambda: setattr(box, "v", True), lambda: setattr(box, "v", -0.0), lambda: setattr(box, "v", 0.0)],
    )


@scenario
def none_and_tensors():
    box = Box(None)
    return (
        lambda b, x: x if b.v is None else x + b.v,
        (box, X),
        [
            lambda: setattr(box, "v", X),
            lambda: setattr(box, "v", None),
            lambda: setattr(box, "v", X.double()),
            lambda: setattr(box, "v", X[:1]),
        ],
    )


@scenario
def ordered_dictionaries_and_deques():
    o, q = collections.OrderedDict(a=1, b=2), collections.deque([])
    return lambda o, x: x * o["a"] + len(o), (o, X), [lambda: o.update(c=1), lambda: o.__setitem__("a", 3), lambda: o.pop("b")]


@scenario
def grad_mode():
    w = torch.ones(4, requires_grad=True)
    modes = []
    return (
        lambda x: ((x * w).requires_grad, torch.is_grad_enabled()),
        (X,),
        [lambda: modes.append(torch.is_grad_enabled()) or torch._C._set_grad_enabled(False), lambda: torch._C._set_grad_enabled(True)],
    )


@scenario
def default_dtype():
    return (
        lambda x: (torch.zeros(2) + 1, torch.get_default_dtype()),
        (X,),
        [lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)],
    )


@scenario
def a_setting_of_torch_backends():
    return (
        lambda x: x * 2 if torch.backends.cudnn.benchmark else x * 3,
        (X,),
        [lambda: setattr(torch.backends.cudnn, "benchmark", True), lambda: setattr(torch.backends.cudnn, "benchmark", False)],
    )


@scenario
def loggers():
    import logging

    logger = logging.getLogger("magneto.tests.scenario")
    logger.propagate = False
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            seen.append(record.getMessage())

    logger.handlers = [Keep()]
    logger.setLevel(logging.WARNING)

    def fn(x):
        logger.info("info")
        logger.warning("warning")
        return x * 2, len(seen) % 1

    return fn, (X,), [lambda: logger.setLevel(logging.INFO), lambda: logger.setLevel(logging.ERROR)]


@pytest.mark.parametrize("case", SCENARIOS, ids=[s.make.__name__ for s in SCENARIOS])
def test_changes_are_seen(case: Scenario) -> None:
    fn, args, changes = case.make()
    compiled = magneto.optimize("eager")(fn)
    try:
        for change in [lambda: None, lambda: None, *changes]:
            change()
            assert_equal(outcome(compiled, args), outcome(fn, args))
    finally:
        torch.set_default_dtype(torch.float32)
        torch._C._set_grad_enabled(True)


def outcome(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return fn(*args)
    except Exception as error:
        return type(error).__name__, str(error)


def test_writes_through_arguments_that_become_aliases() -> None:
    def fn(a, b, x):
        a.append(x * len(b))
        b.append(len(a))
        return x * len(b)

    compiled = magneto.optimize("eager", nopython=True)(fn)
    for alias in (False, True, False):
        results = []
        for call in (compiled, fn):
            first = [1]
            second = first if alias else [2, 3]
            results.append((call(first, second, X), first, second))
        assert_equal(*results)


def test_writes_through_objects_that_become_aliases() -> None:
    def fn(a, b, x):
        a.v = a.v + 1
        return x * b.v

    compiled = magneto.optimize("eager", nopython=True)(fn)
    for alias in (False, True, False):
        results = []
        for call in (compiled, fn):
            first = Box(1)
            second = first if alias else Box(5)
            results.append((call(first, second, X), first.v, second.v))
        assert_equal(*results)


def test_writes_through_tensors_that_become_aliases() -> None:
    def fn(a, b):
        a.add_(1)
        return b * 2

    compiled = magneto.optimize("eager", nopython=True)(fn)
    for kind in ("apart", "same", "view", "apart"):
        results = []
        for call in (compiled, fn):
            first = X.clone()
            second = {"apart": X + 1, "same": first, "view": first.view(4)}[kind]
            results.append((call(first, second), first))
        assert_equal(*results)


def _first_of_each(items):
    seen, found = set(), []
    for item in items:
        if id(item) not in seen:
            seen.add(id(item))
            found.append(item)
    return found


BY_IDENTITY: dict[str, Callable[[Any], Any]] = {
    "ids in a set": lambda items: len({id(item) for item in items}),
    "ids one by one": lambda items: len(_first_of_each(items)),
    "a set": lambda items: len(set(items)),
    "a dictionary of ids": lambda items: list({id(item): i for i, item in enumerate(items)}.values()),
    "a dictionary": lambda items: len({item: 1 for item in items}),
    "a display": lambda items: items[1] in {items[0]: 1},
    "pairs": lambda items: len({(1, item) for item in items}),
    "sums": lambda items: sum(item.sum() for item in _first_of_each(items)) if isinstance(items[0], torch.Tensor) else 0,
}


@pytest.mark.filterwarnings("ignore:.*W011")  # parts of one memory are guarded by which they are
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in BY_IDENTITY for kind in ("tensors", "parts", "objects")]
    + [(name, kind) for name in ("ids in a set", "ids one by one", "a dictionary of ids") for kind in ("lists", "arrays")],
)
def test_keys_by_identity_that_become_one(name: str, kind: str) -> None:
    """A region in which existing objects were keys of what it makes took them for different ones in every later call."""

    def program(items):
        return BY_IDENTITY[name](items), X * 2

    objects: dict[str, Callable[[], list[Any]]] = {
        "tensors": lambda: [torch.full((2,), float(i)) for i in range(3)],
        "parts": lambda: list(torch.arange(6.0).view(3, 2).unbind()),
        "objects": lambda: [Box(i) for i in range(3)],
        "lists": lambda: [[i] for i in range(3)],
        "arrays": lambda: [numpy.full(2, float(i)) for i in range(3)],
    }
    compiled = magneto.optimize("eager", nopython=True)(program)
    for _ in range(2):
        a, b, c = objects[kind]()
        for items in ([a, b, c], [a, a, c], [a, b, a], [a, a, a], [c, b, a], [b, a, c]):
            assert_equal(compiled(items), program(items))


def test_parameters_that_are_tied_later() -> None:
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def penalty(x):
        return x + sum(p.square().sum() for p in net.parameters())

    compiled = magneto.optimize("eager", nopython=True)(penalty)
    assert_equal(compiled(X), penalty(X))
    net[1].weight = net[0].weight
    assert_equal(compiled(X), penalty(X))


def test_requires_grad_follows_writes_in_place() -> None:
    def fn(w, x):
        other = torch.zeros(4)
        other[1:] = w[1:]
        with torch.no_grad():
            third = torch.zeros(4)
            third += w
        return other, third, other.requires_grad, third.requires_grad

    w = torch.ones(4, requires_grad=True)
    assert_equal(magneto.optimize("eager", nopython=True)(fn)(w, X), fn(w, X))


def test_requires_grad_follows_writes_through_views() -> None:
    def fn(w, x):
        buffer = torch.zeros(2, 4)
        row, detached = buffer[0], buffer.detach()
        row.copy_(w)
        return buffer, buffer.requires_grad, row.requires_grad, buffer[1].requires_grad, detached.requires_grad

    w = torch.ones(4, requires_grad=True)
    assert_equal(magneto.optimize("eager", nopython=True)(fn)(w, X), fn(w, X))


def test_appending_to_a_list_needs_no_length() -> None:
    kept: list[Any] = []

    def fn(x, log):
        log.append(x * 2)
        kept.extend([x])
        return x + 1

    log: list[Any] = []
    compiled = magneto.optimize("eager", nopython=True)(fn)
    for _ in range(20):
        compiled(X, log)
    assert len(log) == len(kept) == 20 and magneto.stats()["recompiles"] == 0


def test_reading_behind_what_was_appended() -> None:
    def fn(a, x):
        a.append(x)
        a.extend([5, 6])
        return a[0], a[3] if len(a) > 5 else a[-3], a[2]

    compiled = magneto.optimize("eager", nopython=True)(fn)
    for items in ([1, 2], [3, 4], [1, 2, 3, 4], [7], [], [1, 2]):
        ours, plain = list(items), list(items)
        assert_equal((compiled(ours, X), ours), (fn(plain, X), plain))


def test_an_operator_that_calls_the_one_it_replaces(monkeypatch) -> None:
    former, length = torch.Tensor.__add__, torch.Tensor.__len__
    compiled = magneto.optimize("aot_eager")(lambda x: (x + 1) * len(x))
    assert_equal(compiled(X), (X + 1) * len(X))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__add__", lambda t, other: torch.mul(former(t, other), 10))
        patch.setattr(torch.Tensor, "__len__", lambda t: length(t) + 2)
        assert_equal(compiled(X), (X + 1) * len(X))
    assert_equal(compiled(X), (X + 1) * len(X))


def _double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


REPLACED: list[tuple[Any, str, Any, Callable[[torch.Tensor], Any]]] = [
    (
        nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v: q - k,
        lambda x: nn.functional.scaled_dot_product_attention(x, x + 1, x),
    ),
    (nn.functional, "linear", lambda x, w, b: x * 5, nn.Linear(4, 4)),
    (nn.functional, "relu", lambda x, inplace: x * 5, nn.ReLU()),
    (torch, "sin", torch.cos, lambda x: torch.sin(x)),
    (nn, "Tanh", nn.Sigmoid, lambda x: nn.Tanh()(x)),
    (math, "sqrt", lambda v: 100.0, lambda x: x * math.sqrt(4)),
    (torch.Tensor, "sin", _double, lambda x: x.sin()),
    *(
        (torch.Tensor, f"__{name}__", lambda t, *_: torch.mul(t, 5), fn)
        for name, fn in (
            ("abs", lambda x: abs(x)),
            ("add", lambda x: x + 1),
            ("rsub", lambda x: 1 - x),
            ("gt", lambda x: 0.5 < x),
            ("matmul", lambda x: x.mT @ x),
            ("iadd", lambda x: operator.iadd(x.clone(), 1)),
        )
    ),
    (torch.Tensor, "__len__", lambda t: 7, lambda x: x * len(x)),
    (torch.Tensor, "__iter__", lambda t: iter((torch.mul(t, 5),)), lambda x: next(y + 1 for y in x)),
    (torch.Tensor, "__iter__", lambda t: iter((torch.mul(t, 5),)), lambda x: list(x)[0]),
    (torch.Tensor, "of_ours", _double, lambda x: x.of_ours() if hasattr(x, "of_ours") else x),  # type: ignore[attr-defined]
]


@pytest.mark.parametrize("owner, name, replacement, fn", REPLACED, ids=[name for _, name, *_ in REPLACED])
def test_replaced_functions_of_torch_are_seen(owner, name, replacement, fn, monkeypatch) -> None:
    x = X.reshape(2, 2).expand(2, 2, 2).reshape(1, 2, 4)
    compiled = magneto.optimize("aot_eager", nopython=True)(fn)
    with torch.no_grad():
        before = fn(x)
        assert_equal(compiled(x), before)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, replacement, raising=False)
            assert_equal(compiled(x), fn(x))
            assert not torch.equal(compiled(x), before)
        assert_equal(compiled(x), before)
