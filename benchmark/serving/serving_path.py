"""Throughput of the server without a model: streamed tokens per second, and CPU time per token of each process.

    python -m benchmark.serving.serving_path --streams 64 --http 1 2

    python -m benchmark.serving.serving_path --hops 200

    python -m benchmark.serving.serving_path --api chat messages responses --tools --tool_call_parser hermes

A null worker returns made-up tokens at once, so HTTP, routing, detokenizing and this client take all the time.
Tokens then come faster than they can be written one by one, and several events share a write. --step_ms avoids that.
Flags that this program does not know go to the server: with --reasoning_parser, or with --tools and --tool_call_parser,
the output of a chat is parsed. --hops sends single requests after the load, and prints how long each hop on their way
between the processes takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from benchmark.serving.request_hops import print_hops
from benchmark.serving.server import Server
from benchmark.serving.stream_client import StreamClient, finish, post

DRIVE_S = 300.0
TEXT = "The quick brown fox jumps over the lazy dog. " * 3
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Api:
    path: str
    end: bytes  # in the last bytes of every stream
    body: Callable[[int], Body]  # given the number of tokens
    tool: Body | None = None  # None: the API has no tools
    event: bytes = b"data:"  # in every event once


def _messages_body(tokens: int) -> Body:
    return {"messages": [{"role": "user", "content": TEXT}], "max_tokens": tokens}


APIS = {
    "chat": Api(
        "/v1/chat/completions",
        b"[DONE]",
        _messages_body,
        {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    ),
    "completions": Api("/v1/completions", b"[DONE]", lambda tokens: {"prompt": TEXT, "max_tokens": tokens}),
    "messages": Api("/v1/messages", b"message_stop", _messages_body, {"name": "weather", "input_schema": SCHEMA}),
    "responses": Api(
        "/v1/responses",
        b'"total_tokens"',
        lambda tokens: {"input": TEXT, "max_output_tokens": tokens},
        {"type": "function", "name": "weather", "parameters": SCHEMA},
    ),
    "ollama": Api(
        "/api/chat",
        b'"done":true',
        lambda tokens: {"messages": [{"role": "user", "content": TEXT}], "options": {"num_predict": tokens}},
        {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
        event=b'"done":',
    ),
    "lightllm": Api(
        "/generate_stream",
        b'"finished":true',
        lambda tokens: {"inputs": TEXT, "parameters": {"max_new_tokens": tokens, "ignore_eos": True}},
    ),
}


@dataclass(frozen=True, slots=True)
class Load:
    api: str
    streams: int  # at once
    rounds: int  # requests of each stream, one after the other
    tokens: int  # of each request
    has_tools: bool = False  # the request offers a tool


def request_of(load: Load, host: str) -> bytes:
    api = APIS[load.api]
    body = api.body(load.tokens)
    if load.api != "lightllm":
        body |= {"ignore_eos": True, "stream": True}
    if load.has_tools:
        if api.tool is None:
            raise ValueError(f"--tools: {load.api} has no tools")
        body["tools"] = [api.tool]
    return post(host, api.path, json.dumps(body).encode())


@dataclass(slots=True)
class Result:
    seconds: float = 0.0
    events: int = 0
    reads: int = 0


async def drive(load: Load, url: str) -> Result:
    request = request_of(load, urlsplit(url).netloc)

    async def stream() -> None:
        for _ in range(load.rounds):
            client = StreamClient(request, APIS[load.api].event)
            end = await finish(client, url)
            if b'"error":{' in end or APIS[load.api].end not in end:
                raise RuntimeError(f"a stream ended with {end!r}")
            result.events += client.events
            result.reads += client.reads

    result = Result()
    begin = time.perf_counter()
    async with asyncio.timeout(DRIVE_S), asyncio.TaskGroup() as tasks:
        for _ in range(load.streams):
            tasks.create_task(stream())
    result.seconds = time.perf_counter() - begin
    return result


def measure(http_workers: int, load: Load, flags: list[str], hops: int = 0) -> str:
    import uvloop

    server = Server(["--null_worker", "--httpserver_workers", str(http_workers), *flags])
    try:
        url = server.wait_until_ready()
        uvloop.run(drive(replace(load, rounds=1, tokens=load.tokens // 4), url))  # every process has met the load once
        before, own_before = server.cpu_s(), time.process_time()
        result = uvloop.run(drive(load, url))
        own = time.process_time() - own_before
        after = server.cpu_s()
        if hops:
            print_hops(url, partial(request_of, replace(load, tokens=2)), APIS[load.api].event, hops)
    finally:
        server.stop()
    tokens = load.streams * load.rounds * load.tokens
    costs = {name: (after[name] - before[name]) / tokens * 1e6 for name in sorted(after)}
    row = ", ".join(f"{name} {cost:.2f}" for name, cost in (costs | {"client": own / tokens * 1e6}).items())
    rates = f"{tokens / result.seconds:,.0f} tokens/s, {result.events / result.reads:.1f} events per read"
    return f"{load.api}, {http_workers} http: {rates}; CPU us per token: {row}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", choices=APIS, nargs="+", default=["completions"])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--tools", action="store_true", help="requests offer a tool; set --tool_call_parser too")
    parser.add_argument("--http", type=int, nargs="+", default=[1, 2], help="HTTP processes")
    parser.add_argument("--hops", type=int, default=0, metavar="N", help="time the hops of N single requests too")
    parser.add_argument("--step_ms", type=float, default=0.0, help="how long a step of the null worker takes")
    args, flags = parser.parse_known_args()
    flags += ["--null_step_ms", str(args.step_ms)]
    for api in args.api:
        for http_workers in args.http:
            load = Load(api, args.streams, args.rounds, args.tokens, args.tools)
            print(measure(http_workers, load, flags, args.hops), flush=True)


if __name__ == "__main__":
    main()
