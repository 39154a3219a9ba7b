"""What guards cost: nanoseconds of one check that hits, measured in C, and the time to build programs.

    python -m benchmarks.guards

Minimum over several runs. `left` is how many operations a steady check executes, `rows` how many the guard set has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from magneto.base.text import table
from magneto.dynamo.guards.native import build_guards
from magneto.dynamo.guards.rows import GuardSet, Kind, Row, TensorRow
from magneto.dynamo.guards.source import Global, InstanceDict, Item, Local, Source
from magneto.dynamo.guards.state import state_payload

SELF = Local(0, "self")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def tensor_row(t: torch.Tensor) -> TensorRow:
    return TensorRow(type(t), t.dtype, t.device, tuple(t.shape), t.stride(), t.requires_grad)


def module_rows(of: Source, module: nn.Module) -> Iterator[Row]:
    """Rows as capture makes them for a tree of modules."""
    contents = InstanceDict(of)
    yield Row(Kind.TYPE_IS, of, type(module))
    yield Row(Kind.ID_IS, Item(contents, "training"), module.training)
    yield Row(Kind.KEY_ABSENT, contents, "forward")
    for hooks in HOOKS:
        yield Row(Kind.LENGTH, Item(contents, hooks), 0)
    for tables in ("_parameters", "_buffers"):
        for name, value in vars(module)[tables].items():
            if value is not None:
                yield Row(Kind.TENSOR, Item(Item(contents, tables), name), tensor_row(value))
    for name, child in module._modules.items():
        if child is not None:
            yield from module_rows(Item(Item(contents, "_modules"), name), child)


def tensors(n: int) -> tuple[list[Row], tuple[Any, ...]]:
    values = tuple(torch.randn(4) for _ in range(n))
    return [Row(Kind.TENSOR, Local(i, f"x{i}"), tensor_row(t)) for i, t in enumerate(values)], values


def modules(module: nn.Module) -> tuple[list[Row], tuple[Any, ...]]:
    return list(module_rows(SELF, module)), (module,)


def without_tensors(rows: list[Row], values: tuple[Any, ...]) -> tuple[list[Row], tuple[Any, ...]]:
    return [row for row in rows if row.kind is not Kind.TENSOR], values


def cases() -> Iterator[tuple[str, list[Row], tuple[Any, ...]]]:
    yield "nothing", [], ()
    yield "2 tensors", *tensors(2)
    yield "20 tensors", *tensors(20)
    yield "all modes", [Row(Kind.STATE, None, payload) for payload in state_payload()], ()
    yield "a global", [Row(Kind.EQUALS, Global("n"), 1)], ()
    fifty = modules(nn.Sequential(*[nn.Linear(4, 4) for _ in range(25)]))
    yield "50 parameters", *fifty
    yield "50 parameters, no TENSOR rows", *without_tensors(*fifty)
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    yield "12 transformer layers", *modules(nn.TransformerEncoder(layer, 12))


def measure(name: str, rows: list[Row], values: tuple[Any, ...]) -> list[Any]:
    guards = GuardSet()
    for row in rows:
        guards.add(row)
    started = time.perf_counter()
    program = build_guards(guards)
    built = (time.perf_counter() - started) * 1e6
    names = {"n": 1}
    steady = min(program.time(2000, values, (), names) for _ in range(20))
    left = len(program.fast)
    return [name, len(rows), left, f"{steady:.0f}", f"{built:.0f}"]


def main() -> None:
    torch.set_num_threads(1)
    rows = [measure(*case) for case in cases()]
    print(table(rows, ("guards", "rows", "left", "ns per check", "us to build")))


if __name__ == "__main__":
    main()
