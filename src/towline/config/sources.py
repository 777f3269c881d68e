"""Where settings come from besides the file: environment variables and options, and how an error names its source."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource

from towline.errors import ConfigError

PREFIX = "TOWLINE_"


class EnvironmentSource(EnvSettingsSource):
    """`TOWLINE_SECTION__FIELD[__FIELD]`. Lists and objects are JSON; a plain string stands for itself everywhere."""

    def _load_env_vars(self) -> Mapping[str, str | None]:
        # Sorted, so that a variable for a whole section comes before those for its fields, which take precedence.
        names = sorted(name for name in os.environ if name.startswith(PREFIX) and "__" in name)
        for name in names:
            for longer in names:
                if longer.startswith(f"{name}__") and not os.environ[name].lstrip().startswith("{"):
                    raise ConfigError(f"{longer}: {name} already sets a value for this key; unset one of them")
        return {name.lower(): os.environ[name] for name in names}

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        return _decode(value)

    def __call__(self) -> dict[str, Any]:
        return {section: _decode(values) for section, values in super().__call__().items()}


def _decode(value: Any) -> Any:
    """JSON lists and objects in strings, at any depth; other strings as they are."""
    if isinstance(value, dict):
        return {name: _decode(one) for name, one in value.items()}
    try:
        return json.loads(value) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value
    except ValueError:
        return value


def without_none(values: dict[str, Any]) -> dict[str, Any]:
    """The values that are not `None`, at any depth: an option that was not given overrides nothing."""
    return {name: without_none(v) if isinstance(v, dict) else v for name, v in values.items() if v is not None}


def describe(error: ErrorDetails, path: Path, overrides: Mapping[str, Any]) -> str:
    """One problem on one line: the source that set the key, the key, and what is wrong with it."""
    key = [str(part) for part in error["loc"]]
    message = "unknown setting" if error["type"] == "extra_forbidden" else error["msg"].removeprefix("Value error, ")
    if not key:
        return f"settings: {message}"
    variable = PREFIX + "__".join(key).upper()
    given: Any = overrides
    for part in key:
        given = given.get(part) if isinstance(given, Mapping) else None
    if given is not None:
        source = "options"
    else:
        source = next((name for name in sorted(os.environ) if name.startswith(variable) and "__" in name), str(path))
    return f"{source}: {'.'.join(key)}: {message}"
