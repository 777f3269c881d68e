"""Every harness by name. A preset is a module of this package with a `HARNESS`; adding the file registers it."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module, util

from towline import harnesses
from towline.errors import ConfigError
from towline.harnesses.base import Harness


@cache
def all_harnesses() -> dict[str, Harness]:
    """The presets by name."""
    modules = (module.name for module in pkgutil.iter_modules(harnesses.__path__))
    return {harness.name: harness for name in modules if (harness := _preset(name)) is not None}


def find_harness(name: str) -> Harness:
    """The preset of that name (dashes or underscores), or a custom harness given as `package.module:NAME`."""
    module, _, attribute = name.partition(":")
    if attribute:
        return _custom(module, attribute)
    harness = _preset(name.replace("-", "_"))
    if harness is None:
        available = ", ".join(all_harnesses())
        raise ConfigError(f"unknown harness {name!r}; available: {available}; give your own as module:NAME")
    return harness


def _preset(name: str) -> Harness | None:
    """The harness in a module of this package; None if there is no such module or it has none."""
    full = f"{harnesses.__name__}.{name}"
    if not name.isidentifier() or util.find_spec(full) is None:
        return None
    harness = getattr(import_module(full), "HARNESS", None)
    if isinstance(harness, Harness) and harness.name != name:
        raise ConfigError(f"{full} holds a harness named {harness.name!r}; rename it to match its file")
    return harness


def _custom(module: str, attribute: str) -> Harness:
    try:
        harness = getattr(import_module(module), attribute, None)
    except ImportError as error:
        raise ConfigError(f"harness {module}:{attribute} cannot be imported: {error}") from error
    if not isinstance(harness, Harness):
        raise ConfigError(f"{module}:{attribute} is not a Harness")
    return harness
