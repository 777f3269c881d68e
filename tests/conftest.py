"""What every test stands on: real tokenizers, one thread, and none of the settings of whoever runs the tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import pytest

from towline import assets as towline_assets

# Before the first of them is imported: their assertions explain themselves as those of tests do.
pytest.register_assert_rewrite("support")

# Before torch and tokenizers are imported anywhere, and inherited by every process that a test starts: runs are
# repeatable, and several can share a machine.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

# Speed differs from machine to machine and is never what a property is about.
hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    max_examples=50,
    # Continuous integration tries the same examples each time; whoever runs the tests by hand tries new ones.
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("thorough", hypothesis.settings.get_profile("ci"), max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


_AGAIN = 60.0
"""Seconds after which a test that its time limit did not end is interrupted once more."""
_RUNS = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
    """Let the alarm of a test's time limit ring again and again while the test runs.

    What the alarm raises is swallowed by asyncio if it comes while any other task than the test's own is at work. With a
    single ring such a test would wait on for ever.
    """
    done = yield
    ring = signal.getsignal(signal.SIGALRM)
    if settings.method == "signal" and callable(ring):

        def alarm(number: int, frame: FrameType | None) -> None:
            # Never while pytest itself is at work, on the report above all.
            if item.stash.get(_RUNS, False):
                ring(number, frame)

        signal.signal(signal.SIGALRM, alarm)
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, _AGAIN)
    return done


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _running(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _running(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _running(item))


def _running(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[_RUNS] = True
    try:
        return (yield)
    finally:
        item.stash[_RUNS] = False


_FIRST = (
    "tests/audit/test_audit.py",
    "tests/server/test_server_crash.py",
    "tests/cluster/test_fleet_storms.py",
    "tests/tokens/parsing/test_format_properties.py",
    "tests/e2e/test_pi_learns.py",
    "tests/server/test_recovery_fuzz.py",
    "tests/node/test_engine_failures.py",
    "tests/demo/test_tiny_model.py",
    "tests/gateway/test_traffic.py",
    "tests/trainers/test_train_command.py",
    "tests/trainers/test_trainer_durability.py",
    "tests/server/test_store_safety.py",
    "tests/server/test_serve.py",
    "tests/benchmarks/test_benchmarks.py",
)
"""The files that take longest: a worker that began one of them last would hold up the whole run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slowest files; the order inside a file stays."""
    rank = {name: place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))


def pytest_configure(config: pytest.Config) -> None:
    """Name the assets' folder by its variable, before the user's cache folder is out of sight."""
    os.environ.setdefault(towline_assets.VARIABLE, str(towline_assets.cache_folder()))


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder with real tokenizers and chat templates; `make assets` fills it."""
    return towline_assets.folder()


@pytest.fixture(scope="session", autouse=True)
def _nobodys_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A home of its own: no test reads the user's configuration, keys or proxies, or writes beside them."""
    home = tmp_path_factory.mktemp("home")
    for name in list(os.environ):
        ours = name.startswith("TOWLINE_") and name != towline_assets.VARIABLE
        if ours or name.startswith(("OPENAI_", "ANTHROPIC_", "GEMINI_", "GOOGLE_API_")):
            del os.environ[name]
    os.environ["HOME"] = str(home)
    for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
        os.environ[f"XDG_{kind}_HOME"] = str(home / kind.lower())
    # Tests speak to loopback only, which no proxy can reach.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost,::1"
