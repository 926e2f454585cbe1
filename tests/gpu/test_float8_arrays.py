"""Attention of 8-bit arrays with the caller's scales, against float64 on what the codes stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.build import Job
from cuflash.fp8 import FORMATS
from cuflash.kernels import select_config
from cuflash.prepare_kernels import prepare_problem
from tests.fp8 import Real, decoded
from tests.gpu.float8_expected import judge_attention
from tests.gpu.float8_products import PRODUCTS, Call, jobs_of_calls, jobs_of_kinds, kernels_of, of_one_kind
from tests.gpu.support import CAUSAL, Array, assert_same_bits, host_qkv, poison_pool, swap_layout, target, to_host
from tests.operands import draw_codes, draw_scales, scale_options, shapes_of
from tests.oracle import oracle

pytestmark = pytest.mark.gpu

E4M3, E5M2 = FORMATS


class Case(NamedTuple):
    """Lengths, heads, head dims; formats of Q, K and V; their scales as of `draw_scales`."""

    lengths: tuple[int, int]
    heads: tuple[int, int]
    dims: tuple[int, int]
    forms: tuple[str, str, str] = (E4M3, E4M3, E4M3)
    axes: tuple[Any, Any, Any] = (3, 3, 3)
    batch: int = 2

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
        return draw_codes(np.random.default_rng(seed), self.shapes, self.forms)

    def scales(self, seed: int = 1) -> list[Any]:
        sizes = [(batch, heads, seq) for batch, seq, heads, _ in self.shapes]
        return draw_scales(np.random.default_rng(seed), sizes, self.axes, 0.5, 1.5)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return shapes_of(self.lengths, self.heads, self.dims, self.batch)


CASES = (
    Case((1, 1), (1, 1), (64, 64), axes=("number", 0, 2)),
    Case((127, 129), (2, 2), (64, 64), (E5M2, E5M2, E5M2)),
    Case((128, 128), (4, 1), (128, 128), (E4M3, E5M2, E4M3), (3, 2, 0)),
    Case((700, 513), (4, 2), (128, 128), (E4M3, E4M3, E5M2)),
    Case((300, 70), (2, 2), (128, 128), (E5M2, E4M3, E4M3), (2, 3, 3)),
    Case((257, 384), (2, 2), (256, 256), (E5M2, E5M2, E5M2), (3, 3, 3)),
    Case((200, 300), (3, 1), (192, 128), (E5M2, E4M3, E5M2)),
    Case((200, 300), (2, 2), (33, 70), axes=(3, 2, 3)),
    Case((130, 200), (2, 2), (1, 1), axes=(2, "number", 3)),
    Case((200, 300), (2, 1), (250, 130)),
    Case((200, 300), (2, 1), (40, 100), (E4M3, E5M2, E5M2)),
)


@pytest.fixture(scope="module", autouse=True, params=PRODUCTS)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels of one kind, for all tests of this file but those of what is the same for all."""
    with kernels_of(request) as name:
        yield name


def kernels_ahead() -> list[Job]:
    # Of the tests of strides; of one without elements, where CuPy's strides are 0, which allow no wide accesses.
    prepare = [prepare_problem(dim, dim, access_bytes, target()) for dim, access_bytes in ((64, 4), (64, 1), (128, 1))]
    return [*jobs_of_kinds(_calls()), *jobs_of_calls(_calls_of_one_kind()), *((p, select_config(p)) for p in prepare)]


def _calls() -> Iterator[Call]:
    """What the tests below take of all kinds."""
    for case, causal in product(CASES, CAUSAL[:2]):
        yield case.arrays(), {"causal": causal, "return_lse": True}
    for dim, form in product((64, 128), FORMATS):
        yield _small(dim, E4M3, E4M3, form), {"out_dtype": "float16"}
    for form in FORMATS:
        yield _small(128, form, form, form), {"causal": True}
    yield _small(128, E4M3, E4M3, E4M3), {}


def _calls_of_one_kind() -> Iterator[Call]:
    """And beside these, of one."""
    for dim, causal in ((64, False), (128, True)):
        yield host_qkv((2, 2), (1, 1), (dim, dim)), {"precision": "fp8", "causal": causal}
        for form in FORMATS:
            yield _small(dim, form, form, form), {"causal": causal, "out_dtype": "float16"}
    yield _small(64, E4M3, E5M2, E4M3), {"causal": True}


def _small(dim: int, *forms: str) -> list[np.ndarray]:
    return Case((2, 2), (1, 1), (dim, dim), forms).arrays()  # type: ignore[arg-type]


def to_gpu(x: Any) -> Any:
    """A CuPy copy, which takes codes as bytes."""
    import cupy as cp

    return cp.asarray(x.view(np.uint8)).view(x.dtype) if x.dtype.itemsize == 1 else cp.asarray(x)


def named(scales: list[Any]) -> dict[str, Any]:
    return scale_options(scales, to_gpu)


def check(
    arrays: list[np.ndarray],
    scales: list[Any],
    causal: Any = False,
    place: Callable[[Any], Any] = lambda x: x,
    **options: Any,
) -> Array:
    """Runs into poisoned memory, judges output and LSE, and returns the output; ``place`` moves Q, K and V about."""
    poison_pool(8 * arrays[0].size + 8 * arrays[2].size)
    operands = [place(to_gpu(x)) for x in arrays]
    out, lse = cuflash.attention(*operands, causal=causal, return_lse=True, **options, **named(scales))
    q, k, v = (decoded(x, scale) for x, scale in zip(arrays, scales, strict=True))
    real = Real(q, k, v, 0 * v[:, :, 0])
    judge_attention(swap_layout(to_host(out)), to_host(lse), real, causal, q.shape[3] ** -0.5)
    return out


# --- the function


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: str(CASES[index][:4]))
def test_shapes_formats_scales(index: int, causal: Any) -> None:
    case = CASES[index]
    out = check(case.arrays(index), case.scales(index), causal)
    assert out.dtype == ml_dtypes.bfloat16 and out.flags.c_contiguous


@of_one_kind
@pytest.mark.parametrize("form", FORMATS)
def test_the_very_bits_of_the_same_quantized_tensors(form: Any) -> None:
    """The preparing kernel makes what the quantizer writes: the attention kernel cannot tell."""
    rng = np.random.default_rng(0)
    for dim, causal in ((64, False), (128, True)):
        arrays = [to_gpu(rng.standard_normal((2, n, 2, dim), np.float32).astype(np.float16)) for n in (300, 400, 400)]
        quantized = cuflash.quantize_qkv(*arrays, center=False, dtype=form)
        expected = cuflash.attention(*quantized, causal=causal)
        scales = {f"{x.role}_scale": x.scales for x in quantized}
        codes = [x.to_rows().float8() for x in quantized]
        found = cuflash.attention(*codes, causal=causal, out_dtype="float16", **scales)
        assert_same_bits(found, expected)


def _spread(x: Any, axis: int, gap: int) -> Any:
    """The same numbers with bytes of NaN between them."""
    import cupy as cp

    shape = list(x.shape)
    shape[axis] += gap
    around = cp.full(shape, 0x7F, np.uint8)
    where = tuple(slice(gap, None) if i == axis else slice(None) for i in range(4))
    around[where] = x.view(np.uint8)
    return around[where].view(x.dtype)


def _every_other(x: Any) -> Any:
    import cupy as cp

    around = cp.full((*x.shape[:3], 2 * x.shape[3]), 0x7F, np.uint8)
    around[..., ::2] = x.view(np.uint8)
    return cp.ndarray(x.shape, x.dtype, around.data, strides=(*around.strides[:3], 2))


@pytest.mark.parametrize(("axis", "gap"), [(1, 3), (2, 1), (3, 64)], ids=["rows apart", "heads apart", "packed"])
def test_strides(axis: int, gap: int) -> None:
    """Of Q and K that the attention kernel reads where they are."""
    _check_place(lambda x: _spread(x, axis, gap), copied=False)


@of_one_kind
@pytest.mark.parametrize(
    "place",
    [lambda x: _spread(x, 3, 4), lambda x: _spread(x, 3, 1), _every_other],
    ids=["four bytes", "one byte", "every other column"],
)
def test_strides_that_need_a_copy(place: Callable[[Any], Any]) -> None:
    """Which the preparing kernel makes."""
    _check_place(place, copied=True)


def _check_place(place: Callable[[Any], Any], copied: bool) -> None:
    case = Case((300, 400), (4, 2), (64, 64))
    arrays, scales = case.arrays(5), case.scales()
    expected = check(arrays, scales, True)
    assert_same_bits(check(arrays, scales, True, place), expected)
    explained = cuflash.explain(*(place(to_gpu(x)) for x in arrays), causal=True)
    assert ("q is copied" in str(explained)) == copied


def test_layouts_output_dtypes_and_out() -> None:
    import cupy as cp

    case = Case((200, 300), (4, 2), (128, 128))
    arrays, scales = case.arrays(), case.scales()
    expected = check(arrays, scales, out_dtype="float16")
    turned = [to_gpu(np.ascontiguousarray(x.swapaxes(1, 2))) for x in arrays]
    out = cp.zeros((2, 4, 200, 128), np.float16)
    found = cuflash.attention(*turned, layout="bhsd", out_dtype="float16", out=out, **named(scales))
    assert found is out
    assert_same_bits(cp.ascontiguousarray(out.swapaxes(1, 2)), expected)


@of_one_kind
def test_broadcast_keys() -> None:
    """A stride of 0, which TMA does not take."""
    import cupy as cp

    case = Case((200, 300), (2, 1), (64, 64))
    arrays, scales = case.arrays(), case.scales()
    q, k, v = map(to_gpu, arrays)
    k2, v2 = (cp.broadcast_to(x.view(np.uint8), (2, 300, 2, 64)).view(x.dtype) for x in (k, v))
    wide = [scales[0], *(np.repeat(x, 2, axis=1) for x in scales[1:])]
    found = cuflash.attention(q, k2, v2, causal=True, **named(wide))
    assert_same_bits(found, cuflash.attention(q, k, v, causal=True, **named(scales)))


def test_large_numbers_of_scales() -> None:
    """Scales of extreme size, which the size of the other operand's makes up for."""
    case = Case((300, 400), (2, 2), (128, 128), (E4M3, E5M2, E4M3))
    arrays, scales = case.arrays(), case.scales()
    expected = check(arrays, scales)
    for power in (-60, -20, 20, 60):
        factor = np.float32(2.0**power)
        moved = [scales[0] * factor, scales[1] / factor, scales[2]]
        assert_same_bits(cuflash.attention(*map(to_gpu, arrays), **named(moved)), expected)


def test_what_is_no_scale_gives_nan() -> None:
    case = Case((300, 300), (2, 2), (64, 64), axes=(2, 2, 2))
    arrays = list(map(to_gpu, case.arrays()))
    for which in range(3):
        for bad in (0.0, -1.0, np.inf, np.nan):
            scales = case.scales()
            scales[which][0, 1] = bad
            nan = np.isnan(to_host(cuflash.attention(*arrays, **named(scales))).astype(np.float32)).all(axis=(1, 3))
            np.testing.assert_array_equal(nan, [[False, True], [False, False]])


def test_infinities_and_nan_of_the_codes() -> None:
    """A key of -inf is hidden, as a mask would; NaN stays in the rows that see it."""
    case = Case((300, 300), (2, 2), (128, 128), (E5M2, E5M2, E5M2))
    arrays, scales = case.arrays(), case.scales()
    arrays[0] = np.abs(arrays[0].astype(np.float32)).astype(arrays[0].dtype) + arrays[0].dtype.type(0.25)
    arrays[1][:, 200] = -np.inf
    arrays[2][0, 150, 1, 3] = np.nan
    found = to_host(cuflash.attention(*map(to_gpu, arrays), causal=True, **named(scales))).astype(np.float32)
    expected = cuflash.attention(*arrays, causal=True, out_dtype="float32", **scale_options(scales))
    nan = np.isnan(found)
    assert nan[0, 150:, 1, 3].all() and not nan[:, :128].any()
    assert not np.delete(nan, 3, axis=3).any()
    np.testing.assert_allclose(found[:, :128], expected[:, :128], atol=0.25, rtol=0.06)  # P is rounded to 3 bits


@functools.cache
def _values_with_a_mean(dim: int, form: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Q, K and V, and attention on them in float64."""
    case = Case((256, 4096), (2, 2), (dim, dim), (E4M3, E4M3, form), ("number",) * 3, batch=1)
    q, k, v = case.arrays(4)
    v = (v.astype(np.float32) + 1).astype(v.dtype)
    return [q, k, v], swap_layout(oracle(*(decoded(x, 1.0) for x in (q, k, v)), causal=False)[0])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dim", [64, 128])
def test_values_with_a_mean(dim: int, form: str) -> None:
    """Which codes from elsewhere have: two levels keep the bias within 0.3 per cent."""
    arrays, exact = _values_with_a_mean(dim, form)
    out = to_host(cuflash.attention(*map(to_gpu, arrays), out_dtype="float16")).astype(np.float64)
    assert abs((out - exact).mean() / np.abs(exact).mean()) <= 3e-3


def test_runs_repeat_bit_for_bit() -> None:
    case = Case((1500, 1500), (8, 4), (128, 128), (E4M3, E4M3, E4M3))
    arrays, scales = list(map(to_gpu, case.arrays())), named(case.scales())
    first = cuflash.attention(*arrays, causal=True, **scales)
    for _ in range(50):
        out = cuflash.attention(*arrays, causal=True, **scales)
    assert_same_bits(out, first)


@of_one_kind
def test_nothing_to_compute() -> None:
    for lengths in ((0, 10), (10, 0)):
        case = Case(lengths, (2, 2), (128, 128))
        out, lse = cuflash.attention(*map(to_gpu, case.arrays()), return_lse=True, **named(case.scales()))
        assert out.shape[1] == lengths[0] and not to_host(out).astype(np.float32).any()
        assert np.isneginf(to_host(lse)).all()


# --- frameworks


def _torch_of(torch: Any, x: Any) -> Any:
    if x.dtype.itemsize == 1:
        return torch.from_numpy(x.view(np.uint8)).cuda().view(getattr(torch, x.dtype.name))
    return torch.from_numpy(x).cuda()


@of_one_kind
def test_torch_tensors(torch: Any) -> None:
    case = Case((200, 300), (4, 2), (128, 128), (E4M3, E5M2, E4M3), (3, 0, "number"))
    arrays, scales = case.arrays(), case.scales()
    expected = cuflash.attention(*map(to_gpu, arrays), causal=True, **named(scales))
    tensors = [_torch_of(torch, x) for x in arrays]
    own = scale_options(scales, partial(_torch_of, torch))
    out = cuflash.attention(*tensors, causal=True, **own)
    assert out.dtype is torch.bfloat16
    assert_same_bits(out.view(torch.int16).cpu().numpy().view(np.uint16), expected)


def test_captured_in_a_graph(torch: Any) -> None:
    """After a warm-up; scales in arrays may change between replays."""
    case = Case((300, 400), (4, 2), (128, 128), axes=(3, 3, 3))
    tensors = [_torch_of(torch, x) for x in case.arrays()]
    own = scale_options(case.scales(), partial(_torch_of, torch))
    cuflash.warmup(*tensors, causal=True, **own)
    call: Callable[[], Any] = lambda: cuflash.attention(*tensors, causal=True, **own)  # noqa: E731
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for change in (False, True):
        if change:
            own["v_scale"].mul_(2)
            expected = call()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)


@of_one_kind
def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    case = Case((200, 300), (2, 2), (64, 64), (E4M3, E5M2, E4M3), (3, "number", 0))
    arrays, scales = case.arrays(), case.scales()
    expected = cuflash.attention(*map(to_gpu, arrays), causal=True, **named(scales))
    own = scale_options(scales, jax.numpy.asarray)
    out = cuflash.attention(*map(jax.numpy.asarray, arrays), causal=True, **own)
    assert isinstance(out, jax.Array)
    assert_same_bits(np.asarray(out).view(np.uint16), expected)
