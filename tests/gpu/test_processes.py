"""Kernels between processes: cold, warm and damaged caches, kernels built beforehand, and PTX for unknown devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cuflash import api, jit
from tests.gpu.support import check_attention, draw_qkv, run_python

pytestmark = pytest.mark.gpu

CALL = """
import json, sys
import cuflash
from cuflash import jit
from tests.gpu.support import check_attention, draw_qkv, poisoned, to_host

q, k, v = draw_qkv((200, 200), (4, 2), (64, 64), "bfloat16")
out = poisoned(q.shape, q.dtype)
cuflash.attention(q, k, v, causal=True, out=out)
loaded = [name for name in ("jinja2", "cuda.bindings.nvrtc") if name in sys.modules]
(kernel,) = jit._loaded.values()
check_attention(q, k, v, causal=True)
bits = to_host(out).view("uint16").sum(dtype="uint64").item()
print(json.dumps({"origin": kernel.origin, "loaded": loaded, "bits": bits}))
"""


def _call(cache: Path, **env: str) -> Any:
    plain = {"CUFLASH_CACHE_DIR": str(cache), "CUFLASH_PREBUILT_DIR": "", "CUFLASH_DISABLE_JIT": ""}
    return run_python(CALL, plain | env)


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _entries(cache: Path) -> list[Path]:
    return [path.parent for path in cache.glob("v*/*/kernel.cubin")]


def test_cold_then_warm(cold: Path) -> None:
    """The first process compiles, the second takes the kernel from the disk and loads neither Jinja nor NVRTC."""
    first, second = _call(cold), _call(cold)
    assert (first["origin"], second["origin"]) == ("compiled", "disk")
    assert second["loaded"] == []
    assert first["bits"] == second["bits"]
    assert len(_entries(cold)) == 1


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "meta"])
def test_damaged_entries_heal(cold: Path, damage: str) -> None:
    first = _call(cold)
    (entry,) = _entries(cold)
    cubin, meta = entry / "kernel.cubin", entry / "meta.json"
    data = bytearray(cubin.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 0x10
    for path in (cubin, meta):
        path.chmod(0o600)
    if damage == "meta":
        meta.write_text("{")
    else:
        cubin.write_bytes({"truncated": data[: len(data) // 2], "flipped": data, "empty": b""}[damage])
    again, healed = _call(cold), _call(cold)
    assert (again["origin"], healed["origin"]) == ("compiled", "disk")
    assert first["bits"] == again["bits"] == healed["bits"]


def test_prebuilt_kernels_without_a_compiler(cold: Path, tmp_path: Path) -> None:
    """B-139: kernels that were built beforehand run where compiling is switched off; others are an error."""
    built = _call(cold)
    empty = tmp_path / "empty"
    ready = _call(empty, CUFLASH_PREBUILT_DIR=str(cold), CUFLASH_DISABLE_JIT="1")
    assert ready["origin"] == "prebuilt" and ready["loaded"] == [] and ready["bits"] == built["bits"]
    assert not _entries(empty)
    with pytest.raises(AssertionError, match="MissingKernelError"):
        _call(empty, CUFLASH_DISABLE_JIT="1")


def test_ptx_for_devices_that_nvrtc_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """B-137: such a device gets PTX, which the driver compiles; it is right here, too."""
    plans: dict[Any, Any] = {}
    for table in ("_loaded", "_code"):
        monkeypatch.setattr(jit, table, {})
    for module in (api, jit):
        monkeypatch.setattr(module, "PLANS", plans)
    monkeypatch.setattr(jit, "needs_ptx", lambda arch, capability: True)
    check_attention(*draw_qkv((300, 300), (4, 2), (64, 64), "float16"), causal=True)
    (kernel,) = jit._loaded.values()
    assert kernel.compiled.is_ptx and plans
