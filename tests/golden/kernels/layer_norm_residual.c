int SYMBOL(void *const *p) {
    int status = 0;
    const f32 *p0 = p[0];
    const f32 *p1 = p[1];
    f32 *p2 = p[2];
    f32 d9k = mg_div_scale(96.0f), d9s = 96.0f * d9k, d9r = 1.0f / d9s;
    for (i64 row = 0; row < 40; row++) {
        const i64 i0 = (u32)row;
        f64 a1 = 0;
        f32 c2[96];
        {
            f32 a1vs[32] = {0};
            i64 g = 0;
            for (; g + 32 <= 96; g += 32) {
#pragma omp simd
                for (i64 l = 0; l < 32; l++) {
                    const i64 j0 = g + l;
                    f32 t3 = p0[96 * i0 + j0];
                    f32 t4 = p1[96 * i0 + j0];
                    f32 t5 = mg_erf_f32(t4);
                    f32 t6 = t3 + t5;
                    c2[j0] = t6;
                    a1vs[l] = a1vs[l] + t6;
                }
            }
            f32 a1v = 0;
            a1v = mg_lanes_sum_f32(a1vs, 32);
            a1 = a1 + a1v;
        }
        f32 r7 = (f32)a1;
        f32 t10 = mg_div_by(r7, d9s, d9r, d9k);
        f64 a8 = 0;
        {
            f32 a8vs[32] = {0};
            i64 g = 0;
            for (; g + 32 <= 96; g += 32) {
#pragma omp simd
                for (i64 l = 0; l < 32; l++) {
                    const i64 j0 = g + l;
                    f32 t11 = c2[j0] - t10;
                    f32 t12 = t11 * t11;
                    a8vs[l] = a8vs[l] + t12;
                }
            }
            f32 a8v = 0;
            a8v = mg_lanes_sum_f32(a8vs, 32);
            a8 = a8 + a8v;
        }
        f32 r13 = (f32)a8;
        f32 t15 = mg_div_by(r13, d9s, d9r, d9k);
        f32 t16 = t15 + 0x1.4f8b580000000p-17f;
        f32 t17 = 1.0f / __builtin_sqrtf(t16);
#pragma omp simd
        for (i64 j0 = 0; j0 < 96; j0++) {
            f32 t14 = c2[j0] - t10;
            f32 t18 = t14 * t17;
            p2[96 * i0 + j0] = t18;
        }
    }
    return status;
}
