"""Who begins when, of many at once."""

from __future__ import annotations

import asyncio
import contextlib

from lightserve.httpserver.wire.request_throttle import RequestThrottle


def test_a_few_begin_in_a_round_and_all_in_order() -> None:
    async def scenario() -> list[tuple[int, int]]:
        throttle = RequestThrottle(per_iteration=3)
        rounds = 0
        begun: list[tuple[int, int]] = []

        async def begin(index: int) -> None:
            await throttle.wait()
            begun.append((index, rounds))

        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(begin(index)) for index in range(10)]
            while not all(task.done() for task in waiting):
                await asyncio.sleep(0)
                rounds += 1
        return begun

    begun = asyncio.run(scenario())

    assert [index for index, _ in begun] == list(range(10))
    by_round = [round for _, round in begun]
    assert max(by_round.count(round) for round in set(by_round)) == 3


def test_one_that_comes_alone_does_not_wait() -> None:
    async def scenario() -> None:
        throttle = RequestThrottle(per_iteration=1)
        for _ in range(3):
            begin = throttle.wait()
            with contextlib.suppress(StopIteration):
                begin.send(None)
                raise AssertionError("it waits")
            await asyncio.sleep(0)  # the next round

    asyncio.run(scenario())


def test_one_that_leaves_holds_up_nobody() -> None:
    async def scenario() -> None:
        throttle = RequestThrottle(per_iteration=1)
        tasks = [asyncio.create_task(throttle.wait()) for _ in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[2].cancel()

        async with asyncio.timeout(30):
            await tasks[3]

        assert tasks[0].done()

    asyncio.run(scenario())
