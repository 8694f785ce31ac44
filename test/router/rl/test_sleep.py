"""Which memory a sleep frees, and what the workers and the launcher are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lightserve.ipc.worker_calls import SET_MEMORY, WorkerCall
from lightserve.messages.control import StartWorkers, StopWorkers
from lightserve.messages.output import RouterStats
from lightserve.messages.rl import RlReply, Sleep, WakeUp
from lightserve.messages.worker_calls import MemoryChanged, ReleasedMemory
from test.router.rl.test_kv_on_its_way import ask
from test.router.test_manager import FakeModel, Router, check, request
from test.waiting import until

ALL, WEIGHTS, KV, NOTHING = (
    ReleasedMemory(kv=True, weights=True),
    ReleasedMemory(weights=True),
    ReleasedMemory(kv=True),
    ReleasedMemory(),
)
STOP, WATCH, START = StopWorkers(), StopWorkers(only_dead=True), StartWorkers()


class Workers(FakeModel):
    """They can move their weights, or fail with ``error``."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.error = error
        self.memory: list[ReleasedMemory] = []
        self.dies_at: ReleasedMemory | None = None

    def serves(self, call: WorkerCall[Any, Any]) -> bool:
        return call is SET_MEMORY

    def call(self, call: WorkerCall[Any, Any], request: Any, timeout_s: float | None = None) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.memory.append(request)
        self.is_lost |= request == self.dies_at
        reply.set_result(None if self.is_lost else MemoryChanged(self.error, keeps_graphs=True))
        return reply


class Launcher:
    """It has stopped and started workers as soon as it is asked."""

    def __init__(self, router: Router) -> None:
        self.asked: list[StopWorkers | StartWorkers] = []
        self._router = router
        self.use(Workers())
        router.manager.rl.sleep.connect(self._ask)

    def use(self, workers: Workers) -> None:
        self.workers = workers
        self._router.manager.use_workers(workers)
        self._router.manager.rl.on_new_workers()

    def _ask(self, message: StopWorkers | StartWorkers) -> None:
        self.asked.append(message)
        loop = asyncio.get_running_loop()
        if message == STOP:
            loop.call_soon(self._router.manager.rl.sleep.on_workers_stopped)
        elif message == START and self._router.manager.rl.sleep.is_asleep:
            loop.call_soon(self.use, Workers())


async def serves(router: Router, req_id: int) -> None:
    router.send(request(req_id))
    await router.until(lambda: router.has_finished(req_id))


def check_sleep(tmp_path: Path, scenario: Callable[[Router, Launcher], Awaitable[None]]) -> None:
    async def run(router: Router) -> None:
        await serves(router, 98)
        await scenario(router, Launcher(router))
        await serves(router, 99)

    check(run, tmp_path)


def is_healthy(router: Router) -> bool:
    """As the last heartbeat says."""
    stats = [message for message in router.sent if isinstance(message, RouterStats)][-1]
    return stats.has_workers and not stats.is_sleeping


def replied(reply: RlReply, method: str) -> bool:
    return (reply.status, reply.method) == (200, method)


def test_weights_move_to_the_host_and_the_workers_stay(tmp_path: Path) -> None:
    async def scenario(router: Router, launcher: Launcher) -> None:
        workers = launcher.workers
        assert replied(await ask(router, Sleep(1, mode="keep")), "weights_on_host")
        assert (workers.memory, launcher.asked) == ([ALL], [WATCH])
        assert not is_healthy(router)
        assert replied(await ask(router, Sleep(2)), "weights_on_host")  # again: nothing to do
        router.send(request(1))

        reply = await ask(router, WakeUp(3))

        assert replied(reply, "weights_on_host")
        assert not reply.state.is_sleeping
        assert (workers.memory, launcher.asked) == ([ALL, NOTHING], [WATCH, START])
        assert is_healthy(router)
        await router.until(lambda: router.has_finished(1))
        assert launcher.workers is workers

    check_sleep(tmp_path, scenario)


def test_tags_move_one_after_the_other(tmp_path: Path) -> None:
    async def scenario(router: Router, launcher: Launcher) -> None:
        memory = launcher.workers.memory
        assert replied(await ask(router, Sleep(1, tags=["weights"])), "weights_on_host")
        assert replied(await ask(router, Sleep(2, tags=["kv_cache"])), "weights_on_host")
        assert replied(await ask(router, WakeUp(3, tags=["weights"])), "weights_on_host")
        assert memory == [WEIGHTS, ALL, KV]
        router.send(request(1))
        assert is_healthy(router)

        reply = await ask(router, WakeUp(4, tags=["kv_cache"]))

        assert replied(reply, "kv_unmapped")
        assert memory == [WEIGHTS, ALL, KV, NOTHING]
        await router.until(lambda: router.has_finished(1))

    check_sleep(tmp_path, scenario)


def test_a_deep_sleep_stops_the_workers(tmp_path: Path) -> None:
    async def scenario(router: Router, launcher: Launcher) -> None:
        workers = launcher.workers
        assert replied(await ask(router, Sleep(1)), "weights_on_host")
        assert replied(await ask(router, Sleep(2, keeps_weights=False)), "workers_stopped")
        assert launcher.asked == [WATCH, STOP]
        assert not is_healthy(router)

        assert replied(await ask(router, WakeUp(3)), "workers_stopped")

        assert launcher.asked == [WATCH, STOP, START]
        assert launcher.workers is not workers
        assert launcher.workers.memory == []

    check_sleep(tmp_path, scenario)


def test_workers_that_cannot_move_their_weights_are_stopped(tmp_path: Path) -> None:
    async def scenario(router: Router, launcher: Launcher) -> None:
        launcher.use(Workers("the host has 5 bytes of free memory"))
        assert replied(await ask(router, Sleep(1)), "workers_stopped")
        assert launcher.asked == [STOP]
        assert replied(await ask(router, WakeUp(2)), "workers_stopped")

    check_sleep(tmp_path, scenario)


def test_a_server_whose_trainer_still_has_the_memory_sleeps_on(tmp_path: Path) -> None:
    async def scenario(router: Router, launcher: Launcher) -> None:
        await ask(router, Sleep(1))
        launcher.workers.error = "CUDA out of memory"

        reply = await ask(router, WakeUp(2))

        assert "CUDA out of memory" in reply.message
        assert reply.status == 500
        assert reply.state.is_sleeping
        assert launcher.asked == [WATCH, START, WATCH]
        launcher.workers.error = ""
        assert replied(await ask(router, WakeUp(3)), "weights_on_host")

    check_sleep(tmp_path, scenario)


def test_workers_that_die_in_their_sleep_are_started_by_the_wake_up(tmp_path: Path) -> None:
    async def scenario(router: Router, launcher: Launcher) -> None:
        await ask(router, Sleep(1, mode="keep"))
        launcher.workers.is_lost = True
        router.manager.steps.check_workers()
        router.manager.rl.sleep.on_workers_stopped()  # the launcher has seen it too
        router.send(request(1))

        assert replied(await ask(router, WakeUp(2)), "workers_stopped")

        assert launcher.asked == [WATCH, START]
        await router.until(lambda: router.has_finished(1))
        assert replied(await ask(router, Sleep(3)), "weights_on_host")
        await ask(router, WakeUp(4))

    check_sleep(tmp_path, scenario)


def test_workers_that_die_while_they_wake_up_come_back_with_all_their_memory(tmp_path: Path) -> None:
    async def scenario(router: Router, launcher: Launcher) -> None:
        await ask(router, Sleep(1))
        launcher.workers.dies_at = NOTHING

        assert (await ask(router, WakeUp(2))).status == 200

        router.manager.steps.check_workers()
        router.manager.rl.sleep.on_workers_stopped()  # of the sleep, but late
        launcher.use(Workers())
        assert launcher.workers.memory == []
        assert not router.manager.rl.sleep.is_asleep

    check_sleep(tmp_path, scenario)


def test_a_sleep_without_workers_is_refused(tmp_path: Path) -> None:
    async def scenario(router: Router, launcher: Launcher) -> None:
        launcher.workers.dies_at = ALL

        reply = await ask(router, Sleep(1))

        assert reply.status == 409
        assert "the workers are being replaced; retry" in reply.message
        assert not reply.state.is_sleeping
        launcher.use(Workers())
        await serves(router, 1)
        assert launcher.workers.memory == []
        assert replied(await ask(router, Sleep(2)), "weights_on_host")
        await ask(router, WakeUp(3))

    check_sleep(tmp_path, scenario)


def test_workers_that_come_in_a_sleep_are_stopped(tmp_path: Path) -> None:
    """They died before the launcher knew of the sleep."""

    async def scenario(router: Router, launcher: Launcher) -> None:
        await ask(router, Sleep(1))

        launcher.use(Workers())

        await until(lambda: launcher.asked[-1:] == [STOP])
        assert replied(await ask(router, WakeUp(2)), "workers_stopped")

    check_sleep(tmp_path, scenario)


@pytest.mark.parametrize("method", ["sleep", "wake"])
def test_one_call_waits_for_the_other(tmp_path: Path, method: str) -> None:
    async def scenario(router: Router, launcher: Launcher) -> None:
        first, second = (Sleep(1), WakeUp(2)) if method == "wake" else (Sleep(1), Sleep(2))
        router.manager.rl.put(first)
        await ask(router, second)
        await ask(router, WakeUp(3))
        assert launcher.workers.memory == [ALL, NOTHING]

    check_sleep(tmp_path, scenario)
