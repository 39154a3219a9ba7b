int SYMBOL(void *const *p) {
    int status = 0;
    const f32 *p0 = p[0];
    f32 *p1 = p[1];
    i64 *p2 = p[2];
    for (i64 row = 0; row < 50; row++) {
        const i64 i0 = row;
        f64 a1 = 0;
        f32 a2 = 0; i64 a2x = -1;
        {
            f32 a1v = 0;
            
            for (i64 j0 = 0; j0 < 300; j0++) {
                f32 t3 = p0[300 * i0 + j0];
                a1v = a1v + t3;
                if (a2x < 0 || (a2 == a2 && (t3 > a2 || (t3 == a2 && (j0) < a2x) || t3 != t3)) || (a2 != a2 && t3 != t3 && (j0) < a2x)) { a2 = t3; a2x = j0; }
            }
            a1 = a1 + a1v;
            
        }
        f32 r4 = (f32)a1;
        p1[i0] = r4;
        i64 r5 = a2x;
        p2[i0] = r5;
    }
    return status;
}
