// Online softmax in base 2 on mma accumulators (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1), with lazy rescaling.
//
// A row keeps a reference near its maximum; probabilities are exp2(score * scale - reference * scale). A step only tests, without
// shuffles, that no score exceeds the reference by more than 2^kSlack in the probability (ForwardConfig.slack).
// Otherwise the warp takes the exact path: new maximum, sums and outputs rescaled. The result is the same up to rounding, because
// numerator and denominator share the reference. That rounding is why the slack is small: a key whose score is the reference has a
// probability of 1, which 16 bits hold exactly, and the error of a rounded one shows where a key makes up much of its row.
#pragma once
#include "device/ptx.cuh"

// Two exponents fail the lazy test on purpose (exponent + slack < 0), so that their rows take the exact path in every step.
// A row that has seen no key: this exponent never meets a finite score.
constexpr float kEmptyExponent = -1e30f;
// From |reference * scale| = 512 on, rounding that product moves a probability by 2^-16 and more, and what a key that outweighs all others
// gets would no longer be 1 to within 16-bit rounding. Such a row is large: it subtracts its reference from the scores before they are
// multiplied, and its probabilities carry a constant factor of 2^(kMostSlack + 1) instead.
constexpr float kMostSlack = 8.f;   // far from what fp16 holds, also times that factor
constexpr float kLargeProduct = 512.f;
constexpr float kLargeExponent = -kMostSlack - 1.f;
static_assert(kSlack <= kMostSlack, "rows that fail the lazy test on purpose must fail it");

// update_but_output lets the slack grow with the row's sum, up to kMostSlack: a key may exceed the reference by more than 2^kSlack where that
// is less than 2^-kShareBits of the row, too small a share for its rounding to show. Long rows have fewer exact steps for it.
constexpr float kShareBits = 4.f;
constexpr bool kSlackGrows = kSlack < kMostSlack;

DEVICE float minus_infinity() { return bits_float(0xff800000); }

// A row's sum over this thread's columns, and the log2 of what it has to be multiplied by to be the sum of exp2(score * scale).
template <int kRowBlocks>
struct RowTotals {
    float sum[kRowBlocks][2];
    float log2_factor[kRowBlocks][2];
};

// A thread holds rows r = 0, 1 of each of its warp's kRowBlocks 16-row blocks. Element e of column pair i is s[w][4*i + 2*r + e].
template <int kRowBlocks, int kColumns, int kColumnsOut>
struct OnlineSoftmax {
    static constexpr int kPairs = kColumns / 8;
    using Scores = float[kRowBlocks][kColumns / 2];
    using Output = float[kRowBlocks][kColumnsOut / 2];

    float exponent[kRowBlocks][2];   // reference * scale, rounded, or one of the two above
    float sum[kRowBlocks][2];        // over this thread's columns
    int limit[kRowBlocks][2];        // for update_but_output: what the row's scores may reach, as limit_bits
    u32 reference_smem;              // the block's references, which only the exact path and the epilogue read

    DEVICE explicit OnlineSoftmax(u32 smem) : reference_smem(smem) {
        const u32 references = thread_references();
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                exponent[w][r] = kEmptyExponent;
                sum[w][r] = 0.f;
                st_shared_f32(references + row_offset(w, r), minus_infinity());
            }
    }

    // Makes the scores of a step ready for probability(), and O and the sums fit their references.
    DEVICE void update(Scores& s, Output& o, float scale, float inverse_scale) {
        bool raise = false;
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) raise |= top_bits(s[w], r) >= limit_bits(exponent[w][r], kSlack, inverse_scale);
        if (!warp_any(raise)) return;
        float correction[kRowBlocks][2];
        if (raise_references(s, correction, scale)) {
            rescale_sums(correction);
            rescale_output(o, correction);
        }
    }

    // The same for a kernel whose O is still being written. Returns whether O has to be rescaled by `correction` afterwards.
    template <bool kExact>
    DEVICE bool update_but_output(Scores& s, float scale, float inverse_scale, float (&correction)[kRowBlocks][2]) {
        float top[kRowBlocks][2];
        bool raise = kExact, exact = kExact;
        if (kSlackGrows) set_limits(inverse_scale);
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                const int bits = top_bits(s[w], r);
                raise |= bits >= limit[w][r];
                exact |= limit[w][r] < 0;
                top[w][r] = bits_float(bits);
            }
        if (!warp_any(raise)) return false;
        bool any_seen = true;
        if (warp_any(exact) || !raise_ordinary(top, scale, correction)) any_seen = raise_references(s, correction, scale);
        rescale_sums(correction);
        set_limits(inverse_scale);
        return any_seen;
    }

    DEVICE static void rescale_output(Output& o, const float (&correction)[kRowBlocks][2]) {
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++)
                #pragma unroll
                for (int i = 0; i < kColumnsOut / 8; i++) { o[w][4 * i + 2 * r] *= correction[w][r]; o[w][4 * i + 2 * r + 1] *= correction[w][r]; }
    }

    // What is left of rows that have seen all their keys.
    DEVICE RowTotals<kRowBlocks> totals(float scale) const {
        const u32 references = thread_references();
        RowTotals<kRowBlocks> totals;
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                totals.sum[w][r] = sum[w][r];
                totals.log2_factor[w][r] = log2_factor(references, w, r, scale);
            }
        return totals;
    }

    // New rows, whose first scores these are; O, which may still be that of the rows before, is not touched.
    DEVICE void begin(Scores& s, float scale, float inverse_scale) {
        float top[kRowBlocks][2];
        bool all_positive = true, any_large = false;
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                top[w][r] = quad_max(bits_float(top_bits(s[w], r)));
                all_positive &= top[w][r] > 0.f;
            }
        if (warp_any(!all_positive)) {
            #pragma unroll
            for (int w = 0; w < kRowBlocks; w++)
                #pragma unroll
                for (int r = 0; r < 2; r++) top[w][r] = quad_max(row_max(s[w], r));
        }
        const u32 references = thread_references();
        warp_sync();   // every lane has read the totals of the rows before
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                st_shared_f32(references + row_offset(w, r), top[w][r]);
                sum[w][r] = 0.f;
                exponent[w][r] = exponent_of(top[w][r], scale);
                any_large |= is_large(top[w][r], scale);
            }
        if (warp_any(any_large)) subtract_large(s, scale, references);
        set_limits(inverse_scale);
    }

    DEVICE float probability(float score, float scale, int w, int r) const { return exp2_approx(fma_f32(score, scale, -exponent[w][r])); }

    DEVICE float log2_factor(u32 references, int w, int r, float scale) const {
        const float reference = ld_shared_f32(references + row_offset(w, r));
        return mul_f32(reference, scale) + (is_large(reference, scale) ? kLargeExponent : 0.f);
    }

    // Where the thread's row (w, r) keeps its reference, in score units, -inf if it has seen no key: offset from thread_references().
    DEVICE static u32 row_offset(int w, int r) { return 4 * (16 * w + 8 * r); }
    DEVICE u32 thread_references() const {
        const int thread = thread_index();
        return reference_smem + 4 * (thread / 32 * (16 * kRowBlocks) + thread % 32 / 4);
    }

private:
    // The largest score of this thread where that is positive, some negative number where none is: integer order equals float order for
    // positive numbers, and one 3-input maximum replaces two float ones. Enough for a row whose limit is not negative.
    DEVICE static int top_bits(const float (&s)[kColumns / 2], int r) {
        int top = float_bits(s[2 * r]);
        #pragma unroll
        for (int i = 0; i < kPairs; i++) top = max3_s32(top, float_bits(s[4 * i + 2 * r]), float_bits(s[4 * i + 2 * r + 1]));
        return top;
    }

    // What top_bits is compared with. A limit that is negative or NaN is exceeded by everything: raise_references is right for every row.
    DEVICE static int limit_bits(float exponent, float slack, float inverse_scale) {
        const float limit = (exponent + slack) * inverse_scale;
        return limit >= 0.f ? float_bits(limit) : (int)0x80000000;
    }
    // `sum` is a thread's, about a quarter of the row's; 0 before the first exponentials.
    DEVICE static float grown_slack(float sum) { return min_f32(max_f32(log2_approx(sum) + 2.f - kShareBits, kSlack), kMostSlack); }
    DEVICE void set_limits(float inverse_scale) {
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) limit[w][r] = limit_bits(exponent[w][r], kSlackGrows ? grown_slack(sum[w][r]) : kSlack, inverse_scale);
    }

    DEVICE static float exponent_of(float top, float scale) {
        return top == minus_infinity() ? kEmptyExponent : is_large(top, scale) ? kLargeExponent : mul_f32(top, scale);
    }

    // The short way where no row of the warp has a negative limit: `thread_top` is each thread's top_bits, and a negative one of a row that
    // stays below its limit does no harm. False if a row becomes large; nothing has changed then.
    DEVICE bool raise_ordinary(const float (&thread_top)[kRowBlocks][2], float scale, float (&correction)[kRowBlocks][2]) {
        float top[kRowBlocks][2];
        bool any_large = false;
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                top[w][r] = quad_max(thread_top[w][r]);
                any_large |= is_large(top[w][r], scale);
            }
        if (warp_any(any_large)) return false;
        const u32 references = thread_references();
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                const float old = exponent[w][r], product = mul_f32(top[w][r], scale);
                if (product > old) st_shared_f32(references + row_offset(w, r), top[w][r]);
                exponent[w][r] = max_f32(old, product);
                correction[w][r] = exp2_approx(old - exponent[w][r]);
            }
        return true;
    }

    // Exact maxima as references. Returns whether a row of the warp had one before, so that there is something
    // to rescale.
    DEVICE bool raise_references(Scores& s, float (&correction)[kRowBlocks][2], float scale) {
        const u32 references = thread_references();
        bool any_seen = false, any_large = false;
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                const u32 address = references + row_offset(w, r);
                const float old = ld_shared_f32(address), top = max_f32(old, quad_max(row_max(s[w], r)));
                const bool seen = old != minus_infinity(), large = is_large(top, scale);
                warp_sync();   // the four lanes of a row share the word: all have read it
                st_shared_f32(address, top);
                // The difference of the rounded products, because those are what probability() subtracts; large ones differ first.
                const float shift = large ? mul_f32(old - top, scale) : mul_f32(old, scale) - mul_f32(top, scale);
                const float factor = (is_large(old, scale) ? kLargeExponent : 0.f) - (large ? kLargeExponent : 0.f);
                correction[w][r] = seen ? exp2_approx(shift + factor) : 0.f;
                exponent[w][r] = exponent_of(top, scale);
                any_seen |= seen;
                any_large |= large;
            }
        if (warp_any(any_large)) subtract_large(s, scale, references);
        return warp_any(any_seen);
    }

    DEVICE static bool is_large(float reference, float scale) {
        return (reference != minus_infinity()) & !(fabsf(mul_f32(reference, scale)) < kLargeProduct);
    }

    DEVICE static float row_max(const float (&s)[kColumns / 2], int r) {
        float top = s[2 * r];
        #pragma unroll
        for (int i = 0; i < kPairs; i++) top = max_f32(top, max_f32(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
        return top;
    }

    DEVICE void rescale_sums(const float (&correction)[kRowBlocks][2]) {
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) sum[w][r] *= correction[w][r];
    }

    DEVICE static void subtract_large(Scores& s, float scale, u32 references) {
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                const float reference = ld_shared_f32(references + row_offset(w, r)), shift = is_large(reference, scale) ? reference : 0.f;
                #pragma unroll
                for (int i = 0; i < kPairs; i++) { s[w][4 * i + 2 * r] -= shift; s[w][4 * i + 2 * r + 1] -= shift; }
            }
    }
};
