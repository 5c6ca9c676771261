// Stored matrices: how rows of each type are laid out in device memory and read as f32. Neighbours: cuda/weight.rs lays them out so.
//
// Rows are padded with zeros to a multiple of 128 elements. F32 and F16 lie row by row. All other types lie in tiles of 16 rows as a warp reads
// them for the matrix units: `[tile][step][half of 8 rows][piece][row][lane of 4][16 bytes]`, where a step is what four lanes take of a row at
// once, so that every load of a warp is 512 bytes in a row. `spot` finds an element. Scales of NVFP4, MXFP4 and Q8_0 lie in the same tiles: `[tile][step][row]`,
// Span::SCALES bytes each.
//
// | type | elements | scales |
// |---|---|---|
// | F32, F16, BF16 | as stored | none |
// | E4M3 | four in a word as `spread_e4m3` lays them out | f32 grid: one per `row block x 2^bshift columns`, offset for windows |
// | NVFP4 | eight in a word as `spread` lays them out | an E4M3 byte per 16 |
// | MXFP4 | the same | an E8M0 byte per 32 |
// | Q8_0 | a signed byte each | an f16 per 32 |
// | CODE4, LUT4, CODE8, CODE4_MIN, CODE8_MIN | codes of 4 and 8 bits | coded.cuh |
#pragma once
#include "portable.cuh"

enum Type {
    T_F32 = 0, T_F16 = 1, T_BF16 = 2, T_E4M3 = 3, T_NVFP4 = 4, T_MXFP4 = 5, T_Q8_0 = 6, T_CODE4 = 7, T_LUT4 = 8, T_CODE8 = 9, T_CODE4_MIN = 10,
    T_CODE8_MIN = 11
};

// Types of whole codes, those of 8 bits, and those with minima that the matrix units take (coded.cuh).
DEVICE constexpr bool is_coded(int t) { return t >= T_CODE4; }
DEVICE constexpr bool is_code8(int t) { return t == T_CODE8 || t == T_CODE8_MIN; }
DEVICE constexpr bool has_mins(int t) { return t >= T_CODE4_MIN; }

struct Matrix {
    const u8* q;      // elements
    const u8* s;      // scales, or null
    const float* factors; // factors of runs of rows, or null: `global` for all
    long long q_each; // bytes from one expert's elements to the next's
    long long s_each; // the same for scales
    float global;     // factor of every element
    int rows;
    int cols;    // without padding
    int q_row;   // bytes of a padded row
    int s_row;   // bytes from one row of scales to the next
    int brows;   // E4M3: rows per scale
    int bshift;  // E4M3: log2 of columns per scale
    int row_off; // E4M3: rows of the grid's first block that lie before this window
    int col_off; // the same for columns
    int type;
    int factor_rows; // rows of a run
    int factor_each; // runs of one expert
    int form;       // coded.cuh: how scales lie
    u32 table[8];   // LUT4: lower bytes of the 16 levels as bf16, then their upper bytes
    int zero;       // CODE4, CODE8: the code of level 0
};

// One row: where its elements and scales begin, and the factor that is left for the end of a product.
struct Row {
    const u8* q;
    const u8* s;
    float late;
};

// Elements of K that a warp takes of a row at once, those of one of its four lanes, and their bytes.
template <int T>
struct Span {
    static const int STEP = T == T_BF16 || T == T_E4M3 || is_code8(T) ? 64 : T == T_Q8_0 ? 32 : 128;
    static const int EACH = STEP / 4;
    static const int BYTES = T == T_BF16 ? 32 : T == T_Q8_0 ? 8 : 16;
    static const int PIECE = BYTES < 16 ? BYTES : 16;
    static const int SCALES = T == T_NVFP4 ? 8 : T == T_MXFP4 ? 4 : 2; // bytes of a row's step, where scales lie in tiles
};

// Where element k of a row lies (k a multiple of 8; of a tiled type).
template <int T>
DEVICE const u8* spot(const Row& r, int k) {
    typedef Span<T> S;
    int byte = k % S::EACH * S::BYTES / S::EACH;
    return r.q + (long long)(k / S::STEP) * (64 * S::BYTES) + byte / 16 * 512 + k % S::STEP / S::EACH * S::PIECE + byte % 16;
}

// E4M3: the row of scales of a row. Divisions take long, and blocks are mostly of 128 rows or of one.
DEVICE int scale_row_of(const Matrix& m, int row) {
    u32 n = (u32)(row + m.row_off), by = (u32)m.brows;
    return (int)((by & (by - 1)) == 0 ? n >> first_of(by) : n / by);
}

// Where a row's scales begin: a step's are 16 Span::SCALES bytes from the last's where they lie in tiles.
DEVICE long long scales_at(const Matrix& m, int row) {
    if (m.type == T_E4M3) row = scale_row_of(m, row);
    if (m.type < T_NVFP4 || m.type > T_Q8_0) return (long long)row * m.s_row;
    return (long long)(row >> 4) * 16 * m.s_row + (row & 15) * (m.type == T_NVFP4 ? 8 : m.type == T_MXFP4 ? 4 : 2);
}

DEVICE Row row_of(const Matrix& m, int expert, int row) {
    Row r;
    r.q = m.q + expert * m.q_each;
    if (m.type < T_BF16) {
        r.q += (long long)row * m.q_row;
    } else {
        int bytes = m.type == T_BF16 ? 32 : m.type == T_Q8_0 ? 8 : 16, piece = m.type == T_Q8_0 ? 8 : 16;
        r.q += (long long)(row >> 4) * 16 * m.q_row + (row >> 3 & 1) * 32 * bytes + (row & 7) * 4 * piece;
    }
    r.s = m.s ? m.s + expert * m.s_each + scales_at(m, row) : (const u8*)0;
    r.late = m.factors ? m.factors[expert * m.factor_each + row / m.factor_rows] : m.global;
    return r;
}

DEVICE float e4m3(u8 b) {
    u32 v = b;
    float f = as_float(((v & 0x80u) << 24) | ((v & 0x7fu) << 20)) * as_float(0x7b800000u); // 2^120
    return (v & 0x7fu) == 0x7fu ? not_a_number() : f;
}
// 2^(b - 127), down to the denormal of b = 0; 255 is NaN.
DEVICE float e8m0(u8 b) { return b == 255 ? not_a_number() : as_float(b == 0 ? 0x00400000u : (u32)b << 23); }
// The four bits of an E2M1 number in the low nibble.
DEVICE float e2m1(u32 n) { return as_float(((n & 8u) << 28) | ((n & 7u) << 22)) * as_float(0x7e800000u); } // 2^126

// How eight E2M1 numbers lie in a word: even ones belong to its lower half, odd ones to its upper half, so that a mask takes two into the halves of a
// register. There a number belongs at bits 15 (sign) and 8-6 of its half (bf16, but for a factor of 2^126). Of the four pairs the first lies so; the second
// 6 bits lower; the third 4 bits higher around the word; and the fourth 2 bits lower but for bit 8, which lies 6 higher. Bit `to` of element i's half is:
DEVICE int bit_of(int i, int to) {
    int pair = i >> 1, at = to + 16 * (i & 1);
    return pair == 0 ? at : pair == 1 ? at - 6 : pair == 2 ? (at + 4) & 31 : to == 8 ? at + 6 : at - 2;
}
DEVICE u32 spread(u32 nibbles) {
    u32 to = 0;
    UNROLL for (int i = 0; i < 8; i++) {
        u32 n = nibbles >> (4 * i);
        to |= (n >> 3 & 1u) << bit_of(i, 15) | (n >> 2 & 1u) << bit_of(i, 8) | (n >> 1 & 1u) << bit_of(i, 7) | (n & 1u) << bit_of(i, 6);
    }
    return to;
}
// Number i of such a word, in the low nibble.
DEVICE u32 nibble_of(u32 w, int i) {
    return (w >> bit_of(i, 15) & 1u) << 3 | (w >> bit_of(i, 8) & 1u) << 2 | (w >> bit_of(i, 7) & 1u) << 1 | (w >> bit_of(i, 6) & 1u);
}

// How four E4M3 numbers lie in a word, for the same end: 0 and 2 in its lower half, 1 and 3 in its upper half. Of a half, bits 15 (sign) and 10-4 are the
// first number (bf16, but for a factor of 2^120); the second has its lower four bits at 3-0, its sign at 11 and the rest at 14-12.
DEVICE u32 spread_e4m3(u32 bytes) {
    u32 to = 0;
    UNROLL for (int i = 0; i < 2; i++) {
        u32 a = bytes >> (8 * i) & 0xffu, b = bytes >> (8 * i + 16) & 0xffu;
        to |= ((a & 0x80u) << 8 | (a & 0x7fu) << 4 | (b & 0x80u) << 4 | (b & 0x70u) << 8 | (b & 0x0fu)) << (16 * i);
    }
    return to;
}
// Byte i of such a word.
DEVICE u8 e4m3_of(u32 w, int i) {
    u32 half = w >> (16 * (i & 1));
    return (u8)(i < 2 ? (half >> 8 & 0x80u) | (half >> 4 & 0x7fu) : (half >> 4 & 0x80u) | (half >> 8 & 0x70u) | (half & 0x0fu));
}

// Elements [k, k + 8) of a row, k a multiple of 8, but for the row's `late` factor.
DEVICE void load8_f32(const Matrix&, const Row& r, int k, float* w) {
    const float4* p = (const float4*)(r.q + 4ll * k);
    float4 a = p[0], b = p[1];
    w[0] = a.x; w[1] = a.y; w[2] = a.z; w[3] = a.w;
    w[4] = b.x; w[5] = b.y; w[6] = b.z; w[7] = b.w;
}
DEVICE void load8_f16(const Matrix&, const Row& r, int k, float* w) {
    uint4 v = *(const uint4*)(r.q + 2ll * k);
    u32 a[4] = {v.x, v.y, v.z, v.w};
    UNROLL for (int i = 0; i < 4; i++) {
        w[2 * i] = half_to_float((u16)a[i]);
        w[2 * i + 1] = half_to_float((u16)(a[i] >> 16));
    }
}
DEVICE void load8_bf16(const Matrix&, const Row& r, int k, float* w) {
    uint4 v = *(const uint4*)spot<T_BF16>(r, k);
    u32 a[4] = {v.x, v.y, v.z, v.w};
    UNROLL for (int i = 0; i < 4; i++) {
        w[2 * i] = as_float(a[i] << 16);
        w[2 * i + 1] = as_float(a[i] & 0xffff0000u);
    }
}
DEVICE void load8_e4m3(const Matrix& m, const Row& r, int k, float* w) {
    uint2 v = *(const uint2*)spot<T_E4M3>(r, k);
    const float* s = (const float*)r.s;
    int last = (m.cols - 1 + m.col_off) >> m.bshift; // padding has no scale of its own
    UNROLL for (int i = 0; i < 8; i++) {
        u32 word = i < 4 ? v.x : v.y;
        float f = e4m3(e4m3_of(word, i & 3));
        w[i] = s ? f * s[min_of((k + i + m.col_off) >> m.bshift, last)] : f;
    }
}
DEVICE void load8_nvfp4(const Matrix&, const Row& r, int k, float* w) {
    u32 v = *(const u32*)spot<T_NVFP4>(r, k);
    float f = e4m3(r.s[(k >> 7) * 128 + (k >> 4 & 7)]);
    UNROLL for (int i = 0; i < 8; i++) w[i] = e2m1(nibble_of(v, i)) * f;
}
DEVICE void load8_mxfp4(const Matrix&, const Row& r, int k, float* w) {
    u32 v = *(const u32*)spot<T_MXFP4>(r, k);
    float f = e8m0(r.s[(k >> 7) * 64 + (k >> 5 & 3)]);
    UNROLL for (int i = 0; i < 8; i++) w[i] = e2m1(nibble_of(v, i)) * f;
}
DEVICE void load8_q8_0(const Matrix&, const Row& r, int k, float* w) {
    uint2 v = *(const uint2*)spot<T_Q8_0>(r, k);
    float d = half_to_float(*(const u16*)(r.s + (k >> 5) * 32));
    UNROLL for (int i = 0; i < 8; i++) {
        u32 word = i < 4 ? v.x : v.y;
        w[i] = d * (float)(signed char)(word >> (8 * (i & 3)));
    }
}

#include "coded.cuh"

template <int T>
DEVICE void load8(const Matrix& m, const Row& r, int k, float* w) {
    if constexpr (T == T_F32) load8_f32(m, r, k, w);
    else if constexpr (T == T_F16) load8_f16(m, r, k, w);
    else if constexpr (T == T_BF16) load8_bf16(m, r, k, w);
    else if constexpr (T == T_E4M3) load8_e4m3(m, r, k, w);
    else if constexpr (T == T_NVFP4) load8_nvfp4(m, r, k, w);
    else if constexpr (T == T_MXFP4) load8_mxfp4(m, r, k, w);
    else if constexpr (T == T_Q8_0) load8_q8_0(m, r, k, w);
    else load8_coded<T>(m, r, k, w);
}

// The whole element, with the type chosen at run time, for ops where the choice costs nothing beside the rest.
DEVICE void load8_any(const Matrix& m, const Row& r, int k, float* w) {
    switch (m.type) {
        case T_F32: load8_f32(m, r, k, w); break;
        case T_F16: load8_f16(m, r, k, w); break;
        case T_BF16: load8_bf16(m, r, k, w); break;
        case T_E4M3: load8_e4m3(m, r, k, w); break;
        case T_NVFP4: load8_nvfp4(m, r, k, w); break;
        case T_MXFP4: load8_mxfp4(m, r, k, w); break;
        case T_Q8_0: load8_q8_0(m, r, k, w); break;
        case T_CODE4:
        case T_CODE4_MIN: load8_coded<T_CODE4>(m, r, k, w); break;
        case T_LUT4: load8_coded<T_LUT4>(m, r, k, w); break;
        default: load8_coded<T_CODE8>(m, r, k, w); break;
    }
    if (r.late != 1.0f) {
        UNROLL for (int i = 0; i < 8; i++) w[i] *= r.late;
    }
}

// Any single element: slow, for odd sizes.
DEVICE float element(const Matrix& m, const Row& r, int k) {
    float w[8], v = 0.0f;
    load8_any(m, r, k & ~7, w);
    UNROLL for (int i = 0; i < 8; i++) v = (k & 7) == i ? w[i] : v;
    return v;
}

// Eight values of a row of activations from column k on, zeros from `cols` on; `wide`: rows start on 16 bytes.
DEVICE void load8_row(const float* x, int k, int cols, bool wide, float* v) {
    if (wide && k + 8 <= cols) {
        float4 a = *(const float4*)(x + k), b = *(const float4*)(x + k + 4);
        v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
        v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
    } else {
        UNROLL for (int i = 0; i < 8; i++) v[i] = k + i < cols ? x[k + i] : 0.0f;
    }
}

// Where element k of a row of activations lies: in each step of the weights' type pieces of 16 bytes are in order of lanes, so that the four lanes of a row
// read 64 bytes together. EACH: of the type, 0 for codes, which take elements in order.
DEVICE int place_of_x(int k, int each) {
    if (each == 0) return k;
    int in = k % (4 * each), n = in % each;
    return k - in + n / 8 * 32 + in / each * 8 + n % 8;
}
