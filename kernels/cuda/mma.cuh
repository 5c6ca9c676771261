// Products of stored weights with bf16 activations on the matrix units, for any number of rows in one order of summation.
//
// A block owns 16 outputs (the m of mma.m16n8k16) and all of K; its warps take equal, consecutive shares of K, and their sums are added
// in warp order. A lane reads 16 bytes of a weight row at a time and feeds them to consecutive mma as they come: which element of K goes
// to which place of the instruction does not matter as long as activations follow the same order. Weights become bf16 exactly: what does not
// fit (block scales of E4M3 and Q8_0) multiplies partial sums in f32.
//
// The number of warps depends on K and the type (cuda/ops.rs), the order inside of an mma on nothing: so a batch of N is N singles.
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
#define AHEAD_4 6
#define AHEAD_8 6
#define AHEAD_16 4
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
// A type's fragments. STEP: elements of K that a warp takes at once; EACH: those of one lane; AHEAD: steps that are loaded before the
// first is used; SPLIT: partial sums of a step are multiplied by `factor` before they are added; LATE: what unpacked elements lack.
template <int T>
struct Format;

template <>
struct Format<T_BF16> {
    static const int STEP = 64, EACH = 16, AHEAD = AHEAD_16;
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
    static const int STEP = 64, EACH = 16, AHEAD = AHEAD_8;
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
            u32 a = __byte_perm(w[i], 0, 0x1404), b = __byte_perm(w[i], 0, 0x3424);
            out[2 * i] = mul2((a & 0x80008000u) | ((a >> 4) & 0x07f007f0u), 0x7b807b80u); // 2^120
            out[2 * i + 1] = mul2((b & 0x80008000u) | ((b >> 4) & 0x07f007f0u), 0x7b807b80u);
        }
    }
    DEVICE float factor(const Raw& v) { return v.f; }
};

// Eight 4-bit floats of a word times a bf16 factor: four registers of pairs, times 2^-126.
DEVICE void unpack_e2m1(u32 w, u32 f, u32* out) {
    out[0] = mul2(w & 0x81c081c0u, f);
    out[1] = mul2((w << 3) & 0x81c081c0u, f);
    out[2] = mul2((w << 6) & 0x81c081c0u, f);
    out[3] = mul2(((w << 1) & 0x80008000u) | (((w >> 5) & 0x01000100u) | ((w >> 4) & 0x00c000c0u)), f);
}

template <>
struct Format<T_NVFP4> {
    static const int STEP = 128, EACH = 32, AHEAD = AHEAD_4;
    static const bool SPLIT = false;
    static constexpr float LATE = 256.0f;
    struct Raw { uint4 q; u32 f; };
    DEVICE Raw load(const Matrix&, const u8* q, const u8* s, int k) {
        Raw v;
        v.q = load_stream16(q);
        v.f = load_2(s + (k >> 4));
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
    static const int STEP = 128, EACH = 32, AHEAD = AHEAD_4;
    static const bool SPLIT = false;
    static constexpr float LATE = 65536.0f;
    struct Raw { uint4 q; u32 f; };
    DEVICE Raw load(const Matrix&, const u8* q, const u8* s, int k) {
        Raw v;
        v.q = load_stream16(q);
        v.f = load_1(s + (k >> 5));
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
    static const int STEP = 32, EACH = 8, AHEAD = 4;
    static const bool SPLIT = true;
    static constexpr float LATE = 1.0f;
    struct Raw { uint2 q; u16 f; };
    DEVICE Raw load(const Matrix&, const u8* q, const u8* s, int k) {
        Raw v;
        v.q = load_stream8(q);
        v.f = load_2((const u16*)s + (k >> 5));
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

// EACH activations of a row from column k on as pairs of bf16. Rows start on 16 bytes and are padded with zeros to a multiple of 128 (cuda/ops.rs sees
// to both).
template <int EACH>
DEVICE void load_x(const u8* row, int k, u32* out) {
    UNROLL for (int i = 0; i < EACH / 8; i++) {
        uint4 v = ((const uint4*)(row + 2ll * k))[i];
        out[4 * i] = v.x; out[4 * i + 1] = v.y; out[4 * i + 2] = v.z; out[4 * i + 3] = v.w;
    }
}

// One step's products: weights `a` (rows 0-7 of the tile) and `b` (8-15), NT tiles of 8 activation rows.
template <int T, int NT>
DEVICE void step_product(const typename Format<T>::Raw& a, const typename Format<T>::Raw& b, const u8* const* x, int k, float (*acc)[4]) {
    typedef Format<T> F;
    const int E = F::EACH;
    u32 pa[E / 2], pb[E / 2];
    F::unpack(a, pa);
    F::unpack(b, pb);
    float fa = F::SPLIT ? F::factor(a) : 1.0f, fb = F::SPLIT ? F::factor(b) : 1.0f;
    UNROLL for (int j = 0; j < NT; j++) {
        u32 px[E / 2];
        load_x<E>(x[j], k, px);
        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        float* c = F::SPLIT ? part : acc[j];
        UNROLL for (int i = 0; i < E / 4; i++) {
            u32 frag[4] = {pa[2 * i], pb[2 * i], pa[2 * i + 1], pb[2 * i + 1]};
            mma(c, frag, px[2 * i], px[2 * i + 1]);
        }
        if (F::SPLIT) {
            acc[j][0] = fma_of(fa, part[0], acc[j][0]);
            acc[j][1] = fma_of(fa, part[1], acc[j][1]);
            acc[j][2] = fma_of(fb, part[2], acc[j][2]);
            acc[j][3] = fma_of(fb, part[3], acc[j][3]);
        }
    }
}

// Where a lane's elements of a matrix row lie: from step 0 on, Span::BYTES of every step's 64 * Span::BYTES; and the row's scales.
struct Place {
    const u8* q;
    const u8* s;
};
template <int T>
DEVICE Place place_of(const Matrix& m, int expert, int row) {
    Place p;
    p.q = m.q + expert * m.q_each + (long long)(row >> 4) * 16 * m.q_row + (row >> 3 & 1) * 32 * Span<T>::BYTES +
          ((row & 7) * 4 + (lane_id() & 3)) * Span<T>::PIECE;
    int s = T == T_E4M3 ? (row + m.row_off) / m.brows : row;
    p.s = T != T_BF16 && m.s ? m.s + expert * m.s_each + (long long)s * m.s_row : (const u8*)0;
    return p;
}
// What is left for the end of a row's products.
template <int T>
DEVICE float late_of(const Matrix& m, int expert, int row) {
    return (m.factors ? m.factors[expert * m.factor_each + row / m.factor_rows] : m.global) * Format<T>::LATE;
}

// The weights of a warp's next steps, on their way: what step `first + n` needs comes to place n % AHEAD.
template <int T, int NT>
struct Coming {
    static const int AHEAD = NT >= 8 ? 1 : NT > 1 && is_coded(T) ? 2 : NT > 1 && Format<T>::AHEAD > 4 ? 4 : Format<T>::AHEAD; // as registers allow
    typename Format<T>::Raw a[AHEAD], b[AHEAD];

    // Of rows `pa` (outputs 0-7 of the tile) and `pb` (8-15): the `u`-th step behind the one at pa.q and column k.
    DEVICE_MEMBER void load(int u, const Matrix& m, const Place& pa, const Place& pb, int k) {
        a[u] = Format<T>::load(m, pa.q + u * 64 * Span<T>::BYTES, pa.s, k + u * Format<T>::STEP);
        b[u] = Format<T>::load(m, pb.q + u * 64 * Span<T>::BYTES, pb.s, k + u * Format<T>::STEP);
    }
};

#include "coded_mma.cuh"

#endif
