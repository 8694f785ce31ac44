"""Responses of /v1/messages: a message with its content blocks, the events of a stream, and errors."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from lightserve.errors import LightserveError
from lightserve.httpserver.chat.choice_parser import ChoiceParser
from lightserve.httpserver.chat.output import arguments_object
from lightserve.httpserver.chat.parts import DELTA_TEXT, Events, Part, PartKind, PartsResponse, split_event
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import JsonObject
from lightserve.httpserver.http.errors import ErrorFormat, error_object, status_of
from lightserve.mcp.tools import ToolOutcome

PATH = "/v1/messages"

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def anthropic_error(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    kind = TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def thread_error(request_id: str) -> dict[str, Any]:
    """Anthropic's client sends the whole conversation in every request after an error with these details."""
    body = anthropic_error(400, "thread: this server stores no messages; send the whole conversation", request_id)
    body["error"]["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return body


ERROR_FORMAT = ErrorFormat(PATH, anthropic_error, id_header=b"request-id")  # Anthropic's client reads this header


class MessagesResponse(PartsResponse):
    def __init__(self, parser: ChoiceParser, log: AccessLog, model: str) -> None:
        super().__init__(parser, log)
        self.is_clamped = False  # the context has less room than max_tokens
        self.manages_context = False  # the request has context_management
        self._head = {"id": f"msg_{log.request_id}", "type": "message", "role": "assistant", "model": model}
        self._delta_head = self._delta_tail = b""

    def body(self) -> JsonObject:
        content = self.blocks
        usage = self._usage(self.log.output_tokens)
        return {**self._head, "content": content, **self._stop(), "usage": usage, **self._applied_edits()}

    @property
    def blocks(self) -> list[JsonObject]:
        return [self._block(output_part, output_part.text) for output_part in self.parts]

    def on_start(self) -> Events:
        empty: JsonObject = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
        return [{"type": "message_start", "message": {**self._head, **empty}}, {"type": "ping"}]

    def on_part_start(self, output_part: Part) -> Events:
        delta = {
            "type": "content_block_delta",
            "index": output_part.index,
            "delta": _delta(output_part.kind, DELTA_TEXT),
        }
        self._delta_head, self._delta_tail = split_event(delta)
        return [
            {"type": "content_block_start", "index": output_part.index, "content_block": self._block(output_part, "")}
        ]

    def delta_event(self, text: str) -> bytes:
        return self._delta_head + orjson.dumps(text) + self._delta_tail

    def on_part_end(self, output_part: Part) -> Events:
        stop = {"type": "content_block_stop", "index": output_part.index}
        if output_part.kind is not PartKind.REASONING:
            return [stop]
        signature = {"type": "signature_delta", "signature": _signature(output_part.text)}
        return [{"type": "content_block_delta", "index": output_part.index, "delta": signature}, stop]

    def on_outcome(self, output_part: Part) -> Events:
        """The result is a block of its own, after the blocks that the model has written."""
        result = Part(len(self.parts), PartKind.ITEM, is_complete=True)
        outcome = output_part.outcome or ToolOutcome()
        result.item = {
            "type": "mcp_tool_result",
            "tool_use_id": self._call_id(output_part),
            "is_error": outcome.error is not None,
            "content": [{"type": "text", "text": outcome.shown_text}],
        }
        self.parts.append(result)
        start = {"type": "content_block_start", "index": result.index, "content_block": result.item}
        return [start, {"type": "content_block_stop", "index": result.index}]

    def on_end(self) -> Events:
        usage = self._usage(self.log.output_tokens)
        last = {"type": "message_delta", "delta": self._stop(), "usage": usage, **self._applied_edits()}
        return [last, {"type": "message_stop"}]

    def keep_alive(self) -> bytes:
        """What a stream that waits for its next token sends from time to time."""
        return PING

    def on_error(self, error: LightserveError, request_id: str) -> Events:
        message = error_object(error, request_id)["error"]["message"]
        return [anthropic_error(status_of(error), message, request_id)]

    def _call_id(self, output_part: Part) -> str:
        return f"mcptoolu_{output_part.call_id.removeprefix('toolu_')}"

    def _block(self, output_part: Part, text: str) -> JsonObject:
        if output_part.item is not None:
            return output_part.item
        hosted = self.hosted.get(output_part.name) if output_part.kind is PartKind.CALL else None
        block = _block(output_part, text)
        if hosted is None:
            return block
        name = {"name": hosted.tool.name, "server_name": hosted.label}
        return {**block, "type": "mcp_tool_use", "id": self._call_id(output_part), **name}

    def _stop(self) -> JsonObject:
        stop_reason = None if self.finish is None else self.finish.stop_reason
        if self.is_truncated:
            reason = "model_context_window_exceeded" if self.is_clamped else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        if isinstance(stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        return {"stop_reason": "tool_use" if self.has_calls else "end_turn", "stop_sequence": None}

    def _applied_edits(self) -> JsonObject:
        """This server never shortens a conversation itself."""
        return {"context_management": {"applied_edits": []}} if self.manages_context else {}

    def _usage(self, output_tokens: int) -> JsonObject:
        """Anthropic does not count cached tokens as input tokens."""
        return {
            "input_tokens": self.log.prompt_tokens - self.log.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.log.cached_tokens,
            "output_tokens": output_tokens,
            "output_tokens_details": {"thinking_tokens": self.reasoning_tokens if output_tokens else 0},
        }


def _block(output_part: Part, text: str) -> JsonObject:
    match output_part.kind:
        case PartKind.TEXT:
            return {"type": "text", "text": text}
        case PartKind.REASONING:
            return {"type": "thinking", "thinking": text, "signature": _signature(text)}
        case PartKind.CALL:
            return {
                "type": "tool_use",
                "id": output_part.call_id,
                "name": output_part.name,
                "input": arguments_object(text),
            }
        case PartKind.ITEM:
            raise TypeError("an item is shown as it is")


def _signature(thinking: str) -> str:
    """Clients drop a block of thinking without a signature, instead of sending it back. This server checks none."""
    return hashlib.sha256(thinking.encode()).hexdigest() if thinking else ""


def _delta(kind: PartKind, text: str) -> JsonObject:
    match kind:
        case PartKind.TEXT:
            return {"type": "text_delta", "text": text}
        case PartKind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case PartKind.CALL:
            return {"type": "input_json_delta", "partial_json": text}
        case PartKind.ITEM:
            raise TypeError("an item has no deltas")
