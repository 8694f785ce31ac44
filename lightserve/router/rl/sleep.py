"""Sleep: the workers are stopped, which frees all their memory, and started again. The router keeps the requests.

    Sleep ─▶ pause ─▶ StopWorkers to the launcher ─▶ WorkersStopped        WakeUp ─▶ StartWorkers ─▶ NewWorkers

Requests that come meanwhile wait in the queue. Without the tag ``weights``, the workers stay: they free the memory of
their KV cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from lightserve.errors import ConflictError, ServerError
from lightserve.ipc.worker_calls import SET_KV_MEMORY
from lightserve.messages.control import StartWorkers, StopWorkers
from lightserve.messages.rl import MEMORY_TAGS, PauseGeneration, RlReply, Sleep, WakeUp
from lightserve.messages.worker_calls import KvMemory
from lightserve.router.rl.pause import PauseControl
from lightserve.router.step_loop import StepLoop
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

_SLEEP = "sleep"
GRAPHS = "cuda_graph"
STOPPED, FREED, UNMAPPED, KEPT = "workers_stopped", "kv_freed", "kv_unmapped", "memory_kept"
KV = "kv_cache"
KV_TIMEOUT_S = 600.0  # steps may be captured again


class SleepControl:
    def __init__(self, steps: StepLoop, pause: PauseControl) -> None:
        self.is_asleep = False  # the workers are stopped
        self._steps = steps
        self._pause = pause
        self._released: set[str] = set()  # tags; no step runs until all of them are resumed
        self._is_kv_freed = False  # by workers that stay
        self._keeps_graphs = False  # while it is freed
        self._send: Callable[[StopWorkers | StartWorkers], None] | None = None
        self._done: asyncio.Future[None] | None = None  # what the launcher was asked for
        self._lock = asyncio.Lock()

    @property
    def is_sleeping(self) -> bool:
        return bool(self._released)

    def connect(self, send: Callable[[StopWorkers | StartWorkers], None]) -> None:
        """``send``: to the launcher, which replies by ``on_workers_changed``."""
        self._send = send

    def on_workers_changed(self) -> None:
        """The workers have stopped, or new ones are connected."""
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def sleep(self, message: Sleep) -> RlReply:
        """Without the tag ``weights``, the workers stay, with their weights."""
        async with self._lock:
            tags = set(message.tags or MEMORY_TAGS)
            if tags <= self._released:
                return RlReply(0, method=self._method)
            await self._pause_for_sleep(message)
            self._released |= tags
            if "weights" in tags and not self.is_asleep:
                await self._stop()
            elif KV in tags and not self.is_asleep:
                await self._set_kv_memory(is_released=True)
            return RlReply(0, method=self._method, count=self._pause.num_open)

    async def wake(self, message: WakeUp) -> RlReply:
        """The reply comes when new workers have loaded the model. Steps run when weights and KV are resumed.

        Workers come with their graphs, and many trainers do not know a tag for those.
        """
        async with self._lock:
            since_s, method = time.monotonic(), self._method
            if self.is_asleep:
                await self._start()
            elif KV in (message.tags or MEMORY_TAGS) and self._is_kv_freed:
                await self._set_kv_memory(is_released=False)
            self._released -= set(message.tags or MEMORY_TAGS)
            if self._released <= {GRAPHS}:
                self._released.clear()
                self._steps.release(_SLEEP)
            seconds = time.monotonic() - since_s
            if method == STOPPED:
                logger.info("awake after %.2f s: %d requests go on", seconds, self._pause.num_open)
            return RlReply(0, method=method, seconds=seconds)

    @property
    def _method(self) -> str:
        if self.is_asleep:
            return STOPPED
        if not self._is_kv_freed:
            return KEPT
        return UNMAPPED if self._keeps_graphs else FREED

    async def _set_kv_memory(self, *, is_released: bool) -> None:
        """If it fails, some workers may have freed theirs. Workers that are lost have none: see ``free_again``."""
        self._is_kv_freed = True
        async with asyncio.timeout(KV_TIMEOUT_S):
            reply = await self._steps.call_workers(SET_KV_MEMORY, KvMemory(is_released))
        if reply is not None and reply.error:
            raise ServerError(f"the memory of the KV cache could not be changed: {reply.error}")
        self._is_kv_freed = is_released
        self._keeps_graphs = reply is not None and reply.keeps_graphs
        if is_released:
            self._pause.forget_kv()

    async def free_again(self) -> None:
        """New workers have come, with the memory that the trainer was given."""
        async with self._lock:
            if not self._is_kv_freed:
                return
            try:
                await self._set_kv_memory(is_released=True)
            except (ServerError, TimeoutError) as error:
                logger.error("new workers keep the memory of their KV cache, which a trainer has released: %s", error)
            else:
                logger.info("new workers have freed the memory of their KV cache, as a trainer has asked")

    async def _pause_for_sleep(self, message: Sleep) -> None:
        was_paused = self._pause.is_paused
        pause = PauseGeneration(0, message.mode, refuses_new=message.mode == "wait", clears_cache=True)
        await self._pause.pause(pause)
        self._steps.hold(_SLEEP)
        if not was_paused:
            self._pause.clear()

    async def _stop(self) -> None:
        if not self._steps.has_workers:
            raise ConflictError("the workers are being replaced; retry in a few seconds")
        self.is_asleep, self._is_kv_freed = True, False
        self._steps.suspend_workers()
        await self._ask_launcher(StopWorkers())
        self._steps.close_workers()
        logger.info("asleep: the workers are stopped, %d requests stay", self._pause.num_open)

    async def _start(self) -> None:
        await self._ask_launcher(StartWorkers())
        self.is_asleep = False

    async def _ask_launcher(self, message: StopWorkers | StartWorkers) -> None:
        if self._send is None:
            raise RuntimeError("a sleep came before the router ran")
        self._done = asyncio.get_running_loop().create_future()
        self._send(message)
        await self._done
