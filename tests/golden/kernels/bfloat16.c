int SYMBOL(void *const *p) {
    int status = 0;
    const u16 *p0 = p[0];
    u16 *p1 = p[1];
    {
#pragma omp simd
        for (i64 j0 = 0; j0 < 9; j0++) {
            f32 t1 = mg_load_bf16(p0[j0]);
            f32 t2 = t1 * 0x1.0000000000000p-1f;
            p1[j0] = mg_store_bf16(t2);
        }
    }
    return status;
}
