"""Launch plans of attention on quantized tensors: sizes to a packed parameter block, addresses to a launch."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, cast

from . import counters, driver, jit, kernels
from .arch import fp8_sm90
from .fp8_layout import TILE, tiles
from .fp8_sm80_config import Fp8Sm80Config
from .fp8_sm90_config import Fp8Sm90Config
from .jit import LoadedKernel, PreparedLaunch, TensorGeometry
from .params import FORWARD_FP8_SM80, FORWARD_FP8_SM90, fast_div, stride_values
from .problem import AttentionProblem, Dtype, InputDtype
from .request import FOLDED_SCALES, LOG2_E, TMA_TILE_ROWS

_pack_sm80 = FORWARD_FP8_SM80.launch_block.pack_into
_pack_sm90 = FORWARD_FP8_SM90.launch_block.pack

OUT_BYTES = 2


class Fp8Call(NamedTuple):
    """What a plan depends on.

    Attributes
    ----------
    batch, heads, heads_k, seqlen_q, seqlen_k : int
    head_dim, head_dim_v : int
        As the quantizer pads them: multiples of 16.
    out_dtype : {"float16", "bfloat16"}
    causal_offset : int or None
        Query i sees keys j <= i + causal_offset; None without a mask.
    scale : float
    q_strides, k_strides, out_strides : tuple of int
        Along (batch, seq, heads), in bytes; multiples of 16. ``out`` has rows of ``head_dim_v`` columns.
    arch : str
        The kernel's target.
    one_level : bool
        As of `AttentionProblem`.
    dtypes : tuple of str
        Of Q, K and V.
    """

    batch: int
    heads: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    out_dtype: Dtype
    causal_offset: int | None
    scale: float
    q_strides: tuple[int, int, int]
    k_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    arch: str
    one_level: bool = False
    dtypes: tuple[InputDtype, InputDtype, InputDtype] = ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """What the grid depends on: batch * query heads, query heads for each key/value head, both lengths."""
        return self.batch * self.heads, self.heads // self.heads_k, self.seqlen_q, self.seqlen_k

    @property
    def problem(self) -> AttentionProblem:
        """The kernel that serves the call."""
        q, k, v = self.dtypes
        problem = AttentionProblem(
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.out_dtype,
            mask="full" if self.causal_offset is None else "causal",
            access_bytes=16,
            scale_first=not FOLDED_SCALES[0] <= self.scale * LOG2_E <= FOLDED_SCALES[1],
            arch=self.arch,
            input_dtype=q,
            k_dtype=k if k != q else None,
            v_dtype=v if v != q else None,
            one_level=self.one_level,
        )
        return replace(problem, short=fp8_sm90.is_short(problem, self.seqlen_q))


class Fp8Addresses(NamedTuple):
    """Where a call's arrays are, in the order of the parameter block; 0: null."""

    v: int
    q_scale: int
    k_scale: int
    v_scale: int
    v_mean: int
    lse_shift: int
    out: int
    lse: int


class Fp8Plan:
    """Everything about a call of a Hopper kernel but its pointers.

    Parameters
    ----------
    call : Fp8Call
        With rows and keys.
    loaded : LoadedKernel
        One for ``call.problem``.
    """

    __slots__ = ("_counted", "_device", "_geometry", "_shape", "_tail", "loaded")

    def __init__(self, call: Fp8Call, loaded: LoadedKernel) -> None:
        config = cast("Fp8Sm90Config", loaded.config)
        self.loaded = loaded
        self._device = loaded.kernel.device
        grid = kernels.persistent_grid(loaded.problem, config, *call.sizes, driver.multiprocessors(self._device))
        smem_bytes = config.smem_bytes(loaded.problem)
        self._shape = loaded.kernel.handle, (grid.blocks, 1, 1), (config.threads, 1, 1), smem_bytes
        self._counted = jit.takes_counter(config)
        self._tail = FORWARD_FP8_SM90.pack_tail(_common_values(call) | grid.parameters)
        self._geometry = (
            _geometry(driver.BYTE, call.head_dim, call.seqlen_q, call.heads, call.batch, call.q_strides, TMA_TILE_ROWS),
            _geometry(driver.BYTE, call.head_dim, call.seqlen_k, call.heads_k, call.batch, call.k_strides, TILE),
            _geometry(
                call.out_dtype, call.head_dim_v, call.seqlen_q, call.heads, call.batch, call.out_strides, TMA_TILE_ROWS
            ),
        )

    def launch(self, q: int, k: int, addresses: Fp8Addresses, stream: int) -> None:
        """Launch on a stream of the kernel's device, whose context must be current."""
        jit.argument_buffer(self._device)  # a thread that CUDA does not know yet gets its context
        counter = counters.take(self._device, stream) if self._counted else counters.NO_COUNTER
        key = self, stream, q, k, addresses, counter
        jit.launch(jit.prepared.get(key) or self._prepare(*key[1:]))

    def _prepare(
        self, stream: int, q: int, k: int, addresses: Fp8Addresses, counter: int
    ) -> tuple[PreparedLaunch, ...]:
        """The launch with its parameter block; kept for the next call at these addresses."""
        packed = _pack_sm90(jit.tensor_maps(self._geometry, q, k, addresses.out), *addresses, counter, self._tail)
        return jit.prepare((self, stream, q, k, addresses, counter), stream, (self._shape, packed))


class Fp8Sm80Plan:
    """The same of an Ampere-style kernel.

    Attributes
    ----------
    launches : tuple of (grid, packed parameters after the addresses)
    """

    __slots__ = ("_device", "_smem_bytes", "_threads", "launches", "loaded")

    def __init__(self, call: Fp8Call, loaded: LoadedKernel) -> None:
        config = cast("Fp8Sm80Config", loaded.config)
        grid = kernels.forward_grid(loaded.problem, config, *call.sizes)
        values = _common_values(call) | {"m_tiles": grid.m_tiles}
        values |= stride_values("q", call.q_strides) | stride_values("k", call.k_strides)
        self.loaded = loaded
        self._device = loaded.kernel.device
        self._threads = config.threads, 1, 1
        self._smem_bytes = config.smem_bytes(loaded.problem)
        self.launches = tuple(
            (blocks, FORWARD_FP8_SM80.pack_tail(values | {"first_tile": first})) for first, blocks in grid.launches
        )

    def launch(self, q: int, k: int, addresses: Fp8Addresses, stream: int) -> None:
        """Launch on a stream of the kernel's device, whose context must be current."""
        for blocks, tail in self.launches:
            buffer = jit.argument_buffer(self._device)
            _pack_sm80(buffer.block, 0, q, k, *addresses, tail)
            driver.launch(self.loaded.kernel.handle, blocks, self._threads, self._smem_bytes, stream, buffer.address)


def make_plan(call: Fp8Call, device: int) -> Fp8Plan | Fp8Sm80Plan:
    """Plan a call; compiles and loads its kernel if that was not done before."""
    loaded = jit.kernel_for(call.problem, device)
    return Fp8Plan(call, loaded) if loaded.config.family == "forward_fp8_sm90" else Fp8Sm80Plan(call, loaded)


def _common_values(call: Fp8Call) -> dict[str, int | float | tuple[int, ...]]:
    """What both families take."""
    batch, seq, heads = (stride // OUT_BYTES for stride in call.out_strides)
    batch_heads, group, seqlen_q, seqlen_k = call.sizes
    return {
        **stride_values("out", (batch, seq, heads)),
        "heads": fast_div(call.heads),
        "group": fast_div(group),
        "batch_heads": batch_heads,
        "kv_heads": call.heads_k,
        "q_tiles": tiles(seqlen_q),
        "k_tiles": tiles(seqlen_k),
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "causal_offset": call.causal_offset or 0,
        "scale_log2": call.scale * LOG2_E,
    }


def _geometry(
    dtype: str, dim: int, seqlen: int, heads: int, batch: int, strides: tuple[int, int, int], box_rows: int
) -> TensorGeometry:
    """An array as a tensor map sees it."""
    by_batch, by_row, by_head = strides
    return TensorGeometry(dtype, (dim, seqlen, heads, batch), (by_row, by_head, by_batch), box_rows)
