"""Dockerfiles for docker sandboxes: built by the engine, over an image that is here."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import IO, Any

from towline.sandboxes.base import Runtime, SandboxError
from towline.sandboxes.build_context import Context
from towline.sandboxes.docker import DockerRuntime
from towline.sandboxes.docker_api import EngineFailure
from towline.sandboxes.docker_files import chunks
from towline.sandboxes.docker_images import REPOSITORY
from towline.sandboxes.dockerfile_plan import Plan
from towline.sandboxes.dockerfile_syntax import DockerfileError
from towline.schema import Network

_DOCKERFILE = ".towline-dockerfile"
_NETWORKS = {Network.NONE: "none", Network.GATEWAY: "none", Network.OPEN: "bridge"}


async def build_by_engine(
    runtime: Runtime,
    root: str,
    plan: Plan,
    files: Context,
    text: str,
    args: dict[str, str],
    key: str,
    network: Network,
    seconds: float,
    say: Callable[[str], None] | None,
) -> dict[str, Any]:
    """The image of a Dockerfile, found by its key or built; what a `Built` says of it."""
    if not isinstance(runtime, DockerRuntime):
        raise SandboxError(f"{runtime.name} is not the docker runtime")
    name = f"{REPOSITORY}:build-{key}"
    about = await runtime.images.find(name)
    if about is None:
        base = await _base(runtime, root or plan.base)
        query = {"t": name, "dockerfile": _DOCKERFILE, "networkmode": _NETWORKS[network], "rm": "1", "forcerm": "1"}
        if args:
            query["buildargs"] = json.dumps(args)
        try:
            async with asyncio.timeout(seconds):
                with tempfile.TemporaryFile() as file:
                    await asyncio.to_thread(_context, files, over(text, plan, base), file)
                    await _follow(runtime.build(chunks(file), query), say)
        except TimeoutError as error:
            raise DockerfileError(f"Dockerfile: the build took longer than {seconds:g} s") from error
        except EngineFailure as failure:
            raise DockerfileError(f"Dockerfile: the engine could not build it: {failure}") from failure
        about = await runtime.images.find(name)
        if about is None:
            raise DockerfileError("Dockerfile: the engine built it and does not have it; look at its log")
    config: dict[str, Any] = about.get("Config") or {}
    env = dict(pair.partition("=")[::2] for pair in config.get("Env") or [])
    env = {name: value for name, value in env.items() if name in plan.env}
    user = str(config.get("User") or "").partition(":")[0]
    workdir = str(config.get("WorkingDir") or "")
    return {"root": name, "env": env, "workdir": workdir, "user": user, "notes": plan.notes}


async def _base(runtime: DockerRuntime, root: str) -> str:
    try:
        return await runtime.images.ready(root)
    except SandboxError as error:
        raise DockerfileError(
            f"Dockerfile: its base is not here: {error}. Name a root for it: a folder or tar file that is imported, or an "
            "image that the engine has"
        ) from error


def over(text: str, plan: Plan, base: str) -> str:
    """The Dockerfile with its FROM line naming another image. Everything else stays as it is, line by line."""
    lines = text.splitlines()
    start = next(instruction for instruction in plan.instructions if instruction.word == "FROM").line - 1
    end = start
    while lines[end].rstrip().endswith(("\\", "`")) and end + 1 < len(lines):
        end += 1
    # The syntax directive would make the engine fetch another front end from a registry.
    head = ["#" if line.replace(" ", "").lower().startswith("#syntax=") else line for line in lines[:start]]
    return "\n".join([*head, f"FROM {base}", *lines[end + 1 :], ""])


async def _follow(messages: AsyncIterator[dict[str, Any]], say: Callable[[str], None] | None) -> None:
    tail = ""
    try:
        async for message in messages:
            line = str(message.get("stream", ""))
            tail = (tail + line)[-2000:]
            if say is not None and line.startswith("Step "):
                say(line.strip())
    except EngineFailure as failure:
        raise EngineFailure(f"{failure}\n{tail.strip()}", failure.status) from failure


def _context(files: Context, dockerfile: str, out: IO[bytes]) -> None:
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in files.paths:
            tar.add(files.folder / path, arcname=path, recursive=False)
        info = tarfile.TarInfo(_DOCKERFILE)
        data = dockerfile.encode()
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    out.seek(0)
