"""Restarts the model workers, all ranks together, unless they fail again and again.

    watch ─▶ one dies ─▶ kill the other ranks ─▶ wait until all exited ─▶ start new ones ─▶ inform the router ─▶ watch

The router detects the lost connection itself, keeps every request with its tokens, and continues on the new workers.
New workers start only after the old ones have exited: until then, the old ones may hold GPU memory.
"""

from __future__ import annotations

import asyncio
import time

from lightserve.config import LaunchConfig
from lightserve.messages.control import NewWorkers, StartWorkers, StopWorkers, WorkersLost, WorkersStopped
from lightserve.server.banner import print_line
from lightserve.server.child_process import EXIT_GRACE_S, ChildDiedError
from lightserve.server.engine_processes import EngineProcesses
from lightserve.server.process_group import EXIT_SETTLE_S
from lightserve.server.supervisor import MAX_FAILED_RESTARTS, REAP_TIMEOUT_S, Supervisor

LOAD_TIMEOUT_FACTOR = 5.0  # new workers may take so many times as long to become ready as the first ones


class WorkerSupervisor(Supervisor):
    singular, plural, restarted = "model worker", "workers", "the workers"

    def __init__(self, processes: EngineProcesses, config: LaunchConfig) -> None:
        super().__init__(config)
        self._processes = processes
        self._begin_s = time.monotonic()
        self._generation_lost_to_request: int | None = None  # the last one
        self._is_stopping = False  # the router wants the workers to stop
        self._is_asleep = False  # the workers hold no weights: the router wants no new ones if they die
        self._must_start = asyncio.Event()  # the router wants workers again
        self._waking: asyncio.Task[None] | None = None

    @property
    def load_timeout_s(self) -> float:
        limit_s = max(super().load_timeout_s, LOAD_TIMEOUT_FACTOR * (self._processes.ready_s - self._begin_s))
        return limit_s + self._processes.node_timeout_s

    @property
    def _can_restart(self) -> bool:
        return self._processes.engine is not None and not self._processes.is_node_missing

    async def _wait_death(self) -> ChildDiedError:
        """Workers that the router has put to sleep have not died."""
        self._is_stopping = False
        while True:
            died = await self._processes.wait_worker_death()
            if not (self._is_stopping or self._is_asleep) or not await self._processes.reap_workers(REAP_TIMEOUT_S):
                return died
            await self._sleep()

    async def _sleep(self) -> None:
        """Until the router wakes up. Then a death of the new workers is one as any other."""
        self._is_stopping = self._is_asleep = False
        self._processes.router.send(WorkersStopped())
        print_line("asleep: the workers are stopped, and their memory is free")
        await self._must_start.wait()
        since_s = time.monotonic()
        await self._processes.start_workers()
        self._waking = asyncio.create_task(self._wait_awake(since_s))

    async def _wait_awake(self, since_s: float) -> None:
        if await self._is_joined(self.load_timeout_s):
            print_line(f"awake: the workers are ready after {time.monotonic() - since_s:.1f} s")

    async def _replace(self) -> bool:
        if not await self._processes.reap_workers(REAP_TIMEOUT_S):
            return False
        await self._processes.start_workers()
        return True

    async def _join(self) -> str:
        if await self._processes.wait_workers_ready() != self._processes.engine:
            return "it serves a different model than the worker it replaces"
        self._processes.router.send(NewWorkers(self._processes.generation))
        return ""

    def _kill(self, reason: str) -> None:
        self._processes.kill_workers(reason)

    async def handle_router_reports(self) -> None:
        """The router reports workers that disconnected or hang. Kill those that do not exit by themselves."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                lost = await self._processes.router.worker_reports.get()
                if not isinstance(lost, WorkersLost):
                    self._handle_sleep(lost)
                    continue
                if lost.caused_by_request:
                    self._generation_lost_to_request, self._failed_restarts = lost.generation, 0
                tasks.create_task(self._kill_lost(lost))  # the next report must not wait for this one

    def _handle_sleep(self, message: StopWorkers | StartWorkers) -> None:
        if isinstance(message, StartWorkers):
            self._is_asleep = False
            self._must_start.set()
            return
        self._must_start.clear()
        self._is_asleep = message.only_dead
        if not message.only_dead:
            self._is_stopping = True
            self._processes.kill_workers("the router sleeps")

    async def _kill_lost(self, lost: WorkersLost) -> None:
        if lost.generation == self._processes.generation:
            await asyncio.sleep(EXIT_GRACE_S)  # the worker may be exiting, and still report its error
        if lost.generation == self._processes.generation:
            self._processes.kill_workers(lost.reason)

    def _count_restart(self) -> None:
        super()._count_restart()
        if self._generation_lost_to_request == self._processes.generation:  # the report may also come later
            self._failed_restarts = 0

    async def _must_give_up(self) -> bool:
        if self._failed_restarts >= MAX_FAILED_RESTARTS:
            await asyncio.sleep(EXIT_SETTLE_S)  # the router may be about to report that a request caused the crash
        return await super()._must_give_up()
