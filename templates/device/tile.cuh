// Tiles in shared memory: their layout, and how rows of a global array get there.
#pragma once
#include "device/ptx.cuh"

// Rows are padded to multiples of 128 bytes (64 elements); the 16-byte chunk c of row r stands at chunk c ^ (r mod 8), so that
// ldmatrix, which reads one chunk of eight consecutive rows at a time, touches every bank once.
template <int kPitch>
DEVICE u32 swizzled(int row, int chunk) { return row * kPitch + ((chunk ^ (row & 7)) << 4); }

template <int kDim>
struct TileLayout {
    static constexpr int kPitch = 2 * round_up(kDim, 64);
    DEVICE static u32 chunk_offset(int row, int chunk) { return swizzled<kPitch>(row, chunk); }
    // Lane address for ldmatrix of the 16x16 block at row 0, column 0 (see block() for the others). A and V^T want the lanes' rows
    // in order; K wants its two 8-row halves in registers 0-1 and 2-3, because an mma's B operand is an aligned register pair.
    DEVICE static u32 lane_offset_by_rows(int lane) { return chunk_offset(lane & 15, lane >> 4); }
    DEVICE static u32 lane_offset_by_pairs(int lane) { return chunk_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1); }
    // The same lane's address in the block `row_block` blocks down and `col_block` right: four XORed registers serve a whole row.
    DEVICE static u32 block(u32 lane_address, int row_block, int col_block) {
        return (lane_address ^ ((col_block & 3) << 5)) + (col_block >> 2) * 128 + row_block * 16 * kPitch;
    }
};

// One (batch, head) slice of a global array, in bytes.
struct GlobalRows {
    const unsigned char* base;
    i64 row_stride;
    i64 dim_stride;   // read by the scalar variant only
};

DEVICE GlobalRows slice(const void* base, i64 batch_stride, i64 head_stride, i64 seq_stride, i64 dim_stride, int batch, int head) {
    return {(const unsigned char*)base + 2 * (batch * batch_stride + head * head_stride), 2 * seq_stride, 2 * dim_stride};
}

// All threads of a block copy kRows rows of kDim elements, in passes of kRowsPerPass rows: a thread keeps its column and its row
// modulo kRowsPerPass. Columns from kDim up to the next multiple of 16 become zero, so that they add nothing to a product.
template <int kDim, int kThreads, int kAccessBytes, int kMostRows = 16>
struct TileLoader {
    using Layout = TileLayout<kDim>;
    static constexpr int kChunks = round_up(kDim, 16) / kChunkElements;
    static constexpr int kLanes = max_int(next_pow2(kChunks), kThreads / kMostRows);   // at most kMostRows rows a pass
    static constexpr int kRowsPerPass = kThreads / kLanes;
    static constexpr bool kWholeChunks = kDim % 16 == 0 && kAccessBytes == 16;
    static_assert((kRowsPerPass & (kRowsPerPass - 1)) == 0, "the swizzle of a thread's rows must follow from its first row");

    u32 smem_offset;   // of the thread's chunk in its first row
    int row, chunk;
    u32 global_offset;   // bytes from the tile's first row to the thread's chunk; unsigned, so that it adds to a uniform base address

    DEVICE TileLoader(int thread, const GlobalRows& rows) {
        row = thread / kLanes;
        chunk = thread % kLanes;
        smem_offset = Layout::chunk_offset(row, chunk);
        global_offset = row * (u32)rows.row_stride + chunk * kChunkBytes;   // negative and huge strides take the scalar variant
    }

    DEVICE bool has_chunk() const { return kLanes == kChunks || chunk < kChunks; }
    // Of the thread's chunk in pass i.
    DEVICE u32 address(u32 smem, int i) const { return (smem + smem_offset + i * kRowsPerPass * Layout::kPitch) ^ (((i * kRowsPerPass) & 7) << 4); }

    // Pass i of the tile at `smem`. `source` points at the tile's first row; rows from `rows_left` on are beyond the sequence and become zero.
    template <bool kCheckRows>
    DEVICE void pass(u32 smem, const unsigned char* source, const GlobalRows& rows, int i, int rows_left, bool go) const {
        const u32 dst = address(smem, i);
        const bool inside = !kCheckRows || row + i * kRowsPerPass < rows_left;
        if (kLanes != kChunks) go = go && chunk < kChunks;
        if constexpr (kAccessBytes == 2) {
            if (go) st_shared(dst, gather(source, rows, i, inside));
        } else {
            const unsigned char* from = source + (i64)(i * kRowsPerPass) * rows.row_stride + global_offset;
            const int valid = inside ? min_int(kChunkBytes, 2 * kDim - chunk * kChunkBytes) : 0;
            #pragma unroll
            for (int part = 0; part < kChunkBytes; part += kAccessBytes) {
                const int bytes = max_int(0, min_int(kAccessBytes, valid - part));
                // An address that is not read must still be a legal one.
                const unsigned char* address = !kCheckRows && kWholeChunks || bytes > 0 ? from + part : rows.base;
                cp_async<kAccessBytes, kCheckRows || !kWholeChunks>(dst + part, address, bytes, go);
            }
        }
    }

    template <int kRows, bool kCheckRows>
    DEVICE void tile(u32 smem, const unsigned char* source, const GlobalRows& rows, int rows_left, bool go) const {
        static_assert(kRows % kRowsPerPass == 0, "a tile is a whole number of passes");
        // Unrolled, the scalar variant would hold the elements of many passes in registers that the main loop does not have.
        constexpr int kUnroll = kAccessBytes == 2 ? 1 : kRows / kRowsPerPass;
        #pragma unroll kUnroll
        for (int i = 0; i < kRows / kRowsPerPass; i++) pass<kCheckRows>(smem, source, rows, i, rows_left, go);
    }

private:
    // The scalar variant: element by element, any stride on any axis.
    DEVICE Chunk gather(const unsigned char* source, const GlobalRows& rows, int i, bool inside) const {
        const unsigned char* from = source + (i64)(row + i * kRowsPerPass) * rows.row_stride;
        Chunk c;
        #pragma unroll
        for (int e = 0; e < kChunkElements; e += 2) {
            u32 word = 0;
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = chunk * kChunkElements + e + half;
                if (inside && column < kDim) word |= (u32)ld_global_u16(from + column * rows.dim_stride) << (16 * half);
            }
            c.word[e / 2] = word;
        }
        return c;
    }
};
