"""Opcodes of control: jumps, loops, exceptions, with-blocks, calls, functions, generators, imports, pattern matching."""

from __future__ import annotations

import builtins
import operator
import sys
import types
from typing import TYPE_CHECKING

from magneto.dynamo import trackers
from magneto.dynamo.bytecode.decode import VERSION, Instruction
from magneto.dynamo.guards.source import Held
from magneto.dynamo.machine.frame import NULL, SymFrame
from magneto.dynamo.machine.opcode_table import opcode, opcodes
from magneto.dynamo.machine.signals import CapturedRaise
from magneto.dynamo.trackers.base import Tracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.machine import SymbolicMachine as M

# -- jumps and loops


@opcodes("--", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
def jump(m: M, f: SymFrame, i: Instruction) -> None:
    f.jump(i.target)


@opcodes("condition --", "POP_JUMP_IF_TRUE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_TRUE")
def pop_jump_if_true(m: M, f: SymFrame, i: Instruction) -> None:
    if m.decide(f, i, f.pop()):
        f.jump(i.target)


@opcodes("condition --", "POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_FALSE")
def pop_jump_if_false(m: M, f: SymFrame, i: Instruction) -> None:
    if not m.decide(f, i, f.pop()):
        f.jump(i.target)


def _is_none(m: M, value: Tracker) -> bool:
    return m.truth(m.apply(operator.is_, value, m.const(None)))


@opcodes("value --", "POP_JUMP_IF_NONE", "POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_BACKWARD_IF_NONE")
def pop_jump_if_none(m: M, f: SymFrame, i: Instruction) -> None:
    if _is_none(m, f.pop()):
        f.jump(i.target)


@opcodes("value --", "POP_JUMP_IF_NOT_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE", "POP_JUMP_BACKWARD_IF_NOT_NONE")
def pop_jump_if_not_none(m: M, f: SymFrame, i: Instruction) -> None:
    if not _is_none(m, f.pop()):
        f.jump(i.target)


@opcodes("condition -- condition?", "JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP")
def jump_or_pop(m: M, f: SymFrame, i: Instruction) -> None:
    if m.truth(f.stack[-1]) == (i.op == "JUMP_IF_TRUE_OR_POP"):
        f.jump(i.target)
    else:
        f.pop()


@opcode("GET_ITER", "iterable -- iterator")
def get_iter(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(m.apply(iter, f.pop()))


def exhausted_offset(f: SymFrame, i: Instruction) -> int:
    """Where FOR_ITER goes on when the iterator is exhausted: CPython skips END_FOR (3.12) and the POP_TOP behind it (3.13)."""
    skip = {(3, 11): 0, (3, 12): 1, (3, 13): 2}[VERSION]
    return f.decoded.instructions[f.decoded.index[i.target] + skip].offset


@opcode("FOR_ITER", "iterator -- iterator value")
def for_iter(m: M, f: SymFrame, i: Instruction) -> None:
    item = m.next_or_none(f.stack[-1])
    if item is None:
        f.pop()
        f.jump(exhausted_offset(f, i))
    else:
        f.push(item)


# -- exceptions


@opcode("PUSH_EXC_INFO", "exc -- previous exc")
def push_exc_info(m: M, f: SymFrame, i: Instruction) -> None:
    exc = f.pop()
    f.handled.append(exc)
    f.push(f.handling.value or m.const(None))
    f.push(exc)
    f.handling.value = exc


@opcode("POP_EXCEPT", "previous --")
def pop_except(m: M, f: SymFrame, i: Instruction) -> None:
    f.handling.value = f.pop()
    if f.handled:
        f.handled.pop()


@opcode("CHECK_EXC_MATCH", "exc type -- exc matches")
def check_exc_match(m: M, f: SymFrame, i: Instruction) -> None:
    kind = f.pop()
    f.push(m.const(trackers.catches(m, f.stack[-1], kind)))


@opcode("RERAISE", "values* exc --")
def reraise(m: M, f: SymFrame, i: Instruction) -> None:
    exc = f.pop()
    raise CapturedRaise(exc, getattr(exc, "born", None) or m.count)


def _instance(m: M, exc: Tracker) -> Tracker:
    if issubclass(exc.python_type(), type):
        return m.call(exc, [], {})
    return exc


@opcode("RAISE_VARARGS", "values* --")
def raise_varargs(m: M, f: SymFrame, i: Instruction) -> None:
    if i.arg == 0:
        handled = m.handled_exception()
        if not issubclass(handled.python_type(), BaseException):
            m.raise_exception(RuntimeError("No active exception to reraise"))
        raise CapturedRaise(handled, getattr(handled, "born", None) or m.count)
    cause = f.pop() if i.arg == 2 else None
    exc = _instance(m, f.pop())
    if not issubclass(exc.python_type(), BaseException):
        m.raise_exception(TypeError("exceptions must derive from BaseException"))
    if exc.source is not None and any(frame.current and frame.decoded.handler_at(frame.current.offset) for frame in m.frames):
        m.graph_break("B107", value=exc.show(), reason="raising an existing exception changes its traceback")
    if cause is not None:
        origin = _instance(m, cause)
        if not issubclass(origin.python_type(), (BaseException, types.NoneType)):
            m.raise_exception(TypeError("exception causes must derive from BaseException"))
        m.apply(setattr, exc, m.const("__cause__"), origin)
    m.raise_exception(exc)


@opcode("LOAD_ASSERTION_ERROR", "-- class")
def load_assertion_error(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(m.wrap(AssertionError, Held("AssertionError", AssertionError)))


@opcode("CHECK_EG_MATCH", "exc type -- rest match")
def check_eg_match(m: M, f: SymFrame, i: Instruction) -> None:
    kind = f.pop()
    match, rest = trackers.match_group(m, f.stack[-1], kind)
    none = m.const(None)
    f.stack[-1] = rest or none
    f.push(match or none)
    if match is not None:
        f.handling.value = match


# -- with


@opcode("BEFORE_WITH", "manager -- exit result")
def before_with(m: M, f: SymFrame, i: Instruction) -> None:
    manager = f.pop()
    enter, leave = trackers.context_methods(m, manager)
    f.push(leave)
    f.push(m.call_tail(enter, [], {}))


@opcode("WITH_EXCEPT_START", "exit lasti previous exc -- exit lasti previous exc result")
def with_except_start(m: M, f: SymFrame, i: Instruction) -> None:
    exc = f.stack[-1]
    kind = m.apply(type, exc)
    f.push(m.call_tail(f.stack[-4], [kind, exc, m.apply(getattr, exc, m.const("__traceback__"))], {}))


# -- calls


@opcode("KW_NAMES", "--")
def kw_names(m: M, f: SymFrame, i: Instruction) -> None:
    f.keywords = f.code.co_consts[i.arg]


def split_call(stack: list[Tracker], n: int) -> tuple[Tracker, list[Tracker]]:
    """Callable and positional values of the CALL layout on a stack (not changed)."""
    base = len(stack) - n - 2
    first, second, rest = stack[base], stack[base + 1], stack[base + 2 :]
    if VERSION >= (3, 13):
        return first, rest if second is NULL else [second, *rest]
    return (second, rest) if first is NULL else (first, [second, *rest])


def _call(m: M, f: SymFrame, n: int, names: tuple[str, ...]) -> None:
    fn, values = split_call(f.stack, n)
    del f.stack[len(f.stack) - n - 2 :]
    positional = values[: len(values) - len(names)]
    keywords = dict(zip(names, values[len(positional) :], strict=True))
    f.push(m.call_tail(fn, positional, keywords))


@opcode("CALL", "callable self_or_null args* -- result")
def call(m: M, f: SymFrame, i: Instruction) -> None:
    names, f.keywords = f.keywords, ()
    _call(m, f, i.arg, names)


@opcode("CALL_KW", "callable self_or_null args* names -- result")
def call_kw(m: M, f: SymFrame, i: Instruction) -> None:
    names = f.pop().try_const()
    assert names is not None
    _call(m, f, i.arg, names.value)


def can_be_spread(v: Tracker) -> bool:
    """Whether `*v` finds something to iterate over."""
    cls = v.python_type()
    return hasattr(cls, "__iter__") or hasattr(cls, "__getitem__")


@opcode("CALL_FUNCTION_EX", "callable null args kwargs? -- result")
def call_function_ex(m: M, f: SymFrame, i: Instruction) -> None:
    mapping = f.pop() if i.arg & 1 else None
    iterable = f.pop()
    first, second = f.popn(2)
    fn = first if VERSION >= (3, 13) else second
    keywords: dict[str, Tracker] = {}
    if mapping is not None:
        for key in m.iterate(m.apply(iter, mapping)):
            const = key.try_const()
            if const is None or not isinstance(const.value, str):
                m.raise_exception(TypeError("keywords must be strings"))
            keywords[const.value] = m.apply(operator.getitem, mapping, key)
    if not can_be_spread(iterable):
        m.graph_break("B104", operation="spread (*)", value=iterable.show())  # the error names the function
    f.push(m.call_tail(fn, m.iterate(m.apply(tuple, iterable)), keywords))


@opcodes("value -- result", "CALL_INTRINSIC_1")
def call_intrinsic_1(m: M, f: SymFrame, i: Instruction) -> None:
    if i.arg == 5:
        f.push(m.apply(operator.pos, f.pop()))
    elif i.arg == 6:
        f.push(m.apply(tuple, f.pop()))
    elif i.arg == 3:
        exc = f.stack[-1]
        if issubclass(exc.python_type(), StopIteration):
            f.pop()
            error = trackers.ExceptionTracker.of(m, RuntimeError("generator raised StopIteration"))
            error.cause = error.context = exc
            error.born = getattr(exc, "born", None)
            f.push(error)
    else:
        m.graph_break("B002", name=f"CALL_INTRINSIC_1 {i.arg}", reason="rare interpreter operation")


@opcodes("value1 value2 -- result", "CALL_INTRINSIC_2", "PREP_RERAISE_STAR")
def call_intrinsic_2(m: M, f: SymFrame, i: Instruction) -> None:
    left = m.iterate(f.stack[-1]) if i.op == "PREP_RERAISE_STAR" or i.arg == 1 else []
    if left and all((const := part.try_const()) is not None and const.value is None for part in left):
        f.popn(2)
        f.push(m.const(None))
        return
    m.graph_break("B002", name=f"CALL_INTRINSIC_2 {i.arg}", reason="rare interpreter operation")


# -- functions


@opcode("LOAD_BUILD_CLASS", "-- function")
def load_build_class(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(m.wrap(builtins.__build_class__, Held("__build_class__", builtins.__build_class__)))


def _closure(m: M, value: Tracker) -> tuple[trackers.CellTracker, ...]:
    cells = m.iterate(value)
    return tuple(cell for cell in cells if isinstance(cell, trackers.CellTracker))


@opcode("MAKE_FUNCTION", "attributes* code -- function")
def make_function(m: M, f: SymFrame, i: Instruction) -> None:
    code = f.pop().try_const()
    assert code is not None
    flags = i.arg if VERSION < (3, 13) else 0
    closure = _closure(m, f.pop()) if flags & 8 else ()
    annotations = f.pop() if flags & 4 else None
    kwdefaults = f.pop() if flags & 2 else None
    defaults = f.pop() if flags & 1 else None
    f.push(trackers.FunctionTracker.make(m, code.value, f.globals, f.globals_source, defaults, kwdefaults, closure, annotations))


@opcode("SET_FUNCTION_ATTRIBUTE", "value function -- function")
def set_function_attribute(m: M, f: SymFrame, i: Instruction) -> None:
    function, value = f.pop(), f.pop()
    assert isinstance(function, trackers.FunctionTracker)
    function.set_made(m, i.arg, value)
    f.push(function)


@opcode("RETURN_VALUE", "value --")
def return_value(m: M, f: SymFrame, i: Instruction) -> Tracker:
    if f.yields and f is m.frames[0]:
        m.suspend(f)
    return f.pop()


@opcode("RETURN_CONST", "--")
def return_const(m: M, f: SymFrame, i: Instruction) -> Tracker:
    if f.yields and f is m.frames[0]:
        m.suspend(f)
    return m.const(i.argval)


# -- generators


@opcode("RETURN_GENERATOR", "-- sent")
def return_generator(m: M, f: SymFrame, i: Instruction) -> None:
    f.push(m.const(None))


@opcode("YIELD_VALUE", "value -- sent")
def yield_value(m: M, f: SymFrame, i: Instruction) -> Tracker:
    if f is m.frames[0]:
        m.suspend(f)
    f.yielded = True
    return f.pop()


@opcode("GET_YIELD_FROM_ITER", "iterable -- iterator")
def get_yield_from_iter(m: M, f: SymFrame, i: Instruction) -> None:
    if not isinstance(f.stack[-1], trackers.GeneratorTracker):
        f.push(m.apply(iter, f.pop()))


def _step_or_send(m: M, receiver: Tracker, value: Tracker) -> tuple[Tracker | None, Tracker | None]:
    """(next item, None) of what a generator has handed over to, or (None, the value of its StopIteration)."""
    const = value.try_const()
    steps = const is not None and const.value is None and hasattr(receiver.python_type(), "__next__")
    if steps and not isinstance(receiver, trackers.ObjectTracker):
        return m.next_or_none(receiver), None
    name, args = ("__next__", []) if steps else ("send", [value])
    try:
        return m.call(m.apply(getattr, receiver, m.const(name)), args, {}), None
    except CapturedRaise as raised:
        if not raised.matches(StopIteration):
            raise
        return None, m.apply(getattr, raised.value, m.const("value"))


@opcode("SEND", "receiver value -- receiver result")
def send(m: M, f: SymFrame, i: Instruction) -> None:
    value = f.pop()
    receiver = f.stack[-1]
    if isinstance(receiver, trackers.GeneratorTracker):
        item = m.generator_next(receiver, value)
        result = receiver.result
    else:
        item, result = _step_or_send(m, receiver, value)
    if item is not None:
        f.push(item)
        return
    if VERSION == (3, 11):
        f.pop()
    f.push(result or m.const(None))
    f.jump(i.target)


@opcode("CLEANUP_THROW", "receiver sent exc -- none value")
def cleanup_throw(m: M, f: SymFrame, i: Instruction) -> None:
    exc = f.pop()
    if not issubclass(exc.python_type(), StopIteration):
        raise CapturedRaise(exc, getattr(exc, "born", None) or m.count)
    f.popn(2)
    f.push(m.const(None))
    f.push(m.apply(getattr, exc, m.const("value")))


@opcode("END_SEND", "receiver value -- value")
def end_send(m: M, f: SymFrame, i: Instruction) -> None:
    value = f.pop()
    f.pop()
    f.push(value)


# -- imports


@opcode("IMPORT_NAME", "level fromlist -- module")
def import_name(m: M, f: SymFrame, i: Instruction) -> None:
    level, fromlist = (value.try_const() for value in f.popn(2))
    assert level is not None and fromlist is not None
    package = f.globals.get("__package__") or ""
    name = i.argval if level.value == 0 else _absolute(i.argval, package, level.value)
    if name in sys.modules and not issubclass(type(sys.modules[name]), types.ModuleType):
        m.graph_break(
            "B101", callee="__import__", reason=f"{name} is no module"
        )  # a stand-in of the program, or of the library (`typing.io`)
    wanted = [name]
    if hasattr(sys.modules.get(name), "__path__"):
        wanted += [f"{name}.{part}" for part in fromlist.value or () if not hasattr(sys.modules[name], part)]
    if any(part not in sys.modules for part in wanted):
        m.graph_break("B004", name=name)
    module = __import__(i.argval, f.globals, None, fromlist.value, level.value)
    f.push(m.wrap(module, Held(module.__name__, module)))


def _absolute(name: str, package: str, level: int) -> str:
    base = package.rsplit(".", level - 1)[0]
    return f"{base}.{name}" if name else base


@opcode("IMPORT_FROM", "module -- module value")
def import_from(m: M, f: SymFrame, i: Instruction) -> None:
    module = f.stack[-1]
    try:
        f.push(m.apply(getattr, module, m.const(i.argval)))
        return
    except CapturedRaise as raised:
        if not raised.matches(AttributeError):
            raise
    if not isinstance(module.obj, types.ModuleType) or "__getattr__" in vars(module.obj):
        m.graph_break("B103", attribute=i.argval, value=module.show())
    try:
        exec(f"from {_ANY} import {i.argval}", {"__builtins__": {"__import__": lambda *args: module.obj}})
    except ImportError as error:
        made = trackers.ExceptionTracker.of(m, error)
        made.slots["path"], made.slots["msg"] = m.const(error.path), m.const(error.msg)
        m.raise_exception(made)
    m.graph_break("B103", attribute=i.argval, value=module.show())  # a module that is loaded, but no attribute of its package


_ANY = "package"


# -- pattern matching


@opcodes("subject -- subject matches", "MATCH_MAPPING", "MATCH_SEQUENCE")
def match_kind(m: M, f: SymFrame, i: Instruction) -> None:
    flag = 1 << 6 if i.op == "MATCH_MAPPING" else 1 << 5
    f.push(m.const(bool(f.stack[-1].python_type().__flags__ & flag)))


@opcode("MATCH_KEYS", "subject keys -- subject keys values_or_none")
def match_keys(m: M, f: SymFrame, i: Instruction) -> None:
    subject, keys = f.stack[-2:]
    asked = m.iterate(keys)
    known = [const.value for key in asked if (const := key.try_const()) is not None]
    if len(set(known)) < len(known) or len(set(asked)) < len(asked):
        m.graph_break("B002", name="MATCH_KEYS", reason="a key that occurs twice")
    values: list[Tracker] = []
    for key in asked:
        if not m.truth(m.apply(operator.contains, subject, key)):
            f.push(m.const(None))
            return
        values.append(m.apply(operator.getitem, subject, key))
    f.push(trackers.TupleTracker(values))


_MATCH_SELF = 1 << 22  # Py_TPFLAGS: a positional pattern matches the subject itself


@opcode("MATCH_CLASS", "subject class names -- attributes_or_none")
def match_class(m: M, f: SymFrame, i: Instruction) -> None:
    subject, cls, names = f.popn(3)
    keyword_names = names.try_const()
    assert keyword_names is not None
    if not isinstance(cls, trackers.ClassTracker):
        m.graph_break("B002", name="MATCH_CLASS", reason="class pattern on an unknown class")
    if not m.truth(m.apply(isinstance, subject, cls)):
        f.push(m.const(None))
        return
    positional, itself = getattr(cls.obj, "__match_args__", ()), i.arg and not hasattr(cls.obj, "__match_args__")
    values = [subject] if itself and cls.obj.__flags__ & _MATCH_SELF else []
    attributes = (*(positional[: i.arg] if type(positional) is tuple else ()), *keyword_names.value)
    expected = i.arg + len(keyword_names.value)
    if len(values) + len(set(attributes)) < expected or any(type(name) is not str for name in attributes):
        m.graph_break("B002", name="MATCH_CLASS", reason="patterns that __match_args__ does not allow")
    for name in attributes:
        try:
            values.append(m.apply(getattr, subject, m.const(name)))
        except trackers.Raised as raised:
            if not raised.matches(AttributeError):
                raise
            f.push(m.const(None))
            return
    f.push(trackers.TupleTracker(values))
