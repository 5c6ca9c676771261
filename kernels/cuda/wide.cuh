// Products of many rows on Hopper's wgmma, bit for bit those of the kernels for few rows. Neighbours: hopper.cuh (instructions, images), mma.cuh
// (types, the order of sums), format.cu (the kernels).
//
// A block owns 128 outputs (64 hidden values of a gated product) and 128 rows at a time and goes from one such piece of work to the next. Its warps
// 0-7 are two warpgroups of 64 outputs each; warp 8, of the third, brings the rows' chunks, WIDE_STAGES of them ahead. Weights are the A operand,
// from registers: the stored tiles are its fragments as they are mma.sync's, so every type unpacks as there. wgmma m64nNk16 and mma m16n8k16 sum
// alike (kernels/tests/cuda.rs compares the bits), so the same instructions in the same order give the same sums; shares of K are added in warp
// order as `joined` does.
#pragma once
#include "hopper.cuh"
#include "mma.cuh"
#include "tokens.cuh"

// Where the sums go: to rows of `out` in f32, or gated to the hidden image.
struct Outlet {
    float* out;
    long long stride;
    float limit;
    u8* hidden;
    int hidden_rows; // of its image
    int each;        // EACH of the weights that read it
    int padded;      // its columns
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && WEIGHT >= 2 && WEIGHT < 7 // exact floats and codes go other ways

#define WIDE_BOUNDS __launch_bounds__(384, 1)
// Rows of a piece of work (cuda/ops.rs cuts tiles of so many), and groups of outputs that go through all rows before the next ones do.
#define WIDE_ROWS 128
#define WIDE_GROUPS 16
// Chunks that are on their way, and their bytes. Shared memory (cuda/driver.rs gives it): stages from a multiple of 1024 on, a chunk of the hidden
// image, gates.
#define WIDE_STAGES 8
#define WIDE_LINES (WIDE_ROWS * 128)

// What all lanes have, where the compiler must know that they do: wgmma may not be in flight where lanes could part.
DEVICE int one_for_all(int v) { return (int)shuffle_bits((u32)v, 0); }

// A piece of work: rows [row0, row0 + count) of the image, `group` of the outputs.
struct Work {
    int expert, row0, count, group;
};

// Piece `id` of all: tiles of rows times groups of outputs. What runs at a time shares weights and rows in L2; where experts have few rows each, all
// groups go through a tile before the next.
DEVICE bool work_of(const Tokens& t, int groups, int id, Work* w) {
    int tiles = t.tiles ? one_for_all(t.tiles[0]) : div_up(t.rows, WIDE_ROWS);
    if (id >= tiles * groups) return false;
    int together = t.tiles ? groups : WIDE_GROUPS, wide = id / (together * tiles), in = id - wide * together * tiles;
    int width = min_of(together, groups - wide * together);
    w->group = wide * together + in % width;
    Tile tile;
    tile_of(t, WIDE_ROWS, in / width, &tile);
    w->expert = one_for_all(tile.expert);
    w->row0 = one_for_all(tile.first);
    w->count = one_for_all(tile.count);
    return true;
}

// All pieces of this block's. `x`: an image of `x_rows` rows for this type of weights; `shares`: of K, as many as warps share it elsewhere.
template <bool GLU>
DEVICE void wide_products(const Matrix& m, const Tokens& t, const u8* x, int x_rows, int shares, const Outlet& to) {
    typedef Format<WEIGHT> F;
    const int E = F::EACH, STEP = F::STEP, SUMS = WIDE_ROWS / 2; // sums of a thread
    // Steps that go to the matrix units together, and their chunks: where a type's are short, two.
    const int STEPS = !F::SPLIT && STEP == 64 ? 2 : 1, CHUNKS = STEPS * STEP > 64 ? STEPS * STEP / 64 : 1;
    extern SHARED u8 room[];
    u32 stages = (shared_at(room) + 1023) & ~1023u, image = stages + WIDE_STAGES * WIDE_LINES, full = image + WIDE_LINES, empty = full + 8 * WIDE_STAGES;
    int warp = one_for_all(tid() >> 5), lane = lane_id();
    int steps = div_up(m.cols, STEP), share = div_up(steps, shares), chunks = div_up(steps * STEP, 64), half = m.rows >> 1;
    int groups = GLU ? to.padded >> 6 : div_up(m.rows, 128);
    if (tid() == 0) {
        for (int i = 0; i < WIDE_STAGES; i++) {
            gate_open(full + 8 * i, 1);
            gate_open(empty + 8 * i, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    barrier();
    Work w;
    u32 n = 0; // chunks so far
    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        for (int id = block_x(); warp == 8 && work_of(t, groups, id, &w); id += blocks_x()) {
            int bytes = ((w.count + 7) & ~7) * 128;
            const u8* from = x + (long long)w.row0 * 128;
            for (int c = 0; c < chunks; c++, n++) {
                u32 stage = n % WIDE_STAGES;
                gate_wait(empty + 8 * stage, (n / WIDE_STAGES & 1) ^ 1);
                if (lane == 0) {
                    gate_expect(full + 8 * stage, bytes);
                    bring(stages + stage * WIDE_LINES, from, bytes, full + 8 * stage);
                }
                from += (long long)x_rows * 128;
                warp_barrier();
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int g = lane >> 2, q = lane & 3;
        for (int id = block_x(); work_of(t, groups, id, &w); id += blocks_x()) {
            int o, row_a, row_b;
            if (GLU) {
                // The values whose places make up one chunk of the hidden image.
                o = g + (to.each == 32 ? (w.group >> 1) * 128 + (warp >> 1) * 32 + (w.group & 1) * 16 + (warp & 1) * 8 : w.group * 64 + warp * 8);
                row_a = min_of(o, half - 1);
                row_b = half + row_a;
            } else {
                o = w.group * 128 + warp * 16 + g;
                row_a = min_of(o, m.rows - 1);
                row_b = min_of(o + 8, m.rows - 1);
            }
            Place at_a = place_of<WEIGHT>(m, w.expert, row_a), at_b = place_of<WEIGHT>(m, w.expert, row_b);
            auto load = [&](const Place& p, int s) {
                s = min_of(s, steps - 1);
                return F::load(m, p.q + (long long)s * (64 * Span<WEIGHT>::BYTES), p.s, s * STEP + q * E);
            };
            float acc[SUMS], part[F::SPLIT ? SUMS : 1], total[SUMS];
            UNROLL for (int i = 0; i < SUMS; i++) total[i] = 0.0f;
            // Of each warp: steps in the matrix units, and the next ones on their way. While one warpgroup unpacks, the other multiplies.
            typename F::Raw raw_a[STEPS], raw_b[STEPS];
            UNROLL for (int u = 0; u < STEPS; u++) {
                raw_a[u] = load(at_a, u);
                raw_b[u] = load(at_b, u);
            }
            UNROLL_1 for (int s = 0; s < steps;) {
                int end = min_of(s + share, steps), add = 0;
                if (F::SPLIT)
                    UNROLL for (int i = 0; i < SUMS; i++) acc[i] = 0.0f;
                UNROLL_1 while (s < end) {
                    u32 pa[STEPS][E / 2], pb[STEPS][E / 2];
                    float fa = 1.0f, fb = 1.0f;
                    int then = min_of(s + STEPS, end), fresh = STEP < 64 ? s % 2 == 0 : STEPS == 2 ? then - s : CHUNKS;
                    UNROLL for (int u = 0; u < STEPS; u++) {
                        F::unpack(raw_a[u], pa[u]);
                        F::unpack(raw_b[u], pb[u]);
                        if (F::SPLIT) {
                            fa = F::factor(raw_a[u]);
                            fb = F::factor(raw_b[u]);
                        }
                        raw_a[u] = load(at_a, then + u);
                        raw_b[u] = load(at_b, then + u);
                    }
                    UNROLL for (int i = 0; i < CHUNKS; i++)
                        if (i < fresh) gate_wait(full + 8 * ((n + i) % WIDE_STAGES), (n + i) / WIDE_STAGES & 1);
                    float* c = F::SPLIT ? part : acc;
                    wgmma_begin();
                    UNROLL for (int u = 0; u < STEPS; u++) {
                        if (u > 0 && s + u >= then) break;
                        UNROLL for (int i = 0; i < E / 4; i++) {
                            u32 at = stages + (n + (u * STEP + i * 16) / 64) % WIDE_STAGES * WIDE_LINES + (STEP < 64 ? s % 2 * 64 : 0) + i % 4 * 32;
                            wgmma<WIDE_ROWS>(c, pa[u][2 * i], pb[u][2 * i], pa[u][2 * i + 1], pb[u][2 * i + 1], operand(at),
                                             i > 0 || u > 0 || (!F::SPLIT && add));
                        }
                    }
                    wgmma_commit();
                    add = 1;
                    s = then;
                    wgmma_wait<0>();
                    int used = STEP < 64 ? s % 2 == 0 || s == steps : fresh;
                    UNROLL for (int i = 0; i < CHUNKS; i++) gate_arrive(empty + 8 * ((n + i) % WIDE_STAGES), lane == 0 && i < used);
                    n += used;
                    if (F::SPLIT)
                        UNROLL for (int i = 0; i < SUMS; i++) acc[i] = fma_of(i & 2 ? fb : fa, part[i], acc[i]);
                }
                UNROLL for (int i = 0; i < SUMS; i++) total[i] += acc[i];
            }
            float late_a = late_of<WEIGHT>(m, w.expert, row_a), late_b = late_of<WEIGHT>(m, w.expert, row_b);
            if (GLU) {
                if (tid() == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                asm volatile("bar.sync 2, 256;" ::: "memory"); // the image is free
                int in = permuted(o, to.each) & 63;
                UNROLL for (int j = 0; j < WIDE_ROWS / 8; j++)
                    UNROLL for (int c = 0; c < 2; c++) {
                        int row = j * 8 + q * 2 + c;
                        u16 v = o < half ? to_bf16(swiglu(total[4 * j + c] * late_a, total[4 * j + c + 2] * late_b, to.limit)) : (u16)0;
                        asm volatile("st.shared.u16 [%0], %1;" ::"r"(image + (u32)image_byte(in, row, WIDE_ROWS)), "h"(v) : "memory");
                    }
                asm volatile("fence.proxy.async.shared::cta;\nbar.sync 2, 256;" ::: "memory");
                if (tid() == 0) {
                    u8* there = to.hidden + ((long long)w.group * to.hidden_rows + w.row0) * 128;
                    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(there), "r"(image),
                                 "r"(w.count * 128)
                                 : "memory");
                }
            } else {
                UNROLL for (int j = 0; j < WIDE_ROWS / 8; j++)
                    UNROLL for (int c = 0; c < 2; c++) {
                        int row = j * 8 + q * 2 + c;
                        if (row >= w.count) continue;
                        float* line = to.out + (t.order ? t.order[w.row0 + row] : w.row0 + row) * to.stride;
                        if (o < m.rows) line[o] = total[4 * j + c] * late_a;
                        if (o + 8 < m.rows) line[o + 8] = total[4 * j + c + 2] * late_b;
                    }
            }
        }
        if (GLU && tid() == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

#endif
