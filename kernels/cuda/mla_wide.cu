// Latent attention of many rows on Hopper's wgmma (sm_90a): `mla_fold_wide` (queries onto the latent), `mla_attend_wide` (64 heads of a row through
// all of its chosen rows) and `mla_out_wide` (through the values' weights). The bits are those of the kernels for few rows: the same 16 elements of
// K per instruction, the same chains, the same joins in the same order.
//
// Between them lie images of bf16 in lines of 128 bytes of which piece j of 16 bytes is at j ^ (line & 7), as the 128-byte swizzle wants it:
// - folded queries: `[row][chunk of 64 latents][head, padded to a multiple of 8][128 bytes]`, so that a row's heads are the M of a product;
// - mixed latents: `[head][chunk of 64 latents][row, padded to a multiple of 8][128 bytes]`, columns permuted for BF16 weights (hopper.cuh).
//
// Neighbours: mla_mma.cu (few rows, other chips), wide.cuh (products of many rows), cuda/mla.rs (which kernels when).
#define WEIGHT 2
#include "ahead.cuh"
#include "mla.cuh"
#include "step.cuh"
#include "wide.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define LINES (64 * 128)    // bytes of a chunk of 64 lines
#define CHUNKS (LATENT / 64)

// Operands in chunks: K along the lines (hopper.cuh), or, of B, K from line to line and N (64) along them. `start` is what `start_of` makes of where a
// chunk begins; what is further on is added in units of 16 bytes.
DEVICE u32 start_of(u32 at) { return at >> 4 | 1u << 16; }
DEVICE u64 operand_at(u32 start, int units) {
    u64 d;
    asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(start + units), "r"(64u | 1u << 30));
    return d;
}

#define SUMS_32 C8(0), C8(8), C8(16), C8(24)
#define LIST_32 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
    "%30, %31}, "

// c (64 x 64) = a * b (+ c where `add`): both from shared memory, K along the lines.
DEVICE void scores_of(float* c, u64 a, u64 b, int add) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " LIST_32 "%32, %33, p, 1, 1, 0, 0;\n"
                 "}"
                 : SUMS_32
                 : "l"(a), "l"(b), "r"(add));
}
// The same with a from registers, and b's K from line to line.
DEVICE void through_lines(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " LIST_32 "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n"
                 "}"
                 : SUMS_32
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}
// Makes what ordinary stores and cp.async wrote, and this thread may see, visible to wgmma and bulk copies.
DEVICE void to_engines() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// A barrier of one warpgroup.
DEVICE void meet_group(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }
// `gate` counts one arrival when all of this thread's cp.async so far have come.
DEVICE void gate_follow(u32 gate) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(gate) : "memory"); }
// Sixteen bytes on their way to shared memory; zeros where `token` is less than 0.
DEVICE void fetch16_of(u32 to, const void* from, int token) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.lt.s32 p, %2, 0;\n"
                 "cp.async.cg.shared.global [%0], [%1], 16, p;\n"
                 "}" ::"r"(to), "l"(from), "r"(token)
                 : "memory");
}

// folded[r, h] = sum over d of q[r, h, d] Wk[h, d]. Blocks (halves of the latent, heads) of two warpgroups: the half's weights stay in shared memory
// as B, each warpgroup takes 64 rows at a time from registers. Shares of 32 d are summed apart and added in ascending order. For the release's 256 d.
#define FOLD_SHARES 8
#define FOLD_DIM (32 * FOLD_SHARES)
KERNEL __launch_bounds__(256, 1) mla_fold_wide(const float* q, Matrix kv_b, int heads, int v, int rows, u8* folded, int padded) {
    extern SHARED u8 space[];
    const int qk = FOLD_DIM;
    u32 weights = (shared_at(space) + 1023) & ~1023u; // [4 chunks][qk lines]
    int h = block_y(), lane = lane_id(), g = lane >> 2, t = lane & 3, warp = one_for_all(tid() >> 5);
    const u8* first = kv_b.q + ((long long)h * (qk + v) >> 4) * 16 * kv_b.q_row + block_x() * (4 * 2048);
    begin_next();
    for (int i = tid(); i < qk * 32; i += 256) {
        int in = i & 127, step = i >> 7 & 3, tile = i >> 9, d = tile * 16 + (in >> 6) * 8 + (in >> 2 & 7), piece = (in & 3) * 2 + (in >> 5 & 1);
        const u8* from = first + (long long)tile * 16 * kv_b.q_row + step * 2048 + in * 16;
        copy_ahead<16>(weights + (step * qk + d) * 128 + ((piece ^ (d & 7)) << 4), from);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    to_engines();
    barrier();
    await_ahead();
    for (int r0 = (warp >> 2) * 64; r0 < rows; r0 += 128) {
        int row_a = r0 + (warp & 3) * 16 + g, row_b = row_a + 8;
        const float* at_a = q + ((long long)min_of(row_a, rows - 1) * heads + h) * qk + 2 * t;
        const float* at_b = q + ((long long)min_of(row_b, rows - 1) * heads + h) * qk + 2 * t;
        u32 a[2 * FOLD_SHARES][4];
        UNROLL for (int k = 0; k < 2 * FOLD_SHARES; k++) {
            float2 x[4] = {*(const float2*)(at_a + 16 * k), *(const float2*)(at_b + 16 * k), *(const float2*)(at_a + 16 * k + 8),
                           *(const float2*)(at_b + 16 * k + 8)};
            UNROLL for (int i = 0; i < 4; i++) a[k][i] = pair(x[i].x, x[i].y);
        }
        UNROLL_1 for (int c = 0; c < 4; c++) {
            float total[32], acc[2][32];
            u32 chunk = start_of(weights + c * qk * 128);
            auto issue = [&](int s) {
                wgmma_begin();
                UNROLL for (int k = 2 * s; k < 2 * s + 2; k++)
                    through_lines(acc[s & 1], a[k][0], a[k][1], a[k][2], a[k][3], operand_at(chunk, k * 128), k & 1);
                wgmma_commit();
            };
            UNROLL for (int i = 0; i < 32; i++) total[i] = 0.0f;
            issue(0);
            UNROLL for (int s = 0; s < FOLD_SHARES; s++) {
                if (s + 1 < FOLD_SHARES) {
                    issue(s + 1);
                    wgmma_wait<1>();
                } else {
                    wgmma_wait<0>();
                }
                UNROLL for (int i = 0; i < 32; i++) total[i] += acc[s & 1][i];
            }
            UNROLL for (int i = 0; i < 4; i++) {
                // Of row g or g + 8, pieces of one half of the line: each lane has 4 bytes of all four, and is to have one piece.
                int half = i & 1, b = i >> 1, row = b ? row_b : row_a;
                u32 x[4];
                UNROLL for (int k = 0; k < 4; k++) {
                    const float* two = total + 16 * half + 4 * k + 2 * b;
                    x[k] = (u32)to_bf16(two[0]) | (u32)to_bf16(two[1]) << 16;
                }
                UNROLL for (int m = 1; m < 4; m <<= 1)
                    UNROLL for (int k = 0; k < 4; k++)
                        if (!(k & m)) {
                            u32 got = shuffle_bits(t & m ? x[k] : x[k | m], lane ^ m);
                            if (t & m) x[k] = got;
                            else x[k | m] = got;
                        }
                uint4 piece = {x[0], x[1], x[2], x[3]};
                long long line = ((long long)row * CHUNKS + block_x() * 4 + c) * padded + h;
                if (row < rows) *(uint4*)(folded + line * 128 + (((4 * half + t) ^ (h & 7)) << 4)) = piece;
            }
        }
    }
}

// Shared memory of a block of mla_attend_wide, from a multiple of 1024 on (cuda/driver.rs gives it).
struct Attending {
    u8 q[CHUNKS * LINES];          // [chunk][head]
    u8 c[2][CHUNKS * LINES];       // [part & 1][chunk][chosen row]
    uint4 weights[2][4][128];      // [part & 1]: as A of wgmma, registers 4 i .. 4 i + 3 of each thread of a warpgroup
    float2 factors[2][64];         // [part & 1][head]: how the part's sums join those before it
    float scales[2][64];           // of a row's last part: what the joint sum is multiplied by
    int said[2][2];                // [part & 1]: the piece of work, and what the part is to it
    u64 here[2][CHUNKS], done[2][CHUNKS], weighed[2], read[2], asked; // gates
};
static_assert(sizeof(Attending) <= 211 << 10, "more than a launch asks for");
#define LAST_OF_ROW 1
#define LAST 2

// The parts of a block's rows in order. Work is numbered (row, group of 64 heads).
struct Parts {
    const int *chosen, *pages;
    int work, all_work, limit, part, parts; // limit: tokens that the sequence's pages hold

    DEVICE_MEMBER bool any() const { return work < all_work; }
    DEVICE_MEMBER void begin_row(const Step& b, const int* selected, int width, int row0, int groups, int page_tokens) {
        part = parts = 0;
        if (!any()) return;
        int r = row0 + work / groups, all = div_up(width, PART);
        chosen = selected + (long long)r * width;
        Segment s = b.segments[b.row_segment[r]];
        limit = s.pages * page_tokens;
        pages = b.pages + s.page0;
        // Parts that hold anything: positions are ascending, and -1 behind them. A row without any has one in which nothing is there.
        for (u32 some = ~0u; some == ~0u && parts < all;) {
            int p = parts + lane_id();
            some = votes(p < all && chosen[p * PART] >= 0);
            parts += some == ~0u ? 32 : first_of(~some);
        }
        parts = max_of(parts, 1);
    }
    // The position that is row `i` of the part; -1: none.
    DEVICE_MEMBER int position(int i, int width) const {
        int at = part * PART + i, pos = at < width ? chosen[at] : -1;
        return pos < limit ? pos : -1;
    }
};

// mixed[r, h]: a block takes 64 heads of a row through all of the row's parts, then those of another row. Warpgroup 0 makes scores and weights;
// 1 and 2 share the sums' columns, chunk by chunk in turns, and keep the joint sums in registers; 3 fetches chunks to where one is done with.
KERNEL __launch_bounds__(512, 1)
mla_attend_wide(Step b, const u8* folded, int padded, const u16* cache, int page_tokens, int layers, int layer, const int* selected, int width, int row0,
                int rows, int heads, float scale, u8* mixed, int image_rows) {
    extern SHARED u8 space[];
    u32 base = (shared_at(space) + 1023) & ~1023u;
    Attending& m = *(Attending*)(space + (base - shared_at(space)));
    u32 here = shared_at(m.here), done = shared_at(m.done), weighed = shared_at(m.weighed), read = shared_at(m.read), asked = shared_at(&m.asked);
    int lane = lane_id(), g = lane >> 2, t = lane & 3, warp = one_for_all(tid() >> 5), groups = div_up(heads, 64);
    begin_next();
    if (tid() == 0) {
        for (int i = 0; i < 2 * CHUNKS; i++) {
            gate_open(here + 8 * i, 128);
            gate_open(done + 8 * i, 4);
        }
        for (int i = 0; i < 2; i++) {
            gate_open(weighed + 8 * i, 128); // each thread answers for what it wrote or read: racecheck follows that
            gate_open(read + 8 * i, 256);
        }
        gate_open(asked, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (padded & 63) // lines of heads that are not there
        for (int i = tid(); i < CHUNKS * LINES / 16; i += 512) ((uint4*)m.q)[i] = {0, 0, 0, 0};
    to_engines();
    barrier();
    await_ahead();
    Parts at = {selected, b.pages, block_x(), rows * groups, 0, 0, 0};
    if (warp < 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 96;");
        // Which rows of the next part are there, and whether the row ends with it.
        struct Part {
            int work, last;
            u32 low, high;
        };
        auto look_up = [&] {
            Part p = {at.work, at.part + 1 == at.parts, 0, 0};
            if (!at.any()) return p;
            p.low = votes(at.position(lane, width) >= 0);
            p.high = votes(at.position(lane + 32, width) >= 0);
            if (++at.part == at.parts) {
                at.work += blocks_x();
                at.begin_row(b, selected, width, row0, groups, page_tokens);
            }
            return p;
        };
        // The queries of a piece of work.
        auto ask = [&](int work) {
            int h0 = work % groups * 64, lines = min_of(padded - h0, 64);
            const u8* from = folded + ((long long)(work / groups) * CHUNKS * padded + h0) * 128;
            gate_expect(asked, CHUNKS * lines * 128);
            UNROLL_1 for (int c = 0; c < CHUNKS; c++) bring(base + c * LINES, from + (long long)c * padded * 128, lines * 128, asked);
        };
        if (tid() == 0) ask(at.work);
        at.begin_row(b, selected, width, row0, groups, page_tokens);
        Part now = look_up();
        float run_top = -infinity(), run_total = 0.0f; // of head g + 8 (t & 1) of the warp's
        u32 row_parity = 0;
        bool fresh = true;
        for (u32 n = 0; now.work < at.all_work; n++) {
            u32 stage = n & 1, parity = n >> 1 & 1;
            if (fresh) {
                gate_wait(asked, row_parity);
                row_parity ^= 1;
            }
            float score[2][32]; // even and odd steps
            u32 q_at = start_of(base), c_at = start_of(shared_at(m.c[stage]));
            UNROLL for (int half = 0; half < 2; half++) {
                UNROLL for (int c = 0; c < CHUNKS / 2; c++) gate_wait(here + 8 * (stage * CHUNKS + half * CHUNKS / 2 + c), parity);
                to_engines();
                wgmma_begin();
                UNROLL for (int k = half * CHUNKS * 2; k < (half + 1) * CHUNKS * 2; k++) {
                    int in = k / 4 * (LINES / 16) + k % 4 * 2;
                    scores_of(score[k & 1], operand_at(q_at, in), operand_at(c_at, in), k > 1);
                }
                wgmma_commit();
            }
            Part next = look_up();
            wgmma_wait<0>();
            if (now.last) {
                meet_group(2); // all have read the queries
                if (tid() == 0 && next.work < at.all_work) ask(next.work);
            }
            float* w = score[0];
            float tops[2][2]; // of each head two, which need not wait for each other
            bool whole = (now.low & now.high) == ~0u;
            UNROLL for (int i = 0; i < 32; i++) w[i] = score[0][i] + score[1][i];
            if (!whole)
                UNROLL for (int i = 0; i < 32; i++)
                    if (!((i < 16 ? now.low : now.high) >> ((i >> 2 & 3) * 8 + t * 2 + (i & 1)) & 1)) w[i] = -infinity();
            UNROLL for (int i = 0; i < 4; i++) tops[i >> 1][i & 1] = w[i];
            UNROLL for (int i = 4; i < 32; i++) tops[i >> 1 & 1][i & 1] = most_of(tops[i >> 1 & 1][i & 1], w[i]);
            float top[2], bases[2];
            UNROLL for (int i = 0; i < 2; i++) {
                top[i] = most_of(tops[i][0], tops[i][1]);
                top[i] = most_of(top[i], shuffle(top[i], lane ^ 1));
                top[i] = most_of(top[i], shuffle(top[i], lane ^ 2));
                bases[i] = base_of(top[i], scale);
            }
            UNROLL for (int i = 0; i < 32; i++) w[i] = weight_of(w[i], bases[i >> 1 & 1], scale);
            if (!whole)
                UNROLL for (int i = 0; i < 32; i++)
                    if (!((i < 16 ? now.low : now.high) >> ((i >> 2 & 3) * 8 + t * 2 + (i & 1)) & 1)) w[i] = 0.0f;
            gate_wait(read + 8 * stage, parity ^ 1);
            UNROLL for (int i = 0; i < 4; i++) {
                const float* e = w + 8 * i;
                uint4 a = {pair(e[0], e[1]), pair(e[2], e[3]), pair(e[4], e[5]), pair(e[6], e[7])};
                m.weights[stage][i][tid()] = a;
            }
            // Sums of 8 rows each over the four lanes, as pairs of pairs, and these in ascending order: lanes with an even t end with head g's, the
            // others with those of head g + 8; of each, lanes 0 and 1 have the first four groups of rows, 2 and 3 the others.
            float some[8];
            UNROLL for (int j = 0; j < 8; j++) {
                float one = w[4 * j] + w[4 * j + 1], two = w[4 * j + 2] + w[4 * j + 3];
                some[j] = (t & 1 ? two : one) + shuffle(t & 1 ? one : two, lane ^ 1);
            }
            UNROLL for (int j = 0; j < 4; j++) some[j] = (t & 2 ? some[j + 4] : some[j]) + shuffle(t & 2 ? some[j] : some[j + 4], lane ^ 2);
            float total = shuffle(((some[0] + some[1]) + some[2]) + some[3], lane & ~2);
            UNROLL for (int j = 0; j < 4; j++) total += some[j];
            float most = (t & 1 ? top[1] : top[0]) * scale;
            if (is_nan(total)) most = total; // which no largest score shows
            float joint = at_least(run_top, most);
            float2 f;
            join_factors(run_top, most, joint, &f.x, &f.y);
            run_total = fma_of(run_total, f.x, total * f.y);
            run_top = joint;
            if (t >= 2) {
                int head = warp * 16 + g + 8 * (t & 1);
                m.factors[stage][head] = f;
                if (now.last) m.scales[stage][head] = run_total > 0.0f || is_nan(run_total) ? 1.0f / run_total : 0.0f;
            }
            if (tid() == 0) {
                m.said[stage][0] = now.work;
                m.said[stage][1] = (now.last ? LAST_OF_ROW : 0) | (next.work < at.all_work ? 0 : LAST);
            }
            gate_arrive(weighed + 8 * stage, true);
            fresh = now.last;
            if (now.last) {
                run_top = -infinity();
                run_total = 0.0f;
            }
            now = next;
        }
    } else if (warp < 12) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
        int own = (warp >> 2) - 1, head = (warp & 3) * 16 + g, what = 0;
        float all[CHUNKS / 2][32];
        UNROLL for (int c = 0; c < CHUNKS / 2; c++)
            UNROLL for (int i = 0; i < 32; i++) all[c][i] = 0.0f;
        for (u32 n = 0; !(what & LAST); n++) {
            u32 stage = n & 1, c_at = start_of(shared_at(m.c[stage]) + own * LINES);
            gate_wait(weighed + 8 * stage, n >> 1 & 1);
            uint4 w[4];
            UNROLL for (int i = 0; i < 4; i++) w[i] = m.weights[stage][i][tid() & 127];
            float2 f = m.factors[stage][head], f8 = m.factors[stage][head + 8];
            what = one_for_all(m.said[stage][1]);
            bool nothing = votes(f.y == 0.0f || f8.y == 0.0f) != 0;
            UNROLL for (int c = 0; c < CHUNKS / 2; c++) {
                float acc[32];
                wgmma_begin();
                UNROLL for (int k = 0; k < 4; k++)
                    through_lines(acc, w[k].x, w[k].y, w[k].z, w[k].w, operand_at(c_at, c * (2 * LINES / 16) + k * 128), k > 0);
                wgmma_commit();
                wgmma_wait<0>();
                gate_arrive(done + 8 * (stage * CHUNKS + 2 * c + own), lane == 0);
                if (nothing) // what counts for nothing may be anything
                    UNROLL for (int i = 0; i < 32; i++) acc[i] = (i & 2 ? f8.y : f.y) == 0.0f ? 0.0f : acc[i];
                UNROLL for (int i = 0; i < 32; i++) all[c][i] = fma_of(all[c][i], i & 2 ? f8.x : f.x, acc[i] * (i & 2 ? f8.y : f.y));
            }
            if (what & LAST_OF_ROW) {
                int work = one_for_all(m.said[stage][0]), r = work / groups, h0 = work % groups * 64 + head;
                float inv[2] = {m.scales[stage][head], m.scales[stage][head + 8]};
                UNROLL for (int c = 0; c < CHUNKS / 2; c++)
                    UNROLL for (int i = 0; i < 4; i++) {
                        int upper = i >> 1, half = i & 1, h = h0 + 8 * upper;
                        u32 x[4];
                        UNROLL for (int k = 0; k < 4; k++) {
                            const float* two = all[c] + 4 * (2 * k + half) + 2 * upper;
                            x[k] = pair(two[0] * inv[upper], two[1] * inv[upper]);
                        }
                        uint4 four = {x[0], x[1], x[2], x[3]};
                        u8* to = mixed + (((long long)h * CHUNKS + 2 * c + own) * image_rows + r) * 128;
                        if (h < heads) *(uint4*)(to + (((4 * half + t) ^ (r & 7)) << 4)) = four;
                    }
                UNROLL for (int c = 0; c < CHUNKS / 2; c++)
                    UNROLL for (int i = 0; i < 32; i++) all[c][i] = 0.0f;
            }
            gate_arrive(read + 8 * stage, true);
        }
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        // Of each chunk a thread fetches a piece of 16 bytes of rows `line`, `line` + 16 and so on.
        int line = (tid() & 127) >> 3, piece = tid() & 7;
        u32 to = shared_at(m.c[0]) + line * 128 + ((piece ^ (line & 7)) << 4);
        const u16* from = cache + piece * 8;
        at.begin_row(b, selected, width, row0, groups, page_tokens);
        for (u32 n = 0; at.any(); n++) {
            int pos = at.position(line + 16 * (lane & 3), width), token = -1, tokens[4];
            if (pos >= 0) token = (at.pages[pos / page_tokens] * layers + layer) * page_tokens + pos % page_tokens;
            UNROLL for (int i = 0; i < 4; i++) tokens[i] = (int)shuffle_bits((u32)token, (lane & ~7) + i);
            u32 stage = n & 1;
            UNROLL for (int c = 0; c < CHUNKS; c++) {
                gate_wait(done + 8 * (stage * CHUNKS + c), (n >> 1 & 1) ^ 1);
                UNROLL for (int i = 0; i < 4; i++)
                    fetch16_of(to + stage * (CHUNKS * LINES) + c * LINES + i * 16 * 128, from + (long long)max_of(tokens[i], 0) * LATENT + c * 64,
                               tokens[i]);
                gate_follow(here + 8 * (stage * CHUNKS + c));
            }
            if (++at.part == at.parts) {
                at.work += blocks_x();
                at.begin_row(b, selected, width, row0, groups, page_tokens);
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    }
}

// out[r, h, i] = Wv[h, i] . mixed[r, h]. Blocks (any number, heads).
KERNEL WIDE_BOUNDS mla_out_wide(Matrix kv_b, int heads, int qk, int v, int rows, const u8* mixed, int image_rows, float* out) {
    int h = block_y();
    begin_next();
    await_ahead();
    kv_b.q += (((long long)h * (qk + v) + qk) >> 4) * 16 * kv_b.q_row;
    kv_b.rows = v;
    Tokens all = {(const int*)0, (const int*)0, 1, rows};
    Outlet to = {out + h * v, (long long)heads * v, 0.0f, (u8*)0, 0, 0, 0};
    wide_products<false>(kv_b, all, mixed + (long long)h * CHUNKS * image_rows * 128, image_rows, 2, to); // halves of the latent, as in mla_out_mma
}

#endif
