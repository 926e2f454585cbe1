"""Arrays that cuflash does not address itself: JAX's, and those of any other DLPack producer.

They are viewed as CuPy's (on a GPU) or NumPy's (in host memory), the call is made with the views, and its results go
back the same way; nothing is copied on the GPU. Work runs on CuPy's current stream of the arrays' device: DLPack makes
that stream wait for what the producer still computes, and the producer's stream for the results.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..errors import INSTALL_CUDA, UnsupportedError
from . import Kind, is_float8, kind_of

CUDA_DEVICES = (2, 13)
HOST_DEVICES = (1, 3)
"""DLPack's device types: CUDA and CUDA-managed memory; CPU and CUDA-pinned memory."""


def views(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """CuPy or NumPy views of foreign arrays: of the arguments of a call, "q" first, and of what it shall write.

    Raises
    ------
    TypeError
        Something is not an array, or the arrays are of different kinds.
    UnsupportedError
        A JAX tracer or sharded array; a device that is neither CUDA nor CPU.
    """
    named = {**inputs, **outputs}
    labels = {name: label(name, x) for name, x in named.items()}
    for name, found in labels.items():
        if found != labels["q"]:
            raise TypeError(mixed(labels["q"], name, found))
    is_jax = _is_jax(named["q"])
    if is_jax:
        for name in outputs:
            raise TypeError(f"{name} is a JAX array, which cannot be written; leave it out")
    viewed = {name: (_view_jax if is_jax else _view_dlpack)(name, x) for name, x in named.items()}
    if is_jax:
        _check_jax_devices(named)
    return viewed


def call(function: Callable[[dict[str, Any]], Any], inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Any:
    """Call a function with `views` of foreign arrays; its results are of their kind."""
    viewed = views(inputs, outputs)
    q, q_view = inputs["q"], viewed["q"]
    on_gpu = not isinstance(q_view, np.ndarray)
    with _on_device_of(q_view) if on_gpu else nullcontext():
        result = function(viewed)
        if on_gpu:
            _keeper.hold((*inputs.values(), *outputs.values()))
        give_back = _to_jax if _is_jax(q) else _to_producer
        results = result if isinstance(result, tuple) else (result,)
        written = {id(viewed[name]): x for name, x in outputs.items()}
        given = [written[id(x)] if id(x) in written else give_back(x, q) for x in results]
    return tuple(given) if isinstance(result, tuple) else given[0]


def _on_device_of(view: Any) -> AbstractContextManager[Any]:
    """Make a CuPy array's device current: CuPy exports an array on the current stream of the current device."""
    kind = kind_of(view)
    assert kind is not None
    return kind.on_device(view.data.device_id)


def mixed(label_q: str, name: str, found: str) -> str:
    """The message about two kinds of arrays in one call."""
    return f"q is a {label_q} and {name} a {found}; all arrays of a call must be of one kind"


def label(name: str, x: Any) -> str:
    """What messages call an argument's kind of array.

    Raises
    ------
    TypeError
        It is no array.
    """
    if kind := kind_of(x):
        return kind.LABEL
    if _is_jax(x):
        return "JAX array"
    if _is_producer(x):
        return f"{type(x).__module__.partition('.')[0]} array"
    if x is None and name == "lse":
        hint = "; cuflash.attention gives it with return_lse=True"
    elif isinstance(x, tuple) and name == "out":
        hint = "; with return_lse=True cuflash.attention gives two arrays, out and lse"
    elif isinstance(x, list | tuple):
        hint = f"; numpy.asarray({name}, numpy.float32) makes one for the CPU"
    else:
        hint = ""
    raise TypeError(
        f"{name} is {_described(x)}; accepted are CuPy and NumPy arrays, torch tensors, JAX arrays and other arrays "
        f"with __dlpack__ and __dlpack_device__{hint}"
    )


def addressed(name: str, x: Any, instead: str) -> Kind:
    """The kind of an array where only those are accepted that cuflash addresses itself.

    Raises
    ------
    TypeError
        It is another; of an array, the message says what to do ``instead``.
    """
    if kind := kind_of(x):
        return kind
    found = "a JAX array" if _is_jax(x) else _described(x)
    hint = f": {instead}" if _is_producer(x) else ""
    raise TypeError(f"{name} is {found}; accepted are CuPy and NumPy arrays and torch tensors{hint}")


def _is_producer(x: Any) -> bool:
    return hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")


def _described(x: Any) -> str:
    """What something is, with an article."""
    module, word = type(x).__module__, type(x).__qualname__
    word = word if module == "builtins" else f"{module}.{word}"
    return "None" if x is None else f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


# --- JAX -------------------------------------------------------------------------------------------------------


def _is_jax(x: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def is_quantized(x: Any) -> bool:
    """Whether it is a `cuflash.QuantizedTensor`, whose module is loaded only where there are some."""
    quantized = sys.modules.get("cuflash.quantized")
    return quantized is not None and isinstance(x, quantized.QuantizedTensor)


def concerns_float8(q: Any, precision: Any, out_dtype: Any, scales: Mapping[str, Any]) -> bool:
    """Whether a call is of quantized tensors or 8-bit arrays, or has an option of such calls."""
    options = (precision, out_dtype, *scales.values())
    return any(x is not None for x in options) or is_quantized(q) or is_float8(q)


def is_traced(q: Any, *others: Any) -> bool:
    """Whether ``q`` is a JAX array and at least one of all is a tracer: `cuflash.jax` takes q, k and v."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(q, jax.Array) and any(isinstance(x, jax.core.Tracer) for x in (q, *others))


def _view_jax(name: str, x: Any) -> Any:
    import jax

    if isinstance(x, jax.core.Tracer):
        raise UnsupportedError(
            f"{name} is a JAX tracer: under jax.jit, jax.grad, jax.vmap and the like only cuflash.attention can be "
            "called, which is cuflash.jax.attention there; its gradients come from jax.grad and jax.vjp"
        )
    devices = list(x.devices())
    if len(devices) != 1:
        raise UnsupportedError(
            f"{name} is sharded over {len(devices)} devices; cuflash takes arrays on one: for sharded ones call it "
            "inside jax.shard_map"
        )
    if devices[0].platform == "cpu":
        return np.asarray(x)
    if devices[0].platform not in ("gpu", "cuda"):
        raise UnsupportedError(
            f"{name} is on a {devices[0].platform} device; cuflash takes arrays on CUDA devices and CPUs"
        )
    return _view_on_gpu(name, x)


def _check_jax_devices(named: Mapping[str, Any]) -> None:
    """Of JAX's CPU devices, which are all host memory, only JAX knows that they differ."""
    (device_q,) = named["q"].devices()
    for name, x in named.items():
        if (device := next(iter(x.devices()))) != device_q:
            raise ValueError(f"q is on {device_q} and {name} on {device}; all arrays of a call must be on one device")


def _to_jax(result: Any, like: Any) -> Any:
    import jax

    if isinstance(result, np.ndarray):
        return jax.device_put(result, next(iter(like.devices())))
    return jax.dlpack.from_dlpack(result)


# --- DLPack ----------------------------------------------------------------------------------------------------


def _view_dlpack(name: str, x: Any) -> Any:
    device = int(x.__dlpack_device__()[0])
    if device in HOST_DEVICES:
        return _view_host(name, x)
    if device in CUDA_DEVICES:
        return _view_on_gpu(name, x)
    raise UnsupportedError(f"{name} is on a device of DLPack type {device}; cuflash takes CUDA devices and CPUs")


def _view_on_gpu(name: str, x: Any) -> Any:
    cupy = require_cupy(name)
    if not is_float8(x):
        return cupy.from_dlpack(x)
    import ml_dtypes

    from .capsule import Bytes

    return cupy.from_dlpack(Bytes(x)).view(getattr(ml_dtypes, str(x.dtype).rpartition(".")[2]))


def _view_host(name: str, x: Any) -> Any:
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError) as error:
        from .capsule import bfloat16_view, float8_view

        view = bfloat16_view(x)
        view = float8_view(x) if view is None else view
        if view is None:
            raise TypeError(f"{name}: NumPy cannot view this {type(x).__qualname__} by DLPack: {error}") from error
        return view


def _to_producer(result: Any, like: Any) -> Any:
    """An array of the producer's own kind where it says how to make one, else NumPy's or CuPy's.

    NumPy exports no bfloat16: such results stay NumPy arrays.
    """
    namespace = getattr(like, "__array_namespace__", None)
    if namespace is None or (isinstance(result, np.ndarray) and result.dtype.name == "bfloat16"):
        return result
    return namespace().from_dlpack(result)


def require_cupy(name: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedError(
            f"{name} is on a GPU, and arrays of its kind are read through CuPy, which is not installed: {INSTALL_CUDA}"
        ) from error
    return cupy


# --- lifetime --------------------------------------------------------------------------------------------------


class Keeper:
    """Keeps foreign arrays alive until the stream that reads them has passed.

    Their frameworks give memory back to streams of their own, which know nothing of CuPy's. What is held is looked
    through at every call; the arrays of the last calls stay until the next one.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Any, tuple[Any, ...]]] = []
        self._lock = threading.Lock()

    def hold(self, arrays: tuple[Any, ...]) -> None:
        """Hold arrays that work queued on CuPy's current stream reads or writes."""
        import cupy

        stream = cupy.cuda.get_current_stream()
        if stream.is_capturing():
            return  # a graph's arrays are its owner's to keep, and its events cannot be asked
        event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        with self._lock:
            held = [*self._held, (event, arrays)]
            self._held = [pair for pair in held if not pair[0].done]
            # `held` drops its references after the lock is released: what they free may run any code.

    def __len__(self) -> int:
        return len(self._held)


_keeper = Keeper()
