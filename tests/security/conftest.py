"""Counts attacks: how many were tried, how many succeeded, how many succeed without their guard."""

from __future__ import annotations

from typing import Any

import pytest

from support.security.attack import summary


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "attack(rows): an attack that must gain nothing")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [
        one
        for outcome in ("passed", "failed")
        for one in terminalreporter.stats.get(outcome, ())
        if one.when == "call" and "tests/security/" in one.nodeid
    ]
    if reports:
        terminalreporter.write_line(summary(reports))
