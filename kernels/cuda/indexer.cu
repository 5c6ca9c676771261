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
    begin_next();
    await_ahead();
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
    begin_next();
    await_ahead();
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
            int row0, int, float* scores, int s_stride) {
    extern SHARED float shared[];
    SHARED float part[4][POOLS];
    int r = row0 + block_y(), first = block_x() * POOLS, wide = (p.dim + 3) / 4 * 4, stride = wide + 4;
    begin_next();
    await_ahead();
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
    for (int i = tid(); i < p.heads * wide; i += threads())
        q[i] = i % wide < p.dim ? iq[((long long)r * p.heads + i / wide) * p.dim + i % wide] : 0.0f;
    for (int i = tid(); i < POOLS * wide; i += threads()) {
        int k = i % wide;
        keys[i / wide * stride + k] = from[i / wide] >= 0 && k < p.dim ? pooled[from[i / wide] + k] : 0.0f;
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

#define KEY_LINE 132 // floats of a row of 128 in shared memory

// A head's share of a score, as a product that no later sum is fused with: it is added in several kernels.
DEVICE float gained(float gain, float dot) { return fma_of(gain, at_least(dot * (1.0f / sqrt_of(128.0f)), 0.0f), 0.0f); }

// The same for 32 heads of 128. A block scores 8 PER pools; each of its 64 groups of four threads holds PER x 4 dot products, a thread a quarter
// of the channels, so that what comes from shared memory is used PER or four times. The order of sums is the same for any PER.
template <int PER>
DEVICE void score_wide(const Step& b, const Indexer& p, const float* iq, const float* weights, int w_stride, const float* pooled, int page_tokens,
                       int layers, int layer, int row0, float* scores, int s_stride) {
    const int MANY = 8 * PER;
    extern SHARED float shared[]; // as in `index_score`
    float* q = shared;                  // [32][KEY_LINE]
    float* keys = q + 32 * KEY_LINE;    // [MANY][KEY_LINE]
    float* parts = shared;              // [4][MANY][33], over both once they are used up
    SHARED long long from[MANY];
    int r = row0 + block_y(), first = block_x() * MANY, lane = lane_id(), warp = tid() >> 5;
    begin_next();
    await_ahead();
    Segment s = b.segments[b.row_segment[r]];
    int visible = s.pos0 + r - s.row0 + 1, pools = visible / p.kpool;
    if (first >= pools || visible <= p.topk + (p.tail ? p.kpool - 1 : 0)) return;
    const float4* asked = (const float4*)(iq + (long long)r * 32 * 128);
    float4 own[4];
    UNROLL for (int i = 0; i < 4; i++) own[i] = asked[i * 256 + tid()];
    float gain = weights[(long long)r * w_stride + lane] * (1.0f / sqrt_of(32.0f));
    if (tid() < MANY) {
        int pool = first + tid();
        from[tid()] = pool < pools ? place_in(b, s, pool * p.kpool, page_tokens, layers, layer) / p.kpool * 128 : -1;
    }
    barrier();
    float4 line[PER];
    UNROLL for (int i = 0; i < PER; i++) {
        long long at = from[i * 8 + warp];
        line[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (at >= 0) line[i] = ((const float4*)(pooled + at))[lane];
    }
    UNROLL for (int i = 0; i < 4; i++) *(float4*)(q + (i * 8 + warp) * KEY_LINE + lane * 4) = own[i];
    UNROLL for (int i = 0; i < PER; i++) *(float4*)(keys + (i * 8 + warp) * KEY_LINE + lane * 4) = line[i];
    barrier();
    int pool0 = lane & 7, head0 = lane >> 3 | (warp & 1) << 2, quarter = warp >> 1; // pools 8 apart, heads 8 apart
    float acc[PER][4] = {};
    UNROLL_2 for (int k = quarter * 32; k < quarter * 32 + 32; k += 4) {
        float4 x[4];
        UNROLL for (int j = 0; j < 4; j++) x[j] = *(const float4*)(q + (head0 + 8 * j) * KEY_LINE + k);
        UNROLL for (int i = 0; i < PER; i++) {
            float4 y = *(const float4*)(keys + (pool0 + 8 * i) * KEY_LINE + k);
            UNROLL for (int j = 0; j < 4; j++) acc[i][j] = fma_of(x[j].w, y.w, fma_of(x[j].z, y.z, fma_of(x[j].y, y.y, fma_of(x[j].x, y.x, acc[i][j]))));
        }
    }
    barrier();
    UNROLL for (int i = 0; i < PER; i++)
        UNROLL for (int j = 0; j < 4; j++) parts[(quarter * MANY + pool0 + 8 * i) * 33 + head0 + 8 * j] = acc[i][j];
    barrier();
    UNROLL for (int i = 0; i < PER; i++) {
        const float* of = parts + (i * 8 + warp) * 33 + lane;
        float dot = ((of[0] + of[MANY * 33]) + of[2 * MANY * 33]) + of[3 * MANY * 33];
        float sum = warp_sum(gained(gain, dot));
        if (lane == 0 && first + i * 8 + warp < pools) scores[(long long)block_y() * s_stride + first + i * 8 + warp] = sum;
    }
}
KERNEL BOUNDS(256)
index_score_2(Step b, Indexer p, const float* iq, const float* weights, int w_stride, const float* pooled, int page_tokens, int layers, int layer,
              int row0, int, float* scores, int s_stride) {
    score_wide<2>(b, p, iq, weights, w_stride, pooled, page_tokens, layers, layer, row0, scores, s_stride);
}
KERNEL BOUNDS(256)
index_score_8(Step b, Indexer p, const float* iq, const float* weights, int w_stride, const float* pooled, int page_tokens, int layers, int layer,
              int row0, int, float* scores, int s_stride) {
    score_wide<8>(b, p, iq, weights, w_stride, pooled, page_tokens, layers, layer, row0, scores, s_stride);
}

#define ROWS_EACH 8 // rows of one block of `index_score_rows`

// The same scores, bit for bit, for many rows of one sequence: the pools' keys stay in shared memory for `ROWS_EACH` rows, of which two are scored at a
// time. Blocks (64 pools, rows); a warp has 32 pools of a row, a thread of it 8 pools (4 apart) and 4 heads (8 apart) over all channels, whose
// quarters it sums apart as `score_wide` does.
KERNEL BOUNDS_3(128)
index_score_rows(Step b, Indexer p, const float* iq, const float* weights, int w_stride, const float* pooled, int page_tokens, int layers, int layer,
                 int row0, int rows, float* scores, int s_stride) {
    extern SHARED float shared[];
    float* keys = shared;               // [64][KEY_LINE]
    float* q = keys + 64 * KEY_LINE;    // [2][32][KEY_LINE]
    int from = row0 + block_y() * ROWS_EACH, end = min_of(from + ROWS_EACH, row0 + rows), first = block_x() * 64;
    int lane = lane_id(), warp = tid() >> 5, part = (warp & 1) * 32, head = lane & 7, width = p.topk + (p.tail ? p.kpool - 1 : 0);
    begin_next();
    await_ahead();
    Segment s = b.segments[b.row_segment[from]];
    int before = s.pos0 - s.row0 + 1, most = (before + end - 1) / p.kpool;
    if (first >= most || before + end - 1 <= width) return;
    UNROLL_8 for (int i = warp; i < 64; i += 4) {
        float4 line = {0.0f, 0.0f, 0.0f, 0.0f};
        if (first + i < most) line = ((const float4*)(pooled + place_in(b, s, (first + i) * p.kpool, page_tokens, layers, layer) / p.kpool * 128))[lane];
        *(float4*)(keys + i * KEY_LINE + lane * 4) = line;
    }
    for (int r0 = from; r0 < end; r0 += 2) {
        int last = before + min_of(r0 + 1, end - 1);
        if (last <= width || first >= last / p.kpool) continue;
        barrier(); // the queries before are used up
        UNROLL_8 for (int i = tid(); i < 2 * 32 * 32; i += 128)
            if (r0 + (i >> 10) < end) *(float4*)(q + (i >> 5) * KEY_LINE + lane * 4) = ((const float4*)iq)[(long long)r0 * 1024 + i];
        barrier();
        int r = r0 + (warp >> 1), visible = before + r, pools = visible / p.kpool;
        if (r >= end || visible <= width || first + part >= pools) continue;
        const float *asked = q + ((warp >> 1) * 32 + head) * KEY_LINE, *own = keys + (part + (lane >> 3)) * KEY_LINE;
        float gain[4], dots[8][4];
        UNROLL for (int j = 0; j < 4; j++) gain[j] = weights[(long long)r * w_stride + head + 8 * j] * (1.0f / sqrt_of(32.0f));
        UNROLL_1 for (int quarter = 0; quarter < 4; quarter++) {
            float acc[8][4] = {};
            UNROLL_2 for (int k = quarter * 32; k < quarter * 32 + 32; k += 4) {
                float4 x[4];
                UNROLL for (int j = 0; j < 4; j++) x[j] = *(const float4*)(asked + 8 * j * KEY_LINE + k);
                UNROLL for (int i = 0; i < 8; i++) {
                    float4 y = *(const float4*)(own + 4 * i * KEY_LINE + k);
                    UNROLL for (int j = 0; j < 4; j++)
                        acc[i][j] = fma_of(x[j].w, y.w, fma_of(x[j].z, y.z, fma_of(x[j].y, y.y, fma_of(x[j].x, y.x, acc[i][j]))));
                }
            }
            UNROLL for (int i = 0; i < 8; i++)
                UNROLL for (int j = 0; j < 4; j++) dots[i][j] = quarter == 0 ? acc[i][j] : dots[i][j] + acc[i][j];
        }
        // Heads in the order of `warp_sum`: 16 apart, then 8, then those of other lanes.
        float sums[8];
        UNROLL for (int i = 0; i < 8; i++)
            sums[i] = (gained(gain[0], dots[i][0]) + gained(gain[2], dots[i][2])) + (gained(gain[1], dots[i][1]) + gained(gain[3], dots[i][3]));
        float sum = sums_of<4>(sums);
        int pool = first + part + (lane >> 3) + 4 * (lane & 7);
        if (pool < pools) scores[(long long)(r - row0) * s_stride + pool] = sum;
    }
}

#define HELD 8      // keys of a thread that stay in registers
#define DIGIT 2048  // values of a digit: keys of 32 bits have three
#define MOST_KEPT 4 // tokens of a pool that are written without a loop

// A thread's keys among those of its warp's consecutive pools, 32 apart; 0 where there is none, below every score. Warp `warp` of `warps`.
struct Keys {
    const float* scores;
    int pools, first, each;
    u32 held[HELD];

    DEVICE_MEMBER Keys(const float* row, int all, int warp, int warps) : scores(row), pools(all), first(0), each(div_up(all, 32 * warps)) {
        first = warp * 32 * each + lane_id();
        UNROLL for (int i = 0; i < HELD; i++) held[i] = i < each ? at(i) : 0;
    }
    DEVICE_MEMBER u32 at(int i) const { return first + 32 * i < pools ? ordered(scores[first + 32 * i]) : 0; }

    // f(i, key) for each of them in order; all lanes of a warp together.
    template <class F>
    DEVICE_MEMBER void visit(F f) const {
        if (each <= HELD) {
            UNROLL for (int i = 0; i < HELD; i++)
                if (i < each) f(i, held[i]);
        } else {
            UNROLL_1 for (int i0 = 0; i0 < each; i0 += HELD) {
                u32 some[HELD]; // all on their way before the warp votes on the first
                UNROLL for (int i = 0; i < HELD; i++) some[i] = i0 + i < each ? at(i0 + i) : 0;
                UNROLL for (int i = 0; i < HELD; i++)
                    if (i0 + i < each) f(i0 + i, some[i]);
            }
        }
    }
};

// Counts the keys whose digits above are `known` by their digit of `bits` bits from `low` on.
DEVICE void count_digits(const Keys& keys, u32 known, int low, int bits, int* count) {
    u32 above = bits + low >= 32 ? 0 : ~0u << (bits + low);
    keys.visit([&](int, u32 k) {
        // Digits of a warp are mostly one: what the first of its lanes has is added for all at once.
        bool counts = k != 0 && (k & above) == known;
        u32 digit = (k >> low) & ((1u << bits) - 1u), those = votes(counts);
        if (those == 0) return;
        int leader = first_of(those);
        u32 common = shuffle_bits(digit, leader), equal = votes(counts && digit == common);
        if (lane_id() == leader) count_up(&count[digit], ones(equal));
        else if (counts && !(equal >> lane_id() & 1u)) count_up(&count[digit], 1);
    });
}

// What is looked for: the best pools end at key `last`, of which the first `equals` (those of the lowest pools) belong to them.
struct Edge {
    u32 last;
    int equals;
};

// Digits from the largest down, of which this thread has `one` of the 2 tid() + 1st and `two` of the next: the one at which the count reaches what
// is wanted. One thread of the block finds it.
DEVICE void next_digit(int one, int two, int low, u32* room, Edge* edge) {
    int all, wanted = edge->equals, before = count_before(one + two, room, &all);
    if (before < wanted && before + one + two >= wanted) {
        bool at_one = before + one >= wanted;
        edge->last |= (u32)(DIGIT - (at_one ? 1 : 2) - 2 * tid()) << low;
        edge->equals = wanted - before - (at_one ? 0 : one);
    }
    barrier();
}

// Digits of 11 bits from the top; the last has 10.
DEVICE int digit_low(int digit) { return digit == 0 ? 21 : digit == 1 ? 10 : 0; }
DEVICE int digit_bits(int digit) { return digit == 2 ? 10 : 11; }

// How many of a warp's keys lie above the edge and at it.
DEVICE void around(const Keys& keys, u32 last, int* greater, int* same) {
    keys.visit([&](int, u32 k) {
        *greater += ones(votes(k > last));
        *same += ones(votes(k == last));
    });
}

// Writes the positions of a warp's pools that are chosen, `g` chosen above the edge and `e` keys at it being before them.
DEVICE void write_chosen(const Keys& keys, const Indexer& p, Edge edge, int g, int e, int* to) {
    u32 below = (1u << lane_id()) - 1u;
    keys.visit([&](int i, u32 k) {
        u32 greaters = votes(k > edge.last), equal = votes(k == edge.last);
        int my_g = g + ones(greaters & below), my_e = e + ones(equal & below);
        if (k > edge.last || (k == edge.last && my_e < edge.equals)) {
            int at = (my_g + min_of(my_e, edge.equals)) * p.kpool, from = (keys.first + 32 * i) * p.kpool;
            UNROLL for (int t = 0; t < MOST_KEPT; t++)
                if (t < p.kpool) to[at + t] = from + t;
            for (int t = MOST_KEPT; t < p.kpool; t++) to[at + t] = from + t;
        }
        g += ones(greaters);
        e += ones(equal);
    });
}

// The row's own rest of a pool behind what was chosen, -1 behind.
DEVICE void write_rest(const Indexer& p, int visible, int width, int* to) {
    int pools = visible / p.kpool, at = p.topk / p.kpool * p.kpool, end = p.tail ? visible - pools * p.kpool : 0;
    for (int i = tid(); at + i < width; i += threads()) to[at + i] = i < end ? pools * p.kpool + i : -1;
}

// selected[r]: the positions that row r attends to, ascending, -1 behind. A block of 1024 per row: a radix search for the edge of the best
// pools (ties by lowest pool), then one pass that writes them in order. A warp owns consecutive pools.
KERNEL BOUNDS(1024) index_select(Step b, Indexer p, const float* scores, int s_stride, int row0, int* selected) {
    SHARED int count[DIGIT];
    SHARED u32 room[32];
    SHARED Edge edge;
    int r = row0 + block_x(), width = p.topk + (p.tail ? p.kpool - 1 : 0);
    begin_next();
    await_ahead();
    Segment s = b.segments[b.row_segment[r]];
    int visible = s.pos0 + r - s.row0 + 1;
    int* to = selected + (long long)r * width;
    if (visible <= width) {
        for (int i = tid(); i < width; i += threads()) to[i] = i < visible ? i : -1;
        return;
    }
    Keys keys(scores + (long long)block_x() * s_stride, visible / p.kpool, tid() >> 5, 32);
    if (tid() == 0) edge = {0, p.topk / p.kpool};
    UNROLL_1 for (int digit = 0; digit < 3; digit++) {
        for (int i = tid(); i < DIGIT; i += 1024) count[i] = 0;
        barrier();
        count_digits(keys, edge.last, digit_low(digit), digit_bits(digit), count);
        barrier();
        next_digit(count[DIGIT - 1 - 2 * tid()], count[DIGIT - 2 - 2 * tid()], digit_low(digit), room, &edge);
    }
    Edge found = edge;
    int greater = 0, same = 0;
    around(keys, found.last, &greater, &same);
    // A warp's numbers count once; then of all warps before it.
    int all, g = count_before(lane_id() == 0 ? greater : 0, room, &all), e = count_before(lane_id() == 0 ? same : 0, room, &all);
    write_chosen(keys, p, found, (int)shuffle_bits((u32)g, 0), (int)shuffle_bits((u32)e, 0), to);
    write_rest(p, visible, width, to);
}

#if CLUSTERS
// The same by eight blocks a row, for long contexts and few rows: each has an eighth of the pools and counts for itself, and all add up what all
// have counted.
KERNEL CLUSTER_8 BOUNDS(1024) index_select_8(Step b, Indexer p, const float* scores, int s_stride, int row0, int* selected) {
    SHARED ALIGNED int count[2][DIGIT]; // by turns: the others may still read the one before
    SHARED ALIGNED int totals[2];
    SHARED u32 room[32];
    SHARED Edge edge;
    int r = row0 + block_y(), rank = block_x(), width = p.topk + (p.tail ? p.kpool - 1 : 0);
    begin_next();
    await_ahead();
    Segment s = b.segments[b.row_segment[r]];
    int visible = s.pos0 + r - s.row0 + 1;
    int* to = selected + (long long)r * width;
    if (visible <= width) {
        for (int i = rank * 1024 + tid(); i < width; i += 8 * 1024) to[i] = i < visible ? i : -1;
        return;
    }
    Keys keys(scores + (long long)block_y() * s_stride, visible / p.kpool, rank * 32 + (tid() >> 5), 8 * 32);
    if (tid() == 0) edge = {0, p.topk / p.kpool};
    UNROLL_1 for (int digit = 0; digit < 3; digit++) {
        int* own = count[digit & 1];
        for (int i = tid(); i < DIGIT; i += 1024) own[i] = 0;
        barrier();
        count_digits(keys, edge.last, digit_low(digit), digit_bits(digit), own);
        cluster_barrier();
        uint2 sum = {0, 0};
        UNROLL for (int other = 0; other < 8; other++) {
            uint2 v = of_block(own + DIGIT - 2 - 2 * tid(), other);
            sum.x += v.x;
            sum.y += v.y;
        }
        next_digit((int)sum.y, (int)sum.x, digit_low(digit), room, &edge);
    }
    Edge found = edge;
    int greater = 0, same = 0;
    around(keys, found.last, &greater, &same);
    int all_g, all_e, g = count_before(lane_id() == 0 ? greater : 0, room, &all_g), e = count_before(lane_id() == 0 ? same : 0, room, &all_e);
    if (tid() == 0) {
        totals[0] = all_g;
        totals[1] = all_e;
    }
    cluster_barrier();
    g = (int)shuffle_bits((u32)g, 0);
    e = (int)shuffle_bits((u32)e, 0);
    for (int other = 0; other < rank; other++) {
        uint2 v = of_block(totals, other);
        g += (int)v.x;
        e += (int)v.y;
    }
    write_chosen(keys, p, found, g, e, to);
    if (rank == 0) write_rest(p, visible, width, to);
    cluster_barrier(); // nobody leaves while others read what it has counted
}
#endif
