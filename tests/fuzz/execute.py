"""Runs a case twice, plain and optimised, step by step, and says where the two differ."""

from __future__ import annotations

import contextlib
import io
import linecache
import random
import signal
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

import magneto
from magneto.base import events
from magneto.graph.modes import modes
from tests.fuzz.grammar import Case
from tests.fuzz.prelude import PRELUDE
from tests.fuzz.snapshot import Walker, difference, functions_of, snapshot

FILE = "<string fuzz>"
PLAIN_SECONDS = 1.0
TOLERANCE = {"eager": 0.0, "aot_eager": 1e-4, "inductor": 2e-3}
_C = torch._C


@dataclass
class Counts:
    """What the run consisted of, so that a fuzzer that no longer tests anything is noticed."""

    cases: int = 0
    calls: int = 0
    raised: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    breaks: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        self.cases += other.cases
        self.calls += other.calls
        for name in ("raised", "events", "breaks", "errors"):
            getattr(self, name).update(getattr(other, name))


@dataclass
class Modes:
    """torch's global state, which each copy of the program has for itself."""

    values: tuple[Any, ...]

    @staticmethod
    def read() -> Modes:
        return Modes(
            (
                torch.get_default_dtype(),
                torch.are_deterministic_algorithms_enabled(),
                torch.get_num_threads(),
                torch.is_inference_mode_enabled(),
                modes(),
                RemovableHandle.next_id,
            )
        )

    def write(self) -> None:
        dtype, deterministic, threads, _, others, hooks = self.values
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=deterministic)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        others.restore()
        RemovableHandle.next_id = hooks


class Copy:
    """One copy of the program's environment."""

    def __init__(self, case: Case, optimised: bool, modes: Modes) -> None:
        self.modes = modes
        self.tolerance = TOLERANCE[case.backend]
        modes.write()
        torch.manual_seed(case.seed)
        random.seed(case.seed)
        self.namespace: dict[str, Any] = {"__name__": "fuzzed", "backward": backward}
        exec(compile(PRELUDE, "<string prelude>", "exec", dont_inherit=True), self.namespace)
        self.fixed = {name for name, value in self.namespace.items() if isinstance(value, (types.ModuleType, str))}
        self.known = functions_of(self.namespace)
        self.first = {name: id(self.namespace[name]) for name in self.fixed}
        exec(compile(case.setup, "<string setup>", "exec", dont_inherit=True), self.namespace)
        exec(compile(case.program, FILE, "exec", dont_inherit=True), self.namespace)
        main = self.namespace["main"]
        self.namespace["entry"] = magneto.optimize(case.backend)(main) if optimised else main
        self.save()

    def save(self) -> None:
        self.modes = Modes.read()
        self.torch_rng, self.python_rng = torch.get_rng_state(), random.getstate()

    def step(self, text: str) -> Any:
        """Everything that can be observed of one step."""
        self.modes.write()
        torch.set_rng_state(self.torch_rng)
        random.setstate(self.python_rng)
        printed, error = io.StringIO(), None
        with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                exec(compile(text, "<string step>", "exec", dont_inherit=True), self.namespace)
            except Exception as raised:
                error = raised
        self.save()
        ours = [w for w in said if issubclass(w.category, magneto.base.errors.MagnetoWarning)]
        self.error = error
        self.warned = [str(w.message) for w in ours]
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch._C.DisableTorchFunctionSubclass():
            state = snapshot(
                self.namespace,
                {name for name in self.fixed if id(self.namespace.get(name)) == self.first[name]},
                self.tolerance,
                self.known,
            )
        rng = (self.torch_rng.tolist(), self.python_rng)
        return [
            ("error", describe(error)),
            ("printed", printed.getvalue()),
            ("warned", [str(w.message) for w in said if str(w.message).startswith("said: ")]),
            ("modes", self.modes.values),
            ("rng", hash(str(rng))),
            ("state", state),
        ]


class TooLong(BaseException):
    """A program that does not end (a list that grows while it is iterated over) is no case."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Processor time, so that a busy machine changes nothing."""

    fired: list[bool] = []

    def stop(*_: Any) -> None:
        fired.append(True)
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)  # again and again: the program may swallow it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    if fired:  # the program itself has swallowed it
        raise TooLong


def describe(error: BaseException | None, depth: int = 0) -> Any:
    """Type, arguments, the program's lines in the traceback, and the same of the context."""
    if error is None or depth > 3:
        return None
    lines = [
        (frame.name, frame.lineno, frame.line)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename in (FILE, "<string prelude>")
    ]
    args = [Walker().of(arg) if not isinstance(arg, str) else _without_addresses(arg) for arg in error.args]
    return [type(error).__name__, args, lines, describe(error.__cause__, depth + 1), describe(error.__context__, depth + 1)]


def _without_addresses(text: str) -> str:
    import re

    return re.sub(r"0x[0-9a-f]+", "0x", text)


def backward(out: Any) -> None:
    """Gradients of whatever the call gave."""
    tensors: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item)
        elif isinstance(value, dict):
            for item in value.values():
                collect(item)

    collect(out)
    if tensors:
        torch.autograd.backward([t.float().sum() for t in tensors])


def run_case(case: Case, counts: Counts | None = None) -> str | None:
    """None when both copies behave alike in every step, else what differs."""
    counts = counts if counts is not None else Counts()
    start = Modes.read()
    linecache.cache[FILE] = (len(case.program), None, case.program.splitlines(True), FILE)
    magneto.reset()
    try:
        with magneto.config.patch(suppress_errors=False), events.recording() as seen:
            return _run(case, start, counts)
    finally:
        counts.cases += 1
        for event in seen:
            counts.events[event.kind] += 1
            if event.kind == "break":
                counts.breaks[event.fields["id"]] += 1
        start.write()


def _run(case: Case, start: Modes, counts: Counts) -> str | None:
    try:
        plain = Copy(case, False, start)
    except Exception:  # made so by shrinking: no program at all
        return None
    ours = Copy(case, True, start)
    for i, step in enumerate(case.steps):
        try:
            with limited(PLAIN_SECONDS):
                expected = plain.step(step)
        except TooLong:
            return None
        got = ours.step(step)
        counts.calls += step.startswith("out =")
        if plain.error is not None:
            counts.raised[type(plain.error).__name__] += 1
        found = difference(expected, got)
        if found is None and any("[W010]" in text for text in ours.warned):
            found = f"internal error: {ours.warned}"
        if found is not None:
            detail = f"\n{plain.error!r}\n{ours.error!r}" if plain.error is not None or ours.error is not None else ""
            if ours.error is not None and type(ours.error) is not type(plain.error):
                detail += "\n" + "".join(traceback.format_exception(ours.error))[-3000:]
            return f"step {i} ({step}): {found}{detail}"
    return None
