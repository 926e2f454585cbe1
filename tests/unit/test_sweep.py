"""The tuning script ``bench/sweep_forward.py``: each config is launched as itself and checked against float64."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from cuflash import kernels
from cuflash.bench.inputs import Case, numpy_dtype
from cuflash.bench.measure import Spread
from cuflash.problem import AttentionProblem
from tests.unit import fake_gpu

SCRIPT = Path(__file__).parents[2] / "bench" / "sweep_forward.py"


@pytest.fixture
def sweep():
    spec = importlib.util.spec_from_file_location("sweep_forward", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(sweep, monkeypatch, *words: str):
    monkeypatch.setattr(sys, "argv", ["sweep_forward.py", *words])
    return sweep.arguments()


def test_the_command_line_names_problem_and_configs(sweep, monkeypatch):
    args = arguments(sweep, monkeypatch, "80", "--causal", "block_n=48", "--rounds", "3", "ctas=1,warps=8")
    problem = sweep.problem_of(args, "sm_90")
    assert problem == AttentionProblem(80, 80, "bfloat16", "causal", 16, False, "sm_90")
    named = sweep.candidates(problem, [*args.configs, {"block_n": kernels.select_config(problem).block_n}])
    assert list(named) == ["table", "block_n=48", "ctas=1,warps=8"]
    assert named["block_n=48"] == dataclasses.replace(named["table"], block_n=48)


@pytest.mark.parametrize(
    ("arch", "capability", "changes"),
    [("sm_80", (8, 0), {"block_m": 64, "ctas": 1}), ("sm_90a", (9, 0), {"block_m": 64, "stages": 2})],
)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_each_config_is_launched_and_checked(sweep, monkeypatch, mask, arch, capability, changes):
    gpu = fake_gpu.install(monkeypatch, capability=capability)
    monkeypatch.setattr(sweep, "load_prebuilt", lambda root, key: codes[key.symbol])
    problem = AttentionProblem(64, 64, "bfloat16", mask, 16, False, arch)
    named = sweep.candidates(problem, [changes])
    codes = {kernels.symbol(problem, c): gpu.obtain_code(problem, c, None, ptx=False)[0] for c in named.values()}
    try:
        contenders = {name: sweep.Contender(problem, config, Path()) for name, config in named.items()}
        q, k, v = (
            np.random.default_rng(i).standard_normal((1, 50, 2, 64)).astype(numpy_dtype("bfloat16")) for i in range(3)
        )
        arrays = [gpu.array(x) for x in (q, k, v)]
        for name, contender in contenders.items():
            out = np.full_like(q, np.nan)
            contender.prepare(*arrays, gpu.array(out))()
            assert gpu.launches[-1].loaded.config == named[name]
            error = sweep.errors({"": out}, [q, k, v], mask == "causal", np)[""]
            assert error.relative < 4e-3
    finally:
        fake_gpu.remove(gpu)


def test_a_call_that_needs_another_kernel_is_refused(sweep, monkeypatch):
    gpu = fake_gpu.install(monkeypatch, execute=False)
    problem = AttentionProblem(64, 64, "bfloat16", "full", 16, False, "sm_90")
    code = gpu.obtain_code(problem, kernels.select_config(problem), None, ptx=False)[0]
    monkeypatch.setattr(sweep, "load_prebuilt", lambda root, key: code)
    try:
        contender = sweep.Contender(problem, kernels.select_config(problem), Path())
        arrays = [gpu.at(i << 40, (1, 50, 2, 60), numpy_dtype("bfloat16")) for i in range(1, 5)]
        with pytest.raises(LookupError, match="head_dim=60"):
            contender.prepare(*arrays)
    finally:
        fake_gpu.remove(gpu)


def test_the_worst_of_errors_keeps_nan(sweep):
    assert sweep.worst_of(1.0, 2.0) == 2.0 == sweep.worst_of(2.0, 1.0)
    assert np.isnan(sweep.worst_of(1.0, float("nan")))


def test_results_are_appended_as_lines(sweep, tmp_path):
    problem = AttentionProblem(64, 64, "bfloat16", "full", 16, False, "sm_90")
    named = sweep.candidates(problem, [])
    cases = [Case.of(64, False, n, "bfloat16") for n in (512, 1024)]
    times = {case.seqlen: {"table": Spread(1.0, 1.0, 1.0, 5), "flash": Spread(1.1, 1.1, 1.1, 5)} for case in cases}
    for _ in range(2):
        sweep.append(tmp_path / "r", problem, named, cases, times, {"table": (2e-3, 1e-2)})
    rows = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert [row["name"] for row in rows] == ["table", "flash"] * 4
    assert rows[0]["config"]["block_m"] == 128 and "config" not in rows[1]
