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

// The experts of the `topk` (up to 32) largest keys, by one warp that holds KEYS of them per lane: lane n gets the n-th. `sum`: of their scores, in
// that order.
template <int KEYS>
DEVICE int choose(const u32* keys, const float* score, int experts, int topk, float* sum) {
    u32 own[KEYS];
    int mine = 0;
    *sum = 0.0f;
    UNROLL for (int i = 0; i < KEYS; i++) own[i] = lane_id() + 32 * i < experts ? keys[lane_id() + 32 * i] : 0;
    for (int n = 0; n < topk; n++) {
        u32 top = 0;
        UNROLL for (int i = 0; i < KEYS; i++) top = own[i] > top ? own[i] : top;
        top = warp_most(top);
        int at = 0x7fffffff;
        UNROLL for (int i = KEYS - 1; i >= 0; i--) at = own[i] == top ? lane_id() + 32 * i : at;
        at = (int)~warp_most(~(u32)at);
        UNROLL for (int i = 0; i < KEYS; i++) own[i] = lane_id() + 32 * i == at ? 0 : own[i];
        *sum += score[at];
        if (lane_id() == n) mine = at;
    }
    return mine;
}

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
    float by[MAX_EXPERTS / 256], v[MAX_EXPERTS / 256];
    begin_next();
    UNROLL for (int i = 0; i < MAX_EXPERTS / 256; i++) by[i] = tid() + 256 * i < experts ? bias[tid() + 256 * i] : 0.0f;
    await_ahead();
    UNROLL for (int i = 0; i < MAX_EXPERTS / 256; i++) v[i] = tid() + 256 * i < experts ? row[tid() + 256 * i] : 0.0f;
    UNROLL for (int i = 0; i < MAX_EXPERTS / 256; i++) {
        int e = tid() + 256 * i;
        if (e >= experts) break;
        float own = sigmoid(v[i]);
        score[e] = own;
        key[e] = ordered(own + by[i]);
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
    float sum;
    int mine = experts <= 384 ? choose<12>(key, score, experts, topk, &sum) : choose<32>(key, score, experts, topk, &sum);
    if (lane_id() < topk) {
        float w = score[mine];
        ids[r * topk + lane_id()] = mine;
        weights[r * topk + lane_id()] = scale * (norm_topk ? w / (sum + 1e-20f) : w);
    }
}

// One block: sorts the pairs (row, place among its k) that the bank holds by expert into `order` (`places` long), and cuts them into tiles of at
// most `size`. Experts begin at multiples of `align`; places that nobody takes are -1. The order inside of an expert is nobody's business: rows know
// nothing of each other.
KERNEL BOUNDS(1024) group_pairs(const int* ids, int pairs, int first, int held, int size, int align, int places, int* order, int* tiles) {
    SHARED int count[MAX_EXPERTS + 1];
    SHARED int next[MAX_EXPERTS];
    SHARED u32 room[32];
    for (int e = tid(); e <= held; e += threads()) count[e] = 0;
    begin_next();
    await_ahead();
    for (int p = tid(); p < places; p += threads()) order[p] = -1;
    barrier();
    for (int p = tid(); p < pairs; p += threads()) {
        int e = ids[p] - first;
        if (ids[p] >= 0 && e >= 0 && e < held) count_up(&count[e], 1);
    }
    barrier();
    // An expert per thread: its first place and its first tile are sums over the experts before it.
    int n = tid() < held ? count[tid()] : 0, mine = div_up(n, size), all, all_tiles;
    int at = count_before(div_up(n, align) * align, room, &all), tile = count_before(mine, room, &all_tiles);
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
    begin_next();
    await_ahead();
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
