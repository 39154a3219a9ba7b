"""Guards in the words of the program: `self.layers[3].dropout.p` for what a guard reads as instance dictionaries of dictionaries of submodules."""

from __future__ import annotations

from typing import Any

import torch

from magneto.dynamo.guards.rows import Kind, Row, TensorRow, Weak
from magneto.dynamo.guards.source import Attr, Cell, Global, Held, InstanceDict, Item, KeyAt, Local, Source
from magneto.dynamo.guards.text import SHOW, show_row

LAZY = ("no lazy bit", "a conj bit", "a neg bit", "a conj and a neg bit")
_REGISTRIES = ("_modules", "_parameters", "_buffers")


def expression(source: Source) -> str:
    """The expression with which the program would reach the value."""
    if isinstance(source, (Local, Global)):
        return source.name
    if isinstance(source, Cell):
        return expression(source.of)
    if isinstance(source, Attr):
        return f"{expression(source.of)}.{source.name}"
    if isinstance(source, InstanceDict):
        return f"vars({expression(source.of)})"
    if isinstance(source, KeyAt):
        return f"list({expression(source.of)})[{source.index}]"
    if isinstance(source, Item):
        return _item(source.of, source.key, source)
    return source.text()


def _item(of: Source, key: Any, source: Item) -> str:
    if isinstance(key, str) and isinstance(of, Held) and of.obj.__class__ is dict:  # a module's globals
        return key
    if isinstance(key, str) and isinstance(of, InstanceDict):
        return f"{expression(of.of)}.{key}"
    registry = of if isinstance(of, Item) and isinstance(of.of, InstanceDict) and of.key in _REGISTRIES else None
    if isinstance(key, str) and registry is not None:
        owner = expression(registry.of.of)  # type: ignore[attr-defined]
        return f"{owner}[{key}]" if key.isdigit() else f"{owner}.{key}"
    return expression(of) + source.text().removeprefix(of.text())


def expected(row: Row) -> str:
    """What the row expects."""
    if row.source is None:
        return show_row(row)
    name = expression(row.source)
    if row.kind is Kind.SAME:
        return f"{name} is {expression(row.payload)}"
    if row.kind in (Kind.MEMBER, Kind.NOT_MEMBER):
        return f"{expression(row.payload)} {'in' if row.kind is Kind.MEMBER else 'not in'} {name}"
    if row.kind is Kind.TOGETHER:
        return str(row.payload[0].format(name, *map(expression, row.payload[1])))
    if row.kind is Kind.SIZES:
        names = ", ".join([name, *map(expression, row.payload.others)])
        return f"the sizes of {names} are some that the program treats as those it was captured with"
    if row.kind is Kind.DISTINCT:
        others = ", ".join(expression(source) for source in row.payload)
        return f"{name} shares no object or memory with {others}"
    return SHOW[row.kind](name, row.payload)


def tensors_differ(row: TensorRow, found: TensorRow) -> list[tuple[str, str]]:
    """(expected, actual) of each property of a tensor that differs; strides only where the sizes do not explain them."""
    facts: list[tuple[str, Any, Any]] = [
        ("class {}", row.cls.__name__, found.cls.__name__),
        ("dtype {}", _plain(row.dtype), _plain(found.dtype)),
        ("device {}", str(row.device), str(found.device)),
        ("{} dimensions", len(row.shape), len(found.shape)),
        ("requires_grad {}", found.requires_grad if row.requires_grad is None else row.requires_grad, found.requires_grad),
        ("inference mode {}", row.inference, found.inference),
        ("{}", LAZY[row.lazy], LAZY[found.lazy]),
    ]
    if len(row.shape) == len(found.shape):
        sizes = [(i, want, got) for i, (want, got) in enumerate(zip(row.shape, found.shape, strict=True)) if want not in (None, got)]
        facts += [(f"size {{}} in dimension {i}", want, got) for i, want, got in sizes]
        if not sizes and row.strides is not None and found.strides is not None:
            strides = tuple(got if want is None else want for want, got in zip(row.strides, found.strides, strict=True))
            facts.append(("strides {}", strides, found.strides))
    return [(text.format(want), text.format(got)) for text, want, got in facts if want != got]


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def subject(row: Row) -> str:
    """What the row is about."""
    if row.kind is Kind.STATE:
        return str(row.payload[0])
    return f"class {_class_name(row)}" if row.kind is Kind.TYPE_VERSION or row.source is None else expression(row.source)


def _class_name(row: Row) -> str:
    return row.payload.text if isinstance(row.payload, Weak) else row.payload.__qualname__  # type: ignore[no-any-return]


def remedy(row: Row) -> str:
    """What the user can do about a row that keeps failing."""
    name = expression(row.source) if row.source is not None else ""
    if row.kind is Kind.TENSOR:
        return f"Give {name} the same dtype, layout and sizes each time (pad or bucket what varies)."
    if row.kind is Kind.STATE:
        return f"Keep {row.payload[0]} the same at every call, or optimise a function for each."
    if row.kind is Kind.TYPE_VERSION:
        return f"Do not modify class {_class_name(row)} between calls; keep what changes on an instance."
    if row.kind is Kind.ID_IS:
        return f"Make the object {name} once and pass the same one each time."
    if row.kind in (Kind.LENGTH, Kind.KEYS, Kind.KEY_ABSENT):
        return f"Keep the size of {name} the same, or make it one tensor."
    if row.kind in (Kind.EQUALS, Kind.RELATION, Kind.TOGETHER, Kind.INT_RANGE):
        return f"Make {name} a tensor, or keep it constant."
    return f"Keep {name} the same at every call."
