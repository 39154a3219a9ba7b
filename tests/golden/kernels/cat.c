int SYMBOL(void *const *p) {
    int status = 0;
    const f32 *p0 = p[0];
    const f32 *p1 = p[1];
    f32 *p2 = p[2];
    for (i64 row = 0; row < 3; row++) {
        const i64 i0 = (u32)row;
#pragma omp simd
        for (i64 j0 = 0; j0 < 9; j0++) {
            _Bool t1 = (_Bool)(((i32)j0 < 4));
            f32 t2 = t1 ? p0[4 * i0 + j0] : 0;
            _Bool t3 = (_Bool)((3 < (i32)j0));
            f32 t4 = t3 ? p1[5 * i0 + j0 - 4] : 0;
            f32 t5 = mg_exp_f32(t4);
            f32 t6 = t3 ? t5 : 0.0f;
            f32 t7 = t1 ? t2 : t6;
            p2[9 * i0 + j0] = t7;
        }
    }
    return status;
}
