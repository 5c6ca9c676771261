// Products of few rows on the matrix units: a block owns 16 outputs at a time, its warps share K. Neighbours: stream.cuh (how weights come), mma.cuh (the order
// of sums), some.cuh (more rows), format.cu (the kernels).
#pragma once
#include "stream.cuh"
#include "tokens.cuh"

#if TANDEM_MMA && WEIGHT >= 2

// Rows of x for this lane: row g of each tile of 8; any row where there is none, whose products nobody takes.
template <int NT>
DEVICE void lane_rows(const Tokens& t, const Tile& tile, const u8* x, int x_stride, const u8** rows) {
    UNROLL for (int j = 0; j < NT; j++) {
        int i = min_of(j * 8 + (lane_id() >> 2), tile.count - 1);
        rows[j] = x + (long long)(entry(t, tile, i) / t.divide) * x_stride * 2 + (lane_id() & 3) * (is_coded(WEIGHT) ? 8 : 16);
    }
}

// Adds the warps' sums in order; `at` numbers (tile of 8 rows, lane, register).
DEVICE float joined(const float* sums, int size, int at) {
    float v = 0.0f;
    UNROLL_4 for (int w = 0; w < threads() >> 5; w++) v += sums[w * size + at];
    return v;
}

// A block's products: `items` groups of 16 outputs, every so many blocks'th of them its own, with one tile of activations. Each warp takes its share of K;
// the weights of its next steps are always on their way, also those of the next item's. `row(item, i)`: the matrix row of output i (stream.cuh);
// `finish(item, tile, sums, late)`: takes what the warps have summed and the factors of the rows.
//
// Where tiles are made by the kernel ahead, that one is awaited first; else only its activations are, once weights are coming.
// Shared memory (cuda/few.rs gives it): the warps' rings, then their sums, twice where NT allows.
template <int NT, class R, class F>
DEVICE void each_item(const Matrix& m, const Tokens& t, const u8* x, int x_stride, int items, R row, F finish) {
    const int SIDES = NT < 8 ? 2 : 1; // of what items share: with two, one may be read while the other is filled
    typedef Format<WEIGHT> W;
    typedef typename StreamFor<WEIGHT, NT>::Of Next;
    extern SHARED ALIGNED u8 room[];
    SHARED float late[SIDES][16];
    int warps = threads() >> 5, warp = tid() >> 5, size = warps * NT * 128;
    float* sums = (float*)(room + warps * Next::SIZE);
    Tile tile;
    begin_next();
    if (t.tiles) await_ahead();
    if (!tile_of(t, NT * 8, block_y(), &tile)) return; // only ever of tiles
    int steps = div_up(m.cols, W::STEP), share = div_up(steps, warps);
    int first = warp * share, end = min_of(steps, first + share), item = block_x(), side = 0;
    Next next;
    next.begin(room + warp * Next::SIZE, m, tile.expert, item, items, blocks_x(), first, end, row);
    if (!t.tiles) await_ahead();
    const u8* rows[NT];
    lane_rows<NT>(t, tile, x, x_stride, rows);
    while (item < items) {
        float acc[NT][4] = {};
        UNROLL_1 for (int s = first; s < end; s += Next::CHUNK) {
            auto step = [&](int u) {
                typename W::Raw a, b;
                int k = (s + u) * W::STEP;
                next.read(u, k, &a, &b);
                step_of<WEIGHT, NT>(m, a, b, RowsOfX{rows, k}, acc);
            };
            next.wait();
            next.copy(m, tile.expert, items, blocks_x(), first, end, row);
            if (s + Next::CHUNK <= end) {
                UNROLL for (int u = 0; u < Next::CHUNK; u++) step(u);
            } else {
                UNROLL_1 for (int u = 0; u < end - s; u++) step(u);
            }
            next.pass();
        }
        UNROLL for (int j = 0; j < NT; j++) {
            float4 four = {acc[j][0], acc[j][1], acc[j][2], acc[j][3]};
            *(float4*)&sums[side * size + warp * NT * 128 + j * 128 + lane_id() * 4] = four;
        }
        for (int i = tid(); i < 16; i += threads()) late[side][i] = late_of<WEIGHT>(m, tile.expert, min_of(row(item, i), m.rows - 1));
        barrier();
        finish(item, tile, sums + side * size, late[side]);
        if (SIDES == 1) barrier();
        side = SIDES - 1 - side;
        item += blocks_x();
    }
}

template <int NT>
DEVICE void linear_tile(const Matrix& m, const Tokens& t, const u8* x, int x_stride, float* out, int out_stride) {
    auto row = [&](int item, int i) { return item * 16 + i; }; // tiles are whole
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
DEVICE void glu_tile(const Matrix& m, const Tokens& t, const u8* x, int x_stride, float limit, u16* hidden, int padded, int each) {
    int half = m.rows >> 1;
    auto row = [&](int item, int i) { return item * 8 + (i & 7) + (i < 8 ? 0 : half); };
    auto finish = [&](int item, const Tile& tile, const float* sums, const float* late) {
        UNROLL_1 for (int n = tid(); n < NT * 64; n += threads()) {
            int o = n & 7, i = n >> 3, h = item * 8 + o; // of the 8 hidden; of the NT*8 activation rows
            int at = (i >> 3) * 128 + (o * 4 + ((i & 7) >> 1)) * 4 + (i & 1);
            if (i < tile.count) {
                u16* to = hidden + (long long)entry(t, tile, i) * padded;
                float gate = joined(sums, NT * 128, at) * late[o], up = joined(sums, NT * 128, at + 2) * late[8 + o];
                if (h < half) to[place_of_x(h, each)] = to_bf16(swiglu(gate, up, limit));
                if (item * 8 + 8 >= half && o == 0)
                    for (int z = half; z < padded; z++) to[place_of_x(z, each)] = 0;
            }
        }
    };
    each_item<NT>(m, t, x, x_stride, div_up(half, 8), row, finish);
}

#endif
