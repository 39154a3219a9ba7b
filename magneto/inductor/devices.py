"""Graphs with tensors of the CPU and of one CUDA device: cut in two by `split`.

Eager lets single numbers of the CPU meet tensors of any device (the step count of an optimiser, a learning rate), and programs send what they make on the CPU over. What is
computed of the CPU's inputs alone becomes a graph of its own, which runs first; what of it the device reads is copied there. Indices and constants that depend on no input
belong to whoever reads them. What comes back from the device is not cut: such a graph is refused. The states of random draws (draws.py) are sent likewise.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import fx

from magneto import _C
from magneto.graph.meta import TensorMeta
from magneto.graph.opinfo import stays
from magneto.inductor.draws import aligned, states, states_of
from magneto.inductor.lower.context import CannotLower, is_dense
from magneto.inductor.lower.graph import PRIM_ROWS, prim_name
from magneto.inductor.runtime.record import capturing

Compiled = Callable[..., Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Sent:
    """A value that the host sends, as it arrives. `dense`: it is so already; what is not becomes contiguous first."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    dense: bool

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Back:
    """An output of the whole that the host makes, at a position among its results, and that serves for nothing but to be the new numbers of an input laid out as it is."""

    output: int
    position: int
    input: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Halves:
    """How two halves make a whole. The host takes the whole graph's inputs and returns the `sent` values, then its outputs; the device takes the inputs, the sent values and the states of draws. `places`:
    per output of the whole (of the host?, position there); None: it is no node but the value in `rest`. `draws`: by how much each moves the generator on; `aligned`: the inputs for which
    that holds only where they begin at a multiple of 16 bytes."""

    sent: tuple[Sent, ...]
    places: tuple[tuple[bool, int] | None, ...]
    rest: tuple[Any, ...]
    back: tuple[Back, ...] = ()
    draws: tuple[int, ...] = ()
    aligned: tuple[int, ...] = ()

    @property
    def small(self) -> tuple[int, ...]:
        """Values that are sent together."""
        return tuple(k for k, s in enumerate(self.sent) if s.dense and s.nbytes <= PACKED)

    @property
    def lent(self) -> frozenset[int]:
        """The host's results that nobody reads after the call."""
        return frozenset(self.small) | frozenset(b.position for b in self.back)

    def written(self, pairs: Mapping[int, int]) -> dict[int, int]:
        """The outputs that may go into inputs' memory, counted in the device's half. (The host's do not: it runs before what may raise.)"""
        found = {output: self.places[output] for output in pairs}
        return {place[1]: pairs[output] for output, place in found.items() if place is not None and not place[0]}

    def whole(self, done: frozenset[int]) -> frozenset[int]:
        """Outputs of the device's half, counted in the whole, and those that go back to inputs of the host."""
        here = frozenset(k for k, place in enumerate(self.places) if place is not None and not place[0] and place[1] in done)
        return here | frozenset(b.output for b in self.back)


def split(graph: fx.Graph, written: Mapping[int, int] | None = None) -> tuple[torch.device, fx.Graph | None, fx.Graph, Halves]:
    """The CUDA device of a graph, its half on the host (None: nothing is to do there), that on the device, and how they belong together. `written`: output -> the input whose new numbers
    it is. CannotLower for several devices, and where the CPU waits for the device."""
    device = device_of(graph)
    hosted = _hosted(graph, device)
    output = graph.output_node()
    results = tuple(output.args[0])  # type: ignore[arg-type]
    sent = [n for n in graph.nodes if n in hosted and any(user not in hosted and user.op != "output" for user in n.users)]
    places: list[tuple[bool, int] | None] = []
    of_host: list[fx.Node] = []
    of_device: list[Any] = []
    for result in results:
        if not isinstance(result, fx.Node):
            places.append(None)
        elif result in hosted:
            places.append((True, len(sent) + len(of_host)))
            of_host.append(result)
        else:
            if _kind(result) not in (None, "cuda"):
                raise CannotLower("a tensor of the CPU that is made of no input leaves the graph")
            places.append((False, len(of_device)))
            of_device.append(result)
    effects = [n for n in graph.nodes if n.op == "call_function" and stays(n.target)]  # random numbers and checks that nobody reads
    checks = [n for n in effects if n in hosted]
    host = _part(graph, (*sent, *of_host), {}, checks) if sent or of_host or checks else None
    dense = [is_dense(n.meta["val"].shape, n.meta["val"].strides) for n in sent]
    extra = {n: _sent(n.meta["val"], device, same) for n, same in zip(sent, dense, strict=True)}
    kinds = tuple(Sent(tuple(m.shape), tuple(m.strides), m.dtype, same) for m, same in zip(extra.values(), dense, strict=True))
    rest = tuple(None if isinstance(result, fx.Node) else result for result in results)
    back, drawn = _back(graph, results, places, written or {}), states_of(graph)
    extra.update((n, n.meta["val"]) for n in drawn)
    draws = tuple(int(n.args[0]) for n in drawn)  # type: ignore[arg-type]
    part = _part(graph, of_device, extra, [n for n in effects if n not in hosted])
    return device, host, part, Halves(kinds, tuple(places), rest, back, draws, aligned(graph))


def _back(
    graph: fx.Graph, results: Sequence[Any], places: Sequence[tuple[bool, int] | None], written: Mapping[int, int]
) -> tuple[Back, ...]:
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    found = []
    for output, place in enumerate(places):
        if place is None or not place[0] or output not in written:
            continue
        made, target = results[output].meta["val"], inputs[written[output]].meta["val"]
        alike = (made.shape, made.dtype, made.device) == (target.shape, target.dtype, target.device) and made.strides == target.strides
        if (
            alike
            and is_dense(made.shape, made.strides)
            and results.count(results[output]) == 1
            and target.numel * made.dtype.itemsize <= PACKED
        ):
            found.append(Back(output, place[1], written[output], int(target.numel) * made.dtype.itemsize))
    return tuple(found)


def _sent(meta: TensorMeta, device: torch.device, same: bool) -> TensorMeta:
    return replace(meta if same else TensorMeta.contiguous(meta.shape, meta.dtype), device=device)


def _metas(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(m for m in (value if isinstance(value, (tuple, list)) else (value,)) if getattr(m, "device", None) is not None)


def _numel(node: fx.Node) -> int:
    return sum(int(m.numel) for m in _metas(node))


def _kind(node: fx.Node) -> str | None:
    metas = _metas(node)
    return str(metas[0].device.type) if metas else None


def device_of(graph: fx.Graph) -> torch.device:
    """The one CUDA device of a graph. CannotLower for others, and for several."""
    found = {m.device for node in graph.nodes for m in _metas(node) if m.device.type != "cpu"}
    if len(found) != 1:
        raise CannotLower("tensors of several devices")
    (device,) = found
    if device.type != "cuda":
        raise CannotLower(f"no kernels for {device.type}")
    return device if device.index is not None else torch.device("cuda", 0)


def _hosted(graph: fx.Graph, device: torch.device) -> set[fx.Node]:
    """What is computed on the CPU, of inputs there or by operations that are no loops. Constants, and what is spread out of single numbers, are not (where something hosted reads them, it computes them too)."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output" or _kind(node) == "cuda":
            continue
        sources = node.all_input_nodes
        if _kind(node) is None:
            if sources and all(s in found for s in sources):
                found.add(node)
            continue
        if any(_kind(s) == "cuda" for s in sources):
            raise CannotLower("a result of the device is used on the CPU")
        given = [s for s in sources if s in found]
        spread = all(_numel(s) == 1 for s in given) and _numel(node) != 1  # of single numbers: the device does that itself
        if node.op in ("placeholder", "get_attr") or prim_name(node.target) not in PRIM_ROWS or (given and not spread):
            found.add(node)
    return found


def _part(graph: fx.Graph, results: Sequence[Any], extra: Mapping[fx.Node, Any], effects: Sequence[fx.Node] = ()) -> fx.Graph:
    """`effects`, and what `results` are computed of, over all placeholders of the graph and one for each node of `extra` (node -> its metadata there)."""
    needed: set[fx.Node] = set()
    work = [*(r for r in results if r not in extra), *effects]
    while work:
        node = work.pop()
        if node not in needed and node not in extra:
            needed.add(node)
            work.extend(node.all_input_nodes)
    made = fx.Graph(graph.owning_module)
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = made.node_copy(node, env.__getitem__)
            if node not in needed:
                env[node].meta["val"] = None
    for number, (node, meta) in enumerate(extra.items()):
        env[node] = made.placeholder(f"sent_{number}")
        env[node].meta["val"] = meta
    for node in graph.nodes:
        if node in needed and node.op not in ("placeholder", "output"):
            env[node] = made.node_copy(node, env.__getitem__)
    made.output(tuple(env[r] for r in results))
    return made


PACKED = 4096  # bytes of a value, at most, that is sent with others in one copy
ALIGNMENT = 16
STREAMS = 8  # that have memory of their own
STATE = 16  # bytes


class Joined:
    """Both halves as one callable. The host's small values are copied to a place of ours at once (they lie in memory that its next call writes). What is sent of them goes over in one
    copy, to the same memory in each call: it is read by what was launched before the next call writes it. `lasting`: results may lie in that memory, so that every call has its own.
    The host's results that are new numbers of inputs are written behind everything that may raise. `plain`: the whole graph operation by operation, for programs that capture a stream themselves: what
    the library draws is new in each replay then, and the generator is not to be read; and for inputs of which the library draws other numbers, because they begin elsewhere."""

    def __init__(
        self, host: Compiled | None, device: Compiled, halves: Halves, where: torch.device, lasting: bool, plain: Compiled | None = None
    ) -> None:
        self.host, self.device, self.where, self.lasting, self.plain = host, device, where, lasting, plain
        self.sent, self.small, self.back = halves.sent, halves.small, {b.output: b.input for b in halves.back}
        self.outputs = tuple(zip(range(len(halves.places)), halves.places, halves.rest, strict=True))
        self.aligned = halves.aligned
        self.draws, drawn = halves.draws, [len(halves.draws) * STATE] * bool(halves.draws)
        sizes = [self.sent[k].nbytes for k in self.small] + drawn + [b.nbytes for b in halves.back]
        self.starts = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        first = len(self.small) + len(drawn)
        self.over = self.starts[first]  # bytes that go over
        positions = [*(k + len(drawn) for k in self.small), *(0 for _ in drawn), *(b.position + len(drawn) for b in halves.back)]
        triples = list(zip(positions, self.starts, sizes, strict=False))
        self.into_place = array("q", [n for triple in triples for n in triple]).tobytes()
        written = [(b.input, start, size) for b, (_, start, size) in zip(halves.back, triples[first:], strict=True)]
        self.into_inputs = array("q", [n for triple in written for n in triple]).tobytes()
        self.idle: list[torch.Tensor] = []
        self.memories: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}  # by stream
        self.lock = threading.RLock()

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if self.plain is not None and (capturing() or any(inputs[k].data_ptr() % ALIGNMENT for k in self.aligned)):
            return self.plain(*inputs)
        with self.lock:
            made = tuple(self.host(*inputs)) if self.host is not None else ()
            staged = self.idle.pop() if self.idle else self._staged()
            _C.pack((states(self.where, self.draws), *made) if self.draws else made, staged.data_ptr(), self.into_place)
            found = self.device(*inputs, *self._sent(made, staged))
            if self.back:
                _C.unpack(inputs, staged.data_ptr(), self.into_inputs)
            self.idle.append(staged)
        back = self.back
        return tuple(
            [
                rest if place is None else inputs[back[k]] if k in back else (made if place[0] else found)[place[1]]
                for k, place, rest in self.outputs
            ]
        )

    def _sent(self, made: Sequence[torch.Tensor], staged: torch.Tensor) -> list[torch.Tensor]:
        """What the host sends, on the device."""
        if not self.over:
            return [self._alone(t, s.dense) for t, s in zip(made, self.sent, strict=False)]
        stream = torch._C._cuda_getCurrentRawStream(self.where.index or 0)  # type: ignore[attr-defined]
        memory = self.memories.get(stream)
        if memory is None or self.lasting:
            memory = self._memory()
            if not self.lasting:
                self.memories = {**(self.memories if len(self.memories) < STREAMS else {}), stream: memory}
        memory[0].copy_(staged[: self.over], non_blocking=True)  # the driver has read pageable memory when it returns
        if len(self.small) == len(self.sent):
            return memory[1]
        small = dict(zip(self.small, memory[1], strict=False))
        alone = [small[k] if k in small else self._alone(made[k], s.dense) for k, s in enumerate(self.sent)]
        return alone + memory[1][len(self.small) :]

    def _alone(self, value: torch.Tensor, dense: bool) -> torch.Tensor:
        return (value if dense else value.contiguous()).to(self.where)

    def _staged(self) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(self.starts[-1], dtype=torch.uint8)

    def _memory(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Memory on the device, and the values in it."""
        with torch.inference_mode(False), torch.no_grad():
            flat = torch.empty(self.over, dtype=torch.uint8, device=self.where)
            views = []
            for start, s in zip(self.starts, (self.sent[k] for k in self.small), strict=False):
                views.append(torch.as_strided(flat[start : start + s.nbytes].view(s.dtype), s.shape, s.strides))
            views += flat[self.over - len(self.draws) * STATE :].view(torch.int64).view(-1, 2).unbind() if self.draws else ()
        return flat, views
