"""The CUDA driver: contexts, kernel loading, launches, device figures. A thin layer over ``cuda.bindings.driver``.

Four rules: only the calls that cuflash needs are here; errors become `DriverError`; results come back bare, not as
tuples; nothing touches the driver before a function is called.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import INSTALL_CUDA, DriverError

if TYPE_CHECKING:
    from .compiled import Compiled

_cu: Any = None
"""The bindings, once `_driver` has initialised them; `launch` reads it without a call."""


@functools.cache
def _driver() -> Any:
    """The bindings of an initialised driver."""
    global _cu
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(f"the CUDA bindings for Python are not installed: {INSTALL_CUDA}") from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # libcuda cannot be loaded
        raise DriverError(
            "no CUDA driver (libcuda) was found: install the NVIDIA driver; without one, NumPy arrays run on the CPU"
        ) from error
    _cu = driver
    check((status,))
    return driver


def bindings_version() -> str:
    """The version of cuda-bindings, whose first number says which NVRTC they load; ImportError without them."""
    from cuda.bindings import __version__

    return str(__version__)


def check(result: tuple[Any, ...]) -> Any:
    """Unpack what a call of the bindings returned: None, the value, or a tuple of values.

    Raises
    ------
    DriverError
        The call failed; the message has CUDA's name of the error and its description.
    """
    status, *values = result
    if status:
        name, text = (_cu.cuGetErrorName(status)[1], _cu.cuGetErrorString(status)[1])
        raise DriverError(f"{_text(name) or int(status)}: {_text(text) or 'an error that this driver does not know'}")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def _text(value: bytes | None) -> str:
    return value.decode("ascii", "replace") if value else ""


# --- devices ---------------------------------------------------------------------------------------------------


class DeviceProperties(NamedTuple):
    """Figures of one device.

    Attributes
    ----------
    name : str
    compute_capability : tuple of int
    multiprocessors : int
    clock_hz : float
        Peak clock of the multiprocessors.
    memory_bytes_per_second : float
        Peak bandwidth of the device memory: two transfers per clock over the whole bus.
    memory_bytes, l2_bytes, smem_per_block, smem_per_sm : int
        Sizes in bytes; ``smem_per_block`` is the limit after opting in.
    """

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    clock_hz: float
    memory_bytes_per_second: float
    memory_bytes: int
    l2_bytes: int
    smem_per_block: int
    smem_per_sm: int


def device_count() -> int:
    """Number of visible devices."""
    return int(check(_driver().cuDeviceGetCount()))


@functools.cache
def _device(ordinal: int) -> Any:
    return check(_driver().cuDeviceGet(ordinal))


def _attribute(ordinal: int, name: str) -> int:
    cu = _driver()
    attribute = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check(cu.cuDeviceGetAttribute(attribute, _device(ordinal))))


@functools.cache
def device_compute_capability(ordinal: int) -> tuple[int, int]:
    """(major, minor) of a device."""
    major, minor = (_attribute(ordinal, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    return major, minor


@functools.cache
def multiprocessors(ordinal: int) -> int:
    """How many multiprocessors a device has; asked alone, since some figures of `device_properties` take a while."""
    return _attribute(ordinal, "MULTIPROCESSOR_COUNT")


@functools.cache
def device_properties(ordinal: int) -> DeviceProperties:
    """The figures of a device that choose, explain and measure kernels."""
    cu = _driver()
    bus_bytes = _attribute(ordinal, "GLOBAL_MEMORY_BUS_WIDTH") // 8
    return DeviceProperties(
        name=check(cu.cuDeviceGetName(256, _device(ordinal))).split(b"\0")[0].decode("utf-8", "replace"),
        compute_capability=device_compute_capability(ordinal),
        multiprocessors=multiprocessors(ordinal),
        clock_hz=1e3 * _attribute(ordinal, "CLOCK_RATE"),
        memory_bytes_per_second=2e3 * _attribute(ordinal, "MEMORY_CLOCK_RATE") * bus_bytes,
        memory_bytes=int(check(cu.cuDeviceTotalMem(_device(ordinal)))),
        l2_bytes=_attribute(ordinal, "L2_CACHE_SIZE"),
        smem_per_block=_attribute(ordinal, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        smem_per_sm=_attribute(ordinal, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
    )


# --- contexts --------------------------------------------------------------------------------------------------


@functools.cache
def _primary_context(ordinal: int) -> Any:
    """The context that CuPy, torch, JAX and the CUDA runtime share; retained for the life of the process."""
    return check(_driver().cuDevicePrimaryCtxRetain(_device(ordinal)))


def current_device() -> int:
    """The ordinal of the current context's device; 0, as in the CUDA runtime, where no context is current."""
    cu = _driver()
    if not int(check(cu.cuCtxGetCurrent())):
        return 0
    return int(check(cu.cuCtxGetDevice()))


def ensure_context(ordinal: int) -> None:
    """Make a device's primary context current in a thread that has none; other threads are left alone."""
    cu = _driver()
    if not int(check(cu.cuCtxGetCurrent())):
        check(cu.cuCtxSetCurrent(_primary_context(ordinal)))


def is_current(ordinal: int) -> bool:
    """Whether a device's primary context is the calling thread's current one."""
    context = _primary_context(ordinal)
    return int(check(_cu.cuCtxGetCurrent())) == int(context)


class device_context:
    """Context manager: a device's primary context is current inside, and the previous one again after it.

    Costs one query where the context is current already.
    """

    __slots__ = ("_ordinal", "_pushed")

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._pushed = False

    def __enter__(self) -> None:
        if not is_current(self._ordinal):
            check(_cu.cuCtxPushCurrent(_primary_context(self._ordinal)))
            self._pushed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pushed:
            self._pushed = False
            check(_cu.cuCtxPopCurrent())


# --- tensor maps -----------------------------------------------------------------------------------------------

TENSOR_MAP_BYTES = 128
BOX_BYTES = 128
"""Of a row that one TMA instruction moves, the span of the swizzle."""
BYTE = "uint8"
"""The dtype of arrays of 8-bit floats, whose boxes are narrower where their rows are."""


def box_bytes(dtype: str, dim: int) -> int:
    """The width of the boxes of an array whose last axis has ``dim`` elements: 128 bytes, or 64 or 32 of `BYTE`."""
    return 32 if dtype == BYTE and dim <= 32 else 64 if dtype == BYTE and dim <= 64 else BOX_BYTES


def encode_tensor_map(
    address: int, dtype: str, extents: tuple[int, ...], strides_bytes: tuple[int, ...], box_rows: int
) -> bytes:
    """A ``CUtensorMap`` of a (batch, heads, seq, dim) array of 1- or 2-byte elements, for boxes of rows of one head.

    What a box has beyond the array's end is read as zeros and not written.

    Parameters
    ----------
    address : int
        A multiple of 16.
    dtype : {"float16", "bfloat16", "uint8"}
    extents : tuple of four int
        (dim, seq, heads, batch), each at least 1.
    strides_bytes : tuple of three int
        Of seq, heads and batch: positive multiples of 16 below 2**40.
    box_rows : int
        Rows of a box, at most 256; it has the columns that `box_bytes` says.

    Raises
    ------
    DriverError
        The driver refused the geometry.
    """
    cu = _driver()
    u32, u64 = cu.cuuint32_t, cu.cuuint64_t
    # A read brings the next box's part of the row into the L2 as well; a row of one box has none, but a neighbour head.
    width = box_bytes(dtype, extents[0])
    columns = width if dtype == BYTE else width // 2
    promotion = "L2_256B" if extents[0] > columns else "L2_128B"
    tensor_map = check(
        cu.cuTensorMapEncodeTiled(
            getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}"),
            len(extents),
            address,
            [u64(extent) for extent in extents],
            [u64(stride) for stride in strides_bytes],
            [u32(side) for side in (columns, box_rows, 1, 1)],
            [u32(1)] * len(extents),
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{width}B"),
            getattr(cu.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}"),
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(tensor_map.getPtr(), TENSOR_MAP_BYTES)


# --- kernels ---------------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """A kernel that is loaded on one device.

    Attributes
    ----------
    handle : int
        The ``CUfunction``. It is valid as long as this object lives.
    symbol : str
    device : int
        The ordinal of its device.
    library : object
        What owns the code.
    """

    handle: int
    symbol: str
    device: int
    library: _Library


class _Library:
    """A loaded ``CUlibrary``, unloaded with the last kernel that uses it, but not at exit: the driver goes first."""

    def __init__(self, image: bytes) -> None:
        cu = _driver()
        self._library = check(cu.cuLibraryLoadData(image, None, None, 0, None, None, 0))
        weakref.finalize(self, cu.cuLibraryUnload, self._library).atexit = False

    def kernel(self, symbol: str) -> Any:
        return check(_cu.cuLibraryGetKernel(self._library, symbol.encode("ascii")))


def load_kernel(compiled: Compiled, smem_bytes: int, device: int) -> Kernel:
    """Load a cubin (or PTX) on a device and allow it its shared memory.

    The code is on the device when this returns: nothing is left to a first launch, which could lie inside a stream
    capture.

    Parameters
    ----------
    compiled : Compiled
    smem_bytes : int
        Dynamic shared memory of a launch.
    device : int
        Ordinal.

    Raises
    ------
    DriverError
        The driver refused the code, the symbol or the amount of shared memory.
    """
    try:
        with device_context(device):
            library = _Library(compiled.cubin)
            function = check(_cu.cuKernelGetFunction(library.kernel(compiled.symbol)))
            attribute = _cu.CUfunction_attribute
            for name, value in (
                (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes),
                (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
            ):
                check(_cu.cuFuncSetAttribute(function, name, value))
    except DriverError as error:
        raise DriverError(
            f"loading {compiled.symbol} ({compiled.arch}, {smem_bytes} bytes of shared memory) "
            f"on device {device} failed: {error}"
        ) from error
    return Kernel(int(function), compiled.symbol, device, library)


class ArgumentBuffer:
    """Host memory for a kernel's one argument, and the array of one pointer to it that a launch takes.

    The driver copies the bytes during the launch, so a buffer can be filled again as soon as `launch` returns; two
    threads need two buffers.

    Attributes
    ----------
    block : writable buffer of ``size`` bytes
        For ``struct.pack_into`` and slice assignment.
    address : int
        What `launch` takes as ``params_address``.
    """

    __slots__ = ("_pointer", "address", "block")

    def __init__(self, size: int) -> None:
        self.block = (ctypes.c_ubyte * size)()
        self._pointer = ctypes.c_void_p(ctypes.addressof(self.block))
        self.address = ctypes.addressof(self._pointer)

    @classmethod
    def of(cls, packed: bytes) -> ArgumentBuffer:
        """A buffer that holds an argument."""
        buffer = cls(len(packed))
        ctypes.memmove(buffer.block, packed, len(packed))
        return buffer


def launch(
    handle: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    smem_bytes: int,
    stream: int,
    params_address: int,
) -> None:
    """Launch a loaded kernel; its device's context must be current.

    Parameters
    ----------
    handle : int
        `Kernel.handle`.
    grid, block : tuple of int
        Thread blocks and threads.
    smem_bytes : int
        Dynamic shared memory.
    stream : int
        ``CUstream`` handle.
    params_address : int
        `ArgumentBuffer.address` of the parameter block.
    """
    x, y, z = grid
    threads_x, threads_y, threads_z = block
    result = _cu.cuLaunchKernel(handle, x, y, z, threads_x, threads_y, threads_z, smem_bytes, stream, params_address, 0)
    if result[0]:
        check(result)


def bind(
    handle: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    smem_bytes: int,
    stream: int,
    params_address: int,
) -> Callable[[], tuple[Any, ...]]:
    """`launch` as a call without arguments and without Python in it, to be repeated; its result is for `check`."""
    return functools.partial(_cu.cuLaunchKernel, handle, *grid, *block, smem_bytes, stream, params_address, 0)


def launch_early(
    handle: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    smem_bytes: int,
    stream: int,
    params_address: int,
) -> None:
    """The same of a kernel that may begin when the one before it in the stream allows that, and waits for it itself.

    Takes a device of compute capability 9.0 or later (programmatic dependent launch).
    """
    result = _cu.cuLaunchKernelEx(_early_config(grid, block, smem_bytes, stream), handle, params_address, 0)
    if result[0]:
        check(result)


@functools.lru_cache(256)
def _early_config(grid: tuple[int, int, int], block: tuple[int, int, int], smem_bytes: int, stream: int) -> Any:
    """Never changed once it is made: threads share it."""
    config = _cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = smem_bytes
    config.hStream = stream
    config.attrs = [_early_attribute()]
    config.numAttrs = 1
    return config


@functools.cache
def _early_attribute() -> Any:
    attribute, value = _cu.CUlaunchAttribute(), _cu.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.id = _cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value = value
    return attribute
