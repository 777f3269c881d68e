"""Runs at the start of every Python program of a verifier: imports prefer the system's modules, and exits are watched.

1. A module that exists outside of the carried folders is taken from there, whatever stands in the working folder: an agent's
   `json.py` or `unittest.py` is never imported in place of the real one. Names that the clean environment itself has in the
   carried folders keep their usual order.
2. A program of the verifier (a script of its own, `-m pytest`, `-c …`) runs as the child of a process that runs no code of
   the agent (`towline_run.py`): an exit that the code under test made does not pass for success.

Programs of the agent are not watched. Works with Python 3.7 and later; exits are watched from 3.10 on.
"""

from __future__ import annotations

import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
RUNNERS = {
    "pytest",
    "py.test",
    "unittest",
    "nose",
    "nose2",
    "nosetests",
    "trial",
    "tox",
    "coverage",
    "runtests",
    "manage",
}
"""Programs and modules that run tests: watched wherever they are and whoever starts them."""


def load_config() -> dict[str, Any]:
    import json

    with open(os.path.join(HERE, "config.json"), encoding="utf-8") as file:
        config: dict[str, Any] = json.load(file)
    root = os.environ.get("TOWLINE_ROOT", "")
    for name in ("carried", "brought"):
        config[name] = [os.path.realpath(root + path) for path in config[name]]
    return config


def under(path: str, folders: list[str]) -> bool:
    path = os.path.realpath(path)
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def agents(path: str, config: dict[str, Any]) -> bool:
    """Whether a file is the agent's: carried, and not one that the verifier brings."""
    return under(path, config["carried"]) and not under(path, config["brought"])


class TrustedFirst:
    """Finds top-level modules outside of the carried folders first."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.native = frozenset(config["native"])
        self._known: dict[str, bool] = {}

    def _carried(self, entry: str) -> bool:
        found = self._known.get(entry)
        if found is None:
            found = under(entry or os.getcwd(), self.config["carried"])
            if entry:
                self._known[entry] = found
        return found

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if path is not None or name in self.native:
            return None
        entries = [entry for entry in sys.path if isinstance(entry, str)]
        trusted = [entry for entry in entries if not self._carried(entry)]
        if len(trusted) == len(entries):
            return None
        from importlib.machinery import PathFinder

        found = PathFinder.find_spec(name, trusted)
        # A folder without code, a namespace, is no reason to pass over a module.
        return found if found is not None and found.loader is not None else None


def main_of(arguments: list[str]) -> tuple[list[str], str, str, list[str]] | None:
    """The interpreter's options, how the main program is named (`m`, `c` or `script`), its name, and its arguments."""
    at = 1
    while at < len(arguments):
        word = arguments[at]
        if not word.startswith("-") or word == "-":
            return None if word == "-" else (arguments[1:at], "script", word, arguments[at + 1 :])
        if word in ("-X", "-W", "--check-hash-based-pycs"):
            at += 2
            continue
        if not word.startswith("--"):
            for place, letter in enumerate(word[1:], 1):
                if letter in "XW":
                    break
                if letter in "mc":
                    options = arguments[1:at] + ([word[:place]] if place > 1 else [])
                    if word[place + 1 :]:
                        return options, letter, word[place + 1 :], arguments[at + 1 :]
                    if at + 1 < len(arguments):
                        return options, letter, arguments[at + 1], arguments[at + 2 :]
                    return None
        at += 1
    return None


def watched(kind: str, name: str, config: dict[str, Any]) -> bool:
    """Whether the main program is the verifier's."""
    if os.environ.get("TOWLINE_AGENT"):
        return False
    first = os.path.basename(name).partition(".")[0] if kind != "c" else ""
    if kind == "script" and name.endswith("py.test"):
        first = "pytest"
    if first in RUNNERS:
        return True
    if os.environ.get("TOWLINE_NESTED"):
        return False
    if kind == "script":
        return not agents(name, config)
    return kind == "c" or sys.meta_path[0].find_spec(first, None) is not None


def start() -> None:
    config = load_config()
    sys.meta_path.insert(0, TrustedFirst(config))
    if os.environ.pop("TOWLINE_RUN", ""):
        return
    found = main_of(list(getattr(sys, "orig_argv", ())))
    if found is None:
        return
    options, kind, name, rest = found
    if not watched(kind, name, config):
        if kind == "script" and agents(name, config):
            os.environ["TOWLINE_AGENT"] = "1"
        return
    os.environ["TOWLINE_RUN"] = os.environ["TOWLINE_NESTED"] = "1"
    os.execv(sys.executable, [sys.executable, *options, os.path.join(HERE, "towline_run.py"), kind, name, *rest])


if __name__ == "sitecustomize" and os.path.exists(os.path.join(HERE, "config.json")):
    start()
