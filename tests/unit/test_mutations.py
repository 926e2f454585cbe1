"""The GPU tests change the Hopper kernel's text; here it shows, without a GPU, when a change has lost its place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
