"""Hash-consed integer expressions for sizes, strides and index arithmetic. No sympy."""

from __future__ import annotations

from magneto.symbolic.nodes import (
    ONE,
    ZERO,
    Add,
    And,
    Cmp,
    Const,
    Expr,
    FloorDiv,
    Max,
    Min,
    Mod,
    Mul,
    Or,
    Sym,
    add,
    mul,
    to_expr,
    walk,
)
from magneto.symbolic.printing import coefficient, evaluate, strided_form, substitute, to_c, to_python
from magneto.symbolic.rules import RULES, compare, conj, floordiv, maximum, minimum, mod, within
