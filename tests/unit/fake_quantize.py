"""The kernels of the quantizer for `fake_gpu`: carried out from a launch's parameters and memory alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from cuflash import cpu_quantize
from cuflash.fp8 import FORMATS
from cuflash.fp8_layout import TILE, pack_image, padded

if TYPE_CHECKING:
    from tests.unit.fake_gpu import Launch


def _view(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: type) -> np.ndarray:
    from tests.unit.fake_gpu import memory_at

    return memory_at(address, shape, strides, dtype)


def _dense(address: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return _view(address, shape, np.empty(shape, dtype).strides, dtype)


def _head_of(launch: Launch, role: str, batch: int, head: int, seqlen: int) -> np.ndarray:
    """(seq, dim) of a source, by the strides of the launch."""
    p, problem = launch.params, launch.loaded.problem
    dtype = ml_dtypes.bfloat16 if problem.dtype == "bfloat16" else np.float16
    step = {axis: 2 * p[f"{role}_{axis}_stride"] for axis in ("batch", "seq", "head", "dim")}
    dim = problem.head_dim_v if role == "v" else problem.head_dim
    address = p[role] + batch * step["batch"] + head * step["head"]
    if problem.access_bytes != 2:
        assert step["dim"] == 2
        for value in (address, step["seq"], 2 * dim):
            assert value % problem.access_bytes == 0, "an access that faults"
    return _view(address, (seqlen, dim), (step["seq"], step["dim"]), dtype)


def _negated(launch: Launch) -> np.ndarray:
    signs = [word >> bit & 1 for word in launch.params["signs"] for bit in range(32)]
    return np.array(signs[: launch.loaded.problem.head_dim], bool)


def _run_means(launch: Launch) -> None:
    p = launch.params
    heads = p["heads"][2]
    for block in range(launch.grid[0]):
        role = "v" if block >= p["v_begin"] else "k"
        batch_head = block - (p["v_begin"] if role == "v" else 0)
        mean = cpu_quantize.mean_of(_head_of(launch, role, *divmod(batch_head, heads), p["seqlen"]))
        if role == "k" and p["rotated"]:
            mean = cpu_quantize.rotate(mean, _negated(launch))
        size = padded(len(mean))
        _dense(p[f"{role}_mean"] + 4 * size * batch_head, (size,), np.float32)[:] = np.pad(mean, (0, size - len(mean)))


def _run_quantize(launch: Launch) -> None:
    p = launch.params
    assert 0 < launch.grid[0] <= p["work"] and launch.grid[1:] == (1, 1)
    done = set()
    for index in range(p["work"]):
        role = "q" if index < p["k_begin"] else "k" if index < p["v_begin"] else "v"
        inside = index - {"q": 0, "k": p["k_begin"], "v": p["v_begin"]}[role]
        name = "q" if role == "q" else "k"
        column, head = divmod(inside, p[f"{name}_heads"][2])
        batch, _ = divmod(column, p[f"{name}_tiles"][2])
        if (role, batch, head) not in done:
            done.add((role, batch, head))
            _quantize_head(launch, role, batch, head)


def _quantize_head(launch: Launch, role: str, batch: int, head: int) -> None:
    """All tiles of a head."""
    p, name = launch.params, "q" if role == "q" else "k"
    seqlen, heads, tiles = p[f"seqlen_{name}"], p[f"{name}_heads"][2], p[f"{name}_tiles"][2]
    source = _head_of(launch, role, batch, head, seqlen)
    columns, batch_head = padded(source.shape[1]), batch * heads + head
    mean = None
    if role != "q" and p[f"{role}_mean"]:
        mean = _dense(p[f"{role}_mean"] + 4 * columns * batch_head, (columns,), np.float32)[: source.shape[1]]
    form = FORMATS["float8_e5m2" if p["e5m2"] else "float8_e4m3fn"]
    negated = _negated(launch) if p["rotated"] and role != "v" else None
    codes, scales = cpu_quantize.quantize_tiles(source, form, mean, negated)
    _dense(p[f"{role}_scales"] + 4 * batch_head * tiles, (tiles,), np.float32)[:] = scales
    if role == "v":
        images = pack_image(codes)
        _dense(p["v_payload"] + batch_head * images.size, images.shape, np.uint8)[:] = images
        return
    step = {axis: p[f"{role}_payload_{axis}_stride"] for axis in ("batch", "seq", "head")}
    address = p[f"{role}_payload"] + batch * step["batch"] + head * step["head"]
    rows = codes.reshape(len(codes) * TILE, columns)[:seqlen]
    _view(address, (seqlen, columns), (step["seq"], 1), np.uint8)[:] = rows


RUNNERS = {"quantize_means": _run_means, "quantize": _run_quantize}
