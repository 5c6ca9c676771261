// The KDA mixer for prompts on the matrix units: 16 rows of a sequence at once, for heads of 128, four taps and decays whose sum over 16 rows stays within
// e^-80. In the terms of reference/kda_chunk.rs, u = T (beta v) - T (beta k e^G) S with T = (1 + tril(beta A))^-1: all but S is made for all chunks side
// by side (`kda_prepare`), then a head's chunks follow each other (`kda_follow`), and rows are normed and gated at the end (`kda_finish`). Products keep 22
// bits of both factors (split.cuh).
//
// Decayed products are factored, e^(G_i - G_j) = e^G_i e^-G_j, which the bound keeps in range. Chunks are counted from a segment's first row, so that
// a segment gives the same bits whoever shares its step. Neighbours: kda.cu (row by row: takes prompts where there are no matrix units),
// split.cuh, cuda/mixers.rs.
#include "ahead.cuh"
#include "kda.cuh"
#include "split.cuh"

#if TANDEM_MMA

#define DIM 128
#define CHUNK 16
#define LINE 144 // floats of a row of 128 in shared memory, so that loads of a fragment meet all banks
#define ROW 20   // and of one of 16

// What one chunk of one head needs beside the state, as `kda_follow` takes it: pieces of 16 bytes, one for each lane of a warp, that hold four elements of
// an operand as `halves` (split.cuh), times 2^12. First T beta k e^G and q e^G: 16 keys, 8 rows (W's two, q's two), lane. Lane 4 g + t has keys 4 t to
// 4 t + 3 of row g.
#define ROWS 0
// Then k e^(G_last - G): 16 keys, of each four the first and the last two, lane. Lane 4 g + t has rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of the g-th of the
// eight keys.
#define KEYS (ROWS + 2 * CHUNK * DIM)
// Then B: 8 rows, lane. Lane 4 g + t has columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of row g.
#define MIX (KEYS + CHUNK * DIM)
// Then, as floats, e^G_last.
#define FADE (MIX + CHUNK * CHUNK)
#define COMMON (FADE + DIM)
// And of each half of the columns T beta v: 16 columns, 8 rows, lane. Lane 4 g + t has rows 2 t and 2 t + 1 of column g, then those of column g + 8. Last
// the largest of each column.
#define COLUMNS 64
#define LARGEST (CHUNK * COLUMNS)
#define VALUES (LARGEST + COLUMNS)
#define PARTS (COMMON + 2 * VALUES)
// What a block of `kda_follow` holds of a chunk, and of how many. cuda/mixers.rs knows these sizes.
#define STAGE (COMMON + VALUES)
#define STAGES 3

// A column of `n` rows and zeros.
DEVICE void rows_of(const float* from, int stride, int n, float* x) {
    if (n == CHUNK) {
        UNROLL for (int i = 0; i < CHUNK; i++) x[i] = from[(long long)i * stride];
    } else {
        UNROLL for (int i = 0; i < CHUNK; i++) x[i] = i < n ? from[(long long)i * stride] : 0.0f;
    }
}
// 1 / (1 + e^-x).
DEVICE float quick_sigmoid(float x) { return quick_inverse(1.0f + quick_exp2(x * -1.44269504088896340736f)); }

// Chunks `first + x` of the segments of at least `least` rows. Blocks (chunks, head, segment); a group of 128 threads each for q, k, v and the
// decay, then 16 warps.
KERNEL BOUNDS_3(512)
kda_prepare(Step b, Kda p, int least, int first, const float* proj, int stride, int beta0, const float* f, const float* conv, const float* a_log,
            const float* dt_bias, const float* carries, int layers, int layer, float* parts) {
    SHARED ALIGNED float q[CHUNK][LINE], k[CHUNK][LINE], v[CHUNK][LINE], sum[CHUNK][LINE];
    SHARED ALIGNED float4 shares[4][4][32];
    SHARED ALIGNED float a[CHUNK][ROW], inverse[CHUNK][ROW], beta[CHUNK], fade[DIM];
    // No `begin_next`: of the blocks of `kda_follow` that began before these have ended, some multiprocessors would get two, and others none.
    await_ahead();
    Segment s = b.segments[block_z()];
    int t0 = (first + block_x()) * CHUNK, h = block_y(), hd = p.heads * DIM, c = tid() & (DIM - 1), kind = tid() >> 7;
    if (s.rows < least || t0 >= s.rows) return;
    int n = min_of(CHUNK, s.rows - t0), chunks = blocks_x();
    float* to = parts + (((long long)block_z() * p.heads + h) * chunks + block_x()) * PARTS;
    if (kind < 3) {
        int ch = kind * hd + h * DIM + c;
        const float* carry = carries + ((long long)s.slot * layers + layer) * 9 * hd + ch;
        const float* row = proj + ((long long)s.row0 + t0) * stride + ch;
        float4 w = *(const float4*)(conv + ch * 4);
        float x[CHUNK + 3];
        UNROLL for (int i = 0; i < 3; i++) x[i] = *(t0 == 0 ? carry + i * 3ll * hd : row + (i - 3ll) * stride);
        rows_of(row, stride, n, x + 3);
        // Rows behind the last get something too; their beta is 0, and so are their u.
        float* line = kind == 0 ? q[0] : kind == 1 ? k[0] : v[0];
        UNROLL for (int i = 0; i < CHUNK; i++) {
            float y = fma_of(w.w, x[i + 3], fma_of(w.z, x[i + 2], fma_of(w.y, x[i + 1], w.x * x[i])));
            line[i * LINE + c] = y * quick_sigmoid(y);
        }
    } else {
        const float* from = f + ((long long)s.row0 + t0) * hd + h * DIM + c;
        float bias = dt_bias[h * DIM + c], decay = exp_of(a_log[h]), total = 0.0f, z[CHUNK];
        rows_of(from, hd, n, z);
        UNROLL for (int i = 0; i < CHUNK; i++) {
            total = fma_of(i < n ? p.bound : 0.0f, quick_sigmoid(decay * (z[i] + bias)), total);
            sum[i][c] = total;
        }
        if (c < CHUNK) beta[c] = c < n ? sigmoid(proj[((long long)s.row0 + t0 + c) * stride + beta0 + h]) : 0.0f;
    }
    barrier();
    // A warp per row, a lane per four keys: q and k to unit length, and decayed. Factors of 2^40 keep what the matrix units take of both in range.
    const float UP = as_float((127u + 40) << 23), DOWN = as_float((127u - 40) << 23);
    int warp = tid() >> 5, lane = lane_id(), g = lane >> 2, t = lane & 3;
    {
        float* at[3] = {&q[warp][4 * lane], &k[warp][4 * lane], &sum[warp][4 * lane]};
        float4 four = *(const float4*)at[0], keys = *(const float4*)at[1], logs = *(const float4*)at[2];
        float qq = fma_of(four.w, four.w, fma_of(four.z, four.z, fma_of(four.y, four.y, four.x * four.x)));
        float kk = fma_of(keys.w, keys.w, fma_of(keys.z, keys.z, fma_of(keys.y, keys.y, keys.x * keys.x)));
        float qs = quick_inverse(sqrt_of((warp_sum(qq) + 1e-6f) * DIM)) * UP, ks = quick_inverse(sqrt_of(warp_sum(kk) + 1e-6f));
        float4 up = {exp_of(logs.x), exp_of(logs.y), exp_of(logs.z), exp_of(logs.w)};
        four = {four.x * (qs * up.x), four.y * (qs * up.y), four.z * (qs * up.z), four.w * (qs * up.w)};
        float more = ks * UP, less = ks * DOWN;
        *(float4*)at[0] = four;
        *(float4*)at[1] = {keys.x * (more * up.x), keys.y * (more * up.y), keys.z * (more * up.z), keys.w * (more * up.w)};
        *(float4*)at[2] = {keys.x * (less * exp_of(-logs.x)), keys.y * (less * exp_of(-logs.y)), keys.z * (less * exp_of(-logs.z)),
                           keys.w * (less * exp_of(-logs.w))};
        // Four keys of a row are a piece as they are.
        *(uint4*)(to + ROWS + ((g * 4 + 2 + (warp >> 3)) * 32 + (warp & 7) * 4 + t) * 4) = halves(four.x, four.y, four.z, four.w, 4096.0f * DOWN);
        if (warp == CHUNK - 1) {
            *(float4*)&fade[4 * lane] = up;
            *(float4*)(to + FADE + 4 * lane) = up;
        }
    }
    barrier();
    // Products of two rows: a warp has those of k or q with eight rows, over a quarter of the keys.
    {
        const float(*left)[LINE] = warp & 1 ? q : k;
        float large[4] = {}, small[4] = {};
        UNROLL for (int i = 0; i < 2; i++) {
            int key = (warp >> 2) * 32 + 16 * i + 4 * t;
            float4 x = *(const float4*)&left[g][key], y = *(const float4*)&left[g + 8][key], z = *(const float4*)&sum[(warp & 2) * 4 + g][key];
            product(large, small, x.x, y.x, x.y, y.y, z.x, z.y);
            product(large, small, x.z, y.z, x.w, y.w, z.z, z.w);
        }
        shares[warp >> 2][warp & 3][lane] = {large[0] + small[0], large[1] + small[1], large[2] + small[2], large[3] + small[3]};
    }
    barrier();
    auto joined = [&](int tile) {
        float4 x = shares[0][tile][lane];
        UNROLL for (int i = 1; i < 4; i++) {
            float4 y = shares[i][tile][lane];
            x = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
        }
        return x;
    };
    if (warp == 0) {
        // beta A below the diagonal; then a lane has a column of T, by forward substitution, times beta.
        UNROLL for (int i = 0; i < 2; i++) {
            float4 x = joined(2 * i);
            int j = 8 * i + 2 * t;
            *(float2*)&a[g][j] = {j < g ? beta[g] * x.x : 0.0f, j + 1 < g ? beta[g] * x.y : 0.0f};
            *(float2*)&a[g + 8][j] = {j < g + 8 ? beta[g + 8] * x.z : 0.0f, j + 1 < g + 8 ? beta[g + 8] * x.w : 0.0f};
        }
        warp_barrier();
        float x[CHUNK];
        int j = lane & (CHUNK - 1);
        UNROLL for (int r = 0; r < CHUNK; r++) {
            x[r] = r == j ? 1.0f : 0.0f;
            UNROLL for (int e = 0; e < r; e += 4) {
                float4 w = *(const float4*)&a[r][e];
                x[r] = fma_of(-w.x, x[e], x[r]);
                if (e + 1 < r) x[r] = fma_of(-w.y, x[e + 1], x[r]);
                if (e + 2 < r) x[r] = fma_of(-w.z, x[e + 2], x[r]);
                if (e + 3 < r) x[r] = fma_of(-w.w, x[e + 3], x[r]);
            }
        }
        if (lane < CHUNK) {
            UNROLL for (int r = 0; r < CHUNK; r++) inverse[r][j] = x[r] * beta[j];
        }
    } else if (warp == 1) {
        // B up to the diagonal.
        float4 x = joined(1), y = joined(3);
        int j = 2 * t;
        x = {j <= g ? x.x : 0.0f, j + 1 <= g ? x.y : 0.0f, x.z, x.w};
        y = {0.0f, 0.0f, j <= g ? y.z : 0.0f, j + 1 <= g ? y.w : 0.0f};
        *(uint4*)(to + MIX + lane * 4) = halves(x.x, x.y, y.x, y.y, 4096.0f);
        *(uint4*)(to + MIX + (32 + lane) * 4) = halves(x.z, x.w, y.z, y.w, 4096.0f);
    } else {
        // k e^(G_last - G), across.
        for (int i = warp - 2; i < DIM / 8; i += 14) {
            int key = i / 2 * 16 + 4 * (g >> 1) + (g & 1) + (i & 1) * 2;
            float by = fade[key] * as_float((127u + 40 + 12) << 23);
            float x = sum[2 * t][key], y = sum[2 * t + 1][key], z = sum[2 * t + 8][key], w = sum[2 * t + 9][key];
            *(uint4*)(to + KEYS + (i * 32 + lane) * 4) = halves(x, y, z, w, by);
        }
    }
    barrier();
    // T beta k e^G and T beta v: a warp has 16 keys or 16 columns.
    float four[2][4]; // T beta: rows g and g + 8
    UNROLL for (int i = 0; i < 4; i++) {
        four[0][i] = inverse[g][t + 4 * i];
        four[1][i] = inverse[g + 8][t + 4 * i];
    }
    float large[2][4] = {}, small[2][4] = {};
    if (warp < 8) {
        UNROLL for (int z = 0; z < 2; z++) {
            float4 x = *(const float4*)&k[t + 8 * z][warp * 16 + (g >> 1) * 4], y = *(const float4*)&k[t + 4 + 8 * z][warp * 16 + (g >> 1) * 4];
            product(large[0], small[0], four[0][2 * z], four[1][2 * z], four[0][2 * z + 1], four[1][2 * z + 1], g & 1 ? x.y : x.x, g & 1 ? y.y : y.x);
            product(large[1], small[1], four[0][2 * z], four[1][2 * z], four[0][2 * z + 1], four[1][2 * z + 1], g & 1 ? x.w : x.z, g & 1 ? y.w : y.z);
        }
        UNROLL for (int i = 0; i < 2; i++)
            *(uint4*)(to + ROWS + ((warp * 4 + i) * 32 + lane) * 4) =
                halves(large[0][2 * i] + small[0][2 * i], large[0][2 * i + 1] + small[0][2 * i + 1], large[1][2 * i] + small[1][2 * i],
                       large[1][2 * i + 1] + small[1][2 * i + 1], 4096.0f * DOWN);
    } else {
        int col = (warp - 8) * 16 + g;
        UNROLL for (int z = 0; z < 2; z++) {
            float x[4] = {v[t + 8 * z][col], v[t + 8 * z][col + 8], v[t + 4 + 8 * z][col], v[t + 4 + 8 * z][col + 8]};
            UNROLL for (int i = 0; i < 2; i++) product(large[i], small[i], x[0], x[1], x[2], x[3], four[i][2 * z], four[i][2 * z + 1]);
        }
        float most[2] = {};
        float* values = to + COMMON + (warp >> 2 & 1) * VALUES;
        UNROLL for (int i = 0; i < 2; i++) {
            float x[4];
            UNROLL for (int e = 0; e < 4; e++) {
                x[e] = large[i][e] + small[i][e];
                most[e >> 1] = larger(most[e >> 1], x[e]);
            }
            *(float4*)(values + (((warp & 3) * 2 + i) * 32 + lane) * 4) = {x[0], x[1], x[2], x[3]};
        }
        UNROLL for (int i = 0; i < 2; i++) {
            most[i] = larger(most[i], shuffle(most[i], lane ^ 1));
            most[i] = larger(most[i], shuffle(most[i], lane ^ 2));
            if (t == 0) values[LARGEST + (warp & 3) * 16 + g + 8 * i] = most[i];
        }
    }
}

// The chunks of `kda_prepare` in order, for 64 columns of a head's state: u = T beta v - (T beta k e^G) S, o = (q e^G) S + B u, S = e^G_last S +
// (k e^(G_last - G)) u. `out` gets o; a segment's last inputs go to the carry. Blocks (2, head, segment) of 4 warps.
//
// All products are transposed: 16 columns of the state are a warp's M, and S stays in its registers as sums, which are the operand of the next product as
// they lie. Of 16 keys, the sums with an even number have the first two of each four and the others the last two. A column and its u become halves
// under one power of two, by the largest of the column and of its T beta v; as a column's bits follow from its own, a segment may be cut between any chunks.
KERNEL BOUNDS(128)
kda_follow(Step b, Kda p, int least, int first, int chunks, const float* proj, int stride, const float* parts, float* states,
           float* carries, int layers, int layer, float* out) {
    extern SHARED ALIGNED float shared[];
    begin_next();
    await_ahead();
    Segment s = b.segments[block_z()];
    int h = block_y(), hd = p.heads * DIM, c0 = block_x() * COLUMNS, all = div_up(s.rows, CHUNK);
    int warp = tid() >> 5, lane = lane_id(), g = lane >> 2, t = lane & 3, own = warp * 16 + g; // of the block's columns; and that + 8
    if (s.rows < least || first >= all) return;
    int end = min_of(all - first, chunks);
    long long unit = (long long)s.slot * layers + layer;
    float* kept = states + (unit * p.heads + h) * DIM * DIM + c0 + own;
    const float* from = parts + ((long long)block_z() * p.heads + h) * chunks * PARTS;
    auto fetch = [&](int at) {
        if (at < end) {
            const float* of = from + (long long)at * PARTS + tid() * 4;
            float* to = shared + at % STAGES * STAGE + tid() * 4;
            const float* values = of + block_x() * VALUES;
            UNROLL for (int i = 0; i < COMMON / 512; i++) copy_ahead<16>(shared_at(to + i * 512), of + i * 512);
            UNROLL for (int i = COMMON / 512; i < div_up(STAGE, 512); i++)
                if (i * 512 + tid() * 4 < STAGE) copy_ahead<16>(shared_at(to + i * 512), (i * 512 + tid() * 4 < COMMON ? of : values) + i * 512);
        }
        copies_end();
    };
    UNROLL for (int i = 0; i < STAGES - 1; i++) fetch(i);
    float state[DIM / 8][4], most[2] = {};
    UNROLL for (int j = 0; j < DIM / 8; j++)
        UNROLL for (int i = 0; i < 4; i++) {
            state[j][i] = kept[((j >> 1) * 16 + 4 * t + (j & 1) * 2 + (i & 1)) * DIM + (i >> 1) * 8];
            most[i >> 1] = larger(most[i >> 1], state[j][i]);
        }
    float* line = out + ((long long)s.row0 + (long long)first * CHUNK + 2 * t) * hd + h * DIM + c0 + own;
    int left = s.rows - first * CHUNK - 2 * t;
    for (int at = 0; at < end; at++, line += (long long)CHUNK * hd, left -= CHUNK) {
        copies_wait<STAGES - 2>();
        barrier();
        fetch(at + STAGES - 1);
        const float* of = shared + at % STAGES * STAGE;
        const uint4* pieces = (const uint4*)of + lane;
        // |u| is at most the largest of T beta v and 12 of the largest of S: a row of T beta k e^G is no longer than 1.
        float scale[2], back[2];
        UNROLL for (int i = 0; i < 2; i++) {
            most[i] = larger(most[i], shuffle(most[i], lane ^ 1));
            most[i] = larger(most[i], shuffle(most[i], lane ^ 2));
            u32 bits = as_bits(fma_of(16.0f, most[i], of[COMMON + LARGEST + own + 8 * i])) >> 23;
            if (bits < 30) bits = 30;
            scale[i] = as_float((127 + 127 + 14 - bits) << 23);
            back[i] = as_float((bits - 14 - 12) << 23);
            most[i] = 0.0f;
        }
        float large[4][4] = {}, small[4][4] = {}; // of W (two groups of 8 rows) and q
        UNROLL for (int j = 0; j < DIM / 16; j++) {
            u32 high[4], low[4];
            UNROLL for (int i = 0; i < 4; i++) {
                const float* two = &state[2 * j + (i >> 1)][(i & 1) * 2];
                split_halves(two[0] * scale[i & 1], two[1] * scale[i & 1], high + i, low + i);
            }
            uint4 x[4];
            UNROLL for (int r = 0; r < 4; r++) x[r] = pieces[(j * 4 + r) * 32];
            UNROLL for (int r = 0; r < 4; r++) mma_halves(small[r], high, x[r].z, x[r].w);
            UNROLL for (int r = 0; r < 4; r++) mma_halves(large[r], high, x[r].x, x[r].y);
            UNROLL for (int r = 0; r < 4; r++) mma_halves(small[r], low, x[r].x, x[r].y);
        }
        u32 high[4], low[4];
        UNROLL for (int r = 0; r < 2; r++) {
            float4 v = *(const float4*)(of + COMMON + ((warp * 2 + r) * 32 + lane) * 4);
            float u[4] = {v.x, v.y, v.z, v.w};
            UNROLL for (int i = 0; i < 4; i++) u[i] = fma_of(large[r][i] + small[r][i], -1.0f / 4096.0f, u[i] * scale[i >> 1]);
            split_halves(u[0], u[1], high + 2 * r, low + 2 * r);
            split_halves(u[2], u[3], high + 2 * r + 1, low + 2 * r + 1);
        }
        UNROLL for (int r = 0; r < 2; r++) {
            uint4 x = pieces[MIX / 4 + r * 32];
            mma_halves(small[2 + r], high, x.z, x.w);
            mma_halves(large[2 + r], high, x.x, x.y);
            mma_halves(small[2 + r], low, x.x, x.y);
        }
        UNROLL for (int e = 0; e < 4; e++) {
            float sums[4][4] = {};
            uint4 x[4];
            UNROLL for (int j = 0; j < 4; j++) x[j] = pieces[KEYS / 4 + (e * 4 + j) * 32];
            UNROLL for (int j = 0; j < 4; j++) mma_halves(sums[j], high, x[j].z, x[j].w);
            UNROLL for (int j = 0; j < 4; j++) mma_halves(sums[j], low, x[j].x, x[j].y);
            UNROLL for (int j = 0; j < 4; j++) mma_halves(sums[j], high, x[j].x, x[j].y);
            UNROLL for (int k = 0; k < 2; k++) {
                float4 fade = *(const float4*)(of + FADE + (e * 2 + k) * 16 + 4 * t);
                float by[4] = {fade.x, fade.y, fade.z, fade.w};
                UNROLL for (int j = 0; j < 2; j++)
                    UNROLL for (int i = 0; i < 4; i++) {
                        float* own = &state[e * 4 + k * 2 + j][i];
                        *own = fma_of(*own, by[2 * j + (i & 1)], sums[k * 2 + j][i] * back[i >> 1]);
                        most[i >> 1] = larger(most[i >> 1], *own);
                    }
            }
        }
        UNROLL for (int r = 0; r < 2; r++)
            UNROLL for (int i = 0; i < 4; i++)
                if (8 * r + (i & 1) < left) line[(long long)(8 * r + (i & 1)) * hd + (i >> 1) * 8] = (large[2 + r][i] + small[2 + r][i]) * back[i >> 1];
    }
    UNROLL for (int j = 0; j < DIM / 8; j++)
        UNROLL for (int i = 0; i < 4; i++) kept[((j >> 1) * 16 + 4 * t + (j & 1) * 2 + (i & 1)) * DIM + (i >> 1) * 8] = state[j][i];
    if (block_x() == 0 && first + end == all) {
        float* carry = carries + unit * 9 * hd + h * DIM + tid();
        const float* last = proj + ((long long)s.row0 + s.rows - 3) * stride + h * DIM + tid();
        UNROLL for (int i = 0; i < 3; i++)
            UNROLL for (int third = 0; third < 3; third++) carry[(i * 3ll + third) * hd] = last[(long long)i * stride + third * hd];
    }
}

// out = rms_norm(out, o_norm) sigmoid(g), head by head, in place. Blocks (8 heads, row): a warp per head.
KERNEL BOUNDS(256) kda_finish(Step b, Kda p, int least, const float* g, const float* o_norm, float* out) {
    int r = block_y(), h = block_x() * 8 + (tid() >> 5);
    float4 norm = *(const float4*)(o_norm + lane_id() * 4);
    begin_next();
    await_ahead();
    if (h >= p.heads || b.segments[b.row_segment[r]].rows < least) return;
    long long at = ((long long)r * p.heads + h) * DIM + lane_id() * 4;
    float4 o = *(const float4*)(out + at), gate = *(const float4*)(g + at);
    float square = warp_sum(fma_of(o.w, o.w, fma_of(o.z, o.z, fma_of(o.y, o.y, o.x * o.x))));
    float inv = 1.0f / sqrt_of(square / (float)DIM + p.eps);
    float4 to = {o.x * inv * norm.x * sigmoid(gate.x), o.y * inv * norm.y * sigmoid(gate.y), o.z * inv * norm.z * sigmoid(gate.z),
                 o.w * inv * norm.w * sigmoid(gate.w)};
    *(float4*)(out + at) = to;
}

#endif
