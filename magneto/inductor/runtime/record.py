"""Recording what is launched: the part of CUDA graphs that needs the device."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import fx

from magneto.base.events import counter
from magneto.base.logs import KERNELS, log
from magneto.inductor.runtime.segments import MIB, Changes, blocks, changes_of, segments

NOTES = 1 << 16  # of the allocator, at most
WORTH = 12 * MIB  # that a second recording spares, at least, and
SHARE = 16  # this part of its memory


def recorded(run: Callable[..., Sequence[Any]], given: Sequence[Any], index: int, first: Sequence[int] = ()) -> tuple[Any, Sequence[Any]]:
    """The graph of what `run(*given)` launches, to be replayed on the current stream, and what it returned. Its memory begins with blocks of so many bytes (`schedule/segments.py`); where others serve much
    better what has been taken (workspaces of libraries are in no plan), it is recorded once more, with those."""
    graph, outs, changes = _recorded(run, given, index, first)
    if better := blocks(changes, first, max(WORTH, segments(changes, first) // SHARE)):
        del graph, outs
        release(run)
        torch.cuda.empty_cache()
        graph, outs, _ = _recorded(run, given, index, better)
        counter("recorded_anew")
    return graph, outs


def _recorded(
    run: Callable[..., Sequence[Any]], given: Sequence[Any], index: int, first: Sequence[int]
) -> tuple[Any, Sequence[Any], Changes]:
    """The graph, what the run returned, and what it has taken from the allocator (nothing if that is not known). `first`: blocks that are taken before, and given back."""
    graph: Any = torch.cuda.CUDAGraph()
    side, collecting = _side(index), gc.isenabled()
    with torch.cuda.device(index):
        side.wait_stream(torch.cuda.current_stream(index))
        torch.cuda.synchronize(index)
        number, operands = stream(index), _handle(index)
        gc.disable()  # what it frees may be of other streams
        try:
            with torch.cuda.stream(side):
                graph.workspace = _lay_out_workspace(index, number, operands)  # lives as long as a recording that works in it
                with _noted(index, side.cuda_stream, first) as changes:
                    graph.capture_begin(capture_error_mode="thread_local")
                    try:
                        held = [torch.UntypedStorage(size, device=torch.device("cuda", index)) for size in first]  # type: ignore[no-untyped-call]
                        del held
                        outs = run(*given)
                    finally:
                        graph.capture_end()
        except BaseException:
            with torch.cuda.stream(side):
                _settle(operands[1])
            raise
        finally:
            _forget_workspaces()
            if collecting:
                gc.enable()
        torch.cuda.current_stream(index).wait_stream(side)
    return graph, outs, changes


def _settle(memory: torch.Tensor) -> None:
    """A recording that fails leaves torch's generators as they are while recording, and every later draw raises. One that ends puts them back."""
    graph: Any = torch.cuda.CUDAGraph()
    with suppress(RuntimeError):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            memory.zero_()
        finally:
            graph.capture_end()


@contextmanager
def _noted(index: int, number: int, first: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """What the stream `number` takes from the allocator and gives back meanwhile, behind the blocks `first`, by the allocator's own notes. Nothing where the program has these taken, this torch cannot,
    or our rules of the allocator are not what it goes by."""
    changes: list[tuple[int, int]] = []
    note: Any = getattr(torch.cuda.memory, "_record_memory_history", None)
    try:
        noting = not torch._C._cuda_isHistoryEnabled()  # type: ignore[attr-defined]
        if noting:
            note("all", context=None, stacks="python", max_entries=NOTES)
    except (AttributeError, RuntimeError, TypeError):
        noting = False
    try:
        yield changes
        if noting:
            with suppress(KeyError, TypeError, RuntimeError):  # another torch
                found, held = changes_of(torch.cuda.memory._snapshot()["device_traces"][index], number, len(first))
                if segments(found, first) == held:
                    changes += found
    finally:
        if noting:
            note(None)


def release(run: Any) -> None:
    """Takes from a plan what it holds between its calls: views of inputs would be users of what recordings lend."""
    getattr(run, "release_workspace", lambda: None)()


capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


def stream(index: int) -> int:
    return torch._C._cuda_getCurrentRawStream(index)  # type: ignore[attr-defined]


@cache
def _side(index: int) -> torch.cuda.Stream:
    """The stream of all recordings: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


# ---- cuBLAS's workspace --------------------------------------------------------------------------------------------------


_workspaces: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()
"""By device and stream of the replays: the recording in whose pool it lies."""


def _handle(index: int) -> list[torch.Tensor]:
    """Makes the handle of this thread, which may not be made while recording; what that worked on."""
    given = [torch.ones(16, 16, device=torch.device("cuda", index)) for _ in range(2)]
    torch.mm(given[0], given[0], out=given[1])
    torch.cuda.synchronize(index)
    return given


def _lay_out_workspace(index: int, number: int, given: list[torch.Tensor]) -> Any:
    """Makes cuBLAS's workspace for the stream of recordings (32 MiB on Hopper) lie in a pool of its own: one for all recordings that are replayed on the stream `number`, one
    after another, which goes with the last of them. Left to the library, each recording would have another in its pool; kept from one recording to the next, it would lie in the first one's and be gone with that. That somebody clears
    the workspaces (torch.compile does) frees the place in the pool and takes nothing from recordings."""
    _forget_workspaces()
    if _alone():
        torch.cuda.empty_cache()
    try:
        made, graph = _workspaces.get((index, number)), torch.cuda.CUDAGraph()
        given = given if made is None else made.given
        graph.capture_begin(pool=None if made is None else made.pool(), capture_error_mode="thread_local")
        try:
            torch.mm(given[0], given[0], out=given[1])
        finally:
            graph.capture_end()
        if made is None:
            made = _workspaces.setdefault((index, number), graph)
            made.given = given
        return made
    except RuntimeError as error:
        log(KERNELS, f"cuBLAS's workspace becomes a part of the recording: {error}")
        _forget_workspaces()
        return None


def _alone() -> bool:
    """No other thread of the program may be about to launch what works in a workspace: there is one, which is this, or waits for this (autograd's) to end."""
    return sum(not thread.name.startswith("magneto") for thread in threading.enumerate()) == 1


def _forget_workspaces() -> None:
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


# ---- what may be recorded ------------------------------------------------------------------------------------------------


def recordable(node: fx.Node) -> bool:
    """May a call be recorded? Not if it waits for the device, nor if it draws from a generator of the program's own."""
    op: Any = node.target
    if node.kwargs.get("generator") is not None:
        return False
    name = str(op)
    if _LOOKUP.match(name):  # waits for the number of places that a mask names
        indices: Any = node.args[1]
        return not any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in indices if isinstance(index, fx.Node))
    if name.startswith("aten.repeat_interleave."):  # waits for the size, unless that is told
        counts = node.args[0 if name.endswith(".Tensor") else 1]
        return not isinstance(counts, fx.Node) or node.kwargs.get("output_size") is not None
    tags = getattr(op, "tags", ())
    return not (torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags or _WAITS.search(name))


_LOOKUP = re.compile(r"aten\._?(unsafe_)?index(_put)?_?\.")
_WAITS = re.compile(
    r"linalg|cholesky|svd|eig|lu_|geqrf|ormqr|triangular_solve|lstsq|nonzero|masked_select|masked_scatter|unique|bincount|histc|ctc_loss|_cudnn_rnn|nms"
    r"|segment_reduce|backward_of_|magneto\.check_|\.isin\.|\.normal\.(Tensor|float)_Tensor"  # standard deviations are looked at
)
