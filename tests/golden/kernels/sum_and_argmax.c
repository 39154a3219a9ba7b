int SYMBOL(void *const *p) {
    int status = 0;
    const f32 *p0 = p[0];
    f32 *p1 = p[1];
    i64 *p2 = p[2];
    for (i64 row = 0; row < 50; row++) {
        const i64 i0 = (u32)row;
        f64 a1 = 0;
        f32 a2 = 0; i64 a2x = -1;
        {
            f32 a2s[64]; i32 a2xs[64];
            for (i64 l = 0; l < 64; l++) { a2s[l] = -__builtin_inf(); a2xs[l] = 0 + 64 <= 300 ? (i32)(0) + (i32)l : -1; }
            f32 a1vs[64] = {0};
            i64 g = 0;
            for (; g + 64 <= 300; g += 64) {
#pragma omp simd
                for (i64 l = 0; l < 64; l++) {
                    const i64 j0 = g + l;
                    f32 t3 = p0[300 * i0 + j0];
                    a1vs[l] = a1vs[l] + t3;
                    { const _Bool ka2 = (a2s[l] == a2s[l] & !(t3 <= a2s[l])); a2s[l] = ka2 ? t3 : a2s[l]; a2xs[l] = ka2 ? (i32)(j0) : a2xs[l]; }
                }
            }
            f32 a1v = 0;
            
            a1v = mg_lanes_sum_f32(a1vs, 64);
            if (a2xs[0] >= 0) {
            f32 a2m[64];
            for (i64 l = 0; l < 64; l++) a2m[l] = a2s[l];
            const f32 a2t = mg_lanes_maximum_f32(a2m, 64);
            i32 a2b = 2147483647;
#pragma omp simd reduction(min:a2b)
            for (i64 l = 0; l < 64; l++) { const i32 k = ((a2s[l] == a2t) | ((a2t != a2t) & (a2s[l] != a2s[l]))) ? a2xs[l] : 2147483647; a2b = a2b < k ? a2b : k; }
            if (a2x < 0 || (a2 == a2 && (a2t > a2 || (a2t == a2 && (a2b) < a2x) || a2t != a2t)) || (a2 != a2 && a2t != a2t && (a2b) < a2x)) { a2 = a2t; a2x = a2b; }
            }
            for (i64 j0 = 256; j0 < 300; j0++) {
                f32 t3 = p0[300 * i0 + j0];
                a1v = a1v + t3;
                { const _Bool ka2 = (a2x < 0) | (a2 == a2 & !(t3 <= a2)); a2 = ka2 ? t3 : a2; a2x = ka2 ? (i32)(j0) : a2x; }
            }
            a1 = a1 + a1v;
            
        }
        f32 r4 = (f32)a1;
        p1[i0] = r4;
        i64 r5 = (i64)a2x;
        p2[i0] = r5;
    }
    return status;
}
