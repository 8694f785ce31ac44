"""Responses of /v1/responses: a response with its output items, and the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from lightserve.errors import AbortedError, LightserveError, RequestError
from lightserve.httpserver.chat.choice_parser import ChoiceParser
from lightserve.httpserver.chat.parts import DELTA_TEXT, Events, Part, PartKind, PartsResponse, split_event
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import JsonObject
from lightserve.httpserver.http.errors import error_object
from lightserve.httpserver.openai.logprobs import TokenLogprobs
from lightserve.httpserver.openai.responses.items import encode_reasoning
from lightserve.httpserver.openai.responses.mcp import without_secrets
from lightserve.httpserver.openai.responses.mcp_output import (
    APPROVAL_PREFIX,
    CALL_PREFIX as MCP_PREFIX,
    LIST_PREFIX,
    ApprovedCall,
    approval_item,
    call_item,
    item_events,
    list_item,
)
from lightserve.httpserver.openai.responses.store import IN_PROGRESS, QUEUED
from lightserve.httpserver.openai.responses.tools import ToolId
from lightserve.mcp.toolbox import HostedTool
from lightserve.mcp.tools import McpTool
from lightserve.messages.output import StrOut

# field of the request that the response repeats: its value where the request has none
ECHOED_FIELDS: JsonObject = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
FIXED_FIELDS: JsonObject = {"service_tier": "default"}
CALL_PREFIX, CUSTOM_PREFIX = "fc", "ctc"  # of item ids, as OpenAI's
ID_PREFIXES = {PartKind.REASONING: "rs", PartKind.TEXT: "msg", PartKind.CALL: CALL_PREFIX}


@dataclass(frozen=True, slots=True)
class ResponsesSpec:
    """What a response needs to know about its request."""

    model: str
    response_id: str  # with the prefix resp_
    body: JsonObject = field(default_factory=dict)  # the request's
    tools: dict[str, ToolId] = field(default_factory=dict)  # by the name of the function that the model gets
    ignored: list[JsonObject] = field(default_factory=list)  # fields of the request that the model does not get
    is_stored: bool = False
    logprobs_of: TokenLogprobs | None = None  # None: no logprobs
    encrypts_reasoning: bool = False
    hosted: Mapping[str, HostedTool] = field(default_factory=dict)  # MCP tools, by the name of the function
    listings: Mapping[str, Sequence[McpTool]] = field(default_factory=dict)  # of MCP servers, by label
    approved: Sequence[ApprovedCall] = ()


class ResponsesResponse(PartsResponse):
    def __init__(self, parser: ChoiceParser, log: AccessLog, spec: ResponsesSpec) -> None:
        super().__init__(parser, log)
        self._spec = spec
        self.hosted = spec.hosted
        self._head = _head(spec)
        self._is_silent = False  # the open part is an approval request, which is sent whole
        self._n_events = 0
        self._delta_head = self._delta_tail = b""
        self._unsent_logprobs: list[JsonObject] = []  # of tokens whose text has not been sent
        self._logprobs: dict[int, list[JsonObject]] = {}  # of text, by the index of the part
        self._failure: JsonObject | None = None
        self._add_own_items()

    @property
    def id(self) -> str:
        return self._spec.response_id

    @property
    def _is_background(self) -> bool:
        return bool(self._spec.body.get("background"))

    @property
    def has_ended(self) -> bool:
        return self.finish is not None or self._failure is not None

    def body(self) -> JsonObject:
        """The response as it is now."""
        if self._failure is not None:
            return self._response(**self._failure)
        if not self.has_ended:
            return self._response(QUEUED if self._is_background and not self._has_begun else IN_PROGRESS)
        details = {"reason": "max_output_tokens"} if self.is_truncated else None
        status = "incomplete" if self.is_truncated else "completed"
        return self._response(status, incomplete_details=details, usage=self._usage())

    def cancel(self) -> None:
        """Nobody will read the rest."""
        self._failure = {"status": "cancelled"}

    def write(self, outs: Iterable[tuple[int, StrOut]]) -> bytes:
        logprobs_of = self._spec.logprobs_of
        if logprobs_of is None:
            return super().write(outs)
        events = []
        for index, out in outs:
            self._unsent_logprobs += logprobs_of(out)["content"]
            reasoning_tokens = self.parser.reasoning_tokens
            events.append(super().write([(index, out)]))
            if self.parser.reasoning_tokens > reasoning_tokens:
                self._unsent_logprobs.clear()
        return b"".join(events)

    def on_start(self) -> Events:
        items, self.parts = self.parts, []
        response = self._response(IN_PROGRESS)
        self.parts = items
        start = [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]
        given = ((each.index, each.item) for each in items if each.item is not None)
        pairs = (pair for index, item in given for pair in item_events(index, item))
        return [*start, *(self._event(f"response.{kind}", **fields) for kind, fields in pairs)]

    def _add_own_items(self) -> None:
        """What this server did before the model wrote: it listed tools, and made calls that were approved."""
        for label, tools in self._spec.listings.items():
            self._add_item(LIST_PREFIX, partial(list_item, label=label, tools=tools))
        for call in self._spec.approved:
            self._add_item(MCP_PREFIX, call.item)
        self._round_begin = len(self.parts)

    def _add_item(self, prefix: str, make: Callable[[str], JsonObject]) -> None:
        output_part = Part(len(self.parts), PartKind.ITEM, is_complete=True)
        output_part.item = make(self._item_id(prefix, output_part.index))
        self.parts.append(output_part)

    def on_part_start(self, output_part: Part) -> Events:
        if output_part.kind is not PartKind.TEXT:
            self._unsent_logprobs.clear()
        hosted = self._hosted(output_part)
        self._is_silent = hosted is not None and hosted.needs_approval
        if self._is_silent:
            return []
        self._prepare_deltas(output_part)
        added = self._event(
            "response.output_item.added", output_index=output_part.index, item=self._item(output_part, "in_progress")
        )
        if hosted is not None:
            return [added, self._event("response.mcp_call.in_progress", **self._item_ref(output_part))]
        if output_part.kind is PartKind.CALL:
            return [added]
        return [
            added,
            self._event(
                "response.content_part.added", **self._item_ref(output_part), part=_content(output_part, "", [])
            ),
        ]

    def delta_event(self, text: str) -> bytes:
        if self._is_silent:
            return b""
        if self._spec.logprobs_of is not None:
            return self._delta_event_with_logprobs(self.parts[-1], text)
        number = self._n_events
        self._n_events = number + 1
        return b"%b%b%b%d}\n\n" % (self._delta_head, orjson.dumps(text), self._delta_tail, number)

    def on_part_end(self, output_part: Part) -> Events:
        if self._is_silent:
            return self._whole_item_events(output_part)
        ref = self._item_ref(output_part)
        events = [
            self._event(f"response.{self._event_name(output_part)}.done", **ref, **self._done_fields(output_part))
        ]
        if self._hosted(output_part) is not None:
            return events  # its item is done when the call is
        if output_part.kind is not PartKind.CALL:
            events.append(self._event("response.content_part.done", **ref, part=self._content(output_part)))
        item = self._item(output_part, _status(output_part))
        events.append(self._event("response.output_item.done", output_index=output_part.index, item=item))
        return events

    def on_outcome(self, output_part: Part) -> Events:
        kind = "failed" if output_part.outcome is None or output_part.outcome.error is not None else "completed"
        return [
            self._event(f"response.mcp_call.{kind}", **self._item_ref(output_part)),
            self._event(
                "response.output_item.done", output_index=output_part.index, item=self._item(output_part, kind)
            ),
        ]

    def _whole_item_events(self, output_part: Part) -> Events:
        self._is_silent = False
        fields = {"output_index": output_part.index, "item": self._item(output_part, _status(output_part))}
        return [self._event(f"response.output_item.{name}", **fields) for name in ("added", "done")]

    def _unmade_call_events(self) -> Events:
        """Of calls that max_tokens cut off, or that came before it."""
        return [
            self._event("response.output_item.done", output_index=call.index, item=self._item(call, "incomplete"))
            for call in self.parts
            if self._is_to_be_made(call)
        ]

    def on_end(self) -> Events:
        """A response that its limit cut ends with response.completed too; its status says "incomplete". The openai
        client's stream helper raises an exception without that event, and Codex sends the same request again."""
        return [*self._unmade_call_events(), self._event("response.completed", response=self.body())]

    def on_error(self, error: LightserveError, request_id: str) -> Events:
        message = error_object(error, request_id)["error"]["message"]
        if isinstance(error, AbortedError):
            self.cancel()
        else:
            code = "invalid_prompt" if isinstance(error, RequestError) else "server_error"
            self._failure = {"status": "failed", "error": {"code": code, "message": message}}
        return [self._event("response.failed", response=self.body())]

    def _prepare_deltas(self, output_part: Part) -> None:
        """Everything in the delta events of a part but the text and the sequence number, which is their last field."""
        kind = f"response.{self._event_name(output_part)}.delta"
        logprobs: JsonObject = {"logprobs": []} if output_part.kind is PartKind.TEXT else {}
        event = {"type": kind, **self._item_ref(output_part), "delta": DELTA_TEXT, **logprobs, "sequence_number": 0}
        self._delta_head, tail = split_event(event)
        self._delta_tail = tail.removesuffix(b"0}\n\n")

    def _delta_event_with_logprobs(self, output_part: Part, text: str) -> bytes:
        """With those of all tokens since the last delta: one may have waited for the rest of a character."""
        tail = self._delta_tail
        if output_part.kind is PartKind.TEXT:
            new, self._unsent_logprobs = self._unsent_logprobs, []
            self._logprobs.setdefault(output_part.index, []).extend(new)
            tail = b',"logprobs":%b,"sequence_number":' % orjson.dumps(new)
        self._n_events += 1
        return b"%b%b%b%d}\n\n" % (self._delta_head, orjson.dumps(text), tail, self._n_events - 1)

    def _event(self, kind: str, **fields: Any) -> JsonObject:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _response(self, status: str, **fields: Any) -> JsonObject:
        output = [self._item(output_part, _status(output_part)) for output_part in self.parts]
        empty = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": output, **empty, **fields}

    def _is_custom(self, output_part: Part) -> bool:
        return output_part.name in self._spec.tools and self._spec.tools[output_part.name].is_custom

    def _hosted(self, output_part: Part) -> HostedTool | None:
        return self.hosted.get(output_part.name) if output_part.kind is PartKind.CALL else None

    def _event_name(self, output_part: Part) -> str:
        if self._hosted(output_part) is not None:
            return "mcp_call_arguments"
        return "custom_tool_call_input" if self._is_custom(output_part) else _EVENT_NAMES[output_part.kind]

    def _id(self, output_part: Part) -> str:
        hosted = self._hosted(output_part)
        if hosted is not None:
            return self._item_id(APPROVAL_PREFIX if hosted.needs_approval else MCP_PREFIX, output_part.index)
        prefix = CUSTOM_PREFIX if self._is_custom(output_part) else ID_PREFIXES[output_part.kind]
        return self._item_id(prefix, output_part.index)

    def _item_id(self, prefix: str, index: int) -> str:
        return f"{prefix}_{self.id.removeprefix('resp_')}_{index}"

    def _item_ref(self, output_part: Part) -> JsonObject:
        ref = {"item_id": self._id(output_part), "output_index": output_part.index}
        return ref if output_part.kind is PartKind.CALL else {**ref, "content_index": 0}

    def _done_fields(self, output_part: Part) -> JsonObject:
        if self._is_custom(output_part):
            return {"input": output_part.text}
        if self._hosted(output_part) is not None:
            return {"arguments": output_part.text}
        match output_part.kind:
            case PartKind.CALL:
                return {"arguments": output_part.text, "name": self._tool_id(output_part).name}
            case PartKind.TEXT:
                return {"text": output_part.text, "logprobs": self._logprobs.get(output_part.index, [])}
            case _:
                return {"text": output_part.text}

    def _content(self, output_part: Part) -> JsonObject:
        return _content(output_part, output_part.text, self._logprobs.get(output_part.index, []))

    def _item(self, output_part: Part, status: str) -> JsonObject:
        if output_part.item is not None:
            return output_part.item
        hosted = self._hosted(output_part)
        if hosted is not None and hosted.needs_approval:
            return approval_item(self._id(output_part), hosted, output_part)
        if hosted is not None:
            return call_item(self._id(output_part), hosted, output_part, status)
        is_started = status == "in_progress"
        head = {"id": self._id(output_part), "status": status}
        content = [] if is_started else [self._content(output_part)]
        match output_part.kind:
            case PartKind.TEXT:
                return {**head, "type": "message", "role": "assistant", "content": content}
            case PartKind.REASONING:
                encrypted = (
                    {"encrypted_content": encode_reasoning(output_part.text)} if self._spec.encrypts_reasoning else {}
                )
                return {**head, "type": "reasoning", "summary": [], "content": content, **encrypted}
            case _:
                return {**head, **self._call(output_part, is_started)}

    def _call(self, output_part: Part, is_started: bool) -> JsonObject:
        tool_id = self._tool_id(output_part)
        call = {"call_id": output_part.call_id, "name": tool_id.name}
        if tool_id.namespace is not None:
            call["namespace"] = tool_id.namespace
        text = "" if is_started else output_part.text
        if tool_id.is_custom:
            return {"type": "custom_tool_call", **call, "input": text}
        return {"type": "function_call", **call, "arguments": text}

    def _tool_id(self, output_part: Part) -> ToolId:
        """A model may call a tool that does not exist."""
        return self._spec.tools.get(output_part.name, ToolId(output_part.name))

    def _usage(self) -> JsonObject:
        log = self.log
        return {
            "input_tokens": log.prompt_tokens,
            "input_tokens_details": {"cached_tokens": log.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": log.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": log.prompt_tokens + log.output_tokens,
        }


# kind of an item: the name in its events
_EVENT_NAMES = {
    PartKind.REASONING: "reasoning_text",
    PartKind.TEXT: "output_text",
    PartKind.CALL: "function_call_arguments",
}


def _head(spec: ResponsesSpec) -> JsonObject:
    """The fields that do not change. ``tools`` has only what the model gets; ``ignored`` says what it does not get."""
    given = {name: value for name, value in spec.body.items() if name in ECHOED_FIELDS and value is not None}
    if isinstance(given.get("tools"), list):
        kinds = ("function", "custom", "namespace", "mcp")
        given["tools"] = [without_secrets(tool) for tool in given["tools"] if tool["type"] in kinds]
    return {
        "id": spec.response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": spec.model,
        "background": bool(spec.body.get("background")),
        **FIXED_FIELDS,
        "store": spec.is_stored,
        **ECHOED_FIELDS,
        **given,
        **({"ignored": spec.ignored} if spec.ignored else {}),
    }


def _status(output_part: Part) -> str:
    return "completed" if output_part.is_complete else "incomplete"


def _content(output_part: Part, text: str, logprobs: list[JsonObject]) -> JsonObject:
    if output_part.kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
