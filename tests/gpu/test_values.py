"""Values at the edges: huge scores, NaN and infinity in the inputs, and whatever lies beside them in memory."""

from __future__ import annotations

import numpy as np
import pytest

import cuflash
from cuflash.kernels import FAMILIES, use_family
from cuflash.reference import oracle
from tests.gpu.support import (
    CAUSAL,
    DTYPES,
    assert_same_bits,
    assign,
    bits,
    check_attention,
    draw_qkv,
    host_qkv,
    numpy_dtype,
    poisoned,
    require_hopper,
    swap_layout,
    to_device,
    to_host,
)
from tests.oracle import judge

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("lengths", [(1, 1), (70, 1), (70, 200)], ids=str)
def test_huge_equal_inputs(lengths: tuple[int, int]) -> None:
    """B-010: q = k = v = 133120 in bfloat16, scores near 1.4e11."""
    shapes = ((1, lengths[0], 1, 64), (1, lengths[1], 1, 64), (1, lengths[1], 1, 64))
    q, k, v = (to_device(np.full(shape, 133120, numpy_dtype("bfloat16"))) for shape in shapes)
    out = cuflash.attention(q, k, v)
    assert (to_host(out).astype(np.float64) == 133120).all()


@pytest.mark.parametrize("score", [-524288.0, -5e4, -2.4e5, 2.4e5, -3e37, 3e37])
def test_no_finite_sentinel(score: float) -> None:
    """B-004, B-007: one key of any finite score is a key: the output is its value and the LSE its score."""
    q, k, v = host_qkv((70, 1), (1, 1), (64, 64), "bfloat16")
    q[...] = 0
    k[...] = 0
    q[..., 0] = 2.0 ** np.floor(np.log2(abs(score)) / 2)
    k[..., 0] = score / q[0, 0, 0, 0].astype(np.float64)
    exact = q[0, 0, 0].astype(np.float64) @ k[0, 0, 0].astype(np.float64)
    out, lse = cuflash.attention(*map(to_device, (q, k, v)), scale=1.0, return_lse=True)
    np.testing.assert_allclose(to_host(lse).astype(np.float64), exact, rtol=1e-6)
    assert_same_bits(out, np.broadcast_to(v, out.shape), "output and value")


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("size", [300.0, 3000.0])
def test_rows_of_very_large_scores(sign: int, size: float) -> None:
    """B-008: every score of a row is hugely negative or hugely positive."""
    q, k, v = host_qkv((130, 190), (2, 2), (128, 128), "bfloat16")
    q, k = (np.abs(x.astype(np.float32)) * factor for x, factor in ((q, size), (k, 10 * sign * size)))
    check_attention(to_device(q.astype(v.dtype)), to_device(k.astype(v.dtype)), to_device(v), causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sign", [-1, 1])
def test_rows_of_large_scores_beside_flash(sign: int, causal: bool) -> None:
    """Scores near 1e5: the tensor cores' own rounding of a score moves its probability, for torch's kernel alike."""
    torch = pytest.importorskip("torch")
    q, k, v = host_qkv((190, 190), (2, 2), (128, 128), "bfloat16")
    q, k = ((np.abs(x.astype(np.float32)) * factor).astype(v.dtype) for x, factor in ((q, 30), (k, 300 * sign)))
    ours = to_host(cuflash.attention(*map(to_device, (q, k, v)), causal=causal))
    tensors = [torch.from_numpy(x.astype(np.float32)).to("cuda", torch.bfloat16).transpose(1, 2) for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        flash = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
    bhsd = [swap_layout(x) for x in (ours, q, k, v)]
    reference, _ = oracle(*bhsd[1:], causal="bottom_right" if causal else False)
    judge(bhsd[0], reference, flash.float().cpu().numpy().astype(v.dtype))


def test_a_few_outliers_among_ordinary_scores() -> None:
    """B-100: two neighbouring logits are huge, also where the mask hides one of them."""
    q, k, v = host_qkv((1024, 1024), (1, 1), (64, 64), "float16")
    q[:, 100, :, :2] = 1
    k[:, 500, :, :2] = 76
    k[:, 90, :, :2] = 76.25
    for causal in CAUSAL:
        check_attention(*map(to_device, (q, k, v)), causal=causal, scale=0.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (33, 64)], ids=str)
def test_non_finite_q_and_k_reach_the_rows_that_see_them(dims: tuple[int, int], name: str, bad: float) -> None:
    arrays = host_qkv((150, 210), (2, 2), dims, "float16", batch=2)
    arrays["qk".index(name)][1, 100, 1, 5] = bad
    out = to_host(cuflash.attention(*map(to_device, arrays), causal=True)).astype(np.float64)
    host = [swap_layout(x).astype(np.float64) for x in arrays]
    expected, _ = oracle(*host, causal="bottom_right", scale=dims[0] ** -0.5)
    expected = swap_layout(expected)
    assert (np.isnan(out) == np.isnan(expected)).all()
    finite = np.isfinite(expected)
    assert np.abs(out[finite] - expected[finite]).max() < 0.01 * np.abs(expected[finite]).max()


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("causal", ["bottom_right", "top_left"])
def test_masked_keys_have_no_influence(causal: str, bad: float) -> None:
    """B-001: what a K row that a query does not see holds changes none of its bits, in any tile."""
    q, k, v = host_qkv((200, 200), (2, 2), (64, 64), "bfloat16")
    clean = cuflash.attention(*map(to_device, (q, k, v)), causal=causal)
    for position in (150, 64, 63, 1):
        k[:, position:] = bad
        out = cuflash.attention(*map(to_device, (q, k, v)), causal=causal)
        assert_same_bits(out[:, :position], clean[:, :position], f"rows before {position}")


def test_non_finite_values_stay_with_the_rows_that_see_them() -> None:
    """NaN in V reaches all rows that see it, in that column; rows of query tiles that skip its tile keep their bits."""
    q, k, v = host_qkv((512, 512), (1, 1), (64, 64), "float16")
    clean = cuflash.attention(*map(to_device, (q, k, v)), causal=True)
    v[:, 400, :, 7] = np.nan
    out = to_host(cuflash.attention(*map(to_device, (q, k, v)), causal=True))
    assert np.isnan(out[:, 400:, :, 7]).all()
    assert not np.isnan(np.delete(out, 7, axis=3)).any()
    assert_same_bits(to_device(out[:, :256]), clean[:, :256])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_whose_scores_are_all_minus_infinity(dtype: str) -> None:
    """A row that sees only scores of -inf is a dead row: 0 and -inf."""
    q, k, v = host_qkv((70, 90), (1, 1), (64, 64), dtype)
    q = (np.abs(q.astype(np.float32)) + 0.5).astype(q.dtype)
    k[...] = -np.inf
    out, lse = cuflash.attention(*map(to_device, (q, k, v)), return_lse=True)
    assert (to_host(out) == 0).all() and (to_host(lse) == -np.inf).all()
    k[:, 70:] = 1
    check_attention(*map(to_device, (q, k, v)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72), (192, 128), (256, 256)], ids=str)
def test_rows_that_see_no_key_are_zero_whatever_v_holds(dims: tuple[int, int], family: str) -> None:
    """Also in tiles whose other rows see keys, and where all scores are -inf."""
    if family == "forward_sm90":
        require_hopper()
    q, k, v = host_qkv((300, 70), (4, 2), dims, "bfloat16")
    dead = np.s_[:, :230]
    with use_family(family):
        for bad in (np.nan, np.inf):
            v[:, 69] = bad
            out, lse = cuflash.attention(*map(to_device, (q, k, v)), causal=True, return_lse=True)
            assert not bits(out)[dead].any() and np.isneginf(to_host(lse)[:, :, :230]).all()
            v[...] = bad
            out = cuflash.attention(*map(to_device, (q, k, v)), causal=True)
            assert not bits(out)[dead].any() and not np.isfinite(to_host(out)[:, 230:].astype(np.float32)).any()
        q, k = np.abs(q) + q.dtype.type(0.5), np.full_like(k, -np.inf)
        assert not bits(cuflash.attention(*map(to_device, (q, k, v)))).any()


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72), (33, 64), (256, 256)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pad", [8, 3], ids=["aligned", "odd"])
def test_poison_around_the_inputs_never_leaks(dims: tuple[int, int], causal: bool, pad: int) -> None:
    """B-037: NaN beyond the last key, the last query, the last head and the last element of every row."""
    lengths, heads = (150, 203), (4, 2)
    clean = draw_qkv(lengths, heads, dims, "bfloat16", batch=2)
    padded = []
    for x in clean:
        around = poisoned(tuple(n + 2 * pad for n in x.shape), x.dtype)
        inside = around[tuple(slice(pad, -pad) for _ in x.shape)]
        assign(inside, x)
        padded.append(inside)
    out = check_attention(*padded, causal=causal)
    if pad == 8 and dims[0] % 8 == 0 and dims[1] % 8 == 0:  # the same kernel in both cases: the same bits
        assert_same_bits(out, cuflash.attention(*clean, causal=causal))
