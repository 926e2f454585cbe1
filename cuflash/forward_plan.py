"""Launch plans of `cuflash.attention` without 8-bit operands: from a checked request to all but the pointers.

The hot path reads `jit.buffers` and `jit.prepared` itself: every call would pay for a function that does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from . import counters, driver, jit
from .jit import LoadedKernel, PreparedLaunch, TensorGeometry, sizes_of, span, takes_counter, tensor_geometry
from .params import FORWARD_SM80, FORWARD_SM90, fast_div, stride_values
from .request import LOG2_E, TMA_TILE_ROWS, Request

if TYPE_CHECKING:
    from .backward_plan import BackwardPlan
    from .config import ForwardConfig

__all__ = ["CallPlan", "TmaPlan", "make_plan", "plan_with"]

MAX_PROVEN = 16
"""Placements of interleaved arrays, such as the parts of a packed one, that a plan remembers."""

_pack_sm80 = FORWARD_SM80.launch_block.pack_into
_pack_sm90 = FORWARD_SM90.launch_block.pack


class CallPlan:
    """Everything about a call but its pointers: of a call that launches nothing, or an Ampere-style kernel.

    Attributes
    ----------
    device : int
    new_out, new_lse : callable
        What makes an output, and an LSE of a GPU, of the caller's kind.
    alignment : int
        The output's address must be a multiple of it.
    dead : bool
        There are rows but no keys: nothing is launched, and the caller fills 0 and -inf in.
    loaded : LoadedKernel or None
        None if nothing is launched.
    launches : tuple of (grid, packed parameters after those that follow from pointers)
    backward : tuple of (alignments and option, check of the arrays, BackwardPlan)
        What `cuflash.torch` has found out for the backward passes of such calls, the latest last.
    """

    __slots__ = (
        "_block", "_handle", "_proven", "_smem_bytes", "_spans", "alignment", "backward", "dead", "device", "launches",
        "loaded", "new_lse", "new_out",
    )  # fmt: skip

    def __init__(
        self, request: Request, loaded: LoadedKernel | None, launches: tuple[tuple[tuple[int, int, int], bytes], ...]
    ) -> None:
        self.device = request.device
        maker = request.q.kind.maker
        self.new_out = maker(request.out_shape, request.q.dtype)
        self.new_lse = maker(request.lse_shape, "float32")
        self.dead = request.seqlen_k == 0 and request.rows > 0
        self.loaded = loaded
        self.launches = launches
        self.backward: tuple[tuple[Any, Callable[..., bool], BackwardPlan], ...] = ()
        self.alignment = 1
        if loaded is not None:
            self.alignment = loaded.problem.access_bytes
            self._handle = loaded.kernel.handle
            self._block = (loaded.config.threads, 1, 1)
            self._smem_bytes = loaded.config.smem_bytes(loaded.problem)
        self._proven: set[tuple[int, int, int]] = set()
        self._spans: tuple[tuple[int, int], ...] = ()
        if request.out is not None:
            self._spans = tuple(span(x) for x in (request.q, request.k, request.v, request.out))

    def launch(self, q: int, k: int, v: int, out: int, lse: int, stream: int) -> None:
        """Launch on a stream of the plan's device, whose context must be current.

        Parameters
        ----------
        q, k, v, out, lse : int
            Addresses; ``lse`` 0: not wanted.
        stream : int
        """
        for grid, tail in self.launches:
            buffer = jit.buffers.of_device.get(self.device) or jit.buffers.new(self.device)
            _pack_sm80(buffer.block, 0, q, k, v, out, lse, tail)
            driver.launch(self._handle, grid, self._block, self._smem_bytes, stream, buffer.address)

    def apart(self, q: int, k: int, v: int, out: int) -> bool:
        """Whether ``out``, which the call was given, is known to share memory with no input.

        Their spans do not meet, or these distances were proven before.
        """
        (q_low, q_high), (k_low, k_high), (v_low, v_high), (low, high) = self._spans
        low += out
        high += out
        return (
            (high <= q + q_low or q + q_high <= low)
            and (high <= k + k_low or k + k_high <= low)
            and (high <= v + v_low or v + v_high <= low)
        ) or (q - out, k - out, v - out) in self._proven

    def prove_apart(self, q: int, k: int, v: int, out: int) -> None:
        """Remember that arrays at these distances share no memory, though their spans meet."""
        if len(self._proven) < MAX_PROVEN:
            self._proven.add((q - out, k - out, v - out))


class TmaPlan(CallPlan):
    """A plan whose kernel loads by TMA, and so takes tensor maps, which hold addresses.

    Parameters
    ----------
    geometry : tuple of TensorGeometry
        Of q, k, v and out.
    """

    __slots__ = ("_counted", "_geometry")

    def __init__(
        self,
        request: Request,
        loaded: LoadedKernel,
        launches: tuple[tuple[tuple[int, int, int], bytes], ...],
        geometry: tuple[TensorGeometry, ...],
    ) -> None:
        super().__init__(request, loaded, launches)
        self._geometry = geometry
        self._counted = takes_counter(loaded.config)

    def launch(self, q: int, k: int, v: int, out: int, lse: int, stream: int) -> None:
        if self.device not in jit.buffers.of_device:
            jit.buffers.new(self.device)  # a thread that CUDA does not know yet gets its context
        counter = counters.take(self.device, stream) if self._counted else counters.NO_COUNTER
        key = self, stream, q, k, v, out, lse, counter
        jit.launch(jit.prepared.get(key) or self._prepare(*key[1:]))

    def _prepare(
        self, stream: int, q: int, k: int, v: int, out: int, lse: int, counter: int
    ) -> tuple[PreparedLaunch, ...]:
        """The launch with its parameter block; kept for the next call at these addresses."""
        ((grid, tail),) = self.launches
        maps = jit.tensor_maps(self._geometry, q, k, v, out)
        packed = _pack_sm90(maps, out, lse, counter, tail)
        shape = self._handle, grid, self._block, self._smem_bytes
        return jit.prepare((self, stream, q, k, v, out, lse, counter), stream, (shape, packed))


def make_plan(request: Request) -> CallPlan:
    """Plan a GPU call; compiles and loads its kernel if that was not done before."""
    if request.rows == 0 or request.seqlen_k == 0:
        return CallPlan(request, None, ())
    from . import kernels

    loaded = jit.kernel_for(kernels.problem_for(request, jit.device_arch(request.device).name), request.device)
    return plan_with(request, loaded)


def plan_with(request: Request, loaded: LoadedKernel) -> CallPlan:
    """Plan a GPU call that launches a kernel, which must be one for ``request.problem``."""
    return _PLANNERS[loaded.config.family](request, loaded)


def _plan_sm80(request: Request, loaded: LoadedKernel) -> CallPlan:
    from . import kernels

    config = cast("ForwardConfig", loaded.config)
    grid = kernels.forward_grid(loaded.problem, config, *sizes_of(request))
    values = _common_values(request) | {"m_tiles": grid.m_tiles}
    for name in ("q", "k", "v", "out"):
        values |= stride_values(name, request.strides[name])
    launches = tuple(
        (blocks, FORWARD_SM80.pack_tail(values | {"first_tile": first})) for first, blocks in grid.launches
    )
    return CallPlan(request, loaded, launches)


def _plan_sm90(request: Request, loaded: LoadedKernel) -> CallPlan:
    from . import kernels

    multiprocessors = driver.multiprocessors(request.device)
    config = cast("ForwardConfig", loaded.config)
    grid = kernels.persistent_grid(loaded.problem, config, *sizes_of(request), multiprocessors)
    values = _common_values(request) | grid.parameters | stride_values("out", request.strides["out"][:3])
    rows = {"q": TMA_TILE_ROWS, "k": config.block_n, "v": config.block_n, "out": TMA_TILE_ROWS}
    dtype = request.q.dtype
    geometry = tuple(tensor_geometry(dtype, request.extents(x), request.strides[x], rows[x]) for x in rows)
    return TmaPlan(request, loaded, (((grid.blocks, 1, 1), FORWARD_SM90.pack_tail(values)),), geometry)


_PLANNERS: dict[str, Callable[[Request, LoadedKernel], CallPlan]] = {
    "forward_sm80": _plan_sm80,
    "forward_sm90": _plan_sm90,
}


def _common_values(request: Request) -> dict[str, Any]:
    """What the parameter blocks of all families have of a request."""
    scale_log2 = request.scale * LOG2_E
    return {
        "heads": fast_div(request.heads),
        "group": fast_div(request.heads // request.heads_k),
        "batch_heads": request.batch * request.heads,
        "seqlen_q": request.seqlen_q,
        "seqlen_k": request.seqlen_k,
        "causal_offset": request.causal_offset,
        "scale_log2": scale_log2,
        "inverse_scale": 1.0 if request.scale_first else 1.0 / scale_log2,
    }
