"""Checks a call whole, before anything is allocated, compiled or launched."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from .arrays import CPU, FLOAT8_DTYPES, GPU_DTYPES, ITEM_BYTES, Operand, kind_of
from .errors import UnsupportedError
from .problem import MAX_HEAD_DIM
from .request import AXES, FLOAT32_MAX, LARGEST_FACTOR, LOG2_E, SMALLEST_FACTOR, Causal, Request

MAX_LENGTH = 2**31 - 1024
"""Kernels count rows and keys in 32 bits and go at most a tile beyond the end."""

MAX_BATCH_HEADS = 2**31 - 1

EXACT_OVERLAP_WORK = 100_000
"""Steps that NumPy may take to tell interleaved arrays apart: milliseconds."""

BOOLEAN = (numbers.Real, np.bool_)


def request_for(arrays: Sequence[Any], out: Any, **options: Any) -> Request:
    """`make_request` for arrays of every kind, where nothing is computed: foreign ones are viewed first."""
    kind = kind_of(arrays[0])
    if kind is None:
        from .arrays import bridge

        viewed = bridge.views(dict(zip("qkv", arrays, strict=True)), {} if out is None else {"out": out})
        arrays, out = [viewed[name] for name in "qkv"], viewed.get("out")
    else:
        arrays = [kind.plain(x) for x in arrays]
    return make_request(arrays, out, **options)


def make_request(arrays: Sequence[Any], out: Any, *, causal: Any, scale: Any, layout: Any, return_lse: Any) -> Request:
    """Check a call of plain arrays, (q, k, v), whole: nothing is launched or allocated before.

    Raises
    ------
    ValueError
        Shapes, layout, mask, scale, devices; an ``out`` that cannot be written as asked.
    TypeError
        Element types; arguments that are not arrays, or of different frameworks.
    UnsupportedError
        A legal request that cuflash does not serve.
    """
    request = check_call(arrays, out, causal=causal, scale=scale, layout=layout, return_lse=return_lse)
    if request.device != CPU:
        check_gpu(request)
    return request


def check_call(
    arrays: Sequence[Any], out: Any, *, causal: Any, scale: Any, layout: Any, return_lse: Any = False
) -> Request:
    """What `make_request` checks wherever the arrays are."""
    layout = check_layout(layout)
    operands = _adopt(dict(zip(("q", "k", "v"), arrays, strict=True)) | ({} if out is None else {"out": out}))
    q, k, v = operands[:3]
    check_shapes(q, k, v, layout)
    request = Request(
        q=q,
        k=k,
        v=v,
        out=operands[3] if out is not None else None,
        layout=layout,
        causal=check_causal(causal),
        scale=check_scale(scale, q.shape[3], on_gpu=q.device != CPU),
        return_lse=check_flag("return_lse", return_lse),
    )
    if request.out is not None:
        check_written(request.out, request.out_shape, "this call's output has")
    return request


# --- options ---------------------------------------------------------------------------------------------------
# A value is accepted for being equal to an accepted one (1 and numpy.True_ for True): so are dictionary keys, and a
# call must not depend on what was called before.


def check_layout(layout: Any) -> str:
    if not isinstance(layout, str) or layout not in AXES:
        raise ValueError(
            f"layout is {layout!r}; accepted are 'bshd' = (batch, seq, heads, dim) "
            "and 'bhsd' = (batch, heads, seq, dim)"
        )
    return layout


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, BOOLEAN) or value not in (False, True):
        raise TypeError(f"{name} is {value!r}; accepted are True and False")
    return bool(value)


def check_causal(causal: Any) -> Causal:
    if isinstance(causal, str):
        if causal in ("bottom_right", "top_left"):
            return cast(Causal, causal)
    elif isinstance(causal, BOOLEAN) and causal in (False, True):
        return "bottom_right" if causal else False
    raise ValueError(
        f"causal is {causal!r}; accepted are False, True (= 'bottom_right': query i sees keys j <= i + Nk - Nq) "
        "and 'top_left' (j <= i)"
    )


def check_number(scale: Any) -> float:
    """A scale that is given, as a float: infinite where it is beyond those."""
    if not isinstance(scale, BOOLEAN):
        raise TypeError(
            f"scale is a {type(scale).__qualname__}; accepted are real numbers and None (= 1/sqrt(head dim))"
        )
    try:
        return float(scale)
    except OverflowError:  # an integer beyond float64
        return math.inf


def check_factor(name: str, value: Any) -> float:
    """A number that gives the real values of 8-bit codes back, as a float."""
    try:
        factor = float(value)
    except OverflowError:  # an integer beyond float64
        factor = math.inf
    if not SMALLEST_FACTOR <= factor <= LARGEST_FACTOR:
        raise ValueError(f"{name} is {factor!r}; accepted are positive numbers from 2^-126 to 2^119")
    return factor


def check_factors_dtype(name: str, factors: Any) -> None:
    """That an array of such numbers is of float32; what is no array is left to other checks."""
    dtype = str(getattr(factors, "dtype", "float32")).rpartition(".")[2]
    if dtype != "float32":
        raise TypeError(f"{name} has dtype {dtype}; accepted are numbers and float32 arrays: cast it to float32")


def check_scale(scale: Any, head_dim: int, *, on_gpu: bool) -> float:
    """The scale of a call, as a float."""
    if scale is None:
        return 1 / math.sqrt(head_dim)
    value = check_number(scale)
    if not math.isfinite(value):
        raise ValueError(f"scale is {value}; accepted is any finite number")
    if on_gpu and abs(value) * LOG2_E > FLOAT32_MAX:
        raise ValueError(f"scale is {value}; on the GPU scale * log2(e) must be finite in float32 (below 3.4e38)")
    return value


# --- arrays ----------------------------------------------------------------------------------------------------


def _adopt(arrays: dict[str, Any]) -> list[Operand]:
    operands: list[Operand] = []
    for name, x in arrays.items():
        kind = kind_of(x)
        if kind is None:
            from .arrays import bridge

            raise TypeError(bridge.mixed(operands[0].kind.LABEL, name, bridge.label(name, x)))
        operands.append(kind.operand(name, x))
        _refuse_float8(operands[-1])
    q = operands[0]
    for other in operands[1:]:
        check_fellow(q, other)
        if other.dtype != q.dtype:
            raise TypeError(
                f"q has dtype {q.dtype} and {other.name} {other.dtype}; all arrays of a call must have one dtype: "
                "cast one of them"
            )
    return operands


def _refuse_float8(x: Operand) -> None:
    if x.dtype in FLOAT8_DTYPES:
        raise UnsupportedError(
            f"{x.name} has dtype {x.dtype}; 8-bit floats are for cuflash.attention alone, q, k and v all of them, "
            "without gradients and outside of what torch or JAX compiles: call that (q_scale=, k_scale= and v_scale= "
            f"take their scales), or cast {x.name} to bfloat16 or float16"
        )


def check_fellow(q: Operand, other: Operand) -> None:
    """Refuse an array that is of another kind than Q, or elsewhere."""
    if other.kind is not q.kind:
        from .arrays import bridge

        raise TypeError(bridge.mixed(q.kind.LABEL, other.name, other.kind.LABEL))
    if other.device != q.device:
        raise ValueError(
            f"q is on {q.place} and {other.name} on {other.place}; all arrays of a call must be on one device"
        )


class Shaped(Protocol):
    """An argument that has a shape yet, but need not have memory."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def check_shapes(q: Shaped, k: Shaped, v: Shaped, layout: str) -> None:
    axes = "(batch, seq, heads, dim)" if layout == "bshd" else "(batch, heads, seq, dim)"
    for x in (q, k, v):
        if len(x.shape) != 4:
            raise ValueError(f"{x.name} has shape {x.shape}; layout={layout!r} takes four axes, {axes}")
    b, _, h, d = AXES[layout]
    given = f"q {q.shape}, k {k.shape}, v {v.shape} as {axes}"
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v differ in batch, seq or heads: {given}")
    if q.shape[b] != k.shape[b]:
        raise ValueError(
            f"q has batch {q.shape[b]} and k and v have {k.shape[b]}: {given}; broadcast them to one batch"
        )
    if q.shape[d] != k.shape[d]:
        raise ValueError(f"q has head dim {q.shape[d]} and k has {k.shape[d]}: {given}")
    heads, heads_k = q.shape[h], k.shape[h]
    if heads % heads_k if heads_k else heads:
        raise ValueError(
            f"q has {heads} heads and k and v have {heads_k}; the query heads must be a multiple of the key/value "
            f"heads: {given}{_other_layout(q, k, layout)}"
        )
    for x in (q, v):
        if x.shape[d] < 1:
            raise ValueError(f"{x.name} has head dim 0; accepted are 1 to {MAX_HEAD_DIM}: {given}")
        if x.shape[d] > MAX_HEAD_DIM:
            raise UnsupportedError(f"{x.name} has head dim {x.shape[d]}; cuflash takes 1 to {MAX_HEAD_DIM}: {given}")


def _other_layout(q: Shaped, k: Shaped, layout: str) -> str:
    """A hint where heads that do not fit look like lengths: axes in the order of the other layout."""
    other = "bhsd" if layout == "bshd" else "bshd"
    _, s, h, _ = AXES[other]
    heads, heads_k = q.shape[h], k.shape[h]
    fits = heads_k and heads % heads_k == 0 and heads < min(q.shape[s], k.shape[s])
    return f"; layout={other!r} fits, with {heads} and {heads_k} heads" if fits else ""


def check_written(out: Operand, shape: tuple[int, ...], whose: str) -> None:
    """Check an array that is to receive a result: its shape, and that all of its elements can be written."""
    if out.shape != shape:
        raise ValueError(f"{out.name} has shape {out.shape}; {whose} {shape}")
    if not out.writable:
        raise ValueError(f"{out.name} is read-only; pass a writable array")
    if 0 in out.shape:
        return
    reach = ITEM_BYTES[out.dtype]
    for stride, extent in sorted((abs(stride), extent) for stride, extent in zip(out.strides, out.shape, strict=True)):
        if extent > 1:
            if stride < reach:
                raise ValueError(
                    f"{out.name} has strides {out.strides} (bytes) for shape {out.shape}: elements share memory, as in "
                    "a broadcast array; pass one whose elements are apart"
                )
            reach += stride * (extent - 1)


def check_gpu(request: Request, others: Iterable[Operand] = ()) -> None:
    """Refuse what no GPU kernel takes, of a call's arrays and of others that come with them."""
    operands = [x for x in (request.q, request.k, request.v, request.out, *others) if x is not None]
    if request.q.dtype not in GPU_DTYPES:
        raise UnsupportedError(
            f"q, k and v have dtype {request.q.dtype}; the GPU kernels take float16 and bfloat16: cast them, "
            "for example q.astype('float16') or q.to(torch.bfloat16), or pass NumPy arrays to run on the CPU"
        )
    check_placed(operands)
    for name, length in (("q", request.seqlen_q), ("k and v", request.seqlen_k)):
        if length >= MAX_LENGTH:
            raise UnsupportedError(f"{name} has sequence length {length}; the GPU kernels take less than {MAX_LENGTH}")
    if request.batch * request.heads > MAX_BATCH_HEADS:
        raise UnsupportedError(
            f"batch * heads is {request.batch} * {request.heads}; the GPU kernels take up to {MAX_BATCH_HEADS} in all"
        )


def check_placed(operands: Iterable[Operand]) -> None:
    """Refuse arrays on a GPU whose elements are not aligned to their size."""
    for x in operands:
        item = ITEM_BYTES[x.dtype]
        if (
            any(stride % item for stride, extent in zip(x.strides, x.shape, strict=True) if extent > 1)
            or x.address % item
        ):
            raise ValueError(
                f"{x.name} lies at address {x.address:#x} with strides {x.strides} (bytes); "
                f"on the GPU they must be multiples of the element size, {item}"
            )


def check_apart(request: Request) -> None:
    """Refuse an ``out`` that shares memory with an input."""
    assert request.out is not None
    refuse_shared(request.out, (request.q, request.k, request.v))


def refuse_shared(out: Operand, others: Iterable[Operand]) -> None:
    """Refuse an array to write that shares memory with another.

    Arrays whose spans meet but whose elements do not, such as the parts of one packed array, are told apart exactly.
    """
    for x in others:
        try:
            shared = np.shares_memory(_outline(x), _outline(out), max_work=EXACT_OVERLAP_WORK)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            shared = True
        if shared:
            raise ValueError(f"{out.name} shares memory with {x.name}; pass an array of its own")


class _Outline:
    """Lets NumPy reason about memory that it must not touch."""

    def __init__(self, x: Operand) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (x.address, True),
            "typestr": f"|V{ITEM_BYTES[x.dtype]}",
            "shape": x.shape,
            "strides": x.strides,
        }


def _outline(x: Operand) -> Any:
    return np.asarray(_Outline(x))
