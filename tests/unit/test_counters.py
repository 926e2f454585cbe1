"""Work counters over a stand-in for the driver: who shares one with whom, how they become more, and what is refused."""

from __future__ import annotations

import contextlib
import enum
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuflash import counters, driver
from cuflash.counters import ARRAY_BYTES, LOW_WATER, MAX_ARRAYS, NO_COUNTER, PER_THREAD, SLOT_BYTES, SLOTS
from cuflash.errors import DriverError


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906


OK = CUresult.CUDA_SUCCESS
RELAXED, GLOBAL = 2, 0
LEGACY = 1


class FakeCuda:
    """Streams, captures and memory of two devices.

    Attributes
    ----------
    capturing : set of int
        Handles of the streams that are captured.
    legacy_unusable : bool
        A blocking stream is captured.
    one_id_for_handle_2 : bool
        Else every thread has its own.
    busy : bool
        No memset ends.
    failing : set of str
        Calls that fail for want of memory.
    arrays : dict
        Address to [size, device, whether it is zero].
    spoiled : bool
        A capture was made invalid by an allocation.
    """

    CUresult = CUresult
    CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=RELAXED)
    CUstream_flags = types.SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self) -> None:
        self.device = 0
        self.ids: dict[int, int] = {}
        self.next_id = 100
        self.next_handle = 0x5000
        self.next_address = 7 << 40
        self.capturing: set[int] = set()
        self.legacy_unusable = False
        self.one_id_for_handle_2 = False
        self.busy = False
        self.failing: set[str] = set()
        self.arrays: dict[int, list[Any]] = {}
        self.filling: dict[int, int] = {}
        self.private: set[int] = set()
        self.spoiled = False
        self.thread = threading.local()
        self.lock = threading.Lock()

    # --- what a user does

    def stream(self, handle: int | None = None) -> int:
        """A new stream, with the handle of one that is gone or another."""
        with self.lock:
            self.next_id += 1
            if handle is None:
                self.next_handle += 0x40
                handle = self.next_handle
            self.ids[handle] = self.next_id
        return handle

    @contextlib.contextmanager
    def capture(self, handle: int) -> Iterator[None]:
        self.capturing.add(handle)
        try:
            yield
        finally:
            self.capturing.remove(handle)

    @contextlib.contextmanager
    def on_device(self, ordinal: int) -> Iterator[None]:
        previous, self.device = self.device, ordinal
        try:
            yield
        finally:
            self.device = previous

    # --- the driver

    def cuGetErrorName(self, status: CUresult) -> tuple[Any, ...]:
        return OK, status.name.encode()

    def cuGetErrorString(self, status: CUresult) -> tuple[Any, ...]:
        return OK, b"described"

    def cuStreamIsCapturing(self, stream: int) -> tuple[Any, ...]:
        if stream <= LEGACY and self.legacy_unusable:
            return CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, None
        return OK, int(stream in self.capturing)

    def cuStreamGetId(self, stream: int) -> tuple[Any, ...]:
        if stream in self.capturing:
            return CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, None
        if stream <= LEGACY:
            return OK, 1 + self.device
        if stream == PER_THREAD:
            if self.one_id_for_handle_2:
                return OK, 99
            own = self.thread.__dict__
            if "id" not in own:
                own["id"] = self.ids[self.stream()]
            return OK, own["id"]
        return OK, self.ids[stream]

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[Any, ...]:
        previous = self.thread.__dict__.get("mode", GLOBAL)
        self.thread.mode = mode
        return OK, previous

    def _allowed(self) -> bool:
        """Whether the thread may make potentially unsafe calls; otherwise captures become invalid."""
        unsafe = bool(self.capturing) and self.thread.__dict__.get("mode", GLOBAL) != RELAXED
        self.spoiled |= unsafe
        return not unsafe

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:
        if not self._allowed():
            return CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, None
        if "cuMemAlloc" in self.failing:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        self.next_address += size + 256
        self.arrays[self.next_address] = [size, self.device, False]
        return OK, self.next_address

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        assert self.arrays[address][0] == size and value == 0 and stream in self.private
        self.filling[stream] = address
        return (OK,)

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        assert flags == 1, "a blocking stream waits for the legacy one"
        if "cuStreamCreate" in self.failing:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        handle = self.stream()
        self.private.add(handle)
        return OK, handle

    def cuStreamQuery(self, stream: int) -> tuple[Any, ...]:
        assert self._allowed() and stream in self.private
        if self.busy:
            return (CUresult.CUDA_ERROR_NOT_READY,)
        self.arrays[self.filling[stream]][2] = True
        return (OK,)

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        self.busy = False
        return self.cuStreamQuery(stream)

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        self.private.remove(stream)
        return (OK,)


class Owners:
    """Gives counters out and holds that each is aligned, zero, apart from the others, and of one owner for ever."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.of: dict[int, object] = {}
        self.lock = threading.Lock()

    def take(self, stream: int, device: int = 0) -> int:
        with self.cuda.on_device(device):
            address = counters.take(device, stream)
            captured = stream in self.cuda.capturing
            owner = object() if captured else (device, self.cuda.cuStreamGetId(stream)[1])
        if address != NO_COUNTER:
            assert address % SLOT_BYTES == 0
            (base,) = (b for b, (size, _, _) in self.cuda.arrays.items() if b <= address and address + 8 <= b + size)
            assert self.cuda.arrays[base][1:] == [device, True], "of another device, or not zero yet"
            with self.lock:
                assert self.of.setdefault(address, owner) == owner, "shared"
        return address


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(driver, "_cu", fake)
    monkeypatch.setattr(driver, "_driver", lambda: fake)
    monkeypatch.setattr(driver, "device_context", fake.on_device)
    monkeypatch.setattr(counters, "_pools", {})
    monkeypatch.setattr(counters, "_hot", {})
    return fake


@pytest.fixture
def owners(cuda: FakeCuda) -> Owners:
    counters.prepare(0)
    return Owners(cuda)


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Runs work(0..count-1) in threads that all live until the last is done."""
    barrier = threading.Barrier(count)

    def run(index: int) -> Any:
        barrier.wait()
        result = work(index)
        barrier.wait()
        return result

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


# --- who shares a counter --------------------------------------------------------------------------------------


def test_a_stream_keeps_its_counter(cuda: FakeCuda, owners: Owners) -> None:
    streams = [cuda.stream() for _ in range(5)]
    first = [owners.take(s) for s in streams]
    assert NO_COUNTER not in first and len(set(first)) == 5
    assert [owners.take(s) for s in streams] == first


def test_a_known_stream_needs_two_queries_and_no_lock(cuda: FakeCuda, owners: Owners, monkeypatch: Any) -> None:
    stream = cuda.stream()
    address = owners.take(stream)
    monkeypatch.setattr(counters, "_lock", None)
    calls = types.SimpleNamespace(cuStreamIsCapturing=cuda.cuStreamIsCapturing, cuStreamGetId=cuda.cuStreamGetId)
    monkeypatch.setattr(driver, "_cu", calls)
    assert counters.take(0, stream) == address


def test_both_handles_of_the_legacy_stream(owners: Owners) -> None:
    assert owners.take(0) == owners.take(LEGACY) != NO_COUNTER


def test_a_reused_handle_is_another_stream(cuda: FakeCuda, owners: Owners) -> None:
    """The driver gives a destroyed stream's handle again while its work still runs."""
    handle = cuda.stream()
    first = owners.take(handle)
    assert cuda.stream(handle) == handle
    assert owners.take(handle) not in (first, NO_COUNTER)


@pytest.mark.parametrize("one_id", [False, True])
def test_handle_2_is_a_stream_of_each_thread(one_id: bool, cuda: FakeCuda) -> None:
    cuda.one_id_for_handle_2 = one_id
    counters.prepare(0)
    found = in_threads(8, lambda _: {counters.take(0, PER_THREAD) for _ in range(3)})
    assert all(len(f) == 1 for f in found) and len(set.union(*found)) == 8


def test_threads_that_follow_each_other_share_nothing_on_handle_2(owners: Owners) -> None:
    """The ident of a thread is given again, and work of the first thread's stream may still run."""
    found = []
    for _ in range(5):
        thread = threading.Thread(target=lambda: found.append(owners.take(PER_THREAD)))
        thread.start()
        thread.join()
    assert len(set(found)) == 5


def test_every_captured_launch_has_its_own(cuda: FakeCuda, owners: Owners) -> None:
    a, b = cuda.stream(), cuda.stream()
    found = [owners.take(a)]
    for _ in range(2):
        with cuda.capture(a), cuda.capture(b):
            found += [owners.take(s) for s in (a, b, a)]
    assert len(set(found)) == 7 and NO_COUNTER not in found
    assert owners.take(a) == found[0]


def test_devices_have_memory_of_their_own(cuda: FakeCuda, owners: Owners) -> None:
    counters.prepare(1)
    assert owners.take(0, device=0) != owners.take(0, device=1)
    assert sorted(array[1] for array in cuda.arrays.values()) == [0, 1]


def test_legacy_stream_beside_a_capture_of_a_blocking_one(cuda: FakeCuda, owners: Owners) -> None:
    """The driver refuses the launch, and does so itself."""
    cuda.legacy_unusable = True
    assert owners.take(0) == NO_COUNTER
    cuda.legacy_unusable = False
    assert owners.take(0) != NO_COUNTER


def test_many_threads_and_streams(cuda: FakeCuda, owners: Owners) -> None:
    streams = [cuda.stream() for _ in range(40)]
    found = in_threads(16, lambda i: [owners.take(streams[(i + n) % 40]) for n in range(200)])
    assert len(set().union(*found)) == 40


# --- memory ----------------------------------------------------------------------------------------------------


def test_prepare_allocates_once(cuda: FakeCuda) -> None:
    in_threads(8, lambda _: counters.prepare(0))
    assert [a[0] for a in cuda.arrays.values()] == [ARRAY_BYTES] and not cuda.private


def test_prepare_beside_a_capture(cuda: FakeCuda) -> None:
    """Another thread's capture, in the strictest mode, neither forbids nor suffers it; the mode is set back."""
    with cuda.capture(cuda.stream()):
        counters.prepare(0)
        assert not cuda.spoiled
        assert cuda.thread.mode == GLOBAL


def test_nothing_left_for_the_first_counters(cuda: FakeCuda) -> None:
    for call in ("cuMemAlloc", "cuStreamCreate"):
        cuda.failing = {call}
        with pytest.raises(DriverError, match=r"65536 bytes for work counters on device 0 .*OUT_OF_MEMORY"):
            counters.prepare(0)
        assert not cuda.private and cuda.thread.mode == GLOBAL
    cuda.failing = set()
    counters.prepare(0)
    assert counters.take(0, cuda.stream()) != NO_COUNTER


def capture_many(cuda: FakeCuda, owners: Owners, count: int) -> list[int]:
    stream = cuda.stream()
    with cuda.capture(stream):
        return [owners.take(stream) for _ in range(count)]


def test_one_capture_takes_all_and_then_none(cuda: FakeCuda, owners: Owners) -> None:
    found = capture_many(cuda, owners, SLOTS + 3)
    assert len(set(found[:SLOTS])) == SLOTS and set(found[SLOTS:]) == {NO_COUNTER}
    assert len(cuda.arrays) == 1, "allocated during a capture"


def test_hot_streams_make_counters_more_after_a_capture(cuda: FakeCuda, owners: Owners) -> None:
    """No new stream comes: the one known stream must come by the slow path, and be fast again afterwards."""
    stream = cuda.stream()
    address = owners.take(stream)
    capture_many(cuda, owners, SLOTS - LOW_WATER)
    cuda.busy = True
    for _ in range(3):
        assert owners.take(stream) == address
    assert len(cuda.arrays) == 2 and not counters._hot
    cuda.busy = False
    assert owners.take(stream) == address
    assert len(counters._hot) == 1 and not cuda.private
    assert NO_COUNTER not in capture_many(cuda, owners, LOW_WATER + SLOTS - 1)


def test_growth_beside_a_capture_of_another_stream(cuda: FakeCuda, owners: Owners) -> None:
    capture_many(cuda, owners, SLOTS)
    with cuda.capture(cuda.stream()):
        late = cuda.stream()
        assert owners.take(late) == NO_COUNTER, "not zero yet"
        assert owners.take(late) != NO_COUNTER
    assert not cuda.spoiled


def test_growth_is_bounded(cuda: FakeCuda, owners: Owners) -> None:
    stream = cuda.stream()
    found = [owners.take(stream)]
    for _ in range(MAX_ARRAYS + 2):
        found += capture_many(cuda, owners, SLOTS)
        for _ in range(2):
            assert owners.take(stream) == found[0]
    given_out = [a for a in found if a != NO_COUNTER]
    assert len(cuda.arrays) == MAX_ARRAYS and len(given_out) == len(set(given_out)) == MAX_ARRAYS * SLOTS
    assert len(counters._hot) == 1, "what is full for good does not keep calls from being fast"
    assert owners.take(cuda.stream()) == NO_COUNTER


def test_growth_that_fails_is_no_error(cuda: FakeCuda, owners: Owners) -> None:
    stream = cuda.stream()
    address = owners.take(stream)
    capture_many(cuda, owners, SLOTS)
    cuda.failing = {"cuMemAlloc"}
    assert owners.take(stream) == address
    assert owners.take(cuda.stream()) == NO_COUNTER
    assert len(counters._hot) == 1 and not cuda.private


def test_streams_are_bounded_and_leave_some_for_captures(
    cuda: FakeCuda, owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "MAX_STREAMS", 10)
    streams = [cuda.stream() for _ in range(12)]
    for _ in range(2):
        found = [owners.take(s) for s in streams]
        assert NO_COUNTER not in found[:10] and found[10:] == [NO_COUNTER] * 2
    assert len(counters._pools[0].of_stream) == len(counters._hot) == 10
    assert capture_many(cuda, owners, 1) != [NO_COUNTER]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=st.lists(st.tuples(st.sampled_from(["run", "capture", "renew", "busy", "fail"]), st.integers(0, 5))))
def test_no_history_makes_two_owners_meet(steps: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of four counters, and `Owners` as the judge."""
    with monkeypatch.context() as patch:
        patch.setattr(counters, "ARRAY_BYTES", 4 * SLOT_BYTES)
        patch.setattr(counters, "LOW_WATER", 2)
        patch.setattr(counters, "MAX_ARRAYS", 6)
        cuda = install(patch)
        counters.prepare(0)
        owners = Owners(cuda)
        handles = [0, PER_THREAD, *(cuda.stream() for _ in range(4))]
        for step, index in steps:
            handle = handles[index]
            if step == "run":
                owners.take(handle)
            elif step == "capture" and index > 0:
                with cuda.capture(handle):
                    owners.take(handle)
            elif step == "renew" and index > 1:
                cuda.stream(handle)
            elif step == "busy":
                cuda.busy = not cuda.busy
            elif step == "fail":
                cuda.failing ^= {("cuMemAlloc", "cuStreamCreate")[index % 2]}
        assert len(cuda.arrays) <= 6 and not cuda.spoiled
