// What latent attention on the matrix units has in common, for few rows (mla_mma.cu) and many (mla_wide.cu): sizes, and the steps of which the order
// makes a row's bits.
#pragma once
#include "portable.cuh"

#define PART 64    // chosen rows whose sums are kept apart
#define LATENT 512

#if TANDEM_MMA

DEVICE u32 pair(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// The larger of two; a number rather than a NaN.
DEVICE float most_of(float a, float b) { return fmaxf(a, b); }
// A row's weight from its score: exp((score - top) scale), of which the power of two is taken; `base` is `base_of(top, scale)`. Rounded to bf16 it goes
// into a product, so the instruction's two units of the last place do not show.
DEVICE float base_of(float top, float scale) { return top * (scale * 1.44269504088896340736f); }
DEVICE float weight_of(float score, float base, float scale) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fma_of(score, scale * 1.44269504088896340736f, -base)));
    return y;
}

// How the sums of one part join those of the parts before it: both sides' factors.
DEVICE void join_factors(float top, float part_top, float joint, float* before, float* mine) {
    *before = top == -infinity() ? 0.0f : exp_of(top - joint);
    *mine = part_top == -infinity() ? 0.0f : exp_of(part_top - joint);
}

#endif
