"""The event stream: what the compiler did, as data.

Lower layers emit; `stats()`, `explain`, the report and the tests read. Nothing here formats, prints or imports anything of ours, and an
event nobody listens to costs one append to a bounded queue. Fields hold plain data and text, never tensors. The kinds:

- `compile`: function, file, line, offset, seconds, graphs -- one region was made
- `graph`: name, operations, function, file, line -- one graph went to a backend
- `replay`: function, calls -- how many calls of modules in a region were captured by copying what an equal module's call had given
- `break`: id, reason, hint, stack, function -- why a region ends early; stack is ((file, line, function), ...), innermost last
- `recompile`: function, file, line, reason, variants -- no compiled variant fitted; reason is the first guard that failed, told apart as expression,
  expected, actual, user_line
- `kernel`: name, source, graph -- one distinct kernel of a graph
- `fallback`: what (or graph), reason -- something runs in eager instead
- `warning`: id, message, fields -- `warn_once`, also when not said again
- `artifact`, `pass`, `error`: for whoever needs them
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from magneto.base.dataclass import dataclass, field

KEPT = 20_000  # events remembered; older ones are dropped, counts per kind are not


@dataclass(slots=True)
class Event:
    """One thing that happened: its kind, its fields, when (`time.perf_counter`) and on which thread."""

    kind: str
    fields: dict[str, Any]
    time: float
    thread: int

    def __getattr__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(f"event {self.kind!r} has no field {name!r}; it has {sorted(self.fields)}") from None


@dataclass(slots=True)
class Timing:
    """Time spent in one stage: calls, wall seconds in total, and wall seconds outside nested stages."""

    calls: int = 0
    total: float = 0.0
    own: float = 0.0


@dataclass(slots=True)
class _Stream:
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=KEPT))
    kinds: dict[str, int] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)
    seconds: float = 0.0


BESIDE = "gcc"  # a stage that runs in threads of its own

_stream = _Stream()
# Reentrant, and no Python function is called while it is held: a frame hook may run our own compiler inside any Python frame.
_lock = threading.RLock()
_subscribers: tuple[Callable[[Event], None], ...] = ()
_running = threading.local()


def emit(kind: str, **fields: Any) -> None:
    """Record that something of `kind` happened. Subscribers run at once, in the emitting thread."""
    event = Event(kind, fields, time.perf_counter(), threading.get_ident())
    with _lock:
        _stream.events.append(event)
        _stream.kinds[kind] = _stream.kinds.get(kind, 0) + 1
    for subscriber in _subscribers:
        subscriber(event)


def events(kind: str | None = None) -> list[Event]:
    """The events remembered, oldest first; of one kind when given."""
    with _lock:
        return [event for event in _stream.events if kind is None or event.kind == kind]


def count(kind: str) -> int:
    """How many events of `kind` were emitted since the last reset (also those no longer remembered)."""
    return _stream.kinds.get(kind, 0)


def counter(name: str, n: float = 1) -> None:
    """Add `n` to the counter `name`."""
    with _lock:
        _stream.counters[name] = _stream.counters.get(name, 0) + n


def counters() -> dict[str, float]:
    """All counters, by name."""
    with _lock:
        return dict(sorted(_stream.counters.items()))


class timer:
    """``with timer("decompose"): ...`` adds to the time of a stage. Nested stages are subtracted from the outer stage's own time."""

    __slots__ = ("inner", "stage", "start")

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def __enter__(self) -> Self:
        stack = _running.__dict__.setdefault("stack", [])
        stack.append(self)
        self.inner = 0.0
        self.start = time.perf_counter()
        return self

    def __exit__(self, *exc_info: object) -> None:
        elapsed = time.perf_counter() - self.start
        stack: list[timer] = _running.stack
        stack.pop()
        recursive = self.stage in [outer.stage for outer in stack]
        if stack:
            stack[-1].inner += elapsed
        fresh = Timing()
        with _lock:
            timing = _stream.timings.setdefault(self.stage, fresh)
            timing.calls += 1
            timing.total += 0.0 if recursive else elapsed
            timing.own += elapsed - self.inner
            if not stack and self.stage != BESIDE:
                _stream.seconds += elapsed


def seconds() -> float:
    """That all stages have taken together since the last reset: what is nested counts once, what runs beside others not."""
    return _stream.seconds


def timings() -> dict[str, Timing]:
    """Time per stage since the last reset, in order of first completion."""
    with _lock:
        return {stage: Timing(t.calls, t.total, t.own) for stage, t in _stream.timings.items()}


def subscribe(fn: Callable[[Event], None]) -> Callable[[], None]:
    """Call `fn` with each event from now on; returns the function that ends it."""
    global _subscribers
    with _lock:
        _subscribers = (*_subscribers, fn)

    def unsubscribe() -> None:
        global _subscribers
        with _lock:
            _subscribers = tuple(other for other in _subscribers if other is not fn)

    return unsubscribe


@contextmanager
def recording(kind: str | None = None) -> Iterator[list[Event]]:
    """``with recording() as seen:`` collects what this thread emits inside the block."""
    seen: list[Event] = []
    me = threading.get_ident()

    def collect(event: Event) -> None:
        if event.thread == me and (kind is None or event.kind == kind):
            seen.append(event)

    unsubscribe = subscribe(collect)
    try:
        yield seen
    finally:
        unsubscribe()


def reset() -> None:
    """Forget events, counters and timings; subscribers stay."""
    with _lock:
        _stream.events.clear()
        _stream.kinds.clear()
        _stream.counters.clear()
        _stream.timings.clear()
        _stream.seconds = 0.0
