"""What harnesses do to a conversation, one function each, with what the specification expects of it.

`continuing` holds what must stay one chain, `prompting` the same for prompts and sampling, `telling` for what only some
dialects can say; `forking` holds what must not, `editing` histories in other words, `agents` several agents in a session;
`serving` is what happens around a conversation: retries, dead connections and weights that change. To add a behaviour,
write a function that acts it on a `Play`, returns what is `Expected`, and is decorated with `behaviour`; the audit finds
it by itself.
"""

from towline.audit.behaviours import agents, continuing, editing, forking, prompting, serving, telling
from towline.audit.behaviours.registry import CAPTURES, Behaviour, Capture, behaviours

__all__ = [
    "CAPTURES",
    "Behaviour",
    "Capture",
    "agents",
    "behaviours",
    "continuing",
    "editing",
    "forking",
    "prompting",
    "serving",
    "telling",
]
