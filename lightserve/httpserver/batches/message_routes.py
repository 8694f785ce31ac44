"""/v1/messages/batches, Anthropic's, over the same store."""

from __future__ import annotations

import asyncio
import datetime
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from lightserve.batches.line import MAX_DEPTH, MAX_LINES, is_too_deep
from lightserve.batches.records import OF_MESSAGES, OPEN, Batch, Status
from lightserve.batches.store import BatchStore
from lightserve.errors import ConflictError, InvalidRequestError
from lightserve.httpserver.batches.batch_routes import BatchNotFoundError, cancel, delete_ended, found_batch, new_batch
from lightserve.httpserver.batches.file_routes import content_response
from lightserve.httpserver.batches.storage import keep_file, write_lines
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body, JsonObject, json_response, openapi_body

PATH = "/v1/messages/batches"
MAX_PAGE = 1000
WINDOW = "24h"

CustomId = Annotated[str, Field(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_-]+$")]


class BatchedMessage(Body):
    custom_id: CustomId
    params: dict[str, Any]


class MessageBatchBody(Body):
    requests: Annotated[list[BatchedMessage], Field(min_length=1, max_length=MAX_LINES, fail_fast=True)]


def add_message_routes(router: APIRouter, context: ServerContext, store: BatchStore) -> None:
    @router.post(PATH, openapi_extra=openapi_body(MessageBatchBody))
    async def create_message_batch(request: Request) -> Response:
        """Run these requests when the server has nothing more urgent to do."""
        body = await context.read_body(request, MessageBatchBody)
        _check_custom_ids(body)
        owner = context.owner(request)
        batch = await asyncio.to_thread(_store_requests, store, owner, body, context.config.batch_dir_bytes)
        return json_response(_object(batch, request))

    @router.get(PATH)
    async def list_message_batches(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
        before_id: str | None = None,
        after_id: str | None = None,
    ) -> Response:
        """The batches of this API key, the newest first."""
        newest_first = before_id is None
        arguments = (context.owner(request), "anthropic", after_id if newest_first else before_id, limit + 1)
        listed = await asyncio.to_thread(store.batches, *arguments, newest_first)
        shown = listed[:limit] if newest_first else listed[:limit][::-1]
        data = [_object(batch, request) for batch in shown]
        ids = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        return json_response({"data": data, "has_more": len(listed) > limit, **ids})

    @router.get(f"{PATH}/{{batch_id}}")
    async def get_message_batch(request: Request, batch_id: str) -> Response:
        """A batch, and how far it is."""
        batch = await found_batch(store, context.owner(request), "anthropic", batch_id)
        return json_response(_object(batch, request))

    @router.get(f"{PATH}/{{batch_id}}/results", response_class=Response)
    async def message_batch_results(request: Request, batch_id: str) -> Response:
        """The results of a batch that has ended: JSON, one a line."""
        batch = await found_batch(store, context.owner(request), "anthropic", batch_id)
        if batch.status in OPEN:
            raise ConflictError(f"batch {batch_id!r} has not ended; poll it until processing_status is ended")
        file = await asyncio.to_thread(store.file, batch.owner, batch.output_file_id or "")
        if file is None:
            raise BatchNotFoundError(batch_id)
        return content_response(store, file, "application/x-jsonl")

    @router.post(f"{PATH}/{{batch_id}}/cancel")
    async def cancel_message_batch(request: Request, batch_id: str) -> Response:
        """End a batch. What has finished is in its results."""
        return json_response(_object(await cancel(store, context.owner(request), "anthropic", batch_id), request))

    @router.delete(f"{PATH}/{{batch_id}}")
    async def delete_message_batch(request: Request, batch_id: str) -> Response:
        """Delete a batch that has ended, and its results."""
        batch = await found_batch(store, context.owner(request), "anthropic", batch_id)
        await delete_ended(store, batch)
        for file_id in filter(None, (batch.input_file_id, batch.output_file_id)):
            await asyncio.to_thread(store.delete_file, batch.owner, file_id)
        return json_response({"id": batch_id, "type": "message_batch_deleted"})


def _check_custom_ids(body: MessageBatchBody) -> None:
    first: dict[str, int] = {}
    for index, item in enumerate(body.requests):
        if first.setdefault(item.custom_id, index) != index:
            problem = f"custom_id {item.custom_id!r} is used by requests.{first[item.custom_id]} already"
            raise InvalidRequestError(f"requests.{index}: {problem}; each must be used once", "requests")
        if item.params.get("stream"):
            raise InvalidRequestError(f"requests.{index}.params.stream: results of a batch are in a file", "requests")
        if is_too_deep(item.params):
            problem = f"more than {MAX_DEPTH} levels of objects and lists"
            raise InvalidRequestError(f"requests.{index}.params: {problem}", "requests")


def _store_requests(store: BatchStore, owner: str, body: MessageBatchBody, max_total_bytes: int) -> Batch:
    lines = (
        orjson.dumps({"custom_id": item.custom_id, "url": "/v1/messages", "body": item.params})
        for item in body.requests
    )
    file = write_lines(store, lines, owner, ("requests.jsonl", OF_MESSAGES))
    assert file is not None
    keep_file(store, file, max_total_bytes)
    batch = new_batch(owner, "anthropic", ("/v1/messages", file.id), WINDOW)
    batch.total = len(body.requests)
    store.add_batch(batch)
    return batch


def _object(batch: Batch, request: Request) -> JsonObject:
    has_ended = batch.status not in OPEN
    ended_s = batch.times.get(batch.status) if has_ended else None
    cancelling_s = batch.times.get(Status.CANCELLING)
    state = "ended" if has_ended else "canceling" if batch.status is Status.CANCELLING else "in_progress"
    left = batch.total - batch.completed - batch.failed
    url = f"{str(request.base_url).rstrip('/')}{PATH}/{batch.id}/results"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": state,
        "request_counts": {
            "processing": 0 if has_ended else left,
            "succeeded": batch.completed,
            "errored": batch.failed,
            "canceled": left if batch.status is Status.CANCELLED else 0,
            "expired": left if batch.status is Status.EXPIRED else 0,
        },
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(ended_s),
        "cancel_initiated_at": _time(cancelling_s),
        "archived_at": None,
        "results_url": url if has_ended and batch.output_file_id else None,
    }


def _time(seconds: int | None) -> str | None:
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
