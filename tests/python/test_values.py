"""Numbers, strings, formatting, builtins on constants."""

# ruff: noqa

from __future__ import annotations

import math

import pytest
import torch

from tests.python.programs import Program, Programs, X, check

programs = Programs()


@programs.add(X, 3, 2.5, True)
def arithmetic(x, n, f, b):
    return (
        x * n,
        n // 2,
        n % 2,
        n**3,
        -n,
        ~n,
        n << 2,
        n >> 1,
        n & 1,
        n | 4,
        n ^ 7,
        f / 2,
        divmod(7, n),
        round(f),
        round(2.567, 2),
        abs(-f),
        b + 1,
        n / 2,
        pow(n, 2, 5),
        int(f),
        float(n),
        complex(n, 1),
        bool(n),
    )


@programs.add(X, 3)
def the_math_module(x, n):
    return (
        x * math.sqrt(n),
        math.pi,
        math.floor(2.7),
        math.ceil(2.1),
        math.log(8, 2),
        math.prod([1, 2, n]),
        math.gcd(12, 8),
        math.isnan(float("nan")),
        math.inf > n,
        math.isclose(1.0, 1.0 + 1e-12),
    )


@programs.add(X, "name")
def strings(x, s):
    return (
        x,
        s.upper(),
        s + "!",
        s * 2,
        f"{s!r:>8}|{3.14159:.2f}|{10:05d}",
        "%s-%d" % (s, 4),
        f"{s}/{1}",
        s[1:3],
        "a,b".split(","),
        "-".join(["x", s]),
        s.startswith("na"),
        s.replace("a", "o"),
        "  z ".strip(),
        s.find("m"),
        "A" in s,
        len(s),
        s == "name",
        s < "zzz",
        [c for c in s],
        "x".join(str(i) for i in range(3)),
        s.encode(),
        ord("a"),
        chr(98),
        "a\nb".splitlines(),
        "abc".partition("b"),
    )


@programs.add()
def formatting_shapes(x):
    return (
        f"{x.shape} {tuple(x.shape)} {list(x.shape)} {x.dtype} {x.device} {x.ndim}",
        str(x.shape[0]),
        repr((1, "a", None)),
        str([1, {"k": 2}]),
    )


@programs.add()
def type_queries(x):
    return (
        x,
        int is int,
        isinstance(1, (int, str)),
        isinstance(True, int),
        issubclass(bool, int),
        callable(len),
        callable(3),
        type(x) is torch.Tensor,
        isinstance(x, torch.Tensor),
        type([]).__name__,
        isinstance([], list),
        hasattr("a", "upper"),
        getattr("a", "upper")(),
    )


@programs.add()
def integer_representations(x):
    return (
        x,
        bin(5),
        hex(255),
        oct(8),
        int("ff", 16),
        float("1e3"),
        (5).bit_length(),
        (2.5).is_integer(),
        str(1e20),
        1_000,
        0.1 + 0.2,
        -7 // 2,
        -7 % 3,
        7.5 // 2,
    )


@programs.add()
def printing(x):
    print("hello", x.shape, 3, sep="-")
    return x + 1


@programs.add(X, None, ...)
def none_and_ellipsis(x, none, dots):
    return x[dots, 0] if none is None else x, none, dots is ..., [none] * 2


@programs.add(X, slice(0, 2), range(3), torch.float64, torch.Size([4, 3]))
def unusual_arguments(x, s, r, dtype, size):
    return x[s], [i for i in r], x.to(dtype), x.reshape(size), s.stop, len(r), r[1], dtype.is_floating_point, size.numel(), size[0]


@programs.add(X, 3)
def numbers_too_large_for_text(x, n):
    return x + 1, 10**6000 + 1, [n ** (9000 * n)]


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)
