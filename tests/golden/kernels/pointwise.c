int SYMBOL(void *const *p) {
    int status = 0;
    const f32 *p0 = p[0];
    f32 *p1 = p[1];
    {
#pragma omp simd
        for (i64 j0 = 0; j0 < 35; j0++) {
            f32 t1 = p0[j0];
            f32 t2 = t1 + 1.0f;
            f32 t3 = mg_tanh_f32(t2);
            p1[j0] = t3;
        }
    }
    return status;
}
