"""The task's own solution instead of an agent: it calls no model, and must score 1 (`towline run --oracle`)."""

from __future__ import annotations

from dataclasses import replace

from towline.harnesses import shell

HARNESS = replace(shell.HARNESS, name="oracle", summary="the task's own solution, without a model", calls_model=False)
