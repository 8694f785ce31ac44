"""One GET of HTTP/1.1 to an address that was checked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

import h11

from lightserve import __version__
from lightserve.errors import InvalidRequestError
from lightserve.outbound.dial import connect
from lightserve.outbound.urls import OutboundUrl

READ_BYTES = 65536
REDIRECTS = (301, 302, 303, 307, 308)
UNREACHABLE = "its server cannot be reached"
BROKEN = "its server gave an answer that is broken or incomplete"


@dataclass(frozen=True, slots=True)
class Answer:
    data: bytes
    location: str = ""  # of a redirect


async def get(url: OutboundUrl, addresses: Sequence[str], max_bytes: int, tls: ssl.SSLContext) -> Answer:
    """``max_bytes``: a longer answer is refused, and not read further."""
    try:
        reader, writer = await connect(url, addresses, tls)
    except OSError as error:
        raise InvalidRequestError(UNREACHABLE) from error
    try:
        return await _Exchange(reader, max_bytes).run(url, writer)
    except (OSError, EOFError, h11.ProtocolError) as error:
        raise InvalidRequestError(BROKEN) from error
    finally:
        writer.transport.abort()  # nothing is left to say, and closing TLS in order could hang


class _Exchange:
    def __init__(self, reader: asyncio.StreamReader, max_bytes: int) -> None:
        self._reader = reader
        self._max_bytes = max_bytes
        self._connection = h11.Connection(h11.CLIENT)

    async def run(self, url: OutboundUrl, writer: asyncio.StreamWriter) -> Answer:
        headers = {
            "Host": url.host_header,
            "User-Agent": f"lightserve/{__version__}",
            "Accept": "image/*",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        request = h11.Request(method="GET", target=url.target, headers=list(headers.items()))
        writer.write(self._connection.send(request) or b"")
        self._connection.send(h11.EndOfMessage())
        await writer.drain()
        response = await self._response()
        fields = dict(iter(response.headers))
        if response.status_code in REDIRECTS and b"location" in fields:
            return Answer(b"", fields[b"location"].decode("utf-8", "replace"))
        if response.status_code != 200:
            raise InvalidRequestError(f"its server answered with status {response.status_code}")
        if fields.get(b"content-encoding", b"identity").lower() != b"identity":
            raise InvalidRequestError("its server sent it compressed, although that was not wanted")
        return Answer(await self._body(int(fields.get(b"content-length", 0))))

    async def _response(self) -> h11.Response:
        while not isinstance(event := await self._event(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise InvalidRequestError(BROKEN)
        return event

    async def _body(self, announced: int) -> bytes:
        data = bytearray()
        self._check_size(announced)
        while isinstance(event := await self._event(), h11.Data):
            data += event.data
            self._check_size(len(data))
        return bytes(data)

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            limit = self._max_bytes // 10**6
            raise InvalidRequestError(f"it has more than {limit} MB (--max_image_mb); send it smaller")

    async def _event(self) -> h11.Event | type[h11.PAUSED]:
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            self._connection.receive_data(await self._reader.read(READ_BYTES))
        return event  # type: ignore[return-value]
