int SYMBOL(void *const *p) {
    int status = 0;
    const f32 *p0 = p[0];
    f32 *p1 = p[1];
    f64 a1p[7], a1r[1];
#pragma omp parallel for schedule(static) reduction(|:status)
    for (i64 row = 0; row < 7; row++) {
        const i64 lo = (i64)((u32)row % 7) * 8192, hi = mg_min(lo + 8192, 50000);
        f64 a1 = 0;
        for (i64 b = lo; b < hi; b += 2048) {
            const i64 e = mg_min(b + 2048, hi);
            f32 a1vs[64] = {0};
            i64 g = b;
            for (; g + 64 <= e; g += 64) {
#pragma omp simd
                for (i64 l = 0; l < 64; l++) {
                    const i64 j0 = g + l;
                    f32 t2 = p0[j0];
                    a1vs[l] = a1vs[l] + t2;
                }
            }
            f32 a1v = 0;
            a1v = mg_lanes_sum_f32(a1vs, 64);
#pragma omp simd reduction(+:a1v)
            for (i64 j0 = g; j0 < e; j0++) {
                f32 t2 = p0[j0];
                a1v = a1v + t2;
            }
            a1 = a1 + a1v;
        }
        a1p[row] = a1;
    }
    for (i64 row = 0; row < 1; row++) {
        f64 a1 = 0;
        for (i64 k = 0; k < 7; k++) a1 = a1 + a1p[row * 7 + k];
        a1r[row] = a1;
    }
    for (i64 row = 0; row < 1; row++) {
        f32 r3 = (f32)a1r[row];
        p1[0] = r3;
    }
    return status;
}
