"""Nsight Compute's table, and what the scripts in ``bench/`` make of it."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cuflash.bench import nsight
from cuflash.bench.nsight import Launch

BENCH = Path(__file__).parents[2] / "bench"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def traffic() -> Any:
    return script("traffic")


@pytest.fixture
def cycles() -> Any:
    return script("cycles")


def profiled(announced: Sequence[object], measured: Sequence[dict[str, int]]) -> str:
    """The output of the profiler around a script's own lines."""
    lines = ["==PROF== Connected", *(f"launch {json.dumps(about)}" for about in announced), "==PROF== Disconnected"]
    lines.append('"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"')
    for i, metrics in enumerate(measured):
        lines += [f'"{i}","cuflash_fwd","{name}","byte","{value:,}"' for name, value in metrics.items()]
    return "\n".join(lines)


def test_metrics_are_those_of_the_launch_that_was_announced(capsys: pytest.CaptureFixture[str]) -> None:
    nsight.announce(["first", 1])
    (line,) = capsys.readouterr().out.splitlines()
    text = profiled([["first", 1], "second"], [{"read": 1_000_000, "write": 7}, {"read": 12, "write": 0}])
    assert line in text
    assert nsight.parse(text) == [
        Launch(["first", 1], {"read": 1_000_000, "write": 7}),
        Launch("second", {"read": 12, "write": 0}),
    ]


@pytest.mark.parametrize("launches", [0, 1, 3])
def test_as_many_launches_as_were_announced(launches: int) -> None:
    with pytest.raises(ValueError, match="zip"):
        nsight.parse(profiled(["one", "two"], [{"read": 1}] * launches))


def fake_profiler(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    profiler = folder / "ncu"
    profiler.write_text(f"#!/bin/sh\n{body}\n")
    profiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_the_script_runs_under_the_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "table"
    table.write_text(profiled(["one"], [{"read": 5}]))
    fake_profiler(tmp_path, monkeypatch, f'echo "$@" $GIVEN > {tmp_path}/words; cat {table}')
    assert nsight.profile("some.py", ("read", "write"), ("--option",), {"GIVEN": "here"}) == [
        Launch("one", {"read": 5})
    ]
    words = (tmp_path / "words").read_text().split()
    assert words[words.index("--metrics") + 1] == "read,write" and "--option" in words
    assert words[-3:] == ["some.py", "--launch", "here"]


def test_a_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_profiler(tmp_path, monkeypatch, "echo no permission >&2; exit 3")
    with pytest.raises(SystemExit, match="no permission"):
        nsight.profile("some.py", ("read",))


# --- bench/traffic.py ------------------------------------------------------------------------------------------


def test_bytes_beside_their_prediction(traffic: Any) -> None:
    case, (read, write) = traffic.CASES[3], traffic.METRICS
    launches = [
        Launch(["forward_sm80", list(case), 2_000_000], {read: 1_000_000, write: 1_100_000}),
        Launch(["forward_sm90", list(case), 2_000_000], {read: 1_500_000, write: 900_000}),
    ]
    first, second = traffic.markdown(traffic.rows_of(launches)).split("## forward_sm90")
    assert "0 of 1 are more than 15%" in first and "| 64 | causal | 4 | 4096 | 32 | 2.0 | 2.1 | 1.05 |" in first
    assert "1 of 1 are more than 15%" in second and "| 2.0 | 2.4 | 1.20 |" in second


def test_every_case_is_beyond_the_cache(traffic: Any) -> None:
    """K and V of all heads exceed 60 MiB, and at the longest length those of one head half of it."""
    assert {case.seqlen for case in traffic.CASES} == {4096, 16384, 131072}
    for case in traffic.CASES:
        head = 4 * case.seqlen * case.head_dim
        assert head * case.batch * case.heads > 60 << 20
        assert case.seqlen < 131072 or head > 30 << 20


# --- bench/cycles.py -------------------------------------------------------------------------------------------


def test_the_least_of_each_case_and_how_far_compilers_are_apart(cycles: Any) -> None:
    bf16, fp16 = cycles.CASES[12], cycles.CASES[13]
    assert bf16 == (128, 128, False, "bfloat16") and fp16.dtype == "float16"
    measured = ((bf16, 1_200_000), (bf16, 1_100_400), (fp16, 1_122_000))
    own = cycles.least_of(Launch(list(case), {cycles.METRIC: value}) for case, value in measured)
    assert own == {bf16: 1100, fp16: 1122}
    assert "| 128 | full | 1100 | 1122 | 1.020 |" in cycles.markdown(own, None)
    text = cycles.markdown(own, {bf16: 1144, fp16: 1122})
    assert "1 of 2 prebuilt kernels are more than 3%" in text and "| 1144 | 1122 | 1.040 and 1.000 |" in text
