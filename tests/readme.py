"""The README's examples, run as they stand."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"


def example(word: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Runs the README's Python block that contains a word, after another one that left ``names``; returns its names."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if word in block]
    names = dict(names or {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what frameworks say when they are imported
        exec(compile("import cuflash\n" + block, "README.md", "exec"), names)
    return names
