int SYMBOL(void *const *p) {
    int status = 0;
    const i64 *p0 = p[0];
    const f32 *p1 = p[1];
    f32 *p2 = p[2];
    for (i64 row = 0; row < 3; row++) {
        const i64 i0 = (u32)row;
        i64 t1 = p0[i0];
        status |= ((u64)(i64)t1 >= (u64)10) ? 1 : 0;
        i64 ix2 = (u64)(i64)t1 >= (u64)10 ? 0 : (i64)t1;
#pragma omp simd
        for (i64 j0 = 0; j0 < 64; j0++) {
            f32 t3 = p1[64 * ix2 + j0];
            f32 t4 = t3 * 2.0f;
            p2[64 * i0 + j0] = t4;
        }
    }
    return status;
}
