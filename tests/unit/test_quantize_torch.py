"""Quantized torch tensors, on the CPU: the same numbers as NumPy's, and torch's own 8-bit dtypes without copies."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import cuflash

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def qkv(dtype: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((2, 140, 2, 32), generator=generator).to(getattr(torch, dtype)) for _ in range(3)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_as_numpy(dtype: str) -> None:
    arrays = qkv(dtype)
    tensors = cuflash.quantize_qkv(*arrays, hadamard=True)
    for role, x, x8 in zip("qkv", arrays, tensors, strict=True):
        single = cuflash.quantize(x.float().numpy(), role=role, hadamard=True)  # type: ignore[arg-type]
        assert isinstance(x8.payload, torch.Tensor) and x8.source_dtype == dtype and "torch tensors" in repr(x8)
        assert (x8.payload.numpy() == single.payload).all() and (x8.scales.numpy() == single.scales).all()
        assert isinstance(x8.dequantize(), torch.Tensor)
        assert (x8.dequantize().numpy() == single.dequantize()).all()
        assert isinstance(x8.to_host().payload, np.ndarray) and (x8.to_host().payload == single.payload).all()
    out, lse = cuflash.attention(*tensors, causal=True, return_lse=True)
    assert out.dtype is getattr(torch, dtype) and lse.dtype is torch.float32
    host = cuflash.attention(*(x.to_host() for x in tensors), causal=True, out_dtype="float32")
    torch.testing.assert_close(out, torch.from_numpy(host).to(out.dtype), atol=0, rtol=0)
    torch.testing.assert_close(cuflash.attention(*tensors, causal=True, out_dtype=torch.float16).float(), out.float(),
                               atol=0.01, rtol=0.01)  # fmt: skip


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_without_copies(dtype: str) -> None:
    q8 = cuflash.quantize(qkv("bfloat16")[0], role="q", dtype=dtype)  # type: ignore[arg-type]
    view = q8.float8()
    assert view.dtype is getattr(torch, dtype) and view.data_ptr() == q8.payload.data_ptr()
    back = cuflash.QuantizedTensor.from_float8(view, q8.scales, role="q")
    assert back.payload.data_ptr() == q8.payload.data_ptr() and back.scales is q8.scales and back.dtype == dtype
    torch.testing.assert_close(back.dequantize(), q8.dequantize(), atol=0, rtol=0)
    mine = (qkv("bfloat16")[0].float() * 8).to(getattr(torch, dtype))
    taken = cuflash.QuantizedTensor.from_float8(mine, 0.125, role="q")
    torch.testing.assert_close(taken.dequantize(), mine.float() / 8, atol=0, rtol=0)
    assert cuflash.quantize(qkv("float16")[0], role="q", dtype=mine.dtype).dtype == dtype


def test_refused() -> None:
    q, k, v = qkv("float16")
    with pytest.raises(cuflash.UnsupportedError, match="q requires grad"):
        cuflash.quantize_qkv(q.requires_grad_(), k, v)
    with pytest.raises(TypeError, match="q is a torch tensor and v a NumPy array"):
        cuflash.quantize_qkv(q.detach(), k, v.numpy())
    mixed = (
        cuflash.quantize(q.detach(), role="q"),
        *(cuflash.quantize(x.numpy(), role=r) for x, r in ((k, "k"), (v, "v"))),
    )  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="q is of torch tensors and k of NumPy arrays"):
        cuflash.attention(*mixed)
