"""The cold path, from a checked call to a loaded kernel and a launch plan, and the table that makes it a rare one.

A plan holds everything about a call but its five pointers, and what tensor maps make of them. Plans are found by a key
of all that they depend on (`cuflash.api` builds it), in a plain dictionary, without a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from . import counters, driver
from .arch import ARCHES, Arch, arch_for, needs_ptx
from .arrays import ITEM_BYTES, Operand
from .errors import DriverError, MissingKernelError
from .params import FORWARD_SM80, FORWARD_SM90, fast_div, stride_values
from .problem import AttentionProblem
from .request import LOG2_E, TMA_BYTES, TMA_TILE_ROWS, Request

# What only the cold path needs (kernels, config, settings, cache) is imported where it is used: an import of the
# package, and of attention on the CPU, should not pay for it.
if TYPE_CHECKING:
    from .backward_plan import BackwardPlan
    from .compiled import Compiled
    from .config import ForwardConfig, KernelConfig
    from .quantize_plan import QuantizePlan
    from .quantized_plan import QuantizedPlan
    from .quantizing_plan import QuantizingPlan
    from .settings import Settings
    from .sm90_config import Sm90Config

Origin = Literal["memory", "disk", "prebuilt", "compiled"]

MAX_PLANS = 4096
"""Bound of the plan table (some 2 KB each); the oldest goes. Lengths that grow step by step make many plans."""

MAX_PLACES = 4096
"""Bound of the tables of tensor maps, of all plans together (0.7 KB for each set of addresses); the oldest goes."""

MAX_FOLLOWERS = 16
"""Layouts of what arrives at a call's output, for each of which a plan remembers a backward plan."""

MAX_PROVEN = 16
"""Placements of interleaved arrays, such as the parts of a packed one, that a plan remembers."""


# --- kernels ---------------------------------------------------------------------------------------------------


class LoadedKernel(NamedTuple):
    """A kernel on a device, with all that led to it.

    Attributes
    ----------
    kernel : driver.Kernel
    problem : AttentionProblem
    config : KernelConfig
    compiled : Compiled
    origin : {"memory", "disk", "prebuilt", "compiled"}
        Where its code came from when it was loaded; ``"memory"``: it was on another device already.
    """

    kernel: driver.Kernel
    problem: AttentionProblem
    config: KernelConfig
    compiled: Compiled
    origin: Origin


_loaded: dict[tuple[AttentionProblem, int], LoadedKernel] = {}
_code: dict[tuple[AttentionProblem, bool], Compiled] = {}
_locks: dict[Hashable, threading.Lock] = {}


def kernel_for(problem: AttentionProblem, device: int) -> LoadedKernel:
    """The loaded kernel of a problem; compiled, once for all threads, if no cache has it.

    Raises
    ------
    CompileError, MissingKernelError, DriverError
    """
    key = (problem, device)
    loaded = _loaded.get(key)
    if loaded is None:
        # By problem alone: a second device waits for the first one's code instead of compiling it again.
        with _locks.setdefault(problem, threading.Lock()):
            loaded = _loaded.get(key)
            if loaded is None:
                loaded = _loaded[key] = _load(problem, device)
    return loaded


def device_arch(device: int) -> Arch:
    """The compile target of a device.

    Raises
    ------
    UnsupportedError
        The device is older than compute capability 8.0.
    """
    return arch_for(driver.device_compute_capability(device))


def _load(problem: AttentionProblem, device: int) -> LoadedKernel:
    from . import kernels
    from .settings import read_settings

    config = kernels.select_config(problem)
    ptx = needs_ptx(ARCHES[problem.arch], driver.device_compute_capability(device))
    origin: Origin = "memory"
    compiled = _code.get((problem, ptx))
    settings = read_settings()
    if compiled is None:
        compiled, origin = obtain_code(problem, config, settings, ptx=ptx)
    smem_bytes = config.smem_bytes(problem)
    try:
        kernel = driver.load_kernel(compiled, smem_bytes, device)
    except DriverError:
        if origin != "disk":
            raise
        discard_code(problem, config, settings, ptx=ptx)
        compiled, origin = obtain_code(problem, config, settings, ptx=ptx)
        kernel = driver.load_kernel(compiled, smem_bytes, device)
    if takes_counter(config):
        counters.prepare(device)
    _code[problem, ptx] = compiled
    return LoadedKernel(kernel, problem, config, compiled, origin)


def takes_counter(config: KernelConfig) -> bool:
    """Whether a kernel draws its tiles from a counter."""
    return config.family in ("forward_sm90", "forward_fp8_sm90") and cast("Sm90Config", config).dynamic


def find_code(
    problem: AttentionProblem, config: KernelConfig, settings: Settings, *, ptx: bool = False
) -> tuple[Compiled, Origin] | None:
    """A kernel's code from the prebuilt directory or the disk cache; neither renders nor compiles."""
    from . import cache

    key = cache.cache_key(problem, config, lineinfo=settings.lineinfo, ptx=ptx)
    if settings.prebuilt_dir is not None and (compiled := cache.load_prebuilt(settings.prebuilt_dir, key)):
        return compiled, "prebuilt"
    store = cache.open_cache(settings)
    if store is not None and (compiled := store.load(key)):
        return compiled, "disk"
    return None


def obtain_code(
    problem: AttentionProblem, config: KernelConfig, settings: Settings, *, ptx: bool = False
) -> tuple[Compiled, Origin]:
    """A kernel's code, compiled and published in the disk cache if it is nowhere.

    Raises
    ------
    CompileError
        NVRTC refused the kernel.
    MissingKernelError
        There is no NVRTC, or compiling is switched off.
    """
    found = find_code(problem, config, settings, ptx=ptx)
    if found is not None:
        return found
    if not settings.jit:
        from . import kernels

        raise MissingKernelError(
            f"{kernels.symbol(problem, config)} for {problem.arch} is in no cache, and CUFLASH_DISABLE_JIT=1 forbids "
            f"to compile it: unset that, or build kernels beforehand, `cuflash compile --all --arch {problem.arch}`, "
            "and name their directory in CUFLASH_CACHE_DIR or CUFLASH_PREBUILT_DIR"
        )
    from . import cache, compiler, render

    source = render.render(problem, config, lineinfo=settings.lineinfo)
    compiled = compiler.compile_source(source, ptx=ptx)
    store = cache.open_cache(settings)
    if store is not None:
        key = cache.cache_key(problem, config, lineinfo=settings.lineinfo, ptx=ptx)
        store.publish(key, source, compiled, {"problem": repr(problem), "config": repr(config)})
    return compiled, "compiled"


def discard_code(problem: AttentionProblem, config: KernelConfig, settings: Settings, *, ptx: bool) -> None:
    """Remove a kernel that the driver refuses from the disk cache."""
    from . import cache

    store = cache.open_cache(settings)
    if store is not None:
        store.discard(cache.cache_key(problem, config, lineinfo=settings.lineinfo, ptx=ptx))


# --- plans -----------------------------------------------------------------------------------------------------


class _Buffers(threading.local):
    """Each thread's parameter block for each device."""

    def __init__(self) -> None:
        self.of_device: dict[int, driver.ArgumentBuffer] = {}

    def new(self, device: int) -> driver.ArgumentBuffer:
        # The first launch of this thread on this device: a thread that CUDA does not know yet has no context.
        driver.ensure_context(device)
        buffer = self.of_device[device] = driver.ArgumentBuffer(BUFFER_BYTES)
        return buffer


BUFFER_BYTES = 4096
"""What kernels take at most (before CUDA 12.1). The driver copies what the launched one takes."""

_buffers = _Buffers()


def argument_buffer(device: int) -> driver.ArgumentBuffer:
    """The calling thread's parameter block for a device; its next launch fills it anew."""
    return _buffers.of_device.get(device) or _buffers.new(device)


_pack_sm80 = FORWARD_SM80.launch_block.pack_into
_pack_sm90 = FORWARD_SM90.launch_block.pack_into


class CallPlan:
    """Everything about a call but its pointers: of a call that launches nothing, or an Ampere-style kernel.

    Attributes
    ----------
    device : int
    out_shape : tuple of int
        In the caller's axis order.
    lse_shape : tuple of int
    alignment : int
        The output's address must be a multiple of it.
    dead : bool
        There are rows but no keys: nothing is launched, and the caller fills 0 and -inf in.
    loaded : LoadedKernel or None
        None if nothing is launched.
    launches : tuple of (grid, packed parameters after those that follow from pointers)
    backward : dict
        What `cuflash.torch` has found out for the backward passes of such calls.
    """

    __slots__ = (
        "_block", "_handle", "_proven", "_smem_bytes", "_spans", "alignment", "backward", "dead", "device", "launches",
        "loaded", "lse_shape", "out_shape",
    )  # fmt: skip

    def __init__(
        self, request: Request, loaded: LoadedKernel | None, launches: tuple[tuple[tuple[int, int, int], bytes], ...]
    ) -> None:
        self.device = request.device
        self.out_shape = request.out_shape
        self.lse_shape = request.lse_shape
        self.dead = request.seqlen_k == 0 and request.rows > 0
        self.loaded = loaded
        self.launches = launches
        self.backward: dict[Hashable, Any] = {}
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
            buffer = _buffers.of_device.get(self.device) or _buffers.new(self.device)
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


class TensorGeometry(NamedTuple):
    """What `driver.encode_tensor_map` takes behind the address."""

    dtype: str
    extents: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box_rows: int


_places: dict[tuple[Any, ...], bytes] = {}
_tensor_maps: dict[tuple[TensorGeometry, int], bytes] = {}
"""Tensor maps of what was launched lately: all of a call by plan and addresses, and each. Readers need no lock."""


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
        # The buffer first: where this thread has no context yet, it makes one current, which tensor maps need as well.
        buffer = _buffers.of_device.get(self.device) or _buffers.new(self.device)
        maps = _places.get((self, q, k, v, out)) or tensor_maps(self, self._geometry, q, k, v, out)
        ((grid, tail),) = self.launches
        counter = counters.take(self.device, stream) if self._counted else counters.NO_COUNTER
        _pack_sm90(buffer.block, 0, maps, out, lse, counter, tail)
        driver.launch(self._handle, grid, self._block, self._smem_bytes, stream, buffer.address)


def tensor_maps(plan: object, geometry: tuple[TensorGeometry, ...], *addresses: int) -> bytes:
    """The tensor maps of a plan's arrays, one after the other; encoded if these addresses are new to it."""
    maps = _places.get((plan, *addresses))
    if maps is None:
        maps = b"".join(map(_tensor_map, geometry, addresses))
        keep(_places, (plan, *addresses), maps, MAX_PLACES)
    return maps


def _tensor_map(geometry: TensorGeometry, address: int) -> bytes:
    found = _tensor_maps.get((geometry, address))
    if found is None:
        found = driver.encode_tensor_map(address, *geometry)
        keep(_tensor_maps, (geometry, address), found, MAX_PLACES)
    return found


def span(x: Operand) -> tuple[int, int]:
    """First byte and end of an array's memory, relative to its address; (0, 0) if it has no elements."""
    if 0 in x.shape:
        return 0, 0
    reaches = [stride * (extent - 1) for stride, extent in zip(x.strides, x.shape, strict=True)]
    return sum(r for r in reaches if r < 0), sum(r for r in reaches if r > 0) + ITEM_BYTES[x.dtype]


def make_plan(request: Request) -> CallPlan:
    """Plan a GPU call; compiles and loads its kernel if that was not done before."""
    if request.rows == 0 or request.seqlen_k == 0:
        return CallPlan(request, None, ())
    from . import kernels

    loaded = kernel_for(kernels.problem_for(request, device_arch(request.device).name), request.device)
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


def sizes_of(request: Request) -> tuple[int, int, int, int]:
    """What the grid of a call depends on: batch * query heads, query heads for each key/value head, both lengths."""
    return request.batch * request.heads, request.heads // request.heads_k, request.seqlen_q, request.seqlen_k


def tensor_geometry(dtype: str, extents: tuple[int, ...], strides: tuple[int, ...], box_rows: int) -> TensorGeometry:
    """An array as a tensor map sees it; extents and strides in elements along (batch, seq, heads, dim)."""
    item = ITEM_BYTES[dtype]
    batch, seq, heads, dim = extents
    # The stride of an axis of one element is never used, but must be a legal one.
    legal = tuple(strides[axis] * item or -(-dim * item // TMA_BYTES) * TMA_BYTES for axis in (1, 2, 0))
    return TensorGeometry(dtype, (dim, seq, heads, batch), legal, box_rows)


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


# --- the table -------------------------------------------------------------------------------------------------

PLANS: dict[Hashable, CallPlan] = {}
BACKWARD_PLANS: dict[Hashable, BackwardPlan] = {}
QUANTIZE_PLANS: dict[Hashable, QuantizePlan] = {}
QUANTIZED_PLANS: dict[Hashable, QuantizedPlan] = {}
QUANTIZING_PLANS: dict[Hashable, QuantizingPlan] = {}
_table_lock = threading.Lock()


def remember(key: Hashable, plan: CallPlan) -> None:
    """Enter a plan into the table; readers need no lock."""
    keep(PLANS, key, plan, MAX_PLANS)


def remember_backward(key: Hashable, plan: BackwardPlan) -> None:
    """Enter a plan of a backward call into the table of these."""
    keep(BACKWARD_PLANS, key, plan, MAX_PLANS)


def remember_with(plan: CallPlan, key: Hashable, value: Any) -> None:
    """Enter something about the backward passes of a plan's calls into the plan."""
    keep(plan.backward, key, value, MAX_FOLLOWERS)


def forget_plans() -> None:
    """Empty the tables."""
    with _table_lock:
        PLANS.clear()
        BACKWARD_PLANS.clear()
        QUANTIZE_PLANS.clear()
        QUANTIZED_PLANS.clear()
        QUANTIZING_PLANS.clear()


Key = TypeVar("Key")
Value = TypeVar("Value")


def keep(table: dict[Key, Value], key: Key, value: Value, limit: int) -> None:
    """Enter something into a table of bounded size, the oldest for it."""
    with _table_lock:
        while len(table) >= limit:
            del table[next(iter(table))]
        table[key] = value
