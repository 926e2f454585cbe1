"""The public calls that quantize."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from .arrays import CPU, Operand, bridge
from .checks import check_fellow, check_flag, check_layout, check_placed, check_shapes
from .errors import UnsupportedError
from .fp8 import Float8, Format, format_of
from .fp8_layout import IMAGE, ROLES, ROWS, TILE, Role, by_head, image_shape, pack_image, padded, tiles
from .problem import MAX_HEAD_DIM
from .quantized import QuantizedTensor
from .request import AXES

__all__ = ["quantize", "quantize_qkv"]

SOURCES = ("float16", "bfloat16", "float32")
QUANTIZE_FOREIGN = "cuflash.attention(q, k, v, precision='fp8') takes JAX arrays and others, and quantizes on the way"


def quantize(
    x: Any,
    *,
    role: Role,
    dtype: Float8 | Any = "float8_e4m3fn",
    layout: str = "bshd",
    hadamard: bool = False,
    center: bool = True,
    seed: int = 0,
) -> QuantizedTensor:
    """Quantize Q, K or V to 8-bit floats, with a scale for each tile of 128 tokens of a head.

    Parameters
    ----------
    x : array (batch, seq, heads, dim) or (batch, heads, seq, dim)
        CuPy or NumPy array or torch tensor of float16 or bfloat16, in host memory also of float32; any strides.
    role : {"q", "k", "v"}
        What it is in attention.
    dtype : {"float8_e4m3fn", "float8_e5m2"}
        Or torch's or ml_dtypes' type of that name. e4m3 has one bit more of precision, e5m2 a range of its own of 2^-16
        to 57344, which scales make unnecessary.
    layout : {"bshd", "bhsd"}
    hadamard : bool
        Rotate Q and K: random signs and Hadamard transforms along the head dim (in blocks of powers of two where it is
        none) spread outliers over all channels. Scores do not change, so both must be rotated, or neither. Nothing is
        done to V.
    center : bool
        Subtract from K and V the mean of each channel of a head. It costs attention nothing, removes the error that
        constant offsets cause, and is of no use for means that change along the sequence. Nothing is done to Q.
    seed : int
        Of the signs, with ``hadamard``; the same for Q and K.

    Returns
    -------
    QuantizedTensor
        On the device of ``x``; made on the current stream.

    Notes
    -----
    Means are those of a sample of the N tokens: every s-th one from token s // 2 on, where s is the larger of ceil(N /
    256) and of min(8, ceil(N / 128)). That is all of up to 128 tokens, and 64 to 256 of more. Any vector near the mean
    serves.

    Scales are the largest magnitude of a tile divided by the largest number of the format, and codes the nearest to
    the quotient of value and scale, ties to even. NaNs and infinities become NaN, and maxima and means leave them out.
    A tile of zeros has scale 1. `cuflash.cpu_quantize` has all of it, by the bit; NumPy and CUDA agree so.
    """
    if role not in ROLES:
        raise ValueError(f"role is {role!r}; accepted are 'q', 'k' and 'v'")
    options = _Options.checked(dtype, layout, hadamard, center, seed)
    operand = adopt("x", x)
    _check_dim(operand)
    return _quantize({role: operand}, options)[0]


def quantize_qkv(
    q: Any,
    k: Any,
    v: Any,
    *,
    dtype: Float8 | Any = "float8_e4m3fn",
    layout: str = "bshd",
    hadamard: bool = False,
    center: bool = True,
    seed: int = 0,
) -> tuple[QuantizedTensor, QuantizedTensor, QuantizedTensor]:
    """Quantize Q, K and V of a call of `cuflash.attention`, on a GPU with one kernel for all three.

    Parameters
    ----------
    q, k, v : arrays
        As for `cuflash.attention`; of the dtypes that `quantize` takes.
    dtype, layout, hadamard, center, seed
        As for `quantize`.

    Returns
    -------
    q8, k8, v8 : QuantizedTensor

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((1, 200, 2, 64), np.float32)
    >>> q8, k8, v8 = cuflash.quantize_qkv(q, k, v)
    >>> cuflash.attention(q8, k8, v8).shape
    (1, 200, 2, 64)
    """
    options = _Options.checked(dtype, layout, hadamard, center, seed)
    operands = {name: adopt(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    for name in ("k", "v"):
        check_fellow(operands["q"], operands[name])
        if operands[name].dtype != operands["q"].dtype:
            raise TypeError(
                f"q has dtype {operands['q'].dtype} and {name} {operands[name].dtype}; all arrays of a call must have "
                "one dtype: cast one of them"
            )
    check_shapes(operands["q"], operands["k"], operands["v"], options.layout)
    q8, k8, v8 = _quantize(operands, options)
    return q8, k8, v8


# --- checks ----------------------------------------------------------------------------------------------------


class _Options:
    """The options of a call, checked."""

    def __init__(self, form: Format, layout: str, seed: int | None, center: bool) -> None:
        self.form, self.layout, self.seed, self.center = form, layout, seed, center

    @classmethod
    def checked(cls, dtype: Any, layout: Any, hadamard: Any, center: Any, seed: Any) -> _Options:
        rotated = check_flag("hadamard", hadamard)
        if not isinstance(seed, int | np.integer) or isinstance(seed, bool):
            raise TypeError(f"seed is {seed!r}; accepted are integers")
        return cls(format_of(dtype), check_layout(layout), int(seed) if rotated else None, check_flag("center", center))


def adopt(name: str, x: Any) -> Operand:
    """Describe an array that is to be quantized, or refuse it."""
    operand = bridge.addressed(name, x, QUANTIZE_FOREIGN).operand(name, x)
    accepted = SOURCES if operand.device == CPU else SOURCES[:2]
    if operand.dtype not in accepted:
        raise UnsupportedError(f"{name} has dtype {operand.dtype}; accepted are {', '.join(accepted)}: cast it")
    if len(operand.shape) != 4:
        raise ValueError(f"{name} has shape {operand.shape}; accepted are four axes, those of the layout")
    return operand


def _check_dim(x: Operand) -> None:
    if not 1 <= x.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"{x.name} has head dim {x.shape[3]}; accepted are 1 to {MAX_HEAD_DIM}")


# --- computation -----------------------------------------------------------------------------------------------


def _quantize(operands: dict[str, Operand], options: _Options) -> list[QuantizedTensor]:
    """The operands by role, quantized."""
    first = next(iter(operands.values()))
    if first.device == CPU:
        results = [_new(cast(Role, role), x, options)[0] for role, x in operands.items()]
        for x, result in zip(operands.values(), results, strict=True):
            _fill_on_cpu(x, result, options)
        return results
    check_placed(operands.values())
    if first.kind.current_device() == first.device:
        return _quantize_on_gpu(operands, options)
    with first.kind.on_device(first.device):
        return _quantize_on_gpu(operands, options)


def _quantize_on_gpu(operands: dict[str, Operand], options: _Options) -> list[QuantizedTensor]:
    """The same on the current device."""
    from . import quantize_plan

    e5m2 = options.form.name == "float8_e5m2"
    sources = quantize_plan.Sources(operands, options.layout, e5m2, options.seed, options.center)
    plan = quantize_plan.plan_for(sources)
    results, addresses = [], {role: x.address for role, x in operands.items()}
    for role, x in operands.items():
        result, at = _new(cast(Role, role), x, options)
        results.append(result)
        addresses |= {f"{role}_{name}": address for name, address in at.items()}
    first = next(iter(operands.values()))
    plan.launch(addresses, first.kind.stream(first.device))
    return results


def _new(role: Role, x: Operand, options: _Options) -> tuple[QuantizedTensor, dict[str, int]]:
    """A result with arrays that nothing has been written to yet, and their addresses."""
    batch, seq, heads, dim = (x.shape[axis] for axis in AXES[options.layout])
    storage = IMAGE if role == "v" else ROWS
    shape = image_shape(batch, heads, seq, dim) if role == "v" else (*x.shape[:3], padded(dim))
    arrays = {
        "payload": x.kind.empty(x.array, shape, "uint8"),
        "scales": x.kind.empty(x.array, (batch, heads, tiles(seq)), "float32"),
    }
    if options.center and role != "q":
        arrays["mean"] = x.kind.empty(x.array, (batch, heads, padded(dim)), "float32")
    result = QuantizedTensor(
        payload=arrays["payload"][0],
        scales=arrays["scales"][0],
        mean=arrays["mean"][0] if "mean" in arrays else None,
        dtype=options.form.name,
        role=role,
        layout=options.layout,
        storage=storage,
        shape=cast("tuple[int, int, int, int]", tuple(x.shape)),
        source_dtype=x.dtype,
        seed=None if role == "v" else options.seed,
    )
    return result, {name: address for name, (_, address) in arrays.items()}


def _fill_on_cpu(x: Operand, result: QuantizedTensor, options: _Options) -> None:
    from . import cpu_quantize

    kind, (batch, seq, heads, dim) = x.kind, result.sizes
    axes = by_head(result.layout)
    source = kind.numpy(x.array).transpose(axes)
    negated = None if result.seed is None else cpu_quantize.signs(result.seed, dim)
    payload, scales = kind.numpy(result.payload), kind.numpy(result.scales)
    means = None if result.mean is None else kind.numpy(result.mean)
    rows = payload.transpose(axes) if result.storage == ROWS else None
    for at in np.ndindex(batch, heads):
        mean = None
        if means is not None:
            mean = cpu_quantize.mean_of(source[at])
            mean = mean if negated is None else cpu_quantize.rotate(mean, negated)
            means[at][:dim], means[at][dim:] = mean, 0
        codes, scales[at] = cpu_quantize.quantize_tiles(source[at], options.form, mean, negated)
        if rows is None:
            payload[at] = pack_image(codes)
        else:
            rows[at] = codes.reshape(len(codes) * TILE, codes.shape[2])[:seq]
