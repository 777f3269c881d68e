"""NeMo Gym rows: `{"responses_create_params": {"input": …, "metadata": …}, …}`.

The row is kept whole in the task's metadata, so that whoever answers NeMo Gym can give it back with its result.
"""

from __future__ import annotations

from typing import Any

from towline.tasks.errors import Place
from towline.tasks.text import instruction_text

FIELD = "responses_create_params"


def read(row: dict[str, Any], place: Place) -> dict[str, Any]:
    params = row[FIELD]
    if not isinstance(params, dict) or "input" not in params:
        raise place.error(FIELD, "must be an object with `input`")
    text = instruction_text(params["input"], place, f"{FIELD}.input")
    if params.get("instructions"):
        text = f"{instruction_text(params['instructions'], place, f'{FIELD}.instructions')}\n\n{text}"
    made: dict[str, Any] = {"instruction": text, "metadata": {"nemo_gym": row}}
    answer = row.get("expected_answer", row.get("answer"))
    if isinstance(answer, str | int | float) and not isinstance(answer, bool):
        made["evaluator"] = {"kind": "answer", "answer": answer}
    return made
