// The indexer of sparse attention: pooled keys, scores of pools, the choice of positions. All in f32. Neighbours: cuda/ops.rs; the formulas
// are reference/indexer.rs.
#include "step.cuh"

struct Indexer {
    int heads, dim, kpool, topk, tail;
};

// Columns of the fused projection.
struct Columns {
    const float* proj;
    int stride, key, gate;
};

// The normed key of a row, one channel per thread and step; `room` holds a float per warp.
DEVICE void normed_key(const float* raw, int dim, const float* weight, const float* bias, float* to, float* room) {
    float sum = 0.0f;
    for (int i = tid(); i < dim; i += threads()) sum += raw[i];
    float mean = block_sum(sum, room) / (float)dim;
    sum = 0.0f;
    for (int i = tid(); i < dim; i += threads()) sum = fma_of(raw[i] - mean, raw[i] - mean, sum);
    float scale = 1.0f / sqrt_of(block_sum(sum, room) / (float)dim + 1e-6f);
    for (int i = tid(); i < dim; i += threads()) to[i] = (raw[i] - mean) * scale * weight[i] + bias[i];
}

// Keeps the key and the gate of a row in its sequence's tail `[kpool][2][dim]`.
DEVICE void keep(const Columns& c, int r, int pos, const Indexer& p, const float* weight, const float* bias, float* tail, float* room) {
    float* to = tail + pos % p.kpool * 2 * p.dim;
    const float* row = c.proj + (long long)r * c.stride;
    normed_key(row + c.key, p.dim, weight, bias, to, room);
    for (int i = tid(); i < p.dim; i += threads()) to[p.dim + i] = row[c.gate + i];
}

#define MAX_POOL 16
#define MAX_DIM 256

// A block per row: writes the pooled key of the pool that the row completes, from the step's rows and, before them, the tail. A row that
// is its sequence's only one of the step and completes nothing goes to the tail.
KERNEL BOUNDS(128)
index_pool(Step b, Columns c, Indexer p, const float* weight, const float* bias, const float* ape, float* tails, float* pooled, int page_tokens,
           int layers, int layer) {
    SHARED float keys[MAX_POOL * MAX_DIM];
    SHARED float room[32];
    int r = block_x();
    Segment s = b.segments[b.row_segment[r]];
    int pos = s.pos0 + r - s.row0;
    float* tail = tails + ((long long)s.slot * layers + layer) * p.kpool * 2 * p.dim;
    if (pos % p.kpool != p.kpool - 1) {
        if (s.rows == 1) keep(c, r, pos, p, weight, bias, tail, room);
        return;
    }
    for (int t = 0; t < p.kpool; t++) {
        int at = pos - (p.kpool - 1) + t;
        float* to = keys + t * p.dim;
        if (at >= s.pos0) normed_key(c.proj + (long long)(r - (pos - at)) * c.stride + c.key, p.dim, weight, bias, to, room);
        else
            for (int i = tid(); i < p.dim; i += threads()) to[i] = tail[t * 2 * p.dim + i];
    }
    // A channel is the same thread's everywhere: no barrier between making keys and using them.
    float* to = pooled + place_in(b, s, pos, page_tokens, layers, layer) / p.kpool * p.dim;
    for (int i = tid(); i < p.dim; i += threads()) {
        float logit[MAX_POOL], top = -infinity(), total = 0.0f, sum = 0.0f;
        for (int t = 0; t < p.kpool; t++) {
            int at = pos - (p.kpool - 1) + t;
            float gate = at >= s.pos0 ? c.proj[(long long)(r - (pos - at)) * c.stride + c.gate + i] : tail[(t * 2 + 1) * p.dim + i];
            logit[t] = gate + ape[t * p.dim + i];
            top = at_least(top, logit[t]);
        }
        for (int t = 0; t < p.kpool; t++) {
            logit[t] = exp_of(logit[t] - top);
            total += logit[t];
        }
        for (int t = 0; t < p.kpool; t++) sum = fma_of(logit[t] / total, keys[t * p.dim + i], sum);
        to[i] = sum;
    }
}

// A block per segment of several rows: the rows behind the last complete pool go to the tail. After `index_pool`, which reads the old one.
KERNEL BOUNDS(128)
index_tail(Step b, Columns c, Indexer p, const float* weight, const float* bias, float* tails, int layers, int layer) {
    SHARED float room[32];
    Segment s = b.segments[block_x()];
    if (s.rows == 1) return;
    float* tail = tails + ((long long)s.slot * layers + layer) * p.kpool * 2 * p.dim;
    int end = s.pos0 + s.rows, from = max_of(end / p.kpool * p.kpool, s.pos0);
    for (int pos = from; pos < end; pos++) keep(c, s.row0 + pos - s.pos0, pos, p, weight, bias, tail, room);
}

#define POOLS 64 // of one block of `index_score`

// scores[row, pool] = sum over heads of w[h] heads^-1/2 relu(iq[h] . pk dim^-1/2). Blocks (64 pools, row); 4 threads share a pool.
KERNEL BOUNDS(256)
index_score(Step b, Indexer p, const float* iq, const float* weights, int w_stride, const float* pooled, int page_tokens, int layers, int layer,
            int row0, float* scores, int s_stride) {
    extern SHARED float shared[];
    SHARED float part[4][POOLS];
    int r = row0 + block_y(), first = block_x() * POOLS, wide = (p.dim + 3) / 4 * 4, stride = wide + 4;
    Segment s = b.segments[b.row_segment[r]];
    int visible = s.pos0 + r - s.row0 + 1, pools = visible / p.kpool;
    if (first >= pools || visible <= p.topk + (p.tail ? p.kpool - 1 : 0)) return;
    float* q = shared;                   // [heads][wide]
    float* keys = q + p.heads * wide;    // [POOLS][stride]
    SHARED long long from[POOLS];
    if (tid() < POOLS) {
        int pool = first + tid();
        from[tid()] = pool < pools ? place_in(b, s, pool * p.kpool, page_tokens, layers, layer) / p.kpool * p.dim : -1;
    }
    barrier();
    if (p.dim == 128) {
        const float4* asked = (const float4*)(iq + (long long)r * p.heads * 128);
        for (int i = tid(); i < p.heads * 32; i += threads()) ((float4*)q)[i] = asked[i];
        UNROLL for (int i = 0; i < POOLS * 32 / 256; i++) {
            int at = i * 256 + tid(), pool = at >> 5, k = at & 31;
            float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
            if (from[pool] >= 0) v = ((const float4*)(pooled + from[pool]))[k];
            *(float4*)(keys + pool * stride + 4 * k) = v;
        }
    } else {
        for (int i = tid(); i < p.heads * wide; i += threads())
            q[i] = i % wide < p.dim ? iq[((long long)r * p.heads + i / wide) * p.dim + i % wide] : 0.0f;
        for (int i = tid(); i < POOLS * wide; i += threads()) {
            int k = i % wide;
            keys[i / wide * stride + k] = from[i / wide] >= 0 && k < p.dim ? pooled[from[i / wide] + k] : 0.0f;
        }
    }
    barrier();
    int mine = tid() & (POOLS - 1), quarter = tid() / POOLS;
    float per_head = 1.0f / sqrt_of((float)p.heads), per_dim = 1.0f / sqrt_of((float)p.dim), sum = 0.0f;
    for (int h = quarter; h < p.heads; h += 4) {
        float dot = 0.0f;
        for (int k = 0; k < wide; k += 4) {
            float4 x = *(const float4*)(q + h * wide + k), y = *(const float4*)(keys + mine * stride + k);
            dot = fma_of(x.x, y.x, dot);
            dot = fma_of(x.y, y.y, dot);
            dot = fma_of(x.z, y.z, dot);
            dot = fma_of(x.w, y.w, dot);
        }
        sum = fma_of(weights[(long long)r * w_stride + h] * per_head, at_least(dot * per_dim, 0.0f), sum);
    }
    part[quarter][mine] = sum;
    barrier();
    if (tid() < POOLS && first + tid() < pools)
        scores[(long long)block_y() * s_stride + first + tid()] = ((part[0][tid()] + part[1][tid()]) + part[2][tid()]) + part[3][tid()];
}

// selected[r]: the positions that row r attends to, ascending, -1 behind. A block of 1024 per row: a radix search for the edge of the best
// pools (ties by lowest pool), then one pass that writes them in order.
KERNEL BOUNDS(1024) index_select(Step b, Indexer p, const float* scores, int s_stride, int row0, int* selected) {
    SHARED int count[256];
    SHARED u32 room[32];
    SHARED u32 edge;
    SHARED int equals;
    int r = row0 + block_x(), width = p.topk + (p.tail ? p.kpool - 1 : 0), take = p.topk / p.kpool;
    Segment s = b.segments[b.row_segment[r]];
    int visible = s.pos0 + r - s.row0 + 1, pools = visible / p.kpool;
    int* to = selected + (long long)r * width;
    if (visible <= width) {
        for (int i = tid(); i < width; i += threads()) to[i] = i < visible ? i : -1;
        return;
    }
    const float* mine = scores + (long long)block_x() * s_stride;
    if (tid() == 0) {
        edge = 0;
        equals = take; // of those at the edge, as many are still wanted
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = tid(); i < 256; i += threads()) count[i] = 0;
        barrier();
        u32 above = shift == 24 ? 0 : ~0u << (shift + 8), known = edge;
        for (int i = tid(); i < pools; i += threads()) {
            u32 key = ordered(mine[i]);
            if ((key & above) == (known & above)) count_up(&count[(key >> shift) & 255u], 1);
        }
        barrier();
        // Digits from the largest down: the one at which the count reaches what is wanted.
        int wanted = equals, all, mine_at = tid() < 256 ? count[255 - tid()] : 0;
        int before = count_before(mine_at, room, &all);
        barrier();
        if (tid() < 256 && before < wanted && before + mine_at >= wanted) {
            edge = known | ((u32)(255 - tid()) << shift);
            equals = wanted - before;
        }
        barrier();
    }
    int greater = 0, same = 0; // before the chunk
    for (int i0 = 0; i0 < pools; i0 += threads()) {
        int i = i0 + tid(), total;
        u32 key = i < pools ? ordered(mine[i]) : 0;
        int is_greater = key > edge, is_same = key == edge && i < pools;
        int before = count_before(is_greater | (is_same << 16), room, &total);
        int g = greater + (before & 0xffff), e = same + (before >> 16);
        if (is_greater || (is_same && e < equals)) {
            int at = (g + min_of(e, equals)) * p.kpool;
            for (int t = 0; t < p.kpool; t++) to[at + t] = i * p.kpool + t;
        }
        greater += total & 0xffff;
        same += total >> 16;
    }
    int at = take * p.kpool, end = p.tail ? visible - pools * p.kpool : 0;
    for (int i = tid(); at + i < width; i += threads()) to[at + i] = i < end ? pools * p.kpool + i : -1;
}
