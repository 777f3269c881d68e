"""The benchmark of sandboxes runs, counts everything it says it counts, and shows it."""

from __future__ import annotations

import io
import json

from rich.console import Console

from towline.benchmarks import sandboxes


def test_it_measures_and_shows() -> None:
    steps: list[str] = []
    result = sandboxes.run(repeats=2, docker=False, progress=steps.append)
    assert json.loads(json.dumps(result)) == result
    found = result["runtimes"]["bubblewrap"]
    assert all(0 < found[row]["min"] <= found[row]["median"] <= found[row]["max"] for row in sandboxes._ROWS)
    assert found["per_second"] > 0
    assert steps
    shown = io.StringIO()
    sandboxes.render(result, Console(file=shown, width=120))
    assert "warm acquire" in shown.getvalue()
    assert "docker not measured: disabled" in shown.getvalue()
