// Masks. Every mask answers the same three questions. The tiles that exist begin at key 0, and those that need a test are the last ones:
// a mask that hides early keys (a window) needs a TileRange.begin and a second masked loop in the kernel as well.
//   range(m0, m_end): which key tiles a tile of query rows needs
//   row(q, kv0):      an object whose keep(j) says whether query q sees key kv0 + j; asked on tiles that need a test
//   kMaskedSteps:     whether more than the first step, the last key tile, can need a test
//   sees_none(q_last, kv0): no query up to q_last sees a key from kv0 on (lets a warp skip its share of a tile)
#pragma once
#include "device/types.cuh"

// Key tiles [0, full_end) need no test, [full_end, end) do, the others do not exist.
struct TileRange {
    int full_end;
    int end;
};

// Keys are visible up to and including `last`, counted from the tile's (or the thread's) first key.
struct PrefixRow {
    int last;
    DEVICE bool keep(int j) const { return j <= last; }
};

template <int kBlockN>
struct FullMask {
    static constexpr bool kMaskedSteps = false;
    int seqlen_k;
    DEVICE TileRange range(int, int) const { return {seqlen_k / kBlockN, (seqlen_k + kBlockN - 1) / kBlockN}; }
    DEVICE PrefixRow row(int, int kv0) const { return {seqlen_k - 1 - kv0}; }
    DEVICE bool sees_none(int, int) const { return false; }
};

// Query i sees keys j <= i + offset: offset = seqlen_k - seqlen_q aligns the corner at the bottom right, 0 at the top left.
template <int kBlockN>
struct CausalMask {
    static constexpr bool kMaskedSteps = true;
    int seqlen_k;
    int offset;
    // m0 and m_end: first query row of the tile and one past its last.
    DEVICE TileRange range(int m0, int m_end) const {
        const int keys = max_int(0, min_int(seqlen_k, m_end + offset));          // the last row sees this many
        const int keys_of_first = max_int(0, min_int(seqlen_k, m0 + 1 + offset));  // the first row, so every row
        return {keys_of_first / kBlockN, (keys + kBlockN - 1) / kBlockN};
    }
    DEVICE PrefixRow row(int q, int kv0) const { return {min_int(seqlen_k - 1, q + offset) - kv0}; }
    DEVICE bool sees_none(int q_last, int kv0) const { return kv0 > q_last + offset; }
};
