"""A beam search through the managers of all processes: what its steps send, and what they leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from benchmark.engine.beams import BatchOnly, Costs, LocalServer, measure
from lightserve.errors import WorkerDiedError
from lightserve.messages.step import Step, StepResult
from lightserve.text.beam_search import BeamParams
from test.waiting import DEADLINE_S, until

PARAMS = BeamParams(num_beams=4, n=4, max_new_tokens=12, ignore_eos=True)
LENGTH = 300
MAX_LEN = LENGTH + PARAMS.max_new_tokens + 1


class MortalWorkers(BatchOnly):
    """They die when they should compute one more step than ``num_steps``, and others replace them."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(MAX_LEN)
        self.server: LocalServer | None = None
        self._num_steps = num_steps

    def run(self, step: Step) -> asyncio.Future[StepResult]:
        if len(self.samples) < self._num_steps:
            return super().run(step)
        self.is_lost = True
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        future.set_exception(WorkerDiedError("killed"))
        return future

    def request_restart(self, reason: str, caused_by_request: bool) -> None:
        assert self.server is not None
        self.server.workers = BatchOnly(MAX_LEN)
        client: Any = self.server.workers
        asyncio.get_running_loop().call_soon(self.server.router.use_workers, client)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario

    asyncio.run(within_deadline())


async def assert_nothing_is_left(server: LocalServer) -> None:
    batch = server.workers.batch
    await until(lambda: not (len(batch.retained) or batch._reqs or len(server.scheduler.only_group.fork_points)))
    assert server.scheduler.num_running == server.scheduler.num_waiting == server.scheduler.only_group.pool.used == 0
    assert server.http.running_requests == 0


@pytest.mark.parametrize(("num_beams", "num_stages"), [(1, 1), (4, 1), (4, 2)])
def test_what_a_step_sends_does_not_grow_with_the_length(num_beams: int, num_stages: int) -> None:
    """All ranks of a stage and of all stages get the same bytes. With stages, the router sends the tokens too."""
    short, long = (asyncio.run(measure(num_beams, length, 12, num_stages)) for length in (200, 3000))

    assert bytes_of(long) == pytest.approx(bytes_of(short), abs=8 * num_beams)  # larger numbers take a few bytes more
    assert max(bytes_of(long)) < 600 * num_beams


def bytes_of(costs: Costs) -> list[float]:
    return [costs.http_bytes, costs.step_bytes, costs.result_bytes]


def test_a_beam_search_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        server = LocalServer(MAX_LEN)
        async with server.running():
            found = await server.search(LENGTH, PARAMS)
            await assert_nothing_is_left(server)

        assert [len(ids) for ids in found] == [PARAMS.max_new_tokens] * 4

    run(scenario())


def test_a_beam_search_that_is_aborted_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        server = LocalServer(MAX_LEN)
        async with server.running():
            search = asyncio.create_task(server.search(LENGTH, PARAMS))
            await until(lambda: len(server.workers.samples) == 5)
            assert len(server.workers.batch.retained)
            search.cancel()
            with pytest.raises(asyncio.CancelledError):
                await search

            await assert_nothing_is_left(server)

    run(scenario())


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_a_beam_search_goes_on_after_its_workers_died_and_leaves_nothing_behind(num_steps: int) -> None:
    async def scenario() -> None:
        calm = LocalServer(MAX_LEN)
        async with calm.running():
            expected = await calm.search(LENGTH, PARAMS)
        mortal = MortalWorkers(num_steps)
        server = mortal.server = LocalServer(MAX_LEN, mortal)
        async with server.running():
            found = await server.search(LENGTH, PARAMS)

            assert mortal.is_lost
            assert found == expected
            await assert_nothing_is_left(server)

    run(scenario())
