"""A stand-in for recordings on a device: what a run calls is written down and called again, into the same memory. Everything else that a recording has written is gone before that."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from magneto import _C
from magneto.inductor import cuda
from magneto.inductor.replay import Replay
from magneto.inductor.runtime import cuda_graphs, record
from magneto.inductor.runtime.cuda_graphs import Graphed, Parts
from magneto.inductor.runtime.parted import parted
from magneto.inductor.runtime.plan_code import PlanCode

CPU = torch.device("cpu")


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _by_address(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, without being one of its users."""
    storage = x.untyped_storage()
    if not storage.nbytes():
        return x
    raw = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    return torch.as_strided(torch.frombuffer(raw, dtype=x.dtype), x.shape, x.stride(), x.storage_offset())


class Tape(TorchDispatchMode):
    """`replays`: how often it was called again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.own: list[torch.Tensor] = []  # all memory that is allocated while it is made
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_memory(x) for x in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        mine = {_memory(x) for x in self.own}
        args, kwargs = tree_map(lambda x: _by_address(x) if isinstance(x, torch.Tensor) and _memory(x) not in mine else x, (args, kwargs))
        fresh = [x for x in _tensors(result) if _memory(x) not in given]
        self.own += fresh
        self.calls.append((func, args, kwargs, fresh))
        return result

    def let_go(self, returned: set[int]) -> None:
        """A recording on a device has no references to the tensors that were returned."""

        def without(x: Any) -> Any:
            return _by_address(x) if id(x) in returned else x

        self.own = [without(x) for x in self.own]
        self.calls = [(func, *tree_map(without, (args, kwargs, fresh))) for func, args, kwargs, fresh in self.calls]

    def _overwrite(self) -> None:
        for x in self.own:
            if x.is_floating_point():
                x.data.fill_(float("nan"))

    def replay(self) -> None:
        self.replays += 1
        self._overwrite()
        with torch.no_grad():
            for func, args, kwargs, fresh in self.calls:
                given = {_memory(x) for x in _tensors((args, kwargs))}
                found = [x for x in _tensors(func(*args, **kwargs)) if _memory(x) not in given]
                for into, x in zip(fresh, found, strict=True):
                    into.data.copy_(x)


class Deck:
    """All tapes, and the Graphed that have them."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.made: list[Graphed] = []
        self.stream = 0
        self.capturing = False
        self.parted = False  # are results made behind replays?

    def recorded(
        self, run: Callable[..., Sequence[Any]], given: Sequence[Any], index: int, first: Sequence[int]
    ) -> tuple[Tape, Sequence[Any]]:
        tape = Tape()
        with tape:
            outs = run(*given)
        tape.let_go({id(x) for x in _tensors(list(outs))})
        self.tapes.append(tape)
        return tape, outs

    def replayed(self, run: Any, graph: torch.fx.Graph, name: str, replay: Replay) -> Any:
        launches = sum(node.op == "call_function" for node in graph.nodes)
        self.made.append(Graphed(run, CPU, name, launches, replay.results, parts=in_two(graph, replay) if self.parted else None))
        return self.made[-1]

    @property
    def replays(self) -> int:
        return sum(tape.replays for tape in self.tapes)

    def of(self, backward: bool) -> Graphed:
        (found,) = [g for g in self.made if g.name.endswith("_backward") == backward]
        return found


def in_two(graph: torch.fx.Graph, replay: Replay) -> Parts | None:
    """The graph with the operations that make nothing but results of their own behind the others."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    values = list(graph.output_node().args[0])  # type: ignore[arg-type]
    results = values[: replay.results]
    last = [n for n in calls if n in results and n not in values[len(results) :] and _own(n)]
    if not last:
        return None
    registers: dict[Any, int] = {n: k for k, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    n_inputs, tail = len(registers), 0
    constants: list[tuple[Any, ...]] = []
    instructions: list[tuple[Any, ...]] = []

    def register(value: Any) -> int:
        if isinstance(value, torch.fx.Node):
            return registers.setdefault(value, len(registers) + len(constants))
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.fx.Node) for v in value):
            found = register(object()), tuple(map(register, value))
            instructions.append(("LIST", *found))
            return found[0]
        number = len(registers) + len(constants)
        constants.append(("CONST", number, value))
        return number

    for n in (*(n for n in calls if n not in last), None, *last):
        if n is None:
            tail = len(instructions)
            continue
        args = [register(a) for a in (*n.args, *n.kwargs.values())]
        instructions.append(("CALL", register(n), n.target, tuple(args), tuple(n.kwargs)))
    outputs = tuple(map(register, values))
    code = PlanCode((*constants, *instructions), len(registers) + len(constants), n_inputs, outputs, 0, 0, len(constants) + tail)
    two = parted(code)
    head, end = (_C.Plan(c.instructions, c.n_registers, c.n_inputs, c.outputs) for c in (two.head, two.tail))
    return Parts(head, end, two.places)


def _own(node: torch.fx.Node) -> bool:
    """Is the result memory of its own that only the caller reads?"""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and all(user.op == "output" for user in node.users) and not any(x.alias_info for x in schema.returns)


@pytest.fixture
def deck(monkeypatch: pytest.MonkeyPatch) -> Deck:
    """The backend `cudagraphs` records on tapes, on the CPU."""
    made = Deck()
    monkeypatch.setattr(record, "recorded", made.recorded)
    monkeypatch.setattr(record, "stream", lambda index: made.stream)
    monkeypatch.setattr(record, "capturing", lambda: made.capturing)
    monkeypatch.setattr(cuda, "replayed", made.replayed)
    monkeypatch.setattr(cuda_graphs, "BUFFERS", 1 << 40)
    return made
