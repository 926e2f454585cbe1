"""A call of the 8-bit kernels, and what either family's launch must say of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cuflash import params
from cuflash.fp8_plan import Fp8Addresses, Fp8Call

__all__ = ["ADDRESSES", "assert_said", "call_of"]

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
