"""Responses whose model may call tools of MCP servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.chat.output import output_formats
from lightserve.httpserver.chat.prepare import PreparedChat, prepare_chat
from lightserve.httpserver.chat.tool_rounds import RoundLimits, ToolRounds
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import Generation
from lightserve.httpserver.http.body import JsonObject
from lightserve.httpserver.openai.responses.history import input_items
from lightserve.httpserver.openai.responses.mcp import McpApprovalRequestItem, approved_calls, requested_servers
from lightserve.httpserver.openai.responses.mcp_output import ApprovedCall
from lightserve.httpserver.openai.responses.request import ResponsesBody, translate_responses, validate_responses
from lightserve.httpserver.openai.responses.response import ResponsesResponse, ResponsesSpec
from lightserve.mcp.toolbox import Toolbox, closing_on_error
from lightserve.mcp.tools import function_name


@dataclass(frozen=True, slots=True)
class HostedChat:
    """The MCP tools of a request, and the calls of earlier responses that were made for it."""

    toolbox: Toolbox
    approved: Sequence[ApprovedCall]

    @classmethod
    async def open(cls, context: ServerContext, body: ResponsesBody) -> HostedChat | None:
        """None: the request names no MCP server."""
        servers = requested_servers(body.all_tools, body.input, context.mcp)
        calls = approved_calls(body.input)
        if not servers and not calls:
            return None
        toolbox = await Toolbox.open(context.mcp, servers, "tools")
        with closing_on_error(toolbox):
            return cls(toolbox, [await _approved(toolbox, call) for call in calls])

    def with_approved(self, value: JsonObject, body: ResponsesBody) -> ResponsesBody:
        """The body with the calls that were just made."""
        if not self.approved:
            return body
        items = [call.item(f"mcp_{call.approval_request_id}") for call in self.approved]
        return validate_responses({**value, "input": [*input_items(value), *items]})

    def describe(self, spec: ResponsesSpec) -> ResponsesSpec:
        toolbox = self.toolbox
        return replace(spec, hosted=toolbox.tools, listings=toolbox.listings, approved=self.approved)


@dataclass(frozen=True, slots=True)
class Continuation:
    """Makes the chats of later rounds: the same request, with the output so far at the end of its input."""

    context: ServerContext
    request: Request
    value: JsonObject  # the body, with the history
    toolbox: Toolbox
    response: ResponsesResponse

    def rounds(self, generation: Generation) -> ToolRounds:
        limits = RoundLimits(self.context.config.max_tool_rounds, self.value.get("max_tool_calls"))
        return ToolRounds(generation, self.response, self.toolbox, self.next_chat, limits)

    async def next_chat(self, may_call: bool) -> PreparedChat:
        log, output = self.response.log, self.response.body()["output"]
        choice = self._tool_choice() if may_call and output_formats(self.context).tools is not None else "none"
        value = {**self.value, "input": [*input_items(self.value), *output], "tool_choice": choice}
        if value.get("max_output_tokens") is not None:
            value["max_output_tokens"] = max(value["max_output_tokens"] - log.generated_tokens, 1)
        body = validate_responses(value)
        chat = translate_responses(body, self.context.images is not None, self.toolbox).chat
        return await prepare_chat(self.context, self.request, chat, body.logprobs, log=log)

    def _tool_choice(self) -> str | JsonObject:
        """A call that was required has been made: the model may answer now."""
        choice = self.value.get("tool_choice")
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            return {**choice, "mode": "auto"}
        return "auto"


async def _approved(toolbox: Toolbox, call: McpApprovalRequestItem) -> ApprovedCall:
    name = function_name(call.server_label, call.name)
    if name not in toolbox.tools:
        what = f"the call of {call.name[:100]!r} that it approves"
        raise InvalidRequestError(f"input: {what} needs the MCP server {call.server_label[:100]!r} in tools", "input")
    outcome = await toolbox.call(name, call.arguments)
    return ApprovedCall(call.server_label, call.name, call.arguments, call.id, outcome)
