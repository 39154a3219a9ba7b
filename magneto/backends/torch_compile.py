"""``torch.compile(model, backend="magneto")``: the entry point of the group `torch_dynamo_backends`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from magneto.backends import lookup_backend


def magneto(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """magneto's default compiler for a graph that torch captured."""
    return lookup_backend("inductor")(gm, example_inputs)
