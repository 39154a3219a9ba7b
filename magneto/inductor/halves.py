"""How the halves of a graph, on the host and on a CUDA device, belong together (`Halves`), with what the CPU does behind them, and all as one callable (`Joined`). `devices.py` cuts graphs."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any

import torch

from magneto import _C
from magneto.base.dataclass import dataclass
from magneto.base.errors import warn_once
from magneto.base.logs import LOOPS, log
from magneto.inductor.runtime import driver
from magneto.inductor.runtime.record import capturing

Compiled = Callable[..., Sequence[Any]]

PACKED = 4096  # bytes of a value, at most, that is sent with others in one copy
ALIGNMENT = 16
STREAMS = 8  # that have memory of their own
STATE = 16  # bytes
DEVICE, HOST, BEHIND = range(3)  # whose result an output is


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
    """How two halves make a whole. The host takes the whole graph's inputs and returns the `sent` values, then its outputs; the device takes the inputs, the sent values and the states of draws;
    what runs behind takes the inputs and `reads`. `places`: per output of the whole (whose, position there), as `reads`; None: it is no node but the value in `rest`. `draws`: by how much each moves the
    generator on; `aligned`: the inputs for which that holds only where they begin at a multiple of 16 bytes."""

    sent: tuple[Sent, ...]
    places: tuple[tuple[int, int] | None, ...]
    rest: tuple[Any, ...]
    back: tuple[Back, ...] = ()
    draws: tuple[int, ...] = ()
    aligned: tuple[int, ...] = ()
    reads: tuple[tuple[int, int], ...] = ()

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
        return {place[1]: pairs[output] for output, place in found.items() if place is not None and place[0] == DEVICE}

    def whole(self, done: frozenset[int]) -> frozenset[int]:
        """Outputs of the device's half, counted in the whole, and those that go back to inputs of the host."""
        here = frozenset(k for k, place in enumerate(self.places) if place is not None and place[0] == DEVICE and place[1] in done)
        return here | frozenset(b.output for b in self.back)


class Joined:
    """All parts as one callable. The host's small values are copied to a place of ours at once (they lie in memory that its next call writes). What is sent of them goes over at once,
    as arguments of a launch (`driver.put`) where they are few, to the same memory in each call: it is read by what was launched before the next call writes it. `lasting`: results may lie in that memory, so that every call has its own.
    The host's results that are new numbers of inputs are written behind everything that may raise. `plain`: the whole graph operation by operation, for programs that capture a stream themselves: what
    the library draws is new in each replay then, and the generator is not to be read; and for inputs of which the library draws other numbers, because they begin elsewhere."""

    def __init__(
        self, host: Compiled | None, device: Compiled, halves: Halves, where: torch.device, lasting: bool, plain: Compiled | None = None,
        behind: Compiled | None = None,
    ) -> None:  # fmt: skip
        self.host, self.device, self.where, self.lasting, self.plain = host, device, where, lasting, plain
        self.behind, self.reads = behind, halves.reads
        self.sent, self.small, self.back = halves.sent, halves.small, {b.output: b.input for b in halves.back}
        self.outputs = tuple(zip(range(len(halves.places)), halves.places, halves.rest, strict=True))
        self.aligned = halves.aligned
        self.draws, drawn = halves.draws, [len(halves.draws) * STATE] * bool(halves.draws)
        sizes = [self.sent[k].nbytes for k in self.small] + drawn + [b.nbytes for b in halves.back]
        self.starts = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        first = len(self.small) + len(drawn)
        self.over = self.starts[first]  # bytes that go over
        self.carried = where.type == "cuda" and self.over <= driver.CARRIED  # as arguments of a launch
        positions = [*(k + len(drawn) for k in self.small), *(0 for _ in drawn), *(b.position + len(drawn) for b in halves.back)]
        triples = list(zip(positions, self.starts, sizes, strict=False))
        self.into_place = array("q", [n for triple in triples for n in triple]).tobytes()
        written = [(b.input, start, size) for b, (_, start, size) in zip(halves.back, triples[first:], strict=True)]
        self.into_inputs = array("q", [n for triple in written for n in triple]).tobytes()
        self.idle: list[torch.Tensor] = []
        self.memories: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}  # by stream
        self.lock = threading.RLock()

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if self.plain is not None and ((self.draws and capturing()) or any(inputs[k].data_ptr() % ALIGNMENT for k in self.aligned)):
            return self.plain(*inputs)
        with self.lock:
            made = tuple(self.host(*inputs)) if self.host is not None else ()
            staged = self.idle.pop() if self.idle else self._staged()
            _C.pack((states(self.where, self.draws), *made) if self.draws else made, staged.data_ptr(), self.into_place)
            found = self.device(*inputs, *self._sent(made, staged))
        after = self.behind(*inputs, *((found, made)[whose][k] for whose, k in self.reads)) if self.behind is not None else ()
        if self.back:
            _C.pack(inputs, staged.data_ptr(), self.into_inputs, True)
        self.idle.append(staged)
        back, all_made = self.back, (found, made, after)
        return tuple(
            [rest if place is None else inputs[back[k]] if k in back else all_made[place[0]][place[1]] for k, place, rest in self.outputs]
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
        self._write(memory[0], staged, stream)
        if len(self.small) == len(self.sent):
            return memory[1]
        small = dict(zip(self.small, memory[1], strict=False))
        alone = [small[k] if k in small else self._alone(made[k], s.dense) for k, s in enumerate(self.sent)]
        return alone + memory[1][len(self.small) :]

    def _write(self, memory: torch.Tensor, staged: torch.Tensor, stream: int) -> None:
        if self.carried and not capturing():  # a replay of the program's own reads what lies there then
            try:
                return driver.put(memory.data_ptr(), staged.data_ptr(), self.over, self.where, stream)
            except (OSError, RuntimeError) as error:
                self.carried = False
                log(LOOPS, f"numbers of the host are copied: {error}")
        memory.copy_(staged[: self.over], non_blocking=True)  # the driver has read pageable memory when it returns

    def _alone(self, value: torch.Tensor, dense: bool) -> torch.Tensor:
        return (value if dense else value.contiguous()).to(self.where)

    def _staged(self) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(max(self.starts[-1], driver.carried(self.over) if self.carried else 0), dtype=torch.uint8)

    def _memory(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Memory on the device, and the values in it."""
        with torch.inference_mode(False), torch.no_grad():
            flat = torch.empty(self.over, dtype=torch.uint8, device=self.where)
            views = []
            for start, s in zip(self.starts, (self.sent[k] for k in self.small), strict=False):
                views.append(torch.as_strided(flat[start : start + s.nbytes].view(s.dtype), s.shape, s.strides))
            views += flat[self.over - len(self.draws) * STATE :].view(torch.int64).view(-1, 2).unbind() if self.draws else ()
        return flat, views


# ---- the generator, of which the host sends states ---------------------------------------------------------------------------

_lock = threading.Lock()


def states(device: torch.device, advances: Sequence[int]) -> torch.Tensor:
    """(seed, offset) of each draw on the host, in their order; the device's generator goes on behind them."""
    generator = torch.cuda.default_generators[device.index or 0]
    with _lock:
        offset = generator.get_offset()  # type: ignore[attr-defined]
        generator.set_offset(offset + sum(advances))  # type: ignore[attr-defined]
    seed, rows = generator.initial_seed(), []
    seed -= (seed >> 63) << 64
    for advance in advances:
        rows.append((seed, offset))
        offset += advance
    return torch.tensor(rows, device="cpu")


@cache
def multiprocessors(device: torch.device) -> tuple[int, int]:
    """How many there are, and the threads of each."""
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.max_threads_per_multi_processor


_checked: dict[int, bool] = {}


def agrees(device: torch.device) -> bool:
    """Does this torch draw on this device as we do? Looked at once in a process; W007 if not."""
    index = device.index or 0
    if index not in _checked:
        if capturing():
            return False
        try:
            _checked[index] = _compared(torch.device("cuda", index))
        except Exception as error:  # a generator without offsets, no memory
            log(LOOPS, f"draws are not compared: {type(error).__name__}: {error}")
            _checked[index] = False
        if not _checked[index]:
            warn_once("W007")
    return _checked[index]


def _compared(device: torch.device) -> bool:
    """The library's dropout and ours, of every type and form, at places where threads and turns change."""
    from magneto.inductor.loops.philox import advance_of, threads_of, vector_of, word_of
    from magneto.inductor.lower.dropout import dropped

    generator = torch.cuda.default_generators[device.index]
    before, found, wanted, good = generator.get_offset(), [], [], True  # type: ignore[attr-defined]
    with torch.cuda.device(device), torch.no_grad(), torch.inference_mode(False):
        try:
            for dtype, p in ((torch.float32, 0.1), (torch.float64, 0.3), (torch.float16, 0.5), (torch.bfloat16, 0.37)):
                for n in _sizes(device, dtype):
                    threads, vector = threads_of(n, *multiprocessors(device)), vector_of(n, dtype.itemsize)
                    ((seed, offset),) = states(device, (0,)).tolist()
                    x = torch.linspace(-3, 3, n, device=device).to(dtype)
                    y, mask = torch.native_dropout(x, p, True)
                    good = good and generator.get_offset() == offset + advance_of(n, threads)  # type: ignore[attr-defined]
                    steps = {0, n, *(k * threads * vector for k in range(4)), *(k * threads for k in range(9))}
                    places = torch.tensor(sorted({i for s in steps for i in range(s - 20, s + 20) if 0 <= i < n}), device="cpu")
                    x, y, mask = (t[places.to(device)].cpu() for t in (x, y, mask))
                    found += [y.double(), mask.double()]
                    wanted += [t.double() for t in dropped(x, word_of(seed, offset, places, threads, vector), p)]
        finally:
            generator.set_offset(before)  # type: ignore[attr-defined]
    return good and torch.equal(torch.cat(found), torch.cat(wanted))


def _sizes(device: torch.device, dtype: torch.dtype) -> list[int]:
    """One element, few, and more than all threads take in two turns; each with memory that divides into vectors wholly, in part and not at all."""
    processors, each = multiprocessors(device)
    many = 2 * processors * each * max(4, 16 // dtype.itemsize) + 256
    return [1, 1003, 1002, 1008, many, many + 4, many + 2, many + 1]
