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
