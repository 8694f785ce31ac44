"""Throughput of the server without a model: streamed tokens per second, and CPU time per token of each process.

    python -m lightserve.benchmark.serving_path --streams 64 --http 1 2

A null worker returns made-up tokens at once, so HTTP, routing, detokenizing and this client take all the time.
Tokens then come faster than they can be written one by one, and several events share a write. --step_ms avoids that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from lightserve.benchmark.server import Server
from lightserve.benchmark.stream_client import StreamClient, finish, post

DRIVE_S = 300.0
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "lightllm": "/generate_stream"}


@dataclass(frozen=True, slots=True)
class Load:
    api: str
    streams: int  # at once
    rounds: int  # requests of each stream, one after the other
    tokens: int  # of each request


def request_of(load: Load, host: str) -> bytes:
    text = "The quick brown fox jumps over the lazy dog. " * 3
    body: dict[str, object]
    if load.api == "lightllm":
        body = {"inputs": text, "parameters": {"max_new_tokens": load.tokens, "ignore_eos": True}}
    else:
        body = {"max_tokens": load.tokens, "ignore_eos": True, "stream": True}
        body |= {"prompt": text} if load.api == "completions" else {"messages": [{"role": "user", "content": text}]}
    return post(host, PATHS[load.api], json.dumps(body).encode())


@dataclass(slots=True)
class Result:
    seconds: float = 0.0
    events: int = 0
    reads: int = 0


async def drive(load: Load, url: str) -> Result:
    request = request_of(load, urlsplit(url).netloc)

    async def stream() -> None:
        for _ in range(load.rounds):
            client = StreamClient(request)
            end = await finish(client, url)
            if b"error" in end or not (b"[DONE]" in end or b'"finished":true' in end):
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


def measure(http_workers: int, load: Load, flags: list[str]) -> str:
    import uvloop

    server = Server(["--null_worker", "--httpserver_workers", str(http_workers), *flags])
    try:
        url = server.wait_until_ready()
        uvloop.run(drive(Load(load.api, load.streams, 1, load.tokens // 4), url))  # every process has met the load once
        before, own_before = server.cpu_s(), time.process_time()
        result = uvloop.run(drive(load, url))
        own = time.process_time() - own_before
        after = server.cpu_s()
    finally:
        server.stop()
    tokens = load.streams * load.rounds * load.tokens
    costs = {name: (after[name] - before[name]) / tokens * 1e6 for name in sorted(after)}
    row = ", ".join(f"{name} {cost:.0f}" for name, cost in (costs | {"client": own / tokens * 1e6}).items())
    rates = f"{tokens / result.seconds:,.0f} tokens/s, {result.events / result.reads:.1f} events per read"
    return f"{load.api}, {http_workers} http: {rates}; CPU us per token: {row}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", choices=PATHS, nargs="+", default=["completions"])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--http", type=int, nargs="+", default=[1, 2], help="HTTP processes")
    parser.add_argument("--step_ms", type=float, default=0.0, help="how long a step of the null worker takes")
    args, flags = parser.parse_known_args()
    flags += ["--null_step_ms", str(args.step_ms)]
    for api in args.api:
        for http_workers in args.http:
            print(measure(http_workers, Load(api, args.streams, args.rounds, args.tokens), flags), flush=True)


if __name__ == "__main__":
    main()
