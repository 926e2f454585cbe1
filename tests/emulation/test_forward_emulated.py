"""The forward kernel's rendered text, executed on the CPU by instruction: numbers, memory accesses and races.

All but NVRTC and the launch itself is the product's own: checks, problem, config, render, plan, parameter block.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuflash import kernels
from cuflash.arch import ARCHES
from cuflash.arch.sm80 import FORWARD
from cuflash.arch.tuning import Row
from cuflash.config import KernelConfig
from cuflash.kernels import select_config
from cuflash.problem import AttentionProblem
from cuflash.sm80_config import Sm80Config
from tests.emulation.build import compile_snippet, compiler
from tests.emulation.cases import BHSD, BSHD, Case, assert_clean, assert_right, check, edge_lengths, run
from tests.emulation.launch import Timing, forward
from tests.emulation.tensors import allocate, place

pytestmark = pytest.mark.skipif(compiler() is None, reason="the CPU emulation needs g++")

CAUSAL = (False, "bottom_right", "top_left")
TYPES = ("bfloat16", "float16")


def row_name(row: Row) -> str:
    return f"{row.arches[0]}-d{row.head_dim}-{row.config.label}"


def lengths_of(config: KernelConfig) -> tuple[int, int]:
    """Two query tiles and four key tiles, the last of each cut."""
    return config.block_m + 17, 3 * config.block_n + 5


# ---- every config, head dim and access width


@pytest.mark.parametrize("index", range(len(FORWARD)), ids=[row_name(row) for row in FORWARD])
def test_tuned_configs(index: int) -> None:
    """Each row of the tuning table, dtypes and masks in turn; also with head dims as different as the row may get."""
    row = FORWARD[index]
    d, small = row.head_dim, ((row.head_dim, 8), (8, row.head_dim))[index % 2]
    for dims in ((d, d), small):
        lengths, dtype = lengths_of(row.config), TYPES[index % 2]
        check(Case(lengths, dims, (3, 1), dtype=dtype, causal=CAUSAL[index % 3], arch=row.arches[0]))


@pytest.mark.slow
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("row", FORWARD, ids=row_name)
def test_tuned_configs_in_full(row: Row, dtype: str, causal: str) -> None:
    d = row.head_dim
    for dims, rise in (((d, d), 30.0), ((d - 24, max(1, d - 56)), 1.0)):
        check(Case(lengths_of(row.config), dims, (3, 1), 2, dtype, causal, arch=row.arches[-1], rise=rise))


def rows_per_pass(folder: Path) -> dict[tuple[int, int], int]:
    """How many rows of a head dim, in k-steps of 16, a block copies at once: from the device header itself."""
    keys = [(steps, threads) for steps in range(1, 17) for threads in (128, 256)]
    values = ", ".join(f"TileLoader<{16 * steps}, {threads}, 16>::kRowsPerPass" for steps, threads in keys)
    text = f'#include "device/tile.cuh"\nextern "C" const int rows[] = {{{values}}};'
    library = ctypes.CDLL(str(compile_snippet(text, folder)))
    return dict(zip(keys, (ctypes.c_int * len(keys)).in_dll(library, "rows"), strict=True))


@pytest.mark.parametrize("arch", [arch.name for arch in ARCHES.values() if not arch.specific])
def test_tiles_are_whole_passes(arch: str, tmp_path: Path) -> None:
    """What the kernel asserts when it is compiled holds for every pair of head dims and every access width."""
    rows, wrong = rows_per_pass(tmp_path), []
    for width, steps, steps_v in product((16, 8, 4, 2), range(1, 17), range(1, 17)):
        short = {16: 0, 8: 4, 4: 2, 2: 1}[width]
        dims = (16 * steps - short, 16 * steps_v - short)
        config = select_config(AttentionProblem(*dims, "bfloat16", "full", width, False, arch))
        q, v = rows[steps, config.threads], rows[steps_v, config.threads]
        if config.block_m % q or config.block_n % q or config.block_n % v:
            wrong.append((width, dims, config.label))
    assert not wrong, f"{len(wrong)} kernels do not compile, {wrong[0]} the first"


@pytest.mark.parametrize("stages", [3, 4])
def test_more_stages(stages: int) -> None:
    config = Sm80Config(block_m=64, block_n=16, warps=4, stages=stages, q_registers=2, ctas=1)
    for nk in (1, 16, 33, 100):
        check(Case((70, nk), (48, 64), causal="bottom_right", config=config))


@pytest.mark.parametrize(
    "dims",
    [(8, 8), (40, 40), (72, 72), (80, 80), (96, 96), (112, 112), (160, 160), (192, 128), (64, 256), (256, 8)],
    ids=str,
)
def test_head_dims(dims: tuple[int, int]) -> None:
    """Multiples of 8 take 16-byte accesses whether or not they fill a k-step (B-103, B-104)."""
    result = check(Case((77, 150), dims, dtype="float16", causal="bottom_right"))
    assert result.problem.access_bytes == 16


@pytest.mark.parametrize(
    ("width", "dims"),
    [
        (8, (36, 36)),
        (8, (100, 64)),
        (4, (34, 34)),
        (4, (66, 130)),
        (2, (1, 1)),
        (2, (3, 250)),
        (2, (255, 255)),
        (2, (255, 1)),
    ],
)
def test_odd_head_dims(width: int, dims: tuple[int, int]) -> None:
    result = check(Case((77, 150), dims, causal="top_left"))
    assert result.problem.access_bytes == width


@pytest.mark.slow
@pytest.mark.parametrize("d", range(1, 257))
def test_every_head_dim(d: int) -> None:
    dv = 1 + d * 101 % 256  # a permutation of 1 .. 256
    arch = ("sm_90", "sm_80", "sm_86")[d // 3 % 3]
    check(Case((77, 150), (d, dv), dtype=TYPES[d % 2], causal=CAUSAL[d % 3], arch=arch))


@pytest.mark.parametrize(
    ("change", "width"),
    [
        ({"order": BHSD}, 16),
        ({"pad": (0, 0, 0, 8)}, 16),
        ({"flip": (True, True, False, False), "batch": 2}, 16),
        ({"shared": (True, True, False, False), "batch": 2, "heads": (4, 2)}, 16),
        ({"pad": (0, 0, 0, 4)}, 8),
        ({"align": 8}, 8),
        ({"pad": (0, 0, 0, 2)}, 4),
        ({"align": 4}, 4),
        ({"pad": (0, 0, 0, 1)}, 2),
        ({"align": 2}, 2),
        ({"order": (0, 1, 3, 2)}, 2),
        ({"order": (3, 2, 1, 0), "batch": 2}, 2),
        ({"flip": (True, True, True, False), "batch": 2}, 2),
        ({"flip": (False, True, False, True)}, 2),
        ({"shared": (False, False, True, True)}, 2),
    ],
    ids=str,
)
def test_strides_choose_the_access_width(change: dict, width: int) -> None:
    """B-050, B-052, B-055, B-059: tensors end with their last element, and are aligned no better than they must be."""
    case = replace(Case((100, 75), (64, 40), dtype="float16", causal="bottom_right"), **change)
    assert check(case).problem.access_bytes == width


@pytest.mark.parametrize("causal", CAUSAL)
def test_lengths_around_tile_edges(causal: str) -> None:
    config = Sm80Config(block_m=64, block_n=32, warps=4, stages=2, q_registers=2, ctas=2)
    for lengths in edge_lengths(config):
        check(Case(lengths, (32, 32), causal=causal, config=config))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("causal", CAUSAL)
def test_empty_inputs_launch_nothing(lengths: tuple[int, int], causal: str) -> None:
    """B-028: the caller fills the rows of a call without keys."""
    _, result = run(Case(lengths, causal=causal))
    assert result.plan.launches == () and result.plan.dead == (lengths == (5, 0))


def test_rows_that_see_no_key() -> None:
    """B-002, B-011: 0 and -inf, in tiles with other rows, in warps that skip a tile, and in tiles without any key."""
    case = Case((300, 75), (64, 64), dtype="float16", causal="bottom_right")
    for timing in (Timing(False, 1), Timing(True, 2)):
        tensors, result = run(case, timing)
        assert_clean(tensors, result)
        assert not tensors["out"].view[:, :, :225].view(np.uint16).any()
        assert np.isneginf(tensors["lse"].view[:, :, :225]).all()
        assert_right(case, tensors)


@pytest.mark.parametrize(("heads", "batch"), [((1, 1), 3), ((7, 1), 1), ((6, 2), 2), ((28, 4), 1), ((5, 5), 2)])
@pytest.mark.parametrize("causal", [False, "top_left"])
def test_head_groups(heads: tuple[int, int], batch: int, causal: str) -> None:
    """B-067, B-068: also groups that are no powers of two; more heads than a section of the grid."""
    check(Case((33, 70), (32, 32), heads, batch, causal=causal))


def test_lse_is_optional() -> None:
    case = Case((150, 70), (64, 64), want_lse=False)
    without, _ = run(case)
    with_lse, _ = run(replace(case, want_lse=True), inputs={name: without[name] for name in "qkv"})
    assert_right(case, without)
    assert without["out"].view.tobytes() == with_lse["out"].view.tobytes()


# ---- sizes beyond 32 bits


def test_strides_beyond_32_bits() -> None:
    """B-041, B-064: 64-bit offsets for batches, heads and rows; memory is reserved, not touched."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, 150, 64)) for _ in range(3))
    for strides in ((2**32, 2**31 + 64, 64, 1), (2**31, 2**30, 2**22 - 8, 1), (64, 2**31, 2**23, 1)):
        tensors = {name: place(x, "float16", strides=strides) for name, x in (("q", q), ("k", k), ("v", v))}
        tensors["out"] = allocate(q.shape, strides, "float16", align=16, output=True)
        result = forward(tensors, causal="bottom_right")
        assert not result.report.faults, str(result.report)
        assert_right(Case((150, 150), causal="bottom_right", want_lse=False), tensors)


@pytest.mark.slow
def test_more_query_tiles_than_a_grid_has() -> None:
    """B-046: beyond 65535 query tiles a call is several launches."""
    rng = np.random.default_rng(0)
    seqlen = 65535 * 128 + 130
    tensors = {
        "q": place(rng.standard_normal((1, 1, seqlen, 8)), "float16", strides=(0, 0, 0, 1)),
        "k": place(rng.standard_normal((1, 1, 40, 8)), "float16"),
        "v": place(rng.standard_normal((1, 1, 40, 8)), "float16"),
        "out": allocate((1, 1, seqlen, 8), (0, 0, 8, 1), "float16", align=16, output=True),
    }
    result = forward(tensors, blocks={(0, 0, 0), (0, 1, 0), (0, 65534, 0)})
    assert not result.report.faults, str(result.report)
    assert [grid for grid, _ in result.plan.launches] == [(1, 65535, 1), (1, 2, 1)]
    written = np.flatnonzero(~np.isnan(tensors["out"].view[0, 0, :, 0].astype(np.float32)))
    tiles = sorted(set((written // 128).tolist()))
    assert tiles == [0, 1, 2, 65535, 65536] and len(written) == 4 * 128 + 2
    assert (tensors["out"].view[0, 0, written] == tensors["out"].view[0, 0, 0]).all()


@pytest.mark.parametrize("causal", [False, "top_left"])
def test_more_heads_than_a_grid_has(causal: str) -> None:
    """B-046, B-047: 70001 heads, of which the first and last ones run; a block beyond the last head does nothing."""
    heads, rng = 70001, np.random.default_rng(0)
    tensors = {name: place(rng.standard_normal((1, heads, 1, 8)), "float16") for name in "qkv"}
    tensors["out"] = allocate((1, heads, 1, 8), (0, 8, 0, 1), "float16", align=16, output=True)
    plan = forward(tensors, causal=causal, blocks=()).plan
    ((x, y, z),) = (grid for grid, _ in plan.launches)
    assert y == 1 and z <= 65535 and x * z >= heads
    last = (heads - 1) // x
    result = forward(tensors, causal=causal, blocks={(0, 0, 0), ((heads - 1) % x, 0, last), (x - 1, 0, z - 1)})
    assert not result.report.faults, str(result.report)
    for head in (0, heads - 1):
        assert np.array_equal(tensors["out"].view[0, head], tensors["v"].view[0, head])


@pytest.mark.parametrize("causal", CAUSAL)
def test_a_call_of_several_launches(causal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B-046: several launches, of which each takes up where the one before it ended; here a grid ends at 2."""
    monkeypatch.setattr(kernels, "MAX_GRID_YZ", 2)
    result = check(Case((5 * 128 - 30, 70), (32, 32), (2, 1), causal=causal))
    assert [grid[1] for grid, _ in result.plan.launches] == [2, 2, 1]


# ---- fresh shapes and values

booleans = st.booleans()


@st.composite
def calls(draw: st.DrawFn) -> Case:
    dims, dtype = draw(st.sampled_from([((64, 64), "bfloat16"), ((40, 24), "float16"), ((33, 17), "bfloat16")]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    order = draw(st.sampled_from([BSHD, BHSD, (1, 0, 2, 3), (2, 0, 1, 3), (0, 1, 3, 2)]))
    return Case(
        lengths=(draw(st.integers(1, 300)), draw(st.integers(1, 300))),
        dims=dims,
        heads=(kv_heads * group, kv_heads),
        batch=draw(st.integers(1, 2)),
        dtype=dtype,
        causal=draw(st.sampled_from(CAUSAL)),
        scale=draw(st.sampled_from([None, None, None, -0.3, 0.0, 1.0])),
        rise=draw(st.sampled_from([1.0, 0.01, 20.0])),
        order=order,
        pad=(0, 0, draw(st.integers(0, 2)), draw(st.sampled_from([0, 0, 8, 4, 1]))),
        flip=(draw(booleans), draw(booleans), draw(booleans), False),
        shared=(draw(booleans), draw(booleans), False, False),
    )


@settings(max_examples=20, suppress_health_check=list(HealthCheck), print_blob=True)
@given(calls())
def test_any_call(case: Case) -> None:
    check(case)


@pytest.mark.slow
@settings(max_examples=500, suppress_health_check=list(HealthCheck), print_blob=True)
@given(calls())
def test_many_calls(case: Case) -> None:
    check(case)
