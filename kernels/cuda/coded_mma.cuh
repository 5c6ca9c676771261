// Codes on the matrix units: levels are bf16 exactly; the sum of each 16 columns is multiplied by its scale in f32; minima are weights of their
// own, as whole numbers that multiply the same activations; those in f16 (HALF_MIN) are for the scalar kernel alone. Neighbours: coded.cuh (how codes
// lie), mma.cuh (which includes this).
#pragma once

DEVICE u32 load_near4(const void* p) {
    u32 v;
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
DEVICE uint2 load_near8(const void* p) {
    uint2 v;
    asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
// Two bf16 of 128 + code, less 128 + zero.
DEVICE u32 less(u32 codes, u32 zero) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(codes), "r"(0x3f803f80u), "r"(zero));
    return d;
}
// The float of byte i of a word plus 2^23.
DEVICE float byte_up(u32 word, int i) { return as_float(__byte_perm(word, 0x4b000000u, 0x7540 | i)); }

template <int T>
struct CodedFormat {
    static const int STEP = is_code8(T) ? 64 : 128, EACH = STEP / 4, GROUPS = STEP / 16;
    static const bool SPLIT = true;
    static constexpr float LATE = 1.0f;
    // Scales of the step, and d (and dmin) of its 256 columns.
    struct Raw { uint4 q; u32 s[GROUPS / 4]; u32 d; };
    DEVICE Raw load(const Matrix& m, const u8* q, const u8* s, int k) {
        Raw v;
        v.q = load_stream16(q);
        k &= -STEP;
        if constexpr (GROUPS == 8) {
            uint2 two = load_near8(s + (k >> 4));
            v.s[0] = two.x;
            v.s[1] = two.y;
        } else {
            v.s[0] = load_near4(s + (k >> 4));
        }
        s += behind_of(m.cols);
        v.d = has_mins(T) ? load_near4(s + (k >> 8) * 4) : load_2(s + (k >> 8) * 2);
        return v;
    }
    // The lane's four levels of group i, as two pairs.
    DEVICE void unpack(const Matrix& m, const Raw& v, int i, u32* out) {
        u32 words[4] = {v.q.x, v.q.y, v.q.z, v.q.w};
        if constexpr (is_code8(T)) {
            u32 zero = (0xc300u | (u32)m.zero) * 0x10001u; // -(128 + zero)
            out[0] = less(__byte_perm(words[i], 0x43434343u, 0x4140), zero);
            out[1] = less(__byte_perm(words[i], 0x43434343u, 0x4342), zero);
        } else if constexpr (T != T_LUT4) {
            u32 zero = (0xc300u | (u32)m.zero) * 0x10001u, word = words[i >> 1] >> (8 * (i & 1));
            out[0] = less((word & 0x000f000fu) | 0x43004300u, zero);
            out[1] = less((word >> 4 & 0x000f000fu) | 0x43004300u, zero);
        } else {
            // A byte of four from eight by three bits of each code, from the table's lower and upper half; then the fourth bit chooses.
            u32 codes = words[i >> 1] >> (16 * (i & 1)), three = codes & 0x7777u, half = 0x3210u | (codes >> 1 & 0x4444u);
            u32 low = __byte_perm(__byte_perm(m.table[0], m.table[1], three), __byte_perm(m.table[2], m.table[3], three), half);
            u32 high = __byte_perm(__byte_perm(m.table[4], m.table[5], three), __byte_perm(m.table[6], m.table[7], three), half);
            out[0] = __byte_perm(low, high, 0x5140);
            out[1] = __byte_perm(low, high, 0x7362);
        }
    }
};
template <>
struct Format<T_CODE4> : CodedFormat<T_CODE4> {};
template <>
struct Format<T_LUT4> : CodedFormat<T_LUT4> {};
template <>
struct Format<T_CODE8> : CodedFormat<T_CODE8> {};
template <>
struct Format<T_CODE4_MIN> : CodedFormat<T_CODE4_MIN> {};
template <>
struct Format<T_CODE8_MIN> : CodedFormat<T_CODE8_MIN> {};

// The scales of a step of one row, and its whole minima as pairs of equal bf16.
template <int GROUPS>
struct Factors {
    float of[GROUPS];
    u32 mins[GROUPS / 4]; // a byte each
};
template <int T, int GROUPS, class Raw>
DEVICE Factors<GROUPS> factors_of(int form, const Raw& v) {
    Factors<GROUPS> f;
    float d = half_to_float((u16)v.d);
    UNROLL for (int w = 0; w < GROUPS / 4; w++) {
        u32 scales = v.s[w];
        f.mins[w] = 0;
        if (has_mins(T)) {
            bool pairs = form == PAIR_MIN;
            f.mins[w] = pairs ? __byte_perm(scales, 0, 0x3311) : scales >> 4 & 0x0f0f0f0fu;
            scales = pairs ? __byte_perm(scales, 0, 0x2200) : scales & 0x0f0f0f0fu;
        }
        UNROLL for (int i = 0; i < 4; i++) f.of[4 * w + i] = d * (byte_up(scales, i) - (has_mins(T) ? 8388608.0f : 8388736.0f));
    }
    if (!has_mins(T) && form == HALF)
        UNROLL for (int i = 0; i < GROUPS; i++) f.of[i] = half_to_float((u16)(v.s[i >> 2] >> (i & 2 ? 16 : 0)));
    return f;
}

// One step's products: weights `a` (rows 0-7 of the tile) and `b` (8-15) with NT tiles of 8 activation rows; `x(j, i)`: the lane's four
// activations of group i, of tile j.
template <int T, int NT, class Raw, class X>
DEVICE void coded_product(const Matrix& m, const Raw& a, const Raw& b, X x, float (*acc)[4]) {
    typedef CodedFormat<T> F;
    const int G = F::GROUPS;
    Factors<G> fa = factors_of<T, G>(m.form, a), fb = factors_of<T, G>(m.form, b);
    float min[NT][4] = {};
    UNROLL for (int i = 0; i < G; i++) {
        u32 pa[2], pb[2], ma = 0, mb = 0;
        F::unpack(m, a, i, pa);
        F::unpack(m, b, i, pb);
        if (has_mins(T)) {
            ma = less(__byte_perm(fa.mins[i >> 2], 0x43434343u, 0x4040 | (i & 3) * 0x101), 0xc300c300u);
            mb = less(__byte_perm(fb.mins[i >> 2], 0x43434343u, 0x4040 | (i & 3) * 0x101), 0xc300c300u);
        }
        UNROLL for (int j = 0; j < NT; j++) {
            uint2 px = x(j, i);
            float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            u32 frag[4] = {pa[0], pb[0], pa[1], pb[1]}, mins[4] = {ma, mb, ma, mb};
            mma(part, frag, px.x, px.y);
            if (has_mins(T)) mma(min[j], mins, px.x, px.y);
            acc[j][0] = fma_of(fa.of[i], part[0], acc[j][0]);
            acc[j][1] = fma_of(fa.of[i], part[1], acc[j][1]);
            acc[j][2] = fma_of(fb.of[i], part[2], acc[j][2]);
            acc[j][3] = fma_of(fb.of[i], part[3], acc[j][3]);
        }
    }
    if (has_mins(T)) {
        float da = -half_to_float((u16)(a.d >> 16)), db = -half_to_float((u16)(b.d >> 16));
        UNROLL for (int j = 0; j < NT; j++) {
            acc[j][0] = fma_of(da, min[j][0], acc[j][0]);
            acc[j][1] = fma_of(da, min[j][1], acc[j][1]);
            acc[j][2] = fma_of(db, min[j][2], acc[j][2]);
            acc[j][3] = fma_of(db, min[j][3], acc[j][3]);
        }
    }
}

// One step's products of any type.
template <int T, int NT, class X>
DEVICE void step_of(const Matrix& m, const typename Format<T>::Raw& a, const typename Format<T>::Raw& b, const X& x, float (*acc)[4]) {
    if constexpr (is_coded(T)) coded_product<T, NT>(m, a, b, [&](int j, int i) { return x.four(j, i); }, acc);
    else step_product<T, NT>(a, b, x, acc);
}
