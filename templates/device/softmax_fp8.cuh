// Online softmax in base 2 for products of 8-bit floats, whose scores have a scale of their own for every key tile.
//
// A row's reference is its exact maximum so far, in scaled units: log2 of a probability. P leaves the softmax as 2^kOffset times what it is
// relative to that maximum, so that it spans the whole range of e4m3: the row's largest probability is 2^8, which e4m3 holds exactly, 448 is
// its largest number, and its smallest is 2^-17 of the row's largest. No slack as in softmax.cuh: what a probability exceeds its reference by
// would be rounded to 3 bits just where one key makes up much of a row; and with two-level accumulation a correction of O costs nothing.
#pragma once
#include "device/epilogue.cuh"

constexpr float kOffset = 8.f;
// From here on the rounding of score * factor would show in the probability: such rows multiply and subtract in two roundings, so that the
// largest probability is 2^kOffset exactly again.
constexpr float kLargeReference = 4096.f;
// Scores are at most 2^32 D: a smaller factor would make them all 0, and masked ones NaN.
constexpr float kSmallestFactor = 1e-37f;

// A thread holds rows r = 0, 1 of its warp's 16; element e of column pair i is s[4*i + 2*r + e].
template <int kColumns>
struct Fp8Softmax {
    using Scores = float[kColumns / 2];

    float reference[2];   // kEmptyExponent: no key seen
    float sum[2];         // over this thread's columns
    float factor;         // of the present scores, positive
    float shift[2];       // probabilities are exp2(score * factor + shift)

    DEVICE void begin() {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            reference[r] = kEmptyExponent;
            sum[r] = 0.f;
        }
    }

    // Makes new scores ready for probability(), and the sums fit their references; `correction` does that to O. `scale` is that of the scores.
    DEVICE void update(Scores& s, float scale, float (&correction)[2]) {
        float next[2];
        const bool is_special = warp_any(take_maxima(s, scale, next));
        if (is_special) find_maxima(s, next);
        raise_references(next, correction);
        if (is_special) subtract_references(s);
    }

    // The parts of an update. First, the references to come; true where they are not those yet, or where the scores need them subtracted.
    DEVICE bool take_maxima(const Scores& s, float scale, float (&next)[2]) {
        factor = max_nan_f32(scale, kSmallestFactor);   // NaN for scales that are none: so is all that comes of them
        bool special = false;
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const int top = quad_max_s32(top_bits(s, r));
            next[r] = max_f32(reference[r], mul_f32(bits_float(top), factor));
            special |= top < 0 | !(fabsf(next[r]) < kLargeReference);
        }
        return special;
    }
    // The same of any scores, for rows whose scores are all negative.
    DEVICE void find_maxima(const Scores& s, float (&next)[2]) const {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = s[2 * r];
            #pragma unroll
            for (int i = 0; i < kColumns / 8; i++) top = max_f32(top, max_f32(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
            next[r] = max_f32(reference[r], mul_f32(quad_max(top), factor));
        }
    }
    DEVICE void raise_references(const float (&next)[2], float (&correction)[2]) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            correction[r] = exp2_approx(reference[r] - next[r]);
            reference[r] = next[r];
            shift[r] = kOffset - next[r];
            sum[r] *= correction[r];
        }
    }
    // Right for every row, and needed where a reference is large.
    DEVICE void subtract_references(Scores& s) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            #pragma unroll
            for (int i = 0; i < kColumns / 8; i++)
                #pragma unroll
                for (int e = 0; e < 2; e++) s[4 * i + 2 * r + e] = mul_f32(s[4 * i + 2 * r + e], factor) - reference[r];
            shift[r] = kOffset;
        }
        factor = 1.f;
    }

    DEVICE float probability(float score, int r) const { return exp2_approx(fma_f32(score, factor, shift[r])); }

    // Of rows that have seen all their keys: the natural log of a row's sum of exponentials, and what O has to be multiplied by, not yet by its unit.
    // A row that sees no key: -inf, and 0, which no other row has.
    DEVICE void finish(float (&lse)[2], float (&inverse)[2]) const {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const float total = quad_sum(sum[r]);
            lse[r] = total == 0.f ? minus_infinity() : (reference[r] - kOffset + log2_approx(total)) * kLn2;
            inverse[r] = total == 0.f ? 0.f : rcp_approx(total);   // NaN stays NaN
        }
    }

private:
    // The largest score of this thread where one is not negative, some negative number where none is: integer order equals float order then.
    DEVICE static int top_bits(const Scores& s, int r) {
        int top[2] = {float_bits(s[2 * r]), float_bits(s[2 * r + 1])};
        #pragma unroll
        for (int i = 1; i < kColumns / 8; i++) top[i % 2] = max3_s32(top[i % 2], float_bits(s[4 * i + 2 * r]), float_bits(s[4 * i + 2 * r + 1]));
        return max_int(top[0], top[1]);
    }
};

// An update of several row blocks, with one branch for all: each costs registers.
template <int kRowBlocks, int kColumns>
DEVICE void update_together(Fp8Softmax<kColumns> (&softmax)[kRowBlocks], float (&s)[kRowBlocks][kColumns / 2], float scale, float (&correction)[kRowBlocks][2]) {
    float next[kRowBlocks][2];
    bool special = false;
    #pragma unroll
    for (int w = 0; w < kRowBlocks; w++) special |= softmax[w].take_maxima(s[w], scale, next[w]);
    const bool is_special = warp_any(special);
    if (is_special) {
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++) softmax[w].find_maxima(s[w], next[w]);
    }
    #pragma unroll
    for (int w = 0; w < kRowBlocks; w++) softmax[w].raise_references(next[w], correction[w]);
    if (is_special) {
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++) softmax[w].subtract_references(s[w]);
    }
}
