"""Views of tensors at places that only a run knows, and the copies that stand for them: where the program could tell, capture starts again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from torch import fx

from magneto.base.dataclass import dataclass
from magneto.base.errors import GraphBreak
from magneto.dynamo import trackers
from magneto.dynamo.machine.signals import Restart
from magneto.dynamo.trackers.base import Tracker


@dataclass(eq=False, slots=True)
class Selected:
    """A copy that stands for a view of `base`; where capture breaks, or what it knows, when it has started again. `parts`: the key; `put`: writes the copy back to the place, after which it is
    eager's view still. Without these two it is eager's view, made ahead of the graph. `late`: the base may have been written since; `wrote`: through this view."""

    copy: trackers.TensorTracker
    base: trackers.TensorTracker
    count: int
    reason: GraphBreak | None
    parts: Sequence[Tracker] | None = None
    put: Callable[[], None] | None = None
    late: bool = False
    wrote: bool = False

    @property
    def copied(self) -> bool:
        return self.reason is not None or self.put is not None

    def restart(self) -> NoReturn:
        raise Restart(self.count, self.reason, False)


class Selections(list[Selected]):
    """Those of one capture."""

    def leave(self, outputs: Sequence[fx.Node]) -> None:
        for one in self:
            if one.copied and any(tensor.node in outputs for tensor in one.copy.memory or (one.copy,)):
                one.restart()

    def pruned(self) -> None:
        """Eager raises where a place is out of range, though nobody reads what is there."""
        for one in self:
            if one.reason is not None and one.copy.node is not None and _unread(one.copy.node):
                one.restart()

    def read(self, value: trackers.TensorTracker) -> None:
        for one in self:
            gone = one.base if one.late else one.copy if one.wrote else value
            if value is not gone and any(tensor is value for tensor in one.copy.memory or (one.copy,)):
                one.restart()

    def write(self, value: trackers.TensorTracker, memory: Sequence[trackers.TensorTracker], gradient: bool) -> None:
        for one in list(self):
            mine = one.copy is value and not gradient
            if mine and one.put is not None and not one.late:
                one.put()
                one.late = False
            elif mine and not one.copied and not any(_used(tensor) for tensor in memory if tensor is not value):
                one.wrote = True
            elif any(tensor in (one.copy.memory or (one.copy,)) for tensor in memory) and (one.copied or _used(one.copy)):
                one.restart()
            else:
                unseen = one.copied and one.base.source is not None and any(tensor.source is not None for tensor in memory)
                one.late |= unseen or any(tensor in (one.base.memory or (one.base,)) for tensor in memory)


def _used(tensor: trackers.TensorTracker) -> bool:
    """Whether the graph has read or written it so far."""
    return tensor.node is not None and bool(tensor.node.users)


def _unread(node: fx.Node) -> bool:
    """Whether the graph does nothing with a copy but to lay it out as the view is."""
    return node._erased or all(user.target == "copy_" and user.args[0] is node and not user.users for user in node.users)
