"""CUDA graphs: what a compiled graph launches is recorded once and replayed by one call.

`Graphed(run)` is called as `run` is. The first call runs plainly (libraries make their handles, kernels are loaded), the next one records. Inputs that lie where they lay
in the call before (parameters, what another recorded graph gives) are read where they are, and that is checked in each call; the others are copied to memory of the
recording's own. Anything that does not fit a recording runs plainly: another stream, moved parameters, a capture by the program itself.

What a recording writes is overwritten by its next replay. Results are therefore copied out; tensors kept for backward and gradients, which mostly die before that, are handed
out as they are, and a call that finds one of them alive runs plainly (after a few such calls everything is copied out instead). Every recording has a memory pool of its own, so that
no replay touches what another one has given away; it goes with the model.
"""

from __future__ import annotations

import gc
import re
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from magneto import _C
from magneto.base.events import counter, emit

Compiled = Callable[..., Sequence[Any]]

RECORDINGS = 256  # that live at the same time
ATTEMPTS = 4  # recordings of one graph
LAUNCH = 5e-6  # seconds that a replay spares, per launch
BANDWIDTH = 1.5e12  # bytes copied per second
PATIENCE = 3  # calls in a row that do not fit, before it is recorded anew

_alive: weakref.WeakSet[Recording] = weakref.WeakSet()
_recording = threading.Lock()
_users: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


@dataclass(eq=False)
class Recording:
    """`lie`: inputs that are read where they lie, as int32, and their addresses, as int64; `copied`: (buffer, input); `outputs`: one function of the inputs per output; `lent`: storages whose users are counted, with the count when nobody
    else has them."""

    graph: Any
    stream: int
    lie: tuple[bytes, bytes] = (b"", b"")
    copied: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    outputs: list[Callable[[Sequence[Any]], Any]] = field(default_factory=list)
    lent: list[tuple[int, int]] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)


class Graphed:
    """`launches`: how many a run makes; `cloned`: how many outputs at the front are copied out (None: all); `written`: inputs that `run` writes, which must not move."""

    def __init__(
        self,
        run: Compiled,
        device: torch.device,
        name: str,
        launches: int,
        cloned: int | None = None,
        written: frozenset[int] = frozenset(),
    ) -> None:
        self.room = int(launches * LAUNCH * BANDWIDTH)  # bytes worth copying for a replay
        self.run, self.name, self.written = run, name, written
        self.cloned = cloned if _users is not None else None
        self.index = device.index or 0
        self.lock = threading.Lock()  # between a replay and the copies of its results
        self.recording: Recording | None = None
        self.seen: tuple[int, ...] | None = None  # addresses in the last plain call
        self.attempts = self.misses = 0
        self.why_off = ""
        self.moving: set[int] = set()  # inputs that have been seen to move

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        found = self.recording
        if found is not None and self.lock.acquire(False):
            try:
                if self._fits(found, inputs):
                    self.misses = 0
                    return self._replay(found, inputs)
            finally:
                self.lock.release()
        return self._plainly(inputs)

    # ---- replaying -------------------------------------------------------------------------------------------------------

    def _fits(self, r: Recording, inputs: tuple[Any, ...]) -> bool:
        if (away := _C.moved(inputs, *r.lie)) >= 0:
            self.moving.add(away)
            return False
        for storage, count in r.lent:
            if _users(storage) > count:  # type: ignore[misc]
                return False
        return _stream(self.index) == r.stream and not _capturing()

    def _replay(self, r: Recording, inputs: Sequence[Any]) -> Sequence[Any]:
        if r.copied:
            _copy([buffer for buffer, _ in r.copied], [inputs[i].detach() for _, i in r.copied])
        r.graph.replay()
        return tuple([output(inputs) for output in r.outputs])

    # ---- other calls -----------------------------------------------------------------------------------------------------

    def _plainly(self, inputs: Sequence[Any]) -> Sequence[Any]:
        if self.why_off or torch.cuda.is_current_stream_capturing():
            return self.run(*inputs)
        if self.recording is not None:
            self.misses += 1
            if self.misses < PATIENCE:
                return self.run(*inputs)
            if any(_users(storage) > count for storage, count in self.recording.lent):  # type: ignore[misc]
                self.cloned = None
            self.recording, self.seen = None, None
        here = tuple([x.data_ptr() if isinstance(x, torch.Tensor) and x.is_cuda else 0 for x in inputs])
        before, self.seen = self.seen, here
        if before is None:
            return self.run(*inputs)
        self.misses = 0
        self.attempts += 1
        if self.attempts > ATTEMPTS or len(_alive) >= RECORDINGS:
            self._off("its inputs keep moving" if self.attempts > ATTEMPTS else f"{RECORDINGS} recordings live")
            return self.run(*inputs)
        self.moving.update(i for i, (a, b) in enumerate(zip(before, here, strict=True)) if a != b)
        try:
            with _recording, torch.no_grad(), torch.inference_mode(False), torch.cuda.device(self.index):
                made = self._record(inputs, here)
        except Exception as error:  # a library call that cannot be recorded, no memory
            self._off(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}")
            return self.run(*inputs)
        if made is None:
            return self.run(*inputs)
        _alive.add(made)
        counter("cuda_graphs")
        with self.lock:
            self.recording = made
            return self._replay(made, inputs)

    def _off(self, reason: str) -> None:
        self.why_off = reason
        emit("artifact", artifact="cuda graph", graph=self.name, refused=reason)
        counter("cuda_graphs_refused")

    # ---- recording -------------------------------------------------------------------------------------------------------

    def _record(self, inputs: Sequence[Any], here: tuple[int, ...]) -> Recording | None:
        given = list(inputs)
        made = Recording(torch.cuda.CUDAGraph(), _stream(self.index))
        lie: list[int] = []
        for i, x in enumerate(inputs):
            if not here[i]:
                continue
            if i not in self.moving:
                lie.append(i)
                given[i] = x.detach()
            elif i in self.written or not _dense(x):
                self._off("an input that is written, or has gaps, moves")
                return None
            else:
                given[i] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                made.copied.append((given[i], i))
        made.lie = array("i", lie).tobytes(), array("q", [here[i] for i in lie]).tobytes()
        moved = sum(buffer.nbytes for buffer, _ in made.copied)
        if moved > self.room:
            self._off(f"{moved} bytes of inputs would be copied in each call")
            return None
        outs = self._captured(made.graph, given)
        places = {id(x): i for i, x in enumerate(given) if isinstance(x, torch.Tensor)}
        memory = {x.untyped_storage().data_ptr(): i for i, x in enumerate(given) if here[i]}
        for k, out in enumerate(outs):
            made.outputs.append(self._output(made, k, out, places, memory, given))
        del outs, given
        moved += sum(out.nbytes for out, storage in made.held if storage is None)
        if moved > self.room:
            self._off(f"{moved} bytes would be copied in each call")
            return None
        made.lent = [(storage._cdata, _users(storage._cdata)) for _, storage in made.held if storage is not None]  # type: ignore[misc]
        return made

    def _captured(self, graph: Any, given: list[Any]) -> Sequence[Any]:
        side, collecting = _side(self.index), gc.isenabled()
        side.wait_stream(torch.cuda.current_stream(self.index))
        torch.cuda.synchronize(self.index)
        _forget_workspaces()
        gc.disable()  # what it frees may be of other streams
        try:
            with torch.cuda.stream(side):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    outs = self.run(*given)
                finally:
                    graph.capture_end()
        finally:
            _forget_workspaces()
            if collecting:
                gc.enable()
        torch.cuda.current_stream(self.index).wait_stream(side)
        return outs

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
        copied = self.cloned is None or k < self.cloned
        made.held.append((out, None if copied else out.untyped_storage()))
        if not copied:
            return lambda inputs: out.detach()
        if _dense(out):
            return lambda inputs: out.clone()
        if 0 in out.stride():
            raise RuntimeError("a result repeats its memory")
        return lambda inputs: torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device).copy_(out)


@cache
def _side(index: int) -> torch.cuda.Stream:
    """The stream of all recordings: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


def _forget_workspaces() -> None:
    """cuBLAS's workspace for the stream of recordings becomes a part of each recording's own memory. Kept, it would lie in the first one's, for all that come later, and be gone when that
    one goes, or when somebody else clears the workspaces (torch.compile does)."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def recordable(op: Any) -> bool:
    """May a library call be recorded? Not if it waits for the device."""
    tags = getattr(op, "tags", ())
    return not (torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags or _WAITS.search(str(op)))


_WAITS = re.compile(
    r"linalg|cholesky|svd|eig|lu_|geqrf|ormqr|triangular_solve|lstsq|nonzero|masked_select|unique|bincount|histc|ctc_loss|_cudnn_rnn|repeat_interleave|nms"
)


_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


def _stream(index: int) -> int:
    return torch._C._cuda_getCurrentRawStream(index)  # type: ignore[attr-defined]


def _dense(x: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(x))


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    else:
        torch._foreach_copy_(targets, sources)
