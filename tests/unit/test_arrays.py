"""What is adopted, what is refused, and with which words; on the CPU and on a GPU made of host memory."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import arrays
from cuflash.arrays import bridge
from cuflash.checks import make_request
from cuflash.errors import INSTALL_CUDA
from tests.oracle import DTYPES, assert_accurate, poisoned, randn
from tests.unit.fake_gpu import FakeGpu

SHAPE = (2, 10, 4, 16)


@pytest.fixture(params=["cpu", "gpu"])
def adopt(request: pytest.FixtureRequest) -> Callable[[np.ndarray], Any]:
    """Makes arrays of either backend from NumPy's."""
    if request.param == "cpu":
        return lambda x: x
    return request.getfixturevalue("gpu").array


def qkv(dtype: Any = np.float16) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [randn(rng, SHAPE, np.dtype(dtype)) for _ in range(3)]


# --- shapes and options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "error", "words"),
    [
        (((10, 4, 16), SHAPE, SHAPE), ValueError, r"q has shape \(10, 4, 16\).*four axes, \(batch, seq, heads, dim\)"),
        ((SHAPE, SHAPE, (1, *SHAPE)), ValueError, r"v has shape"),
        (
            (SHAPE, (2, 11, 4, 16), (2, 12, 4, 16)),
            ValueError,
            r"k and v differ.*k \(2, 11, 4, 16\), v \(2, 12, 4, 16\)",
        ),
        ((SHAPE, (3, 10, 4, 16), (3, 10, 4, 16)), ValueError, r"q has batch 2 and k and v have 3"),
        ((SHAPE, (2, 10, 4, 8), (2, 10, 4, 16)), ValueError, r"q has head dim 16 and k has 8"),
        ((SHAPE, (2, 10, 3, 16), (2, 10, 3, 16)), ValueError, r"4 heads and k and v have 3.*multiple"),
        ((SHAPE, (2, 10, 8, 16), (2, 10, 8, 16)), ValueError, r"multiple"),
        ((SHAPE, (2, 10, 0, 16), (2, 10, 0, 16)), ValueError, r"4 heads and k and v have 0"),
        (((2, 10, 4, 0), (2, 10, 4, 0), SHAPE), ValueError, r"q has head dim 0; accepted are 1 to 256"),
        ((SHAPE, SHAPE, (2, 10, 4, 0)), ValueError, r"v has head dim 0"),
        (((2, 10, 4, 257), (2, 10, 4, 257), SHAPE), cuflash.UnsupportedError, r"q has head dim 257.*1 to 256"),
        ((SHAPE, SHAPE, (2, 10, 4, 512)), cuflash.UnsupportedError, r"v has head dim 512"),
    ],
)
def test_shapes(adopt: Any, shapes: Any, error: type[Exception], words: str) -> None:
    """B-103, B-154."""
    with pytest.raises(error, match=words):
        cuflash.attention(*(adopt(np.zeros(shape, np.float16)) for shape in shapes))


def test_the_other_layout_is_named_where_it_fits(adopt: Any) -> None:
    q, k = (adopt(np.zeros((1, 8, length, 16), np.float16)) for length in (100, 150))
    with pytest.raises(
        ValueError, match=r"100 heads.*\(batch, seq, heads, dim\); layout='bhsd' fits, with 8 and 8 heads"
    ):
        cuflash.attention(q, k, k)
    q, k = (adopt(np.zeros((1, length, 8, 16), np.float16)) for length in (100, 150))
    with pytest.raises(
        ValueError, match=r"100 heads.*\(batch, heads, seq, dim\); layout='bshd' fits, with 8 and 8 heads"
    ):
        cuflash.attention(q, k, k, layout="bhsd")
    q, k = (adopt(np.zeros((1, 10, heads, 16), np.float16)) for heads in (4, 3))
    with pytest.raises(ValueError, match=r"dim\)$"):
        cuflash.attention(q, k, k)


def test_layouts_name_their_axes(adopt: Any) -> None:
    q, k, v = (adopt(x) for x in qkv())
    with pytest.raises(ValueError, match=r"10 heads.*\(batch, heads, seq, dim\)"):
        cuflash.attention(q, k[:, :3], v[:, :3], layout="bhsd")
    for layout in ("sbhd", "BSHD", None, 3, ["bshd"]):
        with pytest.raises(ValueError, match=r"layout is .*'bshd' = .*'bhsd' = "):
            cuflash.attention(q, k, v, layout=layout)


@pytest.mark.parametrize("causal", ["left", "", None, 2, -1, 0.5, (True,), np.array([True]), [1]])
def test_causal(adopt: Any, causal: Any) -> None:
    with pytest.raises(ValueError, match=r"causal is .*'bottom_right'.*'top_left'"):
        cuflash.attention(*map(adopt, qkv()), causal=causal)


@pytest.mark.parametrize(
    "scale",
    [math.nan, math.inf, -math.inf, np.float32("nan"), 10**400, -(10**400)],
    ids=("nan", "inf", "-inf", "nan32", "huge", "-huge"),
)
def test_scales_that_are_not_finite(adopt: Any, scale: Any) -> None:
    arrays = [adopt(x) for x in qkv()]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"scale is .*finite"):
            cuflash.attention(*arrays, scale=scale)


@pytest.mark.parametrize("scale", ["0.1", 1j, [0.1], np.array([0.1]), Decimal(1)])
def test_scales_that_are_no_numbers(adopt: Any, scale: Any) -> None:
    with pytest.raises(TypeError, match=r"scale is a .*1/sqrt"):
        cuflash.attention(*map(adopt, qkv()), scale=scale)


@pytest.mark.parametrize("scale", [1e39, -1e39, 3e38])
def test_scales_beyond_float32(gpu: FakeGpu, scale: float) -> None:
    """The GPU says what it cannot do; float64 on the CPU can."""
    with pytest.raises(ValueError, match=r"scale is .*float32"):
        cuflash.attention(*map(gpu.array, qkv()), scale=scale)
    assert np.isfinite(cuflash.attention(*qkv(np.float64), scale=scale)).all()


def test_equal_options_are_the_same_option(adopt: Any) -> None:
    """Else whether a call is accepted would depend on the calls before it, for 1 and True are one dictionary key."""
    q, k, v = (adopt(x) for x in qkv())
    for causal in (1, 1.0, np.True_, 0, np.False_, True):
        cuflash.attention(q, k, v, causal=causal, return_lse=np.True_)
    for scale in (1, True, np.float16(1), np.int32(1), Fraction(1, 3), False):
        cuflash.attention(q, k, v, scale=scale)
    for flag in ("yes", None, 2, []):
        with pytest.raises(TypeError, match=r"return_lse is .*True and False"):
            cuflash.attention(q, k, v, return_lse=flag)


# --- element types ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (np.uint16, r"q has dtype uint16; accepted are float16, bfloat16, .*q\.view\(ml_dtypes\.bfloat16\)"),
        (np.int16, r"int16.*bfloat16"),
        (np.uint8, r"uint8.*not guessed"),
        (np.int32, r"int32; accepted are"),
        (np.bool_, r"bool"),
        (np.complex64, r"complex64"),
    ],
)
def test_types_are_not_guessed(adopt: Any, dtype: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        cuflash.attention(*(adopt(np.zeros(SHAPE, dtype)) for _ in range(3)))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_beside_other_types_is_refused_by_name(adopt: Any, dtype: str) -> None:
    q, k, v = (adopt(np.zeros(SHAPE, np.float16)) for _ in range(3))
    codes = adopt(np.zeros(SHAPE, getattr(ml_dtypes, dtype)))
    with pytest.raises(cuflash.UnsupportedError, match=f"v has dtype {dtype}; 8-bit floats are for .*, or cast"):
        cuflash.attention(q, k, codes)
    with pytest.raises(
        TypeError, match="k has dtype float16; accepted are q, k and v of float8_e4m3fn and float8_e5m2"
    ):
        cuflash.attention(codes, k, v)
    with pytest.raises(cuflash.UnsupportedError, match=f"q has dtype {dtype}; 8-bit floats are for"):
        cuflash.attention_backward(codes, codes, codes, codes, codes, codes)


def test_other_8_bit_floats_are_refused_by_name(adopt: Any) -> None:
    message = "q has dtype float8_e4m3b11fnuz; of 8-bit floats cuflash takes float8_e4m3fn and float8_e5m2: cast it"
    with pytest.raises(cuflash.UnsupportedError, match=message):
        cuflash.attention(*(adopt(np.zeros(SHAPE, ml_dtypes.float8_e4m3b11fnuz)) for _ in range(3)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_types_on_the_gpu_name_the_cast(gpu: FakeGpu, dtype: str) -> None:
    with pytest.raises(cuflash.UnsupportedError, match=rf"{dtype}.*float16 and bfloat16: cast.*astype.*CPU"):
        cuflash.attention(*map(gpu.array, qkv(dtype)))


def test_mixed_types(adopt: Any) -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError, match="q has dtype float16 and k bfloat16; all arrays of a call must have one dtype"):
        cuflash.attention(adopt(q), adopt(k.astype(ml_dtypes.bfloat16)), adopt(v))
    with pytest.raises(TypeError, match="q has dtype float16 and out bfloat16"):
        cuflash.attention(adopt(q), adopt(k), adopt(v), out=adopt(q.astype(ml_dtypes.bfloat16)))


def test_foreign_byte_order(adopt: Any) -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError, match=r"k has dtype >f2.*byte order"):
        cuflash.attention(adopt(q), adopt(k.astype(">f2")), adopt(v))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_have_the_type_of_the_inputs(dtype: str) -> None:
    q, k, v = qkv(DTYPES[dtype])
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    assert out.dtype == q.dtype and lse.dtype == ("float64" if dtype == "float64" else "float32")
    assert_accurate(out.swapaxes(1, 2), *(x.swapaxes(1, 2) for x in (q, k, v)))


# --- arrays ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [None, 3.0, "q", [[[[1.0]]]], object(), memoryview(b"1234")])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_things_that_are_no_arrays(adopt: Any, thing: Any, position: int) -> None:
    arguments = [adopt(x) for x in qkv()]
    arguments[position] = thing
    with pytest.raises(TypeError, match=f"{'qkv'[position]} is (None|an? .*); accepted are CuPy and NumPy arrays, tor"):
        cuflash.attention(*arguments)


def test_out_of_another_kind(adopt: Any) -> None:
    q, k, v = (adopt(x) for x in qkv())
    with pytest.raises(TypeError, match=r"out is a .*list; accepted"):
        cuflash.attention(q, k, v, out=[])


def test_mixed_kinds(gpu: FakeGpu) -> None:
    q, k, v = qkv()
    for mixed, words in (
        ((gpu.array(q), k, v), "q is a CuPy array and k a NumPy array"),
        ((q, k, gpu.array(v)), "q is a NumPy array and v a CuPy array"),
    ):
        with pytest.raises(TypeError, match=words + "; all arrays of a call must be of one kind"):
            cuflash.attention(*mixed)
    with pytest.raises(TypeError, match="q is a CuPy array and out a NumPy array"):
        cuflash.attention(*map(gpu.array, (q, k, v)), out=q.copy())


def test_mixed_devices(gpu: FakeGpu) -> None:
    """On a first call, and when calls of both devices are hot."""
    q, k, v = qkv()
    on = [[gpu.array(x, device) for x in (q, k, v)] for device in (0, 1)]
    for _ in range(2):
        with pytest.raises(
            ValueError, match="q is on cuda:0 and v on cuda:1; all arrays of a call must be on one device"
        ):
            cuflash.attention(on[0][0], on[0][1], on[1][2])
        with pytest.raises(ValueError, match="q is on cuda:0 and out on cuda:1"):
            cuflash.attention(*on[0], out=gpu.array(poisoned(SHAPE, q.dtype), 1))
        for arrays_on in on:
            cuflash.attention(*arrays_on)


def test_subclasses_are_refused_by_name(gpu: FakeGpu) -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError, match=r"k is a MaskedArray.*k\.filled"):
        cuflash.attention(q, np.ma.masked_array(k), v)

    class Special(np.ndarray):
        pass

    with pytest.raises(TypeError, match=r"q is a .*Special.*numpy\.asarray\(q\)"):
        cuflash.attention(q.view(Special), k, v)

    class Fancy(gpu.cupy.ndarray):  # type: ignore[misc, name-defined]
        pass

    on_gpu = [gpu.array(x) for x in (q, k, v)]
    cuflash.attention(*on_gpu)
    fancy = Fancy(SHAPE, np.float16, on_gpu[1].data)
    for sources in ((on_gpu[0], fancy, on_gpu[2]), (fancy, on_gpu[1], on_gpu[2])):
        with pytest.raises(TypeError, match=r"Fancy, a subclass of cupy\.ndarray"):
            cuflash.attention(*sources)


def test_memory_maps_and_read_only_inputs(tmp_path: Any) -> None:
    q, k, v = qkv(np.float32)
    expected = cuflash.attention(q, k, v)
    for x in (q, k, v):
        x.setflags(write=False)
    assert np.array_equal(cuflash.attention(q, k, v), expected)
    np.save(tmp_path / "q.npy", q)
    mapped = np.load(tmp_path / "q.npy", mmap_mode="r")
    result = cuflash.attention(mapped, k, v)
    assert type(result) is np.ndarray and np.array_equal(result, expected)
    with pytest.raises(ValueError, match="out is read-only"):
        cuflash.attention(q, k, v, out=mapped)


# --- out -------------------------------------------------------------------------------------------------------


def test_out_shapes(adopt: Any) -> None:
    q, k, v = (adopt(x) for x in qkv())
    for shape in ((2, 10, 4, 15), (2, 4, 10, 16), (1, *SHAPE), (10, 4, 16)):
        with pytest.raises(ValueError, match=r"out has shape .* this call's output has \(2, 10, 4, 16\)"):
            cuflash.attention(q, k, v, out=adopt(np.zeros(shape, np.float16)))


@pytest.mark.parametrize(
    "strides", [(0, 128, 32, 2), (1280, 0, 32, 2), (1280, 128, 32, 0), (1280, 96, 32, 2), (640, 128, 32, 2)]
)
def test_out_whose_elements_share_memory(adopt: Any, strides: tuple[int, ...]) -> None:
    out = np.lib.stride_tricks.as_strided(np.full(4000, np.nan, np.float16), SHAPE, strides)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out has strides .*share memory"):
            cuflash.attention(*map(adopt, qkv()), out=adopt(out))
    assert np.isnan(out).all()


def test_out_that_is_an_input(adopt: Any) -> None:
    q, k, v = qkv()
    for name, x in (("q", q), ("k", k), ("v", v)):
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            cuflash.attention(*map(adopt, (q, k, v)), out=adopt(x))
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            cuflash.attention(*map(adopt, (q, k, v)), out=adopt(x[:, ::-1]))


def test_overlap_that_is_too_hard_to_tell_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_hard(*_: Any, **__: Any) -> bool:
        raise np.exceptions.TooHardError

    monkeypatch.setattr(np, "shares_memory", too_hard)
    memory = np.zeros((2, 10, 4, 2, 16), np.float16)
    with pytest.raises(ValueError, match="out shares memory with q"):
        cuflash.attention(memory[:, :, :, 0], *qkv()[:2], out=memory[:, :, :, 1])


def test_addresses_between_elements(gpu: FakeGpu) -> None:
    q, _, v = qkv()
    raw = np.zeros(4 * q.nbytes, np.uint8)
    odd = raw[1 : 1 + q.nbytes].view(np.float16).reshape(SHAPE)
    third = np.lib.stride_tricks.as_strided(raw.view(np.float16), SHAPE, (1920, 192, 48, 3))
    for x in (odd, third):
        with pytest.raises(ValueError, match=r"k lies at address 0x.*multiples of the element size, 2"):
            cuflash.attention(gpu.array(q), gpu.array(x), gpu.array(v))
        assert np.isfinite(cuflash.attention(q, x, v)).all()


@pytest.mark.parametrize(
    ("shape", "error", "words"),
    [
        ((1, 2**31 - 1024, 1, 1), cuflash.UnsupportedError, "q has sequence length 2147482624"),
        ((2**16, 1, 2**15, 1), cuflash.UnsupportedError, r"batch \* heads is 65536 \* 32768"),
    ],
)
def test_limits(gpu: FakeGpu, shape: tuple[int, ...], error: type[Exception], words: str) -> None:
    arrays = [gpu.at(i << 40, shape) for i in (1, 2, 3)]
    with pytest.raises(error, match=words):
        cuflash.attention(*arrays)


# --- DLPack ----------------------------------------------------------------------------------------------------


class Producer:
    """An array type that speaks DLPack and nothing else."""

    device = (1, 0)

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


class Namespaced(Producer):
    """The same, saying how an array of its kind is made."""

    @staticmethod
    def from_dlpack(x: Any) -> Namespaced:
        return Namespaced(np.from_dlpack(x))

    def __array_namespace__(self, **_: Any) -> type[Namespaced]:
        return Namespaced


class Pinned(Producer):
    device = (3, 0)


class Elsewhere(Producer):
    device = (8, 0)


@pytest.mark.parametrize("kind", [Producer, Pinned])
def test_dlpack_producers_get_numpy_arrays(kind: type[Producer]) -> None:
    q, k, v = qkv()
    expected, expected_lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    out, lse = cuflash.attention(*map(kind, (q, k, v)), causal=True, return_lse=True)
    assert type(out) is type(lse) is np.ndarray
    assert np.array_equal(out, expected) and np.array_equal(lse, expected_lse)


def test_dlpack_producers_with_a_namespace_get_their_own_kind() -> None:
    q, k, v = qkv()
    expected = cuflash.attention(q, k, v)
    out, lse = cuflash.attention(*map(Namespaced, (q, k, v)), return_lse=True)
    assert type(out) is type(lse) is Namespaced and np.array_equal(out.array, expected)
    target = Namespaced(poisoned(SHAPE, q.dtype))
    assert cuflash.attention(*map(Namespaced, (q, k, v)), out=target) is target
    assert np.array_equal(target.array, expected)
    cuflash.warmup(*map(Namespaced, (q, k, v)))


def test_dlpack_refusals() -> None:
    q, k, v = qkv()
    with pytest.raises(cuflash.UnsupportedError, match="q is on a device of DLPack type 8"):
        cuflash.attention(*map(Elsewhere, (q, k, v)))
    with pytest.raises(
        TypeError, match=r"q is a .* array and k a NumPy array; all arrays of a call must be of one kind"
    ):
        cuflash.attention(Producer(q), k, v)
    with pytest.raises(TypeError, match=r"q is a NumPy array and v a .* array"):
        cuflash.attention(q, k, Producer(v))
    with pytest.raises(ValueError, match="q has batch"):
        cuflash.attention(*map(Producer, (q[:1], k, v)))


def test_dlpack_on_a_gpu_needs_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    on_gpu = type("OnGpu", (Producer,), {"device": (2, 0)})
    with pytest.raises(cuflash.UnsupportedError, match=re.escape(f"CuPy, which is not installed: {INSTALL_CUDA}")):
        cuflash.attention(*map(on_gpu, qkv()))


def test_dlpack_on_a_gpu_goes_through_cupy(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views by CuPy, the launch on CuPy's stream, the inputs held until it has passed."""
    kept: list[Any] = []
    monkeypatch.setattr(bridge._keeper, "hold", lambda held: kept.append((gpu.device, held)))
    monkeypatch.setattr(gpu.cupy, "from_dlpack", lambda x: gpu.array(x.array, device=1))
    managed = type("Managed", (Producer,), {"device": (13, 0)})
    gpu.streams[1] = 99
    q, k, v = qkv()
    producers = [managed(x) for x in (q, k, v)]
    out = cuflash.attention(*producers)
    assert type(out) is gpu.cupy.ndarray and gpu.launches[0].stream == 99 and gpu.launches[0].loaded.device == 1
    assert kept == [(1, tuple(producers))]
    expected = cuflash.attention(*map(gpu.array, (q, k, v)))
    assert np.array_equal(gpu.host(out), gpu.host(expected))


class Event:
    """Stands for CuPy's events."""

    events: ClassVar[list[Event]] = []

    def __init__(self, **_: Any) -> None:
        self.done = False
        self.events.append(self)

    def record(self, stream: Any) -> None:
        self.stream = stream


def test_keeper_releases_what_the_stream_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")
    from types import SimpleNamespace

    stream = SimpleNamespace(is_capturing=lambda: capturing)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: stream)
    monkeypatch.setattr(cupy.cuda, "Event", Event)
    monkeypatch.setattr(Event, "events", [])
    keeper, capturing = bridge.Keeper(), False

    class Thing:
        pass

    things = [Thing() for _ in range(3)]
    alive = [weakref.ref(thing) for thing in things]
    for thing in things[:2]:
        keeper.hold((thing,))
    del things[:2], thing
    gc.collect()
    assert all(ref() is not None for ref in alive), "dropped before the stream passed"
    Event.events[1].done = True  # not the oldest: another stream's
    keeper.hold((things[0],))
    del things
    gc.collect()
    assert [ref() is not None for ref in alive] == [True, False, True]
    capturing = True
    keeper.hold((Thing(),))
    assert len(keeper) == 2 and len(Event.events) == 3


# --- internals that others build on ----------------------------------------------------------------------------


def test_requests_describe_calls() -> None:
    q, k, v = np.zeros((2, 5, 6, 8), "f4"), np.zeros((2, 9, 3, 8), "f4"), np.zeros((2, 9, 3, 4), "f4")
    options = {"scale": None, "layout": "bshd", "return_lse": False}
    request = make_request((q, k, v), None, causal=True, **options)
    assert request.sizes == (2, 5, 9, 6, 3) and (request.head_dim, request.head_dim_v) == (8, 4)
    assert request.out_shape == (2, 5, 6, 4) and request.lse_shape == (2, 6, 5) and request.causal_offset == 4
    assert request.device == arrays.CPU and request.q.place == "the CPU"
    assert "array" not in repr(request.q).split("kind")[0]
    assert make_request((q, k, v), None, causal="top_left", **options).causal_offset == 0


def test_frameworks_are_not_imported_to_recognise_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        assert name.partition(".")[0] not in ("torch", "jax", "cupy"), f"{name} was imported"
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
    q, k, v = qkv()
    cuflash.attention(q, k, v)
    cuflash.attention(*map(Producer, (q, k, v)))
    with pytest.raises(TypeError):
        cuflash.attention([], k, v)
