"""Which target a device takes, and that problems name their limits."""

from __future__ import annotations

import pytest

from cuflash.arch import ARCHES, arch_for, needs_ptx
from cuflash.errors import UnsupportedError
from cuflash.problem import AttentionProblem


@pytest.mark.parametrize(
    ("compute_capability", "target"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
    ],
)
def test_a_device_takes_the_newest_target_of_its_generation(compute_capability, target):
    arch = arch_for(compute_capability)
    assert arch.name == target
    assert not needs_ptx(arch, compute_capability)


@pytest.mark.parametrize(
    ("compute_capability", "target"), [((11, 0), "sm_100"), ((13, 0), "sm_120"), ((20, 7), "sm_120")]
)
def test_an_unknown_generation_takes_ptx(compute_capability, target):
    # B-137
    arch = arch_for(compute_capability)
    assert arch.name == target
    assert needs_ptx(arch, compute_capability)


@pytest.mark.parametrize("compute_capability", [(7, 5), (7, 0), (6, 1), (3, 5)])
def test_older_devices_are_refused_by_their_number(compute_capability):
    # B-137
    major, minor = compute_capability
    with pytest.raises(UnsupportedError, match=rf"{major}\.{minor}; .* need 8\.0 .*NumPy"):
        arch_for(compute_capability)


def test_limits_leave_the_driver_its_kibibyte():
    for arch in ARCHES.values():
        assert arch.smem_per_sm - arch.smem_per_block == 1024


@pytest.mark.parametrize(
    ("field", "value"), [("head_dim", 0), ("head_dim", 257), ("head_dim_v", -1), ("access_bytes", 3)]
)
def test_a_problem_refuses_what_no_kernel_can_do(field, value):
    given = {
        "head_dim": 64,
        "head_dim_v": 64,
        "dtype": "float16",
        "mask": "full",
        "access_bytes": 16,
        "scale_first": False,
        "arch": "sm_80",
    }
    with pytest.raises(ValueError, match=f"{field} is {value}; accepted are"):
        AttentionProblem(**{**given, field: value})
