"""Every harness by name. A preset is a module of this package with a `HARNESS`; adding the file adds the harness."""

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
    """The harness of that name, dashes or underscores; or one of the caller's own, as `package.module:NAME`."""
    module, _, attribute = name.partition(":")
    if attribute:
        return _elsewhere(module, attribute)
    harness = _preset(name.replace("-", "_"))
    if harness is None:
        raise ConfigError(f"no harness {name!r}; there are: {', '.join(all_harnesses())}, or name one as module:NAME")
    return harness


def _preset(name: str) -> Harness | None:
    """The harness of a module of this package, if there is such a module and it holds one."""
    full = f"{harnesses.__name__}.{name}"
    if not name.isidentifier() or util.find_spec(full) is None:
        return None
    harness = getattr(import_module(full), "HARNESS", None)
    if isinstance(harness, Harness) and harness.name != name:
        raise ConfigError(f"{full} holds a harness named {harness.name!r}; it must have the name of its file")
    return harness


def _elsewhere(module: str, attribute: str) -> Harness:
    try:
        harness = getattr(import_module(module), attribute, None)
    except ImportError as error:
        raise ConfigError(f"harness {module}:{attribute} cannot be imported: {error}") from error
    if not isinstance(harness, Harness):
        raise ConfigError(f"{module}:{attribute} is no Harness")
    return harness
