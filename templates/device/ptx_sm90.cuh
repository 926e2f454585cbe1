// The instructions that only sm_90a has, one wrapper each, beside those of ptx.cuh: mbarriers, TMA, wgmma, setmaxnreg.
// Section numbers are those of the PTX ISA manual, chapter 9.
#pragma once
#include "device/ptx.cuh"

// ---- tensor maps (the driver's opaque descriptor, in the kernel's parameters)

struct alignas(64) TensorMap { unsigned char bytes[128]; };
DEVICE void prefetch_tensor_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }

// ---- mbarriers (9.7.13.15). A phase completes when `arrivals` have arrived and all announced bytes have landed.

DEVICE void mbarrier_init(u32 bar, int arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(arrivals) : "memory"); }
// Makes the inits visible to the other threads' and the TMA unit's accesses; a block barrier must follow.
DEVICE void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void mbarrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory"); }
DEVICE void mbarrier_arrive_expect(u32 bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
// Returns once the phase of this parity has completed; on a fresh barrier parity 1 counts as completed.
DEVICE void mbarrier_wait(u32 bar, u32 parity) {
    asm volatile("{.reg .pred p; again%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done%=; bra again%=; done%=: }"
                 :: "r"(bar), "r"(parity) : "memory");
}
// Whether it has, at once.
DEVICE bool mbarrier_test(u32 bar, u32 parity) {
    u32 done;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done != 0;
}
// Arrives where `elected`, but not before a and b are known (neither ever has the bits that they are compared with, a signalling NaN). ptxas keeps
// this arrive and a later wgmma.wait_group in order, so the wait cannot rise above the work that leads to a and b.
DEVICE void mbarrier_arrive_after(u32 bar, bool elected, float a, float b) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %1, 0; setp.ne.and.s32 p, %2, 0x7f800001, p; setp.ne.and.s32 p, %3, 0x7f800001, p;"
                 " @p mbarrier.arrive.shared::cta.b64 _, [%0]; }"
                 :: "r"(bar), "r"((int)elected), "r"(float_bits(a)), "r"(float_bits(b)) : "memory");
}

// ---- the other thread block of a cluster of two (9.7.9.23: mapa; 9.7.13.4: barrier.cluster). Addresses in its shared memory, from peer_address, are for
// the instructions named here only.

DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory"); }
// Where block `rank` has what lies at this address here.
DEVICE u32 peer_address(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Releases to this block alone: what else the thread has under way, sums in global memory for instance, need not have been done.
DEVICE void mbarrier_arrive_peer(u32 bar) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(bar) : "memory"); }
DEVICE void mbarrier_arrive_expect_peer(u32 bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
// 16 bytes, of which the other block's barrier hears when they lie there (9.7.9.12: st.async).
DEVICE void st_peer_x4(u32 address, const u32* x, u32 bar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(bar) : "memory");
}
DEVICE void st_peer_s32(u32 address, int x, u32 bar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" :: "r"(address), "r"(x), "r"(bar) : "memory");
}
// Its bytes are announced to the other block's barrier, and land there (9.7.9.25.4).
DEVICE void bulk_copy_to_peer(u32 to, u32 src, int bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "r"(src), "r"(bytes), "r"(bar) : "memory");
}

// ---- named barriers (9.7.13.1) and registers (9.7.19.5)

DEVICE void named_barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory"); }
DEVICE void named_barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory"); }
template <int kRegisters>
DEVICE void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters)); }
template <int kRegisters>
DEVICE void claim_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters)); }
// The same value in all lanes, and the compiler knows it: what steers wgmma must be uniform.
DEVICE int warp_uniform(int x) { return __shfl_sync(~0u, x, 0); }

// ---- TMA (9.7.9.27.1.2: cp.async.bulk.tensor). Coordinates: column, row, head, batch. What lies outside reads as zero and is not written.

DEVICE void tma_load(u32 dst, const TensorMap* map, u32 bar, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
// Into the L2 only.
DEVICE void tma_prefetch(const TensorMap* map, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" :: "l"(map), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
DEVICE void tma_store(const TensorMap* map, u32 src, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 :: "l"(map), "r"(src), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending = 0>
DEVICE void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(kPending) : "memory"); }   // the source may be overwritten
DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Plain pieces of memory, of a multiple of 16 bytes (9.7.9.25.4: cp.async.bulk; stores and additions are committed and waited for as a tensor's).
DEVICE void bulk_load(u32 dst, const void* src, int bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}
DEVICE void bulk_store(void* to, u32 src, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(to), "r"(src), "r"(bytes) : "memory");
}
DEVICE void bulk_add_f32(float* to, u32 src, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" :: "l"(to), "r"(src), "r"(bytes) : "memory");
}
// Orders plain writes to shared memory before a TMA store that another thread issues after a barrier.
DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for all memory: between bulk copies and what other blocks are told about them.
DEVICE void async_proxy_fence_global() { asm volatile("fence.proxy.async;" ::: "memory"); }
DEVICE void stmatrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}
// Stores the transpose of the same fragments.
DEVICE void stmatrix_x4_trans(u32 address, const u32* r) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
DEVICE int atomic_add(int* p, int value) { return atomicAdd(p, value); }
DEVICE void add_release_gpu(int* p, int value) { asm volatile("red.release.gpu.global.add.s32 [%0], %1;" :: "l"(p), "r"(value) : "memory"); }
DEVICE void atomic_store(int* p, int value) { atomicExch(p, value); }
DEVICE void st_shared_v4(u32 address, int a, int b, int c, int d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void ld_shared_v4(u32 address, int& a, int& b, int& c, int& d) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address) : "memory");
}
DEVICE void ld_shared_x4(u32 address, u32* x) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
DEVICE int ld_shared_s32(u32 address) {
    int x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
DEVICE void st_shared_f32x4(u32 address, const float* x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
DEVICE void ld_shared_f32x2(u32 address, float (&x)[2]) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address));
}
DEVICE u32 shuffle_xor(u32 x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }

// ---- wgmma (9.7.16). The products themselves, whose operand lists depend on the tile, are in partials/wgmma.j2.

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory"); }
// After a wait: arithmetic on the accumulators cannot move above it.
template <int kCount>
DEVICE void keep_below(float (&x)[kCount]) {
    #pragma unroll
    for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(x[i]) :: "memory");
}
// Four fp32 values as e4m3, round to nearest even, 448 at most; `a` goes to the lowest byte. Stays where it is written, as pack_pair_here does.
DEVICE u32 pack_e4m3_here(float a, float b, float c, float d) {
    u32 r;
    asm volatile("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h};}"
                 : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
    return r;
}
// As pack_pair, but stays where it is written: the registers of P belong to the tensor cores until P V has been waited for.
template <bool kBf16>
DEVICE u32 pack_pair_here(float low, float high) {
    u32 r;
    if constexpr (kBf16) asm volatile("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(low), "f"(high));
    else asm volatile("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(low), "f"(high));
    return r;
}
