// Integer names, small value types and constants. No instruction lives here: see ptx.cuh.
#pragma once

#define DEVICE __device__ __forceinline__

#ifdef __CUDACC_RTC__   // NVRTC has no offsetof of its own; this is its front end's spelling
#define OFFSETOF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// One 16-byte chunk: the unit of shared-memory rows, of cp.async and of the bank swizzle.
struct alignas(16) Chunk { u32 word[4]; };
constexpr int kChunkBytes = 16;
constexpr int kChunkElements = 8;

// Division by a run-time constant, prepared by params.fast_div: exact for 0 <= n < 2^31.
struct FastDiv {
    u64 magic;
    u32 shift;
    u32 divisor;
    DEVICE int divide(int n) const { return (int)((u64)(u32)n * magic >> shift); }
};

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
constexpr int next_pow2(int n) { return n <= 1 ? 1 : 2 * next_pow2((n + 1) / 2); }
DEVICE constexpr int min_int(int a, int b) { return a < b ? a : b; }
DEVICE constexpr int max_int(int a, int b) { return a > b ? a : b; }
