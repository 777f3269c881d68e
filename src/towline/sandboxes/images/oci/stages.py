"""The images that a Dockerfile of any number of stages starts from, and the Dockerfile with these images pinned. Pure.

Only FROM and the flag `--from` are read; all other lines reach the builder as they are, under their own numbers.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping

from towline.sandboxes.images import dockerfile
from towline.sandboxes.images.dockerfile import DockerfileError, Instruction

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
SCRATCH = "scratch"


class Stages:
    """A Dockerfile and the images it names."""

    def __init__(self, text: str, args: Mapping[str, str] | None = None):
        self._lines = text.lstrip("\ufeff").splitlines()
        self._instructions, self._escape = dockerfile.parse(text)
        self._args = dict(args or {})
        self._names: list[str] = []
        self._uses: list[tuple[int, int, Instruction, str]] = []
        """Lines, instruction and image of each use, in order."""
        ends = [one.line - 1 for one in self._instructions[1:]] + [len(self._lines)]
        variables = _platform_variables()
        for instruction, end in zip(self._instructions, ends, strict=False):
            if instruction.word == "ARG" and not self._names:
                self._declare(instruction, variables)
            elif instruction.word == "FROM":
                self._from(instruction, end, variables)
            elif not self._names:
                raise instruction.error("is not allowed before FROM")
            else:
                self._use_images(instruction, end)
        if not self._names:
            raise DockerfileError("the Dockerfile has no FROM")

    @property
    def images(self) -> list[str]:
        """Each image once, in order, without `scratch` and the stages themselves."""
        return list(dict.fromkeys(image for *_, image in self._uses if image != SCRATCH))

    @property
    def scratch(self) -> list[str]:
        """`scratch`, if a stage starts from nothing."""
        return list({image for *_, image in self._uses if image == SCRATCH})

    @property
    def count(self) -> int:
        return len(self._names)

    @property
    def has_documents(self) -> bool:
        """Whether there are here-documents, which older builders cannot parse."""
        return any(instruction.documents for instruction in self._instructions)

    def line_of(self, image: str) -> int:
        return next(instruction.line for _, _, instruction, used in self._uses if used == image)

    def pinned(self, replacements: Mapping[str, str]) -> str:
        """The Dockerfile with other names for its images. Every instruction keeps its line."""
        lines = list(self._lines)
        for start, end, instruction, image in self._uses:
            name = replacements.get(image, image)
            if instruction.word == "FROM":
                flags = [f"--{flag}={value}" for flag, value in instruction.flags]
                _, *rest = instruction.text.split()
                lines[start:end] = [" ".join(["FROM", *flags, name, *rest]), *[""] * (end - start - 1)]
            else:
                pattern = re.compile(rf"((?:--|,)from=){re.escape(image)}(?=[\s,]|$)")
                lines[start:end] = [pattern.sub(rf"\g<1>{name}", line) for line in lines[start:end]]
        return "\n".join([*lines, ""])

    def _declare(self, instruction: Instruction, variables: dict[str, str]) -> None:
        for word in dockerfile.split(instruction, self._escape):
            name, equals, value = word.partition("=")
            if name in self._args:
                variables[name] = self._args[name]
            elif equals:
                variables[name] = dockerfile.unquote(value, variables, self._escape)

    def _from(self, instruction: Instruction, end: int, variables: Mapping[str, str]) -> None:
        words = [dockerfile.expand(word, variables, self._escape) for word in instruction.text.split()]
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS") or not words[0]:
            raise instruction.error(f"{instruction.text!r} is not IMAGE [AS name]")
        if words[0].lower() not in self._names:
            self._uses.append((instruction.line - 1, end, instruction, words[0]))
        self._names.append(words[2].lower() if len(words) == 3 else f"#{len(self._names)}")

    def _use_images(self, instruction: Instruction, end: int) -> None:
        for flag, value in instruction.flags:
            sources = [value] if flag == "from" else []
            if flag == "mount":
                sources = [option[5:] for option in value.split(",") if option.startswith("from=")]
            for source in sources:
                if source.lower() not in self._names and not source.isdigit() and "$" not in source:
                    self._uses.append((instruction.line - 1, end, instruction, source))


def _platform_variables() -> dict[str, str]:
    machine = _MACHINES.get(platform.machine(), platform.machine())
    return {
        f"{prefix}{name}": value
        for prefix in ("TARGET", "BUILD")
        for name, value in (("PLATFORM", f"linux/{machine}"), ("OS", "linux"), ("ARCH", machine))
    }
