"""The emulator itself: its instructions against their definition, and a small kernel for every fault it must see."""

from __future__ import annotations

import re
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from cuflash.fp8 import E4M3, E5M2, FORMATS, Format
from cuflash.kernels import select_config
from cuflash.problem import AttentionProblem
from cuflash.render import Source, render, template_root
from tests.emulation.build import HERE, REPLACED, compiler
from tests.emulation.launch import EARLY, Coordinates, Emulator, Launch, Report, Timing
from tests.emulation.tensors import Tensor, allocate, place

pytestmark = pytest.mark.skipif(compiler() is None, reason="the CPU emulation needs g++")

SHARED_BYTES = 4096
SOFTMAX = "constexpr float kSlack = 0.f;\n"
"""What the softmax's header takes of a kernel."""
KERNEL = """
{before}
#include "device/float8.cuh"
struct Params {{ const unsigned char* in; unsigned char* out; }};
extern "C" __global__ void probe(const __grid_constant__ Params p) {{
    const int t = thread_index(), lane = t % 32, warp = t / 32;
    const u32 smem = smem_address(dynamic_smem());
    (void)lane; (void)warp; (void)smem; (void)p;
    {body}
}}
"""


def probe(body: str, given: Tensor, out: Tensor, threads: int = 64, timing: Timing = EARLY, before: str = "") -> Report:
    problem = AttentionProblem(64, 64, "float16", "full", 16, False, "sm_90")
    headers = render(problem, select_config(problem)).headers
    emulator = Emulator(Source(KERNEL.format(body=body, before=before), headers, "probe", (), "sm_90"))
    block = np.array([given.address, out.address], np.uint64).tobytes()
    one = (Coordinates * 1)(Coordinates(0, 0, 0))
    launch = Launch(block, one, 1, Coordinates(1, 1, 1), threads, SHARED_BYTES, 1_000_000, timing.seed, timing.late)
    report = Report()
    emulator.run(launch, {"in": given, "out": out}, report)
    return report


def words(values: np.ndarray) -> Tensor:
    """A tensor of these bytes, seen as float32."""
    flat = np.ascontiguousarray(values).view(np.float32).reshape(1, 1, 1, -1)
    return place(flat, "float32", order=(0, 1, 2, 3), align=16)


def blank(count: int) -> Tensor:
    return allocate((1, 1, 1, count), (count, count, count, 1), "float32", align=16, output=True)


def declared(header: str) -> set[str]:
    return set(re.findall(r"^DEVICE [\w ]+?[\s*&]+(\w+)\(", header, re.MULTILINE))


def test_every_instruction_is_emulated() -> None:
    real, emulated = ((root / REPLACED).read_text() for root in (template_root(), HERE))
    assert declared(real) - declared(emulated) == set()


@pytest.mark.parametrize("bf16", [True, False])
def test_rounding_to_elements(bf16: bool) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if bf16 else np.float16)
    rng = np.random.default_rng(0)
    every = np.arange(1 << 16, dtype=np.uint16).view(kind).astype(np.float32)
    every = every[np.isfinite(every)]
    with np.errstate(over="ignore"):
        ties = (every[:-1].astype(np.float64) + every[1:]).astype(np.float32) / 2
        small = rng.standard_normal(5000, np.float32) * 1e-6
        cases = np.concatenate([every, ties, small, [np.inf, -np.inf, 65519.9, 65520.0]])
    cases = np.resize(cases.astype(np.float32), -(-len(cases) // 64) * 64)
    given, out = words(cases), blank(len(cases))
    body = f"""
    const float* in = (const float*)p.in;
    for (int i = t; i < {len(cases)}; i += 64) st_global(p.out + 4 * i, pack_pair<{str(bf16).lower()}>(in[i], 0.f));"""
    assert not probe(body, given, out).faults
    with np.errstate(over="ignore"):
        expected = cases.astype(kind)
    assert np.array_equal(out.view.view(np.uint32).ravel().astype(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_rounding_to_float8(name: str) -> None:
    """Against ml_dtypes, which does not saturate; both by the instruction and by the arithmetic in its place."""
    kind = np.dtype(getattr(ml_dtypes, name))
    every = np.arange(1 << 8, dtype=np.uint8).view(kind).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    ties = (every[:-1] + every[1:]) / 2
    cases = np.concatenate(
        [every, ties, *(np.nextafter(ties, np.float32(to)) for to in (-np.inf, np.inf)), [np.nan, -0.0]]
    )
    beyond = np.float32([1e4, 1e30, np.inf]) * np.float32(100)
    cases = np.resize(np.concatenate([cases, beyond, -beyond]).astype(np.float32), 1024 + 512)
    given, out, other = words(cases), blank(len(cases)), blank(len(cases))
    e5m2 = str(name == "float8_e5m2").lower()
    for call, to in ((f"pack_float8x4<{e5m2}>(x, x, x, x)", out), (f"encode_float8<{e5m2}>(x) * 0x01010101u", other)):
        body = f"""
        for (int i = t; i < {len(cases)}; i += 64) {{
            const float x = ((const float*)p.in)[i];
            st_global(p.out + 4 * i, {call});
        }}"""
        assert not probe(body, given, to).faults
    clipped = np.clip(cases, every[0], every[-1]).astype(kind).view(np.uint8)
    expected = np.where(np.isnan(cases), 0x7F, clipped).astype(np.uint32) * 0x01010101
    for found in (out, other):
        np.testing.assert_array_equal(found.view.view(np.uint32).ravel(), expected)


COPY_IN = """
    for (int i = t; i < 96; i += 64) cp_async<16, false>(smem + 16 * i, p.in + 16 * i, 16, true);
    cp_async_commit(); cp_async_wait<0>(); cta_sync();"""


@pytest.mark.parametrize("timing", [Timing(False, 1), Timing(True, 2)], ids=["early", "late"])
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "f16"])
@pytest.mark.parametrize("transposed", [True, False], ids=["trans", "plain"])
def test_matrix_product(transposed: bool, bf16: bool, timing: Timing) -> None:
    """A B + A B, with A (16 x 16) and B (16 x 8) from shared memory by ldmatrix; B lies there by rows or by columns."""
    kind = np.dtype(ml_dtypes.bfloat16 if bf16 else np.float16)
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((16, 16)).astype(kind), rng.standard_normal((16, 8)).astype(kind)
    stored_a = a.reshape(16, 2, 8).transpose(1, 0, 2)  # panels of 16 bytes x 16 rows: no bank conflicts
    stored_b = np.zeros((4, 8, 8), kind)  # four 8x8 matrices of which two count
    stored_b[:2] = b.reshape(2, 8, 8) if transposed else b.reshape(2, 8, 8).transpose(0, 2, 1)
    memory = np.zeros(96 * 8, kind)
    memory[:256], memory[256:512] = stored_a.ravel(), stored_b.ravel()
    given, out = words(memory), blank(128)
    flag = str(bf16).lower()
    body = f"""{COPY_IN}
    if (warp == 0) {{
        u32 a[4], b[4]; float d[4];
        ldmatrix_x4(a, smem + lane * 16);
        {"ldmatrix_x4_trans" if transposed else "ldmatrix_x4"}(b, smem + 512 + lane * 16);
        mma_m16n8k16_first<{flag}>(d, a, b[0], b[1]);
        mma_m16n8k16<{flag}>(d, a, b[0], b[1]);
        for (int i = 0; i < 4; i++)
            st_global(p.out + 4 * (8 * (lane / 4 + 8 * (i / 2)) + 2 * (lane % 4) + i % 2), d[i]);
    }}"""
    assert not probe(body, given, out, timing=timing).faults
    assert out.unwritten() == 0
    expected = 2 * a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(out.view.reshape(16, 8), expected, atol=1e-5)


@pytest.mark.parametrize(
    "forms", list(product(FORMATS.values(), repeat=2)), ids=lambda forms: f"{forms[0].name}-{forms[1].name}"
)
def test_matrix_product_of_float8(forms: tuple[Format, Format]) -> None:
    """A B + A B of numbers of all sizes: each sum loses what lies 13 bits below its largest product, and no more."""
    rng = np.random.default_rng(3)
    finite = [np.isfinite(form.values()[:0x80]).sum() for form in forms]
    a, b = (
        rng.integers(0, count, (rows, 32)).astype(np.uint8) for rows, count in zip((16, 8), finite, strict=True)
    )  # b by columns
    a |= rng.integers(0, 2, a.shape, np.uint8) << 7
    memory = np.zeros(96 * 16, np.uint8)
    memory[:512] = a.reshape(16, 2, 16).transpose(1, 0, 2).ravel()
    memory[512:768] = b.reshape(8, 2, 16).transpose(1, 0, 2).ravel()
    flags = ", ".join(str(form.name == "float8_e5m2").lower() for form in forms)
    given, out = words(memory), blank(128)
    body = f"""{COPY_IN}
    if (warp == 0) {{
        u32 a[4], b[4]; float d[4];
        ldmatrix_x4(a, smem + lane * 16);
        ldmatrix_x4(b, smem + 512 + lane * 16);
        mma_m16n8k32_first<{flags}>(d, a, b[0], b[1]);
        mma_m16n8k32<{flags}>(d, a, b[0], b[1]);
        for (int i = 0; i < 4; i++)
            st_global(p.out + 4 * (8 * (lane / 4 + 8 * (i / 2)) + 2 * (lane % 4) + i % 2), d[i]);
    }}"""
    assert not probe(body, given, out).faults
    values_a, values_b = (form.values().astype(np.float64)[codes] for form, codes in zip(forms, (a, b), strict=True))
    products = values_a[:, None] * values_b
    error = np.abs(out.view.reshape(16, 8) - 2 * products.sum(axis=2))
    size = np.abs(np.concatenate([products, products.sum(axis=2, keepdims=True)], axis=2)).max(axis=2)
    assert (error <= 2 * 33 * 2.0**-13 * size).all() and (error > 2.0**-13 * size).any()


OPERANDS = {
    "<true, false>": (E4M3, 1.0),
    "<false, false>": (E4M3, 2.0**-8),
    "<true, true>": (E5M2, 1.0),
    "<false, true>": (E5M2, 1.0),
}
"""How codes become fp16: by an instruction or by arithmetic in its place; their format; the unit of the result."""


@pytest.mark.parametrize("kind", OPERANDS)
def test_float8_as_fp16(kind: str) -> None:
    """All codes, NaN and infinities among them."""
    form, unit = OPERANDS[kind]
    outs = blank(64), blank(64)
    for half, out in enumerate(outs):
        body = f"""
        using Operand = Fp16Operand{kind};
        const u32 codes = {128 * half} + t | t + {128 * half + 64} << 8;
        if (Operand::kUnit == {unit}f) st_global(p.out + 4 * t, Operand::expand(codes));"""
        header = '#include "device/products_fp8.cuh"\n'
        assert not probe(body, words(np.zeros(4, np.float32)), out, before=SOFTMAX + header).faults
    pairs = np.concatenate([out.view.view(np.float16).reshape(64, 2).T.ravel() for out in outs])
    np.testing.assert_array_equal(pairs.astype(np.float32), form.values() * np.float32(unit))
    assert (np.isnan(pairs) | (np.signbit(pairs) == (np.arange(256) >= 128))).all()


def test_votes_and_quads() -> None:
    out = blank(64)
    body = """
    const bool any = warp_any(t == 40);
    st_global(p.out + 4 * t, quad_sum((float)lane) + quad_max((float)lane) * 1000.f + (any ? 0.5f : 0.f));"""
    assert not probe(body, words(np.zeros(4, np.float32)), out).faults
    lane = np.arange(64) % 32
    quad = lane // 4
    expected = (16 * quad + 6) + (4 * quad + 3) * 1000 + np.where(np.arange(64) >= 32, 0.5, 0)
    assert np.array_equal(out.view.ravel(), expected)


PUT = "st_shared(smem + 4 * t, (u32)t);"
GET = "ld_shared_f32(smem + 4 * (63 - t));"
COPY = "cp_async<16, true>(smem + 16 * t, p.in + 16 * t, 16, true); cp_async_commit();"
FAULTS = {
    "shared access out of range": [
        "st_shared(smem + 4096 - 4 * 63 + 4 * t, 0u);",
        "cp_async<16, true>(smem + 4088 + 8, p.in, 16, t == 0);",
    ],
    "misaligned shared access": ["ld_shared_chunk(smem + 8);", "u32 r[4]; ldmatrix_x4(r, smem + 16 * lane + 8);"],
    "uninitialised shared read": [
        "ld_shared_f32(smem);",
        "st_shared(smem + 4 * t, 0u); cta_sync(); ld_shared_chunk(smem + 256);",
    ],
    "shared race": [
        f"{PUT} {GET}",  # no block barrier
        f"{PUT} warp_sync(); {GET}",
        f"{PUT} cta_sync(); {GET} {PUT.replace('(u32)t', '(u32)t + 100')}",  # overwritten too soon
        "st_shared(smem + 4 * t, (u32)t); ld_shared_f32(smem + 4 * (t ^ 1));",  # no warp barrier
        f"{COPY} cta_sync(); cp_async_wait<0>(); {GET}",  # wait and barrier the wrong way round
        f"{COPY} cp_async_wait<1>(); cta_sync(); ld_shared_chunk(smem + 16 * t);",  # waits for too little
        f"{COPY} {COPY} cp_async_wait<0>();",  # two copies to one place
        "st_shared(smem, (u32)t);",
        "if (t == 0) st_shared(smem, 7u); if (t == 1) ld_shared_f32(smem);",
        "if (warp == 0) { st_shared(smem, 7u); if (lane == 3) st_shared(smem, 8u); }",
    ],
    "global access out of range": [
        "ld_global_u16(p.in + 4096);",
        "ld_global_u16(p.in - 2);",
        "st_global(p.out + 252 + 4 * t, 1.f);",
        COPY.replace("p.in", "p.in + 3088"),  # the last one ends 16 bytes beyond
    ],
    "misaligned global access": [
        "cp_async<16, true>(smem, p.in + 8, 16, t == 0); cp_async_wait<0>();",
        "ld_global_u16(p.in + 1);",
    ],
    "store to an input": ["st_global((void*)p.in, (u32)t);"],
    "written twice": ["st_global(p.out, (u32)t);"],
    "ldmatrix bank conflict": [
        f"""for (int i = 0; i < 4; i++) {COPY.replace("smem", "smem + 1024 * i")}
        cp_async_wait<0>(); cta_sync(); u32 r[4]; ldmatrix_x4(r, smem + 128 * (lane % 8));"""
    ],
    "divergence": [
        "if (lane < 16) warp_any(true); else warp_sync();",
        "if (lane) cta_sync();",
        "if (lane == 5) quad_sum(1.f);",
    ],
    "deadlock": ["if (warp == 0) cta_sync();"],
    "copy in flight at the end": [COPY],
    "runaway": ["while (true) warp_sync();"],
    "cp.async size": ["cp_async<4, true>(smem + 4 * t, p.in, 5, true); cp_async_wait<0>();"],
}


@pytest.mark.parametrize(("kind", "body"), [(k, b) for k, bodies in FAULTS.items() for b in bodies])
def test_faults_are_seen(kind: str, body: str) -> None:
    given, out = words(np.zeros(1024, np.float32)), blank(64)
    report = probe(body, given, out)
    assert kind in report.faults, report


def test_gaps_between_elements_are_out_of_bounds() -> None:
    """B-059: a vector access that runs over a row's end is a fault even inside the allocation."""
    given = place(np.zeros((1, 1, 8, 24)), "float16", strides=(0, 0, 32, 1))
    out = allocate((1, 1, 8, 24), (512, 256, 32, 1), "float16", align=16, output=True)
    for body, kind in (
        ("cp_async<16, true>(smem, p.in + 48, 16, t == 0);", "global access between elements"),
        ("if (t == 0) st_global(p.out + 48, 0u);", "global access between elements"),
        ("if (t == 0) st_global(p.out + 512 - 16, 0u);", "global access out of range"),
    ):
        assert kind in probe(body, given, out).faults


ORDERED = [
    f"{PUT} cta_sync(); {GET}",
    f"{PUT} cta_sync(); {GET} cta_sync(); {PUT.replace('(u32)t', '(u32)t + 100')}",
    "st_shared(smem + 4 * t, (u32)t); warp_sync(); ld_shared_f32(smem + 4 * (t ^ 1));",
    f"{COPY} cp_async_wait<0>(); cta_sync(); {GET}",
    f"{COPY} {COPY.replace('smem', 'smem + 1024')} cp_async_wait<1>(); cta_sync(); {GET} cp_async_wait<0>();",
    f"{COPY.replace('p.in', 'p.in + 4096').replace(', 16, true', ', 0, true')} cp_async_wait<0>();",  # reads nothing
    "if (warp == 0) { st_shared(smem, 7u); ld_shared_f32(smem); }",  # all write the same, and read what each wrote
]


@pytest.mark.parametrize("body", ORDERED)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ordered_accesses_are_no_faults(body: str, seed: int) -> None:
    given, out = words(np.zeros(1024, np.float32)), blank(64)
    for late in (False, True):
        assert not probe(body, given, out, timing=Timing(late, seed)).faults


def test_late_copies_are_late() -> None:
    """What a missing wait does to the numbers: the copy has landed, or the memory still holds its poison."""
    given = words(np.full(1024, 5.0, np.float32))
    body = f"{COPY} st_global(p.out + 4 * t, ld_shared_f32(smem + 16 * t)); cp_async_wait<0>();"
    early, late = blank(64), blank(64)
    probe(body, given, early, timing=Timing(False))
    probe(body, given, late, timing=Timing(True))
    assert (early.view == 5.0).all() and np.isnan(late.view).all()


# ---- what the backward kernels use


def test_a_barrier_that_votes() -> None:
    """True for all threads if it is for one, in any warp; and a barrier: what was written before it can be read."""
    body = """
    st_shared_f32(smem + 4 * t, (float)t);
    const bool any = cta_sync_or(t == 37), none = cta_sync_or(false);
    st_global((float*)p.out + t, any && !none ? ld_shared_f32(smem + 4 * (63 - t)) : -1.f);
    """
    out = blank(64)
    assert not probe(body, words(np.zeros(4)), out).faults
    assert (out.view.ravel() == np.arange(64)[::-1]).all()


def test_only_some_threads_vote() -> None:
    report = probe("if (warp) cta_sync(); else cta_sync_or(true);", words(np.zeros(4)), blank(4))
    assert "divergence" in report.faults


@pytest.mark.parametrize("vector", ["true", "false"])
def test_fragments_are_added_and_read_back(vector: str) -> None:
    """Two warps add to the same 128 sums; a lane reads its own four again."""
    body = f"""
    const float c[4] = {{1.f * lane, 2.f * lane, 3.f * lane, 4.f * lane}};
    red_add_fragment<{vector}>((float*)p.out, lane, c);
    cta_sync();
    float sum[4];
    ld_global_fragment<{vector}>(sum, (const float*)p.out, lane);
    if (warp == 0) for (int e = 0; e < 4; e++) st_global((float*)p.out + 128 + 4 * lane + e, sum[e]);
    """
    out = blank(256)
    out.view[...] = 0
    assert not probe(body, words(np.zeros(4)), out).faults
    expected = 2.0 * np.arange(32)[:, None] * np.arange(1, 5)
    np.testing.assert_array_equal(out.view.ravel()[128:].reshape(32, 4), expected)
    assert out.view.ravel()[:128].sum() == expected.sum()


def test_sums_in_an_input() -> None:
    body = "const float c[4] = {}; red_add_fragment<true>((float*)p.in, lane, c);"
    assert "store to an input" in probe(body, words(np.zeros(128)), blank(4)).faults


def test_signals_are_stored_any_number_of_times() -> None:
    body = "if (t == 0) for (int i = 1; i < 4; i++) st_release_gpu((int*)p.out, i + ld_acquire_gpu((const int*)p.in));"
    out = blank(1)
    assert not probe(body, words(np.array([5, 0, 0, 0], np.int32)), out).faults
    assert out.view.view(np.int32).ravel()[0] == 8


def test_bytes_of_two_words() -> None:
    """Digits of a selector as `prmt` has them, the lowest first."""
    body = """
    const u32 both = permute_bytes(0x33221100u, 0x77665544u, t == 0 ? 0x7531u : t);
    if (t < 4) st_global((float*)p.out + t, bits_float(both));
    """
    out = blank(4)
    assert not probe(body, words(np.zeros(4)), out).faults
    np.testing.assert_array_equal(out.view.view(np.uint32).ravel(), [0x77553311, 0x11, 0x22, 0x33])


def test_a_maximum_that_keeps_nan() -> None:
    body = """
    const float nan = __builtin_nanf("");
    const float values[4] = {max_nan_f32(-2.f, 1.f), max_nan_f32(0.f, nan), max_nan_f32(nan, 0.f), max_f32(0.f, nan)};
    if (t < 4) st_global((float*)p.out + t, values[t]);
    """
    out = blank(4)
    assert not probe(body, words(np.zeros(4)), out).faults
    np.testing.assert_array_equal(out.view.ravel(), np.array([1, np.nan, np.nan, 0], np.float32))


def test_a_minimum_that_keeps_nan_and_pairs_taken_apart() -> None:
    body = """
    float low, high;
    unpack_pair<true>(0x3f80c000u, low, high);
    const float values[4] = {min_nan_f32(low, 0.f), min_nan_f32(0.f, __builtin_nanf("")), low, high};
    if (t < 4) st_global((float*)p.out + t, values[t]);
    """
    out = blank(4)
    assert not probe(body, words(np.zeros(4)), out).faults
    np.testing.assert_array_equal(out.view.ravel(), np.array([-2, np.nan, -2, 1], np.float32))
