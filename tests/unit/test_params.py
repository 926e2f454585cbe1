"""Parameter blocks: layout judged by ctypes, which follows the C rules on its own, and the exactness of FastDiv."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.params import (
    F32,
    FAST_DIV,
    FORWARD_FP8_SM90,
    FORWARD_SM80,
    FORWARD_SM90,
    I32,
    I64,
    POINTER,
    TENSOR_MAP,
    Field,
    ParameterBlock,
    fast_div,
)


class FastDiv(ctypes.Structure):
    _fields_ = (("magic", ctypes.c_uint64), ("shift", ctypes.c_uint32), ("divisor", ctypes.c_uint32))


C_TYPES = {
    POINTER: ctypes.c_uint64,
    I64: ctypes.c_int64,
    I32: ctypes.c_int32,
    F32: ctypes.c_float,
    FAST_DIV: FastDiv,
}
VALUES = {
    POINTER: st.integers(0, 2**64 - 1),
    I64: st.integers(-(2**63), 2**63 - 1),
    I32: st.integers(-(2**31), 2**31 - 1),
    F32: st.floats(width=32, allow_nan=False),
    FAST_DIV: st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
}


def as_structure(block):
    fields = [(f.name, C_TYPES[f.type]) for f in block.fields]
    return type("Params", (ctypes.Structure,), {"_fields_": fields})


@st.composite
def blocks_and_values(draw):
    types = draw(st.lists(st.sampled_from(list(C_TYPES)), min_size=1, max_size=12))
    block = ParameterBlock(tuple(Field(f"f{i}", t, "") for i, t in enumerate(types)))
    return block, {f.name: draw(VALUES[f.type]) for f in block.fields}


@given(blocks_and_values())
def test_packing_agrees_with_the_c_compiler_rules(case):
    block, values = case
    structure = as_structure(block)
    assert block.size == ctypes.sizeof(structure)
    unpacked = structure.from_buffer_copy(block.pack(values))
    for field in block.placed:
        assert field.offset == getattr(structure, field.name).offset
        got = getattr(unpacked, field.name)
        if field.type is FAST_DIV:
            got = (got.magic, got.shift, got.divisor)
        assert got == values[field.name]


def test_the_ampere_block_has_its_pointers_first_and_in_call_order():
    assert [f.name for f in FORWARD_SM80.placed[:5]] == ["q", "k", "v", "out", "lse"]
    assert [f.offset for f in FORWARD_SM80.placed[:5]] == [0, 8, 16, 24, 32]
    assert ctypes.sizeof(as_structure(FORWARD_SM80)) == FORWARD_SM80.size <= 4096


def test_the_hopper_block_begins_with_aligned_tensor_maps():
    """ctypes cannot align to 64 bytes before Python 3.13: the maps are checked by hand, the rest as usual."""
    maps, rest = FORWARD_SM90.placed[:4], FORWARD_SM90.placed[4:]
    assert [(f.name, f.offset) for f in maps] == [
        ("q_map", 0), ("k_map", 128), ("v_map", 256), ("out_map", 384),
    ]  # fmt: skip
    behind = as_structure(ParameterBlock(FORWARD_SM90.fields[4:]))
    assert [f.offset - 512 for f in rest] == [getattr(behind, f.name).offset for f in rest]
    assert FORWARD_SM90.size % 64 == 0 and 0 <= FORWARD_SM90.size - 512 - ctypes.sizeof(behind) < 64
    assert FORWARD_SM90.size <= 4096


def test_the_block_for_quantized_inputs_has_three_maps_before_its_pointers():
    placed = FORWARD_FP8_SM90.placed
    assert [(f.name, f.offset) for f in placed[:5]] == [
        ("q_map", 0), ("k_map", 128), ("out_map", 256), ("v", 384), ("q_scale", 392),
    ]  # fmt: skip
    behind = as_structure(ParameterBlock(FORWARD_FP8_SM90.fields[3:]))
    assert [f.offset - 384 for f in placed[3:]] == [getattr(behind, f.name).offset for f in placed[3:]]
    assert FORWARD_FP8_SM90.size % 64 == 0 and FORWARD_FP8_SM90.size <= 4096


@pytest.mark.parametrize("block", [FORWARD_SM80, FORWARD_SM90, FORWARD_FP8_SM90], ids=["sm_80", "sm_90", "fp8_sm_90"])
def test_a_launch_is_the_block_packed_in_two_parts(block):
    values = {f.name: bytes([i]) * 128 if f.type is TENSOR_MAP else i for i, f in enumerate(block.fields)}
    values |= {f.name: (1, 2, 3) for f in block.fields if f.type is FAST_DIV}
    whole = dict(values)
    head = [values.pop(f.name) for f in block.fields[: block.per_launch]]
    maps = [value for value in head if isinstance(value, bytes)]
    tail = block.pack_tail(values)
    assert block.launch_block.pack(*([b"".join(maps)] if maps else []), *head[len(maps) :], tail) == block.pack(whole)
    with pytest.raises(KeyError, match="lse"):
        block.pack_tail(whole)


def test_names_must_match():
    block = ParameterBlock((Field("a", I32, ""), Field("b", I32, "")))
    with pytest.raises(KeyError, match="b"):
        block.pack({"a": 1})
    with pytest.raises(KeyError, match="c"):
        block.pack({"a": 1, "b": 2, "c": 3})


def quotient(n, magic, shift):
    """As the device does it: a 64-bit product, shifted."""
    assert n * magic < 2**64
    return n * magic >> shift


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_fast_div_is_exact(divisor, n):
    magic, shift, kept = fast_div(divisor)
    assert kept == divisor
    assert quotient(n, magic, shift) == n // divisor


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 12, 31, 32, 33, 641, 65535, 65536, 65537, 2**31 - 1])
def test_fast_div_at_the_edges_of_every_quotient(divisor):
    magic, shift, _ = fast_div(divisor)
    assert magic < 2**64
    largest = (2**31 - 1) // divisor
    for multiple in {0, 1, 2, largest // 2, largest - 1, largest}:
        for n in (multiple * divisor - 1, multiple * divisor, multiple * divisor + divisor - 1):
            if 0 <= n < 2**31:
                assert quotient(n, magic, shift) == n // divisor
