// Which rows a product takes, and through which matrix. Neighbours: format.cu and wide.cuh read it, experts.cu makes tiles, cuda/ops.rs fills it.
#pragma once
#include "portable.cuh"

// Which rows of activations go through which matrix. Without tiles, tile y is rows [y*8*NT, ...) through the one matrix; with them, tile y
// is `tiles[1 + 3*y ...] = (expert, first, count)` over `order`, whose entries number outputs; the input row is entry / divide.
struct Tokens {
    const int* tiles;
    const int* order;
    int divide;
    int rows;
};

struct Tile {
    int expert, first, count;
};

DEVICE bool tile_of(const Tokens& t, int size, int y, Tile* out) {
    if (t.tiles) {
        if (y >= t.tiles[0]) return false;
        out->expert = t.tiles[1 + 3 * y];
        out->first = t.tiles[2 + 3 * y];
        out->count = t.tiles[3 + 3 * y];
        return true;
    }
    out->expert = 0;
    out->first = y * size;
    out->count = min_of(size, t.rows - y * size);
    return out->count > 0;
}
DEVICE int entry(const Tokens& t, const Tile& tile, int i) { return t.order ? t.order[tile.first + i] : tile.first + i; }
