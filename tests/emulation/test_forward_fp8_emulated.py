"""The Ampere-style forward kernel for 8-bit inputs, executed on the CPU by instruction, on what the quantizer makes.

Against float64 on the same codes. Its tensor cores truncate sums of 8-bit products, as far as that was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.arch import ARCHES
from cuflash.arch.fp8_sm80 import FORWARD
from cuflash.arch.tuning import Row
from cuflash.fp8 import E4M3, E5M2, FORMATS, Float8, Format
from cuflash.fp8_layout import ROLES
from cuflash.fp8_sm80_config import Fp8Sm80Config
from cuflash.request import LARGEST_FACTOR, SMALLEST_FACTOR
from tests.emulation.build import compiler
from tests.emulation.fp8 import Fp8Case, Run, assert_right, check, run
from tests.emulation.launch import SABOTAGE, Timing
from tests.mutation import Mutation

pytestmark = pytest.mark.skipif(compiler() is None, reason="the CPU emulation needs g++")

CAUSAL = (False, "bottom_right", "top_left")
TARGETS = ("sm_89", "sm_80", "sm_100")
"""Products of codes; tiles converted by integer arithmetic, and by an instruction."""
CODES = Fp8Sm80Config(block_m=64, block_n=32, warps=4, q_registers=1, ctas=1, converted=False, two_level=True)
CONVERTED = replace(CODES, converted=True, two_level=False)


def row_name(row: Row[Fp8Sm80Config]) -> str:
    return f"{row.arches[0]}-d{row.head_dim}-{row.config.label}"


@pytest.mark.parametrize("index", range(len(FORWARD)), ids=[row_name(row) for row in FORWARD])
def test_tuned_configs(index: int) -> None:
    row = FORWARD[index]
    d, config = row.head_dim, row.config
    lengths = config.block_m + 17, 3 * config.block_n + 5
    found = check(Fp8Case(lengths, (d, d), (3, 1), causal=CAUSAL[index % 3], arch=row.arches[0]))
    assert found.config == config and "ldmatrix bank conflicts" not in found.report.counts
    check(
        Fp8Case(
            lengths, (d - 48, d - 16), (3, 1), out_dtype="float16", causal=CAUSAL[(index + 1) % 3], arch=row.arches[0]
        )
    )


@pytest.mark.parametrize("block_n", [32, 64, 128])
@pytest.mark.parametrize("base", [CODES, CONVERTED], ids=["codes", "converted"])
def test_key_tiles(base: Fp8Sm80Config, block_n: int) -> None:
    """Parts of an image of V, which has its own swizzle; more stages; Q held in registers."""
    for stages in (2, 3):
        config = replace(base, block_n=block_n, stages=stages, q_registers=2 * stages - 4)
        for keys in (1, 127, 129, 300):
            check(Fp8Case((70, keys), (64, 80), causal="bottom_right", config=config))


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dims", [(1, 1), (32, 32), (33, 70), (80, 80), (192, 128), (64, 256), (250, 16)], ids=str)
def test_head_dims(arch: str, dims: tuple[int, int]) -> None:
    check(Fp8Case((77, 150), dims, out_dtype="float16", causal="bottom_right", arch=arch))


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("arch", TARGETS)
def test_lengths_around_tile_edges(arch: str, causal: Any) -> None:
    for lengths in ((1, 1), (63, 65), (64, 128), (65, 129), (128, 31), (129, 257), (200, 70)):
        check(Fp8Case(lengths, (32, 32), causal=causal, arch=arch))


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(
    "change",
    [
        {"layout": "bhsd", "batch": 2},
        {"heads": (6, 2), "batch": 2},
        {"heads": (7, 7)},
        {"options": {"hadamard": True}},
        {"options": {"center": False}, "mean": 0.0},
        {"scale": 0.0},
        {"scale": -0.05},
        {"scale": 0.4},
    ],
    ids=str,
)
def test_calls(arch: str, change: dict[str, Any]) -> None:
    check(replace(Fp8Case((150, 270), (64, 48), causal="bottom_right", arch=arch), **change))


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("forms", list(product(FORMATS, repeat=3))[1:], ids=lambda forms: "-".join(forms))
def test_formats(arch: str, forms: tuple[Float8, Float8, Float8]) -> None:
    """Any combination beside e4m3 alone; Q in registers and in shared memory."""
    base = CODES if ARCHES[arch].multiplies_float8 else CONVERTED
    check(Fp8Case((70, 270), (48, 64), causal="bottom_right", arch=arch, config=base, forms=forms))


@pytest.mark.parametrize("arch", TARGETS)
def test_tiles_of_very_different_scales(arch: str) -> None:
    """Scales of K and V follow their tiles, by factors of up to 2^90; very large and small ones."""
    case = Fp8Case((70, 1024), (32, 32), (1, 1), causal="top_left", mean=0.0, arch=arch, options={"center": False})
    q, k, v = case.values()
    powers = np.exp2([0, -10, 10, 3, -20, 0, 7, -3]).repeat(128).astype(np.float32)[None, :, None, None]
    extreme = powers ** np.float32(3)
    operands = [(q, k, v * powers), (q, k, v * extreme), (q, k * powers ** np.float32(0.1), v)]
    operands += [(q * factor, k / factor, v * factor) for factor in (np.float32(1e30), np.float32(1e-30))]
    for causal in (False, "bottom_right"):
        changed = replace(case, causal=causal)
        for arrays in operands:
            quantized = case.quantized(list(arrays))
            assert_right(changed, quantized, run(changed, quantized))


@pytest.mark.parametrize("arch", TARGETS)
def test_scales_of_the_caller_are_right_to_the_ends_of_their_range(arch: str) -> None:
    case = Fp8Case((70, 300), (32, 32), (1, 1), mean=0.0, arch=arch)
    codes = [(16 * x).astype(ml_dtypes.float8_e4m3fn) for x in case.values()]  # whose scores show, times both ends
    ends = SMALLEST_FACTOR, LARGEST_FACTOR
    for scales in ((*ends, ends[1]), (*ends[::-1], ends[0])):
        q8, k8, v8 = (
            cuflash.QuantizedTensor.from_float8(x, scale, role=role)
            for x, scale, role in zip(codes, scales, ROLES, strict=True)
        )
        quantized = q8, k8, v8.to_image()
        assert_right(case, quantized, run(case, quantized))


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_special_codes(arch: str, form: Format) -> None:
    """Every finite code, the subnormal ones among them, in every operand."""
    rng = np.random.default_rng(0)
    case = Fp8Case((128, 256), (64, 64), (1, 1), arch=arch, scale=1e-4 * (448 / form.largest) ** 2)
    finite = np.flatnonzero(np.isfinite(form.values())).astype(np.uint8)
    quantized = tuple(
        of_codes(rng.permuted(np.resize(finite, (1, length, 1, 64)), axis=None), role, form)
        for role, length in zip(ROLES, (128, 256, 256), strict=True)
    )
    assert_right(case, quantized, run(case, quantized))
    tiny = replace(case, scale=1e4 * 4.0 ** (form.bias - E4M3.bias - 1))  # scores of subnormal codes alone
    mantissa = np.uint8(0x80 | (1 << form.mantissa_bits) - 1)
    small = tuple(replace(x, payload=x.payload & mantissa) for x in quantized)
    assert_right(tiny, small, run(tiny, small))


def of_codes(codes: np.ndarray, role: Any, form: Format) -> cuflash.QuantizedTensor:
    """Their numbers times 2^-8."""
    x = cuflash.QuantizedTensor.from_float8(codes.view(getattr(ml_dtypes, form.name)), 2.0**-8, role=role)
    return x.to_image() if role == "v" else x


@pytest.mark.parametrize("arch", TARGETS)
def test_infinite_codes(arch: str) -> None:
    """A key of -inf is hidden, as a mask would; an infinity of V is that of the rows that see it."""
    case = Fp8Case((128, 256), (32, 32), (1, 1), arch=arch, causal="bottom_right")
    rng = np.random.default_rng(0)
    q, k, v = (rng.integers(0x34, 0x40, (1, length, 1, 32), np.uint8) for length in (128, 256, 256))
    k[:, ::3] |= 0x80
    k[:, 100], v[0, 200, 0, 5] = 0xFC, 0x7C  # seen by all rows; by those from 72 on
    operands = tuple(of_codes(x, role, E5M2) for x, role in zip((q, k, v), ROLES, strict=True))
    found = run(case, operands)
    assert not found.report.faults
    out, expected = found.out.view.astype(np.float32), cuflash.attention(*operands, causal=True, out_dtype="float32")
    assert np.isposinf(out[:, 72:, :, 5]).all() and np.isposinf(expected[:, 72:, :, 5]).all()
    others = np.delete(out, 5, axis=3)  # of that column, rows that do not see the key may be NaN or not
    np.testing.assert_allclose(others, np.delete(expected, 5, axis=3), rtol=0.02)
    np.testing.assert_array_equal(np.isfinite(found.lse.view), True)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("form", FORMATS)
def test_non_finite_values_stay_with_the_rows_that_see_them(arch: str, form: Float8) -> None:
    case = Fp8Case((300, 300), (32, 32), (2, 2), causal="bottom_right", arch=arch, forms=(form,) * 3)
    for which, bad in ((0, np.nan), (1, -np.inf), (2, np.nan)):
        arrays = case.values()
        arrays[which][0, 150, 1, 3] = bad
        quantized = case.quantized(arrays)
        found = run(case, quantized)
        assert not found.report.faults
        nan = np.isnan(found.out.view.astype(np.float32))
        assert not nan[:, :, 0].any() and nan[0, 150, 1].any()
        if which == 2:  # rows that share the tile of key 150, and do not see it, may be NaN or not
            assert nan[:, 150:, 1, 3].all() and not nan[:, :128].any() and not np.delete(nan, 3, axis=3).any()
        else:
            expected = cuflash.attention(*quantized, causal=True, out_dtype="float32")
            np.testing.assert_array_equal(nan, np.isnan(expected))


@pytest.mark.parametrize("arch", TARGETS)
def test_rows_that_see_no_key_are_zero_whatever_the_operands_hold(arch: str) -> None:
    case = Fp8Case((300, 70), (32, 48), (2, 2), causal="bottom_right", arch=arch)
    q, k, v = case.values()
    q[:, 100] = v[:, 69] = np.nan
    found = run(case, case.quantized([q, k, v]))
    assert not found.report.faults
    assert not found.out.view[:, :230].view(np.uint16).any() and np.isneginf(found.lse.view[:, :, :230]).all()


def test_two_levels_keep_a_mean_of_v() -> None:
    """In the model of truncating tensor cores: one level loses some of it, two levels, and fp16, do not."""

    def bias(arch: str, change: Callable[[Fp8Sm80Config], Fp8Sm80Config] = lambda config: config) -> float:
        case = Fp8Case(
            (64, 4096), (16, 16), (1, 1), out_dtype="float16", mean=0.0, arch=arch, options={"center": False}
        )
        q, k, v = case.values()
        quantized = case.quantized([q, k, v + np.float32(1)])
        base = replace(CODES if ARCHES[arch].multiplies_float8 else CONVERTED, block_n=64)
        found = run(replace(case, config=change(base)), quantized)
        exact = cuflash.attention(*quantized, out_dtype="float32")
        return float((found.out.view - exact).mean() / np.abs(exact).mean())

    assert bias("sm_89", lambda config: replace(config, two_level=False)) < -0.02
    assert abs(bias("sm_89")) < 3e-3 and abs(bias("sm_80")) < 1e-3


# --- wrong kernels


LONG = Fp8Case((200, 330), (64, 64), (4, 2), causal="bottom_right")


@pytest.mark.parametrize("arch", ["sm_89", "sm_80"])
@pytest.mark.parametrize("ignore", SABOTAGE)
def test_a_synchronisation_that_does_nothing_is_seen(ignore: str, arch: str) -> None:
    case = replace(LONG, arch=arch)
    faults = [run(case, case.quantized(), Timing(late, ignore=ignore)).report.faults for late in (False, True)]
    assert any("shared race" in each for each in faults)


HEADER = "device/products_fp8.cuh"
MUTATIONS = {
    "no wait": ("", "cp_async_wait<kStages - 2>();", ""),
    "no barrier": ("", "cp_async_wait<kStages - 2>();\n        cta_sync();", "cp_async_wait<kStages - 2>();"),
    "another swizzle of the image": (HEADER, "^ (row & 7)) << 4)", "^ (row & 3)) << 4)"),
    "the other keys of an image": (HEADER, "first_key / 16 + unit", "unit"),
    "P in another order": (HEADER, "e / 2 * 8 + e % 2 * 2", "e / 2 * 8 + e % 2 * 4"),
    "a scale of the first tile": ("", "kv_head * p.k_tiles + n0 / kTile)", "kv_head * p.k_tiles)"),
    "a scale of the first queries": ("", "p.q_tiles + m0 / kTile", "p.q_tiles"),
    "units forgotten": ("", "unit * rcp_approx(v_scale)", "1.f"),
    "the last unit forgotten": ("", "(unit / OperandV::kUnit)", "(1.f / OperandV::kUnit)"),
    "the mean forgotten": ("", "mean.value[j % 2]", "0.f"),
    "the shift forgotten": ("", "shifted ? lse[r] +", "shifted ? lse[r] + 0.f *"),
    "every head its own mean": ("", "(const float*)p.v_mean + (i64)kv_head * kHeadDimV", "(const float*)p.v_mean"),
    "output not corrected": (
        HEADER,
        "fma_f32(o[w][8 * n + e], carry[w][e / 2 % 2], c[w][e])",
        "o[w][8 * n + e] + c[w][e]",
    ),
    "carry of the other row": (HEADER, "carry[w][e / 2 % 2], c", "carry[w][0], c"),
    "a mask that is not applied": ("", "if (kMasked) apply_mask(s, n0);", ""),
}
CONVERTING = {
    "no barrier behind the conversion": ("", "v_loader);\n            cta_sync();", "v_loader);"),
    "signs lost": (HEADER, " | (codes & 0x80008000)", ""),
    "half an exponent": (HEADER, "codes >> 1 & 0x3f803f80", "codes >> 1 & 0x1f801f80"),
    "the unit of K forgotten": ("", "k_scale / OperandK::kUnit", "k_scale"),
    "P in another order": (HEADER, "e / 2 * 4 + e % 2 * 2", "e / 2 * 2 + e % 2 * 4"),
    "output not corrected": (HEADER, "* carry[w][e / 2]", ""),
    "rows beyond the end": (HEADER, "row < rows_left && ", ""),
}
MIXED: dict[str, tuple[str, tuple[str, str, str]]] = {
    "Q and K exchanged": ("sm_89", ("", "CodeProduct<kE5m2Q, kE5m2K>", "CodeProduct<kE5m2K, kE5m2Q>")),
    "P in V's format": ("sm_89", ("", "CodeProduct<false, kE5m2V>", "CodeProduct<kE5m2V, kE5m2V>")),
    "V in P's format": ("sm_89", ("", "CodeProduct<false, kE5m2V>", "CodeProduct<false, false>")),
    "Q converted as K": ("sm_80", ("", "load_expanded<OperandQ, ", "load_expanded<OperandK, ")),
    "K converted as Q": ("sm_80", ("", "expand_rows<OperandK, ", "expand_rows<OperandQ, ")),
    "V converted as K": ("sm_80", ("", "expand_image<OperandV, ", "expand_image<OperandK, ")),
    "V of e5m2 by the instruction for e4m3": ("sm_100", (HEADER, "kHardware && !kE5m2", "kHardware")),
    "the unit of Q for K": ("sm_80", ("", "k_scale / OperandK::kUnit", "k_scale / OperandQ::kUnit")),
    "the unit of K for Q": ("sm_80", ("", "/ OperandQ::kUnit * p.scale_log2", "/ OperandK::kUnit * p.scale_log2")),
    "the unit of K for V": ("sm_80", ("", "unit / OperandV::kUnit", "unit / OperandK::kUnit")),
}
"""With Q and V of e5m2 and K of e4m3: by the target that shows it."""


@pytest.mark.parametrize("name", MIXED)
def test_a_wrong_format_is_seen(name: str) -> None:
    arch, mutation = MIXED[name]
    assert_seen(Mutation(*mutation), replace(LONG, arch=arch, forms=(E5M2.name, E4M3.name, E5M2.name)))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_is_seen(name: str) -> None:
    assert_seen(Mutation(*MUTATIONS[name]), LONG)


@pytest.mark.parametrize("name", CONVERTING)
def test_a_wrong_conversion_is_seen(name: str) -> None:
    assert_seen(Mutation(*CONVERTING[name]), replace(LONG, arch="sm_80"))


def assert_seen(mutation: Mutation, case: Fp8Case) -> None:
    """By a fault of the machine or by wrong numbers, in at least one of two timings; values grow from tile to tile."""
    arrays = case.values()
    rising = np.geomspace(0.1, 30, case.lengths[1])[None, :, None, None].astype(np.float32)
    arrays[2] *= rising
    quantized = case.quantized(arrays)

    def right(found: Run) -> bool:
        try:
            assert_right(case, quantized, found)
        except AssertionError:
            return False
        return True

    timings = (Timing(False, 1), Timing(True, 2))
    assert all(right(run(case, quantized, timing)) for timing in timings), "the kernel as it is"
    found = [run(case, quantized, timing, mutation) for timing in timings]
    assert not all(map(right, found))


def test_a_conversion_of_nan_to_a_number_is_seen() -> None:
    case = replace(LONG, arch="sm_80")
    arrays = case.values()
    arrays[1][0, 20] = np.nan
    quantized = case.quantized(arrays)
    wrong = Mutation(HEADER, " | ((magnitudes + 0x00800080) & 0x40004000)", "")
    right, found = (run(case, quantized, mutation=mutation) for mutation in (None, wrong))
    assert np.isnan(right.lse.view).any() and not np.isnan(found.lse.view).any()
