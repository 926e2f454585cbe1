"""The kernels of both families on small shapes, for compute-sanitizer: see bench/sanitize.sh.

Each array is an allocation of its own, so that an access beyond its end is one beyond an allocation; nothing is
initialised but what a call may read. With ``--compile`` nothing runs: the kernels go to the cache, in processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import cupy as cp
import numpy as np

import cuflash
from cuflash import jit, kernels
from cuflash.arch import sm90
from cuflash.build import build
from cuflash.checks import make_request
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

Call = tuple[tuple[Array, ...], dict[str, object]]


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


CALLS = {"forward_sm80": _ampere_calls, "forward_sm90": _hopper_calls}


def _families() -> list[str]:
    """Those that have kernels for the device."""
    return [name for name in CALLS if name == "forward_sm80" or target() in kernels.TMA_TARGETS]


def _compile() -> None:
    wanted: set[AttentionProblem] = set()
    for family in _families():
        with kernels.use_family(family):
            for arrays, options in CALLS[family]():
                given = {"causal": False, "scale": None, "layout": "bshd", "return_lse": False, "out": None} | options
                request = make_request(arrays, given.pop("out"), **given)
                if request.seqlen_k:
                    wanted.add(kernels.problem_for(request, target()))
    settings = read_settings()
    assert settings.cache_dir is not None
    failed = [
        built
        for built in build([(problem, kernels.select_config(problem)) for problem in wanted], settings.cache_dir)
        if built.error
    ]
    assert not failed, failed


def _run() -> None:
    calls = 0
    for family in _families():
        with kernels.use_family(family):
            for arrays, options in CALLS[family]():
                result = cuflash.attention(*arrays, **options)
                out, *lse = result if isinstance(result, tuple) else (result,)
                values = cp.asnumpy(cp.ascontiguousarray(out.view(np.uint16))).view(out.dtype)
                assert np.isfinite(values.astype(np.float32)).all()
                assert not any(np.isnan(cp.asnumpy(x)).any() for x in lse)
                calls += 1
    print(f"{calls} calls, {len(jit._loaded)} kernels")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    cp.cuda.set_allocator(None)
    if parser.parse_args().compile:
        _compile()
    else:
        _run()


if __name__ == "__main__":
    main()
