"""The forward table: its cases, and what is measured of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from .. import kernels
from ..explanation import Explanation
from ..problem import DTYPES, AttentionProblem
from .accuracy import Exact, exact_outputs
from .inputs import Case
from .peers import Contestant, Refusal, ours, ours_sm80, peer, sort_out
from .table import MAIN_HEAD_DIMS, Pass, has_two_families

MASKS = (False, True)
"""Whether causal."""
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
OTHER_HEAD_DIMS = ((32, 32), (80, 80), (96, 96), (160, 160), (192, 192), (192, 128))
OTHER_LENGTH = 4096
GROUPED_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
TABLE_DTYPES = tuple(reversed(DTYPES))


def all_cases() -> Iterator[Case]:
    """The complete forward table, bfloat16 first."""
    for dtype, d, causal, n in product(TABLE_DTYPES, MAIN_HEAD_DIMS, MASKS, LENGTHS):
        yield Case.of(d, causal, n, dtype)
    for dtype, (d, dv), causal in product(TABLE_DTYPES, OTHER_HEAD_DIMS, MASKS):
        yield Case.of(d, causal, OTHER_LENGTH, dtype, head_dim_v=dv)
    yield from map(grouped_case, GROUPED_LENGTHS)


def grouped_case(seqlen: int) -> Case:
    """One sequence with the heads of a Llama 3 8B layer."""
    return Case.of(128, True, seqlen, "bfloat16", batch=1, heads=32, heads_k=8)


def quick_cases() -> Iterator[Case]:
    """Of either pass: a look that takes seconds."""
    for d, causal, n in product(MAIN_HEAD_DIMS, MASKS, (1024, 4096)):
        yield Case.of(d, causal, n, "bfloat16")


def contestants(
    case: Case, arrays: list[Any], peers: tuple[str, ...], about: Explanation
) -> tuple[list[Contestant], list[Refusal]]:
    """Cuflash, by its other kernel family as well, and the peers."""
    found = [ours(case, arrays)]
    if has_two_families(about):
        found.append(ours_sm80(case, arrays))
    return sort_out([*found, *(peer(name, case, arrays) for name in peers)])


def exact(arrays: Sequence[Any], causal: bool, xp: Any, heads: int) -> Iterator[Exact]:
    """The output."""
    return exact_outputs(arrays[:3], causal, xp, heads)


def problems(case: Case, arch: str) -> Iterator[AttentionProblem]:
    """Of all families that the device has."""
    return map(case.problem, kernels.device_targets(arch))


FORWARD = Pass("forward", tuple(all_cases()), tuple(quick_cases()), 15, contestants, exact, problems)
