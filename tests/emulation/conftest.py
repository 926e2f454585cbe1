"""The emulator's full set takes half an hour of one core: it runs when it is asked for, by ``-m slow``."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.getoption("markexpr"):
        return
    full = [item for item in items if "emulation" in item.path.parts and item.get_closest_marker("slow")]
    if full:
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if item not in set(full)]
