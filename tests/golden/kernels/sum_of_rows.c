int SYMBOL(void *const *p) {
    int status = 0;
    const f32 *p0 = p[0];
    f32 *p1 = p[1];
    {
        const i64 lo = (i64)(0 % 1) * 70, hi = mg_min(lo + 70, 70);
        f64 a1[70];
        for (i64 l = 0; l < 70; l++) a1[l] = 0;
        for (i64 b = 0; b < 300; b += 16) {
            const i64 e = mg_min(b + 16, 300);
            f32 a1v[70];
            for (i64 l = 0; l < 70; l++) { a1v[l] = 0; }
            for (i64 j0 = b; j0 < e; j0++) {
#pragma omp simd
                for (i64 j1 = lo; j1 < hi; j1++) {
                    f32 t2 = p0[j1 + 70 * j0];
                    a1v[j1 - lo] = a1v[j1 - lo] + t2;
                }
            }
            for (i64 l = 0; l < 70; l++) { a1[l] = a1[l] + a1v[l]; }
        }
        for (i64 j0 = lo; j0 < hi; j0++) p1[j0] = (f32)a1[j0 - lo];
    }
    return status;
}
