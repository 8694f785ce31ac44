"""The benchmark of the serving path runs every API against a server without a model."""

from __future__ import annotations

import asyncio

import pytest

from lightserve.benchmark.server import Server
from lightserve.benchmark.serving_path import APIS, Load, drive, request_of

PARSERS = ["--tool_call_parser", "hermes", "--reasoning_parser", "qwen3"]


@pytest.mark.slow
def test_every_api_streams_as_many_events_as_tokens() -> None:
    server = Server(["--null_worker", *PARSERS])
    try:
        url = server.wait_until_ready()
        loads = [Load(name, 1, 1, 8, has_tools=api.tool is not None) for name, api in APIS.items()]
        results = {load.api: asyncio.run(drive(load, url)) for load in loads}
    finally:
        server.stop()

    assert {name for name, result in results.items() if result.events >= 8} == set(APIS)


def test_an_api_without_tools_is_refused_with_tools() -> None:
    with pytest.raises(ValueError, match="completions has no tools"):
        request_of(Load("completions", 1, 1, 8, has_tools=True), "host")
