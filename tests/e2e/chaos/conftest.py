"""Options of the storms. Each is also an environment variable: `TOWLINE_CHAOS_SEED`, `…_SESSIONS`, `…_FAULTS`, `…_SECONDS`."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chaos.schedule import WEIGHTS
from support.seeds import chosen_seed
from support.server.postgres import Postgres, running_postgres
from towline.demo import tiny_model

# Read here: a fixture removes all variables of this prefix before the first test.
_GIVEN = {name: os.environ.get(f"TOWLINE_CHAOS_{name.upper()}") for name in ("seed", "sessions", "faults", "seconds")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=_GIVEN["seed"], help="replays a storm (default: a new one, printed)")
    parser.addoption(
        "--sessions", type=int, default=_GIVEN["sessions"] or 1000, help="sessions per storm (default 1000)"
    )
    parser.addoption("--faults", default=_GIVEN["faults"] or "", help=f"of {','.join(WEIGHTS)} (default: all)")
    parser.addoption("--seconds", type=float, default=_GIVEN["seconds"] or 3600, help="longest storm (default 3600)")


@pytest.fixture(autouse=True)
def _as_long_as_it_takes() -> None:
    """Storms have timeouts of their own; the common one ends the whole process, and no count is printed."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    given = request.config.getoption("--seed")
    return chosen_seed(None if given is None else int(given))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.create(tmp_path_factory.mktemp("models") / "tiny", steps=2)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server
