"""Rows of identity: `is`, and where capture itself asks whether two values are one object."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.constant import ConstTracker, same_constant
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.function import BuiltinTracker, FunctionTracker
from magneto.dynamo.trackers.klass import ClassTracker
from magneto.dynamo.trackers.module import ModuleTracker
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.graph import UnknownMeta

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


def same(m: Machine, a: Tracker, b: Tracker) -> bool:
    """`a is b`, guarded where it depends on what the program was given."""
    if isinstance(a, ModuleTracker) or isinstance(b, ModuleTracker):
        m.particulars += not (isinstance(a, ConstTracker) or isinstance(b, ConstTracker))
    if a is b:
        return True
    if isinstance(a, ConstTracker) or isinstance(b, ConstTracker):
        if isinstance(a, ConstTracker) and isinstance(b, ConstTracker):
            return _same_constants(m, a, b)
        for v in (a, b):
            v.python_type()
        return False
    if (
        isinstance(a, TensorTracker)
        and isinstance(b, TensorTracker)
        and a.memory is b.memory is not None
        and isinstance(a.meta, UnknownMeta)
    ):
        m.graph_break("B114", reason="whether an operation returned its argument")  # contiguous(), dropout of what may be empty
    if isinstance(a, TupleTracker) and isinstance(b, TupleTracker) and a.cls is b.cls is tuple and not a.length() and not b.length():
        return True
    if isinstance(a, (FunctionTracker, BuiltinTracker, ClassTracker)) and a.obj is not MISSING:
        return a.obj is b.obj
    if a.obj is not MISSING and a.obj is b.obj:
        return True
    if a.source is not None and b.source is not None and (m.changing or not isinstance(a, ModuleTracker)):
        if not (isinstance(a.source, Held) and isinstance(b.source, Held)):
            m.guard(Kind.DISTINCT, a.source, (b.source,))
    return False


def _same_constants(m: Machine, a: ConstTracker, b: ConstTracker) -> bool:
    """Identity of equal numbers and texts is that of the objects given; of those computed inside the region, that of what
    capture computed as CPython does (of ints, equality: sizes are made anew each time)."""
    if type(a.value) is not type(b.value):
        return a.python_type() is b.python_type()  # a number that changes is not None whatever it is
    x, y = a.read(), b.read()
    if type(x) is not type(y) or type(x) not in (int, float, complex, str, bytes, range) or not same_constant(x, y):
        return x is y
    if type(x) is int and -5 <= x <= 256 or (a.source is None and b.source is None):
        return x is y or type(x) is int
    first, second = (a, b) if a.source is not None else (b, a)
    assert first.source is not None
    if second.source is not None:
        m.guard(*((Kind.SAME, first.source, second.source) if x is y else (Kind.DISTINCT, first.source, (second.source,))))
    elif x is y:
        m.guard(Kind.ID_IS, first.source, x)
    else:
        m.guard(Kind.DISTINCT, first.source, (Held("constant", second.value),))
    return x is y


@rule(operator.is_, Tracker, Tracker)
def is_(m: Machine, a: Tracker, b: Tracker) -> Tracker:
    return m.const(same(m, a, b))


@rule(operator.is_not, Tracker, Tracker)
def is_not(m: Machine, a: Tracker, b: Tracker) -> Tracker:
    return m.const(not same(m, a, b))
