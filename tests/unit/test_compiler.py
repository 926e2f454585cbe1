"""NVRTC: results and figures, errors that show the line, unknown targets, bad builds, missing libraries, memory."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from cuflash import compiler
from cuflash.compiler import compile_source, to_ptx
from cuflash.errors import INSTALL_CUDA, CompileError, MissingKernelError
from tests import tiny

CHECKOUT = Path(compiler.__file__).parents[1]

pytestmark = pytest.mark.compile


@pytest.fixture(autouse=True)
def temporary_files_stay_in_the_test(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler.tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def nvrtc():
    return tiny.require_nvrtc()


def run_script(script, **options):
    """What a Python process of its own prints."""
    lines = f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); from pathlib import Path; from tests import tiny\n"
    command = [sys.executable, "-c", lines + "from cuflash.compiler import compile_source\n" + script]
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


# --- results ---------------------------------------------------------------------------------------------------


def test_a_kernel_and_its_figures(nvrtc):
    compiled = compile_source(tiny.source())
    assert compiled.cubin.startswith(b"\x7fELF")
    assert tiny.SYMBOL.encode() in compiled.cubin
    assert (compiled.symbol, compiled.arch, compiled.is_ptx) == (tiny.SYMBOL, "sm_80", False)
    assert 4 <= compiled.registers <= 32
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
    assert compiled.static_smem == 256
    assert 0 < compiled.seconds < 5
    assert compiled.warnings == ()
    assert compiled.nvrtc == nvrtc
    assert re.fullmatch(r"1\d\.\d+\.\d+", nvrtc)


def test_spills_and_warnings_are_noticed(nvrtc):
    """160 live values under a bound of 64 registers spill; an unused variable gets a warning."""
    text = """\
extern "C" __global__ void __launch_bounds__(1024, 1) tiny_kernel(float* x) {
    float a[160];
#pragma unroll
    for (int i = 0; i < 160; ++i) a[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 160; ++i) x[(159 - i) * 1024 + threadIdx.x] = a[i] * a[(i * 7) % 160];
    int unused;
}
"""
    compiled = compile_source(tiny.source(text))
    assert compiled.registers <= 64
    assert compiled.spill_bytes > 100
    assert compiled.stack_bytes > 100
    assert len(compiled.warnings) == 1
    assert "unused" in compiled.warnings[0]


def test_machine_code_depends_neither_on_directory_nor_on_process(nvrtc, tmp_path):
    script = "import hashlib; print(hashlib.sha256(compile_source(tiny.source()).cubin).hexdigest())"
    digests = set()
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
        digests.add(run_script(script, cwd=tmp_path / name))
        assert not list((tmp_path / name).iterdir())  # B-140: no precompiled header or other file is left
    assert len(digests) == 1


def test_line_info_names_the_files(nvrtc):
    cubin = compile_source(tiny.source(lineinfo=True)).cubin
    for name in (b"/cuflash", b"tiny_kernel.cu\0", b"scale.cuh\0"):
        assert name in cubin
        assert name not in compile_source(tiny.source()).cubin


def test_ptx(nvrtc):
    compiled = compile_source(tiny.source(), ptx=True)
    assert (compiled.arch, compiled.is_ptx) == ("compute_80", True)
    assert b".target sm_80" in compiled.cubin
    text = to_ptx(tiny.source())
    assert f".entry {tiny.SYMBOL}(" in text
    assert "\0" not in text


def test_threads_compile_at_once(nvrtc):
    results = {}

    def work(n):
        results[n] = compile_source(tiny.source(factor=f"constexpr float kFactor = {n}.0f;"))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({compiled.cubin for compiled in results.values()}) == 6
    for n, compiled in results.items():
        assert compiled.cubin == compile_source(tiny.source(factor=f"constexpr float kFactor = {n}.0f;")).cubin


def test_an_empty_log_leaves_pythons_shared_bytes_alone(nvrtc):
    """The bindings write into the bytes object they are given; Python has one object for each single byte."""
    quiet = tiny.source()._replace(options=("-default-device",))
    with compiler._compiled(quiet, "sm_80") as (_, log):
        assert log == ""
    assert [bytes([n])[0] for n in range(256)] == list(range(256))
    assert b" "[0] == 32


# --- errors ----------------------------------------------------------------------------------------------------


def test_an_error_shows_the_line_a_caret_the_log_and_the_source(nvrtc):
    text = tiny.TEXT.replace("scaled(", "scaled(1.0f + oops + ")
    with pytest.raises(CompileError) as caught:
        compile_source(tiny.source(text))
    message = str(caught.value)
    assert "refused tiny_kernel for sm_80" in message
    assert 'cuflash/tiny_kernel.cu(6): error: identifier "oops" is undefined' in message
    line, caret = re.search(r"^     6 (\| .*)\n {7}(\| *\^)$", message, re.MULTILINE).groups()
    assert line[caret.index("^") :].startswith("oops")
    assert "     5 |     __syncthreads();" in message
    assert 'identifier "oops" is undefined' in caught.value.log
    written = Path(caught.value.source_path)
    assert caught.value.source_path in message
    assert written.read_text(encoding="utf-8") == text
    assert (written.parent / "device" / "factor.cuh").read_text(encoding="utf-8") == tiny.HEADERS["device/factor.cuh"]


def test_an_error_in_a_header_shows_the_header(nvrtc):
    with pytest.raises(CompileError) as caught:
        compile_source(tiny.source(scale="#pragma once\n\tfloat scaled(float x) { return ünknown; }\n"))
    message = str(caught.value)
    assert re.search(r"device/scale\.cuh\(2\): error", message)
    assert "     2 | \tfloat scaled(float x)" in message
    assert re.search(r"^ {7}\| \t *\^$", message, re.MULTILINE)


def test_errors_that_belong_to_no_line_show_the_log(nvrtc):
    wrong = tiny.source()._replace(options=("-nonsense",))
    with pytest.raises(CompileError, match="unrecognized option -nonsense"):
        compile_source(wrong)


def test_an_assembler_error_shows_the_log(nvrtc):
    text = 'extern "C" __global__ void tiny_kernel() { asm volatile("nonsense.f32;"); }'
    with pytest.raises(CompileError, match="nonsense"):
        compile_source(tiny.source(text))


def test_only_the_first_errors_are_quoted(nvrtc):
    text = "".join(f"int a{n} = missing{n};\n" for n in range(20))
    with pytest.raises(CompileError) as caught:
        compile_source(tiny.source(text))
    assert str(caught.value).count("error:") == 3
    assert caught.value.log.count("error:") == 20


def test_a_source_that_can_be_written_nowhere_is_said_so(nvrtc, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler.tempfile, "mkdtemp", full)
    with pytest.raises(CompileError, match="could not be written") as caught:
        compile_source(tiny.source("nonsense"))
    assert caught.value.source_path is None


# --- targets and builds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"])
def test_every_target_that_cuflash_serves_is_known(nvrtc, arch):
    compiled = compile_source(tiny.source(arch=arch))
    assert (compiled.arch, compiled.is_ptx) == (arch, False)


def test_a_target_newer_than_nvrtc_becomes_ptx_of_the_newest(nvrtc, monkeypatch):
    # B-137
    compiled = compile_source(tiny.source(arch="sm_990"))
    assert compiled.is_ptx
    assert compiled.arch.startswith("compute_1")
    assert compiled.cubin.startswith(b"//\n// Generated by NVIDIA NVVM")
    assert f".target {compiled.arch.replace('compute', 'sm')}".encode() in compiled.cubin


@pytest.mark.parametrize("arch", ["sm_35", "sm_81"])
def test_a_target_that_nvrtc_dropped_or_never_had_is_refused(nvrtc, arch):
    # B-137
    with pytest.raises(CompileError, match=rf"does not know {arch}; it knows .*sm_80, .* {re.escape(INSTALL_CUDA)}"):
        compile_source(tiny.source(arch=arch))


@pytest.mark.parametrize(
    ("build", "arch", "bad"),
    [
        ("12.6.85", "sm_90a", False),
        ("12.8.61", "sm_90a", True),
        ("12.8.93", "sm_90a", True),
        ("12.9.41", "sm_90a", True),
        ("12.9.86", "sm_90a", False),
        ("13.0.88", "sm_90a", False),
        ("12.8.93", "sm_90", False),
        ("12.8.93", "sm_80", False),
    ],
)
def test_builds_that_miscompile_are_refused_by_name(nvrtc, monkeypatch, build, arch, bad):
    # B-136
    monkeypatch.setattr(compiler, "nvrtc_build", lambda: build)
    if bad:
        with pytest.raises(CompileError, match=rf"NVRTC {re.escape(build)} is refused for {arch}: .*12\.9\.86.*cu12"):
            compile_source(tiny.source(arch=arch))
    else:
        assert compile_source(tiny.source(arch=arch)).nvrtc == build


# --- what is not installed -------------------------------------------------------------------------------------


@pytest.fixture
def unloaded():
    cached = (compiler._nvrtc, compiler.nvrtc_build, compiler.nvrtc_path)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_missing_bindings(monkeypatch, unloaded):
    # B-133, B-139
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    monkeypatch.delattr("cuda.bindings.nvrtc", raising=False)
    with pytest.raises(MissingKernelError, match=re.escape(INSTALL_CUDA)):
        compile_source(tiny.source())


def test_missing_library(monkeypatch, unloaded):
    """Bindings of one major version beside the NVRTC of the other find no library."""
    bindings = pytest.importorskip("cuda.bindings")

    def absent():
        raise RuntimeError("Failure finding libnvrtc.so")

    stub = types.ModuleType("cuda.bindings.nvrtc")
    stub.nvrtcVersion = absent
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", stub)
    monkeypatch.setattr(bindings, "nvrtc", stub, raising=False)
    major = bindings.__version__.split(".")[0]
    with pytest.raises(MissingKernelError, match=rf"needs NVRTC {major}\.x, to which .*{re.escape(INSTALL_CUDA)}"):
        compile_source(tiny.source())


# --- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_bounded_over_many_compiles(nvrtc):
    # B-142: others lost 20 MB in each compile.
    script = """
def resident(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
def compile_some(first, count):
    for n in range(first, first + count): compile_source(tiny.source(factor=f"constexpr float kFactor = {n}.5f;"))
compile_some(0, 20); before = resident(); compile_some(20, 80); print((resident() - before) / 80)
"""
    assert float(run_script(script)) < 8_000  # without nvrtcDestroyProgram it is 15 kB for this kernel
