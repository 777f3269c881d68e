"""A deployment in a storm: processes are killed and stopped, disks fill up, clocks jump, databases and engines fail.

Afterwards every task is done, no acknowledged result is lost or delivered again, no token belongs to another session, no
session was scored on an engine failure, and nothing is left on the machine. `--seed N` replays the schedule of a storm.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers

from support.chaos.deployment import CLOCK, Children, small_disk
from support.chaos.echo_engine import echo_engine
from support.chaos.schedule import WEIGHTS
from support.chaos.storm import Storm

_NEEDS_POSTGRES = ("stop_database", "restart_database")
_NEEDS_MACHINES = ("cut_network", "kill_node", "kill_raylet")

pytestmark = pytest.mark.timeout(7200)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_children(
    kind: str,
    model: Path,
    seed: int,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = request.config
    postgres = request.getfixturevalue("postgres") if kind == "postgresql" else None
    named = [one for one in str(options.getoption("--faults")).split(",") if one]
    faults = [
        one for one in named or WEIGHTS if one not in _NEEDS_MACHINES and (postgres or one not in _NEEDS_POSTGRES)
    ]

    def write(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    write(f"\nstorm on {kind}: --seed {seed} --sessions {options.getoption('--sessions')} --faults {','.join(faults)}")
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    with small_disk(tmp_path / "disk") as disk:
        async with echo_engine(model, random.Random(seed)) as (proxy, engine):
            data = tmp_path / "disk" / "data"
            database = postgres.database() if postgres is not None else f"sqlite:///{data}/towline.db"
            environment = {
                "PYTHONPATH": f"{CLOCK}:{_package()}",
                "TOWLINE_CHAOS_CLOCK": str(tmp_path / "clock"),
                "TOWLINE_ENGINE__STALL_SECONDS": "3",
                "TOWLINE_SERVER__STOP_SECONDS": "1",
                # So many deaths would make suspects of sessions that did nothing; suspects run one by one.
                "TOWLINE_SERVER__QUARANTINE_DEATHS": "0",
            }
            words = [*engine, "--sandbox=process", "--concurrency=6", "--log-format=json"]
            deployment = Children(data, database, words, tmp_path / "server.log", environment=environment)
            request.addfinalizer(deployment.kill)
            storm = Storm(
                deployment,
                proxy,
                tmp_path,
                data,
                database,
                seed,
                int(options.getoption("--sessions")),
                faults,
                float(options.getoption("--seconds")),
                disk=disk,
                postgres=postgres,
                write=write,
            )
            report = await storm.run(lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))
    for line in (f"after the storm (seed {seed}, {storm.tasks * 4} sessions on {kind}):", *report.lines()):
        write(line)
    assert not report.broken, f"seed {seed}: {report.broken}"


def _package() -> Path:
    import towline

    return Path(towline.__file__).parents[1]
