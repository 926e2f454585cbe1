"""Rendering: delimiters, strictness, determinism, UTF-8, what the text says, and the digest of the templates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash import kernels, params, render
from cuflash.problem import AttentionProblem

PROBLEM = AttentionProblem(128, 128, "bfloat16", "causal", 16, False, "sm_80")
NEIGHBOURS = [
    replace(PROBLEM, **change)
    for change in (
        {},
        {"head_dim": 64},
        {"head_dim_v": 64},
        {"dtype": "float16"},
        {"mask": "full"},
        {"access_bytes": 2},
        {"scale_first": True},
        {"arch": "sm_86"},
    )
]
HOPPER = replace(PROBLEM, arch="sm_90a")
HOPPER_NEIGHBOURS = [
    replace(HOPPER, **change)
    for change in (
        {},
        {"head_dim": 64},
        {"head_dim_v": 64},
        {"head_dim": 256},
        {"dtype": "float16"},
        {"mask": "full"},
        {"scale_first": True},
        {"head_dim": 64, "head_dim_v": 64},
        {"head_dim": 64, "head_dim_v": 64, "short": True},
    )
]
FP8_NEIGHBOURS = [
    replace(HOPPER, **{"input_dtype": "float8_e4m3fn"} | change)
    for change in (
        {},
        {"head_dim": 64},
        {"head_dim_v": 256},
        {"dtype": "float16"},
        {"mask": "full"},
        {"scale_first": True},
        {"one_level": True},
        {"input_dtype": "float8_e5m2"},
        {"k_dtype": "float8_e5m2"},
        {"v_dtype": "float8_e5m2"},
    )
]


def rendered(problem=PROBLEM):
    return render.render(problem, kernels.select_config(problem))


@pytest.fixture
def templates(tmp_path, monkeypatch):
    """A template tree of the test's own; call it to write files."""
    root = tmp_path / "templates"
    (root / "device").mkdir(parents=True)
    monkeypatch.setattr(render, "template_root", lambda: root)

    def write(**files):
        for name, text in files.items():
            (root / name.replace("__", "/").replace("_DOT_", ".")).write_bytes(text.encode())
        for cached in (render._tree, render.template_digest, render._headers, render._environment):
            cached.cache_clear()

    write()
    yield write
    monkeypatch.undo()
    for cached in (render._tree, render.template_digest, render._headers, render._environment):
        cached.cache_clear()


@pytest.fixture
def tiny_family(monkeypatch):
    """A family whose template is ``tiny.j2`` and whose block has one field."""
    block = params.ParameterBlock((params.Field("out", params.POINTER, "where"), params.Field("n", params.I32, "")))
    family = kernels.FAMILIES["forward_sm80"]._replace(template="tiny.j2", params=block)
    monkeypatch.setitem(kernels.FAMILIES, "forward_sm80", family)


# --- the language ----------------------------------------------------------------------------------------------


def test_cuda_and_ptx_are_no_template_syntax(templates, tiny_family):
    text = 'int a[2][1] = {{1}, {2}}; // {# {% {{ # ## %}\nasm("{mov.b32 {%0, %1}, %%laneid;}" :: "r"(a));\n'
    templates(tiny_DOT_j2=text)
    assert rendered().text == text


def test_delimiters(templates, tiny_family):
    templates(
        tiny_DOT_j2=(
            "/*# for template authors #*/\n"
            "${problem.head_dim} ${symbol} ${ {'a': {'b': 7}}['a']['b'] }\n"
            "//% for field in params.placed\n"
            "  //% if field.offset == 8\n"
            "${field.name}@${field.offset}\n"
            "  //% endif\n"
            "//% endfor\n"
            "x/*% if config.stages %*/y/*% endif %*/z\n"
            '//% include "device/part.j2"\n'
        ),
        device__part_DOT_j2="included ${config.warps}\n",
    )
    config = kernels.select_config(PROBLEM)
    expected = f"128 {kernels.symbol(PROBLEM, config)} 7\nn@8\nxyz\nincluded {config.warps}\n"
    assert rendered().text == expected


@pytest.mark.parametrize("hole", ["${nothing}", "${problem.nothing}", "${config.smem_bytes}${problem.head_dims}"])
def test_an_unknown_name_is_an_error(templates, tiny_family, hole):
    templates(tiny_DOT_j2=hole)
    with pytest.raises(jinja2.UndefinedError):
        rendered()


# --- the kernels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", NEIGHBOURS, ids=lambda p: "-".join(map(str, asdict(p).values())))
def test_the_text_states_its_problem_and_config(problem):
    config, source = kernels.select_config(problem), rendered(problem)
    assert source.text.startswith(f"// {source.symbol}\n")
    banner = source.text[: source.text.index("constexpr")]
    for shown in (problem.dtype, problem.arch, f"{problem.mask} mask", f"{config.smem_bytes(problem)} bytes"):
        assert shown in banner
    for region in config.smem(problem):
        assert re.search(rf"{region.offset} \.\. +{region.offset + region.size}  {region.name}\n", banner)
    assert f"cuflash dump --head-dim {problem.head_dim} " in banner
    constants = dict(re.findall(r"constexpr (?:int|bool) (k\w+) = (\w+);", source.text))
    expected = {
        "kHeadDim": str(problem.head_dim),
        "kHeadDimV": str(problem.head_dim_v),
        "kBlockM": str(config.block_m),
        "kBlockN": str(config.block_n),
        "kWarps": str(config.warps),
        "kStages": str(config.stages),
        "kQRegisters": str(config.q_registers),
        "kCtas": str(config.ctas),
        "kAccessBytes": str(problem.access_bytes),
        "kScaleFirst": str(problem.scale_first).lower(),
        "kBf16": str(problem.dtype == "bfloat16").lower(),
    }
    assert expected.items() <= constants.items()
    assert source.text.count(f" {source.symbol}(") == 1


@pytest.mark.parametrize("problem", HOPPER_NEIGHBOURS, ids=lambda p: "-".join(map(str, asdict(p).values())))
def test_the_text_of_a_hopper_kernel_states_its_problem_and_config(problem):
    config, source = kernels.select_config(problem), rendered(problem)
    assert source.text.startswith(f"// {source.symbol}\n") and source.symbol.startswith("cuflash_fwd_sm90_")
    assert source.options[0] == "-arch=sm_90a"
    banner = source.text[: source.text.index("constexpr")]
    for region in config.smem(problem):
        assert re.search(rf"{region.offset} \.\. +{region.offset + region.size}  {region.name}\n", banner)
    constants = dict(re.findall(r"constexpr (?:int|bool|float) (k\w+) = (\w+);", source.text))
    expected = {
        "kHeadDim": problem.head_dim,
        "kHeadDimV": problem.head_dim_v,
        "kBlockM": config.block_m,
        "kBlockN": config.block_n,
        "kStages": config.stages,
        "kSlack": config.slack,
        "kScaleFirst": str(problem.scale_first).lower(),
        "kBf16": str(problem.dtype == "bfloat16").lower(),
        "kConsumers": config.consumers,
        "kQStages": config.q_stages,
        "kPingPong": str(config.ping_pong).lower(),
        "kTmaStore": str(config.tma_store).lower(),
        "kDynamic": str(config.dynamic).lower(),
        "kExact": str(config.exact).lower(),
        "kProducerRegisters": config.producer_registers,
        "kConsumerRegisters": config.consumer_registers,
    }
    assert {name: str(value) for name, value in expected.items()}.items() <= constants.items()
    assert source.text.count(f" {source.symbol}(") == 1


@pytest.mark.parametrize("neighbours", [NEIGHBOURS, HOPPER_NEIGHBOURS, FP8_NEIGHBOURS], ids=["sm_80", "sm_90", "fp8"])
def test_every_field_of_a_problem_changes_what_is_compiled(neighbours):
    sources = [rendered(problem) for problem in neighbours]
    for one, other in combinations(sources, 2):
        assert (one.text, one.options) != (other.text, other.options)


@pytest.mark.parametrize("problem", [PROBLEM, HOPPER], ids=["sm_80", "sm_90"])
def test_sources_are_hermetic(problem):
    source = rendered(problem)
    texts = {source.program_name: source.text, **source.headers}
    included = {name for text in texts.values() for name in re.findall(r"#include\s+(\S+)", text)}
    # B-133, B-134: no header of a toolkit, so none can be missing or of another version.
    assert {name.strip('"') for name in included} <= source.headers.keys()
    assert all(name.startswith('"') for name in included)
    for text in texts.values():
        assert not re.search(r"\$\{|^\s*//%|/\*[%#]", text, re.MULTILINE)


def test_options():
    source = render.render(PROBLEM, kernels.select_config(PROBLEM))
    assert source.options == ("-arch=sm_80", "-std=c++17", "-default-device", "--ptxas-options=-v")
    lines = render.render(PROBLEM, kernels.select_config(PROBLEM), lineinfo=True)
    assert lines.options == (*source.options, "-lineinfo")
    assert lines.text == source.text
    assert source.program_name == f"/cuflash/{source.symbol}.cu"


def test_the_reason_of_a_config_is_not_in_the_text():
    config = kernels.select_config(PROBLEM)
    assert render.render(PROBLEM, config) == render.render(PROBLEM, replace(config, reason="another"))


dims = st.integers(1, 256)
problems = st.builds(
    AttentionProblem,
    dims,
    dims,
    st.sampled_from(["float16", "bfloat16"]),
    st.sampled_from(["full", "causal"]),
    st.sampled_from([16, 8, 4, 2]),
    st.booleans(),
    st.sampled_from(["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]),
)


multiples_of_8 = st.integers(1, 32).map(lambda i: 8 * i)
hopper_problems = st.builds(
    AttentionProblem,
    multiples_of_8,
    multiples_of_8,
    st.sampled_from(["float16", "bfloat16"]),
    st.sampled_from(["full", "causal"]),
    st.just(16),
    st.booleans(),
    st.just("sm_90a"),
)


@given(problems | hopper_problems)
def test_every_problem_renders_and_tells_the_same_twice(problem):
    source = rendered(problem)
    assert source == rendered(problem)
    assert re.fullmatch(r"[a-z][a-z0-9_]+", source.symbol)


def test_text_does_not_depend_on_the_locale(tmp_path):
    """Non-ASCII characters in a template survive LC_ALL=C without Python's UTF-8 mode."""
    root = tmp_path / "templates"
    (root / "device").mkdir(parents=True)
    (root / "forward_sm80.cu.j2").write_bytes("// ö ≤ 1 ≠ ${symbol}\n".encode())
    (root / "device" / "a.cuh").write_bytes("// é\n".encode())
    script = (
        "import sys; from pathlib import Path; from cuflash import kernels, render\n"
        "render.template_root = lambda: Path(sys.argv[1])\n"
        "from cuflash.problem import AttentionProblem as P\n"
        "p = P(64, 64, 'float16', 'full', 16, False, 'sm_80'); s = render.render(p, kernels.select_config(p))\n"
        "assert s.text == f'// \\u00f6 \\u2264 1 \\u2260 {s.symbol}\\n', ascii(s.text)\n"
        "assert s.headers == {'device/a.cuh': '// \\u00e9\\n'}, ascii(s.headers)\n"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    checkout = Path(render.__file__).parents[1]
    subprocess.run([sys.executable, "-c", script, str(root)], env=environment, cwd=checkout, check=True)


# --- the tree --------------------------------------------------------------------------------------------------


def test_the_digest_follows_names_and_bytes_and_nothing_else(templates, tmp_path):
    seen = []

    def digest(**files):
        templates(**files)
        seen.append(render.template_digest())
        return seen[-1]

    first = digest(a_DOT_j2="x", device__b_DOT_cuh="y")
    assert digest(a_DOT_j2="x") == first
    assert digest(notes_DOT_txt="editors leave files") == first
    root = tmp_path / "templates"
    os.utime(root / "a.j2", (1, 1))  # B-124: another date is not another content
    assert digest() == first
    assert digest(device__b_DOT_cuh="z") != first
    (root / "a.j2").rename(root / "c.j2")
    assert digest() not in seen[:-1]
    # Where one file ends and the next begins counts: these two trees are one text.
    (root / "c.j2").unlink()
    (root / "device" / "b.cuh").unlink()
    assert digest(a_DOT_j2="x", b_DOT_j2="y") != first
    (root / "b.j2").unlink()
    assert digest(a_DOT_j2="xb.j2y") != seen[-2]


def test_an_edit_while_a_process_runs_reaches_neither_digest_nor_text(templates, tiny_family, tmp_path):
    """Otherwise a kernel could be published under the digest of another text."""
    templates(tiny_DOT_j2="before\n")
    digest = render.template_digest()
    (tmp_path / "templates" / "tiny.j2").write_text("after\n")
    assert (rendered().text, render.template_digest()) == ("before\n", digest)
    templates()
    assert rendered().text == "after\n"
    assert render.template_digest() != digest


def test_wheel_and_checkout_layouts(tmp_path, monkeypatch):
    package = tmp_path / "site" / "cuflash"
    package.mkdir(parents=True)
    monkeypatch.setattr(render, "__file__", str(package / "render.py"))
    with pytest.raises(FileNotFoundError, match="reinstall cuflash"):
        render.template_root()
    (tmp_path / "site" / "templates" / "device").mkdir(parents=True)
    assert render.template_root() == tmp_path / "site" / "templates"
    (package / "templates" / "device").mkdir(parents=True)
    assert render.template_root() == package / "templates"


# --- single lanes ----------------------------------------------------------------------------------------------

ONE_LANE = re.compile(r"if (?:constexpr )?\((?=[^{};]*(?:\blane == 0|% 32 == 0|\belected))")
MEETS_OTHERS = re.compile(
    r"\b(?:warp_uniform|warp_sync|warp_any|shuffle_\w+|KeyTile|work_tile_of|named_barrier_\w+|wgmma_\w+"
    r"|(?:ld|st)matrix_\w+|cta_sync\w*|cluster_sync)\b *[({ ]"
)
"""What all lanes of a warp execute together; a tile of keys is found with a shuffle, where turns are shifted."""


def single_lane_statements(text: str) -> Iterator[str]:
    """What stands behind each condition that chooses one lane of a warp."""
    text = re.sub(r"//.*", "", text)
    for found in ONE_LANE.finditer(text):
        depth, condition, start = 0, True, 0
        for i in range(found.end() - 1, len(text)):
            depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(text[i], 0)
            if depth == 0 and condition:
                condition, start = False, i + 1
            elif depth == 0 and text[i] in ";}":
                yield text[start : i + 1]
                break


def test_no_lane_waits_alone_for_the_others() -> None:
    """A shuffle among all lanes that one lane executes hung the gradients of wide heads, in the deterministic mode."""
    files = [path for path in render.template_root().rglob("*") if path.suffix in (".j2", ".cuh")]
    statements = [(path.name, one) for path in files for one in single_lane_statements(path.read_text())]
    assert len(statements) > 50
    assert not [(name, one) for name, one in statements if MEETS_OTHERS.search(one)]
    hangs = "if (thread_index() % 32 == 0) {\n    if (p.dq != nullptr) add(KeyTile(p, number).head);\n}\nwarp_sync();"
    (one,) = single_lane_statements(hangs)
    assert MEETS_OTHERS.search(one) and "warp_sync" not in one
