// Which query tiles a tile of keys needs.
#pragma once
#include "device/types.cuh"

// Query tiles of one head that see a key of the tile: [begin, end), of which those before `full_begin` hold pairs that are hidden.
struct QueryRange { int begin, full_begin, end; };

// Of the kBlockN keys from n0 on.
template <int kBlockM, int kBlockN, bool kCausal>
DEVICE QueryRange query_range(int n0, int seqlen_q, int seqlen_k, int causal_offset, int m_tiles) {
    // Keys beyond the last are hidden from all. Their K is 0, but a P that is not would give dS that may be infinite in fp16, and dQ NaN.
    const bool whole = seqlen_k - n0 >= kBlockN;
    if (!kCausal) return {0, whole ? 0 : m_tiles, m_tiles};
    const int first = max_int(0, n0 - causal_offset);   // the first query that sees key n0
    const int first_full = max_int(0, n0 + kBlockN - 1 - causal_offset);   // the first that sees all
    return {min_int(first / kBlockM, m_tiles), whole ? min_int(ceil_div(first_full, kBlockM), m_tiles) : m_tiles, first < seqlen_q ? m_tiles : 0};
}
