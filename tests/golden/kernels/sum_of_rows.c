int SYMBOL(void *const *p) {
    int status = 0;
    const f32 *p0 = p[0];
    f32 *p1 = p[1];
    f64 a1p[560] __attribute__((aligned(64)));
#pragma omp parallel for schedule(static) reduction(|:status)
    for (i64 portion = 0; portion < 8; portion++) {
        const i64 last = mg_min((portion + 1) * 38, 300);
        f64 *restrict a1 = a1p + portion * 70;
        f32 a1v[70] __attribute__((aligned(64)));
        for (i64 l = 0; l < 70; l++) { a1[l] = 0; a1v[l] = 0; }
        for (i64 base = portion * 38; base < last; base += 16) {
            const i64 stop = mg_min(base + 16, last);
            for (i64 row = base; row < stop; row++) {
                const i64 i0 = (u32)row;
#pragma omp simd
                for (i64 j0 = 0; j0 < 70; j0++) {
                    f32 t2 = p0[j0 + 70 * i0];
                    a1v[j0] = a1v[j0] + t2;
                }
            }
#pragma omp simd
            for (i64 l = 0; l < 70; l++) { a1[l] = a1[l] + a1v[l]; a1v[l] = 0; }
        }
    }
    for (i64 k = 1; k < 8; k++) {
#pragma omp simd
        for (i64 l = 0; l < 70; l++) a1p[l] = a1p[l] + a1p[k * 70 + l];
    }
    for (i64 j0 = 0; j0 < 70; j0++) {
        f32 r3 = (f32)a1p[j0];
        p1[j0] = r3;
    }
    return status;
}
