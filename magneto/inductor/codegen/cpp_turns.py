"""Sines, cosines and tangents in vector loops: the arguments of a piece are looked at first, and the short form, which needs them not far from 0, is taken for the whole piece.

gcc makes vectors of no branch, and a form that is exact for every argument costs five times as much.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from magneto.inductor.codegen.cpp_ops import TURNS

NEAR = "131072.0f"
_CALL = re.compile(rf"\bmg_({'|'.join(TURNS)})_f32\((\w+)\)")
_DEFINED = re.compile(r"\b(\w+) = ")


def turns(lines: Sequence[str]) -> bool:
    """Do statements of a loop call such a function?"""
    return any(_CALL.search(line) for line in lines)


def near(lines: Sequence[str]) -> list[str]:
    """The statements with the short forms."""
    return [_CALL.sub(r"mg_near_\1(\2)", line) for line in lines]


def looked_at(lines: Sequence[str]) -> list[str]:
    """Statements that set `far` where an argument needs the long form, and those that compute the arguments. (What a short form has made of one that is far does not matter.)"""
    arguments = dict.fromkeys(argument for line in lines for _, argument in _CALL.findall(line))
    needed, found = set(arguments), [f"far |= __builtin_fabsf({argument}) > {NEAR};" for argument in arguments]
    for line in reversed(near(lines)):
        if not needed.isdisjoint(_DEFINED.findall(line)):
            needed.update(re.findall(r"\w+", line))
            found.insert(0, line)
    return found
