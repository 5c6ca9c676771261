// Products of stored weights with bf16 activations on the matrix units, for any number of rows in one order of summation.
//
// A block owns 16 outputs (the m of mma.m16n8k16) and all of K; its warps take equal, consecutive shares of K, and their sums are added
// in warp order. A lane reads 16 bytes of a weight row at a time and feeds them to consecutive mma as they come: which element of K goes
// to which place of the instruction does not matter as long as activations follow the same order. Weights become bf16 exactly: what does not
// fit (block scales of E4M3 and Q8_0) multiplies partial sums in f32. Neighbours: stream.cuh, few.cuh, some.cuh, wide.cuh, format.cu.
//
// The number of warps depends on K and the type (cuda/weight.rs), the order inside of an mma on nothing: so a batch of N is N singles.
#pragma once
#include "weights.cuh"

#if TANDEM_MMA

// c += a (16 x 16) * b (16 x 8).
DEVICE void mma(float* c, const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two bf16 products; exact where the result fits.
DEVICE u32 mul2(u32 a, u32 b) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}
// Scales: small pieces of which neighbours come soon, so that they stay in L1.
DEVICE u16 load_2(const void* p) {
    u16 v;
    asm("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
DEVICE u32 load_1(const void* p) {
    u32 v;
    asm("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
// A type's fragments. STEP: elements of K that a warp takes at once; EACH: those of one lane; SPLIT: partial sums of a step are multiplied by `factor`
// before they are added; LATE: what unpacked elements lack.
template <int T>
struct Format;

template <>
struct Format<T_BF16> {
    static const int STEP = 64, EACH = 16;
    static const bool SPLIT = false;
    static constexpr float LATE = 1.0f;
    struct Raw { uint4 a, b; };
    DEVICE Raw load(const Matrix&, const u8* q, const u8*, int) {
        Raw v;
        v.a = load_stream16(q);
        v.b = load_stream16(q + 512);
        return v;
    }
    // Registers: pairs of elements in order.
    DEVICE void unpack(const Raw& v, u32* out) {
        out[0] = v.a.x; out[1] = v.a.y; out[2] = v.a.z; out[3] = v.a.w;
        out[4] = v.b.x; out[5] = v.b.y; out[6] = v.b.z; out[7] = v.b.w;
    }
    DEVICE float factor(const Raw&) { return 1.0f; }
};

template <>
struct Format<T_E4M3> {
    static const int STEP = 64, EACH = 16;
    static const bool SPLIT = true;
    static constexpr float LATE = 1.0f;
    struct Raw { uint4 q; float f; };
    DEVICE Raw load(const Matrix& m, const u8* q, const u8* s, int k) {
        Raw v;
        v.q = load_stream16(q);
        v.f = s ? ((const float*)s)[min_of(k + m.col_off, m.cols - 1 + m.col_off) >> m.bshift] : 1.0f;
        return v;
    }
    DEVICE void unpack(const Raw& v, u32* out) {
        u32 w[4] = {v.q.x, v.q.y, v.q.z, v.q.w};
        UNROLL for (int i = 0; i < 4; i++) {
            out[2 * i] = mul2(w[i] & 0x87f087f0u, 0x7b807b80u); // 2^120
            out[2 * i + 1] = mul2(((w[i] << 4) & 0x80f080f0u) | ((w[i] >> 4) & 0x07000700u), 0x7b807b80u);
        }
    }
    DEVICE float factor(const Raw& v) { return v.f; }
};

// Eight 4-bit floats of a word times a bf16 factor: four registers of pairs, times 2^-126.
DEVICE void unpack_e2m1(u32 w, u32 f, u32* out) {
    out[0] = mul2(w & 0x81c081c0u, f);
    out[1] = mul2((w << 6) & 0x81c081c0u, f);
    out[2] = mul2(__funnelshift_r(w, w, 4) & 0x81c081c0u, f);
    out[3] = mul2(((w << 2) & 0x80c080c0u) | ((w >> 6) & 0x01000100u), f);
}

template <>
struct Format<T_NVFP4> {
    static const int STEP = 128, EACH = 32;
    static const bool SPLIT = false;
    static constexpr float LATE = 256.0f;
    struct Raw { uint4 q; u32 f; };
    DEVICE Raw load(const Matrix&, const u8* q, const u8* s, int k) {
        Raw v;
        v.q = load_stream16(q);
        v.f = load_2(s + (k >> 7) * 128 + (k >> 4 & 7));
        return v;
    }
    // Two E4M3 scales times 2^118, each as two equal bf16 (exact: 4 bits of significand).
    DEVICE void scales(u32 f, u32* low, u32* high) {
#if __CUDA_ARCH__ >= 890
        u32 two;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"((u16)f));
        float a = half_to_float((u16)two), b = half_to_float((u16)(two >> 16));
#else
        float a = e4m3((u8)f), b = e4m3((u8)(f >> 8));
#endif
        const float up = as_float(0x7a800000u); // 2^118
        *low = __byte_perm(as_bits(a * up), 0, 0x3232);
        *high = __byte_perm(as_bits(b * up), 0, 0x3232);
    }
    DEVICE void unpack(const Raw& v, u32* out) {
        u32 low, high;
        scales(v.f, &low, &high);
        unpack_e2m1(v.q.x, low, out);
        unpack_e2m1(v.q.y, low, out + 4);
        unpack_e2m1(v.q.z, high, out + 8);
        unpack_e2m1(v.q.w, high, out + 12);
    }
    DEVICE float factor(const Raw&) { return 1.0f; }
};

template <>
struct Format<T_MXFP4> {
    static const int STEP = 128, EACH = 32;
    static const bool SPLIT = false;
    static constexpr float LATE = 65536.0f;
    struct Raw { uint4 q; u32 f; };
    DEVICE Raw load(const Matrix&, const u8* q, const u8* s, int k) {
        Raw v;
        v.q = load_stream16(q);
        v.f = load_1(s + (k >> 7) * 64 + (k >> 5 & 3));
        return v;
    }
    DEVICE void unpack(const Raw& v, u32* out) {
        u32 f = (v.f + 110u) << 7; // 2^(b - 127 + 110); bytes above 144 never come here
        f |= f << 16;
        unpack_e2m1(v.q.x, f, out);
        unpack_e2m1(v.q.y, f, out + 4);
        unpack_e2m1(v.q.z, f, out + 8);
        unpack_e2m1(v.q.w, f, out + 12);
    }
    DEVICE float factor(const Raw&) { return 1.0f; }
};

template <>
struct Format<T_Q8_0> {
    static const int STEP = 32, EACH = 8;
    static const bool SPLIT = true;
    static constexpr float LATE = 1.0f;
    struct Raw { uint2 q; u16 f; };
    DEVICE Raw load(const Matrix&, const u8* q, const u8* s, int k) {
        Raw v;
        v.q = load_stream8(q);
        v.f = load_2(s + (k >> 5) * 32);
        return v;
    }
    // A signed byte is (128 + low 7 bits) - (128, or 256 where it is negative): both are bf16 by their bits.
    DEVICE u32 signed_pair(u32 t) {
        u32 d, a = (t & 0x007f007fu) | 0x43004300u, b = (t & 0x00800080u) | 0x43004300u;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(b), "r"(0xbf80bf80u), "r"(a));
        return d;
    }
    DEVICE void unpack(const Raw& v, u32* out) {
        out[0] = signed_pair(__byte_perm(v.q.x, 0, 0x4140));
        out[1] = signed_pair(__byte_perm(v.q.x, 0, 0x4342));
        out[2] = signed_pair(__byte_perm(v.q.y, 0, 0x4140));
        out[3] = signed_pair(__byte_perm(v.q.y, 0, 0x4342));
    }
    DEVICE float factor(const Raw& v) { return half_to_float(v.f); }
};

// Activations of rows of bf16 in global memory: row j's step, from its first column on. Rows start on 16 bytes and are padded with zeros to a multiple of 128
// (cuda/ops.rs sees to both).
struct RowsOfX {
    const u8* const* rows; // the lane's, from its 16 bytes (8, of codes) on
    int k;
    // Piece i of the lane's: eight elements as pairs.
    DEVICE_MEMBER uint4 piece(int j, int i) const { return *(const uint4*)(rows[j] + 2ll * k + 64 * i); }
    // The lane's four of each 16, as codes take them.
    DEVICE_MEMBER uint2 four(int j, int i) const { return *(const uint2*)(rows[j] + 2ll * k + 32 * i); }
};

// One step's products: weights `a` (rows 0-7 of the tile) and `b` (8-15), NT tiles of 8 activation rows.
template <int T, int NT, class X>
DEVICE void step_product(const typename Format<T>::Raw& a, const typename Format<T>::Raw& b, const X& x, float (*acc)[4]) {
    typedef Format<T> F;
    const int E = F::EACH;
    u32 pa[E / 2], pb[E / 2];
    F::unpack(a, pa);
    F::unpack(b, pb);
    float parts[F::SPLIT ? NT : 1][4] = {};
    UNROLL for (int i = 0; i < E / 8; i++) {
        uint4 px[NT];
        UNROLL for (int j = 0; j < NT; j++) px[j] = x.piece(j, i);
        UNROLL for (int half = 0; half < 2; half++) {
            const u32 *fa = pa + 4 * i + 2 * half, *fb = pb + 4 * i + 2 * half;
            u32 frag[4] = {fa[0], fb[0], fa[1], fb[1]};
            UNROLL for (int j = 0; j < NT; j++) mma(F::SPLIT ? parts[F::SPLIT ? j : 0] : acc[j], frag, half ? px[j].z : px[j].x, half ? px[j].w : px[j].y);
        }
    }
    if (F::SPLIT) {
        float fa = F::factor(a), fb = F::factor(b);
        UNROLL for (int j = 0; j < NT; j++)
            UNROLL for (int c = 0; c < 4; c++) acc[j][c] = fma_of(c < 2 ? fa : fb, parts[F::SPLIT ? j : 0][c], acc[j][c]);
    }
}

// Where a lane's elements of a matrix row lie: from step 0 on, Span::BYTES of every step's 64 * Span::BYTES; and the row's scales.
struct Place {
    const u8* q;
    const u8* s;
};
template <int T>
DEVICE const u8* elements_of(const Matrix& m, int expert, int row, int lane) {
    return m.q + expert * m.q_each + (long long)(row >> 4) * 16 * m.q_row + (row >> 3 & 1) * 32 * Span<T>::BYTES +
           ((row & 7) * 4 + (lane & 3)) * Span<T>::PIECE;
}
template <int T>
DEVICE const u8* scales_of(const Matrix& m, int expert, int row) {
    // Only scales in tiles are there for rows that fill up the last tile.
    if (T == T_E4M3 || is_coded(T)) row = min_of(row, m.rows - 1);
    return T != T_BF16 && m.s ? m.s + expert * m.s_each + scales_at(m, row) : (const u8*)0;
}
template <int T>
DEVICE Place place_of(const Matrix& m, int expert, int row) {
    Place p = {elements_of<T>(m, expert, row, lane_id()), scales_of<T>(m, expert, row)};
    return p;
}
// What is left for the end of a row's products.
template <int T>
DEVICE float late_of(const Matrix& m, int expert, int row) {
    return (m.factors ? m.factors[expert * m.factor_each + row / m.factor_rows] : m.global) * Format<T>::LATE;
}

#include "coded_mma.cuh"

#endif
