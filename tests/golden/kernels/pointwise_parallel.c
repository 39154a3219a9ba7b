int SYMBOL(void *const *p) {
    int status = 0;
    const f32 *p0 = p[0];
    f32 *p1 = p[1];
#pragma omp parallel for schedule(static) reduction(|:status)
    for (i64 row = 0; row < 37; row++) {
        const i64 lo = (i64)((u32)row % 37) * 8192, hi = mg_min(lo + 8192, 300000);
#pragma omp simd
        for (i64 j0 = lo; j0 < hi; j0++) {
            f32 t1 = p0[j0];
            f32 t2 = mg_exp_f32(t1);
            p1[j0] = t2;
        }
    }
    return status;
}
