int SYMBOL(void *const *p) {
    const f32 *p0 = p[0];
    f32 *p1 = p[1];
    int status = 0;
#pragma omp parallel for schedule(static) reduction(|:status)
    for (i64 row = 0; row < 40; row++) {
        const i64 i0 = row;
        f32 a1 = -__builtin_inf();
        {
            f32 a1vs[64];
            for (i64 l = 0; l < 64; l++) { a1vs[l] = -__builtin_inf(); }
            i64 g = 0;
            for (; g + 64 <= 512; g += 64) {
#pragma omp simd
                for (i64 l = 0; l < 64; l++) {
                    const i64 j0 = g + l;
                    f32 t2 = p0[512 * i0 + j0];
                    a1vs[l] = mg_maximum_f32(a1vs[l], t2);
                }
            }
            f32 a1v = -__builtin_inf();
#pragma omp simd reduction(mg_max:a1v)
            for (i64 l = 0; l < 64; l++) a1v = mg_maximum_f32(a1v, a1vs[l]);
            a1 = mg_maximum_f32(a1, a1v);
        }
        f32 r3 = a1;
#pragma omp simd
        for (i64 j0 = 0; j0 < 512; j0++) {
            f32 t4 = p0[512 * i0 + j0];
            f32 t5 = t4 - r3;
            f32 t6 = mg_exp_f32(t5);
            p1[512 * i0 + j0] = t6;
        }
    }
    return status;
}

int SYMBOL(void *const *p) {
    const f32 *p0 = p[0];
    f32 *p1 = p[1];
    int status = 0;
#pragma omp parallel for schedule(static) reduction(|:status)
    for (i64 row = 0; row < 40; row++) {
        const i64 i0 = row;
        f64 a1 = 0;
        {
            f32 a1vs[64];
            for (i64 l = 0; l < 64; l++) { a1vs[l] = 0; }
            i64 g = 0;
            for (; g + 64 <= 512; g += 64) {
#pragma omp simd
                for (i64 l = 0; l < 64; l++) {
                    const i64 j0 = g + l;
                    f32 t2 = p0[512 * i0 + j0];
                    a1vs[l] = a1vs[l] + t2;
                }
            }
            f32 a1v = 0;
#pragma omp simd reduction(+:a1v)
            for (i64 l = 0; l < 64; l++) a1v = a1v + a1vs[l];
            a1 = a1 + a1v;
        }
        f32 r3 = (f32)a1;
        f32 d5k = mg_div_scale(r3), d5s = r3 * d5k, d5r = 1.0f / d5s;
#pragma omp simd
        for (i64 j0 = 0; j0 < 512; j0++) {
            f32 t4 = p0[512 * i0 + j0];
            f32 t6 = mg_div_by(t4, d5s, d5r, d5k);
            p1[512 * i0 + j0] = t6;
        }
    }
    return status;
}
