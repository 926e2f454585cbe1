"""The cost model of attention: operations, bytes of device memory, and the time that a device needs at least."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

DENSE_RATE = {"sm_80": 2048, "sm_86": 1024, "sm_89": 1024, "sm_90": 4096, "sm_100": 8192, "sm_120": 1024}
"""Dense fp16 or bf16 tensor operations with fp32 accumulation, per multiprocessor and clock.

From the peak rates in NVIDIA's architecture papers. GeForce cards of sm_86, sm_89 and sm_120 do half of this.
sm_90 counts ``wgmma``; ``mma.sync``, which the Ampere-style kernels use, reaches about 0.62 of that.
"""

L2_COPIES = {"sm_80": 2, "sm_90": 2, "sm_100": 2}
"""The L2 of the large chips is in two halves, each of which keeps what its own multiprocessors read. Others: one."""

LSE_BYTES = 4


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """What the cost model needs to know of a GPU; bandwidth in bytes a second, the L2 in bytes.

    With ``float8``, operations are those of 8-bit operands, of which tensor cores do twice as many.
    """

    name: str
    arch: str
    multiprocessors: int
    clock_hz: float
    bandwidth: float
    l2_bytes: int
    float8: bool = False

    @property
    def peak_flops(self) -> float:
        """Dense tensor operations a second at the highest clock."""
        return self.multiprocessors * self.clock_hz * DENSE_RATE[self.arch] * (2 if self.float8 else 1)


# Cards that stand for their architecture where a kernel is planned without a device (NVIDIA's data sheets).
NOMINAL_DEVICES = {
    model.arch: model
    for model in (
        DeviceModel("A100 SXM 80 GB", "sm_80", 108, 1.41e9, 2.039e12, 40 << 20),
        DeviceModel("RTX A6000", "sm_86", 84, 1.80e9, 0.768e12, 6 << 20),
        DeviceModel("L40S", "sm_89", 142, 2.52e9, 0.864e12, 96 << 20),
        DeviceModel("H200 SXM", "sm_90", 132, 1.98e9, 4.8e12, 60 << 20),
        DeviceModel("B200", "sm_100", 148, 1.965e9, 8.0e12, 126 << 20),
        DeviceModel("RTX PRO 6000 Blackwell", "sm_120", 188, 2.617e9, 1.792e12, 128 << 20),
    )
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one call.

    Parameters
    ----------
    causal_offset : int or None
        Query i sees keys j <= i + causal_offset; None without a mask.
    itemsize : int
        Bytes of an element of Q, K, V and the output.
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal_offset: int | None = None
    itemsize: int = 2

    def keys_seen(self, row: int) -> int:
        """How many keys query ``row`` sees."""
        if self.causal_offset is None:
            return self.seqlen_k
        return min(self.seqlen_k, max(0, row + 1 + self.causal_offset))

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head."""
        if self.causal_offset is None:
            return self.seqlen_q * self.seqlen_k
        first_seeing = min(self.seqlen_q, max(0, -self.causal_offset))
        first_seeing_all = min(self.seqlen_q, max(first_seeing, self.seqlen_k - 1 - self.causal_offset))
        growing = first_seeing_all - first_seeing
        rising = growing * (self.keys_seen(first_seeing) + self.keys_seen(first_seeing_all - 1)) // 2 if growing else 0
        return rising + (self.seqlen_q - first_seeing_all) * self.seqlen_k

    @property
    def flops(self) -> int:
        """2 (D + Dv) operations for each visible pair: half of the full count for a square causal problem."""
        return 2 * (self.head_dim + self.head_dim_v) * self.batch * self.heads * self.pairs

    @property
    def row_bytes(self) -> int:
        """A row of Q and of O, or of K and of V."""
        return (self.head_dim + self.head_dim_v) * self.itemsize

    @property
    def standard_bytes(self) -> int:
        """Traffic of attention that keeps the Nq x Nk matrix in memory.

        Q, K, V and O pass once, and the matrix four times: scores written, read by the softmax, probabilities
        written, read by the second product (Dao et al., FlashAttention, 2022, algorithm 0), all in the inputs' type.
        """
        rows = self.batch * self.heads * self.seqlen_q
        keys = self.batch * self.kv_heads * self.seqlen_k
        matrix = rows * self.seqlen_k
        return (rows + keys) * self.row_bytes + 4 * matrix * self.itemsize


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the thread blocks of a launch follow each other.

    Parameters
    ----------
    block_m : int
        Query rows of a thread block.
    section : int
        Query heads that run side by side before the next ones begin, the longest tiles of all of them first.
    in_step : int
        Thread blocks that run at once and read the same keys at about the same time: a wave.
    l2_bytes : int
    l2_copies : int
        How often the L2 holds what all multiprocessors read.
    """

    block_m: int
    section: int
    in_step: int
    l2_bytes: int
    l2_copies: int = 1


def fused_bytes(shape: Shape, schedule: Schedule, lse: bool) -> int:
    """Predicted device-memory traffic of the fused kernel.

    ``Q + O + LSE`` pass once::

        B Hq Nq (D + Dv) itemsize  (+ 4 B Hq Nq with LSE)

    K and V of a head pass once for the first wave of tiles that sees them. A later wave finds them in the L2 if what
    was touched since the wave before fits there, which is what one wave touches::

        K + V of the heads that share the wave, in each copy, and Q + O of the wave's tiles, in one

    and reads them again if not. Under a causal mask the tiles of a section's heads run side by side, so that all of
    the section's keys are touched that the wave's longest tile sees, fewer from wave to wave. Without one, tiles run
    head after head, and a wave that ends within a head leaves that head's keys to be read again by the next.

    The blocks of a wave are taken to stay in step. Where they drift apart, a key is read once for each group of them
    that comes too late for the L2. On an H200 that shows in one of 36 measured cases, of a Hopper kernel: 131072 keys,
    head dim 256, under a causal mask (1.2 and 1.4 times the prediction in two runs). The others are within 15 %
    (``bench/traffic.py``).
    """
    rows = shape.batch * shape.heads * shape.seqlen_q
    own = rows * shape.row_bytes + (rows * LSE_BYTES if lse else 0)
    if not rows or not shape.kv_heads:
        return own
    keys = _keys_in_turn(shape, schedule) if shape.causal_offset is None else _keys_side_by_side(shape, schedule)
    return own + round(shape.batch * shape.kv_heads * keys * shape.row_bytes)


def _keys_in_turn(shape: Shape, schedule: Schedule) -> float:
    """Keys that are read for each key/value head where tiles run head after head."""
    heads, in_step = shape.batch * shape.kv_heads, schedule.in_step
    tiles = -(-shape.seqlen_q // schedule.block_m) * (shape.heads // shape.kv_heads)
    # A wave and a head meet once for each wave that begins within the head, or with it, and once more at each head that
    # begins within a wave.
    aligned = heads // (in_step // gcd(tiles, in_step))
    meetings = heads * tiles // in_step + heads - aligned
    # A wave lies within a head, or it spans some and begins and ends within one.
    sharing = 1.0 if tiles >= in_step else 1 + in_step / tiles
    again = _share_read_again(shape, schedule, sharing * shape.seqlen_k)
    return shape.seqlen_k * (1 + (meetings / heads - 1) * again)


def _keys_side_by_side(shape: Shape, schedule: Schedule) -> float:
    """Keys that are read for each key/value head where the heads of a section run side by side, longest tiles first."""
    section = max(1, min(schedule.section, shape.batch * shape.heads))
    kv_heads = -(-section * shape.kv_heads // shape.heads)
    tiles, in_step = -(-shape.seqlen_q // schedule.block_m), max(schedule.in_step, section)
    total = 0.0
    for wave in range(-(-tiles * section // in_step)):
        longest = tiles - wave * in_step // section
        keys = shape.keys_seen(min(shape.seqlen_q, longest * schedule.block_m) - 1)
        total += keys if wave == 0 else keys * _share_read_again(shape, schedule, kv_heads * keys)
    return total


FADES = 0.25
"""The L2 forgets gradually, from this part below its size to this part above it: its sets do not fill evenly, nor are
all blocks of a wave at one key."""


def _share_read_again(shape: Shape, schedule: Schedule, keys: float) -> float:
    """What part of the keys of a wave the L2 does not hold any more, where waves touch ``keys`` of all their heads."""
    if schedule.l2_bytes <= 0:
        return 1.0
    own = schedule.in_step * schedule.block_m * shape.row_bytes
    filled = (schedule.l2_copies * keys * shape.row_bytes + own) / schedule.l2_bytes
    return min(1.0, max(0.0, (filled - (1 - FADES)) / (2 * FADES)))


def roofline_seconds(flops: float, hbm_bytes: float, device: DeviceModel) -> float:
    """The time below which the device cannot finish: by its tensor cores or by its memory, whichever takes longer."""
    return max(flops / device.peak_flops, hbm_bytes / device.bandwidth)
