// What products of many rows need of Hopper (sm_90a): barriers that count bytes, bulk copies, and wgmma with weights from registers; and the image in
// which activations lie for it. Neighbours: wide.cuh (the products), rows.cu (`image_rows` makes images).
//
// An image is `[chunk of 64 columns][row][128 bytes]` of bf16, columns padded with zeros to a multiple of 128 and rows to one of 8, where
// - columns are permuted inside of each step of the weights' type, so that instruction i takes of each lane's EACH elements those from 4 i on, as
//   the stored tiles hand them out (mma.cuh);
// - the 16-byte piece j of a row lies at j ^ (row & 7), as the 128-byte swizzle wants it.
// So a chunk of rows from a multiple of 8 on is one run of bytes.
#pragma once
#include "portable.cuh"

// Where element k of a row lies in its image, in elements from the row's first chunk on; without the swizzle. EACH: of the weights' type.
DEVICE int permuted(int k, int each) {
    int in = k % (4 * each), q = in / each, n = in % each;
    return k - in + n / 4 * 16 + (n & 2) * 4 + q * 2 + (n & 1);
}
// The byte of element `at` (permuted) of a row in an image of `rows` rows.
DEVICE long long image_byte(int at, int row, int rows) {
    return ((long long)(at >> 6) * rows + row) * 128 + (((at >> 3 & 7) ^ (row & 7)) << 4) + (at & 7) * 2;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

DEVICE void gate_open(u32 gate, int arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(gate), "r"(arrivals) : "memory"); }
DEVICE void gate_expect(u32 gate, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(gate), "r"(bytes) : "memory");
}
DEVICE void gate_arrive(u32 gate, bool here) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %1, 0;\n"
                 "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
                 "}" ::"r"(gate), "r"((int)here)
                 : "memory");
}
DEVICE void gate_wait(u32 gate, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra again;\n"
                 "}" ::"r"(gate), "r"(parity)
                 : "memory");
}
// `bytes` (a multiple of 16) to this block's shared memory; `gate` counts them.
DEVICE void bring(u32 to, const void* from, int bytes, u32 gate) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(gate)
                 : "memory");
}

DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// Rows of 128 bytes under the 128-byte swizzle, atoms of 8 rows behind each other.
DEVICE u64 operand(u32 at) { return (u64)(at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

#define C8(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])

// c (64 outputs x N rows, a warpgroup's) = a * b, and + c where `add`.
template <int N>
DEVICE void wgmma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add);
template <>
DEVICE_MEMBER void wgmma<128>(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
                 "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
                 "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
                 "%62, %63}, "
                 "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n"
                 "}"
                 : C8(0), C8(8), C8(16), C8(24), C8(32), C8(40), C8(48), C8(56)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}

#endif
