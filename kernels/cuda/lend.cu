// Rows in memory that another process sees: rounded on the way in, widened on the way out, as a link's frames would hold them. Neighbours: cuda/lend.rs.
#include "weights.cuh"

// region[i] = x[i], rounded to bf16 if `narrow`. Four elements a thread; both begin on a multiple of four.
KERNEL BOUNDS(256) put_rows(const float* x, void* region, int narrow, long long n) {
    begin_next();
    await_ahead();
    long long i = ((long long)block_x() * threads() + tid()) * 4;
    for (int j = 0; j < 4 && i + j < n; j++) {
        if (narrow) ((u16*)region)[i + j] = to_bf16(x[i + j]);
        else ((float*)region)[i + j] = x[i + j];
    }
}

// out[i] = window[i], or with `sum` out[i] += window[i]. The window may be another device's memory: eight elements a thread, so that there are
// enough reads on their way.
KERNEL BOUNDS(256) take_rows(const void* window, float* out, int narrow, int sum, long long n) {
    begin_next();
    await_ahead();
    long long i = ((long long)block_x() * threads() + tid()) * 8;
    if (i >= n) return;
    float v[8];
    if (narrow && n - i >= 8 && ((unsigned long long)window & 15) == 0) {
        uint4 w = *(const uint4*)((const u16*)window + i);
        u32 a[4] = {w.x, w.y, w.z, w.w};
        UNROLL for (int j = 0; j < 4; j++) {
            v[2 * j] = as_float(a[j] << 16);
            v[2 * j + 1] = as_float(a[j] & 0xffff0000u);
        }
    } else {
        UNROLL for (int j = 0; j < 8; j++)
            v[j] = i + j >= n ? 0.0f : narrow ? from_bf16(((const u16*)window)[i + j]) : ((const float*)window)[i + j];
    }
    UNROLL for (int j = 0; j < 8; j++)
        if (i + j < n) out[i + j] = sum ? out[i + j] + v[j] : v[j];
}

// flags[r] = 1 where row r holds a NaN or an infinity, else 0. A block per row.
KERNEL BOUNDS(256) non_finite_rows(const float* x, int width, int* flags) {
    SHARED float room[32];
    begin_next();
    await_ahead();
    const float* row = x + (long long)block_x() * width;
    float bad = 0.0f;
    for (int i = tid(); i < width; i += threads()) bad += (as_bits(row[i]) & 0x7f800000u) == 0x7f800000u ? 1.0f : 0.0f;
    bad = block_sum(bad, room);
    if (tid() == 0) flags[block_x()] = bad > 0.0f;
}
