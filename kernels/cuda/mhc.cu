// Hyper-connections between two sublayers: `mhc_mix` ends the one (post) and gathers what the gates of the next need; `mhc_read` makes the
// gates, reads the streams through them and norms. Everything in f32 whatever the precision. Neighbours: cuda/ops.rs, rows.cu.
#include "weights.cuh"

#define MAX_STREAMS 8
#define MAX_GATES 80 // N (N + 2) for N = 8

// Columns of the hidden width that one block of `mhc_mix` owns.
#define SLICE 64

// Element i of a row of plain floats.
DEVICE float float_at(int type, const u8* row, long long i) {
    if (type == T_F32) return ((const float*)row)[i];
    u16 v = ((const u16*)row)[i];
    return type == T_BF16 ? from_bf16(v) : half_to_float(v);
}

// Block (slice, row). With `y`: streams[m] = post[m] y + sum_n comb[n, m] streams[n] first, in place. Then partial[row, slice, j] = the
// slice's part of fn[j] . streams for each gate j, and of |streams|^2 behind them. Only post where `fn` has no rows.
KERNEL BOUNDS(256)
mhc_mix(Matrix fn, const float* y, const float* post, const float* comb, int n, int d, float* streams, float* partial) {
    SHARED float s[MAX_STREAMS * SLICE];
    int r = block_y(), c0 = block_x() * SLICE, width = min_of(SLICE, d - c0);
    float* mine = streams + (long long)r * n * d + c0;
    for (int c = tid(); c < width; c += threads()) {
        float old[MAX_STREAMS];
        for (int k = 0; k < n; k++) old[k] = mine[(long long)k * d + c];
        for (int m = 0; m < n; m++) {
            float v = old[m];
            if (y) {
                v = post[r * n + m] * y[(long long)r * d + c0 + c];
                for (int k = 0; k < n; k++) v = fma_of(comb[(r * n + k) * n + m], old[k], v);
                mine[(long long)m * d + c] = v;
            }
            s[m * SLICE + c] = v;
        }
    }
    if (fn.rows == 0) return;
    barrier();
    // A warp per gate; the one behind the last sums squares.
    for (int j = tid() >> 5; j <= fn.rows; j += threads() >> 5) {
        float sum = 0.0f;
        const u8* w = fn.q + (long long)min_of(j, fn.rows - 1) * fn.q_row;
        if (j < fn.rows && fn.type > T_BF16) {
            // Quantised rows: eight columns at a time (their widths are multiples of a block, and so of eight).
            Row row = row_of(fn, 0, j);
            for (int i = lane_id(); i < n * (width / 8); i += 32) {
                int m = i / (width / 8), c = i % (width / 8) * 8;
                float v[8];
                load8_any(fn, row, m * d + c0 + c, v);
                UNROLL for (int k = 0; k < 8; k++) sum = fma_of(s[m * SLICE + c + k], v[k], sum);
            }
        } else for (int m = 0; m < n; m++)
            for (int c = lane_id(); c < width; c += 32) {
                float v = s[m * SLICE + c];
                sum = fma_of(v, j < fn.rows ? float_at(fn.type, w, (long long)m * d + c0 + c) : v, sum);
            }
        sum = warp_sum(sum);
        if (lane_id() == 0) partial[((long long)r * div_up(d, SLICE) + block_x()) * (fn.rows + 1) + j] = sum;
    }
}

// A block per row: gates from the partial sums, x = rms_norm(sum_n pre[n] streams[n]) * norm.
KERNEL BOUNDS(512)
mhc_read(const float* partial, const float* base, const float* scale, const float* norm, const float* streams, int n, int d, float rms_eps,
         float hc_eps, int iters, float* x, float* post, float* comb) {
    SHARED float room[32];
    SHARED float gate[MAX_GATES + 1];
    SHARED float pre[MAX_STREAMS];
    int r = block_x(), gates = n * (n + 2), slices = div_up(d, SLICE);
    const float* mine = partial + (long long)r * slices * (gates + 1);
    for (int j = tid() >> 5; j <= gates; j += threads() >> 5) {
        float sum = 0.0f;
        for (int i = lane_id(); i < slices; i += 32) sum += mine[i * (gates + 1) + j];
        sum = warp_sum(sum);
        if (lane_id() == 0) gate[j] = sum;
    }
    barrier();
    if (tid() < 32) {
        float inv = 1.0f / sqrt_of(gate[gates] / (float)(n * d) + rms_eps);
        for (int j = lane_id(); j < 2 * n; j += 32) {
            float v = sigmoid(gate[j] * inv * scale[j < n ? 0 : 1] + base[j]);
            if (j < n) pre[j] = v + hc_eps;
            else post[r * n + j - n] = 2.0f * v;
        }
        // Sinkhorn with the matrix in shared memory: lane i owns row i, then column i.
        float* m = gate + 2 * n;
        int i = lane_id();
        warp_barrier();
        if (i < n) {
            float top = -infinity(), total = 0.0f;
            for (int c = 0; c < n; c++) {
                m[i * n + c] = m[i * n + c] * inv * scale[2] + base[2 * n + i * n + c];
                top = at_least(top, m[i * n + c]);
            }
            for (int c = 0; c < n; c++) {
                m[i * n + c] = exp_of(m[i * n + c] - top);
                total += m[i * n + c];
            }
            for (int c = 0; c < n; c++) m[i * n + c] = m[i * n + c] / total + hc_eps;
        }
        warp_barrier();
        for (int pass = 0; pass < 2 * iters - 1; pass++) {
            // even passes: columns; odd: rows
            int step = pass & 1 ? 1 : n, between = pass & 1 ? n : 1;
            if (i < n) {
                float total = 0.0f;
                for (int c = 0; c < n; c++) total += m[i * between + c * step];
                total += hc_eps;
                for (int c = 0; c < n; c++) m[i * between + c * step] /= total;
            }
            warp_barrier();
        }
        for (int k = lane_id(); k < n * n; k += 32) comb[r * n * n + k] = m[k];
    }
    barrier();
    const float* s = streams + (long long)r * n * d;
    float* to = x + (long long)r * d;
    float sum = 0.0f;
    for (int c = tid(); c < d; c += threads()) {
        float v = 0.0f;
        for (int k = 0; k < n; k++) v = fma_of(pre[k], s[(long long)k * d + c], v);
        to[c] = v;
        sum = fma_of(v, v, sum);
    }
    float inv = 1.0f / sqrt_of(block_sum(sum, room) / (float)d + rms_eps);
    for (int c = tid(); c < d; c += threads()) to[c] = to[c] * inv * norm[c];
}
