"""Reading programs from text: the inverse of `show.py`. The text is walked as a syntax tree; nothing in it is executed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

import torch

from magneto.inductor.loops.ir import (
    Buffer,
    Const,
    Constant,
    IndexValue,
    Indirect,
    LibraryCall,
    Load,
    Masked,
    Node,
    Op,
    Pointwise,
    Program,
    Reduction,
    Size,
    Value,
    ViewOf,
    index_symbols,
    op_named,
    reduce_symbols,
)
from magneto.symbolic import Const as IntConst
from magneto.symbolic import Expr, Sym
from tests.symbolic.parse import parse_expr


def _simple_size(e: Expr) -> Size:
    return e.value if isinstance(e, IntConst) else e


class _Parser:
    def __init__(self, constants: Mapping[str, torch.Tensor], prims: Mapping[str, Callable[..., Any]]) -> None:
        self.constants, self.prims = constants, prims
        self.sizes: dict[str, Expr] = {}
        self.inputs: list[Buffer | None] = []
        self.consts: list[Constant] = []
        self.nodes: list[Node] = []
        self.outputs: tuple[Any, ...] = ()

    # ---- pieces --------------------------------------------------------------------------------------------------------

    def size(self, e: ast.expr) -> Size:
        return _simple_size(parse_expr(ast.unparse(e), self.sizes))

    def sizes_of(self, e: ast.expr) -> tuple[Size, ...]:
        assert isinstance(e, ast.Tuple)
        return tuple(self.size(x) for x in e.elts)

    def dtype(self, e: ast.expr) -> torch.dtype:
        assert isinstance(e, ast.Name)
        found = getattr(torch, e.id)
        assert isinstance(found, torch.dtype)
        return found

    def buffer(self, e: ast.expr) -> Buffer:
        name, dtype, shape, strides, device = _args(e, "buffer")
        flexible = any(k.arg == "flexible" for k in e.keywords)  # type: ignore[attr-defined]
        return Buffer(_text(name), self.sizes_of(shape), self.sizes_of(strides), self.dtype(dtype), torch.device(_text(device)), flexible)

    def op(self, e: ast.expr) -> Any:
        assert isinstance(e, ast.Call) and isinstance(e.func, ast.Name)
        name = _text(e.args[0])
        if e.func.id == "prim":
            return self.prims[name]
        return op_named(name)

    def argument(self, e: ast.expr) -> Any:
        match e:
            case ast.Tuple(elts=elts):
                return tuple(self.argument(x) for x in elts)
            case ast.Name(id="inf" | "nan" as name):
                return float(name)
            case ast.Name(id=name):
                return getattr(torch, name)
            case ast.UnaryOp(op=ast.USub(), operand=x):
                return -self.argument(x)
            case ast.BinOp(left=x, op=op, right=y):  # a complex number
                return self.argument(x) + (self.argument(y) if isinstance(op, ast.Add) else -self.argument(y))
            case ast.Call(func=ast.Name(id="view"), args=[name, shape, strides, offset, dtype]):
                return ViewOf(_text(name), self.sizes_of(shape), self.sizes_of(strides), self.size(offset), self.dtype(dtype))
            case ast.Call(func=ast.Name(id="device"), args=[name]):
                return torch.device(_text(name))
            case ast.Call(func=ast.Name(id="size"), args=[x]):
                return parse_expr(ast.unparse(x), self.sizes)
            case ast.Constant(value=value):
                return value
        raise ValueError(f"not an argument: {ast.unparse(e)}")

    # ---- bodies --------------------------------------------------------------------------------------------------------

    def body(self, statements: list[ast.stmt], symbols: dict[str, Expr]) -> Value:
        values: dict[str, Value] = {}
        indices = self.sizes | symbols

        def value(e: ast.expr) -> Value:
            if isinstance(e, ast.Name):
                return values[e.id]
            number, dtype = _args(e, "const")
            return Const(self.argument(number), self.dtype(dtype))

        def index(e: ast.expr) -> Expr:
            return parse_expr(ast.unparse(e), indices)

        for statement in statements:
            if isinstance(statement, ast.Return):
                assert statement.value is not None
                return value(statement.value)
            assert isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
            name = statement.targets[0].id
            match statement.value:
                case ast.Call(func=ast.Name(id="load"), args=[buffer, at, dtype]):
                    values[name] = Load(_text(buffer), index(at), self.dtype(dtype))
                case ast.Call(func=ast.Name(id="index_value"), args=[at, dtype]):
                    values[name] = IndexValue(index(at), self.dtype(dtype))
                case ast.Call(func=ast.Name(id="masked"), args=[cond, x, other]):
                    values[name] = Masked(value(cond), value(x), value(other))
                case ast.Call(func=ast.Name(id="op"), args=[prim, dtype, *args]):
                    values[name] = Op(_text(prim), tuple(value(a) for a in args), self.dtype(dtype))
                case ast.Call(func=ast.Name(id="indirect"), args=[x, extent]):
                    indices[name] = Indirect(value(x), self.size(extent))
                case other:
                    raise ValueError(f"not a value: {ast.unparse(other)}")
        raise ValueError("a body ends in a return")

    # ---- statements ----------------------------------------------------------------------------------------------------

    def statement(self, s: ast.stmt) -> None:
        match s:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="sym"), args=args)):
                _, lo, hi, divisor = (self.argument(a) for a in args)
                self.sizes[name] = Sym(name, lo, hi, None, divisor)
            case ast.FunctionDef(decorator_list=[head], body=body):
                self.nodes.append(self.loops(head, body))
            case ast.Expr(value=ast.Call(func=ast.Name(id=word), args=args) as call):
                self.word(word, args, call)
            case _:
                raise ValueError(f"not a statement of a program: {ast.unparse(s)}")

    def word(self, word: str, args: list[ast.expr], call: ast.Call) -> None:
        if word == "input":
            self.inputs.append(self.buffer(args[0]))
        elif word == "no_input":
            self.inputs.append(None)
        elif word == "constant":
            buffer = self.buffer(args[0])
            self.consts.append(Constant(buffer, self.constants[buffer.name]))
        elif word == "output":
            self.outputs = tuple(self.argument(a) for a in args)
        elif word == "call":
            self.nodes.append(self.library_call(args, call))
        else:
            raise ValueError(f"not a statement of a program: {word}")

    def loops(self, head: ast.expr, body: list[ast.stmt]) -> Node:
        assert isinstance(head, ast.Call) and isinstance(head.func, ast.Name)
        if head.func.id == "pointwise":
            buffer = self.buffer(head.args[0])
            return Pointwise(buffer, self.body(body, _named("i", index_symbols(buffer.shape))))
        kind, outputs, ranges, acc = _args(head, "reduction")
        assert isinstance(outputs, ast.Tuple)
        buffers = tuple(self.buffer(b) for b in outputs.elts)
        reduce_ranges = self.sizes_of(ranges)
        symbols = _named("i", index_symbols(buffers[0].shape)) | _named("r", reduce_symbols(reduce_ranges))
        return Reduction(_text(kind), buffers, reduce_ranges, self.body(body, symbols), self.dtype(acc))

    def library_call(self, args: list[ast.expr], call: ast.Call) -> LibraryCall:
        name, op, call_args, kwargs, outputs = args
        assert isinstance(kwargs, ast.Dict) and isinstance(outputs, ast.Tuple)
        pairs = tuple((_text(k), self.argument(v)) for k, v in zip(kwargs.keys, kwargs.values, strict=True) if k is not None)
        buffers = tuple(None if isinstance(b, ast.Constant) else self.buffer(b) for b in outputs.elts)
        more = {k.arg: k.value for k in call.keywords}
        return LibraryCall(
            _text(name),
            self.op(op),
            self.argument(call_args),
            pairs,
            buffers,
            single="single" not in more,
            out_op=self.op(more["out_op"]) if "out_op" in more else None,
            mutates=self.argument(more["mutates"]) if "mutates" in more else (),
            may_alias="may_alias" in more,
            lists=self.argument(more["lists"]) if "lists" in more else (),
        )


def _named(prefix: str, symbols: tuple[Expr, ...]) -> dict[str, Expr]:
    return {f"{prefix}{d}": s for d, s in enumerate(symbols)}


def _text(e: ast.expr) -> str:
    assert isinstance(e, ast.Constant) and isinstance(e.value, str)
    return e.value


def _args(e: ast.expr, word: str) -> list[ast.expr]:
    if not (isinstance(e, ast.Call) and isinstance(e.func, ast.Name) and e.func.id == word):
        raise ValueError(f"expected {word}(...), found {ast.unparse(e)}")
    return e.args


def parse_program(
    text: str, constants: Mapping[str, torch.Tensor] | None = None, prims: Mapping[str, Callable[..., Any]] | None = None
) -> Program:
    """The program that `show_program` printed. `constants`: their values by name; `prims`: the prims that are called as library calls."""
    parser = _Parser(constants or {}, prims or {})
    for statement in ast.parse(text).body:
        parser.statement(statement)
    return Program(tuple(parser.inputs), tuple(parser.consts), tuple(parser.nodes), parser.outputs)
