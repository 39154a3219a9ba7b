int SYMBOL(void *const *p) {
    int status = 0;
    const f32 *p0 = p[0];
    f32 *p1 = p[1];
    for (i64 row = 0; row < 2; row++) {
        const i64 lo = (i64)((u32)row % 2) * 64, hi = mg_min(lo + 64, 90);
        for (i64 tlo = lo; tlo < hi; tlo += 64) {
            const i64 thi = mg_min(tlo + 64, hi);
            for (i64 vlo = 0; vlo < 70; vlo += 64) {
                const i64 vhi = mg_min(vlo + 64, 70);
                f32 w1[4096] __attribute__((aligned(64)));
                mg_tile_u32((u32 *)w1, (const u32 *)(p0 + tlo + 90 * vlo), 90, thi - tlo, vhi - vlo, 0);
                for (i64 j0 = tlo; j0 < thi; j0++) {
#pragma omp simd
                    for (i64 j1 = vlo; j1 < vhi; j1++) {
                        f32 t2 = w1[(j0 - tlo) * 64 + j1 - vlo];
                        p1[70 * j0 + j1] = t2;
                    }
                }
            }
        }
    }
    return status;
}
