"""Where the example agent is: an ordinary program of the source tree, outside the package."""

from __future__ import annotations

from pathlib import Path

from towline.errors import ConfigError

AGENT = Path(__file__).parents[3] / "examples" / "first_agent" / "agent.py"


def check() -> None:
    if not AGENT.is_file():
        raise ConfigError(
            f"the demo runs examples/first_agent/agent.py of the source tree, and {AGENT} is not there: "
            "clone the repository and run `make demo` in it"
        )
