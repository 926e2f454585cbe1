"""Calls on 8-bit operands: shapes of whole ones, and one of the kernels with what a launch must say of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cuflash import params
from cuflash.fp8_plan import Fp8Addresses, Fp8Call

__all__ = ["ADDRESSES", "SHAPES", "assert_said", "call_of"]

SHAPES = (
    ((1, 1), (1, 1), (1, 1)),
    ((127, 128), (33, 70), (2, 2)),
    ((129, 257), (16, 16), (6, 2)),
    ((300, 70), (80, 80), (3, 1)),
    ((5, 400), (192, 128), (2, 1)),
    ((64, 64), (250, 256), (2, 2)),
)
"""(lengths, head dims, heads) of whole calls: tile edges, odd head dims, groups, rows that see no key."""

ADDRESSES = Fp8Addresses(*(0x10000 * i for i in range(3, 11)))


def call_of(**changes: Any) -> Fp8Call:
    """Grouped heads, lengths and head dims that differ, a causal mask, a Hopper GPU; with changes."""
    batch, heads, heads_k, n, nk, d, dv = 2, 8, 2, 1000, 777, 64, 80
    base = Fp8Call(
        batch, heads, heads_k, n, nk, d, dv, "bfloat16", nk - n, 0.125,
        (n * heads * d, heads * d, d), (nk * heads_k * d, heads_k * d, d), (n * heads * dv * 2, heads * dv * 2, dv * 2),
        "sm_90a",
    )  # fmt: skip
    return base._replace(**changes)


def assert_said(values: Mapping[str, Any]) -> None:
    """The parameters, of `call_of` at `ADDRESSES`, that the blocks of both families have."""
    for name, value in ADDRESSES._asdict().items():
        assert values[name] == value, name
    assert (values["seqlen_q"], values["seqlen_k"], values["causal_offset"]) == (1000, 777, -223)
    assert (values["q_tiles"], values["k_tiles"], values["kv_heads"]) == (8, 7, 2)
    assert values["heads"] == params.fast_div(8) and values["group"] == params.fast_div(4)
    assert values["batch_heads"] == 16
    assert values["scale_log2"] == pytest.approx(0.125 * 1.4426950408889634)
    assert [values[f"out_{axis}_stride"] for axis in ("batch", "seq", "head")] == [1000 * 8 * 80, 8 * 80, 80]
