// Sparse MLA attention on the matrix units, for bf16 precision, latents of 512 and kv_b in BF16: queries, attention's weights and what it makes of
// the latents are rounded to bf16 on the way into a product, sums stay f32. Three steps as in mla.cu: `mla_fold_mma` (queries onto the latent),
// `mla_attend_mma` (a block per part of 64 chosen rows), `mla_out_mma` (joins the parts and goes out through the values' weights).
//
// Both outer steps read each weight once for eight rows, with all of a block's weights in flight before the rows are there. No sum depends on
// how many rows a launch has. Neighbours: cuda/mixers.rs; mla.cu for everything else.
#include "step.cuh"
#include "weights.cuh"

#if TANDEM_MMA

#define PART 64    // chosen rows whose sums are kept apart
#define LATENT 512
#define LINE 520   // bf16 of a latent row in shared memory: what is behind the 512 spreads rows over the banks
#define SUMS (LATENT + 2) // of a part: weighted latents, largest score, sum of exponentials

DEVICE void mma_bf16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE u32 pair(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// The 16 bytes of a row of a tiled BF16 matrix that hold eight columns from `col` on.
DEVICE const u8* eight_of(const Matrix& m, int row, int col) {
    return m.q + (long long)(row >> 4) * 16 * m.q_row + (col >> 6) * 2048 + (row >> 3 & 1) * 1024 + (col >> 3 & 1) * 512 + (row & 7) * 64 +
           (col >> 4 & 3) * 16;
}

#define FOLD_STRIDE 132 // of a row's 128 columns in shared memory

// folded[r, h] = sum over d of q[r, h, d] Wk[h, d]. Blocks (128 latent columns, head); each warp takes 32 of the d at a time.
KERNEL BOUNDS_2(256) mla_fold_mma(const float* q, Matrix kv_b, int heads, int qk, int v, int rows, u16* folded) {
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
            folded[((long long)(r0 + row) * heads + h) * LATENT + c0 + col] = to_bf16(sum);
        }
        barrier();
    }
}

#define HEADS 16 // of one block
#define WEIGHT_LINE 72 // bf16 of a head's 64 weights in shared memory

// Blocks (parts, groups of 16 heads, rows); each of 8 warps takes 8 of the part's rows for the scores and 64 columns for the sums. `folded` is
// `[rows of this launch, heads, 512]`. Loops are short: a block runs its code once, so that fetching long code would cost more than it saves.
//
// Which element of the latent goes to which place of an mma does not matter for the scores, as long as query and latent agree: a lane feeds 8
// consecutive ones of each.
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
    auto copy = [](u16* place, const u16* source, bool there) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(place)), "l"(source), "r"(there ? 16 : 0)
                     : "memory");
    };
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
    UNROLL_4 for (int k = 0; k < LATENT; k += 32) {
        uint4 a = *(const uint4*)(q + g * LINE + k + t * 8), d = *(const uint4*)(q + (g + 8) * LINE + k + t * 8);
        uint4 x = *(const uint4*)(c + (warp * 8 + g) * LINE + k + t * 8);
        mma_bf16(score[0], a.x, d.x, a.y, d.y, x.x, x.y);
        mma_bf16(score[1], a.z, d.z, a.w, d.w, x.z, x.w);
    }
    // Heads g and g + 8: largest score, weights, their sum.
    bool there[2] = {from[warp * 8 + t * 2] >= 0, from[warp * 8 + t * 2 + 1] >= 0};
    float top[2], total[2], weight[4];
    UNROLL for (int i = 0; i < 4; i++) weight[i] = there[i & 1] ? (score[0][i] + score[1][i]) * scale : -infinity();
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
    }
    UNROLL for (int i = 0; i < 4; i++) weight[i] = there[i & 1] ? exp_of(weight[i] - top[i >> 1]) : 0.0f;
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
        to[tid() * each + LATENT] = most;
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

// What each part of a row's head counts for: by its largest score, over the sum of all. One warp.
DEVICE void shares_of(const float* sums, int parts, float* share) {
    float top = -infinity(), total = 0.0f;
    for (int i = lane_id(); i < parts; i += 32) top = at_least(top, sums[i * SUMS + LATENT]);
    top = warp_max(top);
    for (int i = lane_id(); i < parts; i += 32) {
        float own = sums[i * SUMS + LATENT], f = own == -infinity() ? 0.0f : exp_of(own - top);
        share[i] = f;
        total = fma_of(f, sums[i * SUMS + LATENT + 1], total);
    }
    total = warp_sum(total);
    float inv = total > 0.0f || is_nan(total) ? 1.0f / total : 0.0f;
    for (int i = lane_id(); i < parts; i += 32) share[i] *= inv;
}
// Columns 2 k and 2 k + 1 of the latents' weighted sum.
DEVICE u32 joined(const float* sums, int parts, const float* share, int k) {
    float2 v = {0.0f, 0.0f};
    UNROLL_8 for (int i = 0; i < parts; i++) {
        float f = share[i];
        float2 x = ((const float2*)(sums + (long long)i * SUMS))[k];
        x.x = f == 0.0f ? 0.0f : x.x; // of a part that counts for nothing, nothing may be written
        x.y = f == 0.0f ? 0.0f : x.y;
        v.x = fma_of(f, x.x, v.x);
        v.y = fma_of(f, x.y, v.y);
    }
    return pair(v.x, v.y);
}

// mixed[r, h] from the parts' sums. Blocks (head, row); 256 threads.
KERNEL BOUNDS(256) mla_merge_mma(const float* sums, int parts, int heads, u32* mixed) {
    SHARED float share[MOST_PARTS];
    long long at = (long long)block_y() * heads + block_x();
    begin_next();
    await_ahead();
    sums += at * parts * SUMS;
    if (tid() < 32) shares_of(sums, parts, share);
    barrier();
    mixed[at * (LATENT / 2) + tid()] = joined(sums, parts, share, tid());
}

// out[r, h, i] = Wv[h, i] . mixed[r, h]. Blocks (64 outputs, head): each warp 16 outputs and half of the latent, for eight rows at a time. Of few
// rows the parts are joined here (`mixed` null), by each of a head's blocks.
KERNEL BOUNDS_2(256) mla_out_mma(const float* sums, int parts, const u16* mixed, Matrix kv_b, int heads, int qk, int v, int rows, float* out) {
    SHARED ALIGNED u16 x[8 * LINE];
    SHARED float share[8][MOST_PARTS];
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
            if (warp < n) shares_of(sums + ((long long)(r0 + warp) * heads + h) * from, parts, share[warp]);
            barrier();
            for (int row = 0; row < 8; row++)
                ((u32*)(x + row * LINE))[tid()] = row < n ? joined(sums + ((long long)(r0 + row) * heads + h) * from, parts, share[row], tid()) : 0;
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

#endif
