"""The benchmark of the serving path runs every API against a server without a model."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from urllib.parse import urlsplit

import pytest

from benchmark.serving.request_hops import HOPS, hop_table, measure_hops
from benchmark.serving.server import Server
from benchmark.serving.serving_path import APIS, Load, drive, request_of

ROUNDING_MS = 0.01
PARSERS = ["--tool_call_parser", "hermes", "--reasoning_parser", "qwen3"]


@pytest.mark.slow
def test_every_api_streams_as_many_events_as_tokens() -> None:
    server = Server(["--null_worker", *PARSERS])
    try:
        url = server.wait_until_ready()
        loads = [Load(name, 1, 1, 8, has_tools=api.tool is not None) for name, api in APIS.items()]
        results = {load.api: asyncio.run(drive(load, url)) for load in loads}
        request = request_of(Load("completions", 1, 1, 4), urlsplit(url).netloc)
        requests = asyncio.run(measure_hops(url, request, APIS["completions"].event, 3))
    finally:
        server.stop()

    assert {name for name, result in results.items() if result.events >= 8} == set(APIS)
    for moment in requests:
        order = ["sent", "arrived", "queued", "step", "step_end", "first_token", "first_read"]
        assert all(moment[before] <= moment[after] + ROUNDING_MS for before, after in pairwise(order))
        assert moment["first_token"] <= moment["finished"] <= moment["last_read"] + ROUNDING_MS
    assert len(list(hop_table(requests))) == 1 + len(HOPS)


def test_an_api_without_tools_is_refused_with_tools() -> None:
    with pytest.raises(ValueError, match="completions has no tools"):
        request_of(Load("completions", 1, 1, 8, has_tools=True), "host")
