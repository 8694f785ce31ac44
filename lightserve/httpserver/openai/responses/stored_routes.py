"""The routes of stored responses: GET, DELETE, cancel, input_items."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import InvalidRequestError, NotSupportedYetError, ResponseNotFoundError, UnavailableError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import json_response
from lightserve.httpserver.openai.responses.history import listed_items
from lightserve.httpserver.openai.responses.store import RUNNING, ResponseStore, StoredResponse

PATH = "/v1/responses/{response_id}"
POLL_S = 0.02
MAX_POLLS = 500  # a cancelled response ends after two messages between processes


def add_stored_routes(router: APIRouter, context: ServerContext, store: ResponseStore) -> None:
    async def stored(request: Request, response_id: str) -> StoredResponse:
        stored_response = await store.get(context.owner(request), response_id)
        if stored_response is None:
            raise ResponseNotFoundError(response_id)
        return stored_response

    @router.get(PATH)
    async def get_response(request: Request, response_id: str, stream: bool = False) -> Response:
        """A stored response."""
        if stream:
            raise NotSupportedYetError("stream: streaming a stored response", "stream")
        return json_response((await stored(request, response_id)).response)

    @router.delete(PATH)
    async def delete_response(request: Request, response_id: str) -> Response:
        """Delete a stored response. One that runs in the background ends: nobody can read it any more."""
        response = (await stored(request, response_id)).response
        if response["background"] and response["status"] in RUNNING:
            context.manager.abort_requests(response_id)
        if not await store.delete(context.owner(request), response_id):
            raise ResponseNotFoundError(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @router.post(f"{PATH}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        """End a response that is being streamed or runs in the background, in whichever HTTP process."""
        _check_running((await stored(request, response_id)).response["status"], response_id)
        context.manager.abort_requests(response_id)
        ended = await _wait_until_ended(lambda: stored(request, response_id), response_id)
        return json_response(ended.response)

    @router.get(f"{PATH}/input_items")
    async def list_input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """The items that the model got, with those of previous responses."""
        return json_response(listed_items(await stored(request, response_id), order, after, limit))


async def _wait_until_ended(fetch: Callable[[], Awaitable[StoredResponse]], response_id: str) -> StoredResponse:
    for _ in range(MAX_POLLS):
        stored_response = await fetch()
        if stored_response.response["status"] not in RUNNING:
            return stored_response
        await asyncio.sleep(POLL_S)
    raise UnavailableError(f"response {response_id!r} did not end within {MAX_POLLS * POLL_S:.0f} s")


def _check_running(status: str, response_id: str) -> None:
    if status not in RUNNING:
        raise InvalidRequestError(
            f"response {response_id!r} is {status}; only a response that is in progress can be cancelled", "response_id"
        )
