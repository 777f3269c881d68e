"""The format warm-up: supervised steps that teach how a call and an answer look, and nothing about which is right.

The conversations are the registry's, with tools, items and answers drawn at random among those shown. A model warmed up so
speaks the format nearly always and is right about as often as chance; being right is what reinforcement learning is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from towline.conversation import Message, Tool, ToolCall
from towline.tiny import registry
from towline.tokens.codec import Codec, Frame

if TYPE_CHECKING:
    from towline.engines.embedded import Decoder

ROWS = 8
QUESTIONS = (1, 2, 4)
RATE = 2e-3
_NO_IDS = np.empty(0, np.int32)


def frame_of(instance: registry.Instance) -> Frame:
    """The tools of an instance, as a harness declares them."""
    declared = (registry.tool(name)["function"] for name in instance.tools)
    return Frame(tuple(Tool(tool["name"], "", tool["parameters"]) for tool in declared))


def conversation(codec: Codec, random: Random, questions: int) -> tuple[list[int], list[bool]]:
    """The ids of one conversation, and which of them a model would have sampled."""
    instance = registry.draw(random, questions=questions)
    frame = frame_of(instance)
    messages = [Message("system", instance.system)]
    ids: list[int] = []
    sampled: list[bool] = []

    def add(new: list[int], said: bool) -> None:
        ids.extend(new)
        sampled.extend([said] * len(new))

    last: list[int] | None = None
    for place, question in enumerate(instance.questions):
        asked = Message("user", question.text)
        add(_next(codec, messages, last, asked, frame), False)
        messages.append(asked)
        name = random.choice([*instance.tools, question.attribute])
        item = random.choice([*instance.records, question.item])
        call = ToolCall(f"call{place:05d}000", name, {"item": item})
        said = codec.write("", None, [call], frame)
        add(said, True)
        messages.append(Message("assistant", "", None, (call,)))
        result = Message("tool", instance.lookup(name, item), tool_call_id=call.id, name=name)
        add(_next(codec, messages, said, result, frame), False)
        messages.append(result)
        answer = random.choice([*question.choices, result.text])
        last = codec.write(answer, None, [], frame)
        add(last, True)
        messages.append(Message("assistant", answer))
    return ids, sampled


def _next(codec: Codec, messages: list[Message], last: list[int] | None, new: Message, frame: Frame) -> list[int]:
    """The ids between the last reply and the next."""
    if last is None:
        return codec.prompt([*messages, new], frame).ids
    return codec.extend(messages[:-1], messages[-1], _NO_IDS, np.asarray(last, np.int32), [new], frame).ids


def warm_up(
    decoder: Decoder, codec: Codec, *, seed: int, steps: int, progress: Callable[[int, int, str], None] | None = None
) -> None:
    """Train the decoder in place. The same seed gives the same weights on the same machine."""
    import torch
    from torch.nn import functional

    random = Random(f"warm-up {seed}")
    optimiser = torch.optim.AdamW(decoder.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        questions = random.choice(QUESTIONS)
        count = max(1, round(ROWS / questions**0.7))
        rows = [conversation(codec, random, questions) for _ in range(count)]
        length = max(len(ids) for ids, _ in rows)
        ids = torch.zeros(count, length, dtype=torch.long)
        said = torch.zeros(count, length, dtype=torch.bool)
        for place, (row, sampled) in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
            said[place, : len(row)] = torch.tensor(sampled)
        rate = RATE * min(1.0, (step + 1) / 10) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
        for group in optimiser.param_groups:
            group["lr"] = rate
        hidden = decoder.hidden(ids[:, :-1])[said[:, 1:]]
        loss = functional.cross_entropy(functional.linear(hidden, decoder.head), ids[:, 1:][said[:, 1:]])
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimiser.step()
        if progress is not None:
            progress(step + 1, steps, f"loss {loss.item():.2f}")
