"""The kernel that prepares 8-bit arrays of the caller: the rendered text, executed on the CPU by instruction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuflash import kernels, prepare_plan
from cuflash.float8_arrays import Float8Arrays, check_arrays
from cuflash.fp8_layout import ROLES, TILE, by_head, image_shape, pack_image, padded, tiles
from tests.emulation.build import compiler
from tests.emulation.launch import EARLY, Report, Timing, emulator_for
from tests.emulation.tensors import Tensor, allocate, dense_strides, place
from tests.mutation import Mutation

pytestmark = pytest.mark.skipif(compiler() is None, reason="the CPU emulation needs g++")


@dataclass(frozen=True)
class Case:
    """A call: `lengths` and `heads` of Q and of K and V, `dims` D and Dv.

    `pad`: bytes between rows and so on, in the order of the layout; `align`: what addresses are multiples of;
    `steps`: the strides on the last axis, of Q, K and V; `scales`: numbers, or how many axes the arrays have.
    """

    lengths: tuple[int, int]
    dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (1, 1)
    batch: int = 1
    layout: str = "bshd"
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    align: int = 16
    steps: tuple[int, int, int] = (1, 1, 1)
    scales: tuple[Any, Any, Any] = (None, None, None)
    arch: str = "sm_90"

    def shape(self, role: str) -> tuple[int, int, int, int]:
        seq, heads = (x[role != "q"] for x in (self.lengths, self.heads))
        dim = self.dims[role == "v"]
        return (self.batch, seq, heads, dim) if self.layout == "bshd" else (self.batch, heads, seq, dim)

    def sizes(self, role: str) -> tuple[int, int, int, int]:
        batch, seq, heads, dim = (
            self.shape(role)[i] for i in ((0, 1, 2, 3) if self.layout == "bshd" else (0, 2, 1, 3))
        )
        return batch, seq, heads, dim

    def inputs(self, random: int = 0) -> dict[str, Tensor]:
        """Codes of every kind, and arrays of scales."""
        rng, found = np.random.default_rng(random), {}
        for role, step, scale in zip(ROLES, self.steps, self.scales, strict=True):
            shape, (batch, seq, heads, _) = self.shape(role), self.sizes(role)
            strides = dense_strides((*shape[:3], shape[3] * step), (0, 1, 2, 3), self.pad)
            strides = (*strides[:3], step)
            found[role] = place(rng.integers(0, 256, shape), "uint8", strides=strides, align=self.align)
            if isinstance(scale, str):
                extents = (batch, heads, tiles(seq))[: int(scale)]
                strides = dense_strides(extents, range(len(extents))[::-1])  # of any order
                found[f"{role}_scale"] = place(rng.uniform(0.1, 3, extents), "float32", strides=strides, align=4)
        return found

    def arrays(self, inputs: Mapping[str, Tensor]) -> Float8Arrays:
        codes = {role: inputs[role].view.view(ml_dtypes.float8_e4m3fn) for role in ROLES}
        given = dict(zip(ROLES, self.scales, strict=True))
        scales = {r: inputs[f"{r}_scale"].view if isinstance(given[r], str) else given[r] for r in ROLES}
        return check_arrays(codes, scales, self.layout)


def run(
    case: Case, inputs: dict[str, Tensor], *, timing: Timing = EARLY, mutation: Mutation | None = None
) -> tuple[Report, dict[str, Tensor]]:
    """One call in the emulator, by the product's own plan; its faults and outputs."""
    arrays, report = case.arrays(inputs), Report()
    plan = prepare_plan.plan_with(
        arrays, case.arch, lambda problem: mock.Mock(problem=problem, config=kernels.select_config(problem))
    )
    (launch,) = plan.launches
    problem, config = launch.loaded.problem, launch.loaded.config
    outputs = {}
    for name, size in prepare_plan.parts(arrays).items():
        dtype = "float32" if name.endswith("scales") else "uint8"
        shape = (size // 4 if dtype == "float32" else size,)
        outputs[name] = allocate(shape, (1,), dtype, align=16, output=True)
    emulator = emulator_for(problem, config, mutation)
    block = bytearray(launch.params.size)
    given = {name: x.address for name, x in inputs.items()}
    assert given.items() <= prepare_plan.addresses(arrays).items()
    launch.pack_into(block, prepare_plan.addresses(arrays) | {name: x.address for name, x in outputs.items()})
    grid = launch.blocks, 1, 1
    emulator.launch(
        bytes(block), grid, config.threads, config.smem_bytes(problem), inputs | outputs, report, timing=timing
    )
    return report, outputs


def assert_right(case: Case, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
    """Every bit of every output."""
    for role, scale in zip(ROLES, case.scales, strict=True):
        batch, seq, heads, dim = case.sizes(role)
        shape = (batch, heads, tiles(seq))
        expected = np.float32(1 if scale is None else scale) if not isinstance(scale, str) else None
        if expected is None:
            view = inputs[f"{role}_scale"].view
            expected = view.reshape(view.shape + (1,) * (3 - view.ndim))
        found = outputs[f"{role}_scales"]
        np.testing.assert_array_equal(found.view.reshape(shape), np.broadcast_to(expected, shape), err_msg=role)
        assert found.unwritten() == 0
        if f"{role}_payload" not in outputs:
            continue
        payload, codes = outputs[f"{role}_payload"], inputs[role].view
        assert payload.unwritten() == 0, role
        if role == "v":
            whole = np.zeros((batch, heads, tiles(seq) * TILE, padded(dim)), np.uint8)
            whole[:, :, :seq, :dim] = codes.transpose(by_head(case.layout))
            right = pack_image(whole.reshape(batch, heads, tiles(seq), TILE, padded(dim)))
            assert right.shape == image_shape(batch, heads, seq, dim)
        else:
            right = np.pad(codes, [(0, 0)] * 3 + [(0, -dim % 16)])
        np.testing.assert_array_equal(payload.view, right.reshape(-1), err_msg=role)


def check(case: Case, random: int = 0) -> tuple[Report, dict[str, Tensor]]:
    """Run a case in two warp orders, and check all of it."""
    for timing in (Timing(late=False, seed=1), Timing(late=True, seed=2)):
        inputs = case.inputs(random)
        report, outputs = run(case, inputs, timing=timing)
        assert not report.faults, str(report)
        assert_right(case, inputs, outputs)
    return report, outputs


# ---- shapes


@pytest.mark.parametrize("length", [1, 8, 16, 17, 127, 128, 129, 300])
def test_lengths(length: int) -> None:
    """Around every edge of tiles and of the image's units; Q and K as they are, and copied."""
    for pad in ((0, 0, 0, 0), (0, 4, 4, 4)):
        check(Case((length, 301 - length), (48, 64), pad=pad))


@pytest.mark.parametrize(
    "dims",
    [(1, 1), (2, 16), (15, 33), (16, 128), (31, 48), (40, 72), (64, 256), (80, 80), (96, 112), (130, 160), (192, 192),
     (200, 17), (255, 255), (256, 240)],
    ids=str,
)  # fmt: skip
def test_head_dims(dims: tuple[int, int]) -> None:
    report, outputs = check(Case((33, 140), dims))
    # What TMA can take stays where it is, and nobody reads it.
    assert ("q_payload" in outputs) == ("k_payload" in outputs) == (dims[0] % 16 != 0)
    assert (report.bytes_read.get("q", 0) == 0) == (dims[0] % 16 == 0)
    assert report.bytes_read["v"] == 140 * dims[1]


@pytest.mark.parametrize("access_bytes", [16, 8, 4, 2, 1])
def test_access_widths(access_bytes: int) -> None:
    """Rows that begin at multiples of a width and no more; two bytes are taken one by one."""
    pad = (0, 0, 0, access_bytes % 16)
    case = Case((70, 135), (32, 64), (2, 1), pad=pad, align=access_bytes)
    arrays = case.arrays(case.inputs())
    assert arrays.access_bytes == (1 if access_bytes == 2 else access_bytes)
    assert arrays.copied == (() if access_bytes == 16 else ("q", "k"))
    check(case)


@pytest.mark.parametrize("steps", [(2, 1, 1), (1, 3, 1), (1, 1, 2)], ids=str)
def test_strides_on_the_last_axis(steps: tuple[int, int, int]) -> None:
    check(Case((70, 135), (32, 64), (2, 1), steps=steps))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("pad", [(0, 0, 0, 0), (48, 32, 16, 16), (3, 0, 0, 4)], ids=str)
def test_heads_and_layouts(layout: str, pad: tuple[int, int, int, int]) -> None:
    check(Case((270, 140), (32, 64), (6, 2), batch=2, layout=layout, pad=pad, scales=(0.5, 2.0, 1e-3)))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_targets(arch: str) -> None:
    check(Case((150, 300), (33, 80), arch=arch))


# ---- scales


@pytest.mark.parametrize("scales", ["012", "120", "201", "333"])
def test_scales(scales: str) -> None:
    """Of none, two and three axes, in any order of memory."""
    axes = {"0": "0", "1": "2", "2": "3", "3": 0.25}
    check(Case((300, 500), (16, 16), (6, 2), batch=3, scales=tuple(axes[each] for each in scales)))  # type: ignore[arg-type]


def test_many_scales_for_few_tiles() -> None:
    """More of Q than the blocks that K and V have would write in a turn."""
    check(Case((128 * 70, 5), (16, 16), (16, 1), scales=("3", None, "0")))


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, 1e-39, 2.0**120])
def test_what_is_no_scale_becomes_nan(bad: float) -> None:
    case = Case((300, 300), (16, 16), (2, 2), scales=("3", "2", "3"))
    inputs = case.inputs()
    arrays = case.arrays(inputs)  # on a GPU nobody looks at the numbers
    for role in ROLES:
        inputs[f"{role}_scale"].view[0, 1] = bad
    with mock.patch.object(Case, "arrays", return_value=arrays):
        report, outputs = run(case, inputs)
    assert not report.faults
    for role in ROLES:
        found = outputs[f"{role}_scales"].view.reshape(2, 3)
        assert np.isnan(found[1]).all() and np.isfinite(found[0]).all()


@given(
    random=st.integers(0, 2**32 - 1),
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    dims=st.sampled_from([(64, 64), (24, 40), (128, 128), (100, 256), (7, 9)]),
    layout=st.sampled_from(["bshd", "bhsd"]),
    pad=st.tuples(*[st.sampled_from([0, 1, 4, 16])] * 4),
    align=st.sampled_from([1, 2, 4, 8, 16]),
    steps=st.tuples(*[st.sampled_from([1, 1, 2])] * 3),
    scales=st.tuples(*[st.sampled_from([None, 3.5, "0", "2", "3"])] * 3),
)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_anything(random: int, **options: Any) -> None:
    check(Case(**options), random)


# ---- what must be seen


def test_the_emulator_sees_a_missing_barrier() -> None:
    case = Case((300, 300))
    assert run(case, case.inputs(), timing=Timing(late=True, ignore="no_block_barrier"))[0].faults


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("token < rows", "true"),
        ("if (row < rows) st_global", "st_global"),
        ("kDim - column", "kUnit"),
        ("0x5140)", "0x1540)"),
        ("(unit ^ (column & 7)) * kUnit", "unit * kUnit"),
        ("turn(column / kUnit)", "turn(column)"),
        ("+ n % 2 + n / 2 * 8", "+ n"),
        ("+ column * from.dim_stride", "+ column"),
        ("tile * tile_stride", "batch * tile_stride"),
        ("scale >= 0x1p-126f", "scale >= 0.5f"),
        ("p.k_tiles.divisor + tile.tile", "p.q_tiles.divisor + tile.tile"),
        ("head * head_stride + tile", "head + tile"),
    ],
)
def test_wrong_kernels_are_seen(old: str, new: str) -> None:
    case = Case((300, 200), (33, 70), (4, 2), batch=2, steps=(2, 2, 2), scales=("3", "2", 0.3))
    inputs = case.inputs()
    report, outputs = run(case, inputs, mutation=Mutation("", old, new))
    if not report.faults:
        with pytest.raises(AssertionError):
            assert_right(case, inputs, outputs)


def test_wide_accesses_of_the_wrong_kernel_are_seen() -> None:
    case = replace(Case((300, 200), (64, 64)), pad=(0, 0, 0, 4))
    with mock.patch.object(Float8Arrays, "access_bytes", 8):
        assert run(case, case.inputs())[0].faults
