// Rows of logits on the device: the best token or a given one, its log-probability and rank, the most likely tokens. Neighbours: cuda/sample.rs
// (other settings), reference/sample.rs (the meaning).
#include "portable.cuh"

struct Wanted {
    int row;
    int forced; // -1: the best token
    int top;    // how many of the most likely; -1: not even the log-probability
};

// A key above all others: descending logit, then ascending id.
DEVICE u64 key_of(float v, int id) { return ((u64)ordered(v) << 32) | (u32)~(u32)id; }
DEVICE int id_of(u64 key) { return (int)~(u32)key; }

// Largest of the block, for every thread.
DEVICE u64 block_best(u64 v, u64* room) {
    UNROLL for (int m = 16; m > 0; m >>= 1) {
        u64 other = ((u64)shuffle_bits((u32)(v >> 32), lane_id() ^ m) << 32) | shuffle_bits((u32)v, lane_id() ^ m);
        v = other > v ? other : v;
    }
    barrier();
    if (lane_id() == 0) room[tid() >> 5] = v;
    barrier();
    for (int w = 0; w < threads() >> 5; w++) v = room[w] > v ? room[w] : v;
    return v;
}

// One row by BLOCKS blocks of 1024, this one being `rank`. results[i] = (token, logprob, rank, finite); ids and logprobs of the most likely in
// tops[i * most ...]. What blocks of a cluster find is exchanged through `shared`, by turns in one of two places: when a block writes to the one
// again, all have passed the barrier behind the other, and read before it.
template <int BLOCKS>
struct Judge {
    u64* room;
    float* sums;
    u64* shared;
    int turn;

    template <class F>
    DEVICE_MEMBER void exchange(u64 own, F each) {
#if CLUSTERS
        if (BLOCKS > 1) {
            if (tid() == 0) shared[turn] = own;
            cluster_barrier();
            UNROLL for (int i = 0; i < BLOCKS; i++) {
                uint2 v = of_block(shared + turn, i);
                each((u64)v.y << 32 | v.x);
            }
            turn ^= 1;
            return;
        }
#endif
        each(own);
    }
    DEVICE_MEMBER u64 best(u64 own) {
        u64 all = 0;
        exchange(block_best(own, room), [&](u64 v) { all = v > all ? v : all; });
        return all;
    }
    // Both sums at once, in a fixed order.
    DEVICE_MEMBER float2 sum(float x, float y) {
        float2 all = {0.0f, 0.0f};
        x = block_sum(x, sums);
        y = block_sum(y, sums);
        exchange((u64)as_bits(y) << 32 | as_bits(x), [&](u64 v) {
            all.x += as_float((u32)v);
            all.y += as_float((u32)(v >> 32));
        });
        return all;
    }
    DEVICE_MEMBER void run(const float* row, Wanted w, int vocab, int rank, float* result, float* tops) {
        int first = rank * 1024 + tid(), step = BLOCKS * 1024;
        u64 own = 0;
        int bad = 0;
        UNROLL_4 for (int i = first; i < vocab; i += step) {
            float v = row[i];
            u64 key = key_of(v, i);
            own = key > own ? key : own;
            bad |= !(v < infinity());
        }
        u64 top_key = best(own);
        float finite = sum((float)bad, 0.0f).x > 0.0f ? 0.0f : 1.0f, top = row[id_of(top_key)];
        int token = w.forced >= 0 ? w.forced : finite > 0.0f ? id_of(top_key) : 0;
        float logprob = 0.0f, place = 0.0f;
        if (w.top >= 0) {
            float mine = row[token], total = 0.0f, larger = 0.0f;
            UNROLL_4 for (int i = first; i < vocab; i += step) {
                float v = row[i];
                total += exp_of(v - top);
                larger += v > mine ? 1.0f : 0.0f;
            }
            float2 all = sum(total, larger);
            float log_sum = top + log_of(all.x);
            logprob = mine - log_sum;
            place = 1.0f + all.y; // exact: fewer than 2^24 tokens
            u64 below = ~0ull;
            for (int n = 0; n < w.top; n++) {
                u64 next = 0;
                UNROLL_4 for (int i = first; i < vocab; i += step) {
                    u64 key = key_of(row[i], i);
                    if (key < below && key > next) next = key;
                }
                below = best(next);
                if (rank == 0 && tid() == 0) {
                    tops[2 * n] = as_float((u32)id_of(below));
                    tops[2 * n + 1] = row[id_of(below)] - log_sum;
                }
            }
        }
        if (rank == 0 && tid() == 0) {
            result[0] = as_float((u32)token);
            result[1] = logprob;
            result[2] = place;
            result[3] = finite;
        }
    }
};

KERNEL BOUNDS(1024) judge(const float* logits, int vocab, const Wanted* wanted, float* results, float* tops, int most) {
    SHARED u64 room[32];
    SHARED float sums[32];
    begin_next();
    await_ahead();
    Wanted w = wanted[block_x()];
    Judge<1> judge = {room, sums, room, 0};
    judge.run(logits + (long long)w.row * vocab, w, vocab, 0, results + 4 * block_x(), tops + 2 * (long long)block_x() * most);
}

#if CLUSTERS
// By eight blocks a row, where chips have clusters.
KERNEL CLUSTER_8 BOUNDS(1024) judge_8(const float* logits, int vocab, const Wanted* wanted, float* results, float* tops, int most) {
    SHARED u64 room[32];
    SHARED u64 shared[2];
    SHARED float sums[32];
    begin_next();
    await_ahead();
    Wanted w = wanted[block_y()];
    Judge<8> judge = {room, sums, shared, 0};
    judge.run(logits + (long long)w.row * vocab, w, vocab, block_x(), results + 4 * block_y(), tops + 2 * (long long)block_y() * most);
    cluster_barrier(); // nobody leaves while others read what it has found
}
#endif
