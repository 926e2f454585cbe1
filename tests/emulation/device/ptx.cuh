// The emulated twin of templates/device/ptx.cuh: the same names, each doing on the CPU what its instruction does on the GPU.
#pragma once
#include "machine.h"
#include "device/types.cuh"

// ---- launch geometry and shared memory

DEVICE unsigned char* dynamic_smem() { return emulation::shared_memory(); }
DEVICE u32 smem_address(const void* p) { return (u32)((const unsigned char*)p - emulation::shared_memory()); }
DEVICE int thread_index() { return (int)threadIdx.x; }
DEVICE u32 opaque(u32 x) { return x; }
DEVICE void cta_sync() { emulation::block_barrier(); }
DEVICE bool cta_sync_or(bool predicate) { return emulation::block_vote_any(predicate); }
DEVICE void warp_sync() { emulation::warp_barrier(); }
DEVICE bool warp_any(bool predicate) { return emulation::vote_any(predicate); }

DEVICE void grid_dependency_wait() { emulation::dependency_wait(); }
DEVICE void grid_dependents_launch() {}   // kernels run one after the other

// ---- asynchronous copies

template <int kBytes, bool kZeroFill>
DEVICE void cp_async(u32 dst, const void* src, u32 valid, bool go) {
    static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4, "cp.async copies 4, 8 or 16 bytes");
    // The real wrapper passes `valid` on whenever it is not the plain 16-byte form.
    if (go) emulation::async_copy(dst, src, kBytes, kBytes != 16 || kZeroFill ? valid : 16u);
}
DEVICE void cp_async_commit() { emulation::async_commit(); }
template <int kPending>
DEVICE void cp_async_wait() { emulation::async_wait(kPending); }

// ---- plain memory accesses

DEVICE void st_shared(u32 address, u32 value) { emulation::store_shared(address, &value, 4); }
DEVICE void st_shared(u32 address, const Chunk& c) { emulation::store_shared(address, &c, 16); }
DEVICE void st_shared_f32(u32 address, float value) { emulation::store_shared(address, &value, 4); }
DEVICE float ld_shared_f32(u32 address) { float v; emulation::load_shared(&v, address, 4); return v; }
DEVICE Chunk ld_shared_chunk(u32 address) { Chunk c; emulation::load_shared(&c, address, 16); return c; }
DEVICE u16 ld_global_u16(const void* p) { u16 v; emulation::load_global(&v, p, 2); return v; }
template <class T>
DEVICE T ld_global(const void* p) { T v; emulation::load_global(&v, p, (int)sizeof(T)); return v; }
template <class T>
DEVICE void st_global(void* p, const T& value) { emulation::store_global(p, &value, (int)sizeof(T)); }

template <class T>
DEVICE T* global_pointer(u64 address) { return (T*)address; }

// ---- sums in global memory, and whose turn it is

template <bool kVector>
DEVICE void red_add_fragment(float* fragment, int lane, const float* c) {
    if constexpr (kVector) emulation::add_global(fragment + 4 * lane, c, 4);
    else for (int e = 0; e < 4; e++) emulation::add_global(fragment + 32 * e + lane, c + e, 1);
}
template <bool kVector>
DEVICE void ld_global_fragment(float* c, const float* fragment, int lane) {
    for (int e = 0; e < 4; e++) c[e] = ld_global<float>(kVector ? fragment + 4 * lane + e : fragment + 32 * e + lane);
}
DEVICE int ld_acquire_gpu(const int* p) { return ld_global<int>(p); }
DEVICE void st_release_gpu(int* p, int value) { emulation::signal_global(p, value); }

// ---- matrix fragments

DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) { emulation::load_matrix_x4(r, address, false); }
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) { emulation::load_matrix_x4(r, address, true); }
template <bool kBf16>
constexpr emulation::Element kElement = kBf16 ? emulation::Element::bf16 : emulation::Element::fp16;
template <bool kBf16>
constexpr emulation::Elements kElements{kElement<kBf16>, kElement<kBf16>};
template <bool kE5m2>
constexpr emulation::Element kFloat8 = kE5m2 ? emulation::Element::e5m2 : emulation::Element::e4m3;
template <bool kBf16>
DEVICE void mma_m16n8k16(float* d, const u32* a, u32 b0, u32 b1) { emulation::multiply(d, a, b0, b1, kElements<kBf16>, false); }
template <bool kBf16>
DEVICE void mma_m16n8k16_first(float* d, const u32* a, u32 b0, u32 b1) { emulation::multiply(d, a, b0, b1, kElements<kBf16>, true); }
template <bool kE5m2A, bool kE5m2B>
DEVICE void mma_m16n8k32(float* d, const u32* a, u32 b0, u32 b1) { emulation::multiply(d, a, b0, b1, {kFloat8<kE5m2A>, kFloat8<kE5m2B>}, false); }
template <bool kE5m2A, bool kE5m2B>
DEVICE void mma_m16n8k32_first(float* d, const u32* a, u32 b0, u32 b1) { emulation::multiply(d, a, b0, b1, {kFloat8<kE5m2A>, kFloat8<kE5m2B>}, true); }
template <bool kBf16>
DEVICE u32 pack_pair(float low, float high) {
    return emulation::to_element(low, kBf16) | (u32)emulation::to_element(high, kBf16) << 16;
}

template <bool kBf16>
DEVICE void unpack_pair(u32 pair, float& low, float& high) {
    low = emulation::from_element((u16)pair, kBf16);
    high = emulation::from_element((u16)(pair >> 16), kBf16);
}

template <bool kE5m2>
DEVICE u32 pack_float8x4(float a, float b, float c, float d) {
    const float four[4] = {a, b, c, d};
    u32 word = 0;
    for (int i = 0; i < 4; i++) word |= (u32)emulation::to_float8(four[i], kE5m2) << (8 * i);
    return word;
}

DEVICE u32 unpack_e4m3x2(u32 codes) {
    u32 pair = 0;
    for (int i = 0; i < 2; i++) pair |= (u32)emulation::to_element(emulation::from_float8((uint8_t)(codes >> 8 * i), false), false) << 16 * i;
    return pair;
}
template <u32 kSelector>
DEVICE u32 select_bytes(u32 x) {
    u32 y = 0;
    for (int i = 0; i < 4; i++) {
        const u32 digit = kSelector >> 4 * i & 15;
        if (digit < 4) y |= (x >> 8 * digit & 0xff) << 8 * i;
    }
    return y;
}

// ---- arithmetic; .ftz flushes subnormal inputs and results to zero of the same sign

DEVICE float flush_subnormal(float x) { return fabsf(x) < __FLT_MIN__ ? copysignf(0.f, x) : x; }
DEVICE float exp2_approx(float x) { return flush_subnormal(exp2f(flush_subnormal(x))); }
DEVICE float log2_approx(float x) { return flush_subnormal(log2f(flush_subnormal(x))); }
DEVICE float rcp_approx(float x) { return flush_subnormal(1.f / flush_subnormal(x)); }
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    const u64 both = a | (u64)b << 32;
    u32 r = 0;
    for (int i = 0; i < 4; i++) r |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return r;
}
DEVICE float max_f32(float a, float b) { return a == 0.f && b == 0.f ? a + b : fmaxf(a, b); }   // +0 is above -0; a NaN loses
DEVICE float min_f32(float a, float b) { return a == 0.f && b == 0.f ? -(-a + -b) : fminf(a, b); }   // -0 is below +0; a NaN loses
DEVICE float min_nan_f32(float a, float b) { return a != a || b != b ? a + b : fminf(a, b); }
DEVICE float max_nan_f32(float a, float b) { return a != a || b != b ? a + b : fmaxf(a, b); }
DEVICE float fma_f32(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float mul_f32(float a, float b) {
    float product = a * b;
    asm volatile("" : "+m"(product));   // keeps the compiler from contracting it into an fma
    return product;
}
DEVICE int float_bits(float x) { int i; memcpy(&i, &x, 4); return i; }
DEVICE float bits_float(u32 i) { float x; memcpy(&x, &i, 4); return x; }
DEVICE int max3_s32(int a, int b, int c) { return max_int(a, max_int(b, c)); }

DEVICE float shuffle_xor(float x, int mask) { return emulation::shuffle_xor(x, mask); }
DEVICE float quad_max(float x) {
    x = max_f32(x, emulation::shuffle_xor(x, 1));
    return max_f32(x, emulation::shuffle_xor(x, 2));
}
DEVICE int quad_max_s32(int x) {   // bits travel as those of floats
    x = max_int(x, float_bits(emulation::shuffle_xor(bits_float(x), 1)));
    return max_int(x, float_bits(emulation::shuffle_xor(bits_float(x), 2)));
}
DEVICE float quad_sum(float x) {
    x += emulation::shuffle_xor(x, 1);
    return x + emulation::shuffle_xor(x, 2);
}
