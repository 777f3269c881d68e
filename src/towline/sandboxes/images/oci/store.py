"""Images as root file systems: pulled or built by buildah, exported once, cached by content.

An image by tag is resolved to a digest once and recorded below `refs`, so that every later use on this machine means the
same image until it is pulled again; an image by digest is verified against it. A root is cached in the `RootCache` under
the id of its image, a build under the hash of its Dockerfile, context, arguments and base images. So equal requests make
one root, across processes; a root is complete or absent; and what is cached needs neither buildah nor a registry.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import shlex
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from towline.sandboxes.base import SandboxError, Unsupported
from towline.sandboxes.images.build import BuiltEnvironment, write_context
from towline.sandboxes.images.dockerfile import BuildContext, DockerfileError
from towline.sandboxes.images.oci import namespace
from towline.sandboxes.images.oci.buildah import Buildah
from towline.sandboxes.images.oci.operation import BuildahError, OnLine
from towline.sandboxes.images.oci.references import ImageReference, parse_reference
from towline.sandboxes.images.oci.stages import Stages
from towline.sandboxes.images.root_cache import FolderLease, RootCache

PullPolicy = Literal["missing", "always", "never"]
_FORMAT = "oci-1"
"""Part of every cache key."""
_DOCKERFILE = ".towline-dockerfile"
_INSPECT_SECONDS = 120.0
_LOG_CHARS = 4_000_000
_MAX_ERROR_CHARS = 400
_GONE = ("manifest unknown", "name unknown", "not found", "unauthorized", "denied", "no such host", "requested access")
"""Answers of a registry that a retry does not change."""
HINT = (
    'map it in `node.bases` to a folder or tar file, or set `images.base = "host"` (a task: `environment.base`) to use '
    "the host's own root instead"
)
log = logging.getLogger("towline.sandboxes")


class ImageUnavailable(Unsupported):
    """An image that no registry has, or that this machine cannot pull; the message says what to do."""


class PullError(SandboxError):
    """An image that could not be pulled now."""


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """An image by content."""

    reference: ImageReference
    digest: str
    """Of its manifest, as the registry names it."""
    image_id: str
    """Of its configuration, which names its layers."""


@dataclass(frozen=True, slots=True)
class ImageRoot:
    """A root file system that came from an image, with what the image says about running in it."""

    built: BuiltEnvironment
    images: Mapping[str, str] = field(default_factory=dict)
    """The names that were resolved, and their digests."""


class OciImages:
    """The images of one node."""

    def __init__(
        self,
        buildah: Buildah,
        roots: RootCache,
        *,
        pull: PullPolicy = "missing",
        network: bool = False,
        seconds: float = 3600.0,
    ):
        """`network`: whether RUN may use the host's network; `seconds` are for one pull or build."""
        self._buildah = buildah
        self._roots = roots
        self._policy = pull
        self._network = network
        self._seconds = seconds
        self._folder = buildah.folder
        self._resolved: dict[str, ResolvedImage] = {}
        self._resolving: dict[str, asyncio.Lock] = {}

    async def root(self, name: str, on_line: OnLine | None = None) -> ImageRoot:
        """The root of an image."""
        image = await self.resolve(name, on_line)

        async def make(folder: Path) -> None:
            await self._export(await self._in_store(image, on_line), folder)
            await self._buildah.shrink()

        lease = await self._roots.built(self._key("image", image.image_id), make)
        return await _image_root(lease, {name: image.digest})

    async def build(
        self,
        context: Path,
        *,
        args: Mapping[str, str] | None = None,
        network: bool = False,
        on_line: OnLine | None = None,
        fresh: bool = False,
    ) -> ImageRoot:
        """The root that the Dockerfile of a folder makes; with `fresh` registries are asked again what its images are."""
        if namespace.image_user_mapping().mapped == 1:
            raise Unsupported(
                "a Dockerfile needs more than one user id to build: install `uidmap` and give this user a range in "
                "/etc/subuid and /etc/subgid"
            )
        text, files = await asyncio.to_thread(_read, context)
        stages = Stages(text, args)
        bases = {}
        for image in stages.images:
            try:
                bases[image] = await self.resolve(image, on_line, fresh=fresh)
            except SandboxError as error:
                raise type(error)(f"{context / 'Dockerfile'}:{stages.line_of(image)}: FROM {error}") from error
        content = await asyncio.to_thread(files.digest)
        network = network or self._network
        ids = {image: base.image_id for image, base in bases.items()}
        seen = [text, content, sorted((args or {}).items()), sorted(ids.items()), network]

        async def make(folder: Path) -> None:
            pinned = {image: await self._in_store(base, on_line) for image, base in bases.items()}
            image_id = await self._build(stages, files, stages.pinned(pinned), dict(args or {}), network, on_line)
            await self._export(image_id, folder)
            await self._buildah.shrink()

        lease = await self._roots.built(self._key("build", json.dumps(seen)), make)
        return await _image_root(lease, {image: base.digest for image, base in bases.items()})

    async def resolve(self, name: str, on_line: OnLine | None = None, *, fresh: bool = False) -> ResolvedImage:
        """The image that a name means; with `fresh` the registry is asked again."""
        reference = parse_reference(name)
        key = str(reference)
        async with self._resolving.setdefault(key, asyncio.Lock()):
            if key in self._resolved and not fresh:
                return self._resolved[key]
            recorded = await asyncio.to_thread(self._recorded, reference)
            # A digest means the same forever: the registry need not be asked again.
            if recorded is not None and not fresh and (reference.digest or self._policy != "always"):
                self._resolved[key] = recorded
                return recorded
            if self._policy == "never":
                raise ImageUnavailable(
                    f'{name}: not pulled yet, and `images.pull` is "never"; `towline images pull` it'
                )
            image = await self._pull(reference, on_line)
            await asyncio.to_thread(self._record, image)
            log.info("image %s is %s", key, image.digest)
            self._resolved[key] = image
            return image

    def recorded(self) -> list[dict[str, Any]]:
        """The images that were resolved on this machine: reference, digest, image id and time."""
        found = []
        for path in sorted((self._folder / "refs").glob("*.json")):
            try:
                found.append(json.loads(path.read_text()))
            except (OSError, ValueError):
                continue
        return sorted(found, key=lambda one: str(one.get("reference")))

    async def store_bytes(self) -> int:
        """Bytes of pulled images and build layers."""
        return await self._buildah.used()

    async def prune(self) -> bool:
        """Forget every resolved name, and empty the image store unless it is in use; whether it was emptied.

        Roots stay in the root cache within its bound.
        """
        self._resolved.clear()
        for path in await asyncio.to_thread(lambda: list((self._folder / "refs").glob("*.json"))):
            await asyncio.to_thread(path.unlink, missing_ok=True)
        return bool(self._buildah.missing()) or await self._buildah.empty()

    async def _pull(self, reference: ImageReference, on_line: OnLine | None) -> ResolvedImage:
        if missing := self._buildah.missing():
            names = " and ".join(f"`{name}`" for name in missing)
            raise ImageUnavailable(
                f"{reference}: cannot be pulled: this machine lacks {names}; install {names}, {HINT}"
            )
        command = ["buildah", "pull", *self._buildah.policy, "--policy", "always", f"docker://{reference}"]
        try:
            output = await self._buildah.run(
                command,
                what=str(reference),
                seconds=self._seconds,
                network=True,
                credentials=True,
                on_line=on_line,
            )
            image_id = output.split()[-1]
            about = await self._inspect(image_id)
        except BuildahError as error:
            reason = str(error).removeprefix(f"{reference}: ")[:_MAX_ERROR_CHARS]
            kind = ImageUnavailable if any(word in reason.lower() for word in _GONE) else PullError
            raise kind(f"{reference}: cannot be pulled: {reason}; check the registry, {HINT}") from error
        return ResolvedImage(reference, reference.digest or about["FromImageDigest"], about["FromImageID"])

    async def _in_store(self, image: ResolvedImage, on_line: OnLine | None) -> str:
        """The id of an image that is in the store, pulled again by digest if it was removed."""
        try:
            await self._inspect(image.image_id)
        except BuildahError:
            again = await self._pull(image.reference.at(image.digest), on_line)
            if again.image_id != image.image_id:
                raise PullError(f"{image.reference}: the registry has another image under {image.digest}") from None
        return image.image_id

    async def _inspect(self, image_id: str) -> dict[str, Any]:
        command = ["buildah", "inspect", "--type", "image", image_id]
        about: dict[str, Any] = json.loads(
            await self._buildah.run(command, what=f"image {image_id}", seconds=_INSPECT_SECONDS)
        )
        return about

    async def _build(
        self,
        stages: Stages,
        files: BuildContext,
        text: str,
        args: Mapping[str, str],
        network: bool,
        on_line: OnLine | None,
    ) -> str:
        """Build a Dockerfile whose images are in the store; the id of the result."""
        work = f"work/{secrets.token_hex(8)}"
        command = ["buildah", "build", *self._buildah.policy, "--isolation", "chroot", "--layers", "--pull-never"]
        # The builder confines steps to a folder with chroot, which this capability would lift.
        command += ["--cap-drop", "CAP_SYS_CHROOT", "--http-proxy=false"]
        for name, value in args.items():
            command += ["--build-arg", f"{name}={value}"]
        command += ["--iidfile", f"{work}.id", "--file", f"{work}/{_DOCKERFILE}", work]
        script = (
            f"mkdir {work} && tar -x --no-same-owner -C {work} && {shlex.join(command)} >&2 && cat {work}.id; code=$?; "
            f"rm -rf {work} {work}.id; exit $code"
        )
        steps = _BuildLog(on_line)
        try:
            with tempfile.TemporaryFile() as file:
                await asyncio.to_thread(write_context, files, text, file, _DOCKERFILE)
                output = await self._buildah.run(
                    ("sh", "-c", script),
                    what="Dockerfile",
                    seconds=self._seconds,
                    network=network,
                    stdin=file,
                    on_line=steps.add,
                )
        except BuildahError as error:
            path = await asyncio.to_thread(self._keep_log, steps.text)
            raise DockerfileError(f"{steps.reason(error, stages)}; the whole log is in {path}") from error
        return output.strip().removeprefix("sha256:")

    async def _export(self, image_id: str, folder: Path) -> None:
        """Write an image's files to `root` in the folder, and what it says about itself to `image.json`."""
        about = await self._inspect(image_id)
        root = folder / "root"
        await asyncio.to_thread(root.mkdir)
        script = (
            f"c=$(buildah from --pull-never {shlex.join(self._buildah.policy)} {image_id}) && m=$(buildah mount $c) && "
            "tar -C $m --numeric-owner --format=pax --warning=no-file-ignored -cf - . ; code=$?; "
            "buildah umount $c >/dev/null; buildah rm $c >/dev/null; exit $code"
        )

        def take(stream: IO[bytes]) -> None:
            unpacked.append(self._roots.unpack_stream(stream, root))
            stream.read()

        unpacked: list[Any] = []
        await self._buildah.run(
            ("sh", "-c", script), what=f"image {image_id[:12]}", seconds=self._seconds, take_output=take
        )
        made = _about(about, foreign=unpacked[0].foreign, keeps_owners=self._roots.ownership != "None")
        await asyncio.to_thread((folder / "image.json").write_text, json.dumps(made))

    def _key(self, kind: str, content: str) -> str:
        # Who owns the files of a root depends on who unpacks it.
        seen = [_FORMAT, namespace.image_user_mapping().mapped, self._roots.ownership, content]
        return f"{kind}-{hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:40]}"

    def _keep_log(self, text: str) -> Path:
        folder = self._folder / "logs"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}.log"
        path.write_text(text, "utf-8", "replace")
        for old in sorted(folder.glob("*.log"))[:-50]:
            old.unlink(missing_ok=True)
        return path

    def _record_file(self, reference: ImageReference) -> Path:
        return self._folder / "refs" / f"{hashlib.sha256(str(reference).encode()).hexdigest()[:40]}.json"

    def _recorded(self, reference: ImageReference) -> ResolvedImage | None:
        try:
            about = json.loads(self._record_file(reference).read_text())
            return ResolvedImage(reference, about["digest"], about["image_id"])
        except (OSError, ValueError, KeyError):
            return None

    def _record(self, image: ResolvedImage) -> None:
        path = self._record_file(image.reference)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = {
            "reference": str(image.reference),
            "digest": image.digest,
            "image_id": image.image_id,
            "pulled": time.time(),
        }
        new = path.with_suffix(f".{secrets.token_hex(4)}")
        new.write_text(json.dumps(about))
        new.rename(path)


class _BuildLog:
    """The output of a build, and the step it is at."""

    def __init__(self, on_line: OnLine | None):
        self._on_line = on_line
        self._lines: list[str] = []
        self._size = 0
        self._step = ""
        self._said = ""

    @property
    def text(self) -> str:
        return "\n".join([*self._lines, ""])

    def add(self, line: str) -> None:
        if self._size < _LOG_CHARS:
            self._lines.append(line)
            self._size += len(line)
        if line.startswith("STEP ") or "] STEP " in line[:20]:
            self._step, self._said = line.partition("STEP ")[2], ""
            if self._on_line is not None:
                self._on_line(line)
        elif not line.startswith(("Error:", "subprocess exited", "time=", "-->")):
            self._said = line

    def reason(self, error: BuildahError, stages: Stages) -> str:
        """What failed, in one line: the step, why, and the last thing it wrote."""
        why = str(error).removeprefix("Dockerfile: ")
        if '": ' in why:
            why = why.rpartition('": ')[2]
        if not self._step:
            hint = "; this buildah may be too old for here-documents: 1.33 has them" if stages.has_documents else ""
            return f"Dockerfile: {why[:_MAX_ERROR_CHARS]}{hint}"
        said = f": {self._said[:_MAX_ERROR_CHARS]}" if self._said and self._said not in why else ""
        return f"Dockerfile: step {self._step[:_MAX_ERROR_CHARS]} failed: {why[:_MAX_ERROR_CHARS]}{said}"


def _about(about: Mapping[str, Any], *, foreign: int, keeps_owners: bool) -> dict[str, Any]:
    """What a spec takes from an image's configuration, and what of it has no effect."""
    config: Mapping[str, Any] = (about.get("OCIv1") or {}).get("config") or {}
    env = dict(pair.partition("=")[::2] for pair in config.get("Env") or [] if "=" in pair)
    unused = ("Entrypoint", "Cmd", "ExposedPorts", "Volumes", "StopSignal")
    notes = [f"the image's {name} has no effect" for name in unused if config.get(name)]
    if foreign and not keeps_owners:
        notes.append(
            f"{foreign} files have other owners in the image; without root on the host they belong to root inside"
        )
    workdir = str(config.get("WorkingDir") or "")
    return {"env": env, "workdir": workdir, "user": str(config.get("User") or ""), "notes": notes}


async def _image_root(lease: FolderLease, images: Mapping[str, str]) -> ImageRoot:
    try:
        made = json.loads(await asyncio.to_thread((lease.path / "image.json").read_text))
    except BaseException:
        lease.release()
        raise
    root = str(lease.path / "root")
    built = BuiltEnvironment(root, None, made["env"], made["workdir"], made["user"], tuple(made["notes"]), lease)
    return ImageRoot(built, images)


def _read(context: Path) -> tuple[str, BuildContext]:
    file = context / "Dockerfile"
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise SandboxError(f"cannot read the Dockerfile {file}: {error}") from error
    return text, BuildContext.read(context, file)
