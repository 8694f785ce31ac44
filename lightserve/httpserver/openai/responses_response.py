"""Answers of /v1/responses: a response with its output items, and the events that build it."""

from __future__ import annotations

import time
from typing import Any

from lightserve.errors import LightserveError, RequestError
from lightserve.httpserver.chat.output import ChoiceOutput
from lightserve.httpserver.chat.parts import Events, Kind, Object, Part, PartedAnswer
from lightserve.httpserver.wire.access_log import AccessLog
from lightserve.httpserver.wire.errors import error_object

# kind: the beginning of an item's id, as OpenAI's
PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
# field of the request that an answer repeats: what it says where none was given
REPEATED: Object = {
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
FIXED: Object = {"background": False, "previous_response_id": None, "store": False, "top_logprobs": 0}


class ResponsesAnswer(PartedAnswer):
    def __init__(self, output: ChoiceOutput, log: AccessLog, model: str, asked: Object) -> None:
        """``asked`` is the request's body."""
        super().__init__(output, log)
        self._head = {
            "id": f"resp_{log.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **FIXED,
            **{name: default if asked.get(name) is None else asked[name] for name, default in REPEATED.items()},
        }
        self._n_events = 0

    def whole(self) -> Object:
        status = "incomplete" if self.is_cut else "completed"
        details = {"reason": "max_output_tokens"} if self.is_cut else None
        return self._response(status, incomplete_details=details, usage=self._usage())

    def opening(self) -> Events:
        response = self._response("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def begun(self, part: Part) -> Events:
        added = self._event("response.output_item.added", output_index=part.index, item=self._item(part, "in_progress"))
        if part.kind is Kind.CALL:
            return [added]
        return [added, self._event("response.content_part.added", **self._place(part), part=_content(part, ""))]

    def grown(self, part: Part, text: str) -> Events:
        return [self._event(f"response.{_NAMES[part.kind]}.delta", **self._place(part), delta=text, **_beside(part))]

    def ended(self, part: Part) -> Events:
        text = {"arguments": part.text, "name": part.name} if part.kind is Kind.CALL else {"text": part.text}
        events = [self._event(f"response.{_NAMES[part.kind]}.done", **self._place(part), **text, **_beside(part))]
        if part.kind is not Kind.CALL:
            content = _content(part, part.text)
            events.append(self._event("response.content_part.done", **self._place(part), part=content))
        item = self._item(part, _status(part))
        events.append(self._event("response.output_item.done", output_index=part.index, item=item))
        return events

    def closing(self) -> Events:
        response = self.whole()
        return [self._event(f"response.{response['status']}", response=response)]

    def failed(self, error: LightserveError, request_id: str) -> Events:
        code = "invalid_prompt" if isinstance(error, RequestError) else "server_error"
        told = {"code": code, "message": error_object(error, request_id)["error"]["message"]}
        return [self._event("response.failed", response=self._response("failed", error=told))]

    def _event(self, kind: str, **fields: Any) -> Object:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _response(self, status: str, **fields: Any) -> Object:
        output = [self._item(part, _status(part)) for part in self.parts]
        empty = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": output, **empty, **fields}

    def _id(self, part: Part) -> str:
        return f"{PREFIXES[part.kind]}_{self.log.request_id}_{part.index}"

    def _place(self, part: Part) -> Object:
        place = {"item_id": self._id(part), "output_index": part.index}
        return place if part.kind is Kind.CALL else {**place, "content_index": 0}

    def _item(self, part: Part, status: str) -> Object:
        is_begun = status == "in_progress"
        head = {"id": self._id(part), "status": status}
        content = [] if is_begun else [_content(part, part.text)]
        match part.kind:
            case Kind.TEXT:
                return {**head, "type": "message", "role": "assistant", "content": content}
            case Kind.REASONING:
                return {**head, "type": "reasoning", "summary": [], "content": content}
            case Kind.CALL:
                arguments = "" if is_begun else part.text
                call = {"call_id": part.call_id, "name": part.name, "arguments": arguments}
                return {**head, "type": "function_call", **call}

    def _usage(self) -> Object:
        log = self.log
        return {
            "input_tokens": log.prompt_tokens,
            "input_tokens_details": {"cached_tokens": log.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": log.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.output.reasoning_tokens},
            "total_tokens": log.prompt_tokens + log.output_tokens,
        }


# kind: what its events are about
_NAMES = {Kind.REASONING: "reasoning_text", Kind.TEXT: "output_text", Kind.CALL: "function_call_arguments"}


def _status(part: Part) -> str:
    return "completed" if part.is_complete else "incomplete"


def _content(part: Part, text: str) -> Object:
    if part.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _beside(part: Part) -> Object:
    return {"logprobs": []} if part.kind is Kind.TEXT else {}
