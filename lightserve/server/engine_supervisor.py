"""Keeps the engines of a server running.

With one engine, the death of its router ends the server. With several (--dp), the requests of the dead engine go on in
the others, and the launcher starts a new router and new workers in its place. So it does for an engine of another
server (--listen). An engine that fails again and again is given up. The server ends when no engine is left.
"""

from __future__ import annotations

import asyncio
import time

from lightserve.config import LaunchConfig
from lightserve.server.banner import print_error, print_line
from lightserve.server.child_process import ChildDiedError
from lightserve.server.engine_processes import EngineProcesses
from lightserve.server.process_group import ProcessGroup
from lightserve.server.supervisor import MAX_FAILED_RESTARTS, MIN_UPTIME_S, REAP_TIMEOUT_S
from lightserve.server.worker_supervisor import WorkerSupervisor


async def supervise_engines(processes: ProcessGroup, config: LaunchConfig) -> None:
    """Raise the ChildDiedError that must end the server. A gateway has no engine to supervise."""
    supervisors = [EngineSupervisor(processes, engine, config) for engine in processes.engines]
    running = {asyncio.create_task(supervisor.run()) for supervisor in supervisors}
    try:
        while running:
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                died = task.result()
                if not running or config.restart_worker == "off" or not processes.is_ready:
                    raise died
                print_error(f"{died}: giving up this engine; {len(running)} of {len(supervisors)} are left")
    finally:
        for task in running:
            task.cancel()


class EngineSupervisor:
    def __init__(self, processes: ProcessGroup, engine: EngineProcesses, config: LaunchConfig) -> None:
        self._processes = processes
        self._engine = engine
        self._may_restart = config.restart_worker == "on" and processes.survives_routers
        self._workers = WorkerSupervisor(engine, config)
        self._failed_restarts = 0

    async def run(self) -> ChildDiedError:
        """Restart the engine until a death that must end it, and return that."""
        died = await self._wait_death()
        while self._may_restart and self._processes.is_ready and self._failed_restarts < MAX_FAILED_RESTARTS:
            if died.child is not self._engine.router and not self._failed_restarts:
                break  # the WorkerSupervisor has given up
            print_error(f"{died}; restarting engine {self._engine.index}")
            self._processes.announce_lost(self._engine)
            begin_s = time.monotonic()
            if not await self._engine.restart(REAP_TIMEOUT_S):
                print_error(f"a killed process did not exit within {REAP_TIMEOUT_S:.0f} s")
                break
            died = await self._load(begin_s) or await self._serve()
        if self._may_restart:
            self._processes.announce_lost(self._engine)
            await self._engine.stop(REAP_TIMEOUT_S)
        return died

    async def _serve(self) -> ChildDiedError:
        ready_s = time.monotonic()
        died = await self._wait_death()
        ran_long = time.monotonic() - ready_s >= MIN_UPTIME_S
        self._failed_restarts = 0 if ran_long else self._failed_restarts + 1
        return died

    async def _wait_death(self) -> ChildDiedError:
        """Wait for the death of the router, or one of a worker that the WorkerSupervisor does not survive."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._engine.router.watch())
                tasks.create_task(self._workers.run())
                tasks.create_task(self._workers.handle_router_reports())
        except* ChildDiedError as errors:
            deaths = [error for error in errors.exceptions if isinstance(error, ChildDiedError)]
        return next((died for died in deaths if died.child is self._engine.router), deaths[0])

    async def _load(self, begin_s: float) -> ChildDiedError | None:
        """Wait until the new engine is ready, and inform the dispatcher. Returns a death before that."""
        engine, limit_s = self._engine, self._workers.load_timeout_s
        watching = [asyncio.create_task(child.watch()) for child in (engine.router, *engine.workers)]
        loading = asyncio.create_task(engine.wait_ready())
        try:
            await asyncio.wait({loading, *watching}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and loading.result() == engine.engine:
                self._processes.announce(engine)
                print_line(f"engine {engine.index} is back, {time.monotonic() - begin_s:.1f} s after its router died")
                return None
            self._failed_restarts += 1
            late = f"its engine was not ready within {limit_s:.0f} s"
            engine.router.kill("its workers serve a different model than before" if loading.done() else late)
            await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            deaths = [task.exception() for task in watching if task.done()]
            return next(died for died in deaths if isinstance(died, ChildDiedError))
        finally:
            for task in (loading, *watching):
                task.cancel()
