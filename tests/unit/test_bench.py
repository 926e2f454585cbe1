"""The benchmark: timing with fake clocks, errors against the oracle, a whole run without a GPU, report and pictures."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash import kernels
from cuflash.arch import ARCHES
from cuflash.bench import (
    accuracy,
    environment,
    forward,
    measure,
    overhead,
    published,
    report,
    runner,
    startup,
    table,
    training,
)
from cuflash.bench.forward import FORWARD
from cuflash.bench.inputs import Case, InputPool, numpy_dtype, poison
from cuflash.bench.measure import HostCall, Spread, device_times, host_times
from cuflash.cli import main
from cuflash.cli.screen import Screen
from cuflash.explanation import explain
from tests.unit import fake_cupy, fake_gpu, synthetic
from tests.unit.test_demo import FAKE_GPU

# --- timing ----------------------------------------------------------------------------------------------------


class FakeTimer:
    """A device whose calls take the milliseconds that they add to ``now``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.synchronized = 0

    def record(self) -> float:
        return self.now

    def elapsed_ms(self, start: float, stop: float) -> float:
        return stop - start

    def synchronize(self) -> None:
        self.synchronized += 1


def test_calls_take_turns_and_warm_rounds_do_not_count():
    timer, order = FakeTimer(), []

    def call(name: str, milliseconds: float):
        def run() -> None:
            order.append(name)
            timer.now += milliseconds * (100 if len(order) <= 4 else 1)  # the warm rounds are slow

        return run

    times = device_times({"a": call("a", 1.0), "b": call("b", 3.0)}, rounds=5, timer=timer, warm_rounds=2)
    assert order == ["a", "b"] * 7
    assert times == {"a": Spread(1.0, 1.0, 1.0, 5), "b": Spread(3.0, 3.0, 3.0, 5)}
    assert timer.synchronized == 1


def test_one_slow_round_moves_the_quartile_not_the_median():
    spread = Spread.of([1.0, 1.0, 1.0, 1.0, 9.0])
    assert (spread.median, spread.q3, spread.relative_iqr) == (1.0, 1.0, 0.0)
    assert Spread.of([1.0, 2.0, 3.0]) == Spread(2.0, 1.5, 2.5, 3)
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])


def test_host_time_is_per_call_and_the_first_batch_is_not_counted(monkeypatch):
    clock, timer, inside = [0.0], FakeTimer(), []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])

    class Context:
        def __enter__(self) -> None:
            inside.append(True)
            clock[0] += 1000.0  # entering is not timed

        def __exit__(self, *args: object) -> None:
            inside.pop()

    calls = []

    def call() -> None:
        calls.append(len(inside))
        clock[0] += 1.0 if len(calls) <= 10 else 5e-6

    times = host_times({"x": HostCall(call, Context)}, timer, batches=3, calls_per_batch=10)
    assert times["x"].median == pytest.approx(5.0) and times["x"].samples == 3
    assert calls == [1] * 40 and timer.synchronized == 4


# --- cases -----------------------------------------------------------------------------------------------------


def test_the_table_is_the_one_that_is_promised():
    cases = FORWARD.cases
    assert len(cases) == len(set(cases)) == 2 * (3 * 2 * 6 + 6 * 2) + 7
    grouped = [case for case in cases if case.heads_k != case.heads]
    assert {case.shapes[1] for case in grouped} == {(1, 2**n, 8, 128) for n in range(9, 16)}
    assert {case.shapes[0] for case in grouped} == {(1, 2**n, 32, 128) for n in range(9, 16)}
    assert all(case.causal and case.dtype == "bfloat16" for case in grouped)
    alike = set(cases) - set(grouped)
    assert all(case.batch * case.seqlen == 16384 for case in alike)
    assert {case.heads * case.head_dim for case in alike if case.head_dim in (32, 64, 128, 256)} == {2048}
    assert {(case.head_dim, case.heads) for case in cases} >= {(80, 25), (96, 21), (160, 12), (192, 10)}
    assert {case.head_dim_v for case in cases if case.head_dim == 192} == {192, 128}
    assert set(FORWARD.quick_cases) < set(cases)


def test_flops_of_a_case():
    case = Case.of(128, False, 4096, "float16")
    assert case.flops == 4 * 4 * 16 * 4096**2 * 128 == 2 * Case.of(128, True, 4096, "float16").flops
    assert case.tflops(1.0) == pytest.approx(549.8, abs=0.1)
    assert Case.of(192, False, 4096, "float16", head_dim_v=128).flops == 2 * 4 * 10 * 4096**2 * (192 + 128)
    grouped = Case.of(128, True, 512, "bfloat16", batch=1, heads=32, heads_k=8)
    assert grouped.flops == 2 * 32 * 512**2 * 128 and str(grouped).endswith("(B 1, H 32 over 8)")


def test_every_case_has_a_kernel():
    jobs = table.kernel_jobs(FORWARD, FORWARD.cases, "sm_90")
    assert len(jobs) == 2 * 2 * 2 * 9
    assert jobs[0][0].head_dim == 256
    assert {config.family for _, config in jobs} == {"forward_sm80", "forward_sm90"}


# --- accuracy --------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.integers(0, 99))
def test_the_exact_head_is_the_oracles(seq_q, seq_k, dim, dim_v, causal, seed):
    from cuflash.reference import oracle

    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape) for shape in ((seq_q, dim), (seq_k, dim), (seq_k, dim_v)))
    mask = "bottom_right" if causal else False
    expected, _ = oracle(q[None, None], k[None, None], v[None, None], causal=mask, scale=dim**-0.5)
    np.testing.assert_allclose(accuracy.exact_head(q, k, v, causal, np), expected[0, 0], rtol=1e-12, atol=1e-13)


def test_blocks_of_rows_make_no_difference(monkeypatch):
    q, k, v = np.random.default_rng(0).standard_normal((3, 50, 8))
    whole = accuracy.exact_head(q, k, v, True, np)
    monkeypatch.setattr(accuracy, "ROWS", 7)
    np.testing.assert_allclose(accuracy.exact_head(q, k, v, True, np), whole, rtol=1e-12)


def exact_output(q, k, v):
    out = np.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            out[b, :, h] = accuracy.exact_head(q[b, :, h], k[b, :, h], v[b, :, h], False, np)
    return out


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=4, max_size=4))
def test_bfloat16_is_widened_exactly(values):
    array = np.array(values, np.float32).astype(numpy_dtype("bfloat16"))
    expected = array.astype(np.float64)
    np.testing.assert_array_equal(accuracy.to_float64(array), expected)
    np.testing.assert_array_equal(accuracy.to_float64(np.repeat(array, 2)[::2]), expected)


@pytest.mark.parametrize("dtype", forward.TABLE_DTYPES)
def test_a_poisoned_array_is_not_a_number(dtype):
    array = np.zeros((2, 3), numpy_dtype(dtype))
    poison(array[:, 1:])
    assert np.isnan(array[:, 1:].astype(np.float32)).all() and not array[:, 0].any()


def test_an_error_is_found_where_it_is():
    inputs = list(np.random.default_rng(0).standard_normal((3, 2, 30, 3, 8)))
    good = exact_output(*inputs)
    bad, broken = good.copy(), good.copy()
    bad[1, 17, 2, 5] += 0.25
    broken[0, 3, 0, 1] = np.nan
    found = accuracy.errors({"good": good, "bad": bad, "broken": broken}, inputs, False, np, heads=6)
    assert found["good"].relative < 1e-15
    assert found["bad"].where == (1, 17, 2, 5) and found["bad"].largest == pytest.approx(0.25)
    assert found["bad"].relative == pytest.approx(0.25 / np.linalg.norm(good))
    assert np.isnan(found["broken"].largest) and np.isnan(found["broken"].relative)
    assert found["broken"].where == (0, 3, 0, 1)


def test_errors_of_grouped_heads_are_against_their_own_keys():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 20, heads, dim)) for heads, dim in ((6, 8), (2, 8), (2, 5)))
    out = np.empty((2, 20, 6, 5))
    for b, h in np.ndindex(2, 6):
        out[b, :, h] = accuracy.exact_head(q[b, :, h], k[b, :, h // 3], v[b, :, h // 3], True, np)
    assert accuracy.errors({"": out}, [q, k, v], True, np, heads=12)[""].relative < 1e-15


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 6))
def test_sampled_heads_reach_both_ends(batch, heads, count):
    sample = accuracy.sampled_heads(batch, heads, count)
    assert len(sample) == len(set(sample)) == min(count, batch * heads)
    assert sample[0] == (0, 0) and (count == 1 or sample[-1] == (batch - 1, heads - 1))


# --- a whole run -----------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark on sizes for a CPU, with NumPy for CuPy and a device that does not exist."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy.module())
    for name, value in {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "device_properties": lambda ordinal: FAKE_GPU,
        "device_compute_capability": lambda ordinal: (9, 0),
    }.items():
        monkeypatch.setattr(f"cuflash.driver.{name}", value)
    monkeypatch.setattr("cuflash.compiler.nvrtc_build", lambda: "13.0.1")
    monkeypatch.setattr("cuflash.bench.inputs.TOKENS", 128)
    monkeypatch.setattr(runner, "known_peers", lambda: ())
    for module in (overhead, training):
        monkeypatch.setattr(module, "torch_available", lambda: False)
    for module in (overhead, training):
        monkeypatch.setattr(module, "SMALL", (1, 8, 1, 8))
    monkeypatch.setattr(training, "LONG_HEADS", 2)
    monkeypatch.setattr(training, "watched_memory", lambda: contextlib.nullcontext(training.Used(9000, 9000)))
    monkeypatch.setattr(training.measure_long_calls, "__defaults__", ((16, 32), "bfloat16"))
    monkeypatch.setattr(runner, "MEMORY_SHAPES", (((1, 16, 1, 16), True),))
    monkeypatch.setattr(runner, "clocks_under_load", lambda timer: {"clocks.sm": "1", "power.draw": "2"})
    monkeypatch.setattr(
        startup, "child", lambda code, cache: dict.fromkeys(("import", "first_call", "with_functions"), 0.5)
    )
    cases = [Case.of(64, causal, n, "bfloat16") for causal in (False, True) for n in (16, 32)]
    cases.append(Case.of(80, True, 16, "float16"))
    cases.append(Case.of(192, False, 16, "float16", head_dim_v=128, heads=2))
    cases.append(Case.of(128, True, 32, "bfloat16", batch=1, heads=4, heads_k=2))
    monkeypatch.setattr(runner.Plan, "cases", tuple(cases))
    monkeypatch.setenv("CUFLASH_DISABLE_JIT", "1")


def test_a_run_writes_record_report_and_pictures(small, tmp_path, capsys):
    words = ["bench", "--forward", "--quick", "--rounds", "2", "--output", str(tmp_path / "r"), "--commit", "abc"]
    assert main(words) == 0
    record = runner.load(tmp_path / "r" / "forward.json")
    assert [row["case"]["seqlen"] for row in record["speed"]] == [16, 32, 16, 32, 32, 16, 16]
    assert record["environment"]["commit"] == "abc" and record["environment"]["device"] == "Fake GPU"
    for row in record["speed"]:
        result = row["results"]["cuflash"]
        assert 0 < result["errors"]["out"]["relative"] < 4e-3 and result["milliseconds"]["samples"] == 6
        assert row["hbm_bytes"] > 0 and row["kernels"] == {}  # the CPU has one way
    assert set(record) == {"schema", "pass", "environment", "seconds", *runner.PARTS["forward"]}
    text = (tmp_path / "r" / "forward.md").read_text()
    assert "bfloat16, d = 64, causal" in text and "80 causal" in text and "192/128 full" in text
    assert "4 query heads over 2" in text and "Host time" in text
    out = capsys.readouterr().out
    assert "[6/7] float16 d80" in out and "wrote" in out


def test_parts_can_be_chosen(small):
    record = runner.measure(runner.Plan(FORWARD, quick=True, parts=("memory",)), Screen(io.StringIO()))
    assert "speed" not in record and record["memory"][0]["case"] == "B1 N16 H1 D16 causal"
    assert record["memory"][0]["lse"] == 64
    assert report.markdown(record)


def test_without_a_gpu_the_benchmark_says_so(monkeypatch, capsys):
    monkeypatch.setattr("cuflash.driver.device_count", lambda: 0)
    assert main(["bench", "--quick"]) == 1
    assert "needs a GPU" in capsys.readouterr().err
    assert main(["bench", "--rounds", "0"]) == 1
    assert "--rounds is 0" in capsys.readouterr().err


@pytest.mark.compile
def test_missing_kernels_are_compiled_before_the_table(monkeypatch, kernel_cache):
    monkeypatch.setattr("cuflash.driver.current_device", lambda: 0)
    monkeypatch.setattr("cuflash.driver.device_compute_capability", lambda ordinal: (9, 0))
    cases = [Case.of(32, False, n, "float16") for n in (512, 1024)]
    shown = []
    for _ in range(2):
        out = io.StringIO()
        runner.compile_kernels(FORWARD, cases, Screen(out))
        shown.append(out.getvalue())
    for words in ("cuflash_fwd_sm90_d32_f16_full", "cuflash_fwd_sm80_d32_f16_full", "[2/2]"):
        assert words in shown[0]
    assert shown[1] == ""
    x = np.zeros((1, 64, 2, 32), np.float16)
    assert explain(x, x, x, arch="sm_90").kernel.cached == "disk"


def test_short_cases_get_more_rounds(small):
    case, long = (Case.of(64, False, 16, "float16", batch=1, heads=heads) for heads in (1, 2))
    pool = InputPool("float16", [long])
    row = table.measure_case(FORWARD, case, pool, (), 2, measure.CupyTimer(), np)
    assert row.results["cuflash"].milliseconds.samples == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "flops", 1e12)
        row = table.measure_case(FORWARD, long, pool, (), 2, measure.CupyTimer(), np)
    assert row.results["cuflash"].milliseconds.samples == 2


def test_inputs_are_views_of_one_pool(small):
    cases = [
        Case.of(8, False, 16, "bfloat16", batch=1, heads=4, heads_k=2),
        Case.of(32, True, 8, "bfloat16", head_dim_v=8, batch=2, heads=1),
    ]
    pool = InputPool("bfloat16", cases)
    first, second = (pool.arrays(case) for case in cases)
    assert all(np.shares_memory(a, b) for a, b in zip(first, second, strict=True))
    assert [a.shape for a in first] == [(1, 16, 4, 8), (1, 16, 2, 8), (1, 16, 2, 8), (1, 16, 4, 8)]
    assert [a.shape for a in second] == [(2, 8, 1, 32), (2, 8, 1, 32), (2, 8, 1, 8), (2, 8, 1, 8)]
    assert first[0].dtype == numpy_dtype("bfloat16")
    assert abs(float(first[0].astype(np.float32).std()) - 1) < 0.2


def test_the_recorder_counts_what_a_call_allocates(small, monkeypatch):
    hooks = []
    monkeypatch.setattr(fake_cupy.MemoryHook, "__enter__", lambda self: hooks.append(self) or self)

    def attention(q, k, v, causal=False, out=None):
        for hook in hooks:
            hook.malloc_preprocess(size=100, mem_size=512)
        return q.copy()

    monkeypatch.setattr("cuflash.attention", attention)
    use = overhead.measure_memory((1, 4, 1, 8), False)
    assert use.requested >= 100 and use.output == 64 and use.extra == use.requested - 64


def test_startup_is_measured_in_fresh_processes(tmp_path):
    """The children really run; CuPy is replaced, so that they need no GPU."""
    setup = "import sys; from tests.unit import fake_cupy; sys.modules['cupy'] = fake_cupy.module()\n"
    run = startup.child(setup + startup.FIRST_CALL.replace("(1, 128, 8, 64)", "(1, 8, 1, 8)"), str(tmp_path))
    assert set(run) == {"cupy_and_context", "import", "first_call", "second_call"} and min(run.values()) > 0
    alone = startup.child(startup.IMPORT_ONLY, str(tmp_path))
    assert 0 < alone["import"] < alone["with_functions"]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        startup.child("1 / 0", str(tmp_path))


# --- peers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads_k", [4, 2])
def test_peers_run_on_the_same_memory_or_refuse_with_a_reason(small, monkeypatch, heads_k):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sys.modules["cupy"], "from_dlpack", lambda tensor: tensor.numpy(), raising=False)
    case = Case.of(64, True, 16, "float16", batch=2, heads=4, heads_k=heads_k)
    arrays = InputPool("float16", [case]).arrays(case)
    found, refused = forward.contestants(case, arrays, ("flash", "cudnn"), explain(*arrays[:3]))
    assert [one.name for one in found] == ["cuflash", "flash"] and refused[0].name == "cudnn" and refused[0].reason
    outputs = {one.name: one.results()["out"] for one in found}
    assert outputs["flash"].shape == case.shapes[3]
    errors = accuracy.errors(outputs, arrays[:3], True, np)
    assert max(error.relative for error in errors.values()) < 1e-3


@pytest.mark.parametrize(
    ("target", "families"), [("sm_90", ["forward_sm90", "forward_sm80"]), ("sm_80", ["forward_sm80"])]
)
def test_a_device_with_two_families_runs_both_in_turn(monkeypatch, target, families):
    """Each family's kernel is launched in every round, on the same arrays, and both are right."""
    gpu = fake_gpu.install(monkeypatch, capability=ARCHES[target].compute_capability)
    case = Case.of(64, True, 50, "bfloat16", batch=1, heads=2, heads_k=1)
    rng = np.random.default_rng(0)
    host = [rng.standard_normal(shape).astype(numpy_dtype("bfloat16")) for shape in case.shapes]
    arrays = [gpu.array(x) for x in host]
    try:
        about = explain(*arrays[:3], causal=True)
        symbols = table.family_symbols(case, about)
        assert list(symbols) == ["cuflash", "cuflash sm80"][: len(families)]
        found, _ = forward.contestants(case, arrays, (), about)
        errors = []
        for one in found:
            host[3][...] = np.nan
            one.call()
            errors.append(accuracy.errors({"": host[3]}, host[:3], True, np)[""].relative)
        assert max(errors) < 4e-3
        gpu.launches.clear()
        device_times({one.name: one.call for one in found}, 2, FakeTimer(), warm_rounds=1)
        assert [launch.loaded.config.family for launch in gpu.launches] == families * 3
        assert [kernels.symbol(one.loaded.problem, one.loaded.config) for one in gpu.launches[: len(families)]] == list(
            symbols.values()
        )
        assert kernels.family_in_use() is None
    finally:
        fake_gpu.remove(gpu)


# --- record, report, pictures ----------------------------------------------------------------------------------


def test_a_record_is_written_whole_and_read_back(tmp_path):
    record = synthetic.record()
    path = runner.save(record, tmp_path / "new")
    assert runner.load(path) == record and [p.name for p in path.parent.iterdir()] == ["forward.json"]
    path.write_text(json.dumps({"schema": 99}))
    with pytest.raises(ValueError, match="no benchmark record"):
        runner.load(path)


def test_ratios_are_of_times():
    record = synthetic.record()
    row = record["speed"][0]
    row["results"]["cuflash"]["milliseconds"]["median"] = 1.0
    row["results"]["flash"]["milliseconds"]["median"] = 1.25
    row["results"]["cuflash sm80"]["milliseconds"]["median"] = 1.0 / 0.8
    assert table.ratio(row, "flash") == 1.25
    assert table.ratio(row, "flash", "cuflash sm80") == 1.0
    assert table.ratio({"results": {}}, "flash") is None
    summary = report.summary_text([row], "forward", "")
    line = "| {} | torch flash (FA2) | 64, 128, 256 | {} | {} | bfloat16 d64 full N 512 | 1 |"
    assert line.format("cuflash", 1.25, 1.25) in summary and line.format("cuflash sm80", "1.00", "1.00") in summary


def test_the_multiple_of_the_best_public_kernel_is_derived_through_cudnn():
    wanted = {"dtype": "float16", "head_dim": 64, "causal": True, "seqlen": 8192}
    (row,) = (row for row in synthetic.record()["speed"] if wanted.items() <= row["case"].items())
    row["results"]["cuflash"]["milliseconds"]["median"] = 1.0
    row["results"]["cudnn"]["milliseconds"]["median"] = 1.512
    assert table.derived_ratio(row, "forward", "NVIDIA H200") == pytest.approx(1.2)
    assert table.derived_ratio(row, "forward", "NVIDIA A100") is None
    assert "| 64, 128; N up to 8192 | 1.20 | 1.20 | float16 d64 causal N 8192 | 1 |" in report.summary_text(
        [row], "forward", "H200"
    )
    (text,) = report.speed_tables([row], "forward", "H200")[1:]
    assert text.endswith("| *cuflash / best public, derived through cuDNN* | 1.20 |")
    del row["results"]["cudnn"]
    assert table.derived_ratio(row, "forward", "NVIDIA H200") is None
    assert "derived" not in report.markdown(synthetic.record() | {"speed": [row]}).lower()


def test_the_fastest_peer_is_whoever_took_least():
    row = next(row for row in synthetic.record()["speed"] if table.is_main(row))
    times = {"cuflash": 2.0, "cuflash sm80": 1.0, "flash": 4.0, "cudnn": 2.5, "efficient": 9.0, "flash3": 2.2}
    row["results"] = {name: row["results"]["cuflash"] | {"milliseconds": {"median": ms, "q1": ms, "q3": ms}}
                      for name, ms in times.items()}  # fmt: skip
    assert table.ratio_to_fastest(row) == pytest.approx(1.1)
    (text,) = report.speed_tables([row], "forward", "")[1:]
    assert "| **cuflash / flash3** | 1.10 |" in text and "| **cuflash / fastest of the peers** | 1.10 |" in text
    assert "| fastest of the peers | 64, 128; N up to 8192 | 1.10 | 1.10 |" in report.summary_text([row], "forward", "")
    row["results"] = {"cuflash": row["results"]["cuflash"]}
    assert table.ratio_to_fastest(row) is None


def test_every_main_cell_has_a_published_figure():
    rows = [row for row in synthetic.record()["speed"] if table.is_main(row)]
    assert len(rows) == 72 and all(table.derived_ratio(row, "forward", "NVIDIA H200") for row in rows)
    assert published.best_over_cudnn("forward", "NVIDIA H200", 64, False, 100) is None


def test_the_report_has_every_number_that_matters():
    record = synthetic.record()
    text = report.markdown(record)
    for words in ("0123456789ab", "driver 580.0", "NVRTC 13.0.88", "cuDNN 9.19.0", "1665 MHz at 698 W", "torch 2.11.0"):
        assert words in text
    for row in record["speed"]:
        assert f"{row['results']['cuflash']['tflops']:.0f}" in text
    assert text.count("**cuflash / flash**") == text.count("**cuflash / cudnn**") == 13
    assert text.count("**cuflash sm80 / flash**") == 13 and text.count("derived through cuDNN*") == 12
    for words in ("| 192/128 full |", "32 query heads over 8", "| bfloat16 d128, grouped heads |", published.SOURCE):
        assert words in text
    assert "| cuflash, CuPy, out= | 10.10 | 9.90 - 10.30 | 0.60 |" in text


def test_the_accuracy_table_shows_the_worst_case():
    record = synthetic.record()
    for row in record["speed"]:
        for name, result in row["results"].items():
            result["errors"]["out"]["relative"] = 2e-3 if name == "cuflash" else 1e-3
    victim = record["speed"][3]["results"]["cuflash"]["errors"]["out"]
    victim["relative"], victim["largest"] = 9e-3, 0.03
    (line,) = (line for line in report.accuracy_text(record["speed"]).splitlines() if "bfloat16 d64 " in line)
    assert "9.00e-03" in line and line.endswith("| 9.00 | 2.00 | 1.00 | 1.00 |")


def test_a_report_of_a_part_or_without_peers():
    record = synthetic.record()
    alone = copy.deepcopy(record)
    for row in alone["speed"]:
        row["results"] = {"cuflash": row["results"]["cuflash"]}
    text = report.markdown(alone)
    assert "Summary" not in text and "flash (FA2)" not in text
    assert report.markdown({"pass": "forward", "environment": record["environment"]}).startswith("# Forward benchmark")


def test_pictures_are_drawn_from_a_record(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    runner.save(synthetic.record(), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["bench", "--record", str(tmp_path / "forward.json"), "--output", str(tmp_path / "out")]) == 0
    pictures = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    kinds = [f"forward_{kind}.png" for kind in ("bfloat16", "float16", "roofline_bfloat16", "roofline_float16")]
    assert pictures == kinds
    assert (tmp_path / "out" / "forward_float16.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_show_the_recorded_numbers():
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    from cuflash.bench import plots

    rows = [r for r in synthetic.record()["speed"] if r["case"]["dtype"] == "float16" and table.is_main(r)]
    rows = [row for row in rows if (row["case"]["head_dim"], row["case"]["causal"]) == (128, True)]
    figure = plots.speed_figure(rows, "forward, float16", synthetic.record()["environment"])
    drawn = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(drawn["cuflash"].get_xdata()) == [512, 1024, 2048, 4096, 8192, 16384]
    assert list(drawn["cuflash"].get_ydata()) == [row["results"]["cuflash"]["tflops"] for row in rows]
    assert set(drawn) == {report.TITLES[name] for name in rows[0]["results"]}
    plt.close(figure)


def test_without_matplotlib_there_is_a_word_about_it(tmp_path, monkeypatch, capsys):
    from cuflash.cli import bench

    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    runner.save(synthetic.record(), tmp_path)
    assert main(["bench", "--record", str(tmp_path / "forward.json"), "--output", str(tmp_path)]) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out


def test_a_commit_is_named_only_in_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "site-packages" / "cuflash" / "bench" / "x.py"))
    assert environment.commit() is None


def test_versions_are_read_without_importing():
    versions = environment.package_versions(("numpy", "no-such-package"))
    assert versions == {"numpy": np.__version__}


def test_a_missing_program_is_no_error():
    assert environment.run_quietly("no-such-program") is None
    assert environment.run_quietly(sys.executable, "-c", "raise SystemExit(1)") is None
    assert environment.run_quietly(sys.executable, "-c", "print(5)") == "5"
    assert Path(sys.executable).exists()
