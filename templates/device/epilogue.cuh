// What happens after the last key tile: normalise, write LSE, and send O through shared memory so that it leaves in 16-byte stores.
#pragma once
#include "device/softmax.cuh"
#include "device/chunk_io.cuh"

constexpr float kLn2 = 0.693147180559945309f;

// Divides O by the row sums; lse[w][r] becomes the natural log of the row's sum of exponentials. A row that sees no key: O = 0, -inf.
template <int kRowBlocks, int kPerThread>
DEVICE void normalise(float (&o)[kRowBlocks][kPerThread], float (&lse)[kRowBlocks][2], const RowTotals<kRowBlocks>& totals) {
    #pragma unroll
    for (int w = 0; w < kRowBlocks; w++)
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const float total = quad_sum(totals.sum[w][r]);
            const float inverse = rcp_approx(total);   // NaN stays NaN
            lse[w][r] = total == 0.f ? minus_infinity() : (totals.log2_factor[w][r] + log2_approx(total)) * kLn2;
            #pragma unroll
            for (int i = 0; i < kPerThread / 4; i++) { o[w][4 * i + 2 * r] *= inverse; o[w][4 * i + 2 * r + 1] *= inverse; }
            if (warp_any(total == 0.f)) {   // not a product with 0: V may hold NaN where nobody looks
                #pragma unroll
                for (int i = 0; i < kPerThread / 4; i++)
                    #pragma unroll
                    for (int e = 0; e < 2; e++) o[w][4 * i + 2 * r + e] = total == 0.f ? 0.f : o[w][4 * i + 2 * r + e];
            }
        }
}

// O of a warp's rows into its own rows of the staging tile; other warps' rows are not touched, so a warp barrier is enough.
template <bool kBf16, int kPitch, int kRowBlocks, int kColumnsOut>
DEVICE void stage_output(u32 warp_smem, const float (&o)[kRowBlocks][kColumnsOut / 2], int lane) {
    #pragma unroll
    for (int w = 0; w < kRowBlocks; w++)
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = 16 * w + 8 * r + lane / 4;
            #pragma unroll
            for (int i = 0; i < kColumnsOut / 8; i++)
                st_shared(warp_smem + swizzled<kPitch>(row, i) + (lane & 3) * 4, pack_pair<kBf16>(o[w][4 * i + 2 * r], o[w][4 * i + 2 * r + 1]));
        }
}
