"""/v1/files, OpenAI's: upload, list, read, download, delete."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from lightserve.batches.records import OF_MESSAGES, StoredFile
from lightserve.batches.store import BatchStore
from lightserve.errors import ConflictError, InvalidRequestError, RequestError
from lightserve.httpserver.batches.storage import MAX_FILENAME, keep_file, new_file
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import JsonObject, json_response
from lightserve.httpserver.http.multipart import Form, form_schema, read_form

PATH = "/v1/files"
PURPOSES = ("batch",)
MAX_PAGE = 10_000
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86400  # OpenAI's
_FORM = form_schema(
    ["purpose"],
    {
        "purpose": {"type": "string", "enum": [*PURPOSES]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S},
    },
)


class FileNotFoundInStoreError(RequestError):
    status = 404
    code = "file_not_found"

    def __init__(self, file_id: str, param: str = "file_id") -> None:
        super().__init__(
            f"file {file_id[:100]!r} not found: it was deleted, has expired or belongs to another API key", param
        )


def add_file_routes(router: APIRouter, context: ServerContext, store: BatchStore) -> None:
    @router.post(PATH, openapi_extra=_FORM)
    async def upload_file(request: Request) -> Response:
        """Upload a file of requests for a batch: JSON, one request a line."""
        config = context.config
        with new_file(store) as (file_id, _, sink):
            form = Form(sink, config.batch_max_file_bytes, "--batch_max_file_bytes", "the fields purpose and file")
            await read_form(request, form)
            file = _file_of(form, file_id, context.owner(request))
        await asyncio.to_thread(keep_file, store, file, config.batch_dir_bytes)
        return json_response(file_object(file))

    @router.get(PATH)
    async def list_files(
        request: Request,
        purpose: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """The files of this API key."""
        owner = context.owner(request)
        arguments = (owner, purpose, after, limit + 1, order == "desc")
        files = [] if purpose == OF_MESSAGES else await asyncio.to_thread(store.files, *arguments)
        return json_response(page([file_object(file) for file in files], limit))

    @router.get(f"{PATH}/{{file_id}}")
    async def get_file(request: Request, file_id: str) -> Response:
        """What is known of a file."""
        return json_response(file_object(await found_file(store, context.owner(request), file_id)))

    @router.get(f"{PATH}/{{file_id}}/content", response_class=Response)
    async def download_file(request: Request, file_id: str) -> Response:
        """The content of a file."""
        file = await found_file(store, context.owner(request), file_id)
        return content_response(store, file)

    @router.delete(f"{PATH}/{{file_id}}")
    async def delete_file(request: Request, file_id: str) -> Response:
        """Delete a file that no open batch reads."""
        file = await found_file(store, context.owner(request), file_id)
        if batch_id := await asyncio.to_thread(store.batch_of_input, file.id):
            raise ConflictError(f"file {file.id!r} is the input of batch {batch_id!r}, which has not ended; cancel it")
        if not await asyncio.to_thread(store.delete_file, file.owner, file.id):
            raise FileNotFoundInStoreError(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


async def found_file(store: BatchStore, owner: str, file_id: str, param: str = "file_id") -> StoredFile:
    file = await asyncio.to_thread(store.file, owner, file_id)
    is_visible = file is not None and file.purpose != OF_MESSAGES
    if file is None or not is_visible or (file.expires_at is not None and file.expires_at <= int(time.time())):
        raise FileNotFoundInStoreError(file_id, param)
    return file


def content_response(store: BatchStore, file: StoredFile, media_type: str = "application/octet-stream") -> Response:
    path = store.path_of(file.id)
    if not path.exists():
        raise FileNotFoundInStoreError(file.id)
    return FileResponse(path, media_type=media_type)


def file_object(file: StoredFile) -> JsonObject:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def page(objects: list[JsonObject], limit: int) -> JsonObject:
    """``objects`` has one more than the page if there are more."""
    shown = objects[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(objects) > limit,
    }


def _file_of(form: Form, file_id: str, owner: str) -> StoredFile:
    purpose = form.fields.get("purpose")
    if purpose not in PURPOSES:
        given = "missing" if purpose is None else repr(purpose[:100])
        raise InvalidRequestError(f"purpose is {given}; this server takes files with purpose batch", "purpose")
    if form.filename is None:
        raise InvalidRequestError("the form has no file", "file")
    now = int(time.time())
    seconds = _expiry_s(form)
    name = re.sub(r"[^\w.() -]", "_", form.filename)[-MAX_FILENAME:]
    expires_at = None if seconds is None else now + seconds
    return StoredFile(file_id, owner, name, purpose, form.num_bytes, now, expires_at)


def _expiry_s(form: Form) -> int | None:
    anchor: Any = form.fields.get("expires_after[anchor]")
    text = form.fields.get("expires_after[seconds]")
    if anchor is None and text is None:
        return None
    return expiry_s(anchor, int(text) if text is not None and text.isdecimal() and len(text) < 12 else text)


def expiry_s(anchor: Any, seconds: Any, param: str = "expires_after") -> int:
    """The seconds of an ``expires_after``."""
    if anchor != "created_at":
        raise InvalidRequestError(f"{param}.anchor must be created_at", param)
    if type(seconds) is not int or not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise InvalidRequestError(f"{param}.seconds must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}", param)
    return seconds
