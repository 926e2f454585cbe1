"""The benchmark of the backward pass: cases, contestants, errors, a whole run without a GPU, report and pictures."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import kernels
from cuflash.bench import accuracy, backward, gradients, peers, report, runner, table, training
from cuflash.bench.backward import BACKWARD
from cuflash.bench.forward import FORWARD
from cuflash.bench.inputs import Case, InputPool, numpy_dtype
from cuflash.bench.measure import device_times
from cuflash.cli import bench, main
from cuflash.cli.screen import Screen
from cuflash.explanation import explain
from cuflash.reference import oracle_backward
from tests.unit import fake_gpu, synthetic
from tests.unit.test_bench import FakeTimer, small  # noqa: F401 - a fixture

NAMES = ("dq", "dk", "dv")
watched_memory = training.watched_memory

# --- cases -----------------------------------------------------------------------------------------------------


def test_the_table_is_the_one_that_is_promised():
    cases = BACKWARD.cases
    assert len(cases) == len(set(cases)) == 3 * 2 * 6 + 3 * 2 + 3 + 3 * 2 * 2
    for dtype, lengths in (("bfloat16", (512, 1024, 2048, 4096, 8192, 16384)), ("float16", (1024, 4096))):
        for d in (64, 128, 256):
            assert {Case.of(d, causal, n, dtype) for causal in (False, True) for n in lengths} <= set(cases)
    assert {case.head_dim_v for case in cases if case.head_dim == 192} == {192, 128}
    assert {case.shapes[1] for case in cases if case.heads_k != case.heads} == {
        (1, n, 8, 128) for n in (1024, 4096, 8192)
    }
    assert set(BACKWARD.quick_cases) < set(cases)


def test_flops_are_those_of_five_products():
    case = Case.of(128, True, 4096, "float16")
    assert case.flops_of("backward") == 2.5 * case.flops == 2.5 * case.flops_of("forward")
    uneven = Case.of(192, False, 4096, "float16", head_dim_v=128)
    assert uneven.flops_of("backward") == 2 * 4 * 10 * 4096**2 * (3 * 192 + 2 * 128)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_every_case_has_its_kernels(arch):
    """All that the calls of a case launch on a device, and its Ampere-style kernels."""
    jobs = dict(table.kernel_jobs(BACKWARD, BACKWARD.cases, arch))
    for case in BACKWARD.cases[::5]:
        like = [np.empty(shape, numpy_dtype(case.dtype)) for shape in case.shapes[:3]]
        for about in (explain(*like, causal=case.causal, arch=arch, backward=b) for b in (False, True)):
            for kernel in about.kernels:
                assert jobs[replace(kernel.problem, short=False)]
    assert {problem.task for problem in jobs} == {"forward", "backward_rows", "backward", "backward_dq"}
    ampere = {problem for problem in jobs if problem.task == "backward" and problem.arch == arch}
    assert len(ampere) == 6 * 2 + 3 * 2  # head dims by masks in bfloat16, then in float16
    assert {jobs[problem].family for problem in ampere} == {"backward_sm80"}


# --- accuracy --------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.integers(0, 99))
def test_exact_gradients_are_the_oracles(seq_q, seq_k, dim, dim_v, causal, seed):
    rng = np.random.default_rng(seed)
    shapes = ((seq_q, dim_v), (seq_q, dim), (seq_k, dim), (seq_k, dim_v))
    dout, q, k, v = (rng.standard_normal(shape) for shape in shapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "ROWS", 7)
        out, *grads = accuracy.exact_gradients(dout, q, k, v, causal, np)
    mask = "bottom_right" if causal else False
    expected = oracle_backward(*(x[None, None] for x in (dout, q, k, v)), causal=mask)
    for grad, right in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad, right[0, 0], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(out, accuracy.exact_head(q, k, v, causal, np), rtol=1e-12, atol=1e-13)


def test_errors_of_gradients_are_found_where_they_are():
    """Of grouped heads: dK and dV are sums over the query heads of a group."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 20, heads, dim)) for heads, dim in ((6, 8), (2, 8), (2, 5), (6, 5)))
    swapped = (x.swapaxes(1, 2) for x in (dout, q, k, v))
    right = [x.swapaxes(1, 2) for x in oracle_backward(*swapped, causal="bottom_right")]
    wrong = [x.copy() for x in right]
    for grad, at in zip(wrong, ((1, 17, 5, 2), (0, 3, 1, 7), (1, 0, 0, 4)), strict=True):
        grad[at] += 0.25
    results = {"good": dict(zip(NAMES, right, strict=True)), "bad": dict(zip(NAMES, wrong, strict=True))}
    found = accuracy.compare(results, accuracy.exact_results((q, k, v, dout), True, np, heads=4), np)
    for name, grad, at in zip(NAMES, right, ((1, 17, 5, 2), (0, 3, 1, 7), (1, 0, 0, 4)), strict=True):
        assert found["good"][name].relative < 1e-14 and found["bad"][name].where == at
        assert found["bad"][name].largest == pytest.approx(0.25)
        assert found["bad"][name].relative == pytest.approx(0.25 / np.linalg.norm(grad))
    assert list(found["good"]) == ["dq", "dk", "dv"]


def test_numpy_judges_no_long_heads():
    """It would take minutes; a device judges all lengths."""
    at, beyond = (
        np.broadcast_to(np.float16(0), (1, n, 2, 1)) for n in (backward.HOST_LENGTH, backward.HOST_LENGTH + 1)
    )
    assert next(backward.exact([beyond] * 4, False, np, 1), None) is None
    assert next(backward.exact([at[:, :8]] * 4, False, np, 1)).result == "out"


# --- contestants -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("heads_k", [4, 2])
def test_peers_differentiate_the_same_memory_or_refuse_with_a_reason(monkeypatch, heads_k):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sys.modules["cupy"], "from_dlpack", lambda tensor: tensor.numpy(), raising=False)
    case = Case.of(64, True, 16, "float16", batch=2, heads=4, heads_k=heads_k)
    arrays = InputPool("float16", [case]).arrays(case)
    before = [array.copy() for array in arrays]
    found, refused = backward.contestants(case, arrays, ("flash", "cudnn"), BACKWARD.explain(case, arrays))
    assert [one.name for one in found] == ["cuflash", "cuflash deterministic", "flash"]
    assert refused[0].name == "cudnn" and refused[0].reason
    results = {one.name: one.results() for one in found}
    assert [grad.shape for grad in results["flash"].values()] == list(case.shapes[:3])
    errors = accuracy.compare(results, backward.exact(arrays, True, np, 8), np)
    assert max(error.relative for of_one in errors.values() for error in of_one.values()) < 2e-3
    for one in found:
        one.call()
    assert all(np.array_equal(x, y) for x, y in zip(arrays, before, strict=True))


def test_a_device_with_two_families_runs_both_in_turn(monkeypatch):
    """Each contestant's kernels in every round, on the same arrays, and all are right."""
    gpu = fake_gpu.install(monkeypatch)
    monkeypatch.setattr(backward, "has_two_families", lambda about: True)
    monkeypatch.setitem(sys.modules, "cupy", gpu.cupy)
    case = Case.of(64, True, 50, "bfloat16", batch=1, heads=2, heads_k=1)
    rng = np.random.default_rng(0)
    host = [rng.standard_normal(shape).astype(numpy_dtype("bfloat16")) for shape in case.shapes]
    arrays = [gpu.array(x) for x in host]
    monkeypatch.setattr(gradients, "poison", lambda array: None)
    try:
        found, _ = backward.contestants(case, arrays, (), BACKWARD.explain(case, arrays))
        assert [one.name for one in found] == ["cuflash", "cuflash deterministic", "cuflash sm80"]
        results = {one.name: {name: gpu.host(x) for name, x in one.results().items()} for one in found}
        errors = accuracy.compare(results, backward.exact(host, True, np, 2), np)
        assert max(error.relative for of_one in errors.values() for error in of_one.values()) < 8e-3
        gpu.launches.clear()
        device_times({one.name: one.call for one in found}, 2, FakeTimer(), warm_rounds=1)
        tasks = [launch.loaded.problem.task for launch in gpu.launches]
        assert tasks == 3 * (2 * ["backward_rows", "backward"] + ["backward_rows", "backward", "backward_dq"])
        turns = [bool(launch.params["turns"]) for launch in gpu.launches if launch.loaded.problem.task == "backward"]
        assert turns == 3 * [False, True, False]
        symbols = [kernels.symbol(one.loaded.problem, one.loaded.config) for one in gpu.launches]
        assert "cuflash_bwd_sm80_d64_bf16_causal" in symbols[5] and kernels.family_in_use() is None
    finally:
        fake_gpu.remove(gpu)


def test_a_second_family_is_one_that_is_not_ampere_style():
    x = np.empty((1, 64, 2, 64), np.float16)
    assert [table.has_two_families(explain(x, x, x, arch=arch)) for arch in ("sm_80", "sm_90")] == [False, True]
    about = explain(x, x, x, arch="sm_80", backward=True)
    assert not table.has_two_families(about) and not table.has_two_families(explain(x, x, x))
    other = replace(about.kernel, family="backward_sm90", symbol="other")
    about = replace(about, kernels=(about.kernels[0], other, about.kernels[2]))
    assert table.has_two_families(about)
    symbols = table.family_symbols(Case.of(64, False, 64, "float16"), about)
    assert symbols["cuflash"] == "other" and symbols["cuflash sm80"].startswith("cuflash_bwd_sm80_d64_f16_full")


# --- a whole run -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_a_run_writes_record_report_and_pictures(tmp_path, capsys):
    words = ["bench", "--backward", "--quick", "--rounds", "2", "--output", str(tmp_path), "--commit", "abc"]
    assert main(words) == 0
    record = runner.load(tmp_path / "backward.json")
    assert set(record) == {"schema", "pass", "environment", "seconds", *runner.PARTS["backward"]}
    assert record["pass"] == "backward" and len(record["speed"]) == 7
    for row in record["speed"]:
        assert list(row["results"]) == ["cuflash", "cuflash deterministic"]
        for result in row["results"].values():
            assert list(result["errors"]) == ["dq", "dk", "dv"]
            assert all(0 < error["relative"] < 8e-3 for error in result["errors"].values())
        case = Case(**row["case"])
        assert row["case_flops"] == case.flops_of("backward")
        tflops = row["case_flops"] / row["results"]["cuflash"]["milliseconds"]["median"] / 1e9
        assert row["results"]["cuflash"]["tflops"] == pytest.approx(tflops)
    assert [call["case"] for call in record["memory"]] == ["B1 N16 H2 D64", "B1 N32 H2 D64"]
    text = (tmp_path / "backward.md").read_text()
    for words in ("# Backward benchmark", "bfloat16, d = 64, causal", "2.5 times", "Host time of forward and backward"):
        assert words in text
    assert "backward table" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_both_passes_are_the_default(monkeypatch, capsys):
    plans = []
    monkeypatch.setattr(runner, "measure", lambda plan, screen: plans.append(plan) or synthetic.record(plan.which.name))
    assert main(["bench", "--quick"]) == 0
    assert [(plan.which, plan.parts) for plan in plans] == [
        (FORWARD, ("speed", "host", "memory", "startup")), (BACKWARD, ("speed", "host", "memory")),
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert out.index("# Forward benchmark") < out.index("# Backward benchmark")
    plans.clear()
    assert main(["bench", "--parts", "startup", "--rounds", "3"]) == 0
    assert [(plan.which, plan.parts, plan.table_rounds) for plan in plans] == [(FORWARD, ("startup",), 3)]
    assert main(["bench", "--backward", "--parts", "startup"]) == 1
    assert "--parts has startup; of the backward pass: speed, host, memory" in capsys.readouterr().err
    assert main(["bench", "--backward", "--sweep", "64"]) == 1
    assert "--backward goes not with --sweep" in capsys.readouterr().err


def test_rounds_are_those_of_the_pass():
    plans = [runner.Plan(which, quick, ()) for which in (FORWARD, BACKWARD) for quick in (False, True)]
    assert [plan.table_rounds for plan in plans] == [15, 7, 9, 7]
    assert [plan.cases for plan in plans[2:]] == [BACKWARD.cases, BACKWARD.quick_cases]


@pytest.mark.compile
def test_missing_kernels_are_compiled_before_the_table(monkeypatch, kernel_cache):
    monkeypatch.setattr("cuflash.driver.current_device", lambda: 0)
    monkeypatch.setattr("cuflash.driver.device_compute_capability", lambda ordinal: (8, 0))
    cases = [Case.of(32, False, n, "float16") for n in (512, 1024)]
    shown = []
    for _ in range(2):
        out = io.StringIO()
        runner.compile_kernels(BACKWARD, cases, Screen(out))
        shown.append(out.getvalue())
    for words in (
        "cuflash_fwd_sm80_d32",
        "cuflash_bwd_rows_d32",
        "cuflash_bwd_sm80_d32",
        "cuflash_bwd_dq_d32",
        "[4/4]",
    ):
        assert words in shown[0]
    assert shown[1] == ""


@pytest.mark.usefixtures("small")
def test_the_most_memory_that_was_in_use_is_found(monkeypatch):
    """Blocks are counted as the pool rounds them, those that were freed only while they lived."""
    hooks = []
    monkeypatch.setattr(sys.modules["cupy"].cuda.MemoryHook, "__enter__", lambda self: hooks.append(self) or self)
    with watched_memory() as used:
        for change in (512, 1024, -512, 256, 2048, -3328):
            name = "malloc_postprocess" if change > 0 else "free_postprocess"
            getattr(hooks[0], name)(mem_size=abs(change), mem_ptr=0)
    assert (used.now, used.peak) == (0, 512 + 1024 - 512 + 256 + 2048)
    call = training.measure_long_call(16, "bfloat16", judged=False)
    rows, elements = 2 * 16, 2 * 16 * 64
    assert call.inputs == 4 * 2 * elements and call.results == 4 * 2 * elements + 4 * rows and call.errors == {}


@pytest.mark.usefixtures("small")
def test_the_longest_call_is_judged_where_a_device_can(monkeypatch):
    """NumPy cannot, in good time."""
    with monkeypatch.context() as patch:
        patch.setattr(training, "array_module", lambda: np)
        assert training.measure_long_call(16, "bfloat16", judged=True).errors == {}
    first, last = training.measure_long_calls((16, 32))
    assert first.errors == {} and list(last.errors) == ["out", "dq", "dk", "dv"]
    assert all(0 < error.relative < 8e-3 for error in last.errors.values())


def test_torch_calls_differentiate(monkeypatch):
    """What is timed: forward and backward pass, with gradients of all three arrays."""
    torch = pytest.importorskip("torch")
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda shape, *, dtype, device: zeros(shape, dtype=dtype))
    for name, call in training.torch_calls("float16").items():
        with call.context():
            grads = call.call()
        batch, seq, heads, dim = training.SMALL
        shape = (batch, heads, seq, dim) if "SDPA" in name else training.SMALL
        assert [tuple(grad.shape) for grad in grads] == 3 * [shape]


# --- report, pictures ------------------------------------------------------------------------------------------


def test_the_report_has_every_number_that_matters():
    record = synthetic.record("backward")
    text = report.markdown(record)
    for row in record["speed"]:
        for result in row["results"].values():
            assert f"{result['tflops']:.0f}" in text
    assert text.startswith("# Backward benchmark") and "2 B H N² (3 D + 2 Dv), 2.5 times" in text
    tables = 3 * 2 * 2 + 1  # head dims by masks by dtypes, and grouped heads
    for title in ("cuflash / flash", "cuflash / cudnn", "cuflash sm80 / flash", "cuflash deterministic / cuflash"):
        assert text.count(f"**{title}**") == tables
    assert text.count("derived through cuDNN*") == 2 * 2 * 2  # no figures of d 256
    for words in (
        "| 192/128 full |", "32 query heads over 8", "| bfloat16 d128, grouped heads, dv |", "| bfloat16 d64, dq |",
        "| B1 N32768 H16 D64 | 268435456 | 270532608 | 132120576 | 671088640 | 2.000 |", "| dk | 2.20e-03 | 3.00e-02 |",
        "all rows and keys of its first and last head", "Host time of forward and backward",
    ):  # fmt: skip
        assert words in text


def test_ratios_of_the_deterministic_mode_are_to_the_default():
    row = synthetic.record("backward")["speed"][6]
    for name, milliseconds in {"cuflash": 1.0, "cuflash deterministic": 1.25, "cudnn": 1.29}.items():
        row["results"][name]["milliseconds"]["median"] = milliseconds
    summary = report.summary_text([row], "backward", "NVIDIA H200")
    assert (
        "| cuflash deterministic | cuflash | 64, 128, 256, causal | 0.80 | 0.80 | bfloat16 d64 causal N 512 | 1 |"
        in summary
    )
    row["case"]["seqlen"] = 1024
    assert table.derived_ratio(row, "backward", "NVIDIA H200") == pytest.approx(1.0)


def test_the_accuracy_table_has_a_line_for_each_gradient():
    rows = synthetic.record("backward")["speed"]
    for row in rows:
        for name, result in row["results"].items():
            for error in result["errors"].values():
                error["relative"] = 2e-3 if name == "cuflash" else 1e-3
    rows[3]["results"]["cuflash"]["errors"]["dk"]["relative"] = 9e-3
    lines = {line.split(" | ")[0]: line for line in report.accuracy_text(rows).splitlines()}
    assert "9.00e-03" in lines["| bfloat16 d64, dk"] and lines["| bfloat16 d64, dk"].endswith(
        "| 9.00 | 1.00 | 1.00 | 1.00 |"
    )
    assert lines["| bfloat16 d64, dq"].endswith("| 2.00 | 1.00 | 1.00 | 1.00 |")
    for row in rows:
        for result in row["results"].values():
            result["errors"] = {}
    assert report.accuracy_text(rows) == ""


def test_pictures_are_drawn_from_a_record(tmp_path):
    pytest.importorskip("matplotlib")
    path = runner.save(synthetic.record("backward"), tmp_path)
    assert path.name == "backward.json" and json.loads(path.read_text())["pass"] == "backward"
    assert main(["bench", "--record", str(path), "--output", str(tmp_path / "out")]) == 0
    kinds = ("bfloat16", "float16", "roofline_bfloat16", "roofline_float16")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "backward.md",
        *(f"backward_{k}.png" for k in kinds),
    ]


def test_the_gradients_names_are_the_results():
    """One spelling from the contestants to the report."""
    assert gradients.NAMES == NAMES and peers.OURS_FIXED in report.TITLES and cuflash.attention_backward
    assert bench.TABLE_OPTIONS[:2] == tuple(runner.PASSES)
