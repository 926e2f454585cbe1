"""A call of attention on 8-bit operands before it is made: its options, its checks, and what they find."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, cast

from .arrays import CPU, FLOAT8_DTYPES, Kind, Operand, is_float8, kind_of
from .checks import (
    check_causal,
    check_flag,
    check_layout,
    check_scale,
    check_shapes,
    check_written,
    request_for,
)
from .errors import UnsupportedError
from .fp8 import E4M3
from .fp8_layout import IMAGE, ROWS, Role
from .quantization import adopt
from .quantized import QuantizedTensor
from .request import Causal

if TYPE_CHECKING:
    from .float8_arrays import Float8Arrays
    from .quantize_plan import Sources

__all__ = [
    "FAST", "NO_SCALES", "OUT_DTYPES", "Foreseen", "Options", "QuantizedCall", "Scales", "check_precision",
    "check_quantized", "checked_call", "foresee", "is_quantized", "refuse_backward", "takes_scales",
]  # fmt: skip

Strides: TypeAlias = tuple[int, int, int]

OUT_DTYPES = ("float16", "bfloat16", "float32")
"""On a GPU the first two."""
FAST = "fp8-fast"
PRECISIONS = (None, "fp8", FAST)

Scales: TypeAlias = Mapping[str, Any]
"""Of 8-bit arrays, by the operand's name; None: 1."""
NO_SCALES: Scales = {"q": None, "k": None, "v": None}


class Options(NamedTuple):
    """What a caller of `cuflash.attention` asks for beside arrays and scales, unchecked; part of a plan's key."""

    causal: Any = False
    scale: Any = None
    layout: Any = "bshd"
    return_lse: Any = False
    precision: Any = None
    out_dtype: Any = None


class QuantizedCall(NamedTuple):
    """One checked call of quantized tensors.

    Attributes
    ----------
    q, k, v : QuantizedTensor
        Of one kind, device, layout and rotation.
    causal : {False, "bottom_right", "top_left"}
    scale : float
    return_lse : bool
    out : array or None
        None: a new one.
    out_dtype : {"float16", "bfloat16", "float32"}
    fast : bool
        A GPU's tensor cores sum the output, and truncate.
    strides : pair of (tuple of int or None)
        Of the codes of Q and of K, in bytes along (batch, seq, heads); None: as the quantizer leaves them.
    """

    q: QuantizedTensor
    k: QuantizedTensor
    v: QuantizedTensor
    causal: Causal
    scale: float
    return_lse: bool
    out: Any
    out_dtype: str
    fast: bool
    strides: tuple[Strides | None, Strides | None] = (None, None)

    @property
    def layout(self) -> str:
        return self.q.layout

    @property
    def kind(self) -> Kind:
        return self.q.kind

    @property
    def out_shape(self) -> tuple[int, ...]:
        """In the layout."""
        return (*self.q.shape[:3], self.v.head_dim)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        batch, seq, heads, _ = self.q.sizes
        return batch, heads, seq


def check_precision(precision: Any) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; accepted are {', '.join(map(repr, PRECISIONS))}")


def is_quantized(q: Any, options: Options) -> bool:
    """Whether a call is of quantized tensors; if not, that it asks to quantize arrays."""
    check_precision(options.precision)
    quantized = isinstance(q, QuantizedTensor)
    if not quantized and options.precision is None:
        raise TypeError("out_dtype is for quantized operands; without precision='fp8' the result has the dtype of q")
    return quantized


def refuse_backward(q: Any, precision: Any) -> NoReturn:
    """Of `cuflash.explain` and `cuflash.warmup`, which can be asked for gradients."""
    codes = isinstance(q, QuantizedTensor) or is_float8(q)
    hint = "" if codes or precision is None else ", or a call without precision"
    raise UnsupportedError(f"backward is True; quantized operands have no gradients: accepted is False{hint}")


def takes_scales(q: Any, scales: Scales) -> bool:
    """Whether a call is of 8-bit arrays; if not, that it has no scales for such."""
    if is_float8(q):
        return True
    given = [f"{role}_scale" for role, x in scales.items() if x is not None]
    if given and isinstance(q, QuantizedTensor):
        raise TypeError(f"{given[0]} is given and q is a QuantizedTensor, which has scales: leave it out")
    dtype = getattr(q, "dtype", None)
    if given and dtype is not None:
        name = str(dtype).rpartition(".")[2]
        raise TypeError(
            f"{given[0]} is for operands of {' and '.join(FLOAT8_DTYPES)}, and q has dtype {name}: leave it out"
        )
    return bool(given)  # an array without a dtype is viewed first


def check_quantized(q: Any, k: Any, v: Any, options: Options, out: Any = None) -> QuantizedCall:
    """Check a call whole, before anything is allocated or launched."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, QuantizedTensor):
            raise TypeError(
                f"{name} is a {type(x).__qualname__} and others are quantized; all three must be QuantizedTensors: "
                "cuflash.quantize_qkv(q, k, v) makes them"
            )
        if x.role != name:
            raise ValueError(f"{name} was quantized as {x.role!r}; quantize it with role={name!r}")
        _check_fellow(q, x, name)
    if q.seed != k.seed:
        raise ValueError(f"q is rotated with seed {q.seed} and k with {k.seed}; rotate both alike, or neither (None)")
    layout = options.layout
    if layout is not None and check_layout(layout) not in ("bshd", q.layout):
        raise ValueError(f"layout is {layout!r}; the tensors were quantized in {q.layout!r}, which the result has, too")
    check_shapes(_Named("q", q.shape), _Named("k", k.shape), _Named("v", v.shape), q.layout)
    return checked_call(q, k, v, options, out)


def checked_call(
    q: QuantizedTensor,
    k: QuantizedTensor,
    v: QuantizedTensor,
    options: Options,
    out: Any,
    strides: tuple[Strides | None, Strides | None] = (None, None),
) -> QuantizedCall:
    """The call of tensors that are checked, once its options and ``out`` are as well."""
    call = QuantizedCall(
        q,
        k,
        v,
        check_causal(options.causal),
        check_scale(options.scale, q.head_dim, on_gpu=q.device != CPU),
        check_flag("return_lse", options.return_lse),
        out,
        check_out_dtype(q, options.out_dtype),
        options.precision == FAST,
        strides,
    )
    if out is not None:
        check_out(call)
    return call


class Foreseen(NamedTuple):
    """A checked call that is not made.

    Attributes
    ----------
    call : QuantizedCall
        Of arrays that would be quantized or prepared on the way: with tensors that have their sizes, and no codes.
    sources : Sources or Float8Arrays or None
        These arrays.
    """

    call: QuantizedCall
    sources: Sources | Float8Arrays | None


def foresee(q: Any, k: Any, v: Any, options: Options, out: Any, scales: Scales = NO_SCALES) -> Foreseen:
    """Check a call of quantized tensors, of 8-bit arrays, or of arrays that would be quantized on the way."""
    if takes_scales(q, scales):
        from .float8_attention import foresee_float8, view_foreign

        check_precision(options.precision)
        views, scales = view_foreign({"q": q, "k": k, "v": v} | ({} if out is None else {"out": out}), scales)
        return foresee_float8(**views, scales=scales, options=options)
    if is_quantized(q, options):
        return Foreseen(check_quantized(q, k, v, options, out), None)
    from .quantize_plan import Sources

    kind = kind_of(q)
    what = f"attention with precision={options.precision!r}"
    if kind is not None and (refusal := kind.refusal({"q": q, "k": k, "v": v}, what)):
        raise UnsupportedError(refusal)
    causal, scale, layout, return_lse = options[:4]
    request = request_for((q, k, v), None, causal=causal, scale=scale, layout=layout, return_lse=return_lse)
    operands = {x.name: adopt(x.name, x.array) for x in (request.q, request.k, request.v)}
    q8, k8, v8 = (_as_if_quantized(x, request.layout) for x in operands.values())
    call = checked_call(q8, k8, v8, options, out)
    return Foreseen(call, Sources(operands, request.layout, e5m2=False, seed=None, center=True))


def _as_if_quantized(x: Operand, layout: str) -> QuantizedTensor:
    """What `cuflash.quantize_qkv` makes of an array by default, as far as sizes go."""
    role, mean = cast(Role, x.name), None if x.name == "q" else x.array
    shape = cast("tuple[int, int, int, int]", tuple(x.shape))
    storage = IMAGE if role == "v" else ROWS
    return QuantizedTensor(x.array, x.array, mean, E4M3.name, role, layout, storage, shape, x.dtype)


class _Named(NamedTuple):
    name: str
    shape: tuple[int, ...]


def _check_fellow(q: QuantizedTensor, x: QuantizedTensor, name: str) -> None:
    if x.kind is not q.kind:
        raise TypeError(f"q is of {q.kind.LABEL}s and {name} of {x.kind.LABEL}s; all must be of one kind")
    for what in ("device", "layout"):
        mine, other = getattr(q, what), getattr(x, what)
        if mine != other:
            raise ValueError(f"q has {what} {mine!r} and {name} has {other!r}; all must have the same")


def check_out_dtype(q: QuantizedTensor, out_dtype: Any) -> str:
    accepted = OUT_DTYPES if q.device == CPU else OUT_DTYPES[:2]
    name = q.source_dtype if out_dtype is None else str(out_dtype).rpartition(".")[2].removesuffix("'>")
    if name not in accepted:
        raise ValueError(f"out_dtype is {name!r}; accepted are {', '.join(map(repr, accepted))}")
    return name


def check_out(call: QuantizedCall) -> None:
    kind = kind_of(call.out)
    if kind is not call.kind:
        found = type(call.out).__qualname__ if kind is None else kind.LABEL
        raise TypeError(f"out is a {found} and q is of {call.kind.LABEL}s; all must be of one kind")
    out = call.kind.operand("out", call.out)
    if out.device != call.q.device:
        raise ValueError(f"out is on {out.place} and q is not; all arrays of a call must be on one device")
    if out.dtype != call.out_dtype:
        raise TypeError(f"out has dtype {out.dtype} and the result {call.out_dtype}: pass out_dtype={out.dtype!r}")
    check_written(out, call.out_shape, "this call's output has")
