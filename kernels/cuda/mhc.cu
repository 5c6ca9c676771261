// Hyper-connections between two sublayers: `mhc_mix` ends the one (post) and gathers what the gates of the next need; `mhc_read` makes the
// gates, reads the streams through them and norms; the release's four streams have kernels of their own. Everything in f32 whatever the
// precision. Neighbours: cuda/ops.rs, rows.cu.
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
    int r = block_y(), c0 = block_x() * SLICE, width = min_of(SLICE, d - c0), slices = div_up(d, SLICE);
    float* mine = streams + (long long)r * n * d + c0;
    begin_next();
    await_ahead();
    if (y) {
        for (int i = tid(); i < n * width; i += threads()) s[i / width * SLICE + i % width] = mine[(long long)(i / width) * d + i % width];
        barrier();
    }
    for (int i = tid(); i < n * width; i += threads()) {
        int m = i / width, c = i % width;
        float v = mine[(long long)m * d + c];
        if (y) {
            v = post[r * n + m] * y[(long long)r * d + c0 + c];
            for (int k = 0; k < n; k++) v = fma_of(comb[(r * n + k) * n + m], s[k * SLICE + c], v);
            mine[(long long)m * d + c] = v;
        } else {
            s[m * SLICE + c] = v; // else the old streams are still being read
        }
    }
    if (fn.rows == 0) return;
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

DEVICE float4 scaled4(float a, float4 x) {
    float4 to = {a * x.x, a * x.y, a * x.z, a * x.w};
    return to;
}
DEVICE float4 added4(float a, float4 x, float4 b) {
    float4 to = {fma_of(a, x.x, b.x), fma_of(a, x.y, b.y), fma_of(a, x.z, b.z), fma_of(a, x.w, b.w)};
    return to;
}
DEVICE float dot4(float4 x, float4 y, float sum) { return fma_of(x.w, y.w, fma_of(x.z, y.z, fma_of(x.y, y.y, fma_of(x.x, y.x, sum)))); }

// The end of a sublayer for four columns of row r's four streams.
DEVICE void post4(const float* post, const float* comb, int r, float4 y, float4* s) {
    float4 gain = ((const float4*)post)[r], old[4], out[4];
    UNROLL for (int k = 0; k < 4; k++) {
        old[k] = s[k];
        out[k] = ((const float4*)comb)[(long long)r * 4 + k];
    }
    s[0] = scaled4(gain.x, y);
    s[1] = scaled4(gain.y, y);
    s[2] = scaled4(gain.z, y);
    s[3] = scaled4(gain.w, y);
    UNROLL for (int k = 0; k < 4; k++) {
        s[0] = added4(out[k].x, old[k], s[0]);
        s[1] = added4(out[k].y, old[k], s[1]);
        s[2] = added4(out[k].z, old[k], s[2]);
        s[3] = added4(out[k].w, old[k], s[3]);
    }
}

// Four elements of a row of F32, F16 or BF16 from column k on, a multiple of 4.
DEVICE float4 four_of(const Matrix& m, int row, int k) {
    Row r = row_of(m, 0, row);
    if (m.type == T_F32) return *(const float4*)(r.q + 4ll * k);
    if (m.type == T_F16) {
        uint2 v = *(const uint2*)(r.q + 2ll * k);
        float4 to = {half_to_float((u16)v.x), half_to_float((u16)(v.x >> 16)), half_to_float((u16)v.y), half_to_float((u16)(v.y >> 16))};
        return to;
    }
    uint2 v = *(const uint2*)(spot<T_BF16>(r, k & ~7) + (k & 4) * 2);
    float4 to = {as_float(v.x << 16), as_float(v.x & 0xffff0000u), as_float(v.y << 16), as_float(v.y & 0xffff0000u)};
    return to;
}

// The two kernels for the release's shape: four streams, a width of whole slices, fn in F32, F16 or BF16. In both a thread holds four columns of all streams; its
// 16 products of a gate follow each other, and the 16 threads of a slice halve what they add (8 apart, 4, 2, 1). So a row's bits are the same.
//
// Few rows: each 16 threads make the slice's streams for themselves and sum three gates (the last also the squares), whose part of fn is in
// flight before the streams are there and kept for every `step`-th row.
KERNEL BOUNDS(128)
mhc_mix4(Matrix fn, const float* y, const float* post, const float* comb, int d, float* streams, float* partial, int rows, int step) {
    int group = tid() >> 4, c = block_x() * SLICE + (tid() & 15) * 4, slices = d / SLICE;
    float4 w[3][4];
    begin_next();
    if (fn.rows > 0) {
        UNROLL for (int j = 0; j < 3; j++)
            UNROLL for (int m = 0; m < 4; m++) w[j][m] = four_of(fn, group * 3 + j, m * d + c);
    }
    await_ahead();
    for (int r = block_y(); r < rows; r += step) {
        float* mine = streams + (long long)r * 4 * d + c;
        float4 s[4];
        UNROLL for (int m = 0; m < 4; m++) s[m] = *(const float4*)(mine + m * d);
        if (y) {
            post4(post, comb, r, *(const float4*)(y + (long long)r * d + c), s);
            barrier(); // all have read the old streams
            UNROLL for (int m = 0; m < 4; m++)
                if (group == m) *(float4*)(mine + m * d) = s[m];
        }
        if (fn.rows == 0) continue;
        float sums[4] = {};
        UNROLL for (int m = 0; m < 4; m++) {
            UNROLL for (int j = 0; j < 3; j++) sums[j] = dot4(s[m], w[j][m], sums[j]);
            sums[3] = dot4(s[m], s[m], sums[3]);
        }
        UNROLL for (int m = 8; m > 0; m >>= 1)
            UNROLL for (int j = 0; j < 4; j++) sums[j] += shuffle(sums[j], lane_id() ^ m);
        float* to = partial + ((long long)r * slices + block_x()) * 25 + group * 3;
        int j = tid() & 15;
        if (j < 3) to[j] = j == 0 ? sums[0] : j == 1 ? sums[1] : sums[2];
        if (j == 3 && group == 7) to[3] = sums[3];
    }
}

#define AT_ONCE 64 // rows of one block of `mhc_many4`

// Many rows: each 16 threads hold four rows of the slice and take all gates in turn; fn's part lies in shared memory. A block takes every `step`-th
// 64 rows.
KERNEL BOUNDS_2(256)
mhc_many4(Matrix fn, const float* y, const float* post, const float* comb, int d, float* streams, float* partial, int rows, int step) {
    SHARED ALIGNED float w[24][4][SLICE];
    int q = (tid() & 15) * 4, c = block_x() * SLICE + q, slices = d / SLICE;
    begin_next();
    if (fn.rows > 0) {
        int m = tid() >> 4 & 3;
        UNROLL for (int i = 0; i < 6; i++) {
            int j = 4 * i + (tid() >> 6);
            *(float4*)&w[j][m][q] = four_of(fn, j, m * d + c);
        }
    }
    barrier();
    await_ahead();
    for (int base = block_y() * AT_ONCE; base < rows; base += step * AT_ONCE) {
        int r0 = base + (tid() >> 4) * 4;
        float4 s[4][4], in[4];
        UNROLL for (int i = 0; i < 4; i++) {
            const float* row = streams + (long long)(r0 + i) * 4 * d + c;
            UNROLL for (int m = 0; m < 4; m++) {
                s[i][m] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (r0 + i < rows) s[i][m] = *(const float4*)(row + m * d);
            }
            if (y && r0 + i < rows) in[i] = *(const float4*)(y + (long long)(r0 + i) * d + c);
        }
        if (y) {
            UNROLL for (int i = 0; i < 4; i++) {
                if (r0 + i >= rows) continue;
                post4(post, comb, r0 + i, in[i], s[i]);
                float* row = streams + (long long)(r0 + i) * 4 * d + c;
                UNROLL for (int m = 0; m < 4; m++) *(float4*)(row + m * d) = s[i][m];
            }
        }
        if (fn.rows == 0) continue;
        float* to = partial + ((long long)r0 * slices + block_x()) * 25;
        int of = lane_id() & 15;
        UNROLL_1 for (int j0 = 0; j0 < 24; j0 += 4) {
            float sums[16] = {}; // [row][gate]
            UNROLL for (int m = 0; m < 4; m++)
                UNROLL for (int j = 0; j < 4; j++) {
                    float4 by = *(const float4*)&w[j0 + j][m][q];
                    UNROLL for (int i = 0; i < 4; i++) sums[i * 4 + j] = dot4(s[i][m], by, sums[i * 4 + j]);
                }
            float sum = sums_of<8>(sums);
            if (r0 + (of >> 2) < rows) to[(long long)(of >> 2) * slices * 25 + j0 + (of & 3)] = sum;
        }
        float squares[4] = {};
        UNROLL for (int m = 0; m < 4; m++)
            UNROLL for (int i = 0; i < 4; i++) squares[i] = dot4(s[i][m], s[i][m], squares[i]);
        UNROLL for (int m = 8; m > 2; m >>= 1)
            UNROLL for (int i = 0; i < 4; i++) squares[i] += shuffle(squares[i], lane_id() ^ m);
        float square = sums_of<2>(squares);
        if (of < 4 && r0 + of < rows) to[(long long)of * slices * 25 + 24] = square;
    }
}

// Softmax of rows, then Sinkhorn, of a 4 x 4 matrix (row-major) in one thread. Divisions of rows and columns by their sums only scale them:
// the matrix stays as it is, and a factor per row and column carries the passes: f / (f sum + eps), whose inverse is sum + eps / f. So a pass is a
// sum, a multiply-add and one reciprocal, one after the other: the thread waits for each, and others for the thread.
DEVICE void sinkhorn4(float* m, float eps, int iters) {
    float row[4] = {1.0f, 1.0f, 1.0f, 1.0f}, col[4] = {1.0f, 1.0f, 1.0f, 1.0f}; // factors
    float per_row[4] = {1.0f, 1.0f, 1.0f, 1.0f}, per_col[4] = {1.0f, 1.0f, 1.0f, 1.0f}; // their inverses
    UNROLL for (int i = 0; i < 4; i++) {
        float* a = m + 4 * i;
        float top = at_least(at_least(a[0], a[1]), at_least(a[2], a[3]));
        UNROLL for (int j = 0; j < 4; j++) a[j] = exp_of(a[j] - top);
        float total = (a[0] + a[1]) + (a[2] + a[3]);
        UNROLL for (int j = 0; j < 4; j++) a[j] = a[j] / total + eps;
    }
    UNROLL_1 for (int pass = 0; pass < iters; pass++) {
        if (pass > 0) {
            UNROLL for (int i = 0; i < 4; i++) {
                const float* a = m + 4 * i;
                float sum = fma_of(a[1], col[1], a[0] * col[0]) + fma_of(a[3], col[3], a[2] * col[2]);
                per_row[i] = fma_of(eps, per_row[i], sum);
                row[i] = quick_inverse(per_row[i]);
            }
        }
        UNROLL for (int j = 0; j < 4; j++) {
            float sum = fma_of(m[4 + j], row[1], m[j] * row[0]) + fma_of(m[12 + j], row[3], m[8 + j] * row[2]);
            per_col[j] = fma_of(eps, per_col[j], sum);
            col[j] = quick_inverse(per_col[j]);
        }
    }
    UNROLL for (int i = 0; i < 16; i++) m[i] *= row[i >> 2] * col[i & 3];
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

// Sums of the slices' parts: a warp per gate.
DEVICE void join_gates(const float* partial, int gates, int slices, float* gate) {
    for (int j = tid() >> 5; j <= gates; j += threads() >> 5) {
        float sum = 0.0f;
        UNROLL_2 for (int i = lane_id(); i < slices; i += 32) sum += partial[(long long)i * (gates + 1) + j];
        sum = warp_sum(sum);
        if (lane_id() == 0) gate[j] = sum;
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
    begin_next();
    await_ahead();
    join_gates(partial + (long long)r * slices * (gates + 1), gates, slices, gate);
    barrier();
    float inv = 1.0f / sqrt_of(gate[gates] / (float)(n * d) + rms_eps);
    if (tid() < n) pre[tid()] = sigmoid(gate[tid()] * inv * scale[0] + base[tid()]) + hc_eps;
    barrier();
    // The first warp makes the gates for the end of the sublayer; the others read the streams meanwhile.
    if (tid() < 32) {
        int i = lane_id();
        for (int j = n + i; j < 2 * n; j += 32) post[r * n + j - n] = 2.0f * sigmoid(gate[j] * inv * scale[1] + base[j]);
        sinkhorn_any(gate + 2 * n, base + 2 * n, scale[2] * inv, n, hc_eps, iters);
        for (int k = i; k < n * n; k += 32) comb[r * n * n + k] = gate[2 * n + k];
    }
    const float* s = streams + (long long)r * n * d;
    float* to = x + (long long)r * d;
    float sum = 0.0f;
    if (tid() >= 32)
        for (int c = tid() - 32; c < d; c += threads() - 32) {
            float v = 0.0f;
            for (int k = 0; k < n; k++) v = fma_of(pre[k], s[(long long)k * d + c], v);
            to[c] = v;
            sum = fma_of(v, v, sum);
        }
    inv = 1.0f / sqrt_of(block_sum(sum, room) / (float)d + rms_eps);
    if (tid() >= 32)
        for (int c = tid() - 32; c < d; c += threads() - 32) to[c] = to[c] * inv * norm[c];
}

// Sums of the slices' parts for four streams and up to 64 slices, for 17 warps: lane j of every warp gets gate j. `room` holds 16 x 32.
DEVICE float gates4(const float* partial, int slices, float* room) {
    int warp = tid() >> 5, j = lane_id();
    if (warp < 16) {
        float v[4], sum = 0.0f;
        UNROLL for (int u = 0; u < 4; u++) v[u] = j < 25 && warp + 16 * u < slices ? partial[(warp + 16 * u) * 25 + j] : 0.0f;
        UNROLL for (int u = 0; u < 4; u++) sum += v[u];
        room[warp * 32 + j] = sum;
    }
    barrier();
    float sum = 0.0f;
    UNROLL for (int i = 0; i < 16; i++) sum += room[i * 32 + j];
    return sum;
}

// The same for four streams up to 4,096 wide: 16 warps keep the streams' columns in registers (two of four each), the one behind them makes
// the gates for the end of the sublayer, which nobody here waits for. With `later`, `comb` gets what `mhc_comb4` turns into the gates: then
// no block stays for one thread's Sinkhorn.
KERNEL BOUNDS(544)
mhc_read4(const float* partial, const float* base, const float* scale, const float* norm, const float* streams, int d, float rms_eps, float hc_eps,
          int iters, int later, float* x, float* post, float* comb) {
    SHARED float room[16];
    SHARED float parts[16 * 32];
    int r = block_x(), slices = d / SLICE;
    const float* s = streams + (long long)r * 4 * d;
    float4 in[2][4], w[2];
    begin_next();
    UNROLL for (int u = 0; u < 2; u++) {
        int c = 4 * (tid() + u * 512);
        if (tid() < 512 && c < d) w[u] = *(const float4*)(norm + c);
    }
    await_ahead();
    UNROLL for (int u = 0; u < 2; u++) {
        int c = 4 * (tid() + u * 512);
        UNROLL for (int k = 0; k < 4; k++) {
            in[u][k] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (tid() < 512 && c < d) in[u][k] = *(const float4*)(s + (long long)k * d + c);
        }
    }
    float gate = gates4(partial + (long long)r * slices * 25, slices, parts);
    float inv = 1.0f / sqrt_of(shuffle(gate, 24) / (float)(4 * d) + rms_eps);
    if (tid() >= 512) {
        arrive<544>();
        int i = lane_id();
        float own = i < 24 ? gate * inv * scale[i < 8 ? 1 : 2] + base[i] : 0.0f;
        if (i >= 4 && i < 8) post[r * 4 + i - 4] = 2.0f * sigmoid(own);
        if (later) {
            if (i >= 8 && i < 24) comb[(long long)r * 16 + i - 8] = own;
            return;
        }
        float m[16];
        UNROLL for (int k = 0; k < 16; k++) m[k] = shuffle(own, 8 + k);
        if (i == 0) {
            sinkhorn4(m, hc_eps, iters);
            UNROLL for (int k = 0; k < 16; k++) comb[(long long)r * 16 + k] = m[k];
        }
        return;
    }
    int j = lane_id() & 3;
    float mine = sigmoid(shuffle(gate, j) * inv * scale[0] + base[j]) + hc_eps, pre[4], sum = 0.0f;
    UNROLL for (int k = 0; k < 4; k++) pre[k] = shuffle(mine, k);
    float4 v[2];
    UNROLL for (int u = 0; u < 2; u++) {
        v[u].x = fma_of(pre[3], in[u][3].x, fma_of(pre[2], in[u][2].x, fma_of(pre[1], in[u][1].x, pre[0] * in[u][0].x)));
        v[u].y = fma_of(pre[3], in[u][3].y, fma_of(pre[2], in[u][2].y, fma_of(pre[1], in[u][1].y, pre[0] * in[u][0].y)));
        v[u].z = fma_of(pre[3], in[u][3].z, fma_of(pre[2], in[u][2].z, fma_of(pre[1], in[u][1].z, pre[0] * in[u][0].z)));
        v[u].w = fma_of(pre[3], in[u][3].w, fma_of(pre[2], in[u][2].w, fma_of(pre[1], in[u][1].w, pre[0] * in[u][0].w)));
        sum = fma_of(v[u].x, v[u].x, fma_of(v[u].y, v[u].y, fma_of(v[u].z, v[u].z, fma_of(v[u].w, v[u].w, sum))));
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) room[tid() >> 5] = sum;
    meet<544>();
    float total = warp_sum(lane_id() < 16 ? room[lane_id()] : 0.0f);
    inv = 1.0f / sqrt_of(total / (float)d + rms_eps);
    UNROLL for (int u = 0; u < 2; u++) {
        int c = 4 * (tid() + u * 512);
        if (c < d) {
            float4 to = {v[u].x * inv * w[u].x, v[u].y * inv * w[u].y, v[u].z * inv * w[u].z, v[u].w * inv * w[u].w};
            *(float4*)(x + (long long)r * d + c) = to;
        }
    }
}

// The end of `mhc_read4` with `later`: a thread per row.
KERNEL BOUNDS(64) mhc_comb4(float* comb, float hc_eps, int iters, int rows) {
    int r = block_x() * 64 + tid();
    begin_next();
    await_ahead();
    if (r >= rows) return;
    float m[16];
    UNROLL for (int k = 0; k < 16; k++) m[k] = comb[(long long)r * 16 + k];
    sinkhorn4(m, hc_eps, iters);
    UNROLL for (int k = 0; k < 16; k++) comb[(long long)r * 16 + k] = m[k];
}
