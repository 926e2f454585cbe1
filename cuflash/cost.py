"""The cost model of attention: operations, bytes of device memory, and the time that a device needs at least."""

from __future__ import annotations

from dataclasses import dataclass

DENSE_RATE = {"sm_80": 2048, "sm_86": 1024, "sm_89": 1024, "sm_90": 4096, "sm_100": 8192, "sm_120": 1024}
"""Dense fp16 or bf16 tensor operations with fp32 accumulation, per multiprocessor and clock.

From the peak rates in NVIDIA's architecture papers. GeForce cards of sm_86, sm_89 and sm_120 do half of this.
sm_90 counts ``wgmma``; ``mma.sync``, which the Ampere-style kernels use, reaches about 0.62 of that.
"""

LSE_BYTES = 4


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """What the cost model needs to know of a GPU; bandwidth in bytes a second, the L2 in bytes."""

    name: str
    arch: str
    multiprocessors: int
    clock_hz: float
    bandwidth: float
    l2_bytes: int

    @property
    def peak_flops(self) -> float:
        """Dense fp16 tensor operations a second at the highest clock."""
        return self.multiprocessors * self.clock_hz * DENSE_RATE[self.arch]


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
    def kv_head_bytes(self) -> int:
        """K and V of one head, as far as any query sees them."""
        keys = self.keys_seen(self.seqlen_q - 1) if self.seqlen_q else 0
        return keys * (self.head_dim + self.head_dim_v) * self.itemsize

    @property
    def standard_bytes(self) -> int:
        """Traffic of attention that keeps the Nq x Nk matrix in memory.

        Q, K, V and O pass once, and the matrix four times: scores written, read by the softmax, probabilities
        written, read by the second product (Dao et al., FlashAttention, 2022, algorithm 0), all in the inputs' type.
        """
        rows = self.batch * self.heads * self.seqlen_q
        keys = self.batch * self.kv_heads * self.seqlen_k
        matrix = rows * self.seqlen_k
        return self.itemsize * ((rows + keys) * (self.head_dim + self.head_dim_v) + 4 * matrix)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the thread blocks of a launch follow each other.

    Parameters
    ----------
    block_m : int
        Query rows of a thread block.
    section : int
        Query heads that run side by side before the next ones begin.
    resident : int
        Thread blocks that the device runs at once.
    l2_bytes : int
        The cache that K and V are shared through.
    """

    block_m: int
    section: int
    resident: int
    l2_bytes: int


def fused_bytes(shape: Shape, schedule: Schedule, lse: bool) -> int:
    """Predicted device-memory traffic of the fused kernel.

    ``Q + O + LSE`` pass once::

        B Hq Nq (D + Dv) itemsize  (+ 4 B Hq Nq with LSE)

    K and V: the heads of a section run side by side, so all their query tiles read the same K and V::

        K + V of a section <= L2:  once                     B Hk Nk (D + Dv) itemsize
        else:                      once per wave of tiles   sum over waves of the keys that the wave's longest tile sees

    A wave is the ``resident / section`` query tiles per head that run at once, the longest first; keys that a
    causal mask hides from every tile of a wave are not read. L2 is taken as fully used and perfectly shared: the
    figure is a lower bound, which a measurement may exceed when blocks of a wave drift apart.
    """
    rows = shape.batch * shape.heads * shape.seqlen_q
    total = rows * (shape.head_dim + shape.head_dim_v) * shape.itemsize + (rows * LSE_BYTES if lse else 0)
    per_head = shape.kv_head_bytes
    section = max(1, min(schedule.section, shape.batch * shape.heads))
    group = shape.heads // shape.kv_heads if shape.kv_heads else 1
    if -(-section // group) * per_head > schedule.l2_bytes:
        per_head = _kv_bytes_by_waves(shape, schedule, section)
    return total + shape.batch * shape.kv_heads * per_head


def _kv_bytes_by_waves(shape: Shape, schedule: Schedule, section: int) -> int:
    tiles = -(-shape.seqlen_q // schedule.block_m)
    tiles_per_wave = max(1, schedule.resident // section)
    keys = 0
    for last_tile in range(tiles - 1, -1, -tiles_per_wave):
        keys += shape.keys_seen(min(shape.seqlen_q, (last_tile + 1) * schedule.block_m) - 1)
    return keys * (shape.head_dim + shape.head_dim_v) * shape.itemsize


def roofline_seconds(flops: float, hbm_bytes: float, device: DeviceModel) -> float:
    """The time below which the device cannot finish: by its tensor cores or by its memory, whichever takes longer."""
    return max(flops / device.peak_flops, hbm_bytes / device.bandwidth)
