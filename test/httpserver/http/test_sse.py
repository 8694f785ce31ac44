"""Streams that wait: keep-alives, and errors after the status was sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import pytest
from starlette.requests import Request

from lightserve.errors import InvalidRequestError, LightserveError
from lightserve.httpserver.http.sse import KEEP_ALIVE, EventStream, EventWriter, GenerationEvents, Outs
from lightserve.httpserver.http.unread import Write
from lightserve.messages.output import StrOut
from lightserve.messages.step import Token
from test.waiting import until

SOON_S = 0.01


class Generation:
    """Tokens that a test sends."""

    def __init__(self) -> None:
        self.unread: asyncio.Queue[str | LightserveError | None] = asyncio.Queue()
        self.is_closed = False

    def fix_seeds(self, seeds: Sequence[int] | None = None) -> list[int]:
        raise NotImplementedError  # no test records it

    def continue_after(self, outs: Outs, age_s: float) -> None:
        raise NotImplementedError

    def write_with(self, write: Write) -> None:
        raise NotImplementedError  # no test has a connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.is_closed = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Outs:
        found = await self.unread.get()
        if isinstance(found, LightserveError):
            raise found
        if found is None:
            raise StopAsyncIteration
        return [(0, StrOut(0, found, Token(1)))]


class TextWriter(EventWriter):
    def write(self, outs: Outs) -> bytes:
        return b"".join(b"data: %b\n\n" % out.text.encode() for _, out in outs)

    def end(self) -> bytes:
        return b"data: end\n\n"

    def error(self, error: LightserveError, request_id: str) -> bytes:
        return b"data: error %b\n\n" % request_id.encode()


class SilentWriter(TextWriter):
    def keep_alive(self) -> bytes:
        return b""


class Exchange:
    """A request that has been read, and what was sent in response."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.disconnect = asyncio.Event()
        self.request = Request({"type": "http", "headers": []}, self.receive)

    async def receive(self) -> dict[str, Any]:
        await self.disconnect.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(b"status" if message["type"] == "http.response.start" else message["body"])

    async def run(self, generation: Generation, writer: EventWriter) -> None:
        stream = await EventStream.open(self.request, GenerationEvents(generation, writer, "req-7"))
        await stream({"type": "http"}, self.receive, self.send)

    @property
    def keep_alives(self) -> int:
        return self.sent.count(KEEP_ALIVE)


Scenario = Callable[[Exchange, Generation, "asyncio.Task[None]"], Awaitable[None]]


def run(scenario: Scenario, writer: EventWriter | None = None) -> list[bytes]:
    """What was sent without the keep-alives, whose number depends on time."""

    async def main() -> list[bytes]:
        exchange, generation = Exchange(), Generation()
        task = asyncio.create_task(exchange.run(generation, writer or TextWriter()))
        await scenario(exchange, generation, task)
        assert generation.is_closed
        return [piece for piece in exchange.sent if piece != KEEP_ALIVE]

    return asyncio.run(main())


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventStream, "keep_alive_s", SOON_S)


@pytest.mark.usefixtures("soon")
def test_a_stream_that_waits_for_its_first_token_sends_keep_alives() -> None:
    async def scenario(exchange: Exchange, generation: Generation, task: asyncio.Task[None]) -> None:
        await until(lambda: exchange.keep_alives >= 3)
        assert exchange.sent[:2] == [b"status", KEEP_ALIVE]
        for text in ("a", "b", None):
            generation.unread.put_nowait(text)
        await task

    assert run(scenario) == [b"status", b"data: a\n\n", b"data: b\n\n", b"data: end\n\n", b""]


@pytest.mark.usefixtures("soon")
def test_a_stream_that_waits_between_tokens_sends_keep_alives() -> None:
    async def scenario(exchange: Exchange, generation: Generation, task: asyncio.Task[None]) -> None:
        generation.unread.put_nowait("a")
        await until(lambda: b"data: a\n\n" in exchange.sent)
        before = exchange.keep_alives
        await until(lambda: exchange.keep_alives >= before + 2)
        generation.unread.put_nowait(None)
        await task

    assert run(scenario) == [b"status", b"data: a\n\n", b"data: end\n\n", b""]


def test_an_error_soon_is_a_status() -> None:
    async def scenario(exchange: Exchange, generation: Generation, task: asyncio.Task[None]) -> None:
        generation.unread.put_nowait(InvalidRequestError("too long"))
        with pytest.raises(InvalidRequestError):
            await task

    assert run(scenario) == []


@pytest.mark.usefixtures("soon")
def test_an_error_after_the_first_keep_alive_is_an_event_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(exchange: Exchange, generation: Generation, task: asyncio.Task[None]) -> None:
        await until(lambda: exchange.keep_alives >= 1)
        generation.unread.put_nowait(InvalidRequestError("the sender is at fault"))
        await task

    with caplog.at_level(logging.INFO):
        assert run(scenario) == [b"status", b"data: error req-7\n\n", b""]

    assert "req-7 failed after its first event (400): the sender is at fault" in caplog.text


def test_a_writer_without_keep_alives_waits_for_the_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventStream, "keep_alive_s", 0.0)

    async def scenario(exchange: Exchange, generation: Generation, task: asyncio.Task[None]) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        generation.unread.put_nowait(InvalidRequestError("too long"))
        with pytest.raises(InvalidRequestError):
            await task

    assert run(scenario, SilentWriter()) == []


@pytest.mark.usefixtures("soon")
def test_a_client_that_disconnects_while_it_waits_ends_the_generation() -> None:
    async def scenario(exchange: Exchange, generation: Generation, task: asyncio.Task[None]) -> None:
        await until(lambda: exchange.keep_alives >= 1)
        exchange.disconnect.set()
        await task

    assert run(scenario) == [b"status"]


def test_an_unexpected_exception_in_a_stream_reaches_the_middleware() -> None:
    class BrokenWriter(TextWriter):
        def end(self) -> bytes:
            raise KeyError("a bug")

    async def scenario(exchange: Exchange, generation: Generation, task: asyncio.Task[None]) -> None:
        generation.unread.put_nowait("a")
        generation.unread.put_nowait(None)
        with pytest.raises(KeyError):
            await task

    assert run(scenario, BrokenWriter()) == [b"status", b"data: a\n\n"]
