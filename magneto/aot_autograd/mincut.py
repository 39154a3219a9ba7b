"""Minimum cut on the forward values that backward reads (Dinic's algorithm on the part of the graph that may be computed again)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import fx

INFINITE = 1 << 60


def min_cut(read: Sequence[fx.Node], cost: Callable[[fx.Node], int | None], recomputable: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The cheapest set of nodes from which every node of `read` can be had, in graph order.

    A node is had when it is kept, or when it is `recomputable` and all its inputs are had. `cost` None: the node cannot be kept. Of several cheapest
    sets the latest one is taken, which leaves least to compute again.
    """
    region: dict[fx.Node, int] = {}
    stack = list(read)
    while stack:
        node = stack.pop()
        if node in region:
            continue
        region[node] = len(region)
        if recomputable(node):
            stack.extend(node.all_input_nodes)
    flow = Flow(2 * len(region) + 2)
    source, sink = 2 * len(region), 2 * len(region) + 1
    for node, i in region.items():
        price = cost(node)
        flow.edge(2 * i, 2 * i + 1, INFINITE if price is None else price)
        if recomputable(node):
            for producer in node.all_input_nodes:
                flow.edge(2 * region[producer] + 1, 2 * i, INFINITE)
            continue
        flow.edge(source, 2 * i, INFINITE)
    for node in read:
        flow.edge(2 * region[node] + 1, sink, INFINITE)
    flow.run(source, sink)
    behind = flow.reaching(sink)
    return sorted(node for node, i in region.items() if 2 * i not in behind and 2 * i + 1 in behind)


class Flow:
    """Edges in arrays: edge e goes to `to[e]`, has `left[e]` capacity left, and e ^ 1 is its reverse."""

    def __init__(self, n: int) -> None:
        self.out: list[list[int]] = [[] for _ in range(n)]
        self.to: list[int] = []
        self.left: list[int] = []

    def edge(self, a: int, b: int, capacity: int) -> None:
        self.out[a].append(len(self.to))
        self.to.append(b)
        self.left.append(capacity)
        self.out[b].append(len(self.to))
        self.to.append(a)
        self.left.append(0)

    def run(self, source: int, sink: int) -> int:
        """Saturate; returns the flow."""
        total = 0
        while (level := self._levels(source, sink)) is not None:
            next_edge = [0] * len(self.out)
            while pushed := self._augment(source, sink, level, next_edge):
                total += pushed
        return total

    def _levels(self, source: int, sink: int) -> list[int] | None:
        level = [-1] * len(self.out)
        level[source] = 0
        queue = deque([source])
        while queue:
            a = queue.popleft()
            for e in self.out[a]:
                if self.left[e] and level[self.to[e]] < 0:
                    level[self.to[e]] = level[a] + 1
                    queue.append(self.to[e])
        return level if level[sink] >= 0 else None

    def _augment(self, source: int, sink: int, level: list[int], next_edge: list[int]) -> int:
        """One augmenting path, without recursion."""
        path: list[int] = []
        a = source
        while a != sink:
            edges = self.out[a]
            while next_edge[a] < len(edges):
                e = edges[next_edge[a]]
                if self.left[e] and level[self.to[e]] == level[a] + 1:
                    break
                next_edge[a] += 1
            else:
                if not path:
                    return 0
                e = path.pop()
                a = self.to[e ^ 1]
                next_edge[a] += 1
                continue
            path.append(e)
            a = self.to[e]
        amount = min(self.left[e] for e in path)
        for e in path:
            self.left[e] -= amount
            self.left[e ^ 1] += amount
        return amount

    def reaching(self, sink: int) -> set[int]:
        """From where the sink can still be reached."""
        seen = {sink}
        stack = [sink]
        while stack:
            for e in self.out[stack.pop()]:
                if self.left[e ^ 1] and self.to[e] not in seen:
                    seen.add(self.to[e])
                    stack.append(self.to[e])
        return seen
