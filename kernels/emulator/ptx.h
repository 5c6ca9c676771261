// Instructions of PTX as functions: `asm("mma.sync...." : outputs : inputs)` has become `ptx::mma_sync...(operands)`, in the order of the template
// (kernels/examples/emulated_pack.rs). What is asynchronous there is done at once here. Neighbours: fibers.h, device.h.
#pragma once
#include "device.h"

namespace ptx {

static char* at(unsigned place) { return (char*)shared + (int)place; }
static float from_bf16(uint64_t bits) { return __uint_as_float((unsigned)(bits & 0xffff) << 16); }
// To nearest, ties to even, of a number that f32 need not hold.
static unsigned to_bf16(double d) {
    float f = (float)d;
    unsigned bits = __float_as_uint(f);
    if (f != f) return bits >> 16 | 0x40;
    if ((double)f != d) {
        if (std::fabs((double)f) > std::fabs(d)) bits--;
        bits |= 1;
    }
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static float from_half(uint64_t bits) {
    uint16_t low = (uint16_t)bits;
    _Float16 h;
    memcpy(&h, &low, 2);
    return (float)h;
}
// c += a (16 x 16) * b (16 x 8), of two numbers to a register.
template <float (*OF)(uint64_t)>
static void mma_k16(float** c, const emu::Operands* all) {
    int lane = emu::lane(), row = lane >> 2, col = (lane & 3) * 2;
    for (int i = 0; i < 4; i++) {
        double sum = *c[i];
        for (int k = 0; k < 16; k++) {
            uint64_t a = all[row * 4 + (k & 7) / 2].v[(i >> 1) + 2 * (k >> 3)], b = all[(col + (i & 1)) * 4 + (k & 7) / 2].v[4 + (k >> 3)];
            sum += (double)OF(a >> (16 * (k & 1))) * OF(b >> (16 * (k & 1)));
        }
        *c[i] = (float)sum;
    }
}
static void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1, unsigned a2,
                                                                unsigned a3, unsigned b0, unsigned b1, float, float, float, float) {
    float* c[4] = {&c0, &c1, &c2, &c3};
    mma_k16<from_bf16>(c, emu::together({a0, a1, a2, a3, b0, b1}));
}
static void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1, unsigned a2,
                                                              unsigned a3, unsigned b0, unsigned b1, float, float, float, float) {
    float* c[4] = {&c0, &c1, &c2, &c3};
    mma_k16<from_half>(c, emu::together({a0, a1, a2, a3, b0, b1}));
}

// A number of 19 bits: what the others hold does not count.
static double from_tf32(uint64_t bits) { return __uint_as_float((unsigned)bits & 0xffffe000u); }
static void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1, unsigned a2,
                                                               unsigned a3, unsigned b0, unsigned b1, float, float, float, float) {
    auto all = emu::together({a0, a1, a2, a3, b0, b1});
    int lane = emu::lane(), row = lane >> 2, col = (lane & 3) * 2;
    float* c[4] = {&c0, &c1, &c2, &c3};
    for (int i = 0; i < 4; i++) {
        double sum = *c[i];
        for (int k = 0; k < 8; k++)
            sum += from_tf32(all[row * 4 + (k & 3)].v[(i >> 1) + 2 * (k >> 2)]) * from_tf32(all[(col + (i & 1)) * 4 + (k & 3)].v[4 + (k >> 2)]);
        *c[i] = (float)sum;
    }
}

static void load_matrices(bool across, unsigned** out, unsigned place) {
    auto all = emu::together({(uint64_t)(uintptr_t)at(place)});
    int lane = emu::lane(), row = lane >> 2, col = (lane & 3) * 2;
    for (int m = 0; m < 4; m++) {
        uint16_t two[2];
        for (int i = 0; i < 2; i++) {
            int r = across ? col + i : row, c = across ? row : col + i;
            two[i] = ((const uint16_t*)(uintptr_t)all[m * 8 + r].v[0])[c];
        }
        *out[m] = (unsigned)two[1] << 16 | two[0];
    }
    emu::together({}); // nobody writes there before all have read
}
static void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned place) {
    unsigned* out[4] = {&a, &b, &c, &d};
    load_matrices(false, out, place);
}
static void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned place) {
    unsigned* out[4] = {&a, &b, &c, &d};
    load_matrices(true, out, place);
}

// Copies to shared memory are there at once.
static void cp_async_cg_shared_global(unsigned to, const void* from, int size, int bytes) {
    memset(at(to), 0, size);
    memcpy(at(to), from, bytes);
}
static void cp_async_cg_shared_global(unsigned to, const void* from, int size, bool ignored) {
    cp_async_cg_shared_global(to, from, size, ignored ? 0 : size);
}
static void cp_async_cg_shared_global(unsigned to, const void* from, int size) { memcpy(at(to), from, size); }
static void cp_async_ca_shared_global(unsigned to, const void* from, int size) { memcpy(at(to), from, size); }
static void cp_async_cg_shared_global_L2__cache_hint(unsigned to, const void* from, int size, uint64_t) { memcpy(at(to), from, size); }
static void createpolicy_fractional_L2__evict_first_b64(unsigned long long& policy, double) { policy = 0; }
static void cp_async_commit_group() {}
static void cp_async_wait_group(int) {}
static void cp_async_wait_all() {}

// A named barrier: the last that comes lets the others go on at once, and the next round begins.
static bool last_to_come(int id, int threads) {
    if (++emu::block->arrived[id] < threads) return false;
    emu::block->arrived[id] = 0;
    emu::release(emu::Wait::Named, id);
    return true;
}
static void bar_arrive(int id, int threads) { last_to_come(id, threads); }
static void bar_sync(int id, int threads) {
    if (!last_to_come(id, threads)) emu::wait(emu::Wait::Named, id);
}

// The cluster's barrier: all its threads come to both halves one after the other, and wait at the second.
static void barrier_cluster_arrive_release_aligned() {}
static void barrier_cluster_wait_acquire_aligned() { emu::wait(emu::Wait::Cluster); }
// Addresses in the cluster's shared memory: a block's number over 24 bits of the place in its own.
static void mapa_shared__cluster_u32(unsigned& out, unsigned place, int rank) { out = (unsigned)rank << 24 | (place & 0xffffff); }
static void ld_shared__cluster_v2_u32(unsigned& a, unsigned& b, unsigned place) {
    const char* from = emu::block->cluster->shared[place >> 24] + ((int)(place << 8) >> 8);
    memcpy(&a, from, 4);
    memcpy(&b, from + 4, 4);
}

static void settle(emu::Gate& g) {
    if (g.missing > 0 || g.bytes != 0) return;
    g.phase ^= 1;
    g.missing = g.expected;
}
static void mbarrier_init_shared__cta_b64(unsigned gate, int arrivals) { emu::gate_at(gate) = {0, (uint32_t)arrivals, (uint32_t)arrivals, 0}; }
static void mbarrier_arrive_shared__cta_b64(unsigned gate) {
    emu::gate_at(gate).missing--;
    settle(emu::gate_at(gate));
}
static void mbarrier_arrive_expect_tx_shared__cta_b64(unsigned gate, int bytes) {
    emu::gate_at(gate).bytes += bytes;
    mbarrier_arrive_shared__cta_b64(gate);
}
static void cp_async_mbarrier_arrive_noinc_shared__cta_b64(unsigned gate) { mbarrier_arrive_shared__cta_b64(gate); }
static void mbarrier_try_wait_parity_shared__cta_b64(unsigned gate, unsigned parity) {
    if (emu::gate_at(gate).phase == parity) emu::wait(emu::Wait::Gate, gate, parity);
}
static void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(unsigned to, const void* from, int bytes, unsigned gate) {
    memcpy(at(to), from, bytes);
    emu::gate_at(gate).bytes -= bytes;
    settle(emu::gate_at(gate));
}
static void cp_async_bulk_global_shared__cta_bulk_group(void* to, unsigned from, int bytes) { memcpy(to, at(from), bytes); }
static void cp_async_bulk_commit_group() {}
static void cp_async_bulk_wait_group(int) {}
static void cp_async_bulk_wait_group_read(int) {}
static void fence_mbarrier_init_release_cluster() {}
static void fence_proxy_async_shared__cta() {}
static void setmaxnreg_dec_sync_aligned_u32(int) {}
static void setmaxnreg_inc_sync_aligned_u32(int) {}
static void griddepcontrol_launch_dependents() {}
static void griddepcontrol_wait() {}
static void wgmma_fence_sync_aligned() {}
static void wgmma_commit_group_sync_aligned() {}
static void wgmma_wait_group_sync_aligned(int) {}
static void st_shared_u16(unsigned to, unsigned short v) { memcpy(at(to), &v, 2); }
static void mov_b64(unsigned long long& d, unsigned low, unsigned high) { d = (uint64_t)high << 32 | low; }

// Element (line, along) of an operand in lines of 128 bytes under the 128-byte swizzle; eight lines lie in 1024 bytes.
static float of_lines(uint64_t operand, int line, int along) {
    unsigned place = ((unsigned)operand & 0x3fff) << 4;
    place += line * 128 + along * 2;
    place ^= (place >> 7 & 7) << 4;
    return from_bf16(*(const uint16_t*)at(place));
}
// A warp's 16 rows of c (64 x N) = a b, and + c where `add`. a: from registers, or (`lines`) rows of K from shared memory; b: N lines of K, or
// (`across`) 16 lines of N.
template <int N>
static void multiply(float** c, const uint32_t* a, bool lines, uint64_t a_operand, uint64_t b, bool add, bool across) {
    auto all = emu::together({a[0], a[1], a[2], a[3]});
    int lane = emu::lane(), warp = emu::block->current >> 5 & 3, g = lane >> 2, q = (lane & 3) * 2;
    for (int i = 0; i < 2; i++) {
        float row[16];
        for (int k = 0; k < 16; k++)
            row[k] = lines ? of_lines(a_operand, warp * 16 + g + 8 * i, k) : from_bf16(all[g * 4 + (k & 7) / 2].v[i + 2 * (k >> 3)] >> (16 * (k & 1)));
        for (int n = 0; n < N / 4; n++) {
            int col = n / 2 * 8 + q + (n & 1);
            float& to = *c[n / 2 * 4 + i * 2 + (n & 1)];
            double sum = add ? to : 0.0f;
            for (int k = 0; k < 16; k++) sum += (double)row[k] * (across ? of_lines(b, k, col) : of_lines(b, col, k));
            to = (float)sum;
        }
    }
    emu::together({}); // no warp changes what another one still reads
}
template <class T> static uint64_t plain(const T& v) { return (uint64_t)v; }
template <class T> static float* place(T& v) {
    if constexpr (std::is_same_v<T, float>) return &v;
    else return nullptr;
}
// Sums, then a (one operand or four registers), b, whether sums are added to, two signs, and which operands lie across (of a only in shared memory).
template <int N, class... T>
static void wgmma(T&&... v) {
    float* c[] = {place(v)...};
    uint64_t all[] = {(place(v) ? 0 : plain(v))...};
    const int SUMS = N / 2, REST = sizeof...(T) - SUMS;
    const uint64_t* rest = all + SUMS;
    uint32_t none[4] = {}, a[4] = {(uint32_t)rest[0], (uint32_t)rest[1], (uint32_t)rest[2], (uint32_t)rest[3]};
    if (REST == 7) multiply<N>(c, none, true, rest[0], rest[1], rest[2] != 0, rest[6] != 0);
    else multiply<N>(c, a, false, 0, rest[4], rest[5] != 0, rest[8] != 0);
}
template <class... T> static void wgmma_mma_async_sync_aligned_m64n64k16_f32_bf16_bf16(T&&... v) { wgmma<64>(v...); }
template <class... T> static void wgmma_mma_async_sync_aligned_m64n128k16_f32_bf16_bf16(T&&... v) { wgmma<128>(v...); }

static void cvt_rn_bf16x2_f32(unsigned& d, float high, float low) { d = to_bf16(high) << 16 | to_bf16(low); }
static void cvt_rn_f16x2_f32(unsigned& d, float high, float low) {
    _Float16 two[2] = {(_Float16)low, (_Float16)high};
    memcpy(&d, two, 4);
}
static void cvt_f32_f16(float& f, unsigned short v) { _Float16 h; memcpy(&h, &v, 2); f = (float)h; }
static float e4m3(unsigned b) {
    float v = __uint_as_float((b & 0x80) << 24 | (b & 0x7f) << 20) * 0x1p120f;
    return (b & 0x7f) == 0x7f ? NAN : v;
}
static void cvt_rn_f16x2_e4m3x2(unsigned& d, unsigned short v) {
    _Float16 two[2] = {(_Float16)e4m3(v & 0xff), (_Float16)e4m3(v >> 8)};
    memcpy(&d, two, 4);
}
static void ex2_approx_ftz_f32(float& y, float x) { y = exp2f(x); }
static void rcp_approx_ftz_f32(float& y, float x) { y = 1.0f / x; }
static void fma_rn_bf16x2(unsigned& d, unsigned a, unsigned b, unsigned c) {
    unsigned to = 0;
    for (int s = 0; s < 32; s += 16) to |= to_bf16((double)from_bf16(a >> s) * from_bf16(b >> s) + from_bf16(c >> s)) << s;
    d = to;
}
template <class T> static void load(T& v, const void* p) { memcpy(&v, p, sizeof v); }
static void ld_global_nc_u32(unsigned& v, const void* p) { load(v, p); }
static void ld_global_nc_u16(unsigned short& v, const void* p) { load(v, p); }
static void ld_global_nc_u8(unsigned& v, const void* p) { v = *(const uint8_t*)p; }
static void ld_global_nc_v2_u32(unsigned& a, unsigned& b, const void* p) { load(a, p); load(b, (const char*)p + 4); }
static void ld_global_nc_L1__no_allocate_v2_u32(unsigned& a, unsigned& b, const void* p) { ld_global_nc_v2_u32(a, b, p); }
static void ld_global_nc_L1__no_allocate_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, const void* p) {
    ld_global_nc_v2_u32(a, b, p);
    ld_global_nc_v2_u32(c, d, (const char*)p + 8);
}

} // namespace ptx
