"""The NumPy backend below the public call: tiles, scratch memory, strides. The contract is in test_contract_cpu.py."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from cuflash import cpu
from tests.operands import draw_qkv
from tests.oracle import DTYPES, assert_accurate, assert_lse, judge, oracle, ordinary, poisoned, strided_copy

CAUSAL = (False, "bottom_right", "top_left")


def attend(q, k, v, causal=False, scale=0.3):
    out = poisoned((*q.shape[:3], v.shape[3]), q.dtype)
    lse = poisoned(q.shape[:3], np.dtype(np.float64 if q.dtype == np.float64 else np.float32))
    cpu.attention_cpu(q, k, v, causal=causal, scale=scale, out=out, lse=lse)
    return out, lse


def draw(seed, lengths, heads=(2, 1), dims=(8, 6), dtype="float32", batch=2):
    return draw_qkv(np.random.default_rng(seed), lengths, heads, dims, dtype, batch, "bhsd")


@pytest.fixture(params=[(4, 3, 1), (6, 4, 300), (512, 512, 1 << 18)], ids=lambda tiles: "x".join(map(str, tiles)))
def tiles(request, monkeypatch):
    """Tile shapes: so small that a short sequence has many of them, and the real ones."""
    for name, value in zip(("TILE_ROWS", "TILE_KEYS", "TILE_ELEMENTS"), request.param, strict=True):
        monkeypatch.setattr(cpu, name, value)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(13, 13), (5, 14), (14, 5), (1, 9), (9, 1)])
def test_every_tile_edge(tiles, dtype, causal, lengths):
    q, k, v = draw(0, lengths, heads=(6, 2), dtype=dtype)
    out, lse = attend(q, k, v, causal)
    assert_accurate(out, q, k, v, causal=causal, scale=0.3)
    assert_lse(lse, q, k, v, causal=causal, scale=0.3)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_errors_are_no_larger_than_those_of_dense_attention(dtype, causal):
    q, k, v = draw(9, (600, 700), (4, 2), (64, 64), dtype)
    reference, _ = oracle(q, k, v, causal=causal, scale=0.125)
    judge(attend(q, k, v, causal, 0.125)[0], reference, ordinary(q, k, v, causal=causal, scale=0.125))


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    group=st.sampled_from([1, 2, 3, 5, 7]),
    kv_heads=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    causal=st.sampled_from(CAUSAL),
    dtype=st.sampled_from(sorted(DTYPES)),
    scale=st.floats(-2, 2),
)
@settings(max_examples=100)
def test_fresh_shapes(seed, lengths, group, kv_heads, dims, causal, dtype, scale):
    """B-067, B-068: groups of 3, 5 and 7; Dv != D (B-103); scales of both signs."""
    q, k, v = draw(seed, lengths, (group * kv_heads, kv_heads), dims, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "TILE_ROWS", 8)
        patch.setattr(cpu, "TILE_KEYS", 7)
        patch.setattr(cpu, "TILE_ELEMENTS", 1500)
        out, lse = attend(q, k, v, causal, scale)
    assert_accurate(out, q, k, v, causal=causal, scale=scale)
    assert_lse(lse, q, k, v, causal=causal, scale=scale)


layouts = st.tuples(st.permutations(range(4)), st.tuples(*[st.integers(1, 3)] * 4), st.tuples(*[st.booleans()] * 4))


@given(q_layout=layouts, k_layout=layouts, v_layout=layouts, out_layout=layouts, dtype=st.sampled_from(sorted(DTYPES)))
@settings(max_examples=100)
def test_any_strides(q_layout, k_layout, v_layout, out_layout, dtype):
    """B-050, B-052, B-053, B-055, B-056: each array in a layout of its own, NaN in the gaps."""
    q, k, v = draw(3, (11, 13), (6, 2), dtype=dtype)
    expected, expected_lse = attend(q, k, v, "bottom_right")
    out = strided_copy(poisoned(expected.shape, expected.dtype), *out_layout)
    lse = strided_copy(poisoned((*expected_lse.shape, 1), expected_lse.dtype), *out_layout)[..., 0]
    views = (strided_copy(x, *layout) for x, layout in zip((q, k, v), (q_layout, k_layout, v_layout), strict=True))
    cpu.attention_cpu(*views, causal="bottom_right", scale=0.3, out=out, lse=lse)
    assert np.array_equal(out, expected) and np.array_equal(lse, expected_lse)


@pytest.mark.parametrize(("size", "scale"), [(1e30, 1e10), (1e30, -1e10), (1e25, 1e19), (1e38, 8.0)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_scale_takes_no_finite_score_beyond_all_numbers(dtype, size, scale):
    q, k, v = draw(0, (5, 9), dtype="float64")
    q, k, v = (x.astype(bfloat16 if dtype == "bfloat16" else dtype) for x in (size * q, k / (size * abs(scale)), v))
    out, lse = attend(q, k, v, scale=scale)
    assert_accurate(out, q, k, v, scale=scale)
    assert_lse(lse, q, k, v, scale=scale)


def test_broadcast_axes():
    """B-061: stride 0 over batch, heads, keys and the last axis."""
    q, k, v = draw(4, (11, 13), (6, 2))
    for axis in range(4):
        index = tuple(slice(0, 1) if a == axis else slice(None) for a in range(4))
        views = [np.broadcast_to(x[index], x.shape) for x in (q, k, v)]
        out, lse = attend(*views, "top_left")
        expected, expected_lse = attend(*(x.copy() for x in views), "top_left")
        assert np.array_equal(out, expected) and np.array_equal(lse, expected_lse)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_reach_the_rows_that_see_them_and_no_others(tiles, where, value):
    """B-001: neither rows that a value is hidden from, nor later tiles that reuse the scratch memory, notice it."""
    arrays = dict(zip("qkv", draw(5, (12, 14), (4, 2)), strict=True))
    clean, _ = attend(**arrays, causal="bottom_right")
    arrays[where][1, 1, 9, 2] = value
    out, lse = attend(**arrays, causal="bottom_right")
    expected, expected_lse = oracle(**arrays, causal="bottom_right", scale=0.3)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)  # equal in the places of NaN and infinity, too
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-6)
    touched = np.zeros(out.shape[:3], bool)
    if where == "q":
        touched[1, 1, 9] = True
    else:  # two query heads share the key/value head; query 7 is the first to see key 9
        touched[1, 2:, 7:] = True
    np.testing.assert_allclose(out[~touched], clean[~touched], rtol=1e-5, atol=1e-6)
    assert np.isnan(value) <= np.isnan(out[touched]).any(axis=-1).all()


def test_rows_of_nothing_but_minus_infinity_are_dead_whatever_v_holds(tiles):
    q, k, v = draw(8, (4, 20))
    q[...], k[...], v[:, :, 3] = 1, -np.inf, np.nan
    out, lse = attend(q, k, v)
    assert not out.any() and np.isneginf(lse).all()


def test_results_repeat_bitwise(tiles):
    q, k, v = draw(6, (30, 31), (4, 2))
    first, second = attend(q, k, v, "bottom_right"), attend(q, k, v, "bottom_right")
    assert np.array_equal(first[0], second[0]) and np.array_equal(first[1], second[1])


def test_causal_tiles_that_nobody_sees_are_skipped(monkeypatch):
    monkeypatch.setattr(cpu, "TILE_ROWS", 8)
    monkeypatch.setattr(cpu, "TILE_KEYS", 8)
    q, k, v = draw(7, (64, 64), (1, 1), batch=1)
    call = cpu.Tiling(q, k, v, 1.0, 0, cpu.Scratch(q.dtype))
    seen = [(keys.stop - keys.start) * 8 for block in call.blocks() for keys, _ in call.key_tiles(block.queries)]
    assert sum(seen) == 64 * (64 + 8) // 2


MEMORY_SCRIPT = """
import numpy as np
from cuflash.cpu import attention_cpu

def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

q, k, v = (np.random.default_rng(i).standard_normal((1, 8192, 8, 64), np.float32).swapaxes(1, 2) for i in range(3))
out, lse = np.ones_like(q), np.ones(q.shape[:3], np.float32)
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
before = status("VmRSS")
attention_cpu(q, k, v, causal=False, scale=0.125, out=out, lse=lse)
print((status("VmHWM") - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_square_of_the_length():
    """The scores of 8 heads of 8192 x 8192 are 2 GiB; 1 GiB above the inputs is allowed, and far less is used."""
    run = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 64, f"peak of {run.stdout.strip()} MiB above the inputs"
