"""What harnesses do to a conversation, one function each, with what the specification expects of it.

`continuing` holds what must stay one chain, `telling` the same for what only some dialects can say, `forking` what must
not, `serving` what happens around a conversation: retries, dead connections and weights that change. To add a behaviour,
write a function that acts it on a `Play`, returns what is `Expected`, and is decorated with `behaviour`; the audit finds
it by itself.
"""

from towline.audit.behaviours import continuing, forking, serving, telling
from towline.audit.behaviours.registry import Behaviour, Capture, behaviours

__all__ = ["Behaviour", "Capture", "behaviours", "continuing", "forking", "serving", "telling"]
