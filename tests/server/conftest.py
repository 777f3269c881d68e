"""Fixtures for both databases, SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server.postgres import Postgres, running_postgres


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--crashes", type=int, default=10, help="random kills of a server on each database (default 10)")
    parser.addoption(
        "--fuzz-seed",
        type=int,
        help="what damage is drawn from (default: a new one, or a fixed one with CI set; printed)",
    )
    parser.addoption("--fuzz-rounds", type=int, help="damages to each kind of file (default 36)")
    parser.addoption(
        "--all-crashes", action="store_true", help="all crash points with a real node, and ten random kills"
    )


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, SQLite or PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/towline.db"
    return str(request.getfixturevalue("postgres").database())
