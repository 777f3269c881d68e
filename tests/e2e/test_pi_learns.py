"""The pieces of examples/pi_learns with the real Pi: what is heard from it, what the model is made of, what is rewarded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from support.harnesses.harness_rig import INSTALLS
from towline.conversation import ToolCall
from towline.demo.session import LOGPROB_BOUND, recompute
from towline.engines.embedded import EmbeddedEngine, load_decoder
from towline.tokens.loading import load_codec
from towline.trainers.grpo.metrics import MetricsLog

EXAMPLE = Path(__file__).parents[2] / "examples/pi_learns"
sys.path.insert(0, str(EXAMPLE))

import learn  # noqa: E402
import notes  # noqa: E402
import pi_model  # noqa: E402
import pi_prompt  # noqa: E402

RIGHT = ToolCall("", "read", {"path": "notes/book"})
OVERWRITES = ToolCall("", "write", {"path": "notes/book", "content": "red"})
OTHER_NOTE = ToolCall("", "bash", {"command": "cat notes/ring"})


@pytest.fixture(scope="module", autouse=True)
def _installed_pi() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOWLINE_NODE__CACHE", str(INSTALLS.folder.parent))
        yield


@pytest.fixture(scope="module")
def prompt(_installed_pi: None) -> pi_prompt.Prompt:
    return pi_prompt.record_prompt()


@pytest.fixture(scope="module")
def model(prompt: pi_prompt.Prompt, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warmed up for two steps only: it reads Pi's prompt and says what it likes."""
    return pi_model.create(tmp_path_factory.mktemp("models") / "pi", prompt, steps=2)


def test_the_warm_up_speaks_in_pis_own_context(prompt: pi_prompt.Prompt, model: Path) -> None:
    assert "pi" in prompt.system.text
    assert [tool.name for tool in prompt.frame.tools] == list(pi_model.TOOLS)
    codec = load_codec(model)
    assert codec.check.problems == []
    random = Random(0)
    rows = [pi_model.conversation(codec, prompt, random) for _ in range(64)]
    said = [codec.tokenizer.decode([row.ids[place] for place, _ in row.targets]) for row in rows]
    assert all(text.count("<tool_call>") == text.count("</tool_call>") == 1 for text in said)
    assert all(any(f'"{tool}"' in text for text in said) for tool in pi_model.TOOLS)
    assert all(prompt.system.text in codec.tokenizer.decode(row.ids) for row in rows)


def test_rows_that_share_a_prefix_are_what_the_model_computes_of_each(prompt: pi_prompt.Prompt, model: Path) -> None:
    codec, decoder, random = load_codec(model), load_decoder(model), Random(1)
    rows = torch.tensor([pi_model.conversation(codec, prompt, random).ids[:930] for _ in range(3)])
    with torch.no_grad():
        whole, after = decoder.hidden(rows), pi_model.hidden_after(decoder, rows[0, :800], rows[:, 800:])
    assert torch.equal(rows[0, :800], rows[2, :800])
    assert torch.allclose(whole[:, 800:], after, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "answer", "reward", "turns"),
    [
        (RIGHT, "blue", 1.0, [1.0, 1.0]),
        (RIGHT, "red", 0.0, [1.0, 0.0]),
        (OTHER_NOTE, "gold", 0.0, [0.0, 1.0]),
        (OVERWRITES, "red", 0.0, [0.0]),
    ],
)
async def test_pi_does_what_the_model_says_and_is_judged_by_what_it_read(
    prompt: pi_prompt.Prompt, call: ToolCall, answer: str, reward: float, turns: list[float]
) -> None:
    trajectory = await pi_prompt.play(pi_prompt.ANYTHING, [call], answer)
    assert trajectory.reward is not None
    assert trajectory.reward.score == reward
    assert [
        trajectory.reward.per_turn[turn.id] for turn in trajectory.turns if turn.id in trajectory.reward.per_turn
    ] == turns
    # The warm-up shows what Pi returns, to the letter.
    (returned,) = (message["text"] for message in trajectory.turns[1].messages)
    name = next(name for name in notes.NAMES if name in str(call.arguments))
    assert returned == pi_model.returned(prompt, pi_prompt.ANYTHING, call, name)


async def test_a_session_of_pi_with_the_model_is_exact(model: Path) -> None:
    codec = load_codec(model)
    engine = EmbeddedEngine(model, decode=codec.tokenizer.decode, seed=0, threads=1)
    trajectory = await pi_prompt.session(engine, codec, notes.draw(Random(2)))
    assert trajectory.reward is not None
    assert trajectory.reward.score == 0.0
    assert trajectory.report.trained_tokens > 0
    assert recompute(model, [trajectory]) < LOGPROB_BOUND


def test_what_a_run_comes_to_is_its_last_five_updates_beside_its_first_five(tmp_path: Path) -> None:
    metrics = MetricsLog(tmp_path)
    line = {"trained_tokens": 100, "row_tokens": 1000, "worst_logprob": 1e-6}
    for step in range(1, 13):
        metrics.write(step, {**line, "mean_reward": 0.2 if step <= 5 else step / 16, "sessions_used": 64 * step})
    metrics.close()
    found = learn.conclude(tmp_path, 600.0)
    assert found["success_first"] == pytest.approx(0.2)
    assert found["success_last"] == pytest.approx(10 / 16)
    assert found["points"] == pytest.approx(42.5)
    assert found["sessions"] == 64 * 12
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
