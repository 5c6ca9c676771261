// The KDA mixer for prompts: 16 rows of a sequence at once, for heads of 128, four taps and decays whose sum over 16 rows stays within e^-80. In the
// terms of reference/kda_chunk.rs, u = T (beta v) - T (beta k e^G) S with T = (1 + tril(beta A))^-1: all but S is made for all chunks side by side
// (`kda_prepare`), then a head's chunks follow each other (`kda_follow`), and rows are normed and gated at the end (`kda_finish`). All in f32.
//
// Decayed products are factored, e^(G_i - G_j) = e^G_i e^-G_j, which the bound keeps in range. Chunks are counted from a segment's first row, so that
// a segment gives the same bits whoever shares its step. Neighbours: kda.cu, cuda/mixers.rs.
#include "kda.cuh"

#define DIM 128
#define CHUNK 16
#define LINE 132 // floats of a row of 128 in shared memory

// What one chunk of one head needs beside the state, in this order: T beta k e^G, q e^G, k e^(G_last - G), T beta v (each [16][128]), B [16][16],
// e^G_last [128].
#define PARTS (4 * CHUNK * DIM + CHUNK * CHUNK + DIM)

// Chunks `first + x` of the segments of at least `least` rows. Blocks (chunks, head, segment); a group of 128 threads each for q, k, v and the
// decay.
KERNEL BOUNDS_3(512)
kda_prepare(Step b, Kda p, int least, int first, const float* proj, int stride, int beta0, const float* f, const float* conv, const float* a_log,
            const float* dt_bias, const float* carries, int layers, int layer, float* parts) {
    SHARED ALIGNED float q[CHUNK][LINE], k[CHUNK][LINE], v[CHUNK][LINE], sum[CHUNK][LINE];
    SHARED float a[CHUNK][CHUNK + 1], beta[CHUNK];
    begin_next();
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
        UNROLL for (int i = 0; i < CHUNK + 3; i++) {
            int t = t0 + i - 3;
            x[i] = t < 0 ? carry[(t + 3) * 3ll * hd] : i - 3 < n ? row[(long long)(i - 3) * stride] : 0.0f;
        }
        float* line = kind == 0 ? q[0] : kind == 1 ? k[0] : v[0];
        UNROLL for (int i = 0; i < CHUNK; i++) {
            float y = silu(fma_of(w.w, x[i + 3], fma_of(w.z, x[i + 2], fma_of(w.y, x[i + 1], w.x * x[i]))));
            line[i * LINE + c] = i < n ? y : 0.0f;
        }
    } else {
        const float* from = f + ((long long)s.row0 + t0) * hd + h * DIM + c;
        float bias = dt_bias[h * DIM + c], decay = exp_of(a_log[h]), total = 0.0f, z[CHUNK];
        UNROLL for (int i = 0; i < CHUNK; i++) z[i] = i < n ? from[(long long)i * hd] : 0.0f;
        UNROLL for (int i = 0; i < CHUNK; i++) {
            if (i < n) total += log_decay(p, decay, z[i] + bias);
            sum[i][c] = total;
        }
        if (c < CHUNK) beta[c] = c < n ? sigmoid(proj[((long long)s.row0 + t0 + c) * stride + beta0 + h]) : 0.0f;
    }
    barrier();
    // A warp per row: q and k to unit length, and decayed.
    int row = tid() >> 5;
    float qq = 0.0f, kk = 0.0f;
    UNROLL for (int i = 0; i < DIM; i += 32) {
        qq = fma_of(q[row][i + lane_id()], q[row][i + lane_id()], qq);
        kk = fma_of(k[row][i + lane_id()], k[row][i + lane_id()], kk);
    }
    float qs = 1.0f / sqrt_of(warp_sum(qq) + 1e-6f) * (1.0f / sqrt_of((float)DIM)), ks = 1.0f / sqrt_of(warp_sum(kk) + 1e-6f);
    float last[DIM / 32];
    UNROLL for (int i = 0; i < DIM / 32; i++) last[i] = sum[CHUNK - 1][32 * i + lane_id()];
    barrier();
    UNROLL for (int i = 0; i < DIM / 32; i++) {
        int col = 32 * i + lane_id();
        float g = sum[row][col], up = exp_of(g), key = k[row][col] * ks, query = q[row][col] * qs * up;
        q[row][col] = query;
        k[row][col] = key * up;
        sum[row][col] = key * exp_of(-g);
        to[CHUNK * DIM + row * DIM + col] = query;
        to[2 * CHUNK * DIM + row * DIM + col] = key * exp_of(last[i] - g);
        if (row == CHUNK - 1) to[4 * CHUNK * DIM + CHUNK * CHUNK + col] = up;
    }
    barrier();
    // A thread per product of two rows: beta A below the diagonal, B up to it.
    int i = tid() >> 4 & 15, j = tid() & 15;
    const float* left = tid() < 256 ? k[i] : q[i];
    float dot = 0.0f;
    UNROLL_8 for (int x = 0; x < DIM; x += 4) {
        float4 l = *(const float4*)(left + x), r = *(const float4*)(sum[j] + x);
        dot = fma_of(l.w, r.w, fma_of(l.z, r.z, fma_of(l.y, r.y, fma_of(l.x, r.x, dot))));
    }
    if (tid() < 256) a[i][j] = j < i ? beta[i] * dot : 0.0f;
    else to[4 * CHUNK * DIM + i * CHUNK + j] = j <= i ? dot : 0.0f;
    barrier();
    if (tid() >= 256) return;
    // A thread per column: forward substitution.
    const float* of = tid() < DIM ? k[0] : v[0];
    float* result = to + (tid() < DIM ? 0 : 3 * CHUNK * DIM);
    float w[CHUNK];
    UNROLL for (int r = 0; r < CHUNK; r++) {
        float x = beta[r] * of[r * LINE + c];
        UNROLL for (int e = 0; e < r; e++) x = fma_of(-a[r][e], w[e], x);
        w[r] = x;
        result[r * DIM + c] = x;
    }
}

#define COLUMNS 32 // of the state, in one block
#define STATE_LINE 36

// The chunks of `kda_prepare` in order, for 32 columns of a head's state: u = T beta v - (T beta k e^G) S, o = (q e^G) S + B u, S = e^G_last S +
// (k e^(G_last - G)) u. `out` gets o; a segment's last inputs go to the carry. Blocks (4, head, segment); 256 threads.
KERNEL BOUNDS_2(256)
kda_follow(Step b, Kda p, int least, int first, int chunks, const float* proj, int stride, const float* parts, float* states,
           float* carries, int layers, int layer, float* out) {
    SHARED ALIGNED float state[DIM][STATE_LINE], rows[2 * CHUNK][LINE], keys[CHUNK][LINE], u[CHUNK][STATE_LINE], mix[CHUNK][CHUNK], fade[DIM];
    begin_next();
    await_ahead();
    Segment s = b.segments[block_z()];
    int h = block_y(), c0 = block_x() * COLUMNS, hd = p.heads * DIM, group = tid() >> 4, pair = (tid() & 15) * 2, quarter = tid() >> 6, all = div_up(s.rows, CHUNK);
    if (s.rows < least || first >= all) return;
    int end = min_of(all - first, chunks);
    long long unit = (long long)s.slot * layers + layer;
    float* kept = states + (unit * p.heads + h) * DIM * DIM + c0;
    const float* from = parts + ((long long)block_z() * p.heads + h) * chunks * PARTS;
    // Of the next chunk, on their way: W and q and keys, two of u, one of B, a decay.
    float4 ahead[6];
    float2 values;
    float one, decay = 0.0f;
    auto fetch = [&](int at) {
        const float* of = from + (long long)at * PARTS;
        UNROLL for (int i = 0; i < 6; i++) ahead[i] = *(const float4*)(of + (i * 256 + tid()) * 4);
        values = *(const float2*)(of + 3 * CHUNK * DIM + (tid() >> 4) * DIM + c0 + pair);
        one = of[4 * CHUNK * DIM + tid()];
        if (tid() < DIM) decay = of[4 * CHUNK * DIM + CHUNK * CHUNK + tid()];
    };
    fetch(0);
    UNROLL for (int i = tid(); i < DIM * 8; i += 256) *(float4*)&state[i >> 3][(i & 7) * 4] = *(const float4*)(kept + (i >> 3) * DIM + (i & 7) * 4);
    for (int at = 0; at < end; at++) {
        UNROLL for (int i = 0; i < 4; i++) *(float4*)&rows[i * 8 + (tid() >> 5)][(tid() & 31) * 4] = ahead[i];
        UNROLL for (int i = 0; i < 2; i++) *(float4*)&keys[i * 8 + (tid() >> 5)][(tid() & 31) * 4] = ahead[i + 4];
        *(float2*)&u[group][pair] = values;
        mix[group][tid() & 15] = one;
        if (tid() < DIM) fade[tid()] = decay;
        barrier();
        if (at + 1 < end) fetch(at + 1);
        // Both products: a thread sums four rows (8 apart) and four columns over a quarter of the keys; then the quarters' sums of two rows and two
        // columns of its own.
        float4 tile[4] = {};
        UNROLL_2 for (int x = quarter * 32; x < quarter * 32 + 32; x += 4) {
            float4 l[4], r[4];
            UNROLL for (int i = 0; i < 4; i++) l[i] = *(const float4*)&rows[(tid() >> 3 & 7) + 8 * i][x];
            UNROLL for (int i = 0; i < 4; i++) r[i] = *(const float4*)&state[x + i][(tid() & 7) * 4];
            UNROLL for (int i = 0; i < 4; i++) {
                tile[i].x = fma_of(l[i].w, r[3].x, fma_of(l[i].z, r[2].x, fma_of(l[i].y, r[1].x, fma_of(l[i].x, r[0].x, tile[i].x))));
                tile[i].y = fma_of(l[i].w, r[3].y, fma_of(l[i].z, r[2].y, fma_of(l[i].y, r[1].y, fma_of(l[i].x, r[0].y, tile[i].y))));
                tile[i].z = fma_of(l[i].w, r[3].z, fma_of(l[i].z, r[2].z, fma_of(l[i].y, r[1].z, fma_of(l[i].x, r[0].z, tile[i].z))));
                tile[i].w = fma_of(l[i].w, r[3].w, fma_of(l[i].z, r[2].w, fma_of(l[i].y, r[1].w, fma_of(l[i].x, r[0].w, tile[i].w))));
            }
        }
        barrier(); // the rows are used up: their place takes the quarters' sums
        float* quarters = rows[0];
        UNROLL for (int i = 0; i < 4; i++) *(float4*)(quarters + (quarter * 32 + (tid() >> 3 & 7) + 8 * i) * COLUMNS + (tid() & 7) * 4) = tile[i];
        barrier();
        float acc[2][2] = {};
        UNROLL for (int i = 0; i < 2; i++)
            UNROLL for (int k = 0; k < 4; k++) {
                float2 of = *(const float2*)(quarters + (k * 32 + group * 2 + i) * COLUMNS + pair);
                acc[i][0] += of.x;
                acc[i][1] += of.y;
            }
        if (group < 8) {
            UNROLL for (int i = 0; i < 2; i++) {
                u[group * 2 + i][pair] -= acc[i][0];
                u[group * 2 + i][pair + 1] -= acc[i][1];
            }
        }
        barrier();
        if (group >= 8) {
            int t = (group - 8) * 2;
            UNROLL for (int j = 0; j < CHUNK; j++) {
                float2 by = *(const float2*)&u[j][pair];
                UNROLL for (int i = 0; i < 2; i++) {
                    acc[i][0] = fma_of(mix[t + i][j], by.x, acc[i][0]);
                    acc[i][1] = fma_of(mix[t + i][j], by.y, acc[i][1]);
                }
            }
            UNROLL for (int i = 0; i < 2; i++) {
                int row = (first + at) * CHUNK + t + i;
                float2 o = {acc[i][0], acc[i][1]};
                if (row < s.rows) *(float2*)(out + ((long long)s.row0 + row) * hd + h * DIM + c0 + pair) = o;
            }
        }
        // Four keys and four columns of the state.
        int key = (tid() >> 3) * 4, col = (tid() & 7) * 4;
        float4 own[4];
        UNROLL for (int i = 0; i < 4; i++) {
            float g = fade[key + i];
            own[i] = *(const float4*)&state[key + i][col];
            own[i].x *= g;
            own[i].y *= g;
            own[i].z *= g;
            own[i].w *= g;
        }
        UNROLL_8 for (int j = 0; j < CHUNK; j++) {
            float4 by = *(const float4*)&u[j][col], four = *(const float4*)&keys[j][key];
            float w[4] = {four.x, four.y, four.z, four.w};
            UNROLL for (int i = 0; i < 4; i++) {
                own[i].x = fma_of(w[i], by.x, own[i].x);
                own[i].y = fma_of(w[i], by.y, own[i].y);
                own[i].z = fma_of(w[i], by.z, own[i].z);
                own[i].w = fma_of(w[i], by.w, own[i].w);
            }
        }
        UNROLL for (int i = 0; i < 4; i++) *(float4*)&state[key + i][col] = own[i];
        barrier();
    }
    UNROLL for (int i = tid(); i < DIM * 8; i += 256) *(float4*)(kept + (i >> 3) * DIM + (i & 7) * 4) = *(const float4*)&state[i >> 3][(i & 7) * 4];
    if (block_x() == 0 && first + end == all && tid() < DIM) {
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
