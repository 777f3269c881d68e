"""`${VAR}` and `${VAR:-default}` in a task's environment, filled in from whoever loads the task."""

from __future__ import annotations

import re
from collections.abc import Mapping

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class MissingVariable(LookupError):
    """A reference without a default to a variable that is not set."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """The text with every reference filled in. An empty variable counts as missing, as in a shell's `:-`."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if variables.get(name):
            return variables[name]
        if default is None:
            if name in variables:
                return ""
            raise MissingVariable(f"the variable {name} is not set; set it, or write ${{{name}:-default}}")
        return default

    return _REFERENCE.sub(value, text)


def expand_all(texts: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    return {name: expand(text, variables) for name, text in texts.items()}
