"""The tiny model's tokenizer: byte-level BPE of about 512 ids, trained on registry text and a little plain English.

Any text can be encoded, since every byte has an id. The words of the task are single ids, digits are never merged, and the
markup of calls, results and reasoning has ids of its own, as in the models with this format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from random import Random

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from towline.demo import registry

VOCABULARY = 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_PIECES = r"\p{L}+|\p{N}|[^\p{L}\p{N}\n]+|\n+"
"""A word, a digit, a run of punctuation and spaces, or line breaks.

Spaces belong to punctuation, not to words, so that a word has the same id in prose, in quotes and in a call: copying it
means repeating an id, and the punctuation of a call is one id between two words.
"""
_ENGLISH = """
a about after all an and any are as ask at back be because been before but by call can come could day do done each end
error even every false file find first for from get give go good had has have he her here him his how if in into is it
its item just know last like list long look make many me more most my name new next no none not now null number of old
on one only open or other our out over own part people place query read result return right run said same say see set
she should show so some start string such take task than that the their them then there these they thing think this
time to tool true two type up us use user value very was way we well were what when where which who will with word work
would write wrong year you your
"""


def train() -> tokenizers.Tokenizer:
    """Train the tokenizer; the result is deterministic."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return tokenizer


def write(folder: Path) -> None:
    """Write `tokenizer.json`, and `tokenizer_config.json` with the chat template."""
    tokenizer = train()
    tokenizer.save(str(folder / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(id): {"content": token.content, "special": token.special} for id, token in sorted(added.items())
        },
        "chat_template": template(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def template() -> str:
    """The source of the chat template."""
    return resources.files("towline.demo").joinpath("chat_template.jinja").read_text(encoding="utf-8").strip()


def _corpus() -> Iterator[str]:
    """Task text in the proportions of a session, then English words, which get the remaining merges."""
    random = Random("corpus")
    for _ in range(400):
        instance = registry.draw_instance(random)
        (question,) = instance.questions
        call = {"name": question.attribute, "arguments": {"item": question.item}}
        yield "\n".join(
            (
                "system",
                instance.system,
                *(f"{tool}(item)" for tool in instance.tools),
                "user",
                question.text,
                "assistant",
                json.dumps(call),
                "tool",
                *question.choices,
                registry.UNKNOWN,
            )
        )
    for _ in range(4):
        yield _ENGLISH
