"""The parameter blocks of the backward pass."""

from __future__ import annotations

from .params import F32, FAST_DIV, I32, I64, POINTER, TENSOR_MAP, Field, ParameterBlock, stride_fields

_ROW_AXES = ("batch", "head", "seq")

BACKWARD_ROWS = ParameterBlock(
    (
        Field("dout", POINTER, ""),
        Field("out", POINTER, ""),
        Field("lse", POINTER, ""),
        Field("dlse", POINTER, "null: zero"),
        Field("rows", POINTER, "row constants"),
        Field("dq_sums", POINTER, ""),
        Field("turns", POINTER, "null: dQ is summed in any order"),
        Field("counts", POINTER, "null: there are none"),
        *stride_fields("dout"),
        *stride_fields("out"),
        *stride_fields("lse", _ROW_AXES),
        *stride_fields("dlse", _ROW_AXES),
        Field("heads", FAST_DIV, "query heads"),
        Field("row_tiles", FAST_DIV, "kRowTile rows each, of a head; padded to whole query tiles"),
        Field("seqlen_q", I32, ""),
        Field("counted", I32, "counts to clear"),
        Field("cleared_tiles", I32, "row tiles whose sums of dQ are to be cleared, the first"),
    ),
    per_launch=8,
)

_MAIN = (
    Field("heads", FAST_DIV, "key/value heads, times shares"),
    Field("section_tiles", FAST_DIV, "key tiles of a section's heads"),
    Field("section", FAST_DIV, "of these, those that share the L2"),
    Field("last_section", FAST_DIV, "of these, those of the last section"),
    Field("batch_heads", I32, "batch * heads"),
    Field("heads_q", I32, "query heads"),
    Field("group", I32, "query heads of each"),
    Field("seqlen_q", I32, ""),
    Field("seqlen_k", I32, ""),
    Field("causal_offset", I32, "query i sees keys j <= i + causal_offset"),
    Field("m_tiles", I32, "query tiles of a head"),
    Field("n_tiles", I32, "key tiles of a head"),
    Field("scale", F32, ""),
    Field("scale_log2", F32, "scale * log2(e)"),
)
"""What the main kernels of both families have behind what follows from addresses."""

BACKWARD_SM80 = ParameterBlock(
    (
        Field("dout", POINTER, ""),
        Field("q", POINTER, ""),
        Field("k", POINTER, ""),
        Field("v", POINTER, ""),
        Field("dk", POINTER, ""),
        Field("dv", POINTER, ""),
        Field("rows", POINTER, "row constants"),
        Field("dq_sums", POINTER, ""),
        Field("turns", POINTER, "null: dQ is summed in any order"),
        *(field for tensor in ("dout", "q", "k", "v", "dk", "dv") for field in stride_fields(tensor)),
        *_MAIN,
    ),
    per_launch=9,
)

_WORKSPACE = (
    Field("rows", POINTER, "row constants"),
    Field("dq_sums", POINTER, ""),
    Field("turns", POINTER, "null: dQ is summed in any order"),
    Field("counts", POINTER, "of tiles: taken; joined; that cleared sums; that added to them. Of pieces of dQ: taken"),
    Field("kv_sums", POINTER, "of dK and dV, where tiles share their keys"),
    Field("dq", POINTER, "null: a kernel of its own makes it of the sums"),
)

_PERSISTENT = (
    *_MAIN,
    Field("work_tiles", I32, "key tiles of all heads"),
    Field("cleared_heads", I32, "heads, shares counted, whose sums of dQ are clear at the start"),
    Field("first_cleared", I32, "place of the counts of tiles: that cleared a head's sums, then that added to them"),
    Field("shares", FAST_DIV, "of the query heads of a key/value head, each of which counts as a head"),
    Field("turn_group", FAST_DIV, "key tiles that add in turns together"),
    Field("turn_shift", I32, "query tiles from where a key tile starts to where the next does; 0: all start alike"),
    *stride_fields("dq"),
)
"""What the persistent kernels have behind what follows from addresses."""

BACKWARD_SM90 = ParameterBlock(
    (
        *(Field(f"{tensor}_map", TENSOR_MAP, "") for tensor in ("q", "k", "v", "dout", "dk", "dv")),
        *_WORKSPACE,
        *_PERSISTENT,
    ),
    per_launch=12,
)

BACKWARD_WIDE = ParameterBlock(
    (
        *(Field(f"{tensor}_map", TENSOR_MAP, "") for tensor in ("q", "k", "v", "dout")),
        Field("dk", POINTER, ""),
        Field("dv", POINTER, ""),
        *_WORKSPACE,
        *stride_fields("dk"),
        *stride_fields("dv"),
        *_PERSISTENT,
    ),
    per_launch=12,
)

BACKWARD_DQ = ParameterBlock(
    (
        Field("rows", POINTER, "row constants"),
        Field("dq_sums", POINTER, ""),
        Field("dq", POINTER, ""),
        *stride_fields("dq"),
        Field("heads", FAST_DIV, "query heads"),
        Field("row_tiles", FAST_DIV, "kRowTile rows each, of a head; padded to whole query tiles"),
        Field("row_blocks", I64, "16 rows each, of all heads"),
        Field("seqlen_q", I32, ""),
        Field("scale", F32, ""),
    ),
    per_launch=3,
)
