"""The integer device headers, compiled by g++ as they are and checked against brute force: masks, grid, divisions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.arch.sm80 import FORWARD
from cuflash.arch.sm90 import FORWARD as FORWARD_SM90
from cuflash.checks import MAX_BATCH_HEADS, MAX_LENGTH
from cuflash.kernels import MAX_GRID_YZ, forward_grid, persistent_grid
from cuflash.params import fast_div
from cuflash.problem import AttentionProblem
from cuflash.render import template_root

GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(GXX is None, reason="the device headers are compiled by g++")

BLOCK_N = (16, 48, 64, 80)
SHIM = """
#include "device/mask.cuh"
#include "device/schedule.cuh"

// What a kernel makes of a mask for query rows [m0, m_end): seen[row][key] for all keys of tiles that exist.
template <class Mask, int kBlockN>
static void apply(const Mask& mask, int m0, int m_end, int keys, int* range, unsigned char* seen) {
    const TileRange tiles = mask.range(m0, m_end);
    range[0] = tiles.full_end;
    range[1] = tiles.end;
    for (int q = m0; q < m_end; q++)
        for (int key = 0; key < keys; key++) {
            const int tile = key / kBlockN, n0 = tile * kBlockN;
            const bool masked = tile >= tiles.full_end;
            const bool skipped = masked && mask.sees_none(q, n0);
            const bool keep = !masked || mask.row(q, n0).keep(key - n0);
            seen[(q - m0) * keys + key] = tile < tiles.end && !skipped && keep;
        }
}

template <int kBlockN>
static void both(bool causal, int seqlen_k, int offset, int m0, int m_end, int keys, int* range, unsigned char* seen) {
    if (causal) apply<CausalMask<kBlockN>, kBlockN>({seqlen_k, offset}, m0, m_end, keys, range, seen);
    else apply<FullMask<kBlockN>, kBlockN>({seqlen_k}, m0, m_end, keys, range, seen);
}

extern "C" void mask(int block_n, bool causal, int seqlen_k, int offset, int m0, int m_end, int keys, int* range,
                     unsigned char* seen) {
    if (block_n == 16) both<16>(causal, seqlen_k, offset, m0, m_end, keys, range, seen);
    if (block_n == 48) both<48>(causal, seqlen_k, offset, m0, m_end, keys, range, seen);
    if (block_n == 64) both<64>(causal, seqlen_k, offset, m0, m_end, keys, range, seen);
    if (block_n == 80) both<80>(causal, seqlen_k, offset, m0, m_end, keys, range, seen);
}

extern "C" int last_visible(int seqlen_k, int offset, int q, int kv0) {
    return CausalMask<64>{seqlen_k, offset}.row(q, kv0).last;
}

extern "C" void tile(int x, int y, int z, int section, int m_tiles, const FastDiv* heads, const FastDiv* group,
                     WorkTile* out) {
    *out = work_tile(x, y, z, section, m_tiles, *heads, *group);
}

extern "C" void persistent(const FastDiv* order, int m_tiles, int batch_heads, int tiles, WorkTile* out) {
    const TileOrder numbering{order[0], order[1], order[2], order[3], order[4], m_tiles, batch_heads};
    for (int i = 0; i < tiles; i++) out[i] = numbering.tile(i);
}

extern "C" int divide(const FastDiv* by, int n) { return by->divide(n); }

extern "C" int roundings(int a, int b) {
    const int up = round_up(a, b), power = next_pow2(a);
    const bool rounded = ceil_div(a, b) * b == up && up >= a && up < a + b;
    return rounded && power >= a && power < 2 * a && (power & (power - 1)) == 0;
}
"""


class FastDiv(ctypes.Structure):
    _fields_ = (("magic", ctypes.c_uint64), ("shift", ctypes.c_uint32), ("divisor", ctypes.c_uint32))


class WorkTile(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("m_tile", "batch_head", "batch", "head", "kv_head"))


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("headers")
    (folder / "shim.cpp").write_text(SHIM)
    # Without __CUDACC_RTC__ the headers are plain C++ but for two keywords.
    flags = ["-std=c++17", "-O2", "-fwrapv", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    keywords = ["-D__device__=", "-D__forceinline__=inline"]
    command = [GXX or "", *flags, *keywords, f"-I{template_root()}", "shim.cpp", "-o", "shim.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(Path(folder) / "shim.so"))


def mask_of(
    device: ctypes.CDLL, block_n: int, causal: bool, seqlen_k: int, offset: int, rows: tuple[int, int], keys: int
) -> tuple[tuple[int, int], np.ndarray]:
    """((full_end, end), seen): the kernel's view of query rows [rows[0], rows[1]) and keys [0, keys)."""
    tiles = (ctypes.c_int * 2)()
    seen = np.zeros((rows[1] - rows[0], keys), np.uint8)
    device.mask(block_n, causal, seqlen_k, offset, *rows, keys, tiles, seen.ctypes.data_as(ctypes.c_void_p))
    return (tiles[0], tiles[1]), seen.astype(bool)


def visible(causal: bool, seqlen_k: int, offset: int, rows: tuple[int, int], keys: int) -> np.ndarray:
    query, key = np.arange(*rows)[:, None], np.arange(keys)
    return (key < seqlen_k) & (key <= query + (offset if causal else keys))


def check_mask(
    device: ctypes.CDLL, block_n: int, causal: bool, seqlen_k: int, offset: int, rows: tuple[int, int]
) -> None:
    keys = (seqlen_k // block_n + 2) * block_n
    (full_end, end), seen = mask_of(device, block_n, causal, seqlen_k, offset, rows, keys)
    expected = visible(causal, seqlen_k, offset, rows, keys)
    assert np.array_equal(seen, expected)
    assert end == -(-int(expected.any(axis=0).sum()) // block_n), "no tile is loaded in vain"
    assert full_end == int(expected.all(axis=0).sum()) // block_n, "no tile is tested in vain"


@pytest.mark.parametrize("block_n", BLOCK_N)
def test_masks_of_small_sizes(device: ctypes.CDLL, block_n: int) -> None:
    """Every length up to three key tiles, every causal offset near it, several query tiles: the classic off-by-one."""
    for seqlen_k in range(0, 3 * block_n + 2, 1 if block_n < 48 else 7):
        check_mask(device, block_n, False, seqlen_k, 0, (0, 3))
        for offset, m0 in product(range(-seqlen_k - 3, seqlen_k + 3, 1 if block_n < 48 else 5), (0, 16, 128)):
            check_mask(device, block_n, True, seqlen_k, offset, (m0, m0 + 16))


BLOCK_M = st.sampled_from([64, 128, 256])


@given(st.sampled_from(BLOCK_N), st.integers(1, 700), st.integers(1, 700), st.integers(0, 5), BLOCK_M)
def test_masks_of_any_size(
    device: ctypes.CDLL, block_n: int, seqlen_q: int, seqlen_k: int, tile: int, block_m: int
) -> None:
    for offset in (0, seqlen_k - seqlen_q):
        check_mask(device, block_n, True, seqlen_k, offset, (tile * block_m, (tile + 1) * block_m))


LENGTHS = st.one_of(st.integers(1, MAX_LENGTH - 1), st.integers(MAX_LENGTH - 300, MAX_LENGTH - 1))


@given(LENGTHS, LENGTHS, st.sampled_from(BLOCK_N), BLOCK_M, st.data())
def test_masks_of_huge_lengths(
    device: ctypes.CDLL, seqlen_q: int, seqlen_k: int, block_n: int, block_m: int, data: st.DataObject
) -> None:
    """32-bit arithmetic up to the longest sequences that are accepted (B-041)."""
    m0 = data.draw(st.integers(0, (seqlen_q - 1) // block_m)) * block_m
    for offset in (0, seqlen_k - seqlen_q):
        (full_end, end), _ = mask_of(device, block_n, True, seqlen_k, offset, (m0, m0 + block_m), 0)
        keys, first = (max(0, min(seqlen_k, row + 1 + offset)) for row in (m0 + block_m - 1, m0))
        assert (full_end, end) == (first // block_n, -(-keys // block_n))
        for q in (m0, m0 + block_m - 1):
            for kv0 in {0, full_end * block_n, max(0, end - 1) * block_n}:
                expected = min(seqlen_k - 1, q + offset) - kv0
                if expected >= -(2**31):
                    assert device.last_visible(seqlen_k, offset, q, kv0) == expected


MASKS = st.sampled_from(["full", "causal"])


def problem(mask: str) -> AttentionProblem:
    return AttentionProblem(64, 64, "bfloat16", mask, 16, False, "sm_90")  # type: ignore[arg-type]


def tile_of(
    device: ctypes.CDLL, block: tuple[int, int, int], section: int, m_tiles: int, heads: int, group: int
) -> WorkTile:
    tile = WorkTile()
    divisors = [ctypes.byref(FastDiv(*fast_div(n))) for n in (heads, group)]
    device.tile(*block, section, m_tiles, *divisors, ctypes.byref(tile))
    return tile


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 7), st.integers(1, 1500), st.integers(0, 10**7), MASKS)
def test_every_tile_is_worked_on_once(
    device: ctypes.CDLL, batch: int, kv_heads: int, group: int, seqlen_q: int, seqlen_k: int, mask: str
) -> None:
    """B-067, B-068: the grid covers every query tile of every head, and a head's keys are those of its group."""
    heads, config = kv_heads * group, FORWARD[0].config
    grid = forward_grid(problem(mask), config, batch * heads, group, seqlen_q, seqlen_k)
    seen, blocks = set(), 0
    for first, (nx, ny, nz) in grid.launches:
        for x, y, z in product(range(nx), range(ny), range(nz)):
            tile = tile_of(device, (x, first + y, z), nx, grid.m_tiles, heads, group)
            blocks += 1
            if tile.batch_head >= batch * heads:
                continue
            assert (tile.batch, tile.head) == divmod(tile.batch_head, heads) and tile.kv_head == tile.head // group
            seen.add((tile.batch, tile.head, tile.m_tile))
    assert seen == set(product(range(batch), range(heads), range(-(-seqlen_q // config.block_m))))
    section, m_tiles, _ = grid.launches[0][1]
    assert blocks < len(seen) + section * m_tiles, "less than a section of idle blocks"


SIZES = st.sampled_from([1, 16, 132])  # multiprocessors: the fewer, the smaller are sections beside all heads


@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 7), st.integers(1, 1500), st.integers(0, 10**7), MASKS, SIZES
)
def test_a_persistent_kernel_takes_the_tiles_in_the_order_of_the_grid(
    device: ctypes.CDLL, batch: int, kv_heads: int, group: int, seqlen_q: int, seqlen_k: int, mask: str, size: int
) -> None:
    """Every tile once; sections one after the other, in each the last query tiles of all heads first."""
    heads, config = kv_heads * group, FORWARD_SM90[0].config
    sizes = (batch * heads, group, seqlen_q, seqlen_k)
    grid = persistent_grid(problem(mask), config, *sizes, multiprocessors=size)
    divisors = (grid.section * grid.m_tiles, grid.section, grid.last_section, heads, group)
    order = (FastDiv * 5)(*(FastDiv(*fast_div(n)) for n in divisors))
    tiles = (WorkTile * grid.tiles)()
    device.persistent(order, grid.m_tiles, batch * heads, grid.tiles, tiles)
    for tile in tiles:
        assert (tile.batch, tile.head) == divmod(tile.batch_head, heads) and tile.kv_head == tile.head // group
    assert [(tile.batch_head, tile.m_tile) for tile in tiles] == [
        (head, m_tile)
        for first in range(0, batch * heads, grid.section)
        for m_tile in reversed(range(-(-seqlen_q // config.block_m)))
        for head in range(first, min(first + grid.section, batch * heads))
    ]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("batch_heads", [MAX_GRID_YZ, MAX_GRID_YZ + 1, 2**31 - 2**16, MAX_BATCH_HEADS])
def test_the_largest_grids(device: ctypes.CDLL, mask: str, batch_heads: int) -> None:
    """B-046: blocks at the grid's end, those beyond the last head among them, must not take another head for theirs."""
    grid = forward_grid(problem(mask), FORWARD[0].config, batch_heads, 1, 1, 1)
    ((_, (nx, ny, nz)),) = grid.launches
    assert ny == 1 and nz <= MAX_GRID_YZ and nx < 2**31
    for x, z in ((0, 0), (nx - 1, nz - 1), (0, nz - 1), ((batch_heads - 1) % nx, (batch_heads - 1) // nx)):
        tile = tile_of(device, (x, 0, z), nx, 1, batch_heads, 1)
        index = z * nx + x
        if index < batch_heads:
            assert (tile.batch_head, tile.batch, tile.head) == (index, 0, index)
        else:
            unsigned = tile.batch_head % 2**32  # as the kernel compares
            assert unsigned >= batch_heads, "the kernel would not see that this block has nothing to do"


@pytest.mark.parametrize("seqlen_q", [128 * MAX_GRID_YZ, 128 * MAX_GRID_YZ + 1, MAX_LENGTH - 1])
def test_more_query_tiles_than_a_grid_has(seqlen_q: int) -> None:
    grid = forward_grid(problem("causal"), FORWARD[0].config, 1, 1, seqlen_q, seqlen_q)
    assert [first for first, _ in grid.launches] == list(range(0, grid.m_tiles, MAX_GRID_YZ))
    assert sum(ny for _, (_, ny, _) in grid.launches) == grid.m_tiles == -(-seqlen_q // 128)


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
@settings(max_examples=500)
def test_division(device: ctypes.CDLL, divisor: int, n: int) -> None:
    by = FastDiv(*fast_div(divisor))
    for value in {n, 0, divisor - 1, divisor, n // divisor * divisor, max(0, n // divisor * divisor - 1), 2**31 - 1}:
        if value < 2**31:
            assert device.divide(ctypes.byref(by), value) == value // divisor


def test_roundings(device: ctypes.CDLL) -> None:
    assert all(device.roundings(a, b) for a in range(1, 300) for b in (1, 2, 3, 16, 64))
