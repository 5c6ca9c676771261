// Weights on their way to a warp through shared memory, some steps at a time, copied without registers (cp.async): a warp waits for six loads at most one by
// one, but for copies in any number, in order. Elements are read by the lane that copied them; scales by others too. Neighbours: mma.cuh (how steps lie and
// unpack), few.cuh and some.cuh (the products).
#pragma once
#include "ahead.cuh"
#include "mma.cuh"

#if TANDEM_MMA

// Copies of what is read once: L2 gives it up before anything else.
DEVICE u64 once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
template <int BYTES>
DEVICE void copy_once(u32 to, const void* from, u64 policy) {
    if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
    else copy_ahead<BYTES>(to, from);
}
// The lane's number as a register that stays: asking for it takes long.
DEVICE int lane_kept() {
    int lane = lane_id();
    asm volatile("" : "+r"(lane));
    return lane;
}

// A warp's share [first, end) of the steps of one item after another, through a ring of SLOTS chunks of C steps. `row(item, i)`: the matrix row of output
// i; rows 0-7 lie together, and so do 8-15.
//
// A chunk in shared memory: elements `[step][outputs 0-7, 8-15][lane]`, then scales `[outputs 0-7, 8-15][step][output]` where they lie in tiles, of E4M3
// `[output][step]`, of codes `[step][output]`. ROW: bytes of an output's scales of a step.
template <int T, int C, int SLOTS>
struct Stream {
    typedef typename Format<T>::Raw Raw;
    static const int CHUNK = C;
    static const bool TILED = T == T_NVFP4 || T == T_MXFP4 || T == T_Q8_0;
    static const int HALF = 32 * Span<T>::BYTES, ROW = T == T_BF16 ? 0 : is_coded(T) ? 16 : TILED ? Span<T>::SCALES : 4;
    static const int SIDE = C * 2 * HALF, SLOT = SIDE + C * 16 * ROW, SIZE = SLOTS * SLOT;
    static const int PIECES = TILED ? ROW / 2 : 1; // of 16 bytes, of 8 outputs' scales of a step
    const u8 *a, *b, *scales;       // of the lane's next copies
    const u8* ring;
    u64 policy;
    int lane, item, left, k, apart; // of the copies: item, steps of it that are left, first column; E4M3: 7 where neighbouring rows may have scales of their own
    int to, from;                   // slots that are filled and read next, as offsets

    template <class R>
    DEVICE_MEMBER void begin(const u8* room, const Matrix& m, int expert, int start, int items, int by, int first, int end, R row) {
        lane = lane_kept();
        ring = room;
        policy = once();
        item = first < end ? start : items;
        to = from = 0;
        apart = (m.brows | m.row_off) & 7 ? 7 : 0;
        enter(m, expert, items, first, end, row);
        UNROLL_1 for (int i = 0; i < SLOTS - 1; i++) copy(m, expert, items, by, first, end, row);
    }
    // Goes to the start of an item.
    template <class R>
    DEVICE_MEMBER void enter(const Matrix& m, int expert, int items, int first, int end, R row) {
        if (item >= items) return;
        long long on = (long long)first * (64 * Span<T>::BYTES);
        a = elements_of<T>(m, expert, row(item, lane >> 2), lane) + on;
        b = elements_of<T>(m, expert, row(item, (lane >> 2) + 8), lane) + on;
        if (TILED) {
            int half = lane / (C * PIECES) & 1, step = lane / PIECES % C;
            scales = scales_of<T>(m, expert, row(item, 8 * half)) + (first + step) * 16ll * ROW + lane % PIECES * 16;
        }
        if (is_coded(T)) scales = scales_of<T>(m, expert, row(item, lane & 15));
        left = end - first;
        k = first * Format<T>::STEP;
    }
    // Starts the copies of the next chunk, if there is one; items are `by` apart.
    template <class R>
    DEVICE_MEMBER void copy(const Matrix& m, int expert, int items, int by, int first, int end, R row) {
        if (item < items) {
            u32 slot = shared_at(ring) + to, at = slot + lane * Span<T>::PIECE, side = slot + SIDE;
            if (left >= C) {
                UNROLL for (int u = 0; u < C; u++) copy_step(at, u);
            } else {
                UNROLL_1 for (int u = 0; u < left; u++) copy_step(at, u);
            }
            if (TILED && lane < 2 * C * PIECES && lane / PIECES % C < left) copy_ahead<16>(side + lane * 16, scales);
            if constexpr (T == T_E4M3) {
                int half = lane >> 4, u = lane % C;
                UNROLL_1 for (int r = (lane & 15) / C; r <= apart; r += 16 / C) {
                    const u8* s = scales_of<T>(m, expert, row(item, 8 * half + r));
                    copy_ahead<4>(side + ((8 * half + r) * C + u) * 4, s + 4 * ((min_of(k + u * Format<T>::STEP, m.cols - 1) + m.col_off) >> m.bshift));
                }
            }
            if constexpr (is_coded(T)) {
                UNROLL_1 for (int u = 0; u < min_of(left, C); u++)
                    if (lane < 16) {
                        int at = k + u * Format<T>::STEP;
                        u32 there = side + (u * 16 + lane) * 16;
                        copy_ahead<Format<T>::GROUPS>(there, scales + (at >> 4));
                        copy_ahead<4>(there + 8, scales + behind_of(m.cols) + (has_mins(T) ? (at >> 8) * 4 : (at >> 9) * 4));
                    }
            }
            a += C * 64 * Span<T>::BYTES;
            b += C * 64 * Span<T>::BYTES;
            if (TILED) scales += C * 16 * ROW;
            k += C * Format<T>::STEP;
            left -= C;
            if (left <= 0) {
                item += by;
                enter(m, expert, items, first, end, row);
            }
            to = to == (SLOTS - 1) * SLOT ? 0 : to + SLOT;
        }
        copies_end();
    }
    DEVICE_MEMBER void copy_step(u32 at, int u) {
        UNROLL for (int p = 0; p < Span<T>::BYTES / Span<T>::PIECE; p++) {
            copy_once<Span<T>::PIECE>(at + u * 2 * HALF + p * 512, a + u * 64 * Span<T>::BYTES + p * 512, policy);
            copy_once<Span<T>::PIECE>(at + u * 2 * HALF + HALF + p * 512, b + u * 64 * Span<T>::BYTES + p * 512, policy);
        }
    }
    // Waits for the next chunk; what the one before it has left free may be filled then.
    DEVICE_MEMBER void wait() {
        copies_wait<SLOTS - 2>();
        warp_barrier();
    }
    // Step u of the chunk, whose first column is `at`.
    DEVICE_MEMBER void read(int u, int at, Raw* ra, Raw* rb) const {
        take(0, u, at, ra);
        take(1, u, at, rb);
    }
    DEVICE_MEMBER void take(int half, int u, int at, Raw* v) const {
        const u8 *q = ring + from + lane * Span<T>::PIECE + (2 * u + half) * HALF, *side = ring + from + SIDE;
        int g = lane >> 2;
        if constexpr (T == T_BF16) {
            v->a = *(const uint4*)q;
            v->b = *(const uint4*)(q + 512);
        } else if constexpr (T == T_Q8_0) {
            v->q = *(const uint2*)q;
        } else {
            v->q = *(const uint4*)q;
        }
        if constexpr (T == T_E4M3) v->f = *(const float*)(side + ((8 * half + (g & apart)) * C + u) * 4);
        if constexpr (TILED) side += (half * C + u) * 8 * ROW + g * ROW;
        if constexpr (T == T_NVFP4) v->f = *(const u16*)(side + 2 * (lane & 3));
        if constexpr (T == T_MXFP4) v->f = side[lane & 3];
        if constexpr (T == T_Q8_0) v->f = *(const u16*)side;
        if constexpr (is_coded(T)) {
            side += (u * 16 + 8 * half + g) * 16;
            UNROLL for (int i = 0; i < Format<T>::GROUPS / 4; i++) v->s[i] = ((const u32*)side)[i];
            v->d = has_mins(T) ? *(const u32*)(side + 8) : *(const u16*)(side + 8 + (at >> 8 & 1) * 2);
        }
    }
    // The chunk is done.
    DEVICE_MEMBER void pass() { from = from == (SLOTS - 1) * SLOT ? 0 : from + SLOT; }
};

// How weights of type T come beside NT tiles of 8 rows: few rows leave registers for four steps at a time. BF16 has steps of twice the bytes and little to do for
// each, so that they come one by one, more of them ahead. (cuda/few.rs, `rings`.)
template <int T, int NT>
struct StreamFor {
    static const bool LONG = T == T_BF16;
    typedef Stream<T, LONG ? 1 : NT == 1 ? 4 : 2, LONG ? 4 : NT == 1 ? 2 : 3> Of;
};

#endif
