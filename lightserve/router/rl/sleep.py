"""Sleep: memory of the workers is freed for a trainer, and taken again. The router keeps the requests.

    Sleep ─▶ pause ─▶ workers move weights to the host, unmap KV        WakeUp ─▶ they map and copy back
                 └──▶ StopWorkers to the launcher ─▶ WorkersStopped     WakeUp ─▶ StartWorkers ─▶ NewWorkers

Workers that cannot move their weights are stopped, which frees everything, and started again. Requests that come
meanwhile wait in the queue. Without the tag ``weights``, only the memory of the KV cache is freed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from lightserve.errors import ConflictError, ServerError
from lightserve.ipc.worker_calls import SET_MEMORY
from lightserve.messages.control import StartWorkers, StopWorkers
from lightserve.messages.rl import MEMORY_TAGS, PauseGeneration, RlReply, Sleep, WakeUp
from lightserve.messages.worker_calls import ReleasedMemory
from lightserve.router.rl.pause import PauseControl
from lightserve.router.step_loop import StepLoop
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

_SLEEP = "sleep"
GRAPHS = "cuda_graph"
STOPPED, MOVED = "workers_stopped", "weights_on_host"
FREED, UNMAPPED, KEPT = "kv_freed", "kv_unmapped", "memory_kept"
WEIGHTS, KV = "weights", "kv_cache"
MEMORY_TIMEOUT_S = 600.0  # steps may be captured again
NO_WORKERS = "the workers are being replaced; retry in a few seconds"


class SleepControl:
    def __init__(self, steps: StepLoop, pause: PauseControl) -> None:
        self.is_asleep = False  # the workers are stopped
        self._steps = steps
        self._pause = pause
        self._released: set[str] = set()  # tags; no step runs until all of them are resumed
        self._memory = ReleasedMemory()  # by workers that stay
        self._keeps_graphs = False  # while that of the KV cache is freed
        self._is_watched = False  # the launcher starts no new workers if these die
        self._send: Callable[[StopWorkers | StartWorkers], None] | None = None
        self._done: asyncio.Future[None] | None = None  # what the launcher was asked for
        self._lock = asyncio.Lock()

    @property
    def is_sleeping(self) -> bool:
        return bool(self._released)

    def connect(self, send: Callable[[StopWorkers | StartWorkers], None]) -> None:
        """``send``: to the launcher, which replies by ``on_workers_changed``."""
        self._send = send

    def on_workers_stopped(self) -> None:
        """They were told to, or they have died in their sleep."""
        if self._is_watched:
            self._fall_asleep()
            self._steps.close_workers()
            logger.warning("the workers have died in their sleep: the wake-up starts new ones")
        self.on_workers_changed()

    def on_workers_changed(self) -> None:
        """The workers have stopped, or new ones are connected."""
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def sleep(self, message: Sleep) -> RlReply:
        """Without the tag ``weights``, the workers keep theirs."""
        async with self._lock:
            tags = set(message.tags or MEMORY_TAGS)
            if tags <= self._released and (message.keeps_weights or not self._memory.weights):
                return RlReply(0, method=self._method)
            await self._pause_for_sleep(message)
            before, self._released = self._released, self._released | tags
            try:
                if not self.is_asleep:
                    await self._free(message.keeps_weights)
            except ConflictError:  # nothing was freed
                self._hold_for(before)
                raise
            return RlReply(0, method=self._method, count=self._pause.num_open)

    async def wake(self, message: WakeUp) -> RlReply:
        """The reply comes when the weights are there. Steps run when weights and KV are resumed.

        Workers come with their graphs, and many trainers do not know a tag for those.
        """
        async with self._lock:
            since_s, method = time.monotonic(), self._method
            left = self._released - set(message.tags or MEMORY_TAGS)
            if self.is_asleep:
                await self._start()
            else:
                await self._take_back(self._wanted(left))
            self._hold_for(set() if left <= {GRAPHS} else left)
            seconds = time.monotonic() - since_s
            if method in (STOPPED, MOVED):
                logger.info("awake after %.2f s: %d requests go on", seconds, self._pause.num_open)
            return RlReply(0, method=method, seconds=seconds)

    def _hold_for(self, released: set[str]) -> None:
        self._released = released
        if not released:
            self._steps.release(_SLEEP)

    @property
    def _method(self) -> str:
        if self.is_asleep:
            return STOPPED
        if self._memory.weights:
            return MOVED
        if not self._memory.kv:
            return KEPT
        return UNMAPPED if self._keeps_graphs else FREED

    @staticmethod
    def _wanted(released: set[str]) -> ReleasedMemory:
        return ReleasedMemory(KV in released, WEIGHTS in released)

    async def _free(self, keeps_weights: bool) -> None:
        wanted = self._wanted(self._released)
        if not wanted.weights:
            await self._set_memory(wanted)
        elif not (keeps_weights and await self._moves_weights(wanted)):
            await self._stop()

    async def _moves_weights(self, wanted: ReleasedMemory) -> bool:
        """Have the workers move their weights to the host. False: they cannot."""
        try:
            await self._set_memory(wanted)
        except (ServerError, TimeoutError) as error:
            logger.info("the workers cannot keep their weights during a sleep, and are stopped: %s", error)
            return False
        self._watch(True)
        self._steps.set_sleeping(True)
        logger.info("asleep: the weights are in host memory, %d requests stay", self._pause.num_open)
        return True

    async def _take_back(self, wanted: ReleasedMemory) -> None:
        if wanted.weights or not self._memory.weights:
            await self._set_memory(wanted)
            return
        self._watch(False)
        try:
            await self._set_memory(wanted)
        except BaseException:
            self._watch(True)  # they still sleep: a trainer has the memory
            raise
        self._steps.set_sleeping(False)

    async def _set_memory(self, wanted: ReleasedMemory) -> None:
        """If it fails, some workers may have freed theirs. Workers that are lost have all: see ``free_again``."""
        if wanted == self._memory:
            return
        before = self._memory
        self._memory = ReleasedMemory(wanted.kv or before.kv, before.weights)
        async with asyncio.timeout(MEMORY_TIMEOUT_S):
            reply = await self._steps.call_workers(SET_MEMORY, wanted)
        if reply is not None and reply.error:
            raise ServerError(f"the memory of the workers could not be changed: {reply.error}")
        if reply is None and wanted.weights and not before.weights:
            self._memory = before
            raise ConflictError(NO_WORKERS)
        self._memory = wanted
        self._keeps_graphs = reply is not None and reply.keeps_graphs
        if wanted.kv:
            self._pause.forget_kv()

    async def free_again(self) -> None:
        """New workers have come, with the memory that the trainer was given."""
        async with self._lock:
            if self._memory == ReleasedMemory():
                return
            wanted, self._memory = self._memory, ReleasedMemory()
            try:
                if wanted.weights:
                    await self._stop()
                else:
                    await self._set_memory(wanted)
            except (ServerError, ConflictError, TimeoutError) as error:
                logger.error("new workers keep memory that a trainer has released: %s", error)
            else:
                logger.info("new workers have freed the memory that a trainer has asked for")

    async def _pause_for_sleep(self, message: Sleep) -> None:
        was_paused = self._pause.is_paused
        pause = PauseGeneration(0, message.mode, refuses_new=message.mode == "wait", clears_cache=True)
        await self._pause.pause(pause)
        self._steps.hold(_SLEEP)
        if not was_paused:
            self._pause.clear()

    async def _stop(self) -> None:
        if not self._steps.has_workers:
            raise ConflictError(NO_WORKERS)
        self._fall_asleep()
        await self._ask_launcher(StopWorkers())
        self._steps.close_workers()
        logger.info("asleep: the workers are stopped, %d requests stay", self._pause.num_open)

    def _fall_asleep(self) -> None:
        """There are no workers, or soon none."""
        self.is_asleep, self._memory, self._is_watched = True, ReleasedMemory(), False
        self._steps.suspend_workers()

    async def _start(self) -> None:
        await self._ask_launcher(StartWorkers())
        self.is_asleep = False

    def _watch(self, is_watched: bool) -> None:
        self._is_watched = is_watched
        self._to_launcher(StopWorkers(only_dead=True) if is_watched else StartWorkers())

    async def _ask_launcher(self, message: StopWorkers | StartWorkers) -> None:
        self._done = asyncio.get_running_loop().create_future()
        self._to_launcher(message)
        await self._done

    def _to_launcher(self, message: StopWorkers | StartWorkers) -> None:
        if self._send is None:
            raise RuntimeError("a sleep came before the router ran")
        self._send(message)
