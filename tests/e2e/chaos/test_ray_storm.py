"""Four `ray start` nodes in a storm: nodes lose power, links are cut, raylets, hosts, the server and the engine die.

Each node is in a network namespace without a route out. What must hold afterwards is what `test_chaos` demands.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

import towline
from support.chaos.deployment import CLOCK, small_disk
from support.chaos.echo_engine import echo_engine
from support.chaos.ray_deployment import OnRay
from support.chaos.schedule import WEIGHTS
from support.chaos.storm import Storm
from support.cluster.ray_rig import RayRig

NODES = 4
_NEEDS_POSTGRES = ("stop_database", "restart_database")
_SLOWER = 3.0
"""A node of Ray takes much longer to start than a process."""

pytestmark = pytest.mark.timeout(10800)


async def test_ray(
    model: Path, seed: int, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    options = request.config
    sessions = int(options.getoption("--sessions"))
    named = [one for one in str(options.getoption("--faults")).split(",") if one]
    faults = [one for one in named or WEIGHTS if one not in _NEEDS_POSTGRES]

    def write(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    write(f"\nstorm on {NODES} Ray nodes: --seed {seed} --sessions {sessions} --faults {','.join(faults)}")
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    rig = RayRig(NODES)
    # After the disk in it is unmounted.
    request.addfinalizer(lambda: shutil.rmtree(rig.place, ignore_errors=True))
    storms = rig.place / "storm"
    storms.mkdir()
    # Nodes have a /tmp of their own.
    shutil.copytree(model, rig.place / "tiny")
    rig.variables |= {"PYTHONPATH": f"{CLOCK}:{_package()}", "TOWLINE_CHAOS_CLOCK": str(storms / "clock")}
    # Mounted before the nodes start, so that they see it.
    with small_disk(rig.place / "data", "512m") as disk, _running(rig, tmp_path), rig.network():
        async with echo_engine(rig.place / "tiny", random.Random(seed), rig.address(0)) as (proxy, engine):
            database = f"sqlite:///{rig.place}/data/towline.db"
            settings = {
                "TOWLINE_ENGINE__STALL_SECONDS": "3",
                "TOWLINE_SERVER__STOP_SECONDS": "1",
                "TOWLINE_SERVER__QUARANTINE_DEATHS": "0",
            }
            storm = Storm(
                OnRay(rig, engine, database, settings),
                proxy,
                storms,
                rig.place / "data",
                database,
                seed,
                sessions,
                faults,
                float(options.getoption("--seconds")),
                stretch=_SLOWER,
                hosts=rig.place,
                disk=disk,
                write=write,
            )
            report = await storm.run(lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))
    for line in (f"after the storm (seed {seed}, {storm.tasks * 4} sessions on Ray):", *report.lines()):
        write(line)
    assert not report.broken, f"seed {seed}: {report.broken}"


@contextlib.contextmanager
def _running(rig: RayRig, tmp_path: Path) -> Iterator[None]:
    """The cluster; its logs are kept if the block fails."""
    try:
        rig.start()
        yield
    except BaseException:
        shutil.copytree(rig.place / "log", tmp_path / "log")
        raise
    finally:
        rig.stop()


def _package() -> Path:
    return Path(towline.__file__).parents[1]
