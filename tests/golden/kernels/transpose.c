int SYMBOL(void *const *p) {
    int status = 0;
    const f32 *p0 = p[0];
    f32 *p1 = p[1];
    {
        const i64 lo = 0 % 1 * 90, hi = mg_min(lo + 90, 90);
        for (i64 tlo = lo; tlo < hi; tlo += 32) {
            const i64 thi = mg_min(tlo + 32, hi);
            for (i64 vlo = 0; vlo < 70; vlo += 32) {
                const i64 vhi = mg_min(vlo + 32, 70);
                f32 w1[1024] __attribute__((aligned(64)));
                mg_tile_u32((u32 *)w1, (const u32 *)(p0 + tlo + 90 * vlo), 90, thi - tlo, vhi - vlo);
                for (i64 j0 = tlo; j0 < thi; j0++) {
#pragma omp simd
                    for (i64 j1 = vlo; j1 < vhi; j1++) {
                        f32 t2 = w1[(j0 - tlo) * 32 + j1 - vlo];
                        p1[70 * j0 + j1] = t2;
                    }
                }
            }
        }
    }
    return status;
}
