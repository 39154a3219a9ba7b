"""nn.Module trees. The root is guarded by identity, each submodule by identity along its path; hook dictionaries by being empty (rows that hardly ever change).

When another module of the same class comes to the same place (the layers of a loop, a function called with each block), its source is *changing*
(`Machine.changing`): modules are then guarded by class and by what is read of them, and one region serves all that are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_module

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held, InstanceDict, Item, Source
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.function import BoundMethodTracker, FunctionTracker
from magneto.dynamo.trackers.klass import find_in_type, held
from magneto.dynamo.trackers.mapping import DictTracker
from magneto.dynamo.trackers.object import ObjectTracker
from magneto.dynamo.trackers.tensor import TensorTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")


class ModuleTracker(ObjectTracker):
    """An nn.Module: existing, or made inside the region (containers and modules without parameters)."""

    __slots__ = ("_forward",)

    def __init__(self, cls: type, source: Source | None = None, obj: Any = MISSING) -> None:
        super().__init__(cls, source, obj)
        self._forward: tuple[FunctionTracker, list[Tracker]] | None = None

    def pin(self, m: Machine) -> Any:
        """The module itself, guarded by identity."""
        if not isinstance(self.source, Held):
            m.guard(Kind.ID_IS, self.source, self.obj)
        return self.obj

    def registered(self, m: Machine, name: str) -> Tracker | None:
        """nn.Module.__getattr__: parameters, buffers, submodules. A name is in one of them only (torch's setters see to it)."""
        tables = [entries for table in TABLES if isinstance(entries := self.instance_attr(m, table), DictTracker)]
        for entries in tables:
            if entries.obj is MISSING or entries._whole or name in entries.obj:
                found = entries.get_token(m, name)
                if found is not None:
                    return found
        for entries in tables:
            entries.get_token(m, name)  # that it is in none of them is guarded
        return None

    def hooked_attr(self, m: Machine, hook: Any, name: str) -> Any:
        return self.registered(m, name) if hook is torch.nn.Module.__getattr__ else NotImplemented

    def hooked_set(self, m: Machine, hook: Any, name: str, value: Tracker | None) -> bool:
        if hook is not torch.nn.Module.__setattr__ or value is None or self.obj is MISSING:
            return False
        if isinstance(value, ModuleTracker) or (isinstance(value, TensorTracker) and value.cls is not torch.Tensor):
            return False  # registers a parameter or submodule: torch's own code does
        self.set_registered(m, name, value)
        return True

    # -- calls

    def resolve_call(self, m: Machine) -> tuple[FunctionTracker, list[Tracker]] | None:
        """The function that a call runs, and its first arguments: `forward` where no hook exists, otherwise torch's own `_call_impl`."""
        if self._forward is not None and not self._given_hooks(m):
            return self._forward
        call = find_in_type(m, self.cls, "__call__")
        if call is not torch.nn.Module.__call__:
            fn = held(m, call, f"{self.cls.__name__}.__call__")
            return (fn, [self]) if isinstance(fn, FunctionTracker) else None
        return self.resolve_forward(m)

    def resolve_forward(self, m: Machine) -> tuple[FunctionTracker, list[Tracker]] | None:
        """nn.Module.__call__."""
        compiled = self.instance_attr(m, "_compiled_call_impl")
        if compiled is not None and compiled.try_const() is None:
            m.graph_break("B101", callee=self.show(), reason="module.compile() was called on it")
        if self.instance_attr(m, "_call_impl") is not None:
            m.graph_break("B101", callee=self.show(), reason="the module has a _call_impl of its own")
        impl = find_in_type(m, self.cls, "_call_impl")
        own = impl is not torch.nn.Module._call_impl or self.cls.__getattribute__ is not object.__getattribute__  # type: ignore[comparison-overlap]
        if own or self._hooked(m):
            fn = held(m, impl, f"{self.cls.__name__}._call_impl")
            return (fn, [self]) if isinstance(fn, FunctionTracker) else None
        forward = m.apply(getattr, self, m.const("forward"))
        if isinstance(forward, BoundMethodTracker) and isinstance(forward.fn, FunctionTracker):
            self._forward = (forward.fn, [forward.owner])
            return self._forward
        if isinstance(forward, FunctionTracker):
            return forward, []
        return None

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        resolved = self.resolve_call(m)
        if resolved is not None:
            return m.inline(resolved[0], [*resolved[1], *args], kwargs)
        return m.call(m.apply(getattr, self, m.const("forward")), args, kwargs)

    def _given_hooks(self, m: Machine) -> bool:
        """Whether this region has put a hook on the module."""
        if self.obj is MISSING:
            return False
        return any(_given(m, self.obj.__dict__.get(name)) for name in HOOKS)

    def _hooked(self, m: Machine) -> bool:
        """Whether any hook concerns this module; that there is none is guarded."""
        guarded = m.__dict__.setdefault("_guarded_hooks", set())
        for name in GLOBAL_HOOKS:
            table = getattr(torch_module, name)
            if table or _given(m, table):
                return True
            if name not in guarded:
                guarded.add(name)
                m.guard(Kind.LENGTH, Held(name, table), 0)
        attrs = self.attrs(m)
        for name in HOOKS:
            if attrs is not None and attrs._whole:
                entry = attrs.get_token(m, name)
                if isinstance(entry, DictTracker) and entry.length():
                    return True
            elif self.obj.__dict__.get(name) or self._given_hooks(m):
                return True
            else:
                assert self.source is not None
                m.guard(Kind.LENGTH, Item(InstanceDict(self.source), name), 0)
        return False

    # -- writes

    def set_registered(self, m: Machine, name: str, value: Tracker) -> None:
        """nn.Module.__setattr__ for what a forward pass writes: plain values and buffers."""
        for table in TABLES:
            entries = self.instance_attr(m, table)
            if isinstance(entries, DictTracker) and entries.has(m, ConstTracker(name)):
                const = value.try_const()
                if table == "_buffers" and (isinstance(value, TensorTracker) or (const is not None and const.value is None)):
                    entries.put_silently(m, ConstTracker(name), value)
                    m.effect(f"{{0}}.{name} = {{1}}", self, value)
                    return
                hook = held(m, torch.nn.Module.__setattr__, "Module.__setattr__")
                m.call(hook, [self, ConstTracker(name), value], {})
                return
        m.apply(object.__setattr__, self, m.const(name), value)

    def show(self) -> str:
        return f"{self.cls.__name__} {self.source.text() if self.source else ''}".rstrip()


def _given(m: Machine, table: Any) -> bool:
    """Whether this region has put a hook into a table."""
    found = m.wrapped.get(id(table))
    return isinstance(found, DictTracker) and found._whole and bool(found.entries)
