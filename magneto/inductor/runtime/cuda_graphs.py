"""CUDA graphs: what a compiled graph launches is recorded once and replayed by one call.

`Graphed(run)` is called as `run` is. The first calls run plainly (libraries make their handles, kernels are loaded) and show which inputs lie where they lay in the call before (parameters,
what another recorded graph gives); then one records. Those inputs are read where they are, and that is checked in each call; the others are copied to memory of the recording's own. Anything that
does not fit a recording runs plainly: another stream, moved parameters, a capture by the program itself.

What a recording writes is overwritten by its next replay. Results are therefore copied out; tensors kept for backward and gradients, which mostly die before that, are handed
out as they are (lent), and a call that finds one of them alive runs plainly (after a few such calls those are copied out instead). Every recording has a memory pool of its own, so that
no replay touches what another one has given away; it goes with the model.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from sys import getrefcount
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from magneto import _C
from magneto.base.dataclass import dataclass, field
from magneto.base.events import counter, emit
from magneto.inductor.runtime import record

Compiled = Callable[..., Sequence[Any]]
Inputs = tuple[Any, ...] | list[Any]  # a list gives up what it holds

RECORDINGS = 256  # that live at the same time
ATTEMPTS = 6  # recordings of one graph
LAUNCH = 5e-6  # seconds that a replay spares, per launch
BANDWIDTH = 1.5e12  # bytes copied per second
BUFFERS = 1 << 28  # bytes of inputs that are copied, at most: they are held twice
WAITS = 3  # plain calls in which inputs begin to move, before it is recorded all the same
FORWARD_WAITS = 8  # plain calls of a backward to which nothing is lent, before it is recorded all the same
LARGE = 1 << 24  # bytes of what a backward is given that is better read where it lies, if it stays
DEBT = 6  # a call that does not fit adds two, one that does takes one off; then it is recorded anew
TRIAL = 256  # replays after which what was copied out, since it had been found alive, is lent once more

_alive: weakref.WeakSet[Recording] = weakref.WeakSet()
_recording = threading.Lock()
_data: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # as `detach`, without an operation
_lent: Counter[int] = Counter()  # where tensors begin that live recordings lend
Counting = Callable[[bytes, list[torch.Tensor]], bytes]
_users: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_uses: Callable[[torch.Tensor], int] | None = getattr(torch.Tensor, "_use_count", None)


@dataclass(frozen=True, slots=True)
class Parts:
    """A run in two: `head` is recorded; `tail` makes large results behind each replay, of the inputs and of what the head returns behind its outputs. `places`: per output its place among those of the
    tail (-1: it is the head's)."""

    head: Compiled
    tail: Compiled
    places: tuple[int, ...]


@dataclass(eq=False)
class Recording:
    """`lie`: inputs that are read where they lie, as int32, their addresses, as int64, and what `_C.moved` notes; `copied`: inputs that are copied to `buffers`; `outputs`: one function of the inputs per output; `tail`: the outputs behind those, all lent; `shows`: those too, if they are handed out
    as they are and not as other tensors on their memory; `lent`: storages whose users are counted, as int64, and `lenders`, whose output each is. `counts`: what `users` says when nobody else has what is lent.
    `taken`: what the tail of the run reads. `read`: the storages of what lies; once one is gone its address says nothing. `trial`: replays that are left until more is lent (0: no end)."""

    graph: Any
    stream: int
    lie: tuple[bytes, bytes, bytearray] = (b"", b"", bytearray())
    copied: list[int] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Callable[[Sequence[Any]], Any]] = field(default_factory=list)
    tail: list[torch.Tensor] = field(default_factory=list)
    shows: list[torch.Tensor] = field(default_factory=list)
    lent: bytes = b""
    lenders: list[int] = field(default_factory=list)
    counted: Counting = field(default_factory=lambda: _counting())
    counts: bytes = b""
    held: list[tuple[torch.Tensor, Any, int]] = field(default_factory=list)  # output, its storage if it is lent, its number
    taken: tuple[torch.Tensor, ...] = ()
    read: list[StorageWeakRef] = field(default_factory=list)
    trial: int = 0

    def users(self) -> bytes:
        """Of the storages lent, and of the tensors that are handed out as they are."""
        return self.counted(self.lent, self.shows)

    def alive(self) -> list[int]:
        """The outputs lent that somebody has."""
        found = self.users()
        if found == self.counts:
            return []
        of_tail = self.lenders[len(self.lenders) - len(self.tail) :]
        return [k for k, a, b in zip(self.lenders + 2 * of_tail, array("I", found), array("I", self.counts), strict=False) if a > b]


class Graphed:
    """`launches`: how many a run makes; `cloned`: how many outputs at the front are copied out (None: all); `written`: inputs that `run` writes, which must not move; `parts`: the same run in two; `first`: blocks that the memory of a recording begins with, their bytes."""

    def __init__(
        self, run: Compiled, device: torch.device, name: str, launches: int, cloned: int | None = None,
        written: frozenset[int] = frozenset(), parts: Parts | None = None, first: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.room = min(BUFFERS, int(launches * LAUNCH * BANDWIDTH))  # bytes worth copying for a replay
        self.run, self.name, self.written, self.kind, self.parts, self.first = run, name, written, device.type, parts, first
        self.take: Callable[[list[Any]], Sequence[Any]] = getattr(run, "consume", None) or (lambda values: run(*values))
        self.cloned = cloned if _users is not None else None
        self.of_backward = cloned == 0
        self.index = device.index or 0
        self.lock = threading.Lock()  # between a replay and the copies of its results
        self.recording: Recording | None = None
        self.seen: tuple[int, ...] | None = None  # addresses in the last plain call
        self.moved: set[int] | None = None  # inputs that lay elsewhere in the one before
        self.attempts = self.debt = self.waited = self.lent_to = 0
        self.why_off = ""
        self.strayed: set[int] = set()  # inputs that lay elsewhere than this recording reads them
        self.blamed: Counter[int] = Counter()  # in how many recordings they did
        self.kept: set[int] = set()  # outputs that are copied out, since they were found alive
        self.found: set[int] = set()  # lent outputs found alive, of this recording

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return self._called(inputs)

    def consume(self, values: list[Any]) -> Sequence[Any]:
        """A call that takes its inputs out of the list."""
        return self._called(values)

    def _called(self, inputs: Inputs) -> Sequence[Any]:
        r = self.recording
        if r is not None and self.lock.acquire(False):
            try:
                if _C.moved(inputs, *r.lie) < 0 and record.stream(self.index) == r.stream and not record.capturing():
                    if not r.lent or r.counted(r.lent, r.shows) == r.counts or not r.alive():
                        if self.debt:
                            self.debt -= 1
                        if r.trial:
                            self._tried(r)
                        return self._replay(r, inputs)
            finally:
                self.lock.release()
        return self._plainly(inputs)

    # ---- replaying -------------------------------------------------------------------------------------------------------

    def _replay(self, r: Recording, inputs: Inputs) -> Sequence[Any]:
        if r.copied:
            _copy(r.buffers, [_data(inputs[i]) for i in r.copied])
        r.graph.replay()
        values = inputs if self.parts is None else (*inputs, *self.parts.tail(*inputs, *r.taken))
        found = (*[output(values) for output in r.outputs], *(r.shows or map(_data, r.tail)))
        if type(inputs) is list:
            inputs.clear()
        return found

    def _tried(self, r: Recording) -> None:
        """What was found alive may have been so for a while only."""
        r.trial -= 1
        if not r.trial:
            self.kept.clear()
            self._forget()

    # ---- other calls -----------------------------------------------------------------------------------------------------

    def _launched(self, inputs: Inputs) -> Sequence[Any]:
        return self.take(inputs) if type(inputs) is list else self.run(*inputs)

    def _plainly(self, inputs: Inputs) -> Sequence[Any]:
        if self.why_off or record.capturing():
            return self._launched(inputs)
        here = tuple([x.data_ptr() if isinstance(x, torch.Tensor) and x.device.type == self.kind else 0 for x in inputs])
        steady = self._steady(inputs, here)
        if self.recording is not None:
            self._note(self.recording, here)
            if self.debt < DEBT:
                return self._launched(inputs)
            self._forget()
        if not steady:
            return self._launched(inputs)
        self.debt = 0
        self.attempts += 1
        if self.attempts > ATTEMPTS or len(_alive) >= RECORDINGS:
            self._off("its inputs keep moving" if self.attempts > ATTEMPTS else f"{RECORDINGS} recordings live")
            return self._launched(inputs)
        try:
            with _recording, torch.no_grad(), torch.inference_mode(False):
                made = self._record(inputs, here)
        except Exception as error:  # a library call that cannot be recorded, no memory
            self._off(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}")
            made = None
        if made is None:
            return self._launched(inputs)
        counter("cuda_graphs")
        if made.tail and not self.of_backward and _uses is not None:
            made.shows = made.tail if _nobody_has(made.tail) else []
        made.counts = made.users()
        with self.lock:
            self.recording = made
            return self._replay(made, inputs)

    def _steady(self, inputs: Inputs, here: tuple[int, ...]) -> bool:
        """Whether it is known by now which inputs stay: none has begun to move in this call. (What another graph gives lies elsewhere once that is recorded; large gradients of results often do once more.)"""
        before, self.seen = self.seen, here
        if before is None:
            return False
        if self.of_backward:  # its forward may be recorded later than this would be
            self.waited += 1
            self.moved = {i for i, (a, b) in enumerate(zip(before, here, strict=True)) if a != b}
            self.lent_to += any(address in _lent for address in here)
            if not self.lent_to:
                return self.waited > FORWARD_WAITS
            begun = (i for i in self.moved if here[i] and here[i] not in _lent and self.blamed[i] < 2)
            return self.lent_to > WAITS or not any(_large(inputs[i]) for i in begun)
        was, self.moved = self.moved, {i for i, (a, b) in enumerate(zip(before, here, strict=True)) if a != b}
        if self.moved <= (was or set()) or self.waited >= WAITS:
            return True
        self.waited += 1
        return False

    def _note(self, r: Recording, here: tuple[int, ...]) -> None:
        """Why a call did not fit."""
        places, addresses = array("i", r.lie[0]), array("q", r.lie[1])
        moved = [
            i for i, address in zip(places, addresses, strict=True) if here[i] != address and not (self.of_backward and address in _lent)
        ]
        alive = r.alive()
        self.strayed.update(moved)
        self.found.update(alive)
        if moved or alive or record.stream(self.index) != r.stream:  # otherwise another thread was replaying, or the forward ran plainly
            self.debt += 2

    def _forget(self) -> None:
        """The recording, and what it has shown."""
        self.kept |= self.found
        self.blamed.update(self.strayed)
        self.found.clear()
        self.strayed.clear()
        self.recording, self.waited, self.lent_to = None, 0, 0

    def _off(self, reason: str) -> None:
        self.why_off = reason
        emit("artifact", artifact="cuda graph", graph=self.name, refused=reason)
        counter("cuda_graphs_refused")

    # ---- recording -------------------------------------------------------------------------------------------------------

    def _record(self, inputs: Inputs, here: tuple[int, ...]) -> Recording | None:
        given = list(inputs)
        made = Recording(None, record.stream(self.index))
        stays = self._staying(inputs, here)
        lie = [i for i, address in enumerate(here) if address and i in stays]
        copied = [i for i, address in enumerate(here) if address and i not in stays]
        if any(i in self.written or not _dense(inputs[i]) for i in copied):
            self._off("an input that is written, or has gaps, moves")
            return None
        if (moved := sum(inputs[i].nbytes for i in copied)) > self.room:
            self._off(f"{moved} bytes of inputs would be copied in each call")
            return None
        torch.cuda.empty_cache()  # what calls before have left; before there are buffers, which would hold what they lie in
        for i in lie:
            given[i] = inputs[i].detach()
        for i in copied:
            given[i] = torch.empty_strided(inputs[i].shape, inputs[i].stride(), dtype=inputs[i].dtype, device=inputs[i].device)
        made.copied, made.buffers = copied, [given[i] for i in copied]
        made.lie = array("i", lie).tobytes(), array("q", [here[i] for i in lie]).tobytes(), bytearray(16 * len(lie))
        made.read = [StorageWeakRef(inputs[i].untyped_storage()) for i in lie]  # type: ignore[no-untyped-call]
        run = self.run if self.parts is None else self.parts.head
        made.graph, outs = record.recorded(run, given, self.index, self.first)
        record.release(run)
        places = {id(x): i for i, x in enumerate(given) if isinstance(x, torch.Tensor)}
        memory = {x.untyped_storage().data_ptr(): i for i, x in enumerate(given) if here[i]}
        found = iter(outs)
        for k, place in enumerate(self.parts.places if self.parts is not None else (-1,) * len(outs)):
            of_tail = place >= 0
            made.outputs.append(itemgetter(len(given) + place) if of_tail else self._output(made, k, next(found), places, memory, given))
        made.taken = tuple(x.detach() for x in found)
        del outs, given, found
        moved += sum(out.nbytes for out, storage, _ in made.held if storage is None)
        if moved > self.room:
            self._off(f"{moved} bytes would be copied in each call")
            return None
        made.lent = array("q", [storage._cdata for _, storage, _ in made.held if storage is not None]).tobytes()
        lent = {k: out for out, storage, k in made.held if storage is not None}
        made.lenders = list(lent)
        first = max((k + 1 for k in range(len(made.outputs)) if k not in lent), default=0)
        made.tail, made.outputs = [lent[k] for k in range(first, len(made.outputs))], made.outputs[:first]
        made.trial = TRIAL if self.kept and 2 * self.attempts <= ATTEMPTS else 0
        _alive.add(made)
        addresses = [out.data_ptr() for out in lent.values()]
        _lent.update(addresses)
        weakref.finalize(made, _withdraw, addresses).atexit = False
        return made

    def _staying(self, inputs: Inputs, here: tuple[int, ...]) -> set[int]:
        """The inputs that are read where they lie. What a forward keeps that is not recorded may lie where the allocator has put it twice, and elsewhere as soon as a recorded backward
        takes no memory any more; but a parameter stays, and so does what a recording lends or reads; and where it lends what the forward keeps, a large gradient of a result that lay there in
        the call before is taken to stay too."""
        stays = {i for i, address in enumerate(here) if address and i not in (self.moved or ()) and self.blamed[i] < 2}
        if not self.of_backward:
            return stays
        living = ((address, storage) for r in _alive for address, storage in zip(array("q", r.lie[1]), r.read, strict=True))
        read = {address for address, storage in living if not storage.expired()}  # type: ignore[no-untyped-call]
        known = {i for i in stays if isinstance(inputs[i], torch.nn.Parameter) or here[i] in read or (self.lent_to and _large(inputs[i]))}
        return known | {i for i, address in enumerate(here) if address in _lent and self.blamed[i] < 2}

    def _output(
        self, made: Recording, k: int, out: Any, places: dict[int, int], memory: dict[int, int], given: list[Any]
    ) -> Callable[[Sequence[Any]], Any]:
        """How a call gets output `k`."""
        if not isinstance(out, torch.Tensor):
            return lambda inputs: out
        if id(out) in places:
            i = places[id(out)]
            return lambda inputs: inputs[i]
        address = out.untyped_storage().data_ptr()
        if address in memory and out.numel():
            j = memory[address]
            shape, stride, offset = out.shape, out.stride(), out.storage_offset() - given[j].storage_offset()
            return lambda inputs: torch.as_strided(inputs[j].detach(), shape, stride, inputs[j].storage_offset() + offset)
        copied = self.cloned is None or k < self.cloned or k in self.kept
        made.held.append((out, None if copied else out.untyped_storage(), k))
        if not copied:
            return lambda inputs: _data(out)
        if _dense(out):
            return lambda inputs: out.clone()
        if 0 in out.stride():
            raise RuntimeError("a result repeats its memory")
        return lambda inputs: torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device).copy_(out)


def _withdraw(addresses: Sequence[int]) -> None:
    for address in addresses:
        _lent[address] -= 1
        if not _lent[address]:
            del _lent[address]


def _nobody_has(tail: list[torch.Tensor]) -> bool:
    """What a forward keeps is nobody's but autograd's: the tensors themselves may be saved, if each has the references that it would have if nobody else had it."""
    probe = torch.empty(1, device="cpu")
    held, listed = (probe, None, 0), [probe]
    del probe
    one = array("I", _by_torch(b"", listed))
    return bool(held) and list(array("I", _by_torch(b"", tail))) == [count for count in one for _ in tail]


def _by_torch(storages: bytes, tensors: list[torch.Tensor]) -> bytes:
    """How many users storages have, references to tensors, and users of these."""
    counts = map(_users, array("q", storages)), map(getrefcount, tensors), map(_uses, tensors)  # type: ignore[arg-type]
    return array("I", [count for some in counts for count in some]).tobytes()


def _counting() -> Counting:
    """Natively, if that tells what torch does of tensors with some users and many."""
    with torch.enable_grad(), torch.inference_mode(False):
        tensors = [torch.zeros(1, device="cpu", requires_grad=True) for _ in range(3)]
        held = [tensors[1].detach(), *(tensors[2] * tensors[2] for _ in range(4)), tensors[0].untyped_storage()]
    storages = array("q", [x.untyped_storage()._cdata for x in tensors]).tobytes()
    try:
        native, known = (array("I", counted(storages, tensors)) for counted in (_C.users, _by_torch))
    except TypeError:
        return _by_torch
    return _C.users if held and native[:3] == known[:3] and native[6:] == known[6:] and len({*known[6:]}) > 1 else _by_torch


def _large(x: torch.Tensor) -> bool:
    return x.nbytes >= LARGE


def _dense(x: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(x))


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    else:
        torch._foreach_copy_(targets, sources)
