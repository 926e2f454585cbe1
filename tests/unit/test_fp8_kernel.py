"""The Hopper kernels for 8-bit inputs: problems, configs, source text and launch plans. Nothing runs here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cuflash import driver, kernels
from cuflash.arch import ARCHES
from cuflash.arch.fp8_sm90 import FORWARD
from cuflash.cli.compile import kernel_jobs
from cuflash.cli.problems import add_problem_options, problem_from
from cuflash.fp8_plan import Fp8Call, make_plan
from cuflash.fp8_sm90_config import MOST_TWO_LEVEL, Fp8Sm90Config
from cuflash.problem import MASKS, AttentionProblem
from cuflash.render import dump_command, render
from tests.unit import fake_gpu
from tests.unit.fp8_calls import ADDRESSES, assert_said, call_of
from tests.unit.test_hopper_protocol import MODELLED, hand_overs

PROBLEM = AttentionProblem(128, 128, "bfloat16", "causal", 16, False, "sm_90a", input_dtype="float8_e4m3fn")
CONFIG = Fp8Sm90Config(block_m=128, stages=4, q_stages=2, tma_store=True, two_level=True)


def table_config(problem: AttentionProblem) -> Fp8Sm90Config:
    config = kernels.select_config(problem)
    assert isinstance(config, Fp8Sm90Config)
    return config


# --- problems --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_dtype": "int8"}, "input_dtype is 'int8'; accepted are None, float8_e4m3fn"),
        ({"task": "backward"}, "accepted is that of a forward pass"),
        ({"access_bytes": 8}, "accepted is that of a forward pass, 16 bytes at a time"),
        ({"head_dim": 72}, "head_dim is 72 and head_dim_v 128; accepted are multiples of 16"),
        ({"head_dim_v": 40}, "head_dim_v 40; accepted are multiples of 16"),
        ({"input_dtype": None, "one_level": True}, "one_level is True; accepted is that with an input_dtype"),
        ({"k_dtype": "float8_e4m3fn"}, "k_dtype is 'float8_e4m3fn'; accepted is None, or what input_dtype is not"),
        ({"v_dtype": "float16"}, "v_dtype is 'float16'; accepted is None"),
        ({"input_dtype": None, "v_dtype": "float8_e5m2"}, "v_dtype is 'float8_e5m2'; accepted is None"),
    ],
)
def test_a_problem_refuses_what_no_kernel_does(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PROBLEM, **change)


@pytest.mark.parametrize("arch", ARCHES)
def test_every_target_has_kernels(arch: str) -> None:
    """Those that load by TMA on their target alone, whichever other a call may take."""
    family = kernels.select_config(replace(PROBLEM, arch=arch)).family
    assert family == ("forward_fp8_sm90" if arch == "sm_90a" else "forward_fp8_sm80")


def test_the_kernels_of_a_device_are_those_of_the_target_that_calls_take() -> None:
    def jobs(arch: str) -> list[str]:
        parser = argparse.ArgumentParser()
        add_problem_options(parser)
        args = parser.parse_args(["--input-dtype", "float8_e4m3fn", "--causal"])
        args.arch, args.all = [arch], False
        return [problem.arch for problem, _ in kernel_jobs(args)]

    assert jobs("sm_90") == jobs("sm_90a") == [kernels.fp8_target("sm_90")] == ["sm_90a"]
    assert jobs("sm_80") == [kernels.fp8_target("sm_80")] == ["sm_80"]


def test_what_is_shipped_is_what_calls_take() -> None:
    for arch in ARCHES:
        shipped = {problem.arch for problem in kernels.shipped_problems(arch) if problem.input_dtype}
        assert shipped == (set() if arch == "sm_90" else {arch})


@pytest.mark.parametrize(("seqlen_q", "few"), [(1, True), (1024, True), (1025, False)])
def test_few_queries_take_smaller_tiles(seqlen_q: int, few: bool) -> None:
    """With one level and a mask, up to head dim 64."""
    for (d, mask, one_level), has_row in {
        (64, "causal", True): True, (48, "causal", True): True, (80, "causal", True): False,
        (64, "full", True): False, (64, "causal", False): False,
    }.items():  # fmt: skip
        problem = replace(PROBLEM, head_dim=d, head_dim_v=d, mask=mask, one_level=one_level)  # type: ignore[arg-type]
        short = replace(problem, short=True)
        assert list(kernels.variants_by_length(problem)) == [problem, short][: 1 + has_row]
        call = call_of(
            seqlen_q=seqlen_q, head_dim=d, head_dim_v=d, causal_offset=0 if mask == "causal" else None,
            one_level=one_level,
        )  # fmt: skip
        assert call.problem == (short if few and has_row else problem)
        if has_row:
            assert (table_config(problem).block_m, table_config(short).block_m) == (192, 128)


def test_a_section_counts_bytes_of_bytes() -> None:
    """Twice as many heads of keys and values have room in the L2 as of 16-bit ones."""
    wide = replace(PROBLEM, input_dtype=None)
    for length in (1 << 12, 1 << 15):
        assert kernels.section_heads(PROBLEM, 1, length) == 2 * kernels.section_heads(wide, 1, length)


# --- configs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_level", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_every_head_dim_has_a_config_that_fits(mask: Any, one_level: bool) -> None:
    for d, dv in product(range(16, 257, 16), repeat=2):
        problem = replace(PROBLEM, head_dim=d, head_dim_v=dv, mask=mask, one_level=one_level)
        config = table_config(problem)
        assert config.reason and config.two_level is (dv <= MOST_TWO_LEVEL and not one_level)
        assert config.smem_bytes(problem) <= ARCHES["sm_90a"].smem_per_block
        for region in config.smem(problem):
            if region.name[0] in "kv" or re.fullmatch(r"q\d", region.name):
                # Its swizzle repeats every 8 rows: of 128 bytes, of Q and K perhaps of 64 or 32.
                span = 1024 if region.name[0] == "v" else 8 * driver.box_bytes(driver.BYTE, d)
                assert region.offset % span == region.size % span == 0
                assert region.name[0] != "q" or region.size % (1024 * config.consumers) == 0
            assert region.offset % 16 == 0


def test_both_ways_of_summing_have_the_same_head_dims() -> None:
    """So that a caller who asks for one level gets a row of the same head dims, up to those that have only that."""
    rows = {two_level: {(r.head_dim, r.head_dim_v, r.masks) for r in FORWARD if r.config.two_level is two_level}
            for two_level in (True, False)}  # fmt: skip
    assert {row for row in rows[False] if row[1] <= MOST_TWO_LEVEL} == rows[True]


def test_the_shared_memory_map() -> None:
    problem = replace(PROBLEM, head_dim=48, head_dim_v=80)
    config = replace(CONFIG, stages=3)
    sizes = {region.name: region.size for region in config.smem(problem)}
    assert list(sizes) == [
        "q0", "q1", "k0", "k1", "k2", "v0", "v1", "v2", "scales", "means", "rows", "work", "barriers",
    ]  # fmt: skip
    assert sizes["q0"] == 128 * 256 and sizes["k0"] == 128 * 64 and sizes["v0"] == 128 * 80
    assert (sizes["scales"], sizes["means"], sizes["rows"]) == (8 * 6, 8 * 80 * 4, 2 * 8 * 16)
    assert (sizes["work"], sizes["barriers"]) == (48, 8 * (6 + 12 + 12))
    from_registers = replace(config, tma_store=False, q_stages=1)
    assert from_registers.smem(problem)[0].size == 128 * 64
    assert sum(sizes.values()) == config.smem_bytes(problem)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_n": 64}, "block_n is 64; accepted is 128"),
        ({"block_m": 64}, "block_m is 64; accepted are 128 and 192"),
        ({"slack": 2}, "slack"),
        ({"ping_pong": False}, "ping_pong"),
        ({"exact": False}, "exact"),
        ({"q_registers": 1}, "q_registers"),
        ({"q_stages": 1}, "tma_store needs"),
        ({"stages": 1}, "stages is 1"),
    ],
)
def test_impossible_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


def test_registers_are_what_a_block_has() -> None:
    """At its start all threads have as many: 65536 shared evenly, in steps of 8; setmaxnreg only moves them."""
    for block_m, at_start in ((128, 168), (192, 128)):
        config = replace(CONFIG, block_m=block_m)
        taken = config.producer_registers + config.consumers * config.consumer_registers
        assert taken == (config.consumers + 1) * at_start


def test_labels_tell_configs_apart() -> None:
    changes: tuple[dict[str, Any], ...] = (
        {}, {"block_m": 192}, {"stages": 3}, {"q_stages": 3}, {"tma_store": False}, {"dynamic": True},
        {"two_level": False}, {"late_turn": True},
    )  # fmt: skip
    assert len({replace(CONFIG, **change).label for change in changes}) == len(changes)
    assert "in fp32" in CONFIG.summary and "by the tensor cores" in replace(CONFIG, two_level=False).summary


# --- text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "dv", "mask"), [(128, 128, "full"), (64, 64, "causal"), (256, 256, "causal"), (32, 144, "full")]
)
def test_the_text_states_its_problem_and_config(d: int, dv: int, mask: Any) -> None:
    problem = replace(PROBLEM, head_dim=d, head_dim_v=dv, mask=mask)
    config, source = table_config(problem), render(problem, table_config(problem))
    assert source.text.startswith(f"// {source.symbol}\n") and source.symbol.startswith("cuflash_fwd_fp8_sm90_")
    assert "e4m3 * e4m3 * e4m3 to bfloat16" in source.text
    constants = dict(re.findall(r"constexpr (?:int|bool) (k\w+) = (\w+);", source.text))
    expected = {
        "kHeadDim": d, "kHeadDimV": dv, "kBlockM": config.block_m, "kBlockN": 128, "kStages": config.stages,
        "kConsumers": config.consumers, "kQStages": config.q_stages, "kTmaStore": str(config.tma_store).lower(),
        "kDynamic": str(config.dynamic).lower(), "kTwoLevel": str(config.two_level).lower(),
        "kLateTurn": str(config.late_turn).lower(), "kProducerRegisters": config.producer_registers,
        "kConsumerRegisters": config.consumer_registers,
    }  # fmt: skip
    assert {name: str(value) for name, value in expected.items()}.items() <= constants.items()
    assert "m64n128k32.f32.e4m3.e4m3" in source.text and f"m64n{dv}k32.f32.e4m3.e4m3" in source.text
    assert "k16.f32" not in source.text


@pytest.mark.parametrize("formats", list(product(("e4m3", "e5m2"), repeat=3)), ids="".join)
def test_every_combination_of_formats_has_its_products(formats: tuple[str, str, str]) -> None:
    problem = of_formats(formats)
    assert problem.formats == formats
    source = render(problem, table_config(problem))
    products = re.findall(r"wgmma_(qk|pv)\(.*\n.*m64n128k32\.f32\.(\w+)\.(\w+) ", source.text)
    assert products == [("qk", formats[0], formats[1]), ("pv", "e4m3", formats[2])]
    plain = set(formats) == {"e4m3"}
    assert ("".join(formats) in source.symbol) is not plain


def of_formats(formats: tuple[str, str, str]) -> AttentionProblem:
    q, k, v = ("float8_e4m3fn" if each == "e4m3" else "float8_e5m2" for each in formats)
    return call_of(dtypes=(q, k, v), head_dim=128, head_dim_v=128).problem


def test_the_command_that_reproduces_a_kernel_names_its_inputs() -> None:
    command = dump_command(replace(PROBLEM, one_level=True), table_config(replace(PROBLEM, one_level=True)))
    assert "--input-dtype float8_e4m3fn" in command and "--one-level" in command and "--config" not in command
    problem = replace(of_formats(("e4m3", "e5m2", "e5m2")), mask="full")
    parser = argparse.ArgumentParser()
    add_problem_options(parser)
    words = dump_command(problem, table_config(problem)).split()[2:]
    at = words.index("--arch")
    assert problem_from(parser.parse_args(words[:at] + words[at + 2 :]), "sm_90a") == problem


def test_the_hand_overs_are_those_of_the_other_hopper_kernel() -> None:
    """Which a model plays through (test_hopper_protocol): all that is said of it here holds for both texts."""
    found = hand_overs(render(PROBLEM, table_config(PROBLEM)).text)
    expected = MODELLED | {
        # The steps' loads are a function of their own, and the two operands come in different ways.
        "KeyValueLoader.run": "publish let_queries_pass advance publish",
        "KeyValueLoader.load_tile": "wait:k_empty arrive:k_full tma_load wait:v_empty arrive:v_full",
        # P V is waited for before the exponentials, and a turn may end with the row maxima.
        "Consumer.multiply_qk": "wait:k_full take_turn wgmma_commit",
        "Consumer.multiply_both": "multiply_qk multiply_pv pass_turn",
        "Consumer.first_step": "skip_steps receive_queries multiply_qk pass_turn wgmma_wait<0> arrive:k_empty"
        " release_queries advance",
        "Consumer.step": "multiply_both advance wgmma_wait<1> release_queries pass_turn finish_products",
        "Consumer.boundary_step": "advance skip_steps receive_queries multiply_both advance wgmma_wait<1>"
        " release_queries pass_turn finish_products epilogue",
    }
    # Q is never in registers, so that a buffer is either O's as well or let in for the next Q at the last product.
    del expected["KeyValueLoader.load"], expected["Consumer.let_next_queries_in"]
    expected["Consumer.last_step"] = "take_turn multiply_pv pass_turn wgmma_wait<0> arrive:v_empty epilogue"
    assert found == expected


# --- plans -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_gpu.FakeGpu:
    return fake_gpu.install(monkeypatch, execute=False, multiprocessors=132)


def launched(gpu: fake_gpu.FakeGpu, call: Fp8Call) -> fake_gpu.Launch:
    make_plan(call, 0).launch(0x10000, 0x20000, ADDRESSES, 77)
    return gpu.launches[-1]


def test_a_plan_launches_what_the_call_says(gpu: fake_gpu.FakeGpu) -> None:
    call = call_of()
    launch = launched(gpu, call)
    config, values = launch.loaded.config, launch.params
    assert isinstance(config, Fp8Sm90Config) and launch.stream == 77
    tiles = 2 * 8 * -(-1000 // config.block_m)
    assert launch.grid == (min(132, tiles), 1, 1) and launch.block == (config.threads, 1, 1)
    assert_said(values)
    assert (values["tile_counter"], values["tiles"]) == (0, tiles)
    q, k, out = (values[f"{name}_map"] for name in ("q", "k", "out"))
    assert q == (0x10000, "uint8", (64, 1000, 8, 2), (512, 64, 512000), 64)
    assert k == (0x20000, "uint8", (64, 777, 2, 2), (128, 64, 128 * 777), 128)
    assert out == (ADDRESSES.out, "bfloat16", (80, 1000, 8, 2), (1280, 160, 1280000), 64)


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({"causal_offset": None}, lambda p: p.mask == "full"),
        ({"causal_offset": 0}, lambda p: p.mask == "causal"),
        ({"scale": -0.125}, lambda p: p.scale_first),
        ({"scale": 0.0}, lambda p: p.scale_first),
        ({}, lambda p: not p.scale_first and p.arch == "sm_90a" and p.input_dtype == "float8_e4m3fn"),
        ({"out_dtype": "float16"}, lambda p: p.dtype == "float16"),
    ],
)
def test_the_kernel_of_a_call(changes: dict[str, Any], holds: Callable[[AttentionProblem], bool]) -> None:
    assert holds(call_of(**changes).problem)


def test_a_plan_takes_other_addresses(gpu: fake_gpu.FakeGpu) -> None:
    plan = make_plan(call_of(), 0)
    for base in (1 << 20, 1 << 21):
        plan.launch(base, 2 * base, ADDRESSES._replace(out=3 * base, v_mean=0), 0)
        values = gpu.launches[-1].params
        assert (values["q_map"].address, values["k_map"].address, values["out_map"].address) == (
            base,
            2 * base,
            3 * base,
        )
        assert (values["out"], values["v_mean"]) == (3 * base, 0)


def test_each_address_is_that_of_the_call(gpu: fake_gpu.FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a launch of the same plan that differs in one alone; the counter and the stream too."""
    from cuflash import counters

    plan, number = make_plan(call_of(causal_offset=0), 0), 512
    monkeypatch.setattr(counters, "take", lambda device, stream: number)
    plan.launch(1 << 20, 1 << 21, ADDRESSES, 0)
    first = gpu.launches[-1].params
    changes: list[tuple[str, int, int, Any]] = [("q", 1 << 22, 1 << 21, ADDRESSES), ("k", 1 << 20, 1 << 22, ADDRESSES)]
    changes += [(name, 1 << 20, 1 << 21, ADDRESSES._replace(**{name: 1 << 22})) for name in ADDRESSES._fields]
    for name, q, k, addresses in changes:
        plan.launch(q, k, addresses, 5)
        params = gpu.launches[-1].params
        changed = {key for key in params if params[key] != first[key]}
        assert {key.removesuffix("_map") for key in changed} == {name} and params[name] == 1 << 22
        assert gpu.launches[-1].stream == 5
    number = 1024
    plan.launch(1 << 20, 1 << 21, ADDRESSES, 0)
    assert gpu.launches[-1].params == first | {"tile_counter": 1024} != first


def test_a_kernel_that_counts_gets_a_counter(gpu: fake_gpu.FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuflash import counters

    monkeypatch.setattr(counters, "take", lambda device, stream: 0xABC0 if (device, stream) == (0, 77) else 0)
    assert launched(gpu, call_of()).params["tile_counter"] == 0xABC0
    assert launched(gpu, call_of(causal_offset=None)).params["tile_counter"] == 0
