// Products of e4m3 and e5m2 codes for one warp: as they are, by mma.sync of 8-bit floats, or converted to fp16 beforehand. In both, a fragment is 32
// bytes of the operands' rows (see mma.cuh), so that ldmatrix and Q K^T are those of 16-bit operands.
#pragma once
#include "device/mma.cuh"
#include "device/softmax_fp8.cuh"

// V^T: a row for each column of V, of kRowBytes of keys. The 16-byte unit u of a row stands at u ^ (number of its 128-byte line mod 8), as far as
// rows have as many units; so ldmatrix, which reads one unit of eight consecutive rows at a time, touches every bank once.
template <int kRowBytes>
struct KeyRows {
    static constexpr int kUnits = kRowBytes / 16, kRowsPerLine = kUnits < 8 ? 8 / kUnits : 1, kSwizzle = kUnits < 8 ? kUnits - 1 : 7;
    static_assert(kRowBytes % 32 == 0 && (kUnits & (kUnits - 1)) == 0, "rows are a power of two of fragments");
    DEVICE static u32 chunk_offset(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row / kRowsPerLine & kSwizzle)) << 4); }
    DEVICE static u32 lane_offset_by_pairs(int lane) { return chunk_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1); }   // see TileLayout
    DEVICE static u32 block(u32 lane_address, int row_block, int col_block) {
        return (lane_address ^ ((2 * col_block & kSwizzle) << 4)) + (col_block >> 2) * 128 + row_block * 16 * kRowBytes;
    }
};

// All threads of a block copy a tile of kKeys keys out of an image of V (cuflash/fp8_layout.py), whose rows have 128: in passes, in which a thread
// keeps its place in a row, and its row modulo 8.
template <int kColumns, int kKeys, int kThreads>
struct ImageLoader {
    using Layout = KeyRows<kKeys>;
    static constexpr int kUnits = kKeys / 16, kRowsPerPass = kThreads / kUnits, kPasses = ceil_div(kColumns, kRowsPerPass), kImageRow = 128;
    static_assert(kRowsPerPass % 8 == 0 && kImageRow % kKeys == 0, "the swizzles of a thread's rows must follow from its first row");

    int row, unit;
    u32 smem_offset;

    DEVICE explicit ImageLoader(int thread) : row(thread / kUnits), unit(thread % kUnits), smem_offset(Layout::chunk_offset(row, unit)) {}

    DEVICE bool has(int i) const { return kColumns % kRowsPerPass == 0 || row + i * kRowsPerPass < kColumns; }
    DEVICE u32 address(u32 smem, int i) const { return smem + smem_offset + i * kRowsPerPass * kKeys; }
    // `first_key`: of the tile, in the image.
    DEVICE void tile(u32 smem, const unsigned char* image, int first_key, bool go) const {
        const unsigned char* from = image + row * kImageRow + (((first_key / 16 + unit) ^ (row & 7)) << 4);
        #pragma unroll
        for (int i = 0; i < kPasses; i++) cp_async<16, false>(address(smem, i), from + i * kRowsPerPass * kImageRow, 16, go && has(i));
    }
};

// ---- operands: what the number that a product takes is, relative to the code's

// Codes as they are.
struct CodeOperand { static constexpr float kUnit = 1.f; };

// Codes that become fp16. kHardware: the target converts e4m3 by itself.
template <bool kHardware, bool kE5m2>
struct Fp16Operand {
    static constexpr float kUnit = kHardware || kE5m2 ? 1.f : 0x1p-8f;
    // Two codes in the lower half of a word.
    DEVICE static u32 expand(u32 codes) {
        if constexpr (kHardware && !kE5m2) return unpack_e4m3x2(codes);
        const u32 upper = select_bytes<0x1404>(codes);   // of each fp16 number, half of it: all of e5m2, NaN and infinities too
        return kE5m2 ? upper : expand_pair(upper);
    }
    // Two codes of e4m3, each in the upper half of an fp16 number, which becomes 2^-8 of what the code is: exact, since fp16's exponent is larger by 8
    // and its subnormals are the smaller ones. NaN, the largest magnitude, gets the exponent of one.
    DEVICE static u32 expand_pair(u32 codes) {
        const u32 magnitudes = codes >> 1 & 0x3f803f80;
        return magnitudes | ((magnitudes + 0x00800080) & 0x40004000) | (codes & 0x80008000);
    }
};

// ---- the two products

// Of codes: a and b are of e5m2 or else e4m3, probabilities of e4m3.
template <bool kE5m2A, bool kE5m2B>
struct CodeProduct {
    DEVICE static void add(float* d, const u32* a, u32 b0, u32 b1) { mma_m16n8k32<kE5m2A, kE5m2B>(d, a, b0, b1); }
    DEVICE static void first(float* d, const u32* a, u32 b0, u32 b1) { mma_m16n8k32_first<kE5m2A, kE5m2B>(d, a, b0, b1); }
    // Register e of an A fragment, from the accumulators of its 32 keys: an image's tokens are in the order in which a thread has those.
    DEVICE static u32 pack(const float* p, int e) {
        const float* x = p + e / 2 * 8 + e % 2 * 2;
        return pack_float8x4<kE5m2A>(x[0], x[1], x[4], x[5]);
    }
};

struct Fp16Product : Product16<false> {
    // The same of 16 keys, whose order is that of their accumulators again: expand() has parted the image's halves of four.
    DEVICE static u32 pack(const float* p, int e) {
        const float* x = p + e / 2 * 4 + e % 2 * 2;
        return pack_pair<false>(x[0], x[1]);
    }
};

// ---- codes to fp16

// Codes 0 and 1 of each word, and codes 2 and 3: any order of columns serves that Q and K have both.
template <class Operand>
DEVICE void expand(const Chunk& codes, Chunk& low, Chunk& high) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        low.word[i] = Operand::expand(codes.word[i]);
        high.word[i] = Operand::expand(codes.word[i] >> 16);
    }
}
// Chunk `chunk` of a row of codes into a tile of fp16.
template <class Operand, class Layout>
DEVICE void store_expanded(u32 smem, int row, int chunk, const Chunk& codes) {
    Chunk low, high;
    expand<Operand>(codes, low, high);
    st_shared(smem + Layout::chunk_offset(row, 2 * chunk), low);
    st_shared(smem + Layout::chunk_offset(row, 2 * chunk + 1), high);
}
// What the thread itself has copied to `codes`; it has waited for it.
template <class Operand, class Layout, int kRows, class Loader>
DEVICE void expand_rows(u32 smem, u32 codes, const Loader& loader) {
    #pragma unroll
    for (int i = 0; i < kRows / Loader::kRowsPerPass; i++)
        if (loader.has_chunk()) store_expanded<Operand, Layout>(smem, loader.row + i * Loader::kRowsPerPass, loader.chunk, ld_shared_chunk(loader.address(codes, i)));
}
template <class Operand, class Layout, class Loader>
DEVICE void expand_image(u32 smem, u32 codes, const Loader& loader) {
    #pragma unroll
    for (int i = 0; i < Loader::kPasses; i++)
        if (loader.has(i)) store_expanded<Operand, Layout>(smem, loader.row + i * Loader::kRowsPerPass, loader.unit, ld_shared_chunk(loader.address(codes, i)));
}
// Rows of codes straight from memory; those from rows_left on become zero, and so do columns behind the head dim, which is 2 * Loader's.
template <class Operand, class Layout, int kRows, int kHeadDim, class Loader>
DEVICE void load_expanded(u32 smem, const unsigned char* source, const GlobalRows& rows, int rows_left, const Loader& loader) {
    #pragma unroll
    for (int i = 0; i < kRows / Loader::kRowsPerPass; i++) {
        const int row = loader.row + i * Loader::kRowsPerPass;
        Chunk codes{};
        if (row < rows_left && loader.chunk * kChunkBytes < kHeadDim) codes = ld_global<Chunk>(source + (i64)(i * Loader::kRowsPerPass) * rows.row_stride + loader.global_offset);
        if (loader.has_chunk()) store_expanded<Operand, Layout>(smem, row, loader.chunk, codes);
    }
}

// ---- P V

// O = carry * O + P V over kSteps fragments of keys; v_lane is the lane's address in the tile of V^T. With kTwoLevel the tensor cores add up this
// tile alone, and the sum of both is fp32. Columns of O are taken one block after the other, so that this takes no registers.
template <class Product, bool kTwoLevel, class Layout, int kColumnsOut, int kRowBlocks, int kSteps>
DEVICE void multiply_pv_by_columns(float (&o)[kRowBlocks][kColumnsOut / 2], const u32 (&p)[kRowBlocks][kSteps][4], const float (&carry)[kRowBlocks][2], u32 v_lane) {
    constexpr int kBlocks = kColumnsOut / 16;
    u32 b[kRing][4];
    ldmatrix_x4(b[0], v_lane);
    #pragma unroll
    for (int n = 0; n < kBlocks; n++) {
        float c[kRowBlocks][8];
        #pragma unroll
        for (int k = 0; k < kSteps; k++) {
            const int i = n * kSteps + k, next = i + kAhead;
            if (next < kBlocks * kSteps) ldmatrix_x4(b[next % kRing], Layout::block(v_lane, next / kSteps, next % kSteps));
            #pragma unroll
            for (int w = 0; w < kRowBlocks; w++)
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    float* to = c[w] + 4 * half;
                    if (k == 0 && !kTwoLevel) {
                        #pragma unroll
                        for (int e = 0; e < 4; e++) to[e] = o[w][8 * n + 4 * half + e] * carry[w][e / 2];
                    }
                    if (k == 0 && kTwoLevel) Product::first(to, p[w][k], b[i % kRing][2 * half], b[i % kRing][2 * half + 1]);
                    else Product::add(to, p[w][k], b[i % kRing][2 * half], b[i % kRing][2 * half + 1]);
                }
        }
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int e = 0; e < 8; e++) o[w][8 * n + e] = kTwoLevel ? fma_f32(o[w][8 * n + e], carry[w][e / 2 % 2], c[w][e]) : c[w][e];
        if (kTwoLevel) warp_sync();   // ptxas would begin all columns at once, and spill
    }
}
