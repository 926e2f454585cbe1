"""The backward table: its cases, and what is measured of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from .. import kernels
from ..backward_kernels import problems_beside
from ..explanation import Explanation, explain
from ..problem import AttentionProblem
from .accuracy import Exact, exact_results
from .forward import MASKS, grouped_case, quick_cases
from .gradients import ours, ours_sm80, peer, saved
from .inputs import Case, numpy_dtype
from .peers import Contestant, Refusal, sort_out
from .table import MAIN_HEAD_DIMS, Pass, has_two_families

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FLOAT16_LENGTHS = (1024, 4096)
OTHER_HEAD_DIMS = ((96, 96), (192, 192), (192, 128))
OTHER_LENGTH = 4096
GROUPED_LENGTHS = (1024, 4096, 8192)
HOST_LENGTH = 4096
"""Up to here NumPy judges gradients where CuPy cannot: beyond, a head takes it seconds."""


def all_cases() -> Iterator[Case]:
    """The complete backward table, bfloat16 first."""
    for d, causal, n in product(MAIN_HEAD_DIMS, MASKS, LENGTHS):
        yield Case.of(d, causal, n, "bfloat16")
    for (d, dv), causal in product(OTHER_HEAD_DIMS, MASKS):
        yield Case.of(d, causal, OTHER_LENGTH, "bfloat16", head_dim_v=dv)
    yield from map(grouped_case, GROUPED_LENGTHS)
    for d, causal, n in product(MAIN_HEAD_DIMS, MASKS, FLOAT16_LENGTHS):
        yield Case.of(d, causal, n, "float16")


def contestants(
    case: Case, arrays: list[Any], peers: tuple[str, ...], about: Explanation
) -> tuple[list[Contestant], list[Refusal]]:
    """Cuflash, in its deterministic mode and by its other kernel family as well, and the peers."""
    of = saved(case, arrays)
    found = [ours(case, of), ours(case, of, deterministic=True)]
    if has_two_families(about):
        assert about.device is not None
        found.append(ours_sm80(case, of, about.device.arch))
    return sort_out([*found, *(peer(name, case, of) for name in peers)])


def exact(arrays: Sequence[Any], causal: bool, xp: Any, heads: int) -> Iterator[Exact]:
    """The gradients, on half as many heads, since each costs more than twice as much; none where NumPy takes long."""
    if xp is np and arrays[0].shape[1] > HOST_LENGTH:
        return iter(())
    return exact_results(arrays, causal, xp, -(-heads // 2))


def problems(case: Case, arch: str) -> Iterator[AttentionProblem]:
    """Of the forward pass; then what a call takes, and the Ampere-style kernels."""
    yield case.problem(kernels.device_targets(arch)[-1])
    like = [np.empty(shape, numpy_dtype(case.dtype)) for shape in case.shapes[:3]]  # never touched, so no memory
    yield from (kernel.problem for kernel in explain(*like, causal=case.causal, backward=True, arch=arch).kernels)
    yield from problems_beside(case.problem(arch), arch)


BACKWARD = Pass("backward", tuple(all_cases()), tuple(quick_cases()), 9, contestants, exact, problems)
