"""The command line: results, exit codes, messages, atomic files, plain output."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import kernels, render
from cuflash.arch import ARCHES
from cuflash.cli import COMMANDS, main, parser, screen
from cuflash.cli import dump as dump_command
from cuflash.cli import run as run_command
from cuflash.cli.problems import parse_override, widest_access
from cuflash.problem import AttentionProblem

RNG = np.random.default_rng(3)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """q.npy, k.npy and v.npy in float32."""
    paths = {}
    for name, shape in {"q": (2, 9, 4, 16), "k": (2, 13, 2, 16), "v": (2, 13, 2, 8)}.items():
        paths[name] = tmp_path / f"{name}.npy"
        np.save(paths[name], RNG.standard_normal(shape).astype(np.float32))
    paths["out"] = tmp_path / "out.npy"
    return paths


def load(paths: dict[str, Path]) -> list[np.ndarray]:
    return [np.load(paths[name]) for name in "qkv"]


def command(paths: dict[str, Path], *options: str) -> list[str]:
    return ["run", *(str(paths[name]) for name in "qkv"), *options, "-o", str(paths["out"])]


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on stderr: one line."""
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("cuflash: error: ")
    return line


# --- run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        ([], {}),
        (["--causal"], {"causal": True}),
        (["--causal", "top_left"], {"causal": "top_left"}),
        (["--scale", "-0.5"], {"scale": -0.5}),
    ],
)
def test_run_is_attention_on_files(files, options, keywords):
    assert main(command(files, *options)) == 0
    np.testing.assert_array_equal(np.load(files["out"]), cuflash.attention(*load(files), **keywords))


def test_run_with_files_behind_the_mask_says_where_they_go(files, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--causal", *(str(files[name]) for name in "qkv"), "-o", str(files["out"])])
    assert "q.npy is no mask: name the files before --causal" in capsys.readouterr().err


def test_run_takes_the_layout_and_writes_the_lse(files, tmp_path):
    for name in "qkv":
        np.save(files[name], np.load(files[name]).transpose(0, 2, 1, 3))
    lse = tmp_path / "lse.npy"
    assert main(command(files, "--layout", "bhsd", "--lse", str(lse))) == 0
    out, expected = cuflash.attention(*load(files), layout="bhsd", return_lse=True)
    np.testing.assert_array_equal(np.load(files["out"]), out)
    np.testing.assert_array_equal(np.load(lse), expected)


def test_run_takes_bfloat16_when_told_so(files, capsys):
    arrays = [x.astype(ml_dtypes.bfloat16) for x in load(files)]
    for name, array in zip("qkv", arrays, strict=True):
        np.save(files[name], array)
    assert main(command(files)) == 1
    assert "--dtype bfloat16" in error_line(capsys)
    assert not files["out"].exists()
    assert main(command(files, "--dtype", "bfloat16")) == 0
    out = np.load(files["out"]).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(out, cuflash.attention(*arrays))


def test_run_does_not_reinterpret_other_types(files, capsys):
    assert main(command(files, "--dtype", "bfloat16")) == 1
    assert "float32" in error_line(capsys)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "gpu"], "cpu, cuda and cuda:N"),
        (["--device", "cuda:x"], "cpu, cuda and cuda:N"),
        (["--scale", "inf"], "scale is inf"),
        (["--lse", "/nowhere/lse.npy"], "there is no directory /nowhere"),
    ],
)
def test_run_names_what_is_wrong(files, capsys, options, words):
    assert main(command(files, *options)) == 1
    assert words in error_line(capsys)
    assert not files["out"].exists()


def test_run_names_bad_files(files, capsys, tmp_path):
    files["v"].unlink()
    assert main(command(files)) == 1
    assert "v.npy" in error_line(capsys)
    files["v"].write_bytes(b"no array")
    assert main(command(files)) == 1
    assert "v.npy is no .npy file" in error_line(capsys)
    np.savez(tmp_path / "v.npz", np.zeros(3))
    (tmp_path / "v.npz").rename(files["v"])
    assert main(command(files)) == 1
    assert "archive" in error_line(capsys)


def test_an_unfinished_result_never_shows(files, monkeypatch, capsys):
    """The old file stays whole and nothing is left beside it when writing fails."""
    files["out"].write_bytes(b"old")

    def disk_full(file, array, **options):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_command.np, "save", disk_full)
    before = sorted(path.name for path in files["out"].parent.iterdir())
    assert main(command(files)) == 1
    assert "No space left" in error_line(capsys)
    assert files["out"].read_bytes() == b"old"
    assert sorted(path.name for path in files["out"].parent.iterdir()) == before


def test_the_result_has_ordinary_permissions(files):
    assert main(command(files)) == 0
    assert files["out"].stat().st_mode & 0o777 == 0o666 & ~run_command.current_umask()


def test_results_need_a_file_each(files, capsys):
    assert main(command(files, "--lse", str(files["out"]))) == 1
    assert "--output and --lse both name" in error_line(capsys)
    assert not files["out"].exists()


def test_only_ordinary_files_are_replaced(files, capsys, tmp_path):
    target, files["out"] = files["out"], tmp_path / "link.npy"
    files["out"].symlink_to(target)
    assert main(command(files)) == 0
    assert files["out"].is_symlink() and np.load(target).shape == (2, 9, 4, 8)
    capsys.readouterr()
    files["out"] = tmp_path / "pipe"
    os.mkfifo(files["out"])
    assert main(command(files)) == 1
    assert "no ordinary file" in error_line(capsys)
    assert files["out"].is_fifo()


# --- dump ------------------------------------------------------------------------------------------------------


def test_dump_prints_the_rendered_source(capsys):
    assert main(["dump", "--head-dim", "64", "--causal", "--dtype", "float16", "--arch", "sm_80"]) == 0
    problem = AttentionProblem(64, 64, "float16", "causal", 16, False, "sm_80")
    assert capsys.readouterr().out == render.render(problem, kernels.select_config(problem)).text.rstrip("\n") + "\n"


@pytest.mark.parametrize("arch", ARCHES)
def test_the_command_in_a_source_dumps_that_source(arch):
    """Every kernel names the command that renders it again."""
    for problem in kernels.shipped_problems(arch):
        words = render.dump_command(problem, kernels.select_config(problem)).split()
        args = parser().parse_args(words[1:])
        assert dump_command.make_dump(args).problem == problem


def test_dump_takes_a_changed_config(capsys):
    assert main(["dump", "--head-dim", "128", "--config", "block_n=32,ctas=1", "--arch", "sm_90"]) == 0
    out = capsys.readouterr().out
    assert "constexpr int kBlockN = 32;" in out and "constexpr int kCtas = 1;" in out
    assert "--config block_n=32,ctas=1\n" in out  # the command in the source renders this kernel, not the table's
    assert main(["dump", "--config", "block_n=4096", "--arch", "sm_90"]) == 1
    assert "bytes of shared memory" in error_line(capsys)


def test_dump_takes_fields_of_the_family(capsys):
    assert main(["dump", "--arch", "sm_90a", "--config", "ctas=1"]) == 1
    assert "forward_sm90 has no ctas in its configs; it has block_m, " in error_line(capsys)
    assert main(["dump", "--arch", "sm_90a", "--config", "q_stages=1,q_registers=0"]) == 1
    assert "tma_store needs q_stages=2" in error_line(capsys)


def test_dump_without_a_target_shows_what_ordinary_calls_take():
    for words, arch in (([], "sm_90a"), (["--head-dim", "60"], "sm_90"), (["--arch", "sm_90"], "sm_90")):
        assert dump_command.make_dump(parser().parse_args(["dump", *words])).problem.arch == arch


def test_dump_refuses_unknown_parts(capsys):
    assert main(["dump", "binary"]) == 1
    assert "source, ptx, sass, resources" in error_line(capsys)


@pytest.mark.compile
def test_dump_shows_ptx_and_resources(capsys):
    assert main(["dump", "ptx", "resources", "--head-dim", "32", "--arch", "sm_80"]) == 0
    out = capsys.readouterr().out
    assert ".target sm_80" in out and "mma.sync" in out
    assert "registers" in out and "NVRTC" in out


@pytest.mark.compile
def test_dump_writes_every_part(tmp_path):
    assert main(["dump", "--head-dim", "32", "--arch", "sm_80", "-o", str(tmp_path / "d")]) == 0
    names = {path.suffix for path in (tmp_path / "d").iterdir()}
    assert {".cu", ".ptx", ".cubin", ".json"} <= names
    assert (tmp_path / "d" / "device" / "ptx.cuh").is_file()
    if dump_command.find_disassembler():
        assert "HMMA" in next((tmp_path / "d").glob("*.sass")).read_text()


def test_a_missing_disassembler_says_how_to_get_one(monkeypatch, capsys):
    monkeypatch.setattr(dump_command, "find_disassembler", lambda: None)
    assert main(["dump", "sass", "--head-dim", "32", "--arch", "sm_80"]) == 1
    assert "pip install nvidia-cuda-nvdisasm" in error_line(capsys)


# --- compile and cache -----------------------------------------------------------------------------------------


@pytest.mark.compile
def test_compile_fills_the_cache_and_cache_shows_it(capsys, kernel_cache):
    words = ["compile", "--head-dim", "32", "--arch", "sm_80", "sm_86", "-j", "1"]
    assert main(words) == 0
    assert "2 compiled" in capsys.readouterr().out
    assert main(words) == 0
    assert "0 compiled in 0.0 s of CPU, 2 there before" in capsys.readouterr().out
    assert main(["cache", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(kernel_cache)
    assert main(["cache", "info"]) == 0
    assert "kernels  2" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert "removed 2 kernels" in capsys.readouterr().out


@pytest.mark.compile
def test_compile_fills_a_prebuilt_directory_by_processes(capsys, tmp_path, monkeypatch):
    folder = tmp_path / "prebuilt"
    assert main(["compile", "--head-dim", "32", "--arch", "sm_80", "sm_86", "-j", "2", "--prebuilt", str(folder)]) == 0
    monkeypatch.setenv("CUFLASH_PREBUILT_DIR", str(folder))
    capsys.readouterr()
    assert main(["cache", "info"]) == 0
    assert "2 kernels in" in capsys.readouterr().out
    x = np.zeros((1, 32, 1, 32), ml_dtypes.bfloat16)
    kernel = cuflash.explain(x, x, x, arch="sm_80").kernel
    assert kernel is not None and kernel.cached == "prebuilt"


def test_a_kernel_that_does_not_compile_is_reported(capsys, monkeypatch):
    from cuflash import compiler
    from cuflash.errors import CompileError

    def refuse(source, **options):
        raise CompileError(f"no {source.symbol}\nline 3: error", log="everything NVRTC said")

    monkeypatch.setattr(compiler, "compile_source", refuse)
    assert main(["compile", "--head-dim", "32", "--arch", "sm_80", "-j", "1"]) == 1
    captured = capsys.readouterr()
    assert "1 failed" in captured.out and "line 3: error" in captured.err


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:cuflash's kernel cache:RuntimeWarning")
def test_kernels_that_cannot_be_kept_are_a_failure(capsys, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    folder = blocked / "prebuilt"
    assert main(["compile", "--head-dim", "32", "--arch", "sm_80", "-j", "1", "--prebuilt", str(folder)]) == 1
    captured = capsys.readouterr()
    assert f"1 kernels could not be kept: {folder} cannot be written" in captured.err


def test_accesses_wider_than_the_rows_are_refused(capsys):
    assert main(["dump", "--head-dim", "64", "--head-dim-v", "3", "--access-bytes", "16"]) == 1
    assert "--access-bytes is 16; head dims 64 and 3 take at most 2" in error_line(capsys)
    assert main(["dump", "--head-dim-v", "0"]) == 1
    assert "head_dim_v is 0" in error_line(capsys)


@pytest.mark.compile
def test_an_interrupt_gives_up_what_has_not_begun(tmp_path, monkeypatch):
    from cuflash import build

    problems = [AttentionProblem(d, d, "bfloat16", "full", 16, False, "sm_90") for d in range(8, 200, 8)]
    jobs = [(problem, kernels.select_config(problem)) for problem in problems]
    finished = build.build(jobs, tmp_path, workers=2)
    assert not next(finished).error
    finished.close()
    assert len(list(tmp_path.glob("v1/cuflash_*"))) < 10


@pytest.mark.compile
def test_ctrl_c_ends_a_build(tmp_path):
    """A terminal sends the signal to the whole process group, to the workers too."""
    command = [
        sys.executable,
        "-m",
        "cuflash",
        "compile",
        "--all",
        "--arch",
        "sm_86",
        "-j",
        "2",
        "--prebuilt",
        tmp_path,
    ]
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    finally:
        signal.signal(signal.SIGINT, previous)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("v1/cuflash_*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors


def test_compile_all_is_every_shipped_kernel():
    from cuflash.cli import compile as compile_command

    jobs = compile_command.kernel_jobs(parser().parse_args(["compile", "--all", "--arch", "sm_80", "sm_90"]))
    shipped = {problem for arch in ("sm_80", "sm_90", "sm_90a") for problem in kernels.shipped_problems(arch)}
    assert {problem for problem, _ in jobs} == shipped and len(jobs) == len(shipped)


@pytest.mark.parametrize(
    ("options", "targets"),
    [
        (["--arch", "sm_90"], ["sm_90", "sm_90a"]),
        (["--arch", "sm_90a"], ["sm_90a"]),
        (["--arch", "sm_90a", "sm_90"], ["sm_90a", "sm_90"]),
        (["--arch", "sm_90", "--access-bytes", "8"], ["sm_90"]),
        (["--arch", "sm_90", "--head-dim", "60"], ["sm_90"]),
        (["--arch", "sm_100"], ["sm_100"]),
        (["--arch", "sm_90", "--head-dim", "64", "--causal", "--short"], ["sm_90a"]),
    ],
    ids=" ".join,
)
def test_compile_makes_all_kernels_that_a_hopper_device_takes(options, targets):
    from cuflash.cli import compile as compile_command

    jobs = compile_command.kernel_jobs(parser().parse_args(["compile", *options]))
    assert [problem.arch for problem, _ in jobs] == targets


def test_compile_says_where_few_queries_have_no_variant(capsys):
    assert main(["compile", "--arch", "sm_90", "--head-dim", "128", "--causal", "--short"]) == 1
    assert "few queries, on sm_90: leave short away" in error_line(capsys)


def test_hopper_kernels_take_no_narrow_accesses(capsys):
    assert main(["compile", "--arch", "sm_90a", "--head-dim", "60"]) == 1
    assert "TMA" in error_line(capsys)


def test_compile_without_a_cache_says_so(capsys, monkeypatch):
    monkeypatch.setenv("CUFLASH_CACHE_SIZE", "0")
    assert main(["compile", "--head-dim", "32"]) == 1
    assert "--prebuilt" in error_line(capsys)
    assert main(["cache", "info"]) == 0
    assert "off" in capsys.readouterr().out


# --- the rest --------------------------------------------------------------------------------------------------


def test_info_tells_versions_and_switches(capsys, monkeypatch):
    monkeypatch.setenv("CUFLASH_CACHE_SIZE", "512M")
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for word in (cuflash.__version__, "numpy", "CUFLASH_CACHE_SIZE", "512M", "CUFLASH_DISABLE_JIT", "GPU", "NVRTC"):
        assert word in out


@pytest.mark.parametrize(
    ("capability", "words"),
    [((8, 0), "kernels for sm_80"), ((9, 0), "kernels for sm_90 and sm_90a"), ((7, 5), "not usable")],
)
def test_info_names_the_targets_of_a_device(monkeypatch, capability, words):
    from cuflash.cli import info

    monkeypatch.setattr("cuflash.driver.device_compute_capability", lambda ordinal: capability)
    assert info.target_text(0).startswith(words)


def test_info_lists_every_switch_of_the_settings():
    from cuflash import settings
    from cuflash.cli import info

    source = Path(settings.__file__).read_text()
    for name in info.SWITCHES:
        assert name in source
    assert len(info.SWITCHES) == source.count('("CUFLASH_')


def test_wrong_usage_is_status_2(capsys):
    for words in (["fly"], ["run", "q.npy"], ["compile", "--arch", "sm_1"], ["dump", "--config", "block=1"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        assert "error" in capsys.readouterr().err


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    shown = capsys.readouterr()
    assert not shown.out and all(name in shown.err for name in COMMANDS)


def test_an_unexpected_error_is_not_hidden(monkeypatch):
    from cuflash.cli import cache

    monkeypatch.setattr(cache, "cache_items", lambda settings: {}["bug"])
    with pytest.raises(KeyError):
        main(["cache", "info"])


def test_traceback_shows_where_an_error_came_from(files):
    files["v"].unlink()
    with pytest.raises(FileNotFoundError):
        main([*command(files), "--traceback"])


def test_an_interrupt_is_status_130(monkeypatch, capsys):
    from cuflash.cli import info

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "run", interrupt)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "cuflash: interrupted\n"


def test_every_command_has_help(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0
        assert f"cuflash {name}" in capsys.readouterr().out


def test_the_module_runs():
    done = subprocess.run([sys.executable, "-m", "cuflash", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"cuflash {cuflash.__version__}\n", "")


def test_a_reader_that_leaves_is_no_traceback():
    words = f"{sys.executable} -m cuflash cache path | true"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True)
    assert done.stderr == ""


def test_a_closed_standard_output_is_no_traceback():
    done = subprocess.run(["sh", "-c", f"{sys.executable} -m cuflash info >&-"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "cuflash: error: there is no standard output to write to\n")


def test_overrides_are_numbers_of_known_fields():
    assert parse_override("block_n=48,ctas=2") == {"block_n": 48, "ctas": 2}
    assert repr(parse_override("ping_pong=0,exact=1")) == "{'ping_pong': False, 'exact': True}"
    for text in ("block_n", "block_n=", "block_n=-1", "family=1", "ctas=x", "exact=2"):
        with pytest.raises(Exception, match="FIELD=NUMBER"):
            parse_override(text)


def test_elements_of_bytes_have_accesses_of_their_own(capsys):
    for dim, words in ((33, "1-byte"), (18, "1-byte"), (36, "4-byte"), (48, "16-byte")):
        assert main(["dump", "--task", "prepare", "--head-dim", str(dim)]) == 0
        text = capsys.readouterr().out
        assert f"{words} global access" in text and f"--access-bytes {words[:-5]} " in text
    assert main(["dump", "--task", "prepare", "--access-bytes", "2"]) == 1
    assert "access_bytes is 2; accepted are 16, 8, 4 and 1" in error_line(capsys)


@pytest.mark.parametrize(("dims", "access"), [((128, 128), 16), ((64, 60), 8), ((6, 6), 4), ((5, 8), 2)])
def test_the_widest_access_of_contiguous_rows(dims, access):
    assert widest_access(*dims) == access


# --- the screen ------------------------------------------------------------------------------------------------


def show(view: screen.Screen) -> None:
    """Everything that a screen can do."""
    view.heading("title")
    view.pairs({"a": 1, "long name": "two\nlines"})
    view.table(["name", "count"], [["x [red]", 5], ["yy", 123]])
    view.source("int x;  // [bold]", "cuda")
    view.markdown("# head")
    with view.progress("work", 2) as advance:
        advance("one")
        advance()
    view.line("[not markup]")


def test_plain_output_is_aligned():
    out = io.StringIO()
    show(screen.Screen(out))
    assert out.getvalue() == (
        "\ntitle\n-----\n"
        "  a          1\n  long name  two\n             lines\n"
        "  name     count\n  -------  -----\n  x [red]      5\n  yy         123\n"
        "int x;  // [bold]\n# head\nwork\n  [1/2] one\n  [2/2]\n[not markup]\n"
    )


def test_rich_output_says_the_same(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "100")
    out = io.StringIO()
    view = screen.RichScreen(out)
    show(view)
    for word in ("title", "long name", "lines", "x [red]", "123", "int x;  // [bold]", "head", "[not markup]"):
        assert word in out.getvalue()


def test_rich_is_for_terminals_that_have_it(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert type(screen.make_screen(io.StringIO())) is screen.Screen
    monkeypatch.setattr(screen.importlib.util, "find_spec", lambda name: None)
    assert type(screen.make_screen(Terminal())) is screen.Screen
    monkeypatch.setattr(screen.importlib.util, "find_spec", lambda name: name)
    if "rich" in sys.modules or _installed("rich"):
        assert type(screen.make_screen(Terminal())) is screen.RichScreen


def _installed(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


@pytest.mark.parametrize(
    ("cells", "numeric"), [(["1", "-", "2.5 MiB"], True), (["1", "x"], False), ([], False), (["<0.1", "+3"], True)]
)
def test_numeric_columns(cells, numeric):
    assert screen.is_numeric(cells) is numeric
