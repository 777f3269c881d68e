"""From a Dockerfile's instructions to the steps of a build. Pure: expands variables, refuses unknown instructions."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from towline.sandboxes.images import dockerfile
from towline.sandboxes.images.dockerfile import DockerfileError, Instruction

_IGNORED = {"LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK"}
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class RunStep:
    line: int
    command: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    user: str
    script: str | None = None
    """A here-document with its own interpreter line, run as a file."""


@dataclass(frozen=True, slots=True)
class CopyStep:
    line: int
    sources: tuple[str, ...]
    documents: tuple[tuple[str, str], ...]
    """Here-documents: names and texts."""
    target: str
    """Absolute; ends with a slash if the Dockerfile says it is a folder."""
    chown: str
    chmod: int | None
    unpack: bool
    """ADD: unpack archives."""


@dataclass(frozen=True, slots=True)
class WorkdirStep:
    line: int
    path: str


Step = RunStep | CopyStep | WorkdirStep


@dataclass(slots=True)
class BuildPlan:
    """The steps of a build, and the image they start from."""

    base: str = ""
    steps: list[Step] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""
    notes: list[str] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)


def plan_build(text: str, args: Mapping[str, str]) -> BuildPlan:
    """The plan of a Dockerfile with build arguments."""
    instructions, escape = dockerfile.parse(text)
    return _Planner(escape, args).read(instructions)


class _Planner:
    def __init__(self, escape: str, args: Mapping[str, str]):
        self._escape = escape
        self._build_args = dict(args)
        machine = _MACHINES.get(platform.machine(), platform.machine())
        platforms = {"TARGETPLATFORM": f"linux/{machine}", "TARGETOS": "linux", "TARGETARCH": machine}
        builders = {"BUILDPLATFORM": f"linux/{machine}", "BUILDOS": "linux", "BUILDARCH": machine}
        self._global = platforms | builders
        self._args: dict[str, str] = {}
        self._shell = ["/bin/sh", "-c"]
        self._plan = BuildPlan()
        self._handlers: dict[str, Callable[[Instruction], None]] = {
            "FROM": self._from,
            "ARG": self._arg,
            "ENV": self._env,
            "RUN": self._run,
            "COPY": self._copy,
            "ADD": self._add,
            "WORKDIR": self._workdir,
            "USER": self._user,
            "SHELL": self._use_shell,
        }

    def read(self, instructions: list[Instruction]) -> BuildPlan:
        plan = self._plan
        plan.instructions = instructions
        for instruction in instructions:
            if not plan.base and instruction.word not in ("ARG", "FROM"):
                raise instruction.error("is not allowed before FROM")
            if instruction.word in _IGNORED:
                plan.notes.append(f"line {instruction.line}: {instruction.word} has no effect")
            elif instruction.word in self._handlers:
                self._handlers[instruction.word](instruction)
            else:
                raise instruction.error(f"is not supported; supported are {', '.join(self._handlers)}")
        if not plan.base:
            raise DockerfileError("the Dockerfile has no FROM")
        return plan

    @property
    def _variables(self) -> dict[str, str]:
        return self._args | self._plan.env

    def _from(self, instruction: Instruction) -> None:
        if self._plan.base:
            raise instruction.error("multi-stage builds are not supported: use one FROM")
        self._flags(instruction, "platform")
        words = [dockerfile.expand(word, self._global | self._args, self._escape) for word in instruction.text.split()]
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS") or not words[0]:
            raise instruction.error(f"{instruction.text!r} is not IMAGE [AS name]")
        self._plan.base = words[0]
        self._global |= self._args
        self._args = {}

    def _arg(self, instruction: Instruction) -> None:
        for word in dockerfile.split(instruction, self._escape):
            name, equals, default = word.partition("=")
            value = self._build_args.get(name)
            if value is None and equals:
                value = dockerfile.unquote(default, self._global | self._variables, self._escape)
            elif value is None:
                value = self._global.get(name)
            if value is not None:
                self._args[name] = value

    def _env(self, instruction: Instruction) -> None:
        self._plan.env |= dockerfile.assignments(instruction, self._variables, self._escape)

    def _workdir(self, instruction: Instruction) -> None:
        path = dockerfile.expand(instruction.text.strip().strip("\"'"), self._variables, self._escape)
        if not path:
            raise instruction.error("needs a folder")
        self._plan.workdir = self._path(path)
        self._plan.steps.append(WorkdirStep(instruction.line, self._plan.workdir))

    def _user(self, instruction: Instruction) -> None:
        user = dockerfile.expand(instruction.text.strip(), self._variables, self._escape)
        name, _, group = user.partition(":")
        if not name:
            raise instruction.error("needs a user")
        if group:
            self._plan.notes.append(
                f"line {instruction.line}: the group {group} is ignored; the user's own group is used"
            )
        self._plan.user = name

    def _use_shell(self, instruction: Instruction) -> None:
        shell = instruction.json
        if not shell:
            raise instruction.error('needs the JSON form: SHELL ["/bin/bash", "-c"]')
        self._shell = shell

    def _run(self, instruction: Instruction) -> None:
        for name, value in instruction.flags:
            if name == "mount" and "type=cache" in value.split(","):
                self._plan.notes.append(
                    f"line {instruction.line}: the cache mount is ignored; its content stays in the layer"
                )
            elif not (name == "network" and value == "default") and not (name == "security" and value == "sandbox"):
                raise instruction.error(f"--{name}={value} is not supported")
        command, script = self._command(instruction)
        plan = self._plan
        plan.steps.append(
            RunStep(instruction.line, tuple(command), self._variables, plan.workdir or "/", plan.user, script)
        )

    def _command(self, instruction: Instruction) -> tuple[list[str], str | None]:
        exec_form = instruction.json
        if exec_form is not None:
            if not exec_form:
                raise instruction.error("needs a command")
            return exec_form, None
        if not instruction.text:
            raise instruction.error("needs a command")
        if len(instruction.documents) == 1 and dockerfile.is_only_documents(instruction.text):
            body = instruction.documents[0].body
            if body.startswith("#!"):
                return [], body
            return [*self._shell, body], None
        # The shell itself reads here-documents: it gets them verbatim.
        parts = [instruction.text, *(document.body + document.name for document in instruction.documents)]
        return [*self._shell, "\n".join(parts)], None

    def _copy(self, instruction: Instruction, *, unpack: bool = False) -> None:
        flags = self._flags(instruction, "chown", "chmod", "link")
        words = dockerfile.words(instruction, self._variables, self._escape)
        if len(words) < 2:
            raise instruction.error("needs a source and a target")
        bodies = {document.name: document for document in instruction.documents}
        sources, documents = [], []
        for word in words[:-1]:
            name = dockerfile.document_name(word)
            if name is not None and name in bodies:
                body = bodies[name].body
                documents.append(
                    (name, dockerfile.expand(body, self._variables, self._escape) if bodies[name].expands else body)
                )
            elif "://" in word or word.startswith("git@"):
                raise instruction.error(f"{word} is remote: copy it into the build folder first")
            else:
                sources.append(word)
        target = words[-1]
        folder = target.endswith(("/", "/.", "/..")) or target in (".", "..") or len(words) > 2
        mode = flags.get("chmod", "")
        if mode and not re.fullmatch("0?[0-7]{3}", mode):
            raise instruction.error(f"--chmod={mode} is not an octal mode up to 777")
        path = self._path(target).rstrip("/") + ("/" if folder else "")
        chown = dockerfile.expand(flags.get("chown", ""), self._variables, self._escape)
        step = CopyStep(
            instruction.line, tuple(sources), tuple(documents), path, chown, int(mode, 8) if mode else None, unpack
        )
        self._plan.steps.append(step)

    def _add(self, instruction: Instruction) -> None:
        self._copy(instruction, unpack=True)

    def _flags(self, instruction: Instruction, *known: str) -> dict[str, str]:
        for name, value in instruction.flags:
            if name not in known:
                raise instruction.error(f"--{name}={value} is not supported")
        return dict(instruction.flags)

    def _path(self, path: str) -> str:
        """An absolute path inside, without `.` and `..`."""
        parts: list[str] = []
        whole = path if path.startswith("/") else f"{self._plan.workdir or '/'}/{path}"
        for part in whole.split("/"):
            if part == "..":
                del parts[-1:]
            elif part not in ("", "."):
                parts.append(part)
        return "/" + "/".join(parts)
