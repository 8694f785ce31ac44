"""The items and events of MCP tools in a response: lists of tools, calls, and requests to approve a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightserve.httpserver.chat.parts import Part
from lightserve.httpserver.http.body import JsonObject
from lightserve.mcp.toolbox import HostedTool
from lightserve.mcp.tools import McpTool, ToolOutcome

LIST_PREFIX, CALL_PREFIX, APPROVAL_PREFIX = "mcpl", "mcp", "mcpr"  # of ids, as OpenAI's

EventFields = tuple[str, JsonObject]  # the type of an event, without "response.", and its fields


def list_item(item_id: str, label: str, tools: Sequence[McpTool]) -> JsonObject:
    return {"id": item_id, "type": "mcp_list_tools", "server_label": label, "tools": list(map(_listed, tools))}


def _listed(tool: McpTool) -> JsonObject:
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": tool.annotations,
    }


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call of an earlier response that the client has approved, and that this server has made."""

    label: str
    name: str  # of the tool
    arguments: str
    approval_request_id: str
    outcome: ToolOutcome

    def item(self, item_id: str) -> JsonObject:
        head = call_head(item_id, self.label, self.name, self.approval_request_id)
        return {**head, "arguments": self.arguments, **outcome_fields(self.outcome)}


def call_head(item_id: str, label: str, name: str, approval_request_id: str | None = None) -> JsonObject:
    return {
        "id": item_id,
        "type": "mcp_call",
        "server_label": label,
        "name": name,
        "approval_request_id": approval_request_id,
    }


def outcome_fields(outcome: ToolOutcome) -> JsonObject:
    if outcome.error is not None:
        return {"status": "failed", "output": None, "error": outcome.error}
    return {"status": "completed", "output": outcome.text, "error": None}


def call_item(item_id: str, hosted: HostedTool, output_part: Part, status: str) -> JsonObject:
    head = call_head(item_id, hosted.label, hosted.tool.name)
    if status == "in_progress":
        return {**head, "status": status, "arguments": "", "output": None, "error": None}
    arguments = {"arguments": output_part.text}
    if output_part.outcome is None:
        return {**head, "status": "incomplete", **arguments, "output": None, "error": None}
    return {**head, **arguments, **outcome_fields(output_part.outcome)}


def approval_item(item_id: str, hosted: HostedTool, output_part: Part) -> JsonObject:
    return {
        "id": item_id,
        "type": "mcp_approval_request",
        "server_label": hosted.label,
        "name": hosted.tool.name,
        "arguments": output_part.text,
    }


def item_events(index: int, item: JsonObject) -> Iterator[EventFields]:
    """Of an item that is complete when the stream begins."""
    ref = {"item_id": item["id"], "output_index": index}
    if item["type"] == "mcp_list_tools":
        yield "output_item.added", {"output_index": index, "item": {**item, "tools": []}}
        yield "mcp_list_tools.in_progress", ref
        yield "mcp_list_tools.completed", ref
    else:
        empty: dict[str, Any] = {"status": "in_progress", "arguments": "", "output": None, "error": None}
        yield "output_item.added", {"output_index": index, "item": {**item, **empty}}
        yield "mcp_call.in_progress", ref
        yield "mcp_call_arguments.done", {**ref, "arguments": item["arguments"]}
        yield f"mcp_call.{item['status']}", ref
    yield "output_item.done", {"output_index": index, "item": item}
