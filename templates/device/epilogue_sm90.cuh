// O of one consumer warp, 16 rows of a wgmma accumulator, on its way to memory.
#pragma once
#include "device/ptx_sm90.cuh"

// Shared-memory tiles for TMA and wgmma: 64 columns of 16 bits are the 128-byte span of the swizzle, in which row r has its 16-byte
// unit u at u ^ (r % 8).
constexpr int kSwizzleColumns = 64, kSwizzleBytes = 128;

// Matrix descriptors of wgmma (9.7.16.5.1.2.2): 128-byte swizzle, 1024 bytes between groups of 8 rows. The low word has the address and the distance
// between chunks along M or N, which only MN-major operands use. Only the low word changes from one product to the next.
DEVICE u32 descriptor_low(u32 address, int chunk_bytes) { return (u32)chunk_bytes / 16 << 16 | address / 16; }
DEVICE u64 descriptor(u32 low) { return 0x4000004000000000ull | low; }
// The same of K-major tiles whose rows are kRowBytes wide, the span of their swizzle: 128, 64 or 32.
template <int kRowBytes>
DEVICE u64 swizzled_descriptor(u32 low) {
    constexpr u64 kMode = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
    return kMode << 62 | (u64)(8 * kRowBytes / 16) << 32 | low;
}

// Into a chunk-major tile of kRows rows; `smem` is the address of the warp's first row, which is a multiple of 8. Columns 16 i to 16 i + 15, and all.
template <bool kBf16, int kRows>
DEVICE void stage_output_piece(u32 smem, const float* o, int i, int lane) {
    const int row = lane % 16, half = lane / 16;   // this lane's address serves 8 columns of one row
    const int unit = i % 4 * 2 + half;
    const u32 address = smem + i / 4 * kRows * kSwizzleBytes + row * kSwizzleBytes + (unit ^ row % 8) * 16;
    const float* x = &o[8 * i];
    stmatrix_x4(address, pack_pair<kBf16>(x[0], x[1]), pack_pair<kBf16>(x[2], x[3]), pack_pair<kBf16>(x[4], x[5]), pack_pair<kBf16>(x[6], x[7]));
}
template <bool kBf16, int kRows, int kColumns>
DEVICE void stage_output_chunks(u32 smem, const float (&o)[kColumns / 2], int lane) {
    #pragma unroll
    for (int i = 0; i < kColumns / 16; i++) stage_output_piece<kBf16, kRows>(smem, o, i, lane);
}

// Lane t of a quad holds word t of four 16-byte units; afterwards it holds the four words of unit t.
DEVICE void transpose_quad(u32 (&x)[4], int t) {
    #pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
        #pragma unroll
        for (int i = 0; i < 4; i++)
            if ((i & bit) == 0) {
                const u32 received = shuffle_xor(t & bit ? x[i] : x[i + bit], bit);
                if (t & bit) x[i] = received;
                else x[i + bit] = received;
            }
}

// Straight to memory in 16-byte stores; `to` points at the warp's first row, of which rows_left exist, with so many units of 8 columns. Columns 32 i to
// 32 i + 31 of rows r, and all.
template <bool kBf16>
DEVICE void store_output_piece(unsigned char* to, i64 row_bytes, const float* o, int r, int i, int units, int rows_left, int lane) {
    const int t = lane & 3, row = lane / 4 + 8 * r;
    Chunk c;
    #pragma unroll
    for (int j = 0; j < 4; j++) c.word[j] = 4 * i + j < units ? pack_pair<kBf16>(o[4 * (4 * i + j) + 2 * r], o[4 * (4 * i + j) + 2 * r + 1]) : 0u;
    transpose_quad(c.word, t);
    if (row < rows_left && 4 * i + t < units) st_global(to + row * row_bytes + (4 * i + t) * 16, c);
}
template <bool kBf16, int kDim, int kColumns>
DEVICE void store_output_rows(unsigned char* to, i64 row_bytes, const float (&o)[kColumns / 2], int rows_left, int lane) {
    #pragma unroll
    for (int r = 0; r < 2; r++)
        #pragma unroll
        for (int i = 0; i < ceil_div(kDim / 8, 4); i++) store_output_piece<kBf16>(to, row_bytes, o, r, i, kDim / 8, rows_left, lane);
}
