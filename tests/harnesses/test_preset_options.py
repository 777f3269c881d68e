"""Options that are merged into the configuration of a preset: mappings are merged at every depth, other keys stay."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.common.mappings import deep_merge
from towline.errors import ConfigError
from towline.harnesses.base import LaunchContext
from towline.harnesses.registry import find_harness

TREES = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)
TABLES = st.dictionaries(st.sampled_from("abc"), TREES, max_size=3)


def leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """What is at the ends of a tree, an empty table included."""
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    return {place: leaf for name, inner in tree.items() for place, leaf in leaves(inner, (*path, name)).items()}


@given(TABLES, TABLES)
def test_changes_win_and_nothing_else_is_lost(config: dict[str, Any], changes: dict[str, Any]) -> None:
    made = deep_merge(config, changes)
    got = leaves(made)
    for path, value in leaves(changes).items():
        # An empty table changes nothing where there is one already.
        assert got.get(path) == value or value == {}, path
    for path, value in leaves(config).items():
        touched = any(path[: len(other)] == other or other[: len(path)] == path for other in leaves(changes))
        assert touched or got[path] == value, path
    assert deep_merge(config, {}) == config
    assert deep_merge(made, changes) == made


def written(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The configuration that a launch writes."""
    harness = find_harness(name)
    place = LaunchContext("http://127.0.0.1:8500", "key", "m", "Do it.", f"/opt/towline/{name}", options=options)
    files = harness.launch(harness.resolve(place)).files
    (text,) = (text for path, text in files.items() if path.endswith(("config.yaml", "openclaw.json", "towline.yaml")))
    made: dict[str, Any] = json.loads(text)
    return made


def test_options_of_the_presets() -> None:
    hermes = written("hermes", {"config": {"agent": {"api_max_retries": 1}, "memory": {"memory_enabled": False}}})
    assert hermes["agent"] == {"max_turns": 90, "local_stream_stale_timeout": 3600, "api_max_retries": 1}
    assert hermes["memory"] == {"memory_enabled": False}
    openclaw = written("openclaw", {"config": {"agents": {"defaults": {"skipBootstrap": False}}}})
    assert openclaw["agents"]["defaults"]["model"] == {"primary": "towline/m"}
    assert openclaw["agents"]["defaults"]["skipBootstrap"] is False
    mini = written("mini_swe_agent", {"settings": {"environment": {"timeout": 5}}, "step_limit": 7})
    assert mini["agent"] == {"cost_limit": 0, "step_limit": 7}
    assert mini["environment"] == {"timeout": 5}


def test_hermes_refuses_an_instruction_that_no_command_holds() -> None:
    hermes = find_harness("hermes")
    place = LaunchContext("http://127.0.0.1:8500", "key", "m", "é" * 60_001, "/opt/towline/hermes")
    with pytest.raises(ConfigError, match="file of the task's environment"):
        hermes.launch(hermes.resolve(place))
