// Threads, warps and blocks: who runs when. A lane runs until it reaches a warp-wide instruction or a barrier, then the next lane of its
// warp does; warps take turns at random, so that no order between barriers goes untried for long.
#include <cstdarg>
#include <cstdio>
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

namespace emulation {

Machine machine;

namespace {

constexpr size_t kStackBytes = 256 << 10;   // touched pages only; the lowest page is a guard
constexpr long kFaultLimit = 10'000;

Kernel kernel;
const void* kernel_parameters;
jmp_buf scheduler;
int next_lane, lane_step, lanes_left;   // the warp pass in progress
Thread* pass;

// To the next lane of the warp that still runs, or back to run_pass() when all have arrived.
[[noreturn]] void advance() {
    while (lanes_left-- > 0) {
        Thread& lane = pass[next_lane];
        next_lane += lane_step;
        if (lane.finished) continue;
        machine.current = &lane;
        if (lane.started) _longjmp(lane.resume, 1);
        lane.started = true;
        setcontext(&lane.first);
    }
    _longjmp(scheduler, 1);
}

void fiber() {
    kernel(kernel_parameters);
    machine.current->finished = true;
    advance();
}

// Runs every lane of a warp up to its next meeting point. False: the block was abandoned.
bool run_pass(int warp) {
    pass = &machine.threads[warp * kWarpSize];
    lane_step = machine.random() & 1 ? 1 : -1;
    next_lane = lane_step > 0 ? 0 : kWarpSize - 1;
    lanes_left = kWarpSize;
    const int reason = _setjmp(scheduler);   // unlike swapcontext, _setjmp makes no system call
    if (reason == 0) advance();
    return reason == 1;
}

const char* name_of(const Thread& t) {
    static const char* const names[] = {"nothing", "ldmatrix", "mma", "vote", "shuffle", "the warp barrier", "the block barrier"};
    return t.finished ? "its end" : names[(int)t.wait];
}

// All lanes of a warp have stopped: they must have stopped at the same instruction.
bool settle(int warp) {
    Thread* lanes = &machine.threads[warp * kWarpSize];
    for (int i = 1; i < kWarpSize; i++)
        if (lanes[i].finished != lanes[0].finished || (!lanes[0].finished && lanes[i].wait != lanes[0].wait)) {
            fault("divergence", "warp %d: lane 0 is at %s, lane %d at %s", warp, name_of(lanes[0]), i, name_of(lanes[i]));
            return false;
        }
    Warp& w = machine.warps[warp];
    w.finished = lanes[0].finished;
    w.at_barrier = !w.finished && lanes[0].wait == Wait::block_barrier;
    if (!w.finished && !w.at_barrier) execute(lanes[0].wait, lanes);
    return true;
}

// One warp, for a random number of warp-wide instructions or until it blocks.
bool run_turn(int warp, long turn) {
    while (turn-- > 0 && !machine.warps[warp].finished && !machine.warps[warp].at_barrier)
        if (!run_pass(warp) || !settle(warp)) return false;
    return true;
}

void prepare_block(char* stacks) {
    const int n = (int)machine.threads.size();
    for (int i = 0; i < n; i++) {
        Thread& t = machine.threads[i];
        t.index = i;
        t.started = t.finished = t.follows = false;
        t.wait = Wait::nothing;
        t.group = 0;
        t.in_flight.clear();
        getcontext(&t.first);
        t.first.uc_stack.ss_sp = stacks + i * kStackBytes;
        t.first.uc_stack.ss_size = kStackBytes;
        t.first.uc_link = nullptr;
        makecontext(&t.first, fiber, 0);
    }
    for (Warp& w : machine.warps) w = Warp();
    machine.epoch++;
    machine.instructions = 0;
    begin_block_memory();
}

// The threads' votes, where the barrier takes them: of all or of none.
void count_votes() {
    bool any = false;
    long votes = 0;
    for (Thread& t : machine.threads)
        if (t.operands) {
            any |= static_cast<Vote*>(t.operands)->predicate;
            votes++;
        }
    if (votes && votes != (long)machine.threads.size()) fault("divergence", "%ld threads vote at the block barrier", votes);
    for (Thread& t : machine.threads)
        if (t.operands) static_cast<Vote*>(t.operands)->result = any;
}

void open_barrier() {
    count_votes();
    for (Warp& w : machine.warps) w.at_barrier = false;
    machine.epoch++;
    machine.counts["block barriers"]++;
}

void run_block() {
    const int warps = (int)machine.warps.size();
    const bool to_the_barrier = machine.random() & 1;   // or short turns: both find faults that the other hides
    while (true) {
        std::vector<int> ready;
        int waiting = 0, finished = 0;
        for (int w = 0; w < warps; w++) {
            if (machine.warps[w].finished) finished++;
            else if (machine.warps[w].at_barrier) waiting++;
            else ready.push_back(w);
        }
        if (ready.empty()) {
            if (finished == warps) break;
            if (finished) {
                fault("deadlock", "%d warps wait at the block barrier, %d have ended", waiting, finished);
                return;
            }
            open_barrier();
            continue;
        }
        const int warp = ready[machine.random() % ready.size()];
        if (!run_turn(warp, to_the_barrier ? 1L << 60 : 1 + machine.random() % 64)) return;
    }
    end_block_memory();
}

char* allocate_stacks(int threads) {
    void* p = mmap(nullptr, threads * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    for (int i = 0; i < threads; i++) mprotect((char*)p + i * kStackBytes, sysconf(_SC_PAGESIZE), PROT_NONE);
    return (char*)p;
}

}  // namespace

Coordinates thread_coordinates() { return {(unsigned)machine.current->index, 0, 0}; }
Coordinates block_coordinates() { return machine.block; }
Coordinates grid_extent() { return machine.grid; }

void fault(const char* kind, const char* format, ...) {
    machine.fault_total++;
    auto& [times, first] = machine.faults[kind];
    if (times++) return;
    char text[512], place[128];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(place, sizeof place, "block (%u, %u, %u) thread %d: ", machine.block.x, machine.block.y, machine.block.z,
             machine.current ? machine.current->index : -1);
    first = std::string(place) + text;
}

[[noreturn]] static void abandon_block() { _longjmp(scheduler, 2); }

void count_instruction() {
    if (machine.fault_total > kFaultLimit) {
        fault("abandoned", "after more than %ld faults the other blocks were not run", kFaultLimit);
        abandon_block();
    }
    if (++machine.instructions < machine.instruction_limit) return;
    fault("runaway", "more than %ld instructions in one block: an endless loop", machine.instruction_limit);
    abandon_block();
}

void arrive(Wait wait, void* operands) {
    count_instruction();
    machine.current->wait = wait;
    machine.current->operands = operands;
    if (_setjmp(machine.current->resume) == 0) advance();
}

void dependency_wait() {
    count_instruction();
    machine.current->follows = true;
}

void block_barrier() {
    if (machine.no_block_barrier) return;
    arrive(Wait::block_barrier, nullptr);
}
bool block_vote_any(bool predicate) {
    Vote vote{predicate, predicate};
    if (!machine.no_block_barrier) arrive(Wait::block_barrier, &vote);
    return vote.result;
}
void warp_barrier() {
    if (machine.no_warp_barrier) return;
    arrive(Wait::warp_barrier, nullptr);
}

// Runs `count` blocks of a grid, given by their coordinates. False: out of memory.
bool run_grid(Kernel entry, const void* parameters, int threads, const Coordinates* blocks, long count) {
    char* stacks = allocate_stacks(threads);
    if (!stacks) return false;
    kernel = entry;
    kernel_parameters = parameters;
    machine.threads = std::vector<Thread>(threads);
    machine.warps = std::vector<Warp>(threads / kWarpSize);
    for (long i = 0; i < count; i++) {
        machine.block = blocks[i];
        prepare_block(stacks);
        run_block();
        machine.current = nullptr;
    }
    munmap(stacks, threads * kStackBytes);
    return true;
}

}  // namespace emulation
