"""The control calls of a trainer in the router: each is handled by a separate task, and gets one reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from lightserve.errors import ConflictError, LightserveError
from lightserve.ipc.channel import Sender
from lightserve.messages.output import ToDetokenization
from lightserve.messages.rl import (
    AbortAll,
    FlushCache,
    GetRlState,
    PauseGeneration,
    ResumeGeneration,
    RlQuery,
    RlReply,
    RlState,
    Sleep,
    WakeUp,
)
from lightserve.router.rl.pause import PauseControl
from lightserve.router.rl.sleep import SleepControl
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

NOT_ENABLED = "this engine takes no weights of trainers; start it with --enable_rl"

Q = TypeVar("Q", bound=RlQuery)


class RlControl:
    def __init__(self, pause: PauseControl, sleep: SleepControl, replies: Sender[ToDetokenization]) -> None:
        self.num_ranks = 1
        self.pause = pause
        self.sleep = sleep
        self._replies = replies
        self._handlers: dict[type[Any], Callable[[Any], Awaitable[RlReply]]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self.handle(GetRlState, self._get_state)
        self.handle(PauseGeneration, pause.pause)
        self.handle(ResumeGeneration, pause.resume)
        self.handle(FlushCache, pause.flush)
        self.handle(AbortAll, pause.abort_all)
        self.handle(Sleep, sleep.sleep)
        self.handle(WakeUp, sleep.wake)

    @property
    def state(self) -> RlState:
        return RlState(self.pause.is_paused, self.sleep.is_sleeping)

    def handle(self, query_type: type[Q], handler: Callable[[Q], Awaitable[RlReply]]) -> None:
        """From now on, ``handler`` answers these queries. The id of its reply does not matter."""
        self._handlers[query_type] = handler

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            await asyncio.Event().wait()

    def put(self, message: RlQuery) -> None:
        if self._tasks is None:
            raise RuntimeError("a control call came before the router ran")
        self._tasks.create_task(self._answer(message))

    def on_new_workers(self) -> None:
        """They are used from now on."""
        self.sleep.on_workers_changed()
        if self._tasks is not None:
            self._tasks.create_task(self.sleep.free_again())  # a sleep or wake may be waiting for the launcher

    async def _answer(self, message: RlQuery) -> None:
        try:
            handler = self._handlers.get(type(message))
            if handler is None:
                raise ConflictError(NOT_ENABLED)
            reply = await handler(message)
        except LightserveError as error:
            reply = RlReply(0, error.status, str(error))
        except Exception as error:  # requests must not end because a control call fails
            logger.exception("the control call %s failed", type(message).__name__)
            reply = RlReply(0, 500, f"{type(error).__name__}: {error}")
        self._replies.send(msgspec.structs.replace(reply, query_id=message.query_id, state=self.state))

    async def _get_state(self, message: GetRlState) -> RlReply:
        return RlReply(0, count=self.num_ranks)
