"""The application on a real socket, before a scripted engine. For the tests of /generate and /tokenize."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvicorn
from fastapi import FastAPI

from lightserve.config import HttpConfig
from lightserve.httpserver.app import build_app
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.protocol import LimitedProtocol
from test.httpserver.fake_engine import FakeEngine, Script, engine
from test.real_model import smollm2_tokenizer as smol
from test.waiting import DEADLINE_S, until


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON of each event, whatever stands between ``data:`` and it."""
        pieces = self.body.split(b"\n\n")
        assert pieces.pop() == b""
        assert all(piece.startswith(b"data:") for piece in pieces)
        return [orjson.loads(piece.removeprefix(b"data:")) for piece in pieces]


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    context: ServerContext
    fake: FakeEngine
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Any, method: str = "POST") -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        async with self.session.request(method, self.url + path, data=data, headers=headers) as response:
            found = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, found, await response.read())

    async def get(self, path: str) -> Answer:
        async with self.session.get(self.url + path) as response:
            return Answer(response.status, {}, await response.read())


Scenario = Callable[[Served], Awaitable[None]]


def serve(scenario: Scenario, run_dir: Path, script: Script, config: HttpConfig | None = None) -> None:
    """Runs ``scenario`` against a server whose fake engine follows ``script``."""

    async def run() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            engine(run_dir, script, smol(), config) as (context, fake),
            _listening(build_app(context)) as url,
            aiohttp.ClientSession() as session,
        ):
            await scenario(Served(url, context, fake, session))

    asyncio.run(run())


class _Server(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


@asynccontextmanager
async def _listening(app: FastAPI) -> AsyncIterator[str]:
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # named, or asyncio would not set TCP_NODELAY
    listener.bind(("127.0.0.1", 0))
    server = _Server(uvicorn.Config(app, http=LimitedProtocol, log_config=None, ws="none", timeout_graceful_shutdown=1))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
