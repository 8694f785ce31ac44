"""What an HTTP process does before its first request."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn

from lightserve.httpserver import main
from lightserve.httpserver.http.body import Body
from lightserve.messages.control import Ready


class Late(Body):
    text: str


class Launcher:
    def __init__(self) -> None:
        self.sent: list[tuple[object, bool]] = []

    def send(self, message: object) -> None:
        self.sent.append((message, Late.__pydantic_complete__))


async def listen(server: uvicorn.Server, sockets: object = None) -> None:
    pass


def test_validators_that_most_clients_need_are_built_after_the_launcher_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uvicorn.Server, "startup", listen)
    monkeypatch.setattr(main, "FIRST_BODIES", (Late,))
    monkeypatch.setattr(main, "collect_rarely", lambda: None)
    server = object.__new__(main._Server)
    server._launcher = launcher = Launcher()  # type: ignore[assignment]

    asyncio.run(server.startup())

    assert launcher.sent == [(Ready(), False)]
    assert Late.__pydantic_complete__
