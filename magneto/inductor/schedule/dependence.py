"""Which node of a program must run before which: data flow, writes in place, and the order of random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magneto.inductor.loops.ir import LibraryCall, Node, reads


def predecessors(nodes: Sequence[Node]) -> list[set[int]]:
    """Per node the positions of nodes that must come before it (direct ones)."""
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    last_random: int | None = None
    result: list[set[int]] = []
    for position, node in enumerate(nodes):
        before: set[int] = set()
        mutated = node.mutates if isinstance(node, LibraryCall) else ()
        for name in (*reads(node), *mutated):
            if name in writer:
                before.add(writer[name])
        for name in mutated:
            before.update(readers.get(name, ()))
        if isinstance(node, LibraryCall) and torch.Tag.nondeterministic_seeded in getattr(node.op, "tags", ()):
            if last_random is not None:
                before.add(last_random)
            last_random = position
        before.discard(position)
        for name in reads(node):
            readers.setdefault(name, []).append(position)
        for name in mutated:
            writer[name] = position
            readers[name] = []
        for buffer in node.buffers:
            writer[buffer.name] = position
        result.append(before)
    return result
