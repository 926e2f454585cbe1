// The two matrix products of a step, for one warp of kRowBlocks 16-row blocks.
#pragma once
#include "device/softmax.cuh"
#include "device/tile.cuh"

// Fragments of an operand are loaded kAhead blocks before their product, so that ldmatrix's latency hides behind the mma's.
constexpr int kAhead = 1;
constexpr int kRing = kAhead + 1;

// The product of a kernel: d += a * b and d = a * b of fragments of 32 bytes of the operands' rows, eight columns of b. A row of them has kDim
// 16-bit elements, or half as many 8-bit codes.
template <bool kBf16>
struct Product16 {
    DEVICE static void add(float* d, const u32* a, u32 b0, u32 b1) { mma_m16n8k16<kBf16>(d, a, b0, b1); }
    DEVICE static void first(float* d, const u32* a, u32 b0, u32 b1) { mma_m16n8k16_first<kBf16>(d, a, b0, b1); }
};

// The A fragments of Q: the first kHeld k-steps stay in registers, the others are read again in every step.
template <int kHeadDim, int kRowBlocks, int kHeld>
struct QueryFragments {
    using Layout = TileLayout<kHeadDim>;
    u32 held[kHeld > 0 ? kHeld : 1][kRowBlocks][4];
    u32 lane_address;

    DEVICE void load_held() {
        #pragma unroll
        for (int k = 0; k < kHeld; k++) load(held[k], k);
    }
    DEVICE void load(u32 (&a)[kRowBlocks][4], int k) const {
        #pragma unroll
        for (int w = 0; w < kRowBlocks; w++) ldmatrix_x4(a[w], Layout::block(lane_address, w, k));
    }
};

// S = Q K^T over kColumns keys; k_lane is the lane's address in the tile of K.
template <class Product, int kHeadDim, int kRowBlocks, int kHeld, int kColumns>
DEVICE void multiply_qk(float (&s)[kRowBlocks][kColumns / 2], const QueryFragments<kHeadDim, kRowBlocks, kHeld>& q, u32 k_lane) {
    using Layout = TileLayout<kHeadDim>;
    constexpr int kSteps = ceil_div(kHeadDim, 16), kBlocks = kColumns / 16;
    u32 b[kRing][4], a[2][kRowBlocks][4];
    if constexpr (kHeld == 0) q.load(a[0], 0);
    ldmatrix_x4(b[0], k_lane);
    #pragma unroll
    for (int k = 0; k < kSteps; k++) {
        #pragma unroll
        for (int n = 0; n < kBlocks; n++) {
            const int i = k * kBlocks + n, next = i + kAhead;
            if (next < kSteps * kBlocks) ldmatrix_x4(b[next % kRing], Layout::block(k_lane, next % kBlocks, next / kBlocks));
            if (n == 0 && k + 1 < kSteps && k + 1 >= kHeld) q.load(a[(k + 1) % 2], k + 1);
            #pragma unroll
            for (int w = 0; w < kRowBlocks; w++) {
                const u32* aw = k < kHeld ? q.held[k < kHeld ? k : 0][w] : a[k % 2][w];
                if (k == 0) {
                    Product::first(s[w] + 8 * n, aw, b[i % kRing][0], b[i % kRing][1]);
                    Product::first(s[w] + 8 * n + 4, aw, b[i % kRing][2], b[i % kRing][3]);
                } else {
                    Product::add(s[w] + 8 * n, aw, b[i % kRing][0], b[i % kRing][1]);
                    Product::add(s[w] + 8 * n + 4, aw, b[i % kRing][2], b[i % kRing][3]);
                }
            }
        }
    }
}

// O += P V, with P = softmax probabilities of s made 16 keys at a time: the exponentials of a chunk stand between the products of
// the chunk before it, where the tensor cores leave issue slots free. An accumulator pair of S is, once packed, an A register of P.
template <bool kBf16, int kHeadDimV, int kRowBlocks, int kColumns, int kColumnsOut>
DEVICE void multiply_pv(float (&o)[kRowBlocks][kColumnsOut / 2], const float (&s)[kRowBlocks][kColumns / 2],
                        OnlineSoftmax<kRowBlocks, kColumns, kColumnsOut>& softmax, float scale, u32 v_lane) {
    using Layout = TileLayout<kHeadDimV>;
    constexpr int kSteps = kColumns / 16, kBlocks = kColumnsOut / 16, kUnits = 4 * kRowBlocks;
    u32 b[kRing][4], p[2][kRowBlocks][4];
    auto exponentiate = [&](int k, int unit) {   // one of the kUnits registers of chunk k
        const int w = unit / 4, e = unit % 4, r = e % 2;
        const float p0 = softmax.probability(s[w][8 * k + 2 * e], scale, w, r), p1 = softmax.probability(s[w][8 * k + 2 * e + 1], scale, w, r);
        softmax.sum[w][r] += p0 + p1;
        p[k % 2][w][e] = pack_pair<kBf16>(p0, p1);
    };
    ldmatrix_x4_trans(b[0], v_lane);
    #pragma unroll
    for (int unit = 0; unit < kUnits; unit++) exponentiate(0, unit);
    #pragma unroll
    for (int k = 0; k < kSteps; k++) {
        #pragma unroll
        for (int n = 0; n < kBlocks; n++) {
            const int i = k * kBlocks + n, next = i + kAhead;
            if (next < kSteps * kBlocks) ldmatrix_x4_trans(b[next % kRing], Layout::block(v_lane, next / kBlocks, next % kBlocks));
            #pragma unroll
            for (int w = 0; w < kRowBlocks; w++) {
                mma_m16n8k16<kBf16>(o[w] + 8 * n, p[k % 2][w], b[i % kRing][0], b[i % kRing][1]);
                mma_m16n8k16<kBf16>(o[w] + 8 * n + 4, p[k % 2][w], b[i % kRing][2], b[i % kRing][3]);
            }
            #pragma unroll
            for (int unit = 0; unit < kUnits; unit++)
                if (k + 1 < kSteps && unit * kBlocks / kUnits == n) exponentiate(k + 1, unit);
        }
    }
}
