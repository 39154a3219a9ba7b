int SYMBOL(void *const *p) {
    int status = 0;
    const f32 *p0 = p[0];
    f32 *p1 = p[1];
#pragma omp parallel for schedule(static) reduction(|:status)
    for (i64 row = 0; row < 40; row++) {
        const i64 i0 = (u32)row;
        f32 a1 = -__builtin_inf();
        {
            f32 a1vs[MG_WIDE];
            for (i64 l = 0; l < MG_WIDE; l++) { a1vs[l] = -__builtin_inf(); }
            i64 g = 0;
            for (; g + MG_WIDE <= 512; g += MG_WIDE) {
#pragma omp simd
                for (i64 l = 0; l < MG_WIDE; l++) {
                    const i64 j0 = g + l;
                    f32 t2 = p0[512 * i0 + j0];
                    a1vs[l] = mg_maximum_f32(a1vs[l], t2);
                }
            }
            f32 a1v = -__builtin_inf();
            a1v = mg_lanes_maximum_f32(a1vs, MG_WIDE);
            a1 = mg_maximum_f32(a1, a1v);
        }
        f32 r3 = a1;
        f64 a4 = 0;
        f32 c5[512];
        {
            f32 a4vs[MG_WIDE] = {0};
            i64 g = 0;
            for (; g + MG_WIDE <= 512; g += MG_WIDE) {
#pragma omp simd
                for (i64 l = 0; l < MG_WIDE; l++) {
                    const i64 j0 = g + l;
                    f32 t6 = p0[512 * i0 + j0];
                    f32 t7 = t6 - r3;
                    f32 t8 = mg_exp_down_f32(t7);
                    c5[j0] = t8;
                    a4vs[l] = a4vs[l] + t8;
                }
            }
            f32 a4v = 0;
            a4v = mg_lanes_sum_f32(a4vs, MG_WIDE);
            a4 = a4 + a4v;
        }
        f32 r9 = (f32)a4;
        f32 d10k = mg_div_scale(r9), d10s = r9 * d10k, d10r = 1.0f / d10s;
#pragma omp simd
        for (i64 j0 = 0; j0 < 512; j0++) {
            f32 t11 = mg_div_sum(c5[j0], d10s, d10r);
            p1[512 * i0 + j0] = t11;
        }
    }
    return status;
}
