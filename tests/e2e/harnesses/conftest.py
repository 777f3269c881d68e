"""What the tests of the large agent programs share: time. Some need minutes to start where others use the machine too."""

from __future__ import annotations

from pathlib import Path

import pytest

SECONDS = 560
"""Enough for two launches that each take as long as they may."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(SECONDS))
