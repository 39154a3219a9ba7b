"""Program -> Schedule: groups, fusion, order, memory.

Fusion is greedy and linear: nodes come in program order, each tries the groups it shares memory with, best score first. A fusion that would
make two groups wait for each other is refused. The order of execution is the program's order of each group's first possible moment, with
groups that free memory preferred among those that are ready.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import accumulate
from math import prod

from magneto.base.dataclass import dataclass, field
from magneto.base.flags import config
from magneto.base.logs import LOOPS, log, logging
from magneto.base.varying import chosen
from magneto.inductor.loops.ir import Buffer, LibraryCall, Node, Ordered, Program, ViewOf, reads
from magneto.inductor.loops.scans import SCANS
from magneto.inductor.schedule.dependence import predecessors
from magneto.inductor.schedule.fuse import No, Yes, may_fuse
from magneto.inductor.schedule.group import Group, group_of, static_sizes
from magneto.inductor.schedule.kernel import FusedKernel, OrderedKernel, Step, member_loads

LARGE = 1 << 17  # bytes whose life matters in training
CANDIDATES = 16  # groups that one node tries to join


@dataclass(frozen=True, slots=True)
class Schedule:
    """`steps` in order; `buffers`: every buffer by name; `into`: buffers that are an input's memory,
    by whose kernels, from step `last` on, that input is written. The first `prepared` steps depend on the inputs `watched` only and run when those have
    changed; what later steps read of their results is `kept` between calls. From step `tail` on nothing is made but results, which takes over no memory from before."""

    program: Program
    steps: tuple[Step, ...]
    buffers: Mapping[str, Buffer]
    into: Mapping[str, str] = field(default_factory=dict)
    last: int = -1
    prepared: int = 0
    kept: frozenset[str] = frozenset()
    watched: tuple[str, ...] = ()
    tail: int = -1


class _Fusion:
    """The state of the search: which group (or library call) each node is in, and which nodes must run before it. Sets of nodes are bits of integers."""

    def __init__(self, program: Program, buffers: Mapping[str, Buffer], updates: frozenset[str], training: bool) -> None:
        self.nodes = program.nodes
        self.buffers = buffers
        self.before = predecessors(self.nodes)
        self.home: list[int] = []  # node -> unit
        self.units: dict[int, Group | Ordered | LibraryCall] = {}
        self.members: dict[int, list[int]] = {}
        self.bits: dict[int, int] = {}  # the members
        self.above: dict[int, int] = {}  # the nodes that a unit waits for, in all
        self.touching: dict[str, list[int]] = {}  # buffer -> units of loops that read or write it
        self.pinned = _pinned(program)
        self.updates = updates
        self.training = training
        self.readers: dict[str, set[int]] = {}
        for position, node in enumerate(self.nodes):
            for name in reads(node):
                self.readers.setdefault(name, set()).add(position)
        made = {b.name for node in self.nodes if isinstance(node, LibraryCall) and not node.may_alias for b in node.buffers}
        self.called = made - {view.buffer for view in program.outputs if isinstance(view, ViewOf)}
        self.calls = list(accumulate(isinstance(node, LibraryCall) for node in self.nodes))

    def run(self) -> None:
        for position, node in enumerate(self.nodes):
            self.home.append(position)
            self.members[position], self.bits[position], self.above[position] = [position], 1 << position, 0
            for unit in {self.home[p] for p in self.before[position]}:
                self.above[position] |= self.above[unit] | self.bits[unit]
            if isinstance(node, LibraryCall) or (isinstance(node, Ordered) and node.kind not in SCANS):
                self.units[position] = node
                continue
            group = group_of(node, position)
            self.units[position] = group
            if config.fusion and group.numel > 0:
                self._join(position)
            self._touch(self.home[position], node)

    def _touch(self, unit: int, node: Node) -> None:
        for name in (*reads(node), *(b.name for b in node.buffers)):
            units = self.touching.setdefault(name, [])
            if unit not in units:
                units.append(unit)

    def _join(self, position: int) -> None:
        """Fuse the new unit with as many earlier ones as allow it."""
        unit = position
        tried: set[int] = set()
        while True:
            group = self.units[unit]
            assert isinstance(group, Group)
            best: tuple[Yes, int] | None = None
            for other in self._candidates(group, unit, tried):
                verdict = self._verdict(other, unit)
                if isinstance(verdict, Yes):
                    if best is None or verdict.score > best[0].score:
                        best = verdict, other
                else:
                    tried.add(other)
                    if logging(LOOPS):
                        log(LOOPS, f"not fused {self._name(other)} + {self._name(unit)}: {verdict.reason}")
            if best is None:
                return
            unit = self._merge(best[1], unit, best[0])

    def _candidates(self, group: Group, unit: int, tried: set[int]) -> list[int]:
        found: dict[int, None] = {}
        for name in group.reads:
            for other in reversed(self.touching.get(name, ())):
                if other != unit and other not in tried and isinstance(self.units.get(other), Group):
                    found[other] = None
        return sorted(found, reverse=True)[:CANDIDATES]

    def _verdict(self, other: int, unit: int) -> Yes | No:
        a, b = self.units[other], self.units[unit]
        assert isinstance(a, Group) and isinstance(b, Group)
        if a.numel == 0:
            return No("no elements")
        if not (self.updates.isdisjoint(a.writes) and self.updates.isdisjoint(b.writes)) and (refused := self._update_apart(a, b)):
            return refused
        if self.training and self._lives_longer(a, b, other, unit):
            return No("its results would live long before they are read")
        if self._reaches(other, unit) or self._reaches(unit, other):
            return No("another step must run between the two")
        return may_fuse(a, b, self.buffers, config.max_fusion)

    def _update_apart(self, a: Group, b: Group) -> No | None:
        """Updates of inputs run at the end, those that are alike as rows of one table."""
        if a.cols or b.cols:
            return No("an update runs at the end, a reduction frees what it reads")
        flows = any(name in b.reads for name in a.writes) or any(name in a.reads for name in b.writes)
        if flows or any(name in b.reads and self.buffers[name].numel != 1 for name in a.reads):
            return None
        return No("updates that share single numbers only")

    def _lives_longer(self, a: Group, b: Group, other: int, unit: int) -> bool:
        """Would large results of the later unit be in memory from the earlier one's time on, library calls being between the two, without sparing as much?"""
        first, second = self.members[other][0], self.members[unit][0]
        early, late = (a, b) if first < second else (b, a)
        both = {other, unit}
        needed = (p for u in both for n in self.members[u] for p in self.before[n] if self.home[p] not in both)
        if self.calls[max(first, second)] <= max(self.calls[min(first, second)], *map(self.calls.__getitem__, needed), 0):
            return False  # the earlier one itself waits until then
        grown = sum(self._bytes(name) for name in late.writes)
        here = {*self.members[other], *self.members[unit]}
        spared = [name for name in early.writes if name in late.reads and name not in self.pinned and self.readers[name] <= here]
        spared += [name for name in late.reads if name in self.called and self.readers[name] <= here]  # dies with the earlier one
        return chosen(lambda: grown >= LARGE and grown > sum(map(self._bytes, spared)))

    def _bytes(self, name: str) -> int:
        return int(self.buffers[name].nbytes) if name in self.buffers else 0  # type: ignore[arg-type]

    def _reaches(self, start: int, goal: int) -> bool:
        """Is there a path start -> some other unit -> goal?"""
        bits = self.bits[start]
        if not self.above[goal] & bits:
            return False
        between = {self.home[p] for n in self.members[goal] for p in self.before[n]} - {start, goal}
        return any(self.above[unit] & bits for unit in between)

    def _merge(self, a: int, b: int, verdict: Yes) -> int:
        """Unit b goes into unit a."""
        verdict.fused.why.append(f"{self._name(a)} + {self._name(b)}: saves {verdict.score} bytes")
        self.units[a] = verdict.fused
        del self.units[b]
        for node in self.members[b]:
            self.home[node] = a
        self.members[a] = sorted(self.members[a] + self.members.pop(b))
        bits = self.bits[a] = self.bits[a] | self.bits.pop(b)
        above = self.above[a] = (self.above[a] | self.above.pop(b)) & ~bits
        for unit, nodes in self.above.items():
            if nodes & bits:
                self.above[unit] = nodes | above | bits
        for name in (*verdict.fused.reads, *verdict.fused.writes):
            units = self.touching.setdefault(name, [])
            if b in units:
                units.remove(b)
            if a not in units:
                units.append(a)
        if logging(LOOPS):
            log(LOOPS, f"fused {verdict.fused.why[-1]}")
        return a

    def _name(self, unit: int) -> str:
        node = self.units.get(unit)
        return "+".join(node.writes) if isinstance(node, Group) else f"unit{unit}"

    def order(self) -> list[int] | None:
        """Units in an order that respects dependencies; among the ready ones the earliest in the program. None: there is none."""
        waits = {u: {self.home[p] for n in ns for p in self.before[n]} - {u} for u, ns in self.members.items()}
        followers: dict[int, list[int]] = {}
        for unit, needed in waits.items():
            for other in needed:
                followers.setdefault(other, []).append(unit)
        left = {u: len(needed) for u, needed in waits.items()}
        place = 0 if self.training else -1  # of the first member: what others wait for is not left behind for what is needed later
        ready = [(self.members[u][place], u) for u, n in left.items() if n == 0]
        heapq.heapify(ready)
        result = []
        while ready:
            _, unit = heapq.heappop(ready)
            result.append(unit)
            for follower in followers.get(unit, ()):
                left[follower] -= 1
                if left[follower] == 0:
                    heapq.heappush(ready, (self.members[follower][place], follower))
        return result if len(result) == len(self.members) else None


def _pinned(program: Program) -> frozenset[str]:
    """Buffers that must be in memory: outputs, and what library calls read or write."""
    names = {view.buffer for view in program.outputs if isinstance(view, ViewOf)}
    for node in program.nodes:
        if isinstance(node, LibraryCall):
            names.update(view.buffer for view in node.views)
            names.update(node.mutates)
            names.update(b.name for b in node.buffers)
    return frozenset(names)


def schedule(program: Program, updates: frozenset[str] = frozenset(), training: bool = False) -> Schedule:
    """The steps of a program. `updates`: buffers that may become the new numbers of inputs; `training`: memory counts. CannotSchedule for what has no plan (symbolic sizes)."""
    buffers = program.buffer_table()
    for buffer in buffers.values():
        static_sizes(buffer.shape)
        static_sizes(buffer.strides)
    fusion = _Fusion(program, buffers, updates, training)
    fusion.run()
    order = fusion.order()
    assert order is not None, "fusion made a cycle"
    readers: dict[str, set[int]] = {}
    for unit in order:
        entry = fusion.units[unit]
        names = entry.reads if isinstance(entry, Group) else dict.fromkeys(reads(entry))
        for name in names:
            readers.setdefault(name, set()).add(unit)
    steps: list[Step] = []
    for unit in order:
        entry = fusion.units[unit]
        if isinstance(entry, LibraryCall):
            steps.append(entry)
        elif isinstance(entry, Ordered):
            steps.append(OrderedKernel(entry))
        elif prod(d.size for d in entry.rows):
            kernel = _kernel(entry, unit, readers, fusion.pinned)
            if kernel.stored:
                steps.append(kernel)
    return Schedule(program, tuple(steps), buffers)


def _kernel(group: Group, unit: int, readers: Mapping[str, set[int]], pinned: frozenset[str]) -> FusedKernel:
    """The frozen kernel of a group: which members leave it, and only what those need."""
    stored = {m.name for m in group.members if m.name in pinned or readers.get(m.name, set()) - {unit}}
    needed, live = set(stored), []
    for member in reversed(group.members):
        if member.name in needed:
            live.append(member)
            needed.update(load.buffer for load in member_loads(member.body))
    names = tuple(m.name for m in reversed(live) if m.name in stored)
    return FusedKernel(group.rows, group.cols, tuple(reversed(live)), names, group.origins, "; ".join(group.why))
