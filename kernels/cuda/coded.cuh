// Small whole codes times scales of scales: the K- and IQ-types of GGUF and their older kin. Neighbours: weights.cuh (which includes this),
// coded_mma.cuh (the matrix units), cuda/coded.rs (lays rows out so), quant/src/coded.rs (which codes a file's blocks hold).
//
// An element is `scale * level - minimum`, where a level is a whole number that bf16 holds:
//
// | type | bits of a code | level |
// |---|---|---|
// | CODE4, CODE4_MIN | 4 | code - m.zero |
// | LUT4 | 4 | m.table[code] |
// | CODE8, CODE8_MIN | 8 | code - m.zero; codes below 128 |
//
// Elements lie in steps of 128 (64 of 8 bits) columns, and in a step as the matrix units take them: lane q of a row's four holds columns
// 4q..4q+3 of each 16, so that every mma stays within 16 columns, which share a scale. Four-bit codes of a lane's columns of 32 are a word: CODE4 keeps
// pairs 16 bits apart, of element 2p at bit 4p; LUT4 keeps element i at bit 4i.
//
// A row of scales holds half a byte per column, then what the form needs:
//
// | m.form | per column | behind |
// |---|---|---|
// | RUN | scale + 128 per 16 | f16 d per 256 |
// | RUN_MIN | scale and, above it, minimum of 4 bits per 16 | f16 d and dmin per 256 |
// | PAIR_MIN | bytes of scale and minimum per 32 | f16 d and dmin per 256 |
// | HALF | f16 d per 32 | nothing that counts, as much as of RUN |
// | HALF_MIN | f16 d per 32 | f16 minimum per 32 |
#pragma once

enum Form { RUN = 0, RUN_MIN = 1, PAIR_MIN = 2, HALF = 3, HALF_MIN = 4 };

// Where what lies behind begins in a row of scales of a matrix of `cols` columns.
DEVICE int behind_of(int cols) { return ((cols + 127) >> 7) * 8; }

// The scale of column k of a row and, if the form has one, the minimum.
DEVICE float coded_scale(const Matrix& m, const u8* s, int k, float* minimum) {
    const u16* behind = (const u16*)(s + behind_of(m.cols));
    int form = m.form;
    *minimum = 0.0f;
    if (form == RUN) return half_to_float(behind[k >> 8]) * (float)((int)s[k >> 4] - 128);
    if (form >= HALF) {
        if (form == HALF_MIN) *minimum = half_to_float(behind[k >> 5]);
        return half_to_float(((const u16*)s)[k >> 5]);
    }
    int byte = form == RUN_MIN ? s[k >> 4] : s[2 * (k >> 5)];
    int scale = form == RUN_MIN ? byte & 15 : byte, min = form == RUN_MIN ? byte >> 4 : s[2 * (k >> 5) + 1];
    *minimum = half_to_float(behind[2 * (k >> 8) + 1]) * (float)min;
    return half_to_float(behind[2 * (k >> 8)]) * (float)scale;
}

// One of four words, without an index into a kernel's parameters.
DEVICE u32 word_of(const u32* words, u32 i) { return i & 2u ? (i & 1u ? words[3] : words[2]) : i & 1u ? words[1] : words[0]; }

// Elements [k, k + 8) of a row, k a multiple of 8, but for the row's `late` factor: those of two neighbouring lanes.
template <int T>
DEVICE void load8_coded(const Matrix& m, const Row& r, int k, float* w) {
    const bool WIDE = is_code8(T);
    const int STEP = WIDE ? 64 : 128;
    int c = k % STEP;
    const u8* at = r.q + (long long)(k / STEP) * 1024 + (c % 16 / 4) * 16 + (WIDE ? c / 16 : c / 32) * 4;
    float minimum, scale = coded_scale(m, r.s, k, &minimum);
    UNROLL for (int lane = 0; lane < 2; lane++) {
        u32 word = *(const u32*)(at + 16 * lane);
        if (!WIDE && (c & 16)) word >>= T == T_LUT4 ? 16 : 8;
        UNROLL for (int i = 0; i < 4; i++) {
            float level;
            if (WIDE) level = (float)((int)(word >> (8 * i) & 255u) - m.zero);
            else if (T != T_LUT4) level = (float)((int)(word >> (16 * (i & 1) + 4 * (i >> 1)) & 15u) - m.zero);
            else {
                u32 code = word >> (4 * i) & 15u, by = 8 * (code & 3u);
                level = as_float((word_of(m.table, code >> 2) >> by & 255u) << 16 | (word_of(m.table + 4, code >> 2) >> by & 255u) << 24);
            }
            w[4 * lane + i] = fma_of(scale, level, -minimum); // the product is exact
        }
    }
}
