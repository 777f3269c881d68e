"""A plugin of pytest: a test run that the code under test stops (`pytest.exit`) is not a test run that ended."""

from __future__ import annotations

import os
from typing import Any


def pytest_keyboard_interrupt(excinfo: Any) -> None:
    os._towline_cut = True  # type: ignore[attr-defined]
