"""The environment switches: defaults, every spelling, refusals by name, and that no other module reads them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cuflash.settings
from cuflash.settings import read_settings

SWITCHES = ("CACHE_DIR", "CACHE_SIZE", "PREBUILT_DIR", "DISABLE_JIT", "LINEINFO")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch, tmp_path):
    for name in SWITCHES:
        monkeypatch.delenv(f"CUFLASH_{name}", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_defaults(tmp_path):
    settings = read_settings()
    assert settings.cache_dir == tmp_path / ".cache" / "cuflash"
    assert settings.cache_bytes == 2**30
    assert settings.prebuilt_dir is None
    assert settings.jit
    assert not settings.lineinfo


def test_the_cache_directory_by_name_then_xdg_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert read_settings().cache_dir == tmp_path / "xdg" / "cuflash"
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "named"))
    assert read_settings().cache_dir == tmp_path / "named"
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "~/of_home")
    assert read_settings().cache_dir == tmp_path / "of_home"


def test_a_relative_xdg_directory_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert read_settings().cache_dir == tmp_path / ".cache" / "cuflash"


def test_directories_do_not_depend_on_later_changes_of_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "kernels")
    monkeypatch.setenv("CUFLASH_PREBUILT_DIR", "prebuilt")
    settings = read_settings()
    assert (settings.cache_dir, settings.prebuilt_dir) == (tmp_path / "kernels", tmp_path / "prebuilt")


def test_no_home_means_no_cache(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cuflash.settings.Path, "home", homeless)
    assert read_settings().cache_dir is None


@pytest.mark.parametrize("name", ["CUFLASH_CACHE_DIR", "CUFLASH_PREBUILT_DIR"])
def test_the_home_of_nobody_is_refused_by_name(monkeypatch, name):
    monkeypatch.setenv(name, "~nobody-of-this-name/kernels")
    with pytest.raises(ValueError, match=f"{name} is '~nobody-of-this-name/kernels'.* no such home"):
        read_settings()


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1", 1), ("12345", 12345), ("3k", 3 << 10), ("512M", 512 << 20), ("2G", 2 << 30), (" 7K ", 7 << 10)],
)
def test_cache_sizes(monkeypatch, text, size):
    monkeypatch.setenv("CUFLASH_CACHE_SIZE", text)
    assert read_settings().cache_bytes == size


@pytest.mark.parametrize("text", ["-1", "1.5G", "lots", "K", "1T", "10MB", "0x10", "1_000", "٣"])
def test_a_cache_size_that_is_none_is_refused_by_name(monkeypatch, text):
    monkeypatch.setenv("CUFLASH_CACHE_SIZE", text)
    with pytest.raises(ValueError, match=r"CUFLASH_CACHE_SIZE is .*accepted is"):
        read_settings()


@pytest.mark.parametrize(("name", "field", "off"), [("DISABLE_JIT", "jit", True), ("LINEINFO", "lineinfo", False)])
def test_flags(monkeypatch, name, field, off):
    for text in ("", "0"):
        monkeypatch.setenv(f"CUFLASH_{name}", text)
        assert getattr(read_settings(), field) is off
    monkeypatch.setenv(f"CUFLASH_{name}", "1")
    assert getattr(read_settings(), field) is not off
    monkeypatch.setenv(f"CUFLASH_{name}", "yes")
    with pytest.raises(ValueError, match=f"CUFLASH_{name} is 'yes'; accepted are 0 and 1"):
        read_settings()


def test_only_this_module_reads_the_environment():
    """Others may hand the whole of it on to a process (``{**os.environ, ...}``); `cuflash info` shows it as it is."""
    package = Path(cuflash.settings.__file__).parent
    readers = set()
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        handed_on = {id(value) for d in ast.walk(tree) if isinstance(d, ast.Dict) for value in d.values}
        for node in ast.walk(tree):
            named = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
            if named and id(node) not in handed_on:
                readers.add(path.relative_to(package).as_posix())
    assert readers - {"cli/info.py"} == {"settings.py"}
