"""Thousands of requests at once, some of which disconnect, and the latency of /health meanwhile.

    python -m benchmark.serving.storm --requests 2000 --disconnects 500

A null worker returns made-up tokens, so the server and this client take all the time. The program prints how the
requests ended, what the router holds afterwards, and the quantiles of /health as measured by another process. It exits
with 1 if a request was lost, the router still holds something, or the p99 of /health is too high.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from urllib.parse import urlsplit

from benchmark.serving.server import Server
from benchmark.serving.serving_path import Load, request_of
from benchmark.serving.stream_client import DisconnectingClient, StreamClient, finish
from lightserve.utils.net import raise_fd_limit

HEALTH_P99_MS = 250.0
IDLE_S = 30.0
# Polls /health 50 times a second until its input ends, each time on a new connection, as probes do. Prints the status
# and the milliseconds of each poll.
PROBE = """
import asyncio, sys, time
host, port = sys.argv[1].rsplit(":", 1)

async def probe():
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
    response = await reader.read()
    writer.close()
    print(int(response[9:12] or 0), (time.perf_counter() - begin) * 1e3)

async def main():
    over = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    async with asyncio.TaskGroup() as tasks:
        while not over.done():
            tasks.create_task(probe())
            await asyncio.sleep(0.02)

asyncio.run(main())
"""
HELD = ("lightserve_num_requests_running", "lightserve_num_requests_waiting", "lightserve_kv_used_tokens")


@dataclass(frozen=True, slots=True)
class Outcome:
    ends: Counter[str]
    seconds: float
    health_ms: list[float]
    unhealthy: int
    held: dict[str, float]

    @property
    def health_p99_ms(self) -> float:
        return sorted(self.health_ms)[int(len(self.health_ms) * 0.99)]

    @property
    def passed(self) -> bool:
        is_healthy = not self.unhealthy and self.health_p99_ms < HEALTH_P99_MS
        return is_healthy and not self.ends["lost"] and not any(self.held.values())

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {how}" for how, count in sorted(self.ends.items()))
        held = ", ".join(f"{name.removeprefix('lightserve_')} {value:g}" for name, value in self.held.items())
        ms = sorted(self.health_ms)
        quantiles = ", ".join(f"p{q} {ms[int(len(ms) * q / 100)]:.1f}" for q in (50, 90, 99))
        health = f"/health: {len(ms)} polls, {self.unhealthy} not 200; ms: {quantiles}, longest {ms[-1]:.1f}"
        return f"{sum(self.ends.values())} requests in {self.seconds:.1f} s: {ends}\nafterwards: {held}\n{health}"


def how_it_ended(client: StreamClient) -> str:
    """How the request of a client that waited has ended, by the last bytes of the response."""
    end = client.done.result()
    if client.status == 429:
        return "refused (429)"
    return "completed" if client.status == 200 and b"[DONE]" in end and b'"error"' not in end else "lost"


async def run_clients(url: str, load: Load, disconnects: int, seed: int) -> Counter[str]:
    """Connect all clients at once. Returns how many requests ended in each way."""
    request = request_of(load, urlsplit(url).netloc)
    rng = random.Random(seed)

    async def run_client(client: StreamClient) -> str:
        await finish(client, url)
        return "disconnected" if isinstance(client, DisconnectingClient) else how_it_ended(client)

    clients: list[StreamClient] = [StreamClient(request) for _ in range(load.streams)]
    clients += [DisconnectingClient(request, rng.choice((0, 1, load.tokens // 2))) for _ in range(disconnects)]
    rng.shuffle(clients)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run_client(client)) for client in clients]
    return Counter(task.result() for task in running)


class HealthProbe:
    """Another process that polls /health: this one is too busy to measure its latency."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-c", PROBE, urlsplit(url).netloc]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end(self) -> tuple[list[float], int]:
        """The milliseconds of each poll, and the number of polls without status 200."""
        out, _ = self._process.communicate()
        rows = [line.split() for line in out.splitlines()]
        return [float(ms) for _, ms in rows], sum(status != "200" for status, _ in rows)


def held_by(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return {name: float(line.split()[-1]) for name in HELD for line in lines if line.startswith(f"{name}{{")}


def until_idle(url: str) -> dict[str, float]:
    """What the router holds when it holds nothing, or after a while."""
    end = time.monotonic() + IDLE_S
    while any((held := held_by(url)).values()) and time.monotonic() < end:
        time.sleep(0.1)
    return held


def run(load: Load, disconnects: int, seed: int, flags: list[str]) -> Outcome:
    import uvloop

    raise_fd_limit()
    server = Server(["--null_worker", *flags])
    try:
        url = server.wait_until_ready()
        probe = HealthProbe(url)
        begin = time.perf_counter()
        ends = uvloop.run(run_clients(url, load, disconnects, seed))
        seconds = time.perf_counter() - begin
        return Outcome(ends, seconds, *probe.end(), until_idle(url))
    finally:
        server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="requests sent at once that wait for their response")
    parser.add_argument("--disconnects", type=int, default=500, help="further requests, whose clients disconnect early")
    parser.add_argument("--tokens", type=int, default=16, help="output tokens per request")
    parser.add_argument("--seed", type=int, default=0, help="seed of when clients disconnect")
    args, flags = parser.parse_known_args()
    outcome = run(Load("completions", args.requests, 1, args.tokens), args.disconnects, args.seed, flags)
    print(outcome)
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())
