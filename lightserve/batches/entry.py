"""The lines of a batch's results, as OpenAI and Anthropic have them."""

from __future__ import annotations

import uuid
from typing import Any, Literal, NamedTuple

import orjson

from lightserve.batches.usage import NO_USAGE, Usage

Api = Literal["openai", "anthropic"]
Unfinished = Literal["expired", "cancelled"]

_REASONS = {
    "expired": "this request was not run before the completion window of the batch ended",
    "cancelled": "this request was not run before the batch was cancelled",
}


class Entry(NamedTuple):
    """A line of results."""

    is_error: bool
    text: bytes  # JSON without a line end
    usage: Usage = NO_USAGE  # unknown when it is read from the store, which has the sum of a batch


def response_entry(api: Api, custom_id: str, status: int, request_id: str, body: Any, usage: Usage = NO_USAGE) -> Entry:
    """Of a request that was run."""
    is_error = status >= 400
    if api == "anthropic":
        result = {"type": "errored", "error": body} if is_error else {"type": "succeeded", "message": body}
        return Entry(is_error, _dump({"custom_id": custom_id, "result": result}), usage)
    response = {"status_code": status, "request_id": request_id, "body": body}
    line = {"id": _new_id(), "custom_id": custom_id, "response": response, "error": None}
    return Entry(is_error, _dump(line), usage)


def unfinished_entry(api: Api, custom_id: str, reason: Unfinished) -> Entry:
    """Of a request whose batch ended before it."""
    if api == "anthropic":
        kind = "canceled" if reason == "cancelled" else reason
        return Entry(True, _dump({"custom_id": custom_id, "result": {"type": kind}}))
    error = {"code": f"batch_{reason}", "message": _REASONS[reason]}
    return Entry(True, _dump({"id": _new_id(), "custom_id": custom_id, "response": None, "error": error}))


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _dump(value: Any) -> bytes:
    return orjson.dumps(value)
