"""What is said of a recompile: the expression in the program's words, what was expected of it, what it is, and the line that read it."""

from __future__ import annotations

import inspect
import types
import warnings

import pytest
import torch
from torch import nn

import magneto
from magneto.base import events
from magneto.base.flags import config
from magneto.dynamo.region import sizes

FACTOR = 3


class Config:
    def __init__(self, depth=3):
        self.depth = depth


class Other(Config):
    pass


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.dropout, self.scale, self.tags = nn.Linear(4, 4), nn.Dropout(0.5), 2.0, [1, 2]

    def forward(self, x):
        y = self.lin(x)  # LINEAR
        y = self.dropout(y)  # DROPOUT
        y = y * self.scale  # SCALE
        for tag in self.tags:  # TAGS
            y = y + tag
        return y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.config = nn.ModuleList([Block() for _ in range(4)]), Config()

    def forward(self, x):
        for layer in self.layers:  # LAYERS
            x = layer(x)  # LAYER
        return x * self.config.depth  # DEPTH


def plain(x, n=2, s="abc", items=(), d=None, f=torch.sin, config=None):  # ARGUMENTS
    y = x * n  # NUMBER
    y = y + 1 if s == "abc" else y  # TEXT
    for item in items:  # ITEMS
        y = y + item
    y = y if d is None else y + d["k"]  # KEY
    y = f(y)
    y = y if config is None else y * config.depth  # CONFIG
    return y * FACTOR  # GLOBAL


LINES = {line.split("# ")[1]: i for i, line in enumerate(inspect.getsource(inspect.getmodule(plain)).splitlines(), 1) if "  # " in line}
X = torch.ones(3, 4)


def recompiled(first, second):
    """Fields of the one recompile of the second call."""
    first()
    with events.recording() as seen:
        second()
    found = [event.fields for event in seen if event.kind == "recompile"]
    assert len(found) == 1
    return found[0]


def said(fields, place):
    file, line = fields["user_line"].rsplit(":", 1)
    assert file == __file__ and int(line) == LINES[place]
    assert f"{fields['expected']}, but {fields['actual']} ({fields['user_line']}" in fields["reason"]
    return fields["expression"], fields["expected"], fields["actual"]


CALLS = {
    "dtype": ({}, {"x": X.double()}, "ARGUMENTS", ("x", "x has dtype float32", "it has dtype float64")),
    "size": ({}, {"x": torch.ones(5, 4)}, "ARGUMENTS", ("x", "x has size 3 in dimension 0", "it has size 5 in dimension 0")),
    "rank": ({}, {"x": torch.ones(4)}, "ARGUMENTS", ("x", "x has 2 dimensions", "it has 1 dimensions")),
    "stride": ({}, {"x": torch.ones(4, 3).t()}, "ARGUMENTS", ("x", "x has strides (4, 1)", "it has strides (1, 3)")),
    "requires_grad": ({}, {"x": X.clone().requires_grad_()}, "ARGUMENTS", ("x", "x has requires_grad False", "it has requires_grad True")),
    "int": ({}, {"n": 5}, "NUMBER", ("n", "n == 2", "it is 5")),
    "string": ({}, {"s": "abd"}, "TEXT", ("s", "s == 'abc'", "it is 'abd'")),
    "list length": ({"items": [1, 2]}, {"items": [1, 2, 3]}, "ITEMS", ("items", "len(items) == 2", "the length is 3")),
    "dict value": ({"d": {"k": 1}}, {"d": {"k": 2.5}}, "KEY", ("d['k']", "d['k'] == 1", "it is 2.5")),
    "dict key": ({"d": {"k": 1}}, {"d": {"k": 1.0}}, "KEY", ("d['k']", "d['k'] == 1", "it is 1.0")),
    "function": ({"f": torch.sin}, {"f": torch.cos}, "ARGUMENTS", ("f", "f is sin", "it is cos")),
    "type": ({"config": Config()}, {"config": Other()}, "ARGUMENTS", ("config", "type(config) is Config", "it is a Other")),
    "attribute": ({"config": Config()}, {"config": Config(4)}, "CONFIG", ("config.depth", "config.depth == 3", "it is 4")),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments(name):
    first, second, place, texts = CALLS[name]
    compiled = magneto.optimize("eager")(plain)
    assert said(recompiled(lambda: compiled(**{"x": X, **first}), lambda: compiled(**{"x": X, **second})), place) == texts


def test_global(monkeypatch):
    compiled = magneto.optimize("eager")(plain)
    compiled(X)
    monkeypatch.setitem(globals(), "FACTOR", 7)
    assert said(recompiled(lambda: None, lambda: compiled(X)), "GLOBAL") == ("FACTOR", "FACTOR == 3", "it is 7")


def test_closure():
    k = 3

    def inner(x):
        return x * k

    compiled = magneto.optimize("eager")(inner)
    compiled(X)
    k = 9
    fields = recompiled(lambda: None, lambda: compiled(X))
    assert (fields["expression"], fields["expected"], fields["actual"]) == ("k", "k == 3", "it is 9")


def _no_grad(call):
    with torch.no_grad():
        call()


def _autocast(call):
    with torch.autocast("cpu"):
        call()


def _double(call):
    torch.set_default_dtype(torch.float64)
    try:
        call()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "around, texts",
    [
        (_no_grad, ("", "grad mode == True", "it is False")),
        (_autocast, ("", "autocast cpu == False", "it is True")),
        (_double, ("", "default dtype == torch.float32", "it is torch.float64")),
    ],
)
def test_modes(around, texts):
    def made(x):
        return x + torch.ones(4)

    compiled = magneto.optimize("eager")(made)
    fields = recompiled(lambda: compiled(X), lambda: around(lambda: compiled(X)))
    assert (fields["expression"], fields["expected"], fields["actual"]) == texts


CHANGES = {
    "module attribute": (lambda net: setattr(net.layers[3].dropout, "p", 0.1), "DROPOUT", "self.layers[3].dropout.p == 0.5", "it is 0.1"),
    "own attribute": (lambda net: setattr(net.layers[2], "scale", 3), "SCALE", "self.layers[2].scale == 2.0", "it is 3"),
    "eval": (lambda net: net.eval(), "DROPOUT", "self.layers[0].dropout.training is True", "it is False"),
    "hook": (
        lambda net: net.layers[1].register_forward_hook(lambda m, args, out: out),
        "LAYER",
        "len(self.layers[1]._forward_hooks) == 0",
        "the length is 1",
    ),
    "frozen": (
        lambda net: net.layers[0].lin.weight.requires_grad_(False),
        "LINEAR",
        "self.layers[0].lin.weight has requires_grad True",
        "it has requires_grad False",
    ),
    "cast": (
        lambda net: net.layers[0].lin.double().float() and net.layers[0].lin.to(torch.bfloat16),
        "LINEAR",
        "self.layers[0].lin.weight has dtype float32",
        "it has dtype bfloat16",
    ),
    "list": (lambda net: net.layers[0].tags.append(3), "TAGS", "len(self.layers[0].tags) == 2", "the length is 3"),
    "layer": (
        lambda net: net.layers.append(Block()),
        "LAYERS",
        "list(self.layers._modules) == ['0', '1', '2', '3']",
        "the keys are ('0', '1', '2', '3', '4')",
    ),
    "object": (lambda net: setattr(net.config, "depth", 4), "DEPTH", "self.config.depth == 3", "it is 4"),
    "class": (lambda net: setattr(Block, "note", 1), "LAYER", "class Block is not modified", "the class was modified"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_modules(name):
    change, place, expected, actual = CHANGES[name]
    net = Net()
    compiled = magneto.optimize("eager")(net)
    compiled(X)
    change(net)

    def call():
        try:
            compiled(X)
        except RuntimeError:  # dtypes that no longer fit
            pass

    try:
        assert said(recompiled(lambda: None, call), place)[1:] == (expected, actual)
    finally:
        if "note" in vars(Block):
            del Block.note


def test_the_line_in_torch_is_said_as_well():
    net = Net()
    compiled = magneto.optimize("eager")(net)
    compiled(X)
    net.layers[3].dropout.p = 0.1
    reason = recompiled(lambda: None, lambda: compiled(X))["reason"]
    assert f"({__file__}:{LINES['DROPOUT']}, read in {inspect.getfile(nn.Dropout)}:" in reason


@pytest.mark.parametrize(
    "fn, calls, subject, remedy",
    [
        (lambda x, s: x * len(s), [(X, "a" * k) for k in range(12)], "s", "Make s a tensor, or keep it constant."),
        (lambda x, s: x * len(s), [(torch.ones(k + 2), "a") for k in range(12)], "x", "Give x the same dtype, layout and sizes each time"),
        (lambda x, f: f(x), [(X, lambda z, k=k: z + k) for k in range(12)], "f", "Make the object f once and pass the same one each time."),
    ],
)
def test_limit(fn, calls, subject, remedy):
    """One warning, which names what keeps changing and what to do."""
    compiled = magneto.optimize("eager", dynamic=False)(fn)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for args in calls:
            assert torch.equal(compiled(*args), fn(*args))
    texts = [str(warning.message) for warning in seen if "W011" in str(warning.message)]
    assert len(texts) == 1
    assert f"; {subject} differs from 8 of 8 variants. {remedy}" in texts[0]
    assert "MAGNETO_RECOMPILE_LIMIT raises the limit" in texts[0]


def _of_rows(x, scale):
    return torch.relu(x @ x.T).sum() * scale


def _calls(compiled, sizes, make=lambda n: torch.ones(n, 3)):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in sizes:
            x = make(n)
            assert torch.equal(compiled(x, 2.0), _of_rows(x, 2.0))


def test_sizes_that_come_again_beyond_the_limit():
    compiled = magneto.optimize("eager", dynamic=False)(_of_rows)
    _calls(compiled, range(2, 14))
    assert magneto.stats()["graphs"] == 8
    _calls(compiled, [*range(2, 14)] * 2)
    assert magneto.stats()["graphs"] == 12
    before = magneto.stats()["hook"]
    _calls(compiled, range(2, 14))
    after = magneto.stats()["hook"]
    assert (after["hits"] - before["hits"], after["misses"] - before["misses"]) == (12, 0)


def test_sizes_that_grow_stay_at_the_limit():
    compiled, before = magneto.optimize("eager", dynamic=False)(_of_rows), magneto.stats()["hook"]["compiles"]
    _calls(compiled, range(2, 400))
    assert magneto.stats()["graphs"] == 8
    compiles = magneto.stats()["hook"]["compiles"]
    assert compiles - before < 300  # the entry is left to CPython
    _calls(compiled, [500] * 5)
    assert magneto.stats()["graphs"] == 8 and magneto.stats()["hook"]["compiles"] == compiles


def test_size_variants_are_bounded():
    with magneto.config.patch(size_variants=10):
        compiled = magneto.optimize("eager", dynamic=False)(_of_rows)
        _calls(compiled, [*range(2, 30)] * 4)
    assert magneto.stats()["graphs"] == 10


def test_sizes_that_grow_are_captured_three_times():
    compiled = magneto.optimize("eager")(_of_rows)
    _calls(compiled, range(2, 400))
    assert magneto.stats()["graphs"] == 3


def test_variants_for_more_sizes_cost_a_share_of_the_time(monkeypatch):
    """Seconds are made up: each variant costs 0.4, each call takes 0.1."""
    clock, spent = [0.0], []
    monkeypatch.setattr(sizes, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(sizes, "events", types.SimpleNamespace(seconds=lambda: 0.4 * len(spent)))
    config.size_seconds = 1.0
    budget, came = sizes.Budget(), sizes.SizesThatCome()
    for n in range(40):
        if came.verdict(frozenset([("x", (n // 3,))]), 9, budget) is sizes.Verdict.NOW:
            clock[0] += 0.4
            spent.append(n)
        clock[0] += 0.1
    assert spent == [2, 5, 8, 11, 26]  # the first second at once, then what a quarter of the rest has paid for


def test_no_variant_beyond_the_budget(monkeypatch):
    config.size_seconds = -1.0
    monkeypatch.setattr(sizes, "SHARE", 0.0)
    monkeypatch.setattr(sizes, "PAUSE", 0.0)
    compiled = magneto.optimize("eager", dynamic=False)(_of_rows)
    _calls(compiled, [*range(2, 14)] * 4)
    assert magneto.stats()["graphs"] == 8
    config.size_seconds = 100.0
    _calls(compiled, range(2, 14))
    assert magneto.stats()["graphs"] == 12


def test_only_sizes_come_again():
    compiled = magneto.optimize("eager", dynamic=False)(_of_rows)
    _calls(compiled, range(2, 11))
    _calls(compiled, [3, 4], lambda n: torch.ones(n, 3, dtype=torch.float64))
    _calls(compiled, [20] * 5)
    assert magneto.stats()["graphs"] == 8  # another dtype is no size


def test_kernels_are_made_for_sizes_that_come_again():
    compiled = magneto.optimize("inductor", dynamic=False)(_of_rows)
    made = []
    for n in [2, 3, 4, 5, 6, 7, 5, 6, 5, 2]:
        x = torch.ones(n, 3)
        torch.testing.assert_close(compiled(x, 2.0), _of_rows(x, 2.0))
        made.append(magneto.stats()["kernels"])
    steps = [b > a for a, b in zip([0, *made], made, strict=False)]
    assert steps == [True, True, True, False, False, False, True, True, False, False]


def test_further_sizes_run_as_captured_or_in_eager_while_they_may_cost_nothing(monkeypatch):
    """Kernels are made for the first sizes only; the results are right, and later calls pay for more."""
    config.size_seconds = -1.0
    monkeypatch.setattr(sizes, "SHARE", 0.0)
    monkeypatch.setattr(sizes, "PAUSE", 0.0)
    compiled = magneto.optimize("inductor", dynamic=False)(_of_rows)
    made = []
    for n in [*range(2, 12)] * 3:
        x = torch.ones(n, 3)
        torch.testing.assert_close(compiled(x, 2.0), _of_rows(x, 2.0))
        made.append(magneto.stats()["kernels"])
    assert made[0] < made[1] < made[2] == made[-1] and magneto.stats()["graphs"] == 3
    assert [e.fields["reason"][:17] for e in events.events("fallback")] == ["sizes change more"]
    config.size_seconds = 100.0
    for n in [2, 5, 5]:
        x = torch.ones(n, 3)
        torch.testing.assert_close(compiled(x, 2.0), _of_rows(x, 2.0))
    assert magneto.stats()["kernels"] > made[-1] and magneto.stats()["graphs"] == 4


def test_other_changes_are_no_fleeting_sizes():
    compiled = magneto.optimize("inductor", dynamic=False)(_of_rows)
    for count, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float16), 1):
        x = torch.ones(4, 3, dtype=dtype)
        torch.testing.assert_close(compiled(x, 2.0), _of_rows(x, 2.0))
        assert magneto.stats()["graphs"] == count
    assert events.counters().get("graphs_for_one_call", 0) == 0
