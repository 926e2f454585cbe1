"""The public calls: intake, plan, launch, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from . import driver, forward_plan, jit
from .arrays import CPU, KINDS, is_float8, kind_of
from .checks import check_apart, check_flag, make_request, request_for
from .jit import PLANS
from .problem import DTYPES, MASKS, AttentionProblem
from .request import AXES, Request

__all__ = ["attention", "warmup"]

COMMON_HEAD_DIMS = (64, 128)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out: Any = None,
    precision: str | None = None,
    out_dtype: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Any:
    """Exact attention, softmax(scale * Q K^T + mask) V, without the matrix of scores in memory.

    Parameters
    ----------
    q : array (B, Nq, Hq, D)
    k : array (B, Nk, Hk, D)
    v : array (B, Nk, Hk, Dv)
        CuPy or NumPy arrays, torch tensors (CUDA or CPU), JAX arrays or other arrays with ``__dlpack__``, or three
        `cuflash.QuantizedTensor`, whose layout is the call's; all of one kind, dtype and device. float16 or bfloat16,
        on the CPU also float32 and float64. D and Dv from 1 to 256; any strides, none copied; any extent but D and Dv
        may be 0. Hq is a multiple of Hk: query head h uses key/value head h // (Hq / Hk). Or codes: float8_e4m3fn and
        float8_e5m2 (torch's dtypes, or those of ml_dtypes) in any combination, without gradients; any
        strides, V and what TMA cannot take of Q and K by a copy that `explain` counts.
    causal : False, True, "bottom_right" or "top_left"
        True and "bottom_right": query i sees keys j <= i + Nk - Nq. "top_left": j <= i.
    scale : float, optional
        Any finite number; 1/sqrt(D) by default.
    layout : {"bshd", "bhsd"}
        Axis order of all arrays, (batch, seq, heads, dim) or (batch, heads, seq, dim).
    return_lse : bool
        Return the log-sum-exp of each row's scaled and masked scores as well.
    out : array, optional
        Receives the result: of the inputs' kind, dtype and device, with the output's shape, any strides, sharing no
        memory with the inputs.
    precision : None, "fp8" or "fp8-fast"
        "fp8": quantize q, k and v on the way, as `cuflash.quantize_qkv` does by default; without gradients. float64 is
        not for that. "fp8-fast", also of quantized tensors and of codes: leave the sum over the keys to the GPU's
        tensor cores, which truncate. That is faster, and as right where V has no mean or was centred; of a mean that is
        left, 5 % are lost at 4096 keys and 18 % at 16384. (Where Dv exceeds 128, "fp8" does the same.)
    out_dtype : "float16", "bfloat16" or (on the CPU) "float32", optional
        Of the result, where the operands are quantized: that of what was quantized unless given, and bfloat16 of codes.
    q_scale, k_scale, v_scale : float or float32 array, optional
        With codes: the factors that give the real values back, 1 unless given. A number or an array without axes for
        all of an operand, (B, H) for each of its heads, or (B, H, ceil(N / 128)) for each tile of 128 tokens; Hk of K
        and V. Arrays are of the operands' kind and on their device. Factors are from 2^-126 to 2^119; others are
        refused, but on a GPU, where nobody looks at arrays, they give NaN.

    Returns
    -------
    out : array (B, Nq, Hq, Dv)
        Of the caller's kind, on the inputs' device; contiguous unless given. A query that sees no key gets 0. For torch
        tensors that require grad, and for the LSE as well, autograd follows: see `cuflash.torch.attention`. DLPack
        producers that do not say how to make their arrays (``__array_namespace__``) get CuPy's or NumPy's.
    lse : array (B, Hq, Nq)
        With ``return_lse``: natural logarithm, float32 (float64 for float64 inputs); -inf where no key is seen.

    Raises
    ------
    ValueError
        Shapes or options that do not fit, arrays on different devices, an ``out`` that is read-only or overlaps.
    TypeError
        Element types or kinds of arrays that are not accepted, or mixed.
    UnsupportedError
        A legal request that cuflash does not serve; the message says what to do.
    CompileError, MissingKernelError, DriverError
        The kernel could not be made, found or run.

    Notes
    -----
    Work is queued on the current stream of the arrays' framework (for JAX and other DLPack producers: CuPy's), and no
    call waits for the device. The first call of a kind compiles a kernel, in about a second, and keeps it on disk:
    `warmup` does that ahead, for example before a CUDA graph is captured. A call that autograd follows is made
    with ``return_lse=True``. Of JAX tracers the call is `cuflash.jax.attention`.

    The method is FlashAttention-2's: Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work
    Partitioning, 2023; on Hopper GPUs FlashAttention-3's: Shah et al., FlashAttention-3: Fast and Accurate Attention
    with Asynchrony and Low-precision, 2024.
    """
    if (
        precision is not None
        or out_dtype is not None
        or q_scale is not None
        or k_scale is not None
        or v_scale is not None
    ):
        scales = {"q": q_scale, "k": k_scale, "v": v_scale}
        return _attend_quantized(q, k, v, causal, scale, layout, return_lse, out, precision, out_dtype, scales)
    return compute(q, k, v, causal, scale, layout, return_lse, out, follow=True)


def _attend_quantized(
    q: Any,
    k: Any,
    v: Any,
    causal: Any,
    scale: Any,
    layout: Any,
    return_lse: Any,
    out: Any,
    precision: Any = None,
    out_dtype: Any = None,
    scales: Mapping[str, Any] | None = None,
) -> Any:
    from .quantized_attention import attend
    from .quantized_call import NO_SCALES, Options

    options = Options(causal, scale, layout, return_lse, precision, out_dtype)
    return attend(q, k, v, options, out, scales or NO_SCALES)


def compute(
    q: Any,
    k: Any,
    v: Any,
    causal: Any,
    scale: Any,
    layout: Any,
    return_lse: Any,
    out: Any = None,
    lse: Any = None,
    follow: bool = False,
    told: list[Any] | None = None,
) -> Any:
    """`attention`, with three arguments more.

    ``lse`` receives the LSE: a C-contiguous array of its shape and dtype and of the kind and device of ``q``, which is
    not checked. It needs ``return_lse``. With ``follow``, arrays that their framework follows go to the attention that
    it can follow. On a GPU, ``told`` receives the plan.
    """
    kind = KINDS.get(type(q)) or kind_of(q)
    if kind is None:
        from .arrays import bridge

        if bridge.is_quantized(q):
            return _attend_quantized(q, k, v, causal, scale, layout, return_lse, out)
        if is_float8(q):
            return _attend_quantized(q, k, v, causal, scale, layout, return_lse, out)
        if out is None and bridge.is_traced(q, k, v):
            from .jax import attention as traced_attention

            return traced_attention(q, k, v, causal=causal, scale=scale, layout=layout, return_lse=return_lse)
        options: dict[str, Any] = {"causal": causal, "scale": scale, "layout": layout, "return_lse": return_lse}
        outputs = {} if out is None else {"out": out}
        return bridge.call(lambda views: attention(**views, **options), {"q": q, "k": k, "v": v}, outputs)
    if follow and (follower := kind.follower(q, k, v)):
        return follower(q, k, v, causal, scale, layout, return_lse, out)
    out_key, out_at = None, 0
    key: Any
    try:
        qkv_key, q_at, k_at, v_at = kind.geometries(q, k, v)
        if out is not None:
            out_key, out_at = kind.geometry(out)
        key = (qkv_key, out_key, (q_at | k_at | v_at | out_at) & 15, causal, scale, layout, return_lse)
        plan = PLANS.get(key)
    except (AttributeError, TypeError, RuntimeError):  # followed, not of this kind, or not hashable: checked below
        key = plan = None
    if plan is None:
        if follow and is_float8(q):
            return _attend_quantized(q, k, v, causal, scale, layout, return_lse, out)
        request = make_request((q, k, v), out, causal=causal, scale=scale, layout=layout, return_lse=return_lse)
        if request.device == CPU:
            return _attend_on_cpu(request, lse)
        plan = forward_plan.make_plan(request)
        q_at, k_at, v_at = request.q.address, request.k.address, request.v.address
        if key is not None:
            jit.remember(key, plan)
    if kind.current_device() != plan.device:
        with kind.on_device(plan.device):
            return compute(q, k, v, causal, scale, layout, return_lse, out, lse, told=told)
    if out is None:
        out = plan.new_out()
        out_at = kind.address(out)
        if out_at % plan.alignment:  # a rare allocator: plan again for what it gave
            return compute(q, k, v, causal, scale, layout, return_lse, out, lse, told=told)
    else:
        if not plan.apart(q_at, k_at, v_at, out_at):
            check_apart(make_request((q, k, v), out, causal=causal, scale=scale, layout=layout, return_lse=return_lse))
            plan.prove_apart(q_at, k_at, v_at, out_at)
        kind.written(out)
    if lse is None and return_lse:
        lse = plan.new_lse()
    lse_at = 0 if lse is None else kind.address(lse)
    plan.launch(q_at, k_at, v_at, out_at, lse_at, kind.stream(plan.device))
    if plan.dead:
        kind.fill_dead(out, lse)
    if told is not None:
        told.append(plan)
    return (out, lse) if return_lse else out


def _attend_on_cpu(request: Request, lse: Any) -> Any:
    from .cpu import attention_cpu

    kind, q = request.q.kind, request.q.array
    if request.out is None:
        out, _ = kind.empty(q, request.out_shape)
    else:
        check_apart(request)
        out = request.out.array
        kind.written(out)
    if lse is None and request.return_lse:
        lse, _ = kind.empty(q, request.lse_shape, request.lse_dtype)
    batch, seq, heads, dim = AXES[request.layout]
    views = [kind.numpy(x).transpose(batch, heads, seq, dim) for x in (q, request.k.array, request.v.array, out)]
    kind.untraced(attention_cpu)(
        *views[:3],
        causal=request.causal,
        scale=request.scale,
        out=views[3],
        lse=None if lse is None else kind.numpy(lse),
    )
    return out if lse is None else (out, lse)


def warmup(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out: Any = None,
    backward: bool = False,
    configs: str | Iterable[AttentionProblem] | None = None,
    device: int | None = None,
    precision: str | None = None,
    out_dtype: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[str, ...]:
    """Make kernels ready, compiled and loaded, without launching anything.

    There are two ways to say which. ``warmup(q, k, v, ...)``, with arrays and options as for `attention`, makes exactly
    that call ready: it can be captured in a CUDA graph afterwards. ``warmup(configs="common")`` makes the kernels of
    common problems ready on one device, so that later calls only plan.

    Parameters
    ----------
    q, k, v, causal, scale, layout, return_lse, out, precision, out_dtype, q_scale, k_scale, v_scale
        As for `attention`, also of quantized tensors. On CPU arrays there is nothing to make ready, but they are
        checked.
    backward : bool
        Make the gradients ready as well: of the call, where all arrays that come in there are contiguous, or of the
        common problems. An iterable of `configs` names their kernels itself.
    configs : "common" or iterable of AttentionProblem
        "common": head dims 64 and 128, both dtypes, with and without a causal mask, aligned arrays.
    device : int, optional
        With `configs`: the CUDA ordinal; the current device by default.

    Returns
    -------
    tuple of str
        Symbols of the kernels that are ready.

    Examples
    --------
    >>> cuflash.warmup(q, k, v, causal=True, out=out)  # doctest: +SKIP
    >>> cuflash.warmup(q, k, v, causal=True, backward=True)  # doctest: +SKIP
    >>> cuflash.warmup(configs="common")  # doctest: +SKIP
    """
    if (configs is None) == (q is None):
        raise TypeError("warmup takes either arrays, warmup(q, k, v, ...), or configs=; not both and not neither")
    from .arrays import bridge

    backward = check_flag("backward", backward)
    if configs is not None:
        return _warm_up_configs(configs, backward, device)
    if device is not None:
        raise TypeError("device belongs to configs=; arrays have a device of their own")
    scales = {"q": q_scale, "k": k_scale, "v": v_scale}
    if bridge.concerns_float8(q, precision, out_dtype, scales):
        from .quantized_attention import warm_up
        from .quantized_call import Options, refuse_backward

        if backward:
            refuse_backward(q, precision)
        return warm_up(q, k, v, Options(causal, scale, layout, return_lse, precision, out_dtype), out, scales)
    request = request_for((q, k, v), out, causal=causal, scale=scale, layout=layout, return_lse=return_lse)
    if request.device == CPU:
        return ()
    loaded = forward_plan.make_plan(request).loaded
    kernels = () if loaded is None else (loaded.kernel.symbol,)
    return kernels + _warm_up_gradients(request) if backward else kernels


def _warm_up_gradients(request: Request) -> tuple[str, ...]:
    from . import backward_plan
    from .backward_request import BackwardRequest

    plan = backward_plan.make_plan(BackwardRequest.of_call(request, deterministic=False))
    return tuple(launch.loaded.kernel.symbol for launch in plan.launches)


def _warm_up_configs(configs: str | Iterable[AttentionProblem], backward: bool, device: int | None) -> tuple[str, ...]:
    if device is None:
        device = driver.current_device()
    elif not 0 <= device < driver.device_count():
        raise ValueError(f"device is {device}; this machine has {driver.device_count()} CUDA devices, counted from 0")
    if not isinstance(configs, str):
        if backward:
            raise TypeError("backward belongs to arrays and to configs='common'; each AttentionProblem has a task")
        problems = list(configs)
    elif configs == "common":
        problems = list(_common_problems(jit.device_arch(device).name, backward))
    else:
        raise ValueError(f"configs is {configs!r}; accepted are 'common' and an iterable of AttentionProblem")
    return tuple(jit.kernel_for(problem, device).kernel.symbol for problem in dict.fromkeys(problems))


def _common_problems(arch: str, backward: bool) -> Iterator[AttentionProblem]:
    """Forward problems for the target that ordinary calls take, and the backward problems beside them."""
    from . import kernels

    for dim, dtype, mask in product(COMMON_HEAD_DIMS, DTYPES, MASKS):
        target = kernels.device_targets(arch)[-1]
        problem = AttentionProblem(dim, dim, dtype, mask, access_bytes=16, scale_first=False, arch=target)
        yield from kernels.variants_by_length(problem)
        if backward:
            from .backward_kernels import problems_beside

            yield from problems_beside(problem, kernels.device_targets(arch, task="backward")[-1])
