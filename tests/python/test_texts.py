"""str, repr, format and `%` of values that answer for themselves; texts of exceptions."""

from __future__ import annotations

import pytest

from tests.python.programs import Program, Programs, check

programs = Programs()


class Text(str):
    pass


class Says:
    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text

    def __repr__(self):
        return self.text


class Raises:
    def __format__(self, spec):
        raise KeyError("own")

    def __repr__(self):
        raise ValueError("repr")


class Plain:
    def __format__(self, spec):
        return object.__format__(self, spec)

    def __str__(self):
        return "plain"


class Whole:
    def __int__(self):
        return 3


class Index:
    def __index__(self):
        return 5


def _said(*actions):
    said = []
    for action in actions:
        try:
            said.append(action())
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@programs.add()
def a_str_of_the_programs_own_class_stays_one(x):
    says = Says(Text("é"))
    return x + 1, type(str(says)), type(repr(says)), type(ascii(says)), type(ascii(Says(Text("e")))), type(f"{says}"), type(str(Text("a")))


@programs.add()
def texts_of_exceptions(x):
    said = []
    for action in (
        lambda: b"+@".decode("utf-7"),
        lambda: b"\xff".decode(),
        lambda: "\xff".encode("ascii"),
        lambda: int("q"),
        lambda: {}["k"],
    ):
        try:
            action()
        except (ValueError, KeyError) as error:
            said += [str(error), repr(error), f"{error}"]
    late = UnicodeDecodeError("utf8", b"abc", 0, 2, "why")
    late.start = 1
    made = [late, SyntaxError("bad", ("f.py", 3, 2, "text")), ImportError("no", name="q"), OSError(2, "gone", "file"), OSError(2, "gone")]
    return x + 1, said, [str(error) for error in made]


DECODE = UnicodeDecodeError("utf8", b"abc", 0, 2, "why")
MISSING = OSError(2, "gone", "file")


@programs.add()
def texts_of_exceptions_from_outside(x):
    return x + 1, str(DECODE), str(MISSING), repr(MISSING), f"{MISSING}", "%s" % DECODE


@programs.add()
def what_formatting_raises(x):
    return x + 1, _said(
        lambda: "{}".format(Raises()),
        lambda: "%r" % Raises(),
        lambda: "{0.nope}".format(Raises()),
        lambda: "%x" % Whole(),
        lambda: "%d" % Whole(),
        lambda: "%x %d" % (Index(), Index()),
        lambda: "%d" % Plain(),
        lambda: "%f" % Plain(),
        lambda: "%c" % Plain(),
        lambda: "{0[1]}".format(Plain()),
    )


@programs.add(graphs=None)
def object_format_with_a_specification(x):
    return x + 1, _said(lambda: "{0:>5}".format(Plain()), lambda: f"{Plain():>5}", lambda: "{0}".format(Plain()))


@programs.add()
def a_copy_of_a_frozenset_is_itself(x):
    made = frozenset([1, "a"])
    return x + 1, made.copy() is made, id(made) == id(made.copy())


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)
