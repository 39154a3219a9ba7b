"""Reading the Python text of expressions: the inverse of `to_python`."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from magneto.symbolic.nodes import Const, Expr, rebuild

_CMP_OPS = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}


def parse_expr(text: str, symbols: Mapping[str, Expr]) -> Expr:
    """The expression that `to_python` printed; `symbols` by name. KeyError for an unknown name, ValueError for other syntax."""
    return _parse(ast.parse(text, mode="eval").body, symbols)


def _parse(node: ast.expr, symbols: Mapping[str, Expr]) -> Expr:
    match node:
        case ast.Constant(value=int(value)):
            return Const(value)
        case ast.Name(id=name):
            return symbols[name]
        case ast.UnaryOp(op=ast.USub(), operand=a):
            return -_parse(a, symbols)
        case ast.BinOp(left=a, op=op, right=b):
            x, y = _parse(a, symbols), _parse(b, symbols)
            match op:
                case ast.Add():
                    return x + y
                case ast.Sub():
                    return x - y
                case ast.Mult():
                    return x * y
                case ast.FloorDiv():
                    return x // y
                case ast.Mod():
                    return x % y
        case ast.Compare(left=a, ops=[op], comparators=[b]):
            return rebuild(_CMP_OPS[type(op)], _parse(a, symbols), _parse(b, symbols))
        case ast.BoolOp(op=op, values=values):
            return rebuild("and" if isinstance(op, ast.And) else "or", *(_parse(v, symbols) for v in values))
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=args):
            return rebuild(name, *(_parse(a, symbols) for a in args))
    raise ValueError(f"not an integer expression: {ast.unparse(node)}")
