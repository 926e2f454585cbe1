"""Call a handler of XLA's foreign function interface without XLA, on CuPy's memory and current stream.

A handler takes one frame: buffers, attributes, and a table of functions for its stream and its scratch memory. The
layouts are those of FFI 0.4, `xla/ffi/api/c_api.h`; a handler built for another refuses the frame by its size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    addressof,
    c_bool,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
    cast,
    sizeof,
)
from typing import Any

DTYPES = {"float16": 10, "float32": 11, "bfloat16": 16}
SCALARS: Mapping[type, tuple[int, Any]] = {bool: (1, c_bool), int: (5, c_int64), float: (12, c_double)}
"""By Python type: XLA_FFI_DataType, and the C type."""
EXECUTE = 3
"""XLA_FFI_ExecutionStage."""
HEAD = (("struct_size", c_size_t), ("extension", c_void_p))


class Buffer(Structure):
    _fields_ = (*HEAD, ("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", c_void_p))


class Span(Structure):
    _fields_ = (("text", c_char_p), ("length", c_size_t))


class Scalar(Structure):
    _fields_ = (("dtype", c_int), ("value", c_void_p))


class Buffers(Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (*HEAD, ("size", c_int64), ("types", c_void_p), ("values", c_void_p))


class Attributes(Structure):
    _fields_ = (*HEAD, ("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("values", c_void_p))


class Frame(Structure):
    _fields_ = (
        *HEAD,
        ("api", c_void_p),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
        ("future", c_void_p),
    )


class Version(Structure):
    _fields_ = (*HEAD, ("major", c_int), ("minor", c_int))


class Api(Structure):
    _fields_ = (*HEAD, ("version", Version), ("internal", c_void_p), ("functions", c_void_p * 19))


class ErrorRequest(Structure):
    _fields_ = (*HEAD, ("message", c_char_p), ("code", c_int))


class PointerRequest(Structure):
    """XLA_FFI_Stream_Get_Args, and by its first member XLA_FFI_DeviceOrdinal_Get_Args."""

    _fields_ = (*HEAD, ("context", c_void_p), ("answer", c_void_p))


class AllocateRequest(Structure):
    _fields_ = (*HEAD, ("context", c_void_p), ("size", c_size_t), ("alignment", c_size_t), ("data", c_void_p))


class FreeRequest(Structure):
    _fields_ = (*HEAD, ("context", c_void_p), ("size", c_size_t), ("data", c_void_p))


class MessageRequest(Structure):
    """XLA_FFI_Error_GetMessage_Args, later GetDetails."""

    _fields_ = (*HEAD, ("error", c_void_p), ("message", c_char_p))


Function = CFUNCTYPE(c_void_p, c_void_p)
"""Of the table: a request in, None or an error out."""
AN_ERROR = 1
"""The address of an error, which only the table would read."""


class Table:
    """The functions that a handler calls back. Scratch memory comes from CuPy's pool, which keeps to the stream."""

    def __init__(self) -> None:
        self.error = b""
        self.raised: Exception | None = None
        self._scratch: dict[int, Any] = {}
        named: dict[int, Callable[[int], int | None]] = {
            0: self._create_error,
            1: self._message,
            2: self._destroy_error,
            4: self._stream,
            9: self._allocate,
            10: self._free,
            17: self._ordinal,
        }  # places in XLA_FFI_Api
        self._functions = {place: Function(self._guarded(function)) for place, function in named.items()}
        self.api = Api(sizeof(Api), None, Version(sizeof(Version), None, 0, 4), None)
        for place, function in self._functions.items():
            self.api.functions[place] = cast(function, c_void_p).value

    def _guarded(self, function: Callable[[int], int | None]) -> Callable[[int], int | None]:
        """What a function raises is kept for `FfiCall`, and is an error to the handler."""

        def answer(request: int) -> int | None:
            try:
                return function(request)
            except Exception as error:
                self.raised, self.error = error, str(error).encode()
                return AN_ERROR

        return answer

    def _create_error(self, request: int) -> int:
        self.error = ErrorRequest.from_address(request).message
        return AN_ERROR

    def _message(self, request: int) -> None:
        MessageRequest.from_address(request).message = self.error

    def _destroy_error(self, request: int) -> None:
        """An error is no object."""

    def _stream(self, request: int) -> None:
        import cupy

        PointerRequest.from_address(request).answer = cupy.cuda.get_current_stream().ptr

    def _ordinal(self, request: int) -> None:
        import cupy

        c_int32.from_address(request + PointerRequest.answer.offset).value = cupy.cuda.Device().id

    def _allocate(self, request: int) -> None:
        import cupy

        wanted = AllocateRequest.from_address(request)
        memory = cupy.cuda.alloc(wanted.size)
        wanted.data = memory.ptr
        self._scratch[memory.ptr] = memory

    def _free(self, request: int) -> None:
        self._scratch.pop(FreeRequest.from_address(request).data or 0, None)


class FfiCall:
    """A handler with its buffers and attributes, to be called any number of times.

    Parameters
    ----------
    handler : ctypes function
        An ``XLA_FFI_Handler``.
    arguments, results : sequence of cupy.ndarray
        C-contiguous; bfloat16 by ml_dtypes.
    attributes : mapping of str to bool, int or float
        An int is 64 bits wide, a float too.
    """

    def __init__(
        self,
        handler: Any,
        arguments: Sequence[Any],
        results: Sequence[Any],
        attributes: Mapping[str, bool | int | float],
    ) -> None:
        self._handler = handler
        handler.argtypes, handler.restype = [POINTER(Frame)], c_void_p
        self._table = Table()
        self._kept: list[Any] = [arguments, results]  # the frame holds addresses alone
        names = sorted(attributes)  # as XLA sorts them
        self._frame = Frame(
            Frame.future.offset,
            None,
            addressof(self._table.api),
            None,
            EXECUTE,
            Buffers(sizeof(Buffers), None, len(arguments), *self._buffers(arguments)),
            Buffers(sizeof(Buffers), None, len(results), *self._buffers(results)),
            Attributes(sizeof(Attributes), None, len(names), *self._attributes(names, attributes)),
        )

    def __call__(self) -> None:
        if self._handler(self._frame):
            raise RuntimeError(
                f"the handler says: {self._table.error.decode(errors='replace')}"
            ) from self._table.raised

    def _keep(self, thing: Any) -> int:
        self._kept.append(thing)
        return addressof(thing)

    def _array(self, ctype: Any, values: Sequence[Any]) -> int:
        return self._keep((ctype * len(values))(*values))

    def _buffers(self, arrays: Sequence[Any]) -> tuple[int, int]:
        """Addresses of their types and of their descriptions."""
        described = [
            Buffer(sizeof(Buffer), None, DTYPES[x.dtype.name], x.data.ptr, x.ndim, self._array(c_int64, x.shape))
            for x in arrays
        ]
        return self._array(c_int, [1] * len(arrays)), self._array(c_void_p, [self._keep(one) for one in described])

    def _attributes(self, names: Sequence[str], values: Mapping[str, bool | int | float]) -> tuple[int, int, int]:
        """Addresses of their types, names and values."""
        spans = [self._keep(Span(name.encode(), len(name))) for name in names]
        scalars = []
        for name in names:
            code, ctype = SCALARS[type(values[name])]
            scalars.append(self._keep(Scalar(code, self._keep(ctype(values[name])))))
        return self._array(c_int, [3] * len(names)), self._array(c_void_p, spans), self._array(c_void_p, scalars)


def load_library(path: str) -> ctypes.CDLL:
    """A library of handlers that needs a CUDA runtime, which is found first where NVIDIA's packages have it."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    load_nvidia_dynamic_lib("cudart")
    return ctypes.CDLL(path)
