"""The fidelity audit: proof, not promise, that rows hold what the model saw and sampled.

What is played: `families` and `formats` are the models and how they write, `targets` the tokenizers and templates,
`abilities` what a target can do, `behaviours` what harnesses do, `casting` who plays what. How it is played: `play` is one
conversation, `tongues` the four dialects it is told in, `wires` the way to the gateway, `script` and `engine` what the model
says and how it is scored, `runner` all of it together. What is checked: `oracle`, `conversion` and `comparison` are the
independent rendering of every prompt, `evidence` is what is left on disk, `measure` the figures computed from it, `judge`
the comparison with the specification, `mutations` the check of the audit itself, `report` the outcome.
"""

from towline.audit.report import AuditReport, render
from towline.audit.runner import AuditOptions, run

__all__ = ["AuditOptions", "AuditReport", "render", "run"]
