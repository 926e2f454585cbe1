"""The cost model of the backward pass: as `cuflash.cost`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .backward_config import ROW_CONSTANT_BYTES
from .cost import LSE_BYTES, Shape

SUM_BYTES = 4
"""Of an element of the sums of dQ."""


def backward_flops(shape: Shape) -> int:
    """2 (3 D + 2 Dv) operations for each visible pair, in five products: 2.5 times the forward pass's where D = Dv."""
    return 2 * (3 * shape.head_dim + 2 * shape.head_dim_v) * shape.batch * shape.heads * shape.pairs


def backward_standard_bytes(shape: Shape) -> int:
    """Traffic of gradients by the Nq x Nk matrix in memory.

    Q, K, V and dO are read, dQ, dK and dV written, and a matrix passes seven times: P read for dV = P^T dO, dP = dO V^T
    written, P and dP read and dS written, dS read for dQ and for dK (Dao et al., FlashAttention, 2022, algorithm 3).
    """
    rows = shape.batch * shape.heads * shape.seqlen_q
    keys = shape.batch * shape.kv_heads * shape.seqlen_k
    of_rows, of_keys = 2 * shape.head_dim + shape.head_dim_v, 2 * (shape.head_dim + shape.head_dim_v)
    return shape.itemsize * (rows * of_rows + keys * of_keys + 7 * rows * shape.seqlen_k)


@dataclass(frozen=True, slots=True)
class BackwardSchedule:
    """How the thread blocks of the main kernel follow each other, and what they add to.

    Parameters
    ----------
    block_n : int
        Keys of a thread block.
    section : int
        Key/value heads that run side by side before the next ones begin.
    resident : int
        Thread blocks that the device runs at once.
    l2_bytes : int
        The cache that Q, dO and the sums of dQ are shared through.
    padded_rows : int
        Query rows of all heads, each padded to whole tiles.
    row_sums_bytes : int
        A row's sums of dQ.
    cleared_rows : int
        Of the padded rows, those whose sums the first kernel clears.
    """

    block_n: int
    section: int
    resident: int
    l2_bytes: int
    padded_rows: int
    row_sums_bytes: int
    cleared_rows: int


class BackwardBytes(NamedTuple):
    """Predicted device-memory traffic of each kernel, in the order of their launches; the main kernel may do both."""

    rows: int
    main: int
    dq: int


def backward_bytes(shape: Shape, schedule: BackwardSchedule) -> BackwardBytes:
    """Predicted device-memory traffic of the three kernels, each by itself.

    A main kernel that makes dQ has the traffic of two.

    With R query rows of all heads and P of them padded to tiles, itemsize left out::

        first:  dO, O, LSE read; row constants, cleared sums written    2 R Dv + 4 R; 8 P + sums of cleared rows
        main:   K, V read, dK, dV written                               2 B Hk Nk (D + Dv)
                Q, dO, row constants read, sums read and written        times (Q + dO + 8 + 2 sums) of the rows seen
        last:   sums, row constants read, dQ written                    sums + 8 P; R D

    ``times``: the heads of a section run side by side, so that all their key tiles see the same rows. If these fit the
    L2 together, they pass once; else once for each wave of key tiles, the first keys of which are seen by the most
    rows, and rows that see no key of a wave are left out. Sums that the main kernel clears itself stay in the L2 until
    it adds to them. A lower bound, as that of the forward pass; but what a small call leaves in the L2 for its next
    kernel is not deducted.
    """
    rows = shape.batch * shape.heads * shape.seqlen_q
    keys = shape.batch * shape.kv_heads * shape.seqlen_k
    sums, constants = schedule.padded_rows * schedule.row_sums_bytes, schedule.padded_rows * ROW_CONSTANT_BYTES
    cleared = schedule.cleared_rows * schedule.row_sums_bytes
    dims = (shape.head_dim + shape.head_dim_v) * shape.itemsize
    per_row = dims + ROW_CONSTANT_BYTES + 2 * schedule.row_sums_bytes
    return BackwardBytes(
        rows=rows * (2 * shape.head_dim_v * shape.itemsize + LSE_BYTES) + constants + cleared,
        main=2 * keys * dims + shape.batch * shape.heads * _rows_passing(shape, schedule) * per_row,
        dq=sums + constants + rows * shape.head_dim * shape.itemsize,
    )


def _rows_passing(shape: Shape, schedule: BackwardSchedule) -> int:
    """Query rows of a head that the main kernel reads, as often as it reads them."""
    group = shape.heads // shape.kv_heads if shape.kv_heads else 1
    section = max(1, min(schedule.section, shape.batch * shape.kv_heads))
    dims = (shape.head_dim + shape.head_dim_v) * shape.itemsize
    held = section * group * rows_seeing(shape, 0) * (dims + ROW_CONSTANT_BYTES + schedule.row_sums_bytes)
    if held <= schedule.l2_bytes:
        return rows_seeing(shape, 0)
    keys_per_wave = schedule.block_n * max(1, schedule.resident // section)
    return sum(rows_seeing(shape, key) for key in range(0, shape.seqlen_k, keys_per_wave))


def rows_seeing(shape: Shape, key: int) -> int:
    """How many queries see a key."""
    hidden = 0 if shape.causal_offset is None else min(shape.seqlen_q, max(0, key - shape.causal_offset))
    return shape.seqlen_q - hidden
