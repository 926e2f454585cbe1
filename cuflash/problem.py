"""What is computed: everything about a call that changes the generated code, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Dtype = Literal["float16", "bfloat16"]
InputDtype = Literal["float8_e4m3fn", "float8_e5m2"]
Mask = Literal["full", "causal"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
INPUT_DTYPES: tuple[InputDtype, ...] = get_args(InputDtype)
MASKS: tuple[Mask, ...] = get_args(Mask)
Task = Literal[
    "forward", "backward_rows", "backward", "backward_dq", "quantize_means", "quantize", "quantize_lse", "prepare"
]  # fmt: skip
TASKS: tuple[Task, ...] = get_args(Task)
MASKLESS: tuple[Task, ...] = (
    "backward_rows", "backward_dq", "quantize_means", "quantize", "quantize_lse", "prepare",
)  # fmt: skip

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One kernel's worth of decisions made by the caller.

    Head counts, strides, the scale and the causal offset are run-time parameters, and so are lengths, but for one bit.

    Parameters
    ----------
    head_dim, head_dim_v : int
        D of Q and K, and Dv of V and the output; 1 to 256.
    dtype : {"float16", "bfloat16"}
        Type of Q, K, V and the output; of the output alone where there is an ``input_dtype``.
    mask : {"full", "causal"}
        Both causal alignments are the same code: the offset is a run-time parameter.
    access_bytes : {16, 8, 4, 2}
        The widest global access that every pointer, stride and head dim allows. 2 is the scalar variant,
        which also honours a stride on the last axis; of the task ``"prepare"``, whose elements are bytes, 1.
    scale_first : bool
        Multiply the scores by the scale before the softmax instead of folding it into the exponential: for
        scales that are zero, negative, or so small or large that their reciprocal is useless.
    arch : str
        Compile target, for example ``"sm_90"``. ``"sm_90a"`` has kernels of its own, which load by TMA.
    task : str
        One of `TASKS`, what the kernel computes: the forward pass; of the backward pass, the constants of the query
        rows, the gradients, or dQ from its sums; of the quantizer, means or codes, or what the means add to the LSE;
        what kernels read of the caller's 8-bit arrays. Those beside the products know no mask: theirs is ``"full"``.
    short : bool
        There are few queries, and the tuning table has a row of its own for that.
    input_dtype : {"float8_e4m3fn", "float8_e5m2"}, optional
        Type of quantized Q, K and V.
    one_level : bool
        Of these: leave the output's sum to the tensor cores, which is faster, and right where V has no mean.
    k_dtype, v_dtype : {"float8_e4m3fn", "float8_e5m2"}, optional
        Type of quantized K and of V where it is not ``input_dtype``.
    """

    head_dim: int
    head_dim_v: int
    dtype: Dtype
    mask: Mask
    access_bytes: int
    scale_first: bool
    arch: str
    task: Task = "forward"
    short: bool = False
    input_dtype: InputDtype | None = None
    one_level: bool = False
    k_dtype: InputDtype | None = None
    v_dtype: InputDtype | None = None

    def __post_init__(self) -> None:
        for name, value in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if not 1 <= value <= MAX_HEAD_DIM:
                raise ValueError(f"{name} is {value}; accepted are 1 to {MAX_HEAD_DIM}")
        words = (("dtype", self.dtype, DTYPES), ("mask", self.mask, MASKS), ("task", self.task, TASKS))
        for name, word, accepted in words:
            if word not in accepted:
                raise ValueError(f"{name} is {word!r}; accepted are {', '.join(accepted)}")
        if self.task in MASKLESS and self.mask != "full":
            raise ValueError(f"mask is {self.mask!r}; task {self.task!r} knows none: accepted is full")
        if self.task != "forward" and self.scale_first:
            raise ValueError(f"scale_first is True; task {self.task!r} has no such variant: accepted is False")
        if self.input_dtype not in (None, *INPUT_DTYPES):
            raise ValueError(f"input_dtype is {self.input_dtype!r}; accepted are None, {', '.join(INPUT_DTYPES)}")
        if self.input_dtype and (self.task != "forward" or self.access_bytes != 16):
            raise ValueError(
                f"input_dtype is {self.input_dtype!r}; accepted is that of a forward pass, 16 bytes at a time"
            )
        if self.input_dtype and (self.head_dim % 16 or self.head_dim_v % 16):
            raise ValueError(
                f"head_dim is {self.head_dim} and head_dim_v {self.head_dim_v}; accepted are multiples of 16 with an "
                "input_dtype: the quantizer pads rows"
            )
        if self.one_level and not self.input_dtype:
            raise ValueError("one_level is True; accepted is that with an input_dtype")
        for name, other in (("k_dtype", self.k_dtype), ("v_dtype", self.v_dtype)):
            if other is not None and (not self.input_dtype or other == self.input_dtype or other not in INPUT_DTYPES):
                raise ValueError(f"{name} is {other!r}; accepted is None, or what input_dtype is not")
        narrowest = 1 if self.task == "prepare" else 2
        if self.access_bytes not in (16, 8, 4, narrowest):
            raise ValueError(f"access_bytes is {self.access_bytes}; accepted are 16, 8, 4 and {narrowest}")

    @property
    def formats(self) -> tuple[str, ...]:
        """Of quantized Q, K and V, as instructions name them: ``"e4m3"`` or ``"e5m2"``."""
        found = (self.input_dtype, self.k_dtype or self.input_dtype, self.v_dtype or self.input_dtype)
        return tuple(dtype.removeprefix("float8_").removesuffix("fn") for dtype in found if dtype)

    @property
    def input_bytes(self) -> int:
        """Of an element of Q, K or V."""
        return 1 if self.input_dtype else 2
