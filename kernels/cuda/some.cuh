// Products of some rows (9 and more, up to where wide.cuh begins or the chip has no other): weights are read once for all of them. A block has one share of
// K, so that it needs its share of the activations alone and keeps it in shared memory; each of its warps takes 16 outputs at a time through the share and
// leaves their sums in memory, where `joined_shares` adds those of all shares in order: the bits are those of few.cuh. Neighbours: stream.cuh (how weights
// come), format.cu (the kernels), cuda/few.rs (how they are cut).
#pragma once
#include "stream.cuh"
#include "tokens.cuh"

#if TANDEM_MMA && WEIGHT >= 2

// The share's activations in shared memory, as lanes read them: `[tile of 8 rows][step][piece of 16 bytes of every lane]`, of codes
// `[step][16 columns][row][lane]`.
struct HeldX {
    const u8* at; // the lane's, of tile 0 and the step
    int tile_bytes;
    DEVICE_MEMBER uint4 piece(int j, int i) const { return *(const uint4*)(at + j * tile_bytes + i * 512); }
    DEVICE_MEMBER uint2 four(int j, int i) const { return *(const uint2*)(at + j * tile_bytes + i * 256); }
};
// Where 16 bytes of a row's step lie there.
template <int T>
DEVICE int place_held(int piece, int g) {
    return is_coded(T) ? piece / 2 * 256 + g * 32 + piece % 2 * 16 : piece / 4 * 512 + g * 64 + piece % 4 * 16;
}

// Sums of items [from, end) of a matrix for rows [8 NT y, ...) of block y and share z of K. `row(item, i)`: the matrix row of output i of an item; `sums`:
// `[y][z][item][tile of 8 rows][lane]` of four sums each, as mma leaves them.
//
// Shared memory (cuda/few.rs gives it): the activations, then the warps' rings.
template <int NT, class R>
DEVICE void some_products(const Matrix& m, int all, const u8* x, int x_stride, int from, int end_item, R row, float4* sums) {
    typedef Format<WEIGHT> W;
    typedef typename StreamFor<WEIGHT, NT>::Of Next;
    const int STEP_BYTES = W::STEP * 16; // of a tile's activations
    extern SHARED ALIGNED u8 room[];
    begin_next();
    int warps = threads() >> 5, shares = (int)gridDim.z, steps = div_up(m.cols, W::STEP), share = div_up(steps, shares);
    int first = min_of(block_z() * share, steps), end = min_of(steps, first + share), mine = end - first;
    int by = blocks_x() * warps, item = from + block_x() * warps + (tid() >> 5);
    Next next;
    next.begin(room + NT * share * STEP_BYTES + (tid() >> 5) * Next::SIZE, m, 0, item, end_item, by, first, end, row);
    await_ahead();
    int row0 = block_y() * NT * 8, count = min_of(NT * 8, all - row0), pieces = mine * (W::STEP / 8);
    for (int i = tid(); i < NT * 8 * pieces; i += threads()) {
        int r = i / pieces, k = i % pieces * 8;
        const u8* at = x + ((long long)(row0 + min_of(r, count - 1)) * x_stride + first * W::STEP + k) * 2;
        copy_ahead<16>(shared_at(room) + (r / 8 * mine + k / W::STEP) * STEP_BYTES + place_held<WEIGHT>(k % W::STEP / 8, r % 8), at);
    }
    copies_end();
    copies_wait<0>();
    barrier();
    const u8* held = room + next.lane * (is_coded(WEIGHT) ? 8 : 16);
    sums += ((long long)block_y() * shares + block_z()) * (end_item - from) * NT * 32 + next.lane;
    for (; item < end_item; item += by) {
        float acc[NT][4] = {};
        UNROLL_1 for (int s = 0; s < mine; s += Next::CHUNK) {
            auto step = [&](int u) {
                typename W::Raw a, b;
                next.read(u, (first + s + u) * W::STEP, &a, &b);
                step_of<WEIGHT, NT>(m, a, b, HeldX{held + (s + u) * STEP_BYTES, mine * STEP_BYTES}, acc);
            };
            next.wait();
            next.copy(m, 0, end_item, by, first, end, row);
            if (s + Next::CHUNK <= mine) {
                UNROLL for (int u = 0; u < Next::CHUNK; u++) step(u);
            } else {
                UNROLL_1 for (int u = 0; u < mine - s; u++) step(u);
            }
            next.pass();
        }
        UNROLL for (int j = 0; j < NT; j++) {
            float4 four = {acc[j][0], acc[j][1], acc[j][2], acc[j][3]};
            sums[((long long)(item - from) * NT + j) * 32] = four;
        }
    }
}

// The shares' sums of this thread's place, added in order: tile of 8 rows tid / 32, item `block_x()` of those that `sums` holds.
DEVICE float4 joined_shares(const float4* sums, int shares) {
    long long each = (long long)blocks_x() * threads();
    const float4* at = sums + (long long)block_y() * shares * each + (long long)block_x() * threads() + tid();
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL_4 for (int s = 0; s < shares; s++) {
        float4 one = at[s * each];
        v.x += one.x; v.y += one.y; v.z += one.z; v.w += one.w;
    }
    return v;
}
// The first of the two rows that the thread's sums are of, and the first of its two outputs in the item.
DEVICE int joined_row() { return block_y() * (threads() >> 2) + (tid() >> 5) * 8 + (lane_id() & 3) * 2; }
DEVICE int joined_output() { return lane_id() >> 2; }

#endif
