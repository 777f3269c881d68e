"""The fidelity audit: proof, not promise, that rows hold what the model saw and sampled.

`targets` are the tokenizers and templates it runs on, `behaviours` what harnesses do, `play` one conversation, `script`
and `engine` what the model says and how it is scored, `wires` the way to the gateway; `evidence` is what is left on
disk, `measure` the figures computed from it, `judge` the comparison with the specification, `report` the outcome.
"""

from towline.audit.measure import Figures, Measured, measure
from towline.audit.report import AuditReport, render
from towline.audit.run import AuditOptions, run

__all__ = ["AuditOptions", "AuditReport", "Figures", "Measured", "measure", "render", "run"]
