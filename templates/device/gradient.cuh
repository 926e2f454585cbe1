// What the kernels of the backward pass agree upon: the workspace, and how a row that sees nothing is marked.
//
// Of every query row: {LSE * log2(e), delta}, in the order of RowLayout. Of every 16x8 block of dQ a fragment: 128 fp32 sums, in the order of an mma's accumulator
// registers, so that what a warp adds at once lies together. Of every kRowTile rows there is room for kTurns turns, as many as any kernel needs. A head's rows are padded to whole query tiles.
#pragma once
#include "device/tile.cuh"

constexpr int kRowTile = 32;   // every query tile is a multiple
constexpr int kTurns = 2;

struct alignas(8) RowConstants {
    float lse_log2;   // +infinity: the row does not exist or sees no key; no probability of it is above 0
    float delta;      // rowsum(dO * O) - dLSE
};

// Where the constants of row r stand, in bytes from those of a head's or a tile's first row. Pairs: 8 bytes for each row. Planes: of each
// kRowTile rows the LSEs, then the deltas, so that a thread loads of several rows at once only what it needs.
template <bool kPlanes>
struct RowLayout {
    static constexpr int kDelta = kPlanes ? 4 * kRowTile : 4;   // from a row's LSE to its delta
    DEVICE static constexpr int lse(int r) { return kPlanes ? r / kRowTile * 8 * kRowTile + r % kRowTile * 4 : 8 * r; }
};

DEVICE bool is_dead(float lse_log2) { return float_bits(lse_log2) == 0x7f800000; }
DEVICE float dead_lse() { return bits_float(0x7f800000u); }

// Floats from the first fragment to that of the block at (row_block, column_block) of a dQ with kHeadDim columns.
template <int kHeadDim>
DEVICE i64 fragment_offset(i64 row_block, int column_block) {
    return (row_block * (2 * ceil_div(kHeadDim, 16)) + column_block) * 128;
}
