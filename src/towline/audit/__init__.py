"""The fidelity audit: proof, not promise, that rows hold what the model saw and sampled.

`targets` are the tokenizers and templates it runs on, `behaviours` what harnesses do, `casting` who plays what, `play`
one conversation, `tongues` the four dialects it is told in, `script` and `engine` what the model says and how it is
scored, `wires` the way to the gateway, `runner` all of it together; `evidence` is what is left on disk, `measure` the
figures computed from it, `judge` the comparison with the specification, `report` the outcome.
"""

from towline.audit.report import AuditReport, render
from towline.audit.runner import AuditOptions, run

__all__ = ["AuditOptions", "AuditReport", "render", "run"]
