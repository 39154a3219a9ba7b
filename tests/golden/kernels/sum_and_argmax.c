int SYMBOL(void *const *p) {
    const f32 *p0 = p[0];
    f32 *p1 = p[1];
    int status = 0;
    for (i64 row = 0; row < 50; row++) {
        const i64 i0 = row;
        f64 a1 = 0;
        {
            f32 a1vs[64];
            for (i64 l = 0; l < 64; l++) { a1vs[l] = 0; }
            i64 g = 0;
            for (; g + 64 <= 300; g += 64) {
#pragma omp simd
                for (i64 l = 0; l < 64; l++) {
                    const i64 j0 = g + l;
                    f32 t2 = p0[300 * i0 + j0];
                    a1vs[l] = a1vs[l] + t2;
                }
            }
            f32 a1v = 0;
#pragma omp simd reduction(+:a1v)
            for (i64 l = 0; l < 64; l++) a1v = a1v + a1vs[l];
#pragma omp simd reduction(+:a1v)
            for (i64 j0 = g; j0 < 300; j0++) {
                f32 t2 = p0[300 * i0 + j0];
                a1v = a1v + t2;
            }
            a1 = a1 + a1v;
        }
        f32 r3 = (f32)a1;
        p1[i0] = r3;
    }
    return status;
}

int SYMBOL(void *const *p) {
    const f32 *p0 = p[0];
    i64 *p1 = p[1];
    int status = 0;
    for (i64 row = 0; row < 50; row++) {
        const i64 i0 = row;
        f32 a1 = 0; i64 a1x = -1;
        {
            
            for (i64 j0 = 0; j0 < 300; j0++) {
                f32 t2 = p0[300 * i0 + j0];
                if (a1x < 0 || (a1 == a1 && (t2 > a1 || (t2 == a1 && (j0) < a1x) || t2 != t2)) || (a1 != a1 && t2 != t2 && (j0) < a1x)) { a1 = t2; a1x = j0; }
            }
            
        }
        i64 r3 = a1x;
        p1[i0] = r3;
    }
    return status;
}
