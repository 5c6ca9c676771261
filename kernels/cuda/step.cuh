// A step's rows as kernels see them. Neighbours: cuda/batch.rs fills it, kda.cu, mla.cu and indexer.cu read it.
#pragma once
#include "portable.cuh"

// Consecutive rows of one sequence.
struct Segment {
    int slot, row0, rows, pos0, page0, pages;
};

struct Step {
    const int* row_segment; // [R]
    const Segment* segments;
    const int* pages;
    int rows;
};

// Where in a pool `[pages][layers][page_tokens]` the token at `pos` of a sequence lies.
DEVICE long long place_in(const Step& b, const Segment& s, int pos, int page_tokens, int layers, int layer) {
    int page = b.pages[s.page0 + pos / page_tokens];
    return ((long long)page * layers + layer) * page_tokens + pos % page_tokens;
}
