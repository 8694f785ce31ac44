"""Stores a response while it is written."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from lightserve.httpserver.http.body import JsonObject
from lightserve.httpserver.openai.responses.response import ResponsesResponse
from lightserve.httpserver.openai.responses.store import QUEUED, ResponseStore


@dataclass(slots=True)
class SavedResponse:
    """Stores a response: when the client learns its id, and when it ends."""

    store: ResponseStore
    owner: str
    response: ResponsesResponse
    input: list[JsonObject]
    has_begun: bool = False  # ``save`` was called
    is_stored: bool = False
    is_queued: bool = False  # as it is stored
    is_final: bool = False

    async def save(self) -> None:
        if self.is_final or (self.has_begun and not self.response.has_ended):
            return
        is_first, self.has_begun, self.is_final = not self.has_begun, True, self.response.has_ended
        body = self.response.body()
        self.is_queued = body["status"] == QUEUED
        if is_first:
            self.is_stored = await self.store.add(self.owner, body, self.input)
        elif self.is_stored:
            await self.store.update(self.owner, body)

    async def save_begun(self) -> None:
        """Store the state of a background response after its first tokens; its end is stored by ``save``."""
        if self.is_queued and not self.response.has_ended:
            self.is_queued = False
            await self.store.update(self.owner, self.response.body())

    def cancel(self) -> None:
        """The client has disconnected."""
        if self.is_stored and not self.is_final:
            self.response.cancel()
            self.store.update_later(self.owner, self.response.body())


async def saved_events(events: AsyncGenerator[bytes, None], saved: SavedResponse) -> AsyncGenerator[bytes, None]:
    """The response is stored before the client knows that it has ended: its next request may refer to it."""
    try:
        async with aclosing(events):
            async for event in events:
                await saved.save()
                yield event
    finally:
        saved.cancel()
