"""Break forms: how the instruction at which capture ends is executed by generated Python, so that the following instruction can be an entry point.

A form gives an expression that does what the instruction does, and the value stack after it (`r` is the expression's value). An instruction without a form is resumed
*at*: CPython runs on from there.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from types import CodeType
from typing import Any

from magneto import _C
from magneto.base.dataclass import dataclass
from magneto.dynamo import trackers
from magneto.dynamo.bytecode.decode import VERSION, Instruction
from magneto.dynamo.machine.frame import NULL, SymFrame
from magneto.dynamo.machine.handlers_control import exhausted_offset, split_call
from magneto.dynamo.machine.handlers_values import BINARY, COMPARE, UNARY
from magneto.dynamo.region import runtime
from magneto.dynamo.region.emit import RegionEmitter
from magneto.dynamo.trackers.base import Tracker


@dataclass(slots=True)
class Outcome:
    """`expr` is evaluated as `r`; then the frame resumes at `offset` with `stack`, or, if `condition` (an expression of r) holds, at the alternative.
    `raises`: `expr` is a statement that raises. `handling`: what the Resume says of the exception being handled."""

    expr: str
    stack: list[str]
    offset: int
    condition: str = ""
    other_stack: list[str] | None = None
    other_offset: int = -1
    handling: str = ""
    raises: bool = False


Form = Callable[["FormContext"], Outcome]
FORMS: dict[str, Form] = {}


@dataclass(slots=True)
class FormContext:
    """The innermost frame at the break, and the emitter."""

    em: RegionEmitter
    frame: SymFrame
    instruction: Instruction

    def v(self, depth: int) -> str:
        """Text of the stack value `depth` from the top (1 = top), as it was before the instruction."""
        return self.em.value(self.frame.before[-depth])

    def below(self, dropped: int) -> list[str]:
        """Texts of the stack without its top `dropped` values."""
        kept = self.frame.before[: len(self.frame.before) - dropped]
        return [self.em.value(value) for value in kept]

    def active(self, fn: Any, *args: str) -> str:
        """Text of a call of a real callable with the hook active for what it calls."""
        return f"call_active({self.em.const(fn, getattr(fn, '__name__', 'fn'))}{''.join(', ' + arg for arg in args)})"

    def then(self, expr: str, dropped: int, *pushed: str) -> Outcome:
        return Outcome(expr, [*self.below(dropped), *pushed], self.instruction.next)


def form(*names: str) -> Callable[[Form], Form]:
    def register(fn: Form) -> Form:
        for name in names:
            FORMS[name] = fn
        return fn

    return register


# -- operators


@form(*UNARY)
def _unary(c: FormContext) -> Outcome:
    return c.then(c.active(UNARY[c.instruction.op], c.v(1)), 1, "r")


@form("UNARY_NOT")
def _not(c: FormContext) -> Outcome:
    return c.then(c.active(operator.not_, c.v(1)), 1, "r")


@form("TO_BOOL")
def _to_bool(c: FormContext) -> Outcome:
    return c.then(c.active(bool, c.v(1)), 1, "r")


@form("BINARY_OP")
def _binary(c: FormContext) -> Outcome:
    return c.then(c.active(BINARY[c.instruction.arg], c.v(2), c.v(1)), 2, "r")


def _truth_of(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], bool]:
    return lambda lhs, rhs: bool(compare(lhs, rhs))


_TRUTH_OF = {name: _truth_of(compare) for name, compare in COMPARE.items()}


@form("COMPARE_OP")
def _compare(c: FormContext) -> Outcome:
    if not c.instruction.flag:
        return c.then(c.active(COMPARE[c.instruction.argval], c.v(2), c.v(1)), 2, "r")
    count, compared = c.frame.compared
    if count == c.frame.count and compared is not None:  # 3.13: one instruction compares and asks for the truth; the region has compared
        return c.then(c.active(bool, c.em.value(compared)), 2, "r")
    return c.then(c.active(_TRUTH_OF[c.instruction.argval], c.v(2), c.v(1)), 2, "r")


@form("CONTAINS_OP")
def _contains(c: FormContext) -> Outcome:
    return c.then(c.active(operator.contains, c.v(1), c.v(2)), 2, "not r" if c.instruction.arg else "r")


@form("BINARY_SUBSCR")
def _subscr(c: FormContext) -> Outcome:
    return c.then(c.active(operator.getitem, c.v(2), c.v(1)), 2, "r")


@form("STORE_SUBSCR")
def _store_subscr(c: FormContext) -> Outcome:
    return c.then(c.active(operator.setitem, c.v(2), c.v(1), c.v(3)), 3)


@form("DELETE_SUBSCR")
def _delete_subscr(c: FormContext) -> Outcome:
    return c.then(c.active(operator.delitem, c.v(2), c.v(1)), 2)


@form("BINARY_SLICE")
def _binary_slice(c: FormContext) -> Outcome:
    return c.then(c.active(operator.getitem, c.v(3), f"slice({c.v(2)}, {c.v(1)})"), 3, "r")


@form("STORE_SLICE")
def _store_slice(c: FormContext) -> Outcome:
    return c.then(c.active(operator.setitem, c.v(3), f"slice({c.v(2)}, {c.v(1)})", c.v(4)), 4)


# -- attributes


def _method_layout(value: str) -> tuple[str, ...]:
    return (value, "NULL") if VERSION >= (3, 13) else ("NULL", value)


@form("LOAD_ATTR")
def _load_attr(c: FormContext) -> Outcome:
    pushed = _method_layout("r") if c.instruction.flag else ("r",)
    return c.then(c.active(getattr, c.v(1), repr(c.instruction.argval)), 1, *pushed)


@form("LOAD_METHOD")
def _load_method(c: FormContext) -> Outcome:
    return c.then(c.active(getattr, c.v(1), repr(c.instruction.argval)), 1, "NULL", "r")


@form("STORE_ATTR")
def _store_attr(c: FormContext) -> Outcome:
    return c.then(c.active(setattr, c.v(1), repr(c.instruction.argval), c.v(2)), 2)


@form("DELETE_ATTR")
def _delete_attr(c: FormContext) -> Outcome:
    return c.then(c.active(delattr, c.v(1), repr(c.instruction.argval)), 1)


# -- containers and strings


@form("LIST_EXTEND")
def _list_extend(c: FormContext) -> Outcome:
    return c.then(c.active(runtime.spread, c.v(c.instruction.arg + 1), c.v(1)), 1)


@form("SET_UPDATE")
def _set_update(c: FormContext) -> Outcome:
    return c.then(c.active(set.update, c.v(c.instruction.arg + 1), c.v(1)), 1)


@form("DICT_UPDATE")
def _dict_update(c: FormContext) -> Outcome:
    return c.then(c.active(runtime.merge, c.v(c.instruction.arg + 1), c.v(1)), 1)


@form("LIST_TO_TUPLE")
def _list_to_tuple(c: FormContext) -> Outcome:
    return c.then(c.active(tuple, c.v(1)), 1, "r")


@form("FORMAT_SIMPLE")
def _format_simple(c: FormContext) -> Outcome:
    return c.then(c.active(format, c.v(1), "''"), 1, "r")


@form("FORMAT_WITH_SPEC")
def _format_with_spec(c: FormContext) -> Outcome:
    return c.then(c.active(format, c.v(2), c.v(1)), 2, "r")


@form("CONVERT_VALUE")
def _convert(c: FormContext) -> Outcome:
    return c.then(c.active({1: str, 2: repr, 3: ascii}[c.instruction.arg], c.v(1)), 1, "r")


@form("FORMAT_VALUE")
def _format_value(c: FormContext) -> Outcome:
    has_spec = bool(c.instruction.arg & 4)
    value = c.v(2 if has_spec else 1)
    conversion = {1: str, 2: repr, 3: ascii}.get(c.instruction.arg & 3)
    inner = value if conversion is None else c.active(conversion, value)
    return c.then(c.active(format, inner, c.v(1) if has_spec else "''"), 2 if has_spec else 1, "r")


@form("GET_LEN")
def _get_len(c: FormContext) -> Outcome:
    return c.then(c.active(len, c.v(1)), 0, "r")


def _unpacker(n: int) -> Callable[[Any], Any]:
    names = ", ".join(f"a{k}" for k in range(n)) + ","
    namespace: dict[str, Any] = {}
    text = f"def unpack(value):\n    {names} = value\n    return {names}" if n else "def unpack(value):\n    () = value\n    return ()"
    exec(compile(text, "<magneto unpack>", "exec"), namespace)  # (a name under which the hook leaves it alone, region/skip.py)
    function: Callable[[Any], Any] = namespace["unpack"]
    return function


@form("UNPACK_SEQUENCE")
def _unpack(c: FormContext) -> Outcome:
    n = c.instruction.arg
    return c.then(c.active(_unpacker(n), c.v(1)), 1, *(f"r[{k}]" for k in reversed(range(n))))


# -- control


@form("POP_JUMP_IF_TRUE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_TRUE")
def _jump_true(c: FormContext) -> Outcome:
    stack = c.below(1)
    return Outcome(c.active(bool, c.v(1)), stack, c.instruction.next, "r", stack, c.instruction.target)


@form("POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_FALSE")
def _jump_false(c: FormContext) -> Outcome:
    stack = c.below(1)
    return Outcome(c.active(bool, c.v(1)), stack, c.instruction.next, "not r", stack, c.instruction.target)


@form("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP")
def _jump_or_pop(c: FormContext) -> Outcome:
    condition = "r" if c.instruction.op == "JUMP_IF_TRUE_OR_POP" else "not r"
    return Outcome(c.active(bool, c.v(1)), c.below(1), c.instruction.next, condition, c.below(0), c.instruction.target)


@form("GET_ITER")
def _get_iter(c: FormContext) -> Outcome:
    return c.then(c.active(iter, c.v(1)), 1, "r")


@form("FOR_ITER")
def _for_iter(c: FormContext) -> Outcome:
    expr = c.active(next, c.v(1), "END")
    return Outcome(expr, [*c.below(0), "r"], c.instruction.next, "r is END", c.below(1), exhausted_offset(c.frame, c.instruction))


@form("GET_YIELD_FROM_ITER")
def _delegate(c: FormContext) -> Outcome:
    return c.then(c.active(runtime.delegate, c.v(1)), 1, "r")


@form("SEND")
def _send(c: FormContext) -> Outcome:
    finished = c.below(2 if VERSION == (3, 11) else 1)
    expr = c.active(_C.send_on, c.v(2), c.v(1))
    return Outcome(expr, [*c.below(1), "r[1]"], c.instruction.next, "r[0]", [*finished, "r[1]"], c.instruction.target)


@form("POP_TOP")
def _pop_top(c: FormContext) -> Outcome:
    return c.then("None", 1)


@form("BEFORE_WITH")
def _before_with(c: FormContext) -> Outcome:
    return c.then(f"enter({c.v(1)})", 1, "r[0]", "r[1]")


@form("RAISE_VARARGS")
def _raise(c: FormContext) -> Outcome:
    if c.instruction.arg == 0:
        return Outcome("raise exception_now()", [], c.instruction.offset, raises=True)
    cause = f" from {c.v(1)}" if c.instruction.arg == 2 else ""
    return Outcome(f"raise {c.v(c.instruction.arg)}{cause}", [], c.instruction.offset, raises=True)


@form("CHECK_EG_MATCH")
def _check_eg_match(c: FormContext) -> Outcome:
    outcome = c.then(f"match_group({c.v(2)}, {c.v(1)})", 2, "r[0]", "r[1]")
    outcome.handling = ", handling=KEEP if r[1] is None else r[1]"
    return outcome


if VERSION >= (3, 12):

    @form("CALL_INTRINSIC_2")
    def _prepare_reraise(c: FormContext) -> Outcome:
        return c.then(f"left_of_group({c.v(2)}, {c.v(1)})", 2, "r")


# -- with


@form("WITH_EXCEPT_START")
def _with_except_start(c: FormContext) -> Outcome:
    exc = c.v(1)
    return c.then(f"call_active({c.v(4)}, type({exc}), {exc}, {exc}.__traceback__)", 0, "r")


# -- calls and imports


def _call_text(c: FormContext, fn: Tracker, values: list[Tracker], names: tuple[str, ...]) -> str:
    texts = [c.em.value(value) for value in values]
    split = len(texts) - len(names)
    keywords = [
        f"{name}={text}" if name.isidentifier() else f"**{{{name!r}: {text}}}" for name, text in zip(names, texts[split:], strict=True)
    ]
    # a compiler of torch's own (torch.cond compiles its branches) is not to be captured while it works
    caller = (
        c.em.const(_C.call_inactive, "call_inactive") if isinstance(fn, trackers.MarkedTracker) and fn.of_a_compiler() else "call_active"
    )
    return f"{caller}({', '.join([c.em.value(fn), *texts[:split], *keywords])})"


@form("CALL")
def _call(c: FormContext) -> Outcome:
    names = _keyword_names(c.frame.code, c.frame, c.instruction)
    fn, values = split_call(c.frame.before, c.instruction.arg)
    return c.then(_call_text(c, fn, values, names), c.instruction.arg + 2, "r")


def _keyword_names(code: CodeType, frame: SymFrame, instruction: Instruction) -> tuple[str, ...]:
    """The names that KW_NAMES set for this CALL (3.11 puts PRECALL between the two)."""
    instructions = frame.decoded.instructions
    position = frame.decoded.index[instruction.offset] - 1
    if instructions[position].op == "PRECALL":
        position -= 1
    previous = instructions[position]
    names: tuple[str, ...] = code.co_consts[previous.arg] if previous.op == "KW_NAMES" else ()
    return names


@form("CALL_KW")
def _call_kw(c: FormContext) -> Outcome:
    names = c.frame.before[-1].try_const()
    assert names is not None
    fn, values = split_call(c.frame.before[:-1], c.instruction.arg)
    return c.then(_call_text(c, fn, values, names.value), c.instruction.arg + 3, "r")


@form("CALL_FUNCTION_EX")
def _call_ex(c: FormContext) -> Outcome:
    has_kwargs = c.instruction.arg & 1
    base = 3 + has_kwargs
    fn = c.v(base) if VERSION >= (3, 13) else c.v(base - 1)
    text = f"call_active({fn}, *{c.v(1 + has_kwargs)}{f', **{c.v(1)}' if has_kwargs else ''})"
    return c.then(text, base, "r")


@form("IMPORT_NAME")
def _import_name(c: FormContext) -> Outcome:
    name, globals_name = repr(c.instruction.argval), c.em.const(c.frame.globals, "globals_")
    return c.then(c.active(builtins.__import__, name, globals_name, "None", c.v(1), c.v(2)), 2, "r")


def has_form(frame: SymFrame, instruction: Instruction) -> bool:
    """Whether the instruction can be executed by generated code in this state."""
    if instruction.op not in FORMS:
        return False
    if instruction.op == "RAISE_VARARGS" and instruction.arg == 0:
        return frame.decoded.handler_at(instruction.offset) is not None
    if instruction.op == "CALL_INTRINSIC_2":
        return instruction.arg == 1
    return not (
        instruction.op == "CALL"
        and any(isinstance(value, trackers.Tracker) and value is NULL for value in frame.before[len(frame.before) - instruction.arg :])
    )
