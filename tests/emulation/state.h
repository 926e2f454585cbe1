// The state of the emulated multiprocessor, shared by fibers.cpp, warp.cpp and memory.cpp. Kernels never see it.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <ucontext.h>
#include <vector>

#include "machine.h"

namespace emulation {

constexpr int kWarpSize = 32;

// What a lane waits for: a warp-wide instruction, or the block's barrier. The operands live on the lane's stack.
enum class Wait { nothing, load_matrix, multiply, vote, shuffle, warp_barrier, block_barrier };

struct LoadMatrix { uint32_t* r; uint32_t address; bool transposed; };
struct Multiply { float* d; const uint32_t* a; uint32_t b[2]; Elements elements; bool first; };
struct Vote { bool predicate; bool result; };
struct Shuffle { float value; int mask; float result; };

// One cp.async, issued and not yet waited for.
struct Copy { uint32_t to; const void* from; int bytes; uint32_t valid; long group; };

struct Thread {
    int index = 0;
    bool started = false, finished = false;
    bool follows = false;         // has waited for the kernel before
    Wait wait = Wait::nothing;
    void* operands = nullptr;
    jmp_buf resume;
    ucontext_t first;
    long group = 0;               // the cp.async group being filled
    std::vector<Copy> in_flight;  // oldest first
};

struct Warp {
    bool finished = false, at_barrier = false;
    uint32_t epoch = 0;   // rises at every warp barrier: orders the lanes' memory accesses
};

struct Machine {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    Thread* current = nullptr;
    uint32_t epoch = 0;           // rises at every block barrier and block: orders all accesses to shared memory
    Coordinates block{}, grid{};
    bool copies_land_late = false;
    bool early = false;           // the kernel before may still run: what it has written cannot be seen yet
    bool no_wait = false, no_block_barrier = false, no_warp_barrier = false;   // sabotage, to prove that faults are seen
    std::mt19937 random;
    long instructions = 0, instruction_limit = 0;   // of this block: the watchdog
    long fault_total = 0;
    std::map<std::string, std::pair<long, std::string>> faults;   // kind -> (how often, the first one in words)
    std::map<std::string, long> counts;
};
extern Machine machine;

// ---- report
void fault(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));
inline int warp_of(const Thread& t) { return t.index / kWarpSize; }
inline int lane_of(const Thread& t) { return t.index % kWarpSize; }

// ---- fibers.cpp
void count_instruction();   // the watchdog: ends a block that runs or faults without end
void arrive(Wait wait, void* operands);   // suspends the lane until its whole warp has arrived and the instruction is done
using Kernel = void (*)(const void* parameters);
bool run_grid(Kernel kernel, const void* parameters, int threads, const Coordinates* blocks, long count);   // false: out of memory

// ---- warp.cpp
void execute(Wait wait, Thread* lanes);   // for all 32 lanes at once

// ---- memory.cpp
void set_shared_memory(long bytes);
void clear_regions();
void add_region(const char* name, void* base, long bytes, const unsigned char* elements, unsigned char* writes, long* reads);
void begin_block_memory();
void end_block_memory();
uint32_t checked_word(uint32_t address, int bytes, bool whole_warp);   // a read of shared memory, 2 or 4 bytes
void count_matrix_conflicts(const uint32_t (&rows)[8]);

}  // namespace emulation
