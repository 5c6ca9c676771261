// The KDA mixer between its projections: convolution, norms, decay, delta rule and gated norm of one head of one sequence in one block.
//
// A thread owns one value column of the state for 32 keys, in registers, for all rows of the segment: memory sees the state once per
// step. Rows are prepared eight at a time and pass the recurrence one by one, so that any grouping of a sequence's rows into steps gives
// the same bits. Neighbours: cuda/ops.rs; the formulas are reference/kda.rs.
#include "step.cuh"

#define WIDEST 128 // head_dim
#define KEYS 32    // of one thread
#define GROUPS 4   // WIDEST / KEYS
#define TOKENS 8   // prepared together
#define MAX_TAPS 8

struct Kda {
    int heads, dim, taps;
    float bound; // lower bound of the log decay; NaN: the softplus form
    float eps;
};

// Input of channel `c` at token `t` of the segment; negative: from before the step.
DEVICE float tap(const float* proj, int stride, const float* carry, int width, int taps, int t, int c) {
    return t >= 0 ? proj[(long long)t * stride + c] : carry[(long long)(taps - 1 + t) * width + c];
}

KERNEL BOUNDS(512)
kda(Step b, Kda p, const float* proj, int stride, int beta0, const float* f, const float* g, const float* conv, const float* a_log,
    const float* dt_bias, const float* o_norm, float* states, float* carries, int layers, int layer, float* out) {
    SHARED ALIGNED float q[TOKENS][WIDEST], k[TOKENS][WIDEST], v[TOKENS][WIDEST], e[TOKENS][WIDEST], o[TOKENS][WIDEST];
    SHARED float part[2][2][GROUPS][WIDEST];
    SHARED float beta[TOKENS], qk[TOKENS];
    int h = block_x(), d = p.dim, hd = p.heads * d, warp = tid() >> 5;
    Segment s = b.segments[block_y()];
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
            e[t][i] = exp_of(is_nan(p.bound) ? -decay * softplus(z) : p.bound * sigmoid(decay * z));
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
