"""Functions that look at the frame that calls them see the user's frame, not a generated one."""

from __future__ import annotations

import inspect
import sys
import warnings

import pytest
import torch

import magneto
from tests.compare import same

X = torch.arange(3.0)


def with_locals(x):
    y = x.sin()
    names = sorted(locals())
    return y + len(names), names


def with_vars_and_dir(x):
    y = x.sin()
    return y, sorted(vars()), sorted(dir())


def with_eval(x):
    y = x.sin()
    return eval("y + x")


def with_exec(x):
    y = x.sin()
    space = {"y": y}
    exec("z = y * 2", space)
    return space["z"]


def with_getframe(x):
    y = x.sin()
    frame = sys._getframe()
    return y, frame.f_code.co_name, sorted(frame.f_locals)


def with_currentframe(x):
    y = x.sin()
    return y, inspect.currentframe().f_code.co_name


def with_globals(x):
    return x.sin() + len(globals()["X"]), globals()["__name__"]


def with_format_of_locals(x):
    n = 3
    return x * 2, "{n}".format(**locals())


class Base:
    def scale(self, x):
        return x * 2


class Derived(Base):
    def scale(self, x):
        return super().scale(x.sin()) + super().scale(x)


def with_super(x):
    return Derived().scale(x)


def helper_that_looks_up(depth):
    return sys._getframe(depth).f_code.co_name


def with_a_callee_that_looks_up(x):
    y = x.sin()
    return y, helper_that_looks_up(1)


PROGRAMS = [
    with_locals, with_vars_and_dir, with_eval, with_exec, with_getframe, with_currentframe, with_globals, with_format_of_locals, with_super,
    with_a_callee_that_looks_up,
]  # fmt: skip


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_the_users_frame_is_seen(fn):
    compiled = magneto.optimize("eager")(fn)
    for _ in range(2):
        same(fn, compiled, X)


def test_warnings_name_the_users_line():
    def fn(x):
        y = x.sin()
        warnings.warn("careful", stacklevel=1)
        return y

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        magneto.optimize("eager")(fn)(X)
    assert [(w.filename, w.lineno) for w in seen] == [(__file__, fn.__code__.co_firstlineno + 2)]
