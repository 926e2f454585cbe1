"""What the tuning tables of all kernel families share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from ..config import KernelConfig
from ..errors import UnsupportedError
from ..problem import AttentionProblem, Mask

Config = TypeVar("Config", bound=KernelConfig)

SLACK: dict[Mask, int] = {"full": 2, "causal": 8}
"""By mask: where the diagonal's tile comes first it holds each row's own key, and a larger slack costs no accuracy."""


class Row(Generic[Config]):
    """The config of problems on ``arches``, under ``masks``, with D up to ``head_dim`` and Dv up to ``head_dim_v``.

    ``short``: of those with few queries, in place of another row of these head dims.
    """

    def __init__(
        self,
        arches: tuple[str, ...],
        head_dim: int,
        head_dim_v: int,
        masks: tuple[Mask, ...],
        config: Config,
        short: bool = False,
    ) -> None:
        self.arches = arches
        self.head_dim = head_dim
        self.head_dim_v = head_dim_v
        self.masks = masks
        self.config = config
        self.short = short

    def serves(self, problem: AttentionProblem) -> bool:
        return (
            problem.arch in self.arches
            and problem.mask in self.masks
            and problem.head_dim <= self.head_dim
            and problem.head_dim_v <= self.head_dim_v
            and problem.short == self.short
        )


def row_for(table: Iterable[Row[Config]], problem: AttentionProblem) -> Row[Config]:
    """The row with the smallest head dims that serves a problem.

    Raises
    ------
    UnsupportedError
        There is none.
    """
    rows = [row for row in table if row.serves(problem)]
    if not rows:
        dims = f"{problem.head_dim} and {problem.head_dim_v}{', few queries,' if problem.short else ''}"
        advice = "leave short away, or add one" if problem.short else "add one"
        raise UnsupportedError(f"no tuning row for head dims {dims} on {problem.arch}: {advice} in cuflash/arch")
    return min(rows, key=lambda row: row.head_dim + row.head_dim_v)
