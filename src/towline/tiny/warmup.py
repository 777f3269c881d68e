"""The format warm-up: supervised steps that teach how a call and an answer look, and nothing about which is right.

The conversations are the registry's, with the very ids that the gateway would serve. Whoever speaks in them repeats one
of the mentions at random: of a tool (among the tools, or in the question), of an item likewise, of a value (in the
question, or in the result). A model warmed up so speaks the format nearly always and is right about as often as
`registry.CHANCE`; being right is what reinforcement learning is for.

Since it is known what each random choice was drawn from, the steps learn that whole distribution rather than the one
draw: the same aim as with more conversations, without their noise. So what stands in a conversation need not be what is
learned there: some calls name what is not shown and come back as unknown, some questions get an answer without a call.
They are only context, for the model to find its way back to the format after it has said such a thing itself.

With `thinking` every reply begins with a line of reasoning that makes the choice; what follows repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from towline.conversation import Message, Tool, ToolCall
from towline.errors import ConfigError
from towline.tiny import registry
from towline.tokens.codec import Codec, Frame

if TYPE_CHECKING:
    from torch import Tensor

    from towline.engines.embedded import Decoder

ROWS = 8
"""Conversations a step, of one question each; fewer if they are longer."""
QUESTIONS = (1, 1, 2, 4)
RATE = 3e-3
RISE = 10
"""Steps until the learning rate is reached; then it falls along a cosine to a twentieth."""
STRAY, BARE = 0.1, 0.05
"""Shares of questions whose call names anything at all, and of those answered without a call."""
_NO_IDS = np.empty(0, np.int32)


@dataclass(slots=True)
class Row:
    """The ids of one conversation, and for each id that a model would have sampled what it was drawn from."""

    ids: list[int] = field(default_factory=list)
    targets: list[tuple[int, list[int]]] = field(default_factory=list)
    """Place, and the ids that were possible there; one that is listed twice is twice as likely."""

    def say(self, ids: Sequence[int], *choices: Sequence[int]) -> None:
        """Add what is said. Each of `choices` has first the id that stands there, then those that were possible."""
        drawn = {choice[0]: list(choice[1:]) for choice in choices}
        self.targets += [(len(self.ids) + place, drawn.get(id, [id])) for place, id in enumerate(ids)]
        self.ids += ids


def frame_of(instance: registry.Instance) -> Frame:
    """The tools of an instance, as an agent declares them."""
    functions = [registry.declaration(name)["function"] for name in instance.tools]
    return Frame(tuple(Tool(function["name"], "", function["parameters"]) for function in functions))


def conversation(codec: Codec, random: Random, questions: int, *, thinking: bool = False) -> Row:
    """A conversation about a random instance."""
    instance = registry.draw(random, questions=questions)
    frame = frame_of(instance)
    messages = [Message("system", instance.system)]
    row, last = Row(), None
    for place, question in enumerate(instance.questions):
        asked = Message("user", question.text)
        row.ids += _between(codec, messages, last, asked, frame)
        messages.append(asked)
        tools = [*instance.tools, question.attribute]
        items = [*instance.records, question.item]
        chance = random.random()
        if chance < BARE:
            answer = random.choice(question.choices)
            thought = answer if thinking else None
            last = codec.write(answer, thought, [], frame)
            row.ids += last
            messages.append(Message("assistant", answer, thought))
            continue
        stray = chance < BARE + STRAY
        item = random.choice(registry.ITEMS if stray else items)
        call = ToolCall(f"call{place}", random.choice(list(registry.VALUES) if stray else tools), {"item": item})
        thought = f"{call.name} of {item}" if thinking else None
        said = codec.write("", thought, [call], frame)
        _say(row, codec, said, thought, _ids(codec, call.name, *tools), _ids(codec, item, *items))
        messages.append(Message("assistant", "", thought, (call,)))
        result = Message("tool", instance.lookup(call.name, item), tool_call_id=call.id, name=call.name)
        row.ids += _between(codec, messages, said, result, frame)
        messages.append(result)
        values = [*question.choices, *([result.text] if result.text != registry.UNKNOWN else [])]
        answer = random.choice(values)
        thought = answer if thinking else None
        last = codec.write(answer, thought, [], frame)
        _say(row, codec, last, thought, _ids(codec, answer, *values))
        messages.append(Message("assistant", answer, thought))
    return row


def _say(row: Row, codec: Codec, said: list[int], thought: str | None, *choices: list[int]) -> None:
    """Add a reply. Where there is a thought the choice is made in it, and the rest of the reply follows from that."""
    made = 0 if thought is None else said.index(_ids(codec, "</think>")[0])
    row.say(said[:made], *choices)
    row.say(said[made:], *(choices if thought is None else ()))


def _between(codec: Codec, messages: list[Message], last: list[int] | None, new: Message, frame: Frame) -> list[int]:
    """The ids between the last reply and the next."""
    if last is None:
        return codec.prompt([*messages, new], frame).ids
    return codec.extend(messages[:-1], messages[-1], _NO_IDS, np.asarray(last, np.int32), [new], frame).ids


def _ids(codec: Codec, *symbols: str) -> list[int]:
    """The one id of each symbol."""
    found = [codec.tokenizer.id_of(symbol) for symbol in symbols]
    if None in found:
        raise ConfigError(f"{symbols[found.index(None)]!r} is not one token of this tokenizer")
    return [id for id in found if id is not None]


def warm_up(
    decoder: Decoder,
    codec: Codec,
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
            group["lr"] = RATE * min(1.0, (step + 1) / RISE) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
        loss = _loss(decoder, [conversation(codec, random, questions, thinking=thinking) for _ in range(count)])
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimiser.step()
        if progress is not None:
            progress(step + 1, steps, f"loss {loss.item():.2f}")


def _loss(decoder: Decoder, rows: Sequence[Row]) -> Tensor:
    """Cross entropy of the sampled places against what was possible at each, a place's options weighing 1 together."""
    import torch
    from torch.nn import functional

    ids = torch.zeros(len(rows), max(len(row.ids) for row in rows), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
    targets = [(number, place - 1, options) for number, row in enumerate(rows) for place, options in row.targets]
    hidden = decoder.hidden(ids)[[number for number, _, _ in targets], [place for _, place, _ in targets]]
    logprobs = functional.log_softmax(functional.linear(hidden, decoder.head), -1)
    entries = [(at, id, 1 / len(options)) for at, (_, _, options) in enumerate(targets) for id in options]
    places, wanted, weights = zip(*entries, strict=True)
    return -(logprobs[places, wanted] * torch.tensor(weights)).sum() / len(targets)
