"""``bench/cycles.py``: what the profiler prints, case by case."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "cycles.py"


@pytest.fixture
def cycles():
    spec = importlib.util.spec_from_file_location("cycles", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def profiled(launches, values) -> str:
    lines = ["==PROF== Connected", *(f"case {json.dumps(case)}" for case in launches), "==PROF== Disconnected"]
    lines.append('"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"')
    lines += [f'"{i}","cuflash_fwd","sm__cycles_elapsed.max","cycle","{v:,}"' for i, v in enumerate(values)]
    return "\n".join(lines)


def test_the_least_of_each_case_and_how_far_compilers_are_apart(cycles):
    bf16, fp16 = cycles.CASES[12], cycles.CASES[13]
    assert bf16 == (128, 128, False, "bfloat16") and fp16.dtype == "float16"
    own = cycles.parse(profiled([bf16, bf16, fp16], [1_200_000, 1_100_400, 1_122_000]))
    assert own == {bf16: 1100, fp16: 1122}
    assert "| 128 | full | 1100 | 1122 | 1.020 |" in cycles.markdown(own, None)
    text = cycles.markdown(own, {bf16: 1144, fp16: 1122})
    assert "1 of 2 prebuilt kernels are more than 3%" in text and "| 1144 | 1122 | 1.040 and 1.000 |" in text


def test_a_launch_too_few_is_an_error(cycles):
    with pytest.raises(ValueError, match="zip"):
        cycles.parse(profiled([cycles.CASES[0]] * 2, [1]))
