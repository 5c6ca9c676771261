// Copies to shared memory that go on beside a thread's other work (cp.async), in groups that it ends and waits for. Neighbours: stream.cuh, kda_chunk.cu,
// mla_wide.cu and format.cu, which copy so.
#pragma once
#include "portable.cuh"

#if TANDEM_MMA

// Copies of 16 bytes pass L1; smaller ones take a cycle of shared memory for each lane, so that few lanes make them.
template <int BYTES>
DEVICE void copy_ahead(u32 to, const void* from) {
    if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
// Ends a group of copies.
DEVICE void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until no more than LEFT groups, the latest, are on their way.
template <int LEFT>
DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

#endif
