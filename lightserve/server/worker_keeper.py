"""Model workers that die are replaced, all ranks together, unless they die again and again.

    watch ─▶ one died ─▶ end the other ranks ─▶ wait until all are gone ─▶ start new ones ─▶ tell the router ─▶ watch

The router notices by itself that its workers are gone, keeps every request with its tokens, and goes on with the new
ones. Nobody starts before the last is gone: only a process that was waited for holds no memory of a GPU.
"""

from __future__ import annotations

import asyncio
import time

from lightserve.config import LaunchConfig
from lightserve.io_struct import NewWorkers, WorkersLost
from lightserve.server.banner import say
from lightserve.server.child import LAST_WORDS_S
from lightserve.server.fleet import BLINK_S, Fleet

MAX_SHORT_LIVES = 3  # of workers that replaced others, one after the other: then it is no accident
SHORT_LIFE_S = 60.0  # from the ready word to the death
LEAST_LOAD_S = 120.0  # that new workers get to become ready, or LOAD_TIMES as long as the first took
LOAD_TIMES = 5.0
BURIAL_S = 60.0  # until a killed process is gone, which a driver may hold up


class WorkerKeeper:
    def __init__(self, fleet: Fleet, config: LaunchConfig) -> None:
        self._fleet = fleet
        self._may_replace = config.restart_worker == "on"
        self._short_lives = 0
        self._excused: int | None = None  # the last generation of workers that a request is to blame for
        self._ready_s: float | None = None  # when those that are there replaced others; None: they have not yet

    async def run(self) -> None:
        """Until a death that ends the server, which is raised as ChildDiedError."""
        begin_s = time.monotonic()
        died = await self._fleet.worker_death()
        load_limit_s = max(LEAST_LOAD_S, LOAD_TIMES * (self._fleet.ready_s - begin_s))
        while self._may_replace and self._fleet.engine is not None and not await self._is_hopeless():
            say(f"{died}; starting another")
            since_s, self._ready_s = time.monotonic(), None
            if not await self._fleet.bury_workers(BURIAL_S):
                say("a worker that was killed does not end: giving up")
                break
            await self._fleet.start_workers()
            announcing = asyncio.create_task(self._announce(since_s, load_limit_s))
            try:
                died = await self._fleet.worker_death()
            finally:
                announcing.cancel()
            self._count_life()
        raise died

    async def heed_router(self) -> None:
        """It tells of workers that are gone, or should be: who hangs, or hung up and does not end, is made to."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                lost = await self._fleet.router.complaints.get()
                if lost.is_explained:
                    self._excused, self._short_lives = lost.generation, 0
                tasks.create_task(self._put_down(lost))  # meanwhile the next may be excused

    async def _put_down(self, lost: WorkersLost) -> None:
        if lost.generation == self._fleet.generation:
            await asyncio.sleep(LAST_WORDS_S)  # it may just be ending, and have something to say
        if lost.generation == self._fleet.generation:
            self._fleet.put_down_workers(lost.why)

    def _count_life(self) -> None:
        is_long = self._ready_s is not None and time.monotonic() - self._ready_s >= SHORT_LIFE_S
        is_excused = self._excused == self._fleet.generation  # else the router may be about to tell
        self._short_lives = 0 if is_long or is_excused else self._short_lives + 1

    async def _is_hopeless(self) -> bool:
        if self._short_lives < MAX_SHORT_LIVES:
            return False
        await asyncio.sleep(BLINK_S)  # the router may be about to tell that a request was to blame
        if self._short_lives < MAX_SHORT_LIVES:
            return False
        say(f"{self._short_lives} new workers in a row died within {SHORT_LIFE_S:.0f} s: giving up")
        return True

    async def _announce(self, since_s: float, limit_s: float) -> None:
        """Tell the router when the new ones are ready."""
        try:
            async with asyncio.timeout(limit_s):
                engine = await self._fleet.workers_ready()
        except TimeoutError:
            self._fleet.put_down_workers(f"it was not ready within {limit_s:.0f} s")
            return
        if engine != self._fleet.engine:
            self._fleet.put_down_workers("it serves another model than the worker that it replaces")
            return
        self._fleet.router.send(NewWorkers(self._fleet.generation))
        self._ready_s = time.monotonic()
        say(f"a new model worker is ready, {self._ready_s - since_s:.1f} s after the last one died")
