"""What prefill and decode engines gain and cost, over HTTP.

    python -m benchmark.cluster.disaggregation --move --prompt 8000
    python -m benchmark.cluster.disaggregation --compare --prompt 2000 --streams 8

--move starts a prefill and a decode engine on the same device, and a gateway. It shows how long after the end of its
computation the KV of a prompt has arrived in the decode engine. --compare measures the time between two tokens of
streams beside long prompts, of one server and of a prefill engine with two decode engines. Without --model_dir the
model has the shape of Llama-3-8B and random weights. Other flags go to the engines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from benchmark.cluster.cluster_path import free_port
from benchmark.engine.kv_tiers import START_S, Streams, ask as stream, prompt, show_itl, windows
from benchmark.models import LLAMA3_8B, save_model
from benchmark.serving.server import Server
from lightserve.links.keys import generate

POOL_PROMPTS = 4  # that a KV pool holds


class Moved(NamedTuple):
    """One prompt, in milliseconds since its request arrived."""

    computed_ms: float  # the prefill engine has its last step back
    received_ms: float  # the KV is in the slots of the decode engine
    first_token_ms: float
    tokens: int  # whose KV was moved

    @property
    def beyond_ms(self) -> float:
        return self.received_ms - self.computed_ms


@contextlib.contextmanager
def engines_on_one_device(folder: Path, flags: list[str], gateway_flags: list[str], is_tcp: bool) -> Iterator[str]:
    """The URL of a gateway with a prefill and a decode engine."""
    generate(folder / "keys")
    keys = ["--cluster_keys", str(folder / "keys")]
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    kv = f"tcp://127.0.0.1:{free_port()}" if is_tcp else f"unix://{folder}/kv"
    servers: list[Server] = []
    try:
        for address, role in zip(addresses, (["prefill"], ["decode", "--kv_listen", kv]), strict=True):
            servers.append(Server([*flags, *keys, "--listen", address, "--role", *role], has_http=False))
            servers[-1].wait_until_ready(START_S)  # one after the other: each measures the free memory
        servers.append(Server([*gateway_flags, *keys, "--engines", ",".join(addresses)]))
        yield servers[-1].wait_until_ready(START_S)
    finally:
        for server in reversed(servers):
            server.stop()


def move(url: str, number: int, length: int) -> Moved:
    """Send a prompt, and look up when its KV was computed and received."""
    body = {"prompt": prompt(number, length), "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    headers = {"Content-Type": "application/json", "X-Request-Id": f"prompt-{number}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=START_S) as response:
        response.read()
    with urllib.request.urlopen(f"{url}/debug/requests/prompt-{number}", timeout=START_S) as response:
        (sequence,) = json.load(response)["sequences"]
    events: list[dict[str, Any]] = sequence["events"]
    received = next(event for event in events if event["event"] == "kv_received")
    prefills = [event for event in events if event["event"] == "prefill" and event["at_ms"] < received["at_ms"]]
    computed = max(event["at_ms"] + event["duration_ms"] for event in prefills)
    return Moved(computed, received["at_ms"], sequence["first_token_ms"], received["tokens"])


def show_moves(url: str, length: int, runs: int) -> None:
    found: list[Moved] = []
    for number in range(runs + 1):
        one = move(url, number, length)
        found.append(one)
        print(
            f"{one.tokens} tokens: computed after {one.computed_ms:.1f} ms, received {one.beyond_ms:.1f} ms later, "
            f"first token after {one.first_token_ms:.1f} ms"
        )
    beyond_ms = [one.beyond_ms for one in found[1:]]  # the first one opens connections and touches memory
    print(f"received beyond the computation: median {median(beyond_ms):.1f} ms, most {max(beyond_ms):.1f} ms")


def itl(name: str, flags: list[str], args: argparse.Namespace) -> None:
    """The time between two tokens of streams: alone, and while long prompts are computed."""
    server = Server(flags)
    try:
        url = server.wait_until_ready(START_S)
        stream(url, prompt(0, args.prompt), 2)
        with Streams(url, args.streams, args.stream_tokens) as streams:
            time.sleep(args.alone_s / 2)  # until all of them decode
            begin = time.perf_counter()
            time.sleep(args.alone_s)
            alone = (begin, time.perf_counter())
            answers = [stream(url, prompt(number, args.prompt), 2) for number in range(1, args.runs + 1)]
        alone_ms = mean(streams.gaps_ms([alone]))
        show_itl(f"{name}, alone", streams.gaps_ms([alone]), alone_ms)
        show_itl(f"{name}, beside prompts", streams.gaps_ms(windows(answers)), alone_ms)
        print(f"{name + ', TTFT of the prompts':32} {median(one.ttft_s for one in answers) * 1e3:10.1f} ms")
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", help="default: the shape of Llama-3-8B")
    parser.add_argument("--move", action="store_true", help="how long KV takes beyond its computation")
    parser.add_argument("--compare", action="store_true", help="time between two tokens beside long prompts")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of a long prompt")
    parser.add_argument("--tcp", action="store_true", help="with --move: KV over TCP instead of a unix socket")
    parser.add_argument("--step", type=int, default=512, help="tokens of a step of the prefill engine, with --move")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--stream_tokens", type=int, default=2000, help="maximum output tokens of a stream")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--alone_s", type=float, default=2.0, help="seconds in which streams run alone")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = ["--model_dir", args.model_dir or name]
        if args.model_dir is None:
            save_model(folder, None, LLAMA3_8B)
            flags += ["--load_format", "dummy"]
        if args.move:
            pool = ["--max_total_token_num", str(POOL_PROMPTS * args.prompt), "--batch_max_tokens", str(args.step)]
            with engines_on_one_device(folder, [*model, *flags, *pool], model, args.tcp) as url:
                show_moves(url, args.prompt, args.runs)
        if args.compare:
            pool_tokens = POOL_PROMPTS * args.prompt + args.streams * (args.stream_tokens + 64)
            common = [*model, *flags, "--max_total_token_num", str(pool_tokens)]
            print(f"{'time between two tokens':32} {'mean':>13} {'p99':>13} {'to alone':>8}")
            itl("one server", common, args)
            itl("1 prefill, 2 decode", [*common, "--dp", "3", "--roles", "prefill,decode,decode"], args)


if __name__ == "__main__":
    main()
