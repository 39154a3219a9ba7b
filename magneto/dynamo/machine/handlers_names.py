"""Opcodes of class bodies: names are looked up in the namespace that becomes the class, then among globals and builtins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magneto.dynamo import trackers
from magneto.dynamo.bytecode.decode import Instruction
from magneto.dynamo.machine.frame import SymFrame
from magneto.dynamo.machine.handlers_values import load_global_name
from magneto.dynamo.machine.opcode_table import opcode, opcodes

if TYPE_CHECKING:
    from magneto.dynamo.machine.machine import SymbolicMachine as M


def _namespace(m: M, f: SymFrame, i: Instruction) -> trackers.DictTracker:
    if f.names is None:
        m.graph_break("B002", name=i.op, reason="module or class level code")
    return f.names


@opcode("LOAD_NAME", "-- value")
def load_name(m: M, f: SymFrame, i: Instruction) -> None:
    found = _namespace(m, f, i).get_token(m, i.argval)
    f.push(found if found is not None else load_global_name(m, f, i.argval))


@opcode("STORE_NAME", "value --")
def store_name(m: M, f: SymFrame, i: Instruction) -> None:
    _namespace(m, f, i).put(m, m.const(i.argval), f.pop())


@opcode("DELETE_NAME", "--")
def delete_name(m: M, f: SymFrame, i: Instruction) -> None:
    names = _namespace(m, f, i)
    if names.get_token(m, i.argval) is None:
        m.raise_exception(NameError(f"name '{i.argval}' is not defined", name=i.argval))
    names.entries.pop(i.argval)


@opcode("SETUP_ANNOTATIONS", "--")
def setup_annotations(m: M, f: SymFrame, i: Instruction) -> None:
    names = _namespace(m, f, i)
    if names.get_token(m, "__annotations__") is None:
        names.put(m, m.const("__annotations__"), trackers.DictTracker())


@opcode("LOAD_LOCALS", "-- namespace")
def load_locals(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(_namespace(m, f, i))


def _name_or_cell(m: M, f: SymFrame, i: Instruction, names: trackers.DictTracker) -> None:
    found = names.get_token(m, f.decoded.slots[i.argval])
    if found is None:
        cell = f.locals[i.argval]
        found = cell.load(m) if isinstance(cell, trackers.CellTracker) else None
    if found is None:
        name = f.decoded.slots[i.argval]
        m.raise_exception(NameError(f"cannot access free variable '{name}' where it is not associated with a value in enclosing scope"))
    f.push(found)


@opcode("LOAD_CLASSDEREF", "-- value")
def load_classderef(m: M, f: SymFrame, i: Instruction) -> None:
    _name_or_cell(m, f, i, _namespace(m, f, i))


@opcode("LOAD_FROM_DICT_OR_DEREF", "namespace -- value")
def load_from_dict_or_deref(m: M, f: SymFrame, i: Instruction) -> None:
    names = f.pop()
    if not isinstance(names, trackers.DictTracker):
        m.graph_break("B002", name=i.op, reason="class level code")
    _name_or_cell(m, f, i, names)


@opcodes("namespace -- value", "LOAD_FROM_DICT_OR_GLOBALS")
def load_from_dict_or_globals(m: M, f: SymFrame, i: Instruction) -> None:
    names = f.pop()
    if not isinstance(names, trackers.DictTracker):
        m.graph_break("B002", name=i.op, reason="class level code")
    found = names.get_token(m, i.argval)
    f.push(found if found is not None else load_global_name(m, f, i.argval))
