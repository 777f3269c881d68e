"""The decoder: invariants that hold without another implementation at hand."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from towline.engines.embedded import Decoder, DecoderConfig, RopeScaling, create_decoder, load_decoder, save_decoder
from towline.engines.embedded.batch import DecodeGroup, PrefillSpan, StepBatch
from towline.engines.embedded.runner import ModelRunner, RunnerWeights
from towline.errors import ConfigError

torch.set_num_threads(1)

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
VARIANTS = [
    DecoderConfig("qwen3", **SHAPE, tie_word_embeddings=True, rope_theta=1e6),
    DecoderConfig("qwen3", **SHAPE, attention_bias=True),
    DecoderConfig("qwen2", **SHAPE, tie_word_embeddings=True),
    DecoderConfig("qwen2", **SHAPE, rope_scaling=RopeScaling("linear", 4.0)),
    DecoderConfig("llama", **SHAPE, rope_scaling=LLAMA3, rope_theta=5e5),
    DecoderConfig("llama", **SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
]
each_variant = pytest.mark.parametrize("config", VARIANTS, ids=lambda config: config.model_type)


def lively(config: DecoderConfig, seed: int = 1) -> Decoder:
    """A decoder whose every weight matters: norms away from 1, biases away from 0, sharp attention."""
    decoder = create_decoder(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else 0.3 * noise)
    return decoder


def by_hand(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """The same function for one row, written out: every head with its own copy of its keys, one loop a position."""
    config = decoder.config
    state = decoder.state_dict()

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        return values / torch.sqrt((values**2).mean(-1, keepdim=True) + config.rms_norm_eps) * state[name]

    def linear(values: torch.Tensor, name: str) -> torch.Tensor:
        return values @ state[f"{name}.weight"].T + state.get(f"{name}.bias", torch.zeros(1))

    values = state["model.embed_tokens.weight"][ids]
    half = config.head_dim // 2
    frequencies = decoder.get_buffer("frequencies")
    if config.rope_scaling is None:
        expected = [config.rope_theta ** (-index / half) for index in range(half)]
        torch.testing.assert_close(frequencies, torch.tensor(expected))
    angles = torch.arange(len(ids))[:, None] * frequencies

    def turn(heads: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    repeats = config.num_attention_heads // config.num_key_value_heads
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        normed = norm(values, f"{layer}.input_layernorm.weight")
        parts = [
            linear(normed, f"{layer}.self_attn.{part}_proj").unflatten(-1, (-1, config.head_dim)) for part in "qkv"
        ]
        if config.model_type == "qwen3":
            parts[:2] = [
                norm(part, f"{layer}.self_attn.{name}_norm.weight") for part, name in zip(parts[:2], "qk", strict=True)
            ]
        queries, keys = (turn(part.transpose(0, 1)) for part in parts[:2])
        keys = keys.repeat_interleave(repeats, dim=0)
        contents = parts[2].transpose(0, 1).repeat_interleave(repeats, dim=0)
        outputs = torch.zeros_like(queries)
        for position in range(len(ids)):
            scores = torch.einsum("hd,hkd->hk", queries[:, position], keys[:, : position + 1])
            shares = torch.softmax(scores / math.sqrt(config.head_dim), dim=-1)
            outputs[:, position] = torch.einsum("hk,hkd->hd", shares, contents[:, : position + 1])
        values = values + linear(outputs.transpose(0, 1).flatten(1), f"{layer}.self_attn.o_proj")
        normed = norm(values, f"{layer}.post_attention_layernorm.weight")
        gate, up = linear(normed, f"{layer}.mlp.gate_proj"), linear(normed, f"{layer}.mlp.up_proj")
        values = values + linear(gate * torch.sigmoid(gate) * up, f"{layer}.mlp.down_proj")
    head = state.get("lm_head.weight", state["model.embed_tokens.weight"])
    return norm(values, "model.norm.weight") @ head.T


@each_variant
def test_forward_is_the_written_out_function(config: DecoderConfig) -> None:
    decoder = lively(config)
    ids = torch.randint(0, config.vocab_size, (3, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = decoder(ids)
        expected = torch.stack([by_hand(decoder, row) for row in ids])
        shifted = decoder(ids, torch.arange(40).expand(3, 40) + 50)
    assert logits.std() > 0.5
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
    # Rotary positions are relative: the same distances give the same logits.
    torch.testing.assert_close(logits, shifted, atol=2e-4, rtol=1e-4)
    with torch.no_grad():
        padded = decoder(torch.cat((ids, torch.zeros_like(ids)), dim=1))
        stretched = decoder(ids, torch.arange(40) * 2)
    torch.testing.assert_close(padded[:, :40], logits, atol=2e-5, rtol=1e-5)
    assert (stretched - logits).abs().max() > 0.01


@each_variant
def test_incremental_is_the_full_forward(config: DecoderConfig) -> None:
    """Three sequences that begin alike, through one pool: spans, single tokens, both at once, a prefix computed once."""
    decoder = lively(config)
    generator = np.random.default_rng(3)
    rows = [generator.integers(0, config.vocab_size, size).astype(np.int64) for size in (9, 21, 30)]
    shared = 4
    rows[0][:shared] = rows[1][:shared] = rows[2][:shared]
    slots = generator.permutation(np.arange(1, 101))
    tables = [slots[:9], slots[9:30], slots[30:60]]
    tables[0][:shared] = tables[1][:shared] = tables[2][:shared]
    runner = ModelRunner(RunnerWeights.of(decoder), 100, 128)
    logits = [np.zeros((len(row), config.vocab_size), dtype=np.float32) for row in rows]
    done = [0, 0, 0]

    def step(sizes: list[int], together: bool = True) -> None:
        """The next `sizes[i]` tokens of sequence `i`; single tokens attend together or each alone."""
        parts = sorted((size, index) for index, size in enumerate(sizes) if size)
        chunks = [(index, done[index], done[index] + size) for size, index in parts]
        singles = [(index, stop) for index, start, stop in chunks if stop - start == 1]
        ends = np.cumsum([stop - start for _, start, stop in chunks]).tolist()
        groups = []
        for first, last in [(0, len(singles))] if together else [(at, at + 1) for at in range(len(singles))]:
            members = singles[first:last]
            prefix = shared if together and len(members) > 1 else 0
            contexts = np.zeros((len(members), max((stop for _, stop in members), default=0) - prefix), dtype=np.int64)
            for row, (index, stop) in zip(contexts, members, strict=True):
                row[: stop - prefix] = tables[index][prefix:stop]
            lengths = np.array([stop - prefix for _, stop in members], dtype=np.int64)
            if members:
                groups.append(DecodeGroup(first, last, tables[members[0][0]][:prefix], contexts, lengths))
        spans = [
            PrefillSpan(end - (stop - start), end, tables[index][:start])
            for end, (index, start, stop) in zip(ends, chunks, strict=True)
            if stop - start > 1
        ]
        with torch.inference_mode():
            hidden = runner.hidden(
                StepBatch(
                    ids=np.concatenate([rows[index][start:stop] for index, start, stop in chunks]),
                    positions=np.concatenate([np.arange(start, stop) for _, start, stop in chunks]),
                    slots=np.concatenate([tables[index][start:stop] for index, start, stop in chunks]),
                    groups=groups,
                    spans=spans,
                )
            )
            found = runner.logits(hidden).numpy()
        for end, (index, start, stop) in zip(ends, chunks, strict=True):
            logits[index][start:stop] = found[end - (stop - start) : end]
            done[index] = stop

    step([0, 0, 7])
    logits[0][:shared] = logits[1][:shared] = logits[2][:shared]
    done[:2] = [shared, shared]
    step([1, 5, 1])
    step([1, 1, 12])
    step([1, 1, 1], together=False)
    step([1, 1, 1])
    step([0, 6, 0])
    step([1, 3, 8], together=False)
    assert done == [9, 21, 30]
    with torch.no_grad():
        for row, found in zip(rows, logits, strict=True):
            expected = decoder(torch.from_numpy(row)[None])[0].numpy()
            np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-5)


@each_variant
def test_save_and_load_keep_every_weight_and_name(config: DecoderConfig, tmp_path: Path) -> None:
    decoder = lively(config)
    save_decoder(decoder, tmp_path / "a" / "model")
    again = load_decoder(tmp_path / "a" / "model")
    assert again.config == config
    assert set(again.state_dict()) == set(decoder.state_dict())
    for name, weight in decoder.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert sorted(path.name for path in (tmp_path / "a" / "model").iterdir()) == ["config.json", "model.safetensors"]

    stored = load_file(tmp_path / "a" / "model" / "model.safetensors")
    assert ("lm_head.weight" in stored) is not config.tie_word_embeddings
    assert ("model.layers.1.self_attn.q_norm.weight" in stored) is (config.model_type == "qwen3")
    assert ("model.layers.1.self_attn.k_proj.bias" in stored) is (config.model_type == "qwen2" or config.attention_bias)
    assert ("model.layers.1.self_attn.o_proj.bias" in stored) is config.attention_bias


def test_folders_in_other_forms(tmp_path: Path) -> None:
    """Shards, half precision, a redundant head, the newer rotary fields; and what must be refused."""
    decoder = lively(VARIANTS[0])
    save_decoder(decoder, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file({"lm_head.weight": tensors["lm_head.weight"]}, tmp_path / "three.safetensors")
    index = {name: file for file, held in shards.items() for name in held} | {"lm_head.weight": "three.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    halved = load_decoder(tmp_path)
    assert halved.config == decoder.config
    for name, weight in decoder.state_dict().items():
        assert torch.equal(halved.state_dict()[name], weight.bfloat16().float()), name

    def refused(reason: str, **changes: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ConfigError, match=reason):
            load_decoder(tmp_path)

    refused("is not a weight of a llama model", model_type="llama")
    refused("model_type 'gpt2'", model_type="gpt2")
    refused("the config needs", vocab_size=62)
    refused("'vocab_size'|cannot be used", vocab_size=None)
    refused("not a multiple", num_attention_heads=5)
    refused("sliding-window", use_sliding_window=True)
    refused("hidden_act", hidden_act="gelu")
    refused("rotary scaling 'yarn'", rope_parameters={"rope_type": "yarn", "factor": 4.0})
    refused("quantised", quantization_config={"bits": 4})
    del index["lm_head.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    refused("lacks weights: lm_head.weight", tie_word_embeddings=False)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ConfigError, match="cannot read"):
        load_decoder(tmp_path)


def test_a_save_replaces_the_file_as_a_whole(tmp_path: Path) -> None:
    """Whoever has the old file still reads the old weights."""
    first, second = lively(VARIANTS[0]), lively(VARIANTS[0], seed=9)
    save_decoder(first, tmp_path / "model")
    (tmp_path / "old.safetensors").hardlink_to(tmp_path / "model" / "model.safetensors")
    save_decoder(second, tmp_path / "model")
    assert torch.equal(load_decoder(tmp_path / "model").head, second.head)
    assert torch.equal(load_file(tmp_path / "old.safetensors")["model.embed_tokens.weight"], first.head)


def test_a_failed_save_leaves_the_old_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = lively(VARIANTS[0])
    save_decoder(decoder, tmp_path)

    def full(file: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("towline.common.files.os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        save_decoder(lively(VARIANTS[0], seed=9), tmp_path)
    assert torch.equal(load_decoder(tmp_path).head, decoder.head)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_tied_weights_learn_as_one_and_seeds_decide() -> None:
    tied, untied = (
        create_decoder(VARIANTS[0], 5),
        create_decoder(dataclasses.replace(VARIANTS[0], tie_word_embeddings=False), 5),
    )
    ids = torch.tensor([[1, 2, 3]])
    for decoder in (tied, untied):
        decoder(ids)[0, :, 40].sum().backward()
        assert all(weight.grad is not None for weight in decoder.parameters())
    # Id 40 is only an output: its row of a tied embedding learns through the head, of an untied one it does not.
    assert tied.model.embed_tokens.weight.grad[40].abs().sum() > 0
    assert untied.model.embed_tokens.weight.grad[40].abs().sum() == 0
    assert torch.equal(create_decoder(VARIANTS[0], 5).head, tied.head)
    assert not torch.equal(create_decoder(VARIANTS[0], 6).head, tied.head)
    before = torch.random.get_rng_state()
    create_decoder(VARIANTS[0], 7)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_small_decoder_learns() -> None:
    decoder = create_decoder(VARIANTS[0], 0)
    optimiser = torch.optim.Adam(decoder.parameters(), lr=1e-2)
    rows = torch.randint(0, 61, (4, 12), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(decoder(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > 3.5
    assert losses[-1] < 0.5
