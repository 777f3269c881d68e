"""The fidelity audit: proof that rows hold exactly what the model saw and sampled.

It plays conversations as harnesses hold them (`behaviours`, `simulation`, `clients`) on real tokenizers and templates
(`families`, `targets`) through a real gateway with a scripted, scored engine (`engine`), and checks what comes out: every
prompt against an independent rendering (`oracle`, `conversion`, `comparison`), every logprob against a forward pass
(`evidence`), every graph against the specification (`checks`), and the audit itself against known faults (`mutations`).
"""

from towline.audit.report import AuditReport, render
from towline.audit.runner import AuditOptions, run

__all__ = ["AuditOptions", "AuditReport", "render", "run"]
