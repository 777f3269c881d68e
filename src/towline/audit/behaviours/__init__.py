"""What harnesses do to a conversation: one function per behaviour, with what the specification expects of it.

- `continuing`: the conversation must stay one chain; `prompting`: the same for changed prompts and sampling;
  `wire_features`: the same for features of single dialects.
- `forking`: a new chain with a recorded reason; `agents`: several agents in one session.
- `serving`: retries, lost connections and weight updates.

To add a behaviour, write a function that plays it on a `SimulatedHarness` and returns what is `Expected`, and decorate it
with `behaviour`.
"""

from towline.audit.behaviours import agents, continuing, forking, prompting, serving, wire_features
from towline.audit.behaviours.registry import CAPTURES, Behaviour, Capture, behaviours

__all__ = [
    "CAPTURES",
    "Behaviour",
    "Capture",
    "agents",
    "behaviours",
    "continuing",
    "forking",
    "prompting",
    "serving",
    "wire_features",
]
