"""A harness and a model without HTTP: requests go to the planner, replies are scripted, everything between is real.

`Talk` is one session. `ask` plans a request against the session's graph, lets the scripted model say something, and
records the turn as the gateway does. What the model says is sampled in a spelling of its own: tokens are split where an
encoder would not split them, so that a reply that was encoded again anywhere is seen at once. After every turn the
invariant of `exact` is checked against what was really sent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from typing import Any

import numpy as np
import tokenizers

from towline import assets
from towline.common.arrays import Ids
from towline.conversation import Finish, Hints, Message, Request, Tool, ToolCall
from towline.engines.base import Sample
from towline.gateway.sampling import read_reply
from towline.schema import BuilderName, ContextPolicy, EndReason, ForkReason, Trajectory, TurnRole
from towline.tokens.codec import RenderContext, SpecialText
from towline.tokens.continuation.plan import PromptMode, VanishingPolicy
from towline.tokens.continuation.planner import Planner
from towline.tokens.graph import fingerprint
from towline.tokens.graph.graph import Graph, GraphNode
from towline.tokens.graph.tool_results import bare_id, order_tool_results
from towline.tokens.loading import load_codec, make_codec
from towline.tokens.templates.chat_template import ChatTemplate
from towline.tokens.templates.sentinel import SentinelCodec
from towline.tokens.tokenizer import Tokenizer
from towline.tokens.traces.trajectory import assemble_trajectory

BASH = Tool("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
READ = Tool("read", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}})
TOOLS = (BASH, READ)
DAY = datetime(2026, 11, 15, 12)

_MARKUP = re.compile(
    r"<\|[^|<>\s']+\|>|<\uff5c[^\uff5c<>']+\uff5c>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_[a-z]+>|\[/?[A-Z_]{3,}\]"
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value|s)>|\[gMASK\]|<sop>|<bos>|<SPECIAL_\d+>|</?seed:[a-z_:]+>"
    r"|\]~!?b?\[?\]?|\[e~\["
)


# Codecs


@cache
def real(name: str, *, renderer: str = "auto", special_text: SpecialText = SpecialText.ENGINE) -> SentinelCodec:
    """The codec of a real tokenizer with its own template."""
    return load_codec(assets.folder() / "tokenizers" / name, renderer=renderer, special_text=special_text)


def template_names() -> list[str]:
    return sorted(path.stem for path in (assets.folder() / "templates").glob("*.jinja"))


def template_source(name: str) -> str:
    return (assets.folder() / "templates" / f"{name}.jinja").read_text("utf-8")


@cache
def _tokenizer(more: frozenset[str] = frozenset()) -> tokenizers.Tokenizer:
    """Qwen3's tokenizer with the special tokens of all templates and `more`, each a token of its own."""
    backend = tokenizers.Tokenizer.from_file(str(assets.folder() / "tokenizers" / "qwen3" / "tokenizer.json"))
    names = {name for template in template_names() for name in _MARKUP.findall(template_source(template))} | more
    names |= {"<|begin_of_text|>", "<bos>", "<eos>", "<pad>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>"}
    missing = sorted(names - {token.content for token in backend.get_added_tokens_decoder().values()})
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in missing])
    return backend


def codec_for(source: str, *, bos: str = "", eos: str = "<|im_end|>", **options: Any) -> SentinelCodec:
    """A codec for any template source; what it writes as markup is a token."""
    known = {token.content for token in _tokenizer().get_added_tokens_decoder().values()}
    more = frozenset((*_MARKUP.findall(source), eos)) - known
    tokenizer = Tokenizer(_tokenizer(more), {"eos_token": eos, "bos_token": bos}, "everything")
    return make_codec(tokenizer, ChatTemplate(source, tokens={"bos_token": bos, "eos_token": eos}), **options)


@cache
def templated(name: str, *, renderer: str = "auto", special_text: SpecialText = SpecialText.ENGINE) -> SentinelCodec:
    """The codec of a public template."""
    source = template_source(name)
    begins = ("<|begin_of_text|>" if name.startswith("llama3") else "") or ("<bos>" if name.startswith("gemma") else "")
    if name.startswith("deepseek"):
        begins = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    ends = "<\uff5cend\u2581of\u2581sentence\uff5c>" if name.startswith("deepseek") else "<|im_end|>"
    return codec_for(source, bos=begins, eos=ends, renderer=renderer, special_text=special_text)


MODEL_ENDS = {
    "apertus": "<|assistant_end|>",
    "apriel_1_6": "<|end|>",
    "command_r7b": "<|END_OF_TURN_TOKEN|>",
    "deepseek_v3_1": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "deepseek_v3_2": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "deepseek_v4": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "devstral_small": "</s>",
    "functionary_3_1": "<|eot_id|>",
    "functionary_3_2": "<|eot_id|>",
    "gigachat3_1": "<|message_sep|>",
    "glm_4_6": "<|user|>",
    "glm_4_7_flash": "<|user|>",
    "granite_3_3": "<|end_of_text|>",
    "granite_4_0": "<|end_of_text|>",
    "kimi_k3": "<|end_of_msg|>",
    "minimax_m2": "[e~[",
    "minimax_m3": "[e~[",
    "ministral_3": "</s>",
    "mistral_nemo": "</s>",
    "mistral_small_3_2": "</s>",
    "nemotron_nano_v2": "<SPECIAL_12>",
    "seed_oss": "<seed:eos>",
}
"""The end-of-turn token of models whose template does not end a turn with `<|im_end|>`."""


def model_names() -> list[str]:
    """Templates of single models, beside those of `template_names`."""
    return sorted(path.stem for path in (assets.folder() / "model_templates").glob("*.jinja"))


@cache
def modelled(name: str, *, renderer: str = "sentinel") -> SentinelCodec:
    """The codec of one model's template."""
    source = (assets.folder() / "model_templates" / f"{name}.jinja").read_text("utf-8")
    return codec_for(source, bos="<s>", eos=MODEL_ENDS.get(name, "<|im_end|>"), renderer=renderer)


# What is said


def system(text: str = "You are a coding agent.") -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


def result(call: ToolCall, text: str, **fields: Any) -> Message:
    return Message("tool", text, tool_call_id=call.id, **fields)


@dataclass(slots=True)
class Say:
    """What the model is to sample in one turn."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    think: str | None = None
    cut: int = 0
    """Sample only so many tokens: the turn is truncated."""
    end: str = ""
    """The end-of-turn token to sample instead of the usual one."""
    ids: Sequence[int] | None = None
    """The very ids to sample."""
    canonical: bool = False
    """Sample it as an encoder would spell it."""


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall("", name, arguments)


def spelled(tokenizer: Tokenizer, ids: Iterable[int]) -> list[int]:
    """The same text in more tokens than an encoder would take."""
    added = set(tokenizer.added.values())
    out: list[int] = []
    for id in ids:
        text = "" if id in added else tokenizer.decode([id])
        if len(text) > 3 and text.isascii():
            out += tokenizer.encode(text[:2]) + tokenizer.encode(text[2:])
        else:
            out.append(id)
    return out


# The session


@dataclass(eq=False)
class Asked:
    """One turn with the request that made it."""

    node: GraphNode
    request: list[Message]
    prompt: list[int]
    """What was sent to the engine."""
    new: list[Message] = field(default_factory=list)

    @property
    def reply(self) -> Message:
        return self.node.reply_message()

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return self.reply.tool_calls

    @property
    def sampled(self) -> list[int]:
        return self.node.sampled.tolist()

    @property
    def history(self) -> list[Message]:
        """The request and its reply, as a harness that echoes faithfully sends them back."""
        return [*(self.request[:-1] if self.node.prefill is not None else self.request), self.reply]

    def answered(self, *texts: str) -> list[Message]:
        """The history with a result for each call."""
        texts = texts or ("ok",) * len(self.calls)
        return [*self.history, *(result(c, t) for c, t in zip(self.calls, texts, strict=True))]


class Talk:
    """One session: a codec, a graph, a planner."""

    def __init__(
        self,
        codec: SentinelCodec,
        *,
        policy: ContextPolicy = ContextPolicy.RETAIN,
        vanishing: VanishingPolicy = VanishingPolicy.FORK,
        capture: PromptMode = PromptMode.EXACT,
        noise: Sequence[str] = (),
        instruction: str = "",
    ):
        self.codec = codec
        self.policy = policy
        self.instruction = instruction
        patterns = tuple(re.compile(pattern) for pattern in noise)
        self.graph = Graph(patterns)
        self.planner = Planner(codec, policy=policy, vanishing=vanishing, capture=capture, noise=patterns)
        self.sent: dict[GraphNode, list[int]] = {}
        self.native: dict[str, str] = {}
        self.tools: dict[str, tuple[Tool, ...]] = {}
        self.frames: dict[str, RenderContext] = {}

    def ask(
        self,
        messages: Sequence[Message],
        say: Say | str | None = None,
        *,
        tools: tuple[Tool, ...] = TOOLS,
        args: Mapping[str, Any] | None = None,
        hints: Hints | None = None,
        model: str = "model",
        deliver: bool = True,
        abort: bool = False,
    ) -> Asked:
        """One request and its turn. The messages are read anew, as from the wire."""
        asked = self.start(messages, tools=tools, args=args, hints=hints, model=model)
        return self.finish(asked, say, deliver=deliver, abort=abort)

    def start(
        self,
        messages: Sequence[Message],
        *,
        tools: tuple[Tool, ...] = TOOLS,
        args: Mapping[str, Any] | None = None,
        hints: Hints | None = None,
        model: str = "model",
    ) -> Asked:
        """A turn in flight."""
        read = [replace(message, fingerprint=None) for message in messages]
        order_tool_results(read, 0, self.native)
        request = Request("test", model, read, tools, template_args=dict(args or {}), hints=hints or Hints())
        key = fingerprint.root_key(tools, args or {})
        frame = self.frames.setdefault(key, RenderContext(tools, args or {}, lambda: DAY))
        self.tools[key] = tools
        plan = self.planner.plan(self.graph, request, key, frame, self.planner.hashes(read))
        index = len(self.graph.nodes)
        node = GraphNode(
            id=f"t{index}",
            index=index,
            key=key,
            parent=plan.parent,
            suffix=plan.suffix,
            prompt_length=(plan.parent.end if plan.parent else 0) + len(plan.suffix),
            request_hash=plan.request_hash,
            reply_base=plan.hashes[-2] if plan.prefill is not None else plan.request_hash,
            shortened_hash=plan.shortened_hash,
            message_count=len(read) - (plan.prefill is not None),
            origin=plan.origin,
            origin_inferred=plan.inferred,
            reason=plan.reason,
            new=plan.new,
            prefill=plan.prefill,
            hints=request.hints,
            system=fingerprint.of(read[0], self.planner.noise) if read[0].role == "system" else b"",
            has_tools=bool(tools),
            model=model,
            forced=plan.forced,
            flags=plan.flags,
            special_text=plan.special_text,
            difference=plan.difference,
            appended_turn=plan.appended_turn,
            kept_ids=plan.kept_ids,
        )
        self.graph.add(node)
        prompt = self.graph.open_prompt(node).tolist()
        self.sent[node] = prompt
        if node.parent is not None:
            before = self.sent[node.parent] + node.parent.sampled.tolist()
            assert prompt[: len(before)] == before
            assert prompt[len(before) :] == node.suffix.tolist()
        self._check_shown(node)
        return Asked(node, list(messages), prompt, plan.new)

    def _check_shown(self, node: GraphNode) -> None:
        """Whatever is new to the turn stands in its suffix, in order."""
        text, place = self.text(node.suffix), 0
        for message in node.new:
            word = re.match(r"\w+", message.text.strip()) if message.role != "assistant" else None
            if word is not None:
                place = text.index(word.group(), place) + len(word.group())

    def finish(self, asked: Asked, say: Say | str | None = None, *, deliver: bool = True, abort: bool = False) -> Asked:
        """The turn's sampled tokens and reply."""
        node = asked.node
        if abort:
            node.finish = Finish.ABORT
            return asked
        ids = self._sampled(Say(say) if isinstance(say, str) else say or Say("ok"), node)
        finish = Finish.STOP if ids and ids[-1] in self.codec.stop_ids else Finish.LENGTH
        node.sampled = np.asarray(ids, np.int32)
        node.logprobs = np.linspace(-1, -0.25, len(ids), dtype=np.float32)
        node.versions = np.full(len(ids), node.index % 3, np.int32)
        sample = Sample(node.sampled, node.logprobs, node.versions, finish, len(asked.prompt))
        node.reply, native = read_reply(
            self.codec, np.asarray(asked.prompt, np.int32), sample, self.tools[node.key], node.index
        )
        self.native.update({bare_id(minted): own for minted, own in native.items()})
        node.meta["native_ids"] = native
        node.finish = finish
        self.graph.finish(node)
        node.delivered = deliver
        assert node.tokens().tolist() == asked.prompt + ids
        return asked

    def _sampled(self, say: Say, node: GraphNode) -> list[int]:
        if say.ids is not None:
            return list(say.ids)
        written = self.codec.write(say.text, say.think, say.calls, self.frames[node.key])
        ids = written if say.canonical else [*spelled(self.codec.tokenizer, written[:-1]), written[-1]]
        if say.end:
            end = self.codec.tokenizer.id_of(say.end)
            assert end in self.codec.stop_ids
            ids[-1] = end
        return ids[: say.cut] if say.cut else ids

    # What came of it

    @property
    def nodes(self) -> list[GraphNode]:
        return self.graph.nodes

    @property
    def reasons(self) -> list[ForkReason | None]:
        return [node.reason for node in self.nodes]

    def text(self, ids: Sequence[int] | Ids) -> str:
        return self.codec.tokenizer.decode([int(id) for id in ids])

    def plain(self, messages: Sequence[Message], node: GraphNode) -> list[int]:
        """What a plain server would have sent for these messages."""
        read = [replace(message, fingerprint=None) for message in messages]
        order_tool_results(read)
        return self.codec.prompt(read, self.frames[node.key]).ids

    def trajectory(self, builder: BuilderName = BuilderName.EXACT, **options: Any) -> Trajectory:
        """The session's trajectory, with ownership checked independently of the schema."""
        made = assemble_trajectory(
            self.graph,
            session_id="s",
            builder=builder,
            policy=self.policy,
            instruction=self.instruction,
            ends=self.codec.end_ids,
            end_reason=EndReason.EXITED,
            tools={key: [tool.as_function() for tool in tools] for key, tools in self.tools.items()},
            **options,
        )
        trained: Counter[int] = Counter()
        for trace in made.traces:
            for turn in {int(index) for index in trace.turn_ids[trace.loss_mask == 1]}:
                trained[turn] += 1
        roles = {turn.index: turn.role for turn in made.turns}
        expected = {n.index for n in self.nodes if roles.get(n.index) in made.trained_roles and len(n.sampled)}
        assert trained == dict.fromkeys(expected, 1)
        if builder is BuilderName.EXACT:
            for trace in made.traces:
                leaf = next(n for n in self.nodes if n.index == int(trace.turn_ids[-1]))
                assert trace.token_ids.tolist() == self.sent[leaf] + leaf.sampled.tolist()
        return made

    @property
    def roles(self) -> list[TurnRole]:
        return [turn.role for turn in self.trajectory().turns]

    @property
    def chains(self) -> int:
        return len(self.trajectory().traces)
