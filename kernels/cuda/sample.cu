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

// A block of 1024 per row. results[i] = (token, logprob, rank, finite); ids and logprobs of the most likely in tops[i * most ...].
KERNEL BOUNDS(1024) judge(const float* logits, int vocab, const Wanted* wanted, float* results, float* tops, int most) {
    SHARED u64 room[32];
    SHARED float sums[32];
    begin_next();
    await_ahead();
    Wanted w = wanted[block_x()];
    const float* row = logits + (long long)w.row * vocab;
    u64 best = 0;
    int bad = 0;
    for (int i = tid(); i < vocab; i += threads()) {
        float v = row[i];
        u64 key = key_of(v, i);
        best = key > best ? key : best;
        bad |= !(v < infinity());
    }
    best = block_best(best, room);
    float finite = block_sum((float)bad, sums) > 0.0f ? 0.0f : 1.0f;
    float top = row[id_of(best)];
    int token = w.forced >= 0 ? w.forced : finite > 0.0f ? id_of(best) : 0;
    float logprob = 0.0f, rank = 0.0f;
    if (w.top >= 0) {
        float mine = row[token], sum = 0.0f, larger = 0.0f;
        for (int i = tid(); i < vocab; i += threads()) {
            float v = row[i];
            sum += exp_of(v - top);
            larger += v > mine ? 1.0f : 0.0f;
        }
        float log_sum = top + log_of(block_sum(sum, sums));
        logprob = mine - log_sum;
        rank = 1.0f + block_sum(larger, sums); // exact: fewer than 2^24 tokens
        u64 below = ~0ull;
        for (int n = 0; n < w.top; n++) {
            u64 next = 0;
            for (int i = tid(); i < vocab; i += threads()) {
                u64 key = key_of(row[i], i);
                if (key < below && key > next) next = key;
            }
            below = block_best(next, room);
            if (tid() == 0) {
                int id = id_of(below);
                tops[2 * ((long long)block_x() * most + n)] = as_float((u32)id);
                tops[2 * ((long long)block_x() * most + n) + 1] = row[id] - log_sum;
            }
        }
    }
    if (tid() == 0) {
        float* to = results + 4 * block_x();
        to[0] = as_float((u32)token);
        to[1] = logprob;
        to[2] = rank;
        to[3] = finite;
    }
}
