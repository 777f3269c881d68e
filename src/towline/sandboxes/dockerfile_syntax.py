"""Dockerfiles as data: text to a list of instructions, and the words in them. Pure.

Reading follows the reference: escape directive, comments, continuation lines, here-documents, flags, JSON and shell
forms, and variables with their defaults. What an instruction means is not decided here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from towline.sandboxes.base import SandboxError


class DockerfileError(SandboxError):
    """A Dockerfile that cannot be read or built here, with the line and what to do."""


@dataclass(frozen=True, slots=True)
class HereDocument:
    """Text that an instruction brings with it."""

    name: str
    body: str
    expands: bool
    """Whether variables in it are filled in: the name was not quoted."""


@dataclass(frozen=True, slots=True)
class Instruction:
    line: int
    word: str
    """Upper case."""
    flags: tuple[tuple[str, str], ...]
    text: str
    """What follows the flags, on one line but for here-documents."""
    documents: tuple[HereDocument, ...] = ()

    def error(self, reason: str) -> DockerfileError:
        return DockerfileError(f"Dockerfile line {self.line}: {self.word}: {reason}")

    @property
    def json(self) -> list[str] | None:
        """The words of the JSON form, if it is that."""
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
    """Directives stand before everything else, comments too."""
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
    """A line with those that continue it. Comments and empty lines between them are dropped."""
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
                raise DockerfileError(f"Dockerfile line {first}: the here-document {name} has no end")
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
    """Whether a RUN is nothing but a here-document, whose body then is the script."""
    return bool(_HERE.fullmatch(text.strip()))


def document_name(word: str) -> str | None:
    """The here-document that a word of COPY or ADD stands for."""
    match = _HERE.fullmatch(word)
    return (match[2] or match[3] or match[4]) if match else None


_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-+?])((?:[^{}]|\{[^{}]*\})*))?\})")


def expand(text: str, variables: Mapping[str, str], escape: str = "\\") -> str:
    """Fill variables in, with `${NAME:-default}` and `${NAME:+instead}`; an escaped dollar stays a dollar."""

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
            raise DockerfileError(f"Dockerfile: {name} is not set: {word or 'it must be'}")
        return known or ""

    parts = re.split(f"({re.escape(escape)}.)", text, flags=re.DOTALL)
    # A reference may reach across an escape only inside its braces, which Dockerfiles do not use.
    return "".join(
        ("$" if part == escape + "$" else part) if index % 2 else _VARIABLE.sub(value, part)
        for index, part in enumerate(parts)
    )


def words(instruction: Instruction, variables: Mapping[str, str], escape: str) -> list[str]:
    """The words of COPY, ADD, WORKDIR and the like: of the JSON form, or split at spaces; variables filled in."""
    given = instruction.json
    if given is None:
        given = instruction.text.split()
    return [expand(word, variables, escape).replace(escape + " ", " ") for word in given]


def assignments(instruction: Instruction, variables: Mapping[str, str], escape: str) -> dict[str, str]:
    """`ENV a=b c="d e"`, or the old form `ENV a b c`. All see the variables as they were before."""
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
        found[name] = unquoted(value, variables, escape)
    return found


def split(instruction: Instruction, escape: str) -> list[str]:
    """Split at spaces that are neither quoted nor escaped; quotes and escapes stay in."""
    pattern = re.compile(rf"""(?:"(?:{re.escape(escape)}.|[^"])*"|'[^']*'|{re.escape(escape)}.|[^\s"'])+""", re.DOTALL)
    found = pattern.findall(instruction.text)
    if "".join(found).replace(" ", "") != "".join(instruction.text.split()):
        raise instruction.error("a quotation mark has no partner")
    return found


def unquoted(value: str, variables: Mapping[str, str], escape: str) -> str:
    """A value without its quotes. Variables are filled in everywhere but between single ones."""
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
