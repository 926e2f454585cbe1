"""One emulated attention call and everything that must hold for it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cuflash.config import KernelConfig
from cuflash.cpu import causal_offset
from cuflash.request import Causal
from tests.emulation.launch import EARLY, Result, Timing, forward
from tests.emulation.tensors import Tensor, allocate, dense_strides, place
from tests.mutation import Mutation
from tests.oracle import assert_accurate, assert_lse, oracle

BSHD, BHSD = (0, 2, 1, 3), (0, 1, 2, 3)
"""Memory order of the axes (batch, heads, seq, dim), outermost first."""


@dataclass(frozen=True)
class Case:
    """A call. `lengths` are (Nq, Nk), `heads` (Hq, Hk), `dims` (D, Dv).

    `order` (memory order of the axes), `pad` (elements added to each axis), `flip` (axes that run backwards) and
    `shared` (axes whose stride is 0; inputs only) make the strides. `rise` multiplies the keys, from 1 at the last one
    to `rise` at the first: since the kernel takes the last tile first, scores then grow from step to step.
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
    flip: tuple[bool, ...] = (False, False, False, False)
    shared: tuple[bool, ...] = (False, False, False, False)
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

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        dense = dense_strides(shape, self.order, self.pad)
        return tuple(-s if flip else s for s, flip in zip(dense, self.flip, strict=True))

    def inputs(self, values: dict[str, np.ndarray] | None = None) -> dict[str, Tensor]:
        tensors = {}
        for name, x in (values or self.values()).items():
            strides = [0 if shared else s for s, shared in zip(self.strides(x.shape), self.shared, strict=True)]
            tensors[name] = place(x, self.dtype, strides=strides, align=self.align)
        return tensors

    def outputs(self) -> dict[str, Tensor]:
        out = allocate(self.out_shape, self.strides(self.out_shape), self.dtype, align=self.align, output=True)
        if not self.want_lse:
            return {"out": out}
        shape = self.out_shape[:3]
        return {"out": out, "lse": allocate(shape, dense_strides(shape, (0, 1, 2)), "float32", align=4, output=True)}


def expected_reads(case: Case, config: KernelConfig) -> dict[str, int]:
    """Bytes that the schedule needs: each query once; for each query tile, the key tiles that its last row sees."""
    (nq, nk), (d, dv) = case.lengths, case.dims
    offset = causal_offset(case.causal, nq, nk)
    keys = 0
    for first in range(0, nq, config.block_m):
        seen = nk if not case.causal else max(0, min(nk, first + config.block_m + offset))
        keys += min(nk, -(-seen // config.block_n) * config.block_n)
    slices = case.batch * case.heads[0]
    return {"q": 2 * slices * nq * d, "k": 2 * slices * keys * d, "v": 2 * slices * keys * dv}


def run(
    case: Case, timing: Timing = EARLY, inputs: dict[str, Tensor] | None = None, mutation: Mutation | None = None
) -> tuple[dict[str, Tensor], Result]:
    tensors = {**(case.inputs() if inputs is None else inputs), **case.outputs()}
    options = {"causal": case.causal, "scale": case.scale, "config": case.config, "arch": case.arch}
    return tensors, forward(tensors, timing=timing, mutation=mutation, **options)


def assert_clean(tensors: dict[str, Tensor], result: Result) -> None:
    """No fault, and every output element written (B-112)."""
    assert not result.report.faults, str(result.report)
    for name in ("out", "lse"):
        if name in tensors:
            assert tensors[name].unwritten() == 0, f"{name}: {tensors[name].unwritten()} bytes were never written"


def assert_right(case: Case, tensors: dict[str, Tensor]) -> None:
    """Output and LSE against float64, held to the error of an ordinary implementation in the same dtype."""
    q, k, v = (tensors[name].view for name in ("q", "k", "v"))
    assert_accurate(tensors["out"].view, q, k, v, causal=case.causal, scale=case.scale)
    if case.want_lse and np.isfinite(k.astype(np.float32)).all():
        assert_lse(tensors["lse"].view, q, k, v, causal=case.causal, scale=case.scale)
    elif case.want_lse:  # no rounding bound follows from infinite scores
        _, expected = oracle(q, k, v, causal=case.causal, scale=case.scale)
        np.testing.assert_allclose(tensors["lse"].view, expected, atol=1e-5, equal_nan=True)


def check(case: Case, inputs: dict[str, Tensor] | None = None) -> Result:
    """Run a case with copies landing early and late, in two warp orders, and check all of it; returns the last run."""
    bits = set()
    for timing in (Timing(late=False, seed=case.seed), Timing(late=True, seed=case.seed + 1)):
        tensors, result = run(case, timing, inputs)
        assert_clean(tensors, result)
        if result.plan.launches:
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
