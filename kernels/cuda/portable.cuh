// The one dialect that every kernel is written in: CUDA C++ through NVRTC without any header, and AMD's gfx11 through clang's HIP without
// any header. Neighbours: weights.cuh (stored types), mma.cuh (matrix units), the .cu files (kernels).
//
// Rules: warps of 32; no float atomics; sums in an order that the shape alone decides; no library calls beyond what is named here.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __HIP__

#define TANDEM_MMA 0
#define KERNEL extern "C" __attribute__((global)) void
#define DEVICE static inline __attribute__((device)) __attribute__((always_inline))
#define DEVICE_MEMBER inline __attribute__((device)) __attribute__((always_inline))
#define SHARED __attribute__((shared))
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")
#define UNROLL_2 _Pragma("unroll 2")
#define UNROLL_4 _Pragma("unroll 4")
#define UNROLL_8 _Pragma("unroll 8")
#define BOUNDS(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define BOUNDS_2(threads) BOUNDS(threads)
#define BOUNDS_3(threads) BOUNDS(threads)
#define BOUNDS_4(threads) BOUNDS(threads)
#define ALIGNED __attribute__((aligned(16)))
#define RESTRICT __restrict__

struct __attribute__((aligned(16))) float4 { float x, y, z, w; };
struct __attribute__((aligned(16))) uint4 { u32 x, y, z, w; };
struct __attribute__((aligned(8))) uint2 { u32 x, y; };
struct __attribute__((aligned(8))) float2 { float x, y; };

DEVICE int tid() { return (int)__builtin_amdgcn_workitem_id_x(); }
DEVICE int block_x() { return (int)__builtin_amdgcn_workgroup_id_x(); }
DEVICE int block_y() { return (int)__builtin_amdgcn_workgroup_id_y(); }
DEVICE int block_z() { return (int)__builtin_amdgcn_workgroup_id_z(); }
DEVICE int threads() { return (int)__builtin_amdgcn_workgroup_size_x(); }
DEVICE int blocks_x() { return (int)(__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x()); }
DEVICE int blocks_y() { return (int)(__builtin_amdgcn_grid_size_y() / __builtin_amdgcn_workgroup_size_y()); }
DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEVICE void warp_barrier() { __builtin_amdgcn_wave_barrier(); }
DEVICE int lane_id() { return tid() & 31; }
DEVICE u32 shuffle_bits(u32 v, int from) { return (u32)__builtin_amdgcn_ds_bpermute(from << 2, (int)v); }
DEVICE float as_float(u32 v) { return __builtin_bit_cast(float, v); }
DEVICE u32 as_bits(float v) { return __builtin_bit_cast(u32, v); }
DEVICE float shuffle(float v, int from) { return as_float(shuffle_bits(as_bits(v), from)); }
DEVICE float exp_of(float x) { return __builtin_exp2f(x * 1.44269504088896340736f); }
DEVICE float log_of(float x) { return __builtin_log2f(x) * 0.69314718055994530942f; }
DEVICE float sqrt_of(float x) { return __builtin_sqrtf(x); }
DEVICE float fma_of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float half_to_float(u16 v) { return (float)__builtin_bit_cast(_Float16, v); }
DEVICE uint4 load_stream16(const void* p) { return *(const uint4*)p; }
DEVICE uint2 load_stream8(const void* p) { return *(const uint2*)p; }
DEVICE int count_up(int* where, int by) { return __atomic_fetch_add(where, by, __ATOMIC_RELAXED); }
DEVICE u32 votes(bool v) { return __builtin_amdgcn_ballot_w32(v); }
DEVICE int ones(u32 v) { return __builtin_popcount(v); }
DEVICE int first_of(u32 v) { return __builtin_ctz(v); }
DEVICE float quick_inverse(float x) { return __builtin_amdgcn_rcpf(x); }
DEVICE void begin_next() {}
DEVICE void await_ahead() {}
// No barrier here lets a thread go on: both are whole ones.
template <int THREADS>
DEVICE void arrive() { barrier(); }
template <int THREADS>
DEVICE void meet() { barrier(); }

#else

#define TANDEM_MMA 1
#define KERNEL extern "C" __global__ void
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define SHARED __shared__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")
#define UNROLL_2 _Pragma("unroll 2")
#define UNROLL_4 _Pragma("unroll 4")
#define UNROLL_8 _Pragma("unroll 8")
#define BOUNDS(threads) __launch_bounds__(threads)
#define BOUNDS_2(threads) __launch_bounds__(threads, 2) // two blocks at a time
#define BOUNDS_3(threads) __launch_bounds__(threads, 3)
#define BOUNDS_4(threads) __launch_bounds__(threads, 4)
#define ALIGNED __align__(16)
#define RESTRICT __restrict__

DEVICE int tid() { return (int)threadIdx.x; }
DEVICE int block_x() { return (int)blockIdx.x; }
DEVICE int block_y() { return (int)blockIdx.y; }
DEVICE int block_z() { return (int)blockIdx.z; }
DEVICE int threads() { return (int)blockDim.x; }
DEVICE int blocks_x() { return (int)gridDim.x; }
DEVICE int blocks_y() { return (int)gridDim.y; }
DEVICE void barrier() { __syncthreads(); }
DEVICE void warp_barrier() { __syncwarp(); }
DEVICE int lane_id() { return (int)threadIdx.x & 31; }
DEVICE u32 shuffle_bits(u32 v, int from) { return __shfl_sync(0xffffffffu, v, from); }
DEVICE float as_float(u32 v) { return __uint_as_float(v); }
DEVICE u32 as_bits(float v) { return __float_as_uint(v); }
DEVICE float shuffle(float v, int from) { return __shfl_sync(0xffffffffu, v, from); }
DEVICE float exp_of(float x) { return expf(x); }
DEVICE float log_of(float x) { return logf(x); }
DEVICE float sqrt_of(float x) { return sqrtf(x); }
DEVICE float fma_of(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float half_to_float(u16 v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
}
// Weights are read once per step: past L1, and through the read-only path.
DEVICE uint4 load_stream16(const void* p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE uint2 load_stream8(const void* p) {
    uint2 v;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
DEVICE int count_up(int* where, int by) { return atomicAdd(where, by); }
DEVICE u32 votes(bool v) { return __ballot_sync(0xffffffffu, v); }
DEVICE int ones(u32 v) { return __popc(v); }
DEVICE int first_of(u32 v) { return __ffs((int)v) - 1; }
// 1 / x within a unit of the last place; x of ordinary size.
DEVICE float quick_inverse(float x) {
    float v;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
    return v;
}

// Where memory of the block lies in its own space of addresses.
DEVICE u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// One barrier of THREADS threads at which some arrive without waiting and the others meet.
template <int THREADS>
DEVICE void arrive() { asm volatile("bar.arrive 1, %0;" ::"n"(THREADS) : "memory"); }
template <int THREADS>
DEVICE void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Kernels begin while the one ahead of them still runs (cuda/driver.rs launches them so, on chips that can): a kernel lets the next one begin as
// soon as all its own blocks have, and nothing that another kernel writes may be read, nor anything written, before `await_ahead`. Every
// kernel calls it in every thread: when a kernel has ended, so have all before it.
#if __CUDA_ARCH__ >= 900
// Two or eight blocks, neighbours in the grid's x, that run together and read each other's shared memory.
#define CLUSTERS 1
#define CLUSTER_2 __cluster_dims__(2, 1, 1)
#define CLUSTER_8 __cluster_dims__(8, 1, 1)
// What any thread of the cluster wrote before it, all see after it; each thread calls it.
DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Eight bytes that lie at `here` in the shared memory of block `rank` of the cluster.
DEVICE uint2 of_block(const void* here, int rank) {
    uint2 v;
    u32 at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((u32)__cvta_generic_to_shared(here)), "r"(rank));
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
DEVICE void begin_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void await_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
DEVICE void begin_next() {}
DEVICE void await_ahead() {}
#endif

#endif

DEVICE float infinity() { return as_float(0x7f800000u); }
DEVICE float not_a_number() { return as_float(0x7fc00000u); }
DEVICE bool is_nan(float x) { return (as_bits(x) & 0x7fffffffu) > 0x7f800000u; }
DEVICE int min_of(int a, int b) { return a < b ? a : b; }
DEVICE int max_of(int a, int b) { return a > b ? a : b; }
DEVICE int div_up(int a, int b) { return (a + b - 1) / b; }

// The smaller (larger) of two; a NaN in the first stays.
DEVICE float at_most(float x, float limit) { return x > limit ? limit : x; }
DEVICE float at_least(float x, float limit) { return x < limit ? limit : x; }

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }
DEVICE float silu(float x) { return x * sigmoid(x); }
// ln(1 + x) for x >= 0, exact for small x.
DEVICE float log_1p(float x) {
    float u = 1.0f + x;
    return u == 1.0f ? x : log_of(u) * (x / (u - 1.0f));
}
DEVICE float softplus(float x) { return x > 20.0f ? x : log_1p(exp_of(x)); }

// silu(min(gate, limit)) * clamp(up, +-limit); no limit: infinity.
DEVICE float swiglu(float gate, float up, float limit) { return silu(at_most(gate, limit)) * at_most(at_least(up, -limit), limit); }

// bf16: nearest, ties to even; NaN stays NaN.
DEVICE u16 to_bf16(float x) {
    u32 b = as_bits(x);
    if (is_nan(x)) return (u16)((b >> 16) | 0x40u);
    return (u16)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}
DEVICE float from_bf16(u16 v) { return as_float((u32)v << 16); }
DEVICE float round_bf16(float x) { return from_bf16(to_bf16(x)); }

// A float as an unsigned integer of the same order, at least 1; NaN as -inf, -0 as 0.
DEVICE u32 ordered(float x) {
    x = is_nan(x) ? -infinity() : x + 0.0f;
    u32 b = as_bits(x);
    return (b >> 31) ? ~b : (b | 0x80000000u);
}

DEVICE float warp_sum(float v) {
    UNROLL for (int m = 16; m > 0; m >>= 1) v += shuffle(v, lane_id() ^ m);
    return v;
}
DEVICE u32 warp_most(u32 v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, v);
#else
    UNROLL for (int m = 16; m > 0; m >>= 1) {
        u32 other = shuffle_bits(v, lane_id() ^ m);
        v = other > v ? other : v;
    }
    return v;
#endif
}
DEVICE float warp_max(float v) {
    UNROLL for (int m = 16; m > 0; m >>= 1) v = at_least(v, shuffle(v, lane_id() ^ m));
    return v;
}

// Sums of 2 M values over lanes that differ in bits below 2 M, halving what is exchanged at each step: lane i gets the sum of value i.
template <int M>
DEVICE float sums_of(float* v) {
    bool high = (lane_id() & M) != 0;
    UNROLL for (int i = 0; i < M; i++) {
        float give = high ? v[i] : v[i + M], keep = high ? v[i + M] : v[i];
        v[i] = keep + shuffle(give, lane_id() ^ M);
    }
    if constexpr (M > 1) return sums_of<M / 2>(v);
    else return v[0];
}

// Sum over the block in a fixed order, for every thread. `room` holds a float per warp.
DEVICE float block_sum(float v, float* room) {
    v = warp_sum(v);
    barrier();
    if (lane_id() == 0) room[tid() >> 5] = v;
    barrier();
    float total = 0.0f;
    for (int w = 0; w < threads() >> 5; w++) total += room[w];
    return total;
}

// Numbers before this thread's in the block, and their total. `room` holds an int per warp.
DEVICE int count_before(int v, u32* room, int* total) {
    int sum = v;
    UNROLL for (int m = 1; m < 32; m <<= 1) {
        int other = (int)shuffle_bits((u32)sum, max_of(lane_id() - m, 0));
        if (lane_id() >= m) sum += other;
    }
    barrier();
    if (lane_id() == 31) room[tid() >> 5] = (u32)sum;
    barrier();
    int mine = lane_id() < threads() >> 5 ? (int)room[lane_id()] : 0, warps = mine;
    UNROLL for (int m = 1; m < 32; m <<= 1) {
        int other = (int)shuffle_bits((u32)warps, max_of(lane_id() - m, 0));
        if (lane_id() >= m) warps += other;
    }
    *total = (int)shuffle_bits((u32)warps, 31);
    return sum - v + (int)shuffle_bits((u32)(warps - mine), tid() >> 5);
}
