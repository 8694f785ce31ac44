"""Who begins when, of many at once."""

from __future__ import annotations

import asyncio
import contextlib

from lightserve.httpserver.http.middleware import RequestThrottle
from test.waiting import DEADLINE_S


def test_some_requests_begin_in_an_iteration_and_all_in_order() -> None:
    async def scenario() -> list[tuple[int, int]]:
        throttle = RequestThrottle(per_iteration=3)
        iterations = 0
        begun: list[tuple[int, int]] = []

        async def begin(index: int) -> None:
            await throttle.wait()
            begun.append((index, iterations))

        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(begin(index)) for index in range(10)]
            while not all(task.done() for task in waiting):
                await asyncio.sleep(0)
                iterations += 1
        return begun

    begun = asyncio.run(scenario())

    assert [index for index, _ in begun] == list(range(10))
    by_iteration = [iteration for _, iteration in begun]
    assert max(by_iteration.count(iteration) for iteration in set(by_iteration)) == 3


def test_a_single_request_does_not_wait() -> None:
    async def scenario() -> None:
        throttle = RequestThrottle(per_iteration=1)
        for _ in range(3):
            begin = throttle.wait()
            with contextlib.suppress(StopIteration):
                begin.send(None)
                raise AssertionError("it waits")
            await asyncio.sleep(0)  # the next round

    asyncio.run(scenario())


def test_a_request_that_is_cancelled_delays_no_other() -> None:
    async def scenario() -> None:
        throttle = RequestThrottle(per_iteration=1)
        tasks = [asyncio.create_task(throttle.wait()) for _ in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[2].cancel()

        async with asyncio.timeout(DEADLINE_S):
            await tasks[3]

        assert tasks[0].done()

    asyncio.run(scenario())
