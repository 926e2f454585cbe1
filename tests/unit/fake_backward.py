"""The kernels of the backward pass for `fake_gpu`: carried out by NumPy from a launch's parameters and memory alone.

The sums of dQ are in an order of their own, as those of the kernels are: padded rows of padded columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from cuflash.backward_config import HopperConfig, MainConfig
from cuflash.backward_plan import ROW_TILE, TURNS
from cuflash.request import LOG2_E

if TYPE_CHECKING:
    from tests.unit.fake_gpu import Launch


class _Memory:
    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> None:
        self.__array_interface__ = {
            "version": 3, "data": (address, False), "typestr": f"<u{item}", "shape": shape, "strides": strides,
        }  # fmt: skip


def _view(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: type | np.dtype) -> np.ndarray:
    dtype = np.dtype(dtype)
    return np.asarray(_Memory(address, shape, strides, dtype.itemsize)).view(dtype)


def _tensor(launch: Launch, name: str, batch: int, seq: int, heads: int) -> np.ndarray:
    """(batch, heads, seq, dim) of an operand, by the strides of the launch."""
    p, problem = launch.params, launch.loaded.problem
    dtype = ml_dtypes.bfloat16 if problem.dtype == "bfloat16" else np.float16
    dim = problem.head_dim if name in ("q", "k", "dq", "dk") else problem.head_dim_v
    if f"{name}_map" in p:
        made = p[f"{name}_map"]
        assert made.extents == (dim, seq, heads, batch) and made.dtype == problem.dtype
        assert made.box_rows == _box_rows(launch, name)
        seq_stride, head_stride, batch_stride = made.strides
        return _view(p[name], (batch, heads, seq, dim), (batch_stride, head_stride, seq_stride, 2), dtype)
    strides = {axis: 2 * p[f"{name}_{axis}_stride"] for axis in ("batch", "head", "seq", "dim")}
    if problem.access_bytes != 2:
        assert strides["dim"] == 2
        for value in (p[name], *(strides[a] for a in ("batch", "head", "seq")), 2 * dim):
            assert value % problem.access_bytes == 0, "an access that faults"
    return _view(p[name], (batch, heads, seq, dim), tuple(strides.values()), dtype)


def _box_rows(launch: Launch, name: str) -> int:
    """Rows that the Hopper kernels move at once: of Q and dO a tile, of K and V, too; dK and dV leave by 64 keys."""
    config = launch.loaded.config
    assert isinstance(config, HopperConfig)
    m, n = config.block_m, config.block_n
    return {"q": m, "dout": m, "k": n, "v": n, "dk": 64, "dv": 64}[name]


def _row_values(launch: Launch, name: str, shape: tuple[int, ...]) -> np.ndarray:
    strides = tuple(4 * launch.params[f"{name}_{axis}_stride"] for axis in ("batch", "head", "seq"))
    return _view(launch.params[name], shape, strides, np.float32)


def _workspace(launch: Launch, heads: int, padded: int) -> tuple[np.ndarray, np.ndarray]:
    """Row constants (heads of all batches, padded rows, 2), and sums of dQ (the same, padded columns)."""
    p, columns = launch.params, -(-launch.loaded.problem.head_dim // 16) * 16
    assert p["rows"] % 16 == 0 and p["dq_sums"] % 16 == 0
    rows = _view(p["rows"], (heads, padded, 2), (8 * padded, 8, 4), np.float32)
    return rows, _view(p["dq_sums"], (heads, padded, columns), (4 * columns * padded, 4 * columns, 4), np.float32)


def run_rows(launch: Launch) -> None:
    p = launch.params
    (_, _, tiles), (_, _, heads) = p["row_tiles"], p["heads"]
    batch_heads = launch.grid[0] // tiles
    assert launch.grid == (batch_heads * tiles, 1, 1)
    shape = (batch_heads // heads, heads, p["seqlen_q"])
    dout, out = (_tensor(launch, name, shape[0], shape[2], heads).astype(np.float64) for name in ("dout", "out"))
    lse = _row_values(launch, "lse", shape)
    delta = (dout * out).sum(axis=3) - (_row_values(launch, "dlse", shape) if p["dlse"] else 0)
    rows, sums = _workspace(launch, batch_heads, tiles * ROW_TILE)
    rows[...] = np.inf, 0
    live = ~np.isneginf(lse)
    made = np.where(live, lse * LOG2_E, np.inf), np.where(live, delta, 0)
    rows[:, : shape[2]] = np.stack(made, axis=-1).reshape(batch_heads, shape[2], 2)
    sums[...] = np.nan
    sums.reshape(-1, ROW_TILE, sums.shape[2])[: p["cleared_tiles"]] = 0
    if p["turns"]:
        _view(p["turns"], (launch.grid[0] * TURNS,), (4,), np.int32)[...] = 0
    if p["counted"]:
        _view(p["counts"], (p["counted"],), (4,), np.int32)[...] = 0


def run_main(launch: Launch) -> None:
    p, config = launch.params, launch.loaded.config
    assert isinstance(config, MainConfig)
    nq, nk, shares = p["seqlen_q"], p["seqlen_k"], _shares(launch)
    heads, group = p["heads"][2] // shares, p["group"] * shares
    batch = p["batch_heads"] // (heads * shares)
    assert p["heads_q"] == heads * group and p["batch_heads"] == batch * heads * shares
    assert p["m_tiles"] == -(-nq // config.block_m) and p["n_tiles"] == -(-nk // config.block_n)
    _check_order(launch, p["batch_heads"])
    q, dout = (_tensor(launch, name, batch, nq, p["heads_q"]).astype(np.float64) for name in ("q", "dout"))
    k, v = (_tensor(launch, name, batch, nk, heads).astype(np.float64) for name in ("k", "v"))
    dk, dv = (_tensor(launch, name, batch, nk, heads) for name in ("dk", "dv"))
    rows, sums = _workspace(launch, batch * p["heads_q"], p["m_tiles"] * config.block_m)
    cleared = p.get("cleared_heads", p["batch_heads"]) * p["group"]
    assert not sums[:cleared].any() and np.isnan(sums[cleared:]).all()
    sums[cleared:] = 0
    hidden = np.arange(nk) > np.arange(nq)[:, None] + p["causal_offset"]
    for b, h in np.ndindex(batch, heads):
        total_k, total_v = np.zeros(k.shape[2:]), np.zeros(v.shape[2:])
        for i in range(h * group, (h + 1) * group):
            lse, delta = rows[b * p["heads_q"] + i, :nq].astype(np.float64).T[..., None]
            weights = np.exp2(np.minimum(q[b, i] @ k[b, h].T * p["scale_log2"] - lse, 0))
            if launch.loaded.problem.mask == "causal":
                weights[hidden] = 0
            ds = weights * (dout[b, i] @ v[b, h].T - delta)
            total_v += weights.T @ dout[b, i]
            total_k += ds.T @ q[b, i]
            sums[b * p["heads_q"] + i, :nq, : k.shape[3]] += ds @ k[b, h]
        dk[b, h], dv[b, h] = p["scale"] * total_k, total_v
    if p.get("dq"):
        counts = _view(p["counts"], (p["first_cleared"] + 2 * p["batch_heads"] + 1,), (4,), np.int32)
        assert not counts[p["first_cleared"] :].any()
        _make_dq(launch, rows, sums, batch, p["heads_q"])


def _shares(launch: Launch) -> int:
    """Tiles that have some query heads each of the same keys; all counts are clear, and their sums are there."""
    p, config = launch.params, launch.loaded.config
    if not isinstance(config, HopperConfig):
        return 1
    shares: int = p["shares"][2]
    tiles = p["batch_heads"] // shares * p["n_tiles"] if shares > 1 else 0
    assert p["first_cleared"] == 1 + config.cluster * config.consumers * tiles
    counts = _view(p["counts"], (p["first_cleared"] + p["batch_heads"],), (4,), np.int32)
    assert not counts.any() and bool(p["kv_sums"]) == (shares > 1) and p["kv_sums"] % 16 == 0
    counts[0] = p["work_tiles"] + launch.grid[0] // config.cluster  # each learns once that there are no more
    if shares > 1:
        sums = _view(p["kv_sums"], (tiles * config.kv_sums(launch.loaded.problem),), (4,), np.float32)
        sums[...] = np.nan
    return shares


def _check_order(launch: Launch, heads: int) -> None:
    """Every key tile of every head is somebody's, by the kernel's own arithmetic."""
    p = launch.params
    section_tiles, section, last_section = (p[name][2] for name in ("section_tiles", "section", "last_section"))
    tiles, blocks = heads * p["n_tiles"], launch.grid[0]
    assert section_tiles == section * p["n_tiles"] and launch.grid[1:] == (1, 1)
    assert p.get("work_tiles", blocks) == tiles >= blocks // launch.loaded.config.cluster
    seen = set()
    for index in range(tiles):
        first, within = index // section_tiles * section, index % section_tiles
        row, column = divmod(within, section if first + section <= heads else last_section)
        seen.add((first + column, row))
    assert seen == {(head, tile) for head in range(heads) for tile in range(p["n_tiles"])}


def run_dq(launch: Launch) -> None:
    p = launch.params
    (_, _, tiles), (_, _, heads) = p["row_tiles"], p["heads"]
    padded = tiles * ROW_TILE
    batch_heads = p["row_blocks"] * 16 // padded
    assert launch.grid == (-(-p["row_blocks"] // (launch.block[0] // 32)), 1, 1)
    rows, sums = _workspace(launch, batch_heads, padded)
    _make_dq(launch, rows, sums, batch_heads // heads, heads)


def _make_dq(launch: Launch, rows: np.ndarray, sums: np.ndarray, batch: int, heads: int) -> None:
    """From the sums, by the last kernel or a Hopper main kernel; rows that see nothing are 0 whatever lies there."""
    seqlen, scale = launch.params["seqlen_q"], launch.params["scale"]
    dq = _tensor(launch, "dq", batch, seqlen, heads)
    values = np.where(np.isposinf(rows[:, :seqlen, :1]), 0, scale * sums[:, :seqlen, : dq.shape[3]])
    dq[...] = values.reshape(dq.shape)


RUNNERS = {"backward_rows": run_rows, "backward": run_main, "backward_dq": run_dq}
