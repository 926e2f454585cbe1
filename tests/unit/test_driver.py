"""The driver layer over a stand-in for the bindings: what is called, in which order, in whose context, and errors."""

from __future__ import annotations

import ctypes
import enum
import gc
import re
import struct
import sys
import threading
import types

import pytest

from cuflash import driver, jit
from cuflash.compiled import Compiled
from cuflash.errors import INSTALL_CUDA, DriverError

COMPILED = Compiled(b"\x7fELF...", "tiny_kernel", "sm_90", 32, 0, 0, 0, 0.1, "", "13.0.88")


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_BRAND_NEW = 12345


ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "GLOBAL_MEMORY_BUS_WIDTH": 6144,
    "MEMORY_CLOCK_RATE": 3_201_000,
    "CLOCK_RATE": 1_980_000,
    "MULTIPROCESSOR_COUNT": 132,
    "L2_CACHE_SIZE": 62914560,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
}
OK = CUresult.CUDA_SUCCESS


def members(values):
    """An enumeration as far as all versions of the bindings agree: members are attributes."""
    return types.SimpleNamespace(**enum.IntEnum("members", values).__members__)


class FakeBindings:
    """Two devices whose primary contexts are 1000 and 1001; each thread has a stack of contexts."""

    CUresult = CUresult
    CUdevice_attribute = members({f"CU_DEVICE_ATTRIBUTE_{name}": n for n, name in enumerate(ATTRIBUTES)})
    CUfunction_attribute = members(
        {
            "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8,
            "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT": 9,
        }
    )

    def __init__(self):
        self.calls = []
        self.failing = {}
        self.threads = threading.local()

    @property
    def stack(self):
        return self.threads.__dict__.setdefault("stack", [])

    def _did(self, name, *values, result=()):
        context = self.stack[-1] if self.stack else 0
        self.calls.append((name, context, *values))
        status = self.failing.get(name, OK)
        return (status, *(result if status == OK else [None] * len(result)))

    def names(self):
        return [call[0] for call in self.calls]

    def cuInit(self, flags):
        return self._did("cuInit", flags)

    def cuGetErrorName(self, status):
        known = status != CUresult.CUDA_ERROR_BRAND_NEW
        return (OK, status.name.encode()) if known else (CUresult.CUDA_ERROR_INVALID_VALUE, None)

    def cuGetErrorString(self, status):
        known = status != CUresult.CUDA_ERROR_BRAND_NEW
        return (OK, b"described") if known else (CUresult.CUDA_ERROR_INVALID_VALUE, None)

    def cuDeviceGetCount(self):
        return self._did("cuDeviceGetCount", result=(2,))

    def cuDeviceGet(self, ordinal):
        return self._did("cuDeviceGet", ordinal, result=(ordinal,))

    def cuDeviceGetAttribute(self, attribute, device):
        name = attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        return self._did("cuDeviceGetAttribute", name, device, result=(ATTRIBUTES[name],))

    def cuDeviceGetName(self, size, device):
        return self._did("cuDeviceGetName", size, device, result=(b"NVIDIA H200".ljust(size, b"\0"),))

    def cuDeviceTotalMem(self, device):
        return self._did("cuDeviceTotalMem", device, result=(150_000_000_000,))

    def cuDevicePrimaryCtxRetain(self, device):
        return self._did("cuDevicePrimaryCtxRetain", device, result=(1000 + device,))

    def cuCtxGetCurrent(self):
        return self._did("cuCtxGetCurrent", result=(self.stack[-1] if self.stack else 0,))

    def cuCtxGetDevice(self):
        return self._did("cuCtxGetDevice", result=(self.stack[-1] - 1000,))

    def cuCtxSetCurrent(self, context):
        self.stack[-1:] = [context]
        return self._did("cuCtxSetCurrent", context)

    def cuCtxPushCurrent(self, context):
        self.stack.append(context)
        return self._did("cuCtxPushCurrent", context)

    def cuCtxPopCurrent(self):
        return self._did("cuCtxPopCurrent", result=(self.stack.pop(),))

    def cuLibraryLoadData(self, image, *options):
        return self._did("cuLibraryLoadData", image, *options, result=("library",))

    def cuLibraryGetKernel(self, library, name):
        return self._did("cuLibraryGetKernel", library, name, result=("kernel",))

    def cuKernelGetFunction(self, kernel):
        return self._did("cuKernelGetFunction", kernel, result=(0xF00,))

    def cuFuncSetAttribute(self, function, attribute, value):
        return self._did("cuFuncSetAttribute", function, int(attribute), value)

    def cuLibraryUnload(self, library):
        return self._did("cuLibraryUnload", library)

    CUtensorMapDataType = members(
        {
            "CU_TENSOR_MAP_DATA_TYPE_UINT8": 0,
            "CU_TENSOR_MAP_DATA_TYPE_FLOAT16": 6,
            "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16": 9,
        }
    )
    CUtensorMapInterleave = members({"CU_TENSOR_MAP_INTERLEAVE_NONE": 0})
    CUtensorMapSwizzle = members({f"CU_TENSOR_MAP_SWIZZLE_{32 << i}B": 1 + i for i in range(3)})
    CUtensorMapL2promotion = members({"CU_TENSOR_MAP_L2_PROMOTION_L2_128B": 2, "CU_TENSOR_MAP_L2_PROMOTION_L2_256B": 3})
    CUtensorMapFloatOOBfill = members({"CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE": 0})

    class cuuint32_t(int):
        pass

    class cuuint64_t(int):
        pass

    class CUtensorMap:
        def __init__(self):
            self.memory = ctypes.create_string_buffer(bytes(range(128)), 128)

        def getPtr(self):
            return ctypes.addressof(self.memory)

    def cuTensorMapEncodeTiled(self, dtype, rank, address, extents, strides, box, steps, *modes):
        assert {type(x) for x in extents + strides} == {self.cuuint64_t}
        assert {type(x) for x in box + steps} == {self.cuuint32_t}
        values = (int(dtype), rank, address, *map(tuple, (extents, strides, box, steps)), *map(int, modes))
        return self._did("cuTensorMapEncodeTiled", values, result=(self.CUtensorMap(),))

    def cuLaunchKernel(self, function, *rest):
        *numbers, address, extra = rest
        block = ctypes.string_at(ctypes.c_void_p.from_address(address).value, 16)
        return self._did("cuLaunchKernel", function, *numbers, struct.unpack("<qq", block), extra)

    class CUlaunchConfig(types.SimpleNamespace):
        pass

    CUlaunchAttribute = CUlaunchAttributeValue = CUlaunchConfig
    CUlaunchAttributeID = types.SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)

    def cuLaunchKernelEx(self, config, function, address, extra):
        block = ctypes.string_at(ctypes.c_void_p.from_address(address).value, 16)
        return self._did("cuLaunchKernelEx", vars(config), function, struct.unpack("<qq", block), extra)


CACHED = (
    driver._driver,
    driver._device,
    driver.device_compute_capability,
    driver.device_properties,
    driver.multiprocessors,
    driver._primary_context,
    driver._early_attribute,
)


@pytest.fixture(autouse=True)
def untouched_driver(monkeypatch):
    monkeypatch.setattr(driver, "_cu", None)
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


def install(monkeypatch, bindings):
    package = types.ModuleType("cuda.bindings")
    package.driver = bindings
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    return bindings


@pytest.fixture
def cuda(monkeypatch):
    return install(monkeypatch, FakeBindings())


# --- what is missing or fails ----------------------------------------------------------------------------------


def test_missing_bindings_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DriverError, match=re.escape(INSTALL_CUDA)):
        driver.device_count()


def test_a_missing_driver_is_named(monkeypatch, cuda):
    def absent(flags):
        raise RuntimeError('"cuda" is an NVIDIA driver library and can only be found via system search.')

    cuda.cuInit = absent
    for _ in range(2):
        with pytest.raises(DriverError, match=r"libcuda.*install the NVIDIA driver; without one, NumPy arrays"):
            driver.device_count()


def test_errors_carry_cudas_name_and_text(cuda):
    cuda.failing["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE
    with pytest.raises(DriverError, match="CUDA_ERROR_NO_DEVICE: described"):
        driver.device_count()
    cuda.failing = {"cuDeviceGetCount": CUresult.CUDA_ERROR_BRAND_NEW}
    with pytest.raises(DriverError, match="12345: an error that this driver does not know"):
        driver.device_count()


def test_check_unpacks(cuda):
    driver.device_count()
    assert driver.check((OK,)) is None
    assert driver.check((OK, 7)) == 7
    assert driver.check((OK, 7, 8)) == (7, 8)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        driver.check((CUresult.CUDA_ERROR_INVALID_VALUE, 7))


def test_nothing_happens_at_import_and_init_once(cuda):
    assert cuda.calls == []
    driver.device_count()
    driver.device_count()
    assert cuda.names() == ["cuInit", "cuDeviceGetCount", "cuDeviceGetCount"]


# --- devices ---------------------------------------------------------------------------------------------------


def test_device_figures(cuda):
    properties = driver.device_properties(1)
    assert properties == driver.DeviceProperties(
        name="NVIDIA H200",
        compute_capability=(9, 0),
        multiprocessors=132,
        clock_hz=1.98e9,
        memory_bytes_per_second=pytest.approx(4.9167e12, rel=1e-4),
        memory_bytes=150_000_000_000,
        l2_bytes=62914560,
        smem_per_block=232448,
        smem_per_sm=233472,
    )
    before = len(cuda.calls)
    assert driver.device_properties(1) is properties
    assert driver.device_compute_capability(1) == (9, 0)
    assert len(cuda.calls) == before
    assert {call[3] for call in cuda.calls if call[0] == "cuDeviceGetAttribute"} == {1}


def test_the_figure_that_a_plan_needs_is_asked_alone(cuda):
    """The driver takes its time for some of the others: clock rates, for example."""
    assert driver.multiprocessors(1) == driver.multiprocessors(1) == 132
    assert cuda.names().count("cuDeviceGetAttribute") == 1


# --- contexts --------------------------------------------------------------------------------------------------


def test_the_current_device(cuda):
    assert driver.current_device() == 0
    driver.ensure_context(1)
    assert driver.current_device() == 1
    assert cuda.stack == [1001]


def test_a_thread_that_has_a_context_keeps_it(cuda):
    driver.ensure_context(0)
    driver.ensure_context(1)
    assert cuda.stack == [1000]


def test_a_fresh_thread_gets_the_primary_context(cuda):
    driver.ensure_context(0)
    stacks = []
    thread = threading.Thread(target=lambda: (driver.ensure_context(1), stacks.append(list(cuda.stack))))
    thread.start()
    thread.join()
    assert stacks == [[1001]]
    assert cuda.stack == [1000]


def test_device_context_switches_and_restores(cuda):
    # B-143
    driver.ensure_context(0)
    with driver.device_context(1):
        assert cuda.stack == [1000, 1001]
        with driver.device_context(1):
            assert cuda.stack == [1000, 1001]
        with driver.device_context(0):
            assert cuda.stack == [1000, 1001, 1000]
        assert cuda.stack == [1000, 1001]
    assert cuda.stack == [1000]


def test_device_context_restores_after_an_error_and_from_nothing(cuda):
    with pytest.raises(ZeroDivisionError), driver.device_context(1):
        assert cuda.stack == [1001]
        _ = 1 / 0
    assert cuda.stack == []


def test_device_context_costs_one_query_where_it_is_current(cuda):
    driver.ensure_context(0)
    with driver.device_context(0):
        pass
    cuda.calls.clear()
    with driver.device_context(0):
        pass
    assert cuda.names() == ["cuCtxGetCurrent"]


# --- kernels ---------------------------------------------------------------------------------------------------


def test_loading_sets_everything_in_the_devices_context(cuda):
    driver.ensure_context(0)
    kernel = driver.load_kernel(COMPILED, 98304, 1)
    assert (kernel.handle, kernel.symbol, kernel.device) == (0xF00, "tiny_kernel", 1)
    in_order = [call for call in cuda.calls if call[0].startswith(("cuLibrary", "cuKernel", "cuFunc"))]
    assert [call[0] for call in in_order] == [
        "cuLibraryLoadData",
        "cuLibraryGetKernel",
        "cuKernelGetFunction",
        "cuFuncSetAttribute",
        "cuFuncSetAttribute",
    ]
    assert {call[1] for call in in_order} == {1001}
    assert in_order[0][2] == COMPILED.cubin
    assert in_order[1][2:] == ("library", b"tiny_kernel")
    assert [call[2:] for call in in_order[3:]] == [(0xF00, 8, 98304), (0xF00, 9, 100)]
    assert cuda.stack == [1000]


def test_a_library_lives_as_long_as_its_kernel(cuda):
    kernel = driver.load_kernel(COMPILED, 0, 0)
    gc.collect()
    assert "cuLibraryUnload" not in cuda.names()
    del kernel
    gc.collect()
    assert cuda.names().count("cuLibraryUnload") == 1


@pytest.mark.parametrize(
    ("call", "unloads"), [("cuLibraryLoadData", 0), ("cuLibraryGetKernel", 1), ("cuFuncSetAttribute", 1)]
)
def test_a_refused_kernel_is_named_and_leaves_nothing(cuda, call, unloads):
    driver.ensure_context(0)
    cuda.failing[call] = CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(DriverError, match=r"tiny_kernel \(sm_90, 77 bytes.*device 1 .*NO_BINARY_FOR_GPU: described"):
        driver.load_kernel(COMPILED, 77, 1)
    gc.collect()
    assert cuda.stack == [1000]
    assert cuda.names().count("cuLibraryUnload") == unloads


def test_a_launch_is_one_call_with_the_packed_block(cuda):
    kernel = driver.load_kernel(COMPILED, 512, 0)
    buffer = driver.ArgumentBuffer(16)
    struct.pack_into("<qq", buffer.block, 0, 5, -6)
    cuda.calls.clear()
    driver.launch(kernel.handle, (3, 2, 1), (128, 1, 1), 512, 0xABCDEF0123, buffer.address)
    assert cuda.calls == [("cuLaunchKernel", 0, 0xF00, 3, 2, 1, 128, 1, 1, 512, 0xABCDEF0123, (5, -6), 0)]
    struct.pack_into("<qq", buffer.block, 0, 7, 8)
    driver.launch(kernel.handle, (3, 2, 1), (128, 1, 1), 512, 0, buffer.address)
    assert cuda.calls[-1][-2] == (7, 8)


def test_a_bound_launch_is_the_same_call_again_and_again(cuda):
    kernel = driver.load_kernel(COMPILED, 512, 0)
    cuda.calls.clear()
    shape = kernel.handle, (3, 2, 1), (128, 1, 1), 512
    launches = jit.prepare(
        ("key",), 0xABCDEF0123, (shape, struct.pack("<qq", 5, -6)), (shape, struct.pack("<qq", 7, 8))
    )
    assert not cuda.calls and jit.prepared.pop(("key",)) is launches
    for _ in range(2):
        jit.launch(launches)
    called = [("cuLaunchKernel", 0, 0xF00, 3, 2, 1, 128, 1, 1, 512, 0xABCDEF0123, at, 0) for at in ((5, -6), (7, 8))]
    assert cuda.calls == 2 * called
    cuda.failing["cuLaunchKernel"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        jit.launch(launches)
    assert len(cuda.calls) == 5  # none after the one that failed


def test_an_early_launch_says_so(cuda):
    kernel = driver.load_kernel(COMPILED, 512, 0)
    buffer = driver.ArgumentBuffer(16)
    struct.pack_into("<qq", buffer.block, 0, 5, -6)
    cuda.calls.clear()
    driver.launch_early(kernel.handle, (3, 2, 1), (128, 4, 1), 512, 0xABCDEF0123, buffer.address)
    ((name, _, config, function, block, extra),) = cuda.calls
    assert (name, function, block, extra) == ("cuLaunchKernelEx", 0xF00, (5, -6), 0)
    (attribute,) = config.pop("attrs")
    assert (attribute.id, vars(attribute.value)) == (6, {"programmaticStreamSerializationAllowed": 1})
    grid, shape = ("gridDim", (3, 2, 1)), ("blockDim", (128, 4, 1))
    sizes = {name + axis: n for name, each in (grid, shape) for axis, n in zip("XYZ", each, strict=True)}
    assert config == sizes | {"sharedMemBytes": 512, "hStream": 0xABCDEF0123, "numAttrs": 1}
    cuda.failing["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        driver.launch_early(kernel.handle, (1, 1, 1), (1, 1, 1), 0, 0, buffer.address)


def test_a_failed_launch_raises(cuda):
    kernel = driver.load_kernel(COMPILED, 0, 0)
    cuda.failing["cuLaunchKernel"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        driver.launch(kernel.handle, (1, 1, 1), (1, 1, 1), 0, 0, driver.ArgumentBuffer(16).address)


@pytest.mark.parametrize(
    ("dtype", "number", "dim", "columns", "swizzle", "promotion"),
    [
        ("float16", 6, 96, 64, 3, 3),
        ("bfloat16", 9, 64, 64, 3, 2),
        ("uint8", 0, 256, 128, 3, 3),
        ("uint8", 0, 80, 128, 3, 2),
        ("uint8", 0, 64, 64, 2, 2),
        ("uint8", 0, 48, 64, 2, 2),
        ("uint8", 0, 32, 32, 1, 2),
    ],
)
def test_a_tensor_map_has_boxes_of_rows(cuda, dtype, number, dim, columns, swizzle, promotion):
    """128 bytes of some rows of one head, swizzled over as many, zeros beyond the end; of short rows of bytes less.

    The L2 reads 256 bytes at once where a row has more than one box's 128, and no other head's bytes where it has not.
    """
    extents, strides = (dim, 1000, 8, 2), (1536, 192, 1536000)
    encoded = driver.encode_tensor_map(1 << 40, dtype, extents, strides, 128)
    assert encoded == bytes(range(128))
    expected = (number, 4, 1 << 40, extents, strides, (columns, 128, 1, 1), (1, 1, 1, 1), 0, swizzle, promotion, 0)
    assert cuda.calls[-1][2] == expected


def test_a_refused_tensor_map_raises(cuda):
    cuda.failing["cuTensorMapEncodeTiled"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        driver.encode_tensor_map(1, "float16", (64, 1, 1, 1), (128, 128, 128), 64)


def test_the_real_bindings_have_all_that_is_called():
    bindings = pytest.importorskip("cuda.bindings.driver")
    missing = {name for name in vars(FakeBindings) if name.startswith(("cu", "CU"))} - set(dir(bindings))
    assert not missing
    modes = [name for name in vars(FakeBindings) if name.startswith("CUtensorMap") and name != "CUtensorMap"]
    for name in ("CUdevice_attribute", "CUfunction_attribute", *modes):
        assert not set(vars(getattr(FakeBindings, name))) - set(dir(getattr(bindings, name)))
    for name in ("CUfunction_attribute", *modes):
        for member, value in vars(getattr(FakeBindings, name)).items():
            assert int(getattr(getattr(bindings, name), member)) == value
    made = bindings.CUtensorMap()
    assert ctypes.string_at(made.getPtr(), 128) == bytes(128)
