"""`QuantizedTensor`: what `cuflash.quantize` makes of Q, K or V, and `cuflash.attention` takes."""

from __future__ import annotations

import numbers
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from .arrays import CPU, Kind, bridge
from .checks import check_factor, check_factors_dtype, check_layout
from .errors import UnsupportedError
from .fp8 import Float8, format_of
from .fp8_layout import IMAGE, ROLES, ROWS, TILE, Role, by_head, image_shape, pack_image, padded, tiles
from .request import AXES

__all__ = ["QuantizedTensor", "Role"]

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedTensor:
    """Q, K or V in 8-bit floats, with a scale for each tile of 128 tokens of a head.

    A real value is ``payload * scale + mean``, and of a rotated tensor, the rotation undone on that: `dequantize`. All
    arrays are of the kind and on the device of what was quantized. `cuflash.quantize` makes it; nothing changes it.

    Attributes
    ----------
    payload : uint8 array
        The codes, as ``storage`` says.
    scales : float32 array (batch, heads, tiles)
        C-contiguous, like all arrays here; ``tiles`` is ceil(length / 128).
    mean : float32 array (batch, heads, padded dim) or None
        What was subtracted before; zeros beyond the head dim. Of a rotated tensor, rotated.
    dtype : {"float8_e4m3fn", "float8_e5m2"}
    role : {"q", "k", "v"}
    layout : {"bshd", "bhsd"}
        Axis order of ``shape``, and of the payload in rows.
    storage : {"rows", "vt128"}
        ``"rows"``: the payload has the axes of the layout, the last one padded to a multiple of 16. ``"vt128"``: an
        opaque image of V^T, (batch, heads, tiles, padded dim * 128): `cuflash.fp8_layout` describes both.
    shape : tuple of int
        Of what was quantized.
    source_dtype : str
        Its dtype.
    seed : int or None
        Of the rotation's signs; None: not rotated. Q and K of a call must have the same.
    """

    payload: Any
    scales: Any
    mean: Any
    dtype: Float8
    role: Role
    layout: str
    storage: str
    shape: tuple[int, int, int, int]
    source_dtype: str
    seed: int | None = None

    @classmethod
    def from_float8(
        cls,
        x: Any,
        scale: Any,
        *,
        role: Role,
        layout: str = "bshd",
        mean: Any = None,
        source_dtype: str = "bfloat16",
        seed: int | None = None,
    ) -> QuantizedTensor:
        """Take over codes from elsewhere, without a copy.

        Parameters
        ----------
        x : array (batch, seq, heads, dim) or (batch, heads, seq, dim)
            A torch tensor or NumPy array (ml_dtypes) of float8_e4m3fn or float8_e5m2; C-contiguous, the dim a multiple
            of 16. V comes in rows, like Q and K.
        scale : float or float32 array (batch, heads, tiles)
            The factors that give the real values back; one number for all, or one for each tile of 128 tokens.
        role, layout, mean, source_dtype, seed
            As the attributes; the mean without padding, which a multiple of 16 needs not.
        """
        kind = bridge.addressed("x", x, "cuflash.attention takes JAX arrays and others of 8-bit floats, with q_scale=")
        form = format_of(x.dtype)
        if role not in ROLES:
            raise ValueError(f"role is {role!r}; accepted are 'q', 'k' and 'v'")
        check_layout(layout)
        if len(x.shape) != 4:
            raise ValueError(f"x has shape {tuple(x.shape)}; accepted are four axes, those of the layout")
        batch, seq, heads, dim = (x.shape[axis] for axis in AXES[layout])
        if dim % 16 or not _is_contiguous(x):
            raise ValueError(
                f"x has shape {tuple(x.shape)} and is {'' if _is_contiguous(x) else 'not '}C-contiguous; accepted are "
                "C-contiguous arrays whose last axis is a multiple of 16: pad it with zeros and make it contiguous"
            )
        payload = x.view(_uint8(x))
        shape = (batch, heads, tiles(seq))
        if isinstance(scale, numbers.Real):
            factor = check_factor("scale", scale)
            with _on_device(kind, kind.operand("x", x).device):
                scales, _ = kind.empty(payload, shape, "float32")
                scales[...] = factor
        else:
            check_factors_dtype("scale", scale)
            if tuple(scale.shape) != shape or not _is_contiguous(scale):
                order = "C-contiguous" if _is_contiguous(scale) else "not C-contiguous"
                raise ValueError(
                    f"scale has shape {tuple(scale.shape)} and is {order}; accepted are a number and a C-contiguous "
                    f"float32 array of shape {shape}, (batch, heads, tiles of {TILE} tokens)"
                )
            scales = scale
        return cls(payload, scales, mean, form.name, role, layout, ROWS, tuple(x.shape), source_dtype, seed)

    # --- what it is ------------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(batch, length, heads, head dim), whatever the layout."""
        batch, seq, heads, dim = (self.shape[axis] for axis in AXES[self.layout])
        return batch, seq, heads, dim

    @property
    def head_dim(self) -> int:
        return self.shape[3]

    @property
    def kind(self) -> Kind:
        """Of the arrays."""
        return bridge.addressed("payload", self.payload, "the payload is what cuflash.quantize makes")

    @cached_property
    def device(self) -> int:
        """CUDA ordinal, or -1."""
        return self.kind.operand("scales", self.scales).device

    @cached_property
    def traits(self) -> tuple[Any, ...]:
        """All that a plan of attention depends on, but for addresses: part of a dictionary key."""
        kind = self.kind
        arrays = (self.payload, self.scales) if self.mean is None else (self.payload, self.scales, self.mean)
        forms = tuple(kind.geometry(x)[0] for x in arrays)
        misplaced = any(address % 16 for address in self.addresses)
        return (
            forms,
            self.dtype,
            self.role,
            self.layout,
            self.storage,
            self.shape,
            self.source_dtype,
            self.seed,
            misplaced,
        )

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Of payload, scales and mean (0: none)."""
        geometry = self.kind.geometry
        mean = 0 if self.mean is None else geometry(self.mean)[1]
        return geometry(self.payload)[1], geometry(self.scales)[1], mean

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        arrays = (self.payload, self.scales) if self.mean is None else (self.payload, self.scales, self.mean)
        return sum(x.nbytes for x in arrays)

    def __repr__(self) -> str:  # without the numbers: to show those of a GPU would wait for it
        traits = [f"{self.role}, {self.layout} {self.shape} from {self.source_dtype}"]
        traits.append(f"scales {tuple(self.scales.shape)}")
        traits += [f"stored as {self.storage}"] if self.storage != ROWS else []
        traits += ["centred"] if self.mean is not None else []
        traits += [f"rotated with seed {self.seed}"] if self.seed is not None else []
        return f"QuantizedTensor({self.dtype}, {', '.join(traits)}, {self.kind.LABEL}s)"

    # --- other forms -----------------------------------------------------------------------------------------------

    def float8(self) -> Any:
        """The codes as an array of the 8-bit dtype, with the shape of what was quantized: a view, no copy.

        Of a torch tensor torch's, of a NumPy array that of ml_dtypes. V must be in rows: see `to_rows`.
        """
        if self.storage != ROWS:
            raise UnsupportedError(f"the payload is stored as {self.storage!r}, an opaque image; call to_rows() first")
        return self.payload.view(_float8(self.payload, self.dtype))[..., : self.head_dim]

    def to_rows(self) -> QuantizedTensor:
        """The same numbers with the payload in rows: a copy of V's, where it is; itself if it is in rows already."""
        if self.storage == ROWS:
            return self
        batch, seq, heads, dim = self.sizes
        order = np.argsort(_image_order(padded(dim)))
        with _on_device(self.kind, self.device):
            rows, _ = self.kind.empty(self.payload, (*self.shape[:3], padded(dim)), "uint8")
            codes = self.payload[..., order].reshape(batch, heads, tiles(seq) * TILE, padded(dim))[:, :, :seq]
            rows[...] = codes.swapaxes(1, 2) if self.layout == "bshd" else codes
        return replace(self, payload=rows, storage=ROWS)

    def to_image(self) -> QuantizedTensor:
        """The same numbers with V's payload as the kernels read it: a copy, where it is; itself if it is so already."""
        if self.storage == IMAGE:
            return self
        if self.role != "v":
            raise ValueError(f"the role is {self.role!r}; only V is stored as {IMAGE!r}")
        batch, seq, heads, dim = self.sizes
        with _on_device(self.kind, self.device):
            codes, _ = self.kind.empty(self.payload, (batch, heads, tiles(seq) * TILE, padded(dim)), "uint8")
            codes[:, :, :seq] = self.payload.swapaxes(1, 2) if self.layout == "bshd" else self.payload
            codes[:, :, seq:] = 0
            images, _ = self.kind.empty(self.payload, image_shape(batch, heads, seq, dim), "uint8")
            images[...] = codes.reshape(images.shape)[..., _image_order(padded(dim))]
        return replace(self, payload=images, storage=IMAGE)

    def to_host(self) -> QuantizedTensor:
        """The same in NumPy arrays; copies what is on a GPU, after all work that is queued for it."""
        mean = None if self.mean is None else _to_numpy(self.mean)
        return replace(self, payload=_to_numpy(self.payload), scales=_to_numpy(self.scales), mean=mean)

    def dequantize(self) -> Any:
        """The real values that the codes stand for, float32, in the shape of what was quantized.

        Of the arrays' kind, in host memory: of a tensor on a GPU take ``to_host().dequantize()``.
        """
        from .cpu_quantize import rotate_back, signs
        from .dequantized import Dequantized

        batch, seq, heads, dim = self.sizes
        values = Dequantized.of(self)[slice(0, batch), slice(0, heads), slice(0, seq)]
        if self.seed is not None:
            values = rotate_back(values, signs(self.seed, dim))
        return self._like(values.transpose(by_head(self.layout)))

    # --- arrays of the tensor's kind -------------------------------------------------------------------------------

    def _host(self, x: Any) -> Array:
        """One of its arrays as a NumPy array."""
        if self.device != CPU:
            raise UnsupportedError(f"the tensor is on cuda:{self.device}; this is done on the host: take to_host()")
        return self.kind.numpy(x)  # type: ignore[no-any-return]

    def _like(self, values: Array) -> Any:
        """A new array of the tensor's kind with these values, C-contiguous."""
        made, _ = self.kind.empty(self.payload, values.shape, values.dtype.name)
        self.kind.numpy(made)[...] = values
        return made


def _image_order(columns: int) -> Array:
    """For each byte of an image, where it stands in a tile of rows."""
    return pack_image(np.arange(TILE * columns).reshape(TILE, columns))


def _on_device(kind: Kind, device: int) -> AbstractContextManager[Any]:
    """Make a device current, if it is one: CuPy allocates and computes there."""
    return nullcontext() if device == CPU else kind.on_device(device)


def _is_contiguous(x: Any) -> bool:
    return bool(x.is_contiguous() if hasattr(x, "is_contiguous") else x.flags.c_contiguous)


def _uint8(x: Any) -> Any:
    if type(x).__module__.partition(".")[0] == "torch":
        import torch

        return torch.uint8
    return np.uint8


def _float8(x: Any, name: str) -> Any:
    if type(x).__module__.partition(".")[0] == "torch":
        import torch

        return getattr(torch, name)
    import ml_dtypes

    return getattr(ml_dtypes, name)


def _to_numpy(x: Any) -> Array:
    """A host copy of an array on a GPU; a view of one in host memory."""
    if hasattr(x, "get"):  # CuPy
        return x.get()  # type: ignore[no-any-return]
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)
