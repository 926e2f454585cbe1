// Every instruction that the kernels use beyond plain C++, one wrapper each, named after the instruction.
// Section numbers are those of the PTX ISA manual, chapter 9. The CPU emulation in tests/emulation replaces this header.
#pragma once
#include "device/types.cuh"

// ---- launch geometry and shared memory

DEVICE unsigned char* dynamic_smem() {
    extern __shared__ __align__(1024) unsigned char smem[];
    return smem;
}
DEVICE u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Read anew where it is used, so that no register holds it through the main loop.
DEVICE int thread_index() {
    int t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
}
// Keeps the compiler from computing a value again where it is used: one register for it instead of one for each of its parts.
DEVICE u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
DEVICE void cta_sync() { __syncthreads(); }
DEVICE bool cta_sync_or(bool predicate) { return __syncthreads_or(predicate); }   // true for all if it is for one thread
DEVICE void warp_sync() { __syncwarp(); }
DEVICE bool warp_any(bool predicate) { return __any_sync(~0u, predicate); }

// Of kernels that are launched one behind the other, so that they overlap (9.7.13.13: griddepcontrol). From sm_90 on; before, they do not overlap.
DEVICE void grid_dependency_wait() {   // until the kernel before is done, and what it wrote can be seen
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void grid_dependents_launch() {   // the kernel behind may begin
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ---- asynchronous copies (9.7.9.25.3: cp.async)

// Copies kBytes when `go` is set; with kZeroFill only the first `valid` bytes are read and the others become zero.
// Predicated inside the asm: a branch would split the basic block of the main loop (110 more instructions there).
template <int kBytes, bool kZeroFill>
DEVICE void cp_async(u32 dst, const void* src, u32 valid, bool go) {
    const u64 from = (u64)__cvta_generic_to_global(src);
    if constexpr (kBytes == 16 && kZeroFill)
        asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;}"
                     :: "r"(dst), "l"(from), "r"(valid), "r"((int)go));
    else if constexpr (kBytes == 16)
        asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}"
                     :: "r"(dst), "l"(from), "r"((int)go));
    else
        asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.ca.shared.global [%0], [%1], %4, %2;}"
                     :: "r"(dst), "l"(from), "r"(valid), "r"((int)go), "n"(kBytes));
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory"); }

// ---- plain memory accesses

DEVICE void st_shared(u32 address, u32 value) { asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(value) : "memory"); }
DEVICE void st_shared(u32 address, const Chunk& c) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3]) : "memory");
}
DEVICE void st_shared_f32(u32 address, float value) { asm volatile("st.shared.f32 [%0], %1;" :: "r"(address), "f"(value) : "memory"); }
DEVICE float ld_shared_f32(u32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}
DEVICE Chunk ld_shared_chunk(u32 address) {
    Chunk c;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3]) : "r"(address) : "memory");
    return c;
}
DEVICE u16 ld_global_u16(const void* p) { return *(const u16*)p; }
template <class T>
DEVICE T ld_global(const void* p) { return *(const T*)p; }
template <class T>
DEVICE void st_global(void* p, const T& value) { *(T*)p = value; }

// The address of something in global memory, where the compiler cannot see that it is there.
template <class T>
DEVICE T* global_pointer(u64 address) { return (T*)__cvta_global_to_generic(address); }

// ---- sums in global memory, and whose turn it is to add (9.7.13.6: red; 9.7.9.8: ld.acquire)

// Adds a lane's share of a 16x8 accumulator fragment to the 128 sums at `fragment`. With vectors a lane's four values lie together,
// without them those of all lanes: either way a warp's instruction covers whole sectors. ld_global_fragment reads the same order.
template <bool kVector>
DEVICE void red_add_fragment(float* fragment, int lane, const float* c) {
    if constexpr (kVector) {
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                     :: "l"(fragment + 4 * lane), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]) : "memory");
    } else {
        #pragma unroll
        for (int e = 0; e < 4; e++)
            asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" :: "l"(fragment + 32 * e + lane), "f"(c[e]) : "memory");
    }
}
template <bool kVector>
DEVICE void ld_global_fragment(float* c, const float* fragment, int lane) {
    Chunk x;
    if constexpr (kVector) x = ld_global<Chunk>(fragment + 4 * lane);   // one access, as of a float each the compiler makes four
    #pragma unroll
    for (int e = 0; e < 4; e++) c[e] = kVector ? __int_as_float((int)x.word[e]) : fragment[32 * e + lane];
}
DEVICE int ld_acquire_gpu(const int* p) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
DEVICE void st_release_gpu(int* p, int value) { asm volatile("st.release.gpu.global.b32 [%0], %1;" :: "l"(p), "r"(value) : "memory"); }

// ---- matrix fragments (9.7.15.4.8: mma.m16n8k16; 9.7.15.4.14: ldmatrix)

DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// d += a * b. a: 16x16 by rows, b: 16x8 by columns, d: 16x8 in fp32.
template <bool kBf16>
DEVICE void mma_m16n8k16(float* d, const u32* a, u32 b0, u32 b1) {
    if constexpr (kBf16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d = a * b.
template <bool kBf16>
DEVICE void mma_m16n8k16_first(float* d, const u32* a, u32 b0, u32 b1) {
    if constexpr (kBf16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
                     : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
                     : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

// d += a * b of 8-bit floats, from sm_89 on (9.7.15.5.10: mma.m16n8k32), each of e5m2 or else e4m3. a: 16x32 by rows, b: 32x8 by columns, d: 16x8 in
// fp32. Where the hardware has no such instruction (sm_90, sm_100, sm_103) ptxas converts the operands and takes that of fp16.
template <bool kE5m2A, bool kE5m2B>
DEVICE void mma_m16n8k32(float* d, const u32* a, u32 b0, u32 b1) {
    #define MULTIPLY(types) \
        asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." types ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (kE5m2A && kE5m2B) MULTIPLY("e5m2.e5m2");
    else if constexpr (kE5m2A) MULTIPLY("e5m2.e4m3");
    else if constexpr (kE5m2B) MULTIPLY("e4m3.e5m2");
    else MULTIPLY("e4m3.e4m3");
    #undef MULTIPLY
}
// d = a * b.
template <bool kE5m2A, bool kE5m2B>
DEVICE void mma_m16n8k32_first(float* d, const u32* a, u32 b0, u32 b1) {
    #define MULTIPLY(types) \
        asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." types ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};" \
                     : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f))
    if constexpr (kE5m2A && kE5m2B) MULTIPLY("e5m2.e5m2");
    else if constexpr (kE5m2A) MULTIPLY("e5m2.e4m3");
    else if constexpr (kE5m2B) MULTIPLY("e4m3.e5m2");
    else MULTIPLY("e4m3.e4m3");
    #undef MULTIPLY
}

// Two fp32 values as one register of the element type, round to nearest even; `low` goes to the lower half.
template <bool kBf16>
DEVICE u32 pack_pair(float low, float high) {
    u32 r;
    if constexpr (kBf16) asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(low), "f"(high));
    else asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(low), "f"(high));
    return r;
}

// The two fp32 values of a register of the element type.
template <bool kBf16>
DEVICE void unpack_pair(u32 pair, float& low, float& high) {
    if constexpr (kBf16) {
        low = __int_as_float((int)(pair << 16));
        high = __int_as_float((int)(pair & 0xffff0000u));
    } else {
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(pair));
    }
}

// Four fp32 values as 8-bit floats, the first one in the lowest byte: round to nearest even, saturate; NaN becomes 0x7f. From sm_89 on.
template <bool kE5m2>
DEVICE u32 pack_float8x4(float a, float b, float c, float d) {
    u32 r;
    if constexpr (kE5m2)
        asm("{.reg .b16 l, h; cvt.rn.satfinite.e5m2x2.f32 l, %2, %1; cvt.rn.satfinite.e5m2x2.f32 h, %4, %3; mov.b32 %0, {l, h};}"
            : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
    else
        asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h};}"
            : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
    return r;
}

// The e4m3 codes of the lower half, as two fp16 numbers. From sm_89 on.
DEVICE u32 unpack_e4m3x2(u32 codes) {
    u32 r;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(r) : "r"(codes));
    return r;
}
// Byte i is that of x whose number is digit i of the selector, or zero where the digit is 4.
template <u32 kSelector>
DEVICE u32 select_bytes(u32 x) { return __byte_perm(x, 0, kSelector); }

// ---- arithmetic (9.7.3)

DEVICE float exp2_approx(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_approx(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float rcp_approx(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }   // digits of the selector: 0-3 of a, 4-7 of b
DEVICE float max_f32(float a, float b) { return fmaxf(a, b); }
DEVICE float min_f32(float a, float b) { return fminf(a, b); }
DEVICE float min_nan_f32(float a, float b) { float y; asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }   // a NaN wins
DEVICE float max_nan_f32(float a, float b) { float y; asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
DEVICE float fma_f32(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float mul_f32(float a, float b) { return __fmul_rn(a, b); }   // never contracted into an fma
DEVICE int float_bits(float x) { return __float_as_int(x); }
DEVICE float bits_float(u32 x) { return __int_as_float((int)x); }
DEVICE int max3_s32(int a, int b, int c) { return __vimax3_s32(a, b, c); }

DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }

// Over the four lanes that hold one row of an accumulator fragment.
DEVICE float quad_max(float x) {
    x = max_f32(x, __shfl_xor_sync(~0u, x, 1));
    return max_f32(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE int quad_max_s32(int x) {
    x = max_int(x, __shfl_xor_sync(~0u, x, 1));
    return max_int(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
