"""`cuflash.attention_backward` on GPU arrays, as far as the host goes: on a fake GPU that NumPy carries out."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import cuflash
from cuflash import backward_plan, jit, kernels, params
from cuflash.arch import ARCHES
from cuflash.arch.backward import BACKWARD
from cuflash.backward_config import BackwardConfig, BackwardSm90Config, BackwardWideConfig
from cuflash.backward_kernels import HOPPER, BackwardGrid, backward_grid
from cuflash.backward_params import BACKWARD_DQ, BACKWARD_ROWS, BACKWARD_SM80
from cuflash.backward_plan import Workspace
from cuflash.problem import AttentionProblem
from cuflash.reference import oracle
from tests.gradients import Backward, assert_gradients
from tests.operands import draw_qkv
from tests.oracle import poisoned, randn
from tests.unit.fake_gpu import FakeGpu

NAMES = ("dout", "q", "k", "v", "out", "lse", "dlse")
CAUSAL = (False, "bottom_right", "top_left")
FAMILIES = {"backward_sm80": "sm_90", "backward_sm90": "sm_90a"}
"""And the targets of their kernels on a device of compute capability 9.0."""
TASKS = {"backward_sm80": ["backward_rows", "backward", "backward_dq"], "backward_sm90": ["backward_rows", "backward"]}
"""Of their launches: Hopper's main kernels make dQ as well."""


def draw(
    lengths: tuple[int, int] = (70, 150),
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 32),
    dtype: str = "float16",
    causal: Any = False,
) -> dict[str, np.ndarray]:
    """Arguments in the layout bhsd."""
    rng = np.random.default_rng(0)
    q, k, v = draw_qkv(rng, lengths, heads, dims, dtype, 2, "bhsd")
    out, lse = oracle(q, k, v, causal=causal)
    arrays = {"dout": randn(rng, out.shape, dtype), "q": q, "k": k, "v": v, "out": out.astype(q.dtype)}
    return arrays | {
        "lse": lse.astype(np.float32), "dlse": rng.standard_normal(lse.shape).astype(np.float32),
    }  # fmt: skip


def check(gpu: FakeGpu, arrays: dict[str, np.ndarray], causal: Any = False, **options: Any) -> tuple[Any, ...]:
    """The call on the fake GPU, judged; returns the gradients' host arrays."""
    given = {name: gpu.array(x) for name, x in arrays.items()}
    grads = cuflash.attention_backward(**given, causal=causal, layout="bhsd", **options)
    host = tuple(np.ascontiguousarray(gpu.host(grad)) for grad in grads)
    assert_gradients(host, Backward(*(arrays[name] for name in NAMES), causal=causal))
    return host


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_launches(gpu: FakeGpu, causal: Any, dtype: str, deterministic: bool, family: str) -> None:
    """Of kernels for one target, the workspace shared; the second call compiles and plans nothing."""
    expected = TASKS[family]
    arrays = draw((170, 150), dtype=dtype, causal=causal)
    with kernels.use_family(family):
        for _ in range(2):
            check(gpu, arrays, causal, deterministic=deterministic)
        assert len(gpu.compiled) == len(expected) and len(jit.BACKWARD_PLANS) == 1
    tasks = [launch.loaded.problem.task for launch in gpu.launches]
    assert tasks == 2 * expected
    assert {launch.loaded.problem.arch for launch in gpu.launches} == {FAMILIES[family]}
    first, main, *last = gpu.launches[: len(expected)]
    for name in ("rows", "dq_sums"):
        assert {launch.params[name] for launch in (main, *last)} == {first.params[name]}
    assert bool(main.params["turns"]) == bool(first.params["turns"]) == deterministic
    masks = [launch.loaded.problem.mask for launch in (first, main, *last)]
    assert masks == ["full", "causal" if causal else "full", "full"][: len(masks)]


def test_dq_that_cannot_be_written_in_whole_accesses_has_a_kernel_of_its_own(gpu: FakeGpu) -> None:
    """Its array, or another one of the call that TMA does not touch, lies 8 bytes beyond a multiple of 16."""
    arrays = draw()
    for name in ("dq", "out"):
        given = {key: misplaced(gpu, x, 8 * (key == name)) for key, x in arrays.items()}
        grads = [
            misplaced(gpu, poisoned(arrays[key].shape, np.dtype(np.float16)), 8 * (f"d{key}" == name)) for key in "qkv"
        ]
        cuflash.attention_backward(**given, layout="bhsd", grads=tuple(grads))
        first, main, last = gpu.launches[-3:]
        assert [launch.loaded.problem.task for launch in (first, main, last)] == TASKS["backward_sm80"]
        assert main.loaded.config.family == "backward_sm90" and main.loaded.problem.access_bytes == 16
        assert last.loaded.problem.access_bytes == 8 and not main.params["dq"]
        host = tuple(np.ascontiguousarray(gpu.host(grad)) for grad in grads)
        assert_gradients(host, Backward(*(arrays[name] for name in NAMES)))


@pytest.mark.parametrize("second", ["q", "k", "v", "dout", "dk", "dv"])
@pytest.mark.parametrize("first", ["out", "dq"])
def test_what_tma_moves_is_told_from_what_it_does_not(gpu: FakeGpu, first: str, second: str) -> None:
    """Calls of one layout in which another array lies 8 bytes beyond a multiple of 16, in both orders."""
    arrays = draw()
    for name in (first, second, first):
        given = {key: misplaced(gpu, x, 8 * (key == name)) for key, x in arrays.items()}
        like = {f"d{key}": poisoned(arrays[key].shape, np.dtype(np.float16)) for key in "qkv"}
        grads = [misplaced(gpu, x, 8 * (key == name)) for key, x in like.items()]
        cuflash.attention_backward(**given, layout="bhsd", grads=tuple(grads))
        assert gpu.launches[-2].loaded.config.family == ("backward_sm90" if name == first else "backward_sm80")
        host = tuple(np.ascontiguousarray(gpu.host(grad)) for grad in grads)
        assert_gradients(host, Backward(*(arrays[key] for key in NAMES)))


@pytest.mark.parametrize(
    ("heads", "dims", "family"),
    [
        ((3, 3), (16, 80), "backward_sm90"),
        ((6, 1), (128, 128), "backward_sm90"),
        ((4, 2), (33, 7), "backward_sm80"),
        ((2, 1), (192, 128), "backward_sm90_wide"),
        ((2, 2), (40, 200), "backward_sm90_wide"),
    ],
)
def test_heads_and_dims(gpu: FakeGpu, heads: tuple[int, int], dims: tuple[int, int], family: str) -> None:
    """The Hopper kernels take what TMA can take; their head dims decide between them, whichever is asked for."""
    arrays = draw((40, 300), heads, dims, causal="top_left")
    check(gpu, arrays, "top_left")
    assert {launch.loaded.problem.arch for launch in gpu.launches} == {
        "sm_90" if family == "backward_sm80" else "sm_90a"
    }
    assert gpu.launches[1].loaded.config.family == family
    for asked in HOPPER if family in HOPPER else ():
        with kernels.use_family(asked):
            check(gpu, arrays, "top_left")
        assert gpu.launches[-1].loaded.config.family == family


def test_any_strides_and_given_gradients(gpu: FakeGpu) -> None:
    """Every array in memory of another order, padded; gradients go where they were asked for."""
    arrays = draw(causal="bottom_right")
    strided = {}
    for name, x in arrays.items():
        memory = poisoned((x.shape[2], *x.shape[:2], *(n + 1 for n in x.shape[3:])), x.dtype)
        strided[name] = np.moveaxis(memory, 0, 2)[..., : x.shape[3]] if x.ndim == 4 else np.moveaxis(memory, 0, 2)
        strided[name][...] = x
    check(gpu, strided, "bottom_right")
    assert gpu.launches[1].loaded.problem.access_bytes == 2
    targets = [poisoned(x.shape[::-1], x.dtype).transpose() for x in (arrays["q"], arrays["k"], arrays["v"])]
    given = tuple(gpu.array(x) for x in targets)
    grads = cuflash.attention_backward(
        **{name: gpu.array(x) for name, x in arrays.items()}, causal=True, layout="bhsd", grads=given
    )
    assert all(grad is target for grad, target in zip(grads, given, strict=True))
    call = Backward(*(arrays[name] for name in NAMES), causal="bottom_right")
    assert_gradients(tuple(np.ascontiguousarray(x) for x in targets), call)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_empty(gpu: FakeGpu, shape: tuple[int, int]) -> None:
    arrays = {name: gpu.array(x) for name, x in draw(shape).items()}
    for grad in cuflash.attention_backward(**arrays, layout="bhsd"):
        assert (gpu.host(grad) == 0).all()
    assert not gpu.launches and not gpu.compiled


def test_the_stream_and_the_device_of_the_arrays(gpu: FakeGpu) -> None:
    gpu.streams[1] = 77
    given = {name: gpu.array(x, device=1) for name, x in draw().items()}
    cuflash.attention_backward(**given, layout="bhsd")
    assert [launch.stream for launch in gpu.launches] == [77, 77]
    assert gpu.device == 0 and gpu.switches == 1


@pytest.mark.parametrize("offset", [2, 8])
def test_an_allocator_that_aligns_little(gpu: FakeGpu, offset: int) -> None:
    """The gradients get kernels that can write them, and the workspace is aligned within its array."""
    gpu.offset = offset
    check(gpu, draw())
    assert [launch.loaded.problem.access_bytes for launch in gpu.launches] == 3 * [offset]


def test_gradients_must_not_overlap_what_is_read(gpu: FakeGpu) -> None:
    arrays = {name: gpu.array(x) for name, x in draw().items()}
    spare = [gpu.array(poisoned(arrays[name].shape, np.dtype(np.float16))) for name in "qkv"]
    for grads in ((arrays["q"], *spare[1:]), (*spare[:2], arrays["v"]), (spare[0], spare[1], spare[1][..., :32])):
        with pytest.raises(ValueError, match=r"grads\[\d\] shares memory with"):
            cuflash.attention_backward(**arrays, layout="bhsd", grads=grads)
    assert not gpu.launches


def test_float32_is_refused(gpu: FakeGpu) -> None:
    given = {name: gpu.array(x.astype(np.float32)) for name, x in draw().items()}
    with pytest.raises(cuflash.UnsupportedError, match="q, k and v have dtype float32; the GPU kernels take"):
        cuflash.attention_backward(**given, layout="bhsd")


def test_a_misplaced_lse_is_refused(gpu: FakeGpu) -> None:
    given = {name: gpu.array(x) for name, x in draw().items()}
    raw = np.zeros(4 * 2 * 4 * 70 + 2, np.uint8)
    given["lse"] = gpu.array(np.ndarray((2, 4, 70), np.float32, raw.data, 2))
    with pytest.raises(ValueError, match=r"lse lies at address .* must be multiples of the element size, 4"):
        cuflash.attention_backward(**given, layout="bhsd")


def misplaced(gpu: FakeGpu, x: np.ndarray, offset: int) -> Any:
    """A copy that lies ``offset`` bytes beyond a multiple of 16."""
    raw = np.zeros(x.nbytes + 32, np.uint8)
    placed = np.ndarray(x.shape, x.dtype, raw.data, -raw.ctypes.data % 16 + offset)
    placed[...] = x
    return gpu.array(placed)


@pytest.mark.parametrize("rows", ["lse", "dlse"])
def test_a_plan_does_not_take_a_misplaced_lse_for_another_array(gpu: FakeGpu, rows: str) -> None:
    """The same bits of all addresses together, first from an LSE and then from q, and the reverse."""
    arrays = draw()
    for moved, expected in ((rows, [16, 16]), ("q", [4, 4, 4])):
        given = {name: misplaced(gpu, x, 4 * (name == moved)) for name, x in arrays.items()}
        cuflash.attention_backward(**given, layout="bhsd")
        launches = gpu.launches[-len(expected) :]
        assert [launch.loaded.problem.access_bytes for launch in launches] == expected
    for moved in ("q", rows):
        given = {name: misplaced(gpu, x, 2 * (name == moved)) for name, x in arrays.items()}
        if moved == rows:
            with pytest.raises(ValueError, match=f"{rows} lies at address .* must be multiples of the element size, 4"):
                cuflash.attention_backward(**given, layout="bhsd")
        else:
            cuflash.attention_backward(**given, layout="bhsd")
    assert len(gpu.launches) == 8


# --- plans -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_workspace_keeps_its_bound(deterministic: bool) -> None:
    """One dQ in float32, rounded up to tiles, 8 bytes a row, and the turns."""
    layout = Workspace.of(padded_rows=64 * 32, head_dim=100, deterministic=deterministic)
    sums = 64 * 32 * 112 * 4
    assert layout.rows == sums and layout.size == sums + 64 * 32 * 8 + (64 * 2 * 4 if deterministic else 0)
    assert (layout.turns is None) != deterministic and layout.counts is layout.kv_sums is None
    counted = Workspace.of(64 * 32, 100, deterministic, counts=1)
    assert counted.counts == layout.size and counted.size == layout.size + 4 and counted.kv_sums is None
    shared = Workspace.of(64 * 32, 100, deterministic, counts=1 + 5 * 2, kv_sums=5 * 128 * (112 + 64))
    assert shared.kv_sums == layout.size and shared.counts == layout.size + 5 * 128 * (112 + 64) * 4
    assert shared.size == shared.counts + 11 * 4
    assert layout.floats * 4 >= layout.size + backward_plan.WORKSPACE_ALIGN - 4


def test_every_block_fits_the_argument_buffer() -> None:
    for block in (BACKWARD_ROWS, BACKWARD_SM80, BACKWARD_DQ, params.FORWARD_SM80, params.FORWARD_SM90):
        assert block.size <= jit.BUFFER_BYTES


@pytest.mark.parametrize("dims", [(64, 32), (128, 128), (192, 128)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("places", "shares"), [(4, 1), (8, 2), (12, 3), (100, 6)])
def test_blocks_share_the_query_heads_of_few_key_tiles(
    gpu: FakeGpu, dims: tuple[int, int], deterministic: bool, places: int, shares: int
) -> None:
    """As few blocks as fill the device some times, with query heads alike."""
    gpu.multiprocessors = places * (BackwardWideConfig.cluster if dims[0] > 128 else 1)
    arrays = draw((40, 1000), (6, 1), dims, causal=True)  # 8 key tiles
    arrays = {name: x[:1] for name, x in arrays.items()}
    check(gpu, arrays, True, deterministic=deterministic)
    main = gpu.launches[1].params
    assert main["shares"][2] == shares and main["group"] * shares == 6 and main["batch_heads"] == shares


@pytest.mark.parametrize("sizes", [(32, 4, 4096, 4096), (32, 4, 8192, 8192), (84, 1, 4096, 4096), (21, 1, 3000, 3000)])
def test_the_last_causal_section_is_no_small_rest(sizes: tuple[int, int, int, int]) -> None:
    """Its longest tiles would be waited for: 5 of 16 heads side by side took 1.25 times as long as 4 or 8."""
    p = dataclasses.replace(problem("causal"), arch="sm_90a")
    config = kernels.select_config(p)
    assert isinstance(config, BackwardSm90Config)
    grid = backward_grid(p, config, sizes, 132, deterministic=False)
    assert grid.section * grid.n_tiles >= 132
    assert grid.last_section >= grid.section / 2


def test_shares_are_divisors_of_the_group() -> None:
    p = problem(d=64)
    hopper = kernels.select_config(dataclasses.replace(p, arch="sm_90a"))
    cases = (4, 1, 4), (4, 66, 4), (4, 131, 4), (4, 132, 2), (4, 263, 2), (4, 264, 1), (7, 263, 7), (1, 1, 1)
    for group, n_tiles, expected in cases:
        sizes = group, group, 512, 128 * n_tiles
        assert backward_grid(p, hopper, sizes, 132, False).shares == expected  # type: ignore[arg-type]
        assert backward_grid(p, kernels.select_config(p), sizes, 132, False).shares == 1  # type: ignore[arg-type]


def problem(mask: str = "full", d: int = 128) -> AttentionProblem:
    return AttentionProblem(d, d, "bfloat16", mask, 16, False, "sm_90", "backward")  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (16, 4, 4096, 4096), (64, 1, 1000, 3000), (6, 3, 100_000, 70)])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_grid_has_a_block_for_each_key_tile(sizes: tuple[int, ...], mask: str, deterministic: bool) -> None:
    config = kernels.select_config(problem(mask))
    assert isinstance(config, BackwardConfig)
    grid = backward_grid(problem(mask), config, sizes, 132, deterministic)  # type: ignore[arg-type]
    batch_heads, group, seqlen_q, seqlen_k = sizes
    heads = batch_heads // group
    assert grid.blocks == heads * -(-seqlen_k // config.block_n) and grid.m_tiles == -(-seqlen_q // config.block_m)
    assert 1 <= grid.section <= heads and (heads - grid.last_section) % grid.section == 0
    if mask == "full" and not deterministic:
        assert grid.section == 1
    assert grid.section == 1 or grid.section * group * seqlen_q * 1024 <= kernels.L2_SECTION_BYTES


class KeyTile:
    """A work tile of a Hopper kernel, as in the templates: the query tiles to which it adds, and when it may."""

    def __init__(self, call: HopperCall, head: int, key_tile: int) -> None:
        self.grid, self.head, self.key_tile = call.grid, head, key_tile
        grid, block_m, block_n = call.grid, call.config.block_m, call.config.block_n
        first_query = 0 if call.offset is None else max(0, key_tile * block_n - call.offset)
        begin, end = min(first_query // block_m, grid.m_tiles), grid.m_tiles
        self.place = key_tile % grid.turn_group
        start = end - 1 + grid.turn_shift * self.place
        start -= end - begin if start >= end else 0
        self.path = [m if (m := start - j) >= begin else m + end - begin for j in range(end - begin)]
        group_start = key_tile - self.place
        self.group_size = min(grid.turn_group, grid.n_tiles - group_start)

    def turn(self, m: int) -> int:
        if self.grid.turn_shift == 0:
            return self.key_tile
        group_start = self.key_tile - self.place
        first = min(self.group_size, -(-(m + 1) // self.grid.turn_shift))
        return group_start + (self.place - first if self.place >= first else self.group_size - first + self.place)


class HopperCall(NamedTuple):
    """Of the main kernel. ``offset``: of the causal mask, if it has one."""

    grid: BackwardGrid
    config: BackwardSm90Config | BackwardWideConfig
    group: int  # query heads of a tile
    offset: int | None
    deterministic: bool

    def tiles(self) -> Iterator[KeyTile]:
        """In the order in which they are begun."""
        grid, heads = self.grid, self.grid.work_tiles // self.grid.n_tiles
        for first in range(0, heads, grid.section):
            here = range(first, min(heads, first + grid.section))
            if grid.turn_shift:
                groups = [range(grid.n_tiles)[i : i + grid.turn_group] for i in range(0, grid.n_tiles, grid.turn_group)]
                yield from (KeyTile(self, h, i) for group in groups for h in here for i in group)
            else:
                yield from (KeyTile(self, h, i) for i in range(grid.n_tiles) for h in here)


class Blocks:
    """The persistent blocks of a Hopper kernel, of which each may have two tiles.

    It takes the next one when ``early`` steps of its own, which are loaded, are still to come; with a shift of turns
    only where all of its group have been taken (`Loader.leave_group`).
    """

    def __init__(self, call: HopperCall, room: int, draw: random.Random, leaves_group: bool = True) -> None:
        self.call, self.grid, self.draw, self.leaves_group = call, call.grid, draw, leaves_group
        self.tiles, self.taken, self.early = list(call.tiles()), 0, draw.choice((2, 3))
        self.held: list[list[Work]] = [[] for _ in range(min(room, len(self.tiles)))]
        self.speeds = [draw.choice((0.05, 0.7, 1.0)) for _ in self.held]
        self.cleared, self.joined, self.added = Counter[int](), Counter[object](), Counter[object]()

    def end(self) -> bool:
        """Whether all tiles come to their end. Some blocks are slow."""
        while self.taken < len(self.tiles) or any(self.held):
            some = [held for held, speed in zip(self.held, self.speeds, strict=True) if self.draw.random() < speed]
            if not any([self.take(held) | self.go_on(held) for held in some]) and not any(
                [self.take(held) | self.go_on(held) for held in self.held]
            ):
                return False
        return True

    def take(self, held: list[Work]) -> bool:
        if self.taken == len(self.tiles) or len(held) == 2 or (held and not self.may_take_early(held[0])):
            return False
        tile = self.tiles[self.taken]
        steps = [(tile.head * self.call.group + head, m) for head in range(self.call.group) for m in tile.path]
        held.append(Work(self.taken, tile, steps))
        self.taken += 1
        return True

    def may_take_early(self, work: Work) -> bool:
        group_end = work.number - work.tile.place + work.tile.group_size
        in_group = self.leaves_group and self.grid.turn_shift and self.taken < group_end
        return len(work.steps) <= self.early and not in_group

    def go_on(self, held: list[Work]) -> bool:
        """A step of a block's first tile, if it need not wait."""
        if not held:
            return False
        work, grid = held[0], self.grid
        tile = work.tile
        if not work.begun:
            if tile.head >= grid.cleared_heads and self.cleared[tile.head] < grid.n_tiles:
                return False  # wait_for_zeros
            work.begun = True
            self.cleared[tile.head + grid.cleared_heads] += 1
        elif work.steps:
            _, m = work.steps[0]
            if self.call.deterministic and self.added[work.steps[0]] != tile.turn(m):
                return False
            self.added[work.steps.pop(0)] += 1
        else:
            joined = tile.head // grid.shares, tile.key_tile
            if self.joined[joined] != tile.head % grid.shares:
                return False  # join_shares
            self.joined[joined] += 1
            held.pop(0)
        return True


@dataclasses.dataclass
class Work:
    number: int
    tile: KeyTile
    steps: list[tuple[int, int]]  # that are still to come: query heads and tiles
    begun: bool = False


def hopper_call(d: int, mask: Any, deterministic: bool, draw: random.Random) -> tuple[HopperCall, int]:
    """And how many tiles a device works on at a time."""
    p = AttentionProblem(d, d, "bfloat16", mask, 16, False, "sm_90a", "backward")
    config = kernels.select_config(p)
    assert isinstance(config, (BackwardSm90Config, BackwardWideConfig))
    seqlen_q, seqlen_k, places = draw.randint(1, 2500), draw.randint(1, 2500), draw.randint(1, 40)
    group = draw.choice((1, 1, 2, 3))
    heads = group * draw.randint(1, 6)
    offset = draw.choice((0, seqlen_k - seqlen_q)) if mask == "causal" else None
    multiprocessors = places * config.cluster + draw.randint(0, config.cluster - 1)
    grid = backward_grid(p, config, (heads, group, seqlen_q, seqlen_k), multiprocessors, deterministic)
    assert grid.blocks == config.cluster * min(places, grid.work_tiles)
    return HopperCall(grid, config, group // grid.shares, offset, deterministic), places


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_blocks_that_add_in_turns_never_wait_in_a_circle(d: int, mask: str, deterministic: bool) -> None:
    """Nor those that wait for zeros or for other shares. As many as find room, all of a group of turns at least."""
    draw = random.Random(d)
    for _ in range(60 if deterministic else 20):
        call, places = hopper_call(d, mask, deterministic, draw)
        grid = call.grid
        assert grid.turn_shift == 0 or grid.turn_group <= max(1, places // 4)
        room = draw.choice((places, grid.turn_group if grid.turn_shift else 1))
        blocks = Blocks(call, room, draw)
        assert blocks.end(), (call, room)
        seen_by = Counter((tile.head * call.group + head, m) for tile in blocks.tiles for m in tile.path
                          for head in range(call.group))  # fmt: skip
        assert blocks.added == seen_by
        heads = grid.work_tiles // grid.n_tiles
        assert all(blocks.cleared[head] == grid.n_tiles for head in range(grid.cleared_heads, heads))


def test_blocks_that_have_two_tiles_of_a_group_may_wait_in_a_circle() -> None:
    draw = random.Random(1)
    ends = []
    for _ in range(150):
        call, places = hopper_call(128, "full", True, draw)
        if call.grid.turn_shift and call.grid.turn_group > 1:
            room = draw.randint(call.grid.turn_group, places)
            ends.append(Blocks(call, room, draw, leaves_group=False).end())
    assert not all(ends) and any(ends)


def test_blocks_that_wait_for_zeros_of_their_own_section_may_wait_in_a_circle() -> None:
    draw = random.Random(2)
    ends = []
    for _ in range(40):
        call, places = hopper_call(128, "causal", True, draw)
        call = call._replace(grid=call.grid._replace(cleared_heads=1))
        ends.append(Blocks(call, draw.randint(1, places), draw).end())
    assert not all(ends) and any(ends)


@pytest.mark.parametrize("changes", [
    {"key_warps": 3}, {"block_m": 48}, {"block_n": 72}, {"q_stages": 1}, {"q_stages": 3}, {"dout_stages": 0},
    {"warps": 6},
])  # fmt: skip
def test_a_config_that_no_kernel_can_have(changes: dict[str, int]) -> None:
    values = {"block_m": 64, "block_n": 128, "key_warps": 4, "warps": 8} | changes
    with pytest.raises(ValueError, match="accepted are"):
        BackwardConfig(**values)


def test_every_config_fits_its_targets() -> None:
    for row in BACKWARD:
        for name in row.arches:
            p = AttentionProblem(row.head_dim, row.head_dim_v, "bfloat16", "full", 16, False, name, "backward")
            assert row.config.smem_bytes(p) <= ARCHES[name].smem_per_block
            assert row.config.ctas * (row.config.smem_bytes(p) + 1024) <= ARCHES[name].smem_per_sm


@pytest.mark.parametrize("task", ["backward_rows", "backward_dq"])
def test_a_task_without_a_mask(task: str) -> None:
    with pytest.raises(ValueError, match="knows none: accepted is full"):
        AttentionProblem(64, 64, "bfloat16", "causal", 16, False, "sm_90", task)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale_first is True"):
        AttentionProblem(64, 64, "bfloat16", "full", 16, True, "sm_90", task)  # type: ignore[arg-type]


def test_too_many_tiles(gpu: FakeGpu) -> None:
    shape, rows = (2**26, 64, 16, 8), (2**26, 16, 64)
    gpu.execute = False
    like = [gpu.at(1 << 40, shape) for _ in range(5)]
    with pytest.raises(cuflash.UnsupportedError, match="up to 2147483647 tiles"):
        cuflash.attention_backward(*like, gpu.at(1 << 40, rows, np.float32))
    assert not gpu.launches
