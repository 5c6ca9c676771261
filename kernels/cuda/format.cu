// Products with weights of one stored type, compiled once per type (-DWEIGHT=...): scalar for exact f32, on the matrix units for bf16.
// Neighbours: mma.cuh (the order of sums), wide.cuh (many rows on Hopper), experts.cu (grouping of rows), cuda/ops.rs (which kernel when).
#include "tokens.cuh"
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

// Rows of x for this lane: row g of each tile of 8; any row where there is none, whose products nobody takes.
template <int NT>
DEVICE void lane_rows(const Tokens& t, const Tile& tile, const u8* x, int x_stride, const u8** rows) {
    UNROLL for (int j = 0; j < NT; j++) {
        int i = min_of(j * 8 + (lane_id() >> 2), tile.count - 1);
        rows[j] = x + (long long)(entry(t, tile, i) / t.divide) * x_stride * 2;
    }
}

// Adds the warps' sums in order; `at` numbers (tile of 8 rows, lane, register).
DEVICE float joined(const float* sums, int size, int at) {
    float v = 0.0f;
    UNROLL_4 for (int w = 0; w < threads() >> 5; w++) v += sums[w * size + at];
    return v;
}

// A block's products: `items` groups of 16 outputs, every so many blocks'th of them its own, with one tile of activations. Each warp takes its share of K;
// the weights of its next steps are always on their way, also those of the next item's. `row(item, i)`: the matrix row of output i;
// `finish(item, tile, sums, late)`: takes what the warps have summed and the factors of the rows.
//
// Where tiles are made by the kernel ahead, that one is awaited first; else only its activations are, once weights are coming.
template <int NT, class R, class F>
DEVICE void each_item(const Matrix& m, const Tokens& t, const u8* x, int x_stride, int items, R row, F finish) {
    const int SIDES = NT < 8 ? 2 : 1; // of what items share: with two, one may be read while the other is filled
    SHARED ALIGNED float sums[SIDES][8 * NT * 128];
    SHARED float late[SIDES][16];
    typedef Coming<WEIGHT, NT> Next;
    Tile tile;
    begin_next();
    if (t.tiles) await_ahead();
    if (!tile_of(t, NT * 8, block_y(), &tile)) return; // only ever of tiles
    typedef Format<WEIGHT> W;
    int warp = tid() >> 5, g = lane_id() >> 2, steps = div_up(m.cols, W::STEP), share = div_up(steps, threads() >> 5);
    int first = warp * share, end = min_of(steps, first + share), item = block_x(), side = 0, lane_k = (lane_id() & 3) * W::EACH;
    Place a = place_of<WEIGHT>(m, tile.expert, row(item, g)), b = place_of<WEIGHT>(m, tile.expert, row(item, g + 8));
    Next next;
    // The place of a step.
    auto at = [](Place p, int step) {
        p.q += (long long)step * (64 * Span<WEIGHT>::BYTES);
        return p;
    };
    {
        Place pa = at(a, first), pb = at(b, first);
        UNROLL for (int u = 0; u < Next::AHEAD; u++)
            if (first + u < end) next.load(u, m, pa, pb, first * W::STEP + lane_k);
    }
    if (!t.tiles) await_ahead();
    const u8* rows[NT];
    lane_rows<NT>(t, tile, x, x_stride, rows);
    while (item < items) {
        int then = item + blocks_x();
        Place na = a, nb = b;
        if (then < items) {
            na = place_of<WEIGHT>(m, tile.expert, row(then, g));
            nb = place_of<WEIGHT>(m, tile.expert, row(then, g + 8));
        }
        float acc[NT][4] = {};
        UNROLL_1 for (int s = first; s < end; s += Next::AHEAD) {
            bool here = s + Next::AHEAD < end;
            int coming = here ? s + Next::AHEAD : first, left = here || then < items ? end - coming : 0;
            Place pa = at(here ? a : na, coming), pb = at(here ? b : nb, coming);
            UNROLL for (int u = 0; u < Next::AHEAD; u++) {
                if (s + u < end) step_of<WEIGHT, NT>(m, next.a[u], next.b[u], rows, (s + u) * W::STEP + lane_k, acc);
                if (u < left) next.load(u, m, pa, pb, coming * W::STEP + lane_k);
            }
        }
        UNROLL for (int j = 0; j < NT; j++) {
            float4 four = {acc[j][0], acc[j][1], acc[j][2], acc[j][3]};
            *(float4*)&sums[side][warp * NT * 128 + j * 128 + lane_id() * 4] = four;
        }
        if (tid() < 16) late[side][tid()] = late_of<WEIGHT>(m, tile.expert, row(item, tid()));
        barrier();
        finish(item, tile, sums[side], late[side]);
        if (SIDES == 1) barrier();
        side = SIDES - 1 - side;
        item = then;
        a = na;
        b = nb;
    }
}

template <int NT>
DEVICE void linear_tile(const Matrix& m, const Tokens& t, const u8* x, int x_stride, float* out, int out_stride) {
    auto row = [&](int item, int i) { return min_of(item * 16 + i, m.rows - 1); };
    auto finish = [&](int item, const Tile& tile, const float* sums, const float* late) {
        UNROLL_1 for (int at = tid(); at < NT * 128; at += threads()) {
            int lane = (at >> 2) & 31, c = at & 3;
            int o = (lane >> 2) + ((c >> 1) << 3), i = (at >> 7) * 8 + ((lane & 3) << 1) + (c & 1);
            if (item * 16 + o < m.rows && i < tile.count)
                out[(long long)entry(t, tile, i) * out_stride + item * 16 + o] = joined(sums, NT * 128, at) * late[o];
        }
    };
    each_item<NT>(m, t, x, x_stride, div_up(m.rows, 16), row, finish);
}

// hidden[row, h] = swiglu(x[row] . gate[h], x[row] . up[h]) as bf16; gate lies over up: rows h and half + h. An item is 8 of them. Rows of
// hidden are `padded` wide, with zeros behind.
template <int NT>
DEVICE void glu_tile(const Matrix& m, const Tokens& t, const u8* x, int x_stride, float limit, u16* hidden, int padded) {
    int half = m.rows >> 1;
    auto row = [&](int item, int i) { return min_of(item * 8 + (i & 7), half - 1) + (i < 8 ? 0 : half); };
    auto finish = [&](int item, const Tile& tile, const float* sums, const float* late) {
        UNROLL_1 for (int n = tid(); n < NT * 64; n += threads()) {
            int o = n & 7, i = n >> 3, h = item * 8 + o; // of the 8 hidden; of the NT*8 activation rows
            int at = (i >> 3) * 128 + (o * 4 + ((i & 7) >> 1)) * 4 + (i & 1);
            if (i < tile.count) {
                u16* to = hidden + (long long)entry(t, tile, i) * padded;
                float gate = joined(sums, NT * 128, at) * late[o], up = joined(sums, NT * 128, at + 2) * late[8 + o];
                if (h < half) to[h] = to_bf16(swiglu(gate, up, limit));
                if (item * 8 + 8 >= half && o == 0)
                    for (int z = half; z < padded; z++) to[z] = 0;
            }
        }
    };
    each_item<NT>(m, t, x, x_stride, div_up(half, 8), row, finish);
}

// Many rows: a block owns 64 rows of activations and 16 outputs (or 8 hidden) per warp; all of K passes each warp, share by share in the order
// of `joined`, so that the bits are those of the kernels above. Activations go through shared memory, STAGES steps deep. Blocks that run at a
// time mostly share their weights: those of all rows follow each other.
template <bool GLU>
DEVICE void big_tile(const Matrix& m, const Tokens& t, const u8* x, int x_stride, int shares, float* out, int out_stride, float limit, u16* hidden,
                     int padded) {
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
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float acc[8][4] = {}, total[8][4] = {};
    UNROLL for (int i = 0; i < STAGES - 1; i++) fetch(i);
    typename F::Raw a = F::load(m, place_a.q, place_a.s, q * E), b = F::load(m, place_b.q, place_b.s, q * E);
    for (int s = 0; s < steps; s++) {
        typename F::Raw next_a, next_b;
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
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
        u32 pa[E / 2], pb[E / 2];
        F::unpack(a, pa);
        F::unpack(b, pb);
        float fa = F::SPLIT ? F::factor(a) : 1.0f, fb = F::SPLIT ? F::factor(b) : 1.0f;
        UNROLL for (int j = 0; j < 8; j++) {
            u32 px[E / 2];
            const uint4* line = (const uint4*)(&stage[s % STAGES][(j * 8 + g) * LINE + q * E * 2]);
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

// Two blocks at a time where registers allow.
#if WEIGHT == 4 || WEIGHT == 5 || WEIGHT >= 7
#define BIG_BOUNDS BOUNDS(256)
#else
#define BIG_BOUNDS BOUNDS_2(256)
#endif
KERNEL BIG_BOUNDS linear_big(Matrix m, Tokens t, const u8* x, int x_stride, int shares, float* out, int out_stride) {
    big_tile<false>(m, t, x, x_stride, shares, out, out_stride, 0.0f, (u16*)0, 0);
}
KERNEL BIG_BOUNDS glu_big(Matrix m, Tokens t, const u8* x, int x_stride, int shares, float limit, u16* hidden, int padded) {
    big_tile<true>(m, t, x, x_stride, shares, (float*)0, 0, limit, hidden, padded);
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

#define FEW(NT, BLOCKS) \
    KERNEL BLOCKS(256) linear_##NT(Matrix m, Tokens t, const u8* x, int x_stride, float* out, int out_stride) { \
        linear_tile<NT>(m, t, x, x_stride, out, out_stride); \
    } \
    KERNEL BLOCKS(256) glu_##NT(Matrix m, Tokens t, const u8* x, int x_stride, float limit, u16* hidden, int padded) { \
        glu_tile<NT>(m, t, x, x_stride, limit, hidden, padded); \
    }
FEW(1, BOUNDS_2)
FEW(2, BOUNDS_2)
FEW(8, BOUNDS)

#endif
