"""The opcode table is complete for the running Python, and its effects are CPython's."""

from __future__ import annotations

import dis

import pytest

from magneto.dynamo.machine.handlers import BREAKING, EFFECTS, HANDLERS, UNSUPPORTED

REAL = {
    name
    for name, number in dis.opmap.items()
    if number < 256 and not name.startswith("INSTRUMENTED_") and name not in ("CACHE", "EXTENDED_ARG")
}


def test_every_opcode_has_a_row() -> None:
    assert REAL - set(HANDLERS) == set()


def test_a_row_has_one_verdict() -> None:
    assert not set(EFFECTS) & set(BREAKING)
    assert not set(EFFECTS) & set(UNSUPPORTED)
    assert not set(BREAKING) & set(UNSUPPORTED)


def test_reasons_are_given() -> None:
    assert all({**BREAKING, **UNSUPPORTED}.values())


# what a handler does in CPython's stead differs from the formal effect: FOR_ITER leaves the loop by popping, SEND and generators run a frame, CALL's kwargs
DIFFERENT = {"FOR_ITER", "SEND", "RETURN_GENERATOR", "YIELD_VALUE", "RERAISE", "RAISE_VARARGS", "END_FOR", "PUSH_EXC_INFO", "BEFORE_WITH"}


@pytest.mark.parametrize("name", sorted(REAL & set(EFFECTS) - DIFFERENT))
def test_effect_is_cpythons(name: str) -> None:
    before, after = (side.split() for side in EFFECTS[name].split("--"))
    if any(word.endswith(("*", "?")) for word in before + after):
        return
    number = dis.opmap[name]
    arg = None if number < dis.HAVE_ARGUMENT else 1 if name in ("COPY", "SWAP", "LIST_APPEND", "MAP_ADD", "SET_ADD") else 0
    assert dis.stack_effect(number, arg, jump=False) == len(after) - len(before)
