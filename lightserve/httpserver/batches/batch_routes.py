"""/v1/batches, OpenAI's: create, list, read, cancel, delete."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from lightserve.batches.entry import Api
from lightserve.batches.line import ENDPOINTS
from lightserve.batches.records import OPEN, WINDOW_UNITS, Batch, Status
from lightserve.batches.store import BatchStore
from lightserve.errors import ConflictError, InvalidRequestError, RequestError
from lightserve.httpserver.batches.file_routes import expiry_s, found_file, page
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body, JsonObject, at_most, json_response, openapi_body

PATH = "/v1/batches"
MAX_PAGE = 100
MAX_WINDOW_S = 30 * 86400
TIMES = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at"),
)
_WINDOW = re.compile(r"(\d{1,6})([smhd])")

MetadataText = Annotated[str, Field(max_length=512)]


class BatchNotFoundError(RequestError):
    status = 404
    code = "batch_not_found"

    def __init__(self, batch_id: str) -> None:
        super().__init__(
            f"batch {batch_id[:100]!r} not found: it was deleted or belongs to another API key", "batch_id"
        )


class ExpiresAfter(Body):
    anchor: str
    seconds: int


class BatchBody(Body):
    input_file_id: Annotated[str, Field(max_length=256)]
    endpoint: Annotated[str, Field(max_length=256)]
    completion_window: Annotated[str, Field(max_length=16)] = "24h"
    metadata: Annotated[dict[str, MetadataText] | None, at_most(16)] = None
    output_expires_after: ExpiresAfter | None = None


def add_batch_routes(router: APIRouter, context: ServerContext, store: BatchStore) -> None:
    @router.post(PATH, openapi_extra=openapi_body(BatchBody))
    async def create_batch(request: Request) -> Response:
        """Run the requests of a file when the server has nothing more urgent to do."""
        body = await context.read_body(request, BatchBody)
        if body.endpoint not in ENDPOINTS:
            problem = f"endpoint is {body.endpoint[:100]!r}; it must be one of {', '.join(ENDPOINTS)}"
            raise InvalidRequestError(problem, "endpoint")
        file = await found_file(store, context.owner(request), body.input_file_id, "input_file_id")
        batch = new_batch(file.owner, "openai", (body.endpoint, file.id), body.completion_window)
        batch.metadata = body.metadata
        if (after := body.output_expires_after) is not None:
            batch.output_expires_s = expiry_s(after.anchor, after.seconds, "output_expires_after")
        await asyncio.to_thread(store.add_batch, batch)
        return json_response(batch_object(batch))

    @router.get(PATH)
    async def list_batches(
        request: Request, limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20, after: str | None = None
    ) -> Response:
        """The batches of this API key, the newest first."""
        listed = await asyncio.to_thread(store.batches, context.owner(request), "openai", after, limit + 1)
        return json_response(page([batch_object(batch) for batch in listed], limit))

    @router.get(f"{PATH}/{{batch_id}}")
    async def get_batch(request: Request, batch_id: str) -> Response:
        """A batch, and how far it is."""
        return json_response(batch_object(await found_batch(store, context.owner(request), "openai", batch_id)))

    @router.post(f"{PATH}/{{batch_id}}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        """End a batch. What has finished is in its files."""
        batch = await cancel(store, context.owner(request), "openai", batch_id)
        return json_response(batch_object(batch))

    @router.delete(f"{PATH}/{{batch_id}}")
    async def delete_batch(request: Request, batch_id: str) -> Response:
        """Forget a batch that has ended. Its files stay."""
        await delete_ended(store, await found_batch(store, context.owner(request), "openai", batch_id))
        return json_response({"id": batch_id, "object": "batch", "deleted": True})


def new_batch(owner: str, api: Api, source: tuple[str, str], window: str) -> Batch:
    """``source``: the endpoint and the id of the file with the requests."""
    now = int(time.time())
    prefix = "batch_" if api == "openai" else "msgbatch_"
    return Batch(f"{prefix}{uuid.uuid4().hex}", owner, api, *source, window, now, now + window_s(window))


def window_s(text: str) -> int:
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * WINDOW_UNITS[match[2]] if match else 0
    if not 1 <= seconds <= MAX_WINDOW_S:
        problem = f"completion_window is {text!r}; it must be a time such as 24h or 45m, at most 30d"
        raise InvalidRequestError(problem, "completion_window")
    return seconds


async def found_batch(store: BatchStore, owner: str, api: Api, batch_id: str) -> Batch:
    batch = await asyncio.to_thread(store.batch, owner, batch_id)
    if batch is None or batch.api != api:
        raise BatchNotFoundError(batch_id)
    return batch


async def cancel(store: BatchStore, owner: str, api: Api, batch_id: str) -> Batch:
    batch = await found_batch(store, owner, api, batch_id)
    now = int(time.time())
    for status in (Status.VALIDATING, Status.IN_PROGRESS):
        await asyncio.to_thread(store.change_status, batch.id, status, Status.CANCELLING, now)
    batch = await found_batch(store, owner, api, batch_id)
    if batch.status not in (Status.CANCELLING, Status.CANCELLED):
        raise ConflictError(f"batch {batch_id!r} is {batch.status}; only one that has not ended can be cancelled")
    return batch


async def delete_ended(store: BatchStore, batch: Batch) -> None:
    if batch.status in OPEN:
        raise ConflictError(f"batch {batch.id!r} is {batch.status}; cancel it and wait for its end")
    await asyncio.to_thread(store.delete_batch, batch.owner, batch.id)


def batch_object(batch: Batch) -> JsonObject:
    errors: Any = {"object": "list", "data": batch.errors} if batch.errors else None
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": str(batch.status),
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{name: batch.times.get(name.removesuffix("_at")) for name in TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": {
            "input_tokens": batch.usage.input,
            "input_tokens_details": {"cached_tokens": batch.usage.cached},
            "output_tokens": batch.usage.output,
            "output_tokens_details": {"reasoning_tokens": batch.usage.reasoning},
            "total_tokens": batch.usage.input + batch.usage.output,
        },
        "metadata": batch.metadata,
    }
