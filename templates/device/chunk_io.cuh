// Chunks of rows to and from global memory, in the widest accesses that the array allows.
#pragma once
#include "device/tile.cuh"

// One chunk from global memory; what lies beyond valid_bytes becomes zero. dim_stride: between elements, which accesses of 2 bytes (or of 1) take one by
// one; wider ones take them as they lie.
template <int kAccessBytes>
DEVICE Chunk load_chunk(const unsigned char* from, int valid_bytes, i64 dim_stride) {
    Chunk c{};
    #pragma unroll
    for (int at = 0; at < kChunkBytes; at += kAccessBytes) {
        if (at >= valid_bytes) break;
        if constexpr (kAccessBytes == 16) c = ld_global<Chunk>(from);
        if constexpr (kAccessBytes == 8) {
            const u64 both = ld_global<u64>(from + at);
            c.word[at / 4] = (u32)both;
            c.word[at / 4 + 1] = (u32)(both >> 32);
        }
        if constexpr (kAccessBytes == 4) c.word[at / 4] = ld_global<u32>(from + at);
        if constexpr (kAccessBytes == 2) c.word[at / 4] |= (u32)ld_global<u16>(from + at / 2 * dim_stride) << (8 * (at & 2));
        if constexpr (kAccessBytes == 1) c.word[at / 4] |= (u32)ld_global<unsigned char>(from + at * dim_stride) << (8 * (at & 3));
    }
    return c;
}

// One staged chunk to global memory in the widest stores that the output allows.
template <int kAccessBytes>
DEVICE void store_chunk(unsigned char* to, const Chunk& c, int valid_bytes, i64 dim_stride) {
    if constexpr (kAccessBytes == 16) {
        st_global(to, c);
    } else {
        #pragma unroll
        for (int at = 0; at < kChunkBytes; at += kAccessBytes) {
            if (at >= valid_bytes) break;
            if constexpr (kAccessBytes == 8) st_global(to + at, (u64)c.word[at / 4] | (u64)c.word[at / 4 + 1] << 32);
            if constexpr (kAccessBytes == 4) st_global(to + at, c.word[at / 4]);
            if constexpr (kAccessBytes == 2) st_global(to + at / 2 * dim_stride, (u16)(c.word[at / 4] >> (8 * (at & 2))));
        }
    }
}

// The warp's staged rows to global memory; `out` points at its first row, of which rows_left exist.
template <int kDim, int kPitch, int kRows, int kAccessBytes>
DEVICE void store_output(u32 warp_smem, const GlobalRows& out, int rows_left, int lane) {
    constexpr int kChunks = ceil_div(kDim, kChunkElements), kLanes = kChunks <= 2 ? 2 : next_pow2(kChunks);
    static_assert(kRows * kLanes % 32 == 0, "a warp stores whole rows");
    #pragma unroll
    for (int i = 0; i < kRows * kLanes / 32; i++) {
        const int row = (i * 32 + lane) / kLanes, chunk = (i * 32 + lane) % kLanes;
        if (row >= rows_left || chunk >= kChunks) continue;
        const i64 column = chunk * kChunkElements * (kAccessBytes == 2 ? out.dim_stride : 2);
        unsigned char* to = const_cast<unsigned char*>(out.base) + row * out.row_stride + column;
        store_chunk<kAccessBytes>(to, ld_shared_chunk(warp_smem + swizzled<kPitch>(row, chunk)), 2 * kDim - chunk * kChunkBytes, out.dim_stride);
    }
}
