"""Questions of an operator to the router, and its replies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar

from lightserve.errors import UnavailableError, error_from_status
from lightserve.ipc.channel import Sender
from lightserve.messages.output import AdapterCard, AdapterReply, QueryReply
from lightserve.messages.request import REQ_ID_BITS, ListAdapters, ToRouter

R = TypeVar("R", bound=QueryReply)

REPLY_TIMEOUT_S = 5.0  # a router that runs replies within milliseconds


class RouterQueries:
    """Several may be open at once. A reply that comes too late is ignored."""

    def __init__(self, http_process: int, to_router: Sender[ToRouter]) -> None:
        self._to_router = to_router
        self._ids = itertools.count(http_process << REQ_ID_BITS)
        self._open: dict[int, asyncio.Future[QueryReply]] = {}

    async def ask(
        self, make_query: Callable[[int], ToRouter], reply_type: type[R], timeout_s: float = REPLY_TIMEOUT_S
    ) -> R:
        """Send the query that ``make_query`` makes of an id, and wait for its reply."""
        query_id = next(self._ids)
        reply = self._open[query_id] = asyncio.get_running_loop().create_future()
        try:
            self._to_router.send(make_query(query_id))
            async with asyncio.timeout(timeout_s):
                result = await reply
        except TimeoutError as error:
            raise UnavailableError(f"the router did not reply within {timeout_s:g} s") from error
        finally:
            del self._open[query_id]
        if not isinstance(result, reply_type):
            raise TypeError(f"the reply to a query must be {reply_type.__name__}, not {result!r}")
        return result

    async def ask_adapters(
        self, make_query: Callable[[int], ToRouter], timeout_s: float = REPLY_TIMEOUT_S
    ) -> AdapterReply:
        """The same about adapters. A reply that is an error is raised."""
        reply = await self.ask(make_query, AdapterReply, timeout_s)
        if reply.status != 200:
            raise error_from_status(reply.status, reply.message)
        return reply

    async def adapters(self) -> list[AdapterCard]:
        """All LoRA adapters that have a name."""
        return (await self.ask_adapters(ListAdapters)).adapters

    async def find_adapter(self, name: str) -> None:
        """Raise if a request cannot use this adapter."""
        await self.ask_adapters(lambda query_id: ListAdapters(query_id, name))

    def resolve(self, reply: QueryReply) -> None:
        future = self._open.get(reply.query_id)
        if future is not None and not future.done():
            future.set_result(reply)
