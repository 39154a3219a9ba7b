"""What the text of kernels calls `lib`: jitted functions with torch's meaning where Triton's own differ. Imported only where Triton is installed.

Under Triton's interpreter, which has no libdevice, the same names are computed by torch on the CPU.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

FUNCTIONS = (
    "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh",
    "acosh", "atanh", "erf", "lgamma", "rsqrt", "atan2", "trunc", "rint", "fmod", "pow",
)  # fmt: skip


def _interpreted(name: str) -> Any:
    import torch
    from triton.runtime.interpreter import TensorHandle

    fn = getattr(torch, "round" if name == "rint" else name)

    def call(*args: Any) -> Any:
        shapes = [a.handle.data for a in args]
        numbers: Any = torch.broadcast_tensors(
            *(  # type: ignore[no-untyped-call]
                torch.from_numpy(x.copy()) for x in shapes
            )
        )
        first = max(args, key=lambda a: len(a.shape))
        return tl.tensor(TensorHandle(fn(*numbers).numpy(), first.handle.dtype), first.type)

    return call


globals().update({name: _interpreted(name) if INTERPRETED else getattr(libdevice, name) for name in FUNCTIONS})
fmod: Any = globals()["fmod"]
exp: Any = globals()["exp"]
log1p: Any = globals()["log1p"]


@triton.jit
def maximum(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):  # type: ignore[no-untyped-def]
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def inverse_of(b):  # type: ignore[no-untyped-def]
    """(what brings b between 0.5 and 1, b by it, the inverse of that)"""
    bits = b.to(tl.int32, bitcast=True)
    scale = (tl.maximum(0x7E800000 - (bits & 0x7F800000), 0x00400000) | (bits & -2147483648)).to(tl.float32, bitcast=True)
    near = b * scale
    first = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [near], dtype=tl.float32, is_pure=True, pack=1)
    near = tl.minimum(near, 2.0)  # of infinity
    return scale, near, tl.where(tl.abs(first) < float("inf"), tl.fma(tl.fma(-near, first, 1.0), first, first), first)


@triton.jit
def divide_by(a, scale, near, inverse):  # type: ignore[no-untyped-def]
    scaled = a * scale
    q = scaled * inverse
    return tl.where(
        tl.abs(q) < float("inf"), tl.fma(tl.fma(q, near, -scaled) * -1.0, inverse, q), q
    )  # -x is 0 - x, which loses the sign of 0


@triton.jit
def _plain_divide(a, b):  # type: ignore[no-untyped-def]
    return tl.div_rn(a, b)


@triton.jit
def divide(a, b):  # type: ignore[no-untyped-def]
    """a / b to nearest, without branches. For divisors that many elements share: what is known of them is computed once. (`div_rn` has a slow way for dividends that are denormal or
    far from the divisor: softmax with far scores, as ALiBi's, is full of them.) Quotients below 2**-103 may be a unit or two beside the nearest."""
    scale, near, inverse = inverse_of(b)
    return divide_by(a, scale, near, inverse)


@triton.jit
def exp2_of_half(x):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def exp_of_half(x):  # type: ignore[no-untyped-def]
    return exp2_of_half(x * 1.4426950408889634)


@triton.jit
def erf_of_half(x):  # type: ignore[no-untyped-def]
    """A rational function of x*x, times x: right to a few roundings of float32."""
    c = minimum(maximum(x, -3.8325069), 3.8325069)
    s = c * c
    p = tl.fma(s, 0.00022905065861350646, 0.0034082910107109506)
    p = tl.fma(p, s, 0.050955695062380861)
    p = tl.fma(p, s, 0.18520832239976145)
    p = tl.fma(p, s, 1.128379143519084)
    q = tl.fma(s, -1.1791602954361697e-7, 0.000023547966471313185)
    q = tl.fma(q, s, 0.0010179625278914885)
    q = tl.fma(q, s, 0.014070470171167667)
    q = tl.fma(q, s, 0.11098505178285362)
    q = tl.fma(q, s, 0.49746925110067538)
    q = tl.fma(q, s, 1.0)
    inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [q], dtype=tl.float32, is_pure=True, pack=1)
    return c * p * inverse


if INTERPRETED:
    globals().update(divide=_plain_divide, exp_of_half=globals()["exp"], erf_of_half=globals()["erf"], exp2_of_half=globals()["exp2"])


@triton.jit
def one_plus_erf_of_half(x):  # type: ignore[no-untyped-def]
    """1 + erf(x): the logarithm of erfc(|x|) is nearly a polynomial. Right to 1e-6."""
    t = tl.abs(x)
    p = tl.fma(t, -0.0029441025108098984, 0.029589857906103134)
    p = tl.fma(p, t, -0.1486654281616211)
    p = tl.fma(p, t, -0.9185094237327576)
    p = tl.fma(p, t, -1.6278890371322632)
    r = 1.0 - exp2_of_half(p * t)
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return 1.0 + (r.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def gelu_of_half(x):  # type: ignore[no-untyped-def]
    """x * (1 + erf(x / sqrt(2))) / 2 as x / 2 + |x| * (1 - erfc(|x| / sqrt(2))) / 2: of erfc the logarithm is nearly a polynomial. Right to 7e-6 of the result, and to |x| * 2**-26."""
    t = tl.minimum(tl.abs(x), 14.0)
    p = tl.fma(t, 2.1979609300615266e-05, -0.000651370792184025)
    p = tl.fma(p, t, 0.007617576513439417)
    p = tl.fma(p, t, -0.052582304924726486)
    p = tl.fma(p, t, -0.4594353139400482)
    p = tl.fma(p, t, -1.1510117053985596)
    return tl.fma(-tl.abs(x), exp2_of_half(tl.fma(p, t, -1.0)) - 0.5, x * 0.5)


@triton.jit
def gelu_of_bfloat16(x):  # type: ignore[no-untyped-def]
    """The same for what is rounded to bfloat16 at once, a term less. Right to 3.2e-4 of the result, a sixth of half a unit."""
    t = tl.abs(x)
    p = tl.fma(t, -0.00016286488971672952, 0.004335502628237009)
    p = tl.fma(p, t, -0.04343242570757866)
    p = tl.fma(p, t, -0.4700632393360138)
    p = tl.fma(p, t, -1.1470983028411865)
    return tl.fma(-t, exp2_of_half(tl.fma(p, t, -1.0)) - 0.5, x * 0.5)


@triton.jit
def to_e4m3(x, beyond):  # type: ignore[no-untyped-def]
    """Rounded to nearest, ties to even, as torch does it. `beyond`: the byte of what is too large."""
    bits = x.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)  # the sum rounds to steps of the smallest number
    r = tl.where(a < (121 << 23), small, (a + ((a >> 20) & 1) + (0x7FFFF - (120 << 23))) >> 20)
    r = tl.where(a > 0x7F800000, 127, tl.minimum(r, beyond))
    return (r | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def to_e5m2(x, beyond):  # type: ignore[no-untyped-def]
    bits = x.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    small = (tl.abs(x) + 128.0).to(tl.int32, bitcast=True) - (134 << 23)
    r = tl.where(a < (113 << 23), small, (a + ((a >> 21) & 1) + (0xFFFFF - (112 << 23))) >> 21)
    r = tl.where(a > 0x7F800000, 127, tl.minimum(r, beyond))
    return (r | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def from_e4m3(b):  # type: ignore[no-untyped-def]
    bits = b.to(tl.int32)
    a = bits & 127
    x = (a << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    x = tl.where(a == 127, float("nan"), x)
    return (x.to(tl.int32, bitcast=True) | ((bits & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def from_e5m2(b):  # type: ignore[no-untyped-def]
    return (b.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def program():  # type: ignore[no-untyped-def]
    """Which of the programs that walk all blocks this is."""
    return tl.program_id(0)


if INTERPRETED:
    globals()["program"] = lambda: int(tl.program_id(0).handle.data.item())


@triton.jit
def words(seed, offset, sequence, calls):  # type: ignore[no-untyped-def]
    """The four numbers of a call of Philox (loops/philox.py): products of 64 bits, one instruction each."""
    counter = (offset >> 2) + calls
    a, b, c = counter.to(tl.uint32), (counter >> 32).to(tl.uint32), sequence.to(tl.uint32)
    d, k, l = c * 0, seed.to(tl.uint32), (seed >> 32).to(tl.uint32)  # noqa: E741
    for _ in tl.static_range(10):
        one, two = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, b, c, d = (two >> 32).to(tl.uint32) ^ b ^ k, two.to(tl.uint32), (one >> 32).to(tl.uint32) ^ d ^ l, one.to(tl.uint32)
        k, l = k + 0x9E3779B9, l + 0xBB67AE85  # noqa: E741
    return a, b, c, d


@triton.jit  # type: ignore[untyped-decorator]
def between(word, limit: tl.constexpr):  # type: ignore[no-untyped-def]
    """A word's number, or whether it is less than `limit`."""
    if limit:
        return word < limit
    else:
        return tl.fma(word.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)


@triton.jit  # type: ignore[untyped-decorator]
def uniform(seed, offset, i, threads: tl.constexpr, vector: tl.constexpr, limit: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of each element `i`."""
    if i.dtype == tl.int32:
        i = i.to(tl.uint32)  # division needs no look at the sign
    if vector == 1:
        sequence, calls, which = i % threads, i // (4 * threads), i % (4 * threads) // threads
    else:
        turn, within = i // vector, i % vector
        sequence, calls, which = turn % threads, turn // threads * ((vector + 3) // 4) + within // 4, within % 4
    a, b, c, d = words(seed, offset, sequence, calls)
    return between(tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d)), limit)


@triton.jit  # type: ignore[untyped-decorator]
def uniforms(  # type: ignore[no-untyped-def]
    seed, offset, first, at, threads: tl.constexpr, calls: tl.constexpr, each: tl.constexpr, whole: tl.constexpr, limit: tl.constexpr
):
    """The numbers of neighbours along the last axis: of `each` groups of four for each place `at` behind the `first` one. A turn of a thread is of `calls` groups. `threads` 0: there is one turn.
    `whole`: what lies behind `first` are neighbouring threads in one turn; what all share is computed once then."""
    if first.dtype == tl.int32:
        first, at = first.to(tl.uint32), at.to(tl.uint32)
    if whole:
        sequence, before = first % threads + at, first // threads * calls
    else:
        turn = first + at
        before = turn * 0
        if each < calls:
            turn, before = turn // calls, turn % calls
        sequence = turn
        if threads:
            sequence, before = turn % threads, turn // threads * calls + before
    a, b, c, d = words(seed, offset, sequence, before)
    if each == 2:
        e, f, g, h = words(seed, offset, sequence, before + 1)
        a, b, c, d = tl.join(a, e), tl.join(b, f), tl.join(c, g), tl.join(d, h)
    found = tl.join(tl.join(a, c), tl.join(b, d))
    if len(at.shape) == 1:
        return between(tl.reshape(found, [at.shape[0] * each * 4]), limit)
    else:
        return between(tl.reshape(found, [found.shape[0], at.shape[1] * each * 4]), limit)


@triton.jit
def product(a, b):  # type: ignore[no-untyped-def]
    return a * b


@triton.jit
def sum_before(a, b, c, d):  # type: ignore[no-untyped-def]
    """Of (sum, sum of all but the last) of what follows each other, those of both."""
    return a + c, a + d


@triton.jit
def product_before(a, b, c, d):  # type: ignore[no-untyped-def]
    return a * c, a * d


@triton.jit
def maximum_before(a, b, c, d):  # type: ignore[no-untyped-def]
    return maximum(a, c), maximum(a, d)


@triton.jit
def minimum_before(a, b, c, d):  # type: ignore[no-untyped-def]
    return minimum(a, c), minimum(a, d)


@triton.jit
def logaddexp(a, b):  # type: ignore[no-untyped-def]
    """log(exp(a) + exp(b)), of equal infinities the infinity."""
    larger = maximum(a, b)
    return tl.where(a == b, a + 0.6931471805599453, larger + log1p(exp(minimum(a, b) - larger)))


@triton.jit
def logaddexp_before(a, b, c, d):  # type: ignore[no-untyped-def]
    return logaddexp(a, c), logaddexp(a, d)


@triton.jit
def arg_max(a, i, b, j):  # type: ignore[no-untyped-def]
    """Of two (value, index) the larger value, NaN the largest; the smaller index of equal ones."""
    first = ((a > b) | ((a != a) & (b == b))) | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def arg_min(a, i, b, j):  # type: ignore[no-untyped-def]
    first = ((a < b) | ((a != a) & (b == b))) | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def remainder(a, b):  # type: ignore[no-untyped-def]
    r = fmod(a, b)
    return tl.where((r != 0) & ((b < 0) != (r < 0)), r + b, r)


@triton.jit
def floordiv(a, b):  # type: ignore[no-untyped-def]
    m = fmod(a, b)
    d = tl.div_rn(a - m, b)
    d = tl.where((m != 0) & ((b < 0) != (m < 0)), d - 1.0, d)
    f = tl.floor(d)
    f = tl.where(d - f > 0.5, f + 1.0, f)
    q = tl.div_rn(a, b)
    zero = (q.to(tl.int32, bitcast=True) & -2147483648).to(tl.float32, bitcast=True)
    return tl.where(b == 0, q, tl.where(d != 0, f, zero))


@triton.jit
def floordiv_f64(a, b):  # type: ignore[no-untyped-def]
    m = fmod(a, b)
    d = (a - m) / b
    d = tl.where((m != 0) & ((b < 0) != (m < 0)), d - 1.0, d)
    f = tl.floor(d)
    f = tl.where(d - f > 0.5, f + 1.0, f)
    q = a / b
    zero = (q.to(tl.int64, bitcast=True) & -9223372036854775808).to(tl.float64, bitcast=True)
    return tl.where(b == 0, q, tl.where(d != 0, f, zero))


@triton.jit
def int_fmod(a, b):  # type: ignore[no-untyped-def]
    return tl.where(b == -1, a * 0, a % tl.where(b == -1, b * 0 + 1, b))


@triton.jit
def int_remainder(a, b):  # type: ignore[no-untyped-def]
    r = int_fmod(a, b)
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def int_floordiv(a, b):  # type: ignore[no-untyped-def]
    r = int_fmod(a, b)
    q = tl.where(b == -1, -a, a // tl.where(b == -1, b * 0 + 1, b))
    return tl.where((r != 0) & ((r < 0) != (b < 0)), q - 1, q)


@triton.jit
def uint_pow(a, b):  # type: ignore[no-untyped-def]
    result = a * 0 + 1
    base = a
    left = b
    for _ in range(63):
        result = tl.where((left & 1) != 0, result * base, result)
        base = base * base
        left = left >> 1
    return result


@triton.jit
def int_pow(a, b):  # type: ignore[no-untyped-def]
    """As eager: negative exponents give 0, but for the powers of 1 and -1."""
    one = a * 0 + 1
    odd = (b & 1) != 0
    inverse = tl.where(a == 1, one, tl.where(a == -1, tl.where(odd, -one, one), a * 0))
    return tl.where(b < 0, inverse, uint_pow(a, tl.where(b > 0, b, b * 0)))
