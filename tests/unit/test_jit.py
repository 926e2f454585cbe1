"""The cold path: caches, the compiler and the driver behind `kernel_for`, and the plan table."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cuflash import cache, compiler, driver, jit, kernels, render
from cuflash.compiled import Compiled
from cuflash.errors import CompileError, DriverError, MissingKernelError
from cuflash.problem import AttentionProblem
from cuflash.settings import read_settings

PROBLEM = AttentionProblem(64, 64, "float16", "causal", 16, False, "sm_90")
BUILD = "13.0.88"


class World:
    """A compiler and a driver that take notes instead of working."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.capability = (9, 0)
        self.refuse: set[bytes] = set()
        self.at_gate, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def render(self, problem: AttentionProblem, config: Any, *, lineinfo: bool = False) -> render.Source:
        self.log.append("render")
        symbol = kernels.symbol(problem, config)
        return render.Source("// text", {}, symbol, render.compile_options(problem.arch), problem.arch)

    def compile_source(self, source: render.Source, *, ptx: bool = False) -> Compiled:
        if "_d64_" in source.symbol:
            self.at_gate.set()
            assert self.gate.wait(10)
        self.log.append("compile")
        code = f"{source.symbol} {ptx} {self.log.count('compile')}".encode()
        return Compiled(code, source.symbol, source.arch, 128, 0, 0, 0, 0.5, "log", BUILD, ptx)

    def load_kernel(self, compiled: Compiled, smem_bytes: int, device: int) -> driver.Kernel:
        if compiled.cubin in self.refuse:
            raise DriverError("CUDA_ERROR_INVALID_IMAGE")
        self.log.append(f"load {device}")
        return driver.Kernel(1, compiled.symbol, device, None)  # type: ignore[arg-type]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setattr(render, "render", made.render)
    monkeypatch.setattr(compiler, "compile_source", made.compile_source)
    monkeypatch.setattr(compiler, "nvrtc_build", lambda: BUILD)
    monkeypatch.setattr(compiler, "nvrtc_path", lambda: None)
    monkeypatch.setattr(driver, "load_kernel", made.load_kernel)
    monkeypatch.setattr(driver, "device_compute_capability", lambda device: made.capability)
    forget(monkeypatch)
    yield made


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process."""
    for table in ("_loaded", "_code", "_locks"):
        monkeypatch.setattr(jit, table, {})


def test_compiled_once_then_in_memory(world: World) -> None:
    first = jit.kernel_for(PROBLEM, 0)
    assert world.log == ["render", "compile", "load 0"]
    assert first.origin == "compiled" and first.config == kernels.select_config(PROBLEM)
    assert first.compiled.registers == 128 and first.kernel.symbol == kernels.symbol(PROBLEM, first.config)
    assert jit.kernel_for(PROBLEM, 0) is first and len(world.log) == 3


def test_second_device_takes_the_code_from_memory(world: World) -> None:
    jit.kernel_for(PROBLEM, 0)
    second = jit.kernel_for(PROBLEM, 1)
    assert second.origin == "memory" and world.log == ["render", "compile", "load 0", "load 1"]


def test_next_process_takes_it_from_the_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.kernel_for(PROBLEM, 0)
    forget(monkeypatch)
    again = jit.kernel_for(PROBLEM, 0)
    assert again.origin == "disk" and world.log[3:] == ["load 0"]


def test_code_that_the_driver_refuses_is_made_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jit.kernel_for(PROBLEM, 0)
    world.refuse.add(first.compiled.cubin)
    for expected in ("compiled", "disk"):
        forget(monkeypatch)
        assert jit.kernel_for(PROBLEM, 0).origin == expected


def test_fresh_code_that_the_driver_refuses_is_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> driver.Kernel:
        raise DriverError("refused")

    monkeypatch.setattr(driver, "load_kernel", refuse)
    with pytest.raises(DriverError, match="refused"):
        jit.kernel_for(PROBLEM, 0)
    assert world.log == ["render", "compile"] and not jit._loaded


def test_failures_are_not_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: Any, *, ptx: bool = False) -> Compiled:
        raise CompileError("no")

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile_source", broken)
        with pytest.raises(CompileError):
            jit.kernel_for(PROBLEM, 0)
    assert jit.kernel_for(PROBLEM, 0).origin == "compiled"


def test_disabled_compiler_names_the_way_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_DISABLE_JIT", "1")
    words = r"cuflash_fwd_sm80_d64_f16_causal_\S+ for sm_90.*CUFLASH_DISABLE_JIT=1.*--arch sm_90"
    with pytest.raises(MissingKernelError, match=words):
        jit.kernel_for(PROBLEM, 0)
    assert not world.log
    monkeypatch.delenv("CUFLASH_DISABLE_JIT")
    jit.kernel_for(PROBLEM, 0)
    forget(monkeypatch)
    monkeypatch.setenv("CUFLASH_DISABLE_JIT", "1")
    assert jit.kernel_for(PROBLEM, 0).origin == "disk"


def test_prebuilt_kernels_come_first(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """B-139: whatever NVRTC built them."""
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "built"))
    built = jit.kernel_for(PROBLEM, 0)
    forget(monkeypatch)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("CUFLASH_PREBUILT_DIR", str(tmp_path / "built"))
    monkeypatch.setattr(compiler, "nvrtc_build", lambda: "12.9.86")
    ready = jit.kernel_for(PROBLEM, 0)
    assert ready.origin == "prebuilt" and ready.compiled.cubin == built.compiled.cubin
    assert world.log.count("compile") == 1


def test_no_disk_cache(world: World, monkeypatch: pytest.MonkeyPatch, kernel_cache: Path) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_SIZE", "0")
    assert jit.kernel_for(PROBLEM, 0).origin == "compiled"
    assert not kernel_cache.exists()


@pytest.mark.parametrize(("capability", "ptx"), [((9, 0), False), ((10, 0), True), ((13, 0), True)])
def test_later_generations_get_ptx(world: World, capability: tuple[int, int], ptx: bool) -> None:
    world.capability = capability
    assert jit.kernel_for(PROBLEM, 0).compiled.is_ptx is ptx


def test_twenty_threads_compile_once(world: World) -> None:
    world.gate.clear()
    with ThreadPoolExecutor(20) as pool:
        futures = [pool.submit(jit.kernel_for, PROBLEM, i % 2) for i in range(20)]
        world.gate.set()
        loaded = [future.result() for future in futures]
    assert world.log.count("compile") == 1 and len({id(kernel) for kernel in loaded}) == 2


def test_different_problems_do_not_wait_for_each_other(world: World) -> None:
    other = AttentionProblem(128, 128, "float16", "causal", 16, False, "sm_90")
    world.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(jit.kernel_for, PROBLEM, 0)
        assert world.at_gate.wait(10)
        assert jit.kernel_for(other, 0).origin == "compiled" and not blocked.done()
        world.gate.set()
        assert blocked.result().origin == "compiled"


def test_lookups_compile_nothing(world: World) -> None:
    config, settings = kernels.select_config(PROBLEM), read_settings()
    assert jit.find_code(PROBLEM, config, settings) is None
    jit.kernel_for(PROBLEM, 0)
    found = jit.find_code(PROBLEM, config, settings)
    assert found is not None and found[1] == "disk"
    assert jit.find_code(PROBLEM, config, settings, ptx=True) is None
    store = cache.open_cache(settings)
    assert store is not None and store.info().entries == 1


def test_the_plan_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "MAX_PLANS", 5)
    monkeypatch.setattr(jit, "PLANS", {})
    for i in range(20):
        jit.remember(i, i)  # type: ignore[arg-type]
    assert list(jit.PLANS) == [15, 16, 17, 18, 19]
    jit.remember(15, 0)  # type: ignore[arg-type]
    assert len(jit.PLANS) == 5
