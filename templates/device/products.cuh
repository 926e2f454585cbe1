// Matrix products of a warp out of shared memory, and the shares of a tile's columns that warps take.
#pragma once
#include "device/tile.cuh"

// The 16-column blocks of a tile of kColumns that one of kSharers warps takes: every kSharers-th from `first` on, so that an address
// is that of the first block and a constant. Where they do not come out even, a warp repeats the last block as one that nobody stores.
template <int kColumns, int kSharers>
struct ColumnShare {
    static constexpr int kTotal = ceil_div(kColumns, 16), kBlocks = ceil_div(kTotal, kSharers);
    static_assert((kSharers & (kSharers - 1)) == 0, "the first block must differ from its followers in other bits");
    int first;
    DEVICE static constexpr bool even(int n) { return (n + 1) * kSharers <= kTotal; }
    DEVICE int block(int n) const { return n * kSharers + first; }
    DEVICE bool exists(int n) const { return even(n) || block(n) < kTotal; }
    // For ldmatrix at `row_block`: `lane` is the lane's address at the tile's first column, `lane_first` that at the first block.
    template <class Layout>
    DEVICE u32 address(u32 lane, u32 lane_first, int row_block, int n) const {
        return even(n) ? Layout::block(lane_first, row_block, n * kSharers) : Layout::block(lane, row_block, min_int(block(n), kTotal - 1));
    }
};

// C += A B (C = A B with kFresh) over kSteps steps of 16, for kRowBlocks 16-row blocks and kBlocks 16-column blocks.
// load_a(a, k) brings the A fragments of step k, load_b(b, k, n) two B fragments; between(i) is called behind the i-th of the
// kSteps * kBlocks groups of mma's, for work that hides there. B is loaded a group ahead of its use, A a step.
template <bool kBf16, bool kFresh, int kSteps, int kRowBlocks, int kBlocks, class LoadA, class LoadB, class Between>
DEVICE void multiply(float (&c)[kRowBlocks][8 * kBlocks], LoadA load_a, LoadB load_b, Between between) {
    u32 a[2][kRowBlocks][4], b[2][4];
    load_b(b[0], 0, 0);
    load_a(a[0], 0);
    #pragma unroll
    for (int k = 0; k < kSteps; k++) {
        #pragma unroll
        for (int n = 0; n < kBlocks; n++) {
            const int i = k * kBlocks + n;
            if (i + 1 < kSteps * kBlocks) load_b(b[(i + 1) % 2], (i + 1) / kBlocks, (i + 1) % kBlocks);
            if (n == 0 && k + 1 < kSteps) load_a(a[(k + 1) % 2], k + 1);
            #pragma unroll
            for (int w = 0; w < kRowBlocks; w++)
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    float* to = c[w] + 8 * n + 4 * half;
                    if (kFresh && k == 0) mma_m16n8k16_first<kBf16>(to, a[k % 2][w], b[i % 2][2 * half], b[i % 2][2 * half + 1]);
                    else mma_m16n8k16<kBf16>(to, a[k % 2][w], b[i % 2][2 * half], b[i % 2][2 * half + 1]);
                }
            between(i);
        }
    }
}
