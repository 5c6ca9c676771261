// Products with weights of one stored type, compiled once per type (-DWEIGHT=...): scalar for exact f32, on the matrix units for bf16.
// Neighbours: mma.cuh (the order of sums), experts.cu (grouping of rows), cuda/ops.rs (which kernel when).
#include "mma.cuh"

// Which rows of activations go through which matrix. Without tiles, tile y is rows [y*8*NT, ...) through the one matrix; with them, tile y
// is `tiles[1 + 3*y ...] = (expert, first, count)` over `order`, whose entries number outputs; the input row is entry / divide.
struct Tokens {
    const int* tiles;
    const int* order;
    int divide;
    int rows;
};

struct Tile {
    int expert, first, count;
};

DEVICE bool tile_of(const Tokens& t, int size, Tile* out) {
    int y = block_y();
    if (t.tiles) {
        if (y >= t.tiles[0]) return false;
        out->expert = t.tiles[1 + 3 * y];
        out->first = t.tiles[2 + 3 * y];
        out->count = t.tiles[3 + 3 * y];
        return true;
    }
    out->expert = 0;
    out->first = y * size;
    out->count = min_of(size, t.rows - y * size);
    return out->count > 0;
}
DEVICE int entry(const Tokens& t, const Tile& tile, int i) { return t.order ? t.order[tile.first + i] : tile.first + i; }

// out[row, o] = x[row] . w[o]: a warp per output, lanes over K, eight rows at a time.
KERNEL BOUNDS(256) linear_any(Matrix m, Tokens t, const float* x, int x_stride, int wide, float* out, int out_stride, int round) {
    Tile tile;
    if (!tile_of(t, 8, &tile)) return;
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
    if (!tile_of(t, 8, &tile)) return;
    int o = block_x(), warp = tid() >> 5, n = min_of(8, tile.count);
    Row r = row_of(m, tile.expert, o);
    float acc[8];
    const float* rows[8];
    UNROLL for (int i = 0; i < 8; i++) {
        acc[i] = 0.0f;
        rows[i] = x + (long long)(i < n ? entry(t, tile, i) / t.divide : 0) * x_stride;
    }
    UNROLL_2 for (int k = tid() * 8; k < m.cols; k += 2048) {
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

#if TANDEM_MMA && WEIGHT >= 2

// Rows of x for this lane: row g of each tile of 8.
template <int NT>
DEVICE void lane_rows(const Tokens& t, const Tile& tile, const u8* x, int x_stride, int i0, const u8** rows) {
    UNROLL for (int j = 0; j < NT; j++) {
        int i = i0 + j * 8 + (lane_id() >> 2);
        rows[j] = i < tile.count ? x + (long long)(entry(t, tile, i) / t.divide) * x_stride * 2 : (const u8*)0;
    }
}

// Adds the warps' sums in order; `at` numbers (tile of 8 rows, lane, register).
DEVICE float joined(const float* sums, int size, int at) {
    float v = 0.0f;
    for (int w = 0; w < threads() >> 5; w++) v += sums[w * size + at];
    return v;
}

template <int NT>
DEVICE void linear_tile(const Matrix& m, const Tokens& t, const u8* x, int x_stride, float* out, int out_stride) {
    SHARED float sums[8 * NT * 128];
    SHARED float late[16]; // factors of the tile's rows
    Tile tile;
    if (!tile_of(t, NT * 8, &tile)) return;
    int o0 = block_x() * 16, warp = tid() >> 5, g = lane_id() >> 2;
    Row ra = row_of(m, tile.expert, min_of(o0 + g, m.rows - 1)), rb = row_of(m, tile.expert, min_of(o0 + g + 8, m.rows - 1));
    if (tid() < 32 && (lane_id() & 3) == 0) {
        late[g] = ra.late * Format<WEIGHT>::LATE;
        late[8 + g] = rb.late * Format<WEIGHT>::LATE;
    }
    int steps = div_up(m.cols, Format<WEIGHT>::STEP), share = div_up(steps, threads() >> 5);
    for (int i0 = 0; i0 < tile.count; i0 += NT * 8) {
        const u8* rows[NT];
        lane_rows<NT>(t, tile, x, x_stride, i0, rows);
        float acc[NT][4] = {};
        product<WEIGHT, NT>(m, ra, rb, rows, warp * share, min_of(steps, (warp + 1) * share), acc);
        UNROLL for (int j = 0; j < NT; j++)
            UNROLL for (int c = 0; c < 4; c++) sums[warp * NT * 128 + j * 128 + lane_id() * 4 + c] = acc[j][c];
        barrier();
        for (int at = tid(); at < NT * 128; at += threads()) {
            int lane = (at >> 2) & 31, c = at & 3;
            int o = o0 + (lane >> 2) + ((c >> 1) << 3), i = i0 + (at >> 7) * 8 + ((lane & 3) << 1) + (c & 1);
            if (o < m.rows && i < tile.count) out[(long long)entry(t, tile, i) * out_stride + o] = joined(sums, NT * 128, at) * late[o - o0];
        }
        barrier();
    }
}

// hidden[row, h] = swiglu(x[row] . gate[h], x[row] . up[h]) as bf16; gate lies over up: rows h and half + h. A block owns 8 of them. Rows of
// hidden are `padded` wide, with zeros behind.
template <int NT>
DEVICE void glu_tile(const Matrix& m, const Tokens& t, const u8* x, int x_stride, float limit, u16* hidden, int padded) {
    SHARED float sums[8 * NT * 128];
    SHARED float late[16]; // factors of the tile's rows
    Tile tile;
    if (!tile_of(t, NT * 8, &tile)) return;
    int half = m.rows >> 1, h0 = block_x() * 8, warp = tid() >> 5, g = lane_id() >> 2, h = min_of(h0 + g, half - 1);
    Row ra = row_of(m, tile.expert, h), rb = row_of(m, tile.expert, half + h);
    if (tid() < 32 && (lane_id() & 3) == 0) {
        late[g] = ra.late * Format<WEIGHT>::LATE;
        late[8 + g] = rb.late * Format<WEIGHT>::LATE;
    }
    int steps = div_up(m.cols, Format<WEIGHT>::STEP), share = div_up(steps, threads() >> 5);
    for (int i0 = 0; i0 < tile.count; i0 += NT * 8) {
        const u8* rows[NT];
        lane_rows<NT>(t, tile, x, x_stride, i0, rows);
        float acc[NT][4] = {};
        product<WEIGHT, NT>(m, ra, rb, rows, warp * share, min_of(steps, (warp + 1) * share), acc);
        UNROLL for (int j = 0; j < NT; j++)
            UNROLL for (int c = 0; c < 4; c++) sums[warp * NT * 128 + j * 128 + lane_id() * 4 + c] = acc[j][c];
        barrier();
        for (int n = tid(); n < NT * 64; n += threads()) {
            int row = n & 7, col = n >> 3; // of the 8 hidden; of the NT*8 activation rows
            int at = (col >> 3) * 128 + (row * 4 + ((col & 7) >> 1)) * 4 + (col & 1), i = i0 + col;
            if (i < tile.count) {
                u16* to = hidden + (long long)entry(t, tile, i) * padded;
                float gate = joined(sums, NT * 128, at) * late[row], up = joined(sums, NT * 128, at + 2) * late[8 + row];
                if (h0 + row < half) to[h0 + row] = to_bf16(swiglu(gate, up, limit));
                if (h0 + 8 >= half && row == 0)
                    for (int h = half; h < padded; h++) to[h] = 0;
            }
        }
        barrier();
    }
}

// Many rows: a block owns 64 rows of activations and 16 outputs (or 8 hidden) per warp; all of K passes each warp, share by share in the order
// of `joined`, so that the bits are those of the kernels above. Activations go through shared memory, two steps deep.
template <bool GLU>
DEVICE void big_tile(const Matrix& m, const Tokens& t, const u8* x, int x_stride, int shares, float* out, int out_stride, float limit, u16* hidden,
                     int padded) {
    typedef Format<WEIGHT> F;
    const int E = F::EACH, ROWS = 64, LINE = F::STEP * 2 + 16, PER_LINE = F::STEP / 8; // bytes of a row's step, 16-byte pieces of it
    SHARED ALIGNED u8 stage[2][ROWS * LINE];
    SHARED int from[ROWS], to[ROWS];
    Tile tile;
    if (!tile_of(t, ROWS, &tile)) return;
    int warp = tid() >> 5, g = lane_id() >> 2, q = lane_id() & 3, half = m.rows >> 1;
    int o = GLU ? (block_x() * 8 + warp) * 8 + g : (block_x() * 8 + warp) * 16 + g;
    Row ra = row_of(m, tile.expert, min_of(o, GLU ? half - 1 : m.rows - 1));
    Row rb = row_of(m, tile.expert, GLU ? half + min_of(o, half - 1) : min_of(o + 8, m.rows - 1));
    int steps = div_up(m.cols, F::STEP), share = div_up(steps, shares);
    for (int i = tid(); i < ROWS; i += threads()) {
        to[i] = i < tile.count ? entry(t, tile, i) : -1;
        from[i] = i < tile.count ? to[i] / t.divide : -1;
    }
    barrier();
    auto fetch = [&](int s) {
        for (int i = tid(); i < ROWS * PER_LINE; i += 256) {
            int row = i / PER_LINE, piece = i % PER_LINE, there = from[row] >= 0 ? 16 : 0;
            const u8* src = x + ((long long)max_of(from[row], 0) * x_stride + s * F::STEP + piece * 8) * 2;
            u32 dst = (u32)__cvta_generic_to_shared(&stage[s & 1][row * LINE + piece * 16]);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float acc[8][4] = {}, total[8][4] = {};
    fetch(0);
    typename F::Raw a = F::load(m, ra, q * E), b = F::load(m, rb, q * E);
    for (int s = 0; s < steps; s++) {
        typename F::Raw next_a, next_b;
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        barrier();
        if (s + 1 < steps) {
            fetch(s + 1);
            next_a = F::load(m, ra, (s + 1) * F::STEP + q * E);
            next_b = F::load(m, rb, (s + 1) * F::STEP + q * E);
        }
        u32 pa[E / 2], pb[E / 2];
        F::unpack(a, pa);
        F::unpack(b, pb);
        float fa = F::SPLIT ? F::factor(a) : 1.0f, fb = F::SPLIT ? F::factor(b) : 1.0f;
        UNROLL for (int j = 0; j < 8; j++) {
            u32 px[E / 2];
            const uint4* line = (const uint4*)(&stage[s & 1][(j * 8 + g) * LINE + q * E * 2]);
            UNROLL for (int i = 0; i < E / 8; i++) {
                uint4 v = line[i];
                px[4 * i] = v.x; px[4 * i + 1] = v.y; px[4 * i + 2] = v.z; px[4 * i + 3] = v.w;
            }
            float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            float* c = F::SPLIT ? part : acc[j];
            UNROLL for (int i = 0; i < E / 4; i++) {
                u32 frag[4] = {pa[2 * i], pb[2 * i], pa[2 * i + 1], pb[2 * i + 1]};
                mma(c, frag, px[2 * i], px[2 * i + 1]);
            }
            if (F::SPLIT) {
                acc[j][0] = fma_of(fa, part[0], acc[j][0]);
                acc[j][1] = fma_of(fa, part[1], acc[j][1]);
                acc[j][2] = fma_of(fb, part[2], acc[j][2]);
                acc[j][3] = fma_of(fb, part[3], acc[j][3]);
            }
        }
        if ((s + 1) % share == 0 || s + 1 == steps) {
            UNROLL for (int j = 0; j < 8; j++)
                UNROLL for (int c = 0; c < 4; c++) {
                    total[j][c] += acc[j][c];
                    acc[j][c] = 0.0f;
                }
        }
        a = next_a;
        b = next_b;
        barrier();
    }
    float late_a = ra.late * F::LATE, late_b = rb.late * F::LATE;
    UNROLL for (int j = 0; j < 8; j++)
        UNROLL for (int c = 0; c < 2; c++) {
            int row = to[j * 8 + q * 2 + c];
            if (row < 0) continue;
            if (GLU) {
                u16* line = hidden + (long long)row * padded;
                if (o < half) line[o] = to_bf16(swiglu(total[j][c] * late_a, total[j][c + 2] * late_b, limit));
                if (o == half - 1)
                    for (int h = half; h < padded; h++) line[h] = 0;
            } else {
                float* line = out + (long long)row * out_stride;
                if (o < m.rows) line[o] = total[j][c] * late_a;
                if (o + 8 < m.rows) line[o + 8] = total[j][c + 2] * late_b;
            }
        }
}

KERNEL BOUNDS(256) linear_big(Matrix m, Tokens t, const u8* x, int x_stride, int shares, float* out, int out_stride) {
    big_tile<false>(m, t, x, x_stride, shares, out, out_stride, 0.0f, (u16*)0, 0);
}
KERNEL BOUNDS(256) glu_big(Matrix m, Tokens t, const u8* x, int x_stride, int shares, float limit, u16* hidden, int padded) {
    big_tile<true>(m, t, x, x_stride, shares, (float*)0, 0, limit, hidden, padded);
}

// More blocks at a time beat more loads ahead in each (measured on H200).
#if WEIGHT == 2
#define MANY_BLOCKS BOUNDS_3
#else
#define MANY_BLOCKS BOUNDS_4
#endif
#define FEW(NT, BLOCKS) \
    KERNEL BLOCKS(256) linear_##NT(Matrix m, Tokens t, const u8* x, int x_stride, float* out, int out_stride) { \
        linear_tile<NT>(m, t, x, x_stride, out, out_stride); \
    } \
    KERNEL BLOCKS(256) glu_##NT(Matrix m, Tokens t, const u8* x, int x_stride, float limit, u16* hidden, int padded) { \
        glu_tile<NT>(m, t, x, x_stride, limit, hidden, padded); \
    }
FEW(1, MANY_BLOCKS)
FEW(2, BOUNDS)
FEW(8, BOUNDS)

#endif
