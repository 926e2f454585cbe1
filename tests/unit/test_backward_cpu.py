"""`cuflash.attention_backward` on NumPy arrays: the gradients. What the call refuses is in test_backward_api.py.

Ids such as "B-005" are those of public bug reports of other libraries.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import cpu
from cuflash.cpu_backward import attention_backward_cpu
from cuflash.reference import oracle_backward
from tests.gradients import Backward, assert_gradients, ordinary_backward, run
from tests.operands import draw_qkv
from tests.oracle import DTYPES, judge, poisoned, randn, strided_copy

CAUSAL = (False, "bottom_right", "top_left")
DTYPE = pytest.mark.parametrize("dtype", DTYPES)
SMALL_TILES = {"TILE_ROWS": 8, "TILE_KEYS": 7, "TILE_ELEMENTS": 1500}


def draw(seed, lengths, heads=(2, 1), dims=(8, 6), dtype="float32", batch=2, causal=False, scale=None, dlse=True):
    """Random arguments, with the output and LSE that the forward pass gives for them."""
    rng = np.random.default_rng(seed)
    q, k, v = draw_qkv(rng, lengths, heads, dims, dtype, batch, "bhsd")
    dout = randn(rng, (*q.shape[:3], dims[1]), dtype)
    arriving = rng.standard_normal(q.shape[:3]) if dlse else None
    return finish(dout, q, k, v, arriving, causal, scale)


def finish(dout, q, k, v, dlse=None, causal=False, scale=None):
    out, lse = cuflash.attention(q, k, v, layout="bhsd", causal=causal, scale=scale, return_lse=True)
    return Backward(dout, q, k, v, out, lse, None if dlse is None else dlse.astype(lse.dtype), causal, scale)


def differentiate(call, **options):
    """By the public call."""
    given = {"dlse": call.dlse, "causal": call.causal, "scale": call.scale} | options
    return cuflash.attention_backward(*call[:6], layout="bhsd", **given)


def check(call):
    grads = differentiate(call)
    assert_gradients(grads, call)
    return grads


@pytest.fixture(params=[(4, 3, 1), (6, 4, 300), (512, 512, 1 << 18)], ids=lambda tiles: "x".join(map(str, tiles)))
def tiles(request, monkeypatch):
    """Tile shapes: so small that a short sequence has many of them, and large ones."""
    for name, value in zip(("TILE_ROWS", "TILE_KEYS", "TILE_ELEMENTS"), request.param, strict=True):
        monkeypatch.setattr(cpu, name, value)


# --- against the oracle ----------------------------------------------------------------------------------------


@DTYPE
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("lengths", [(13, 13), (5, 14), (14, 5), (1, 9), (9, 1)])
def test_every_tile_edge(tiles, dtype, causal, lengths):
    call = draw(0, lengths, heads=(6, 2), dtype=dtype, causal=causal, scale=0.3)
    assert_gradients(run(call, attention_backward_cpu), call)


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    group=st.sampled_from([1, 2, 3, 5, 7]),
    kv_heads=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    causal=st.sampled_from(CAUSAL),
    dtype=st.sampled_from(sorted(DTYPES)),
    scale=st.none() | st.floats(-2, 2),
    dlse=st.booleans(),
)
@settings(max_examples=150)
def test_fresh_shapes(seed, lengths, group, kv_heads, dims, causal, dtype, scale, dlse):
    """B-052, B-067, B-104, B-106: groups of 3, 5 and 7, any head dims, with and without a mask."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL_TILES.items():
            patch.setattr(cpu, name, value)
        check(draw(seed, lengths, (group * kv_heads, kv_heads), dims, dtype, 2, causal, scale, dlse))


@pytest.mark.parametrize("causal", CAUSAL)
@DTYPE
def test_long_sequences_in_tiles_of_the_real_size(dtype, causal):
    """Long enough for errors to be compared without luck."""
    check(draw(1, (700, 1300), (4, 2), (64, 64), dtype, 1, causal))


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_errors_are_no_larger_than_those_of_dense_gradients(dtype, causal):
    call = draw(22, (600, 700), (4, 2), (64, 64), dtype, 1, causal)
    for grad, reference, baseline in zip(differentiate(call), call.reference(), ordinary_backward(call), strict=True):
        judge(grad, reference, baseline)


@DTYPE
@pytest.mark.parametrize("dims", [(1, 1), (3, 5), (40, 72), (128, 256), (256, 64)], ids=str)
def test_head_dims(dims, dtype):
    check(draw(2, (30, 40), dims=dims, dtype=dtype))


@DTYPE
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.3, 1e-30, -1e-300, 5e-324, 3.0, -20.0])
def test_any_finite_scale(scale, dtype):
    dq, dk, _ = check(draw(3, (20, 30), dtype=dtype, causal="bottom_right", scale=scale))
    if scale == 0:
        assert not dq.any() and not dk.any()


@pytest.mark.parametrize("scale", [1e25, -1e25])
def test_a_scale_beyond_float32_selects_the_largest_score(scale):
    """Each row gives all of its dout to one key; scores near 1e25 are rounded by 1e18 in the LSE."""
    call = draw(4, (20, 30), scale=scale, dlse=False)
    _, _, dv = differentiate(call)
    np.testing.assert_allclose(dv, call.reference()[2], rtol=1e-5, atol=1e-5)


# --- against the definition ------------------------------------------------------------------------------------


def loss(dout, q, k, v, dlse, causal, scale):
    out, lse = cuflash.attention(q, k, v, layout="bhsd", causal=causal, scale=scale, return_lse=True)
    return (dout * out).sum() + (dlse * np.where(np.isneginf(lse), 0, lse)).sum()


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("lengths", [(4, 6), (6, 4)])
@pytest.mark.parametrize("through", ["out", "lse", "both"])
def test_central_differences(through, lengths, causal):
    """B-025: the LSE in the loss, alone and together with the output."""
    call = draw(5, lengths, (4, 2), (3, 2), "float64", 1, causal, -0.7)
    if through == "lse":
        call = call._replace(dout=np.zeros_like(call.dout))
    if through == "out":
        call = call._replace(dlse=np.zeros_like(call.dlse))
    step = 1e-5
    for name, grad in zip("qkv", differentiate(call), strict=True):
        expected = np.empty_like(grad)
        for at in np.ndindex(grad.shape):
            sides = []
            for sign in (1, -1):
                moved = {x: getattr(call, x).copy() for x in "qkv"}
                moved[name][at] += sign * step
                sides.append(loss(call.dout, **moved, dlse=call.dlse, causal=causal, scale=call.scale))
            expected[at] = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(grad, expected, rtol=1e-7, atol=1e-8, err_msg=name)


@DTYPE
def test_one_key_has_no_choice(dtype):
    """P is 1: dQ = dK = 0 and dV is the sum of dout, to the last bit where numbers are small integers."""
    rng = np.random.default_rng(6)
    shapes = (2, 6, 9, 8), (2, 2, 1, 8), (2, 2, 1, 5), (2, 6, 9, 5)
    q, k, v, dout = (rng.integers(-3, 4, shape).astype(DTYPES[dtype]) for shape in shapes)
    dq, dk, dv = differentiate(finish(dout, q, k, v, scale=0.5))
    assert not dq.any() and not dk.any()
    assert np.array_equal(dv[:, :, 0], dout.astype(int).reshape(2, 2, 27, 5).sum(axis=2))


@DTYPE
def test_equal_values_leave_no_choice(dtype):
    """V constant over the keys: scores do not matter, so dQ and dK are 0 up to the rounding of dP - delta."""
    call = draw(7, (20, 30), dtype=dtype, dlse=False)
    call = finish(call.dout, call.q, call.k, np.broadcast_to(call.v[:, :, :1], call.v.shape))
    dq, dk, _ = differentiate(call)
    unit = 2.0**-52 if dtype == "float64" else 2.0**-23
    size = np.abs(call.dout.astype(float)).sum(axis=3).max() * np.abs(call.v.astype(float)).max()
    assert np.abs(dq.astype(float)).max() < 20 * unit * size
    assert np.abs(dk.astype(float)).max() < 20 * unit * size * 40


@DTYPE
def test_equal_scores_share_evenly(dtype):
    """Q = 0 and 16 keys: dV = dout / 16 exactly."""
    call = draw(8, (1, 16), (1, 1), dtype=dtype, dlse=False)
    call = finish(call.dout, np.zeros_like(call.q), call.k, call.v)
    np.testing.assert_allclose(
        differentiate(call)[2].astype(float), np.broadcast_to(call.dout.astype(float) / 16, call.v.shape), rtol=3e-7
    )


def test_groups_are_sums_over_their_heads():
    """B-067: dK and dV of a shared head are the sums of those of its copies."""
    call = draw(9, (19, 23), (6, 2), causal="bottom_right")
    grads = differentiate(call)
    wide = call._replace(k=call.k.repeat(3, axis=1), v=call.v.repeat(3, axis=1))
    dq, dk, dv = differentiate(wide)
    np.testing.assert_allclose(grads[0], dq, rtol=1e-4, atol=1e-5)
    for ours, theirs in ((grads[1], dk), (grads[2], dv)):
        np.testing.assert_allclose(ours, theirs.reshape(2, 2, 3, 23, -1).sum(axis=2), rtol=1e-4, atol=1e-5)


def test_parts_of_the_keys_with_the_lse_of_all():
    """What a ring of devices does: each part's gradients are those of the whole, dQ is their sum."""
    call = draw(10, (20, 50))
    dq, dk, dv = differentiate(call)
    parts = [
        differentiate(call._replace(k=call.k[:, :, part], v=call.v[:, :, part])) for part in (slice(20), slice(20, 50))
    ]
    np.testing.assert_allclose(sum(part[0] for part in parts), dq, rtol=1e-4, atol=1e-5)
    for i, whole in ((1, dk), (2, dv)):
        np.testing.assert_allclose(np.concatenate([part[i] for part in parts], axis=2), whole, rtol=1e-4, atol=1e-5)


# --- rows and values that are special --------------------------------------------------------------------------


@DTYPE
def test_dead_rows_have_no_gradient_and_add_nothing(tiles, dtype):
    """B-002, B-035: whatever dout, dlse and Q hold in rows that see no key."""
    call = draw(11, (14, 5), (4, 2), dtype=dtype, causal="bottom_right")
    clean, exact = differentiate(call), call.reference()
    assert not clean[0][:, :, :9].any() and clean[0][:, :, 9:].any(axis=-1).all()
    call.dout[:, :, :9], call.dlse[:, :, :9], call.q[:, :, :9] = np.nan, np.inf, np.nan
    for ours, expected in zip(differentiate(call), clean, strict=True):
        assert np.array_equal(ours, expected)
    for ours, expected in zip(call.reference(), exact, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)


def test_rows_of_nothing_but_minus_infinity_are_dead():
    call = draw(12, (4, 20))
    call.q[...], call.k[...] = 1, -np.inf
    call = finish(call.dout, call.q, call.k, call.v, call.dlse)
    assert np.isneginf(call.lse).all()
    call.dout[...] = np.nan
    assert not any(grad.any() for grad in differentiate(call))


@pytest.mark.parametrize("where", ["q", "k", "v", "dout", "dlse"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_values_reach_what_they_meet_and_nothing_else(tiles, where, value):
    """B-001: rows and keys that are hidden from each other have no influence on each other."""
    call = draw(13, (12, 14), (4, 2), causal="bottom_right", scale=0.3)
    clean = differentiate(call)
    getattr(call, where)[(1, 1, 9) if where == "dlse" else (1, 1, 9, 2)] = value
    call = finish(call.dout, call.q, call.k, call.v, call.dlse, call.causal, call.scale)
    dq, dk, dv = differentiate(call)
    rows, keys = np.zeros(dq.shape[:3], bool), np.zeros(dk.shape[:3], bool)
    if where in ("k", "v"):  # key 9 of the second head meets queries 7 and later of two heads, and they all other keys
        rows[1, 2:, 7:], keys[1, 1] = True, True
    else:  # query 9 of the second head meets keys 0 to 11 of the first
        rows[1, 1, 9], keys[1, 0, :12] = True, True
    for ours, expected, touched in ((dq, clean[0], rows), (dk, clean[1], keys), (dv, clean[2], keys)):
        np.testing.assert_allclose(ours[~touched], expected[~touched], rtol=1e-4, atol=1e-5)
    if np.isnan(value):
        assert np.isnan(dq[rows]).any(axis=-1).all()
        for ours, expected in zip((dq, dk, dv), call.reference(), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_very_negative_lse():
    """B-005: logits near -120 in a tile that is half full; exp(-lse) alone would overflow."""
    call = draw(14, (704, 704), (1, 1), (64, 64), "bfloat16", 1)
    call.q[..., 0], call.k[..., 0] = 31, -31
    check(finish(call.dout, call.q, call.k, call.v, call.dlse))


@pytest.mark.parametrize("size", [-3e5, -1e10, -1e30, 1e30])
def test_hugely_negative_scores_stay_finite(size):
    """The LSE is rounded by more than 1 here: probabilities must not exceed 1 for that."""
    call = draw(15, (40, 60), scale=1.0)
    call.q[..., 0], call.k[..., 0] = np.sqrt(abs(size)), np.copysign(np.sqrt(abs(size)), size)
    call = finish(call.dout, call.q, call.k, call.v, call.dlse, scale=1.0)
    nudged = call._replace(lse=np.nextafter(call.lse, -np.float32(np.inf)))
    for each in (call, nudged):
        assert all(np.isfinite(grad).all() for grad in differentiate(each))


@DTYPE
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("empty", ["batch", "queries", "keys", "heads"])
def test_empty_inputs(empty, causal, dtype):
    """B-028: shapes come back; what has nothing to depend on has gradients of 0."""
    lengths = (0 if empty == "queries" else 3, 0 if empty == "keys" else 4)
    call = draw(
        16, lengths, (0, 0) if empty == "heads" else (2, 1), (8, 5), dtype, 0 if empty == "batch" else 2, causal
    )
    given_grads = tuple(poisoned(x.shape, x.dtype) for x in (call.q, call.k, call.v))
    for grads in (differentiate(call), differentiate(call, grads=given_grads)):
        for grad, like in zip(grads, (call.q, call.k, call.v), strict=True):
            assert grad.shape == like.shape and grad.dtype == like.dtype and not grad.any()


# --- memory, strides, repetition -------------------------------------------------------------------------------

layouts = st.tuples(st.permutations(range(4)), st.tuples(*[st.integers(1, 3)] * 4), st.tuples(*[st.booleans()] * 4))


@given(layouts=st.lists(layouts, min_size=10, max_size=10), dtype=st.sampled_from(sorted(DTYPES)))
@settings(max_examples=100)
def test_any_strides(layouts, dtype):
    """B-032, B-049, B-050, B-052: each array in a layout of its own, NaN in the gaps and in what is to be written."""
    call = draw(17, (11, 13), (6, 2), dtype=dtype, causal="bottom_right")
    expected = differentiate(call)
    grads = [strided_copy(poisoned(x.shape, x.dtype), *layouts[i]) for i, x in enumerate(expected)]
    four = [x if x.ndim == 4 else x[..., None] for x in call[:7]]
    dout, q, k, v, out, lse, dlse = (strided_copy(x, *layouts[3 + i]) for i, x in enumerate(four))
    moved = Backward(dout, q, k, v, out, lse[..., 0], dlse[..., 0], call.causal, call.scale)
    results = differentiate(moved, grads=grads)
    for result, given_grad, wanted in zip(results, grads, expected, strict=True):
        assert result is given_grad and np.array_equal(result, wanted)


@DTYPE
def test_layouts_and_broadcast_arguments(dtype):
    """B-049: a dout that is one number everywhere, as the gradient of a sum is; bshd is bhsd transposed."""
    call = draw(18, (20, 30), (4, 2), dtype=dtype, causal="bottom_right")
    call = call._replace(dout=np.broadcast_to(call.dout[:1, :1, :1, :1], call.dout.shape))
    expected = differentiate(call)
    copied = differentiate(call._replace(dout=call.dout.copy()))
    bshd = cuflash.attention_backward(
        *(x.swapaxes(1, 2) for x in call[:5]), call.lse, dlse=call.dlse, causal=True, deterministic=True
    )
    for x, y, z in zip(expected, copied, bshd, strict=True):
        assert np.array_equal(x, y) and np.array_equal(x, z.swapaxes(1, 2)) and z.flags.c_contiguous


def test_results_repeat_bitwise(tiles):
    """B-089."""
    call = draw(19, (130, 131), (4, 2), (16, 16), causal="bottom_right")
    first = differentiate(call, deterministic=True)
    for _ in range(5):
        assert all(map(np.array_equal, first, differentiate(call, deterministic=True)))


def test_inputs_stay_as_they_were():
    call = draw(20, (20, 30), causal="bottom_right")
    kept = [x.copy() for x in call[:7]]
    differentiate(call)
    assert all(map(np.array_equal, kept, call[:7]))


def test_memory_does_not_grow_with_the_square_of_the_length():
    """The scores of a head of 8192 x 8192 are 256 MiB; less than 32 are used beside inputs and gradients."""
    call = draw(21, (8192, 8192), (2, 2), (64, 64), batch=1)
    grads = tuple(poisoned(x.shape, x.dtype) for x in (call.q, call.k, call.v))
    tracemalloc.start()
    try:
        differentiate(call, grads=grads)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20, f"peak of {peak / 2**20:.1f} MiB"
    rows = slice(8000, 8192)
    dq, _, _ = oracle_backward(call.dout[:, :, rows], call.q[:, :, rows], call.k, call.v, dlse=call.dlse[:, :, rows])
    np.testing.assert_allclose(grads[0][:, :, rows], dq, rtol=1e-3, atol=1e-6)
