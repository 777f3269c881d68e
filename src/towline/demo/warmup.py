"""The format warm-up: supervised steps that teach the form of calls and answers, but not which are right.

The conversations are registry conversations with the ids that the gateway would serve. The assistant in them repeats one of
the mentioned words at random: a tool (from the tools or the question), an item (likewise), a value (from the question or
the result). A model warmed up this way nearly always keeps the format and is right about as often as `registry.CHANCE`; the
rest is left to reinforcement learning.

Since the candidates of each random choice are known, the loss targets their whole distribution instead of the one draw: the
same objective as with more conversations, without the noise. So the text of a conversation need not be its target: some
calls name items that are not shown and return unknown, some questions get an answer without a call. These serve only as
context, so that the model returns to the format after making such a mistake itself.

With `thinking` every reply begins with a line of reasoning that makes the choice, and the rest of the reply repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from towline.conversation import Message, Tool, ToolCall
from towline.demo import registry
from towline.errors import ConfigError
from towline.tokens.codec import ModelCodec, RenderContext

if TYPE_CHECKING:
    from torch import Tensor

    from towline.engines.embedded import Decoder

ROWS = 8
"""One-question conversations per step; fewer if they are longer."""
QUESTIONS = (1, 1, 2, 4)
RATE = 3e-3
RATE_WARMUP_STEPS = 10
"""Steps of linear learning-rate warm-up, before a cosine decay to a twentieth."""
STRAY_SHARE, BARE_SHARE = 0.1, 0.05
"""Share of questions whose call names an arbitrary tool and item, and share answered without a call."""
_NO_IDS = np.empty(0, np.int32)


@dataclass(slots=True)
class WarmupRow:
    """The ids of one conversation, with the candidates of each id that a model would sample."""

    ids: list[int] = field(default_factory=list)
    targets: list[tuple[int, list[int]]] = field(default_factory=list)
    """Position and its candidate ids; an id that is listed twice is twice as likely."""

    def add_reply(self, ids: Sequence[int], *choices: Sequence[int]) -> None:
        """Append a reply. Each of `choices` holds the drawn id first, then its candidates."""
        drawn = {choice[0]: list(choice[1:]) for choice in choices}
        self.targets += [(len(self.ids) + offset, drawn.get(id, [id])) for offset, id in enumerate(ids)]
        self.ids += ids


def frame_of(instance: registry.RegistryInstance) -> RenderContext:
    """The tools of an instance as an agent declares them."""
    functions = [registry.tool_declaration(name)["function"] for name in instance.tools]
    return RenderContext(tuple(Tool(function["name"], "", function["parameters"]) for function in functions))


def conversation(codec: ModelCodec, random: Random, questions: int, *, thinking: bool = False) -> WarmupRow:
    """A conversation about a random instance."""
    instance = registry.draw_instance(random, questions=questions)
    frame = frame_of(instance)
    messages = [Message("system", instance.system)]
    row, last = WarmupRow(), None
    for number, question in enumerate(instance.questions):
        asked = Message("user", question.text)
        row.ids += _ids_between(codec, messages, last, asked, frame)
        messages.append(asked)
        tools = [*instance.tools, question.attribute]
        items = [*instance.records, question.item]
        draw = random.random()
        if draw < BARE_SHARE:
            answer = random.choice(question.choices)
            thought = answer if thinking else None
            last = codec.write(answer, thought, [], frame)
            row.ids += last
            messages.append(Message("assistant", answer, thought))
            continue
        stray = draw < BARE_SHARE + STRAY_SHARE
        item = random.choice(registry.ITEMS if stray else items)
        call = ToolCall(f"call{number}", random.choice(list(registry.VALUES) if stray else tools), {"item": item})
        thought = f"{call.name} of {item}" if thinking else None
        reply = codec.write("", thought, [call], frame)
        _add_reply(row, codec, reply, thought, _ids(codec, call.name, *tools), _ids(codec, item, *items))
        messages.append(Message("assistant", "", thought, (call,)))
        result = Message("tool", instance.lookup(call.name, item), tool_call_id=call.id, name=call.name)
        row.ids += _ids_between(codec, messages, reply, result, frame)
        messages.append(result)
        values = [*question.choices, *([result.text] if result.text != registry.UNKNOWN else [])]
        answer = random.choice(values)
        thought = answer if thinking else None
        last = codec.write(answer, thought, [], frame)
        _add_reply(row, codec, last, thought, _ids(codec, answer, *values))
        messages.append(Message("assistant", answer, thought))
    return row


def _add_reply(row: WarmupRow, codec: ModelCodec, reply: list[int], thought: str | None, *choices: list[int]) -> None:
    """Append a reply. With reasoning the choice is made there, and the rest of the reply follows from it."""
    decided = 0 if thought is None else reply.index(_ids(codec, "</think>")[0])
    row.add_reply(reply[:decided], *choices)
    row.add_reply(reply[decided:], *(choices if thought is None else ()))


def _ids_between(
    codec: ModelCodec, messages: list[Message], last: list[int] | None, new: Message, frame: RenderContext
) -> list[int]:
    """The ids between the last reply and the next one."""
    if last is None:
        return codec.prompt([*messages, new], frame).ids
    return codec.extend(messages[:-1], messages[-1], _NO_IDS, np.asarray(last, np.int32), [new], frame).ids


def _ids(codec: ModelCodec, *symbols: str) -> list[int]:
    """The one id of each symbol."""
    ids = [codec.tokenizer.id_of(symbol) for symbol in symbols]
    if None in ids:
        raise ConfigError(f"{symbols[ids.index(None)]!r} is not a single token of this tokenizer")
    return [id for id in ids if id is not None]


def warm_up(
    decoder: Decoder,
    codec: ModelCodec,
    *,
    seed: int,
    steps: int,
    thinking: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Train the decoder in place. The same seed gives the same weights on the same machine."""
    import torch

    random = Random(f"warm-up {seed}")
    optimiser = torch.optim.AdamW(decoder.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(steps):
        questions = random.choice(QUESTIONS)
        count = max(1, round(ROWS / questions**0.7))
        for group in optimiser.param_groups:
            group["lr"] = (
                RATE
                * min(1.0, (step + 1) / RATE_WARMUP_STEPS)
                * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
            )
        loss = _loss(decoder, [conversation(codec, random, questions, thinking=thinking) for _ in range(count)])
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimiser.step()
        if progress is not None:
            progress(step + 1, steps, f"loss {loss.item():.2f}")


def _loss(decoder: Decoder, rows: Sequence[WarmupRow]) -> Tensor:
    """Cross entropy of the sampled positions against their candidates; each position has a total weight of 1."""
    import torch
    from torch.nn import functional

    ids = torch.zeros(len(rows), max(len(row.ids) for row in rows), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
    targets = [(number, position - 1, options) for number, row in enumerate(rows) for position, options in row.targets]
    hidden = decoder.hidden(ids)[[number for number, _, _ in targets], [position for _, position, _ in targets]]
    logprobs = functional.log_softmax(functional.linear(hidden, decoder.head), -1)
    entries = [(at, id, 1 / len(options)) for at, (_, _, options) in enumerate(targets) for id in options]
    positions, candidates, weights = zip(*entries, strict=True)
    return -(logprobs[positions, candidates] * torch.tensor(weights)).sum() / len(targets)
