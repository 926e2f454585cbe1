"""The Hopper kernels' own risks: hand-overs between warpgroups, tile edges, lazy rescaling, the switches of a config.

Each test runs a `Variant`: a config that the tuning table need not have, perhaps with changes in the kernel's text. All
of them are compiled ahead, in processes, by the fixture `compilations`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cuflash
from cuflash import counters
from cuflash.arch import ARCHES
from cuflash.arch.sm90 import FORWARD
from cuflash.config import KernelConfig
from cuflash.kernels import select_config, symbol
from cuflash.problem import MASKS, AttentionProblem
from tests.gpu.support import (
    DTYPES,
    Array,
    Variant,
    assert_same_bits,
    assign,
    check_attention,
    draw_qkv,
    host_qkv,
    kernel_in_use,
    numpy_dtype,
    poisoned,
    require_hopper,
    swap_layout,
    to_device,
    to_host,
)
from tests.mutation import Mutation
from tests.oracle import assert_accurate, assert_lse

if TYPE_CHECKING:
    from cuflash.compiled import Compiled

pytestmark = pytest.mark.gpu

TARGET = "sm_90a"
SOFTMAX, INSTRUCTIONS = "device/softmax.cuh", "device/ptx_sm90.cuh"

Use = Any
"""The fixture `use`: a context manager in which calls take the kernel of a variant."""


@pytest.fixture
def use(request: pytest.FixtureRequest) -> Any:
    require_hopper()
    compilations: Mapping[Variant, Future[Compiled]] = request.getfixturevalue("compilations")

    def in_use(variant: Variant) -> AbstractContextManager[None]:
        return kernel_in_use(variant, compilations[variant].result())

    return in_use


def kernel(
    d: int, dv: int, dtype: str, mask: str, *mutations: Mutation, short: bool = False, **changes: Any
) -> Variant:
    """The table's kernel for a problem, with changes of its config and of its text."""
    problem = AttentionProblem(d, dv, dtype, mask, 16, False, TARGET, short=short)  # type: ignore[arg-type]
    return Variant(problem, replace(select_config(problem), **changes), mutations)


def name(value: object) -> str | None:
    """A test's id: a kernel's by its symbol."""
    return symbol(value.problem, value.config).removeprefix("cuflash_fwd_") if isinstance(value, Variant) else None


def table(dtypes: tuple[str, ...], *mutations: Mutation) -> list[Variant]:
    """A kernel for each row of the tuning table."""
    rows = ((row.head_dim, row.head_dim_v, mask, row.short) for row in FORWARD for mask in row.masks)
    return [
        kernel(d, dv, dtype, mask, *mutations, short=short) for (d, dv, mask, short), dtype in product(rows, dtypes)
    ]


def draw(variant: Variant, lengths: tuple[int, int], heads: tuple[int, int], batch: int = 1) -> tuple[Array, ...]:
    problem = variant.problem
    return draw_qkv(lengths, heads, (problem.head_dim, problem.head_dim_v), problem.dtype, batch=batch, seed=lengths[0])


def is_causal(variant: Variant) -> bool:
    return variant.problem.mask == "causal"


# --- softmax: scores that grow, and the paths that they take -------------------------------------------------------

GROWTH = ("steady", "steep", "negative")
SCALE = 0.125


def growing(variant: Variant, growth: str, rising: bool) -> list[Array]:
    """q, k, v whose scores grow along the keys as they are visited, last tile first, or fall.

    Steady: by less than a factor of ten in the probability for each key tile, so that what was summed before still
    matters. Steep: twice the size in each eleventh of the keys, up to thousands; whole numbers, so that the scores have
    no rounding. Negative: -300 to -3, where references have no lazy limit.
    """
    problem = variant.problem
    dims = problem.head_dim, problem.head_dim_v
    q, k, v = (x.astype(np.float32) for x in host_qkv((200, 1100), (2, 1), dims, problem.dtype))
    step = np.arange(k.shape[1], dtype=np.float32)[:, None] / k.shape[1]
    if growth == "steady":
        q[..., 0], k[..., 0] = 2, np.round(64 * step)
    elif growth == "steep":
        q, k = np.rint(q).clip(-2, 2), np.rint(k).clip(-2, 2) * 2 ** np.floor(11 * step)[..., None]
    else:
        q, k = q / 2, k / 2
        q[..., 0], k[..., 0] = -8, 3 * 100 ** (1 - step)
    if rising:
        k, v = k[:, ::-1], v[:, ::-1]
    return [to_device(x.astype(numpy_dtype(problem.dtype))) for x in (q, k, v)]


@pytest.mark.parametrize("variant", table(DTYPES), ids=name)
def test_growing_scores(variant: Variant, use: Use) -> None:
    with use(variant):
        for growth, rising in product(GROWTH, (True, False)):
            check_attention(*growing(variant, growth, rising), causal=is_causal(variant), scale=SCALE)


# What is broken, and the scores that show it: each path of the softmax is taken, and each matters.
BROKEN_SOFTMAX = {
    "references never raised": (
        Mutation(SOFTMAX, "if (!warp_any(raise)) return false;", "return false;"), "steep", True
    ),
    "outputs not rescaled": (
        Mutation("", "if (rescale) softmax.rescale_output(o, correction);", "(void)rescale;"), "steady", True
    ),
    "sums not rescaled": (
        Mutation(SOFTMAX, "sum[w][r] *= correction[w][r];", "(void)correction[w][r];"), "steady", True
    ),
    "short way does not correct": (
        Mutation(SOFTMAX, "correction[w][r] = exp2_approx(old - exponent[w][r]);", "correction[w][r] = 1.f;"),
        "steady", True,
    ),
    "short way for rows without a limit": (
        Mutation(SOFTMAX, "warp_any(exact) || !raise_ordinary", "!raise_ordinary"), "steep", False
    ),
    "large scores not shifted": (
        Mutation(SOFTMAX, "shift = is_large(reference, scale) ? reference : 0.f;", "shift = 0.f;"), "steep", True
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "variant,growth,rising",
    [
        pytest.param(kernel(d, d, "bfloat16", "full", mutation), growth, rising, id=f"{what}-d{d}")
        for d in (64, 256)
        for what, (mutation, growth, rising) in BROKEN_SOFTMAX.items()
    ],
)
def test_broken_softmax_is_seen(variant: Variant, growth: str, rising: bool, use: Use) -> None:
    arrays = growing(variant, growth, rising)
    with use(variant.unchanged):
        check_attention(*arrays, scale=SCALE)
    with use(variant), pytest.raises(AssertionError, match=r"error above|non-finite"):
        check_attention(*arrays, scale=SCALE)


# --- hand-overs: the same bits whatever the timing -----------------------------------------------------------------

# Sleeps in a quarter of its calls for up to some microseconds, as long as several steps; no two launches are alike.
_DELAY = """
DEVICE void test_delay(u32 salt) {
    if (!(WHO)) return;
    u32 x = (u32)clock() / 1024 + salt * 0x9E3779B9u + threadIdx.x / 32 * 0x85EBCA6Bu + blockIdx.x * 0xC2B2AE35u;
    x ^= x >> 15; x *= 0x2C1B3C6Du; x ^= x >> 12; x *= 0x297A2D39u; x ^= x >> 15;
    if ((x & 3) == 0) __nanosleep(x >> 20);
}
"""
_WAIT, _WAITED = "DEVICE void mbarrier_wait(u32 bar, u32 parity) {", '"r"(bar), "r"(parity) : "memory");'
_SYNC, _SYNCED = "named_barrier_sync(int id, int threads) {", '"bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");'


def delays(who: str) -> tuple[Mutation, ...]:
    """Sleep before and after waiting, at mbarriers and for turns, in the threads of which `who` is true."""
    return (
        Mutation(INSTRUCTIONS, _WAIT, _DELAY.replace("WHO", who) + _WAIT + " test_delay(bar);"),
        Mutation(INSTRUCTIONS, _WAITED, _WAITED + " test_delay(bar + 1);"),
        Mutation(INSTRUCTIONS, _SYNC, _SYNC + " test_delay(id);"),
        Mutation(INSTRUCTIONS, _SYNCED, _SYNCED + " test_delay(id + 100);"),
    )


SLEEPERS = {
    "everybody": "true",
    "producer": "threadIdx.x < 128",
    "key loader": "threadIdx.x == 0",
    "first consumer": "threadIdx.x / 128 == 1",
    "last consumer": "threadIdx.x + 128 >= blockDim.x",
    "fourth warp of each": "threadIdx.x % 128 >= 96",
}

# A buffer that is given back before it has been used, though not before all warps have seen it full. (Otherwise, or if
# nobody waited for the release, phases would run away and the kernel hang.)
_RELEASE = (
    "named_barrier_sync(8 + warpgroup, 128);"
    " if (elected) mbarrier_arrive(smem.{0}_empty({0}_stage.index)); test_delay(1);"
)
EARLY_RELEASE = {
    "K": (
        Mutation(
            "",
            "k_stage.phase);\n        take_turn();",
            f"k_stage.phase);\n        {_RELEASE.format('k')}\n        take_turn();",
        ),
        Mutation("", "if (elected) mbarrier_arrive(smem.k_empty(k_stage.index));\n        release", "release"),
        Mutation("", "mbarrier_arrive_after(k_empty, elected, s[0][kEarly - 3], s[0][kEarly - 1]);", ""),
    ),
    "V": (
        Mutation("", "v_stage.phase);\n", f"v_stage.phase);\n        {_RELEASE.format('v')}\n"),
        Mutation("", "if (elected) mbarrier_arrive(smem.v_empty(v_stage.index));\n        if (kOne", "if (kOne"),
        Mutation("", "if (elected) mbarrier_arrive(v_empty);", ""),
    ),
    "O": (
        Mutation("", "            if (lane == 0) mbarrier_arrive(smem.o_full(buffer.index, warpgroup));\n", ""),
        Mutation(
            "",
            "            stage_output_chunks<",
            "            if (lane == 0) mbarrier_arrive(smem.o_full(buffer.index, warpgroup)); test_delay(1);\n"
            "            stage_output_chunks<",
        ),
    ),
}  # fmt: skip


def copied(x: Array, copies: int) -> Array:
    """An array of as many times as many batches, as integers on the way."""
    import cupy as cp

    return cp.tile(x.view(np.uint16), (copies, 1, 1, 1)).view(x.dtype)


class Repeated:
    """One call, of several work tiles for each block, that is made again and again beside other work."""

    def __init__(
        self,
        variant: Variant,
        lengths: tuple[int, int] = (1100, 1100),
        heads: tuple[int, int] = (16, 4),
        batch: int = 2,
        copies: int = 1,
    ) -> None:
        import cupy as cp

        self.causal = is_causal(variant)
        self.arrays = [copied(x, copies) for x in draw(variant, lengths, heads, batch)]
        self.others = draw(variant, (333, 500), (8, 8))
        self.expected, self.expected_lse = cuflash.attention(*self.arrays, causal=self.causal, return_lse=True)
        self.stream, self.neighbour = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
        self.memory = cp.zeros(1 << 24, cp.uint32)
        self.noise = cp.RawKernel(
            'extern "C" __global__ void noise(unsigned* x) {'
            "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < 1 << 24; i += gridDim.x * blockDim.x)"
            " x[i] = x[i] * 1664525u + 1013904223u; }",
            "noise",
        )
        cp.cuda.Device().synchronize()

    def differences(self, runs: int) -> int:
        """Elements of outputs and LSEs that are not as expected, of all runs together."""
        import cupy as cp

        different = cp.zeros((), cp.int64)
        poison = poisoned(self.expected.shape, self.expected.dtype)
        out = cp.empty_like(self.expected)
        cp.cuda.Device().synchronize()
        for run in range(runs):
            with self.neighbour:  # takes multiprocessors and bandwidth at changing times, and runs this very kernel
                self.noise((16 + 16 * (run % 4),), (256,), (self.memory,))
                cuflash.attention(*self.others, causal=self.causal)
            with self.stream:
                assign(out, poison)
                _, lse = cuflash.attention(*self.arrays, causal=self.causal, out=out, return_lse=True)
                different += (out.view(np.uint16) != self.expected.view(np.uint16)).sum()
                different += (lse.view(np.uint32) != self.expected_lse.view(np.uint32)).sum()
        cp.cuda.Device().synchronize()
        return int(different)


# One buffer for Q and O, and a Q wider than O: its last columns, which no O takes, once gave a race away.
WIDE_Q = [
    kernel(192, 128, "bfloat16", mask, block_n=block_n, q_stages=1, q_registers=12, tma_store=True)
    for mask, block_n in (("full", 96), ("causal", 112))
]


@pytest.mark.parametrize("variant", [*table(DTYPES), *WIDE_Q], ids=name)
def test_the_same_bits_in_200_runs(variant: Variant, use: Use) -> None:
    with use(variant):
        repeated = Repeated(variant)
        first = [swap_layout(to_host(x[:1, :, :1])) for x in (repeated.expected, *repeated.arrays)]
        assert_accurate(*first, causal="bottom_right" if repeated.causal else False)
        assert repeated.differences(200) == 0


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=f"{name(variant)}-{who}")
        for who, condition in SLEEPERS.items()
        for variant in table(("bfloat16",), *delays(condition))
    ],
)
def test_delays_change_no_bit(variant: Variant, use: Use) -> None:
    with use(variant.unchanged):
        repeated = Repeated(variant)
    with use(variant):
        assert repeated.differences(20) == 0


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(kernel(d, d, "bfloat16", mask, *delays("true"), *mutations), id=f"{what}-d{d}")
        for d, mask in ((128, "full"), (64, "causal"))
        for what, mutations in EARLY_RELEASE.items()
    ],
)
def test_a_buffer_that_is_released_early_is_seen(variant: Variant, use: Use) -> None:
    with use(variant.unchanged):
        repeated = Repeated(variant)
    with use(variant):
        assert repeated.differences(20) > 0


# --- key tiles that a consumer hands back because none of its rows sees them ---------------------------------------


def skipping() -> Iterator[Variant]:
    """The table's kernels whose consumers skip; more to skip than they may, one to three Q buffers, no turns."""
    for d, dtype in product((64, 256), DTYPES):
        yield kernel(d, d, dtype, "causal")
    for changes in (
        {"block_n": 64},
        {"block_n": 32, "stages": 4},
        {"block_n": 32, "stages": 2, "q_stages": 2},
        {"block_n": 64, "tma_store": False},
        {"block_n": 64, "q_stages": 1, "tma_store": False},
        {"block_n": 48, "ping_pong": False},
        {"block_n": 64, "q_stages": 1, "tma_store": False, "ping_pong": False, "dynamic": False},
    ):
        yield kernel(64, 64, "bfloat16", "causal", **changes)
    yield kernel(256, 256, "float16", "causal", block_n=32, stages=3)


SKIPPING = list(skipping())


def skips(variant: Variant, lengths: tuple[int, int], causal: str) -> set[int]:
    """How many key tiles consumers would skip, were there no limit, in the work tiles of a head."""
    (nq, nk), m, n = lengths, variant.config.block_m, variant.config.block_n
    offset = nk - nq if causal == "bottom_right" else 0

    def tiles(rows: int) -> int:
        return max(1, -(-max(0, min(nk, rows + offset)) // n))

    return {
        tiles(m0 + m) - (tiles(row + 64) if row < nq else 1) for m0 in range(0, nq, m) for row in range(m0, m0 + m, 64)
    }


def skipping_lengths(variant: Variant) -> list[tuple[tuple[int, int], str]]:
    """Diagonals at several places in a key tile, rows that do not exist, rows that see nothing, few and many keys."""
    m, n = variant.config.block_m, variant.config.block_n
    return [
        ((5 * m, 5 * m), "bottom_right"),
        ((4 * m + 1, 4 * m + n // 2 + 3), "bottom_right"),
        ((3 * m - 63, 3 * m), "top_left"),
        ((2 * m + 65, 2 * m + 9 * n + 5), "bottom_right"),
        ((m + 7, 5 * m), "top_left"),
        ((4 * m + 65, n + 3), "bottom_right"),
        ((4 * m + 33, 2 * n - 1), "top_left"),
        ((3 * m + 1, 3 * m - n - 1), "bottom_right"),
    ]


def check_many_tiles(variant: Variant, lengths: tuple[int, int], causal: str, seed: int = 0) -> None:
    """Two heads against the oracle, and with them so many copies that each block gets several work tiles."""
    import cupy as cp

    problem, heads = variant.problem, 2
    host = host_qkv(lengths, (heads, heads), (problem.head_dim, problem.head_dim_v), problem.dtype, seed=seed)
    blocks, m_tiles = cp.cuda.Device().attributes["MultiProcessorCount"], -(-lengths[0] // variant.config.block_m)
    copies = -(-3 * blocks // (m_tiles * heads)) + 1
    arrays = [copied(to_device(x), copies) for x in host]
    out = cp.empty((*arrays[0].shape[:3], problem.head_dim_v), np.uint16)
    out[...] = 0x7FFF  # NaN in both types
    _, lse = cuflash.attention(*arrays, causal=causal, out=out.view(host[0].dtype), return_lse=True)
    lse_bits = lse.view(np.uint32)
    assert bool((out == out[:1]).all()) and bool((lse_bits == lse_bits[:1]).all()), "copies of a head differ"
    inputs = [swap_layout(x) for x in host]
    assert_accurate(swap_layout(to_host(out[:1].view(host[0].dtype))), *inputs, causal=causal)
    assert_lse(to_host(lse[:1]), *inputs, causal=causal)


@pytest.mark.parametrize("variant", SKIPPING, ids=name)
def test_skipped_key_tiles(variant: Variant, use: Use) -> None:
    with use(variant):
        for lengths, causal in skipping_lengths(variant):
            check_many_tiles(variant, lengths, causal)


# Wrong numbers of skipped tiles, within the limit: all consumers still take the turns and stages that they must.
BROKEN_SKIPPING = {
    "one too many": Mutation("", "max_int(1, needed)", "max_int(1, needed - 1)"),
    "the first consumer's for all": Mutation("", "own_range(tile).end", "mask.range(tile.m0, tile.m0 + 64).end"),
    "rows next to missing ones": Mutation(
        "", "first_row(tile) < p.seqlen_q", "first_row(tile) + 64 <= p.seqlen_q"
    ),
    "keys numbered by the work tile's steps": Mutation(
        "", "return (steps - 1 - j) * kBlockN; }   // of step j", "return (steps - j) * kBlockN; }"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(kernel(d, d, "bfloat16", "causal", mutation), id=f"{what}-d{d}")
        for d in (64, 256)
        for what, mutation in BROKEN_SKIPPING.items()
    ],
)
def test_broken_skipping_is_seen(variant: Variant, use: Use) -> None:
    lengths = 3 * variant.config.block_m - 31, 3 * variant.config.block_m - 31
    with use(variant.unchanged):
        check_many_tiles(variant, lengths, "bottom_right")
    with use(variant), pytest.raises(AssertionError, match=r"error above|non-finite|copies of a head differ"):
        check_many_tiles(variant, lengths, "bottom_right")


def many_tiles(variant: Variant) -> Repeated:
    """Several work tiles for each block, the last of each head with consumers without rows."""
    m, n = variant.config.block_m, variant.config.block_n
    return Repeated(variant, (4 * m + 7, 4 * m + n + 12), (8, 2), batch=1, copies=10)


@pytest.mark.parametrize("variant", [kernel(d, d, "bfloat16", "causal") for d in (64, 256)], ids=name)
def test_the_same_bits_in_200_runs_with_skipped_tiles(variant: Variant, use: Use) -> None:
    with use(variant):
        assert many_tiles(variant).differences(200) == 0


# Between the turn and the two waits, and between what has been seen full and what is handed back.
_DELAYED: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("d64", 64, {}),
    ("d64-two-to-skip", 64, {"block_n": 64}),
    ("d64-no-turns", 64, {"block_n": 64, "ping_pong": False}),
    ("d256", 256, {}),
)
_SKIP_DELAYS = (
    Mutation("", "take_turn();\n            pass_turn();\n", "take_turn();\n            pass_turn(); test_delay(3);\n"),
    Mutation(
        "",
        "            if (elected) mbarrier_arrive(smem.v_empty(k_stage.index));\n",
        "            test_delay(4);\n            if (elected) mbarrier_arrive(smem.v_empty(k_stage.index));\n",
    ),
)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(
            kernel(d, d, "bfloat16", "causal", *delays(condition), *_SKIP_DELAYS, **changes), id=f"{label}-{who}"
        )
        for who, condition in SLEEPERS.items()
        for label, d, changes in _DELAYED
        if not changes or who in ("everybody", "fourth warp of each")
    ],
)
def test_delays_change_no_bit_with_skipped_tiles(variant: Variant, use: Use) -> None:
    with use(variant.unchanged):
        repeated = many_tiles(variant)
    with use(variant):
        assert repeated.differences(5) == 0


# --- edges ---------------------------------------------------------------------------------------------------------

EDGE_DIMS = (
    *((d, d) for d in (8, 24, 40, 64, 72, 80, 96, 112, 128, 136, 160, 192, 200, 256)),
    (192, 128), (64, 256), (256, 64),
)  # fmt: skip


@pytest.mark.parametrize(
    "variant",
    [
        kernel(d, dv, DTYPES[(index + nth) % 2], mask)
        for index, (d, dv) in enumerate(EDGE_DIMS)
        for nth, mask in enumerate(MASKS)
    ],
    ids=name,
)
def test_lengths_around_tile_edges(variant: Variant, use: Use) -> None:
    """Query lengths at the edges of tiles and of consumers with key lengths at those of key tiles; head groups."""
    m, n = variant.config.block_m, variant.config.block_n
    edges_m = (1, 63, 64, 65, m - 1, m, m + 1, 2 * m + 1)
    edges_n = (1, n - 1, n, n + 1, 2 * n - 1, 2 * n, 2 * n + 1, 3 * n + 5)
    heads = ((2, 1), (3, 3), (4, 2), (3, 1))
    with use(variant):
        for i, shift in product(range(8), (0, 3)):
            arrays = draw(variant, (edges_m[i], edges_n[(i + shift) % 8]), heads[(i + shift) % 4])
            for causal in ("bottom_right", "top_left") if is_causal(variant) else (False,):
                check_attention(*arrays, causal=causal)


# --- work tiles ----------------------------------------------------------------------------------------------------

ORDERS = [
    kernel(*dims, "bfloat16", mask, dynamic=dynamic)
    for dims, mask in (((64, 64), "causal"), ((128, 128), "full"), ((192, 128), "causal"))
    for dynamic in (False, True)
]


@pytest.mark.parametrize("variant", ORDERS, ids=name)
def test_fewer_and_more_tiles_than_blocks(variant: Variant, use: Use) -> None:
    """One tile for each head; then several, the last of them not full."""
    import cupy as cp

    blocks = cp.cuda.Device().attributes["MultiProcessorCount"]
    with use(variant):
        for tiles in (1, blocks - 1, blocks + 1, 3 * blocks + 5):
            check_attention(*draw(variant, (40, 150), (tiles, tiles)), causal=is_causal(variant))
        lengths = 5 * variant.config.block_m - 7, 300
        check_attention(*draw(variant, lengths, (blocks // 4, blocks // 4)), causal=is_causal(variant))


@pytest.mark.parametrize("variant", [kernel(8, 8, "float16", "causal", dynamic=x) for x in (False, True)], ids=name)
@pytest.mark.parametrize("swap", [False, True], ids=["heads", "batches"])
def test_more_heads_than_a_grid_axis(variant: Variant, swap: bool, use: Use) -> None:
    """70016 heads, which repeat after 128."""
    import cupy as cp

    period, repeats = 128, 547
    host = host_qkv((3, 5), (period, period), (8, 8), "float16")
    arrays = [cp.tile(to_device(x), (1, 1, repeats, 1)) for x in host]
    if swap:
        arrays = [cp.ascontiguousarray(x.swapaxes(0, 2)) for x in arrays]
    with use(variant):
        out = poisoned(arrays[0].shape, np.float16)
        _, lse = cuflash.attention(*arrays, causal=True, out=out, return_lse=True)
    out, lse = (out.swapaxes(0, 2), lse.swapaxes(0, 1)) if swap else (out, lse)
    for x, axis in ((out.view(np.uint16), 2), (lse.view(np.uint32), 1)):
        first = x.take(cp.arange(period), axis=axis)
        assert bool((x == cp.concatenate([first] * repeats, axis)).all())
    inputs = [swap_layout(x) for x in host]
    assert_accurate(swap_layout(to_host(out[:, :, :period])), *inputs, causal="bottom_right")
    assert_lse(to_host(lse[:, :period]), *inputs, causal="bottom_right")


# --- switches ------------------------------------------------------------------------------------------------------

SWITCHES: tuple[dict[str, Any], ...] = (
    {},
    {"exact": True},
    {"ping_pong": False},
    {"tma_store": False},
    {"tma_store": False, "q_stages": 1},
    {"tma_store": True, "q_stages": 2, "block_n": 64},
    {"tma_store": True, "q_stages": 3, "block_n": 64},
    {"tma_store": False, "q_stages": 3, "block_n": 64},
    {"ping_pong": False, "tma_store": False, "q_stages": 1, "exact": True},
    {"stages": 4, "block_n": 64, "tma_store": False, "q_stages": 1},
    {"block_m": 64},
    {"block_m": 128, "block_n": 96},
    {"slack": 0},
)


def switched() -> Iterator[tuple[Variant, Variant]]:
    """Different configs that fit into a multiprocessor, each with a static and with a dynamic order of work tiles."""
    for d, mask in ((64, "causal"), (128, "full"), (192, "causal"), (256, "full")):
        found: set[KernelConfig] = set()
        for changes in SWITCHES:
            static, dynamic = (kernel(d, d, "float16", mask, **changes, dynamic=dynamic) for dynamic in (False, True))
            fits = static.config.smem_bytes(static.problem) <= ARCHES[TARGET].smem_per_block
            if fits and static.config not in found:
                found.add(static.config)
                yield static, dynamic


@pytest.mark.parametrize("variant,dynamic", [pytest.param(*pair, id=name(pair[0])) for pair in switched()])
def test_switches(variant: Variant, dynamic: Variant, use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every config is right; the order of the work tiles changes no bit, nor does a counter that is not there."""
    arrays, causal = draw(variant, (1000, 777), (15, 5), batch=2), is_causal(variant)
    with use(variant):
        check_attention(*(x[:1, :, :1] for x in arrays), causal=causal)
        expected = cuflash.attention(*arrays, causal=causal, return_lse=True)
    with use(dynamic):
        drawn = cuflash.attention(*arrays, causal=causal, return_lse=True)
        monkeypatch.setattr(counters, "take", lambda device, stream: counters.NO_COUNTER)
        without = cuflash.attention(*arrays, causal=causal, return_lse=True)
    for result in (drawn, without):
        for x, y in zip(result, expected, strict=True):
            assert_same_bits(x, y)
