"""What engines behind a gateway cost against a plain server, without a model, and what CURVE costs against plain TCP.

    python -m benchmark.cluster.cluster_path --streams 64 --step_ms 10
    python -m benchmark.cluster.cluster_path --curve

The first measures a plain server, --dp 2, a gateway with one and with two engines, and HAProxy in front of gateways,
all on this machine: tokens per second, CPU time per token of each process, and the time to the first token of a request
that is alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from benchmark.serving.server import Server
from benchmark.serving.serving_path import Load, drive
from lightserve.cluster.proxy.haproxy_config import ProxySettings
from lightserve.links.keys import generate

NULL = ["--null_worker", "--null_step_ms"]
FIRST_TOKENS = 100  # requests, one after the other
MESSAGES = {"64 tokens of a step": (1000, 20_000), "a prompt of 8,000 tokens": (33_000, 1000), "1 MB": (1_000_000, 40)}


class Case(NamedTuple):
    engines: int
    gateways: int = 0  # 0: the engines are in the server's own processes
    has_proxy: bool = False


CASES = {
    "plain server": Case(1),
    "--dp 2": Case(2),
    "gateway, 1 engine": Case(1, 1),
    "gateway, 2 engines": Case(2, 1),
    "HAProxy, 1 gateway, 1 engine": Case(1, 1, True),
    "HAProxy, 2 gateways, 2 engines": Case(2, 2, True),
}


@contextlib.contextmanager
def running(case: Case, step_ms: float) -> Iterator[tuple[str, list[Server]]]:
    """The URL of a server, and all that runs for it."""
    servers: list[Server] = []
    null = [*NULL, str(step_ms)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            if case.gateways:
                generate(Path(folder) / "keys")
                keys = ["--cluster_keys", f"{folder}/keys"]
                addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(case.engines)]
                servers += [Server([*null, *keys, "--listen", one], has_http=False) for one in addresses]
                servers += [Server([*keys, "--engines", ",".join(addresses)]) for _ in range(case.gateways)]
            else:
                servers.append(Server([*null, *(["--dp", str(case.engines)] if case.engines > 1 else [])]))
            urls = [server.wait_until_ready() for server in servers]
            if case.has_proxy:
                servers.append(_start_proxy(urls[case.engines :], Path(folder)))
                urls.append(servers[-1].wait_until_ready())
            yield urls[-1], servers
        finally:
            for server in reversed(servers):
                server.stop()


def _start_proxy(urls: list[str], folder: Path) -> Server:
    settings = ProxySettings("127.0.0.1", 0, len(urls))
    (folder / "proxy.json").write_bytes(msgspec.json.encode(settings))
    (folder / "gateways.json").write_bytes(msgspec.json.encode(urls))
    return Server([str(os.getpid()), str(folder)], has_http=False, module="lightserve.cluster.proxy.main")


def measure(name: str, load: Load, step_ms: float) -> str:
    import uvloop

    with running(CASES[name], step_ms) as (url, servers):
        uvloop.run(drive(replace(load, rounds=1, tokens=load.tokens // 4), url))  # every process has met the load once
        before = _cpu_s(servers)
        seconds = uvloop.run(drive(load, url)).seconds
        after = _cpu_s(servers)
        first_ms = _first_token_ms(load, url)
    tokens = load.streams * load.rounds * load.tokens
    costs = ", ".join(f"{role} {(after[role] - before[role]) / tokens * 1e6:.1f}" for role in sorted(after))
    return f"{name}: {tokens / seconds:,.0f} tokens/s, first token {first_ms:.1f} ms; CPU us per token: {costs}"


def _first_token_ms(load: Load, url: str) -> float:
    import uvloop

    one = replace(load, streams=1, rounds=1, tokens=1)
    return statistics.median(uvloop.run(drive(one, url)).seconds for _ in range(FIRST_TOKENS)) * 1e3


def _cpu_s(servers: list[Server]) -> dict[str, float]:
    used: dict[str, float] = {}
    for server in servers:
        for name, seconds in server.cpu_s().items():
            role = name.removeprefix("ls-").partition("-")[0]
            used[role] = used.get(role, 0.0) + seconds
    return used


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def measure_curve(size: int, count: int, has_curve: bool) -> tuple[float, float]:
    """Messages per second one way, and microseconds of a round trip, between two contexts of this process."""
    server, client = (zmq.Context().socket(zmq.DEALER) for _ in range(2))
    for one in (server, client):
        one.set_hwm(0)
    if has_curve:
        server_public, server.curve_secretkey = zmq.curve_keypair()
        server.curve_server = True
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        client.curve_serverkey = server_public
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client.connect(f"tcp://127.0.0.1:{port}")
    message = bytes(size)
    trips = []
    for _ in range(min(count, 500)):
        begin = time.perf_counter()
        client.send(message)
        server.send(server.recv())
        client.recv()
        trips.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    for _ in range(count):
        client.send(message)
    for _ in range(count):
        server.recv()
    seconds = time.perf_counter() - begin
    for one in (server, client):
        one.close(linger=0)
    return count / seconds, statistics.median(trips) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curve", action="store_true", help="measure CURVE against plain TCP, and nothing else")
    parser.add_argument("--cases", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step_ms", type=float, default=0.0, help="how long a step of the null worker takes")
    args = parser.parse_args()
    if args.curve:
        for name, (size, count) in MESSAGES.items():
            for mechanism in ("plain", "CURVE"):
                rate, trip_us = measure_curve(size, count, mechanism == "CURVE")
                print(
                    f"{name}, {mechanism}: {rate:,.0f}/s, {rate * size / 1e6:,.0f} MB/s, round trip {trip_us:,.0f} us"
                )
        return
    for name in args.cases:
        print(measure(name, Load("completions", args.streams, args.rounds, args.tokens), args.step_ms), flush=True)


if __name__ == "__main__":
    main()
