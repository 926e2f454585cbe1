"""The backward pass's hot path: what a second, equal call may not do again, and what is no equal call."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import backward, driver, jit, settings
from tests.unit import fake_gpu
from tests.unit.fake_gpu import FakeGpu

pytest.importorskip("cupy")

SHAPE, ROWS = (1, 128, 8, 64), (1, 8, 128)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    installed = fake_gpu.install(monkeypatch, execute=False)
    yield installed
    fake_gpu.remove(installed)


def inputs(gpu: FakeGpu, base: int = 0, device: int = 0) -> dict[str, Any]:
    """Of a call without `dlse`; each array in its own TiB."""
    names = ("q", "k", "v", "dout", "out")
    arrays = {name: gpu.at(base + (i << 40), SHAPE, device=device) for i, name in enumerate(names, 1)}
    return arrays | {"lse": gpu.at(base + (6 << 40), ROWS, np.float32, device=device)}


def three(gpu: FakeGpu, base: int = 16 << 40) -> tuple[Any, ...]:
    return tuple(gpu.at(base + (i << 40), SHAPE) for i in range(3))


def packed(gpu: FakeGpu, base: int, *places: int) -> tuple[Any, ...]:
    """Parts of a (B, N, H, 3, D) array: their spans meet, their elements do not."""
    strides = (128 * 8 * 384, 8 * 384, 384, 2)
    return tuple(gpu.at(base + 128 * place, SHAPE, strides=strides) for place in places)


def cold(*_: Any, **__: Any) -> Any:
    raise AssertionError("the cold path")


def forbid_the_cold_path(patch: pytest.MonkeyPatch) -> None:
    """No check, no environment, no lock, no kernel lookup: only the table, the allocator and the launches."""
    for name in ("kind_of", "check_call", "refuse_shared", "BackwardRequest"):
        patch.setattr(backward, name, cold)
    for name in ("kernel_for", "remember_backward", "span"):
        patch.setattr(jit, name, cold)
    patch.setattr(jit, "_table_lock", None)
    patch.setattr(settings, "read_settings", cold)
    for name in ("device_compute_capability", "device_properties", "ensure_context"):
        patch.setattr(driver, name, cold)


def test_equal_calls_are_hits(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"causal": "top_left", "deterministic": True},
        {"scale": 0.5},
        {"dlse": gpu.at(7 << 40, ROWS, np.float32)},
        {"grads": three(gpu)},
        {"grads": list(packed(gpu, 20 << 40, 0, 1, 2))},
    ]
    for case in cases:
        cuflash.attention_backward(**inputs(gpu), **case)
    forbid_the_cold_path(monkeypatch)
    for case in cases:
        cuflash.attention_backward(**inputs(gpu), **case)
    assert len(gpu.launches) == 2 * 2 * len(cases) and len(jit.BACKWARD_PLANS) == len(cases)


def test_packed_gradients_are_told_apart_once(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they lie, and wherever the inputs do; but not in another order, and never if they overlap."""
    checks: list[Any] = []
    real = backward.refuse_shared
    monkeypatch.setattr(backward, "refuse_shared", lambda *x: checks.append(x) or real(*x))
    for base in (20, 30, 40):
        cuflash.attention_backward(**inputs(gpu, base << 30), grads=packed(gpu, base << 40, 0, 1, 2))
    assert len(checks) == 3 and len(jit.BACKWARD_PLANS) == 1
    cuflash.attention_backward(**inputs(gpu), grads=packed(gpu, 20 << 40, 0, 2, 1))
    assert len(checks) == 6 and len(jit.BACKWARD_PLANS) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match=r"grads\[2\] shares memory with grads\[1\]"):
            cuflash.attention_backward(**inputs(gpu), grads=packed(gpu, 20 << 40, 0, 1, 1))
    assert len(gpu.launches) == 8


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "out", "lse", "dlse"])
def test_a_plan_refuses_gradients_over_inputs(gpu: FakeGpu, name: str) -> None:
    """After calls of the same layout whose gradients lay elsewhere."""
    given = inputs(gpu) | {"dlse": gpu.at(7 << 40, ROWS, np.float32)}
    for _ in range(2):
        cuflash.attention_backward(**given, grads=three(gpu))
    launched = len(gpu.launches)
    end = given[name].data.ptr + given[name].nbytes
    over, behind = (gpu.at(end - before, SHAPE) for before in (16, 0))
    with pytest.raises(ValueError, match=rf"grads\[1\] shares memory with {name}"):
        cuflash.attention_backward(**given, grads=(three(gpu)[0], over, three(gpu)[2]))
    assert len(gpu.launches) == launched
    cuflash.attention_backward(**given, grads=(three(gpu)[0], behind, three(gpu)[2]))
    assert len(jit.BACKWARD_PLANS) == 1


def test_pointers_are_those_of_the_call(gpu: FakeGpu) -> None:
    """Nothing of an earlier call's addresses or stream is left in a plan."""
    for i in range(1, 4):
        gpu.streams[0] = 1000 + i
        given, grads = inputs(gpu, i << 44), three(gpu, (i << 44) + (8 << 40))
        cuflash.attention_backward(**given, grads=grads)
        first, main = (launch.params for launch in gpu.launches[-2:])
        assert {first[name] for name in ("dout", "out", "lse")} == {given[n].data.ptr for n in ("dout", "out", "lse")}
        assert [main[name] for name in ("q", "k", "v", "dout")] == [given[n].data.ptr for n in ("q", "k", "v", "dout")]
        assert [main["dq"], main["dk"], main["dv"]] == [grad.data.ptr for grad in grads] and first["dlse"] == 0
        assert {launch.stream for launch in gpu.launches[-2:]} == {1000 + i}
    assert len(jit.BACKWARD_PLANS) == 1


ADDRESSES = ("q", "k", "v", "dout", "out", "lse", "dlse", "grads[0]", "grads[1]", "grads[2]", "workspace")


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], ids=str)
@pytest.mark.parametrize("moved", ADDRESSES)
def test_each_address_is_that_of_the_call(gpu: FakeGpu, moved: str, capability: tuple[int, int]) -> None:
    """After a call of the same plan that differs in one alone, whose prepared launches are not for this one."""
    gpu.capability = capability
    given = inputs(gpu) | {"dlse": gpu.at(7 << 40, ROWS, np.float32), "grads": three(gpu)}

    def launched(**call: Any) -> list[dict[str, Any]]:
        before = len(gpu.launches)
        cuflash.attention_backward(**call)
        return [launch.params for launch in gpu.launches[before:]]

    first = launched(**given)
    assert launched(**given) == first and len(jit.prepared) == 1
    if moved == "workspace":
        gpu.offset = 1 << 20
    elif moved in given:
        given[moved] = gpu.at(given[moved].data.ptr + (1 << 30), given[moved].shape, given[moved].dtype)
    else:
        grads = list(given["grads"])
        place = int(moved[-2])
        grads[place] = gpu.at(grads[place].data.ptr + (1 << 30), SHAPE)
        given["grads"] = tuple(grads)
    found = launched(**given)
    assert len(jit.prepared) == 2 and len(jit.BACKWARD_PLANS) == 1
    jit.prepared.clear()
    assert found == launched(**given) != first


def test_prepared_launches_are_those_of_a_plan(gpu: FakeGpu) -> None:
    """The same addresses with other options, or on another device, and on another stream."""
    for _ in range(2):
        for stream, options in ((11, {}), (22, {"causal": True}), (33, {"scale": 2.0}), (44, {})):
            gpu.streams[0] = stream
            cuflash.attention_backward(**inputs(gpu), grads=three(gpu), **options)
            main = gpu.launches[-1]
            assert main.loaded.problem.mask == ("causal" if "causal" in options else "full")
            assert main.params["scale"] == options.get("scale", 1 / 8)
            assert {launch.stream for launch in gpu.launches[-2:]} == {stream}
        away = [gpu.at(16 + i << 40, SHAPE, device=1) for i in range(3)]
        cuflash.attention_backward(**inputs(gpu, device=1), grads=tuple(away))
        assert {launch.loaded.device for launch in gpu.launches[-2:]} == {1}
    assert len(jit.prepared) == 5


def test_the_memory_of_prepared_launches_is_bounded(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "MAX_PREPARED", 8)
    for i in range(50):
        cuflash.attention_backward(**inputs(gpu, i << 30), grads=three(gpu))
        assert gpu.launches[-1].params["q"] == (1 << 40) + (i << 30)
    assert len(jit.prepared) == len(jit._tensor_maps) == 8


def test_a_thread_without_a_context_gets_one(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it launches what another thread has prepared."""
    call = inputs(gpu) | {"grads": three(gpu)}
    cuflash.attention_backward(**call)
    at_home: list[int] = []
    monkeypatch.setattr(driver, "ensure_context", lambda device: at_home.append(len(gpu.launches)))
    with ThreadPoolExecutor(1) as fresh:
        for _ in range(2):
            fresh.submit(cuflash.attention_backward, **call).result()
    assert at_home == [2] and len(gpu.launches) == 6 and len(jit.prepared) == 1


def test_everything_that_matters_is_in_the_key(gpu: FakeGpu) -> None:
    """Each change of a call makes a plan of its own."""
    given, padded = inputs(gpu), (128 * 8 * 160, 8 * 160, 160, 2)
    changes: list[dict[str, Any]] = [{}]
    changes += [{"causal": True}, {"causal": "top_left"}, {"scale": 0.25}, {"layout": "bhsd"}, {"deterministic": True}]
    for name in ("q", "k", "v", "dout", "out"):
        at = given[name].data.ptr
        changes += [{name: gpu.at(at, SHAPE, strides=padded)}, {name: gpu.at(at + 8, SHAPE, strides=padded)}]
    lse = gpu.at(7 << 40, ROWS, np.float32, strides=(8192, 1024, 8))
    changes += [{"lse": lse}, {"dlse": lse}, {"dlse": gpu.at(7 << 40, ROWS, np.float32)}]
    changes += [{"grads": three(gpu)}, {"grads": three(gpu, (16 << 40) + 4)}, {"grads": packed(gpu, 1 << 45, 0, 1, 2)}]
    for number, change in enumerate(changes, 1):
        call = {name: x for name, x in {**given, **change}.items()}
        if change.get("layout"):  # 128 heads of 8 queries
            call["lse"] = gpu.at(6 << 40, (1, 128, 8), np.float32)
        for _ in range(2):
            cuflash.attention_backward(**call)
        assert len(jit.BACKWARD_PLANS) == number, change
    cuflash.attention_backward(**inputs(gpu, device=1))
    assert len(jit.BACKWARD_PLANS) == len(changes) + 1


def test_what_looks_like_a_triple_is_refused_after_hits(gpu: FakeGpu) -> None:
    grads = three(gpu)
    for _ in range(2):
        cuflash.attention_backward(**inputs(gpu), grads=grads)
    with pytest.raises(TypeError, match="grads is a dict_values; accepted are None and a triple"):
        cuflash.attention_backward(**inputs(gpu), grads=dict(enumerate(grads)).values())  # type: ignore[arg-type]


def test_twenty_threads_at_once(gpu: FakeGpu) -> None:
    """First calls and hits of several layouts, mixed; every thread sees its own pointers in both launches."""

    def work(seed: int) -> None:
        for i in range(20):
            grads = three(gpu, (seed << 45) + (8 << 40)) if i % 2 else None
            cuflash.attention_backward(**inputs(gpu, seed << 45), grads=grads, causal=bool(i % 3))

    with ThreadPoolExecutor(20) as pool:
        for future in [pool.submit(work, seed) for seed in range(1, 21)]:
            future.result()
    assert len(gpu.launches) == 2 * 400 and len(gpu.compiled) == 3 and len(jit.BACKWARD_PLANS) == 4
    for launch in gpu.launches:
        places = {launch.params[name] >> 45 for name in ("q", "k", "v", "dout", "out", "lse") if name in launch.params}
        assert len(places) <= 1
