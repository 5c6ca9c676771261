// Sparse MLA attention on the matrix units, for bf16 precision, latents of 512 and kv_b in BF16: queries, attention's weights and what it makes of
// the latents are rounded to bf16 on the way into a product, sums stay f32. Three steps as in mla.cu: `mla_fold_mma` (queries onto the latent),
// `mla_attend_mma` (a block per part of 64 chosen rows; of many rows `mla_attend_many`, a block per 32 heads of a row), `mla_out_mma` (joins the
// parts and goes out through the values' weights).
//
// Both outer steps read each weight once for eight rows, with all of a block's weights in flight before the rows are there. No sum depends on
// how many rows a launch has. Neighbours: cuda/mla.rs; mla_wide.cu (16 rows and more on Hopper); mla.cu for everything else.
#include "mla.cuh"
#include "step.cuh"
#include "weights.cuh"

#if TANDEM_MMA

#define LINE 520   // bf16 of a latent row in shared memory: what is behind the 512 spreads rows over the banks
#define SUMS (LATENT + 2) // of a part: weighted latents, largest score, sum of exponentials

DEVICE void mma_bf16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The 16 bytes of a row of a tiled BF16 matrix that hold eight columns from `col` on.
DEVICE const u8* eight_of(const Matrix& m, int row, int col) {
    return m.q + (long long)(row >> 4) * 16 * m.q_row + (col >> 6) * 2048 + (row >> 3 & 1) * 1024 + (col >> 3 & 1) * 512 + (row & 7) * 64 +
           (col >> 4 & 3) * 16;
}

#define FOLD_STRIDE 132 // of a row's 128 columns in shared memory

// folded[r, h] = sum over d of q[r, h, d] Wk[h, d]; as an image (mla_wide.cu) of `padded` heads where that is not 0. Blocks (128 latent columns, head);
// each warp takes 32 of the d at a time.
KERNEL BOUNDS_2(256) mla_fold_mma(const float* q, Matrix kv_b, int heads, int qk, int v, int rows, u16* folded, int padded) {
    SHARED ALIGNED float part[8][8][FOLD_STRIDE];
    int h = block_y(), c0 = block_x() * 128, warp = tid() >> 5, g = lane_id() >> 2, t = lane_id() & 3, shares = min_of(8, qk >> 5);
    uint4 w[2][2][4]; // 16 d, columns 8 g of one or the other half, rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9
    auto load = [&](int d0) {
        UNROLL for (int k = 0; k < 2; k++)
            UNROLL for (int half = 0; half < 2; half++)
                UNROLL for (int i = 0; i < 4; i++) {
                    int d = d0 + 16 * k + 2 * t + (i & 1) + 8 * (i >> 1);
                    w[k][half][i] = load_stream16(eight_of(kv_b, h * (qk + v) + d, c0 + 64 * half + 8 * g));
                }
    };
    begin_next();
    if (warp < shares) load(32 * warp);
    await_ahead();
    for (int r0 = 0; r0 < rows; r0 += 8) {
        int n = min_of(8, rows - r0);
        float acc[8][4] = {};
        const float* mine = q + ((long long)(r0 + g) * heads + h) * qk;
        for (int d0 = 32 * warp; d0 < qk; d0 += 256) {
            if (qk > 256 && (d0 >= 256 || r0 > 0)) load(d0);
            UNROLL for (int k = 0; k < 2; k++) {
                u32 b0 = 0, b1 = 0;
                if (g < n) {
                    const float* x = mine + d0 + 16 * k + 2 * t;
                    b0 = pair(x[0], x[1]);
                    b1 = pair(x[8], x[9]);
                }
                UNROLL for (int j = 0; j < 8; j++) {
                    u32 a[4];
                    UNROLL for (int i = 0; i < 4; i++) {
                        const uint4 &one = w[k][i & 1][i >> 1 << 1], &two = w[k][i & 1][(i >> 1 << 1) + 1];
                        u32 x = j < 2 ? one.x : j < 4 ? one.y : j < 6 ? one.z : one.w, y = j < 2 ? two.x : j < 4 ? two.y : j < 6 ? two.z : two.w;
                        a[i] = __byte_perm(x, y, j & 1 ? 0x7632 : 0x5410);
                    }
                    mma_bf16(acc[j], a[0], a[1], a[2], a[3], b0, b1);
                }
            }
        }
        if (warp < shares) {
            UNROLL for (int i = 0; i < 4; i++) {
                int row = 2 * t + (i & 1), col = 8 * g + 64 * (i >> 1);
                if (row < n) {
                    float4 low = {acc[0][i], acc[1][i], acc[2][i], acc[3][i]}, high = {acc[4][i], acc[5][i], acc[6][i], acc[7][i]};
                    *(float4*)&part[warp][row][col] = low;
                    *(float4*)&part[warp][row][col + 4] = high;
                }
            }
        }
        barrier();
        for (int i = tid(); i < n * 128; i += threads()) {
            int row = i >> 7, col = i & 127;
            float sum = 0.0f;
            for (int k = 0; k < shares; k++) sum += part[k][row][col];
            long long at = ((long long)(r0 + row) * heads + h) * LATENT + c0 + col;
            if (padded) at = (((long long)(r0 + row) * (LATENT / 64) + (c0 + col) / 64) * padded + h) * 64 + ((col >> 3 ^ h) & 7) * 8 + (col & 7);
            folded[at] = to_bf16(sum);
        }
        barrier();
    }
}

// Eight elements on their way to shared memory: zeros where there are none.
DEVICE void copy(u16* place, const u16* source, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(place)), "l"(source), "r"(there ? 16 : 0)
                 : "memory");
}

// Four matrices of 8 x 8, 16 bytes a line: where each lane's line lies.
DEVICE void load_matrices(u32* x, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}
// As A of an mma: 16 heads by 16 latents.
DEVICE u32 matrices_of_heads(const u16* q) { return (u32)__cvta_generic_to_shared(q + (lane_id() & 15) * LINE + (lane_id() >> 4) * 8); }
// As B of two: 8 chosen rows by 32 latents.
DEVICE u32 matrices_of_rows(const u16* c) { return (u32)__cvta_generic_to_shared(c + (lane_id() & 7) * LINE + (lane_id() >> 3) * 8); }

#define HEADS 16 // of one block
#define WEIGHT_LINE 72 // bf16 of a head's 64 weights in shared memory

// Blocks (parts, groups of 16 heads, rows); each of 8 warps takes 8 of the part's rows for the scores and 64 columns for the sums. `folded` is
// `[rows of this launch, heads, 512]`. Loops are short: a block runs its code once, so that fetching long code would cost more than it saves.
KERNEL BOUNDS_2(256)
mla_attend_mma(Step b, const u16* folded, const u16* cache, int page_tokens, int layers, int layer, const int* selected, int width, int row0, int heads,
               float scale, float* sums) {
    extern SHARED float shared[];
    u16* c = (u16*)shared;                                  // [PART][LINE]
    u16* q = c + PART * LINE;                               // [HEADS][LINE]
    u16* weights = q + HEADS * LINE;                        // [HEADS][WEIGHT_LINE]
    float* tops = (float*)(weights + HEADS * WEIGHT_LINE);  // [8][HEADS]
    float* totals = tops + 8 * HEADS;                       // [8][HEADS]
    SHARED long long from[PART];
    int part = block_x(), r = row0 + block_z(), g = lane_id() >> 2, t = lane_id() & 3, warp = tid() >> 5;
    int h0 = block_y() * HEADS, parts = div_up(width, PART);
    begin_next();
    await_ahead();
    const int* chosen = selected + (long long)r * width;
    int mine = tid() < PART && part * PART + tid() < width ? chosen[part * PART + tid()] : -1, some = chosen[part * PART];
    Segment s = b.segments[b.row_segment[r]];
    float* to = sums + (((long long)block_z() * heads + h0) * parts + part) * SUMS;
    long long each = (long long)parts * SUMS;
    if (some < 0) {
        // Nothing is chosen from here on: the part counts for nothing.
        if (tid() < HEADS && h0 + tid() < heads) {
            to[tid() * each + LATENT] = -infinity();
            to[tid() * each + LATENT + 1] = 0.0f;
        }
        return;
    }
    UNROLL for (int i = 0; i < HEADS * 64 / 256; i++) {
        int at = i * 256 + tid(), head = at >> 6, k = at & 63;
        copy(q + head * LINE + 8 * k, folded + ((long long)block_z() * heads + min_of(h0 + head, heads - 1)) * LATENT + 8 * k, true);
    }
    if (tid() < PART)
        from[tid()] = mine >= 0 && mine / page_tokens < s.pages ? place_in(b, s, mine, page_tokens, layers, layer) * LATENT : -1;
    barrier();
    UNROLL_4 for (int i = 0; i < PART * 64 / 256; i++) {
        int at = i * 256 + tid(), row = at >> 6, k = at & 63;
        long long first = from[row];
        copy(c + row * LINE + 8 * k, cache + (first < 0 ? 0 : first) + 8 * k, first >= 0);
    }
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
    barrier();
    float score[2][4] = {}; // even and odd steps, so that one need not wait for the other
    u32 heads_at = matrices_of_heads(q), rows_at = matrices_of_rows(c + warp * 8 * LINE);
    UNROLL_4 for (int k = 0; k < LATENT; k += 32) {
        u32 even[4], odd[4], x[4];
        load_matrices(even, heads_at + 2 * k);
        load_matrices(odd, heads_at + 2 * k + 32);
        load_matrices(x, rows_at + 2 * k);
        mma_bf16(score[0], even[0], even[1], even[2], even[3], x[0], x[1]);
        mma_bf16(score[1], odd[0], odd[1], odd[2], odd[3], x[2], x[3]);
    }
    // Heads g and g + 8: largest score, weights, their sum.
    bool there[2] = {from[warp * 8 + t * 2] >= 0, from[warp * 8 + t * 2 + 1] >= 0};
    float top[2], total[2], weight[4];
    UNROLL for (int i = 0; i < 4; i++) weight[i] = there[i & 1] ? score[0][i] + score[1][i] : -infinity();
    UNROLL for (int i = 0; i < 2; i++) {
        top[i] = at_least(weight[2 * i], weight[2 * i + 1]);
        top[i] = at_least(top[i], shuffle(top[i], lane_id() ^ 1));
        top[i] = at_least(top[i], shuffle(top[i], lane_id() ^ 2));
        if (t == 0) tops[warp * HEADS + g + 8 * i] = top[i];
    }
    barrier();
    UNROLL for (int i = 0; i < 2; i++) {
        top[i] = -infinity();
        UNROLL for (int w = 0; w < 8; w++) top[i] = at_least(tops[w * HEADS + g + 8 * i], top[i]);
        top[i] = base_of(top[i], scale);
    }
    UNROLL for (int i = 0; i < 4; i++) weight[i] = there[i & 1] ? weight_of(weight[i], top[i >> 1], scale) : 0.0f;
    UNROLL for (int i = 0; i < 2; i++) {
        total[i] = weight[2 * i] + weight[2 * i + 1];
        total[i] += shuffle(total[i], lane_id() ^ 1);
        total[i] += shuffle(total[i], lane_id() ^ 2);
        if (t == 0) totals[warp * HEADS + g + 8 * i] = total[i];
        *(u32*)(weights + (g + 8 * i) * WEIGHT_LINE + warp * 8 + t * 2) = pair(weight[2 * i], weight[2 * i + 1]);
    }
    barrier();
    if (tid() < HEADS && h0 + tid() < heads) {
        float most = -infinity(), sum = 0.0f;
        UNROLL for (int w = 0; w < 8; w++) {
            most = at_least(tops[w * HEADS + tid()], most);
            sum += totals[w * HEADS + tid()];
        }
        to[tid() * each + LATENT] = most * scale;
        to[tid() * each + LATENT + 1] = sum;
    }
    u32 base = (u32)__cvta_generic_to_shared(c);
    float acc[8][4] = {};
    UNROLL_2 for (int i = 0; i < 4; i++) {
        u32 w[4];
        UNROLL for (int k = 0; k < 4; k++) w[k] = *(const u32*)(weights + (g + 8 * (k & 1)) * WEIGHT_LINE + 16 * i + 8 * (k >> 1) + 2 * t);
        UNROLL for (int n = 0; n < 4; n++) {
            // Four 8 x 8 matrices, transposed: rows 16 i ... of the part, 16 columns.
            int row = 16 * i + (lane_id() & 15), at = warp * 64 + 16 * n + (lane_id() >> 4) * 8;
            u32 x0, x1, x2, x3;
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x0), "=r"(x1), "=r"(x2), "=r"(x3)
                         : "r"(base + (row * LINE + at) * 2));
            mma_bf16(acc[2 * n], w[0], w[1], w[2], w[3], x0, x1);
            mma_bf16(acc[2 * n + 1], w[0], w[1], w[2], w[3], x2, x3);
        }
    }
    UNROLL for (int n = 0; n < 8; n++)
        UNROLL for (int i = 0; i < 2; i++)
            if (h0 + g + 8 * i < heads) {
                float2 two = {acc[n][2 * i], acc[n][2 * i + 1]};
                *(float2*)(to + (g + 8 * i) * each + warp * 64 + n * 8 + t * 2) = two;
            }
}

#define MOST_PARTS 160 // of one row

// The factors of a row's head's parts, in ascending order; returns what the joint sum is multiplied by. One warp.
DEVICE float factors_of(const float* sums, int parts, float2* factors) {
    float carry = -infinity(), total = 0.0f;
    for (int i0 = 0; i0 < parts; i0 += 32) {
        int i = i0 + lane_id();
        float own = i < parts ? sums[i * SUMS + LATENT] : -infinity(), most = own;
        // Largest score of this part and all before it.
        UNROLL for (int step = 1; step < 32; step <<= 1) {
            float below = shuffle(most, lane_id() - step);
            if (lane_id() >= step) most = at_least(below, most);
        }
        most = at_least(carry, most);
        float prior = shuffle(most, lane_id() - 1);
        prior = lane_id() == 0 ? carry : prior;
        float2 f;
        join_factors(prior, own, most, &f.x, &f.y);
        float part_total = i < parts ? sums[i * SUMS + LATENT + 1] : 0.0f;
        if (i < parts) factors[i] = f;
        for (int k = 0; k < min_of(32, parts - i0); k++) total = fma_of(total, shuffle(f.x, k), shuffle(part_total, k) * shuffle(f.y, k));
        carry = shuffle(most, 31);
    }
    warp_barrier();
    return total > 0.0f || is_nan(total) ? 1.0f / total : 0.0f;
}
// Columns 2 k and 2 k + 1 of the latents' weighted sum.
DEVICE u32 joined(const float* sums, int parts, const float2* factors, float scale, int k) {
    float2 v = {0.0f, 0.0f};
    UNROLL_8 for (int i = 0; i < parts; i++) {
        float2 f = factors[i];
        float2 x = ((const float2*)(sums + (long long)i * SUMS))[k];
        x.x = f.y == 0.0f ? 0.0f : x.x; // of a part that counts for nothing, nothing may be written
        x.y = f.y == 0.0f ? 0.0f : x.y;
        v.x = fma_of(v.x, f.x, x.x * f.y);
        v.y = fma_of(v.y, f.x, x.y * f.y);
    }
    return pair(v.x * scale, v.y * scale);
}

// mixed[r, h] from the parts' sums. Blocks (head, row); 256 threads.
KERNEL BOUNDS(256) mla_merge_mma(const float* sums, int parts, int heads, u32* mixed) {
    SHARED float2 factors[MOST_PARTS];
    SHARED float scale;
    long long at = (long long)block_y() * heads + block_x();
    begin_next();
    await_ahead();
    sums += at * parts * SUMS;
    if (tid() < 32) {
        float own = factors_of(sums, parts, factors);
        if (tid() == 0) scale = own;
    }
    barrier();
    mixed[at * (LATENT / 2) + tid()] = joined(sums, parts, factors, scale, tid());
}

// out[r, h, i] = Wv[h, i] . mixed[r, h]. Blocks (64 outputs, head): each warp 16 outputs and half of the latent, for eight rows at a time. Of few
// rows the parts are joined here (`mixed` null), by each of a head's blocks.
KERNEL BOUNDS_2(256) mla_out_mma(const float* sums, int parts, const u16* mixed, Matrix kv_b, int heads, int qk, int v, int rows, float* out) {
    SHARED ALIGNED u16 x[8 * LINE];
    SHARED float2 factors[8][MOST_PARTS];
    SHARED float scales[8];
    SHARED float other[4][128];
    int h = block_y(), o0 = block_x() * 64, warp = tid() >> 5, g = lane_id() >> 2, t = lane_id() & 3, tile = warp & 3, half = warp >> 2;
    int row0 = h * (qk + v) + qk + o0 + tile * 16;
    uint4 a[4][2], b[4][2];
    begin_next();
    UNROLL for (int i = 0; i < 4; i++)
        UNROLL for (int p = 0; p < 2; p++) {
            int col = half * 256 + i * 64 + t * 16 + p * 8;
            a[i][p] = load_stream16(eight_of(kv_b, row0 + g, col));
            b[i][p] = load_stream16(eight_of(kv_b, row0 + g + 8, col));
        }
    await_ahead();
    for (int r0 = 0; r0 < rows; r0 += 8) {
        int n = min_of(8, rows - r0);
        if (mixed) {
            for (int i = tid(); i < 8 * 64; i += threads()) {
                int row = i >> 6, k = i & 63;
                uint4 line = {0, 0, 0, 0};
                if (row < n) line = ((const uint4*)(mixed + ((long long)(r0 + row) * heads + h) * LATENT))[k];
                ((uint4*)(x + row * LINE))[k] = line;
            }
        } else {
            long long from = (long long)parts * SUMS;
            if (warp < n) {
                float own = factors_of(sums + ((long long)(r0 + warp) * heads + h) * from, parts, factors[warp]);
                if (lane_id() == 0) scales[warp] = own;
            }
            barrier();
            for (int row = 0; row < 8; row++)
                ((u32*)(x + row * LINE))[tid()] = row < n ? joined(sums + ((long long)(r0 + row) * heads + h) * from, parts, factors[row], scales[row], tid()) : 0;
        }
        barrier();
        float acc[4] = {};
        UNROLL for (int i = 0; i < 4; i++) {
            UNROLL for (int p = 0; p < 2; p++) {
                uint4 k = *(const uint4*)(x + g * LINE + half * 256 + i * 64 + t * 16 + p * 8);
                mma_bf16(acc, a[i][p].x, b[i][p].x, a[i][p].y, b[i][p].y, k.x, k.y);
                mma_bf16(acc, a[i][p].z, b[i][p].z, a[i][p].w, b[i][p].w, k.z, k.w);
            }
        }
        if (half == 1) {
            UNROLL for (int i = 0; i < 4; i++) other[tile][lane_id() * 4 + i] = acc[i];
        }
        barrier();
        if (half == 0) {
            UNROLL for (int i = 0; i < 4; i++) {
                int row = 2 * t + (i & 1), o = o0 + tile * 16 + g + 8 * (i >> 1);
                if (row < n) out[((long long)(r0 + row) * heads + h) * v + o] = acc[i] + other[tile][lane_id() * 4 + i];
            }
        }
        barrier();
    }
}

#if !defined(__CUDA_ARCH_FEAT_SM90_ALL) // which has mla_wide.cu

#define MANY_HEADS 32 // of one block of mla_attend_many

// mixed[r, h] of many rows: a block takes 32 heads of a row through all of its parts and keeps the joint sum in registers, so that no part's sums
// go through memory. The sums are those of mla_attend_mma, joined in the same order with the same factors: the bits are the same.
//
// Blocks (groups of 32 heads, rows) of 8 warps. For the scores a warp takes 16 heads and 16 of the part's rows, for the sums 32 heads and 64 columns.
// The next part's rows are on their way meanwhile.
KERNEL BOUNDS(256)
mla_attend_many(Step b, const u16* folded, const u16* cache, int page_tokens, int layers, int layer, const int* selected, int width, int row0, int heads,
                float scale, u32* mixed) {
    extern SHARED float shared[];
    u16* c = (u16*)shared;                                 // [2][PART][LINE]
    u16* q = c + 2 * PART * LINE;                          // [MANY_HEADS][LINE]
    u16* weights = q + MANY_HEADS * LINE;                  // [MANY_HEADS][WEIGHT_LINE]
    float* tops = (float*)(weights + MANY_HEADS * WEIGHT_LINE); // [8][MANY_HEADS]: of 8 rows each
    float* totals = tops + 8 * MANY_HEADS;                 // [8][MANY_HEADS]
    float2* factors = (float2*)(totals + 8 * MANY_HEADS);  // [MANY_HEADS]
    SHARED long long from[3][PART];
    int r = row0 + block_y(), g = lane_id() >> 2, t = lane_id() & 3, warp = tid() >> 5, h0 = block_x() * MANY_HEADS;
    int tile = (warp & 1) * 16, rows0 = (warp >> 1) * 16;
    begin_next();
    await_ahead();
    const int* chosen = selected + (long long)r * width;
    Segment s = b.segments[b.row_segment[r]];
    auto look_up = [&](int part) {
        if (tid() >= PART) return;
        int at = part * PART + tid(), mine = at < width ? chosen[at] : -1;
        from[part % 3][tid()] = mine >= 0 && mine / page_tokens < s.pages ? place_in(b, s, mine, page_tokens, layers, layer) * LATENT : -1;
    };
    auto fetch = [&](int part) {
        u16* to = c + (part & 1) * PART * LINE;
        UNROLL_4 for (int i = 0; i < PART * 64 / 256; i++) {
            int at = i * 256 + tid(), row = at >> 6, k = at & 63;
            long long first = from[part % 3][row];
            copy(to + row * LINE + 8 * k, cache + (first < 0 ? 0 : first) + 8 * k, first >= 0);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    UNROLL for (int i = 0; i < MANY_HEADS * 64 / 256; i++) {
        int at = i * 256 + tid(), head = at >> 6, k = at & 63;
        copy(q + head * LINE + 8 * k, folded + ((long long)block_y() * heads + min_of(h0 + head, heads - 1)) * LATENT + 8 * k, true);
    }
    // Parts that hold anything: positions are ascending, and -1 behind them.
    int parts = div_up(width, PART);
    look_up(0);
    look_up(1);
    barrier();
    fetch(0);
    u32 heads_at = matrices_of_heads(q + tile * LINE);
    float all[2][8][4] = {}, run_top = -infinity(), run_total = 0.0f; // of head tid() < 32
    for (int part = 0; part < parts; part++) {
        if (chosen[part * PART] < 0) break;
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        barrier(); // this part is there, the other buffer is free, and the next part's places are known
        if (part + 1 < parts) fetch(part + 1);
        if (part + 2 < parts) look_up(part + 2);
        const u16* rows = c + (part & 1) * PART * LINE;
        float score[2][2][4] = {}; // two groups of 8 rows; even and odd steps
        u32 rows_at = matrices_of_rows(rows + rows0 * LINE);
        UNROLL_4 for (int k = 0; k < LATENT; k += 32) {
            u32 even[4], odd[4];
            load_matrices(even, heads_at + 2 * k);
            load_matrices(odd, heads_at + 2 * k + 32);
            UNROLL for (int j = 0; j < 2; j++) {
                u32 x[4];
                load_matrices(x, rows_at + 2 * (j * 8 * LINE + k));
                mma_bf16(score[j][0], even[0], even[1], even[2], even[3], x[0], x[1]);
                mma_bf16(score[j][1], odd[0], odd[1], odd[2], odd[3], x[2], x[3]);
            }
        }
        float weight[2][4];
        bool there[2][2];
        UNROLL for (int j = 0; j < 2; j++) {
            UNROLL for (int i = 0; i < 2; i++) there[j][i] = from[part % 3][rows0 + 8 * j + t * 2 + i] >= 0;
            UNROLL for (int i = 0; i < 4; i++) weight[j][i] = there[j][i & 1] ? score[j][0][i] + score[j][1][i] : -infinity();
            UNROLL for (int i = 0; i < 2; i++) {
                float top = at_least(weight[j][2 * i], weight[j][2 * i + 1]);
                top = at_least(top, shuffle(top, lane_id() ^ 1));
                top = at_least(top, shuffle(top, lane_id() ^ 2));
                if (t == 0) tops[((rows0 >> 3) + j) * MANY_HEADS + tile + g + 8 * i] = top;
            }
        }
        barrier();
        UNROLL for (int i = 0; i < 2; i++) {
            int head = tile + g + 8 * i;
            float top = -infinity();
            UNROLL for (int w = 0; w < 8; w++) top = at_least(tops[w * MANY_HEADS + head], top);
            top = base_of(top, scale);
            UNROLL for (int j = 0; j < 2; j++) {
                float one = there[j][0] ? weight_of(weight[j][2 * i], top, scale) : 0.0f;
                float two = there[j][1] ? weight_of(weight[j][2 * i + 1], top, scale) : 0.0f;
                float total = one + two;
                total += shuffle(total, lane_id() ^ 1);
                total += shuffle(total, lane_id() ^ 2);
                if (t == 0) totals[((rows0 >> 3) + j) * MANY_HEADS + head] = total;
                *(u32*)(weights + head * WEIGHT_LINE + rows0 + 8 * j + t * 2) = pair(one, two);
            }
        }
        barrier();
        if (tid() < MANY_HEADS) {
            float most = -infinity(), sum = 0.0f;
            UNROLL for (int w = 0; w < 8; w++) {
                most = at_least(tops[w * MANY_HEADS + tid()], most);
                sum += totals[w * MANY_HEADS + tid()];
            }
            float2 f;
            most *= scale;
            float joint = at_least(run_top, most);
            join_factors(run_top, most, joint, &f.x, &f.y);
            run_total = fma_of(run_total, f.x, sum * f.y);
            run_top = joint;
            factors[tid()] = f;
        }
        u32 base = (u32)__cvta_generic_to_shared(rows);
        float acc[2][8][4] = {};
        UNROLL for (int i = 0; i < 4; i++) {
            u32 w[2][4];
            UNROLL for (int m = 0; m < 2; m++)
                UNROLL for (int k = 0; k < 4; k++)
                    w[m][k] = *(const u32*)(weights + (16 * m + g + 8 * (k & 1)) * WEIGHT_LINE + 16 * i + 8 * (k >> 1) + 2 * t);
            UNROLL for (int n = 0; n < 4; n++) {
                int row = 16 * i + (lane_id() & 15), at = warp * 64 + 16 * n + (lane_id() >> 4) * 8;
                u32 x0, x1, x2, x3;
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(x0), "=r"(x1), "=r"(x2), "=r"(x3)
                             : "r"(base + (row * LINE + at) * 2));
                UNROLL for (int m = 0; m < 2; m++) {
                    mma_bf16(acc[m][2 * n], w[m][0], w[m][1], w[m][2], w[m][3], x0, x1);
                    mma_bf16(acc[m][2 * n + 1], w[m][0], w[m][1], w[m][2], w[m][3], x2, x3);
                }
            }
        }
        barrier(); // factors are there
        UNROLL for (int m = 0; m < 2; m++)
            UNROLL for (int i = 0; i < 2; i++) {
                float2 f = factors[16 * m + g + 8 * i];
                UNROLL for (int n = 0; n < 8; n++)
                    UNROLL for (int k = 2 * i; k < 2 * i + 2; k++) {
                        float x = f.y == 0.0f ? 0.0f : acc[m][n][k];
                        all[m][n][k] = fma_of(all[m][n][k], f.x, x * f.y);
                    }
            }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    barrier();
    if (tid() < MANY_HEADS) tops[tid()] = run_total > 0.0f || is_nan(run_total) ? 1.0f / run_total : 0.0f;
    barrier();
    UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int i = 0; i < 2; i++) {
            int head = 16 * m + g + 8 * i;
            float inv = tops[head];
            if (h0 + head < heads) {
                u32* to = mixed + ((long long)block_y() * heads + h0 + head) * (LATENT / 2) + warp * 32 + t;
                UNROLL for (int n = 0; n < 8; n++) to[n * 4] = pair(all[m][n][2 * i] * inv, all[m][n][2 * i + 1] * inv);
            }
        }
}

#endif

#endif
