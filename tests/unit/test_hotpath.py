"""The hot path: what a second, equal call may not do again, and what must never be taken for an equal call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import api, driver, forward_plan, jit, settings
from tests.unit import fake_gpu
from tests.unit.fake_gpu import FakeGpu

pytest.importorskip("cupy")


@pytest.fixture(params=[(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[FakeGpu]:
    installed = fake_gpu.install(monkeypatch, execute=False, capability=request.param)
    yield installed
    fake_gpu.remove(installed)


def arrays(gpu: FakeGpu, shape: tuple[int, ...] = (1, 128, 8, 64), dtype: Any = np.float16) -> list[Any]:
    return [gpu.at(i << 40, shape, dtype) for i in (1, 2, 3)]


def out_like(gpu: FakeGpu, at: int = 4, shape: tuple[int, ...] = (1, 128, 8, 64)) -> Any:
    return gpu.at(at << 40, shape)


def test_equal_calls_are_hits(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """No check, no environment, no lock, no kernel lookup: only the table, the allocator and the launch."""
    cases: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"causal": "top_left", "return_lse": True},
        {"scale": 0.5, "layout": "bhsd"},
        {"out": out_like(gpu)},
    ]
    for case in cases:
        cuflash.attention(*arrays(gpu), **case)

    def cold(*_: Any, **__: Any) -> Any:
        raise AssertionError("the cold path")

    for name in ("make_request", "kind_of", "check_apart"):
        monkeypatch.setattr(api, name, cold)
    monkeypatch.setattr(forward_plan, "make_plan", cold)
    for name in ("kernel_for", "remember"):
        monkeypatch.setattr(jit, name, cold)
    monkeypatch.setattr(jit, "_table_lock", None)
    monkeypatch.setattr(settings, "read_settings", cold)
    for name in ("device_compute_capability", "device_properties", "multiprocessors", "encode_tensor_map"):
        monkeypatch.setattr(driver, name, cold)
    monkeypatch.setattr(driver, "ensure_context", cold)
    for case in cases:
        cuflash.attention(*arrays(gpu), **case)
    assert len(gpu.launches) == 2 * len(cases) and len(jit.PLANS) == len(cases)


def test_interleaved_arrays_are_told_apart_once(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a packed (B, N, H, 4, D) array; wherever it lies, but not in any other arrangement."""

    def parts(base: int, *places: int) -> list[Any]:
        strides = (128 * 8 * 512, 8 * 512, 512, 2)
        return [gpu.at(base + 128 * place, (1, 128, 8, 64), strides=strides) for place in places]

    checks: list[Any] = []
    real = api.check_apart
    monkeypatch.setattr(api, "check_apart", lambda request: checks.append(request) or real(request))
    for base in (1 << 40, 2 << 40, 3 << 40):
        *operands, out = parts(base, 0, 1, 2, 3)
        cuflash.attention(*operands, out=out)
    assert len(checks) == 1 and len(jit.PLANS) == 1
    *operands, out = parts(1 << 40, 0, 1, 3, 2)
    cuflash.attention(*operands, out=out)
    assert len(checks) == 2 and len(jit.PLANS) == 1
    for _ in range(2):
        *operands, out = parts(1 << 40, 0, 1, 2, 2)
        with pytest.raises(ValueError, match="out shares memory with v"):
            cuflash.attention(*operands, out=out)
    assert len(checks) == 4


def test_pointers_are_those_of_the_call(gpu: FakeGpu) -> None:
    """Nothing of an earlier call's addresses or stream is left in a plan."""
    for i in range(1, 4):
        gpu.streams[0] = 1000 + i
        shape = (1, 128, 8, 64)
        places = [gpu.at((i << 44) + (j << 40), shape) for j in range(4)]
        cuflash.attention(*places[:3], out=places[3], return_lse=bool(i % 2))
        p = gpu.launches[-1].params
        assert [p[name] for name in ("q", "k", "v", "out")] == [(i << 44) + (j << 40) for j in range(4)]
        assert (p["lse"] != 0) == bool(i % 2) and gpu.launches[-1].stream == 1000 + i
    assert len(jit.PLANS) == 2


def test_everything_that_matters_is_in_the_key(gpu: FakeGpu) -> None:
    """Each change of a call makes a plan of its own; each of them is a different launch or a different output."""
    shape = (2, 128, 8, 64)
    q, k, v = arrays(gpu, shape)
    padded = gpu.at(2 << 40, shape, strides=(128 * 8 * 160, 8 * 160, 160, 2))
    bf16 = arrays(gpu, shape, fake_gpu.bfloat16())
    longer = [gpu.at(i << 40, (2, 129, 8, 64)) for i in (2, 3)]
    fewer = [gpu.at(i << 40, (2, 128, 2, 64)) for i in (2, 3)]
    other_device = [gpu.at(i << 40, shape, device=1) for i in (1, 2, 3)]
    calls: list[tuple[list[Any], dict[str, Any]]] = [
        ([q, k, v], {}),
        ([q, k, v], {"causal": True}),
        ([q, k, v], {"causal": "top_left"}),
        ([q, k, v], {"scale": 0.25}),
        ([q, k, v], {"scale": -0.25}),
        ([q, k, v], {"layout": "bhsd"}),
        ([q, k, v], {"return_lse": True}),
        ([q, k, v], {"out": out_like(gpu, shape=shape)}),
        ([q, k, v], {"out": gpu.at(4 << 40, shape, strides=(128 * 8 * 160, 8 * 160, 160, 2))}),
        ([q, k, v], {"out": gpu.at((4 << 40) + 8, shape)}),
        ([q, padded, v], {}),
        ([q, k, padded], {}),
        ([padded, k, v], {}),
        ([gpu.at((1 << 40) + 2, shape), k, v], {}),
        ([q, gpu.at((2 << 40) + 4, shape), v], {}),
        ([q, k, gpu.at((3 << 40) + 8, shape)], {}),
        ([q, *longer], {}),
        ([q, *fewer], {}),
        ([q, k, gpu.at(3 << 40, (2, 128, 8, 32))], {}),
        (bf16, {}),
        (other_device, {}),
    ]
    for number, (operands, options) in enumerate(calls, 1):
        for _ in range(2):
            cuflash.attention(*operands, **options)
        assert len(jit.PLANS) == number
    assert len(gpu.launches) == 2 * len(calls)
    for first, second in zip(gpu.launches[::2], gpu.launches[1::2], strict=True):
        assert first == second


def test_many_geometries_do_not_grow_the_table(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "MAX_PLANS", 8)
    for n in range(1, 40):
        cuflash.attention(*arrays(gpu, (1, n, 2, 16)))
    assert len(jit.PLANS) == 8 and len(gpu.compiled) == 1


def test_parameter_buffers_belong_to_threads(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's block cannot be overwritten by another's while the driver reads it."""
    addresses: dict[int, int] = {}
    inside, meet = [], threading.Barrier(4)

    def launch(handle: int, grid: Any, block: Any, smem: int, stream: int, params_address: int) -> None:
        addresses[threading.get_ident()] = params_address
        meet.wait(10)  # all threads are in the driver at once
        inside.append(gpu.read(handle, params_address)["q"])

    q, k, v = arrays(gpu)
    cuflash.attention(q, k, v)
    monkeypatch.setattr(driver, "launch", launch)
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(cuflash.attention, gpu.at(i << 44, q.shape), k, v) for i in range(1, 5)]:
            future.result()
    assert len(set(addresses.values())) == 4 and sorted(inside) == [i << 44 for i in range(1, 5)]


def test_new_threads_get_a_context_once_per_device(gpu: FakeGpu) -> None:
    def calls() -> None:
        for device in (0, 1, 0, 1):
            cuflash.attention(*(gpu.at(i << 40, (1, 8, 1, 64), device=device) for i in (1, 2, 3)))

    for _ in range(2):
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
    assert gpu.contexts == [0, 1, 0, 1]


def test_twenty_threads_at_once(gpu: FakeGpu) -> None:
    """First calls and hits of several shapes, mixed; every thread sees its own pointers."""

    def work(seed: int) -> None:
        for i in range(30):
            n = 1 + (seed + i) % 5
            q, k, v = (gpu.at((seed << 44) + (j << 40), (1, n, 2, 64)) for j in range(1, 4))
            cuflash.attention(q, k, v, causal=bool(i % 2))

    with ThreadPoolExecutor(20) as pool:
        for future in [pool.submit(work, seed) for seed in range(1, 21)]:
            future.result()
    assert len(gpu.launches) == 600 and len(gpu.compiled) == 2
    for launch in gpu.launches:
        p = launch.params
        assert p["q"] >> 44 == p["k"] >> 44 == p["v"] >> 44 and p["k"] - p["q"] == 1 << 40


def test_a_call_that_fails_leaves_no_plan(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise cuflash.CompileError("no")

    with monkeypatch.context() as patch:
        patch.setattr(jit, "obtain_code", broken)
        with pytest.raises(cuflash.CompileError):
            cuflash.attention(*arrays(gpu))
    assert not jit.PLANS
    cuflash.attention(*arrays(gpu))
