"""Streams, capture, threads and memory: what a call may do beside computing.

A stream is made busy first and the inputs are filled behind that: a call on another stream would read the poison.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cuflash
from tests.gpu.support import (
    Array,
    assert_same_bits,
    assign,
    check_attention,
    draw_qkv,
    poisoned,
    run_python,
    spin,
    to_device,
    to_host,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def arrays() -> tuple[Array, ...]:
    """q, k, v and the output that they must give, on a quiet device."""
    import cupy as cp

    spin(1)  # compiled here, not in the middle of a test
    q, k, v = draw_qkv((200, 200), (4, 2), (64, 64), "bfloat16")
    expected = check_attention(q, k, v, causal=True)
    assign(poisoned(q.shape, q.dtype), q)
    cp.cuda.Device().synchronize()
    return q, k, v, expected


def _fills_late(stream: Any, arrays: tuple[Array, ...]) -> Array:
    """Poisoned inputs become right on a busy stream: the call waits for that there, and not on the host."""
    import cupy as cp

    *inputs, expected = arrays
    late = [poisoned(x.shape, x.dtype) for x in inputs]
    cp.cuda.Device().synchronize()
    with stream:
        spin()
        for target, x in zip(late, inputs, strict=True):
            assign(target, x)
        out = cuflash.attention(*late, causal=True)
        assert not stream.done, "the call waited for the device"
        stream.synchronize()
    assert_same_bits(out, expected)
    return out


@pytest.mark.parametrize("kind", ["blocking", "non_blocking", "null", "ptds", "external"])
def test_current_stream_is_used_and_never_waited_for(kind: str, arrays: tuple[Array, ...]) -> None:
    """B-146 among them: an external stream is a 64-bit handle."""
    import cupy as cp

    owner = cp.cuda.Stream(non_blocking=True)
    makers: dict[str, Callable[[], Any]] = {
        "blocking": cp.cuda.Stream,
        "non_blocking": lambda: owner,
        "null": lambda: cp.cuda.Stream.null,
        "ptds": lambda: cp.cuda.Stream.ptds,
        "external": lambda: _external(owner.ptr),
    }
    for _ in range(2):  # the second time the plan is hot
        _fills_late(makers[kind](), arrays)


def _external(handle: int) -> Any:
    """CuPy's older class for a bare handle, which much code still uses; its successor wants an object."""
    import cupy as cp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return cp.cuda.ExternalStream(handle)


def test_two_streams_at_once(arrays: tuple[Array, ...]) -> None:
    """One kernel in flight on several streams: no shared state, no order between them."""
    import cupy as cp

    q, k, v, expected = arrays
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(4)]
    results = []
    for _ in range(50):
        for stream in streams:
            with stream:
                results.append(cuflash.attention(q, k, v, causal=True))
    for stream in streams:
        stream.synchronize()
    for out in results:
        assert_same_bits(out, expected)


def test_per_thread_default_stream_mode() -> None:
    code = """
import cupy as cp, json
from tests.gpu.support import *
assert cp.cuda.get_current_stream().ptr == 2
q, k, v = draw_qkv((200, 200), (2, 2), (64, 64), "float16")
check_attention(q, k, v, causal=True)
print(json.dumps("right"))
"""
    assert run_python(code, {"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1"}) == "right"


def _capture(stream: Any, call: Callable[[], Any]) -> tuple[Any, Any]:
    with stream:
        stream.begin_capture()
        try:
            result = call()
        finally:
            graph = stream.end_capture()
    return graph, result


def test_capture_and_replay(arrays: tuple[Array, ...]) -> None:
    """A warm call is captured; every replay computes from what the inputs hold then."""
    import cupy as cp

    q, k, v, expected = arrays
    inputs = [poisoned(x.shape, x.dtype) for x in (q, k, v)]
    out = poisoned(expected.shape, expected.dtype)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    graph, _ = _capture(stream, lambda: cuflash.attention(*inputs, causal=True, out=out))
    for factor in (1, 2, 1):  # doubling rounds nothing
        for x, source in zip(inputs, (q, k, v), strict=True):
            assign(x, source)
        if factor == 2:
            assign(inputs[2], to_device((2 * to_host(v).astype(np.float32)).astype(v.dtype)))
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_same_bits(out, to_device((factor * to_host(expected).astype(np.float32)).astype(v.dtype)))


def test_warmup_makes_a_first_call_capturable() -> None:
    """After `warmup` alone, a kernel that never ran is captured, output and LSE from the stream's pool included."""
    import cupy as cp

    q, k, v = draw_qkv((90, 70), (3, 1), (56, 24), "bfloat16")
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        cuflash.warmup(q, k, v, causal=True)
        held = [cp.empty(90 * 3 * 24, cp.uint16), cp.empty(90 * 3, cp.float32)]
        del held  # leaves free blocks of these sizes in the stream's pool
    graph, (out, lse) = _capture(stream, lambda: cuflash.attention(q, k, v, causal=True, return_lse=True))
    graph.launch(stream)
    stream.synchronize()
    assert_same_bits(out, check_attention(q, k, v, causal=True))
    assert np.isneginf(to_host(lse)[..., :20]).all() and np.isfinite(to_host(lse)[..., 20:]).all()


def test_two_captured_shapes_do_not_disturb_each_other(arrays: tuple[Array, ...]) -> None:
    """B-148: the graph captured first still runs right after a second, larger one was captured and run."""
    import cupy as cp

    q, k, v, expected = arrays
    large = draw_qkv((1000, 1000), (8, 8), (64, 64), "bfloat16")
    large_expected = cuflash.attention(*large, causal=True)
    outs = [poisoned(x.shape, x.dtype) for x in (expected, large_expected)]
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    first, _ = _capture(stream, lambda: cuflash.attention(q, k, v, causal=True, out=outs[0]))
    second, _ = _capture(stream, lambda: cuflash.attention(*large, causal=True, out=outs[1]))
    for graph in (second, first):
        graph.launch(stream)
    stream.synchronize()
    assert_same_bits(outs[0], expected)
    assert_same_bits(outs[1], large_expected)


def test_two_replays_of_one_kernel_at_once(arrays: tuple[Array, ...]) -> None:
    import cupy as cp

    calls = [draw_qkv((700, 700), (4, 4), (64, 64), "bfloat16", seed=seed) for seed in (1, 2)]
    expected = [cuflash.attention(*call, causal=True) for call in calls]
    outs = [poisoned(x.shape, x.dtype) for x in expected]
    streams = [cp.cuda.Stream(non_blocking=True) for _ in calls]
    cp.cuda.Device().synchronize()
    graphs = [
        _capture(stream, lambda call=call, out=out: cuflash.attention(*call, causal=True, out=out))[0]
        for stream, call, out in zip(streams, calls, outs, strict=True)
    ]
    for _ in range(100):
        for graph, stream in zip(graphs, streams, strict=True):
            graph.launch(stream)
    for stream in streams:
        stream.synchronize()
    for out, right in zip(outs, expected, strict=True):
        assert_same_bits(out, right)


def _in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Runs work(0..count-1) in threads of their own that start together."""
    barrier = threading.Barrier(count)

    def run(index: int) -> Any:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_twenty_threads_with_a_first_call(kernel_cache: Any) -> None:
    """Twenty threads call at once with a kernel that none has compiled: one compile, twenty equal results."""
    import cupy as cp

    q, k, v = draw_qkv((300, 300), (4, 2), (88, 88), "float16")
    cp.cuda.Device().synchronize()
    before = set(kernel_cache.glob("v*/*"))

    def call(index: int) -> Array:
        with cp.cuda.Stream(non_blocking=True) as stream:
            out = cuflash.attention(q, k, v, causal=True)
            stream.synchronize()
        return out

    results = _in_threads(20, call)
    expected = check_attention(q, k, v, causal=True)
    for out in results:
        assert_same_bits(out, expected)
    assert len(set(kernel_cache.glob("v*/*")) - before) <= 1


def test_twenty_threads_with_calls_of_their_own() -> None:
    """Different shapes, head dims and streams in every thread, many times over."""
    import cupy as cp

    shapes = [((50 + 31 * i, 200 - 7 * i), (4, 2), ((64, 64), (128, 128))[i % 2], "bfloat16") for i in range(20)]
    calls = [draw_qkv(*shape) for shape in shapes]
    expected = [cuflash.attention(*call, causal=True) for call in calls]
    cp.cuda.Device().synchronize()

    def call(index: int) -> list[Array]:
        with cp.cuda.Stream(non_blocking=True) as stream:
            results = [cuflash.attention(*calls[index], causal=True) for _ in range(30)]
            stream.synchronize()
        return results

    for results, right in zip(_in_threads(20, call), expected, strict=True):
        for out in results:
            assert_same_bits(out, right)


class _Requests:
    """Sizes that CuPy's allocator is asked for while this is active."""

    def __enter__(self) -> list[int]:
        import cupy as cp

        sizes: list[int] = []

        class Hook(cp.cuda.MemoryHook):  # type: ignore[misc,name-defined]
            name = "cuflash-requests"

            def malloc_postprocess(self, **request: int) -> None:
                sizes.append(request["size"])

        self._hook = Hook()
        self._hook.__enter__()
        return sizes

    def __exit__(self, *exc: object) -> None:
        self._hook.__exit__(*exc)


@pytest.mark.parametrize("return_lse", [False, True])
def test_memory_beyond_the_output_is_the_lse(return_lse: bool) -> None:
    """At most 4 bytes for each query row and head, and 1 KiB, from CuPy's allocator; nothing beside it."""
    import cupy as cp

    q, k, v = draw_qkv((4096, 4096), (8, 8), (64, 64), "bfloat16")
    expected = cuflash.attention(q, k, v, causal=True, return_lse=return_lse)
    cp.cuda.Device().synchronize()
    free, _ = cp.cuda.Device().mem_info
    with _Requests() as sizes:
        result = cuflash.attention(q, k, v, causal=True, return_lse=return_lse)
    lse_bytes = 4 * 4096 * 8
    assert sum(sizes) <= q.nbytes + lse_bytes + 1024
    cp.cuda.Device().synchronize()
    assert free - cp.cuda.Device().mem_info[0] <= q.nbytes + lse_bytes + (4 << 20), "memory outside the pool"
    with _Requests() as sizes:
        cuflash.attention(q, k, v, causal=True, return_lse=return_lse, out=result[0] if return_lse else result)
    assert sum(sizes) <= lse_bytes + 1024
    del expected


def test_results_survive_allocator_pressure(arrays: tuple[Array, ...]) -> None:
    """B-091: inputs dropped and memory handed out again right after the call, while it still waits on the stream."""
    import cupy as cp

    *inputs, expected = arrays
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(20):
            copies = [poisoned(x.shape, x.dtype) for x in inputs]
            for target, x in zip(copies, inputs, strict=True):
                assign(target, x)
            spin(1_000_000)
            out = cuflash.attention(*copies, causal=True)
            del copies, target
            for x in inputs:
                poisoned(x.shape, x.dtype)
            stream.synchronize()
            assert_same_bits(out, expected)
