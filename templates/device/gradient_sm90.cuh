// P^T and dS^T of a query tile in wgmma accumulators: keys are the rows, queries the columns.
#pragma once
#include "device/ptx_sm90.cuh"
#include "device/gradient.cuh"

// Low word of the descriptor of an operand at an address in the block's shared memory, which begins at `base`. A sum, and not known before a step begins: so it
// takes a uniform register or two, where the compiler would otherwise keep dozens of them in vector registers, and spill. In a cluster the block's rank stands
// above the 18 bits of an address.
DEVICE u32 operand(u32 base, u32 address, int chunk_bytes) { return opaque((base & 0x3ffff) / 16) + (address - base) / 16 + (chunk_bytes / 16 << 16); }

// A thread's part of such a tile: eight columns at a time, keys `first` and `first + 8`, queries 8 * i + 2 * (lane & 3) and the next one.
// Which of these pairs exist, counted from the thread's first key: how many keys there are, and the last one that its first query sees.
struct KeysLeft { int keys, last; };

// P = exp(S - LSE), times 2^kShift. None is above that: a rounded LSE of large magnitude must not make it so. Without a shift the sign alone sees to that, which
// costs no instruction. `rows`: where the constants of the thread's first query lie.
template <int kQueries, bool kMasked, bool kCausal, int kShift = 0>
DEVICE void exponentials(float (&s)[kQueries / 2], u32 rows, float scale_log2, KeysLeft left) {
    #pragma unroll
    for (int i = 0; i < kQueries / 8; i++) {
        float lse[2];
        ld_shared_f32x2(rows + RowLayout<true>::lse(8 * i), lse);
        #pragma unroll
        for (int e = 0; e < 4; e++) {
            float& x = s[4 * i + e];
            if constexpr (kShift == 0) x = exp2_approx(-fabsf(fma_f32(x, scale_log2, -lse[e & 1])));
            else x = exp2_approx(min_nan_f32(fma_f32(x, scale_log2, kShift - lse[e & 1]), kShift));
            const int key = 8 * (e / 2), query = 8 * i + (e & 1);
            if (kMasked && (key >= left.keys || (kCausal && key - query > left.last))) x = 0.f;
        }
    }
}

// dS = P * (dP - delta), in place of dP; of as many queries. P is 2^kShift times as large.
template <int kQueries, int kShift = 0>
DEVICE void differentials(float* dp, const float* p, u32 rows) {
    #pragma unroll
    for (int i = 0; i < kQueries / 8; i++) {
        float delta[2];
        ld_shared_f32x2(rows + RowLayout<true>::kDelta + RowLayout<true>::lse(8 * i), delta);
        #pragma unroll
        for (int e = 0; e < 4; e++) {
            float& x = dp[4 * i + e];
            constexpr float kUnit = 1.f / (1 << kShift);
            x = p[4 * i + e] * (kShift == 0 ? x - delta[e & 1] : fma_f32(x, kUnit, -kUnit * delta[e & 1]));
        }
    }
}
