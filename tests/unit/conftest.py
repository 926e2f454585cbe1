"""A fake GPU for the unit tests; files that need another one, such as one that only takes notes, have their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit import fake_gpu
from tests.unit.fake_gpu import FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A Hopper GPU that computes, by NumPy."""
    installed = fake_gpu.install(monkeypatch)
    yield installed
    fake_gpu.remove(installed)
