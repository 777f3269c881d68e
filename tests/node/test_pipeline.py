"""Worker slots: never more than there are, the most urgent first, and none lost when a waiter leaves."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from towline.node.pipeline import WorkerSlots


async def test_the_most_urgent_waiter_is_first_and_equals_come_in_order() -> None:
    slots = WorkerSlots(1)
    await slots.acquire()
    order: list[str] = []

    async def worker(name: str, priority: int) -> None:
        async with slots.take(priority):
            order.append(name)
            await asyncio.sleep(0)

    workers = [asyncio.create_task(worker(*each)) for each in (("a", 0), ("b", 5), ("c", 0), ("d", 5), ("e", -1))]
    await asyncio.sleep(0)
    assert slots.waiting == 5
    slots.release()
    await asyncio.gather(*workers)
    assert order == ["b", "d", "a", "c", "e"]
    assert slots.taken == 0


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3), st.booleans()), min_size=1, max_size=25),
)
def test_no_slot_is_lost_or_made(count: int, workers: list[tuple[int, int, bool]]) -> None:
    """Workers hold a slot for some steps; some are cancelled at an arbitrary moment."""

    async def play() -> None:
        slots = WorkerSlots(count)
        inside = most = 0

        async def worker(priority: int, steps: int) -> None:
            nonlocal inside, most
            async with slots.take(priority):
                inside += 1
                most = max(most, inside)
                try:
                    for _ in range(steps):
                        await asyncio.sleep(0)
                finally:
                    inside -= 1

        tasks = [asyncio.create_task(worker(priority, steps)) for priority, steps, _ in workers]
        for step, (task, (_, steps, leaves)) in enumerate(zip(tasks, workers, strict=True)):
            if step % 2 == steps % 2:
                await asyncio.sleep(0)
            if leaves:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most <= count
        assert inside == 0
        assert slots.taken == 0
        assert slots.waiting == 0
        # All of them can be had again.
        await asyncio.wait_for(asyncio.gather(*(slots.acquire() for _ in range(count))), 1)

    asyncio.run(play())
