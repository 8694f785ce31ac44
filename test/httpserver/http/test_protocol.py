"""Requests as bytes on a socket: what is refused before there is a request, and bodies that do not end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from lightserve.httpserver import engine_client as manager
from lightserve.httpserver.http import body, protocol
from lightserve.httpserver.http.protocol import HEADER_COST, MAX_HEAD_BYTES
from test.httpserver.fake_engine import spell
from test.httpserver.generate_server import Served, serve
from test.waiting import until

GET = b"GET /health HTTP/1.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
PROMPT = b'{"prompt": "x"}'


@pytest.fixture(autouse=True)
def no_heartbeat_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine sends no heartbeat, and on a loaded machine a test may take longer than the timeout."""
    monkeypatch.setattr(manager, "HEARTBEAT_TIMEOUT_S", math.inf)


class Wire:
    """A connection as a client has it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def response(self) -> tuple[int, Any]:
        """The next response."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(head.split()[1]), json.loads(await self.reader.readexactly(length))

    async def rest(self) -> bytes:
        """All bytes until the server closes the connection."""
        return await self.reader.read()


def on_the_wire(run_dir: Path, talk: Callable[[Wire], Awaitable[None]], text: str = "hi") -> None:
    async def scenario(server: Served) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await talk(Wire(reader, writer))
        writer.close()
        assert (await server.get("/health")).status == 200

    serve(scenario, run_dir, spell(text))


def head_of(size: int, count: int) -> bytes:
    """A head that counts ``size`` in so many headers."""
    name = b"x%05d"
    each, rest = divmod(size - len("/health") - count * (HEADER_COST + 6), count)
    lines = [name % i + b": " + b"v" * (each + (rest if i == 0 else 0)) for i in range(count)]
    return GET + b"\r\n".join(lines) + b"\r\n\r\n"


@pytest.mark.parametrize("count", [1, 1000])
def test_a_head_larger_than_the_limit_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int) -> None:
    async def talk(wire: Wire) -> None:
        wire.writer.write(head_of(MAX_HEAD_BYTES, count))
        assert (await wire.response())[0] == 200
        wire.writer.write(head_of(MAX_HEAD_BYTES + 1, count))
        status, error = await wire.response()
        assert status == 431
        assert "65536" in error["error"]["message"]
        assert await wire.rest() == b""

    with caplog.at_level("INFO", "lightserve.access"):
        on_the_wire(tmp_path, talk)

    [line] = [record.getMessage() for record in caplog.records if record.name == "lightserve.access"]
    assert re.match(r"127\.0\.0\.1:\d+ status=431: the request's head is larger", line)


@pytest.mark.parametrize("begin", [GET + b"X: ", b"GET /", CHUNKED + b"0\r\nX: "], ids=["header", "path", "trailer"])
def test_an_endless_body_is_refused_while_it_arrives(tmp_path: Path, begin: bytes) -> None:
    async def talk(wire: Wire) -> None:
        wire.writer.write(begin)
        response = asyncio.ensure_future(wire.response())
        while not response.done():
            wire.writer.write(b"x" * 65536)
            await wire.writer.drain()
            await asyncio.sleep(0)
        assert response.result()[0] == 431

    on_the_wire(tmp_path, talk)


def test_a_head_that_does_not_arrive_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.05)

    async def talk(wire: Wire) -> None:
        wire.writer.write(GET + b"\r\n")
        assert (await wire.response())[0] == 200
        wire.writer.write(b"GET /health")
        response = asyncio.ensure_future(wire.response())
        while not response.done():  # the time is for the whole, not from byte to byte
            wire.writer.write(b"x")
            await asyncio.sleep(0.001)
        assert response.result()[0] == 408
        assert await wire.rest() == b""

    on_the_wire(tmp_path, talk)


def test_a_client_that_sends_nothing_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = protocol.LimitedProtocol.connection_made

    def impatient(self: protocol.LimitedProtocol, transport: asyncio.Transport) -> None:
        self.timeout_keep_alive = 0
        made(self, transport)

    monkeypatch.setattr(protocol.LimitedProtocol, "connection_made", impatient)

    async def talk(wire: Wire) -> None:
        assert await wire.rest() == b""

    async def scenario(server: Served) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        await talk(Wire(*await asyncio.open_connection(host, int(port))))

    serve(scenario, tmp_path, spell("hi"))


def test_a_client_that_does_not_read_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = asyncio.Event()
    connection_lost = protocol.LimitedProtocol.connection_lost

    def recorded(self: protocol.LimitedProtocol, error: Exception | None) -> None:
        connection_lost(self, error)
        lost.set()

    monkeypatch.setattr(protocol.LimitedProtocol, "connection_lost", recorded)
    monkeypatch.setattr(protocol, "STALL_S", 0.05)
    count = 500  # some 100 KB each: more than the kernel keeps for a client

    async def talk(wire: Wire) -> None:
        wire.writer.write(b"GET /openapi.json HTTP/1.1\r\n\r\n" * count)

        await lost.wait()

        with contextlib.suppress(ConnectionResetError):
            assert (await wire.rest()).count(b"HTTP/1.1 200 OK") < count

    on_the_wire(tmp_path, talk)


@pytest.mark.parametrize(
    "begin", [CHUNKED + b"5\r\n", POST + b"Content-Length: 100\r\n\r\n"], ids=["chunked", "length"]
)
def test_a_body_that_does_not_end_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)

    async def talk(wire: Wire) -> None:
        wire.writer.write(begin + b'{"a')

        status, error = await wire.response()

        assert status == 408
        assert "did not arrive" in error["error"]["message"]
        assert await wire.rest() == b""

    on_the_wire(tmp_path, talk)


@pytest.mark.parametrize("protocol_name", [b"h2c", b"websocket"])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_protocol_upgrade_is_declined_and_the_request_is_served(
    tmp_path: Path, protocol_name: bytes, is_split: bool
) -> None:
    """curl --http2 and Java's client offer HTTP/2 with every request."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAMAAABk\r\n" % protocol_name
    request = POST + offer + b"Content-Length: %d\r\n\r\n" % len(PROMPT) + PROMPT

    async def talk(wire: Wire) -> None:
        for piece in (request[:70], request[70:-5], request[-5:]) if is_split else (request,):
            wire.writer.write(piece)
            await wire.writer.drain()
            await asyncio.sleep(0.01)
        status, response = await wire.response()
        assert (status, response["choices"][0]["text"]) == (200, "hi")

        wire.writer.write(request + GET + b"\r\n")  # the connection goes on as before
        assert (await wire.response())[0] == 200
        assert await wire.response() == (200, {"status": "ok"})

    on_the_wire(tmp_path, talk)


def test_a_connect_request_is_refused(tmp_path: Path) -> None:
    async def talk(wire: Wire) -> None:
        wire.writer.write(b"CONNECT example.org:80 HTTP/1.1\r\n\r\n")
        assert (await wire.response())[0] == 400
        assert await wire.rest() == b""

    on_the_wire(tmp_path, talk)


def test_garbage_after_a_request_does_not_change_its_response(tmp_path: Path) -> None:
    stream = b'{"prompt": "x", "stream": true}'

    async def scenario(server: Served) -> None:
        server.fake.hold.clear()
        host, port = server.url.removeprefix("http://").split(":")
        wire = Wire(*await asyncio.open_connection(host, int(port)))
        wire.writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(stream) + stream)
        await wire.reader.readuntil(b'"text":"h"')

        wire.writer.write(b"\0\0\0\0")

        assert b"HTTP/1.1 400" not in await wire.rest()
        await until(lambda: len(server.fake.aborted) == 1)

    serve(scenario, tmp_path, spell("hi"))


def test_a_client_that_closes_its_sending_side_has_disconnected(tmp_path: Path) -> None:
    """From here it looks like one that has left, and its request must end."""

    async def scenario(server: Served) -> None:
        server.fake.hold.clear()
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(PROMPT) + PROMPT)
        await until(lambda: len(server.fake.received) == 1)
        writer.write_eof()

        assert await reader.read() == b""
        await until(lambda: len(server.fake.aborted) == 1)
        writer.close()

    serve(scenario, tmp_path, spell("hi"))


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_request_leaves_nothing_for_the_garbage_collector(tmp_path: Path, is_stream: bool) -> None:
    """Its prompt may be long, and a process that serves collects rarely."""

    def requests() -> list[object]:
        return [known for known in gc.get_objects() if isinstance(known, manager.Generation | RequestResponseCycle)]

    async def talk(wire: Wire) -> None:
        request = json.dumps({"prompt": "x", "stream": is_stream}).encode()
        length = b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(request)

        wire.writer.write(POST + length + request)

        assert b'"finish_reason":"stop"' in await wire.rest()
        await until(lambda: not requests())

    gc.collect()
    gc.disable()
    try:
        on_the_wire(tmp_path, talk)
    finally:
        gc.enable()
