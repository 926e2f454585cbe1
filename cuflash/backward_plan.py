"""Launch plans of the backward pass: two or three kernels, and the workspace between them.

The first kernel computes the constants of the query rows, LSE * log2(e) and delta = rowsum(dO * O) - dLSE, and clears
the sums of dQ. The second, tile of keys by tile of keys, computes dK and dV and adds the tile's share of dQ to the
sums. The third converts these, unless a Hopper kernel has done so at its end. The workspace is an array of the
caller's kind: it comes from the same pool as the results, which gives it out again in stream order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from . import driver, jit
from .backward_config import BackwardConfig, BackwardWideConfig, HopperConfig, MainConfig
from .backward_kernels import BackwardGrid, backward_grid, problems_for
from .backward_params import BACKWARD_DQ, BACKWARD_ROWS, BACKWARD_SM80, BACKWARD_SM90, BACKWARD_WIDE
from .backward_request import BackwardRequest
from .errors import UnsupportedError
from .params import fast_div
from .request import LOG2_E

if TYPE_CHECKING:
    from .jit import LoadedKernel, PreparedLaunch, TensorGeometry

ROW_TILE = 32
"""Rows of a thread block of the first kernel; query tiles are multiples."""
TURNS = 2
"""Turns of so many rows: those who add different columns at the same time have their own."""
WORKSPACE_ALIGN = 16
MAX_BLOCKS = 2**31 - 1

INPUTS = 7
"""Arrays that a call reads, in the order of addresses; those that it writes are behind them."""

MAX_PROVEN = 64
"""Pairs of interleaved arrays, such as the parts of a packed gradient, that a plan remembers."""

_pack_rows = BACKWARD_ROWS.launch_block.pack
_pack_sm80 = BACKWARD_SM80.launch_block.pack
_pack_sm90 = BACKWARD_SM90.launch_block.pack
_pack_wide = BACKWARD_WIDE.launch_block.pack
_pack_dq = BACKWARD_DQ.launch_block.pack


class Workspace(NamedTuple):
    """Where what the kernels share lies: offsets in bytes from a multiple of `WORKSPACE_ALIGN`.

    ``turns`` is None where dQ may be summed in any order, ``kv_sums`` where no tiles share dK and dV, ``counts`` where
    nothing is counted.
    """

    rows: int
    turns: int | None
    kv_sums: int | None
    counts: int | None
    size: int

    @classmethod
    def of(cls, padded_rows: int, head_dim: int, deterministic: bool, counts: int = 0, kv_sums: int = 0) -> Workspace:
        """For the query rows of all heads, each padded to whole query tiles; counts, and sums of dK and dV."""
        rows = padded_rows * -(-head_dim // 16) * 16 * 4
        turns = rows + padded_rows * 8
        sums = -(-(turns + padded_rows // ROW_TILE * TURNS * 4 * deterministic) // WORKSPACE_ALIGN) * WORKSPACE_ALIGN
        counted = sums + kv_sums * 4
        return cls(
            rows,
            turns=turns if deterministic else None,
            kv_sums=sums if kv_sums else None,
            counts=counted if counts else None,
            size=counted + counts * 4,
        )

    @property
    def floats(self) -> int:
        """Elements of a float32 array that holds it wherever its pool puts it."""
        return (self.size + WORKSPACE_ALIGN) // 4


class Launch:
    """A kernel, its grid, and its packed parameters behind the pointers."""

    __slots__ = ("blocks", "loaded", "shape", "tail")

    def __init__(self, loaded: LoadedKernel, blocks: int, tail: bytes) -> None:
        self.loaded = loaded
        self.blocks = blocks
        self.tail = tail
        smem_bytes = loaded.config.smem_bytes(loaded.problem)
        self.shape = loaded.kernel.handle, (blocks, 1, 1), (loaded.config.threads, 1, 1), smem_bytes


class BackwardPlan:
    """Everything about a backward call but its pointers.

    Attributes
    ----------
    device : int
    alignment : int
        Addresses of gradients must be multiples of it.
    workspace : Workspace or None
        None if nothing is launched: there are no queries or no keys, and the caller fills zeros in.
    new_dq, new_dk, new_dv, new_workspace : callable
        What makes gradients, and the float32 array that holds the workspace, of the caller's kind.
    launches : tuple of Launch
        Of the two or three kernels, in order; none if nothing is launched.
    geometry : tuple of TensorGeometry
        Of q, k, v, dout, dk and dv, for a main kernel that takes tensor maps; otherwise empty.
    """

    __slots__ = (
        "_proven", "_spans", "alignment", "device", "geometry", "launches", "new_dk", "new_dq", "new_dv",
        "new_workspace", "workspace",
    )  # fmt: skip

    def __init__(
        self,
        request: BackwardRequest,
        launches: tuple[Launch, ...] = (),
        workspace: Workspace | None = None,
        geometry: tuple[TensorGeometry, ...] = (),
    ) -> None:
        self.device = request.device
        self.launches = launches
        self.workspace = workspace
        self.geometry = geometry
        forward, maker = request.forward, request.forward.q.kind.maker
        self.new_dq, self.new_dk, self.new_dv = (maker(x.shape, x.dtype) for x in (forward.q, forward.k, forward.v))
        self.new_workspace = maker((0 if workspace is None else workspace.floats,), "float32")
        self.alignment = max((launch.loaded.problem.access_bytes for launch in launches), default=1)
        self._spans = [(0, 0) if x is None else jit.span(x) for x in request.operands]
        self._proven: frozenset[tuple[int, int, int]] = frozenset()

    def launch(self, addresses: list[int], workspace: int, stream: int) -> None:
        """Launch on a stream of the plan's device, whose context must be current.

        Parameters
        ----------
        addresses : list of int
            Of q, k, v, dout, out, lse, dlse (0 where there is none), dq, dk and dv.
        workspace : int
            Address of the workspace.
        stream : int
        """
        if self.device not in jit.buffers.of_device:
            jit.buffers.new(self.device)  # a thread that CUDA does not know yet gets its context
        key = self, stream, workspace, *addresses
        jit.launch(jit.prepared.get(key) or self._prepare(stream, workspace, addresses))

    def _prepare(self, stream: int, workspace: int, addresses: list[int]) -> tuple[PreparedLaunch, ...]:
        """The launches with their parameter blocks; kept for the next call at these addresses."""
        assert self.workspace is not None
        q, k, v, dout, out, lse, dlse, dq, dk, dv = addresses
        sums = -(-workspace // WORKSPACE_ALIGN) * WORKSPACE_ALIGN
        layout = self.workspace
        rows = sums + layout.rows
        turns = 0 if layout.turns is None else sums + layout.turns
        counts = 0 if layout.counts is None else sums + layout.counts
        kv_sums = 0 if layout.kv_sums is None else sums + layout.kv_sums
        first, main, *last = self.launches
        own_dq = 0 if last else dq
        if isinstance(main.loaded.config, BackwardWideConfig):
            maps = jit.tensor_maps(self.geometry, q, k, v, dout)
            packed_main = _pack_wide(maps, dk, dv, rows, sums, turns, counts, kv_sums, own_dq, main.tail)
        elif self.geometry:
            maps = jit.tensor_maps(self.geometry, q, k, v, dout, dk, dv)
            packed_main = _pack_sm90(maps, rows, sums, turns, counts, kv_sums, own_dq, main.tail)
        else:
            packed_main = _pack_sm80(dout, q, k, v, dk, dv, rows, sums, turns, main.tail)
        return jit.prepare(
            (self, stream, workspace, *addresses),
            stream,
            (first.shape, _pack_rows(dout, out, lse, dlse, rows, sums, turns, counts, first.tail)),
            (main.shape, packed_main),
            *((launch.shape, _pack_dq(rows, sums, dq, launch.tail)) for launch in last),
        )

    def apart(self, addresses: list[int]) -> bool:
        """Whether gradients that the call was given are known to share memory with no input and not with each other.

        Their spans do not meet, or do so at distances that were proven before. Addresses are in the order of `launch`.
        """
        return self._proven.issuperset(self._meeting(addresses))

    def prove_apart(self, addresses: list[int]) -> None:
        """Remember that arrays at these distances share no memory, though their spans meet."""
        if len(self._proven) < MAX_PROVEN:
            self._proven |= self._meeting(addresses)

    def _meeting(self, addresses: list[int]) -> frozenset[tuple[int, int, int]]:
        """Of each array whose span meets that of a gradient: the places of both in the call, and their distance."""
        spans = [(at + low, at + high) for at, (low, high) in zip(addresses, self._spans, strict=True)]
        return frozenset(
            (i, j, addresses[j] - addresses[i])
            for i in range(INPUTS, len(addresses))
            for j in range(i)
            if spans[i][0] < spans[j][1] and spans[j][0] < spans[i][1]
        )


def make_plan(request: BackwardRequest) -> BackwardPlan:
    """Plan a GPU call; compiles and loads its kernels if that was not done before.

    Raises
    ------
    UnsupportedError
        There are more tiles than a launch takes.
    """
    forward = request.forward
    if forward.rows == 0 or forward.seqlen_k == 0:
        return BackwardPlan(request)
    arch = jit.device_arch(request.device)
    multiprocessors = driver.multiprocessors(request.device)
    return plan_with(
        request,
        multiprocessors,
        *(jit.kernel_for(problem, request.device) for problem in problems_for(request, arch.name)),
    )


def plan_with(
    request: BackwardRequest,
    multiprocessors: int,
    first: LoadedKernel,
    main: LoadedKernel,
    last: LoadedKernel | None = None,
) -> BackwardPlan:
    """Plan a GPU call that launches two or three kernels, which must be those for its problems."""
    forward, config = request.forward, main.config
    assert isinstance(config, MainConfig)
    grid = backward_grid(main.problem, config, jit.sizes_of(forward), multiprocessors, request.deterministic)
    row_tiles = grid.m_tiles * config.block_m // ROW_TILE
    blocks_first = forward.batch * forward.heads * row_tiles
    if max(blocks_first, grid.work_tiles + grid.blocks) > MAX_BLOCKS:  # each block learns once that there are no more
        raise UnsupportedError(
            f"q and k have {forward.batch} * {forward.heads} heads and lengths {forward.seqlen_q} and "
            f"{forward.seqlen_k}; the kernels of attention_backward take up to {MAX_BLOCKS} tiles of 32 queries and "
            f"of {config.block_n} keys in all: split the batch"
        )
    common: dict[str, Any] = {
        "seqlen_q": forward.seqlen_q,
        "heads": fast_div(forward.heads),
        "row_tiles": fast_div(row_tiles),
    }
    counts = kv_sums = 0
    if not isinstance(config, BackwardConfig):
        heads = grid.work_tiles // grid.n_tiles
        counts = _first_cleared(config, grid) + heads + (heads + 1 if last is None else 0)
        kv_sums = _shared_tiles(grid) * config.kv_sums(main.problem)
    of_a_head = row_tiles * forward.heads // (forward.heads_k * grid.shares)
    cleared = {"counted": counts, "cleared_tiles": grid.cleared_heads * of_a_head}
    launches = [
        Launch(
            first,
            blocks_first,
            BACKWARD_ROWS.pack_tail(common | cleared | _strides(request, "dout", "out", "lse", "dlse")),
        ),
        Launch(main, grid.blocks, _main_tail(request, config, grid)),
    ]
    if last is not None:
        launches.append(_last_launch(request, last, blocks_first * (ROW_TILE // 16), common))
    padded_rows = blocks_first * ROW_TILE
    workspace = Workspace.of(padded_rows, forward.head_dim, request.deterministic, counts, kv_sums)
    return BackwardPlan(request, tuple(launches), workspace, _geometry(request, config))


def _shared_tiles(grid: BackwardGrid) -> int:
    """Key tiles that several work tiles share."""
    return grid.work_tiles // grid.shares if grid.shares > 1 else 0


def _first_cleared(config: HopperConfig, grid: BackwardGrid) -> int:
    """Place of a head's count among the counts: behind the one of tiles taken, and those of shares joined."""
    return 1 + config.cluster * config.consumers * _shared_tiles(grid)


def _last_launch(request: BackwardRequest, last: LoadedKernel, row_blocks: int, common: dict[str, Any]) -> Launch:
    values = common | {"row_blocks": row_blocks, "scale": request.forward.scale} | _strides(request, "dq")
    return Launch(last, -(-row_blocks // (last.config.threads // 32)), BACKWARD_DQ.pack_tail(values))


def _main_tail(request: BackwardRequest, config: MainConfig, grid: BackwardGrid) -> bytes:
    values = _main_values(request, grid)
    if isinstance(config, BackwardConfig):
        return BACKWARD_SM80.pack_tail(values | _strides(request, "dout", "q", "k", "v", "dk", "dv"))
    turns = {"turn_group": fast_div(grid.turn_group), "turn_shift": grid.turn_shift}
    work = {
        "work_tiles": grid.work_tiles,
        "cleared_heads": grid.cleared_heads,
        "first_cleared": _first_cleared(config, grid),
        "shares": fast_div(grid.shares),
    }
    if isinstance(config, BackwardWideConfig):
        return BACKWARD_WIDE.pack_tail(values | turns | work | _strides(request, "dk", "dv", "dq"))
    return BACKWARD_SM90.pack_tail(values | turns | work | _strides(request, "dq"))


def _geometry(request: BackwardRequest, config: MainConfig) -> tuple[TensorGeometry, ...]:
    """What the tensor maps of a main kernel describe, in the order of its parameters."""
    if isinstance(config, BackwardConfig):
        return ()
    box_rows = {"q": config.block_m, "k": config.block_n, "v": config.block_n, "dout": config.block_m}
    if not isinstance(config, BackwardWideConfig):
        box_rows |= {"dk": config.stored_keys, "dv": config.stored_keys}
    dtype = request.forward.q.dtype
    return tuple(
        jit.tensor_geometry(dtype, request.extents(name), request.strides[name], rows)
        for name, rows in box_rows.items()
    )


def _main_values(request: BackwardRequest, grid: BackwardGrid) -> dict[str, Any]:
    forward = request.forward
    heads = forward.heads_k * grid.shares
    return {
        "heads": fast_div(heads),
        "section_tiles": fast_div(grid.section * grid.n_tiles),
        "section": fast_div(grid.section),
        "last_section": fast_div(grid.last_section),
        "batch_heads": forward.batch * heads,
        "heads_q": forward.heads,
        "group": forward.heads // heads,
        "seqlen_q": forward.seqlen_q,
        "seqlen_k": forward.seqlen_k,
        "causal_offset": forward.causal_offset,
        "m_tiles": grid.m_tiles,
        "n_tiles": grid.n_tiles,
        "scale": forward.scale,
        "scale_log2": forward.scale * LOG2_E,
    }


def _strides(request: BackwardRequest, *names: str) -> dict[str, int]:
    values: dict[str, int] = {}
    for name in names:
        of_rows = name in request.row_strides
        axes = ("batch", "head", "seq") if of_rows else ("batch", "seq", "head", "dim")
        strides = request.row_strides[name] if of_rows else request.strides[name]
        values |= {f"{name}_{axis}_stride": stride for axis, stride in zip(axes, strides, strict=True)}
    return values
