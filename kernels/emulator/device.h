// A GPU that is none: what a unit of kernels needs to run on a CPU, put in front of its source (kernels/examples/emulated_pack.rs compiles it so). Every
// thread of a block is a fiber; a fiber that comes to a barrier, a shuffle or a matrix product waits there until the others have come. Blocks are shared
// by the CPU's cores. Slow, and exact enough for the conformance suite: what a step adds up and in which order is the kernels' own, only the sum inside of
// one matrix instruction is made in f64 here.
//
// Neighbours: fibers.h (how threads wait for each other), ptx.h (instructions).
#pragma once
#include "fibers.h"

#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(x, y, z) EMU_CLUSTER_##x##_##y##_##z // emulated_pack.rs reads it off a kernel's head
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local // a block runs on one thread of the CPU

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

#define threadIdx emu::thread()
#define blockIdx (emu::block->index)
#define blockDim (emu::block->threads)
#define gridDim (emu::block->grid)

static unsigned __float_as_uint(float v) { unsigned u; memcpy(&u, &v, 4); return u; }
static float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
static void __syncthreads() { emu::wait(emu::Wait::Block); }
static void __syncwarp() { emu::together({}); }
static unsigned __shfl_sync(unsigned, unsigned v, int from) { return (unsigned)emu::together({v})[from & 31].v[0]; }
static float __shfl_sync(unsigned, float v, int from) { return __uint_as_float((unsigned)emu::together({__float_as_uint(v)})[from & 31].v[0]); }
static unsigned __ballot_sync(unsigned, bool v) {
    auto all = emu::together({v});
    unsigned votes = 0;
    for (int i = 0; i < 32; i++) votes |= (unsigned)all[i].v[0] << i;
    return votes;
}
static unsigned __reduce_max_sync(unsigned, unsigned v) {
    auto all = emu::together({v});
    uint64_t most = 0;
    for (int i = 0; i < 32; i++) most = std::max(most, all[i].v[0]);
    return (unsigned)most;
}
static int atomicAdd(int* where, int by) { return __atomic_fetch_add(where, by, __ATOMIC_RELAXED); }
static int __popc(unsigned v) { return __builtin_popcount(v); }
static int __ffs(int v) { return __builtin_ffs(v); }
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31)); }
static float __fdividef(float a, float b) { return a / b; }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned how) {
    uint64_t both = (uint64_t)b << 32 | a;
    unsigned to = 0;
    for (int i = 0; i < 4; i++) {
        unsigned select = how >> (4 * i) & 15, byte = (unsigned)(both >> (8 * (select & 7))) & 255;
        to |= (select & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return to;
}
// Shared memory in 32 bits: how far it lies from one place in it.
static unsigned __cvta_generic_to_shared(const void* p) { return (unsigned)(int64_t)((const char*)p - (const char*)shared); }
