// Around the experts' products: choice of experts, grouping of rows, weighted sums. Neighbours: format.cu (the products over tiles).
#include "portable.cuh"

// The place of the largest key (0: none left) of the block, the lowest among equals, for every thread. 256 threads.
DEVICE int best_of(const u32* keys, int n, u32* room) {
    u32 top = 0;
    int at = n;
    for (int i = tid(); i < n; i += threads())
        if (keys[i] > top) {
            top = keys[i];
            at = i;
        }
    for (int m = 16; m > 0; m >>= 1) {
        u32 other = shuffle_bits(top, lane_id() ^ m);
        int where = (int)shuffle_bits((u32)at, lane_id() ^ m);
        if (other > top || (other == top && where < at)) {
            top = other;
            at = where;
        }
    }
    barrier();
    if (lane_id() == 0) {
        room[tid() >> 5] = top;
        room[8 + (tid() >> 5)] = (u32)at;
    }
    barrier();
    for (int w = 0; w < threads() >> 5; w++)
        if (room[w] > top || (room[w] == top && (int)room[8 + w] < at)) {
            top = room[w];
            at = (int)room[8 + w];
        }
    return at;
}

#define MAX_EXPERTS 1024

// A block of 256 per row: sigmoid scores, bias for the choice only, groups by their two best, ties by lowest id.
KERNEL BOUNDS(256)
route(const float* logits, const float* bias, int experts, int topk, int groups, int topk_group, int norm_topk, float scale, int* ids,
      float* weights) {
    SHARED float score[MAX_EXPERTS];
    SHARED u32 key[MAX_EXPERTS];
    SHARED u32 group[MAX_EXPERTS];
    SHARED u32 room[16];
    int r = block_x(), size = experts / groups;
    const float* row = logits + (long long)r * experts;
    for (int e = tid(); e < experts; e += threads()) {
        score[e] = sigmoid(row[e]);
        key[e] = ordered(score[e] + bias[e]);
    }
    barrier();
    if (groups > 1 && topk_group < groups) {
        for (int g = tid(); g < groups; g += threads()) {
            float first = -infinity(), second = -infinity();
            for (int e = g * size; e < (g + 1) * size; e++) {
                float v = score[e] + bias[e];
                v = is_nan(v) ? -infinity() : v;
                if (v > first) {
                    second = first;
                    first = v;
                } else if (v > second) {
                    second = v;
                }
            }
            group[g] = ordered(size < 2 ? first : first + second);
        }
        barrier();
        for (int i = 0; i < topk_group; i++) {
            int g = best_of(group, groups, room);
            barrier();
            if (tid() == 0) group[g] = 0;
            barrier();
        }
        for (int e = tid(); e < experts; e += threads())
            if (group[e / size] != 0) key[e] = ordered(-infinity());
        barrier();
    }
    if (tid() >= 32) return;
    // One warp chooses: each lane keeps the best of its own experts, and looks for the next only when that one is taken.
    float sum = 0.0f;
    u32 top = 0;
    int at = experts;
    bool look = true;
    for (int i = 0; i < topk; i++) {
        if (look) {
            top = 0;
            at = experts;
            for (int e = lane_id(); e < experts; e += 32)
                if (key[e] > top) {
                    top = key[e];
                    at = e;
                }
        }
        u32 best = top;
        int where = at;
        UNROLL for (int m = 16; m > 0; m >>= 1) {
            u32 other = shuffle_bits(best, lane_id() ^ m);
            int there = (int)shuffle_bits((u32)where, lane_id() ^ m);
            if (other > best || (other == best && there < where)) {
                best = other;
                where = there;
            }
        }
        look = where == at && (where & 31) == lane_id();
        if (look) key[where] = 0;
        sum += score[where];
        if (lane_id() == i % 32) ids[r * topk + i] = where;
    }
    warp_barrier();
    for (int i = lane_id(); i < topk; i += 32) {
        float w = score[ids[r * topk + i]];
        weights[r * topk + i] = scale * (norm_topk ? w / (sum + 1e-20f) : w);
    }
}

// One block: sorts the pairs (row, place among its k) that the bank holds by expert into `order`, and cuts them into tiles of at most `size`.
// The order inside of an expert is nobody's business: rows know nothing of each other.
KERNEL BOUNDS(1024) group_pairs(const int* ids, int pairs, int first, int held, int size, int* order, int* tiles) {
    SHARED int count[MAX_EXPERTS + 1];
    SHARED int next[MAX_EXPERTS];
    SHARED u32 room[32];
    for (int e = tid(); e <= held; e += threads()) count[e] = 0;
    barrier();
    for (int p = tid(); p < pairs; p += threads()) {
        int e = ids[p] - first;
        if (ids[p] >= 0 && e >= 0 && e < held) count_up(&count[e], 1);
    }
    barrier();
    // An expert per thread: its first place and its first tile are sums over the experts before it.
    int n = tid() < held ? count[tid()] : 0, mine = div_up(n, size), all, all_tiles;
    int at = count_before(n, room, &all), tile = count_before(mine, room, &all_tiles);
    if (tid() < held) next[tid()] = at;
    for (int i = 0; i < mine; i++) {
        tiles[1 + 3 * (tile + i)] = tid();
        tiles[2 + 3 * (tile + i)] = at + i * size;
        tiles[3 + 3 * (tile + i)] = min_of(size, n - i * size);
    }
    if (tid() == 0) tiles[0] = all_tiles;
    barrier();
    for (int p = tid(); p < pairs; p += threads()) {
        int e = ids[p] - first;
        if (ids[p] >= 0 && e >= 0 && e < held) order[count_up(&next[e], 1)] = p;
    }
}

#define MAX_TOPK 32

// out[r] = sum over the row's held experts, by ascending id, of weight * y[pair]; zeros where it has none. Blocks (row, columns).
KERNEL BOUNDS(256) combine(const int* ids, const float* weights, int k, int first, int held, const float* y, int d, float* out) {
    SHARED int sorted[MAX_TOPK];
    SHARED int count;
    int r = block_x();
    if (tid() == 0) count = 0;
    barrier();
    if (tid() < k) {
        int id = ids[r * k + tid()], e = id - first, rank = 0;
        bool mine = id >= 0 && e >= 0 && e < held;
        for (int j = 0; j < k; j++) {
            int other = ids[r * k + j], o = other - first;
            if (other >= 0 && o >= 0 && o < held && (other < id || (other == id && j < tid()))) rank++;
        }
        if (mine) {
            sorted[rank] = tid();
            count_up(&count, 1);
        }
    }
    barrier();
    int c = block_y() * threads() + tid();
    if (c >= d) return;
    float sum = 0.0f;
    for (int i = 0; i < count; i++) {
        int p = r * k + sorted[i];
        sum = fma_of(weights[p], y[(long long)p * d + c], sum);
    }
    out[(long long)r * d + c] = sum;
}
