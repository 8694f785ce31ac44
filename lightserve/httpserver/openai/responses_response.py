"""Responses of /v1/responses: a response with its output items, and the events of a stream."""

from __future__ import annotations

import time
from typing import Any

import orjson

from lightserve.errors import LightserveError, RequestError
from lightserve.httpserver.chat.output import ChoiceParser
from lightserve.httpserver.chat.parts import DELTA_TEXT, Events, Part, PartKind, PartsResponse, split_event
from lightserve.httpserver.wire.access_log import AccessLog
from lightserve.httpserver.wire.body import JsonObject
from lightserve.httpserver.wire.errors import error_object

# kind of an item: the prefix of its id, as OpenAI's
ID_PREFIXES = {PartKind.REASONING: "rs", PartKind.TEXT: "msg", PartKind.CALL: "fc"}
# field of the request that the response repeats: its value where the request has none
ECHOED_FIELDS: JsonObject = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
FIXED_FIELDS: JsonObject = {"background": False, "previous_response_id": None, "store": False, "top_logprobs": 0}


class ResponsesResponse(PartsResponse):
    def __init__(self, parser: ChoiceParser, log: AccessLog, model: str, request_body: JsonObject) -> None:
        """``request_body`` is the request's body."""
        super().__init__(parser, log)
        self._head = {
            "id": f"resp_{log.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **FIXED_FIELDS,
            **{
                name: default if request_body.get(name) is None else request_body[name]
                for name, default in ECHOED_FIELDS.items()
            },
        }
        self._n_events = 0
        self._delta_head = self._delta_tail = b""

    def body(self) -> JsonObject:
        status = "incomplete" if self.is_truncated else "completed"
        details = {"reason": "max_output_tokens"} if self.is_truncated else None
        return self._response(status, incomplete_details=details, usage=self._usage())

    def on_start(self) -> Events:
        response = self._response("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def on_part_start(self, part: Part) -> Events:
        self._prepare_deltas(part)
        added = self._event("response.output_item.added", output_index=part.index, item=self._item(part, "in_progress"))
        if part.kind is PartKind.CALL:
            return [added]
        return [added, self._event("response.content_part.added", **self._item_ref(part), part=_content(part, ""))]

    def delta_event(self, part: Part, text: str) -> bytes:
        self._n_events += 1
        return b"%b%b%b%d}\n\n" % (self._delta_head, orjson.dumps(text), self._delta_tail, self._n_events - 1)

    def on_part_end(self, part: Part) -> Events:
        text = {"arguments": part.text, "name": part.name} if part.kind is PartKind.CALL else {"text": part.text}
        events = [
            self._event(
                f"response.{_EVENT_NAMES[part.kind]}.done", **self._item_ref(part), **text, **_extra_fields(part)
            )
        ]
        if part.kind is not PartKind.CALL:
            content = _content(part, part.text)
            events.append(self._event("response.content_part.done", **self._item_ref(part), part=content))
        item = self._item(part, _status(part))
        events.append(self._event("response.output_item.done", output_index=part.index, item=item))
        return events

    def on_end(self) -> Events:
        response = self.body()
        return [self._event(f"response.{response['status']}", response=response)]

    def on_error(self, error: LightserveError, request_id: str) -> Events:
        code = "invalid_prompt" if isinstance(error, RequestError) else "server_error"
        error_body = {"code": code, "message": error_object(error, request_id)["error"]["message"]}
        return [self._event("response.failed", response=self._response("failed", error=error_body))]

    def _prepare_deltas(self, part: Part) -> None:
        """Everything in the delta events of a part but the text and the sequence number, which is their last field."""
        kind = f"response.{_EVENT_NAMES[part.kind]}.delta"
        event = {"type": kind, **self._item_ref(part), "delta": DELTA_TEXT, **_extra_fields(part), "sequence_number": 0}
        self._delta_head, tail = split_event(event)
        self._delta_tail = tail.removesuffix(b"0}\n\n")

    def _event(self, kind: str, **fields: Any) -> JsonObject:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _response(self, status: str, **fields: Any) -> JsonObject:
        output = [self._item(part, _status(part)) for part in self.parts]
        empty = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": output, **empty, **fields}

    def _id(self, part: Part) -> str:
        return f"{ID_PREFIXES[part.kind]}_{self.log.request_id}_{part.index}"

    def _item_ref(self, part: Part) -> JsonObject:
        ref = {"item_id": self._id(part), "output_index": part.index}
        return ref if part.kind is PartKind.CALL else {**ref, "content_index": 0}

    def _item(self, part: Part, status: str) -> JsonObject:
        is_started = status == "in_progress"
        head = {"id": self._id(part), "status": status}
        content = [] if is_started else [_content(part, part.text)]
        match part.kind:
            case PartKind.TEXT:
                return {**head, "type": "message", "role": "assistant", "content": content}
            case PartKind.REASONING:
                return {**head, "type": "reasoning", "summary": [], "content": content}
            case PartKind.CALL:
                arguments = "" if is_started else part.text
                call = {"call_id": part.call_id, "name": part.name, "arguments": arguments}
                return {**head, "type": "function_call", **call}

    def _usage(self) -> JsonObject:
        log = self.log
        return {
            "input_tokens": log.prompt_tokens,
            "input_tokens_details": {"cached_tokens": log.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": log.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.parser.reasoning_tokens},
            "total_tokens": log.prompt_tokens + log.output_tokens,
        }


# kind of an item: the name in its events
_EVENT_NAMES = {
    PartKind.REASONING: "reasoning_text",
    PartKind.TEXT: "output_text",
    PartKind.CALL: "function_call_arguments",
}


def _status(part: Part) -> str:
    return "completed" if part.is_complete else "incomplete"


def _content(part: Part, text: str) -> JsonObject:
    if part.kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _extra_fields(part: Part) -> JsonObject:
    return {"logprobs": []} if part.kind is PartKind.TEXT else {}
