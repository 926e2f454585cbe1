"""A GPU made of host memory: real CuPy arrays, and launches that are recorded and carried out by NumPy.

Everything between the call and ``cuLaunchKernel`` is the product's own. A launch is executed from the bytes of its
parameter block, its grid and the memory at its addresses alone: a wrong stride, offset or count gives wrong results.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuflash import driver, jit, kernels
from cuflash.compiler import Compiled
from cuflash.config import KernelConfig
from cuflash.params import FORWARD
from cuflash.problem import AttentionProblem
from cuflash.request import LOG2_E

Array = Any
HANDLES = 1000


def bfloat16() -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Launch:
    """One recorded launch."""

    loaded: LoadedCode
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    stream: int
    params: dict[str, Any]


@dataclass(frozen=True)
class LoadedCode:
    problem: AttentionProblem
    config: KernelConfig
    device: int


@dataclass
class FakeGpu:
    """What the product sees as its GPUs.

    Attributes
    ----------
    launches : list of Launch
    compiled : list of AttentionProblem
        Each call of the compiler (or a cache).
    device : int
        The current device; `switches` counts how often it was changed.
    streams : dict
        Device to the handle of its current stream.
    offset : int
        Misaligns what the allocator hands out.
    """

    cupy: Any
    capability: tuple[int, int] = (9, 0)
    execute: bool = True
    device: int = 0
    switches: int = 0
    streams: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0})
    offset: int = 0
    launches: list[Launch] = field(default_factory=list)
    compiled: list[AttentionProblem] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    _codes: list[LoadedCode] = field(default_factory=list)
    _problems: dict[str, tuple[AttentionProblem, KernelConfig]] = field(default_factory=dict)

    # --- arrays

    def array(self, values: np.ndarray, device: int = 0) -> Array:
        """A CuPy array over the very memory of a NumPy array, with its strides."""
        memory = self.cupy.cuda.UnownedMemory(values.__array_interface__["data"][0], 0, values, device)
        return self.cupy.ndarray(
            values.shape, values.dtype, self.cupy.cuda.MemoryPointer(memory, 0), strides=values.strides
        )

    def at(
        self, address: int, shape: tuple[int, ...], dtype: Any = np.float16, strides: Any = None, device: int = 0
    ) -> Array:
        """A CuPy array of memory that does not exist: only for calls that are not executed."""
        memory = self.cupy.cuda.UnownedMemory(address, 0, None, device)
        return self.cupy.ndarray(shape, dtype, self.cupy.cuda.MemoryPointer(memory, 0), strides=strides)

    def host(self, x: Array) -> np.ndarray:
        """A copy of a CuPy array."""
        return memory_at(x.data.ptr, x.shape, x.strides, x.dtype).copy()

    def allocate(self, size: int) -> Any:
        if not self.execute:
            memory = self.cupy.cuda.UnownedMemory((7 << 40) + self.offset, size, None, self.device)
            return self.cupy.cuda.MemoryPointer(memory, 0)
        block = np.full(size + 768, 0xFF, np.uint8)  # NaN in every type
        start = -block.ctypes.data % 512 + self.offset
        memory = self.cupy.cuda.UnownedMemory(block.ctypes.data, size + 768, block, self.device)
        return self.cupy.cuda.MemoryPointer(memory, start)

    # --- the driver

    def obtain_code(self, problem: AttentionProblem, config: KernelConfig, settings: Any, *, ptx: bool) -> Any:
        self.compiled.append(problem)
        symbol = kernels.symbol(problem, config)
        self._problems[symbol] = problem, config
        return Compiled(b"", symbol, problem.arch, 0, 0, 0, 0, 0.0, "", "0.0.0", ptx), "compiled"

    def load_kernel(self, compiled: Compiled, smem_bytes: int, device: int) -> driver.Kernel:
        problem, config = self._problems[compiled.symbol]
        assert smem_bytes == config.smem_bytes(problem)
        self._codes.append(LoadedCode(problem, config, device))
        return driver.Kernel(HANDLES + len(self._codes) - 1, compiled.symbol, device, None)  # type: ignore[arg-type]

    def launch(self, handle: int, grid: Any, block: Any, smem_bytes: int, stream: int, params_address: int) -> None:
        loaded = self._codes[handle - HANDLES]
        assert loaded.device == self.device, "launched while another device was current"
        assert all(extent > 0 for extent in grid) and max(grid[1:]) <= 65535 and grid[0] < 2**31
        launch = Launch(loaded, grid, block, smem_bytes, stream, read_block(params_address))
        self.launches.append(launch)
        if self.execute:
            run(launch)

    @contextlib.contextmanager
    def on_device(self, ordinal: int) -> Iterator[None]:
        previous, self.device = self.device, ordinal
        self.switches += 1
        try:
            yield
        finally:
            self.device = previous


def install(monkeypatch: pytest.MonkeyPatch, **options: Any) -> FakeGpu:
    """Put a fake GPU in the place of the driver and of CuPy's runtime."""
    cupy = pytest.importorskip("cupy")
    from cuflash.arrays import cupy_arrays

    gpu = FakeGpu(cupy, **options)
    _install_driver(monkeypatch, gpu)
    monkeypatch.setattr(cupy_arrays, "current_device", lambda: gpu.device)
    monkeypatch.setattr(cupy_arrays, "on_device", gpu.on_device)
    monkeypatch.setattr(cupy_arrays, "stream", lambda device: gpu.streams[device])
    monkeypatch.setattr(cupy_arrays, "fill_dead", fill_dead)
    cupy.cuda.set_allocator(gpu.allocate)
    return gpu


def install_for_torch(monkeypatch: pytest.MonkeyPatch, device: int = 0) -> FakeGpu:
    """Let CPU tensors of torch pass for tensors on a fake GPU; no CuPy is needed."""
    pytest.importorskip("torch")
    from cuflash.arrays import torch_arrays

    gpu = FakeGpu(None)
    _install_driver(monkeypatch, gpu)
    monkeypatch.setattr(torch_arrays, "CPU", device)
    monkeypatch.setattr(torch_arrays, "current_device", lambda: gpu.device)
    monkeypatch.setattr(torch_arrays, "on_device", gpu.on_device)
    monkeypatch.setattr(torch_arrays, "stream", lambda device: gpu.streams[device])
    return gpu


def _install_driver(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
    for table in ("_loaded", "_code", "_locks"):
        monkeypatch.setattr(jit, table, {})
    jit.PLANS.clear()
    monkeypatch.setattr(jit, "obtain_code", gpu.obtain_code)
    monkeypatch.setattr(jit, "_buffers", jit._Buffers())
    monkeypatch.setattr(driver, "load_kernel", gpu.load_kernel)
    monkeypatch.setattr(driver, "launch", gpu.launch)
    monkeypatch.setattr(driver, "ensure_context", gpu.contexts.append)
    monkeypatch.setattr(driver, "device_compute_capability", lambda device: gpu.capability)
    monkeypatch.setattr(driver, "device_count", lambda: 2)
    monkeypatch.setattr(driver, "current_device", lambda: gpu.device)


def remove(gpu: FakeGpu) -> None:
    """Give CuPy its own allocator back; the rest is the monkeypatch's."""
    if gpu.cupy is not None:
        gpu.cupy.cuda.set_allocator(gpu.cupy.get_default_memory_pool().malloc)
    jit.PLANS.clear()


def fill_dead(out: Array, lse: Array) -> None:
    memory_at(out.data.ptr, out.shape, out.strides, out.dtype)[...] = 0
    if lse is not None:
        memory_at(lse.data.ptr, lse.shape, lse.strides, lse.dtype)[...] = -np.inf


# --- memory and parameters -------------------------------------------------------------------------------------


class _Memory:
    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> None:
        self.__array_interface__ = {
            "version": 3, "data": (address, False), "typestr": f"<u{item}", "shape": shape, "strides": strides,
        }  # fmt: skip


def memory_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> np.ndarray:
    """View host memory; strides in bytes."""
    dtype = np.dtype(dtype)
    return np.asarray(_Memory(address, shape, strides, dtype.itemsize)).view(dtype)


def read_block(params_address: int) -> dict[str, Any]:
    """What the driver would read: the block behind the one pointer at an address."""
    pointer = ctypes.c_void_p.from_address(params_address).value
    assert pointer is not None
    return unpack(ctypes.string_at(pointer, FORWARD.size))


def unpack(block: bytes) -> dict[str, Any]:
    """The values of a packed parameter block, by name."""
    values = {}
    for f in FORWARD.placed:
        value = struct.unpack_from("<" + f.type.format, block, f.offset)
        values[f.name] = value[0] if len(value) == 1 else value
    return values


def divisor(magic: tuple[int, int, int]) -> int:
    return magic[2]


# --- the kernel ------------------------------------------------------------------------------------------------


def run(launch: Launch) -> None:
    """Carry a launch out, thread block by thread block; softmax in float64."""
    for z in range(launch.grid[2]):
        for y in range(launch.grid[1]):
            for x in range(launch.grid[0]):
                _run_block(launch, x, y, z)


def _run_block(launch: Launch, x: int, y: int, z: int) -> None:
    p, problem = launch.params, launch.loaded.problem
    index = z * launch.grid[0] + x
    if index >= p["batch_heads"]:
        return
    tile = p["m_tiles"] - 1 - (p["first_tile"] + y)
    assert 0 <= tile < p["m_tiles"]
    batch, head = divmod(index, divisor(p["heads"]))
    first = tile * launch.loaded.config.block_m
    rows = np.arange(first, min(first + launch.loaded.config.block_m, p["seqlen_q"]))
    dtype = bfloat16() if problem.dtype == "bfloat16" else np.dtype(np.float16)

    def tensor(name: str, head: int, first: int, length: int, dim: int) -> np.ndarray:
        strides = {axis: p[f"{name}_{axis}_stride"] * 2 for axis in ("batch", "seq", "head", "dim")}
        address = p[name] + batch * strides["batch"] + head * strides["head"] + first * strides["seq"]
        if problem.access_bytes != 2:
            assert strides["dim"] == 2
            for value in (address, strides["seq"], 2 * dim):
                assert length <= 1 or value % problem.access_bytes == 0, "an access that faults"
        return memory_at(address, (length, dim), (strides["seq"], strides["dim"]), dtype)

    kv_head = head // divisor(p["group"])
    q = tensor("q", head, first, len(rows), problem.head_dim).astype(np.float64)
    k = tensor("k", kv_head, 0, p["seqlen_k"], problem.head_dim).astype(np.float64)
    v = tensor("v", kv_head, 0, p["seqlen_k"], problem.head_dim_v).astype(np.float64)
    scores = q @ k.T * (p["scale_log2"] / LOG2_E)
    if problem.mask == "causal":
        scores[np.arange(p["seqlen_k"]) > rows[:, None] + p["causal_offset"]] = -np.inf
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        tensor("out", head, first, len(rows), problem.head_dim_v)[...] = np.where(total == 0, 0.0, weights @ v / total)
        if p["lse"]:
            address = p["lse"] + 4 * (index * p["seqlen_q"] + first)
            lse = np.where(total == 0, -np.inf, np.where(np.isneginf(top), 0.0, top) + np.log(total))
            memory_at(address, (len(rows),), (4,), np.float32)[...] = lse[:, 0]
