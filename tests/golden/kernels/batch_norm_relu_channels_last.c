int SYMBOL(void *const *p) {
    int status = 0;
    const f32 *p0 = p[0];
    const f32 *p1 = p[1];
    const f32 *p2 = p[2];
    f32 *p3 = p[3];
    for (i64 row = 0; row < 72; row++) {
        const i64 i0 = (u32)row;
#pragma omp simd
        for (i64 j0 = 0; j0 < 8; j0++) {
            f32 t1 = p0[8 * i0 + j0];
            f32 t2 = p1[j0];
            f32 t3 = t1 - t2;
            f32 t4 = p2[j0];
            f32 t5 = t3 * t4;
            _Bool t6 = (t5 < 0.0f);
            f32 t7 = (t6 ? 0.0f : t5);
            p3[8 * i0 + j0] = t7;
        }
    }
    return status;
}
