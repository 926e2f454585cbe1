// What Python calls through ctypes (launch.py). The kernel's own file defines emulated_kernel().
#include "state.h"

extern "C" void emulated_kernel(const void* parameters);

using namespace emulation;

extern "C" {

struct Launch {
    const void* parameters;
    const Coordinates* blocks;   // those to run, in this order
    long block_count;
    Coordinates grid;
    int threads;
    int shared_bytes;
    long instruction_limit;   // of a block
    unsigned seed;
    int copies_land_late;
    int no_wait, no_block_barrier, no_warp_barrier;
    int early;
};

int emulation_launch_bytes() { return sizeof(Launch); }

void emulation_clear() { clear_regions(); }

void emulation_tensor(const char* name, void* base, long bytes, const unsigned char* elements, unsigned char* writes, long* reads) {
    add_region(name, base, bytes, elements, writes, reads);
}

// A report in lines: "fault<TAB>kind<TAB>times<TAB>first one" and "count<TAB>name<TAB>value". Valid until the next call.
const char* emulation_run(const Launch* launch) {
    static std::string report;
    machine = Machine();
    machine.grid = launch->grid;
    machine.instruction_limit = launch->instruction_limit;
    machine.random.seed(launch->seed);
    machine.copies_land_late = launch->copies_land_late;
    machine.early = launch->early;
    machine.no_wait = launch->no_wait;
    machine.no_block_barrier = launch->no_block_barrier;
    machine.no_warp_barrier = launch->no_warp_barrier;
    set_shared_memory(launch->shared_bytes);
    if (!run_grid(emulated_kernel, launch->parameters, launch->threads, launch->blocks, launch->block_count))
        fault("emulator", "no memory for %d stacks", launch->threads);
    report.clear();
    for (const auto& [kind, what] : machine.faults) report += "fault\t" + kind + "\t" + std::to_string(what.first) + "\t" + what.second + "\n";
    for (const auto& [name, value] : machine.counts) report += "count\t" + name + "\t" + std::to_string(value) + "\n";
    return report.c_str();
}

}  // extern "C"
