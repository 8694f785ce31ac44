"""A response in rounds: the model writes, this server calls the MCP tools that it asked for, and the model goes on.

The rounds are one request for everybody else: one generation, which a drain waits for, one response, one log line.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request

from lightserve.errors import LightserveError
from lightserve.httpserver.chat.parts import Part, PartsResponse
from lightserve.httpserver.chat.prepare import PreparedChat
from lightserve.httpserver.engine_client import Generation
from lightserve.httpserver.http.errors import log_stream_error
from lightserve.httpserver.http.sse import Connection, StreamRecorder, until_disconnect
from lightserve.mcp.toolbox import Toolbox
from lightserve.mcp.tools import ToolOutcome

NextChat = Callable[[bool], Awaitable[PreparedChat]]  # whether the model may call tools in it


@dataclass(frozen=True, slots=True)
class RoundLimits:
    rounds: int  # with calls; the model then has to answer
    calls: int | None = None  # of the whole response; None: no limit


class ToolRounds:
    """``next_chat`` makes the chat with everything that the response has so far."""

    def __init__(
        self,
        generation: Generation,
        response: PartsResponse,
        toolbox: Toolbox,
        next_chat: NextChat,
        limits: RoundLimits,
    ) -> None:
        self.generation = generation
        self.response = response
        self._toolbox = toolbox
        self._next_chat = next_chat
        self._limits = limits
        self._n_rounds = 0
        self._n_calls = 0

    async def run(self) -> AsyncGenerator[bytes, None]:
        """The events of the response. The generation has been entered. Errors are raised."""
        try:
            async for events in self._rounds():
                if events:
                    yield events
        finally:
            self._toolbox.close()

    async def _rounds(self) -> AsyncGenerator[bytes, None]:
        response = self.response
        head = response.begin()
        while True:
            calls: list[Part] = []
            async for outs in self.generation:
                events, head = head + response.write(outs), b""
                calls = response.take_calls()
                yield events
            for call in calls:
                yield response.add_outcome(call, await self._outcome(call))
            if not calls or response.waits_for_client:
                break
            await self._continue()
        response.close_round()
        yield response.end()

    async def _outcome(self, call: Part) -> ToolOutcome:
        limit = self._limits.calls
        if limit is not None and self._n_calls >= limit:
            message = f"the call was not made: max_tool_calls is {limit}"
            return ToolOutcome(error={"type": "mcp_protocol_error", "code": -32000, "message": message})
        self._n_calls += 1
        return await self._toolbox.call(call.name, call.text)

    async def _continue(self) -> None:
        self._n_rounds += 1
        has_calls_left = self._limits.calls is None or self._n_calls < self._limits.calls
        chat = await self._next_chat(has_calls_left and self._n_rounds < self._limits.rounds)
        self.generation.continue_with(chat.prompt_requests)
        self.response.begin_round(chat.output.new_parser())


class RoundEvents:
    """The events of a response in rounds. Such a stream cannot be resumed: its calls are not made again."""

    def __init__(self, rounds: ToolRounds) -> None:
        self.has_begun = False
        self.keep_alive = rounds.response.keep_alive()
        self.recorder: StreamRecorder | None = None
        self.generator = self._generate(rounds)

    def record(self, recorder: StreamRecorder | None) -> None:
        if recorder is not None:
            recorder.discard()

    def write_to(self, connection: Connection, on_written: Callable[[], None]) -> None:
        """Each round has a generation of its own."""

    async def __anext__(self) -> bytes:
        return await anext(self.generator)

    async def aclose(self) -> None:
        await self.generator.aclose()

    async def _generate(self, rounds: ToolRounds) -> AsyncGenerator[bytes, None]:
        request_id = rounds.generation.log.request_id
        try:
            async with rounds.generation, aclosing(rounds.run()) as events:
                async for some in events:
                    self.has_begun = True
                    yield some
        except LightserveError as error:
            if not self.has_begun:
                raise
            log_stream_error(error, request_id)
            yield rounds.response.error(error, request_id)


async def collect_rounds(request: Request, rounds: ToolRounds) -> None:
    """Run them to the end; stop when the client disconnects."""
    await until_disconnect(request, _collect(rounds))


async def _collect(rounds: ToolRounds) -> None:
    async with rounds.generation, aclosing(rounds.run()) as events:
        async for _ in events:
            pass
