"""A server on loopback that answers each request as a test says."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

TLS = Path(__file__).parent.parent.parent / "api" / "tls"  # a certificate of localhost and 127.0.0.1


def answer(body: bytes, *headers: str, status: int = 200) -> bytes:
    head = [f"HTTP/1.1 {status} Text", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def redirect(location: str) -> bytes:
    return answer(b"", f"Location: {location}", status=302)


class ImageHost:
    def __init__(self, answers: Callable[[str], bytes | None]) -> None:
        """``answers``: to a target; None: the host hangs."""
        self.answers = answers
        self.heads: list[str] = []  # of the requests
        self.num_open = 0
        self.most_open = 0
        self.go_on = asyncio.Event()  # for those that hang
        self.port = 0

    def url(self, path: str = "/cat.png", host: str = "localhost", scheme: str = "https") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            data = self.answers(head.split()[1])
            if data is None:
                await self.go_on.wait()
            writer.write(data or b"")
            await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            self.num_open -= 1
            writer.transport.abort() if writer.is_closing() else writer.close()


@asynccontextmanager
async def image_host(answers: Callable[[str], bytes | None], is_tls: bool = True) -> AsyncIterator[ImageHost]:
    host = ImageHost(answers)
    context = None
    if is_tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0, ssl=context)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        host.go_on.set()
        server.close()


@contextmanager
def image_host_in_thread(answers: Callable[[str], bytes | None], is_tls: bool = True) -> Iterator[ImageHost]:
    """For tests whose client is a server in other processes."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = image_host(answers, is_tls)
    try:
        yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
