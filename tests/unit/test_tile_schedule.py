"""The GPU kernel's tile schedule, executed by NumPy: right wherever the kernel has to be right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import reference
from cuflash.reference import tile_schedule
from cuflash.sm80_config import Sm80Config
from cuflash.sm90_config import Sm90Config
from tests.oracle import DTYPES, assert_accurate, assert_lse, measure, oracle, randn, unit_roundoff

SMALL = Sm80Config(block_m=32, block_n=16, warps=2, stages=2, q_registers=0, ctas=1)
REAL = Sm80Config(block_m=128, block_n=64, warps=4, stages=2, q_registers=0, ctas=2)
HOPPER = Sm90Config(block_m=64, block_n=48, stages=2, q_stages=2, ping_pong=True, tma_store=True)
EXACT = replace(HOPPER, exact=True)
CAUSAL = (False, "bottom_right", "top_left")
HALF = ("float16", "bfloat16")


def draw(seed, lengths, heads=(2, 1), dims=(16, 24), dtype="bfloat16", size=1.0):
    rng = np.random.default_rng(seed)
    q = randn(rng, (1, heads[0], lengths[0], dims[0]), dtype, size)
    return q, *(randn(rng, (1, heads[1], lengths[1], d), dtype) for d in dims)


def check(q, k, v, causal=False, scale=0.25, config=SMALL, scale_first=False):
    out, lse = tile_schedule(q, k, v, causal=causal, scale=scale, config=config, scale_first=scale_first)
    assert out.dtype == q.dtype and lse.dtype == np.float32
    assert_accurate(out, q, k, v, causal=causal, scale=scale)
    assert_lse(lse, q, k, v, causal=causal, scale=scale)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("config", [SMALL, REAL, HOPPER, EXACT], ids=lambda config: config.label)
def test_lengths_around_tiles(config, causal, dtype):
    for lengths in ((1, 1), (64, 1), (1, 65), (113, 203), (203, 113), (127, 129), (256, 255)):
        check(*draw(0, lengths, dtype=dtype), causal, config=config)


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    causal=st.sampled_from(CAUSAL),
    dtype=st.sampled_from(HALF),
    size=st.floats(0.1, 30),
    scale=st.floats(-1, 1).filter(lambda x: x == 0 or abs(x) > 1e-6),
    config=st.sampled_from([SMALL, HOPPER, EXACT]),
)
@settings(max_examples=60)
def test_fresh_values(seed, lengths, causal, dtype, size, scale, config):
    q, k, v = draw(seed, lengths, (3, 1), dtype=dtype, size=size)
    check(q, k, v, causal, scale, config, scale_first=scale <= 0)


@pytest.mark.parametrize("growth", [1.0, 30.0])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("config", [SMALL, HOPPER, EXACT], ids=lambda config: config.label)
def test_scores_that_grow_along_the_schedule(config, dtype, growth):
    """Earlier keys come later: the reference is raised again and again, or kept although scores exceed it a little."""
    q, k, v = draw(1, (100, 300), dtype=dtype)
    k = (k.astype(np.float32) * np.geomspace(growth, 1, 300)[:, None]).astype(k.dtype)
    check(q, k, v, config=config)


@pytest.mark.parametrize(("lazy", "exact"), [(SMALL, replace(SMALL, slack=-(10**9))), (HOPPER, EXACT)])
def test_lazy_and_eager_references_agree_up_to_rounding(lazy, exact):
    q, k, v = draw(2, (64, 160))
    lazy, _ = tile_schedule(q, k, v, causal=False, scale=1.0, config=lazy)
    eager, _ = tile_schedule(q, k, v, causal=False, scale=1.0, config=exact)
    assert not np.array_equal(lazy, eager), "these inputs must exercise the lazy reference"
    reference, _ = oracle(q, k, v, scale=1.0)
    assert measure(lazy, reference).frobenius < 1.5 * measure(eager, reference).frobenius


@pytest.mark.parametrize(("keys", "raises"), [(2 * 48, True), (41 * 48, False)])
def test_the_slack_grows_with_a_row(keys, raises, monkeypatch):
    """A key that exceeds the reference by 2^3, against a slack of 2^2: a small share of a long row only."""
    q, k, v = draw(3, (64, keys), heads=(1, 1))
    q[:], k[:] = 1.0, 0.0
    k[0, 0, 0] = 3 * np.log(2)  # in the tile that comes last
    raised, raise_reference = [], reference._Warp._raise_reference
    monkeypatch.setattr(
        reference._Warp, "_raise_reference", lambda warp, *args: raised.append(1) or raise_reference(warp, *args)
    )
    check(q, k, v, scale=1 / q.shape[3], config=HOPPER)
    assert len(raised) == HOPPER.warps * (1 + raises)  # in the first step anyway


def test_families_differ_in_the_tiles_that_their_warps_compute():
    """Same tiles and slack, 16 rows a warp: the same bits, but for NaN in values that a warp's rows do not see."""
    ampere = Sm80Config(block_m=64, block_n=48, warps=4, stages=2, q_registers=0, ctas=1)
    q, k, v = draw(9, (120, 100))
    for causal in CAUSAL:  # with a slack that does not grow
        configs = [replace(c, slack=8) for c in (ampere, HOPPER)]
        results = [tile_schedule(q, k, v, causal=causal, scale=0.25, config=c) for c in configs]
        for one, other in zip(*results, strict=True):
            assert np.array_equal(one, other)
    v[0, 0, 60] = np.nan  # the second key tile; of the first query tile, rows 48 to 63 see some of it
    seen = [np.isnan(tile_schedule(q, k, v, causal="top_left", scale=0.25, config=c)[0][0, 0, :, 0]).argmax()
            for c in (ampere, HOPPER)]  # fmt: skip
    assert seen == [48, 0]


def test_hopper_consumers_skip_what_none_of_their_rows_sees():
    """That changes no bit, but for NaN in values that the rows do not see; with few stages not all of it is skipped."""
    three = replace(HOPPER, block_m=192, block_n=64, stages=3)
    one = replace(three, block_m=64)
    q, k, v = draw(11, (300, 310))
    for causal in CAUSAL:
        results = [tile_schedule(q, k, v, causal=causal, scale=0.25, config=c) for c in (one, three)]
        for alone, together in zip(*results, strict=True):
            assert np.array_equal(alone, together)
    # The second key tile of three; to the first consumer of the first work tile it is the second to skip.
    v[0, 0, 70] = np.nan
    for config, first in ((one, 64), (three, 64), (replace(three, stages=2), 0), (replace(three, block_n=144), 0)):
        out, _ = tile_schedule(q, k, v, causal="top_left", scale=0.25, config=config)
        assert np.isnan(out[0, 0, :, 0]).argmax() == first and np.isnan(out[0, 0, first:, 0]).all()


@pytest.mark.parametrize("value", [3.0, 300.0, 133120.0, 1e15])
def test_one_key_is_returned_exactly(value):
    """B-007, B-008, B-010: whatever the score's size and sign, a single key has probability 1."""
    q = np.full((1, 1, 1, 64), value, DTYPES["bfloat16"])
    v = randn(np.random.default_rng(3), (1, 1, 1, 24), "bfloat16")
    for k in (q, -q):
        out, lse = tile_schedule(q, k, v, causal=False, scale=0.125, config=SMALL)
        assert np.array_equal(out, v)
        assert lse.item() == pytest.approx(float(k[0, 0, 0, 0]) * float(q[0, 0, 0, 0]) * 8, rel=1e-6)


def test_outlier_logits():
    """B-100: two huge keys of nearly the same size; their difference decides."""
    q = np.zeros((1, 1, 40, 64), np.float16)
    q[0, 0, 7, :2] = 1
    k = randn(np.random.default_rng(4), (1, 1, 1024, 64), "float16", 0.1)
    k[0, 0, 100, :2], k[0, 0, 900, :2] = 76, 76.25
    check(q, k, randn(np.random.default_rng(5), (1, 1, 1024, 64), "float16"), scale=0.5)


def test_huge_scores_that_differ_by_little():
    """Scores of 2^24 and a few units more, exact in float32: their small differences decide, across tiles too."""
    q = np.array([4096, 1], DTYPES["bfloat16"]).reshape(1, 1, 1, 2)
    k = np.empty((1, 1, 96, 2), q.dtype)
    k[..., 0], k[..., 1] = 4096, 2 * (11 - np.arange(96) // 8)
    v = randn(np.random.default_rng(7), (1, 1, 96, 24), "bfloat16")
    out, _ = tile_schedule(q, k, v, causal=False, scale=0.3, config=SMALL)
    assert measure(out, oracle(q, k, v, scale=0.3)[0]).frobenius < 2 * unit_roundoff(q.dtype)


def test_nan_and_minus_infinity():
    q, k, v = draw(6, (48, 48))
    k[0, 0, 20] = np.nan
    out, lse = tile_schedule(q, k, v, causal="bottom_right", scale=0.25, config=SMALL)
    assert np.isnan(out[:, :, 20:]).all() and np.isnan(lse[:, :, 20:]).all()
    assert np.isfinite(out[:, :, :20].astype(np.float32)).all() and np.isfinite(lse[:, :, :20]).all()
    k[...], q[...] = -np.inf, 1
    out, lse = tile_schedule(q, k, v, causal=False, scale=0.25, config=SMALL)
    assert not out.any() and np.isneginf(lse).all()
