"""The shipped kernels, the subset of them that meets every pair of choices, and compiling them in processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from itertools import combinations

from cuflash import kernels
from cuflash.arch import ARCHES
from cuflash.compiled import Compiled
from cuflash.compiler import compile_source
from cuflash.problem import AttentionProblem
from cuflash.render import render


def every_problem() -> list[AttentionProblem]:
    return [problem for arch in ARCHES for problem in kernels.shipped_problems(arch)]


def pairs(problem: AttentionProblem) -> set[tuple[int, object, int, object]]:
    """Every two choices of a problem together, the two head dims counting as one; its kernel family is one, too."""
    head_dim, head_dim_v, *rest = astuple(problem)
    choices = ((head_dim, head_dim_v), kernels.select_config(problem).family, *rest)
    return {(i, choices[i], j, choices[j]) for i, j in combinations(range(len(choices)), 2)}


def pairwise(problems: Sequence[AttentionProblem]) -> list[AttentionProblem]:
    """Few problems in which every pair of choices that occurs in all of them occurs."""
    missing = {problem: pairs(problem) for problem in problems}
    chosen = []
    while any(missing.values()):
        best = max(missing, key=lambda problem: len(missing[problem]))
        covered = missing.pop(best)
        chosen.append(best)
        for other in missing.values():
            other -= covered
    return chosen


def label(problem: AttentionProblem) -> str:
    return f"{problem.arch}-{kernels.symbol(problem, kernels.select_config(problem)).removeprefix('cuflash_')}"


def compile_shipped(problem: AttentionProblem) -> Compiled:
    return compile_source(render(problem, kernels.select_config(problem)))
