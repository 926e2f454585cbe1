"""The emulated forward kernel's softmax: exact and lazy path, scales, extreme and non-finite values, exact results."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cuflash.reference import tile_schedule
from tests.emulation.build import compiler
from tests.emulation.cases import Case, assert_clean, check, run
from tests.emulation.launch import Result, Timing
from tests.oracle import measure, oracle

pytestmark = pytest.mark.skipif(compiler() is None, reason="the CPU emulation needs g++")

TYPES = ("bfloat16", "float16")


def exact_share(result: Result, steps: int) -> float:
    """The share of its key tiles for which a warp took the exact path, which has as many shuffles as the epilogue."""
    row_blocks = result.config.block_m // result.config.warps // 16
    blocks = math.prod(result.plan.launches[0][0])
    per_warp = result.report.counts["shuffles"] / (4 * row_blocks * result.config.warps * blocks)
    return (per_warp - 1) / steps


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_rising_scores_take_the_exact_path(dims: tuple[int, int], dtype: str) -> None:
    result = check(Case((128, 1024), dims, (1, 1), dtype=dtype, rise=30.0))
    assert exact_share(result, 1024 // result.config.block_n) > 0.6


def test_falling_scores_take_the_lazy_path() -> None:
    result = check(Case((128, 1024), (64, 64), (1, 1), rise=1 / 30))
    steps = 1024 // result.config.block_n
    assert exact_share(result, steps) == 1 / steps, "the first step only"


@pytest.mark.parametrize("scale", [0.0, -0.125, -3.0, 1e-3, 4.0, 1e-35, -1e-35, 1e-38, 1e30, 1e-45])
def test_scales(scale: float) -> None:
    """B-130: the scale is a run-time parameter. Zero: the mean of the visible values."""
    check(Case((40, 150), (64, 64), dtype="float16", causal="bottom_right", scale=scale))


def filled(shape: tuple[int, ...], value: float) -> np.ndarray:
    return np.full(shape, value)


@pytest.mark.parametrize("size", [133120.0, -133120.0, 3e15])
def test_huge_equal_inputs(size: float) -> None:
    """B-010: one key, so the output is its value, bit for bit, however large the score."""
    for keys in (1, 70):
        case = Case((20, keys), (64, 64))
        values = {name: filled(x.shape, size) for name, x in case.values().items()}
        tensors, result = run(case, Timing(late=True), case.inputs(values))
        assert_clean(tensors, result)
        assert (tensors["out"].view == tensors["v"].view[0, 0, 0, 0]).all()


@pytest.mark.parametrize("score", [-5e4, -524288.0, -1e30, 1e30])
def test_huge_scores_are_no_sentinel(score: float) -> None:
    """B-007, B-008: softmax of the real scores, never zeros; differences between huge scores count."""
    case = Case((40, 150), (64, 64), (1, 1), scale=1.0)
    values = case.values()
    values["q"][...], values["k"][...] = 0.0, 0.0
    values["q"][..., 0] = abs(score) ** 0.5
    values["k"][..., 0] = np.sign(score) * abs(score) ** 0.5
    values["q"][..., 1], values["k"][..., 1] = 1.0, np.random.default_rng(1).standard_normal(values["k"].shape[:3])
    check(case, case.inputs(values))


@pytest.mark.parametrize("spread", [1e3, 1e10, 1e18])
def test_scores_of_all_sizes(spread: float) -> None:
    """Rows with tiny, ordinary and huge scores share a warp, and rise over many powers of ten."""
    case = Case((64, 300), (64, 64), dtype="bfloat16", causal="bottom_right", rise=spread)
    values = case.values()
    values["q"] *= np.geomspace(1 / spread, 1.0, 64)[:, None]
    check(case, case.inputs(values))


@pytest.mark.parametrize(("low", "high"), [(508.0, 516.0), (-516.0, -508.0)])
def test_references_cross_the_bound_of_large_rows(low: float, high: float) -> None:
    """Scores rise over +-512 by so little that the keys seen before still count."""
    case = Case((20, 128), (64, 64), (1, 1), scale=math.log(2))  # scores are in units of the kernel's exponents
    values = case.values()
    values["q"][..., 0], values["q"][..., 1:] = 1.0, values["q"][..., 1:] / 16
    values["k"][..., 64:, 0], values["k"][..., :64, 0] = low, high  # the last tile comes first
    values["v"][..., 64:, :] *= 64
    check(case, case.inputs(values))


@pytest.mark.parametrize("score", [-5.0, -6.0, -1e30, 0.0])
def test_a_large_row_leaves_its_neighbours_alone(score: float) -> None:
    """One warp holds a large row and ordinary ones, whose exponents may equal any constant of the kernel's."""
    case = Case((16, 128), (64, 64), (1, 1), scale=math.log(2))
    values = case.values()
    values["q"][...], values["k"][...] = 0.0, 0.0
    values["q"][:, :, 0, 0], values["q"][:, :, 1:, 1] = 600.0, 1.0
    values["k"][..., 0] = 1.0
    values["k"][..., 64:, 1], values["k"][..., :64, 1] = score, score + 2.0
    check(case, case.inputs(values))


def test_single_key_is_copied() -> None:
    case = Case((50, 1), (40, 40), (4, 2), 2, "float16")
    tensors, result = run(case)
    assert_clean(tensors, result)
    assert np.array_equal(tensors["out"].view, np.broadcast_to(tensors["v"].view.repeat(2, axis=1), case.out_shape))


def test_equal_scores_give_the_mean() -> None:
    """B-077: q = 0 and V = 1 give exactly 1, at lengths that fill no tile."""
    for keys in (16, 63, 64, 65, 200):
        case = Case((20, keys), (64, 64), dtype="float16")
        values = {name: filled(x.shape, float(name == "v")) for name, x in case.values().items()}
        tensors, result = run(case, inputs=case.inputs(values))
        assert_clean(tensors, result)
        assert (tensors["out"].view == 1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_keys_reach_only_rows_that_see_them(bad: float) -> None:
    """B-001: what a mask hides has no influence; what a row sees reaches it as in float64."""
    case = Case((200, 200), (64, 64), (4, 2), causal="bottom_right")
    values = case.values()
    values["k"][:, :, 130, 3] = bad
    inputs = case.inputs(values)
    check(case, inputs)
    assert np.isnan(oracle(*(inputs[name].view for name in "qkv"), causal=case.causal)[0]).any()


def test_nan_values_stay_within_their_tile() -> None:
    """A NaN in V reaches the rows that see it, and at most other rows of query tiles that load its key tile."""
    case = Case((200, 200), (64, 64), (1, 1), causal="bottom_right")
    clean, _ = run(case)
    values = case.values()
    values["v"][:, :, 199, 5] = np.nan
    tensors, result = run(case, Timing(late=True), case.inputs(values))
    assert_clean(tensors, result)
    assert tensors["out"].view[:, :, :128].tobytes() == clean["out"].view[:, :, :128].tobytes()
    assert np.isnan(tensors["out"].view[0, 0, 199, 5]) and not np.isnan(tensors["lse"].view).any()


def test_all_scores_minus_infinity() -> None:
    """Such a row is like one that sees no key, even if its first tiles are of this kind only (B-013)."""
    case = Case((40, 200), (64, 64), (1, 1), scale=1.0)
    values = case.values()
    values["q"][..., 0] = 1.0
    values["k"][..., 150:, 0] = -np.inf
    check(case, case.inputs(values))
    values["k"][..., 0] = -np.inf
    check(case, case.inputs(values))


@pytest.mark.parametrize("dims", [(64, 64), (256, 256)], ids=str)
@pytest.mark.parametrize("rise", [1.0, 30.0])
def test_the_tile_schedule_models_the_kernel(dims: tuple[int, int], rise: float) -> None:
    """The NumPy execution of the schedule differs from the kernel by far less than either does from float64."""
    case = Case((150, 300), dims, (2, 1), causal="bottom_right", rise=rise)
    tensors, result = run(case)
    q, k, v = (tensors[name].view for name in "qkv")
    options = {"causal": case.causal, "scale": dims[0] ** -0.5, "config": result.config}
    modelled, lse = tile_schedule(q, k, v, **options)
    expected, _ = oracle(q, k, v, causal=case.causal)
    error = measure(modelled, expected).frobenius
    assert measure(tensors["out"].view, modelled.astype(np.float64)).frobenius < error / 3
    np.testing.assert_allclose(tensors["lse"].view, lse, rtol=1e-6, atol=1e-6)
