"""The quantizer's rendered texts, executed on the CPU by instruction: bit for bit what NumPy computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuflash import kernels
from cuflash.fp8 import FORMATS
from tests.emulation.build import compiler
from tests.emulation.launch import SABOTAGE, Timing
from tests.emulation.quantize import QuantizeCase, assert_as_numpy, check, run
from tests.mutation import Mutation

pytestmark = pytest.mark.skipif(compiler() is None, reason="the CPU emulation needs g++")

E4M3, E5M2 = FORMATS
LENGTHS = (1, 8, 16, 17, 127, 128, 129, 255, 256, 257, 600)


# ---- shapes


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int) -> None:
    """Around every edge of tiles, of the image's units and of the sample of the means."""
    for seed, pad in ((None, (0, 0, 0, 0)), (length, (0, 8, 8, 8))):
        check(QuantizeCase((length, LENGTHS[-1 - LENGTHS.index(length)]), seed=seed, pad=pad))


@pytest.mark.parametrize(
    "dims",
    [(1, 1), (2, 16), (15, 33), (16, 128), (31, 48), (40, 72), (64, 256), (80, 80), (96, 64), (100, 100), (112, 40),
     (127, 127), (128, 128), (130, 130), (160, 160), (192, 128), (200, 17), (255, 255), (256, 64), (256, 256)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("rotated", [False, True])
def test_head_dims(dims: tuple[int, int], rotated: bool) -> None:
    check(QuantizeCase((33, 140), dims, seed=sum(dims) if rotated else None, align=4 if sum(dims) % 2 else 16))


@pytest.mark.parametrize("access_bytes", [16, 8, 4, 2])
@pytest.mark.parametrize("dims", [(64, 64), (96, 256)], ids=str)
def test_access_widths(access_bytes: int, dims: tuple[int, int]) -> None:
    """Rows that begin at multiples of a width and no more."""
    pad = (0, 0, 0, access_bytes // 2)
    check(QuantizeCase((70, 135), dims, (2, 1), pad=pad, align=access_bytes, seed=1))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("roles", ["qkv", "q", "k", "v", "kv", "qk"])
def test_tensors_heads_layouts(roles: str, layout: str) -> None:
    """Every tensor with its own number of tiles, which few thread blocks share."""
    case = QuantizeCase((270, 140), (32, 64), (6, 2), batch=2, layout=layout, roles=roles, seed=7)
    for blocks in (1, 4):
        check(replace(case, blocks=blocks))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_targets(arch: str, form: str) -> None:
    """With and without an instruction for 8-bit floats; one and two stages."""
    for d, dtype in ((64, "float16"), (256, "bfloat16")):
        check(QuantizeCase((150, 300), (d, d), dtype=dtype, form=form, arch=arch, seed=d))


@pytest.mark.parametrize("d", [32, 48, 64, 80, 128, 200, 256])
def test_other_configs(d: int) -> None:
    """One stage, three; twice as many columns for each thread. A block has more turns than one batch of tickets."""
    case = QuantizeCase((300, 1400), (d, d), seed=1, blocks=1)
    config = kernels.select_config(_problem(case))
    for changes in ({"stages": 1}, {"stages": 3}, {"columns": 128, "parts": -(-d // 128)}):
        check(replace(case, config=replace(config, **changes)))  # type: ignore[type-var]


def _problem(case: QuantizeCase) -> Any:
    from cuflash.problem import AttentionProblem

    return AttentionProblem(*case.dims, case.dtype, "full", 16, False, case.arch, "quantize")  # type: ignore[arg-type]


@given(
    random=st.integers(0, 2**32 - 1),
    lengths=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    heads=st.sampled_from([(1, 1), (3, 1), (2, 2)]),
    dims=st.sampled_from([(64, 64), (24, 40), (128, 128), (100, 256)]),
    dtype=st.sampled_from(["float16", "bfloat16"]),
    form=st.sampled_from([E4M3, E5M2]),
    seed=st.none() | st.integers(0, 2**64 - 1),
    center=st.booleans(),
    exponent=st.integers(-140, 110),
    specials=st.lists(st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-40, 3e38]), max_size=5),
)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_anything(
    random: int,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: str,
    form: str,
    seed: int | None,
    center: bool,
    exponent: int,
    specials: list[float],
) -> None:
    """Values of every size, tiles with nothing but zeros, infinities and NaNs."""
    case = QuantizeCase(lengths, dims, heads, dtype=dtype, form=form, seed=seed, center=center)
    values = case.values(random)
    rng = np.random.default_rng(random)
    with np.errstate(all="ignore"):
        for x in values.values():
            np.ldexp(x, exponent if dtype == "bfloat16" else exponent // 9, out=x)
            for value in specials:
                x[tuple(rng.integers(extent) for extent in x.shape)] = value
            if random % 3 == 0:
                x[:, :128] = 0 if random % 2 else np.nan
        check(case, values)


# ---- values


@pytest.mark.parametrize("form", [E4M3, E5M2])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_ties(form: str, arch: str) -> None:
    """Values whose quotients by the scale are midpoints of codes, and their neighbours; quotients beyond none."""
    numbers = FORMATS[form].values()[: 0x7F if form == E4M3 else 0x7C]  # type: ignore[index]
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = np.concatenate([numbers, ties, ties * (1 + 2.0**-10), ties * (1 - 2.0**-10)])
    x = np.resize(np.concatenate([near, -near]), (1, 128, 1, 64)).copy()
    for factor in (1.0, 3.0, 5.0 / 7.0):
        values = x * factor
        values[0, 0, 0, 0] = factor * FORMATS[form].largest  # type: ignore[index]
        case = QuantizeCase((128, 128), form=form, center=False, arch=arch, dtype="float16", roles="qv")
        with np.errstate(over="ignore"):
            values = values.clip(-60000, 60000)
        check(case, {"q": values, "v": values})


# ---- what must be seen


@pytest.mark.parametrize("ignored", [name for name in SABOTAGE if name != "no_warp_barrier"])
def test_the_emulator_sees_missing_barriers(ignored: str) -> None:
    case = QuantizeCase((300, 300), seed=1)
    tensors = case.tensors(case.values())
    assert run(case, tensors, timing=Timing(late=True, ignore=ignored)).faults


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("quantize", "if (row < rows) st_global", "st_global"),
        ("quantize", "n / 2 * 8 >= rows", "n / 2 * 8 >= kTile"),
        ("quantize", "own.row < ticket.rows();", "own.row < kTile;"),
        ("quantize", "(first ^ i * 16)", "first"),
        ("quantize", "piece.token % 16 / 2 * 4", "piece.token % 16 / 2 * 4 % 8"),
        ("quantize", "scale * kUnit", "scale"),
        ("quantize", "-over, x[i + e]", "-1.f, x[i + e]"),
        ("quantize", "(i64)batch * heads.divisor + head", "(i64)batch * heads.divisor + tile"),
        ("quantize", "if (is_v(turn) || kStages == 1) cta_sync()", "if (kStages == 1) cta_sync()"),
        ("quantize", "0 : 2 * kStages - 3>", "0 : 2 * kStages - 1>"),
        ("quantize", "kMaxima + turn % 2 * (4 * kWarps)", "kMaxima"),
        ("quantize", "if (turn % kTicketBatch == 0) prepare(turn + kTicketBatch)", ""),
        ("quantize", "if (index(turn) >= p.k_begin) grid_dependency_wait();", ""),
        ("quantize", "if (index(turn) >= p.k_begin)", "if (index(turn) >= p.v_begin)"),
        ("quantize_means", "distance / 2 + (step", "(step"),
        ("quantize_means", "tree_sum<kWarps>(of)", "tree_sum<kWarps / 2>(of)"),
        ("quantize_means", "mask = 16; mask >= kLanes", "mask = 16; mask > kLanes"),
        ("quantize_means", "x = -x", "x = x"),
        ("quantize_means", "cta_sync();   // who still reads", ""),
    ],
)
def test_wrong_kernels_are_seen(kernel: str, old: str, new: str) -> None:
    case = QuantizeCase((300, 300), (64, 64), (2, 2), seed=1, blocks=1)
    tensors = case.tensors({role: 0.1 * x + 5 for role, x in case.values().items()})
    report = run(case, tensors, mutation=Mutation("", old, new), mutated=kernel)
    if not report.faults:
        with pytest.raises(AssertionError):
            assert_as_numpy(case, tensors)


def test_blocks_that_need_no_means_wait_for_them_all_the_same() -> None:
    """What comes behind the quantizer waits for it alone, and reads means as well."""
    case = QuantizeCase((1200, 100), blocks=4)  # of which two have K and V
    check(case)
    wrong = Mutation("", "grid_dependency_wait();   // whatever follows", "//")
    report = run(case, case.tensors(case.values()), mutation=wrong)
    assert set(report.faults) == {"end before the kernel before is done"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("inside ^ 2 * inside", "2 * inside"),
        ("first ^ parts;", "first ^ 1;"),
        ("first & 1 ?", "first < 0 ?"),
        ("first & 2 * distance ?", "first < 0 ?"),
        ("part < taking) sum_and", "true) sum_and"),
        ("norm = hadamard_norm(size) / hadamard_unit(kHeadDim)", "norm = 1.f"),
    ],
)
def test_wrong_rotations_are_seen(old: str, new: str) -> None:
    """At head dim 192: two parts of a row exchange columns, a third one has a block of its own, the fourth none."""
    case = QuantizeCase((130, 130), (192, 64), roles="q", seed=1)
    tensors = case.tensors(case.values())
    report = run(case, tensors, mutation=Mutation("device/float8.cuh", old, new), mutated="quantize")
    if not report.faults:
        with pytest.raises(AssertionError):
            assert_as_numpy(case, tensors)
