"""Adopts the caller's arrays: what lies where, on which device and stream, and results of the same kind.

One module for each kind of array, all with the functions of `Kind`. A module is imported when the first array of its
kind comes in, at which time the array's framework is loaded anyway; no framework is ever imported to find out that an
array is not of it. Frameworks whose arrays cuflash cannot address itself (JAX and other DLPack producers) are in
`bridge`, which views their arrays as CuPy's or NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

CPU = -1
"""The device ordinal of host memory; CUDA devices count from 0."""

FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
"""Of operands that are quantized already."""
GPU_DTYPES = ("float16", "bfloat16")
CPU_DTYPES = ("float16", "bfloat16", "float32", "float64")
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1}


class Operand(NamedTuple):
    """An array of the caller, in terms that no framework has a part in.

    Attributes
    ----------
    name : str
        The argument that it came in as.
    array : object
        The array itself.
    kind : Kind
    address : int
        Address of element (0, 0, 0, 0).
    shape, strides : tuple of int
        In the caller's axis order; strides in bytes.
    dtype : str
        For example ``"bfloat16"``.
    device : int
        CUDA ordinal, or `CPU`.
    writable : bool
    """

    name: str
    array: Any
    kind: Kind
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int
    writable: bool = True

    def __repr__(self) -> str:  # without the array: to show one on a GPU would wait for it
        return f"Operand({self.name!r}, {self.dtype} {self.shape} on {self.place})"

    @property
    def place(self) -> str:
        """The device's name, for messages."""
        return "the CPU" if self.device == CPU else f"cuda:{self.device}"


class Kind(Protocol):
    """What a module of this package offers for its kind of array."""

    @property
    def LABEL(self) -> str:
        """What messages call such an array."""

    def geometry(self, x: Any, /) -> tuple[tuple[Any, ...], int]:
        """Everything but the address that a plan may depend on, as part of a dictionary key; and the address.

        The hot path: any exception means that ``x`` has to be looked at with `operand`.
        """

    def geometries(self, q: Any, k: Any, v: Any, /) -> tuple[tuple[Any, ...], int, int, int]:
        """`geometry` of the three inputs of a call, at once: one key for all, and their addresses."""

    def operand(self, name: str, x: Any, /) -> Operand:
        """Describe an array, or refuse it with TypeError or UnsupportedError."""

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str | None = None, /) -> tuple[Any, int]:
        """A new C-contiguous array on the device of ``like``, and its address; ``dtype`` None: that of ``like``.

        The device, if it is a GPU, is current.
        """

    def maker(self, shape: tuple[int, ...], dtype: str, /) -> Callable[[], Any]:
        """What makes a new C-contiguous array on the current GPU in each call: for plans, whose calls need the same."""

    def address(self, x: Any, /) -> int:
        """Where an array lies."""

    def fill_dead(self, out: Any, lse: Any, /) -> None:
        """Give every row what a row without keys gets, 0 and -inf, in stream order; ``lse`` may be None."""

    def copy(self, to: Any, source: Any, /) -> None:
        """Copy an array on a GPU to another of its shape and 16-bit dtype, in stream order."""

    def written(self, x: Any, /) -> None:
        """Told after a kernel that writes an array of the caller was launched."""

    def numpy(self, x: Any, /) -> Any:
        """View host memory as a NumPy array, without a copy."""

    def untraced(self, function: Callable[..., Any], /) -> Callable[..., Any]:
        """The function, out of reach of a compiler of the framework that traces Python."""

    def follower(self, q: Any, k: Any, v: Any, /) -> Callable[..., Any] | None:
        """The attention to take instead where the framework follows a call, to differentiate, compile or transform it.

        It takes q, k, v, causal, scale, layout, return_lse and out by position, and calls `cuflash.api.compute` for
        what it does not follow. None for arrays of 8-bit floats, which have no gradients.
        """

    def refusal(self, arrays: Mapping[str, Any], what: str, /) -> str | None:
        """Why to refuse arrays, by their names, where the framework follows a call of ``what``, which none can follow.

        None where it does not. It is the caller who raises: what torch.compile traces is run again to raise.
        """

    def plain(self, x: Any, /) -> Any:
        """The array alone, without what its framework remembers for differentiating; anything else as it is."""

    def current_device(self) -> int:
        """The CUDA ordinal that is current in this thread."""

    def on_device(self, ordinal: int, /) -> AbstractContextManager[Any]:
        """Make a device current, for the framework and the driver, and restore the previous one."""

    def stream(self, ordinal: int, /) -> int:
        """The handle of the framework's current stream on a device."""


KINDS: dict[type, Kind] = {}
"""The array types that cuflash addresses itself, of the frameworks seen so far. `kind_of` fills it."""


def kind_of(x: Any) -> Kind | None:
    """The kind of an array (or of an instance of a subclass) that cuflash addresses itself; None for all else."""
    kind = KINDS.get(type(x))
    if kind is not None:
        return kind
    for base in type(x).__mro__:
        if loaded := _module_for(base.__module__.partition(".")[0]):
            KINDS.update(dict.fromkeys(loaded.PLAIN_TYPES, loaded))
            return loaded if isinstance(x, loaded.PLAIN_TYPES) else None
    return None


def _module_for(framework: str) -> Any:
    """The module for a framework's arrays; by import statements, which torch.compile follows in a first call."""
    if framework == "cupy":
        from . import cupy_arrays

        return cupy_arrays
    if framework == "numpy":
        from . import numpy_arrays

        return numpy_arrays
    if framework == "torch":
        from . import torch_arrays

        return torch_arrays
    return None


def is_float8(x: Any) -> bool:
    """Whether it is an array of an 8-bit float type that cuflash knows; a `cuflash.QuantizedTensor` is not."""
    dtype = getattr(x, "dtype", None)
    return not isinstance(dtype, str) and str(dtype).rpartition(".")[2] in FLOAT8_DTYPES


_names: dict[Any, str] = {}
"""The accepted element types seen so far; making a name of one takes NumPy microseconds."""


def dtype_name(name: str, dtype: Any) -> str:
    """Check an element type and give its plain name.

    Parameters
    ----------
    name : str
        The argument, for messages.
    dtype : object
        Anything whose ``str`` is the type's name, perhaps with the framework's in front.

    Raises
    ------
    TypeError
        Not a floating-point type that attention is defined for.
    UnsupportedError
        An 8-bit float type that cuflash does not know.
    """
    known = _names.get(dtype)
    if known is not None:
        return known
    plain = str(dtype).rpartition(".")[2]
    if plain in CPU_DTYPES or plain in FLOAT8_DTYPES:
        return _names.setdefault(dtype, plain)
    if plain.startswith("float8"):
        from ..errors import UnsupportedError

        raise UnsupportedError(
            f"{name} has dtype {plain}; of 8-bit floats cuflash takes {' and '.join(FLOAT8_DTYPES)}: cast it"
        )
    hint = ": cast it"
    if plain in ("uint16", "int16"):
        hint = f"; if it holds bfloat16, say so: {name}.view(ml_dtypes.bfloat16) or {name}.view(torch.bfloat16)"
    elif plain in ("uint8", "int8"):
        hint = "; what its bits mean is not guessed"
    raise TypeError(f"{name} has dtype {plain}; accepted are {', '.join(CPU_DTYPES)} (on the GPU the first two){hint}")
