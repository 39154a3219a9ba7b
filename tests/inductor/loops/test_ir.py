"""The loops IR: identity of values, round trips of text and pickles, the verifier on broken programs, the interpreter on hand-made ones."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from magneto.inductor.loops.ir import (
    Buffer,
    Const,
    IndexValue,
    Indirect,
    LibraryCall,
    Load,
    Masked,
    Op,
    Origin,
    Pointwise,
    Program,
    Reduction,
    ViewOf,
    index_symbols,
    loads,
    reads,
    reduce_symbols,
    walk_values,
)
from magneto.inductor.loops.show import show_node, show_program
from magneto.symbolic import Sym, compare
from tests.inductor.loops.interp import run_program
from tests.inductor.loops.parse import parse_program
from tests.inductor.loops.verify import InvalidProgram, verify_program

F, B, L = torch.float32, torch.bool, torch.int64
CPU = torch.device("cpu")


def buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype = F) -> Buffer:
    strides = []
    step = 1
    for s in reversed(shape):
        strides.append(step)
        step *= s
    return Buffer(name, shape, tuple(reversed(strides)), dtype, CPU)


def whole(b: Buffer) -> ViewOf:
    return ViewOf(b.name, b.shape, b.strides, 0, b.dtype)


X, T, I = buffer("x", (4, 6)), buffer("t", (9, 6)), buffer("i", (4,), L)
Y, S, M, V, Z = buffer("y", (4, 6)), buffer("s", (4,)), buffer("m", (4,)), buffer("v", (4,)), buffer("z", (4, 6))
i0, i1 = index_symbols((4, 6))
(r0,) = reduce_symbols((6,))


def everything() -> Program:
    """A program with every kind of node and value."""
    row = Indirect(Load("i", i0, L), 9)
    looked_up = Load("t", row * 6 + i1, F)
    inside = IndexValue(compare("lt", i1, 5), B)
    body = Op("add", (looked_up, Masked(inside, Load("x", i0 * 6 + i1 + 1, F), Const(float("-inf"), F))), F)
    body = Op("where", (Op("isinf", (body,), B), Op("convert_element_type", (IndexValue(i0 * 2 + i1, L),), F), body), F)
    return Program(
        (X, T, None, I),
        (),
        (
            Pointwise(Y, body, (Origin("add_1", "add", (("app.py", 3, "f"),)),)),
            Reduction("sum", (S,), (6,), Op("exp", (Load("y", i0 * 6 + r0, F),), F), F),
            Reduction("welford", (M, V), (6,), Load("y", i0 * 6 + r0, F), F),
            LibraryCall("z", torch.ops.aten.mul.Tensor, (whole(Y), ViewOf("s", (4, 6), (1, 0), 0, F)), (), (Z,)),
        ),
        (whole(Z), whole(M), whole(V), None, 3, float("inf")),
    )


def inputs() -> tuple:
    return torch.randn(4, 6), torch.randn(9, 6), 5, torch.tensor([8, 0, 3, 1])


def test_values_are_hash_consed() -> None:
    a = Op("add", (Load("x", i0, F), Const(1, F)), F)
    assert a is Op("add", (Load("x", i0, F), Const(1.0, F)), F)
    assert Const(0.0, F) is not Const(-0.0, F)
    assert Const(float("nan"), F) is Const(float("nan"), F)
    assert Const(True, L) is Const(1, L) and Const(True, B) is not Const(1, L)
    assert Indirect(a, 4) is Indirect(a, 4)
    assert copy.deepcopy(a) is a


def test_program_pickles_to_an_equal_one() -> None:
    program = everything()
    again = pickle.loads(pickle.dumps(program))
    assert again == program and again.nodes[0].body is program.nodes[0].body
    assert again.nodes[0].origins[0].stack == (("app.py", 3, "f"),)


def test_text_round_trip() -> None:
    program = everything()
    text = show_program(program)
    assert parse_program(text) == program
    assert "# add <- app.py:3" in text and "j0 = indirect(v0, 9)" in text


def test_everything_runs() -> None:
    program = everything()
    verify_program(program)
    x, t, _, i = args = inputs()
    z, m, v, none, three, inf = run_program(program, *args)
    y = t[i]
    shifted = torch.cat([x[:, 1:], torch.full((4, 1), float("-inf"))], 1)
    y = y + shifted
    y = torch.where(torch.isinf(y), (torch.arange(4)[:, None] * 2 + torch.arange(6)).float(), y)
    torch.testing.assert_close(z, y * y.exp().sum(1, keepdim=True))
    torch.testing.assert_close(m, y.mean(1))
    torch.testing.assert_close(v, y.var(1, correction=0) * 6)
    assert (none, three, inf) == (None, 3, float("inf"))


def test_indirect_out_of_range_raises() -> None:
    x, t, n, _ = inputs()
    for wrong in (9, -1):
        with pytest.raises(IndexError):
            run_program(everything(), x, t, n, torch.tensor([0, wrong, 0, 0]))


def test_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    node = everything().nodes[0]
    order = walk_values(node.body)
    with monkeypatch.context() as patched:  # a body is walked once, and nobody's list is another's
        patched.setattr(Op, "children", None)
        walk_values(node.body).clear()
        assert walk_values(node.body) == order
    assert all(order.index(c) < order.index(v) for v in order for c in v.children())
    assert reads(node) == ("i", "t", "x") and len(loads(node.body)) == 3


def test_buffer_sizes() -> None:
    b = Buffer("b", (3, 4), (1, 8), F, CPU)
    assert (b.numel, b.storage_numel, b.nbytes) == (12, 27, 108)
    assert Buffer("b", (0, 4), (4, 1), F, CPU).storage_numel == 0
    s = Sym("s", 2)
    assert Buffer("b", (s, 4), (4, 1), F, CPU).storage_numel is s * 4


def broken(**changes: object) -> Program:
    program = everything()
    return replace(program, **changes)


def with_node(n: int, node: object) -> Program:
    nodes = list(everything().nodes)
    nodes[n] = node  # type: ignore[call-overload]
    return broken(nodes=tuple(nodes))


NODES = everything().nodes
BROKEN = {
    "defined twice": broken(inputs=(X, X, None, I)),
    "not defined before": with_node(1, Reduction("sum", (S,), (6,), Load("later", i0, F), F)),
    "is torch.float32": with_node(1, Reduction("sum", (S,), (6,), Load("y", i0, L), L)),
    "operands of several dtypes": with_node(0, Pointwise(Y, Op("add", (Load("x", i0, F), Const(1, L)), F))),
    "result dtype": with_node(0, Pointwise(Y, Op("lt", (Load("x", i0, F), Const(1, F)), F))),
    "no symbol of this node": with_node(0, Pointwise(Y, Load("x", r0, F))),
    "index up to 26 into 24": with_node(0, Pointwise(Y, Load("x", i0 * 7 + i1, F))),
    "index may be negative": with_node(0, Pointwise(Y, Load("x", i1 - 1, F))),
    "with 1 outputs": with_node(2, Reduction("welford", (M,), (6,), Load("y", r0, F), F)),
    "reduce ranges": with_node(1, Reduction("sum", (S,), (1,), Load("y", i0, F), F)),
    "accumulated in torch.float64": with_node(1, Reduction("sum", (S,), (6,), Load("y", r0, F), torch.float64)),
    "for a buffer of": with_node(0, Pointwise(Y, Const(1, L))),
    "masked": with_node(0, Pointwise(Y, Masked(Const(True, B), Const(1, F), Const(1, L)))),
    "view reaches element 24": broken(outputs=(ViewOf("x", (4, 6), (6, 1), 1, F),)),
    "which is not defined before": broken(outputs=(ViewOf("nobody", (4,), (1,), 0, F),)),
    "indirect index of dtype": with_node(0, Pointwise(Y, Load("t", Indirect(Load("x", i0, F), 4), F))),
}


@pytest.mark.parametrize("message", BROKEN)
def test_verifier_finds(message: str) -> None:
    with pytest.raises(InvalidProgram, match=message):
        verify_program(BROKEN[message])


def test_verifier_shows_the_node() -> None:
    with pytest.raises(InvalidProgram, match="def y"):
        verify_program(BROKEN["operands of several dtypes"])


def test_symbolic_sizes_round_trip_and_run() -> None:
    s = Sym("s0", 2)
    j0, j1 = index_symbols((s, 4))
    x = Buffer("x", (s, 4), (4, 1), F, CPU)
    y = Buffer("y", (s, 4), (4, 1), F, CPU)
    t = Buffer("t", (4, s), (s, 1), F, CPU)
    k0, k1 = index_symbols((4, s))
    total = Buffer("total", (4,), (1,), F, CPU)
    nodes = (
        Pointwise(y, Op("exp", (Load("x", x.offset((j0, j1)), F),), F)),
        Pointwise(t, Load("y", y.offset((k1, k0)), F)),
        Reduction("sum", (total,), (s,), Load("t", t.offset((index_symbols((4,))[0], reduce_symbols((s,))[0])), F), F),
    )
    program = Program((x,), (), nodes, (whole(t), whole(total)))
    verify_program(program)
    assert parse_program(show_program(program)) == program
    value = torch.randn(3, 4)
    transposed, sums = run_program(program, value, sizes={"s0": 3})
    torch.testing.assert_close(transposed, value.exp().t())
    torch.testing.assert_close(sums, value.exp().sum(0))


def test_show_node_is_pure() -> None:
    assert show_node(NODES[0]) == show_node(everything().nodes[0])
