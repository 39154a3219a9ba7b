"""Built-in functions and types, and the small modules of the standard library."""

# ruff: noqa

from __future__ import annotations

import builtins
import cmath
import contextvars
import datetime
import decimal
import fractions
import inspect
import json
import math
import numbers
import os
import random
import re
import string
import struct
import sys
import textwrap
import time
import weakref
from collections.abc import Mapping, Sequence

import pytest
import torch

from tests.python.programs import Program, Programs, X, Y, check

programs = Programs()
PATTERN = re.compile(r"(\w)(\d+)")
VARIABLE = contextvars.ContextVar("VARIABLE", default=3)
os.environ.setdefault("MAGNETO_TEST_VALUES", "here")


class Plain:
    """doc"""

    def __init__(self, a=1):
        self.a = a

    def method(self, p, q=2, *args, k, **kw):
        return p

    @staticmethod
    def static():
        pass


def annotated(a: int, b: "str" = "x", *rest, c: float = 1.0, **kw) -> bool:
    """doc of annotated"""
    return True


@programs.add()
def slices(x):
    s = slice(1, None, 2)
    items = list(range(10))
    return (
        s.indices(6),
        s.start,
        s.stop,
        s.step,
        items[s],
        items[::-1],
        items[-3:],
        x[:, s],
        slice(3) == slice(None, 3),
        slice(None).indices(4),
        "abcdef"[slice(1, 4)],
        (1, 2, 3)[5:1:-1],
        repr(slice(1, 2)),
        range(10)[2:8:3],
        range(20)[slice(-5, None)],
    )


@programs.add(X, slice(1, 3))
def slice_argument(x, s):
    return x[s], s.indices(2), [1, 2, 3, 4][s], s.start + 1


@programs.add()
def ranges(x):
    r = range(2, 20, 3)
    return (
        r[1],
        r[-1],
        r[1:3],
        len(r),
        5 in r,
        6 in r,
        r.index(8),
        r.count(2),
        r.start,
        r.stop,
        r.step,
        list(reversed(r)),
        r == range(2, 19, 3),
        bool(range(0)),
        hash(r) == hash(range(2, 20, 3)),
        list(r),
        sum(r),
        max(r),
        [*range(3)],
        repr(r),
        x + len(r),
    )


@programs.add(range(3), X)
def range_argument(r, x):
    for i in r:
        x = x + i
    return x, len(r)


@programs.add()
def bytes_and_friends(x):
    b = b"abc"
    a = bytearray(b)
    a.append(100)
    a[0] = 65
    a += b"!"
    a.extend([1, 2])
    m = memoryview(b"hello")
    return (
        b[0],
        b[1:],
        b + b"d",
        list(b),
        b.hex(),
        b.decode(),
        bytes([1, 2]),
        bytes(3),
        a,
        len(a),
        bytes(a),
        a.find(b"b"),
        m[1],
        bytes(m[1:3]),
        m.tobytes(),
        len(m),
        b"%d" % 3,
        "é".encode(),
        b in b"xabcx",
        int.from_bytes(b, "big"),
        (300).to_bytes(2, "little"),
        bytearray(2),
        a[1:3],
        x + 1,
    )


@programs.add(bytearray(b"xy"), b"k", X)
def bytearray_argument(a, b, x):
    a.append(1)
    a[0] = 5
    a.extend(b)
    return len(a), a[0], bytes(a), x + a[1]


@programs.add()
def complex_numbers(x):
    z = 3 + 4j
    return (
        abs(z),
        z.real,
        z.imag,
        z.conjugate(),
        z * 2,
        z**2,
        complex(1, 2),
        complex("1+2j"),
        z == complex(3, 4),
        -z,
        z / (1 - 1j),
        cmath.phase(z),
        cmath.sqrt(-1),
        hash(z) == hash(3 + 4j),
        bool(0j),
        x * z.real,
        str(z),
        x * z,
    )


@programs.add()
def big_integers(x):
    n = 2**100
    return (
        n,
        n // 3,
        n % 7,
        -n,
        n.bit_length(),
        n & 0xFF,
        n >> 90,
        int("123456789" * 3),
        pow(3, 200, 1000),
        divmod(n, 10**9),
        -7 // 2,
        -7 % 3,
        int("ff", 16),
        int("0b11", 0),
        (10).bit_count(),
        ~5,
        1 << 70,
        n == float(n),
        int(1e20),
        math.isqrt(n),
        hash(n),
        (5).numerator,
        True + True,
        x + 1,
    )


@programs.add()
def signed_zeros_and_nans(x):
    nan = float("nan")
    d = {1: "int", 1.0: "float", True: "bool"}
    return (
        -0.0,
        math.copysign(1, -0.0),
        0.0 == -0.0,
        nan == nan,
        nan in [nan],
        [nan] == [nan],
        nan is nan,
        {nan: 1}[nan],
        d,
        list(d),
        {0: 1}[-0.0],
        {0.0, -0.0},
        type(list({True, 1})[0]).__name__,
        max(nan, 1) is nan,
        min(1, nan),
        x * -0.0,
        float("inf") - float("inf"),
        1e308 * 10,
        str(-0.0),
        (1, True, 1.0),
        [type(v).__name__ for v in (1, True, 1.0)],
    )


@programs.add(-0.0, 1, True, 1.0, X)
def kinds_of_one(z, i, b, f, x):
    return (
        math.copysign(x, torch.tensor(z)) if False else x * z,
        i is b,
        i == b == f,
        type(i).__name__,
        type(b).__name__,
        {i: "x"}[f],
        str(z),
        [i, b, f],
    )


@programs.add()
def float_methods(x):
    return (
        (2.5).is_integer(),
        (0.5).as_integer_ratio(),
        (255.5).hex(),
        float.fromhex("0x1p3"),
        round(2.5),
        round(3.14159, 2),
        round(1234, -2),
        7.5 // 2,
        -7.5 % 2,
        divmod(7.5, 2),
        math.fsum([0.1] * 10),
        sum([0.1] * 3),
        float("1e3"),
        int(3.9),
        int(-3.9),
        0.1 + 0.2,
        1 / 3,
        2**-1,
        2**0.5,
        10**-2,
        x * 0.1,
    )


@programs.add()
def str_methods(x):
    s = "  Hello, World  "
    return (
        s.strip(), s.lower(), s.split(","), s.replace("l", "L"), s.find("World"), s.strip().startswith(("He", "x")), "a-b-c".rsplit("-", 1), "-".join(["a", "b"]), "abc".center(9, "*"), "%05.2f|%-5s|%x|%r" % (3.14159, "ab", 255, "q"), "{:>8}|{:<5}|{:^7}|{:,}|{:.3e}".format("r", "l", "c", 1234567, 0.00123),
        "{0[a]} {1.a}".format({"a": 1}, Plain()), "abc".translate(str.maketrans("ab", "xy")), "Abc".swapcase(), "x".isalpha(), "1".isdigit(), "ab".partition("a"), "a\nb".splitlines(), "abc"[::-1], "b" in "abc", "a" * 3, "abc" < "abd", ord("a"), chr(98), ascii("é"), "tEST".title(), "x".zfill(3), "prefix_a".removeprefix("prefix_"), f"{3.14159:.2f} {42:#x} {'s'!r:>5} {1 + 1=}", "a,b".split(",", maxsplit=1), "é".encode("utf-8"), "abc".index("c"), "%(k)s" % {"k": 1}, "%s" % (x.shape,), f"{x.shape}", "abc".count("b"), "A".casefold(), "a\tb".expandtabs(4), "{}".format(x.dim()), str(b"ab", "ascii"), "abc".endswith("c"), max("abc"), sorted("bca"), list(enumerate("ab")), "ab" "cd", "%d%%" % 5, "{{}}".format(), textwrap.dedent("  a\n  b"), string.ascii_lowercase[:3], string.capwords("a b"), string.Template("$a b").substitute(a=1),
    )  # fmt: skip


@programs.add()
def text_of_containers(x):
    p = Plain()
    return (
        str([1, "a", None, 1.5, (2,), {"k": [3]}, {1}, frozenset([2]), range(3), slice(1), b"x", True, ...]),
        repr({"a": {"b": ()}}),
        str(set()),
        repr({1: 2}.keys()),
        str({}.items()),
        repr([[]]),
        str((int, str)),
        f"{[1, 2]}",
        "%s %s" % ([1], {"a": 1}),
        str(None),
        repr("it's"),
        str(ValueError("e")),
        repr(KeyError("k")),
        str(KeyError("k")),
        str(Exception(1, 2)),
        str(x.dtype),
        str(x.device),
        repr(x.shape),
        str(annotated.__name__),
        x + 1,
    )


@programs.add()
def type_functions(x):
    p = Plain()
    return (
        isinstance(True, int), issubclass(bool, int), callable(len), callable(3), callable(Plain), callable(p.method), type(p) is Plain, type(3)(4), type(p)(5).a, hasattr(p, "a"), getattr(p, "zz", None), len({1: 2}), hash("a") == hash("a"), hash((1, "b")) == hash((1, "b")), hash(None) == hash(None), type(None).__name__, type(type).__name__, type(...).__name__,
        isinstance(int, type), int.__name__, type([]).__name__, type(lambda: 0).__name__, type(x).__name__, p.__class__ is Plain, Plain.__doc__, Plain.__module__, Plain.__qualname__, sorted(vars(p)), p.__dict__, Plain.__dict__["__doc__"], "method" in dir(p), "a" in dir(p), dir(Plain) == dir(Plain), sorted(n for n in dir(p) if not n.startswith("__")), x + 1,
    )  # fmt: skip


@programs.add()
def numeric_functions(x):
    return (
        round(2.675, 2),
        divmod(-7, 2),
        pow(2, 10),
        pow(2, -1),
        pow(3, -1, 7),
        abs(-3),
        abs(-2.5),
        bin(5),
        hex(255),
        oct(8),
        int("7"),
        float("2.5"),
        sum([1, 2], 10),
        sum([[1], [2]], []),
        min(3, 1, 2),
        max([1, 5], key=lambda v: -v),
        min([], default=0),
        max("a", "b"),
        any([0, 1]),
        all([]),
        ord("z"),
        chr(97),
        sum([x, x]),
        math.prod([2, 3]),
        math.gcd(12, 18),
        math.lcm(4, 6),
        math.comb(5, 2),
        math.perm(4, 2),
        math.factorial(5),
        math.hypot(3, 4),
        math.dist([0, 0], [3, 4]),
        math.log(8, 2),
        math.floor(2.7),
        math.ceil(2.1),
        math.trunc(-2.7),
        math.isclose(0.1 + 0.2, 0.3),
        math.isnan(math.nan),
        math.inf,
        math.pi,
        math.tau,
        math.e,
        math.modf(2.5),
        math.frexp(8.0),
        math.ldexp(0.5, 3),
        math.fmod(7, 3),
        math.remainder(7, 4),
        math.degrees(1),
        math.erf(0.5),
        math.sqrt(2),
        math.cbrt(27),
        math.exp2(3),
        math.nextafter(1, 2),
        math.sumprod([1, 2], [3, 4]) if hasattr(math, "sumprod") else 0,
    )


@programs.add()
def iteration_functions(x):
    e = enumerate("ab", start=1)
    z = zip([1, 2], "ab", strict=True)
    texts = []
    for fn in (
        lambda: list(zip([1], [1, 2], strict=True)),
        lambda: next(iter([])),
        lambda: iter(3),
        lambda: next([1]),
        lambda: min([]),
        lambda: reversed({1}),
    ):
        try:
            texts.append(fn())
        except Exception as error:
            texts.append(type(error).__name__ + str(error))
    it = iter([1, 2, 3])
    return (
        next(e),
        list(z),
        list(map(lambda a, b: a + b, [1, 2], [3, 4])),
        list(filter(None, [0, 1])),
        list(reversed([1, 2])),
        list(reversed({"a": 1, "b": 2})),
        sorted([3, 1], reverse=True),
        sorted(["b", "A"], key=str.lower),
        list(zip()),
        list(zip(*[(1, 2), (3, 4)])),
        next(it),
        next(iter([]), "d"),
        list(iter(lambda: next(it), 3)),
        [*map(str, range(2))],
        dict(zip("ab", [1, 2])),
        {k: v for k, v in {"a": 1}.items()},
        texts,
        list(range(3))[::-1],
        x + 1,
    )


@programs.add()
def dict_views_and_order(x):
    d = {"b": 1, "a": 2}
    k = d.keys()
    d["c"] = 3
    del d["b"]
    d["b"] = 4
    return (
        list(k),
        d.keys() & {"a", "z"},
        d.keys() | {"q"} >= {"q"},
        d.items() >= {("a", 2)},
        list(d.values()),
        "a" in d.keys(),
        2 in d.values(),
        ("a", 2) in d.items(),
        len(k),
        list(reversed(d)),
        d | {"z": 0},
        d.keys() == {"a", "c", "b"},
        dict(d, q=1),
        {**d, "a": 9},
        d.popitem(),
        list(d),
        d.pop("none", 1),
        d == {"c": 3, "a": 2},
        dict([("k", x)])["k"] is x,
        d.setdefault("n", []),
        dict.fromkeys("ab"),
        k - {"a"},
        k.isdisjoint(["zz"]),
        d.keys() <= {"a", "b", "c", "n"},
    )


@programs.add({"a": 1, "b": 2}, X)
def dict_changed_while_iterated(d, x):
    try:
        for k in d:
            d[k + "x"] = 1
    except RuntimeError as error:
        text = str(error)
    e = {1: 1, 2: 2}
    try:
        for k in e:
            del e[k]
    except RuntimeError as error:
        text2 = str(error)
    s = {1, 2}
    try:
        for v in s:
            s.add(v + 10)
    except RuntimeError as error:
        text3 = str(error)
    for k in list(e):
        del e[k]
    return text, text2, text3, e, len(d), x + 1


@programs.add()
def decimals_and_fractions(x):
    d = decimal.Decimal("1.10") + decimal.Decimal(2)
    f = fractions.Fraction(1, 3) + fractions.Fraction(1, 6)
    return (
        str(d),
        d == decimal.Decimal("3.1"),
        f == fractions.Fraction(1, 2),
        f.numerator,
        float(f),
        float(d),
        x * float(f),
        d,
        f,
        d * 2,
        f * 2,
        round(d, 1),
        f < 1,
        str(f),
        int(d),
    )


@programs.add(decimal.Decimal("1.5"), fractions.Fraction(3, 4), X)
def decimal_arguments(d, f, x):
    return float(d) * x, f.denominator, x * float(f), d + 1, f + 1


@programs.add()
def regular_expressions(x):
    m = PATTERN.match("a12 b3")
    return (
        m.group(1),
        m.groups(),
        m.span(),
        re.sub(r"\d", "#", "a1b2"),
        re.split(r"\s+", "a b  c"),
        re.findall(r"\d+", "1 22"),
        bool(re.search("z", "abc")),
        PATTERN.pattern,
        re.compile("x+").fullmatch("xxx").end(),
        re.escape("a.b"),
        [g.group() for g in PATTERN.finditer("a1b2")],
        m[2],
        re.IGNORECASE.value,
        x * int(m.group(2)),
    )


@programs.add("layer.10.weight", X)
def regular_expression_on_argument(name, x):
    m = re.match(r"layer\.(\d+)\.", name)
    return x + int(m.group(1)) if m else x


@programs.add()
def serialisation(x):
    return (
        json.dumps({"a": [1, None, True, 1.5, "s"]}),
        json.loads('{"k": [1, 2.5, null]}'),
        json.dumps([1, {"b": 2}], sort_keys=True, indent=1),
        struct.pack("<if", 3, 1.5),
        struct.unpack("<i", b"\x01\x00\x00\x00"),
        struct.calcsize("2d"),
        x + 1,
    )


@programs.add()
def dates(x):
    d = datetime.date(2024, 2, 29)
    t = datetime.timedelta(days=1, hours=2)
    when = datetime.datetime(2024, 1, 2, 3, 4, 5)
    return (
        d.year,
        (d + t).isoformat(),
        t.total_seconds(),
        d.weekday(),
        str(when),
        when.strftime("%Y"),
        (when - datetime.datetime(2024, 1, 1)).days,
        d < datetime.date(2025, 1, 1),
        x * t.days,
        d,
        t,
        when.replace(year=2020),
    )


@programs.add()
def inspection(x):
    sig = inspect.signature(annotated)
    bound = sig.bind(1, "s", 3, c=2.0, z=9)
    bound.apply_defaults()
    p = Plain()
    members = [n for n, _ in inspect.getmembers(p) if not n.startswith("_")]
    spec = inspect.getfullargspec(annotated)
    return (
        list(sig.parameters),
        sig.parameters["b"].default,
        sig.parameters["c"].kind.name,
        str(sig.return_annotation),
        bound.arguments,
        bound.args,
        bound.kwargs,
        inspect.isfunction(annotated),
        inspect.ismethod(p.method),
        inspect.isclass(Plain),
        inspect.isbuiltin(len),
        inspect.ismodule(math),
        members,
        spec.args,
        spec.varargs,
        spec.defaults,
        spec.kwonlydefaults,
        inspect.getdoc(annotated),
        callable(annotated),
        inspect.isgeneratorfunction(annotated),
        inspect.iscoroutinefunction(annotated),
        list(inspect.signature(p.method).parameters),
        list(inspect.signature(Plain).parameters),
        inspect.unwrap(annotated) is annotated,
        inspect.getmro(Plain)[0] is Plain,
        inspect.isabstract(Plain),
        inspect.signature(annotated).parameters["a"].annotation,
        inspect.Parameter.empty is sig.parameters["a"].default,
        x + 1,
    )


@programs.add()
def signature_of_local(x):
    def local(a, *, b=2):
        return a

    lam = lambda q, r=3: q
    sig = inspect.signature(local)
    kwargs = {k: v for k, v in {"a": x, "b": 1, "c": 2}.items() if k in sig.parameters}
    return (
        local(**kwargs),
        list(inspect.signature(lam).parameters),
        sig.parameters["b"].default,
        local.__code__.co_argcount,
        local.__code__.co_varnames,
        local.__kwdefaults__,
        lam.__defaults__,
    )


@programs.add()
def modes_and_systems(x):
    return (
        torch.compiler.is_compiling() in (True, False),
        sys.version_info >= (3, 8),
        sys.platform,
        sys.maxsize,
        sys.byteorder,
        sys.float_info.epsilon,
        sys.getrecursionlimit() > 0,
        "math" in sys.modules,
        sys.version_info[0],
        sys.version_info.major,
        os.environ.get("MAGNETO_TEST_VALUES"),
        os.environ["MAGNETO_TEST_VALUES"],
        os.getenv("MAGNETO_NO_SUCH", "d"),
        "MAGNETO_NO_SUCH" in os.environ,
        os.sep,
        sys.getsizeof(1) > 0,
        sys.implementation.name,
        sys.hexversion,
        x + 1,
    )


@programs.add()
def context_variables(x):
    before = VARIABLE.get()
    token = VARIABLE.set(before + 1)
    inner = VARIABLE.get()
    VARIABLE.reset(token)
    return before, inner, VARIABLE.get(), x * inner, VARIABLE.name


@programs.add()
def weak_references(x):
    p = Plain(4)
    r = weakref.ref(p)
    return r() is p, r().a, x * r().a, weakref.ref(p) is r or True, isinstance(r, weakref.ref), r == weakref.ref(p)


@programs.add(Plain(6), X)
def weak_references_to_arguments(p, x):
    r = weakref.ref(p)
    return x * r().a, r() is p


@programs.add(graphs=None, again=False)
def random_module(x):
    random.seed(5)
    a = (
        random.random(),
        random.randint(1, 10),
        random.choice("abc"),
        random.uniform(0, 1),
        random.gauss(0, 1),
        random.sample(range(10), 3),
        random.randrange(5),
        random.getrandbits(8),
    )
    items = [1, 2, 3, 4]
    random.shuffle(items)
    r = random.Random(3)
    b = r.random(), r.randint(0, 5), r.choices([1, 2], k=2)
    state = random.getstate()
    c = random.random()
    random.setstate(state)
    return a, items, b, c == random.random(), x * a[0]


@programs.add(random.Random(7), X, graphs=None, again=False)
def random_instance(r, x):
    return x * r.random(), r.randint(0, 100), r.gauss(0, 1), r.choice([1, 2, 3])


@programs.add()
def unusual_constants(x):
    return (
        1_000,
        0x1F,
        0b11,
        0o17,
        1e-5,
        "\n",
        r"\n",
        b"\x00",
        ...,
        None is None,
        NotImplemented is NotImplemented,
        __name__,
        __debug__,
        1 if x is not None else 2,
        (),
        [],
        {},
        (3).__add__(4),
        "a".__len__(),
        (1).__class__.__name__,
        [].__class__ is list,
        (5).real,
        int.__add__(2, 3),
        str.upper("a"),
        list.__len__([1]),
        dict.get({"a": 1}, "a"),
        float.__mul__(2.0, 3.0),
        object().__class__.__name__,
        int.__doc__ is not None,
    )


@programs.add()
def identity_and_ids(x):
    a, b = [1], [1]
    p = Plain()
    table = {id(a): "a", id(p): "p"}
    return (
        a is b,
        a is a,
        id(a) == id(a),
        id(a) != id(b),
        table[id(a)],
        id(p) in table,
        id(x) == id(x),
        len({id(a), id(b)}),
        p.method is p.method,
        p.method == p.method,
        p.static is p.static,
        (torch.mul == torch.mul, torch.mul == torch.add, torch.mul == torch.Tensor.mul, torch.mul != math.sin, len == None, len != "len"),  # noqa: E711
        (torch.add in (torch.mul, torch.Tensor.add, torch.add), math.cos in [math.sin], {torch.mul: 1, len: 2}.get(torch.mul)),
        x is x,
        type(p) is type(Plain()),
        tuple() is tuple(),
        x + 1,
    )


@programs.add()
def abstract_numbers(x):
    return (
        isinstance(1, numbers.Number),
        isinstance(1.0, numbers.Integral),
        isinstance(2j, numbers.Complex),
        isinstance([], Sequence),
        isinstance({}, Mapping),
        isinstance("s", Sequence),
        issubclass(dict, Mapping),
        issubclass(list, Sequence),
        isinstance(x, numbers.Number),
        isinstance((), Sequence),
    )


@programs.add()
def compiling_flags(x):
    return (
        x + (1 if torch.compiler.is_compiling() else 1),
        x * (2 if torch.jit.is_scripting() else 3),
        x.requires_grad,
        torch.is_grad_enabled(),
        torch.jit.is_tracing(),
    )


@programs.add()
def local_names(x):
    a = 1
    found = sorted(locals())
    g = globals()["PATTERN"] is PATTERN
    return found, g, "X" in globals(), sorted(vars())[:2], x + a, builtins.len([1]), __builtins__ is not None


@programs.add()
def list_details(x):
    a = [1, 2, 3, 4, 5]
    a[1:3] = [9]
    a[::2] = ["p", "q"]
    del a[0]
    b = a * 2
    b *= 2
    a += (7,)
    a.extend(v for v in range(2))
    c = [[0] * 2 for _ in range(2)]
    c[0][1] = x
    d = [[]] * 2
    d[0].append(1)
    texts = []
    for fn in (
        lambda: a[99],
        lambda: a["x"],
        lambda: a.index("zz"),
        lambda: [].pop(),
        lambda: a.remove(99),
        lambda: [1] + (2,),
        lambda: [3, "a"].sort(),
        lambda: [1, 2].insert("a", 1),
        lambda: a.pop(50),
        lambda: (1,)[3],
        lambda: [1] * "a",
        lambda: a.__setitem__(50, 1),
    ):
        try:
            texts.append(fn())
        except Exception as error:
            texts.append(type(error).__name__ + ": " + str(error))
    return (
        a,
        b,
        c,
        d,
        texts,
        [1, 2] < [1, 3],
        [1] == (1,),
        [x] == [x],
        sorted([(2, "b"), (1, "c")]),
        [3, 1, 2].sort(),
        (1, 2) + (3,),
        (1,) * 3,
        (1, 2, 1).count(1),
        (3, 4).index(4),
        tuple("ab"),
        (1, (2, 3))[1][0],
    )


class _TooLong:
    def __len__(self):
        return sys.maxsize + 1


class _Irreversible:
    __reversed__ = None

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return 1


@programs.add(graphs=None)
def what_only_classes_of_c_know(x):
    said = []
    for action in (
        lambda: str(list[int] | str),
        lambda: str(str | list[int]),
        lambda: list[int] | 3,
        lambda: len(_TooLong()),
        lambda: bool(_TooLong()),
        lambda: reversed(_Irreversible()),
    ):
        try:
            said.append(action())
        except (TypeError, OverflowError) as error:
            said.append(str(error))
    return x + 1, said


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)
