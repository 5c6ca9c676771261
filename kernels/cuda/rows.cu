// Ops that treat rows apart: embedding, norms, sums, conversions, and the activation between two products. Neighbours: cuda/ops.rs.
#include "hopper.cuh"
#include "weights.cuh"

// streams[r, n] = table[tokens[r]] for every stream n. A block per row.
KERNEL BOUNDS(256) embed(Matrix table, const int* tokens, int streams, float* out) {
    begin_next();
    await_ahead();
    int r = block_x(), d = table.cols;
    Row row = row_of(table, 0, tokens[r]);
    for (int k = tid() * 8; k < d; k += threads() * 8) {
        float w[8];
        load8_any(table, row, k, w);
        for (int n = 0; n < streams; n++) {
            float* to = out + ((long long)r * streams + n) * d + k;
            UNROLL for (int i = 0; i < 8; i++)
                if (k + i < d) to[i] = w[i];
        }
    }
}

// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight. A block per row.
KERNEL BOUNDS(256) rms_norm(const float* x, int stride, int width, const float* weight, float eps, float* out) {
    SHARED float room[32];
    begin_next();
    await_ahead();
    const float* row = x + (long long)block_x() * stride;
    float* to = out + (long long)block_x() * width;
    float sum = 0.0f;
    for (int i = tid(); i < width; i += threads()) sum = fma_of(row[i], row[i], sum);
    float scale = 1.0f / sqrt_of(block_sum(sum, room) / (float)width + eps);
    for (int i = tid(); i < width; i += threads()) to[i] = row[i] * scale * weight[i];
}

// y += x.
KERNEL BOUNDS(256) add(const float* x, float* y, long long n) {
    begin_next();
    await_ahead();
    long long i = (long long)block_x() * threads() + tid();
    if (i < n) y[i] += x[i];
}

// Rows of the streams that somebody reads, as a kernel parameter.
struct Chosen {
    int rows[256];
};

// out[i] = rms_norm(mean over streams of streams[chosen[i]], norm). A block per chosen row.
KERNEL BOUNDS(256) collapse(Chosen chosen, const float* streams, int n, int d, const float* norm, float eps, float* out) {
    SHARED float room[32];
    begin_next();
    await_ahead();
    const float* s = streams + (long long)chosen.rows[block_x()] * n * d;
    float* to = out + (long long)block_x() * d;
    float sum = 0.0f;
    for (int i = tid(); i < d; i += threads()) {
        float v = 0.0f;
        for (int k = 0; k < n; k++) v += s[k * d + i];
        v /= (float)n;
        to[i] = v;
        sum = fma_of(v, v, sum);
    }
    float scale = 1.0f / sqrt_of(block_sum(sum, room) / (float)d + eps);
    for (int i = tid(); i < d; i += threads()) to[i] = to[i] * scale * norm[i];
}

// Rows of f32 as bf16, padded with zeros to `padded` columns (a multiple of 8), in the order that products with weights of EACH `each` take (mma.cuh).
// Blocks (row, 2048 columns).
KERNEL BOUNDS(256) to_bf16_rows(const float* x, int stride, int cols, int wide, u16* out, int padded, int each) {
    begin_next();
    await_ahead();
    int k = (block_y() * threads() + tid()) * 8;
    if (k >= padded) return;
    float v[8];
    load8_row(x + (long long)block_x() * stride, k, cols, wide, v);
    u32 pairs[4];
    UNROLL for (int i = 0; i < 4; i++) pairs[i] = (u32)to_bf16(v[2 * i]) | (u32)to_bf16(v[2 * i + 1]) << 16;
    uint4 eight = {pairs[0], pairs[1], pairs[2], pairs[3]};
    *(uint4*)(out + (long long)block_x() * padded + place_of_x(k, each)) = eight;
}

// Rows of f32 as a bf16 image of `rows` rows (hopper.cuh) for weights of EACH `each`. A block per row of the image: row p of x, or with an order the one
// of its entry p, number order[p] / divide; none where that is negative.
KERNEL BOUNDS(256) image_rows(const float* x, int stride, int cols, const int* order, int divide, int each, u8* image, int rows, int padded) {
    begin_next();
    await_ahead();
    int p = block_x(), from = order ? order[p] : p;
    if (from < 0) return;
    const float* row = x + (long long)(from / divide) * stride;
    for (int at = tid() * 8; at < padded; at += threads() * 8) {
        int in = at % (4 * each), k = at - in + in / 16 * 4 + (in & 8) / 4; // of the first lane; the others' are `each` apart
        u32 v[4];
        UNROLL for (int q = 0; q < 4; q++) {
            int c = k + q * each;
            v[q] = (u32)(c < cols ? to_bf16(row[c]) : (u16)0) | (u32)(c + 1 < cols ? to_bf16(row[c + 1]) : (u16)0) << 16;
        }
        uint4 piece = {v[0], v[1], v[2], v[3]};
        *(uint4*)(image + image_byte(at, p, rows)) = piece;
    }
}

// hidden[r, i] = swiglu(gate[r, i], up[r, i]), where gate and up are the halves of rows `2 * half` wide; in place over gate.
KERNEL BOUNDS(256) swiglu_rows(float* hidden, int half, float limit) {
    begin_next();
    await_ahead();
    float* row = hidden + (long long)block_x() * 2 * half;
    for (int i = tid(); i < half; i += threads()) row[i] = swiglu(row[i], row[half + i], limit);
}

// Brings the nibbles of 4-bit words from file order (element i in nibble i) to where weights.cuh looks for them.
KERNEL BOUNDS(256) order_nibbles(u32* words, long long n) {
    begin_next();
    await_ahead();
    long long i = (long long)block_x() * threads() + tid();
    if (i < n) words[i] = spread(words[i]);
}

// The same for E4M3.
KERNEL BOUNDS(256) order_e4m3(u32* words, long long n) {
    begin_next();
    await_ahead();
    long long i = (long long)block_x() * threads() + tid();
    if (i < n) words[i] = spread_e4m3(words[i]);
}

// Rows as they were packed -> tiles of 16 as weights.cuh describes them, 8 bytes per thread. `bytes`: of one lane (Span::BYTES).
KERNEL BOUNDS(256) tile_rows(const u8* from, u8* to, int q_row, int bytes, long long words) {
    begin_next();
    await_ahead();
    long long i = (long long)block_x() * threads() + tid();
    if (i >= words) return;
    int row = (int)(i / (q_row >> 3)), at = (int)(i % (q_row >> 3)) * 8, step = at / (4 * bytes), lane = at % (4 * bytes) / bytes;
    int inner = at % bytes, piece = bytes < 16 ? bytes : 16;
    long long place = (long long)(row >> 4) * 16 * q_row + (long long)step * 64 * bytes + (row >> 3 & 1) * 32 * bytes + inner / 16 * 512 +
                      ((row & 7) * 4 + lane) * piece + inner % 16;
    *(u64*)(to + place) = *(const u64*)(from + 8 * i);
}

// Rows of scales as they were packed -> tiles of 16 as weights.cuh describes them, two bytes per thread. `bytes`: of a row's step (Span::SCALES).
KERNEL BOUNDS(256) tile_scales(const u16* from, u8* to, int s_row, int bytes, long long words) {
    begin_next();
    await_ahead();
    long long i = (long long)block_x() * threads() + tid();
    if (i >= words) return;
    int row = (int)(i / (s_row >> 1)), at = (int)(i % (s_row >> 1)) * 2;
    *(u16*)(to + (long long)(row >> 4) * 16 * s_row + at / bytes * 16 * bytes + (row & 15) * bytes + at % bytes) = from[i];
}

// Reads memory as fast as it goes: what other kernels are measured against. `out` is only written where a sum is one that never comes.
KERNEL BOUNDS(512) read_all(const uint4* p, long long n, u32* out) {
    begin_next();
    await_ahead();
    u32 sum = 0;
    long long step = (long long)threads() * 8;
    for (long long i = (long long)block_x() * step; i < n; i += 1056ll * step) {
        uint4 v[8];
        UNROLL for (int k = 0; k < 8; k++) v[k] = load_stream16(p + i + k * threads() + tid());
        UNROLL for (int k = 0; k < 8; k++) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (sum == 0x9e3779b9u) *out = sum;
}
