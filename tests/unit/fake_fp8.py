"""Attention on 8-bit operands for `fake_gpu`: carried out from a launch's parameters and memory alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from cuflash.fp8 import FORMATS, Format
from cuflash.fp8_layout import TILE, pack_image, padded, tiles, unpack_image
from cuflash.request import LOG2_E

if TYPE_CHECKING:
    from tests.unit.fake_gpu import Launch, WorkTile


def _view(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: type) -> np.ndarray:
    from tests.unit.fake_gpu import memory_at

    return memory_at(address, shape, strides, dtype)


def _dense(address: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    assert address % 16 == 0
    return _view(address, shape, np.empty(shape, dtype).strides, dtype)


def _real(codes: np.ndarray, scales: np.ndarray, form: Format) -> np.ndarray:
    """Of all rows of a head, without the mean."""
    return form.values().astype(np.float64)[codes] * np.repeat(scales, TILE)[: len(codes), None]


def _rows(launch: Launch, name: str, work: WorkTile) -> np.ndarray:
    """Codes of all rows of a head, by the tensor map or by strides."""
    p, head = launch.params, work.head if name == "q" else work.kv_head
    if f"{name}_map" not in p:
        address = p[name] + work.batch * p[f"{name}_batch_stride"] + head * p[f"{name}_head_stride"]
        shape = p[f"seqlen_{name}"], launch.loaded.problem.head_dim
        return _view(address, shape, (p[f"{name}_seq_stride"], 1), np.uint8)
    made = p[f"{name}_map"]
    assert made.dtype == "uint8" and made.extents[0] == launch.loaded.problem.head_dim
    assert made.extents[1] == launch.params[f"seqlen_{name}"] and head < made.extents[2]
    seq, head_stride, batch_stride = made.strides
    address = made.address + work.batch * batch_stride + head * head_stride
    return _view(address, made.extents[1::-1], (seq, 1), np.uint8)


def _values(launch: Launch, head: int) -> np.ndarray:
    """V of a head without its mean, from its images."""
    p, columns = launch.params, launch.loaded.problem.head_dim_v
    assert p["k_tiles"] == tiles(p["seqlen_k"])
    images = _dense(p["v"] + head * p["k_tiles"] * columns * TILE, (p["k_tiles"], columns * TILE), np.uint8)
    codes = unpack_image(images).reshape(-1, columns)[: p["seqlen_k"]]
    return _real(codes, _scales(p["v_scale"], head, p["k_tiles"]), _formats(launch)[2])


def _formats(launch: Launch) -> list[Format]:
    """Of Q, K and V."""
    return [FORMATS["float8_e5m2" if name == "e5m2" else "float8_e4m3fn"] for name in launch.loaded.problem.formats]


def _scales(address: int, head: int, count: int) -> np.ndarray:
    return _view(address + 4 * head * count, (count,), (4,), np.float32).astype(np.float64)


def run_tile(launch: Launch, work: WorkTile) -> None:
    """One work tile of the forward pass, with the softmax in float64."""
    p, problem = launch.params, launch.loaded.problem
    assert 0 <= work.m_tile < p["m_tiles"]
    assert work.kv_head < p["kv_heads"] and p["q_tiles"] == tiles(p["seqlen_q"])
    first = work.m_tile * launch.loaded.config.block_m
    rows = np.arange(first, min(first + launch.loaded.config.block_m, p["seqlen_q"]))
    kv_head = work.batch * p["kv_heads"] + work.kv_head
    form_q, form_k, _ = _formats(launch)
    q = _real(_rows(launch, "q", work), _scales(p["q_scale"], work.batch_head, p["q_tiles"]), form_q)[rows]
    k = _real(_rows(launch, "k", work), _scales(p["k_scale"], kv_head, p["k_tiles"]), form_k)
    v = _values(launch, kv_head)
    mean = np.zeros(problem.head_dim_v)
    if p["v_mean"]:
        mean = _dense(p["v_mean"] + 4 * kv_head * len(mean), mean.shape, np.float32).astype(np.float64)
    scores = q @ k.T * (p["scale_log2"] / LOG2_E)
    if problem.mask == "causal":
        scores[np.arange(p["seqlen_k"]) > rows[:, None] + p["causal_offset"]] = -np.inf
    top = scores.max(axis=1, keepdims=True)
    top = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    seq, head_stride, batch_stride = (2 * p[f"out_{axis}_stride"] for axis in ("seq", "head", "batch"))
    if (out_map := p.get("out_map")) is not None:
        assert out_map.dtype == problem.dtype and out_map.extents[:2] == (problem.head_dim_v, p["seqlen_q"])
        assert p["out"] == out_map.address
        for mine, stride, extent in zip(
            (seq, head_stride, batch_stride), out_map.strides, out_map.extents[1:], strict=True
        ):
            assert extent == 1 or mine == stride
    address = p["out"] + work.batch * batch_stride + work.head * head_stride + first * seq
    dtype = ml_dtypes.bfloat16 if problem.dtype == "bfloat16" else np.float16
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total == 0, 0.0, weights @ v / total + mean)
        _view(address, out.shape, (seq, 2), dtype)[...] = out
        if p["lse"]:
            at = 4 * (work.batch_head * p["seqlen_q"] + first)
            shift = _view(p["lse_shift"] + at, (len(rows),), (4,), np.float32) if p["lse_shift"] else 0.0
            lse = np.where(total == 0, -np.inf, top + np.log(total))[:, 0] + shift
            _view(p["lse"] + at, (len(rows),), (4,), np.float32)[...] = lse


def run_lse(launch: Launch) -> None:
    """What the mean of K adds to the LSE."""
    p, dim = launch.params, launch.loaded.problem.head_dim
    heads, group, count, seqlen = p["heads"][2], p["group"][2], p["tiles"][2], p["seqlen"]
    assert count == tiles(seqlen) and launch.grid[0] % count == 0 and launch.grid[1:] == (1, 1)
    for batch_head in range(launch.grid[0] // count):
        batch, head = divmod(batch_head, heads)
        address = p["q"] + batch * p["q_batch_stride"] + head * p["q_head_stride"]
        codes = _view(address, (seqlen, dim), (p["q_seq_stride"], 1), np.uint8)
        kv_head = batch * p["kv_heads"] + head // group
        mean = _dense(p["k_mean"] + 4 * dim * kv_head, (dim,), np.float32)
        form = FORMATS["float8_e5m2" if p["e5m2"] else "float8_e4m3fn"]
        shift = _real(codes, _scales(p["q_scales"], batch_head, count), form) @ mean * p["scale"]
        where = _view(p["shift"] + 4 * batch_head * seqlen, (seqlen,), (4,), np.float32)
        where[...] = np.where(np.isnan(shift), 0, shift)


def run_prepare(launch: Launch) -> None:
    """The caller's codes and scales as the forward pass reads them."""
    p = launch.params
    assert launch.grid[1:] == (1, 1)
    for role, of in (("q", "q"), ("k", "k"), ("v", "k")):
        heads, count = p[f"{of}_heads"][2], p[f"{of}_tiles"][2]
        shape = (p[f"{of}_count"] // (heads * count), heads, count)
        scales = np.full(shape, p[f"{role}_number"], np.float32)
        if p[f"{role}_scale"]:
            strides = tuple(4 * p[f"{role}_scale_{axis}_stride"] for axis in ("batch", "head", "tile"))
            scales = _view(p[f"{role}_scale"], shape, strides, np.float32)
        usable = (scales >= 2.0**-126) & (scales <= 2.0**119)
        _dense(p[f"{role}_scales"], shape, np.float32)[:] = np.where(usable, scales, np.nan)
    for role, begin, end in (
        ("q", 0, p["k_begin"]), ("k", p["k_begin"], p["v_begin"]), ("v", p["v_begin"], launch.grid[0]),
    ):  # fmt: skip
        of = "q" if role == "q" else "k"
        heads, count = p[f"{of}_heads"][2], p[f"{of}_tiles"][2]
        assert end - begin in (0, p[f"{of}_count"])
        for batch, head in np.ndindex((end - begin) // (heads * count), heads):
            _prepare_head(launch, role, batch, head)


def _prepare_head(launch: Launch, role: str, batch: int, head: int) -> None:
    p, problem = launch.params, launch.loaded.problem
    of, dim = ("k", problem.head_dim_v) if role == "v" else (role, problem.head_dim)
    seqlen, heads, count = p[f"seqlen_{of}"], p[f"{of}_heads"][2], p[f"{of}_tiles"][2]
    assert count == tiles(seqlen)
    step = {axis: p[f"{role}_{axis}_stride"] for axis in ("batch", "seq", "head", "dim")}
    address = p[role] + batch * step["batch"] + head * step["head"]
    if problem.access_bytes != 1:
        assert step["dim"] == 1
        for value in (address, step["seq"], dim):
            assert value % problem.access_bytes == 0, "an access that faults"
    rows = np.zeros((count * TILE, padded(dim)), np.uint8)
    rows[:seqlen, :dim] = _view(address, (seqlen, dim), (step["seq"], step["dim"]), np.uint8)
    if role == "v":
        images = pack_image(rows.reshape(count, TILE, -1))
        _dense(p["v_payload"] + (batch * heads + head) * images.size, images.shape, np.uint8)[:] = images
        return
    step = {axis: p[f"{role}_payload_{axis}_stride"] for axis in ("batch", "seq", "head")}
    address = p[f"{role}_payload"] + batch * step["batch"] + head * step["head"]
    _view(address, (seqlen, padded(dim)), (step["seq"], 1), np.uint8)[:] = rows[:seqlen]


RUNNERS = {"quantize_lse": run_lse, "prepare": run_prepare}
