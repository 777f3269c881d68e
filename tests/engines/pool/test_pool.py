"""The pool of replicas, one behaviour at a time, over fake replicas in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from support.engines.pool_rig import FakeReplica, Log, ask, audit, simulate
from towline.common.images import ImagePlaceholder
from towline.conversation import Finish, Media
from towline.engines.base import (
    AcceptsImages,
    CaptureLevel,
    Engine,
    EngineLoad,
    EngineUnreachable,
    PauseMode,
    PoisonTurn,
    Sample,
    SampleRequest,
)
from towline.engines.pool import EnginePool
from towline.errors import EngineError
from towline.gateway import sampling


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in virtual time."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        simulate(test(*args, **kwargs))

    return run


async def started(*replicas: FakeReplica, **options: Any) -> tuple[EnginePool, Log]:
    log = Log()
    for replica in replicas:
        replica.log = log
    pool = EnginePool({replica.name: replica for replica in replicas}, **options)
    await pool.start()
    return pool, log


def go(pool: EnginePool, request: SampleRequest) -> asyncio.Task[Any]:
    """A turn, as the gateway samples it."""
    return asyncio.create_task(sampling.sample_turn(pool, request))


def held(pool: EnginePool) -> dict[str, int]:
    return {replica.name: replica.in_flight for replica in pool.replicas}


@virtual
async def test_a_pool_is_an_engine_with_the_least_of_what_its_replicas_can() -> None:
    pool, _ = await started(FakeReplica("a", context=500), FakeReplica("b", context=400, capture=CaptureLevel.LOGPROBS))
    assert isinstance(pool, Engine)
    assert (pool.info.name, pool.info.context, pool.info.capture) == ("fake", 400, CaptureLevel.LOGPROBS)
    assert pool.info.details == {"replicas": "2", "prefix_caching": "on", "at": "a, b"}
    await pool.close()


@virtual
async def test_replicas_of_different_models_are_refused() -> None:
    pool = EnginePool([FakeReplica("a", vocabulary=512), FakeReplica("b", vocabulary=1024)])
    with pytest.raises(EngineError, match=r"different vocabularies \(0: 512, 1: 1024\)"):
        await pool.start()


@virtual
async def test_a_conversation_stays_on_its_replica_and_new_ones_go_to_the_least_loaded() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, _ = await started(a, b)
    for turn in range(4):
        await asyncio.gather(*(go(pool, ask(f"{c}-{turn}", f"c{c}", f"g{c}")) for c in range(6)))
    places = {r.name: {request.conversation for request in r.seen} for r in (a, b)}
    assert len(places["a"]) == len(places["b"]) == 3
    assert not places["a"] & places["b"]
    await pool.close()


@virtual
async def test_a_group_begins_on_one_replica_until_that_is_loaded() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, _ = await started(a, b, limit=8)
    work = [go(pool, ask(f"t{n}", f"c{n}", "group")) for n in range(12)]
    await asyncio.sleep(0.001)
    # Three are a quarter of the slots ahead of the other, which then gets some; six of eight are as many as go together.
    assert [request.id for request in a.seen] == ["t0", "t1", "t2", "t4", "t6", "t8"]
    assert held(pool) == {"a": 6, "b": 6}
    await asyncio.gather(*work)
    await pool.close()


@virtual
async def test_a_conversation_moves_rather_than_wait_beside_an_idle_replica() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, _ = await started(a, b, limit=2, max_limit=2)
    for n in range(3):
        await go(pool, ask(f"first-{n}", f"c{n}", "group"))
    assert len(a.seen) == 3
    work = [go(pool, ask(f"second-{n}", f"c{n}", "group")) for n in range(3)]
    await asyncio.sleep(0.001)
    assert held(pool) == {"a": 2, "b": 1}
    await asyncio.gather(*work)
    await pool.close()


@virtual
async def test_turns_of_a_dead_replica_continue_elsewhere_from_their_tokens_so_far() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, log = await started(a, b)
    requests = [ask(f"t{n}", f"c{n}") for n in range(6)]
    work = [go(pool, request) for request in requests]
    await asyncio.sleep(0.1)
    a.die()
    samples = await asyncio.gather(*work)
    moved = [sample for sample in samples if "moved" in sample.flags]
    assert len(moved) == 3
    for request, sample in zip(requests, samples, strict=True):
        sampled = audit(log, request, sample)
        assert len(sampled) == 20
        assert sample.prompt_tokens == len(request.prompt)
        origins = [log.tokens[id].replica for id in sampled]
        assert origins == sorted(origins), "what had been streamed is kept, the rest is from the other"
    assert all({log.tokens[int(id)].replica for id in sample.ids[:-1]} == {"a", "b"} for sample in moved)
    assert [replica.serving for replica in pool.replicas] == [False, True]
    assert pool.replicas[0].counters.moved == 3
    await pool.close()


@virtual
async def test_a_turn_of_which_nothing_had_arrived_is_sampled_again() -> None:
    a, b = FakeReplica("a", streams=False), FakeReplica("b")
    pool, log = await started(a, b)
    request = ask("t", "c")
    work = go(pool, request)
    await asyncio.sleep(0.1)
    a.die()
    sample = await work
    assert {log.tokens[id].replica for id in audit(log, request, sample)} == {"b"}
    assert sample.flags == ("moved",)
    await pool.close()


@virtual
async def test_a_turn_with_stop_strings_restarts_since_one_may_span_the_parts() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, log = await started(a, b)
    request = ask("t", "c", stop_strings=("stop",))
    work = go(pool, request)
    await asyncio.sleep(0.1)
    a.die()
    assert {log.tokens[id].replica for id in audit(log, request, await work)} == {"b"}
    await pool.close()


@virtual
async def test_a_turn_whose_last_token_had_arrived_is_whole_without_another_replica() -> None:
    a = FakeReplica("a", length=1000)
    pool, _ = await started(a)
    work = go(pool, ask("t", "c", max_tokens=5))
    await asyncio.sleep(0.055)
    a.die()
    sample = await work
    assert (len(sample.ids), sample.finish, sample.flags) == (5, Finish.LENGTH, ("moved",))
    await pool.close()


@virtual
async def test_a_turn_under_which_replica_after_replica_dies_is_held_to_be_what_kills_them() -> None:
    replicas = [FakeReplica(name) for name in "abcdef"]
    pool, _ = await started(*replicas, max_moves=3, max_fruitless=3)
    work = go(pool, ask("poison", "c"))
    while not work.done():
        await asyncio.sleep(0.03)
        for replica in replicas:
            if replica.flying:
                replica.die()
    with pytest.raises(EngineError, match="4 replicas were lost during this turn"):
        await work
    assert sum(replica.serving for replica in pool.replicas) == 2
    await pool.close()


@virtual
async def test_a_turn_that_kills_its_replica_at_once_is_found_out_soon_and_takes_no_other_turn_with_it() -> None:
    """The others of the replica are cut off with it, again and again, and are not to blame."""
    a = FakeReplica("a", length=1000, poison="poison")
    pool, _ = await started(a, max_moves=99)
    innocent = go(pool, ask("innocent", "c", max_tokens=800))
    with pytest.raises(PoisonTurn, match="3 replicas were lost during this turn"):
        await go(pool, ask("poison", "d"))
    assert not innocent.done()
    sample = await innocent
    assert (len(sample.ids), sample.flags) == (800, ("moved",))
    await pool.close()


@virtual
async def test_a_replica_that_comes_back_is_given_the_current_weights_before_it_serves() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, log = await started(a, b)
    await pool.update_weights(Path("/weights/1"), 1)
    a.die()
    await go(pool, ask("finds-out", "c"))
    await pool.update_weights(Path("/weights/2"), 2)
    assert a.updates == [1]
    a.revive()
    assert (a.loaded, a.version) == (0, 1), "the server has forgotten what the engine believes"
    await asyncio.sleep(3)
    assert pool.replicas[0].serving
    assert (a.loaded, a.version, a.updates) == (2, 2, [1, 2])
    requests = [ask(f"t{n}", f"c{n}") for n in range(8)]
    for request, sample in zip(requests, await asyncio.gather(*(go(pool, r) for r in requests)), strict=True):
        audit(log, request, sample)
    assert len(a.seen) >= 4
    await pool.close()


@virtual
async def test_a_replica_whose_weights_became_old_while_it_took_them_is_given_the_newer_ones() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, log = await started(a, b)
    await pool.update_weights(Path("/weights/1"), 1)
    a.die()
    await go(pool, ask("finds-out", "c"))
    a.revive()
    a.pace = 1.0  # Five seconds for its weights.
    await asyncio.sleep(2)
    await pool.update_weights(Path("/weights/2"), 2)
    assert not pool.replicas[0].serving
    await asyncio.sleep(20)
    assert pool.replicas[0].serving
    assert (a.loaded, a.updates) == (2, [1, 1, 2])
    await pool.close()


class Blinking(FakeReplica):
    """Loses a connection and answers no looks, but samples on."""

    async def healthy(self) -> bool:
        return False

    async def sample(self, request: SampleRequest) -> Sample:
        if request.id == "blink":
            raise EngineUnreachable("the connection was reset")
        return await super().sample(request)


@virtual
async def test_what_still_runs_on_a_replica_that_left_ends_with_the_update() -> None:
    a, b = Blinking("a", length=200), FakeReplica("b", length=200)
    pool, log = await started(a, b)
    request = ask("long", "c")
    work = [go(pool, request)]
    await asyncio.sleep(0.1)
    work.append(go(pool, ask("blink", "c")))
    await asyncio.sleep(0.01)
    assert [replica.serving for replica in pool.replicas] == [False, True]
    assert a.flying
    await pool.update_weights(Path("/weights/1"), 1)
    done = asyncio.get_running_loop().time()
    long, _ = await asyncio.gather(*work)
    audit(log, request, long)
    assert {origin.loaded for origin in log.tokens.values() if origin.when > done + a.pace} == {1}
    await pool.close()


@virtual
async def test_without_updates_a_replica_comes_back_with_the_weights_it_starts_with() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, _ = await started(a, b)
    a.die()
    await go(pool, ask("finds-out", "c"))
    a.revive()
    await asyncio.sleep(3)
    assert pool.replicas[0].serving
    assert a.starts == 2
    assert a.updates == []
    await pool.close()


@virtual
async def test_weights_that_came_by_another_way_cannot_be_given_again_so_the_replica_stays_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, _ = await started(a, b)
    await pool.pause()
    a.loaded = b.loaded = 5  # The trainer's own way.
    await pool.resume(5)
    a.die()
    await go(pool, ask("finds-out", "c"))
    a.revive()
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(100)
    assert not pool.replicas[0].serving
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == [
        "replica a cannot come back: it answers, but is not known to have the weights of version 5, which the trainer "
        "pushed by its own means: it is used again after the next push that it gets and that is announced"
    ]
    await pool.update_weights(Path("/weights/6"), 6)
    await asyncio.sleep(100)
    assert pool.replicas[0].serving
    assert a.loaded == 6
    await pool.close()


@virtual
async def test_a_hanging_replica_leaves_and_its_turns_continue() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, log = await started(a, b)
    request = ask("t", "c")
    work = go(pool, request)
    await asyncio.sleep(0.1)
    a.hangs = True
    assert {log.tokens[id].replica for id in audit(log, request, await work)} == {"b"}
    assert "does not answer" in pool.replicas[0].problem
    await pool.close()


@virtual
async def test_one_version_over_all_replicas_and_no_older_token_after_the_update() -> None:
    a, b = FakeReplica("a"), FakeReplica("b", pace=0.05)
    pool, log = await started(a, b)
    requests = [ask(f"t{n}", f"c{n}") for n in range(6)]
    work = [go(pool, request) for request in requests]
    await asyncio.sleep(0.1)
    await pool.update_weights(Path("/weights/3"), 3)
    done = asyncio.get_running_loop().time()
    assert pool.version == 3
    for request, sample in zip(requests, await asyncio.gather(*work), strict=True):
        sampled = audit(log, request, sample)
        assert {log.tokens[id].loaded for id in sampled} == {0, 3}
        assert all(log.tokens[id].loaded == 3 for id in sampled if log.tokens[id].when > done)
    await pool.close()


@virtual
@pytest.mark.parametrize("dies", [True, False])
async def test_a_replica_that_fails_the_update_leaves_and_returns_with_these_weights(dies: bool) -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, log = await started(a, b)
    a.dies_in_update, a.refuses = dies, "" if dies else "no space left on the device"
    requests = [ask(f"t{n}", f"c{n}") for n in range(4)]
    work = [go(pool, request) for request in requests]
    await asyncio.sleep(0.05)
    await pool.update_weights(Path("/weights/1"), 1)
    assert (pool.version, [r.serving for r in pool.replicas]) == (1, [False, True])
    for request, sample in zip(requests, await asyncio.gather(*work), strict=True):
        audit(log, request, sample)
    a.refuses = ""
    a.revive()
    await asyncio.sleep(10)
    assert pool.replicas[0].serving
    assert a.loaded == 1
    await pool.close()


@virtual
async def test_weights_that_no_replica_can_take_change_nothing() -> None:
    a, b = FakeReplica("a", refuses="another model"), FakeReplica("b", refuses="another model")
    pool, log = await started(a, b)
    with pytest.raises(
        EngineError, match="no replica took the weights of version 1: a: another model; b: another model"
    ):
        await pool.update_weights(Path("/weights/1"), 1)
    assert pool.version == 0
    request = ask("t", "c")
    audit(log, request, await go(pool, request))
    await pool.close()


@virtual
async def test_an_update_continues_when_its_caller_is_cancelled() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, _ = await started(a, b)
    caller = asyncio.create_task(pool.update_weights(Path("/weights/1"), 1))
    await asyncio.sleep(0.01)
    caller.cancel()
    await asyncio.sleep(1)
    assert (a.loaded, b.loaded, pool.version) == (1, 1, 1)
    await pool.close()


@virtual
async def test_a_pause_holds_every_replica_even_one_that_comes_back_during_it() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, log = await started(a, b)
    a.die()
    await go(pool, ask("finds-out", "c"))
    requests = [ask(f"t{n}", f"d{n}") for n in range(4)]
    work = [go(pool, request) for request in requests]
    await asyncio.sleep(0.05)
    await pool.pause(PauseMode.ABORT)
    a.revive()
    await asyncio.sleep(5)
    assert pool.replicas[0].serving
    sampled = len(log.tokens)
    late = [ask(f"late{n}", f"e{n}") for n in range(4)]
    work += [go(pool, request) for request in late]
    await asyncio.sleep(5)
    assert len(log.tokens) == sampled
    assert not a.flying
    await pool.resume()
    for request, sample in zip(requests + late, await asyncio.gather(*work), strict=True):
        audit(log, request, sample)
    await pool.close()


@virtual
async def test_draining_lets_turns_finish_and_holds_the_others_back() -> None:
    pool, _ = await started(FakeReplica("a"), FakeReplica("b"), limit=1, max_limit=1)
    work = [go(pool, ask(f"t{n}", f"c{n}")) for n in range(4)]
    await asyncio.sleep(0.05)
    await pool.pause(PauseMode.DRAIN)
    assert sum(task.done() for task in work) == 2
    await pool.resume()
    assert all("resumed" not in sample.flags for sample in await asyncio.gather(*work))
    await pool.close()


@virtual
async def test_when_every_replica_is_dead_turns_wait_and_then_fail_with_the_reasons() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, log = await started(a, b, deadline=60)
    a.die()
    b.die()
    began = asyncio.get_running_loop().time()
    with pytest.raises(EngineError, match="no replica has served for 60 s: a: a refuses the connection; b: b refuses"):
        await pool.sample(ask("t", "c"))
    assert asyncio.get_running_loop().time() - began == pytest.approx(60, abs=1)
    patient = go(pool, ask("u", "c"))
    await asyncio.sleep(30)
    b.revive()
    audit(log, ask("u", "c"), await patient)
    await pool.close()


@virtual
async def test_waiting_turns_are_served_in_order_of_arrival_and_a_cancelled_one_frees_its_slot() -> None:
    a = FakeReplica("a")
    pool, _ = await started(a, limit=1, max_limit=1)
    work = [go(pool, ask(f"t{n}", f"c{n}")) for n in range(6)]
    await asyncio.sleep(0.05)
    work[0].cancel()
    work[3].cancel()
    await asyncio.gather(*work, return_exceptions=True)
    assert [request.id for request in a.seen] == ["t0", "t1", "t2", "t4", "t5"]
    assert held(pool) == {"a": 0}
    assert not a.flying
    await pool.close()


@virtual
async def test_a_turn_cut_short_by_an_update_resumes_before_those_that_had_not_begun() -> None:
    a = FakeReplica("a")
    pool, _ = await started(a, limit=1, max_limit=1)
    work = [go(pool, ask(f"t{n}", f"c{n}")) for n in range(3)]
    await asyncio.sleep(0.05)
    await pool.pause(PauseMode.ABORT)
    await pool.resume()
    await asyncio.gather(*work)
    assert [request.id for request in a.seen] == ["t0", "t0", "t1", "t2"]
    await pool.close()


@virtual
async def test_aborting_ends_turns_that_run_and_turns_that_wait() -> None:
    a = FakeReplica("a")
    pool, _ = await started(a, limit=1, max_limit=1)
    runs, waits = (asyncio.create_task(pool.sample(ask(id, id))) for id in ("runs", "waits"))
    await asyncio.sleep(0.055)
    await pool.abort(["runs", "waits"])
    assert (await runs).finish is (await waits).finish is Finish.ABORT
    assert (len((await runs).ids), len((await waits).ids)) == (5, 0)
    assert (await waits).prompt_tokens == 4
    await pool.close()


@virtual
async def test_concurrency_grows_with_room_stands_still_when_nearly_full_and_backs_off_when_full() -> None:
    a = FakeReplica("a", length=10**6)
    pool, _ = await started(a, limit=4, max_limit=100)
    pace = pool.replicas[0].concurrency
    work = [go(pool, ask(f"t{n}", f"c{n}", max_tokens=10**6)) for n in range(200)]
    a.told = EngineLoad(4, 0, 0.3)
    await asyncio.sleep(2.5)
    grown = pace.limit
    assert grown == 9
    a.told = EngineLoad(grown, 0, 0.7)
    await asyncio.sleep(3)
    assert pace.limit == grown + 3
    a.told = EngineLoad(grown, 0, 0.85)
    await asyncio.sleep(3)
    assert pace.limit == grown + 3
    a.told = EngineLoad(grown, 0, 0.95)
    await asyncio.sleep(1)
    assert pace.limit == (grown + 3) * 3 // 4
    a.told = EngineLoad(8, 5, 0.3)
    await asyncio.sleep(1)
    assert pace.limit < (grown + 3) * 3 // 4, "a long queue of its own is too much as well"
    assert held(pool)["a"] == grown + 3, "nothing that runs is stopped for it"
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    await pool.close()


@virtual
async def test_a_replica_that_is_away_at_the_start_joins_later_and_one_at_least_must_be_there() -> None:
    a, b = FakeReplica("a", alive=False), FakeReplica("b")
    pool, _ = await started(a, b)
    assert [replica.serving for replica in pool.replicas] == [False, True]
    a.revive()
    await asyncio.sleep(3)
    assert pool.replicas[0].serving
    await pool.close()
    with pytest.raises(EngineError, match="no replica can be reached: 0: c refuses the connection"):
        await EnginePool([FakeReplica("c", alive=False)]).start()


@virtual
async def test_a_replica_that_returns_as_another_model_is_kept_out(caplog: pytest.LogCaptureFixture) -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, _ = await started(a, b)
    a.die()
    await go(pool, ask("finds-out", "c"))
    a.revive()
    a.vocabulary = 7
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(10)
    assert not pool.replicas[0].serving
    assert "different vocabularies" in caplog.text
    await pool.close()


@virtual
async def test_forced_ids_continue_where_the_lost_replica_stopped() -> None:
    """An engine emits the forced ids that it is asked for: the rest of them, after a move."""
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, _ = await started(a, b)
    work = go(pool, ask("t", "c", forced=np.arange(5000, 5020, dtype=np.int32)))
    await asyncio.sleep(0.1)
    a.die()
    await work
    told = len(b.seen[0].prompt) - 4
    assert told > 0
    assert b.seen[0].forced is not None
    assert b.seen[0].forced.tolist() == list(range(5000 + told, 5020))
    await pool.close()


@virtual
async def test_metrics_of_every_replica_are_reported() -> None:
    a, b = FakeReplica("a"), FakeReplica("b")
    pool, _ = await started(a, b, limit=4)
    registry = CollectorRegistry()
    registry.register(pool)
    work = [go(pool, ask(f"t{n}", f"c{n}")) for n in range(6)]
    await asyncio.sleep(0.1)
    a.die()
    await asyncio.gather(*work)
    await asyncio.sleep(2)
    text = generate_latest(registry).decode()
    for line in (
        'towline_engine_healthy{engine="a"} 0.0',
        'towline_engine_healthy{engine="b"} 1.0',
        'towline_engine_moved_turns_total{engine="a"} 3.0',
        'towline_engine_failures_total{engine="a"} 1.0',
        'towline_engine_turns_total{engine="b"} 6.0',
        'towline_engine_in_flight{engine="b"} 0.0',
        'towline_engine_waiting{engine="any"} 0.0',
        'towline_engine_kv_usage{engine="b"} 0.0',
        'towline_engine_limit{engine="a"} 4.0',
    ):
        assert line in text
    await pool.close()


class SeeingReplica(FakeReplica):
    async def render_media(self, media: Sequence[Media]) -> list[ImagePlaceholder | None]:
        self._reach()
        return [ImagePlaceholder(np.array([7, 8], np.int32)) for _ in media]


@virtual
async def test_images_are_prepared_by_any_replica_that_is_there() -> None:
    a, b = SeeingReplica("a"), SeeingReplica("b")
    pool, _ = await started(a, b)
    assert isinstance(pool, AcceptsImages)
    a.die()
    (placeholder,) = await pool.render_media([Media("image", "00", "data:image/png;base64,AA==")])
    assert placeholder is not None
    assert placeholder.ids is not None
    assert placeholder.ids.tolist() == [7, 8]
    assert [replica.serving for replica in pool.replicas] == [False, True]
    await pool.close()
    blind, _ = await started(FakeReplica("c"))
    assert await blind.render_media([Media("image", "00", "data:image/png;base64,AA==")]) == [None]
    await blind.close()


@virtual
async def test_a_closed_pool_refuses_turns() -> None:
    pool, _ = await started(FakeReplica("a"), limit=1, max_limit=1)
    work = [asyncio.create_task(pool.sample(ask(f"t{n}", f"c{n}"))) for n in range(3)]
    await asyncio.sleep(0.05)
    await pool.close()
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    assert outcomes[0].finish is Finish.ABORT
    assert [str(outcome) for outcome in outcomes[1:]] == ["the pool is closed"] * 2
    with pytest.raises(EngineError, match="closed"):
        await pool.sample(ask())
