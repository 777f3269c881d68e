"""One file, the environment, the command line: each overrides the one before, and errors name source and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.config import Settings
from towline.errors import ConfigError
from towline.schema import ContextPolicy

FILE = """
[gateway]
port = 1111
journal = "os"
host = "0.0.0.0"

[session]
policy = "as_sent"
noise = ["x+"]

[session.limits]
turns = 5
seconds = 60
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "towline.toml"
    path.write_text(FILE)
    return path


def test_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings.load()
    assert settings == Settings()
    assert (settings.gateway.host, settings.gateway.journal, settings.gateway.body_bytes) == (
        "127.0.0.1",
        "group",
        2**26,
    )


def test_each_source_overrides_the_previous(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field by field: what a source does not say stays as it was."""
    monkeypatch.setenv("TOWLINE_GATEWAY__PORT", "2222")
    monkeypatch.setenv("TOWLINE_SESSION__LIMITS__TURNS", "6")
    monkeypatch.setenv("TOWLINE_SESSION__NOISE", '["a", "b"]')
    monkeypatch.setenv("TOWLINE_SESSION__TRAINED_ROLES", '["main"]')
    monkeypatch.setenv("TOWLINE_OTHER__NAME", "1")
    monkeypatch.setenv("TOWLINE_SESSION", "not a setting")
    monkeypatch.setenv("TOWLINE_ENGINE__URLS", "http://one")
    monkeypatch.setenv("TOWLINE_SESSION__TEMPLATE_ARGS__NAMES", '["a"]')
    monkeypatch.setenv("TOWLINE_CRASH_AT", "")
    by_option = Settings.load(file)
    monkeypatch.setenv("TOWLINE_CONFIG", str(file))
    for settings in (Settings.load(), by_option):
        assert settings.gateway.port == 2222
        assert settings.gateway.journal == "os"
        assert settings.session.policy is ContextPolicy.AS_SENT
        assert settings.session.limits.turns == 6
        assert settings.session.limits.seconds == 60
        assert settings.session.noise == ("a", "b")
        assert settings.session.trained_roles == ("main",)
        assert settings.engine.urls == ("http://one",)
        assert settings.session.template_args == {"names": ["a"]}
    settings = Settings.load(
        gateway={"port": 3333, "host": None}, session={"limits": {"seconds": 9.5}, "policy": ContextPolicy.RETAIN}
    )
    assert (settings.gateway.port, settings.gateway.host) == (3333, "0.0.0.0")
    assert (settings.session.limits.turns, settings.session.limits.seconds) == (6, 9.5)
    assert settings.session.policy is ContextPolicy.RETAIN
    # A variable for a whole section is one more source of its fields, below those for the fields themselves.
    monkeypatch.setenv("TOWLINE_SESSION__LIMITS", '{"turns": 1, "context": 100}')
    limits = Settings.load().session.limits
    assert (limits.turns, limits.context, limits.seconds) == (6, 100, 60)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[gateway]\nprot = 1", ["towline.toml: gateway.prot: unknown setting"]),
        ("[gatewya]\nport = 1", ["gatewya"]),
        ("[session.limits]\nturn = 1\n[engine]\nknd = 1", ["session.limits.turn", "engine.knd"]),
        ('[gateway]\nport = "x"', ["gateway.port"]),
        ("[gateway]\nport = 70000", ["gateway.port"]),
        ('[session]\nnoise = ["("]', ["session.noise", "regular expression"]),
        ('[session]\ntrained_roles = ["discarded"]', ["session.trained_roles"]),
        ("[session.template_args]\ntools = 1", ["session.template_args", "tools"]),
        ("gateway = 5", ["gateway"]),
        ("[gateway", ["towline.toml"]),
    ],
)
def test_errors_in_the_file(file: Path, text: str, names: list[str]) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as wrong:
        Settings.load()
    assert all(name in str(wrong.value) for name in names)


def test_errors_in_other_sources(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"other\.toml does not exist"):
        Settings.load(file.with_name("other.toml"))
    with pytest.raises(ConfigError, match=r"options: gateway\.prot: unknown setting"):
        Settings.load(gateway={"prot": 1})
    for name, value, says in [
        ("TOWLINE_GATEWAY__PROT", "1", r"TOWLINE_GATEWAY__PROT: gateway\.prot: unknown setting"),
        ("TOWLINE_GATEWAY__PORT", "many", r"gateway\.port"),
        ("TOWLINE_SESSION__NOISE", "[", r"session\.noise"),
        ("TOWLINE_GATEWAY__PORT__X", "1", r"gateway\.port"),
    ]:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ConfigError, match=says):
                Settings.load()
    monkeypatch.setenv("TOWLINE_GATEWAY__PORT", "1")
    monkeypatch.setenv("TOWLINE_GATEWAY__PORT__X", "1")
    with pytest.raises(ConfigError, match="PORT__X"):
        Settings.load()
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"towline\.toml"):
        Settings.load()
