"""Wheel, sdist and editable install: built, installed into fresh environments, and used from outside the repository."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="needs the extra 'test': hatchling")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "-q")

USE = """
import json, sys
import numpy as np
import cuflash
from cuflash import kernels, render
from cuflash.problem import AttentionProblem

q, k, v = (np.random.default_rng(i).standard_normal((1, 40, 2, 16), dtype=np.float32) for i in range(3))
out = cuflash.attention(q, k, v, causal=True)
scores = np.einsum("bqhd,bkhd->bhqk", q, k) / 4
scores[..., np.triu(np.ones((40, 40), bool), 1)] = -np.inf
weights = np.exp(scores)
right = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
problem = AttentionProblem(64, 64, "bfloat16", "causal", 16, False, "sm_90")
source = render.render(problem, kernels.select_config(problem))
print(json.dumps({
    "package": cuflash.__file__, "version": cuflash.__version__, "templates": str(render.template_root()),
    "digest": render.template_digest(), "error": float(abs(out - right).max()), "kernel": source.symbol in source.text,
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(source: Path, into: Path) -> Path:
    run(sys.executable, *PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", into, source, cwd=into)
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The interpreter of a fresh environment with the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    python = folder / "bin" / "python"
    run(python, *PIP, "install", wheel, cwd=folder)
    return python


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def check_use(python: Path, cwd: Path) -> dict[str, str]:
    """A script, the console command and the module, all from outside the repository."""
    report: dict[str, str] = json.loads(run(python, "-c", USE, cwd=cwd))
    assert float(report["error"]) < 1e-5 and report["kernel"]
    for command in ((python.parent / "cuflash",), (python, "-m", "cuflash")):
        assert report["version"] in run(*command, "--version", cwd=cwd)
    return report


def test_wheel_holds_the_package_and_the_templates_and_nothing_else(wheel: Path) -> None:
    held = contents(wheel)
    expected = {f"cuflash/{name}": data for name, data in files_below(ROOT / "cuflash").items()}
    expected |= {f"cuflash/templates/{name}": data for name, data in files_below(ROOT / "templates").items()}
    assert "cuflash/py.typed" in expected
    assert {name: data for name, data in held.items() if ".dist-info/" not in name} == expected


def test_metadata(wheel: Path) -> None:
    """The extras that the documentation names, a licence and a console command; no GPU library without an extra."""
    held = contents(wheel)
    texts = {name.rpartition("/")[2]: data.decode() for name, data in held.items() if ".dist-info/" in name}
    metadata = Parser().parsestr(texts["METADATA"])
    assert set(metadata.get_all("Provides-Extra", [])) == {"cuda12", "cuda13", "test", "bench"}
    plain = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {line.split(">")[0] for line in plain} == {"numpy", "jinja2", "ml-dtypes"}
    assert metadata["License-Expression"] == "BSD-3-Clause" and "LICENSE" in texts
    assert "cuflash = cuflash.__main__:main" in texts["entry_points.txt"]


def test_sdist_gives_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        roots = {name.split("/")[1] for name in archive.getnames()}
    assert {"cuflash", "templates", "tests", "README.md", "LICENSE", "pyproject.toml"} <= roots
    assert not any(root.startswith(".") for root in roots - {".gitignore"})
    assert contents(build_wheel(sdist, tmp_path)) == contents(wheel)


def test_wheel_in_a_fresh_environment(python: Path, tmp_path: Path) -> None:
    from cuflash.render import template_digest

    report = check_use(python, tmp_path)
    environment = str(python.parents[1])
    assert report["package"].startswith(environment) and report["templates"].startswith(environment)
    assert report["digest"] == template_digest(), "a wheel and a checkout must find each other's kernels in a cache"


def test_editable_install(python: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    editable = tmp_path / "env" / "bin" / "python"
    pip = (sys.executable, *PIP, "--python", editable)
    run(*pip, "install", "--no-deps", "-e", ROOT, cwd=tmp_path)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (installed,) = python.parents[1].glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{installed}\n")  # comes after the editable's own
    report = check_use(editable, tmp_path)
    assert report["package"] == str(ROOT / "cuflash" / "__init__.py") and report["templates"] == str(ROOT / "templates")
