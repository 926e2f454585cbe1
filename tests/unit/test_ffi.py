"""Handlers of XLA's foreign function interface: what they find in the frame, and what the table does for them."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, addressof, c_bool, c_double, c_int64, c_void_p, cast
from types import SimpleNamespace
from typing import Any

import pytest

from cuflash.bench import flash3
from cuflash.bench.ffi import (
    AllocateRequest,
    Api,
    Buffer,
    ErrorRequest,
    FfiCall,
    Frame,
    FreeRequest,
    Function,
    PointerRequest,
    Scalar,
    Span,
)
from cuflash.bench.inputs import Case

Handler = CFUNCTYPE(c_void_p, POINTER(Frame))


def array(name: str, address: int, *shape: int) -> Any:
    return SimpleNamespace(
        dtype=SimpleNamespace(name=name), data=SimpleNamespace(ptr=address), ndim=len(shape), shape=shape
    )


def pointers(address: int, count: int) -> list[int]:
    return list((c_void_p * count).from_address(address))


def dims(buffer: Buffer) -> list[int]:
    return list((c_int64 * buffer.rank).from_address(buffer.dims))


def test_the_layout_is_that_of_the_header() -> None:
    """Sizes that c_api.h has on a 64-bit machine."""
    assert ctypes.sizeof(Buffer) == 48 and ctypes.sizeof(Api) == 8 + 8 + 24 + 8 + 19 * 8
    assert Frame.future.offset == 168 and Frame.arguments.offset == 40 and Frame.attributes.offset == 120


def test_a_handler_finds_buffers_and_attributes() -> None:
    found: dict[str, Any] = {}

    def handler(frame_pointer: Any) -> None:
        frame = frame_pointer.contents
        assert frame.struct_size == Frame.future.offset and frame.stage == 3
        for name in ("arguments", "results"):
            listed = getattr(frame, name)
            buffers = [Buffer.from_address(x) for x in pointers(listed.values, listed.size)]
            found[name] = [(b.dtype, b.data, dims(b)) for b in buffers]
        attributes = frame.attributes
        spans = [Span.from_address(x) for x in pointers(attributes.names, attributes.size)]
        scalars = [Scalar.from_address(x) for x in pointers(attributes.values, attributes.size)]
        types = {1: c_bool, 5: c_int64, 12: c_double}
        found["attributes"] = [
            (span.text[: span.length].decode(), types[scalar.dtype].from_address(scalar.value).value)
            for span, scalar in zip(spans, scalars, strict=True)
        ]

    call = FfiCall(
        Handler(handler),
        [array("bfloat16", 4096, 2, 3), array("float16", 8192, 5)],
        [array("float32", 256, 1, 1, 1)],
        {"window": -1, "is_causal": True, "scale": 0.125},
    )
    call()
    assert found["arguments"] == [(16, 4096, [2, 3]), (10, 8192, [5])]
    assert found["results"] == [(11, 256, [1, 1, 1])]
    assert found["attributes"] == [("is_causal", True), ("scale", 0.125), ("window", -1)]  # sorted, as XLA does


def test_the_table_gives_stream_device_and_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []

    class Memory:
        ptr = 0xABC00

        def __del__(self) -> None:
            freed.append(self.ptr)

    cuda = SimpleNamespace(
        get_current_stream=lambda: SimpleNamespace(ptr=77),
        Device=lambda: SimpleNamespace(id=3),
        alloc=lambda n: Memory(),
    )
    monkeypatch.setitem(__import__("sys").modules, "cupy", SimpleNamespace(cuda=cuda))
    answers: list[Any] = []

    def handler(frame_pointer: Any) -> None:
        functions = Api.from_address(frame_pointer.contents.api).functions

        def ask(place: int, request: Any) -> Any:
            assert cast(functions[place], Function)(addressof(request)) is None
            return request

        answers.append(ask(4, PointerRequest()).answer)
        answers.append(ask(17, PointerRequest()).answer)
        answers.append(ask(9, AllocateRequest(size=100, alignment=16)).data)
        assert not freed
        ask(10, FreeRequest(size=100, data=answers[-1]))

    FfiCall(Handler(handler), [], [], {})()
    assert answers == [77, 3, 0xABC00] and freed == [0xABC00]


def test_what_a_handler_complains_of_is_raised() -> None:
    def handler(frame_pointer: Any) -> int:
        create = cast(Api.from_address(frame_pointer.contents.api).functions[0], Function)
        request = ErrorRequest(message=b"no such head dim")
        return int(create(addressof(request)))

    with pytest.raises(RuntimeError, match="no such head dim"):
        FfiCall(Handler(handler), [], [], {})()


def test_flash3_takes_the_head_dims_that_it_was_built_for() -> None:
    assert flash3.reason_against(Case.of(128, True, 512, "bfloat16")) == ""
    assert "96" in flash3.reason_against(Case.of(96, True, 512, "bfloat16"))
    assert "192 and 128" in flash3.reason_against(Case.of(192, True, 512, "bfloat16", head_dim_v=128))
