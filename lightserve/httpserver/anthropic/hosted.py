"""Messages whose model may call tools of MCP servers."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from lightserve.httpserver.anthropic.mcp import PARAM, with_output
from lightserve.httpserver.anthropic.request import MessagesBody, to_chat
from lightserve.httpserver.anthropic.response import MessagesResponse
from lightserve.httpserver.chat.output import output_formats
from lightserve.httpserver.chat.prepare import PreparedChat, prepare_chat
from lightserve.httpserver.chat.tool_rounds import RoundEvents, RoundLimits, ToolRounds, collect_rounds
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import Generation
from lightserve.httpserver.http.body import JsonObject, json_response, validate
from lightserve.httpserver.http.sse import EventStream
from lightserve.mcp.toolbox import Toolbox


async def open_toolbox(context: ServerContext, body: MessagesBody) -> Toolbox | None:
    """None: the request names no MCP server."""
    servers = body.servers(context.mcp)
    return await Toolbox.open(context.mcp, servers, PARAM) if servers else None


@dataclass(frozen=True, slots=True)
class Continuation:
    """Makes the chats of later rounds: the same request, with the output so far at its end."""

    context: ServerContext
    request: Request
    value: JsonObject  # the body
    toolbox: Toolbox
    response: MessagesResponse

    async def respond(self, generation: Generation) -> Response:
        limits = RoundLimits(self.context.config.max_tool_rounds)
        rounds = ToolRounds(generation, self.response, self.toolbox, self._next_chat, limits)
        if self.value.get("stream"):
            return await EventStream.open(self.request, RoundEvents(rounds))
        await collect_rounds(self.request, rounds)
        return json_response(self.response.body())

    async def _next_chat(self, may_call: bool) -> PreparedChat:
        log = self.response.log
        value = with_output(self.value, self.response.blocks)
        value["max_tokens"] = max(self.value["max_tokens"] - log.generated_tokens, 1)
        can_call = may_call and output_formats(self.context).tools is not None
        value["tool_choice"] = {"type": "auto" if can_call else "none"}
        chat = to_chat(self.context, validate(MessagesBody, value), self.toolbox)
        return await prepare_chat(self.context, self.request, chat, log=log)
