// Online softmax in base 2 on mma accumulators (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1), with lazy rescaling.
//
// A row keeps a reference near its maximum; probabilities are exp2(score * scale - reference * scale). A step only tests, without
// shuffles, that no score exceeds the reference by more than `slack` (2^8 in the probability: harmless in fp16 and in the fp32 sums).
// Otherwise the warp takes the exact path: new maximum, sums and outputs rescaled. The result is the same up to rounding, because
// numerator and denominator share the reference.
#pragma once
#include "device/ptx.cuh"

constexpr float kMinusInfinity = -__builtin_huge_valf();
// From 2^22 on, reference * scale is rounded to more than 1/4: such rows always take the exact path and subtract before they multiply.
constexpr float kHugeExponent = 4194304.f;
constexpr float kHugePerSlack = kHugeExponent / 8.f;

// A thread holds rows r = 0 .. 2*kRowBlocks-1 of its warp's kRowBlocks 16-row blocks; kColumns is the tile's width.
// Accumulator element (block w, column pair i, half r, e) is s[w][4*i + 2*r + e].
template <int kRowBlocks, int kColumns, int kColumnsOut>
struct OnlineSoftmax {
    static constexpr int kPairs = kColumns / 8;
    float reference[kRowBlocks][2];   // in score units; -inf: no finite score seen
    float sum[kRowBlocks][2];         // this thread's columns only
    float exponent[kRowBlocks][2];    // reference * scale, as the current step subtracts it

    DEVICE OnlineSoftmax() {
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) { reference[w][r] = kMinusInfinity; sum[w][r] = 0.f; }
    }

    // Makes the step's scores ready for probability(): raises the reference where it must.
    DEVICE void update(float (&s)[kRowBlocks][kColumns / 2], float (&o)[kRowBlocks][kColumnsOut / 2], float scale, float slack) {
        bool raise = false;
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) raise |= exceeds(s[w], r, reference[w][r] + slack, slack);
        if (warp_any(raise)) {
            raise_reference(s, o, scale, slack);
        } else {   // then every reference is an ordinary number
            #pragma unroll
            for (int w = 0; w < kRowBlocks; w++)
                #pragma unroll
                for (int r = 0; r < 2; r++) exponent[w][r] = mul_f32(reference[w][r], scale);
        }
    }

    DEVICE float probability(float score, float scale, int w, int r) const { return exp2_approx(fma_f32(score, scale, -exponent[w][r])); }

private:
    DEVICE static bool is_huge(float reference, float slack) { return !(fabsf(reference) < slack * kHugePerSlack); }

    // Integer order equals float order for positive numbers, and one 3-input maximum replaces two float ones. A limit that is negative, NaN,
    // or huge answers true: the exact path is right for every row.
    DEVICE static bool exceeds(const float (&s)[kColumns / 2], int r, float limit, float slack) {
        int top = float_bits(s[2 * r]);
        #pragma unroll
        for (int i = 0; i < kPairs; i++) top = max3_s32(top, float_bits(s[4 * i + 2 * r]), float_bits(s[4 * i + 2 * r + 1]));
        const bool usable = (u32)float_bits(limit) < (u32)float_bits(slack * kHugePerSlack);
        return top >= (usable ? float_bits(limit) : (int)0x80000000);
    }

    DEVICE void raise_reference(float (&s)[kRowBlocks][kColumns / 2], float (&o)[kRowBlocks][kColumnsOut / 2], float scale, float slack) {
        bool any_huge = false;
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                float top = s[w][2 * r];
                #pragma unroll
                for (int i = 0; i < kPairs; i++) top = max_f32(top, max_f32(s[w][4 * i + 2 * r], s[w][4 * i + 2 * r + 1]));
                const float old = reference[w][r];
                top = max_f32(old, quad_max(top));
                const bool empty = top == kMinusInfinity, huge = !empty && is_huge(top, slack);
                // The difference of the rounded products, because those are what probability() subtracts; huge ones differ first.
                const float shift = huge ? mul_f32(old - top, scale) : mul_f32(old, scale) - mul_f32(top, scale);
                const float correction = old == kMinusInfinity ? 0.f : exp2_approx(shift);
                any_huge |= huge;
                exponent[w][r] = empty || huge ? 0.f : mul_f32(top, scale);
                reference[w][r] = top;
                sum[w][r] *= correction;
                #pragma unroll
                for (int i = 0; i < kColumnsOut / 8; i++) { o[w][4 * i + 2 * r] *= correction; o[w][4 * i + 2 * r + 1] *= correction; }
            }
        if (warp_any(any_huge)) subtract_huge(s, slack);
    }

    DEVICE void subtract_huge(float (&s)[kRowBlocks][kColumns / 2], float slack) const {
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                const float shift = reference[w][r] != kMinusInfinity && is_huge(reference[w][r], slack) ? reference[w][r] : 0.f;
                #pragma unroll
                for (int i = 0; i < kPairs; i++) { s[w][4 * i + 2 * r] -= shift; s[w][4 * i + 2 * r + 1] -= shift; }
            }
    }
};
