"""`towline harness check` for real: a program that works passes, and one whose calls are not all captured never does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.harnesses.harness_rig import INSTALLS
from towline.harnesses.registry import find_harness
from towline.node.harness_check import HarnessCheckResult, check_harness
from towline.sandboxes.base import Runtime
from towline.sandboxes.bubblewrap.runtime import BubblewrapRuntime
from towline.tokens.loading import load_codec


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    made = BubblewrapRuntime(tmp_path / "sandboxes")
    await made.open()
    yield made
    await made.close()


async def run(name: str, runtime: Runtime, data: Path, assets: Path, **options: Any) -> HarnessCheckResult:
    codec = load_codec(assets / "tokenizers" / "qwen3")
    return await check_harness(
        find_harness(name), installs=INSTALLS, runtime=runtime, codec=codec, data=data, options=options, seconds=120
    )


async def test_pi_passes(runtime: Runtime, tmp_path: Path, assets: Path) -> None:
    result = await run("pi", runtime, tmp_path / "data", assets, dialect="messages")
    assert result.ok, result.problems
    assert result.turns == 3
    assert result.chains == 1
    assert result.tools_ran
    assert result.dialect == "messages"
    assert result.exit_code == 0


POST = """
exec 3<>/dev/tcp/127.0.0.1/8500
body='{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
printf 'POST %s HTTP/1.1\\r\\nhost: g\\r\\nconnection: close\\r\\nauthorization: Bearer %s\\r\\ncontent-length: %s\\r\\n\\r\\n%s' \
  "$1" "$TOWLINE_KEY" "${#body}" "$body" >&3
cat <&3
"""


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo I did nothing", "made no model call that reached the gateway; its last output: I did nothing"),
        ('bash -c "$POST" x /v1/chat/completions; exit 3', "exited with code 3"),
        ('bash -c "$POST" x /v1/chat/completions; bash -c "$POST" x /v2/unknown', "refused: POST /v2/unknown 404"),
        ('bash -c "$POST" x /v1/chat/completions', ""),
    ],
    ids=["silent", "broken", "unknown path", "captured"],
)
async def test_what_is_not_captured_is_a_failure(
    runtime: Runtime, tmp_path: Path, assets: Path, command: str, problem: str
) -> None:
    result = await run("shell", runtime, tmp_path / "data", assets, command=command, env={"POST": POST})
    assert result.ok is not bool(problem), result
    assert problem in " ".join(result.problems)
    assert result.turns == ("POST" in command)
