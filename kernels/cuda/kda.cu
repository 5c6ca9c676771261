// The KDA mixer between its projections: convolution, norms, decay, delta rule and gated norm of one head of one sequence in one block.
//
// A thread owns one value column of the state for 32 keys, in registers, for all rows of the segment: memory sees the state once per
// step. Rows are prepared eight at a time and pass the recurrence one by one, so that any grouping of a sequence's rows into steps gives
// the same bits. Neighbours: cuda/ops.rs; the formulas are reference/kda.rs.
#include "kda.cuh"

#define WIDEST 128 // head_dim
#define KEYS 32    // of one thread
#define GROUPS 4   // WIDEST / KEYS
#define TOKENS 8   // prepared together
#define MAX_TAPS 8

// Input of channel `c` at token `t` of the segment; negative: from before the step.
DEVICE float tap(const float* proj, int stride, const float* carry, int width, int taps, int t, int c) {
    return t >= 0 ? proj[(long long)t * stride + c] : carry[(long long)(taps - 1 + t) * width + c];
}

// Segments of `least` to `most` rows; others are left to `kda_one` and kda_chunk.cu.
KERNEL BOUNDS(512)
kda(Step b, Kda p, int least, int most, const float* proj, int stride, int beta0, const float* f, const float* g, const float* conv, const float* a_log,
    const float* dt_bias, const float* o_norm, float* states, float* carries, int layers, int layer, float* out) {
    SHARED ALIGNED float q[TOKENS][WIDEST], k[TOKENS][WIDEST], v[TOKENS][WIDEST], e[TOKENS][WIDEST], o[TOKENS][WIDEST];
    SHARED float part[2][2][GROUPS][WIDEST];
    SHARED float beta[TOKENS], qk[TOKENS];
    int h = block_x(), d = p.dim, hd = p.heads * d, warp = tid() >> 5;
    begin_next();
    await_ahead();
    Segment s = b.segments[block_y()];
    if (s.rows < least || s.rows > most) return;
    long long unit = (long long)s.slot * layers + layer;
    float* state = states + (unit * p.heads + h) * d * d;
    float* carry = carries + unit * (p.taps - 1) * 3 * hd;
    proj += (long long)s.row0 * stride;
    int c = tid() & (WIDEST - 1), group = tid() >> 7;
    float decay = exp_of(a_log[h]);
    float own[KEYS];
    UNROLL for (int i = 0; i < KEYS; i++) {
        int key = group * KEYS + i;
        own[i] = key < d && c < d ? state[key * d + c] : 0.0f;
    }
    for (int i = tid(); i < TOKENS * WIDEST; i += threads()) q[0][i] = k[0][i] = e[0][i] = 0.0f;
    barrier();
    for (int t0 = 0; t0 < s.rows; t0 += TOKENS) {
        int n = min_of(TOKENS, s.rows - t0);
        UNROLL_1 for (int at = tid(); at < n * 3 * d; at += threads()) {
            int t = at / (3 * d), part3 = at / d % 3, i = at % d, ch = part3 * hd + h * d + i;
            float sum = 0.0f;
            if (p.taps == 4) {
                float x[4];
                float4 w = *(const float4*)(conv + ch * 4);
                UNROLL for (int j = 0; j < 4; j++) x[j] = tap(proj, stride, carry, 3 * hd, 4, t0 + t + j - 3, ch);
                sum = fma_of(w.w, x[3], fma_of(w.z, x[2], fma_of(w.y, x[1], w.x * x[0])));
            } else
                for (int j = 0; j < p.taps; j++)
                    sum = fma_of(conv[ch * p.taps + j], tap(proj, stride, carry, 3 * hd, p.taps, t0 + t + j - (p.taps - 1), ch), sum);
            (part3 == 0 ? q : part3 == 1 ? k : v)[t][i] = silu(sum);
        }
        UNROLL_1 for (int at = tid(); at < n * d; at += threads()) {
            int t = at / d, i = at % d;
            float z = f[(long long)(s.row0 + t0 + t) * hd + h * d + i] + dt_bias[h * d + i];
            e[t][i] = exp_of(log_decay(p, decay, z));
        }
        if (tid() < n) beta[tid()] = sigmoid(proj[(long long)(t0 + tid()) * stride + beta0 + h]);
        barrier();
        if (warp < n) {
            float qq = 0.0f, kk = 0.0f, both = 0.0f;
            UNROLL_1 for (int i = lane_id(); i < d; i += 32) {
                qq = fma_of(q[warp][i], q[warp][i], qq);
                kk = fma_of(k[warp][i], k[warp][i], kk);
            }
            float qs = 1.0f / sqrt_of(warp_sum(qq) + 1e-6f) * (1.0f / sqrt_of((float)d)), ks = 1.0f / sqrt_of(warp_sum(kk) + 1e-6f);
            UNROLL_1 for (int i = lane_id(); i < d; i += 32) {
                q[warp][i] *= qs;
                k[warp][i] *= ks;
                both = fma_of(q[warp][i], k[warp][i], both);
            }
            both = warp_sum(both);
            if (lane_id() == 0) qk[warp] = both;
        }
        barrier();
        UNROLL_1 for (int t = 0; t < n; t++) {
            float from_k = 0.0f, from_q = 0.0f;
            UNROLL for (int i = 0; i < KEYS; i += 4) {
                // Behind the last key lie zeros.
                int key = group * KEYS + i;
                if (i % 8 == 0) warp_barrier(); // all loads at once would not fit the registers
                float4 e4 = *(const float4*)&e[t][key], k4 = *(const float4*)&k[t][key], q4 = *(const float4*)&q[t][key];
                own[i] *= e4.x;
                own[i + 1] *= e4.y;
                own[i + 2] *= e4.z;
                own[i + 3] *= e4.w;
                from_k = fma_of(k4.w, own[i + 3], fma_of(k4.z, own[i + 2], fma_of(k4.y, own[i + 1], fma_of(k4.x, own[i], from_k))));
                from_q = fma_of(q4.w, own[i + 3], fma_of(q4.z, own[i + 2], fma_of(q4.y, own[i + 1], fma_of(q4.x, own[i], from_q))));
            }
            float(*sums)[GROUPS][WIDEST] = part[t & 1];
            sums[0][group][c] = from_k;
            sums[1][group][c] = from_q;
            barrier();
            float read = 0.0f, seen = 0.0f;
            UNROLL for (int i = 0; i < GROUPS; i++) {
                read += sums[0][i][c];
                seen += sums[1][i][c];
            }
            float u = c < d ? beta[t] * (v[t][c] - read) : 0.0f;
            if (group == 0 && c < d) o[t][c] = fma_of(qk[t], u, seen);
            UNROLL for (int i = 0; i < KEYS; i += 4) {
                if (i % 8 == 0) warp_barrier();
                float4 k4 = *(const float4*)&k[t][group * KEYS + i];
                own[i] = fma_of(k4.x, u, own[i]);
                own[i + 1] = fma_of(k4.y, u, own[i + 1]);
                own[i + 2] = fma_of(k4.z, u, own[i + 2]);
                own[i + 3] = fma_of(k4.w, u, own[i + 3]);
            }
        }
        barrier();
        if (warp < n) {
            float sum = 0.0f;
            UNROLL_1 for (int i = lane_id(); i < d; i += 32) sum = fma_of(o[warp][i], o[warp][i], sum);
            float inv = 1.0f / sqrt_of(warp_sum(sum) / (float)d + p.eps);
            UNROLL_1 for (int i = lane_id(); i < d; i += 32) {
                long long at = (long long)(s.row0 + t0 + warp) * hd + h * d + i;
                out[at] = o[warp][i] * inv * o_norm[i] * sigmoid(g[at]);
            }
        }
        barrier();
    }
    UNROLL for (int i = 0; i < KEYS; i++) {
        int key = group * KEYS + i;
        if (key < d && c < d) state[key * d + c] = own[i];
    }
    // The last taps - 1 inputs stay for the next step; each channel is one thread's, which reads before it writes.
    for (int at = tid(); at < 3 * d; at += threads()) {
        int ch = at / d * hd + h * d + at % d;
        float kept[MAX_TAPS];
        UNROLL for (int i = 0; i < MAX_TAPS; i++)
            if (i < p.taps - 1) kept[i] = tap(proj, stride, carry, 3 * hd, p.taps, s.rows + i - (p.taps - 1), ch);
        UNROLL for (int i = 0; i < MAX_TAPS; i++)
            if (i < p.taps - 1) carry[(long long)i * 3 * hd + ch] = kept[i];
    }
}

// One row of a sequence, for heads of 128 and four taps: what decoding asks for. A head is one block's of 512 threads (two of them on a multiprocessor,
// so that one's state is on its way while the other computes), or, while there are fewer heads than multiprocessors, that of two blocks of 256, which
// have half of its columns each and meet for the norm. A warp owns 32 keys and 32 columns of the state: 8 lanes a row of 16 bytes each, four rows at a
// time. All sums have one order in both forms.
template <int HALVES>
DEVICE void kda_row(const Step& b, const Kda& p, int h, int half, const float* proj, int stride, int beta0, const float* f, const float* g,
                    const float* conv, const float* a_log, const float* dt_bias, const float* o_norm, float* states, float* carries, int layers,
                    int layer, float* out) {
    const int EACH = HALVES; // of the 4 x 128 inputs, per thread
    SHARED ALIGNED float in[3][128], e[128]; // q, k, v before norms; decays
    SHARED ALIGNED float part[2][4][128];
    SHARED ALIGNED float squares[4];
    int hd = p.heads * 128, warp = tid() >> 5, four = HALVES == 1 ? warp & 3 : (warp & 1) + 2 * half, group = HALVES == 1 ? warp >> 2 : warp >> 1;
    int sub = lane_id() >> 3, col = four * 32 + (lane_id() & 7) * 4, i = tid() & 127;
    float4 taps[EACH];
    float bias[EACH], decay = 0.0f;
    begin_next();
    UNROLL for (int u = 0; u < EACH; u++) {
        int third = (tid() >> 7) + u * (4 / EACH);
        taps[u] = {0.0f, 0.0f, 0.0f, 0.0f};
        bias[u] = 0.0f;
        if (third < 3) {
            taps[u] = *(const float4*)(conv + (third * hd + h * 128 + i) * 4);
        } else {
            bias[u] = dt_bias[h * 128 + i];
            decay = exp_of(a_log[h]);
        }
    }
    await_ahead();
    Segment s = b.segments[block_y()];
    if (s.rows != 1) return;
    long long unit = (long long)s.slot * layers + layer;
    float* state = states + ((unit * p.heads + h) * 128 + group * 32 + sub) * 128 + col;
    float4 own[8];
    UNROLL for (int k = 0; k < 8; k++) own[k] = *(const float4*)(state + k * 512);
    const float* row = proj + (long long)s.row0 * stride;
    float strength = row[beta0 + h], kept[EACH][3];
    float4 gate = {0.0f, 0.0f, 0.0f, 0.0f};
    if (group == 0 && sub == 0) gate = *(const float4*)(g + (long long)s.row0 * hd + h * 128 + col);
    // Each half reads all inputs; the last three stay for the next step, once both have read those before.
    auto keep = [&] {
        UNROLL for (int u = 0; u < EACH; u++) {
            int third = (tid() >> 7) + u * (4 / EACH);
            float* carry = carries + unit * 9 * hd + third * hd + h * 128 + i;
            if (third < 3)
                UNROLL for (int k = 0; k < 3; k++) carry[(long long)k * 3 * hd] = kept[u][k];
        }
    };
    UNROLL for (int u = 0; u < EACH; u++) {
        int third = (tid() >> 7) + u * (4 / EACH), ch = third * hd + h * 128 + i;
        if (third < 3) {
            const float* carry = carries + unit * 9 * hd + ch;
            float x0 = carry[0];
            kept[u][0] = carry[3ll * hd];
            kept[u][1] = carry[6ll * hd];
            kept[u][2] = row[ch];
            in[third][i] = silu(fma_of(taps[u].w, kept[u][2], fma_of(taps[u].z, kept[u][1], fma_of(taps[u].y, kept[u][0], taps[u].x * x0))));
        } else {
            float z = f[(long long)s.row0 * hd + h * 128 + i] + bias[u];
            e[i] = exp_of(log_decay(p, decay, z));
        }
    }
    if (HALVES == 1) keep();
    barrier();
    float4 q4 = ((const float4*)in[0])[lane_id()], k4 = ((const float4*)in[1])[lane_id()];
    float qq = fma_of(q4.w, q4.w, fma_of(q4.z, q4.z, fma_of(q4.y, q4.y, q4.x * q4.x)));
    float kk = fma_of(k4.w, k4.w, fma_of(k4.z, k4.z, fma_of(k4.y, k4.y, k4.x * k4.x)));
    float qk = fma_of(q4.w, k4.w, fma_of(q4.z, k4.z, fma_of(q4.y, k4.y, q4.x * k4.x)));
    UNROLL for (int m = 16; m > 0; m >>= 1) {
        qq += shuffle(qq, lane_id() ^ m);
        kk += shuffle(kk, lane_id() ^ m);
        qk += shuffle(qk, lane_id() ^ m);
    }
    float qs = 1.0f / sqrt_of(qq + 1e-6f) * (1.0f / sqrt_of(128.0f)), ks = 1.0f / sqrt_of(kk + 1e-6f), beta = sigmoid(strength);
    float sums[8] = {}; // of this lane's keys, for its four columns: k . state, q . state
    UNROLL for (int k = 0; k < 8; k++) {
        int key = group * 32 + k * 4 + sub;
        float fade = e[key], by_q = in[0][key], by_k = in[1][key];
        own[k].x *= fade;
        own[k].y *= fade;
        own[k].z *= fade;
        own[k].w *= fade;
        sums[0] = fma_of(by_k, own[k].x, sums[0]);
        sums[1] = fma_of(by_k, own[k].y, sums[1]);
        sums[2] = fma_of(by_k, own[k].z, sums[2]);
        sums[3] = fma_of(by_k, own[k].w, sums[3]);
        sums[4] = fma_of(by_q, own[k].x, sums[4]);
        sums[5] = fma_of(by_q, own[k].y, sums[5]);
        sums[6] = fma_of(by_q, own[k].z, sums[6]);
        sums[7] = fma_of(by_q, own[k].w, sums[7]);
    }
    // Over the four lanes of a column: the first exchange leaves a lane one of the two sums, the second half of its columns.
    bool is_q = (sub & 2) != 0, is_high = (sub & 1) != 0;
    UNROLL for (int k = 0; k < 4; k++) {
        float give = is_q ? sums[k] : sums[k + 4], keep = is_q ? sums[k + 4] : sums[k];
        sums[k] = keep + shuffle(give, lane_id() ^ 16);
    }
    UNROLL for (int k = 0; k < 2; k++) {
        float give = is_high ? sums[k] : sums[k + 2], keep = is_high ? sums[k + 2] : sums[k];
        part[is_q][group][col + 2 * is_high + k] = keep + shuffle(give, lane_id() ^ 8);
    }
    barrier();
    float4 read = {0.0f, 0.0f, 0.0f, 0.0f}, seen = {0.0f, 0.0f, 0.0f, 0.0f}, value = *(const float4*)&in[2][col], u, o;
    UNROLL for (int k = 0; k < 4; k++) {
        float4 x = *(const float4*)&part[0][k][col], y = *(const float4*)&part[1][k][col];
        read.x += x.x;
        read.y += x.y;
        read.z += x.z;
        read.w += x.w;
        seen.x += y.x;
        seen.y += y.y;
        seen.z += y.z;
        seen.w += y.w;
    }
    u.x = beta * (value.x - ks * read.x);
    u.y = beta * (value.y - ks * read.y);
    u.z = beta * (value.z - ks * read.z);
    u.w = beta * (value.w - ks * read.w);
    UNROLL for (int k = 0; k < 8; k++) {
        float by = in[1][group * 32 + k * 4 + sub] * ks;
        float4 next = {fma_of(by, u.x, own[k].x), fma_of(by, u.y, own[k].y), fma_of(by, u.z, own[k].z), fma_of(by, u.w, own[k].w)};
        *(float4*)(state + k * 512) = next;
    }
    float both = qk * qs * ks;
    o.x = fma_of(both, u.x, qs * seen.x);
    o.y = fma_of(both, u.y, qs * seen.y);
    o.z = fma_of(both, u.z, qs * seen.z);
    o.w = fma_of(both, u.w, qs * seen.w);
    float square = fma_of(o.w, o.w, fma_of(o.z, o.z, fma_of(o.y, o.y, o.x * o.x)));
    UNROLL for (int m = 4; m > 0; m >>= 1) square += shuffle(square, lane_id() ^ m);
    if (group == 0 && lane_id() == 0) squares[four] = square;
    float4 all;
#if CLUSTERS
    if (HALVES > 1) {
        cluster_barrier();
        uint2 low = of_block(squares, 0), high = of_block(squares + 2, 1);
        all = {as_float(low.x), as_float(low.y), as_float(high.x), as_float(high.y)};
        if (half == 0) keep();
    } else
#endif
    {
        barrier();
        all = *(const float4*)squares;
    }
    if (group == 0 && sub == 0) {
        float inv = 1.0f / sqrt_of((((all.x + all.y) + all.z) + all.w) / 128.0f + p.eps);
        float4 norm = *(const float4*)(o_norm + col);
        float4 to = {o.x * inv * norm.x * sigmoid(gate.x), o.y * inv * norm.y * sigmoid(gate.y), o.z * inv * norm.z * sigmoid(gate.z),
                     o.w * inv * norm.w * sigmoid(gate.w)};
        *(float4*)(out + (long long)s.row0 * hd + h * 128 + col) = to;
    }
#if CLUSTERS
    if (HALVES > 1) cluster_barrier(); // nobody leaves while the other reads its squares
#endif
}

KERNEL BOUNDS_2(512)
kda_one(Step b, Kda p, const float* proj, int stride, int beta0, const float* f, const float* g, const float* conv, const float* a_log,
        const float* dt_bias, const float* o_norm, float* states, float* carries, int layers, int layer, float* out) {
    kda_row<1>(b, p, block_x(), 0, proj, stride, beta0, f, g, conv, a_log, dt_bias, o_norm, states, carries, layers, layer, out);
}

#if CLUSTERS
KERNEL CLUSTER_2 BOUNDS_2(256)
kda_halves(Step b, Kda p, const float* proj, int stride, int beta0, const float* f, const float* g, const float* conv, const float* a_log,
           const float* dt_bias, const float* o_norm, float* states, float* carries, int layers, int layer, float* out) {
    kda_row<2>(b, p, block_x() >> 1, block_x() & 1, proj, stride, beta0, f, g, conv, a_log, dt_bias, o_norm, states, carries, layers, layer, out);
}
#endif
