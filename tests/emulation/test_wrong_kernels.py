"""Kernels that are wrong on purpose: the emulation must see each."""

from __future__ import annotations

import pytest

from tests.emulation.build import compiler
from tests.emulation.cases import Case, assert_clean, assert_right, run
from tests.emulation.launch import SABOTAGE, Timing
from tests.mutation import Mutation

pytestmark = pytest.mark.skipif(compiler() is None, reason="the CPU emulation needs g++")

LONG = Case((200, 330), (64, 64), (1, 1), causal="bottom_right")


@pytest.mark.parametrize("ignore", SABOTAGE)
def test_a_synchronisation_that_does_nothing_is_seen(ignore: str) -> None:
    for late in (False, True):
        _, result = run(LONG, Timing(late, ignore=ignore))
        assert "shared race" in result.report.faults


MUTATIONS = {
    "no wait": Mutation("", "cp_async_wait<kStages - 2>();", ""),
    "waits for too little": Mutation("", "cp_async_wait<kStages - 2>();", "cp_async_wait<kStages - 1>();"),
    "no barrier": Mutation("", "cp_async_wait<kStages - 2>();\n        cta_sync();", "cp_async_wait<kStages - 2>();"),
    "copies into the stage in use": Mutation("", "k_smem(into_stage)", "k_smem(stage)"),
    "no barrier before the output is read back": Mutation("", "lane);\n        warp_sync();\n", "lane);\n"),
    "another swizzle on one side": Mutation("device/tile.cuh", "(chunk ^ (row & 7))", "(chunk ^ (row & 3))"),
    "mask one key short": Mutation("device/mask.cuh", "j <= last", "j < last"),
    "a key tile too few": Mutation("device/mask.cuh", "m_end + offset)", "m_end - 1 + offset)"),
    "too many tiles taken for full": Mutation("device/mask.cuh", "m0 + 1 + offset", "m0 + kBlockN + offset"),
    "rows beyond the end are loaded": Mutation("device/tile.cuh", "!kCheckRows || row", "true || row"),
    "rows beyond the end are stored": Mutation("device/chunk_io.cuh", "row >= rows_left", "false"),
    "every head its own keys": Mutation("device/schedule.cuh", "group.divide(tile.head)", "tile.head"),
    "sums not rescaled": Mutation("device/softmax.cuh", "sum[w][r] *= correction[w][r]", "(void)correction"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_is_seen(name: str) -> None:
    """Each by a fault of the machine or by wrong numbers, in at least one of two timings."""
    case = Case((200, 201), (64, 64), (4, 2), causal="bottom_right", rise=20.0 if "rescaled" in name else 1.0)
    runs = [run(case, timing, mutation=MUTATIONS[name]) for timing in (Timing(False, 1), Timing(True, 2))]
    with pytest.raises(AssertionError):
        for tensors, result in runs:
            assert_clean(tensors, result)
            assert_right(case, tensors)


def test_a_mutation_that_finds_no_text_is_not_taken_for_a_fault_that_was_seen() -> None:
    with pytest.raises(ValueError, match="write the mutation anew"):
        run(LONG, mutation=Mutation("", "no such text", ""))
