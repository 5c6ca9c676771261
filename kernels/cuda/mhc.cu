// Hyper-connections between two sublayers: `mhc_mix` ends the one (post) and gathers what the gates of the next need; `mhc_read` makes the
// gates, reads the streams through them and norms. Everything in f32 whatever the precision. Neighbours: cuda/ops.rs, rows.cu.
#include "weights.cuh"

#define MAX_STREAMS 8
#define MAX_GATES 80 // N (N + 2) for N = 8

// Columns of the hidden width that one block of `mhc_mix` owns.
#define SLICE 64

// Element i of a row of F32 or F16.
DEVICE float float_at(int type, const u8* row, long long i) {
    return type == T_F32 ? ((const float*)row)[i] : half_to_float(((const u16*)row)[i]);
}

// The slice's part of gate j's row of fn times the streams, of one thread.
DEVICE float slice_part(const Matrix& fn, int j, const float* s, int n, int d, int c0, int width) {
    float sum = 0.0f;
    Row row = row_of(fn, 0, j);
    if (fn.type >= T_BF16 && d % 8 != 0) {
        for (int m = 0; m < n; m++)
            for (int c = lane_id(); c < width; c += 32) sum = fma_of(s[m * SLICE + c], element(fn, row, m * d + c0 + c), sum);
        return sum;
    }
    if (fn.type >= T_BF16) {
        for (int i = lane_id(); i < n * (width / 8); i += 32) {
            int m = i / (width / 8), c = i % (width / 8) * 8;
            float v[8];
            load8_any(fn, row, m * d + c0 + c, v);
            UNROLL for (int k = 0; k < 8; k++) sum = fma_of(s[m * SLICE + c + k], v[k], sum);
        }
        return sum;
    }
    for (int m = 0; m < n; m++)
        for (int c = lane_id(); c < width; c += 32) sum = fma_of(s[m * SLICE + c], float_at(fn.type, row.q, (long long)m * d + c0 + c), sum);
    return sum;
}

// Block (slice, row). With `y`: streams[m] = post[m] y + sum_n comb[n, m] streams[n] first, in place. Then partial[row, slice, j] = the
// slice's part of fn[j] . streams for each gate j, and of |streams|^2 behind them. Only post where `fn` has no rows.
KERNEL BOUNDS(256)
mhc_mix(Matrix fn, const float* y, const float* post, const float* comb, int n, int d, float* streams, float* partial) {
    SHARED float s[MAX_STREAMS * SLICE];
    SHARED float sums[8][MAX_GATES + 1];
    int r = block_y(), c0 = block_x() * SLICE, width = min_of(SLICE, d - c0), slices = div_up(d, SLICE);
    float* mine = streams + (long long)r * n * d + c0;
    // The release's shape: a thread per element, its column of fn in flight before the streams arrive.
    bool common = n == 4 && width == SLICE && fn.type == T_F32 && fn.rows == 24;
    float w[24];
    if (common) {
        const float* from = (const float*)fn.q + (long long)(tid() >> 6) * d + c0 + (tid() & 63);
        UNROLL for (int j = 0; j < 24; j++) w[j] = from[(long long)j * (fn.q_row >> 2)];
    }
    if (y) {
        for (int i = tid(); i < n * width; i += threads()) s[i / width * SLICE + i % width] = mine[(long long)(i / width) * d + i % width];
        barrier();
    }
    float v = 0.0f;
    for (int i = tid(); i < n * width; i += threads()) {
        int m = i / width, c = i % width;
        if (y) {
            v = post[r * n + m] * y[(long long)r * d + c0 + c];
            for (int k = 0; k < n; k++) v = fma_of(comb[(r * n + k) * n + m], s[k * SLICE + c], v);
            mine[(long long)m * d + c] = v;
        } else {
            v = mine[(long long)m * d + c];
        }
        if (y && !common) continue; // the old streams are still being read
        s[m * SLICE + c] = v;
    }
    if (fn.rows == 0) return;
    if (common) {
        float square = warp_sum(v * v);
        UNROLL for (int j = 0; j < 24; j++) w[j] = warp_sum(w[j] * v);
        if (lane_id() == 0) {
            UNROLL for (int j = 0; j < 24; j++) sums[tid() >> 5][j] = w[j];
            sums[tid() >> 5][24] = square;
        }
        barrier();
        if (tid() < 25) {
            float sum = 0.0f;
            UNROLL for (int k = 0; k < 8; k++) sum += sums[k][tid()];
            partial[((long long)r * slices + block_x()) * 25 + tid()] = sum;
        }
        return;
    }
    barrier();
    if (y) {
        // Written above by the same threads.
        for (int i = tid(); i < n * width; i += threads()) s[i / width * SLICE + i % width] = mine[(long long)(i / width) * d + i % width];
        barrier();
    }
    // A warp per gate; the one behind the last sums squares.
    for (int j = tid() >> 5; j <= fn.rows; j += threads() >> 5) {
        float sum = 0.0f;
        if (j < fn.rows) sum = slice_part(fn, j, s, n, d, c0, width);
        else
            for (int m = 0; m < n; m++)
                for (int c = lane_id(); c < width; c += 32) sum = fma_of(s[m * SLICE + c], s[m * SLICE + c], sum);
        sum = warp_sum(sum);
        if (lane_id() == 0) partial[((long long)r * slices + block_x()) * (fn.rows + 1) + j] = sum;
    }
}

// Softmax of rows, then Sinkhorn, of a 4 x 4 matrix in the first 16 lanes (row-major): sums by exchange inside of rows and columns.
DEVICE float sinkhorn4(float m, float eps, int iters) {
    int i = lane_id();
    float top = at_least(m, shuffle(m, i ^ 1));
    top = at_least(top, shuffle(top, i ^ 2));
    m = exp_of(m - top);
    float total = m + shuffle(m, i ^ 1);
    total += shuffle(total, i ^ 2);
    m = m / total + eps;
    if (iters > 0) {
        total = m + shuffle(m, i ^ 4);
        total += shuffle(total, i ^ 8);
        m = m / (total + eps);
    }
    for (int pass = 1; pass < iters; pass++) {
        total = m + shuffle(m, i ^ 1);
        total += shuffle(total, i ^ 2);
        m = m / (total + eps);
        total = m + shuffle(m, i ^ 4);
        total += shuffle(total, i ^ 8);
        m = m / (total + eps);
    }
    return m;
}

// The same for n x n in shared memory: lane i owns row i, then column i.
DEVICE void sinkhorn_any(float* m, const float* base, float scale, int n, float eps, int iters) {
    int i = lane_id();
    if (i < n) {
        float top = -infinity(), total = 0.0f;
        for (int c = 0; c < n; c++) {
            m[i * n + c] = m[i * n + c] * scale + base[i * n + c];
            top = at_least(top, m[i * n + c]);
        }
        for (int c = 0; c < n; c++) {
            m[i * n + c] = exp_of(m[i * n + c] - top);
            total += m[i * n + c];
        }
        for (int c = 0; c < n; c++) m[i * n + c] = m[i * n + c] / total + eps;
    }
    warp_barrier();
    for (int pass = 0; pass < 2 * iters - 1; pass++) {
        // even passes: columns; odd: rows
        int step = pass & 1 ? 1 : n, between = pass & 1 ? n : 1;
        if (i < n) {
            float total = 0.0f;
            for (int c = 0; c < n; c++) total += m[i * between + c * step];
            total += eps;
            for (int c = 0; c < n; c++) m[i * between + c * step] /= total;
        }
        warp_barrier();
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
    float inv = 1.0f / sqrt_of(gate[gates] / (float)(n * d) + rms_eps);
    if (tid() < n) pre[tid()] = sigmoid(gate[tid()] * inv * scale[0] + base[tid()]) + hc_eps;
    barrier();
    // The first warp makes the gates for the end of the sublayer; the others read the streams meanwhile.
    if (tid() < 32) {
        int i = lane_id();
        for (int j = n + i; j < 2 * n; j += 32) post[r * n + j - n] = 2.0f * sigmoid(gate[j] * inv * scale[1] + base[j]);
        if (n == 4) {
            float m = i < 16 ? gate[8 + i] * inv * scale[2] + base[8 + i] : 0.0f;
            m = sinkhorn4(m, hc_eps, iters);
            if (i < 16) comb[r * 16 + i] = m;
        } else {
            sinkhorn_any(gate + 2 * n, base + 2 * n, scale[2] * inv, n, hc_eps, iters);
            for (int k = i; k < n * n; k += 32) comb[r * n * n + k] = gate[2 * n + k];
        }
    }
    const float* s = streams + (long long)r * n * d;
    float* to = x + (long long)r * d;
    float sum = 0.0f;
    if (tid() >= 32)
        for (int c = tid() - 32; c < d; c += threads() - 32) {
            float v = 0.0f;
            if (n == 4) {
                float a = s[c], b = s[d + c], e = s[2ll * d + c], f = s[3ll * d + c];
                v = fma_of(pre[3], f, fma_of(pre[2], e, fma_of(pre[1], b, pre[0] * a)));
            } else
                for (int k = 0; k < n; k++) v = fma_of(pre[k], s[(long long)k * d + c], v);
            to[c] = v;
            sum = fma_of(v, v, sum);
        }
    inv = 1.0f / sqrt_of(block_sum(sum, room) / (float)d + rms_eps);
    if (tid() >= 32)
        for (int c = tid() - 32; c < d; c += threads() - 32) to[c] = to[c] * inv * norm[c];
}
