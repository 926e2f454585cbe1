"""Attention on quantized operands: checks, the CPU's computation, and the door to the GPU's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from .dequantized import Dequantized
from .errors import UnsupportedError
from .fp8 import E4M3
from .fp8_layout import IMAGE, ROWS, Role, by_head
from .jit import QUANTIZED_PLANS, QUANTIZING_PLANS
from .quantization import adopt, quantize_qkv
from .quantized import QuantizedTensor
from .request import Causal

if TYPE_CHECKING:
    from .float8_arrays import Float8Arrays
    from .quantize_plan import Sources

__all__ = [
    "Foreseen", "QuantizedCall", "Scales", "attend", "attend_on_cpu", "attention_quantized", "attention_quantizing",
    "check_out", "check_out_dtype", "foresee", "is_quantized", "refuse_backward", "warm_up",
]  # fmt: skip

Strides: TypeAlias = tuple[int, int, int]

OUT_DTYPES = ("float16", "bfloat16", "float32")
"""On a GPU the first two."""
FAST = "fp8-fast"
PRECISIONS = (None, "fp8", FAST)

Scales: TypeAlias = Mapping[str, Any]
"""Of 8-bit arrays, by the operand's name; None: 1."""
NO_SCALES: Scales = {"q": None, "k": None, "v": None}


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


def is_quantized(q: Any, precision: Any, out_dtype: Any) -> bool:
    """Whether a call is of quantized tensors; if not, that it asks to quantize arrays."""
    check_precision(precision)
    quantized = isinstance(q, QuantizedTensor)
    if not quantized and precision is None:
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


def attend(q: Any, k: Any, v: Any, *, precision: Any, scales: Scales, **options: Any) -> Any:
    """`cuflash.attention` of quantized tensors, of 8-bit arrays, or of arrays that shall be quantized."""
    if takes_scales(q, scales):
        from .float8_attention import attention_float8

        check_precision(precision)
        return attention_float8(q, k, v, scales, precision=precision, **options)
    if is_quantized(q, precision, options["out_dtype"]):
        return attention_quantized(q, k, v, precision=precision, **options)
    return attention_quantizing(q, k, v, precision=precision, **options)


def attention_quantizing(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Any,
    scale: Any,
    layout: Any,
    return_lse: Any,
    out: Any,
    out_dtype: Any,
    precision: Any,
) -> Any:
    """`cuflash.attention` with a ``precision``: quantizes, then attends."""
    kind = kind_of(q)
    if kind is None:
        from .arrays import bridge

        if bridge.is_traced(q, k, v):
            raise UnsupportedError(
                "precision='fp8' is not for JAX tracers: call it outside of jax.jit, jax.grad, jax.vmap and the like, "
                "or without precision"
            )
        options = {"causal": causal, "scale": scale, "layout": layout, "return_lse": return_lse}
        options |= {"out_dtype": out_dtype, "precision": precision}
        outputs = {} if out is None else {"out": out}
        return bridge.call(
            lambda views: attention_quantizing(**{"out": None, **views}, **options), {"q": q, "k": k, "v": v}, outputs
        )
    out_key, out_at, at = None, 0, {}
    key: Any
    try:
        geometry = kind.geometry
        (q_key, at["q"]), (k_key, at["k"]), (v_key, at["v"]) = geometry(q), geometry(k), geometry(v)
        if out is not None:
            out_key, out_at = geometry(out)
        bits = (at["q"] | at["k"] | at["v"] | out_at) & 15
        key = (q_key, k_key, v_key, out_key, bits, causal, scale, layout, return_lse, out_dtype, precision)
        plan = QUANTIZING_PLANS.get(key)
    except (AttributeError, TypeError, RuntimeError):  # on the CPU, followed, or not what it should be: checked below
        key = plan = None
    if plan is None:
        options = {"causal": causal, "scale": scale, "return_lse": return_lse, "out": out, "out_dtype": out_dtype}
        options["precision"] = precision
        foreseen = foresee(q, k, v, layout=layout, **options)
        call = foreseen.call
        if call.q.device == CPU:
            quantized = quantize_qkv(q, k, v, layout=call.layout)
            return attention_quantized(*quantized, **options | {"out_dtype": call.out_dtype})
        from .quantized_plan import quantizing_plan_for

        plan = quantizing_plan_for(foreseen, key)
        at = {name: call.kind.operand(name, x).address for name, x in (("q", q), ("k", k), ("v", v))}
        out_at = 0 if out is None else call.kind.operand("out", out).address
    return plan.run(q, at, out, out_at)


def attention_quantized(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Any,
    scale: Any,
    layout: Any = None,
    return_lse: Any,
    out: Any = None,
    out_dtype: Any = None,
    precision: Any = None,
) -> Any:
    """`cuflash.attention` of quantized tensors."""
    out_key, out_at = None, 0
    key: Any
    try:
        if out is not None:
            out_key, out_at = q.kind.geometry(out)
        options = (causal, scale, layout, return_lse, out_dtype, precision)
        key = (q.traits, k.traits, v.traits, out_key, out_at & 15, *options)
        plan = QUANTIZED_PLANS.get(key)
    except (AttributeError, TypeError, RuntimeError):  # on the CPU, or not what it should be: checked below
        key = plan = None
    if plan is None:
        call = check_quantized(
            q,
            k,
            v,
            causal=causal,
            scale=scale,
            layout=layout,
            return_lse=return_lse,
            out=out,
            out_dtype=out_dtype,
            precision=precision,
        )
        if call.q.device == CPU:
            return attend_on_cpu(call, [Dequantized.of(x) for x in (call.q, call.k, call.v)])
        from .quantized_plan import plan_for

        plan = plan_for(call, key)
        out_at = 0 if out is None else call.kind.operand("out", out).address
    return plan.run(q, k, v, out, out_at)


def check_quantized(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Any,
    scale: Any,
    layout: Any,
    return_lse: Any,
    out: Any,
    out_dtype: Any,
    precision: Any = None,
) -> QuantizedCall:
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
    if layout is not None and check_layout(layout) not in ("bshd", q.layout):
        raise ValueError(f"layout is {layout!r}; the tensors were quantized in {q.layout!r}, which the result has, too")
    check_shapes(_Named("q", q.shape), _Named("k", k.shape), _Named("v", v.shape), q.layout)
    call = QuantizedCall(
        q,
        k,
        v,
        check_causal(causal),
        check_scale(scale, q.head_dim, on_gpu=q.device != CPU),
        check_flag("return_lse", return_lse),
        out,
        check_out_dtype(q, out_dtype),
        precision == FAST,
    )
    if out is not None:
        check_out(call)
    return call


def check_foreseeable(q: Any, precision: Any, scales: Scales, out_dtype: Any) -> None:
    """That a call is of quantized tensors, of 8-bit arrays, or asks to quantize arrays."""
    if takes_scales(q, scales):
        check_precision(precision)
    else:
        is_quantized(q, precision, out_dtype)


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


def foresee(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Any,
    scale: Any,
    layout: Any,
    return_lse: Any,
    out: Any,
    out_dtype: Any,
    precision: Any,
    scales: Scales = NO_SCALES,
) -> Foreseen:
    """Check a call of quantized tensors, of 8-bit arrays, or of arrays that would be quantized on the way."""
    options: dict[str, Any] = {"causal": causal, "scale": scale, "layout": layout, "return_lse": return_lse}
    if takes_scales(q, scales):
        from .float8_attention import foresee_float8, view_foreign

        views, scales = view_foreign({"q": q, "k": k, "v": v} | ({} if out is None else {"out": out}), scales)
        options |= {"out_dtype": out_dtype, "precision": precision}
        return foresee_float8(**{"out": None, **views}, scales=scales, **options)
    if isinstance(q, QuantizedTensor):
        options["precision"] = precision
        return Foreseen(check_quantized(q, k, v, **options, out=out, out_dtype=out_dtype), None)
    from .quantize_plan import Sources

    kind = kind_of(q)
    what = f"attention with precision={precision!r}"
    if kind is not None and (refusal := kind.refusal({"q": q, "k": k, "v": v}, what)):
        raise UnsupportedError(refusal)
    request = request_for((q, k, v), None, **options)
    operands = {x.name: adopt(x.name, x.array) for x in (request.q, request.k, request.v)}
    q8, k8, v8 = (_as_if_quantized(x, request.layout) for x in operands.values())
    dtype = check_out_dtype(q8, out_dtype)
    fast = precision == FAST
    call = QuantizedCall(q8, k8, v8, request.causal, request.scale, request.return_lse, out, dtype, fast)
    if out is not None:
        check_out(call)
    return Foreseen(call, Sources(operands, request.layout, e5m2=False, seed=None, center=True))


def _as_if_quantized(x: Operand, layout: str) -> QuantizedTensor:
    """What `cuflash.quantize_qkv` makes of an array by default, as far as sizes go."""
    role, mean = cast(Role, x.name), None if x.name == "q" else x.array
    shape = cast("tuple[int, int, int, int]", tuple(x.shape))
    storage = IMAGE if role == "v" else ROWS
    return QuantizedTensor(x.array, x.array, mean, E4M3.name, role, layout, storage, shape, x.dtype)


def warm_up(q: Any, k: Any, v: Any, *, precision: Any, scales: Scales, **options: Any) -> tuple[str, ...]:
    """`cuflash.warmup` of such calls."""
    check_foreseeable(q, precision, scales, options["out_dtype"])
    foreseen = foresee(q, k, v, precision=precision, scales=scales, **options)
    call, sources = foreseen
    if call.q.device == CPU:
        return ()
    from . import quantized_plan

    quantized_plan.check_foreseen_gpu(foreseen)
    launches = () if sources is None else quantized_plan.make_plan_of_sources(sources).launches
    plan = quantized_plan.make_plan(call)
    launches += () if plan.shift is None else plan.shift.launches
    loaded = [launch.loaded for launch in launches] + ([] if plan.attend is None else [plan.attend.loaded])
    return tuple(each.kernel.symbol for each in loaded)


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


# --- computation -----------------------------------------------------------------------------------------------


def attend_on_cpu(call: QuantizedCall, operands: Sequence[Dequantized]) -> Any:
    """The quantized function without further rounding: attention of the dequantized operands, which exist by tiles."""
    from .cpu import Array, attention_cpu

    kind, q = call.kind, call.q
    out = call.out
    if out is None:
        if call.out_dtype == "bfloat16":
            import ml_dtypes  # noqa: F401  # NumPy knows the name from then on
        out, _ = kind.empty(q.payload, call.out_shape, call.out_dtype)
    kind.written(out)
    lse = kind.empty(q.payload, call.lse_shape, "float32")[0] if call.return_lse else None
    attention_cpu(
        *(cast(Array, x) for x in operands),
        causal=call.causal,
        scale=call.scale,
        out=kind.numpy(out).transpose(by_head(call.layout)),
        lse=None if lse is None else kind.numpy(lse),
    )
    return out if lse is None else (out, lse)
