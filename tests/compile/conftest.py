"""The option that compiles everything that is shipped instead of the subset that CI takes."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-kernels",
        action="store_true",
        help="compile every shipped kernel for every target (pytest tests/compile)",
    )
