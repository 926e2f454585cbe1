"""``bench/traffic.py``: what the profiler prints beside what was predicted, family by family."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "traffic.py"


@pytest.fixture
def traffic():
    spec = importlib.util.spec_from_file_location("traffic", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def profiled(launches, bytes_read, bytes_written) -> str:
    """The output of the profiler around the script's own lines."""
    lines = ["==PROF== Connected", *(f"predicted {json.dumps(launch)}" for launch in launches), "==PROF== Disconnected"]
    lines.append('"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"')
    for i, pair in enumerate(zip(bytes_read, bytes_written, strict=True)):
        for kind, value in zip(("read", "write"), pair, strict=True):
            lines.append(f'"{i}","cuflash_fwd","dram__bytes_{kind}.sum","byte","{value:,}"')
    return "\n".join(lines)


def test_bytes_are_those_of_the_launch_that_was_predicted(traffic):
    case = traffic.CASES[3]
    launches = [["forward_sm80", case, 2_000_000], ["forward_sm90", case, 2_000_000]]
    rows = traffic.parse(profiled(launches, [1_000_000, 1_500_000], [1_100_000, 900_000]))
    assert [(row.family, row.case, row.measured) for row in rows] == [
        ("forward_sm80", case, 2_100_000),
        ("forward_sm90", case, 2_400_000),
    ]
    first, second = traffic.markdown(rows).split("## forward_sm90")
    assert "0 of 1 are more than 15%" in first and "| 64 | causal | 4 | 4096 | 32 | 2.0 | 2.1 | 1.05 |" in first
    assert "1 of 1 are more than 15%" in second and "| 2.0 | 2.4 | 1.20 |" in second


def test_a_launch_too_few_is_an_error(traffic):
    launches = [["forward_sm80", traffic.CASES[0], 1]] * 2
    with pytest.raises(ValueError, match="zip"):
        traffic.parse(profiled(launches, [1], [1]))


def test_every_case_is_beyond_the_cache(traffic):
    """K and V of all heads exceed 60 MiB, and at the longest length those of one head half of it."""
    assert {case.seqlen for case in traffic.CASES} == {4096, 16384, 131072}
    for case in traffic.CASES:
        head = 4 * case.seqlen * case.head_dim
        assert head * case.batch * case.heads > 60 << 20
        assert case.seqlen < 131072 or head > 30 << 20
