"""Parsers: a Dockerfile to instructions and words, a build context to the files that .dockerignore leaves in.

Dockerfiles follow the Dockerfile reference: escape directive, comments, continuation lines, here-documents, flags, JSON
and shell forms, and variables with defaults. What an instruction means is decided in `build_plan.py`.

.dockerignore patterns are Docker's: `*`, `?` and `[…]` match within one component of a path, `**` matches any number of
components, a leading `!` re-includes, the last match wins, and a match of a folder applies to everything in it.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from towline.sandboxes.base import SandboxError
from towline.sandboxes.files import folders


class DockerfileError(SandboxError):
    """A Dockerfile cannot be parsed or built; the message has the line and what to do."""


@dataclass(frozen=True, slots=True)
class HereDocument:
    """Inline text of an instruction."""

    name: str
    body: str
    expands: bool
    """Whether variables in it are expanded: its name is not quoted."""


@dataclass(frozen=True, slots=True)
class Instruction:
    line: int
    word: str
    """Upper case."""
    flags: tuple[tuple[str, str], ...]
    text: str
    """What follows the flags, on one line except for here-documents."""
    documents: tuple[HereDocument, ...] = ()

    def error(self, reason: str) -> DockerfileError:
        return DockerfileError(f"Dockerfile line {self.line}: {self.word}: {reason}")

    @property
    def json(self) -> list[str] | None:
        """The words of the JSON form; None for the shell form."""
        if not self.text.startswith("["):
            return None
        try:
            words = json.loads(self.text)
        except ValueError:
            return None
        return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S.*?)\s*$")
_HERE = re.compile(r"""<<(-?)(?:"([^"\s]+)"|'([^'\s]+)'|([A-Za-z_][\w.]*))""")
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(\S*))?(?:\s+|$)")
_WITH_DOCUMENTS = {"RUN", "COPY", "ADD"}


def parse(text: str) -> tuple[list[Instruction], str]:
    """The instructions, and the escape character."""
    lines = text.lstrip("\ufeff").splitlines()
    escape = _escape(lines)
    found: list[Instruction] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        first = at + 1
        at += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        logical, at = _logical(line, lines, at, escape)
        word, rest = [*logical.split(None, 1), ""][:2]
        word = word.upper()
        documents: list[HereDocument] = []
        if word in _WITH_DOCUMENTS and not rest.lstrip().startswith("["):
            documents, at = _documents(rest, lines, at, first)
        flags, rest = _flags(rest.strip())
        found.append(Instruction(first, word, flags, rest, tuple(documents)))
    return found, escape


def _escape(lines: list[str]) -> str:
    """The escape character. Directives come before everything else, even comments."""
    for line in lines:
        match = _DIRECTIVE.match(line)
        if match is None:
            break
        if match[1].lower() == "escape":
            if match[2] not in ("\\", "`"):
                raise DockerfileError(f"Dockerfile: the escape character is \\ or `, not {match[2]!r}")
            return match[2]
    return "\\"


def _logical(line: str, lines: list[str], at: int, escape: str) -> tuple[str, int]:
    """A line joined with its continuation lines. Comments and empty lines between them are dropped."""
    parts: list[str] = []
    while True:
        stripped = line.rstrip()
        if not stripped.endswith(escape):
            parts.append(line.strip() if not parts else line.rstrip())
            return "".join(parts), at
        parts.append(stripped[:-1] if parts else stripped[:-1].lstrip())
        while at < len(lines) and (not lines[at].strip() or lines[at].lstrip().startswith("#")):
            at += 1
        if at >= len(lines):
            return "".join(parts), at
        line = lines[at]
        at += 1


def _documents(text: str, lines: list[str], at: int, first: int) -> tuple[list[HereDocument], int]:
    found = []
    for match in _HERE.finditer(text):
        name = match[2] or match[3] or match[4]
        body: list[str] = []
        while True:
            if at >= len(lines):
                raise DockerfileError(f"Dockerfile line {first}: the here-document {name} is not terminated")
            line = lines[at].lstrip("\t") if match[1] else lines[at]
            at += 1
            if line == name:
                break
            body.append(line + "\n")
        found.append(HereDocument(name, "".join(body), expands=match[4] is not None))
    return found, at


def _flags(text: str) -> tuple[tuple[tuple[str, str], ...], str]:
    flags = []
    while match := _FLAG.match(text):
        flags.append((match[1], match[2] or ""))
        text = text[match.end() :]
    return tuple(flags), text


def is_only_documents(text: str) -> bool:
    """Whether a RUN is only a here-document, whose body is the script."""
    return bool(_HERE.fullmatch(text.strip()))


def document_name(word: str) -> str | None:
    """The name of the here-document in a word of COPY or ADD."""
    match = _HERE.fullmatch(word)
    return (match[2] or match[3] or match[4]) if match else None


_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-+?])((?:[^{}]|\{[^{}]*\})*))?\})")


def expand(text: str, variables: Mapping[str, str], escape: str = "\\") -> str:
    """Expand variables, with `${NAME:-default}` and `${NAME:+alternative}`; an escaped dollar stays a dollar."""

    def value(match: re.Match[str]) -> str:
        name, how, word = match[1] or match[2], match[3], match[4] or ""
        known = variables.get(name)
        there = known is not None and (known != "" or not (how or "").startswith(":"))
        if how is None:
            return known or ""
        if how.endswith("-"):
            return (known or "") if there else expand(word, variables, escape)
        if how.endswith("+"):
            return expand(word, variables, escape) if there else ""
        if not there:
            raise DockerfileError(f"Dockerfile: {name} is not set: {word or 'it is required'}")
        return known or ""

    parts = re.split(f"({re.escape(escape)}.)", text, flags=re.DOTALL)
    # A reference could span an escape only inside its braces, which Dockerfiles do not use.
    return "".join(
        ("$" if part == escape + "$" else part) if index % 2 else _VARIABLE.sub(value, part)
        for index, part in enumerate(parts)
    )


def words(instruction: Instruction, variables: Mapping[str, str], escape: str) -> list[str]:
    """The words of an instruction like COPY, from its JSON form or split at spaces, with variables expanded."""
    given = instruction.json
    if given is None:
        given = instruction.text.split()
    return [expand(word, variables, escape).replace(escape + " ", " ") for word in given]


def assignments(instruction: Instruction, variables: Mapping[str, str], escape: str) -> dict[str, str]:
    """`ENV a=b c="d e"`, or the legacy form `ENV a b c`. All see the variables from before the instruction."""
    name, space, rest = instruction.text.partition(" ")
    if "=" not in name:
        if not space:
            raise instruction.error(f"{name} has no value")
        return {name: expand(rest.strip(), variables, escape)}
    found: dict[str, str] = {}
    for word in split(instruction, escape):
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise instruction.error(f"{word!r} is not NAME=value")
        found[name] = unquote(value, variables, escape)
    return found


def split(instruction: Instruction, escape: str) -> list[str]:
    """Split at spaces that are neither quoted nor escaped; quotes and escapes are kept."""
    pattern = re.compile(rf"""(?:"(?:{re.escape(escape)}.|[^"])*"|'[^']*'|{re.escape(escape)}.|[^\s"'])+""", re.DOTALL)
    found = pattern.findall(instruction.text)
    if "".join(found).replace(" ", "") != "".join(instruction.text.split()):
        raise instruction.error("a quotation mark is not closed")
    return found


def unquote(value: str, variables: Mapping[str, str], escape: str) -> str:
    """A value without its quotes. Variables are expanded except between single quotes."""
    out = []
    pattern = re.compile(
        rf"""'([^']*)'|"((?:{re.escape(escape)}.|[^"])*)"|((?:{re.escape(escape)}.|[^"'])+)""", re.DOTALL
    )
    for single, double, plain in pattern.findall(value):
        if single:
            out.append(single)
        elif double:
            filled = expand(double, variables, escape)
            out.append(re.sub(rf"{re.escape(escape)}([\"\\$`])", r"\1", filled))
        elif plain:
            filled = expand(plain, variables, escape)
            out.append(re.sub(rf"{re.escape(escape)}(.)", r"\1", filled))
    return "".join(out)


_MAX_FILES = 100_000


class BuildContext:
    """A build context: the relative paths in it, files, links and folders, in a fixed order."""

    def __init__(self, folder: Path, ignored: Sequence[str] = ()):
        self.folder = folder
        self.paths: list[str] = []
        for path, about in folders.entries(folder):
            if len(self.paths) >= _MAX_FILES:
                raise SandboxError(
                    f"{folder} has more than {_MAX_FILES:,} files to build from: exclude some in .dockerignore"
                )
            kind = about.st_mode
            if (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind)) and not is_ignored(path, ignored):
                self.paths.append(path)
        self._known = set(self.paths)

    @classmethod
    def read(cls, folder: Path, dockerfile: Path) -> BuildContext:
        """The context with the .dockerignore of the Dockerfile itself, or else of the folder."""
        if not folder.is_dir():
            raise SandboxError(f"cannot build from {folder}: it is not a folder")
        for file in (dockerfile.with_name(dockerfile.name + ".dockerignore"), folder / ".dockerignore"):
            if file.is_file():
                return cls(folder, patterns(file.read_text("utf-8", "replace")))
        return cls(folder)

    def digest(self) -> str:
        return folders.digest(self.folder, self.paths)

    def match(self, source: str) -> list[str]:
        """The paths that a source of COPY matches; `""` is the folder itself. Nothing outside can match."""
        wanted = _normalize(source)
        if not wanted:
            return [""]
        if wanted in self._known:
            return [wanted]
        expression = _compiled(wanted)
        return [path for path in self.paths if expression.fullmatch(path)]

    def below(self, path: str) -> list[str]:
        """The contents of a folder, relative to it."""
        start = path + "/" if path else ""
        return [known[len(start) :] for known in self.paths if known.startswith(start)]

    def is_folder(self, path: str) -> bool:
        return not path or stat.S_ISDIR(os.lstat(self.folder / path).st_mode)


def patterns(text: str) -> list[str]:
    """The patterns of a .dockerignore."""
    found = []
    for line in text.lstrip("\ufeff").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        negated = line.strip().startswith("!")
        plain = _normalize(line.strip().lstrip("!").strip())
        if plain:
            found.append(("!" if negated else "") + plain)
    return found


def is_ignored(path: str, ignored: Sequence[str]) -> bool:
    """Whether the last pattern that matches a path, or a folder above it, excludes it."""
    result = False
    parts = path.split("/")
    for pattern in ignored:
        expression = _compiled(pattern.removeprefix("!"))
        if any(expression.fullmatch("/".join(parts[:depth])) for depth in range(1, len(parts) + 1)):
            result = not pattern.startswith("!")
    return result


def _normalize(path: str) -> str:
    """A path relative to the folder: without leading slashes and dots; `..` cannot lead out."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    out = ""
    at = 0
    while at < len(pattern):
        rest = pattern[at:]
        if rest.startswith("**/"):
            out, at = out + "(?:.*/)?", at + 3
        elif rest.startswith("**"):
            out, at = out + ".*", at + 2
        elif rest[0] == "*":
            out, at = out + "[^/]*", at + 1
        elif rest[0] == "?":
            out, at = out + "[^/]", at + 1
        elif rest[0] == "[" and (choice := re.match(r"\[(\^?)((?:\\.|[^\]\\])+)\]", rest)):
            inside = choice[2].replace("[", "\\[")
            out, at = out + f"(?!/)[{choice[1]}{inside}]", at + choice.end()
        elif rest[0] == "\\" and len(rest) > 1:
            out, at = out + re.escape(rest[1]), at + 2
        else:
            out, at = out + re.escape(rest[0]), at + 1
    try:
        return re.compile(out, re.DOTALL)
    except re.error as error:
        raise SandboxError(f"{pattern!r} is not a valid pattern: {error}") from error
