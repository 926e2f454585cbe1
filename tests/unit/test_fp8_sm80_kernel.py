"""The Ampere-style kernels for 8-bit inputs: configs, source text and launch plans. Nothing runs here."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from cuflash import kernels
from cuflash.arch import ARCHES
from cuflash.arch.fp8_sm80 import FORWARD
from cuflash.fp8_plan import make_plan
from cuflash.fp8_sm80_config import Fp8Sm80Config
from cuflash.problem import INPUT_DTYPES, MASKS, AttentionProblem, InputDtype
from cuflash.render import dump_command, render
from tests.unit import fake_gpu, fp8_calls
from tests.unit.fp8_calls import ADDRESSES, assert_said

TARGETS = tuple(arch for arch in ARCHES if arch != "sm_90a")
PROBLEM = AttentionProblem(128, 128, "bfloat16", "causal", 16, False, "sm_89", input_dtype="float8_e4m3fn")
CONFIG = Fp8Sm80Config(block_m=128, block_n=64, warps=4, q_registers=0, ctas=1, converted=False, two_level=True)


def table_config(problem: AttentionProblem) -> Fp8Sm80Config:
    config = kernels.select_config(problem)
    assert isinstance(config, Fp8Sm80Config)
    return config


# --- configs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", TARGETS)
def test_every_head_dim_has_a_config_that_fits(arch: str) -> None:
    limits = ARCHES[arch]
    for d, dv, mask in product(range(16, 257, 16), range(16, 257, 16), MASKS):
        problem = replace(PROBLEM, head_dim=d, head_dim_v=dv, mask=mask, arch=arch)
        config = table_config(problem)
        assert config.reason
        assert config.smem_bytes(problem) <= limits.smem_per_block
        assert (config.smem_bytes(problem) + 1024) * config.ctas <= limits.smem_per_sm
        for region in config.smem(problem):  # swizzles are functions of the address
            assert region.offset % 128 == region.size % 128 == 0, region


@pytest.mark.parametrize("arch", TARGETS)
def test_codes_are_multiplied_where_the_hardware_does_so(arch: str) -> None:
    """And summed in fp32 there; elsewhere ptxas would convert each fragment again in each warp that reads it."""
    for d in (64, 128, 256):
        config = table_config(replace(PROBLEM, head_dim=d, head_dim_v=d, arch=arch))
        assert config.converted is not ARCHES[arch].multiplies_float8
        assert config.two_level is ARCHES[arch].multiplies_float8
    assert [name for name, each in ARCHES.items() if each.multiplies_float8] == ["sm_89", "sm_120"]


def test_the_caller_may_leave_the_sum_to_the_tensor_cores() -> None:
    for row in FORWARD:
        problem = replace(PROBLEM, head_dim=row.head_dim, head_dim_v=row.head_dim, arch=row.arches[0])
        assert not table_config(replace(problem, one_level=True)).two_level


def test_the_shared_memory_map() -> None:
    problem = replace(PROBLEM, head_dim=144, head_dim_v=80)
    codes = {region.name: region.size for region in replace(CONFIG, stages=3).smem(problem)}
    tile = {"k": 64 * 256, "v": 64 * 80}
    assert codes == {"q_and_out": 128 * 256} | {f"{name}{i}": tile[name] for i in range(3) for name in "kv"}
    halves = {region.name: region.size for region in replace(CONFIG, converted=True).smem(problem)}
    assert halves == {
        "q_and_out": 128 * 384, "k0": tile["k"], "v0": tile["v"], "k_fp16": 64 * 384, "v_fp16": 2 * tile["v"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_n": 48}, "block_n is 48; accepted are 32, 64, 128"),
        ({"block_m": 256}, "block_m is 256; accepted are 64, 128"),
        ({"slack": 2}, "slack is 2; accepted is 0"),
    ],
)
def test_impossible_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


def test_labels_tell_configs_apart() -> None:
    changes: tuple[dict[str, Any], ...] = (
        {}, {"block_m": 64}, {"block_n": 32}, {"warps": 8}, {"stages": 3}, {"q_registers": 2}, {"ctas": 2},
        {"converted": True}, {"two_level": False},
    )  # fmt: skip
    assert len({replace(CONFIG, **change).label for change in changes}) == len(changes)
    assert "on codes, O summed in fp32" in CONFIG.summary
    assert "to fp16, O summed by the tensor cores" in replace(CONFIG, converted=True, two_level=False).summary


# --- text ------------------------------------------------------------------------------------------------------


FP16 = ("Fp16Product", "Fp16Product")
OPERANDS = {
    "sm_80": ("Fp16Operand<false, kE5m2>", *FP16),
    "sm_86": ("Fp16Operand<false, kE5m2>", *FP16),
    "sm_89": ("CodeOperand", "CodeProduct<kE5m2Q, kE5m2K>", "CodeProduct<false, kE5m2V>"),
    "sm_90": ("Fp16Operand<true, kE5m2>", *FP16),
    "sm_100": ("Fp16Operand<true, kE5m2>", *FP16),
    "sm_120": ("CodeOperand", "CodeProduct<kE5m2Q, kE5m2K>", "CodeProduct<false, kE5m2V>"),
}
"""What operands, Q K^T and P V are."""


@pytest.mark.parametrize("arch", OPERANDS)
@pytest.mark.parametrize(("d", "dv", "mask"), [(128, 128, "full"), (256, 256, "causal"), (48, 112, "causal")])
def test_the_text_states_its_problem_and_config(arch: str, d: int, dv: int, mask: Any) -> None:
    problem = replace(PROBLEM, head_dim=d, head_dim_v=dv, mask=mask, arch=arch)
    config, source = table_config(problem), render(problem, table_config(problem))
    assert source.text.startswith(f"// {source.symbol}\n") and source.symbol.startswith("cuflash_fwd_fp8_sm80_")
    assert "e4m3 * e4m3 * e4m3 to bfloat16" in source.text
    constants = dict(re.findall(r"constexpr (?:int|bool) (k\w+) = (\w+);", source.text))
    expected = {
        "kHeadDim": d, "kHeadDimV": dv, "kBlockM": config.block_m, "kBlockN": config.block_n, "kStages": config.stages,
        "kWarps": config.warps, "kQRegisters": config.q_registers, "kCtas": config.ctas,
        "kConverted": str(config.converted).lower(), "kTwoLevel": str(config.two_level).lower(),
    }  # fmt: skip
    assert {name: str(value) for name, value in expected.items()}.items() <= constants.items()
    for name, text in zip(("Operand", "ProductQk", "ProductPv"), OPERANDS[arch], strict=True):
        assert f"using {name} = {text};" in source.text
    command = dump_command(problem, config)
    assert "--input-dtype float8_e4m3fn" in command and f"--arch {arch}" in command and "--config" not in command
    assert "two_level=False" in dump_command(problem, replace(config, two_level=False)) or not config.two_level


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("forms", list(product(INPUT_DTYPES, repeat=3)), ids="-".join)
def test_every_combination_of_formats_has_its_text(arch: str, forms: tuple[InputDtype, InputDtype, InputDtype]) -> None:
    problem = call_of(arch=arch, dtypes=forms).problem
    config, source = table_config(problem), render(problem, table_config(problem))
    names = tuple(form[7:11] for form in forms)
    assert problem.formats == names and f"{' * '.join(names)} to bfloat16" in source.text
    flags = dict(re.findall(r"\b(kE5m2[QKV]) = (\w+)", source.text))
    assert flags == {f"kE5m2{role}": str(name == "e5m2").lower() for role, name in zip("QKV", names, strict=True)}
    assert ("".join(names) in source.symbol) is (set(names) != {"e4m3"})
    assert config == table_config(call_of(arch=arch).problem)


# --- selection and plans ---------------------------------------------------------------------------------------


def test_a_family_can_be_asked_for() -> None:
    assert kernels.fp8_target("sm_90") == "sm_90a" and kernels.fp8_target("sm_100") == "sm_100"
    with kernels.use_family("forward_fp8_sm80"):
        assert kernels.fp8_target("sm_90") == "sm_90"
    with kernels.use_family("forward_sm80"):  # of calls on 16 bits
        assert kernels.fp8_target("sm_90") == "sm_90a"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_gpu.FakeGpu:
    return fake_gpu.install(monkeypatch, execute=False, multiprocessors=142, capability=(8, 9))


call_of = partial(fp8_calls.call_of, arch="sm_89")


def test_a_plan_launches_what_the_call_says(gpu: fake_gpu.FakeGpu) -> None:
    make_plan(call_of(), 0).launch(0x10000, 0x20000, ADDRESSES, 77)
    (launch,) = gpu.launches
    config, values = launch.loaded.config, launch.params
    assert isinstance(config, Fp8Sm80Config) and launch.stream == 77 and launch.loaded.problem.arch == "sm_89"
    m_tiles = -(-1000 // config.block_m)
    assert launch.grid == (16, m_tiles, 1) and launch.block == (config.threads, 1, 1)
    assert launch.smem_bytes == config.smem_bytes(launch.loaded.problem)
    assert_said(values)
    assert (values["q"], values["k"]) == (0x10000, 0x20000)
    assert (values["m_tiles"], values["first_tile"]) == (m_tiles, 0)
    strides = {name: [values[f"{name}_{axis}_stride"] for axis in ("batch", "seq", "head")] for name in ("q", "k")}
    assert strides == {"q": [512000, 512, 64], "k": [128 * 777, 128, 64]}


def test_a_long_call_is_several_launches(gpu: fake_gpu.FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_GRID_YZ", 3)
    make_plan(call_of(), 0).launch(0x10000, 0x20000, ADDRESSES, 0)
    config = gpu.launches[0].loaded.config
    assert isinstance(config, Fp8Sm80Config)
    m_tiles = -(-1000 // config.block_m)
    assert [launch.params["first_tile"] for launch in gpu.launches] == list(range(0, m_tiles, 3))
    assert sum(launch.grid[1] for launch in gpu.launches) == m_tiles
