"""A GPU made of host memory: real CuPy arrays, and launches that are recorded and carried out by NumPy.

Everything between the call and ``cuLaunchKernel`` is the product's own. A launch is executed from the bytes of its
parameter block, its grid and the memory at its addresses alone: a wrong stride, offset or count gives wrong results.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from cuflash import counters, driver, jit, kernels
from cuflash.compiled import Compiled
from cuflash.config import KernelConfig
from cuflash.params import TENSOR_MAP, ParameterBlock
from cuflash.problem import AttentionProblem
from cuflash.request import LOG2_E
from cuflash.sm90_config import Sm90Config
from tests.unit import fake_backward, fake_fp8, fake_quantize

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
    early: bool = False


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
    encoded : list of int
        The address of each tensor map that was encoded.
    """

    cupy: Any
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 3
    execute: bool = True
    device: int = 0
    switches: int = 0
    streams: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0})
    offset: int = 0
    launches: list[Launch] = field(default_factory=list)
    compiled: list[AttentionProblem] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    encoded: list[int] = field(default_factory=list)
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
        launch = Launch(loaded, grid, block, smem_bytes, stream, self.read(handle, params_address))
        self.launches.append(launch)
        if self.execute:
            run(launch)

    def launch_early(self, *arguments: Any) -> None:
        assert self.capability >= (9, 0) and self.launches, "there is no kernel before, or it cannot overlap"
        self.launch(*arguments)
        self.launches[-1] = replace(self.launches[-1], early=True)

    def read(self, handle: int, params_address: int) -> dict[str, Any]:
        """What the driver would copy: the block behind the one pointer at an address."""
        pointer = ctypes.c_void_p.from_address(params_address).value
        assert pointer is not None
        params = kernels.family_named(self._codes[handle - HANDLES].config.family).params
        return unpack(params, ctypes.string_at(pointer, params.size))

    def encode_tensor_map(self, address: int, *geometry: Any) -> bytes:
        """Refuses what `cuTensorMapEncodeTiled` refuses; the map's bytes are the arguments."""
        made = TensorMap(address, *geometry)
        assert address % 16 == 0 and made.dtype in ("float16", "bfloat16", driver.BYTE)
        assert len(made.extents) == 4 and all(0 < extent <= 2**32 for extent in made.extents)
        assert len(made.strides) == 3 and all(s > 0 and s % 16 == 0 and s < 2**40 for s in made.strides)
        assert 0 < made.box_rows <= 256
        self.encoded.append(address)
        return made.pack()

    def device_properties(self, device: int) -> driver.DeviceProperties:
        return driver.DeviceProperties("fake", self.capability, self.multiprocessors, 1e9, 1e12, 1 << 37, 50 << 20,
                                       232448, 233472)  # fmt: skip

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
    monkeypatch.setattr(cupy_arrays, "copy", copy)
    cupy.cuda.set_allocator(gpu.allocate)
    return gpu


def install_for_torch(monkeypatch: pytest.MonkeyPatch, device: int = 0) -> FakeGpu:
    """Let CPU tensors of torch pass for tensors on a fake GPU; no CuPy is needed."""
    torch = pytest.importorskip("torch")
    from cuflash.arrays import torch_arrays

    gpu = FakeGpu(None)
    _install_driver(monkeypatch, gpu)
    monkeypatch.setattr(torch_arrays, "CPU", device)
    monkeypatch.setattr(torch_arrays, "current_device", lambda: gpu.device)
    monkeypatch.setattr(torch_arrays, "on_device", gpu.on_device)
    monkeypatch.setattr(torch_arrays, "stream", lambda device: gpu.streams[device])

    def empty_on_gpu(shape: Any, strides: Any, dtype: Any, /) -> Any:
        assert type(shape) is tuple, "torch takes no torch.Size there"
        assert gpu.device == device, "allocated while another device was current"
        return torch.empty_strided(shape, strides, dtype=dtype)

    monkeypatch.setattr(torch_arrays, "empty_on_gpu", empty_on_gpu)
    return gpu


def _install_driver(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
    for table in ("_loaded", "_code", "_locks", "prepared", "_tensor_maps"):
        monkeypatch.setattr(jit, table, {})
    jit.forget_plans()
    monkeypatch.setattr(jit, "obtain_code", gpu.obtain_code)
    monkeypatch.setattr(jit, "buffers", jit.Buffers())
    monkeypatch.setattr(driver, "load_kernel", gpu.load_kernel)
    monkeypatch.setattr(driver, "launch", gpu.launch)
    monkeypatch.setattr(driver, "bind", lambda *arguments: lambda: (driver.launch(*arguments),))
    monkeypatch.setattr(driver, "launch_early", gpu.launch_early)
    monkeypatch.setattr(driver, "ensure_context", gpu.contexts.append)
    monkeypatch.setattr(driver, "encode_tensor_map", gpu.encode_tensor_map)
    monkeypatch.setattr(counters, "prepare", lambda device: None)
    monkeypatch.setattr(counters, "take", lambda device, stream: counters.NO_COUNTER)
    monkeypatch.setattr(driver, "device_properties", gpu.device_properties)
    monkeypatch.setattr(driver, "multiprocessors", lambda device: gpu.multiprocessors)
    monkeypatch.setattr(driver, "device_compute_capability", lambda device: gpu.capability)
    monkeypatch.setattr(driver, "device_count", lambda: 2)
    monkeypatch.setattr(driver, "current_device", lambda: gpu.device)


def remove(gpu: FakeGpu) -> None:
    """Give CuPy its own allocator back; the rest is the monkeypatch's."""
    if gpu.cupy is not None:
        gpu.cupy.cuda.set_allocator(gpu.cupy.get_default_memory_pool().malloc)
    for table in (jit.PLANS, jit.BACKWARD_PLANS, jit.QUANTIZE_PLANS, jit.QUANTIZED_PLANS, jit.QUANTIZING_PLANS):
        table.clear()


def fill_dead(out: Array, lse: Array) -> None:
    memory_at(out.data.ptr, out.shape, out.strides, out.dtype)[...] = 0
    if lse is not None:
        memory_at(lse.data.ptr, lse.shape, lse.strides, lse.dtype)[...] = -np.inf


def copy(to: Array, source: Array) -> None:
    to, source = (memory_at(x.data.ptr, x.shape, x.strides, x.dtype) for x in (to, source))
    assert to.shape == source.shape and to.dtype == source.dtype
    to[...] = source


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


class TensorMap(NamedTuple):
    """What a tensor map was made of."""

    address: int
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box_rows: int

    def pack(self) -> bytes:
        return _TENSOR_MAP.pack(self.address, self.dtype.encode(), *self.extents, *self.strides, self.box_rows)

    @classmethod
    def unpack(cls, packed: bytes) -> TensorMap:
        address, dtype, *numbers, box_rows = _TENSOR_MAP.unpack(packed)
        return cls(address, dtype.rstrip(b"\0").decode(), tuple(numbers[:4]), tuple(numbers[4:]), box_rows)


_TENSOR_MAP = struct.Struct("<Q16s4Q3QQ40x")


def unpack(params: ParameterBlock, block: bytes) -> dict[str, Any]:
    """The values of a packed parameter block, by name; ``q`` stands for the address in ``q_map``."""
    values: dict[str, Any] = {}
    for f in params.placed:
        value = struct.unpack_from("<" + f.type.format, block, f.offset)
        values[f.name] = value[0] if len(value) == 1 else value
        if f.type is TENSOR_MAP:
            tensor_map = values[f.name] = TensorMap.unpack(value[0])
            values[f.name.removesuffix("_map")] = tensor_map.address
    return values


# --- the kernels -----------------------------------------------------------------------------------------------


class WorkTile(NamedTuple):
    batch: int
    head: int
    kv_head: int
    batch_head: int
    m_tile: int


def work_of(launch: Launch) -> list[WorkTile]:
    """What a launch computes, by the index arithmetic of its kernel."""
    return _persistent_work(launch) if isinstance(launch.loaded.config, Sm90Config) else _grid_work(launch)


def _grid_work(launch: Launch) -> list[WorkTile]:
    p, work = launch.params, []
    (_, _, heads), (_, _, group) = p["heads"], p["group"]
    for z, y, x in np.ndindex(*launch.grid[::-1]):
        batch_head = z * launch.grid[0] + x
        if batch_head < p["batch_heads"]:
            batch, head = divmod(batch_head, heads)
            work.append(WorkTile(batch, head, head // group, batch_head, p["m_tiles"] - 1 - (p["first_tile"] + y)))
    return work


def _persistent_work(launch: Launch) -> list[WorkTile]:
    """In the order of the tiles; which block takes which does not matter."""
    p, work = launch.params, []
    heads, group, section_tiles, section, last_section = (
        p[name][2] for name in ("heads", "group", "section_tiles", "section", "last_section")
    )
    assert launch.grid[1:] == (1, 1) and launch.grid[0] <= p["tiles"] == p["m_tiles"] * p["batch_heads"]
    assert p["tile_counter"] == 0
    for tile in range(p["tiles"]):
        first_head, within = tile // section_tiles * section, tile % section_tiles
        row, column = divmod(within, section if first_head + section <= p["batch_heads"] else last_section)
        batch, head = divmod(first_head + column, heads)
        work.append(WorkTile(batch, head, head // group, first_head + column, p["m_tiles"] - 1 - row))
    return work


def run(launch: Launch) -> None:
    """Carry a launch out; of the forward pass, query tile by query tile, with the softmax in float64."""
    if runner := (fake_backward.RUNNERS | fake_quantize.RUNNERS | fake_fp8.RUNNERS).get(launch.loaded.problem.task):
        runner(launch)
        return
    run_tile = fake_fp8.run_tile if launch.loaded.problem.input_dtype else _run_tile
    for work in work_of(launch):
        run_tile(launch, work)


def _rows(launch: Launch, name: str, work: WorkTile, first: int, length: int) -> np.ndarray:
    """Rows of one head of an operand, by the strides or the tensor map of the launch."""
    p, problem = launch.params, launch.loaded.problem
    dtype = bfloat16() if problem.dtype == "bfloat16" else np.dtype(np.float16)
    dim = problem.head_dim if name in ("q", "k") else problem.head_dim_v
    head = work.head if name in ("q", "out") else work.kv_head
    if isinstance(launch.loaded.config, Sm90Config):
        made: TensorMap = p[f"{name}_map"]
        seq, head_stride, batch_stride = made.strides
        assert made.extents[0] == dim and made.dtype == problem.dtype
        assert first + length <= made.extents[1] and head < made.extents[2] and work.batch < made.extents[3]
        if name == "out":
            for axis, stride, extent in zip(("seq", "head", "batch"), made.strides, made.extents[1:], strict=True):
                assert extent == 1 or p[f"out_{axis}_stride"] * 2 == stride
        address = made.address + work.batch * batch_stride + head * head_stride + first * seq
        return memory_at(address, (length, dim), (seq, 2), dtype)
    strides = {axis: p[f"{name}_{axis}_stride"] * 2 for axis in ("batch", "seq", "head", "dim")}
    address = p[name] + work.batch * strides["batch"] + head * strides["head"] + first * strides["seq"]
    if problem.access_bytes != 2:
        assert strides["dim"] == 2
        for value in (address, strides["seq"], 2 * dim):
            assert length <= 1 or value % problem.access_bytes == 0, "an access that faults"
    return memory_at(address, (length, dim), (strides["seq"], strides["dim"]), dtype)


def _run_tile(launch: Launch, work: WorkTile) -> None:
    p, problem = launch.params, launch.loaded.problem
    assert 0 <= work.m_tile < p["m_tiles"]
    first = work.m_tile * launch.loaded.config.block_m
    rows = np.arange(first, min(first + launch.loaded.config.block_m, p["seqlen_q"]))
    q = _rows(launch, "q", work, first, len(rows)).astype(np.float64)
    k, v = (_rows(launch, name, work, 0, p["seqlen_k"]).astype(np.float64) for name in ("k", "v"))
    scores = q @ k.T * (p["scale_log2"] / LOG2_E)
    if problem.mask == "causal":
        scores[np.arange(p["seqlen_k"]) > rows[:, None] + p["causal_offset"]] = -np.inf
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        _rows(launch, "out", work, first, len(rows))[...] = np.where(total == 0, 0.0, weights @ v / total)
        if p["lse"]:
            address = p["lse"] + 4 * (work.batch_head * p["seqlen_q"] + first)
            lse = np.where(total == 0, -np.inf, np.where(np.isneginf(top), 0.0, top) + np.log(total))
            memory_at(address, (len(rows),), (4,), np.float32)[...] = lse[:, 0]
