"""The application on a real socket, in a thread of its own, before a scripted engine. For the tests of OpenAI's API."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import tokenizers
import uvicorn

from lightserve.config import HttpConfig
from lightserve.httpserver.app import build_app
from lightserve.httpserver.context import ServerContext
from lightserve.messages.output import Admission, StrOut
from lightserve.messages.params import FinishReason
from lightserve.messages.request import GenerateReq
from lightserve.messages.step import ReqFailed, Token
from lightserve.model_files import Tokenizer
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from test.httpserver.fake_engine import FakeEngine, Script, engine, spell
from test.real_model import smollm2_tokenizer as smol
from test.waiting import DEADLINE_S, until

CACHED = 2  # cached tokens of each prompt, as the engine reports them
LEAVE_S = 2.0  # until a client leaves: its request has begun by then


@functools.cache
def _vocabulary() -> tokenizers.Tokenizer:
    """Of the default model. It takes 0.2 s to load, and encoding and decoding do not change it."""
    return tokenizers.Tokenizer.from_str(smol().to_json())


def with_template(template: str | None) -> Tokenizer:
    return Tokenizer(_vocabulary(), SpecialTokens(), template)


class Server:
    """A running server. ``engine.script`` may be replaced between requests."""

    def __init__(self, url: str, context: ServerContext, engine: FakeEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.context = context
        self.engine = engine
        self.may_stop = asyncio.Event()
        self._loop = loop
        self.http = httpx2.Client(base_url=url, timeout=DEADLINE_S)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)

    def post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        return self.http.post(path, json=body)

    def chat(self, **fields: Any) -> httpx2.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]} | fields)

    def complete(self, **fields: Any) -> httpx2.Response:
        return self.post("/v1/completions", {"prompt": "Once upon"} | fields)

    def stop(self) -> None:
        self.http.close()
        self.openai.close()
        self._loop.call_soon_threadsafe(self.may_stop.set)

    def hold(self) -> None:
        """Let no token but the first of a request out, until ``release``."""
        self._loop.call_soon_threadsafe(self.engine.hold.clear)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self.engine.hold.set)


@contextmanager
def running(run_dir: Path, tokenizer: Tokenizer | None = None, config: HttpConfig | None = None) -> Iterator[Server]:
    started: list[Server] = []
    has_started = threading.Event()

    async def serve() -> None:
        async with engine(run_dir, spell("Hello"), tokenizer or smol(), config) as (context, fake):
            server = uvicorn.Server(uvicorn.Config(build_app(context), log_config=None, ws="none", access_log=False))
            listener = socket.socket(proto=socket.IPPROTO_TCP)  # named, or asyncio would not set TCP_NODELAY
            listener.bind(("127.0.0.1", 0))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            await until(lambda: server.started)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            started.append(Server(url, context, fake, asyncio.get_running_loop()))
            has_started.set()
            await started[0].may_stop.wait()
            server.should_exit = True
            await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert has_started.wait(DEADLINE_S)
    try:
        yield started[0]
    finally:
        started[0].stop()
        thread.join(DEADLINE_S)


def rows(*texts: str, finish: FinishReason = FinishReason.STOP, stop_reason: int | str | None = None) -> Script:
    """Gives every request these pieces of text, with the ids of tokens of the same name where they exist."""
    ids = [(smol().encode(text, add_special_tokens=False) or [0])[0] for text in texts]
    return tokens(list(zip(ids, texts, strict=True)), finish, stop_reason)


def tokens(
    pieces: list[tuple[int, str]], finish: FinishReason = FinishReason.STOP, stop_reason: int | str | None = None
) -> Script:
    """Gives every request these tokens and the text that each completes."""

    def script(req: GenerateReq) -> list[StrOut | ReqFailed]:
        k = req.params.sampling.logprobs
        outs: list[StrOut | ReqFailed] = []
        for i, (token_id, text) in enumerate(pieces):
            is_last = i == len(pieces) - 1
            out = StrOut(
                req.req_id,
                text,
                Token(
                    token_id,
                    logprob=None if k is None else -0.5 - i,
                    top_logprobs=None if k is None else [(100 + j, -1.0 - j) for j in range(k)],
                ),
                finish_reason=finish if is_last else None,
                stop_reason=stop_reason if is_last else None,
                admission=Admission(0.001, CACHED) if i == 0 else None,
            )
            outs.append(out)
        return outs

    return script


def fails(status: int, message: str, *before: str) -> Script:
    """Fails every request, after these pieces of text."""

    def script(req: GenerateReq) -> list[StrOut | ReqFailed]:
        outs = [StrOut(req.req_id, text, Token(100), admission=Admission(0.0, 0)) for text in before]
        return [*outs, ReqFailed(req.req_id, status, message)]

    return script


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    """The JSON of a stream's events, whose last one must be the end marker."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, end = response.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    assert all(piece.startswith("data: {") for piece in pieces)
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


def named_events(response: httpx2.Response) -> list[dict[str, Any]]:
    """The JSON of a stream's events, each named by its type."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for piece in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = piece.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
