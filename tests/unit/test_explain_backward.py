"""`explain(..., backward=True)`, and the cost model behind it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import kernels
from cuflash.backward_cost import (
    BackwardSchedule,
    backward_bytes,
    backward_flops,
    backward_standard_bytes,
    rows_seeing,
)
from cuflash.cost import NOMINAL_DEVICES, Shape
from tests.unit.fake_gpu import FakeGpu
from tests.unit.test_explain import GIB, arrays, seen, shapes

TASKS = ["backward_rows", "backward", "backward_dq"]


# --- the cost model --------------------------------------------------------------------------------------------


def columns(shape: Shape) -> list[set[int]]:
    """The queries that see each key, one by one."""
    rows = [seen(shape, i) for i in range(shape.seqlen_q)]  # from key 0 on
    return [{i for i, keys in enumerate(rows) if j < len(keys)} for j in range(shape.seqlen_k)]


@given(shapes)
def test_rows_are_counted_as_one_would_by_hand(shape):
    assert [rows_seeing(shape, key) for key in range(shape.seqlen_k)] == [len(rows) for rows in columns(shape)]


def test_flops_are_five_products():
    shape = Shape(4, 16, 16, 4096, 4096, 128, 128)
    assert backward_flops(shape) == 2.5 * shape.flops
    uneven = dataclasses.replace(shape, head_dim_v=64, causal_offset=0)
    # S and dQ, dK of D; dP and dV of Dv.
    assert backward_flops(uneven) == 2 * 4 * 16 * uneven.pairs * (128 + 128 + 128 + 64 + 64)


def test_stored_matrices_pass_seven_times():
    shape = Shape(1, 1, 1, 1000, 500, 50, 30)
    assert backward_standard_bytes(shape) == 2 * (7 * 1000 * 500 + 1000 * (50 + 30 + 50) + 500 * (50 + 30 + 50 + 30))


schedules = st.builds(
    BackwardSchedule,
    block_n=st.integers(1, 32),
    section=st.integers(1, 8),
    resident=st.integers(1, 16),
    l2_bytes=st.sampled_from([-1, GIB]),
    padded_rows=st.integers(1, 1000),
    row_sums_bytes=st.just(64),
    cleared_rows=st.integers(0, 1000),
)


@given(shapes, schedules)
@settings(max_examples=200)
def test_traffic(shape, schedule):
    """The main kernel reads rows once with a large L2, and with none once for each wave of key tiles that they see."""
    rows, keys = shape.batch * shape.heads * shape.seqlen_q, shape.batch * shape.kv_heads * shape.seqlen_k
    kv_heads = shape.batch * shape.kv_heads
    sums = 64 * schedule.padded_rows
    found = backward_bytes(shape, schedule)
    assert found.rows == rows * (2 * 2 * shape.head_dim_v + 4) + 8 * schedule.padded_rows + 64 * schedule.cleared_rows
    assert found.dq == sums + 8 * schedule.padded_rows + 2 * rows * shape.head_dim
    waves = [list(range(shape.seqlen_k))]
    if schedule.l2_bytes < 0:
        step = schedule.block_n * max(1, schedule.resident // min(schedule.section, kv_heads))
        waves = [waves[0][first : first + step] for first in range(0, shape.seqlen_k, step)]
    by_key = columns(shape)
    passing = sum(len(set().union(*(by_key[key] for key in wave))) for wave in waves)
    dims = 2 * (shape.head_dim + shape.head_dim_v)
    assert found.main == 2 * keys * dims + shape.batch * shape.heads * passing * (dims + 8 + 2 * 64)


def test_an_l2_that_holds_one_section_less_a_byte_is_too_small():
    """Two key/value heads side by side, of two query heads each."""
    shape = Shape(1, 8, 4, 512, 1024, 64, 64)
    schedule = BackwardSchedule(64, 2, 4, 2 * 2 * 512 * (256 + 8 + 256), 8 * 512, 256, 8 * 512)
    fits = backward_bytes(shape, schedule).main
    misses = backward_bytes(shape, dataclasses.replace(schedule, l2_bytes=schedule.l2_bytes - 1)).main
    assert misses - fits == 7 * 8 * 512 * (256 + 8 + 512)  # 16 key tiles in waves of 2: eight times instead of once


# --- explain ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize("causal", [False, True])
def test_planned_kernels_are_the_registrys(arch, causal):
    e = cuflash.explain(*arrays(), causal=causal, arch=arch, backward=True)
    assert (e.refused, e.backend, e.function) == (None, "cuda", "attention_backward")
    tasks = TASKS[:2] if arch == "sm_90" else TASKS  # Hopper's main kernels make dQ as well
    assert [kernel.problem.task for kernel in e.kernels] == tasks and e.kernel is e.kernels[1]
    for kernel in e.kernels:
        assert kernel.config == kernels.select_config(kernel.problem) and kernel.config.reason
        assert kernel.symbol == kernels.symbol(kernel.problem, kernel.config)
        assert kernel.smem_bytes == kernel.config.smem_bytes(kernel.problem)
        assert kernel.problem.access_bytes == 16 and (kernel.cached, kernel.registers) == ("no", None)
    assert e.kernel.problem.mask == ("causal" if causal else "full")
    assert e.flops == 2.5 * cuflash.explain(*arrays(), causal=causal, arch=arch).flops
    assert e.hbm_bytes == sum(kernel.hbm_bytes for kernel in e.kernels)
    assert e.roofline_seconds == max(e.flops / e.device.peak_flops, e.hbm_bytes / e.device.bandwidth)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "causal"), [((4, 4), False), ((4, 2), True)])
def test_what_is_explained_is_what_is_launched(gpu: FakeGpu, deterministic, heads, causal):
    """Kernels, grids, target and workspace, for arrays on a GPU and planned for it."""
    gpu.multiprocessors = NOMINAL_DEVICES["sm_90"].multiprocessors  # on which grids depend
    rng = np.random.default_rng(0)
    shapes = {"q": heads[0], "k": heads[1], "v": heads[1]}
    host = {name: rng.standard_normal((2, 150, h, 64)).astype(np.float16) for name, h in shapes.items()}
    q, k, v = (gpu.array(x) for x in host.values())
    options = {"causal": causal, "deterministic": deterministic, "backward": True}
    explained = [cuflash.explain(q, k, v, **options), cuflash.explain(*host.values(), arch="sm_90", **options)]
    assert not gpu.launches and not gpu.compiled
    allocated = []
    gpu.cupy.cuda.set_allocator(lambda size: allocated.append(size) or gpu.allocate(size))
    out, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
    gpu.launches.clear()
    cuflash.attention_backward(out, q, k, v, out, lse, causal=causal, deterministic=deterministic)
    for e in explained:
        assert [(kernel.problem, kernel.config) for kernel in e.kernels] == [
            (launch.loaded.problem, launch.loaded.config) for launch in gpu.launches
        ]
        assert [kernel.grid for kernel in e.kernels] == [(launch.grid,) for launch in gpu.launches]
        assert 0 <= allocated[-1] - e.workspace_bytes <= 16
    assert cuflash.explain(q, k, v, **options).kernel.cached == "memory"


def test_the_order_follows_the_mask_and_the_mode():
    """One head at a time, but several side by side where tiles differ in length or take turns; 8 heads in all."""
    for options, section in (({}, 1), ({"causal": True}, 8), ({"deterministic": True}, 8)):
        schedule = cuflash.explain(*arrays(), arch="sm_80", backward=True, **options).kernel.schedule
        assert (schedule.section, schedule.block_n, schedule.resident) == (section, 64, 2 * 108)


def test_the_report_names_everything():
    text = str(cuflash.explain(*arrays(), causal=True, arch="sm_80", backward=True, deterministic=True))
    for word in (
        "cuflash.attention_backward\n", "cuflash_bwd_rows_d64_f16_full", "cuflash_bwd_sm80_d64_f16_causal",
        "cuflash_bwd_dq_d64_f16_full", "two blocks", "k_and_dk", "not compiled yet", "FLOP/byte", "A100", "roofline",
        "workspace", "KiB, shared by the kernels", "deterministic", " MiB + ",
    ):  # fmt: skip
        assert word in text
    assert not any(line != line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize(
    ("make", "options", "rule", "words"),
    [
        (lambda: arrays(kv_heads=3), {}, "ValueError", "multiple"),
        (lambda: arrays(dtype=np.float32), {"arch": "sm_90"}, "UnsupportedError", "float32"),
        (lambda: arrays(), {"deterministic": 2}, "TypeError", "deterministic is 2"),
        (lambda: arrays(), {"out": np.zeros((2, 256, 4, 63), np.float16)}, "ValueError", "out has shape"),
        (lambda: [np.broadcast_to(np.float16(0), (2**26, 64, 16, 8))] * 3, {"arch": "sm_80"}, "UnsupportedError",
         "up to 2147483647 tiles"),
    ],
)  # fmt: skip
def test_a_refused_call_names_the_rule(make, options, rule, words):
    e = cuflash.explain(*make(), backward=True, **options)
    assert e.rule == rule and words in e.refused and e.kernels == ()
    assert str(e).startswith("cuflash.attention_backward would refuse this call")


def test_backward_is_no_part_of_the_call():
    with pytest.raises(TypeError, match="backward is 'yes'"):
        cuflash.explain(*arrays(), backward="yes")


def test_narrow_rows_are_named():
    q, k, v = arrays(dim=64)
    scalar = cuflash.explain(q[..., ::2], k[..., ::2], v[..., ::2], arch="sm_80", backward=True)
    assert "scalar-load" in str(scalar) and {kernel.problem.access_bytes for kernel in scalar.kernels} == {2}
    assert "8-byte loads" in str(cuflash.explain(q[..., :60], k[..., :60], v, arch="sm_80", backward=True))
    out = np.zeros((2, 256, 4, 66), np.float16)[..., :64]
    assert "4-byte loads" in str(cuflash.explain(q, k, v, out=out, arch="sm_80", backward=True))
    assert "see no key" in str(cuflash.explain(q, k[:, :9], v[:, :9], causal=True, arch="sm_80", backward=True))


@pytest.mark.parametrize(("seq", "seq_k"), [(0, 5), (5, 0)])
def test_a_call_that_launches_nothing(seq, seq_k):
    q, k, v = np.zeros((1, seq, 2, 8), np.float16), *np.zeros((2, 1, seq_k, 2, 8), np.float16)
    e = cuflash.explain(q, k, v, arch="sm_90", backward=True)
    assert e.refused is None and e.kernels == () and e.workspace_bytes == 0 and "nothing is launched" in str(e)


def test_numpy_arrays_are_explained_for_the_cpu():
    e = cuflash.explain(*arrays(dtype=np.float32), causal=True, backward=True)
    assert (e.backend, e.kernels, e.device, e.roofline_seconds, e.hbm_bytes) == ("numpy", (), None, None, 0)
    assert e.flops and "NumPy" in str(e) and "traffic" not in str(e)


@pytest.mark.compile
def test_code_is_found_where_it_is(kernel_cache):
    call = dict(zip("qkv", arrays(dim=32), strict=True), arch="sm_80", backward=True)
    found = [cuflash.explain(**call, compile=c).kernels for c in (False, True, False)]
    for state, explained in zip(("no", "compiled", "disk"), found, strict=True):
        assert [kernel.cached for kernel in explained] == 3 * [state]
    assert all(kernel.registers and kernel.spill_bytes == 0 for kernel in found[2])
    assert str(cuflash.explain(**call)).count("in the disk cache") == 3


def test_a_family_that_is_asked_for_is_named_where_it_serves():
    """Kernels of one pass that are asked for are no part of an explanation of the other."""
    words = "backward_sm80 is asked for in place of"
    with kernels.use_family("backward_sm80"):
        assert words in str(cuflash.explain(*arrays(), arch="sm_90", backward=True))
        forward = cuflash.explain(*arrays(), arch="sm_90")
        assert forward.kernel.family == "forward_sm90" and "asked for" not in str(forward)
    with kernels.use_family("forward_sm80"):
        assert "forward_sm80 is asked for in place of" in str(cuflash.explain(*arrays(), arch="sm_90"))
        assert "asked for" not in str(cuflash.explain(*arrays(), arch="sm_90", backward=True))
