"""The kernels of all families, of both passes, on small shapes, for compute-sanitizer: see bench/sanitize.sh.

Each array is an allocation of its own, so that an access beyond its end is one beyond an allocation; nothing is
initialised but what a call may read. With ``--compile`` nothing runs: the kernels go to the cache, in processes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import cupy as cp
import numpy as np

import cuflash
from cuflash import jit, kernels
from cuflash.arch import sm90
from cuflash.backward_kernels import FAMILIES as BACKWARD_FAMILIES
from cuflash.build import build
from cuflash.explanation import Explanation
from cuflash.problem import AttentionProblem
from cuflash.settings import read_settings
from tests.gpu.support import (
    CAUSAL,
    DTYPES,
    HEAD_DIMS,
    Array,
    assign,
    draw_qkv,
    poisoned,
    swap_layout,
    target,
)

LENGTHS = ((1, 1), (65, 63), (130, 131), (200, 70), (70, 200))
"""(Nq, Nk): below, at and above tiles; rows that see no key; more keys than queries."""

HOPPER_DIMS = ((8, 8), (40, 72), (64, 64), (96, 96), (64, 256), (128, 128), (192, 128), (192, 192), (256, 256))
"""(D, Dv): each row of the tuning table, and dims that fill no chunk of 64 or end in the middle of one."""

FP8_DIMS = ((8, 8), (40, 72), (64, 64), (128, 128), (192, 128), (256, 256))
"""(D, Dv): each row of the tuning tables of 8-bit operands, and dims that are padded."""

BACKWARD_DIMS = (
    (1, 1), (8, 8), (31, 31), (40, 72), (64, 64), (64, 256), (96, 96), (112, 112), (128, 128), (192, 128), (256, 64),
    (256, 256),
)  # fmt: skip
"""(D, Dv): each row of the tuning tables, each width of access, and tiles that are not filled."""

Call = tuple[tuple[Array, ...], dict[str, Any]]


def _row_pitch(x: Array, extra: int) -> Array:
    """The same values with `extra` uninitialised elements behind every row."""
    view = cp.empty((*x.shape[:3], x.shape[3] + extra), np.uint16).view(x.dtype)[..., : x.shape[3]]
    assign(view, x)
    return view


def _reversed_last_axis(x: Array) -> Array:
    view = cp.empty(x.shape, np.uint16).view(x.dtype)[..., ::-1]
    assign(view, x)
    return view


def _main_calls(dims_list: tuple[tuple[int, int], ...]) -> Iterator[Call]:
    """All lengths and masks for each pair of head dims: one dtype with a mask, the other without."""
    for index, dims in enumerate(dims_list):
        for nth, lengths in enumerate(LENGTHS):
            causal = CAUSAL[(index + nth) % 3]
            arrays = draw_qkv(lengths, (3, 1), dims, DTYPES[(index + bool(causal)) % 2], batch=2)
            yield arrays, {"causal": causal, "return_lse": nth % 2 == 0}


def _ampere_calls() -> Iterator[Call]:
    """Outputs are not initialised: initcheck sees what is left unwritten."""
    yield from _main_calls(HEAD_DIMS)
    for nth, dims in enumerate(((64, 64), (128, 128), (256, 256), (40, 72))):
        for lengths in (LENGTHS[nth - 1], LENGTHS[3]):
            arrays = draw_qkv(lengths, (2, 2), dims, "bfloat16", batch=2)
            for scale in (0.0, -0.5, 1e-35):
                yield arrays, {"scale": scale, "causal": True}
            for extra in (1, 2, 4, 8):
                yield tuple(_row_pitch(x, extra) for x in arrays), {"causal": True}
            yield tuple(_reversed_last_axis(x) for x in arrays), {}
            yield tuple(swap_layout(x) for x in arrays), {"layout": "bhsd"}
            out = _row_pitch(cp.zeros((*arrays[0].shape[:3], dims[1]), np.uint16).view(arrays[0].dtype), 3)
            yield arrays, {"out": out}
    yield draw_qkv((3, 0), (1, 1), (64, 64), "float16"), {"return_lse": True}
    yield draw_qkv((3, 3), (70000, 70000), (8, 8), "float16"), {}


def _hopper_calls() -> Iterator[Call]:
    """Outputs hold NaN before: that finds what is left unwritten, whether or not initcheck follows stores by TMA."""
    for arrays, options in _hopper_inputs():
        q, _, v = arrays
        yield arrays, {"out": poisoned((*q.shape[:3], v.shape[3]), q.dtype)} | options


def _hopper_inputs() -> Iterator[Call]:
    yield from _main_calls(HOPPER_DIMS)
    for dims in ((64, 64), (128, 128), (256, 256)):
        arrays = draw_qkv((200, 70), (2, 2), dims, "bfloat16", batch=2)
        yield arrays, {"scale": -0.5, "causal": True}
        yield tuple(_row_pitch(x, 8) for x in arrays), {"causal": True}
        yield tuple(swap_layout(x) for x in arrays), {"layout": "bhsd"}
        yield arrays, {"out": _row_pitch(poisoned((*arrays[0].shape[:3], dims[1]), arrays[0].dtype), 8)}
        # More work tiles than thread blocks: buffers and rings go round, tiles come from the counter.
        arrays = draw_qkv((200, 150), (8, 2), dims, "bfloat16", batch=40)
        for causal in (False, True):
            yield arrays, {"causal": causal, "return_lse": True}
    # Too many queries for the row of few.
    yield draw_qkv((sm90.SHORT + 76, 1100), (4, 2), (64, 64), "bfloat16", batch=8), {"causal": True, "return_lse": True}


def _fp8_calls() -> Iterator[Call]:
    """Quantized on the way, with both ways to sum the output."""
    for index, dims in enumerate(FP8_DIMS):
        for nth, lengths in enumerate(LENGTHS):
            arrays = draw_qkv(lengths, (3, 1), dims, DTYPES[nth % 2], batch=2)
            precision = ("fp8", "fp8-fast")[(index + nth) % 2]
            yield arrays, {"causal": CAUSAL[(index + nth) % 3], "return_lse": nth % 2 == 0, "precision": precision}


def _backward_calls() -> Iterator[Call]:
    """Of either family, which may refuse some; ``form`` is what becomes of all arrays of the call."""
    for nth, (arrays, options) in enumerate(_main_calls(BACKWARD_DIMS)):
        yield arrays, {"causal": options["causal"], "deterministic": nth % 3 == 0}
    for nth, dims in enumerate(((64, 64), (128, 128), (256, 256), (40, 72))):
        for lengths in (LENGTHS[nth - 1], LENGTHS[3]):
            arrays = draw_qkv(lengths, (4, 2), dims, "bfloat16", batch=2)
            for extra in (1, 2, 4, 8):
                yield arrays, {"causal": True, "form": partial(_row_pitch, extra=extra)}
            yield arrays, {"scale": -0.5, "form": _reversed_last_axis}
            yield arrays, {"layout": "bhsd", "form": swap_layout}
    for dims in ((64, 64), (128, 128), (256, 256)):
        # More key tiles than thread blocks that run at once, which add to the same rows, in turns and in any order.
        arrays = draw_qkv((300, 600), (8, 2), dims, "bfloat16", batch=24)
        for deterministic in (False, True):
            yield arrays, {"causal": True, "deterministic": deterministic}
    yield draw_qkv((3, 0), (1, 1), (64, 64), "float16"), {}


def _plain(x: Array) -> Array:
    return x


def _attend(family: str, arrays: tuple[Array, ...], options: dict[str, Any]) -> tuple[Array, ...]:
    """Results of a call."""
    if family.startswith("forward"):
        result = cuflash.attention(*arrays, **options)
        return result if isinstance(result, tuple) else (result,)
    options = dict(options)
    form = options.pop("form", _plain)
    alike = {name: options[name] for name in ("causal", "scale") if name in options}
    # Hopper kernels store by TMA, which initcheck does not follow: what they write holds something before.
    q, _, v = arrays
    out = poisoned((*q.shape[:3], v.shape[3]), q.dtype)
    _, lse = cuflash.attention(*arrays, **alike, out=out, return_lse=True)
    grads = tuple(form(poisoned(x.shape, x.dtype)) for x in arrays) if family.endswith("_sm90") else None
    dout, q, k, v, out = map(form, (out, *arrays, out))
    return cuflash.attention_backward(dout, q, k, v, out, lse, **options, grads=grads)


def _explain(family: str, arrays: tuple[Array, ...], options: dict[str, Any]) -> Explanation:
    if family.startswith("forward"):
        return cuflash.explain(*arrays, **options)
    options = dict(options)
    form = options.pop("form", _plain)
    out = cp.empty((*arrays[0].shape[:3], arrays[2].shape[3]), np.uint16).view(arrays[0].dtype)
    return cuflash.explain(*map(form, arrays), **options, out=form(out), backward=True)


CALLS = {
    "forward_sm80": _ampere_calls,
    "forward_sm90": _hopper_calls,
    "forward_fp8_sm80": _fp8_calls,
    "forward_fp8_sm90": _fp8_calls,
    "backward_sm80": _backward_calls,
    "backward_sm90": _backward_calls,
}


def _families() -> list[str]:
    """Those that have kernels for the device."""
    known = [name for name in CALLS if name in kernels.FAMILIES or name in BACKWARD_FAMILIES]
    return [name for name in known if name.endswith("_sm80") or target() in kernels.TMA_TARGETS]


def _calls(families: list[str]) -> Iterator[tuple[str, tuple[Array, ...], dict[str, Any], Explanation]]:
    """Every call that its family takes, which is asked for meanwhile; the forward families take all of theirs."""
    for family in families:
        with kernels.use_family(family):
            for arrays, options in CALLS[family]():
                about = _explain(family, arrays, options)
                assert about.refused is None or family == "backward_sm90", about
                if about.refused is None:
                    yield family, arrays, options, about


def _compile(families: list[str]) -> None:
    wanted: set[AttentionProblem] = set()
    for *_, about in _calls(families):
        wanted |= {kernel.problem for kernel in about.kernels}
    settings = read_settings()
    assert settings.cache_dir is not None
    failed = [
        built
        for built in build([(problem, kernels.select_config(problem)) for problem in wanted], settings.cache_dir)
        if built.error
    ]
    assert not failed, failed


def _run(families: list[str]) -> None:
    calls: Counter[str] = Counter()
    for family, arrays, options, _ in _calls(families):
        for x in _attend(family, arrays, options):
            values = _values(x)
            assert np.isfinite(values).all() if x.ndim == 4 else not np.isnan(values).any(), (family, options)
        calls[family] += 1
    by_family = ", ".join(f"{count} of {family}" for family, count in calls.items())
    print(f"{calls.total()} calls ({by_family}), {len(jit._loaded)} kernels")


def _values(x: Array) -> np.ndarray:
    """Of outputs and gradients, or of an LSE."""
    if x.dtype == np.float32:
        return cp.asnumpy(x)
    return cp.asnumpy(cp.ascontiguousarray(x.view(np.uint16))).view(x.dtype).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("families", nargs="*", metavar="family", help=f"of {', '.join(CALLS)}; all if none is named")
    arguments = parser.parse_args()
    if unknown := set(arguments.families) - CALLS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: families are {', '.join(CALLS)}")
    cp.cuda.set_allocator(None)
    run = _compile if arguments.compile else _run
    run(arguments.families or _families())


if __name__ == "__main__":
    main()
