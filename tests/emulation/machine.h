// A CPU stand-in for one CUDA multiprocessor: what the emulated device/ptx.cuh calls.
//
// Every CUDA thread of a block is a fiber. Instructions of a whole warp (mma, ldmatrix, votes, shuffles) are computed once all 32 lanes
// have reached them, by their definition in the PTX ISA manual. Every access to shared and global memory is checked; a violation is
// recorded as a fault, and the run goes on where that is possible. See README.md for what is checked and what cannot be.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

// ---- what CUDA C++ has and C++ has not
#define __device__
#define __host__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define threadIdx (emulation::thread_coordinates())
#define blockIdx (emulation::block_coordinates())
#define gridDim (emulation::grid_extent())

namespace emulation {

struct Coordinates { unsigned x, y, z; };
Coordinates thread_coordinates();
Coordinates block_coordinates();
Coordinates grid_extent();

// ---- synchronisation
void dependency_wait();   // for the kernel before
void block_barrier();
bool block_vote_any(bool predicate);   // a block barrier, too
void warp_barrier();

// ---- shared memory: addresses are offsets from its start
unsigned char* shared_memory();
void load_shared(void* to, uint32_t address, int bytes);
void store_shared(uint32_t address, const void* from, int bytes);

// ---- global memory: only inside registered tensors
void load_global(void* to, const void* address, int bytes);
void store_global(void* address, const void* from, int bytes);
void add_global(float* address, const float* values, int count);   // to sums: any number of times
void signal_global(int* address, int value);   // as store_global, but any number of times

// ---- asynchronous copies; `valid` bytes are read, the others up to `bytes` become zero
void async_copy(uint32_t to, const void* from, int bytes, uint32_t valid);
void async_commit();
void async_wait(int pending_groups);

// ---- warp-wide instructions
void load_matrix_x4(uint32_t (&r)[4], uint32_t address, bool transposed);
enum class Element { fp16, bf16, e4m3, e5m2 };
struct Elements { Element a, b; };
void multiply(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, Elements elements, bool first);   // m16n8k16, of 8 bits m16n8k32
bool vote_any(bool predicate);
float shuffle_xor(float value, int mask);

// ---- element conversions, round to nearest even
float from_element(uint16_t bits, bool bf16);
uint16_t to_element(float value, bool bf16);
uint8_t to_float8(float value, bool e5m2);   // saturating
float from_float8(uint8_t code, bool e5m2);

}  // namespace emulation
