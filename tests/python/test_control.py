"""Exceptions, with-blocks, match statements, assertions."""

# ruff: noqa

from __future__ import annotations

import contextlib

import pytest
import torch
import magneto

from tests.python.programs import Program, Programs, X, check

programs = Programs()


class Custom(Exception):
    def __init__(self, code, text="t"):
        super().__init__(text)
        self.code = code


class Sub(Custom):
    pass


class Claims(type):
    def __instancecheck__(cls, value):
        return True

    def __subclasscheck__(cls, value):
        return True


class Claiming(Exception, metaclass=Claims):
    pass


def _complaint(kinds, star):
    found = "passed on"
    try:
        if star:
            try:
                raise ValueError
            except* kinds:
                found = "group caught"
        else:
            try:
                raise ValueError
            except kinds:
                found = "caught"
    except TypeError as error:
        return str(error), type(error.__context__)
    except (ValueError, ExceptionGroup) as error:
        return found, repr(error)
    return found


@programs.add(graphs=None)
def what_a_handler_may_name(x):
    kinds = (
        42,
        None,
        int,
        (ValueError, 42),
        (TypeError, int),
        (TypeError, (OSError, ValueError)),
        ExceptionGroup,
        (TypeError, ExceptionGroup),
        Claiming,
        (),
    )
    return x + 1, [_complaint(kind, star) for kind in kinds for star in (False, True)]


@programs.add()
def causes_are_exceptions(x):
    said = []
    for cause in (3, None, KeyError, KeyError("k"), int):
        try:
            raise ValueError from cause
        except TypeError as error:
            said.append(str(error))
        except ValueError as error:
            said.append(repr(error.__cause__))
    return x + 1, said


@programs.add()
def cycles_among_contexts(x):
    try:
        try:
            raise ValueError(1)
        except ValueError as first:
            first.__context__ = first
            raise TypeError(2)
    except TypeError as error:
        own = error.__context__.__context__ is error.__context__
    try:
        raise KeyError("a")
    except KeyError as a:
        try:
            raise KeyError("b")
        except KeyError as b:
            try:
                raise KeyError("c")
            except KeyError as c:
                a.__context__ = c
                try:
                    raise OSError("d")
                except OSError as d:
                    links = d.__context__ is c, c.__context__ is b, b.__context__ is a, a.__context__ is c
    return x + 1, own, links


@programs.add()
def try_except_else_finally(x):
    log = []
    for n in range(3):
        try:
            if n == 1:
                raise ValueError("one", n)
            if n == 2:
                raise KeyError("k")
        except ValueError as error:
            log.append(error.args)
        except (KeyError, IndexError) as error:
            log.append(str(error))
        else:
            log.append("else")
        finally:
            log.append(n)
    return x, log


@programs.add()
def custom_exceptions(x):
    try:
        raise Sub(3, text="hello")
    except Custom as error:
        return x * error.code, str(error), type(error).__name__, isinstance(error, Exception)


@programs.add()
def exception_in_a_callee(x):
    def fail(n):
        if n > 1:
            raise Custom(n)
        return n

    try:
        fail(1)
        fail(5)
    except Custom as error:
        x = x + error.code
    return x


@programs.add()
def nested_handlers(x):
    try:
        try:
            raise ValueError("inner")
        except ValueError as first:
            raise Custom(2) from first
    except Custom as second:
        return x, str(second.__cause__)


@programs.add()
def reraise(x):
    try:
        try:
            {}["a"]
        except KeyError:
            x = x + 1
            raise
    except LookupError:
        x = x * 2
    return x


@programs.add()
def finally_with_return(x):
    def f():
        try:
            return x + 1
        finally:
            log.append("done")

    log = []
    return f(), log


@programs.add()
def finally_runs_on_raise(x):
    log = []
    try:
        try:
            raise ValueError
        finally:
            log.append(1)
    except ValueError:
        log.append(2)
    return x, log


@programs.add()
def loop_control_in_try(x):
    for i in range(5):
        try:
            if i == 1:
                continue
            if i == 3:
                break
            x = x + i
        finally:
            x = x * 2
    return x


class Manager:
    def __init__(self, log, swallow=False):
        self.log = log
        self.swallow = swallow

    def __enter__(self):
        self.log.append("in")
        return self

    def __exit__(self, kind, value, trace):
        self.log.append("out" if kind is None else kind.__name__)
        return self.swallow


@programs.add()
def with_user_managers(x):
    log = []
    with Manager(log) as m, Manager(m.log, swallow=True):
        x = x + 1
        raise ValueError
    with Manager(log):
        x = x * 2
    return x, log


@contextlib.contextmanager
def scaling(log, k):
    log.append("start")
    try:
        yield k
    finally:
        log.append("stop")


@programs.add()
def with_generator_managers(x):
    log = []
    with scaling(log, 3) as k:
        x = x * k
    with contextlib.nullcontext(4) as n, contextlib.suppress(KeyError):
        x = x + n
        {}["a"]
    return x, log


@programs.add()
def grad_modes(x):
    w = torch.ones(4, requires_grad=True)
    a = w * x
    with torch.no_grad():
        b = w * 2
        with torch.enable_grad():
            c = w * 3
    with torch.set_grad_enabled(False):
        d = w * 4
    return a.requires_grad, b.requires_grad, c.requires_grad, d.requires_grad, torch.is_grad_enabled(), (a * 1).detach(), b


@programs.add()
def match_statements(x):
    def kind(v):
        match v:
            case 0:
                return "zero"
            case int() | float():
                return "number"
            case [a, *rest]:
                return f"list {a} {len(rest)}"
            case {"k": k, **others}:
                return f"dict {k} {len(others)}"
            case Custom(code=c):
                return f"custom {c}"
            case str() as s if s.startswith("x"):
                return s
            case None:
                return "none"
            case _:
                return "other"

    return x, [kind(v) for v in (0, 2, 2.5, [1, 2, 3], {"k": 1, "z": 2}, Custom(4), "xyz", "abc", None)]


@programs.add()
def assertions(x):
    assert x.dim() == 2, "two"
    try:
        assert x.shape[0] == 99, f"was {x.shape[0]}"
    except AssertionError as error:
        return x, str(error)
    return x


@programs.add()
def boolean_logic(x):
    a, b = 0, [1]
    return x if (a or b) and not (a and b) else None, a or "z", b and 3, 1 < 2 < 3, 1 < 2 > 5, None is None, a is not b


@programs.add()
def del_and_unbound(x):
    y = x + 1
    del y
    try:
        y
    except UnboundLocalError as error:
        return x, str(error)
    return y


@programs.add()
def name_errors(x):
    try:
        nothing_of_that_name  # noqa: B018, F821
    except NameError as error:
        return x, str(error)
    return x


@programs.add()
def type_errors(x):
    texts = []
    for attempt in (
        lambda: 1 + "a",
        lambda: [] < 3,
        lambda: len(5),
        lambda: None(),
        lambda: None.x,
        lambda: iter(3),
        lambda: {}.nope,
        lambda: -"a",
        lambda: int("z"),
    ):
        try:
            attempt()
        except Exception as error:
            texts.append((type(error).__name__, str(error)))
    return x, texts


class _Pair:
    __match_args__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b


class _Number(int):
    pass


@programs.add()
def class_patterns(x):
    found = []
    for subject in (_Pair(1, 2), _Number(4), 5, "s", {"k": 1}, object()):
        match subject:
            case _Pair(a, b=b):
                found.append(("pair", a, b))
            case _Number(n, real=r):
                found.append(("number", int(n), r))
            case int(n, imag=r):
                found.append(("int", n, r))
            case str(n):
                found.append(n)
            case {"k": v, **rest}:
                found.append((v, rest))
            case _:
                found.append(None)
    return x + 1, found


class _Asked:
    asked = 0

    @property
    def value(self):
        _Asked.asked += 1
        return 1


def test_a_pattern_reads_an_attribute_once() -> None:
    def look(x):
        match _Asked():
            case _Asked(value=v):
                return x + v

    magneto.optimize("eager")(look)(X)
    assert _Asked.asked == 1


@programs.add(graphs=None, again=False)
def patterns_that_are_refused(x):
    class Twice:
        __match_args__ = ("a", "a")
        a = None

    class Single:
        __match_args__ = ("a",)
        a = None

    class Listed:
        __match_args__ = ["a"]
        a = None

    class Keys:
        KEY = "a"

    said = []
    for subject in (Twice(), Single(), Listed(), {"a": 1, "b": 2}, 3):
        try:
            match subject:
                case Twice(p, q):
                    said.append("twice")
                case Single(p, a=q):
                    said.append("single")
                case Listed(p):
                    said.append("listed")
                case {Keys.KEY: p, "a": q}:
                    said.append("keys")
                case int(p, q):
                    said.append("int")
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return x + 1, said


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)


def test_an_uncaught_exception_is_eagers() -> None:
    def program(x, log):
        log.append(1)
        y = x + 1
        log.append(y)
        raise Custom(3, "boom")

    check(Program(program, (X, []), None))


def autocasting(x):
    a = x @ x.T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = x @ x.T
        inside = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        with torch.autocast(device_type="cpu", enabled=False):
            c = x @ x.T
        d = torch.nn.functional.linear(x, x) + torch.softmax(b, -1)
    e = x @ x.T
    return a, b, c, d, e, inside, torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_autocast(backend: str) -> None:
    import magneto
    from tests.compare import assert_equal

    compiled = magneto.optimize(backend, nopython=True)(autocasting)
    assert_equal(compiled(X), autocasting(X), 1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(compiled(X), autocasting(X), 1e-2)
    assert_equal(compiled(X), autocasting(X), 1e-2)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_autocast_round_a_break(backend: str) -> None:
    import magneto
    from tests.compare import assert_equal

    def program(x, log):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.T
            log.append(y.float().sum().item())
            z = y @ y
        return y, z, z @ z, x @ x.T

    compiled = magneto.optimize(backend)(program)
    for _ in range(2):
        assert_equal(compiled(X, []), program(X, []), 1e-2)
        assert not torch.is_autocast_enabled("cpu")


def test_grad_modes_round_a_break() -> None:
    import magneto
    from tests.compare import assert_equal

    def program(w, log):
        with torch.no_grad():
            y = w * 2
            log.append(y.sum().item())
            z = y * w
            with torch.enable_grad():
                u = w * 3
                log.append(u.sum().item())
                v = w * 4
        return y, z, u.requires_grad, v.requires_grad, (w * 5).requires_grad, torch.is_grad_enabled()

    w = torch.ones(3, requires_grad=True)
    compiled = magneto.optimize("eager")(program)
    for _ in range(2):
        assert_equal(compiled(w, []), program(w, []))
        assert torch.is_grad_enabled()
