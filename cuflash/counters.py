"""Work counters: the two words in device memory from which the blocks of one launch draw their tiles.

A kernel with a dynamic order finds both words zero and leaves them zero. Two launches that run at the same time must
not share a counter: each would skip the tiles that the other took. `take` gives out addresses by these rules:

- Launches in one stream run one after the other, so a stream has one counter. A stream is known by the id of
  ``cuStreamGetId``, which is never given twice in a process. Its handle would not do: the driver gives the handle of a
  destroyed stream to a new one while work of the old one still runs. Nor would a thread's ident for the stream that
  handle 2, ``CU_STREAM_PER_THREAD``, means in that thread: it is given again, too.
- A launch that is captured into a graph gets a counter that nothing else ever gets: the graph may be replayed beside
  anything. One executable graph never runs beside itself. Two executables of one graph at once would share counters,
  but they would write one output at once as well, which CUDA leaves to the caller to prevent.
- Where there is none to give, the answer is `NO_COUNTER`, and the kernel takes its tiles in a fixed order: right, and
  somewhat slower. That is so once `MAX_STREAMS` streams had one, since no one can tell whether the work of a stream
  that is gone is done; after captures of all counters; and where the driver does not tell about the stream, as it does
  for the legacy stream while a blocking stream is captured, when it refuses the launch as well.

`prepare` allocates a device's first counters. More are added, and never freed, when captures or streams have used most
of them, by a later call outside a capture; no call waits for that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from . import driver
from .driver import check
from .errors import DriverError

NO_COUNTER = 0
"""The address that makes a kernel take its static order."""

SLOT_BYTES = 32
"""A counter has two 4-byte words. In 32 bytes, a sector of the L2 cache, no two launches' atomics meet."""

ARRAY_BYTES = 64 * 1024
MAX_ARRAYS = 64
"""Bound of the memory, 4 MiB for each device."""

SLOTS = ARRAY_BYTES // SLOT_BYTES
LOW_WATER = SLOTS // 2
"""With fewer free counters than this, another array is asked for."""

MAX_STREAMS = MAX_ARRAYS * SLOTS // 2
"""Streams of one device that may have counters; the others are for captures. Some 300 bytes of host memory each."""

PER_THREAD = 2
"""The handle ``CU_STREAM_PER_THREAD``."""

_Key = tuple[int, int, int]
"""Device, id of the stream, and the thread for `PER_THREAD`."""


class _Pool:
    """The counters of one device; used under `_lock`."""

    __slots__ = ("arrays", "device", "free", "growable", "of_stream", "pending")

    def __init__(self, device: int, first: ZeroedMemory) -> None:
        self.device = device
        self.arrays = 0
        self.free: list[int] = []
        self.growable = True
        self.of_stream: dict[_Key, int] = {}
        self.pending: ZeroedMemory | None = None
        self._add(first)

    def _add(self, memory: ZeroedMemory) -> None:
        self.free += range(memory.address, memory.address + ARRAY_BYTES, SLOT_BYTES)
        self.arrays += 1
        self.growable = self.arrays < MAX_ARRAYS

    @property
    def wants_more(self) -> bool:
        return self.growable and len(self.free) < LOW_WATER

    def take(self) -> int:
        return self.free.pop() if self.free else NO_COUNTER

    def take_for(self, key: _Key) -> int:
        address = self.of_stream.get(key, NO_COUNTER)
        if address == NO_COUNTER and len(self.of_stream) < MAX_STREAMS:
            address = self.take()
            if address != NO_COUNTER:
                self.of_stream[key] = address
        return address

    def grow(self) -> None:
        """Ask for an array, or add the one that was asked for before, if its zeros are there."""
        try:
            if self.pending is None:
                self.pending = ZeroedMemory(ARRAY_BYTES, self.device)
            elif self.pending.is_ready():
                memory, self.pending = self.pending, None
                self._add(memory)
        except DriverError:  # no launch fails for want of a counter
            self.growable = False


_pools: dict[int, _Pool] = {}
_hot: dict[_Key, int] = {}
"""The counters of streams, for readers without a lock. Emptied while counters are few, so that calls come by `grow`."""
_lock = threading.Lock()


def prepare(device: int) -> None:
    """Allocate the first counters of a device, once; waits until they are zero.

    To be called whenever a kernel that takes counters is loaded: its launches can be captured afterwards.

    Raises
    ------
    DriverError
        The device has no memory left, or is lost.
    """
    if device in _pools:
        return
    with _lock:
        if device not in _pools:
            try:
                memory = ZeroedMemory(ARRAY_BYTES, device)
                memory.wait()
            except DriverError as error:
                raise DriverError(
                    f"allocating {ARRAY_BYTES} bytes for work counters on device {device} failed: {error}"
                ) from error
            _pools[device] = _Pool(device, memory)


def take(device: int, stream: int) -> int:
    """The counter for the launch that follows in this thread.

    Parameters
    ----------
    device : int
        Ordinal of a prepared device; its context is current.
    stream : int
        The handle of the launch.

    Returns
    -------
    int
        Address of two zero words, a multiple of `SLOT_BYTES`; `NO_COUNTER` where there is none to give.
    """
    try:
        number = stream_id(stream)
    except DriverError:  # the launch will tell, or do without
        return NO_COUNTER
    if number is None:
        return _take_for_capture(device)
    # Handle 2 should have an id in each thread; the documentation leaves that open, hence the thread's ident.
    key = (device, number, threading.get_ident() if stream == PER_THREAD else 0)
    return _hot.get(key) or _take_for_stream(key)


def _take_for_stream(key: _Key) -> int:
    pool = _pools[key[0]]
    with _lock:
        if pool.wants_more:
            pool.grow()
        address = pool.take_for(key)
        if address != NO_COUNTER and not pool.wants_more:
            _hot[key] = address
        return address


def _take_for_capture(device: int) -> int:
    pool = _pools[device]
    with _lock:
        address = pool.take()
        if pool.wants_more:
            _hot.clear()
        return address


# --- driver calls ----------------------------------------------------------------------------------------------


def stream_id(stream: int) -> int | None:
    """The id of a stream, unique in the life of the process; None if the stream is being captured.

    Raises
    ------
    DriverError
        The driver does not tell.
    """
    cu = driver._cu
    result = cu.cuStreamIsCapturing(stream)
    if result[0]:
        check(result)
    if result[1]:  # asking for the id would be an error
        return None
    result = cu.cuStreamGetId(stream)
    if result[0]:
        check(result)
    number: int = result[1]
    return number


@contextmanager
def _beside_captures(device: int) -> Iterator[None]:
    """Inside, a device's context is current, and allocating neither fails for a capture in any thread nor spoils it."""
    cu = driver._driver()
    with driver.device_context(device):
        mode = check(cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            yield
        finally:
            check(cu.cuThreadExchangeStreamCaptureMode(mode))


class ZeroedMemory:
    """Device memory that is filled with zeros in a stream of its own, and never freed.

    A plain memset would run in the legacy stream, which waits for others and cannot be used beside some captures.

    Attributes
    ----------
    address : int
        A multiple of 256.
    """

    __slots__ = ("_device", "_stream", "address")

    def __init__(self, size: int, device: int) -> None:
        cu = driver._driver()
        self._device = device
        with _beside_captures(device):
            self._stream = check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
            try:
                self.address = int(check(cu.cuMemAlloc(size)))
                check(cu.cuMemsetD8Async(self.address, 0, size, self._stream))
            except DriverError:
                cu.cuStreamDestroy(self._stream)
                raise

    def is_ready(self) -> bool:
        """Whether the zeros are there; not to be asked again after True, nor after `wait`."""
        cu = driver._driver()
        with _beside_captures(self._device):
            result = cu.cuStreamQuery(self._stream)
            if result[0] == cu.CUresult.CUDA_ERROR_NOT_READY:
                return False
            check(result)
            check(cu.cuStreamDestroy(self._stream))
        return True

    def wait(self) -> None:
        cu = driver._driver()
        with _beside_captures(self._device):
            check(cu.cuStreamSynchronize(self._stream))
            check(cu.cuStreamDestroy(self._stream))
