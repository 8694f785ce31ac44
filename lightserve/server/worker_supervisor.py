"""Restarts the model workers, all ranks together, unless they fail again and again.

    watch ─▶ one dies ─▶ kill the other ranks ─▶ wait until all exited ─▶ start new ones ─▶ inform the router ─▶ watch

The router detects the lost connection itself, keeps every request with its tokens, and continues on the new workers.
New workers start only after the old ones have exited: until then, the old ones may hold GPU memory.
"""

from __future__ import annotations

import asyncio
import time

from lightserve.config import LaunchConfig
from lightserve.io_struct import NewWorkers, WorkersLost
from lightserve.server.banner import print_error, print_line
from lightserve.server.child_process import EXIT_GRACE_S
from lightserve.server.engine_processes import EngineProcesses
from lightserve.server.process_group import EXIT_SETTLE_S

MAX_FAILED_RESTARTS = 3  # in a row; then the cause is not an accident
MIN_UPTIME_S = 60.0  # a new worker that dies sooner after its ready message counts as a failed restart
MIN_LOAD_TIMEOUT_S = 120.0  # for new workers to become ready, or LOAD_TIMEOUT_FACTOR times the first start
LOAD_TIMEOUT_FACTOR = 5.0
REAP_TIMEOUT_S = 60.0  # until a killed process has exited; a GPU driver may delay that


class WorkerSupervisor:
    def __init__(self, processes: EngineProcesses, config: LaunchConfig) -> None:
        self._processes = processes
        self._begin_s = time.monotonic()
        self._may_restart = config.restart_worker == "on"
        self._failed_restarts = 0
        self._generation_lost_to_request: int | None = None  # the last one
        self._ready_s: float | None = None  # when the present replacements were ready; None: not yet

    @property
    def load_timeout_s(self) -> float:
        """For new workers to become ready."""
        limit_s = max(MIN_LOAD_TIMEOUT_S, LOAD_TIMEOUT_FACTOR * (self._processes.ready_s - self._begin_s))
        return limit_s + self._processes.node_timeout_s

    @property
    def _can_restart(self) -> bool:
        return self._may_restart and self._processes.engine is not None and not self._processes.is_node_missing

    async def run(self) -> None:
        """Restart workers until a death that must end the server, and raise it as ChildDiedError."""
        died = await self._processes.wait_worker_death()
        while self._can_restart and not await self._must_give_up():
            print_error(f"{died}; restarting the workers")
            since_s, self._ready_s = time.monotonic(), None
            if not await self._processes.reap_workers(REAP_TIMEOUT_S):
                print_error(f"a killed model worker did not exit within {REAP_TIMEOUT_S:.0f} s: giving up")
                break
            await self._processes.start_workers()
            announcing = asyncio.create_task(self._announce(since_s, self.load_timeout_s))
            try:
                died = await self._processes.wait_worker_death()
            finally:
                announcing.cancel()
            self._count_restart()
        raise died

    async def handle_router_reports(self) -> None:
        """The router reports workers that disconnected or hang. Kill those that do not exit by themselves."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                lost = await self._processes.router.worker_failures.get()
                if lost.caused_by_request:
                    self._generation_lost_to_request, self._failed_restarts = lost.generation, 0
                tasks.create_task(self._kill_lost(lost))  # the next report must not wait for this one

    async def _kill_lost(self, lost: WorkersLost) -> None:
        if lost.generation == self._processes.generation:
            await asyncio.sleep(EXIT_GRACE_S)  # the worker may be exiting, and still report its error
        if lost.generation == self._processes.generation:
            self._processes.kill_workers(lost.reason)

    def _count_restart(self) -> None:
        ran_long = self._ready_s is not None and time.monotonic() - self._ready_s >= MIN_UPTIME_S
        # the router's report may also come later
        caused_by_request = self._generation_lost_to_request == self._processes.generation
        self._failed_restarts = 0 if ran_long or caused_by_request else self._failed_restarts + 1

    async def _must_give_up(self) -> bool:
        if self._failed_restarts < MAX_FAILED_RESTARTS:
            return False
        await asyncio.sleep(EXIT_SETTLE_S)  # the router may be about to report that a request caused the crash
        if self._failed_restarts < MAX_FAILED_RESTARTS:
            return False
        print_error(f"{self._failed_restarts} new workers in a row died within {MIN_UPTIME_S:.0f} s: giving up")
        return True

    async def _announce(self, since_s: float, timeout_s: float) -> None:
        """Inform the router when the new workers are ready."""
        try:
            async with asyncio.timeout(timeout_s):
                engine = await self._processes.wait_workers_ready()
        except TimeoutError:
            self._processes.kill_workers(f"it was not ready within {timeout_s:.0f} s")
            return
        if engine != self._processes.engine:
            self._processes.kill_workers("it serves a different model than the worker it replaces")
            return
        self._processes.router.send(NewWorkers(self._processes.generation))
        self._ready_s = time.monotonic()
        print_line(f"a new model worker is ready, {self._ready_s - since_s:.1f} s after the last one died")
