"""Guards as text, and what is said after a miss."""

from __future__ import annotations

import torch

from magneto.dynamo.guards.explain import explain_miss
from magneto.dynamo.guards.reading import Frame
from magneto.dynamo.guards.rows import Kind, TensorRow
from magneto.dynamo.guards.source import Attr, Held, InstanceDict, Item, Local
from magneto.dynamo.guards.text import check_text, show_guards
from tests.dynamo.guards.oracle import UNBOUND, guard_set

X, N = Local(0, "x"), Local(1, "n")
ROW = TensorRow(torch.Tensor, torch.float32, torch.device("cpu"), (2, None), (3, 1), False)


def test_text():
    guards = guard_set(
        (Kind.TENSOR, X, ROW, "app.py:3"),
        (Kind.INT_RANGE, N, (2, None), "app.py:4"),
        (Kind.EQUALS, Item(InstanceDict(Local(2, "self")), "p"), 0.5, "app.py:5"),
        (Kind.SAME, X, Attr(Local(2, "self"), "y")),
        (Kind.ID_IS, N, torch.add),
        (Kind.TYPE_VERSION, Held("Frame", Frame), Frame),
        (Kind.STATE, None, ("grad mode", torch.is_grad_enabled, (), True)),
    )
    assert show_guards(guards).splitlines() == [
        "L['x']: Tensor float32[2, ?] on cpu, strides (3, 1), requires_grad False  # app.py:3",
        "type(L['n']) is int and 2 <= L['n']                                       # app.py:4",
        "L['self'].__dict__['p'] == 0.5                                            # app.py:5",
        "L['x'] is L['self'].y",
        "L['n'] is add",
        "class Frame is not modified",
        "grad mode == True",
    ]
    text, _ = check_text(guards)
    assert "tensor_holds(k0, slot(frame, 0))" in text
    compile(text, "guards", "exec")


def miss(row, *locals):
    return str(explain_miss(guard_set((Kind.TYPE_IS, N, int, "app.py:1"), row), Frame(locals, (), {}, UNBOUND)))


def test_explanations():
    assert miss((Kind.EQUALS, N, 3, "app.py:9"), None, 4) == "n == 3, but it is 4 (app.py:9)"
    assert miss((Kind.RELATION, N, "({} + (1)) == 3", "app.py:9"), None, 3) == "(n + (1)) == 3, but n is 3 (app.py:9)"
    assert miss((Kind.EQUALS, N, 3), None, 4.0) == "type(n) is int, but it is a float (app.py:1)"
    assert miss((Kind.LENGTH, X, 2), [1], 4) == "len(x) == 2, but the length is 1"
    assert miss((Kind.KEYS, X, ("a",)), {"b": 1}, 4) == "list(x) == ['a'], but the keys are ('b',)"
    assert miss((Kind.KEY_ABSENT, X, "b"), {"b": 1}, 4) == "'b' not in x, but it is there"
    assert miss((Kind.NOT_MEMBER, X, N), {4}, 4) == "n not in x, but it is there"
    assert miss((Kind.MEMBER, X, N), {5}, 4) == "n in x, but it is not there"
    assert miss((Kind.EQUALS, Item(X, "c"), 1), {"b": 1}, 4) == "x['c'] == 1, but there is no such value"
    assert miss((Kind.EQUALS, Item(X, "c"), 1), UNBOUND, 4) == "x['c'] == 1, but it cannot be read"
    assert miss((Kind.TENSOR, X, ROW), torch.ones(2, 4), 4) == "x has strides (3, 1), but it has strides (4, 1)"
    expected = "x: Tensor float32[2, ?] on cpu, strides (3, 1), requires_grad False, but got "
    assert miss((Kind.TENSOR, X, ROW), 3, 4) == expected + "a int"
    assert miss((Kind.TENSOR, X, ROW), torch._neg_view(torch.ones(2, 3)), 4) == "x has no lazy bit, but it has a neg bit"
    assert "sparse" in miss((Kind.TENSOR, X, ROW), torch.ones(2, 3).to_sparse(), 4)
    assert miss((Kind.EQUALS, N, 4), None, 4) == "all rows hold"
    with torch.no_grad():
        assert miss((Kind.STATE, None, ("grad mode", torch.is_grad_enabled, (), True)), None, 4) == "grad mode == True, but it is False"


def test_a_large_value_is_not_printed():
    assert len(miss((Kind.EQUALS, X, 3), torch.ones(1000), 4)) < 120
    assert len(miss((Kind.EQUALS, X, 3), tuple(range(1000)), 4)) < 150
