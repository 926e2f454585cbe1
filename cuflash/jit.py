"""What all launch plans stand on: loaded kernels, parameter blocks and tensor maps, and the tables that keep plans.

A plan holds everything about a call but its pointers, and what tensor maps make of them: `cuflash.forward_plan` makes
those of ordinary calls. Plans are found by a key of all that they depend on (`cuflash.api` builds it), in a plain
dictionary, without a lock; that makes the cold path, from a checked call to a loaded kernel and a plan, a rare one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from . import counters, driver
from .arch import ARCHES, Arch, arch_for, needs_ptx
from .arrays import ITEM_BYTES, Operand
from .errors import DriverError, MissingKernelError
from .problem import AttentionProblem
from .request import TMA_BYTES, Request

# What only the cold path needs (kernels, config, settings, cache) is imported where it is used: an import of the
# package, and of attention on the CPU, should not pay for it.
if TYPE_CHECKING:
    from .backward_plan import BackwardPlan
    from .compiled import Compiled
    from .config import KernelConfig
    from .forward_plan import CallPlan
    from .quantize_plan import QuantizePlan
    from .quantized_plan import QuantizedPlan
    from .quantizing_plan import QuantizingPlan
    from .settings import Settings
    from .sm90_config import Sm90Config

Origin = Literal["memory", "disk", "prebuilt", "compiled"]

MAX_PLANS = 4096
"""Bound of the plan table (some 2 KB each); the oldest goes. Lengths that grow step by step make many plans."""

MAX_PREPARED = 4096
"""Bound of the tables of prepared launches (1.5 KB for a call, 3 KB for a backward pass) and of tensor maps, of all
plans together; the oldest goes."""

MAX_FOLLOWERS = 16
"""Layouts of what arrives at a call's output, for each of which a plan remembers a backward plan."""


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


# --- launches --------------------------------------------------------------------------------------------------


class Buffers(threading.local):
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

buffers = Buffers()


def argument_buffer(device: int) -> driver.ArgumentBuffer:
    """The calling thread's parameter block for a device; its next launch fills it anew."""
    return buffers.of_device.get(device) or buffers.new(device)


class TensorGeometry(NamedTuple):
    """What `driver.encode_tensor_map` takes behind the address."""

    dtype: str
    extents: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box_rows: int


LaunchShape = tuple[int, tuple[int, int, int], tuple[int, int, int], int]
"""What `driver.launch` takes before the stream."""

PreparedLaunch = tuple[Callable[[], tuple[Any, ...]], driver.ArgumentBuffer]
"""What `driver.bind` gave, and its parameter block, which is never written again."""

prepared: dict[tuple[Any, ...], tuple[PreparedLaunch, ...]] = {}
"""The launches of the calls of late, by plan, stream and all that their parameter blocks hold beside: a framework's
allocator gives the same addresses step after step. Threads share them; readers need no lock."""


def prepare(key: tuple[Any, ...], stream: int, *launches: tuple[LaunchShape, bytes]) -> tuple[PreparedLaunch, ...]:
    """Launches with their packed parameters, for this call and the next one with this key."""
    ready = tuple(_bound(shape, stream, driver.ArgumentBuffer.of(packed)) for shape, packed in launches)
    keep(prepared, key, ready, MAX_PREPARED)
    return ready


def _bound(shape: LaunchShape, stream: int, block: driver.ArgumentBuffer) -> PreparedLaunch:
    return driver.bind(*shape, stream, block.address), block


def launch(launches: tuple[PreparedLaunch, ...]) -> None:
    """Launch what was prepared, in order; the device's context must be current."""
    for bound, _ in launches:
        result = bound()
        if result[0]:
            driver.check(result)


_tensor_maps: dict[tuple[TensorGeometry, int], bytes] = {}
"""Those of the arrays of late."""


def tensor_maps(geometry: tuple[TensorGeometry, ...], *addresses: int) -> bytes:
    """The tensor maps of arrays, one after the other."""
    return b"".join(map(_tensor_map, geometry, addresses))


def _tensor_map(geometry: TensorGeometry, address: int) -> bytes:
    found = _tensor_maps.get((geometry, address))
    if found is None:
        found = driver.encode_tensor_map(address, *geometry)
        keep(_tensor_maps, (geometry, address), found, MAX_PREPARED)
    return found


def span(x: Operand) -> tuple[int, int]:
    """First byte and end of an array's memory, relative to its address; (0, 0) if it has no elements."""
    if 0 in x.shape:
        return 0, 0
    reaches = [stride * (extent - 1) for stride, extent in zip(x.strides, x.shape, strict=True)]
    return sum(r for r in reaches if r < 0), sum(r for r in reaches if r > 0) + ITEM_BYTES[x.dtype]


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


def remember_with(plan: CallPlan, follower: tuple[Any, Callable[..., bool], BackwardPlan]) -> None:
    """Enter how a backward pass of a plan's calls is known, and its own plan."""
    plan.backward = (*plan.backward[1 - MAX_FOLLOWERS :], follower)


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
