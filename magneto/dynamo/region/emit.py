"""The emitter: writes the body of a region function, the Python source that one captured region becomes.

Order of the body: what is read from outside (arguments: frame slots and values the guards have fetched), the call of the compiled graph, side effects in program
order, then the end (`return value`, or a Resume). `value(tracker)` memoises, so one value of the program is one name and cycles are kept.
"""

from __future__ import annotations

import keyword
import math
import re
import weakref
from collections.abc import Mapping
from typing import Any

from torch import fx

from magneto.dynamo import trackers
from magneto.dynamo.guards.source import Held, Local, Source, Stack, may_die
from magneto.dynamo.trackers.base import Tracker

_LITERALS = (type(None), bool, int, str, bytes)
_LITERAL_BITS = 1024  # Python refuses the text of very large numbers
_SIMPLE = re.compile(r"^[A-Za-z_][A-Za-z_0-9]*$")


def is_literal(obj: Any) -> bool:
    """Whether `repr(obj)` is Python text for exactly this value."""
    if type(obj) is float:
        return math.isfinite(obj)
    if type(obj) is tuple:
        return all(is_literal(item) for item in obj)
    if type(obj) is int:
        return obj.bit_length() <= _LITERAL_BITS
    return type(obj) in _LITERALS or obj is ...


class RegionEmitter:
    """See `machine.protocol.Emitter`. `n_slots`: size of the frame's localsplus."""

    def __init__(self, names: set[str], namespace: dict[str, Any], made: Mapping[int, Tracker]) -> None:
        self._trackers = made
        self.lines: list[str] = []
        self.early_lines: list[str] = []
        self.namespace = namespace
        self.outputs: list[tuple[fx.Node, str]] = []
        self.shows_history = False
        self.borrows: list[Held] = []
        self.arguments: dict[Source, str] = {}
        self._taken = {*names, *namespace}
        self._memo: dict[int, str] = {}
        self._alive: list[Tracker] = []
        self._consts: dict[int, str] = {}
        self._building: set[int] = set()
        self._made: dict[int, str] = {}

    # -- names and constants

    def fresh(self, hint: str) -> str:
        base = re.sub(r"\W+", "_", hint).strip("_") or "v"
        if base[0].isdigit() or keyword.iskeyword(base):
            base = f"v_{base}"
        name, number = base, 1
        while name in self._taken:
            name, number = f"{base}_{number}", number + 1
        self._taken.add(name)
        return name

    def const(self, obj: Any, hint: str = "c") -> str:
        if is_literal(obj):
            return repr(obj)
        return self.held(obj, hint)

    def held(self, obj: Any, hint: str = "c") -> str:
        """Name of this very object."""
        tracker = self._trackers.get(id(obj))
        if tracker is not None and not isinstance(tracker.source, Held):
            return self.value(tracker)
        name = self._consts.get(id(obj))
        if name is None:
            name = self._consts[id(obj)] = self.fresh(hint)
            self.namespace[name] = obj
        return name

    def borrowed(self, obj: Any, hint: str = "c") -> str:
        """`const` of what the program has made, and may let go of: a class or function of a call is not kept alive. The guards fail when it is dead."""
        if not may_die(obj) or id(obj) in self._trackers or id(obj) in self._consts:
            return self.const(obj, hint)
        kept = self.fresh(hint)
        self.namespace[kept] = weakref.ref(obj)
        self.borrows.append(Held(hint, obj))
        name = self._consts[id(obj)] = self.early(f"{kept}()", hint)
        return name

    # -- sources

    def source(self, source: Source) -> str:
        if isinstance(source, Held):
            return self.borrowed(source.obj, _hint(source))
        name = self.arguments.get(source)
        if name is None:
            name = self.arguments[source] = self.fresh(_hint(source))
        return name

    # -- values

    def value(self, tracker: Tracker) -> str:
        found = self._memo.get(id(tracker))
        if found is not None:
            return found
        if isinstance(tracker, trackers.MadeInput) and (tracker.node is None or tracker.node.op == "placeholder"):
            return self.made(tracker)
        if isinstance(tracker, trackers.TensorTracker) and tracker.source is None:
            assert tracker.node is not None
            return self._remember(tracker, tracker.emit_made(self, self.output(tracker.node)))
        if id(tracker) in self._building:
            raise trackers.CannotEmit(tracker)
        self._building.add(id(tracker))
        try:
            text = tracker.emit(self)
        finally:
            self._building.discard(id(tracker))
        found = self._memo.get(id(tracker))
        if found is not None:
            return found
        if not _SIMPLE.match(text) and not isinstance(tracker, trackers.ConstTracker):
            text = self._assign("v", text)
        return self._remember(tracker, text)

    def emitted(self, tracker: Tracker) -> bool:
        """Whether the region has built this value."""
        return id(tracker) in self._memo

    def made(self, tracker: trackers.MadeInput) -> str:
        """The tensor that the region makes for an input of the graph."""
        name = self._made.get(id(tracker))
        if name is None:
            name = self._made[id(tracker)] = self.early(tracker.graph_input(self), "made")
        return name

    def output(self, wanted: fx.Node) -> str:
        """Name of what the graph gives for a node."""
        for node, name in self.outputs:
            if node is wanted:
                return name
        name = self.fresh(wanted.name)
        self.outputs.append((wanted, name))
        return name

    def _remember(self, tracker: Tracker, text: str) -> str:
        self._memo[id(tracker)] = text
        self._alive.append(tracker)
        return text

    def _assign(self, hint: str, expr: str) -> str:
        name = self.fresh(hint)
        self.line(f"{name} = {expr}")
        return name

    def assign(self, hint: str, expr: str, tracker: Tracker | None = None) -> str:
        name = self._assign(hint, expr)
        if tracker is not None:
            self._remember(tracker, name)
        return name

    def early(self, expr: str, hint: str = "n") -> str:
        """Name of an expression over arguments that is computed before anything else, where raising does no harm."""
        name = self.fresh(hint)
        self.early_lines.append(f"{name} = {expr}")
        return name

    def line(self, text: str) -> None:
        self.lines.append(text)


LET_GO = "let go"
_ASSIGNED = re.compile(r"^\s*([A-Za-z_]\w*(?:, [A-Za-z_]\w*)*),? = ", re.M)


def let_go(parameters: str, lines: list[str]) -> list[str]:
    """The lines of a body, in which LET_GO becomes that its variables let go of what is not read behind it: frames that run on from there own their values."""
    if LET_GO not in lines:
        return lines
    done: list[str] = []
    gone: set[str] = set()
    for number, line in enumerate(lines):
        if line == LET_GO:
            later = set(re.findall(r"\w+", "\n".join(lines[number + 1 :])))
            names = [name for found in (parameters, *_ASSIGNED.findall("\n".join(done))) for name in found.split(", ") if name]
            names = [name for name in dict.fromkeys(names) if name not in later and name not in gone]
            gone.update(names)
            line = " = ".join([*names, "None"])
        if line != "None":
            done.append(line)
    return done


def _hint(source: Source) -> str:
    if isinstance(source, Local):
        return source.name.lstrip(".") or "arg"
    if isinstance(source, Stack):
        return f"stack_{source.index}"
    if isinstance(source, Held):
        return source.name
    text = re.sub(r"L\['(\w+)'\]", r"\1", source.text())
    return re.sub(r"__dict__|_parameters|_buffers|_modules|\W+", "_", text)[-40:]
