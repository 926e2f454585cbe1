"""The GPU tests change the Hopper kernel's text; here it shows, without a GPU, when a change has lost its place.

So it does when their configs do not fit, and when their lengths no longer make consumers skip key tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cuflash.arch import ARCHES
from cuflash.render import render
from tests.gpu import test_hopper
from tests.gpu.support import Variant


def changed_variants() -> Iterator[Variant]:
    for name, test in vars(test_hopper).items():
        for mark in getattr(test, "pytestmark", ()) if name.startswith("test_") else ():
            for parameters in mark.args[1] if mark.name == "parametrize" else ():
                values = getattr(parameters, "values", (parameters,))
                yield from (x for x in values if isinstance(x, Variant) and x.mutations)


VARIANTS = list(changed_variants())


def test_they_were_found() -> None:
    assert len({variant.mutations for variant in VARIANTS}) > 10


@pytest.mark.parametrize("variant", VARIANTS, ids=range(len(VARIANTS)))
def test_every_change_applies(variant: Variant) -> None:
    source = render(variant.problem, variant.config)
    for mutation in variant.mutations:
        changed = mutation.apply(source)
        assert changed != source
        source = changed


@pytest.mark.parametrize("variant", test_hopper.SKIPPING, ids=test_hopper.name)
def test_consumers_skip(variant: Variant) -> None:
    """None, one, more, and more than they may: with every way of the diagonal through key tiles."""
    config = variant.config
    assert config.smem_bytes(variant.problem) <= ARCHES[test_hopper.TARGET].smem_per_block
    assert config.block_m - 64 >= config.block_n, "the kernel skips nothing"
    counts = [test_hopper.skips(variant, *shape) for shape in test_hopper.skipping_lengths(variant)]
    assert min(map(min, counts)) == 0 and max(map(max, counts)) > config.stages - 1
    diagonal = (config.block_m - 64) // config.block_n
    assert max(counts[0]) >= diagonal and any(0 < skipped <= config.stages - 1 for skipped in set().union(*counts))
