"""TensorTracker: a tensor of which capture knows the metadata. What an attribute or method means is in rules_tensor.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.source import Source
from magneto.dynamo.trackers.base import MISSING, Tracker

if TYPE_CHECKING:
    from torch import fx

    from magneto.dynamo.machine.protocol import Machine
    from magneto.graph.meta import TensorMeta


class TensorTracker(Tracker):
    """`meta` follows in-place changes; `node` is the FX node (None: an outside tensor not used as input yet); `cls` is Tensor or Parameter."""

    __slots__ = ("cls", "meta", "node", "obj")

    def __init__(
        self,
        meta: TensorMeta,
        cls: type = torch.Tensor,
        node: fx.Node | None = None,
        source: Source | None = None,
        obj: Any = MISSING,
    ) -> None:
        super().__init__(source)
        self.meta = meta
        self.cls = cls
        self.node = node
        self.obj = obj

    def python_type(self) -> type:
        return self.cls

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        from magneto.dynamo.trackers.tensor_attrs import tensor_attr

        return tensor_attr(m, self, name)

    def show(self) -> str:
        where = self.source.text() if self.source else (self.node.name if self.node is not None else "")
        dtype = str(self.meta.dtype).removeprefix("torch.")
        return f"{self.cls.__name__} {where} {dtype}{list(self.meta.shape)}"
