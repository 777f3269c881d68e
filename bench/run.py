"""Run the benchmarks and print their results: `python bench/run.py [NAME …] [--json]`.

With `--json`, standard output is one object with a result per benchmark; progress goes to standard error. The exit status is
1 if a stated bound does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from towline.benchmarks import continuation, load, overlap, pacing, queue, sandboxes


@dataclass(frozen=True)
class Benchmark:
    run: Callable[..., dict[str, Any]]
    """Called with `target`, the name of a tokenizer, and `progress`."""
    render: Callable[[Mapping[str, Any], Console], None]


BENCHMARKS = {
    "continue": Benchmark(continuation.run, continuation.render),
    "load": Benchmark(load.run, load.render),
    "sandboxes": Benchmark(sandboxes.run, sandboxes.render),
    "overlap": Benchmark(overlap.run, overlap.render),
    "pacing": Benchmark(lambda target, progress: pacing.run(), pacing.render),
    "queue": Benchmark(lambda target, progress: queue.run(progress=progress), queue.render),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python bench/run.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"benchmarks to run (default: all): {', '.join(BENCHMARKS)}"
    )
    parser.add_argument("--target", default="qwen3", help="tokenizer and template to measure with (default: qwen3)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"unknown benchmark {sorted(unknown)[0]!r}; available: {', '.join(BENCHMARKS)}")
    results = {}
    errors = Console(stderr=True)
    for name in options.names or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        with errors.status(name) as status:
            results[name] = benchmark.run(
                target=options.target, progress=lambda step, name=name: status.update(f"{name}: {step}")
            )
        if not options.json:
            benchmark.render(results[name], Console())
    if options.json:
        print(json.dumps(results, indent=2))
    bounds = [holds for result in results.values() for holds in result.get("within", {}).values()]
    return 0 if all(bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
