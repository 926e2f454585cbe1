"""The backward kernels' rendered texts, executed on the CPU by instruction: numbers, memory accesses, races and turns.

All but NVRTC and the launch itself is the product's own: checks, problems, configs, render, plan, parameter blocks.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuflash import kernels
from cuflash.arch.backward import BACKWARD
from cuflash.arch.tuning import Row
from cuflash.problem import AttentionProblem
from tests.emulation.backward import (
    BackwardCase,
    assert_clean,
    backward,
    call_of,
    check,
    with_config,
)
from tests.emulation.build import compiler
from tests.emulation.cases import BHSD
from tests.emulation.launch import EARLY, SABOTAGE, Timing
from tests.gradients import assert_gradients
from tests.mutation import Mutation

pytestmark = pytest.mark.skipif(compiler() is None, reason="the CPU emulation needs g++")

CAUSAL = (False, "bottom_right", "top_left")
TYPES = ("bfloat16", "float16")
SMALL = {"block_m": 32, "block_n": 32, "key_warps": 2, "warps": 4}
"""A config whose tiles and warps are few, so that short sequences have many tiles and tests are quick."""


PATIENCE = 10_000_000
"""Instructions that no block with such tiles needs for these tests' sequences."""


def row_name(row: Row) -> str:
    return f"{row.arches[0]}-d{row.head_dim}-{row.config.label}-{'-'.join(row.masks)}"


# ---- every config, head dim and access width


@pytest.mark.parametrize("index", range(len(BACKWARD)), ids=[row_name(row) for row in BACKWARD])
def test_tuned_configs(index: int) -> None:
    """Each row of the tuning table, dtypes, masks and modes in turn; also with dims as different as it may get."""
    row = BACKWARD[index]
    d, config = row.head_dim, row.config
    causal = [x for x in CAUSAL if ("causal" if x else "full") in row.masks]
    for i, dims in enumerate(((d, d), ((d, 8), (8, d))[index % 2])):
        lengths = config.block_m + 17, (2 - i) * config.block_n + 5
        case = BackwardCase(lengths, dims, (2, 1), dtype=TYPES[index % 2], causal=causal[(index + i) % len(causal)])
        check(replace(case, arch=row.arches[0], deterministic=(index + i) % 2 == 0))


@pytest.mark.parametrize(
    "dims",
    [(1, 1), (16, 16), (31, 31), (33, 64), (40, 72), (80, 80), (100, 100), (112, 112), (130, 130), (192, 128)],
    ids=str,
)
def test_head_dims(dims: tuple[int, int]) -> None:
    """Every padding and width of access, in rows that are packed and in rows that are apart."""
    causal = CAUSAL[sum(dims) % 3]
    for pad, dlse in (((0, 0, 0, 0), False), ((0, 0, 0, 3), True)):
        check(BackwardCase((37, 140), dims, (2, 2), causal=causal, pad=pad, with_dlse=dlse, align=4 if pad[3] else 16))


@pytest.mark.parametrize("access_bytes", [16, 8, 4, 2])
@pytest.mark.parametrize("d", [64, 256])
def test_access_widths(access_bytes: int, d: int) -> None:
    """Rows that begin at multiples of a width and no more."""
    pad = (0, 0, 0, access_bytes // 2)
    run = check(BackwardCase((40, 70), (d, d), (2, 1), causal="bottom_right", pad=pad, align=access_bytes))
    assert run.request.access_bytes == access_bytes


@pytest.mark.parametrize(
    "shape",
    [(64, 32, 1, 4, 1, 1), (32, 64, 4, 4, 2, 2), (64, 64, 2, 8, 2, 1), (128, 32, 2, 4, 2, 2), (32, 32, 2, 4, 3, 3)],
    ids=str,
)
def test_any_stages_and_grid_of_warps(shape: tuple[int, ...]) -> None:
    changes = dict(zip(("block_m", "block_n", "key_warps", "warps", "q_stages", "dout_stages"), shape, strict=True))
    case = BackwardCase((150, 100), (48, 80), (2, 1), causal="bottom_right", deterministic=True)
    check(with_config(case, **changes))


# ---- lengths


def edge_lengths(m: int, n: int) -> list[tuple[int, int]]:
    queries, keys = (1, m, m + 1, 3 * m - 1), (1, n, n + 1, 3 * n - 1)
    return [(nq, nk) for nq in queries for nk in keys]


@pytest.mark.parametrize("causal", CAUSAL, ids=str)
def test_tile_edges(causal: Any) -> None:
    for i, lengths in enumerate(edge_lengths(32, 32)):
        case = BackwardCase(lengths, (64, 64), (1, 1), causal=causal, dtype=TYPES[i % 2], deterministic=i % 3 == 0)
        check(with_config(case, **SMALL))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_empty(lengths: tuple[int, int]) -> None:
    case = BackwardCase(lengths)
    assert not backward(case, {**case.arguments(), **case.gradients()}).plan.launches


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(
    st.tuples(st.integers(1, 150), st.integers(1, 150)),
    st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2)]),
    st.sampled_from([(64, 64), (48, 80), (20, 33)]),
    st.sampled_from(CAUSAL),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
)
def test_any_call(
    lengths: tuple[int, int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    causal: Any,
    deterministic: bool,
    with_dlse: bool,
    batch: int,
) -> None:
    case = BackwardCase(lengths, dims, heads, batch, causal=causal, deterministic=deterministic, with_dlse=with_dlse)
    check(with_config(case, **SMALL))


# ---- strides


@pytest.mark.parametrize(
    "form",
    [
        {"order": BHSD},
        {"pad": (0, 1, 0, 8)},
        {"flip": (False, False, True, False), "align": 2},
        {"flip": (True, True, True, True), "pad": (1, 0, 0, 1), "align": 2},
        {"order": (3, 0, 1, 2), "align": 2},
    ],
    ids=["bhsd", "padded", "backwards", "all backwards", "dim outermost"],
)
def test_strides(form: dict[str, Any]) -> None:
    check(with_config(BackwardCase((70, 90), (64, 32), (4, 2), 2, causal="top_left", with_dlse=True, **form), **SMALL))


# ---- values


def test_dead_rows_add_nothing_whatever_they_hold() -> None:
    """NaN in dO, dLSE and Q of rows that see no key: bits of all gradients are those of zeros there, dQ is 0."""
    case = with_config(BackwardCase((130, 50), (64, 64), (2, 1), causal="bottom_right", with_dlse=True), **SMALL)
    results = []
    for poison in (0.0, np.nan):
        tensors = {**case.arguments(), **case.gradients()}
        for name in ("dout", "dlse", "q"):
            tensors[name].view[:, :, :80] = poison
        assert np.isneginf(tensors["lse"].view[:, :, :80]).all()
        assert_clean(case, tensors, backward(case, tensors))
        assert (tensors["dq"].view[:, :, :80] == 0).all()
        results.append([np.ascontiguousarray(tensors[name].view).tobytes() for name in ("dq", "dk", "dv")])
    assert results[0] == results[1]


def test_dead_rows_among_live_ones() -> None:
    """An LSE of -inf anywhere says that a row saw nothing."""
    case = with_config(BackwardCase((70, 50), (64, 64), (1, 1)), **SMALL)
    tensors = {**case.arguments(), **case.gradients()}
    for row in (3, 40, 69):
        tensors["lse"].view[:, :, row] = -np.inf
        tensors["dout"].view[:, :, row] = np.nan
        tensors["out"].view[:, :, row] = 0
    assert_clean(case, tensors, backward(case, tensors))
    grads = [np.array(tensors[name].view) for name in ("dq", "dk", "dv")]
    assert (grads[0][:, :, [3, 40, 69]] == 0).all() and all(np.isfinite(g.astype(np.float32)).all() for g in grads)


@pytest.mark.parametrize("shift", [1e4, 1e10])
def test_scores_of_large_magnitude(shift: float) -> None:
    """B-005: LSEs far below zero, and rounded by more than 1: finite gradients, no probability above 1."""
    case = with_config(BackwardCase((40, 50), (64, 64), (1, 1), scale=1.0), **SMALL)
    values = case.values()
    values["q"][...] = -np.sqrt(shift / 64)
    values["k"][...] = np.sqrt(shift / 64)
    values["k"][:, :, 1::2] *= 1.5
    tensors = {**case.arguments(values), **case.gradients()}
    assert tensors["lse"].view.max() < -0.9 * shift
    assert_clean(case, tensors, backward(case, tensors))
    for name in ("dq", "dk", "dv"):
        assert np.isfinite(tensors[name].view.astype(np.float32)).all()


@pytest.mark.parametrize(("lengths", "causal"), [((40, 50), False), ((70, 50), "top_left")])
def test_keys_beyond_the_last_add_nothing_however_large_the_delta(lengths: tuple[int, int], causal: Any) -> None:
    """Theirs would be probabilities of 1 here, and -delta is infinite in fp16: NaN times the zeros of their K."""
    case = with_config(BackwardCase(lengths, (64, 64), (1, 1), scale=1.0, dtype="float16", causal=causal), **SMALL)
    values = {name: np.full_like(x, -1 if name == "q" else 1) for name, x in case.values().items()}
    tensors = {**case.arguments(values), **case.gradients()}
    tensors["dout"].view[...] = 2000  # delta: 128000; all of dS is 0
    assert tensors["lse"].view.max() < 0
    assert_clean(case, tensors, backward(case, tensors))
    for name in ("dq", "dk"):
        np.testing.assert_allclose(tensors[name].view.astype(np.float32), 0, atol=2)
    assert np.isfinite(tensors["dv"].view.astype(np.float32)).all()


@pytest.mark.parametrize("scale", [0.0, -0.4, 1e-30, 2.0])
def test_scales(scale: float) -> None:
    check(with_config(BackwardCase((40, 70), (64, 64), (2, 1), causal="top_left", scale=scale), **SMALL))


# ---- turns

TURNS = with_config(BackwardCase((100, 150), (64, 64), (2, 1), deterministic=True, causal="bottom_right"), **SMALL)


def test_a_block_waits_for_its_turn() -> None:
    """Started in the reverse order, the last key tile's block waits for ever."""
    tensors = {**TURNS.arguments(), **TURNS.gradients()}
    run = backward(TURNS, tensors, reverse=True, patience=PATIENCE)
    assert "runaway" in run.report.faults


def test_a_block_that_does_not_wait_is_seen() -> None:
    """The same order without the wait: other bits, and turns that go back."""
    patient, hasty = ({**TURNS.arguments(), **TURNS.gradients()} for _ in range(2))
    right = backward(TURNS, patient)
    assert_clean(TURNS, patient, right)
    no_wait = Mutation("", "while (ld_acquire_gpu(", "if (ld_acquire_gpu(")
    run = backward(TURNS, hasty, mutation=no_wait, reverse=True)
    with pytest.raises(AssertionError):
        assert_clean(TURNS, hasty, run)
    assert not np.array_equal(right.workspace["dq_sums"].view, run.workspace["dq_sums"].view)


def test_without_turns_any_order_is_right() -> None:
    case = replace(TURNS, deterministic=False)
    tensors = {**case.arguments(), **case.gradients()}
    assert_clean(case, tensors, backward(case, tensors, reverse=True))
    assert_gradients(tuple(np.array(tensors[name].view) for name in ("dq", "dk", "dv")), call_of(case, tensors))


# ---- kernels that are wrong on purpose

WRONG = with_config(
    BackwardCase((100, 90), (64, 64), (4, 2), causal="bottom_right", deterministic=True, with_dlse=True), **SMALL
)


@pytest.mark.parametrize("ignore", [name for name in SABOTAGE if name != "no_warp_barrier"])
def test_a_synchronisation_that_does_nothing_is_seen(ignore: str) -> None:
    seen = []
    for late in (False, True):
        tensors = {**WRONG.arguments(), **WRONG.gradients()}
        seen.append("shared race" in backward(WRONG, tensors, timing=Timing(late, ignore=ignore)).report.faults)
    assert any(seen)


def test_the_warp_barrier_of_the_last_kernel_is_needed() -> None:
    tensors = {**WRONG.arguments(), **WRONG.gradients()}
    run = backward(WRONG, tensors, mutation=Mutation("", "    warp_sync();\n", ""), mutated="backward_dq")
    assert "shared race" in run.report.faults


def _run_wrong(
    timing: Timing = EARLY,
    mutation: Mutation | None = None,
    mutated: str = "backward",
    case: BackwardCase | None = None,
) -> None:
    """All checks of a call whose first rows see no key, and hold NaN."""
    case = case or WRONG
    tensors = {**case.arguments(), **case.gradients()}
    tensors["dout"].view[:, :, :10] = np.nan
    run = backward(case, tensors, timing=timing, mutation=mutation, mutated=mutated, patience=PATIENCE)
    assert_clean(case, tensors, run)
    tensors["dout"].view[:, :, :10] = 0
    assert_gradients(tuple(np.array(tensors[name].view) for name in ("dq", "dk", "dv")), call_of(case, tensors))


MAIN = {
    "no wait": Mutation("", "        cp_async_wait<kPending>();\n", ""),
    "no barrier before the scores are read": Mutation("", "} else {\n            cta_sync();\n", "} else {\n"),
    "no barrier before staging": Mutation("", "   cta_sync();\n        if (range()", "   if (range()"),
    "copies into the stage in use": Mutation("", "loader(*this, stage(1))", "loader(*this, stage())"),
    "another swizzle on one side": Mutation("device/tile.cuh", "(chunk ^ (row & 7))", "(chunk ^ (row & 3))"),
    "mask one key short": Mutation("", "query > last_key", "query >= last_key"),
    "too many tiles taken for full": Mutation("device/query_range.cuh", "n0 + kBlockN - 1 -", "n0 -"),
    "a query tile too few": Mutation("device/query_range.cuh", "{min_int(first", "{min_int(kBlockM + first"),
    "another head's queries": Mutation("", "kv_head * p.group + head", "kv_head + head"),
    "the delta is forgotten": Mutation("", "- bits_float(row.word[3])", ""),
    "no scale": Mutation("", "dk, p.scale)", "dk, 1.f)"),
    "one warp's own queries twice": Mutation("", "(at.share ^ ((first + k) / kQueryBlocks)) *", "at.share *"),
    "all warps the same columns of dQ": Mutation("", "columns{warp / kQueryWarps}", "columns{0 * warp}"),
    "dead rows stay": Mutation("", "cta_sync_or(copied_dead_row(at))", "cta_sync_or(false)"),
    "a turn is never released": Mutation("", "(of_same_head || head > 0) st", "(false) st"),
    "rows beyond the end are stored": Mutation("device/chunk_io.cuh", "row >= rows_left", "false"),
}  # fmt: skip
ROWS = {
    "rows that do not exist": Mutation("", "row < p.seqlen_q", "true"),
    "delta without the LSE's": Mutation("", "if (p.dlse != nullptr)", "if (false)"),
    "sums are not cleared": Mutation("", "st_global(sums + at, Chunk{})", "(void)sums"),
    "a part of a row": Mutation("", "int mask = kLanes / 2", "int mask = kLanes / 4"),
}
LAST = {
    "no scale": Mutation("", "pack_pair<kBf16>(p.scale * c[2 * r]", "pack_pair<kBf16>(c[2 * r]"),
    "another row block": Mutation("", "<kHeadDim>(block, column)", "<kHeadDim>(block ^ 1, column)"),
}


WRONG_KERNELS = [
    (task, name)
    for task, texts in (("backward", MAIN), ("backward_rows", ROWS), ("backward_dq", LAST))
    for name in texts
]


@pytest.mark.parametrize(("mutated", "name"), WRONG_KERNELS)
def test_a_wrong_kernel_is_seen(mutated: str, name: str) -> None:
    """Each by a fault of the machine or by wrong numbers, in at least one of two timings."""
    mutation = {"backward": MAIN, "backward_rows": ROWS, "backward_dq": LAST}[mutated][name]
    with pytest.raises(AssertionError):
        for timing in (Timing(False, 1), Timing(True, 2)):
            _run_wrong(timing, mutation, mutated)


def test_without_a_fault_it_passes() -> None:
    _run_wrong()
    _run_wrong(case=AHEAD)
    _run_wrong(case=ONE_BUFFER)


AHEAD = replace(WRONG, config=replace(WRONG.config, q_stages=3, dout_stages=3))  # type: ignore[type-var]
WRONG_AHEAD = {
    "one buffer of the scores": Mutation("", "(phase & 1) * 2", "0 * 2"),
    "the next tile is not waited for": Mutation("", "receive<0>(stage(1));", "cta_sync();"),
    "copies into the next tile": Mutation("", "loader(*this, stage(2))", "loader(*this, stage(1))"),
    "no barrier at all": Mutation("", "cta_sync_or(copied_dead_row(at))", "false"),
}


ONE_BUFFER = replace(WRONG, config=replace(WRONG.config, q_stages=1, dout_stages=1))  # type: ignore[type-var]
WRONG_ONE_BUFFER = {
    "dO is not waited for": Mutation("", "if (kOneBuffer) receive<0>(stage());", ""),
    "Q is loaded while others read it": Mutation("", "cta_sync();\n            load_q(0);", "load_q(0);"),
    "dO is that of the next tile": Mutation("", "if (!kOneBuffer) advance();\n    }", "advance();\n    }"),
}


@pytest.mark.parametrize("name", WRONG_ONE_BUFFER)
def test_a_wrong_kernel_with_one_buffer_is_seen(name: str) -> None:
    with pytest.raises(AssertionError):
        for timing in (Timing(False, 1), Timing(True, 2)):
            _run_wrong(timing, WRONG_ONE_BUFFER[name], case=ONE_BUFFER)


@pytest.mark.parametrize("name", WRONG_AHEAD)
def test_a_wrong_kernel_whose_warps_run_ahead_is_seen(name: str) -> None:
    with pytest.raises(AssertionError):
        for timing in (Timing(False, 1), Timing(True, 2)):
            _run_wrong(timing, WRONG_AHEAD[name], case=AHEAD)


def test_vectors_and_scalars_add_to_the_same_sums() -> None:
    """Targets before sm_90 add one number at a time, in another order of the workspace."""
    bits = []
    for arch in ("sm_86", "sm_90"):
        case = with_config(replace(TURNS, arch=arch), **SMALL)
        tensors = {**TURNS.arguments(), **TURNS.gradients()}
        assert_clean(case, tensors, backward(case, tensors))
        bits.append([np.ascontiguousarray(tensors[name].view).tobytes() for name in ("dq", "dk", "dv")])
    assert bits[0] == bits[1]


def test_the_kernels_of_every_target_are_those_of_the_table() -> None:
    for row in BACKWARD:
        for arch, mask in product(row.arches, row.masks):
            problem = AttentionProblem(row.head_dim, row.head_dim, "float16", mask, 16, False, arch, "backward")
            assert kernels.select_config(problem) == row.config
