"""Responses that are generated after their request was answered: ``background: true``.

The client polls the stored response. It outlives the connection, not the HTTP process that generates it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

from lightserve.errors import (
    InvalidRequestError,
    LightserveError,
    NotSupportedYetError,
    OverloadedError,
    ServerError,
    UnavailableError,
)
from lightserve.httpserver.chat.tool_rounds import ToolRounds
from lightserve.httpserver.engine_client import Generation
from lightserve.httpserver.http.errors import log_error
from lightserve.httpserver.openai.responses.request import ResponsesBody
from lightserve.httpserver.openai.responses.response import ResponsesResponse
from lightserve.httpserver.openai.responses.saving import SavedResponse


def check_background(body: ResponsesBody, is_stored: bool) -> None:
    if body.background and body.stream:
        raise NotSupportedYetError("background with stream", "background")
    if body.background and not is_stored:
        problem = "background: the response must be stored; leave out store: false"
        raise InvalidRequestError(f"{problem} (--response_store_size 0 turns the store off)", "background")


class BackgroundResponses:
    """Those of one HTTP process. A drain waits for them as for other requests."""

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, generation: Generation, saved: SavedResponse, rounds: ToolRounds | None = None) -> None:
        """Return when the client can read the response in the store. An engine that is not available is an error of
        this request."""
        if len(self._tasks) >= self._max_count:
            problem = f"background: {len(self._tasks)} responses run in the background"
            raise OverloadedError(f"{problem}; the limit is {self._max_count} (--response_store_size)", "background")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(generation)
            await saved.save()
            if not saved.is_stored:
                problem = "background: the response cannot be stored; the log of the server says why"
                raise UnavailableError(f"{problem} (--response_store_bytes limits its size)", "background")
            task = asyncio.create_task(_run(stack.pop_all(), generation, saved, rounds))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _run(
    started: AsyncExitStack, generation: Generation, saved: SavedResponse, rounds: ToolRounds | None
) -> None:
    """Generate until the end and store it. ``started`` ends the generation."""
    response, request_id = saved.response, generation.log.request_id
    try:
        async with started, aclosing(_events(generation, saved.response) if rounds is None else rounds.run()) as events:
            async for _ in events:
                await saved.save_begun()
    except Exception as error:  # nobody awaits the task: the stored response tells the client
        log_error(error, request_id)
        known = error if isinstance(error, LightserveError) else ServerError(str(error))
        response.error(known, request_id)
    finally:
        if not response.has_ended:  # the server ends
            response.cancel()
        await saved.save()


async def _events(generation: Generation, response: ResponsesResponse) -> AsyncGenerator[bytes, None]:
    async for outs in generation:
        yield response.write(outs)
