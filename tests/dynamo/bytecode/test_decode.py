"""Decoding against `dis` on whole modules of the standard library (runs on every supported Python, without torch)."""

from __future__ import annotations

import argparse
import asyncio.base_events
import dataclasses
import dis
import inspect
import json.decoder
import typing
from collections.abc import Iterator
from types import CodeType

import pytest

from magneto.dynamo.bytecode.decode import decode
from magneto.dynamo.bytecode.liveness import live_slots


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from codes(const)


pytestmark = pytest.mark.torchfree

MODULES = (asyncio.base_events, json.decoder, inspect, argparse, typing, dataclasses)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_decoding_agrees_with_dis(module: typing.Any) -> None:
    source = open(module.__file__).read()
    for code in codes(compile(source, module.__file__, "exec")):
        decoded = decode(code)
        expected = [i for i in dis.get_instructions(code) if i.opname not in ("EXTENDED_ARG", "CACHE")]
        assert [i.op for i in decoded.instructions] == [i.opname for i in expected]
        for ours, theirs in zip(decoded.instructions, expected, strict=True):
            if ours.target >= 0:
                assert theirs.argval == ours.target
            elif theirs.opcode in dis.hasname:
                assert theirs.argval == ours.argval
            elif (theirs.opcode in dis.haslocal or theirs.opcode in dis.hasfree) and not isinstance(ours.argval, tuple):
                assert theirs.argval == decoded.slots[ours.argval]
            elif theirs.opname == "COMPARE_OP":
                assert theirs.argval.removeprefix("bool(").rstrip(")") == ours.argval
        table = [(e.start, e.end, e.target, e.depth, e.lasti) for e in dis._parse_exception_table(code)]  # type: ignore[attr-defined]
        assert table == [(h.start, h.end, h.target, h.depth, h.lasti) for h in decoded.handlers]


def test_next_is_the_following_instruction() -> None:
    instructions = decode(test_next_is_the_following_instruction.__code__).instructions
    for one, following in zip(instructions, instructions[1:], strict=False):
        assert decode(test_next_is_the_following_instruction.__code__).index[one.next] == instructions.index(following)


def test_liveness_of_a_branch() -> None:
    def f(a, b, c):  # type: ignore[no-untyped-def]
        d = a + b
        if c:
            return d
        return b

    code = f.__code__
    names = decode(code).slots
    first = {names[slot] for slot in live_slots(code, 0)}
    assert first == {"a", "b", "c"}
    branch = next(i for i in decode(code).instructions if "POP_JUMP" in i.op)
    assert {names[slot] for slot in live_slots(code, branch.offset)} == {"b", "d"}
    assert {names[slot] for slot in live_slots(code, branch.target)} == {"b"}


def test_liveness_follows_handlers_and_loops() -> None:
    def f(items, total, spare):  # type: ignore[no-untyped-def]
        try:
            for item in items:
                total = total + item
        except ValueError:
            return spare
        return total

    code = f.__code__
    names = decode(code).slots
    loop = next(i for i in decode(code).instructions if i.op == "FOR_ITER")
    assert {names[slot] for slot in live_slots(code, loop.offset)} == {"total", "spare"}


def test_frames_that_look_at_themselves_keep_everything() -> None:
    def f(a, b):  # type: ignore[no-untyped-def]
        c = a
        return locals()

    last = decode(f.__code__).instructions[-1]
    assert live_slots(f.__code__, last.offset) == {0, 1, 2}
