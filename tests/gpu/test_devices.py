"""More than one GPU: the arrays' device computes, and the caller's stays current. Needs two devices."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import cuflash
from tests.conftest import gpu_count
from tests.gpu.support import assert_same_bits, check_attention, draw_qkv, to_host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_count() < 2, reason="GPU test: fewer than two CUDA devices"),
]


@pytest.fixture(autouse=True)
def _device_zero() -> Iterator[None]:
    import cupy as cp

    with cp.cuda.Device(0):
        yield


def _on(device: int) -> tuple[Any, ...]:
    import cupy as cp

    with cp.cuda.Device(device):
        return draw_qkv((200, 200), (4, 2), (64, 64), "bfloat16")


def test_the_arrays_device_is_used_and_the_current_one_restored() -> None:
    """B-143, for first calls and hot ones, with and without out=."""
    import cupy as cp

    expected = cuflash.attention(*_on(0), causal=True)
    q, k, v = _on(1)
    for _ in range(3):
        out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        assert out.device.id == lse.device.id == 1
        assert cp.cuda.runtime.getDevice() == 0
        cuflash.attention(q, k, v, causal=True, out=out)
        assert cp.cuda.runtime.getDevice() == 0
    with cp.cuda.Device(1):
        cp.cuda.Device().synchronize()
        assert (to_host(out) == to_host(expected)).all()
    with pytest.raises(ValueError):
        cuflash.attention(q, k, v[:, :5])
    assert cp.cuda.runtime.getDevice() == 0


def test_arrays_of_two_devices_are_refused() -> None:
    q, k, _ = _on(0)
    _, _, v = _on(1)
    with pytest.raises(ValueError, match="device"):
        cuflash.attention(q, k, v)
    with pytest.raises(ValueError, match="device"):
        cuflash.attention(*_on(0), out=_on(1)[0])


def test_warmup_of_another_device() -> None:
    import cupy as cp

    q, k, v = _on(1)
    cuflash.warmup(q, k, v)
    assert cp.cuda.runtime.getDevice() == 0


def test_threads_on_both_devices() -> None:
    """B-145: every thread works on a device of its own, in streams made there."""
    import cupy as cp

    expected = to_host(check_attention(*_on(0), causal=True))

    def work(index: int) -> Any:
        with cp.cuda.Device(index % 2):
            q, k, v = _on(index % 2)
            with cp.cuda.Stream(non_blocking=True) as stream:
                outs = [cuflash.attention(q, k, v, causal=True) for _ in range(20)]
                stream.synchronize()
            assert cp.cuda.runtime.getDevice() == index % 2
            return [to_host(out) for out in outs]

    with ThreadPoolExecutor(8) as pool:
        for outs in pool.map(work, range(8)):
            for out in outs:
                assert (out == expected).all()


def test_torch_tensors_on_the_second_device() -> None:
    """B-152: while the first is current, which stays so."""
    torch = pytest.importorskip("torch")
    arrays = [torch.randn(1, 100, 4, 64, device="cuda:1", dtype=torch.bfloat16) for _ in range(3)]
    out = cuflash.attention(*arrays, causal=True)
    assert out.device == torch.device("cuda", 1) and torch.cuda.current_device() == 0
    same = cuflash.attention(*(x.to("cuda:0") for x in arrays), causal=True)
    assert torch.equal(out.to("cuda:0"), same)
    with pytest.raises(ValueError, match="device"):
        cuflash.attention(arrays[0], arrays[1], arrays[2].to("cuda:0"))


def test_same_bits_on_both_devices() -> None:
    import cupy as cp

    results = []
    for device in (0, 1):
        with cp.cuda.Device(device):
            results.append(to_host(cuflash.attention(*_on(device))))
    assert_same_bits(results[0], results[1])
