"""Kernels that draw their tiles from a counter, many at a time: a shared counter would leave tiles out.

Every output is poisoned before it is written: a tile that was left out shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import counters, driver, jit, kernels
from cuflash.config import KernelConfig
from cuflash.problem import AttentionProblem
from cuflash.sm90_config import Sm90Config
from tests.gpu.support import Array, assert_same_bits, assign, check_attention, draw_qkv, poisoned, require_hopper, spin

pytestmark = pytest.mark.gpu

STREAMS = 4


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Kernels with a dynamic order, whatever the table says; the counters that launches took, zero at the end."""
    import cupy as cp

    require_hopper()
    addresses: set[int] = set()
    tuned, take = kernels.select_config, counters.take

    def dynamic(problem: AttentionProblem) -> KernelConfig:
        config = tuned(problem)
        return replace(config, dynamic=True) if isinstance(config, Sm90Config) else config

    def recorded(device: int, stream: int) -> int:
        addresses.add(address := take(device, stream))
        return address

    monkeypatch.setattr(kernels, "select_config", dynamic)
    monkeypatch.setattr(counters, "take", recorded)
    for table in ("_loaded", "_code", "_locks"):
        monkeypatch.setattr(jit, table, {})
    jit.PLANS.clear()
    yield addresses
    jit.PLANS.clear()
    cp.cuda.Device().synchronize()
    assert addresses and counters.NO_COUNTER not in addresses
    for address in addresses:
        assert not _words(address).any(), "a launch left a counter that is not zero"


def _words(address: int) -> np.ndarray:
    """The whole slot of a counter."""
    import cupy as cp

    memory = cp.cuda.UnownedMemory(address, counters.SLOT_BYTES, None)
    words: np.ndarray = cp.ndarray(counters.SLOT_BYTES // 4, np.uint32, cp.cuda.MemoryPointer(memory, 0)).get()
    return words


@pytest.fixture
def call(taken: set[int]) -> tuple[Array, ...]:
    """q, k, v of several tiles for each multiprocessor, of unequal length, and the output of a call that ran alone."""
    import cupy as cp

    spin(1)
    q, k, v = draw_qkv((2100, 2100), (16, 4), (64, 64), "bfloat16", batch=2)
    expected = check_attention(q, k, v, causal=True)
    cp.cuda.Device().synchronize()
    return q, k, v, expected


def _streams(count: int) -> list[Any]:
    import cupy as cp

    return [cp.cuda.Stream(non_blocking=True) for _ in range(count)]


def _outputs(like: Array, count: int) -> list[Array]:
    """Poisoned arrays, on a quiet device."""
    import cupy as cp

    poison = poisoned(like.shape, like.dtype)
    outs = [cp.empty_like(like) for _ in range(count)]
    for out in outs:
        assign(out, poison)
    cp.cuda.Device().synchronize()
    return outs


def _assert_all_same(outs: list[Array], expected: Array) -> None:
    import cupy as cp

    cp.cuda.Device().synchronize()
    for out in outs:
        if not cp.array_equal(out.view(np.uint16), expected.view(np.uint16)):
            assert_same_bits(out, expected)


def _capture(stream: Any, work: Callable[[], Any], mode: int | None = None) -> Any:
    with stream:
        stream.begin_capture(mode)
        try:
            work()
        finally:
            graph = stream.end_capture()
    return graph


def test_one_call_on_four_streams(call: tuple[Array, ...], taken: set[int]) -> None:
    q, k, v, expected = call
    streams = _streams(STREAMS)
    taken.clear()
    for _ in range(20):
        outs = _outputs(expected, 8 * STREAMS)
        for index, out in enumerate(outs):
            with streams[index % STREAMS]:
                cuflash.attention(q, k, v, causal=True, out=out)
        _assert_all_same(outs, expected)
    assert len(taken) == STREAMS


def test_four_threads_on_their_default_streams(call: tuple[Array, ...], taken: set[int]) -> None:
    """Handle 2, which means another stream in each thread."""
    import cupy as cp

    q, k, v, expected = call
    taken.clear()

    def run(outs: list[Array]) -> None:
        with cp.cuda.Stream.ptds:
            for out in outs:
                cuflash.attention(q, k, v, causal=True, out=out)

    with ThreadPoolExecutor(STREAMS) as pool:
        for _ in range(20):
            outs = _outputs(expected, 8 * STREAMS)
            list(pool.map(run, (outs[index::STREAMS] for index in range(STREAMS))))
            _assert_all_same(outs, expected)
    assert 1 <= len(taken) <= STREAMS


def test_streams_that_are_gone_while_their_work_runs(call: tuple[Array, ...]) -> None:
    """Their handles are given to the next streams."""
    q, k, v, expected = call
    for _ in range(10):
        outs = _outputs(expected, 16)
        for out in outs:
            (stream,) = _streams(1)
            with stream:
                cuflash.attention(q, k, v, causal=True, out=out)
            del stream
        _assert_all_same(outs, expected)


def test_two_replays_beside_eager_calls(call: tuple[Array, ...], taken: set[int]) -> None:
    """Two graphs of one call in two streams, and eager calls in the stream that they were captured in."""
    q, k, v, expected = call
    origin, *others = _streams(3)
    graph_outs = _outputs(expected, 2)
    taken.clear()
    graphs = [_capture(origin, lambda out=out: cuflash.attention(q, k, v, causal=True, out=out)) for out in graph_outs]
    assert len(taken) == 2
    poison = _outputs(expected, 1)[0]
    for _ in range(50):
        for out in graph_outs:
            assign(out, poison)
        eager = _outputs(expected, 4)
        for out in eager:
            for graph, stream in zip(graphs, others, strict=True):
                graph.launch(stream)
            with origin:
                cuflash.attention(q, k, v, causal=True, out=out)
        _assert_all_same(eager + graph_outs, expected)
    assert len(taken) == 3


def test_several_calls_in_one_graph(call: tuple[Array, ...], taken: set[int]) -> None:
    """A captured fork: the calls of both branches run at once in every replay."""
    import cupy as cp

    q, k, v, expected = call
    main, side = _streams(2)
    outs = _outputs(expected, 4)
    taken.clear()

    def work() -> None:
        side.wait_event(main.record())
        for out, stream in zip(outs, (main, side, main, side), strict=True):
            with stream:
                cuflash.attention(q, k, v, causal=True, out=out)
        main.wait_event(side.record())

    graph = _capture(main, work)
    assert len(taken) == 4
    poison = _outputs(expected, 1)[0]
    for _ in range(20):
        for out in outs:
            assign(out, poison)
        cp.cuda.Device().synchronize()
        graph.launch(main)
        _assert_all_same(outs, expected)


def test_memory_is_added_beside_a_capture(call: tuple[Array, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the strictest mode: neither `prepare` nor growth fails for the capture or makes it invalid."""
    import cupy as cp

    q, k, v, expected = call
    monkeypatch.setattr(counters, "_pools", {})
    monkeypatch.setattr(counters, "_hot", {})
    device = cp.cuda.Device().id
    stream, other = _streams(2)
    (out,) = _outputs(expected, 1)

    def work() -> None:
        counters.prepare(device)
        for _ in range(counters.LOW_WATER + 1):
            counters.take(device, stream.ptr)
        for _ in range(1000):
            assert counters.take(device, other.ptr) != counters.NO_COUNTER
            if counters._pools[device].arrays == 2:
                break
        assert counters._pools[device].arrays == 2
        cuflash.attention(q, k, v, causal=True, out=out)

    graph = _capture(stream, work, cp.cuda.runtime.streamCaptureModeGlobal)
    graph.launch(stream)
    _assert_all_same([out], expected)


def test_ids_of_streams() -> None:
    """What `cuflash.counters` relies on."""
    import cupy as cp

    cp.cuda.Device().use()
    driver.device_count()
    stream, other = _streams(2)
    assert counters.stream_id(0) == counters.stream_id(1)
    assert len({counters.stream_id(handle) for handle in (0, stream.ptr, other.ptr)}) == 3
    with stream:
        stream.begin_capture()
        found = counters.stream_id(stream.ptr)
        stream.end_capture()
    assert found is None

    def per_thread() -> int | None:
        cp.cuda.Device().use()
        return counters.stream_id(counters.PER_THREAD)

    ids = set()
    for _ in range(5):  # threads that follow each other: idents are given again
        with ThreadPoolExecutor(1) as pool:
            ids.add(pool.submit(per_thread).result())
    assert len(ids) == 5
    with other:
        spin()
    gone = counters.stream_id(other.ptr)
    del other
    assert gone not in {counters.stream_id(s.ptr) for s in _streams(8)}
