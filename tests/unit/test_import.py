"""What `import cuflash` does not do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cuflash
from cuflash import kernels
from cuflash.cache import KernelCache, cache_key
from cuflash.compiled import Compiled
from cuflash.errors import INSTALL_CUDA
from cuflash.problem import AttentionProblem
from cuflash.render import Source

ROOT = Path(__file__).resolve().parents[2]
BACKWARD = "cuflash.attention_backward(x, x, x, x, *cuflash.attention(x, x, x, return_lse=True))"
HEAVY = ("cupy", "cupyx", "torch", "jax", "jaxlib", "jinja2", "cuda", "ml_dtypes", "matplotlib", "rich", "asyncio")


def in_fresh_process(code: str) -> object:
    """Run code that prints JSON, in the checkout."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


QUANTIZED = "cuflash.attention(x, x, x, precision='fp8')"


@pytest.mark.parametrize(
    "use", ["", "cuflash.attention; cuflash.warmup", "cuflash.attention(x, x, x)", BACKWARD, QUANTIZED]
)
def test_light(use: str) -> None:
    """Neither the import nor work on NumPy arrays loads a GPU library, Jinja or another framework."""
    code = f"""
import json, sys
import numpy as np
x = np.ones((1, 4, 2, 8), "float32")
before = set(sys.modules)
import cuflash
{use}
print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""
    loaded = in_fresh_process(code)
    assert isinstance(loaded, list) and "cuflash" in loaded
    assert not set(loaded) & set(HEAVY)


def test_a_forward_plan_loads_nothing_of_the_backward_pass() -> None:
    """Its configs, tables and parameter blocks would cost a process's first call milliseconds."""
    code = """
import json, sys
import numpy as np
import cuflash
x = np.ones((1, 4, 2, 64), "float16")
assert cuflash.explain(x, x, x, arch="sm_90").kernel is not None
print(json.dumps([name for name in sys.modules if name.startswith("cuflash.") and "backward" in name]))
"""
    assert in_fresh_process(code) == []


@pytest.mark.parametrize(("arch", "other"), [("sm_80", "sm90"), ("sm_90a", "sm80")])
def test_a_kernel_in_the_cache_loads_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, other: str
) -> None:
    """No compiler, no Jinja, no table and config of another family: each would cost a process's first call."""
    problem = AttentionProblem(64, 64, "float16", "full", 16, False, arch)
    key = cache_key(problem, kernels.select_config(problem))
    store = KernelCache(tmp_path / "kernels", 1 << 20)
    store.nvrtc_build = "13.0.88"
    compiled = Compiled(b"code", key.symbol, arch, 128, 0, 0, 0, 0.5, "", "13.0.88")
    assert store.publish(key, Source("// text", {}, key.symbol, (), arch), compiled)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(store.root))
    code = f"""
import json, sys
from cuflash import cache, jit, kernels, settings
from cuflash.problem import AttentionProblem
cache.KernelCache.nvrtc_build = "13.0.88"
problem = {problem!r}
compiled, origin = jit.obtain_code(problem, kernels.select_config(problem), settings.read_settings())
print(json.dumps([origin, sorted(sys.modules)]))
"""
    origin, loaded = in_fresh_process(code)  # type: ignore[misc]
    assert origin == "disk"
    needless = {"jinja2", "cuda", "cuflash.compiler", f"cuflash.arch.{other}", f"cuflash.{other}_config"}
    assert not set(loaded) & needless


def test_quiet() -> None:
    """No file is opened but modules, no environment variable read, no process started, no library loaded."""
    code = """
import json, os, sys
import numpy
seen = []
def hook(event, args):
    if event == "open" and str(args[0]).endswith((".py", ".pyc", ".so")) and args[1] in ("r", "rb", None):
        return
    if event in ("open", "os.mkdir", "os.putenv", "subprocess.Popen", "socket.connect", "ctypes.dlopen"):
        seen.append([event, str(args[0])])
sys.addaudithook(hook)
class Environment(dict):
    def __getitem__(self, name):
        seen.append(["environ", name])
        return super().__getitem__(name)
    def get(self, name, default=None):
        seen.append(["environ", name])
        return super().get(name, default)
os.environ = Environment(os.environ)
import cuflash
cuflash.attention
print(json.dumps(seen))
"""
    seen = in_fresh_process(code)
    assert seen == []


def test_fast() -> None:
    """Under 60 ms beyond NumPy: here the fastest of a few processes, for the machine may be busy."""
    code = """
import json, time
import numpy
start = time.process_time()
import cuflash
cuflash.attention
print(json.dumps(time.process_time() - start))
"""
    seconds = [in_fresh_process(code) for _ in range(5)]
    assert all(isinstance(s, float) for s in seconds)
    assert min(seconds) < 0.060  # type: ignore[type-var, operator]


def test_torch_module_without_torch() -> None:
    """An error that says what to do, wherever torch's module is asked for; nothing else minds that torch is missing."""
    code = """
import inspect, json, sys
sys.modules["torch"] = None
import cuflash
found = [str(dict(inspect.getmembers(cuflash)).get("torch"))]
for way in ("import cuflash.torch", "cuflash.torch", "from cuflash.torch import attention"):
    try:
        exec(way)
    except ImportError as error:
        found.append(str(error))
print(json.dumps(found))
"""
    members, *errors = in_fresh_process(code)  # type: ignore[misc]
    assert members == "None" and len(errors) == 3
    assert all("cuflash.torch needs torch, which is not installed: pip install torch" in error for error in errors)


def test_public_names() -> None:
    for name in cuflash.__all__:
        assert getattr(cuflash, name) is not None and name in dir(cuflash)
    assert issubclass(cuflash.UnsupportedError, NotImplementedError)
    with pytest.raises(AttributeError, match="no attribute 'attention_forward'"):
        cuflash.attention_forward  # noqa: B018
    assert cuflash.__version__.count(".") == 2


@pytest.mark.parametrize("use", ["import cuflash.jax", "import cuflash; cuflash.jax", "from cuflash import jax"])
def test_jax_is_asked_for_by_name(use: str) -> None:
    """Nothing but its own module needs JAX, which says so."""
    code = f"""
import json, sys
sys.modules["jax"] = None
try:
    {use}
except ImportError as error:
    print(json.dumps(str(error)))
"""
    assert "cuflash.jax needs JAX 0.6.1 or later" in str(in_fresh_process(code))


def test_messages_advise_what_can_be_installed() -> None:
    """cuflash is on no index: extras are installed from a checkout, and those that messages name exist."""
    texts = {path: path.read_text() for path in (ROOT / "cuflash").rglob("*.py")}
    assert texts and not [path for path, text in texts.items() if re.search(r"pip install '?cuflash", text)]
    named = {name for text in texts.values() for name in re.findall(r"pip install '\.\[(\w+)\]'", text)}
    assert named == {"cuda13"}
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{name} = [" in project and f"{name} (" in INSTALL_CUDA for name in ("cuda12", "cuda13"))
