"""Opcodes that move values: stack, locals, cells, globals, constants, building and unpacking of containers, operators, attributes."""

from __future__ import annotations

import builtins
import itertools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from magneto import _C
from magneto.base.errors import GraphBreak
from magneto.dynamo import trackers
from magneto.dynamo.bytecode.decode import VERSION, Instruction
from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held, Item, Local, Stack
from magneto.dynamo.machine.assume import branch_of
from magneto.dynamo.machine.frame import NULL, HeldTracker, SymFrame
from magneto.dynamo.machine.handlers_control import can_be_spread
from magneto.dynamo.machine.lifetime import let_go
from magneto.dynamo.machine.opcode_table import opcode, opcodes
from magneto.dynamo.machine.signals import Restart
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.object import payload_of

if TYPE_CHECKING:
    from magneto.dynamo.machine.machine import SymbolicMachine as M

# -- stack


@opcodes("--", "NOP", "RESUME", "PRECALL")
def nothing(m: M, f: SymFrame, i: Instruction) -> None:
    pass


@opcodes("value --", "POP_TOP", "END_FOR")
def pop_top(m: M, f: SymFrame, i: Instruction) -> None:
    value = f.pop()
    if isinstance(value, trackers.ExistingGenerator) and isinstance(value.source, Stack) and m.generator_run(value).pending():
        m.graph_break("B110", value=value.show())  # dropping it closes it: its `finally` runs here, not at the region's end
    if i.op == "END_FOR" and VERSION == (3, 12):
        f.pop()


@opcode("PUSH_NULL", "-- null")
def push_null(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(NULL)


@opcode("COPY", "bottom between* -- bottom between* bottom")
def copy(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(f.stack[-i.arg])


@opcode("SWAP", "bottom between* top -- top between* bottom")
def swap(m: M, f: SymFrame, i: Instruction) -> None:
    f.stack[-1], f.stack[-i.arg] = f.stack[-i.arg], f.stack[-1]


@opcodes("-- value", "LOAD_CONST")
def load_const(m: M, f: SymFrame, i: Instruction) -> None:
    value = m.const(i.argval)
    if isinstance(value, trackers.ConstTracker):
        value.kept = True
    elif type(i.argval) is tuple and i.argval:
        value.source, value.obj = Held("constant", i.argval), i.argval  # the same object each time
    f.push(value)


# -- locals and cells


def _guard_unbound(m: M, f: SymFrame, slot: int) -> None:
    """The region was entered with an empty slot and has seen that: it does not hold where the slot is filled."""
    if f is m.frames[0] and f.entry and f.entry[slot] is None:
        m.guard(Kind.ABSENT, Local(slot, f.decoded.slots[slot]), None)


def _unbound(m: M, f: SymFrame, slot: int) -> None:
    name = f.decoded.slots[slot]
    if f.locals[slot] is None:
        _guard_unbound(m, f, slot)
    if name in f.code.co_freevars:
        m.raise_exception(NameError(f"cannot access free variable '{name}' where it is not associated with a value in enclosing scope"))
    m.raise_exception(UnboundLocalError(f"cannot access local variable '{name}' where it is not associated with a value"))


def _local(m: M, f: SymFrame, slot: int) -> Tracker:
    value = f.locals[slot]
    if value is None:
        _unbound(m, f, slot)
    assert value is not None
    return value


@opcodes("-- value", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_CLOSURE")
def load_fast(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(_local(m, f, i.argval))


@opcode("LOAD_FAST_LOAD_FAST", "-- value1 value2")
def load_fast_load_fast(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(_local(m, f, i.argval[0]))
    f.push(_local(m, f, i.argval[1]))


@opcode("LOAD_FAST_AND_CLEAR", "-- value")
def load_fast_and_clear(m: M, f: SymFrame, i: Instruction) -> None:
    value = f.locals[i.argval]
    if value is None:
        _guard_unbound(m, f, i.argval)
    f.push(value or NULL)
    f.locals[i.argval] = None


@opcode("STORE_FAST", "value --")
def store_fast(m: M, f: SymFrame, i: Instruction) -> None:
    value = f.pop()
    let_go(m, f, f.locals[i.argval])
    f.locals[i.argval] = None if value is NULL else value


@opcode("STORE_FAST_STORE_FAST", "value2 value1 --")
def store_fast_store_fast(m: M, f: SymFrame, i: Instruction) -> None:
    for slot in i.argval:
        let_go(m, f, f.locals[slot])
        f.locals[slot] = f.pop()


@opcode("STORE_FAST_LOAD_FAST", "value -- value2")
def store_fast_load_fast(m: M, f: SymFrame, i: Instruction) -> None:
    let_go(m, f, f.locals[i.argval[0]])
    f.locals[i.argval[0]] = f.pop()
    f.push(_local(m, f, i.argval[1]))


@opcode("DELETE_FAST", "--")
def delete_fast(m: M, f: SymFrame, i: Instruction) -> None:
    let_go(m, f, _local(m, f, i.argval))
    f.locals[i.argval] = None


def _cell(m: M, f: SymFrame, slot: int) -> trackers.CellTracker:
    cell = f.locals[slot]
    if not isinstance(cell, trackers.CellTracker):
        m.graph_break("B003", name=f.decoded.slots[slot])
    return cell


@opcode("MAKE_CELL", "--")
def make_cell(m: M, f: SymFrame, i: Instruction) -> None:
    f.locals[i.argval] = trackers.CellTracker(f.locals[i.argval])


@opcode("COPY_FREE_VARS", "--")
def copy_free_vars(m: M, f: SymFrame, i: Instruction) -> None:
    """The free slots already hold their cells (FrameState and `bind` put them there)."""


@opcode("LOAD_DEREF", "-- value")
def load_deref(m: M, f: SymFrame, i: Instruction) -> None:
    value = _cell(m, f, i.argval).load(m)
    if value is None:
        _unbound(m, f, i.argval)
    assert value is not None
    f.push(value)


@opcode("STORE_DEREF", "value --")
def store_deref(m: M, f: SymFrame, i: Instruction) -> None:
    cell = _cell(m, f, i.argval)
    let_go(m, f, cell.known(), cell=True)
    cell.store(m, f.pop())


@opcode("DELETE_DEREF", "--")
def delete_deref(m: M, f: SymFrame, i: Instruction) -> None:
    cell = _cell(m, f, i.argval)
    if cell.load(m) is None:
        _unbound(m, f, i.argval)
    let_go(m, f, cell.known(), cell=True)
    cell.store(m, None)


# -- globals


def load_global_name(m: M, f: SymFrame, name: str) -> Tracker:
    """A global or builtin, as LOAD_GLOBAL finds it."""
    key = (id(f.globals), name)
    if key in m.overlay:
        found = m.overlay[key]
        if found is not None:
            return found
    elif name in f.globals:
        return m.wrap(f.globals[name], Item(f.globals_source, name))
    else:
        m.guard(Kind.KEY_ABSENT, f.globals_source, name)
    table: Any = f.globals.get("__builtins__", builtins)
    table = table if isinstance(table, dict) else vars(table)
    if name in table:
        return m.wrap(table[name], Item(Held("builtins", table), name))
    m.raise_exception(NameError(f"name '{name}' is not defined", name=name))


@opcode("LOAD_GLOBAL", "-- null? value")
def load_global(m: M, f: SymFrame, i: Instruction) -> None:
    value = load_global_name(m, f, i.argval)
    if i.flag and VERSION < (3, 13):
        f.push(NULL)
    f.push(value)
    if i.flag and VERSION >= (3, 13):
        f.push(NULL)


@opcode("STORE_GLOBAL", "value --")
def store_global(m: M, f: SymFrame, i: Instruction) -> None:
    value = f.pop()
    m.overlay[(id(f.globals), i.argval)] = value
    m.effect("{0}[" + repr(i.argval) + "] = {1}", HeldTracker(f.globals, "globals"), value)


@opcode("DELETE_GLOBAL", "--")
def delete_global(m: M, f: SymFrame, i: Instruction) -> None:
    key = (id(f.globals), i.argval)
    bound = m.overlay[key] is not None if key in m.overlay else i.argval in f.globals
    if not bound:
        m.raise_exception(NameError(f"name '{i.argval}' is not defined", name=i.argval))
    m.overlay[key] = None
    m.effect("del {0}[" + repr(i.argval) + "]", HeldTracker(f.globals, "globals"))


# -- operators

UNARY: dict[str, Callable[..., Any]] = {"UNARY_POSITIVE": operator.pos, "UNARY_NEGATIVE": operator.neg, "UNARY_INVERT": operator.invert}
_BINARY = "add and_ floordiv lshift matmul mul mod or_ pow rshift sub truediv xor".split()
_IN_PLACE = "iadd iand ifloordiv ilshift imatmul imul imod ior ipow irshift isub itruediv ixor".split()
BINARY = tuple(getattr(operator, name) for name in (*_BINARY, *_IN_PLACE))
COMPARE = {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge}


@opcodes("value -- result", *UNARY)
def unary(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(m.apply(UNARY[i.op], f.pop()))


@opcode("UNARY_NOT", "value -- result")
def unary_not(m: M, f: SymFrame, i: Instruction) -> None:
    value = f.pop()
    f.push(m.apply(operator.not_, value) if isinstance(value, trackers.ItemTracker) else m.const(not m.truth(value)))


@opcode("TO_BOOL", "value -- result")
def to_bool(m: M, f: SymFrame, i: Instruction) -> None:
    value = f.pop()
    lasting = isinstance(value, trackers.ItemTracker) and branch_of(f.decoded, i) is None
    f.push(m.apply(bool, value) if lasting else m.const(m.decide(f, i, value)))


@opcode("BINARY_OP", "lhs rhs -- result")
def binary_op(m: M, f: SymFrame, i: Instruction) -> None:
    lhs, rhs = f.popn(2)
    f.push(m.apply(BINARY[i.arg], lhs, rhs))


@opcode("COMPARE_OP", "lhs rhs -- result")
def compare_op(m: M, f: SymFrame, i: Instruction) -> None:
    lhs, rhs = f.popn(2)
    result = m.apply(COMPARE[i.argval], lhs, rhs)
    f.compared = (f.count, result)
    f.push(m.const(m.decide(f, i, result)) if i.flag else result)


@opcode("IS_OP", "lhs rhs -- result")
def is_op(m: M, f: SymFrame, i: Instruction) -> None:
    lhs, rhs = f.popn(2)
    f.push(m.apply(operator.is_not if i.arg else operator.is_, lhs, rhs))


@opcode("CONTAINS_OP", "item container -- result")
def contains_op(m: M, f: SymFrame, i: Instruction) -> None:
    item, container = f.popn(2)
    found = m.apply(operator.contains, container, item)
    f.push(m.const(not m.truth(found)) if i.arg else found)


@opcode("BINARY_SUBSCR", "container key -- result")
def binary_subscr(m: M, f: SymFrame, i: Instruction) -> None:
    container, key = f.popn(2)
    f.push(m.apply(operator.getitem, container, key))


@opcode("STORE_SUBSCR", "value container key --")
def store_subscr(m: M, f: SymFrame, i: Instruction) -> None:
    value, container, key = f.popn(3)
    m.apply(operator.setitem, container, key, value)


@opcode("DELETE_SUBSCR", "container key --")
def delete_subscr(m: M, f: SymFrame, i: Instruction) -> None:
    container, key = f.popn(2)
    m.apply(operator.delitem, container, key)


@opcode("BINARY_SLICE", "container start stop -- result")
def binary_slice(m: M, f: SymFrame, i: Instruction) -> None:
    container, start, stop = f.popn(3)
    f.push(m.apply(operator.getitem, container, trackers.SliceTracker(start, stop, m.const(None))))


@opcode("STORE_SLICE", "value container start stop --")
def store_slice(m: M, f: SymFrame, i: Instruction) -> None:
    value, container, start, stop = f.popn(4)
    m.apply(operator.setitem, container, trackers.SliceTracker(start, stop, m.const(None)), value)


@opcode("BUILD_SLICE", "start stop step? -- slice")
def build_slice(m: M, f: SymFrame, i: Instruction) -> None:
    parts = f.popn(i.arg)
    f.push(trackers.SliceTracker(parts[0], parts[1], parts[2] if len(parts) == 3 else m.const(None)))


@opcode("GET_LEN", "container -- container length")
def get_len(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(m.apply(len, f.stack[-1]))


# -- attributes


@opcode("LOAD_ATTR", "owner -- value null?")
def load_attr(m: M, f: SymFrame, i: Instruction) -> None:
    owner = f.pop()
    value = m.apply(getattr, owner, m.const(i.argval))
    if i.flag and VERSION < (3, 13):
        f.push(NULL)
    f.push(value)
    if i.flag and VERSION >= (3, 13):
        f.push(NULL)


@opcode("LOAD_METHOD", "owner -- null method")
def load_method(m: M, f: SymFrame, i: Instruction) -> None:
    owner = f.pop()
    value = m.apply(getattr, owner, m.const(i.argval))
    f.push(NULL)
    f.push(value)


@opcode("LOAD_SUPER_ATTR", "super class self -- value null?")
def load_super_attr(m: M, f: SymFrame, i: Instruction) -> None:
    fn, cls, self = f.popn(3)
    proxy = m.call(fn, [cls, self] if i.flag & 2 else [], {})
    value = m.apply(getattr, proxy, m.const(i.argval))
    method = i.flag & 1
    if method and VERSION < (3, 13):
        f.push(NULL)
    f.push(value)
    if method and VERSION >= (3, 13):
        f.push(NULL)


@opcode("STORE_ATTR", "value owner --")
def store_attr(m: M, f: SymFrame, i: Instruction) -> None:
    value, owner = f.popn(2)
    m.apply(setattr, owner, m.const(i.argval), value)


@opcode("DELETE_ATTR", "owner --")
def delete_attr(m: M, f: SymFrame, i: Instruction) -> None:
    m.apply(delattr, f.pop(), m.const(i.argval))


# -- building


@opcode("BUILD_TUPLE", "values* -- tuple")
def build_tuple(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(trackers.TupleTracker(f.popn(i.arg)))


@opcode("BUILD_LIST", "values* -- list")
def build_list(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(trackers.ListTracker(f.popn(i.arg)))


@opcode("BUILD_SET", "values* -- set")
def build_set(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(m.apply(set, trackers.ListTracker(f.popn(i.arg))))


@opcode("BUILD_MAP", "keys_values* -- dict")
def build_map(m: M, f: SymFrame, i: Instruction) -> None:
    flat = f.popn(2 * i.arg)
    built = m.apply(dict)
    for key, value in zip(flat[::2], flat[1::2], strict=True):
        m.apply(operator.setitem, built, key, value)
    f.push(built)


@opcode("BUILD_CONST_KEY_MAP", "values* keys -- dict")
def build_const_key_map(m: M, f: SymFrame, i: Instruction) -> None:
    keys = f.pop().try_const()
    assert keys is not None
    built = m.apply(dict)
    for key, value in zip(keys.value, f.popn(i.arg), strict=True):
        m.apply(operator.setitem, built, m.const(key), value)
    f.push(built)


@opcode("BUILD_STRING", "pieces* -- str")
def build_string(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(m.apply(str.join, m.const(""), trackers.ListTracker(f.popn(i.arg))))


@opcode("LIST_APPEND", "list between* value -- list between*")
def list_append(m: M, f: SymFrame, i: Instruction) -> None:
    value = f.pop()
    m.apply(list.append, f.stack[-i.arg], value)


@opcode("SET_ADD", "set between* value -- set between*")
def set_add(m: M, f: SymFrame, i: Instruction) -> None:
    value = f.pop()
    m.apply(set.add, f.stack[-i.arg], value)


@opcode("MAP_ADD", "dict between* key value -- dict between*")
def map_add(m: M, f: SymFrame, i: Instruction) -> None:
    key, value = f.popn(2)
    m.apply(operator.setitem, f.stack[-i.arg], key, value)


@opcode("LIST_EXTEND", "list between* iterable -- list between*")
def list_extend(m: M, f: SymFrame, i: Instruction) -> None:
    iterable = f.pop()
    if not can_be_spread(iterable):
        m.raise_exception(TypeError(f"Value after * must be an iterable, not {_C.type_name(iterable.python_type())}"))
    m.apply(list.extend, f.stack[-i.arg], iterable)


@opcode("SET_UPDATE", "set between* iterable -- set between*")
def set_update(m: M, f: SymFrame, i: Instruction) -> None:
    iterable = f.pop()
    m.apply(set.update, f.stack[-i.arg], iterable)


def _is_mapping(v: Tracker) -> bool:
    return isinstance(payload_of(v), trackers.DictTracker) or hasattr(v.python_type(), "keys")


@opcode("DICT_UPDATE", "dict between* mapping -- dict between*")
def dict_update(m: M, f: SymFrame, i: Instruction) -> None:
    mapping = f.pop()
    if not _is_mapping(mapping):
        if m.truth(m.apply(hasattr, mapping, m.const("keys"))):  # of the object itself, or through `__getattr__`
            m.graph_break("B104", operation="**", value=mapping.show())
        m.raise_exception(TypeError(f"'{_C.type_name(mapping.python_type())}' object is not a mapping"))
    m.apply(dict.update, f.stack[-i.arg], mapping)


@opcode("DICT_MERGE", "callable dict between* mapping -- callable dict between*")
def dict_merge(m: M, f: SymFrame, i: Instruction) -> None:
    mapping = f.pop()
    target = f.stack[-i.arg]
    if not _is_mapping(mapping):
        m.graph_break("B104", operation="**", value=mapping.show())
    for key in m.iterate(m.apply(iter, mapping)):
        if m.truth(m.apply(operator.contains, target, key)):
            fn = next(
                value for value in (f.stack[-i.arg - 2], f.stack[-i.arg - 3]) if value is not NULL
            )  # (from 3.13 on NULL stands behind it)
            named, const = _in_errors(m, fn), key.try_const()
            if named is None or const is None:
                m.graph_break("B104", operation="**", value=mapping.show())
            m.raise_exception(TypeError(f"{named} got multiple values for keyword argument '{const.value}'"))
    m.apply(dict.update, target, mapping)


def _in_errors(m: M, fn: Tracker) -> str | None:
    """A callable as CPython names it in errors of its call; None where that is not known here."""
    if not isinstance(fn, trackers.FunctionTracker):
        return None
    qualname, module = (m.apply(getattr, fn, m.const(name)).try_const() for name in ("__qualname__", "__module__"))
    if qualname is None or module is None:
        return None
    return f"{qualname.value}()" if module.value in (None, "builtins") else f"{module.value}.{qualname.value}()"


@opcode("LIST_TO_TUPLE", "list -- tuple")
def list_to_tuple(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(m.apply(tuple, f.pop()))


# -- unpacking


def _unpackable(m: M, v: Tracker) -> Tracker:
    if not can_be_spread(v):
        m.raise_exception(TypeError(f"cannot unpack non-iterable {_C.type_name(v.python_type())} object"))
    return v


@opcode("UNPACK_SEQUENCE", "sequence -- values*")
def unpack_sequence(m: M, f: SymFrame, i: Instruction) -> None:
    v = f.pop()
    items = list(itertools.islice(trackers.each(m, _unpackable(m, v)), i.arg + 1))
    if len(items) > i.arg:
        if isinstance(v, trackers.GeneratorTracker) and m.generator_run(v).pending():
            reason = GraphBreak("B101", m.user_stack(), callee="unpacking", reason="too many values of a generator, which is closed then")
            raise Restart(m.frames[-1].count, reason, True)
        m.raise_exception(ValueError(f"too many values to unpack (expected {i.arg})"))
    if len(items) < i.arg:
        m.raise_exception(ValueError(f"not enough values to unpack (expected {i.arg}, got {len(items)})"))
    for item in reversed(items):
        f.push(item)


@opcode("UNPACK_EX", "sequence -- after* rest before*")
def unpack_ex(m: M, f: SymFrame, i: Instruction) -> None:
    before, after = i.arg & 255, i.arg >> 8
    items = m.iterate(_unpackable(m, f.pop()))
    if len(items) < before + after:
        m.raise_exception(ValueError(f"not enough values to unpack (expected at least {before + after}, got {len(items)})"))
    stop = len(items) - after
    values: list[Tracker] = [*items[:before], trackers.ListTracker(items[before:stop]), *items[stop:]]
    for value in reversed(values):
        f.push(value)


# -- strings

_CONVERSIONS: dict[int, Callable[..., Any]] = {1: str, 2: repr, 3: ascii}


@opcode("FORMAT_VALUE", "value spec? -- str")
def format_value(m: M, f: SymFrame, i: Instruction) -> None:
    spec = f.pop() if i.arg & 4 else m.const("")
    value = f.pop()
    if i.arg & 3:
        value = m.apply(_CONVERSIONS[i.arg & 3], value)
    f.push(m.apply(format, value, spec))


@opcode("CONVERT_VALUE", "value -- str")
def convert_value(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(m.apply(_CONVERSIONS[i.arg], f.pop()))


@opcode("FORMAT_SIMPLE", "value -- str")
def format_simple(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(m.apply(format, f.pop(), m.const("")))


@opcode("FORMAT_WITH_SPEC", "value spec -- str")
def format_with_spec(m: M, f: SymFrame, i: Instruction) -> None:
    value, spec = f.popn(2)
    f.push(m.apply(format, value, spec))
