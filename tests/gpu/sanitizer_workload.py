"""Every variant of the kernels on small shapes, for compute-sanitizer: see bench/sanitize.sh.

Each array is an allocation of its own, so that an access beyond its end is one beyond an allocation; nothing is
initialised but what a call may read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import cupy as cp
import numpy as np

import cuflash
from tests.gpu.support import CAUSAL, DTYPES, HEAD_DIMS, Array, assign, draw_qkv, swap_layout

LENGTHS = ((1, 1), (65, 63), (130, 131), (200, 70), (70, 200))
"""(Nq, Nk): below, at and above tiles; rows that see no key; more keys than queries."""


def _row_pitch(x: Array, extra: int) -> Array:
    """The same values with `extra` uninitialised elements behind every row."""
    view = cp.empty((*x.shape[:3], x.shape[3] + extra), np.uint16).view(x.dtype)[..., : x.shape[3]]
    assign(view, x)
    return view


def _reversed_last_axis(x: Array) -> Array:
    view = cp.empty(x.shape, np.uint16).view(x.dtype)[..., ::-1]
    assign(view, x)
    return view


def _calls() -> Iterator[tuple[tuple[Array, ...], dict[str, object]]]:
    """Arrays and options of all calls."""
    for index, (dims, dtype) in enumerate(itertools.product(HEAD_DIMS, DTYPES)):
        for nth, lengths in enumerate(LENGTHS):
            causal = CAUSAL[(index + nth) % 3]
            yield draw_qkv(lengths, (3, 1), dims, dtype, batch=2), {"causal": causal, "return_lse": nth % 2 == 0}
    for dims, lengths in itertools.product(((64, 64), (128, 128), (256, 256), (40, 72)), LENGTHS):
        arrays = draw_qkv(lengths, (2, 2), dims, "bfloat16", batch=2)
        for scale in (0.0, -0.5, 1e-35):
            yield arrays, {"scale": scale, "causal": True}
        for extra in (1, 2, 4, 8):
            yield tuple(_row_pitch(x, extra) for x in arrays), {"causal": True}
        yield tuple(_reversed_last_axis(x) for x in arrays), {}
        yield tuple(swap_layout(x) for x in arrays), {"layout": "bhsd"}
        yield arrays, {"out": _row_pitch(cp.zeros((*arrays[0].shape[:3], dims[1]), np.uint16).view(arrays[0].dtype), 3)}
    yield draw_qkv((3, 0), (1, 1), (64, 64), "float16"), {"return_lse": True}
    yield draw_qkv((3, 3), (70000, 70000), (8, 8), "float16"), {}


def main() -> None:
    cp.cuda.set_allocator(None)
    calls = 0
    for arrays, options in _calls():
        result = cuflash.attention(*arrays, **options)
        out, *lse = result if isinstance(result, tuple) else (result,)
        assert np.isfinite(
            cp.asnumpy(cp.ascontiguousarray(out.view(np.uint16))).view(out.dtype).astype(np.float32)
        ).all()
        assert not any(np.isnan(cp.asnumpy(x)).any() for x in lse)
        calls += 1
    from cuflash import jit

    print(f"{calls} calls, {len(jit._loaded)} kernels")


if __name__ == "__main__":
    main()
