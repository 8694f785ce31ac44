"""Time that the prefix cache saves: the same requests with it and without it, over HTTP, on the default model.

    python -m benchmark.engine.prefix_cache --runs 3

There are two loads: requests sent at once that share a system prompt, and a chat with several turns. The table has the
prompt tokens that the server computed and the seconds of the run of the median time; runs with and without the cache
alternate. Other flags go to the server.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmark.serving.server import Server

RESPONSE_S = 600.0
SENTENCE = "The quick brown fox jumps over the lazy dog near the old bridge. "  # 14 tokens of most vocabularies
TOKENS_OF_SENTENCE = 14

Message = dict[str, str]


@dataclass(slots=True)
class Cost:
    """Of one run of a load."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class Client:
    """Sends requests with the same options, and adds up their prompt and cached tokens."""

    def __init__(self, url: str, new_tokens: int, options: dict[str, Any]) -> None:
        self.cost = Cost()
        self._url = url
        self._options = {"max_tokens": new_tokens, "ignore_eos": True, "temperature": 0, **options}

    def send(self, messages: list[Message]) -> Message:
        """Send a chat; the response as its next message."""
        raw = json.dumps({"messages": messages, **self._options}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/v1/chat/completions", raw, headers)
        with urllib.request.urlopen(request, timeout=RESPONSE_S) as response:
            completion = json.load(response)
        self.cost.prompt_tokens += completion["usage"]["prompt_tokens"]
        self.cost.cached_tokens += completion["usage"]["prompt_tokens_details"]["cached_tokens"]
        return {"role": "assistant", "content": completion["choices"][0]["message"]["content"]}


def system_prompt(tokens: int) -> Message:
    return {"role": "system", "content": SENTENCE * (tokens // TOKENS_OF_SENTENCE)}


def shared_prompt(client: Client, requests: int, tokens: int) -> None:
    """Sent at once, each with a question of its own."""
    system = system_prompt(tokens)
    chats = [[system, {"role": "user", "content": f"{i}: what comes next, and why?"}] for i in range(requests)]
    with ThreadPoolExecutor(requests) as pool:
        list(pool.map(client.send, chats))


def chat(client: Client, turns: int) -> None:
    messages: list[Message] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Question {turn}: {SENTENCE * 3}What happened then?"})
        messages.append(client.send(messages))


def run(url: str, new_tokens: int, options: dict[str, Any], load: Callable[[Client], None]) -> Cost:
    client = Client(url, new_tokens, options)
    begin = time.perf_counter()
    load(client)
    client.cost.seconds = time.perf_counter() - begin
    return client.cost


def measure(url: str, args: argparse.Namespace, load: Callable[[Client], None]) -> tuple[Cost, Cost]:
    """Without the cache and with it, runs alternating; the ones of the median time."""
    without, with_cache = [], []
    for _ in range(args.runs):
        without.append(run(url, args.new_tokens, {"disable_prompt_cache": True}, load))
        salt = str(time.monotonic_ns())  # nothing is left of the run before
        with_cache.append(run(url, args.new_tokens, {"cache_salt": salt}, load))
    return _median(without), _median(with_cache)


def _median(costs: list[Cost]) -> Cost:
    middle = median(cost.seconds for cost in costs)
    return min(costs, key=lambda cost: abs(cost.seconds - middle))


def row_of(name: str, without: Cost, with_cache: Cost) -> str:
    return (
        f"{name:34} {without.computed:8} {without.seconds:7.2f} s {with_cache.computed:8} {with_cache.seconds:7.2f} s "
        f"{without.seconds / with_cache.seconds:7.2f}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32, help="sent at once")
    parser.add_argument("--system", type=int, default=1000, help="tokens of the system prompt that they share")
    parser.add_argument("--turns", type=int, default=10, help="of the chat")
    parser.add_argument("--new_tokens", type=int, default=16, help="output tokens of every request")
    parser.add_argument("--runs", type=int, default=3)
    args, flags = parser.parse_known_args()
    loads: dict[str, Callable[[Client], None]] = {
        f"{args.requests} at once, {args.system} shared": lambda client: shared_prompt(
            client, args.requests, args.system
        ),
        f"a chat of {args.turns} turns": lambda client: chat(client, args.turns),
    }
    server = Server(flags)
    try:
        url = server.wait_until_ready()
        print(f"{'load':34} {'computed without':>18} {'computed with cache':>19} {'speed-up':>8}")
        for name, load in loads.items():
            print(row_of(name, *measure(url, args, load)), flush=True)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
