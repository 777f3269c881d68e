"""Runs the adapters' tests, each framework in its own environment, and prints what of each framework's code ran.

`make test-trainers` calls it after `requirements/trainers.sh` has made the environments: `run.py [NAME…] [-- PYTEST_ARGS]`. The
exit code is that of the worst test run. Frameworks that cannot be installed here are in the table too, with what was checked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Framework:
    name: str
    package: str
    """The distribution whose version is shown; empty if it is not installed."""
    environment: str
    """The environment that has it: `.venv-NAME`."""
    tests: tuple[str, ...]
    ran: str
    """What of its code runs, or what was checked instead."""
    runs_in: str = ""
    """The environment that the tests run in, if they only speak to the framework."""


CONTRACTS = ("tests/trainers/test_adapter_contracts.py", "tests/trainers/test_versions.py")
FRAMEWORKS = (
    Framework(
        "TRL",
        "trl",
        ".venv-trl",
        ("tests/adapters/test_trl_rollouts.py", "tests/adapters/test_trl_worker.py"),
        "GRPOTrainer and AsyncGRPOTrainer train: losses and weights change",
    ),
    Framework("Tinker", "tinker", ".venv-trl", ("tests/adapters/test_tinker.py",), "Datum, ModelInput, TensorData"),
    Framework(
        "verl",
        "verl",
        ".venv-verl",
        ("tests/adapters/test_verl.py",),
        "DataProto, AgentLoopOutput, GRPO advantages, policy loss",
    ),
    Framework(
        "NeMo Gym",
        "nemo-gym",
        ".venv-nemo-gym",
        ("tests/adapters/test_nemo_gym.py",),
        "its agent client and response types",
        runs_in=".venv",
    ),
    Framework(
        "verifiers",
        "verifiers",
        ".venv-verifiers",
        ("tests/adapters/test_verifiers.py",),
        "SingleAgentEnv, Episode, Trace",
        runs_in=".venv",
    ),
    Framework(
        "sglang-router",
        "sglang-router",
        ".venv-routers",
        ("tests/adapters/test_routers.py::test_a_pool_attaches_through_sglang_router",),
        "the router itself, before stand-ins of SGLang",
        runs_in=".venv",
    ),
    Framework(
        "vLLM's router",
        "vllm-router",
        ".venv-routers",
        ("tests/adapters/test_routers.py::test_a_pool_attaches_through_vllms_router",),
        "the router itself, before stand-ins of SGLang",
        runs_in=".venv",
    ),
    Framework("slime", "", "", CONTRACTS, "none; read at 624b824", runs_in=".venv"),
    Framework("Miles", "", "", CONTRACTS, "none; read at 31f1ca9", runs_in=".venv"),
    Framework("NeMo RL", "", "", CONTRACTS, "none; read at 7ea279a", runs_in=".venv"),
    Framework("prime-rl", "", "", CONTRACTS, "none; read at 559b447", runs_in=".venv"),
    Framework("AReaL", "", "", CONTRACTS, "none; read in release 1.0.4", runs_in=".venv"),
    Framework("SkyRL", "", "", CONTRACTS, "none; read in release 0.3.0", runs_in=".venv"),
)


def python(environment: str) -> Path:
    return ROOT / environment / "bin" / "python"


def version(framework: Framework) -> str:
    if not framework.package:
        return "not installed"
    code = f"from importlib.metadata import version; print(version({framework.package!r}))"
    command = [str(python(framework.environment)), "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "not installed"


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    wanted, options = arguments[:split], arguments[split + 1 :]
    chosen = [one for one in FRAMEWORKS if not wanted or one.name in wanted]
    if unknown := set(wanted) - {one.name for one in FRAMEWORKS}:
        sys.exit(f"unknown frameworks: {', '.join(sorted(unknown))}; choose of {', '.join(f.name for f in FRAMEWORKS)}")
    verdicts: dict[tuple[str, tuple[str, ...]], int] = {}
    rows = [("framework", "version", "what of its code ran", "verdict")]
    for one in chosen:
        key = (one.runs_in or one.environment, one.tests)
        if key not in verdicts:
            print(f"test-trainers: {one.name}: {' '.join(one.tests)}", flush=True)
            command = [str(python(key[0])), "-m", "pytest", "-q", *one.tests, *options]
            environment = os.environ | {"TOWLINE_ROUTERS": str(ROOT / ".venv-routers")}
            verdicts[key] = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        verdict = "failed" if verdicts[key] else "passed" if one.package else "contract passed"
        rows.append((one.name, version(one), one.ran, verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return max(verdicts.values(), default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
