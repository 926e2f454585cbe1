"""Attention on the CPU: blocked online softmax on NumPy arrays, the backend of machines without a GPU.

The method is that of FlashAttention-2 (Dao 2023): scores exist one tile at a time, beside a running maximum and a
running sum for each row, so that memory is O(N). Matrix products go to NumPy's BLAS, which brings its own threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from .request import Causal

__all__ = [
    "Array",
    "Block",
    "Scratch",
    "Tiling",
    "attention_cpu",
    "by_query",
    "causal_offset",
    "compute_dtype",
    "gather_rows",
    "hidden_keys",
    "products",
    "scores",
    "weigh",
]

Array: TypeAlias = "np.ndarray[Any, Any]"

TILE_ROWS = 512
TILE_KEYS = 1024
"""A tile of scores is 2 MiB in fp32: it stays near the core for the five passes over it, and each matrix product is
large enough for BLAS and its threads. From 256 x 512 to 1024 x 1024 the time is the same within 5 %."""
VECTOR_ROWS = 32
"""From this many rows on, a tile's rows are the fast axis in memory."""
TILE_ELEMENTS = 1 << 20
"""Small heads are taken together until the scores, K and V of a step fill this many elements."""


def attention_cpu(
    q: Array, k: Array, v: Array, *, causal: Causal, scale: float, out: Array, lse: Array | None = None
) -> None:
    """Write softmax(scale * Q K^T + mask) V into `out`, and the log-sum-exp of the masked scores into `lse`.

    Arguments are taken as checked: `cuflash.attention` is the door.

    Parameters
    ----------
    q : array (B, Hq, Nq, D)
    k : array (B, Hk, Nk, D)
    v : array (B, Hk, Nk, Dv)
        Views of any strides; Hq is a multiple of Hk. float16, bfloat16 and float32 are computed in float32 without
        rounding the probabilities, float64 in float64.
    causal : False, "bottom_right" or "top_left"
    scale : float
        Any finite value.
    out : array (B, Hq, Nq, Dv)
        Shares no memory with the inputs.
    lse : array (B, Hq, Nq), optional
        Natural logarithm.

    Notes
    -----
    Rows that see no key, or only scores of -inf, give 0 and an LSE of -inf. A NaN reaches exactly the rows that see it.
    """
    if 0 in q.shape[:3]:
        return
    offset = causal_offset(causal, q.shape[2], k.shape[2])
    call = _Call(q, k, v, scale, offset, Scratch(compute_dtype(q.dtype, scale)), out, lse)
    with np.errstate(all="ignore"):  # infinities and NaNs are values here, and quiet ones
        for block in call.blocks():
            _attend(call, block)


def causal_offset(causal: Causal, seqlen_q: int, seqlen_k: int) -> int:
    """The offset of the rule "query i sees key j if j <= i + offset"; without a mask every query sees every key."""
    if causal == "top_left":
        return 0
    return seqlen_k - seqlen_q if causal else seqlen_k


def compute_dtype(dtype: np.dtype[Any], scale: float) -> np.dtype[Any]:
    """float32, or float64 for float64 inputs and for a scale that would take float32 near its limits."""
    extreme = scale != 0 and not 2.0**-64 < abs(scale) < 2.0**64
    return np.dtype(np.float64 if dtype == np.float64 or extreme else np.float32)


class Scratch:
    """Named working arrays that are allocated once and reshaped for every tile."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._arrays: dict[str, Array] = {}

    def empty(self, name: str, shape: tuple[int, ...]) -> Array:
        size = math.prod(shape)
        array = self._arrays.get(name)
        if array is None or array.size < size:
            array = self._arrays[name] = np.empty(size, self.dtype)
        return array[:size].reshape(shape)

    def full(self, name: str, shape: tuple[int, ...], value: float) -> Array:
        array = self.empty(name, shape)
        array.fill(value)
        return array

    def copy(self, name: str, source: Array) -> Array:
        """`source` in the dtype of the computation, contiguous: strides of any kind end here."""
        array = self.empty(name, source.shape)
        np.copyto(array, source, casting="unsafe")
        return array

    def operand(self, name: str, source: Array) -> Array:
        """`source` itself if BLAS can read its matrices in place, else a copy."""
        pitch, step = source.strides[-2:]
        rows_follow = step == source.itemsize and pitch >= step * source.shape[-1] and pitch % step == 0
        in_place = source.dtype == self.dtype and source.flags.aligned and rows_follow
        return source if in_place else self.copy(name, source)


@dataclass(frozen=True)
class Block:
    """What one pass over the keys computes: some batches, some key/value heads, some queries."""

    batches: slice
    heads: slice
    queries: slice


@dataclass(frozen=True)
class Tiling:
    """The inputs of a call, and the blocks and tiles that forward and backward cut them into.

    Both take the same ones: then a score has the same bits in both, and no rounding of a large one comes between it
    and the log-sum-exp.
    """

    q: Array
    k: Array
    v: Array
    scale: float
    offset: int
    scratch: Scratch

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return int(self.q.shape[1] // self.k.shape[1])

    @property
    def scales_queries(self) -> bool:
        """Whether the scale shrinks Q; one that would enlarge it, perhaps beyond all numbers, is for the scores."""
        return abs(self.scale) <= 1

    @property
    def rows(self) -> int:
        """Queries of a block, for each query head."""
        return min(int(self.q.shape[2]), max(1, TILE_ROWS // self.group))

    def heads(self) -> Iterator[tuple[slice, slice]]:
        """Batches and key/value heads that are taken together."""
        batch, heads, seqlen_k, head_dim = self.k.shape
        keys = min(seqlen_k, TILE_KEYS)
        per_head = max(1, keys * (self.rows * self.group + head_dim + self.v.shape[3]))
        heads_step = min(heads, max(1, TILE_ELEMENTS // per_head))
        batch_step = max(1, TILE_ELEMENTS // (per_head * heads))
        for b in range(0, batch, batch_step):
            for h in range(0, heads, heads_step):
                yield slice(b, min(b + batch_step, batch)), slice(h, min(h + heads_step, heads))

    def queries(self) -> Iterator[slice]:
        """The queries of each block of the same heads."""
        seqlen_q = self.q.shape[2]
        for m in range(0, seqlen_q, self.rows):
            yield slice(m, min(m + self.rows, seqlen_q))

    def blocks(self) -> Iterator[Block]:
        """All of the call."""
        for batches, heads in self.heads():
            for queries in self.queries():
                yield Block(batches, heads, queries)

    def query_heads(self, heads: slice) -> slice:
        """The query heads of some key/value heads."""
        return slice(heads.start * self.group, heads.stop * self.group)

    def key_tiles(self, queries: slice) -> Iterator[tuple[slice, bool]]:
        """The keys that some of these queries see, and whether a tile needs the mask."""
        seqlen_k = self.k.shape[2]
        for_all = min(max(queries.start + self.offset + 1, 0), seqlen_k)
        for_some = min(max(queries.stop + self.offset, 0), seqlen_k)
        for n in range(0, for_all, TILE_KEYS):
            yield slice(n, min(n + TILE_KEYS, for_all)), False
        for n in range(for_all, for_some, TILE_KEYS):
            yield slice(n, min(n + TILE_KEYS, for_some)), True


@dataclass(frozen=True)
class _Call(Tiling):
    out: Array
    lse: Array | None


def _attend(call: _Call, block: Block) -> None:
    """One block of queries against all its keys. Arrays are (batch, kv head, group * query, ...)."""
    scratch = call.scratch
    q = gather_rows(call, block, "q", call.q)
    if call.scales_queries:
        q *= call.scale
    batch, heads, rows, _ = q.shape
    column = (batch, heads, rows, 1)
    acc = scratch.full("acc", (batch, heads, rows, call.v.shape[3]), 0.0)
    row_sum = scratch.full("row_sum", column, 0.0)
    row_max = scratch.full("row_max", column, -np.inf)
    tile_sum, new_max, shift = (scratch.empty(name, column) for name in ("tile_sum", "new_max", "shift"))

    for keys, masked in call.key_tiles(block.queries):
        k = scratch.operand("k", call.k[block.batches, block.heads, keys])
        v = scratch.operand("v", call.v[block.batches, block.heads, keys])
        p = scores(call, q, k)
        hidden = hidden_keys(call, block.queries, keys) if masked else None
        if hidden is not None:
            np.copyto(by_query(p, call.group), -np.inf, where=hidden)

        np.max(p, axis=3, keepdims=True, out=new_max)
        np.maximum(row_max, new_max, out=new_max)
        np.copyto(shift, new_max)
        shift[new_max == -np.inf] = 0.0  # nothing to see so far: exp(-inf - 0) = 0, where -inf + inf would be NaN
        np.subtract(row_max, shift, out=row_max)
        correction = np.exp(row_max, out=row_max)
        np.subtract(p, shift, out=p)
        np.exp(p, out=p)
        np.matmul(p, scratch.full("ones", (k.shape[2], 1), 1.0), out=tile_sum)  # BLAS sums faster than np.sum

        row_sum *= correction
        row_sum += tile_sum
        acc *= correction
        acc += weigh(scratch, p, v, hidden, call.group)
        row_max, new_max = new_max, row_max

    _store(call, block, acc, row_max, row_sum)


def gather_rows(call: Tiling, block: Block, name: str, source: Array) -> Array:
    """The block's rows of Q or the like, copied: the query heads of a group are rows of one matrix."""
    x = call.scratch.copy(name, source[block.batches, call.query_heads(block.heads), block.queries])
    batch, _, rows, dim = x.shape
    return x.reshape(batch, -1, call.group * rows, dim)


def scores(call: Tiling, q: Array, k: Array) -> Array:
    """The scaled scores of rows of Q, which are scaled already if it is they that are."""
    p = products(call.scratch, "p", q, k)
    if not call.scales_queries:
        p *= call.scale
    return p


def products(scratch: Scratch, name: str, q: Array, k: Array) -> Array:
    """Q K^T, (batch, kv head, group * query, key).

    With many queries the keys come first in memory: then the maximum over the keys is one of whole vectors, where
    NumPy would otherwise pay 0.1 us for each row.
    """
    batch, heads, rows, _ = q.shape
    if rows < VECTOR_ROWS:
        return np.matmul(q, k.swapaxes(2, 3), out=scratch.empty(name, (batch, heads, rows, k.shape[2])))
    return np.matmul(k, q.swapaxes(2, 3), out=scratch.empty(name, (batch, heads, k.shape[2], rows))).swapaxes(2, 3)


def by_query(x: Array, group: int) -> Array:
    """(batch, kv head, group * query, n) seen as (batch, kv head, group, query, n)."""
    return x.reshape(*x.shape[:2], group, -1, x.shape[3])


def hidden_keys(call: Tiling, queries: slice, keys: slice) -> Array:
    """The causal mask of a tile, (queries, keys): True where a key lies behind what the query may see."""
    last = np.arange(queries.start, queries.stop) + call.offset
    return np.arange(keys.start, keys.stop) > last[:, None]


def weigh(scratch: Scratch, p: Array, v: Array, hidden: Array | None, group: int) -> Array:
    """P V. A NaN or infinity of V must not reach the rows that it is hidden from, although their P is 0 there."""
    product = scratch.empty("product", (*p.shape[:3], v.shape[3]))
    if hidden is None or np.isfinite(v).all():
        return np.matmul(p, v, out=product)
    sums, weights = by_query(product, group), by_query(p, group)
    for row, visible in enumerate(np.count_nonzero(~hidden, axis=1)):
        sums[:, :, :, row] = np.matmul(weights[:, :, :, row, :visible], v[:, :, :visible])
    return product


def _store(call: _Call, block: Block, acc: Array, row_max: Array, row_sum: Array) -> None:
    where = block.batches, call.query_heads(block.heads), block.queries
    shape = call.out[where].shape
    if call.lse is not None:
        call.lse[where] = (row_max + np.log(row_sum)).reshape(shape[:3])
    dead = row_sum == 0.0
    row_sum[dead] = 1.0
    acc /= row_sum
    np.copyto(acc, 0.0, where=dead)
    np.copyto(call.out[where], acc.reshape(shape), casting="unsafe")
