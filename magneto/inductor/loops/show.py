"""Programs as text: Python syntax, one statement per value, origins as comments. `parse.py` reads it back to equal objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from magneto.inductor.loops.ir import (
    PRINTER,
    Buffer,
    Const,
    IndexValue,
    Indirect,
    LibraryCall,
    Load,
    Masked,
    Node,
    Op,
    Ordered,
    Origin,
    Pointwise,
    Program,
    Size,
    Value,
    ViewOf,
    walk_values,
)
from magneto.symbolic import Expr, Sym, to_python


def show_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def show_size(s: Size) -> str:
    return to_python(s)


def _tuple(items: Iterable[str]) -> str:
    items = list(items)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _sizes(xs: Iterable[Size]) -> str:
    return _tuple(show_size(x) for x in xs)


class BodyText:
    """The statements of a body; `v0, v1, ...` values, `j0, ...` indirect indices, in evaluation order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[Value, str] = {}
        self.indirect: dict[Indirect, str] = {}
        self.count = 0

    def add(self, root: Value) -> str:
        """Statements for everything below root; the text that refers to root."""
        for v in walk_values(root):
            if v in self.names:
                continue
            if isinstance(v, Const):
                self.names[v] = f"const({v.value!r}, {show_dtype(v.dtype)})"
                continue
            text = self.statement(v)
            self.names[v] = f"v{self.count}"
            self.count += 1
            self.lines.append(f"{self.names[v]} = {text}")
        return self.names[root]

    def statement(self, v: Value) -> str:
        dtype = show_dtype(v.dtype)
        if isinstance(v, Load):
            return f"load({v.buffer!r}, {self.index(v.index)}, {dtype})"
        if isinstance(v, IndexValue):
            return f"index_value({self.index(v.expr)}, {dtype})"
        if isinstance(v, Masked):
            return f"masked({self.names[v.cond]}, {self.names[v.value]}, {self.names[v.other]})"
        assert isinstance(v, Op)
        return f"op({v.name!r}, {dtype}, {', '.join(self.names[a] for a in v.args)})"

    def index(self, e: Expr) -> str:
        for s in sorted((s for s in e.free if isinstance(s, Indirect) and s not in self.indirect), key=lambda s: s.key):
            self.indirect[s] = f"j{len(self.indirect)}"
            self.lines.append(f"{self.indirect[s]} = indirect({self.names[s.value]}, {show_size(s.extent)})")
        return to_python(e, self.symbol)

    def symbol(self, s: Sym) -> str:
        return self.indirect[s] if isinstance(s, Indirect) else s.name


def show_value(v: Value) -> str:
    """One line, linear in the size of the DAG; equal text means equal values (up to the ranges of loop symbols)."""
    text = BodyText()
    last = text.add(v)
    return "; ".join([*text.lines, last])


PRINTER[:] = [show_value]


def show_buffer(b: Buffer) -> str:
    flexible = ", flexible=True" if b.flexible else ""
    return f'buffer("{b.name}", {show_dtype(b.dtype)}, {_sizes(b.shape)}, {_sizes(b.strides)}, "{b.device}"{flexible})'


def show_argument(x: Any) -> str:
    """An argument of a library call or an output of a program."""
    if isinstance(x, ViewOf):
        return f'view("{x.buffer}", {_sizes(x.shape)}, {_sizes(x.strides)}, {show_size(x.offset)}, {show_dtype(x.dtype)})'
    if isinstance(x, tuple):
        return _tuple(show_argument(y) for y in x)
    if isinstance(x, torch.dtype):
        return show_dtype(x)
    if isinstance(x, torch.device):
        return f'device("{x}")'
    if isinstance(x, torch.memory_format | torch.layout):
        return str(x).removeprefix("torch.")
    if isinstance(x, Expr):
        return f"size({to_python(x)})"
    return repr(x)


def show_op(op: Any) -> str:
    if isinstance(op, torch._ops.OpOverload):
        return f'aten("{op}")'
    return f'prim("{op.name}")'


def show_origins(origins: tuple[Origin, ...]) -> str:
    """`  # exp, mul <- app.py:3`: what a node computes and where the user wrote the last of it."""
    if not origins:
        return ""
    names = ", ".join(dict.fromkeys(o.target for o in origins))
    stack = next((o.stack for o in reversed(origins) if o.stack), ())
    return f"  # {names}" + (f" <- {stack[-1][0]}:{stack[-1][1]}" if stack else "")


def show_node(node: Node) -> str:
    if isinstance(node, LibraryCall):
        return _show_call(node)
    text = BodyText()
    result = text.add(node.body)
    if isinstance(node, Ordered):
        head = f'@ordered("{node.kind}", {show_buffer(node.buffer)}, {_sizes(node.ranges)}, {node.serial})'
        symbols = [f"i{d}" for d in range(len(node.ranges))]
        result = result if node.place is None else f"add_at({text.add(node.place)}, {result})"
        if node.init is not None:
            head = f"# first {show_value(node.init)}\n{head}"
        body = "".join(f"    {line}\n" for line in text.lines)
        return f"{head}{show_origins(node.origins)}\ndef {node.name}({', '.join(symbols)}):\n{body}    return {result}"
    if isinstance(node, Pointwise):
        head = f"@pointwise({show_buffer(node.buffer)})"
        symbols = [f"i{d}" for d in range(len(node.ranges))]
    else:
        buffers = _tuple(show_buffer(b) for b in node.buffers)
        head = f'@reduction("{node.kind}", {buffers}, {_sizes(node.reduce_ranges)}, {show_dtype(node.acc_dtype)})'
        symbols = [f"i{d}" for d in range(len(node.ranges))] + [f"r{d}" for d in range(len(node.reduce_ranges))]
    body = "".join(f"    {line}\n" for line in text.lines)
    return f"{head}{show_origins(node.origins)}\ndef {node.name}({', '.join(symbols)}):\n{body}    return {result}"


def _show_call(node: LibraryCall) -> str:
    outputs = _tuple("None" if b is None else show_buffer(b) for b in node.outputs)
    kwargs = "{" + ", ".join(f"{k!r}: {show_argument(v)}" for k, v in node.kwargs) + "}"
    extra = "" if node.single else ", single=False"
    extra += f", out_op={show_op(node.out_op)}" if node.out_op is not None else ""
    extra += f", mutates={node.mutates!r}" if node.mutates else ""
    extra += ", may_alias=True" if node.may_alias else ""
    extra += f", lists={node.lists!r}" if node.lists else ""
    return f'call("{node.name}", {show_op(node.op)}, {show_argument(node.args)}, {kwargs}, {outputs}{extra}){show_origins(node.origins)}'


def _size_symbols(program: Program) -> list[Sym]:
    """The symbolic sizes that occur, sorted by name."""
    found: set[Sym] = set()
    for b in program.buffer_table().values():
        for s in (*b.shape, *b.strides):
            if isinstance(s, Expr):
                found |= s.free
    return sorted(found, key=lambda s: s.name)


def show_program(program: Program) -> str:
    """The whole program; `parse_program` reads it (constants' values are given to it by name)."""
    lines = [f"{s.name} = sym({s.name!r}, {s.lo}, {s.hi}, {s.divisor})" for s in _size_symbols(program)]
    lines += ["no_input()" if b is None else f"input({show_buffer(b)})" for b in program.inputs]
    lines += [f"constant({show_buffer(c.buffer)})" for c in program.constants]
    lines += [show_node(n) for n in program.nodes]
    lines.append(f"output{_tuple(show_argument(o) for o in program.outputs)}" if program.outputs else "output()")
    return "\n".join(lines) + "\n"
