"""One emulated attention call and everything that must hold for it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cuflash.config import KernelConfig
from cuflash.cpu import causal_offset
from cuflash.request import Causal
from tests.emulation.launch import Result, Timing, forward
from tests.emulation.tensors import Tensor, allocate, dense_strides, place
from tests.oracle import assert_accurate, assert_lse

BSHD, BHSD = (0, 2, 1, 3), (0, 1, 2, 3)
"""Memory order of the axes (batch, heads, seq, dim), outermost first."""


@dataclass(frozen=True)
class Case:
    """A call. `lengths` are (Nq, Nk), `heads` (Hq, Hk), `dims` (D, Dv).

    `rise` multiplies the keys, from 1 at the last one to `rise` at the first: since the kernel takes the last tile first, scores
    then grow from step to step. `order` and `pad` (elements added to each axis) make the strides.
    """

    lengths: tuple[int, int]
    dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (2, 1)
    batch: int = 1
    dtype: str = "bfloat16"
    causal: Causal = False
    scale: float | None = None
    arch: str = "sm_90"
    config: KernelConfig | None = None
    rise: float = 1.0
    order: tuple[int, ...] = BSHD
    pad: tuple[int, ...] = (0, 0, 0, 0)
    align: int = 16
    want_lse: bool = True

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads[0], self.lengths[0], self.dims[1]

    @property
    def seed(self) -> int:
        return zlib.crc32(repr(self).encode())

    def values(self) -> dict[str, np.ndarray]:
        """Normal random q, k and v as float64."""
        rng = np.random.default_rng(self.seed)
        (nq, nk), (hq, hk), (d, dv) = self.lengths, self.heads, self.dims
        shapes = {"q": (self.batch, hq, nq, d), "k": (self.batch, hk, nk, d), "v": (self.batch, hk, nk, dv)}
        values = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
        values["k"] *= np.geomspace(self.rise, 1.0, nk)[:, None]
        return values

    def inputs(self, values: dict[str, np.ndarray] | None = None) -> dict[str, Tensor]:
        return {
            name: place(x, self.dtype, strides=dense_strides(x.shape, self.order, self.pad), align=self.align)
            for name, x in (values or self.values()).items()
        }

    def outputs(self) -> dict[str, Tensor]:
        strides = dense_strides(self.out_shape, self.order, self.pad)
        out = allocate(self.out_shape, strides, self.dtype, align=self.align, output=True)
        if not self.want_lse:
            return {"out": out}
        shape = self.out_shape[:3]
        return {"out": out, "lse": allocate(shape, dense_strides(shape, (0, 1, 2)), "float32", align=4, output=True)}


def expected_reads(case: Case, config: KernelConfig) -> dict[str, int]:
    """Bytes that the schedule needs: every query once; for each query tile all key tiles in which its last row sees a key."""
    (nq, nk), (d, dv) = case.lengths, case.dims
    offset = causal_offset(case.causal, nq, nk)
    keys = 0
    for first in range(0, nq, config.block_m):
        seen = nk if not case.causal else max(0, min(nk, first + config.block_m + offset))
        keys += min(nk, -(-seen // config.block_n) * config.block_n)
    slices = case.batch * case.heads[0]
    return {"q": 2 * slices * nq * d, "k": 2 * slices * keys * d, "v": 2 * slices * keys * dv}


def run(case: Case, timing: Timing = Timing(), inputs: dict[str, Tensor] | None = None) -> tuple[dict[str, Tensor], Result]:
    tensors = {**(case.inputs() if inputs is None else inputs), **case.outputs()}
    result = forward(tensors, causal=case.causal, scale=case.scale, config=case.config, arch=case.arch, timing=timing)
    return tensors, result


def assert_clean(tensors: dict[str, Tensor], result: Result) -> None:
    """No fault, and every output element written (B-112)."""
    assert not result.report.faults, "\n".join(f"{k}: {n} times, first: {text}" for k, (n, text) in result.report.faults.items())
    for name in ("out", "lse"):
        if name in tensors:
            assert tensors[name].unwritten() == 0, f"{name}: {tensors[name].unwritten()} bytes were never written"


def assert_right(case: Case, tensors: dict[str, Tensor]) -> None:
    """Output and LSE against float64, held to the error of an ordinary implementation in the same dtype."""
    q, k, v = (tensors[name].view for name in ("q", "k", "v"))
    assert_accurate(tensors["out"].view, q, k, v, causal=case.causal, scale=case.scale)
    if case.want_lse:
        assert_lse(tensors["lse"].view, q, k, v, causal=case.causal, scale=case.scale)


def check(case: Case, inputs: dict[str, Tensor] | None = None, timings: Sequence[Timing] | None = None) -> Result:
    """Run a case with copies landing early and late, in two warp orders, and check all of it; returns the last run."""
    bits = set()
    for timing in timings or (Timing(late=False, seed=case.seed), Timing(late=True, seed=case.seed + 1)):
        tensors, result = run(case, timing, inputs)
        assert_clean(tensors, result)
        if inputs is None and result.report.counts:
            reads = {name: result.report.bytes_read[name] for name in ("q", "k", "v")}
            assert reads == expected_reads(case, result.config)
        bits.add(b"".join(np.ascontiguousarray(tensors[n].view).tobytes() for n in ("out", "lse") if n in tensors))
    assert len(bits) == 1, "the result depends on timing"
    assert_right(case, tensors)
    return result


def edge_lengths(config: KernelConfig) -> list[tuple[int, int]]:
    """(Nq, Nk) around the edges of a config's tiles."""
    m, n = config.block_m, config.block_n
    queries = (1, m - 1, m, m + 1, 2 * m)
    keys = (1, n - 1, n, n + 1, 2 * n - 1, 2 * n, 3 * n + 1)
    return [(nq, nk) for nq in queries for nk in keys]


def with_lengths(case: Case, lengths: tuple[int, int]) -> Case:
    return replace(case, lengths=lengths)
