"""Reads DLPack capsules where frameworks do not: host memory that `numpy.from_dlpack` refuses, bare device addresses.

Structures from dlpack.h, version 0.8 (the unversioned exchange, which every producer still speaks).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

BFLOAT_CODE = 4
UNSIGNED_CODE = 1
FLOAT8_CODES = {10: "float8_e4m3fn", 12: "float8_e5m2"}


class _Tensor(ctypes.Structure):
    """``DLTensor``; the head of a ``DLManagedTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Owner:
    """Keeps a capsule; not consumed, it gives the memory back when it goes."""

    def __init__(self, capsule: Any, tensor: _Tensor) -> None:
        self._capsule = capsule
        strides = tuple(2 * tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
        self.__array_interface__ = {
            "version": 3,
            "data": ((tensor.data or 0) + tensor.byte_offset, False),
            "typestr": "<u2",
            "shape": tuple(tensor.shape[i] for i in range(tensor.ndim)),
            "strides": strides,
        }


def bfloat16_view(producer: Any) -> Any:
    """A NumPy view of a bfloat16 array in host memory; None if its elements are something else."""
    from ml_dtypes import bfloat16

    capsule = producer.__dlpack__()
    tensor = _tensor_in(capsule)
    if (tensor.code, tensor.bits, tensor.lanes) != (BFLOAT_CODE, 16, 1):
        return None
    return np.asarray(_Owner(capsule, tensor)).view(bfloat16)


class Bytes:
    """An array of 8-bit floats as one of unsigned bytes, for consumers of DLPack that do not know such floats."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        capsule = self._producer.__dlpack__() if stream is None else self._producer.__dlpack__(stream=stream)
        _tensor_in(capsule).code = UNSIGNED_CODE
        return capsule

    def __dlpack_device__(self) -> Any:
        return self._producer.__dlpack_device__()


def float8_view(producer: Any) -> Any:
    """A NumPy view of an array of 8-bit floats in host memory; None if its elements are something else."""
    import ml_dtypes

    tensor = _tensor_in(producer.__dlpack__())
    name = FLOAT8_CODES.get(tensor.code) if (tensor.bits, tensor.lanes) == (8, 1) else None
    return None if name is None else np.from_dlpack(Bytes(producer)).view(getattr(ml_dtypes, name))


def address_of(producer: Any) -> int:
    """The address of an array's first element, on whichever device; 0 where there is no memory."""
    capsule = producer.__dlpack__()
    tensor = _tensor_in(capsule)
    return (tensor.data or 0) + int(tensor.byte_offset)


def _tensor_in(capsule: Any) -> _Tensor:
    """The structure that a capsule holds, valid as long as the capsule lives."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return _Tensor.from_address(get_pointer(capsule, b"dltensor"))
