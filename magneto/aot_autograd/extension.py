"""Operations of a program that write their arguments (`torch.library.custom_op(..., mutates_args=...)`): each gets an operation of ours that writes copies and returns them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("magneto", "FRAGMENT")  # type: ignore[no-untyped-call]
_made: dict[str, tuple[str, Any]] = {}  # by name: the schema, and whose arguments are copied


def written_apart(op: Any, writes: Sequence[int | str], fresh: int) -> Any:
    """The operation that gives the fresh results of `op` and then a new value for each argument that it writes; None where that cannot be said of it."""
    schema = op._schema
    types = [str(schema.arguments[place].type) if isinstance(place, int) else "" for place in writes]
    if (
        op.namespace == "aten"
        or set(types) != {"Tensor"}
        or fresh not in (0, len(schema.returns))
        or (not fresh and len(schema.returns) > 1)
    ):
        return None
    if any(argument.alias_info is not None and not argument.alias_info.is_write for argument in schema.arguments):
        return None
    arguments = re.sub(r"\(\w+!\)", "", str(schema).partition("(")[2].rpartition(" -> ")[0])
    results = ", ".join([*(str(r.type) for r in schema.returns[:fresh]), *types])
    name = re.sub(r"\W", "_", f"apart_{op}")
    text = f"({arguments} -> ({results})"
    if name not in _made:
        _define(name, text, tuple(place for place in writes if isinstance(place, int)), fresh)
    elif _made[name][0] != text:
        return None
    _made[name] = text, op
    return getattr(torch.ops.magneto, name).default


def _define(name: str, text: str, writes: tuple[int, ...], fresh: int) -> None:
    def run(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for place in writes:
            given[place] = torch.empty_like(args[place]) if args[place].is_meta else args[place].clone()
        found: Any = _made[name][1](*given, **kwargs) if fresh or not args[writes[0]].is_meta else None
        results = [*(found if fresh > 1 else (found,) * fresh), *(given[place] for place in writes)]
        return results[0] if len(results) == 1 else tuple(results)

    _LIBRARY.define(name + text)  # type: ignore[no-untyped-call]
    for key in ("CompositeExplicitAutograd", "Meta"):
        _LIBRARY.impl(name, run, key)  # type: ignore[no-untyped-call]
