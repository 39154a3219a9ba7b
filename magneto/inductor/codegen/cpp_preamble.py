"""What stands before the kernels of a translation unit: types, prototypes, and the meaning of operations that C lacks. No headers.

Transcendental functions on float: exponentials, logarithms, powers, tanh, erf, asin, acos and atan are written out (errors about 1 unit in the last
place, 1.4 in expm1, close to eager's; gcc vectorises them in place), and so are sin, cos and tan for loops that have looked at their arguments (cpp_turns).
The others are computed in double by glibc's vector functions and rounded once, which is within 0.51 units: the float versions of libmvec err by up to 4 units,
eager by 1 at most. Without libmvec the same text calls the scalar functions.
"""

from __future__ import annotations

import functools

VECTOR_1 = ("exp", "log", "sin", "cos")
VECTOR_2 = (
    "tanh", "erf", "expm1", "log1p", "exp2", "log2", "log10", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh",
)  # fmt: skip
SCALAR = ("lgamma",)
VECTOR_BINARY_1 = ("pow",)
VECTOR_BINARY_2 = ("atan2",)
SCALAR_BINARY = ("fmod",)

_TYPES = """\
typedef signed char i8; typedef short i16; typedef int i32; typedef long long i64;
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
typedef float f32; typedef double f64;
#define MG_INLINE static inline __attribute__((always_inline))
/* gcc makes a truncation of (f32)(i32)x, which keeps -0.0, NaN and what no integer holds */
#if defined(__clang__)
#define MG_INTEGER(x) (x)
#elif __GNUC__ >= 12
#define MG_INTEGER(x) __builtin_assoc_barrier(x)
#else
#define MG_INTEGER(x) ({ __typeof__(x) mg_n = (x); __asm__("" : "+r"(mg_n)); mg_n; })
#endif
#define MG_INF __builtin_inff()
#define MG_NAN __builtin_nanf("")
int omp_get_max_threads(void); int omp_get_thread_num(void);
MG_INLINE f32 mg_bits_f32(i32 u) { f32 f; __builtin_memcpy(&f, &u, 4); return f; }
MG_INLINE i32 mg_f32_bits(f32 f) { i32 u; __builtin_memcpy(&u, &f, 4); return u; }
"""

_HALVES = """\
/* Floats become int64 as by the machine's conversion of one number, which AVX2 has no vectors of: halves of 32 bits through the mantissas of doubles. */
#if defined(__x86_64__) && !defined(__AVX512DQ__)
MG_INLINE i64 mg_f64_bits(f64 f) { i64 u; __builtin_memcpy(&u, &f, 8); return u; }
MG_INLINE i64 mg_f32_i64(f32 x) {
    f64 d = (f64)x, h = __builtin_trunc(d * 0x1p-32), l = __builtin_trunc(d - h * 0x1p+32), one = 0x1.8p+52;
    i64 n = (mg_f64_bits(h + one) << 32) + mg_f64_bits(l + one) - 0x4338000000000000; /* of h nothing is left but its 32 bits */
    return __builtin_fabs(d) < 0x1p+63 ? n : -9223372036854775807LL - 1;
}
MG_INLINE i64 mg_f16_i64(f32 x) { i32 n = MG_INTEGER((i32)x); return n == -2147483647 - 1 ? -9223372036854775807LL - 1 : (i64)n; } /* infinite, or NaN */
#else
#define mg_f32_i64(x) MG_INTEGER((i64)(x))
#define mg_f16_i64(x) MG_INTEGER((i64)(x))
#endif
/* bfloat16 is the upper half of a float; rounding is to nearest even, NaN becomes the canonical one. Halves are made in the upper bits of 32, so that
   gcc does not mix vectors of 16 and 32 bits. */
MG_INLINE f32 mg_load_bf16(u16 b) { return mg_bits_f32((i32)((u32)b << 16)); }
MG_INLINE u32 mg_high_bf16(f32 f) { /* in the upper half */
    u32 u = (u32)mg_f32_bits(f), r = u + 0x7fffu + ((u >> 16) & 1u); return f != f ? 0x7fc00000u : r;
}
MG_INLINE u16 mg_cut_bf16(f32 f) { return (u16)((u32)mg_f32_bits(f) >> 16); } /* of what bfloat16 holds as it is */
MG_INLINE u16 mg_store_bf16(f32 f) { return (u16)(mg_high_bf16(f) >> 16); }
MG_INLINE f32 mg_round_bf16(f32 f) { /* NaN by integers, and as it is: behind a comparison of floats, or a constant, gcc makes branches of later ones, and no vectors */
    i32 u = mg_f32_bits(f); return mg_bits_f32((u & 0x7fffffff) > 0x7f800000 ? u : (i32)(((u32)u + 0x7fffu + (((u32)u >> 16) & 1u)) & 0xffff0000u));
}
/* float16 by integers: gcc does not vectorise conversions of _Float16. Products with powers of two move the exponent, and a sum rounds the mantissa. */
MG_INLINE f32 mg_load_f16(u16 h) {
    u32 w = (u32)h << 16, two = w + w; f32 normal = mg_bits_f32((i32)((two >> 4) + (0xe0u << 23))) * 0x1p-112f;
    f32 small = mg_bits_f32((i32)((two >> 17) | 0x3f000000u)) - 0.5f;
    return mg_bits_f32((i32)((w & 0x80000000u) | (u32)mg_f32_bits(two < (1u << 27) ? small : normal)));
}
MG_INLINE u16 mg_store_f16(f32 f) {
    u32 w = (u32)mg_f32_bits(f), two = w + w, bias = two & 0xff000000u;
    f32 base = (__builtin_fabsf(f) * 0x1p+112f) * 0x1p-110f; /* infinite for what is too large */
    bias = bias < 0x71000000u ? 0x71000000u : bias;
    u32 bits = (u32)mg_f32_bits(mg_bits_f32((i32)((bias >> 1) + 0x07800000u)) + base), number = ((bits << 3) & 0x7c000000u) + ((bits & 0xfffu) << 16);
    return (u16)(((w & 0x80000000u) | (two > 0xff000000u ? 0x7e000000u : number)) >> 16);
}
MG_INLINE f32 mg_round_f16(f32 f) { /* a number 2^13 times as large as the leading bit of f (of 2^-14 for smaller ones) leaves ten bits behind it */
    f32 a = __builtin_fabsf(f); u32 e = (u32)mg_f32_bits(f) & 0x7f800000u;
    f32 magic = mg_bits_f32((i32)((e < 0x38800000u ? 0x38800000u : e) + 0x06800000u)), r = (a + magic) - magic;
    return __builtin_copysignf(a >= 65520.0f ? MG_INF : r, f); /* NaN is NaN on every way: for it magic is negative and small */
}
"""

_PIECES = """\
/* Pieces of bfloat16. The machine's conversion takes subnormal numbers for 0, so that they go the long way. */
#if defined(__AVX512BF16__) && defined(__AVX512DQ__) && !defined(__clang__)
typedef short mg_brain __attribute__((vector_size(32))); typedef f32 mg_sixteen __attribute__((vector_size(64)));
MG_INLINE void mg_narrow_bf16(u16 *to, const f32 *from, i64 n) {
    i64 k = 0;
    for (; k + 16 <= n; k += 16) {
        mg_sixteen s; __builtin_memcpy(&s, from + k, sizeof s);
        mg_brain d = (mg_brain)__builtin_ia32_cvtneps2bf16_v16sf(s);
        __builtin_memcpy(to + k, &d, sizeof d);
        if (__builtin_expect(__builtin_ia32_fpclassps512_mask(s, 0x20, -1) != 0, 0)) for (i64 l = k; l < k + 16; l++) to[l] = mg_store_bf16(from[l]);
    }
    for (; k < n; k++) to[k] = mg_store_bf16(from[k]);
}
#else
MG_INLINE void mg_narrow_bf16(u16 *restrict to, const f32 *restrict from, i64 n) {
    _Pragma("omp simd") for (i64 k = 0; k < n; k++) to[k] = mg_store_bf16(from[k]);
}
#endif
/* Pieces of float16 in memory to and from float, by the machine's own conversion, which rounds to nearest even. */
#if defined(__AVX512F__) && !defined(__clang__)
#define MG_HALVES 16
#define MG_WIDEN(h) __builtin_ia32_vcvtph2ps512_mask(h, (mg_wide){0}, -1, 4)
#define MG_NARROW(w) __builtin_ia32_vcvtps2ph512_mask(w, 0, (mg_half){0}, -1)
#elif defined(__F16C__) && !defined(__clang__)
#define MG_HALVES 8
#define MG_WIDEN(h) __builtin_ia32_vcvtph2ps256(h)
#define MG_NARROW(w) __builtin_ia32_vcvtps2ph256(w, 0)
#endif
#ifdef MG_HALVES
typedef short mg_half __attribute__((vector_size(2 * MG_HALVES))); typedef f32 mg_wide __attribute__((vector_size(4 * MG_HALVES)));
#define MG_CONVERT(to, from, n, S, D, f) \\
    i64 k = 0; S s; D d; \\
    for (; k + MG_HALVES <= n; k += MG_HALVES) { __builtin_memcpy(&s, from + k, sizeof s); d = f(s); __builtin_memcpy(to + k, &d, sizeof d); } \\
    if (k < n) { s = (S){0}; __builtin_memcpy(&s, from + k, (n - k) * (sizeof s / MG_HALVES)); d = f(s); __builtin_memcpy(to + k, &d, (n - k) * (sizeof d / MG_HALVES)); }
MG_INLINE void mg_widen_f16(f32 *to, const u16 *from, i64 n) { MG_CONVERT(to, from, n, mg_half, mg_wide, MG_WIDEN) }
MG_INLINE void mg_narrow_f16(u16 *to, const f32 *from, i64 n) { MG_CONVERT(to, from, n, mg_wide, mg_half, MG_NARROW) }
#else
MG_INLINE void mg_widen_f16(f32 *restrict to, const u16 *restrict from, i64 n) {
    _Pragma("omp simd") for (i64 k = 0; k < n; k++) to[k] = mg_load_f16(from[k]);
}
MG_INLINE void mg_narrow_f16(u16 *restrict to, const f32 *restrict from, i64 n) {
    _Pragma("omp simd") for (i64 k = 0; k < n; k++) to[k] = mg_store_f16(from[k]);
}
#endif
/* Rounding to float16 in registers by that conversion: gcc calls the forms for vectors of 4, 8 and 16 by their names. MG_ROUNDS: the unit does so (runtime/build.py). */
#if defined(MG_ROUNDS) && defined(MG_HALVES) && defined(__AVX2__)
_Pragma("omp declare simd notinbranch") __attribute__((const, nothrow)) f32 mg_machine_f16(f32);
#define MG_MACHINE(T, name, widen, narrow) \\
    __attribute__((used)) static T mg_machine_##name(T) __asm__("_ZGV" #name "v_mg_machine_f16"); static T mg_machine_##name(T x) { return widen(narrow); }
typedef f32 mg_four __attribute__((vector_size(16))); typedef f32 mg_eight __attribute__((vector_size(32)));
MG_MACHINE(mg_four, bN4, __builtin_ia32_vcvtph2ps, __builtin_ia32_vcvtps2ph(x, 0))
MG_MACHINE(mg_eight, cN8, __builtin_ia32_vcvtph2ps256, __builtin_ia32_vcvtps2ph256(x, 0))
MG_MACHINE(mg_eight, dN8, __builtin_ia32_vcvtph2ps256, __builtin_ia32_vcvtps2ph256(x, 0))
#if MG_HALVES == 16
MG_MACHINE(mg_wide, eN16, MG_WIDEN, MG_NARROW(x))
#endif
__attribute__((used)) static f32 mg_machine_one(f32) __asm__("mg_machine_f16"); static f32 mg_machine_one(f32 f) { return mg_machine_bN4((mg_four){f})[0]; }
#else
#define mg_machine_f16 mg_round_f16
#endif
"""

_INTEGERS = """\
MG_INLINE i64 mg_floordiv(i64 a, i64 b) { i64 q = a / b; return q - ((a % b != 0) & ((a < 0) != (b < 0))); }
MG_INLINE i64 mg_floormod(i64 a, i64 b) { i64 r = a % b; return r + ((r != 0) & ((r < 0) != (b < 0)) ? b : 0); }
MG_INLINE i64 mg_min(i64 a, i64 b) { return a < b ? a : b; } MG_INLINE i64 mg_max(i64 a, i64 b) { return a > b ? a : b; }
MG_INLINE i32 mg_floordiv_i32(i32 a, i32 b) { i32 q = a / b; return q - ((a % b != 0) & ((a < 0) != (b < 0))); }
MG_INLINE i32 mg_floormod_i32(i32 a, i32 b) { i32 r = a % b; return r + ((r != 0) & ((r < 0) != (b < 0)) ? b : 0); }
MG_INLINE i32 mg_min_i32(i32 a, i32 b) { return a < b ? a : b; } MG_INLINE i32 mg_max_i32(i32 a, i32 b) { return a > b ? a : b; }
MG_INLINE i64 mg_idivs(i64 a, i64 b) { return b == -1 ? (i64)(0 - (u64)a) : a / b; }
MG_INLINE i64 mg_imods(i64 a, i64 b) { return b == -1 ? 0 : a % b; }
MG_INLINE i64 mg_ifloordiv(i64 a, i64 b) { i64 q = mg_idivs(a, b); return q - ((mg_imods(a, b) != 0) & ((a < 0) != (b < 0))); }
MG_INLINE i64 mg_iremainder(i64 a, i64 b) { i64 r = mg_imods(a, b); return r + ((r != 0) & ((r < 0) != (b < 0)) ? b : 0); }
MG_INLINE i64 mg_ipow(i64 a, i64 b) {
    if (b < 0) return a == 1 ? 1 : a == -1 ? (b & 1 ? -1 : 1) : 0;
    u64 r = 1, x = (u64)a;
    for (; b; b >>= 1, x *= x) if (b & 1) r *= x;
    return (i64)r;
}
"""

_FLOATS = """\
#define MG_FLOAT_FUNCTIONS(T, S) \\
MG_INLINE T mg_maximum_##S(T a, T b) { return (a > b) | (a != a) ? a : b; } \\
MG_INLINE T mg_minimum_##S(T a, T b) { return (a < b) | (a != a) ? a : b; } \\
MG_INLINE T mg_at_least_##S(T a, T c) { return c ? a < c ? c : a : c >= a ? c : a; } /* the same where c is a known number: one instruction, or two */ \\
MG_INLINE T mg_at_most_##S(T a, T c) { return c ? a > c ? c : a : c <= a ? c : a; } \\
MG_INLINE T mg_fmod_##S(T a, T b) { return (T)fmod((f64)a, (f64)b); } \\
MG_INLINE T mg_near_fmod_##S(T a, T b) { /* quotients below 2^52 (cpp_turns): what is one too large is seen by the sign of what is left, which is exact */ \\
    f64 q = __builtin_trunc((f64)a / (f64)b), r = __builtin_fma(-q, (f64)b, (f64)a); \\
    r = (r != 0) & ((r < 0) != (a < 0)) ? r + __builtin_copysign((f64)b, (f64)a) : r; \\
    return q == 0 ? a : (T)__builtin_copysign(r, (f64)a); \\
} \\
MG_DIVISIONS(T, S, ) MG_DIVISIONS(T, S, near_)
#define MG_DIVISIONS(T, S, near) \\
MG_INLINE T mg_##near##remainder_##S(T a, T b) { T r = mg_##near##fmod_##S(a, b); return (r != 0) & ((b < 0) != (r < 0)) ? r + b : r; } \\
MG_INLINE T mg_##near##floordiv_##S(T a, T b) { \\
    T m = mg_##near##fmod_##S(a, b), d = (a - m) / b; \\
    d = (m != 0) & ((b < 0) != (m < 0)) ? d - 1 : d; \\
    T f = (T)__builtin_floor((f64)d); \\
    f = d - f > (T)0.5 ? f + 1 : f; \\
    T z = d != 0 ? f : (T)__builtin_copysign(0.0, (f64)a / (f64)b); \\
    return b == 0 ? a / b : z; \\
}
MG_FLOAT_FUNCTIONS(f32, f32) MG_FLOAT_FUNCTIONS(f64, f64)
/* t / s for many t: r = 1 / s, one Newton step makes the quotient correctly rounded. k scales extreme divisors. */
MG_INLINE f32 mg_div_scale(f32 s) { f32 a = __builtin_fabsf(s); return a > 0x1p+100f ? 0x1p-64f : a < 0x1p-100f ? 0x1p+64f : 1.0f; }
MG_INLINE f32 mg_div_by(f32 t, f32 s, f32 r, f32 k) {
    f32 u = t * k, q = u * r, z = __builtin_fmaf(__builtin_fmaf(-q, s, u), r, q);
    return __builtin_islessgreater(z, q) ? z : q; /* NaN where q is infinite, and right as it is; zeros keep their sign */
}
MG_INLINE f32 mg_div_sum(f32 t, f32 s, f32 r) { /* 0 <= t <= 1 <= s: each product of a subnormal t would take the processor a hundred times as long, so that its bits are divided */
    u32 b = (u32)mg_f32_bits(t), least = s == s ? 0x800000u : 0u; f32 u = b < least ? (f32)(i32)b : t, q = u * r;
    f32 z = __builtin_fmaf(__builtin_fmaf(-q, s, u), r, q); return b < least ? mg_bits_f32(mg_f32_bits(z + 0x1p+23f) - 0x4b000000) : z;
}
#define MG_EXP_CORE(c, one) \
    f32 t = __builtin_fmaf(c, 0x1.715476p+0f, one), k = t - one; /* k = round(c / ln 2), also in the low bits of t; one: 3 * 2^22 */ \
    f32 r = __builtin_fmaf(k, -0x1.62e400p-1f, c); \
    r = __builtin_fmaf(k, -0x1.7f7d1cp-20f, r); \
    f32 p = 0x1.6d754cp-10f; p = __builtin_fmaf(p, r, 0x1.120b72p-7f); p = __builtin_fmaf(p, r, 0x1.5554b8p-5f); \
    p = __builtin_fmaf(p, r, 0x1.5554dcp-3f); p = __builtin_fmaf(p, r, 0.5f); p = __builtin_fmaf(p, r, 1.0f); \
    p = __builtin_fmaf(p, r, 1.0f); \
    i32 n = mg_f32_bits(t) << 23; /* k as an increment of the exponent */
MG_INLINE f32 mg_exp_normal(f32 x) { /* for -87 <= x <= 88 */
    MG_EXP_CORE(x, 12582912.0f)
    return mg_bits_f32(mg_f32_bits(p) + n);
}
MG_INLINE f32 mg_exp_f32(f32 x) {
    f32 c = -0x1.a2ap+6f > x ? -0x1.a2ap+6f : x; c = 89.0f < c ? 89.0f : c; /* NaN stays */
    /* Below 0 as mg_exp_down_f32; above, half of the result, which overflows when it is doubled. */
    f32 one = x < 0.0f ? 12583063.0f : 12583038.0f;
    MG_EXP_CORE(c, one)
    return p * mg_bits_f32(n) * (x < 0.0f ? 0x1p-24f : 2.0f);
}
MG_INLINE f32 mg_exp_down_f32(f32 x) { /* for x <= 0 and NaN: 2^24 times as large first, in case it is subnormal, and exactly 0 below -104.3: a product that
    underflows takes the processor a hundred times as long, and masks of attention are such numbers */
    f32 c = -0x1.a2ap+6f > x ? -0x1.a2ap+6f : x;
    MG_EXP_CORE(c, 12583063.0f) /* k + 151 in the low bits of t: the exponent of 2^(k + 24) */
    return p * mg_bits_f32(n) * 0x1p-24f;
}
MG_INLINE f32 mg_exp1_f32(f32 x) { /* 1 + exp(x): below -87 it is 1 anyway, so that nothing is subnormal */
    u32 b = (u32)mg_f32_bits(x); f32 c = mg_bits_f32((i32)(b < 0xc2ae0000u ? b : 0xc2ae0000u));
    MG_EXP_CORE(c, 12582912.0f)
    f32 y = mg_bits_f32(mg_f32_bits(p) + n) + 1.0f; return x <= 88.7228317f ? y : x * MG_INF;
}
MG_INLINE f32 mg_tanh1_f32(f32 x) { return 2.0f / mg_exp1_f32(-2.0f * x); } /* 1 + tanh(x) */
MG_INLINE f32 mg_tanh_f32(f32 x) {
    f32 a = __builtin_fabsf(x), s = x * x; f32 p = 0x1.01a706p-13f;
    p = __builtin_fmaf(p, s, -0x1.bbe2c4p-11f); p = __builtin_fmaf(p, s, 0x1.94adb4p-9f); p = __builtin_fmaf(p, s, -0x1.19e302p-7f);
    p = __builtin_fmaf(p, s, 0x1.64f9fep-6f); p = __builtin_fmaf(p, s, -0x1.b9fd98p-5f); p = __builtin_fmaf(p, s, 0x1.11106cp-3f);
    p = __builtin_fmaf(p, s, -0x1.555552p-2f); f32 small = __builtin_fmaf(a * s, p, a);
    f32 b = a > 10.0f ? 10.0f : a; /* tanh is 1 from there on */
    f32 large = 1.0f - 2.0f / (mg_exp_normal(2.0f * b) + 1.0f); return __builtin_copysignf(a >= 1.0f ? large : small, x); /* NaN by products alone: mg_exp_normal keeps only some of its bits */
}
MG_INLINE f32 mg_erf_f32(f32 x) {
    f32 a = __builtin_fabsf(x), s = x * x; f32 p = 0x1.4ae4c6p-14f;
    p = __builtin_fmaf(p, s, -0x1.a485e8p-11f); p = __builtin_fmaf(p, s, 0x1.5419f4p-8f); p = __builtin_fmaf(p, s, -0x1.b7fbb4p-6f);
    p = __builtin_fmaf(p, s, 0x1.ce2d20p-4f); p = __builtin_fmaf(p, s, -0x1.81273ep-2f); p = __builtin_fmaf(p, s, 0x1.06eba8p-3f);
    f32 small = __builtin_fmaf(x, p, x);
    f32 t = a > 3.95f ? 3.95f : a; /* erf is 1 from there on */
    f32 q = 0x1.d47f20p-17f;
    q = __builtin_fmaf(q, t, -0x1.6f9eeap-12f); q = __builtin_fmaf(q, t, 0x1.ec7fcap-9f); q = __builtin_fmaf(q, t, -0x1.896178p-6f);
    q = __builtin_fmaf(q, t, 0x1.b459b2p-4f); q = __builtin_fmaf(q, t, 0x1.451abap-1f); q = __builtin_fmaf(q, t, 0x1.0790e6p-3f);
    f32 large = __builtin_copysignf(1.0f - mg_exp_normal(-__builtin_fmaf(t, q, t)), x); return a >= 1.0f ? large : small;
}
MG_INLINE f32 mg_erf1_f32(f32 x) { /* 1 + erf(x) to 2e-7 absolutely, as gelu needs it: erf(a) / a is one polynomial in a * a over [0, 3.79] */
    f32 a = __builtin_fabsf(x), b = a > 0x1.e51eb8p+1f ? 1.0f : a; /* beyond, the result is exactly 0 or 2 */
    f32 u = __builtin_fmaf(b * b, 0x1.1d27c6p-3f, -1.0f), v = u * u, q = 0x1.2f897ep-10f, o = -0x1.c37c82p-12f; /* even and odd powers of the rest: two chains side by side */
    q = __builtin_fmaf(q, v, 0x1.c37bd0p-10f), o = __builtin_fmaf(o, v, -0x1.1739e0p-10f);
    q = __builtin_fmaf(q, v, 0x1.5755f8p-7f), o = __builtin_fmaf(o, v, -0x1.62519ep-8f);
    q = __builtin_fmaf(q, v, 0x1.a86484p-6f), o = __builtin_fmaf(o, v, -0x1.0d8ae8p-6f);
    q = __builtin_fmaf(q, v, 0x1.c1e6e8p-5f), o = __builtin_fmaf(o, v, -0x1.414088p-5f);
    q = __builtin_fmaf(q, v, 0x1.73ec26p-4f), o = __builtin_fmaf(o, v, -0x1.27d922p-4f); q = __builtin_fmaf(o, u, q);
    q = __builtin_fmaf(q, u, -0x1.c817fep-4f); q = __builtin_fmaf(q, u, 0x1.1ab82ep-3f); q = __builtin_fmaf(q, u, -0x1.7d29bep-3f);
    q = __builtin_fmaf(q, u, 0x1.7e0a92p-2f); q = a > 0x1.e51eb8p+1f ? 1.0f : q; return __builtin_fmaf(__builtin_copysignf(q, x), b, 1.0f);
}
MG_INLINE f32 mg_cdf_f32(f32 x) { /* (1 + erf(x / sqrt 2)) / 2 to 1.2e-7 absolutely, the heart of gelu: erf / 2a is one polynomial in a * a over [0, 5.3] */
    f32 a = __builtin_fabsf(x), b = 0x1.533334p+2f < a ? 0x1.533334p+2f : a; /* NaN stays; beyond, the product is exactly 0.5 */
    f32 u = __builtin_fmaf(b * b, 0x1.16dd02p-4f, -1.0f), v = u * u, q = 0x1.b70ce8p-12f, o = -0x1.1dae64p-10f; /* even and odd powers: two chains side by side */
    q = __builtin_fmaf(q, v, 0x1.da3de4p-11f), o = __builtin_fmaf(o, v, -0x1.3a778cp-10f);
    q = __builtin_fmaf(q, v, 0x1.ee2294p-9f), o = __builtin_fmaf(o, v, -0x1.c42740p-8f);
    q = __builtin_fmaf(q, v, 0x1.41a2cap-7f), o = __builtin_fmaf(o, v, -0x1.ce63fep-7f);
    q = __builtin_fmaf(q, v, 0x1.4412eap-6f), o = __builtin_fmaf(o, v, -0x1.a72250p-6f); q = __builtin_fmaf(q, v, 0x1.071648p-5f);
    q = __builtin_fmaf(o, u, q);
    q = __builtin_fmaf(q, u, -0x1.40846ep-5f); q = __builtin_fmaf(q, u, 0x1.8c0e8cp-5f); q = __builtin_fmaf(q, u, -0x1.0aa02ap-4f);
    q = __builtin_fmaf(q, u, 0x1.0b2740p-3f); return 0.5f + __builtin_copysignf(q * b, x);
}
/* Shorter forms for kernels whose results have 16 bits: arithmetic is what bounds those. Limits are kept by integers, one instruction each; NaN is lost. */
MG_INLINE f32 mg_exp1_short(f32 x, f32 sign) { /* 1 + exp(sign * x), sign 1 or -1; right to 2e-6 where it is large, 2e-7 elsewhere */
    f32 hi = sign > 0 ? 89.5f : 87.0f, lo = hi - 176.5f; /* exp is infinite, or nothing beside 1 */
    i32 b = mg_f32_bits(x); u32 c = (u32)(b < mg_f32_bits(hi) ? b : mg_f32_bits(hi)), d = (u32)mg_f32_bits(lo);
    f32 y = mg_bits_f32((i32)(c < d ? c : d)), by = sign * 0x1.715476p+0f;
    f32 t = __builtin_fmaf(y, by, 12583038.0f), r = __builtin_fmaf(y, by, -(t - 12583038.0f)), p = 0x1.5c08c6p-9f; /* k + 126 in the low bits of t */
    p = __builtin_fmaf(p, r, 0x1.3d0c6cp-6f); p = __builtin_fmaf(p, r, 0x1.c6b6e6p-4f); p = __builtin_fmaf(p, r, 0x1.ebf918p-2f);
    p = __builtin_fmaf(p, r, 0x1.62e428p+0f); p = __builtin_fmaf(p, r, 2.0f);
    return __builtin_fmaf(p, mg_bits_f32(mg_f32_bits(t) << 23), 1.0f);
}
MG_INLINE f32 mg_exp1_half(f32 x) { return x != x ? x : mg_exp1_short(x, 1.0f); }
MG_INLINE f32 mg_tanh1_half(f32 x) { return 2.0f / mg_exp1_half(-2.0f * x); }
MG_INLINE f32 mg_silu_half(f32 x) { return x / mg_exp1_short(x, -1.0f); }
MG_INLINE f32 mg_cdf_half(f32 x) { /* as mg_cdf_f32, right to 1e-5 of itself: the tail's 32nd root is nearly a polynomial */
    i32 b = mg_f32_bits(__builtin_fabsf(x)), m = mg_f32_bits(13.6f); /* p is negative there */
    f32 a = mg_bits_f32(b < m ? b : m), p = 0x1.4b9c46p-22f;
    p = __builtin_fmaf(p, a, -0x1.0da8d6p-16f); p = __builtin_fmaf(p, a, 0x1.1142c2p-12f); p = __builtin_fmaf(p, a, -0x1.dfbd70p-11f);
    p = __builtin_fmaf(p, a, -0x1.342f8ep-7f); p = __builtin_fmaf(p, a, -0x1.8fda9ap-6f); p = __builtin_fmaf(p, a, 0x1.f5076cp-1f);
    i32 q = mg_f32_bits(p); p = mg_bits_f32(q > 0 ? q : 0); p = p * p, p = p * p, p = p * p, p = p * p, p = p * p;
    return x < 0.0f ? p : 1.0f - p;
}
#define MG_EXP2_CORE(r) \\
    p = 0x1.41fbc0p-13f; p = __builtin_fmaf(p, r, 0x1.5f3e52p-10f); p = __builtin_fmaf(p, r, 0x1.3b2d4cp-7f); p = __builtin_fmaf(p, r, 0x1.c6aee8p-5f); \\
    p = __builtin_fmaf(p, r, 0x1.ebfbdcp-3f); p = __builtin_fmaf(p, r, 0x1.62e430p-1f); p = __builtin_fmaf(p, r, 1.0f);
MG_INLINE f32 mg_exp2_f32(f32 x) {
    u32 b = (u32)mg_f32_bits(x); f32 c = mg_bits_f32((i32)(b < 0xc3160000u ? b : 0xc3160000u)), t = c + 12582912.0f, r = c - (t - 12582912.0f), p;
    MG_EXP2_CORE(r)
    i32 n = mg_f32_bits(t) << 23, low = c < -126.0f, u = mg_f32_bits(p) + n + (low ? 0x20000000 : 0);
    f32 y = mg_bits_f32(c <= -150.0f ? 0 : u) * (low ? 0x1p-64f : 1.0f);
    return x < 128.0f ? y : x * MG_INF;
}
MG_INLINE f32 mg_expm1_f32(f32 x) {
    f32 c = x < -18.0f ? -18.0f : x, t = __builtin_fmaf(c, 0x1.715476p+0f, 12582912.0f), k = t - 12582912.0f;
    f32 r = __builtin_fmaf(k, -0x1.62e400p-1f, c); r = __builtin_fmaf(k, -0x1.7f7d1cp-20f, r); f32 p = 0x1.a032ccp-13f;
    p = __builtin_fmaf(p, r, 0x1.6d72c0p-10f); p = __builtin_fmaf(p, r, 0x1.11118ap-7f); p = __builtin_fmaf(p, r, 0x1.5554b0p-5f);
    p = __builtin_fmaf(p, r, 0x1.555554p-3f); p = __builtin_fmaf(p, r, 0.5f); p = __builtin_fmaf(r * r, p, r);
    f32 h = mg_bits_f32((mg_f32_bits(t) << 23) + 0x3f000000); /* 2^(k - 1) */
    f32 y = 2.0f * __builtin_fmaf(p, h, h - 0.5f); return __builtin_copysignf(x <= 88.7228317f ? y : x * MG_INF, x);
}
/* log(1 + f) = f + q, f in [sqrt(1/2) - 1, sqrt(2) - 1] */
#define MG_LOG_REST(f, s) \\
    f32 p = 0x1.1457a2p-4f; \\
    p = __builtin_fmaf(p, f, -0x1.de3c14p-4f); p = __builtin_fmaf(p, f, 0x1.e6f06cp-4f); p = __builtin_fmaf(p, f, -0x1.fc2208p-4f); \\
    p = __builtin_fmaf(p, f, 0x1.233768p-3f); p = __builtin_fmaf(p, f, -0x1.555c4ep-3f); p = __builtin_fmaf(p, f, 0x1.99a4b6p-3f); \\
    p = __builtin_fmaf(p, f, -0x1.000006p-2f); p = __builtin_fmaf(p, f, 0x1.555548p-2f);
#define MG_LOG_PARTS(x) /* x = 2^k * (1 + f) */ \\
    f32 y = x < 0x1p-126f ? x * 0x1p+23f : x; i32 u = mg_f32_bits(y) - 0x3f3504f3; \\
    f32 f = mg_bits_f32((u & 0x7fffff) + 0x3f3504f3) - 1.0f, k = (f32)((u >> 23) - (x < 0x1p-126f ? 23 : 0)), s = f * f; \\
    MG_LOG_REST(f, s)
#define MG_LOG_ENDS(x, r) (x > 0.0f ? x == MG_INF ? x : r : x == 0.0f ? -MG_INF : MG_NAN)
MG_INLINE f32 mg_log_f32(f32 x) {
    MG_LOG_PARTS(x)
    f32 r = __builtin_fmaf(f * s, p, __builtin_fmaf(k, 0x1.7f7d1cp-20f, -0.5f * s)); r = __builtin_fmaf(k, 0x1.62e400p-1f, f + r); return MG_LOG_ENDS(x, r);
}
MG_INLINE f32 mg_log2_f32(f32 x) {
    MG_LOG_PARTS(x)
    f32 q = __builtin_fmaf(f * s, p, -0.5f * s), h = f + q, l = q - (h - f);
    f32 r = k + __builtin_fmaf(h, 0x1.715476p+0f, __builtin_fmaf(l, 0x1.715476p+0f, h * 0x1.4ae0c0p-26f)); return MG_LOG_ENDS(x, r);
}
MG_INLINE f32 mg_log10_f32(f32 x) {
    MG_LOG_PARTS(x)
    f32 q = __builtin_fmaf(f * s, p, -0.5f * s), h = f + q, l = q - (h - f), m = __builtin_fmaf(h, -0x1.5b235ep-27f, k * 0x1.3509f8p-18f);
    m = __builtin_fmaf(l, 0x1.bcb7b2p-2f, m); f32 r = __builtin_fmaf(k, 0x1.344000p-2f, __builtin_fmaf(h, 0x1.bcb7b2p-2f, m)); return MG_LOG_ENDS(x, r);
}
MG_INLINE f32 mg_log1p_f32(f32 x) {
    f32 w = 1.0f + x; i32 u = mg_f32_bits(w) - 0x3f3504f3, e = u >> 23; f32 k = (f32)e;
    f32 t = mg_bits_f32((127 - (e < 127 ? e : 127)) << 23), g = __builtin_fmaf(x, t, t - 1.0f), l = __builtin_fmaf(x, t, (t - 1.0f) - g); /* of the exact sum */
    f32 f = x > 0x1p+30f ? mg_bits_f32((u & 0x7fffff) + 0x3f3504f3) - 1.0f : g, s = f * f;
    MG_LOG_REST(f, s)
    f32 r = __builtin_fmaf(f * s, p, __builtin_fmaf(k, 0x1.7f7d1cp-20f, __builtin_fmaf(-0.5f, s, l))); r = __builtin_fmaf(k, 0x1.62e400p-1f, f + r);
    return __builtin_copysignf(w > 0.0f ? w == MG_INF ? w : r : w == 0.0f ? MG_INF : MG_NAN, x);
}
#define MG_ASIN_CORE(z) \\
    p = 0x1.33bbf6p-5f; p = __builtin_fmaf(p, z, 0x1.d7f1bep-7f); p = __builtin_fmaf(p, z, 0x1.04a660p-5f); \\
    p = __builtin_fmaf(p, z, 0x1.6cac3cp-5f); p = __builtin_fmaf(p, z, 0x1.33388ep-4f); p = __builtin_fmaf(p, z, 0x1.55554cp-3f);
MG_INLINE f32 mg_asin_f32(f32 x) {
    f32 a = __builtin_fabsf(x), z = a < 0.5f ? x * x : __builtin_fmaf(-0.5f, a, 0.5f), s = __builtin_sqrtf(z), p;
    MG_ASIN_CORE(z)
    f32 l = __builtin_fmaf(-s, s, z) / (s + 1e-30f); /* what the root lacks, twice */
    f32 b = a < 0.5f ? a : s, r = b * z * p;
    f32 large = 0x1.921fb6p-1f - (__builtin_fmaf(2.0f, r, l - -0x1.777a5cp-25f) - (0x1.921fb6p-1f - 2.0f * s));
    return __builtin_copysignf(a < 0.5f ? b + r : large, x);
}
MG_INLINE f32 mg_acos_f32(f32 x) {
    f32 a = __builtin_fabsf(x), z = a < 0.5f ? x * x : __builtin_fmaf(-0.5f, a, 0.5f), s = __builtin_sqrtf(z), p;
    MG_ASIN_CORE(z)
    f32 l = __builtin_fmaf(-s, s, z) / (s + 1e-30f), r = (a < 0.5f ? x : s) * z * p;
    f32 small = 0x1.921fb6p+0f - (x - (-0x1.777a5cp-25f - r)), large = 2.0f * s + __builtin_fmaf(2.0f, r, l);
    return a < 0.5f ? small : x > 0.0f ? large : 0x1.921fb6p+1f - (2.0f * s - (-0x1.777a5cp-24f - __builtin_fmaf(2.0f, r, l)));
}
MG_INLINE f32 mg_atan_f32(f32 x) { /* beyond 1, pi / 2 less that of z = 1 / a, with what z lacks */
    f32 a = __builtin_fabsf(x), b = a > 0x1p+100f ? 0x1p+100f : a, i = 1.0f / b, z = b > 1.0f ? i : b, s = z * z, p = -0x1.d62fd2p-10f;
    p = __builtin_fmaf(p, s, 0x1.65a64cp-7f); p = __builtin_fmaf(p, s, -0x1.fed150p-6f); p = __builtin_fmaf(p, s, 0x1.dac9dcp-5f);
    p = __builtin_fmaf(p, s, -0x1.58348ep-4f); p = __builtin_fmaf(p, s, 0x1.c099fep-4f); p = __builtin_fmaf(p, s, -0x1.2421b6p-3f);
    p = __builtin_fmaf(p, s, 0x1.9991fep-3f); p = __builtin_fmaf(p, s, -0x1.55553ep-2f);
    f32 h = 0x1.921fb6p+0f - z, l = (0x1.921fb6p+0f - h) - z - 0x1.777a5cp-25f, e = __builtin_fmaf(-b, z, 1.0f) * z * __builtin_fmaf(s, -0.5f, 1.0f);
    f32 small = __builtin_fmaf(z * s, p, z), large = h - (__builtin_fmaf(z * s, p, e) - l); return __builtin_copysignf(b > 1.0f ? large : small, x);
}
/* Anywhere: in double. Up to 2^17 (cpp_turns.NEAR): pi / 2 in three parts, of which the first leaves an exact rest r + l; errors of 1.07 units. -0, NaN as they are. */
#define MG_ANGLE(f) MG_INLINE f32 mg_##f##_f32(f32 x) { return (f32)f((f64)x); }
MG_ANGLE(sin) MG_ANGLE(cos) MG_ANGLE(tan)
#define MG_NEAR_CORE(x) \\
    f32 a = __builtin_fabsf(x), t = __builtin_fmaf(a, 0x1.45f306p-1f, 12582912.0f), q = t - 12582912.0f; i32 n = mg_f32_bits(t); \\
    f32 h = __builtin_fmaf(q, -0x1.921fb4p+0f, a), w = q * 0x1.4442d0p-24f, r = h - w, s = r * r, p = 0x1.6cceaap-19f, c = 0x1.99f90ap-16f; \\
    f32 l = __builtin_fmaf(q, -0x1.846988p-48f, ((h - r) - w) - __builtin_fmaf(q, 0x1.4442d0p-24f, -w)); \\
    p = __builtin_fmaf(p, s, -0x1.a00f72p-13f); p = __builtin_fmaf(p, s, 0x1.111108p-7f); p = __builtin_fmaf(p, s, -0x1.555556p-3f); p = __builtin_fmaf(r * s, p, l); \\
    c = __builtin_fmaf(c, s, -0x1.6c0c6cp-10f); c = __builtin_fmaf(c, s, 0x1.55554ap-5f); f32 z = __builtin_fmaf(c * s, s, -(r * l)); \\
    c = __builtin_fmaf(s, -0.5f, z); \\
    i32 sign = (i32)0x80000000, odd = n & 1; /* sin r = r + p, cos r = 1 + c */
MG_INLINE f32 mg_near_sin_f32(f32 x) { MG_NEAR_CORE(x) f32 y = odd ? 1.0f + c : r + p; return mg_bits_f32(mg_f32_bits(y) ^ ((n << 30 ^ mg_f32_bits(x)) & sign)); }
MG_INLINE f32 mg_near_cos_f32(f32 x) { MG_NEAR_CORE(x) f32 y = odd ? r + p : 1.0f + c; return mg_bits_f32(mg_f32_bits(y) ^ ((n + 1) << 30 & sign)); }
MG_INLINE f32 mg_near_tan_f32(f32 x) { /* cos r = u + v, nearly exact: a rounded c would be 0.8 units of the quotient */
    MG_NEAR_CORE(x) f32 u = __builtin_fmaf(s, -0.5f, 1.0f), v = __builtin_fmaf(s, -0.5f, 1.0f - u) + __builtin_fmaf(__builtin_fmaf(r, r, -s), -0.5f, z);
    f32 g = odd ? u : r, k = odd ? v : p, d = odd ? r : u, e = odd ? p : v, m = d + e, i = 1.0f / m, o = g + k, y = o * i;
    y = __builtin_fmaf(__builtin_fmaf(-y, m, o) + __builtin_fmaf(-y, (d - m) + e, (g - o) + k), i, y); /* what the quotient lacks, and both sums */
    return mg_bits_f32(mg_f32_bits(y) ^ ((n << 31 ^ mg_f32_bits(x)) & sign));
}
MG_INLINE f32 mg_pow_f32(f32 x, f32 y) { /* the logarithm and its product in double */
    f32 a = __builtin_fabsf(x), w = a < 0x1p-126f ? a * 0x1p+23f : a; i32 u = mg_f32_bits(w) - 0x3f3504f3;
    f64 f = mg_bits_f32((u & 0x7fffff) + 0x3f3504f3) - 1.0f, g = f * f;
    f64 l = __builtin_fma(f, -0x1.1da6333fe8a18p-4, 0x1.0f624bcd35a5bp-3), h = __builtin_fma(f, -0x1.13b89c3fae6f2p-3, 0x1.0acdfd7b7b118p-3);
    l = __builtin_fma(l, g, h); l = __builtin_fma(l, g, __builtin_fma(f, -0x1.23d6504971142p-3, 0x1.481faba52f942p-3));
    l = __builtin_fma(l, g, __builtin_fma(f, -0x1.7188d2fcd81d8p-3, 0x1.a61b7ddd2d30bp-3));
    l = __builtin_fma(l, g, __builtin_fma(f, -0x1.ec6f2e021a252p-3, 0x1.2776b6ccd5259p-2));
    l = __builtin_fma(l, g, __builtin_fma(f, -0x1.715478883a687p-2, 0x1.ec709de33cd78p-2));
    l = __builtin_fma(l, g, __builtin_fma(f, -0x1.71547651b7076p-1, 0x1.71547652b58f7p+0));
    f64 t = (f64)y * __builtin_fma(l, f, (f64)((u >> 23) - (a < 0x1p-126f ? 23 : 0)));
    t = t < -160.0 ? -160.0 : t > 160.0 ? 160.0 : t; f64 m = t + 0x1.8p+52, c = m - 0x1.8p+52; f32 r = (f32)(t - c), p;
    MG_EXP2_CORE(r)
    i32 n = (i32)(f32)c, half = n >> 1; /* NaN: any */
    p = p * mg_bits_f32((half + 127) << 23) * mg_bits_f32((n - half + 127) << 23);
    p = a == 0.0f ? y < 0.0f ? MG_INF : 0.0f : p; p = a == MG_INF ? y < 0.0f ? 0.0f : MG_INF : p; p = (x != x) | (y != y) ? MG_NAN : p;
    p = (a == 1.0f) & (y == y) ? 1.0f : p;
    _Bool whole = __builtin_truncf(y) == y, odd = whole & (__builtin_truncf(y * 0.5f) != y * 0.5f);
    p = (x < 0.0f) & !whole & (a != MG_INF) ? MG_NAN : p; p = odd ? __builtin_copysignf(p, x) : p;
    return (y == 0.0f) | (x == 1.0f) ? 1.0f : p;
}
"""

_STREAMS = """\
/* Results larger than the caches are written past them (codegen/cpp_stream.py): whole lines are not read before they are overwritten. */
#if defined(__AVX512F__)
#define MG_NT 64
#elif defined(__AVX__)
#define MG_NT 32
#elif defined(__SSE2__)
#define MG_NT 16
#endif
#ifdef MG_NT
typedef i64 mg_line __attribute__((vector_size(MG_NT)));
MG_INLINE void mg_line_past(u8 *d, mg_line v) {
#ifdef __clang__
    __builtin_nontemporal_store(v, (mg_line *)d);
#elif MG_NT == 64
    __builtin_ia32_movntdq512((mg_line *)d, v);
#elif MG_NT == 32
    __builtin_ia32_movntdq256((mg_line *)d, v);
#else
    __builtin_ia32_movntdq((mg_line *)d, v);
#endif
}
#define MG_FENCE __builtin_ia32_sfence();
#else
#define MG_FENCE
#endif
MG_INLINE void mg_ahead(const void *p, i64 n) { for (i64 k = 0; k < n; k += 64) __builtin_prefetch((const u8 *)p + k); }
MG_INLINE void mg_stream(void *to, const void *from, i64 n, _Bool past) {
#ifdef MG_NT
    if (past) {
        u8 *d = to; const u8 *s = from;
        i64 k = mg_min(-(i64)(u64)d & (MG_NT - 1), n);
        __builtin_memcpy(d, s, k);
        for (; k + MG_NT <= n; k += MG_NT) { mg_line v; __builtin_memcpy(&v, s + k, MG_NT); mg_line_past(d + k, v); }
        __builtin_memcpy(d + k, s + k, n - k);
        return;
    }
#endif
    __builtin_memcpy(to, from, n);
}
"""

_TILES = """\
/* to[a * 64 + b] = from[a + b * step] for a < n, b < m: a square of memory that is walked along the other dimension. Eight rows of eight elements are
   turned in registers: interleaving rows i and i + 4 three times. `ahead`: how far on the next square lies, which is fetched meanwhile; 0: it is not.
   What is unrolled is said, the rest is seldom: gcc needs half the time for the same loop at O1. */
#if defined(__clang__) || __GNUC__ >= 12
#define MG_TURN(d, s) _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) { \\
    d[2 * i] = __builtin_shufflevector(s[i], s[i + 4], 0, 8, 1, 9, 2, 10, 3, 11); \\
    d[2 * i + 1] = __builtin_shufflevector(s[i], s[i + 4], 4, 12, 5, 13, 6, 14, 7, 15); }
#define MG_EIGHT(T) \\
    const i64 last = (m - 1) * step + n - 8, most = n >= 8 ? m : last < 0 ? 0 : last / step + 1; /* rows of which eight elements may be read */ \\
    for (; b < m && mg_min(b + 8, m) <= most; b += 8) { \\
        if (ahead) for (int i = 0; i < 8; i++) mg_ahead(from + (b + i) * step + ahead, n * sizeof(T)); \\
        for (i64 q = 0; q < n; q += 8) { \\
        typedef T row __attribute__((vector_size(8 * sizeof(T)))); \\
        const i64 a = n < 8 ? 0 : mg_min(q, n - 8); \\
        row x[8], y[8]; \\
        _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) __builtin_memcpy(&x[i], from + a + mg_min(b + i, m - 1) * step, 8 * sizeof(T)); \\
        MG_TURN(y, x) MG_TURN(x, y) MG_TURN(y, x) \\
        _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) __builtin_memcpy(to + (a + i) * 64 + b, &y[i], 8 * sizeof(T)); \\
        } \\
    }
#else
#define MG_EIGHT(T)
#endif
#define MG_TILE(T) static __attribute__((noinline, unused, optimize("O1"))) void mg_tile_##T(T *restrict to, const T *restrict from, i64 step, i64 n, i64 m, i64 ahead) { \\
    i64 b = 0; \\
    MG_EIGHT(T) \\
    for (; b < m; b++) for (i64 i = 0; i < n; i++) to[i * 64 + b] = from[i + b * step]; \\
}
MG_TILE(u8) MG_TILE(u16) MG_TILE(u32) MG_TILE(u64)
"""

_REDUCTIONS = """\
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 10 /* sums s up to each element, in vectors (cpp_ordered) */
#define MG_SCAN _Pragma("omp simd reduction(inscan, +:s)")
#define MG_SO_FAR _Pragma("omp scan inclusive(s)")
#else
#define MG_SCAN
#define MG_SO_FAR
#endif
#define MG_HALVE(f, h) _Pragma("omp simd") for (int l = 0; l < h; l++) x[l] = f(x[l], x[l + h]);
#define MG_LANES(name, T, f) MG_INLINE T name(T *x, int n) { /* lanes joined in log n steps: gcc adds and compares them one after the other */ \\
    if (n > 32) { MG_HALVE(f, 32) } if (n > 16) { MG_HALVE(f, 16) } MG_HALVE(f, 8) MG_HALVE(f, 4) return f(f(x[0], x[2]), f(x[1], x[3])); }
MG_INLINE f32 mg_sum_f32(f32 a, f32 b) { return a + b; } MG_INLINE f64 mg_sum_f64(f64 a, f64 b) { return a + b; }
/* The same for sums, whose first steps are vectors: loops over few lanes take gcc a tenth of its time for a layer norm. */
#if defined(__AVX512F__)
#define MG_V 64
#define MG_WIDE 64 /* accumulators side by side of kernels that walk a row more than once: four vectors, which cost gcc half of eight */
#define MG_JOIN_f32 MG_JOIN_16
#define MG_JOIN_f64 MG_JOIN_8
#else
#define MG_V 32
#define MG_WIDE 32
#define MG_JOIN_f32 MG_JOIN_8
#define MG_JOIN_f64 MG_JOIN_4
#endif
typedef f32 mg_at_f32 __attribute__((vector_size(MG_V), aligned(4))); typedef f64 mg_at_f64 __attribute__((vector_size(MG_V), aligned(8)));
#define MG_AT_16(T, x, l) (*(const mg_at_##T *)((x) + (l)))
#define MG_AT_32(T, x, l) (MG_AT_16(T, x, l) + MG_AT_16(T, x, l + 16))
#define MG_AT_64(T, x, l) ((MG_AT_16(T, x, l) + MG_AT_16(T, x, l + 32)) + (MG_AT_16(T, x, l + 16) + MG_AT_16(T, x, l + 48)))
#define MG_JOIN_16(T, at) *(mg_at_##T *)x = at(T, y, 0); MG_HALVE(mg_sum_##T, 8) MG_HALVE(mg_sum_##T, 4)
#define MG_JOIN_8(T, at) *(mg_at_##T *)x = at(T, y, 0) + at(T, y, 8); MG_HALVE(mg_sum_##T, 4)
#define MG_JOIN_4(T, at) *(mg_at_##T *)x = (at(T, y, 0) + at(T, y, 8)) + (at(T, y, 4) + at(T, y, 12));
#define MG_SUMS(T, n) MG_INLINE T mg_lanes_sum_##T##_##n(const T *y) { T x[16]; MG_JOIN_##T(T, MG_AT_##n) return (x[0] + x[2]) + (x[1] + x[3]); }
MG_SUMS(f32, 16) MG_SUMS(f32, 32) MG_SUMS(f32, 64) MG_SUMS(f64, 16) MG_SUMS(f64, 32) MG_SUMS(f64, 64)
#define MG_OF(name, n) name##n
#define mg_lanes_sum_f32(x, n) MG_OF(mg_lanes_sum_f32_, n)(x)
#define mg_lanes_sum_f64(x, n) MG_OF(mg_lanes_sum_f64_, n)(x)
MG_LANES(mg_lanes_maximum_f32, f32, mg_maximum_f32) MG_LANES(mg_lanes_minimum_f32, f32, mg_minimum_f32)
MG_LANES(mg_lanes_maximum_f64, f64, mg_maximum_f64) MG_LANES(mg_lanes_minimum_f64, f64, mg_minimum_f64)
#define MG_TIMES(a, b) ((a) * (b))
#define MG_PLUS(a, b) ((a) + (b))
MG_LANES(mg_lanes_prod_f32, f32, MG_TIMES) MG_LANES(mg_lanes_prod_f64, f64, MG_TIMES)
#define MG_LARGER(a, b) ((a) > (b) ? (a) : (b))
#define MG_SMALLER(a, b) ((a) < (b) ? (a) : (b))
#define MG_LANES_OF(T) MG_LANES(mg_lanes_maximum_##T, T, MG_LARGER) MG_LANES(mg_lanes_minimum_##T, T, MG_SMALLER) \\
    MG_LANES(mg_lanes_sum_##T, T, MG_PLUS) MG_LANES(mg_lanes_prod_##T, T, MG_TIMES)
MG_LANES_OF(i32) MG_LANES_OF(i64)
#pragma omp declare reduction(mg_max : f32 : omp_out = mg_maximum_f32(omp_out, omp_in)) initializer(omp_priv = -MG_INF)
#pragma omp declare reduction(mg_min : f32 : omp_out = mg_minimum_f32(omp_out, omp_in)) initializer(omp_priv = MG_INF)
#pragma omp declare reduction(mg_max : f64 : omp_out = mg_maximum_f64(omp_out, omp_in)) initializer(omp_priv = -MG_INF)
#pragma omp declare reduction(mg_min : f64 : omp_out = mg_minimum_f64(omp_out, omp_in)) initializer(omp_priv = MG_INF)
"""


def _prototypes(level: int) -> str:
    lines: list[str] = []
    for names, needed, arguments in (
        (VECTOR_1, 1, "f64"), (VECTOR_2, 2, "f64"), (SCALAR, 9, "f64"),
        (VECTOR_BINARY_1, 1, "f64, f64"), (VECTOR_BINARY_2, 2, "f64, f64"), (SCALAR_BINARY, 9, "f64, f64"),
    ):  # fmt: skip
        simd = "#pragma omp declare simd notinbranch\n" if level >= needed else ""
        lines.extend(f"{simd}f64 {name}({arguments});" for name in names)
    return "\n".join(lines) + "\n"


@functools.cache
def preamble(level: int) -> str:
    """The C text for a level of vector functions (`compiler.vector_math_level`)."""
    return _TYPES + _prototypes(level) + _HALVES + _PIECES + _INTEGERS + _FLOATS + _STREAMS + _TILES + _REDUCTIONS
