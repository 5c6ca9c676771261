// Sparse MLA attention in absorbed form: queries folded onto the latent, attention over the chosen latent rows, values out of it.
//
// The chosen rows are cut into parts of 64; a part's softmax sums are merged in ascending order, by `merge` everywhere: either blocks
// take a part each and `mla_merge` joins them (few rows), or one block takes all parts in turn (many). The bits are the same.
// Neighbours: cuda/ops.rs; the formulas are reference/mla.rs.
#include "step.cuh"
#include "weights.cuh"

#define PART 64  // chosen rows whose sums are kept apart
#define TILE 16  // latent rows held at a time
#define HEADS 16 // of one block
#define COLUMNS 2 // latent columns of a thread, 256 apart: latent <= 512

// Stores the step's latent rows. A block per row.
KERNEL BOUNDS(128) mla_append(Step b, const float* c, int latent, u8* cache, int bf16, int page_tokens, int layers, int layer) {
    begin_next();
    await_ahead();
    int r = block_x();
    Segment s = b.segments[b.row_segment[r]];
    long long at = place_in(b, s, s.pos0 + r - s.row0, page_tokens, layers, layer) * latent;
    for (int i = tid(); i < latent; i += threads()) {
        float v = c[(long long)r * latent + i];
        if (bf16) ((u16*)cache)[at + i] = to_bf16(v);
        else ((float*)cache)[at + i] = v;
    }
}

// folded[r, h] = sum over d of q[r, h, d] Wk[h, d]: blocks (head, 512 latent columns, 8 rows); a thread owns 8 columns and a quarter of d.
KERNEL BOUNDS(256) mla_fold(const float* q, Matrix kv_b, int heads, int qk, int v, int rows, float* folded, u16* rounded) {
    SHARED float room[4][512];
    begin_next();
    await_ahead();
    int h = block_x(), k = block_y() * 512 + (tid() & 63) * 8, r0 = block_z() * 8, n = min_of(8, rows - r0), quarter = tid() >> 6;
    int latent = kv_b.cols;
    float acc[8][8] = {};
    if (k < latent)
        UNROLL_4 for (int d = quarter; d < qk; d += 4) {
            float w[8];
            load8_any(kv_b, row_of(kv_b, 0, h * (qk + v) + d), k, w);
            UNROLL for (int r = 0; r < 8; r++)
                if (r < n) {
                    float x = q[((long long)(r0 + r) * heads + h) * qk + d];
                    UNROLL for (int i = 0; i < 8; i++) acc[r][i] = fma_of(x, w[i], acc[r][i]);
                }
        }
    UNROLL for (int r = 0; r < 8; r++) {
        if (r < n) {
            UNROLL for (int i = 0; i < 8; i++) room[quarter][(tid() & 63) * 8 + i] = acc[r][i];
            barrier();
            for (int i = tid(); i < 512; i += threads()) {
                int col = block_y() * 512 + i;
                if (col >= latent) continue;
                float sum = ((room[0][i] + room[1][i]) + room[2][i]) + room[3][i];
                long long at = ((long long)(r0 + r) * heads + h) * latent + col;
                if (rounded) rounded[at] = to_bf16(sum);
                else folded[at] = sum;
            }
            barrier();
        }
    }
}

// Joins the sums of a part (its largest score, sum of exponentials, weighted latents) to those before it.
DEVICE void merge_scale(float top, float part_top, float* joint, float* before, float* part) {
    *joint = at_least(top, part_top);
    *before = top == -infinity() ? 0.0f : exp_of(top - *joint);
    *part = part_top == -infinity() ? 0.0f : exp_of(part_top - *joint);
}

// Blocks (parts or 1, groups of heads, rows). `sums` null: one block takes all parts and writes `mixed[r, h]`; else block x takes part x and
// writes its sums there: `[r, h, part, latent + 2]`.
KERNEL BOUNDS(256)
mla_attend(Step b, const float* folded, const u8* cache, int bf16, int page_tokens, int layers, int layer, const int* selected, int width,
           int row0, int heads, int latent, float scale, float* sums, float* mixed) {
    extern SHARED float shared[];
    begin_next();
    await_ahead();
    int stride = (latent + 3) / 4 * 4 + 4, wide = stride - 4;
    float* q = shared;                    // [HEADS][stride]
    float* c = q + HEADS * stride;        // [TILE][stride]
    float* p = c + TILE * stride;         // [HEADS][TILE]
    float* shrink = p + HEADS * TILE;     // [HEADS]
    float* part_shrink = shrink + HEADS;  // [HEADS]
    float* totals = part_shrink + HEADS;  // [HEADS]
    int r = row0 + block_z(), h0 = block_y() * HEADS, h = tid() / TILE, j = tid() % TILE;
    Segment s = b.segments[b.row_segment[r]];
    const int* chosen = selected + (long long)r * width;
    for (int i = tid(); i < HEADS * wide; i += threads()) {
        int head = i / wide, k = i % wide;
        q[head * stride + k] = h0 + head < heads && k < latent ? folded[((long long)r * heads + h0 + head) * latent + k] : 0.0f;
    }
    int parts = div_up(width, PART), first = sums ? block_x() : 0, end = sums ? first + 1 : parts;
    float all_top = -infinity(), all_total = 0.0f, all[HEADS][COLUMNS] = {};
    for (int part = first; part < end; part++) {
        float top = -infinity(), total = 0.0f, acc[HEADS][COLUMNS] = {};
        for (int t0 = part * PART; t0 < min_of(width, (part + 1) * PART); t0 += TILE) {
            if (chosen[t0] < 0) break;
            barrier();
            for (int i = tid(); i < TILE * wide; i += threads()) {
                int row = i / wide, k = i % wide, pos = t0 + row < width ? chosen[t0 + row] : -1;
                float v = 0.0f;
                if (pos >= 0 && pos / page_tokens < s.pages && k < latent) {
                    long long at = place_in(b, s, pos, page_tokens, layers, layer) * latent + k;
                    v = bf16 ? from_bf16(((const u16*)cache)[at]) : ((const float*)cache)[at];
                }
                c[row * stride + k] = v;
            }
            barrier();
            float score = 0.0f;
            for (int k = 0; k < wide; k += 4) {
                float4 x = *(const float4*)(q + h * stride + k), y = *(const float4*)(c + j * stride + k);
                score = fma_of(x.x, y.x, score);
                score = fma_of(x.y, y.y, score);
                score = fma_of(x.z, y.z, score);
                score = fma_of(x.w, y.w, score);
            }
            bool there = t0 + j < width && chosen[t0 + j] >= 0;
            score = there ? score * scale : -infinity();
            float most = score;
            UNROLL for (int m = TILE / 2; m > 0; m >>= 1) most = at_least(most, shuffle(most, lane_id() ^ m));
            float joint = at_least(top, most), weight = there ? exp_of(score - joint) : 0.0f, sum = weight;
            UNROLL for (int m = TILE / 2; m > 0; m >>= 1) sum += shuffle(sum, lane_id() ^ m);
            float before = top == -infinity() ? 0.0f : exp_of(top - joint);
            total = fma_of(total, before, sum);
            top = joint;
            p[h * TILE + j] = weight;
            if (j == 0) shrink[h] = before;
            barrier();
            UNROLL for (int x = 0; x < COLUMNS; x++) {
                int k = tid() + x * 256;
                if (k < latent) {
                    float own[TILE];
                    UNROLL for (int i = 0; i < TILE; i++) own[i] = c[i * stride + k];
                    UNROLL for (int head = 0; head < HEADS; head++) {
                        float v = acc[head][x] * shrink[head];
                        UNROLL for (int i = 0; i < TILE; i++) v = fma_of(p[head * TILE + i], own[i], v);
                        acc[head][x] = v;
                    }
                }
            }
        }
        if (sums) {
            float* to = sums + (((long long)block_z() * heads + h0) * parts + part) * (latent + 2);
            long long each = (long long)parts * (latent + 2);
            UNROLL for (int x = 0; x < COLUMNS; x++) {
                int k = tid() + x * 256;
                UNROLL for (int head = 0; head < HEADS; head++)
                    if (k < latent && h0 + head < heads) to[head * each + k] = acc[head][x];
            }
            if (j == 0 && h0 + h < heads) {
                to[h * each + latent] = top;
                to[h * each + latent + 1] = total;
            }
        } else {
            float joint, before, mine;
            merge_scale(all_top, top, &joint, &before, &mine);
            all_total = fma_of(all_total, before, total * mine);
            all_top = joint;
            barrier();
            if (j == 0) {
                shrink[h] = before;
                part_shrink[h] = mine;
            }
            barrier();
            UNROLL for (int head = 0; head < HEADS; head++)
                UNROLL for (int x = 0; x < COLUMNS; x++)
                    all[head][x] = fma_of(all[head][x], shrink[head], acc[head][x] * part_shrink[head]);
        }
    }
    if (!sums) {
        barrier();
        if (j == 0) totals[h] = all_total;
        barrier();
        UNROLL for (int head = 0; head < HEADS; head++)
            UNROLL for (int x = 0; x < COLUMNS; x++) {
                int k = tid() + x * 256;
                if (k < latent && h0 + head < heads)
                    mixed[((long long)r * heads + h0 + head) * latent + k] = totals[head] > 0.0f || is_nan(totals[head]) ? all[head][x] / totals[head] : 0.0f;
            }
    }
}

// mixed[r, h] from the parts' sums. Blocks (head, row).
KERNEL BOUNDS(256) mla_merge(const float* sums, int parts, int heads, int latent, int row0, float* mixed) {
    begin_next();
    await_ahead();
    int h = block_x();
    const float* from = sums + ((long long)block_y() * heads + h) * parts * (latent + 2);
    float* to = mixed + ((long long)(row0 + block_y()) * heads + h) * latent;
    for (int k = tid(); k < latent; k += threads()) {
        float top = -infinity(), total = 0.0f, v = 0.0f;
        UNROLL_8 for (int i = 0; i < parts; i++) {
            const float* part = from + (long long)i * (latent + 2);
            float part_top = part[latent], part_total = part[latent + 1], part_v = part[k], joint, before, mine;
            if (part_top == -infinity()) part_v = 0.0f; // nothing may be written there
            merge_scale(top, part_top, &joint, &before, &mine);
            total = fma_of(total, before, part_total * mine);
            v = fma_of(v, before, part_v * mine);
            top = joint;
        }
        to[k] = total > 0.0f || is_nan(total) ? v / total : 0.0f;
    }
}

// out[r, h, i] = Wv[h, i] . mixed[r, h]: a warp per output, eight rows at a time. Blocks (heads * v / 8, 8 rows).
KERNEL BOUNDS(256) mla_out(const float* mixed, Matrix kv_b, int heads, int qk, int v, int rows, float* out) {
    begin_next();
    await_ahead();
    int o = block_x() * 8 + (tid() >> 5), r0 = block_y() * 8, n = min_of(8, rows - r0), latent = kv_b.cols;
    if (o >= heads * v) return;
    int h = o / v;
    Row row = row_of(kv_b, 0, h * (qk + v) + qk + o % v);
    bool wide = latent % 4 == 0;
    float acc[8] = {};
    for (int k = lane_id() * 8; k < latent; k += 256) {
        float w[8];
        load8_any(kv_b, row, k, w);
        UNROLL for (int r = 0; r < 8; r++)
            if (r < n) {
                float x[8];
                load8_row(mixed + ((long long)(r0 + r) * heads + h) * latent, k, latent, wide, x);
                UNROLL for (int i = 0; i < 8; i++) acc[r] = fma_of(w[i], x[i], acc[r]);
            }
    }
    UNROLL for (int r = 0; r < 8; r++) {
        float sum = warp_sum(acc[r]);
        if (r < n && lane_id() == 0) out[(long long)(r0 + r) * heads * v + o] = sum;
    }
}
