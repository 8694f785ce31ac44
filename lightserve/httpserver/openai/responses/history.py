"""Input that refers to stored responses: previous_response_id and item_reference."""

from __future__ import annotations

from typing import Any

from lightserve.errors import InvalidRequestError, PreviousResponseNotFoundError
from lightserve.httpserver.http.body import JsonObject
from lightserve.httpserver.openai.responses.items import ItemReference, as_items
from lightserve.httpserver.openai.responses.request import ResponsesBody, validate_responses
from lightserve.httpserver.openai.responses.store import RUNNING, ResponseStore, StoredResponse


async def with_history(store: ResponseStore, owner: str, value: JsonObject, body: ResponsesBody) -> ResponsesBody:
    """The body with all items that it refers to, as if the client had sent the whole conversation."""
    has_references = any(isinstance(item, ItemReference) for item in body.input)
    if body.previous_response_id is None and not has_references:
        return body
    items = await _resolved(store, owner, input_items(value)) if has_references else input_items(value)
    if body.previous_response_id is not None:
        previous = await store.get(owner, body.previous_response_id)
        if previous is None:
            raise PreviousResponseNotFoundError(body.previous_response_id)
        status = previous.response["status"]
        if status in RUNNING:
            message = f"previous_response_id: {body.previous_response_id[:100]!r} is {status}; wait for its end"
            raise InvalidRequestError(message, "previous_response_id")
        items = [*previous.input, *previous.response["output"], *items]
    value["input"] = items
    return validate_responses(value)


def input_items(value: JsonObject) -> list[JsonObject]:
    """The input of a valid body as items."""
    items: list[JsonObject] = as_items(value["input"])
    return items


async def _resolved(store: ResponseStore, owner: str, items: list[JsonObject]) -> list[JsonObject]:
    responses: dict[str, StoredResponse | None] = {}
    resolved = []
    for item in items:
        if item.get("type") != "item_reference":
            resolved.append(item)
            continue
        response_id = _response_id(item["id"])
        if response_id not in responses:
            responses[response_id] = await store.get(owner, response_id)
        resolved.append(_find(responses[response_id], item["id"]))
    return resolved


def _response_id(item_id: str) -> str:
    """Of the response that has the item: an item's id is PREFIX_RESPONSE_INDEX."""
    return f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"


def _find(stored: StoredResponse | None, item_id: str) -> Any:
    for item in () if stored is None else stored.response["output"]:
        if item["id"] == item_id:
            return item
    raise InvalidRequestError(
        f"input: no stored response has the item {item_id[:100]!r}; send the item itself instead of an item_reference",
        "input",
    )


def listed_items(stored: StoredResponse, order: str, after: str | None, limit: int) -> JsonObject:
    """A page of the input items, as OpenAI lists them."""
    unique = stored.response["id"].removeprefix("resp_")
    items = [_listed(item, f"item_{unique}_{index}") for index, item in enumerate(stored.input)]
    items = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequestError(f"after: this response has no input item {after[:100]!r}", "after")
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(items),
    }


def _listed(item: JsonObject, default_id: str) -> JsonObject:
    """With an id, and with the type and the parts that a client may leave out of a message."""
    listed = {"type": "message", **item, "id": item.get("id") or default_id}
    if listed["type"] == "message" and isinstance(listed.get("content"), str):
        kind = "output_text" if listed["role"] == "assistant" else "input_text"
        listed["content"] = [{"type": kind, "text": listed["content"]}]
    return {"status": "completed", **listed} if listed["type"] == "message" else listed
