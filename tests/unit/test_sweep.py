"""``cuflash bench --sweep``: what is tried, each config launched as itself and checked against float64, the record."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest

from cuflash import kernels
from cuflash.arch import ARCHES
from cuflash.bench import candidates, sweep, sweep_record
from cuflash.bench.inputs import numpy_dtype
from cuflash.bench.measure import Spread
from cuflash.build import Built
from cuflash.cli import bench, main
from cuflash.cli.screen import Screen
from cuflash.problem import AttentionProblem
from tests.unit import fake_gpu
from tests.unit.test_bench import FakeTimer


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    args = parser.parse_args(words)
    bench.check_options(args)
    return args


def problem_of(arch: str, mask: str = "full", d: int = 64, dv: int | None = None) -> AttentionProblem:
    return AttentionProblem(d, dv or d, "bfloat16", mask, 16, False, arch)


def found_for(arch: str, *overrides: dict[str, int], lengths: tuple[int, ...] = (512,)) -> sweep.Sweep:
    """A sweep before anything was compiled."""
    plan = sweep.Plan(64, 64, lengths=lengths, overrides=overrides)
    problem = problem_of(arch)
    return sweep.Sweep(problem, sweep.chosen_configs(problem, plan), plan.cases, {})


# --- what is tried ---------------------------------------------------------------------------------------------


def test_the_command_line_names_problem_and_configs():
    words = (
        "--sweep",
        "80",
        "block_n=48",
        "ctas=1,warps=8",
        "--causal",
        "--lengths",
        "512",
        "--family",
        "forward_sm80",
    )
    plan = bench.sweep_plan(arguments(*words, "--arch", "sm_90", "--compile-only"))
    assert (plan.rounds, plan.lengths, plan.dtype) == (9, (512,), "bfloat16")
    problem = plan.problem()
    assert problem == AttentionProblem(80, 80, "bfloat16", "causal", 16, False, "sm_90")
    table = kernels.select_config(problem)
    named = sweep.chosen_configs(problem, dataclasses.replace(plan, overrides=(*plan.overrides, {"ctas": table.ctas})))
    expected = [table, dataclasses.replace(table, block_n=48), dataclasses.replace(table, ctas=1, warps=8)]
    assert list(named.values()) == expected and list(named) == [config.label for config in expected]


def test_configs_come_from_a_file_too(tmp_path):
    (tmp_path / "c.json").write_text('[{"block_n": 48}]')
    plan = bench.sweep_plan(arguments("--sweep", "64", "stages=3", "--configs-file", str(tmp_path / "c.json")))
    assert plan.overrides == ({"stages": 3}, {"block_n": 48})


@pytest.mark.parametrize(
    ("head_dim", "family", "arch", "expected"),
    [
        (64, None, "sm_90", "sm_90a"),
        (64, None, "sm_80", "sm_80"),
        (64, "forward_sm80", "sm_90a", "sm_90"),
        (64, "forward_sm90", "sm_90", "sm_90a"),
        (60, None, "sm_90", "sm_90"),
    ],
)
def test_the_family_is_that_of_a_call_unless_one_is_named(head_dim, family, arch, expected):
    assert sweep.Plan(head_dim, head_dim, family=family, arch=arch).problem().arch == expected


@pytest.mark.parametrize(("head_dim", "arch"), [(64, "sm_80"), (60, "sm_90")])
def test_a_family_that_cannot_take_the_problem_is_refused(head_dim, arch):
    with pytest.raises(
        ValueError, match=f"forward_sm90; for head dims {head_dim} and {head_dim}, {arch} has forward_sm80"
    ):
        sweep.Plan(head_dim, head_dim, family="forward_sm90", arch=arch).problem()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("block_n=48",), "CONFIG goes only with --sweep"),
        (("--head-dim-v", "64"), "--head-dim-v goes only with --sweep"),
        (("--sweep", "64", "--quick"), "--quick goes not with --sweep"),
        (("--sweep", "64", "--arch", "sm_80"), "--arch goes only with --compile-only"),
        (("--sweep", "64", "--lengths", "0"), "--lengths has 0"),
        (("--sweep", "64", "-j", "0"), "--jobs is 0"),
    ],
)
def test_options_that_would_be_ignored_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        arguments(*words)


def test_a_family_of_8_bit_operands_is_not_offered(capsys):
    for name in kernels.FAMILIES:
        if name.startswith("forward_fp8"):
            with pytest.raises(SystemExit):
                arguments("--sweep", "64", "--family", name)
            assert f"invalid choice: '{name}'" in capsys.readouterr().err
        else:
            assert arguments("--sweep", "64", "--family", name).family == name


def test_a_field_of_the_other_family_is_refused(capsys):
    assert main(["bench", "--sweep", "64", "warps=8", "--compile-only", "--arch", "sm_90"]) == 1
    assert "forward_sm90 has no warps" in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_90a"])
@pytest.mark.parametrize(("d", "dv"), [(32, 32), (64, 64), (72, 72), (128, 128), (192, 128), (256, 256)])
def test_the_grid_fits_and_is_small(arch, d, dv):
    problem = problem_of(arch, "causal", d, dv)
    table = kernels.select_config(problem)
    tried = list(candidates.candidates(problem, table))
    assert 0 < len(tried) <= 80 and len({config.label for config in tried}) == len(tried)
    assert all(config.smem_bytes(problem) <= ARCHES[arch].smem_per_block for config in tried)
    assert {config.slack for config in tried} == {table.slack} and {config.family for config in tried} == {table.family}


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
@pytest.mark.parametrize("d", [32, 64, 128, 192, 256])
def test_the_grid_holds_what_was_chosen_by_measuring(arch, d):
    problem = problem_of(arch, "full", d)
    table = kernels.select_config(problem)
    assert table in candidates.candidates(problem, table)


# --- compiling -------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize(("family", "changes"), [("forward_sm80", "block_n=32"), ("forward_sm90", "block_n=48")])
def test_configs_are_compiled_once_and_recorded(tmp_path, capsys, family, changes):
    words = ["bench", "--sweep", "32", changes, "stages=640", "--family", family, "--compile-only", "--arch", "sm_90"]
    shown = []
    for _ in range(2):
        assert main([*words, "--kernels", str(tmp_path / "k"), "--output", str(tmp_path / "r"), "-j", "1"]) == 0
        shown.append(capsys.readouterr().out)
    assert "[2/2]" in shown[0] and "0 bytes spilt" in shown[0]
    assert "[1/" not in shown[1] and "shared memory beyond 232448 bytes" in shown[1]
    record, table = sorted((tmp_path / "r").iterdir())
    first, *rows = map(json.loads, record.read_text().splitlines())
    assert first["table"] == rows[0]["name"] and first["sweep"]["head_dim"] == 32 and "nvrtc" in first["environment"]
    assert [bool(row["built"]["error"]) for row in rows] == [False, False, True]
    assert rows[1]["config"]["block_n"] == int(changes[-2:]) and rows[1]["built"]["registers"] > 0
    assert "no device" in table.read_text() and f"| {rows[1]['name']} |" in table.read_text()


# --- running ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "changes"),
    [("sm_80", {"block_m": 64, "ctas": 1}), ("sm_90", {}), ("sm_90a", {"block_m": 64, "stages": 2})],
)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_each_config_is_launched_and_checked(monkeypatch, mask, arch, changes):
    gpu = fake_gpu.install(monkeypatch, capability=ARCHES[arch].compute_capability)
    monkeypatch.setattr(sweep, "load_prebuilt", lambda root, key: codes[key.symbol])
    problem = problem_of(arch, mask)
    configs = sweep.chosen_configs(problem, sweep.Plan(64, 64, overrides=(changes,)))
    codes = {kernels.symbol(problem, c): gpu.obtain_code(problem, c, None, ptx=False)[0] for c in configs.values()}
    try:
        q, k, v = (
            np.random.default_rng(i).standard_normal((1, 50, 2, 64)).astype(numpy_dtype("bfloat16")) for i in range(3)
        )
        arrays = [gpu.array(x) for x in (q, k, v)]
        for config in configs.values():
            out = np.full_like(q, np.nan)
            sweep.launch(sweep.load(problem, config, Path()), [*arrays, gpu.array(out)])()
            assert gpu.launches[-1].loaded.config == config
            error = sweep.accuracy.errors({"": out}, [q, k, v], mask == "causal", np)[""]
            assert error.relative < 4e-3
        assert kernels.family_in_use() is None
    finally:
        fake_gpu.remove(gpu)


def test_a_call_that_needs_another_kernel_is_refused(monkeypatch):
    gpu = fake_gpu.install(monkeypatch, execute=False)
    problem = problem_of("sm_90")
    code = gpu.obtain_code(problem, kernels.select_config(problem), None, ptx=False)[0]
    monkeypatch.setattr(sweep, "load_prebuilt", lambda root, key: code)
    try:
        loaded = sweep.load(problem, kernels.select_config(problem), Path())
        arrays = [gpu.at(i << 40, (1, 50, 2, 60), numpy_dtype("bfloat16")) for i in range(1, 5)]
        with pytest.raises(LookupError, match="head_dim=60"):
            sweep.launch(loaded, arrays)
    finally:
        fake_gpu.remove(gpu)


def test_a_kernel_that_could_not_be_kept_is_missed(tmp_path):
    problem = problem_of("sm_90")
    with pytest.raises(FileNotFoundError, match="cannot be written"):
        sweep.load(problem, kernels.select_config(problem), tmp_path)


def test_counters_are_ready_before_a_kernel_that_takes_them(monkeypatch):
    gpu = fake_gpu.install(monkeypatch)
    prepared = []
    monkeypatch.setattr(sweep.counters, "prepare", prepared.append)
    problem = problem_of("sm_90a", "causal")
    config = dataclasses.replace(kernels.select_config(problem), dynamic=True)
    code = gpu.obtain_code(problem, config, None, ptx=False)[0]
    monkeypatch.setattr(sweep, "load_prebuilt", lambda root, key: code)
    try:
        sweep.load(problem, config, Path())
        assert prepared == [0]
    finally:
        fake_gpu.remove(gpu)


def test_wrong_kernels_are_not_timed(monkeypatch):
    """One config is broken, one does not compile: the others are timed, everybody in turn."""
    pytest.importorskip("cupy")
    monkeypatch.setattr("cupy.zeros", lambda shape: None)
    found = found_for("sm_90", {"block_n": 32}, {"block_n": 48}, {"block_n": 96})
    table, right, broken, failed = found.configs
    problem = found.problem
    found.built = {name: Built(name, problem.arch, error="no" if name == failed else "") for name in found.configs}
    order: list[str] = []
    monkeypatch.setattr(sweep, "load", lambda problem, config, root: config.label)
    monkeypatch.setattr(sweep, "check", lambda kernel, xp: sweep.Checked(np.nan if kernel == broken else 2e-3, 0.01))
    monkeypatch.setattr(sweep, "launch", lambda kernel, arrays: lambda: order.append(kernel))
    monkeypatch.setattr(sweep, "InputPool", lambda dtype, cases: type("Pool", (), {"arrays": lambda self, case: []})())
    monkeypatch.setattr(sweep, "torch_available", lambda: False)
    monkeypatch.setattr(sweep.accuracy, "array_module", lambda: np)
    sweep.run(found, Path(), 3, FakeTimer(), Screen(io.StringIO()))
    assert order == [table, right] * 5 and list(found.times[512]) == [table, right]
    assert found.right == [table, right] and list(found.checked) == [table, right, broken]


def test_the_worst_of_errors_keeps_nan():
    assert sweep.worst_of(1.0, 2.0) == 2.0 == sweep.worst_of(2.0, 1.0)
    assert np.isnan(sweep.worst_of(1.0, float("nan")))


# --- the record ------------------------------------------------------------------------------------------------


def test_the_record_has_every_config_and_peer_at_each_length(tmp_path):
    found = found_for("sm_90", {"block_n": 48}, {"block_n": 96}, {"stages": 9}, lengths=(512, 1024))
    table, faster, wrong, large = found.configs
    found.environment = {"date": "today", "nvrtc": "13.0.88"}
    found.built = {name: Built(name, "sm_90", 200, 0, 1000, 1.5) for name in found.configs}
    found.built[large] = Built(large, "sm_90", error="shared memory beyond 232448 bytes")
    found.checked = {
        table: sweep.Checked(2e-3, 1e-2),
        faster: sweep.Checked(2e-3, 1e-2),
        wrong: sweep.Checked(0.5, 1.0),
    }
    times = {table: 2.0, faster: 1.0, "flash": 1.5}
    found.times = {n: {name: Spread(ms, ms, ms, 5) for name, ms in times.items()} for n in (512, 1024)}
    record, document = sweep_record.save(found, tmp_path / "new")
    assert record.name == "sweep_sm_90_d64_bfloat16_full.jsonl"
    first, *rows = map(json.loads, record.read_text().splitlines())
    assert first["table"] == table and first["sweep"]["arch"] == "sm_90"
    assert [row["name"] for row in rows] == [table, table, faster, faster, wrong, large, "flash", "flash"]
    assert [row["case"]["seqlen"] for row in rows if "case" in row] == [512, 1024] * 3
    assert rows[0]["error"]["relative"] == 2e-3 and rows[0]["tflops"] == pytest.approx(found.cases[0].tflops(2.0))
    assert rows[0]["config"]["block_m"] == 128 and "config" not in rows[-1]
    text = document.read_text()
    places = [text.index(f"| {name} |") for name in (faster, table, wrong, "torch flash")]
    assert places == sorted(places) and "| 5.00e-01 | wrong | wrong |" in text
    assert f"- {large}: shared memory beyond 232448 bytes" in text
