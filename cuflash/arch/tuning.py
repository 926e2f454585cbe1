"""What the tuning tables of all kernel families share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..config import KernelConfig
from ..errors import UnsupportedError
from ..problem import AttentionProblem, Mask

Config = TypeVar("Config", bound=KernelConfig)

SLACK: dict[Mask, int] = {"full": 2, "causal": 8}
"""By mask: where the diagonal's tile comes first it holds each row's own key, and a larger slack costs no accuracy."""


@dataclass(frozen=True, slots=True)
class Row(Generic[Config]):
    """The config of problems on ``arches``, under ``masks``, with D up to ``head_dim`` and Dv up to ``head_dim_v``."""

    arches: tuple[str, ...]
    head_dim: int
    head_dim_v: int
    masks: tuple[Mask, ...]
    config: Config


def row_for(table: Iterable[Row[Config]], problem: AttentionProblem) -> Row[Config]:
    """The row with the smallest head dims that serves a problem.

    Raises
    ------
    UnsupportedError
        There is none.
    """
    rows = [
        row
        for row in table
        if problem.arch in row.arches
        and problem.mask in row.masks
        and problem.head_dim <= row.head_dim
        and problem.head_dim_v <= row.head_dim_v
    ]
    if not rows:
        dims = f"{problem.head_dim} and {problem.head_dim_v}"
        raise UnsupportedError(f"no tuning row for head dims {dims} on {problem.arch}: add one in cuflash/arch")
    return min(rows, key=lambda row: row.head_dim + row.head_dim_v)
