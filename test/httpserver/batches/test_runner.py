"""A line of a batch, whatever the route of its endpoint does: it has a response, and the batch goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lightserve.batches.entry import response_entry
from lightserve.batches.line import LineRequest
from lightserve.httpserver.batches.runner import LinePace, LineResponse, LineRunner

URL = "/v1/completions"


def run(app: ASGIApp, body: dict[str, Any]) -> LineResponse:
    return asyncio.run(LineRunner(app, logs_requests=False).run(LineRequest("a", URL, body), "owner", "id-1"))


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def test_a_response_is_in_the_results_as_it_came() -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await Response((await receive())["body"], 201)(scope, receive, send)

    response = run(echo, {"prompt": "Hi"})
    line = orjson.loads(response_entry("openai", "a", *response).text)

    assert line["response"]["status_code"] == 201
    assert line["response"]["body"]["prompt"] == "Hi"


@pytest.mark.parametrize("content", [b"", b"Internal Server Error", b'{"cut', b"\xff"])
def test_a_response_that_is_no_json_is_an_error_of_its_line(content: bytes) -> None:
    response = run(Response(content), {})

    assert (response.status, response.request_id) == (500, "id-1")
    assert "failed to process" in response.body["error"]["message"]


def test_a_route_that_fails_is_an_error_of_its_line() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError

    assert run(fail, {}).status == 500


def test_a_body_of_too_many_levels_is_an_error_of_its_line() -> None:
    assert run(Response(b"{}"), nested(300)).status == 500  # the check of the file refuses it before


def test_a_response_of_many_levels_is_kept() -> None:
    content = orjson.dumps(nested(254))

    line = response_entry("openai", "a", *run(Response(content), {})).text

    assert content in line
    assert orjson.loads(line)["custom_id"] == "a"


def test_lines_begin_one_by_one_and_the_loop_is_free_in_between() -> None:
    pace, turns = LinePace(), 0
    order: list[int] = []

    async def begin(number: int) -> None:
        await pace.wait()
        order.append(turns)

    async def count_turns() -> None:
        nonlocal turns
        while len(order) < 5:
            turns += 1
            await asyncio.sleep(0)

    async def run_all() -> None:
        await asyncio.gather(count_turns(), *(begin(number) for number in range(5)))

    asyncio.run(run_all())

    assert len(set(order)) == 5
