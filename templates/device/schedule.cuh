// Which tile of the problem a thread block works on.
#pragma once
#include "device/types.cuh"

struct WorkTile {
    int m_tile;       // query tile; the longest come first under a causal mask
    int batch_head;   // batch * heads + head
    int batch;
    int head;
    int kv_head;
};

// Grid: x = query heads of one section, whose keys and values share the L2 cache; y = query tiles, the last first;
// z = sections. `batch_head` may lie beyond the last head: such a block has nothing to do.
DEVICE WorkTile work_tile(int x, int y, int z, int section, int m_tiles, FastDiv heads, FastDiv group) {
    WorkTile tile;
    tile.m_tile = m_tiles - 1 - y;
    tile.batch_head = z * section + x;
    // FastDiv, not '/': an integer division would move all addresses of the main loop out of the uniform registers.
    tile.batch = heads.divide(tile.batch_head);
    tile.head = tile.batch_head - tile.batch * (int)heads.divisor;
    tile.kv_head = group.divide(tile.head);
    return tile;
}

// A position in a ring of kStages buffers; the phase flips with every round.
template <int kStages>
struct RingPosition {
    int index;
    u32 phase;
    DEVICE void advance() {
        if (++index == kStages) {
            index = 0;
            phase ^= 1;
        }
    }
};

// How a persistent kernel numbers its work tiles. The order is that of the grid above: query heads of a section side by side, the last query tile
// first, then the next section; the last section may be smaller.
struct TileOrder {
    FastDiv section_tiles;   // query tiles of all heads of a section
    FastDiv section;         // query heads
    FastDiv last_section;    // query heads of the last one
    FastDiv heads, group;
    int m_tiles, batch_heads;
    DEVICE WorkTile tile(int index) const {
        const int at = section_tiles.divide(index), first_head = at * (int)section.divisor, within = index - at * (int)section_tiles.divisor;
        const bool whole = first_head + (int)section.divisor <= batch_heads;
        const int row = whole ? section.divide(within) : last_section.divide(within);
        WorkTile work;
        work.m_tile = m_tiles - 1 - row;
        work.batch_head = first_head + within - row * (int)(whole ? section.divisor : last_section.divisor);
        work.batch = heads.divide(work.batch_head);
        work.head = work.batch_head - work.batch * (int)heads.divisor;
        work.kv_head = group.divide(work.head);
        return work;
    }
};
