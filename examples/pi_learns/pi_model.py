"""A tiny model for Pi's prompt: a tokenizer of Pi's own words, and a *format warm-up* in Pi's own context.

After the warm-up the model knows the form of calls of Pi's four tools and of answers, but not which of them are right: the
assistant in the warm-up picks any tool, any mentioned note and any mentioned word. The note in the question has a larger
weight than the others. Getting answers right is left to reinforcement learning; `CHANCE` is the success rate before it.

All conversations begin with the same 900 tokens of Pi's prompt. A warm-up step computes them once for all of its rows, and
most steps leave them out: the model learns to repeat a word many times faster from short rows.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import tokenizers
import torch
from notes import NAMES, SHOWN, WORDS, Instance, draw, path
from pi_prompt import TOUCHED, Prompt
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional

from towline.conversation import Message, ToolCall
from towline.demo.tokenizer import MARKUP, SPECIAL, template
from towline.demo.warmup import WarmupRow
from towline.engines.embedded import Decoder, DecoderConfig, create_decoder, save_decoder
from towline.engines.embedded.model import rope_angles, rotate
from towline.errors import ConfigError
from towline.tokens.codec import ModelCodec
from towline.tokens.loading import load_codec

VOCABULARY = 1280
STEPS = 500
WHOLE = 4
"""One step in this many uses whole rows, and so do all of the last tenth; the others leave out Pi's prompt."""
KEPT = 8
"""Tokens of the common prefix that are then kept."""
ROWS = 16
RATE = 3e-3
RISE = 10
"""Steps of linear learning-rate warm-up, before a cosine decay to a twentieth."""
EMPHASIS = 2
"""Weight of the question's own note, in mentions."""
TOOLS = ("read", "bash", "edit", "write")
CHANCE = 2 / len(TOOLS) * (1 + EMPHASIS) / (SHOWN + EMPHASIS) * 2 / 3
"""Two tools of four show a note; the right note is mentioned thrice among five; the right word twice among three."""
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
"""A word with the space before it, a digit, a run of signs, or white space.

The words of the task stand after a quote or a slash wherever they are, in the question, in a call and alone: each is one id,
and copying it is no more than repeating an id."""

Progress = Callable[[int, int, str], None]
"""Called with steps done, total steps, and a status text."""


def create(
    folder: Path, prompt: Prompt, *, seed: int = 0, steps: int = STEPS, progress: Progress | None = None
) -> Path:
    """Create the model folder; a folder made by the same recipe for the same prompt is left as it is."""
    recipe, stamp = _recipe(prompt, seed, steps), folder / "pi-learns.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == recipe:
        return folder
    if folder.exists() and not stamp.is_file():
        raise ConfigError(f"{folder} exists and holds something else: choose another folder")
    # Created beside it and renamed, so that the folder is always complete.
    made = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    _make(made, prompt, seed, steps, progress)
    (made / stamp.name).write_text(json.dumps(recipe) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)
    return folder


def _make(folder: Path, prompt: Prompt, seed: int, steps: int, progress: Progress | None) -> None:
    _write_tokenizer(folder, prompt)
    codec = load_codec(folder, renderer="sentinel")
    config = DecoderConfig(
        model_type="qwen3",
        vocab_size=codec.tokenizer.size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        # Far more than a session needs: Pi compacts conversations that come near the model's context limit.
        max_position_embeddings=32768,
        rope_theta=1000.0,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )
    decoder = create_decoder(config, seed)
    warm_up(decoder, codec, prompt, seed=seed, steps=steps, progress=progress)
    save_decoder(decoder, folder)
    generation = {"eos_token_id": sorted(codec.stop_ids), "do_sample": True, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _recipe(prompt: Prompt, seed: int, steps: int) -> dict[str, object]:
    """Identifies the model: these files, Pi's prompt, and the arguments."""
    here = Path(__file__).parent
    sources = "".join((here / name).read_text() for name in ("pi_model.py", "notes.py", "pi_prompt.py"))
    made_from = (
        f"{sources}{prompt.system.text}{prompt.frame.functions}{prompt.edited}{prompt.not_edited}{prompt.written}"
    )
    return {"recipe": hashlib.sha256(made_from.encode()).hexdigest(), "seed": seed, "steps": steps}


# The tokenizer


def _write_tokenizer(folder: Path, prompt: Prompt) -> None:
    """Byte-level BPE, so that any text can be encoded, with the words of Pi's prompt and of the task as single ids."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_corpus(prompt), trainer)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    made.save(str(folder / "tokenizer.json"))
    added = made.get_added_tokens_decoder()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(id): {"content": token.content, "special": token.special} for id, token in sorted(added.items())
        },
        "chat_template": template(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _corpus(prompt: Prompt) -> Iterator[str]:
    random = Random("corpus")
    for _ in range(200):
        instance = draw(random)
        calls = [_call(tool, random.choice(list(instance.notes)), instance.offered) for tool in TOOLS]
        yield "\n".join([instance.text, *(json.dumps({"name": c.name, "arguments": c.arguments}) for c in calls)])
    # Each alone, so that a word is one id wherever it stands.
    yield from ("/".join((*NAMES, *WORDS, *TOOLS)) for _ in range(50))
    for _ in range(4):
        yield "\n".join((prompt.system.text, prompt.edited, prompt.not_edited, prompt.written))
        yield from (
            f"\n{tool.name}({', '.join(tool.parameters['properties'])}): {tool.description}"
            for tool in prompt.frame.tools
        )
        yield "system\nuser\nassistant\ntool\n"


# The warm-up


def conversation(codec: ModelCodec, prompt: Prompt, random: Random) -> WarmupRow:
    """A question, any call, what Pi would return, and any answer."""
    instance = draw(random)
    asked = [prompt.system, Message("user", instance.text)]
    names = [*instance.notes, *[instance.asked] * EMPHASIS]
    call = _call(
        random.choice(TOOLS), random.choice(names), (random.choice(instance.offered), random.choice(instance.offered))
    )
    row = WarmupRow(codec.prompt(asked, prompt.frame).ids)
    said = codec.write("", None, [call], prompt.frame)
    name = call.arguments.get("path", call.arguments.get("command", "")).rpartition("/")[2]
    row.add_reply(
        said,
        _ids(codec, call.name, *TOOLS),
        _ids(codec, name, *names),
        *(_ids(codec, word, *instance.offered) for word in instance.offered),
    )
    seen = returned(prompt, instance, call, name)
    result = Message("tool", seen, tool_call_id=call.id, name=call.name)
    reply = Message("assistant", "", None, (call,))
    row.ids += codec.extend(asked, reply, np.empty(0, np.int32), np.asarray(said, np.int32), [result], prompt.frame).ids
    words = [*instance.offered, *([seen] if seen in WORDS else [])]
    answer = random.choice(words)
    row.add_reply(codec.write(answer, None, [], prompt.frame), _ids(codec, answer, *words))
    return row


def _call(tool: str, name: str, words: tuple[str, str]) -> ToolCall:
    """How a call of each of Pi's tools looks here."""
    arguments: dict[str, object] = {"path": path(name)}
    if tool == "bash":
        arguments = {"command": f"cat {path(name)}"}
    elif tool == "edit":
        arguments["edits"] = [{"oldText": words[0], "newText": words[1]}]
    elif tool == "write":
        arguments["content"] = words[0]
    return ToolCall("call0", tool, arguments)


def returned(prompt: Prompt, instance: Instance, call: ToolCall, name: str) -> str:
    """What Pi's tool would return."""
    if call.name in ("read", "bash"):
        return instance.notes[name]
    heard = prompt.written
    if call.name == "edit":
        heard = prompt.edited if call.arguments["edits"][0]["oldText"] == instance.notes[name] else prompt.not_edited
    return heard.replace(TOUCHED, path(name))


def _ids(codec: ModelCodec, *symbols: str) -> list[int]:
    """The one id of each symbol."""
    found = [codec.tokenizer.id_of(symbol) for symbol in symbols]
    if None in found:
        raise ConfigError(f"{symbols[found.index(None)]!r} is not one token of this tokenizer")
    return [id for id in found if id is not None]


def warm_up(
    decoder: Decoder, codec: ModelCodec, prompt: Prompt, *, seed: int, steps: int, progress: Progress | None = None
) -> None:
    """Train the decoder in place."""
    random = Random(f"warm-up {seed}")
    optimiser = torch.optim.AdamW(decoder.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / RISE) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
        kept = None if step % WHOLE == 0 or step >= 0.9 * steps else KEPT
        loss = _loss(decoder, [conversation(codec, prompt, random) for _ in range(ROWS)], kept)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimiser.step()
        if progress is not None:
            progress(step + 1, steps, f"loss {loss.item():.2f}")


def _loss(decoder: Decoder, rows: Sequence[WarmupRow], kept: int | None = None) -> Tensor:
    """Cross entropy of the sampled places against what was possible at each, a place's options weighing 1 together.

    `kept`: how many tokens to keep of those that all rows begin with, if not all.
    """
    shared = _shared([row.ids for row in rows])
    cut = 0 if kept is None else max(0, shared - kept)
    ids = torch.zeros(len(rows), max(len(row.ids) for row in rows), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
    targets = [
        (number, place - 1 - shared, options) for number, row in enumerate(rows) for place, options in row.targets
    ]
    hidden = hidden_after(decoder, ids[0, cut:shared], ids[:, shared:])
    hidden = hidden[[number for number, _, _ in targets], [place for _, place, _ in targets]]
    logprobs = functional.log_softmax(functional.linear(hidden, decoder.head), -1)
    entries = [(at, id, 1 / len(options)) for at, (_, _, options) in enumerate(targets) for id in options]
    places, wanted, weights = zip(*entries, strict=True)
    return -(logprobs[places, wanted] * torch.tensor(weights)).sum() / len(targets)


def _shared(rows: Sequence[Sequence[int]]) -> int:
    """How many ids all rows begin with."""
    columns = zip(*rows, strict=False)
    return next((place for place, column in enumerate(columns) if len(set(column)) > 1), 0)


def hidden_after(decoder: Decoder, prefix: Tensor, rows: Tensor) -> Tensor:
    """What `decoder.hidden` gives for the rows after a prefix that all of them have, which is computed once."""
    count, length = rows.shape
    positions = torch.arange(len(prefix) + length)
    cosines, sines = rope_angles(decoder.get_buffer("frequencies"), positions)
    before, values = decoder.model.embed_tokens(prefix[None]), decoder.model.embed_tokens(rows)
    after = torch.ones(length, len(prefix) + length, dtype=torch.bool).tril(len(prefix))

    for layer in decoder.model.layers:
        attention = layer.self_attn

        def heads(states: Tensor, at: slice, layer=layer, attention=attention) -> list[Tensor]:
            states = layer.input_layernorm(states)
            shape = (*states.shape[:2], -1, decoder.config.head_dim)
            queries, keys, found = (
                project(states).view(shape) for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
            turned = [rotate(one.transpose(1, 2), cosines[at], sines[at]) for one in (queries, keys)]
            return [*turned, found.transpose(1, 2)]

        def onwards(states: Tensor, seen: Tensor, layer=layer, attention=attention) -> Tensor:
            states = states + attention.o_proj(seen.transpose(1, 2).reshape(*states.shape[:2], -1))
            return states + layer.mlp(layer.post_attention_layernorm(states))

        first = heads(before, slice(0, len(prefix)))
        own = heads(values, slice(len(prefix), None))
        keys, found = (
            torch.cat((one.expand(count, -1, -1, -1), other), 2) for one, other in zip(first[1:], own[1:], strict=True)
        )
        seen = functional.scaled_dot_product_attention(own[0], keys, found, attn_mask=after)
        before = onwards(before, functional.scaled_dot_product_attention(*first, is_causal=True))
        values = onwards(values, seen)
    return decoder.model.norm(values)
