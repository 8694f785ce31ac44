"""The log has one line for each request that generates or is refused, with its status."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lightserve.config import HttpConfig
from lightserve.messages.output import StrOut
from lightserve.messages.request import GenerateReq
from lightserve.messages.step import ReqFailed, Token
from test.httpserver.app_client import Served, served
from test.httpserver.fake_engine import Script

MINE = {"X-Request-Id": "mine"}
COMPLETE = "/v1/completions"
CONFIG = HttpConfig(max_body_bytes=1000)


def lines_of(
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    talk: Callable[[Served], Awaitable[Any]],
    config: HttpConfig = CONFIG,
    script: Script | None = None,
) -> list[str]:
    """The access log of what ``talk`` sends."""

    async def run() -> None:
        async with served(run_dir, config, script) as server:
            await talk(server)

    caplog.clear()
    with caplog.at_level("INFO", "lightserve.access"):
        asyncio.run(run())
    return [record.getMessage() for record in caplog.records if record.name == "lightserve.access"]


@pytest.mark.parametrize(
    ("method", "path", "sent", "line"),
    [
        ("POST", COMPLETE, {"json": {"prompt": [1], "n": 0}}, "status=400: n: Input should be greater than"),
        ("POST", COMPLETE, {"json": {"prompt": [1], "model": "gpt"}}, "status=404: the model 'gpt' does not exist"),
        (
            "POST",
            COMPLETE,
            {"content": b"x" * 2000},
            "status=413: the body is larger than 1000 bytes",
        ),
        ("POST", COMPLETE, {"content": b"a=b"}, "status=415: the body is not valid JSON"),
        ("POST", "/generate", {"json": {"inputs": "", "parameters": {"details": True}}}, "status=422: `inputs` cannot"),
        ("POST", "/v1/messages", {"json": {"messages": []}}, "status=400: messages: List should have at least 1 item"),
        ("GET", COMPLETE, {}, "status=405: the endpoint does not take this method; it takes POST"),
        ("GET", "/v1/modls", {}, "status=404: there is no such endpoint; did you mean GET /v1/models?"),
        ("DELETE", "/health", {}, "status=405: the endpoint does not take this method"),
        ("GET", "/v1/responses/x", {}, "status=404: response 'x' not found"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_refused_request_has_one_line_with_its_status_and_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, path: str, sent: dict[str, Any], line: str
) -> None:
    found = lines_of(tmp_path, caplog, lambda server: server.http.request(method, path, headers=MINE, **sent))

    assert len(found) == 1
    assert found[0].startswith(f"mine {method} {path} {line}")


def test_a_request_without_a_key_has_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = HttpConfig(api_key=["secret"])

    [line] = lines_of(tmp_path, caplog, lambda server: server.get("/v1/models", headers=MINE), config)

    assert line.startswith("mine GET /v1/models status=401: the API key is missing or wrong")


def test_a_client_cannot_forge_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    [line] = lines_of(tmp_path, caplog, lambda server: server.get("/a%0amine POST / status=200" + "x" * 5000))

    assert "\n" not in line
    assert " GET /a?mine POST" in line
    assert len(line) < 700


def test_probes_leave_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def probe(server: Served) -> None:
        assert (await server.get("/health")).status_code == 200
        server.context.manager.engine_died("gone")
        assert (await server.get("/health")).status_code == 503

    assert lines_of(tmp_path, caplog, probe) == []


@pytest.mark.parametrize(
    ("path", "body", "failed", "line"),
    [
        (COMPLETE, {"prompt": [1]}, None, "status=200 prompt=1 .* finish=stop"),
        (COMPLETE, {"prompt": [1], "stream": True}, None, "status=200 prompt=1 .* finish=stop"),
        (COMPLETE, {"prompt": [1]}, [429], "status=429 prompt=1 .* finish=error:429"),
        (COMPLETE, {"prompt": [1], "stream": True}, [429], "status=429 prompt=1 .* finish=error:429"),
        (COMPLETE, {"prompt": [1], "stream": True}, ["a", 503], "status=200 prompt=1 .* finish=error:503"),
        ("/generate", {"inputs": [1], "parameters": {}}, [504], "status=504 prompt=1 .* finish=error:504"),
    ],
)
def test_the_line_of_a_generation_has_the_status_that_the_client_got(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
    failed: list[int | str] | None,
    line: str,
) -> None:
    def script(req: GenerateReq) -> list[StrOut | ReqFailed]:
        outs = [one for one in failed or () if isinstance(one, str)]
        last = [one for one in failed or () if isinstance(one, int)]
        return [
            *(StrOut(req.req_id, text, Token(1)) for text in outs),
            *(ReqFailed(req.req_id, status, "no") for status in last),
        ]

    found = lines_of(
        tmp_path,
        caplog,
        lambda server: server.post(path, json=body, headers=MINE),
        script=None if failed is None else script,
    )

    assert len(found) == 1
    assert re.search(f"^mine {path} {line}$", found[0])


def test_lines_can_be_turned_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def talk(server: Served) -> None:
        await server.post(COMPLETE, json={"prompt": [1]})
        await server.post(COMPLETE, json={"prompt": [1], "n": 0})
        await server.get("/nowhere")

    assert lines_of(tmp_path, caplog, talk, HttpConfig(disable_log_requests=True)) == []
