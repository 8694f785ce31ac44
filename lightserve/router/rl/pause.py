"""Pause and resume of an engine, aborts, and the end of all cached prefixes, for a trainer."""

from __future__ import annotations

from collections.abc import Callable

from lightserve.errors import ConflictError
from lightserve.messages.rl import AbortAll, FlushCache, PauseGeneration, ResumeGeneration, RlReply
from lightserve.router.output_processor import OutputProcessor
from lightserve.router.scheduler import Scheduler
from lightserve.router.step_loop import StepLoop
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

PAUSED = "the server is paused by its trainer; retry after POST /resume or /continue_generation"
_PAUSE, _FLUSH = "pause", "flush"


class PauseControl:
    def __init__(self, scheduler: Scheduler, steps: StepLoop, output_processor: OutputProcessor) -> None:
        self.refusal = ""  # why new requests are refused now; empty: they are not
        self.on_kv_freed: Callable[[], None] = lambda: None
        self._scheduler = scheduler
        self._steps = steps
        self._output_processor = output_processor
        self._pause: PauseGeneration | None = None

    @property
    def is_paused(self) -> bool:
        return self._pause is not None

    @property
    def num_open(self) -> int:
        scheduler = self._scheduler
        return scheduler.num_running + scheduler.num_waiting + scheduler.num_blocked

    async def pause(self, message: PauseGeneration) -> RlReply:
        """The reply comes when no step is in flight. A second pause adds to the first one."""
        self._pause = message
        self.refusal = PAUSED if message.refuses_new and message.mode != "keep" else ""
        if message.mode == "wait":
            self._steps.release(_PAUSE)  # of an earlier pause
            await self._steps.wait_until(lambda: not self.num_open or self._pause is not message)
        elif message.mode == "abort":
            self._abort_all()
        if self._pause is not message:
            raise ConflictError("the server was resumed, or paused in another way, before this pause was reached")
        self._steps.hold(_PAUSE)
        await (self._steps.wait_unwritten() if message.clears_cache else self._steps.wait_idle())
        if message.clears_cache and self._pause is message:
            self._scheduler.clear_cache()
        logger.info("generation is paused (mode %s): %d requests stay", message.mode, self.num_open)
        return RlReply(0, count=self.num_open)

    async def resume(self, message: ResumeGeneration) -> RlReply:
        self.clear()
        logger.info("generation goes on: %d requests", self.num_open)
        return RlReply(0, count=self.num_open)

    def clear(self) -> None:
        self._pause, self.refusal = None, ""
        self._steps.release(_PAUSE)

    async def flush(self, message: FlushCache) -> RlReply:
        """Requests that are paused compute their tokens again."""
        if self.num_open and not message.preempts and not self.is_paused:
            raise ConflictError(f"the cache is in use: {self.num_open} requests are open; wait, abort or pause them")
        self._steps.hold(_FLUSH)
        try:
            await self._steps.wait_unwritten()
            self._scheduler.clear_cache()
        finally:
            self._steps.release(_FLUSH)
        return RlReply(0)

    def forget_kv(self) -> None:
        """Its memory is freed, also of what is pinned. No step is in flight."""
        self.on_kv_freed()
        self._scheduler.clear_cache()

    async def abort_all(self, message: AbortAll) -> RlReply:
        return RlReply(0, count=self._abort_all())

    def _abort_all(self) -> int:
        ended = self._scheduler.drop(lambda req: not req.is_internal)
        self._output_processor.end(ended)
        self._steps.wake()
        return len(ended)
