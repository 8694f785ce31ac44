"""The header Host must be a name of this server: a web page whose name resolves to loopback cannot use it."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from lightserve.config import HttpConfig
from lightserve.errors import ForbiddenError
from lightserve.httpserver.http.middleware import allowed_hosts
from test.httpserver.app_client import served

FOREIGN = "evil.example:8000"


def is_allowed(host: str, config: HttpConfig) -> bool:
    try:
        allowed_hosts(config.host, config.allowed_hosts).check({b"host": host.encode("latin-1")})
    except ForbiddenError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "localhost.:8000",
        "chat.localhost",
        "127.0.0.1:8000",
        "127.8.9.10",
        "[::1]:8000",
        "[::1]",
        "192.168.1.2:8000",  # a port that is forwarded to loopback
        "host.docker.internal:8000",
        socket.gethostname(),
        f"{socket.gethostname().partition('.')[0]}.local:8000",
        "",
    ],
)
def test_local_names_and_addresses_are_allowed_on_loopback(host: str) -> None:
    assert is_allowed(host, HttpConfig())


@pytest.mark.parametrize(
    "host",
    [
        FOREIGN,
        "localhost.evil.example",
        "evil-localhost",
        "127.0.0.1.evil.example",
        "127.0.0.1:8000.evil.example",
        "localhost:8000:evil.example",
        "evil.example#localhost",
        "[::1]evil.example",
        "*",
        ".",
        "[",
        "é",
        "x" * 60_000,
    ],
)
@pytest.mark.parametrize("listening", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_other_names_are_refused_on_loopback(host: str, listening: str) -> None:
    assert not is_allowed(host, HttpConfig(host=listening))


def test_a_server_for_other_machines_has_names_that_it_does_not_know() -> None:
    assert is_allowed(FOREIGN, HttpConfig(host="0.0.0.0"))
    assert is_allowed(FOREIGN, HttpConfig(host="::"))


@pytest.mark.parametrize("listening", ["127.0.0.1", "0.0.0.0"])
def test_the_flag_adds_names_and_restricts_every_server_to_them(listening: str) -> None:
    config = HttpConfig(host=listening, allowed_hosts=["llm.example.com", "*.Corp.example"])

    assert is_allowed("llm.example.com:8000", config)
    assert is_allowed("a.b.corp.example", config)
    assert is_allowed("localhost:8000", config)
    assert not is_allowed("corp.example", config)
    assert not is_allowed("evilcorp.example", config)
    assert not is_allowed(FOREIGN, config)


def test_a_star_allows_every_name() -> None:
    assert is_allowed(FOREIGN, HttpConfig(allowed_hosts=["*"]))


def test_every_route_refuses_a_foreign_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, HttpConfig(root_path="/llm", allowed_origins=["*"])) as server:
            routes = [route for route in server.app.routes if isinstance(route, APIRoute)]
            paths = {"/", "/metrics", "/health", "/web/{name:path}", "/v1/chat/completions"}
            assert paths < {route.path for route in routes}
            for method, path in [(method, route.path) for route in routes for method in route.methods or ()]:
                headers = {"Host": FOREIGN, "Origin": f"http://{FOREIGN}", "Accept": "text/html"}
                response = await server.http.request(method, path, headers=headers, json={})
                assert response.status_code == 403, (method, path)

    asyncio.run(scenario())


def test_a_refusal_names_the_flag_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with served(tmp_path) as server:
            response = await server.post("/v1/chat/completions", json={}, headers={"Host": FOREIGN})

        assert response.status_code == 403
        assert response.json()["error"]["type"] == "permission_error"
        assert "'evil.example' is not a name of this server; --allowed_hosts" in response.json()["error"]["message"]

    with caplog.at_level(logging.INFO, "lightserve.access"):
        asyncio.run(scenario())
    assert "status=403: the header Host: 'evil.example' is not a name of this server" in caplog.text
