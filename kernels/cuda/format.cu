// Products with weights of one stored type, compiled once per type (-DWEIGHT=...): scalar for exact f32, on the matrix units for bf16.
// Neighbours: mma.cuh (the order of sums), wide.cuh (many rows on Hopper), experts.cu (grouping of rows), cuda/ops.rs (which kernel when).
#include "few.cuh"
#include "some.cuh"
#include "wide.cuh"

// out[row, o] = x[row] . w[o]: a warp per output, lanes over K, eight rows at a time.
KERNEL BOUNDS(256) linear_any(Matrix m, Tokens t, const float* x, int x_stride, int wide, float* out, int out_stride, int round) {
    Tile tile;
    begin_next();
    await_ahead();
    if (!tile_of(t, 8, block_y(), &tile)) return;
    int o = block_x() * 8 + (tid() >> 5);
    if (o >= m.rows) return;
    Row r = row_of(m, tile.expert, o);
    for (int i0 = 0; i0 < tile.count; i0 += 8) {
        int n = min_of(8, tile.count - i0);
        float acc[8];
        const float* rows[8];
        UNROLL for (int i = 0; i < 8; i++) {
            acc[i] = 0.0f;
            rows[i] = x + (long long)(i < n ? entry(t, tile, i0 + i) / t.divide : 0) * x_stride;
        }
        for (int k = lane_id() * 8; k < m.cols; k += 256) {
            float w[8];
            load8<WEIGHT>(m, r, k, w);
            UNROLL for (int i = 0; i < 8; i++) {
                if (i < n) {
                    float v[8];
                    load8_row(rows[i], k, m.cols, wide, v);
                    UNROLL for (int j = 0; j < 8; j++) acc[i] = fma_of(w[j], round ? round_bf16(v[j]) : v[j], acc[i]);
                }
            }
        }
        UNROLL for (int i = 0; i < 8; i++) {
            float v = warp_sum(acc[i]) * r.late;
            if (i < n && lane_id() == 0) out[(long long)entry(t, tile, i0 + i) * out_stride + o] = v;
        }
    }
}

// The same for matrices of few outputs: the eight warps of a block share one output's K and are added in order.
KERNEL BOUNDS(256) linear_few(Matrix m, Tokens t, const float* x, int x_stride, int wide, float* out, int out_stride, int round) {
    SHARED float sums[8][8];
    Tile tile;
    begin_next();
    if (t.tiles) await_ahead();
    if (!tile_of(t, 8, block_y(), &tile)) return;
    int o = block_x(), warp = tid() >> 5, n = min_of(8, tile.count);
    Row r = row_of(m, tile.expert, o);
    float acc[8];
    const float* rows[8];
    UNROLL for (int i = 0; i < 8; i++) {
        acc[i] = 0.0f;
        rows[i] = x + (long long)(i < n ? entry(t, tile, i) / t.divide : 0) * x_stride;
    }
    // Of up to 4096 columns, all weights are on their way before the activations are there.
    float first[2][8];
    UNROLL for (int u = 0; u < 2; u++)
        if (tid() * 8 + u * 2048 < m.cols) load8<WEIGHT>(m, r, tid() * 8 + u * 2048, first[u]);
    if (!t.tiles) await_ahead();
    auto add = [&](const float* w, int k) {
        UNROLL for (int i = 0; i < 8; i++) {
            if (i < n) {
                float v[8];
                load8_row(rows[i], k, m.cols, wide, v);
                UNROLL for (int j = 0; j < 8; j++) acc[i] = fma_of(w[j], round ? round_bf16(v[j]) : v[j], acc[i]);
            }
        }
    };
    UNROLL for (int u = 0; u < 2; u++)
        if (tid() * 8 + u * 2048 < m.cols) add(first[u], tid() * 8 + u * 2048);
    UNROLL_2 for (int k = tid() * 8 + 4096; k < m.cols; k += 2048) {
        float w[8];
        load8<WEIGHT>(m, r, k, w);
        add(w, k);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        float v = warp_sum(acc[i]);
        if (lane_id() == 0) sums[warp][i] = v;
    }
    barrier();
    if (tid() < n) {
        float v = 0.0f;
        UNROLL for (int w = 0; w < 8; w++) v += sums[w][tid()];
        out[(long long)entry(t, tile, tid()) * out_stride + o] = v * r.late;
    }
}

#if WEIGHT <= 2

// The same of many rows of up to 4096 columns, for types that routers come in: a block keeps eight rows in registers, and the weights of four outputs
// at a time pass by. Each thread has the columns that it has of few rows, and adds them in that order.
KERNEL BOUNDS(256)
linear_few_many(Matrix m, const float* x, int x_stride, int rows, int wide, float* out, int out_stride, int round) {
    SHARED float sums[2][8][32];
    begin_next();
    await_ahead();
    int r0 = block_x() * 8, n = min_of(8, rows - r0), side = 0;
    float v[8][2][8];
    UNROLL for (int i = 0; i < 8; i++)
        UNROLL for (int u = 0; u < 2; u++) {
            int k = tid() * 8 + u * 2048;
            if (k >= m.cols) continue;
            load8_row(x + (long long)(r0 + min_of(i, n - 1)) * x_stride, k, m.cols, wide, v[i][u]);
            if (round) UNROLL for (int e = 0; e < 8; e++) v[i][u][e] = round_bf16(v[i][u][e]);
        }
    for (int o0 = block_y() * 4; o0 < m.rows; o0 += blocks_y() * 4, side ^= 1) {
        float acc[32];
        UNROLL for (int j = 0; j < 4; j++) {
            Row r = row_of(m, 0, min_of(o0 + j, m.rows - 1));
            UNROLL for (int i = 0; i < 8; i++) acc[j * 8 + i] = 0.0f;
            UNROLL for (int u = 0; u < 2; u++) {
                int k = tid() * 8 + u * 2048;
                if (k >= m.cols) continue;
                float w[8];
                load8<WEIGHT>(m, r, k, w);
                UNROLL for (int i = 0; i < 8; i++)
                    UNROLL for (int e = 0; e < 8; e++) acc[j * 8 + i] = fma_of(w[e], v[i][u][e], acc[j * 8 + i]);
            }
        }
        // Lane l has output l / 8 of row l % 8.
        sums[side][tid() >> 5][lane_id()] = sums_of<16>(acc);
        barrier();
        if (tid() >= 32) continue;
        int o = o0 + (tid() >> 3), i = tid() & 7;
        float sum = 0.0f;
        UNROLL for (int w = 0; w < 8; w++) sum += sums[side][w][tid()];
        if (o < m.rows && i < n) out[(long long)(r0 + i) * out_stride + o] = sum * row_of(m, 0, o).late;
    }
}

#endif

#if TANDEM_MMA && WEIGHT >= 2

// Activations of a block's stage (below): the lane's, of tile 0.
struct StagedX {
    const u8* at;
    int line;
    DEVICE_MEMBER uint4 piece(int j, int i) const { return *(const uint4*)(at + j * 8 * line + i * 64); }
};

// Many rows: a block owns 64 rows of activations and 16 outputs (or 8 hidden) per warp; all of K passes each warp, share by share in the order
// of `joined`, so that the bits are those of the kernels above. Activations go through shared memory, STAGES steps deep. Blocks that run at a
// time mostly share their weights: those of all rows follow each other.
template <bool GLU>
DEVICE void big_tile(const Matrix& m, const Tokens& t, const u8* x, int x_stride, int shares, float* out, int out_stride, float limit, u16* hidden,
                     int padded, int each) {
    typedef Format<WEIGHT> F;
    const int E = F::EACH, ROWS = 64, LINE = F::STEP * 2 + 16, PER_LINE = F::STEP / 8; // bytes of a row's step, 16-byte pieces of it
    const int STAGES = F::STEP > 64 ? 2 : 4;
    SHARED ALIGNED u8 stage[STAGES][ROWS * LINE];
    SHARED int from[ROWS], to[ROWS];
    Tile tile;
    begin_next();
    await_ahead();
    int id = block_y() * blocks_x() + block_x(), tiles = (int)gridDim.y, group = id / tiles;
    if (!tile_of(t, ROWS, id % tiles, &tile)) return;
    int warp = tid() >> 5, g = lane_id() >> 2, q = lane_id() & 3, half = m.rows >> 1;
    int o = GLU ? (group * 8 + warp) * 8 + g : (group * 8 + warp) * 16 + g;
    int row_a = min_of(o, GLU ? half - 1 : m.rows - 1), row_b = GLU ? half + min_of(o, half - 1) : min_of(o + 8, m.rows - 1);
    Place place_a = place_of<WEIGHT>(m, tile.expert, row_a), place_b = place_of<WEIGHT>(m, tile.expert, row_b);
    int steps = div_up(m.cols, F::STEP), share = div_up(steps, shares);
    for (int i = tid(); i < ROWS; i += threads()) {
        to[i] = i < tile.count ? entry(t, tile, i) : -1;
        from[i] = i < tile.count ? to[i] / t.divide : -1;
    }
    barrier();
    auto fetch = [&](int s) {
        if (s < steps) {
            for (int i = tid(); i < ROWS * PER_LINE; i += 256) {
                int row = i / PER_LINE, piece = i % PER_LINE, there = from[row] >= 0 ? 16 : 0;
                const u8* src = x + ((long long)max_of(from[row], 0) * x_stride + s * F::STEP + piece * 8) * 2;
                u32 dst = (u32)__cvta_generic_to_shared(&stage[s % STAGES][row * LINE + piece * 16]);
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there) : "memory");
            }
        }
        copies_end();
    };
    float acc[8][4] = {}, total[8][4] = {};
    UNROLL for (int i = 0; i < STAGES - 1; i++) fetch(i);
    typename F::Raw a = F::load(m, place_a.q, place_a.s, q * E), b = F::load(m, place_b.q, place_b.s, q * E);
    for (int s = 0; s < steps; s++) {
        typename F::Raw next_a, next_b;
        copies_wait<STAGES - 2>();
        barrier(); // this step is there for all, and the one before is used up
        fetch(s + STAGES - 1);
        if (s + 1 < steps) {
            long long on = (s + 1ll) * (64 * Span<WEIGHT>::BYTES);
            next_a = F::load(m, place_a.q + on, place_a.s, (s + 1) * F::STEP + q * E);
            next_b = F::load(m, place_b.q + on, place_b.s, (s + 1) * F::STEP + q * E);
        }
#if WEIGHT >= 7 // codes
        auto at = [&](int j, int i) { return *(const uint2*)&stage[s % STAGES][(j * 8 + g) * LINE + (16 * i + 4 * q) * 2]; };
        coded_product<WEIGHT, 8>(m, a, b, at, acc);
#else
        step_product<WEIGHT, 8>(a, b, StagedX{&stage[s % STAGES][g * LINE + q * 16], LINE}, acc);
#endif
        if ((s + 1) % share == 0 || s + 1 == steps) {
            UNROLL for (int j = 0; j < 8; j++)
                UNROLL for (int c = 0; c < 4; c++) {
                    total[j][c] += acc[j][c];
                    acc[j][c] = 0.0f;
                }
        }
        a = next_a;
        b = next_b;
    }
    float late_a = late_of<WEIGHT>(m, tile.expert, row_a), late_b = late_of<WEIGHT>(m, tile.expert, row_b);
    UNROLL for (int j = 0; j < 8; j++)
        UNROLL for (int c = 0; c < 2; c++) {
            int row = to[j * 8 + q * 2 + c];
            if (row < 0) continue;
            if (GLU) {
                u16* line = hidden + (long long)row * padded;
                if (o < half) line[place_of_x(o, each)] = to_bf16(swiglu(total[j][c] * late_a, total[j][c + 2] * late_b, limit));
                if (o == half - 1)
                    for (int h = half; h < padded; h++) line[place_of_x(h, each)] = 0;
            } else {
                float* line = out + (long long)row * out_stride;
                if (o < m.rows) line[o] = total[j][c] * late_a;
                if (o + 8 < m.rows) line[o + 8] = total[j][c + 2] * late_b;
            }
        }
}

// Two blocks at a time where registers allow.
#if WEIGHT == 4 || WEIGHT == 5 || WEIGHT >= 7
#define BIG_BOUNDS BOUNDS(256)
#else
#define BIG_BOUNDS BOUNDS_2(256)
#endif
KERNEL BIG_BOUNDS linear_big(Matrix m, Tokens t, const u8* x, int x_stride, int shares, float* out, int out_stride) {
    big_tile<false>(m, t, x, x_stride, shares, out, out_stride, 0.0f, (u16*)0, 0, 0);
}
KERNEL BIG_BOUNDS glu_big(Matrix m, Tokens t, const u8* x, int x_stride, int shares, float limit, u16* hidden, int padded, int each) {
    big_tile<true>(m, t, x, x_stride, shares, (float*)0, 0, limit, hidden, padded, each);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && WEIGHT < 7 // codes have none
KERNEL WIDE_BOUNDS linear_wide(Matrix m, Tokens t, const u8* x, int x_rows, int shares, Outlet to) {
    begin_next();
    await_ahead();
    wide_products<false>(m, t, x, x_rows, shares, to);
}
KERNEL WIDE_BOUNDS glu_wide(Matrix m, Tokens t, const u8* x, int x_rows, int shares, Outlet to) {
    begin_next();
    await_ahead();
    wide_products<true>(m, t, x, x_rows, shares, to);
}
#endif

#define SOME(NT, BLOCKS) \
    KERNEL BLOCKS(256) linear_some_##NT(Matrix m, int rows, const u8* x, int x_stride, int from, int end, float4* sums) { \
        auto row = [&](int item, int i) { return item * 16 + i; }; \
        some_products<NT>(m, rows, x, x_stride, from, end, row, sums); \
    } \
    KERNEL BLOCKS(256) glu_some_##NT(Matrix m, int rows, const u8* x, int x_stride, int from, int end, float4* sums) { \
        auto row = [&](int item, int i) { return item * 8 + (i & 7) + (i < 8 ? 0 : m.rows >> 1); }; \
        some_products<NT>(m, rows, x, x_stride, from, end, row, sums); \
    }
SOME(2, BOUNDS_2)
SOME(4, BOUNDS_2)
SOME(8, BOUNDS)

// What `linear_some_*` left becomes outputs. Blocks (item, rows' tile), 32 threads per 8 rows.
KERNEL BOUNDS(256) linear_join(Matrix m, int rows, int from, int shares, const float4* sums, float* out, int out_stride) {
    begin_next();
    await_ahead();
    float4 v = joined_shares(sums, shares);
    int r = joined_row(), o = (from + block_x()) * 16 + joined_output();
    float late_a = late_of<WEIGHT>(m, 0, min_of(o, m.rows - 1)), late_b = late_of<WEIGHT>(m, 0, min_of(o + 8, m.rows - 1));
    float* line = out + (long long)r * out_stride + o;
    if (r < rows && o < m.rows) line[0] = v.x * late_a;
    if (r < rows && o + 8 < m.rows) line[8] = v.z * late_b;
    line += out_stride;
    if (r + 1 < rows && o < m.rows) line[0] = v.y * late_a;
    if (r + 1 < rows && o + 8 < m.rows) line[8] = v.w * late_b;
}
// The same of `glu_some_*`, as `glu_tile` makes hidden rows.
KERNEL BOUNDS(256)
glu_join(Matrix m, int rows, int from, int shares, const float4* sums, float limit, u16* hidden, int padded, int each) {
    begin_next();
    await_ahead();
    float4 v = joined_shares(sums, shares);
    int half = m.rows >> 1, r = joined_row(), h = (from + block_x()) * 8 + joined_output();
    float gate = late_of<WEIGHT>(m, 0, h), up = late_of<WEIGHT>(m, 0, half + h);
    float values[2] = {swiglu(v.x * gate, v.z * up, limit), swiglu(v.y * gate, v.w * up, limit)};
    UNROLL for (int i = 0; i < 2; i++) {
        if (r + i >= rows) continue;
        u16* to = hidden + (long long)(r + i) * padded;
        to[place_of_x(h, each)] = to_bf16(values[i]);
        if (h == half - 1)
            for (int z = half; z < padded; z++) to[place_of_x(z, each)] = 0;
    }
}

#define FEW(NT, BLOCKS) \
    KERNEL BLOCKS(256) linear_##NT(Matrix m, Tokens t, const u8* x, int x_stride, float* out, int out_stride) { \
        linear_tile<NT>(m, t, x, x_stride, out, out_stride); \
    } \
    KERNEL BLOCKS(256) glu_##NT(Matrix m, Tokens t, const u8* x, int x_stride, float limit, u16* hidden, int padded, int each) { \
        glu_tile<NT>(m, t, x, x_stride, limit, hidden, padded, each); \
    }
FEW(1, BOUNDS_2)
FEW(8, BOUNDS)

#endif
