"""The fidelity audit with the real vLLM as the engine: rows hold what it saw and sampled, logprobs are those of torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.engines.torch_rows import BOUND
from support.engines.vllm_server import Server, shape
from towline.audit import AuditOptions, run
from towline.audit.engine import weights_folder, write_versions
from towline.engines.vllm import VllmEngine
from towline.schema import BuilderName

BEHAVIOURS = [
    *("verbatim", "reserialised", "other_tokens", "reasoning_dropped", "truncated", "template_rewrites"),
    *("compaction", "subagent", "several_samples", "retry", "weights_updated", "weights_updated_in_flight"),
]


async def test_no_token_drifts_and_every_logprob_is_that_of_a_forward_pass(
    server: Server, tmp_path: Path, measured: Callable[..., None]
) -> None:
    async def audited(folder: Path) -> VllmEngine:
        """The shared server with the audit's weights; an even version has the first set of them."""
        engine = VllmEngine(server.url)
        await engine.start()
        version = engine.version + 2 - engine.version % 2
        write_versions(folder, version)
        await engine.update_weights(weights_folder(folder, version), version)
        return engine

    options = AuditOptions(
        tmp_path,
        conversations=len(BEHAVIOURS),
        targets=["qwen3"],
        behaviours=BEHAVIOURS,
        threads=1,
        concurrency=4,
        shape=shape,
        engine=audited,
    )
    report = await run(options)
    assert report.violations == []
    exact, merged = (report.builders[name].measured for name in (BuilderName.EXACT, BuilderName.MERGED))
    measured(trained=exact.trained_tokens, drifted=exact.drifted_tokens, largest_dlogp=exact.max_abs_dlogp)
    assert exact.trained_tokens > 1_000
    assert exact.drifted_tokens == 0
    assert exact.max_abs_dlogp < BOUND
    # The control, which shows that a drift would be seen.
    assert merged.drifted_tokens > 100
    assert merged.max_abs_dlogp > 1
