// Shared memory with a race detector, cp.async, and global memory that consists of registered tensors only.
//
// Two accesses to the same place, at least one of them a write, race unless they are ordered: by one thread's program order, by a block
// barrier, or within a warp by a warp barrier. A cp.async writes at some time between its issue and its wait by the issuing thread.
#include <cstdlib>

#include "state.h"

namespace emulation {

namespace {

constexpr uint16_t kNobody = 0xffff, kMany = 0xfffe;

// The history of two bytes of shared memory, as far as it can still race.
struct Granule {
    uint32_t write_epoch, write_warp_epoch, read_epoch, read_warp_epoch;
    uint16_t writer;                     // the last thread that wrote
    uint32_t writer_lanes;               // all lanes of its warp that wrote this value since the last barrier
    uint16_t reader_warp, reader_lane;   // in read_epoch
    uint16_t copier;                     // the thread whose cp.async is in flight
    bool written;
};

struct Region {
    std::string name;
    unsigned char* base;
    long bytes;
    const unsigned char* elements;   // nonzero where a byte belongs to an element (strides leave gaps)
    unsigned char* writes;           // how often each byte was written; null: read only
    long* reads;                     // how many bytes were read
};

unsigned char* shared;
long shared_bytes;
std::vector<Granule> history;
std::vector<Region> regions;

bool shared_ok(uint32_t address, int bytes, const char* what) {
    if (address % bytes) fault("misaligned shared access", "%s of %d bytes at %u", what, bytes, address);
    else if ((long)address + bytes <= shared_bytes) return true;
    else fault("shared access out of range", "%s of %d bytes at %u, size %ld", what, bytes, address, shared_bytes);
    return false;
}

// Whether the last write comes before what the current thread does now, by its program order or a warp barrier.
bool written_before(const Granule& g, bool whole_warp) {
    const Thread& me = *machine.current;
    if (g.write_epoch != machine.epoch) return true;
    if (g.writer / kWarpSize != warp_of(me)) return false;
    return g.write_warp_epoch < machine.warps[warp_of(me)].epoch || (g.writer_lanes >> lane_of(me) & 1 && !whole_warp);
}

void note_read(uint32_t address, int bytes, bool whole_warp) {
    const Thread& me = *machine.current;
    const uint16_t warp = warp_of(me), lane = whole_warp ? kMany : lane_of(me);
    const uint32_t warp_epoch = machine.warps[warp].epoch;
    for (Granule* g = &history[address / 2]; g < &history[(address + bytes) / 2]; g++) {
        if (!g->written) fault("uninitialised shared read", "address %u", address);
        if (g->copier != kNobody) fault("shared race", "address %u is read while thread %d's cp.async is in flight", address, g->copier);
        else if (!written_before(*g, whole_warp)) fault("shared race", "address %u: read after an unordered write by thread %d", address, g->writer);
        if (g->read_epoch != machine.epoch) {
            g->read_epoch = machine.epoch;
            g->reader_warp = warp;
            g->reader_lane = lane;
        } else if (g->reader_warp != warp) g->reader_warp = kMany;
        else if (g->read_warp_epoch < warp_epoch) g->reader_lane = lane;
        else if (g->reader_lane != lane) g->reader_lane = kMany;
        g->read_warp_epoch = warp_epoch;
    }
}

// Whether lanes other than the current one have written the value since the warp's last barrier.
bool others_wrote(const Granule& g) {
    const Thread& me = *machine.current;
    const bool recent = g.writer / kWarpSize == warp_of(me) && g.write_warp_epoch == machine.warps[warp_of(me)].epoch;
    return recent && g.writer_lanes & ~(1u << lane_of(me));
}

// Reports any earlier access that this write by the current thread may overtake.
void check_write(const Granule& g, uint32_t address) {
    const Thread& me = *machine.current;
    if (g.copier != kNobody) {
        fault("shared race", "address %u is written while thread %d's cp.async is in flight", address, g.copier);
        return;
    }
    if (!written_before(g, false) || (g.write_epoch == machine.epoch && others_wrote(g)))
        fault("shared race", "address %u: write after an unordered write by thread %d", address, g.writer);
    if (g.read_epoch != machine.epoch) return;
    const bool other_warp = g.reader_warp != warp_of(me);
    const bool other_lane = g.read_warp_epoch == machine.warps[warp_of(me)].epoch && g.reader_lane != lane_of(me);
    if (other_warp || other_lane) fault("shared race", "address %u: write after an unordered read", address);
}

// `same`: the value was there already, so that the lanes that wrote it before may still read it.
void note_write(Granule& g, bool same) {
    const Thread& me = *machine.current;
    const uint32_t warp_epoch = machine.warps[warp_of(me)].epoch;
    const bool joins = same && g.write_epoch == machine.epoch && g.writer / kWarpSize == warp_of(me) && g.write_warp_epoch == warp_epoch;
    g.writer_lanes = (joins ? g.writer_lanes : 0) | 1u << lane_of(me);
    g.write_epoch = machine.epoch;
    g.write_warp_epoch = warp_epoch;
    g.writer = (uint16_t)me.index;
    g.written = true;
}

// The region that holds [address, address + bytes); bytes between its elements are a fault too.
Region* find_region(const void* address, int bytes, const char* what) {
    const unsigned char* p = static_cast<const unsigned char*>(address);
    for (Region& r : regions) {
        if (p + bytes <= r.base || p >= r.base + r.bytes) continue;
        const long at = p - r.base;
        if (at < 0 || at + bytes > r.bytes) {
            fault("global access out of range", "%s of %d bytes at %ld of %s, which has %ld bytes", what, bytes, at, r.name.c_str(), r.bytes);
            return nullptr;
        }
        if (memchr(r.elements + at, 0, bytes))
            fault("global access between elements", "%s of %d bytes at %ld of %s", what, bytes, at, r.name.c_str());
        return &r;
    }
    fault("global access out of range", "%s of %d bytes at %p, which is in no tensor", what, bytes, address);
    return nullptr;
}

// Kernels that begin early read nothing that they write, so whatever has been written is the kernel before's.
void check_follows(const Region& r, const void* address, int bytes) {
    if (!machine.early || machine.current->follows || !r.writes) return;
    const unsigned char* writes = r.writes + (static_cast<const unsigned char*>(address) - r.base);
    for (int i = 0; i < bytes; i++)
        if (writes[i]) return fault("read before the kernel before is done", "byte %ld of %s", (long)(writes + i - r.writes), r.name.c_str());
}

bool aligned(const void* address, int bytes, const char* what) {
    if ((uintptr_t)address % bytes == 0) return true;
    fault("misaligned global access", "%s of %d bytes at %p", what, bytes, address);
    return false;
}

void land(const Copy& c) {
    memset(shared + c.to, 0, c.bytes);
    if (c.valid) memcpy(shared + c.to, c.from, c.valid);
}

void complete(const Copy& c) {
    if (machine.copies_land_late) land(c);
    for (int i = 0; i < c.bytes; i += 2) {
        Granule& g = history[(c.to + i) / 2];
        g.copier = kNobody;
        note_write(g, false);
    }
}

}  // namespace

void set_shared_memory(long bytes) {
    free(shared);
    shared = static_cast<unsigned char*>(aligned_alloc(1024, (bytes + 1023) / 1024 * 1024 + 1024));
    shared_bytes = bytes;
    history = std::vector<Granule>(bytes / 2);
}

void add_region(const char* name, void* base, long bytes, const unsigned char* elements, unsigned char* writes, long* reads) {
    regions.push_back({name, static_cast<unsigned char*>(base), bytes, elements, writes, reads});
}

void clear_regions() { regions.clear(); }

void begin_block_memory() {
    memset(shared, 0xff, shared_bytes);   // NaNs of either element type
    Granule fresh{};
    fresh.writer = fresh.copier = fresh.reader_warp = fresh.reader_lane = kNobody;
    std::fill(history.begin(), history.end(), fresh);
}

void end_block_memory() {
    for (Thread& t : machine.threads) {
        machine.current = &t;
        if (machine.early && !t.follows) fault("end before the kernel before is done", "what follows may begin, and knows of this one alone");
        if (!t.in_flight.empty()) fault("copy in flight at the end", "%zu copies were never waited for", t.in_flight.size());
    }
}

unsigned char* shared_memory() { return shared; }

uint32_t checked_word(uint32_t address, int bytes, bool whole_warp) {
    uint32_t value = 0;
    if (!shared_ok(address, bytes, "load")) return value;
    note_read(address, bytes, whole_warp);
    memcpy(&value, shared + address, bytes);
    return value;
}

void load_shared(void* to, uint32_t address, int bytes) {
    count_instruction();
    memset(to, 0xff, bytes);
    if (!shared_ok(address, bytes, "load")) return;
    note_read(address, bytes, false);
    memcpy(to, shared + address, bytes);
}

void store_shared(uint32_t address, const void* from, int bytes) {
    count_instruction();
    if (!shared_ok(address, bytes, "store")) return;
    for (int i = 0; i < bytes; i += 2) {
        Granule& g = history[(address + i) / 2];
        // Lanes that write what is there already are a common idiom, and harmless.
        const bool same = g.written && !memcmp(shared + address + i, static_cast<const char*>(from) + i, 2);
        if (!same) check_write(g, address + i);
        note_write(g, same);
    }
    memcpy(shared + address, from, bytes);
}

void load_global(void* to, const void* address, int bytes) {
    count_instruction();
    memset(to, 0xff, bytes);
    if (!aligned(address, bytes, "load")) return;
    Region* r = find_region(address, bytes, "load");
    if (!r) return;
    check_follows(*r, address, bytes);
    memcpy(to, address, bytes);
    *r->reads += bytes;
}

void store_global(void* address, const void* from, int bytes) {
    count_instruction();
    if (!aligned(address, bytes, "store")) return;
    Region* r = find_region(address, bytes, "store");
    if (!r) return;
    if (!r->writes) return fault("store to an input", "%s", r->name.c_str());
    unsigned char* writes = r->writes + (static_cast<unsigned char*>(address) - r->base);
    for (int i = 0; i < bytes; i++)
        if (writes[i]++) fault("written twice", "byte %ld of %s", (long)(writes + i - r->writes), r->name.c_str());
    memcpy(address, from, bytes);
}

void add_global(float* address, const float* values, int count) {
    count_instruction();
    if (!aligned(address, 4 * count, "add")) return;
    Region* r = find_region(address, 4 * count, "add");
    if (!r) return;
    if (!r->writes) return fault("store to an input", "%s", r->name.c_str());
    for (int i = 0; i < count; i++) address[i] += values[i];
    machine.counts["sums"] += count;
}

void signal_global(int* address, int value) {
    count_instruction();
    if (!aligned(address, 4, "signal")) return;
    Region* r = find_region(address, 4, "signal");
    if (!r) return;
    if (!r->writes) return fault("store to an input", "%s", r->name.c_str());
    *address = value;
}

void async_copy(uint32_t to, const void* from, int bytes, uint32_t valid) {
    count_instruction();
    machine.counts["cp.async"]++;
    if (valid > (uint32_t)bytes) return fault("cp.async size", "%u of %d bytes", valid, bytes);
    if (!shared_ok(to, bytes, "cp.async") || !aligned(from, bytes, "cp.async")) return;
    if (valid) {
        Region* r = find_region(from, (int)valid, "cp.async");
        if (!r) return;
        check_follows(*r, from, (int)valid);
        *r->reads += valid;
    }
    for (int i = 0; i < bytes; i += 2) {
        Granule& g = history[(to + i) / 2];
        check_write(g, to + i);
        g.copier = (uint16_t)machine.current->index;
    }
    const Copy copy{to, from, bytes, valid, machine.current->group};
    if (!machine.copies_land_late) land(copy);
    machine.current->in_flight.push_back(copy);
}

void async_commit() {
    count_instruction();
    machine.current->group++;
}

void async_wait(int pending_groups) {
    count_instruction();
    if (machine.no_wait) return;
    Thread& me = *machine.current;
    size_t done = 0;
    while (done < me.in_flight.size() && me.in_flight[done].group < me.group - pending_groups) complete(me.in_flight[done++]);
    me.in_flight.erase(me.in_flight.begin(), me.in_flight.begin() + done);
}

// The eight 16-byte rows of a matrix are read together: each must stand in banks of its own, or be the same row.
void count_matrix_conflicts(const uint32_t (&rows)[8]) {
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < i; j++)
            if (rows[i] != rows[j] && rows[i] / 16 % 8 == rows[j] / 16 % 8) {
                fault("ldmatrix bank conflict", "rows at %u and %u", rows[j], rows[i]);
                return;
            }
}

}  // namespace emulation
