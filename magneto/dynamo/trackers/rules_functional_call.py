"""torch.func.functional_call: a module run with other tensors in place of its parameters and buffers. The entries are exchanged while the call is captured, and put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import stateless

from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.container import SequenceTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.mapping import DictTracker
from magneto.dynamo.trackers.module import ModuleTracker
from magneto.dynamo.trackers.tensor import TensorTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_NAME = "torch.func.functional_call"


@rule(torch.func.functional_call, ModuleTracker, Tracker)
def functional_call(
    m: Machine, module: ModuleTracker, given: Tracker, args: Tracker | None = None, kwargs: Tracker | None = None, *,
    tie_weights: Tracker | None = None, strict: Tracker | None = None,
) -> Any:  # fmt: skip
    dictionaries = given.items(m) if isinstance(given, SequenceTracker) else [given]
    if module.obj is MISSING or (tie_weights is not None and not m.truth(tie_weights)) or (strict is not None and m.truth(strict)):
        return NotImplemented
    tensors: dict[str, TensorTracker] = {}
    for dictionary in dictionaries:
        if not isinstance(dictionary, DictTracker):
            return NotImplemented
        for key, value in dictionary.pairs(m):
            const = key.try_const()
            if const is None or const.value in tensors or not isinstance(value, TensorTracker):
                return NotImplemented  # torch's own code is followed: it raises, or does what it does
            tensors[const.value] = value
    places = _places(m, module, tensors)
    if places is None:
        return NotImplemented
    positional = [] if args is None or args.try_const() is not None and not isinstance(args, TupleTracker) else _arguments(m, args)
    named: dict[str, Tracker] = {}
    if isinstance(kwargs, DictTracker):
        named = {key.try_const().value: value for key, value in kwargs.pairs(m)}  # type: ignore[union-attr]
    return _run(m, module, places, positional, named)


rule((stateless.functional_call,), ModuleTracker, Tracker)(functional_call)


def _arguments(m: Machine, args: Tracker) -> Sequence[Tracker]:
    return args.items(m) if isinstance(args, TupleTracker) else [args]


def _places(m: Machine, module: ModuleTracker, tensors: Mapping[str, TensorTracker]) -> list[tuple[DictTracker, str, TensorTracker]] | None:
    """Where each tensor goes: (table of parameters or buffers, name, tensor). Names of one parameter shared by several modules are exchanged together."""
    real = {**dict(module.obj.named_parameters(remove_duplicate=False)), **dict(module.obj.named_buffers(remove_duplicate=False))}
    shared: dict[int, TensorTracker] = {id(real[name]): tensor for name, tensor in tensors.items() if name in real}
    if not set(tensors) <= set(real):
        return None
    places = []
    for name, held in real.items():
        tensor = tensors.get(name) or shared.get(id(held))
        if tensor is None:
            continue
        *path, last = name.split(".")
        owner: Tracker = module
        for part in path:
            owner = m.apply(getattr, owner, m.const(part))
        if not isinstance(owner, ModuleTracker):
            return None
        for table in ("_parameters", "_buffers"):
            entries = owner.instance_attr(m, table)
            if isinstance(entries, DictTracker) and entries.get_token(m, last) is not None:
                places.append((entries, last, tensor))
                break
        else:
            return None
    return places


def _run(
    m: Machine, module: ModuleTracker, places: Sequence[tuple[DictTracker, str, TensorTracker]], args: Sequence[Tracker],
    kwargs: Mapping[str, Tracker],
) -> Tracker:  # fmt: skip
    before = [(entries, name, entries.get_token(m, name)) for entries, name, _ in places]
    effects: list[Any] = m.effects  # type: ignore[attr-defined]
    known = len(effects)
    m.particulars += 1
    m.replays.suspended += 1  # type: ignore[attr-defined]
    try:
        for entries, name, tensor in places:
            entries.put_silently(m, m.const(name), tensor)
        result = m.call(module, args, kwargs)
    finally:
        for entries, name, old in before:
            assert old is not None
            entries.put_silently(m, m.const(name), old)
        m.replays.suspended -= 1  # type: ignore[attr-defined]
    if len(effects) != known:
        m.restart_before(_NAME, "the module's forward has side effects")
    return result
