"""Functions with a short form for usual arguments, in vector loops: the arguments of a piece are looked at first, and the short form is taken for the whole piece.

Sines, cosines and tangents need arguments not far from 0, remainders of a division a quotient below 2^52. gcc makes vectors of no branch, and a form that is
exact for every argument costs five times as much (a remainder thirty times).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from magneto.inductor.codegen.cpp_ops import TURNS

NEAR = "131072.0f"
_ARGUMENT = r"(\w[\w.+-]*|\(-\w[\w.+-]*\))"
_CALL = re.compile(rf"\bmg_(?:({'|'.join(TURNS)})_f32\((\w+)\)|((?:fmod|remainder|floordiv)_f(?:32|64))\({_ARGUMENT}, {_ARGUMENT}\))")
_DEFINED = re.compile(r"\b(\w+) = ")


def turns(lines: Sequence[str]) -> bool:
    """Do statements of a loop call such a function?"""
    return any(_CALL.search(line) for line in lines)


def near(lines: Sequence[str]) -> list[str]:
    """The statements with the short forms."""
    return [_CALL.sub(lambda call: call[0].replace("mg_", "mg_near_", 1), line) for line in lines]


def looked_at(lines: Sequence[str]) -> list[str]:
    """Statements that set `far` where an argument needs the long form, and those that compute the arguments. (What a short form has made of one that is far does not matter.)"""
    calls = [call for line in lines for call in _CALL.finditer(line)]
    tests = {call[2]: NEAR for call in calls if call[1]} | {call[4]: f"__builtin_fabs({call[5]}) * 0x1p+52" for call in calls if call[3]}
    needed = {argument for call in calls for argument in (call[2], call[4], call[5])}
    found = [f"far |= __builtin_fabs({argument}) > {bound};" for argument, bound in tests.items()]
    for line in reversed(near(lines)):
        if not needed.isdisjoint(_DEFINED.findall(line)):
            needed.update(re.findall(r"\w+", line))
            found.insert(0, line)
    return found
