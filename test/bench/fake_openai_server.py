"""An OpenAI-compatible server with fixed delays and no model, to test clients.

    python -m test.bench.fake_openai_server --port 8100 --ttft_ms 50 --step_ms 10

Every event has the same bytes, so that a slow client shows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MODELS = {"object": "list", "data": [{"id": "fake", "object": "model", "root": "fake"}]}


@dataclass(frozen=True)
class Behaviour:
    ttft_s: float = 0.0
    step_s: float = 0.0
    tokens_per_event: int = 1
    has_usage: bool = True
    fails_every: int = 0  # every nth request gets status 503; 0: none
    breaks_every: int = 0  # every nth stream ends without an end
    finish_reason: str = "length"
    drops_reused: bool = False  # closes a connection instead of answering its second request
    sends_role_early: bool = False  # before the first token of a chat, not with it


def event(value: Any) -> bytes:
    data = value if isinstance(value, str) else json.dumps(value)
    line = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(line), line)


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})


def length_of(body: dict[str, Any]) -> int:
    return int(body.get("max_tokens") or body["max_completion_tokens"])


class FakeServer:
    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self.connections = 0
        self.url = ""

    async def serve(self, port: int, is_ready: threading.Event | None = None) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", port, backlog=2048, limit=1 << 24)
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        if is_ready:
            is_ready.set()
        await self._stop.wait()
        server.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        answered = 0
        try:
            while not (answered and self._behaviour.drops_reused):
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    self._json(writer, b"200 OK", MODELS)
                    continue
                if b"/completions " not in head.partition(b"\r\n")[0]:
                    break
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.heads.append(head)
                self.bodies.append(body)
                if not await self._respond(writer, body, len(self.bodies), b"/chat/" in head.split(b"\r\n")[0]):
                    break
                answered += 1
            else:
                await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _json(self, writer: asyncio.StreamWriter, status: bytes, value: Any) -> None:
        data = json.dumps(value).encode()
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        writer.write(head % (status, len(data), data))

    async def _respond(self, writer: asyncio.StreamWriter, body: dict[str, Any], number: int, is_chat: bool) -> bool:
        """Whether the connection stays open."""
        how = self._behaviour
        if how.fails_every and number % how.fails_every == 0:
            self._json(writer, b"503 Service Unavailable", {"error": {"message": "the fake server is full"}})
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        if is_chat and how.sends_role_early:
            writer.write(ROLE)
        await self._stream(writer, length_of(body), is_chat)
        if how.breaks_every and number % how.breaks_every == 0:
            return False
        self._end(writer, body, is_chat)
        await writer.drain()
        return True

    async def _stream(self, writer: asyncio.StreamWriter, tokens: int, is_chat: bool) -> None:
        how = self._behaviour
        content = {"delta": {"content": " word"}} if is_chat else {"text": " word"}
        later = event({"id": "x" * 24, "object": "chunk", "choices": [{"index": 0, **content, "finish_reason": None}]})
        line = ROLE + later if is_chat and not how.sends_role_early else later
        due = asyncio.get_running_loop().time() + how.ttft_s
        for _ in range(0, tokens, how.tokens_per_event):
            if how.ttft_s or how.step_s:
                await asyncio.sleep(due - asyncio.get_running_loop().time())
                due += how.step_s
            writer.write(line)
            line = later
            await writer.drain()

    def _end(self, writer: asyncio.StreamWriter, body: dict[str, Any], is_chat: bool) -> None:
        last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        writer.write(event({"choices": [{"index": 0, **last, "finish_reason": self._behaviour.finish_reason}]}))
        if self._behaviour.has_usage and body.get("stream_options", {}).get("include_usage"):
            prompt = body.get("prompt") or "".join(str(message["content"]) for message in body["messages"])
            usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": length_of(body)}
            writer.write(event({"choices": [], "usage": usage}))
        writer.write(event("[DONE]") + b"0\r\n\r\n")


@contextmanager
def fake_server(behaviour: Behaviour | None = None) -> Iterator[FakeServer]:
    """In a thread of this process."""
    server = FakeServer(behaviour or Behaviour())
    is_ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(0, is_ready)))
    thread.start()
    is_ready.wait()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--ttft_ms", type=float, default=0.0)
    parser.add_argument("--step_ms", type=float, default=0.0)
    parser.add_argument("--tokens_per_event", type=int, default=1)
    args = parser.parse_args()
    behaviour = Behaviour(args.ttft_ms / 1e3, args.step_ms / 1e3, args.tokens_per_event)
    uvloop.run(FakeServer(behaviour).serve(args.port))


if __name__ == "__main__":
    main()
