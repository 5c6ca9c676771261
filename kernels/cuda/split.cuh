// Products of f32 on the matrix units: each operand is the sum of two numbers of 11 bits, and all but the product of both lower ones is added up. As halves
// where a power of two brings numbers in range, else as tf32, at half the rate. Neighbours: kda_chunk.cu, mma.cuh (products of stored weights).
#pragma once
#include "portable.cuh"

#if TANDEM_MMA

// The larger of `most` and |x|; a NaN does not count.
DEVICE float larger(float most, float x) { return fmaxf(most, fabsf(x)); }

// 2^x, to 2^-22 of it; below 2^-126 zero.
DEVICE float quick_exp2(float x) {
    float v;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
    return v;
}

// c += a (16 x 16) * b (16 x 8), of halves.
DEVICE void mma_halves(float* c, const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE u32 two_halves(float a, float b) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a));
    return d;
}
// Two floats below 65504 as sums of two halves: to 22 bits from 2^-2 on, below that to 2^-25.
DEVICE void split_halves(float a, float b, u32* high, u32* low) {
    *high = two_halves(a, b);
    *low = two_halves(a - half_to_float((u16)*high), b - half_to_float((u16)(*high >> 16)));
}
// Four floats times `by` as a piece: the higher halves of two each, then the lower ones.
DEVICE uint4 halves(float a, float b, float c, float d, float by) {
    uint4 v;
    split_halves(a * by, b * by, &v.x, &v.z);
    split_halves(c * by, d * by, &v.y, &v.w);
    return v;
}

// A float as the sum of two of which the matrix units read the upper 19 bits.
DEVICE void split_tf32(float x, u32* high, u32* low) {
    *high = as_bits(x) & 0xffffe000u;
    *low = as_bits(x - as_float(*high));
}
DEVICE void mma_tf32(float* c, const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// `large` + `small` += a (16 x 8) * b (8 x 8), of which a lane has four and two, as tf32.
DEVICE void product(float* large, float* small, float a0, float a1, float a2, float a3, float b0, float b1) {
    float a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    u32 ah[4], al[4], bh[2], bl[2];
    UNROLL for (int i = 0; i < 4; i++) split_tf32(a[i], ah + i, al + i);
    UNROLL for (int i = 0; i < 2; i++) split_tf32(b[i], bh + i, bl + i);
    mma_tf32(small, ah, bl[0], bl[1]);
    mma_tf32(large, ah, bh[0], bh[1]);
    mma_tf32(small, al, bh[0], bh[1]);
}

#endif
